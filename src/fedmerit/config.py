"""TOML -> validated settings. Every key has a default, unknown keys are errors, messages name the path.

Settings are plain frozen dataclasses, so that they work where only numpy and torch are installed. What a
value means is checked where it is used; here it is checked that it can mean something.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedmerit.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, and which of them everybody is measured on."""

    name: Literal["fashion-mini", "npz", "folder", "cifar10", "brain-mri", "isic2019", "pcam"] = (
        "fashion-mini"
    )
    path: str = ""  # where the files are (not for fashion-mini); relative to where fedmerit runs
    test_size: int = 500  # the whole pool, class-balanced; 0 takes the whole test set
    test_reveal: Literal["fixed", "per-round"] = "fixed"  # per-round: disjoint slices in a committed order
    options: Mapping[str, Any] = field(default_factory=dict)  # of the reader, such as size = 64


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Who holds which training samples."""

    clients: int = 6
    scheme: Literal["iid", "dirichlet", "group", "sizes", "file"] = "dirichlet"
    mu: float = 0.5  # Dirichlet: small means few classes per client
    minimum: int = 10  # fewest samples of a client
    sizes: Sequence[float] = ()  # for "sizes": counts, or fractions
    file: str = ""  # for "file": a saved partition
    names: Sequence[str] = ()  # client-0, client-1, ... unless given


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """Members that are not what they should be; for rehearsals and experiments."""

    label_noise: Mapping[str, float] | str = field(default_factory=dict)  # {client-5 = 0.8}, or "ramp"
    label_flip: Sequence[str] = ()  # y -> C-1-y
    free_rider: Mapping[str, str] = field(default_factory=dict)  # {client-1 = "zero" | "noise" | "stale"}
    duplicate: Mapping[str, str] = field(default_factory=dict)  # {client-2 = "client-0"}: same data
    test_set: Sequence[str] = ()  # trains on the test pool


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    name: str = "cnn"  # mlp | cnn | cnn-pool | resnet18 | resnet50 | "module:factory"
    norm: Literal["group", "batch"] = "group"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Rounds, local training with Adam (reset each round), and the weights of the sum."""

    rounds: int = 10
    local_epochs: int = 5
    batch_size: int = 64
    lr: float = 0.001
    weight_decay: float = 0.001
    weights: Literal["uniform", "roster", "secret", "scores"] = "uniform"
    roster_weights: Mapping[str, float] = field(default_factory=dict)  # for "roster": {client-0 = 2.0}
    weight_cap: int = 100000  # for "secret": the largest sample count anyone may claim


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Who takes part when."""

    fraction: float = 1.0  # of the members, drawn anew each round
    away: Mapping[str, Sequence[int]] = field(default_factory=dict)  # {client-2 = [3]}: misses round 3
    lost: Mapping[str, str] = field(
        default_factory=dict
    )  # {client-2 = "3:masked"}: dies there, back next round


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What is measured; the first utility is the paid one."""

    utilities: Sequence[str] = ("expected-accuracy", "accuracy", "brier")
    game: Literal["additive", "renormalised"] = "additive"
    missing: Literal["zero", "own-mean"] = "zero"  # what a missed round counts in the sum
    disclose_samples: bool = False  # members also report how many training samples they hold
    solo: bool = False  # members also train alone and report that model's utility
    truth: Sequence[str] = ()  # "mr-shapley", "shapley": looks at plain updates; the run is marked analysis


@dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """The masked sum."""

    enabled: bool = True
    bound: float = 4.0  # largest |M_i - M0| per coordinate
    threshold: int = 0  # members needed to finish; 0: floor(2N/3) + 1
    clip: bool = False  # cut (and count) what lies beyond the bound, where the default is to refuse it


@dataclass(frozen=True, kw_only=True)
class Run:
    """Seed and device."""

    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    data: Data = Data()
    partition: Partition = Partition()
    corruption: Corruption = Corruption()
    model: Model = Model()
    training: Training = Training()
    participation: Participation = Participation()
    scoring: Scoring = Scoring()
    secure_aggregation: SecureAggregation = SecureAggregation()
    run: Run = Run()

    def __post_init__(self) -> None:
        _check_ranges(self)

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the members."""
        if self.partition.names:
            return tuple(self.partition.names)
        return tuple(f"client-{i}" for i in range(self.partition.clients))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, section by section."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    def hash(self) -> str:
        """SHA-256 of all settings, as hex: what binds masks and records to this configuration."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        """All settings as TOML, defaults included."""
        sections = []
        for section, values in self.as_dict().items():
            lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
            sections.append("\n".join([f"[{section}]", *lines]) + "\n")
        return "\n".join(sections)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Settings from a TOML file, with ``section.key=value`` overrides (values as in TOML, or bare words)."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    return from_dict(raw, overrides)


def from_dict(raw: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Settings from nested mappings."""
    tree: dict[str, Any] = {
        name: dict(part) if isinstance(part, Mapping) else part for name, part in raw.items()
    }
    for override in overrides:
        _override(tree, override)
    sections = {item.name: item.type for item in dataclasses.fields(Config)}
    kinds = typing.get_type_hints(Config)
    built = {}
    for name, given in tree.items():
        if name not in sections:
            raise ConfigError(f"{name}: unknown section; expected one of {', '.join(sections)}")
        if not isinstance(given, dict):
            raise ConfigError(f"{name}: expected a section [{name}], got {given!r}")
        if name == "partition" and "clients" not in given and isinstance(given.get("names"), list):
            given["clients"] = len(given["names"])
        built[name] = _section(name, kinds[name], given)
    return Config(**built)


