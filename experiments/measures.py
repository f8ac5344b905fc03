"""A finished cell -> score vectors, ground truths, and how close they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from cells import Result
from grid import TIE, grid, mean, settled, text

from fedmerit import Reports, Scores, Table, accumulate, agreement, alpha, ee, fp, loo, solo
from fedmerit.errors import UndefinedScore
from fedmerit.scoring.ground_truth import Agreement, shapley
from fedmerit.scoring.scores import influence

Vector = np.ndarray
ENOUGH = 3
"""A row with fewer seeds is thin: it is marked, and no sentence rests on it."""
SINGLE = ("LOO", "EE", "FP", "ALPHA", "SHAPLEY")
SUMMED = (
    "LOO sum", "IOI sum", "COS sum", "COS-MODEL sum", "ALPHA sum", "PHI sum",
    "LOO sum, renormalised", "IOI sum, renormalised", "ALPHA sum, renormalised",
)  # fmt: skip
OTHER = (
    "SOLO", "MERIT", "MERIT, renormalised", "ENSEMBLE", "PATH", "samples",
    "MR-SV", "MR-SV, renormalised", "ENSEMBLE, Shapley", "ALPHA, retrained",
)  # fmt: skip
SCORES = SINGLE + SUMMED + OTHER
HIDDEN = ("SHAPLEY", "MR-SV", "MR-SV, renormalised", "ENSEMBLE, Shapley", "ALPHA, retrained")
"""Scores that need what secure aggregation hides, or federations trained again."""

EXPLAINED = {
    "LOO": "leave one out, of the one round",
    "EE": "Everybody-Else of the one round, as the paper publishes it",
    "FP": "Fair-Private of the one round, as the paper publishes it",
    "ALPHA": "mean of LOO and IOI of the one round: what EE and FP rank by unless their sign turns",
    "SHAPLEY": "exact Shapley value of the one round, which LOO, EE, FP and ALPHA approximate",
    "LOO sum": "LOO summed over the rounds",
    "IOI sum": "include one in, summed over the rounds",
    "COS sum": "cosine of the update with the sum of all, summed over the rounds",
    "COS-MODEL sum": "the paper's COS: cosine of the models M0 + U_i and M, summed; only newer runs kept it",
    "ALPHA sum": "alpha summed over the rounds: what fedmerit ranks and pays by",
    "PHI sum": "PHI summed over the rounds: products of updates with the round's public direction; for "
    "accuracy, which has no gradient, that of sharpened accuracy",
    "LOO sum, renormalised": "LOO summed, of the game in which weights are renormalised",
    "IOI sum, renormalised": "IOI summed, of the game in which weights are renormalised: v(M0 + d_i)",
    "ALPHA sum, renormalised": "alpha summed, of that game",
    "SOLO": "utility of the model that a member trained alone",
    "MERIT": "SOLO + IOI summed",
    "MERIT, renormalised": "SOLO + IOI summed of the renormalised game",
    "ENSEMBLE": "alpha of the game in which a coalition is the mean prediction of its members' solo models",
    "PATH": "as alpha: SOLO, and what the run loses when a member takes its own updates of all rounds away",
    "samples": "number of training images",
    "MR-SV": "multi-round Shapley value: mean of the rounds' exact ones",
    "MR-SV, renormalised": "MR-SV of the renormalised game (Song et al. 2019); where members were retrained",
    "ENSEMBLE, Shapley": "Shapley value of the ensemble game",
    "ALPHA, retrained": "alpha of the retraining game itself, for comparison",
}


def measured(cell: Result, utility: str, values: Any) -> Vector:
    """Utilities as numbers; accuracy as the share of test images that it is.

    Results hold 9 digits. Of 1/216 that is not enough: what cancels on paper would not, and members who are
    equal would be ranked by the digits that were cut off. Balanced accuracy, whose class counts are not in
    the file, is taken as it is stored.
    """
    if utility == "accuracy":
        images = np.multiply(values, cell["test_images"])
        right = np.rint(images)
        if np.abs(images - right).max(initial=0.0) > 1e-3:
            raise SystemExit(f"{cell['name']}: an accuracy is no share of {cell['test_images']} test images")
        return right / cell["test_images"]
    if utility == "balanced-accuracy":
        return np.round(values, 9)
    return np.asarray(values, dtype=np.float64)


def reports(cell: Result, utility: str, *, game: str = "additive") -> list[Reports]:
    """The reports of all scored rounds, read once."""
    known = cell.setdefault("reports", {})
    if (utility, game) not in known:
        known[utility, game] = _reports(cell, utility, game)
    return known[utility, game]  # type: ignore[no-any-return]


def _reports(cell: Result, utility: str, game: str) -> list[Reports]:
    found = []
    for one in cell["utilities"][utility]["rounds"]:
        if game == "renormalised" and game not in one:
            continue
        models = one["renormalised"] if game == "renormalised" else one
        solo_ = one.get("solo")
        found.append(
            Reports(
                empty=float(measured(cell, utility, one["empty"])),
                grand=float(measured(cell, utility, one["grand"])),
                alone=measured(cell, utility, models["alone"]),
                without=measured(cell, utility, models["without"]),
                clients=tuple(one["participants"]),
                cosine=one.get("cosine"),
                solo=None if solo_ is None else measured(cell, utility, solo_),
                solo_empty=None if solo_ is None else float(measured(cell, utility, one["solo_empty"])),
                utility=utility,
                round=one["round"],
            )
        )
    return found


def scores(cell: Result, utility: str, at: int) -> dict[str, Vector]:
    """Every score after round ``at`` that is defined, in the order of the cell's members, ties settled."""
    at = min(at, cell["utilities"][utility]["rounds"][-1]["round"])
    known = cell.setdefault("computed", {})
    if (utility, at) not in known:
        known[utility, at] = _scores(cell, utility, at)
    return known[utility, at]  # type: ignore[no-any-return]


