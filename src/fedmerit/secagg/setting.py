"""What all members and the server agree on: who takes part in an attempt, what they sum, and nothing twice.

`Setting` is known before a round starts, `Task` only once the model is known, so keys can be advertised
early. Every member builds both from its own config, roster and model, never from what the server says.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, KeyFileError, MessageError, RefusedError, RoundAborted, placing
from fedmerit.identity import Roster
from fedmerit.secagg.quantise import Decoded, Encoding, Words, is_number, seed_bytes

STAGES: Final = ("advertise", "share", "masked", "check", "unmask")
LEAST_IN_SUM = 3  # a sum of two shows each of them the other's update


def pack(*fields: Any) -> bytes:
    """Return fields as unambiguous bytes, to be hashed, signed or bound into a key."""
    from msgspec import msgpack  # settings are read where it is not installed

    return msgpack.encode(fields)


def default_threshold(members: int) -> int:
    """Return t = floor(2R/3) + 1 for R members on a roster.

    This is the smallest t for which R - t colluding members cannot help a server that shows different lists
    to different members, whomever it schedules. To obtain both kinds of share of one peer, it needs t members
    behind each of two lists. Of the N scheduled, the c colluding ones serve both and the others one:
    2(t - c) <= N - c, that is c >= 2t - N >= 2t - R. With 3t > 2R this is more than R - t.

    >>> [default_threshold(n) for n in (3, 4, 6, 7, 9, 12)]
    [3, 3, 5, 5, 7, 9]
    """
    return 2 * members // 3 + 1


@dataclass(frozen=True)
class Setting:
    """One attempt at one round: who is scheduled, under which roster and config.

    Args:
        attempt: 0 at first, and one more for every retry; each attempt has fresh keys.
        members: everybody the schedule names, in its order, whether or not they will answer.
        roster: everybody's public keys.
        config_hash: SHA-256 of the settings all members agreed on.
        threshold: t, how many members together can reconstruct what a lost one left; None for the default
            for the whole roster, whoever is scheduled.
    """

    run: str
    round: int
    attempt: int
    members: tuple[str, ...]
    roster: Roster
    config_hash: bytes
    threshold: int | None = None

    @placing("setting")
    def __post_init__(self) -> None:
        if not (1 <= len(self.run) <= 128 and self.run.isprintable()):
            raise BindingError("run must be an identifier of 1 to 128 printable characters")
        if not (0 <= self.round < 2**32 and 0 <= self.attempt < 2**32):
            raise BindingError("round and attempt must be whole numbers of at least 0")
        for member in self.members:
            if self.members.count(member) > 1:
                raise BindingError("scheduled twice", member=member)
            try:
                self.roster.key(member)
            except KeyFileError:
                raise BindingError("scheduled but not on the roster", member=member) from None
        if self.n < LEAST_IN_SUM:
            raise RefusedError(
                f"a round needs {LEAST_IN_SUM} members, got {self.n}; "
                "a sum of two would show each of them the other's update"
            )
        if type(self.t) is not int or not self.on_roster / 2 < self.t <= self.on_roster:
            raise RefusedError(
                f"the threshold must be more than half of the {self.on_roster} members on the roster, and at "
                f"most all, got {self.t!r:.40}: a server could show two halves of them different lists"
            )
        if self.n < self.t:
            raise RefusedError(
                f"{self.n} members scheduled, {self.t} of the {self.on_roster} on the roster are needed; "
                "a smaller round needs fewer colluders to unmask one member"
            )

    @property
    def n(self) -> int:
        return len(self.members)

    @property
    def on_roster(self) -> int:
        """R, the number of members whom the server can schedule, and who could collude with it."""
        return len(self.roster.members)

    @property
    def t(self) -> int:
        return default_threshold(self.on_roster) if self.threshold is None else self.threshold

    @property
    def tolerated(self) -> int:
        """The number of members who may collude with the server, whomever it schedules (docs/threats.md)."""
        return min(self.on_roster - self.t, 2 * self.t - self.on_roster - 1)

    def need(self, stage: str) -> int:
        """Return how many members a stage needs: the threshold, and up to the masked stage at least three."""
        return self.t if stage in ("check", "unmask") else max(self.t, LEAST_IN_SUM)

    @cached_property
    def session(self) -> bytes:
        """The SHA-256 of the whole setting; part of every signature, commitment and encrypted share."""
        content = pack(
            "fedmerit secagg session 1",
            *(self.run, self.round, self.attempt, list(self.members), self.t),
            *(self.roster.hash, self.config_hash),
        )
        return hashlib.sha256(content).digest()


def what_to_know(scheduled: int, t: int, everybody: int) -> tuple[str, ...]:
    """Return what members should know before they agree to sums of so many members, with the threshold t."""
    notes = []
    if scheduled == LEAST_IN_SUM:
        notes.append("3 members: none may be lost, and any two of them can compute the third one's update")
    if t < default_threshold(everybody):
        notes.append(
            f"threshold {t} of {everybody}: {2 * t - everybody} members and the server together "
            f"can unmask a third party (the default threshold is {default_threshold(everybody)})"
        )
    return tuple(notes)


@dataclass(frozen=True)
class Task:
    """What is summed: the model that updates start from, their encoding, and public weights if any."""

    m0_hash: bytes
    encoding: Encoding
    weights: Mapping[str, float] | None = None  # by scheduled member, in their order
    extra: bytes = b""  # digest of all other instructions for training, the same for all members

    @placing("masked")
    def __post_init__(self) -> None:
        public = self.encoding.weights == "public"
        number, cap = len(self.weights or ()), self.encoding.weight_cap
        if number != (self.encoding.members if public else 0):
            raise BindingError(
                f"expected a weight for each scheduled member if they are public, got {number}"
            )
        weights = self.weights or {}
        if not all(is_number(weight) and 0 <= weight <= cap for weight in weights.values()):
            raise BindingError(f"public weights must be numbers from 0 to the cap {cap:g}")
        if self.weights is not None:
            object.__setattr__(self, "weights", {name: float(weights[name]) for name in weights})

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of the whole task; signed with every masked input."""
        e = self.encoding
        fields = [e.length, e.members, e.bound, e.weights, e.weight_cap]
        fields += [e.word_bytes] if e.word_bytes != 4 else []
        weights = None if self.weights is None else [*self.weights.items()]
        content = [self.m0_hash, fields, weights, *([self.extra] if self.extra else [])]
        return hashlib.sha256(pack("fedmerit secagg task 1", *content)).digest()

    def weight_of(self, member: str, own: float | None) -> float | None:
        """Return the weight of a member's update; raise if it differs from the member's public weight."""
        if self.weights is None:
            return own
        weight = self.weights[member]
        if own not in (None, weight):
            raise BindingError(f"its public weight is {weight:g}, got {own!r:.40}", member=member)
        return weight

    def refuse_small_sum(self, members: Iterable[str], *, stage: str) -> None:
        """Raise if fewer than three of these members have a weight above 0: only those count in the sum."""
        if self.weights is None:
            return  # uniform, or secret and at least 1
        counted = sum(self.weights[member] > 0 for member in members)
        if counted < LEAST_IN_SUM:
            raise RoundAborted(
                f"{counted} members with a weight above 0 in the sum, {LEAST_IN_SUM} are needed", stage=stage
            )

    def decode(self, total: Words, included: Sequence[str]) -> Decoded:
        """Return what the summed integers of these members stand for."""
        weight = None
        if self.weights is not None:
            weight = math.fsum(self.weights.get(member, math.nan) for member in included)
        return self.encoding.decode(total, included=len(included), public_total=weight)

    def binding(self, setting: Setting) -> bytes:
        """Return what every mask of this round is bound to: the context of its key derivation."""
        if (members := self.encoding.members) != setting.n:
            raise BindingError(f"the encoding is for {members} members, not {setting.n}", stage="masked")
        if self.weights is not None and (*self.weights,) != setting.members:
            raise BindingError("the public weights are not those of the scheduled members", stage="masked")
        return pack(
            *(setting.run, setting.round, setting.attempt, setting.session),
            *(setting.roster.hash, setting.config_hash, self.m0_hash, self.digest),
        )


