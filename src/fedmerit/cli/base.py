"""What all commands share: the app, the two consoles, and how errors and output are printed."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from fedmerit.config import VERSION
from fedmerit.errors import FedmeritError

if TYPE_CHECKING:
    from fedmerit.scoring.spreadsheets import SheetForm

app = typer.Typer(
    help="Who contributed what in a federation, without anyone seeing anyone's model update.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)

Set_ = Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value, repeatable.")]

Delimiter_ = Annotated[
    str | None,
    typer.Option(
        help="What separates the cells of a CSV file: comma, semicolon, tab or bar "
        "[default: found out from the file].",
        show_default=False,
    ),
]
Decimal_ = Annotated[
    str | None,
    typer.Option(
        help="The decimal mark in a CSV file: point or comma [default: found out from the file].",
        show_default=False,
    ),
]
Encoding_ = Annotated[
    str | None,
    typer.Option(
        help="How a CSV file encodes letters, such as latin-1 [default: found out from the file].",
        show_default=False,
    ),
]
_SIGNS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "point": "."}


def form_of(delimiter: str | None, decimal: str | None, encoding: str | None) -> SheetForm:
    """Return how a CSV file is written, as far as options say so, by name or by sign."""
    from fedmerit.scoring.spreadsheets import SheetForm

    return SheetForm(_SIGNS.get(delimiter or "", delimiter), _SIGNS.get(decimal or "", decimal), encoding)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Who contributed what in a federation, without anyone seeing anyone's model update."""
    if show:
        out.print(f"fedmerit {VERSION}")
        raise typer.Exit


@contextmanager
def errors_as_messages() -> Iterator[None]:
    try:
        yield
    except (FedmeritError, OSError) as error:
        from fedmerit.report.text import printable

        err.print("error: " + printable(" ".join(str(error).split("\n"))))
        raise SystemExit(2) from None


def fail(message: str) -> NoReturn:
    """Stop with a message and exit code 2."""
    raise FedmeritError(message) from None


def write(text: str) -> None:
    """Write text for programs to standard output, as UTF-8 whatever the terminal uses."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(text)
