"""The networks, a model as one flat vector, and what goes into a model and comes out of it.

The vector holds every parameter, then every persistent floating-point buffer, in the order of
``named_parameters`` and ``named_buffers``. Integer buffers cannot be averaged; ``left_out`` names them.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmerit.config import load_object
from fedmerit.errors import ConfigError, DataError, FedmeritError, InputError

MODELS = ("mlp", "cnn", "cnn-pool", "resnet18", "resnet50")

Shape = tuple[int, ...]
"""Height, width, channels of one image; or the shape of one sample of any other kind."""
Images = npt.NDArray[Any] | Tensor
"""Samples. Shape (m, H, W, C), uint8 or floats: images. Anything else is passed on, see `prepare`."""


def build(name: str, input_shape: Shape, classes: int, seed: int = 0) -> nn.Module:
    """Return the network ``name`` with weights drawn from ``seed``; global generators are not touched.

    The name is one of ``MODELS``, or ``module:factory``, called as ``factory(input_shape, classes)``. Only
    ``mlp`` and a user's factory take samples other than images. Where y is not a class
    label, ``classes`` is the number of outputs.

    >>> state_length(build("mlp", (4, 4, 1), 3))  # (16 + 1) * 128 + (128 + 1) * 64 + (64 + 1) * 3
    10627
    """
    if not input_shape or min(input_shape) < 1:
        raise ConfigError(f"input_shape must be the shape of one sample, got {tuple(input_shape)}")
    if name in MODELS and name != "mlp" and len(input_shape) != 3:
        raise ConfigError.at(
            "model.name",
            f"{name!r} takes images of shape (height, width, channels), and samples have shape "
            f"{tuple(input_shape)}: take 'mlp' or your own 'module:factory'",
        )
    if classes < 1:
        raise ConfigError(f"a model needs at least 1 output, got {classes}")
    with seeded(seed):
        model = _make(name, input_shape, classes)
    if not isinstance(model, nn.Module):
        problem = f"must return a torch.nn.Module, got {type(model).__name__}"
        raise ConfigError.at("model.name", f"{name!r} {problem}")
    if any(value.is_complex() for value in model.state_dict().values()):
        raise ConfigError.at("model.name", f"{name!r}: complex parameters cannot be summed securely")
    return model.float()


def _make(name: str, input_shape: Shape, classes: int) -> Any:
    if name == "mlp":
        flat = math.prod(input_shape)
        layers = nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)
        return nn.Sequential(nn.Flatten(), *layers)
    if name in ("cnn", "cnn-pool"):
        return CNN(input_shape, classes, pool=name == "cnn-pool")
    if name == "resnet18":
        return ResNet((2, 2, 2, 2), input_shape[2], classes)
    if name == "resnet50":
        return ResNet((3, 4, 6, 3), input_shape[2], classes, bottleneck=True)
    if ":" in name:
        factory = load_object(name, "model.name")
        try:
            return factory(input_shape, classes)
        except FedmeritError:
            raise
        except Exception as error:  # a user's code may raise anything
            problem = f"called as factory({input_shape}, {classes}): {type(error).__name__}: {error}"
            raise ConfigError.at("model.name", f"{name!r} failed, {problem}") from error
    known = ", ".join(MODELS)
    raise ConfigError.at("model.name", f"must be one of {known} or 'module:factory', got {name!r}")


@contextlib.contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators inside the block, and restore them after it."""
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda, device_type="cuda"):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def _interleaved(x: Tensor) -> Tensor:
    """Return images with their channels side by side in memory on a CPU, where PyTorch then pools faster."""
    if x.device.type != "cpu":
        return x
    last = x.permute(0, 2, 3, 1)
    return last.flatten().view(last.shape).permute(0, 3, 1, 2)  # says so even of a single channel


class CNN(nn.Module):
    """Conv2d(c, 16, 3), Conv2d(16, 32, 3), Linear(flat, 128), Linear(128, classes), with ReLU between.

    Convolutions keep the size (padding 1). With ``pool`` a 2 x 2 max pooling follows each, so a 224 x 224
    image gives Linear(100352, 128). Without ``pool`` a 32 x 32 image gives Linear(32768, 128).
    """

    def __init__(self, input_shape: Shape, classes: int, *, pool: bool) -> None:
        super().__init__()
        height, width, channels = input_shape
        if pool:
            height, width = height // 4, width // 4
        if height * width == 0:
            raise ConfigError(f"cnn-pool needs images of at least 4 x 4, got {input_shape[:2]}")
        self.pool = pool
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * height * width, 128)
        self.fc2 = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.pool:
            x = _interleaved(x)
        for conv in (self.conv1, self.conv2):
            x = conv(x)
            if self.pool:  # before the ReLU, which changes nothing and leaves it a quarter of the work
                x = F.max_pool2d(x, 2)
            x = F.relu(x)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """ResNet (He et al. 2016) with torchvision's names in the state dict, for either normalisation."""

    def __init__(
        self,
        blocks: tuple[int, ...],
        channels: int,
        classes: int,
        *,
        norm: str = "group",
        bottleneck: bool = False,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = _norm(norm, width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs, stages = width, []
        for stage, count in enumerate(blocks):
            made = []
            for block in range(count):
                stride = 2 if stage and not block else 1
                made.append(_Block(inputs, width << stage, stride, norm, bottleneck))
                inputs = made[-1].outputs
            stages.append(nn.Sequential(*made))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """Basic block (two 3 x 3) or bottleneck (1 x 1, 3 x 3, 1 x 1 with four times the channels)."""

    def __init__(self, inputs: int, width: int, stride: int, norm: str, bottleneck: bool) -> None:
        super().__init__()
        self.outputs = outputs = 4 * width if bottleneck else width
        self.bottleneck = bottleneck
        first, second = (1, stride) if bottleneck else (stride, 1)
        kernel = 1 if bottleneck else 3
        self.conv1 = nn.Conv2d(inputs, width, kernel, stride=first, padding=kernel // 2, bias=False)
        self.bn1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=second, padding=1, bias=False)
        self.bn2 = _norm(norm, width)
        if bottleneck:
            self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
            self.bn3 = _norm(norm, outputs)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, _norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.bottleneck:
            y = self.bn3(self.conv3(self.relu(y)))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))  # type: ignore[no-any-return]