def _section(name: str, kind: type, given: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    for key, value in given.items():
        if key not in hints:
            raise ConfigError(f"{name}.{key}: unknown key; expected one of {', '.join(hints)}")
        if not _fits(value, hints[key]):
            raise ConfigError(f"{name}.{key}: expected {_words(hints[key])}, got {value!r}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def _fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value has the type of a field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in arguments and isinstance(value, str)
    if origin is types.UnionType:
        return any(_fits(value, option) for option in arguments)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_fits(item, arguments[1]) for item in value.values())
    if origin is not None and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(_fits(item, arguments[0]) for item in value)
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, hint) and isinstance(value, bool) == (hint is bool)


def _words(hint: Any) -> str:
    """A type as a person would say it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is types.UnionType:
        return " or ".join(_words(option) for option in arguments)
    if origin is not None and issubclass(origin, Mapping):
        return f"a table of {_words(arguments[1])} by name"
    if origin is not None:
        return f"a list of {_words(arguments[0])}"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, "a value")


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"expected section.key=value, such as training.rounds=3, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word: --set model.name=mlp
    part = tree.setdefault(section, {})
    if isinstance(part, dict):
        part[key] = value


_RANGES: dict[str, tuple[float, float, str]] = {
    "data.test_size": (0, math.inf, "0 or more samples"),
    "partition.clients": (3, 1024, "3 to 1024 members: with two, each learns the other's update"),
    "partition.mu": (1e-12, math.inf, "a number above 0"),
    "partition.minimum": (1, math.inf, "at least 1 sample"),
    "training.rounds": (1, math.inf, "at least 1 round"),
    "training.local_epochs": (1, math.inf, "at least 1 epoch"),
    "training.batch_size": (1, math.inf, "at least 1 sample"),
    "training.lr": (1e-300, math.inf, "a number above 0"),
    "training.weight_decay": (0, math.inf, "0 or more"),
    "training.weight_cap": (1, 2**32 - 1, "1 to 2^32 - 1"),
    "participation.fraction": (1e-12, 1, "a number above 0, at most 1"),
    "secure_aggregation.bound": (1e-300, math.inf, "a number above 0"),
    "secure_aggregation.threshold": (0, 1024, "0 (automatic) or a number of members"),
    "run.seed": (0, 2**63 - 1, "0 or more"),
}
STAGES = ("advertise", "share", "masked", "check", "unmask", "report")
TRUTHS = ("mr-shapley", "shapley")


def _check_ranges(config: Config) -> None:
    for path, (low, high, words) in _RANGES.items():
        section, key = path.split(".")
        value = getattr(getattr(config, section), key)
        if not low <= value <= high:
            raise ConfigError(f"{path}: expected {words}, got {value}")
    names = config.clients
    if len(set(names)) != len(names) or len(names) != config.partition.clients:
        raise ConfigError(
            f"partition.names: expected {config.partition.clients} different names, got {list(names)}"
        )
    for name in names:
        if not name or any(character in name for character in "/\\\0\n") or name in (".", "..", "server"):
            raise ConfigError(f"partition.names: {name!r} cannot be a member's name")
    for section, key in (
        ("corruption", "label_noise"), ("corruption", "label_flip"), ("corruption", "free_rider"),
        ("corruption", "duplicate"), ("corruption", "test_set"), ("participation", "away"),
        ("participation", "lost"), ("training", "roster_weights"),
    ):  # fmt: skip
        given = getattr(getattr(config, section), key)
        for name in () if isinstance(given, str) else given:
            if name not in names:
                raise ConfigError(f"{section}.{key}: unknown member {name!r}; members are {', '.join(names)}")
    if isinstance(config.corruption.label_noise, str) and config.corruption.label_noise != "ramp":
        got = config.corruption.label_noise
        raise ConfigError(f'corruption.label_noise: expected a table of rates or "ramp", got {got!r}')
    for name, when in config.participation.lost.items():
        number, _, stage = when.partition(":")
        if not number.isdigit() or stage not in STAGES:
            allowed = f'"ROUND:STAGE" with a stage of {", ".join(STAGES)}'
            raise ConfigError(f"participation.lost.{name}: expected {allowed}, got {when!r}")
    if not config.scoring.utilities or len(set(config.scoring.utilities)) != len(config.scoring.utilities):
        raise ConfigError("scoring.utilities: expected at least one utility, each once")
    for name in config.scoring.truth:
        if name not in TRUTHS:
            raise ConfigError(f"scoring.truth: expected {' or '.join(TRUTHS)}, got {name!r}")
    weights = config.training.roster_weights
    if config.training.weights == "roster":
        for name in names:
            if weights.get(name, 0) <= 0:
                raise ConfigError(
                    f"training.roster_weights.{name}: expected a weight above 0, got {weights.get(name)}"
                )
    elif weights:
        raise ConfigError('training.roster_weights: only with training.weights = "roster"')


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(k, ensure_ascii=False)} = {_toml(v)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
