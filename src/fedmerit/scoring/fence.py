r"""The rule "fenced": shares in proportion to the scores, cut at a fence; and how far stated errors count.

Let x be the raw scores, u_i = max(x_i, 0), U their sum, and s_i the standard errors as far as they are
believed. Then

.. math::
    g_i = \mathrm{clip}\Big(1 + \frac{x_i}{2\sigma}, 0, 1\Big), \quad G = \sum_j g_j, \quad
    \sigma^2 = \frac1N \sum_j s_j^2, \qquad
    p_i = \min\Big(\kappa,\; \frac{u_i}{U} + a\, g_i\Big), \quad \kappa = \frac{4}{G + 3},
    \quad a \text{ such that } \sum_j p_j = 1

**The fence.** Nobody gets more than four times the mean of the others who count: that is kappa. What is cut
off is divided equally (by g). If nobody is above the fence, a = 0 and p is the rule "fair".

**Below zero.** g is 1 for everybody who is not below zero, and falls to 0 at two standard errors below: a
member who surely did harm gets no part of what is cut off. Without errors g is 1 for everybody.

**Errors are stated too.** Members state their own errors. So an error counts only as far as it is believed:
up to four times the median of the others' errors (`believed`).

**Monotone.** Raising x_i alone never lowers p_i. p is continuous, so it is enough to look at its derivative
where the set of members at the fence (held, h of them) is fixed. Let f = u / U, and F, G' the sums of f and g
over those not held, so that a = (1 - h kappa - F) / G'.

1. *x_i > 0, not held*: raising x_i raises f_i by (1 - f_i) / U and F by (1 - F) / U per unit, so
   dp_i = ((1 - f_i) - (1 - F) / G') / U. That is at least 0, as f_i <= F and G' >= g_i = 1.
2. *x_i > 0, held*: p_i = kappa, which does not depend on x_i > 0.
3. *-2 sigma < x_i < 0*: p_i = a g_i. Raising g_i lowers kappa, which can only raise a, and raises G', so
   dp_i >= a (1 - g_i / G') >= 0 per unit of g_i.

With a ``floor`` or ``cap``, these shares are the weights that are scaled and cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from fedmerit.scoring.scores import median_of_others
from fedmerit.scoring.types import Scores, Vector

Rows = npt.NDArray[np.float64]
"""One row per set of scores, one column per client."""

TIMES = 4.0
"""Nobody gets more than this many times the mean of the others who count."""
BELOW = 2.0
"""From this many standard errors below zero on, a member gets no part of what the fence cuts off."""
LARGEST_ERROR = 4.0
"""An error decides about money up to this many times the median of the others' errors. Of 639 members in the
committed runs 13 have larger ones, all of them with a planted fault or a cheat."""


@dataclass(frozen=True)
class Fence:
    """The numbers of a division by "fenced": with them, a client's score gives its share."""

    fence: float  # kappa, the largest share
    rest: float  # a, the equal part of everybody who counts fully
    positive: float  # U, the sum of the positive scores
    counted: float  # G, how many clients count
    error: float  # sigma, the root mean square of the standard errors; 0 if there are none

    def share(self, score: float) -> float:
        """Return the share of a client with this score."""
        counts = float(counts_of(np.array([score]), self.error)[0])
        return min(self.fence, max(score, 0.0) / self.positive + self.rest * counts)

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def believed(errors: Vector) -> Vector:
    """Return how far each error decides about money: up to four times the median of the others' errors.

    Errors of 0 do not count in the median: whoever sends no update has no error. So half of those who have
    an error would have to lie together to raise the errors of others or to lower them.

    >>> believed(np.array([1.0, 2.0, 3.0, 0.0, 1e9])).tolist()
    [1.0, 2.0, 3.0, 0.0, 8.0]
    """
    found, some = np.array(errors, dtype=np.float64), np.asarray(errors) > 0
    if np.count_nonzero(some) > 1:
        found[some] = np.minimum(found[some], LARGEST_ERROR * median_of_others(found[some]))
    return found


def pooled_error(scores: Scores) -> float | None:
    """Return sigma, the root mean square of the errors as far as they are believed; None without errors."""
    stated = scores.stderr
    if scores.covariance is not None:
        stated = np.sqrt(np.diag(scores.covariance))
    if stated is None:
        return None
    return math.sqrt(math.fsum(believed(stated) ** 2) / scores.n)


def counts_of(raw: Rows, error: float) -> Rows:
    """Return g: 1 for scores that are not below zero, 0 from two standard errors below on."""
    if error <= 0:
        return np.ones_like(raw)
    return np.asarray(np.clip(1 + raw / (BELOW * error), 0.0, 1.0), dtype=np.float64)


def fenced(scores: Scores, weights: Vector) -> tuple[Vector, Fence]:
    """Return the shares, and the numbers behind them.

    Args:
        scores: N clients.
        weights: u, the positive parts of the raw scores, with a positive sum.

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[0, 1, 9], raw=[0, 1, 9], gain=10)
    >>> shares, how = fenced(s, s.raw)          # kappa = 4/6; the other third: .1 + 2a = 1/3
    >>> round(how.fence, 4), shares.round(4).tolist()
    (0.6667, [0.1167, 0.2167, 0.6667])
    """
    error = pooled_error(scores) or 0.0
    counts, scale = counts_of(scores.raw, error), float(weights.max())  # scaled, so that sums stay finite
    u = weights / scale
    found, rest, fence = cut(u[None, :] / math.fsum(u), counts[None, :])
    return found[0], Fence(
        fence=float(fence[0]),
        rest=float(rest[0]),
        positive=math.fsum(u) * scale,
        counted=math.fsum(counts),
        error=error,
    )


def cut(base: Rows, counts: Rows) -> tuple[Rows, Vector, Vector]:
    """Return min(kappa, base + a * counts) with the a for which each row sums to 1; and a and kappa.

    The shares of those at the fence do not depend on a. So sort by the a at which each meets the fence, and
    take the smallest number of them for which the rest fits.

    Args:
        base: at least 0, and no more than 1 in all per row.
        counts: g per row; 1 wherever base is positive.
    """
    n = base.shape[1]
    fence = TIMES / (
        np.sort(counts, axis=1).sum(axis=1) + TIMES - 1
    )  # sorted: the order of clients is no matter
    with np.errstate(divide="ignore"):
        meets = np.where(counts > 0, (fence[:, None] - base) / counts, np.inf)
    order = np.argsort(meets, axis=1, kind="stable")
    left, among, at = (np.take_along_axis(one, order, axis=1) for one in (base, counts, meets))
    left, among = (np.cumsum(one[:, ::-1], axis=1)[:, ::-1] for one in (left, among))
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = (1 - np.arange(n) * fence[:, None] - left) / among
    held = np.argmax((rest <= at) & (among > 0), axis=1)
    rest = np.maximum(0.0, np.take_along_axis(rest, held[:, None], axis=1))
    found = np.minimum(fence[:, None], base + rest * counts)
    return np.asarray(found), np.asarray(rest[:, 0]), np.asarray(fence)
