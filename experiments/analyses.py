"""What the experiments measure in a run beside fedmerit's own scores.

- `Paths` and `ensembles`: what members could also measure under secure aggregation, a run's whole path and
  solo models together. Neither is a score of fedmerit yet; the experiments ask whether one should be.
- `Phi`: PHI of runs whose members report, by block of the test slice.
- `Innovation`: PHI along what the last public updates do not show already.
- `Halves`: scores and exact Shapley values on each half of the test pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedmerit import Reports, alpha
from fedmerit.errors import FedmeritError
from fedmerit.protocol.direction import BLOCKS
from fedmerit.protocol.outcome import Model, mean
from fedmerit.protocol.pool import Slice
from fedmerit.scoring.ground_truth import shapley
from fedmerit.scoring.scores import products_of
from fedmerit.simulation.analysis import Evaluator, Game, PlainRound
from fedmerit.simulation.direction import direction, missing_gradient
from fedmerit.simulation.models import as_tensor, evaluation, float32, load_vector, prepare
from fedmerit.simulation.setup import Federation
from fedmerit.simulation.utilities import Utility, balance, resolve_all

WHOLE = 9
"""Ensembles of all coalitions are evaluated up to so many members."""
LAST = 5
"""Public updates that count as known already, for the innovation of a round."""
SMOOTH = {"expected-accuracy": "expected-accuracy", "accuracy": "sharpened-accuracy"}
"""What is measured on halves, and the utility that PHI follows: accuracy has no gradient."""


class Paths:
    """The federation's path without one member, as that member can add it up by itself.

    A member knows every global model and its own updates, so over all rounds it can leave its own part out:

    - additive: M_T - sum_t U_i,t
    - renormalised: M_0 + sum_t (W (M_t - M_t-1) - w_i d_i,t) / (W - w_i)

    The others' updates stay those that they made beside it. This is the one-round reconstruction of Song et
    al. (2019) for the coalition of everyone else.
    """

    def __init__(self, first: torch.Tensor) -> None:
        self.first = first
        self.own: dict[str, torch.Tensor] = {}
        self.others: dict[str, torch.Tensor] = {}

    def add(self, name: str, update: torch.Tensor, rest: torch.Tensor) -> None:
        """One round: U_i, and the mean update of everybody else."""
        for sums, move in ((self.own, update), (self.others, rest)):
            if name in sums:
                sums[name] += move
            else:
                sums[name] = move.clone()

    def models(self, name: str, last: torch.Tensor) -> dict[str, torch.Tensor]:
        """By kind, without this member."""
        return {
            "path without": last - self.own[name],
            "path without, renormalised": self.first + self.others[name],
        }


def ensembles(federation: Federation, solo: Mapping[str, Model]) -> dict[str, dict[str, Any]]:
    """Utilities of the mean prediction of the models that members trained alone.

    A secure sum of the predicted probabilities gives everybody their mean, from which a member can take its
    own away: v of all, of all but itself, of itself. For few members also every other coalition, to compare.

    Returns:
        Per utility ``alone`` and ``without`` by member, ``grand``, and the ``table`` by bitmask.
    """
    shown = federation.pool.slice(federation.config.training.rounds)
    images, labels = prepare(as_tensor(shown.x), federation.device), as_tensor(shown.y).to(federation.device)
    each = []
    for model in solo.values():
        load_vector(federation.network, as_tensor(model).to(federation.device))
        with evaluation(federation.network), float32():
            each.append(federation.network(images).float().softmax(1))
    stacked = torch.stack(each).double()
    n, everyone = len(each), (1 << len(each)) - 1
    single = [1 << i for i in range(n)]
    masks = (
        list(range(1, everyone + 1)) if n <= WHOLE else [*single, *(everyone ^ m for m in single), everyone]
    )
    values = {mask: _values(federation, stacked, mask, labels) for mask in masks}
    found: dict[str, dict[str, Any]] = {}
    for k, utility in enumerate(federation.utilities):
        one = {mask: row[k] for mask, row in values.items()}
        found[utility.name] = {
            "alone": [one[m] for m in single],
            "without": [one[everyone ^ m] for m in single],
            "grand": one[everyone],
            "table": [one[m] for m in masks] if n <= WHOLE else [],
        }
    return found


def _values(federation: Federation, stacked: torch.Tensor, mask: int, labels: torch.Tensor) -> list[float]:
    """Every utility of the mean prediction of a coalition."""
    members = [i for i in range(len(stacked)) if mask >> i & 1]
    logits = stacked[members].mean(0).clamp_min(1e-30).log()
    found = []
    for utility in federation.utilities:
        assert utility.of_logits is not None, utility.name
        values = utility.of_logits(logits, labels).double()
        if utility.balanced:
            values = values * balance(labels, logits.shape[1])
        found.append(float(values.mean()))
    return found


def measured(values: Sequence[Mapping[str, np.ndarray]]) -> dict[str, list[float]]:
    """Per utility the means, one a model."""
    return {name: [mean(one[name]) for one in values] for name in values[0]}


@dataclass(eq=False)
class Phi:
    """An analysis of plain rounds: everybody's Aumann-Shapley score, per utility that has a gradient."""

    federation: Federation
    utilities: Sequence[Utility]  # to score by
    rounds: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Per round and utility, what `summed` keeps."""
    without: dict[str, tuple[FedmeritError, int]] = field(default_factory=dict)
    """Per utility that has no direction, why, and since which round; 0 is before the first."""

    def __post_init__(self) -> None:
        shown, network = self.federation.pool.first, self.federation.network
        load_vector(network, self.federation.first)
        for utility in self.utilities:
            if why := missing_gradient(network, shown.x, shown.y, utility):
                self.without[utility.name] = why, 0

    def summed(self, plain: PlainRound) -> None:
        """Keep, per utility, the products of everybody's update with every block's gradient, shape (B, N).

        Beside them: the participants, the blocks' sizes, whether blocks have the same mix of classes, the
        gain v(M) - v(M0), what the quadrature leaves of it (``rest``), and the points of the path.
        """
        outcome, shown = plain.outcome, plain.outcome.slice
        assert shown is not None  # runs without reports have no such analysis
        blocks, balanced = min(BLOCKS, len(shown.y)), self.federation.pool.balanced
        path = self.federation.network, plain.m0, outcome.model, shown.x, shown.y
        measured = self.rounds[outcome.round] = {}
        for utility in self.utilities:
            if utility.name in self.without:
                continue
            try:
                way = direction(*path, utility, blocks=blocks, balanced=balanced)
            except FedmeritError as error:  # a sum over the other rounds would not be what it says
                self.without[utility.name] = error, outcome.round
                continue
            measured[utility.name] = {
                "participants": list(outcome.included),
                "blocks": products_of(way.blocks, plain.updates.cpu().numpy()).tolist(),
                "sizes": list(way.sizes),
                **{key: getattr(way, key) for key in ("stratified", "gain", "rest", "points")},
            }


class Innovation:
    r"""An analysis of plain rounds: scores along what the last public updates do not show already.

    .. math:: \langle U_i, g - P g \rangle

    with P the projection on the last five public updates. Who replays them gets nothing.
    """

    def __init__(self, federation: Federation, rounds: dict[int, dict[str, dict[str, Any]]]) -> None:
        self.federation, self.rounds = federation, rounds
        self.known: list[torch.Tensor] = []

    def summed(self, plain: PlainRound) -> None:
        """Add the products beside the round's other Aumann-Shapley scores."""
        outcome, federation = plain.outcome, self.federation
        device, utility = federation.device, federation.utilities[0]
        shown = outcome.slice
        assert shown is not None
        x, y = as_tensor(shown.x).to(device), as_tensor(shown.y).to(device)
        way = direction(federation.network, plain.m0, outcome.model, x, y, utility, blocks=1)
        gradient = as_tensor(way.gradient).to(device)
        if self.known:
            basis, _ = torch.linalg.qr(torch.stack(self.known, dim=1))
            gradient = gradient - basis @ (basis.T @ gradient)
        updates = plain.updates.double()
        public = updates.sum(0)
        products = [float(update @ gradient) for update in updates]
        self.rounds[outcome.round]["innovation"] = {
            "participants": list(outcome.included),
            "blocks": [products],
            "sizes": [len(shown.y)],
            "gain": way.gain,
            "rest": way.gain - sum(products),
        }
        if float(public.norm()) > 0:
            self.known = [*self.known[1 - LAST :], public]


