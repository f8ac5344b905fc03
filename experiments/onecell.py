"""Run one cell with the engine in one process, and keep what tables and later questions need."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import Cell, Result, datasets
from compact import load as load_compact

from fedmerit import __version__, config, data
from fedmerit.coalitions import Evaluator
from fedmerit.errors import ReportError
from fedmerit.federation import embedded, truth
from fedmerit.federation.aggregation import Aggregation
from fedmerit.federation.embedded import Engine, Progress
from fedmerit.federation.local import LocalTraining
from fedmerit.federation.protocol import coalition_models, mean
from fedmerit.federation.reweighting import weights_of
from fedmerit.federation.setup import Federation
from fedmerit.federation.summing import Offer
from fedmerit.ledger import number
from fedmerit.models import as_tensor, load_vector, prepare
from fedmerit.secagg.quantise import Encoding
from fedmerit.store import Folder
from fedmerit.utilities import balance, evaluation, float32
from fedmerit.values import shapley

TOLERANCE = 1.001
"""Largest deviation of a coalition's utility from float32, in test images: one."""
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


class QuickEvaluation:
    """As the federation's own evaluation, but waits for the device twice a model rather than a dozen times.

    That matters where several processes share a GPU: each wait is as long as the others' turns.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.shown: tuple[str, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, model: Any, shown: Any) -> dict[str, np.ndarray]:
        """Every utility of every sample."""
        federation = self.federation
        federation.evaluations += 1
        if self.shown is None or self.shown[0] != shown.id:
            labels = as_tensor(shown.y).to(federation.device)
            self.shown = shown.id, prepare(as_tensor(shown.x), federation.device), labels
        _, images, labels = self.shown
        load_vector(federation.network, as_tensor(model).to(federation.device))
        with evaluation(federation.network), float32():
            logits = federation.network(images).float()
            rows = [one.of_logits(logits, labels) for one in federation.utilities if one.of_logits]
            values = torch.stack(rows).double().cpu().numpy()
        if not np.isfinite(values).all():
            raise ReportError("the model's answers are not finite: it diverged, or the images did")
        found = dict(zip((one.name for one in federation.utilities), values, strict=True))
        for one in federation.utilities:
            if one.balanced:
                found[one.name] = found[one.name] * balance(labels, logits.shape[1]).cpu().numpy()
        return found


class BothGames(Engine):
    """The engine, which also measures each member's two models of the other, renormalised game.

    On a GPU it trains in TF32, as PyTorch's convolutions do unless told otherwise.

    Args:
        settings: of the run.
        folder: of the run.
        watch: told what happens.
        loop: members train one after another.
        games: "both", or "additive" to leave the other game out.
    """

    def __init__(
        self,
        settings: config.Config,
        folder: Folder,
        watch: Callable[[Progress], None],
        *,
        loop: bool,
        games: str = "both",
    ) -> None:
        super().__init__(settings, folder, watch)
        if loop:
            self.local = OneByOne(self.federation, self.local.solo)
        if self.federation.device.type == "cuda":
            self.federation.training = replace(self.federation.training, tf32=True)
            self.federation.evaluate = QuickEvaluation(self.federation)  # type: ignore[method-assign]
            for member in self.members.values():
                member.evaluate = self.federation.evaluate
        self.aggregation = KeepingAggregation(**vars(self.aggregation))
        self.games = games
        self.renormalised: list[dict[str, dict[str, list[float]]]] = []
        self.other_truth: dict[str, list[list[float]]] = {}
        if self.truth:
            shown = self.federation.pool.slice(1)
            self.truth._evaluators[shown.id] = evaluator(self.federation)

    def _evaluate(
        self, number: Any, before_model: Any, outcome: Any, offers: Any, encoding: Any, lost: Any
    ) -> Any:
        found = super()._evaluate(number, before_model, outcome, offers, encoding, lost)
        if self.games != "both":
            return found
        offered = {offer.name: offer for offer in offers}
        if self.truth and "shapley" in self.config.scoring.truth:
            self._other_truth(before_model, outcome, [offered[name] for name in outcome.included], encoding)
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

    def _other_truth(self, before: Any, outcome: Any, included: Sequence[Offer], encoding: Any) -> None:
        """The round's exact Shapley values in the renormalised game."""
        assert self.truth is not None
        updates = [offer.contribution(encoding) / outcome.total_weight for offer in included]
        weights = [1.0 if offer.weight is None else float(offer.weight) for offer in included]
        tables, _ = self.truth._evaluator(outcome).tables(
            before, updates, weights, game="renormalised", clients=outcome.included
        )
        for utility, table in tables.items():
            self.other_truth.setdefault(utility, []).append(shapley(table).values.tolist())


def evaluator(federation: Federation) -> Evaluator:
    """Of all coalitions of a round on the fixed test pool, close to float32."""
    shown = federation.pool.slice(1)
    given = federation.network, shown.x, shown.y, federation.utilities
    return Evaluator(*given, tolerance=TOLERANCE / len(shown.y), effort="none")


