"""Make parts of pages when the site is built: promises and their tests, errors, settings, findings.

A line ``<!-- table: NAME -->`` becomes the part. They are made from docs/promises.toml, docs/errors.toml,
errors.py, config.py and experiments/FINDINGS.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

from fedmerit import config, errors

if TYPE_CHECKING:
    from markdown import Markdown

DOCS = Path(__file__).resolve().parent.parent
LINE = re.compile(r"<!-- table: (\w+) -->")


class Tables(Preprocessor):
    """Make tables where a page asks for them."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the page with its tables made."""
        return filled("\n".join(lines)).split("\n")


def filled(page: str) -> str:
    """Return a page with its tables."""
    return LINE.sub(lambda asked: MADE[asked[1]](), page)


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    """Return rows as a Markdown table under this head."""
    cells = head.split(" | ")
    lines = [head, " | ".join("---" for _ in cells), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def promises() -> str:
    """Return a table of promises and the tests that show them for every part of the protocol."""
    parts = []
    for title, listed in tomllib.loads((DOCS / "promises.toml").read_text(encoding="utf-8")).items():
        rows, before = [], ""
        for one in listed:
            against = "" if one["against"] == before else one["against"]
            before = one["against"]
            tests = ", ".join(f"`{name}`" for name in one["tests"])
            rows.append((against, one["promise"] + (" †" if one.get("twin") else ""), tests))
        parts += [f"## {title}", table("against | promise | tests", rows)]
    return "\n\n".join(parts)


def classes() -> dict[str, type[Exception]]:
    """Return every class of errors.py by name, in the order of that file."""
    tree = ast.parse(inspect.getsource(errors))
    return {node.name: getattr(errors, node.name) for node in tree.body if isinstance(node, ast.ClassDef)}


def index_of_errors() -> str:
    """Return the index of errors: classes, then the codes of those that have some."""
    told = tomllib.loads((DOCS / "errors.toml").read_text(encoding="utf-8"))
    rows = [
        (f"`{name}`", (inspect.getdoc(one) or "").splitlines()[0].replace("``", "`"), told["classes"][name])
        for name, one in classes().items()
    ]
    parts = [table("class | meaning | what to do", rows)]
    for name, codes in told["codes"].items():
        lines = [(f"`{code}`", *what) for code, what in codes.items()]
        parts += [f"## Codes of {name}", table("code | meaning | what to do", lines)]
    return "\n\n".join(parts)


def value(given: Any) -> str:
    """Return a default as it is written in TOML."""
    return json.dumps(list(given) if isinstance(given, tuple) else given, ensure_ascii=False)


def choices(hint: Any) -> list[str]:
    """Return the values that a setting may have, if its type names them."""
    return re.findall(r"'([\w-]+)'", str(hint)) if "Literal" in str(hint) else []


def settings() -> str:
    """Return the table of all settings with their defaults."""
    parts = []
    plain = config.Config()
    for section in config.SECTIONS:
        part = getattr(plain, section)
        rows = []
        for item in dataclasses.fields(part):
            allowed = choices(item.type)
            told = [allowed and f"one of {', '.join(allowed)}", item.metadata["beside"]]
            above = item.metadata["above"]
            text = ". ".join(filter(None, [above.removesuffix("."), "; ".join(filter(None, told))]))
            text = text.replace("|", "\\|")
            rows.append((f"`{item.name}`", f"`{value(getattr(part, item.name))}`", text))
        parts += [f"## [{section}]", table("setting | default | meaning", rows)]
    return "\n\n".join(parts)


def findings() -> str:
    """Return the numbered answers of the findings, without what supports them."""
    text = (DOCS.parent / "experiments" / "FINDINGS.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^(\d\. .*?)\n(?=   - |\d\. |\n)", text, flags=re.DOTALL | re.MULTILINE))


MADE = {"promises": promises, "errors": index_of_errors, "settings": settings, "findings": findings}
"""The parts, and what makes each of them."""


class Made(Extension):
    """The Markdown extension."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the preprocessor first: what it makes is Markdown like the rest."""
        md.preprocessors.register(Tables(md), "tables", 101)


def makeExtension(**kwargs: object) -> Made:
    """Return the extension; Markdown looks for this name."""
    return Made(**kwargs)
