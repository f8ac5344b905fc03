r"""The public direction of a round: the gradient of the utility, averaged over the path from M0 to M.

.. math:: \bar g = \int_0^1 \nabla v(M_0 + t (M - M_0)) \, dt

The Aumann-Shapley score of client i is its update's scalar product with it
(:func:`fedmerit.aumann_shapley`). Everybody who has M0, M and the test set can compute it. The integral is a
Gauss-Legendre sum over three points of the path, or seven where three are too few. The test set falls into
blocks of about equal size, each with as many samples of every class as the others; the gradient of each block
gives standard errors, and all of them together give the gradient of the whole.

Networks compute in float64 here. In float32, machines see activations near a kink (of a ReLU, or between two
inputs of a maximum) on different sides, and their directions differ by up to 3e-4 of their length; in float64
by 1e-7, most of which is the rounding of the sums by block: these are float32, which takes half the memory
(``benchmarks/gradients.py``).

The vector of a model holds floating-point buffers too (see :mod:`fedmerit.simulation.models`), so they are
coordinates of the gradient. In evaluation mode, BatchNorm is an affine map whose slope and offset follow from
its running statistics; it is written so here, because PyTorch's own kernels give these no gradient.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedmerit.errors import InputError, NoGradient, ReportError, SettlementError
from fedmerit.protocol.direction import POINTS, REST, Slopes, deal
from fedmerit.protocol.outcome import Model, model_hash
from fedmerit.protocol.pool import Indices, Slice
from fedmerit.scoring.scores import from_blocks
from fedmerit.scoring.types import Scores
from fedmerit.simulation.coalitions import free_memory, try_forward
from fedmerit.simulation.models import Images, as_tensor, flatten, prepare, state, state_length
from fedmerit.simulation.utilities import (
    Utility,
    balance,
    call,
    check_for,
    check_outputs,
    check_range,
    device_of,
    evaluation,
    record,
    resolve,
)

__all__ = ["BLOCKS", "Direction", "PathGradients", "direction", "missing_gradient", "slope"]

BLOCKS = 16
"""Blocks of the test set, by default."""
MOST_BYTES = 16 << 30
"""The most bytes for the layers' outputs of one batch on a GPU."""
CPU_BATCH = 100
"""Images per batch on a CPU."""
DEEP = 32
"""A network with at least so many parameters and buffers has its gradient recorded as a CUDA graph, ..."""
MOST_RECORDED = 4 << 30
"""... unless its layers' outputs for one batch take more bytes than this."""
_COLUMNS = 1 << 20
"""Coordinates at a time in scalar products, which are in float64."""

Vectors = npt.NDArray[Any] | Tensor


@dataclass(frozen=True, eq=False)
class Direction:
    """The direction of a round, by block of the test set.

    Args:
        utility: name of the utility.
        blocks: shape (B, P), on the model's device; the mean gradient over the path of the mean over the
            samples of each block.
        sizes: samples in each block.
        stratified: whether each block has the same mix of classes; otherwise samples were dealt at random.
        empty: v(M0).
        grand: v(M).
        rest: what the quadrature leaves of the gain, v(M) - v(M0) - <M - M0, gbar>.
        points: points of the path that were used.
    """

    utility: str
    blocks: Tensor
    sizes: tuple[int, ...]
    stratified: bool
    empty: float
    grand: float
    rest: float
    points: int

    @property
    def gain(self) -> float:
        """v(M) - v(M0)."""
        return self.grand - self.empty

    @property
    def gradient(self) -> Tensor:
        """The gradient of the whole test set, shape (P,): the mean of the blocks, weighted by their sizes."""
        return _whole(self.blocks, self.sizes)

    def products(self, updates: Sequence[Vectors] | Vectors) -> npt.NDArray[np.float64]:
        """Return <U_i, g_b> for every block and client, shape (B, N)."""
        rows = [as_tensor(update) for update in updates]
        length = self.blocks.shape[1]
        for place, row in enumerate(rows):
            if row.shape != (length,):
                raise InputError(
                    f"update {place}: expected shape ({length},) like the direction, got {tuple(row.shape)}"
                )
        total = torch.zeros(len(self.blocks), len(rows), dtype=torch.float64, device=self.blocks.device)
        for start in range(0, length, _COLUMNS):
            part = slice(start, start + _COLUMNS)
            moves = torch.stack([row[part].to(total.device).double() for row in rows])  # widened over there
            total += self.blocks[:, part].double() @ moves.T
        found: npt.NDArray[np.float64] = total.cpu().numpy()
        return found

    def scores(self, updates: Sequence[Vectors] | Vectors, clients: Sequence[str] | None = None) -> Scores:
        """Return the Aumann-Shapley scores of these updates, as :func:`fedmerit.aumann_shapley` does."""
        return from_blocks(self.products(updates), self.sizes, clients)