def _norm(norm: str, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(32, channels // 2), channels)  # at least two channels per group


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in the vector by name, in order: parameters, then persistent float buffers."""
    buffers = {k: v for k, v in model.named_buffers() if v.is_floating_point()}
    persistent = model.state_dict().keys() if buffers else ()
    return {k: p.detach() for k, p in model.named_parameters()} | {
        k: v.detach() for k, v in buffers.items() if k in persistent
    }


def left_out(model: nn.Module) -> tuple[str, ...]:
    """Return the names of persistent buffers that the vector does not hold, because they are not floats.

    >>> left_out(nn.BatchNorm1d(2))
    ('num_batches_tracked',)
    """
    persistent = model.state_dict().keys()
    return tuple(k for k, v in model.named_buffers() if k in persistent and not v.is_floating_point())


def state_length(model: nn.Module) -> int:
    return sum(value.numel() for value in state(model).values())


def flatten(model: nn.Module) -> Tensor:
    """Return the model's vector as a new float32 tensor on its device."""
    return torch.cat([value.reshape(-1).float() for value in state(model).values()])


def to_vector(model: nn.Module) -> npt.NDArray[np.float32]:
    return flatten(model).cpu().numpy()


def load_vector(model: nn.Module, vector: npt.NDArray[Any] | Tensor) -> None:
    """Write a vector into the model; the inverse of ``to_vector``."""
    values, targets = as_tensor(vector), [*state(model).values()]
    if values.shape != (length := sum(target.numel() for target in targets),):
        raise InputError(f"the model has {length} values, got a vector of shape {tuple(values.shape)}")
    values = values.to(targets[0].device)  # in one piece: a GPU is waited for once, not once per tensor
    start = 0
    with torch.no_grad():
        for target in targets:
            target.copy_(values[start : start + target.numel()].view(target.shape))
            start += target.numel()


def as_tensor(values: npt.NDArray[Any] | Tensor) -> Tensor:
    """Return a tensor that shares memory with the array, even a read-only one: nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.as_tensor(values)


def prepare(x: Images, device: torch.device | str = "cpu") -> Tensor:
    """Return samples as the model gets them.

    Images (m, H, W, C) become float32 (m, C, H, W): uint8 as x / 127.5 - 1, floats unchanged. Samples of any
    other shape keep it: floats as float32, integers as int64.
    """
    samples = as_tensor(x)
    if samples.ndim < 2 or samples.is_complex():
        raise DataError(f"samples must be numbers of shape (m, ...), got {tuple(samples.shape)}")
    samples = samples.to(device)
    if samples.ndim == 4 and (samples.dtype == torch.uint8 or samples.is_floating_point()):
        images = samples.permute(0, 3, 1, 2)
        if images.dtype == torch.uint8:
            return (images.float() / 127.5 - 1).contiguous()
        return images.float().contiguous()
    return (samples.float() if samples.is_floating_point() else samples.long()).contiguous()


def device_of(model: nn.Module) -> torch.device:
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


# ------------------------------------------------------------------------------------- outputs and targets


def fitted(outputs: Tensor, y: Tensor) -> Tensor:
    """Return outputs in the shape of y; raise `DataError` if they do not fit."""
    if outputs.shape == y.shape:
        return outputs
    if outputs.shape == (*y.shape[:1], 1, *y.shape[1:]):
        return outputs[:, 0]
    raise DataError(
        f"the model must return numbers of shape {tuple(y.shape)} like y, or with one more axis of length 1 "
        f"after the first, got {tuple(outputs.shape)}"
    )


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


def check_targets(y: npt.NDArray[Any] | Tensor, samples: int, *, classes: bool = False) -> Tensor:
    """Return targets as a tensor of shape (samples, ...), or labels as int64 of shape (samples,).

    Raises:
        DataError: they have another shape, there is none, or labels are no integers.
    """
    targets = as_tensor(y)
    if classes and (targets.shape != (samples,) or targets.is_floating_point()):
        got = f"shape {tuple(targets.shape)}, {targets.dtype}"
        raise DataError(f"labels must be {samples} integers, one per image, got {got}")
    if not targets.ndim or len(targets) != samples:
        raise DataError(f"expected {samples} targets, one per sample, got shape {tuple(targets.shape)}")
    if samples == 0:
        raise DataError("cannot evaluate on 0 images")
    return targets.long() if classes else targets


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


def check_range(labels: Tensor, classes: int) -> None:
    """Raise `DataError` if some label lies outside 0 ... classes-1."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"labels must lie in 0 ... {classes - 1}, got {low if low < 0 else high}")
