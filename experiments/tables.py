"""Results -> experiments/README.md: per table of the paper its command, its cost, its numbers and ours.

::

    python experiments/tables.py [--results FOLDER] [--out FILE] [--toy] [--check]

No number is typed by hand: ours come from the cells in ``results``, the paper's from ``paper.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from cells import RESULTS, Result, Row, datasets, plan, read_results, subset_of  # noqa: E402
from measures import EXPLAINED, SCORES, facts  # noqa: E402
from sections import SECTIONS, Lines, agreement_section, done, table  # noqa: E402

HEAD = """# The paper's experiments

This file is made by `experiments/tables.py` from the raw results in `experiments/results` (one JSON a run:
all reports of all rounds for all utilities, the ground truth, seconds, versions) and
`experiments/paper.json` (the paper's numbers, by LaTeX label). Runs are described in `plan.toml`.

    python experiments/run.py --data FOLDER --out DIR --budget-minutes 9   # what fits, and what is left
    python experiments/merge.py DIR/cells.jsonl                            # into experiments/results
    python experiments/tables.py                                           # this file

Ours are means ± standard deviations over seeds; "(1)" marks a single seed. Every seed draws its own training
subset, partition, test pool and first model. Unless said otherwise: Adam reset each round, 5 local epochs,
batch 64, weights 1/N, inputs in [-1, 1], a class-balanced test pool, the additive game. Secure aggregation is
off, which sums the same integers without masks.
"""


TOY = "Runs at toy size, on other data than the headings name: they only show that everything works.\n\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the README, or check that it is up to date."""
    options = parse(arguments)
    text = TOY if options.toy else ""
    text += readme(plan(toy=options.toy, subsets=dict(options.subset)), read_results([options.results]))
    if options.check:
        same = options.out.exists() and options.out.read_text(encoding="utf-8") == text
        print(f"{options.out}: {'up to date' if same else 'differs from the results'}")
        return 0 if same else 1
    options.out.write_text(text, encoding="utf-8")
    print(f"{options.out}: {len(text.splitlines())} lines")
    return 0


def readme(rows: Sequence[Row], results: Mapping[str, Result]) -> str:
    """The whole file."""
    paper = json.loads((HERE / "paper.json").read_text(encoding="utf-8"))
    lines = [HEAD, *overview(rows, results), *glossary()]
    for name in dict.fromkeys(row.experiment for row in rows):
        own = [row for row in rows if row.experiment == name]
        lines += ["", f"## {own[0].label}: {own[0].says}", ""]
        lines += list(about(own, results))
        lines += list(SECTIONS.get(name, agreement_section)(own, results, paper))
    return "\n".join(lines) + "\n"


def overview(rows: Sequence[Row], results: Mapping[str, Result]) -> Lines:
    """One line a table: what it costs, and how far it is."""
    body = []
    for name in dict.fromkeys(row.experiment for row in rows):
        own = [row for row in rows if row.experiment == name]
        names = dict.fromkeys(cell.name for row in own for cell in row.cells)
        finished = [results[one] for one in names if one in results]
        known = facts(finished)
        body.append(
            [
                f"`{own[0].label}`",
                f"`run.py --only {name}`",
                f"{len(finished)} of {len(names)}",
                f"{known['seconds'] / 60:.1f}" if finished else "",
                ", ".join(known["devices"]),
            ]
        )
    yield "## What was run"
    yield ""
    yield "Runs are shared between tables, so minutes do not add up; they are of the runs done so far."
    yield ""
    yield from table(["paper", "command", "runs", "minutes", "machine"], body)


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
        missing = [cell for cell in row.cells if cell.name not in results]
        cost = f"about {sum(cell.guess for cell in missing) / 60:.1f} minutes"
        if not cells:
            yield f"- {what}{known[row.dataset]['title']}: not run yet ({len(missing)} runs, {cost})"
            continue
        found = facts(cells)
        images, test = ("/".join(f"{n:,}" for n in found[key]) for key in ("images", "test"))
        yield (
            f"- {what}{'; '.join(found['titles'])}: {images} of "
            f"{known[row.dataset]['train']:,} training images, {test} test images, "
            f"{found['seeds']} of {len(row.cells)} seeds{f'; the others {cost}' if missing else ''}"
        )
    yield ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=HERE / "README.md")
    parser.add_argument("--toy", action="store_true", help="of runs at toy size")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--subset", type=subset_of, action="append", default=[], metavar="DATASET=COUNT")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
