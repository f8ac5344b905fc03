"""Scores summed over rounds, while members come and go.

One round can show at best what its own exact Shapley value shows; the sum over rounds shows more. Most of
the gain falls in the first rounds, so somebody must choose what an absent member gets for a missed round, and
everybody should see that choice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, ReportError, UndefinedScore
from fedmerit.notes import Note
from fedmerit.scoring.metrics import is_whole
from fedmerit.scoring.scores import score_of
from fedmerit.scoring.types import Reports, Scores, Status, Vector
from fedmerit.scoring.uncertainty import training_of
from fedmerit.scoring.validate import look_alike, two_spellings

Missing = Literal["zero", "own-mean"]

SUMMABLE = ("ALPHA", "LOO", "IOI", "FP", "EE", "COS", "MERIT")
_WORST: tuple[Status, ...] = ("ok", "fallback", "undefined", "reversed")
_ERRORS = {"ALPHA": "se_alpha", "LOO": "se_loo", "IOI": "se_ioi"}


def accumulate(
    rounds: Iterable[Reports] | Iterable[Scores],
    *,
    score: str = "ALPHA",
    missing: Missing = "zero",
    warmup: int = 0,
) -> Scores:
    r"""Return a score summed over rounds.

    .. math:: \mathrm{total}(i) = \sum_{t : i \text{ reported}} s_t(i), \qquad
        \text{own-mean: } \ \times R / R_i

    with R counted rounds, R_i of them reported by client i. ``MERIT`` is the last SOLO plus the sum of IOI.

    FP and EE are summed as published, and ``raw`` is that sum. Its ``status`` is the worst of a round: ok,
    fallback, undefined, reversed. It has no standard errors: each round divides by a sum that is itself
    measured.

    ALPHA, LOO and IOI have standard errors if every counted report carries one. Rounds on different test
    slices are independent, so their squares add up. Rounds without a named slice may share samples with any
    other round, so their standard errors are added without squaring. Rounds on the same slice share their
    samples: there the client's own ``se_alpha_total`` is used for ALPHA if it covers exactly these rounds.
    Otherwise the standard errors of the rounds are added up, which is an upper bound; a note says so.

    A total covers exactly these rounds if all of them are on one slice, if the client's last report carries
    it, if the round numbers run from 1 without a gap (or no round has a number), and if the client was never
    silent before. It also includes what the client measured in rounds that are missing here or in which its
    report did not arrive. An aborted round makes no gap, because the utility stays the same over it. A client
    in neither ``clients`` nor ``silent`` was not in that round's sum and measured nothing.

    If every counted report carries a ``sketch``, the sums of ALPHA have one too, the sum of the sketches, and
    so a ``covariance``: rounds on the same slice have the same signs, other slices have other samples.

    Of several runs that are counted as one (``since``), each has standard errors of its own, and these are
    added up: an upper bound, with a note. Slices with different ids prove independence within a run only:
    the next run may measure the same test samples in another order. Over several runs, there is no MERIT.

    The sums are those of one training, and ``training`` says how far contributions scatter over its rounds.

    PHI does not follow from reports: ``rounds`` are then its :class:`~fedmerit.Scores`, one per round with a
    sum. If all of them have blocks of the same sizes, the standard errors come from the sums of each block.
    That is right if every round has the same test samples in the same blocks, and also if every round has
    samples of its own. Otherwise the standard errors of the rounds are added up, with a note.

    Args:
        rounds: reports in the order of the rounds; for PHI, scores.
        score: one of ALPHA, LOO, IOI, FP, EE, COS, MERIT, PHI.
        missing: what a round without a report counts: nothing (``"zero"``) or the client's own mean over
            the rounds it did report (``"own-mean"``).
        warmup: rounds at the start that are not counted.

    Returns:
        Scores of every client that reported in a counted round; ``coverage`` is R_i / R. Notes name clients
        that were summed but never reported, two names that may be one, and rounds that do not join up.

    Raises:
        ReportError: among others, if nobody reported in a counted round. The message names the round; leave
            it out, as a ledger does, because it counts for nobody.
        UndefinedScore: a round does not have this score; a silent client leaves FP and EE undefined.

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
        return _of_scores(rounds, score, missing, warmup)
    if isinstance(rounds, Reports) or not isinstance(rounds, Iterable):
        raise ReportError(f"accumulate takes a list of Reports, got {type(rounds).__name__}")
    given: list[Reports] = list(rounds)  # type: ignore[arg-type]  # checked next
    counted = _counted(given, warmup)
    if score not in SUMMABLE:
        raise InputError(f"score must be one of {', '.join((*SUMMABLE, 'PHI'))}, got {score!r}")

    clients = tuple(dict.fromkeys(name for reports in counted for name in reports.clients))
    index = {name: i for i, name in enumerate(clients)}
    per_round = "IOI" if score == "MERIT" else score
    terms: list[list[float]] = [[] for _ in clients]
    status: Status = "ok"
    notes: list[str] = [*_apart(counted), *_alike(clients)]
    if is_whole(counted[0].utility):
        notes.append(Note("whole-sum", utility=counted[0].utility))
    by_round: list[Mapping[str, float]] = []
    for reports in counted:
        scores = score_of(reports, per_round)
        by_round.append(scores.as_dict())
        notes += scores.notes
        status = max(status, scores.status, key=_WORST.index)
        for name, value in zip(reports.clients, scores.values.tolist(), strict=True):
            terms[index[name]].append(value)

    reported = np.array([len(own) for own in terms], dtype=np.float64)
    factor = len(counted) / reported if missing == "own-mean" else np.ones(len(clients))
    total = np.array([math.fsum(own) for own in terms]) * factor
    stderr = _of_runs(counted, clients, score, whole=warmup == 0, notes=notes)
    if score == "MERIT":
        total = total + _last_solo(counted, clients)
    for name, seen in zip(clients, reported, strict=True):
        if seen < len(counted):
            code = "partly-zero" if missing == "zero" else "partly-own-mean"
            notes.append(Note(code, client=name, seen=int(seen), rounds=len(counted)))
    for name in dict.fromkeys(name for reports in counted for name in reports.silent):
        if name not in index:
            notes.append(Note("never-reported", client=name))
    sketched = _sketched(counted, index, factor, notes) if score == "ALPHA" else {}
    return Scores(
        score=score,
        clients=clients,
        values=total,
        raw=total,
        gain=math.fsum(reports.gain for reports in counted),
        status=status,
        stderr=None if stderr is None else stderr * factor,
        rounds=len(counted),
        coverage=reported / len(counted),
        notes=tuple(notes),
        training=training_of(by_round),
        **sketched,
    )


