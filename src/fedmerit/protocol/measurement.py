"""What a member does with a model: it trains, builds the two models that only it can build, and measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.errors import BoundError
from fedmerit.protocol.outcome import Measured, Model, Outcome, Report, model_hash
from fedmerit.protocol.pool import BALANCED, Sampling, Slice
from fedmerit.scoring.sampling import degrees, error_parts, is_whole, least_change, least_error, sketch
from fedmerit.secagg.quantise import Encoding, Words, blocks

PerSample = Mapping[str, npt.NDArray[np.float64]]
"""Utility -> one number per test sample, shape (m,); or one per block, see `fedmerit.scoring.sampling`."""
Evaluate = Callable[[Model, Slice], PerSample]
Game = Literal["additive", "renormalised"]


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of local training: the model it started from, the change, the number of samples, and what an
    evaluation must know about the model's shape (anything that msgpack can carry)."""

    m0: Model
    delta: npt.NDArray[np.float32]
    samples: float | None
    shape: Any = None


def no_check(trained: Trained, config: Config) -> None:
    """Accept any update; masking refuses the bad ones."""


@dataclass(frozen=True, eq=False)
class Work:
    """A model to train: M0, the digest of everything else that came with it, the function that trains it, and
    a check that explains, in the app's own words, why the settings do not allow an update."""

    m0: Model
    extra: bytes
    train: Callable[[], Trained]
    check: Callable[[Trained, Config], None] = no_check
    m0_hash: str = ""  # given if it is known: many members of one process start from one array

    def __post_init__(self) -> None:
        object.__setattr__(self, "m0_hash", self.m0_hash or model_hash(self.m0))


@dataclass(frozen=True, eq=False)
class Contribution:
    """w_i d_i as it was summed, after rounding to integers; ``step`` is the value of one unit of them.

    In float64 it would be as large as two models, so it is taken part by part, in blocks that fit into the
    processor's cache.
    """

    integers: npt.NDArray[np.int32]
    step: float

    @classmethod
    def of(cls, words: Words, encoding: Encoding) -> Contribution:
        """Return what a member's own words stand for."""
        return cls(words[: encoding.length].view(np.int32), encoding.step)

    def part(self, at: slice) -> npt.NDArray[np.float64]:
        """Return the coordinates of a block."""
        return self.integers[at] * np.float64(self.step)

    def update(self, total_weight: float) -> Model:
        """Return U_i = w_i d_i / W."""
        update = np.empty(self.integers.shape, np.float32)
        for at in blocks(update.size):
            update[at] = self.part(at) / total_weight
        return update

    def cosine(self, m0: Model, m: Model) -> float | None:
        """Return the cosine with the whole change M - M0; products are summed block by block.

        Without BLAS, whose threads take longer to meet than a block takes.
        """
        products = np.zeros(3)
        for at in blocks(m0.size):
            own, change = self.part(at), np.subtract(m[at], m0[at], dtype=np.float64)
            pairs = (own, own), (change, change), (own, change)
            products += [np.einsum("i,i", one, other) for one, other in pairs]
        return cosine(*products.tolist())


class Evaluations:
    """Per-sample utilities of models, with a cache for M0 and M by their hashes: all members need both."""

    MOST = 4  # M0, M, and the first model if members also train alone

    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self._kept: dict[tuple[str, str], PerSample] = {}

    def __call__(self, model: Model, shown: Slice, digest: str = "") -> PerSample:
        """Return every utility of every sample; cache the result if the model's hash is given."""
        if not digest:
            return self.evaluate(model, shown)
        key = digest, shown.id
        found = self._kept.pop(key, None)
        self._kept[key] = self.evaluate(model, shown) if found is None else found  # in order of last use
        if len(self._kept) > self.MOST:
            del self._kept[next(iter(self._kept))]
        return self._kept[key]

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
        """Return the utilities of a member's two models and, with ``direction``, the cosine of its update.

        The experiments replace this where models are made on a GPU.
        """
        assert outcome.slice is not None
        alone, without = coalition_models(game, m0, outcome, contribution, weight)
        inside, outside = self(alone, outcome.slice), self(without, outcome.slice)
        return inside, outside, contribution.cosine(m0, outcome.model) if direction else None


