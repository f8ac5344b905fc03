"""The rehearsal as experiments need it: quicker on a shared GPU, both games, weights of the paper."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from analyses import Halves, Innovation, Paths, Phi, ensembles, measured
from cheats import Cheating, told_the_pool
from device import DeviceEvaluations, Evaluate, contribution_on, cosine_of, models_on, updates_on
from quick_coalitions import QuickEvaluator, retrained
from side_by_side import StackedTraining

from fedmerit.config import Config
from fedmerit.errors import ReportError
from fedmerit.identity import seed_from
from fedmerit.protocol.outcome import Model, Outcome, mean
from fedmerit.protocol.pool import Slice
from fedmerit.protocol.terms import weights_of
from fedmerit.scoring.ground_truth import normalise, shapley
from fedmerit.scoring.scores import SCORES, cos_model
from fedmerit.scoring.types import Reports
from fedmerit.simulation.analysis import Evaluator, Game, PlainRound, Truth
from fedmerit.simulation.models import as_tensor, evaluation, float32, load_vector, prepare
from fedmerit.simulation.run import Progress, Rehearsal, Watch
from fedmerit.simulation.setup import Federation, Tell, seed_for
from fedmerit.simulation.setup import prepare as federation_of
from fedmerit.simulation.utilities import balance, resolve_all
from fedmerit.storage.run_folder import Folder

SHARE = 0.0
"""Of the device's memory that this process may use; 0: all."""
TOLERANCE = 1.001
"""Largest deviation of a coalition's utility from float32, in test images: one."""


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


