"""Ways to evaluate many models of one architecture on one test set.

A strategy takes rows of packed weights, shape (K, L), and returns the mean of every utility, shape (K, U).
``Single`` runs one model after another, compiled or not; on a GPU it can replay them from a CUDA graph.
``Stacked`` runs several in one forward pass (``torch.func.vmap``). Both use a copy of the user's module.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from side_by_side import record
from torch import Tensor, nn

from fedmerit.simulation.analysis import Masks
from fedmerit.simulation.models import class_logits, float32, state
from fedmerit.simulation.utilities import Utility, balance, call, checked, whole_value

# ---------------------------------------------------------------------------------------- ways to evaluate

Precision = Literal["float32", "tf32", "float16", "bfloat16"]
ALIGN = 64
"""Each tensor of a packed row starts at a multiple of this many numbers: 128 bytes in half precision."""


@dataclass(frozen=True)
class EvaluationSet:
    """The test set on the device, the utilities to compute on it, and the batch size."""

    images: Tensor
    labels: Tensor
    utilities: tuple[Utility, ...]
    batch: int

    def sums(self, logits: Tensor, part: slice, weights: Tensor | None) -> Tensor:
        """Return the sum of each utility over a batch in float64; all NaN if some logit is not finite."""
        logits, labels = logits.float(), self.labels[part]
        zero = torch.where(logits.isfinite().all(), 0.0, torch.nan).double()
        out = []
        for utility in self.utilities:
            if utility.of_logits is None:
                out.append(zero)
                continue
            values = utility.of_logits(utility.ready(logits, labels), labels).double()
            if utility.balanced and weights is not None:
                values = values * weights[part]
            out.append(values.sum() + zero)
        return torch.stack(out)

    def parts(self) -> list[slice]:
        """Return the batches in order."""
        return [slice(i, i + self.batch) for i in range(0, len(self.labels), self.batch)]


class Packing:
    """Where each tensor of a model lies in a packed row.

    Tensors start at multiples of ``ALIGN``, and convolution kernels may be stored channels last. So the
    result of one matrix product can be used as weights in place.
    """

    def __init__(self, model: nn.Module, *, channels_last: bool) -> None:
        self.slots: dict[str, tuple[int, torch.Size, bool]] = {}
        self.length = 0
        for name, value in state(model).items():
            self.slots[name] = self.length, value.shape, channels_last and value.ndim == 4
            self.length += value.numel() + -value.numel() % ALIGN

    def pack(self, vectors: Tensor) -> Tensor:
        """Return vectors (K, P) as rows (K, L), with zeros in the gaps."""
        rows, begin = vectors.new_zeros(len(vectors), self.length), 0
        for view in self.views(rows).values():
            size = view[0].numel()
            view.copy_(vectors[:, begin : begin + size].view(view.shape))
            begin += size
        return rows

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors of packed rows, with the rows' leading axes (none for a single row)."""
        out, lead = {}, rows.shape[:-1]
        for name, (begin, shape, last) in self.slots.items():
            piece = rows[..., begin : begin + shape.numel()]
            if last:
                o, i, h, w = shape
                out[name] = piece.view(*lead, o, h, w, i).movedim(-1, -3)
            else:
                out[name] = piece.view(*lead, *shape)
        return out


def one_at_a_time(utility: Utility) -> bool:
    """Return whether it takes one model at a time: a user's function, or a metric of all samples."""
    return utility.function is not None or utility.whole


