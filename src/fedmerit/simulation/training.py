"""Local training of one client: a loss, and an optimiser that is fresh each time.

The samples come in an order that depends only on the client's seed. These losses are there:

==================  =====================================  ==================================================
cross-entropy       -log softmax(outputs)[y]               y classes, or arrays of them; outputs (m, C, ...)
binary              -log sigmoid(outputs) of the answer    y two classes, or numbers in [0, 1]; outputs like y
mse                 ((outputs - y) / sd)^2                 y real numbers; outputs like y; see `Unit`
module:function     function(outputs, y)                   whatever the function takes; it returns one number
==================  =====================================  ==================================================

Where outputs must be like y, one more axis of length 1 after the first is allowed: (m, 1) for m numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmerit.config import LOSSES, load_object
from fedmerit.errors import ConfigError, DataError, FedmeritError, InputError
from fedmerit.protocol.pool import Labels
from fedmerit.simulation.models import (
    Images,
    as_tensor,
    check_logits,
    check_range,
    check_targets,
    device_of,
    fitted,
    float32,
    load_vector,
    logs,
    prepare,
    seeded,
    to_vector,
)

Vector = npt.NDArray[np.float32]
Data = tuple[Images, Labels | Tensor]
"""Samples (n, ...) and targets (n, ...) of one client."""
TensorData = tuple[Tensor, Tensor]
"""The same on the device."""

# ------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True)
class Loss:
    """A loss by its name; ``function`` maps (outputs, y) of a batch to one number."""

    name: str
    function: Callable[[Tensor, Tensor], Any] = field(compare=False)
    probabilities: bool = False  # whether a packaged loss gets probabilities in the place of logits

    def __call__(self, outputs: Any, y: Tensor) -> Tensor:
        """Return the loss of a batch, with its gradient.

        Raises:
            DataError: outputs and y do not fit, or the user's function fails or returns no number.
        """
        if not isinstance(outputs, Tensor):
            raise DataError(f"the model must return a tensor, got {type(outputs).__name__}")
        if self.name in LOSSES:
            outputs = outputs.float()
            if self.probabilities and self.name == "cross-entropy":
                outputs = logs(outputs)
            elif self.probabilities and self.name == "binary":
                outputs = logs(outputs) - logs(1 - outputs)
            return self.function(outputs, y)  # type: ignore[no-any-return]
        try:
            loss = self.function(outputs, y)
        except FedmeritError:
            raise
        except Exception as error:  # a user's code may raise anything
            shapes = f"outputs of shape {tuple(outputs.shape)} and y of shape {tuple(y.shape)}"
            problem = f"{self.name!r} failed on {shapes}: {type(error).__name__}: {error}"
            raise DataError.at("training.loss", problem) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            problem = f"{self.name!r} must return one number with a gradient, got {got}"
            raise DataError.at("training.loss", problem)
        return loss.reshape(())


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    if outputs.ndim != y.ndim + 1 or outputs.shape[:1] + outputs.shape[2:] != y.shape or outputs.shape[1] < 2:
        expected = ", ".join(map(str, (len(y), "classes", *y.shape[1:])))
        raise DataError(
            f"the model must return logits of shape ({expected}), with at least 2 classes, got "
            f"{tuple(outputs.shape)}; for one logit per sample, training.loss = 'binary'"
        )
    return F.cross_entropy(outputs, y)


def _binary(outputs: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(fitted(outputs, y), y.float())


def _mse(outputs: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(fitted(outputs, y), y.float())


class Unit:
    """Mean and standard deviation of y: as a forward hook, it turns a network's outputs z into mean + sd * z.

    Otherwise most of what a first round gains is that the network learns the mean of y, for which wrong
    answers do as well as right ones: members would be paid for that.
    """

    def __init__(self, y: Labels) -> None:
        axis = 0 if y.ndim <= 2 else None  # each column of a table; all places of an array alike
        mean, sd = np.mean(y, axis=axis, dtype=np.float64), np.std(y, axis=axis, dtype=np.float64)
        self.mean, self.sd = np.asarray(mean), np.asarray(np.where(sd > 0, sd, 1.0))

    def __call__(self, _network: Any, _inputs: Any, outputs: Any) -> Any:
        """Return outputs in the unit of y."""
        if not isinstance(outputs, Tensor):
            return outputs
        mean, sd = self._at(outputs)
        return mean + sd * outputs

    def mse(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error in standard deviations of y."""
        _, sd = self._at(outputs)
        return F.mse_loss(fitted(outputs, y) / sd, y.float() / sd)

    def _at(self, outputs: Tensor) -> tuple[Any, Any]:
        if not self.mean.ndim:
            return float(self.mean), float(self.sd)
        mean, sd = torch.as_tensor(self.mean).float(), torch.as_tensor(self.sd).float()
        return mean.to(outputs.device), sd.to(outputs.device)