class BothGames(Rehearsal):
    """A rehearsal that also measures each member's two models of the other, renormalised game.

    It is its own analysis of plain rounds. Where coalitions are retrained, or the truth is that of the last
    round, the Shapley values of rounds are computed in both games. On a GPU it trains in TF32, as PyTorch's
    convolutions do unless told otherwise.

    Args:
        config: of the run.
        folder: of the run.
        watch: told what happens.
        loop: members train one after another on a GPU too: slower, but leaves it free for other processes.
        phi: whether to compute PHI, which takes long with large networks.
        special: a cell's ``experiment`` section. ``weights = "ALPHA"``: weights from this score of the
            current round; ``"MR-SV"``: from its exact Shapley values. ``printed = "FP"``: current-round
            weights as the paper prints them. ``sampled = n``: the Shapley value of a round from n
            coalitions. ``loop``: coalitions are retrained one after another, which suits large networks.
            ``again = k``: the same data in the same hands, but the k-th other first model and batch order.
            ``games = "additive"`` leaves the other game out. ``phi = true`` computes PHI in any case, the
            name of a utility that of this one alone. ``cheat`` and ``factor``: what a member sends in the
            place of its update, see `cheats.Cheating`. ``innovation = true``: PHI along the innovation of
            each round too, see `analyses.Innovation`. ``halves = true``: scores and Shapley values on each
            half of the test pool, see `analyses.Halves`.
    """

    def __init__(
        self,
        config: Config,
        folder: Folder,
        watch: Watch,
        *,
        loop: bool = False,
        phi: bool = True,
        special: Mapping[str, Any] | None = None,
    ) -> None:
        special = special or {}
        seeds = functools.partial(other_seed, special["again"]) if "again" in special else seed_for
        federation, quick = federation_of(config, seeds=seeds), None
        if special.get("cheat") == "pool":
            federation = told_the_pool(federation)
        if federation.device.type == "cuda":
            federation = replace(federation, training=replace(federation.training, tf32=True))
            quick = QuickEvaluation(federation)
        truth = None
        if config.scoring.truth:
            sampled = {"most_exact": 0, "budget": special["sampled"]} if "sampled" in special else {}
            truth = QuickTruth(
                federation,
                folder.path / "tables",
                lambda done, total: self._told("coalitions", done, total),
                stacked=False if special.get("loop") else None,
                **sampled,
            )
        asked = special.get("phi", phi)
        named = (asked,) if isinstance(asked, str) else along(config) if asked else ()
        self.phi = Phi(federation, resolve_all(named) if named else ())
        self.renormalised: list[dict[str, dict[str, list[float]]]] = []
        self.cosines: list[dict[str, float]] = []
        self.other_truth: dict[str, list[list[float]]] = {}
        self.paths = Paths(as_tensor(federation.first).to(federation.device))
        self.whole_run: dict[str, Any] = {}
        analyses: list[Any] = [self.phi, *([self] if special.get("games", "both") == "both" else [])]
        if "innovation" in special:
            analyses.append(Innovation(federation, self.phi.rounds))
        self.halves = Halves(federation, evaluator) if "halves" in special else None
        if self.halves:
            analyses.append(self.halves)
        self.evaluate: Evaluate = quick or federation.evaluate
        on_device = DeviceEvaluations(quick, federation.device) if quick else None
        super().__init__(
            config,
            folder,
            watch,
            federation=federation,
            evaluations=on_device,
            truth=truth,
            analyses=analyses,
        )
        self.current_weights = _weights(federation, special, self.evaluate)
        if self.current_weights:
            self.coordinator.weights = self._weights_of_the_round
        given = {"solo": self.transport.local.solo, "stacked": False if loop else None}
        if "cheat" in special:
            given |= {"kind": special["cheat"], "factor": special["factor"]}
        self.transport.local = (Cheating if "cheat" in special else StackedTraining)(federation, **given)

    def _weights_of_the_round(self, number: int, m0: Model, scheduled: Sequence[str]) -> dict[str, float]:
        """The weights of members from a score of this very round, in which they have trained already."""
        assert self.current_weights is not None
        return self.current_weights(number, m0, self.transport.train(scheduled))

    def summed(self, plain: PlainRound) -> None:
        """Both models of every member in the renormalised game, and the paper's cosine of models."""
        outcome, device = plain.outcome, plain.device
        updates = np.stack([one.cpu().numpy() for one in plain.updates])
        self.cosines.append(cos_model(updates, np.asarray(plain.m0), outcome.included).as_dict())
        both = {"shapley", "round-shapley"} & set(self.config.scoring.truth)
        if self.truth and both and self.config.values_coalitions(outcome.round):
            self._other_truth(self.truth.evaluator(outcome.slice), plain)
        self._told("evaluate", 0, len(outcome.included))
        values: dict[str, dict[str, list[float]]] = {}
        m0, m = as_tensor(plain.m0).to(device), as_tensor(outcome.model).to(device)
        for name, weight, update in zip(outcome.included, plain.weights, plain.updates, strict=True):
            given = contribution_on(device, plain.contribution(name))
            models = models_on("renormalised", m0, m, given, weight, outcome.total_weight)
            self.paths.add(name, update, models[1] - m0)
            for which, model in zip(("alone", "without"), models, strict=True):
                for utility, each in self.evaluate(model, outcome.slice).items():
                    values.setdefault(utility, {"alone": [], "without": []})[which].append(mean(each))
        self.renormalised.append(values)
        if outcome.round == self.config.training.rounds:
            self._whole_run(outcome)

    def _whole_run(self, outcome: Outcome) -> None:
        """After the last round: what the path without a member and the solo models together are worth."""
        last = as_tensor(outcome.model).to(self.federation.device)
        each = [
            {kind: self.evaluate(one, outcome.slice) for kind, one in self.paths.models(name, last).items()}
            for name in self.federation.names
        ]
        for kind in each[0]:
            self.whole_run[kind] = measured([one[kind] for one in each])
        if solo := self.transport.local.solo:
            self.whole_run["solo together"] = ensembles(self.federation, solo)

    def _other_truth(self, evaluator: Evaluator, plain: PlainRound) -> None:
        """The round's exact Shapley values in the renormalised game."""
        for utility, table in evaluator.tables(Game.of(plain, "renormalised")).items():
            self.other_truth.setdefault(utility, []).append(shapley(table).values.tolist())

    def _told(self, stage: Any, done: int, total: int) -> None:
        number = len(self.recorder.rounds) + 1
        self.watch(Progress(stage, number, self.config.training.rounds, done, total))


Weigh = Callable[[int, Model, Mapping[str, Model]], dict[str, float]]
"""(round, M0, local models) -> weights of the members in this very round."""


def _weights(federation: Federation, special: Mapping[str, Any], evaluate: Evaluate) -> Weigh | None:
    if "printed" in special:
        return PrintedWeights(federation, special["printed"])
    if special.get("weights") == "MR-SV":
        return ShapleyWeights(federation)
    return CurrentWeights(federation, special["weights"], evaluate) if "weights" in special else None


def along(config: Config) -> tuple[str, ...]:
    """The utilities of Aumann-Shapley scores: expected accuracy, and where accuracy counts its stand-in."""
    asked = config.scoring.utilities
    return ("expected-accuracy", *(["sharpened-accuracy"] if "accuracy" in asked else []))


@dataclass(eq=False)
class QuickTruth(Truth):
    """The ground truth in a tenth of the time on a GPU; ``stacked`` None retrains in stacks there only."""

    stacked: bool | None = None

    def new_evaluator(self, shown: Slice) -> Evaluator:
        """As quick as the tolerance allows."""
        return evaluator(self.federation, shown)

    def retrained(self, masks: Sequence[int], tell: Tell) -> Iterator[tuple[int, torch.Tensor]]:
        """Many coalitions at a time."""
        federation = self.federation
        if self.stacked is False or (self.stacked is None and federation.device.type == "cpu"):
            yield from super().retrained(masks, tell)
            return
        rounds = range(1, federation.config.training.rounds + 1)
        seeds = [[federation.seed("train", number, name) for name in federation.names] for number in rounds]
        start = as_tensor(federation.first).to(federation.device)
        data = [(client.x, client.y) for client in federation.clients]
        how = {"method": "stacked" if self.stacked else "auto", "progress": tell}
        given = federation.network, start, data, federation.training, seeds, self.shares, masks
        yield from retrained(*given, **how)


