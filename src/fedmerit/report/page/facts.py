"""The facts of a page as plain data, for its charts, tables and sentences."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from fedmerit.errors import InputError, UndefinedScore, UndefinedShares
from fedmerit.ledger.decisions import Decision, Terms
from fedmerit.notes import Note, quoted
from fedmerit.report.page.source import Source
from fedmerit.report.terminal import Summary, digits_for, signed, summarise, unscored
from fedmerit.scoring.accumulate import accumulate, number_of
from fedmerit.scoring.agreement import agreement
from fedmerit.scoring.doubts import Doubt
from fedmerit.scoring.files import scores_of, totals_of
from fedmerit.scoring.rewards import Rule, Shares, shares
from fedmerit.scoring.scores import alpha, influence
from fedmerit.scoring.types import Reports, Scores
from fedmerit.scoring.uncertainty import compare_pairs

# -------------------------------------------------------------------------------------------- the decision


@dataclass(frozen=True)
class Decided:
    """The last decision in a ledger, with the names that the page shows."""

    number: int
    record: int
    replaces: int | None
    rounds: int  # rounds that it covers
    planned: int  # rounds of the whole run
    terms: Terms
    defined: bool  # whether the scores allowed shares
    budget: str
    lines: tuple[tuple[str, str, str], ...]  # member, share, amount: best paid first
    foot: tuple[tuple[str, str], ...]
    doubts: tuple[Doubt, ...]  # about the reports on which it rests
    overruled: tuple[Doubt, ...]  # doubts despite which it was made
    basis: Mapping[str, str]  # the score it pays by, if that is not the contribution of part 1


def terms_of(source: Source) -> Terms:
    """Return the terms of the decision in force, or the usual ones if there is none."""
    last = _last(source)
    return Terms("0", str(source.rounds[0].utility), missing=source.missing) if last is None else last.terms


def _last(source: Source) -> Decision | None:
    if source.book is None or not source.book.decisions or source.settings is None:
        return None
    return source.book.decisions[-1]


def decided(source: Source, unscored: tuple[str, ...]) -> Decided | None:
    """Return the decision in force, or None if there is none that verifies.

    Args:
        source: the source with the names to be shown.
        unscored: members who never reported, under those names.
    """
    last = _last(source)
    if last is None:
        return None
    assert source.settings is not None
    paid, names = last.paid, source.names
    best_first = sorted(paid, key=lambda name: (-paid[name], names[name]))
    terms, raw = last.terms, last.total.raw.tolist()
    basis = {}
    if (terms.utility, terms.score, terms.missing) != (source.rounds[0].utility, "ALPHA", source.missing):
        digits = digits_for(max(map(abs, raw)))
        basis = {
            names[name]: signed(value, digits) for name, value in zip(last.total.clients, raw, strict=True)
        }
    lines = [(names[name], f"{last.shares[name]:.2%}", f"{paid[name]:,.2f}") for name in best_first]
    return Decided(
        number=last.number,
        record=last.record,
        replaces=last.replaces,
        rounds=last.rounds,
        planned=source.settings["training"]["rounds"],
        terms=terms,
        defined=last.shares.status == "ok",
        budget=str(paid.budget),
        lines=(*lines, *((name, "0.00%", "0.00") for name in unscored)),
        foot=(("unpaid", f"{paid.unpaid:,.2f}"), ("budget", f"{paid.budget:,.2f}")),
        doubts=last.doubts,
        overruled=last.overruled,
        basis=basis,
    )


# --------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class RuleFacts:
    """Shares under one rule as exact integers over a common denominator, or why there are none."""

    name: Rule
    problem: str
    parts: Mapping[str, int]
    one: int
    shares: Mapping[str, float]
    notes: tuple[str, ...]


def rules_of(original: Source, source: Source) -> tuple[RuleFacts, ...]:
    """Return the facts of every rule; arguments as in :func:`fedmerit.report.page.facts.gather`."""
    total, shown = payable(original), payable(source)
    return tuple(_rule(source, total, shown, rule) for rule in get_args(Rule))


def payable(source: Source) -> Scores:
    """Return the summed score to pay by: the one that the decision names, or the contribution."""
    terms = terms_of(source)
    measured = {str(source.rounds[0].utility): source.rounds, **source.companions}
    return accumulate(measured[terms.utility], score=terms.score, missing=terms.missing)


def _rule(source: Source, total: Scores, shown: Scores, rule: Rule) -> RuleFacts:
    """Return the facts of one rule, from the scores under real names and under the names shown.

    Messages come only from the latter, so that they never contain a real name.
    """
    said: tuple[str, ...] = ()
    problem = ""
    try:
        said = _divided(source, shown, rule).notes
    except UndefinedShares as error:
        problem = error.note
    except InputError as error:
        problem = str(error)
    try:
        divided = _divided(source, total, rule)
    except (UndefinedShares, InputError):
        return RuleFacts(rule, problem or Note("no-division"), {}, 1, {}, ())
    ratios = {source.names[name]: share.as_integer_ratio() for name, share in divided.items()}
    one = math.lcm(*(bottom for _, bottom in ratios.values()))
    return RuleFacts(
        name=rule,
        problem="",
        parts={name: top * (one // bottom) for name, (top, bottom) in ratios.items()},
        one=one,
        shares={source.names[name]: share for name, share in divided.items()},
        notes=tuple(note for note in said if note not in shown.notes),
    )


def _divided(source: Source, total: Scores, rule: Rule) -> Shares:
    terms = terms_of(source)
    return shares(total, rule, floor=terms.floor, cap=terms.cap, on_undefined=terms.on_undefined)


# --------------------------------------------------------------------------------------------------- facts

MOST_POINTS = 60
"""The most rounds shown of one member's course; of more, evenly spaced ones."""
MOST_CELLS = 4000
"""The most cells in a table of members and rounds; larger tables are only in scores.csv."""
MOST_INFLUENCE = 20
"""The most members in the table of who influences whom."""


