"""A run folder beside a process that may be writing in it: what is read belongs to one moment.

A round is in the ledger first and in the score files after. So whoever reads the files, and then the ledger
in one go, finds files that are as new as the ledger or older, never newer, however often a round is closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedmerit.errors import LedgerError
from fedmerit.ledger import START, Ledger, Record


@dataclass(eq=False)
class Snapshot:
    """The records of a ledger as they were at one moment."""

    path: Path
    all: tuple[Record, ...]
    damaged: LedgerError | None = None  # raised where the records end

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """All records in order, or those of one kind."""
        yield from (record for record in self.all if kind is None or record.kind == kind)
        if self.damaged is not None:
            raise self.damaged

    @property
    def head(self) -> str:
        """The last digest, as hex."""
        return (self.all[-1].digest if self.all else START).hex()

    def __len__(self) -> int:
        return len(self.all)


def snapshot(path: Path) -> Snapshot:
    """Read a ledger in one go: one query sees one state of the table."""
    found: list[Record] = []
    damaged = None
    with Ledger(path, read_only=True) as ledger:
        try:
            for record in ledger.records():
                found.append(record)
        except LedgerError as error:
            damaged = error
    return Snapshot(path, tuple(found), damaged)


def head_of(path: Path) -> str:
    """The head of a ledger as it is now; nothing where it cannot be read."""
    try:
        with Ledger(path, read_only=True) as ledger:
            return ledger.head
    except LedgerError:
        return ""
