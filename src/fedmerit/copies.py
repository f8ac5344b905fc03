"""A ledger as lines of JSON: an export that anybody can read, verify and keep.

One canonical object a line: ``seq``, ``author``, ``kind``, ``digest``, ``signature``, ``seal`` (bytes in
hexadecimal), and ``body``, or ``withheld`` with the body's hash where its reader may not see it. Both forms
have the same digests (see :mod:`fedmerit.ledger`), so a copy verifies like the ledger it was made from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedmerit.errors import LedgerError
from fedmerit.ledger import START, Record, Records, canonical, parsed_record

_FIELDS = {"seq", "author", "kind", "digest", "signature", "seal"}


def exported(ledger: Records, visible: Callable[[Record], bool] = lambda _: True) -> Iterator[bytes]:
    """The lines of a copy; bodies that are not ``visible`` are withheld."""
    for record in ledger.records():
        line: dict[str, Any] = {
            "seq": record.seq,
            "author": record.author,
            "kind": record.kind,
            "digest": record.digest.hex(),
            "signature": record.signature.hex(),
            "seal": record.seal.hex(),
        }
        if record.withheld or not visible(record):
            line["withheld"] = record.commitment.hex()
        else:
            line["body"] = record.body
        yield canonical(line) + b"\n"


class Copy:
    """A copy, read whole; the same methods as a ledger has for reading."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot be read: {error}") from error
        if lines.pop():
            raise LedgerError(f"{self.path}: the last line is not whole")
        self._records = [self._read(number, line) for number, line in enumerate(lines, start=1)]

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """All records in order, or those of one kind."""
        return (record for record in self._records if kind is None or record.kind == kind)

    @property
    def head(self) -> str:
        """The last digest, as hex."""
        return (self._records[-1].digest if self._records else START).hex()

    def __len__(self) -> int:
        return len(self._records)

    def _read(self, number: int, line: bytes) -> Record:
        where = f"{self.path}: line {number}"
        try:
            found = json.loads(line)
            if canonical(found) != line:
                raise ValueError("not in canonical form")
        except (ValueError, RecursionError, LedgerError) as error:
            raise LedgerError(f"{where}: cannot be read: {error!s:.100}") from error
        if not isinstance(found, dict) or set(found) not in (_FIELDS | {"body"}, _FIELDS | {"withheld"}):
            raise LedgerError(f"{where}: expected the fields of a record, and either body or withheld")
        hexadecimal = {"withheld": "", **found}
        try:
            raw = {
                key: bytes.fromhex(hexadecimal[key]) for key in ("digest", "signature", "seal", "withheld")
            }
            if any(hexadecimal[key] != value.hex() for key, value in raw.items()):
                raise ValueError("not lower-case hexadecimal")
        except (TypeError, ValueError) as error:
            raise LedgerError(f"{where}: its hashes or signatures cannot be read: {error!s:.60}") from error
        withheld = raw.pop("withheld")
        if type(found["seq"]) is not int or ("withheld" in found and len(withheld) != 32):
            raise LedgerError(f"{where}: expected a number and a hash of 32 bytes")
        body = canonical(found.get("body", {}))
        record = parsed_record(found["seq"], found["author"], found["kind"], body, **raw)
        if not withheld:
            return record
        return Record(**{**vars(record), "withheld": withheld})
