"""The command line: parse, call, print. No numerics here."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, cast

import typer
from rich.console import Console

from fedmerit import __version__
from fedmerit.errors import FedmeritError

app = typer.Typer(
    help="Who contributed what in a federation, without anyone seeing anyone's model update.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(help="Identity keys and the roster.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")

out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


class Format(StrEnum):
    """How results are printed."""

    table = "table"
    json = "json"
    csv = "csv"


class Missing(StrEnum):
    """What a missed round counts."""

    zero = "zero"
    own_mean = "own-mean"


class Summed(StrEnum):
    """Scores that can be summed over rounds."""

    alpha = "ALPHA"
    loo = "LOO"
    ioi = "IOI"
    cos = "COS"
    merit = "MERIT"


class Rule(StrEnum):
    """How scores become shares."""

    fair = "fair"
    fenced = "fenced"
    impartial = "impartial"
    equal = "equal"


class OnUndefined(StrEnum):
    """What happens where scores allow no shares."""

    refuse = "refuse"
    equal = "equal"
    zero = "zero"


Reports_ = Annotated[Path, typer.Argument(help="Reports (.json or .csv), or a run folder.", metavar="FILE")]
Utility_ = Annotated[str | None, typer.Option(help="Name of the utility, where the file does not say.")]
Missing_ = Annotated[
    Missing | None,
    typer.Option(help="What a missed round counts; as the run has it, otherwise zero.", show_default=False),
]
Score_ = Annotated[Summed, typer.Option(help="Which score is summed over rounds.", case_sensitive=False)]
Set_ = Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value, repeatable.")]


@app.command()
def score(
    file: Reports_,
    format: Annotated[Format, typer.Option(help="How to print.")] = Format.table,
    utility: Utility_ = None,
    score: Score_ = Summed.alpha,
    missing: Missing_ = None,
) -> None:
    """Scores, ranks and intervals from reports: who contributed what, and how sure that is."""
    from fedmerit.document import as_csv, as_json, document
    from fedmerit.summary import summarise
    from fedmerit.tables import print_summary

    rounds, counts = _read(file, utility), _missing(file, missing)
    if format is Format.table:
        summary = summarise(rounds, score=score.value, missing=counts)
        print_summary(out, summary, utility=rounds[0].utility)
        return
    content = document(rounds, missing=counts)
    _write(as_json(content) if format is Format.json else as_csv(content))


@app.command()
def rewards(
    file: Reports_,
    budget: Annotated[str, typer.Option(help="What is to be divided, such as 10000.00.")],
    rule: Annotated[Rule, typer.Option(help="How scores become shares.")] = Rule.fair,
    utility: Utility_ = None,
    score: Score_ = Summed.alpha,
    missing: Missing_ = None,
    floor: Annotated[float, typer.Option(help="Smallest share of anybody.")] = 0.0,
    cap: Annotated[float, typer.Option(help="Largest share of anybody.")] = 1.0,
    on_undefined: Annotated[
        OnUndefined, typer.Option(help="Where scores allow no shares.")
    ] = OnUndefined.refuse,
    format: Annotated[Format, typer.Option(help="How to print.")] = Format.table,
) -> None:
    """Payouts in exact cents from reports."""
    from fedmerit.accumulate import accumulate
    from fedmerit.money import payouts
    from fedmerit.rewards import shares
    from fedmerit.tables import print_payouts

    total = accumulate(_read(file, utility), score=score.value, missing=_missing(file, missing))
    divided = shares(total, rule.value, floor=floor, cap=cap, on_undefined=on_undefined.value)
    paid = payouts(divided, budget)
    if format is Format.table:
        print_payouts(out, paid, divided)
    elif format is Format.csv:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("client", "share", "payout"))
        writer.writerows((name, repr(divided[name]), str(amount)) for name, amount in paid.items())
        _write(text.getvalue())
    else:
        plain = {
            "budget": str(paid.budget),
            "rule": divided.rule,
            "status": divided.status,
            "unpaid": str(paid.unpaid),
            "shares": dict(divided),
            "payouts": {name: str(amount) for name, amount in paid.items()},
            "notes": list(divided.notes),
        }
        _write(json.dumps(plain, indent=1, ensure_ascii=False) + "\n")


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="Settings (TOML); an empty file is a valid run.")],
    out_: Annotated[Path, typer.Option("--out", help="The run folder.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    set_: Set_ = None,
) -> None:
    """Train a federation on this machine under secure aggregation, and score every member."""
    from fedmerit.config import load

    _run(load(config, set_ or ()), out_, resume=resume)


@app.command()
def demo(
    out_: Annotated[Path, typer.Option("--out", help="The run folder.")] = Path("runs/demo"),
    set_: Set_ = None,
) -> None:
    """Six hospitals train together on fashion-mini; one of them has noisy labels. Takes a minute."""
    from fedmerit.config import from_dict
    from fedmerit.examples import DEMO, is_demo
    from fedmerit.federation.verify import verify_folder
    from fedmerit.store import remove

    settings = from_dict(DEMO, set_ or ())
    if is_demo(out_):  # the demo starts anew each time, and touches nobody else's run
        remove(out_)
    out.print("Six hospitals, secure aggregation on. Harbour's labels are 80 % noise.")
    _run(settings, out_, resume=False)
    for line in verify_folder(out_):
        out.print(line)
    out.print(f"next: fedmerit rewards {out_} --budget 10000.00")


@app.command()
def init(path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("fedmerit.toml")) -> None:
    """Write a commented config with every setting and its default."""
    from fedmerit.examples import commented_config

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(commented_config())
    except FileExistsError:
        _fail(f"{path}: exists already and is not overwritten")
    except OSError as error:
        _fail(f"{path}: cannot be written: {error.strerror}")
    out.print(f"wrote {path}; next: fedmerit run {path} --out runs/first")


@app.command()
def verify(folder: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Check a run's ledger: chain, signatures, and that the scores follow from the reports."""
    from fedmerit.federation.verify import verify_folder

    for line in verify_folder(folder):
        out.print(line)


