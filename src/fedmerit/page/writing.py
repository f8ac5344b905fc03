"""The page at the end of a run, where what it needs is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fedmerit.store import write

NAME = "page.html"


def page_of_run(folder: Path) -> str:
    """Write a finished run's page beside its scores; says where it is, or how to get one."""
    if any(find_spec(name) is None for name in ("altair", "jinja2", "vl_convert")):
        return f"for a page that anybody can open: pip install 'fedmerit[page]', then fedmerit page {folder}"
    from fedmerit.page.html import page

    write(folder / NAME, page(folder).encode())
    return f"for everybody else: open {folder / NAME} in a browser"
