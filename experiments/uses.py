"""What FINDINGS.md says of detection, weights, influence, other rules, lies and cheats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from evidence import (
    BOTH,
    LAST,
    OURS,
    TITLES,
    Claims,
    Evidence,
    Facts,
    agree,
    close,
    lines,
    mean,
    spearman,
)
from manipulation import lying
from measures import curve, detected, mean_influence, reports, scores, spread

from fedmerit import alpha, ee

CHEAT = Path(__file__).resolve().parent / "results" / "other" / "train-on-test.json"

# ---------------------------------------------------------------------------------------------- downstream


def flipper(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Cross-entropy and the label flipper."""
    cells = evidence.cells("fig-misbeh", "cifar10")
    shown = ("LOO", "FP", "EE", "COS sum", "ALPHA sum", "ALPHA sum, renormalised", "MR-SV")
    body, last, always = [], {}, []
    for utility, title in TITLES.items():
        found = detected(cells, utility, LAST)
        places, paid = [], 0
        for cell in cells:
            values = scores(cell, utility, LAST)["ALPHA sum"]
            at = cell["clients"].index(cell["settings"]["corruption"]["label_flip"][0])
            places.append(1.0 + int(np.sum(values > values[at])))
            paid += bool(values[at] > 0)
        last[utility] = found["ALPHA sum"][0]
        always += [found[score][0] == len(cells) for score in ("COS sum", "ALPHA sum, renormalised")]
        counts = ["{} of {}".format(*found[score]) for score in shown]
        body.append([title, *counts, f"{mean(places):.1f}", f"{paid} of {len(cells)}"])
    head = ["utility", *shown, "flipper's mean rank of 9, ALPHA sum", "flipper above 0"]
    facts["flipper table"] = lines(head, body)
    facts["flipper runs"] = str(len(cells))
    said = evidence.paper["detection"]["values"]
    facts["paper detection"] = f"{said['CIFAR10']['FP']:.2f} on CIFAR-10 and {said['ISIC']['FP']:.2f} on ISIC"
    others = [count for utility, count in last.items() if utility != "neg-loss"]
    claims["cross-entropy misses flippers that the others find"] = last["neg-loss"] < min(others)
    claims["COS and the renormalised alpha find the flipper with every utility"] = all(always)
    facts["paper detection COS"] = f"{said['CIFAR10']['COS sum']:.2f}"
    there = evidence.cells("fig-misbeh", "isic2019_ham")
    counts = {utility: detected(there, utility, LAST) for utility in TITLES}
    for score in ("ALPHA sum", "COS sum"):
        each = [f"{TITLES[u]} {{}} of {{}}".format(*found[score]) for u, found in counts.items()]
        facts[f"flipper ISIC {score}"] = ", ".join(each)
    claims["alpha does not find the ISIC flipper in four of five"] = all(
        hit < 0.8 * total for hit, total in (found["ALPHA sum"] for found in counts.values())
    )


