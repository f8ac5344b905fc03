"""The ledger: a chain of signed records, from which a run is read back in one pass.

What is where::

    chain             signed and linked records, and copies of them
    kinds             one typed definition of each kind of record; what the first record says
    rounds            what the server states after a round, who sees what, and the fold of rounds
    account           the fold of a settlement, and what it came to, for scores, money and people
    decisions         payout decisions, made and recomputed
    run               a run, folded from the records in one pass, and the heads that members signed or stored
"""
