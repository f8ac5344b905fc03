"""What happened in a run, as one model: terminal, page, statements and exports are written from `Facts`.

Every fact is computed when somebody asks for it, and once. Facts hold numbers, names and codes, no words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, UndefinedScore, UndefinedShares
from fedmerit.ledger.decisions import Decision, Terms
from fedmerit.notes import Note
from fedmerit.report.findings import AbsenceCost, Companion, Influence, RuleFacts
from fedmerit.report.source import Source
from fedmerit.report.standings import Standings, better_than
from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.agreement import agreement
from fedmerit.scoring.files import totals_of
from fedmerit.scoring.rewards import Rule, payouts
from fedmerit.scoring.scores import influence
from fedmerit.scoring.share_intervals import PaidApart, Spans, paid_apart, share_intervals, visible_gaps
from fedmerit.scoring.types import Reports, Scores
from fedmerit.scoring.uncertainty import compare_pairs

MOST_INFLUENCE = 20
"""The most members in the table of who influences whom."""

# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Facts(Standings):
    """What happened in a run, how sure that is, what is paid, and whether it can be trusted.

    Arguments as in `Standings`.
    """

    # -------------------------------------------------------------------------------------------------- money

    @property
    def decision(self) -> Decision | None:
        """The decision in force, with the real names; None if there is none that verifies."""
        book = self.source.book
        return book.decisions[-1] if book and book.decisions and self.source.settings is not None else None

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
        terms = self.terms
        return (terms.utility, terms.score, terms.missing) != (
            str(self.utility),
            "PHI" if self.settled else "ALPHA",
            self.source.missing,
        )

    @property
    def other_runs(self) -> bool:
        """Whether the decision rests on runs that are not counted here."""
        return self.decision is not None and not self.decision.recomputed

    @property
    def usual(self) -> bool:
        """Whether the terms pay by the contribution that ranks members here, and by the rule alone."""
        terms = self.terms
        return not self.other_basis and (terms.equal, terms.floor, terms.cap) == (0.0, 0.0, 1.0)

    @cached_property
    def spans(self) -> Spans | None:
        """The intervals of the decided shares, with the real names; None if they are unknown."""
        one = self.decision
        return None if one is None or one.total is None else share_intervals(one.total, one.shares)

    @cached_property
    def _decided_better(self) -> npt.NDArray[np.bool_] | None:
        one = self.decision
        return None if one is None or one.total is None else better_than(one.total)

    @property
    def decided_apart(self) -> PaidApart | None:
        """Indistinguishable members whom the decision pays visibly apart, with the real names."""
        one, better = self.decision, self._decided_better
        if one is None or one.total is None or better is None:
            return None
        return paid_apart(one.total, one.shares, better)

    def apart_from(self, client: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return who is indistinguishable from a member: those paid visibly less, and those paid more."""
        one, better = self.decision, self._decided_better
        if one is None or one.total is None or better is None or client not in one.total.clients:
            return (), ()
        names, gap = one.total.clients, visible_gaps(one.total, one.shares, better)
        place = names.index(client)
        less, more = (np.flatnonzero(row) for row in (gap[place], gap[:, place]))
        return tuple(names[i] for i in less), tuple(names[i] for i in more)

    @cached_property
    def payable(self) -> Scores:
        """The summed score to pay by: the one that the decision names, or the contribution."""
        return self._payable(self.source)

    def _payable(self, source: Source) -> Scores:
        rounds = {str(self.utility): source.rounds, **source.companions}[self.terms.utility]
        return self._summed(source, self.terms.score, self.terms.missing, rounds)

    @cached_property
    def rules(self) -> tuple[RuleFacts, ...]:
        """What every rule would pay."""
        total = self._payable(self.original or self.source)
        known = dict.fromkeys(
            (self.terms.rule, *get_args(Rule))
        )  # that of the decision, or the usual one, first
        return tuple(self._rule(total, rule) for rule in known)

    def _rule(self, total: Scores, rule: Rule) -> RuleFacts:
        """Return the facts of one rule, from the scores under real names.

        Messages come only from the scores under the names shown, so that they never contain a real name.
        """
        said: tuple[str, ...] = ()
        problem, names = "", self.source.names
        try:
            said = self.terms.divide(self.payable, self.liars(self.source), rule).notes
        except UndefinedShares as error:
            problem = error.note
        except InputError as error:
            problem = str(error)
        try:
            divided = self.terms.divide(total, self.liars(self.original or self.source), rule)
        except (UndefinedShares, InputError):
            return RuleFacts(rule, problem or Note("no-division"), {}, 1, {}, ())
        spans = share_intervals(total, divided)
        apart = self.apart({names[name]: share for name, share in divided.items()})
        ratios = {names[name]: share.as_integer_ratio() for name, share in divided.items()}
        one = math.lcm(*(bottom for _, bottom in ratios.values()))
        return RuleFacts(
            name=rule,
            problem="",
            parts={name: top * (one // bottom) for name, (top, bottom) in ratios.items()},
            one=one,
            shares={names[name]: share for name, share in divided.items()},
            notes=tuple(note for note in said if note not in self.payable.notes),
            spans=None if spans is None else {names[name]: span for name, span in spans.items()},
            apart=apart,
        )

    def absence_cost(self, client: str) -> AbsenceCost | None:
        """Compare the decision with one in which only this member's missed rounds count the other way.

        None if the member missed no round, or never reported.
        """
        decision = self.decision
        assert decision is not None
        total, terms = decision.total, decision.terms
        assert total is not None  # a statement is written from all rounds of its decision
        if client not in total.clients or total.coverage is None:
            return None
        place = total.clients.index(client)
        if total.coverage[place] >= 1:
            return None
        otherwise = self._counted_otherwise
        mixed: dict[str, Any] = {
            field: np.array(one)  # errors and what they follow from too
            for field in ("raw", "stderr", "blocks", "sketch")
            if (one := getattr(total, field)) is not None and getattr(otherwise, field) is not None
        }
        for field, array in mixed.items():
            array[..., place] = getattr(otherwise, field)[..., place]
        raw = mixed["raw"]
        try:
            divided = terms.divide(replace(total, values=raw, **mixed), decision.shares.forfeits)
            other = payouts(divided, terms.budget, terms.currency or None)
            other_cents: int | None = other.cents(other[client])
        except UndefinedShares:
            other_cents = None
        paid = decision.paid.cents(decision.paid[client])
        return AbsenceCost(float(total.raw[place]), float(raw[place]), paid, other_cents)

    @cached_property
    def _counted_otherwise(self) -> Scores:
        """The score to pay by with missed rounds counted the other way."""
        other: Missing = "zero" if self.terms.missing == "own-mean" else "own-mean"
        return self._summed(self.source, self.terms.score, other)

    # ---------------------------------------------------------------------------------------- can we trust it

    @cached_property
    def companions(self) -> tuple[Companion, ...]:
        """What other utilities say about the same members; beside settled scores, also what they reported."""
        found = [self._companion(utility, rounds) for utility, rounds in self.source.companions.items()]
        if self.settled and self.source.rounds:
            own = self._companion(str(self.utility), self.source.rounds)
            found.insert(0, replace(own, reported=True))
        return tuple(found)

    def _companion(self, utility: str, rounds: tuple[Reports, ...]) -> Companion:
        other = Facts(replace(self.source, rounds=rounds, companions={}, accounts=()))
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
        surely = {one.client: one.surely for one in self.standings}
        turned = {
            one.client: one.surely > 0
            for one in other.standings
            if one.surely * surely.get(one.client, 0) < 0
        }
        return Companion(utility, other, spearman, sure, confirms, tuple(contradicts), turned)

    def otherwise(self, client: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the measures by which a member who made the model worse surely improved it, or seems to.

        What members reported, beside settled scores, is an empty name.
        """
        turned, unconfirmed = [], []
        for one in self.companions:
            name, other = "" if one.reported else one.utility, one.facts.standing.get(client)
            if one.turned.get(client):
                turned.append(name)
            elif other is not None and other.total > 0:
                unconfirmed.append(name)
        return tuple(turned), tuple(unconfirmed)

    @cached_property
    def influence(self) -> Influence | None:
        """Who influences whom, in the last round in which that is defined."""
        for reports in reversed(self.source.rounds):
            if 2 <= reports.n <= MOST_INFLUENCE:
                try:
                    rows = tuple(tuple(row) for row in influence(reports).tolist())
                except UndefinedScore:
                    continue
                return Influence(reports.round, reports.clients, rows)
        return None

    @cached_property
    def truth(self) -> tuple[tuple[str, str, Mapping[str, float | None]], ...]:
        """Utility, kind of ground truth, and its rank correlation with each summed score."""
        source, found = self.source, []
        rounds_of = {str(self.utility): source.rounds, **source.companions}
        for utility, values in source.truth.items():
            totals = totals_of(rounds_of[utility], missing=source.missing)
            for value, truth in values.items():
                spearman = _agreements(totals, truth, source.clients)
                if source.phi:
                    summed = [one for one in source.phi.get(utility, ()) if one is not None]
                    whole = len(summed) == len(truth) == len(source.clients)
                    spearman["PHI"] = agreement(summed, truth).spearman if whole else None
                found.append((utility, value, spearman))
        return tuple(found)


def _agreements(
    totals: Mapping[str, Scores], truth: Sequence[float], clients: Sequence[str]
) -> dict[str, float | None]:
    spearman = {}
    for score, total in totals.items():
        known = total.as_dict()
        complete = len(truth) == len(clients) and all(name in known for name in clients)
        own = [known.get(name, 0.0) for name in clients]
        spearman[score] = agreement(own, truth).spearman if complete else None
    return spearman
