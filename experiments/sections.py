"""The pages of tables/, one kind of experiment each: rows of the plan and finished cells -> Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from cells import Result, Row, datasets
from grid import grid, text
from measures import (
    ABSENT,
    MARKS,
    NOT_MEASURED,
    SCORES,
    compare,
    curve,
    detected,
    flipper_of,
    influences,
    intervals,
    is_thin,
    phi,
    repeats,
    reports,
    scores,
    seeds,
    signs,
    spread,
    turned,
)
from protocols import (
    AUTHORS,
    METRICS,
    PAPERS,
    PROTOCOLS,
    TEXT,
    compared,
    influences_of,
    kept,
    last_in,
    vectors,
)

from fedmerit import Reports, Scores, alpha, ee, fp, ioi, loo, normalise, surplus

Lines = Iterator[str]
SPREAD = ("tab:error", "tab:error_game")
"""Tables of the paper with more than one metric."""
PRINTED = ("accuracy", "expected-accuracy")
"""Where a cell of a table holds two numbers: of these utilities, in this order."""


def done(row: Row, results: Mapping[str, Result]) -> list[Result]:
    """Its finished cells."""
    return [results[cell.name] for cell in row.cells if cell.name in results]


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Lines:
    """Markdown."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for line in body:
        yield "| " + " | ".join(line) + " |"
    yield ""


def numbers(paper: Mapping[str, list[dict[str, Any]]], row: Row, metric: str) -> dict[str, str]:
    """The paper's, by our names of the scores."""
    dataset = datasets()[row.dataset]["paper"]
    whole = (("tab:error_game", "9 members"), ("tab:error", "renormalised game"))
    name = "" if (row.label, row.row) in whole else row.row
    same = {"label": row.label, "dataset": dataset, "row": name, "metric": metric}
    names = {"COS": "COS sum"}
    found = {}
    for one in paper["numbers"]:
        if all(one[key] == value for key, value in same.items()):
            score = str(one["score"])
            found[names.get(score, score)] = f"{text(one['mean'], '.3f')} ± {text(one['spread'], '.3f')}"
    return found


def truth_of(row: Row) -> str:
    """What the paper's table compares with."""
    return "SV" if row.label == "tab:error_game" else "MR-SV"


def title_of(row: Row) -> str:
    """The data of a row, and what is special about it."""
    return datasets()[row.dataset]["short"] + (f", {row.row}" if row.row else "")


def name_in(cells: Sequence[Result], score: str) -> str:
    """A score of the paper in a table of ours: its COS is of models, which older runs did not keep."""
    return "COS, of updates" if score == "COS" == kept(cells, score, TEXT) else score


def four_ways(
    row: Row, cells: Sequence[Result], paper: Mapping[str, Any], metric: str, asked: Sequence[str]
) -> Iterator[list[str]]:
    """Lines of a table of the paper: score, the paper's number, and ours by three protocols."""
    truth = "SV" if truth_of(row) == "SV" else "truth"
    found = [compared(cells, protocol, row.at, truth) for protocol in PROTOCOLS]
    said = numbers(paper, row, metric)
    for score in asked:
        each = [spread(one.get(score, {}).get(metric, [])) or NOT_MEASURED for one in found]
        printed = said.get("COS sum" if score == "COS" else score, NOT_MEASURED)
        yield [name_in(cells, score), printed, *each]


def paper_table(rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> Lines:
    """A table of the paper in four columns: its numbers, the authors' protocol, its text, and ours."""
    metrics = METRICS if rows[0].label in SPREAD else {"spearman": METRICS["spearman"]}
    asked = (*(["MR-SV"] if truth_of(rows[0]) == "SV" else []), *PAPERS)
    body = [
        [title_of(row), seeds(cells), title, *line]
        for row in rows
        if (cells := done(row, results))
        for metric, title in metrics.items()
        for line in four_ways(row, cells, paper, metric, asked)
        if any(one != NOT_MEASURED for one in line[2:])
    ]
    yield "**The paper's table, four ways** ([what the columns are](../README.md#four-columns))"
    yield ""
    yield from table(["row", "seeds", "metric", "score", "the paper", *PROTOCOLS], body)


def agreement_section(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, list[dict[str, object]]]
) -> Lines:
    """The paper's table in four columns, then Spearman per score and utility for every row."""
    yield from paper_table(rows, results, paper)
    yield MARKS
    yield ""
    for row in rows:
        cells = done(row, results)
        if not cells:
            continue
        for truth in ("SV", "MR-SV"):
            yield from agreement_table(row, cells, results, truth)
        if row.label == "tab:error":
            yield from sign_table(row, cells)


