"""What FINDINGS.md says: facts computed from results, and claims that hold only while the facts are so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cells import Result, Row
from manipulation import lying
from measures import HIDDEN, SCORES, compare, curve, detected, mean_influence, reports, scores, signs, spread
from sections import done, table

from fedmerit import accumulate, agreement, alpha, ee, fp, normalise, surplus

CHEAT = Path(__file__).resolve().parent / "results" / "other" / "train-on-test.json"
TITLES = {
    "expected-accuracy": "expected accuracy",
    "accuracy": "accuracy",
    "brier": "Brier",
    "neg-loss": "−cross-entropy",
}
PAIR = ("expected-accuracy", "accuracy")
BOTH = {"cifar10": "CIFAR-10", "brain_mri": "Brain-MRI"}
OURS = "summed alpha (ours)"
LAST = 10**6
"""A round beyond all: the last one of a run."""
Facts = dict[str, Any]
Claims = dict[str, bool]


class Evidence:
    """The finished cells by experiment, dataset and row, and the paper's numbers."""

    def __init__(self, rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> None:
        self.rows, self.results, self.paper = rows, results, paper

    def cells(self, experiment: str, dataset: str, row: str = "") -> list[Result]:
        """Finished cells of one row of the plan."""
        for one in self.rows:
            if (one.experiment, one.dataset, one.row) == (experiment, dataset, row):
                return done(one, self.results)
        raise SystemExit(f"no row {row!r} of {experiment} with {dataset} in the plan")

    def said(self, label: str, metric: str, dataset: str, score: str) -> float:
        """A number of the paper."""
        for one in self.paper["numbers"]:
            if (one["label"], one["metric"], one["dataset"], one["score"]) == (label, metric, dataset, score):
                return float(one["mean"])
        raise SystemExit(f"paper.json: no {metric} of {score} on {dataset} in {label}")


def spearman(
    cells: Sequence[Result], score: str, utility: str, truth: str, against: str | None = None
) -> list[float]:
    """Of one score at the last round, one number a cell."""
    return compare(cells, utility, LAST, truth, against).get(score, {}).get("spearman", [])


def close(x: Any, y: Any) -> float | None:
    """Spearman of two vectors."""
    return agreement(x, y, resamples=0).spearman


def lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table as one fact."""
    return "\n".join(table(head, body)).rstrip("\n")


def mean(values: Sequence[float | None]) -> float:
    """Of those that are defined; there must be one."""
    known = [value for value in values if value is not None]
    if not known:
        raise SystemExit("FINDINGS.md: a result that it speaks of is not there yet")
    return float(np.mean(known))


def every_round(results: Mapping[str, Result]) -> Iterator[Any]:
    """Reports of all rounds of all cells and utilities."""
    for name in sorted(results):
        for utility in results[name]["utilities"]:
            yield from reports(results[name], utility)


# ----------------------------------------------------------------------------------------- FP, EE, signs


def ranking(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """FP and EE are one ranking, and how often one of them is turned round."""
    total = same = improving = turned = 0
    worst = efficient = 0.0
    for one in every_round(evidence.results):
        first, second, total = fp(one), ee(one), total + 1
        if first.status == second.status == "ok":
            same += 1
            worst = max(worst, float(np.abs(normalise(first.values) - normalise(second.values)).max()))
        if one.utility == "neg-loss" and one.gain > 0:
            improving += 1
            turned += "reversed" in (first.status, second.status)
        efficient = max(efficient, abs(float(surplus(one).values.sum()) - one.gain))
    facts |= {
        "rounds": f"{total:,}",
        "rounds both ok": f"{same:,}",
        "largest difference": f"{worst:.0e}",
        "improving": f"{improving:,}",
        "improving turned": f"{turned:,}",
        "surplus error": f"{efficient:.0e}",
    }
    claims["FP and EE differ by sign only"] = worst < 1e-6
    claims["surplus adds up"] = efficient < 1e-9
    claims["a negative utility turns FP or EE round in nearly every improving round"] = (
        turned > 0.9 * improving
    )
    body = []
    for dataset, name in BOTH.items():
        cells = evidence.cells("tab-error", dataset)
        body += [[name, title, *signs(cells, utility).values()] for utility, title in TITLES.items()]
    head = ["data", "utility", "rounds", "v(M) < v(M0)", "EE reversed", "FP reversed", "sum of alpha / gain"]
    facts["sign table"] = lines(head, body)
    for name in ("CIFAR10", "Brain"):
        each = [f"{evidence.said('tab:error', 'l2', name, score):.3f} ({score})" for score in ("FP", "EE")]
        facts[f"paper L2 {name}"] = " and ".join(each)


# ------------------------------------------------------------------------------------ what a round can say


def single_round(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """One round against the sum over rounds, all against MR-SV."""
    names = ("LOO", "FP", "ALPHA", "SHAPLEY", "LOO sum", "IOI sum", "COS sum", "ALPHA sum")
    body, ahead, above, same_round = [], [], [], []
    for dataset, short in BOTH.items():
        cells = evidence.cells("tab-error", dataset)
        for utility, title in TITLES.items():
            row = {name: spearman(cells, name, utility, "MR-SV") for name in names}
            body.append([short, title, *(spread(values) for values in row.values())])
            summed = mean(row.pop("ALPHA sum"))
            ahead.append(summed > max(mean(values) for values in row.values()))
            above.append(summed > mean(row["SHAPLEY"]))
        for cell in cells:
            true = cell["utilities"]["expected-accuracy"]["truth"]["rounds"]
            rounds = reports(cell, "expected-accuracy")
            same_round += [close(alpha(one).raw, t) for one, t in zip(rounds, true, strict=True)]
    head = ["data", "utility", "LOO", "FP", "alpha, one round", "exact Shapley, one round"]
    facts["single table"] = lines([*head, "LOO summed", "IOI summed", "COS summed", "alpha summed"], body)
    facts["alpha against Shapley of the round"] = f"{mean(same_round):.2f}"
    claims["alpha summed is ahead of every other score in tab:error"] = all(ahead)
    claims["summing beats the exact Shapley value of one round"] = all(above)
    for name in ("CIFAR10", "Brain"):
        facts[f"paper FP {name}"] = f"{evidence.said('tab:error', 'spearman', name, 'FP'):.2f}"
    facts["ablation table"], ahead_there = _ablations(evidence)
    claims["alpha summed is ahead of FP in every row that was run"] = ahead_there


def _ablations(evidence: Evidence) -> tuple[str, bool]:
    """The rows of tab:round, tab:client and tab:alpha that were run: FP and summed alpha."""
    body, ahead = [], True
    for row in evidence.rows:
        cells = done(row, evidence.results)
        if row.label not in ("tab:round", "tab:client", "tab:alpha") or not cells or row.dataset not in BOTH:
            continue
        found = {u: compare(cells, u, row.at, "MR-SV") for u in PAIR}
        line = [f"`{row.label}`", BOTH[row.dataset], row.row, str(len(cells))]
        for utility in PAIR:
            pair = [found[utility].get(s, {}).get("spearman", []) for s in ("FP", "ALPHA sum")]
            line += [spread(values) for values in pair]
            ahead &= mean(pair[1]) > mean(pair[0])
        body.append(line)
    head = ["paper", "data", "row", "seeds", "FP, expected accuracy", "alpha summed, expected accuracy"]
    return lines([*head, "FP, accuracy", "alpha summed, accuracy"], body), ahead


# -------------------------------------------------------------------------------------- the retraining game


def game(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Which score that secure aggregation allows tracks the retrained Shapley value best."""
    groups = {dataset: evidence.cells("tab-error-game", dataset) for dataset in BOTH}
    cells = [cell for each in groups.values() for cell in each]
    facts["game seeds"] = " and ".join(str(len(each)) for each in groups.values())
    known: dict[str, dict[str, list[float]]] = {}
    for utility in TITLES:
        for score, metrics in compare(cells, utility, LAST, "SV").items():
            known.setdefault(score, {})[utility] = metrics["spearman"]
    pooled = {score: mean([v for u in PAIR for v in each[u]]) for score, each in known.items()}
    body = []
    for score in sorted(known, key=lambda name: -pooled[name]):
        apart = [spearman(groups[dataset], score, "expected-accuracy", "SV") for dataset in BOTH]
        cut = [spread(values) for values in (*(known[score].get(u, []) for u in TITLES), *apart)]
        body.append([f"{score} †" if score in HIDDEN else score, *cut])
    head = ["score", *TITLES.values(), *(f"expected accuracy, {name}" for name in BOTH.values())]
    facts["game table"] = lines(head, body)
    for score in ("MR-SV", "FP", "ALPHA sum", "ALPHA sum, renormalised", "SOLO", "MERIT", "IOI sum"):
        facts[f"game {score}"] = " / ".join(spread(known[score][u]) for u in PAIR)
    for score in ("MR-SV", "FP"):
        each = [evidence.said("tab:error_game", "spearman", name, score) for name in ("CIFAR10", "Brain")]
        facts[f"paper game {score}"] = " and ".join(f"{value:.2f}" for value in each)
    allowed = [name for name in SCORES if name in known and name not in HIDDEN]
    for utility in PAIR:
        best = max(allowed, key=lambda name: mean(known[name][utility]))
        facts[f"game best {utility}"] = f"{best} ({spread(known[best][utility])})"
    new, old = "ALPHA sum, renormalised", "ALPHA sum"
    steps = [a - b for u in PAIR for a, b in zip(known[new][u], known[old][u], strict=True)]
    won, lost = sum(step > 1e-9 for step in steps), sum(step < -1e-9 for step in steps)
    facts["game wins"] = f"better in {won}, worse in {lost}, equal in {len(steps) - won - lost}"
    claims["at least 5 seeds on two datasets"] = all(len(each) >= 5 for each in groups.values())
    claims["the renormalised alpha is ahead of the additive one"] = all(
        mean(known[new][u]) > mean(known[old][u]) for u in PAIR
    )
    claims["MR-SV is not the retrained Shapley value"] = all(mean(known["MR-SV"][u]) < 0.95 for u in PAIR)


def utilities(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Which utility keeps sum(alpha) near the gain, and which agrees with accuracy's Shapley values."""
    body, distance = [], {}
    games = [cell for dataset in BOTH for cell in evidence.cells("tab-error-game", dataset)]
    for utility, title in TITLES.items():
        row, away = [title], []
        for dataset in BOTH:
            totals = [accumulate(reports(cell, utility)) for cell in evidence.cells("tab-error", dataset)]
            ratios = [float(total.values.sum()) / float(total.gain) for total in totals]
            away += [abs(ratio - 1) for ratio in ratios]
            row.append(spread(ratios))
        distance[utility] = mean(away)
        row.append(f"{mean(away):.2f}")
        for dataset in BOTH:
            cells = evidence.cells("tab-error", dataset)
            row.append(spread(spearman(cells, "ALPHA sum", utility, "MR-SV", "accuracy")))
        for score in ("ALPHA sum", "ALPHA sum, renormalised"):
            row.append(spread(spearman(games, score, utility, "SV", "accuracy")))
        body.append(row)
    head = ["utility", "sum(alpha) / gain, CIFAR-10", "Brain-MRI", "mean distance from 1"]
    head += ["alpha summed against accuracy's MR-SV, CIFAR-10", "Brain-MRI"]
    head += ["alpha summed against accuracy's retrained value", "the same, renormalised game"]
    facts["utility table"] = lines(head, body)
    least = min(distance.values())
    claims["expected accuracy keeps sum(alpha) nearest to the gain"] = distance["expected-accuracy"] == least


# ---------------------------------------------------------------------------------------------- downstream


def flipper(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Cross-entropy and the label flipper."""
    cells = evidence.cells("fig-misbeh", "cifar10")
    shown = ("LOO", "FP", "EE", "COS sum", "ALPHA sum", "ALPHA sum, renormalised", "MR-SV")
    body, last = [], {}
    for utility, title in TITLES.items():
        found = detected(cells, utility, LAST)
        places, paid = [], 0
        for cell in cells:
            values = scores(cell, utility, LAST)["ALPHA sum"]
            at = cell["clients"].index(cell["settings"]["corruption"]["label_flip"][0])
            places.append(1.0 + int(np.sum(values > values[at])))
            paid += bool(values[at] > 0)
        last[utility] = found["ALPHA sum"][0]
        counts = ["{} of {}".format(*found[score]) for score in shown]
        body.append([title, *counts, f"{mean(places):.1f}", f"{paid} of {len(cells)}"])
    head = ["utility", *shown, "flipper's mean rank of 9, ALPHA sum", "flipper above 0"]
    facts["flipper table"] = lines(head, body)
    facts["flipper runs"] = str(len(cells))
    said = evidence.paper["detection"]["values"]
    facts["paper detection"] = f"{said['CIFAR10']['FP']:.2f} on CIFAR-10 and {said['ISIC']['FP']:.2f} on ISIC"
    others = [count for utility, count in last.items() if utility != "neg-loss"]
    claims["cross-entropy misses flippers that the others find"] = last["neg-loss"] < min(others)
    there = evidence.cells("fig-misbeh", "isic2019_ham")
    counts = {utility: detected(there, utility, LAST) for utility in TITLES} if there else {}
    each = [f"{TITLES[u]} {{}} of {{}}".format(*found["ALPHA sum"]) for u, found in counts.items()]
    facts["flipper ISIC"] = ", ".join(each) or "not run"


def downstream(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Score-weighted aggregation, the influence table, and the clean part of Brain-MRI."""
    ways = [row.row for row in evidence.rows if (row.experiment, row.dataset) == ("fig-perf", "cifar10")]
    body, accuracy = [], {}
    known = evidence.paper["performance"]["values"]["CIFAR10"]
    for way in ways:
        cells = evidence.cells("fig-perf", "cifar10", way)
        last = {utility: [curve(cell, utility)[-1] for cell in cells] for utility in TITLES}
        top = [max(curve(cell, "neg-loss")) for cell in cells]
        accuracy[way] = mean(last["accuracy"])
        said = " / ".join(f"{known[one]:.2f}" for one in way.split(" = ") if one in known)
        ours = [last["neg-loss"], top, last["accuracy"], last["expected-accuracy"]]
        body.append([way, str(len(cells)), said, *(spread(values) for values in ours)])
    head = ["weights from", "seeds", "the paper: −cross-entropy", "ours: −cross-entropy, 10th round"]
    head += ["its best round", "accuracy, 10th round", "expected accuracy, 10th round"]
    facts["weights table"] = lines(head, body)
    claims["summed scores as weights beat plain averaging"] = accuracy[OURS] > accuracy["FedAvg"]
    matrix, count = mean_influence(evidence.cells("tab-attack", "brain_mri"), "accuracy", 10)
    assert matrix is not None
    off = matrix[~np.eye(len(matrix), dtype=bool)]
    theirs = [value for line in evidence.paper["influence"]["values"] for value in line if value]
    facts |= {
        "influence range": f"{off.min():.2f} to {off.max():.2f}",
        "influence negative": f"{int((off < 0).sum())} of {off.size}",
        "influence seeds": str(count),
        "paper influence": f"{min(theirs):.2f} to {max(theirs):.2f}",
    }
    claims["influence is not a share"] = bool((off < 0).any() or (off > 1).any())
    clean = evidence.cells("tab-error", "brain_mri_clean")
    whole = [c for c in evidence.cells("tab-error", "brain_mri") if c["seed"] in {d["seed"] for d in clean}]
    for name, cells in (("whole", whole), ("clean", clean)):
        facts[f"{name} accuracy"] = spread([curve(cell, "accuracy")[-1] for cell in cells])
        facts[f"{name} spearman"] = spread(spearman(cells, "ALPHA sum", "expected-accuracy", "MR-SV"))
    totals = [[scores(c, "expected-accuracy", 10)["ALPHA sum"] for c in each] for each in (whole, clean)]
    facts["clean against whole"] = spread([close(a, b) or 0.0 for a, b in zip(*totals, strict=True)])


# ------------------------------------------------------------------------------------------ rules and lies


def rules(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """The median in the place of the mean in EE."""
    distinct, own, with_mean, with_median = 0, [], [], []
    for dataset in BOTH:
        for cell in evidence.cells("tab-error", dataset):
            for one in reports(cell, "expected-accuracy"):
                raw = ee(one, combine="median").raw
                distinct = max(distinct, len(np.unique(np.round(raw, 12))))
                own.append(close(raw, alpha(one).raw))
            true = scores(cell, "expected-accuracy", 10)["MR-SV"]
            with_mean.append(close(alpha(one).raw, true) or 0.0)
            with_median.append(close(raw, true) or 0.0)
    facts |= {
        "median distinct": str(distinct),
        "median against alpha": f"{mean(own):.2f}",
        "median against MR-SV": spread(with_median),
        "mean against MR-SV": spread(with_mean),
    }
    claims["a median leaves three groups"] = distinct <= 3


def lies(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """What a lying reporter and a member that trains on the test set gain."""
    cells = [cell for dataset in BOTH for cell in evidence.cells("tab-error", dataset)]
    found = lying(cells)
    facts |= {f"lie {key}": value for key, value in found.items()}
    first, tried = found["first"].split(" of ")
    claims["a lie makes anyone first"] = first == tried
    known = json.loads(CHEAT.read_text(encoding="utf-8"))["shares"]
    gained = {key: mean(values) for key, values in known.items()}
    facts |= {f"cheat {key}": f"{value:.1%}" for key, value in gained.items()}
    fixed = gained["fixed, cheating"] / gained["fixed, honest"]
    fresh = gained["per-round, cheating"] / gained["per-round, honest"]
    claims["training on the test set pays with a fixed pool only"] = fixed > 1.5 and fresh < 1.25


PARTS = (ranking, single_round, game, utilities, flipper, downstream, rules, lies)
