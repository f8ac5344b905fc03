"""A finished run, or a file of reports -> one self-contained HTML page and figures (extra ``page``).

``source`` reads, ``facts`` computes, ``text`` and ``promises`` say it, ``charts`` draws it, ``html`` puts it
together and leaves it beside a run's scores.
"""
