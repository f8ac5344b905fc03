"""Settings from TOML, validated. Every key has a default, unknown keys are errors, messages name the key.

Settings are plain frozen dataclasses, so that they work where only numpy and torch are installed. This module
checks that a value can mean something; the code that uses a value checks what it means.

Recorded settings (in a ledger, in terms, in a run folder) are text that begins with its ``schema``. They are
read as the version that wrote them meant them: ``schemas/N.toml`` holds all keys of schema N with their
defaults at that time. If you add a key, change a default or forbid what was allowed, take a new number
(`SCHEMA`) and add its file. What an earlier version wrote then keeps its meaning and its hash.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import json
import math
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedmerit.errors import ConfigError, KeyFileError
from fedmerit.heading import Heading, wrong
from fedmerit.identity import check_names
from fedmerit.secagg.setting import LEAST_IN_SUM, default_threshold
from fedmerit.secagg.setting import STAGES as SUM_STAGES

VERSION = "0.1.0"
"""The version of this package, in `fedmerit --version`, on every page and in every ledger's first record."""

# ------------------------------------------------------------------------------------------------ settings

SCHEMA = 3
"""The schema of the settings in this file. Texts of schema 1 do not name theirs."""
_BEFORE: dict[int, dict[str, dict[str, Any]]] = {3: {"scoring": {"method": "reports", "errors": "plain"}}}
"""By schema: values that keys new in it have in settings of earlier schemas, if not their defaults."""
DEEPEST = 16
"""The most parts of a key, and the deepest nesting of tables and lists."""
MOST_BITS = 128
_STRINGS = re.compile(  # of TOML, and comments; an unclosed one goes on to its end, where a parser stops
    r""""{3}(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5}|\\?\Z)|'{3}(?:[^']|'(?!''))*+(?:'{3,5}|\Z)"""
    r"""|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?|#[^\n]*+""",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?:\.[^.\n=,\[\]{{}}]*+){{{DEEPEST}}}")


