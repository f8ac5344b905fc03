"""The panel's raw results -> tables/panel.md, and what FINDINGS.md says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evidence import Claims, Evidence, Facts, agree, between, lines
from grid import mean, text
from sections import Lines, table

RAW = Path(__file__).resolve().parent / "results" / "panel"
DATA = {"fashion-mini": "fashion-mini", "cifar10": "CIFAR-10 (1,800 images)"}
MAIN = "fashion-mini", 6
MIXES = (0.5, 5.0)
WAYS = {
    "columns": "panel",
    "columns, no innovation": "panel without innovation",
    "hands, most 2": "whole gradients, most 2",
    "hands": "whole gradients, most 3",
    "fenced": "settlement",
}
SHOWN = (
    "told the pool",
    "told one judge's set",
    "told one judge's set, with the judge",
    "replay x 3",
    "empty pair, 3 public updates",
    "pair, 3 public updates",
    "pair, 3 own updates",
    "honest update x 3",
    "hurt",
    "refuses to judge",
    "praise, a pair",
    "praise, three",
    "transfer by an empty pair, no witness",
)
LIES = (
    "hurt",
    "refuses to judge",
    "praise, a pair",
    "praise, three",
    "transfer by an empty pair, no witness",
)
"""What a settlement on a shared pool has no place for; members who move credit there are caught as here."""
Key = tuple[str, int, float]
Pairs = list[tuple[float, float]]


def read(name: str) -> list[dict[str, Any]]:
    """The lines of one file, in an order that does not depend on who was first."""
    file = RAW / f"{name}.jsonl"
    found = [json.loads(text_) for text_ in file.read_text().splitlines()] if file.exists() else []
    return sorted(found, key=lambda one: (one.get("members", 0), one.get("mu", 0), one["seed"]))


def answers(what: str) -> dict[Key, list[dict[str, Any]]]:
    """What one question found, by dataset, members and class mix."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for name in DATA:
        for one in read(name):
            if one["what"] == what:
                found.setdefault((name, one["members"], one["mu"]), []).append(one)
    return found


# -------------------------------------------------------------------------------------------------- attacks


def takings(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Pairs]]:
    """Attack -> way to divide -> (honest, cheating) shares of those who cheat, one a seed."""
    honest = {one["seed"]: one for one in runs if one["attack"] == "nobody cheats"}
    found: dict[str, dict[str, Pairs]] = {}
    for one in runs:
        groups = {one["attack"]: one["cheats"]}
        if one["attack"] == "told one judge's set":
            groups = {one["attack"]: one["cheats"][:1], f"{one['attack']}, with the judge": one["cheats"]}
        for name, who in groups.items():
            for way in WAYS:
                before, after = honest[one["seed"]].get(way), one.get(way)
                if who and before and after:
                    pair = float(sum(before[i] for i in who)), float(sum(after[i] for i in who))
                    found.setdefault(name, {}).setdefault(way, []).append(pair)
    return found


def taken(pairs: Pairs | None) -> str:
    """Honest and cheating share, and the range of the second."""
    if not pairs:
        return "–"
    before, after = (mean(side) for side in zip(*pairs, strict=True))
    return f"{text(before, '.0%')} → {text(after, '.0%')} ({between([b for _, b in pairs], '.0%')})"


# ------------------------------------------------------------------------------------------------- fidelity