def _scores(cell: Result, utility: str, at: int) -> dict[str, Vector]:
    plain = [one for one in reports(cell, utility) if one.round is not None and one.round <= at]
    other = reports(cell, utility, game="renormalised")[: len(plain)]
    if not plain:
        return {}
    last = plain[-1]
    made: dict[str, Callable[[], Scores]] = {
        "LOO": lambda: loo(last),
        "EE": lambda: ee(last),
        "FP": lambda: fp(last),
        "ALPHA": lambda: alpha(last),
        "SOLO": lambda: solo(last),
    }
    for name in ("LOO", "IOI", "COS", "ALPHA", "MERIT"):
        label = name if name == "MERIT" else f"{name} sum"
        made[label] = lambda name=name: accumulate(plain, score=name)  # type: ignore[misc]
        if other and name != "COS":
            made[f"{label}, renormalised"] = lambda name=name: accumulate(other, score=name)  # type: ignore[misc]
    found: dict[str, Vector] = {}
    for label, make in made.items():
        try:
            score = make()
        except UndefinedScore:
            continue
        known = score.as_dict()
        found[label] = _settled(score, [known.get(name, 0.0) for name in cell["clients"]])
    found["samples"] = np.array([float(cell["samples"][name]) for name in cell["clients"]])
    if (along := phi(cell, utility, at)) is not None:
        found["PHI sum"] = settled(along[0])
    if cosines := cell.get("cosine_model", [])[: len(plain)]:
        each = [[one.get(name, 0.0) for one in cosines] for name in cell["clients"]]
        found["COS-MODEL sum"] = settled([math.fsum(own) for own in each])
    truth = cell["utilities"][utility]["truth"]
    if truth.get("rounds"):
        rounds = np.array(truth["rounds"][: len(plain)], dtype=np.float64)
        found["SHAPLEY"] = settled(np.nan_to_num(rounds[-1]))
        found["MR-SV"] = settled(np.nan_to_num(rounds).mean(0))
    if truth.get("rounds renormalised"):
        rounds = np.array(truth["rounds renormalised"][: len(plain)], dtype=np.float64)
        found["MR-SV, renormalised"] = settled(rounds.mean(0))
    if at >= plain[-1].round == cell["settings"]["training"]["rounds"]:
        found |= _whole_run(cell, utility, plain[-1])
    if truth.get("SV") and at >= len(reports(cell, utility)):
        table = Table(measured(cell, utility, cell["retrained"][utility]), tuple(cell["clients"]))
        found["ALPHA, retrained"] = settled(alpha(Reports.from_table(table)).raw)
        found["SV"] = settled(truth["SV"])
    return found


