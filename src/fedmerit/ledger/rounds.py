"""The rounds of a run: what the server states after each of them, and the fold of their records.

A run begins with ``run`` (config, keys) and ``pool`` (the test pool's commitment). A round has the records
``schedule``, ``masked`` (hashes of the masked inputs), one ``blame`` for each member who broke the protocol,
``outcome`` (the sum and the slice revealed after it), one ``report`` per member, and ``round``, which closes
it; a round without a sum has no outcome or reports. After each round the server states the scores
(`after_round`), which always come from these records, never from the memory of a process. A run ends with
``end``, and with ``seen`` by every member who signs the head after it (`run`).

With ``scoring.visibility = "all"`` every member may read every record, and after each round the server states
all cumulative scores in one record (``scores``). With ``"coordinator"`` it states ``totals`` that all members
may read, and each member's score in a salted record of its own (``score``). A member's copy then holds only
the hash of the body of another member's report, score or payout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from msgspec import UNSET

from fedmerit.config import Config
from fedmerit.errors import LedgerError
from fedmerit.identity import exact, new_salt, number
from fedmerit.ledger import kinds
from fedmerit.ledger.chain import Record, reading
from fedmerit.ledger.kinds import compare, numbers, setting_of
from fedmerit.notes import Note
from fedmerit.protocol.outcome import Report, Round, included_hash, scored
from fedmerit.protocol.pool import least_shown
from fedmerit.protocol.terms import EMBEDDED, from_past
from fedmerit.scoring.accumulate import Missing, accumulate
from fedmerit.scoring.sampling import belongs
from fedmerit.scoring.scores import score_of
from fedmerit.scoring.types import Vector
from fedmerit.secagg.setting import LEAST_IN_SUM
from fedmerit.settings import Scoring

# ------------------------------------------------------------------------------ stated after each round


class RunningAlpha:
    """Alpha of one utility, summed over the rounds added so far: what `accumulate` gives for all of them.

    ``heard`` also counts rounds on which a copy withholds all reports.
    """

    def __init__(self, utility: str, missing: Missing) -> None:
        self.utility, self.missing = utility, missing
        self.heard = 0
        self._gains: list[float] = []
        self._terms: dict[str, list[float]] = {}

    def add(self, closed: Round) -> None:
        """Add the next round."""
        reports = closed.to_reports(self.utility)
        self.heard += _is_heard(closed)
        if reports is not None:
            self._gains.append(reports.gain)
            for name, value in score_of(reports, "ALPHA").as_dict().items():
                self._terms.setdefault(name, []).append(value)

    @property
    def gain(self) -> float:
        """The gain of all rounds that have reports."""
        return math.fsum(self._gains)

    def values(self) -> dict[str, float]:
        """Return the sum of everybody who has reported."""
        return {name: self._sum(terms, len(self._gains)) for name, terms in self._terms.items()}

    def of(self, member: str) -> float | None:
        """Return a member's sum as it follows from its own reports alone; None if it has none."""
        return self._sum(self._terms[member], self.heard) if member in self._terms else None

    def _sum(self, terms: Sequence[float], rounds: int) -> float:
        return math.fsum(terms) * (rounds / len(terms) if self.missing == "own-mean" else 1.0)


Running = Mapping[str, RunningAlpha]
"""Utility -> its sums over the same rounds."""


def running(rounds: Iterable[Round], config: Config) -> Running:
    """Return the sums over these rounds, by utility; more rounds can be added."""
    sums = {name: RunningAlpha(name, config.payment.missing) for name in config.scoring.utilities}
    for closed in rounds:
        for alpha in sums.values():
            alpha.add(closed)
    return sums


def stated(sums: Running) -> dict[str, dict[str, str]]:
    """Return cumulative alpha per utility and member, as the server states it."""
    by_utility = {utility: alpha.values() for utility, alpha in sums.items()}
    return {
        utility: {name: exact(value) for name, value in values.items()}
        for utility, values in by_utility.items()
        if values
    }


