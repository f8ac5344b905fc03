"""What member and coordinator say to each other, without a transport: `fedmerit.flower` carries the bytes.

What is where::

    messages      what is said: outcomes, reports, requests, as bounded bytes
    terms         what a member agrees to when it joins, and what it does not
    pool          the committed test pool, and the slices that are shown of it
    measure       the two models that only a member can build, and what it says about them
    member        one member, which may be a new process for every message
    coordinator   the server's rounds

THE EXCHANGES of a run. A steady round has five; the first needs ``join`` and ``advertise`` before it::

    exchange   the server sends                                  a member answers
    join       run, config, commitment of the test pool          its signature on all of it and on its address
    advertise  round and schedule                                keys for one attempt at the round
    share      everybody's keys                                  encrypted shares of its secrets
    train      the model M0, the shares                          the masked update
    check      the list of masked inputs                         its signature on that list
    unmask     everybody's signatures                            one share for every peer
    report     M, the total weight, the round's test slice,      its signed report, and its keys for
               the next round's schedule                          the next round
    close      the ledger's last head                            its signature on it
"""
