"""What all members and the server agree on: who takes part in an attempt, and what they work on.

`Setting` is known before a round starts, `Task` only once the model is known, so keys can be advertised
early. Every member builds both from its own config, roster and model, never from what the server says.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, KeyFileError, RefusedError, RoundAborted
from fedmerit.identity import Roster
from fedmerit.secagg.quantise import MOST_MEMBERS, Encoding, Words, is_number, seed_bytes, whole

__all__ = ["LEAST_IN_SUM", "STAGES", "Result", "Setting", "Task", "Update", "default_threshold", "pack"]

STAGES: Final = ("advertise", "share", "masked", "check", "unmask")
LEAST_IN_SUM = 3  # a sum of two shows each of them the other's update


def pack(*fields: Any) -> bytes:
    """Return fields as unambiguous bytes, to be hashed, signed or bound into a key."""
    import msgpack  # not needed by the settings of a run without masks

    return bytes(msgpack.packb(list(fields)))


def _is_digest(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == 32


def default_threshold(members: int) -> int:
    """Return t = floor(2R/3) + 1 for R members on a roster.

    This is the smallest t for which R - t colluding members cannot help a server that shows different lists
    to different members, whomever it schedules.

    To obtain both kinds of share of one peer, the server needs t members behind each of two lists. Of the R
    members it schedules N, and c of these collude. The c serve both lists, and each of the N - c honest ones
    serves one: 2(t - c) <= N - c, that is c >= 2t - N >= 2t - R. With 3t > 2R this is more than R - t. A t
    computed from N is too small: from a roster of 10, a server could schedule 7 with t = 5, and all 3
    colluders among them.

    >>> [default_threshold(n) for n in (3, 4, 6, 7, 9, 12)]
    [3, 3, 5, 5, 7, 9]
    """
    return 2 * members // 3 + 1


@dataclass(frozen=True)
class Setting:
    """One attempt at one round: who is scheduled, under which roster and config.

    Args:
        run: identifier of the run.
        round: number of the round.
        attempt: 0 at first, and one more for every retry; each attempt has fresh keys.
        members: everybody the schedule names, in its order, whether or not they will answer.
        roster: everybody's public keys.
        config_hash: SHA-256 of the settings all members agreed on.
        threshold: t, how many members together can reconstruct what a lost one left; None for the default
            for the whole roster, whoever is scheduled.
        checked: False leaves out the stage check. This saves an exchange, but trusts the server to show
            everybody the same list of masked inputs.
    """

    run: str
    round: int
    attempt: int
    members: tuple[str, ...]
    roster: Roster
    config_hash: bytes
    threshold: int | None = None
    checked: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.members, list | tuple):
            raise BindingError("members must be a list of names", stage="setting")
        object.__setattr__(self, "members", tuple(self.members))
        if not (isinstance(self.run, str) and 1 <= len(self.run) <= 128 and self.run.isprintable()):
            raise BindingError("run must be an identifier of 1 to 128 printable characters", stage="setting")
        for name in ("round", "attempt"):
            number = whole(getattr(self, name))
            if number is None or not 0 <= number < 2**32:
                raise BindingError(f"{name} must be a whole number of at least 0", stage="setting")
            object.__setattr__(self, name, number)
        if not _is_digest(self.config_hash):
            raise BindingError("config_hash must be a SHA-256 digest of 32 bytes", stage="setting")
        for member in self.members:
            if self.members.count(member) > 1:
                raise BindingError("scheduled twice", stage="setting", member=member)
            try:
                self.roster.key(member)
            except KeyFileError:
                raise BindingError(
                    "scheduled but not on the roster", stage="setting", member=member
                ) from None
        if not LEAST_IN_SUM <= self.n <= MOST_MEMBERS:
            raise RefusedError(
                f"a round needs {LEAST_IN_SUM} to {MOST_MEMBERS} members, got {self.n}; "
                f"a sum of two would show each of them the other's update",
                stage="setting",
            )
        if self.threshold is not None and (t := whole(self.threshold)) is not None:
            object.__setattr__(self, "threshold", t)
        if type(self.t) is not int or not self.on_roster / 2 < self.t <= self.on_roster:
            raise RefusedError(
                f"the threshold must be a whole number above half of the {self.on_roster} members on the "
                f"roster and not above all of them, got {self.t!r:.40}; "
                f"otherwise a server could unmask one member by showing two halves of them different lists",
                stage="setting",
            )
        if self.n < self.t:
            raise RefusedError(
                f"{self.n} members scheduled, {self.t} of the {self.on_roster} on the roster are needed; "
                f"a smaller round needs fewer colluders to unmask one member",
                stage="setting",
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
    def stages(self) -> tuple[str, ...]:
        """The stages of this attempt, in order."""
        return tuple(stage for stage in STAGES if self.checked or stage != "check")

    @property
    def tolerated(self) -> int:
        """The number of members who may collude with the server, whomever it schedules (docs/threats.md)."""
        if not self.checked:
            return 0
        return min(self.on_roster - self.t, 2 * self.t - self.on_roster - 1)

    def need(self, stage: str) -> int:
        """Return how many members a stage needs: the threshold, and up to the masked stage at least three."""
        return self.t if stage in ("check", "unmask") else max(self.t, LEAST_IN_SUM)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the members should know before they agree to this setting."""
        return what_to_know(self.n, self.t, self.on_roster, checked=self.checked)

    @cached_property
    def session(self) -> bytes:
        """The SHA-256 of the whole setting; part of every signature, commitment and encrypted share."""
        content = pack(
            "fedmerit secagg session 1",
            *(self.run, self.round, self.attempt, list(self.members), self.t),
            *(self.roster.hash, self.config_hash),
            *(() if self.checked else ("unchecked",)),
        )
        return hashlib.sha256(content).digest()


