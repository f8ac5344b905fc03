"""The arithmetic: reports -> scores -> sums over rounds -> uncertainty -> shares -> cents. Needs only numpy.

Its modules::

    types, validate   Reports, Table, Scores, and the checks of what goes into them
    scores            every formula that works under secure aggregation, and PHI along a public direction
    accumulate        scores summed over rounds, while members come and go
    ground_truth      values that need every coalition, which secure aggregation hides
    agreement         how close two vectors are
    uncertainty       intervals, significant differences between pairs, ranks
    doubts            whether reports can be believed
    rewards           scores -> shares -> cents
    fence             the rule "fenced", and how far stated errors count
    share_intervals   how sure shares and amounts are, and which ties are paid apart
    amounts           numbers and amounts of money as people write them
    spreadsheets      tables of text in every form that spreadsheet programs write
    tidy              reports in such a table
    files             reports in CSV and JSON
"""