@dataclass(frozen=True)
class Course:
    """One member's sum after each round shown, and the rounds without its report."""

    client: str
    totals: tuple[float | None, ...]
    missed: tuple[int, ...]


@dataclass(frozen=True)
class Absence:
    """A member who missed rounds: which, why, the model's gain in them, and their value at its own mean."""

    client: str
    rounds: Mapping[int, str]
    gain: float
    at_own_mean: float | None  # value of the missed rounds at the member's own mean, if it has one


@dataclass(frozen=True)
class RoundFacts:
    """One round: number of reports, gain, sum of contributions, status of FP and EE."""

    number: int
    reported: int
    gain: float | None
    explained: float | None
    status: Mapping[str, str]
    remark: str


@dataclass(frozen=True)
class Companion:
    """The comparison of members by another utility."""

    utility: str
    summary: Summary
    spearman: float | None
    sure: int  # pairs that differ significantly by the paid utility
    confirms: int  # how many of them this utility orders the same way
    contradicts: tuple[tuple[str, str], ...]  # (better, worse) by the paid one, surely the reverse by this
    turned: Mapping[str, bool]  # surely above zero by this and below by the paid (True), or the reverse


@dataclass(frozen=True)
class Facts:
    """Everything that a page says."""

    source: Source
    summary: Summary
    letters: Mapping[str, str]  # groups of indistinguishable members; empty if there is none
    shown: tuple[int, ...]  # rounds shown
    courses: tuple[Course, ...]  # best first
    absences: tuple[Absence, ...]
    unscored: tuple[str, ...]  # members who never reported
    decided: Decided | None
    rounds: tuple[RoundFacts, ...]
    companions: tuple[Companion, ...]
    rules: tuple[RuleFacts, ...]
    influence: tuple[int | None, tuple[str, ...], tuple[tuple[float, ...], ...]] | None  # round, names, rows
    truth: tuple[tuple[str, str, Mapping[str, float | None]], ...]  # utility, value, Spearman by score

    @property
    def total(self) -> Scores:
        """The contributions summed over rounds."""
        return self.summary.total

    @property
    def utility(self) -> str | None:
        """Name of the utility that ranks members here: the paid one unless a decision names another."""
        return self.source.rounds[0].utility

    @property
    def terms(self) -> Terms:
        """The terms of the decision in force, or the usual ones."""
        return terms_of(self.source)

    @property
    def paid_by(self) -> str | None:
        """Name of the utility by which members are paid."""
        return self.decided.terms.utility if self.decided else self.utility

    @property
    def payable(self) -> Scores:
        """The score that the terms name, by which budgets are divided."""
        return payable(self.source)

    @property
    def unfinished(self) -> tuple[int, int] | None:
        """Closed and planned rounds of a run that is not over; None if it is over, or not a run."""
        if self.source.book is None or self.source.settings is None:
            return None
        closed, planned = len(self.source.book.rounds), self.source.settings["training"]["rounds"]
        return (closed, planned) if closed < planned else None

    @property
    def level_digits(self) -> int:
        """Decimals for the utilities of the shared model and their changes."""
        levels = [abs(value) for one in self.source.rounds for value in (one.empty, one.grand)]
        return max(digits_for(max(levels)), digits_for(abs(self.total.gain)))

    @property
    def sliced(self) -> bool:
        """Whether every round names its test samples."""
        return all(one.slice is not None for one in self.source.rounds)

    @property
    def one_slice(self) -> bool:
        """Whether all rounds are known to be measured on the same test samples."""
        return self.source.rounds[0].slice is not None and len({one.slice for one in self.source.rounds}) == 1


