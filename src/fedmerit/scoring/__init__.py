"""The arithmetic: reports -> scores -> sums over rounds -> uncertainty -> shares -> cents. Needs only numpy.

Its modules::

    types             Reports, Table, Scores, and the checks of what goes into them
    scores            every formula that works under secure aggregation, and PHI along a public direction
    accumulate        scores summed over rounds, while members come and go, and how their order settled
    ground_truth      values that need every coalition, and how close scores come to them
    sampling          what test samples tell: standard errors, sketches of them, how many are needed
    uncertainty       intervals, significant differences between pairs, ranks; what another training changes
    doubts            whether reports can be believed
    rewards           scores -> shares, the rule "fenced", and how sure shares and amounts are
    panel             members who judge each other: who helped whom, and the rule "hands"
    amounts           money as people write it, and a budget divided to the cent
"""
