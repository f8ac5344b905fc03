r"""How certain the scores are: intervals, significant differences, ranks, and the test samples they need.

Two errors count. ``Scores.stderr``, s, is what the test set leaves in ``Scores.raw``. Training again, with
another first model or batch order, would change the scores too. If one training stands for all
(``Scores.training``), every member's score has an error of training besides, independent of the others':

.. math:: T_i = \max(1.2 \, s_i, \ T)

The factor is what repeated trainings of the same members showed: their scatter was 1.1 to 1.7 times the error
of the test set. T is measured within the run, by `training_of`: it also catches training that is random
beside a large test set. Several trainings measure the error itself (:mod:`fedmerit.scoring.repeats`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, ReportError
from fedmerit.scoring.sampling import pair_freedom
from fedmerit.scoring.types import RoundScatter, Scores, Vector, rounding
from fedmerit.scoring.validate import A_NUMBER, LARGEST, floats, in_order_of_both, level_of, number, whole

__all__ = [
    "Pairs",
    "compare_pairs",
    "indistinguishable",
    "intervals",
    "pair_errors",
    "rank_intervals",
    "resolvable_gap",
    "samples_needed",
]

# ----------------------------------------------------------------------------------------- critical values

Matrix = npt.NDArray[np.float64]
"""One number per pair of clients, shape (N, N)."""


def upper_quantile(tail: float) -> float:
    """Return z with P(Z > z) = tail for a standard normal Z; exact even if 1 - tail would round to 1."""
    return -NormalDist().inv_cdf(tail)


def student_quantile(tail: float, freedom: int) -> float:
    r"""Return t with P(T > t) = tail, for Student's T with ``freedom`` degrees of freedom.

    With :math:`t = \sqrt\nu \tan\theta`, and sums that are empty for small :math:`\nu` (Abramowitz & Stegun
    1964, 26.7.3 and 26.7.4):

    .. math:: P(|T| \le t) = \frac2\pi \Big(\theta + \sin\theta \sum_{k=0}^{(\nu-3)/2}
        \tfrac{2 \cdot 4 \cdots 2k}{3 \cdot 5 \cdots (2k+1)} \cos^{2k+1}\theta\Big), \ \nu \text{ odd}; \quad
        \sin\theta \sum_{k=0}^{(\nu-2)/2} \tfrac{1 \cdot 3 \cdots (2k-1)}{2 \cdot 4 \cdots 2k}
        \cos^{2k}\theta, \ \nu \text{ even}

    >>> round(student_quantile(0.025, 4), 6)
    2.776445
    """
    odd = freedom % 2
    steps = 2.0 * np.arange(1, (freedom - odd) // 2)
    factors = np.concatenate([[1.0], steps / (steps + 1) if odd else (steps - 1) / steps])
    weights = np.cumprod(factors) if freedom > 1 else np.zeros(0)
    powers = 2 * np.arange(weights.size) + odd

    def within(theta: float) -> float:
        inner = math.sin(theta) * math.fsum(weights * math.cos(theta) ** powers)
        return 2 / math.pi * (theta + inner) if odd else inner

    low, high = 0.0, math.pi / 2
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < 1 - 2 * tail else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


Quantile = Callable[[float], float]
"""(tail) -> the number of standard errors that chance exceeds with this probability."""


def quantile_of(scores: Scores) -> Quantile:
    """Return the quantiles for these scores: Student's if the freedom of their standard errors is known.

    With B blocks there are B - 1 degrees of freedom, with sketches those that the scores name. Other standard
    errors come from many samples. Where the scatter over rounds decides, it has few degrees of freedom too.
    """
    if scores.blocks is None or len(scores.blocks) < 2:
        return _student(scores.freedom, _of_training(scores))
    return _student(len(scores.blocks) - 1, _of_training(scores))


def pair_quantile_of(scores: Scores) -> Quantile:
    """Return the quantiles for differences of these scores: Student's if their covariance is an estimate.

    From B blocks it has B - 1 degrees of freedom; from sketches see
    :func:`fedmerit.scoring.sampling.pair_freedom`.
    """
    if scores.sketch is None:
        return quantile_of(scores)
    return _student(pair_freedom(len(scores.sketch), scores.freedom), _of_training(scores))


def _student(*freedoms: int | None) -> Quantile:
    """Return Student's quantiles for the least of these degrees of freedom that are known.

    Beyond 1,000 of them, or if none is known, return the normal ones, which are 0.1 % smaller.
    """
    freedom = min((one for one in freedoms if one is not None), default=1001)
    return upper_quantile if freedom > 1000 else lambda tail: student_quantile(tail, freedom)


# ------------------------------------------------------------------------------------------------ training

TRAINING = 1.2
"""The error of one training, in standard errors of the test set, where the rounds do not show a larger one.
Measured over trainings of the same members on the same test set: 1.42 and 1.14 for the paper's network, 1.66
for a ResNet, and 0.9 to 1.5 for small networks on fashion-mini (experiments/tables/training-noise.md)."""
LEAST_ROUNDS = 3
"""Of fewer rounds, nobody can tell luck from a client's part."""
LEVERAGE = 0.9
"""The most that one round may count in the fit of all: beyond it, the other rounds cannot judge it."""


