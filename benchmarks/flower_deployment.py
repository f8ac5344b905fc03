"""Seconds of an exchange in a real deployment: what Flower costs, and what is ours.

A SuperLink and four SuperNodes on 127.0.0.1 with TLS and node authentication run the tests' tiny federation
for three rounds; the same federation then runs on nodes in this process, where an exchange is nothing but our
own work and the user's. The difference is Flower's: a process start on every node, and polling. On a machine
with few cores the nodes' processes wait for each other, so this is an upper bound.

    python benchmarks/flower_deployment.py [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from pathlib import Path

from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from federation_in import HERE, NAMES, grid_of, make_keys, run
from loopback import Loopback

ROUNDS = 3
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def deployed(folder: Path) -> dict[str, list[float]]:
    """Seconds by exchange, as the server sees them, of a run on real SuperNodes."""
    roster, out = make_keys(folder), folder / "run"
    nodes = {
        name: {"name": name, "fedmerit-key": str(folder / f"{name}.pem"), "fedmerit-roster": str(roster)}
        for name in NAMES
    }
    with Loopback(folder / "federation", nodes, ONE_THREAD) as federation:
        config = {"roster": str(roster), "out": str(out), "patience": 120.0, "rounds": ROUNDS}
        federation.submit(HERE / "contract_app", config).wait(deadline=600)
    found: dict[str, list[float]] = json.loads((out / "seconds.json").read_text())
    return found


def here(folder: Path) -> dict[str, list[float]]:
    """The same on nodes in this process, one after another."""
    folder.mkdir()
    make_keys(folder)
    strategy, _ = run(folder, grid_of(folder), rounds=ROUNDS)
    return dict(strategy.seconds)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = here(Path(name) / "here"), deployed(Path(name))
    rows = {
        kind: {
            "deployment_seconds": statistics.median(theirs[kind]),
            "ours_and_the_users_seconds": statistics.median(ours[kind]),
            "measured": len(theirs[kind]),
        }
        for kind in ("advertise", "share", "train", "check", "unmask", "report", "close")
    }
    setting = {"nodes": len(NAMES), "rounds": ROUNDS, "tls": True, "node_authentication": True}
    result = {"machine": machine(), "setting": setting, "exchanges": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "flower_deployment.json").write_text(json.dumps(result, indent=1) + "\n")
    for kind, row in rows.items():
        own = row["ours_and_the_users_seconds"]
        print(f"{kind:10s} {row['deployment_seconds']:6.1f} s, of which {own:.2f} s ours and the user's")


if __name__ == "__main__":
    main()
