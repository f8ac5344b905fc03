"""Run one cell with the engine in one process, and keep what tables and later questions need."""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import Cell, Result, datasets
from compact import load as load_compact
from engine import BothGames

from fedmerit import __version__, config, data
from fedmerit.identity import number
from fedmerit.scoring.scores import from_blocks
from fedmerit.simulation.analysis import RETRAINING
from fedmerit.simulation.plan import calibration
from fedmerit.simulation.run import Progress
from fedmerit.simulation.setup import prepare, read, resolve
from fedmerit.storage.run_folder import Folder

KEPT = ("empty", "grand", "alone", "without", "se_alpha", "se_alpha_total", "solo", "solo_empty", "cosine")


class Overtime(Exception):
    """The time that was given is over."""


def convert(folder: Path | None, names: Sequence[str], into: Path) -> dict[str, str]:
    """Each dataset as .npz, once; without a folder all of them are the dataset that comes with fedmerit."""
    titles = {}
    for name in names:
        how = datasets()[name]
        if folder is None:
            found, extra = data.load("fashion-mini"), {}
        else:
            found, extra = load_compact(folder, how.get("source", name), how.get("group"))
        arrays = {key: getattr(found, key) for key in ("x_train", "y_train", "x_test", "y_test", "classes")}
        if folder is None and "group" in how:
            arrays["group_train"] = np.arange(len(found.y_train)) % 4
        elif found.group_train is not None:
            arrays["group_train"] = found.group_train
        if extra and "without" in how:
            kept = ~extra[how["without"]]
            arrays |= {key: arrays[key][kept] for key in ("x_test", "y_test")}
        if extra and "kept" in how:
            arrays = only(arrays, how["kept"])
        np.savez(into / f"{name}.npz", **arrays)
        titles[name] = "; ".join(found.notes)
    return titles


def only(arrays: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Images of these classes alone, which are numbered anew in this order."""
    known = list(arrays["classes"])
    if missing := [name for name in classes if name not in known]:
        raise SystemExit(f"kept: no class {missing[0]!r}, expected some of {', '.join(known)}")
    numbers = np.full(len(known), -1)
    numbers[[known.index(name) for name in classes]] = np.arange(len(classes))
    found: dict[str, Any] = {"classes": tuple(classes)}
    for part in ("train", "test"):
        labels = numbers[arrays[f"y_{part}"]]
        found |= {key: value[labels >= 0] for key, value in arrays.items() if key.endswith(f"_{part}")}
        found[f"y_{part}"] = labels[labels >= 0]
    return found


def subset(file: Path, count: int, seed: int, into: Path) -> Path:
    """The dataset with ``count`` training images, as many of each class as the whole has in proportion."""
    with np.load(file, allow_pickle=False) as arrays:
        content = dict(arrays)
    y, rng = content["y_train"], np.random.default_rng([seed, count])
    order = rng.permutation(len(y))
    place = np.empty(len(y))
    for label in np.unique(y):  # each class spread evenly over [0, 1), then the first ones taken
        own = order[y[order] == label]
        place[own] = (np.arange(len(own)) + rng.random()) / len(own)
    chosen = np.sort(np.argsort(place, kind="stable")[:count])
    content |= {key: content[key][chosen] for key in content if key.endswith("_train")}
    np.savez(into / "subset.npz", **content)
    return into / "subset.npz"


def scratch(parent: str | None = None) -> str:
    """A temporary folder, in memory where that is large."""
    shared = Path("/dev/shm")  # ledger and scores are written every round
    if parent is None and shared.is_dir() and shutil.disk_usage(shared).free > 8 << 30:
        parent = str(shared)
    return tempfile.mkdtemp(prefix="fedmerit-cell-", dir=parent)


class Scratch(Folder):
    """A run folder that is deleted after the run, so nobody resumes it: it holds no checkpoints.

    With solo models those of a round are as large as all members' models.
    """

    def save_checkpoint(self, name: str, number: int, arrays: Any) -> str:
        """Write nothing."""
        return ""


def config_of(cell: Cell, path: Path) -> tuple[config.Config, dict[str, Any]]:
    """The config of a cell on a dataset, and its ``experiment`` section."""
    settings = {section: dict(values) for section, values in cell.settings.items()}
    settings["data"] |= {"name": "npz", "path": str(path)}
    settings |= {"run": {"seed": cell.seed}, "secure_aggregation": {"enabled": False}}
    settings["scoring"] = {"method": "reports"} | settings["scoring"]
    settings["scoring"].pop("disclose_samples", None)  # in the keys of finished cells; no setting any more
    special, training = settings.pop("experiment", {}), settings["training"]
    score = training.pop("weight_score", "ALPHA")
    if training.get("weights") == "current-scores":  # no setting of the package: `engine` weighs
        training["weights"] = "scores"
        special = {"weights": score} | special
    return config.from_dict(settings), special


def probe(cell: Cell, path: Path) -> tuple[float, float]:
    """Seconds per trained sample and per evaluated image, measured here in a few seconds."""
    made, _ = config_of(cell, path)
    per_image, per_sample = calibration(prepare(made, pool_key=bytes(32)))
    return per_sample, per_image


def run_cell(
    cell: Cell,
    file: Path,
    title: str,
    *,
    jobs: int = 1,
    loop: bool = False,
    phi: bool = True,
    deadline: float = float("inf"),
    unfinished: Path | None = None,
) -> Result:
    """Run it; `Overtime` when the deadline (as of ``time.time``) passes.

    Coalitions that were trained again are kept in the folder ``unfinished`` until the cell is finished, so
    another call need not train them once more.
    """
    began, folder = time.perf_counter(), Path(scratch())
    spent: dict[str, float] = {}
    mark = ["setup", began]

    def watch(progress: Progress) -> None:
        now = time.perf_counter()
        if progress.stage != "note":
            spent[mark[0]] = spent.get(mark[0], 0.0) + now - mark[1]
            mark[:] = [progress.stage, now]
        if time.time() > deadline:
            raise Overtime(str(cell))

    try:
        path = subset(file, cell.subset, cell.seed, folder) if cell.subset else file
        made, special = config_of(cell, path)
        made, _ = resolve(made, read(made))
        with Scratch(folder / "run", made) as opened:
            engine = BothGames(made, opened, watch, loop=loop, phi=phi, special=special)
            trained = unfinished / f"{cell.name}.jsonl" if unfinished and engine.truth else None
            if trained:
                (engine.truth.folder / RETRAINING).symlink_to(trained.resolve())
            document = engine.run()
            if trained:
                trained.unlink(missing_ok=True)
            looked = [dict(record.body) for record in opened.ledger.records("analysis")]
            total = time.perf_counter() - began
            spent[mark[0]] = spent.get(mark[0], 0.0) + time.perf_counter() - mark[1]
            return {
                "name": cell.name,
                "key": cell.key,
                "dataset": cell.dataset,
                "title": title,
                "subset": cell.subset,
                "settings": cell.settings,
                "seed": cell.seed,
                "guess": cell.guess,
                "jobs": jobs,
                "loop": loop,
                "tf32": engine.federation.training.tf32,
                "seconds": {"total": round(total, 1), **{k: round(v, 1) for k, v in spent.items()}},
                "machine": machine(),
                "coalitions": _evaluation(looked),
                "samples": {client.name: len(client.y) for client in engine.federation.clients},
                "test_images": len(engine.federation.pool),
                "clients": document["clients"],
                "utilities": _utilities(document, engine.renormalised, engine.other_truth),
                "phi": _phi(engine.phi.rounds),
                "phi_without": {name: str(error) for name, (error, _) in engine.phi.without.items()},
                "halves": engine.halves.kept() if engine.halves else {},
                "cosine_model": _short(engine.cosines),
                "whole_run": _short(engine.whole_run),
                "retrained": _retrained(folder / "run" / "tables" / "retrained.npz"),
                "sampling_error": _sampling_error(folder / "run" / "tables"),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def machine() -> dict[str, str]:
    """Where this runs."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if cuda else "CPU",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "scipy": importlib.metadata.version("scipy"),
        "fedmerit": __version__,
    }


