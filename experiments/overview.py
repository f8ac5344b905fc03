"""The first page of the results: per line of the paper its command, its cost, its number and ours."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cells import Result, Row, datasets
from grid import text
from measures import (
    ENOUGH,
    MARKS,
    NOT_MEASURED,
    compare,
    curve,
    detected,
    facts,
    influences,
    intervals,
    on_gpu,
    repeats,
    seeds,
    spread,
    turned,
)
from sections import PRINTED, Lines, done, heads_beside, near, numbers_beside, table, title_of, truth_of
from takings import MEASURES, percent, shares_taken

from fedmerit import agreement

AGREEMENT = ("tab:error", "tab:error_game", "tab:round", "tab:client", "tab:alpha", "PHI")
Paper = Mapping[str, Any]


def opening(row: Row, cells: Sequence[Result]) -> list[str]:
    """The first cells of every line: where it is, what it is, how it was made."""
    return [
        f"[`{row.label}`](tables/{row.experiment}.md)",
        title_of(row),
        seeds(cells),
        text(facts(cells)["seconds"] / 60, ".1f"),
        f"`--only {row.experiment}`",
    ]


def put(head: Sequence[str], body: Sequence[Sequence[str]]) -> Lines:
    """A table whose lines begin with an `opening`."""
    yield from table(["paper", "row", "seeds", "minutes", "command", *head], body)


def finished(
    rows: Sequence[Row], results: Mapping[str, Result], *experiments: str
) -> Iterator[tuple[Row, list[Result]]]:
    """Rows of some experiments that have runs."""
    for row in rows:
        if row.experiment in experiments and (cells := done(row, results)):
            yield row, cells


def agreement_lines(rows: Sequence[Row], results: Mapping[str, Result], paper: Paper) -> Lines:
    """Spearman with the truth of each table: the paper's, and ours by several scores."""
    yield "Spearman with the truth of each table, ours twice: of accuracy / of expected accuracy."
    yield MARKS
    yield ""
    for truth, title in (("MR-SV", "### With MR-SV"), ("SV", "### With the retrained Shapley value")):
        body = [
            [*opening(row, cells), *numbers_beside(row, cells, results, paper)]
            for row in rows
            if row.label in AGREEMENT and truth_of(row) == truth and (cells := done(row, results))
        ]
        yield title
        yield ""
        if truth == "SV":
            yield "Rows have 6 members unless they say otherwise; the paper has 9."
            yield ""
        yield from put(heads_beside(truth), body)


def detection_lines(rows: Sequence[Row], results: Mapping[str, Result], paper: Paper) -> Lines:
    """In how many runs the label flipper is last."""
    body, seen = [], set()
    for row, cells in finished(rows, results, "fig-misbeh", "tab-flip"):
        known = paper["detection"]["values"].get(datasets()[row.dataset]["paper"], {})
        said = text(known["FP"], ".2f") if row.experiment == "fig-misbeh" else NOT_MEASURED
        line = [*opening(row, cells), said]
        for score in ("FP", "ALPHA sum", "PHI sum", "COS sum"):
            runs, mark = repeats(cells, results, score, truth="")
            counts = [detected(runs, utility, row.at).get(score) for utility in PRINTED]
            seen |= {count for count in counts if count}
            each = ["{} of {}".format(*count) if count else NOT_MEASURED for count in counts]
            line.append(" / ".join(each) + mark if any(counts) else NOT_MEASURED)
        by_turning = sum(turned(cells, utility, row.at, "FP") for utility in PRINTED)
        line[6] += f" ({by_turning} by a turned sign)" if by_turning else ""
        body.append(line)
    yield "In how many runs the one label flipper among 9 IID members is last, by accuracy / by expected"
    yield "accuracy. The paper states the median of a rate. These runs have no solo models, so no MERIT."
    yield ""
    yield from put(["the paper: FP", "ours: FP", "alpha summed", "PHI, settled", "COS summed"], body)
    if seen:
        yield intervals(seen)
        yield ""


