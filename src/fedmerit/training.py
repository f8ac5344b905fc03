"""Local training: Adam on the cross-entropy, a fresh optimiser each time, one client or many at once.

On a CPU clients train one after another, on a GPU they are stacked where the model allows it. Both ways see
the same samples in the same order, which depends on the client's seed only, so they agree up to rounding
(dropout masks aside: a stack draws its own).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmerit.errors import ConfigError, DataError, InputError
from fedmerit.models import Images, as_tensor, load_vector, prepare, seeded, to_vector
from fedmerit.stacking import Probe, Stack, TensorData, has_batch_norm, probe
from fedmerit.utilities import check_labels, check_logits, check_range, device_of, float32

Vector = npt.NDArray[np.float32]
Data = tuple[Images, npt.NDArray[Any] | Tensor]
"""Images (n, H, W, C) and labels (n,) of one client."""
Method = Literal["auto", "loop", "stacked"]


@dataclass(frozen=True)
class TrainingSettings:
    """Adam with weight decay (L2, added to the gradient), reset each time.

    ``tf32`` lets a GPU multiply in TF32: faster, and no longer the same numbers as a CPU up to rounding.
    """

    local_epochs: int = 5
    batch_size: int = 64
    lr: float = 0.001
    weight_decay: float = 0.001
    tf32: bool = False

    def __post_init__(self) -> None:
        for name in ("local_epochs", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"training.{name} must be at least 1, got {value}")
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"training.lr must be a positive number, got {self.lr}")
        if not 0 <= self.weight_decay < float("inf"):
            raise ConfigError(f"training.weight_decay must be at least 0, got {self.weight_decay}")


@dataclass(frozen=True)
class Trained:
    """One vector per client, how they were trained, and why not stacked where that was hoped for."""

    vectors: list[Vector]
    method: Literal["loop", "stacked"]
    note: str | None = None


def batches(n: int, settings: TrainingSettings, seed: int) -> Iterator[Tensor]:
    """Indices of every batch of all local epochs: a fresh permutation per epoch, the last batch may be short.

    >>> [len(batch) for batch in batches(5, TrainingSettings(local_epochs=2, batch_size=3), seed=0)]
    [3, 2, 3, 2]
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.local_epochs):
        order = torch.randperm(n, generator=generator)
        yield from (order[i : i + settings.batch_size] for i in range(0, n, settings.batch_size))


