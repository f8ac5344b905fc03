"""How close two score vectors are: normalised L2, Spearman, Kendall, Pearson, and permutation p-values."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, ReportError
from fedmerit.scoring.scores import Empty, ee, fp, loo
from fedmerit.scoring.types import Reports, Scores, Status, Vector, settle
from fedmerit.scoring.validate import floats, labels_of, whole

EXACT_CLIENTS = 7
"""Up to this many clients, the p-values use all N! permutations."""

Minimum = Literal["always", "negative"]
"""Whether a normalisation subtracts the minimum always, or only if it is negative."""

MAX_P_CLIENTS = 30
"""Above this many clients, no p-values are computed."""


@dataclass(frozen=True)
class Agreement:
    """Distance and correlations of two score vectors; an undefined one is None, never 0.

    ``p_spearman``, ``p_kendall`` and ``p_pearson`` are two-sided permutation p-values: how often a random
    assignment of the scores to the clients agrees, or disagrees, at least as much. With 4 clients even a
    perfect ranking is reached by 1 assignment in 24, so read the coefficient together with its p-value.
    """

    n: int
    l2: float
    spearman: float | None
    kendall: float | None
    pearson: float | None
    p_spearman: float | None = None
    p_kendall: float | None = None
    p_pearson: float | None = None


def normalise(values: Scores | npt.ArrayLike, *, minimum: Minimum = "always") -> Vector:
    r"""Return the values normalised as in the paper: subtract the minimum, then divide by the mean.

    .. math:: n(x)_i = \frac{x_i - \min x}{\frac1N \sum_j (x_j - \min x)}

    The result does not change when x is shifted or scaled by a positive factor. If all values are equal up
    to rounding, the formula is 0/0 and the result is all ones.

    Args:
        values: shape (N,), or ``Scores``, whose ``values`` are used.
        minimum: ``"always"`` subtracts it, as the paper says; ``"negative"`` only if it is negative, as the
            code published with the paper does. The result then changes when x is shifted.

    >>> normalise([1, 2, 6]), normalise([1, 2, 6], minimum="negative")
    (array([0. , 0.5, 2.5]), array([0.33333333, 0.66666667, 2.        ]))
    >>> normalise([0.3, 0.1 + 0.2])
    array([1., 1.])
    """
    vector = _vector(values, "values")
    if _is_constant(vector):
        return np.ones_like(vector)
    if minimum not in get_args(Minimum):
        raise InputError(f"minimum must be 'always' or 'negative', got {minimum!r:.100}")
    scaled = _scaled(vector)
    least = scaled.min()
    shifted = scaled - (least if minimum == "always" else min(least, 0.0))
    return np.asarray(shifted / shifted.mean(), dtype=np.float64)


def agreement(
    scores: Scores | npt.ArrayLike,
    truth: Scores | npt.ArrayLike,
    *,
    minimum: Minimum = "always",
    resamples: int = 9999,
    seed: int = 0,
) -> Agreement:
    r"""Measure how close ``scores`` are to ``truth``.

    .. math:: L_2 = \| n(\text{scores}) - n(\text{truth}) \|_2

    with n as in :func:`normalise`. (The code published with the paper prints the square of this distance.)
    Spearman is the correlation of average ranks, Kendall is tau-b, and both treat values that differ only
    by rounding as ties. A coefficient is None if one of the vectors is constant.

    Clients are matched by name if both sides name them, and by position otherwise. ``Scores`` name them, and
    so does a pandas Series unless its labels are 0, 1, ... For ``Scores``, the published ``values`` are
    compared, as in the paper; a score whose status is "reversed" therefore disagrees with its own raw
    vector. Pass ``scores.raw`` to compare the raw vector.

    Args:
        scores: shape (N,), or ``Scores``.
        truth: shape (N,), or ``Scores``.
        minimum: see :func:`normalise`; it changes L2 alone.
        resamples: number of random permutations for the p-values of more than 7 clients (up to 7, all
            permutations are used); 0 for no p-values. Above 30 clients there are none.
        seed: seed of those permutations.

    >>> a = agreement([1, 2, 3, 4], [1, 2, 4, 3])
    >>> round(a.spearman, 3), round(a.kendall, 3), round(a.p_kendall, 3)
    (0.8, 0.667, 0.333)
    >>> agreement([1, 1, 1], [1, 2, 3]).spearman is None
    True
    """
    x, y = _matched(scores, truth)
    resamples, seed = whole(resamples, "resamples"), whole(seed, "seed")
    l2 = float(np.linalg.norm(normalise(x, minimum=minimum) - normalise(y, minimum=minimum)))
    if _is_constant(x) or _is_constant(y):
        return Agreement(n=x.size, l2=l2, spearman=None, kendall=None, pearson=None)
    ranks = _average_ranks(x), _average_ranks(y)
    found = _pearson(*ranks), _kendall(*ranks), _pearson(x, y)
    p: tuple[float | None, ...] = (None, None, None)
    if resamples and x.size <= MAX_P_CLIENTS:
        p = _p_values(_standardised(x), _standardised(y), *ranks, resamples=resamples, seed=seed)
    return Agreement(x.size, l2, *found, *p)


def _p_values(
    x: Vector, y: Vector, x_ranks: Vector, y_ranks: Vector, *, resamples: int, seed: int
) -> tuple[float, float, float]:
    """Return the share of permutations of y whose |coefficient| reaches the observed one.

    The three shares are for Spearman, Kendall and Pearson. A permutation leaves the denominators the same, so
    it is enough to compare numerators. The set of all permutations includes the observed one; a random sample
    need not, so the observed one is added and p is never 0.
    """
    n = x.size
    left, right = np.triu_indices(n, 1)
    order = np.sign(x_ranks[left] - x_ranks[right])
    centred = _standardised(x_ranks), _standardised(y_ranks)
    numerators: tuple[Callable[[npt.NDArray[np.int64]], Vector], ...] = (
        lambda p: centred[1][p] @ centred[0],
        lambda p: np.sign(y_ranks[p[:, left]] - y_ranks[p[:, right]]) @ order,
        lambda p: y[p] @ x,
    )
    identity = np.arange(n)[None, :]
    bars = [abs(float(f(identity)[0])) - 1e-10 for f in numerators]  # minus a margin for rounding
    counts, total = np.zeros(3), 0
    for chunk in _permutations(n, resamples, seed):
        total += len(chunk)
        counts += [np.count_nonzero(np.abs(f(chunk)) >= bar) for f, bar in zip(numerators, bars, strict=True)]
    extra = 0 if n <= EXACT_CLIENTS else 1
    spearman, kendall, pearson = ((counts + extra) / (total + extra)).tolist()
    return spearman, kendall, pearson


def _permutations(n: int, resamples: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    if n <= EXACT_CLIENTS:
        yield _all_permutations(n)
        return
    generator = np.random.default_rng(seed)
    for start in range(0, resamples, 1000):
        rows = np.tile(np.arange(n), (min(1000, resamples - start), 1))
        yield generator.permuted(rows, axis=1)


@lru_cache(maxsize=EXACT_CLIENTS)
def _all_permutations(n: int) -> npt.NDArray[np.int64]:
    return np.array(list(permutations(range(n))), dtype=np.int64)


def _pearson(x: Vector, y: Vector) -> float:
    r = float(_standardised(x) @ _standardised(y))
    return r if abs(r) < 1 - 1e-14 else math.copysign(1.0, r)  # snap to exactly 1 or -1 within rounding


def _standardised(x: Vector) -> Vector:
    """Return x centred and scaled to length 1."""
    scaled = _scaled(x)
    centred = scaled - scaled.mean()
    return np.asarray(centred / np.linalg.norm(centred), dtype=np.float64)


def _scaled(x: Vector) -> Vector:
    """Return x divided by a power of two: huge values do not overflow, and nothing is rounded."""
    _, exponent = math.frexp(float(np.max(np.abs(x))))
    return np.ldexp(x, -exponent)


def _average_ranks(x: Vector) -> Vector:
    """Return ranks from 1 (smallest); equal values share the average of their ranks."""
    _, inverse, counts = np.unique(settle(x), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=np.float64)


def _kendall(x: Vector, y: Vector) -> float:
    """Return Kendall's tau-b: concordant minus discordant pairs, over the geometric mean of untied pairs."""
    concordance = untied_x = untied_y = 0
    for i in range(x.size - 1):  # one row at a time, so that memory stays O(N)
        dx, dy = np.sign(x[i + 1 :] - x[i]), np.sign(y[i + 1 :] - y[i])
        concordance += int(dx @ dy)
        untied_x += int(np.count_nonzero(dx))
        untied_y += int(np.count_nonzero(dy))
    return concordance / math.sqrt(untied_x * untied_y)


