"""Does a score say the same on other test images? One federation, measured on two halves of its test pool.

::

    python experiments/other_images.py [--seeds 12]     # a few minutes on one core

The halves have equally many images of every class and none in common. On each half, every round of the same
training is measured anew: the utility of all coalitions, from which follow alpha and the exact Shapley value,
and PHI (`analyses.Halves`). Sums over the rounds go to results/other/other-images.json. Runs of the plan with
``experiment.halves`` hold the same of larger networks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import numpy as np  # noqa: E402
from cells import RESULTS, Result, Row, datasets, write_json  # noqa: E402
from evidence import CHANCE, MARGIN, PAIR, TITLES, Claims, Evidence, Facts, agree  # noqa: E402
from grid import mean, settled, text  # noqa: E402
from measures import seeds, spread  # noqa: E402
from retrained import bounds, standard_error, student  # noqa: E402
from sections import Lines, done, table  # noqa: E402

RAW = RESULTS / "other" / "other-images.json"
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"name": "fashion-mini", "test_size": 500},
    "partition": {"clients": 9, "scheme": "dirichlet", "mu": 0.5},
    "model": {"name": "mlp"},
    "training": {"rounds": 10, "local_epochs": 5},
    "secure_aggregation": {"enabled": False},
    "scoring": {"utilities": list(PAIR)},
}
Run = Mapping[str, Any]
NAMES = {"ALPHA sum": "alpha summed", "PHI sum": "PHI summed", "MR-SV": "MR-SV"}
CLOSE = 0.03
"""A smaller difference of two mean Spearmans is none that we would act on."""


def near(runs: Sequence[Run], score: str, utility: str, against: str, *, other: bool) -> list[float]:
    """Per run, the Spearman of a score with MR-SV of ``against`` on the same or the other half, mean of both.

    >>> half = {"ALPHA sum": [1, 2, 3], "MR-SV": [1, 3, 2]}
    >>> run = {"utilities": {"accuracy": [half, {"ALPHA sum": [1, 2, 3], "MR-SV": [3, 2, 1]}]}}
    >>> near([run], "ALPHA sum", "accuracy", "accuracy", other=False)
    [-0.25]
    """
    found = []
    for run in runs:
        scored, true = run["utilities"][utility], run["utilities"][against]
        pairs = [agree(scored[k][score], true[1 - k if other else k]["MR-SV"]) for k in (0, 1)]
        found.append(mean(pairs))
    return found


def compared(runs: Sequence[Run]) -> dict[tuple[str, str, str], list[list[float]]]:
    """By score, its utility and that of MR-SV: the Spearmans on the same half and on the other one."""
    cases = [(score, utility, utility) for utility in PAIR for score in NAMES]
    cases.append(("ALPHA sum", *PAIR))
    return {case: [near(runs, *case, other=other) for other in (False, True)] for case in cases}


def rows(found: Mapping[tuple[str, str, str], list[list[float]]]) -> list[list[str]]:
    """The lines of a table: both Spearmans, and how far behind MR-SV's own the second is."""
    body = []
    for (score, utility, against), (same, other) in found.items():
        behind = np.subtract(other, found["MR-SV", against, against][1])
        step = text(mean(behind.tolist()), "+.3f")
        if len(behind) > 1:
            step += f" ± {text(standard_error(behind), '.3f')}"
        title = (
            TITLES[against] if utility == against else f"{TITLES[against]}; the score's: {TITLES[utility]}"
        )
        own = score == "MR-SV"
        body.append([NAMES[score], title, "" if own else spread(same), spread(other), "" if own else step])
    return body


HEAD = ("score", "utility", "MR-SV on the same images", "MR-SV on other images", "ahead of MR-SV's own")


