"""What settings may be: ranges, and what must fit together. Messages name the setting.

This module checks that a value can mean something; the code that uses a value checks what it means.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedmerit.errors import ConfigError, KeyFileError
from fedmerit.heading import wrong
from fedmerit.identity import check_names
from fedmerit.notes import meant
from fedmerit.scoring.rewards import SELF_REPORTED
from fedmerit.secagg.setting import LEAST_IN_SUM
from fedmerit.secagg.setting import STAGES as SUM_STAGES
from fedmerit.toml_values import written

if TYPE_CHECKING:
    from fedmerit.config import Config

MOST = 2**31
"""The largest value of settings that count something."""
MOST_SEED = 2**63 - 1
_MOST = ((MOST, ", at most 2^31"), (MOST_SEED, ", at most 2^63 - 1"))
_RANGES: dict[str, tuple[float, float, str]] = {
    "data.test_size": (0, MOST, "0 or more samples"),
    "partition.clients": (3, 1024, "3 to 1024 members: with two, each learns the other's update"),
    "partition.mu": (1e-12, math.inf, "a number above 0"),
    "partition.minimum": (1, MOST, "at least 1 sample"),
    "training.rounds": (1, MOST, "at least 1 round"),
    "training.local_epochs": (1, MOST, "at least 1 epoch"),
    "training.batch_size": (1, MOST, "at least 1 sample"),
    "training.lr": (1e-300, math.inf, "a number above 0"),
    "training.momentum": (0, 1 - 1e-12, "0 or more, below 1"),
    "training.weight_decay": (0, math.inf, "0 or more"),
    "training.weight_cap": (1, 2**32 - 1, "1 to 2^32 - 1"),
    "participation.fraction": (1e-12, 1, "a number above 0, at most 1"),
    "scoring.scale": (0, math.inf, "0 or more"),
    "payment.equal": (0, 1, "a part from 0 to 1"),
    "payment.floor": (0, 1, "a share from 0 to 1"),
    "payment.cap": (0, 1, "a share from 0 to 1"),
    "payment.forfeit": (0, 1, "a part from 0 to 1"),
    "settlement.blocks": (2, 64, "2 to 64 blocks"),
    "settlement.window_days": (0, 36_500, "0 to 36500 days"),
    "secure_aggregation.bound": (1e-300, math.inf, "a number above 0"),
    "secure_aggregation.threshold": (0, 1024, "0 (automatic) or a number of members"),
    "secure_aggregation.least": (0, 1024, "0 (automatic) or a number of members"),
    "run.seed": (0, MOST_SEED, "0 or more"),
    "run.repeat": (1, MOST, "1 or more"),
}
OF_MEMBERS = (
    ("corruption", "label_noise"), ("corruption", "label_flip"), ("corruption", "free_rider"),
    ("corruption", "duplicate"), ("corruption", "test_set"), ("corruption", "misstate"),
    ("participation", "away"), ("participation", "lost"), ("training", "roster_weights"),
)  # fmt: skip
"""Settings besides partition.names that name members: lists of members, or tables by member."""
WITHOUT_GRADIENT = ("accuracy", "balanced-accuracy")
"""Utilities that cannot be settled: a small move of the model changes them by nothing, or by a jump."""
WHOLE = ("auc", "f1", "c-index")
"""Metrics of the whole test set, which are no means over samples. They have no gradient either."""
SCALED = ("rmse-skill", "mae-skill")
"""Utilities of errors, which lie in [0, 1] by the choice of scoring.scale."""
READERS = ("fashion-mini", "npz", "folder", "table", "cifar10", "brain-mri", "isic2019", "pcam")
LOSSES = ("cross-entropy", "binary", "mse")
STAGES = (*SUM_STAGES, "report")
TRUTHS = ("mr-shapley", "round-shapley", "shapley")


def check(config: Config) -> None:
    """Raise `ConfigError` for settings that cannot mean anything; the message names the setting's path.

    Settings that name members are checked only once the members are known (`Config.resolved`).
    """
    for path, (low, high, allowed) in _RANGES.items():
        section, key = path.split(".")
        value = getattr(getattr(config, section), key)
        if path == "partition.clients" and value == 0 and not config.resolved:
            continue
        if not low <= value <= high:
            most = next((said for top, said in _MOST if high == top < value), "")
            raise ConfigError.at(path, f"expected {allowed}{most}, got {value}")
    _check_partition(config)
    if config.resolved:
        _check_members(config)
    noise = config.corruption.label_noise
    if isinstance(noise, str) and noise != "ramp":
        raise ConfigError.at("corruption.label_noise", f'expected a table of rates or "ramp", got {noise!r}')
    for name, rate in () if isinstance(noise, str) else noise.items():
        if not 0 <= rate <= 1:
            raise ConfigError.at(
                "corruption.label_noise", f"expected a rate from 0 to 1, got {rate}", entry=name
            )
    rounds = config.training.rounds
    for name, away in config.participation.away.items():
        if any(not 1 <= number <= rounds for number in away):
            raise ConfigError.at(
                "participation.away",
                f"expected numbers of rounds, 1 to {rounds}, got {list(away)}",
                entry=name,
            )
    for name, when in config.participation.lost.items():
        number, _, stage = when.partition(":")
        if not (number.isascii() and number.isdigit() and int(number[:9]) > 0) or stage not in STAGES:
            form = f'"ROUND:STAGE" with a stage of {", ".join(STAGES)}'
            raise ConfigError.at("participation.lost", f"expected {form}, got {when!r}", entry=name)
        if int(number[:9]) > rounds:
            raise ConfigError.at(
                "participation.lost", f"expected a round from 1 to {rounds}, got {when!r}", entry=name
            )
    utilities = list(config.scoring.utilities)
    if not utilities or len(set(utilities)) != len(utilities):
        raise ConfigError.at(
            "scoring.utilities", f"expected at least one utility, each once, got {utilities}"
        )
    _check_own(config)
    for name in config.scoring.truth:
        if name not in TRUTHS:
            raise ConfigError.at("scoring.truth", f"expected {' or '.join(TRUTHS)}, got {name!r}")
    if config.scoring.visibility == "coordinator":
        for path, tells in (
            ("scoring.disclose_samples", config.scoring.disclose_samples),
            ("scoring.truth", bool(config.scoring.truth)),
            ("training.weights", config.training.weights in ("scores", "current-scores")),
        ):
            if tells:
                raise ConfigError.at(
                    "scoring.visibility",
                    f'"coordinator" contradicts {path}, which would tell every member about the others',
                )
    for section, key in (
        ("report", "title"),
        ("report", "consortium"),
        ("report", "date"),
        ("payment", "currency"),
    ):
        if expected := wrong(key, given := getattr(getattr(config, section), key)):
            raise ConfigError.at(f"{section}.{key}", f"expected {expected}, got {given!r:.100}")
    if config.training.roster_weights and config.training.weights != "roster":
        raise ConfigError.at("training.roster_weights", 'only with training.weights = "roster"')
    _check_method(config)
    _check_payment(config)


def _check_payment(config: Config) -> None:
    """Refuse terms of payment by which nobody could ever be paid."""
    terms, paid = config.payment, config.paid_score
    if paid == "PHI" and not config.settles:
        raise ConfigError.at("payment.score", "PHI needs scoring.method = 'settled' or 'both'")
    if paid != "PHI" and not config.reports:
        raise ConfigError.at("payment.score", f"{paid} needs reports, but scoring.method is 'settled'")
    if paid == "MERIT" and not config.scoring.solo:
        raise ConfigError.at("payment.score", "MERIT needs scoring.solo = true")
    if terms.equal and terms.rule not in ("fair", "fenced"):
        raise ConfigError.at(
            "payment.equal", f"expected 0 with payment.rule = {terms.rule!r}, got {terms.equal}"
        )
    if terms.rule == "impartial" and paid not in SELF_REPORTED:
        raise ConfigError.at(
            "payment.rule",
            f"'impartial' needs a score that members report ({', '.join(sorted(SELF_REPORTED))}), got {paid}",
        )
    members = len(config.clients)
    if config.resolved and not terms.floor * members <= 1 + 1e-12:
        raise ConfigError.at(
            "payment.floor", f"expected at most 1/{members} for {members} members, got {terms.floor}"
        )
    if config.resolved and not terms.cap * members >= 1 - 1e-12:
        raise ConfigError.at(
            "payment.cap", f"expected at least 1/{members} for {members} members, got {terms.cap}"
        )


def _check_own(config: Config) -> None:
    """Refuse names of data, losses and metrics that mean nothing, and errors without a scale."""
    for path, known, other in (("data.name", READERS, "function"), ("training.loss", LOSSES, "function")):
        section, key = path.split(".")
        given = getattr(getattr(config, section), key)
        if given not in known and ":" not in given:
            asked = meant(given, known)
            raise ConfigError.at(
                path, f'expected one of {", ".join(known)}, or "module:{other}", got {given!r}{asked}'
            )
    scoring = config.scoring
    if config.training.momentum and config.training.optimiser != "sgd":
        raise ConfigError.at(
            "training.momentum", f'only with training.optimiser = "sgd", got {config.training.optimiser!r}'
        )
    for name in scoring.whole:
        if name not in scoring.utilities:
            raise ConfigError.at(
                "scoring.whole",
                f"expected names in scoring.utilities, {list(scoring.utilities)}, got {name!r}",
            )
    for name in scoring.utilities:
        if name in ("rmse", "mae", "mse"):
            raise ConfigError.at(
                "scoring.utilities",
                f"{name!r} has no bound and falls as the model improves: expected "
                f"{'mae' if name == 'mae' else 'rmse'}-skill, with scoring.scale",
            )
        if name in SCALED and not scoring.scale:
            raise ConfigError.at(
                "scoring.scale",
                f"{name!r} needs it: expected the error, in the unit of y, from which on an answer "
                "counts as 0, such as the range of y",
            )


def _check_method(config: Config) -> None:
    """Refuse what a settlement cannot do, what needs reports without them, and a rehearsed lie in neither."""
    method, misstated = config.scoring.method, config.corruption.misstate
    for name, factor in misstated.items():
        if factor == 1:
            raise ConfigError.at("corruption.misstate", "expected a factor other than 1", entry=name)
    if misstated and not config.settles:
        raise ConfigError.at(
            "corruption.misstate",
            'only with scoring.method = "settled" or "both": members state nothing otherwise',
        )
    paid = config.scoring.utilities[0]
    if config.settles and (paid in WITHOUT_GRADIENT or paid in config.whole):
        instead = "put sharpened-accuracy or expected-accuracy first, or take scoring.method = 'reports'"
        if paid in config.whole:
            instead = (
                "it is a metric of the whole test set; take scoring.method = 'reports', or put a mean over "
                "samples first"
            )
        raise ConfigError.at(
            "scoring.utilities",
            f"{method!r} settles the first utility along its gradient, and {paid!r} has none: {instead}",
        )
    reveal = config.data.test_reveal
    if (reveal == "end") == config.reports:
        expected = "fixed or per-round" if config.reports else "end (or leave the key out)"
        raise ConfigError.at(
            "data.test_reveal", f"expected {expected} with scoring.method = {method!r}, got {reveal!r}"
        )
    if config.reports:
        return
    for path, given in (
        ("training.weights", config.training.weights in ("scores", "current-scores")),
        ("scoring.game", config.scoring.game == "renormalised"),
        ("scoring.solo", config.scoring.solo),
        ("scoring.truth", bool(config.scoring.truth)),
        ("corruption.test_set", bool(config.corruption.test_set)),
    ):
        if given:
            section, key = path.split(".")
            value = written(getattr(getattr(config, section), key))
            raise ConfigError.at(
                path,
                f"{value:.60} needs measurements in the rounds, but with scoring.method = 'settled' nobody "
                "sees the test pool before the last round is over: use 'both' or 'reports'",
            )


def _check_members(config: Config) -> None:
    """Refuse names that no member may have, and settings that name anybody but a member."""
    names = config.clients
    if len(set(names)) != len(names) or len(names) != config.partition.clients:
        raise ConfigError.at(
            "partition.names", f"expected {config.partition.clients} different names, got {list(names)}"
        )
    try:
        check_names(names)
    except KeyFileError as error:
        raise ConfigError.at("partition.names", str(error)) from error
    for section, key in OF_MEMBERS:
        given = getattr(getattr(config, section), key)
        whose = config.corruption.duplicate.values() if key == "duplicate" else ()
        for name in () if isinstance(given, str) else (*given, *whose):
            if name not in names:
                raise ConfigError.at(
                    f"{section}.{key}", f"unknown member {name!r}; members are {', '.join(names)}"
                )
    threshold = config.secure_aggregation.threshold
    if threshold and not len(names) / 2 < threshold <= len(names):
        half = f"{len(names) // 2 + 1} to {len(names)}, more than half of the {len(names)} members"
        raise ConfigError.at("secure_aggregation.threshold", f"expected {half}, got {threshold}")
    for name in names if config.training.weights == "roster" else ():
        weight = config.training.roster_weights.get(name)
        if weight is None or weight <= 0:
            raise ConfigError.at(
                "training.roster_weights", f"expected a weight above 0, got {weight}", entry=name
            )


def check_schedule(config: Config) -> None:
    """Refuse a run whose rounds could never finish, before it begins; recorded settings are not checked.

    The threshold refers to all members. If it referred to those scheduled, a server that schedules fewer
    members would need fewer colluders.
    """
    members, t = len(config.clients), config.threshold
    least, fraction = config.secure_aggregation.least, config.participation.fraction
    if t > members:
        raise ConfigError.at(
            "secure_aggregation.threshold", f"expected at most the {members} members, got {t}"
        )
    if least and not t <= least <= members:
        raise ConfigError.at(
            "secure_aggregation.least",
            f"expected {t} to {members}, since {t} of the {members} members must "
            f"stay to the end of a round, got {least}",
        )
    if usual_schedule(config) < t:
        smallest = next(k / 1000 for k in range(1001) if round(k / 1000 * members) >= t)
        raise ConfigError.at(
            "participation.fraction",
            f"expected at least {smallest:g}, since {t} "
            f"of the {members} members must stay to the end of a round, got {fraction:g}, which schedules "
            f"{usual_schedule(config)}",
        )


def usual_schedule(config: Config) -> int:
    """Return how many members a round schedules if nobody is away."""
    return max(LEAST_IN_SUM, round(config.participation.fraction * len(config.clients)))


def _check_partition(config: Config) -> None:
    part = config.partition
    if part.merge and part.scheme != "group":
        raise ConfigError.at("partition.merge", f'only with partition.scheme = "group", got {part.scheme!r}')
    owner: dict[str, str] = {}
    for name, groups in part.merge.items():
        if not groups:
            raise ConfigError.at("partition.merge", "expected at least one group, got none", entry=name)
        for group in groups:
            if group in owner:
                raise ConfigError.at(
                    "partition.merge", f"group {group!r} is in both {owner[group]!r} and {name!r}"
                )
            owner[group] = name
    if part.sizes and part.scheme != "sizes":
        raise ConfigError.at("partition.sizes", f'only with partition.scheme = "sizes", got {part.scheme!r}')
    if part.scheme == "sizes" and len(part.sizes) != part.clients:
        got = len(part.sizes)
        raise ConfigError.at("partition.sizes", f"expected {part.clients} sizes, one per client, got {got}")
