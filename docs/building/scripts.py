"""Show a script as a page: comments at the left margin become prose, the lines between them become code.

The script replaces a line ``<!-- script: PATH -->``. PATH is relative to the root of the repository.
"""

from __future__ import annotations

import ast
import re
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

if TYPE_CHECKING:
    from markdown import Markdown

ROOT = Path(__file__).resolve().parent.parent.parent
LINE = re.compile(r"<!-- script: (\S+) -->")


class Scripts(Preprocessor):
    """Insert scripts where a page asks for them."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the page with its scripts inserted."""
        found: list[str] = []
        for line in lines:
            asked = LINE.fullmatch(line.strip())
            found += as_page((ROOT / asked[1]).read_text(encoding="utf-8")) if asked else [line]
        return found


def as_page(script: str) -> list[str]:
    """Return a script as lines of Markdown."""
    start = ast.parse(script).body[0].end_lineno or 0  # its docstring is for those who open the file
    page: list[str] = []
    for prose, part in groupby(script.splitlines()[start:], lambda line: line.startswith("#")):
        text = "\n".join(part).strip("\n")
        if prose:
            page += ["", *(line[2:] for line in text.splitlines()), ""]
        elif text:
            page += ["```python", *text.splitlines(), "```"]
    return page


class ScriptsExtension(Extension):
    """The Markdown extension."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the preprocessor before anything looks for code."""
        md.preprocessors.register(Scripts(md), "scripts", 60)


def makeExtension(**kwargs: object) -> ScriptsExtension:
    """Return the extension; Markdown looks for this name."""
    return ScriptsExtension(**kwargs)