def phi(cell: Result, utility: str, at: int) -> tuple[Vector, float] | None:
    """PHI summed over the rounds, and the gain that it adds up to; of sharpened accuracy for accuracy."""
    name = "sharpened-accuracy" if utility == "accuracy" else utility
    rounds = [one for one in cell.get("phi", {}).get(name, []) if one["round"] <= at]
    if not rounds:
        return None
    known = [dict(zip(one["participants"], one["phi"], strict=True)) for one in rounds]
    total = [math.fsum(one.get(client, 0.0) for one in known) for client in cell["clients"]]
    return np.array(total), math.fsum(one["gain"] for one in rounds)


def _settled(score: Scores, values: Sequence[float]) -> Vector:
    """What ties before a score is rescaled ties after it."""
    size, raw = float(np.abs(score.values).max()), float(np.abs(score.raw).max())
    return settled(values, TIE * size / raw if raw > TIE else TIE)


def _whole_run(cell: Result, utility: str, last: Reports) -> dict[str, Vector]:
    """Scores of analyses.py, which look at a run when it is over."""
    whole = cell.get("whole_run", {})
    if "solo together" not in whole or last.solo_empty is None:
        return {}
    found = {key: measured(cell, utility, value) for key, value in whole["solo together"][utility].items()}
    own = found["alone"] - last.solo_empty
    path = last.grand - measured(cell, utility, whole["path without, renormalised"][utility])
    made = {
        "ENSEMBLE": settled((own + found["grand"] - found["without"]) / 2),
        "PATH": settled((own + path) / 2),
    }
    if found["table"].size:
        table = Table([last.solo_empty, *found["table"]], tuple(cell["clients"]))
        made["ENSEMBLE, Shapley"] = settled(shapley(table).values)
    return made


