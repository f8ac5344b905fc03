"""Ways to evaluate many models of one architecture on one test set.

A strategy takes rows of packed weights, shape (K, L), and returns the mean of every utility, shape (K, U).
``Single`` runs one model after another, as it is or compiled, replayed from a CUDA graph on a GPU;
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
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedmerit.simulation.models import state
from fedmerit.simulation.utilities import Utility, balance, call, checked, float32

# ---------------------------------------------------------------------------------------- ways to evaluate

Precision = Literal["float32", "tf32", "float16", "bfloat16"]
Masks = npt.NDArray[np.int64]
"""Coalitions as bitmasks: bit i is set iff client i is in."""
ALIGN = 64
"""Numbers to which each tensor of a packed row is aligned: at least 128 bytes in half precision."""


@dataclass(frozen=True)
class EvaluationSet:
    """The test set on the device, and what is to be known of a model there."""

    images: Tensor
    labels: Tensor
    utilities: tuple[Utility, ...]
    batch: int

    def sums(self, logits: Tensor, part: slice, weights: Tensor | None) -> Tensor:
        """Per utility the sum over a batch, float64; all NaN where the model's answers are not finite."""
        logits, labels = logits.float(), self.labels[part]
        zero = torch.where(logits.isfinite().all(), 0.0, torch.nan).double()
        out = []
        for utility in self.utilities:
            if utility.of_logits is None:
                out.append(zero)
                continue
            values = utility.of_logits(logits, labels).double()
            if utility.balanced and weights is not None:
                values = values * weights[part]
            out.append(values.sum() + zero)
        return torch.stack(out)

    def parts(self) -> list[slice]:
        """The batches, in order."""
        return [slice(i, i + self.batch) for i in range(0, len(self.labels), self.batch)]


class Packing:
    """Where each tensor of a model lies in a packed row.

    Tensors start at multiples of ``ALIGN``, convolution kernels may be stored channels last, so that weights
    made by one matrix product are used in place.
    """

    def __init__(self, model: nn.Module, *, channels_last: bool) -> None:
        self.slots: dict[str, tuple[int, torch.Size, bool]] = {}
        order, begin, length = [], 0, 0
        for name, value in state(model).items():
            last = channels_last and value.ndim == 4
            index = torch.arange(begin, begin + value.numel()).view(value.shape)
            order.append((index.permute(0, 2, 3, 1) if last else index).flatten())
            order.append(torch.full((-value.numel() % ALIGN,), -1))
            self.slots[name] = length, value.shape, last
            begin, length = begin + value.numel(), length + len(order[-2]) + len(order[-1])
        self.order, self.length = torch.cat(order), length

    def pack(self, vectors: Tensor) -> Tensor:
        """Vectors (K, P) as rows (K, L); the gaps hold zeros."""
        order = self.order.to(vectors.device)
        return torch.where(order >= 0, vectors[:, order.clamp(min=0)], 0.0)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors of packed rows, with the rows' leading axes (none for a single row)."""
        out, lead = {}, rows.shape[:-1]
        for name, (begin, shape, last) in self.slots.items():
            piece = rows[..., begin : begin + shape.numel()]
            if last:
                o, i, h, w = shape
                out[name] = piece.view(*lead, o, h, w, i).movedim(-1, -3)
            else:
                out[name] = piece.view(*lead, *shape)
        return out


class Strategy(abc.ABC):
    """Common to all: a copy of the model, the packing, the precision, and users' functions in float32."""

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
        self.images = pool.images.to(self.dtype).contiguous(memory_format=layout)
        self.packing = Packing(model, channels_last=channels_last)
        self.weights: Tensor | None = None
        if any(utility.balanced for utility in pool.utilities):
            classes = self.model(self.images[:1]).shape[1]
            self.weights = balance(pool.labels, classes).to(device)

    @property
    def name(self) -> str:
        """Kind and precision."""
        return f"{self.kind} {self.precision}"

    def __call__(self, rows: Tensor) -> Tensor:
        """Means of every utility, float64 of shape (K, U), for rows of packed weights (K, L)."""
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
        """Sums over the test set of every utility, shape (K, U)."""


class Single(Strategy):
    """One model after another: its weights are one flat buffer, so that a coalition is one copy away.

    Args:
        model: gives the architecture.
        pool: the test set.
        precision: of weights, images and products.
        channels_last: memory layout of images and kernels.
        compile_mode: of ``torch.compile``; None to run the module as it is.
        graph: replay all kernels of an evaluation from a CUDA graph.
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
        self.users = [i for i, utility in enumerate(pool.utilities) if utility.function]
        self.graph: torch.cuda.CUDAGraph | None = None
        if graph and not self.users and self.images.is_cuda:
            try:
                self._capture()
            except RuntimeError:  # a module that waits for the device: without a graph then
                generator = torch.cuda.default_generators[self.images.device.index]
                generator.graphsafe_set_state(generator.clone_state())  # else dropout fails from here on

    def _evaluate(self) -> Tensor:
        parts = self.pool.parts()
        return torch.stack(
            [self.pool.sums(self.forward(self.images[part]), part, self.weights) for part in parts]
        ).sum(0)

    def _capture(self) -> None:
        """Record an evaluation; the first calls, outside the graph, compile and choose algorithms."""
        with torch.no_grad(), self._numerics():
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self._evaluate()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.out = self._evaluate()
        self.graph = graph

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
        """The sum of a user's utility, held to what it promises; NaN where some of it is not finite."""
        values = call(utility, self.model, self.images, self.pool.labels).detach().cpu().numpy()
        if not np.isfinite(values).all():
            return math.nan
        return float(checked(utility, values, len(self.pool.labels)).sum())


class Stacked(Strategy):
    """``size`` models per forward pass; the first layer sees the images once for all of them."""

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


# ----------------------------------------------------------------------------------------------- which one

CHECKED = 16
"""Coalitions on which a strategy is measured and held against float32, nobody and everybody among them."""
Candidates = Iterator[tuple[str, Callable[[], Strategy]]]
Effort = Literal["auto", "none", "compile", "tune"]
"""How long to look: modules as they are, compiled, or compiled with many kernels tried for minutes."""
WORTH = {"compile": 30.0, "tune": 180.0}
"""Seconds that a job must take before ``auto`` makes such an effort, which takes about that long itself."""
MODES = {"compile": "default", "tune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class Evaluation:
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


def plain(strategy: Strategy) -> Evaluation:
    """The record of a strategy that needs no check."""
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
