"""What FINDINGS.md says of agreement: facts from results, and claims that hold only while these are so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from evidence import (
    BOTH,
    LAST,
    PAIR,
    TITLES,
    Claims,
    Evidence,
    Facts,
    close,
    every_round,
    lines,
    mean,
    spearman,
)
from measures import HIDDEN, SCORES, Vector, compare, reports, scores, signs, spread
from sections import done

from fedmerit import accumulate, alpha, ee, fp, normalise, surplus

AIMS = {"accuracy": 0.93, "expected-accuracy": 0.96, "brier": 0.96}
"""The mean Spearman of summed alpha with MR-SV that we hoped for."""

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
    same = {evidence.said("tab:error", "spearman", "Brain", score) for score in ("FP", "EE")}
    claims["the paper has one Spearman for FP and EE on Brain-MRI"] = len(same) == 1
    facts["paper same Brain"] = f"{same.pop():.3f}"
    for name in ("CIFAR10", "Brain"):
        each = [f"{evidence.said('tab:error', 'l2', name, score):.3f} ({score})" for score in ("FP", "EE")]
        facts[f"paper L2 {name}"] = " and ".join(each)


# ------------------------------------------------------------------------------------ what a round can say


def single_round(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """One round against the sum over rounds, all against MR-SV."""
    names = ("LOO", "FP", "ALPHA", "SHAPLEY", "LOO sum", "IOI sum", "COS sum", "ALPHA sum")
    body, ahead, above, same_round, missed = [], [], [], [], []
    for dataset, short in BOTH.items():
        cells = evidence.cells("tab-error", dataset)
        for utility, title in TITLES.items():
            row = {name: spearman(cells, name, utility, "MR-SV") for name in names}
            body.append([short, title, *(spread(values) for values in row.values())])
            summed = mean(row.pop("ALPHA sum"))
            if utility in AIMS and round(summed, 2) < AIMS[utility]:
                missed.append(f"{title} on {short} ({summed:.3f})")
            ahead.append(summed > max(mean(values) for values in row.values()))
            above.append(summed > mean(row["SHAPLEY"]))
        for cell in cells:
            true = cell["utilities"]["expected-accuracy"]["truth"]["rounds"]
            rounds = reports(cell, "expected-accuracy")
            same_round += [close(alpha(one).raw, t) for one, t in zip(rounds, true, strict=True)]
    head = ["data", "utility", "LOO", "FP", "alpha, one round", "exact Shapley, one round"]
    facts["single table"] = lines([*head, "LOO summed", "IOI summed", "COS summed", "alpha summed"], body)
    facts["aims"] = ", ".join(f"{aim} for {TITLES[u]}" for u, aim in AIMS.items())
    facts["aims missed"] = ", ".join(missed) or "none"
    facts["alpha against Shapley of the round"] = f"{mean(same_round):.2f}"
    claims["alpha summed is ahead of every other score in tab:error"] = all(ahead)
    claims["summing beats the exact Shapley value of one round"] = all(above)
    for name in ("CIFAR10", "Brain"):
        facts[f"paper FP {name}"] = f"{evidence.said('tab:error', 'spearman', name, 'FP'):.2f}"
    facts["ablation table"], ahead_there, facts["ablation lowest"] = _ablations(evidence)
    claims["alpha summed is ahead of FP in every row that was run"] = ahead_there


def _ablations(evidence: Evidence) -> tuple[str, bool, str]:
    """The rows of tab:round, tab:client and tab:alpha that were run: FP and summed alpha."""
    body, ahead, lowest = [], True, (2.0, "")
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
            where = f"{row.label} {row.row}, {BOTH[row.dataset]}, {TITLES[utility]}, {len(cells)} seed(s)"
            lowest = min(lowest, (mean(pair[1]), where))
        body.append(line)
    head = ["paper", "data", "row", "seeds", "FP, expected accuracy", "alpha summed, expected accuracy"]
    table_ = lines([*head, "FP, accuracy", "alpha summed, accuracy"], body)
    return table_, ahead, f"{lowest[0]:.2f} ({lowest[1]})"


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
    tried = (new, "SOLO", "MERIT")
    fresh = [i for i, cell in enumerate(cells) if cell["seed"] > 0]
    p_values = {}
    for name in (*tried, "MR-SV"):
        facts[f"ahead {name}"] = "{:+.2f} ± {:.2f}".format(*_ahead(known[name], known[old])[:2])
        by, error, p_values[name] = _ahead(known[name], known[old], fresh)
        facts[f"fresh {name}"] = f"{by:+.2f} ± {error:.2f}, p = {p_values[name]:.2f}"
    by, error, _ = _ahead(known[new], known[old], fresh)
    facts["fresh runs"] = str(len(fresh))
    facts["runs for three errors"] = str(math.ceil(len(fresh) * (3 * error / by) ** 2))
    between, error_between, _ = _ahead(known["SOLO"], known[new])
    facts["SOLO ahead of renormalised"] = f"{between:+.2f} ± {error_between:.2f}"
    mixed: dict[str, list[float]] = {}
    for u in PAIR:
        for cell in cells:
            own = scores(cell, u, LAST)
            both = standardised(own["SOLO"]) + standardised(own[new])
            mixed.setdefault(u, []).append(close(both, own["SV"]) or 0.0)
    ahead_of_solo, error_of_mix, _ = _ahead(mixed, known["SOLO"])
    facts["game mix"] = " / ".join(spread(mixed[u]) for u in PAIR)
    facts["mix ahead of SOLO"] = f"{ahead_of_solo:+.2f} ± {error_of_mix:.2f}"
    claims["mixing SOLO and the renormalised alpha gains little"] = abs(ahead_of_solo) < 0.1
    ceiling = mean([v for u in PAIR for v in known["ALPHA, retrained"][u]])
    claims["at least 5 seeds on two datasets"] = all(len(each) >= 5 for each in groups.values())
    claims["all three are ahead of alpha, none beyond chance after three tries"] = (
        all(mean(known[name][u]) > mean(known[old][u]) for name in tried for u in PAIR)
        and min(3 * p_values[name] for name in tried) > 0.05
    )
    claims["SOLO and the renormalised alpha are too close to call"] = abs(between) < 2 * error_between
    claims["MR-SV is not the retrained Shapley value"] = all(mean(known["MR-SV"][u]) < 0.9 for u in PAIR)
    claims["nothing allowed reaches .95, nor does the ceiling"] = (
        max(pooled[name] for name in allowed) < 0.95 and ceiling < 0.95
    )
    close_ = [
        close(scores(cell, u, LAST)[new], scores(cell, u, LAST)["MR-SV, renormalised"])
        for cell in cells
        for u in PAIR
        if "MR-SV, renormalised" in scores(cell, u, LAST)
    ]
    facts["renormalised alpha against its MR-SV"] = f"{mean(close_):.2f}"
    truths = [[scores(cell, u, LAST)["SV"] for u in PAIR] for cell in cells]
    facts["truths agree"] = spread([close(*pair) or 0.0 for pair in truths])
    sums, above, members = [], 0, 0
    for dataset in BOTH:
        for cell in evidence.cells("tab-error", dataset):
            rounds = reports(cell, "expected-accuracy", game="renormalised")
            total = accumulate(rounds)
            sums.append(float(total.values.sum()) / float(total.gain))
            above, members = above + int((total.values > 0).sum()), members + len(total.values)
    facts["renormalised sum"] = spread(sums)
    facts["renormalised above 0"] = f"{above} of {members}"
    claims["the renormalised alpha does not add up and is often negative"] = (
        abs(float(np.mean(sums)) - 1) > 1 and above < members / 2
    )


def standardised(values: Vector) -> Vector:
    """Mean 0, standard deviation 1."""
    return (values - values.mean()) / values.std()


def _ahead(
    one: Mapping[str, Sequence[float]],
    other: Mapping[str, Sequence[float]],
    runs: Sequence[int] | None = None,
) -> tuple[float, float, float]:
    """Mean difference a run (of both utilities), its standard error, and Student's two-sided p-value."""
    from scipy.stats import ttest_1samp

    steps = np.mean([np.subtract(one[u], other[u]) for u in PAIR], axis=0)
    steps = steps if runs is None else steps[list(runs)]
    error = float(steps.std(ddof=1) / np.sqrt(len(steps)))
    return float(steps.mean()), error, float(ttest_1samp(steps, 0.0).pvalue)


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
    crossed = {u: mean(spearman(games, "ALPHA sum", u, "SV", "accuracy")) for u in TITLES}
    claims["expected accuracy tracks accuracy's retrained value as well as accuracy does"] = (
        crossed["expected-accuracy"] > crossed["accuracy"] - 0.05
        and max(crossed["brier"], crossed["neg-loss"]) < crossed["accuracy"]
    )
    least = min(distance.values())
    claims["expected accuracy keeps sum(alpha) nearest to the gain"] = distance["expected-accuracy"] == least
