"""What FINDINGS.md says of the retraining game: which score that secure aggregation allows tracks it best."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from cells import Result, datasets
from evidence import BOTH, LAST, PAIR, TITLES, Claims, Evidence, Facts, close, lines, mean
from measures import HIDDEN, SCORES, agreements, reports, scores, spread

from fedmerit import accumulate

DEFAULT = "ALPHA sum"
CANDIDATES = ("ALPHA sum, renormalised", "SOLO", "MERIT", "ENSEMBLE")
"""Named before any of the fresh runs was made."""
CEILING = "ALPHA, retrained"
AIM = 0.95
Runs = Mapping[str, float]
"""A number by the name of the run."""


def game(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Every score against the retrained Shapley value, and the candidates against the default."""
    groups = {dataset: evidence.cells("tab-error-game", dataset) for dataset in BOTH}
    cells = [cell for each in groups.values() for cell in each]
    known = {utility: against_truth(cells, utility) for utility in TITLES}
    facts["game seeds"] = " and ".join(str(len(each)) for each in groups.values())
    both = {score: [v for u in PAIR for v in known[u][score].values()] for score in known[PAIR[0]]}
    body = []
    for score in sorted(both, key=lambda name: -mean(both[name])):
        per = [known[u].get(score, {}) for u in TITLES]
        row = [spread(list(values.values())) for values in per]
        row += [spread(of(per[0], groups[dataset])) for dataset in BOTH]
        body.append([f"{score} †" if score in HIDDEN else score, str(len(per[0])), *row])
    head = ["score", "runs", *TITLES.values(), *(f"expected accuracy, {name}" for name in BOTH.values())]
    facts["game table"] = lines(head, body)
    for score in ("MR-SV", "FP"):
        facts[f"game {score}"] = " / ".join(spread(list(known[u][score].values())) for u in PAIR)
    for score in ("MR-SV", "FP"):
        each = [evidence.said("tab:error_game", "spearman", name, score) for name in ("CIFAR10", "Brain")]
        facts[f"paper game {score}"] = " and ".join(f"{value:.2f}" for value in each)
    claims["at least 5 seeds on two datasets"] = all(len(each) >= 5 for each in groups.values())
    claims["MR-SV is not the retrained Shapley value"] = all(
        mean(list(known[u]["MR-SV"].values())) < 0.9 for u in PAIR
    )
    truths = [[scores(cell, u, LAST)["SV"] for u in PAIR] for cell in cells]
    facts["truths agree"] = spread([close(*pair) or 0.0 for pair in truths])
    _candidates(known, cells, facts, claims)
    _again(evidence, facts, claims)
    _sizes(evidence, facts)
    _currency(evidence, cells, facts, claims)


def against_truth(cells: Iterable[Result], utility: str) -> dict[str, dict[str, float]]:
    """Per score and run the Spearman with the retrained Shapley value, where both exist."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        for score, near in agreements(cell, utility, LAST, "SV", utility).items():
            if near.spearman is not None:
                found.setdefault(score, {})[cell["name"]] = near.spearman
    return found


def of(values: Runs, cells: Iterable[Result]) -> list[float]:
    """Those of some cells."""
    return [values[cell["name"]] for cell in cells if cell["name"] in values]


# ------------------------------------------------------------------------------------------ the candidates


def _candidates(
    known: Mapping[str, Mapping[str, Runs]], cells: Sequence[Result], facts: Facts, claims: Claims
) -> None:
    """How far each candidate is ahead of the default, and what chance makes of it.

    Two sets of runs: all with a seed above 0, which no candidate but the last was chosen by, and the newest,
    which were made when all of them had been named.
    """
    sets = {
        "newest": [cell["name"] for cell in cells if cell.get("whole_run")],
        "later": [cell["name"] for cell in cells if cell["seed"] > 0],
    }
    chosen = {"newest": CANDIDATES, "later": CANDIDATES[:3]}
    steps = {
        kind: {name: differences(known, name, DEFAULT, runs) for name in (*chosen[kind], "MR-SV")}
        for kind, runs in sets.items()
    }
    adjusted = {kind: holm({name: student(steps[kind][name]) for name in chosen[kind]}) for kind in sets}
    body = []
    for name in (DEFAULT, *CANDIDATES, "MR-SV"):
        row = [f"{name} †" if name in HIDDEN else name]
        row += [spread([known[u][name][run] for run in sets["newest"]]) for u in PAIR]
        for kind in sets:
            row += _ahead(steps[kind].get(name), adjusted[kind].get(name))
        body.append(row)
    head = ["score", "expected accuracy", "accuracy", "ahead of alpha summed", "better : worse", "p"]
    facts["candidate table"] = lines([*head, "ahead, seeds above 0", "better : worse", "p"], body)
    facts["newest runs"], facts["later runs"] = (str(len(runs)) for runs in sets.values())
    proposed = "ALPHA sum, renormalised"
    ahead = steps["later"][proposed]
    facts["errors ahead"] = f"{ahead.mean() / standard_error(ahead):.1f}"
    facts["SOLO chance"] = f"{adjusted['later']['SOLO']:.2f}"
    claims["the renormalised alpha and MERIT are ahead beyond chance"] = all(
        adjusted["later"][name] < 0.05 and steps["later"][name].mean() > 0 for name in (proposed, "MERIT")
    )
    claims["in the newest runs alone all four are ahead, each within chance"] = all(
        steps["newest"][name].mean() > 0 and adjusted["newest"][name] >= 0.05 for name in CANDIDATES
    )
    pairs = {
        f"{one} against {other}": student(differences(known, one, other, sets["newest"]))
        for one, other in itertools.combinations(CANDIDATES, 2)
    }
    claims["between themselves the candidates are too close to call"] = min(holm(pairs).values()) >= 0.05
    tops = []
    for u in PAIR:
        newest = {name: [known[u][name][run] for run in sets["newest"]] for name in CANDIDATES}
        best = max(newest, key=lambda name: mean(newest[name]))
        tops.append(f"{best} with {spread(newest[best])} ({TITLES[u]})")
    facts["newest best"] = " and ".join(tops)
    allowed = [name for name in SCORES if name in known[PAIR[0]] and name not in HIDDEN]
    claims["no score reaches the aim, nor does the ceiling"] = (
        max(mean([v for u in PAIR for v in known[u][name].values()]) for name in (*allowed, CEILING)) < AIM
    )
    return


def _ahead(steps: np.ndarray | None, p: float | None) -> list[str]:
    """Three cells of the table."""
    if steps is None:
        return ["", "", ""]
    won, lost = int((steps > 1e-9).sum()), int((steps < -1e-9).sum())
    by = f"{steps.mean():+.3f} ± {standard_error(steps):.3f}"
    return [by, f"{won} : {lost}", "" if p is None else f"{p:.3f}"]


def differences(
    known: Mapping[str, Mapping[str, Runs]], one: str, other: str, runs: Sequence[str]
) -> np.ndarray:
    """Per run, mean over both utilities."""
    return np.mean([[known[u][one][run] - known[u][other][run] for run in runs] for u in PAIR], axis=0)


def standard_error(values: np.ndarray) -> float:
    """Of their mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def student(values: np.ndarray) -> float:
    """Two-sided p-value of a mean of 0."""
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(values, 0.0).pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """P-values adjusted for their number (Holm 1979).

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted, largest = {}, 0.0
    for k, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, (len(p_values) - k) * p_values[name])
        adjusted[name] = min(1.0, largest)
    return adjusted


# ------------------------------------------------------------------------- how far the truth can be trusted


def _again(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """The same data in the same hands, trained twice: how well a value agrees with itself."""
    shown = {"SV": "retrained Shapley value", **dict.fromkeys((DEFAULT, *CANDIDATES, "MR-SV"), "")}
    found: dict[str, dict[str, list[float]]] = {name: {u: [] for u in PAIR} for name in shown}
    count = 0
    for dataset in BOTH:
        first = {cell["seed"]: cell for cell in evidence.cells("tab-error-game", dataset)}
        for second in evidence.cells("tab-error-game", dataset, "trained again"):
            count += 1
            for u in PAIR:
                one, other = (scores(cell, u, LAST) for cell in (first[second["seed"]], second))
                for name in shown:
                    if name in one and name in other:
                        found[name][u].append(close(one[name], other[name]) or 0.0)
    body = [
        [shown[name] or name, *(spread(values) for values in each.values())]
        for name, each in found.items()
        if all(each.values())
    ]
    facts["again table"] = lines(["", "expected accuracy", "accuracy"], body)
    facts["again runs"] = str(count)
    facts["truth against itself"] = " / ".join(spread(values) for values in found["SV"].values())
    claims["the truth agrees with itself about as well as we hoped a score would with it"] = all(
        abs(mean(values) - AIM) < 0.05 for values in found["SV"].values()
    )
    claims["alpha of the additive game repeats worse than the renormalised one and SOLO"] = all(
        mean(found[DEFAULT][u]) < mean(found[name][u])
        for u in PAIR
        for name in ("ALPHA sum, renormalised", "SOLO")
    )


def _sizes(evidence: Evidence, facts: Facts) -> None:
    """Rows of the retraining game beside the two large ones."""
    shown = (DEFAULT, *CANDIDATES, "MR-SV", "FP")
    body = []
    for row in evidence.rows:
        cells = evidence.cells(row.experiment, row.dataset, row.row)
        if row.experiment != "tab-error-game" or row.row in ("", "trained again") or not cells:
            continue
        for u in PAIR:
            known = against_truth(cells, u)
            line = [f"{datasets()[row.dataset]['short']}, {row.row}", str(len(cells)), TITLES[u]]
            body.append([*line, *(spread(list(known.get(name, {}).values())) for name in shown)])
    facts["other games"] = lines(["row", "seeds", "utility", *shown], body)


def _currency(evidence: Evidence, cells: Sequence[Result], facts: Facts, claims: Claims) -> None:
    """What the renormalised alpha is near to, and whether it can be paid out."""
    new = "ALPHA sum, renormalised"
    near = [
        close(scores(cell, u, LAST)[new], scores(cell, u, LAST)["MR-SV, renormalised"])
        for cell in cells
        for u in PAIR
        if "MR-SV, renormalised" in scores(cell, u, LAST)
    ]
    facts["renormalised alpha against its MR-SV"] = f"{mean(near):.2f}"
    sums, above, members = [], 0, 0
    for dataset in BOTH:
        for cell in evidence.cells("tab-error", dataset):
            total = accumulate(reports(cell, "expected-accuracy", game="renormalised"))
            sums.append(float(total.values.sum()) / float(total.gain))
            above, members = above + int((total.values > 0).sum()), members + len(total.values)
    facts["renormalised sum"] = spread(sums)
    facts["renormalised above 0"] = f"{above} of {members}"
    claims["the renormalised alpha does not add up and is often negative"] = (
        abs(float(np.mean(sums)) - 1) > 1 and above < members / 2
    )
