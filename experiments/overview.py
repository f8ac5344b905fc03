"""The first page of the results: the paper's tables in four columns, what was run, and what was not."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cells import Result, Row, datasets
from grid import text
from measures import NOT_MEASURED, curve, facts, is_thin, on_gpu, seeds, spread
from protocols import PROTOCOLS
from sections import Lines, detection_lines, done, four_ways, table, title_of, truth_of

AGREEMENT = ("tab:error", "tab:error_game", "tab:round", "tab:client", "tab:alpha")
PRINTED_WAY = ", as printed"
H200 = "NVIDIA H200"
Paper = Mapping[str, Any]


def in_one_cell(lines: Iterable[Sequence[str]]) -> list[str]:
    """Lines of several scores as one, cell by cell.

    >>> in_one_cell([["LOO", "1"], ["FP", "2"]])
    ['LOO / FP', '1 / 2']
    """
    return [" / ".join(cell) for cell in zip(*lines, strict=True)]


def four_columns(rows: Sequence[Row], results: Mapping[str, Result], paper: Paper) -> Lines:
    """Spearman of LOO and FP in every row of the paper's tables that is not thin."""
    for truth, asked in (("MR-SV", ("LOO", "FP")), ("SV", ("MR-SV", "LOO", "FP"))):
        body, known = [], set()
        for row in rows:
            cells = done(row, results)
            key = row.at, *sorted(cell["name"] for cell in cells)
            if row.label not in AGREEMENT or truth_of(row) != truth or is_thin(cells) or key in known:
                continue
            known.add(key)
            line = in_one_cell(four_ways(row, cells, paper, "spearman", asked))
            body.append([f"`{row.label}`", title_of(row), seeds(cells), *line[1:]])
        what = "the retrained value" if truth == "SV" else "the truth above"
        yield f"{' / '.join(asked)}, Spearman with {what}:"
        yield ""
        yield from table(["table", "row", "seeds", "the paper", *PROTOCOLS], body)


def other_columns(rows: Sequence[Row], results: Mapping[str, Result], paper: Paper) -> Lines:
    """Detection and weights."""
    yield "### The label flipper is last"
    yield ""
    body = []
    for row in rows:
        cells = done(row, results)
        if row.experiment == "fig-misbeh" and not is_thin(cells):
            line = in_one_cell(detection_lines(row, cells, paper))
            each = (cell.replace(f" of {len(cells)}", "") for cell in line[1:])
            body.append([title_of(row), seeds(cells), *each])
    yield "MR-SV / LOO / EE / FP / COS: in how many runs; the paper states the median of a rate."
    yield ""
    yield from table(["row", "runs", "the paper", *PROTOCOLS], body)
    yield "### Weights from scores"
    yield ""
    yield "Negative loss after the last round. The scripts hold no such experiment. As printed, weights are"
    yield "of the same round's accuracy, not clipped, and label noise rises in steps of 0.11. Ours are"
    yield "clipped to [0.1, 3], of the expected accuracy, and the noise rises in steps of 1/8."
    yield ""
    body = []
    for row in rows:
        cells = done(row, results)
        if row.experiment != "fig-perf" or row.row.endswith(PRINTED_WAY) or is_thin(cells):
            continue
        known = paper["performance"]["values"][datasets()[row.dataset]["paper"]]
        said = " / ".join(text(known[one], ".2f") for one in row.row.split(" = ") if one in known)
        same = [one for one in rows if (one.dataset, one.row) == (row.dataset, f"{row.row}{PRINTED_WAY}")]
        runs = [cell for one in same for cell in done(one, results)]
        each = [spread([curve(cell, "neg-loss")[-1] for cell in some]) for some in (runs, cells)]
        line = [
            title_of(row),
            seeds(cells),
            said or NOT_MEASURED,
            each[0] or ("not run" if same else NOT_MEASURED),
        ]
        body.append([*line, each[1], spread([curve(cell, "accuracy")[-1] for cell in cells])])
    head = ["row", "seeds", "the paper", "the paper's text, as printed", "ours", "ours: accuracy"]
    yield from table(head, body)


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
        line = [about["paper"], f"{images} of {about['train']:,}", test, about["model"]]
        line.append(" or ".join(map(str, epochs)))
        if line not in [known[1:] for known in body]:  # else only the learning rate differs
            body.append([about["title"], *line])
    head = ["data", "the paper's", "training images", "test images", "model", "local epochs"]
    yield from table(head, body)


