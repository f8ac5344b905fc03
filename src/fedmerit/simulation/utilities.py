"""Utilities: how good a model is, as one number per test sample. v is their mean; higher is always better.

With p = softmax(logits), y the right class, m samples of which m_y have class y, and C classes:

======================  ======================================  ========
expected-accuracy       p_y                                     in [0, 1]
accuracy                1[argmax p = y]                         in [0, 1]
balanced-accuracy       1[argmax p = y] m / (C m_y)             mean in [0, 1]
sharpened-accuracy      softmax(4 logits)_y                     in [0, 1]
brier                   1 - sum_k (p_k - 1[y = k])^2 / 2        in [0, 1]
neg-loss                log p_y                                 <= 0
module:function         function(model, images, labels)         in [0, 1] unless ``function.unit = False``
======================  ======================================  ========

All but the two of accuracy have a gradient. Sharpened accuracy is a stand-in for accuracy that has one.

A user's function receives the model in evaluation mode, all images of the slice as float32 (m, C, H, W) and
their labels (m,), both on the model's device. It returns m numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmerit.config import load_object
from fedmerit.errors import ConfigError, DataError, ReportError
from fedmerit.simulation.models import Images, as_tensor, prepare

PerSample = Callable[[Tensor, Tensor], Tensor]
"""(logits (m, C), labels (m,)) -> one number per sample (m,)."""


@dataclass(frozen=True)
class Utility:
    """A per-sample utility: of logits and labels, or a user's ``function`` of model, images and labels.

    ``unit``: whether its mean lies in [0, 1]. ``balanced``: whether values are divided by C times the share
    of the sample's class.
    """

    name: str
    definition: str
    unit: bool = True
    balanced: bool = False
    of_logits: PerSample | None = field(default=None, compare=False)
    function: Callable[..., Any] | None = field(default=None, compare=False)

    def definition_hash(self) -> str:
        """Return the SHA-256 of the definition, which for a user's function is its source."""
        return hashlib.sha256(self.definition.encode()).hexdigest()


def _right(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) == y).to(logits.dtype)


def _probability(logits: Tensor, y: Tensor) -> Tensor:
    return logits.softmax(1).gather(1, y[:, None])[:, 0]


def _sharpened(logits: Tensor, y: Tensor) -> Tensor:
    return _probability(4 * logits, y)


def _brier(logits: Tensor, y: Tensor) -> Tensor:
    p = logits.softmax(1)
    return 1 - (p - F.one_hot(y, logits.shape[1])).square().sum(1) / 2


def _log_probability(logits: Tensor, y: Tensor) -> Tensor:
    return -F.cross_entropy(logits, y, reduction="none")


UTILITIES: dict[str, Utility] = {
    utility.name: utility
    for utility in (
        Utility("expected-accuracy", "softmax(logits)[y]", of_logits=_probability),
        Utility("accuracy", "1[argmax(logits) = y]", of_logits=_right),
        Utility("balanced-accuracy", "1[argmax(logits) = y] m / (C m_y)", balanced=True, of_logits=_right),
        Utility("sharpened-accuracy", "softmax(4 logits)[y]", of_logits=_sharpened),
        Utility("brier", "1 - sum_k (softmax(logits)[k] - 1[y = k])^2 / 2", of_logits=_brier),
        Utility("neg-loss", "log(softmax(logits)[y])", unit=False, of_logits=_log_probability),
    )
}


def resolve(name: str | Utility) -> Utility:
    """Return the utility of this name, from ``UTILITIES`` or a user's ``module:function``.

    >>> resolve("brier").unit, resolve("neg-loss").unit
    (True, False)
    """
    if isinstance(name, Utility):
        return name
    if name in UTILITIES:
        return UTILITIES[name]
    if ":" not in name:
        known = ", ".join(UTILITIES)
        raise ConfigError.at("scoring.utilities", f"expected {known} or 'module:function', got {name!r}")
    function = load_object(name, "scoring.utilities")
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise ConfigError.at(
            "scoring.utilities", f"{name!r} has no source, so nobody could check it"
        ) from error
    return Utility(name, source, unit=bool(getattr(function, "unit", True)), function=function)


def resolve_all(names: Sequence[str | Utility]) -> tuple[Utility, ...]:
    """Return the utilities of these names; raise `ConfigError` if there is none, or one twice."""
    found = tuple(resolve(name) for name in names)
    if not found or len({utility.name for utility in found}) < len(found):
        raise ConfigError.at("scoring.utilities", f"expected different names, got {[u.name for u in found]}")
    return found


