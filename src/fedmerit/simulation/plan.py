"""What a run will cost, before it starts: models, trainings, minutes, memory, bytes; and what it can resolve.

Minutes are an estimate from a few seconds of calibration on this device with this network and these images.
Which members the test pool can tell apart, by the criterion of :func:`fedmerit.uncertainty.compare_pairs`,
follows from the spread of per-sample differences; the plan uses the range of spreads seen on real networks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from fedmerit.config import Config
from fedmerit.notes import Note
from fedmerit.protocol.direction import POINTS
from fedmerit.scoring.sampling import SKETCH, pair_freedom
from fedmerit.scoring.uncertainty import TRAINING, resolvable_gap, samples_needed
from fedmerit.simulation.analysis import BUDGET, MOST_EXACT
from fedmerit.simulation.direction import direction
from fedmerit.simulation.models import load_vector, to_vector
from fedmerit.simulation.setup import Federation, prepare, schedule
from fedmerit.simulation.training import train

CALIBRATION = 1.0
"""Seconds for each measurement."""
STEPS = 3
"""Steps of a plan: read the data, measure training and evaluation, measure a settlement."""
IN_A_ROUND, PER_UTILITY, PER_SKETCH, PER_MEMBER = 1920, 285, 500, 374
"""Bytes that a member sends in a round beside its masked update: keys, sealed shares, commitments to the keys
of its pairs, signatures, its report. Fitted to a federation in memory with 3 to 36 members and 1 to 4
utilities, from its second round on."""
AGAIN = 2 + 4 + 4
"""Bytes per parameter and round that a settlement sends to a member: the direction, M0 and the sum."""
KEPT = 4
"""Bytes per parameter and round that a member keeps for the settlement: its update."""
SALT = 32
"""Bytes of a revealed test sample beside its numbers and its target."""
SPREAD = {
    "expected-accuracy": (6.0, 33.7),
    "sharpened-accuracy": (10.3, 68.3),
    "accuracy": (21.9, 74.8),
    "brier": (25.9, 162.2),
    "neg-loss": (36.6, 152.6),
}
"""Standard deviation over test samples of the difference between two members' scores, summed over a run, in
fair shares (the gain divided by the members): from the lowest 10th to the highest 90th percentile over pairs,
by dataset and number of members, of the runs in experiments/results (CIFAR-10 and Brain-MRI). The first two
are PHI's, from its blocks. The others are alpha's, from plain standard errors, which are too large. Utilities
not named here use the range of accuracy."""
TENTH = 0.1
"""The difference, in fair shares, for which the plan says how many test samples it needs."""


@dataclass(frozen=True)
class Resolution:
    """What the scores of a run can tell apart, each pair with 80 % power and all claims together at 95 %.

    Pairs of numbers are for the smallest and the largest spread seen on real networks.
    """

    samples: int  # test samples that the scores are measured on: per round, or of the settlement
    gaps: tuple[float, float]  # difference of two members' sums, in fair shares, that is found
    needed: tuple[int, int]  # test samples that find a tenth of a fair share


def resolution(config: Config, members: int, samples: int) -> Resolution:
    """Return what so many members can tell apart on so many test samples, by the criterion of the scores.

    Settled scores have errors from blocks, reports from sketches. With plain errors, a difference must exceed
    the sum of two errors, not the root of the sum of squares, hence a factor of the square root of 2. One
    training adds an error of its own (`TRAINING`); if contributions scatter more over the rounds of the run,
    more test samples do not help, only training again does.
    """
    spread = SPREAD.get(config.scoring.utilities[0], SPREAD["accuracy"])
    pairs, wider = max(1, members * (members - 1) // 2), math.hypot(1, TRAINING)
    if config.settles:
        freedom: int | None = min(config.settlement.blocks, samples) - 1
    elif config.scoring.errors == "joint":
        freedom = pair_freedom(SKETCH, samples)
    else:
        freedom, wider = None, wider * math.sqrt(2)
    low, high = (
        (
            resolvable_gap(samples, sd * wider, comparisons=pairs, freedom=freedom),
            samples_needed(TENTH, sd * wider, comparisons=pairs, freedom=freedom),
        )
        for sd in spread
    )
    return Resolution(samples, (low[0], high[0]), (low[1], high[1]))


@dataclass(frozen=True)
class Cost:
    """One line of the plan: a group of scores or a ground truth."""

    name: str
    models: int  # evaluated in the whole run, in this engine
    trainings: int  # local trainings beyond those of the run itself
    minutes: float


@dataclass(frozen=True)
class SettlementCost:
    """What the settlement after the last round costs a member who was in the sum of every round.

    A gradient is that of the utility over all settled samples at one model. The member computes one per
    point of the way from M0 to M: three in a round, and seven more if these leave too large a rest, which
    nobody knows before. The minutes are those of three, measured on this device.
    """

    samples: int  # of the pool
    gradients: int
    minutes: float
    bytes_down: int  # the samples; the direction, M0 and the sum of every round
    disk_bytes: int  # its own updates, kept until the settlement is over


@dataclass(frozen=True)
class Plan:
    """What `fedmerit plan` shows."""

    device: str
    parameters: int
    members: int
    samples: tuple[tuple[str, int], ...]  # each member's name and number of training samples
    rounds: int
    local_trainings: int
    train_minutes: float
    costs: tuple[Cost, ...]
    memory_bytes: int
    bytes_up: int  # per member and round
    flower_models: int  # most models per member and round when members evaluate
    pool: int  # test samples per round; 0 if rounds are not measured
    resolution: Resolution
    settlement: SettlementCost | None
    notes: tuple[str, ...]  # what a run of this config would print before it starts

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as plain values; None where nothing was measured."""
        found: dict[str, Any] = _plain(asdict(self))
        return {**found, "samples": dict(self.samples)}


