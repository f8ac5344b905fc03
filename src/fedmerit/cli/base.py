"""What all commands share: the app, the two consoles, and how errors and output are printed."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import click
import typer
from rich.console import Console
from typer import Option
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from fedmerit.config import VERSION
from fedmerit.errors import FedmeritError
from fedmerit.notes import nearest

if TYPE_CHECKING:
    from fedmerit.files.sheets import SheetForm
    from fedmerit.settings import Heading

WORK = {
    "Begin": ("demo", "doctor", "init", "plan", "run"),
    "Who contributed what": ("score", "compare", "rewards", "approve", "page"),
    "The record": ("verify", "export"),
    "Members on their own machines": ("keys", "member", "settle"),
}
"""The commands in the order of the work, by heading; `fedmerit --help` shows them so."""
READING = frozenset({"doctor", "plan", "score", "show", "verify"})
"""Commands that write no file."""


class Commands(TyperGroup):
    """Commands in the order of the work. Their texts explain the arguments, under the names people see."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, found in self.commands.items():
            if isinstance(found, TyperCommand | TyperGroup):
                headings = (heading for heading, names in WORK.items() if name in names)
                found.rich_help_panel = next(headings, None)
            for one in found.params:
                if isinstance(one, TyperArgument):
                    one.hidden = True
            if isinstance(found, TyperCommand):
                found.params += [*(FORM if name in READS_TABLES else ()), QUIET]
            if found.help:  # lines as wide as the terminal, not as in the code
                found.help = "\n\n".join(" ".join(part.split()) for part in found.help.split("\n\n"))

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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return a command; of one that does not exist, ask once which one was meant."""
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            near = nearest(name, self.list_commands(ctx))
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {near!r}?" if near else ""))
        return super().resolve_command(ctx, args)


# ------------------------------------------------------------------------- options of more than one command


def _hush(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Leave notes and progress out while this command runs."""
    if value:
        from fedmerit.report.terminal import quiet

        before = quiet.set(True)
        ctx.call_on_close(lambda: quiet.reset(before))


QUIET = TyperOption(
    param_decls=["-q", "--quiet"], is_flag=True, expose_value=False, callback=_hush,
    help="Print no notes and no progress; warnings, errors and results are still printed.",
)  # fmt: skip
"""An option of every command."""


def _keep(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    """Keep what is said of a file for `form_of`."""
    ctx.meta[f"form.{option.name}"] = value


FORM = [
    TyperOption(param_decls=[f"--{name}"], help=text, show_default=usual, expose_value=False, callback=_keep)
    for name, text, usual in (
        ("delimiter", "What separates the cells of a CSV file: comma, semicolon, tab or bar.", "detected"),
        ("decimal", "The decimal mark in a table: point or comma.", "detected"),
        ("encoding", "Encoding of a CSV file, such as latin-1.", "detected"),
        ("sheet", "The sheet of a workbook to read.", "the one with the columns"),
    )
]
FORM.append(
    TyperOption(
        param_decls=["--distinct"], multiple=True, expose_value=False, callback=_keep, metavar="NAME",
        help="A name that resembles another one in the file but is a different member; repeatable.",
    )
)  # fmt: skip
"""What people may say of a table, in every command that reads one."""
READS_TABLES = ("score", "compare", "rewards", "page")


def form_of(delimiter: str | None = None) -> SheetForm:
    """Return what the options of this command say of a file: how it is written, and who is who."""
    from fedmerit.files.sheets import SheetForm

    said = click.get_current_context().meta
    delimiter, decimal = delimiter or said.get("form.delimiter"), said.get("form.decimal")
    return SheetForm(
        _SIGNS.get(delimiter or "", delimiter), _SIGNS.get(decimal or "", decimal),
        said.get("form.encoding"), said.get("form.sheet"), tuple(said.get("form.distinct") or ()),
    )  # fmt: skip


_SIGNS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "point": "."}

app = typer.Typer(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Who contributed what in a federation, without anyone seeing anyone's model update.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


Title = Annotated[
    str | None, Option(help="Title of page, decision and statements.", show_default="as in the settings")
]
Date = Annotated[str | None, Option(help="A day such as 2026-11-30.", show_default="that of the decision")]
Currency = Annotated[
    str | None, Option(help="A code such as EUR, or a sign such as $.", show_default="as in the settings")
]
Language = Annotated[
    Literal["en", "de"] | None, Option(help="Of page, statements and workbook.", show_default="en")
]


def heading_of(currency: str | None, **parts: str | None) -> Heading:
    """Return what the options say about title, date, currency, contact and the last day for objections."""
    from fedmerit.errors import InputError
    from fedmerit.settings import Heading

    if currency and currency.isascii():  # as in an amount, such as 100 eur
        currency = currency.upper()
    try:
        return Heading(currency=currency or "", **{name: text or "" for name, text in parts.items()})
    except InputError as error:
        fail(f"--{error}")


PlainFormat = Annotated[Literal["table", "json"], Option("--format", help="Output format.")]
Force = Annotated[
    bool, Option("--force", help="Overwrite any file that is there, even if fedmerit did not write it.")
]
Set = Annotated[list[str] | None, Option("--set", help="Override: section.key=value, repeatable.")]


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
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
        err.print("error: " + printable(" ".join(said.split("\n"))), style="red")
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before a command began
        err.print("stopped before anything began; start it again")
        raise SystemExit(130) from None


@contextmanager
def on_disk(path: Path) -> Iterator[Path]:
    """Yield a path as it is; of "-", that of a file with what is on standard input."""
    if str(path) != "-":
        yield path
        return
    from fedmerit.files.sheets import LARGEST

    with TemporaryDirectory() as home:
        data = sys.stdin.buffer.read(LARGEST + 1)
        ending = ".xlsx" if data[:2] == b"PK" else ".json" if data.lstrip()[:1] in (b"{", b"[") else ".csv"
        file = Path(home) / f"standard-input{ending}"
        file.write_bytes(data)
        try:
            yield file
        except FedmeritError as error:
            error.args = (str(error.args[0]).replace(str(file), "standard input"), *error.args[1:])
            raise


def fail(message: str) -> NoReturn:
    """Stop with a message and exit code 2."""
    raise FedmeritError(message) from None


def write_json(content: Mapping[str, Any]) -> None:
    """Write an object for programs to standard output."""
    write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write(text: str) -> None:
    """Write text for programs to standard output, as UTF-8 whatever the terminal uses."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(text)