def direction(
    model: nn.Module,
    m0: Vectors,
    m: Vectors,
    x: Images,
    y: Vectors,
    utility: str | Utility,
    *,
    blocks: int | Sequence[Indices] = BLOCKS,
    points: tuple[int, int] = POINTS,
    tolerance: float = REST,
    seed: int = 0,
    balanced: bool = True,
    batch_size: int | None = None,
) -> Direction:
    r"""Return the gradient of a utility, averaged over the path from M0 to M, by block of the test set.

    .. math:: \bar g \approx \sum_k w_k \nabla v(M_0 + t_k (M - M_0))

    with Gauss-Legendre points :math:`t_k`. The first number of points is used if they leave a rest of at most
    ``tolerance`` times the gain, otherwise the second. The network computes in float64 and evaluation mode.

    Args:
        model: gives architecture and device; its weights are not changed, its mode is restored.
        m0: vector of the model before the round, shape (P,).
        m: vector of the model after it, shape (P,).
        x: test samples, shape (m, ...); images have shape (m, H, W, C).
        y: targets, shape (m, ...); utilities of classes take whole numbers, shape (m,).
        utility: name or resolved utility; it must have a gradient.
        blocks: number of blocks, at most one per sample; 1 gives no standard errors. Or the positions of each
            block's samples, which together are all samples.
        points: numbers of points of the path.
        tolerance: see above.
        seed: of the deal of samples to blocks.
        balanced: whether the samples were drawn class by class; then they are dealt to blocks so too.
        batch_size: images per pass; by default 100 on a CPU, on a GPU as many as fit.

    Raises:
        NoGradient: if the utility has none, or a parameter or buffer of the model gets none.
    """
    of = resolve(utility)
    path = _Path(model, m0, m, x, y, of, blocks, seed, batch_size, balanced=balanced)
    if not (len(points) == 2 and 1 <= points[0] <= points[1]):
        raise InputError(f"points: expected two numbers of points, the smaller one first, got {points!r}")
    with _setting(model):
        empty, grand = path.value(0.0), path.value(1.0)
        for number in dict.fromkeys(points):
            found = path.mean_gradient(number)
            rest = grand - empty - path.along(found)
            if abs(rest) <= tolerance * abs(grand - empty):
                break
    return Direction(of.name, found, path.sizes, path.stratified, empty, grand, rest, number)


