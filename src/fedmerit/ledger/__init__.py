"""What was said, for good: a chain of signed records, and rounds, scores and money read back from it.

What is where::

    chain             records, signed and linked; copies of them
    records           rounds from records, and records of rounds
    forms             what each kind of record may say
    recorder          what a coordinator writes
    visibility        who may see what
    decisions         who is paid what
    head_log          what a member kept of it
"""
