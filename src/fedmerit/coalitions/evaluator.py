"""All coalition models of a round on the whole test set, by the fastest way that agrees with float32.

On a CPU that is one model after another. On a GPU a short measurement decides between one model at a time and
a stack of them, in half precision, TF32 or float32, and for long jobs compiled; every candidate is held
against float32 on a sample of coalitions, and what was chosen and how far it strays is recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedmerit.coalitions import game as games
from fedmerit.coalitions.choosing import Record, choose, plain
from fedmerit.coalitions.strategies import Pool, Single, Stacked, Strategy
from fedmerit.errors import FedmeritError, InputError, ReportError
from fedmerit.models import Images, as_tensor, prepare, state_length
from fedmerit.types import Table
from fedmerit.utilities import (
    Utility,
    balance,
    check_labels,
    check_logits,
    check_range,
    device_of,
    evaluation,
    float32,
    resolve_all,
)

CPU_BATCH = 250
CHECKED = 16
"""Coalitions on which a strategy is measured and held against float32, nobody and everybody among them."""
Progress = Callable[[int, int], None]
"""Called with (coalitions done, coalitions in all)."""


@dataclass(frozen=True)
class _Round:
    """M0 (P,), the updates U_i (N, P), their weights and the game."""

    m0: Tensor
    updates: Tensor
    weights: npt.NDArray[np.float64]
    game: str


class Evaluator:
    """Evaluates coalition models on one test set; what it learnt about the device serves all rounds.

    Args:
        model: gives architecture and, unless ``device`` is given, the device. Left as it is.
        x: test images, shape (m, H, W, C).
        y: labels, shape (m,).
        utilities: names or resolved utilities.
        device: where to evaluate.
        memory_limit: bytes that may be used there; by default most of what is free.
        tolerance: largest deviation from float32 that a faster strategy may have, in any utility.
        compiled: whether to try ``torch.compile``; None: only for jobs that take half a minute without.
        method: ``auto``, ``single`` (float32) or ``stacked`` (float32).
    """

    def __init__(
        self,
        model: nn.Module,
        x: Images,
        y: npt.NDArray[Any] | Tensor,
        utilities: Sequence[str | Utility],
        *,
        device: torch.device | str | None = None,
        memory_limit: int | None = None,
        tolerance: float = 2e-3,
        compiled: bool | None = None,
        method: str = "auto",
    ) -> None:
        if method not in ("auto", "single", "stacked"):
            raise InputError(f"method must be 'auto', 'single' or 'stacked', got {method!r}")
        self.model = model
        self.device = device_of(model) if device is None else torch.device(device)
        self.utilities = resolve_all(utilities)
        self.tolerance, self.compiled, self.method = tolerance, compiled, method
        self.length = state_length(model)
        self.memory = _free_memory(self.device) if memory_limit is None else memory_limit
        self.images = as_tensor(x)
        self.labels = check_labels(y, len(self.images)).to(self.device)
        classes, self.per_image = _try_forward(model, self.images[:1], self.labels[:1])
        check_range(self.labels, classes)
        if any(utility.balanced for utility in self.utilities):
            balance(self.labels, classes)
        if method == "stacked" and any(utility.function for utility in self.utilities):
            raise InputError("a user's utility function takes one model at a time: method 'stacked' is out")
        self.chosen: tuple[Strategy, Record] | None = None

    def need(self, clients: int) -> int:
        """Bytes for the smallest way to do it: test set, updates, a few models, one image's activations."""
        tables = 8 * len(self.utilities) << clients
        images = 2 * 4 * self.images[:1].numel() * len(self.images)
        models = 4 * self.length * (2 * clients + 6)
        return tables + images + models + 2 * self.per_image

    def tables(
        self,
        m0: npt.NDArray[Any] | Tensor,
        updates: npt.NDArray[Any] | Tensor,
        weights: Sequence[float] | npt.NDArray[np.float64],
        *,
        game: str = "additive",
        clients: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> tuple[dict[str, Table], Record]:
        """The utility of every coalition, one table per utility.

        Args:
            m0: the vector of the model before the round, shape (P,).
            updates: U_i, the weighted updates, shape (N, P).
            weights: w_i, shape (N,); they matter in the renormalised game only.
            game: ``additive`` or ``renormalised``.
            clients: names.
            progress: told after every chunk.
        """
        n = len(updates)
        games.check_count(n)
        names = tuple(clients) or tuple(f"client-{i}" for i in range(n))
        if len(weights) != n or len(names) != n:
            got = f"{len(weights)} weights and {len(names)} names"
            raise InputError(f"expected {n} weights and {n} names, one per update, got {got}")
        games.coefficients([0], weights, game)
        base = self._vector(m0, "M0")
        moves = [self._vector(u, f"the update of {c}") for c, u in zip(names, updates, strict=True)]
        if (need := self.need(n)) > self.memory:
            room = f"{self.memory / 1e6:,.0f} MB may be used"
            raise InputError(f"{1 << n} coalitions of this model need {need / 1e6:,.0f} MB, {room}")

        began = time.perf_counter()
        of = _Round(base, torch.stack(moves), np.asarray(weights, dtype=np.float64), game)
        strategy, learnt = self._strategy(of)
        setup = time.perf_counter() - began
        values, done = np.empty((1 << n, len(self.utilities))), 0
        for rows in self._rows(strategy, of, np.arange(1 << n)):
            values[done : done + len(rows)] = strategy(rows).cpu().numpy()
            done += len(rows)
            if progress:
                progress(done, 1 << n)
        self._repair(values, strategy, of, names)
        seconds = time.perf_counter() - began - setup
        record = replace(learnt, coalitions=1 << n, seconds=seconds, setup_seconds=setup)
        return {u.name: Table(values[:, i], names) for i, u in enumerate(self.utilities)}, record

    def _vector(self, values: npt.NDArray[Any] | Tensor, what: str) -> Tensor:
        vector = as_tensor(values)
        if vector.shape != (self.length,):
            got = tuple(vector.shape)
            raise InputError(f"{what} must have {self.length} values like the model, got shape {got}")
        if not bool(vector.isfinite().all()):
            raise InputError(f"{what} is not finite")
        return vector.to(self.device, torch.float32)

    def _rows(self, strategy: Strategy, of: _Round, masks: games.Masks) -> Iterator[Tensor]:
        """Packed weights of coalitions, a chunk at a time: one matrix product over the updates."""
        base, moves = strategy.packing.pack(of.m0[None]), strategy.packing.pack(of.updates)
        room = self.memory - self.need(len(moves))
        chunk = int(min(64, max(1, room // 8 // (4 * strategy.packing.length))))
        for i in range(0, len(masks), chunk):
            c = games.coefficients(masks[i : i + chunk], of.weights, of.game)
            c32 = torch.as_tensor(c, device=self.device, dtype=torch.float32)
            with float32():
                rows = torch.addmm(base.expand(len(c), -1), c32, moves)
            yield rows

    def _strategy(self, of: _Round) -> tuple[Strategy, Record]:
        """The strategy chosen in an earlier round, or a new choice."""
        if self.chosen is not None:
            return self.chosen
        n = len(of.updates)
        total = 1 << n
        room = max(0, self.memory - self.need(n)) // 2
        batch = max(1, min(len(self.images), room // max(1, self.per_image)))
        if self.device.type == "cpu":
            batch = min(batch, CPU_BATCH)
        pool = Pool(prepare(self.images, self.device), self.labels, self.utilities, int(batch))
        exact: Strategy = (Stacked if self.method == "stacked" else Single)(self.model, pool)
        users = any(utility.function for utility in self.utilities)
        few = total <= 4 * CHECKED
        if self.device.type != "cuda" or self.method != "auto" or users or few:
            self.chosen = exact, plain(exact)
        else:
            inner = np.random.default_rng(0).choice(total - 2, CHECKED - 2, replace=False) + 1
            sample = np.concatenate([[0, total - 1], inner])
            self.chosen = choose(
                self.model,
                exact,
                lambda strategy: torch.cat(list(self._rows(strategy, of, sample))),
                total=total,
                tolerance=self.tolerance,
                compiled=self.compiled,
                stack=int(room // max(1, self.per_image * batch)),
            )
        return self.chosen

    def _repair(
        self, values: npt.NDArray[np.float64], strategy: Strategy, of: _Round, names: Sequence[str]
    ) -> None:
        """Coalitions whose utilities are not finite, once more in float32; an error if that does not help."""
        bad = np.flatnonzero(~np.isfinite(values).all(1))
        if bad.size and strategy.precision in ("float16", "bfloat16"):
            exact = Single(self.model, strategy.pool)
            rows = self._rows(exact, of, bad)
            values[bad] = np.concatenate([exact(part).cpu().numpy() for part in rows])
            bad = np.flatnonzero(~np.isfinite(values).all(1))
        if bad.size:
            utility = self.utilities[int(np.flatnonzero(~np.isfinite(values[bad[0]]))[0])].name
            who = games.name(int(bad[0]), names)
            raise ReportError(f"utility {utility!r} of coalition {who} is not finite: its model diverged")


def coalition_tables(
    model: nn.Module,
    m0: npt.NDArray[Any] | Tensor,
    updates: npt.NDArray[Any] | Tensor,
    weights: Sequence[float] | npt.NDArray[np.float64],
    x: Images,
    y: npt.NDArray[Any] | Tensor,
    utilities: Sequence[str | Utility],
    *,
    game: str = "additive",
    clients: Sequence[str] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> tuple[dict[str, Table], Record]:
    """The tables of a single round: ``Evaluator(model, x, y, utilities, **settings).tables(m0, ...)``."""
    evaluator = Evaluator(model, x, y, utilities, **settings)
    return evaluator.tables(m0, updates, weights, game=game, clients=clients, progress=progress)


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(0.8 * torch.cuda.mem_get_info(device)[0])
    return (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 4 << 30
    )


def _try_forward(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[int, int]:
    """Classes of the model, and bytes of all its layers' outputs for one image, in float32."""
    device = device_of(model)
    outputs = 4 * images.numel()

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal outputs
        outputs += 2 * 4 * output.numel() if isinstance(output, Tensor) else 0

    hooks = [module.register_forward_hook(count) for module in model.modules() if not list(module.children())]
    try:
        with evaluation(model):
            logits = check_logits(model(prepare(images, device)), labels.to(device))
    except FedmeritError:
        raise
    except Exception as error:
        shape = tuple(images.shape[1:])
        raise InputError(
            f"the model fails on an image of shape {shape}: {type(error).__name__}: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return logits.shape[1], outputs
