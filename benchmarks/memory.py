"""How much memory a member of a settled run takes, in vectors of the model (4 bytes per parameter).

Four Flower nodes in this process: Python's own accounting (tracemalloc) gives the peak while one of them
answers one message, message and answer included. Training and gradient are next to nothing, so this is what
fedmerit adds to the user's own; Flower's copies on the way are not in it.

    python benchmarks/memory.py [--parameters 4300000] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedmerit.flower import Contributions, secure
from fedmerit.flower.codec import take
from fedmerit.identity import Member, Roster, new_key, write_roster
from fedmerit.protocol.messages import Ask
from inprocess import InProcess

MEMBERS, ROUNDS = 4, 2


class Scales(InProcess):
    """The Grid, with the peak of every message's answer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.peaks: dict[str, int] = defaultdict(int)

    def _answer(self, node: int, message: Message) -> Message:
        kind = Ask.unpack(take(message.content))[0].exchange
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        sent = sum(
            len(array.data) for record in message.content.array_records.values() for array in record.values()
        )
        reply = super()._answer(node, message)
        self.seen.clear()
        self.peaks[kind] = max(self.peaks[kind], tracemalloc.get_traced_memory()[1] - before + sent)
        return reply


def value(arrays: ArrayRecord, test: Any) -> Any:
    """A number that grows with the first weights."""
    return np.full(len(test.y), 0.5 + 0.1 * np.tanh(arrays["w"].numpy()[:10].mean(dtype=np.float64)))


def gradient(arrays: ArrayRecord, test: Any) -> tuple[float, dict[str, Any]]:
    """The same, and its gradient."""
    weights = arrays["w"].numpy()
    level = np.tanh(weights[:10].mean(dtype=np.float64))
    slope = np.zeros(len(weights), np.float32)
    slope[:10] = 0.01 * (1 - level**2)
    return 0.5 + 0.1 * float(level), {"w": slope}


def train(message: Message, context: Any) -> Message:
    """Next to nothing."""
    weights = message.content["arrays"]["w"].numpy().copy()
    weights[:100] += 0.01 * (1 + np.random.default_rng([context.node_id, context.run_id]).random(100))
    weights[:100] += 1e-4 * message.content["config"]["server-round"]
    content = {"arrays": ArrayRecord({"w": Array(weights)}), "metrics": MetricRecord({"num-examples": 50})}
    return Message(RecordDict(content), reply_to=message)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=4_300_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    app = secure(ClientApp(), value=value, gradient=gradient)
    app.train()(train)
    with tempfile.TemporaryDirectory() as name:
        folder, names = Path(name), [f"member-{i}" for i in range(MEMBERS)]
        members = [Member(one, new_key(folder / f"{one}.pem")) for one in names]
        write_roster(folder / "roster.toml", Roster(members, new_key(folder / "server.pem")))
        configs = {
            i + 1: {
                "fedmerit-key": str(folder / f"{one}.pem"),
                "fedmerit-roster": str(folder / "roster.toml"),
            }
            for i, one in enumerate(names)
        }
        grid = Scales({i + 1: app for i in range(MEMBERS)}, configs)
        strategy = Contributions(
            FedAvg(fraction_evaluate=0.0),
            roster=folder / "roster.toml",
            test=(np.zeros((40, 1)), np.zeros(40)),
            value=value,
            gradient=gradient,
            folder=folder / "run",
            page=False,
        )
        first = ArrayRecord({"w": Array(np.zeros(options.parameters, np.float32))})
        tracemalloc.start()
        strategy.start(grid=grid, initial_arrays=first, num_rounds=ROUNDS)
    result = {
        "machine": machine(),
        "setting": {"members": MEMBERS, "rounds": ROUNDS, "parameters": options.parameters},
        "vectors": {kind: round(peak / (4 * options.parameters), 2) for kind, peak in grid.peaks.items()},
    }
    print(result["vectors"])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "memory.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