def train(
    model: nn.Module, x: Images, y: npt.NDArray[Any] | Tensor, settings: TrainingSettings, seed: int
) -> None:
    """Train the model in place, on its device. A result that is not finite is left as it is.

    With BatchNorm a last batch of a single sample is skipped: it has no variance.

    Args:
        model: to be trained.
        x: images, shape (n, H, W, C).
        y: labels, shape (n,).
        settings: epochs, batch size, Adam.
        seed: of the order of samples and of dropout.
    """
    device = device_of(model)
    images, labels = on_device((x, y), device)
    normalised = has_batch_norm(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter to train")
    adam = _adam(settings, parameters)
    model.train()
    with exactly(settings), seeded(seed, device):
        for index in batches(len(labels), settings, seed):
            if normalised and len(index) == 1:
                continue
            index = index.to(device)
            logits = model(prepare(images[index], device))
            if not adam.state:
                check_logits(logits, labels[index])
                check_range(labels, logits.shape[1])
            loss = F.cross_entropy(logits, labels[index])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()


def train_many(
    model: nn.Module,
    starts: Vector | Tensor | Sequence[Vector | Tensor],
    data: Sequence[Data],
    settings: TrainingSettings,
    seeds: Sequence[int],
    method: Method = "auto",
) -> Trained:
    """Train one model per client, stacked on a GPU where the model allows it, else one after another.

    Args:
        model: gives architecture and device; its weights are overwritten.
        starts: one vector for all clients, or one each.
        data: images and labels of each client.
        settings: epochs, batch size, Adam.
        seeds: one per client.
        method: ``auto`` stacks on a GPU only; ``loop`` and ``stacked`` insist, the latter with an error.
    """
    if len(seeds) != len(data):
        raise InputError(f"expected {len(data)} seeds, one per client, got {len(seeds)}")
    shared = isinstance(starts, np.ndarray | Tensor) and starts.ndim == 1
    begin: list[Vector | Tensor] = [starts] * len(data) if shared else list(starts)  # type: ignore[list-item]
    if len(begin) != len(data):
        raise InputError(f"expected one start or {len(data)}, one per client, got {len(begin)}")
    device, note = device_of(model), None
    if method == "stacked" or (method == "auto" and device.type == "cuda" and len(data) > 1):
        load_vector(model, begin[0])
        seen = probe(model, on_device(data[0], device))
        note = seen.reason
        if note is None:
            try:
                return Trained(_halving(model, seen, begin, data, settings, seeds), "stacked")
            except RuntimeError as error:  # vmap's word for a forward that it cannot batch
                note = f"cannot be stacked: {error}".splitlines()[0]
        if method == "stacked":
            raise InputError(f"the model {note}")
    vectors = []
    aside = [(buffer, buffer.clone()) for buffer in model.buffers()]  # integer counters start anew each time
    for start, (x, y), seed in zip(begin, data, seeds, strict=True):
        for buffer, value in aside:
            buffer.copy_(value)
        load_vector(model, start)
        train(model, x, y, settings, seed)
        vectors.append(to_vector(model))
    return Trained(vectors, "loop", note and f"one client after another: the model {note}")


def _halving(
    model: nn.Module,
    seen: Probe,
    starts: Sequence[Vector | Tensor],
    data: Sequence[Data],
    settings: TrainingSettings,
    seeds: Sequence[int],
) -> list[Vector]:
    """Stacked in one go, or in two halves where the memory does not suffice."""
    device = device_of(model)
    try:
        sets = [on_device(one, device) for one in data]
        for _, y in sets:
            check_range(y, seen.classes)
        plan = [list(batches(len(y), settings, seed)) for (_, y), seed in zip(sets, seeds, strict=True)]
        begin = torch.stack([as_tensor(start).to(device).float() for start in starts])
        stack = Stack(model, begin, partial(_adam, settings), seen.ignored)
        with exactly(settings):
            return list(stack.train(sets, plan, seeds[0]).cpu().numpy())
    except torch.cuda.OutOfMemoryError:
        if len(starts) == 1:
            raise
    torch.cuda.empty_cache()
    half = (len(starts) + 1) // 2
    first = _halving(model, seen, starts[:half], data[:half], settings, seeds[:half])
    return first + _halving(model, seen, starts[half:], data[half:], settings, seeds[half:])


def train_shared(
    model: nn.Module, starts: Tensor, data: TensorData, settings: TrainingSettings, seed: int, seen: Probe
) -> Tensor:
    """Train K models, shape (K, P), on the batches of one client: what ``train`` does to each of them."""
    stack = Stack(model, starts, partial(_adam, settings), seen.ignored)
    with exactly(settings):
        return stack.train([data], [list(batches(len(data[1]), settings, seed))], seed)


def _adam(settings: TrainingSettings, parameters: Sequence[Tensor]) -> torch.optim.Adam:
    fused = parameters[0].device.type == "cuda"
    return torch.optim.Adam(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=fused)


def on_device(data: Data, device: torch.device) -> TensorData:
    """A client's data as tensors there, at least one sample."""
    if len(data[0]) == 0:
        raise DataError("cannot train on 0 images")
    return as_tensor(data[0]).to(device), check_labels(data[1], len(data[0])).to(device)


@contextlib.contextmanager
def exactly(settings: TrainingSettings) -> Iterator[None]:
    """Products as the settings say, and cuDNN's algorithms that give the same bits twice."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        with float32(tf32=settings.tf32):
            yield
    finally:
        torch.backends.cudnn.deterministic = before
