"""Many models of one architecture that train at the same time on a GPU.

A stack sees the same samples in the same order as one client after another, so both agree up to rounding.
The exception is dropout: a stack draws its own masks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmerit.data.partitions import ClientData
from fedmerit.errors import InputError
from fedmerit.protocol.outcome import Model
from fedmerit.simulation.models import (
    as_tensor,
    check_logits,
    check_range,
    device_of,
    flatten,
    load_vector,
    prepare,
    seeded,
)
from fedmerit.simulation.setup import LocalTraining
from fedmerit.simulation.training import (
    CROSS_ENTROPY,
    Data,
    TensorData,
    TrainingSettings,
    Vector,
    batches,
    exactly,
    has_batch_norm,
    on_device,
    optimiser_for,
    trained,
)

# ------------------------------------------------------------------------------------------------- stacked

WORTH = 3
"""A training of so few steps is not recorded: recording takes about as long as two steps."""
PADDING = -100
"""The label of samples that only fill a short batch up; the loss leaves them out."""
STREAMS = 8
"""At most so many models train at the same time on a GPU."""


@dataclass(frozen=True)
class Probe:
    """Why a model cannot be stacked (None: no reason found), and its classes."""

    reason: str | None = None
    classes: int = 0


def probe(model: nn.Module, data: TensorData) -> Probe:
    """Find out on three samples whether padding would change what a model learns; its state is restored."""
    if has_batch_norm(model):
        return Probe("has BatchNorm, which normalises by the batch")
    if not any(p.requires_grad for p in model.parameters()):
        return Probe("has no parameter to train")
    device = data[1].device
    index = torch.arange(3, device=device) % len(data[1])
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    images = prepare(data[0][index], device)
    if not images.is_floating_point():
        return Probe("takes whole numbers, by which nobody can tell whether samples influence each other")
    images = images.requires_grad_()
    model.train()
    with seeded(0, device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        logits = check_logits(model(images), data[1][index])
        across = torch.autograd.grad(logits[0].sum(), images, allow_unused=True)[0]
        reason = None
        try:  # a decision by what was computed may be one about the batch
            torch.func.vmap(lambda one: model(one[None])[0], randomness="different")(images.detach())
        except RuntimeError as error:
            reason = f"cannot be stacked: {error}".splitlines()[0]
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    if changed:
        return Probe(f"changes its buffer {changed[0]!r} while training")
    if across is not None and bool((across[1:] != 0).any()):
        return Probe("lets the samples of a batch influence each other")
    return Probe(reason, logits.shape[1])


class Stack:
    """K copies of a model, of which up to K train side by side, as often as asked.

    On a GPU one small model leaves most of the device idle and waits for Python. So each copy's step is
    recorded once as a CUDA graph, and the graphs of all copies are replayed on several streams. Where a step
    cannot be recorded, the copies take their steps one after another, and ``note`` says why.

    Args:
        model: gives the architecture; it is not changed.
        size: K.
        data: the data sets, on the device.
        settings: epochs, batch size, optimiser; the loss must be the cross-entropy of classes.
    """

    def __init__(
        self, model: nn.Module, size: int, data: Sequence[TensorData], settings: TrainingSettings
    ) -> None:
        self.settings = settings
        self.images, self.labels = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
        self.lengths, self.device = [len(y) for _, y in data], self.labels.device
        self.models = [copy.deepcopy(model).train() for _ in range(size)]
        self.moving = [[p for p in one.parameters() if p.requires_grad] for one in self.models]
        self.optimisers = [optimiser_for(settings, moving) for moving in self.moving]
        longest = max(self.lengths)
        steps, width = settings.local_epochs * -(-longest // settings.batch_size), settings.batch_size
        self.index = torch.zeros(size, steps, min(width, longest), dtype=torch.int64, device=self.device)
        self.target = torch.zeros_like(self.index)
        self.taken = torch.zeros(size, 1, dtype=torch.int64, device=self.device)  # steps, for the device
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.streams: list[torch.cuda.Stream] = []
        self.note: str | None = None

    def train(self, starts: Tensor, sets: Sequence[int], seeds: Sequence[int]) -> Tensor:
        """Train model k on data set ``sets[k]``, in the order of ``seeds[k]``; return the vectors, (k, P).

        Args:
            starts: shape (k, P), on the device; at most K of them.
            sets: the number of a data set per model.
            seeds: one per model; the first one is also the seed of dropout.
        """
        plans = [list(batches(self.lengths[i], self.settings, j)) for i, j in zip(sets, seeds, strict=True)]
        self._load(starts, plans, sets)
        steps = max(map(len, plans))
        new = self.device.type == "cuda" and not self.graphs and not self.note
        with exactly(self.settings), seeded(seeds[0], self.device):
            drawn = torch.cuda.get_rng_state(self.device) if new else None
            for step in range(steps):
                if drawn is not None and step == 1 and steps > WORTH:
                    for k in range(len(plans), len(self.models)):
                        self._move(k)  # a first step; the next training begins by writing over it
                    self._record(random=not torch.equal(drawn, torch.cuda.get_rng_state(self.device)))
                for k in (k for k, plan in enumerate(plans) if step < len(plan)):
                    if self.graphs:
                        with torch.cuda.stream(self.streams[k % len(self.streams)]):
                            self.graphs[k].replay()
                    else:
                        self._move(k)
            for stream in self.streams:
                torch.cuda.current_stream(self.device).wait_stream(stream)
        return torch.stack([flatten(model) for model in self.models[: len(plans)]])

    def _load(self, starts: Tensor, plans: Sequence[list[Tensor]], sets: Sequence[int]) -> None:
        """Write first models and batches where the steps expect them, and make the optimiser forget."""
        begin = np.cumsum([0, *self.lengths])
        index = torch.full(self.index.shape, PADDING)
        for k, plan in enumerate(plans):
            load_vector(self.models[k], starts[k])
            for step, batch in enumerate(plan):
                index[k, step, : len(batch)] = batch + int(begin[sets[k]])
        self.index.copy_(index.clamp(min=0))
        self.target.copy_(self.labels[self.index].where(index.to(self.device) >= 0, PADDING))
        states = [state for one in self.optimisers for state in one.state.values()]
        moments = [one for state in states for one in state.values() if one is not None]
        torch._foreach_zero_([self.taken, *moments])
        self._start()

    def _record(self, *, random: bool) -> None:
        """Record a step of every model. A first step has chosen algorithms and made the optimiser's memory.

        Models on one stream share memory. Graphs that draw random numbers share the generator's place on the
        device, so they must be replayed one after another.
        """
        count = 1 if random else min(STREAMS, len(self.models))
        self.streams = [torch.cuda.Stream(self.device) for _ in range(count)]  # type: ignore[no-untyped-call]
        pools = [torch.cuda.graph_pool_handle() for _ in self.streams]
        graphs = []
        try:
            for k in range(len(self.models)):
                place = k % count
                graphs.append(record(partial(self._move, k), self.device, self.streams[place], pools[place]))
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the model waits for the device
            self.note = f"cannot be recorded as a CUDA graph: {error}".splitlines()[0]
            return
        self.graphs = graphs
        self._start()

    def _start(self) -> None:
        """Let the streams begin where this one is."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def _move(self, k: int) -> None:
        """Take a step with model k."""
        at, target = self.index[k][self.taken[k]][0], self.target[k][self.taken[k]][0]
        logits = self.models[k](prepare(self.images[at], self.device))
        loss = F.cross_entropy(logits, target, ignore_index=PADDING)
        slopes = torch.autograd.grad(loss, self.moving[k], allow_unused=True)
        for parameter, slope in zip(self.moving[k], slopes, strict=True):
            if slope is not None and slope.stride() != parameter.stride():  # Adam wants equal ones
                slope = torch.empty_like(parameter).copy_(slope)
            parameter.grad = slope
        self.optimisers[k].step()
        self.optimisers[k].zero_grad()
        self.taken[k] += 1


