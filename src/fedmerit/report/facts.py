"""What happened in a run, as one model: terminal, page, statements and exports are written from `Facts`.

Every fact is computed when somebody asks for it, and once. Facts hold numbers, names and codes, no words.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, UndefinedShares
from fedmerit.ledger.account import Account, SettledRound
from fedmerit.ledger.decisions import Decision, Terms, by_hands
from fedmerit.notes import Note, digits_for
from fedmerit.report.panel import Reading
from fedmerit.report.source import Source
from fedmerit.scoring.accumulate import (
    Convergence,
    Missing,
    ScoredRound,
    accumulate,
    convergence_of,
    number_of,
    running_sums,
    totals_of,
)
from fedmerit.scoring.doubts import Doubt, at_chance, by_mean, doubts
from fedmerit.scoring.ground_truth import agreement
from fedmerit.scoring.panel import share_spans
from fedmerit.scoring.rewards import (
    AnyRule,
    PaidApart,
    Shares,
    Spans,
    paid_apart,
    share_intervals,
    visible_gaps,
)
from fedmerit.scoring.sampling import is_whole
from fedmerit.scoring.scores import scores_of
from fedmerit.scoring.types import UNIT_UTILITIES, Reports, Scores
from fedmerit.scoring.uncertainty import (
    compare_pairs,
    indistinguishable,
    intervals,
    rank_intervals,
    sure_signs,
)

MOST_COMPARED = 1000
"""With more clients pairs are not compared: that takes N^2 memory, and the groups are too long to read."""
MOST_POINTS = 60
"""The most rounds shown of one member's course; of more, evenly spaced ones."""

# ------------------------------------------------------------------------------------------------ findings

Happened = Literal["counted", "silent", "unstated", "declined", "blamed", "lost", "away", "unknown"]
"""What happened to a member in a scored round: its report or statement counted, or why there is none.

========  ====================================================
silent    the update is in the sum, no valid report arrived
unstated  the update is in the sum, but the member has not stated what it is worth
declined  the member declined
blamed    the member broke the protocol in this round or before it, as the ledger proves, and was left out
lost      the member was scheduled, the update did not arrive
away      the member was not scheduled
unknown   there is no ledger that says why
========  ====================================================
"""


@dataclass(frozen=True)
class Standing:
    """How one member stands; a value that is unknown is None."""

    client: str
    rank: int
    rank_interval: tuple[int, int] | None
    total: float
    interval: tuple[float, float] | None
    coverage: float
    share: float | None
    share_interval: tuple[float, float] | None
    samples: float | None
    digits: int = 4  # decimals to show for numbers of this size
    surely: int = 0  # 1: total surely above zero, -1: surely below; at 95 % for all members together
    reported: float | None = None  # beside a settled score: the contribution that the member reported


@dataclass(frozen=True)
class Absence:
    """A member who missed rounds: which, why, the model's gain in them, and their value at its own mean."""

    client: str
    rounds: Mapping[int, Happened]
    gain: float
    at_own_mean: float | None  # None if the member never reported


@dataclass(frozen=True)
class RoundFacts:
    """One round: number of reports, gain, sum of contributions, status of FP and EE, and what was odd."""

    number: int
    reported: int = 0
    gain: float | None = None  # None if the round has no score
    explained: float | None = None
    status: Mapping[str, str] | None = None
    silent: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    blamed: tuple[str, ...] = ()
    aborted: str = ""  # why, if it was


@dataclass(frozen=True)
class Companion:
    """The comparison of members by another utility."""

    utility: str
    facts: Facts
    spearman: float | None
    sure: int  # pairs that differ significantly by the paid utility
    confirms: int  # how many of them this utility orders the same way
    contradicts: tuple[tuple[str, str], ...]  # (better, worse) by the paid one, surely the reverse by this
    turned: Mapping[str, bool]  # surely above zero by this and below by the paid (True), or the reverse
    reported: bool = False  # whether it is the paid utility, by reports in place of statements


# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Facts:
    """What happened in a run, how sure that is, what is paid, and whether it can be trusted."""

    source: Source
    score: str | None = None  # that is summed over rounds; None: PHI or PANEL if settled, otherwise ALPHA

    @property
    def ranked_by(self) -> str:
        """The score that ranks members."""
        account = self.source.account
        usual = "ALPHA" if account is None else "PHI" if account.panel is None else "PANEL"
        return self.score or usual

    @property
    def settled(self) -> bool:
        """Whether members are ranked by what they stated in the settlement."""
        return self.ranked_by in ("PHI", "PANEL")

    @cached_property
    def panel(self) -> Reading | None:
        """Who helped whom, if members are ranked by what they did for each other's data."""
        whole = self.account.panel if self.ranked_by == "PANEL" else None
        return None if whole is None else Reading(self.account, whole)

    @property
    def measured(self) -> tuple[ScoredRound, ...]:
        """The scored rounds: as reported, or as settled."""
        return self.source.settled_rounds if self.settled else self.source.rounds

    @property
    def numbered(self) -> dict[int, ScoredRound]:
        """The scored rounds by their numbers."""
        return {number_of(measured, place): measured for place, measured in enumerate(self.measured, start=1)}

    @property
    def reported(self) -> dict[int, Reports]:
        """The rounds with reports by their numbers."""
        return {
            number_of(reports, place): reports for place, reports in enumerate(self.source.rounds, start=1)
        }

    @property
    def by_round(self) -> Sequence[Reports] | Sequence[Scores]:
        """What is summed over rounds: reports, or settled scores; empty if nobody stated in some round."""
        if not self.settled:
            return self.source.rounds
        stated = [settled.scores for settled in self.source.settled_rounds if settled.scores is not None]
        return stated if len(stated) == len(self.source.settled_rounds) else []

    @property
    def agreed(self) -> Terms:
        """The terms that pay unless somebody chooses others: those of the settings."""
        payment, currency = self.source.payment, self.source.heading.currency
        terms = Terms.agreed(payment, "0", str(self.utility), self.ranked_by)
        return replace(terms, missing=self.source.missing, currency=currency)

    @property
    def liars(self) -> tuple[str, ...]:
        """Everybody whom the settlement named, if it ranks members."""
        return self.account.liars if self.settled else ()

    @property
    def account(self) -> Account:
        """The account of the settlement, which ranks members."""
        assert self.source.account is not None
        return self.source.account

    # ------------------------------------------------------------------------------------------ who, how much

    @cached_property
    def total(self) -> Scores:
        """The score summed over rounds."""
        return self.summed(self.ranked_by, self.source.missing)

    def summed(self, score: str, missing: Missing, rounds: Sequence[Reports] | None = None) -> Scores:
        """Return a score summed over these rounds, or those of the paid utility."""
        if score in ("PHI", "PANEL"):
            total = self.account.scores(missing)
            return total if self.panel is None else self.panel.scores(total)
        return accumulate(self.source.rounds if rounds is None else rounds, score=score, missing=missing)

    @cached_property
    def standings(self) -> tuple[Standing, ...]:
        """Everybody who ever reported, best first."""
        total, last, divided = self.total, self.last, self._usual[0]
        signs: Sequence[int] = [0] * total.n
        spans, share_spans, ranks = None, None, self._ranks
        if total.stderr is not None:
            spans, signs = intervals(total), sure_signs(total)
        if divided is not None:
            share_spans = self.spans_of(total, divided)
        samples: dict[str, float] = {}
        if last is not None and last.samples is not None:
            samples = dict(zip(last.clients, last.samples.tolist(), strict=True))
        reported: dict[str, float] = {}
        if self.settled and self.source.rounds:
            reported = accumulate(self.source.rounds, missing=self.source.missing).as_dict()
        places, digits = total.ranks(), digits_for(self.largest)
        index = {name: i for i, name in enumerate(total.clients)}
        return tuple(
            Standing(
                client=name,
                rank=int(places[i]),
                rank_interval=None if ranks is None else (int(ranks[i, 0]), int(ranks[i, 1])),
                total=float(total.raw[i]),
                interval=None if spans is None else (float(spans[i, 0]), float(spans[i, 1])),
                coverage=1.0 if total.coverage is None else float(total.coverage[i]),
                share=None if divided is None else divided[name],
                share_interval=None if share_spans is None else share_spans[name],
                samples=samples.get(name),
                digits=digits,
                surely=signs[i],
                reported=reported.get(name),
            )
            for name, i in ((name, index[name]) for name in total.ranking())
        )

    @cached_property
    def standing(self) -> dict[str, Standing]:
        """Member -> how it stands, of everybody who ever reported."""
        return {standing.client: standing for standing in self.standings}

    @cached_property
    def _ranks(self) -> npt.NDArray[np.int64] | None:
        return None if self.total.stderr is None else rank_intervals(self.total)

    @cached_property
    def _usual(self) -> tuple[Shares | None, tuple[str, ...]]:
        """The shares of the usual rule, if there are any, and the notes on them."""
        try:
            divided = self.divide(self.agreed, self.total)
        except UndefinedShares as error:
            return None, (Note("no-shares", why=error.note),)
        except InputError as error:  # terms for another number of members, or for another score
            return None, (Note("no-shares", why=str(error)),)
        return divided, divided.notes

    def divide(self, terms: Terms, total: Scores, rule: AnyRule | None = None) -> Shares:
        """Return the shares of these scores by these terms, or by another rule; a panel has its own rule."""
        if self.panel is None:
            return terms.divide(total, self.liars, rule)
        return by_hands(self.account, terms, self._most)

    def spans_of(self, total: Scores, divided: Shares) -> Spans | None:
        """Return the intervals of these shares; None if they are unknown."""
        panel = self.panel
        if panel is None:
            return share_intervals(total, divided)
        return share_spans(panel.account.paid, divided, self._most)

    @property
    def _most(self) -> float:
        assert self.source.config is not None  # there is a settlement
        return self.source.config.panel.most

    @property
    def last(self) -> Reports | None:
        """The last round with reports, if there is one."""
        return self.source.rounds[-1] if self.source.rounds else None

    @cached_property
    def last_scores(self) -> Mapping[str, Scores | None]:
        """All scores of the last round with reports, by name; None for those that it does not have."""
        return {} if self.last is None else scores_of(self.last)

    @property
    def status(self) -> dict[str, str]:
        """Status of FP and EE in the last round, where they exist."""
        found = {name: self.last_scores.get(name) for name in ("FP", "EE")}
        return {name: scores.status for name, scores in found.items() if scores is not None}

    @property
    def largest(self) -> float:
        """The largest contribution, whatever its sign."""
        return float(np.max(np.abs(self.total.raw)))

    @property
    def digits(self) -> int:
        """Decimals to show for contributions of this size."""
        return digits_for(self.largest)

    @property
    def unit(self) -> int:
        """By what contributions are multiplied for people: 100, for points, if the measure is from 0 to 1."""
        return 100 if self.utility in UNIT_UTILITIES and self.ranked_by != "COS" else 1

    @property
    def unit_digits(self) -> int:
        """Decimals of contributions for people: three digits in points, and at least one decimal."""
        return self.digits if self.unit == 1 else _point_digits(100 * self.largest)

    @property
    def level_digits(self) -> int:
        """Decimals for the utilities of the shared model and their changes, for people."""
        if self.unit == 100:
            return _point_digits(100 * abs(self.total.gain))
        levels = [abs(value) for measured in self.measured for value in (measured.empty, measured.grand)]
        return max(digits_for(max(levels)), digits_for(abs(self.total.gain)))

    @property
    def utility(self) -> str | None:
        """Name of the utility that ranks members here: the paid one unless a decision names another."""
        return self.measured[0].utility

    # ----------------------------------------------------------------------------------------------- how sure

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Statistically indistinguishable members; empty if unknown."""
        return () if self._better is None else indistinguishable(self.total)

    @property
    def letters(self) -> dict[str, str]:
        """Letters a, b, ... per member; members with a common letter are statistically indistinguishable."""
        if not any(len(group) > 1 for group in self.groups) or len(self.groups) > 26:
            return {}
        lettered = tuple(zip(string.ascii_lowercase, self.groups, strict=False))
        return {
            name: "".join(letter for letter, group in lettered if name in group) for name in self.standing
        }

    @cached_property
    def alike(self) -> dict[str, tuple[str, ...]]:
        """Member -> members statistically indistinguishable from it, best first; empty if unknown."""
        total, better = self.total, self._better
        if better is None:
            return {}
        alike = ~(better | better.T)
        np.fill_diagonal(alike, False)
        index = {name: i for i, name in enumerate(total.clients)}
        ranking = total.ranking()
        return {
            name: tuple(other for other in ranking if alike[i, index[other]]) for name, i in index.items()
        }

    @cached_property
    def convergence(self) -> Convergence | None:
        """How the order of members settled over the rounds; None if that cannot be said."""
        if self.ranked_by == "MERIT" or not self.by_round:  # more than a sum over rounds, or not known
            return None
        return convergence_of(self.total, self.by_round, [*self.numbered], missing=self.source.missing)

    @cached_property
    def _better(self) -> npt.NDArray[np.bool_] | None:
        """Who is significantly better than whom, shape (N, N); None if unknown."""
        return better_than(self.total)

    def apart(self, divided: Shares) -> PaidApart | None:
        """Return indistinguishable members whose shares differ visibly; the score that ranks them decides."""
        better = self._better
        if better is None or set(divided) != set(self.total.clients):
            return None
        return paid_apart(self.total, divided, better)

    @cached_property
    def suspects(self) -> tuple[str, ...]:
        """Members who reported in every round, did harm and are below all others, surely."""
        total, ranks = self.total, self._ranks
        if ranks is None or total.n < 3:
            return ()
        last_for_sure = ranks[:, 0] == total.n
        if total.coverage is not None:  # nobody is accused for missed rounds
            last_for_sure &= total.coverage >= 1
        harmful = set(self.harmful)
        last = (name for name, sure in zip(total.clients, last_for_sure, strict=True) if sure)
        return tuple(name for name in last if name in harmful)

    @property
    def leaders(self) -> list[str]:
        """Members whose rank may be first."""
        return [
            name for name, one in self.standing.items() if one.rank_interval and one.rank_interval[0] == 1
        ]

    @property
    def harmful(self) -> list[str]:
        """Members who surely made the model worse.

        If some member surely improved the model, a member whose rank may still be first is not accused.
        """
        improved = any(standing.surely > 0 for standing in self.standings)
        spared = self.leaders if improved else []
        return [one.client for one in self.standings if one.surely < 0 and one.client not in spared]

    @cached_property
    def doubts(self) -> tuple[Doubt, ...]:
        """Reasons to look at the reports before anybody is paid; shown before everything else."""
        if self.panel is not None:  # these are about a shared test set
            return ()
        run, by_chance = self.source.run, at_chance(self.total) if self.settled else None
        found = [by_chance] if self.settled else doubts(self.source.rounds, game=self.source.game)
        if run is not None and self.utility == run.config.scoring.utilities[0]:
            found = [*found, by_mean(self.measured[0].empty, self.total.gain, run.first.mean_answer)]
        return tuple(filter(None, found))

    @property
    def withheld(self) -> bool:
        """Whether a doubt forbids praising or accusing members by these numbers until it is resolved."""
        return any(doubt.withholds for doubt in self.doubts)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What readers should know before they rely on the standings."""
        collected = [*self.source.notes, *self.total.notes, *self.absence_notes]
        if is_whole(self.utility):
            collected.append(Note("whole-sum", utility=self.utility))
        for scores in self.last_scores.values():
            collected += scores.notes if scores else ()
        return tuple(dict.fromkeys([*collected, *self._usual[1]]))

    # ----------------------------------------------------------------------------- member by member and round

    @cached_property
    def happened(self) -> dict[str, dict[int, Happened]]:
        """Member -> scored round -> what happened; everybody on the roster or in a sum."""
        closed = {one.number: one for one in self.source.closed}
        seen = (name for measured in self.measured for name in (*measured.clients, *measured.silent))
        everybody = dict.fromkeys((*self.source.clients, *seen))
        found: dict[str, dict[int, Happened]] = {name: {} for name in everybody}
        for number, measured in self.numbered.items():
            reported, silent, book = set(measured.clients), set(measured.silent), closed.get(number)
            for name, of_member in found.items():
                code: Happened = "unknown"
                if name in reported:
                    code = "counted"
                elif name in silent:
                    code = "unstated" if self.settled else "silent"
                elif book is not None and name in book.declined:
                    code = "declined"
                elif book is not None and self.blamed.get(name, number + 1) <= number:
                    code = "blamed"
                elif book is not None:
                    code = "lost" if name in book.scheduled else "away"
                of_member[number] = code
        return found

    @cached_property
    def blamed(self) -> dict[str, int]:
        """Member who broke the protocol -> the round in which it did, as the ledger proves."""
        return {name: closed.number for closed in self.source.closed for name in closed.blamed}

    def rounds_of(self, client: str, *codes: Happened) -> tuple[int, ...]:
        """Return the rounds in which one of these things happened to a member."""
        return tuple(number for number, code in self.happened[client].items() if code in codes)

    @cached_property
    def unscored(self) -> tuple[str, ...]:
        """Members who are on the roster, or were in a sum, and never reported, or never stated."""
        there = () if self.panel is None else self.panel.whole.clients
        return tuple(
            name
            for name, codes in self.happened.items()
            if "counted" not in codes.values() and name not in there
        )

    @property
    def absence_notes(self) -> Iterator[Note]:
        """Notes on members who were summed without a report, and on those who were in no round at all."""
        for name in self.happened:
            if silent := self.rounds_of(name, "silent"):
                yield Note("silent", client=name, rounds=silent)
        for name in self.unscored:
            if not self.rounds_of(name, "silent", "unstated"):
                yield Note("never-summed" if self.settled else "only-listed", client=name)

    @cached_property
    def absences(self) -> tuple[Absence, ...]:
        """Members who missed a scored round."""
        score, mean, zero = "PHI" if self.settled else "ALPHA", dict[str, float](), dict[str, float]()
        if self.panel is None:  # what a panel measures is not known round by round
            mean, zero = (self.summed(score, missing).as_dict() for missing in ("own-mean", "zero"))
        gains = {number: measured.gain for number, measured in self.numbered.items()}
        found = []
        for name, codes in self.happened.items():
            if missed := {number: code for number, code in codes.items() if code != "counted"}:
                own = mean[name] - zero[name] if name in mean else None
                found.append(Absence(name, missed, math.fsum(gains[number] for number in missed), own))
        return tuple(found)

    @cached_property
    def shown(self) -> dict[int, int]:
        """Round number -> its place, of at most MOST_POINTS evenly spaced rounds, first and last included."""
        numbers = [*self.numbered]
        step = max(1.0, (len(numbers) - 1) / (MOST_POINTS - 1))
        places = sorted({1 + round(k * step) for k in range(min(len(numbers), MOST_POINTS))})
        return {numbers[place - 1]: place for place in places}

    @cached_property
    def courses(self) -> dict[str, tuple[float | None, ...]]:
        """Member -> its sum after each round shown, best first; empty if single rounds are unknown."""
        if not self.by_round:
            return {}
        sums = running_sums(self.by_round, self.shown.values(), missing=self.source.missing)
        return {name: tuple(total.get(name) for total in sums) for name in self.standing}

    @cached_property
    def rounds(self) -> tuple[RoundFacts, ...]:
        """Every round that is over, with those that have no score."""
        found = [RoundFacts(number, aborted=why) for number, why in self.source.aborted.items()]
        found += [RoundFacts(number) for number in self.source.unreported]
        reported = self.reported
        for number, measured in self.numbered.items():
            scores, status = {}, None
            if number in reported:
                scores = scores_of(reported[number])
                normalised = {name: scores.get(name) for name in ("FP", "EE")}
                status = {name: one.status if one else "none" for name, one in normalised.items()}
            paid = measured.scores if isinstance(measured, SettledRound) else scores["ALPHA"]
            happened = {name: codes[number] for name, codes in self.happened.items()}
            silent = "unstated" if self.settled else "silent"
            found.append(
                RoundFacts(
                    number,
                    reported=len(measured.clients),
                    gain=measured.gain,
                    explained=None if paid is None else math.fsum(paid.values.tolist()),
                    status=status,
                    silent=tuple(name for name, code in happened.items() if code == silent),
                    declined=tuple(name for name, code in happened.items() if code == "declined"),
                    blamed=tuple(name for name, at in self.blamed.items() if at == number),
                )
            )
        return tuple(sorted(found, key=lambda one: one.number))

    @property
    def unfinished(self) -> tuple[int, int] | None:
        """Closed and planned rounds of a run that is not over; None if it is over, or not a run."""
        closed, planned = len(self.source.closed), self.source.planned
        if self.source.run is None or planned is None or closed >= planned:
            return None
        return closed, planned

    @property
    def sliced(self) -> bool:
        """Whether every round names its test samples."""
        return all(measured.slice is not None for measured in self.measured)

    @property
    def one_slice(self) -> bool:
        """Whether all rounds are known to be measured on the same test samples."""
        return self.sliced and len({measured.slice for measured in self.measured}) == 1

    # -------------------------------------------------------------------------------------------------- money

    @property
    def decision(self) -> Decision | None:
        """The decision in force; None if there is none that verifies."""
        return self.source.decisions[-1] if self.source.decisions else None

    @property
    def terms(self) -> Terms:
        """The terms of the decision in force, or the usual ones."""
        return self.decision.terms if self.decision else self.agreed

    @property
    def paid_by(self) -> str | None:
        """Name of the utility by which members are paid."""
        return self.terms.utility if self.decision else self.utility

    @property
    def other_basis(self) -> bool:
        """Whether the decision pays by another score than the contribution that ranks members here."""
        terms, score = self.terms, self.ranked_by if self.settled else "ALPHA"
        own = str(self.utility), score, self.source.missing
        return (terms.utility, terms.score, terms.missing) != own

    @property
    def usual(self) -> bool:
        """Whether the terms pay by the contribution that ranks members here, and by the rule alone."""
        terms = self.terms
        return not self.other_basis and (terms.equal, terms.floor, terms.cap) == (0.0, 0.0, 1.0)

    @cached_property
    def spans(self) -> Spans | None:
        """The intervals of the decided shares; None if they are unknown."""
        decision = self.decision
        return None if decision is None else self.spans_of(decision.total, decision.shares)

    @property
    def paid_total(self) -> Scores:
        """The scores by which the decision is read: of a panel, those of the judges that count."""
        assert self.decision is not None
        return self.decision.total if self.panel is None else self.total

    @cached_property
    def _decided_better(self) -> npt.NDArray[np.bool_] | None:
        return None if self.decision is None else better_than(self.paid_total)

    @property
    def decided_apart(self) -> PaidApart | None:
        """Indistinguishable members whom the decision pays visibly apart."""
        decision, better = self.decision, self._decided_better
        if decision is None or better is None:
            return None
        return paid_apart(self.paid_total, decision.shares, better)

    def apart_from(self, client: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return who is indistinguishable from a member: those paid visibly less, and those paid more."""
        decision, better = self.decision, self._decided_better
        if decision is None or better is None or client not in self.paid_total.clients:
            return (), ()
        names, gap = self.paid_total.clients, visible_gaps(self.paid_total, decision.shares, better)
        i = names.index(client)
        less, more = (tuple(names[k] for k in np.flatnonzero(row)) for row in (gap[i], gap[:, i]))
        return less, more

    @cached_property
    def payable(self) -> Scores:
        """The summed score to pay by: the one that the decision names, or the contribution."""
        rounds = {str(self.utility): self.source.rounds, **self.source.companions}[self.terms.utility]
        return self.summed(self.terms.score, self.terms.missing, rounds)

    @cached_property
    def counted_otherwise(self) -> Scores:
        """The score to pay by with missed rounds counted the other way."""
        other: Missing = "zero" if self.terms.missing == "own-mean" else "own-mean"
        return self.summed(self.terms.score, other)

    # ---------------------------------------------------------------------------------------- can we trust it

    def near_truth(self, *kinds: str) -> Iterator[tuple[str, str, dict[str, float | None]]]:
        """Yield utility, kind of ground truth, and its rank correlation with every score summed over rounds.

        The value of one round (ROUND-SV) is compared with the scores of the last round, as the paper does.
        """
        source = self.source
        rounds_of = {str(self.utility): source.rounds, **source.companions}
        for utility, part in source.analysed.items():
            totals = totals_of(rounds_of.get(utility, ()), missing=source.missing)
            sums = {score: total.as_dict() for score, total in totals.items()}
            if isinstance(phi := (part.get("cumulative") or {}).get("PHI"), list):
                sums["PHI"] = dict(zip(source.clients, phi, strict=False))
            for kind in kinds:
                if (truth := part["truth"].get(kind)) is None:
                    continue
                compared = sums
                if kind == "ROUND-SV":
                    names, each = (part["rounds"][-1][key] for key in ("participants", "scores"))
                    compared = {score: dict(zip(names, each[score] or (), strict=False)) for score in each}
                near = {score: self._spearman(of_member, truth) for score, of_member in compared.items()}
                yield utility, kind, near

    def _spearman(self, of_member: Mapping[str, float | None], truth: Sequence[float]) -> float | None:
        """Return the rank correlation of a score with the truth; None unless every member has the score."""
        values = [value for name in self.source.clients if (value := of_member.get(name)) is not None]
        complete = len(values) == len(truth) == len(self.source.clients)
        return agreement(values, truth).spearman if complete else None

    @cached_property
    def companions(self) -> tuple[Companion, ...]:
        """What other utilities say about the same members; beside settled scores, also what they reported."""
        found = [self._companion(utility, rounds) for utility, rounds in self.source.companions.items()]
        if self.settled and self.source.rounds:
            own = self._companion(str(self.utility), self.source.rounds)
            found.insert(0, replace(own, reported=True))
        return tuple(found)

    def _companion(self, utility: str, rounds: tuple[Reports, ...]) -> Companion:
        other = Facts(replace(self.source, rounds=rounds, companions={}, account=None))
        paid, total = self.total, other.total
        spearman, sure, confirms = None, 0, 0
        contradicts: list[tuple[str, str]] = []
        if set(paid.clients) == set(total.clients) and paid.n > 1:
            order = [total.clients.index(name) for name in paid.clients]  # they may have joined otherwise
            spearman = agreement(total.raw[order], paid.raw).spearman
            if paid.stderr is not None and total.stderr is not None:
                mine, theirs = compare_pairs(paid).better, compare_pairs(total).better[np.ix_(order, order)]
                sure, confirms = int(mine.sum()), int((mine & theirs).sum())
                names = paid.clients
                against = zip(*(mine & theirs.T).nonzero(), strict=True)
                contradicts = [(names[i], names[j]) for i, j in against]
        surely = {name: standing.surely for name, standing in self.standing.items()}
        turned = {
            name: standing.surely > 0
            for name, standing in other.standing.items()
            if standing.surely * surely.get(name, 0) < 0
        }
        return Companion(utility, other, spearman, sure, confirms, tuple(contradicts), turned)

    def otherwise(self, client: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the measures by which a member who made the model worse surely improved it, or seems to.

        What members reported, beside settled scores, is an empty name.
        """
        turned, unconfirmed = [], []
        for companion in self.companions:
            name = "" if companion.reported else companion.utility
            standing = companion.facts.standing.get(client)
            if companion.turned.get(client):
                turned.append(name)
            elif standing is not None and standing.total > 0:
                unconfirmed.append(name)
        return tuple(turned), tuple(unconfirmed)


def _point_digits(points: float) -> int:
    return min(12, max(1, 2 - math.floor(math.log10(points)))) if points else 1


def better_than(total: Scores) -> npt.NDArray[np.bool_] | None:
    """Return who is significantly better than whom; None without standard errors, or of too many."""
    compared = total.stderr is not None and total.n <= MOST_COMPARED
    return compare_pairs(total).better if compared else None
