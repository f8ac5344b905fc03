"""How far apart are the directions that two machines compute?

The gradient of expected accuracy at the middle of the path from M0 to M, for three trained networks: computed
with other instruction sets, threads, batches and kernels, each in a process of its own, in float32 and in
float64. Printed and written are, per network, test set and precision, the largest distance between any two of
them as a share of the direction's length, which two ways they were, and the seconds of the CPU. Float32 is
computed from the definition, float64 by the library and once from the definition.

An activation so close to a kink (of ReLU, or between two inputs of a maximum) that two machines see it on
different sides is what sets float32 apart. The float64 directions must agree ten times better than
`fedmerit.protocol.direction.TOLERANCE` asks; otherwise the script ends with status 1.

    python benchmarks/gradients.py [--device cpu] [--test 50 500] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine

from fedmerit.data.dataset import fashion_mini
from fedmerit.protocol.direction import TOLERANCE
from fedmerit.simulation.direction import direction
from fedmerit.simulation.models import build, to_vector
from fedmerit.simulation.training import TrainingSettings, train

NETWORKS = {"mlp": 5, "cnn-pool": 5, "resnet18": 1}
"""Networks, and the epochs between M0 and M."""
MARGIN = 10
OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "DNNL_MAX_CPU_ISA": "SSE41"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2"}
WAYS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "two threads": ({}, {"threads": 2}),
    "batches of 17": ({}, {"batch": 17}),
    "one batch": ({}, {"batch": 500, "blocks": 1}),
    "without oneDNN": ({}, {"onednn": False}),
    "AVX2": (AVX2, {}),
    "SSE4": (OLD, {}),
    "SSE4, batches of 17, without oneDNN": (OLD, {"onednn": False, "batch": 17}),
}
"""Name: environment, and what is set in the process."""
DEFINITION = "from the definition"


def trained(name: str, folder: Path, device: str) -> None:
    """Keep the models before and after a round of training."""
    data, epochs = fashion_mini(), NETWORKS[name]
    network = build(name, data.x_train.shape[1:], 10).to(device)
    train(network, data.x_train[:900], data.y_train[:900], TrainingSettings(local_epochs=1), 0)
    m0 = to_vector(network)
    train(network, data.x_train[900:], data.y_train[900:], TrainingSettings(local_epochs=epochs), 1)
    np.savez(folder / f"{name}.npz", m0=m0, m=to_vector(network))


def computed(name: str, way: str, folder: Path, options: argparse.Namespace) -> None:
    """Compute the directions of all test sets in this process, and keep them with the seconds they took."""
    given = WAYS[way][1]
    torch.set_num_threads(given.get("threads", 1))
    data, kept = fashion_mini(), np.load(folder / f"{name}.npz")
    network, m0, m = build(name, data.x_train.shape[1:], 10).to(options.device), kept["m0"], kept["m"]
    found: dict[str, Any] = {}
    with torch.backends.mkldnn.flags(enabled=given.get("onednn", True)):
        for samples in options.test:
            x, y = data.x_test[-samples:], data.y_test[-samples:]
            way_ = direction(
                network, m0, m, x, y, "expected-accuracy", points=1,
                blocks=given.get("blocks", 16), batch_size=given.get("batch"),
            )  # fmt: skip
            found[f"float64 {samples}"] = way_.gradient
            for dtype in (torch.float32, torch.float64)[: 2 if way == "as it is" else 1]:
                start, key = time.process_time(), f"{dtype}"[6:]
                gradient = defined(network, (m0 + m.astype(np.float64)) / 2, x, y, dtype, given)
                found[f"seconds {key} {samples}"] = time.process_time() - start
                found[f"{DEFINITION if key == 'float64' else key} {samples}"] = gradient
    np.savez(folder / f"{name} {way}.npz", **found)


def defined(
    network: torch.nn.Module, at: Any, x: Any, y: Any, dtype: torch.dtype, given: dict[str, Any]
) -> Any:
    """Return the gradient of expected accuracy at a model, from the definition."""
    network = network.to(dtype).eval()
    parameters = list(network.parameters())
    device, total = parameters[0].device, 0.0
    torch.nn.utils.vector_to_parameters(torch.as_tensor(at, dtype=dtype, device=device), parameters)
    images = torch.as_tensor(x, device=device).permute(0, 3, 1, 2).to(dtype) / 127.5 - 1
    labels = torch.as_tensor(y, device=device)
    for part in torch.split(torch.arange(len(y), device=device), given.get("batch", 32)):
        p = torch.softmax(network(images[part]), 1)
        value = p[torch.arange(len(part)), labels[part]].sum() / len(y)
        total = total + torch.cat([one.reshape(-1) for one in torch.autograd.grad(value, parameters)])
    network.float()
    return total.cpu().numpy()  # type: ignore[attr-defined]


def compared(found: dict[str, Any], samples: int, precision: str) -> dict[str, Any]:
    """Return how far apart the directions of one network, test set and precision are."""
    rows = {way: one[f"{precision} {samples}"].astype(np.float64) for way, one in found.items()}
    usual = found["as it is"]
    true = usual[f"{DEFINITION} {samples}"]
    if precision == "float64":
        rows[DEFINITION] = true
    apart = {
        pair: float(np.linalg.norm(rows[pair[0]] - rows[pair[1]]) / np.linalg.norm(true))
        for pair in itertools.combinations(rows, 2)
    }
    pair = max(apart, key=apart.__getitem__)
    return {"apart": apart[pair], "pair": pair, "seconds": float(usual[f"seconds {precision} {samples}"])}


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--test", type=int, nargs="*", default=[50, 500])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        computed(options.one[0], options.one[1], Path(options.one[2]), options)
        return 0
    result: dict[str, Any] = {"machine": machine(), "device": options.device, "tolerance": TOLERANCE}
    worst = 0.0
    with tempfile.TemporaryDirectory() as home:
        for name in NETWORKS:
            trained(name, Path(home), options.device)
            for way, (environment, _) in WAYS.items():
                command = [sys.executable, "-W", "ignore", __file__, "--device", options.device, "--test"]
                command += [*map(str, options.test), "--one", name, way, home]
                subprocess.run(command, check=True, env={**os.environ, **environment})
            found = {way: dict(np.load(Path(home) / f"{name} {way}.npz")) for way in WAYS}
            result[name] = []
            for samples in options.test:
                row = {one: compared(found, samples, one) for one in ("float32", "float64")}
                ratio = row["float64"]["seconds"] / row["float32"]["seconds"]
                for precision, one in row.items():
                    print(f"{name}, {samples} samples, {precision}: {one['apart']:.1e} apart {one['pair']}")
                print(f"  float64 takes {ratio:.1f} times as long", flush=True)
                result[name].append({"samples": samples, **row, "times_as_long": ratio})
                worst = max(worst, row["float64"]["apart"])
    kept = worst * MARGIN <= TOLERANCE
    print(f"{'kept  ' if kept else 'BROKEN'} float64 at least {MARGIN} times closer than {TOLERANCE:.0e}")
    (options.out / "gradients.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
