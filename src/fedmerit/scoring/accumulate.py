"""Scores summed over rounds, while members come and go, and how the order of members settled.

Most of the gain falls in the first rounds, so somebody must choose what an absent member gets for a missed
round.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, ReportError, UndefinedScore
from fedmerit.notes import Note, look_alike, two_spellings
from fedmerit.scoring.ground_truth import agreement
from fedmerit.scoring.sampling import is_whole
from fedmerit.scoring.scores import score_of
from fedmerit.scoring.types import Reports, Scores, Status, Vector, order_signs
from fedmerit.scoring.uncertainty import compare_pairs, training_of

Missing = Literal["zero", "own-mean"]
Rows = npt.NDArray[np.float64]

SUMMABLE = ("ALPHA", "LOO", "IOI", "FP", "EE", "COS", "MERIT")
_WORST: tuple[Status, ...] = ("ok", "fallback", "undefined", "reversed")
_ERRORS = {"ALPHA": "se_alpha", "LOO": "se_loo", "IOI": "se_ioi"}


def accumulate(
    rounds: Iterable[Reports] | Iterable[Scores], *, score: str = "ALPHA", missing: Missing = "zero"
) -> Scores:
    r"""Return a score summed over rounds.

    .. math:: \mathrm{total}(i) = \sum_{t : i \text{ reported}} s_t(i), \qquad
        \text{own-mean: } \ \times R / R_i

    with R rounds, R_i of them reported by client i. ``MERIT`` is the last SOLO plus the sum of IOI. FP and EE
    are summed as published, without standard errors; their ``status`` is the worst of a round.

    ALPHA, LOO and IOI have standard errors if every report carries one. Squares add up over rounds on
    different test slices. Rounds on one slice share their samples, and rounds without a named slice may:
    their standard errors add up, an upper bound that a note names. For ALPHA on one slice, the client's own
    ``se_alpha_total`` takes their place if it covers exactly these rounds: it is in the client's last report,
    the rounds run from 1 without a gap (or have no numbers; an aborted round makes no gap), and the client
    was never silent before. If every report carries a ``sketch``, sums of ALPHA have one too.

    PHI does not follow from reports: ``rounds`` are then its :class:`~fedmerit.Scores`. If all of them have
    blocks of the same sizes, the blocks are summed, which is right for the same test samples in the same
    blocks, and for other samples in every round. Otherwise standard errors add up, with a note.

    Args:
        rounds: reports in the order of the rounds, without those in which nobody reported; for PHI, scores.
        score: one of ALPHA, LOO, IOI, FP, EE, COS, MERIT, PHI.
        missing: what a round without a report counts: nothing (``"zero"``) or the client's own mean over
            the rounds it did report (``"own-mean"``).

    >>> first = Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1], clients=["A", "B", "C"])
    >>> second = Reports(empty=3, grand=5, alone=[4, 4], without=[4, 4], clients=["A", "B"])
    >>> accumulate([first, second]).as_dict()
    {'A': 1.0, 'B': 2.0, 'C': 2.0}
    >>> accumulate([first, second], missing="own-mean").as_dict()
    {'A': 1.0, 'B': 2.0, 'C': 4.0}
    """
    if missing not in ("zero", "own-mean"):
        raise InputError(f"missing must be 'zero' or 'own-mean', got {missing!r}")
    if score == "PHI":
        return _of_scores(rounds, score, missing)
    reported = _checked(rounds)
    if score not in SUMMABLE:
        raise InputError(f"score must be one of {', '.join((*SUMMABLE, 'PHI'))}, got {score!r}")

    by_round = [score_of(reports, "IOI" if score == "MERIT" else score) for reports in reported]
    summed, factor = _sum(by_round, missing)
    clients = summed.clients
    notes: list[str] = [*_apart(reported), *_alike(clients)]
    if is_whole(reported[0].utility):
        notes.append(Note("whole-sum", utility=reported[0].utility))
    notes += [note for scores in by_round for note in scores.notes]
    stderr = _standard_errors(reported, clients, score, notes)
    total = summed.raw + _last_solo(reported, clients) if score == "MERIT" else summed.raw
    notes += _missed(summed, "partly-zero" if missing == "zero" else "partly-own-mean")
    silent = dict.fromkeys(name for reports in reported for name in reports.silent)
    notes += [Note("never-reported", client=name) for name in silent if name not in clients]
    return replace(
        summed,
        score=score,
        values=total,
        raw=total,
        status=max((scores.status for scores in by_round), key=_WORST.index),
        stderr=None if stderr is None else stderr * factor,
        **(_sketched(reported, clients, factor, notes) if score == "ALPHA" else {}),
        notes=tuple(notes),
    )


def _sum(rounds: Sequence[Scores], missing: Missing) -> tuple[Scores, Vector]:
    """Return the sum of scores without errors or notes, and by what each client's own sum was multiplied."""
    terms: dict[str, list[float]] = defaultdict(list)
    by_round = [scores.as_dict() for scores in rounds]
    for values in by_round:
        for name, value in values.items():
            terms[name].append(value)
    seen = np.array([len(own) for own in terms.values()], dtype=np.float64)
    factor = len(rounds) / seen if missing == "own-mean" else np.ones(len(terms))
    total = np.array([math.fsum(own) for own in terms.values()]) * factor
    summed = Scores(
        score=rounds[0].score, clients=tuple(terms), values=total, raw=total, rounds=len(rounds),
        gain=math.fsum(scores.gain for scores in rounds), coverage=seen / len(rounds),
        training=training_of(by_round),
    )  # fmt: skip
    return summed, factor


