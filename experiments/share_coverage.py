"""Do the intervals of shares hold what they promise?

    python experiments/share_coverage.py [--repeats 2000] [--out experiments/tables/share-coverage.md]

A cell draws scores around known true ones, with errors that are equally correlated between members, and asks
how often the 95 % interval of a share holds the share that the same rule pays by the true scores. It needs
only numpy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from fedmerit import Scores, share_intervals, shares
from fedmerit.scoring.rewards import Rule

Errors = Literal["standard errors", "8 blocks"]
Truth = Literal["alike", "spread", "a quarter null", "one far ahead", "all null but one"]
RULES: tuple[Rule, ...] = ("fair", "fenced")
BLOCKS = 8
NOISE = 0.2
"""Standard error of a score; true scores are 1 on average."""


@dataclass(frozen=True)
class Cell:
    """One case."""

    n: int
    truth: Truth
    errors: Errors
    correlation: float

    @property
    def true(self) -> np.ndarray:
        """The scores without error."""
        if self.truth == "alike":
            return np.ones(self.n)
        if self.truth == "spread":
            return np.linspace(0.4, 1.6, self.n)
        found = np.linspace(0.8, 1.2, self.n)
        if self.truth == "a quarter null":
            found[: max(1, self.n // 4)] = 0.0
        elif self.truth == "all null but one":
            found[:-1], found[-1] = 0.0, self.n
        else:
            found[-1] = self.n
        return found

    @property
    def covariance(self) -> np.ndarray:
        """Equal correlation between all members; no less than a covariance allows."""
        rho = max(self.correlation, -0.9 / (self.n - 1))
        return NOISE**2 * (rho + (1 - rho) * np.eye(self.n))


CELLS = [
    Cell(n, truth, errors, correlation)
    for n in (3, 9, 20)
    for truth in ("alike", "spread", "a quarter null", "one far ahead")
    for errors, correlation in (("standard errors", 0.0), ("standard errors", -0.1), ("8 blocks", 0.3))
]  # fmt: skip


def scores_of(cell: Cell, raw: np.ndarray, rng: np.random.Generator) -> Scores:
    """The scores as they were measured."""
    named = {"score": "PHI", "clients": tuple(f"m{i}" for i in range(cell.n)), "gain": float(cell.n)}
    if cell.errors == "standard errors":
        return Scores(values=raw, raw=raw, stderr=np.full(cell.n, NOISE), **named)
    away = rng.multivariate_normal(np.zeros(cell.n), BLOCKS * cell.covariance, size=BLOCKS)
    blocks = cell.true + away
    raw = blocks.mean(axis=0)
    stderr = np.sqrt(((blocks - raw) ** 2).sum(axis=0) / BLOCKS / (BLOCKS - 1))
    return Scores(values=raw, raw=raw, stderr=stderr, blocks=blocks, sizes=np.ones(BLOCKS), **named)


def coverage(cell: Cell, repeats: int, seed: int = 0) -> dict[str, tuple[float, float, float]]:
    """Rule -> part of all intervals that hold the true share, mean width, and root mean square error."""
    rng = np.random.default_rng(seed)
    noise = rng.multivariate_normal(np.zeros(cell.n), cell.covariance, size=repeats)
    exact = Scores(
        score="PHI", clients=tuple(f"m{i}" for i in range(cell.n)), values=cell.true, raw=cell.true,
        gain=float(cell.n),
    )  # fmt: skip
    found: dict[str, list[tuple[float, float, float]]] = {rule: [] for rule in RULES}
    for one in noise:
        scores = scores_of(cell, cell.true + one, rng)
        for rule in RULES:
            divided, truth = shares(scores, rule), shares(exact, rule)
            spans = share_intervals(scores, divided)
            assert spans is not None
            for name, (low, high) in spans.items():
                inside = low <= truth[name] <= high
                found[rule].append((float(inside), high - low, (divided[name] - truth[name]) ** 2))
    summed = {rule: np.mean(values, axis=0) for rule, values in found.items()}
    return {rule: (float(a), float(b), float(c**0.5)) for rule, (a, b, c) in summed.items()}


def lines(repeats: int) -> Iterator[str]:
    """The table."""
    yield f"Coverage of 95 % intervals of shares: {repeats} repetitions a cell, standard error {NOISE} of a"
    yield "mean score of 1. Width and root mean square error are in parts of an equal share."
    yield ""
    yield (
        "| members | true scores | errors | correlation | fair: coverage | width | error "
        "| fenced: coverage | width | error |"
    )
    yield "|---" * 10 + "|"
    for cell in CELLS:
        told = [f"{cell.n}", cell.truth, cell.errors, f"{cell.correlation:g}"]
        for held, width, error in coverage(cell, repeats).values():
            told += [f"{held:.3f}", f"{width * cell.n:.2f}", f"{error * cell.n:.3f}"]
        yield "| " + " | ".join(told) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tables" / "share-coverage.md")
    given = parser.parse_args()
    given.out.write_text("\n".join(lines(given.repeats)) + "\n")