def _plain(value: Any) -> Any:
    """Return values as JSON has them: lists for tuples, None for what is not a number."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, str) else value


def plan(config: Config, *, calibrate: bool = True, done: Callable[[], None] = lambda: None) -> Plan:
    """Return what a run of this config costs on this machine.

    Args:
        config: all settings.
        calibrate: whether to measure how fast this machine is.
        done: called after each of the `STEPS`.
    """
    federation = prepare(config, pool_key=bytes(32))
    done()
    config = federation.config
    rounds = config.training.rounds
    present = [len(schedule(config, federation.names, number)) for number in range(1, rounds + 1)]
    per_image, per_step = calibration(federation) if calibrate else (math.nan, math.nan)
    done()
    samples = sum(len(client.y) for client in federation.clients if client.behaviour == "honest")
    share = sum(present) / (rounds * len(federation.names))
    epochs = config.training.local_epochs
    train_minutes = samples * epochs * rounds * share * per_step / 60
    pool = len(federation.pool.first.y) if config.reports else 0
    evaluation = pool * per_image / 60
    length = to_vector(federation.network).size
    members = len(federation.names)
    settled = len(federation.pool.settlement().y) if config.settles else 0
    settlement = _settlement(federation, length, calibrate=calibrate) if config.settles else None
    done()
    return Plan(
        device=str(federation.device),
        parameters=length,
        members=members,
        samples=tuple((client.name, len(client.y)) for client in federation.clients),
        rounds=rounds,
        local_trainings=sum(present),
        train_minutes=train_minutes,
        costs=tuple(_costs(config, present, evaluation, train_minutes)),
        memory_bytes=_memory(config, federation, length),
        bytes_up=config.word_bytes * length + fixed_bytes(config, max(present)),
        flower_models=4 + 2 * config.scoring.solo if config.reports else 0,
        pool=pool,
        resolution=resolution(config, max(present), settled or pool),
        settlement=settlement,
        notes=(*federation.notes, *_unknown_spread(config)),
    )


def _costs(config: Config, present: list[int], evaluation: float, train_minutes: float) -> list[Cost]:
    fresh = config.data.test_reveal == "per-round"  # otherwise M is the next round's M0, evaluated already
    models = sum(2 * n + 1 for n in present) + (len(present) if fresh else 1)
    if not config.reports:
        return []
    found = [Cost("LOO, IOI, alpha, FP, EE", models, 0, models * evaluation)]
    if config.scoring.solo:
        extra = sum(present) + (len(present) - 1 if fresh else 0)  # M0 of round 1 is the first model
        found.append(Cost("SOLO, MERIT", extra, sum(present), extra * evaluation + train_minutes))
    if "mr-shapley" in config.scoring.truth:
        coalitions = sum(1 << n if n <= MOST_EXACT else BUDGET for n in present)
        found.append(Cost("MR-SV (analysis)", coalitions, 0, coalitions * evaluation))
    elif "round-shapley" in config.scoring.truth:
        coalitions = 1 << present[-1] if present[-1] <= MOST_EXACT else BUDGET
        found.append(Cost("SV of the last round (analysis)", coalitions, 0, coalitions * evaluation))
    if "shapley" in config.scoring.truth:
        n = len(config.clients)
        trainings = n * (1 << (n - 1)) * config.training.rounds
        minutes = train_minutes * (1 << (n - 1)) + (1 << n) * evaluation
        found.append(Cost("retrained SV (analysis)", 1 << n, trainings, minutes))
    return found


def _memory(config: Config, federation: Federation, length: int) -> int:
    """Return the bytes for one update per member (two with the solo track) and a fixed number of models."""
    per_member = 4 * length * (1 + config.scoring.solo)
    return len(federation.names) * per_member + 12 * 4 * length


def fixed_bytes(config: Config, members: int) -> int:
    """Return about how many bytes a member sends in a round of so many members beside its masked update."""
    utilities = len(config.scoring.utilities) if config.reports else 0
    each = PER_UTILITY + (PER_SKETCH if config.scoring.errors == "joint" else 0)
    return IN_A_ROUND + each * utilities + PER_MEMBER * members


def _unknown_spread(config: Config) -> list[str]:
    """Return a note if no experiment has measured how the paid utility spreads."""
    paid = config.scoring.utilities[0]
    return [] if paid in SPREAD else [Note("spread-unknown", utility=paid)]


def _settlement(federation: Federation, length: int, *, calibrate: bool) -> SettlementCost:
    shown, rounds = federation.pool.settlement(), federation.config.training.rounds
    utility, blocks, first = federation.utilities[0], federation.config.settlement.blocks, federation.first

    def once() -> object:
        return direction(federation.network, first, first, shown.x, shown.y, utility, blocks=blocks)

    seconds = _clocked(once, federation) if calibrate else math.nan
    return SettlementCost(
        samples=len(shown.y),
        gradients=POINTS[0] * rounds,
        minutes=rounds * seconds / 60,
        bytes_down=shown.x.nbytes + shown.y.nbytes + SALT * len(shown.y) + AGAIN * length * rounds,
        disk_bytes=KEPT * length * rounds,
    )


def calibration(federation: Federation) -> tuple[float, float]:
    """Return the seconds per evaluated image and per trained sample on this device."""
    shown = federation.pool.first
    per_image = _clocked(lambda: federation.evaluate(federation.first, shown), federation) / len(shown.y)
    client = max(federation.clients, key=lambda client: len(client.y))
    batch = federation.training.batch_size
    some = min(len(client.y), 8 * batch)
    once = replace(federation.training, local_epochs=1)
    load_vector(federation.network, federation.first)
    per_step = _clocked(
        lambda: train(federation.network, client.x[:some], client.y[:some], once, 0), federation
    )
    load_vector(federation.network, federation.first)
    return per_image, per_step / some


def _clocked(work: Callable[[], object], federation: Federation) -> float:
    """Return the median seconds per call, measured for about a second after one warm-up call."""

    def wait() -> None:
        if federation.device.type == "cuda":
            torch.cuda.synchronize()

    work()
    times: list[float] = []
    while sum(times) < CALIBRATION and len(times) < 50:
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return float(np.median(times))