def _missed(summed: Scores, code: str) -> list[Note]:
    assert summed.coverage is not None
    seen = np.rint(summed.coverage * summed.rounds).astype(int).tolist()
    return [
        Note(code, client=name, seen=times, rounds=summed.rounds)
        for name, times in zip(summed.clients, seen, strict=True)
        if times < summed.rounds
    ]


def totals_of(rounds: Sequence[Reports], *, missing: Missing = "zero") -> dict[str, Scores]:
    """Return the sums over these rounds of every score that can be summed, by name."""
    totals = {}
    for name in SUMMABLE if rounds else ():
        try:
            totals[name] = accumulate(rounds, score=name, missing=missing)
        except UndefinedScore:  # no cosines or solo utilities were given
            continue
    return totals


def running_sums(
    rounds: Sequence[Reports | Scores], places: Collection[int], *, missing: Missing = "zero"
) -> list[dict[str, float]]:
    """Return the sums after so many rounds, by client: the values of `accumulate`, for all places at once.

    Of reports, ALPHA is summed.
    """
    terms: dict[str, list[float]] = defaultdict(list)
    sums = []
    for count, scores in enumerate(_scored(rounds, "ALPHA"), start=1):
        for name, value in scores.as_dict().items():
            terms[name].append(value)
        if count in places:
            times = {name: count / len(own) if missing == "own-mean" else 1.0 for name, own in terms.items()}
            sums.append({name: math.fsum(own) * times[name] for name, own in terms.items()})
    return sums


def _scored(rounds: Sequence[Reports | Scores], score: str) -> Iterator[Scores]:
    return (score_of(item, score) if isinstance(item, Reports) else item for item in rounds)


def _sketched(
    rounds: Sequence[Reports], clients: Sequence[str], factor: Vector, notes: list[str]
) -> dict[str, Any]:
    """Return the sum of the sketches and its freedom, the least of a round; nothing unless all rounds fit."""
    sketches = [(reports.clients, reports.sketch.T) for reports in rounds if reports.sketch is not None]
    if not sketches:
        return {}
    if len(sketches) < len(rounds) or len({len(sketch) for _, sketch in sketches}) > 1:
        notes.append(Note("bound-pairs", rounds=len(rounds) - len(sketches)))
        return {}
    freedom = min(reports.freedom or 1 for reports in rounds)
    return {"sketch": _sum_of_columns(sketches, clients) * factor, "freedom": freedom}


def _sum_of_columns(parts: Sequence[tuple[Sequence[str], Rows]], clients: Sequence[str]) -> Rows:
    """Return the sum of matrices that have one column per client, of those named beside them."""
    place = {name: i for i, name in enumerate(clients)}
    total = np.zeros((len(parts[0][1]), len(clients)))
    for names, matrix in parts:
        total[:, [place[name] for name in names]] += matrix
    return total


