"""How costs grow: with members, with parameters, with test images. Numbers as JSON, curves as PNG and SVG.

One process, one machine, the best of a few turns: the masked sum of a round, the two evaluations a member
makes, and the table of all coalitions of a round (CPU: one model after another).

    python benchmarks/growth.py [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from fedmerit.simulation.analysis import Evaluator, Game
from fedmerit.simulation.models import build, flatten
from fedmerit.simulation.utilities import evaluate
from in_memory import run_in_memory

UTILITIES = ["expected-accuracy", "accuracy", "brier"]
MEMBERS = (3, 6, 9, 15, 30)
PARAMETERS = (10_000, 100_000, 1_000_000, 4_300_000)
IMAGES = (250, 500, 1000, 2000)


def best(work: Callable[[], object], turns: int = 3) -> float:
    """Seconds of the fastest turn."""
    seconds = []
    for _ in range(turns):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def masked_sum(members: int, parameters: int) -> float:
    """A whole round of secure aggregation, all members and the server."""
    rng = np.random.default_rng(0)
    vectors = [rng.normal(0, 0.01, parameters).astype(np.float32) for _ in range(members)]
    return best(lambda: run_in_memory(vectors, bound=1.0, seed=0))


def evaluations(members: int, images: int) -> float:
    """The 2N + 2 evaluations of a round."""
    model = build("cnn-pool", (32, 32, 3), 10)
    x, y = np.random.default_rng(0).integers(0, 256, (images, 32, 32, 3), np.uint8), np.arange(images) % 10
    return best(lambda: evaluate(model, x, y, UTILITIES)) * (2 * members + 2)


def coalitions(members: int, images: int) -> float:
    """All 2^N coalition models of a round."""
    model = build("cnn-pool", (32, 32, 3), 10)
    start, rng = flatten(model), np.random.default_rng(0)
    updates = torch.as_tensor(rng.normal(0, 1e-3, (members, len(start))).astype(np.float32))
    x, y = rng.integers(0, 256, (images, 32, 32, 3), np.uint8), np.arange(images) % 10
    game = Game(start, updates, [1.0] * members, "additive", [str(i) for i in range(members)])
    return best(lambda: Evaluator(model, x, y, UTILITIES).tables(game), turns=1)


def measure() -> list[dict[str, float | str]]:
    """One row per point of a curve."""
    rows: list[dict[str, float | str]] = []

    def add(work: str, grows: str, at: int, seconds: float) -> None:
        rows.append({"work": work, "grows with": grows, "at": at, "seconds": seconds})
        print(f"{work:14} {grows:12} {at:>9,} {seconds:8.3f} s", flush=True)

    for n in MEMBERS:
        add("masked sum", "members", n, masked_sum(n, 1_000_000))
        add("scoring", "members", n, evaluations(n, 500))
    for n in (3, 5, 7, 9):
        add("coalitions", "members", n, coalitions(n, 250))
    for p in PARAMETERS:
        add("masked sum", "parameters", p, masked_sum(9, p))
    for m in IMAGES:
        add("scoring", "test images", m, evaluations(9, m))
        add("coalitions", "test images", m, coalitions(5, m))
    return rows


def plot(rows: list[dict[str, float | str]], out: Path) -> None:
    """Three panels on logarithmic axes."""
    import altair as alt

    panels = []
    few = alt.Axis(tickCount=5, format="~s")
    plain = alt.Axis(tickCount=5, format="~g")
    for grows in ("members", "parameters", "test images"):
        data = alt.Data(values=[row for row in rows if row["grows with"] == grows])
        chart = alt.Chart(data, width=230, height=230, title=f"seconds against {grows}")
        panels.append(
            chart.mark_line(point=True).encode(
                x=alt.X("at:Q", scale=alt.Scale(type="log", nice=False, padding=12), axis=few, title=grows),
                y=alt.Y("seconds:Q", scale=alt.Scale(type="log"), axis=plain, title="seconds"),
                color=alt.Color("work:N", title=None, scale=alt.Scale(scheme="tableau10")),
                strokeDash=alt.StrokeDash("work:N", title=None),
            )
        )
    figure = alt.hconcat(*panels)
    figure.save(str(out / "growth.svg"))
    figure.save(str(out / "growth.png"), scale_factor=2)


def main() -> None:
    """Measure, write, plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = measure()
    text = json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n"
    (options.out / "growth.json").write_text(text)
    plot(rows, options.out)


if __name__ == "__main__":
    main()
