"""The protocol between members and the coordinator, without a transport; `fedmerit.flower` carries the bytes.

The exchanges of a run. A round usually has five; the first needs ``join`` and ``advertise`` before it::

    exchange   the server sends                                  a member answers
    join       run, config, commitment of the test pool          its signature on all of it and on its address
    advertise  round and schedule                                keys for one attempt at the round
    share      everybody's keys                                  encrypted shares of its secrets
    train      the model M0, the shares                          the masked update
    check      the list of masked inputs                         its signature on that list
    unmask     everybody's signatures                            one share for every peer
    report     the integers that were summed, the round's test   its signed report, and its keys for
               slice, the next round's schedule                   the next round
    close      the ledger's last head                            its signature on it

A settled run has these before ``close``. Its ``report`` acknowledges the sum, without a test slice::

    last       only if the run ends early                        its signature on the last round
    open       the test pool, the manifest of all directions     that it accepts both
    agree      one round's direction, M0 and sum                 whether it is the gradient
    agreed     nothing                                           its signature on the manifest, or its faults
    state      t such signatures                                 its signed integers
    table      statements that do not add up, the direction      the products of its masks, its masked words
    pairs      tables of peers that contradict its own           the keys of these pairs
    settle     what it came to                                   its countersignature
"""
