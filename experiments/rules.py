"""What each rule pays in telling cases, and how many honest members a fence holds back in the committed runs.

    python experiments/rules.py [--out experiments/tables/rules.md]

The first table is also in docs/money.md, where a test compares it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedmerit import Scores, accumulate, shares
from fedmerit.scoring.rewards import Shares

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
        told = [f"{sum(list(one.values())[i] for i in whose):.1%}" for one in found]
        yield f"| {what} | {' | '.join(told)} |"


def held_back() -> Iterator[str]:
    """How many members of the committed runs a fence holds back, all of them honest, as lines of a table."""
    from measures import reports

    counted: dict[str, list[int]] = {}
    for path in sorted((Path(__file__).parent / "results").glob("*.json")):
        cell = json.loads(path.read_text())
        if cell["settings"].get("corruption") or "expected-accuracy" not in cell["utilities"]:
            continue
        total = accumulate(reports(cell, "expected-accuracy"))
        row = counted.setdefault(cell["dataset"], [0, 0, 0])
        row[0] += total.n
        fair = np.array(list(shares(total).values()))
        for place, rule in ((1, "`fenced`"), (2, "`fenced` before")):
            found = np.array(list(RULES[rule](total).values()))
            limit = found.max() * (1 - 1e-9)
            held = (fair > found * (1 + 1e-9)) & (found >= limit) if place == 1 else _held(total)
            row[place] += int(held.sum())
    yield "| data | honest members | held back by `fenced` | by `fenced` before |"
    yield "|---|---|---|---|"
    counted["all"] = np.sum(list(counted.values()), axis=0).tolist()
    for name, (n, now, before) in counted.items():
        yield f"| {name} | {n} | {now} ({now / n:.1%}) | {before} ({before / n:.1%}) |"


def _held(total: Scores) -> np.ndarray:
    from fedmerit.scoring.rewards import fence

    return np.asarray(total.raw > np.maximum(fence(total), 0.0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tables" / "rules.md")
    parser.parse_args().out.write_text("\n".join([*paid(), "", *held_back()]) + "\n")