def compare(
    cells: Sequence[Result], utility: str, at: int, truth: str, against: str | None = None
) -> dict[str, dict[str, list[float]]]:
    """Per score and metric, the agreement with a truth in each cell where both exist.

    Args:
        cells: one a seed.
        utility: of the scores.
        at: round.
        truth: "MR-SV" or "SV".
        against: utility of the truth, if it is another one.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        for name, close in agreements(cell, utility, at, truth, against or utility).items():
            for metric in ("l2", "spearman", "pearson", "kendall"):
                value = getattr(close, metric)
                if value is not None:
                    found.setdefault(name, {}).setdefault(metric, []).append(value)
    return found


def agreements(cell: Result, utility: str, at: int, truth: str, against: str) -> dict[str, Agreement]:
    """Of every score of a cell, worked out once."""
    known = cell.setdefault("agreements", {})
    at = min(at, cell["utilities"]["accuracy"]["rounds"][-1]["round"])
    key = utility, at, truth, against
    if key not in known:
        both = utility in cell["utilities"] and against in cell["utilities"]
        own, true = (scores(cell, one, at) if both else {} for one in (utility, against))
        known[key] = {
            name: agreement(own[name], true[truth])
            for name in SCORES
            if truth in true and name in own and name != truth
        }
    return known[key]  # type: ignore[no-any-return]


def flipper_of(cell: Result) -> int:
    """The place of the label flipper among the clients."""
    return int(cell["clients"].index(cell["settings"]["corruption"]["label_flip"][0]))


def detected(cells: Sequence[Result], utility: str, at: int) -> dict[str, tuple[int, int]]:
    """Per score: in how many cells the label flipper has the lowest value, and of how many."""
    counts: dict[str, tuple[int, int]] = {}
    for cell in cells:
        flipper = flipper_of(cell)
        for name, values in scores(cell, utility, at).items():
            hit, total = counts.get(name, (0, 0))
            alone = int((values <= values[flipper]).sum()) == 1
            counts[name] = hit + alone, total + 1
    return counts


def turned(cells: Sequence[Result], utility: str, at: int, score: str) -> int:
    """In how many cells FP or EE has the label flipper lowest because its sign has turned."""
    which = {"FP": fp, "EE": ee}[score]
    hits = [cell for cell in cells if detected([cell], utility, at)[score][0]]
    seen = [[one for one in reports(cell, utility) if one.round <= at][-1] for cell in hits]
    return sum(which(one).status == "reversed" for one in seen)


def influences(cells: Sequence[Result], utility: str, at: int) -> Vector:
    """One matrix a cell where it is defined, shape (K, N, N): reporter i on client j."""
    found = []
    for cell in cells:
        last = next((one for one in reports(cell, utility) if one.round == at), None)
        try:
            if last is not None:
                found.append(influence(last))
        except UndefinedScore:
            continue
    return np.array(found)


def signs(cells: Sequence[Result], utility: str) -> dict[str, str]:
    """What the normalisations of EE and FP did, and how much of the gain alpha explains, over all rounds."""
    rounds = [one for cell in cells for one in reports(cell, utility)]
    status = {"EE": 0, "FP": 0}
    for one in rounds:
        for name, score in (("EE", ee), ("FP", fp)):
            status[name] += score(one).status == "reversed"
    shares = []
    for cell in cells:
        total = accumulate(reports(cell, utility))
        shares.append(math.fsum(total.values) / total.gain if grid(total.gain) else math.nan)
    worse = sum(grid(one.gain) < 0 for one in rounds)
    return {
        "rounds": str(len(rounds)),
        "v(M) < v(M0)": str(worse),
        "EE reversed": str(status["EE"]),
        "FP reversed": str(status["FP"]),
        "sum of alpha / gain, whole run": spread(shares),
    }


def curve(cell: Result, utility: str) -> list[float]:
    """v(M) after each round."""
    return [float(one.grand) for one in reports(cell, utility)]


# ---------------------------------------------------------------------- a score that a run was not asked for


ABSENT = ("PHI sum", "MERIT")
"""Scores that not every run was asked for: runs before PHI was computed, runs without solo models."""
COMPUTED = ("reports", "computed", "agreements", "lent")
"""What is kept in a cell once it is worked out."""
REPEATED, NOT_MEASURED = " ‡", "–"
MARKS = (
    "‡: of repeats of these runs (the same data in the same hands, the same seeds, sometimes fewer of them), "
    "which were asked for this score. –: not there, or undefined; runs made before PHI was computed have "
    "none, runs without solo models have no MERIT, and the paper has other rows."
)


def has(cell: Result, score: str) -> bool:
    """Whether a run can say a score that not every run was asked for."""
    if score == "PHI sum":
        return bool(cell.get("phi"))
    first = next(iter(cell["utilities"].values()))
    return score != "MERIT" or "solo" in first["rounds"][-1]


def federation(cell: Result) -> str:
    """What two runs of the same federation share: all but what they were asked to measure."""
    settings = {name: values for name, values in cell["settings"].items() if name != "scoring"}
    asked = ("games", "phi", "loop", "halves", "innovation")
    special = settings.pop("experiment", {})
    kept = {key: value for key, value in special.items() if key not in asked}
    what = json.dumps([cell["dataset"], cell["subset"], settings, kept, cell["seed"]], sort_keys=True)
    return str(json.loads(what, parse_float=lambda given: grid(float(given))))


def repeats(
    cells: Sequence[Result], results: Mapping[str, Result], score: str, *, truth: str = "MR-SV"
) -> tuple[Sequence[Result], str]:
    """Return runs that can say a score, and the mark of where they are not these runs themselves.

    Where not all runs have it, repeats of the same federations are looked for that have it. If the score is
    to be compared with MR-SV, they have that too; the retrained value, "SV", is `lent` to them.

    Args:
        cells: runs, one a seed.
        results: all runs by name.
        score: what they are to say.
        truth: "MR-SV", "SV", or "" if the score is compared with nothing.
    """
    own = [cell for cell in cells if has(cell, score)]
    if len(own) == len(cells):
        return own, ""
    wanted = {federation(cell): cell for cell in cells}
    found: dict[str, Result] = {}
    for other in results.values():
        cell = wanted.get(which := federation(other))
        if cell is None or not has(other, score):
            continue
        if truth != "MR-SV" or truths(cell) <= truths(other):
            found.setdefault(which, lent(cell, other) if truth == "SV" else other)
    made = [found[which] for which in wanted if which in found]
    return (made, REPEATED) if len(made) > len(own) else (own, "")


def truths(cell: Result) -> set[str]:
    """What a run was asked to compute of its own coalitions; the retrained value is not of a run."""
    return set(cell["settings"]["scoring"]["truth"]) - {"shapley"}


def lent(cell: Result, other: Result) -> Result:
    """Return a repeat with the retrained values of the run that it repeats, if it has none of its own.

    They are a property of the members and their data, not of a run.
    """
    if not cell.get("retrained") or other.get("retrained"):
        return other
    if cell["samples"] != other["samples"]:
        raise SystemExit(f"{other['name']} repeats {cell['name']}, but members have other numbers of samples")
    known = other.setdefault("lent", {})
    if cell["name"] not in known:
        utilities = {
            name: {**part, "truth": {**part["truth"], "SV": cell["utilities"][name]["truth"]["SV"]}}
            for name, part in other["utilities"].items()
        }
        kept = {key: value for key, value in other.items() if key not in COMPUTED}
        known[cell["name"]] = {**kept, "utilities": utilities, "retrained": cell["retrained"]}
    return known[cell["name"]]  # type: ignore[no-any-return]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds, as the tables show them."""
    if not values:
        return ""
    middle = mean(values)
    if len(values) == 1:
        return f"{text(middle, '.2f')} (1)"
    deviation = math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))
    few = f" ({len(values)})" if len(values) < ENOUGH else ""
    return f"{text(middle, '.2f')} ± {text(deviation, '.2f')}{few}"


