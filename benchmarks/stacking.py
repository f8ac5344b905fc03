"""What bounds stacked training? Milliseconds of one step by how many models train in step, and how.

CIFAR-10's CNN on random images, batches of 64: one model; nine with their own batches; 32 that share theirs,
as in retraining. Each in float32 and TF32, with cuDNN's deterministic algorithms (what training uses) and
with whatever it finds fastest. The second of two turns counts.

    python benchmarks/stacking.py [--steps 40] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.coalitions import machine  # noqa: E402

from fedmerit.simulation.models import build, to_vector  # noqa: E402
from fedmerit.simulation.training import (  # noqa: E402  # noqa: E402
    Stack,
    TensorData,
    TrainingSettings,
    _adam,
    batches,
    exactly,
    probe,
    train,
)

BATCH = 64


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of the second of two turns."""
    for _ in range(2):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - began


def stacked(
    models: int, shared: bool, free: bool, data: TensorData, settings: TrainingSettings
) -> torch.Tensor:
    """One epoch of so many models in step; ``free`` lets cuDNN choose by timing."""
    device = data[1].device
    model = build("cnn", (32, 32, 3), 10).to(device)
    start = torch.as_tensor(to_vector(model)).to(device).repeat(models, 1)
    stack = Stack(model, start, partial(_adam, settings), probe(model, data).ignored)
    sets = [data] if shared else [data] * models
    plan = [list(batches(len(data[1]), settings, 0)) for _ in sets]
    with exactly(settings):
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = not free, free
        try:
            return stack.train(sets, plan, 0)
        finally:
            torch.backends.cudnn.benchmark = False


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    n = BATCH * options.steps
    data = (
        torch.randint(0, 256, (n, 32, 32, 3), dtype=torch.uint8, device=device),
        torch.randint(0, 10, (n,), device=device),
    )
    rows: list[dict[str, object]] = []
    for tf32 in (False, True):
        settings = TrainingSettings(local_epochs=1, batch_size=BATCH, tf32=tf32)
        products = "tf32" if tf32 else "float32"
        one = build("cnn", (32, 32, 3), 10).to(device)
        each = 1000 * seconds(partial(train, one, *data, settings, 0), device) / options.steps
        rows.append({"models": 1, "stacked": False, "products": products, "ms a step": round(each, 2)})
        for models, shared in ((9, False), (32, True)):
            for free in (False, True):
                work = partial(stacked, models, shared, free, data, settings)
                each = 1000 * seconds(work, device) / options.steps
                rows.append(
                    {
                        "models": models,
                        "stacked": True,
                        "products": products,
                        "deterministic cuDNN": not free,
                        "cuDNN chooses by timing": free,
                        "models share their batches": shared,
                        "ms a step": round(each, 2),
                        "ms a model": round(each / models, 2),
                    }
                )
            print(json.dumps(rows[-2:]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(device), "steps": rows}
    (options.out / "stacking.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
