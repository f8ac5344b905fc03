"""A statement for each member: what it did, what it earns, what absence cost, and how sure that is.

Statements are for people who read nothing else about a run: Markdown, and JSON with the same facts. A
statement is written from the `Facts` of the rounds on which a decision rests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from fedmerit.config import Config
from fedmerit.ledger.account import Account
from fedmerit.ledger.decisions import Decision, cents, money
from fedmerit.notes import planted, words
from fedmerit.protocol.outcome import Round
from fedmerit.report.facts import Facts
from fedmerit.report.findings import Happened
from fedmerit.report.source import Span, source_as_decided
from fedmerit.report.text import (
    about,
    bare_text,
    noun,
    settlement_sentences,
    signed,
    spoken,
    total_text,
)
from fedmerit.scoring.share_intervals import amounts_within
from fedmerit.storage.run_folder import write

STATUSES: tuple[Happened, ...] = ("counted", "silent", "unstated", "declined", "blamed", "lost", "away")
"""What can happen in a round of a ledger."""
MARKDOWN = {"b": "**", "/b": "**", "code": "`", "/code": "`"}


def facts_as_decided(
    rounds: Sequence[Round],
    config: Config,
    decision: Decision,
    head: str,
    accounts: Sequence[Account] = (),
) -> Facts:
    """Return the facts of a decision; arguments as in :func:`fedmerit.report.source.source_as_decided`."""
    settled = accounts if decision.terms.score == "PHI" else ()
    source = source_as_decided(rounds, config, decision, head, settled)
    return Facts(source, score=decision.terms.score)


def write_statements(
    folder: Path,
    rounds: Sequence[Round],
    config: Config,
    decision: Decision,
    head: str,
    accounts: Sequence[Account] = (),
) -> int:
    """Write ``statements/NAME.md`` and ``.json`` for each member; return the number of members."""
    target = folder / "statements"
    target.mkdir(exist_ok=True)
    facts = facts_as_decided(rounds, config, decision, head, accounts)
    for name in facts.source.clients:
        write(target / f"{name}.md", as_markdown(facts, name).encode())
        write(target / f"{name}.json", (json.dumps(as_dict(facts, name), indent=1) + "\n").encode())
    return len(facts.source.clients)


def as_markdown(facts: Facts, client: str) -> str:
    """Return a member's statement as Markdown."""
    decision, book = _decided(facts)
    parts = [
        words("statement.title", client=client),
        *([faults] if (faults := _planted(facts, client)) else []),
        " ".join(_opening(facts)),
        *_doubts(decision),
        words("statement.did"),
        "\n".join(_did(facts, client)),
        *([words("statement.adds-up"), "\n".join(_adds_up(facts, client))] if facts.settled else []),
        *(["\n".join(settlement_sentences(facts))] if facts.settled else []),
        words("statement.earn"),
        " ".join(_earns(facts, client)),
        about(decision.terms),
        words("statement.cost-settled" if facts.settled else "statement.cost"),
        " ".join(_costs(facts, client)),
        words("statement.sure"),
        "\n".join(_sure(facts, client)),
        words("statement.rests"),
        words("statement.record", record=decision.record),
        f"    {book.head}",
        words("statement.keep", MARKDOWN),
    ]
    if decision.after:
        heads = "\n".join(f"    {head}" for _, head in decision.after)
        parts += [words("statement.after"), heads, words("statement.keep-after", MARKDOWN)]
    return "\n\n".join(parts) + "\n"


def own_settlement(facts: Facts, client: str) -> dict[str, Any]:
    """Return what a member stated in the settlement, and what everybody may know of the others."""
    lines = []
    for one, past in _accounts(facts):
        for line in one.lines:
            if client in line.participants:
                place = line.participants.index(client)
                lines.append({
                    "round": None if line.round is None else past + line.round,
                    "stated": None if (value := line.stated[place]) is None else str(value),
                    "counted": None if (value := line.counted[place]) is None else str(value),
                    "utility": None if value is None else value * one.scale,
                    "sum": None if line.sum is None else str(line.sum),
                    "product": str(line.product),
                    "holds": line.holds,
                })  # fmt: skip
    accounts = facts.source.accounts
    return {
        "rounds": lines,
        "named": list(dict.fromkeys(name for one in accounts for name in one.liars)),
        "missing": list(dict.fromkeys(name for one in accounts for name in one.missing)),
        "countersigned": len(accounts[-1].countersigned),
    }


def _accounts(facts: Facts) -> Iterator[tuple[Account, int]]:
    """Yield the account of each run, and how many rounds there are before it."""
    past = [span.before for span in facts.source.spans] or [0]
    yield from zip(facts.source.accounts, past, strict=True)


