"""What all commands share: the app, the two consoles, and how errors and output are printed."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer
from rich.console import Console
from typer.core import TyperArgument, TyperCommand, TyperGroup

from fedmerit.config import VERSION
from fedmerit.errors import FedmeritError
from fedmerit.notes import nearest

if TYPE_CHECKING:
    from fedmerit.heading import Heading
    from fedmerit.scoring.spreadsheets import SheetForm

WORK = {
    "Begin": ("demo", "doctor", "init", "plan", "run"),
    "Who contributed what": ("score", "compare", "rewards", "page", "track"),
    "The record": ("verify", "export"),
    "Members on their own machines": ("keys", "member", "settle"),
}
"""The commands in the order of the work, by heading; `fedmerit --help` shows them so."""
READING = frozenset({"doctor", "plan", "score", "show", "verify"})
"""Commands that write no file."""


class Commands(TyperGroup):
    """Commands in the order of the work. Their texts explain the arguments, under the names people see."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; after Ctrl-C, say in one line what it leaves and what to do, with exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            reads = ctx.invoked_subcommand in READING
            left = "this command writes nothing" if reads else "files are written whole or not at all"
            err.print(f"stopped: {left}; start it again")
            raise typer.Exit(130) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of the work."""
        order = [name for names in WORK.values() for name in names]
        return sorted(self.commands, key=lambda name: order.index(name) if name in order else len(order))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return a command under its heading, without a list of its arguments by their names in code."""
        found = super().get_command(ctx, name)
        if isinstance(found, TyperCommand | TyperGroup):
            headings = [heading for heading, names in WORK.items() if name in names]
            if ctx.parent is None and headings:
                found.rich_help_panel = headings[0]
            for one in found.params:
                if isinstance(one, TyperArgument):
                    one.hidden = True
            if found.help:  # lines as wide as the terminal, not as in the code
                found.help = "\n\n".join(" ".join(part.split()) for part in found.help.split("\n\n"))
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command; of one that does not exist, ask once which one was meant."""
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            near = nearest(name, self.list_commands(ctx))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near!r}?" if near else ""))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Commands,
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
    str | None,
    typer.Option(help="Title of page, decision and statements.", show_default="as in the settings"),
]
Consortium_ = Annotated[
    str | None, typer.Option(help="Who trains together.", show_default="as in the settings")
]
Date_ = Annotated[
    str | None, typer.Option(help="A day such as 2026-11-30.", show_default="as in the settings")
]
Currency_ = Annotated[
    str | None,
    typer.Option(help="A code such as EUR, or a sign such as $.", show_default="as in the settings"),
]
Language_ = Annotated[
    Language | None,
    typer.Option(help="Of page and statements.", show_default="as in the settings"),
]


def heading_of(title: str | None, consortium: str | None, date: str | None, currency: str | None) -> Heading:
    """Return what the options say about title, consortium, date and currency."""
    from fedmerit.errors import InputError
    from fedmerit.heading import Heading

    if currency and currency.isascii():  # as in an amount, such as 100 eur
        currency = currency.upper()
    try:
        return Heading(title or "", consortium or "", date or "", currency or "")
    except InputError as error:
        fail(f"--{error}")


class PlainFormat(StrEnum):
    """Output formats of what is no table of scores: for people, or for programs (docs/json.md)."""

    table = "table"
    json = "json"


PlainFormat_ = Annotated[PlainFormat, typer.Option("--format", help="How to print.")]
Force_ = Annotated[
    bool,
    typer.Option("--force", help="Overwrite any file that is there, even if fedmerit did not write it."),
]
Set_ = Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value, repeatable.")]

Delimiter_ = Annotated[
    str | None,
    typer.Option(
        help="What separates the cells of a CSV file: comma, semicolon, tab or bar.",
        show_default="found out from the file",
    ),
]
Decimal_ = Annotated[
    str | None,
    typer.Option(
        help="The decimal mark in a CSV file: point or comma.",
        show_default="found out from the file",
    ),
]
Encoding_ = Annotated[
    str | None,
    typer.Option(
        help="How a CSV file encodes letters, such as latin-1.",
        show_default="found out from the file",
    ),
]
_SIGNS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "point": "."}


Distinct_ = Annotated[
    list[str] | None,
    typer.Option(
        help="A name that looks like another one in the file and is a member of its own; repeatable.",
        metavar="NAME",
    ),
]


def form_of(
    delimiter: str | None, decimal: str | None, encoding: str | None, distinct: Sequence[str] | None = None
) -> SheetForm:
    """Return what options say of a file: how a CSV file is written, by name or by sign, and who is who."""
    from fedmerit.scoring.spreadsheets import SheetForm

    marks = _SIGNS.get(delimiter or "", delimiter), _SIGNS.get(decimal or "", decimal)
    return SheetForm(*marks, encoding, tuple(distinct or ()))


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

        said = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            said = f"{error.filename}: {error.strerror}"
        err.print("error: " + printable(" ".join(said.split("\n"))))
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before a command began
        err.print("stopped before anything began; start it again")
        raise SystemExit(130) from None


def fail(message: str) -> NoReturn:
    """Stop with a message and exit code 2."""
    raise FedmeritError(message) from None


def write(text: str) -> None:
    """Write text for programs to standard output, as UTF-8 whatever the terminal uses."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(text)
