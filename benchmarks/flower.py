"""What does fedmerit add to a round of Flower? Seconds and bytes by exchange.

Nine nodes in this process, one after another on one core, as Flower's simulation would run them on one: the
paper's CNN (4.3 million parameters), images of CIFAR-10's shape (random pixels: time does not depend on
them), 600 test images, 5 local epochs. Flower's own share (processes, polling) is not in it. Training grows
in proportion to the images, so the share at 50,000 is extrapolated, and said to be.

    python benchmarks/flower.py [--images 900] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedmerit.flower import Contributions, secure
from fedmerit.flower.codec import take
from fedmerit.identity import Member, Roster, new_key, write_roster
from fedmerit.protocol.messages import Ask
from fedmerit.simulation.models import build
from fedmerit.simulation.training import TrainingSettings, train
from fedmerit.simulation.utilities import evaluate
from inprocess import InProcess

MEMBERS, TEST, FULL, ROUNDS = 9, 600, 50_000, 3


class Clock(InProcess):
    """The Grid, with a watch: seconds of members by exchange and round, and bytes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.up: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.down: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.training = 0.0  # of the user, in the message at hand

    def _answer(self, node: int, message: Message) -> Message:
        ask, _ = Ask.unpack(take(message.content))
        key, self.training = (ask.exchange, ask.round), 0.0
        began = time.perf_counter()
        reply = super()._answer(node, message)
        self.seconds[key].append(time.perf_counter() - began - self.training)
        self.up[key].append(len(take(reply.content)))
        sizes = (len(a.data) for record in message.content.array_records.values() for a in record.values())
        self.down[key].append(sum(sizes))
        self.seen.clear()
        return reply


def federation(folder: Path, images: int) -> tuple[Clock, dict[str, list[float]], Any]:
    """Keys, nodes, and a run of three rounds; the grid, the user's training seconds, the strategy."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    names = [f"member-{i}" for i in range(MEMBERS)]
    members = [Member(name, new_key(folder / f"{name}.pem")) for name in names]
    write_roster(folder / "roster.toml", Roster(members, new_key(folder / "server.pem")))
    network = build("cnn", (32, 32, 3), 10)
    first = ArrayRecord(network.state_dict())
    x, y = rng.integers(0, 256, (images, 32, 32, 3), np.uint8), np.arange(images) % 10
    test = rng.integers(0, 256, (TEST, 32, 32, 3), np.uint8), np.arange(TEST) % 10
    spent: dict[str, list[float]] = defaultdict(list)

    def value(arrays: ArrayRecord, shown: Any) -> Any:
        network.load_state_dict(arrays.to_torch_state_dict())
        return evaluate(network, shown.x, shown.y, ["expected-accuracy"])["expected-accuracy"]

    app = secure(ClientApp(), value=value)

    @app.train()
    def train_locally(message: Message, context: Any) -> Message:
        began = time.perf_counter()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        part = slice(context.node_id - 1, None, MEMBERS)
        train(network, x[part], y[part], TrainingSettings(), seed=context.node_id)
        content = {
            "arrays": ArrayRecord(network.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y[part])}),
        }
        grid.training = time.perf_counter() - began
        spent[str(message.content["config"]["server-round"])].append(grid.training)
        return Message(RecordDict(content), reply_to=message)

    configs = {
        i + 1: {"fedmerit-key": str(folder / f"{n}.pem"), "fedmerit-roster": str(folder / "roster.toml")}
        for i, n in enumerate(names)
    }
    grid = Clock({i + 1: app for i in range(MEMBERS)}, configs)
    strategy = Contributions(
        FedAvg(fraction_evaluate=0.0),
        roster=folder / "roster.toml",
        test=test,
        value=value,
        config={"scoring": {"method": "reports"}},
        folder=folder / "run",
    )
    strategy.start(grid=grid, initial_arrays=first, num_rounds=ROUNDS)
    return grid, spent, strategy


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=900)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        grid, spent, strategy = federation(Path(name), options.images)
        whole = time.perf_counter() - began
    steady = 2  # round 1 has the extra exchanges
    rows = {}
    for kind in ("train", "check", "unmask", "report"):
        key, asked = (kind, steady), sum(grid.seconds[kind, steady])
        rows[kind] = {
            "member_seconds": statistics.median(grid.seconds[key]),
            "all_members_seconds": asked,
            "exchange_seconds": strategy.seconds[kind][steady - 1],
            "bytes_up": max(grid.up[key]),
            "bytes_down": max(grid.down[key]),
        }
    training = sum(spent[str(steady)])
    user = sum(sum(times) for times in spent.values())
    ours = (whole - user) / ROUNDS  # of a round, start and end of the run included: generous to Flower
    full = training * FULL / options.images
    parameters = sum(a.numpy().size for a in ArrayRecord(build("cnn", (32, 32, 3), 10).state_dict()).values())
    up = sum(row["bytes_up"] for row in rows.values())
    result = {
        "machine": machine(),
        "setting": {
            "members": MEMBERS, "test": TEST, "images": options.images, "parameters": parameters,
            "extrapolated_to": FULL, "threads": 1,
        },
        "exchanges": rows,
        "training_seconds": training,
        "ours_seconds": ours,
        "share_measured": ours / (ours + training),
        "share_extrapolated": ours / (ours + full),
        "bytes_up_per_parameter": up / parameters,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "flower.json").write_text(json.dumps(result, indent=1) + "\n")
    for kind, row in rows.items():
        sizes = f"{row['bytes_up']:>12,} bytes up {row['bytes_down']:>12,} down"
        print(f"{kind:8s} {row['member_seconds']:.3f} s a member, {sizes}")
    print(
        f"ours {ours:.1f} s a round of {MEMBERS} members, training {training:.1f} s ({options.images} images)"
    )
    print(f"ours at {FULL} images, extrapolated: {result['share_extrapolated']:.1%} of the round")
    print(f"{up / parameters:.4f} bytes a parameter up")


if __name__ == "__main__":
    main()