def slope(
    model: nn.Module, x: Images, y: Vectors, utility: str | Utility, batch_size: int | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean utility of a model as it is, and the gradient of every parameter and floating buffer.

    The arguments and errors are those of `direction`.
    """
    vector = flatten(model)
    path = _Path(model, vector, vector, x, y, resolve(utility), 1, 0, batch_size)
    with _setting(model):
        value, found = path.value(0.0), path.mean_gradient(1)[0]
    parts = torch.split(found, [shape.numel() for shape in path.shapes.values()])
    named = zip(path.shapes.items(), parts, strict=True)
    return value, {name: part.view(shape) for (name, shape), part in named}


def missing_gradient(model: nn.Module, x: Images, y: Vectors, utility: str | Utility) -> NoGradient | None:
    """Return why this model has no direction for this utility, or None if it has one.

    Two images tell, but a user's utility may need them all.
    """
    of, vector = replace(resolve(utility), balanced=False), flatten(model)
    few = slice(None) if of.function is not None else slice(2)
    try:
        path = _Path(model, vector, vector, x[few], y[few], of, 1)
        with _setting(model):
            path.value(0.0)  # a model or utility that fails anyway fails here
            path.mean_gradient(1)
    except NoGradient as error:
        return error
    return None


class PathGradients:
    """A `protocol.direction.Gradient` of one utility, for server and members who share a process.

    All of them ask for the same rounds, so each is computed once, as long as what is kept fits into memory.

    Args:
        model: gives architecture and device.
        utility: it must have a gradient.
        most: bytes of gradients to keep; the last one is always kept.
    """

    def __init__(self, model: nn.Module, utility: Utility, *, most: int = 1 << 30) -> None:
        self.model, self.utility, self.most = model, utility, most
        self.computed = 0  # rounds and numbers of points computed so far
        self._kept: dict[tuple[str, ...], Slopes] = {}

    def __call__(self, m0: Model, m: Model, shown: Slice, blocks: Sequence[Indices], points: int) -> Slopes:
        """Return the gradient over the path from M0 to M, by block.

        Raises:
            SettlementError: it is not finite, or there is none.
        """
        places = hashlib.sha256(b"".join(len(one).to_bytes(8, "big") + one.tobytes() for one in blocks))
        key = model_hash(m0), model_hash(m), shown.id, places.hexdigest(), str(points)
        found = self._kept.pop(key, None)
        self._kept[key] = found or self._compute(m0, m, shown, blocks, points)  # in order of last use
        while len(self._kept) > 1 and sum(one.blocks.nbytes for one in self._kept.values()) > self.most:
            del self._kept[next(iter(self._kept))]
        return self._kept[key]

    def _compute(self, m0: Model, m: Model, shown: Slice, blocks: Sequence[Indices], points: int) -> Slopes:
        self.computed += 1
        try:
            path = _Path(self.model, m0, m, shown.x, shown.y, self.utility, list(blocks))
            with _setting(self.model):
                empty, grand = path.value(0.0), path.value(1.0)
                return Slopes(_on_cpu(path.mean_gradient(points)), empty, grand)
        except NoGradient as error:
            raise SettlementError(str(error), code="no-gradient") from error
        except ReportError as error:
            raise SettlementError(str(error), code="not-finite") from error


class _Path:
    """The models on the way from M0 to M, and the test set in the order of its blocks."""

    def __init__(
        self,
        model: nn.Module,
        m0: Vectors,
        m: Vectors,
        x: Images,
        y: Vectors,
        utility: Utility,
        blocks: int | Sequence[Indices],
        seed: int = 0,
        batch_size: int | None = None,
        *,
        balanced: bool = True,
    ) -> None:
        self.model, self.utility, self.device = model, utility, device_of(model)
        self.start = self._vector(m0, "M0")
        self.move = self._vector(m, "M") - self.start
        self.shapes = {name: value.shape for name, value in state(model).items()}
        self.fixed = {
            name: buffer.double()
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and name not in self.shapes
        }
        if utility.whole:
            raise no_gradient(utility, " (it is a metric of the whole test set)")
        self.labels = check_for([utility], y, len(x))
        dealt, self.stratified = self._dealt(blocks, seed, balanced)
        self.sizes = tuple(len(block) for block in dealt)
        self.order = torch.as_tensor(np.concatenate(dealt), device=self.device)
        self.labels = self.labels.to(self.device)
        self.images = as_tensor(x).to(self.device)
        self.weights: Tensor | None = None
        classes, per_image = 0, 0
        if utility.of_logits is not None:
            classes, per_image = try_forward(model, self.images[:1], self.labels[:1], [utility])
            per_image *= 2  # float64
        if utility.of == "classes":
            check_range(self.labels, classes)
        if utility.balanced:
            self.weights = balance(self.labels, classes)
        self.batch = batch_size or self._batch(per_image)
        if utility.function is not None:  # it sees all samples at once
            self.batch = len(self.labels)
        few = per_image * max(self.sizes) <= MOST_RECORDED and len(self.shapes) >= DEEP
        self.records = few and self.device.type == "cuda" and utility.function is None
        self.recorded: dict[int, _Recorded] = {}

    def _dealt(
        self, blocks: int | Sequence[Indices], seed: int, balanced: bool
    ) -> tuple[Sequence[Indices], bool]:
        """Return the positions of each block's samples, and whether they were dealt by class here."""
        if isinstance(blocks, Sequence):
            if not np.array_equal(np.sort(np.concatenate(blocks)), np.arange(len(self.labels))):
                raise InputError(
                    f"blocks: expected the positions of all {len(self.labels)} samples, each once"
                )
            return blocks, False
        return deal(self.labels.cpu().numpy(), blocks, seed, classes=balanced)

    def _vector(self, values: Vectors, what: str) -> Tensor:
        vector, length = as_tensor(values), state_length(self.model)
        if vector.shape != (length,):
            raise InputError(f"{what} must have {length} values like the model, got {tuple(vector.shape)}")
        vector = vector.to(self.device, torch.float64)
        if not bool(vector.isfinite().all()):
            raise InputError(f"{what} is not finite")
        return vector

    def _batch(self, per_image: int) -> int:
        if self.device.type == "cpu":
            return CPU_BATCH
        room = min(MOST_BYTES, free_memory(self.device) // 2)
        return max(1, room // max(1, 2 * per_image))  # outputs, and their gradients

    # ------------------------------------------------------------------------------------------------ values

    def value(self, t: float) -> float:
        """Return v at a point of the path."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        try:
            with torch.no_grad():
                at = self._tensors(self.start + t * self.move)
                for part in self._parts(slice(0, len(self.order))):
                    total += self._utility(at, part).sum()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # in float32, it worked before
            raise NoGradient(
                f"the network fails in float64, in which directions are computed ({error!s:.200}): let it "
                "compute in the type of its input and its parameters, or score by reports (alpha)",
                utility=self.utility.name,
            ) from error
        found = float(total) / len(self.order)
        if not np.isfinite(found):
            raise ReportError(f"utility {self.utility.name!r} is not finite: the model diverged")
        return found

    def along(self, blocks: Tensor) -> float:
        """Return <M - M0, gbar>."""
        pieces = zip(
            *(torch.split(one, _COLUMNS) for one in (self.move, _whole(blocks, self.sizes))), strict=True
        )
        return sum(float(move.double() @ slope.double()) for move, slope in pieces)

    # --------------------------------------------------------------------------------------------- gradients

    def mean_gradient(self, points: int) -> Tensor:
        """Return the Gauss-Legendre mean of every block's gradient, shape (B, P)."""
        nodes, weights = np.polynomial.legendre.leggauss(points)
        total = torch.zeros(len(self.sizes), len(self.start), device=self.device)
        try:
            for t, weight in zip((1 + nodes) / 2, weights / 2, strict=True):
                self._add_gradients(total, float(t), float(weight))
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ReportError) as error:  # without gradients, the same worked before
            raise no_gradient(self.utility, f" ({error})"[:300]) from error
        if not bool(total.isfinite().all()):
            bad = int((~total.isfinite()).any(0).nonzero()[0])
            raise ReportError(
                f"the gradient of utility {self.utility.name!r} is not finite at {self._name(bad)!r}"
            )
        return total

    def _add_gradients(self, total: Tensor, t: float, weight: float) -> None:
        """Add each block's gradient at a point of the path, times the point's weight."""
        at = self._tensors(self.start + t * self.move, gradient=True)
        begin = 0
        if self.utility.function is not None:
            values = self._utility(at, self.order)
        for row, size in enumerate(self.sizes):
            block = slice(begin, begin + size)
            begin += size
            if self.utility.function is not None:
                found = self._slopes(values[block], at, again=begin < len(self.order))
                total[row].add_(found, alpha=weight / size)
                continue
            for part in self._parts(block):
                total[row].add_(self._gradient(at, part), alpha=weight / size)

    def _gradient(self, at: dict[str, Tensor], part: Tensor) -> Tensor:
        """Return the gradient of the sum of these samples' utilities, shape (P,).

        The first batch of a size is recorded too, and its record is replayed for all later ones of that size.
        """
        if self.records and (known := self.recorded.get(len(part))):
            return known(at, part)
        found = self.slopes(at, part)
        if self.records:
            try:
                self.recorded[len(part)] = _Recorded(self, at, part)
            except RuntimeError:  # the model waits for the device, or the memory is full
                self.records, self.recorded = False, {}
                torch.cuda.empty_cache()
        return found

    def slopes(self, at: dict[str, Tensor], part: Tensor) -> Tensor:
        """Return what `_gradient` does, without a record."""
        return self._slopes(self._utility(at, part), at)

    def _slopes(self, values: Tensor, at: dict[str, Tensor], *, again: bool = False) -> Tensor:
        if not values.requires_grad:
            raise no_gradient(self.utility)
        found = torch.autograd.grad(values.sum(), list(at.values()), allow_unused=True, retain_graph=again)
        for name, gradient in zip(at, found, strict=True):
            if gradient is None:
                raise NoGradient(
                    f"utility {self.utility.name!r} has no gradient at {name!r}: the model does not use it "
                    "in evaluation mode, or uses it where PyTorch gives none; take it out of the model, or "
                    "make it a buffer with persistent=False",
                    coordinate=name,
                )
        return torch.cat([gradient.reshape(-1) for gradient in found])

    def _tensors(self, vector: Tensor, *, gradient: bool = False) -> dict[str, Tensor]:
        """Return parameters and floating buffers by name, in the layout of the vector."""
        parts = torch.split(vector, [shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape).clone().requires_grad_(gradient)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def _parts(self, block: slice) -> Iterator[Tensor]:
        """Yield the positions of a block's samples, as many at a time as fit."""
        yield from torch.split(self.order[block], self.batch)

    def _utility(self, at: dict[str, Tensor], part: Tensor) -> Tensor:
        """Return the utility of these samples for the model with these tensors, in float64."""
        with _Float64():
            return self._measured(at | self.fixed, part)

    def _measured(self, at: dict[str, Tensor], part: Tensor) -> Tensor:
        images, labels = prepare(self.images[part], self.device), self.labels[part]
        if self.utility.function is not None:
            inside = {f"model.{name}": tensor for name, tensor in at.items()}
            values: Tensor = functional_call(_Asked(self.model, self.utility), inside, (images, labels))
            if values.shape != (len(part),):
                name, got = self.utility.name, tuple(values.shape)
                raise ReportError(f"utility {name!r} must return {len(part)} numbers, got shape {got}")
            return values
        assert self.utility.of_logits is not None
        outputs = functional_call(self.model, at, (images,))
        outputs = check_outputs([self.utility], outputs, labels, in_range=True)
        values = self.utility.of_logits(self.utility.ready(outputs, labels), labels)
        return values if self.weights is None else values * self.weights[part]

    def _name(self, coordinate: int) -> str:
        for name, shape in self.shapes.items():
            if coordinate < shape.numel():
                return name
            coordinate -= shape.numel()
        raise AssertionError(coordinate)


class _Recorded:
    """The gradient of one batch as a CUDA graph: a deep network on few samples mostly waits for Python."""

    def __init__(self, path: _Path, at: dict[str, Tensor], part: Tensor) -> None:
        self.at = {name: tensor.detach().clone().requires_grad_() for name, tensor in at.items()}
        self.part = part.clone()

        def work() -> None:
            self.found = path.slopes(self.at, self.part)

        self.graph = record(work, path.device)

    def __call__(self, at: dict[str, Tensor], part: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_copy_(list(self.at.values()), list(at.values()))
        self.part.copy_(part)
        self.graph.replay()
        return self.found


class _Asked(nn.Module):
    """A user's utility as a module, so that its model's tensors can be replaced."""

    def __init__(self, model: nn.Module, utility: Utility) -> None:
        super().__init__()
        self.model, self.utility = model, utility
        self.training = model.training

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return call(self.utility, self.model, images, labels)


def no_gradient(utility: Utility, why: str = "") -> NoGradient:
    """Return the error for a utility without a gradient."""
    if utility.function is not None:
        advice = "return a torch tensor that follows from the model's answers by differentiable operations"
    else:
        advice = "take expected-accuracy, brier, neg-loss, or sharpened-accuracy in the place of accuracy"
        if utility.whole:
            advice = "take a mean over samples"
    return NoGradient(
        f"utility {utility.name!r} has no gradient{why}: {advice}, or score by reports (alpha)",
        utility=utility.name,
    )


def _on_cpu(blocks: Tensor) -> npt.NDArray[np.float32]:
    """Return the blocks in the CPU's memory.

    A copy from a GPU into fresh memory mostly waits for the system to hand out page after page; here all
    threads ask for the pages first.
    """
    if blocks.is_cuda:
        blocks = torch.empty(blocks.shape).fill_(0.0).copy_(blocks)
    found: npt.NDArray[np.float32] = blocks.cpu().numpy()
    return found


def _whole(blocks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the mean of the blocks, weighted by their sizes."""
    total = torch.zeros_like(blocks[0])
    for row, size in zip(blocks, sizes, strict=True):
        total.add_(row, alpha=size / sum(sizes))
    return total


# --------------------------------------------------------------------------------------- running statistics


@contextlib.contextmanager
def _setting(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no autocast."""
    device = device_of(model)
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluation(model, gradient=True))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if recurrent and device.type == "cuda":  # cuDNN has their gradients in training mode only
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


class _Float64(TorchFunctionMode):
    """Read float32 as float64, and normalise by running statistics with differentiable operations.

    Both also where a user's module asks for it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = [torch.float64 if one is torch.float32 else one for one in args]
        kwargs = {k: torch.float64 if one is torch.float32 else one for k, one in (kwargs or {}).items()}
        if func is Tensor.float:
            func = Tensor.double
        elif func in (torch.zeros, torch.ones):
            kwargs.setdefault("dtype", torch.float64)
        elif func in _NORMALISE:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            if not given.arguments[_NORMALISE[func]]:
                return _affine(given.arguments)
        return func(*args, **kwargs)


_NORMALISE = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}
"""Functions that may normalise by running statistics, and the argument that says they do not."""


def _affine(given: Any) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, per channel."""
    x: Tensor = given["input"]
    slope = (given["running_var"] + given["eps"]).rsqrt()
    if given["weight"] is not None:
        slope = slope * given["weight"]
    offset = -given["running_mean"] * slope
    if given["bias"] is not None:
        offset = offset + given["bias"]
    shape = (1, -1, *[1] * (x.ndim - 2))
    out: Tensor = x * slope.view(shape) + offset.view(shape)
    return out
