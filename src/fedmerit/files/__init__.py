"""Files in and out: tables of text, reports in CSV and JSON, documents of scores.

Its modules::

    sheets       tables of text in every form that spreadsheet programs write
    workbooks    the same from workbooks (.xlsx), and tables written as such
    reports      reports read from a table or a JSON file, and a template to fill in
    documents    all that follows from reports, as JSON and CSV; scores as frames and in notebooks
"""
