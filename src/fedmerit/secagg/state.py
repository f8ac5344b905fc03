"""What a client remembers between two messages, and how it is written down."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgpack

from fedmerit.errors import FedmeritError, MessageError
from fedmerit.identity.keys import Member, Roster
from fedmerit.secagg.messages import NOTHING_SEEN
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.setting import Setting, Task, pack

__all__ = ["State", "dump_state", "load_state"]

FORMAT = "fedmerit secagg client 1"


@dataclass(repr=False)  # it holds secrets
class State:
    """The round's secrets, drawn from the operating system, and what was said and seen so far."""

    channel: bytes  # X25519 private key: encrypts shares
    mask: bytes  # X25519 private key: pairwise masks; dealt in shares
    seed: bytes  # of the self-mask; dealt in shares
    nonce: bytes  # for the draw of who is audited
    stage: str = "advertise"
    stopped: str = ""
    seen: bytes = NOTHING_SEEN  # digest of the last list the server showed
    said: bytes = b""  # digest of our last head
    keys: dict[str, list[bytes]] = field(default_factory=dict)  # channel and mask key of who advertised
    shares: dict[str, list[bytes]] = field(default_factory=dict)  # key share and seed share, by dealer
    survivors: list[str] = field(default_factory=list)  # who is in the sum
    task: Task | None = None
    weight: float | None = None
    rounding: bytes | None = None
    update: bytes = b""  # digest
    clipped: int = 0

    @classmethod
    def fresh(cls) -> State:
        return cls(os.urandom(32), os.urandom(32), os.urandom(32), os.urandom(32))

    @classmethod
    def forgotten(cls, stage: str) -> State:
        return cls(b"", b"", b"", b"", stage, stopped="its secrets were deleted")


def dump_state(setting: Setting, name: str, state: State) -> bytes:
    """Bytes for a file that nobody else can read; a checksum in front tells damage, not tampering."""
    who = [setting.run, setting.round, setting.attempt, list(setting.members), setting.config_hash]
    roster = [[member.name, member.key, member.weight] for member in setting.roster.members]
    what = {f.name: getattr(state, f.name) for f in fields(state) if f.name != "task"}
    task = state.task and [
        state.task.m0_hash,
        asdict(state.task.encoding),
        None if state.task.weights is None else list(state.task.weights),
        state.task.extra,
    ]
    body = pack(FORMAT, who, [setting.threshold, setting.checked], roster, name, what, task)
    return hashlib.sha256(body).digest() + body


def load_state(data: bytes) -> tuple[Setting, str, State]:
    """What `dump_state` wrote."""
    body = data[32:]
    if hashlib.sha256(body).digest() != data[:32]:
        raise MessageError("not the saved state of a client, or damaged")
    try:
        form, who, (threshold, checked), roster, name, what, task = msgpack.unpackb(body)
        if form != FORMAT:
            raise MessageError("the saved state of another version")
        members = Roster(Member(*row) for row in roster)
        run, number, attempt, names, config_hash = who
        setting = Setting(run, number, attempt, names, members, config_hash, threshold, checked)
        return setting, name, State(**what, task=task and _task(*task))
    except (ValueError, TypeError, KeyError, FedmeritError):  # what it holds is secret: do not quote it
        raise MessageError("not the saved state of a client") from None


def _task(m0_hash: bytes, encoding: dict[str, Any], weights: list[float] | None, extra: bytes) -> Task:
    return Task(m0_hash, Encoding(**encoding), None if weights is None else tuple(weights), extra)