@keys_app.command("new")
def keys_new(
    path: Annotated[Path, typer.Argument(help="Where to write the private key (mode 600).")],
) -> None:
    """Make an identity key; prints the public key for the roster."""
    from fedmerit.keys import PREFIX, new_key

    out.print(PREFIX + new_key(path).hex())


@keys_app.command("roster")
def keys_roster(
    path: Annotated[Path, typer.Argument(help="The roster file: written from --member, or checked.")],
    member: Annotated[
        list[str] | None, typer.Option(help="NAME=ed25519:PUBLICKEY[,WEIGHT], repeatable.")
    ] = None,
) -> None:
    """Write a roster of names and public keys, or check one; prints its hash, which all members compare."""
    from fedmerit.keys import Roster, parse_member, read_roster, write_roster

    if member:
        write_roster(path, Roster(parse_member(text) for text in member))
    roster = read_roster(path)
    for one in roster.members:
        out.print(
            f"{one.name}  ed25519:{one.key.hex()}" + ("" if one.weight is None else f"  {one.weight:g}")
        )
    out.print(f"{len(roster.members)} members, roster hash {roster.hash.hex()}")


def _run(config: Any, folder: Path, *, resume: bool) -> None:
    from fedmerit.errors import MissingExtra
    from fedmerit.progress import watching
    from fedmerit.reading import read
    from fedmerit.summary import summarise
    from fedmerit.tables import print_summary

    try:
        from fedmerit.federation.embedded import run as run_embedded
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise MissingExtra("running a federation needs: pip install 'fedmerit[engine]'") from error

    with watching(err) as watch:
        run_embedded(config, folder, resume=resume, watch=watch)
    rounds = read(folder / "scores.json")
    print_summary(out, summarise(rounds, missing=config.scoring.missing), utility=rounds[0].utility)
    out.print(f"written to {folder}: scores.json, scores.csv, ledger.sqlite")


def _read(file: Path, utility: str | None) -> list[Any]:
    from fedmerit.reading import read

    return cast(list[Any], read(file / "scores.json" if file.is_dir() else file, utility=utility))


def _missing(file: Path, given: Missing | None) -> Literal["zero", "own-mean"]:
    """What was asked for, else what the run in this folder has."""
    from fedmerit.config import load

    if given is None and (file / "config.toml").is_file():
        return load(file / "config.toml").scoring.missing
    return "own-mean" if given is Missing.own_mean else "zero"


def _fail(message: str) -> NoReturn:
    raise FedmeritError(message) from None


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Who contributed what in a federation, without anyone seeing anyone's model update."""
    if show:
        out.print(f"fedmerit {__version__}")
        raise typer.Exit


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    try:
        yield
    except (FedmeritError, OSError) as error:
        from fedmerit.tables import printable

        err.print("error: " + printable(" ".join(str(error).split("\n"))))
        raise SystemExit(2) from None


def _write(text: str) -> None:
    """What programs read is UTF-8, whatever the terminal is."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(text)


def main() -> None:
    """Entry point: our own errors become one line and exit code 2."""
    import numpy as np

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with _errors_as_messages(), np.errstate(all="ignore"):  # what is not finite is refused where it matters
        app()
