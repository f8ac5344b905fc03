"""Does the allowance for training hold what it promises?

    python experiments/training_noise.py [--seeds 6] [--repeats 8] [--out FILE]

Rehearsals on fashion-mini, each repeated with another first model and batch order, show what training again
changes. The table compares it with what a single run allows for, and counts claims: those between members
who are equal, and those about a member with wrong labels. About 4 minutes on one core.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmerit import Scores
from fedmerit.config import from_dict
from fedmerit.report.source import read_source
from fedmerit.scoring.uncertainty import compare_pairs
from fedmerit.simulation.run import run

IID: dict[str, Any] = {"scheme": "iid", "clients": 5}
WRONG = "client-5"
SETUPS: dict[str, dict[str, Any]] = {
    "5 equal members, 3 rounds": {"partition": IID, "training": {"rounds": 3}},
    "5 equal members, 6 rounds": {"partition": IID, "training": {"rounds": 6}},
    "8 equal members, 10 rounds": {"partition": {**IID, "clients": 8}, "training": {"rounds": 10}},
    "6 members, Dirichlet 0.5, 6 rounds": {
        "partition": {"scheme": "dirichlet", "mu": 0.5, "clients": 6},
        "training": {"rounds": 6},
    },
    "5 equal members and one with 80 % wrong labels, 6 rounds": {
        "partition": {**IID, "clients": 6},
        "training": {"rounds": 6},
        "corruption": {"label_noise": {WRONG: 0.8}},
    },
}


def trained(setup: dict[str, Any], seed: int, repeat: int) -> Scores:
    """Return PHI of one run."""
    config = from_dict({
        "model": {"name": "mlp"}, "scoring": {"method": "settled"}, "secure_aggregation": {"enabled": False},
        "run": {"seed": seed, "repeat": repeat}, **setup,
        "training": {"local_epochs": 2, **setup["training"]},
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "run")
        account = read_source(Path(folder) / "run").account
    assert account is not None
    return account.scores()


def rms(values: Any) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def row(name: str, runs: list[list[Scores]]) -> str:
    """Return a line of the table; ``runs`` are the repeats of each seed."""
    every = [one for repeats in runs for one in repeats]
    training = rms([np.std([one.raw for one in repeats], axis=0, ddof=1) for repeats in runs])
    test = rms([one.stderr for one in every])
    scatter = rms([one.training.scatter for one in every if one.training is not None])
    claims = []
    for found in ([replace(one, training=None) for one in every], every):
        better = [compare_pairs(one).better for one in found]
        wrong = [place for place, one in enumerate(every[0].clients) if "wrong" in name and one == WRONG]
        last = [one[:, wrong].sum() == len(one) - 1 for one in better]
        any_ = [np.delete(one, wrong, axis=1).any() for one in better]
        claims.append(f"{np.mean(any_):.0%}" + (f", {np.mean(last):.0%}" if wrong else ""))
    points = " | ".join(f"{100 * one:.2f}" for one in (test, training, scatter))
    return f"| {name} | {points} | {claims[0]} | {claims[1]} |"


def lines(seeds: int, repeats: int) -> Iterator[str]:
    """Yield the table."""
    yield "# What training again changes, and what one run allows for"
    yield ""
    yield f"Settled scores in points, a small network on fashion-mini; {seeds} federations per line, each"
    yield f"trained {repeats} times (`python experiments/training_noise.py`). *Test set*: standard error of a"
    yield "score that the test set leaves. *Training*: standard deviation of a score over repeated trainings."
    yield "*Scatter*: what a single run estimates it at, from its own rounds. *Claims*: in how many runs some"
    yield "member is called significantly better than another, by the test set alone and with the allowance"
    yield "for training. Between equal members every claim is wrong. A member with wrong labels is left out;"
    yield "after the comma, in how many runs it is significantly below all others."
    yield ""
    yield "| members | test set | training | scatter | claims, test set alone | claims |"
    yield "|---|---|---|---|---|---|"
    for name, setup in SETUPS.items():
        runs = [[trained(setup, s, k) for k in range(1, repeats + 1)] for s in range(seeds)]
        yield row(name, runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tables" / "training-noise.md")
    given = parser.parse_args()
    given.out.write_text("\n".join(lines(given.seeds, given.repeats)) + "\n", encoding="utf-8")
