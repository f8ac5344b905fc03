"""Results -> README.md, tables/*.md, FINDINGS.md and figures/*.csv: all numbers, ours and the paper's.

::

    python experiments/tables.py [--results FOLDER] [--into FOLDER] [--toy] [--check]

No number is typed by hand: ours come from the cells in ``results``, the paper's from ``paper.json``.
figures.py draws the figures from their CSV files.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import numpy as np  # noqa: E402
from alarms import alarms_section  # noqa: E402
from cells import RESULTS, Result, Row, datasets, plan, read_results, subset_of  # noqa: E402
from coverage import coverage_section  # noqa: E402
from findings import findings  # noqa: E402
from grid import mean, text  # noqa: E402
from judges import panel_section  # noqa: E402
from measures import ENOUGH, EXPLAINED, SCORES, facts, is_thin, on_gpu  # noqa: E402
from other_images import other_images_section  # noqa: E402
from overview import (  # noqa: E402
    commands,
    cost,
    data_lines,
    four_columns,
    missing,
    other_columns,
    scripts,
    unlisted,
)
from protocols import COMMIT, PROTOCOLS, SCRIPTS  # noqa: E402
from retrained import phi_game_section  # noqa: E402
from rules import rules_section  # noqa: E402
from sections import SECTIONS as OF_THE_PAPER  # noqa: E402
from sections import Lines, agreement_section, axioms_section, done, table  # noqa: E402
from takings import cheat_section, flip_section  # noqa: E402
from tidy import FIGURES, csv_text  # noqa: E402

HEAD = """# The paper's experiments, again

The tables and figures of "Beyond Leave-One-Out", run again with fedmerit on **subsets and stand-ins**:
re-encoded images (CIFAR-10 at 32 pixels, Brain-MRI at 128, lung at 96, ISIC at 64), subsets of most data,
the HAM10000 part of ISIC 2019, LC25000 lung tissue in the place of PCam (another experiment, not a
replication), and ResNets with GroupNorm from scratch where the authors' have BatchNorm and were pretrained.
[FINDINGS.md](FINDINGS.md) begins with a verdict on every claim of the paper.

    python experiments/prepare.py cifar10 DOWNLOAD FOLDER                  # original download -> data folder
    python experiments/run.py --data FOLDER --out DIR --budget-minutes 9   # what fits, and what is left
    python experiments/run.py --data FOLDER --out DIR --fresh --dataset cifar10 --row 10  # again
    python experiments/merge.py DIR/cells.jsonl                            # into experiments/results
    python experiments/tables.py                                           # this file, tables/, FINDINGS.md
    python experiments/figures.py                                          # figures/*.png and *.pdf

