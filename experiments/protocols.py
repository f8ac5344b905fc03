"""The paper's tables three ways: by the authors' scripts, by the paper's text, and as fedmerit scores.

All are applied to the same raw results. The published scripts (`SCRIPTS`) fix what the text leaves open:

==========  ==============================  =========================  =========================
what        the authors' protocol           the paper's text           ours
==========  ==============================  =========================  =========================
utility     accuracy                        accuracy                   expected accuracy
nobody      0                               v(M0)                      v(M0)
scores      of the one round                of the one round           summed over the rounds
truth       Shapley value of that round     MR-SV over the rounds      MR-SV over the rounds
normalised  minimum subtracted if negative  minimum always subtracted  minimum always subtracted
==========  ==============================  =========================  =========================

FP and EE rank as alpha does, so ours is summed alpha in both lines. L2 is squared in every column, as the
scripts print it. The scripts play the renormalised game, weighted by samples; here weights are 1/N, and the
game is the additive one unless the whole table of the renormalised one is known (where members were
retrained). COS is that of models where every run of a row kept it, and else that of updates, summed in every
column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from cells import Result
from grid import mean, settled
from measures import Vector, reports, scores

from fedmerit import Reports, agreement, ee, fp, loo, normalise
from fedmerit.scoring.scores import influence

SCRIPTS = "Delio090418/Fair-privacy-Preserving-Contribution-Scoring-"
COMMIT = "ab2b036"
AUTHORS, TEXT, OURS = "the authors' protocol", "the paper's text", "ours"
PROTOCOLS = (AUTHORS, TEXT, OURS)
UTILITY = {AUTHORS: "accuracy", TEXT: "accuracy", OURS: "expected-accuracy"}
METRICS = {"spearman": "Spearman", "l2": "L2, squared", "pearson": "Pearson", "kendall": "Kendall"}
PAPERS = ("LOO", "EE", "FP", "COS")
"""The scores of the paper's tables."""
SUMMED = {"LOO": "LOO sum", "EE": "ALPHA sum", "FP": "ALPHA sum", "COS": "COS sum", "MR-SV": "MR-SV"}
"""What stands for each of them in ours."""
MODELS = "COS-MODEL"
Found = dict[str, dict[str, list[float]]]


def last_report(cell: Result, utility: str, at: int) -> Reports:
    """The reports of the round that a table looks at."""
    return [one for one in reports(cell, utility) if one.round is not None and one.round <= at][-1]


def played(cell: Result, at: int) -> list[Reports]:
    """The reports that the authors' protocol scores: of the renormalised game where its truth is known."""
    known = {"rounds renormalised", "ROUND-SV renormalised"} & set(cell["utilities"]["accuracy"]["truth"])
    every = reports(cell, "accuracy", game="renormalised" if known else "additive")
    return [one for one in every if one.round is not None and one.round <= at]


def theirs(cell: Result, at: int) -> dict[str, Vector]:
    """Scores and truths as the authors' scripts compute them.

    If nobody's coalition is worth 0, only the first marginal of an order of arrival changes, so a Shapley
    value grows by v(M0)/N for everybody.
    """
    truth, scored = cell["utilities"]["accuracy"]["truth"], played(cell, at)
    last = scored[-1]
    made = {"LOO": loo(last), "EE": ee(last, empty="zero"), "FP": fp(last, empty="zero")}
    found = {name: _of_members(cell, one.clients, one.values) for name, one in made.items()}
    found |= _cosines(cell, at)
    rounds = truth.get("rounds renormalised") or truth.get("rounds")
    if rounds:
        known = np.nan_to_num(np.array(rounds[: len(scored)], dtype=np.float64))
        each = [values + one.empty / one.n for values, one in zip(known, scored, strict=True)]
        found["truth"] = each[-1]
        found["MR-SV"] = np.array([mean(column) for column in np.array(each).T])
    elif (alone := truth.get("ROUND-SV renormalised")) is not None:
        found["truth"] = np.array(alone) + last.empty / last.n
    if truth.get("SV") and at >= len(reports(cell, "accuracy")):
        found["SV"] = np.array(truth["SV"]) + cell["retrained"]["accuracy"][0] / len(cell["clients"])
    return {name: settled(values) for name, values in found.items()}


