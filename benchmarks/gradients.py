"""How far apart are the directions that two machines compute?

The gradient of expected accuracy, averaged over a path of three points, for four trained networks: computed
with other instruction sets, threads, batch sizes and kernels, each in a process of its own, and in float64.
Printed is the largest distance between any two float32 runs, and from float64, as a share of the length of
the direction. `fedmerit.protocol.direction.tolerance` must lie above the former. Float32 alone gives a few
1e-7; an activation so close to a kink (of ReLU, or between two inputs of a maximum) that two machines see it
on different sides gives more, the more so the fewer test samples there are.

    python benchmarks/gradients.py [--device cpu] [--test 50 200 500] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine

from fedmerit.data.readers import fashion_mini
from fedmerit.protocol.direction import tolerance
from fedmerit.simulation.direction import direction
from fedmerit.simulation.models import build, to_vector
from fedmerit.simulation.training import TrainingSettings, train

NETWORKS = {"mlp": 5, "cnn": 5, "cnn-pool": 5, "resnet18": 1}
"""Networks, and the epochs between M0 and M."""
OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
WAYS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "two threads": ({}, {"threads": 2}),
    "batches of 17": ({}, {"batch": 17}),
    "batches of 500": ({}, {"batch": 500}),
    "without oneDNN": ({}, {"onednn": False}),
    "SSE4": (OLD, {}),
    "AVX2": (
        {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        {},
    ),
    "SSE4, without oneDNN, batches of 17": (OLD, {"onednn": False, "batch": 17}),
    "float64": ({}, {"double": True}),
}
"""Name: environment, and what is set in the process."""


def trained(name: str, folder: Path, device: str) -> None:
    """Keep the models before and after a round of training."""
    data, epochs = fashion_mini(), NETWORKS[name]
    network = build(name, data.x_train.shape[1:], 10).to(device)
    train(network, data.x_train[:900], data.y_train[:900], TrainingSettings(local_epochs=1), 0)
    m0 = to_vector(network)
    train(network, data.x_train[900:], data.y_train[900:], TrainingSettings(local_epochs=epochs), 1)
    np.savez(folder / f"{name}.npz", m0=m0, m=to_vector(network))


def computed(name: str, way: str, folder: Path, options: argparse.Namespace) -> None:
    """Compute the directions of all test sets in this process, and keep them."""
    _, given = WAYS[way]
    torch.set_num_threads(given.get("threads", 1))
    data, kept = fashion_mini(), np.load(folder / f"{name}.npz")
    found = []
    for samples in options.test:
        x, y = data.x_test[-samples:], data.y_test[-samples:]
        network = build(name, data.x_train.shape[1:], 10).to(options.device)
        if given.get("double"):
            found.append(in_double(network, kept["m0"], kept["m"], x, y))
            continue
        with torch.backends.mkldnn.flags(enabled=given.get("onednn", True)):
            way_ = direction(
                network, kept["m0"], kept["m"], x, y, "expected-accuracy",
                points=(3, 3), batch_size=given.get("batch"),
            )  # fmt: skip
        found.append(way_.gradient.double().cpu().numpy())
    np.save(folder / f"{name} {way}.npy", found)


def in_double(network: torch.nn.Module, m0: Any, m: Any, x: Any, y: Any) -> Any:
    """The same in float64, from the definition."""
    network = network.double().eval()
    images, labels = torch.as_tensor(x).permute(0, 3, 1, 2).double() / 127.5 - 1, torch.as_tensor(y)
    parameters, total = list(network.parameters()), 0.0
    nodes, weights = np.polynomial.legendre.leggauss(3)
    for t, weight in zip((1 + nodes) / 2, weights / 2, strict=True):
        at = torch.as_tensor((m0 + np.float32(t) * (m - m0)).astype(np.float64))
        torch.nn.utils.vector_to_parameters(at, parameters)
        for part in torch.split(torch.arange(len(y)), 100):
            p = torch.softmax(network(images[part]), 1)
            value = p[torch.arange(len(part)), labels[part]].sum() / len(y)
            found = torch.autograd.grad(value, parameters)
            total = total + weight * torch.cat([one.reshape(-1) for one in found])
    return total.numpy()  # type: ignore[attr-defined]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--test", type=int, nargs="*", default=[50, 200, 500])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        computed(options.one[0], options.one[1], Path(options.one[2]), options)
        return
    result: dict[str, Any] = {"machine": machine(), "device": options.device, "test": options.test}
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        for name in NETWORKS:
            trained(name, folder, options.device)
            for way, (environment, _) in WAYS.items():
                command = [sys.executable, "-W", "ignore", __file__, "--device", options.device, "--test"]
                subprocess.run(
                    [*command, *map(str, options.test), "--one", name, way, home],
                    check=True,
                    env={**os.environ, **environment},
                )
            found = {way: np.load(folder / f"{name} {way}.npy") for way in WAYS}
            result[name] = []
            for place, samples in enumerate(options.test):
                true = found["float64"][place]
                size = float(np.linalg.norm(true))
                apart = {
                    (one, other): float(np.linalg.norm(found[one][place] - found[other][place])) / size
                    for one, other in itertools.combinations(WAYS, 2)
                }
                exact = max(value for pair, value in apart.items() if "float64" in pair)
                worst, pair = max((value, pair) for pair, value in apart.items() if "float64" not in pair)
                most = tolerance(samples)
                print(
                    f"{name}, {samples} samples: {worst:.1e} apart ({pair[0]} | {pair[1]}), {exact:.1e} from "
                    f"float64, allowed {most:.1e}: {'ok' if worst < most else 'BROKEN'}",
                    flush=True,
                )
                result[name].append(
                    {"samples": samples, "apart": worst, "from_float64": exact, "allowed": most}
                    | {
                        "parameters": true.size,
                        "largest_over_rms": float(np.abs(true).max() / size * true.size**0.5),
                    }
                )
    (options.out / "gradients.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
