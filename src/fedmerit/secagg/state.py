"""What a member remembers: its state between two messages, and for ever what it must never do again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from fedmerit.errors import FedmeritError, MessageError, RefusedError
from fedmerit.identity import Member, Roster
from fedmerit.secagg.messages import NOTHING_SEEN
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.setting import Setting, Task, pack

__all__ = ["Released", "State", "dump_state", "load_state", "update_digest"]

# ------------------------------------------------------------------------------------ between two messages

FORMAT = "fedmerit secagg client 3"


@dataclass(repr=False)  # it holds secrets
class State:
    """The round's secrets, drawn from the operating system, and what was said and seen so far."""

    channel: (
        bytes  # from which private X25519 keys that encrypt shares are derived, one per peer; till unmask
    )
    mask: bytes  # X25519 private key of the pairwise masks; dealt in shares
    seed: bytes  # of the self-mask; dealt in shares
    nonce: bytes  # for drawing who is audited
    stage: str = "advertise"
    stopped: str = ""
    seen: bytes = NOTHING_SEEN  # digest of the last list the server showed
    said: bytes = b""  # digest of our last head
    keys: dict[str, list[bytes]] = field(default_factory=dict)  # by member: mask key, channel key towards us
    lists: dict[str, bytes] = field(default_factory=dict)  # those of advertise and share, until the check
    dealers: list[str] = field(default_factory=list)  # members who dealt shares
    pairs: list[str] = field(default_factory=list)  # those of them with whom we have a mask
    shares: dict[str, list[bytes]] = field(
        default_factory=dict
    )  # good ones: key share, seed share, by dealer; only the dealers' names once one of each is released
    survivors: list[str] = field(default_factory=list)  # members in the sum
    against: dict[str, list[str]] = field(
        default_factory=dict
    )  # by dealer: who in the sum complained about it
    task: Task | None = None
    weight: float | None = None
    rounding: bytes | None = None
    update: bytes = b""  # digest
    clipped: int = 0
    counter: int = 1  # of the member's stored state
    sent: bytes = b""  # digest of our masked words
    direction: bytes = b""  # digest of the one in which we told the products of our masks
    products: dict[str, int] = field(default_factory=dict)  # by peer: what we told
    opened: list[str] = field(default_factory=list)  # peers whose pair key with us we have opened
    tokens: dict[str, list[Any]] = field(default_factory=dict)  # by peer: greatest counter seen, its proof

    @classmethod
    def fresh(cls, counter: int = 1, peers: Mapping[str, tuple[int, bytes]] | None = None) -> State:
        tokens = {name: list(token) for name, token in (peers or {}).items()}
        channel, mask, seed, nonce = (os.urandom(32) for _ in range(4))
        return cls(channel, mask, seed, nonce, counter=counter, tokens=tokens)

    @classmethod
    def forgotten(cls, stage: str) -> State:
        return cls(b"", b"", b"", b"", stage, stopped="its secrets were deleted")


def dump_state(setting: Setting, name: str, state: State) -> bytes:
    """Return bytes for a file that nobody else can read; their checksum shows damage, not tampering."""
    who = [setting.run, setting.round, setting.attempt, list(setting.members), setting.config_hash]
    roster = [[member.name, member.key, member.weight] for member in setting.roster.members]
    stated = [setting.roster.server, setting.roster.previous, setting.roster.quorum]
    what = {f.name: getattr(state, f.name) for f in fields(state) if f.name != "task"}
    task = state.task and [
        state.task.m0_hash,
        asdict(state.task.encoding),
        None if state.task.weights is None else list(state.task.weights),
        state.task.extra,
    ]
    body = pack(FORMAT, who, [setting.threshold, setting.checked], roster, name, what, task, stated)
    return hashlib.sha256(body).digest() + body


def load_state(data: bytes) -> tuple[Setting, str, State]:
    """Read what `dump_state` wrote."""
    body = data[32:]
    if hashlib.sha256(body).digest() != data[:32]:
        raise MessageError("not the saved state of a client, or damaged")
    try:
        form, who, (threshold, checked), roster, name, what, task, stated = msgpack.unpackb(body)
        if form != FORMAT:
            raise MessageError("the saved state of another version")
        members = Roster((Member(*row) for row in roster), *stated)
        run, number, attempt, names, config_hash = who
        setting = Setting(run, number, attempt, names, members, config_hash, threshold, checked)
        return setting, name, State(**what, task=task and _task(*task))
    except (ValueError, TypeError, KeyError, FedmeritError):  # the content is secret: do not quote it
        raise MessageError("not the saved state of a client") from None


def _task(m0_hash: bytes, encoding: dict[str, Any], weights: list[float] | None, extra: bytes) -> Task:
    return Task(m0_hash, Encoding(**encoding), None if weights is None else tuple(weights), extra)