@dataclass(frozen=True)
class Result(Decoded):
    """The result of a round."""

    included: tuple[str, ...]  # members whose updates are in the sum
    words: Words  # the sum of their integers modulo 2^32


@dataclass(frozen=True)
class Update:
    """What a member brings to the masked stage."""

    task: Task
    delta: npt.NDArray[np.floating[Any]]  # M_i - M0, flat
    weight: float | None = None  # its sample count, if weights are secret
    seed: int | bytes | None = None  # of the rounding; None draws one

    def __post_init__(self) -> None:
        if self.seed is not None:
            seed_bytes(self.seed)


# --------------------------------------------------------------------------------------------- never again
# Once a member has released a share for a sum, the server may learn that sum. A second sum over the same
# updates, with one member more or fewer or with other weights, would reveal one update by subtraction. So a
# member who has released a share for a round takes part in no other attempt at it, and never submits that
# update from that model again, whatever the round is called.
#
# The t members who release shares need not be all N. The others have released nothing, and must not suffice
# for a second, smaller sum over the same updates. So a member who has masked in a round masks in it again
# only for the same schedule and threshold.


def update_digest(m0_hash: bytes, delta: npt.NDArray[np.floating[Any]]) -> bytes:
    """Return the digest that identifies an update: of M0 and its coordinates as float32, with -0.0 as 0.0.

    M0 is part of it because members who have converged may send zeros every round; weight and rounding are
    not, because the same update under a different weight is the same update. A large update is sampled at
    262,144 to twice as many evenly spaced coordinates. This can only refuse more: two updates that agree in
    all of these count as one.
    """
    with np.errstate(over="ignore"):
        sample = np.ascontiguousarray(delta[:: max(1, delta.size >> 18)], dtype="<f4") + np.float32(0)
    return hashlib.sha256(pack("fedmerit update 1", m0_hash, delta.size) + sample.tobytes()).digest()


