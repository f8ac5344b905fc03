"""Which strategy is fastest here, of those that agree with float32 on a sample of coalitions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedmerit.coalitions.game import Masks
from fedmerit.coalitions.strategies import Pool, Precision, Single, Stacked, Strategy

CHECKED = 16
"""Coalitions on which a strategy is measured and held against float32, nobody and everybody among them."""
Candidates = Iterator[tuple[str, Callable[[], Strategy]]]
Effort = Literal["auto", "none", "compile", "tune"]
"""How long to look: modules as they are, compiled, or compiled with many kernels tried for minutes."""
WORTH = {"compile": 30.0, "tune": 180.0}
"""Seconds that a job must take before ``auto`` makes such an effort, which takes about that long itself."""
MODES = {"compile": "default", "tune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class Record:
    """How a table was made: by which strategy, how far that strays from float32, how long it took.

    ``deviation``: per utility the largest |value - float32 value| on ``checked`` coalitions of this round
    (none are checked when the strategy is float32 itself). ``tried``: each candidate's seconds per coalition,
    or why it is out, in the round in which the strategy was chosen.
    """

    method: str
    precision: Precision
    deviation: dict[str, float]
    batch: int
    checked: int = 0
    coalitions: int = 0
    seconds: float = 0.0
    setup_seconds: float = 0.0
    tried: dict[str, float | str] = field(default_factory=dict)


def sample(n: int) -> Masks:
    """Coalitions to measure on: nobody, everybody and others at random; all of them where they are few."""
    if 1 << n <= CHECKED:
        return np.arange(1 << n)
    inner = np.random.default_rng(0).integers(1, (1 << n) - 1, CHECKED - 2)
    return np.concatenate([[0, (1 << n) - 1], inner])


def plain(strategy: Strategy) -> Record:
    """The record of a strategy that needs no check."""
    deviation = dict.fromkeys((utility.name for utility in strategy.pool.utilities), 0.0)
    return Record(strategy.name, strategy.precision, deviation, strategy.pool.batch)


def choose(
    model: nn.Module,
    exact: Strategy,
    rows: Callable[[Strategy], Tensor],
    *,
    total: int,
    tolerance: float,
    effort: Effort,
    stack: int,
) -> tuple[Strategy, Record]:
    """The fastest strategy whose utilities stray from float32 by at most ``tolerance``, and its record.

    Args:
        model: gives the architecture.
        exact: the float32 strategy that the others are held against.
        rows: the packed weights of a sample of coalitions, for a given strategy's packing.
        total: coalitions to be evaluated; a long job is worth compiling.
        tolerance: largest deviation in any utility.
        effort: what to try; ``auto`` leaves it to ``total``.
        stack: most models that fit in one forward pass.
    """
    names = [utility.name for utility in exact.pool.utilities]
    reference = exact(rows(exact))
    best, record = exact, plain(exact)
    fastest = _seconds(exact, rows(exact))
    close: set[Precision] = set()
    tried: dict[str, float | str] = {exact.name: fastest}

    def try_all(candidates: Candidates) -> None:
        nonlocal best, record, fastest
        for label, make in candidates:
            try:
                strategy = make()
                sample = rows(strategy)
                away = (strategy(sample) - reference).abs().amax(0)
                if not bool((away <= tolerance).all()):  # also where something is not finite
                    tried[label] = f"strays from float32 by {float(away.max()):.2g}"
                    continue
                close.add(strategy.precision)
                tried[label] = seconds = _seconds(strategy, sample)
            except Exception as error:
                tried[label] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            if seconds < fastest:
                deviation = dict(zip(names, away.tolist(), strict=True))
                best, fastest = strategy, seconds
                record = Record(label, strategy.precision, deviation, exact.pool.batch, len(sample))
            del strategy

    try_all(_plain_candidates(model, exact.pool, close, stack))
    for kind in MODES:
        if effort in (kind, "tune") or (effort == "auto" and fastest * total > WORTH[kind]):
            try_all(_compiled_candidates(model, exact.pool, close, MODES[kind]))
    torch.cuda.empty_cache()
    return best, replace(record, tried=tried)


def _plain_candidates(model: nn.Module, pool: Pool, close: set[Precision], stack: int) -> Candidates:
    yield "single float32, graph", partial(Single, model, pool, graph=True)
    for precision in _precisions(close):
        one = partial(Single, model, pool, precision, graph=True)
        yield f"single {precision}", one
        yield f"single {precision}, channels last", partial(one, channels_last=True)
        for size in (8, 64):
            if size <= stack:
                yield f"stacked by {size} {precision}", partial(Stacked, model, pool, precision, size=size)


def _compiled_candidates(model: nn.Module, pool: Pool, close: set[Precision], mode: str) -> Candidates:
    order: tuple[Precision, ...] = ("float16", "bfloat16", "tf32")
    precision: Precision = next((p for p in order if p in close), "float32")
    yield (
        f"compiled ({mode}) {precision}",
        partial(Single, model, pool, precision, channels_last=True, compile_mode=mode, graph=True),
    )


def _precisions(close: set[Precision]) -> Iterator[Precision]:
    """float16 keeps three more bits than bfloat16, which is for models that leave float16's range."""
    yield "float16"
    if "float16" not in close:
        yield "bfloat16"
    yield "tf32"


def _seconds(strategy: Strategy, rows: Tensor) -> float:
    """Seconds per coalition, after a call that warms up."""
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        strategy(rows).cpu()  # waits for the device
        best = min(best, (time.perf_counter() - began) / len(rows))
    return best
