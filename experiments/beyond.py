"""What members could also measure under secure aggregation: a run's whole path, and solo models together.

Neither is a score of fedmerit yet; the experiments ask whether one should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedmerit.protocol.outcome import Model, mean
from fedmerit.simulation.models import as_tensor, load_vector, prepare
from fedmerit.simulation.setup import Federation
from fedmerit.simulation.utilities import balance, evaluation, float32

WHOLE = 9
"""Ensembles of all coalitions are evaluated up to so many members."""


class Paths:
    """The federation's path without one member, as that member can add it up by itself.

    A member knows every global model and its own updates, so over all rounds it can leave its own part out:

    - additive: M_T - sum_t U_i,t
    - renormalised: M_0 + sum_t (W (M_t - M_t-1) - w_i d_i,t) / (W - w_i)

    The others' updates stay those that they made beside it. This is the one-round reconstruction of Song et
    al. (2019) for the coalition of everyone else.
    """

    def __init__(self, first: Model) -> None:
        self.first = first
        self.own: dict[str, Model] = {}
        self.others: dict[str, Model] = {}

    def add(self, name: str, update: Model, rest: Model) -> None:
        """One round: U_i, and the mean update of everybody else."""
        self.own[name] = self.own.get(name, np.zeros_like(self.first)) + update
        self.others[name] = self.others.get(name, np.zeros_like(self.first)) + rest

    def models(self, last: Model) -> dict[str, dict[str, Model]]:
        """By kind and member."""
        return {
            "path without": {name: last - own for name, own in self.own.items()},
            "path without, renormalised": {name: self.first + one for name, one in self.others.items()},
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