def agreement_table(row: Row, cells: Sequence[Result], results: Mapping[str, Result], truth: str) -> Lines:
    """Spearman of every score with one truth, by utility; nothing where there is no such truth."""
    known = [(utility, utility) for utility in cells[0]["utilities"]]
    if set(PRINTED) <= set(cells[0]["utilities"]):
        known.append(PRINTED[::-1])
    found = [compare(cells, own, row.at, truth, of) for own, of in known]
    if not any(found):
        return
    what = "the retrained Shapley value" if truth == "SV" else "MR-SV"
    few = ", thin" if is_thin(cells) else ""
    yield f"**{title_of(row)}: Spearman with {what}**, round {row.at}{few}"
    yield ""
    body = []
    for score in SCORES:
        each, mark = [one.get(score, {}) for one in found], ""
        if not any(each) and score in ABSENT:
            runs, mark = repeats(cells, results, score, truth=truth)
            each = [compare(runs, own, row.at, truth, of).get(score, {}) for own, of in known]
        if any(each) or score in ABSENT:
            shown = [spread(one.get("spearman", [])) for one in each]
            body.append([score, *(f"{one}{mark}" if one else NOT_MEASURED for one in shown)])
    heads = [own if own == of else f"{own} against the {truth} of {of}" for own, of in known]
    yield from table(["score", *heads], body)


def sign_table(row: Row, cells: Sequence[Result]) -> Lines:
    """Reversed rounds, and what part of the gain alpha explains."""
    found = {utility: signs(cells, utility) for utility in cells[0]["utilities"]}
    yield f"**{datasets()[row.dataset]['short']}: signs**, all rounds of all seeds"
    yield ""
    heads = list(next(iter(found.values())))
    yield from table(["utility", *heads], [[name, *values.values()] for name, values in found.items()])


def influence_section(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, dict[str, list[list[float]]]]
) -> Lines:
    """Reporter i (line) on client j (column): the paper's, and ours for each utility, median and mean."""
    yield "The influence is a ratio whose denominator may be near 0, so single runs have values far outside"
    yield "[0, 1], and a few of them decide a mean. The median over the seeds comes first, then the mean."
    yield "Alpha, PHI and MERIT of a member do not depend on what others state: their influence is 0."
    yield ""
    theirs = [[text(value, ".3f") for value in line] for line in paper["influence"]["values"]]
    shown = [("the paper", theirs)]
    for row in rows:
        cells = done(row, results)
        if cells:
            average = np.mean(influences_of(cells, row.at), axis=0)
            lines = [[text(value, ".3f") for value in line] for line in average]
            shown.append((f"{AUTHORS}, mean of {len(cells)} seeds", lines))
        for utility in cells[0]["utilities"] if cells else ():
            found = influences(cells, utility, row.at)
            if len(found):
                both = np.median(found, axis=0), np.mean(found, axis=0)
                matrix = [
                    [
                        f"{text(middle, '.3f')} ({text(average, '.3f')})"
                        for middle, average in zip(*line, strict=True)
                    ]
                    for line in zip(*both, strict=True)
                ]
                shown.append((f"{TEXT}, {utility}, median (mean) of {len(found)} seeds", matrix))
    for title, matrix in shown:
        yield f"**{title}**"
        yield ""
        head = ["", *(str(j + 1) for j in range(len(matrix)))]
        yield from table(head, [[str(i + 1), *line] for i, line in enumerate(matrix)])


def detection_lines(row: Row, cells: Sequence[Result], paper: Mapping[str, Any]) -> list[list[str]]:
    """Per score of the paper: how often the flipper is strictly last, the paper's median and ours."""
    said = paper["detection"]["values"][datasets()[row.dataset]["paper"]]
    counts = [last_in(cells, protocol, row.at, flipper_of) for protocol in PROTOCOLS]
    body = []
    for score in ("MR-SV", *PAPERS):
        each = ["{} of {}".format(*one[score]) if score in one else NOT_MEASURED for one in counts]
        printed = text(said["COS sum" if score == "COS" else score], ".2f")
        body.append([name_in(cells, score), printed, *each])
    return body


