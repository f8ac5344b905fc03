"""Who, how much, how sure: what a person reads first of a finished set of reports."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedmerit.errors import UndefinedShares
from fedmerit.scoring.accumulate import NO_SCORE, Missing, accumulate, number_of
from fedmerit.scoring.doubts import Doubt, doubts
from fedmerit.scoring.files import scores_of
from fedmerit.scoring.rewards import shares
from fedmerit.scoring.types import Reports, Scores, rounding
from fedmerit.scoring.uncertainty import holm, indistinguishable, intervals, rank_intervals

MOST_COMPARED = 1000
"""With more clients nobody reads who cannot be told apart, and finding out takes N^2 memory."""


@dataclass(frozen=True)
class Standing:
    """One line of the table; None where there is nothing to say."""

    client: str
    rank: int
    rank_interval: tuple[int, int] | None
    total: float
    interval: tuple[float, float] | None
    coverage: float
    last: dict[str, float | None]  # LOO, FP, EE of the last round
    share: float | None
    samples: float | None
    digits: int = 4  # decimals that numbers of this size need
    surely: int = 0  # 1 if the total is surely above zero, -1 if surely below; holds for all members at once


@dataclass(frozen=True)
class Summary:
    """Standings, best first, and everything somebody should know before believing them."""

    standings: tuple[Standing, ...]
    total: Scores
    last: Reports
    status: Mapping[str, str]  # of FP and EE in the last round
    groups: tuple[tuple[str, ...], ...]  # who cannot be told apart
    suspects: tuple[str, ...]  # reported every round and significantly below everybody else
    notes: tuple[str, ...]
    doubts: tuple[Doubt, ...] = ()  # said before everything else

    @property
    def withheld(self) -> bool:
        """Whether nobody is to be praised or accused by these numbers before somebody has looked."""
        return any(one.withholds for one in self.doubts)

    @property
    def digits(self) -> int:
        """Decimals that contributions of this size need."""
        return self.standings[0].digits


def summarise(
    rounds: Sequence[Reports],
    *,
    score: str = "ALPHA",
    missing: Missing = "zero",
    clients: Sequence[str] = (),
    game: str | None = None,
) -> Summary:
    """A score summed over rounds with intervals, ranks and shares, and the last round's LOO, FP and EE.

    Args:
        rounds: reports in order; at least one.
        score: see :func:`fedmerit.scoring.accumulate`.
        missing: see :func:`fedmerit.scoring.accumulate`.
        clients: the whole roster, where known; who never reported is noted.
        game: see :func:`fedmerit.scoring.doubts.doubts`.
    """
    total = accumulate(rounds, score=score, missing=missing)
    last = rounds[-1]
    found = scores_of(last)
    notes = [*total.notes, *absences(rounds, clients)]
    for one in found.values():
        notes += one.notes if one else ()
    try:
        divided = shares(total)
        notes += divided.notes
    except UndefinedShares as error:
        divided = None
        notes.append(f"no shares: {error}")
    spans, ranks = None, None
    signs = [0] * total.n
    groups: tuple[tuple[str, ...], ...] = ()
    suspects: tuple[str, ...] = ()
    if total.stderr is not None:
        spans, ranks, signs = intervals(total), rank_intervals(total), sure_signs(total)
        if total.n <= MOST_COMPARED:
            groups = indistinguishable(total)
        if total.n > 1:
            last_for_sure = ranks[:, 0] == total.n
            if total.coverage is not None:  # a round that somebody missed accuses nobody
                last_for_sure &= total.coverage >= 1
            suspects = tuple(name for name, sure in zip(total.clients, last_for_sure, strict=True) if sure)
    at = {name: i for i, name in enumerate(total.clients)}
    of_last = {name: k for k, name in enumerate(last.clients)}
    samples = {} if last.samples is None else dict(zip(last.clients, last.samples.tolist(), strict=True))
    standings = []
    places = total.ranks()
    digits = digits_for(float(np.max(np.abs(total.raw))))
    for name in total.ranking():
        i, k = at[name], of_last.get(name)
        round_scores: dict[str, float | None] = {}
        for key in ("LOO", "FP", "EE"):
            one = found.get(key)
            round_scores[key] = None if one is None or k is None else float(one.values[k])
        standings.append(
            Standing(
                client=name,
                rank=int(places[i]),
                rank_interval=None if ranks is None else (int(ranks[i, 0]), int(ranks[i, 1])),
                total=float(total.raw[i]),
                interval=None if spans is None else (float(spans[i, 0]), float(spans[i, 1])),
                coverage=1.0 if total.coverage is None else float(total.coverage[i]),
                last=round_scores,
                share=None if divided is None else divided[name],
                samples=samples.get(name),
                digits=digits,
                surely=signs[i],
            )
        )
    status = {key: one.status for key in ("FP", "EE") if (one := found.get(key)) is not None}
    return Summary(
        standings=tuple(standings),
        total=total,
        last=last,
        status=status,
        groups=groups,
        suspects=suspects,
        notes=tuple(dict.fromkeys(notes)),
        doubts=doubts(rounds, game=game),
    )


def sure_signs(scores: Scores, *, level: float = 0.95) -> list[int]:
    r"""Whose raw score is surely above zero (1) or below (-1), all claims right at once with the given level.

    Holm's method (1979) over the 2N one-sided hypotheses "at most 0" and "at least 0", two for each client:

    .. math:: |\mathrm{raw}_i| > z_{1 - a/(2N - k)} \, s_i, \qquad a = 1 - \mathrm{level}

    with k the number of clients found. Single intervals would not do: of 19 clients that contributed
    nothing, 38 % of all test sets put one below zero.

    Args:
        scores: N clients, with ``stderr``.
        level: in (0, 1).

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[1, -2.2, -9], raw=[1, -2.2, -9], gain=4,
    ...            stderr=[1, 1, 1])
    >>> sure_signs(s)
    [0, 0, -1]
    """
    assert scores.stderr is not None
    size, noise, stderr = np.abs(scores.raw), rounding(scores.raw), scores.stderr

    def sure(critical: float) -> npt.NDArray[np.bool_]:
        return np.asarray(size > critical * stderr + noise)

    critical = holm(lambda c: int(np.count_nonzero(sure(c))), 2 * scores.n, level)
    return [int(sign) for sign in np.sign(scores.raw) * sure(critical)]


def digits_for(largest: float) -> int:
    """Decimals for numbers up to this size: 4 for ordinary ones, more for small, fewer for large ones.

    >>> [digits_for(size) for size in (0.0, 2e-5, 0.03, 1.0, 20_000.0, 1e9)]
    [4, 7, 4, 4, 2, 0]
    """
    if not largest:
        return 4
    power = math.floor(math.log10(largest))
    return min(15, 2 - power) if power < -2 else 4 if power < 3 else max(0, 6 - power)


def absences(rounds: Sequence[Reports], clients: Sequence[str]) -> Iterator[str]:
    """Who was summed without a report, and when; who is on the roster and in no round at all."""
    missed: dict[str, list[str]] = {}
    for place, reports in enumerate(rounds, start=1):
        for name in reports.silent:
            missed.setdefault(name, []).append(str(number_of(reports, place)))
    for name, when in missed.items():
        yield f"client {name!r} was summed but sent no report: round {', '.join(when)}"
    seen = {name for reports in rounds for name in (*reports.clients, *reports.silent)}
    for name in clients:
        if name not in seen:
            yield f"client {name!r} is on the list of clients but never reported: {NO_SCORE}"


def unscored(rounds: Sequence[Reports], clients: Sequence[str] = ()) -> tuple[str, ...]:
    """Who is on the roster, or was in a sum, and has no report in any round."""
    silent = (name for reports in rounds for name in reports.silent)
    reported = {name for reports in rounds for name in reports.clients}
    return tuple(name for name in dict.fromkeys((*clients, *silent)) if name not in reported)