# --------------------------------------------------------------------------------------------- never again
# Once a member has released a share for a sum, the server may learn that sum. A second sum over the same
# updates, with one member more or fewer or with other weights, would reveal one update by subtraction. So a
# member who has released a share for a round takes part in no other attempt at it, and never submits that
# update to that model again, whatever the round is called.
#
# The t members who release shares need not be all N. The others have released nothing, and must not suffice
# for a second, smaller sum over the same updates. So a member who has masked in a round masks in it again
# only for the same schedule and threshold.


def update_digest(m0_hash: bytes, delta: npt.NDArray[np.floating[Any]]) -> bytes:
    """Return the digest that identifies an update: of M0 and its coordinates as float32, with -0.0 as 0.0.

    M0 is part of it because members who have converged may send zeros every round: the same coordinates from
    another M0 are another update. Weight and rounding are not part of it: the same update under another
    weight is the same update. A large update is sampled at evenly spaced coordinates, 262,144 to twice as
    many. Looking at fewer can only refuse more: two updates that agree in all of these count as one.
    """
    with np.errstate(over="ignore"):
        sample = np.ascontiguousarray(delta[:: max(1, delta.size >> 18)], dtype="<f4") + np.float32(0)
    return hashlib.sha256(pack("fedmerit update 1", m0_hash, delta.size) + sample.tobytes()).digest()


class Released:
    """What a member has released shares for, which stages it passed and for which schedules.

    It must outlive the process: keep its `dump` where the key is kept. The rules hold only if the dump is
    written before the message that changed it is sent.
    """

    def __init__(self, entries: Iterable[bytes] = ()) -> None:
        self._entries = set(entries)

    def __repr__(self) -> str:
        return f"Released({len(self._entries)} entries)"

    def refuse_again(self, setting: Setting, update: bytes, *, stage: str, member: str) -> None:
        """Raise `RefusedError` if a share was released for this round or this update."""
        if _round(setting) in self._entries:
            raise RefusedError(
                "has released a share in this round, so it takes part in no other attempt",
                stage=stage,
                member=member,
            )
        if update in self._entries:
            raise RefusedError(
                "has released a share for this update, so it never submits it again. Training gave the same "
                "update from the same model: mix the run's id and the round number into its seed",
                stage=stage,
                member=member,
            )

    def same_schedule(self, setting: Setting, *, stage: str, member: str) -> None:
        """Raise `RefusedError` if the member masked in this round for another schedule or threshold.

        Otherwise record this schedule and threshold.
        """
        where = (setting.run, setting.round, setting.roster.hash)
        begun = _digest("masked", *where)
        this = _digest("masked for", *where, list(setting.members), setting.t)
        if begun in self._entries and this not in self._entries:
            raise RefusedError(
                "has masked for another schedule or threshold in this round", stage=stage, member=member
            )
        self._entries |= {begun, this}

    def once(self, setting: Setting, stage: str, member: str) -> None:
        """Raise `RefusedError` if this member has passed this stage of this attempt before.

        That happens if its client was rolled back. A rollback could otherwise lead to two updates under the
        same masks, or to signatures on two lists.
        """
        if _digest("stage", setting.session, stage, member) in self._entries:
            raise RefusedError("has done this before in this attempt", stage=stage, member=member)

    def did(self, setting: Setting, stage: str, member: str) -> None:
        """Record a stage of this attempt, so that it is refused from now on."""
        self._entries.add(_digest("stage", setting.session, stage, member))

    def made(self, token: bytes) -> None:
        """Record a token with which this member proves the counter of its state."""
        self._entries.add(_digest("token", token))

    def has_made(self, token: bytes) -> bool:
        """Return whether this member remembers that it made a token."""
        return _digest("token", token) in self._entries

    def add(self, setting: Setting, update: bytes) -> None:
        """Record this round and this update, so that they are refused from now on."""
        self._entries |= {_round(setting), update}

    def dump(self) -> bytes:
        """Return the entries as bytes for a file; they are digests only, no secrets."""
        return b"".join(sorted(self._entries))

    @classmethod
    def load(cls, data: bytes) -> Released:
        if len(data) % 32:
            raise MessageError(
                f"a list of released updates has 32 bytes per entry, got {len(data)} bytes in all"
            )
        return cls(data[start : start + 32] for start in range(0, len(data), 32))


def _round(setting: Setting) -> bytes:
    return _digest("round", setting.run, setting.round, setting.roster.hash)


def _digest(*fields: str | bytes | int | list[str]) -> bytes:
    return hashlib.sha256(pack("fedmerit released 1", *fields)).digest()
