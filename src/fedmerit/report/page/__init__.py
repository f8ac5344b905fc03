"""One self-contained HTML page, and figures, of a run or a file of reports (extra ``page``).

``source`` reads the input, ``facts`` computes, ``text`` and ``promises`` word it, ``charts`` draws it, and
``html`` assembles the page and writes it beside a run's scores.
"""
