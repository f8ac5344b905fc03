"""How much faster do models train side by side than one after another?

CIFAR-10's CNN on random images, batches of 64, in float32 and in TF32: nine models on data sets of their own,
64 on one data set (as in retraining), and a round of nine members of different sizes. The loop is `train`.
A stack is timed twice: when it trains for the first time, which includes recording its steps, and when it
trains again. `differs by` is the largest difference of a parameter between loop and stack after one epoch.

    python benchmarks/stacking.py [--steps 40] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "experiments")]

from benchmarks.coalitions import machine  # noqa: E402
from side_by_side import Stack, train_many  # noqa: E402

from fedmerit.simulation.models import build, flatten, load_vector, to_vector  # noqa: E402
from fedmerit.simulation.training import TensorData, TrainingSettings, train  # noqa: E402

BATCH = 64
SIZES = (2500, 1900, 1400, 1100, 900, 800, 600, 500, 300)
"""Samples of nine members."""


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one turn, after everything before it has ended."""
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def images(n: int, seed: int, device: torch.device) -> TensorData:
    """Random images and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, generator=generator)
    return x.to(device), torch.randint(0, 10, (n,), generator=generator).to(device)


def stacked(
    size: int, shared: bool, steps: int, settings: TrainingSettings, device: torch.device
) -> dict[str, object]:
    """One epoch of so many models in a loop and in a stack."""
    sets = [images(BATCH * steps - 10, i, device) for i in range(1 if shared else size)]
    model = build("cnn", (32, 32, 3), 10).to(device)
    start = flatten(model)
    which = [0 if shared else k for k in range(size)]
    seeds = [100 + k for k in which]

    def one(k: int = 0) -> None:
        load_vector(model, start)
        train(model, *sets[which[k]], settings, seeds[k])

    one()
    turns = [seconds(one, device) for _ in range(3)]
    loop = size * float(np.median(turns))
    stack, starts = Stack(model, size, sets, settings), start.repeat(size, 1)
    first = seconds(lambda: stack.train(starts, which, seeds), device)
    again = float(np.median([seconds(lambda: stack.train(starts, which, seeds), device) for _ in range(3)]))
    vectors = stack.train(starts, which, seeds)
    one(size - 1)
    return {
        "models": size,
        "share their batches": shared,
        "products": "tf32" if settings.tf32 else "float32",
        "recorded": bool(stack.graphs),
        "ms a step of one model in the loop": [round(1000 * turn / steps, 2) for turn in turns],
        "ms a step of the stack": round(1000 * again / steps, 2),
        "ms a step of the stack, recording included": round(1000 * first / steps, 2),
        "ratio": round(loop / again, 1),
        "ratio, recording included": round(loop / first, 1),
        "differs by": float((vectors[-1] - flatten(model)).abs().max()),
        "moved by": float((start - flatten(model)).abs().max()),
    }


def members(settings: TrainingSettings, device: torch.device) -> dict[str, object]:
    """A round of members of different sizes, as a rehearsal trains them."""
    model = build("cnn", (32, 32, 3), 10).to(device)
    start = to_vector(model)
    data = [tuple(part.cpu().numpy() for part in images(n, n, device)) for n in SIZES]
    found: dict[str, list[float]] = {"loop": [], "stacked": []}
    for _ in range(3):
        for method, turns in found.items():
            turns.append(
                seconds(
                    lambda method=method: train_many(model, start, data, settings, range(9), method),  # type: ignore[misc,arg-type]
                    device,
                )
            )
    loop, stack = (float(np.median(turns)) for turns in found.values())
    return {
        "members": SIZES,
        "local epochs": settings.local_epochs,
        "products": "tf32" if settings.tf32 else "float32",
        "seconds of the loop": round(loop, 3),
        "seconds of the stack": round(stack, 3),
        "ratio": round(loop / stack, 1),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, object] = {"machine": machine(device)}
    for tf32 in (False, True):
        settings = TrainingSettings(local_epochs=1, batch_size=BATCH, tf32=tf32)
        rows = [stacked(k, shared, options.steps, settings, device) for k, shared in ((9, False), (64, True))]
        rows.append(members(TrainingSettings(local_epochs=5, batch_size=BATCH, tf32=tf32), device))
        result["tf32" if tf32 else "float32"] = rows
        print(json.dumps(rows, indent=1), flush=True)
        (options.out / "stacking.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
