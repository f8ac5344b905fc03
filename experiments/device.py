"""What members put into a sum, on the device where models are evaluated.

The models equal those that `protocol.outcome` computes with numpy, bit for bit: the same products and
quotients in float64, rounded to float32 at the same places. But a member's integers travel to the device
once, rather than every model that follows from them. Only cosines may differ in their last bits, because
the device sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fedmerit.protocol.outcome import (
    Contribution,
    Evaluations,
    Game,
    Model,
    Outcome,
    PerSample,
    check_weight,
    cosine,
)
from fedmerit.protocol.pool import Slice
from fedmerit.simulation.models import as_tensor

Evaluate = Callable[[Model | Tensor, Slice], PerSample]
"""As `protocol.outcome.Evaluate`, also of a vector that is on the device already."""


def contribution_on(device: torch.device, contribution: Contribution) -> Tensor:
    """Return w_i d_i in float64, as a new tensor."""
    return as_tensor(contribution.integers).to(device).double().mul_(contribution.step)


def quotient(values: Tensor, divisor: float) -> Tensor:
    """Return values / divisor, rounded as on a CPU: by a number of Python a GPU divides less exactly."""
    return values / torch.tensor(divisor, dtype=values.dtype, device=values.device)


def updates_on(device: torch.device, start: Model, trained: Iterable[Model]) -> list[Tensor]:
    """Return the updates of members with equal weights, from their local models before any sum."""
    first, models = as_tensor(start).to(device), list(trained)
    return [quotient(as_tensor(model).to(device) - first, len(models)) for model in models]


def cosine_of(update: Tensor, change: Tensor) -> float | None:
    """Return the cosine of two vectors in float64."""
    pairs = (update, update), (change, change), (update, change)
    return cosine(*torch.stack([one @ other for one, other in pairs]).tolist())


def models_on(
    game: Game, m0: Tensor, m: Tensor, contribution: Tensor, weight: float, total: float
) -> tuple[Tensor, Tensor]:
    """Return the models of a member alone and of all others, as `protocol.outcome.coalition_models`.

    Args:
        game: how coalition models are built.
        m0: the model before the round.
        m: the model after it.
        contribution: w_i d_i in float64.
        weight: w_i.
        total: W.
    """
    check_weight(game, weight, total)
    if game == "additive":
        update = quotient(contribution, total).float()
        return m0 + update, m - update
    rest = quotient(m.double().sub_(m0).mul_(total).sub_(contribution), total - weight)
    return m0 + quotient(contribution, weight).float(), m0 + rest.float()


class DeviceEvaluations(Evaluations):
    """Evaluations of members who share a process and a GPU: their models are made there.

    Args:
        evaluate: returns the utilities of a model, which may be a vector on the device.
        device: where the network is.
    """

    def __init__(self, evaluate: Evaluate, device: torch.device) -> None:
        super().__init__(evaluate)
        self.of_vector, self.device = evaluate, device
        self._round: tuple[Outcome, Tensor, Tensor] | None = None

    def of_member(
        self,
        game: Game,
        m0: Model,
        outcome: Outcome,
        contribution: Contribution,
        weight: float,
        *,
        direction: bool,
    ) -> tuple[PerSample, PerSample, float | None]:
        """Return the utilities of a member's two models, and the cosine of its update with the change."""
        assert outcome.slice is not None
        if self._round is None or self._round[0] is not outcome:  # all members are told the same one
            before, after = as_tensor(m0).to(self.device), as_tensor(outcome.model).to(self.device)
            self._round = outcome, before, after
        _, before, after = self._round
        own = contribution_on(self.device, contribution)
        alone, without = models_on(game, before, after, own, weight, outcome.total_weight)
        inside, outside = self.of_vector(alone, outcome.slice), self.of_vector(without, outcome.slice)
        return inside, outside, cosine_of(own, after.double().sub_(before)) if direction else None
