"""What a member remembers of a run between two messages.

`MemberState` is the interface. `MemoryState` keeps it in memory; `fedmerit.storage.member_state` keeps it in
sealed files beside the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from fedmerit.protocol.outcome import file_name
from fedmerit.protocol.terms import Lineage
from fedmerit.secagg.state import Released

KEPT = ("began", "update", "client", "signed", "stated", "table")
"""What a member keeps of every round until a settlement is over."""
POOL = "pool"
"""The value with the opened test pool."""


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

    def drop_rounds(self, *, before: int, keep: Sequence[str] = ()) -> None:
        """Delete what is stored of rounds before this one; but not the latest report, nor what to keep."""


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

    def drop_update(self, number: int, keep: Sequence[str] = ()) -> None:
        """Delete a round's models and client, but not what to keep: they are as large as a model."""
        for what in ("client", "m0", "update"):
            if what not in keep:
                self._values.pop(file_name(number, what), None)

    def drop_rounds(self, *, before: int, keep: Sequence[str] = ()) -> None:
        rounds = [name for name in self._values if "." in name and name.partition(".")[2] not in keep]
        last = max((name for name in rounds if name.endswith(".report")), key=_number, default="")
        for name in rounds:
            if _number(name) < before and name != last:
                del self._values[name]


def _number(name: str) -> int:
    return int(name.partition(".")[0])
