"""One self-contained HTML page of a run or a file of reports (extra ``page``).

``text`` words the facts of a run, ``charts`` draws them, and ``html`` assembles the page and writes it beside
a run's scores.
"""
