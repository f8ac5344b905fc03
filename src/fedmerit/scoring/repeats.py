"""What training again changes: the spread of scores over runs, beside the error that the test set leaves.

Runs are repeats if they have the same data, in the same hands, and the same test pool, and differ only in
the first model and the batch order. Then the score of client i in run k is

.. math:: x_{ki} = \\mu_i + e_i + t_{ki}

with the score mu_i that one would get on average over trainings and test sets, the error e_i of this test
pool, and the error t_ki of this training. The pool is the same in every run, so e_i is common to all of them:
it moves the scores of all runs together and is no part of the spread between them. The spread shows t alone,
and the standard errors of the runs show e alone; neither shows the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedmerit.errors import ReportError
from fedmerit.scoring.types import Scores, Vector, in_order, settle
from fedmerit.scoring.uncertainty import Matrix, compare_pairs, quantile_of, student_quantile
from fedmerit.scoring.validate import level_of


@dataclass(frozen=True, eq=False)
class Repeats:
    """The same score of the same clients in K runs, K at least 2.

    Args:
        runs: the scores of each run, with the clients in the order of the first. Their errors are those of
            the test set alone: what training adds is measured here, not allowed for.
    """

    runs: tuple[Scores, ...]

    @property
    def clients(self) -> tuple[str, ...]:
        """Names, in the order of all vectors here."""
        return self.runs[0].clients

    @property
    def count(self) -> int:
        """K, the number of runs."""
        return len(self.runs)

    @property
    def freedom(self) -> int:
        """Degrees of freedom of every client's spread between runs: K - 1."""
        return self.count - 1

    # ----------------------------------------------------------------------------------------------- spread

    @cached_property
    def scores(self) -> Matrix:
        """The raw score of each client in each run, shape (K, N)."""
        return np.stack([one.raw for one in self.runs])

    @cached_property
    def mean(self) -> Vector:
        """The mean of each client's scores over the runs."""
        return np.asarray(self.scores.mean(axis=0), dtype=np.float64)

    @cached_property
    def training(self) -> Vector:
        r"""The standard deviation of each client's score between runs: what training again changes.

        .. math:: T_i = \sqrt{\frac{1}{K - 1} \sum_k (x_{ki} - \bar x_i)^2}

        with K - 1 degrees of freedom. From few runs it is a rough number; see :func:`spread_factors`.
        """
        return np.asarray(self.scores.std(axis=0, ddof=1), dtype=np.float64)

    @cached_property
    def test(self) -> Vector | None:
        r"""The standard error that the test set leaves in each client's score; None if a run has none.

        .. math:: S_i = \sqrt{\frac1K \sum_k s_{ki}^2}

        with the standard error s_ki of run k. All runs share the test pool, so more runs do not reduce it.
        """
        found = [one.stderr for one in self.runs if one.stderr is not None]
        if len(found) < self.count:
            return None
        return np.asarray(np.sqrt(np.mean(np.square(found), axis=0)), dtype=np.float64)

    @cached_property
    def total(self) -> Vector | None:
        r"""The standard error of the score of one run, test set and training together.

        .. math:: \sqrt{S_i^2 + T_i^2}
        """
        return None if self.test is None else np.hypot(self.test, self.training)

    @cached_property
    def mean_error(self) -> Vector | None:
        r"""The standard error of the mean over runs: training averages out, the test set does not.

        .. math:: \sqrt{S_i^2 + T_i^2 / K}
        """
        return None if self.test is None else np.hypot(self.test, self.training / math.sqrt(self.count))

    def intervals(self, *, level: float = 0.95) -> Matrix | None:
        r"""Return an interval for each client's mean score, shape (N, 2); None without standard errors.

        .. math:: \bar x_i \pm \sqrt{ (q S_i)^2 + \big( t_{K-1} \, T_i / \sqrt K \big)^2 }

        with Student's quantile of K - 1 degrees of freedom for training, and the quantile q of the runs'
        standard errors for the test set: the normal one, or Student's if they come from blocks (PHI). The
        half widths for both errors are added as squares (Zou & Donner 2008). In simulations with a level of
        95 % this covers 95 to 99 %, and 95 % if one of the two errors is much larger than the other;
        Satterthwaite's degrees of freedom in its place cover too little with few runs. Each interval is for
        one client alone.
        """
        if self.test is None:
            return None
        tail = (1 - level_of(level)) / 2
        again = student_quantile(tail, self.freedom) * self.training / math.sqrt(self.count)
        half = np.hypot(quantile_of(self.runs[0])(tail) * self.test, again)
        return np.stack([self.mean - half, self.mean + half], axis=1)

    @property
    def overall(self) -> tuple[float, float | None]:
        r"""Both spreads over all clients: training and test set, each a root of the mean of its squares.

        .. math:: \sqrt{\frac1N \sum_i T_i^2}, \qquad \sqrt{\frac1N \sum_i S_i^2}
        """
        training = math.sqrt(float(np.mean(np.square(self.training))))
        return training, None if self.test is None else math.sqrt(float(np.mean(np.square(self.test))))

    # ------------------------------------------------------------------------------------------------ order

    @cached_property
    def ranks(self) -> npt.NDArray[np.int64]:
        """The rank of each client in each run, 1 = best, shape (K, N); ties share the better rank."""
        return np.stack([one.ranks() for one in self.runs])

    @cached_property
    def average(self) -> Scores:
        """The mean scores as scores, which rank the clients; without standard errors."""
        first = self.runs[0]
        bare = replace(first, values=self.mean, raw=self.mean, stderr=None, blocks=None, sizes=None)
        bare = replace(bare, sketch=None, freedom=None)
        return replace(bare, gain=float(np.mean([one.gain for one in self.runs])), notes=())

    @property
    def same_rank(self) -> tuple[str, ...]:
        """Clients that have the same rank in all runs, best first."""
        same = dict(zip(self.clients, (self.ranks == self.ranks[0]).all(axis=0).tolist(), strict=True))
        return tuple(name for name in self.average.ranking() if same[name])

    @cached_property
    def above(self) -> npt.NDArray[np.int64]:
        """In how many runs client i scores above client j, shape (N, N); a tie counts for neither."""
        return np.asarray(np.sum([_above(one.raw) for one in self.runs], axis=0), dtype=np.int64)

    @cached_property
    def told_apart(self) -> npt.NDArray[np.int64] | None:
        """In how many runs the test set alone says that i is better than j; None without standard errors."""
        if self.test is None:
            return None
        return np.asarray(np.sum([compare_pairs(one).better for one in self.runs], axis=0), dtype=np.int64)

    @property
    def holding(self) -> int:
        """How many pairs of clients have the same order in all runs."""
        return int(np.count_nonzero(self.above == self.count))

    @property
    def pairs(self) -> int:
        """How many pairs of clients there are."""
        return len(self.clients) * (len(self.clients) - 1) // 2

    @property
    def swaps(self) -> tuple[tuple[str, str, int, int], ...]:
        """Pairs that swap: the one above the other in some run and below it in another, best pairs first.

        Each is (client with the higher mean, the other, runs in which it is above, runs in which below).
        """
        place = {name: i for i, name in enumerate(self.clients)}
        order = [(name, place[name]) for name in self.average.ranking()]
        return tuple(
            (one, other, int(self.above[i, j]), int(self.above[j, i]))
            for k, (one, i) in enumerate(order)
            for other, j in order[k + 1 :]
            if self.above[i, j] and self.above[j, i]
        )

    @property
    def broken(self) -> tuple[tuple[str, str], ...]:
        """Pairs (better, worse) that the test set tells apart in some run, but another run turns round."""
        if self.told_apart is None:
            return ()
        against = (self.told_apart > 0) & (self.above.T > 0)
        return tuple((self.clients[i], self.clients[j]) for i, j in zip(*against.nonzero(), strict=True))

    @property
    def by_chance(self) -> float:
        r"""The least probability that two clients who are equal keep one order in all runs by chance.

        .. math:: 2^{1 - K}

        It is larger if the test pool favours one of them, because that pool is the same in all runs.
        """
        return math.ldexp(1.0, 1 - self.count)


