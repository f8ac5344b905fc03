"""The ground truth: values that need the utility of all 2^N coalitions.

Secure aggregation never yields such a ``Table``, so these functions refuse ``Reports``. Their values are the
standard for the scores in ``scores.py``. Each is a semivalue: a weighted sum of what client i adds to the
coalitions S without i, where the weight depends only on the size of S:

.. math:: \\phi_i = \\sum_{S \\not\\ni i} w_{|S|} \\, [v(S \\cup \\{i\\}) - v(S)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, NeedsTable, ReportError
from fedmerit.notes import Note
from fedmerit.scoring.types import Reports, Scores, Table, Vector
from fedmerit.scoring.uncertainty import Matrix, student_quantile
from fedmerit.scoring.validate import A_NUMBER, LARGEST, floats, labels_of, level_of, names_of, number, whole

# ------------------------------------------------------------------------------------------ all coalitions


def shapley(table: Table) -> Scores:
    r"""Return the Shapley value: what a client adds, averaged over all orders of arrival (eq. 1).

    .. math:: SV(i) = \frac1N \sum_{S \subseteq [N] \setminus \{i\}}
              \binom{N-1}{|S|}^{-1} [v(S \cup \{i\}) - v(S)]

    The paper prints eq. 1 without the inverse of the binomial, and then the values do not add up to the gain.
    This function uses the inverse, so they sum to v(everyone) - v(nobody).

    Args:
        table: the 2^N utilities.

    >>> shapley(Table([0, 1, 2, 5], ["A", "B"])).as_dict()      # A: (1 + 5 - 2) / 2
    {'A': 2.0, 'B': 3.0}
    """
    n = _table(table, "shapley").n
    return _scores("SV", table, [1 / (n * math.comb(n - 1, size)) for size in range(n)])


def banzhaf(table: Table) -> Scores:
    r"""Return the Banzhaf value: what a client adds to a random coalition of the others, all equally likely.

    .. math:: B(i) = 2^{-(N-1)} \sum_{S \subseteq [N] \setminus \{i\}} [v(S \cup \{i\}) - v(S)]

    In general, the values do not sum to the gain.

    Args:
        table: the 2^N utilities.

    >>> banzhaf(Table([0, 0, 0, 0, 0, 0, 0, 1])).values         # all three are needed
    array([0.25, 0.25, 0.25])
    """
    n = _table(table, "banzhaf").n
    return _scores("BANZHAF", table, [0.5 ** (n - 1)] * n)


def semivalue(table: Table, weights: Sequence[float] | Vector) -> Scores:
    r"""Return any semivalue: ``weights[k]`` is the weight of EACH coalition of size k that client i joins.

    .. math:: \phi_i = \sum_{S \subseteq [N] \setminus \{i\}} w_{|S|} \, [v(S \cup \{i\}) - v(S)]

    where :math:`\sum_k \binom{N-1}{k} w_k = 1` for a proper semivalue; other non-negative weights are used
    as given, with a note. Weight 1 on size N-1 is LOO, on size 0 IOI, and 1/2 on both is alpha (eq. 3).

    Args:
        table: the 2^N utilities.
        weights: shape (N,), non-negative, for the sizes 0, 1, ..., N-1.

    >>> semivalue(Table([0, 1, 2, 5], ["A", "B"]), [0, 1]).as_dict()      # LOO
    {'A': 3.0, 'B': 4.0}
    """
    n = _table(table, "semivalue").n
    if (labels := labels_of(weights)) is not None:
        got = f"got {labels[0]!r:.50} first"
        raise InputError(f"semivalue: labels of weights must be the sizes 0, 1, 2, ..., {got}")
    given = floats(weights, "semivalue: weights")
    if given.shape != (n,):
        raise InputError(f"semivalue: expected {n} weights, one per size 0..{n - 1}, got shape {given.shape}")
    wrong = np.flatnonzero(~((given >= 0) & (given <= LARGEST)))
    if wrong.size:
        size = int(wrong[0])
        raise InputError(f"semivalue: weights[{size}] must be from 0 to {LARGEST:g}, got {given[size]}")
    total = math.fsum(math.comb(n - 1, size) * float(given[size]) for size in range(n))
    note = Note("multiple", total=total)
    return _scores("SEMIVALUE", table, given, notes=() if abs(total - 1) <= 1e-9 else (note,))


def beta_shapley(table: Table, alpha: float, beta: float) -> Scores:
    r"""Return the Beta Shapley value of Kwon & Zou (2022), with weights from a Beta distribution.

    .. math:: w_k = \frac{B(\beta + k,\; \alpha + N - 1 - k)}{B(\alpha, \beta)}
              = \frac{\prod_{m<k} (\beta + m) \prod_{m<N-1-k} (\alpha + m)}
                     {\prod_{m<N-1} (\alpha + \beta + m)}

    alpha = beta = 1 is the Shapley value; alpha > beta favours small coalitions, as in their Beta(16, 1).

    Args:
        table: the 2^N utilities.
        alpha: positive.
        beta: positive.

    >>> beta_shapley(Table([0, 1, 2, 5], ["A", "B"]), alpha=3, beta=1).as_dict()     # weights 3/4, 1/4
    {'A': 1.5, 'B': 2.5}
    """
    n = _table(table, "beta_shapley").n
    for name, given in (("alpha", alpha), ("beta", beta)):
        found = number(given)
        if found is None:
            raise InputError(f"beta_shapley: {name} must be a number, got {given!r:.100}")
        if not (math.isfinite(found) and found > 0):
            raise InputError(f"beta_shapley: {name} must be finite and positive, got {given}")
    a, b = float(alpha), float(beta)
    if not math.isfinite(a + b):
        raise InputError(f"beta_shapley: alpha + beta must be finite, got {a:g} + {b:g}")
    weights = []
    for size in range(n):
        above = [b + m for m in range(size)] + [a + m for m in range(n - 1 - size)]
        weights.append(math.prod(top / (a + b + m) for m, top in enumerate(above)))  # cannot overflow
    return _scores("BETA-SV", table, weights)


def multi_round(tables: Iterable[Table]) -> Scores:
    r"""Return the Shapley value averaged over rounds (MR-SV, Song et al. 2019, Algorithm 2).

    .. math:: MR\text{-}SV(i) = \frac1R \sum_{t=1}^{R} SV_t(i)

    Args:
        tables: one per round, with the same clients in any order; the result has the order of the first.

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
        odd = sorted(set(clients) ^ set(table.clients))
        if odd:
            where = f"table {place}" if odd[0] in table.clients else "table 1"
            raise ReportError(f"multi_round: client {odd[0]!r} is only in {where}; all need the same clients")
    total = np.zeros(len(clients))
    for table in rounds:
        total += shapley(table).raw[[table.clients.index(client) for client in clients]]
    values = total / len(rounds)
    gain = math.fsum(table.gain for table in rounds) / len(rounds)
    return Scores(score="MR-SV", clients=clients, values=values, raw=values, gain=gain, rounds=len(rounds))