def evaluate(
    model: nn.Module,
    x: Images,
    y: npt.NDArray[Any] | Tensor,
    utilities: Sequence[str | Utility],
    batch_size: int | None = None,
) -> dict[str, npt.NDArray[np.float64]]:
    """Return every utility of every sample, from one float32 forward pass and one call per user's function.

    Args:
        model: evaluated on its own device, in evaluation mode; its mode is restored.
        x: images, shape (m, H, W, C).
        y: labels in 0 ... C-1, shape (m,).
        utilities: names, or results of ``resolve``.
        batch_size: images per forward pass; by default 1000, but 100 on a CPU, which fit in its cache.

    Returns:
        Per utility, float64 of shape (m,).
    """
    wanted = resolve_all(utilities)
    device = device_of(model)
    batch_size = batch_size or (100 if device.type == "cpu" else 1000)
    images, labels = as_tensor(x), check_labels(y, len(x)).to(device)
    values: dict[str, list[Tensor]] = {utility.name: [] for utility in wanted}
    with evaluation(model), float32():
        if any(utility.of_logits for utility in wanted):
            for start in range(0, len(labels), batch_size):
                part = slice(start, start + batch_size)
                logits = check_logits(model(prepare(images[part], device)), labels[part])
                if not bool(logits.isfinite().all()):
                    raise ReportError("the model's answers are not finite: it diverged, or the images did")
                for utility in wanted:
                    if utility.of_logits:
                        values[utility.name].append(utility.of_logits(logits, labels[part]))
        for utility in wanted:
            if utility.function:
                values[utility.name].append(call(utility, model, prepare(images, device), labels))
    out = {}
    for utility in wanted:
        found = torch.cat([value.detach() for value in values[utility.name]]).double().cpu()
        if utility.balanced:
            found = found * balance(labels, logits.shape[1]).cpu()
        out[utility.name] = checked(utility, found.numpy(), len(labels))
    return out


def call(utility: Utility, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return a user's utility of every sample in float64."""
    assert utility.function is not None
    try:
        given = as_tensor(utility.function(model, images, labels)).double()
    except Exception as error:
        raise ReportError(f"utility {utility.name!r} failed: {type(error).__name__}: {error}") from error
    return given if given.ndim else given[None]


def balance(labels: Tensor, classes: int) -> Tensor:
    """Return m / (C m_y) for every sample in float64; raise `DataError` if a class has no sample."""
    counts = torch.bincount(labels, minlength=classes)
    if not bool(counts.all()):
        absent = int((counts == 0).nonzero()[0])
        raise DataError(f"balanced-accuracy: class {absent} of {classes} has no sample in the test slice")
    return len(labels) / (classes * counts[labels].double())


def check_labels(y: npt.NDArray[Any] | Tensor, samples: int) -> Tensor:
    """Return labels as int64 of shape (samples,); raise `DataError` if they are not, or if there is none."""
    labels = as_tensor(y)
    if labels.shape != (samples,) or labels.is_floating_point():
        got = f"shape {tuple(labels.shape)}, {labels.dtype}"
        raise DataError(f"labels must be {samples} integers, one per image, got {got}")
    if samples == 0:
        raise DataError("cannot evaluate on 0 images")
    return labels.long()


def check_logits(logits: Any, labels: Tensor) -> Tensor:
    """Return the logits as float32 (m, C); raise `DataError` if their shape or some label does not fit."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(labels):
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise DataError(f"the model must return logits of shape ({len(labels)}, classes), got {got}")
    check_range(labels, logits.shape[1])
    return logits.float()


def check_range(labels: Tensor, classes: int) -> None:
    """Raise `DataError` if some label lies outside 0 ... classes-1."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"labels must lie in 0 ... {classes - 1}, got {low if low < 0 else high}")


def checked(utility: Utility, values: npt.NDArray[np.float64], samples: int) -> npt.NDArray[np.float64]:
    """Return the values; raise `ReportError` if one is missing, not finite, or outside a promised [0, 1]."""
    name = f"utility {utility.name!r}"
    if values.shape != (samples,):
        raise ReportError(f"{name} must return {samples} numbers, one per sample, got shape {values.shape}")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise ReportError(f"{name} of sample {bad[0]} is {values[bad[0]]}, expected a number")
    if utility.unit:
        values = _rounding_off(values)
        bad = np.flatnonzero((values < 0) | (values > (np.inf if utility.balanced else 1)))
        if bad.size:
            raise ReportError(f"{name} of sample {bad[0]} must lie in [0, 1], got {values[bad[0]]:g}")
    return values


def _rounding_off(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the values with those that left [0, 1] only by float32 rounding set to 0 or 1."""
    values = np.where((values < 0) & (values > -1e-6), 0.0, values)
    return np.where((values > 1) & (values < 1 + 1e-6), 1.0, values)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@contextlib.contextmanager
def evaluation(model: nn.Module, *, gradient: bool = False) -> Iterator[None]:
    """Use evaluation mode inside the block, with gradients if asked; restore every submodule's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.enable_grad() if gradient else torch.inference_mode():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def float32(*, tf32: bool = False) -> Iterator[None]:
    """Multiply in full float32 inside the block, or in TF32 if asked; this matters only on a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def record(
    work: Callable[[], object],
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    pool: Any = None,
) -> torch.cuda.CUDAGraph:
    """Return the kernels of ``work`` as a CUDA graph; raise `RuntimeError` if it waits for the device.

    Args:
        work: what to record; it is not done.
        device: a GPU.
        stream: on which the graph will be replayed, if that matters.
        pool: memory shared with graphs that are never replayed at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                work()
        except RuntimeError:
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())  # otherwise dropout fails from now on
            raise
    return graph