class Strategy(abc.ABC):
    """What all strategies share: a copy of the model, the images, the packing and the precision."""

    kind = ""

    def __init__(
        self, model: nn.Module, pool: EvaluationSet, precision: Precision, *, channels_last: bool
    ) -> None:
        self.pool, self.precision = pool, precision
        device = pool.images.device
        half = {"float16": torch.float16, "bfloat16": torch.bfloat16}
        self.dtype = half.get(precision, torch.float32)
        self.model = copy.deepcopy(model).to(device, self.dtype).eval().requires_grad_(False)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        images = pool.images.to(self.dtype) if pool.images.is_floating_point() else pool.images
        self.images = images.contiguous(memory_format=layout) if images.ndim == 4 else images.contiguous()
        self.packing = Packing(model, channels_last=channels_last)
        self.weights: Tensor | None = None
        if any(utility.balanced for utility in pool.utilities):
            classes = class_logits(self.model(self.images[:1])).shape[1]
            self.weights = balance(pool.labels, classes).to(device)

    @property
    def name(self) -> str:
        """Kind and precision."""
        return f"{self.kind} {self.precision}"

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the mean of every utility, float64 of shape (K, U), for rows of packed weights (K, L)."""
        with torch.no_grad(), self._numerics():
            sums = self._sums(rows)
            return sums / len(self.pool.labels)

    @contextlib.contextmanager
    def _numerics(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            with float32(tf32=self.precision == "tf32"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                yield
        finally:
            torch.backends.cudnn.benchmark = before

    @abc.abstractmethod
    def _sums(self, rows: Tensor) -> Tensor:
        """Return the sum of every utility over the test set, shape (K, U)."""


class Single(Strategy):
    """Evaluates one model after another. Its weights are one flat buffer: one copy loads a coalition.

    Args:
        model: gives the architecture.
        pool: the test set.
        precision: of weights, images and products.
        channels_last: whether images and kernels are stored channels last.
        compile_mode: mode of ``torch.compile``; None runs the module uncompiled.
        graph: whether to replay all kernels of an evaluation from a CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        pool: EvaluationSet,
        precision: Precision = "float32",
        *,
        channels_last: bool = False,
        compile_mode: str | None = None,
        graph: bool = False,
    ) -> None:
        super().__init__(model, pool, precision, channels_last=channels_last)
        self.kind = f"compiled ({compile_mode})" if compile_mode else "single"
        self.flat = torch.zeros(self.packing.length, dtype=self.dtype, device=self.images.device)
        for name, view in self.packing.views(self.flat).items():
            owner, _, leaf = name.rpartition(".")
            getattr(self.model.get_submodule(owner), leaf).data = view
        self.forward: Callable[[Tensor], Tensor] = self.model
        if compile_mode:
            self.forward = torch.compile(self.model, mode=compile_mode, dynamic=False)
        self.users = [i for i, utility in enumerate(pool.utilities) if one_at_a_time(utility)]
        self.graph: torch.cuda.CUDAGraph | None = None
        if graph and not self.users and self.images.is_cuda:
            with contextlib.suppress(RuntimeError):  # the module waits for the device: use no graph
                self._capture()

    def _evaluate(self) -> Tensor:
        parts = self.pool.parts()
        return torch.stack(
            [self.pool.sums(self.forward(self.images[part]), part, self.weights) for part in parts]
        ).sum(0)

    def _capture(self) -> None:
        """Record an evaluation as a graph, after two calls that compile and choose algorithms."""
        with torch.no_grad(), self._numerics():
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._evaluate()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = record(self._keep, self.images.device)

    def _keep(self) -> None:
        self.out = self._evaluate()

    def _sums(self, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), len(self.pool.utilities), dtype=torch.float64, device=rows.device)
        for row, target in zip(rows, out, strict=True):
            self.flat.copy_(row)
            if self.graph is not None:
                self.graph.replay()
                target.copy_(self.out)
            else:
                target.copy_(self._evaluate())
            for i in self.users:
                target[i] = self._users(self.pool.utilities[i])
        return out

    def _users(self, utility: Utility) -> float:
        """Return the sum of a user's utility after checking it; NaN if some value is not finite.

        Of a metric of the whole set, return its value times the number of samples.
        """
        if utility.whole:
            pool = self.pool
            return whole_value(utility, self.model, self.images, pool.labels) * len(pool.labels)
        values = call(utility, self.model, self.images, self.pool.labels).detach().cpu().numpy()
        if not np.isfinite(values).all():
            return math.nan
        return float(checked(utility, values, len(self.pool.labels)).sum())


class Stacked(Strategy):
    """Evaluates ``size`` models per forward pass; they share the images as input of the first layer."""

    kind = "stacked"

    def __init__(
        self,
        model: nn.Module,
        pool: EvaluationSet,
        precision: Precision = "float32",
        *,
        channels_last: bool = False,
        size: int = 8,
    ) -> None:
        super().__init__(model, pool, precision, channels_last=channels_last)
        self.size = size

    def _sums(self, rows: Tensor) -> Tensor:
        def one(tensors: dict[str, Tensor], images: Tensor, part: slice) -> Tensor:
            logits = torch.func.functional_call(self.model, tensors, (images,))
            return self.pool.sums(logits, part, self.weights)

        out = []
        for i in range(0, len(rows), self.size):
            tensors = self.packing.views(rows[i : i + self.size].to(self.dtype))
            sums = [
                torch.func.vmap(partial(one, part=part), in_dims=(0, None))(tensors, self.images[part])
                for part in self.pool.parts()
            ]
            out.append(torch.stack(sums).sum(0))
        return torch.cat(out)