def _cosines(cell: Result, at: int) -> dict[str, Vector]:
    """Of updates, and of models where the run kept it."""
    every = scores(cell, "accuracy", at)
    return {name: every[f"{name} sum"] for name in ("COS", MODELS) if f"{name} sum" in every}


def _of_members(cell: Result, clients: Sequence[str], values: Vector) -> Vector:
    known = dict(zip(clients, values.tolist(), strict=True))
    return np.array([known.get(name, 0.0) for name in cell["clients"]])


def vectors(cell: Result, protocol: str, at: int) -> dict[str, Vector]:
    """The paper's scores and the truths ("truth": the one of its tables; "SV": retrained) of one run."""
    key = "protocols", protocol, at
    known = cell.setdefault("computed", {})
    if key not in known:
        known[key] = theirs(cell, at) if protocol == AUTHORS else _by_the_rounds(cell, protocol, at)
    return known[key]  # type: ignore[no-any-return]


def _by_the_rounds(cell: Result, protocol: str, at: int) -> dict[str, Vector]:
    every = scores(cell, UTILITY[protocol], at)
    names = {**{name: name for name in PAPERS}, "COS": "COS sum", "MR-SV": "MR-SV"}
    found = {name: every[of] for name, of in (SUMMED if protocol == OURS else names).items() if of in every}
    if protocol == TEXT:
        found |= _cosines(cell, at)
    return found | {name: every[of] for name, of in (("truth", "MR-SV"), ("SV", "SV")) if of in every}


def kept(cells: Sequence[Result], score: str, protocol: str) -> str:
    """The score itself; of COS by the paper's formula that of models, if every run kept it."""
    models = score == "COS" and protocol != OURS and all(cell.get("cosine_model") for cell in cells)
    return MODELS if models else score


def squared_distance(one: Vector, other: Vector, protocol: str) -> float:
    """Squared L2 of two vectors, each normalised as the protocol says.

    >>> squared_distance(np.array([1.0, 3.0]), np.array([1.0, 1.0]), AUTHORS)
    0.5
    """
    pair = [
        values - min(0.0, values.min()) if protocol == AUTHORS else normalise(values)
        for values in (one, other)
    ]
    scaled = [values / mean(values) if mean(values) else np.ones_like(values) for values in pair]
    return math.fsum((scaled[0] - scaled[1]) ** 2)


def compared(cells: Sequence[Result], protocol: str, at: int, truth: str = "truth") -> Found:
    """Per score and metric, how close it is to the truth in each run where both exist."""
    found: Found = {}
    for cell in cells:
        every = vectors(cell, protocol, at)
        if truth not in every:
            continue
        for name in (*PAPERS, *(["MR-SV"] if truth == "SV" else [])):
            own = every.get(kept(cells, name, protocol))
            if own is None:
                continue
            near = agreement(own, every[truth])
            values = {metric: getattr(near, metric) for metric in METRICS if metric != "l2"}
            values["l2"] = squared_distance(own, every[truth], protocol)
            for metric, value in values.items():
                if value is not None:
                    found.setdefault(name, {}).setdefault(metric, []).append(value)
    return found


def is_turned(cell: Result, protocol: str, at: int) -> bool:
    """Whether the protocol's FP ranks the run the wrong way round."""
    last = last_report(cell, UTILITY[protocol], at)
    return fp(last, empty="zero" if protocol == AUTHORS else "model").status == "reversed"


def last_in(cells: Sequence[Result], protocol: str, at: int, place: Any) -> dict[str, tuple[int, int]]:
    """Per score: in how many runs the member at ``place(cell)`` alone is last, and of how many."""
    counts: dict[str, tuple[int, int]] = {}
    for cell in cells:
        every = vectors(cell, protocol, at)
        if "truth" in every:
            every = {**every, "MR-SV": every["truth"]}
        for name in ("MR-SV", *PAPERS):
            if (own := every.get(kept(cells, name, protocol))) is not None:
                hit, total = counts.get(name, (0, 0))
                alone = int((own <= own[place(cell)]).sum()) == 1
                counts[name] = hit + alone, total + 1
    return counts


def influences_of(cells: Sequence[Result], at: int) -> Vector:
    """The matrix of relative influence of each run by the authors' protocol, shape (K, N, N)."""
    return np.array([influence(played(cell, at)[-1], empty="zero") for cell in cells])