def downstream(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Score-weighted aggregation, the influence table, and the clean part of Brain-MRI."""
    ways = [row.row for row in evidence.rows if (row.experiment, row.dataset) == ("fig-perf", "cifar10")]
    body, accuracy, expected, loss, best, peaks = [], {}, {}, {}, {}, []
    plain = {
        cell["seed"]: curve(cell, "neg-loss")[-1] for cell in evidence.cells("fig-perf", "cifar10", "FedAvg")
    }
    better: dict[str, tuple[int, int]] = {}
    known = evidence.paper["performance"]["values"]["CIFAR10"]
    for way in ways:
        cells = evidence.cells("fig-perf", "cifar10", way)
        if not cells:
            continue
        last = {utility: [curve(cell, utility)[-1] for cell in cells] for utility in TITLES}
        top = [max(curve(cell, "neg-loss")) for cell in cells]
        accuracy[way], expected[way] = mean(last["accuracy"]), mean(last["expected-accuracy"])
        loss[way], best[way] = mean(last["neg-loss"]), mean(top)
        ahead = [curve(cell, "neg-loss")[-1] > plain[cell["seed"]] for cell in cells]
        better[way] = sum(ahead), len(ahead)
        peaks += [int(np.argmax(curve(cell, "neg-loss"))) + 1 for cell in cells]
        said = " / ".join(f"{known[one]:.2f}" for one in way.split(" = ") if one in known)
        ours = [last["neg-loss"], top, last["accuracy"], last["expected-accuracy"]]
        body.append([way, str(len(cells)), said, *(spread(values) for values in ours)])
    head = ["weights from", "seeds", "the paper: −cross-entropy", "ours: −cross-entropy, 10th round"]
    head += ["its best round", "accuracy, 10th round", "expected accuracy, 10th round"]
    facts["weights table"] = lines(head, body)
    claims["summed scores as weights beat plain averaging in accuracy and in the best round's loss"] = (
        accuracy[OURS] > accuracy["FedAvg"]
        and expected[OURS] > expected["FedAvg"]
        and best[OURS] > best["FedAvg"]
    )
    facts["weights ISIC"] = ", ".join(_isic_weights(evidence))
    facts["loss peaks"] = f"{min(peaks)} to {max(peaks)}"
    facts["weights better"] = ", ".join(f"{way} {{}} of {{}}".format(*better[way]) for way in ways[1:])
    same_round = ("summed alpha, renormalised", "FP = EE", "LOO", "MR-SV")
    claims["in the last round's loss additive summed alpha is not, the others but COS are"] = loss[
        OURS
    ] <= loss["FedAvg"] and all(better[way][0] == better[way][1] for way in same_round)
    for utility in ("expected-accuracy", "accuracy"):
        matrix, count = mean_influence(evidence.cells("tab-attack", "brain_mri"), utility, 10)
        assert matrix is not None
        off = matrix[~np.eye(len(matrix), dtype=bool)]
        facts[f"influence {utility}"] = (
            f"{off.min():.2f} to {off.max():.2f} ({TITLES[utility]}, mean of {count} seeds; "
            f"{int((off < 0).sum())} of {off.size} negative)"
        )
        claims["influence is not a share"] = bool((off < 0).any())
    theirs = [value for line in evidence.paper["influence"]["values"] for value in line if value]
    facts |= {
        "paper influence": f"{min(theirs):.2f} to {max(theirs):.2f}",
    }
    clean = evidence.cells("tab-error", "brain_mri_clean")
    whole = [c for c in evidence.cells("tab-error", "brain_mri") if c["seed"] in {d["seed"] for d in clean}]
    for name, cells in (("whole", whole), ("clean", clean)):
        facts[f"{name} accuracy"] = spread([curve(cell, "accuracy")[-1] for cell in cells])
        facts[f"{name} spearman"] = spread(spearman(cells, "ALPHA sum", "expected-accuracy", "MR-SV"))
    totals = [[scores(c, "expected-accuracy", 10)["ALPHA sum"] for c in each] for each in (whole, clean)]
    facts["clean against whole"] = spread([agree(a, b) for a, b in zip(*totals, strict=True)])


def _isic_weights(evidence: Evidence) -> Iterator[str]:
    """Cross-entropy and accuracy of the last model under each kind of weights."""
    for row in evidence.rows:
        if (row.experiment, row.dataset) == ("fig-perf", "isic2019_ham"):
            cells = evidence.cells(row.experiment, row.dataset, row.row)
            last = (f"{mean([curve(cell, u)[-1] for cell in cells]):.3f}" for u in ("neg-loss", "accuracy"))
            yield f"{row.row} {' / '.join(last)}"


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
            with_mean.append(agree(alpha(one).raw, true))
            with_median.append(agree(raw, true))
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
    claims["by the published EE the liar is last"] = found["last"] == f"{tried} of {tried}"
    known = json.loads(CHEAT.read_text(encoding="utf-8"))["shares"]
    gained = {key: mean(values) for key, values in known.items()}
    facts |= {f"cheat {key}": f"{value:.1%}" for key, value in gained.items()}
    fixed = gained["fixed, cheating"] / gained["fixed, honest"]
    fresh = gained["per-round, cheating"] / gained["per-round, honest"]
    claims["training on the test set pays with a fixed pool only"] = fixed > 1.5 and fresh < 1.25
