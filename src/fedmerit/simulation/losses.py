"""Losses: what local training makes small, and which targets each one takes.

==================  =====================================  ==================================================
cross-entropy       -log softmax(outputs)[y]               y classes, or arrays of them; outputs (m, C, ...)
binary              -log sigmoid(outputs) of the answer    y two classes, or numbers in [0, 1]; outputs like y
mse                 ((outputs - y) / sd)^2                 y real numbers; outputs like y; see `Unit`
module:function     function(outputs, y)                   whatever the function takes; it returns one number
==================  =====================================  ==================================================

Where outputs must be like y, one more axis of length 1 after the first is allowed: (m, 1) for m numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fedmerit.config import load_object
from fedmerit.errors import ConfigError, DataError, FedmeritError
from fedmerit.limits import LOSSES

Labels = npt.NDArray[Any]


@dataclass(frozen=True)
class Loss:
    """A loss by its name; ``function`` maps (outputs, y) of a batch to one number.

    ``probabilities``: whether a packaged loss gets probabilities in the place of logits.
    """

    name: str
    function: Callable[[Tensor, Tensor], Any] = field(compare=False)
    probabilities: bool = False

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
            found = self.function(outputs, y)
        except FedmeritError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise DataError.at(
                "training.loss",
                f"{self.name!r} failed on outputs of shape {tuple(outputs.shape)} and y of "
                f"shape {tuple(y.shape)}: {type(error).__name__}: {error}",
            ) from error
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise DataError.at(
                "training.loss", f"{self.name!r} must return one number with a gradient, got {got}"
            )
        return found.reshape(())


def fitted(outputs: Tensor, y: Tensor) -> Tensor:
    """Return outputs in the shape of y; raise `DataError` if they do not fit."""
    if outputs.shape == y.shape:
        return outputs
    if outputs.ndim == y.ndim + 1 and outputs.shape[1] == 1 and outputs[:, 0].shape == y.shape:
        return outputs[:, 0]
    raise DataError(
        f"the model must return numbers of shape {tuple(y.shape)} like y, or with one more axis of length 1 "
        f"after the first, got {tuple(outputs.shape)}"
    )


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    expected = (len(y), "classes", *y.shape[1:])
    if outputs.ndim != y.ndim + 1 or outputs.shape[:1] + outputs.shape[2:] != y.shape or outputs.shape[1] < 2:
        told = "(" + ", ".join(map(str, expected)) + ")"
        raise DataError(
            f"the model must return logits of shape {told}, with at least 2 classes, got "
            f"{tuple(outputs.shape)}; for one logit per sample, training.loss = 'binary'"
        )
    return F.cross_entropy(outputs, y)


def _binary(outputs: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(fitted(outputs, y), y.float())


def _mse(outputs: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(fitted(outputs, y), y.float())


class Unit:
    """Mean and standard deviation of y: a network's outputs are counted in them, and shown in the unit of y.

    Otherwise most of what a first round gains is that the network learns the mean of y, for which wrong
    answers do as well as right ones: members would be paid for that. As a forward hook, it turns outputs z
    into mean + sd * z, so that whoever calls the network deals in the unit of y.
    """

    def __init__(self, y: Labels) -> None:
        axis = 0 if y.ndim <= 2 else None  # each column of a table; all places of an array alike
        mean, sd = np.mean(y, axis=axis, dtype=np.float64), np.std(y, axis=axis, dtype=np.float64)
        self.mean, self.sd = np.asarray(mean), np.asarray(np.where(sd > 0, sd, 1.0))
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

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
        if outputs.device not in self._on:
            made = [
                torch.as_tensor(one, dtype=torch.float32).to(outputs.device) for one in (self.mean, self.sd)
            ]
            self._on[outputs.device] = made[0], made[1]
        return self._on[outputs.device]


_FUNCTIONS = {"cross-entropy": _cross_entropy, "binary": _binary, "mse": _mse}
CROSS_ENTROPY = Loss("cross-entropy", _cross_entropy)


def loss_of(name: str, *, probabilities: bool = False, unit: Unit | None = None) -> Loss:
    """Return the loss of this name, one of `LOSSES` or a user's ``module:function``.

    Args:
        name: of the loss.
        probabilities: whether the model returns probabilities of the classes, not logits.
        unit: of the outputs, for "mse".
    """
    if name == "mse" and unit is not None:
        return Loss(name, unit.mse)
    if name in _FUNCTIONS:
        return Loss(name, _FUNCTIONS[name], probabilities)
    if ":" not in name:
        raise ConfigError.at(
            "training.loss", f'expected one of {", ".join(LOSSES)}, or "module:function", got {name!r}'
        )
    return Loss(name, load_object(name, "training.loss"))


def check_target(loss: str, y: Labels, classes: int, what: str) -> None:
    """Raise `ConfigError` if a loss cannot be trained with these targets.

    Args:
        loss: its name.
        y: targets.
        classes: number of classes; 0 if y is no class.
        what: the data, for messages.
    """
    whole = y.dtype.kind in "iu"
    kind = f"{classes} classes" if classes else "real numbers" if y.ndim == 1 else f"arrays of {y.dtype}"
    problem = ""
    if loss == "cross-entropy" and not (classes or (whole and y.ndim > 1)):
        problem = "classes, or arrays of classes: take 'mse' or 'binary'"
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


def class_logits(outputs: Tensor, *, probabilities: bool = False) -> Tensor:
    """Return logits of shape (m, C); one logit per sample becomes those of two classes, (0, z).

    Probabilities become their logarithms, which are logits too; one per sample is that of class 1.

    >>> class_logits(torch.tensor([2.0, -1.0])).tolist()
    [[0.0, 2.0], [0.0, -1.0]]
    >>> class_logits(torch.tensor([0.25]), probabilities=True).exp().tolist()
    [[0.75, 0.25]]
    """
    if outputs.ndim == 1:
        outputs = outputs[:, None]
    if outputs.ndim == 2 and outputs.shape[1] == 1:
        other = 1 - outputs if probabilities else torch.zeros_like(outputs)
        outputs = torch.cat([other, outputs], dim=1)
    return logs(outputs) if probabilities else outputs


def logs(probabilities: Tensor) -> Tensor:
    """Return logarithms; those of 0, and of what rounding left below it, stay finite."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).eps ** 2).log()