def detection_section(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, dict[str, dict[str, Any]]]
) -> Lines:
    """How often the flipper is strictly last."""
    yield MARKS
    yield ""
    for row in rows:
        cells = done(row, results)
        if not cells:
            continue
        utilities = list(cells[0]["utilities"])
        found = {utility: detected(cells, utility, row.at) for utility in utilities}
        yield f"**{title_of(row)}: four ways**"
        yield ""
        yield from table(["score", "the paper, median", *PROTOCOLS], detection_lines(row, cells, paper))
        body, seen = [], []
        for score in SCORES:
            counts, mark = [found[utility].get(score) for utility in utilities], ""
            if not any(counts) and score in ABSENT:
                runs, mark = repeats(cells, results, score, truth="")
                known = [
                    detected(runs, u, row.at) if runs and u in runs[0]["utilities"] else {} for u in utilities
                ]
                counts = [one.get(score) for one in known]
            if (any(counts) or score in ABSENT) and score != "samples":
                seen += [count for count in counts if count]
                each = (f"{count[0]} of {count[1]}{mark}" if count else NOT_MEASURED for count in counts)
                body.append([score, *each])
        of = f", {row.row}" if row.row else ""
        yield f"**{datasets()[row.dataset]['short']}**{of}, round {row.at}"
        yield ""
        yield from table(["score", *utilities], body)
        yield intervals(seen)
        yield ""
        by_sign = [
            f"{score} {turned(cells, utility, row.at, score)} ({utility})"
            for score in ("FP", "EE")
            for utility in utilities
            if turned(cells, utility, row.at, score)
        ]
        if by_sign:
            yield f"Of these because a sign had turned: {', '.join(by_sign)}."
            yield ""


def performance_section(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, dict[str, dict[str, Any]]]
) -> Lines:
    """The utility of the global model after each round, a column per way to weight."""
    yield "Nobody weighted by PHI, which is settled when training is over, or by MERIT."
    yield ""
    for dataset in dict.fromkeys(row.dataset for row in rows):
        runs = {row.row: done(row, results) for row in rows if row.dataset == dataset}
        runs = {name: cells for name, cells in runs.items() if cells}
        if not runs:
            continue
        short = datasets()[dataset]["short"]
        for utility in next(iter(runs.values()))[0]["utilities"]:
            curves = {name: [curve(cell, utility) for cell in cells] for name, cells in runs.items()}
            last = min(len(curve) for each in curves.values() for curve in each)
            yield f"**{short}: {utility} of the global model**"
            yield ""
            body = [
                [str(number + 1), *(spread([curve[number] for curve in each]) for each in curves.values())]
                for number in range(last)
            ]
            if utility == "neg-loss":
                theirs = paper["performance"]["values"][datasets()[dataset]["paper"]]
                said = [
                    " / ".join(text(theirs[one], ".2f") for one in name.split(" = ") if one in theirs)
                    for name in curves
                ]
                body.append(["the paper, last round", *said])
            yield from table(["round", *curves], body)


def illustration_section(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, dict[str, Any]]
) -> Lines:
    """All scores of all members, minus the smallest and divided by the mean."""
    theirs = paper["illustrate"]["values"]
    yield "**the paper, ISIC** (as drawn; no member is at 0, so the smallest was not subtracted there)"
    yield ""
    body = [[name, *(text(v, ".2f") for v in values)] for name, values in theirs.items()]
    yield from table(["score", *(f"Hospital {letter}" for letter in "ABCD")], body)
    for row in rows:
        for cell in done(row, results)[:1]:
            every = vectors(cell, AUTHORS, row.at)
            yield f"**{title_of(row)}: {AUTHORS}**, divided by the mean, seed {cell['seed']}"
            yield ""
            known = {name: kept([cell], name, AUTHORS) for name in PAPERS}
            shown = {name: every[of] for name, of in known.items() if of in every}
            shown = {"SV of the round": every["truth"], **shown}
            body = [[name, *map(_two, values / values.mean())] for name, values in shown.items()]
            yield from table(["score", *cell["clients"]], body)
            found = scores(cell, "expected-accuracy", row.at)
            title = datasets()[row.dataset]["title"]
            yield f"**{title}**, expected accuracy, normalised, seed {cell['seed']}"
            yield ""
            nothing = [NOT_MEASURED] * len(cell["clients"])
            body = [
                [name, *(map(_two, normalise(found[name])) if name in found else nothing)]
                for name in SCORES
                if name in found or name in ABSENT
            ]
            yield from table(["score", *cell["clients"]], body)


