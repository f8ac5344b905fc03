"""What each rule pays in telling cases, and how many honest members a fence holds back in the committed runs.

tables.py writes it to tables/rules.md. The first table is also in docs/money.md, where a test compares it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from cells import Result, datasets
from grid import TIE, text
from measures import reports

from fedmerit import Scores, accumulate, shares
from fedmerit.errors import UndefinedShares
from fedmerit.scoring.rewards import Shares, fence

Rule = Callable[[Scores], Shares]
RULES: Mapping[str, Rule] = {
    "`fair`": shares,
    "`shrunk`": lambda scores: shares(scores, "shrunk"),
    "`fenced`": lambda scores: shares(scores, "fenced"),
    "`fenced` before": lambda scores: shares(scores, "fenced", formula=1),
}
HONEST = (1.15, 1.05, 1.0, 1.0, 0.95, 0.85)
CASES: Sequence[tuple[str, tuple[float, ...], float, tuple[int, ...]]] = (
    ("ties: the best of six, each 1 up to an error of .15", HONEST, 0.15, (0,)),
    ("ties: the worst of them", HONEST, 0.15, (5,)),
    ("clear differences: the best of 3, 2, 2, 1, 1, 1", (3, 2, 2, 1, 1, 1), 0.1, (0,)),
    ("a null member: 0 beside five at 1", (1, 1, 1, 1, 1, 0), 0.1, (5,)),
    ("a member who does harm: -1 beside five at 1", (1, 1, 1, 1, 1, -1), 0.1, (5,)),
    ("a liar: 50 beside five at 1", (1, 1, 1, 1, 1, 50), 0.1, (5,)),
    ("a pair that moves 25 from one to the other: both", (1, 1, 1, 1, 26, -24), 0.1, (4, 5)),
    ("the only contributor: 1 beside five at 0", (1, 0, 0, 0, 0, 0), 0.1, (0,)),
)
"""What, scores of six members, their standard error, and whose share."""


def scores_of(raw: Sequence[float], error: float) -> Scores:
    """Scores of members a, b, ..."""
    return Scores(
        score="ALPHA", clients=tuple("abcdefghij"[: len(raw)]), values=raw, raw=raw, gain=float(sum(raw)),
        stderr=[error] * len(raw),
    )  # fmt: skip


def paid() -> Iterator[str]:
    """What each rule pays, as lines of a table."""
    yield f"| of six members, standard error .1 unless stated | {' | '.join(RULES)} |"
    yield "|---" * (1 + len(RULES)) + "|"
    for what, raw, error, whose in CASES:
        found = [rule(scores_of(raw, error)) for rule in RULES.values()]
        told = [text(sum(list(one.values())[i] for i in whose), ".1%") for one in found]
        yield f"| {what} | {' | '.join(told)} |"


def held_back(results: Mapping[str, Result]) -> Iterator[str]:
    """How many members of the committed runs a fence holds back, all of them honest, as lines of a table."""
    counted: dict[str, list[int]] = {}
    for name in sorted(results):
        cell = results[name]
        honest = not cell["settings"].get("corruption") and "cheat" not in cell["settings"].get(
            "experiment", {}
        )
        if not honest or "expected-accuracy" not in cell["utilities"]:
            continue
        total = accumulate(reports(cell, "expected-accuracy"))
        try:
            fair, fenced = (np.array(list(shares(total, rule).values())) for rule in ("fair", "fenced"))
        except UndefinedShares:  # nobody has a positive score
            continue
        row = counted.setdefault(datasets()[cell["dataset"]]["short"], [0, 0, 0, 0])
        row[0] += total.n
        row[1] += int(((fair > fenced + TIE) & (fenced > fenced.max() - TIE)).sum())
        row[2] += int((total.raw > np.maximum(fence(total), 0.0) + TIE).sum())
        row[3] += int((fair > 2 / (total.n + 1) + TIE).sum())  # above twice the mean of the others
    yield "| data | honest members | held back by `fenced` | by `fenced` before | by twice the others' mean |"
    yield "|---|---|---|---|---|"
    if counted:
        counted["all"] = [sum(column) for column in zip(*counted.values(), strict=True)]
    for data, (n, *each) in counted.items():
        told = [f"{one} ({text(one / n, '.1%')})" for one in each]
        yield f"| {data} | {n:,} | {' | '.join(told)} |"


def rules_section(results: Mapping[str, Result]) -> Iterator[str]:
    """The page."""
    yield "# What rules pay (not in the paper)"
    yield ""
    yield from paid()
    yield ""
    yield "Members of all runs in which nobody cheats and no label is wrong, by summed alpha of the expected"
    yield "accuracy: how many get less by `fenced` than by `fair`, because they reach its limit; and how"
    yield "many a limit of twice the mean of the others would hold back. Members of runs that repeat others"
    yield "count in each."
    yield ""
    yield from held_back(results)
