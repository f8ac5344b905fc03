"""The first part of a page with a decision: who is paid how much, why, how sure that is, and who signed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from fedmerit.ledger.decisions import Decision
from fedmerit.notes import words
from fedmerit.report.facts import Facts
from fedmerit.report.findings import Standing
from fedmerit.report.text import (
    amounts_text,
    apart_text,
    dashed,
    digits_for,
    made_worse,
    money_text,
    share_text,
    signed,
    span_text,
    spoken,
    worth,
)
from fedmerit.scoring.rewards import Payouts, money_of, payouts
from fedmerit.scoring.share_intervals import Spans, amounts_within

# ------------------------------------------------------------------------------------------------ sentences


def headline(facts: Facts, one: Decision) -> str:
    """Return in one sentence who is paid most, and who gets nothing, members without a score included."""
    currency, names = facts.source.heading.currency, facts.source.names
    budget = money_text(one.paid.budget, currency)
    amounts = sorted(one.paid.items(), key=lambda item: (-item[1], names[item[0]]))
    most = amounts[0][1]
    best = tuple(names[name] for name, amount in amounts if amount == most)
    silent = _without_score(facts, one)
    nothing = (*(names[name] for name, amount in amounts if not amount), *silent)
    amount, n = money_text(most, currency), len(amounts) + len(silent)
    if not most:
        return words("money.nobody", budget=budget)
    if len(best) == n:
        return words("money.same", n=n, amount=amount)
    if len(best) > 3:
        code = "money.some-same" if len(best) + len(nothing) == n else "money.most-several"
        said = words(code, number=len(best), n=n, amount=amount)
    elif len(best) > 1:
        said = words("money.most-shared", clients=best, amount=amount)
    else:
        said = words("money.most", client=best[0], amount=amount, budget=budget)
    if not nothing:
        return said
    if len(nothing) > 3:
        return words("money.and-some-nothing", said=said, number=len(nothing))
    return words("money.and-nothing", said=said, clients=nothing)


def _without_score(facts: Facts, one: Decision) -> list[str]:
    """Return the members who have no score, and so no part in the decision, under the names shown."""
    paid = {facts.source.names[name] for name in one.paid}  # some may have reported in another run
    return [name for name in facts.unscored if name not in paid]


def sure(facts: Facts, one: Decision) -> Iterator[str]:
    """Yield how sure the amounts are: the interval of the largest one, and ties, paid apart or not."""
    names, spans, currency = facts.source.names, facts.spans, facts.source.heading.currency
    if spans is None:
        yield words("money.unsure")
        return
    best = min(one.paid.items(), key=lambda item: (-item[1], names[item[0]]))[0]
    low, high = (money_text(end, currency) for end in amounts_within(spans, one.paid)[best])
    yield words("money.span", client=names[best], low=low, high=high)
    if apart := facts.decided_apart:
        yield apart_text(apart, one.shares, names)
        return
    by_contribution = facts.terms.rule != "equal" and not (facts.other_basis or facts.other_runs)
    if by_contribution and (alike := facts.alike.get(names[best])):
        yield words("money.alike", client=names[best], others=len(alike))


def worse(facts: Facts) -> str:
    """Return who made the model worse, and which measures say otherwise; empty if that is nobody."""
    return "" if facts.withheld or not (said := made_worse(facts, 3)) else words("money.worse", worse=said)


# -------------------------------------------------------------------------------------------------- reasons


def reasons(facts: Facts) -> dict[str, str]:
    """Return one line for each member shown: why it is paid what it is paid."""
    names = facts.source.names
    found = {one.client: _named(facts, one.client, _reason(facts, one)) for one in facts.standings}
    found |= dict.fromkeys(
        facts.unscored, words("reason.never-stated" if facts.settled else "reason.never-reported")
    )
    decision = facts.decision
    if decision is None or not (facts.other_basis or facts.other_runs):
        return found
    if decision.total is None:
        return {names[name]: words("reason.other-runs") for name in decision.paid} | dict.fromkeys(
            set(found) - {names[name] for name in decision.paid}, words("reason.other-runs")
        )
    total, score = decision.total, decision.terms.score
    digits = digits_for(max(map(abs, total.raw.tolist())))
    return found | {
        names[name]: words("reason.other", score=score, value=signed(value, digits))
        for name, value in zip(total.clients, total.raw.tolist(), strict=True)
    }


def _named(facts: Facts, client: str, reason: str) -> str:
    """Return a member's reason; if the settlement named the member, also for what."""
    accounts = facts.source.accounts if facts.settled else ()
    lied = dict.fromkeys(each[client] for one in accounts for each in one.named.values() if client in each)
    for how in lied:
        reason = words("reason.named", reason=reason, how=words(f"lie.{how}"))
    if lied and (part := facts.terms.forfeit):
        reason = words("reason.forfeited", reason=reason, part=part)
    return reason


