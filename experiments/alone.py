"""Why ISIC needs a smaller learning rate: what one member's ResNet-50 learns from a ninth of the images.

::

    python experiments/alone.py --data FOLDER      # 5 minutes on a CPU; writes results/other/isic-alone.json

A model that has learned nothing but how frequent the classes are has the entropy of the labels as its
cross-entropy on the training images.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import numpy as np  # noqa: E402
from cells import write_json  # noqa: E402
from compact import load  # noqa: E402
from onecell import machine  # noqa: E402

from fedmerit.simulation.models import ResNet, seeded  # noqa: E402
from fedmerit.simulation.training import TrainingSettings, train  # noqa: E402
from fedmerit.simulation.utilities import evaluate, resolve_all  # noqa: E402

IMAGES = 333
ROUNDS = 3
WAYS = (("group", 64, 0.001), ("group", 64, 0.0001), ("batch", 16, 0.001))
OUT = HERE / "results" / "other" / "isic-alone.json"


def main() -> None:
    """Train the same images in every way, and keep the cross-entropy after each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="folder of the compact datasets")
    found, _ = load(parser.parse_args().data, "isic2019_ham", None)
    chosen = np.random.default_rng(0).permutation(len(found.y_train))[:IMAGES]
    x, y = found.x_train[chosen], found.y_train[chosen]
    frequency = np.bincount(y, minlength=len(found.classes)) / len(y)
    frequency = frequency[frequency > 0]
    result = {
        "images": IMAGES,
        "rounds of 3 epochs": ROUNDS,
        "entropy of the labels": float(-(frequency * np.log(frequency)).sum()),
        "cross-entropy": {},
        "machine": machine(),
    }
    for norm, batch, lr in WAYS:
        began = time.perf_counter()
        losses = course(x, y, len(found.classes), norm, batch, lr)
        way = f"{norm} normalisation, batches of {batch}, learning rate {lr:g}"
        result["cross-entropy"][way] = losses
        print(
            f"{way}: {losses[-1]:.3f} after {ROUNDS} rounds, {time.perf_counter() - began:.0f} s", flush=True
        )
    write_json(OUT, result)


def course(
    x: np.ndarray, y: np.ndarray, classes: int, norm: str, batch: int, lr: float, rounds: int = ROUNDS
) -> list[float]:
    """The cross-entropy on the training images after each round of 3 epochs."""
    with seeded(0):
        network = ResNet((3, 4, 6, 3), x.shape[3], classes, norm=norm, bottleneck=True)
    settings, losses = TrainingSettings(local_epochs=3, batch_size=batch, lr=lr), []
    loss = resolve_all(["neg-loss"])
    for number in range(rounds):
        train(network, x, y, settings, seed=number)
        losses.append(-float(np.mean(evaluate(network, x, y, loss)["neg-loss"])))
    return losses


if __name__ == "__main__":
    main()
