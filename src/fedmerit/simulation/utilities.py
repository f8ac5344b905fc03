"""Utilities: how good a model is. v is the mean of one number per test sample, or a metric of all of them.

Higher is always better. With p = softmax(outputs), y the right class, m samples of which m_y have class y,
and C classes; one output per sample is the logit of class 1 of two. If model.outputs says that outputs are
probabilities, they are p themselves. Errors are e = |output - y|; s is scoring.scale.

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
(`fedmerit.simulation.models.prepare`) and their targets, both on the model's device. It returns m numbers, or
one number if ``scoring.whole`` lists it. Metrics of all samples give one pseudo-value per block of samples,
see `fedmerit.scoring.metrics`; their mean is the metric.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
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
from fedmerit.limits import SCALED, WHOLE
from fedmerit.notes import meant
from fedmerit.protocol.direction import metric_blocks
from fedmerit.scoring.metrics import auc, c_index, f1, jackknife, value
from fedmerit.simulation.losses import class_logits, fitted
from fedmerit.simulation.models import Images, as_tensor, prepare

PerSample = Callable[[Tensor, Tensor], Tensor]
"""(logits (m, C), labels (m,)) -> one number per sample (m,); or of outputs in the shape of y, and y."""
Metric = Callable[[npt.NDArray[Any], npt.NDArray[Any]], float]
"""(outputs, y) of all samples -> one number."""


@dataclass(frozen=True)
class Utility:
    """A utility: of outputs and y (``of_logits`` or ``metric``), or a user's ``function`` of model, x and y.

    ``unit``: whether its mean lies in [0, 1]. ``balanced``: whether values are divided by C times the share
    of the sample's class. ``of``: what y must be. ``whole``: whether it is a metric of all samples at once.
    ``probabilities``: whether it takes outputs for probabilities of the classes, not for logits.
    """

    name: str
    definition: str
    unit: bool = True
    balanced: bool = False
    of: Literal["classes", "numbers", "any"] = "classes"
    whole: bool = False
    probabilities: bool = False
    metric: Metric | None = field(default=None, compare=False)
    of_logits: PerSample | None = field(default=None, compare=False)
    function: Callable[..., Any] | None = field(default=None, compare=False)

    @property
    def asks(self) -> bool:
        """Whether it takes one model at a time: a user's function, or a metric of all samples."""
        return self.function is not None or self.whole

    def ready(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return outputs in the form that it takes; shapes are checked only where y is no class."""
        if self.of == "classes":
            return class_logits(outputs, probabilities=self.probabilities)
        return fitted(outputs, y)

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


def _squared(scale: float, outputs: Tensor, y: Tensor) -> Tensor:
    return 1 - _per_sample(((outputs - y) / scale).square().clamp(max=1))


def _absolute(scale: float, outputs: Tensor, y: Tensor) -> Tensor:
    return 1 - _per_sample(((outputs - y) / scale).abs().clamp(max=1))


def _per_sample(values: Tensor) -> Tensor:
    """Return the mean over all axes but the first."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def _scaled(name: str, scale: float) -> Utility:
    """Return a utility of errors, which this scale maps into [0, 1]."""
    if not scale > 0:
        raise ConfigError.at(
            "scoring.scale", f"{name!r} needs it: expected the error, in the unit of y, that counts as 0"
        )
    power, of = (2, _squared) if name == "rmse-skill" else (1, _absolute)
    definition = f"1 - min(|output - y| / {scale!r}, 1)^{power}"
    return Utility(name, definition, of="numbers", of_logits=partial(of, scale))


METRICS: dict[str, Utility] = {
    "auc": Utility("auc", "area under the ROC curve (macro, one against the rest)", whole=True, metric=auc),
    "f1": Utility("f1", "F1 of class 1 of two, or macro", whole=True, metric=f1),
    "c-index": Utility("c-index", "Harrell's C of risks", of="any", whole=True, metric=c_index),
}
assert tuple(METRICS) == WHOLE


def resolve(
    name: str | Utility, *, scale: float = 0.0, whole: Sequence[str] = (), probabilities: bool = False
) -> Utility:
    """Return the utility of this name, from ``UTILITIES`` or a user's ``module:function``.

    Args:
        name: of the utility, or itself.
        scale: for rmse-skill and mae-skill.
        whole: the users' utilities that are metrics of the whole test set.
        probabilities: whether the model returns probabilities of the classes, not logits.

    >>> resolve("brier").unit, resolve("neg-loss").unit
    (True, False)
    """
    if isinstance(name, Utility):
        return name
    if name in SCALED:
        return _scaled(name, scale)
    if name in UTILITIES or name in METRICS:
        found = UTILITIES.get(name) or METRICS[name]
        if probabilities and found.of == "classes":
            definition = f"{found.definition}; logits = log(outputs)"
            return replace(found, definition=definition, probabilities=True)
        return found
    if ":" not in name:
        known = (*UTILITIES, *SCALED, *METRICS)
        asked = meant(name, known)
        raise ConfigError.at(
            "scoring.utilities", f"expected {', '.join(known)} or 'module:function', got {name!r}{asked}"
        )
    function = load_object(name, "scoring.utilities")
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise ConfigError.at(
            "scoring.utilities", f"{name!r} has no source, so nobody could check it"
        ) from error
    unit = bool(getattr(function, "unit", True))
    return Utility(name, source, unit=unit, of="any", whole=name in whole, function=function)


def resolve_all(
    names: Sequence[str | Utility],
    *,
    scale: float = 0.0,
    whole: Sequence[str] = (),
    probabilities: bool = False,
) -> tuple[Utility, ...]:
    """Return the utilities of these names, see `resolve`; raise if there is none, or one twice."""
    found = tuple(resolve(name, scale=scale, whole=whole, probabilities=probabilities) for name in names)
    if not found or len({utility.name for utility in found}) < len(found):
        raise ConfigError.at("scoring.utilities", f"expected different names, got {[u.name for u in found]}")
    return found


def evaluate(
    model: nn.Module,
    x: Images,
    y: npt.NDArray[Any] | Tensor,
    utilities: Sequence[str | Utility],
    batch_size: int | None = None,
    *,
    balanced: bool = False,
) -> dict[str, npt.NDArray[np.float64]]:
    """Return every utility of every sample, from one float32 forward pass and one call per user's function.

    Of a metric of the whole set, return a pseudo-value per block of samples; their mean is the metric.

    Args:
        model: evaluated on its own device, in evaluation mode; its mode is restored.
        x: samples, shape (m, ...); images have shape (m, H, W, C).
        y: targets, shape (m, ...); labels lie in 0 ... C-1.
        utilities: names, or results of ``resolve``.
        batch_size: samples per forward pass; by default 1000, but 100 on a CPU, which fit in its cache.
        balanced: whether the samples were drawn class by class; then blocks of samples are dealt so too.

    Returns:
        Per utility, float64 of shape (m,), or of shape (blocks,) for a metric of the whole set.
    """
    wanted = resolve_all(utilities)
    device = device_of(model)
    batch_size = batch_size or (100 if device.type == "cpu" else 1000)
    images, labels = as_tensor(x), check_for(wanted, y, len(x)).to(device)
    found: dict[str, list[Tensor]] = {utility.name: [] for utility in wanted}
    with evaluation(model), float32():
        if any(utility.function is None for utility in wanted):
            for start in range(0, len(labels), batch_size):
                part = slice(start, start + batch_size)
                outputs = check_outputs(wanted, model(prepare(images[part], device)), labels[part])
                if not bool(outputs.isfinite().all()):
                    raise ReportError("the model's answers are not finite: it diverged, or the images did")
                for utility in wanted:
                    if utility.function is None:
                        fit = outputs if utility.of == "any" else utility.ready(outputs, labels[part])
                        of = utility.of_logits
                        found[utility.name].append(fit if of is None else of(fit, labels[part]))
        for utility in wanted:
            if utility.function and not utility.whole:
                found[utility.name].append(call(utility, model, prepare(images, device), labels))
        asked = {
            utility.name: jackknife(
                utility.name,
                _asked(utility, model, prepare(images, device), labels),
                metric_blocks(labels.cpu().numpy(), balanced=balanced),
                unit=utility.unit,
            )
            for utility in wanted
            if utility.function and utility.whole
        }
    out = {}
    for utility in wanted:
        if utility.name in asked:
            out[utility.name] = asked[utility.name]
            continue
        one = torch.cat([part.detach() for part in found[utility.name]]).double().cpu()
        if utility.metric is not None:
            answers = labels.cpu().numpy()
            blocks = metric_blocks(answers, balanced=balanced)
            out[utility.name] = pseudo_values(utility, one.numpy(), answers, blocks)
            continue
        if utility.balanced:
            one = one * balance(labels, class_logits(outputs).shape[1]).cpu()
        out[utility.name] = checked(utility, one.numpy(), len(labels))
    return out


def pseudo_values(
    utility: Utility,
    outputs: npt.NDArray[np.float64],
    y: npt.NDArray[Any],
    blocks: Sequence[npt.NDArray[np.int64]],
) -> npt.NDArray[np.float64]:
    """Return the pseudo-values of a packaged metric of the whole test set."""
    of = utility.metric
    assert of is not None
    return jackknife(utility.name, lambda places: of(outputs[places], y[places]), blocks)


def _asked(
    utility: Utility, model: nn.Module, samples: Tensor, labels: Tensor
) -> Callable[[npt.NDArray[np.int64]], Any]:
    """Return a user's metric as a function of the places of samples, which are as the model gets them."""
    of = utility.function
    assert of is not None

    def metric(places: npt.NDArray[np.int64]) -> Any:
        chosen = torch.as_tensor(places, device=labels.device)
        return of(model, samples[chosen], labels[chosen])

    return metric


def whole_value(
    utility: Utility, model: nn.Module, samples: Tensor, labels: Tensor, batch_size: int
) -> float:
    """Return a metric of the whole test set; NaN if the model's answers are not finite.

    Args:
        utility: a metric of the whole set.
        model: in evaluation mode.
        samples: as the model gets them.
        labels: on the same device.
        batch_size: samples per forward pass.
    """
    every = np.arange(len(labels))
    if utility.function is not None:
        return value(utility.name, _asked(utility, model, samples, labels), every, unit=utility.unit)
    parts = [model(part).float() for part in torch.split(samples, batch_size)]
    outputs = torch.cat([one if utility.of == "any" else utility.ready(one, labels) for one in parts])
    outputs = outputs.double().cpu()
    if not bool(outputs.isfinite().all()):
        return math.nan
    found, y, of = outputs.numpy(), labels.cpu().numpy(), utility.metric
    assert of is not None
    return value(utility.name, lambda _: of(found, y), every)


def metric_of(model: nn.Module, x: Images, y: npt.NDArray[Any] | Tensor, utility: Utility) -> float:
    """Return a metric of the whole test set for a model, on the model's device and in evaluation mode."""
    device = device_of(model)
    with evaluation(model), float32():
        labels = check_for([utility], y, len(x)).to(device)
        found = whole_value(utility, model, prepare(x, device), labels, 100 if device.type == "cpu" else 1000)
    if not math.isfinite(found):
        raise ReportError("the model's answers are not finite: it diverged, or the images did")
    return found


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


def check_targets(y: npt.NDArray[Any] | Tensor, samples: int) -> Tensor:
    """Return targets as a tensor of shape (samples, ...); raise `DataError` if they are not, or none."""
    targets = as_tensor(y)
    if not targets.ndim or len(targets) != samples:
        raise DataError(f"expected {samples} targets, one per sample, got shape {tuple(targets.shape)}")
    if samples == 0:
        raise DataError("cannot evaluate on 0 images")
    return targets


def check_for(utilities: Sequence[Utility], y: npt.NDArray[Any] | Tensor, samples: int) -> Tensor:
    """Return the targets as these utilities need them; raise `DataError` if they cannot be measured on y."""
    if any(utility.of == "classes" for utility in utilities):
        return check_labels(y, samples)
    targets = check_targets(y, samples)
    for utility in utilities:
        if utility.of == "numbers" and not targets.is_floating_point():
            raise DataError(f"utility {utility.name!r} needs y of real numbers, got {targets.dtype}")
    return targets


def check_outputs(
    utilities: Sequence[Utility], outputs: Any, labels: Tensor, *, in_range: bool = False
) -> Tensor:
    """Return a model's outputs as float32; raise `DataError` if these utilities cannot take them.

    ``in_range``: whether labels are known to be classes of the model; otherwise this waits for the device.
    """
    if any(utility.of == "classes" for utility in utilities):
        return check_logits(outputs, labels, in_range=in_range)
    if not isinstance(outputs, Tensor) or not outputs.ndim or len(outputs) != len(labels):
        got = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise DataError(f"the model must return {len(labels)} outputs, one per sample, got {got}")
    if any(utility.of == "numbers" for utility in utilities):
        fitted(outputs, labels)
    return outputs.float()


def check_labels(y: npt.NDArray[Any] | Tensor, samples: int) -> Tensor:
    """Return labels as int64 of shape (samples,); raise `DataError` if they are not, or if there is none."""
    labels = as_tensor(y)
    if labels.shape != (samples,) or labels.is_floating_point():
        got = f"shape {tuple(labels.shape)}, {labels.dtype}"
        raise DataError(f"labels must be {samples} integers, one per image, got {got}")
    if samples == 0:
        raise DataError("cannot evaluate on 0 images")
    return labels.long()


def check_logits(logits: Any, labels: Tensor, *, in_range: bool = False) -> Tensor:
    """Return the outputs as float32; raise `DataError` if their shape is not (m, C), or some label too large.

    One output per sample is that of class 1 of two. ``in_range`` is that of `check_outputs`.
    """
    if not isinstance(logits, Tensor) or logits.ndim not in (1, 2) or len(logits) != len(labels):
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise DataError(f"the model must return logits of shape ({len(labels)}, classes), got {got}")
    if not in_range:
        check_range(labels, class_logits(logits).shape[1])
    return logits.float()


DRAWS = 3
"""With how many sets of random weights `look_like_probabilities` asks a model."""


def look_like_probabilities(model: nn.Module, samples: Tensor) -> bool:
    """Return whether a model's outputs lie in [0, 1] and, if there are several per sample, sum to 1.

    Few logits may do so by chance, above all before training. So the model is asked again with random
    weights: a sigmoid or softmax at its end keeps its outputs there, and nothing else does.
    """
    asked = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with evaluation(asked), float32():
        for draw in range(DRAWS + 1):
            for one in asked.parameters() if draw else ():
                one.copy_(torch.randn(one.shape, generator=generator))
            outputs = asked(samples)
            if not isinstance(outputs, Tensor) or outputs.ndim not in (1, 2) or not outputs.numel():
                return False
            inside = bool(((outputs >= 0) & (outputs <= 1)).all())
            sums = outputs.flatten(1).sum(1) if outputs.ndim > 1 and outputs.shape[1] > 1 else None
            if not inside or (sums is not None and bool((abs(sums - 1) > 1e-3).any())):
                return False
    return True


def check_kind(model: nn.Module, x: Images, utilities: Sequence[Utility], said: str = "") -> None:
    """Raise `ConfigError` if outputs that utilities take for logits look like probabilities.

    Args:
        model: with its first weights.
        x: test samples, of which a few are taken.
        utilities: what is measured.
        said: ``logits`` or ``probabilities`` if somebody said what outputs are; then nothing is checked.
    """
    of_classes = any(one.of == "classes" and one.function is None for one in utilities)
    if said or not of_classes or not look_like_probabilities(model, prepare(x[:16], device_of(model))):
        return
    raise ConfigError.at(
        "model.outputs",
        "the outputs of the model look like probabilities, as after a sigmoid or softmax, where logits are "
        'expected: expected outputs = "probabilities" or "logits", got neither',
    )


def check_range(labels: Tensor, classes: int) -> None:
    """Raise `DataError` if some label lies outside 0 ... classes-1."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"labels must lie in 0 ... {classes - 1}, got {low if low < 0 else high}")


def checked(utility: Utility, values: npt.NDArray[np.float64], samples: int) -> npt.NDArray[np.float64]:
    """Return the values; raise `ReportError` if one is missing, not finite, or outside a promised [0, 1]."""
    name = f"utility {utility.name!r}"
    if values.shape != (samples,):
        hint = "; scoring.whole lists metrics of the whole test set" if values.size == 1 else ""
        got = f"one per sample, got shape {values.shape}{hint}"
        raise ReportError(f"{name} must return {samples} numbers, {got}")
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
