"""What a member remembers: of a run between two messages, and of a federation from run to run.

`MemberState` is the interface. `MemoryState` keeps it in memory; `fedmerit.storage.member_state` keeps it in
sealed files beside the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmerit.config import (
    Config,
)
from fedmerit.errors import (
    ConfigError,
    RefusedError,
)
from fedmerit.identity import Roster, commitment
from fedmerit.secagg.setting import LEAST_IN_SUM, default_threshold
from fedmerit.secagg.state import Released

# ------------------------------------------------------------------------------------------ member's state


class MemberState(Protocol):
    """What one member remembers of one run between messages. A member writes first and answers afterwards.

    Values are plain (numbers, text, bytes, lists and mappings of them), arrays, or a round's client. A state
    returns a client as it is or as its dump.
    """

    @property
    def counter(self) -> int:
        """A number greater than in any message that this member sent before."""

    def held(self) -> AbstractContextManager[None]:
        """Return a lock that lets one message at a time through."""

    def check(self) -> None:
        """Raise StoreError if anything is lost that this member needs to answer."""

    def stop(self, why: str) -> None:
        """Answer nothing more in any run: this state is an older copy. `save` makes it count."""

    def open(self) -> None:
        """Prepare to store a run."""

    def save(self) -> None:
        """Write what was set since the last time; only then may the answer leave."""

    def room(self, size: int) -> None:
        """Raise StoreError unless so many more bytes may be stored."""

    def put(self, name: str, value: Any) -> None:
        """Set the value of a name; `save` makes it count."""

    def get(self, name: str) -> Any:
        """Return the value stored under a name, or None."""

    def last(self, what: str, before: int) -> Any:
        """Return the value stored under `ROUND.what` in the latest round before this one, or None."""

    def released(self) -> Released:
        """Return what this member must never do again, in any run."""

    def put_released(self, released: Released) -> None:
        """Set what must never be done again; `save` makes it count."""

    def lineage(self, name: str) -> Lineage:
        """Return what this member remembers of a federation from run to run."""

    def put_lineage(self, name: str, lineage: Lineage) -> None:
        """Set what this member remembers of a federation; `save` makes it count."""

    def roster(self) -> bytes | None:
        """Return the hash of the roster that this member last took part under, between machines."""

    def put_roster(self, hash_: bytes) -> None:
        """Store the hash of the roster that this member takes part under."""

    def add_kept(self, *lines: str) -> None:
        """Add lines about what the member was shown, did and said, for a comparison with the ledger."""

    def drop_rounds(self, *, before: int) -> None:
        """Delete what is stored of rounds before this one; but not the latest report."""


class MemoryState:
    """A member's state in memory, a `MemberState`: a rehearsal can be repeated."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._released = Released()
        self._lineages: dict[str, Lineage] = {}
        self.counter = 1
        self._roster: bytes | None = None

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check(self) -> None:
        """Do nothing."""

    def stop(self, why: str) -> None:
        """Do nothing: nobody puts an older copy of this state back."""

    def open(self) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Count up."""
        self.counter += 1

    def room(self, size: int) -> None:
        """Do nothing."""

    def put(self, name: str, value: Any) -> None:
        self._values[name] = value

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def last(self, what: str, before: int) -> Any:
        found = [name for name in self._values if name.endswith(f".{what}") and _number(name) < before]
        return self._values[max(found, key=_number)] if found else None

    def released(self) -> Released:
        return self._released

    def put_released(self, released: Released) -> None:
        self._released = released

    def lineage(self, name: str) -> Lineage:
        return self._lineages.get(name, Lineage())

    def put_lineage(self, name: str, lineage: Lineage) -> None:
        self._lineages[name] = lineage

    def roster(self) -> bytes | None:
        return self._roster

    def put_roster(self, hash_: bytes) -> None:
        self._roster = hash_

    def add_kept(self, *lines: str) -> None:
        """Do nothing: within one process there is nobody to compare with."""

    def drop_update(self, number: int) -> None:
        """Delete a round's update and client: they are as large as a model and no longer needed."""
        for what in ("client", "update"):
            self._values.pop(file_name(number, what), None)

    def drop_rounds(self, *, before: int) -> None:
        rounds = [name for name in self._values if "." in name]
        last = max((name for name in rounds if name.endswith(".report")), key=_number, default="")
        for name in rounds:
            if _number(name) < before and name != last:
                del self._values[name]


def _number(name: str) -> int:
    return int(name.partition(".")[0])


def file_name(number: int, what: str) -> str:
    """Return the name of a value of a round."""
    return f"{number:04d}.{what}"


def as_array(kept: Any, kind: str) -> npt.NDArray[Any]:
    """Return an array that was stored in a state, which may hand back its bytes."""
    return kept if isinstance(kept, np.ndarray) else np.frombuffer(kept, kind).copy()


# Lines of a member's own file; `ledger.head_log` explains them and compares them with a ledger.


def kept_head(number: int, head: str) -> str:
    """Return the line for a head that was shown as the head after a round."""
    return f"{number} {head}"


def kept_trained(number: int, m0_hash: str) -> str:
    """Return the line for a masked update, with the hash of the model it starts from."""
    return f"{number} trained {m0_hash}"


def kept_masked(number: int, member: str, digest: str) -> str:
    """Return the line for the masked words that this member sent, hashed as in the record ``masked``."""
    return f"{number} masked {json.dumps(member)} {digest}"


def kept_complained(number: int, member: str, dealer: str) -> str:
    """Return the line for a complaint of this member about a dealer of a bad share."""
    return f"{number} complained {json.dumps([member, dealer])}"


def kept_released(number: int, included: Sequence[str]) -> str:
    """Return the line for shares that were released for the sum of these members."""
    return f"{number} released {json.dumps(list(included))}"


def kept_report(number: int, body: Mapping[str, Any], bound_to: Mapping[str, Any]) -> str:
    """Return the line for a report and the outcome it is about, by their hashes."""
    outcome = commitment({"round": number, **bound_to})
    return f"{number} report {commitment(body).hex()} {outcome.hex()}"


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
        return {"pins": self.pins, "runs": self.runs, "peers": peers, "most": self.most}

    @classmethod
    def load(cls, kept: Mapping[str, Any] | None) -> Lineage:
        """Return what `dump` returned; with None, what is remembered of an unknown federation."""
        if kept is None:
            return cls()
        peers = {key: (counter, token) for key, (counter, token) in kept["peers"].items()}
        return cls(dict(kept["pins"]), dict(kept["runs"]), peers, kept["most"])


def _told(value: Any) -> str:
    """Return a setting as an owner writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.17g}" if isinstance(value, float) else str(value)