def unlisted(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    """Finished runs that no table uses."""
    planned = {cell.name for row in rows for cell in row.cells}
    names = ", ".join(f"`{name}`" for name in sorted(set(results) - planned))
    return (
        f"Runs of earlier plans, which count where FINDINGS.md speaks of all rounds only: {names or 'none'}."
    )


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
        on_cpu = sum(not on_gpu(one) for one in finished)
        elsewhere = f" ({on_cpu} of these runs on a CPU)" if on_cpu else ""
        body.append(
            [
                f"[`{own[0].label}`](tables/{name}.md)",
                own[0].says,
                f"{len(finished)} of {len(names)}",
                text(known["seconds"] / 60, ".1f") + elsewhere if finished else "",
                text(left / 60, ".1f") if left else "",
            ]
        )
    yield "`run.py --only NAME` runs the table whose page is `tables/NAME.md`. Tables share runs. Minutes"
    yield f"are of a whole {H200}, except for runs on a CPU."
    yield ""
    head = ["paper", "what it shows", "runs", "minutes", "minutes left"]
    yield from table(head, body)


def missing(rows: Sequence[Row], results: Mapping[str, Result]) -> Lines:
    """Runs of the plan that were not done."""
    seen: set[str] = set()
    found: dict[tuple[str, str], list[str]] = {}
    minutes: dict[tuple[str, str], float] = {}
    for row in rows:
        left = [cell for cell in row.cells if cell.name not in results and cell.name not in seen]
        seen |= {cell.name for cell in left}
        if left:
            key = row.label, row.dataset
            found.setdefault(key, []).append(f"{row.row or 'all'} ({len(left)} of {len(row.cells)})")
            minutes[key] = minutes.get(key, 0.0) + math.fsum(cost(cell.guess, results) for cell in left) / 60
    if not found:
        yield "Every run of the plan was done."
        yield ""
        return
    yield "Planned and not run. `run.py --data FOLDER --list` measures the minutes on your machine. ResNets"
    yield "need a GPU: these rows train or evaluate hundreds of them and will not be run on a CPU."
    yield ""
    body = [
        [f"`{label}`", datasets()[dataset]["short"], ", ".join(each), text(minutes[label, dataset], ".1f"),
         "GPU only" if "resnet" in datasets()[dataset]["model"] else ""]
        for (label, dataset), each in found.items()
    ]  # fmt: skip
    yield from table(["table", "data", "rows (runs missing)", "minutes on an H200", ""], body)
    yield "Not planned: `tab:error_game` of ISIC and PCam with 9 members, and more seeds at ISIC's printed"
    yield "learning rate, at which models hardly learn. Out of scope: test sets made by a GAN, which the"
    yield "paper suggests where there is no common one, and asynchronous training, its outlook."
    yield ""


def scripts() -> Lines:
    """Every command of the folder, and the first line of its text."""
    body = []
    for file in sorted(Path(__file__).resolve().parent.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if isinstance(tree.body[-1], ast.If):
            body.append([f"`{file.name}`", (ast.get_docstring(tree) or "").splitlines()[0]])
    yield "Commands; each says at its top how it is called:"
    yield ""
    yield from table(["command", "what it does"], body)


def cost(guess: float, results: Mapping[str, Result]) -> float:
    """Seconds a run of that guess takes of an H200, as those before did."""
    ratios = [
        one["seconds"]["total"] / one["jobs"] / one["guess"]
        for one in results.values()
        if one["guess"] and on_gpu(one)
    ]
    return guess * (statistics.median(ratios) if ratios else 1.0)
