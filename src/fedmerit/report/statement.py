"""A statement for each member: what it did, what it earns, what absence cost, and how sure that is.

Statements are for people who read nothing else about a run: Markdown, and JSON with the same facts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from fedmerit.config import Config
from fedmerit.errors import UndefinedShares
from fedmerit.ledger.decisions import Decision, cents, money
from fedmerit.ledger.records import aborted, unreported
from fedmerit.notes import numbered, planted
from fedmerit.protocol.messages import Round
from fedmerit.report.page.text import SCORES, about, listed, noun, spoken
from fedmerit.report.terminal import (
    MOST_COMPARED,
    Standing,
    Summary,
    bare_text,
    signed,
    summarise,
    total_text,
)
from fedmerit.scoring.accumulate import Missing, accumulate
from fedmerit.scoring.rewards import payouts, shares
from fedmerit.scoring.uncertainty import compare_pairs
from fedmerit.storage.run_folder import write

# --------------------------------------------------------------------------------------------------- facts

STATUSES = ("counted", "silent", "declined", "blamed", "lost", "away")


@dataclass(frozen=True)
class AbsenceCost:
    """What a member's rounds without a report cost: an estimate, with these rounds counted the other way."""

    score: float  # as decided
    other: float  # counted the other way: at the member's own mean in place of zero, or the reverse
    cents: int
    other_cents: int | None  # None if there are no shares then


@dataclass(frozen=True)
class Statement:
    """Everything that one member is told."""

    member: str
    decision: Decision
    rounds: Mapping[str, tuple[int, ...]]  # by status, one of STATUSES
    aborted: tuple[int, ...]  # rounds that did not change the model
    unreported: tuple[int, ...]  # summed rounds without any report, which are in nobody's score
    standing: Standing | None  # None if the member never reported
    cents: int
    share: float
    cost: AbsenceCost | None  # None if no round was missed
    like: tuple[str, ...] | None  # statistically indistinguishable members; None if unknown
    names: bool  # whether others may be named
    head: str
    members: int
    planned: int  # rounds of the whole run
    planted: str = ""  # which faults the settings planted; empty if none


def statements(rounds: Sequence[Round], config: Config, decision: Decision, head: str) -> Iterator[Statement]:
    """Yield a statement for each member of the roster, from the records of the ledger.

    Args:
        rounds: the rounds on which the decision rests.
        config: the settings of the run.
        decision: the decision as recorded.
        head: the head of the ledger that includes the decision.
    """
    terms = decision.terms
    counted = rounds[: decision.rounds]
    scored = [found for one in counted if (found := one.to_reports(terms.utility)) is not None]
    summary = summarise(scored, score=terms.score, missing=terms.missing, clients=config.clients)
    standing = {one.client: one for one in summary.standings}
    alike = _alike(summary)
    named = config.scoring.visibility == "all"
    for name in config.clients:
        yield Statement(
            member=name,
            decision=decision,
            rounds=_what_happened(name, counted),
            aborted=aborted(counted),
            unreported=unreported(counted),
            standing=standing.get(name),
            cents=cents(decision.paid.by_client.get(name, Decimal(0))),
            share=decision.shares.by_client.get(name, 0.0),
            cost=_cost(name, scored, decision),
            like=alike.get(name),
            names=named,
            head=head,
            members=len(config.clients),
            planned=config.training.rounds,
            planted=planted(config.corruption, None if named else {name: name}),
        )