def training_of(rounds: Sequence[Mapping[str, float]]) -> RoundScatter:
    r"""Return how far contributions scatter over rounds, beyond what all members have in common.

    .. math:: T^2 = \frac{1}{c_\nu} \operatorname{median}_i \sum_t
        \Big( \frac{x_{ti} - b_i g_t}{1 - h_t} \Big)^2, \quad g_t = \operatorname{median}_i x_{ti}, \quad
        b_i = \frac{\sum_t g_t x_{ti}}{\sum_t g_t^2}, \quad h_t = \frac{g_t^2}{\sum_u g_u^2}

    with client i's contribution :math:`x_{ti}` in round t. Rounds differ in what they are worth to everybody,
    g, and each client has its part in that, b. What is left is a client's luck in that round, predicted from
    its other rounds (the jackknife's residual). The sum over R rounds has this error if luck in one round
    says nothing about the next. Medians keep one client, bad or lying, from deciding about all; the median of
    chi-square with :math:`\nu = R - 1` degrees of freedom is corrected by
    :math:`c_\nu \approx (1 - 2 / 9\nu)^3`. In trainings that were repeated 8 times, T was 0.8 to 1.3 times
    the true spread (docs/repeats.md).

    Args:
        rounds: client -> contribution, of each round. A client that was in fewer than 3 rounds is left out.

    Returns:
        T, with (R - 1)(N - 1) degrees of freedom; 0 with fewer than 3 rounds or 2 clients.

    >>> training_of([{"A": 4.0, "B": 2.0}, {"A": 2.0, "B": 1.0}, {"A": 2.0, "B": 1.0}])  # one part each
    RoundScatter(scatter=0.0, freedom=2)
    >>> round(training_of([{"A": 4.0, "B": 2.0}, {"A": 1.0, "B": 2.0}, {"A": 1.0, "B": 2.0}]).scatter, 2)
    2.74
    """
    seen = [name for name in dict.fromkeys(name for one in rounds for name in one)
            if sum(name in one for one in rounds) >= LEAST_ROUNDS]  # fmt: skip
    if len(seen) < 2:
        return RoundScatter()
    x = np.array([[one.get(name, math.nan) for name in seen] for one in rounds])
    x = x[~np.isnan(x).all(axis=1)]
    there, g = ~np.isnan(x), np.nanmedian(x, axis=1)[:, None]
    x, g = np.where(there, x, 0.0), np.where(there, g, 0.0)
    size = (g * g).sum(axis=0)
    part = np.divide((g * x).sum(axis=0), size, out=np.zeros(len(seen)), where=size > 0)
    weight = np.divide(g * g, size, out=np.zeros(g.shape), where=size > 0)
    left = (x - part * g) / (1 - np.minimum(weight, LEVERAGE))
    left[np.abs(left) <= rounding(x)] = 0.0
    each = (left**2).sum(axis=0) * len(x) / there.sum(axis=0)
    free = len(x) - 1
    square = float(np.median(each)) / (1 - 2 / (9 * free)) ** 3
    return RoundScatter(math.sqrt(square), free * (len(seen) - 1))


def training_errors(scores: Scores) -> Vector | None:
    """Return the error that one training leaves in each score; None without standard errors, or none left."""
    if scores.training is None or scores.stderr is None:
        return None
    return np.maximum(TRAINING * scores.stderr, scores.training.scatter)


def error_of(scores: Scores) -> Vector | None:
    """Return the standard error of each score, test set and training together; None if it is unknown."""
    if scores.stderr is None:
        known = covariance_of(scores)
        return None if known is None else np.asarray(np.sqrt(np.diag(known)), dtype=np.float64)
    training = training_errors(scores)
    return scores.stderr if training is None else np.hypot(scores.stderr, training)


