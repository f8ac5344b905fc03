"""From a table of 2^N utilities to Shapley values: N = 10, 15, 20 (and 24), against the plain definition.

    python benchmarks/values.py [--out benchmarks/results]

`run.py --peers` measures shapiq and pyDVL on the same tables in a throw-away environment.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
from machine import machine

from fedmerit import Table, shapley


def seconds(work, repeats: int = 3) -> float:  # type: ignore[no-untyped-def]
    """The fastest of a few runs."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def by_definition(values: np.ndarray, n: int) -> np.ndarray:
    """Eq. 1 with the inverse binomial, one coalition after another."""
    from math import comb

    out = np.zeros(n)
    for mask in range(1 << n):
        size = mask.bit_count()
        for i in range(n):
            if not mask >> i & 1:
                out[i] += (values[mask | 1 << i] - values[mask]) / (n * comb(n - 1, size))
    return out


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = []
    for n in (10, 15, 20, 24):
        values = np.random.default_rng(n).random(1 << n)
        table = Table(values)
        ours = seconds(lambda table=table: shapley(table))
        row = {"n": n, "seconds": ours}
        if n <= 15:
            row["definition_seconds"] = seconds(lambda v=values, n=n: by_definition(v, n), repeats=1)
            row["ratio"] = row["definition_seconds"] / ours
        rows.append(row)
        print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {"machine": machine(), "rows": rows, "peak_MiB_at_24": peak}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "values.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
