"""The networks, and a model as one flat vector.

The vector is what members train, sum and evaluate. It holds every parameter, then every persistent
floating-point buffer (BatchNorm's running statistics), in the order of ``named_parameters`` and
``named_buffers``. Integer buffers, such as BatchNorm's batch counter, cannot be averaged, so the vector
does not hold them; ``left_out`` names them.
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


def build(name: str, input_shape: Shape, classes: int, norm: str = "group", seed: int = 0) -> nn.Module:
    """Return the network ``name`` with weights drawn from ``seed``; global generators are not touched.

    Args:
        name: one of ``MODELS``, or ``module:factory``, which is called as ``factory(input_shape, classes)``.
        input_shape: (height, width, channels) of one image, or the shape of one sample; only ``mlp`` and a
            user's factory take others than images.
        classes: number of classes, or of outputs where y is no class.
        norm: ``group`` or ``batch``, the normalisation of the ResNets.
        seed: of the initial weights.

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
    if norm not in ("group", "batch"):
        raise ConfigError(f"model.norm must be 'group' or 'batch', got {norm!r}", setting="model.norm")
    with seeded(seed):
        model = _make(name, input_shape, classes, norm)
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise ConfigError(
            f"model.name {name!r} must return a torch.nn.Module, got {got}", setting="model.name"
        )
    if any(value.is_complex() for value in model.state_dict().values()):
        problem = "complex parameters cannot be summed securely"
        raise ConfigError(f"model.name {name!r}: {problem}", setting="model.name")
    return model.float()


def _make(name: str, input_shape: Shape, classes: int, norm: str) -> Any:
    if name == "mlp":
        flat = math.prod(input_shape)
        layers = nn.Linear(flat, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)
        return nn.Sequential(nn.Flatten(), *layers)
    if name in ("cnn", "cnn-pool"):
        return CNN(input_shape, classes, pool=name == "cnn-pool")
    if name == "resnet18":
        return ResNet((2, 2, 2, 2), input_shape[2], classes, norm=norm)
    if name == "resnet50":
        return ResNet((3, 4, 6, 3), input_shape[2], classes, norm=norm, bottleneck=True)
    if ":" in name:
        factory = load_object(name, "model.name")
        try:
            return factory(input_shape, classes)
        except FedmeritError:
            raise
        except Exception as error:  # a user's code may raise anything
            called = f"factory({input_shape}, {classes})"
            problem = f"{type(error).__name__}: {error}"
            raise ConfigError.at("model.name", f"{name!r} failed, called as {called}: {problem}") from error
    known = ", ".join(MODELS)
    raise ConfigError(
        f"model.name must be one of {known} or 'module:factory', got {name!r}", setting="model.name"
    )


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
    """Return the same images with their channels side by side in memory, if they are on a CPU.

    All layers keep this layout. In it PyTorch pools several channels at once, in its own one number after
    another.
    """
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
    kept = model.state_dict().keys() if buffers else ()
    return {k: p.detach() for k, p in model.named_parameters()} | {
        k: v.detach() for k, v in buffers.items() if k in kept
    }


def left_out(model: nn.Module) -> tuple[str, ...]:
    """Return the names of persistent buffers that the vector does not hold, because they are not floats.

    >>> left_out(nn.BatchNorm1d(2))
    ('num_batches_tracked',)
    """
    kept = model.state_dict().keys()
    return tuple(k for k, v in model.named_buffers() if k in kept and not v.is_floating_point())


def state_length(model: nn.Module) -> int:
    """Return the length of the model's vector."""
    return sum(value.numel() for value in state(model).values())


def flatten(model: nn.Module) -> Tensor:
    """Return the model's vector as a new float32 tensor on its device."""
    return torch.cat([value.reshape(-1).float() for value in state(model).values()])


def to_vector(model: nn.Module) -> npt.NDArray[np.float32]:
    """Return the model's vector as a new float32 array."""
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