def _adds_up(facts: Facts, client: str) -> Iterator[str]:
    """Yield the lines of a member's statement on the equations of the settlement."""
    for line in own_settlement(facts, client)["rounds"]:
        where = words("settled.all-rounds")
        if line["round"] is not None:
            where = words("settled.round", round=line["round"])
        if line["stated"] is None:
            yield words("statement.settled-missing", where=where, product=int(line["product"]))
            continue
        worth, stated = signed(line["utility"], facts.digits), int(line["stated"])
        product, counted = int(line["product"]), int(line["counted"])
        if line["sum"] is None:
            yield words("statement.settled-open", where=where, stated=stated, worth=worth, product=product)
        elif line["holds"]:
            told = int(line["sum"])
            yield words("statement.settled-holds", where=where, stated=stated, worth=worth, sum=told)
        else:
            told = int(line["sum"])
            yield words("statement.settled-fails", where=where, stated=stated, sum=told, product=product)
        if counted != stated:
            yield words("statement.settled-counted", where=where, counted=counted, worth=worth)


def _decided(facts: Facts) -> tuple[Decision, Any]:
    assert facts.decision is not None
    return facts.decision, facts.source.book


def _planted(facts: Facts, client: str) -> str:
    """Return which faults the settings planted; others are named only if members see everybody's numbers."""
    return planted(facts.source.corruption, {client: client} if facts.source.private else None)


def _opening(facts: Facts) -> Iterator[str]:
    decision, _ = _decided(facts)
    planned, members = facts.source.planned or 0, len(facts.source.clients)
    number, rounds = decision.number, decision.counted
    if rounds < planned:
        yield words(
            "statement.decision-partly", number=number, rounds=rounds, planned=planned, members=members
        )
    else:
        yield words("statement.decision", number=number, rounds=rounds, members=members)
    if decision.replaces:
        yield words("statement.replaces", replaces=decision.replaces)
    if spans := facts.source.spans:
        each = tuple(_span(span) for span in spans if span.count)
        yield words("statement.runs", runs=len(spans), each=each)


def _span(span: Span) -> str:
    """Return which rounds are those of one of several runs."""
    first, last = span.before + 1, span.before + span.count
    run = words("statement.run-id", run=span.name) if span.name else words("statement.run-own")
    if span.count == 1:
        return words("statement.run-one", first=first, run=run)
    return words("statement.run", first=first, last=last, run=run)


def _doubts(decision: Decision) -> Iterator[str]:
    """Yield the doubts about the reports on which the decision rests."""
    for doubt in decision.doubts:
        said = words("statement.doubt", MARKDOWN, title=doubt.title, text=doubt.text)
        yield f"{said} {words('statement.despite')}" if doubt in decision.overruled else said


def _did(facts: Facts, client: str) -> Iterator[str]:
    counted = len(facts.rounds_of(client, "counted"))
    code = "statement.counted-settled" if facts.settled else "statement.counted"
    yield words(code, counted=counted, possible=len(facts.happened[client]))
    for status in STATUSES[1:]:
        if rounds := facts.rounds_of(client, status):
            yield words(f"why-you.{status}", rounds=rounds)
    if facts.source.aborted:
        yield words("statement.aborted", rounds=tuple(facts.source.aborted))
    if facts.source.unreported:
        yield words("statement.unreported", rounds=facts.source.unreported)


def _earns(facts: Facts, client: str) -> Iterator[str]:
    decision, _ = _decided(facts)
    standing, terms = facts.standing.get(client), decision.terms
    budget = money(cents(decision.paid.budget))
    if standing is None:
        code = "statement.never-stated" if facts.settled else "statement.never"
        yield words(code, MARKDOWN, budget=budget)
        return
    amount, share = money(cents(decision.paid[client])), decision.shares[client]
    yield words("statement.paid", MARKDOWN, amount=amount, budget=budget, share=share, rule=terms.rule)
    gain = signed(facts.total.gain, standing.digits)
    score, measure, total = words(f"score-of-yours.{terms.score}"), spoken(terms.utility), bare_text(standing)
    if left_out := facts.source.unreported:
        yield words(
            "statement.score-reported", score=score, total=total, measure=measure, gain=gain, rounds=left_out
        )
    else:
        yield words("statement.score", score=score, total=total, measure=measure, gain=gain)
    if decision.shares.status != "ok":
        yield words("pay.fallback")
    if standing.total < 0 and terms.rule != "equal":
        yield words("statement.below")