def gather(source: Source, original: Source) -> Facts:
    """Return all facts of a source.

    Args:
        source: the source with the names to be shown.
        original: the source with the real names; shares are computed from it, so that they equal those of
            ``fedmerit rewards`` to the last bit, whatever names are shown.
    """
    rounds = source.rounds
    game = None if source.settings is None else source.settings["scoring"]["game"]
    summary = summarise(rounds, missing=source.missing, clients=source.clients, game=game)
    shown = _shown(len(rounds))
    without = unscored(rounds, source.clients)
    return Facts(
        source=source,
        summary=summary,
        letters=_letters(summary),
        shown=tuple(number_of(rounds[k - 1], k) for k in shown),
        courses=_courses(source, summary, shown),
        absences=_absences(source),
        unscored=without,
        decided=decided(source, without),
        rounds=_rounds(source),
        companions=tuple(_companion(source, summary, key) for key in source.companions),
        rules=rules_of(original, source),
        influence=_influence(rounds),
        truth=_truth(source),
    )


def _shown(count: int) -> list[int]:
    """Return the places of at most MOST_POINTS evenly spaced rounds, including the first and the last."""
    if count <= MOST_POINTS:
        return list(range(1, count + 1))
    step = (count - 1) / (MOST_POINTS - 1)
    return sorted({1 + round(k * step) for k in range(MOST_POINTS)})


def _letters(summary: Summary) -> dict[str, str]:
    """Return letters a, b, ... per member; members who share a letter are statistically indistinguishable."""
    if not any(len(group) > 1 for group in summary.groups) or len(summary.groups) > 26:
        return {}
    return {
        one.client: "".join(
            letter
            for letter, group in zip(string.ascii_lowercase, summary.groups, strict=False)
            if one.client in group
        )
        for one in summary.standings
    }


def _courses(source: Source, summary: Summary, shown: list[int]) -> tuple[Course, ...]:
    sums = [accumulate(source.rounds[:k], missing=source.missing).as_dict() for k in shown]
    missed = _missed(source)
    return tuple(
        Course(one.client, tuple(total.get(one.client) for total in sums), tuple(missed.get(one.client, ())))
        for one in summary.standings
    )


def _missed(source: Source) -> dict[str, dict[int, str]]:
    """Return member -> scored round without its report -> why there is none."""
    books = {one.number: one for one in source.book.rounds} if source.book else {}
    found: dict[str, dict[int, str]] = {}
    for place, reports in enumerate(source.rounds, start=1):
        number, reported = number_of(reports, place), set(reports.clients)
        book = books.get(number)
        for name in source.clients:
            if name in reported:
                continue
            if name in reports.silent:
                why = "in the sum, sent no report"
            elif book is None:
                why = "no report"
            elif name not in book.scheduled:
                why = "away"
            else:
                why = "declined" if name in book.declined else "lost on the way"
            found.setdefault(name, {})[number] = why
    return found


