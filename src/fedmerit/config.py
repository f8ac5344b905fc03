"""TOML -> validated settings. Every key has a default, unknown keys are errors, messages name the path.

Settings are plain frozen dataclasses, so that they work where only numpy and torch are installed. What a
value means is checked where it is used; here it is checked that it can mean something.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedmerit.errors import ConfigError
from fedmerit.limits import check
from fedmerit.secagg.setting import default_threshold
from fedmerit.toml import as_kind, fits, words, written


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
    sizes: Sequence[int] | Sequence[float] = ()  # for "sizes": counts, or fractions
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

    # or a model of your own: "module:factory", called as factory(input_shape, classes)
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
    tf32: bool = False  # let a GPU multiply in TF32: faster, no longer a CPU's numbers up to rounding
    weights: Literal["uniform", "roster", "secret", "scores", "current-scores"] = "uniform"
    weight_score: Literal["ALPHA", "LOO", "IOI", "COS"] = "ALPHA"  # for "scores"; "current-scores": analysis
    roster_weights: Mapping[str, float] = field(default_factory=dict)  # for "roster": {client-0 = 2.0}
    weight_cap: int = 100000  # for "secret": the largest sample count anyone may claim


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Who takes part when."""

    fraction: float = 1.0  # of the members, drawn anew each round
    away: Mapping[str, Sequence[int]] = field(default_factory=dict)  # {client-2 = [3]}: misses round 3
    lost: Mapping[str, str] = field(default_factory=dict)  # {client-2 = "3:masked"}: dies there for a round


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What is measured; the first utility is the paid one."""

    # or one of your own: "module:function", called as function(model, images, labels), a number per sample
    utilities: Sequence[str] = ("expected-accuracy", "accuracy", "brier")  # also: balanced-accuracy, neg-loss
    game: Literal["additive", "renormalised"] = "additive"
    missing: Literal["zero", "own-mean"] = "zero"  # what a missed round counts in the sum
    visibility: Literal["all", "coordinator"] = "all"  # coordinator: members see own numbers and totals only
    disclose_samples: bool = False  # members also report how many training samples they hold
    solo: bool = False  # members also train alone and report that model's utility
    truth: Sequence[str] = ()  # "mr-shapley", "shapley": looks at plain updates; the run is marked analysis


@dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """The masked sum."""

    enabled: bool = True
    bound: float = 4.0  # largest |M_i - M0| per coordinate
    threshold: int = 0  # members needed to finish; 0: floor(2/3 of all members) + 1
    least: int = 0  # between machines: fewest members a schedule may name; 0: the threshold
    check: bool = True  # false saves an exchange; updates are then hidden from an honest server only
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
        for section, key, value, hint in self._settings():
            if not fits(value, hint):
                raise ConfigError(f"{section}.{key}: expected {words(hint)}, got {value!r:.100}")
        check(self)

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the members."""
        if self.partition.names:
            return tuple(self.partition.names)
        return tuple(f"client-{i}" for i in range(self.partition.clients))

    @property
    def threshold(self) -> int:
        """t: how many of all members must stay to the end of a round, whoever is scheduled."""
        return self.secure_aggregation.threshold or default_threshold(len(self.clients))

    @property
    def analysis(self) -> bool:
        """Whether plain updates are looked at, which only an engine in one process can do."""
        return bool(self.scoring.truth) or self.training.weights == "current-scores"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, section by section."""
        plain: dict[str, dict[str, Any]] = {}
        for section, key, value, hint in self._settings():
            plain.setdefault(section, {})[key] = as_kind(value, hint)
        again: dict[str, Any] = json.loads(json.dumps(plain))
        return again

    def hash(self) -> str:
        """SHA-256 of all settings, as hex: what binds masks and records to this configuration."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        """All settings as TOML, defaults included."""
        sections = []
        for section, values in self.as_dict().items():
            lines = [f"{key} = {written(value)}" for key, value in values.items()]
            sections.append("\n".join([f"[{section}]", *lines]) + "\n")
        return "\n".join(sections)

    def _settings(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Section, key, value and type of every setting."""
        for section, part in vars(self).items():
            for key, hint in typing.get_type_hints(type(part)).items():
                yield section, key, getattr(part, key), hint


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Settings from a TOML file, with ``section.key=value`` overrides (values as in TOML, or bare words)."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    try:
        return from_dict(raw, overrides)
    except ConfigError as error:
        asked = [override.partition("=")[0].strip() for override in overrides]
        if any(_is_about(str(error), setting) for setting in asked):
            raise  # --set is at fault, not the file
        raise ConfigError(f"{path}: {error}") from error


def _is_about(message: str, setting: str) -> bool:
    """Whether a message of ours is about that setting, an entry of it, or the override itself."""
    return message.startswith((f"{setting}:", f"{setting}.", "expected section.key=value"))


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
        if not fits(value, hints[key]):
            raise ConfigError(f"{name}.{key}: expected {words(hints[key])}, got {value!r:.100}")
    return kind(**{key: as_kind(value, hints[key]) for key, value in given.items()})


def difference(there: Config, here: Config) -> str:
    """The first setting in which two configs differ, in words."""
    mine = here.as_dict()
    for section, values in there.as_dict().items():
        for key, value in values.items():
            if written(mine[section][key]) != written(value):
                return f"{section}.{key} is {value!r:.100} there and {mine[section][key]!r:.100} here"
    return "they are the same"


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    section, dot, key = (part.strip() for part in path.partition("."))
    text = text.strip()
    if not (equals and dot and section and key):
        raise ConfigError(f"expected section.key=value, such as training.rounds=3, got {override!r}")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if text.startswith(('"', "'", "[", "{")):
            raise ConfigError(f"{section}.{key}: not a TOML value: {text!r:.100}") from error
        parsed = {"value": text}  # a bare word: --set model.name=mlp
    if set(parsed) != {"value"}:
        raise ConfigError(f"{section}.{key}: expected one value, got {text!r:.100}")
    part = tree.setdefault(section, {})
    if isinstance(part, dict):
        part[key] = parsed["value"]
