"""Extensions that build the documentation with zensical: formulas as MathML, docstrings as Markdown."""