def setting(default: Any, beside: str = "", *, above: str = "") -> Any:
    """Return a field with its default, and the words that `fedmerit init` writes beside and above it."""
    words = {"beside": beside, "above": above}
    return (
        field(default_factory=dict, metadata=words)
        if default == {}
        else field(default=default, metadata=words)
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """The samples, and the test samples on which everybody is measured."""

    name: str = setting(
        "fashion-mini",
        'table | npz | folder | fashion-mini | cifar10 | brain-mri | isic2019 | pcam | "module:function"',
        above="your own data, model and metric: docs/bring-your-own.md",
    )
    path: str = setting("", "where the files are, relative to the current folder (not for fashion-mini)")
    test_size: int = setting(
        500,
        "test samples in the pool, balanced over classes if there are any; 0: the whole test set as it is",
    )
    test_reveal: Literal["fixed", "per-round", "end"] = setting(
        "fixed",
        "per-round: a fresh slice of the pool each round, in a committed order",
        above='end: shown after the last round, for scoring.method = "settled" and only there; if you leave '
        "the key out, it is end there and fixed elsewhere",
    )
    options: Mapping[str, Any] = setting(
        {}, 'options of the reader: {size = 64} for images, {target = "outcome"} for a table'
    )


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Who holds which training samples."""

    scheme: Literal["iid", "dirichlet", "group", "sizes", "file"] = setting("dirichlet")
    clients: int = setting(
        6, 'for "group" and "file", leave it out or write 0: as many as in the data or the file'
    )
    mu: float = setting(0.5, 'for "dirichlet": the smaller, the fewer classes per client')
    minimum: int = setting(10, "smallest number of samples per client")
    sizes: Sequence[int] | Sequence[float] = setting(
        (), 'for "sizes": counts, or fractions, in the order of names'
    )
    file: str = setting("", 'for "file": a saved partition')
    names: Sequence[str] = setting(
        (),
        'for "group" and "file": their order; for "group" also which groups take part',
        above='by default client-0, client-1, ...; with "group" and "file", the names in the data or the '
        "file",
    )
    merge: Mapping[str, Sequence[str]] = setting(
        {},
        '{North = ["Site 1", "Site 2"]}',
        above='for "group": several groups that form one member; a group that is not listed is a '
        "member of its own",
    )


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """Faults planted in members on purpose; for rehearsals and experiments."""

    label_noise: Mapping[str, float] | str = setting({}, '{client-5 = 0.8}, or "ramp"')
    label_flip: Sequence[str] = setting((), "members whose labels y become C-1-y")
    free_rider: Mapping[str, str] = setting({}, '{client-1 = "zero" | "noise" | "stale"}')
    duplicate: Mapping[str, str] = setting(
        {}, '{client-2 = "client-0"}: client-2 trains on the data of client-0'
    )
    test_set: Sequence[str] = setting((), "these members also train on the test pool")
    misstate: Mapping[str, float] = setting(
        {}, "{client-2 = 1.01}: client-2 states 1.01 times its score at the settlement"
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    name: str = setting(
        "cnn",
        'mlp | cnn | cnn-pool | resnet18 | resnet50 | "module:factory"',
        above='or a model of your own: "module:factory", called as factory(input_shape, outputs); outputs is '
        "the number of classes, or 1 for real numbers and for the loss binary",
    )
    norm: Literal["group", "batch"] = setting("group")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Rounds, local training (the optimiser is reset each round), and the weights of the sum."""

    rounds: int = setting(10)
    local_epochs: int = setting(5)
    batch_size: int = setting(64)
    loss: str = setting(
        "cross-entropy",
        'cross-entropy | binary | mse | "module:function"',
        above='or a loss of your own: "module:function", called as function(outputs, y) for a number',
    )
    optimiser: Literal["adam", "adamw", "sgd"] = setting("adam")
    lr: float = setting(0.001)
    momentum: float = setting(0.0, 'for "sgd"')
    weight_decay: float = setting(0.001)
    tf32: bool = setting(
        False, "let a GPU multiply in TF32: faster, but results differ from a CPU's by more than rounding"
    )
    weights: Literal["uniform", "roster", "secret", "scores", "current-scores"] = setting("uniform")
    weight_score: Literal["ALPHA", "LOO", "IOI", "COS"] = setting(
        "ALPHA", 'for "scores" and "current-scores" (which makes the run an analysis)'
    )
    roster_weights: Mapping[str, float] = setting({}, 'for "roster": {client-0 = 2.0}')
    weight_cap: int = setting(100000, 'for "secret": the largest sample count anyone may claim')


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Who takes part when."""

    fraction: float = setting(1.0, "fraction of the members who take part, drawn anew each round")
    away: Mapping[str, Sequence[int]] = setting({}, "{client-2 = [3]}: client-2 misses round 3")
    lost: Mapping[str, str] = setting(
        {}, '{client-2 = "3:masked"}: client-2 is lost in round 3, from stage masked on'
    )


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What is measured. Members are paid by the first utility."""

    method: Literal["settled", "both", "reports"] = setting(
        "both",
        "both: reports and, on another part of the pool, a settlement",
        above="settled: after the last round members state their part in the gain, and the statements must "
        "add up exactly; reports: members report in each round what they measured; if you leave the key out, "
        "it is reports where nothing can be settled",
    )
    utilities: Sequence[str] = setting(
        ("expected-accuracy", "accuracy", "brier"),
        "also: sharpened-accuracy, balanced-accuracy, neg-loss; rmse-skill, mae-skill; auc, f1, c-index",
        above='or one of your own: "module:function", called as function(model, x, '
        "y); it returns a number per sample, or one number if it is listed in whole",
    )
    whole: Sequence[str] = setting(
        (),
        "auc, f1 and c-index always are",
        above="which of your own utilities are metrics of the whole test set, not means over samples",
    )
    scale: float = setting(
        0.0,
        "for rmse-skill and mae-skill: the error, in the unit of y, from which on an answer counts as 0",
    )
    game: Literal["additive", "renormalised"] = setting("additive")
    missing: Literal["zero", "own-mean"] = setting("zero", "what a missed round counts in the sum")
    visibility: Literal["all", "coordinator"] = setting(
        "all", "coordinator: each member sees only its own numbers and the totals"
    )
    disclose_samples: bool = setting(False, "members also report how many training samples they hold")
    solo: bool = setting(False, "members also train alone and report that model's utility")
    errors: Literal["joint", "plain"] = setting(
        "joint",
        "plain: as if the pool were drawn at random, and no such numbers",
        above="joint: standard errors by class if the pool is drawn by class, and 32 numbers with each "
        "report, from which anybody can compute how sure a difference between two members is",
    )
    truth: Sequence[str] = setting(
        (), '"mr-shapley", "shapley": need plain updates, so the run is marked as an analysis'
    )


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """The settlement after the last round; for the methods "settled" and "both"."""

    blocks: int = setting(8, "blocks of the settled part of the pool, for standard errors")
    detail: Literal["rounds", "run"] = setting("rounds", "what a member states: a number per round, or one")
    naming: bool = setting(
        True, "a false statement can be traced to its author, for 6 bytes per parameter; false: 4 bytes"
    )
    window_days: float = setting(14.0, "how long a missing statement may still be handed in")


@dataclass(frozen=True, kw_only=True)
class SecureAggregation:
    """The masked sum."""

    enabled: bool = setting(True)
    bound: float = setting(4.0, "largest |M_i - M0| per coordinate")
    threshold: int = setting(0, "members needed to finish a round; 0: floor(2/3 of all members) + 1")
    least: int = setting(0, "between machines: fewest members that a round may schedule; 0: the threshold")
    check: bool = setting(True, "false saves an exchange; updates are then hidden from an honest server only")
    clip: bool = setting(
        False, "cut (and count) what lies beyond the bound; by default such an update is refused"
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Seed, repeat and device."""

    seed: int = setting(0)
    repeat: int = setting(1, "from 2 on: another first model and batch order; data and test pool stay")
    device: str = setting("auto", "auto | cpu | cuda")


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What decisions, statements and the page are about, and their language."""

    title: str = setting("", "such as Lung nodules 2026")
    consortium: str = setting("", "who trains together")
    date: str = setting("", "a day such as 2026-11-30; a decision without one is of the day it is made")
    currency: str = setting("", "of the budget: a code such as EUR, or a sign such as $")
    language: Literal["en", "de"] = setting("en", "of page and statements")

    @property
    def heading(self) -> Heading:
        """Title, consortium, date and currency."""
        return Heading(self.title, self.consortium, self.date, self.currency)


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
    settlement: Settlement = Settlement()
    secure_aggregation: SecureAggregation = SecureAggregation()
    run: RunSettings = RunSettings()
    report: ReportSettings = ReportSettings()
    method_open: bool = field(default=False, compare=False, repr=False)
    """Whether scoring.method was left out, so that a rehearsal takes "reports" where nothing can be settled.
    This is no setting: it is not recorded."""

    def __post_init__(self) -> None:
        for section, key, value, hint in self._settings():
            if not fits(value, hint):
                raise ConfigError.at(f"{section}.{key}", f"expected {words(hint)}, got {value!r:.100}")
        check(self)

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of the members; final if the config is ``resolved``."""
        if self.partition.names:
            return tuple(self.partition.names)
        return tuple(f"client-{i}" for i in range(self.partition.clients))

    @property
    def resolved(self) -> bool:
        """Whether the settings say who the members are; otherwise the data or a saved partition names them.

        `fedmerit.simulation.setup.resolve` fills in ``partition.names`` and ``partition.clients``, and a run
        records the resolved config.
        """
        return bool(self.partition.names) or self.partition.scheme not in ("group", "file")

    @property
    def threshold(self) -> int:
        """t, the number of members who must stay to the end of a round, whoever is scheduled."""
        return self.secure_aggregation.threshold or default_threshold(len(self.clients))

    @property
    def analysis(self) -> bool:
        """Whether the run looks at plain updates, which only an engine in one process can do."""
        return bool(self.scoring.truth) or self.training.weights == "current-scores"

    @property
    def reports(self) -> bool:
        """Whether members measure and report in each round."""
        return self.scoring.method != "settled"

    @property
    def whole(self) -> tuple[str, ...]:
        """The utilities that are metrics of the whole test set, not means over its samples."""
        return tuple(name for name in self.scoring.utilities if name in (*WHOLE, *self.scoring.whole))

    @property
    def settles(self) -> bool:
        """Whether members settle after the last round."""
        return self.scoring.method != "reports"

    @property
    def word_bytes(self) -> Literal[4, 6]:
        """Bytes per number of a masked update: 6 if a false statement must be traced to its author."""
        return 6 if self.settles and self.settlement.naming and self.secure_aggregation.enabled else 4

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, section by section."""
        plain: dict[str, dict[str, Any]] = {}
        for section, key, value, hint in self._settings():
            plain.setdefault(section, {})[key] = as_kind(value, hint)
        again: dict[str, Any] = json.loads(json.dumps(plain))
        return again

    def to_toml(self) -> str:
        """Return all settings as TOML, defaults included."""
        return as_toml(self.as_dict())

    def _settings(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield section, key, value and type of every setting."""
        for section in SECTIONS:
            part = getattr(self, section)
            for key, hint in _hints(part.__class__).items():
                yield section, key, getattr(part, key), hint


SECTIONS = tuple(item.name for item in dataclasses.fields(Config) if item.name != "method_open")
"""The sections of the settings."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read settings from a TOML file, with ``section.key=value`` overrides (TOML values, or bare words)."""
    text = _text_in(path)
    try:
        return from_dict(_parsed(text), overrides)
    except ConfigError as error:
        if error.setting in asked_for(overrides):
            raise  # --set is at fault, not the file
        raise ConfigError(f"{path}: {error}", setting=error.setting) from error


def asked_for(overrides: Sequence[str]) -> list[str]:
    """Return the setting that each ``section.key=value`` names, or the text itself if it names none."""
    return [override.partition("=")[0].strip() or override for override in overrides]


def of_folder(path: str | Path) -> Config:
    """Return the settings that the run folder ``path`` records in its ``config.toml``."""
    file = Path(path) / "config.toml"
    text = _text_in(file)
    try:
        return recorded(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", setting=error.setting) from error


def recorded(text: str) -> Config:
    """Return settings that were recorded as TOML, as the version that wrote them meant them."""
    return from_dict({"schema": 1, **_parsed(text)})


def resumed(config: Config, path: Path) -> Config:
    """Return the config with which the run in a folder goes on: with its standard errors, if it is older."""
    try:
        if schema_of(_text_in(path / "config.toml")) >= 3:
            return config
    except ConfigError:  # opening the folder says what is wrong with it
        return config
    return dataclasses.replace(config, scoring=dataclasses.replace(config.scoring, errors="plain"))


def schema_of(text: str) -> int:
    """Return the schema of settings that `recorded` reads from this text."""
    schema: int = _parsed(text).get("schema", 1)
    return schema


def recorded_hash(text: str) -> str:
    """Return the SHA-256, as hex, that binds masks and records to settings that are recorded as this text.

    It is the hash of the text itself. For schema 1 it is the hash of the values of all its keys, including
    those that are not in the text.
    """
    raw = _parsed(text)
    if raw.get("schema", 1) != 1:
        return hashlib.sha256(text.encode()).hexdigest()
    now = recorded(text).as_dict()
    values = {section: {key: now[section][key] for key in part} for section, part in _defaults(1).items()}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def load_object(name: str, setting: str) -> Callable[..., Any]:
    """Return the callable ``module:attribute``, from the current folder or ``sys.path``."""
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.at(setting, f"cannot load {name!r}: {error}") from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise ConfigError.at(setting, f"{name!r} is not callable")
    return found  # type: ignore[no-any-return]


def as_toml(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return settings, section by section, as the text that is recorded."""
    sections = [
        "\n".join([f"[{section}]", *(f"{key} = {written(value)}" for key, value in values.items())]) + "\n"
        for section, values in settings.items()
    ]
    return "\n".join([f"schema = {SCHEMA}\n", *sections])


def _text_in(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _parsed(text: str) -> dict[str, Any]:
    """Parse TOML from anybody; first refuse what would cost a parser hours or all memory."""
    if _LONG_KEY.search(_STRINGS.sub("s", text)):
        raise ConfigError(f"not settings: expected keys of at most {DEEPEST} parts, got a longer one")
    try:
        parsed = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not TOML: {error!s:.200}") from error
    _check_plain(parsed)
    return parsed


def _check_plain(parsed: dict[str, Any]) -> None:
    """Refuse values so deep or so large that later code could not handle or print them."""
    level: list[Any] = [parsed]
    for _ in range(DEEPEST):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        values = [value for one in inner for value in one]
        if any(isinstance(value, int) and value.bit_length() > MOST_BITS for value in values):
            raise ConfigError(f"not settings: expected whole numbers of at most {MOST_BITS} bits")
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ConfigError(f"not settings: expected tables and lists at most {DEEPEST} deep")


@cache
def _defaults(schema: int) -> Mapping[str, Mapping[str, Any]]:
    """Return every key of an earlier schema with its default at that time."""
    found = tomllib.loads(Path(__file__).with_name("schemas").joinpath(f"{schema}.toml").read_text("utf-8"))
    return {section: part for section, part in found.items() if section != "schema"}


def from_dict(raw: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return settings from nested mappings; an entry ``schema`` names their schema, by default this one."""
    tree: dict[str, Any] = {
        name: dict(part) if isinstance(part, Mapping) else part for name, part in raw.items()
    }
    schema = tree.pop("schema", SCHEMA)
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ConfigError(
            f"schema: expected a whole number from 1 to {SCHEMA}, got {schema!r:.40}; settings of a later "
            "version of fedmerit need that version"
        )
    for override in overrides:
        _override(tree, override)
    kinds = _hints(Config)
    for name, given in tree.items():
        if name not in SECTIONS:
            raise ConfigError(
                f"{name}: unknown section{_near(name, SECTIONS)}; expected one of {', '.join(SECTIONS)}"
            )
        if not isinstance(given, dict):
            raise ConfigError(f"{name}: expected a section [{name}], got {given!r}")
        if name == "partition" and "clients" not in given:
            if isinstance(given.get("names"), list) and given["names"]:
                given["clients"] = len(given["names"])
            elif schema > 1 and given.get("scheme") in ("group", "file"):
                given["clients"] = 0
    if schema >= 3 and tree.get("scoring", {}).get("method", Scoring.method) == "settled":
        tree["data"] = {"test_reveal": "end", **tree.get("data", {})}
    if schema < SCHEMA:
        if unknown := [name for name in tree if name not in _defaults(schema)]:
            raise ConfigError(f"{unknown[0]}: unknown section in settings of schema {schema}")
        for name, part in _defaults(schema).items():
            given = tree.get(name, {})
            if later := [key for key in given if key not in part]:
                raise ConfigError.at(f"{name}.{later[0]}", f"unknown key in settings of schema {schema}")
            tree[name] = {**part, **given}
    for number, meant in _BEFORE.items():
        for name, part in meant.items() if schema < number else ():
            tree[name] = {**tree[name], **part}
    parts = {name: _section(name, kinds[name], given) for name, given in tree.items()}
    if is_open := "method" not in tree.get("scoring", {}):
        scoring = parts.get("scoring", Scoring())
        method = "reports" if unsettled_for(scoring) else scoring.method
        parts["scoring"] = dataclasses.replace(scoring, method=method)
    return Config(**parts, method_open=is_open)


def unsettled_for(scoring: Scoring) -> Literal["", "utilities", "game"]:
    """Return the key for which a run is not settled unless its settings ask for it; empty if there is none.

    A utility without a gradient cannot be settled. A settlement scores the additive game, so whoever chooses
    the other one means reports.
    """
    if scoring.utilities and scoring.utilities[0] in (*WITHOUT_GRADIENT, *WHOLE, *scoring.whole):
        return "utilities"
    return "game" if scoring.game == "renormalised" else ""


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Return the type of every field of a section."""
    return types.MappingProxyType(typing.get_type_hints(kind))


def _section(name: str, kind: type, given: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    for key, value in given.items():
        if key not in hints:
            asked = _near(key, hints)
            raise ConfigError.at(f"{name}.{key}", f"unknown key{asked}; expected one of {', '.join(hints)}")
        if not fits(value, hints[key]):
            raise ConfigError.at(f"{name}.{key}", f"expected {words(hints[key])}, got {value!r:.100}")
    return kind(**{key: as_kind(value, hints[key]) for key, value in given.items()})


def _near(name: str, known: Iterable[str]) -> str:
    """Return a question that names the known word closest to this one; an empty text if none is close.

    >>> _near("round", ["rounds", "lr"])
    ' (did you mean rounds?)'
    """
    close = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def difference(there: Config, here: Config) -> str:
    """Return the first setting in which two configs differ, in words; an empty text if they are the same."""
    for path, value, mine in differences(there, here):
        return f"{path} is {value!r:.100} there and {mine!r:.100} here"
    return ""


def differences(there: Config, here: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield every setting in which two configs differ: its path, its value there and its value here."""
    mine = here.as_dict()
    for section, values in there.as_dict().items():
        for key, value in values.items():
            if mine[section][key] != value:
                yield f"{section}.{key}", value, mine[section][key]


def _override(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    section, dot, key = (part.strip() for part in path.partition("."))
    text = text.strip()
    if not (equals and dot and section and key):
        expected = "expected section.key=value, such as training.rounds=3"
        raise ConfigError(f"{expected}, got {override!r}", setting=asked_for([override])[0])
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if text.startswith(('"', "'", "[", "{")):
            raise ConfigError.at(f"{section}.{key}", f"not a TOML value: {text!r:.100}") from error
        parsed = {"value": text}  # a bare word: --set model.name=mlp
    if set(parsed) != {"value"}:
        raise ConfigError.at(f"{section}.{key}", f"expected one value, got {text!r:.100}")
    part = tree.setdefault(section, {})
    if isinstance(part, dict):
        part[key] = parsed["value"]


# -------------------------------------------------------------------------------------------------- limits

MOST = 2**31
"""The largest value of settings that count something."""
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
    "settlement.blocks": (2, 64, "2 to 64 blocks"),
    "settlement.window_days": (0, 36_500, "0 to 36500 days"),
    "secure_aggregation.bound": (1e-300, math.inf, "a number above 0"),
    "secure_aggregation.threshold": (0, 1024, "0 (automatic) or a number of members"),
    "secure_aggregation.least": (0, 1024, "0 (automatic) or a number of members"),
    "run.seed": (0, 2**63 - 1, "0 or more"),
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
TRUTHS = ("mr-shapley", "shapley")


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
            most = ", at most 2^31" if high == MOST < value else ""
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
    for key in ("title", "consortium", "date", "currency"):
        if expected := wrong(key, given := getattr(config.report, key)):
            raise ConfigError.at(f"report.{key}", f"expected {expected}, got {given!r:.100}")
    if config.training.roster_weights and config.training.weights != "roster":
        raise ConfigError.at("training.roster_weights", 'only with training.weights = "roster"')
    _check_method(config)


def _check_own(config: Config) -> None:
    """Refuse names of data, losses and metrics that mean nothing, and errors without a scale."""
    for path, known, other in (("data.name", READERS, "function"), ("training.loss", LOSSES, "function")):
        section, key = path.split(".")
        given = getattr(getattr(config, section), key)
        if given not in known and ":" not in given:
            raise ConfigError.at(
                path, f'expected one of {", ".join(known)}, or "module:{other}", got {given!r}'
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


# -------------------------------------------------------------------------------------------------- values

_PLURAL = {int: "whole numbers", float: "numbers", str: "texts"}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of a setting; a whole number is a number, true is not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is types.UnionType:
        return any(fits(value, option) for option in arguments)
    if _is(origin, Mapping):
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and fits(item, arguments[1]) for key, item in value.items()
        )
    if _is(origin, Sequence):
        return isinstance(value, list | tuple) and all(fits(item, arguments[0]) for item in value)
    if hint is Any:
        return _is_plain(value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    return isinstance(value, hint) and isinstance(value, bool) == (hint is bool)


def as_kind(value: Any, hint: Any) -> Any:
    """Return a fitting value in the one form of its type: 1 becomes 1.0 if a float is expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return as_kind(value, next(option for option in arguments if fits(value, option)))
    if _is(origin, Mapping):
        return {key: as_kind(item, arguments[1]) for key, item in value.items()}
    if _is(origin, Sequence):
        return tuple(as_kind(item, arguments[0]) for item in value)
    return float(value) if hint is float else value


def words(hint: Any) -> str:
    """Return a type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(arguments)
    if origin is types.UnionType:
        return " or ".join(words(option) for option in arguments)
    if _is(origin, Mapping):
        return f"a table of {_PLURAL.get(arguments[1]) or words(arguments[1])} by name"
    if origin is not None:
        return f"a list of {_PLURAL.get(arguments[0]) or words(arguments[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(hint, "text, numbers, true or false, or lists and tables of them")


def written(value: Any) -> str:
    """Return a plain value as TOML.

    >>> print(written({"a b": [1, 2.0, True, "ü\\n"]}))
    {"a b" = [1, 2.0, true, "ü\\n"]}
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{written(str(key))} = {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(item) for item in value) + "]"
    if isinstance(value, str):  # as in JSON, but TOML also wants this one character escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _is(origin: Any, kind: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, kind)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, str | bool) or (isinstance(value, int | float) and _is_finite(value))
