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
from measures import ENOUGH, EXPLAINED, SCORES, facts, is_thin, on_gpu  # noqa: E402
from other_images import lines_by_data, other_images_section  # noqa: E402
from overview import (  # noqa: E402
    agreement_lines,
    commands,
    cost,
    data_lines,
    detection_lines,
    missing,
    other_lines,
    scripts,
    unlisted,
)
from retrained import phi_game_section  # noqa: E402
from rules import rules_section  # noqa: E402
from sections import SECTIONS as OF_THE_PAPER  # noqa: E402
from sections import Lines, agreement_section, axioms_section, done, table  # noqa: E402
from takings import cheat_section, flip_section  # noqa: E402
from tidy import FIGURES, csv_text  # noqa: E402

HEAD = """# The paper's experiments

We ran the paper's tables and figures again with fedmerit's engine, on real data. [What was not
run](#what-was-not-run) lists the exceptions, and [FINDINGS.md](FINDINGS.md) says what the results show.

`experiments/tables.py` makes this file from the raw results in `experiments/results` (one JSON file per run:
all reports of all rounds for all utilities, the ground truth, seconds, versions) and from
`experiments/paper.json` (the paper's numbers, by LaTeX label). `plan.toml` describes the runs.

    python experiments/run.py --data FOLDER --out DIR --budget-minutes 9   # what fits, and what is left
    python experiments/merge.py DIR/cells.jsonl                            # into experiments/results
    python experiments/tables.py                                           # this file, tables/, FINDINGS.md
    python experiments/figures.py                                          # figures/*.png and *.pdf

Our numbers are means ± standard deviations over seeds. A row with fewer than {enough} seeds is marked "thin",
and its numbers with "(1)" or "(2)": no sentence here or in FINDINGS.md rests on it. Every seed draws its own
training subset, partition, test pool and first model. Unless a table says otherwise:

- Adam is reset each round; 5 local epochs (ISIC: 3), batch 64, weights 1/N, inputs in [-1, 1], a
  class-balanced test pool, the additive game.
- On the GPU, training is in TF32, except for the first {old} runs, which were in float32.
- Secure aggregation is off: the same integers are summed without masks.
- Coalitions are evaluated in the fastest precision that stays within one test image of float32 on a sample of
  them (runs by precision: {precisions}; largest deviation of a utility in that sample {deviation}).

`engine.py` adds what analysis needs: the other game, exact Shapley values of rounds, the paper's weights.

Other differences from the paper:

- **Images.** All are re-encoded and, except for CIFAR-10, smaller. Most runs use a subset.
- **PCam** is not here. LC25000 lung tissue stands in its place, with all three classes, and with two
  (adenocarcinoma against benign), which is a task of PCam's kind. Another organ, and far fewer images: this
  is another experiment, not a replication. The paper's numbers for PCam stand beside it for orientation.
- **Networks.** ResNets have group normalisation and no pretrained weights. The batch size is our choice; the
  paper names none.
- **"±".** The paper states what it calls the variance over 10 runs. We state the standard deviation.
- **MR-SV.** The paper refers to Algorithm 2 of Song et al. (2019), who renormalise a coalition's weights.
  Its own scores are of the models M0 + U_i and M - U_i, which are not renormalised. It does not say of which
  game its MR-SV is. Here it is of the additive one, as the scores are, unless a row says "renormalised".
- **COS.** The paper's formula is the cosine of two models, nearly the same for all members in its
  `fig:illustrate`; its text speaks of gradients. Ours, in the same line of a table, is the cosine of updates,
  summed over the rounds.
- **Utility.** The paper does not name the utility behind its tables and its detection rates, and draws the
  negative loss in one figure. We give accuracy and expected accuracy here, and every utility in the tables.

A label flipper replaces class y by class C - 1 - y, with C classes.
"""

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
        lines += ["Scores are explained in [README](../README.md#scores)."]
        made[f"tables/{name}.md"] = "\n".join(lines) + "\n"
    made["tables/rules.md"] = "\n".join(rules_section(results)) + "\n"
    made["tables/alarms.md"] = "\n".join(alarms_section(results)) + "\n"
    made["tables/tab-coalitions.md"] = "\n".join(axioms_section()) + "\n"
    for name, make in FIGURES.items():
        if lines_ := make(rows, results, paper):
            made[f"figures/{name}.csv"] = csv_text(lines_)
    if not toy:
        made["tables/coverage.md"] = "\n".join(coverage_section(rows, results)) + "\n"
        made |= findings(rows, results, paper)
    return made


def readme(
    rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, object], *, toy: bool
) -> str:
    """The first page."""
    old = sum(on_gpu(one) and not one.get("tf32") for one in results.values())
    looked = [one["coalitions"] for one in results.values() if one["coalitions"].get("methods")]
    names = ("float32", "tf32", "float16", "bfloat16")
    used = [{word for method in one["methods"] for word in method.replace(",", "").split()} for one in looked]
    counts = {name: sum(name in words for words in used) for name in names}
    precisions = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    deviation = max((one["largest_deviation"] for one in looked), default=0.0)
    head = HEAD.format(enough=ENOUGH, old=old, precisions=precisions, deviation=text(deviation, ".0e"))
    lines = [TOY + head if toy else head]
    lines += ["## The data", "", *data_lines(rows, results)]
    lines += ["## What was run", "", *commands(rows, results)]
    lines += ["`tab:coalitions` needs no run: see [tables/tab-coalitions.md](tables/tab-coalitions.md).", ""]
    lines += [
        "How sure scores are, by simulation: [tables/coverage.md](tables/coverage.md), and shares of money:"
    ]
    lines += ["[tables/share-coverage.md](tables/share-coverage.md). What each rule pays:"]
    lines += ["[tables/rules.md](tables/rules.md). How often honest runs are refused:"]
    lines += ["[tables/alarms.md](tables/alarms.md). All tests of the retraining game:"]
    lines += ["[tables/retrained.md](tables/retrained.md).", ""]
    lines += ["## Agreement: the paper's number and ours", "", *agreement_lines(rows, results, paper)]
    lines += ["## Agreement on the same and on other test images", ""]
    lines += [
        "All of the above is agreement with a truth of the *same* test images. Here the test pool is cut",
        "into two halves: see [tables/other-images.md](tables/other-images.md).",
        "",
    ]
    lines += lines_by_data(rows, results)
    lines += ["## Detection, weights, cheats, influence", "", *detection_lines(rows, results, paper)]
    lines += other_lines(rows, results, paper)
    lines += ["## Figures", "", "In the paper's layout, with its own numbers beside ours:", ""]
    shown = {"fig-perf": "fig:perf_cifar_isic", "fig-misbeh": "fig:misbeh_cifar_isic"}
    shown |= {"fig-illustrate": "fig:illustrate", "retrained": "the retrained Shapley value"}
    lines += [f"![{title}](figures/{name}.png)\n" for name, title in shown.items()]
    lines += ["## What was not run", "", *missing(rows, results)]
    lines += list(unlisted(rows, results))
    lines += ["## The scripts", "", *scripts()]
    lines += list(glossary())
    return "\n".join(lines) + "\n"


def glossary() -> Lines:
    """What the scores are."""
    yield "## Scores"
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
