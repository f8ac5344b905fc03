"""Commands on a federation in one process: run, demo, init, plan, track; and the page of a run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedmerit.cli import Set_, advised, app, err, fail, out
from fedmerit.config import Config, of_folder
from fedmerit.errors import ConfigError

# ------------------------------------------------------------------------------------------------ the page


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
    from fedmerit.report.page.html import NAME, check_target, facts_of, for_coordinator, render
    from fedmerit.report.page.html import figures as make_figures
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


# ----------------------------------------------------------------------------- a federation in one process


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="Settings (TOML); an empty file is a valid run.")],
    out_: Annotated[Path, typer.Option("--out", help="The run folder.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    set_: Set_ = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Curves to tensorboard:DIR or mlflow:URI, repeatable.")
    ] = None,
) -> None:
    """Train a federation on this machine under secure aggregation, and score every member.

    CONFIG is a file of settings (TOML); an empty one is a valid run. `fedmerit init` writes one.
    """
    from fedmerit.config import load

    settings = load(config, set_ or ())
    with _settings_of(config, set_ or ()):
        _run(settings, out_, resume=resume, track=track or ())


@app.command()
def demo(
    out_: Annotated[Path, typer.Option("--out", help="The run folder.")] = Path("runs/demo"),
    set_: Set_ = None,
) -> None:
    """Six hospitals train together on fashion-mini; one of them has noisy labels. Takes a minute."""
    from fedmerit.config import from_dict
    from fedmerit.storage.run_folder import remove
    from fedmerit.verify import verify_folder

    settings = from_dict(DEMO, set_ or ())
    if is_demo(out_):  # the demo starts anew each time, and touches nobody else's run
        remove(out_)
    out.print("Six hospitals, secure aggregation on. Harbour's labels are 80 % noise.")
    _run(settings, out_, resume=False)
    for line in verify_folder(out_):
        out.print(line)
    out.print(f"next: fedmerit rewards {out_} --budget 10000.00")


@app.command()
def init(path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("fedmerit.config")) -> None:
    """Write a commented config with every setting and its default.

    PATH is the file to write, fedmerit.config unless given. A file that is there is not overwritten.
    """

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(commented_config())
    except FileExistsError:
        fail(f"{path}: exists already and is not overwritten")
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror}")
    out.print(f"wrote {path}; next: fedmerit run {path} --out runs/first")


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="Settings (TOML).")],
    set_: Set_ = None,
) -> None:
    """What a run will cost here: models, trainings, minutes, memory, bytes, and what the pool can resolve.

    CONFIG is a file of settings (TOML), as for `fedmerit run`.
    """
    from fedmerit.config import load
    from fedmerit.report.terminal import print_plan, printable

    settings = load(config, set_ or ())
    with _engine():
        from fedmerit.simulation.plan import plan as make_plan
    with _settings_of(config, set_ or ()):
        planned = make_plan(settings)
    print_plan(out, planned)
    for note in planned.notes:
        out.print(f"note: {printable(note)}")


@app.command()
def track(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that is over.", metavar="DIR")],
    to: Annotated[str, typer.Option(help="tensorboard:DIR or mlflow:URI.")],
) -> None:
    """Send the scores of a run to TensorBoard or MLflow, as curves.

    DIR is the folder of a run that is over. While it goes on, `fedmerit run --track` does the same.
    """
    from fedmerit.report.exports import replay, tracker

    rounds = replay(folder, tracker(to))
    out.print(f"sent {rounds} round{'' if rounds == 1 else 's'} to {to}")


def _run(config: Config, folder: Path, *, resume: bool, track: Sequence[str] = ()) -> None:
    from fedmerit.report.exports import tracked, tracker
    from fedmerit.report.page.source import timed
    from fedmerit.report.terminal import print_summary, print_truth, printable, summarise, watching
    from fedmerit.sentences import planted
    from fedmerit.storage.run_folder import recorded

    trackers = [tracker(where) for where in track]
    with _engine():
        from fedmerit.simulation.run import run as run_embedded
    with watching(err) as watch, tracked(timed(watch, folder), folder, config, trackers) as watched:
        written = run_embedded(config, folder, resume=resume, watch=watched)
    found = recorded(folder)
    content = found.content
    summary = summarise(
        content.rounds, missing=config.scoring.missing, clients=content.clients, game=config.scoring.game
    )
    summary = replace(summary, notes=(*summary.notes, *found.notes))
    if faults := planted(found.config.corruption):
        out.print(printable(faults))
    print_summary(out, advised(summary), utility=content.rounds[0].utility)
    if config.analysis:
        print_truth(out, written)
    out.print(f"written to {folder}: scores.json, scores.csv, ledger.sqlite")
    write_page(folder)


@contextmanager
def _settings_of(file: Path, overrides: Sequence[str]) -> Iterator[None]:
    """What the engine finds wrong with a setting names the file that it is from, unless --set gave it."""
    from dataclasses import fields

    from fedmerit.errors import ConfigError, DataError

    sections = tuple(f"{section.name}." for section in fields(Config))
    asked = tuple(override.partition("=")[0].strip() for override in overrides)
    try:
        yield
    except (ConfigError, DataError) as error:
        if not str(error).startswith(sections) or str(error).startswith(asked):
            raise
        raise type(error)(f"{file}: {error}") from error


@contextmanager
def _engine() -> Iterator[None]:
    """Imports of the engine inside say what to install where it is missing."""
    from fedmerit.errors import MissingExtra

    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise MissingExtra("running a federation needs: pip install 'fedmerit[engine]'") from error


# --------------------------------------------- the demo's settings, and a config file that explains itself

DEMO: dict[str, Any] = {
    "partition": {
        "scheme": "iid",
        "names": ["Abbey", "Bridge", "Castle", "Dale", "Elm", "Harbour"],
    },
    "corruption": {"label_noise": {"Harbour": 0.8}},
    "model": {"name": "mlp"},
    "training": {"rounds": 6, "local_epochs": 3},
}
"""Six hospitals; the labels of one are mostly noise."""


def is_demo(folder: Path) -> bool:
    """Whether a folder holds a run of the demo's hospitals."""
    try:
        found = of_folder(folder)
    except ConfigError:
        return False
    return found.clients == tuple(DEMO["partition"]["names"])


