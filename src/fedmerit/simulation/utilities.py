"""Utilities: how good a model is. v is the mean of one number per test sample, or a metric of all of them.

Higher is always better. With p = softmax(outputs), y the right class, m samples of which m_y have class y,
and C classes; one output per sample is the logit of class 1 of two. If model.outputs says that outputs are
probabilities, they are p themselves. Errors are e = |output - y|; s is in the name, as 20 in rmse-skill:20.

======================  ======================================  ========
expected-accuracy       p_y                                     in [0, 1]
accuracy                1[argmax p = y]                         in [0, 1]
balanced-accuracy       1[argmax p = y] m / (C m_y)             mean in [0, 1]
sharpened-accuracy      softmax(4 logits)_y                     in [0, 1]
brier                   1 - sum_k (p_k - 1[y = k])^2 / 2        in [0, 1]
neg-loss                log p_y                                 <= 0
rmse-skill              1 - min(e, s)^2 / s^2                   in [0, 1]
mae-skill               1 - min(e, s) / s                       in [0, 1]
module:function         function(model, x, y)                   in [0, 1] unless ``function.unit = False``
auc, f1, c-index        of all samples at once                  in [0, 1]
======================  ======================================  ========

All but the two of accuracy and the last line have a gradient. Sharpened accuracy is a stand-in for accuracy
that has one. Of rmse-skill, RMSE = s sqrt(1 - v), with errors cut at s.

A user's function receives the model in evaluation mode, all samples of the slice as the model gets them
(`prepare`) and their targets. It returns m numbers, or one number for ``whole:module:function``. Metrics of
all samples give one pseudo-value per block, see `fedmerit.scoring.sampling`; their mean is the metric.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmerit.config import load_object
from fedmerit.errors import ConfigError, DataError, ReportError
from fedmerit.notes import meant
from fedmerit.protocol.direction import metric_blocks
from fedmerit.scoring.sampling import SCALED, auc, c_index, f1, is_whole, jackknife, scale_of, value
from fedmerit.simulation.models import (
    Images,
    as_tensor,
    check_logits,
    check_targets,
    class_logits,
    device_of,
    evaluation,
    fitted,
    float32,
    prepare,
)

PerSample = Callable[[Tensor, Tensor], Tensor]
"""(logits (m, C), labels (m,)) -> one number per sample (m,); or of outputs in the shape of y, and y."""
Metric = Callable[[npt.NDArray[Any], npt.NDArray[Any]], float]
"""(outputs, y) of all samples -> one number."""


@dataclass(frozen=True)
class Utility:
    """A utility: ``of_logits`` and y, a ``metric``, or a user's ``function`` of model, x and y."""

    name: str
    definition: str
    unit: bool = True  # its mean lies in [0, 1]
    balanced: bool = False  # values are divided by C times the share of the sample's class
    of: Literal["classes", "numbers", "any"] = "classes"  # what y must be
    whole: bool = False  # a metric of all samples at once
    probabilities: bool = False  # it takes outputs for probabilities of the classes, not for logits
    metric: Metric | None = field(default=None, compare=False)
    of_logits: PerSample | None = field(default=None, compare=False)
    function: Callable[..., Any] | None = field(default=None, compare=False)

    def ready(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return outputs in the form that it takes; shapes are checked only where y is real numbers."""
        if self.of == "classes":
            return class_logits(outputs, probabilities=self.probabilities)
        return fitted(outputs, y) if self.of == "numbers" else outputs

    def values(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the value of every sample; of a metric of all samples, the outputs as it takes them."""
        outputs = self.ready(outputs, y)
        return outputs if self.of_logits is None else self.of_logits(outputs, y)

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


DIVERGED = "the model's answers are not finite: it diverged, or the images did"

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


def _skill(power: int, scale: float, outputs: Tensor, y: Tensor) -> Tensor:
    errors = (outputs - y) / scale
    losses = (errors.square() if power == 2 else errors.abs()).clamp(max=1)
    return 1 - (losses.flatten(1).mean(1) if losses.ndim > 1 else losses)  # of an array: of its mean error


def _scaled(name: str, scale: float) -> Utility:
    if not 0 < scale < math.inf:
        raise ConfigError.at(
            "scoring.utilities",
            f"{name!r}: expected {name.partition(':')[0]}:20, where 20 is the error, in the unit of y, that "
            "counts as 0",
        )
    power = 2 if name.startswith("rmse") else 1
    definition = f"1 - min(|output - y| / {scale!r}, 1)^{power}"
    return Utility(name, definition, of="numbers", of_logits=partial(_skill, power, scale))


METRICS: dict[str, Utility] = {
    "auc": Utility("auc", "area under the ROC curve (macro, one against the rest)", whole=True, metric=auc),
    "f1": Utility("f1", "F1 of class 1 of two, or macro", whole=True, metric=f1),
    "c-index": Utility("c-index", "Harrell's C of risks", of="any", whole=True, metric=c_index),
}


def resolve(name: str | Utility, *, probabilities: bool = False) -> Utility:
    """Return the utility of this name, from ``UTILITIES`` or a user's ``module:function``.

    ``probabilities``: whether the model returns probabilities of the classes, not logits.

    >>> resolve("brier").unit, resolve("neg-loss").unit
    (True, False)
    """
    if isinstance(name, Utility):
        return name
    if (scale := scale_of(name)) is not None:
        return _scaled(name, scale)
    if name in UTILITIES or name in METRICS:
        packaged = UTILITIES.get(name) or METRICS[name]
        if probabilities and packaged.of == "classes":
            definition = f"{packaged.definition}; logits = log(outputs)"
            return replace(packaged, definition=definition, probabilities=True)
        return packaged
    if ":" not in name:
        names = (*UTILITIES, *(f"{scaled}:20" for scaled in SCALED), *METRICS)
        problem = f"expected {', '.join(names)} or 'module:function', got {name!r}{meant(name, names)}"
        raise ConfigError.at("scoring.utilities", problem)
    function = load_object(name.removeprefix("whole:"), "scoring.utilities")
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        problem = f"{name!r} has no source, so nobody could check it"
        raise ConfigError.at("scoring.utilities", problem) from error
    unit = bool(getattr(function, "unit", True))
    return Utility(name, source, unit=unit, of="any", whole=is_whole(name), function=function)


def resolve_all(names: Sequence[str | Utility], *, probabilities: bool = False) -> tuple[Utility, ...]:
    """Return the utilities of these names, see `resolve`; raise if there is none, or one twice."""
    utilities = tuple(resolve(name, probabilities=probabilities) for name in names)
    unique = {utility.name for utility in utilities}
    if not utilities or len(unique) < len(utilities):
        got = [utility.name for utility in utilities]
        raise ConfigError.at("scoring.utilities", f"expected different names, got {got}")
    return utilities


def evaluate(
    model: nn.Module,
    x: Images,
    y: npt.NDArray[Any] | Tensor,
    utilities: Sequence[str | Utility],
    *,
    balanced: bool = False,
) -> dict[str, npt.NDArray[np.float64]]:
    """Return every utility of every sample, from one float32 forward pass and one call per user's function.

    Of a metric of the whole set, return a pseudo-value per block of samples; their mean is the metric. Blocks
    are dealt by class if samples were drawn so (``balanced``). The model's mode is restored.
    """
    wanted = resolve_all(utilities)
    device = device_of(model)
    images, labels = as_tensor(x), check_for(wanted, y, len(x)).to(device)
    parts: dict[str, list[Tensor]] = {utility.name: [] for utility in wanted}
    packaged = [utility for utility in wanted if utility.function is None]
    with evaluation(model), float32():
        for start in range(0, len(labels), batch_of(device)) if packaged else ():
            part = slice(start, start + batch_of(device))
            outputs = check_outputs(wanted, model(prepare(images[part], device)), labels[part])
            if not bool(outputs.isfinite().all()):
                raise ReportError(DIVERGED)
            for utility in packaged:
                parts[utility.name].append(utility.values(outputs, labels[part]))
        answers, out = labels.cpu().numpy(), {}
        for utility in wanted:
            if utility.function and not utility.whole:
                values = call(utility, model, prepare(images, device), labels)
                out[utility.name] = checked(utility, values.detach().cpu().numpy(), len(labels))
            elif utility.of_logits is not None:
                values = torch.cat(parts[utility.name]).detach().double()
                if utility.balanced:
                    values = values * balance(labels, class_logits(outputs).shape[1])
                out[utility.name] = checked(utility, values.cpu().numpy(), len(labels))
            else:
                samples = prepare(images, device) if utility.function else torch.cat(parts[utility.name])
                metric = _metric(utility, model, samples, labels)
                blocks = metric_blocks(answers, balanced=balanced)
                out[utility.name] = jackknife(utility.name, metric, blocks, unit=utility.unit)
    return out


def _metric(
    utility: Utility, model: nn.Module, samples: Tensor, labels: Tensor
) -> Callable[[npt.NDArray[np.int64]], Any]:
    """Return a metric as a function of the places of samples.

    A user's takes the model and the samples as the model gets them, a packaged one the model's outputs.
    """
    if (of := utility.function) is not None:

        def metric(places: npt.NDArray[np.int64]) -> Any:
            chosen = torch.as_tensor(places, device=labels.device)
            return of(model, samples[chosen], labels[chosen])

        return metric
    packaged = utility.metric
    assert packaged is not None
    outputs, answers = samples.double().cpu().numpy(), labels.cpu().numpy()
    return lambda places: packaged(outputs[places], answers[places])


def whole_value(utility: Utility, model: nn.Module, samples: Tensor, labels: Tensor) -> float:
    """Return a metric of the whole test set; NaN if the model's answers are not finite.

    The model is in evaluation mode, and the samples are as it gets them.
    """
    if utility.function is None:
        parts = [model(part).float() for part in torch.split(samples, batch_of(labels.device))]
        samples = torch.cat([utility.ready(part, labels) for part in parts])
        if not bool(samples.isfinite().all()):
            return math.nan
    metric = _metric(utility, model, samples, labels)
    return value(utility.name, metric, np.arange(len(labels)), unit=utility.unit)


def values_of(
    model: nn.Module, x: Images, y: npt.NDArray[Any] | Tensor, utilities: Sequence[Utility]
) -> dict[str, npt.NDArray[np.float64] | float]:
    """Return every utility of every sample as `evaluate` does; of a metric of the whole test set, itself."""
    per_sample = [utility for utility in utilities if not utility.whole]
    measured: dict[str, Any] = {**evaluate(model, x, y, per_sample)} if per_sample else {}
    if len(per_sample) < len(utilities):
        device = device_of(model)
        samples, labels = prepare(x, device), check_for(utilities, y, len(x)).to(device)
        with evaluation(model), float32():
            measured |= {one.name: whole_value(one, model, samples, labels) for one in utilities if one.whole}
        if not all(math.isfinite(measured[one.name]) for one in utilities if one.whole):
            raise ReportError(DIVERGED)
    return {utility.name: measured[utility.name] for utility in utilities}


def call(utility: Utility, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return a user's utility of every sample in float64."""
    assert utility.function is not None
    try:
        values = as_tensor(utility.function(model, images, labels)).double()
    except Exception as error:
        raise ReportError(f"utility {utility.name!r} failed: {type(error).__name__}: {error}") from error
    return values if values.ndim else values[None]


def balance(labels: Tensor, classes: int) -> Tensor:
    """Return m / (C m_y) for every sample in float64; raise `DataError` if a class has no sample."""
    counts = torch.bincount(labels, minlength=classes)
    if not bool(counts.all()):
        absent = int((counts == 0).nonzero()[0])
        raise DataError(f"balanced-accuracy: class {absent} of {classes} has no sample in the test slice")
    return len(labels) / (classes * counts[labels].double())


def check_for(utilities: Sequence[Utility], y: npt.NDArray[Any] | Tensor, samples: int) -> Tensor:
    """Return the targets as these utilities need them; raise `DataError` if they cannot be measured on y."""
    targets = check_targets(y, samples, classes=any(utility.of == "classes" for utility in utilities))
    for utility in utilities:
        if utility.of == "numbers" and not targets.is_floating_point():
            raise DataError(f"utility {utility.name!r} needs y of real numbers, got {targets.dtype}")
    return targets


def check_outputs(
    utilities: Sequence[Utility], outputs: Any, labels: Tensor, *, in_range: bool = False
) -> Tensor:
    """Return a model's outputs as float32; raise `DataError` if these utilities cannot take them.

    ``in_range``: labels are known to be classes of the model; otherwise this waits for the device.
    """
    if any(utility.of == "classes" for utility in utilities):
        return check_logits(outputs, labels, in_range=in_range)
    if not isinstance(outputs, Tensor) or not outputs.ndim or len(outputs) != len(labels):
        got = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise DataError(f"the model must return {len(labels)} outputs, one per sample, got {got}")
    if any(utility.of == "numbers" for utility in utilities):
        fitted(outputs, labels)
    return outputs.float()


DRAWS = 3
"""With how many sets of random weights `look_like_probabilities` asks a model."""


def look_like_probabilities(model: nn.Module, x: Images, *, adding_up: bool = False) -> bool:
    """Return whether outputs lie in [0, 1]; if ``adding_up``, also whether those of a sample sum to 1.

    Few logits may do so by chance; with random weights, only those behind a sigmoid or softmax do again.
    """
    asked, samples = copy.deepcopy(model), prepare(x[:16], device_of(model))
    generator = torch.Generator().manual_seed(0)
    with evaluation(asked), float32():
        for draw in range(DRAWS + 1):
            for weights in asked.parameters() if draw else ():
                weights.copy_(torch.randn(weights.shape, generator=generator))
            outputs = asked(samples)
            if not isinstance(outputs, Tensor) or outputs.ndim not in (1, 2) or not outputs.numel():
                return False
            if not bool(((outputs >= 0) & (outputs <= 1)).all()):
                return False
            if adding_up and not bool((outputs.sum(-1) - 1).abs().max() < 1e-4):
                return False
    return True


def check_kind(model: nn.Module, x: Images, utilities: Sequence[Utility], outputs: str = "") -> None:
    """Raise `ConfigError` if outputs that utilities take for logits look like probabilities.

    Nothing is checked if settings say what ``outputs`` are, "logits" or "probabilities".
    """
    of_classes = any(utility.of == "classes" and utility.function is None for utility in utilities)
    if outputs or not of_classes or not look_like_probabilities(model, x):
        return
    raise ConfigError.at(
        "model.outputs",
        "the outputs of the model look like probabilities, as after a sigmoid or softmax, where logits are "
        'expected: expected outputs = "probabilities" or "logits", got neither',
    )


def checked(utility: Utility, values: npt.NDArray[np.float64], samples: int) -> npt.NDArray[np.float64]:
    """Return the values; raise `ReportError` if one is missing, not finite, or outside a promised [0, 1]."""
    name = f"utility {utility.name!r}"
    if values.shape != (samples,):
        hint = f"; a metric of the whole test set is called whole:{utility.name}" if values.size == 1 else ""
        got = f"one per sample, got shape {values.shape}{hint}"
        raise ReportError(f"{name} must return {samples} numbers, {got}")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise ReportError(f"{name} of sample {bad[0]} is {values[bad[0]]}, expected a number")
    if utility.unit:
        values = np.where((values < 0) & (values > -1e-6), 0.0, values)  # float32 rounding leaves [0, 1]
        values = np.where((values > 1) & (values < 1 + 1e-6), 1.0, values)
        bad = np.flatnonzero((values < 0) | (values > (np.inf if utility.balanced else 1)))
        if bad.size:
            raise ReportError(f"{name} of sample {bad[0]} must lie in [0, 1], got {values[bad[0]]:g}")
    return values


def batch_of(device: torch.device) -> int:
    """Return the samples per forward pass: on a CPU as many as fit in its cache."""
    return 100 if device.type == "cpu" else 1000
