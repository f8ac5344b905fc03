"""What a member agrees to when it joins a run, and what it refuses.

The server proposes terms. The member compares them with its own roster file, refuses settings that protect it
less than fedmerit's defaults (`cautious`, unless its owner chooses another rule), and signs. From then on the
terms cannot change: their hash enters every mask and every signature of the run.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from fedmerit.config import VERSION, Config, SecureAggregation, Training, recorded, recorded_hash
from fedmerit.errors import (
    BindingError,
    ConfigError,
    MessageError,
    RefusedError,
    VersionError,
)
from fedmerit.identity import PREFIX, Member, Roster, canonical
from fedmerit.limits import check_schedule
from fedmerit.protocol.messages import PACKAGE, PROTOCOL
from fedmerit.scoring.accumulate import Missing, accumulate
from fedmerit.scoring.agreement import normalise
from fedmerit.scoring.scores import score_of
from fedmerit.scoring.types import Reports, Vector
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.setting import LEAST_IN_SUM, Setting, default_threshold

# ------------------------------------------------------------------------------------------------- weights

_KINDS: dict[str, Literal["uniform", "public", "secret"]] = {
    "uniform": "uniform",
    "secret": "secret",
    "roster": "public",
    "scores": "public",
    "current-scores": "public",
}


def are_public(config: Config) -> bool:
    """Return whether all members know all weights before the sum."""
    return _KINDS[config.training.weights] == "public"


def roster_weights(config: Config) -> dict[str, float]:
    """Return the weight of every member, if the roster fixes them."""
    return {name: float(config.training.roster_weights[name]) for name in config.clients}


def encoding_of(config: Config, length: int, members: int, public: Mapping[str, float] | None) -> Encoding:
    """Return the encoding that turns updates of ``members`` scheduled members into integers.

    Args:
        config: of the run.
        length: how many numbers a model has.
        members: how many members are scheduled.
        public: their weights, if these are public.
    """
    kind, cap = config.training.weights, 1.0
    if kind == "secret":
        cap = config.training.weight_cap
    elif public is not None:
        cap = max(public.values())
    return Encoding(
        length=length,
        members=members,
        bound=config.secure_aggregation.bound,
        weights=_KINDS[kind],
        weight_cap=cap if kind != "uniform" else 1,
        clip=config.secure_aggregation.clip,
        word_bytes=config.word_bytes,
    )


def archived_weights(kept: Mapping[str, Any], scheduled: Sequence[str]) -> dict[str, float] | None:
    """Return the public weights in what the server archived of a round; None if it has none."""
    weights = kept.get("weights")
    return None if weights is None else dict(zip(scheduled, weights.tolist(), strict=True))


def scheduled_encoding(
    config: Config, length: int, members: Sequence[str], told: Mapping[str, float] | None = None
) -> tuple[Encoding, dict[str, float] | None]:
    """Return the encoding of a round, and the weights of its members if these are public.

    ``told`` are weights from scores, which only rehearsals have; not used if the roster holds the weights.
    """
    public = None
    if are_public(config):
        everybody = roster_weights(config) if config.training.weights == "roster" else told
        if everybody is None or not set(members) <= set(everybody):
            raise BindingError("expected a weight for each scheduled member", stage="masked")
        public = {name: float(everybody[name]) for name in members}
    return encoding_of(config, length, len(members), public), public


LEAST, MOST = 0.1, 3.0
"""Weights from scores are clipped to this range, so that nobody is shut out and nobody dominates."""


def weights_of(values: Vector, clients: Sequence[str]) -> dict[str, float]:
    """Return clip(normalise(scores), 0.1, 3) by client: above 1 for scores above the mean."""
    clipped = np.clip(normalise(values), LEAST, MOST)
    return dict(zip(clients, clipped.tolist(), strict=True))


def from_past(
    rounds: Sequence[Reports], names: Sequence[str], *, score: str, missing: Missing
) -> dict[str, float]:
    """Return weights from a score summed over earlier rounds; 1 in the first round and for newcomers.

    Rounds in which FP or EE does not exist or is not ``ok`` are not counted.
    """
    weights = dict.fromkeys(names, 1.0)
    if score in ("FP", "EE"):
        rounds = [one for one in rounds if not one.silent and score_of(one, score).status == "ok"]
    if rounds:
        total = accumulate(rounds, score=score, missing=missing)
        weights |= weights_of(total.values, total.clients)
    return weights


# -------------------------------------------------------------------------------------------- agreed terms

EMBEDDED = "embedded"
"""The engine of a rehearsal: one process holds all keys."""
FLOWER = "flower"
"""The engine between machines, over Flower."""
SIMULATED = "flower-simulation"
"""Flower's simulation, which is also a rehearsal: one person plays all members."""
ENGINES = (EMBEDDED, FLOWER, SIMULATED)
REHEARSALS = frozenset({EMBEDDED, SIMULATED})
"""Engines of rehearsals, in which one process or one simulation holds all keys."""
LARGEST_BOUND = 100.0
"""Largest bound that `cautious` accepts: no training moves a coordinate further in one round."""