def _what_happened(name: str, rounds: Sequence[Round]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {status: [] for status in STATUSES}
    blamed = False
    for one in rounds:
        blamed = blamed or name in one.blamed
        if not one.reports:  # aborted or unreported rounds are listed separately
            continue
        if name in one.reports:
            found["counted"].append(one.number)
        elif name in one.silent:
            found["silent"].append(one.number)
        elif name in one.declined:
            found["declined"].append(one.number)
        elif blamed:
            found["blamed"].append(one.number)
        else:
            found["lost" if name in one.scheduled else "away"].append(one.number)
    return {status: tuple(numbers) for status, numbers in found.items()}


def _cost(name: str, scored: Sequence[Any], decision: Decision) -> AbsenceCost | None:
    """Compare the decision with one in which only this member's missed rounds count the other way."""
    total, terms = decision.total, decision.terms
    if name not in total.clients or total.coverage is None:
        return None
    place = total.clients.index(name)
    if total.coverage[place] >= 1:
        return None
    counted_otherwise: Missing = "zero" if terms.missing == "own-mean" else "own-mean"
    other = accumulate(scored, score=terms.score, missing=counted_otherwise)
    raw = np.array(total.raw)
    raw[place] = other.raw[place]
    stderr = None
    if total.stderr is not None and other.stderr is not None:
        stderr = np.array(total.stderr)
        stderr[place] = other.stderr[place]
    try:
        divided = shares(
            replace(total, values=raw, raw=raw, stderr=stderr),
            terms.rule,
            floor=terms.floor,
            cap=terms.cap,
            on_undefined=terms.on_undefined,
        )
        other_cents: int | None = cents(payouts(divided, terms.budget)[name])
    except UndefinedShares:
        other_cents = None
    paid = cents(decision.paid[name])
    return AbsenceCost(float(total.raw[place]), float(raw[place]), paid, other_cents)


def _alike(summary: Summary) -> dict[str, tuple[str, ...]]:
    """Return member -> members statistically indistinguishable from it, best first; empty if unknown."""
    total = summary.total
    if total.stderr is None or total.n > MOST_COMPARED:
        return {}
    better = compare_pairs(total).better
    alike = ~(better | better.T)
    np.fill_diagonal(alike, False)
    rows = dict(zip(total.clients, alike, strict=True))
    at = {name: i for i, name in enumerate(total.clients)}
    return {name: tuple(one for one in total.ranking() if row[at[one]]) for name, row in rows.items()}


# --------------------------------------------------------------------------------------------------- words

_WORDS = {
    "silent": "your update was in the sum, but no report of yours arrived in time",
    "declined": "you declined, and your update was not in the sum",
    "blamed": "you were left out, because you broke the protocol, as a record of the ledger proves",
    "lost": "you were expected, but your update did not arrive",
    "away": "you were not on the list of who takes part",
}


def write_statements(
    folder: Path, rounds: Sequence[Round], config: Config, decision: Decision, head: str
) -> int:
    """Write ``statements/NAME.md`` and ``.json`` for each member; return the number of members."""
    target = folder / "statements"
    target.mkdir(exist_ok=True)
    count = 0
    for one in statements(rounds, config, decision, head):
        write(target / f"{one.member}.md", as_markdown(one).encode())
        write(target / f"{one.member}.json", (json.dumps(as_dict(one), indent=1) + "\n").encode())
        count += 1
    return count


def as_markdown(one: Statement) -> str:
    """Return the statement as Markdown."""
    terms = one.decision.terms
    parts = [
        f"# Statement for {one.member}",
        *([one.planted] if one.planted else []),
        _opening(one),
        *_doubts(one),
        "## What you did",
        "\n".join(_did(one)),
        "## What you earn",
        _earns(one),
        about(terms),
        "## What absence or silence cost",
        _costs(one),
        "## How sure this is",
        "\n".join(_sure(one)),
        "## What it rests on",
        f"Record {one.decision.record} of the ledger. Keep this head of the ledger:",
        f"    {one.head}",
        "If somebody changes the ledger later, `fedmerit verify DIR --head HEAD` tells you. "
        "Compare it with the other members out of band, not through the coordinator.",
    ]
    return "\n\n".join(parts) + "\n"


def _opening(one: Statement) -> str:
    decision = one.decision
    after = _rounds(decision.rounds)
    if decision.rounds < one.planned:
        after = f"{decision.rounds} of {_rounds(one.planned)} (the run was not over)"
    text = f"Decision {decision.number}, after {after}, {one.members} members."
    if decision.replaces:
        text += f" It takes the place of decision {decision.replaces}."
    return text


def _doubts(one: Statement) -> Iterator[str]:
    """Yield the doubts about the reports on which the decision rests."""
    for doubt in one.decision.doubts:
        despite = " The decision was made despite this." if doubt in one.decision.overruled else ""
        yield f"**{doubt.title}.** {doubt.text}{despite}"


def _did(one: Statement) -> Iterator[str]:
    possible = sum(len(numbers) for numbers in one.rounds.values())
    counted = one.rounds["counted"]
    yield f"- In {len(counted)} of {_rounds(possible)} your update was in the sum and your report counted."
    for status in STATUSES[1:]:
        if one.rounds[status]:
            yield f"- {_in(one.rounds[status])}: {_WORDS[status]}."
    if one.aborted:
        yield f"- {_in(one.aborted)} did not come about: the shared model stayed as it was."
    if one.unreported:
        were, it = ("was", "it") if len(one.unreported) == 1 else ("were", "them")
        yield (
            f"- {_in(one.unreported)} {were} summed, but no report on {it} arrived from anybody: how the "
            "shared model changed then is in nobody's score."
        )


def _earns(one: Statement) -> str:
    decision = one.decision
    budget, rule = money(cents(decision.paid.budget)), decision.terms.rule
    if one.standing is None:
        return (
            f"**0.00** of {budget}: you never reported. Without a report there is no score, and no rule pays."
        )
    measure = spoken(decision.terms.utility)
    text = f"**{money(one.cents)}** of {budget}, for a share of {one.share:.2%}, by the rule {rule}."
    gain = signed(decision.total.gain, one.standing.digits)
    text += (
        f" {_number(decision.terms.score)}, summed over rounds, is {bare_text(one.standing)}; "
        f"the {measure} of the shared model changed by {gain} {_over(one)}."
    )
    if decision.shares.status != "ok":
        text += " The scores could not be turned into shares, so the agreed fallback was used."
    if one.standing.total < 0 and rule != "equal":
        text += " Below zero counts as zero."
    return text


def _number(score: str) -> str:
    """Return the name of the score that is paid by, addressed to the member."""
    if score not in SCORES:
        return "Your contribution"
    what = SCORES[score].format("your")
    return f"{what[0].upper()}{what[1:]} ({score})"


def _over(one: Statement) -> str:
    """Return a phrase for the rounds that the stated change covers."""
    if not one.unreported:
        return "in all"
    return (
        f"over the rounds with reports; that leaves {numbered(one.unreported)} out, which nobody reported on"
    )


def _costs(one: Statement) -> str:
    missed = [number for status in STATUSES[1:] for number in one.rounds[status]]
    if one.standing is None:
        return "You have no report in any round, so there is nothing to compare with."
    if one.cost is None:
        return "Nothing: there is a report of yours for every round that was counted."
    cost = one.cost
    without = f"{_in(tuple(sorted(missed)))} without a report of yours"
    if one.decision.terms.missing == "own-mean":
        without += " counted as your own average over the rounds you did report."
        as_other = "Counted as zero"
    else:
        without += " counted as zero."
        as_other = "Counted as your own average over the rounds you did report"
    other, score = (signed(value, one.standing.digits) for value in (cost.other, cost.score))
    then = f"{as_other}, your {noun(one.decision.terms.score)} would be {other} where it is {score}"
    if cost.other_cents is None:
        then += ", and the scores would allow no shares."
    else:
        gap = cost.other_cents - cost.cents
        more = f"{money(abs(gap))} {'more' if gap > 0 else 'less'}" if gap else "the same"
        then += f", and you would be paid {money(cost.other_cents)}: {more}."
    return (
        f"{without} {then} This is an estimate: nobody knows what you would have contributed in those rounds."
    )


def _sure(one: Statement) -> Iterator[str]:
    if one.standing is None:
        yield "You have no score of which one could be more or less sure."
        return
    if one.standing.interval is None or one.standing.rank_interval is None:
        yield "No standard errors were reported, so how sure this is cannot be said."
        return
    low, high = one.standing.rank_interval
    rank = f"rank {low}" if low == high else f"some rank from {low} to {high}"
    yield (
        f"Your {noun(one.decision.terms.score)} is {total_text(one.standing)} (95 % interval for the "
        f"sampling error of the test set in this run), which means {rank} of {one.decision.total.n}."
    )
    if one.like is None:
        return
    if not one.like:
        yield "The test can tell you apart from every other member."
    elif one.names:
        yield f"The test cannot tell you apart from {listed(list(one.like), 12)}."
    else:
        others = "one other member" if len(one.like) == 1 else f"{len(one.like)} other members"
        yield f"The test cannot tell you apart from {others}."


def _rounds(number: int) -> str:
    return "1 round" if number == 1 else f"{number} rounds"


def _in(numbers: Sequence[int]) -> str:
    return numbered(numbers).capitalize()


def as_dict(one: Statement) -> dict[str, Any]:
    """Return the statement as a dictionary for JSON."""
    decision, standing = one.decision, one.standing
    return {
        "member": one.member,
        "decision": decision.number,
        "replaces": decision.replaces,
        "record": decision.record,
        "head": one.head,
        **vars(decision.terms),
        "planted": one.planted,
        "doubts": [str(doubt) for doubt in decision.doubts],
        "rounds": {status: list(numbers) for status, numbers in one.rounds.items()},
        "aborted": list(one.aborted),
        "unreported": list(one.unreported),
        "cents": one.cents,
        "share": one.share,
        "contribution": None if standing is None else standing.total,
        "interval": None if standing is None or standing.interval is None else list(standing.interval),
        "ranks": None if standing is None or standing.rank_interval is None else list(standing.rank_interval),
        "cannot_be_told_apart_from": one.like if one.like is None or one.names else len(one.like),
        "absence": None if one.cost is None else {"estimate": True, **vars(one.cost)},
    }
