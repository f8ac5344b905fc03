"""Commands on a federation in one process: run, demo, init, plan, track."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedmerit.cli.base import Set_, advised, app, err, fail, out
from fedmerit.config import Config


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
    from fedmerit.cli.demo import DEMO, is_demo
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
    from fedmerit.cli.demo import commented_config

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
    from fedmerit.report.tracking import replay, tracker

    rounds = replay(folder, tracker(to))
    out.print(f"sent {rounds} round{'' if rounds == 1 else 's'} to {to}")


def _run(config: Config, folder: Path, *, resume: bool, track: Sequence[str] = ()) -> None:
    from fedmerit.cli.page import write_page
    from fedmerit.report.page.source import timed
    from fedmerit.report.summary import summarise
    from fedmerit.report.terminal import print_summary, print_truth, printable, watching
    from fedmerit.report.tracking import tracked, tracker
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