# --------------------------------------------------------------------------------------------- many clients

Method = Literal["auto", "loop", "stacked"]


@dataclass(frozen=True)
class TrainedVectors:
    """One vector per client, how they were trained, and why not faster if that was tried."""

    vectors: list[Vector]
    method: Literal["loop", "stacked"]
    note: str | None = None


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
        data: samples and targets of each client.
        settings: epochs, batch size, loss, optimiser.
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
        seen = _unpadded(data, settings) or probe(model, on_device(data[0], device))
        note = seen.reason
        if note is None:
            vectors, said = _halving(model, seen, begin, data, settings, seeds)
            return TrainedVectors(vectors, "stacked", said and f"stacked, but steps of the model {said}")
        if method == "stacked":
            raise InputError(f"the model {note}")
    vectors = [
        trained(model, start, x, y, settings, seed)
        for start, (x, y), seed in zip(begin, data, seeds, strict=True)
    ]
    return TrainedVectors(vectors, "loop", note and f"one client after another: the model {note}")


def _unpadded(data: Sequence[Data], settings: TrainingSettings) -> Probe | None:
    """Return why batches cannot be padded, which a stack does, because of the loss or the targets."""
    if settings.loss != CROSS_ENTROPY:
        return Probe(f"trains on the loss {settings.loss.name!r}, and a stack only on the cross-entropy")
    if data and as_tensor(data[0][1]).ndim != 1:
        return Probe("learns an array per sample, and a stack only classes")
    return None