def closeness(run: Mapping[str, Any]) -> dict[str, list[float]]:
    """Spearman of every matrix with every other that matters, off the diagonal; and by row."""
    n, off = run["members"], ~np.eye(run["members"], dtype=bool)
    exact, column = (np.mean(run[name], axis=0) for name in ("exact", "column"))
    truth, lost = np.array(run["shapley"]), np.array(run["lost"])
    others = list(lost[1:])

    def near(a: Any, b: Any) -> float:
        return agree(a[off], b[off])

    def inside(a: Any, b: Any) -> float:
        return mean([agree(a[off[:, k], k], b[off[:, k], k]) for k in range(n)])

    def rows(a: Any, b: Any) -> float:
        return agree((a * off).sum(axis=1), (b * off).sum(axis=1))

    pairs = [(a, b) for k, a in enumerate(lost) for b in lost[k + 1 :]]
    found = {
        "exact, Shapley": [near(exact, truth)],
        "column, Shapley": [near(column, truth)],
        "error": [float(np.abs(exact - truth)[off].mean() / np.abs(truth)[off].mean())],
        "column error": [float(np.abs(column - truth)[off].mean() / np.abs(truth)[off].mean())],
    }
    for how, name in ((near, "all"), (inside, "within a judge"), (rows, "rows")):
        found[f"exact, lost: {name}"] = [how(exact, one) for one in others]
        found[f"column, lost: {name}"] = [how(column, one) for one in others]
        found[f"lost, lost: {name}"] = [how(a, b) for a, b in pairs]
    return found


