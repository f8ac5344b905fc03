"""What a member gains that lies about its two models, from the reports of finished runs.

Two lies: the boldest, alone = 1 and without = 0; and the plausible one that all of the round was its work,
alone = v(M) and without = v(M0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cells import Result
from grid import mean, settled, text
from measures import reports

from fedmerit import Reports, Scores, accumulate, alpha, ee, shares

UTILITY = "expected-accuracy"


def told(one: Reports, i: int, alone_: float = 1.0, without_: float = 0.0) -> Reports:
    """The reports of a round in which member i lies."""
    alone, without = one.alone.copy(), one.without.copy()
    alone[i], without[i] = alone_, without_
    return replace(one, alone=alone, without=without)


def share(scores: Scores, i: int) -> float:
    """Of the published values."""
    return float(scores.values[i] / scores.values.sum())


def lying(cells: Sequence[Result]) -> dict[str, str]:
    """Rank, EE share and pay of a lone liar, over all members of all cells."""
    first = tried = last_of_published = 0
    pay: dict[str, list[float]] = {"honest": [], "fair": [], "fenced": []}
    factors, moved = [], []
    for cell in cells:
        rounds = reports(cell, UTILITY)
        honest = shares(accumulate(rounds))
        last = rounds[-1]
        for i, name in enumerate(cell["clients"]):
            lie = told(last, i)
            tried += 1
            first += ee(lie).ranking()[0] == alpha(lie).ranking()[0] == name
            published = settled(ee(lie).values)
            last_of_published += int((published <= published[i]).sum()) == 1
            before, after = ee(last), ee(told(last, i, last.grand, last.empty))
            if before.status == after.status == "ok":
                factors.append(share(after, i) / share(before, i))
            else:
                moved.append(i)
            total = accumulate([told(one, i) for one in rounds])
            pay["honest"].append(honest[name])
            pay["fair"].append(shares(total)[name])
            pay["fenced"].append(shares(total, rule="fenced")[name])
    return {
        "first": f"{first} of {tried}",
        "last": f"{last_of_published} of {tried}",
        "EE factor": text(mean(factors), ".2f") if factors else "undefined",
        "EE turned": f"{len(moved)} of {tried}",
        **{f"pay {key}": text(mean(values), ".1%") for key, values in pay.items()},
    }