def _of_scores(rounds: Any, score: str, missing: Missing) -> Scores:
    by_round: list[Scores] = _listed(rounds, Scores, f"Scores for {score}")
    if others := [scores.score for scores in by_round if scores.score != score]:
        raise ReportError(f"accumulate takes a list of Scores for {score}, got {others[0]}")
    summed, factor = _sum(by_round, missing)
    notes: list[str] = [note for scores in by_round for note in scores.notes]
    code = "summed-zero" if missing == "zero" else "summed-own-mean"
    notes += [*_alike(summed.clients), *_missed(summed, code)]
    blocks = [(scores.clients, scores.blocks) for scores in by_round if scores.blocks is not None]
    sizes = [scores.sizes for scores in by_round if scores.sizes is not None]
    if len(blocks) == len(by_round) and len({size.tobytes() for size in sizes}) == 1:
        total = _sum_of_columns(blocks, summed.clients) * factor
        summed = replace(summed, blocks=total, sizes=sizes[0])
    stderr: Vector | None = None
    if (covariance := summed.covariance) is not None:
        stderr = np.sqrt(np.diag(covariance))
    elif all(scores.stderr is not None for scores in by_round):
        errors = [(scores.clients, scores.stderr[None]) for scores in by_round if scores.stderr is not None]
        stderr = _sum_of_columns(errors, summed.clients)[0] * factor
        notes.append(Note("bound-blocks"))
    return replace(summed, stderr=stderr, notes=tuple(notes))


def _alike(clients: Sequence[str]) -> Iterator[Note]:
    if alike := two_spellings(clients):
        code = "composed-alike" if look_alike(*alike) else "spelled-alike"
        yield Note(code, client=alike[0], other=alike[1])


def _listed(rounds: Any, kind: type, what: str) -> list[Any]:
    listed = list(rounds) if isinstance(rounds, Iterable) else [rounds]
    wrong = [item for item in listed if not isinstance(item, kind)]
    if wrong or not isinstance(rounds, Iterable):
        raise ReportError(f"accumulate takes a list of {what}, got {type((wrong or listed)[0]).__name__}")
    if not listed:
        raise ReportError("nothing to accumulate: 0 rounds")
    return listed


def _checked(rounds: Any) -> list[Reports]:
    """Return rounds as a list, or raise ReportError unless they can be added."""
    reported: list[Reports] = _listed(rounds, Reports, "Reports")
    utilities = {reports.utility for reports in reported}
    if len(utilities) > 1:
        names = ", ".join(sorted(str(name) for name in utilities))
        raise ReportError(f"rounds of different utilities cannot be added: {names}")
    numbers = [reports.round for reports in reported if reports.round is not None]
    for earlier, later in pairwise(numbers):
        if later <= earlier:
            raise ReportError(f"rounds must come in order, each once: {later} follows {earlier}")
    for place, reports in enumerate(reported, start=1):
        if not reports.n:
            silent = (
                f"all {len(reports.silent)} clients are silent; leave the round out, it counts for nobody"
            )
            raise ReportError(f"expected at least 1 report, but {silent}", round=number_of(reports, place))
    return reported


class ScoredRound(Protocol):
    """A scored round: as reported, or as settled."""

    @property
    def round(self) -> int | None: ...
    @property
    def slice(self) -> str | None: ...
    @property
    def empty(self) -> float: ...
    @property
    def grand(self) -> float: ...
    @property
    def gain(self) -> float: ...
    @property
    def utility(self) -> str | None: ...
    @property
    def clients(self) -> tuple[str, ...]: ...
    @property
    def silent(self) -> tuple[str, ...]: ...


def number_of(reports: ScoredRound, place: int) -> int:
    """Return the number of a round, or ``place``, its position from 1, if it has none."""
    return place if reports.round is None else reports.round


