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
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedmerit.models import state
from fedmerit.utilities import Utility, balance, call, checked, float32

Precision = Literal["float32", "tf32", "float16", "bfloat16"]
ALIGN = 64
"""Numbers to which each tensor of a packed row is aligned: at least 128 bytes in half precision."""


@dataclass(frozen=True)
class Pool:
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

    def __init__(self, model: nn.Module, pool: Pool, precision: Precision, *, channels_last: bool) -> None:
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
        pool: Pool,
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
            with contextlib.suppress(
                RuntimeError
            ):  # a module that waits for the device: without a graph then
                self._capture()

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
        pool: Pool,
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