def covariance_of(scores: Scores) -> Matrix | None:
    """Return the covariance of the scores, test set and training together; None if it is unknown."""
    known, training = scores.covariance, training_errors(scores)
    return known if known is None or training is None else known + np.diag(training**2)


def gain_error(scores: Scores) -> float | None:
    r"""Return the standard error of the gain; None if it is unknown.

    .. math:: \sqrt{\mathbf 1^\top C \mathbf 1 + \operatorname{median}_i T_i^2}

    with the covariance C that the test set leaves: contributions add up to the gain, so it has their error.
    In trainings that were repeated, the gain varied about as much as the score of one member: what one gains
    by luck, others lose. Without a covariance, errors of members do not tell that of their sum: the median
    member's, or what rounds scatter if that is more, counts alone.
    """
    known, training = scores.covariance, training_errors(scores)
    if scores.stderr is None or scores.training is None or training is None:
        return None
    if known is None:
        return max(scores.training.scatter, float(np.median(scores.stderr)))
    return math.sqrt(max(0.0, float(known.sum())) + float(np.median(training)) ** 2)


def _of_training(scores: Scores) -> int | None:
    """Return the degrees of freedom of the scatter over rounds if it decides; None if the factor does."""
    one = scores.training
    if one is None or scores.stderr is None or one.scatter <= TRAINING * float(np.median(scores.stderr)):
        return None
    return max(1, one.freedom)


def holm(
    rejected: Callable[[float], int], total: int, level: float, quantile: Quantile = upper_quantile
) -> float:
    """Return the critical value of Holm's method (1979) for M = ``total`` one-sided hypotheses.

    It is valid whatever their correlation. Holm compares the (k+1)-th smallest p-value with a/(M - k). Start
    with k = 0 and set k to the number rejected so far, until no more are rejected. For N clients, the
    hypotheses "i is not better than j" are M = N(N-1).
    """
    k = 0
    while True:
        tail = (1 - level) / max(total - k, 1)
        critical = max(0.0, quantile(min(tail, 0.5)))  # a claim is about a difference above zero
        found = rejected(critical)
        if found <= k:
            return critical
        k = found