_FUNCTIONS = {"cross-entropy": _cross_entropy, "binary": _binary, "mse": _mse}
CROSS_ENTROPY = Loss("cross-entropy", _cross_entropy)


def loss_of(name: str, *, probabilities: bool = False, unit: Unit | None = None) -> Loss:
    """Return the loss of this name, one of `LOSSES` or a user's ``module:function``.

    ``probabilities``: whether the model returns them, not logits. ``unit``: of the outputs, for "mse".
    """
    if name == "mse" and unit is not None:
        return Loss(name, unit.mse)
    if name in _FUNCTIONS:
        return Loss(name, _FUNCTIONS[name], probabilities)
    if ":" not in name:
        expected = f'expected one of {", ".join(LOSSES)}, or "module:function"'
        raise ConfigError.at("training.loss", f"{expected}, got {name!r}")
    return Loss(name, load_object(name, "training.loss"))


def _of_numbers(y: Labels) -> str:
    return "'mse' or 'binary'" if y.min() >= 0 and y.max() <= 1 else "'mse'"


def check_target(loss: str, y: Labels, classes: int, what: str) -> None:
    """Raise `ConfigError` if a loss cannot be trained with these targets; without class labels, 0 classes."""
    whole = y.dtype.kind in "iu"
    kind = f"{classes} classes" if classes else "real numbers" if y.ndim == 1 else f"arrays of {y.dtype}"
    problem = ""
    if loss == "cross-entropy" and not (classes or (whole and y.ndim > 1)):
        problem = f"classes, or arrays of classes: take {_of_numbers(y)}"
    elif loss == "cross-entropy" and int(y.min()) < 0:
        problem = f"classes from 0 on, but y holds {int(y.min())}"
    elif loss == "mse" and (classes or whole):
        problem = "real numbers: take 'cross-entropy' or 'binary', or store y as floats"
    elif loss == "binary" and (classes > 2 or not (y.min() >= 0 and y.max() <= 1)):
        problem = "two classes, or numbers in [0, 1]"
    if problem:
        raise ConfigError.at("training.loss", f"{loss!r} needs {problem}; y of {what} are {kind}")


def outputs_for(loss: str, y: Labels, classes: int) -> int:
    """Return how many numbers per sample (or per place of an array) the model should return.

    >>> import numpy as np
    >>> outputs_for("cross-entropy", np.array([0, 1, 2]), 3), outputs_for("mse", np.array([0.5, 1.5]), 0)
    (3, 1)
    >>> outputs_for("binary", np.array([0, 1]), 2), outputs_for("mse", np.zeros((5, 4)), 0)
    (1, 4)
    """
    if loss == "cross-entropy" or (classes and loss not in LOSSES):
        return classes or int(y.max()) + 1
    return int(y.shape[1]) if y.ndim == 2 else 1


