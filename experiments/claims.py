"""What FINDINGS.md says of agreement: facts from results, and claims that hold only while these are so."""

from __future__ import annotations

import json
import math

import numpy as np
from cells import RESULTS, Result, datasets
from evidence import (
    BOTH,
    CHANCE,
    LAST,
    MARGIN,
    PAIR,
    TITLES,
    Claims,
    Evidence,
    Facts,
    between,
    close,
    every_round,
    lines,
    mean,
    spearman,
)
from grid import grid, text
from measures import compare, curve, is_thin, phi, reports, seeds, spread
from retrained import bounds, interval_of_mean, sign_test, student
from sections import done

from fedmerit import accumulate, alpha, ee, fp, surplus

ALONE = RESULTS / "other" / "isic-alone.json"
EXACT = 1e-12
"""What counts as no difference of a sum."""

# ----------------------------------------------------------------------------------------- FP, EE, signs


def ranking(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """How often a negative utility turns FP or EE, and that SURPLUS adds up."""
    improving = turned = 0
    efficient = 0.0
    for one in every_round(evidence.results):
        efficient = max(efficient, abs(float(surplus(one).values.sum()) - one.gain))
        if one.utility == "neg-loss" and grid(one.gain) > 0:
            improving += 1
            turned += "reversed" in (fp(one).status, ee(one).status)
    facts |= {"improving": f"{improving:,}", "improving turned": f"{turned:,}"}
    claims["surplus adds up"] = efficient < EXACT
    claims["a negative utility turns FP or EE round in nearly every improving round"] = (
        turned > 0.9 * improving
    )
    said = {score: evidence.said("tab:error", "l2", "CIFAR10", score) for score in ("FP", "EE")}
    facts["paper L2 CIFAR10"] = " and ".join(f"{text(v, '.3f')} ({score})" for score, v in said.items())


# ------------------------------------------------------------------------------------ what a round can say


def single_round(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """One round against the sum over rounds, all against MR-SV."""
    names = ("LOO", "FP", "ALPHA", "SHAPLEY", "LOO sum", "IOI sum", "COS sum", "ALPHA sum")
    body, ahead, above, same_round = [], [], [], []
    shown: dict[str, list[str]] = {"ALPHA sum": [], "SHAPLEY": []}
    for dataset, short in BOTH.items():
        cells = evidence.cells("tab-error", dataset)
        for utility, title in TITLES.items():
            row = {name: spearman(cells, name, utility, "MR-SV") for name in names}
            if utility in PAIR:
                body.append([short, title, *(spread(values) for values in row.values())])
            if utility == PAIR[0]:
                for name, each in shown.items():
                    each.append(spread(row[name]))
            every = compare(cells, utility, LAST, "MR-SV")
            summed = mean(every.pop("ALPHA sum")["spearman"])
            ahead.append(summed > max(mean(values["spearman"]) for values in every.values()))
            above.append(summed > mean(row["SHAPLEY"]))
        for cell in cells:
            true = cell["utilities"]["expected-accuracy"]["truth"]["rounds"]
            rounds = reports(cell, "expected-accuracy")
            same_round += [close(alpha(one).raw, t) for one, t in zip(rounds, true, strict=True)]
    head = ["data", "utility", "LOO", "FP", "alpha, one round", "exact Shapley, one round"]
    facts["single table"] = lines([*head, "LOO summed", "IOI summed", "COS summed", "alpha summed"], body)
    for name, score in (("alpha", "ALPHA sum"), ("exact", "SHAPLEY")):
        facts[f"single {name}"] = " and ".join(shown[score])
    facts["single seeds"] = " and ".join(str(len(evidence.cells("tab-error", name))) for name in BOTH)
    facts["alpha against Shapley of the round"] = text(mean(same_round), ".2f")
    claims["alpha summed is ahead of every other score in tab:error"] = all(ahead)
    claims["summing beats the exact Shapley value of one round"] = all(above)
    count, ahead_there, facts["ablation lowest"] = _ablations(evidence)
    facts["ablation rows"] = str(count)
    claims["alpha summed is ahead of FP in every row that was run"] = ahead_there


def _ablations(evidence: Evidence) -> tuple[int, bool, str]:
    """Of rows of tab:error, tab:round, tab:client and tab:alpha that are not thin: FP and summed alpha.

    Rows of several tables that are the same runs at the same round count once.
    """
    ahead, lowest, known = True, (2.0, ""), set()
    for row in evidence.rows:
        cells = done(row, evidence.results)
        if row.label not in ("tab:error", "tab:round", "tab:client", "tab:alpha") or is_thin(cells):
            continue
        if (which := (row.at, *sorted(cell["name"] for cell in cells))) in known:
            continue
        found = {u: compare(cells, u, row.at, "MR-SV") for u in PAIR}
        if not any(found.values()):  # a row without MR-SV
            continue
        known.add(which)
        short = datasets()[row.dataset]["short"]
        for utility in PAIR:
            pair = [found[utility].get(s, {}).get("spearman", []) for s in ("FP", "ALPHA sum")]
            ahead &= mean(pair[1]) > mean(pair[0])
            name = f"{row.label} {row.row}".strip()
            where = f"{name}, {short}, {TITLES[utility]}, {len(cells)} seeds"
            lowest = min(lowest, (mean(pair[1]), where))
    least = f"{text(lowest[0], '.2f')} ({lowest[1]})"
    return len(known), ahead, least


def elsewhere(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """ISIC and lung tissue: how much there was to score at all."""
    last = {}
    for dataset in ("isic2019_ham", "isic2019_slow"):
        cells = [cell for cell in evidence.results.values() if cell["dataset"] == dataset]
        balanced = [cell for cell in cells if cell["settings"]["data"]["test_size"]]
        whole = [cell for cell in balanced if cell["settings"]["training"]["rounds"] >= 10]
        last[dataset] = [curve(cell, "accuracy")[-1] for cell in whole]
        facts[f"{dataset} accuracy"] = between(last[dataset], ".3f")
        facts[f"{dataset} runs"] = str(len(whole))
    most = max(last["isic2019_ham"])
    above = sum(grid(value - most) > 0 for value in last["isic2019_slow"])
    facts["isic2019_slow above"] = str(above)
    claims["ISIC's models hardly learn at the paper's rate, and nearly all do at a tenth of it"] = (
        most < 1.5 / 8 and above > 0.9 * len(last["isic2019_slow"])
    )
    for name, dataset in (("lung", "lung_histology"), ("two", "lung_two")):
        cells = evidence.cells("tab-error", dataset)
        facts[f"{name} accuracy"] = spread([curve(cell, "accuracy")[-1] for cell in cells])
    alone = json.loads(ALONE.read_text(encoding="utf-8"))
    facts["ISIC entropy"] = text(alone["entropy of the labels"], ".2f")
    way = "group normalisation, batches of 64, learning rate"
    slow, fast = (min(alone["cross-entropy"][f"{way} {rate}"]) for rate in ("0.0001", "0.001"))
    facts["ISIC slow"], facts["ISIC fast"] = text(slow, ".2f"), text(fast, ".2f")
    claims["alone, ResNet-50 learns with a smaller learning rate only"] = (
        slow < alone["entropy of the labels"] < fast
    )


# ---------------------------------------------------------------------------------------------------- PHI


def at_last(cell: Result, score: str, utility: str) -> float:
    """Return the Spearman of a score with MR-SV in the last round, which must be defined."""
    found = spearman([cell], score, utility, "MR-SV")
    if not found:
        raise SystemExit(f"{cell['name']}: no Spearman of {score} with MR-SV of {utility}")
    return found[0]


def directions(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """PHI beside alpha, against MR-SV."""
    rows = [row for row in evidence.rows if row.experiment == "tab-phi"]
    body: list[list[str]] = []
    behind: dict[str, list[np.ndarray]] = {utility: [] for utility in PAIR}
    sums: list[float] = []
    lung: list[bool] = []
    lowest = (1.0, "")
    for row in rows:
        cells = done(row, evidence.results)
        if not cells:
            continue
        line = [datasets()[row.dataset]["short"], seeds(cells)]
        for utility in PAIR:
            along, ours = (
                [at_last(cell, score, utility) for cell in cells] for score in ("PHI sum", "ALPHA sum")
            )
            behind[utility].append(np.subtract(ours, along))
            line += [spread(along), spread(ours)]
            lowest = min(lowest, (min(along), line[0]))
        totals = [phi(cell, "expected-accuracy", row.at) for cell in cells]
        whole = [math.fsum(total[0]) / total[1] for total in totals if total is not None]
        sums += whole
        alphas = [accumulate(reports(cell, "expected-accuracy")) for cell in cells]
        ratios = [math.fsum(total.values) / total.gain for total in alphas]
        body.append([*line, spread(whole), spread(ratios)])
        if row.dataset.startswith("lung"):
            lung += [_rest(cell) > 1 for cell in cells]
    head = ["data", "seeds", "PHI, expected accuracy", "alpha, expected accuracy"]
    head += ["PHI of sharpened accuracy against accuracy's MR-SV", "alpha, accuracy"]
    facts["phi table"] = lines([*head, "sum of PHI / gain", "sum of alpha / gain"], body)
    gaps = {utility: [mean(gap.tolist()) for gap in each] for utility, each in behind.items()}
    poorer = sum(gap > 0 for gap in gaps["accuracy"])
    facts |= {
        "phi lowest": f"{text(lowest[0], '.2f')} ({lowest[1]})",
        "phi rest": f"{sum(lung)} of {len(lung)}",
        "phi sums": between(sums, ".2f"),
        "phi data": str(len(body)),
        "phi behind": f"all {poorer}" if poorer == len(body) else f"{poorer} of {len(body)}",
    }
    pooled = {utility: -np.concatenate(each) for utility, each in behind.items()}
    facts["phi pooled"] = interval_of_mean(pooled["expected-accuracy"])
    facts["phi runs"] = str(len(pooled["expected-accuracy"]))
    signs_ = np.sign([grid(value) for value in pooled["accuracy"]])
    facts["phi worse"] = f"{int((signs_ > 0).sum())} better, {int((signs_ < 0).sum())} worse"
    facts["phi worse p"] = text(sign_test(pooled["accuracy"]), ".3f")
    facts["phi worse student"] = text(student(pooled["accuracy"]), ".3f")
    claims["of accuracy, PHI is behind alpha over all runs beyond chance"] = (
        signs_.sum() < 0 and sign_test(pooled["accuracy"]) < CHANCE
    )
    low, high = bounds(pooled["expected-accuracy"])
    claims["PHI is as close to MR-SV of the expected accuracy as alpha"] = -MARGIN < low < high < MARGIN
    claims["of accuracy, PHI is behind alpha on most datasets"] = poorer > len(body) / 2
    claims["no single dataset shows a difference of PHI and alpha beyond chance"] = all(
        student(gap) > CHANCE for gaps in behind.values() for gap in gaps
    )


def _rest(cell: Result) -> float:
    """The largest part of a round's gain that PHI leaves unexplained."""
    rounds = cell["phi"]["expected-accuracy"]
    known = [(one["gain"], math.fsum(one["phi"])) for one in rounds if grid(one["gain"])]
    return max(abs((gain - total) / gain) for gain, total in known)


# ------------------------------------------------------------------------------------------- the utility


def utilities(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Which utility keeps sum(alpha) near the gain, and which agrees with accuracy's Shapley values."""
    body, distance = [], {}
    games = [cell for dataset in BOTH for cell in evidence.cells("tab-error-game", dataset)]
    for utility, title in TITLES.items():
        row, away = [title], []
        for dataset in BOTH:
            totals = [accumulate(reports(cell, utility)) for cell in evidence.cells("tab-error", dataset)]
            ratios = [math.fsum(total.values) / total.gain for total in totals]
            away += [abs(ratio - 1) for ratio in ratios]
            row.append(spread(ratios))
        distance[utility] = mean(away)
        row.append(text(mean(away), ".2f"))
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
    crossed = {u: np.array(spearman(games, "ALPHA sum", u, "SV", "accuracy")) for u in TITLES}
    steps = {u: crossed[u] - crossed["accuracy"] for u in TITLES}
    rounds = [cell for dataset in BOTH for cell in evidence.cells("tab-error", dataset)]
    either = [np.array(spearman(rounds, "ALPHA sum", u, "MR-SV", "accuracy")) for u in PAIR]
    claims["as a substitute for accuracy the expected accuracy is poor by MR-SV"] = (
        either[0].mean() < either[1].mean() and student(either[0] - either[1]) < CHANCE
    )
    facts["crossed interval"] = interval_of_mean(steps["expected-accuracy"])
    claims["expected accuracy tracks accuracy's retrained value no worse than accuracy does"] = (
        bounds(steps["expected-accuracy"])[0] > -MARGIN
    )
    claims["Brier and cross-entropy are further from accuracy's retrained value beyond chance"] = all(
        steps[u].mean() < 0 and student(steps[u]) < CHANCE for u in ("brier", "neg-loss")
    )
    least = min(distance.values())
    claims["expected accuracy keeps sum(alpha) nearest to the gain"] = distance["expected-accuracy"] == least
