"""The page beside a run's scores, where what it needs is installed: after the run, and after a decision."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fedmerit.errors import FedmeritError, StoreError
from fedmerit.page.promises import private
from fedmerit.store import write

NAME = "page.html"
OURS = "<p>Made by fedmerit "
"""Every page has it."""
HIDDEN = '<p class="quiet">Members are shown under pseudonyms'
"""A page without names has it; no name can hold it, because names are escaped."""


def page_of_run(folder: Path) -> str:
    """Write a finished run's page beside its scores; says where it is, or how to get one, or why not."""
    if not _installed():
        return f"for a page that anybody can open: pip install 'fedmerit[page]', then fedmerit page {folder}"
    from fedmerit.page.html import facts_of, render

    try:
        facts = facts_of(folder)
    except StoreError as error:  # no round is scored
        return f"no page: {error}"
    write(folder / NAME, render(facts).encode())
    if private(facts):
        return for_coordinator(folder / NAME)
    return f"for everybody else: open {folder / NAME} in a browser"


def for_coordinator(path: Path) -> str:
    """Whom a page is for where members see their own numbers only."""
    return (
        f"{path} shows everybody's numbers: it is for the coordinator alone; a member gets its own statement "
        "(fedmerit rewards) and its own copy of the ledger (fedmerit export --for NAME)"
    )


def refreshed(folder: Path) -> str:
    """Write the page beside a run's scores anew, where there is one; says what was done, if anything."""
    path = folder / NAME
    if not path.is_file():
        return ""
    there = path.read_text(encoding="utf-8", errors="replace")
    if OURS not in there:
        return f"{path} is no page of fedmerit and was left as it is"
    if not _installed():
        return f"{path} is from before this: pip install 'fedmerit[page]', then fedmerit page {folder}"
    from fedmerit.page.html import page

    try:
        write(path, page(folder, pseudonyms=HIDDEN in there).encode())
    except (FedmeritError, OSError) as error:
        return f"{path} is from before this, and could not be written anew: {error}"
    return f"{path} shows it"


def check_target(path: Path, *, force: bool) -> None:
    """Refuse to write a page where there is no folder, or over something that is none of ours."""
    if not path.parent.is_dir():
        raise StoreError(f"{path}: could not be written: there is no folder {path.parent}")
    if path.exists() and not force and OURS not in path.read_text(encoding="utf-8", errors="replace"):
        raise StoreError(f"{path}: exists, and is no page of fedmerit: --out another file, or --force")


def _installed() -> bool:
    return all(find_spec(name) is not None for name in ("altair", "jinja2", "vl_convert"))
