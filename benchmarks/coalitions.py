"""How fast are the ground truths? Coalition tables, stacked training and retraining against plain loops.

::

    python benchmarks/coalitions.py --data FOLDER      # FOLDER holds the compact CIFAR-10; or --synthetic

Ratios come from one run on one machine. Baselines keep the data on the device and use PyTorch's defaults;
where they are extrapolated from fewer coalitions, the result says from how many. Set-up (measuring
candidates, compiling) is stated apart. A section that fails is reported and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "experiments")]

from quick_coalitions import QuickEvaluator, retrained  # noqa: E402
from side_by_side import train_many  # noqa: E402
from strategies import Effort  # noqa: E402

from fedmerit.simulation.analysis import Game  # noqa: E402
from fedmerit.simulation.models import as_tensor, build, load_vector, prepare, to_vector  # noqa: E402
from fedmerit.simulation.training import TrainingSettings, train  # noqa: E402

UTILITIES = ["expected-accuracy", "accuracy", "brier"]
Arrays = tuple[np.ndarray, np.ndarray]


class Bench:
    """Options, data, and results written after every section."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.small = options.quick or self.device.type == "cpu"
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = {"machine": machine(self.device), "small": self.small}
        self.cifar = read(options, "cifar10", (32, 32, 3), 50_000, 10_000, 10, self.small)
        self.isic = read(options, "isic2019_ham", (64, 64, 3), 4_000, 2_025, 8, self.small)
        self.results["data"] = {"cifar10": self.cifar[2], "isic2019_ham": self.isic[2]}
        self.kept: dict[str, Any] = {}

    def section(self, name: str, work: Callable[[Bench], dict[str, Any]]) -> None:
        began = time.perf_counter()
        try:
            result = work(self)
        except Exception as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"[:500]}
        result["section_seconds"] = round(time.perf_counter() - began, 2)
        self.results[name] = result
        print(f"\n{name}\n" + json.dumps(result, indent=2, default=str), flush=True)
        (self.out / "coalitions.json").write_text(json.dumps(self.results, indent=1, default=str) + "\n")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def clients(self, n: int) -> list[Arrays]:
        """The training images dealt to n clients of unequal sizes."""
        (x, y), _, _ = self.cifar
        share = np.random.default_rng(0).dirichlet([5.0] * n)
        ends = (np.cumsum(share) * len(y)).astype(int)
        return [(x[a:b], y[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def read(
    options: argparse.Namespace,
    name: str,
    shape: tuple[int, int, int],
    n: int,
    m: int,
    classes: int,
    small: bool,
) -> tuple[Arrays, Arrays, str]:
    """(train, test, where from): the compact files where given, else random images with a class-wise tint."""
    if options.data and not options.synthetic:
        folder = Path(options.data)
        for home in (folder, folder.parent):
            if (home / "index.json").exists() and (home / name).is_dir():
                from experiments.compact import load

                d = load(home, name)[0]
                cut = slice(None, 600 if small else None)
                return (d.x_train[cut], d.y_train[cut]), (d.x_test[cut], d.y_test[cut]), "compact files"
    if small:
        n, m = 600, 100
    rng = np.random.default_rng(1)

    def make(size: int) -> Arrays:
        y = np.arange(size) % classes
        tint = rng.random((classes, 1, 1, shape[2]))
        noise = rng.random((size, *shape), dtype=np.float32)
        return ((0.5 * tint[y] + 0.5 * noise) * 255).astype(np.uint8), y

    return make(n), make(m), "synthetic"


def machine(device: torch.device) -> dict[str, Any]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    if device.type != "cuda":
        return found | {"device": platform.processor() or platform.machine()}
    half = torch.randn(8192, 8192, device=device, dtype=torch.float16)
    big = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    flops = 2 * 8192**3 / clocked(lambda: half @ half, device, 20)
    bandwidth = 2 * big.numel() / clocked(lambda: big.copy_(big.clone()), device, 5) * 2
    return found | {
        "device": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "float16_matmul_tflops": round(flops / 1e12),
        "copy_gb_per_s": round(bandwidth / 1e9),
    }


def clocked(work: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Seconds per call, after one that warms up."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def plain_loop(
    model: nn.Module, x: Tensor, y: Tensor, vectors: Tensor, batch: int
) -> Callable[[], list[float]]:
    """What everyone writes: load a model, go through the test set in batches, count."""

    def run() -> list[float]:
        model.eval()
        found = []
        with torch.no_grad():
            for vector in vectors:
                load_vector(model, vector)
                right = torch.zeros((), device=x.device)
                for i in range(0, len(y), batch):
                    right += (model(x[i : i + batch]).argmax(1) == y[i : i + batch]).sum()
                found.append(float(right) / len(y))
        return found

    return run


def game(m0: np.ndarray, updates: np.ndarray, device: torch.device) -> Game:
    """A round of members with equal weights."""
    n = len(updates)
    names = [str(i) for i in range(n)]
    return Game(as_tensor(m0).to(device), as_tensor(updates).to(device), [1.0] * n, "additive", names)


def tables(
    bench: Bench, model: nn.Module, test: Arrays, updates: np.ndarray, batches: dict[int, int], effort: Effort
) -> tuple[dict[str, Any], QuickEvaluator]:
    """All coalitions of these updates against plain loops; ``batches``: batch size -> coalitions timed."""
    n, device, m0 = len(updates), bench.device, to_vector(model)
    evaluator = QuickEvaluator(model, *test, UTILITIES, effort="compile" if bench.small else effort)
    evaluator.tables(game(m0, updates, device))
    first = evaluator.record
    got = evaluator.tables(game(m0, updates, device))
    record = evaluator.record
    out: dict[str, Any] = {"coalitions": 1 << n, "seconds": round(record.seconds, 3)}
    out |= {"setup_seconds": round(first.setup_seconds, 1), "first_seconds": round(first.seconds, 3)}
    out["record"] = asdict(record)
    x, y = prepare(test[0], device), torch.as_tensor(test[1], device=device)
    for batch, some in batches.items():
        masks = np.random.default_rng(2).choice(1 << n, some, replace=False)
        c = (masks[:, None] >> np.arange(n) & 1).astype(np.float32)
        vectors = torch.as_tensor(m0 + c @ updates, device=device)
        loop = plain_loop(model, x, y, vectors, batch)
        seconds = clocked(loop, device) / some * (1 << n)
        away = np.abs(np.array(loop()) - got["accuracy"].values[masks]).max()
        out[f"loop batch {batch}"] = {
            "seconds": round(seconds, 2),
            "timed_coalitions": some,
            "ratio": round(seconds / record.seconds, 1),
            "accuracy_differs_by": float(away),
        }
    load_vector(model, m0)
    return out, evaluator


def coalitions_cnn(bench: Bench) -> dict[str, Any]:
    """512 coalitions of the paper's CIFAR CNN on the whole test set."""
    model = build("cnn", (32, 32, 3), 10).to(bench.device)
    start = to_vector(model)
    settings = TrainingSettings(local_epochs=1)
    n = 4 if bench.small else 9
    local = train_many(model, start, bench.clients(n), settings, range(n))
    load_vector(model, start)
    updates = (np.stack(local.vectors) - start) / n
    some = 2 if bench.small else 64
    out, evaluator = tables(bench, model, bench.cifar[1], updates, {64: some, 1000: some}, "tune")
    bench.kept["cnn"] = model, start, updates, evaluator
    images = len(bench.cifar[1][1])
    moved = images * 2 * 2 * (16 + 32) * 32 * 32  # two layers written and read in half precision
    flops = images * 2 * 32 * 32 * (16 * 27 + 32 * 144 + 32 * 128)
    if bench.device.type == "cuda":
        has = bench.results["machine"]
        floor = out["coalitions"] * (
            moved / has["copy_gb_per_s"] / 1e9 + flops / has["float16_matmul_tflops"] / 1e12
        )
        out["roofline_seconds"] = round(floor, 3)
    return out


def kernels(bench: Bench) -> dict[str, Any]:
    """Where the time of the chosen strategy goes."""
    if bench.device.type != "cuda" or "cnn" not in bench.kept:
        return {"skipped": "needs a GPU"}
    _, start, updates, evaluator = bench.kept["cnn"]
    round_ = game(start, updates, bench.device)
    masks = np.arange(16)
    evaluator.values(round_, masks)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        evaluator.values(round_, masks)
    rows = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    return {e.key[:90]: f"{e.self_device_time_total / 16:.0f} us a coalition, {e.count} calls" for e in rows}


def coalitions_15(bench: Bench) -> dict[str, Any]:
    """32,768 coalitions with the strategy found above; baselines extrapolated from it."""
    if bench.small:
        return {"skipped": "only in full runs on a GPU"}
    _, start, nine, evaluator = bench.kept["cnn"]
    mix = np.random.default_rng(3).dirichlet([1.0] * 9, 15).astype(np.float32) * 9 / 15
    evaluator.tables(game(start, mix @ nine, bench.device))
    record = evaluator.record
    out: dict[str, Any] = {"seconds": round(record.seconds, 2), "method": record.method}
    for batch in (64, 1000):
        seconds = bench.results["coalitions_cnn"][f"loop batch {batch}"]["seconds"] * 64
        out[f"loop batch {batch}, extrapolated"] = seconds
        out[f"ratio {batch}"] = round(seconds / record.seconds, 1)
    return out


def coalitions_resnet(bench: Bench) -> dict[str, Any]:
    """512 coalitions of a ResNet-18 on 64 x 64 images."""
    model = build("resnet18", (64, 64, 3), 8).to(bench.device)
    n = 3 if bench.small else 9
    rng = np.random.default_rng(4)
    scale = 0.02 * np.abs(to_vector(model)).mean()
    updates = (scale * rng.standard_normal((n, len(to_vector(model)))) / n).astype(np.float32)
    return tables(bench, model, bench.isic[1], updates, {256: 2 if bench.small else 16}, "compile")[0]


def training(bench: Bench) -> dict[str, Any]:
    """One local epoch of 9 clients, stacked against one after another."""
    model = build("cnn", (32, 32, 3), 10).to(bench.device)
    start, out = to_vector(model), {}
    data = bench.clients(9)
    for tf32 in (False, True):
        settings = TrainingSettings(local_epochs=1, tf32=tf32)
        seconds = {}
        for method in ("loop", "stacked"):
            train_many(model, start, [(x[:128], y[:128]) for x, y in data], settings, range(9), method)  # type: ignore[arg-type]
            began = time.perf_counter()
            train_many(model, start, data, settings, range(9), method)  # type: ignore[arg-type]
            seconds[method] = round(time.perf_counter() - began, 2)
        ratio = round(seconds["loop"] / seconds["stacked"], 2)
        out["tf32" if tf32 else "float32"] = seconds | {"ratio": ratio}
    return out


def retraining(bench: Bench) -> dict[str, Any]:
    """63 retrainings (N=6, 10 rounds, 5 local epochs), extrapolated from one epoch: ours from two rounds."""
    if bench.device.type == "cpu":
        return {"skipped": "needs a GPU"}
    model = build("cnn", (32, 32, 3), 10).to(bench.device)
    start, out = to_vector(model), {}
    data = bench.clients(6)
    x, y = bench.cifar[1]
    for tf32 in (False, True):
        settings = TrainingSettings(local_epochs=1, tf32=tf32)

        def shares(mask: int) -> Tensor:
            inside = [float(mask >> i & 1) for i in range(6)]
            return torch.tensor(inside, device=bench.device) / max(1, mask.bit_count())

        def stacked(rounds: int, settings: TrainingSettings = settings) -> float:
            seeds = [[100 * r + i for i in range(6)] for r in range(rounds)]
            first, evaluator = as_tensor(start).to(bench.device), QuickEvaluator(model, x, y, UTILITIES)
            began = time.perf_counter()
            made = retrained(model, first, data, settings, seeds, shares, range(64), method="stacked")
            for _, vector in made:
                evaluator.measure(vector)
            return time.perf_counter() - began

        stacked(1)
        one, two = stacked(1), stacked(2)
        ours = 5 * (one + 9 * (two - one))
        plain = 10 * 5 * sequential(model, start, data, settings)
        out["tf32" if tf32 else "float32"] = {
            "first_round_seconds": round(one, 2),
            "later_round_seconds": round(two - one, 2),
            "stacked_minutes, extrapolated": round(ours / 60, 2),
            "sequential_minutes, extrapolated": round(plain / 60, 1),
            "ratio": round(plain / ours, 1),
        }
    return out


def sequential(model: nn.Module, start: np.ndarray, data: list[Arrays], settings: TrainingSettings) -> float:
    """Seconds of one epoch of all 63 coalitions one after another, extrapolated from four by their images."""
    sizes = [len(labels) for _, labels in data]
    masks = [0b000001, 0b100110, 0b011011, 0b111111]
    seen = sum(sizes[i] for mask in masks for i in range(6) if mask >> i & 1)

    def run() -> None:
        for mask in masks:
            for i, (images, labels) in enumerate(data):
                if mask >> i & 1:
                    load_vector(model, start)
                    train(model, images, labels, settings, i)

    return clocked(run, next(model.parameters()).device) * 32 * sum(sizes) / seen


SECTIONS = (coalitions_cnn, kernels, coalitions_resnet, training, retraining, coalitions_15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of the compact datasets")
    parser.add_argument("--synthetic", action="store_true", help="random images instead")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"))
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--only", nargs="*", help="names of sections")
    options = parser.parse_args()
    bench = Bench(options)
    print(json.dumps(bench.results, indent=2), flush=True)
    for section in SECTIONS:
        if not options.only or section.__name__ in options.only:
            bench.section(section.__name__, section)


if __name__ == "__main__":
    main()
