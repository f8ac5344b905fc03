"""What cheats take who send something else than an honest update, and whether PHI finds a label flipper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cells import Result, Row, datasets
from evidence import Claims, Evidence, Facts, between
from grid import mean, text
from measures import Vector, detected, phi, scores
from sections import Lines, done, table

from fedmerit import shares
from fedmerit.errors import UndefinedShares
from fedmerit.scoring.scores import from_blocks

UTILITY = "expected-accuracy"
MEASURES = {"PHI sum": "PHI", "ALPHA sum": "alpha", "innovation": "PHI along the innovation"}
RULES = ("fair", "fenced")
CHEAT = "told the pool"
PAIR = "two add"


def totals(cell: Result, at: int) -> dict[str, Vector]:
    """Every member's total of each measure."""
    found = scores(cell, UTILITY, at)
    along = phi(cell, "innovation", at)
    assert along is not None
    return {"PHI sum": found["PHI sum"], "ALPHA sum": found["ALPHA sum"], "innovation": along[0]}


def taken(cells: Sequence[Result], at: int, *, both: bool) -> dict[str, list[float]]:
    """Per measure, the share of the cheat in each run; of a pair the share of both."""
    found: dict[str, list[float]] = {name: [] for name in MEASURES}
    for cell in cells:
        for name, values in totals(cell, at).items():
            found[name].append(float(values[-2 if both else -1 :].sum() / values.sum()))
    return found


def shares_taken(row: Row, cells: Sequence[Result]) -> dict[str, list[float]]:
    """As `taken`, of a row of the plan."""
    return taken(cells, row.at, both=row.row.startswith(PAIR))


def paid(cells: Sequence[Result], at: int, rule: str, *, both: bool) -> list[float]:
    """What a rule pays the cheat for PHI, as a share of the budget; of a pair what it pays both."""
    found = []
    for cell in cells:
        rounds = [one for one in cell["phi"][UTILITY] if one["round"] <= at]
        blocks = np.sum([one["blocks"] for one in rounds], axis=0)  # one slice in all rounds
        made = from_blocks(blocks, rounds[0]["sizes"], cell["clients"])
        try:
            given = shares(made, rule=rule)  # type: ignore[arg-type]
        except UndefinedShares:  # the rule refuses to pay
            continue
        found.append(sum(given[name] for name in cell["clients"][-2 if both else -1 :]))
    return found


def percent(values: Sequence[float]) -> str:
    """The mean, and the least and the largest."""
    if not values:
        return "refused"
    return f"{text(mean(values), '.0%')} ({between(values, '.0%')})"


def cheat_section(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, dict[str, Any]]
) -> Lines:
    """The cheat's part by every measure and rule."""
    yield "Six IID members; a fair share is 17 %, of two members 33 %. The cheat is the last one, and what"
    yield "it sends is in `cheats.py`. Shares are a score's total divided by the sum of all; the lines of"
    yield "a pair show both members together. In brackets the least and the largest of the seeds. A share"
    yield "above 100 % means that the others' scores are negative in sum; a rule that refuses to pay on"
    yield "such scores says so. The last column: what the innovation leaves undivided of the gain."
    yield ""
    for dataset in dict.fromkeys(row.dataset for row in rows):
        body = []
        for row in rows:
            cells = done(row, results)
            if row.dataset != dataset or not cells:
                continue
            both = row.row.startswith(PAIR)
            found = shares_taken(row, cells)
            left = []
            for cell in cells:
                own = totals(cell, row.at)
                left.append(1 - float(own["innovation"].sum() / own["PHI sum"].sum()))
            body.append(
                [
                    row.row,
                    str(len(cells)),
                    *(percent(found[name]) for name in MEASURES),
                    *(percent(paid(cells, row.at, rule, both=both)) for rule in RULES),
                    percent(left),
                ]
            )
        yield f"**{datasets()[dataset]['short']}**"
        yield ""
        head = [
            "what the cheat does",
            "seeds",
            *MEASURES.values(),
            *(f"PHI paid by `{rule}`" for rule in RULES),
        ]
        yield from table([*head, "left undivided"], body)