class ShapleyWeights:
    """Weights from the exact Shapley value of the current round under plain averaging. Analysis only."""

    def __init__(self) -> None:
        self.evaluator: Evaluator | None = None

    def __call__(
        self, federation: Federation, _number: int, start: Any, trained: Mapping[str, Any], _score: str
    ) -> dict[str, float]:
        """As ``reweighting.from_this_round``."""
        self.evaluator = self.evaluator or evaluator(federation)
        updates = [(model - start) / np.float32(len(trained)) for model in trained.values()]
        tables, _ = self.evaluator.tables(start, updates, [1.0] * len(updates), clients=tuple(trained))
        return weights_of(shapley(tables[federation.utilities[0].name]).values, tuple(trained))


@contextlib.contextmanager
def analysed(given: Mapping[str, Any]) -> Iterator[None]:
    """What a cell's ``experiment`` section asks of the engine beyond its settings, for as long as it runs.

    ``weights = "MR-SV"``: current-round weights from exact Shapley values. ``sampled = n``: the Shapley value
    of a round from n coalitions.
    """
    before = embedded.from_this_round, truth.MOST_EXACT, truth.BUDGET
    if given.get("weights") == "MR-SV":
        embedded.from_this_round = ShapleyWeights()
    if "sampled" in given:
        truth.MOST_EXACT, truth.BUDGET = 0, given["sampled"]
    try:
        yield
    finally:
        embedded.from_this_round, truth.MOST_EXACT, truth.BUDGET = before


def convert(folder: Path | None, names: Sequence[str], into: Path) -> dict[str, str]:
    """Each dataset as .npz, once; without a folder all of them are the dataset that comes with fedmerit."""
    titles = {}
    for name in names:
        how = datasets()[name]
        if folder is None:
            found, extra = data.load("fashion-mini"), {}
        else:
            found, extra = load_compact(folder, how.get("source", name), how.get("group"))
        arrays = {key: getattr(found, key) for key in ("x_train", "y_train", "x_test", "y_test", "classes")}
        if folder is None and "group" in how:
            arrays["group_train"] = np.arange(len(found.y_train)) % 4
        elif found.group_train is not None:
            arrays["group_train"] = found.group_train
        if extra and "without" in how:
            kept = ~extra[how["without"]]
            arrays |= {key: arrays[key][kept] for key in ("x_test", "y_test")}
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
    content |= {key: content[key][chosen] for key in content if key.endswith("_train")}
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
        special = settings.pop("experiment", {})
        made = config.from_dict(settings)
        with Folder(folder / "run", made) as opened, analysed(special):
            engine = BothGames(made, opened, watch, loop=loop, games=special.get("games", "both"))
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
                "tf32": engine.federation.training.tf32,
                "seconds": {"total": round(total, 1), **{k: round(v, 1) for k, v in spent.items()}},
                "machine": machine(),
                "coalitions": _evaluation(looked),
                "samples": {client.name: len(client.y) for client in engine.federation.clients},
                "test_images": len(engine.federation.pool),
                "clients": document["clients"],
                "utilities": _utilities(document, engine.renormalised, engine.other_truth),
                "retrained": _retrained(folder / "run" / "tables" / "retrained.npz"),
                "sampling_error": _sampling_error(folder / "run" / "tables"),
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


def _utilities(
    document: Mapping[str, Any],
    renormalised: Sequence[Mapping[str, Any]],
    other_truth: Mapping[str, list[list[float]]],
) -> dict[str, Any]:
    """Per utility: the reports of every round in both games, and the ground truth."""
    found = {}
    for utility, part in {document["utility"]: document, **document["companions"]}.items():
        scored = [one for one in part["rounds"] if one["reports"] is not None]
        rounds = []
        for one, other in itertools.zip_longest(scored, renormalised):
            reports = {key: _short(one["reports"][key]) for key in KEPT if key in one["reports"]}
            rounds.append({"round": one["round"], "participants": one["participants"], **reports})
            if other is not None:
                rounds[-1]["renormalised"] = {key: _short(values) for key, values in other[utility].items()}
        found[utility] = {"rounds": rounds, "truth": _short(part.get("truth", {}))}
        if utility in other_truth:
            found[utility]["truth"]["rounds renormalised"] = _short(other_truth[utility])
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


def _sampling_error(folder: Path) -> dict[str, list[float]]:
    """Where Shapley values of rounds were sampled: per utility the standard error of their mean."""
    squares: dict[str, np.ndarray] = {}
    files = sorted(folder.glob("round-*.npz"))
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            for key in arrays.files:
                if key.startswith("stderr/"):
                    utility = key.removeprefix("stderr/")
                    squares[utility] = squares.get(utility, 0.0) + arrays[key] ** 2
    return {utility: _short((np.sqrt(sum_) / len(files)).tolist()) for utility, sum_ in squares.items()}


def _short(value: Any) -> Any:
    """Numbers with nine digits, whatever they are in."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return value