def evaluator(federation: Federation, shown: Slice) -> QuickEvaluator:
    """Of all coalitions of a round on a test slice, close to float32."""
    given = federation.network, shown.x, shown.y, federation.utilities
    limit = None
    if SHARE and federation.device.type == "cuda":  # it sees what is free, not what is its own
        limit = int(SHARE * torch.cuda.get_device_properties(federation.device).total_memory / 2)
    return QuickEvaluator(*given, tolerance=TOLERANCE / len(shown.y), effort="none", memory_limit=limit)


def reports_under_plain_averaging(
    federation: Federation,
    number: int,
    start: Model,
    trained: Mapping[str, Model],
    evaluate: Evaluate,
    utility: str,
) -> Reports | None:
    """The reports that a round under plain averaging would have, None with fewer than 2 finite models."""
    finite = {name: model for name, model in trained.items() if bool(np.isfinite(model).all())}
    if len(finite) < 2:
        return None
    shown = federation.pool.slice(number)
    first = as_tensor(start).to(federation.device)
    updates = updates_on(federation.device, start, finite.values())
    change = torch.zeros_like(first, dtype=torch.float64)
    for update in updates:
        change += update
    grand = (first + change).float()

    def value(model: torch.Tensor) -> float:
        return mean(evaluate(model, shown)[utility])

    return Reports(
        empty=value(first),
        grand=value(grand),
        alone=np.array([value(first + update) for update in updates]),
        without=np.array([value(grand - update) for update in updates]),
        clients=tuple(finite),
        cosine=[cosine_of(update.double(), change) for update in updates],  # type: ignore[arg-type]
        round=number,
    )


class CurrentWeights:
    """Weights from a score of the current round under plain averaging, clipped as weights of past rounds."""

    def __init__(self, federation: Federation, score: str, evaluate: Evaluate) -> None:
        self.federation, self.score, self.evaluate = federation, score, evaluate

    def __call__(self, number: int, start: Model, trained: Mapping[str, Model]) -> dict[str, float]:
        """The weight of every member; 1 for those whose model is not finite."""
        weights, utility = dict.fromkeys(trained, 1.0), self.federation.utilities[0].name
        reports = reports_under_plain_averaging(
            self.federation, number, start, trained, self.evaluate, utility
        )
        if reports is None:
            return weights
        return weights | weights_of(SCORES[self.score].function(reports).raw, reports.clients)


class PrintedWeights:
    """The paper's weights to the letter: the same round's published score, normalised, not clipped.

    Of accuracy, and with the paper's formula for COS. A member with the lowest score gets no weight; where
    all scores are equal, all weights are 1.
    """

    def __init__(self, federation: Federation, score: str) -> None:
        self.federation, self.score = federation, score

    def __call__(self, number: int, start: Model, trained: Mapping[str, Model]) -> dict[str, float]:
        """As `CurrentWeights`."""
        if self.score == "COS":
            updates = [one.numpy() for one in updates_on(torch.device("cpu"), start, trained.values())]
            made = cos_model(np.stack(updates), np.asarray(start), trained)
        else:
            reports = reports_under_plain_averaging(
                self.federation, number, start, trained, self.federation.evaluate, "accuracy"
            )
            if reports is None:
                return dict.fromkeys(trained, 1.0)
            made = SCORES[self.score].function(reports)
        known = dict(zip(made.clients, normalise(made.values).tolist(), strict=True))
        return {name: known.get(name, 0.0) for name in trained}


class ShapleyWeights:
    """Weights from the exact Shapley value of the current round under plain averaging. Analysis only."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """On the fixed test pool."""
        return evaluator(self.federation, self.federation.pool.slice(1))

    def __call__(self, _number: int, start: Model, trained: Mapping[str, Model]) -> dict[str, float]:
        """As `CurrentWeights`."""
        device = self.federation.device
        updates, first = updates_on(device, start, trained.values()), as_tensor(start).to(device)
        game = Game(first, torch.stack(updates), [1.0] * len(updates), "additive", tuple(trained))
        tables = self.evaluator.tables(game)
        return weights_of(shapley(tables[self.federation.utilities[0].name]).values, tuple(trained))


def other_seed(again: int, config: Config, *what: str | int) -> int:
    """As ``setup.seed_for``, with other training and another first model, but the same data."""
    other = ("again", again) if what[0] in ("train", "model") else ()
    return seed_from(config.run.seed, *other, *what)
