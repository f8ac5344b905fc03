"""How sure shares and amounts are: intervals from the errors of the scores, and ties that are paid apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError
from fedmerit.scoring.fence import Rows, counts_of, cut, pooled_error
from fedmerit.scoring.rewards import Payouts, Shares, money_of
from fedmerit.scoring.types import Scores, in_order, rounding
from fedmerit.scoring.uncertainty import (
    compare_pairs,
    covariance_of,
    error_of,
    pair_quantile_of,
    upper_quantile,
)
from fedmerit.scoring.validate import level_of, whole

Spans = Mapping[str, tuple[float, float]]
"""Client -> lower and upper end of the interval of its share."""

DRAWS = 4000
"""How often scores are drawn; less often for more than 1000 clients."""
STEP = 10_000
"""Ends of intervals are rounded outwards to one part in this: further digits are those of the simulation."""
VISIBLE = 0.1
"""Shares differ visibly if they differ by more than this part of an equal share."""


def share_intervals(
    scores: Scores,
    divided: Shares,
    *,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, tuple[float, float]] | None:
    """Return the interval of each share: what the rule would pay by scores that are free of error.

    Scores are drawn around those that were measured, with their covariance (without one, errors count as
    uncorrelated), 4000 times with a fixed seed; the order of the clients does not matter. Each drawn vector
    is divided by the terms of the shares as if it were exact: whoever is below zero is surely so, and takes
    no part in what is divided equally. The interval holds the middle ``level`` of these shares, and the share
    that is paid. It is about the test set and, if the scores have ``training``, about what another training
    would change. If the covariance is an estimate, from blocks (PHI) or sketches, scores are drawn further
    apart, to fit Student's distribution. Under the rule "equal" no score matters, and an interval is the
    share itself.

    Args:
        scores: the scores that were divided.
        divided: the shares.
        level: in (0, 1), for each interval alone.
        seed: seed of the simulation.

    Returns:
        Client -> lower and upper end, rounded outwards to 0.01 %; None if the scores have no errors (except
        under "equal"), or if they did not define the shares.

    >>> from fedmerit.scoring.rewards import shares
    >>> s = Scores(score="ALPHA", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4, stderr=[.1, .1])
    >>> low, high = share_intervals(s, shares(s))["A"]
    >>> round(low, 2), round(high, 2)
    (0.21, 0.29)
    """
    if not isinstance(scores, Scores) or not isinstance(divided, Shares):
        got = f"{type(scores).__name__} and {type(divided).__name__}"
        raise InputError(f"share_intervals takes Scores and the Shares of them, got {got}")
    if missing := [name for name in scores.clients if name not in divided]:
        raise InputError(f"expected the shares of these scores, got some without client {missing[0]!r}")
    seed, tail = whole(seed, "seed"), (1 - level_of(level)) / 2
    if divided.rule == "equal":
        return {name: (share, share) for name, share in divided.items()}
    if divided.status != "ok" or error_of(scores) is None:
        return None
    clients, kind = scores.clients, _kinds(scores, divided)
    order = np.argsort(kind, kind="stable")
    scores, kind = in_order(scores, tuple(clients[i] for i in order)), kind[order]
    drawn = _drawn(scores, seed, pair_quantile_of(scores)(tail) / upper_quantile(tail))
    rows = _divided(scores, drawn, divided)
    rows = rows[~np.isnan(rows).any(axis=1)]
    paid = np.array([divided[name] for name in scores.clients])
    ends = np.quantile(rows, [tail, 1 - tail], axis=0) if len(rows) else np.stack([paid, paid])
    for k, end in enumerate((np.minimum, np.maximum)):  # equal clients have one interval
        ends[k] = end.reduceat(ends[k], np.flatnonzero(np.diff(kind, prepend=-1)))[kind]
    low = np.floor(np.minimum(ends[0], paid) * STEP + 1e-5) / STEP  # what only rounding separates from a step
    high = np.ceil(np.maximum(ends[1], paid) * STEP - 1e-5) / STEP  # is that step
    each = zip(low.tolist(), (high + 0.0).tolist(), strict=True)  # no minus zero
    found = dict(zip(scores.clients, each, strict=True))
    return {name: found[name] for name in clients}


def _kinds(scores: Scores, divided: Shares) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... per client, by score, error and forfeit; those equal in all of them share a number.

    Scores are drawn in this order: neither the order of the clients nor their names matter then.
    """
    lost = np.array([divided.forfeits.get(name, 0.0) for name in scores.clients])
    known = [scores.raw, lost, *(one for one in (scores.stderr,) if one is not None)]
    known += [row for many in (scores.sketch, scores.blocks) if many is not None for row in many]
    return np.unique(np.stack(known, axis=1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _drawn(scores: Scores, seed: int, wider: float) -> Rows:
    """Return raw scores drawn around the measured ones, in pairs that mirror each other."""
    pairs = int(min(DRAWS, max(DRAWS / 10, 1000 * DRAWS / scores.n))) // 2
    normal = np.random.default_rng(seed).standard_normal((pairs, scores.n))
    if (known := covariance_of(scores)) is not None:
        values, vectors = np.linalg.eigh(known)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T  # the one symmetric root
        away = normal @ root
    else:
        error = error_of(scores)
        assert error is not None
        away = normal * error
    return np.asarray(scores.raw + wider * np.concatenate([away, -away]), dtype=np.float64)


def _divided(scores: Scores, drawn: Rows, terms: Shares) -> Rows:
    """Return the shares of each drawn vector as if it were exact; a row of NaN where there are none."""
    floor, cap = terms.floor, terms.cap
    kept = 1 - np.array([terms.forfeits.get(name, 0.0) for name in scores.clients])
    if terms.rule == "impartial":
        part = np.clip(drawn, 0.0, scores.gain) / scores.gain
        others = part.sum(axis=1, keepdims=True) - part
        return np.asarray(kept * np.clip((1 - others / (scores.n - 1)) / scores.n, floor, cap))
    positive = np.maximum(drawn, 0.0)
    positive[positive <= rounding(drawn)] = 0.0
    total = positive.sum(axis=1, keepdims=True)
    part = np.divide(positive, total, out=np.full(drawn.shape, np.nan), where=total > 0)
    if terms.rule == "fenced":
        part = cut(part, counts_of(drawn, pooled_error(scores) or 0.0))[0]
    if terms.equal:
        takes = drawn >= -rounding(drawn)
        among = np.maximum(1, np.count_nonzero(takes, axis=1, keepdims=True))
        part = (1 - terms.equal) * part + terms.equal * takes / among
    return np.asarray(kept * (part if (floor, cap) == (0.0, 1.0) else _between(part, floor, cap)))


def _between(weights: Rows, floor: float, cap: float) -> Rows:
    """Return clip(t * weights, floor, cap) with the t for which each row sums to 1; NaN where there is none.

    It does for all rows at once what `fedmerit.scoring.rewards` does for one.
    """
    w, positive = weights, weights > 0
    rest, many = floor * np.count_nonzero(~positive, axis=1), np.count_nonzero(positive, axis=1)
    leave, meet = (np.divide(end, w, out=np.full(w.shape, np.inf), where=positive) for end in (floor, cap))
    corners = np.sort(np.concatenate([leave, meet], axis=1), axis=1)
    low, high = np.zeros(len(w), np.int64), np.maximum(2 * many - 1, 0)
    every = np.arange(len(w))
    while (low < high).any():  # the last corner at which the sum is still at most 1
        middle = (low + high + 1) // 2
        at = np.clip(corners[every, middle, None] * w, floor, cap, where=positive, out=np.zeros(w.shape))
        fits = rest + at.sum(axis=1) <= 1
        low, high = np.where(fits, middle, low), np.where(fits, high, np.maximum(middle - 1, low))
    t = corners[every, low][:, None]
    free = positive & (leave <= t) & (t < meet)
    held = np.where(t >= meet, cap, floor).sum(axis=1, where=positive & ~free)
    sum_ = w.sum(axis=1, where=free)
    more = np.divide(1 - rest - held, sum_, out=np.zeros(len(w)), where=sum_ > 0)
    found = np.clip(np.maximum(t, more[:, None]) * w, floor, cap)
    found[(many == 0) | (rest + many * cap < 1 - 1e-12)] = np.nan
    return np.asarray(found, dtype=np.float64)


def amounts_within(spans: Spans, paid: Payouts) -> dict[str, tuple[Decimal, Decimal]]:
    """Return the interval of each amount: that of its share, of the budget, rounded outwards to the cent.

    >>> from fedmerit.scoring.rewards import payouts
    >>> amounts_within({"A": (0.2, 0.3), "B": (0.7, 0.8)}, payouts({"A": 0.25, "B": 0.75}, "10.00"))["A"]
    (Decimal('2.00'), Decimal('3.00'))
    """
    found, budget = {}, paid.cents(paid.budget)
    for name, (low, high) in spans.items():
        amount = paid.cents(paid[name])
        down, up = budget * round(low * STEP) // STEP, -(-budget * round(high * STEP) // STEP)
        ends = money_of(min(down, amount), paid.currency), money_of(max(up, amount), paid.currency)
        found[name] = ends
    return found


@dataclass(frozen=True)
class PaidApart:
    """Two members who are statistically indistinguishable but visibly paid apart; the better paid first."""

    more: str
    less: str
    pairs: int  # how many such pairs there are in all


def visible_gaps(
    scores: Scores, divided: Mapping[str, float], better: npt.NDArray[np.bool_] | None = None
) -> Rows:
    """Return by how much the share of i exceeds that of j, shape (N, N); 0 unless it is a tie paid apart.

    Args:
        scores: with ``stderr``.
        divided: the shares.
        better: from :func:`~fedmerit.uncertainty.compare_pairs`; by default, with its defaults.
    """
    if better is None:
        better = compare_pairs(scores).better
    share = np.array([divided[name] for name in scores.clients])
    gap = share[:, None] - share[None, :]
    visible = ~(better | better.T) & (gap > VISIBLE / scores.n + 1e-9)
    return np.where(visible, gap, 0.0)


def paid_apart(
    scores: Scores, divided: Mapping[str, float], better: npt.NDArray[np.bool_] | None = None
) -> PaidApart | None:
    """Return the pair of indistinguishable clients whose shares differ most, if they differ visibly.

    Arguments are those of `visible_gaps`.

    >>> s = Scores(score="ALPHA", clients=("A", "B"), values=[1, 2], raw=[1, 2], gain=3, stderr=[.3, .3])
    >>> paid_apart(s, {"A": 1 / 3, "B": 2 / 3})
    PaidApart(more='B', less='A', pairs=1)
    >>> paid_apart(s, {"A": .49, "B": .51})
    """
    gap = visible_gaps(scores, divided, better)
    if not gap.any():
        return None
    largest = np.argwhere(gap >= gap.max() - 1e-9)  # equal up to rounding: by name
    more, less = min((scores.clients[i], scores.clients[j]) for i, j in largest)
    return PaidApart(more, less, int(np.count_nonzero(gap)))
