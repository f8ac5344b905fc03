"""The ground truth, which needs the utility of all 2^N coalitions, and how close scores come to it.

Secure aggregation never yields such a ``Table``, so the values refuse ``Reports``. Each is a semivalue: a
weighted sum of what client i adds to the coalitions S without i, where the weight depends only on the size
of S:

.. math:: \\phi_i = \\sum_{S \\not\\ni i} w_{|S|} \\, [v(S \\cup \\{i\\}) - v(S)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, NeedsTable, ReportError
from fedmerit.notes import Note
from fedmerit.scoring.scores import Empty, ee, fp, loo
from fedmerit.scoring.types import (
    A_NUMBER,
    LARGEST,
    Reports,
    Scores,
    Status,
    Table,
    Vector,
    floats,
    in_order,
    labels_of,
    names_of,
    number,
    settle,
    whole,
)

# ------------------------------------------------------------------------------------------ all coalitions


def shapley(table: Table) -> Scores:
    r"""Return the Shapley value: what a client adds, averaged over all orders of arrival (eq. 1).

    .. math:: SV(i) = \frac1N \sum_{S \subseteq [N] \setminus \{i\}}
              \binom{N-1}{|S|}^{-1} [v(S \cup \{i\}) - v(S)]

    The paper prints eq. 1 without the inverse of the binomial; with it, the values sum to the gain,
    v(everyone) - v(nobody).

    >>> shapley(Table([0, 1, 2, 5], ["A", "B"])).as_dict()      # A: (1 + 5 - 2) / 2
    {'A': 2.0, 'B': 3.0}
    """
    n = _table(table, "shapley").n
    return _scores("SV", table, [1 / (n * math.comb(n - 1, size)) for size in range(n)])


def banzhaf(table: Table) -> Scores:
    r"""Return the Banzhaf value: what a client adds to a random coalition of the others, all equally likely.

    .. math:: B(i) = 2^{-(N-1)} \sum_{S \subseteq [N] \setminus \{i\}} [v(S \cup \{i\}) - v(S)]

    In general, the values do not sum to the gain.

    >>> banzhaf(Table([0, 0, 0, 0, 0, 0, 0, 1])).values         # all three are needed
    array([0.25, 0.25, 0.25])
    """
    n = _table(table, "banzhaf").n
    return _scores("BANZHAF", table, [0.5 ** (n - 1)] * n)


def semivalue(table: Table, weights: Sequence[float] | Vector) -> Scores:
    r"""Return any semivalue: ``weights[k]`` is the weight of EACH coalition of size k that client i joins.

    .. math:: \phi_i = \sum_{S \subseteq [N] \setminus \{i\}} w_{|S|} \, [v(S \cup \{i\}) - v(S)]

    where :math:`\sum_k \binom{N-1}{k} w_k = 1`, or else a note says so. Weight 1 on size N-1 is LOO, on size
    0 IOI, and 1/2 on both is alpha (eq. 3).

    >>> semivalue(Table([0, 1, 2, 5], ["A", "B"]), [0, 1]).as_dict()      # LOO
    {'A': 3.0, 'B': 4.0}
    """
    n = _table(table, "semivalue").n
    if (labels := labels_of(weights)) is not None:
        got = f"got {labels[0]!r:.50} first"
        raise InputError(f"semivalue: labels of weights must be the sizes 0, 1, 2, ..., {got}")
    by_size = floats(weights, "semivalue: weights")
    if by_size.shape != (n,):
        expected = f"expected {n} weights, one per size 0..{n - 1}"
        raise InputError(f"semivalue: {expected}, got shape {by_size.shape}")
    for size in np.flatnonzero(~((by_size >= 0) & (by_size <= LARGEST))):
        raise InputError(f"semivalue: weights[{size}] must be from 0 to {LARGEST:g}, got {by_size[size]}")
    total = math.fsum(math.comb(n - 1, size) * float(by_size[size]) for size in range(n))
    note = Note("multiple", total=total)
    return _scores("SEMIVALUE", table, by_size, notes=() if abs(total - 1) <= 1e-9 else (note,))


def multi_round(tables: Iterable[Table]) -> Scores:
    r"""Return the Shapley value averaged over rounds (MR-SV, Song et al. 2019, Algorithm 2).

    .. math:: MR\text{-}SV(i) = \frac1R \sum_{t=1}^{R} SV_t(i)

    All tables have the same clients, in any order.

    >>> multi_round([Table([0, 1, 2, 5], ["A", "B"]), Table([0, 2, 0, 2], ["A", "B"])]).as_dict()
    {'A': 2.0, 'B': 1.5}
    """
    if isinstance(tables, Table) or not isinstance(tables, Iterable):
        raise ReportError(f"multi_round needs a list of tables, one per round, got {type(tables).__name__}")
    rounds = [_table(table, "multi_round") for table in tables]
    if not rounds:
        raise ReportError("multi_round needs at least one table, got none")
    clients = rounds[0].clients
    for place, table in enumerate(rounds[1:], start=2):
        if odd := sorted(set(clients) ^ set(table.clients)):
            where = f"table {place}" if odd[0] in table.clients else "table 1"
            raise ReportError(f"multi_round: client {odd[0]!r} is only in {where}; all need the same clients")
    values = np.sum([in_order(shapley(table), clients).raw for table in rounds], axis=0) / len(rounds)
    gain = math.fsum(table.gain for table in rounds) / len(rounds)
    return Scores(score="MR-SV", clients=clients, values=values, raw=values, gain=gain, rounds=len(rounds))


def _scores(
    name: str, table: Table, weights: Sequence[float] | Vector, notes: tuple[str, ...] = ()
) -> Scores:
    """Return the scores with this weight per size of coalition.

    As an array of shape (2^(N-1-i), 2, 2^i), the table has bit i on the middle axis. With bit i dropped, the
    coalitions without i are 0, 1, ..., 2^(N-1) - 1, so every i has the same weights in the same order.
    """
    by_coalition = np.asarray(weights, dtype=np.float64)[_sizes(table.n - 1)]
    values = np.empty(table.n)
    for i in range(table.n):
        split = table.values.reshape(-1, 2, 1 << i)
        marginal = np.subtract(split[:, 1, :], split[:, 0, :]).reshape(-1)
        marginal *= by_coalition
        values[i] = marginal.sum()  # pairwise summation: the error grows with the log of the number of terms
    return Scores(score=name, clients=table.clients, values=values, raw=values, gain=table.gain, notes=notes)


def _sizes(bits: int) -> npt.NDArray[np.uint8]:
    """Return the size of each of the 2^bits coalitions."""
    sizes = np.zeros(1, dtype=np.uint8)
    for _ in range(bits):
        sizes = np.concatenate([sizes, sizes + np.uint8(1)])
    return sizes


def _table(table: object, function: str) -> Table:
    if isinstance(table, Reports):
        raise NeedsTable(
            f"{function} needs a Table with the utility of all 2^N coalitions, got Reports, which hold "
            "2N + 2: secure aggregation yields no more. Use alpha, fp or ee, or evaluate every coalition."
        )
    if not isinstance(table, Table):
        raise NeedsTable(f"{function} needs a Table of 2^N utilities, got {type(table).__name__}")
    return table


# ---------------------------------------------------------------------------------------- a sample of them

LEAST_PAIRS = 10
"""With fewer pairs of orders, no standard error is given: 95 % intervals from 2 pairs cover 85 to 90 % in
smooth games (93 % from 10 pairs on), and far less in games where a client rarely matters."""


def sampled_shapley(
    value: Callable[[int], float], clients: int | np.integer[Any] | Iterable[str], *,
    budget: int, seed: int = 0,
) -> Scores:  # fmt: skip
    r"""Estimate the Shapley value from random orders of arrival and their reverses.

    .. math:: \hat\phi_i = \frac1{2K} \sum_{k=1}^{K} [v(P_i^{\pi_k} \cup \{i\}) - v(P_i^{\pi_k})]
              + [v(P_i^{\bar\pi_k} \cup \{i\}) - v(P_i^{\bar\pi_k})]

    where :math:`P_i^\pi` are the clients before i in the order :math:`\pi`, and :math:`\bar\pi` is its
    reverse. The standard error is :math:`\mathrm{sd}_i / \sqrt K` with K - 1 degrees of freedom, from K = 10
    pairs on, and 0 if every coalition was evaluated. The values add up to the gain.

    Args:
        value: (bitmask of a coalition) -> its utility; called at most once for each.
        clients: number of clients, or their names.
        budget: the most coalitions to evaluate; if it covers all of them, the value is exact.
        seed: seed of the random orders, 0 or more.

    >>> game = lambda mask: float(mask.bit_count() ** 2)      # symmetric: everyone is worth N
    >>> sampled_shapley(game, 4, budget=14).values
    array([4., 4., 4., 4.])
    """
    names = names_of(clients, None, "sampled_shapley: ") if isinstance(clients, Iterable) else ()
    n = len(names) or whole(clients, "clients, unless they are names,", 1)
    if not 2 <= n <= 62:
        raise InputError(f"sampled_shapley needs 2 to 62 clients, got {n}")
    names = names_of(names, n, "")
    seed = whole(seed, "seed")
    budget = whole(budget, f"budget for two pairs of orders of {n} clients", min(1 << n, 2 + 4 * (n - 1)))
    cache: dict[int, float] = {}

    def v(mask: int) -> float:
        if mask not in cache:
            returned = value(mask)
            utility = number(returned)
            if utility is None or not abs(utility) <= LARGEST:
                members = ", ".join(name for i, name in enumerate(names) if mask >> i & 1)
                coalition = f"utility of coalition {{{members}}}"
                raise ReportError(f"{coalition} is {returned!r:.100}, expected {A_NUMBER}")
            cache[mask] = utility
        return cache[mask]

    full = (1 << n) - 1
    rng = np.random.default_rng(seed)
    gain = v(full) - v(0)
    if budget > full:
        return _exact([v(mask) for mask in range(full + 1)], names)
    pairs = 0
    mean, squares = np.zeros(n), np.zeros(n)  # Welford's running mean and sum of squared deviations
    while pairs < 2 or (len(cache) + 2 * (n - 1) <= budget and pairs < budget):
        order = rng.permutation(n)
        pair = (_arrivals(v, order) + _arrivals(v, order[::-1])) / 2
        pairs += 1
        away = pair - mean
        mean += away / pairs
        squares += away * (pair - mean)
        if len(cache) > full:
            return _exact([cache[mask] for mask in range(full + 1)], names)
    scores = Scores(score="SV", clients=names, values=mean, raw=mean.copy(), gain=gain)
    if pairs < LEAST_PAIRS:
        return replace(scores, notes=(Note("few-orders", pairs=pairs, least=LEAST_PAIRS),))
    return replace(scores, stderr=np.sqrt(squares / (pairs - 1) / pairs), freedom=pairs - 1)


def _exact(values: list[float], names: tuple[str, ...]) -> Scores:
    return replace(shapley(Table(np.array(values), names)), stderr=np.zeros(len(names)))


def _arrivals(v: Callable[[int], float], order: npt.NDArray[np.int64]) -> Vector:
    added = np.zeros(len(order))
    mask, before = 0, v(0)
    for i in order.tolist():
        mask |= 1 << i
        added[i] = v(mask) - before
        before = v(mask)
    return added


# ------------------------------------------------------------------------------------------------ agreement

Minimum = Literal["always", "negative"]
"""Whether a normalisation subtracts the minimum always, or only if it is negative."""


@dataclass(frozen=True)
class Agreement:
    """Distance and correlations of two score vectors; an undefined one is None, never 0."""

    n: int
    l2: float
    spearman: float | None
    kendall: float | None
    pearson: float | None


def normalise(values: Scores | npt.ArrayLike, *, minimum: Minimum = "always") -> Vector:
    r"""Return the values normalised as in the paper: subtract the minimum, then divide by the mean.

    .. math:: n(x)_i = \frac{x_i - \min x}{\frac1N \sum_j (x_j - \min x)}

    The result does not change when x is shifted or scaled by a positive factor. If all values are equal up to
    rounding, it is all ones. ``minimum="negative"`` subtracts the minimum only if it is negative, as the code
    published with the paper does; the result then changes when x is shifted.

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
    scores: Scores | npt.ArrayLike, truth: Scores | npt.ArrayLike, *, minimum: Minimum = "always"
) -> Agreement:
    r"""Measure how close ``scores`` are to ``truth``.

    .. math:: L_2 = \| n(\text{scores}) - n(\text{truth}) \|_2

    with n as in :func:`normalise`, which explains ``minimum``. Spearman is the correlation of average ranks,
    Kendall is tau-b, and both treat values that differ only by rounding as ties. A coefficient is None if one
    of the vectors is constant.

    Clients are matched by name if both sides name them, as ``Scores`` and a labelled pandas Series do, and by
    position otherwise. Of ``Scores``, the published ``values`` are compared, as in the paper.

    >>> a = agreement([1, 2, 3, 4], [1, 2, 4, 3])
    >>> round(a.spearman, 3), round(a.kendall, 3)
    (0.8, 0.667)
    >>> agreement([1, 1, 1], [1, 2, 3]).spearman is None
    True
    """
    x, y = _matched(scores, truth)
    l2 = float(np.linalg.norm(normalise(x, minimum=minimum) - normalise(y, minimum=minimum)))
    if _is_constant(x) or _is_constant(y):
        return Agreement(n=x.size, l2=l2, spearman=None, kendall=None, pearson=None)
    ranks = _average_ranks(x), _average_ranks(y)
    return Agreement(x.size, l2, _pearson(*ranks), _kendall(*ranks), _pearson(x, y))


