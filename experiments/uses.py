"""What FINDINGS.md says of detection, weights, influence, other rules, lies and cheats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from cells import Result
from evidence import (
    BOTH,
    CHANCE,
    LAST,
    OURS,
    PAIR,
    TITLES,
    Claims,
    Evidence,
    Facts,
    agree,
    between,
    mean,
    spearman,
)
from grid import TIE, grid, settled, text
from measures import (
    curve,
    detected,
    flipper_of,
    influences,
    reports,
    scores,
    spread,
    turned,
    within,
)
from retrained import sign_test, standard_error, student

from fedmerit import Reports, Scores, accumulate, alpha, ee, shares

CHEAT = Path(__file__).resolve().parent / "results" / "other" / "train-on-test.json"

# ---------------------------------------------------------------------------------------------- downstream


def flipper(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Cross-entropy and the label flipper."""
    cells = evidence.cells("fig-misbeh", "cifar10")
    last, always, mrsv = {}, [], {}
    for utility in TITLES:
        found = detected(cells, utility, LAST)
        last[utility], mrsv[utility] = found["ALPHA sum"][0], found["MR-SV"][0]
        always += [found[score][0] == len(cells) for score in ("COS sum", "ALPHA sum, renormalised")]
    facts["flipper missed"] = f"{last['neg-loss']} of {len(cells)}"
    facts["flipper MR-SV"] = f"{mrsv['neg-loss']} of {len(cells)}"
    claims["with cross-entropy alone MR-SV misses most flippers"] = mrsv.pop("neg-loss") < len(
        cells
    ) / 2 and min(mrsv.values()) == len(cells)
    facts["flipper found"] = f"{len(cells)} of {len(cells)}"
    facts["flipper runs"] = str(len(cells))
    others = [count for utility, count in last.items() if utility != "neg-loss"]
    missed = np.repeat([1.0, 0.0], [min(others) - last["neg-loss"], last["neg-loss"]])
    facts["flipper p"] = text(sign_test(missed), ".2f")
    claims["cross-entropy misses flippers that the others find"] = (
        min(others) == len(cells) and sign_test(missed) < CHANCE
    )
    claims["COS and the renormalised alpha find the flipper with every utility"] = all(always)