FEATURES = ("settlement", "sketches")
"""What this version can do beyond its protocol. A run's terms list what its members must be able to do."""


def proposed(
    text: str, roster: Roster, *, strategy: str, optimiser: bool, evaluates: str, engine: str
) -> dict[str, Any]:
    """Return the terms of a run, which its members sign when they join.

    Args:
        text: the settings, as TOML.
        roster: of the run; the terms name it, its quorum and the roster before it.
        strategy: the name of the strategy.
        optimiser: whether the strategy moves the model after the sum.
        evaluates: who measures v(M0) and v(M): server or members.
        engine: one of `ENGINES`.
    """
    return {
        "config": text,
        "config_hash": recorded_hash(text),
        "roster": roster.hash.hex(),
        **stated_of(roster),
        "strategy": strategy,
        "optimiser": optimiser,
        "evaluates": evaluates,
        "engine": engine,
        "protocol": PROTOCOL,
        "features": features_of(recorded(text)),
        "version": VERSION,
    }


def features_of(config: Config) -> list[str]:
    """Return what the members of a run with these settings must be able to do, of `FEATURES`."""
    sketched = config.reports and config.scoring.errors == "joint"
    return [*(["settlement"] if config.settles else []), *(["sketches"] if sketched else [])]


def stated_of(roster: Roster) -> dict[str, Any]:
    """Return what the terms say of a roster beside its hash."""
    found = {"previous": roster.previous and roster.previous.hex(), "quorum": roster.quorum}
    return {key: value for key, value in found.items() if value is not None}


def check_version(terms: Mapping[str, Any], member: str) -> None:
    """Raise VersionError if a run has another protocol, or features that this version does not know."""
    protocol, features, theirs = (terms.get(key) for key in ("protocol", "features", "version"))
    known = isinstance(theirs, str) and re.fullmatch(PACKAGE, theirs)
    server = f"the server (fedmerit {theirs})" if known else "the server"
    if protocol != PROTOCOL or isinstance(protocol, bool):
        raise VersionError(
            f"{server} proposes a run with protocol {protocol!r:.20}, this member has fedmerit {VERSION} and "
            f"speaks protocol {PROTOCOL}: install versions with one protocol",
            stage="join",
            member=member,
        )
    if not isinstance(features, list) or not all(isinstance(one, str) for one in features):
        raise MessageError("features of the run: expected a list of names", stage="join", member=member)
    if unknown := [one for one in features if one not in FEATURES]:
        raise VersionError(
            f"{server} proposes a run with {', '.join(map(repr, unknown))[:200]}, which this member does not "
            f"know: it has fedmerit {VERSION}; install a version that does",
            stage="join",
            member=member,
        )