def _pearson(x: Vector, y: Vector) -> float:
    r = float(_standardised(x) @ _standardised(y))
    return r if abs(r) < 1 - 1e-14 else math.copysign(1.0, r)  # snap to exactly 1 or -1 within rounding


def _standardised(x: Vector) -> Vector:
    scaled = _scaled(x)
    centred = scaled - scaled.mean()
    return np.asarray(centred / np.linalg.norm(centred), dtype=np.float64)


def _scaled(x: Vector) -> Vector:
    """Return x divided by a power of two: huge values do not overflow, and nothing is rounded."""
    _, exponent = math.frexp(float(np.max(np.abs(x))))
    return np.ldexp(x, -exponent)


def _average_ranks(x: Vector) -> Vector:
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
    return not settle(x).any()


def _matched(scores: Scores | npt.ArrayLike, truth: Scores | npt.ArrayLike) -> tuple[Vector, Vector]:
    x, y = _vector(scores, "scores"), _vector(truth, "truth")
    names, other = _names(scores, "scores"), _names(truth, "truth")
    if names is not None and other is not None:
        if odd := sorted(set(names) ^ set(other), key=str):
            only, what = (scores, "scores") if odd[0] in names else (truth, "truth")
            where = only.score if isinstance(only, Scores) else what
            raise ReportError(f"client {odd[0]!r} is only in {where}; both need the same clients")
        place = {client: i for i, client in enumerate(other)}
        y = y[[place[client] for client in names]]
    if x.size != y.size:
        expected = "expected two vectors of the same length"
        raise ReportError(f"{expected}, got {x.size} scores and {y.size} true values")
    if x.size < 2:
        raise ReportError("agreement needs at least 2 clients, got 1")
    return x, y


