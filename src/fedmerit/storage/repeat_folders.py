"""The folders of a run that is trained several times: DIR/run-1, DIR/run-2, ..., each a whole run folder.

Every run trains on the same data, in the same hands, and is measured on the same test pool; only the first
model and the batch order differ (``run.repeat``). So DIR/run-1 is the run that would be without repeats. A
process that is killed leaves finished runs, at most one that is not, and then nothing; ``resume`` goes on
from there, also with more repeats than before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedmerit.config import Config
from fedmerit.errors import StoreError
from fedmerit.scoring.files import LEDGER
from fedmerit.storage.run_folder import check_settings, check_usable

PAGE = "comparison.html"
"""The page beside the runs that compares them."""
_RUN = re.compile(r"run-([1-9][0-9]*)")


@dataclass(frozen=True)
class Repeat:
    """One training of several: its number from 1, its folder, its settings, and whether it has begun."""

    number: int
    folder: Path
    config: Config
    begun: bool


def repeats_in(path: Path, config: Config, count: int, *, resume: bool) -> tuple[Repeat, ...]:
    """Return what to run in a folder, in order; write nothing.

    Args:
        path: the folder of all runs: new or empty or, with ``resume``, one that holds runs of this config.
        config: settings of the first run.
        count: how many runs there are in the end.
        resume: go on with what is there: finished runs stay, one that was cut off goes on.

    Raises:
        StoreError: the folder holds something else, runs of other settings, or more runs than asked for.
    """
    there = found_in(path)
    if there and not resume:
        raise StoreError(
            f"{path}: holds {there[0][1].name} already; use --resume to go on with it, or another folder"
        )
    if resume and not there:
        raise StoreError(f"{path}: nothing to resume, there is no run-1 in it")
    if there and there[-1][0] > count:
        raise StoreError(
            f"{path}: holds {there[-1][1].name}, and {count} runs were asked for: expected --repeat "
            f"{there[-1][0]} or more"
        )
    made = []
    for number in range(1, count + 1):
        folder = path / f"run-{number}"
        begun = (folder / "config.toml").exists()
        own = replace(config, run=replace(config.run, repeat=number))
        if begun:
            check_settings(folder, own)
        else:
            check_usable(folder, resume=False)
        made.append(Repeat(number, folder, own, begun))
    return tuple(made)


def found_in(path: Path) -> list[tuple[int, Path]]:
    """Return number and path of each run in a folder of repeats, in order.

    Raises:
        StoreError: there is something else in it; a single run, for example.
    """
    if not path.exists():
        return []
    if not path.is_dir():
        raise StoreError(f"{path}: expected a folder, got a file")
    if (path / LEDGER).exists() or (path / "config.toml").exists():
        raise StoreError(f"{path}: holds a single run; repeats need a folder of their own")
    found = []
    for one in path.iterdir():
        if (named := _RUN.fullmatch(one.name)) and one.is_dir():
            found.append((int(named[1]), one))
        elif one.name != PAGE and not one.name.startswith(f".{PAGE}."):  # cut off while it was written
            raise StoreError(f"{path}: expected runs (run-1, run-2, ...) and {PAGE} in it, got {one.name}")
    return sorted(found)


def runs_of(paths: Sequence[Path]) -> list[Path]:
    """Return these paths, with the runs in it in place of each folder of repeats."""
    found: list[Path] = []
    for path in paths:
        repeats = path.is_dir() and not (path / LEDGER).exists() and (path / "run-1").is_dir()
        found += [folder for _, folder in found_in(path)] if repeats else [path]
    return found