def _two(value: float) -> str:
    return text(value, ".2f")


def phi_section(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, dict[str, Any]]
) -> Lines:
    """PHI beside alpha: agreement with MR-SV, shares, and whether they add up to the gain."""
    body = []
    for row in rows:
        cells = done(row, results)
        for utility, title in (("expected-accuracy", "expected accuracy"), ("accuracy", "accuracy")):
            if not cells:
                continue
            found = compare(cells, utility, row.at, "MR-SV")
            crossed = compare(cells, "expected-accuracy", row.at, "MR-SV", against="accuracy")
            line = [datasets()[row.dataset]["short"], seeds(cells), title]
            for score in ("PHI sum", "ALPHA sum"):
                near = found.get(score, {}).get("spearman", [])
                line += [spread(near), text(min(near), ".2f") if near else ""]
            line += [
                "" if utility == "expected-accuracy" else spread(crossed.get(score, {}).get("spearman", []))
                for score in ("PHI sum", "ALPHA sum")
            ]
            apart: dict[str, list[float]] = {"PHI sum": [], "ALPHA sum": []}
            whole: dict[str, list[float]] = {"PHI sum": [], "ALPHA sum": []}
            for cell in cells:
                known, along = scores(cell, utility, row.at), phi(cell, utility, row.at)
                gain = math.fsum(one.gain for one in reports(cell, utility) if one.round <= row.at)
                for score, own in (("PHI sum", along[1] if along else 0.0), ("ALPHA sum", gain)):
                    if score in known and grid(own):
                        whole[score].append(math.fsum(known[score]) / own)
                        apart[score].append(variation(known[score], known["MR-SV"]))
            line += [spread(apart[score]) if utility == "expected-accuracy" else "" for score in apart]
            others, mark = repeats(cells, results, "MERIT")
            solo = compare(others, utility, row.at, "MR-SV").get("MERIT", {}).get("spearman", [])
            line += [spread(values) for values in whole.values()]
            body.append([*line, spread(solo) + mark if solo else NOT_MEASURED])
    yield "PHI and alpha are summed over the rounds. PHI of accuracy is that of sharpened accuracy, and adds"
    yield "up to the gain of sharpened accuracy. Shares are a score divided by its sum; their distance is"
    yield "half the sum of the differences' absolute values. These runs repeat those of `tab:error`, without"
    yield "solo models and without the other game; MERIT is of the runs that they repeat (‡)."
    yield ""
    head = ["data", "seeds", "utility", "PHI: Spearman with MR-SV", "lowest"]
    head += ["alpha: Spearman with MR-SV", "lowest", "PHI of expected accuracy", "alpha of expected accuracy"]
    head += ["PHI: distance of shares", "alpha: distance of shares"]
    yield from table([*head, "sum of PHI / gain", "sum of alpha / gain", "MERIT: Spearman with MR-SV"], body)


def variation(one: Sequence[float], other: Sequence[float]) -> float:
    """Total variation of two lists of shares.

    >>> variation([1, 3], [2, 2])
    0.25
    """
    shares = [[value / math.fsum(values) for value in values] for values in (one, other)]
    return math.fsum(abs(a - b) for a, b in zip(*shares, strict=True)) / 2


# ------------------------------------------------------------------------------------------ tab:coalitions

BLOCKS = ("M0", "+Ui", "+Uj", "-Uj", "-Ui", "M")
AXIOMS = ("efficiency", "null player", "symmetry", "privacy", "incentive", "linearity")

LISTED: dict[str, tuple[Callable[[Reports], Scores], tuple[str, ...], tuple[str, ...]]] = {
    # score: function, the paper's axioms, ours
    "LOO": (loo, ("null player", "symmetry", "privacy"), ("null player", "symmetry", "privacy", "linearity")),
    "FP": (
        fp,
        ("efficiency", "null player", "symmetry", "privacy"),
        ("efficiency", "null player", "symmetry", "privacy"),
    ),
    "EE": (
        ee,
        ("efficiency", "symmetry", "privacy", "incentive"),
        ("efficiency", "symmetry", "privacy", "incentive"),
    ),
    "IOI": (ioi, (), ("null player", "symmetry", "privacy", "linearity")),
    "ALPHA": (alpha, (), ("null player", "symmetry", "privacy", "linearity")),
    "SURPLUS": (surplus, (), ("efficiency", "symmetry", "privacy", "linearity")),
}

