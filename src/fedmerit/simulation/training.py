"""Local training of one or many clients: Adam on the cross-entropy, with a fresh optimiser each time.

On a CPU clients train one after another; on a GPU they are stacked if the model allows it. Both ways see the
same samples in the same order, which depends only on the client's seed, so they agree up to rounding. The
exception is dropout: a stack draws its own masks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmerit.errors import ConfigError, DataError, InputError
from fedmerit.simulation.models import Images, as_tensor, load_vector, prepare, seeded, state, to_vector
from fedmerit.simulation.utilities import check_labels, check_logits, check_range, device_of, float32

# ------------------------------------------------------------------------------------------------- stacked

TensorData = tuple[Tensor, Tensor]
"""Images (n, H, W, C) and labels (n,) on the device."""


@dataclass(frozen=True)
class Probe:
    """Why a model cannot be stacked (None: no reason found), its classes, and parameters its loss ignores."""

    reason: str | None = None
    classes: int = 0
    ignored: frozenset[str] = frozenset()


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether some layer normalises by the statistics of the batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def probe(model: nn.Module, data: TensorData) -> Probe:
    """Find out from gradients on three samples whether a model can be stacked; its state is restored."""
    if has_batch_norm(model):
        return Probe("has BatchNorm, which normalises by the batch")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        return Probe("has no parameter to train")
    device = data[1].device
    index = torch.arange(3, device=device) % len(data[1])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    images = prepare(data[0][index], device).requires_grad_()
    model.train()
    with seeded(0, device):
        logits = check_logits(model(images), data[1][index])
        across = torch.autograd.grad(logits[0].sum(), images, allow_unused=True, retain_graph=True)[0]
        loss = F.cross_entropy(logits, data[1][index])
        slopes = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    if changed:
        return Probe(f"changes its buffer {changed[0]!r} while training")
    if across is not None and bool((across[1:] != 0).any()):
        return Probe("lets the samples of a batch influence each other")
    ignored = frozenset(name for name, slope in zip(trained, slopes, strict=True) if slope is None)
    return Probe(None, logits.shape[1], ignored)


class Stack:
    """K models that train in step.

    Args:
        model: gives the architecture; its weights are not used.
        starts: shape (K, P), on the device; overwritten by the trained vectors.
        optimiser: makes the optimiser of the stacked parameters; it must treat every number separately.
        ignored: parameters without a gradient, which the optimiser does not change.
    """

    def __init__(
        self,
        model: nn.Module,
        starts: Tensor,
        optimiser: Callable[[list[Tensor]], torch.optim.Optimizer],
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.device, self.size = model.train(), starts.device, len(starts)
        self.state: dict[str, Tensor] = {}
        begin = 0
        for name, value in state(model).items():
            piece = starts[:, begin : begin + value.numel()]
            self.state[name] = piece.reshape(-1, *value.shape).clone()
            begin += value.numel()
        trained = {name for name, p in model.named_parameters() if p.requires_grad} - ignored
        self.moving = {name: value for name, value in self.state.items() if name in trained}
        self.optimiser = optimiser([value.requires_grad_() for value in self.moving.values()])
        self.result = starts

    def train(self, data: Sequence[TensorData], plan: Sequence[list[Tensor]], seed: int) -> Tensor:
        """Train on one data set per model, or on one for all; return the trained vectors, shape (K, P).

        Args:
            data: one (images, labels) per model, or a single one that all models share.
            plan: the batches of each data set, as indices into it.
            seed: of dropout; masks differ between data sets, but models that share one get the same masks.
        """
        shared = len(data) == 1
        order = sorted(range(len(plan)), key=lambda i: -len(plan[i]))  # models with the fewest batches last
        index, weight = (part.to(self.device) for part in _padded(data, plan, order))
        images, labels = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
        rows = list(range(self.size)) if shared else order
        for value in self.state.values():
            value.data = value.data[rows]
        fixed = {name: value for name, value in self.state.items() if name not in self.moving}
        axis = None if shared else 0
        gradient = torch.func.vmap(
            torch.func.grad(self._loss),
            in_dims=(0, 0, axis, axis, axis),
            randomness="same" if shared else "different",
        )

        def move(at: Tensor, w: Tensor) -> None:
            """Take one step with all models on the samples ``at``."""
            x = prepare(images[at.flatten()], self.device).reshape(*at.shape, *_chw(images))
            batch = (x[0], labels[at[0]], w[0]) if shared else (x, labels[at], w)
            slopes = gradient({name: value.detach() for name, value in self.moving.items()}, fixed, *batch)
            for name, value in self.moving.items():
                value.grad = slopes[name].contiguous()
            self.optimiser.step()

        with seeded(seed, self.device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            for step in range(len(index)):
                active = sum(len(plan[i]) > step for i in order)
                self._retire(rows, self.size if shared else active)
                move(index[step, :active], weight[step, :active])
        self._retire(rows, 0)
        return self.result

    def _loss(
        self, moving: dict[str, Tensor], fixed: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> Tensor:
        """Return the mean cross-entropy: the n samples have weight 1/n, the padding has weight 0."""
        logits = torch.func.functional_call(self.model, {**moving, **fixed}, (x,))
        return (F.cross_entropy(logits, y, reduction="none") * weight).sum()

    def _retire(self, rows: list[int], active: int) -> None:
        """Remove finished models from the end of the stack and put their vectors into ``result``."""
        now = len(next(iter(self.state.values())))
        if active == now:
            return
        parts = [value.detach()[active:].flatten(1) for value in self.state.values()]
        self.result[rows[active:now]] = torch.cat(parts, dim=1)
        for value in self.state.values():
            value.grad = None
            value.data = value.data[:active]
            moments = self.optimiser.state.get(value, {})
            for name, moment in moments.items():
                if name != "step":
                    moments[name] = moment[:active]


def _padded(
    data: Sequence[TensorData], plan: Sequence[list[Tensor]], order: list[int]
) -> tuple[Tensor, Tensor]:
    """Return indices into the concatenated data sets, and weights: both (steps, data sets, batch)."""
    begin = np.cumsum([0] + [len(y) for _, y in data])
    steps, width = len(plan[order[0]]), max(len(batch) for batches in plan for batch in batches)
    index = torch.zeros(steps, len(plan), width, dtype=torch.int64)
    weight = torch.zeros(index.shape)
    for row, i in enumerate(order):
        index[:, row] = int(begin[i])
        for step, batch in enumerate(plan[i]):
            index[step, row, : len(batch)] = batch + int(begin[i])
            weight[step, row, : len(batch)] = 1 / len(batch)
    return index, weight


def _chw(images: Tensor) -> tuple[int, int, int]:
    _, height, width, channels = images.shape
    return channels, height, width


# ---------------------------------------------------------------------------------------------- one by one

Vector = npt.NDArray[np.float32]
Data = tuple[Images, npt.NDArray[Any] | Tensor]
"""Images (n, H, W, C) and labels (n,) of one client."""
Method = Literal["auto", "loop", "stacked"]


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of Adam with weight decay (L2, added to the gradient); the optimiser is fresh each time.

    ``tf32`` lets a GPU multiply in TF32. This is faster, but results no longer equal a CPU's up to rounding.
    """

    local_epochs: int = 5
    batch_size: int = 64
    lr: float = 0.001
    weight_decay: float = 0.001
    tf32: bool = False

    def __post_init__(self) -> None:
        for name in ("local_epochs", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(
                    f"training.{name} must be at least 1, got {value}", setting=f"training.{name}"
                )
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"training.lr must be a positive number, got {self.lr}", setting="training.lr")
        if not 0 <= self.weight_decay < float("inf"):
            raise ConfigError(
                f"training.weight_decay must be at least 0, got {self.weight_decay}",
                setting="training.weight_decay",
            )