class Released:
    """What a member has released shares for, which stages it passed and for which schedules.

    It must outlive the process: keep its `dump` where the key is kept, and write it before the message that
    changed it is sent.
    """

    def __init__(self, entries: Iterable[bytes] = ()) -> None:
        self._entries = set(entries)

    def __repr__(self) -> str:
        return f"Released({len(self._entries)} entries)"

    def refuse_again(self, setting: Setting, update: bytes) -> None:
        """Raise `RefusedError` if a share was released for this round or this update."""
        if self.remembers("round", *_round(setting)):
            raise RefusedError("has released a share in this round, so it takes part in no other attempt")
        if update in self._entries:
            raise RefusedError(
                "has released a share for this update, so it never submits it again. Training gave the same "
                "update from the same model: mix the run's id and the round number into its seed"
            )

    def add(self, setting: Setting, update: bytes) -> None:
        """Record that a share was released for this round and this update."""
        self.remember("round", *_round(setting))
        self._entries.add(update)

    def same_schedule(self, setting: Setting) -> None:
        """Record schedule and threshold; raise `RefusedError` if the member masked for others this round."""
        begun = ("masked", *_round(setting))
        this = ("masked for", *_round(setting), list(setting.members), setting.t)
        if self.remembers(*begun) and not self.remembers(*this):
            raise RefusedError("has masked for a different schedule or threshold in this round")
        self.remember(*begun)
        self.remember(*this)

    def remember(self, *fact: str | bytes | int | list[str]) -> None:
        """Record a fact for good."""
        self._entries.add(_digest(*fact))

    def remembers(self, *fact: str | bytes | int | list[str]) -> bool:
        """Return whether a fact was recorded."""
        return _digest(*fact) in self._entries

    def dump(self) -> bytes:
        """Return the entries as bytes for a file; they are digests only, no secrets."""
        return b"".join(sorted(self._entries))

    @classmethod
    def load(cls, data: bytes) -> Released:
        if len(data) % 32:
            raise MessageError(f"expected 32 bytes for each released entry, got {len(data)} bytes in all")
        return cls(data[start : start + 32] for start in range(0, len(data), 32))


def _round(setting: Setting) -> tuple[str, int, bytes]:
    return setting.run, setting.round, setting.roster.hash


def _digest(*fact: str | bytes | int | list[str]) -> bytes:
    return hashlib.sha256(pack("fedmerit released 1", *fact)).digest()