def _scores(
    name: str, table: Table, weights: Sequence[float] | Vector, notes: tuple[str, ...] = ()
) -> Scores:
    values = _weighted_marginals(table, np.asarray(weights, dtype=np.float64))
    return Scores(score=name, clients=table.clients, values=values, raw=values, gain=table.gain, notes=notes)


def _weighted_marginals(table: Table, weights: Vector) -> Vector:
    """Return the sum over S without i of weights[|S|] * (v(S + i) - v(S)), for every client i.

    As an array of shape (2^(N-1-i), 2, 2^i), the table has bit i on the middle axis. With bit i dropped, the
    coalitions without i are 0, 1, ..., 2^(N-1) - 1, so every i has the same weights in the same order. A
    client that adds nothing gets exactly 0.
    """
    n = table.n
    each = weights[_sizes(n - 1)]
    out = np.empty(n)
    for i in range(n):
        split = table.values.reshape(-1, 2, 1 << i)
        marginal = np.subtract(split[:, 1, :], split[:, 0, :]).reshape(-1)
        marginal *= each
        out[i] = marginal.sum()  # pairwise summation: the error grows with the log of the number of terms
    return out


def _sizes(bits: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the size of each of the 2^bits coalitions."""
    sizes = np.zeros(1 << bits, dtype=np.uint8)
    for bit in range(bits):
        half = 1 << bit
        sizes[half : 2 * half] = sizes[:half] + 1
    return sizes


def _table(table: object, function: str) -> Table:
    if isinstance(table, Table):
        return table
    if isinstance(table, Reports):
        raise NeedsTable(
            f"{function} needs a Table with the utility of all 2^N coalitions, got Reports, which hold "
            "2N + 2 of them: secure aggregation yields no more. Use alpha, fp or ee instead, or evaluate "
            "every coalition."
        )
    raise NeedsTable(f"{function} needs a Table of 2^N utilities, got {type(table).__name__}")


# ---------------------------------------------------------------------------------------- a sample of them

LEAST_PAIRS = 10
"""With fewer pairs of orders, no standard error is given: 95 % intervals from 2 pairs cover 85 to 90 % in
smooth games (93 % from 10 pairs on), and far less in games where a client rarely matters."""
MIN_PAIRS = 20
"""With fewer pairs of orders, sampling does not stop at a tolerance: the standard error is too uncertain."""


@dataclass(frozen=True)
class Sampled:
    """A sampled Shapley value.

    ``scores.stderr`` is the sampling error; below ``LEAST_PAIRS`` pairs it is None and a note says so.
    ``bias`` bounds the error that truncation may have caused for a client (0 without truncation).
    ``evaluations`` counts the coalitions evaluated, each once. ``stopped`` is "tolerance", "budget", or
    "exact" if every coalition is known and the sampling error is 0.
    """

    scores: Scores
    evaluations: int
    orders: int
    bias: float
    stopped: str

    def interval(self, *, level: float = 0.95) -> Matrix:
        """Return Student's interval per client, widened by ``bias``: lower and upper end, shape (N, 2)."""
        if self.scores.stderr is None:
            raise InputError(
                f"an interval needs at least {LEAST_PAIRS} pairs of orders, got {self.orders // 2}: "
                "allow a larger budget"
            )
        quantile = (
            student_quantile((1 - level_of(level)) / 2, self.orders // 2 - 1)
            if self.stopped != "exact"
            else 0.0
        )
        half = quantile * self.scores.stderr + self.bias
        return np.stack([self.scores.raw - half, self.scores.raw + half], axis=1)


def sampled_shapley(
    value: Callable[[int], float],
    clients: int | np.integer[Any] | Iterable[str],
    *,
    tolerance: float | None = None,
    budget: int | None = None,
    truncation: float = 0.0,
    seed: int = 0,
) -> Sampled:
    r"""Estimate the Shapley value from random orders of arrival and their reverses.

    .. math:: \hat\phi_i = \frac1{2K} \sum_{k=1}^{K} [v(P_i^{\pi_k} \cup \{i\}) - v(P_i^{\pi_k})]
              + [v(P_i^{\bar\pi_k} \cup \{i\}) - v(P_i^{\bar\pi_k})]

    where :math:`P_i^\pi` are the clients before i in the order :math:`\pi`, and :math:`\bar\pi` is its
    reverse. The K pairs are independent, so their spread gives the standard error,
    :math:`s_i = \mathrm{sd}_i / \sqrt K`, given from K = 10 on. The values add up to the gain
    v(everyone) - v(nobody).

    Truncation (GTG-Shapley, Liu et al. 2022): once a prefix is within ``truncation`` of v(everyone), the rest
    of the order is assumed to add nothing. That saves evaluations. The error per client is at most ``bias``,
    2 ``truncation``, if v does not move further away again; the values then add up to the gain only roughly.

    Args:
        value: returns the utility of a coalition, given as a bitmask; called at most once for each.
        clients: number of clients, or their names.
        tolerance: stop when every client's standard error is at most this.
        budget: stop before evaluating more than this many coalitions. If it covers all coalitions and no
            tolerance is given, all of them are evaluated.
        truncation: see above; 0 for none.
        seed: seed of the random orders, 0 or more.

    >>> game = lambda mask: float(mask.bit_count() ** 2)      # symmetric: everyone is worth N
    >>> sampled_shapley(game, 4, budget=14).scores.values
    array([4., 4., 4., 4.])
    """
    names = _names(clients)
    n = len(names)
    _check(n, tolerance, budget, truncation, seed)
    truncation = float(truncation)
    cache: dict[int, float] = {}

    def v(mask: int) -> float:
        if mask not in cache:
            given = value(mask)
            found = number(given)
            if found is None or not abs(found) <= LARGEST:
                members = ", ".join(name for i, name in enumerate(names) if mask >> i & 1)
                raise ReportError(
                    f"utility of coalition {{{members}}} is {given!r:.100}, expected {A_NUMBER}"
                )
            cache[mask] = found
        return cache[mask]

    full = (1 << n) - 1
    rng = np.random.default_rng(seed)
    gain = v(full) - v(0)
    if tolerance is None and budget is not None and budget > full:
        return _exact([v(mask) for mask in range(full + 1)], names, orders=0)
    pairs, stopped = 0, ""
    mean, squares = np.zeros(n), np.zeros(n)  # Welford's running mean and sum of squared deviations
    while not stopped:
        order = rng.permutation(n)
        pair = (_arrivals(v, order, full, truncation) + _arrivals(v, order[::-1], full, truncation)) / 2
        pairs += 1
        away = pair - mean
        mean += away / pairs
        squares += away * (pair - mean)
        stderr = np.sqrt(squares / max(1, pairs - 1) / pairs)
        if len(cache) > full:
            return _exact([cache[mask] for mask in range(full + 1)], names, orders=2 * pairs)
        if tolerance is not None and pairs >= MIN_PAIRS and float(stderr.max()) <= tolerance:
            stopped = "tolerance"
        elif budget is not None and pairs > 1 and (len(cache) + 2 * (n - 1) > budget or pairs >= budget):
            stopped = "budget"
    enough = pairs >= LEAST_PAIRS
    note = Note("few-orders", pairs=pairs, least=LEAST_PAIRS)
    scores = Scores(
        score="SV", clients=names, values=mean, raw=mean.copy(), gain=gain,
        stderr=stderr if enough else None, notes=() if enough else (note,),
    )  # fmt: skip
    return Sampled(scores, len(cache), 2 * pairs, 2 * truncation, stopped)


def _exact(values: list[float], names: tuple[str, ...], orders: int) -> Sampled:
    """Return the exact value, given every coalition."""
    found = shapley(Table(np.array(values), names))
    return Sampled(replace(found, stderr=np.zeros(len(names))), len(values), orders, 0.0, "exact")


def _arrivals(
    v: Callable[[int], float], order: npt.NDArray[np.int64], full: int, truncation: float
) -> Vector:
    """Return what each client adds on arrival: 0 once v is within ``truncation`` of v(everyone)."""
    out = np.zeros(len(order))
    mask, before = 0, v(0)
    for i in order.tolist():
        if truncation > 0 and abs(v(full) - before) <= truncation:
            break
        mask |= 1 << i
        out[i] = v(mask) - before
        before = v(mask)
    return out


def _names(clients: int | np.integer[Any] | Iterable[str]) -> tuple[str, ...]:
    names: tuple[str, ...] = ()
    if isinstance(clients, Iterable):
        n = len(names := names_of(clients, None, "sampled_shapley: "))
    else:
        n = whole(clients, "clients, unless they are names,", 1)
    if not 2 <= n <= 62:
        raise InputError(f"sampled_shapley needs 2 to 62 clients, got {n}")
    return names or names_of((), n, "")


def _check(n: int, tolerance: float | None, budget: int | None, truncation: float, seed: int) -> None:
    if tolerance is None and budget is None:
        raise InputError("sampled_shapley needs a tolerance or a budget to know when to stop")
    if tolerance is not None and not (number(tolerance) or 0.0) > 0:
        raise InputError(f"tolerance must be positive, got {tolerance!r:.100}")
    cut = number(truncation)
    if cut is None or not 0 <= cut < float("inf"):
        raise InputError(f"truncation must be at least 0, got {truncation!r:.100}")
    whole(seed, "seed")
    if budget is not None:
        whole(budget, f"budget for two pairs of orders of {n} clients", min(1 << n, 2 + 4 * (n - 1)))
