"""What builds the documentation beside zensical: formulas as MathML, docstrings as Markdown."""
