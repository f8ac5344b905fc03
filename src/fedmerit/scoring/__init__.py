"""The arithmetic: reports -> scores -> sums over rounds -> how sure -> shares -> cents. numpy alone.

What is where::

    types, validate   Reports, Table, Scores, and what may come in
    scores            every formula that survives secure aggregation
    accumulate        over rounds, where members come and go
    ground_truth      values that need every coalition, which secure aggregation hides
    agreement         how close two vectors are
    uncertainty       intervals, pairs that can be told apart, ranks
    doubts            whether reports can be believed
    rewards           scores -> shares -> cents
    files             reports in CSV and JSON
"""
