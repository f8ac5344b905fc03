"""What would be paid: by every rule, for absence counted the other way, and by terms not yet decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np

from fedmerit.errors import InputError, UndefinedShares, UnsettledShares
from fedmerit.ledger.decisions import Departure, Terms, departures_of
from fedmerit.ledger.rounds import aborted, in_words, unreported
from fedmerit.notes import Note, words
from fedmerit.report.facts import Facts
from fedmerit.report.source import Source
from fedmerit.report.text import apart_text
from fedmerit.scoring.amounts import Payouts, amount_of, decimals_assumed, payouts
from fedmerit.scoring.doubts import check_payable
from fedmerit.scoring.rewards import AnyRule, PaidApart, Rule, Shares, Spans, amounts_within


@dataclass(frozen=True)
class AbsenceCost:
    """What a member's rounds without a report cost: an estimate, with these rounds counted the other way."""

    score: float  # as decided
    other: float  # counted the other way: at the member's own mean in place of zero, or the reverse
    cents: int
    other_cents: int | None  # None if there are no shares then


@dataclass(frozen=True)
class RuleFacts:
    """Shares under one rule, or why there are none."""

    name: AnyRule
    problem: str = ""
    shares: Shares | None = None
    notes: tuple[str, ...] = ()
    spans: Spans | None = None  # intervals of the shares
    apart: PaidApart | None = None  # indistinguishable members whom it pays visibly apart


def rules_of(facts: Facts) -> tuple[RuleFacts, ...]:
    """Return what every rule would pay; first that of the decision, or the usual one."""
    others = () if facts.panel is not None else get_args(Rule)  # a panel has a rule of its own
    return tuple(_rule(facts, rule) for rule in dict.fromkeys((facts.terms.rule, *others)))


def _rule(facts: Facts, rule: AnyRule) -> RuleFacts:
    total = facts.payable
    try:
        divided = facts.divide(facts.terms, total, rule)
    except UndefinedShares as error:
        return RuleFacts(rule, error.note)
    except InputError as error:
        return RuleFacts(rule, str(error))
    return RuleFacts(
        name=rule,
        shares=divided,
        notes=tuple(note for note in divided.notes if note not in total.notes),
        spans=facts.spans_of(total, divided),
        apart=facts.apart(divided),
    )


def absence_cost(facts: Facts, client: str) -> AbsenceCost | None:
    """Compare the decision with one in which only this member's missed rounds count the other way.

    None if the member missed no round, or never reported.
    """
    decision = facts.decision
    assert decision is not None
    total, terms = decision.total, decision.terms
    if client not in total.clients or total.coverage is None or facts.panel is not None:
        return None
    i = total.clients.index(client)
    if total.coverage[i] >= 1:
        return None
    otherwise, mixed = facts.counted_otherwise, dict[str, Any]()
    for name in ("raw", "stderr", "blocks", "sketch"):  # errors and what they follow from too
        own, other = getattr(total, name), getattr(otherwise, name)
        if own is not None and other is not None:
            mixed[name] = np.array(own)
            mixed[name][..., i] = other[..., i]
    try:
        divided = terms.divide(replace(total, values=mixed["raw"], **mixed), decision.shares.forfeits)
        paid = payouts(divided, terms.budget, terms.currency or None)
        other_cents: int | None = paid.cents(paid[client])
    except UndefinedShares:
        other_cents = None
    cents = decision.paid.cents(decision.paid[client])
    return AbsenceCost(float(total.raw[i]), float(mixed["raw"][i]), cents, other_cents)


class PaidLine(NamedTuple):
    """What one member is paid, with its 95 % intervals if they are known."""

    client: str
    share: float
    amount: Decimal
    share_span: tuple[float, float] | None = None
    amount_span: tuple[Decimal, Decimal] | None = None


def paid_lines(
    divided: Shares, paid: Payouts, spans: Spans | None = None, unscored: Sequence[str] = ()
) -> list[PaidLine]:
    """Return what everybody is paid, best paid first; members without a score come last, with nothing."""
    known = spans or {}
    within = amounts_within(known, paid)
    best_first = sorted(paid.items(), key=lambda item: (-item[1], item[0]))
    lines = [
        PaidLine(name, divided[name], amount, known.get(name), within.get(name))
        for name, amount in best_first
    ]
    return [*lines, *(PaidLine(name, 0.0, paid.nothing) for name in unscored)]


