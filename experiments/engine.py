"""The engine as experiments need it: quicker on a shared GPU, both coalition games, weights of the paper."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from beyond import Paths, ensembles, measured

from fedmerit import config
from fedmerit.errors import ReportError
from fedmerit.identity import seed_from
from fedmerit.protocol.measure import coalition_models, mean
from fedmerit.protocol.terms import weights_of
from fedmerit.scoring.ground_truth import shapley
from fedmerit.secagg.quantise import Encoding
from fedmerit.simulation import analysis as truth
from fedmerit.simulation import run as embedded
from fedmerit.simulation import setup
from fedmerit.simulation import transport as local
from fedmerit.simulation.coalitions import Evaluator, retrain_tables
from fedmerit.simulation.models import as_tensor, load_vector, prepare
from fedmerit.simulation.run import Engine, Progress
from fedmerit.simulation.setup import Federation
from fedmerit.simulation.transport import Aggregation, LocalTraining, Offer
from fedmerit.simulation.utilities import balance, evaluation, float32
from fedmerit.storage.run_folder import Folder

SHARE = 0.0
"""Of the device's memory that this process may use; 0: all."""
TOLERANCE = 1.001
"""Largest deviation of a coalition's utility from float32, in test images: one."""


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
        self.paths = Paths(self.federation.first)
        self.whole_run: dict[str, Any] = {}
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
            update = (given / outcome.total_weight).astype(np.float32)
            self.paths.add(name, update, models[1] - before_model)
            for which, model in zip(("alone", "without"), models, strict=True):
                for utility, each in self.federation.evaluate(model, outcome.slice).items():
                    values.setdefault(utility, {"alone": [], "without": []})[which].append(mean(each))
        self.renormalised.append(values)
        if number == self.config.training.rounds:
            self._whole_run(outcome)
        return found

    def _whole_run(self, outcome: Any) -> None:
        """After the last round: what the path without a member and the solo models together are worth."""
        for kind, models in self.paths.models(outcome.model).items():
            each = [self.federation.evaluate(models[name], outcome.slice) for name in self.federation.names]
            self.whole_run[kind] = measured(each)
        if self.local.solo:
            self.whole_run["solo together"] = ensembles(self.federation, self.local.solo)

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
    limit = None
    if SHARE and federation.device.type == "cuda":  # it sees what is free, not what is its own
        limit = int(SHARE * torch.cuda.get_device_properties(federation.device).total_memory / 2)
    return Evaluator(*given, tolerance=TOLERANCE / len(shown.y), effort="none", memory_limit=limit)


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
    of a round from n coalitions. ``loop``: coalitions are retrained one after another, which suits large
    networks. ``again = k``: the same data in the same hands, but the k-th other first model and batch order.
    """
    before = embedded.from_this_round, truth.MOST_EXACT, truth.BUDGET, truth.retrain_tables
    places = [(module, module.seed_for) for module in (setup, local, truth)]
    if given.get("weights") == "MR-SV":
        embedded.from_this_round = ShapleyWeights()
    if "sampled" in given:
        truth.MOST_EXACT, truth.BUDGET = 0, given["sampled"]
    if given.get("loop"):
        truth.retrain_tables = functools.partial(retrain_tables, stacked=False)
    if "again" in given:
        for module, _ in places:
            module.seed_for = functools.partial(_other_seed, given["again"])  # type: ignore[attr-defined]
    try:
        yield
    finally:
        embedded.from_this_round, truth.MOST_EXACT, truth.BUDGET, truth.retrain_tables = before
        for module, seed_for in places:
            module.seed_for = seed_for  # type: ignore[attr-defined]


def _other_seed(again: int, settings: config.Config, *what: str | int) -> int:
    """As ``setup.seed_for``, with other training and another first model, but the same data."""
    other = ("again", again) if what[0] in ("train", "model") else ()
    return seed_from(settings.run.seed, *other, *what)
