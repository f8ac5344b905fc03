"""Utilities of many coalition models at once: the ground truth that secure aggregation hides.

::

    updates U_i -> coefficients    which model belongs to which coalition
                -> strategies.py   ways to evaluate many models of one architecture, and the choice among them
                -> Evaluator       all coalitions of a round            -> Table per utility
    data        -> retrain_tables  every coalition trained from scratch -> Table per utility
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedmerit.errors import ConfigError, FedmeritError, InputError, ReportError
from fedmerit.scoring.types import MAX_TABLE_CLIENTS, Table
from fedmerit.scoring.validate import names_of
from fedmerit.simulation.losses import class_logits
from fedmerit.simulation.models import Images, as_tensor, flatten, load_vector, prepare, state_length
from fedmerit.simulation.strategies import (
    CHECKED,
    Effort,
    Evaluation,
    EvaluationSet,
    Masks,
    Single,
    Stacked,
    Strategy,
    choose,
    plain,
    sample,
)
from fedmerit.simulation.training import (
    Data,
    Method,
    Stack,
    TensorData,
    TrainedVectors,
    TrainingSettings,
    on_device,
    train,
    train_many,
)
from fedmerit.simulation.utilities import (
    Utility,
    balance,
    check_for,
    check_outputs,
    check_range,
    device_of,
    evaluation,
    float32,
    resolve_all,
)

__all__ = [
    "Evaluation",
    "Evaluator",
    "Game",
    "Retraining",
    "coalition_tables",
    "coefficients",
    "retrain_tables",
]

# ----------------------------- which model belongs to a coalition: two games over the updates of one round

GAMES = ("additive", "renormalised")


def coefficients(
    masks: Sequence[int] | Masks, weights: Sequence[float] | npt.NDArray[np.float64], game: str = "additive"
) -> npt.NDArray[np.float64]:
    r"""Return the matrix (K, N) that turns updates into coalition models, M(S) = M_0 + \sum_i c_{S,i} U_i.

    .. math:: c_{S,i} = 1[i \in S] \quad\text{(additive)}, \qquad
              c_{S,i} = 1[i \in S] \frac{\sum_j w_j}{\sum_{j \in S} w_j} \quad\text{(renormalised)}

    where :math:`U_i = w_i (M_i - M_0) / \sum_j w_j`, so that the renormalised model is the weighted mean of
    the local models of S. Both games agree on the empty and on the grand coalition.

    >>> coefficients([0, 1, 3], [1, 3], "renormalised")
    array([[0., 0.],
           [4., 0.],
           [1., 1.]])
    """
    w = np.asarray(weights, dtype=np.float64)
    if game not in GAMES:
        expected = "scoring.game must be 'additive' or 'renormalised'"
        raise ConfigError(f"{expected}, got {game!r}", setting="scoring.game")
    if w.ndim != 1 or not np.isfinite(w).all() or (w <= 0).any():
        raise InputError(f"weights must be positive numbers, one per client, got {w.tolist()}")
    bits = np.asarray(masks, dtype=np.int64)[:, None] >> np.arange(len(w)) & 1
    member: npt.NDArray[np.float64] = bits.astype(np.float64)
    if game == "additive":
        return member
    held = member @ w
    member *= np.divide(w.sum(), held, out=np.zeros_like(held), where=held > 0)[:, None]
    return member


def check_count(n: int) -> None:
    """Raise an error if a table over n clients cannot be built."""
    if not 1 <= n <= MAX_TABLE_CLIENTS:
        raise InputError(
            f"a table has 2^N coalitions, so N must lie in 1 ... {MAX_TABLE_CLIENTS}, got {n};"
            " sampled_shapley does without a table"
        )


def coalition_name(mask: int, clients: Sequence[str]) -> str:
    """Return the names of a coalition's clients as text for messages.

    >>> coalition_name(5, ["A", "B", "C"])
    '{A, C}'
    """
    return "{" + ", ".join(client for i, client in enumerate(clients) if mask >> i & 1) + "}"


# ------------------------------------------------------------------------------- all coalitions of a round
# All coalition models of a round are evaluated on the whole test set, in the fastest way that agrees with
# float32.
#
# On a CPU models run one after another. On a GPU a short measurement decides between one model at a time and
# a stack of them, in half precision, TF32 or float32, and for long jobs compiled. Every candidate is compared
# with float32 on a sample of coalitions. Later rounds use the chosen strategy as long as it agrees with
# float32 on a sample of their coalitions too. Its deviation is measured and recorded for every round.

# -------------------------------------------------------------------------------------------------- memory


def free_memory(device: torch.device) -> int:
    """Return the default memory limit in bytes: 80 % of a GPU's free memory, or half of the machine's memory.

    If this process may use only a share of the GPU, the limit is at most 80 % of what is left of that share.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        share = total if fraction is None else fraction(device) * total
        return int(0.8 * min(free, max(0, share - torch.cuda.memory_reserved(device))))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def try_forward(
    model: nn.Module, images: Tensor, labels: Tensor, utilities: Sequence[Utility]
) -> tuple[int, int]:
    """Return the number of outputs, and the bytes of one float32 sample and twice its layers' outputs."""
    device = device_of(model)
    outputs = 4 * images.numel()

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal outputs
        outputs += 2 * 4 * output.numel() if isinstance(output, Tensor) else 0

    hooks = [module.register_forward_hook(count) for module in model.modules() if not list(module.children())]
    try:
        with evaluation(model):
            logits = check_outputs(utilities, model(prepare(images, device)), labels.to(device))
    except FedmeritError:
        raise
    except Exception as error:
        shape = tuple(images.shape[1:])
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"the model fails on a sample of shape {shape}: {why}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if any(utility.of == "classes" for utility in utilities):
        logits = class_logits(logits)
    return logits.shape[1] if logits.ndim > 1 else 1, outputs