def close(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The same of all runs, one mean a seed."""
    each = [closeness(run) for run in runs]
    return {name: [mean(one[name]) for one in each] for name in each[0] if all(one[name] for one in each)}


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Mean and standard deviation over seeds."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return f"{text(mean(values), form)} ± {text(deviation, form)}"


# --------------------------------------------------------------------------------------------------- errors


def moved(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """How far columns move the share that they move most, one mean a seed."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, drawn in run["shares"].items():
            far = np.abs(np.array(drawn) - np.array(run["exact"])).max(axis=1)
            found.setdefault(name, []).append(mean(far.tolist()))
    return found


def alarms(runs: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many of how many honest judges the check of sums flags."""
    flagged = of = 0
    for run in runs:
        off, error = np.array(run["checks"]).transpose(1, 0, 2)
        beyond = np.abs(off) > 0.05 * np.abs(run["gained"]) + 4 * error
        flagged, of = flagged + int(beyond.sum()), of + beyond.size
    return flagged, of


def covered(runs: Sequence[Mapping[str, Any]], way: str) -> list[float]:
    """How often shares plus and minus 1.96 standard errors hold the true ones, one number a seed."""
    found = []
    for run in runs:
        shares, errors = np.array(run["draws"][way]).transpose(1, 0, 2)
        found.append(float((np.abs(shares - run["truth"]) <= 1.96 * errors).mean()))
    return found


# -------------------------------------------------------------------------------------------------- privacy


def areas(runs: Sequence[Mapping[str, Any]], samples: int, what: str, value: float) -> dict[str, list[float]]:
    """AUC of the stronger attack, from one round (their mean) and from all, one a seed."""
    found: dict[str, list[float]] = {"one": [], "all": []}
    section = "membership" if what == "noise" else "epsilon"
    for run in runs:
        for one in run[section]:
            if one["samples"] == samples and one[what] == value:
                found["one"].append(mean(one["residual"]["rounds"]))
                found["all"].append(one["residual"]["all"])
    return found


def drowning(runs: Sequence[Mapping[str, Any]], samples: int, epsilon: float) -> list[float]:
    """The error that epsilon puts into s_ib, as a part of the mean of |s_ib|, one a seed."""
    return [
        mean(one["error"]) / mean([abs(value) for value in one["worth"]])
        for run in runs
        for one in run["epsilon"]
        if one["samples"] == samples and one["epsilon"] == epsilon
    ]


# ---------------------------------------------------------------------------------------------------- texts


def panel_section() -> Lines:
    """The page tables/panel.md."""
    yield "# The panel: every number"
    yield ""
    yield "`python experiments/panel.py`; `python experiments/panel_privacy.py`."
    yield ""
    yield "Eight rounds of four epochs, Adam, Dirichlet mu; a fifth of each member's data held out. The panel"
    yield "has columns of 50,000 coordinates with innovation, noise 2, blur .05 and eight bits, unless a"
    yield "heading says whole gradients. Spreads are standard deviations over seeds."
    yield ""
    yield from _attacks()
    yield from _fidelity()
    yield from _errors()
    yield from _privacy()


def _about(key: Key, runs: Sequence[Mapping[str, Any]]) -> str:
    seeds = len({run["seed"] for run in runs})
    held = [count for run in runs for count in run["held"]]
    dataset, members, mu = key
    return (
        f"{DATA[dataset]}, {members} members, mu {mu:g}: seeds: {seeds}; {min(held)} to {max(held)} held out"
    )


def _attacks() -> Iterator[str]:
    yield "## What cheats take"
    yield ""
    yield "Share when honest → share when cheating (least to largest), of all cheats of a line together."
    yield ""
    for key, runs in answers("attacks").items():
        found = takings(runs)
        yield f"**{_about(key, runs)}**"
        yield ""
        yield from table(
            ["cheat", *WAYS.values()],
            [[name, *(taken(ways.get(way)) for way in WAYS)] for name, ways in found.items()],
        )


def _fidelity() -> Iterator[str]:
    yield "## What s_ib is close to"
    yield ""
    yield "Spearman off the diagonal. *Lost*: what b loses when i leaves and the others train again, with"
    yield "other first models and batches than the run that is scored."
    yield ""
    found = {key: (close(runs), _about(key, runs)) for key, runs in answers("fidelity").items()}
    for values, about in found.values():
        yield f"**{about}**"
        yield ""
        yield from table(["what", "mean ± sd"], [[name, spread(one, ".3f")] for name, one in values.items()])


def _errors() -> Iterator[str]:
    yield "## What columns cost"
    yield ""
    yield "How far the share that moves most is from that of whole gradients; coverage of 95 % intervals."
    yield ""
    for key, runs in answers("noise").items():
        yield f"**{_about(key, runs)}**"
        yield ""
        yield from table(
            ["columns", "moved"], [[name, spread(one, ".3f")] for name, one in moved(runs).items()]
        )
        flagged, of = alarms(runs)
        yield f"The check of a judge's sum flags {flagged} of {of} honest ones."
        yield ""
    for key, runs in answers("coverage").items():
        both = " / ".join(spread(covered(runs, way)) for way in ("gradients", "columns"))
        yield f"- Coverage, {_about(key, runs)}: whole gradients / columns {both}"
    yield ""


def _privacy() -> Iterator[str]:
    runs = read("privacy")
    yield "## What a column tells of its samples"
    yield ""
    yield f"AUC of membership, one round / all rounds; seeds: {len(runs)}."
    yield ""
    body = []
    for samples in (300, 75):
        for what, values in (("noise", (0.0, 2.0, 4.0, 8.0, 16.0)), ("epsilon", (4.0, 8.0, 16.0))):
            for value in values:
                area = areas(runs, samples, what, value)
                error = spread(drowning(runs, samples, value)) if what == "epsilon" and area["all"] else "–"
                if area["all"]:
                    both = [spread(area[which]) for which in ("one", "all")]
                    body.append([str(samples), f"{what} {value:g}", *both, error])
    yield from table(["samples", "column", "AUC, one round", "AUC, all", "error / mean s_ib"], body)
    yield "Cosine of the most similar image, over all rounds and rows of the first layer:"
    yield ""
    body = []
    for place, one in enumerate(runs[0]["inversion"] if runs else ()):
        kind = {None: "whole gradient", 0.0: "column, noise 0", 2.0: "column, noise 2"}[one["noise"]]
        both = [spread([run["inversion"][place][who] for run in runs]) for who in ("judge", "others")]
        body.append([str(one["samples"]), kind, *both])
    yield from table(["samples in a half", "from", "of the judge", "of others"], body)


def judges(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """What FINDINGS.md says."""
    del evidence  # the panel has results of its own
    attacked = {mu: takings(answers("attacks")[*MAIN, mu]) for mu in MIXES}
    body = []
    for name in SHOWN:
        cells = []
        for mu in MIXES:
            ways = attacked[mu][name]
            way = "hands" if name.startswith("transfer") else "columns"
            cells += [taken(ways.get(way)), "–" if name in LIES else taken(ways.get("fenced"))]
        body.append([name, *cells])
    head = ["cheat", *(f"{who}, mu {mu:g}" for mu in MIXES for who in ("panel", "settlement"))]
    facts["panel attacks"] = lines(head, body)
    facts["panel seeds"] = str(len({run["seed"] for run in answers("attacks")[*MAIN, 0.5]}))
    own = [
        pair
        for mu in MIXES
        for name in ("hurt", "refuses to judge")
        for pair in attacked[mu][name]["columns"]
    ]
    claims["what a judge says leaves its own share as it is"] = all(a == b for a, b in own)
    more = [
        mean([b for _, b in attacked[mu]["told the pool"]["fenced"]])
        - mean([b for _, b in attacked[mu]["told the pool"]["columns"]])
        for mu in MIXES
    ]
    claims["who is told the pool takes more from a settlement than from a panel"] = min(more) > 0.05
    replays = [b for mu in MIXES for _, b in attacked[mu]["replay x 3"]["columns"]]
    facts["panel replay"] = text(max(replays), ".0%")
    claims["from columns a replay takes next to nothing"] = max(replays) < 0.05
    closest = {mu: close(answers("fidelity")[*MAIN, mu]) for mu in MIXES}

    def both(name: str, form: str = ".2f") -> str:
        return " and ".join(spread(closest[mu][name], form) for mu in MIXES)

    facts["panel Shapley"], facts["panel columns"] = (
        both("exact, Shapley", ".3f"),
        both("column, Shapley", ".3f"),
    )
    facts["panel lost"], facts["panel again"] = both("exact, lost: all"), both("lost, lost: all")
    facts["panel columns lost"] = both("column, lost: all")
    claims["s_ib is the Shapley value of each judge's utility nearly"] = (
        min(value for one in closest.values() for value in one["exact, Shapley"]) > 0.98
    )
    noisy = {mu: moved(answers("noise")[*MAIN, mu]) for mu in MIXES}

    def moves(name: str) -> str:
        return " and ".join(text(mean(noisy[mu][name]), ".3f") for mu in MIXES)

    facts["panel moved"] = moves("50,000, noise 2, innovation, blur")
    facts["panel moved by innovation"] = moves("all, noise 0, innovation")
    counts = [alarms(answers("noise")[*MAIN, mu]) for mu in MIXES]
    few = [len(answers(what)[*MAIN, mu]) for what in ("noise", "coverage") for mu in MIXES]
    facts["panel error seeds"] = str(few[0]) if min(few) == max(few) else f"{min(few)} to {max(few)}"
    facts["panel alarms"] = "{} of {}".format(*(sum(one) for one in zip(*counts, strict=True)))
    facts["panel coverage"] = " and ".join(
        text(mean(covered(answers("coverage")[*MAIN, mu], "columns")), ".2f") for mu in MIXES
    )
    runs = read("privacy")
    facts["panel privacy seeds"] = str(len(runs))
    for samples in (300, 75):
        area = areas(runs, samples, "noise", 2.0)
        facts[f"panel AUC {samples}"] = " and ".join(
            text(mean(area[which]), ".2f") for which in ("one", "all")
        )
    private = areas(runs, 300, "epsilon", 4.0)
    facts["panel AUC epsilon"] = text(mean(private["all"]), ".2f")
    facts["panel epsilon"] = text(mean(drowning(runs, 300, 4.0)), ".0%")
    facts["panel epsilon 75"] = text(mean(drowning(runs, 75, 4.0)), ".0%")
    claims["membership is not hidden by noise 2"] = mean(areas(runs, 300, "noise", 2.0)["all"]) > 0.57
    images = {(one["samples"], one["noise"]): place for place, one in enumerate(runs[0]["inversion"])}
    bare, hidden = (
        [[run["inversion"][images[10, noise]][who] for run in runs] for who in ("judge", "others")]
        for noise in (None, 2.0)
    )
    facts["panel inversion"] = (
        f"{text(mean(bare[0]), '.2f')} (images of others: {text(mean(bare[1]), '.2f')})"
    )
    facts["panel inversion, noise"] = f"{text(mean(hidden[0]), '.2f')} ({text(mean(hidden[1]), '.2f')})"
    claims["noise 2 hides the images"] = abs(mean(hidden[0]) - mean(hidden[1])) < 0.05
