"""The exact Shapley value of the same random game in shapiq and pyDVL; run by `run.py --peers`.

python peers.py OUT.json N [N ...]
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np


def with_shapiq(values: np.ndarray, n: int) -> np.ndarray:
    """shapiq's exact computer, given all values at once."""
    import shapiq

    powers = 1 << np.arange(n)
    computer = shapiq.ExactComputer(lambda rows: values[rows.astype(int) @ powers], n_players=n)
    found = computer("SV", 1)
    return np.array([found[(i,)] for i in range(n)])


def with_pydvl(values: np.ndarray, n: int) -> np.ndarray:
    """pyDVL's exact permutation-free Shapley value over a utility that looks up the table."""
    from pydvl.valuation.dataset import Dataset
    from pydvl.valuation.methods import ShapleyValuation
    from pydvl.valuation.samplers import DeterministicUniformSampler
    from pydvl.valuation.stopping import NoStopping
    from pydvl.valuation.types import Sample
    from pydvl.valuation.utility.base import UtilityBase

    class Lookup(UtilityBase):
        def __call__(self, sample: Sample | None) -> float:
            mask = 0 if sample is None else sum(1 << int(i) for i in sample.subset)
            return float(values[mask])

    data = Dataset(np.zeros((n, 1)), np.zeros(n))
    method = ShapleyValuation(Lookup(), DeterministicUniformSampler(), NoStopping(), progress=False)
    method.fit(data)
    result = method.result
    return np.array([result.values[list(result.indices).index(i)] for i in range(n)])


def main() -> None:
    """Seconds by package and N, and the largest difference from the first package."""
    out, sizes = sys.argv[1], [int(text) for text in sys.argv[2:]]
    rows = []
    for n in sizes:
        values = np.random.default_rng(n).random(1 << n)
        for name, work in (("shapiq", with_shapiq), ("pyDVL", with_pydvl)):
            began = time.perf_counter()
            try:
                work(np.arange(8.0), 3)  # imports and first-time costs
                began = time.perf_counter()
                found = work(values, n)
            except Exception as error:  # a peer's API may have moved on: say so, and go on
                rows.append({"n": n, "package": name, "failed": f"{type(error).__name__}: {error}"[:200]})
                continue
            seconds = time.perf_counter() - began
            gain = float(values[-1] - values[0])
            rows.append(
                {"n": n, "package": name, "seconds": seconds, "sum_minus_gain": float(found.sum() - gain)}
            )
    versions = {name: version(name) for name in ("shapiq", "pydvl", "numpy")}
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"versions": versions, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