def running_sums(
    rounds: Sequence[Reports | Scores], places: Collection[int], *, missing: Missing = "zero"
) -> list[dict[str, float]]:
    """Return the sums after so many rounds, by client: the values of `accumulate`, for all places at once.

    Args:
        rounds: reports, of which ALPHA is summed, or the scores of single rounds.
        places: numbers of rounds, in ascending order.
        missing: as in `accumulate`.
    """
    terms: dict[str, list[float]] = defaultdict(list)
    found = []
    scored = (score_of(one, "ALPHA") if isinstance(one, Reports) else one for one in rounds)
    for count, scores in enumerate(scored, start=1):
        for name, value in scores.as_dict().items():
            terms[name].append(value)
        if count in places:
            times = {name: count / len(own) if missing == "own-mean" else 1.0 for name, own in terms.items()}
            found.append({name: math.fsum(own) * times[name] for name, own in terms.items()})
    return found


def _sketched(
    rounds: Sequence[Reports], index: Mapping[str, int], factor: Vector, notes: list[str]
) -> dict[str, Any]:
    """Return the sum of the sketches and its freedom, the least of a round; nothing unless all rounds fit.

    Sketches of several runs do not add up: the next run may measure the same samples with other signs.
    """
    there = [reports for reports in rounds if reports.sketch is not None]
    widths = {reports.sketch.shape[1] for reports in there if reports.sketch is not None}
    if not there or len({reports.since for reports in rounds}) > 1:
        return {}
    if len(there) < len(rounds) or len(widths) > 1:
        notes.append(Note("bound-pairs", rounds=len(rounds) - len(there)))
        return {}
    total = np.zeros((widths.pop(), len(index)))
    for reports in there:
        assert reports.sketch is not None
        total[:, [index[name] for name in reports.clients]] += reports.sketch.T
    return {"sketch": total * factor, "freedom": min(reports.freedom or 1 for reports in there)}


