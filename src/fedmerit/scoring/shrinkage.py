r"""The rule "shrunk": scores pulled towards their mean by as much as their errors ask for, cut at a fence.

Let x be the raw scores, u_i = max(x_i, 0), U their sum, and C the covariance of x. Then

.. math::
    g_i &= \mathrm{clip}\Big(1 + \frac{x_i}{2\sigma}, 0, 1\Big), \quad G = \sum_j g_j, \quad
        m = U / G, \quad \sigma^2 = \frac1N \mathrm{tr}\, C \\
    V &= \frac{\mathrm{tr}\, C - \mathbf 1^\top C \mathbf 1 / N}{N - 1}, \quad
    S^2 = \frac{1}{G - 1} \sum_j g_j (u_j - m)^2, \quad b = \max\big(0, 1 - V / S^2\big) \\
    p_i &= \min\Big(\kappa,\; b \frac{u_i}{U} + a\, g_i\Big), \quad \kappa = \frac{4}{G + 3},
    \quad a \text{ such that } \sum_j p_j = 1

**The estimator.** V is what noise adds to the sample variance S^2 of the scores: E S^2 = (variance of the
true scores) + V. So b is the part of the variance that is not noise, by the method of moments. It is
empirical Bayes with one factor for all. Without a covariance, errors count as uncorrelated: V is the mean of
the squared standard errors. If nobody is below zero or above the fence, p_i is the share of
m + b (u_i - m), the score pulled towards the mean. James and Stein multiply V by (N - 3) / (N - 1), which
minimises the mean squared error of the scores; then two or three members would never be pulled together, and
ties of four would hardly be. Equal pay for ties is the purpose here, so there is no such factor.

**Errors are stated too.** Members state their own errors, and whoever states a huge one would make b zero:
then everybody is paid alike, whatever the others did. So C counts only as far as it is believed: an error
above four times the median of the others' errors is scaled down to that (`believed`), with its covariances.

**Below zero.** g is 1 for everybody who is not below zero, and falls to 0 at two standard errors below: a
member who surely did harm gets no part of what is divided equally.

**The fence.** Nobody gets more than four times the mean of the others who count: that is kappa. What is cut
off is divided equally (by g).

**Monotone.** Raising x_i alone never lowers p_i. (The form in which scores are pulled towards their mean
first, and cut at zero afterwards, is not monotone: a member just above the mean raises b by rising, and that
helps those far above it more. So scores are cut at zero first.) p is continuous, so it is enough to look at
its derivative where the sets of members at the fence (held, h of them) and at b = 0 are fixed.
Let f = u / U, q = sum g (f - 1/G)^2, so that db/dx_i = 2 (1 - b)(f_i - 1/G) / (q U) for x_i > 0.

1. *x_i > 0, nobody held*: p_i = 1/G + b (f_i - 1/G). f_i rises, and b moves in the direction of
   f_i - 1/G, so both terms of the derivative are at least 0.
2. *x_i > 0, h > 0, i not held*: with F, G' the sums of f and g over those not held,
   dp_i >= db (f_i - F/G') + b (1 - f_i)(1 - 1/G') / U. This is below 0 only if F/G' < f_i < 1/G. Then
   f_i - F/G' <= f_i (1 - 1/G'), so that 2 (1 - b) f_i (1/G - f_i) <= b q (1 - f_i) is enough. The largest
   score k is held: b (f_k - 1/G) >= kappa - 1/G = 3 (G - 1) / (G (G + 3)), and q >= (f_k - 1/G)^2 G/(G - 1).
   With f_i (1/G - f_i) <= 1/(4 G^2), it is enough that b (1 - b)(G + 3)^2 <= 18 (G - 1)^2, which holds for
   G >= 2; and G >= 2 because i and k count fully.
3. *i held*: p_i = kappa, which does not depend on x_i > 0.
4. *-2 sigma < x_i < 0*: p_i = a g_i. Here b may rise with g_i, by at most (1 - b) / G^2 / q, and q >=
   g_i / (G (G - g_i)). That takes (1 - b)(G - g_i) F / (g_i G) from d log(p_i) a G', and 1/g_i - 1/G' adds at
   least (1 - b)(G' - g_i) / (g_i G). Those held have more than the mean f, so F (G - g_i) <= G' - g_i.

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
"""From this many standard errors below zero on, a member gets no part of what is divided equally."""


LARGEST_ERROR = 4.0
"""An error decides about money up to this many times the median of the others' errors. Of 639 members in the
committed runs 13 have larger ones, all of them with a planted fault or a cheat."""


@dataclass(frozen=True)
class Pull:
    """The numbers of a division by "shrunk" or "fenced": with them, a client's score gives its share."""

    factor: float  # b: 1 keeps the scores as they are, 0 pays everybody the same
    mean: float  # m, towards which scores are pulled
    fence: float  # kappa, the largest share
    rest: float  # a, the equal part of everybody who counts fully
    positive: float  # U, the sum of the positive scores
    counted: float  # G, how many clients count
    error: float  # sigma, the root mean square of the standard errors; 0 if there are none

    def share(self, score: float) -> float:
        """Return the share of a client with this score."""
        counts = float(counts_of(np.array([score]), self.error)[0])
        return min(self.fence, self.factor * max(score, 0.0) / self.positive + self.rest * counts)

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


