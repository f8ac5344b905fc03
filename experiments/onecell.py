"""Run one cell with the engine in one process, and keep what tables and later questions need."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import Cell, Result
from compact import load as load_compact

from fedmerit import __version__, config, data
from fedmerit.coalitions import Evaluator
from fedmerit.federation.aggregation import Aggregation
from fedmerit.federation.embedded import Engine, Progress
from fedmerit.federation.local import LocalTraining
from fedmerit.federation.protocol import coalition_models, mean
from fedmerit.federation.summing import Offer
from fedmerit.ledger import number
from fedmerit.secagg.quantise import Encoding
from fedmerit.store import Folder

TOLERANCE = 5e-4
"""Largest deviation of a coalition's utility from float32: one of 2,000 test images."""
KEPT = ("empty", "grand", "alone", "without", "se_alpha", "se_alpha_total", "solo", "solo_empty", "cosine")


class Overtime(Exception):
    """The time that was given is over."""


@dataclass(frozen=True, eq=False)
class Kept(Offer):
    """An offer that works out its contribution once."""

    memory: dict[str, Any] = field(default_factory=dict)

    def contribution(self, encoding: Encoding) -> np.ndarray:
        """As it was summed."""
        if "value" not in self.memory:
            self.memory["value"] = super().contribution(encoding)
        return self.memory["value"]  # type: ignore[no-any-return]


class KeepingAggregation(Aggregation):
    """Makes offers that are asked several times."""

    def offers(self, *given: Any) -> list[Offer]:
        """As the parent's."""
        return [Kept(one.name, one.delta, one.weight, one.seed) for one in super().offers(*given)]


class OneByOne(LocalTraining):
    """Trains one member after another on a GPU too: slower, but leaves it free for other processes."""

    def _group(self, number: int, group: Sequence[Any], start: Any) -> dict[str, Any]:
        models: dict[str, Any] = {}
        for client in group:
            models |= super()._group(number, [client], start)
        return models


class BothGames(Engine):
    """The engine, which also measures each member's two models of the other, renormalised game."""

    def __init__(
        self, settings: config.Config, folder: Folder, watch: Callable[[Progress], None], *, loop: bool
    ) -> None:
        super().__init__(settings, folder, watch)
        if loop:
            self.local = OneByOne(self.federation, self.local.solo)
        self.aggregation = KeepingAggregation(**vars(self.aggregation))
        self.renormalised: list[dict[str, dict[str, list[float]]]] = []
        if self.truth:
            shown, federation = self.federation.pool.slice(1), self.federation
            self.truth._evaluators[shown.id] = Evaluator(
                federation.network,
                shown.x,
                shown.y,
                federation.utilities,
                tolerance=TOLERANCE,
                effort="none",
            )

    def _evaluate(
        self, number: Any, before_model: Any, outcome: Any, offers: Any, encoding: Any, lost: Any
    ) -> Any:
        found = super()._evaluate(number, before_model, outcome, offers, encoding, lost)
        offered = {offer.name: offer for offer in offers}
        values: dict[str, dict[str, list[float]]] = {}
        for name in outcome.included:
            weight = 1.0 if offered[name].weight is None else float(offered[name].weight)
            given = offered[name].contribution(encoding)
            models = coalition_models("renormalised", before_model, outcome, given, weight)
            for which, model in zip(("alone", "without"), models, strict=True):
                for utility, each in self.federation.evaluate(model, outcome.slice).items():
                    values.setdefault(utility, {"alone": [], "without": []})[which].append(mean(each))
        self.renormalised.append(values)
        return found


def convert(folder: Path | None, names: Sequence[str], into: Path) -> dict[str, str]:
    """Each dataset as .npz, once; without a folder all of them are the dataset that comes with fedmerit."""
    titles = {}
    for name in names:
        found = data.load("fashion-mini") if folder is None else load_compact(folder, name)[0]
        arrays = {key: getattr(found, key) for key in ("x_train", "y_train", "x_test", "y_test", "classes")}
        np.savez(into / f"{name}.npz", **arrays)
        titles[name] = "; ".join(found.notes)
    return titles


def subset(file: Path, count: int, seed: int, into: Path) -> Path:
    """The dataset with ``count`` training images, as many of each class as the whole has in proportion."""
    with np.load(file, allow_pickle=False) as arrays:
        content = dict(arrays)
    y, rng = content["y_train"], np.random.default_rng([seed, count])
    order = rng.permutation(len(y))
    place = np.empty(len(y))
    for label in np.unique(y):  # each class spread evenly over [0, 1), then the first ones taken
        own = order[y[order] == label]
        place[own] = (np.arange(len(own)) + rng.random()) / len(own)
    chosen = np.sort(np.argsort(place, kind="stable")[:count])
    content |= {"x_train": content["x_train"][chosen], "y_train": y[chosen]}
    np.savez(into / "subset.npz", **content)
    return into / "subset.npz"


