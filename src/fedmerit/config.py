"""Settings from TOML, validated. Every key has a default, unknown keys are errors, messages name the key.

Settings are plain frozen dataclasses, so that they work where only numpy and torch are installed. What they
may be is in `limits`.

Recorded settings (in a ledger, in terms, in a run folder) are text that begins with the number of its
``schema``; a text of another schema is refused.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib
import json
import os
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedmerit.errors import ConfigError
from fedmerit.heading import Heading
from fedmerit.limits import WHOLE, WITHOUT_GRADIENT, check
from fedmerit.notes import meant
from fedmerit.secagg.setting import default_threshold
from fedmerit.toml_values import as_kind, fits, parse, text_in, words, written

VERSION = "0.1.0"
"""The version of this package, in `fedmerit --version`, on every page and in every ledger's first record."""

# ------------------------------------------------------------------------------------------------ settings

SCHEMA = 1
"""The schema of the settings in this file."""


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
    outputs: Literal["", "logits", "probabilities", "standardised", "plain"] = setting(
        "",
        "what the network returns: for classes, logits (what looks like probabilities is refused unless this "
        "key says what it is); for the loss mse, standardised, in standard deviations from the mean of y, or "
        "plain, in the unit of y",
    )


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
    weight_score: Literal["ALPHA", "LOO", "IOI", "FP", "EE", "COS"] = setting(
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
        (),
        '"mr-shapley", "round-shapley", "shapley": over all rounds, of the last round, retrained',
        above="these need plain updates, so the run is marked as an analysis",
    )


@dataclass(frozen=True, kw_only=True)
class Payment:
    """How members are paid. Members sign it with the other settings, before anybody knows a score."""

    rule: Literal["fenced", "fair", "impartial", "equal"] = setting(
        "fenced",
        "fair | impartial | equal",
        above="`fedmerit rewards` pays by these terms; any other terms are recorded and shown as a departure",
    )
    score: Literal["auto", "PHI", "ALPHA", "LOO", "IOI", "COS", "MERIT"] = setting(
        "auto", "auto: PHI where members settle, ALPHA where they report"
    )
    missing: Literal["zero", "own-mean"] = setting("zero", "what a missed round counts in the sum")
    equal: float = setting(
        0.0, "part of the budget that is divided equally among members who are not surely below zero"
    )
    floor: float = setting(0.0, "smallest share of a member who has a score")
    cap: float = setting(1.0, "largest share of a member")
    currency: str = setting("EUR", "of the budget: a code such as EUR, or a sign such as $")
    forfeit: float = setting(
        1.0, "part of its share that a member loses if the settlement names it for a lie; it stays unpaid"
    )


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """The settlement after the last round; for the methods "settled" and "both"."""

    blocks: int = setting(16, "blocks of the settled part of the pool, for standard errors")
    detail: Literal["rounds", "run"] = setting("rounds", "what a member states: a number per round, or one")
    naming: bool = setting(
        True, "a false statement can be traced to its author, for 8 bytes per parameter; false: 4 bytes"
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
    language: Literal["en", "de"] = setting("en", "of page and statements")


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
    payment: Payment = Payment()
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

    def values_coalitions(self, number: int) -> bool:
        """Return whether the ground truth asked for needs the utility of every coalition of this round."""
        last = number == self.training.rounds
        return "mr-shapley" in self.scoring.truth or (last and "round-shapley" in self.scoring.truth)

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
    def heading(self) -> Heading:
        """Title, consortium, date and currency."""
        return Heading(self.report.title, self.report.consortium, self.report.date, self.payment.currency)

    @property
    def paid_score(self) -> str:
        """The score that members are paid by according to these settings."""
        if self.payment.score != "auto":
            return self.payment.score
        return "PHI" if self.settles else "ALPHA"

    @property
    def word_bytes(self) -> Literal[4, 8]:
        """Bytes per number of a masked update: 8 if a false statement must be traced to its author."""
        return 8 if self.settles and self.settlement.naming and self.secure_aggregation.enabled else 4

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
    file = Path(path) / "config.toml"
    text = text_in(file)
    try:
        return recorded(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", setting=error.setting) from error


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


def from_dict(raw: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return settings from nested mappings; an entry ``schema`` may name their schema."""
    tree: dict[str, Any] = {
        name: dict(part) if isinstance(part, Mapping) else part for name, part in raw.items()
    }
    schema = tree.pop("schema", SCHEMA)
    if type(schema) is not int or schema != SCHEMA:
        raise ConfigError(
            f"schema: expected {SCHEMA}, got {schema!r:.40}; settings of another version of fedmerit need "
            "that version"
        )
    for override in overrides:
        _override(tree, override)
    kinds = _hints(Config)
    for name, given in tree.items():
        if name not in SECTIONS:
            keys = [f"{one}.{name}" for one in SECTIONS if name in _hints(kinds[one])]
            asked = f" (did you mean {keys[0]}?)" if keys else meant(name, SECTIONS)
            raise ConfigError(f"{name}: unknown section{asked}; expected one of {', '.join(SECTIONS)}")
        if not isinstance(given, dict):
            raise ConfigError(f"{name}: expected a section [{name}], got {given!r}")
        if name == "partition" and "clients" not in given:
            if isinstance(given.get("names"), list) and given["names"]:
                given["clients"] = len(given["names"])
            elif given.get("scheme") in ("group", "file"):
                given["clients"] = 0
    if tree.get("scoring", {}).get("method", Scoring.method) == "settled":
        tree["data"] = {"test_reveal": "end", **tree.get("data", {})}
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
    day = given.get("date") if name == "report" else None
    if type(day) is datetime.date:  # TOML has days of its own, without quotation marks
        given = {**given, "date": day.isoformat()}
    for key, value in given.items():
        if key not in hints:
            asked = meant(key.split(".")[0], hints)
            raise ConfigError.at(f"{name}.{key}", f"unknown key{asked}; expected one of {', '.join(hints)}")
        if not fits(value, hints[key]):
            choices = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is Literal else ()
            asked = meant(value, map(str, choices)) if isinstance(value, str) else ""
            raise ConfigError.at(f"{name}.{key}", f"expected {words(hints[key])}, got {value!r:.100}{asked}")
    return kind(**{key: as_kind(value, hints[key]) for key, value in given.items()})


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