@dataclass(frozen=True)
class Proposal:
    """Who would be paid what, by which terms, and what to know before it is recorded."""

    facts: Facts
    terms: Terms
    shares: Shares
    paid: Payouts
    notes: tuple[str, ...] = ()
    departures: tuple[Departure, ...] = ()  # from the terms that members signed
    warnings: tuple[str, ...] = ()

    @cached_property
    def spans(self) -> Spans | None:
        """The intervals of the shares; None if they are unknown."""
        return self.facts.spans_of(self.facts.total, self.shares)

    @property
    def apart(self) -> str:
        """That indistinguishable members would be paid visibly apart, in words; empty if they are not."""
        apart = self.facts.apart(self.shares)
        return apart_text(apart, self.shares) if apart else ""

    @cached_property
    def lines(self) -> list[PaidLine]:
        """What everybody is paid."""
        return paid_lines(self.shares, self.paid, self.spans, self.facts.unscored)

    def as_dict(self) -> dict[str, Any]:
        """Return the proposal for JSON; members who never reported are listed with 0."""
        divided, spans, lines = self.shares, self.spans, self.lines
        ends = {one.client: [*map(str, one.amount_span)] for one in lines if one.amount_span}
        return {
            "departures": {one.term: {"signed": one.signed, "used": one.used} for one in self.departures},
            "budget": str(self.paid.budget),
            "currency": self.paid.currency,
            "rule": divided.rule,
            "unpaid": str(self.paid.unpaid),
            "shares": {one.client: one.share for one in lines},
            "payouts": {one.client: str(one.amount) for one in lines},
            "share_intervals": None if spans is None else {name: list(span) for name, span in spans.items()},
            "payout_intervals": None if spans is None else ends,
            "equal": divided.equal,
            "fence": None if divided.fence is None else divided.fence.as_dict(),
            "notes": [*map(str, self.facts.doubts), *self.notes, *filter(None, [self.apart]), *self.warnings],
        }

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the heading and the lines of a table: shares and amounts, and their intervals if known."""
        ends = ("share_low", "share_high", "payout_low", "payout_high") if self.spans is not None else ()
        unknown = (None, None)
        yield ("client", "share", "payout", *ends)
        for one in self.lines:
            interval = (*(one.share_span or unknown), *(one.amount_span or unknown)) if ends else ()
            yield (one.client, one.share, one.amount, *interval)


def score_to_pay(source: Source, asked: str | None) -> str | None:
    """Return the score that is paid: as asked for, otherwise as agreed; None for the usual one.

    Raise UnsettledShares if that is PHI, and the run has none.
    """
    agreed = source.config.payment.score if source.config else "auto"
    score = asked or (None if agreed == "auto" else agreed)
    if score is None and source.unsettled:
        raise UnsettledShares(Note("settlement-reported", why=source.unsettled), code="unsettled")
    return score


PANEL_HAS_NONE = ("rule", "equal", "floor", "cap")
"""Terms that a panel does not have."""


def propose(facts: Facts, budget: str, chosen: Mapping[str, Any], *, dry_run: bool = False) -> Proposal:
    """Divide a budget by the terms that were agreed, or by others in ``chosen``, where None stands for them.

    Args:
        facts: of the run, by the score to pay by.
        budget: the amount, as people write it.
        chosen: terms by their names in `Terms`.
        dry_run: whether nothing will be recorded; numbers of a settlement that is still open may change then.

    Raises:
        DoubtfulShares, UnsettledShares, UndefinedShares: nobody can be paid by these scores.
    """
    config = facts.source.config
    asked = {key: value for key, value in chosen.items() if value is not None}
    coin = _currency(budget, asked.pop("currency", ""), config.payment.currency if config else "")
    terms = replace(facts.agreed, budget=budget, currency=coin, **asked)
    if facts.panel is not None and (other := next((term for term in PANEL_HAS_NONE if term in asked), "")):
        raise InputError(f"--{other}: a panel pays by the rule hands alone, without equal part, floor or cap")
    check_payable(facts.doubts, terms.rule, despite=terms.despite_doubts)
    account = facts.account if facts.settled else None
    if account is not None:
        account.check_payable(terms.rule, despite=terms.despite_doubts)
    try:
        divided = facts.divide(terms, facts.total)
    except UndefinedShares as error:
        if not facts.doubts:
            raise
        raise UndefinedShares(f"nothing is paid: {error}. {' '.join(map(str, facts.doubts))}") from error
    warnings = []
    if facts.unfinished:
        closed, planned = facts.unfinished
        warnings.append(words("terminal.pays-unfinished", closed=closed, planned=planned))
    if dry_run and account is not None and (still := account.provisional()):
        warnings.append(str(still))
    rounds = facts.source.closed
    notes: list[str] = [*divided.notes, *facts.absence_notes, *in_words(aborted(rounds), unreported(rounds))]
    notes += facts.source.notes
    if account is not None and not account.witnessed:
        notes.append(Note("settlement-credit"))
    if coin and decimals_assumed(coin):
        notes.append(Note("decimals-assumed", currency=coin))
    return Proposal(
        facts=facts,
        terms=terms,
        shares=divided,
        paid=payouts(divided, budget, coin or None),
        notes=tuple(dict.fromkeys(notes)),
        departures=departures_of(terms, config) if config else (),
        warnings=tuple(warnings),
    )


def _currency(budget: str, asked: str, agreed: str) -> str:
    """Return the currency of a budget: the one asked for, else the one agreed on, else the one it names."""
    try:
        named, expected = amount_of(budget)[1], asked or agreed
    except InputError as error:
        raise InputError(f"--budget: {error}") from error
    if named and expected and named != ("EUR" if expected == "€" else expected):
        raise InputError(f"--budget: expected an amount in {expected}, got one in {named}")
    return expected or named or ""