def other_lines(rows: Sequence[Row], results: Mapping[str, Result], paper: Paper) -> Lines:
    """Weighting, cheats, influence, illustration: a table each."""
    yield "### Weights from scores"
    yield ""
    body = []
    for row, cells in finished(rows, results, "fig-perf"):
        known = paper["performance"]["values"][datasets()[row.dataset]["paper"]]
        said = " / ".join(text(known[one], ".2f") for one in row.row.split(" = ") if one in known)
        each = [spread([curve(cell, u)[-1] for cell in cells]) for u in ("neg-loss", *PRINTED)]
        body.append([*opening(row, cells), said or NOT_MEASURED, *each])
    yield "After the last round. Nobody weighted by PHI, which is settled when training is over, or by MERIT."
    yield ""
    head = ["the paper: negative loss", "ours: negative loss", "accuracy", "expected accuracy"]
    yield from put(head, body)
    yield "### Cheats that send something else"
    yield ""
    body = [
        [*opening(row, cells), *(percent(values) for values in shares_taken(row, cells).values())]
        for row, cells in finished(rows, results, "tab-cheat")
    ]
    yield "The cheat's share of all scores, of two cheats both shares; a fair one is 17 %, of two 33 %. This"
    yield "is not in the paper. In brackets the least and the largest of the seeds."
    yield ""
    yield from put(MEASURES.values(), body)
    yield "### Influence of one member on another's EE"
    yield ""
    flat = [value for line in paper["influence"]["values"] for value in line if value]
    body = []
    for row, cells in finished(rows, results, "tab-attack"):
        each = []
        for utility in PRINTED:
            single = influences(cells, utility, row.at)
            middle = np.median(single, axis=0)
            off = middle[~np.eye(len(middle), dtype=bool)]
            each.append(f"{text(off.min(), '.3f')} to {text(off.max(), '.3f')}")
        body.append([*opening(row, cells), f"{text(min(flat), '.3f')} to {text(max(flat), '.3f')}", *each])
    yield "Alpha, PHI and MERIT of a member do not depend on what others state: there it is 0."
    yield ""
    yield from put(["the paper", "ours: medians, accuracy", "medians, expected accuracy"], body)
    yield "### Four members"
    yield ""
    drawn = paper["illustrate"]["values"]
    body = []
    for row, cells in finished(rows, results, "fig-illustrate"):
        is_same = datasets()[row.dataset]["paper"] == paper["illustrate"]["dataset"]
        said = agreement(drawn["FP"], drawn["MR-SV"], resamples=0).spearman if is_same else None
        each = [near(cells, results, row, score) for score in ("FP", "ALPHA sum", "PHI sum", "MERIT")]
        body.append([*opening(row, cells), NOT_MEASURED if said is None else text(said, ".2f"), *each])
    yield "Spearman with MR-SV, of accuracy / of expected accuracy; the paper's of what it draws."
    yield ""
    yield from put(["the paper: FP", "ours: FP", "alpha summed", "PHI, settled", "MERIT"], body)


def data_lines(rows: Sequence[Row], results: Mapping[str, Result]) -> Lines:
    """What each dataset is and how much of it was used."""
    body = []
    for name, about in datasets().items():
        cells = [cell for row in rows if row.dataset == name for cell in done(row, results)]
        if not cells:
            continue
        used = facts(cells)
        whole = {cell["test_images"] for cell in cells if not cell["settings"]["data"]["test_size"]}
        images = " or ".join(f"{n:,}" for n in used["images"])
        some = [f"{n:,}" for n in used["test"] if n not in whole]
        parts = [f"class-balanced {' or '.join(some)}"] if some else []
        beside = any("balanced-accuracy" in cell["utilities"] for cell in cells)
        also = ", with balanced accuracy beside accuracy" if beside else ""
        test = "; ".join([*parts, *(f"all {n:,}{also}" for n in sorted(whole))])
        epochs = sorted({cell["settings"]["training"]["local_epochs"] for cell in cells})
        body.append(
            [
                about["title"],
                about["paper"],
                f"{images} of {about['train']:,}",
                test,
                about["model"],
                " or ".join(map(str, epochs)),
            ]
        )
    head = ["data", "the paper's", "training images", "test images", "model", "local epochs"]
    yield from table(head, body)


def unlisted(rows: Sequence[Row], results: Mapping[str, Result]) -> Lines:
    """Finished runs that no table uses: of earlier plans, with more images."""
    planned = {cell.name for row in rows for cell in row.cells}
    body = []
    for name in sorted(set(results) - planned):
        cell = results[name]
        if cell["utilities"]["accuracy"]["truth"].get("rounds"):
            found = {u: compare([cell], u, 10**6, "MR-SV") for u in PRINTED}
            near = [
                " / ".join(spread(found[u].get(score, {}).get("spearman", [])) for u in PRINTED)
                for score in ("FP", "ALPHA sum")
            ]
        else:
            near = ["", ""]
        members, images = len(cell["clients"]), sum(cell["samples"].values())
        short = datasets()[cell["dataset"]]["short"]
        spoilt = ", ".join(cell["settings"].get("corruption", {})).replace("_", " ")
        body.append([f"`{name}`", short, f"{images:,}", str(members), spoilt, *near])
    if body:
        yield "## Runs in no table"
        yield ""
        yield "Of earlier plans, with more images; Spearman with MR-SV, accuracy / expected accuracy. They"
        yield "count only in what FINDINGS.md says of all rounds of all runs."
        yield ""
        yield from table(["run", "data", "images", "members", "with", "FP", "alpha summed"], body)


