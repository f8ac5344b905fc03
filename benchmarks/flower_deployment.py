"""A settled run beside a plain one in a real deployment of Flower: seconds, CPU seconds, exchanges.

A SuperLink and four SuperNodes on 127.0.0.1 with TLS and node authentication run the app of the example,
first its `@app.train()` under a stock FedAvg and then the same inside fedmerit, in turn. CPU seconds are of
all processes of the federation from the submission of a run to its end, and to the end of its rounds, before
the settlement. On a machine with few cores the
nodes' processes wait for each other, so seconds are upper bounds.

    python benchmarks/flower_deployment.py [--repeats 3] [--rounds 3] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from machine import machine

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "flower-hospitals"
sys.path[:0] = [str(EXAMPLE), str(ROOT / "tools")]
from hospitals.task import HOSPITALS  # noqa: E402

from fedmerit.carriers.folders import kinds_in  # noqa: E402
from fedmerit.identity import Member, Roster, new_key, write_roster  # noqa: E402
from fedmerit.ledger.chain import LEDGER  # noqa: E402
from loopback import Loopback  # noqa: E402

NAMES = HOSPITALS[:4]
USUAL = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
PLAIN = """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from hospitals.task import network

app = ServerApp()


@app.main()
def main(grid, context):
    arrays = ArrayRecord(network().state_dict())
    rounds = context.run_config["rounds"]
    FedAvg(fraction_evaluate=0.0).start(grid=grid, initial_arrays=arrays, num_rounds=rounds)
"""
TIMED = """
    import json, pathlib
    pathlib.Path(config["out"], "seconds.json").write_text(json.dumps(strategy.seconds))
"""


def apps(folder: Path) -> dict[str, Path]:
    """The example as it is, but for a file of seconds, and the same without fedmerit."""
    found = {kind: folder / f"app-{kind}" for kind in ("plain", "settled")}
    for path in found.values():
        shutil.copytree(EXAMPLE, path, ignore=shutil.ignore_patterns("__pycache__"))
    server, settings = found["settled"] / "hospitals/server_app.py", found["plain"] / "pyproject.toml"
    server.write_text(server.read_text() + TIMED)
    (found["plain"] / "hospitals/plain.py").write_text(PLAIN)
    text = settings.read_text().replace("hospitals.server_app:app", "hospitals.plain:app")
    settings.write_text(text.replace("hospitals.secured:app", "hospitals.client_app:app"))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Of these processes, and of those of their children that are over."""
    ticks = 0
    for pid in pids:
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:  # it has ended; its parent counts it
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def measured(federation: Loopback, app: Path, config: dict[str, Any]) -> dict[str, Any]:
    """One run on a federation that has nothing else to do."""

    def cpu() -> float:
        return cpu_seconds(pid for name in ("superlink", *NAMES) for pid in federation.pids(name))

    before, began, rounds = cpu(), time.monotonic(), {}
    run, ledger = federation.submit(app, config), Path(config["out"], LEDGER)
    while not run.over:
        time.sleep(0.5)
        if not rounds and ledger.is_file() and "opening" in kinds_in(ledger)[0]:
            rounds = {"rounds_seconds": time.monotonic() - began, "rounds_cpu_seconds": cpu() - before}
    run.wait()
    whole = {"seconds": time.monotonic() - began, "cpu_seconds": cpu() - before}
    return {**whole, **rounds, "load": os.getloadavg()[0]}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "settled": []}
    exchanges: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        members = [Member(hospital, new_key(folder / f"{hospital}.pem")) for hospital in NAMES]
        roster = folder / "roster.toml"
        write_roster(roster, Roster(members, new_key(folder / "server.pem")))
        nodes = {
            hospital: {"fedmerit-key": str(folder / f"{hospital}.pem"), "fedmerit-roster": str(roster)}
            for hospital in NAMES
        }
        made = apps(folder)
        with Loopback(folder / "federation", nodes, USUAL) as federation:
            for repeat in range(options.repeats):
                for kind, found in runs.items():
                    config = {"rounds": options.rounds, "roster": str(roster), "local-epochs": 1}
                    config |= {"out": str(folder / f"run-{kind}-{repeat}"), "patience": 300.0}
                    found.append(measured(federation, made[kind], config))
                    print(kind, found[-1], flush=True)
                seconds = json.loads((folder / f"run-settled-{repeat}" / "seconds.json").read_text())
                for kind, took in seconds.items():
                    exchanges.setdefault(kind, []).extend(took)
                write(options, runs, exchanges, repeat + 1)


def write(
    options: argparse.Namespace,
    runs: dict[str, list[dict[str, Any]]],
    exchanges: dict[str, list[float]],
    repeats: int,
) -> None:
    """Write medians of all repeats so far."""
    result = {
        "machine": machine(),
        "setting": {
            "nodes": len(NAMES), "rounds": options.rounds, "repeats": repeats, "tls": True,
            "node_authentication": True,
        },
        "runs": {
            kind: {key: statistics.median(one[key] for one in found) for key in found[0]}
            for kind, found in runs.items()
        },
        "exchanges": {
            kind: {"deployment_seconds": statistics.median(took), "a_run": len(took) / repeats}
            for kind, took in exchanges.items()
        },
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "flower_deployment.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