def _is_constant(x: Vector) -> bool:
    """Return whether all values are equal up to rounding."""
    return not settle(x).any()


def _matched(scores: Scores | npt.ArrayLike, truth: Scores | npt.ArrayLike) -> tuple[Vector, Vector]:
    x, y = _vector(scores, "scores"), _vector(truth, "truth")
    names, other = _names(scores, "scores"), _names(truth, "truth")
    if names is not None and other is not None:
        odd = sorted(set(names) ^ set(other), key=str)
        if odd:
            only, what = (scores, "scores") if odd[0] in names else (truth, "truth")
            where = only.score if isinstance(only, Scores) else what
            raise ReportError(f"client {odd[0]!r} is only in {where}; both need the same clients")
        place = {client: i for i, client in enumerate(other)}
        y = y[[place[client] for client in names]]
    if x.size != y.size:
        raise ReportError(
            f"expected two vectors of the same length, got {x.size} scores and {y.size} true values"
        )
    if x.size < 2:
        raise ReportError("agreement needs at least 2 clients, got 1")
    return x, y


def _names(values: Scores | npt.ArrayLike, what: str) -> tuple[Hashable, ...] | None:
    """Return the names of the clients that the values belong to, or None if unknown."""
    names = values.clients if isinstance(values, Scores) else labels_of(values)
    if names is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ReportError(f"{what}: label {twice!r} appears more than once")
    return names


