"""The ledger: a chain of signed records, from which rounds, scores and payouts are read back.

What is where::

    chain             signed and linked records, and copies of them
    records           rounds as records, scores recomputed from them, and who may see what
    forms             which fields each kind of record has, and what they must fit
    recorder          what a coordinator writes
    settled           a settlement as records, with every number recomputed
    account           what a settlement came to, for scores, money and people
    decisions         payout decisions
    joined_runs       runs that follow each other, counted as one
    head_log          the heads that members signed or stored
"""