def what_to_know(scheduled: int, t: int, everybody: int, *, checked: bool) -> tuple[str, ...]:
    """Return what members should know before they agree to sums of so many members, with the threshold t."""
    notes = []
    if scheduled == LEAST_IN_SUM:
        notes.append("3 members: none may be lost, and any two of them can compute the third one's update")
    if t < default_threshold(everybody):
        notes.append(
            f"threshold {t} of {everybody}: {2 * t - everybody} members and the server together "
            f"can unmask a third party (the default threshold is {default_threshold(everybody)})"
        )
    if not checked:
        notes.append(
            "no check: members do not compare what they are asked to unmask, so updates are hidden only "
            "from a server that follows the protocol"
        )
    return tuple(notes)


@dataclass(frozen=True)
class Task:
    """What is summed: the model that updates start from, their encoding, and public weights if there are any.

    Args:
        m0_hash: SHA-256 of the model the update starts from. Each member computes it from the model that it
            trained.
        encoding: how updates become integers.
        weights: with public weights, one for each member of the setting, in the same order.
        extra: digest of all other instructions for training; it must be the same for all members.
    """

    m0_hash: bytes
    encoding: Encoding
    weights: tuple[float, ...] | None = None
    extra: bytes = b""

    def __post_init__(self) -> None:
        if self.extra and not _is_digest(self.extra):
            raise BindingError("extra must be a SHA-256 digest of 32 bytes", stage="masked")
        if not _is_digest(self.m0_hash):
            raise BindingError("m0_hash must be a SHA-256 digest of 32 bytes", stage="masked")
        public = self.encoding.weights == "public"
        given = 0 if self.weights is None else len(self.weights)
        if given != (self.encoding.members if public else 0):
            raise BindingError(
                f"expected one weight for each scheduled member if they are public, got {given}",
                stage="masked",
            )
        cap = self.encoding.weight_cap
        if not all(is_number(weight) and 0 <= weight <= cap for weight in self.weights or ()):
            raise BindingError(f"public weights must be numbers from 0 to the cap {cap:g}", stage="masked")
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(map(float, self.weights)))

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of the whole task; signed with every masked input."""
        e = self.encoding
        fields = [e.length, e.members, float(e.bound), e.weights, float(e.weight_cap), e.clip]
        fields += [e.word_bytes] if e.word_bytes != 4 else []
        weights = None if self.weights is None else [float(weight) for weight in self.weights]
        what = [self.m0_hash, fields, weights, *([self.extra] if self.extra else [])]
        return hashlib.sha256(pack("fedmerit secagg task 1", *what)).digest()

    def weight_of(
        self, setting: Setting, member: str, own: float | None, *, stage: str = "masked"
    ) -> float | None:
        """Return the weight of a member's update; raise if it differs from the member's public weight."""
        if self.weights is None:
            return own
        weight = self.weights[setting.members.index(member)]
        if own not in (None, weight):
            raise BindingError(
                f"its public weight is {weight:g}, got {own!r:.40}", stage=stage, member=member
            )
        return weight

    def refuse_small_sum(self, setting: Setting, members: Iterable[str], *, stage: str) -> None:
        """Raise if fewer than three of these members have a weight above 0: only those count in the sum."""
        if self.weights is None:
            return  # uniform, or secret and at least 1
        counted = sum(self.weights[setting.members.index(member)] > 0 for member in members)
        if counted < LEAST_IN_SUM:
            raise RoundAborted(
                f"{counted} members with a weight above 0 in the sum, {LEAST_IN_SUM} are needed", stage=stage
            )

    def result(self, setting: Setting, total: Words, included: tuple[str, ...]) -> Result:
        """Return what the summed integers of these members stand for."""
        weight = None
        if self.weights is not None:
            of = dict(zip(setting.members, self.weights, strict=True))
            weight = math.fsum(of[member] for member in included)
        decoded = self.encoding.decode(total, included=len(included), public_total=weight)
        return Result(included, total, decoded.weighted_sum, decoded.total_weight)

    def binding(self, setting: Setting) -> bytes:
        """Return what every mask of this round is bound to: the context of its key derivation."""
        if self.encoding.members != setting.n:
            raise BindingError(
                f"the encoding is for {self.encoding.members} members, the round schedules {setting.n}",
                stage="masked",
            )
        return pack(
            *(setting.run, setting.round, setting.attempt, setting.session),
            *(setting.roster.hash, setting.config_hash, self.m0_hash, self.digest),
        )


@dataclass(frozen=True)
class Result:
    """The result of a round."""

    included: tuple[str, ...]  # members whose updates are in the sum
    words: Words  # the sum of their integers modulo 2^32
    weighted_sum: npt.NDArray[np.float64]  # sum of w_i d_i
    total_weight: float  # W

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """The weighted mean of the updates, M - M0."""
        return self.weighted_sum / self.total_weight


@dataclass(frozen=True)
class Update:
    """What a member brings to the masked stage.

    Args:
        task: the model it started from and the encoding, as the member itself knows them.
        delta: M_i - M0, flat, floating point.
        weight: its sample count if weights are secret; otherwise None.
        seed: seed of the rounding; None draws one, which `Client.opening` reveals.
    """

    task: Task
    delta: npt.NDArray[np.floating[Any]]
    weight: float | None = None
    seed: int | bytes | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            seed_bytes(self.seed)
