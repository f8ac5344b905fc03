"""Whether there were rounds enough: how the order of clients settles while rounds are added.

Scores are summed over rounds. If the order of clients by the sum of rounds 1 to r has long been that of all
rounds, more rounds would probably not change it; if it still changed in the last rounds, they might.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.agreement import agreement
from fedmerit.scoring.scores import score_of
from fedmerit.scoring.types import Reports, Scores, settle
from fedmerit.scoring.uncertainty import compare_pairs

FEWEST_ROUNDS = 4
"""With fewer rounds, nobody can see an order settle."""
LAST_PART = 0.25
"""The order is settled if it did not change in this part of the rounds, the last ones."""
MOST_CLIENTS = 200
"""With more clients pairs are not compared round by round: that takes N^2 time each."""


@dataclass(frozen=True, eq=False)
class Convergence:
    """How the order of clients settled, round by round.

    Args:
        numbers: of the rounds.
        spearman: agreement of the sums of rounds 1 to r with those of all; None where it is undefined.
        ordered: how many pairs have their final order after round r.
        pairs: how many pairs have an order in the end, which a tie has not.
        since: the round from which the whole order is the final one.
        sure_since: the round from which all pairs that are told apart in the end have their final order;
            None if no pair is, or if that is unknown.
    """

    numbers: tuple[int, ...]
    spearman: tuple[float | None, ...]
    ordered: tuple[int, ...]
    pairs: int
    since: int
    sure_since: int | None

    def settled(self, since: int) -> bool:
        """Return whether something that holds since this round has held over the last part of the rounds."""
        last = math.ceil(LAST_PART * len(self.numbers))
        return self.numbers.index(since) < len(self.numbers) - last


def convergence(
    each: npt.ArrayLike,
    numbers: Sequence[int],
    *,
    missing: Missing = "zero",
    better: npt.ArrayLike | None = None,
) -> Convergence | None:
    r"""Return how the order of clients settled; None with few rounds, or one or very many clients.

    .. math:: X_r(i) = \sum_{t \le r : i \text{ in } t} s_t(i), \qquad \text{own-mean: } \ \times r / r_i

    is the sum that ranks clients after round r. A client that is in none of these rounds has 0.

    Args:
        each: the score of each client in each round, shape (R, N); NaN where a client has none.
        numbers: of the rounds.
        missing: what a round without a score counts, as in :func:`fedmerit.accumulate`.
        better: shape (N, N); entry [i, j] says that i is told apart as better than j in the end.

    >>> found = convergence([[3, 1], [-1, 2], [1, 1], [1, 2], [1, 2]], range(1, 6))
    >>> found.ordered, found.since, found.settled(found.since)
    ((0, 1, 1, 1, 1), 2, True)
    """
    scores = np.asarray(each, dtype=np.float64)
    rounds, n = scores.shape
    if rounds < FEWEST_ROUNDS or not 2 <= n <= MOST_CLIENTS:
        return None
    sums = np.cumsum(np.nan_to_num(scores, nan=0.0), axis=0)
    if missing == "own-mean":
        seen = np.cumsum(~np.isnan(scores), axis=0)
        sums *= np.arange(1, rounds + 1)[:, None] / np.maximum(seen, 1)
    signs = [_signs(row) for row in sums]
    final = signs[-1]
    ordered = [int(np.count_nonzero((one == final) & (final > 0))) for one in signs]
    sure = np.zeros((n, n), dtype=bool) if better is None else np.asarray(better, dtype=bool)
    return Convergence(
        numbers=tuple(numbers),
        spearman=tuple(agreement(row, sums[-1], resamples=0).spearman for row in sums),
        ordered=tuple(ordered),
        pairs=int(np.count_nonzero(final > 0)),
        since=_since([bool((one == final).all()) for one in signs], numbers),
        sure_since=_since([bool((one[sure] > 0).all()) for one in signs], numbers) if sure.any() else None,
    )


def convergence_of(
    total: Scores,
    rounds: Sequence[Reports] | Sequence[Scores],
    numbers: Sequence[int],
    *,
    missing: Missing = "zero",
) -> Convergence | None:
    """Return how the order of clients by a summed score settled; None where `convergence` is.

    Args:
        total: the score, summed over the rounds; not MERIT, which is more than that sum.
        rounds: the reports that it was computed from, or the scores of single rounds.
        numbers: of the rounds.
        missing: as in the sum.
    """
    if len(rounds) < FEWEST_ROUNDS or not 2 <= total.n <= MOST_CLIENTS:
        return None
    place = {name: i for i, name in enumerate(total.clients)}
    each = np.full((len(rounds), total.n), math.nan)
    scored = [score_of(one, total.score) if isinstance(one, Reports) else one for one in rounds]
    for row, scores in zip(each, scored, strict=True):
        row[[place[name] for name in scores.clients]] = scores.values
    better = None if total.stderr is None else compare_pairs(total).better
    return convergence(each, numbers, missing=missing, better=better)


def _signs(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int8]:
    """Return 1 where i is above j, -1 where below, 0 where they tie, shape (N, N)."""
    places = settle(values)
    return np.sign(places[:, None] - places[None, :]).astype(np.int8)


def _since(held: Sequence[bool], numbers: Sequence[int]) -> int:
    """Return the first round from which something held to the end."""
    place = len(held) - 1
    while place and held[place - 1]:
        place -= 1
    return int(numbers[place])
