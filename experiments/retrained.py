"""What FINDINGS.md says of the retraining game: which score that secure aggregation allows tracks it best."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from cells import Result, Row, datasets
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
    agree,
    lines,
    mean,
)
from grid import settled, text
from measures import (
    HIDDEN,
    SCORES,
    agreements,
    federation,
    is_thin,
    lent,
    measured,
    reports,
    scores,
    seeds,
    spread,
)
from sections import Lines, done, table

from fedmerit import accumulate

K = TypeVar("K", bound=Hashable)
DEFAULT = "ALPHA sum"
PROPOSED = "ALPHA sum, renormalised"
SONG = "MR-SV, renormalised"
"""As Song et al. (2019) define it; the paper's text describes the additive game."""
CANDIDATES = (PROPOSED, "SOLO", "MERIT", "ENSEMBLE")
"""All named before the newest runs, those with a ``whole_run``, were made."""
NAMED_FIRST = ("SOLO", "MERIT")
"""Named before any run of the retraining game was made."""
LOOKS = 4
"""Seeds were added three times, each time after a look at the runs before; and there was a last look."""
LATEST = {("cifar10", 15), ("brain_mri", 14), ("brain_mri", 15)}
"""Dataset and seed of the newest runs that were made after the other newest ones had been looked at."""
AIM = 0.95
Runs = Mapping[str, float]
"""A number by the name of the run."""
Known = Mapping[str, Mapping[str, Runs]]
"""By utility and score, the Spearman with the retrained Shapley value of each run."""