def _names(values: Scores | npt.ArrayLike, what: str) -> tuple[Hashable, ...] | None:
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
    for place in np.flatnonzero(~np.isfinite(vector)):
        raise ReportError(f"{what}[{place}] must be a finite number, got {vector[place]}")
    return vector


# ------------------------------------------------------------------------------------------ the paper's table

Values = Mapping[str, float]  # by client


@dataclass(frozen=True)
class PaperRow:
    """How close one score is to the truth; ``status`` is that of FP and EE, and "ok" for the others."""

    score: str
    near: Agreement
    status: Status = "ok"


def paper_table(
    last: Reports, truth: Values, beside: Mapping[str, Values], *, by: Literal["scripts", "text"]
) -> tuple[PaperRow, ...]:
    """Return the paper's tab:error: how close LOO, FP, EE and other scores of one round come to the truth.

    The scripts that the authors published compute it in another way than the paper's text says:

    =============  ================================  ==========================
    what           scripts                           text
    =============  ================================  ==========================
    v(empty)       0                                 v(M0)
    truth          Shapley value of the same round   MR-SV over all rounds
    normalisation  minimum subtracted if negative    minimum always subtracted
    L2             squared                           not squared
    =============  ================================  ==========================

    ``last`` are the reports of everybody in the sum of a round, ``beside`` other scores by name. ``truth`` is
    always with v(M0) for nobody's coalition; if that is worth 0, every Shapley value grows by v(M0)/N.

    >>> r = Reports(empty=6, grand=5, alone=[4, 5], without=[5, 4], clients=["A", "B"])
    >>> for by in ("text", "scripts"):
    ...     rows = paper_table(r, {"A": -1, "B": 0}, {}, by=by)
    ...     [(row.score, row.status, row.near.spearman) for row in rows]
    [('LOO', 'ok', 1.0), ('FP', 'reversed', -1.0), ('EE', 'reversed', -1.0)]
    [('LOO', 'ok', 1.0), ('FP', 'ok', 1.0), ('EE', 'ok', 1.0)]
    """
    empty: Empty = "zero" if by == "scripts" else "model"
    minimum: Minimum = "negative" if by == "scripts" else "always"
    shift = last.empty / last.n if by == "scripts" else 0.0
    true_values = np.array([truth[name] + shift for name in last.clients])

    def near(values: npt.ArrayLike) -> Agreement:
        return agreement(values, true_values, minimum=minimum)

    paper: Sequence[Scores] = (loo(last), fp(last, empty=empty), ee(last, empty=empty))
    return (
        *(PaperRow(scores.score, near(scores.values), scores.status) for scores in paper),
        *(PaperRow(name, near([values[who] for who in last.clients])) for name, values in beside.items()),
    )
