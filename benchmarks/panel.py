"""What a panel costs one member beside the models: bytes of all messages, and seconds of its own work.

::

    python benchmarks/panel.py --members 9 --rounds 10 --parameters 4300000

Masks and products are those of the product, on made-up numbers; sizes are those of the messages as members
write them. Computing the gradients is the user's own code: per round, three forward and backward passes over
the held-out samples, and two forward ones.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import machine

from fedmerit.identity import canonical
from fedmerit.protocol.column import coordinates, halves, rounded, shown
from fedmerit.protocol.direction import numeral
from fedmerit.secagg import masks
from fedmerit.secagg.board import Board

HERE = Path(__file__).resolve().parent


def measured(members: int, rounds: int, parameters: int, drawn: int) -> dict[str, float]:
    """Return bytes and seconds of one member in a whole panel."""
    rng = np.random.default_rng(0)
    drawn = min(drawn, parameters)
    at = coordinates("seed", 1, parameters, drawn)
    columns = rng.integers(-40, 41, (members, drawn), dtype=np.int8)
    board = Board(at, columns, halves(drawn)[0].stop, "digest", (1 << 40,) * (2 * members))
    words = rng.integers(0, 2**32, parameters, dtype=np.uint32)
    payload = np.zeros(parameters, np.uint64)
    keys = [bytes([place + 1]) * 32 for place in range(members)]

    def judge() -> None:
        slopes, before = rng.normal(size=(2, drawn)), rng.normal(size=(5, drawn))
        rounded([shown(slopes, before, 2.0, b"seed", 1)[0]])

    def state() -> None:
        board.of_words(words)
        for key in keys[1:]:
            board.noise(key)

    def table() -> None:
        for key in keys[1:]:
            board.of_pair(key)

    def mask() -> None:
        masks.add_masks(payload, [(key, 1) for key in keys])

    pairs = {f"client-{place}": numeral(board.of_pair(key)) for place, key in enumerate(keys[1:])}
    tables = len(canonical({"pairs": pairs})) + 600
    statement = len(numeral(board.of_words(words))) + 40
    witness = tables * members + members * 2 * 120
    sent = rounds * (drawn + tables + statement + members * 2 * 120)
    received = rounds * (members * drawn + witness + members * statement)
    return {
        "members": members, "rounds": rounds, "parameters": parameters, "coordinates": drawn,
        "sent_bytes": sent, "received_bytes": received,
        "judge_seconds": rounds * took(judge), "statement_seconds": rounds * took(state),
        "table_seconds": rounds * took(table), "masked_again_seconds": rounds * took(mask),
    }  # fmt: skip


def took(what: Callable[[], None]) -> float:
    """Return the shortest of three runs."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        what()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Measure and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--parameters", type=int, nargs="+", default=[100_000, 4_300_000, 30_000_000])
    parser.add_argument("--coordinates", type=int, default=50_000)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "panel.json")
    options = parser.parse_args()
    rows = [
        measured(options.members, options.rounds, size, options.coordinates) for size in options.parameters
    ]
    for row in rows:
        print(json.dumps({key: round(value, 4) for key, value in row.items()}))
    options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