@dataclass(frozen=True)
class TrainedVectors:
    """One vector per client, how they were trained, and why not stacked if stacking was tried."""

    vectors: list[Vector]
    method: Literal["loop", "stacked"]
    note: str | None = None


def batches(n: int, settings: TrainingSettings, seed: int) -> Iterator[Tensor]:
    """Yield the indices of each batch: a new permutation per local epoch, whose last batch may be short.

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
    """Train the model in place, on its device. Results that are not finite are not checked here.

    With BatchNorm, batches of a single sample are skipped, because they have no variance.

    Args:
        model: the model to train.
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
) -> TrainedVectors:
    """Train one model per client, stacked on a GPU if the model allows it, otherwise one after another.

    Args:
        model: gives architecture and device; its weights are overwritten.
        starts: one vector for all clients, or one each.
        data: images and labels of each client.
        settings: epochs, batch size, Adam.
        seeds: one per client.
        method: ``auto`` stacks only on a GPU; ``loop`` never does; ``stacked`` raises an error if it cannot.
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
                return TrainedVectors(_halving(model, seen, begin, data, settings, seeds), "stacked")
            except RuntimeError as error:  # vmap cannot batch this forward pass
                note = f"cannot be stacked: {error}".splitlines()[0]
        if method == "stacked":
            raise InputError(f"the model {note}")
    vectors = []
    aside = [(buffer, buffer.clone()) for buffer in model.buffers()]  # restores counters per client
    for start, (x, y), seed in zip(begin, data, seeds, strict=True):
        for buffer, value in aside:
            buffer.copy_(value)
        load_vector(model, start)
        train(model, x, y, settings, seed)
        vectors.append(to_vector(model))
    return TrainedVectors(vectors, "loop", note and f"one client after another: the model {note}")


def _halving(
    model: nn.Module,
    seen: Probe,
    starts: Sequence[Vector | Tensor],
    data: Sequence[Data],
    settings: TrainingSettings,
    seeds: Sequence[int],
) -> list[Vector]:
    """Train all clients in one stack, or in two halves if the memory does not suffice."""
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
    """Train K models, shape (K, P), on the batches of one client, as ``train`` would train each of them."""
    stack = Stack(model, starts, partial(_adam, settings), seen.ignored)
    with exactly(settings):
        return stack.train([data], [list(batches(len(data[1]), settings, seed))], seed)


def _adam(settings: TrainingSettings, parameters: Sequence[Tensor]) -> torch.optim.Adam:
    fused = parameters[0].device.type == "cuda"
    return torch.optim.Adam(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=fused)


def on_device(data: Data, device: torch.device) -> TensorData:
    """Return a client's data as tensors on the device; raise `DataError` if there is no sample."""
    if len(data[0]) == 0:
        raise DataError("cannot train on 0 images")
    return as_tensor(data[0]).to(device), check_labels(data[1], len(data[0])).to(device)


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