def _absences(source: Source) -> tuple[Absence, ...]:
    mean = accumulate(source.rounds, missing="own-mean").as_dict()
    zero = accumulate(source.rounds, missing="zero").as_dict()
    gains = {number_of(reports, place): reports.gain for place, reports in enumerate(source.rounds, start=1)}
    return tuple(
        Absence(
            name,
            rounds,
            math.fsum(gains[k] for k in rounds),
            mean[name] - zero[name] if name in mean else None,
        )
        for name, rounds in _missed(source).items()
    )


def _rounds(source: Source) -> tuple[RoundFacts, ...]:
    books = {one.number: one for one in source.book.rounds} if source.book else {}
    without = {**source.aborted, **dict.fromkeys(source.unreported, "summed, but nobody reported")}
    found = [RoundFacts(number, 0, None, None, {}, f"not scored: {why}") for number, why in without.items()]
    for place, reports in enumerate(source.rounds, start=1):
        number = number_of(reports, place)
        scores = scores_of(reports)
        status = {key: "none" if (one := scores.get(key)) is None else one.status for key in ("FP", "EE")}
        remarks = []
        if reports.silent:
            remarks.append(f"no report from {', '.join(map(quoted, reports.silent))}")
        if number in books and books[number].declined:
            remarks.append(f"declined: {', '.join(map(quoted, books[number].declined))}")
        explained = math.fsum(alpha(reports).values.tolist())
        found.append(RoundFacts(number, reports.n, reports.gain, explained, status, "; ".join(remarks)))
    return tuple(sorted(found, key=lambda one: one.number))


def _companion(source: Source, summary: Summary, utility: str) -> Companion:
    other = summarise(source.companions[utility], missing=source.missing, clients=source.clients)
    paid, total = summary.total, other.total
    spearman, sure, confirms = None, 0, 0
    contradicts: list[tuple[str, str]] = []
    if paid.clients == total.clients and paid.n > 1:
        spearman = agreement(total.raw, paid.raw).spearman
        if paid.stderr is not None and total.stderr is not None:
            mine, theirs = compare_pairs(paid).better, compare_pairs(total).better
            sure, confirms = int(mine.sum()), int((mine & theirs).sum())
            names = paid.clients
            contradicts = [(names[i], names[j]) for i, j in zip(*(mine & theirs.T).nonzero(), strict=True)]
    mine_by = {one.client: one.surely for one in summary.standings}
    turned = {
        one.client: one.surely > 0 for one in other.standings if one.surely * mine_by.get(one.client, 0) < 0
    }
    return Companion(utility, other, spearman, sure, confirms, tuple(contradicts), turned)


def _influence(
    rounds: tuple[Reports, ...],
) -> tuple[int | None, tuple[str, ...], tuple[tuple[float, ...], ...]] | None:
    """Return round, names and rows of who influences whom, from the last round in which it is defined."""
    for reports in reversed(rounds):
        if 2 <= reports.n <= MOST_INFLUENCE:
            try:
                rows = tuple(tuple(row) for row in influence(reports).tolist())
            except UndefinedScore:
                continue
            return reports.round, reports.clients, rows
    return None


def _truth(source: Source) -> tuple[tuple[str, str, Mapping[str, float | None]], ...]:
    rounds_of = {str(source.rounds[0].utility): source.rounds, **source.companions}
    found = []
    for utility, values in source.truth.items():
        totals = totals_of(rounds_of[utility], missing=source.missing)
        for value, truth in values.items():
            spearman = {}
            for score, total in totals.items():
                known = total.as_dict()
                complete = len(truth) == len(source.clients) and all(name in known for name in source.clients)
                own = [known.get(name, 0.0) for name in source.clients]
                spearman[score] = agreement(own, truth).spearman if complete else None
            if source.phi:
                summed = [value for value in source.phi.get(utility, ()) if value is not None]
                whole = len(summed) == len(truth) == len(source.clients)
                spearman["PHI"] = agreement(summed, truth).spearman if whole else None
            found.append((utility, value, spearman))
    return tuple(found)