# -------------------------------------------------------------------------------------------------- tables

CPU_BATCH = 100
"""Images per forward pass on a CPU: their activations fit in its cache, twice as fast as with 1000."""
Vectors = npt.NDArray[Any] | Tensor
Weights = Sequence[float] | npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called with (done, total)."""


class Evaluator:
    """Evaluates coalition models on one test set, and reuses the strategy it has chosen in later rounds.

    The record of each round holds its own deviation from float32, on ``CHECKED`` coalitions evaluated both by
    the fast strategy and in float32. If it exceeds ``tolerance``, a new strategy is chosen on that round's
    models and used from then on.

    Args:
        model: gives the architecture and, unless ``device`` is given, the device; it is not changed.
        x: test images, shape (m, H, W, C).
        y: labels, shape (m,).
        utilities: names or resolved utilities.
        device: where to evaluate.
        memory_limit: bytes that may be used there; by default `free_memory`.
        tolerance: largest deviation from float32 that a faster strategy may have, in any utility.
        effort: how hard to look for a fast strategy on a GPU: ``none``, ``compile`` (tens of seconds),
            ``tune`` (minutes); ``auto`` compiles when the job takes longer than that.
        method: ``auto``, ``single`` (float32) or ``stacked`` (float32).
    """

    def __init__(
        self,
        model: nn.Module,
        x: Images,
        y: Vectors,
        utilities: Sequence[str | Utility],
        *,
        device: torch.device | str | None = None,
        memory_limit: int | None = None,
        tolerance: float = 2e-3,
        effort: Effort = "auto",
        method: str = "auto",
    ) -> None:
        if method not in ("auto", "single", "stacked"):
            raise InputError(f"method must be 'auto', 'single' or 'stacked', got {method!r}")
        self.model = model
        self.device = device_of(model) if device is None else torch.device(device)
        self.utilities = resolve_all(utilities)
        self.tolerance, self.effort, self.method = tolerance, effort, method
        self.users = any(utility.asks for utility in self.utilities)
        if method == "stacked" and self.users:
            raise InputError(
                "a user's utility function, or a metric of the whole test set, takes one model at a time: "
                "method 'stacked' is out"
            )
        self.length = state_length(model)
        self.memory = free_memory(self.device) if memory_limit is None else memory_limit
        self.images = as_tensor(x)
        self.labels = check_for(self.utilities, y, len(self.images)).to(self.device)
        classes, self.per_image = try_forward(model, self.images[:1], self.labels[:1], self.utilities)
        if any(utility.of == "classes" for utility in self.utilities):
            check_range(self.labels, classes)
        if any(utility.balanced for utility in self.utilities):
            balance(self.labels, classes)
        self.exact: Strategy | None = None
        self.chosen: tuple[Strategy, Evaluation] | None = None

    def tables(
        self,
        m0: Vectors,
        updates: Vectors | Sequence[Vectors],
        weights: Weights,
        *,
        game: str = "additive",
        clients: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> tuple[dict[str, Table], Evaluation]:
        """Return the utility of every coalition, one table per utility.

        Args:
            m0: the vector of the model before the round, shape (P,).
            updates: U_i, the weighted updates, shape (N, P).
            weights: w_i, shape (N,); they matter only in the renormalised game.
            game: ``additive`` or ``renormalised``.
            clients: names.
            progress: called with (coalitions done, coalitions in total).
        """
        n = len(updates)
        check_count(n)
        self.check_memory(n, 8 * len(self.utilities) << n, f"{1 << n} coalitions of this model need")
        began = time.perf_counter()
        play = self.game(m0, updates, weights, game=game, clients=clients, total=1 << n)
        ready = time.perf_counter()
        values = play.values(np.arange(1 << n), progress)
        seconds = time.perf_counter() - ready
        record = replace(play.record, coalitions=1 << n, seconds=seconds, setup_seconds=ready - began)
        return {u.name: Table(values[:, i], play.names) for i, u in enumerate(self.utilities)}, record

    def game(
        self,
        m0: Vectors,
        updates: Vectors | Sequence[Vectors],
        weights: Weights,
        *,
        game: str = "additive",
        clients: Sequence[str] = (),
        total: int = 0,
    ) -> Game:
        """Return a round whose coalitions can be evaluated one by one; arguments as in ``tables``.

        ``total`` says how many coalitions will be evaluated: up to ``4 * CHECKED`` in float32; for more, by a
        faster strategy, which is either the one chosen before, checked on this round, or a new one.
        """
        n = len(updates)
        names = names_of(clients, None, "coalitions: ") or names_of((), n, "")
        if len(weights) != n or len(names) != n:
            got = f"{len(weights)} weights and {len(names)} names"
            raise InputError(f"expected {n} weights and {n} names, one per update, got {got}")
        coefficients([0], weights, game)
        self.check_memory(n, 0, "this model needs")
        base = self.vector(m0, "M0")
        given = updates.to(self.device, torch.float32) if isinstance(updates, Tensor) else updates
        moves = [self.vector(u, f"the update of {c}") for c, u in zip(names, given, strict=True)]
        stacked = given if isinstance(given, Tensor) else torch.stack(moves)
        of = _Round(base, stacked, np.asarray(weights, dtype=np.float64), game)
        if self.exact is None:
            self.exact = (Stacked if self.method == "stacked" else Single)(self.model, self.pool(n))
        play = Game(self, of, self.exact, plain(self.exact), names)
        few = total <= 4 * CHECKED
        return play if few or self.users or self.method != "auto" else self._faster(play, total)

    def need(self, clients: int) -> int:
        """Return the least bytes needed: test set, updates, a few models, one image's activations."""
        images = 2 * 4 * self.images[:1].numel() * len(self.images)
        models = 4 * self.length * (2 * clients + 6)
        return images + models + 2 * self.per_image

    def check_memory(self, clients: int, more: int, what: str) -> None:
        """Raise `InputError` if the memory needed exceeds the limit."""
        if (need := self.need(clients) + more) > self.memory:
            raise InputError(f"{what} {need / 1e6:,.0f} MB, {self.memory / 1e6:,.0f} MB may be used")

    def batch(self, clients: int) -> int:
        """Return the images per forward pass: as many as fit; on a CPU at most ``CPU_BATCH``."""
        fit = max(1, self._activations(clients) // self.per_image)
        return min(fit, len(self.images), CPU_BATCH if self.device.type == "cpu" else fit)

    def vector(self, values: Vectors, what: str) -> Tensor:
        """Return a vector on the device; raise `InputError` if its length is wrong or it is not finite."""
        vector = as_tensor(values)
        if vector.shape != (self.length,):
            got = tuple(vector.shape)
            raise InputError(f"{what} must have {self.length} values like the model, got shape {got}")
        vector = vector.to(self.device, torch.float32)
        if not bool(vector.isfinite().all()):
            raise InputError(f"{what} is not finite")
        return vector

    def pool(self, clients: int) -> EvaluationSet:
        """Return the test set on the device."""
        images = prepare(self.images, self.device)
        return EvaluationSet(images, self.labels, self.utilities, self.batch(clients))

    def rows(self, strategy: Strategy, of: _Round, masks: Masks) -> Iterator[Tensor]:
        """Yield the packed weights of coalitions in chunks, each one matrix product over the updates."""
        base, moves = of.packed_for(strategy)
        room = self._activations(len(moves)) // 4
        most = 8 if self.device.type == "cpu" else 64
        chunk = min(most, max(1, room // (4 * strategy.packing.length)))
        for i in range(0, len(masks), chunk):
            c = coefficients(masks[i : i + chunk], of.weights, of.game)
            c32 = torch.as_tensor(c, device=self.device, dtype=torch.float32)
            with float32():
                rows = torch.addmm(base.expand(len(c), -1), c32, moves)
            yield rows

    def _activations(self, clients: int) -> int:
        """Return the bytes for layers' outputs: half of what is left; the other half is for weights."""
        return max(0, self.memory - self.need(clients)) // 2

    def _faster(self, exact: Game, total: int) -> Game:
        """Return the round with the strategy chosen before, if it agrees with float32 here, or a new one."""
        n = len(exact.names)
        masks = sample(n)
        if self.chosen is not None and (found := self._again(exact, *self.chosen, masks)):
            return found
        if self.device.type != "cuda":
            return exact
        self.chosen = None  # frees its memory
        strategy, record = self.chosen = choose(
            self.model,
            exact.strategy,
            lambda strategy: torch.cat(list(self.rows(strategy, exact.of, masks))),
            total=total,
            tolerance=self.tolerance,
            effort=self.effort,
            stack=self._activations(n) // (self.per_image * exact.strategy.pool.batch),
        )
        return replace(exact, strategy=strategy, record=record)

    def _again(self, exact: Game, strategy: Strategy, record: Evaluation, masks: Masks) -> Game | None:
        """Return the round with the strategy chosen before and its deviation; None if that is too large."""
        if strategy is exact.strategy:
            return replace(exact, record=record)
        found = replace(exact, strategy=strategy)
        away = np.abs(found.unrepaired(masks) - exact.unrepaired(masks)).max(0)
        if not (away <= self.tolerance).all():  # true also if a value is not finite
            return None
        deviation = dict(zip(record.deviation, away.tolist(), strict=True))
        return replace(found, record=replace(record, deviation=deviation, checked=len(masks)))


@dataclass(frozen=True, eq=False)
class _Round:
    """M0 (P,), the updates U_i (N, P), their weights and the game."""

    m0: Tensor
    updates: Tensor
    weights: npt.NDArray[np.float64]
    game: str
    packed: dict[Strategy, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def packed_for(self, strategy: Strategy) -> tuple[Tensor, Tensor]:
        """Return M0 and the updates in a strategy's packing, which is kept for the next coalition."""
        if strategy not in self.packed:
            self.packed.clear()
            pack = strategy.packing.pack
            self.packed[strategy] = pack(self.m0[None]), pack(self.updates)
        return self.packed[strategy]


@dataclass(frozen=True)
class Game:
    """The coalitions of one round, and the strategy that evaluates them."""

    evaluator: Evaluator
    of: _Round
    strategy: Strategy
    record: Evaluation
    names: tuple[str, ...]

    def value(self, mask: int) -> float:
        """Return the first utility of one coalition."""
        return float(self.values(np.array([mask]))[0, 0])

    def values(self, masks: Masks, progress: Progress | None = None) -> npt.NDArray[np.float64]:
        """Return every utility of these coalitions, shape (K, U)."""
        values = self.unrepaired(masks, progress)
        bad = np.flatnonzero(~np.isfinite(values).all(1))
        if bad.size and self.strategy.precision in ("float16", "bfloat16"):  # out of range: repeat in float32
            exact = Single(self.evaluator.model, self.strategy.pool)
            again = self.evaluator.rows(exact, self.of, masks[bad])
            values[bad] = np.concatenate([exact(rows).cpu().numpy() for rows in again])
            bad = np.flatnonzero(~np.isfinite(values).all(1))
        if bad.size:
            utility = self.evaluator.utilities[int(np.flatnonzero(~np.isfinite(values[bad[0]]))[0])].name
            who = coalition_name(int(masks[bad[0]]), self.names)
            raise ReportError(f"utility {utility!r} of coalition {who} is not finite: its model diverged")
        return values

    def unrepaired(self, masks: Masks, progress: Progress | None = None) -> npt.NDArray[np.float64]:
        """Return every utility as the strategy computes it, finite or not."""
        values, done = np.empty((len(masks), len(self.evaluator.utilities))), 0
        for rows in self.evaluator.rows(self.strategy, self.of, masks):
            values[done : done + len(rows)] = self._evaluate(rows)
            done += len(rows)
            if progress:
                progress(done, len(masks))
        return values

    def _evaluate(self, rows: Tensor) -> npt.NDArray[np.float64]:
        """Return every utility of these packed models; evaluate them in halves if the memory runs out."""
        try:
            found: npt.NDArray[np.float64] = self.strategy(rows).cpu().numpy()
            return found
        except torch.cuda.OutOfMemoryError as error:
            if len(rows) == 1:
                limit = self.evaluator.memory / 1e6
                raise InputError(
                    f"one coalition does not fit into the {limit:,.0f} MB that may be used"
                ) from error
        torch.cuda.empty_cache()
        return np.concatenate([self._evaluate(half) for half in rows.tensor_split(2)])


def coalition_tables(
    model: nn.Module,
    m0: Vectors,
    updates: Vectors | Sequence[Vectors],
    weights: Weights,
    x: Images,
    y: Vectors,
    utilities: Sequence[str | Utility],
    *,
    game: str = "additive",
    clients: Sequence[str] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> tuple[dict[str, Table], Evaluation]:
    """Return the tables of one round: ``Evaluator(model, x, y, utilities, **settings).tables(m0, ...)``."""
    evaluator = Evaluator(model, x, y, utilities, **settings)
    return evaluator.tables(m0, updates, weights, game=game, clients=clients, progress=progress)


# ------------------------------------------------------------------------------------- the retraining game
# In the retraining game every coalition trains from the same first model, as if the others did not exist.
#
# All coalitions that contain a client train on the same batches of it. So a stack of coalitions needs no
# padding, and its first layer sees each image once. In the first round they also start from the same model,
# so each client trains once for all of them.

Store = Callable[[int, dict[str, float]], None]
"""Called with a finished coalition's bitmask and its utilities."""


@dataclass(frozen=True)
class Retraining:
    """How coalitions were trained: ``stack`` at a time, ``trained`` in this call, ``known`` before it."""

    method: str
    stack: int
    trained: int
    known: int
    seconds: float
    note: str | None = None


def retrain_tables(
    model: nn.Module,
    m0: npt.NDArray[Any] | Tensor,
    data: Sequence[Data],
    settings: TrainingSettings,
    seeds: Sequence[Sequence[int]],
    weights: Sequence[float] | npt.NDArray[np.float64],
    x: Images,
    y: npt.NDArray[Any] | Tensor,
    utilities: Sequence[str | Utility],
    *,
    clients: Sequence[str] = (),
    known: Mapping[int, Mapping[str, float]] | None = None,
    store: Store | None = None,
    stack: int = 64,
    stacked: bool | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Table], Retraining]:
    r"""Return the utility of every coalition's own federation after R rounds, one table per utility.

    .. math:: M_{r+1}(S) = M_r(S) + \sum_{i \in S} w_i (T_{r,i}(M_r(S)) - M_r(S)) / \sum_{i \in S} w_i

    where T_{r,i} is the local training of client i with a fresh optimiser and the seed of (round, client).

    Args:
        model: gives architecture and device; its weights are overwritten.
        m0: the first model's vector, shape (P,).
        data: images and labels of each client.
        settings: epochs, batch size, Adam.
        seeds: one per round and client, shape (R, N): the run's own.
        weights: w_i, shape (N,).
        x: test images.
        y: test labels.
        utilities: names or resolved utilities.
        clients: names.
        known: utilities of coalitions finished before, by bitmask; they are not trained again.
        store: called with every coalition as soon as it is finished.
        stack: most coalitions that train at once on a GPU; they also finish together.
        stacked: whether to stack; None stacks on a GPU.
        memory_limit: bytes that may be used.
        progress: called with (local trainings done, local trainings in total).
    """
    n = len(data)
    check_count(n)
    names = names_of(clients, None, "coalitions: ") or names_of((), n, "")
    w = np.asarray(weights, dtype=np.float64)
    coefficients([0], w)
    if len(w) != n or len(names) != n or any(len(row) != n for row in seeds) or not len(seeds):
        raise InputError(
            f"expected {n} weights, names and seeds a round, one per client, and at least 1 round"
        )
    evaluator = Evaluator(model, x, y, utilities, memory_limit=memory_limit)
    device, began = evaluator.device, time.perf_counter()
    start = evaluator.vector(m0, "M0")
    sets = [on_device(one, device, settings.loss) for one in data]
    each = 4 * evaluator.length * 8 + 3 * evaluator.per_image * settings.batch_size
    evaluator.check_memory(n, each, "retraining needs")
    found = {mask: dict(values) for mask, values in (known or {}).items()}
    todo = [mask for mask in range(1, 1 << n) if mask not in found]
    method: Method = "auto" if stacked is None else "stacked" if stacked else "loop"
    first = train_many(model, start, sets, settings, seeds[0], method) if todo else TrainedVectors([], "loop")
    together = first.method == "stacked"
    room = (evaluator.memory - evaluator.need(n)) // each
    size = min(stack, room) if together else 1
    held = np.array([[mask >> i & 1 for i in range(n)] for mask in todo], dtype=bool).reshape(-1, n)
    most = max((int(held[k : k + size].sum(0).max()) for k in range(0, len(todo), size)), default=1)
    stack_of: Stack | None = None

    def local(rows: Tensor, round_: int, i: int) -> Tensor:
        """Return every row after client i's training, shape (K, P)."""
        nonlocal stack_of, most
        while together and most:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                stack_of = stack_of or Stack(model, most, sets, settings)
                seed = seeds[round_][i]
                parts = torch.split(rows, most)
                return torch.cat([stack_of.train(one, [i] * len(one), [seed] * len(one)) for one in parts])
            stack_of, most = None, most // 2
            torch.cuda.empty_cache()
        return torch.stack([_train_one(model, row, sets[i], settings, seeds[round_][i]) for row in rows])

    total, done = int(held.sum()) * len(seeds), 0
    judge = Single(model, evaluator.pool(n))

    def finish(masks: Sequence[int], vectors: Tensor) -> None:
        for mask, values in zip(masks, judge(judge.packing.pack(vectors)).tolist(), strict=True):
            found[mask] = dict(zip((u.name for u in evaluator.utilities), values, strict=True))
            if not np.isfinite(values).all():
                raise ReportError(
                    f"the model of coalition {coalition_name(mask, names)} diverged in retraining"
                )
            if store:
                store(mask, found[mask])

    if 0 not in found:
        finish([0], start[None])
    for begin in range(0, len(todo), size):
        inside = torch.as_tensor(held[begin : begin + size], device=device)
        shares = inside * torch.as_tensor(w, device=device)
        shares = (shares / shares.sum(1, keepdim=True)).float()
        current = start.repeat(len(inside), 1)
        for round_ in range(len(seeds)):
            move = torch.zeros_like(current)
            for i in range(n):
                rows = inside[:, i].nonzero()[:, 0]
                if len(rows):
                    once = as_tensor(first.vectors[i]).to(device)
                    trained = local(current[rows], round_, i) if round_ else once
                    move[rows] += shares[rows, i, None] * (trained - current[rows])
                done += len(rows)
                if progress:
                    progress(done, total)
            current += move
        finish(todo[begin : begin + size], current)
    seconds = time.perf_counter() - began
    record = Retraining(first.method, size, len(todo), len(known or {}), seconds, first.note)
    columns = {u.name: np.array([found[mask][u.name] for mask in range(1 << n)]) for u in evaluator.utilities}
    return {name: Table(values, names) for name, values in columns.items()}, record


def _train_one(
    model: nn.Module, start: Tensor, data: TensorData, settings: TrainingSettings, seed: int
) -> Tensor:
    load_vector(model, start)
    train(model, *data, settings, seed)
    return flatten(model)
