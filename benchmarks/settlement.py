"""What does a settlement cost: at a member, in a round, and after the last one, beside two evaluations each?

The CIFAR-10 CNN of 4.3 million parameters, on images of its shape that a network can learn (a class is a
brightness; time does not depend on them). One process. Five questions:

1. statements: 9 members' integer products in 10 rounds, the memory that one takes, the bytes of a statement;
2. rounds: with and without archive and members' files, alternating in one run without masks. The members of
   this run hardly train; what is kept does not depend on that, so its share of a round with CIFAR-10's 50,000
   images and 5 epochs is extrapolated from the seconds that an image takes, and said to be;
3. a direction: gradients by 16 blocks at 3 points of the path, and one evaluation of the same images;
4. the settlement of a run, all members, beside the two evaluations per member and round that reports need;
5. witnesses: what one member of 9 computes in one round for its table and as a witness, what the server does
   for one member, and the bytes of what they sign (``--witnesses`` measures nothing else).

    python benchmarks/settlement.py [--device cpu] [--test 2000] [--members 9 18] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine

from fedmerit.config import Config, from_dict
from fedmerit.identity import canonical
from fedmerit.protocol.direction import Along, blocks_of, product
from fedmerit.protocol.settlement import Statement, table_body
from fedmerit.protocol.witness import handed_body, sighting_body
from fedmerit.secagg import masks
from fedmerit.secagg.naming import MaskTable, mask_products
from fedmerit.secagg.naming import product as masked_product
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.witness import Handed, Sighting
from fedmerit.simulation.direction import PathGradients
from fedmerit.simulation.run import Rehearsal
from fedmerit.simulation.setup import prepare
from fedmerit.simulation.training import TrainingSettings, train
from fedmerit.storage.run_folder import Folder

PARAMETERS, MEMBERS, ROUNDS, BLOCKS = 4_300_000, 9, 10, 16
IMAGES = 20
"""Training images per member: enough for an update."""
TRAINED, EPOCHS, FULL = 640, 5, 50_000
"""Images of the training that is measured; epochs and images of the round that is extrapolated."""


def clocked(work: Callable[[], Any]) -> float:
    """Seconds that this takes."""
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Nowhere:
    """An archive that keeps nothing."""

    def save(self, kind: str, number: int, arrays: Mapping[str, Any]) -> None:
        """Do nothing."""


def config(folder: Path, members: int, rounds: int, options: argparse.Namespace) -> Config:
    """A settled run of so many members."""
    count = IMAGES * members
    path = folder / f"images-{count}.npz"
    if not path.exists():
        rng, total = np.random.default_rng(0), count + options.test
        y = np.arange(total) % 10
        x = (rng.integers(0, 128, (total, 32, 32, 3)) + 12 * y[:, None, None, None]).astype(np.uint8)
        np.savez(path, x_train=x[:count], y_train=y[:count], x_test=x[count:], y_test=y[count:])
    return from_dict(
        {
            "run": {"device": options.device},
            "data": {"name": "npz", "path": str(path), "test_size": options.test},
            "partition": {"clients": members, "scheme": "iid"},
            "model": {"name": "cnn"},
            "training": {"rounds": rounds, "local_epochs": 1, "batch_size": 10},
            "secure_aggregation": {"enabled": False},
            "scoring": {"method": "settled", "utilities": ["expected-accuracy"]},
        }
    )


def statements() -> dict[str, float]:
    """All products of 9 members in 10 rounds; peak memory of one; bytes of a statement."""
    rng = np.random.default_rng(0)
    g = rng.integers(-800, 800, PARAMETERS).astype(np.int32)
    own = [rng.integers(0, 2**32, PARAMETERS, np.uint32) for _ in range(MEMBERS)]
    seconds = clocked(lambda: [product(words, g) for _ in range(ROUNDS) for words in own])
    tracemalloc.start()
    product(own[0], g)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    numbers = [str(number) for number in range(1, ROUNDS + 1)]
    parts = tuple(rng.normal(0, 0.01, BLOCKS).tolist())
    said = Statement("client-0", "0" * 64, dict.fromkeys(numbers, -(2**46)), dict.fromkeys(numbers, parts))
    return {
        "seconds": seconds,
        "seconds_per_product": seconds / MEMBERS / ROUNDS,
        "bytes_beside_the_vectors": peak,
        "bytes_of_a_vector": own[0].nbytes,
        "bytes_of_a_statement": len(canonical(said.body("0" * 32))) + 64,
    }


def witnesses() -> dict[str, Any]:
    """Seconds and bytes of one member in one round, beside its statement."""
    rng = np.random.default_rng(0)
    g = rng.integers(-(2**20), 2**20, PARAMETERS).astype(np.int32)
    words = rng.integers(0, 2**32, PARAMETERS, np.uint32)
    encoding = Encoding(PARAMETERS, MEMBERS, 1.0, word_bytes=8)
    names = [f"client-{place}" for place in range(MEMBERS)]
    keys = {name: bytes([place]) * 32 for place, name in enumerate(names)}
    peers, seen = names[1:], (MEMBERS - 1) // 2

    def table() -> None:
        masks.payload_of(words, encoding, [(key, 1) for key in keys.values()])
        mask_products({name: keys[name] for name in peers}, g)

    masked = bytes(masks.payload_of(words, encoding, []))
    said = MaskTable(names[0], dict.fromkeys(peers, 2**63))
    pairs = {(names[1], peer): 2**63 for peer in names[2 : 2 + seen]}
    where = ("0" * 32, "0" * 64, "0" * 64, 1)
    bodies = {
        "table": table_body(*where[:2], Along(1, None, "0" * 64, 1e-9, 2**60), said),
        "sealed": handed_body(*where, Handed(dict.fromkeys(peers, bytes(48)), {})),
        "witness": sighting_body(*where, Sighting(pairs, {}, {})),
    }
    return {
        "members": MEMBERS,
        "parameters": PARAMETERS,
        "load": os.getloadavg()[0],
        "table_seconds": min(clocked(table) for _ in range(3)),
        "witness_seconds": min(
            clocked(lambda: mask_products(dict.fromkeys(pairs, keys[names[1]]), g)) for _ in range(3)
        ),
        "server_seconds": min(clocked(lambda: masked_product(masked, g)) for _ in range(3)),
        "bytes": {name: len(canonical(body)) + 64 for name, body in bodies.items()},
        "archived_bytes": len(masked),
    }


def rounds(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Rounds with and without what a settlement keeps, by turns; the first one warms up."""
    settings = config(folder, MEMBERS, 7, options)
    found: dict[str, list[float]] = {"with": [], "without": []}
    with Folder(folder / "rounds", settings) as store:
        rehearsal = Rehearsal(settings, store)
        kept = rehearsal.coordinator.archive, rehearsal.transport.keeping
        rehearsal.join()
        rehearsal.round(1)
        for number in range(2, 8):
            which = ("with", "without")[number % 2]
            coordinator, transport = rehearsal.coordinator, rehearsal.transport
            coordinator.archive, transport.keeping = kept if which == "with" else (Nowhere(), None)  # type: ignore[assignment]
            found[which].append(clocked(lambda number=number: rehearsal.round(number)))  # type: ignore[misc]
    least = {which: min(seconds) for which, seconds in found.items()}
    full = least["without"] + training(rehearsal.federation.network) * EPOCHS * FULL / TRAINED
    return {
        **least,
        "ratio": least["with"] / least["without"],
        "training_images": IMAGES * MEMBERS,
        "full_round_extrapolated": full,
        "overhead_extrapolated": (least["with"] - least["without"]) / full,
    }