def class_mix(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """The label flipper of a federation with one frequent class, on two test sets."""
    sets = {
        "as many of every class": evidence.cells("fig-misbeh", "isic2019_slow"),
        "as the data are": evidence.cells("fig-misbeh", "isic2019_slow", "whole test set"),
    }
    hits = {
        (name, utility): detected(cells, utility, LAST)
        for name, cells in sets.items()
        for utility in cells[0]["utilities"]
    }
    runs = min(len(cells) for cells in sets.values())
    facts["mix found"], facts["mix missed"] = (f"{k} of {runs} ({within(k, runs)})" for k in (runs, 0))
    facts["mix runs"] = " and ".join(str(len(cells)) for cells in sets.values())
    even, natural = ([hits[name, utility] for utility in TITLES] for name in sets)
    evened = [*even, hits["as the data are", "balanced-accuracy"]]
    claims["on a balanced test set alpha finds no ISIC flipper, on the natural one all"] = all(
        found["ALPHA sum"][0] == 0 for found in evened
    ) and all(found["ALPHA sum"][0] == found["ALPHA sum"][1] for found in natural)
    claims["the cosine finds the ISIC flipper on both"] = all(
        found["COS sum"][0] == found["COS sum"][1] for found in (*evened, *natural)
    )
    cells = sets["as many of every class"]
    cases = [(utility, score) for utility in TITLES for score in ("FP", "EE")]
    by_sign = sum(turned(cells, utility, LAST, score) for utility, score in cases)
    at_all = sum(detected(cells, utility, LAST)[score][0] for utility, score in cases)
    claims["FP and EE find the ISIC flipper on a balanced test set by a turned sign only"] = by_sign == at_all
    claims["on a balanced test set the ISIC flipper is first or near it by alpha"] = all(
        mean([float(_rank(cell, utility, "ALPHA sum")) for cell in cells]) <= 2 for utility in TITLES
    )
    ranks = [[_rank(cell, PAIR[0], score) for cell in cells] for score in ("LOO sum", "IOI sum")]
    claims["with the expected accuracy it is first by LOO and last by IOI"] = [set(one) for one in ranks] == [
        {1},
        {9},
    ]
    whole = sets["as the data are"]
    first = {(grid(curve(c, "accuracy")[0]), round(curve(c, "balanced-accuracy")[0], 6)) for c in whole}
    claims["after one round the models say one class"] = len(first) == 1 and min(first)[1] == 1 / 8
    facts["mix constant"] = text(min(first)[0], ".3f")
    facts["mix accuracy"] = spread([curve(cell, "accuracy")[-1] for cell in whole])


def _rank(cell: Result, utility: str, score: str) -> int:
    """The flipper's."""
    values = scores(cell, utility, LAST)[score]
    return 1 + int(np.sum(values > values[flipper_of(cell)]))


def downstream(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Score-weighted aggregation, the influence table, and the clean part of Brain-MRI."""
    _weights(evidence, facts, claims)
    _influence(evidence, facts, claims)
    clean = evidence.cells("tab-error", "brain_mri_clean")
    whole = [c for c in evidence.cells("tab-error", "brain_mri") if c["seed"] in {d["seed"] for d in clean}]
    for name, cells in (("whole", whole), ("clean", clean)):
        facts[f"{name} accuracy"] = spread([curve(cell, "accuracy")[-1] for cell in cells])
        facts[f"{name} spearman"] = spread(spearman(cells, "ALPHA sum", "expected-accuracy", "MR-SV"))
    totals = [[scores(c, "expected-accuracy", 10)["ALPHA sum"] for c in each] for each in (whole, clean)]
    facts["clean against whole"] = spread([agree(a, b) for a, b in zip(*totals, strict=True)])


def _weights(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """CIFAR-10 under weights from scores, against plain averaging with the same seeds."""
    ways = [row.row for row in evidence.rows if (row.experiment, row.dataset) == ("fig-perf", "cifar10")]
    cells = {way: found for way in ways if (found := evidence.cells("fig-perf", "cifar10", way))}

    def each(of: Callable[[Result], float]) -> dict[str, dict[int, float]]:
        return {way: {cell["seed"]: of(cell) for cell in some} for way, some in cells.items()}

    def ahead(of: Mapping[str, Mapping[int, float]], way: str, other: str = "FedAvg") -> np.ndarray:
        return np.array([value - of[other][seed] for seed, value in of[way].items()])

    last = {utility: each(lambda cell, u=utility: curve(cell, u)[-1]) for utility in TITLES}  # type: ignore[misc]
    best = each(lambda cell: max(curve(cell, "neg-loss")))
    peaks = each(lambda cell: float(np.argmax(settled(curve(cell, "neg-loss")))) + 1)
    loss = {way: mean(list(values.values())) for way, values in last["neg-loss"].items()}
    facts["weights ours"], facts["weights plain"] = (
        spread(list(last["accuracy"][way].values())) for way in (OURS, "FedAvg")
    )
    gained = ahead(last["accuracy"], OURS)
    facts["weights ahead"] = f"{int((gained > TIE).sum())} of {len(gained)}"
    facts["weights seeds"] = " and ".join(dict.fromkeys(str(len(cells[way])) for way in (OURS, "FedAvg")))
    facts["weights loss"] = "{}, plain averaging {}".format(
        *(spread(list(last["neg-loss"][way].values())) for way in (OURS, "FedAvg"))
    )
    known = evidence.paper["performance"]["values"]["CIFAR10"]
    facts["weights paper"] = ", ".join(f"{text(known[one], '.2f')} ({one})" for one in ("FP", "FedAvg"))
    renormalised = "summed alpha, renormalised"
    leads = [
        ahead(of, way)
        for of in (last["accuracy"], last["expected-accuracy"], best)
        for way in (OURS, renormalised)
    ]
    claims["summed scores as weights beat plain averaging in accuracy and in the best round's loss"] = all(
        lead.mean() > 0 and student(lead) < CHANCE for lead in leads
    )
    every = [value for values in peaks.values() for value in values.values()]
    facts["loss peaks"] = between(every, ".0f")
    same_round = (renormalised, "FP = EE", "LOO", "MR-SV")
    claims["in the last round's loss the mean of all but additive summed alpha and COS is ahead"] = (
        loss[OURS] <= loss["FedAvg"] < min(loss[way] for way in same_round)
    )
    gap, theirs = ahead(last["neg-loss"], "FP = EE", "LOO"), known["FP"] - known["LOO"]
    facts["LOO behind"] = f"{text(mean(gap.tolist()), '.2f')} ± {text(standard_error(gap), '.2f')}"
    facts["paper LOO behind"] = text(theirs, ".2f")
    claims["LOO is behind FP by far less than in the paper, and COS is not ahead of FedAvg"] = (
        0 < gap.mean() < theirs / 4 and loss["COS"] <= loss["FedAvg"] and known["COS"] > known["FedAvg"]
    )
    printed = {way: f"{way}, as printed" for way in ("FedAvg", "FP = EE", "LOO", "COS")}
    facts["weights printed"] = ", ".join(
        f"{text(loss[name], '.2f')} ({way})" for way, name in printed.items()
    )
    lead = ahead(last["neg-loss"], printed["FP = EE"], printed["FedAvg"])
    behind = ahead(last["neg-loss"], printed["FP = EE"], printed["LOO"])
    facts["weights printed lead"] = f"{text(mean(lead.tolist()), '+.2f')}"
    claims["as printed FP's weights are ahead of FedAvg in the loss, and not ahead of LOO's"] = (
        lead.mean() > 0 and student(lead) < CHANCE and behind.mean() <= 0
    )
    before = each(lambda cell: curve(cell, "neg-loss")[-2])
    short = ahead(before, printed["FP = EE"], printed["FedAvg"])
    facts["weights printed before"] = text(mean(short.tolist()), "+.2f")
    claims["as printed FP's weights are behind FedAvg a round earlier"] = (
        short.mean() < 0 and student(short) < CHANCE
    )
    facts["weights printed accuracy"] = ", ".join(
        f"{text(mean(list(last['accuracy'][name].values())), '.2f')} ({way})" for way, name in printed.items()
    )


def _influence(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """The median and the mean of a ratio, and how often a single value of it is no share."""
    theirs = [value for line in evidence.paper["influence"]["values"] for value in line if value]
    found = influences(evidence.cells("tab-attack", "brain_mri"), "accuracy", 10)
    single = found[:, ~np.eye(found.shape[1], dtype=bool)]
    middle, average = (settled(of(single, axis=0)).tolist() for of in (np.median, np.mean))
    outside = (single < -TIE) | (single > 1 + TIE)
    facts["influence accuracy"] = between(middle, ".2f")
    facts["influence outside accuracy"] = f"{int(outside.sum())} of {outside.size}"
    claims["the medians of the influence are near the paper's, the means are not"] = (
        0 < min(middle) < max(middle) < max(theirs) + 0.01 and min(average) < 0 and max(average) > max(middle)
    )


# ------------------------------------------------------------------------------------------ rules and lies


def rules(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """The median in the place of the mean in EE."""
    cells = [cell for dataset in BOTH for cell in evidence.cells("tab-error", dataset)]
    rounds = [one for cell in cells for one in reports(cell, "expected-accuracy")]
    claims["a median leaves three groups"] = all(
        len(np.unique(settled(ee(one, combine="median").raw))) <= 3 for one in rounds
    )


def lies(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """What a lying reporter and a member that trains on the test set gain."""
    cells = [cell for dataset in BOTH for cell in evidence.cells("tab-error", dataset)]
    found = lying(cells)
    facts |= {f"lie {key}": value for key, value in found.items()}
    first, tried = found["first"].split(" of ")
    claims["a lie makes anyone first"] = first == tried
    claims["by the published EE the liar is last"] = found["last"] == f"{tried} of {tried}"
    known = json.loads(CHEAT.read_text(encoding="utf-8"))["shares"]
    gained = {key: mean(values) for key, values in known.items()}
    facts |= {f"cheat {key}": text(value, ".1%") for key, value in gained.items()}
    facts["cheat seeds"] = str(min(map(len, known.values())))
    fixed = gained["fixed, cheating"] / gained["fixed, honest"]
    fresh = gained["per-round, cheating"] / gained["per-round, honest"]
    claims["training on the test set pays with a fixed pool only"] = fixed > 1.5 and fresh < 1.25


def told(one: Reports, i: int, alone_: float = 1.0, without_: float = 0.0) -> Reports:
    """The reports of a round in which member i lies."""
    alone, without = one.alone.copy(), one.without.copy()
    alone[i], without[i] = alone_, without_
    return replace(one, alone=alone, without=without)


def share(scores: Scores, i: int) -> float:
    """Of the published values."""
    return float(scores.values[i] / scores.values.sum())


def lying(cells: Sequence[Result]) -> dict[str, str]:
    """Rank, EE share and pay of a lone liar, over all members of all cells.

    Two lies: the boldest, alone = 1 and without = 0; and the plausible one that all of the round was its
    work, alone = v(M) and without = v(M0).
    """
    first = tried = last_of_published = 0
    pay: dict[str, list[float]] = {"honest": [], "fair": [], "fenced": []}
    factors = []
    for cell in cells:
        rounds = reports(cell, PAIR[0])
        honest = shares(accumulate(rounds), "fair")
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
            total = accumulate([told(one, i) for one in rounds])
            pay["honest"].append(honest[name])
            pay["fair"].append(shares(total, "fair")[name])
            pay["fenced"].append(shares(total, rule="fenced")[name])
    return {
        "first": f"{first} of {tried}",
        "last": f"{last_of_published} of {tried}",
        "EE factor": text(mean(factors), ".2f") if factors else "undefined",
        **{f"pay {key}": text(mean(values), ".1%") for key, values in pay.items()},
    }