def halves(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of two halves with equally many samples of every class; a sample left over is out.

    >>> one, other = halves(np.array([0, 0, 0, 1, 1]), np.random.default_rng(0))
    >>> len(one), len(other), len(set(one) | set(other))
    (2, 2, 4)
    """
    found: tuple[list[int], list[int]] = [], []
    for label in np.unique(labels):
        places = rng.permutation(np.flatnonzero(labels == label))
        half = len(places) // 2
        for half_, own in zip(found, (places[:half], places[half : 2 * half]), strict=True):
            half_.extend(own.tolist())
    return np.array(sorted(found[0])), np.array(sorted(found[1]))


class Halves:
    """An analysis of plain rounds: every member's scores on each half of the pool, summed over the rounds.

    Args:
        federation: its fixed test pool is halved.
        evaluator: makes the one of all coalitions on test samples.

    Attributes:
        totals: per utility, half and score, one number a member.
    """

    def __init__(
        self, federation: Federation, evaluator: Callable[[Federation, Slice], Evaluator] | None = None
    ) -> None:
        shown = federation.pool.slice(1)
        both = halves(shown.y, np.random.default_rng(federation.seed("halves")))
        self.network, device = federation.network, federation.device
        slices = [replace(shown, x=shown.x[half], y=shown.y[half], id="") for half in both]
        self.images = [(as_tensor(one.x).to(device), as_tensor(one.y).to(device)) for one in slices]
        made = evaluator or _evaluator
        self.evaluators = [made(federation, one) for one in slices]
        names = ("ALPHA sum", "PHI sum", "MR-SV")
        zero = np.zeros(len(federation.names))
        self.totals = {u: [{name: zero.copy() for name in names} for _ in both] for u in SMOOTH}

    def summed(self, plain: PlainRound) -> None:
        """Add one round."""
        updates = plain.updates.cpu().numpy()
        for k, ((x, y), evaluator) in enumerate(zip(self.images, self.evaluators, strict=True)):
            tables = evaluator.tables(Game.of(plain, "additive"))
            for utility, smooth in SMOOTH.items():
                total, table = self.totals[utility][k], tables[utility]
                total["ALPHA sum"] += alpha(Reports.from_table(table)).raw
                total["MR-SV"] += shapley(table).values
                way = direction(
                    self.network, plain.m0, plain.outcome.model, x, y, resolve_all([smooth])[0], blocks=1
                )
                total["PHI sum"] += products_of(way.blocks, updates)[0]

    def kept(self) -> dict[str, list[dict[str, list[float]]]]:
        """Return the totals as a file holds them."""
        return {
            utility: [
                {name: [float(f"{v:.9g}") for v in values] for name, values in half.items()} for half in both
            ]
            for utility, both in self.totals.items()
        }


def _evaluator(federation: Federation, shown: Slice) -> Evaluator:
    return Evaluator(federation.network, shown.x, shown.y, federation.utilities)
