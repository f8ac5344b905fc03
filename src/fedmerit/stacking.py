"""Many models of one architecture that train in step: every parameter gets a leading axis of length K.

One step moves all of them (``torch.func.vmap`` over ``functional_call``). Short batches are padded with
samples of weight zero, and a model that is through leaves the stack. ``probe`` finds what cannot be stacked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmerit.models import prepare, seeded, state
from fedmerit.utilities import check_logits

TensorData = tuple[Tensor, Tensor]
"""Images (n, H, W, C) and labels (n,) on the device."""


@dataclass(frozen=True)
class Probe:
    """Why a model cannot be stacked (None: nothing seen), its classes, the parameters its loss ignores."""

    reason: str | None = None
    classes: int = 0
    ignored: frozenset[str] = frozenset()


def has_batch_norm(model: nn.Module) -> bool:
    """Whether some layer normalises by the statistics of the batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def probe(model: nn.Module, data: TensorData) -> Probe:
    """Look at the model's gradients on three samples; its state is left as it was."""
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
        starts: shape (K, P), on the device; the trained vectors will take its place.
        optimiser: makes the optimiser of the stacked parameters; it must treat every number on its own.
        ignored: parameters without a gradient, which the optimiser is to leave alone.
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
        """Train on one data set per model, or on one for all; the trained vectors, shape (K, P).

        Args:
            data: one (images, labels) per model, or a single one that all models share.
            plan: the batches of each data set, as indices into it.
            seed: of dropout; masks differ between data sets and are the same for models that share one.
        """
        shared = len(data) == 1
        order = sorted(range(len(plan)), key=lambda i: -len(plan[i]))  # who is through first stands last
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
            """One step of all models on the samples ``at``."""
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
        """Mean cross-entropy over the n samples of weight 1/n; the padding has weight 0."""
        logits = torch.func.functional_call(self.model, {**moving, **fixed}, (x,))
        return (F.cross_entropy(logits, y, reduction="none") * weight).sum()

    def _retire(self, rows: list[int], active: int) -> None:
        """Models that are through leave the end of the stack, their vectors go to ``result``."""
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
    """Indices into all data sets laid end to end, and weights; both of shape (steps, data sets, batch)."""
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