def _utilities(
    document: Mapping[str, Any],
    renormalised: Sequence[Mapping[str, Any]],
    other_truth: Mapping[str, list[list[float]]],
) -> dict[str, Any]:
    """Per utility: the reports of every round in both games, and the ground truth."""
    found = {}
    for utility, part in {document["utility"]: document, **document["companions"]}.items():
        scored = [one for one in part["rounds"] if one["reports"] is not None]
        rounds = []
        for one, other in itertools.zip_longest(scored, renormalised):
            reports = {key: _short(one["reports"][key]) for key in KEPT if key in one["reports"]}
            rounds.append({"round": one["round"], "participants": one["participants"], **reports})
            if other is not None:
                rounds[-1]["renormalised"] = {key: _short(values) for key, values in other[utility].items()}
        found[utility] = {"rounds": rounds, "truth": _short(part.get("truth", {}))}
        if utility in other_truth:
            rounds_known, values = "rounds" in found[utility]["truth"], _short(other_truth[utility])
            key = "rounds renormalised" if rounds_known else "ROUND-SV renormalised"
            found[utility]["truth"][key] = values if rounds_known else values[-1]
    return found


def _phi(rounds: Mapping[int, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Per utility and round: Aumann-Shapley scores, their errors, products by block, and the rest."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number_, each in sorted(rounds.items()):
        for utility, one in each.items():
            made = from_blocks(one["blocks"], one["sizes"], one["participants"])
            stderr = None if made.stderr is None else made.stderr.tolist()
            scores = {"phi": made.values.tolist(), "stderr": stderr}
            found.setdefault(utility, []).append(_short({"round": number_, **scores, **one}))
    return found


def _evaluation(looked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How the coalitions of the rounds were evaluated, and how far from float32 at most."""
    if not looked:
        return {}
    deviations = [number(value) for body in looked for value in body.get("deviation", {}).values()]
    return {
        "methods": sorted({str(body["method"]) for body in looked}),
        "largest_deviation": max(deviations, default=0.0),
    }


def _retrained(file: Path) -> dict[str, Any]:
    """The utilities of all retrained coalitions, by bitmask."""
    if not file.exists():
        return {}
    with np.load(file, allow_pickle=False) as arrays:
        return {
            key.removeprefix("table/"): _short(arrays[key].tolist())
            for key in arrays.files
            if key.startswith("table/")
        }


def _sampling_error(folder: Path) -> dict[str, list[float]]:
    """Where Shapley values of rounds were sampled: per utility the standard error of their mean."""
    squares: dict[str, np.ndarray] = {}
    files = sorted(folder.glob("round-*.npz"))
    for file in files:
        with np.load(file, allow_pickle=False) as arrays:
            for key in arrays.files:
                if key.startswith("stderr/"):
                    utility = key.removeprefix("stderr/")
                    squares[utility] = squares.get(utility, 0.0) + arrays[key] ** 2
    return {utility: _short((np.sqrt(sum_) / len(files)).tolist()) for utility, sum_ in squares.items()}


def _short(value: Any) -> Any:
    """Numbers with nine digits, whatever they are in."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return value