def is_thin(cells: Sequence[Result]) -> bool:
    """Whether a row has too few seeds for a sentence to rest on it."""
    return len({cell["seed"] for cell in cells}) < ENOUGH


def seeds(cells: Sequence[Result]) -> str:
    """How many, marked where they are few."""
    return f"{len(cells)}{', thin' if is_thin(cells) else ''}"


def interval(hits: int, total: int) -> tuple[float, float]:
    """The exact 95 % interval of a share of independent runs (Clopper and Pearson 1934).

    >>> [round(bound, 3) for bound in interval(5, 5)]
    [0.478, 1.0]
    """
    from scipy.stats import binomtest

    found = binomtest(hits, total).proportion_ci(0.95, method="exact")
    return float(found.low), float(found.high)


def within(hits: int, total: int) -> str:
    """The interval as text.

    >>> within(5, 5)
    '0.48 to 1.00'
    """
    return " to ".join(text(bound, ".2f") for bound in interval(hits, total))


def intervals(counts: Iterable[tuple[int, int]]) -> str:
    """A line under a table of counts: the interval of each count that occurs in it.

    >>> intervals([(5, 5), (0, 5), (5, 5)])
    '95 % intervals (Clopper and Pearson 1934): 0 of 5: 0.00 to 0.52, 5 of 5: 0.48 to 1.00.'
    """
    known = sorted(set(counts), key=lambda count: (count[1], count[0]))
    each = ", ".join(f"{hits} of {total}: {within(hits, total)}" for hits, total in known)
    return f"95 % intervals (Clopper and Pearson 1934): {each}."


def on_gpu(cell: Result) -> bool:
    """Whether a run was made on a GPU."""
    return bool(cell["machine"]["device"] != "CPU")


def facts(cells: Sequence[Result]) -> dict[str, Any]:
    """What every table must say about its runs."""
    return {
        "seeds": len({cell["seed"] for cell in cells}),
        "seconds": math.fsum(cell["seconds"]["total"] / cell["jobs"] for cell in cells),
        "images": sorted({sum(cell["samples"].values()) for cell in cells}),
        "test": sorted({cell["test_images"] for cell in cells}),
    }
