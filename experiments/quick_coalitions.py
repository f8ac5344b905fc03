"""All coalitions of a round on a GPU, in the fastest way that agrees with float32, and retrained in stacks.

A short measurement decides between one model at a time and a stack of them, in half precision, TF32 or
float32, and for long jobs compiled. Every candidate is compared with float32 on a sample of coalitions. Later
rounds use the chosen strategy as long as it agrees with float32 on a sample of their coalitions too. Its
deviation is measured and recorded for every round.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from side_by_side import Method, Stack, train_many
from strategies import (
    CHECKED,
    Effort,
    Evaluation,
    EvaluationSet,
    Single,
    Strategy,
    choose,
    one_at_a_time,
    plain,
    sample,
)
from torch import Tensor, nn

from fedmerit.errors import InputError, ReportError
from fedmerit.identity import exact
from fedmerit.simulation.analysis import Evaluator, Game, Masks, coalition_name, coefficients
from fedmerit.simulation.models import (
    Images,
    as_tensor,
    device_of,
    evaluation,
    float32,
    prepare,
    state_length,
)
from fedmerit.simulation.setup import Tell
from fedmerit.simulation.training import Data, TrainingSettings, on_device, trained
from fedmerit.simulation.utilities import Utility, check_outputs

CPU_BATCH = 100
"""Images per forward pass on a CPU: their activations fit in its cache, twice as fast as with 1000."""


def memory_of(device: torch.device) -> int:
    """Return the bytes that may be used: 80 % of a GPU's free memory, or half of the machine's."""
    if device.type == "cuda":
        return free_memory(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def free_memory(device: torch.device) -> int:
    """Return 80 % of a GPU's free memory, or of what is left of the share that this process may use."""
    free, total = torch.cuda.mem_get_info(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    share = total if fraction is None else fraction(device) * total
    return int(0.8 * min(free, max(0, share - torch.cuda.memory_reserved(device))))


def bytes_per_image(model: nn.Module, images: Tensor, labels: Tensor, utilities: Sequence[Utility]) -> int:
    """Return the bytes of one float32 sample and twice its layers' outputs."""
    device = device_of(model)
    outputs = 4 * images.numel()

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal outputs
        outputs += 2 * 4 * output.numel() if isinstance(output, Tensor) else 0

    hooks = [module.register_forward_hook(count) for module in model.modules() if not list(module.children())]
    try:
        with evaluation(model):
            check_outputs(utilities, model(prepare(images, device)), labels.to(device))
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


class QuickEvaluator(Evaluator):
    """Evaluates coalition models on one test set, and reuses the strategy it has chosen in later rounds.

    Up to ``4 * CHECKED`` coalitions are evaluated in float32. If the deviation of a strategy chosen before
    exceeds ``tolerance``, a new one is chosen on that round's models and used from then on.

    Args:
        model: gives the architecture and the device; it is not changed.
        x: test samples.
        y: targets.
        utilities: names or resolved utilities.
        memory_limit: bytes that may be used there; by default `memory_of` the device.
        tolerance: largest deviation from float32 that a faster strategy may have, in any utility.
        effort: how hard to look for a fast strategy on a GPU: ``none``, ``compile`` (tens of seconds),
            ``tune`` (minutes); ``auto`` compiles when the job takes longer than that.

    Attributes:
        record: how the last coalitions were evaluated.
    """

    record: Evaluation

    def __init__(
        self,
        model: nn.Module,
        x: Images,
        y: npt.NDArray[Any] | Tensor,
        utilities: Sequence[str | Utility],
        *,
        memory_limit: int | None = None,
        tolerance: float = 2e-3,
        effort: Effort = "auto",
    ) -> None:
        super().__init__(model, x, y, utilities)
        self.images = prepare(self.x, self.device)
        self.tolerance, self.effort = tolerance, effort
        self.users = any(map(one_at_a_time, self.utilities))
        self.length = state_length(model)
        self.memory = memory_of(self.device) if memory_limit is None else memory_limit
        self.per_image = bytes_per_image(model, as_tensor(x)[:1], self.labels[:1], self.utilities)
        self.exact: Strategy | None = None
        self.chosen: tuple[Strategy, Evaluation] | None = None
        self._packed: tuple[Game, Strategy, Tensor, Tensor] | None = None

    def values(self, game: Game, masks: Masks, tell: Tell | None = None) -> npt.NDArray[np.float64]:
        """Return every utility of these coalitions of a round, shape (K, U)."""
        n, began = len(game.clients), time.perf_counter()
        self.check_memory(
            n, 8 * len(self.utilities) * len(masks), f"{len(masks)} coalitions of this model need"
        )
        if self.exact is None:
            self.exact = Single(self.model, self.pool(n))
        strategy, record = self.exact, plain(self.exact)
        if len(masks) > 4 * CHECKED and not self.users:
            strategy, record = self._faster(game, len(masks))
        ready = time.perf_counter()
        values = self.unrepaired(strategy, game, masks, tell)
        bad = np.flatnonzero(~np.isfinite(values).all(1))
        if bad.size and strategy.precision in ("float16", "bfloat16"):  # out of range: repeat in float32
            values[bad] = self.unrepaired(self.exact, game, masks[bad])
        for row, place in np.argwhere(~np.isfinite(values)):
            coalition = coalition_name(int(masks[row]), game.clients)
            raise ReportError(f"coalition {coalition}: {self.utilities[place].name!r} is not finite")
        seconds = time.perf_counter() - ready
        self.record = replace(record, coalitions=len(masks), seconds=seconds, setup_seconds=ready - began)
        deviation = {name: exact(value) for name, value in record.deviation.items()}
        self.how = {"method": record.method, "precision": record.precision, "deviation": deviation}
        return values

    def unrepaired(
        self, strategy: Strategy, game: Game, masks: Masks, tell: Tell | None = None
    ) -> npt.NDArray[np.float64]:
        """Return every utility as the strategy computes it, finite or not."""
        values, done = np.empty((len(masks), len(self.utilities))), 0
        for rows in self.rows(strategy, game, masks):
            values[done : done + len(rows)] = self._evaluate(strategy, rows)
            done += len(rows)
            if tell:
                tell(done, len(masks))
        return values

    def _evaluate(self, strategy: Strategy, rows: Tensor) -> npt.NDArray[np.float64]:
        """Return every utility of these packed models; evaluate them in halves if the memory runs out."""
        try:
            found: npt.NDArray[np.float64] = strategy(rows).cpu().numpy()
            return found
        except torch.cuda.OutOfMemoryError as error:
            if len(rows) == 1:
                limit = self.memory / 1e6
                raise InputError(
                    f"one coalition does not fit into the {limit:,.0f} MB that may be used"
                ) from error
        torch.cuda.empty_cache()
        return np.concatenate([self._evaluate(strategy, half) for half in rows.tensor_split(2)])

    def rows(self, strategy: Strategy, game: Game, masks: Masks) -> Iterator[Tensor]:
        """Yield the packed weights of coalitions in chunks, each one matrix product over the updates."""
        if self._packed is None or self._packed[0] is not game or self._packed[1] is not strategy:
            pack = strategy.packing.pack
            self._packed = game, strategy, pack(game.m0[None]), pack(game.updates)
        _, _, base, moves = self._packed
        room = self._activations(len(moves)) // 4
        most = 8 if self.device.type == "cpu" else 64
        chunk = min(most, max(1, room // (4 * strategy.packing.length)))
        for i in range(0, len(masks), chunk):
            c = coefficients(masks[i : i + chunk], game.weights, game.kind)
            c32 = torch.as_tensor(c, device=self.device, dtype=torch.float32)
            with float32():
                rows = torch.addmm(base.expand(len(c), -1), c32, moves)
            yield rows

    # ---------------------------------------------------------------------------------------------- memory

    def need(self, clients: int) -> int:
        """Return the least bytes needed: test set, updates, a few models, one image's activations."""
        images = 2 * 4 * self.images[:1].numel() * len(self.images)
        models = 4 * self.length * (2 * clients + 6)
        return images + models + 2 * self.per_image

    def check_memory(self, clients: int, more: int, what: str) -> None:
        """Raise `InputError` if the memory needed exceeds the limit."""
        if (need := self.need(clients) + more) > self.memory:
            raise InputError(f"{what} {need / 1e6:,.0f} MB, {self.memory / 1e6:,.0f} MB may be used")

    def pool(self, clients: int) -> EvaluationSet:
        """Return the test set, in batches of as many images as fit; on a CPU at most ``CPU_BATCH``."""
        fit = max(1, self._activations(clients) // self.per_image)
        batch = min(fit, len(self.images), CPU_BATCH if self.device.type == "cpu" else fit)
        return EvaluationSet(self.images, self.labels, self.utilities, batch)

    def _activations(self, clients: int) -> int:
        """Return the bytes for layers' outputs: half of what is left; the other half is for weights."""
        return max(0, self.memory - self.need(clients)) // 2

    # -------------------------------------------------------------------------------------------- strategy

    def _faster(self, game: Game, total: int) -> tuple[Strategy, Evaluation]:
        """Return the strategy chosen before, if it agrees with float32 in this round, or a new one."""
        assert self.exact is not None
        masks = sample(len(game.clients))
        if self.chosen is not None and (record := self._deviation(game, *self.chosen, masks)):
            return self.chosen[0], record
        if self.device.type != "cuda":
            return self.exact, plain(self.exact)
        self.chosen = None  # frees its memory
        self.chosen = choose(
            self.model,
            self.exact,
            lambda strategy: torch.cat(list(self.rows(strategy, game, masks))),
            total=total,
            tolerance=self.tolerance,
            effort=self.effort,
            stack=self._activations(len(game.clients)) // (self.per_image * self.exact.pool.batch),
        )
        return self.chosen

    def _deviation(
        self, game: Game, strategy: Strategy, record: Evaluation, masks: Masks
    ) -> Evaluation | None:
        """Return the record of a strategy chosen before, with its deviation; None if that is too large."""
        assert self.exact is not None
        if strategy is self.exact:
            return record
        there, here = (self.unrepaired(one, game, masks) for one in (strategy, self.exact))
        away = np.abs(there - here).max(0)
        if not (away <= self.tolerance).all():  # true also if a value is not finite
            return None
        deviation = dict(zip(record.deviation, away.tolist(), strict=True))
        return replace(record, deviation=deviation, checked=len(masks))


# ------------------------------------------------------------------------------------- the retraining game
# All coalitions that contain a client train on the same batches of it. So a stack of coalitions needs no
# padding, and its first layer sees each image once. In the first round they also start from the same model,
# so each client trains once for all of them.


def retrained(
    model: nn.Module,
    start: Tensor,
    data: Sequence[Data],
    settings: TrainingSettings,
    seeds: Sequence[Sequence[int]],
    shares: Callable[[int], Tensor],
    masks: Sequence[int],
    *,
    method: Method = "auto",
    stack: int = 64,
    progress: Tell = lambda done, total: None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield each coalition with its own federation's model, as `Truth.retrained`, but many at a time.

    Args:
        model: gives architecture and device; its weights are overwritten.
        start: the first model's vector, on the device.
        data: samples and targets of each client.
        settings: epochs, batch size, Adam.
        seeds: one per round and client.
        shares: returns every client's part of a coalition's sum.
        masks: the coalitions.
        method: ``auto`` stacks on a GPU; ``stacked`` raises an error where it cannot.
        stack: most coalitions that train at once; they also finish together.
        progress: called with (local trainings done, local trainings in total).
    """
    n, device = len(data), start.device
    sets = [on_device(one, device, settings.loss) for one in data]
    todo = [mask for mask in masks if mask]
    if len(todo) < len(masks):
        yield 0, start
    if not todo:
        return
    first = train_many(model, start, sets, settings, seeds[0], method)
    together = first.method == "stacked"
    size = stack if together else 1
    held = np.array([[mask >> i & 1 for i in range(n)] for mask in todo], dtype=bool)
    most = max(int(held[k : k + size].sum(0).max()) for k in range(0, len(todo), size))
    stack_of: Stack | None = None

    def local(rows: Tensor, round_: int, i: int) -> Tensor:
        """Return every row after client i's training, shape (K, P)."""
        nonlocal stack_of, most
        seed = seeds[round_][i]
        while together and most:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                stack_of = stack_of or Stack(model, most, sets, settings)
                parts = torch.split(rows, most)
                return torch.cat([stack_of.train(one, [i] * len(one), [seed] * len(one)) for one in parts])
            stack_of, most = None, most // 2
            torch.cuda.empty_cache()
        made = [as_tensor(trained(model, row, *sets[i], settings, seed)) for row in rows]
        return torch.stack(made).to(device)

    total, done = int(held.sum()) * len(seeds), 0
    for begin in range(0, len(todo), size):
        group = todo[begin : begin + size]
        inside = torch.as_tensor(held[begin : begin + size], device=device)
        parts = torch.stack([shares(mask) for mask in group])
        current = start.repeat(len(inside), 1)
        for round_ in range(len(seeds)):
            move = torch.zeros_like(current)
            for i in range(n):
                rows = inside[:, i].nonzero()[:, 0]
                if len(rows):
                    once = as_tensor(first.vectors[i]).to(device)
                    after = local(current[rows], round_, i) if round_ else once
                    move[rows] += parts[rows, i, None] * (after - current[rows])
                done += len(rows)
                progress(done, total)
            current += move
        yield from zip(group, current, strict=True)
