"""How close two score vectors are: normalised L2, Spearman, Kendall, Pearson, and how surprising that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np
import numpy.typing as npt

from fedmerit.errors import ReportError
from fedmerit.scoring.types import Scores, Vector, settle
from fedmerit.scoring.validate import floats, labels_of, whole

EXACT_CLIENTS = 7
"""Up to this many clients all N! permutations are looked at."""

MAX_P_CLIENTS = 30
"""Above this many clients no permutation p-values are computed."""


@dataclass(frozen=True)
class Agreement:
    """Distance and correlations of two score vectors; None where undefined, never 0.

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


def normalise(values: Scores | npt.ArrayLike) -> Vector:
    r"""The paper's normalisation for comparing scores: minus the minimum, divided by the mean.

    .. math:: n(x)_i = \frac{x_i - \min x}{\frac1N \sum_j (x_j - \min x)}

    It does not change when x is scaled by a positive factor or shifted. All ones if all values are equal
    (up to rounding), where the formula is 0/0.

    Args:
        values: shape (N,), or ``Scores``, whose ``values`` are taken.

    >>> normalise([1, 2, 6])
    array([0. , 0.5, 2.5])
    >>> normalise([0.3, 0.1 + 0.2])
    array([1., 1.])
    """
    vector = _vector(values, "values")
    if _is_constant(vector):
        return np.ones_like(vector)
    scaled = _scaled(vector)
    shifted = scaled - scaled.min()
    return np.asarray(shifted / shifted.mean(), dtype=np.float64)


def agreement(
    scores: Scores | npt.ArrayLike,
    truth: Scores | npt.ArrayLike,
    *,
    resamples: int = 9999,
    seed: int = 0,
) -> Agreement:
    r"""How close ``scores`` are to ``truth``.

    .. math:: L_2 = \| n(\text{scores}) - n(\text{truth}) \|_2

    with n as in :func:`normalise`. (The code published with the paper prints the square of this distance.)
    Spearman is the correlation of average ranks, Kendall is tau-b, and both see values that differ by
    rounding alone as ties. A coefficient is None where one of the vectors is constant.

    Clients are matched by name where both sides name them, ``Scores`` or a pandas Series whose labels do not
    just count, and by position otherwise. Of ``Scores`` the published ``values`` are compared, as in the
    paper; a score whose status is "reversed" therefore disagrees with its own raw vector. Pass
    ``scores.raw`` to compare that.

    Args:
        scores: shape (N,), or ``Scores``.
        truth: shape (N,), or ``Scores``.
        resamples: random permutations for the p-values above 7 clients (below, all are looked at);
            0 for no p-values. None are computed above 30 clients.
        seed: of those permutations.

    >>> a = agreement([1, 2, 3, 4], [1, 2, 4, 3])
    >>> round(a.spearman, 3), round(a.kendall, 3), round(a.p_kendall, 3)
    (0.8, 0.667, 0.333)
    >>> agreement([1, 1, 1], [1, 2, 3]).spearman is None
    True
    """
    x, y = _matched(scores, truth)
    resamples, seed = whole(resamples, "resamples"), whole(seed, "seed")
    l2 = float(np.linalg.norm(normalise(x) - normalise(y)))
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
    """Share of permutations of y whose |coefficient| reaches the observed one: Spearman, Kendall, Pearson.

    Under permutation the denominators stay the same, so comparing the numerators is enough. All permutations
    include the observed one; random ones do not, so it is added (p is never 0).
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
    bars = [abs(float(f(identity)[0])) - 1e-10 for f in numerators]  # less what rounding may hide
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
    return r if abs(r) < 1 - 1e-14 else math.copysign(1.0, r)  # perfect up to rounding is perfect


def _standardised(x: Vector) -> Vector:
    """Centred, of length 1."""
    scaled = _scaled(x)
    centred = scaled - scaled.mean()
    return np.asarray(centred / np.linalg.norm(centred), dtype=np.float64)


def _scaled(x: Vector) -> Vector:
    """Divided by a power of two, which rounds nothing, so that huge values do not overflow."""
    _, exponent = math.frexp(float(np.max(np.abs(x))))
    return np.ldexp(x, -exponent)


def _average_ranks(x: Vector) -> Vector:
    """Ranks from 1 (smallest); equals share the average of their places."""
    _, inverse, counts = np.unique(settle(x), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=np.float64)


def _kendall(x: Vector, y: Vector) -> float:
    """Kendall's tau-b: concordant minus discordant pairs over the geometric mean of the untied pairs."""
    concordance = untied_x = untied_y = 0
    for i in range(x.size - 1):  # a row at a time: memory stays O(N)
        dx, dy = np.sign(x[i + 1 :] - x[i]), np.sign(y[i + 1 :] - y[i])
        concordance += int(dx @ dy)
        untied_x += int(np.count_nonzero(dx))
        untied_y += int(np.count_nonzero(dy))
    return concordance / math.sqrt(untied_x * untied_y)


def _is_constant(x: Vector) -> bool:
    """Whether all values are equal, or differ by rounding alone."""
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
            f"expected two vectors of the same length, got {x.size} scores and {y.size} of truth"
        )
    if x.size < 2:
        raise ReportError("agreement needs at least 2 clients, got 1")
    return x, y


def _names(values: Scores | npt.ArrayLike, what: str) -> tuple[Hashable, ...] | None:
    """Whose the values are, where that is known."""
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