def _vector(values: Scores | npt.ArrayLike, what: str) -> Vector:
    if isinstance(values, Scores):
        return values.values
    vector = floats(values, what)
    if vector.ndim != 1 or vector.size == 0:
        raise ReportError(f"{what}: expected one number per client, got shape {vector.shape}")
    bad = np.flatnonzero(~np.isfinite(vector))
    if bad.size:
        raise ReportError(f"{what}[{int(bad[0])}] must be a finite number, got {vector[bad[0]]}")
    return vector


# ------------------------------------------------------------------------------------------ the paper's table

# tab:error: how close LOO, FP, EE and COS of one round come to the Shapley value. The paper's text and the
# scripts that its authors published compute it differently:
#
# what           scripts                           text
# v(empty)       0                                 v(M0)
# truth          Shapley value of the same round   MR-SV over all rounds
# normalisation  minimum subtracted if negative    minimum always subtracted
# L2             squared                           not squared

Values = Mapping[str, float]
"""A number per client, by name."""


@dataclass(frozen=True)
class PaperRow:
    """How close one score is to the truth; ``status`` is that of FP and EE, and "ok" for the others."""

    score: str
    near: Agreement
    status: Status = "ok"


def by_scripts(last: Reports, truth: Values, beside: Mapping[str, Values]) -> tuple[PaperRow, ...]:
    r"""Return the table as the authors' scripts compute it.

    If nobody's coalition is worth 0 and not v(M0), every Shapley value grows by v(M0)/N.

    Args:
        last: reports of everybody in the sum of the round.
        truth: the Shapley values of the round, with v(M0) for nobody's coalition.
        beside: other scores by name, such as COS.

    >>> r = Reports(empty=6, grand=5, alone=[4, 5], without=[5, 4], clients=["A", "B"])   # v(M0) = 6
    >>> [(one.score, one.status, one.near.spearman) for one in by_scripts(r, {"A": -1, "B": 0}, {})]
    [('LOO', 'ok', 1.0), ('FP', 'ok', 1.0), ('EE', 'ok', 1.0)]
    """
    shifted = {name: value + last.empty / last.n for name, value in truth.items()}
    return _rows(last, shifted, beside, empty="zero")


def by_text(last: Reports, truth: Values, beside: Mapping[str, Values]) -> tuple[PaperRow, ...]:
    """Return the table as the paper's text defines it; arguments as in `by_scripts`, truth is MR-SV.

    >>> r = Reports(empty=6, grand=5, alone=[4, 5], without=[5, 4], clients=["A", "B"])
    >>> [(one.score, one.status, one.near.spearman) for one in by_text(r, {"A": -1, "B": 0}, {})]
    [('LOO', 'ok', 1.0), ('FP', 'reversed', -1.0), ('EE', 'reversed', -1.0)]
    """
    return _rows(last, truth, beside, empty="model")


def _rows(last: Reports, truth: Values, beside: Mapping[str, Values], empty: Empty) -> tuple[PaperRow, ...]:
    def near(values: npt.ArrayLike) -> Agreement:
        known = np.array([truth[name] for name in last.clients])
        return agreement(values, known, minimum="negative" if empty == "zero" else "always", resamples=0)

    made: Sequence[Scores] = (loo(last), fp(last, empty=empty), ee(last, empty=empty))
    return (
        *(PaperRow(one.score, near(one.values), one.status) for one in made),
        *(PaperRow(name, near([found[one] for one in last.clients])) for name, found in beside.items()),
    )