def repeats(runs: Sequence[Scores]) -> Repeats:
    """Return runs as repeats of each other.

    Args:
        runs: the same score of the same clients, summed over the same number of rounds, at least twice.

    Raises:
        ReportError: there are fewer than two runs, or they are about other clients, scores or rounds.

    >>> def run(*raw):
    ...     return Scores(score="PHI", clients=("A", "B"), values=raw, raw=raw, gain=4, stderr=[.3, .4])
    >>> found = repeats([run(1, 3), run(3, 2)])
    >>> found.mean.tolist(), found.training.round(3).tolist(), found.mean_error.round(3).tolist()
    ([2.0, 2.5], [1.414, 0.707], [1.044, 0.64])
    >>> found.swaps
    (('B', 'A', 1, 1),)
    """
    if len(runs) < 2:
        raise ReportError(f"expected at least 2 runs, got {len(runs)}")
    first, *others = runs
    made = [first]
    for place, one in enumerate(others, start=2):
        for what in ("score", "rounds"):
            expected, came = getattr(first, what), getattr(one, what)
            if expected != came:
                raise ReportError(f"run {place}: expected {what} {expected}, as in run 1, got {came}")
        if odd := sorted(set(first.clients) ^ set(one.clients)):
            raise ReportError(f"run {place}: expected the clients of run 1, but {odd[0]!r} is in one of them")
        made.append(in_order(one, first.clients))
    return Repeats(tuple(replace(one, training=None) for one in made))