TESTS = {
    "efficiency": ("tests/scoring/test_scores.py::test_fp_and_ee_add_up_to_the_pot_and_surplus_to_the_gain",),
    "null player": (
        "tests/scoring/test_scores.py::test_a_null_player_gets_nothing_from_fp_alpha_loo",
        "tests/scoring/test_scores.py::test_the_null_player_axiom_fails_for_ee_and_surplus",
        "tests/scoring/test_scores.py::test_the_papers_null_player_example",
    ),
    "symmetry": ("tests/scoring/test_scores.py::test_equal_reports_get_equal_scores",),
    "privacy": (
        "tests/simulation/test_embedded.py::test_what_the_server_receives_holds_no_plain_update",
        "tests/simulation/test_embedded.py::test_secure_aggregation_on_and_off_end_with_the_same_bytes",
    ),
    "incentive": (
        "tests/scoring/test_scores.py::test_raw_ee_of_i_ignores_report_i_bit_for_bit",
        "tests/scoring/test_scores.py::test_but_the_share_and_the_rank_of_i_do_move_with_report_i",
    ),
    "linearity": (
        "tests/scoring/test_scores.py::test_linear_scores_are_linear",
        "tests/scoring/test_scores.py::test_fp_and_ee_are_not_linear",
    ),
}
"""Where each axiom is checked: on random games, with counterexamples where it fails."""


def blocks(function: Callable[[Reports], Scores]) -> dict[str, str]:
    """Which utilities move the score of member 0: "●" its raw score, "○" the published, rescaled one only."""
    rng = np.random.default_rng(0)
    alone, without = rng.uniform(0.2, 0.4, 4), rng.uniform(0.5, 0.6, 4)

    def scored(moved: str | None) -> tuple[float, float]:
        own, others = np.array([1.0, 0, 0, 0]), np.array([0, 1.0, 0, 0])
        shift = {name: 0.01 if name == moved else 0.0 for name in BLOCKS}
        made = function(
            Reports(
                empty=0.1 + shift["M0"],
                grand=0.7 + shift["M"],
                alone=alone + shift["+Ui"] * own + shift["+Uj"] * others,
                without=without + shift["-Ui"] * own + shift["-Uj"] * others,
            )
        )
        return float(made.raw[0]), float(made.values[0])

    raw, published = scored(None)
    found = {}
    for name in BLOCKS:
        now = scored(name)
        found[name] = "●" if abs(now[0] - raw) > 1e-12 else "○" if abs(now[1] - published) > 1e-12 else ""
    return found


def axioms_section() -> Lines:
    """The table, and the tests behind it."""
    yield "# tab:coalitions: building blocks of the scores, and the axioms they satisfy"
    yield ""
    yield "Building blocks are found by moving one utility at a time: ● moves the member's raw score, ○"
    yield "only the published one, through the rescaling. ✓ is the paper's claim and holds; + holds and"
    yield "is not in the paper's table. EE's incentive is that of its raw score: share and rank do move with"
    yield "one's own report."
    yield ""
    yield "| score | " + " | ".join((*BLOCKS, *AXIOMS)) + " |"
    yield "|" + "---|" * (1 + len(BLOCKS) + len(AXIOMS))
    for name, (function, theirs, ours) in LISTED.items():
        assert set(theirs) <= set(ours)
        marks = ["✓" if axiom in theirs else "+" if axiom in ours else "" for axiom in AXIOMS]
        yield "| " + " | ".join([name, *blocks(function).values(), *marks]) + " |"
    yield ""
    yield "| axiom | checked by |"
    yield "|---|---|"
    for axiom, tests in TESTS.items():
        yield f"| {axiom} | {', '.join(f'`{test}`' for test in tests)} |"
    yield ""
    yield "    pytest " + " ".join(
        dict.fromkeys(test.partition("::")[0] for each in TESTS.values() for test in each)
    )


SECTIONS = {
    "tab-phi": phi_section,
    "tab-attack": influence_section,
    "fig-misbeh": detection_section,
    "fig-perf": performance_section,
    "fig-illustrate": illustration_section,
}
