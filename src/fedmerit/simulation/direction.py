r"""The public direction of a round: the gradient of the utility, averaged over the path from M0 to M.

.. math:: \bar g = \int_0^1 \nabla v(M_0 + t (M - M_0)) \, dt

The Aumann-Shapley score of client i is its update's scalar product with it
(:func:`fedmerit.aumann_shapley`). Everybody who has M0, M and the test set can compute it. The integral is a
Gauss-Legendre sum over three points of the path, or seven where three are too few. The test set falls into
blocks of about equal size, each with as many samples of every class as the others; the gradient of each block
gives standard errors, and all of them together give the gradient of the whole.

Networks compute in float64 here: in float32, machines see activations near a kink on different sides, and
their directions differ by up to 3e-4 of their length; in float64 by 1e-7 (``benchmarks/gradients.py``). Sums
by block are float32. Floating-point buffers are coordinates of the gradient too. So BatchNorm's running
statistics are written as an affine map here: PyTorch's own kernels give them no gradient.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedmerit.errors import InputError, NoGradient, ReportError, SettlementError
from fedmerit.protocol.direction import BLOCKS, Slopes, deal, slopes_of, whole
from fedmerit.protocol.outcome import Model, model_hash
from fedmerit.protocol.pool import Indices, Slice
from fedmerit.simulation.models import (
    Images,
    as_tensor,
    check_range,
    class_logits,
    device_of,
    evaluation,
    flatten,
    prepare,
    state,
    state_length,
)
from fedmerit.simulation.utilities import Utility, balance, batch_of, call, check_for, check_outputs, resolve

Vectors = npt.NDArray[Any] | Tensor


@dataclass(frozen=True, eq=False)
class Direction:
    """The direction of a round, by block of the test set."""

    blocks: npt.NDArray[np.float32]  # (B, P): per block, the mean gradient over the path
    sizes: tuple[int, ...]  # samples in each block
    stratified: bool  # whether each block has the same mix of classes; otherwise samples were dealt at random
    empty: float  # v(M0)
    grand: float  # v(M)
    rest: float  # what the quadrature leaves of the gain, v(M) - v(M0) - <M - M0, gbar>
    points: int  # of the path

    @property
    def gain(self) -> float:
        return self.grand - self.empty

    @property
    def gradient(self) -> npt.NDArray[np.float64]:
        """The gradient of the whole test set, shape (P,): the mean of the blocks, weighted by their sizes."""
        return whole(self.blocks, self.sizes)


def direction(
    model: nn.Module,
    m0: Vectors,
    m: Vectors,
    x: Images,
    y: Vectors,
    utility: str | Utility,
    *,
    blocks: int | Sequence[Indices] = BLOCKS,
    points: int | None = None,
    balanced: bool = True,
) -> Direction:
    r"""Return the gradient of a utility, averaged over the path from M0 to M, by block of the test set.

    .. math:: \bar g \approx \sum_k w_k \nabla v(M_0 + t_k (M - M_0))

    with Gauss-Legendre points :math:`t_k`. The network computes in float64 and evaluation mode.

    Args:
        model: gives architecture and device; its weights are not changed, its mode is restored.
        m0: vector of the model before the round, shape (P,).
        m: vector of the model after it, shape (P,).
        x: test samples, shape (m, ...); images have shape (m, H, W, C).
        y: targets, shape (m, ...); utilities of classes take whole numbers, shape (m,).
        utility: name or resolved utility; it must have a gradient.
        blocks: number of blocks, at most one per sample; 1 gives no standard errors. Or the positions of each
            block's samples, which together are all samples.
        points: of the path; by default as many as `slopes_of` finds enough.
        balanced: whether the samples were drawn class by class; then they are dealt to blocks so too.

    Raises:
        NoGradient: if the utility has none, or a parameter or buffer of the model gets none.
    """
    m0, m = (as_tensor(vector).cpu().numpy() for vector in (m0, m))
    path = _Path(model, m0, m, x, y, resolve(utility), blocks, balanced=balanced)
    shown: Any = None  # the path has it

    def gradient(*asked: Any) -> Slopes:
        return path.slopes(asked[-1])

    with _setting(model):
        slopes, used, rest = slopes_of(gradient, m0, m, shown, path.blocks, points)
    return Direction(slopes.blocks, path.sizes, path.stratified, slopes.empty, slopes.grand, rest, used)


def slope(model: nn.Module, x: Images, y: Vectors, utility: str | Utility) -> tuple[float, dict[str, Tensor]]:
    """Return the mean utility of a model as it is, and the gradient of every parameter and floating buffer.

    The arguments and errors are those of `direction`.
    """
    vector = flatten(model)
    path = _Path(model, vector, vector, x, y, resolve(utility), 1)
    with _setting(model):
        return path.value(0.0), path.named(path.mean_gradient(1)[0])


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

    All of them ask for the same rounds, so each is computed once, as long as what is kept takes at most
    ``most`` bytes; the last one is always kept. The model gives architecture and device.
    """

    def __init__(self, model: nn.Module, utility: Utility, *, most: int = 1 << 30) -> None:
        self.model, self.utility, self.most = model, utility, most
        self.computed = 0  # rounds and numbers of points computed so far
        self._cache: dict[tuple[str, ...], Slopes] = {}  # in order of last use

    def __call__(self, m0: Model, m: Model, shown: Slice, blocks: Sequence[Indices], points: int) -> Slopes:
        """Return the gradient over the path from M0 to M, by block.

        Raises:
            SettlementError: it is not finite, or there is none.
        """
        places = hashlib.sha256(b"".join(len(block).to_bytes(8, "big") + block.tobytes() for block in blocks))
        key = model_hash(m0), model_hash(m), shown.id, places.hexdigest(), str(points)
        slopes = self._cache.pop(key, None) or self._compute(m0, m, shown, blocks, points)
        self._cache[key] = slopes
        while (
            len(self._cache) > 1 and sum(slopes.blocks.nbytes for slopes in self._cache.values()) > self.most
        ):
            del self._cache[next(iter(self._cache))]
        return slopes

    def _compute(self, m0: Model, m: Model, shown: Slice, blocks: Sequence[Indices], points: int) -> Slopes:
        self.computed += 1
        try:
            path = _Path(self.model, m0, m, shown.x, shown.y, self.utility, list(blocks))
            with _setting(self.model):
                return path.slopes(points)
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
        labels = check_for([utility], y, len(x))
        self.labels, self.images = labels.to(self.device), as_tensor(x).to(self.device)
        self.stratified = False  # blocks were not dealt here
        if not isinstance(blocks, Sequence):
            blocks, self.stratified = deal(labels.cpu().numpy(), blocks, classes=balanced)
        elif not np.array_equal(np.sort(np.concatenate(blocks)), np.arange(len(labels))):
            raise InputError(f"blocks: expected the positions of all {len(labels)} samples, each once")
        self.blocks, self.sizes = list(blocks), tuple(len(block) for block in blocks)
        self.order = torch.as_tensor(np.concatenate(blocks), device=self.device)
        self.weights: Tensor | None = None
        if utility.of == "classes":
            classes = self._classes()
            check_range(self.labels, classes)
            self.weights = balance(self.labels, classes) if utility.balanced else None
        # A user's function sees all samples at once.
        self.batch = batch_of(self.device) if utility.function is None else len(labels)

    def _vector(self, values: Vectors, what: str) -> Tensor:
        vector, length = as_tensor(values), state_length(self.model)
        if vector.shape != (length,):
            raise InputError(f"{what} must have {length} values like the model, got {tuple(vector.shape)}")
        vector = vector.to(self.device, torch.float64)
        if not bool(vector.isfinite().all()):
            raise InputError(f"{what} is not finite")
        return vector

    def _classes(self) -> int:
        """Return of how many classes the model has logits."""
        with evaluation(self.model):
            outputs = self.model(prepare(self.images[:1], self.device))
            return class_logits(check_outputs([self.utility], outputs, self.labels[:1])).shape[1]

    # ------------------------------------------------------------------------------------------------ values

    @cached_property
    def ends(self) -> tuple[float, float]:
        return self.value(0.0), self.value(1.0)

    def value(self, t: float) -> float:
        """Return v at a point of the path."""
        try:
            total = self._in_memory(lambda: self._sum(t))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # in float32, it worked before
            raise NoGradient(
                f"the network fails in float64, in which directions are computed ({error!s:.200}): let it "
                "compute in the type of its input and its parameters, or score by reports (alpha)",
                utility=self.utility.name,
            ) from error
        if not bool(total.isfinite()):
            raise ReportError(f"utility {self.utility.name!r} is not finite: the model diverged")
        return float(total) / len(self.order)

    def _sum(self, t: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            at = self._tensors(t)
            for part in torch.split(self.order, self.batch):
                total += self._utility(at, part).sum()
        return total

    def _in_memory(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return what is computed, in batches half as large each time a GPU's memory does not suffice."""
        while True:
            try:
                return compute()
            except torch.cuda.OutOfMemoryError:
                if self.batch == 1 or self.utility.function is not None:
                    raise
            self.batch //= 2
            torch.cuda.empty_cache()

    # --------------------------------------------------------------------------------------------- gradients

    def slopes(self, points: int) -> Slopes:
        """Return the gradient over the path by block, and v(M0) and v(M)."""
        empty, grand = self.ends
        return Slopes(self.mean_gradient(points).cpu().numpy(), empty, grand)

    def mean_gradient(self, points: int) -> Tensor:
        """Return the Gauss-Legendre mean of every block's gradient, shape (B, P)."""
        try:
            total = self._in_memory(lambda: self._gradients(points))
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ReportError) as error:  # without gradients, the same worked before
            raise no_gradient(self.utility, f" ({error})"[:300]) from error
        if not bool(total.isfinite().all()):
            finite = self.named(total.isfinite().all(0))
            name = next(name for name, part in finite.items() if not bool(part.all()))
            raise ReportError(f"the gradient of utility {self.utility.name!r} is not finite at {name!r}")
        return total

    def _gradients(self, points: int) -> Tensor:
        nodes, weights = np.polynomial.legendre.leggauss(points)
        total = torch.zeros(len(self.sizes), len(self.start), device=self.device)
        for t, weight in zip((1 + nodes) / 2, weights / 2, strict=True):
            self._add_gradients(total, float(t), float(weight))
        return total

    def _add_gradients(self, total: Tensor, t: float, weight: float) -> None:
        at, ends = self._tensors(t, gradient=True), np.cumsum(self.sizes).tolist()
        if self.utility.function is not None:
            values = torch.split(self._utility(at, self.order), list(self.sizes))
        for row, (end, size) in enumerate(zip(ends, self.sizes, strict=True)):
            if self.utility.function is not None:
                slopes = self._slopes(values[row], at, again=end < len(self.order))
                total[row].add_(slopes, alpha=weight / size)
                continue
            for part in torch.split(self.order[end - size : end], self.batch):
                total[row].add_(self._slopes(self._utility(at, part), at), alpha=weight / size)

    def _slopes(self, values: Tensor, at: dict[str, Tensor], *, again: bool = False) -> Tensor:
        if not values.requires_grad:
            raise no_gradient(self.utility)
        slopes = torch.autograd.grad(values.sum(), list(at.values()), allow_unused=True, retain_graph=again)
        for name, gradient in zip(at, slopes, strict=True):
            if gradient is None:
                raise NoGradient(
                    f"utility {self.utility.name!r} has no gradient at {name!r}: the model does not use it "
                    "in evaluation mode, or uses it where PyTorch gives none; take it out of the model, or "
                    "make it a buffer with persistent=False",
                    coordinate=name,
                )
        return torch.cat([gradient.reshape(-1) for gradient in slopes])

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a vector's parameters and floating buffers by name."""
        parts = torch.split(vector, [shape.numel() for shape in self.shapes.values()])
        named = zip(self.shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in named}

    def _tensors(self, t: float, *, gradient: bool = False) -> dict[str, Tensor]:
        tensors = self.named(self.start + t * self.move)
        return {name: tensor.clone().requires_grad_(gradient) for name, tensor in tensors.items()}

    def _utility(self, at: dict[str, Tensor], part: Tensor) -> Tensor:
        """Return the utility of these samples for the model with these tensors, in float64."""
        with _Float64():
            return self._measured(at | self.fixed, part)

    def _measured(self, at: dict[str, Tensor], part: Tensor) -> Tensor:
        images, labels = prepare(self.images[part], self.device), self.labels[part]
        if self.utility.function is not None:
            named = {f"model.{name}": tensor for name, tensor in at.items()}
            values: Tensor = functional_call(_Asked(self.model, self.utility), named, (images, labels))
            if values.shape != (len(part),):
                name, got = self.utility.name, tuple(values.shape)
                raise ReportError(f"utility {name!r} must return {len(part)} numbers, got shape {got}")
            return values
        outputs = functional_call(self.model, at, (images,))
        outputs = check_outputs([self.utility], outputs, labels, in_range=True)
        values = self.utility.values(outputs, labels)
        return values if self.weights is None else values * self.weights[part]


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
    advice = "take expected-accuracy, brier, neg-loss, or sharpened-accuracy in the place of accuracy"
    if utility.function is not None:
        advice = "return a torch tensor that follows from the model's answers by differentiable operations"
    elif utility.whole:
        advice = "take a mean over samples"
    return NoGradient(
        f"utility {utility.name!r} has no gradient{why}: {advice}, or score by reports (alpha)",
        utility=utility.name,
    )


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
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {
            k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()
        }
        if func is Tensor.float:
            func = Tensor.double
        elif func in (torch.zeros, torch.ones):
            kwargs.setdefault("dtype", torch.float64)
        elif func in _NORMALISE:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            if not bound.arguments[_NORMALISE[func]]:
                return _affine(bound.arguments)
        return func(*args, **kwargs)


_NORMALISE = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}
"""Functions that may normalise by running statistics, and the argument that says they do not."""


def _affine(arguments: Any) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, per channel."""
    x: Tensor = arguments["input"]
    slope = (arguments["running_var"] + arguments["eps"]).rsqrt()
    if arguments["weight"] is not None:
        slope = slope * arguments["weight"]
    offset = -arguments["running_mean"] * slope
    if arguments["bias"] is not None:
        offset = offset + arguments["bias"]
    shape = (1, -1, *[1] * (x.ndim - 2))
    out: Tensor = x * slope.view(shape) + offset.view(shape)
    return out