def training(network: torch.nn.Module) -> float:
    """Seconds of an epoch of so many images, the least of three turns."""
    rng, settings = np.random.default_rng(0), TrainingSettings(local_epochs=1)
    x, y = rng.integers(0, 256, (TRAINED, 32, 32, 3), np.uint8), np.arange(TRAINED) % 10
    return min(clocked(lambda: train(network, x, y, settings, 0)) for _ in range(3))


def direction(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """The gradient of a round, and an evaluation, on all test images."""
    federation = prepare(config(folder, MEMBERS, 1, options))
    shown, m0 = federation.pool.settlement(), federation.first
    m = (m0 + np.random.default_rng(0).normal(0, 1e-3, m0.size)).astype(np.float32)
    blocks, _ = blocks_of(shown, balanced=True)
    paths = PathGradients(federation.network, federation.utilities[0], most=0)
    paths(m0, m0, shown, blocks, 1)  # warm up
    federation.evaluate(m0, shown)
    gradient = clocked(lambda: paths(m0, m, shown, blocks, 3))
    evaluation = clocked(lambda: federation.evaluate(m, shown))
    return {
        "parameters": m0.size,
        "test": len(shown.y),
        "seconds": gradient,
        "evaluation_seconds": evaluation,
        "in_evaluations": gradient / evaluation,
    }


def settlement(folder: Path, members: int, evaluation: float, options: argparse.Namespace) -> dict[str, Any]:
    """The settlement of a run of two rounds, server and all members in one process."""
    settings = config(folder, members, 2, options)
    with Folder(folder / f"run-{members}", settings) as store:
        rehearsal = Rehearsal(settings, store)
        rehearsal.join()
        for number in (1, 2):
            rehearsal.round(number)
        seconds = clocked(rehearsal._end)
        settled = rehearsal.coordinator.settled
        assert settled is not None
        assert all(one.holds for one in settled.equations)
        gradients = rehearsal.coordinator.gradient
        assert isinstance(gradients, PathGradients)
    reports = 2 * members * 2 * evaluation
    return {
        "members": members,
        "seconds": seconds,
        "points": [one.points for one in settled.manifest.rounds],
        "gradients_computed": gradients.computed,
        "evaluations_seconds": reports,
        "ratio": seconds / reports,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--test", type=int, default=0, help="test images; 2,000 on a CPU, 10,000 on a GPU")
    parser.add_argument("--members", type=int, nargs="*", default=[9, 18])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--witnesses", action="store_true", help="measure witnesses only")
    options = parser.parse_args()
    if options.witnesses:
        found = {"machine": machine(), "witnesses": witnesses()}
        (options.out / "witnesses.json").write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found["witnesses"], indent=1))
        return
    options.test = options.test or (2_000 if options.device == "cpu" else 10_000)
    result: dict[str, Any] = {"machine": machine(), "device": options.device, "statements": statements()}
    said = result["statements"]
    print(
        f"statements of {MEMBERS} members in {ROUNDS} rounds of {PARAMETERS:,} parameters: "
        f"{said['seconds']:.1f} s, {said['bytes_beside_the_vectors'] / 2**20:.1f} MiB beside the vectors; "
        f"a statement has {said['bytes_of_a_statement']:,} bytes",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result["round"] = kept = rounds(folder, options)
        print(
            f"a round with archive and members' files: {kept['with']:.2f} s, without: "
            f"{kept['without']:.2f} s, {kept['ratio']:.2f} times as long "
            f"({kept['training_images']} training images); {kept['overhead_extrapolated']:.1%} of a round of "
            f"{FULL:,} images, {EPOCHS} epochs, which would take {kept['full_round_extrapolated']:.0f} s",
            flush=True,
        )
        result["direction"] = way = direction(folder, options)
        print(
            f"direction of a round, {way['test']:,} images, 3 points, {BLOCKS} blocks: "
            f"{way['seconds']:.1f} s, {way['in_evaluations']:.1f} evaluations of "
            f"{way['evaluation_seconds']:.2f} s",
            flush=True,
        )
        result["settlement"] = []
        for members in options.members:
            one = settlement(folder, members, way["evaluation_seconds"], options)
            result["settlement"].append(one)
            print(
                f"settlement of 2 rounds, {members} members: {one['seconds']:.1f} s, {one['ratio']:.2f} "
                f"times two evaluations per member and round ({one['evaluations_seconds']:.1f} s)",
                flush=True,
            )
    options.out.mkdir(parents=True, exist_ok=True)
    name = "settlement.json" if options.device == "cpu" else f"settlement-{options.device}.json"
    (options.out / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
