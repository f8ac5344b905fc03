"""The command that writes a page, and the same at the end of a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedmerit.cli.base import app, out


class Figures(StrEnum):
    """What figures are written as."""

    png = "png"
    pdf = "pdf"
    svg = "svg"


@app.command()
def page(
    source: Annotated[
        Path, typer.Argument(help="A run folder, or a file of reports (.json or .csv).", metavar="SOURCE")
    ],
    out_: Annotated[
        Path | None,
        typer.Option("--out", help="Where; unless given DIR/page.html, or for FILE.csv FILE.html beside it."),
    ] = None,
    pseudonyms: Annotated[
        bool, typer.Option("--pseudonyms", help="Show members as Member A, Member B, ...")
    ] = False,
    figures: Annotated[
        list[Figures] | None,
        typer.Option("--figures", help="Also the charts as files beside it; repeatable."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite what is there, even if it is no page of fedmerit.")
    ] = False,
) -> None:
    """One HTML page that anybody can open: who contributed what, how sure that is, who is paid what.

    SOURCE is a run folder, or a file of reports (.json or .csv).
    """
    from fedmerit.report.page.figures import figures as make_figures
    from fedmerit.report.page.html import NAME, check_target, facts_of, for_coordinator, render
    from fedmerit.report.page.promises import private
    from fedmerit.report.terminal import printable
    from fedmerit.storage.run_folder import write

    target = out_ or (source / NAME if source.is_dir() else source.with_suffix(".html"))
    check_target(target, force=force)
    facts = facts_of(source, pseudonyms=pseudonyms)
    if out_ is None and facts.source.book is not None and _renewed(source):
        facts = facts_of(source, pseudonyms=pseudonyms)
    write(target, render(facts).encode())
    out.print(f"wrote {target}")
    for doubt in facts.summary.doubts:
        out.print(f"WARNING: {printable(str(doubt))}")
    if facts.source.broken:
        out.print(f"WARNING: the ledger does not verify: {facts.source.broken}")
    if private(facts):
        out.print(for_coordinator(target))
    for kind in dict.fromkeys(figures or ()):
        names = []
        for name, made in make_figures(facts, kind.value):
            names.append(f"{target.stem}-{name}")
            write(target.with_name(names[-1]), made)
        out.print(f"wrote {len(names)} figures beside it: {names[0]} to {names[-1]}")


def _renewed(folder: Path) -> bool:
    """Whether score files that were older than the ledger were written anew; if not, why is printed."""
    from fedmerit.errors import StoreError
    from fedmerit.verify import renew

    try:
        done = renew(folder)
    except StoreError as error:
        out.print(f"score files were left as they are: {error}")
        return False
    if done:
        out.print(done)
    return bool(done)


def write_page(folder: Path) -> None:
    """The page of a finished run, or how to get one."""
    from fedmerit.report.page.html import page_of_run

    out.print(page_of_run(folder))
