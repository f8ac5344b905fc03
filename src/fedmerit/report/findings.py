"""What `Facts` are made of: how a member stands, what happened in a round, what a rule would pay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedmerit.scoring.rewards import Rule
from fedmerit.scoring.share_intervals import PaidApart, Spans

if TYPE_CHECKING:
    from fedmerit.report.facts import Facts

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
    last: dict[str, float | None]  # LOO, FP, EE of the last round
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
class AbsenceCost:
    """What a member's rounds without a report cost: an estimate, with these rounds counted the other way."""

    score: float  # as decided
    other: float  # counted the other way: at the member's own mean in place of zero, or the reverse
    cents: int
    other_cents: int | None  # None if there are no shares then


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


@dataclass(frozen=True)
class RuleFacts:
    """Shares under one rule as exact integers over a common denominator, or why there are none."""

    name: Rule
    problem: str
    parts: Mapping[str, int]
    one: int
    shares: Mapping[str, float]
    notes: tuple[str, ...]
    spans: Spans | None = None  # intervals of the shares
    apart: PaidApart | None = None  # indistinguishable members whom it pays visibly apart


@dataclass(frozen=True)
class Influence:
    """The weight of each member's report in everybody else's EE score, in one round."""

    round: int | None
    clients: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
