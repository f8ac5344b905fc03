"""What settings may be: their ranges, and what must fit together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedmerit.errors import ConfigError, KeyFileError
from fedmerit.names import check_names
from fedmerit.secagg.setting import LEAST_IN_SUM

if TYPE_CHECKING:
    from fedmerit.config import Config

MOST = 2**31
"""Of whatever is counted in whole numbers."""
_RANGES: dict[str, tuple[float, float, str]] = {
    "data.test_size": (0, MOST, "0 or more samples"),
    "partition.clients": (3, 1024, "3 to 1024 members: with two, each learns the other's update"),
    "partition.mu": (1e-12, math.inf, "a number above 0"),
    "partition.minimum": (1, MOST, "at least 1 sample"),
    "training.rounds": (1, MOST, "at least 1 round"),
    "training.local_epochs": (1, MOST, "at least 1 epoch"),
    "training.batch_size": (1, MOST, "at least 1 sample"),
    "training.lr": (1e-300, math.inf, "a number above 0"),
    "training.weight_decay": (0, math.inf, "0 or more"),
    "training.weight_cap": (1, 2**32 - 1, "1 to 2^32 - 1"),
    "participation.fraction": (1e-12, 1, "a number above 0, at most 1"),
    "secure_aggregation.bound": (1e-300, math.inf, "a number above 0"),
    "secure_aggregation.threshold": (0, 1024, "0 (automatic) or a number of members"),
    "secure_aggregation.least": (0, 1024, "0 (automatic) or a number of members"),
    "run.seed": (0, 2**63 - 1, "0 or more"),
}
STAGES = ("advertise", "share", "masked", "check", "unmask", "report")
TRUTHS = ("mr-shapley", "shapley")


def check(config: Config) -> None:
    """Refuse settings that cannot mean anything; the message names the setting's path.

    What depends on who the members are is checked once that is known (`Config.resolved`).
    """
    for path, (low, high, allowed) in _RANGES.items():
        section, key = path.split(".")
        value = getattr(getattr(config, section), key)
        if path == "partition.clients" and value == 0 and not config.resolved:
            continue
        if not low <= value <= high:
            most = ", at most 2^31" if high == MOST < value else ""
            raise ConfigError(f"{path}: expected {allowed}{most}, got {value}")
    _check_partition(config)
    if config.resolved:
        _check_members(config)
    noise = config.corruption.label_noise
    if isinstance(noise, str) and noise != "ramp":
        raise ConfigError(f'corruption.label_noise: expected a table of rates or "ramp", got {noise!r}')
    for name, rate in () if isinstance(noise, str) else noise.items():
        if not 0 <= rate <= 1:
            raise ConfigError(f"corruption.label_noise.{name}: expected a rate from 0 to 1, got {rate}")
    rounds = config.training.rounds
    for name, away in config.participation.away.items():
        if any(not 1 <= number <= rounds for number in away):
            raise ConfigError(
                f"participation.away.{name}: expected numbers of rounds, 1 to {rounds}, got {list(away)}"
            )
    for name, when in config.participation.lost.items():
        number, _, stage = when.partition(":")
        if not (number.isascii() and number.isdigit() and int(number[:9]) > 0) or stage not in STAGES:
            form = f'"ROUND:STAGE" with a stage of {", ".join(STAGES)}'
            raise ConfigError(f"participation.lost.{name}: expected {form}, got {when!r}")
        if int(number[:9]) > rounds:
            raise ConfigError(f"participation.lost.{name}: expected a round from 1 to {rounds}, got {when!r}")
    utilities = list(config.scoring.utilities)
    if not utilities or len(set(utilities)) != len(utilities):
        raise ConfigError(f"scoring.utilities: expected at least one utility, each once, got {utilities}")
    for name in config.scoring.truth:
        if name not in TRUTHS:
            raise ConfigError(f"scoring.truth: expected {' or '.join(TRUTHS)}, got {name!r}")
    if config.scoring.visibility == "coordinator":
        for path, tells in (
            ("scoring.disclose_samples", config.scoring.disclose_samples),
            ("scoring.truth", bool(config.scoring.truth)),
            ("training.weights", config.training.weights in ("scores", "current-scores")),
        ):
            if tells:
                raise ConfigError(
                    f'scoring.visibility: "coordinator" cannot hold with {path} as it is: '
                    "that would tell every member about the others"
                )
    if config.training.roster_weights and config.training.weights != "roster":
        raise ConfigError('training.roster_weights: only with training.weights = "roster"')


def _check_members(config: Config) -> None:
    """Refuse names that no member may have, and settings that name somebody else."""
    names = config.clients
    if len(set(names)) != len(names) or len(names) != config.partition.clients:
        raise ConfigError(
            f"partition.names: expected {config.partition.clients} different names, got {list(names)}"
        )
    try:
        check_names(names)
    except KeyFileError as error:
        raise ConfigError(f"partition.names: {error}") from error
    for section, key in (
        ("corruption", "label_noise"), ("corruption", "label_flip"), ("corruption", "free_rider"),
        ("corruption", "duplicate"), ("corruption", "test_set"), ("participation", "away"),
        ("participation", "lost"), ("training", "roster_weights"),
    ):  # fmt: skip
        given = getattr(getattr(config, section), key)
        whose = config.corruption.duplicate.values() if key == "duplicate" else ()
        for name in () if isinstance(given, str) else (*given, *whose):
            if name not in names:
                raise ConfigError(f"{section}.{key}: unknown member {name!r}; members are {', '.join(names)}")
    threshold = config.secure_aggregation.threshold
    if threshold and not len(names) / 2 < threshold <= len(names):
        half = f"{len(names) // 2 + 1} to {len(names)}, more than half of the {len(names)} members"
        raise ConfigError(f"secure_aggregation.threshold: expected {half}, got {threshold}")
    for name in names if config.training.weights == "roster" else ():
        weight = config.training.roster_weights.get(name)
        if weight is None or weight <= 0:
            raise ConfigError(f"training.roster_weights.{name}: expected a weight above 0, got {weight}")


def check_schedule(config: Config) -> None:
    """Refuse a run whose rounds could never finish, before it begins; those recorded are read as they are.

    The threshold is one of all members: were it one of those scheduled, a server that schedules fewer would
    need fewer colluders.
    """
    members, t = len(config.clients), config.threshold
    least, fraction = config.secure_aggregation.least, config.participation.fraction
    if t > members:
        raise ConfigError(f"secure_aggregation.threshold: expected at most the {members} members, got {t}")
    if least and not t <= least <= members:
        raise ConfigError(
            f"secure_aggregation.least: expected {t} to {members}, since {t} of the {members} members must "
            f"stay to the end of a round, got {least}"
        )
    if usual_schedule(config) < t:
        smallest = next(k / 1000 for k in range(1001) if round(k / 1000 * members) >= t)
        raise ConfigError(
            f"participation.fraction: expected at least {smallest:g}, since {t} "
            f"of the {members} members must stay to the end of a round, got {fraction:g}, which schedules "
            f"{usual_schedule(config)}"
        )


def usual_schedule(config: Config) -> int:
    """How many members a round schedules where nobody is away."""
    return max(LEAST_IN_SUM, round(config.participation.fraction * len(config.clients)))


def _check_partition(config: Config) -> None:
    part = config.partition
    if part.merge and part.scheme != "group":
        raise ConfigError(f'partition.merge: only with partition.scheme = "group", got {part.scheme!r}')
    owner: dict[str, str] = {}
    for name, groups in part.merge.items():
        if not groups:
            raise ConfigError(f"partition.merge.{name}: expected at least one group, got none")
        for group in groups:
            if group in owner:
                raise ConfigError(f"partition.merge: group {group!r} is in {owner[group]!r} and in {name!r}")
            owner[group] = name
    if part.sizes and part.scheme != "sizes":
        raise ConfigError(f'partition.sizes: only with partition.scheme = "sizes", got {part.scheme!r}')
    if part.scheme == "sizes" and len(part.sizes) != part.clients:
        got = len(part.sizes)
        raise ConfigError(f"partition.sizes: expected {part.clients} sizes, one per client, got {got}")