def _of_scores(rounds: Any, score: str, missing: Missing, warmup: int) -> Scores:
    """Return the sum of a score that was computed round by round."""
    given = list(rounds) if isinstance(rounds, Iterable) else [rounds]
    for one in given:
        if not isinstance(one, Scores) or one.score != score:
            got = one.score if isinstance(one, Scores) else type(one).__name__
            raise ReportError(f"accumulate takes a list of Scores for {score}, got {got}")
    _check_warmup(warmup, len(given))
    counted: list[Scores] = given[warmup:]
    clients = tuple(dict.fromkeys(name for one in counted for name in one.clients))
    index = {name: i for i, name in enumerate(clients)}
    terms: list[list[float]] = [[] for _ in clients]
    notes: list[str] = [*(note for one in counted for note in one.notes), *_alike(clients)]
    for one in counted:
        for name, value in one.as_dict().items():
            terms[index[name]].append(value)
    seen = np.array([len(own) for own in terms], dtype=np.float64)
    factor = len(counted) / seen if missing == "own-mean" else np.ones(len(clients))
    for name, times in zip(clients, seen.tolist(), strict=True):
        if times < len(counted):
            code = "summed-zero" if missing == "zero" else "summed-own-mean"
            notes.append(Note(code, client=name, seen=int(times), rounds=len(counted)))
    total = np.array([math.fsum(own) for own in terms]) * factor
    blocks, sizes = _blocks(counted, index, factor)
    summed = Scores(
        score=score, clients=clients, values=total, raw=total, gain=math.fsum(one.gain for one in counted),
        rounds=len(counted), coverage=seen / len(counted), blocks=blocks, sizes=sizes,
        training=training_of([one.as_dict() for one in counted]),
    )  # fmt: skip
    stderr: Vector | None = None
    if (covariance := summed.covariance) is not None:
        stderr = np.sqrt(np.diag(covariance))
    elif all(one.stderr is not None for one in counted):
        stderr = np.zeros(len(clients))
        for one in counted:
            assert one.stderr is not None
            stderr[[index[name] for name in one.clients]] += one.stderr
        stderr *= factor
        notes.append(Note("bound-blocks"))
    return replace(summed, stderr=stderr, notes=tuple(notes))


def _blocks(
    rounds: Sequence[Scores], index: Mapping[str, int], factor: Vector
) -> tuple[npt.NDArray[np.float64] | None, Vector | None]:
    """Return the sums in each block and the blocks' sizes; None, None unless all rounds have these sizes."""
    sizes = rounds[0].sizes
    total = np.zeros((0 if sizes is None else len(sizes), len(index)))
    for one in rounds:
        if one.blocks is None or one.sizes is None or sizes is None or not np.array_equal(one.sizes, sizes):
            return None, None
        total[:, [index[name] for name in one.clients]] += one.blocks
    return total * factor, sizes


def _alike(clients: Sequence[str]) -> Iterator[Note]:
    """Yield a note on the first two names that may be one."""
    if alike := two_spellings(clients):
        one, other = alike
        code = "composed-alike" if look_alike(one, other) else "spelled-alike"
        yield Note(code, client=one, other=other)


def _check_warmup(warmup: int, rounds: int) -> None:
    if isinstance(warmup, bool) or not isinstance(warmup, int | np.integer) or warmup < 0:
        raise InputError(f"warmup must be 0 or more rounds, a whole number, got {warmup!r:.100}")
    if rounds <= warmup:
        raise ReportError(f"nothing to accumulate: {rounds} rounds, and the first {warmup} are warm-up")


def _counted(rounds: Sequence[Reports], warmup: int) -> Sequence[Reports]:
    for reports in rounds:
        if not isinstance(reports, Reports):
            raise ReportError(f"accumulate takes a list of Reports, got {type(reports).__name__}")
    _check_warmup(warmup, len(rounds))
    utilities = {reports.utility for reports in rounds}
    if len(utilities) > 1:
        names = ", ".join(sorted(str(name) for name in utilities))
        raise ReportError(f"rounds of different utilities cannot be added: {names}")
    numbers = [reports.round for reports in rounds if reports.round is not None]
    for earlier, later in pairwise(numbers):
        if later <= earlier:
            raise ReportError(f"rounds must come in order, each once: {later} follows {earlier}")
    for place, reports in enumerate(rounds[warmup:], start=warmup + 1):
        if not reports.n:
            raise ReportError(
                f"expected at least 1 report, but all {len(reports.silent)} clients are silent; leave the "
                "round out, it counts for nobody",
                round=number_of(reports, place),
            )
    return rounds[warmup:]


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

    On the same test samples, the later round must begin with the utility that the earlier one ended with.
    Otherwise, their numbers must be consecutive.
    """
    if _on_one_slice(earlier, later):
        largest = max(abs(later.empty), abs(earlier.grand))
        return abs(later.empty - earlier.grand) <= 1e-6 * largest
    return number_of(later, place + 1) <= number_of(earlier, place) + 1


def _apart(rounds: Sequence[Reports]) -> Iterator[Note]:
    """Yield notes on rounds that do not join up: what changed between them is in nobody's score."""
    gone, jumps = [], []
    for place, (earlier, later) in enumerate(pairwise(rounds), start=1):
        if join_up(earlier, later, place):
            continue
        one, next_ = number_of(earlier, place), number_of(later, place + 1)
        if _on_one_slice(earlier, later):
            ends, begins = earlier.grand, later.empty
            jumps.append(Note("jump-between", earlier=one, later=next_, ends=ends, begins=begins))
        if next_ > one + 1:
            gone.append(Note("gap-between", earlier=one, later=next_))
    if gone:
        yield Note("gap", gaps=gone)
    if jumps:
        yield Note("jump", jumps=jumps)
    if unnamed := _jumps_unnamed(rounds):
        yield Note("jump-unnamed", jumps=unnamed)