@dataclass(frozen=True)
class Agreed:
    """What a member signed when it joined a run."""

    terms: Mapping[str, Any]
    commitment: Mapping[str, Any]
    server: bytes

    @cached_property
    def config(self) -> Config:
        """The settings among the terms."""
        return config_in(self.terms)

    def setting(self, run: str, number: int, members: Iterable[str], roster: Roster) -> Setting:
        """Return the setting of one attempt at a round, the same for members and server."""
        secure = self.config.secure_aggregation
        return Setting(
            run=run,
            round=number,
            attempt=0,
            members=tuple(members),
            roster=roster,
            config_hash=self.hash,
            threshold=secure.threshold or None,
            checked=secure.check,
        )

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of all terms; members who were told different things find out before they mask."""
        everything = {"terms": self.terms, "commitment": self.commitment, "server": self.server.hex()}
        return hashlib.sha256(canonical(everything)).digest()


@lru_cache(maxsize=4)
def _settings(text: str) -> tuple[Config, str]:
    """Return settings and their hash; cached, because members who share a process read the same ones."""
    config = recorded(text)
    check_schedule(config)
    return config, recorded_hash(text)


def config_in(terms: Mapping[str, Any]) -> Config:
    """Return the settings in the terms; raise MessageError if they do not match their hash."""
    try:
        config, digest = _settings(str(terms["config"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:  # a ConfigError is a ValueError
        raise MessageError(f"the server's settings cannot be read: {error!s:.200}", stage="join") from None
    if digest != terms.get("config_hash"):
        raise MessageError("the server's settings do not match their hash", stage="join")
    return config


def refuse_rehearsal(terms: Mapping[str, Any], config: Config, engines: Sequence[str]) -> None:
    """Refuse settings that are only for a rehearsal in one process; no `accept` of a member can allow them.

    A member also refuses to sign that a run between machines is a rehearsal (``engine``): verification would
    then say that its signatures in the ledger prove nothing.
    """
    if (engine := terms.get("engine", FLOWER)) not in engines:
        raise RefusedError(
            f"asked for a run with engine {engine!r:.40}, expected {' or '.join(engines)} (in a simulation, "
            "the `place` passed to secure must say rehearsal=True)",
            stage="join",
        )
    if config.analysis or not config.secure_aggregation.enabled:
        raise RefusedError("asked for a run that looks at plain updates", stage="join")
    if config.training.weights not in ("uniform", "secret", "roster"):
        raise RefusedError(f"weights {config.training.weights!r} are only for a rehearsal", stage="join")


def roster_in(config: Config, keys: Mapping[str, bytes] | None) -> Roster:
    """Return the roster of a rehearsal, with weights if the settings take them from the roster.

    Without masks there are no keys. The roster then holds placeholders, which sign nothing.
    """
    weights = config.training.roster_weights if config.training.weights == "roster" else {}
    named = keys or {name: hashlib.sha256(name.encode()).digest() for name in config.clients}
    return Roster(Member(name, named[name], weights.get(name)) for name in config.clients)


def check_roster(terms: Mapping[str, Any], config: Config, roster: Roster, member: str) -> None:
    """Raise unless the server's roster, names and public weights match the member's own file."""
    if terms.get("roster") != roster.hash.hex():
        raise BindingError("the server's roster differs from ours", stage="join", member=member)
    if {key: terms[key] for key in ("previous", "quorum") if key in terms} != stated_of(roster):
        raise BindingError("the terms state another roster before ours", stage="join", member=member)
    if set(config.clients) != set(roster.names):
        raise BindingError("the settings and the roster name different members", stage="join", member=member)
    if config.training.weights == "roster" and config.training.roster_weights != roster.weights:
        raise BindingError(
            "the weights in the settings differ from those on the roster", stage="join", member=member
        )


def check_server(terms: Mapping[str, Any], server: bytes, roster: Roster, member: str) -> None:
    """Raise unless the server that invites is the one on the member's own roster.

    Only a rehearsal may have a roster without a server's key: the person who plays everybody is the server.
    """
    if roster.server is None:
        if terms.get("engine", FLOWER) in REHEARSALS:
            return
        raise RefusedError(
            "its roster names no server, so anybody could be the server of this run: put the server's key on "
            "the roster (fedmerit keys roster --server, or for one in use fedmerit keys propose)",
            stage="join",
            member=member,
        )
    if server != roster.server:
        raise BindingError(
            f"invited by a server with key {PREFIX}{server.hex()}, its roster names "
            f"{PREFIX}{roster.server.hex()}",
            stage="join",
            member=member,
        )


def cautious(config: Config, fraction: float = 1.0) -> None:
    """Refuse settings that are weaker than fedmerit's defaults; the rule of a member who sets no other.

    A member who lets the server choose members for each round, but at least this ``fraction`` of them, says
    so: ``partial(cautious, fraction=0.8)``.
    """
    secure, members = config.secure_aggregation, len(config.clients)
    weak = ""
    if not secure.check:
        weak = "asked to leave out the check: updates are then hidden only from an honest server"
    elif secure.threshold and secure.threshold < default_threshold(members):
        least = default_threshold(members)
        weak = f"asked for a threshold of {secure.threshold} of {members} members, expected at least {least}"
    elif config.participation.fraction < fraction:
        weak = (
            f"asked to let the server choose {config.participation.fraction:g} of the members each round, "
            f"expected at least {fraction:g}"
        )
    elif secure.bound > LARGEST_BOUND:
        weak = f"asked for a bound of {secure.bound:g}, expected at most {LARGEST_BOUND:g}"
    if weak:
        raise RefusedError(weak, stage="join")


def everybody(
    config: Config,
    weights: str = "uniform",
    bound: float = SecureAggregation.bound,
    weight_cap: int = Training.weight_cap,
) -> None:
    """Refuse what `cautious` refuses, and any run whose sums leave members out or are clipped.

    Weights, bound and cap are fixed too. So two sums of the same updates differ by no more than rounding, and
    subtracting them reveals no update. A federation that uses other weights, another bound or (if weights are
    secret) another cap passes them by name, on every machine and in every run alike:
    ``partial(everybody, weights="roster", bound=8.0)``.
    """
    cautious(config)
    secure, members = config.secure_aggregation, len(config.clients)
    if config.training.weights != weights:
        raise RefusedError(
            f"asked for {config.training.weights} weights, expected {weights}: subtracting sums with "
            "different weights can reveal an update",
            stage="join",
        )
    if weights == "secret" and config.training.weight_cap != weight_cap:
        raise RefusedError(
            f"asked for a weight_cap of {config.training.weight_cap}, expected {weight_cap}: a member "
            "who declines under one cap and not under another reveals how many samples it has",
            stage="join",
        )
    if secure.clip:
        raise RefusedError(
            "asked to clip updates: subtracting sums that were clipped at different bounds reveals the "
            "update of a member who lies beyond them",
            stage="join",
        )
    if secure.bound != bound:
        raise RefusedError(
            f"asked for a bound of {secure.bound:g}, expected {bound:g}: a member who declines under "
            "one bound and not under another reveals how large its update is",
            stage="join",
        )
    if secure.threshold != members or secure.least != members:
        raise RefusedError(
            f"asked for sums of fewer than all members: expected threshold and least to be {members}, "
            f"got {secure.threshold or 'the default'} and {secure.least or 'the default'}",
            stage="join",
        )


# --------------------------------------------------------------------------------------- from run to run
# A member that declines under one bound and not under another tells the server how large its update is, and
# so do weights, caps and thresholds that change. So these settings stay as they were in a member's first run,
# until its owner allows others. How often a member answers is limited too.

RUNS_A_MONTH = 30
"""Most runs in a `MONTH` in which a member trains, per federation, unless its owner allows more."""
MONTH = 30 * 86_400.0
ALLOW = "fedmerit member allow KEY"


def lineage_of(roster: Roster) -> str:
    """Return the name under which a member remembers a federation from run to run."""
    return roster.lineage.hex()


def pinned(config: Config) -> dict[str, Any]:
    """Return the settings that stay the same from run to run; 0 stands for the default of a size."""
    secure, training, t = config.secure_aggregation, config.training, config.threshold
    found: dict[str, Any] = {
        "bound": float(secure.bound),
        "clip": secure.clip,
        "check": secure.check,
        "threshold": 0 if t == default_threshold(len(config.clients)) else t,
        "least": 0 if secure.least <= max(LEAST_IN_SUM, t) else secure.least,
        "weights": training.weights,
    }
    if training.weights == "secret":
        found["weight_cap"] = float(training.weight_cap)
    return found


@dataclass
class Lineage:
    """What a member remembers of a federation from run to run."""

    pins: dict[str, Any] = field(default_factory=dict)  # settings as they were in its first run
    runs: dict[str, float] = field(default_factory=dict)  # when it first trained in each run
    peers: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # counters and tokens of others, by key
    most: int = RUNS_A_MONTH
    opened: set[bytes] = field(default_factory=set)  # test samples that were shown: 8 bytes of each

    def check(self, run: str, config: Config, now: float) -> None:
        """Raise RefusedError if this member does not train in a run with these settings."""
        for name, asked in pinned(config).items():
            if (pin := self.pins.get(name, asked)) != asked:
                raise RefusedError(
                    f"asked for {name} = {_told(asked)}, but the runs of this roster have {name} = "
                    f"{_told(pin)}: under changing settings, refusals and sums tell more than one sum does. "
                    f"The member's owner can change it: {ALLOW} {name}={_told(asked)}",
                    stage="join",
                )
        others = {*self.recent(now)} - {run}
        if len(others) >= self.most:
            raise RefusedError(
                f"has trained in {len(others)} runs of this roster within 30 days, and does so in at most "
                f"{self.most}. The member's owner can change it: {ALLOW} runs={2 * self.most}",
                stage="join",
            )

    def begin(self, run: str, config: Config, now: float) -> None:
        """Record that this member trains in a run, and pin the settings if it is the first one."""
        self.pins = pinned(config) | self.pins
        self.runs = {run: now} | self.recent(now)

    def recent(self, now: float) -> dict[str, float]:
        """Return the runs within a `MONTH` in which this member trained, and when it began to."""
        return {run: when for run, when in self.runs.items() if when > now - MONTH}

    def told(self) -> str:
        """Return the pins as text."""
        return ", ".join(f"{name} = {_told(value)}" for name, value in sorted(self.pins.items()))

    def learn(self, tokens: Mapping[str, tuple[int, bytes]]) -> bool:
        """Remember counters of others that are greater than those known; return whether there are any."""
        newer = {key: one for key, one in tokens.items() if one[0] > self.peers.get(key, (0, b""))[0]}
        self.peers |= newer
        return bool(newer)

    def allow(self, name: str, text: str) -> None:
        """Set a pin, or the most runs, as the member's owner says; raise ConfigError if it makes no sense."""
        wrong = ""
        try:
            if name == "runs":
                self.most = int(text)
                wrong = "" if self.most >= 1 else "at least 1"
            elif name in ("clip", "check"):
                self.pins[name] = {"true": True, "false": False}[text]
            elif name in ("threshold", "least"):
                self.pins[name] = int(text)
                wrong = "" if self.pins[name] >= 0 else "a whole number of at least 0"
            elif name == "weights":
                wrong = "" if text in ("uniform", "secret", "roster") else "uniform, secret or roster"
                self.pins = {k: v for k, v in self.pins.items() if k != "weight_cap"}
                self.pins[name] = text
            elif name in ("bound", "weight_cap"):
                self.pins[name] = float(text)
                wrong = "" if 0 < self.pins[name] < math.inf else "a number above 0"
            else:
                wrong = "one of bound, check, clip, disk, least, runs, threshold, weight_cap and weights"
        except (ValueError, KeyError):
            wrong = "true or false" if name in ("clip", "check") else "a number"
        if wrong:
            raise ConfigError(f"{name}={text}: expected {wrong}", setting=name)

    def dump(self) -> dict[str, Any]:
        """Return this as plain values."""
        peers = {key: list(one) for key, one in self.peers.items()}
        opened = b"".join(sorted(self.opened))
        return {"pins": self.pins, "runs": self.runs, "peers": peers, "most": self.most, "opened": opened}

    @classmethod
    def load(cls, kept: Mapping[str, Any] | None) -> Lineage:
        """Return what `dump` returned; with None, what is remembered of an unknown federation."""
        if kept is None:
            return cls()
        peers = {key: (counter, token) for key, (counter, token) in kept["peers"].items()}
        data = kept.get("opened", b"")
        opened = {data[start : start + 8] for start in range(0, len(data), 8)}
        return cls(dict(kept["pins"]), dict(kept["runs"]), peers, kept["most"], opened)


def _told(value: Any) -> str:
    """Return a setting as an owner writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def least_scheduled(config: Config) -> int:
    """Return the fewest members that a round may schedule."""
    return max(LEAST_IN_SUM, config.threshold, config.secure_aggregation.least)