def commands(rows: Sequence[Row], results: Mapping[str, Result]) -> Lines:
    """One line a table or figure: what makes it, what it cost, how far it is."""
    body = []
    for name in dict.fromkeys(row.experiment for row in rows):
        own = [row for row in rows if row.experiment == name]
        names = dict.fromkeys(cell.name for row in own for cell in row.cells)
        finished = [results[one] for one in names if one in results]
        known = facts(finished)
        open_ = {cell.name: cell.guess for row in own for cell in row.cells if cell.name not in results}
        left = math.fsum(cost(guess, results) for guess in open_.values())
        body.append(
            [
                f"[`{own[0].label}`](tables/{name}.md)",
                own[0].says,
                f"`run.py --only {name}`",
                f"{len(finished)} of {len(names)}",
                text(known["seconds"] / 60, ".1f") if finished else "",
                text(left / 60, ".1f") if left else "",
                ", ".join(known["devices"]),
            ]
        )
    yield "Commands take `--data FOLDER --out DIR` too. Minutes are those of the whole device: a run's"
    yield "seconds, divided by how many ran at once. Runs are shared between tables, so they do not add up."
    yield ""
    head = ["paper", "what it shows", "command", "runs", "minutes", "minutes left, on an H200", "machine"]
    yield from table(head, body)


def missing(rows: Sequence[Row], results: Mapping[str, Result]) -> Lines:
    """Runs of the plan that were not done, and what they would cost."""
    body, seen = [], set()
    for row in rows:
        left = [cell for cell in row.cells if cell.name not in results and cell.name not in seen]
        seen |= {cell.name for cell in left}
        if left:
            minutes = math.fsum(cost(cell.guess, results) for cell in left) / 60
            what = datasets()[row.dataset]["short"] + (f", {row.row}" if row.row else "")
            body.append([f"`{row.label}`", what, f"{len(left)} of {len(row.cells)}", text(minutes, ".1f")])
    if not body:
        yield "Every run of the plan was done."
        yield ""
        return
    yield "The paper has 10 runs a row. We planned fewer, see each row's seeds, and these are left."
    yield "Estimated from the plan's guess and how guesses of finished runs turned out."
    if not any("resnet" in one["settings"]["model"]["name"] for one in results.values()):
        yield "No run of a ResNet (ISIC, lung) has been finished, so those are guesses alone."
    yield ""
    yield from table(["paper", "row", "runs missing", "minutes on an H200"], body)
    few = dict.fromkeys(f"`{row.label}` {title_of(row)}" for row in rows if len(row.cells) < ENOUGH)
    yield "Planned with fewer than 3 seeds, because models hardly learn at that learning rate or because only"
    yield f"one run is drawn: {'; '.join(few)}."
    yield "Not planned: `tab:error_game` of ISIC and PCam with 9 members."
    yield ""


def scripts() -> Lines:
    """Every file of the folder and the first line of its text: commands first, then what they import."""
    found = {}
    for file in sorted(Path(__file__).resolve().parent.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found[file.name] = (ast.get_docstring(tree) or "").splitlines()[0], isinstance(tree.body[-1], ast.If)
    yield "Commands say how they are called at their top:"
    yield ""
    yield from table(
        ["command", "what it does"], [[f"`{n}`", says] for n, (says, runs) in found.items() if runs]
    )
    yield "What they import:"
    yield ""
    yield from table(
        ["module", "what is in it"], [[f"`{n}`", says] for n, (says, runs) in found.items() if not runs]
    )


def cost(guess: float, results: Mapping[str, Result]) -> float:
    """Seconds a run of that guess takes of an H200, as those before did."""
    ratios = [
        one["seconds"]["total"] / one["jobs"] / one["guess"]
        for one in results.values()
        if one["guess"] and on_gpu(one)
    ]
    return guess * (statistics.median(ratios) if ratios else 1.0)