def max_t(covariance: Matrix, stderr: Matrix, level: float, draws: int, seed: int) -> float:
    """Return a quantile of the largest |e_i - e_j| / s_ij, where e is Gaussian with the given covariance."""
    draws, seed = whole(draws, "draws", 100), whole(seed, "seed")
    if not stderr.any():
        return upper_quantile((1 - level) / 2)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    inverse = np.divide(1.0, stderr, out=np.zeros_like(stderr), where=stderr > 0)
    generator = np.random.default_rng(seed)
    largest = np.empty(draws)
    rows = max(1, (1 << 22) // root.size)  # rows at a time, 32 MB
    for start in range(0, draws, rows):
        part = largest[start : start + rows]
        e = generator.standard_normal((part.size, len(root))) @ root.T
        part[:] = np.max(np.abs(e[:, :, None] - e[:, None, :]) * inverse, axis=(1, 2))
    return float(np.quantile(largest, level))


def checked_covariance(covariance: Any, clients: Sequence[str]) -> Matrix:
    """Return a covariance matrix as an (N, N) array in the order of the clients, or raise ReportError.

    A pandas frame is put into that order by its labels.
    """
    n = len(clients)
    matrix = floats(in_order_of_both(clients, covariance, "covariance"), "covariance")
    if matrix.shape != (n, n):
        raise ReportError(f"covariance: expected shape ({n}, {n}), got {matrix.shape}")
    if not (np.abs(matrix) <= LARGEST).all():
        raise ReportError(f"covariance: every entry must be {A_NUMBER}")
    scale = float(np.max(np.abs(matrix)))
    if np.max(np.abs(matrix - matrix.T)) > 1e-9 * scale:
        raise ReportError("covariance must be symmetric")
    if np.linalg.eigvalsh(matrix)[0] < -1e-9 * scale:
        raise ReportError("covariance must be positive semi-definite: it has a negative eigenvalue")
    return (matrix + matrix.T) / 2


# -------------------------------------------------------------------------------------------------- groups

MOST_GROUPS = 4000
"""The most groups that are listed: nobody reads more, and with non-default errors there can be 2^(N/2)."""


def largest_groups(better: npt.NDArray[np.bool_], ranking: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the largest groups of statistically indistinguishable clients, best group first.

    No other client could join any of these groups: they are the maximal cliques of the graph whose edges are
    the pairs that are not apart. Each group is in the order of the ranking. Clients are added one by one,
    those with the best possible ranks first. For each existing group, a new client forms a group with the
    members that it is not apart from; groups contained in others are dropped. If being apart means that two
    intervals do not overlap, one of the new groups contains all the others, so N clients form at most N
    groups (an interval graph). Other errors can give more groups.

    Args:
        better: shape (N, N); entry [i, j] says that i is significantly better than j.
        ranking: positions 0 ... N-1, best first.

    >>> apart = np.zeros((3, 3), bool); apart[0, 1] = True       # 0 and 1 are apart, 2 is from neither
    >>> largest_groups(apart, [0, 1, 2])
    [(0, 2), (1, 2)]
    """
    n = len(ranking)
    in_order = better[np.ix_(ranking, ranking)]
    together = [_bits(row) for row in ~(in_order | in_order.T)]
    groups: set[int] = set()
    for who in np.argsort(in_order.sum(axis=0), kind="stable").tolist():
        joined: list[int] = []
        for part in sorted({group & together[who] for group in groups}, key=int.bit_count, reverse=True):
            if not any(part | larger == larger for larger in joined):
                joined.append(part)
        groups = {group for group in groups if group & ~together[who]}  # the others are part of a new one
        groups |= {part | 1 << who for part in joined or [0]}
        if len(groups) > max(n, MOST_GROUPS):
            raise ReportError(
                f"expected at most {max(n, MOST_GROUPS)} groups of indistinguishable clients, but {n} form "
                "more; compare_pairs(...).better says it pair by pair"
            )
    members = (tuple(k for k in range(n) if group >> k & 1) for group in groups)
    return [tuple(ranking[k] for k in group) for group in sorted(members)]


def _bits(row: npt.NDArray[np.bool_]) -> int:
    """Return an integer whose bit k is set iff entry k is true."""
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")


# ------------------------------------------------------------------------------------- intervals and pairs

Errors = Literal["conservative", "independent"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Comparisons of all pairs of clients: shape (N, N) each; entry [i, j] is about client i minus client j.

    ``better[i, j]`` says that i is significantly better than j, at ``critical`` standard errors.
    """

    clients: tuple[str, ...]
    difference: Matrix
    stderr: Matrix
    better: npt.NDArray[np.bool_]
    critical: float


def intervals(scores: Scores, *, level: float = 0.95) -> Matrix:
    r"""Return the z-interval of each raw score, shape (N, 2): raw minus and plus z standard errors.

    .. math:: \mathrm{raw}_i \pm z_{(1 + \mathrm{level})/2} \, \sqrt{s_i^2 + T_i^2}

    The error of training, T, counts if the scores have ``training``, as sums over the rounds of a run do.

    If the degrees of freedom of the standard errors are known, z is Student's quantile: B - 1 if they come
    from B blocks (PHI), the test samples minus their strata if reports carry sketches. Each interval on its
    own covers with probability ``level``, but not all of them at once. This holds as far as the normal
    distribution fits a mean over the test samples. The fit is poor if the utility is 0 or 1 per sample and
    few samples change. Standard errors measured by fedmerit allow for that, see
    :func:`fedmerit.protocol.outcome.standard_error`; your own should too.

    Args:
        scores: with ``stderr``.
        level: in (0, 1).

    >>> s = Scores(score="ALPHA", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4, stderr=[.1, .2])
    >>> intervals(s).round(2)
    array([[0.8 , 1.2 ],
           [2.61, 3.39]])
    """
    stderr = _stderr(scores)
    z = quantile_of(scores)((1 - level_of(level)) / 2)
    return np.stack([scores.raw - z * stderr, scores.raw + z * stderr], axis=1)


def pair_errors(
    scores: Scores, *, errors: Errors | None = None, covariance: npt.ArrayLike | None = None
) -> Matrix:
    r"""Return the standard error of raw_i - raw_j for every pair, shape (N, N).

    .. math:: s_{ij} = s_i + s_j, \qquad \sqrt{s_i^2 + s_j^2} \qquad \text{or} \qquad
              \sqrt{c_{ii} + c_{jj} - 2 c_{ij}}

    The first, "conservative", is valid for any correlation (clients share their test samples). The second,
    "independent", is valid if the correlation is not negative. The third is exact, given the covariance; it
    is the default for scores with a ``covariance``, and for others the first is.

    Args:
        scores: with ``stderr``, unless there is a covariance.
        errors: "conservative" or "independent"; None takes the scores' own covariance, if they have one.
        covariance: covariance of the raw scores, shape (N, N); takes the place of ``stderr``. A pandas frame
            labelled with the clients' names may have them in any order.

    >>> s = Scores(score="ALPHA", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4, stderr=[3, 4])
    >>> pair_errors(s)[0, 1], pair_errors(s, errors="independent")[0, 1]
    (np.float64(7.0), np.float64(5.0))
    """
    if covariance is None and errors is None and isinstance(scores, Scores):
        known = covariance_of(scores)
    elif covariance is not None and isinstance(scores, Scores):
        known = checked_covariance(covariance, scores.clients)
    else:
        known = None
    if known is not None:
        both = np.add.outer(np.diag(known), np.diag(known))
        square = both - 2 * known
        out = np.sqrt(np.where(square > 1e-12 * both, square, 0.0))  # anything smaller is rounding
    else:
        s = _stderr(scores)
        if errors not in (None, "conservative", "independent"):
            raise InputError(f"errors must be 'conservative' or 'independent', got {errors!r}")
        add = np.hypot if errors == "independent" else np.add
        out = add(s[:, None], s[None, :])
    np.fill_diagonal(out, 0.0)
    return np.asarray(out, dtype=np.float64)


def compare_pairs(
    scores: Scores,
    *,
    level: float = 0.95,
    errors: Errors | None = None,
    covariance: npt.ArrayLike | None = None,
    simultaneous: bool = True,
    draws: int = 20_000,
    seed: int = 0,
) -> Pairs:
    """Test for every pair of clients whether one is significantly better than the other.

    With ``simultaneous``, the probability that any of the claims is wrong is at most 1 - level. This uses
    Holm's method over the N(N-1) ordered pairs, with Student's quantiles if the scores' own covariance is an
    estimate from sketches or blocks. For a covariance that you give, which counts as known, it uses the
    distribution of the largest standardised difference (max-T, by Gaussian simulation). Max-T with an
    estimated covariance would be wrong too often: in 5 to 23 % of all test sets
    (experiments/tables/coverage.md). Otherwise each pair is tested on its own.

    Args:
        scores: with ``stderr``, unless ``covariance`` is given.
        level: in (0, 1).
        errors: see :func:`pair_errors`.
        covariance: see :func:`pair_errors`.
        simultaneous: False to test each pair on its own.
        draws: number of simulated vectors for max-T.
        seed: seed of the simulation.

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[1, 3, 3.1], raw=[1, 3, 3.1], gain=7,
    ...            stderr=[.1, .1, .1])
    >>> compare_pairs(s).better.astype(int)
    array([[0, 0, 0],
           [1, 0, 0],
           [1, 0, 0]])
    """
    stderr = pair_errors(scores, errors=errors, covariance=covariance)
    level = level_of(level)
    difference = scores.raw[:, None] - scores.raw[None, :]
    noise = rounding(scores.raw)
    tie = noise[:, None] + noise[None, :]

    def better(critical: float) -> npt.NDArray[np.bool_]:
        return np.asarray(difference > critical * stderr + tie)

    own = errors is None and covariance is None
    quantile = pair_quantile_of(scores) if own else quantile_of(scores)
    if not simultaneous:
        critical = quantile((1 - level) / 2)
    elif covariance is not None:
        order = sorted(range(scores.n), key=lambda i: (scores.raw[i], scores.clients[i]))  # not as given
        both = np.ix_(order, order)
        known = checked_covariance(covariance, scores.clients)
        critical = max_t(known[both], stderr[both], level, draws, seed)
    else:
        pairs = scores.n * (scores.n - 1)
        critical = holm(lambda c: int(np.count_nonzero(better(c))), pairs, level, quantile)
    return Pairs(scores.clients, difference, stderr, better(critical), critical)


def rank_intervals(
    scores: Scores, pairs: Pairs | None = None, *, level: float = 0.95
) -> npt.NDArray[np.int64]:
    r"""Return the best and worst rank each client may have, shape (N, 2); ``level`` holds for all at once.

    .. math:: [\, 1 + \#\{j \text{ better than } i\},\; N - \#\{j \text{ worse than } i\} \,]

    where better and worse are as in :func:`compare_pairs` (Mogstad, Romano, Shaikh & Wilhelm 2024).

    Args:
        scores: with ``stderr``, unless ``pairs`` are given.
        pairs: from :func:`compare_pairs`; by default, its defaults at ``level`` are used, in O(N log N) for
            scores without a covariance.
        level: in (0, 1); ignored if ``pairs`` are given, which have their own.

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[1, 3, 3.1], raw=[1, 3, 3.1], gain=7,
    ...            stderr=[.1, .1, .1])
    >>> rank_intervals(s)
    array([[3, 3],
           [1, 2],
           [1, 2]])
    """
    if pairs is None and isinstance(scores, Scores) and scores.covariance is not None:
        pairs = compare_pairs(scores, level=level)
    if pairs is None:
        above, below = _counts_by_sorting(scores, level)
    else:
        better = _same_clients(pairs, scores).better
        above, below = better.sum(axis=0), better.sum(axis=1)
    return np.stack([1 + above, scores.n - below], axis=1)


def indistinguishable(scores: Scores, pairs: Pairs | None = None) -> tuple[tuple[str, ...], ...]:
    """Return the largest groups of statistically indistinguishable clients, best first.

    No other client could join any of the groups. Two clients are in a group together exactly if they cannot
    be told apart, so every client is in at least one group. Groups may overlap: even if A cannot be told from
    B, nor B from C, A may be told from C. A group may skip a client in the ranking, because a large standard
    error reaches past a small one. The first group holds the clients that may be the best: their rank
    intervals begin at 1.

    Args:
        scores: with ``stderr``, unless ``pairs`` are given.
        pairs: from :func:`compare_pairs`; by default, with its defaults.

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[1, 3, 2], raw=[1, 3, 2], gain=6,
    ...            stderr=[.5, .01, .01])
    >>> indistinguishable(s)
    (('B',), ('C', 'A'))
    """
    better = (compare_pairs(scores) if pairs is None else _same_clients(pairs, scores)).better
    place = {client: i for i, client in enumerate(scores.clients)}
    found = largest_groups(better, [place[client] for client in scores.ranking()])
    return tuple(tuple(scores.clients[i] for i in group) for group in found)


def samples_needed(
    gap: float,
    sd: float,
    *,
    level: float = 0.95,
    power: float = 0.8,
    comparisons: int = 1,
    freedom: int | None = None,
) -> int:
    r"""Return the number of test samples needed to tell two clients apart.

    .. math:: m = \left\lceil \frac{(z_{1 - a/2} + z_{\mathrm{power}})^2 \, \mathrm{sd}^2}{\mathrm{gap}^2}
              \right\rceil, \qquad a = \frac{1 - \mathrm{level}}{\mathrm{comparisons}}

    For LOO with accuracy, sd^2 = d - gap^2, where the gap is LOO itself and d is the share of samples on
    which one of M and M - U_i is right and the other wrong.

    Args:
        gap: difference of the two scores that should be detected.
        sd: standard deviation, over test samples, of the difference of the two clients' per-sample terms.
        level: 1 minus the probability of finding a difference where there is none.
        power: probability of finding the gap if it exists.
        comparisons: number of pairs tested at once (Bonferroni): N(N-1)/2 for N clients.
        freedom: degrees of freedom of the errors, as in :func:`compare_pairs`: 30 with sketches on 500
            samples, B - 1 with B blocks; None for very many. With :math:`\nu` of them, the z become

            .. math:: t \Big(1 - \frac{1}{4 \nu}\Big), \quad z_{\mathrm{power}} \sqrt{1 + \frac{t^2}{2 \nu}},
                      \qquad t = t_{\nu, 1 - a/2}

            because the error varies from test set to test set, and the claim needs t of it.

    >>> samples_needed(gap=0.002, sd=(0.02 - 0.002**2) ** 0.5)
    39237
    """
    sds = _reach(level, power, comparisons, freedom) * _positive(sd, "sd") / _positive(gap, "gap")
    if not sds <= 1e15:
        raise InputError(f"gap {gap:g} is too small beside sd {sd:g}: more than 1e30 samples are needed")
    return math.ceil(sds**2)


def resolvable_gap(
    samples: float,
    sd: float,
    *,
    level: float = 0.95,
    power: float = 0.8,
    comparisons: int = 1,
    freedom: int | None = None,
) -> float:
    r"""Return the smallest difference between two clients that ``samples`` test samples can detect.

    .. math:: \mathrm{gap} = (z_{1 - a/2} + z_{\mathrm{power}}) \, \frac{\mathrm{sd}}{\sqrt m}

    This is the inverse of :func:`samples_needed`; ``samples`` is m, and the other arguments are the same.

    >>> round(resolvable_gap(samples=39240, sd=0.1414), 4)
    0.002
    """
    root = math.sqrt(_positive(samples, "samples"))
    return _reach(level, power, comparisons, freedom) * _positive(sd, "sd") / root


def _reach(level: float, power: float, comparisons: int, freedom: int | None = None) -> float:
    """Return z_{1 - a/2} + z_power, 2.80 by default; its square is the 7.85 of the rule of thumb."""
    tests = whole(comparisons, "comparisons", 1)
    found = number(power)
    if found is None or not 0.5 <= found < 1:
        raise InputError(f"power must lie in [0.5, 1), got {power!r:.100}")
    tail = (1 - level_of(level)) / tests / 2
    if freedom is None:
        return upper_quantile(tail) + upper_quantile(1 - found)
    free = whole(freedom, "freedom", 1)
    critical = _student(free)(tail)
    return critical * (1 - 1 / (4 * free)) + upper_quantile(1 - found) * math.sqrt(
        1 + critical**2 / (2 * free)
    )


def _counts_by_sorting(scores: Scores, level: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return how many clients are better and how many are worse than each.

    raw_i - raw_j > c (s_i + s_j) iff two intervals do not overlap, so sorting their ends is enough.
    """
    s, raw, noise = _stderr(scores), scores.raw, rounding(scores.raw)

    def counts(c: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        low, high = raw - c * s - noise, raw + c * s + noise
        above = scores.n - np.searchsorted(np.sort(low), high, side="right")
        below = np.searchsorted(np.sort(high), low, side="left")
        return above, below

    pairs = scores.n * (scores.n - 1)
    return counts(holm(lambda c: int(counts(c)[0].sum()), pairs, level_of(level), quantile_of(scores)))


def _positive(value: float, name: str) -> float:
    found = number(value)
    if found is None or not 0 < found < math.inf:
        raise InputError(f"{name} must be a finite number above 0, got {value!r:.100}")
    return found


def _stderr(scores: Scores) -> Vector:
    if not isinstance(scores, Scores):
        raise ReportError(f"expected Scores, got {type(scores).__name__}")
    if scores.stderr is None:
        raise ReportError(
            f"{scores.score} carries no standard errors, so nothing can be said about its uncertainty; "
            "reports need se_alpha, se_loo or se_ioi"
        )
    found = error_of(scores)
    assert found is not None
    return found


def _same_clients(pairs: Pairs, scores: Scores) -> Pairs:
    if pairs.clients != scores.clients:
        raise ReportError(f"pairs are about the clients {pairs.clients}, scores about {scores.clients}"[:300])
    return pairs


def sure_signs(scores: Scores, *, level: float = 0.95) -> list[int]:
    r"""Return 1 if a client's raw score is surely above zero, -1 if surely below, 0 otherwise.

    All claims together are right with the given level. This is Holm's method (1979) over the 2N one-sided
    hypotheses "at most 0" and "at least 0", two for each client:

    .. math:: |\mathrm{raw}_i| > z_{1 - a/(2N - k)} \, s_i, \qquad a = 1 - \mathrm{level}

    with k the number of clients found so far. Separate intervals would not suffice: with 19 clients that
    contributed nothing, 38 % of all test sets put at least one below zero.

    Args:
        scores: N clients, with ``stderr``.
        level: in (0, 1).

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[1, -2.2, -9], raw=[1, -2.2, -9], gain=4,
    ...            stderr=[1, 1, 1])
    >>> sure_signs(s)
    [0, 0, -1]
    """
    size, noise, stderr = np.abs(scores.raw), rounding(scores.raw), _stderr(scores)

    def sure(critical: float) -> npt.NDArray[np.bool_]:
        return np.asarray(size > critical * stderr + noise)

    critical = holm(lambda c: int(np.count_nonzero(sure(c))), 2 * scores.n, level, quantile_of(scores))
    return [int(sign) for sign in np.sign(scores.raw) * sure(critical)]