def after_round(rounds: Sequence[Round], config: Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kind and body of each record that the server writes after the last of these rounds."""
    last, sums = rounds[-1], running(rounds, config)
    by_utility = stated(sums)
    if config.scoring.visibility == "all":
        yield "scores", {"round": last.number, "cumulative_alpha": by_utility}
        return
    yield "totals", {"round": last.number, "utilities": totals(last, sums)}
    for name in dict.fromkeys(name for values in by_utility.values() for name in values):
        own = {utility: values[name] for utility, values in by_utility.items()}
        yield "score", {"round": last.number, "member": name, "salt": new_salt(), "cumulative_alpha": own}


def totals(last: Round, sums: Running) -> dict[str, dict[str, Any]]:
    r"""Return what all members may know, per utility: about the last round, and about all rounds so far.

    .. math:: N, \quad D = v(M) - v(M_0), \quad v(M), \quad A = \sum_i \alpha_i, \quad
        A^+ = \sum_i \max(\alpha_i, 0), \quad T = \sum_i 2 (D - \alpha_i)
    """
    by_utility = {}
    for utility, alpha in sums.items():
        values = np.array([*alpha.values().values()])
        if not values.size:
            continue
        parts: dict[str, Any] = {"summed": {"n": values.size, "gain": exact(alpha.gain)} | _sums(values)}
        if (reports := last.to_reports(utility)) is not None:
            own = score_of(reports, "ALPHA").raw
            t = math.fsum(2 * (reports.gain - value) for value in own.tolist())
            facts = {"n": reports.n, "gain": exact(reports.gain), "grand": exact(reports.grand)}
            parts["round"] = facts | _sums(own) | {"t": exact(t)}
        by_utility[utility] = parts
    return by_utility


def _sums(own: Vector) -> dict[str, str]:
    return {"alpha": exact(math.fsum(own)), "alpha_plus": exact(math.fsum(np.maximum(own, 0.0)))}


def sees(member: str) -> Callable[[Record], bool]:
    """Return a function that tells which bodies a member may see if only the coordinator sees all."""

    def visible(record: Record) -> bool:
        withheld = record.kind in kinds.KINDS and kinds.KINDS[record.kind].withheld
        return not withheld or record.body.get("member", record.author) == member

    return visible


def _is_heard(closed: Round) -> bool:
    """Return whether members reported on a round, also if a copy withholds what."""
    return not closed.aborted and bool(closed.heard)


def own_total(
    member: str, rounds: Sequence[Round], utility: str, *, score: str = "ALPHA", missing: Missing = "zero"
) -> float | None:
    """Return a member's score summed over rounds, from its own reports alone; None if it has none."""
    heard = [closed for closed in rounds if _is_heard(closed)]
    own = scored((closed for closed in heard if member in closed.reports), utility)
    if not own:
        return None
    factor = len(heard) / len(own) if missing == "own-mean" else 1.0
    total = accumulate(own, score=score).as_dict()[member]
    if score == "MERIT":  # only the part that is summed over rounds is scaled
        summed = accumulate(own, score="IOI").as_dict()[member]
        return summed * factor + (total - summed)
    return total * factor


def check_totals(recorded: Mapping[str, Any], closed: Round, scoring: Scoring) -> None:
    """Raise unless totals fit their round and each other, which is all that a member can check."""
    for part in (part for parts in recorded.values() for part in parts.values()):
        if any(
            type(value) is not int if key == "n" else number(value) is None for key, value in part.items()
        ):
            raise LedgerError("totals: expected a whole number n, and numbers")
    for utility in scoring.utilities if closed.heard and scoring.method != "settled" else ():
        facts, measured = numbers(recorded[utility]["round"]), numbers(closed.body["utilities"][utility])
        n, gain = len(closed.heard), measured["grand"] - measured["empty"]
        again = {"n": n, "gain": gain, "grand": measured["grand"]}
        compare({key: value for key, value in facts.items() if key in again}, again, utility)
        scale = n * abs(gain) + abs(facts["alpha"])
        due = 2 * (n * gain - facts["alpha"])
        if not math.isclose(facts["t"], due, rel_tol=1e-9, abs_tol=1e-9 * scale):
            raise LedgerError(f"{utility}.t: not 2 (N gain - sum of alpha)")


def medians(reports: Iterable[Report]) -> dict[str, dict[str, str]]:
    """Return v(M0) and v(M) per utility as medians over the members, for a server that cannot evaluate."""
    listed = list(reports)
    by_utility: dict[str, dict[str, str]] = {}
    for utility in listed[0].measured:
        measured = [report.measured[utility] for report in listed]
        empty = [own.empty for own in measured if own.empty is not None]
        grand = [own.grand for own in measured if own.grand is not None]
        if not len(empty) == len(grand) == len(measured):
            raise LedgerError(f"a report does not state v(M0) and v(M) of {utility}")
        by_utility[utility] = {"empty": exact(median(empty)), "grand": exact(median(grand))}
    return by_utility


FAR = 1e-2
"""A member contradicts the server if they differ by more than this (relative to 1 or to the value, whichever
is larger). Other processors, TF32 or another order of additions make less of a difference, except for a few
samples of a small test set: see `check_server`."""
FLIPS = 3
"""How many test samples may be classified differently on other processors."""
LEAST_AGAINST = 3
"""How many members must contradict the server before the ledger is refused."""


def check_server(closed: Round, samples: int) -> None:
    """Raise LedgerError if the server evaluated a round and most members of its sum contradict it.

    A member contradicts the server if they differ by more than ``FAR``, or ``FLIPS`` of the round's test
    samples if that is more. Reports that a copy withholds count as agreeing, since its reader cannot know.
    """
    if closed.body.get("evaluated") == "members":
        return
    against = closed.differences(max(FAR, FLIPS / samples))
    if len(against) >= LEAST_AGAINST and 2 * len(against) > len(closed.included):
        name, how = next(iter(against.items()))
        raise LedgerError(
            f"round {closed.number}: {len(against)} of {len(closed.included)} members contradict the "
            f"server's v(M0) or v(M): {name} {how}"
        )


def aborted(rounds: Sequence[Round]) -> tuple[int, ...]:
    """Return the numbers of the rounds that were aborted."""
    return tuple(closed.number for closed in rounds if closed.aborted)


def unreported(rounds: Sequence[Round]) -> tuple[int, ...]:
    """Return the numbers of the rounds that were summed, but that no member reported on."""
    return tuple(closed.number for closed in rounds if not closed.aborted and not _is_heard(closed))


def in_words(aborted_: Sequence[int], unreported_: Sequence[int]) -> Iterator[Note]:
    """Yield remarks on which rounds have no score, and what that means.

    >>> print(*in_words([4], []))
    round 4 was aborted: the model stayed as it was
    """
    if aborted_:
        yield Note("aborted", rounds=tuple(aborted_))
    if unreported_:
        yield Note("unreported", rounds=tuple(unreported_))


# ---------------------------------------------------------------------------------- folded from records


@dataclass
class Rounds:
    """The rounds so far, and the one that is open; ``reader`` is that of a copy that withholds records."""

    first: kinds.First
    pool: Mapping[str, Any]
    config: Config
    reader: str | None = None
    closed: list[Round] = field(default_factory=list)
    open: Round | None = None
    settling: bool = False  # whether a settlement has begun, after which there is no round
    held_out: dict[str, kinds.HeldOut] = field(default_factory=dict)  # what judges of a panel committed to
    _outcome: Record | None = None  # of the round that is open
    _analysed: int = 0  # the last round with an analysis
    _blamed: dict[str, tuple[int, str]] = field(default_factory=dict)  # member -> round, why
    _weights: Mapping[str, float] | None = None
    _slices: list[str] = field(default_factory=list)
    _solo: dict[tuple[str, str], str] = field(default_factory=dict)  # v of the first model, by slice and name
    _stated: list[Record] | None = None  # what the server stated after the last round, until the next one
    _heard: set[str] = field(default_factory=set)  # whoever has reported on what is scored by reports

    @cached_property
    def sums(self) -> Running:
        """The running sums of what was reported, by utility."""
        return running((), self.config)

    @property
    def _rehearsal(self) -> bool:
        return self.first.engine == EMBEDDED

    # ------------------------------------------------------------------------------------------- its records

    def schedule(self, record: Record, body: kinds.Schedule, last: str) -> None:
        """Begin a round; ``last`` is the head before it."""
        self.check_stated()
        at = len(self.closed) + 1
        if self.open is not None:
            raise LedgerError(f"round {self.open.number} before it is not closed")
        if self.settling:
            raise LedgerError("begins a round after members signed the last one, or the pool was opened")
        if body.round != at:
            raise LedgerError(f"expected round {at}, got round {body.round}")
        if at > self.config.training.rounds:
            raise LedgerError(f"begins round {at} of {self.config.training.rounds}")
        _check_named(body.members, self.config.clients, "schedules")
        for name in body.members:
            if name in self._blamed:
                raise LedgerError(f"schedules {name}, who was blamed in round {self._blamed[name][0]}")
        self._weights = self._public_weights(body.weights, body.members)
        self.open = Round(at, body.members, head=last)

    def _public_weights(
        self, recorded: Mapping[str, str] | None, scheduled: Sequence[str]
    ) -> dict[str, float] | None:
        weighing = self.config.weighing
        if (recorded is None) != (weighing in ("uniform", "secret")):
            states = "states no weights" if recorded is None else "states weights"
            raise LedgerError(f"{states}, but the weights of this run are {weighing}")
        if recorded is None:
            return None
        weights: dict[str, float] = numbers(recorded)
        if weighing == "roster":
            expected = {name: float(self.config.roster_weights[name]) for name in scheduled}
        else:
            everybody = from_past(self.closed, self.config)
            expected = {name: everybody[name] for name in scheduled}
        compare(weights, expected, "weights")
        return weights

    def _in_round(self, number_: int) -> Round:
        if self.open is None or number_ != self.open.number:
            raise LedgerError("outside its round")
        return self.open

    def masked(self, record: Record, body: kinds.MaskedInputs) -> None:
        """Take the hashes of the masked inputs of a round."""
        round_ = self._in_round(body.round)
        if round_.inputs is not None:
            raise LedgerError("outside its round, or the second of its round")
        if unknown := sorted({*body.inputs} - {*round_.scheduled}):
            raise LedgerError(f"has a masked input of {unknown[0]!r:.60}, who was not scheduled")
        if body.inputs and not self.first.keys:
            raise LedgerError("has masked inputs in a run without masks")
        round_.inputs = body.inputs

    def blame(self, record: Record, body: kinds.Blamed) -> None:
        """Judge the evidence anew; raise LedgerError unless it proves just what the record states."""
        from fedmerit.secagg.masks import judge

        round_ = self._in_round(body.round)
        inputs = round_.inputs
        if inputs is None or round_.outcome is not None:
            raise LedgerError("outside its round, or not between masked inputs and outcome")
        if not self.first.keys:
            raise LedgerError("blames a member in a run without masks")
        blame = judge(setting_of(self.first, self.pool, self.config, round_), body.evidence)
        if (body.member, body.by, body.why) != (proved := (blame.member, blame.by, blame.why)):
            raise LedgerError(f"states another blame than its evidence proves: {', '.join(map(str, proved))}")
        if blame.member in self._blamed:
            raise LedgerError(f"blames {blame.member} a second time")
        if blame.why == "complaint" and blame.member in inputs:
            raise LedgerError(f"has a masked input of {blame.member}, whose complaint was false")
        if blame.why == "share" and blame.by not in inputs:
            raise LedgerError(f"has no masked input of {blame.by}, who complained")
        self._blamed[blame.member] = round_.number, blame.why
        round_.blamed += (blame.member,)

    @property
    def _before(self) -> str | None:
        """The model that a round must start from; None if the server may have moved the last one."""
        if not self.closed:
            return self.first.m0
        return None if self.first.moves else str(self.closed[-1].body["m"])

    def outcome(self, record: Record, body: kinds.OutcomeBody) -> None:
        """Take the sum of a round; its total weight is checked once it is known who is in the sum."""
        round_ = self._in_round(body.round)
        if round_.outcome is not None:
            raise LedgerError("outside its round, or the second of its round")
        if self._before not in (None, body.m0):
            raise LedgerError("does not start from the last recorded model")
        if body.head != round_.head:
            raise LedgerError("the head that its members saw is not the head before its round")
        number(body.weight)
        if (body.slice is not UNSET) != self.config.reports:
            raise LedgerError("names a test slice where nothing is reported, or none where members report")
        if isinstance(body.slice, str):
            self._slice(body.slice)
        self._outcome = record
        round_.outcome = {key: value for key, value in record.body.items() if key != "round"}

    def _slice(self, slice_: str) -> None:
        reveal = self.config.data.test_reveal
        if reveal == "fixed" and self._slices and slice_ != self._slices[0]:
            raise LedgerError("uses another test slice than before, but the run has one for all rounds")
        if reveal == "per-round" and slice_ in self._slices:
            raise LedgerError("uses the test slice of an earlier round, but each round has a fresh one")
        self._slices.append(slice_)

    def _check_weight(self, total: float, included: Sequence[str]) -> None:
        n = len(included)
        least, most = float(n), float(n)
        if self.config.weighing == "secret":
            most = n * float(self.config.training.weight_cap)
        elif self._weights is not None:
            least = most = math.fsum(self._weights.get(name, math.nan) for name in included)
        if not least <= total <= most or (self.config.weighing == "secret" and not total.is_integer()):
            raise LedgerError(f"states a total weight of {total:g}, which {n} members cannot have")

    def report(self, record: Record, body: kinds.Reported | None) -> None:
        """Take a report; None if a copy withholds it."""
        if self.open is None:
            raise LedgerError("outside its round")
        if record.author in self.open.heard:
            raise LedgerError("its author has already reported on this round")
        if body is None:
            self.open.withheld += (record.author,)
            return
        round_ = self._in_round(body.round)
        report = Report.from_body(record.author, record.body, run=self.first.run)
        if report.bound_to != round_.outcome:
            raise LedgerError("not computed on the outcome of its round")
        round_.reports[record.author] = report

    def analysis(self, record: Record, body: kinds.Analysed) -> None:
        if not self.config.analysis:
            raise LedgerError("the run analysed no plain updates")
        if body.round != len(self.closed) + 1:
            raise LedgerError(f"expected the analysis of round {len(self.closed) + 1}, got {body.round}")
        if self._analysed == body.round:
            raise LedgerError("is the second of its round")
        self._analysed = body.round

    def round(self, record: Record, body: kinds.Closed) -> None:
        """Close a round, and add it to the sums."""
        round_ = self.open
        if round_ is None or body.round != round_.number:
            raise LedgerError(f"expected the end of round {len(self.closed) + 1}")
        round_.body, round_.aborted = record.body, body.aborted
        round_.included, round_.declined, round_.silent = body.included, body.declined, body.silent
        self._check_members(round_, body)
        self._check_models(round_, body)
        self._check_values(round_, body)
        if (body.members_checkpoint is not UNSET) != self._rehearsal:
            raise LedgerError("a checkpoint of the members: expected in a rehearsal, and only there")
        check_server(round_, max(1, least_shown(self.pool)))
        if round_.outcome is not None and self._outcome is not None:  # only now it is known who is in the sum
            with reading(self._outcome):
                self._check_weight(number(round_.outcome["weight"]), round_.included)
        self.closed.append(round_)
        self.open, self._stated = None, []
        for alpha in self.sums.values():
            alpha.add(round_)
        if self.config.scoring.method != "settled":  # there, reports acknowledge a round and give no score
            self._heard |= {*round_.heard}

    def _check_members(self, round_: Round, body: kinds.Closed) -> None:
        outcome, inputs = round_.outcome, round_.inputs
        if (outcome is None) != bool(body.aborted) or (body.aborted and body.included):
            raise LedgerError("aborted with an outcome or members in the sum, or neither aborted nor summed")
        if outcome and outcome["included"] != included_hash(body.included):
            raise LedgerError("the members it includes are not those that its members were told")
        _check_named(body.included, round_.scheduled, "includes")
        heard = {*round_.heard}
        if heard | set(body.silent) != set(body.included) or heard & set(body.silent):
            raise LedgerError("the members it includes are not exactly those who reported or were silent")
        _check_named(body.silent, body.included, "did not hear from")
        if inputs is None or (self.first.keys and set(body.included) - set(inputs)):
            raise LedgerError("includes a member whose masked input is not recorded")
        least = max(LEAST_IN_SUM, self.config.threshold)
        if outcome and len(body.included) < least:
            raise LedgerError(f"sums {len(body.included)} members, but at least {least} are needed")
        if outcome and (round_.number, "secret") in self._blamed.values():
            raise LedgerError("has a sum although a member shared something other than it committed to")
        if len({*body.declined} & {*round_.scheduled} - heard) != len(body.declined):
            raise LedgerError("was declined by members who reported, were not scheduled or are listed twice")

    def _check_models(self, round_: Round, body: kinds.Closed) -> None:
        outcome = round_.outcome
        if outcome is None:
            if self._before not in (None, body.m):
                raise LedgerError("aborted, but its model is not the last recorded one")
        elif (body.m, body.slice) != (outcome["m"], outcome.get("slice")):
            raise LedgerError("its model or test slice is not the one in the outcome of its round")
        analysed = self._analysed == round_.number
        if self.config.values_coalitions(round_.number) and analysed != (outcome is not None):
            raise LedgerError("expected an analysis if the round has a sum, and none otherwise")

    def _check_values(self, round_: Round, body: kinds.Closed) -> None:
        by_members = body.evaluated == "members"
        if by_members and not round_.withheld and body.utilities != medians(round_.reports.values()):
            raise LedgerError("v(M0) or v(M) is not the median of what its members measured")
        if body.evaluated == "server" and self.first.terms["evaluates"] == "members" and body.utilities:
            raise LedgerError("evaluated by the server, but the terms say that members evaluate")
        for name, report in round_.reports.items():
            if set(report.measured) != set(body.utilities):
                raise LedgerError(f"the report of {name} is about other utilities")
        for utility in body.utilities:
            round_.to_reports(utility)  # raises here if the reports cannot be scored
        self._check_utilities(round_, body)
        self._check_errors(round_)

    def _check_utilities(self, round_: Round, body: kinds.Closed) -> None:
        scoring, utilities = self.config.scoring, body.utilities
        if (body.aborted or not self.config.reports) and (utilities or body.slice is not None):
            raise LedgerError("states utilities or a test slice: it was aborted, or nothing is reported")
        if not self.config.reports:
            return
        if set(utilities) != set(scoring.utilities) and (utilities or round_.heard):
            expected = ", ".join(scoring.utilities)
            raise LedgerError(f"expected the utilities {expected}, got {', '.join(utilities)[:100]}")
        keys = {"empty", "grand", "first"} if scoring.solo and self._rehearsal else {"empty", "grand"}
        for name, values in utilities.items():
            if set(values) != keys or not _finite(values.values()):
                raise LedgerError(f"expected finite numbers {', '.join(sorted(keys))} of {name}")
            if "first" in keys and round_.outcome:
                unmoved = round_.outcome["m0"] == self.first.m0
                first = values["empty"] if unmoved else values["first"]
                if values["first"] != self._solo.setdefault((self._slices[-1], name), first):
                    raise LedgerError(
                        f"states a different {name} of the first model than an earlier round on this slice"
                    )

    def _check_errors(self, round_: Round) -> None:
        most = self.pool["size"]
        for name, report in round_.reports.items():
            for utility, own in report.measured.items():
                first = next(iter(round_.reports.values())).measured[utility]
                if own.sketch is None or own.freedom is None:
                    raise LedgerError(f"the report of {name} has no sketch of its error")
                if own.freedom != first.freedom or not 1 <= own.freedom <= most:
                    raise LedgerError(
                        f"the report of {name} states {own.freedom} degrees of freedom, others "
                        f"{first.freedom}, on at most {most} samples"
                    )
                if not belongs(own.sketch, own.se_alpha):
                    raise LedgerError(
                        f"the report of {name} has a sketch that is not that of an error of {own.se_alpha:g}"
                    )

    def end(self, record: Record, body: kinds.End) -> None:
        if body.rounds != len(self.closed):
            raise LedgerError(f"ends after {body.rounds} rounds, but {len(self.closed)} were closed")
        if self.open is not None:
            raise LedgerError(f"ends while round {self.open.number} is open")
        last = self.closed[-1].body["m"] if self.closed else self.first.m0
        if body.model != last and not self.first.moves:
            raise LedgerError("does not end with the model of the last round")

    # ------------------------------------------------------------------------------- stated after the rounds

    def states(self, record: Record, body: Any) -> None:
        """Recompute what the server states after the last round; ``body`` is None if a copy withholds it."""
        if self._stated is None or (body is not None and body.round != len(self.closed)):
            raise LedgerError(f"expected what the server states after round {len(self.closed)}")
        self._stated.append(record)
        round_, scoring = self.closed[-1], self.config.scoring
        if isinstance(body, kinds.Totals):
            if self.reader is None:
                compare(numbers(body.utilities), numbers(totals(round_, self.sums)), "utilities")
            else:
                check_totals(body.utilities, round_, scoring)
        elif isinstance(body, kinds.OwnScore):
            own = {utility: alpha.of(body.member) for utility, alpha in self.sums.items()}
            compare(numbers(body.cumulative_alpha), own, f"cumulative alpha of {body.member}")
        elif isinstance(body, kinds.Stated):
            compare(numbers(body.cumulative_alpha), numbers(stated(self.sums)), "cumulative alpha")

    def check_stated(self) -> None:
        """Raise LedgerError unless the server stated what it must after the last round."""
        records, self._stated = self._stated, None
        if records is None:
            return
        listed, due = [record.kind for record in records], ["scores"]
        if self.config.scoring.visibility == "coordinator":
            due = ["totals", *["score"] * len(self._heard)]
        after = f"after round {self.closed[-1].number}: expected"
        if listed != due:
            raise LedgerError(f"{after} records {dict(Counter(due))}, got {dict(Counter(listed))}")
        if due == ["scores"]:
            return
        open_ = [record.body["member"] for record in records[1:] if not record.withheld]
        expected = self._heard if self.reader is None else self._heard & {self.reader}
        if len(open_) != len(expected) or set(open_) != expected:
            raise LedgerError(f"{after} the scores of {', '.join(sorted(expected))}")


def _check_named(names: Sequence[str], known: Sequence[str], does: str) -> None:
    if [name for name in known if name in names] != list(names):
        raise LedgerError(f"{does} {', '.join(names)[:200]}: expected some of {', '.join(known)}")


def _finite(values: Iterable[str]) -> bool:
    return all(math.isfinite(number(value)) for value in values)