`tables.py` needs no training: it reads `results` (one JSON file per run: all reports of all rounds and
utilities, the ground truth, seconds, versions), `paper.json` (the paper's numbers by LaTeX label) and
`plan.toml` (the runs).

## Four columns

{columns}
The last three columns are computed from the same runs of ours. So of the scripts' choices the network,
Adam's state and weights by samples are not reproduced; the game is the renormalised one in `tab:error_game`,
`tab:attack` and rows that say so, and the additive one elsewhere; and COS is of models in the
renormalised-game rows of `tab:error`, whose runs all kept it, and of updates elsewhere. Numbers are means ±
standard deviations over seeds (the paper states what it calls the variance). Rows with fewer than {enough}
seeds are "thin": only the pages of the tables show them, and no sentence rests on them.
"""

COLUMNS = (
    ("what", "as printed", "its published [scripts](https://github.com/{scripts}), commit {commit}",
     "to the letter", "fedmerit"),
    ("utility", "not named", "accuracy", "accuracy", "expected accuracy"),
    ("v of nobody's coalition", "v(M0)", "0", "v(M0)", "v(M0)"),
    ("score", *["of the 10th round"] * 3, "summed over the rounds; FP and EE as alpha"),
    ("truth", "MR-SV over the rounds", "Shapley value of the same round", *["MR-SV over the rounds"] * 2),
    ("normalised", "less the minimum, by the mean", "less the minimum if negative, by the mean",
     *["as printed"] * 2),
    ("L2", "not said to be squared", "squared", *["squared, for comparison"] * 2),
    ("game", "additive; Song et al. cited", "renormalised, weighted by samples", "additive", "additive"),
    ("COS", "of models, in words of gradients", *["of models, summed"] * 2, "of updates, summed"),
    ("ResNets", "not said", "pretrained, BatchNorm", *["from scratch, GroupNorm"] * 2),
    ("Adam", "not said", "keeps its state over rounds", *["reset each round"] * 2),
)  # fmt: skip
"""What differs between the four columns."""

SECTIONS = {**OF_THE_PAPER, "tab-cheat": cheat_section, "tab-flip": flip_section}
SECTIONS |= {"other-images": other_images_section, "tab-phi-game": phi_game_section}

TOY = "Runs at toy size, not on the data that the headings name: they only show that everything works.\n\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all texts, or check that they are up to date."""
    options = parse(arguments)
    rows = plan(toy=options.toy, subsets=dict(options.subset))
    wrong = 0
    for name, made in documents(rows, read_results([options.results]), toy=options.toy).items():
        file = options.into / name
        if options.check:
            if not file.exists() or file.read_text(encoding="utf-8") != made:
                print(f"{file}: differs from the results")
                wrong += 1
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(made, encoding="utf-8")
        print(f"{file}: {len(made.splitlines())} lines")
    if options.check and not wrong:
        print(f"{options.into}: up to date")
    return 1 if wrong else 0


def documents(rows: Sequence[Row], results: Mapping[str, Result], *, toy: bool = False) -> dict[str, str]:
    """Every text by its path."""
    paper = json.loads((HERE / "paper.json").read_text(encoding="utf-8"))
    made = {"README.md": readme(rows, results, paper, toy=toy)}
    for name in dict.fromkeys(row.experiment for row in rows):
        own = [row for row in rows if row.experiment == name]
        lines = [
            f"{TOY if toy else ''}# {own[0].label}: {own[0].says}",
            "",
            f"`python experiments/run.py --data FOLDER --out DIR --only {name}`",
            "",
        ]
        lines += list(about(own, results))
        lines += list(SECTIONS.get(name, agreement_section)(own, results, paper))
        lines += ["What the [scores](scores.md) are."]
        made[f"tables/{name}.md"] = "\n".join(lines) + "\n"
    made["tables/scores.md"] = "\n".join(glossary())
    made["tables/rules.md"] = "\n".join(rules_section(rows, results)) + "\n"
    made["tables/alarms.md"] = "\n".join(alarms_section(results)) + "\n"
    made["tables/tab-coalitions.md"] = "\n".join(axioms_section()) + "\n"
    for name, make in FIGURES.items():
        if lines_ := make(rows, results, paper):
            made[f"figures/{name}.csv"] = csv_text(lines_)
    if not toy:
        made["tables/panel.md"] = "\n".join(panel_section()) + "\n"
        made["tables/coverage.md"] = "\n".join(coverage_section(rows, results)) + "\n"
        made |= findings(rows, results, paper)
    return made


def readme(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, object], *, toy: bool
) -> str:
    """The first page."""
    known = {"scripts": SCRIPTS, "commit": COMMIT}
    body = [[cell.format(**known) for cell in line] for line in COLUMNS]
    columns = "\n".join(table(["", "the paper", *PROTOCOLS], body))
    head = HEAD.format(enough=ENOUGH, columns=columns)
    lines = [TOY + head if toy else head]
    lines += ["### Agreement with the Shapley value", "", *four_columns(rows, results, paper)]
    lines += [
        "Here members are 6 unless a row says otherwise; the paper has 9. EE has FP's ranking unless a sign"
    ]
    lines += ["turns. EE, COS, L2, Pearson and Kendall are in the pages of the tables (below).", ""]
    lines += other_columns(rows, results, paper)
    shown = {"fig-perf": "fig:perf_cifar_isic", "fig-misbeh": "fig:misbeh_cifar_isic"}
    shown |= {"fig-illustrate": "fig:illustrate", "retrained": "the retrained Shapley value"}
    lines += ["## Figures", "", *(f"![{title}](figures/{name}.png)\n" for name, title in shown.items())]
    lines += ["## The data", "", *data_lines(rows, results), settings_used(results), ""]
    lines += ["## What was run", "", *commands(rows, results), OTHER_PAGES, ""]
    lines += ["## What was not run", "", *missing(rows, results), unlisted(rows, results), ""]
    lines += ["## The scripts", "", *scripts()]
    return "\n".join(lines) + "\n"


