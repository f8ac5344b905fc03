"""What a member agrees to when it joins a run, and what it refuses.

The server proposes terms. The member compares them with its own roster file, refuses settings that protect it
less than fedmerit's defaults (`cautious`, unless its owner chooses another rule), and signs. From then on the
terms cannot change: their hash enters every mask and every signature of the run.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from fedmerit.config import VERSION, Config, check_schedule, recorded, recorded_hash
from fedmerit.errors import BindingError, ConfigError, MessageError, RefusedError, VersionError
from fedmerit.identity import PREFIX, Member, Roster, canonical
from fedmerit.protocol.bench import LEAST_REHEARSED
from fedmerit.protocol.messages import PACKAGE, PROTOCOL
from fedmerit.protocol.outcome import Round, scored
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.ground_truth import normalise
from fedmerit.scoring.types import Vector
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.setting import LEAST_IN_SUM, Setting, Task, default_threshold
from fedmerit.settings import PanelSettings, SecureAggregation, Training

# ------------------------------------------------------------------------------------------------- weights

_KINDS: dict[str, Literal["uniform", "public", "secret"]] = {
    "uniform": "uniform",
    "secret": "secret",
    "roster": "public",
    "scores": "public",
}


def are_public(config: Config) -> bool:
    """Return whether all members know all weights before the sum."""
    return _KINDS[config.weighing] == "public"


def roster_weights(config: Config) -> dict[str, float]:
    """Return the weight of every member, if the roster fixes them."""
    return {name: float(config.roster_weights[name]) for name in config.clients}


def task_of(
    config: Config,
    m0_hash: str,
    length: int,
    members: Sequence[str],
    scored: Mapping[str, float] | None = None,
    extra: bytes = b"",
) -> Task:
    """Return what is summed in a round: how updates become integers, and the weights of members if public.

    ``length`` is that of the model; ``scored`` are weights from scores, which only rehearsals have; not used
    if the roster holds the weights.
    """
    public, cap = None, config.training.weight_cap if config.weighing == "secret" else 1.0
    if are_public(config):
        weights = roster_weights(config) if config.weighing == "roster" else scored
        if weights is None or not set(members) <= set(weights):
            raise BindingError("expected a weight for each scheduled member", stage="masked")
        public = {name: float(weights[name]) for name in members}
        cap = max(public.values())
    encoding = Encoding(
        length=length,
        members=len(members),
        bound=config.secure_aggregation.bound,
        weights=_KINDS[config.weighing],
        weight_cap=cap,
        word_bytes=config.word_bytes,
    )
    return Task(bytes.fromhex(m0_hash), encoding, public, extra)


def archived_task(
    archived: Mapping[str, Any],
    config: Config,
    m0_hash: str,
    length: int,
    members: Sequence[str],
    extra: bytes = b"",
) -> Task:
    """Return what was summed in a round, with the public weights that the server archived."""
    weights = archived.get("weights")
    scored = None if weights is None else dict(zip(members, weights.tolist(), strict=True))
    return task_of(config, m0_hash, length, members, scored, extra)


LEAST, MOST = 0.1, 3.0
"""Weights from scores are clipped to this range, so that nobody is shut out and nobody dominates."""


def weights_of(values: Vector, clients: Sequence[str]) -> dict[str, float]:
    """Return clip(normalise(scores), 0.1, 3) by client: above 1 for scores above the mean."""
    clipped = np.clip(normalise(values), LEAST, MOST)
    return dict(zip(clients, clipped.tolist(), strict=True))


def from_past(rounds: Sequence[Round], config: Config) -> dict[str, float]:
    """Return weights from alpha summed over earlier rounds; 1 in the first round and for newcomers."""
    weights = dict.fromkeys(config.clients, 1.0)
    if reports := scored(rounds, config.scoring.utilities[0]):
        total = accumulate(reports, missing=config.payment.missing)
        weights |= weights_of(total.values, total.clients)
    return weights


# -------------------------------------------------------------------------------------------- agreed terms

EMBEDDED = "embedded"
"""The engine of a rehearsal: one process holds all keys."""
FLOWER = "flower"
"""The engine between machines, over Flower."""
SIMULATED = "flower-simulation"
"""Flower's simulation, which is also a rehearsal: one person plays all members."""
NVFLARE = "nvflare"
"""The engine between machines, over NVFlare."""
NVFLARE_SIMULATED = "nvflare-simulation"
"""NVFlare's simulator."""
ENGINES = (EMBEDDED, FLOWER, SIMULATED, NVFLARE, NVFLARE_SIMULATED)
REHEARSALS = frozenset({EMBEDDED, SIMULATED, NVFLARE_SIMULATED})
"""Engines of rehearsals, in which one process or one simulation holds all keys."""
LARGEST_BOUND = 100.0
"""Largest bound that `cautious` accepts: no training moves a coordinate further in one round."""


