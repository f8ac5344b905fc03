"""What do scoring and secure aggregation add to a plain round of federated averaging?

The same rehearsal, the paper's CNN on images of CIFAR-10's shape (random pixels: time does not depend on
them), 9 members, 5 local epochs, 2,000 test images. Three runs in one process: plain (sum without masks, v(M)
evaluated, nobody reports), with masks, with masks and scores. Training time grows in proportion to the
training images, which is measured at two sizes; the other costs do not depend on them. So the ratio at 50,000
images is extrapolated, and said to be.

    python benchmarks/round.py [--images 1800] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from machine import machine

from fedmerit.config import Config, from_dict
from fedmerit.simulation.run import Progress, Rehearsal
from fedmerit.storage.run_folder import Folder

MEMBERS, TEST, FULL = 9, 2_000, 50_000


class Clock:
    """Seconds spent in each stage of a round, from what the rehearsal tells."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget what was."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._stage, self._since = "", time.perf_counter()

    def __call__(self, step: Progress) -> None:
        now = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] += now - self._since
        self._stage = "" if step.stage == "round" else step.stage
        self._since = now


def config(folder: Path, images: int, *, secure: bool) -> Config:
    """The CIFAR-10 setting at a smaller training size."""
    rng = np.random.default_rng(0)
    path = folder / f"images-{images}.npz"
    if not path.exists():
        x, y = rng.integers(0, 256, (images + TEST, 32, 32, 3), np.uint8), np.arange(images + TEST) % 10
        np.savez(path, x_train=x[:images], y_train=y[:images], x_test=x[images:], y_test=y[images:])
    return from_dict(
        {
            "data": {"name": "npz", "path": str(path), "test_size": TEST},
            "partition": {"clients": MEMBERS, "scheme": "iid"},
            "model": {"name": "cnn"},
            "training": {"rounds": 2, "local_epochs": 5},
            "scoring": {"method": "reports"},
            "secure_aggregation": {"enabled": secure},
        }
    )


def one_round(folder: Path, images: int, *, secure: bool, scoring: bool) -> dict[str, float]:
    """Seconds by stage of the second round of a fresh run; the first one warms up, and measures v(M0).

    Without scoring nobody reports in the second round.
    """
    clock = Clock()
    settings = config(folder, images, secure=secure)
    with tempfile.TemporaryDirectory(dir=folder) as path, Folder(Path(path) / "run", settings) as store:
        rehearsal = Rehearsal(settings, store, clock)
        rehearsal.join()
        rehearsal.round(1)
        if not scoring:
            carry = rehearsal.transport.exchange
            rehearsal.transport.exchange = lambda kind, asks: carry(kind, asks) if kind != "report" else ()
        clock.restart()
        began = time.perf_counter()
        rehearsal.round(2)
        total = time.perf_counter() - began
    train = clock.seconds["train"]
    return {"total": total, "train": train, "rest": total - train, **dict(clock.seconds)}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1_800)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = one_round(folder, options.images, secure=False, scoring=False)
        masked = one_round(folder, options.images, secure=True, scoring=False)
        scored = one_round(folder, options.images, secure=True, scoring=True)
        half = one_round(folder, options.images // 2, secure=False, scoring=False)
    growth = plain["train"] / half["train"]
    train_full = plain["train"] * FULL / options.images
    added = scored["rest"] - plain["rest"]
    result = {
        "machine": machine(),
        "setting": {"members": MEMBERS, "test": TEST, "images": options.images, "extrapolated_to": FULL},
        "seconds": {"plain": plain, "masked": masked, "scored": scored},
        "train_growth_for_twice_the_images": growth,
        "added_seconds": {"secure_sum": masked["rest"] - plain["rest"], "both": added},
        "overhead_measured": added / plain["total"],
        "overhead_extrapolated": added / (train_full + plain["rest"]),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "round.json").write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"training {options.images} images: {plain['train']:.1f} s, {growth:.2f} times that of half of them"
    )
    print(f"secure sum adds {result['added_seconds']['secure_sum']:.2f} s, scoring too: {added:.2f} s")
    print(f"overhead at {options.images} images: {result['overhead_measured']:.1%}")
    print(f"overhead at {FULL} images, extrapolated: {result['overhead_extrapolated']:.1%}")


if __name__ == "__main__":
    main()
