"""Convert docstrings to Markdown: the source writes formulas, roles and examples in reStructuredText."""

from __future__ import annotations

import re
from typing import Any

import griffe

MATH = re.compile(r"^( *)\.\. math::(?P<first>.*)\n(?P<rest>(?:(?:\1 +.*)?\n)*)", flags=re.MULTILINE)
EXAMPLE = re.compile(r"^>>> .*\n(?:.+\n)*", flags=re.MULTILINE)
ROLE = re.compile(r":(?:func|class|meth|mod|data):`~?([\w.]+)`")


class Docstrings(griffe.Extension):
    """Convert reStructuredText markup in docstrings to Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of a module, class, function or attribute, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """Return one docstring as Markdown."""
    text = MATH.sub(_displayed, text + "\n")
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = ROLE.sub(lambda found: f"`{found[1].removeprefix('fedmerit.')}`", text)
    text = re.sub(r"^::\n", "", text, flags=re.MULTILINE)  # a block of code that no sentence introduces
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE).replace("``", "`")
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}```\n", text).strip()


def _displayed(found: re.Match[str]) -> str:
    formula = " ".join((found["first"] + " " + found["rest"]).split())
    return f"{found[1]}\n{found[1]}$${formula}$$\n\n"