FEATURES = ("settlement", "panel", "sketches")
"""What this version can do beyond its protocol. A run's terms list what its members must be able to do."""


def proposed(
    text: str, roster: Roster, *, strategy: str, optimiser: bool, evaluates: str, engine: str
) -> dict[str, Any]:
    """Return the terms of a run, which its members sign when they join.

    ``text`` are the settings as TOML; ``optimiser`` says whether the strategy moves the model after the sum,
    ``evaluates`` who measures v(M0) and v(M) (server or members); ``engine`` is one of `ENGINES`.
    """
    return {
        "config": text,
        "config_hash": recorded_hash(text),
        "roster": roster.hash.hex(),
        **roster_terms(roster),
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
    settles = ["panel"] if config.judged else ["settlement"] if config.settles else []
    return [*settles, *(["sketches"] if config.reports else [])]


def roster_terms(roster: Roster) -> dict[str, Any]:
    """Return what the terms say of a roster beside its hash."""
    terms = {"previous": roster.previous and roster.previous.hex(), "quorum": roster.quorum}
    return {key: value for key, value in terms.items() if value is not None}


def check_version(terms: Mapping[str, Any]) -> None:
    """Raise VersionError if a run has another protocol, or features that this version does not know."""
    protocol, features, version = (terms.get(key) for key in ("protocol", "features", "version"))
    readable = isinstance(version, str) and re.fullmatch(PACKAGE, version)
    server = f"the server (fedmerit {version})" if readable else "the server"
    if protocol != PROTOCOL or isinstance(protocol, bool):
        raise VersionError(
            f"{server} proposes a run with protocol {protocol!r:.20}, this member has fedmerit {VERSION} and "
            f"speaks protocol {PROTOCOL}: install versions with one protocol"
        )
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise MessageError("features of the run: expected a list of names")
    if unknown := [name for name in features if name not in FEATURES]:
        raise VersionError(
            f"{server} proposes a run with {', '.join(map(repr, unknown))[:200]}, which this member does not "
            f"know: it has fedmerit {VERSION}; install a version that does"
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

    @property
    def balanced(self) -> bool:
        """Whether the test pool was drawn class by class."""
        return bool(self.commitment.get("balanced"))

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

    Nor does a member sign that a run between machines is a rehearsal: its signatures would then prove
    nothing.
    """
    if (engine := terms.get("engine", FLOWER)) not in engines:
        raise RefusedError(
            f"asked for a run with engine {engine!r:.40}, expected {' or '.join(engines)} (in a simulation, "
            "the place of its key must say rehearsal=True)"
        )
    if config.analysis or not config.secure_aggregation.enabled:
        raise RefusedError("asked for a run that looks at plain updates")
    if config.weighing not in ("uniform", "secret", "roster"):
        raise RefusedError(f"weights {config.weighing!r} are only for a rehearsal")


def roster_in(config: Config, keys: Mapping[str, bytes] | None, stated: bytes | None = None) -> Roster:
    """Return the roster of a rehearsal, with weights if the settings take them from the roster.

    Without masks there are no keys. The roster then holds placeholders, which sign nothing. ``stated`` is the
    hash that members signed, if it is known.
    """
    weights = config.roster_weights
    named = keys or {name: hashlib.sha256(name.encode()).digest() for name in config.clients}
    members = (Member(name, named[name], weights.get(name)) for name in config.clients)
    return Roster(members, stated=stated)


def check_roster(terms: Mapping[str, Any], config: Config, roster: Roster) -> None:
    """Raise unless the server's roster, names and public weights match the member's own file."""
    if terms.get("roster") != roster.hash.hex():
        raise BindingError("the server's roster differs from ours")
    if {key: terms[key] for key in ("previous", "quorum") if key in terms} != roster_terms(roster):
        raise BindingError("the terms name another roster before ours")
    if set(config.clients) != set(roster.names):
        raise BindingError("the settings and the roster name different members")
    if config.weighing == "roster" and config.roster_weights != roster.weights:
        raise BindingError("the weights in the settings differ from those on the roster")


def check_server(terms: Mapping[str, Any], server: bytes, roster: Roster) -> None:
    """Raise unless the server that invites is the one on the member's own roster.

    Only a rehearsal may have a roster without a server's key: the person who plays everybody is the server.
    """
    if roster.server is None:
        if terms.get("engine", FLOWER) in REHEARSALS:
            return
        raise RefusedError(
            "its roster names no server, so anybody could be the server of this run: put the server's key on "
            "the roster (fedmerit keys roster --server, or for one in use fedmerit keys propose)"
        )
    if server != roster.server:
        invited, named = PREFIX + server.hex(), PREFIX + roster.server.hex()
        raise BindingError(f"invited by a server with key {invited}, its roster names {named}")


def cautious(config: Config, fraction: float = 1.0) -> None:
    """Refuse settings that are weaker than fedmerit's defaults; the rule of a member who sets no other.

    A member who lets the server choose members for each round, but at least this ``fraction`` of them, says
    so: ``partial(cautious, fraction=0.8)``.
    """
    secure, members = config.secure_aggregation, len(config.clients)
    least, asked = default_threshold(members), config.participation.fraction
    weak = ""
    if secure.threshold and secure.threshold < least:
        weak = f"a threshold of {secure.threshold} of {members} members, expected at least {least}"
    elif asked < fraction:
        weak = f"a server that chooses {asked:g} of the members each round, expected at least {fraction:g}"
    elif secure.bound > LARGEST_BOUND:
        weak = f"a bound of {secure.bound:g}, expected at most {LARGEST_BOUND:g}"
    elif config.judged:
        weak = _weak_panel(config)
    if weak:
        raise RefusedError(f"asked for {weak}", stage="join")


def _weak_panel(config: Config) -> str:
    """Return which setting of a panel shows more of a judge's samples, or of an update, than the defaults."""
    panel, usual = config.panel, PanelSettings()
    if not config.settlement.naming:
        return "a panel without naming, in which neither masks nor witnesses prove what is paid"
    if 0 < panel.least < LEAST_REHEARSED:
        return f"judges with {panel.least} held-out samples, expected at least {LEAST_REHEARSED}"
    if panel.noise < usual.noise and not panel.epsilon:
        return f"a noise of {panel.noise:g} on what judges show, expected at least {usual.noise:g}"
    if panel.blur < usual.blur:
        return f"a noise of {panel.blur:g} on what judges learn, expected at least {usual.blur:g}"
    return ""


def everybody(
    config: Config,
    weights: str = "uniform",
    bound: float = SecureAggregation.bound,
    weight_cap: int = Training.weight_cap,
) -> None:
    """Refuse what `cautious` refuses, and any run whose sums leave members out.

    Weights, bound and cap are fixed too, so two sums of the same updates differ by no more than rounding, and
    subtracting them reveals no update. A federation with others passes them by name, on every machine and in
    every run alike: ``partial(everybody, weights="roster", bound=8.0)``.
    """
    cautious(config)
    secure, members = config.secure_aggregation, len(config.clients)
    other = ""
    if config.weighing != weights:
        other = (
            f"{config.weighing} weights, expected {weights}: subtracting sums with different weights can "
            "reveal an update"
        )
    elif weights == "secret" and config.training.weight_cap != weight_cap:
        other = (
            f"a weight_cap of {config.training.weight_cap}, expected {weight_cap}: a member who declines "
            "under one cap and not under another reveals how many samples it has"
        )
    elif secure.bound != bound:
        other = (
            f"a bound of {secure.bound:g}, expected {bound:g}: a member who declines under one bound and not "
            "under another reveals how large its update is"
        )
    elif secure.threshold != members:
        other = (
            f"sums of fewer than all members: expected the threshold {members}, got "
            f"{secure.threshold or 'the default'}"
        )
    if other:
        raise RefusedError(f"asked for {other}", stage="join")


# --------------------------------------------------------------------------------------- from run to run
# A member that declines under one bound and not under another tells the server how large its update is, and
# so do weights, caps and thresholds that change. So these settings stay as they were in a member's first run,
# until its owner allows others. How often a member answers is limited too.

RUNS_A_MONTH = 30
"""Most runs in a `MONTH` in which a member trains, per federation, unless its owner allows more."""
MONTH = 30 * 86_400.0
ALLOW = "fedmerit member allow KEY"


def pinned(config: Config) -> dict[str, Any]:
    """Return the settings that stay the same from run to run; 0 stands for the default of a size."""
    secure, training, t = config.secure_aggregation, config.training, config.threshold
    found: dict[str, Any] = {
        "bound": float(secure.bound),
        "threshold": 0 if t == default_threshold(len(config.clients)) else t,
        "weights": config.weighing,
    }
    if config.weighing == "secret":
        found["weight_cap"] = float(training.weight_cap)
    return found


def _above_zero(value: float) -> bool:
    return 0 < value < math.inf


ALLOWED: dict[str, tuple[Callable[[str], Any], Callable[[Any], bool], str]] = {
    "bound": (float, _above_zero, "a number above 0"),
    "runs": (int, lambda most: most >= 1, "a whole number of at least 1"),
    "threshold": (int, lambda t: t >= 0, "a whole number of at least 0"),
    "weight_cap": (float, _above_zero, "a number above 0"),
    "weights": (str, ("uniform", "secret", "roster").__contains__, "uniform, secret or roster"),
}
"""What a member's owner may allow: how it is read, whether it makes sense, and what is expected."""


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
                    f"asked for {name} = {_as_text(asked)}, but the runs of this roster have {name} = "
                    f"{_as_text(pin)}: under changing settings, refusals and sums tell more than one sum "
                    f"does. The member's owner can change it: {ALLOW} {name}={_as_text(asked)}",
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
        return ", ".join(f"{name} = {_as_text(value)}" for name, value in sorted(self.pins.items()))

    def learn(self, tokens: Mapping[str, tuple[int, bytes]]) -> bool:
        """Remember counters of others that are greater than those known; return whether there are any."""
        newer = {key: token for key, token in tokens.items() if token[0] > self.peers.get(key, (0, b""))[0]}
        self.peers |= newer
        return bool(newer)

    def allow(self, name: str, text: str) -> None:
        """Set a pin, or the most runs, as the member's owner says; raise ConfigError if it makes no sense."""
        if name not in ALLOWED:
            names = ", ".join(sorted((*ALLOWED, "disk")))
            raise ConfigError(f"{name}={text}: expected one of {names}", setting=name)
        kind, fits, expected = ALLOWED[name]
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise ConfigError(f"{name}={text}: expected {expected}", setting=name)
        if name == "runs":
            self.most = value
            return
        if name == "weights":
            self.pins.pop("weight_cap", None)
        self.pins[name] = value


def _as_text(value: Any) -> str:
    """Return a setting as an owner writes it."""
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def least_scheduled(config: Config) -> int:
    """Return the fewest members that a round may schedule."""
    return max(LEAST_IN_SUM, config.threshold)
