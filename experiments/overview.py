"""The first page of the results: per line of the paper its command, its cost, its number and ours."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cells import Result, Row, datasets
from grid import text
from measures import compare, curve, detected, facts, influences, intervals, seeds, spread, turned
from sections import Lines, done, numbers, table

AGREEMENT = ("tab:error", "tab:error_game", "tab:round", "tab:client", "tab:alpha")
PAIR = ("accuracy", "expected-accuracy")
Paper = Mapping[str, Any]


def agreement_lines(rows: Sequence[Row], results: Mapping[str, Result], paper: Paper) -> Lines:
    """Spearman of FP and of summed alpha with the truth of each table."""
    body = []
    for row in rows:
        cells = done(row, results)
        if row.label not in AGREEMENT or not cells:
            continue
        truth = "SV" if row.label == "tab:error_game" else "MR-SV"
        theirs = numbers(paper, row, "spearman").get("FP", "")
        found = {utility: compare(cells, utility, row.at, truth) for utility in PAIR}

        def both(score: str, found: dict[str, Any] = found) -> str:
            return " / ".join(spread(found[utility].get(score, {}).get("spearman", [])) for utility in PAIR)

        body.append(
            [
                f"[`{row.label}`](tables/{row.experiment}.md)",
                datasets()[row.dataset]["short"] + (f", {row.row}" if row.row else ""),
                seeds(cells),
                text(facts(cells)["seconds"] / 60, ".1f"),
                theirs,
                both("FP"),
                both("ALPHA sum"),
                both("ALPHA sum, renormalised") if truth == "SV" else "",
            ]
        )
    yield "Spearman with the truth of each table: MR-SV, and in `tab:error_game` the retrained Shapley value."
    yield "Ours twice: of accuracy / of expected accuracy."
    yield ""
    head = ["paper", "row", "seeds", "minutes", "the paper: FP", "ours: FP", "ours: alpha summed"]
    yield from table([*head, "ours: alpha summed, renormalised game"], body)


def other_lines(rows: Sequence[Row], results: Mapping[str, Result], paper: Paper) -> Lines:
    """Detection, weighting, influence: one number of the paper and ours."""
    body: list[list[str]] = []
    found: list[tuple[int, int]] = []
    for row in rows:
        cells = done(row, results)
        if not cells or row.label in AGREEMENT:
            continue
        name, theirs, ours = datasets()[row.dataset]["paper"], "", ""
        if row.experiment == "fig-misbeh":
            theirs = f"FP {text(paper['detection']['values'][name]['FP'], '.2f')} (median)"
            counts = {utility: detected(cells, utility, row.at) for utility in PAIR}
            found += [counts[utility][score] for utility in PAIR for score in ("FP", "ALPHA sum")]
            by_turning = sum(turned(cells, utility, row.at, "FP") for utility in PAIR)
            ours = "; ".join(
                f"{score} " + " / ".join("{} of {}".format(*counts[utility][score]) for utility in PAIR)
                for score in ("FP", "ALPHA sum")
            )
            ours += f" ({by_turning} of FP's by a turned sign)" if by_turning else ""
        elif row.experiment == "fig-perf":
            known = paper["performance"]["values"][name]
            said = [text(known[one], ".2f") for one in row.row.split(" = ") if one in known]
            theirs = f"negative loss {' / '.join(said)}" if said else ""
            last = {u: spread([curve(cell, u)[-1] for cell in cells]) for u in ("neg-loss", "accuracy")}
            ours = f"negative loss {last['neg-loss']}, accuracy {last['accuracy']}"
        elif row.experiment == "tab-attack":
            flat = [value for line in paper["influence"]["values"] for value in line if value]
            theirs = f"{text(min(flat), '.3f')} to {text(max(flat), '.3f')}"
            each = []
            for utility in PAIR:
                single = influences(cells, utility, row.at)
                if len(single):
                    middle = np.median(single, axis=0)
                    off = middle[~np.eye(len(middle), dtype=bool)]
                    each.append(f"{text(off.min(), '.3f')} to {text(off.max(), '.3f')} ({utility})")
            ours = f"medians {', '.join(each)}" if each else ""
        elif row.experiment == "tab-phi":
            close = {utility: compare(cells, utility, row.at, "MR-SV") for utility in PAIR}
            ours = "Spearman with MR-SV: " + "; ".join(
                f"{name} "
                + " / ".join(spread(close[utility].get(score, {}).get("spearman", [])) for utility in PAIR)
                for name, score in (("PHI", "PHI sum"), ("alpha", "ALPHA sum"))
            )
        elif row.experiment == "fig-illustrate":
            ours = "see there"
        title = datasets()[row.dataset]["short"] + (f", {row.row}" if row.row else "")
        minutes = text(facts(cells)["seconds"] / 60, ".1f")
        link = f"[`{row.label}`](tables/{row.experiment}.md)"
        body.append([link, title, seeds(cells), minutes, theirs, ours])
    yield from table(["paper", "row", "seeds", "minutes", "the paper", "ours"], body)
    if found:
        yield intervals(found)
        yield ""


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
            found = {u: compare([cell], u, 10**6, "MR-SV") for u in PAIR}
            near = [
                " / ".join(spread(found[u].get(score, {}).get("spearman", [])) for u in PAIR)
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
    head = ["paper", "what it shows", "command", "runs", "minutes", "minutes left", "machine"]
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
    yield "Estimated from the plan's guess and how guesses of finished runs turned out."
    if not any("resnet" in one["settings"]["model"]["name"] for one in results.values()):
        yield "No run of a ResNet (ISIC, lung) has been finished, so those are guesses alone."
    yield ""
    yield from table(["paper", "row", "runs missing", "minutes on an H200"], body)


def cost(guess: float, results: Mapping[str, Result]) -> float:
    """Seconds a run of that guess takes of an H200, as those before did."""
    ratios = [
        one["seconds"]["total"] / one["jobs"] / one["guess"] for one in results.values() if one["guess"]
    ]
    return guess * (statistics.median(ratios) if ratios else 1.0)
