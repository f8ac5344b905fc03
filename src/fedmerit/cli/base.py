"""What all commands share: the app, the two consoles, and how errors and output are printed."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from fedmerit.config import VERSION
from fedmerit.errors import FedmeritError

if TYPE_CHECKING:
    from fedmerit.heading import Heading

app = typer.Typer(
    help="Who contributed what in a federation, without anyone seeing anyone's model update.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


class Language(StrEnum):
    """Languages of pages and statements."""

    en = "en"
    de = "de"


Title_ = Annotated[
    str | None, typer.Option(help="Title of page, decision and statements [default: as in the settings].")
]
Consortium_ = Annotated[str | None, typer.Option(help="Who trains together [default: as in the settings].")]
Date_ = Annotated[str | None, typer.Option(help="A day such as 2026-11-30 [default: as in the settings].")]
Currency_ = Annotated[
    str | None, typer.Option(help="A code such as EUR, or a sign such as $ [default: as in the settings].")
]
Language_ = Annotated[
    Language | None,
    typer.Option(help="Of page and statements [default: as in the settings].", show_default=False),
]


def heading_of(title: str | None, consortium: str | None, date: str | None, currency: str | None) -> Heading:
    """Return what the options say about title, consortium, date and currency."""
    from fedmerit.errors import InputError
    from fedmerit.heading import Heading

    try:
        return Heading(title or "", consortium or "", date or "", currency or "")
    except InputError as error:
        fail(f"--{error}")


Set_ = Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value, repeatable.")]


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