@dataclass(eq=False)
class Scorer:
    """One member's side of scoring: what it keeps between rounds, and how it measures.

    ``totals`` are, per utility, alpha per test sample, summed over the rounds on the slice ``totals_on``
    (private).
    """

    name: str
    evaluate: Evaluations
    game: Game = "additive"
    sampling: Sampling = field(default_factory=Sampling)
    totals: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    totals_on: str = ""

    def report(
        self,
        m0: Model,
        outcome: Outcome,
        contribution: Contribution,
        weight: float,
        *,
        solo: Model | None = None,
        direction: bool = True,
    ) -> Report:
        """Evaluate M0 + U_i and M - U_i and return the report. The outcome must have been checked before.

        ``solo`` is the model this member trained alone, if it does so. ``direction`` reports the cosine with
        the whole change: it tells a server that chooses M one exact number about the update, so members who
        do not trust the server leave it out.
        """
        shown = outcome.slice
        if shown is None:
            return Report(self.name, outcome.round, outcome.bound_to, {}, None)
        before = self.evaluate(m0, shown, outcome.m0_hash)
        after = self.evaluate(outcome.model, shown, outcome.bound_to["m"])
        inside, outside, along = self.evaluate.of_member(
            self.game, m0, outcome, contribution, weight, direction=direction
        )
        models = before, after, inside, outside
        own = None if solo is None else self.evaluate(solo, shown)
        measured = {name: self._measure(name, outcome, models, own) for name in before}
        return Report(self.name, outcome.round, outcome.bound_to, measured, along)

    def _measure(
        self, name: str, outcome: Outcome, models: Sequence[PerSample], own: PerSample | None
    ) -> Measured:
        """Return one utility of the models M0, M, and the two of this member, with standard errors."""
        before, after, inside, outside = values = [model[name] for model in models]
        shown = outcome.slice
        assert shown is not None
        self.sampling.check(name, after, shown)
        loo, ioi = after - outside, inside - before
        alpha = (loo + ioi) / 2
        if self.totals_on != shown.id:
            self.totals, self.totals_on = {}, shown.id
        self.totals[name] = self.totals.get(name, np.zeros_like(alpha)) + alpha
        strata = self.sampling.strata(name, shown)
        parts = {
            key: error_parts(differences, strata)
            for key, differences in (
                ("se_loo", loo), ("se_ioi", ioi), ("se_alpha", alpha), ("se_alpha_total", self.totals[name])
            )
        }  # fmt: skip
        least = least_change(name, shown.y)
        if not is_whole(name):  # where a change of one outcome counts 1
            scale = class_scale(shown.y) if name == BALANCED else np.ones(1)
            least = least_error([value / scale for value in values], scale)
        errors: dict[str, Any] = {
            key: math.hypot(least / (1 if key in ("se_loo", "se_ioi") else 2), *part.tolist())
            for key, part in parts.items()
        }
        error_sketch = sketch(
            parts["se_alpha"], least / 2, slice_id=shown.id, round=outcome.round, client=self.name
        )
        return Measured(
            alone=mean(inside),
            without=mean(outside),
            solo=None if own is None else mean(own[name]),
            empty=mean(before),
            grand=mean(after),
            sketch=error_sketch,
            freedom=degrees(strata),
            **errors,
        )


def class_scale(labels: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return m / (C m_y) for every sample: what balanced accuracy multiplies its outcome by."""
    _, classes, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    return np.asarray(len(classes) / (len(counts) * counts[classes]), dtype=np.float64)


def coalition_models(
    game: Game, m0: Model, outcome: Outcome, contribution: Contribution, weight: float
) -> tuple[Model, Model]:
    r"""Return the two models that only this member can build: of the coalition {i}, and of all others.

    .. math:: \text{additive: } M_0 + U_i, \ M - U_i \text{ with } U_i = w_i d_i / W; \qquad
        \text{renormalised: } M_0 + d_i, \ M_0 + \frac{W (M - M_0) - w_i d_i}{W - w_i}
    """
    total = outcome.total_weight
    check_weight(game, weight, total)
    alone, without = np.empty(m0.shape, np.float32), np.empty(m0.shape, np.float32)
    for at in blocks(m0.size):
        own, start, model = contribution.part(at), m0[at], outcome.model[at]
        if game == "additive":
            update = (own / total).astype(np.float32)
            alone[at], without[at] = start + update, model - update
        else:
            change = np.subtract(model, start, dtype=np.float64)
            rest = (change * total - own) / (total - weight)
            alone[at] = start + (own / weight).astype(np.float32)
            without[at] = start + rest.astype(np.float32)
    return alone, without


def check_weight(game: Game, weight: float, total: float) -> None:
    """Raise BoundError if the renormalised game has no model of this member, or none of all others."""
    if game == "renormalised" and (weight <= 0 or total - weight <= 0):
        raise BoundError(
            f"the renormalised game needs 0 < w_i < W, got {weight:g} of {total:g}", stage="report"
        )


def cosine(one: float, other: float, product: float) -> float | None:
    """Return the cosine of two vectors from <a, a>, <b, b> and <a, b>; None if one of them is zero.

    >>> cosine(4.0, 9.0, -6.0)
    -1.0
    """
    scale = math.sqrt(one) * math.sqrt(other)
    return None if scale == 0.0 else max(-1.0, min(1.0, product / scale))


def mean(values: npt.NDArray[np.float64]) -> float:
    return math.fsum(values) / values.size