def game(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Every score against the retrained Shapley value, and the candidates against the default."""
    groups = {dataset: evidence.cells("tab-error-game", dataset) for dataset in BOTH}
    cells = [cell for each in groups.values() for cell in each]
    known = {utility: against_truth(cells, utility) for utility in TITLES}
    facts["game seeds"] = " and ".join(f"{len(groups[key])} ({name})" for key, name in BOTH.items())
    body = {}
    for score in by_mean(known):
        per = [known[u].get(score, {}) for u in TITLES]
        row = [spread(list(values.values())) for values in per]
        row += [spread(of(per[0], groups[dataset])) for dataset in BOTH]
        count = len(known[PAIR[0]][score])
        body[score] = [f"{shown(score)} ({count} runs)" if count < len(cells) else shown(score), *row]
    head = ["score", *TITLES.values(), *(f"expected accuracy, {name}" for name in BOTH.values())]
    facts["whole game table"] = lines(head, list(body.values()))
    brief = ("MERIT", PROPOSED, SONG, "MR-SV", DEFAULT, "FP")
    facts["game table"] = lines(head, [line for score, line in body.items() if score in brief])
    facts["game MR-SV"] = " / ".join(spread(list(known[u]["MR-SV"].values())) for u in PAIR)
    said = [evidence.said("tab:error_game", "spearman", name, "MR-SV") for name in ("CIFAR10", "Brain")]
    facts["paper game MR-SV"] = " and ".join(text(value, ".3f") for value in said)
    claims["at least 5 seeds on two datasets"] = all(len(each) >= 5 for each in groups.values())
    claims["MR-SV is not the retrained Shapley value"] = all(
        mean(list(known[u]["MR-SV"].values())) < 0.9 for u in PAIR
    )
    steps = {
        u: np.array([value - known[u]["MR-SV"][run] for run, value in known[u][SONG].items()]) for u in PAIR
    }
    facts["game MR-SV renormalised"] = " / ".join(spread(list(known[u][SONG].values())) for u in PAIR)
    facts["renormalised runs"] = str(min(map(len, steps.values())))
    facts["renormalised closer"] = " / ".join(_ahead(each)[0] for each in steps.values())
    tests = LOOKS * len(PAIR) * len(CANDIDATES)  # as strictly as MERIT's lead is judged
    claims["MR-SV of the renormalised game is closer to the retrained value"] = all(
        each.mean() > 0 and tests * student(each) < 0.05 for each in steps.values()
    )
    truths = [[scores(cell, u, LAST)["SV"] for u in PAIR] for cell in cells]
    facts["truths agree"] = spread([agree(*pair) for pair in truths])
    _candidates(known, cells, facts, claims)
    _named_first(known, cells, facts, claims)
    _other_game(cells, facts, claims)
    _own_runs(cells, facts)
    _phi(evidence, facts, claims)
    _again(evidence, facts, claims)
    _nine(evidence, facts)
    _sizes(evidence, facts)
    _currency(evidence, cells, facts, claims)


def against_truth(
    cells: Iterable[Result], utility: str, against: str | None = None
) -> dict[str, dict[str, float]]:
    """Per score and run the Spearman with the retrained Shapley value, of ``against`` if given."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        for score, near in agreements(cell, utility, LAST, "SV", against or utility).items():
            if near.spearman is not None:
                found.setdefault(score, {})[cell["name"]] = near.spearman
    return found


def of(values: Runs, cells: Iterable[Result]) -> list[float]:
    """Those of some cells."""
    return [values[cell["name"]] for cell in cells if cell["name"] in values]


def by_mean(known: Known, runs: Sequence[str] = ()) -> list[str]:
    """Scores that every one of these runs has, the closest first by the mean of both utilities.

    Without ``runs``, all scores that some run has, each by the runs that have it.
    """
    whole = [s for s in SCORES if all(run in known[u].get(s, {}) for u in PAIR for run in runs)]
    whole = [s for s in whole if all(s in known[u] for u in PAIR)]

    def near(score: str) -> float:
        return mean([known[u][score][run] for u in PAIR for run in runs or known[u][score]])

    return sorted(whole, key=lambda score: -near(score))


def shown(score: str) -> str:
    """With the mark of what secure aggregation hides."""
    return f"{score} †" if score in HIDDEN else score


# ------------------------------------------------------------------------------------------ the candidates


def _candidates(known: Known, cells: Sequence[Result], facts: Facts, claims: Claims) -> None:
    """How far each candidate is ahead of the default, a utility at a time, and what chance makes of it.

    The test is on the newest runs alone; over all runs with a seed above 0, some of which had been looked at,
    differences are described, not tested.
    """
    newest = [cell["name"] for cell in cells if cell.get("whole_run")]
    later = [cell["name"] for cell in cells if cell["seed"] > 0]
    steps = {(name, u): differences(known[u], name, newest) for name in CANDIDATES for u in PAIR}
    adjusted = holm({key: student(values) for key, values in steps.items()})
    body = []
    for name in by_mean(known, newest):
        row = [shown(name)]
        for u in PAIR:
            row.append(spread([known[u][name][run] for run in newest]))
            row += _ahead(steps[name, u], adjusted[name, u]) if name in CANDIDATES else ["", "", ""]
        body.append(row)
    head = ["score"]
    for u in PAIR:
        head += [TITLES[u], "ahead of alpha summed", "better : worse", "p"]
    facts["candidate table"] = lines(head, body)
    body = []
    for name in (PROPOSED, "MR-SV"):
        each = [differences(known[u], name, later) for u in PAIR]
        body.append([shown(name), *(cell for values in each for cell in _ahead(values)[:2])])
    head = ["score", *(f"{TITLES[u]}: {what}" for u in PAIR for what in ("ahead", "better : worse"))]
    facts["later table"] = lines(head, body)
    body, leads = [], {}
    for name in CANDIDATES:
        row = [name]
        for u in PAIR:
            for dataset in BOTH:
                own = [c["name"] for c in cells if c["name"] in newest and c["dataset"] == dataset]
                parts = differences(known[u], name, own)
                leads[name, u, dataset] = parts.mean()
                row.append(f"{_ahead(parts)[0]} ({text(student(parts), '.3f')})")
        body.append(row)
    head = ["score", *(f"{TITLES[u]}, {title}" for u in PAIR for title in BOTH.values())]
    facts["split table"] = lines(head, body)
    facts["newest runs"], facts["later runs"] = str(len(newest)), str(len(later))
    facts["comparisons"] = str(len(steps))
    first = [cell["name"] for cell in cells if (cell["dataset"], cell["seed"]) not in LATEST]
    first = [name for name in newest if name in first]
    before = holm({key: student(differences(known[key[1]], key[0], first)) for key in steps})
    facts["newest but latest"] = str(len(first))
    facts["latest runs"] = str(len(newest) - len(first))
    expected, right = PAIR
    facts["looked at"] = str(len(set(later) - set(newest)))
    pair = (PROPOSED, "ENSEMBLE")
    claims["of accuracy the renormalised alpha and ENSEMBLE are ahead beyond chance"] = all(
        adjusted[name, right] < 0.05 and steps[name, right].mean() > 0 for name in pair
    )
    claims["of accuracy their lead rests mostly on Brain-MRI"] = all(
        leads[name, right, "brain_mri"] > 2 * leads[name, right, "cifar10"] for name in pair
    )
    facts["p before"] = " and ".join(text(before[name, right], ".3f") for name in pair)
    claims["without the latest runs the outcome is the same"] = all(
        (before[key] < 0.05) == (adjusted[key] < 0.05) for key in steps
    )
    claims["in the newest runs no candidate is ahead beyond chance for the expected accuracy"] = all(
        adjusted[name, expected] >= 0.05 for name in CANDIDATES
    )
    crossed = {
        name: mean(
            [
                agree(scores(cell, expected, LAST)[name], scores(cell, right, LAST)["SV"])
                for cell in cells
                if cell["name"] in newest
            ]
        )
        for name in (DEFAULT, PROPOSED)
    }
    facts["crossed additive"], facts["crossed renormalised"] = (
        text(value, ".2f") for value in crossed.values()
    )
    own = mean([known[right][PROPOSED][run] for run in newest])
    claims["the default ranks accuracy's truth as accuracy's renormalised alpha does"] = (
        abs(crossed[DEFAULT] - own) < 0.05
    )
    allowed = [name for name in by_mean(known, newest) if name not in HIDDEN]
    tops = []
    for u in PAIR:
        means = {name: mean([known[u][name][run] for run in newest]) for name in allowed}
        best = max(means, key=lambda name: means[name])
        tops.append(f"{best} with {text(means[best], '.2f')} ({TITLES[u]})")
    facts["best allowed"] = " and ".join(tops)
    claims["no score reaches the aim"] = (
        max(mean([known[u][name][run] for run in newest]) for name in allowed for u in PAIR) < AIM
    )


def _named_first(known: Known, cells: Sequence[Result], facts: Facts, claims: Claims) -> None:
    """SOLO and MERIT over all runs, and how much hangs on the choice of runs and of the test."""
    every = [cell["name"] for cell in cells]
    newest = [cell["name"] for cell in cells if cell.get("whole_run")]
    older = [name for name in every if name not in newest]
    runs = {name: every if name in NAMED_FIRST else newest for name in CANDIDATES}
    steps = {(name, u): differences(known[u], name, runs[name]) for name in CANDIDATES for u in PAIR}
    means = holm({key: student(values) for key, values in steps.items()})
    signs = holm({key: sign_test(values) for key, values in steps.items()})
    body = []
    for name in NAMED_FIRST:
        for u in PAIR:
            parts = [_ahead(differences(known[u], name, some))[0] for some in (older, newest)]
            p = [text(adjusted[name, u], ".3f") for adjusted in (means, signs)]
            body.append([name, TITLES[u], *_ahead(steps[name, u])[:2], *p, *parts])
    head = ["score", "utility", f"ahead of alpha summed, {len(every)} runs", "better : worse", "p"]
    head += ["p, sign test", f"the {len(older)} older runs", f"the {len(newest)} newest"]
    facts["first table"] = lines(head, body)
    expected = PAIR[0]
    best = "MERIT", expected
    fewest = holm({key: student(steps[key]) for key in steps if key[0] in NAMED_FIRST})[best]
    strictest = min(1.0, LOOKS * means[best])
    facts |= {
        "all runs": str(len(every)),
        "older runs": str(len(older)),
        "merit ahead": _ahead(steps[best])[0],
        "merit counts": _ahead(steps[best])[1],
        "merit newest": _ahead(differences(known[expected], "MERIT", newest))[0],
        "merit p": text(means[best], ".3f"),
        "merit p of few": text(fewest, ".3f"),
        "merit p of looks": text(strictest, ".3f"),
        "merit p range": f"{text(fewest, '.2f')} to {text(strictest, '.2f')}",
        "looks": str(LOOKS),
        "first comparisons": str(len(NAMED_FIRST) * len(PAIR)),
    }
    claims["over all runs MERIT is ahead beyond chance with both utilities, SOLO with neither"] = all(
        adjusted["MERIT", u] < 0.05 and steps["MERIT", u].mean() > 0 and means["SOLO", u] >= 0.05
        for adjusted in (means, signs)
        for u in PAIR
    )
    claims["with every look counted chance explains MERIT too, barely"] = 0.05 <= strictest < 0.1
    claims["MERIT is further ahead in the older runs"] = (
        differences(known[expected], "MERIT", older).mean() > steps[best].mean()
    )


def _other_game(cells: Sequence[Result], facts: Facts, claims: Claims) -> None:
    """Scores of the additive game against MR-SV of the renormalised one."""
    found: dict[str, list[list[float]]] = {"alpha": [], "own alpha": []}
    for u in PAIR:
        asked = [cell for cell in cells if SONG in scores(cell, u, LAST)]
        for each, score in zip(found.values(), (DEFAULT, PROPOSED), strict=True):
            known = [scores(cell, u, LAST) for cell in asked]
            each.append([agree(one[score], one[SONG]) for one in known if score in one])
    for name, each in found.items():
        facts[f"{name} against Song"] = " / ".join(spread(values) for values in each)
    claims["additive alpha is further from the renormalised MR-SV than the renormalised alpha"] = all(
        student(np.subtract(ours, own)) < CHANCE and mean(ours) < mean(own)
        for ours, own in zip(found["alpha"], found["own alpha"], strict=True)
    )


# ----------------------------------------------------------------------------------------------------- PHI


def with_retrained(cells: Iterable[Result], results: Mapping[str, Result]) -> list[Result]:
    """Return repeats with the retrained values of the runs that they repeat."""
    lenders = {federation(cell): cell for cell in results.values() if cell.get("retrained")}
    return [lent(lenders[which], cell) for cell in cells if (which := federation(cell)) in lenders]


def phi_beside_alpha(
    cells: Sequence[Result], own: str, against: str, other: str
) -> tuple[list[float], list[float], np.ndarray]:
    """Run by run the Spearmans of PHI and of alpha with a retrained value, and PHI's less alpha's.

    Args:
        cells: repeats, with the retrained value.
        own: utility of PHI.
        against: utility of the retrained value.
        other: utility of alpha.
    """
    along = against_truth(cells, own, against).get("PHI sum", {})
    ours = against_truth(cells, other, against).get(DEFAULT, {})
    runs = [run for run in along if run in ours]
    pair = [along[run] for run in runs], [ours[run] for run in runs]
    return *pair, np.subtract(*pair)


def phi_game_section(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, object]
) -> Lines:
    """PHI and alpha of the same run against the retrained Shapley value."""
    groups = {datasets()[row.dataset]["short"]: with_retrained(done(row, results), results) for row in rows}
    if len(groups) > 1 and all(groups.values()):
        groups["all of them"] = [cell for each in groups.values() for cell in each]
    expected, right = PAIR
    crossed = "expected accuracy, against the retrained value of accuracy"
    ways = {
        TITLES[expected]: (expected, expected, expected),
        TITLES[right]: (right, right, right),
        crossed: (expected, right, expected),
        f"{crossed}; alpha is accuracy's": (expected, right, right),
    }
    body = []
    for title, cells in groups.items():
        for says, way in ways.items() if cells else ():
            along, ours, steps = phi_beside_alpha(cells, *way)
            line = [title, seeds(cells), says, spread(along), spread(ours)]
            told = _ahead(steps)[:2] if len(steps) > 1 else ["", ""]
            differ = len(steps) > 1 and settled(steps).any()
            body.append([*line, *told, interval_of_mean(steps) if differ else ""])
    yield "The runs repeat those of [tab-error-game](tab-error-game.md): the same members with the same data"
    yield "and the same first model, trained once more, so that PHI and alpha are of one run. The"
    yield "retrained value is that of the runs they repeat. PHI of accuracy is that of sharpened accuracy."
    yield "Spearman, and PHI's less alpha's ± standard error of the mean. Where no run is better or worse,"
    yield "both Spearmans are equal in every run, and there is no interval."
    yield ""
    head = ["data", "runs", "utility", "PHI", "alpha summed", "PHI less alpha", "better : worse"]
    yield from table([*head, "95 % interval"], body)


