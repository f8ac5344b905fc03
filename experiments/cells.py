"""Plan -> cells, and cells -> results: what is to be run, what has been run, what a run will cost.

A cell is one run: a dataset, perhaps a subset of its training images, settings, and a seed. Its key is the
hash of all but the seed, so tables that need the same run share it, and a finished cell is never run twice.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PLAN = HERE / "plan.toml"
MERGED = "cells.jsonl"
Result = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run.

    ``settings`` are config sections without seed and device; ``subset`` is the number of training images, 0
    for all; ``order`` says when it is its turn; ``guess`` is seconds on the machine the plan was made for.
    """

    dataset: str
    subset: int
    settings: Mapping[str, Mapping[str, Any]]
    seed: int
    order: float = 0.0
    guess: float = 60.0

    @property
    def key(self) -> str:
        """Of the settings, whatever the seed."""
        what = json.dumps([self.dataset, self.subset, self.settings], sort_keys=True)
        return hashlib.sha256(what.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """Of its result file."""
        return f"{self.dataset}-{self.key}-s{self.seed}"

    def __str__(self) -> str:
        part, scoring = self.settings["partition"], self.settings["scoring"]
        how = f"mu {part['mu']}" if part["scheme"] == "dirichlet" else part["scheme"]
        some = f", {self.subset} images" if self.subset else ""
        truth = "+".join(scoring["truth"]) or "no truth"
        training, special = self.settings["training"], self.settings.get("experiment", {})
        weights = (training.get("weights", ""), training.get("weight_score", ""))
        special = (f"{key} {value}" for key, value in special.items())
        words = (*self.settings.get("corruption", {}), *weights, *special)
        extra = "".join(f", {word}" for word in words if word)
        rounds = training["rounds"]
        return (
            f"{self.dataset}{some}, {part['clients']} members, {how}, {rounds} rounds, {truth}{extra}, "
            f"seed {self.seed}"
        )


@dataclass(frozen=True)
class Row:
    """A line of a table: the cells behind it, one a seed, and the round it looks at."""

    experiment: str
    label: str
    says: str
    dataset: str
    row: str
    at: int
    cells: tuple[Cell, ...]


def plan(*, toy: bool = False, subsets: Mapping[str, int] | None = None) -> list[Row]:
    """All rows of all tables.

    Args:
        toy: few members, few rounds, a small model and one seed, to see that everything runs.
        subsets: by dataset, how many training images to use, 0 for all, where a run has no number of its own.
    """
    raw = tomllib.loads(PLAN.read_text(encoding="utf-8"))
    rows = []
    for experiment in raw["experiment"]:
        for given in experiment["runs"]:
            data = raw["datasets"][given["dataset"]]
            settings = {section: dict(values) for section, values in raw["base"].items()}
            settings["data"] = {"test_size": data["test_size"]}
            settings["model"] = {"name": data["model"]}
            common = {} if given.get("base") else experiment.get("set", {})
            for changes in (data.get("set", {}), common, given.get("set", {})):
                for name, value in changes.items():
                    section, key = name.split(".")
                    settings.setdefault(section, {})[key] = value
            at, seeds = given.get("at", settings["training"]["rounds"]), given["seeds"]
            subset = given.get("subset", (subsets or {}).get(given["dataset"], data.get("subset", 0)))
            if toy:
                at, seeds, subset = max(1, at // 5), 2 if seeds >= 10 else 1, 160
                settings = shrunk(settings)
            first, step, guess = given["first"], given["step"], given["guess"]
            cells = tuple(
                Cell(given["dataset"], subset, settings, seed, first + step * seed, guess)
                for seed in range(seeds)
            )
            what = experiment["name"], experiment["label"], experiment["says"]
            rows.append(Row(*what, given["dataset"], given.get("row", ""), at, cells))
    return rows


def shrunk(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same experiment at toy size."""
    small = {section: dict(values) for section, values in settings.items()}
    clients = max(3, small["partition"]["clients"] // 3 + 1)
    small["partition"] |= {"clients": clients}
    small["training"] |= {"rounds": small["training"]["rounds"] // 5, "local_epochs": 1, "batch_size": 32}
    small["model"] = {"name": "mlp"}
    small["data"] = {"test_size": 40}
    if "sampled" in small.get("experiment", {}):
        small["experiment"]["sampled"] = 30
    if small["partition"]["scheme"] == "group":
        small["partition"]["clients"] = 4
    noise = small.get("corruption", {}).get("label_noise")
    if isinstance(noise, dict):
        small["corruption"]["label_noise"] = dict(list(noise.items())[: clients - 1])
    flipped = small.get("corruption", {}).get("label_flip")
    if flipped:
        small["corruption"]["label_flip"] = [f"client-{clients - 1}"]
    return small


@functools.cache
def datasets() -> dict[str, dict[str, Any]]:
    """What each dataset is, from the plan."""
    found: dict[str, dict[str, Any]] = tomllib.loads(PLAN.read_text(encoding="utf-8"))["datasets"]
    return found


def in_order(rows: Iterable[Row]) -> list[Cell]:
    """Every cell once, the most valuable first."""
    cells: dict[str, Cell] = {}
    for row in rows:
        for cell in row.cells:
            if cell.name not in cells or cell.order < cells[cell.name].order:
                cells[cell.name] = cell
    return sorted(cells.values(), key=lambda cell: cell.order)


# --------------------------------------------------------------------------------------------- results


def read_results(folders: Iterable[Path]) -> dict[str, Result]:
    """Finished cells by name, from single files and from merged ones; the first one found counts."""
    found: dict[str, Result] = {}
    for folder in folders:
        for file in sorted(folder.glob("*.json")):
            result = json.loads(file.read_text(encoding="utf-8"))
            found.setdefault(result["name"], result)
        for result in read_merged(folder / MERGED):
            found.setdefault(result["name"], result)
    return found


def read_merged(file: Path) -> Iterator[Result]:
    """Cells of a merged file; a line that was cut short is left out."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def append(folder: Path, result: Result) -> None:
    """Add a finished cell to the merged file, on a line of its own also after one that was cut short."""
    with (folder / MERGED).open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            cut = file.read(1) != b"\n"
            file.write(b"\n" if cut else b"")
        file.write(json.dumps(result, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def write_one(folder: Path, result: Result) -> Path:
    """One file of its own."""
    file = folder / f"{result['name']}.json"
    file.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    return file


def write_json(file: Path, found: Mapping[str, Any]) -> None:
    """Write what a script beside the plan found, for people to read too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(file)


# ------------------------------------------------------------------------------------------------ cost


@dataclass
class Costs:
    """Seconds a cell will take: as cells of the same settings took, or the guess, corrected by experience."""

    machine: str
    jobs: int
    known: list[tuple[str, float, float]]  # key, seconds, guess
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By dataset: seconds per trained sample and per evaluated image on this machine."""

    @classmethod
    def of(cls, machine: str, jobs: int, results: Iterable[Result]) -> Costs:
        """From results of the same kind of machine, with as many cells at once."""
        known = [
            (one["key"], one["seconds"]["total"], one["guess"])
            for one in results
            if one["machine"]["device"] == machine and one["jobs"] == jobs
        ]
        return cls(machine, jobs, known)

    def add(self, cell: Cell, seconds: float) -> None:
        """A cell was finished."""
        self.known.append((cell.key, seconds, cell.guess))

    def __call__(self, cell: Cell) -> float:
        same = [seconds for key, seconds, _ in self.known if key == cell.key]
        if same:
            return max(same)
        if cell.dataset in self.rates:
            per_sample, per_image = self.rates[cell.dataset]
            samples, images = work(cell)
            return self.jobs * (samples * per_sample + images * per_image)
        ratios = [seconds / guess for _, seconds, guess in self.known if guess]
        return cell.guess * (statistics.median(ratios) if ratios else float(self.jobs))


WHOLE_TEST = 2000
"""About as many test images has a run that takes the whole test set."""


def work(cell: Cell) -> tuple[int, int]:
    """How many samples a cell trains on and how many images it evaluates, over all members and rounds."""
    training, scoring = cell.settings["training"], cell.settings["scoring"]
    n, rounds = cell.settings["partition"]["clients"], training["rounds"]
    special = cell.settings.get("experiment", {})
    samples = (cell.subset or datasets()[cell.dataset]["train"]) * training["local_epochs"] * rounds
    models = rounds * (2 * n + 1) * (1 if special.get("games") == "additive" else 2)
    trained = samples * (2 if scoring.get("solo") else 1)
    if "mr-shapley" in scoring["truth"] or special.get("halves") or special.get("weights"):
        models += rounds * special.get("sampled", 2**n) * (2 if "shapley" in scoring["truth"] else 1)
    if "shapley" in scoring["truth"]:
        trained, models = trained + samples * 2 ** (n - 1), models + 2**n
    return trained, models * (cell.settings["data"]["test_size"] or WHOLE_TEST)


def select(
    rows: Sequence[Row], only: Sequence[str], dataset: str | None = None, named: str | None = None
) -> list[Row]:
    """Rows of the experiments, the dataset and the name asked for; all where none is."""
    names = list(dict.fromkeys(row.experiment for row in rows))
    for name in only:
        if name not in names:
            raise SystemExit(f"--only: no experiment {name!r}, expected one of {', '.join(names)}")
    found = [
        row
        for row in rows
        if (not only or row.experiment in only)
        and dataset in (None, row.dataset)
        and named in (None, row.row)
    ]
    if not found:
        asked = [row for row in rows if dataset in (None, row.dataset)]
        known = sorted({row.row for row in asked} if asked else {row.dataset for row in rows})
        what = "--row" if asked else "--dataset"
        raise SystemExit(f"{what}: no such rows, expected one of {', '.join(map(repr, known))}")
    return found


def subset_of(text: str) -> tuple[str, int]:
    """DATASET=COUNT of the command line."""
    name, _, count = text.partition("=")
    return name, int(count)