def scratch(parent: str | None = None) -> str:
    """A temporary folder, in memory where that is large."""
    shared = Path("/dev/shm")  # checkpoints of a run are written and dropped every round
    if parent is None and shared.is_dir() and shutil.disk_usage(shared).free > 8 << 30:
        parent = str(shared)
    return tempfile.mkdtemp(prefix="fedmerit-cell-", dir=parent)


def run_cell(
    cell: Cell,
    file: Path,
    title: str,
    *,
    jobs: int = 1,
    loop: bool = False,
    deadline: float = float("inf"),
) -> Result:
    """Run it; `Overtime` when the deadline (as of ``time.time``) passes."""
    began, folder = time.perf_counter(), Path(scratch())
    spent: dict[str, float] = {}
    mark = ["setup", began]

    def watch(progress: Progress) -> None:
        now = time.perf_counter()
        if progress.stage != "note":
            spent[mark[0]] = spent.get(mark[0], 0.0) + now - mark[1]
            mark[:] = [progress.stage, now]
        if time.time() > deadline:
            raise Overtime(str(cell))

    try:
        path = subset(file, cell.subset, cell.seed, folder) if cell.subset else file
        settings = {section: dict(values) for section, values in cell.settings.items()}
        settings["data"] |= {"name": "npz", "path": str(path)}
        settings |= {"run": {"seed": cell.seed}, "secure_aggregation": {"enabled": False}}
        made = config.from_dict(settings)
        with Folder(folder / "run", made) as opened:
            engine = BothGames(made, opened, watch, loop=loop)
            document = engine.run()
            looked = [dict(record.body) for record in opened.ledger.records("analysis")]
            total = time.perf_counter() - began
            spent[mark[0]] = spent.get(mark[0], 0.0) + time.perf_counter() - mark[1]
            return {
                "name": cell.name,
                "key": cell.key,
                "dataset": cell.dataset,
                "title": title,
                "subset": cell.subset,
                "settings": cell.settings,
                "seed": cell.seed,
                "guess": cell.guess,
                "jobs": jobs,
                "loop": loop,
                "seconds": {"total": round(total, 1), **{k: round(v, 1) for k, v in spent.items()}},
                "machine": machine(),
                "coalitions": _evaluation(looked),
                "samples": {client.name: len(client.y) for client in engine.federation.clients},
                "test_images": len(engine.federation.pool),
                "clients": document["clients"],
                "utilities": _utilities(document, engine.renormalised),
                "retrained": _retrained(folder / "run" / "tables" / "retrained.npz"),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def machine() -> dict[str, str]:
    """Where this runs."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if cuda else "CPU",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "scipy": importlib.metadata.version("scipy"),
        "fedmerit": __version__,
    }


def _utilities(document: Mapping[str, Any], renormalised: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per utility: the reports of every round in both games, and the ground truth."""
    found = {}
    for utility, part in {document["utility"]: document, **document["companions"]}.items():
        scored = [one for one in part["rounds"] if one["reports"] is not None]
        rounds = []
        for one, other in zip(scored, renormalised, strict=True):
            reports = {key: _short(one["reports"][key]) for key in KEPT if key in one["reports"]}
            rounds.append(
                {
                    "round": one["round"],
                    "participants": one["participants"],
                    **reports,
                    "renormalised": {key: _short(values) for key, values in other[utility].items()},
                }
            )
        found[utility] = {"rounds": rounds, "truth": _short(part.get("truth", {}))}
    return found


def _evaluation(looked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How the coalitions of the rounds were evaluated, and how far from float32 at most."""
    if not looked:
        return {}
    deviations = [number(value) for body in looked for value in body.get("deviation", {}).values()]
    return {
        "methods": sorted({str(body["method"]) for body in looked}),
        "largest_deviation": max(deviations, default=0.0),
    }


def _retrained(file: Path) -> dict[str, Any]:
    """The utilities of all retrained coalitions, by bitmask."""
    if not file.exists():
        return {}
    with np.load(file, allow_pickle=False) as arrays:
        return {
            key.removeprefix("table/"): _short(arrays[key].tolist())
            for key in arrays.files
            if key.startswith("table/")
        }


def _short(value: Any) -> Any:
    """Numbers with nine digits, whatever they are in."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return value