def _phi(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """Whether PHI is as close to the retrained value as alpha is."""
    each = {
        short: with_retrained(evidence.cells("tab-phi-game", dataset), evidence.results)
        for dataset, short in BOTH.items()
    }
    cells = [cell for found in each.values() for cell in found]
    expected, right = PAIR
    ways = {"expected": (expected,) * 3, "accuracy": (right,) * 3, "crossed": (expected, right, right)}
    means, gaps = {}, {}
    for name, way in ways.items():
        along, ours, steps = phi_beside_alpha(cells, *way)
        by, counts, _ = _ahead(steps)
        won, lost = counts.split(" : ")
        means[name], gaps[name] = mean(along), mean(steps.tolist())
        facts |= {
            f"PHI retrained, {name}": spread(along),
            f"PHI less alpha, {name}": f"{by} (standard error)",
            f"PHI verdict, {name}": verdict(steps),
        }
        if name != "crossed":
            facts[f"alpha retrained, {name}"] = spread(ours)
        if name == "expected":
            equal = len(steps) - int(won) - int(lost)
            facts["PHI interval, expected"] = interval_of_mean(steps)
            facts["PHI counts"] = f"{won} better, {lost} worse, {equal} equal"
    facts["phi game runs"] = " and ".join(f"{len(found)} {short}" for short, found in each.items() if found)
    machines = sorted({cell["machine"]["device"] for cell in cells})
    facts["phi game machines"] = " or ".join("a CPU" if one == "CPU" else f"an {one}" for one in machines)
    claims["by the retrained value PHI is not behind alpha by more than the margin"] = (
        gaps["expected"] > -MARGIN
    )
    claims["PHI of the expected accuracy ranks accuracy's retrained value better than the stand-in's"] = (
        means["crossed"] > means["accuracy"] and gaps["crossed"] > -MARGIN
    )


def _ahead(steps: np.ndarray, p: float | None = None) -> list[str]:
    """Three cells of the table."""
    won, lost = int((steps > 1e-9).sum()), int((steps < -1e-9).sum())
    by = f"{text(mean(steps.tolist()), '+.3f')} ± {text(standard_error(steps), '.3f')}"
    return [by, f"{won} : {lost}", "" if p is None else text(p, ".3f")]


def differences(known: Mapping[str, Runs], score: str, runs: Sequence[str]) -> np.ndarray:
    """Per run, to the default."""
    return np.array([known[score][run] - known[DEFAULT][run] for run in runs])


def standard_error(values: np.ndarray) -> float:
    """Of their mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def student(values: np.ndarray) -> float:
    """Two-sided p-value of a mean of 0; 1 where nothing differs.

    >>> student(np.zeros(3))
    1.0
    """
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(values, 0.0).pvalue) if settled(values).any() else 1.0


def verdict(values: np.ndarray) -> str:
    """Whether a mean differs from 0, in words.

    >>> verdict(np.array([0.1, 0.2, 0.3])), verdict(np.array([0.1, 0.2, -0.3]))
    ('not beyond chance (p = 0.074)', 'not beyond chance (p = 1.000)')
    """
    p = student(values)
    return f"{'' if p < CHANCE else 'not '}beyond chance (p = {text(p, '.3f')})"


def bounds(values: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a mean, by Student's distribution."""
    from scipy.stats import t

    reach = float(t.ppf(0.975, len(values) - 1)) * standard_error(values)
    middle = mean(values.tolist())
    return middle - reach, middle + reach


def interval_of_mean(values: np.ndarray) -> str:
    """The same in words.

    >>> interval_of_mean(np.array([0.1, 0.2, 0.3]))
    '-0.048 to +0.448'
    """
    return " to ".join(text(bound, "+.3f") for bound in bounds(values))


def sign_test(values: np.ndarray) -> float:
    """Two-sided p-value of as many better as worse; runs that tie do not count.

    >>> sign_test(np.array([0.1, 0.2, 0.0, 0.3]))
    0.25
    """
    from scipy.stats import binomtest

    won, lost = int((values > 1e-9).sum()), int((values < -1e-9).sum())
    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0


def holm(p_values: Mapping[K, float]) -> dict[K, float]:
    """P-values adjusted for their number (Holm 1979).

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    adjusted: dict[K, float] = {}
    largest = 0.0
    for k, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, (len(p_values) - k) * p_values[name])
        adjusted[name] = min(1.0, largest)
    return adjusted


# ------------------------------------------------------------------------- how far the truth can be trusted


def _own_runs(cells: Sequence[Result], facts: Facts) -> None:
    """On paper the retrained grand coalition is the run, and a coalition of one its member's solo run."""
    grand, alone = [], []
    for cell in cells:
        for u in PAIR:
            table, last = measured(cell, u, cell["retrained"][u]), reports(cell, u)[-1]
            grand.append(abs(table[-1] - last.grand))
            if last.solo is not None:
                singles = [table[1 << i] for i in range(len(cell["clients"]))]
                alone += np.abs(np.subtract(singles, last.solo)).tolist()
    facts["grand gap"] = f"{text(mean(grand), '.3f')} on average, {text(max(grand), '.3f')} at most"
    facts["alone gap"] = f"{text(mean(alone), '.3f')} and {text(max(alone), '.3f')}"


def _again(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """The same data in the same hands, trained twice: how well a value agrees with itself."""
    titles = {"SV": "retrained Shapley value", **{s: s for s in (DEFAULT, *CANDIDATES[:3], "MR-SV")}}
    found: dict[str, dict[str, list[float]]] = {name: {u: [] for u in PAIR} for name in titles}
    pairs = mixed = 0
    for dataset in BOTH:
        first = {cell["seed"]: cell for cell in evidence.cells("tab-error-game", dataset)}
        for second in evidence.cells("tab-error-game", dataset, "trained again"):
            pairs += 1
            mixed += bool(first[second["seed"]].get("tf32")) != bool(second.get("tf32"))
            for u in PAIR:
                one, other = (scores(cell, u, LAST) for cell in (first[second["seed"]], second))
                for name in titles:
                    found[name][u].append(agree(one[name], other[name]))
    body = [[titles[name], *(spread(values) for values in each.values())] for name, each in found.items()]
    facts["again table"] = lines(["", "expected accuracy", "accuracy"], body)
    own = [np.array(values) for values in found["SV"].values()]
    facts["again own"] = " and ".join(text(mean(values.tolist()), ".2f") for values in own)
    facts["again error"] = " and ".join(text(standard_error(values), ".2f") for values in own)
    facts["again root"] = " and ".join(text(math.sqrt(mean(values.tolist())), ".2f") for values in own)
    facts["again runs"], facts["again mixed"] = str(pairs), str(mixed)
    runs = [c for d in BOTH for c in evidence.cells("tab-error-game", d, "trained again")]
    near = [mean(list(against_truth(runs, u)["MERIT"].values())) for u in PAIR]
    facts["again merit"] = " and ".join(text(value, ".2f") for value in near)
    claims["two trainings agree less than we hoped a score would with one"] = all(
        values.mean() < AIM for values in own
    )


def _nine(evidence: Evidence, facts: Facts) -> None:
    """MR-SV, alpha and MERIT where there are as many members as in the paper."""
    each = []
    for dataset, name in BOTH.items():
        cells = evidence.cells("tab-error-game", dataset, "9 members")
        known = against_truth(cells, PAIR[0])
        if is_thin(cells):
            each.append(f"{len(cells)} on {name}, thin")
        else:
            near = (f"{score} {spread(list(known[score].values()))}" for score in ("MR-SV", DEFAULT, "MERIT"))
            each.append(f"{len(cells)} on {name}: {', '.join(near)}")
    facts["nine"] = "; ".join(each)


def _sizes(evidence: Evidence, facts: Facts) -> None:
    """Rows of the retraining game beside the two large ones."""
    names = (DEFAULT, *CANDIDATES, "MR-SV", "FP")
    body = []
    for row in evidence.rows:
        cells = evidence.cells(row.experiment, row.dataset, row.row)
        if row.experiment != "tab-error-game" or row.row in ("", "trained again") or not cells:
            continue
        for u in PAIR:
            known = against_truth(cells, u)
            line = [f"{datasets()[row.dataset]['short']}, {row.row}", seeds(cells), TITLES[u]]
            body.append([*line, *(spread(list(known.get(name, {}).values())) for name in names)])
    facts["other games"] = lines(["row", "seeds", "utility", *map(shown, names)], body)


def _currency(evidence: Evidence, cells: Sequence[Result], facts: Facts, claims: Claims) -> None:
    """What the renormalised alpha is near to, and whether it or MERIT can be paid out."""
    near = [
        agree(scores(cell, u, LAST)[PROPOSED], scores(cell, u, LAST)["MR-SV, renormalised"])
        for cell in cells
        for u in PAIR
        if "MR-SV, renormalised" in scores(cell, u, LAST)
    ]
    facts["renormalised alpha against its MR-SV"] = text(mean(near), ".2f")
    sums, above, members = [], 0, 0
    for dataset in BOTH:
        for cell in evidence.cells("tab-error", dataset):
            total = accumulate(reports(cell, "expected-accuracy", game="renormalised"))
            sums.append(math.fsum(total.values) / total.gain)
            above, members = above + int((settled(total.values) > 0).sum()), members + len(total.values)
    facts["renormalised sum"] = spread(sums)
    facts["renormalised above 0"] = f"{above} of {members}"
    claims["the renormalised alpha does not add up and is often negative"] = (
        abs(mean(sums) - 1) > 1 and above < members / 2
    )
    sums, ours, first, tried = [], [], 0, 0
    for cell in cells:
        rounds = reports(cell, "expected-accuracy")
        merit = scores(cell, "expected-accuracy", LAST)["MERIT"]
        total = accumulate(rounds)
        sums.append(math.fsum(merit) / total.gain)
        ours.append(math.fsum(total.values) / total.gain)
        for i, own in enumerate(rounds[-1].solo):
            told = merit[i] + 1 - own
            first, tried = first + int((np.delete(merit, i) < told).all()), tried + 1
    facts["merit sum"], facts["alpha sum"] = spread(sums), spread(ours)
    facts["merit lie"] = f"{first} of {tried}"
    claims["MERIT does not add up, and whoever states a SOLO of 1 is mostly first"] = (
        abs(mean(sums) - 1) > 1 and first > 0.75 * tried
    )
