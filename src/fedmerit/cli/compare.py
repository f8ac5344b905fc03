"""Commands on runs that repeat each other: compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmerit.cli.base import (
    Decimal_,
    Delimiter_,
    Distinct_,
    Encoding_,
    Force_,
    PlainFormat,
    PlainFormat_,
    app,
    err,
    form_of,
    out,
    write,
)
from fedmerit.cli.score import Missing_, Score_, Utility_, counted, tell_read

if TYPE_CHECKING:
    from fedmerit.report.comparison import Comparison


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, files of reports, or the folder of `fedmerit run --repeat`.", metavar="RUN..."
        ),
    ],
    out_: Annotated[
        Path | None, typer.Option("--out", help="Also write one HTML page that anybody can open.")
    ] = None,
    format: PlainFormat_ = PlainFormat.table,
    utility: Utility_ = None,
    score: Score_ = None,
    missing: Missing_ = None,
    force: Force_ = False,
    delimiter: Delimiter_ = None,
    decimal: Decimal_ = None,
    encoding: Encoding_ = None,
    distinct: Distinct_ = None,
) -> None:
    """Print what training again changes: each member's score over runs that repeat each other.

    RUN are the folders of at least two runs with the same members, data, settings and test pool, such as
    `fedmerit run --repeat` makes; or the one folder that holds them; or files of reports. Others are refused.
    """
    from fedmerit.report.comparison import compared
    from fedmerit.report.page.html import check_target
    from fedmerit.report.terminal import print_comparison
    from fedmerit.storage.repeat_folders import runs_of

    if out_ is not None:
        check_target(out_, force=force)
    found = compared(
        runs_of(runs),
        utility=utility,
        score=score and score.value,
        missing=None if missing is None else counted(missing),
        form=form_of(delimiter, decimal, encoding, distinct),
    )
    if format is PlainFormat.table:
        print_comparison(out, found)
    else:
        write(json.dumps(found.as_dict(), indent=1, ensure_ascii=False) + "\n")
    for run in found.runs:
        tell_read(run.facts.source, out if format is PlainFormat.table else err, run.name)
    if out_ is not None:
        write_comparison(found, out_)
        (out if format is PlainFormat.table else err).print(f"wrote {out_}")


def write_comparison(found: Comparison, path: Path) -> None:
    """Write the page that compares runs."""
    from fedmerit.report.page.html import render_comparison
    from fedmerit.storage.run_folder import write as write_file

    write_file(path, render_comparison(found).encode())