def noise_of(scores: Scores) -> tuple[float, float] | None:
    """Return V, the part of the variance of the scores that is noise, and sigma; None without errors."""
    if scores.covariance is not None:
        known, n = np.asarray(scores.covariance, dtype=np.float64), scores.n
        stated = np.sqrt(np.diag(known))
        part = np.divide(believed(stated), stated, out=np.ones(n), where=stated > 0)
        known = known * part[:, None] * part[None, :]
        trace = math.fsum(np.diag(known))
        apart = trace - math.fsum(known.ravel()) / n  # exact sums do not depend on the order of clients
        return max(0.0, apart) / max(n - 1, 1), math.sqrt(max(0.0, trace) / n)
    if scores.stderr is None:
        return None
    square = math.fsum(believed(scores.stderr) ** 2) / scores.n
    return square, math.sqrt(square)


def counts_of(raw: Rows, error: float) -> Rows:
    """Return g: 1 for scores that are not below zero, 0 from two standard errors below on."""
    if error <= 0:
        return np.ones_like(raw)
    return np.asarray(np.clip(1 + raw / (BELOW * error), 0.0, 1.0), dtype=np.float64)


def pulled(scores: Scores, weights: Vector, *, pull: bool = True) -> tuple[Vector, Pull]:
    """Return the shares, and the numbers behind them.

    Args:
        scores: N clients.
        weights: u, the positive parts of the raw scores, with a positive sum.
        pull: False keeps b = 1: that is the rule "fenced".

    >>> s = Scores(score="ALPHA", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4, stderr=[1, 1])
    >>> shares, how = pulled(s, s.raw)          # S^2 = 2, V = 1: b = 1/2, and 2 -+ 1/2
    >>> how.factor, shares.tolist()
    (0.5, [0.375, 0.625])
    """
    noise = noise_of(scores)
    error = 0.0 if noise is None else noise[1]
    counts = counts_of(scores.raw, error)
    counted, scale = math.fsum(counts), float(weights.max())  # scaled, so that squares stay finite
    u = weights / scale
    mean = math.fsum(u) / counted
    factor = 1.0
    if pull and noise is not None and noise[0] > 0 and counted > 1:
        spread = math.fsum(counts * (u - mean) ** 2) / (counted - 1)
        factor = max(0.0, 1 - noise[0] / scale / scale / spread) if spread > 0 else 0.0
    found, rest, fence = cut(factor * u[None, :] / math.fsum(u), counts[None, :])
    how = Pull(
        factor=factor,
        mean=mean * scale,
        fence=float(fence[0]),
        rest=float(rest[0]),
        positive=math.fsum(u) * scale,
        counted=counted,
        error=error,
    )
    return found[0], how


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
