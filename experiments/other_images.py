"""Does a score say the same on other test images? One federation, measured on two halves of its test pool.

::

    python experiments/other_images.py [--seeds 12]     # a few minutes on one core

The halves have equally many images of every class and none in common. On each half, every round of the same
training is measured anew: the utility of all coalitions, from which follow alpha and the exact Shapley value,
and PHI. Sums over the rounds go to results/other/other-images.json; halves.py compares them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from onecell import machine  # noqa: E402

from fedmerit import Reports, alpha, config  # noqa: E402
from fedmerit.scoring.ground_truth import shapley  # noqa: E402
from fedmerit.simulation.analysis import Phi  # noqa: E402
from fedmerit.simulation.coalitions import Evaluator  # noqa: E402
from fedmerit.simulation.direction import direction  # noqa: E402
from fedmerit.simulation.run import Rehearsal  # noqa: E402
from fedmerit.simulation.setup import Federation, prepare  # noqa: E402
from fedmerit.simulation.transport import PlainRound  # noqa: E402
from fedmerit.simulation.utilities import resolve_all  # noqa: E402
from fedmerit.storage.run_folder import Folder  # noqa: E402

UTILITIES = {"expected-accuracy": "expected-accuracy", "accuracy": "sharpened-accuracy"}
"""What is measured, and the utility that PHI follows: accuracy has no gradient."""
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"name": "fashion-mini", "test_size": 500},
    "partition": {"clients": 9, "scheme": "dirichlet", "mu": 0.5},
    "model": {"name": "mlp"},
    "training": {"rounds": 10, "local_epochs": 5},
    "secure_aggregation": {"enabled": False},
    "scoring": {"utilities": list(UTILITIES)},
}
OUT = HERE / "results" / "other" / "other-images.json"


def halves(labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of two halves with equally many samples of every class; a sample left over is out.

    >>> one, other = halves(np.array([0, 0, 0, 1, 1]), np.random.default_rng(0))
    >>> len(one), len(other), len(set(one) | set(other))
    (2, 2, 4)
    """
    found: tuple[list[int], list[int]] = [], []
    for label in np.unique(labels):
        places = rng.permutation(np.flatnonzero(labels == label))
        half = len(places) // 2
        for half_, own in zip(found, (places[:half], places[half : 2 * half]), strict=True):
            half_.extend(own.tolist())
    return np.array(sorted(found[0])), np.array(sorted(found[1]))


class Halves:
    """An analysis of plain rounds: every member's scores on each half, summed over the rounds.

    Args:
        federation: its fixed test pool is halved.

    Attributes:
        totals: per utility, half and score, one number a member.
    """

    def __init__(self, federation: Federation) -> None:
        shown = federation.pool.slice(1)
        both = halves(shown.y, np.random.default_rng(federation.seed("halves")))
        self.network = federation.network
        self.images = [(shown.x[half], shown.y[half]) for half in both]
        self.evaluators = [Evaluator(self.network, x, y, federation.utilities) for x, y in self.images]
        zero = np.zeros(len(federation.names))
        names = ("ALPHA sum", "PHI sum", "MR-SV")
        self.totals = {u: [{name: zero.copy() for name in names} for _ in both] for u in UTILITIES}

    def summed(self, plain: PlainRound) -> None:
        """Add one round."""
        updates = np.stack([plain.update(name) for name in plain.outcome.included])
        for k, ((x, y), evaluator) in enumerate(zip(self.images, self.evaluators, strict=True)):
            tables, _ = evaluator.tables(plain.m0, updates, plain.weights, clients=plain.outcome.included)
            for utility, smooth in UTILITIES.items():
                total, table = self.totals[utility][k], tables[utility]
                total["ALPHA sum"] += alpha(Reports.from_table(table)).raw
                total["MR-SV"] += shapley(table).values
                way = direction(
                    self.network, plain.m0, plain.outcome.model, x, y, resolve_all([smooth])[0], blocks=1
                )
                total["PHI sum"] += way.products(updates)[0]


def measured(seed: int) -> dict[str, list[dict[str, list[float]]]]:
    """Return the totals of one run, per utility and half."""
    made = config.from_dict({**SETTINGS, "run": {"seed": seed}})
    federation = prepare(made)
    analysis = Halves(federation)
    with tempfile.TemporaryDirectory() as folder, Folder(Path(folder) / "run", made) as run:
        Rehearsal(made, run, federation=federation, phi=Phi(federation, ()), analyses=[analysis]).run()
    return {
        utility: [
            {name: [float(f"{v:.9g}") for v in values] for name, values in half.items()} for half in both
        ]
        for utility, both in analysis.totals.items()
    }


def main() -> None:
    """Run every seed and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, runs = time.perf_counter(), []
    for seed in range(options.seeds):
        runs.append({"seed": seed, "utilities": measured(seed)})
        print(f"seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)
    found = {
        "settings": SETTINGS,
        "images in a half": SETTINGS["data"]["test_size"] // 2,
        "runs": runs,
        "seconds": round(time.perf_counter() - began),
        "machine": machine(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
