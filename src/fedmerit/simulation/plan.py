"""What a run will cost, before it starts: models, trainings, minutes, memory, bytes; and what it can resolve.

Minutes are an estimate from a second of calibration with this network and a few of its images. Which members
the test pool can tell apart follows from the spreads in committed experiments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch

from fedmerit.config import Config
from fedmerit.notes import Note
from fedmerit.protocol.direction import BLOCKS, POINTS
from fedmerit.scoring.sampling import SKETCH, pair_freedom, resolvable_gap
from fedmerit.scoring.uncertainty import TRAINING
from fedmerit.simulation.analysis import BUDGET, MOST_EXACT
from fedmerit.simulation.direction import direction
from fedmerit.simulation.models import load_vector
from fedmerit.simulation.setup import Federation, prepare, schedule
from fedmerit.simulation.training import train

CALIBRATION = 0.1
"""Seconds for each measurement; what takes as long as ten of them is measured once."""
STEPS = 3
"""Steps of a plan: read the data, measure training and evaluation, measure a settlement."""
IN_A_ROUND, PER_UTILITY, PER_SKETCH, PER_MEMBER = 1920, 285, 500, 374
"""Bytes that a member sends in a round beside its masked update. Fitted to a federation in memory with 3 to
36 members and 1 to 4 utilities, from its second round on."""
AGAIN = 2 + 4 + 4
"""Bytes per parameter and round that a settlement sends to a member: the direction, M0 and the sum."""
KEPT = 4
"""Bytes per parameter and round that a member keeps for the settlement: its update."""
SALT = 32
"""Bytes of a revealed test sample beside its numbers and its target."""
SPREAD = {
    "expected-accuracy": ((0.0656, 0.453), (0.247, 0.734)),
    "sharpened-accuracy": ((0.146, 0.629), (0.450, 1.87)),
    "accuracy": ((0.354, 0.930), (1.13, 2.86)),
    "brier": ((0.254, 0.363), (0.604, 1.63)),
    "neg-loss": ((1.41, 2.77), (3.62, 6.15)),
}
"""Standard deviation over test samples of the difference between two members' sums, where samples were dealt
alike (iid), and where they were not: medians over pairs of members without a planted fault, of the dataset in
experiments/results with the smallest and of that with the largest. The first two are PHI's, the rest alpha's.
"""


@dataclass(frozen=True)
class Resolution:
    """What the scores of a run can tell apart, each pair with 80 % power and all claims together at 95 %."""

    samples: int  # test samples that the scores are measured on: per round, or of the settlement
    gaps: tuple[float, float]  # the least difference of two members' sums that is found: of two datasets


def resolution(config: Config, members: int, samples: int) -> Resolution | None:
    """Return what so many members can tell apart on so many test samples, by the criterion of the scores.

    None if nobody has measured the spread of the paid utility. Settled scores have errors from blocks,
    reports from sketches. One training adds its own (`TRAINING`). The gaps are for both spreads of `SPREAD`.
    """
    alike = config.partition.scheme in ("iid", "sizes")
    if (spreads := SPREAD.get(config.scoring.utilities[0])) is None:
        return None
    low, high = spreads[not alike]
    freedom = min(BLOCKS, samples) - 1 if config.settles else pair_freedom(SKETCH, samples)
    how = {"comparisons": max(1, members * (members - 1) // 2), "freedom": freedom}
    both = math.hypot(1, TRAINING)
    return Resolution(
        samples, (resolvable_gap(samples, low * both, **how), resolvable_gap(samples, high * both, **how))
    )


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

    It computes a gradient over all settled samples per point of the way from M0 to M: three in a round, and
    seven more if these leave too large a rest, which nobody knows before. The minutes are those of three.
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
    utility: str  # the paid one
    pool: int  # test samples per round; 0 if rounds are not measured
    resolution: Resolution | None  # None: nobody has measured the spread of the paid utility
    settlement: SettlementCost | None
    notes: tuple[str, ...]  # what a run of this config would print before it starts

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as plain values; None where nothing was measured."""
        return {**_plain(asdict(self)), "samples": dict(self.samples)}


