"""A finished run, or a file of reports -> one self-contained HTML page and figures (extra ``page``).

``source`` reads, ``facts`` computes, ``words`` says it, ``charts`` draws it, ``html`` puts it together,
``writing`` leaves it beside a run's scores.
"""