def _halving(
    model: nn.Module,
    seen: Probe,
    starts: Sequence[Vector | Tensor],
    data: Sequence[Data],
    settings: TrainingSettings,
    seeds: Sequence[int],
) -> tuple[list[Vector], str | None]:
    """Train all clients in one stack, or in two halves if the memory does not suffice."""
    device = device_of(model)
    try:
        sets = [on_device(one, device) for one in data]
        for _, y in sets:
            check_range(y, seen.classes)
        begin = torch.stack([as_tensor(start).to(device).float() for start in starts])
        stack = Stack(model, len(sets), sets, settings)
        return list(stack.train(begin, range(len(sets)), seeds).cpu().numpy()), stack.note
    except torch.cuda.OutOfMemoryError:
        if len(starts) == 1:
            raise
    torch.cuda.empty_cache()
    half = (len(starts) + 1) // 2
    first, note = _halving(model, seen, starts[:half], data[:half], settings, seeds[:half])
    second, other = _halving(model, seen, starts[half:], data[half:], settings, seeds[half:])
    return first + second, note or other


@dataclass(eq=False)
class StackedTraining(LocalTraining):
    """The local training of a federation's members at once; ``stacked`` None does so on a GPU only."""

    stacked: bool | None = None

    def honest(
        self, number: int, clients: Sequence[ClientData], start: Model, tell: Callable[[int, int], None]
    ) -> dict[str, Model]:
        """As one after another, up to rounding."""
        federation = self.federation
        cuda = federation.device.type == "cuda"
        if not clients or not (cuda if self.stacked is None else self.stacked):
            return super().honest(number, clients, start, tell)
        names = [client.name for client in clients]
        seeds = [federation.seed("train", number, name) for name in names]
        data = [federation.training_data(client, number) for client in clients]
        models = train_many(federation.network, start, data, federation.training, seeds)
        if self.solo:
            starts = [self.solo[name] for name in names]
            alone = train_many(federation.network, starts, data, federation.training, seeds)
            self.solo |= dict(zip(names, alone.vectors, strict=True))
        tell(len(clients), len(clients))
        return dict(zip(names, models.vectors, strict=True))


# ------------------------------------------------------------------------------------------ recorded kernels


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
