"""What rules pay: in telling cases, to honest members at the fence, and beside the retrained Shapley value.

tables.py writes it to tables/rules.md. The first table is also in docs/money.md, the last one in
docs/choosing.md, where tests compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from cells import Result, Row, datasets
from evidence import BOTH, LAST, Claims, Evidence, Facts, agree, lines
from grid import TIE, mean, text
from measures import Vector, reports, scores
from retrained import with_retrained
from sections import done

from fedmerit import Scores, accumulate, shares
from fedmerit.errors import UndefinedShares
from fedmerit.scoring.rewards import Shares, takes_part
from fedmerit.scoring.scores import from_blocks

UTILITY = "expected-accuracy"
Rule = Callable[[Scores], Shares]
RULES: Mapping[str, Rule] = {
    "`fair`": lambda scores: shares(scores, "fair"),
    "`fenced`": shares,
    "`fenced`, `equal` = 0.5": lambda scores: shares(scores, equal=0.5),
}
HONEST = (1.15, 1.05, 1.0, 1.0, 0.95, 0.85)
CASES: Sequence[tuple[str, tuple[float, ...], float, tuple[int, ...]]] = (
    ("ties: the best of six, each 1 up to an error of .15", HONEST, 0.15, (0,)),
    ("ties: the worst of them", HONEST, 0.15, (5,)),
    ("clear differences: the best of 3, 2, 2, 1, 1, 1", (3, 2, 2, 1, 1, 1), 0.1, (0,)),
    ("a null member: 0 beside five at 1", (1, 1, 1, 1, 1, 0), 0.1, (5,)),
    ("a member who does harm: -1 beside five at 1", (1, 1, 1, 1, 1, -1), 0.1, (5,)),
    ("the same, surely less than 0 by a little: -.3", (1, 1, 1, 1, 1, -0.3), 0.1, (5,)),
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
        if not honest or UTILITY not in cell["utilities"]:
            continue
        total = accumulate(reports(cell, UTILITY))
        try:
            fair, fenced = (np.array(list(shares(total, rule).values())) for rule in ("fair", "fenced"))
        except UndefinedShares:  # nobody has a positive score
            continue
        row = counted.setdefault(datasets()[cell["dataset"]]["short"], [0, 0, 0])
        row[0] += total.n
        row[1] += int(((fair > fenced + TIE) & (fenced > fenced.max() - TIE)).sum())
        row[2] += int((fair > 2 / (total.n + 1) + TIE).sum())  # above twice the mean of the others
    yield "| data | honest members | held back by `fenced` | by twice the others' mean |"
    yield "|---|---|---|---|"
    if counted:
        counted["all"] = [sum(column) for column in zip(*counted.values(), strict=True)]
    for data, (n, *each) in counted.items():
        told = [f"{one} ({text(one / n, '.1%')})" for one in each]
        yield f"| {data} | {n:,} | {' | '.join(told)} |"


# --------------------------------------------------------------------------- beside the retrained value


def phi_of(cell: Result) -> Scores:
    """Return PHI of a run, with its errors and the allowance for training."""
    rounds = [one for one in cell["phi"][UTILITY] if one["round"] <= LAST]
    scored = [from_blocks(np.array(one["blocks"]), one["sizes"], cell["clients"]) for one in rounds]
    return accumulate(scored, score="PHI")


def divided(cell: Result) -> dict[str, Vector]:
    """Return how each rule divides a budget in a run, by PHI unless it says otherwise."""
    total, samples = phi_of(cell), scores(cell, UTILITY, LAST)["samples"]
    try:
        found = {name: np.array(list(rule(total).values())) for name, rule in RULES.items()}
    except UndefinedShares:
        return {}
    return {
        **found,
        "half `fenced`, half equally among all": found["`fenced`"] / 2 + 0.5 / total.n,
        "equal": np.full(total.n, 1 / total.n),
        "by number of samples": samples / samples.sum(),
    }


def distances(cells: Sequence[Result]) -> dict[str, list[float]]:
    """Rule -> which part of the budget goes elsewhere than by the retrained Shapley value, run by run.

    It is half of the sum of absolute differences of the shares.
    """
    found: dict[str, list[float]] = {}
    for cell in cells:
        truth = np.maximum(scores(cell, UTILITY, LAST)["SV"], 0.0)
        for rule, own in divided(cell).items():
            found.setdefault(rule, []).append(float(np.abs(own - truth / truth.sum()).sum() / 2))
    return found


def distance_lines(cells: Sequence[Result]) -> list[str]:
    """The table of distances, the closest first, beside the Spearman of what the rule pays by."""
    found = distances(cells)
    known = [scores(cell, UTILITY, LAST) for cell in cells]
    near = {
        name: mean([agree(one[key], one["SV"]) for one in known])
        for name, key in (("PHI", "PHI sum"), ("by number of samples", "samples"))
    }
    half = found["`fenced`, `equal` = 0.5"]
    body = []
    for rule, each in sorted(found.items(), key=lambda item: mean(item[1])):
        spearman = "–" if rule == "equal" else text(near.get(rule, near["PHI"]), ".2f")
        closer = sum(one < other - TIE for one, other in zip(half, each, strict=True))
        against = "" if each is half else f"{closer} of {len(each)}"
        body.append([rule, text(mean(each), ".3f"), text(max(each), ".3f"), spearman, against])
    head = ["rule", "goes elsewhere, mean", "largest", "Spearman of its score", "half equal is closer in"]
    return lines(head, body).splitlines()


def beside_retrained(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """What FINDINGS.md says of the distance of shares."""
    cells = [
        cell for dataset in BOTH
        for cell in with_retrained(evidence.cells("tab-phi-game", dataset), evidence.results)
    ]  # fmt: skip
    spread, below, positive = [], 0, 0
    for cell in cells:
        truth = scores(cell, UTILITY, LAST)["SV"]
        out = ~takes_part(phi_of(cell))
        below, positive = below + int(out.sum()), positive + int((truth[out] > 0).sum())
        fair, true = divided(cell)["`fair`"], np.maximum(truth, 0.0) / np.maximum(truth, 0.0).sum()
        spread.append(float(fair.std() / true.std()))
    by = {rule: mean(each) for rule, each in distances(cells).items()}
    half = by["`fenced`, `equal` = 0.5"]
    facts |= {
        "shares table": "\n".join(distance_lines(cells)),
        "shares runs": str(len(cells)),
        "shares spread": text(mean(spread), ".1f"),
        "shares sure": str(below),
        "shares wrong": str(positive),
    }
    claims["half equal is closer to the retrained shares than the score or an equal split alone"] = all(
        half < by[rule] - 0.02 for rule in ("`fair`", "`fenced`", "equal")
    )
    claims["shares by PHI spread at least half as far again as the retrained ones"] = mean(spread) > 1.5


def rules_section(rows: Sequence[Row], results: Mapping[str, Result]) -> Iterator[str]:
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
    games = [row for row in rows if row.experiment == "tab-phi-game"]
    cells = [cell for row in games for cell in with_retrained(done(row, results), results)]
    if not cells:
        return
    yield ""
    yield f"Shares beside those of the retrained Shapley value, expected accuracy, {len(cells)} runs of"
    yield "[tab-phi-game](tab-phi-game.md), by PHI unless it says otherwise: half of the sum of absolute"
    yield "differences, which is the part of the budget that goes elsewhere."
    yield ""
    yield from distance_lines(cells)
