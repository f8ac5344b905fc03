"""What a statement for one member says: what happened, what it earns, what absence cost, whom it is like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np

from fedmerit.accumulate import Missing, accumulate
from fedmerit.config import Config
from fedmerit.errors import UndefinedShares
from fedmerit.federation.decisions import Decision, cents
from fedmerit.federation.journal import Round
from fedmerit.federation.unscored import aborted, unreported
from fedmerit.money import payouts
from fedmerit.rewards import shares
from fedmerit.sentences import planted
from fedmerit.summary import MOST_COMPARED, Standing, Summary, summarise
from fedmerit.uncertainty import compare_pairs

STATUSES = ("counted", "silent", "declined", "lost", "away")


@dataclass(frozen=True)
class Cost:
    """What rounds without a report cost, if they had counted as the member's own average: an estimate."""

    score: float  # as decided
    other: float  # under the other way of counting
    cents: int
    other_cents: int | None  # None where no shares exist then


@dataclass(frozen=True)
class Statement:
    """Everything one member is told."""

    member: str
    decision: Decision
    rounds: Mapping[str, tuple[int, ...]]  # by what happened: counted, silent, declined, lost, away
    aborted: tuple[int, ...]  # rounds in which nothing changed
    unreported: tuple[int, ...]  # summed, but without any report: what they changed is in nobody's score
    standing: Standing | None  # None without any report
    cents: int
    share: float
    cost: Cost | None  # None where nothing was missed
    like: tuple[str, ...] | None  # who cannot be told apart; None where that cannot be said
    names: bool  # whether others may be named
    head: str
    members: int
    planned: int  # rounds of the whole run
    planted: str = ""  # which faults the settings planted; nothing where there are none


def statements(rounds: Sequence[Round], config: Config, decision: Decision, head: str) -> Iterator[Statement]:
    """A statement for everybody on the roster, from what the ledger holds.

    Args:
        rounds: those the decision rests on.
        config: of the run.
        decision: as recorded.
        head: of the ledger with the decision in it.
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
    for one in rounds:
        if not one.reports:  # aborted or without any report: told apart from these
            continue
        if name in one.reports:
            found["counted"].append(one.number)
        elif name in one.silent:
            found["silent"].append(one.number)
        elif name in one.declined:
            found["declined"].append(one.number)
        else:
            found["lost" if name in one.scheduled else "away"].append(one.number)
    return {status: tuple(numbers) for status, numbers in found.items()}


def _cost(name: str, scored: Sequence[Any], decision: Decision) -> Cost | None:
    """The same decision with this one member's missed rounds counted the other way."""
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
    return Cost(float(total.raw[place]), float(raw[place]), paid, other_cents)


def _alike(summary: Summary) -> dict[str, tuple[str, ...]]:
    """Member -> the others that no test tells it apart from, best first; empty where that cannot be said."""
    total = summary.total
    if total.stderr is None or total.n > MOST_COMPARED:
        return {}
    better = compare_pairs(total).better
    alike = ~(better | better.T)
    np.fill_diagonal(alike, False)
    rows = dict(zip(total.clients, alike, strict=True))
    at = {name: i for i, name in enumerate(total.clients)}
    return {name: tuple(one for one in total.ranking() if row[at[one]]) for name, row in rows.items()}