def _plain(value: Any) -> Any:
    """Return values as JSON has them: lists for tuples, None for what is not a number."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, str) else value


def plan(config: Config, *, calibrate: bool = True, done: Callable[[], None] = lambda: None) -> Plan:
    """Return what a run costs here; ``calibrate`` measures this machine, ``done`` is called `STEPS` times."""
    federation = prepare(config, pool_key=bytes(32))
    done()
    config = federation.config
    rounds = config.training.rounds
    members, length = len(federation.names), federation.first.size
    present = [len(schedule(config, federation.names, number)) for number in range(1, rounds + 1)]
    per_image, per_step = calibration(federation) if calibrate else (math.nan, math.nan)
    done()
    samples = sum(len(client.y) for client in federation.clients if client.behaviour == "honest")
    trainings = samples * config.training.local_epochs * sum(present) / members
    train_minutes = trainings * per_step / 60
    pool = len(federation.pool.first.y) if config.reports else 0
    settlement = _settlement(federation, calibrate=calibrate) if config.settles else None
    done()
    paid, notes = config.scoring.utilities[0], list(federation.notes)
    if paid not in SPREAD:
        notes.append(Note("spread-unknown", utility=paid))
    return Plan(
        device=str(federation.device),
        parameters=length,
        members=members,
        samples=tuple((client.name, len(client.y)) for client in federation.clients),
        rounds=rounds,
        local_trainings=sum(present),
        train_minutes=train_minutes,
        costs=tuple(_costs(config, present, pool * per_image / 60, train_minutes)),
        memory_bytes=4 * length * (members * (1 + config.scoring.solo) + 12),  # updates, a few models
        bytes_up=config.word_bytes * length + fixed_bytes(config, max(present)),
        flower_models=4 + 2 * config.scoring.solo if config.reports else 0,
        utility=paid,
        pool=pool,
        resolution=resolution(config, max(present), settlement.samples if settlement else pool),
        settlement=settlement,
        notes=tuple(notes),
    )


def _costs(config: Config, present: list[int], evaluation: float, train_minutes: float) -> list[Cost]:
    if not config.reports:
        return []
    fresh = config.data.test_reveal == "per-round"  # otherwise M is the next round's M0, evaluated already
    models = sum(2 * n + 1 for n in present) + (len(present) if fresh else 1)
    costs = [Cost("LOO, IOI, alpha, FP, EE", models, 0, models * evaluation)]
    if config.scoring.solo:
        models = sum(present) + (len(present) - 1 if fresh else 0)  # M0 of round 1 is the first model
        costs.append(Cost("SOLO, MERIT", models, sum(present), models * evaluation + train_minutes))
    coalitions = [1 << n if n <= MOST_EXACT else BUDGET for n in present]
    if "mr-shapley" in config.scoring.truth:
        costs.append(Cost("MR-SV (analysis)", sum(coalitions), 0, sum(coalitions) * evaluation))
    elif "round-shapley" in config.scoring.truth:
        costs.append(Cost("SV of the last round (analysis)", coalitions[-1], 0, coalitions[-1] * evaluation))
    if "shapley" in config.scoring.truth:
        n = len(config.clients)
        trainings = n * (1 << (n - 1)) * config.training.rounds
        minutes = train_minutes * (1 << (n - 1)) + (1 << n) * evaluation
        costs.append(Cost("retrained SV (analysis)", 1 << n, trainings, minutes))
    return costs


def fixed_bytes(config: Config, members: int) -> int:
    """Return about how many bytes a member sends in a round of so many members beside its masked update."""
    utilities = len(config.scoring.utilities) if config.reports else 0
    return IN_A_ROUND + (PER_UTILITY + PER_SKETCH) * utilities + PER_MEMBER * members


def _settlement(federation: Federation, *, calibrate: bool) -> SettlementCost:
    shown, rounds = federation.pool.settlement(), federation.config.training.rounds
    network, first, paid = federation.network, federation.first, federation.utilities[0]
    length, samples = first.size, len(shown.y)

    def seconds(count: int, blocks: int) -> float:
        path = network, first, first, shown.x[:count], shown.y[:count], paid
        return _clocked(lambda: direction(*path, blocks=blocks, points=POINTS[0]), federation) / count

    each, few = math.nan, -(-samples // min(BLOCKS, samples))  # a block
    if calibrate and paid.function is None:  # which may need all samples at once
        each = seconds(few, 1)
    if calibrate and (math.isnan(each) or each * samples < 10 * CALIBRATION):  # to begin takes longer
        each = seconds(samples, min(BLOCKS, samples))
    return SettlementCost(
        samples=samples,
        gradients=POINTS[0] * rounds,
        minutes=rounds * each * samples / 60,
        bytes_down=shown.x.nbytes + shown.y.nbytes + SALT * samples + AGAIN * length * rounds,
        disk_bytes=KEPT * length * rounds,
    )


def calibration(federation: Federation) -> tuple[float, float]:
    """Return the seconds per evaluated image and per trained sample on this device."""
    shown = federation.pool.first
    per_image = _clocked(lambda: federation.evaluate(federation.first, shown), federation) / len(shown.y)
    client = max(federation.clients, key=lambda client: len(client.y))
    count, once = (
        min(len(client.y), federation.training.batch_size),
        replace(federation.training, local_epochs=1),
    )
    load_vector(federation.network, federation.first)
    train(federation.network, client.x[:2], client.y[:2], once, 0)  # PyTorch loads what optimisers need

    def seconds(samples: int) -> float:
        data = client.x[:samples], client.y[:samples]
        return _clocked(lambda: train(federation.network, *data, once, 0), federation)

    step = seconds(
        count
    )  # to begin takes longer than a step, so as many steps are measured as there is time for
    steps = max(1, min(len(client.y) // count, int(CALIBRATION / max(step, 1e-9))))
    per_sample = (seconds(steps * count) if steps > 1 else step) / (steps * count)
    load_vector(federation.network, federation.first)
    return per_image, per_sample


def _clocked(work: Callable[[], object], federation: Federation) -> float:
    """Return the seconds of a call, as a mean over several; the first one warms up if there are others.

    A run makes many calls, so their mean tells how long it takes, on a busy machine too.
    """

    def wait() -> None:
        if federation.device.type == "cuda":
            torch.cuda.synchronize()

    times: list[float] = []
    while not times or (times[0] < 10 * CALIBRATION > 10 * sum(times[1:]) and len(times) < 50):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return fmean(times[1:] or times)
