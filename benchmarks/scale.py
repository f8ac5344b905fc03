"""How the time of what is not training grows with members and rounds; numbers as JSON.

A federation with a model of 12 numbers, as in the tests, in one process: coordinator, members, messages,
ledger and run folder are real, and training takes no time. Seconds are those of the processor. A ratio says
how many times as long four times the rounds or about three times the members take: with rounds, 4 is linear
and 16 is quadratic; all members of a secure sum do work for each other member, so 9 is what a pair takes.

    python benchmarks/scale.py [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from fedmerit.files.reports import read
from fedmerit.report.page.html import facts_of, render
from fedmerit.scoring.rewards import share_intervals, shares
from fedmerit.scoring.types import Scores
from fedmerit.verify import verify_folder
from in_memory import run_in_memory
from linear_federation import Federation

ROUNDS = (5, 20, 80)
MEMBERS = (3, 9, 27)
USUAL = 9
"""Members where rounds grow."""
CASES: dict[str, dict[str, str]] = {
    "reports": {},
    "reports, coordinator sees all": {"visibility": "coordinator"},
    "settled": {"method": "settled"},
}


def clocked(work: Callable[[], object]) -> float:
    """Seconds of the processor that this takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def of_rounds(home: Path, scoring: dict[str, str], rounds: int) -> dict[str, float]:
    """A run without masks, and what is done with its folder."""
    federation = Federation(home, USUAL, rounds, masks=False, settings={"scoring": scoring})
    last = 0.0
    with federation.begun():
        began = time.process_time()
        for number in range(1, rounds + 1):
            last = clocked(lambda number=number: federation.round(number))
            federation.passed.clear()  # what the tests look at
        ran = time.process_time() - began
        ended = clocked(federation.finish)
    folder = federation.folder
    found = {"all rounds": ran, "last round": last, "end of the run": ended}
    found["verify"] = clocked(lambda: list(verify_folder(folder)))
    found["page"] = clocked(lambda: render(facts_of(folder)))
    if "method" not in scoring:
        found["scores.csv read"] = clocked(lambda: read(folder / "scores.csv"))
    return found


def of_members(members: int) -> dict[str, float]:
    """A secure sum of 1,000 numbers, and intervals of shares with a floor and a cap."""
    rng = np.random.default_rng(0)
    vectors = [rng.normal(0, 0.01, 1000).astype(np.float32) for _ in range(members)]
    raw = rng.uniform(0.5, 2, members)
    names = tuple(f"client-{i}" for i in range(members))
    scores = Scores(
        score="ALPHA", clients=names, values=raw, raw=raw, gain=raw.sum(), stderr=np.full(members, 0.1)
    )
    limits = {"floor": 0.3 / members, "cap": 1.5 / members}
    divided = shares(scores, "fenced", **limits)
    return {
        "secure sum": clocked(lambda: run_in_memory(vectors, bound=1.0, seed=0)),
        "intervals of shares": clocked(lambda: share_intervals(scores, divided, **limits)),
    }


def measure() -> dict[str, Any]:
    """Seconds by what was done, for each number of rounds and of members."""
    grown: dict[str, dict[str, list[float]]] = {}
    for case, scoring in CASES.items():
        for rounds in ROUNDS:
            with tempfile.TemporaryDirectory() as home:
                for what, seconds in of_rounds(Path(home), scoring, rounds).items():
                    grown.setdefault(case, {}).setdefault(what, []).append(seconds)
    for members in MEMBERS:
        for what, seconds in of_members(members).items():
            grown.setdefault("members", {}).setdefault(what, []).append(seconds)
    rows = [
        {"case": case, "work": what, "seconds": seconds, "ratio": seconds[-1] / seconds[-2]}
        for case, each in grown.items()
        for what, seconds in each.items()
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "rounds": ROUNDS,
        "members": MEMBERS,
        "members where rounds grow": USUAL,
        "peak MiB": peak,
        "rows": rows,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    found = measure()
    for row in found["rows"]:
        seconds = "  ".join(f"{one:8.3f}" for one in row["seconds"])
        print(f"{row['case']:30} {row['work']:20} {seconds} s  x{row['ratio']:.1f}")
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), **found}, indent=1) + "\n"
    (options.out / "scale.json").write_text(text)


if __name__ == "__main__":
    main()