def flip_section(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, dict[str, Any]]
) -> Lines:
    """How often the flipper is strictly last by PHI."""
    body = []
    for row in rows:
        if cells := done(row, results):
            for utility in cells[0]["utilities"]:
                counts = detected(cells, utility, row.at)
                of = datasets()[row.dataset]["short"] + (f", {row.row}" if row.row else "")
                shown = [counts.get(score) for score in ("PHI sum", "ALPHA sum", "COS sum")]
                body.append([of, utility, *("{} of {}".format(*one) if one else "–" for one in shown)])
    yield "PHI of accuracy is that of sharpened accuracy. Pools are class-balanced, but for whole test sets."
    yield "–: not computed. Balanced accuracy has no gradient, and on ISIC's whole test set only the PHI of"
    yield "expected accuracy was asked for."
    yield ""
    yield from table(["data", "utility", "PHI sum", "ALPHA sum", "COS sum"], body)


def cheats(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """What FINDINGS.md says of both."""
    share, counts = {}, set()
    for row in evidence.rows:
        if row.experiment == "tab-cheat" and (cells := done(row, evidence.results)):
            share[row.dataset, row.row] = shares_taken(row, cells)
            counts.add(len(cells))
    facts["told seeds"] = " to ".join(map(str, sorted({min(counts), max(counts)})))
    plain = "told the pool, length x 1"
    facts["told"] = " and ".join(
        f"{between(share[dataset, plain]['PHI sum'], '.0%')} on {datasets()[dataset]['short']}"
        for dataset in ("cifar10", "brain_mri")
    )
    told = [min(one["PHI sum"]) for (_, row), one in share.items() if row.startswith(CHEAT)]
    claims["who is told the pool takes more than twice a fair share"] = min(told) > 2 / 6
    replay = [one["innovation"] for (_, row), one in share.items() if row.startswith("replays")]
    claims["along the innovation a replay earns nothing"] = bool(np.abs(np.concatenate(replay)).max() < 5e-3)
    moved = [
        abs(a - b)
        for (_, row), one in share.items()
        if row == "nobody cheats"
        for a, b in zip(one["PHI sum"], one["innovation"], strict=True)
    ]
    facts["innovation moves"] = text(max(moved), ".3f")
    claims["the innovation hardly moves an honest share"] = max(moved) < 0.01
    pooled = [max(one["innovation"]) for (_, row), one in share.items() if row.startswith(CHEAT)]
    claims["the innovation does not help against who is told the pool"] = min(pooled) > 2 / 6
    _flips([row for row in evidence.rows if row.experiment == "tab-flip"], evidence, facts, claims)


def _flips(rows: Sequence[Row], evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Where PHI and alpha miss the label flipper."""
    missed: dict[str, dict[tuple[str, str, str], int]] = {"PHI sum": {}, "ALPHA sum": {}}
    runs, data = 0, set()
    for row in rows:
        if cells := done(row, evidence.results):
            runs, data = runs + len(cells), data | {datasets()[row.dataset].get("source", row.dataset)}
            for utility in ("expected-accuracy", "accuracy"):
                counts = detected(cells, utility, row.at)
                if "PHI sum" not in counts:  # on ISIC's whole test set only expected accuracy has one
                    continue
                for score, known in missed.items():
                    hit, of = counts[score]
                    known[row.dataset, row.row, utility] = of - hit
    claims["PHI finds the flipper where alpha does"] = missed["PHI sum"] == missed["ALPHA sum"]
    where = {(dataset, row) for (dataset, row, _), count in missed["ALPHA sum"].items() if count}
    claims["PHI and alpha miss the flipper on ISIC's balanced pool only"] = where == {("isic2019_slow", "")}
    facts["flip runs"], facts["flip data"] = str(runs), str(len(data))
