"""Weights from scores: of the rounds before, which everybody can know, or of this round, which nobody may.

The paper weights each update by its normalised score of the current round. That takes two sums over the same
updates, one to score them and one with the weights; their difference gives updates away, so members refuse
the second. It exists here for analysis: the engine looks at plain updates in the place of the first sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedmerit.accumulate import Missing, accumulate
from fedmerit.agreement import normalise
from fedmerit.federation.measuring import cosine, mean
from fedmerit.federation.protocol import Model
from fedmerit.scores import SCORES
from fedmerit.types import Reports, Vector

if TYPE_CHECKING:  # which needs torch; whoever verifies may not have it
    from fedmerit.federation.setup import Federation

LEAST, MOST = 0.1, 3.0
"""Weights are clipped to this range: nobody is shut out, nobody takes over."""


def weights_of(values: Vector, clients: Sequence[str]) -> dict[str, float]:
    """clip(normalise(scores), 0.1, 3): above 1 for those above the mean of what lies over the lowest."""
    clipped = np.clip(normalise(values), LEAST, MOST)
    return dict(zip(clients, clipped.tolist(), strict=True))


def from_past(
    rounds: Sequence[Reports], names: Sequence[str], *, score: str, missing: Missing
) -> dict[str, float]:
    """Weights from a score summed over the rounds before; 1 in the first round, and for newcomers."""
    weights = dict.fromkeys(names, 1.0)
    if rounds:
        total = accumulate(rounds, score=score, missing=missing)
        weights |= weights_of(total.values, total.clients)
    return weights


def from_this_round(
    federation: Federation, number: int, start: Model, trained: Mapping[str, Model], score: str
) -> dict[str, float]:
    """Weights from this round's own scores under plain averaging. Analysis only."""
    finite = {name: model for name, model in trained.items() if bool(np.isfinite(model).all())}
    weights = dict.fromkeys(trained, 1.0)
    if len(finite) < 2:
        return weights
    shown, utility = federation.pool.slice(number), federation.utilities[0].name
    updates = {name: (model - start) / np.float32(len(finite)) for name, model in finite.items()}
    change = np.sum(np.stack(list(updates.values())), axis=0, dtype=np.float64)
    grand = (start + change).astype(np.float32)

    def value(model: Model) -> float:
        return mean(federation.evaluate(model, shown)[utility])

    reports = Reports(
        empty=value(start),
        grand=value(grand),
        alone=np.array([value(start + update) for update in updates.values()]),
        without=np.array([value(grand - update) for update in updates.values()]),
        clients=tuple(updates),
        cosine=[cosine(update.astype(np.float64), change) for update in updates.values()],  # type: ignore[arg-type]
        round=number,
    )
    return weights | weights_of(SCORES[score].function(reports).raw, reports.clients)