OTHER_PAGES = """Without a run: [tab:coalitions](tables/tab-coalitions.md), what the tables'
[scores](tables/scores.md) are, how sure [they](tables/coverage.md) and [shares](tables/share-coverage.md)
are, what each [rule](tables/rules.md) pays, how often honest runs are [refused](tables/alarms.md), all tests
of the [retraining game](tables/retrained.md), everything about the [panel](tables/panel.md)."""


def settings_used(results: Mapping[str, Result]) -> str:
    """What all runs have in common."""
    old = sum(on_gpu(one) and not one.get("tf32") for one in results.values())
    looked = [one["coalitions"] for one in results.values() if one["coalitions"].get("methods")]
    deviation = text(max((one["largest_deviation"] for one in looked), default=0.0), ".0e")
    return f"""Every seed draws its own training subset, partition, test pool and first model. Batch 64,
weights 1/N, inputs in [-1, 1]; secure aggregation is off (the same integers are summed without masks). On
the GPU, training is in TF32, but for the first {old} runs. Coalitions are evaluated in the fastest precision
that stays within one test image of float32 on a sample of them (largest deviation {deviation}). A label
flipper replaces class y by C - 1 - y."""


def glossary() -> Lines:
    """What the scores are."""
    yield "# The scores of the tables"
    yield ""
    yield from table(["score", "what it is"], [[name, EXPLAINED[name]] for name in SCORES])


def about(rows: Sequence[Row], results: Mapping[str, Result]) -> Lines:
    """Which data, how many seeds, or that nothing was run yet."""
    known = datasets()
    for row in rows:
        cells, what = done(row, results), f"{row.row}: " if row.row else ""
        left = [cell for cell in row.cells if cell.name not in results]
        price = f"about {text(math.fsum(cost(cell.guess, results) for cell in left) / 60, '.1f')} minutes"
        if not cells:
            yield f"- {what}{known[row.dataset]['title']}: not run yet ({len(left)} runs, {price})"
            continue
        found = facts(cells)
        images, test = ("/".join(f"{n:,}" for n in found[key]) for key in ("images", "test"))
        yield (
            f"- {what}{known[row.dataset]['title']}: {images} of "
            f"{known[row.dataset]['train']:,} training images, {test} test images ({pool(cells)}), "
            f"{found['seeds']} of {len(row.cells)} seeds{', thin' if is_thin(cells) else ''}"
            f"{f'; the others {price}' if left else ''}{sampled(cells)}"
        )
    yield ""


def pool(cells: Sequence[Result]) -> str:
    """How test images were chosen."""
    return "class-balanced" if cells[0]["settings"]["data"]["test_size"] else "the whole test set"


def sampled(cells: Sequence[Result]) -> str:
    """Where MR-SV is sampled: from how many coalitions, and how large its error is."""
    errors, spreads = [], []
    for cell in cells:
        if error := cell.get("sampling_error", {}).get("expected-accuracy"):
            errors.append(mean(error))
            spreads.append(np.std(cell["utilities"]["expected-accuracy"]["truth"]["MR-SV"]))
    if not errors:
        return ""
    budget = cells[0]["settings"]["experiment"]["sampled"]
    share = text(mean(errors) / mean(spreads), ".0%")
    return (
        f"; MR-SV sampled from {budget} coalitions a round: its standard error is on average {share} of "
        "the spread between members (expected accuracy)"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--into", type=Path, default=HERE, help="where the texts go")
    parser.add_argument("--toy", action="store_true", help="of runs at toy size")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--subset", type=subset_of, action="append", default=[], metavar="DATASET=COUNT")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