def other_images(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """How well scores carry over to other test images, beside how well MR-SV does."""
    raw = json.loads(RAW.read_text(encoding="utf-8"))
    found = compared(raw["runs"])
    sizes = [cell["test_images"] for cell in evidence.results.values()]
    expected, right = PAIR
    facts |= {
        "halves runs": str(len(raw["runs"])),
        "halves images": str(raw["images in a half"]),
        "halves larger": f"{min(sizes):,} to {max(sizes):,}",
        "halves crossed": text(mean(found["ALPHA sum", expected, right][1]), ".2f"),
    }
    for name, utility in (("expected", expected), ("accuracy", right)):
        same, other = (text(mean(one), ".2f") for one in found["ALPHA sum", utility, utility])
        facts |= {f"halves alpha {name} same": same, f"halves alpha {name}": other}

    def behind(score: str, utility: str) -> np.ndarray:
        return np.subtract(found[score, utility, utility][1], found["MR-SV", utility, utility][1])

    facts["halves own expected"], facts["halves own accuracy"] = (
        text(mean(found["MR-SV", utility, utility][1]), ".2f") for utility in PAIR
    )
    claims["other images agree less"] = all(
        mean(same) > mean(other) for (_, own, of), (same, other) in found.items() if own == of
    )
    claims["for the expected accuracy alpha and PHI carry over to other images as MR-SV does"] = all(
        abs(mean(steps.tolist())) < CLOSE and -MARGIN < bounds(steps)[0] < bounds(steps)[1] < MARGIN
        for steps in (behind(score, expected) for score in ("ALPHA sum", "PHI sum"))
    )
    claims["for accuracy alpha and PHI are not behind MR-SV on other images beyond chance"] = all(
        student(behind(score, right)) > CHANCE for score in ("ALPHA sum", "PHI sum")
    )
    claims["on other images too alpha of the expected accuracy is no stand-in for accuracy's"] = mean(
        found["ALPHA sum", expected, right][1]
    ) < mean(found["ALPHA sum", right, right][1])
    _larger(evidence, facts, claims)


def _larger(evidence: Evidence, facts: Facts, claims: Claims) -> None:
    """The same of the larger networks, for the expected accuracy."""
    told, behind = [], []
    for name, _, _, runs in list(groups(evidence.rows, evidence.results))[1:]:
        found = compared(runs)
        other = {score: mean(found[score, PAIR[0], PAIR[0]][1]) for score in NAMES}
        shown = ", ".join(f"{NAMES[score]} {text(value, '.2f')}" for score, value in other.items())
        told.append(f"{name} ({len(runs)} runs): {shown}")
        behind.append(other["ALPHA sum"] - other["MR-SV"])
    facts["halves of larger networks"] = "; ".join(told)
    claims["larger networks too carry over as MR-SV does by alpha"] = all(abs(one) < CLOSE for one in behind)


def groups(rows_: Sequence[Row], results: Mapping[str, Result]) -> Iterator[tuple[str, str, int, list[Run]]]:
    """By data: what they are, seeds, images in a half, and the runs; first those of this script."""
    raw = json.loads(RAW.read_text(encoding="utf-8"))
    yield "Fashion-MNIST, an MLP", str(len(raw["runs"])), raw["images in a half"], raw["runs"]
    for row in rows_:
        if row.experiment == "other-images" and (cells := done(row, results)):
            told = [cell for cell in cells if differs(cell["halves"])]
            runs = [{"seed": cell["seed"], "utilities": cell["halves"]} for cell in told]
            if runs:
                yield datasets()[row.dataset]["short"], seeds(told), cells[0]["test_images"] // 2, runs


def differs(halves: Mapping[str, Any]) -> bool:
    """Whether members differ by every score on every half: a constant has no Spearman."""
    every = (values for both in halves.values() for half in both for values in half.values())
    return all(len(np.unique(settled(values))) > 1 for values in every)


def lines_by_data(rows_: Sequence[Row], results: Mapping[str, Result]) -> Lines:
    """One table of all data."""
    body = [
        [data, count, str(half), *line]
        for data, count, half, runs in groups(rows_, results)
        for line in rows(compared(runs))
    ]
    yield from table(["data", "seeds", "images in a half", *HEAD], body)


def other_images_section(
    rows_: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]
) -> Lines:
    """The table, and every run of Fashion-MNIST."""
    raw = json.loads(RAW.read_text(encoding="utf-8"))
    found = compared(raw["runs"])
    yield "- Fashion-MNIST (fashion-mini, an MLP, another experiment): `python experiments/other_images.py`,"
    yield f"  {text(raw['seconds'] / 60, '.0f')} minutes on one core of a busy machine"
    yield ""
    yield "The test pool is cut into two halves of equal classes. The table shows the Spearman of a score on"
    yield "one half with MR-SV, the mean of both directions; mean ± standard deviation over the seeds, in the"
    yield "last column ± standard error. PHI of accuracy is that of sharpened accuracy."
    yield ""
    yield from lines_by_data(rows_, results)
    yield "Fashion-MNIST run by run, on the same / on other images:"
    yield ""
    titles = [
        f"{NAMES[score]}, {TITLES[against]}{'' if utility == against else ' (the score: expected accuracy)'}"
        for score, utility, against in found
    ]
    body = [
        [
            str(run["seed"]),
            *(f"{text(same[k], '.2f')} / {text(other[k], '.2f')}" for same, other in found.values()),
        ]
        for k, run in enumerate(raw["runs"])
    ]
    yield from table(["seed", *titles], body)


def measured(seed: int) -> dict[str, list[dict[str, list[float]]]]:
    """Return the totals of one run, per utility and half."""
    import torch
    from analyses import Halves

    from fedmerit import config
    from fedmerit.simulation.run import Rehearsal
    from fedmerit.simulation.setup import prepare
    from fedmerit.storage.run_folder import Folder

    torch.set_num_threads(1)
    made = config.from_dict({**SETTINGS, "run": {"seed": seed}})
    federation = prepare(made)
    analysis = Halves(federation)
    with tempfile.TemporaryDirectory() as folder, Folder(Path(folder) / "run", made) as run:
        Rehearsal(made, run, federation=federation, analyses=[analysis]).run()
    return analysis.kept()


def main() -> None:
    """Run every seed and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RAW)
    options = parser.parse_args()
    from onecell import machine

    began, runs = time.perf_counter(), []
    for seed in range(options.seeds):
        runs.append({"seed": seed, "utilities": measured(seed)})
        print(f"seed {seed}: {text(time.perf_counter() - began, '.0f')} s", flush=True)
    found = {
        "settings": SETTINGS,
        "images in a half": SETTINGS["data"]["test_size"] // 2,
        "runs": runs,
        "seconds": round(time.perf_counter() - began),
        "machine": machine(),
    }
    write_json(options.out, found)


if __name__ == "__main__":
    main()
