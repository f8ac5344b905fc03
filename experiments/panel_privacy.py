"""What a judge's column tells of its patients: inversion and membership attacks, carried out; and epsilon.

::

    python experiments/panel_privacy.py [--seeds 0:5] [--out results/panel/privacy.jsonl]

Six members train on fashion-mini; the judge's m samples are test images that nobody trains on, and so are
those that it does not have. The attacker is a member: it knows all models, coordinates and images of its own.

- inversion: each row of the first dense layer's gradient, taken as an image; its cosine with the most similar
  image of the judge, and with that of as many images that the judge does not have.
- membership: the gradient of one sample beside the column, by its cosine or by the cosine of what the
  attacker's own samples leave unexplained; the area under the ROC curve (AUC), .5 is a guess.
- epsilon: columns with clipped gradients and normal noise; C is the median length of the attacker's samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from panel import COUNT, EPOCHS, LEAST, ROUNDS, UTILITY, VERSIONS, Array, Home, short, trained  # noqa: E402

from fedmerit import data  # noqa: E402
from fedmerit.config import from_dict  # noqa: E402
from fedmerit.errors import MissingExtra  # noqa: E402
from fedmerit.protocol.column import coordinates, halves, rounded, shown  # noqa: E402
from fedmerit.protocol.epsilon import error, multiplier, noised  # noqa: E402
from fedmerit.scoring.sampling import auc  # noqa: E402
from fedmerit.simulation.direction import direction  # noqa: E402
from fedmerit.simulation.setup import prepare  # noqa: E402

SIZES = (300, 75)
NOISES = (0.0, 2.0, 4.0, 8.0, 16.0)
EPSILONS = (4.0, 8.0, 16.0)
DELTA = 1e-5
OTHERS = 300  # images that the judge does not have, and as many of the attacker's own
EXPLAINED = 100  # directions of the attacker's own gradients that are taken out
FIRST = (128, 784)  # the first dense layer


def attacked(seed: int, *, toy: bool = False) -> dict[str, Any]:
    """Everything about one seed."""
    began = time.perf_counter()
    training = {"rounds": 2 if toy else ROUNDS, "local_epochs": 1 if toy else EPOCHS}
    raw: dict[str, Any] = {
        "run": {"seed": seed, "device": "cpu"},
        "data": {"name": "fashion-mini", "test_size": 300},
        "partition": {"clients": 6, "scheme": "dirichlet", "mu": 5.0},
        "training": training,
        "model": {"name": "mlp"},
        "scoring": {"utilities": [UTILITY]},
    }
    federation, images = prepare(from_dict(raw)), data.load("fashion-mini")
    models, moves = trained(Home(federation, ()))
    rng, network, length = np.random.default_rng(seed), federation.network, models.shape[1]
    order, own = rng.permutation(600), rng.permutation(len(images.y_train))[:OTHERS]
    held, away = order[:OTHERS], order[OTHERS:]
    x = np.concatenate([images.x_test[held], images.x_test[away], images.x_train[own]])
    y = np.concatenate([images.y_test[held], images.y_test[away], images.y_train[own]])
    steps = list(itertools.pairwise(models))
    drawn = [coordinates(f"{seed}", t, length, COUNT) for t in range(len(steps))]
    changes = np.diff(models, axis=0)
    publics = [changes[max(0, t - 5) : t][:, places] for t, places in enumerate(drawn)]
    singles, bare = [], []
    for t, step in enumerate(steps):
        each = direction(
            network, *step, x, y, UTILITY, blocks=[np.array([k]) for k in range(len(y))], points=1
        )
        singles.append(each.blocks[:, drawn[t]])
        bare.append([each.blocks[: size // 2].mean(axis=0) for size in (LEAST, *SIZES)])
    parts = {m: [np.arange(0, m, 2), np.arange(1, m, 2)] for m in SIZES}
    found: dict[str, Any] = {
        "seed": seed,
        "inversion": inversion(x, singles, [rows[: len(SIZES) + 1] for rows in bare], drawn, publics, seed),
        "membership": [],
        "epsilon": [],
    }
    clips = [float(np.median(np.linalg.norm(rows[-OTHERS:, halves(COUNT)[0]], axis=1))) for rows in singles]
    for m in SIZES:
        slopes = [np.stack([rows[part].mean(axis=0) for part in parts[m]]) for rows in singles]
        for noise in NOISES:
            made = [shown(g, publics[t], noise, seed, m, t)[0] for t, g in enumerate(slopes)]
            found["membership"].append({"samples": m, "noise": noise, **membership(made, singles, m)})
        worth = np.array([length / COUNT * (moves[t][:, drawn[t]] @ _one(g)) for t, g in enumerate(slopes)])
        for budget in EPSILONS:
            try:
                z = multiplier(budget, DELTA, len(steps))
            except MissingExtra:
                break
            cut = [np.stack([_cut(rows[part], h, clips[t]) for h, part in enumerate(parts[m])])
                   for t, rows in enumerate(singles)]  # fmt: skip
            noisy = [noised(g, [m // 2] * 2, clips[t], z, seed, m, t) for t, g in enumerate(cut)]
            made = [shown(g, publics[t], 0.0)[0] for t, g in enumerate(noisy)]
            lengths = np.linalg.norm(moves, axis=2) * np.array(clips)[:, None]
            found["epsilon"].append(
                {
                    "samples": m,
                    "epsilon": budget,
                    **membership(made, singles, m),
                    "error": [error(lengths[:, i], m, 1.0, z, COUNT / length) for i in range(len(moves[0]))],
                    "worth": worth.sum(axis=0).tolist(),
                    "worth clipped": sum(
                        length / COUNT * (moves[t][:, drawn[t]] @ _one(g)) for t, g in enumerate(cut)
                    ).tolist(),
                }
            )
    return {**found, "seconds": round(time.perf_counter() - began, 1), "machine": VERSIONS}


def _one(rows: Array) -> Array:
    """What is shown of both halves, each at its own coordinates."""
    return np.concatenate([row[half] for row, half in zip(rows, halves(rows.shape[1]), strict=True)])


def _cut(rows: Array, h: int, clip: float) -> Array:
    """The mean of clipped gradients at the coordinates of a half, 0 at the others; as `epsilon.clipped`."""
    made, half = np.zeros(rows.shape[1]), halves(rows.shape[1])[h]
    sizes = np.maximum(np.linalg.norm(rows[:, half], axis=1, keepdims=True), clip)
    made[half] = (rows[:, half] * (clip / sizes)).mean(axis=0)
    return made


# ------------------------------------------------------------------------------------------------- inversion


def inversion(
    x: Array,
    singles: list[Array],
    bare: list[list[Array]],
    drawn: list[Array],
    publics: list[Array],
    seed: int,
) -> list[dict[str, Any]]:
    """The most similar image of the judge and of somebody else, over all rounds and rows."""
    pictures, found = x.reshape(len(x), -1) / 127.5 - 1.0, []  # as networks get them
    for which, m in enumerate((LEAST, *SIZES)):
        mine, others = pictures[: m // 2], pictures[OTHERS : OTHERS + m // 2]
        for noise in (None, 0.0, 2.0):  # None: the whole gradient, without drawn coordinates
            best, rival = [], []
            for t, rows in enumerate(bare):
                known, places = rows[which].astype(np.float64), np.arange(FIRST[0] * FIRST[1])
                if noise is not None:
                    made = shown(
                        np.stack([singles[t][: m // 2].mean(axis=0)] * 2), publics[t], noise, seed, m, t
                    )
                    half = halves(COUNT)[0]
                    column, _ = rounded([made[0]])
                    known = np.zeros(rows[which].size)
                    known[drawn[t][half]] = column[0, half]
                    places = np.sort(drawn[t][half])
                    places = places[places < FIRST[0] * FIRST[1]]
                layer, seen = np.zeros(FIRST), np.zeros(FIRST, bool)
                layer.flat[places], seen.flat[places] = known[places], True
                for row, at in zip(layer, seen, strict=True):
                    if np.count_nonzero(row) > 20:
                        best.append(_similar(row[at], mine[:, at]))
                        rival.append(_similar(row[at], others[:, at]))
            found.append(
                {"samples": m // 2, "noise": noise, "judge": max(best), "others": max(rival),
                 "median judge": float(np.median(best)), "median others": float(np.median(rival))}
            )  # fmt: skip
    return found


def _similar(row: Array, images: Array) -> float:
    """The largest absolute cosine."""
    sizes = np.linalg.norm(images, axis=1) * np.linalg.norm(row)
    return float(np.max(np.abs(images @ row) / np.where(sizes > 0, sizes, np.inf)))


# ------------------------------------------------------------------------------------------------ membership


def membership(made: list[Array], singles: list[Array], m: int) -> dict[str, Any]:
    """The AUC from each round and from all, by two attacks."""
    column, _ = rounded(made)
    labels = np.repeat([1, 0], [m, OTHERS])
    found: dict[str, Any] = {}
    for attack, explained in (("cosine", 0), ("residual", EXPLAINED)):
        rounds = []
        for shown_, rows in zip(column, singles, strict=True):
            score = np.zeros(m + OTHERS)
            for half in halves(COUNT):
                chosen = np.concatenate([rows[:m, half], rows[OTHERS : 2 * OTHERS, half]]).astype(np.float64)
                seen = shown_[half].astype(np.float64)
                if explained:
                    basis = _basis(rows[-OTHERS:, half].astype(np.float64), explained)
                    chosen, seen = chosen - (chosen @ basis.T) @ basis, seen - (seen @ basis.T) @ basis
                sizes = np.linalg.norm(chosen, axis=1)
                score += chosen @ seen / np.where(sizes > 0, sizes, np.inf) / np.linalg.norm(seen)
            rounds.append(score)
        found[attack] = {
            "rounds": [_area(score, labels) for score in rounds],
            "all": _area(np.sum(rounds, axis=0), labels),
        }
    return found


def _area(score: Array, labels: Array) -> float:
    return float(auc(np.stack([np.zeros_like(score), score], axis=1), labels))


def _basis(rows: Array, count: int) -> Array:
    """The main directions of some gradients, orthonormal, (count, n)."""
    values, vectors = np.linalg.eigh(rows @ rows.T)
    chosen = vectors[:, -count:] / np.sqrt(np.maximum(values[-count:], 1e-30))
    return chosen.T @ rows


def main() -> None:
    """Attack with every seed that is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", default="0:5", help="first:last, without the last")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "panel" / "privacy.jsonl")
    parser.add_argument("--toy", action="store_true", help="two rounds, to see that everything runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.out
    file.parent.mkdir(parents=True, exist_ok=True)
    there = {json.loads(line)["seed"] for line in file.read_text().splitlines()} if file.exists() else set()
    for seed in sorted(set(range(*map(int, options.seeds.split(":")))) - there):
        found = short(attacked(seed, toy=options.toy))
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(found) + "\n")
        print(f"seed {seed}: {found['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