def _costs(facts: Facts, client: str) -> Iterator[str]:
    decision, _ = _decided(facts)
    standing, cost = facts.standing.get(client), facts.absence_cost(client)
    if standing is None:
        yield words("statement.cost-never-settled" if facts.settled else "statement.cost-never")
        return
    if cost is None:
        yield words("statement.cost-none-settled" if facts.settled else "statement.cost-none")
        return
    missed = facts.rounds_of(client, *STATUSES[1:])
    zero = decision.terms.missing == "zero"
    if facts.settled:
        told = "statement.missed-zero-settled" if zero else "statement.missed-own-mean-settled"
    else:
        told = "statement.missed-zero" if zero else "statement.missed-own-mean"
    yield words(told, rounds=missed)
    other, own = (signed(value, standing.digits) for value in (cost.other, cost.score))
    mean = "statement.other-own-mean-settled" if facts.settled else "statement.other-own-mean"
    counts = mean if zero else "statement.other-zero"
    then = words(counts, score=noun(decision.terms.score), other=other, own=own)
    if cost.other_cents is None:
        yield words("statement.other-none", then=then)
    elif cost.other_cents == cost.cents:
        yield words("statement.other-same", then=then, amount=money(cost.cents))
    else:
        gap = cost.other_cents - cost.cents
        code = "statement.other-more" if gap > 0 else "statement.other-less"
        yield words(code, then=then, amount=money(cost.other_cents), gap=money(abs(gap)))
    yield words("statement.estimate")


def _sure(facts: Facts, client: str) -> Iterator[str]:
    decision, _ = _decided(facts)
    standing = facts.standing.get(client)
    if standing is None:
        yield words("statement.sure-never")
        return
    if standing.rank_interval is None:
        yield words("sure.unknown")
        return
    low, high = standing.rank_interval
    score, total, n = noun(decision.terms.score), total_text(standing), facts.total.n
    if low == high:
        yield words("statement.rank", score=score, total=total, low=low, n=n)
    else:
        yield words("statement.ranks", score=score, total=total, low=low, high=high, n=n)
    like = facts.alike.get(client)
    if like is not None and not like:
        yield words("statement.alone")
    elif like and facts.source.private:
        yield words("statement.like-others", others=len(like))
    elif like:
        yield words("statement.like", clients=like)
    yield from _share_sure(facts, client)


def _share_sure(facts: Facts, client: str) -> Iterator[str]:
    """Yield how sure a member's share is, and which ties are paid apart."""
    decision, _ = _decided(facts)
    if facts.spans is not None:
        low, high = facts.spans[client]
        ends = [money(cents(end)) for end in amounts_within(facts.spans, decision.paid)[client]]
        yield words("statement.span", low=low, high=high, low_amount=ends[0], high_amount=ends[1])
    less, more = facts.apart_from(client)
    private = facts.source.private
    if less and private:
        yield words("statement.apart-more-others", others=len(less))
    elif less:
        yield words("statement.apart-more", clients=less)
    if more and private:
        yield words("statement.apart-less-others", others=len(more))
    elif more:
        yield words("statement.apart-less", clients=more)


def as_dict(facts: Facts, client: str) -> dict[str, Any]:
    """Return a member's statement as a dictionary for JSON."""
    decision, book = _decided(facts)
    standing, like, cost = facts.standing.get(client), facts.alike.get(client), facts.absence_cost(client)
    spans = None if facts.spans is None or client not in facts.spans else facts.spans
    ends = None if spans is None else amounts_within(spans, decision.paid)
    return {
        "member": client,
        "decision": decision.number,
        "replaces": decision.replaces,
        "record": decision.record,
        "head": book.head,
        **({"after": [list(one) for one in decision.after]} if decision.after else {}),
        **vars(decision.terms),
        "planted": _planted(facts, client),
        "doubts": [str(doubt) for doubt in decision.doubts],
        "rounds": {
            status: list(facts.rounds_of(client, status))
            for status in STATUSES
            if status != "unstated" or facts.settled
        },
        **({"settlement": own_settlement(facts, client)} if facts.settled else {}),
        "aborted": list(facts.source.aborted),
        "unreported": list(facts.source.unreported),
        "cents": cents(decision.paid.by_client.get(client, Decimal(0))),
        "cents_interval": None if ends is None else [cents(end) for end in ends[client]],
        "share": decision.shares.by_client.get(client, 0.0),
        "share_interval": None if spans is None else list(spans[client]),
        "contribution": None if standing is None else standing.total,
        "interval": None if standing is None or standing.interval is None else list(standing.interval),
        "ranks": None if standing is None or standing.rank_interval is None else list(standing.rank_interval),
        "cannot_be_told_apart_from": len(like) if like is not None and facts.source.private else like,
        "indistinguishable_but_paid": {
            code: len(others) if facts.source.private else list(others)
            for code, others in zip(("less", "more"), facts.apart_from(client), strict=True)
        },
        "absence": None if cost is None else {"estimate": True, **vars(cost)},
    }
