"""The retraining game: every coalition trained from the same first model, as if the others did not exist.

For one client all coalitions that hold it train on the same batches, so a stack of coalitions needs no
padding and its first layer sees each image once. In the first round they also start from the same model:
each client trains once for all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedmerit.errors import InputError, ReportError
from fedmerit.scoring.types import Table
from fedmerit.scoring.validate import names_of
from fedmerit.simulation.coalitions import game as games
from fedmerit.simulation.coalitions.evaluator import Evaluator, Progress
from fedmerit.simulation.coalitions.strategies import Single
from fedmerit.simulation.models import Images, as_tensor, flatten, load_vector
from fedmerit.simulation.training import (
    Data,
    Method,
    Probe,
    TensorData,
    Trained,
    TrainingSettings,
    on_device,
    probe,
    train,
    train_many,
    train_shared,
)
from fedmerit.simulation.utilities import Utility

Store = Callable[[int, dict[str, float]], None]
"""Called with a finished coalition's bitmask and its utilities."""


@dataclass(frozen=True)
class Retraining:
    """How the coalitions were trained: ``stack`` at once, ``trained`` now, ``known`` from before."""

    method: str
    stack: int
    trained: int
    known: int
    seconds: float
    note: str | None = None


def retrain_tables(
    model: nn.Module,
    m0: npt.NDArray[Any] | Tensor,
    data: Sequence[Data],
    settings: TrainingSettings,
    seeds: Sequence[Sequence[int]],
    weights: Sequence[float] | npt.NDArray[np.float64],
    x: Images,
    y: npt.NDArray[Any] | Tensor,
    utilities: Sequence[str | Utility],
    *,
    clients: Sequence[str] = (),
    known: Mapping[int, Mapping[str, float]] | None = None,
    store: Store | None = None,
    stack: int = 64,
    stacked: bool | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Table], Retraining]:
    r"""The utility of every coalition's own federation after R rounds, one table per utility.

    .. math:: M_{r+1}(S) = M_r(S) + \sum_{i \in S} w_i (T_{r,i}(M_r(S)) - M_r(S)) / \sum_{i \in S} w_i

    where T_{r,i} is local training of client i with a fresh optimiser and the seed of (round, client).

    Args:
        model: gives architecture and device; its weights are overwritten.
        m0: the first model's vector, shape (P,).
        data: images and labels of each client.
        settings: epochs, batch size, Adam.
        seeds: one per round and client, shape (R, N): the run's own.
        weights: w_i, shape (N,).
        x: test images.
        y: test labels.
        utilities: names or resolved utilities.
        clients: names.
        known: coalitions that were finished before, by bitmask; they are not trained again.
        store: told of every coalition as soon as it is finished.
        stack: most coalitions that train at once on a GPU; they also finish together.
        stacked: True or False to insist; None stacks on a GPU.
        memory_limit: bytes that may be used.
        progress: told of (local trainings done, local trainings in all).
    """
    n = len(data)
    games.check_count(n)
    names = names_of(clients, None, "coalitions: ") or names_of((), n, "")
    w = np.asarray(weights, dtype=np.float64)
    games.coefficients([0], w)
    if len(w) != n or len(names) != n or any(len(row) != n for row in seeds) or not len(seeds):
        raise InputError(
            f"expected {n} weights, names and seeds a round, one per client, and at least 1 round"
        )
    evaluator = Evaluator(model, x, y, utilities, memory_limit=memory_limit)
    device, began = evaluator.device, time.perf_counter()
    start = evaluator.vector(m0, "M0")
    sets = [on_device(one, device) for one in data]
    each = 4 * evaluator.length * 8 + 3 * evaluator.per_image * settings.batch_size
    evaluator.check_memory(n, each, "retraining needs")
    found = {mask: dict(values) for mask, values in (known or {}).items()}
    todo = [mask for mask in range(1, 1 << n) if mask not in found]
    method: Method = "auto" if stacked is None else "stacked" if stacked else "loop"
    first = train_many(model, start, sets, settings, seeds[0], method) if todo else Trained([], "loop")
    together = first.method == "stacked"
    size = min(stack, (evaluator.memory - evaluator.need(n)) // each) if together else 1
    load_vector(model, start)
    seen = probe(model, sets[0]) if together else Probe()

    def local(rows: Tensor, round_: int, i: int) -> Tensor:
        """Client i's training of every row, shape (K, P)."""
        if together:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                return train_shared(model, rows.clone(), sets[i], settings, seeds[round_][i], seen)
            if len(rows) > 1:  # in two halves then
                torch.cuda.empty_cache()
                return torch.cat([local(half, round_, i) for half in rows.tensor_split(2)])
        return torch.stack([_train_one(model, row, sets[i], settings, seeds[round_][i]) for row in rows])

    held = np.array([[mask >> i & 1 for i in range(n)] for mask in todo], dtype=bool).reshape(-1, n)
    total, done = int(held.sum()) * len(seeds), 0
    judge = Single(model, evaluator.pool(n))

    def finish(masks: Sequence[int], vectors: Tensor) -> None:
        for mask, values in zip(masks, judge(judge.packing.pack(vectors)).tolist(), strict=True):
            found[mask] = dict(zip((u.name for u in evaluator.utilities), values, strict=True))
            if not np.isfinite(values).all():
                raise ReportError(f"the model of coalition {games.name(mask, names)} diverged in retraining")
            if store:
                store(mask, found[mask])

    if 0 not in found:
        finish([0], start[None])
    for begin in range(0, len(todo), size):
        inside = torch.as_tensor(held[begin : begin + size], device=device)
        shares = inside * torch.as_tensor(w, device=device)
        shares = (shares / shares.sum(1, keepdim=True)).float()
        current = start.repeat(len(inside), 1)
        for round_ in range(len(seeds)):
            move = torch.zeros_like(current)
            for i in range(n):
                rows = inside[:, i].nonzero()[:, 0]
                if len(rows):
                    once = as_tensor(first.vectors[i]).to(device)
                    trained = local(current[rows], round_, i) if round_ else once
                    move[rows] += shares[rows, i, None] * (trained - current[rows])
                done += len(rows)
                if progress:
                    progress(done, total)
            current += move
        finish(todo[begin : begin + size], current)
    seconds = time.perf_counter() - began
    record = Retraining(first.method, size, len(todo), len(known or {}), seconds, first.note)
    columns = {u.name: np.array([found[mask][u.name] for mask in range(1 << n)]) for u in evaluator.utilities}
    return {name: Table(values, names) for name, values in columns.items()}, record


def _train_one(
    model: nn.Module, start: Tensor, data: TensorData, settings: TrainingSettings, seed: int
) -> Tensor:
    load_vector(model, start)
    train(model, *data, settings, seed)
    return flatten(model)