def _jumps_unnamed(rounds: Sequence[Reports]) -> list[Note]:
    """Return notes on rounds that do not begin where the one before ended, if none names its slice.

    They are on the same test samples if at least half of them begin where the one before ended.
    """
    if any(one.slice is not None or one.round is None for one in rounds):
        return []
    found, joined = [], 0
    for place, (earlier, later) in enumerate(pairwise(rounds), start=1):
        ends, begins = earlier.grand, later.empty
        if abs(begins - ends) <= 1e-6 * max(abs(begins), abs(ends)):
            joined += 1
        elif join_up(earlier, later, place):
            one, next_ = number_of(earlier, place), number_of(later, place + 1)
            found.append(Note("jump-between", earlier=one, later=next_, ends=ends, begins=begins))
    return found if joined >= max(2, len(found)) else []


def _last_solo(rounds: Sequence[Reports], clients: Sequence[str]) -> Vector:
    last: dict[str, float] = {}
    if len(runs := {reports.since for reports in rounds}) > 1:
        raise UndefinedScore(
            f"MERIT needs SOLO from one first model, but these rounds are from {len(runs)} runs, each with "
            "its own"
        )
    for reports in rounds:
        if reports.solo is not None:
            last.update(score_of(reports, "SOLO").as_dict())
    without = [name for name in clients if name not in last]
    if without:
        raise UndefinedScore(f"MERIT needs SOLO, which client {without[0]!r} never reported")
    return np.array([last[name] for name in clients])


def _of_runs(
    rounds: Sequence[Reports], clients: Sequence[str], score: str, *, whole: bool, notes: list[str]
) -> Vector | None:
    """Return the standard errors of all runs, added up; None if a report carries none."""
    runs = [list(own) for _, own in groupby(rounds, key=lambda one: one.since)]
    found, said = np.zeros(len(clients)), list[str]()
    for own in runs:
        begins = own[0].round in (None, 1) if own[0].since is None else own[0].round == own[0].since
        errors = _standard_errors(own, clients, score, whole=whole and begins, notes=said)
        if errors is None:
            return None
        found += errors
    notes += dict.fromkeys([*said, *([Note("bound-runs")] if len(runs) > 1 else [])])
    return found


def _standard_errors(
    rounds: Sequence[Reports], clients: Sequence[str], score: str, *, whole: bool, notes: list[str]
) -> Vector | None:
    """Return the standard errors of the sum over rounds, or None if a report carries none."""
    field = _ERRORS.get(score)
    if field is None or any(getattr(reports, field) is None for reports in rounds):
        return None
    # per client and slice: the standard errors of its rounds, and the last running total it reported
    parts: list[dict[str | None, list[float]]] = [defaultdict(list) for _ in clients]
    totals: list[dict[str | None, float]] = [{} for _ in clients]
    index = {name: i for i, name in enumerate(clients)}
    doubted = set() if whole else set(clients)  # clients whose running totals may cover other rounds
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
    found = []
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
        found.append(unknown + math.sqrt(square))
    if bounded:
        unsaid = any(reports.slice is None for reports in rounds)
        notes.append(Note("bound-unnamed" if unsaid else "bound-shared"))
    return np.array(found)


def _follows(earlier: Reports, later: Reports) -> bool:
    """Return whether nothing can have been measured between two rounds.

    Either their numbers are consecutive, or the rounds between them were aborted: the later round begins
    with the utility that the earlier one ended with, on the same samples and to the last bit.
    """
    if earlier.round is None or later.round is None:
        return earlier.round is later.round
    unchanged = _on_one_slice(earlier, later) and earlier.grand == later.empty
    return later.round == earlier.round + 1 or unchanged


def _on_one_slice(earlier: ScoredRound, later: ScoredRound) -> bool:
    return earlier.slice is not None and earlier.slice == later.slice