def _reason(facts: Facts, one: Standing) -> str:
    added, plus = (worth(facts, one.total, unit=True, sign=sign) for sign in ("+", ""))
    if facts.unit == 1 and facts.utility:
        measure = spoken(facts.utility)
        added, plus = (words("number.measured", value=value, measure=measure) for value in (added, plus))
    if facts.decision is not None and facts.terms.rule == "equal":
        return words("reason.equal", added=added)
    if one.client in facts.harmful:
        turned, unconfirmed = facts.otherwise(one.client)
        if turned:
            return words("reason.worse-turned", added=added)
        return words("reason.worse-alone" if unconfirmed else "reason.worse", added=added)
    if one.total < 0:
        return words("reason.below", added=added)
    if one.surely <= 0 and one.interval is not None:
        return words("reason.maybe", added=added)
    if one.coverage < 1:
        return words("reason.partly", added=plus, part=one.coverage)
    return words("reason.added", added=plus)


# ---------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class PaidLine:
    """One member in the table of payouts; the bar and its interval are in percent of the longest."""

    client: str
    share: str
    amount: str
    share_span: str
    amount_span: str
    bar: float
    low: float | None = None
    high: float | None = None
    why: str = ""


@dataclass(frozen=True)
class PaidTable:
    """The table of payouts: its lines, best paid first, and its foot."""

    lines: tuple[PaidLine, ...] = ()
    foot: tuple[tuple[str, str], ...] = ()
    sure: bool = False  # whether amounts have intervals


def decided(facts: Facts) -> PaidTable:
    """Return the payouts of the decision in force."""
    one = facts.decision
    assert one is not None
    return _table(facts, one.paid, one.shares, facts.spans, facts.source.names, _without_score(facts, one))


def proposed(facts: Facts, budget: str) -> PaidTable:
    """Return the payouts by the usual rule; an empty table if it allows none."""
    first = facts.rules[0]
    if first.problem:
        return PaidTable()
    parts = {name: Fraction(part, first.one) for name, part in first.parts.items()}
    paid = payouts(parts, budget, facts.terms.currency or None)
    names = {name: name for name in paid}
    return _table(facts, paid, first.shares, first.spans, names, facts.unscored)


def _table(
    facts: Facts,
    paid: Payouts,
    divided: Mapping[str, float],
    spans: Spans | None,
    names: Mapping[str, str],
    unscored: Sequence[str],
) -> PaidTable:
    best_first = sorted(paid.items(), key=lambda item: (-item[1], names[item[0]]))
    within, why = amounts_within(spans or {}, paid), reasons(facts)
    most = max([*paid.values(), *(high for _, high in within.values()), money_of(1, paid.currency)])
    lines = [
        PaidLine(
            client=names[name],
            share=share_text(divided[name], 2),
            amount=money_text(amount),
            share_span=span_text((spans or {}).get(name)),
            amount_span=dashed(amounts_text(within.get(name))),
            bar=_percent(amount, most),
            low=_percent(within[name][0], most) if name in within else None,
            high=_percent(within[name][1], most) if name in within else None,
            why=why.get(names[name], ""),
        )
        for name, amount in best_first
    ]
    none, nothing = share_text(0.0, 2), money_text(paid.nothing)
    lines += [PaidLine(name, none, nothing, "-", "-", 0.0, why=why.get(name, "")) for name in unscored]
    foot = ((words("pay.unpaid"), money_text(paid.unpaid)), (words("pay.budget"), money_text(paid.budget)))
    return PaidTable(tuple(lines), foot, spans is not None)


def _percent(amount: Decimal, most: Decimal) -> float:
    return round(float(100 * amount / most), 2)