# -------------------------------------------------------------------------------------- choice of strategy

CHECKED = 16
"""Coalitions, the empty and the grand one included, on which a strategy is timed and compared to float32."""
Candidates = Iterator[tuple[str, Callable[[], Strategy]]]
Effort = Literal["auto", "none", "compile", "tune"]
"""What to try: uncompiled modules, compiled ones, or compiled ones tuned over many kernels for minutes."""
WORTH = {"compile": 30.0, "tune": 180.0}
"""Seconds that a job must take before ``auto`` makes this effort, which itself takes about as long."""
MODES = {"compile": "default", "tune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class Evaluation:
    """How a table was made: the strategy, its deviation from float32, the time it took.

    ``deviation`` is, per utility, the largest |value - float32 value| on ``checked`` coalitions of this round
    (none are checked when the strategy is the float32 one). ``tried`` holds, for each candidate, its seconds
    per coalition or why it was rejected, from the round in which the strategy was chosen.
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
    """Return coalitions to measure on: the empty, the grand and random ones, or all if they are few."""
    if 1 << n <= CHECKED:
        return np.arange(1 << n)
    inner = np.random.default_rng(0).integers(1, (1 << n) - 1, CHECKED - 2)
    return np.concatenate([[0, (1 << n) - 1], inner])


def plain(strategy: Strategy) -> Evaluation:
    """Return the record of a strategy that needs no check."""
    deviation = dict.fromkeys((utility.name for utility in strategy.pool.utilities), 0.0)
    return Evaluation(strategy.name, strategy.precision, deviation, strategy.pool.batch)


def choose(
    model: nn.Module,
    exact: Strategy,
    rows: Callable[[Strategy], Tensor],
    *,
    total: int,
    tolerance: float,
    effort: Effort,
    stack: int,
) -> tuple[Strategy, Evaluation]:
    """Return the fastest strategy that deviates from float32 by at most ``tolerance``, and its record.

    Args:
        model: gives the architecture.
        exact: the float32 strategy with which the others are compared.
        rows: returns the packed weights of a sample of coalitions, in a given strategy's packing.
        total: coalitions to be evaluated; compiling pays only for a long job.
        tolerance: largest deviation in any utility.
        effort: what to try; with ``auto`` this depends on ``total``.
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
                if not bool((away <= tolerance).all()):  # true also if a value is not finite
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
                record = Evaluation(label, strategy.precision, deviation, exact.pool.batch, len(sample))
            del strategy

    try_all(_plain_candidates(model, exact.pool, close, stack))
    for kind in MODES:
        if effort in (kind, "tune") or (effort == "auto" and fastest * total > WORTH[kind]):
            try_all(_compiled_candidates(model, exact.pool, close, MODES[kind]))
    torch.cuda.empty_cache()
    return best, replace(record, tried=tried)


def _plain_candidates(model: nn.Module, pool: EvaluationSet, close: set[Precision], stack: int) -> Candidates:
    yield "single float32, graph", partial(Single, model, pool, graph=True)
    for precision in _precisions(close):
        one = partial(Single, model, pool, precision, graph=True)
        yield f"single {precision}", one
        yield f"single {precision}, channels last", partial(one, channels_last=True)
        for size in (8, 64):
            if size <= stack:
                yield f"stacked by {size} {precision}", partial(Stacked, model, pool, precision, size=size)


def _compiled_candidates(
    model: nn.Module, pool: EvaluationSet, close: set[Precision], mode: str
) -> Candidates:
    order: tuple[Precision, ...] = ("float16", "bfloat16", "tf32")
    precision: Precision = next((p for p in order if p in close), "float32")
    yield (
        f"compiled ({mode}) {precision}",
        partial(Single, model, pool, precision, channels_last=True, compile_mode=mode, graph=True),
    )


def _precisions(close: set[Precision]) -> Iterator[Precision]:
    """Yield the precisions to try; bfloat16, with three bits fewer, only for models that float16 fails on."""
    yield "float16"
    if "float16" not in close:
        yield "bfloat16"
    yield "tf32"


def _seconds(strategy: Strategy, rows: Tensor) -> float:
    """Return the seconds per coalition: the better of two calls."""
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        strategy(rows).cpu()  # waits for the device
        best = min(best, (time.perf_counter() - began) / len(rows))
    return best