def join_up(earlier: ScoredRound, later: ScoredRound, place: int) -> bool:
    """Return whether nothing changed between two rounds; ``place`` is the position of the earlier one.

    On the same test samples they must join, and otherwise their numbers must be consecutive.
    """
    if _on_one_slice(earlier, later):
        return joins(earlier.grand, later.empty)
    return number_of(later, place + 1) <= number_of(earlier, place) + 1


def _apart(rounds: Sequence[Reports]) -> Iterator[Note]:
    """Yield notes on rounds that do not join up: what changed between them is in nobody's score.

    If no round names its slice, they are on the same test samples if at least half of them begin where the
    one before ended.
    """
    gaps: list[Note] = []
    jumps, unnamed_jumps, joined = [], [], 0
    unnamed = all(reports.slice is None and reports.round is not None for reports in rounds)
    for place, (earlier, later) in enumerate(pairwise(rounds), start=1):
        before, after = number_of(earlier, place), number_of(later, place + 1)
        jump = Note("jump-between", earlier=before, later=after, ends=earlier.grand, begins=later.empty)
        if not join_up(earlier, later, place):
            jumps += [jump] if _on_one_slice(earlier, later) else []
            gaps += [Note("gap-between", earlier=before, later=after)] if after > before + 1 else []
        elif unnamed and not joins(earlier.grand, later.empty):
            unnamed_jumps.append(jump)
        joined += joins(earlier.grand, later.empty)
    if gaps:
        yield Note("gap", gaps=gaps)
    if jumps:
        yield Note("jump", jumps=jumps)
    if unnamed_jumps and joined >= max(2, len(unnamed_jumps)):
        yield Note("jump-unnamed", jumps=unnamed_jumps)


def joins(ends: float, begins: float) -> bool:
    """Return whether a round begins with the utility that the one before ended with."""
    return abs(begins - ends) <= 1e-6 * max(abs(begins), abs(ends))


def _last_solo(rounds: Sequence[Reports], clients: Sequence[str]) -> Vector:
    last: dict[str, float] = {}
    for reports in rounds:
        if reports.solo is not None:
            last.update(score_of(reports, "SOLO").as_dict())
    without = [name for name in clients if name not in last]
    if without:
        raise UndefinedScore(f"MERIT needs SOLO, which client {without[0]!r} never reported")
    return np.array([last[name] for name in clients])


def _standard_errors(
    rounds: Sequence[Reports], clients: Sequence[str], score: str, notes: list[str]
) -> Vector | None:
    """Return the standard errors of the sum over rounds, or None if a report carries none."""
    field = _ERRORS.get(score)
    if field is None or any(getattr(reports, field) is None for reports in rounds):
        return None
    # per client and slice: the standard errors of its rounds, and the last running total that it reported
    parts: list[dict[str | None, list[float]]] = [defaultdict(list) for _ in clients]
    totals: list[dict[str | None, float]] = [{} for _ in clients]
    index = {name: i for i, name in enumerate(clients)}
    # clients whose running totals may cover other rounds
    doubted = set() if rounds[0].round in (None, 1) else set(clients)
    for place, reports in enumerate(rounds):
        if place and not _follows(rounds[place - 1], reports):
            doubted.update(clients)
        doubted.update(reports.silent)
        for k, name in enumerate(reports.clients):
            mine, here = index[name], reports.slice
            parts[mine][here].append(float(getattr(reports, field)[k]))
            totals[mine].pop(here, None)  # the earlier total does not cover this round
            if score == "ALPHA" and name not in doubted and reports.se_alpha_total is not None:
                totals[mine][here] = float(reports.se_alpha_total[k])
    bounded = False
    summed = []
    for own, running in zip(parts, totals, strict=True):
        unknown, square = 0.0, 0.0
        for slice_id, errors in own.items():
            exact = len(errors) == 1 or (slice_id in running and len(own) == 1)
            bounded |= not exact
            error = errors[0] if len(errors) == 1 else running[slice_id] if exact else math.fsum(errors)
            if slice_id is None:
                unknown = error
            else:
                square += error * error
        bounded |= None in own and len(own) > 1
        summed.append(unknown + math.sqrt(square))
    if bounded:
        unsaid = any(reports.slice is None for reports in rounds)
        notes.append(Note("bound-unnamed" if unsaid else "bound-shared"))
    return np.array(summed)


