"""How fast does one member train on a CPU, compared with a plain PyTorch loop?

The same network, images, batches and optimiser twice, each time in a process of its own: as PyTorch's
tutorials write it (ReLU, then pooling; Adam as it comes; memory as the system gives it), and with
`fedmerit.simulation.training.train` as `fedmerit run` calls it. Then the same for evaluating a model.
Random pixels: time does not depend on them. CPU seconds, the least of a few repeats; the two take turns.

    python benchmarks/training.py [--repeats 3] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from machine import machine
from torch import nn
from torch.nn import functional as F

from fedmerit.simulation.models import build, prepare
from fedmerit.simulation.training import TrainingSettings, keep_memory, train
from fedmerit.simulation.utilities import evaluate

CASES = {"cnn": ((32, 32, 3), 10, 640), "cnn-pool": ((128, 128, 1), 4, 320)}
"""Images of CIFAR-10 and of Brain-MRI: shape, classes, images that a member has."""
SETTINGS = TrainingSettings(local_epochs=2)
Seconds = dict[str, float]


def network(name: str) -> nn.Module:
    """The same network as fedmerit's, as one would write it down."""
    (height, width, channels), classes, _ = CASES[name]
    layers: list[nn.Module] = []
    for before, after in ((channels, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        if name == "cnn-pool":
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    flat = 32 * height * width
    last = nn.Flatten(), nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, classes)
    return nn.Sequential(*layers, *last)


def images_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Random pixels."""
    shape, classes, count = CASES[name]
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, *shape), np.uint8), rng.integers(0, classes, count)


def plain(name: str) -> Seconds:
    """A loop as in a tutorial."""
    torch.set_num_threads(1)
    x, y = images_of(name)
    images, labels = prepare(torch.from_numpy(x), torch.device("cpu")), torch.from_numpy(y)
    model = network(name)
    adam = torch.optim.Adam(model.parameters(), SETTINGS.lr, weight_decay=SETTINGS.weight_decay)
    began = time.process_time()
    for _ in range(SETTINGS.local_epochs):
        for index in torch.randperm(len(y)).split(SETTINGS.batch_size):
            adam.zero_grad()
            F.cross_entropy(model(images[index]), labels[index]).backward()
            adam.step()
    trained = time.process_time()
    with torch.no_grad():
        for part in images.split(100):
            model.eval()(part).softmax(1)
    return {"train": trained - began, "evaluate": time.process_time() - trained}


def ours(name: str) -> Seconds:
    """The same work by fedmerit."""
    torch.set_num_threads(1)
    keep_memory()
    (x, y), (shape, classes, _) = images_of(name), CASES[name]
    model = build(name, shape, classes)
    began = time.process_time()
    train(model, x, y, SETTINGS, seed=0)
    trained = time.process_time()
    evaluate(model, x, y, ["expected-accuracy"])
    return {"train": trained - began, "evaluate": time.process_time() - trained}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = []
    for name in CASES:
        found: dict[str, list[Seconds]] = {"plain": [], "ours": []}
        for _ in range(options.repeats):
            for way in (plain, ours):
                context = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(1, mp_context=context) as process:
                    process.submit(way, name).result()  # warms up
                    found[way.__name__].append(process.submit(way, name).result())
        for work in ("train", "evaluate"):
            least = {way: min(one[work] for one in each) for way, each in found.items()}
            rows.append({"model": name, "work": work, **least, "ratio": least["plain"] / least["ours"]})
            print(f"{name}, {work}: {least['plain']:.2f} s plain, {least['ours']:.2f} s ours, "
                  f"{rows[-1]['ratio']:.2f} times as fast")  # fmt: skip
    setting = {"images": {name: count for name, (_, _, count) in CASES.items()}, "repeats": options.repeats}
    setting |= {"local_epochs": SETTINGS.local_epochs, "batch_size": SETTINGS.batch_size, "threads": 1}
    result = {"machine": machine(), "setting": setting, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "training.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
