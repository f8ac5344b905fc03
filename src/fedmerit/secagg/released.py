"""What a member must never do again.

Once a member has released a share for a sum, the server may come to know that sum. A second sum over the same
update, with one member more or less or with other weights, would give away one update by subtraction. So a
member that has released a share for a round takes part in no other attempt at it, and never submits that
update to that model again, whatever the round is called.

The t members that release shares need not be all N. The others have released nothing, and must not be enough
for a second, smaller sum over the same updates: a member that has masked in a round masks in it only for the
same schedule and threshold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import MessageError, RefusedError
from fedmerit.secagg.setting import Setting, pack

__all__ = ["Released", "update_digest"]


def update_digest(m0_hash: bytes, delta: npt.NDArray[np.floating[Any]]) -> bytes:
    """What names an update: the model M0 it starts from and its coordinates, as float32, -0.0 being 0.0.

    M0 is part of it: the same coordinates from another M0 are another update, because members that have
    converged may send zeros every round. Neither weight nor rounding enters: the same update under another
    weight is the same update. Of a large one, evenly spaced coordinates enter, 262,144 to twice as many. To
    look at fewer can only refuse more, and two trainings that agree in all of these are one.
    """
    with np.errstate(over="ignore"):
        sample = np.ascontiguousarray(delta[:: max(1, delta.size >> 18)], dtype="<f4") + np.float32(0)
    return hashlib.sha256(pack("fedmerit update 1", m0_hash, delta.size) + sample.tobytes()).digest()


class Released:
    """What a member has released shares for, which stages it passed and for which schedules. It must outlive
    the process: keep `dump` where the key is kept.

    The rules hold only if it is written before the message that changed it is sent.
    """

    def __init__(self, entries: Iterable[bytes] = ()) -> None:
        self._entries = set(entries)

    def __repr__(self) -> str:
        return f"Released({len(self._entries)} entries)"

    def refuse_again(self, setting: Setting, update: bytes, *, stage: str, member: str) -> None:
        """Stop here if a share was released for this round or this update."""
        if _round(setting) in self._entries:
            raise RefusedError(
                "has released a share in this round: no other attempt", stage=stage, member=member
            )
        if update in self._entries:
            raise RefusedError(
                "has released a share for this update: never again. Training is seeded so that it gives the "
                "same update from the same model: mix the run's id and the round number into its seed",
                stage=stage,
                member=member,
            )

    def same_schedule(self, setting: Setting, *, stage: str, member: str) -> None:
        """Stop here if this member masked in this round for another schedule or threshold; note this one."""
        where = (setting.run, setting.round, setting.roster.hash)
        begun = _digest("masked", *where)
        this = _digest("masked for", *where, list(setting.members), setting.t)
        if begun in self._entries and this not in self._entries:
            raise RefusedError(
                "has masked for another schedule or threshold in this round", stage=stage, member=member
            )
        self._entries |= {begun, this}

    def once(self, setting: Setting, stage: str, member: str) -> None:
        """Stop here if this stage of this attempt was passed before, by a client since rolled back.

        Two updates under the same masks, or signatures under two lists, are what a rollback could lead to.
        """
        if _digest("stage", setting.session, stage, member) in self._entries:
            raise RefusedError("did this before in this attempt", stage=stage, member=member)

    def did(self, setting: Setting, stage: str, member: str) -> None:
        """From now on, refuse this stage of this attempt."""
        self._entries.add(_digest("stage", setting.session, stage, member))

    def add(self, setting: Setting, update: bytes) -> None:
        """From now on, refuse this round and this update."""
        self._entries |= {_round(setting), update}

    def dump(self) -> bytes:
        """For a file: it holds digests only, no secret."""
        return b"".join(sorted(self._entries))

    @classmethod
    def load(cls, data: bytes) -> Released:
        if len(data) % 32:
            raise MessageError(
                f"a list of released updates has 32 bytes an entry, got {len(data)} bytes in all"
            )
        return cls(data[start : start + 32] for start in range(0, len(data), 32))


def _round(setting: Setting) -> bytes:
    return _digest("round", setting.run, setting.round, setting.roster.hash)


def _digest(*fields: str | bytes | int | list[str]) -> bytes:
    return hashlib.sha256(pack("fedmerit released 1", *fields)).digest()