def commented_config() -> str:
    """Every setting with its default, explained by the comment beside it in `fedmerit.config`."""
    default = Config()
    lines = [
        "# fedmerit: settings of a run. Every key has this default; delete what you do not change.",
        "# fedmerit run THIS.toml --out runs/first",
        "",
    ]
    toml = iter(default.to_toml().splitlines())
    comments = _comments()
    section = ""
    for line in toml:
        if line.startswith("["):
            section = line.strip("[]")
            kind = type(getattr(default, section))
            lines += [f"# {(kind.__doc__ or '').strip()}", line]
            continue
        key = line.partition(" = ")[0]
        above, beside = comments.get((section, key), ("", ""))
        lines += [above] if above else []
        lines.append(f"{line}  # {beside}" if beside else line)
    return "\n".join(lines) + "\n"


def _comments() -> dict[tuple[str, str], tuple[str, str]]:
    """By section and key, the comments above and beside a setting in the source; choices where there are."""
    found = {}
    for section in vars(Config()):
        kind = type(getattr(Config(), section))
        above = ""
        for line in inspect.getsource(kind).splitlines():
            if line.strip().startswith("# "):
                above = line.strip()
                continue
            declared, _, comment = line.partition("  # ")
            key, colon, hint = declared.strip().partition(": ")
            if colon and key.isidentifier():
                choices = (
                    hint.partition("]")[0].removeprefix("Literal[") if hint.startswith("Literal[") else ""
                )
                words = [choices.replace('"', "").replace(", ", " | "), comment.strip()]
                found[section, key] = above, "; ".join(word for word in words if word)
            above = ""
    return found
