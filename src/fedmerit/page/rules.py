"""What each rule pays, on the terms of the decision that stands; the numbers that the page computes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from fedmerit.accumulate import accumulate
from fedmerit.errors import InputError, UndefinedShares
from fedmerit.page.decided import terms_of
from fedmerit.page.source import Source
from fedmerit.rewards import Rule, Shares, shares
from fedmerit.types import Scores


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
    """Every rule; arguments as those of :func:`fedmerit.page.facts.gather`."""
    total, shown = payable(original), payable(source)
    return tuple(_rule(source, total, shown, rule) for rule in get_args(Rule))


def payable(source: Source) -> Scores:
    """What is divided: the score that the decision names, or the contribution, summed over all rounds."""
    terms = terms_of(source)
    measured = {str(source.rounds[0].utility): source.rounds, **source.companions}
    return accumulate(measured[terms.utility], score=terms.score, missing=terms.missing)


def _rule(source: Source, total: Scores, shown: Scores, rule: Rule) -> RuleFacts:
    """One rule, from the scores with the real names and with those that the page shows."""
    try:
        divided = _divided(source, total, rule)
    except (UndefinedShares, InputError) as error:
        return RuleFacts(rule, str(error), {}, 1, {}, ())
    ratios = {source.names[name]: share.as_integer_ratio() for name, share in divided.items()}
    one = math.lcm(*(bottom for _, bottom in ratios.values()))
    return RuleFacts(
        name=rule,
        problem="",
        parts={name: top * (one // bottom) for name, (top, bottom) in ratios.items()},
        one=one,
        shares={source.names[name]: share for name, share in divided.items()},
        notes=tuple(note for note in _divided(source, shown, rule).notes if note not in shown.notes),
    )


def _divided(source: Source, total: Scores, rule: Rule) -> Shares:
    terms = terms_of(source)
    return shares(total, rule, floor=terms.floor, cap=terms.cap, on_undefined=terms.on_undefined)