def spread_factors(freedom: int, *, level: float = 0.95) -> tuple[float, float]:
    r"""Return how much smaller and larger than estimated a standard deviation may be.

    .. math:: \sqrt{\nu / \chi^2_{\nu, (1 + \mathrm{level})/2}}, \qquad
        \sqrt{\nu / \chi^2_{\nu, (1 - \mathrm{level})/2}}

    Args:
        freedom: degrees of freedom of the estimate, nu.
        level: in (0, 1).

    >>> [round(one, 2) for one in spread_factors(2)]
    [0.52, 6.28]
    """
    tail = (1 - level_of(level)) / 2
    return math.sqrt(freedom / _chi_square(1 - tail, freedom)), math.sqrt(
        freedom / _chi_square(tail, freedom)
    )


def _chi_square(probability: float, freedom: int) -> float:
    r"""Return the quantile of chi-square, by bisection of its distribution (Abramowitz & Stegun 26.4.4-5).

    .. math:: Q(x) = e^{-x/2} \sum_{k < \nu / 2} \frac{(x/2)^k}{k!}, \ \nu \text{ even}; \quad
        \operatorname{erfc}\sqrt{x/2} + e^{-x/2} \sum_{k < (\nu - 1)/2}
        \frac{(x/2)^{k + 1/2}}{\Gamma(k + 3/2)}, \ \nu \text{ odd}
    """
    half = 0.5 * (freedom % 2)

    def below(x: float) -> float:
        above = math.erfc(math.sqrt(x / 2)) if half else 0.0
        for k in range(freedom // 2):
            above += math.exp(-x / 2 + (k + half) * math.log(x / 2) - math.lgamma(k + half + 1))
        return 1 - above

    low, high = 0.0, 10.0 * freedom + 100
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return (low + high) / 2


def _above(raw: Vector) -> npt.NDArray[np.bool_]:
    places = settle(raw)
    return np.asarray(places[:, None] > places[None, :])
