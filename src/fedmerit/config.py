"""Settings from TOML, validated. Every key has a default, unknown keys are errors, messages name the key.

Recorded settings (in a ledger, in terms, in a run folder) are text that begins with the number of its
``schema``; a text of another schema is refused.
"""

from __future__ import annotations

import dataclasses
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedmerit.errors import ConfigError, KeyFileError
from fedmerit.identity import check_names
from fedmerit.notes import meant
from fedmerit.scoring.rewards import SELF_REPORTED
from fedmerit.scoring.sampling import is_whole, scale_of
from fedmerit.secagg.quantise import is_number
from fedmerit.secagg.setting import LEAST_IN_SUM
from fedmerit.settings import WITHOUT_GRADIENT, Scoring, Sections, wrong

VERSION = "0.1.0"
"""The version of this package, in `fedmerit --version`, on every page and in every ledger's first record."""

# ------------------------------------------------------------------------------------------------ settings

SCHEMA = 1
"""The schema of the settings in this file."""


@dataclass(frozen=True, kw_only=True)
class Config(Sections):
    """All settings of a run; it can only be made of settings that mean something."""

    def __post_init__(self) -> None:
        for section in SECTIONS:
            part = getattr(self, section)
            object.__setattr__(self, section, _section(section, type(part), vars(part)))
        check(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, section by section."""
        plain = {section: vars(getattr(self, section)) for section in SECTIONS}
        return json.loads(json.dumps(plain))  # type: ignore[no-any-return]

    def to_toml(self) -> str:
        """Return all settings as TOML, defaults included."""
        return as_toml(self.as_dict())


SECTIONS = tuple(item.name for item in dataclasses.fields(Config) if item.name != "method_open")
"""The sections of the settings."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read settings from a TOML file, with ``section.key=value`` overrides (TOML values, or bare words)."""
    text = text_in(path)
    try:
        return from_dict(parse(text), overrides)
    except ConfigError as error:
        if error.setting in asked_for(overrides):
            raise  # --set is at fault, not the file
        raise ConfigError(f"{path}: {error}", setting=error.setting) from error


def asked_for(overrides: Sequence[str]) -> list[str]:
    """Return the setting that each ``section.key=value`` names, or the text itself if it names none."""
    return [override.partition("=")[0].strip() or override for override in overrides]


def of_folder(path: str | Path) -> Config:
    """Return the settings that the run folder ``path`` records in its ``config.toml``."""
    return load(Path(path) / "config.toml")


def recorded(text: str) -> Config:
    """Return settings that were recorded as TOML."""
    return from_dict(parse(text))


def recorded_hash(text: str) -> str:
    """Return the SHA-256, as hex, that binds masks and records to settings that are recorded as this text."""
    return hashlib.sha256(text.encode()).hexdigest()


def load_object(name: str, setting: str) -> Callable[..., Any]:
    """Return the callable ``module:attribute``, from the current folder or ``sys.path``."""
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError.at(setting, f"cannot load {name!r}: {error}") from error
    finally:
        sys.path.remove(here)
    if not callable(function):
        raise ConfigError.at(setting, f"{name!r} is not callable")
    return function  # type: ignore[no-any-return]


def as_toml(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Return settings, section by section, as the text that is recorded."""
    sections = [
        "\n".join([f"[{section}]", *(f"{key} = {written(value)}" for key, value in values.items())]) + "\n"
        for section, values in settings.items()
    ]
    return "\n".join([f"schema = {SCHEMA}\n", *sections])


def from_dict(raw: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return settings from nested mappings; an entry ``schema`` may name their schema."""
    tree: dict[str, Any] = {
        name: dict(part) if isinstance(part, Mapping) else part for name, part in raw.items()
    }
    schema = tree.pop("schema", SCHEMA)
    if type(schema) is not int or schema != SCHEMA:
        why = "settings of another version of fedmerit need that version"
        raise ConfigError(f"schema: expected {SCHEMA}, got {schema!r:.40}; {why}")
    for override in overrides:
        _override(tree, override)
    kinds = _hints(Config)
    for name, part in tree.items():
        if name not in SECTIONS:
            keys = [f"{section}.{name}" for section in SECTIONS if name in _hints(kinds[section])]
            asked = f" (did you mean {keys[0]}?)" if keys else meant(name, SECTIONS)
            raise ConfigError(f"{name}: unknown section{asked}; expected one of {', '.join(SECTIONS)}")
        if not isinstance(part, dict):
            raise ConfigError(f"{name}: expected a section [{name}], got {part!r}")
    partition, scoring = tree.get("partition", {}), tree.get("scoring", {})
    if isinstance(names := partition.get("names"), list) and names:
        partition.setdefault("clients", len(names))
    elif str(partition.get("scheme")).partition(":")[0] in ("group", "file"):
        partition.setdefault("clients", 0)
    parts = {name: _section(name, kinds[name], part) for name, part in tree.items()}
    if is_open := "method" not in scoring:
        measured = parts.get("scoring", Scoring())
        if unsettled_for(measured):
            parts["scoring"] = dataclasses.replace(measured, method="reports")
    return Config(**parts, method_open=is_open)


def unsettled_for(scoring: Scoring) -> Literal["", "utilities", "game"]:
    """Return the key for which a run is not settled unless its settings ask for it; empty if there is none.

    A utility without a gradient cannot be settled, and a settlement scores the additive game.
    """
    paid = next(iter(scoring.utilities), "")
    if paid in WITHOUT_GRADIENT or is_whole(paid):
        return "utilities"
    return "game" if scoring.game == "renormalised" else ""


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(kind))


def _section(name: str, kind: type, part: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    for key, value in part.items():
        if key not in hints:
            asked = meant(key.split(".")[0], hints)
            raise ConfigError.at(f"{name}.{key}", f"unknown key{asked}; expected one of {', '.join(hints)}")
        if not fits(value, hints[key]):
            choices = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is Literal else ()
            asked = meant(value, map(str, choices)) if isinstance(value, str) else ""
            raise ConfigError.at(f"{name}.{key}", f"expected {words(hints[key])}, got {value!r:.100}{asked}")
    return kind(**{key: as_kind(value, hints[key]) for key, value in part.items()})


def difference(there: Config, here: Config) -> str:
    """Return the first setting in which two configs differ, in words; an empty text if they are the same."""
    for path, value, own in differences(there, here):
        return f"{path} is {value!r:.100} there and {own!r:.100} here"
    return ""


def differences(there: Config, here: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield every setting in which two configs differ: its path, its value there and its value here."""
    own = here.as_dict()
    for section, values in there.as_dict().items():
        for key, value in values.items():
            if own[section][key] != value:
                yield f"{section}.{key}", value, own[section][key]


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


# ----------------------------------------------------------------------------------------------------- ranges

MOST = 2**31  # of settings that count something
MOST_SEED = 2**63 - 1
_MOST: dict[float, str] = {MOST: ", at most 2^31", MOST_SEED: ", at most 2^63 - 1"}
_RANGES: dict[str, tuple[float, float, str]] = {
    "data.test_size": (0, MOST, "0 or more samples"),
    "partition.clients": (3, 1024, "3 to 1024 members: with two, each learns the other's update"),
    "partition.mu": (1e-12, math.inf, "a number above 0"),
    "training.rounds": (1, MOST, "at least 1 round"),
    "training.local_epochs": (1, MOST, "at least 1 epoch"),
    "training.batch_size": (1, MOST, "at least 1 sample"),
    "training.lr": (1e-300, math.inf, "a number above 0"),
    "training.weight_decay": (0, math.inf, "0 or more"),
    "training.weight_cap": (1, 2**32 - 1, "1 to 2^32 - 1"),
    "participation.fraction": (1e-12, 1, "a number above 0, at most 1"),
    "payment.equal": (0, 1, "a part from 0 to 1"),
    "payment.floor": (0, 1, "a share from 0 to 1"),
    "payment.cap": (0, 1, "a share from 0 to 1"),
    "payment.forfeit": (0, 1, "a part from 0 to 1"),
    "settlement.window_days": (0, 36_500, "0 to 36500 days"),
    "panel.held_out": (0.01, 0.9, "0.01 to 0.9"),
    "panel.least": (0, 10**9, "at least 0"),
    "panel.coordinates": (100, 10**9, "at least 100"),
    "panel.most": (1, 1000, "at least 1"),
    "panel.noise": (0, 1000, "0 to 1000"),
    "panel.blur": (0, 10, "0 to 10"),
    "panel.epsilon": (0, 1000, "0 to 1000"),
    "panel.delta": (1e-12, 0.1, "1e-12 to 0.1"),
    "secure_aggregation.bound": (1e-300, math.inf, "a number above 0"),
    "secure_aggregation.threshold": (0, 1024, "0 (automatic) or a number of members"),
    "run.seed": (0, MOST_SEED, "0 or more"),
    "run.repeat": (1, MOST, "1 or more"),
}
OF_MEMBERS = (
    "corruption.label_noise", "corruption.label_flip", "corruption.free_rider", "corruption.misstate",
    "corruption.judge", "participation.away", "training.weights",
)  # fmt: skip
"""Settings besides partition.names that name members: lists of members, or tables by member."""
SCHEMES = ("iid", "dirichlet", "group", "sizes", "file:PATH")
READERS = ("fashion-mini", "npz", "folder", "table")
LOSSES = ("cross-entropy", "binary", "mse")


def check(config: Sections) -> None:
    """Raise `ConfigError` for settings that cannot mean anything; the message names the setting's path.

    Settings that name members are checked only once the members are known (`Config.resolved`).
    """
    for path, (low, high, allowed) in _RANGES.items():
        value = _value(config, path)
        if path == "partition.clients" and value == 0 and not config.resolved:
            continue
        if not low <= value <= high:
            most = _MOST.get(high, "") if value > high else ""
            raise ConfigError.at(path, f"expected {allowed}{most}, got {value}")
    _check_partition(config)
    if config.resolved:
        _check_members(config)
    _check_rounds(config)
    utilities = list(config.scoring.utilities)
    if not utilities or len(set(utilities)) != len(utilities):
        problem = f"expected at least one utility, each once, got {utilities}"
        raise ConfigError.at("scoring.utilities", problem)
    _check_measures(config)
    _check_visibility(config)
    for key in ("report.title", "payment.currency"):
        text = _value(config, key)
        if expected := wrong(key.split(".")[1], text):
            raise ConfigError.at(key, f"expected {expected}, got {text!r:.100}")
    _check_method(config)
    _check_payment(config)


def _value(config: Sections, path: str) -> Any:
    section, key = path.split(".")
    return getattr(getattr(config, section), key)


def _check_rounds(config: Sections) -> None:
    noise = config.corruption.label_noise
    for name, rate in () if isinstance(noise, str) else noise.items():
        if not 0 <= rate <= 1:
            problem = f"expected a rate from 0 to 1, got {rate}"
            raise ConfigError.at("corruption.label_noise", problem, entry=name)
    rounds = config.training.rounds
    for name, away in config.participation.away.items():
        if any(not 1 <= number <= rounds for number in away):
            problem = f"expected numbers of rounds, 1 to {rounds}, got {list(away)}"
            raise ConfigError.at("participation.away", problem, entry=name)


def _check_visibility(config: Sections) -> None:
    if config.scoring.visibility == "coordinator":
        revealing = {"scoring.truth": config.scoring.truth, "training.weights": config.weighing == "scores"}
        for path in filter(revealing.get, revealing):
            problem = f'"coordinator" contradicts {path}, which would tell every member about the others'
            raise ConfigError.at("scoring.visibility", problem)


def _check_payment(config: Sections) -> None:
    terms, paid = config.payment, config.paid_score
    if (paid == "PANEL") != config.judged:
        raise ConfigError.at("payment.score", f"{paid} does not go with method {config.scoring.method!r}")
    if terms.rule == "hands" and not config.judged:
        raise ConfigError.at("payment.rule", "hands needs scoring.method = 'panel'")
    if config.judged and terms.rule not in ("fenced", "hands"):
        raise ConfigError.at("payment.rule", f"a panel pays by the rule hands, not by {terms.rule}")
    if config.judged:
        return
    if paid == "PHI" and not config.settles:
        raise ConfigError.at("payment.score", "PHI needs scoring.method = 'settled' or 'both'")
    if paid != "PHI" and not config.reports:
        raise ConfigError.at("payment.score", f"{paid} needs reports, but scoring.method is 'settled'")
    if paid == "MERIT" and not config.scoring.solo:
        raise ConfigError.at("payment.score", "MERIT needs scoring.solo = true")
    if terms.equal and terms.rule not in ("fair", "fenced"):
        problem = f"expected 0 with payment.rule = {terms.rule!r}, got {terms.equal}"
        raise ConfigError.at("payment.equal", problem)
    if terms.rule == "impartial" and paid not in SELF_REPORTED:
        reported = ", ".join(sorted(SELF_REPORTED))
        problem = f"'impartial' needs a score that members report ({reported}), got {paid}"
        raise ConfigError.at("payment.rule", problem)
    if not config.resolved:
        return
    members = len(config.clients)
    share = f"1/{members} for {members} members"
    if not terms.floor * members <= 1 + 1e-12:
        raise ConfigError.at("payment.floor", f"expected at most {share}, got {terms.floor}")
    if not terms.cap * members >= 1 - 1e-12:
        raise ConfigError.at("payment.cap", f"expected at least {share}, got {terms.cap}")


def _check_measures(config: Sections) -> None:
    for path, choices in (("data.name", READERS), ("training.loss", LOSSES)):
        name = _value(config, path)
        if name not in choices and ":" not in name:
            expected = f'one of {", ".join(choices)}, or "module:function"'
            raise ConfigError.at(path, f"expected {expected}, got {name!r}{meant(name, choices)}")
    twenty = "20, where 20 is the error, in the unit of y, from which on an answer counts as 0"
    for name in config.scoring.utilities:
        if name in ("rmse", "mae", "mse"):
            skill = "mae-skill" if name == "mae" else "rmse-skill"
            problem = f"{name!r} has no bound and falls as the model improves: expected {skill}:{twenty}"
            raise ConfigError.at("scoring.utilities", problem)
        scale = scale_of(name)
        if scale is not None and not 0 < scale < math.inf:
            problem = f"{name!r}: expected {name.partition(':')[0]}:{twenty}, such as the range of y"
            raise ConfigError.at("scoring.utilities", problem)


def _check_method(config: Sections) -> None:
    """Refuse what a settlement cannot do, what needs reports without them, and a rehearsed lie in neither."""
    method, misstated = config.scoring.method, config.corruption.misstate
    for name, factor in misstated.items():
        if factor == 1:
            raise ConfigError.at("corruption.misstate", "expected a factor other than 1", entry=name)
    _check_panel(config)
    if misstated and not config.settles:
        problem = 'only with scoring.method = "settled" or "both": members state nothing otherwise'
        raise ConfigError.at("corruption.misstate", problem)
    paid = config.scoring.utilities[0]
    if config.settles and (paid in WITHOUT_GRADIENT or paid in config.whole):
        instead = "put sharpened-accuracy or expected-accuracy first"
        if paid in config.whole:
            instead = "it is a metric of the whole test set; put a mean over samples first"
        problem = f"{method!r} settles the first utility along its gradient, and {paid!r} has none: {instead}"
        raise ConfigError.at("scoring.utilities", f"{problem}, or take scoring.method = 'reports'")
    measured = {
        "data.test_reveal": config.data.test_reveal == "per-round",
        "training.weights": config.weighing == "scores",
        "scoring.game": config.scoring.game == "renormalised",
        "scoring.solo": config.scoring.solo,
        "scoring.truth": config.scoring.truth,
    }
    for path in () if config.reports else filter(measured.get, measured):
        value = written(_value(config, path))
        raise ConfigError.at(
            path,
            f"{value:.60} needs measurements in the rounds, but with scoring.method = 'settled' nobody "
            "sees the test pool before the last round is over: use 'both' or 'reports'",
        )


def _check_panel(config: Sections) -> None:
    for name, what in config.corruption.judge.items():
        kind, _, friend = what.partition(":")
        if (kind, bool(friend)) not in (("praise", True), ("hurt", False)) or friend == name:
            problem = f"expected hurt, or praise:NAME of another member, got {what!r:.60}"
            raise ConfigError.at("corruption.judge", problem, entry=name)
        if config.resolved and friend and friend not in config.clients:
            raise ConfigError.at("corruption.judge", f"unknown member {friend!r}", entry=name)
    if config.corruption.judge and not config.judged:
        raise ConfigError.at(
            "corruption.judge", "only with scoring.method = 'panel': nobody judges otherwise"
        )
    if config.judged and config.scoring.visibility == "coordinator":
        problem = "a panel shows every member what it did for each other one: expected 'all'"
        raise ConfigError.at("scoring.visibility", problem)


def _check_members(config: Sections) -> None:
    names = config.clients
    if len(set(names)) != len(names) or len(names) != config.partition.clients:
        problem = f"expected {config.partition.clients} different names, got {list(names)}"
        raise ConfigError.at("partition.names", problem)
    try:
        check_names(names)
    except KeyFileError as error:
        raise ConfigError.at("partition.names", str(error)) from error
    for path in OF_MEMBERS:
        value = _value(config, path)
        for name in () if isinstance(value, str) else value:
            if name not in names:
                raise ConfigError.at(path, f"unknown member {name!r}; members are {', '.join(names)}")
    threshold = config.secure_aggregation.threshold
    if threshold and not len(names) / 2 < threshold <= len(names):
        half = f"{len(names) // 2 + 1} to {len(names)}, more than half of the {len(names)} members"
        raise ConfigError.at("secure_aggregation.threshold", f"expected {half}, got {threshold}")
    weights = config.roster_weights
    for name in names if config.training.weights == weights else ():
        if not (weight := weights.get(name, 0)) > 0:
            raise ConfigError.at("training.weights", f"expected a weight above 0, got {weight:g}", entry=name)


def check_schedule(config: Sections) -> None:
    """Refuse a run whose rounds could never finish, before it begins; recorded settings are not checked.

    The threshold refers to all members, or else a server that schedules fewer would need fewer colluders.
    """
    members, t = len(config.clients), config.threshold
    fraction = config.participation.fraction
    if config.training.weights == "roster":
        problem = '"roster" is for runs between machines: expected a table of weights by member'
        raise ConfigError.at("training.weights", problem)
    if t > members:
        problem = f"expected at most the {members} members, got {t}"
        raise ConfigError.at("secure_aggregation.threshold", problem)
    if (scheduled := usual_schedule(config)) < t:
        smallest = next(k / 1000 for k in range(1001) if round(k / 1000 * members) >= t)
        raise ConfigError.at(
            "participation.fraction",
            f"expected at least {smallest:g}, since {t} of the {members} members must stay to the end of a "
            f"round, got {fraction:g}, which schedules {scheduled}",
        )


def usual_schedule(config: Sections) -> int:
    """Return how many members a round schedules if nobody is away."""
    return max(LEAST_IN_SUM, round(config.participation.fraction * len(config.clients)))


def _check_partition(config: Sections) -> None:
    part = config.partition
    if part.scheme not in SCHEMES[:-1] and not part.scheme.startswith("file:"):
        got = f"{part.scheme!r:.100}{meant(part.scheme, SCHEMES)}"
        raise ConfigError.at("partition.scheme", f"expected one of {', '.join(SCHEMES)}, got {got}")
    if part.sizes and part.scheme != "sizes":
        raise ConfigError.at("partition.sizes", f'only with partition.scheme = "sizes", got {part.scheme!r}')
    if part.scheme == "sizes" and (sizes := len(part.sizes)) != part.clients:
        raise ConfigError.at("partition.sizes", f"expected {part.clients} sizes, one per client, got {sizes}")


# ------------------------------------------------------------------------------------------------------- TOML

DEEPEST = 16
"""The most parts of a key, and the deepest nesting of tables and lists."""
MOST_BITS = 128
_STRINGS = re.compile(  # of TOML, and comments; an unclosed one goes on to its end, where a parser stops
    r""""{3}(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5}|\\?\Z)|'{3}(?:[^']|'(?!''))*+(?:'{3,5}|\Z)"""
    r"""|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?|#[^\n]*+""",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?:\.[^.\n=,\[\]{{}}]*+){{{DEEPEST}}}")


def text_in(path: str | Path) -> str:
    """Return the text of a file of settings; raise ConfigError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at place {error.start}"
        raise ConfigError(f"{path}: expected text in UTF-8, got {byte}: save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse(text: str) -> dict[str, Any]:
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
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        values = [value for part in inner for value in part]
        if any(isinstance(value, int) and value.bit_length() > MOST_BITS for value in values):
            raise ConfigError(f"not settings: expected whole numbers of at most {MOST_BITS} bits")
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise ConfigError(f"not settings: expected tables and lists at most {DEEPEST} deep")


# -------------------------------------------------------------------------------------------------- values

_PLURAL = {int: "whole numbers", float: "numbers", str: "texts"}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of a setting; a whole number is a number, true is not."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (types.UnionType, typing.Union):
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
        return is_number(value)
    return isinstance(value, hint) and isinstance(value, bool) == (hint is bool)


def as_kind(value: Any, hint: Any) -> Any:
    """Return a fitting value in the one form of its type: 1 becomes 1.0 if a float is expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
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
    if origin in (types.UnionType, typing.Union):
        return " or ".join(words(option) for option in arguments if option is not types.NoneType)
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


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, str | bool) or is_number(value)