def _follows(earlier: Reports, later: Reports) -> bool:
    """Return whether nothing can have been measured between two rounds.

    Their numbers are consecutive, or the rounds between them were aborted: the later round begins with the
    utility that the earlier one ended with, on the same samples and to the last bit.
    """
    if earlier.round is None or later.round is None:
        return earlier.round is later.round
    unchanged = _on_one_slice(earlier, later) and earlier.grand == later.empty
    return later.round == earlier.round + 1 or unchanged


def _on_one_slice(earlier: ScoredRound, later: ScoredRound) -> bool:
    return earlier.slice is not None and earlier.slice == later.slice


# -------------------------------------------------------------------------------------------- how it settled

FEWEST_ROUNDS = 4  # with fewer, nobody can see an order settle
LAST_PART = 0.25  # the order is settled if it did not change in this part of the rounds, the last ones
MOST_CLIENTS = 200  # with more, pairs are not compared round by round: that takes N^2 time each


@dataclass(frozen=True, eq=False)
class Convergence:
    """How the order of clients settled, round by round."""

    numbers: tuple[int, ...]  # of the rounds
    spearman: tuple[float | None, ...]  # agreement of the sums of rounds 1 to r with those of all
    ordered: tuple[int, ...]  # how many pairs have their final order after round r
    pairs: int  # how many pairs have an order in the end, which a tie has not
    since: int  # the round from which the whole order is the final one
    sure_since: int | None  # the same for the pairs that are told apart in the end; None if there are none

    def settled(self, since: int) -> bool:
        """Return whether something that holds since this round has held over the last part of the rounds."""
        last = math.ceil(LAST_PART * len(self.numbers))
        return self.numbers.index(since) < len(self.numbers) - last


def convergence_of(
    total: Scores, rounds: Sequence[Reports | Scores], numbers: Sequence[int], *, missing: Missing = "zero"
) -> Convergence | None:
    r"""Return how the order of clients by a summed score, not MERIT, settled.

    .. math:: X_r(i) = \sum_{t \le r : i \text{ in } t} s_t(i), \qquad \text{own-mean: } \ \times r / r_i

    is the sum that ranks clients after round r: 0 for a client that is in none of these rounds. None with few
    rounds, or one or very many clients.

    Args:
        total: the sum over all rounds.
        rounds: the reports that ``total`` was computed from, or the scores of single rounds.
        numbers: of the rounds.
        missing: what a round without a score counts, as in `accumulate`.
    """
    if len(rounds) < FEWEST_ROUNDS or not 2 <= total.n <= MOST_CLIENTS:
        return None
    place = {name: i for i, name in enumerate(total.clients)}
    sums, seen = np.zeros((2, len(rounds), total.n))
    for row, scores in enumerate(_scored(rounds, total.score)):
        at = [place[name] for name in scores.clients]
        sums[row, at], seen[row, at] = scores.values, 1
    sums, seen = np.cumsum(sums, axis=0), np.cumsum(seen, axis=0)
    if missing == "own-mean":
        sums *= np.arange(1, len(rounds) + 1)[:, None] / np.maximum(seen, 1)
    signs = np.stack([order_signs(row) for row in sums])
    final = signs[-1]
    sure = np.zeros_like(final, dtype=bool) if total.stderr is None else compare_pairs(total).better
    return Convergence(
        numbers=tuple(numbers),
        spearman=tuple(agreement(row, sums[-1]).spearman for row in sums),
        ordered=tuple(np.count_nonzero((signs == final) & (final > 0), axis=(1, 2)).tolist()),
        pairs=int(np.count_nonzero(final > 0)),
        since=_since(np.all(signs == final, axis=(1, 2)).tolist(), numbers),
        sure_since=_since(np.all(signs[:, sure] > 0, axis=1).tolist(), numbers) if sure.any() else None,
    )


def _since(held: Sequence[bool], numbers: Sequence[int]) -> int:
    broken = [place for place, holds in enumerate(held[:-1]) if not holds]
    return int(numbers[broken[-1] + 1 if broken else 0])