# ----------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of local training.

    Weight decay is added to the gradient (L2) by ``adam`` and ``sgd``, and decoupled from it by ``adamw``.
    ``tf32`` lets a GPU multiply in TF32. This is faster, but results no longer equal a CPU's up to rounding.
    """

    local_epochs: int = 5
    batch_size: int = 64
    lr: float = 0.001
    weight_decay: float = 0.001
    tf32: bool = False
    optimiser: Literal["adam", "adamw", "sgd"] = "adam"
    loss: Loss = CROSS_ENTROPY


def batches(n: int, settings: TrainingSettings, seed: int) -> Iterator[Tensor]:
    """Yield the indices of each batch: a new permutation per local epoch, whose last batch may be short.

    >>> [len(batch) for batch in batches(5, TrainingSettings(local_epochs=2, batch_size=3), seed=0)]
    [3, 2, 3, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.local_epochs):
        order = torch.randperm(n, generator=generator)
        yield from (order[i : i + settings.batch_size] for i in range(0, n, settings.batch_size))


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def train(
    model: nn.Module, x: Images, y: npt.NDArray[Any] | Tensor, settings: TrainingSettings, seed: int
) -> None:
    """Train the model in place, on its device; the seed is that of the order of samples and of dropout.

    Results that are not finite are not checked here. With BatchNorm, batches of a single sample are skipped,
    because they have no variance.
    """
    device = device_of(model)
    images, labels = on_device((x, y), device, settings.loss)
    normalised = has_batch_norm(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter to train")
    optimiser, first = optimiser_for(settings, parameters), True
    plan = list(batches(len(labels), settings, seed))
    order = torch.cat(plan).to(device)  # at once: a copy per batch would wait for the step before it
    model.train()
    with exactly(settings), seeded(seed, device):
        for index in torch.split(order, [len(batch) for batch in plan]):
            if normalised and len(index) == 1:
                continue
            outputs = model(prepare(images[index], device))
            if first and settings.loss == CROSS_ENTROPY and labels.ndim == 1:
                check_logits(outputs, labels[index])
                check_range(labels, outputs.shape[1])
            first = False
            loss = settings.loss(outputs, labels[index])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def trained(
    model: nn.Module,
    start: Vector | Tensor,
    x: Images,
    y: npt.NDArray[Any] | Tensor,
    settings: TrainingSettings,
    seed: int,
) -> Vector:
    """Return the vector after training from ``start``; what a vector does not hold is put back after it."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    load_vector(model, start)
    train(model, x, y, settings, seed)
    vector = to_vector(model)
    for buffer, value in before:
        buffer.copy_(value)
    return vector


def optimiser_for(settings: TrainingSettings, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr, weight_decay=decay)
    kind = torch.optim.AdamW if settings.optimiser == "adamw" else torch.optim.Adam
    fused, on_gpu = all(map(_is_dense, parameters)), parameters[0].device.type == "cuda"
    return kind(parameters, lr, weight_decay=decay, fused=fused, capturable=on_gpu)


def _is_dense(parameter: Tensor) -> bool:
    """Return whether a parameter's numbers fill their memory without a gap.

    A part of a larger tensor, such as ``weight[:, :1]``, does not, and its gradient has another layout. Fused
    Adam goes through both number by number: it would train the wrong ones on a CPU, and fail on a GPU.
    """
    return parameter.stride() == torch.empty_like(parameter, device="meta").stride()


def on_device(data: Data, device: torch.device, loss: Loss = CROSS_ENTROPY) -> TensorData:
    """Return a client's data as tensors on the device; raise `DataError` if there is no sample."""
    if len(data[0]) == 0:
        raise DataError("cannot train on 0 images")
    labels = loss == CROSS_ENTROPY and as_tensor(data[1]).ndim == 1
    targets = check_targets(data[1], len(data[0]), classes=labels)
    return as_tensor(data[0]).to(device), targets.to(device)


@contextlib.contextmanager
def exactly(settings: TrainingSettings) -> Iterator[None]:
    """Multiply in the precision of the settings inside, with cuDNN's deterministic algorithms."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        with float32(tf32=settings.tf32):
            yield
    finally:
        torch.backends.cudnn.deterministic = before


def keep_memory() -> None:
    """Let this process keep freed memory for its next arrays, where the C library can (glibc).

    Otherwise large arrays come in pages that the system clears one by one, which can take as long as what is
    computed with them. It is for a process that does nothing but train and evaluate: its heap never shrinks.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(-4, 0)  # M_MMAP_MAX: no array is a mapping of its own
        set_option(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks
