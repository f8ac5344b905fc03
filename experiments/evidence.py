"""Finished cells by what they are for, and the few ways in which FINDINGS.md counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grid
from cells import Result, Row
from grid import settled
from measures import compare, reports
from sections import done, table

from fedmerit import agreement

TITLES = {
    "expected-accuracy": "expected accuracy",
    "accuracy": "accuracy",
    "brier": "Brier",
    "neg-loss": "−cross-entropy",
}
PAIR = ("expected-accuracy", "accuracy")
BOTH = {"cifar10": "CIFAR-10", "brain_mri": "Brain-MRI"}
OURS = "summed alpha (ours)"
CHANCE = 0.05
"""A difference with a smaller p-value is called beyond chance."""
MARGIN = 0.05
"""Scores are as close as each other if the 95 % interval of the mean difference lies within it."""
LAST = 10**6
"""A round beyond all: the last one of a run."""
Facts = dict[str, Any]
Claims = dict[str, bool]


class Evidence:
    """The finished cells by experiment, dataset and row, and the paper's numbers."""

    def __init__(self, rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> None:
        self.rows, self.results, self.paper = rows, results, paper

    def cells(self, experiment: str, dataset: str, row: str = "") -> list[Result]:
        """Finished cells of one row of the plan."""
        for one in self.rows:
            if (one.experiment, one.dataset, one.row) == (experiment, dataset, row):
                return done(one, self.results)
        raise SystemExit(f"no row {row!r} of {experiment} with {dataset} in the plan")

    def said(self, label: str, metric: str, dataset: str, score: str) -> float:
        """A number of the paper."""
        for one in self.paper["numbers"]:
            if (one["label"], one["metric"], one["dataset"], one["score"]) == (label, metric, dataset, score):
                return float(one["mean"])
        raise SystemExit(f"paper.json: no {metric} of {score} on {dataset} in {label}")


def spearman(
    cells: Sequence[Result], score: str, utility: str, truth: str, against: str | None = None
) -> list[float]:
    """Of one score at the last round, one number a cell."""
    return compare(cells, utility, LAST, truth, against).get(score, {}).get("spearman", [])


def close(x: Any, y: Any) -> float | None:
    """Spearman of two vectors; None where one of them is constant."""
    return agreement(settled(x), settled(y)).spearman


def agree(x: Any, y: Any) -> float:
    """The same where it must be defined."""
    found = close(x, y)
    if found is None:
        raise SystemExit(f"no Spearman: {x} or {y} is constant")
    return found


def lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table as one fact."""
    return "\n".join(table(head, body)).rstrip("\n")


def mean(values: Sequence[float | None]) -> float:
    """Of those that are defined, on the grid; there must be one."""
    known = [value for value in values if value is not None]
    if not known:
        raise SystemExit("FINDINGS.md: a result that it speaks of is not there yet")
    return grid.mean(known)


def between(values: Sequence[float], form: str) -> str:
    """The least and the largest."""
    return f"{grid.text(min(values), form)} to {grid.text(max(values), form)}"


def every_round(results: Mapping[str, Result]) -> Iterator[Any]:
    """Reports of all rounds of all cells and utilities."""
    for name in sorted(results):
        for utility in results[name]["utilities"]:
            yield from reports(results[name], utility)
