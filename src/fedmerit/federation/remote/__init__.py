"""The protocol between machines, without a transport: what a member and a coordinator say and keep.

`wire` (what is said) -> `member` and `keeping` (one member, which may be a new process for every message) ->
`coordinator` and `books` (the server). An adapter such as `fedmerit.flower` only carries the bytes.

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
