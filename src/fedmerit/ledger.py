"""The ledger: an append-only SQLite table of records, each signed by its author and chained by hash.

A record says who (``author``: the server or a member) states what (``kind``, ``body``). Its author signs the
content; the server seals its place in the chain::

    content_k = SHA-256("fedmerit record 1" 0 canonical({author, kind, body}))      signature: the author's
    digest_k  = SHA-256("fedmerit chain 1" 0 digest_{k-1} k content_k signature_k)  seal: the server's

so that altering, dropping, swapping or inserting a record changes every later digest, and the last digest
(the head) stands for all of it. Bodies hold no floats: numbers that must come back exactly are written as
hexadecimal strings by :func:`exact`. Where secure aggregation is off there are no keys: the chain is then
unsigned, and whoever verifies it is told so.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmerit.errors import LedgerError

SERVER = "server"
START = bytes(32)
WAIT = 5.0
"""Seconds to wait for another process that is writing."""
Signer = Callable[[bytes], bytes]
"""Signs a message with somebody's Ed25519 key."""


@dataclass(frozen=True)
class Record:
    """One line of the ledger."""

    seq: int
    author: str
    kind: str
    body: Mapping[str, Any]
    digest: bytes
    signature: bytes
    seal: bytes


class Ledger:
    """Records of one run. Use as a context manager; write inside :meth:`transaction`."""

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        if read_only and not self.path.exists():
            raise LedgerError(f"{self.path}: no ledger here")
        address = self.path.absolute().as_uri()
        if read_only:  # without a log nobody is writing, and the file alone can be read wherever it lies
            log = self.path.with_name(self.path.name + "-wal")
            address += "?mode=ro" if log.exists() else "?immutable=1"
        try:
            self._db = sqlite3.connect(address, uri=True, isolation_level=None, timeout=WAIT)
        except sqlite3.Error as error:
            raise LedgerError(f"{self.path}: cannot be opened as a ledger: {error}") from error
        try:
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS records (seq INTEGER PRIMARY KEY, author TEXT NOT NULL, "
                    "kind TEXT NOT NULL, body BLOB NOT NULL, digest BLOB NOT NULL, signature BLOB NOT NULL, "
                    "seal BLOB NOT NULL)"
                )
            self._db.execute("SELECT count(*) FROM records")
        except sqlite3.Error as error:
            self._db.close()
            raise LedgerError(f"{self.path}: cannot be opened as a ledger: {error}") from error

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All records appended inside are written together, or none of them."""
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite may have rolled back by itself, on a full disk for one
                self._execute("ROLLBACK")
            raise

    def append(
        self,
        author: str,
        kind: str,
        body: Mapping[str, Any],
        *,
        signature: bytes = b"",
        seal: Signer | None = None,
    ) -> Record:
        """Add a record. ``signature`` is the author's over :func:`content`; ``seal`` signs as the server."""
        if not self._db.in_transaction:
            raise LedgerError("records are appended inside a transaction")
        seq, head = self._tip()
        digest = link(head, seq + 1, content(author, kind, body), signature)
        sealed = seal(digest) if seal else b""
        record = Record(seq + 1, author, kind, body, digest, signature, sealed)
        self._execute(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)",
            (record.seq, author, kind, canonical(body), digest, signature, sealed),
        )
        return record

    @property
    def head(self) -> str:
        """The last digest, as hex: it stands for the whole ledger."""
        return self._tip()[1].hex()

    def __len__(self) -> int:
        return int(self._execute("SELECT count(*) FROM records").fetchone()[0])

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """All records in order, or those of one kind. Bodies are parsed, nothing is verified."""
        where, values = ("WHERE kind = ?", (kind,)) if kind else ("", ())
        query = f"SELECT seq, author, kind, body, digest, signature, seal FROM records {where} ORDER BY seq"  # noqa: S608 - no outside text
        rows = self._execute(query, values)
        last = 0
        while True:
            try:
                row = rows.fetchone()
            except sqlite3.Error as error:
                raise LedgerError(f"{self.path}: damaged after record {last}: {error}") from error
            if row is None:
                return
            last = row[0]
            yield _record(row)

    def _tip(self) -> tuple[int, bytes]:
        row = self._execute("SELECT seq, digest FROM records ORDER BY seq DESC LIMIT 1").fetchone()
        return (int(row[0]), bytes(row[1])) if row else (0, START)

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except (sqlite3.Error, UnicodeEncodeError) as error:
            raise LedgerError(f"{self.path}: {error}") from error


def _record(row: tuple[Any, ...]) -> Record:
    """A line of the table, if every cell has its type and the body its canonical form."""
    seq, author, kind, body, digest, signature, seal = row
    where = f"record {seq} ({kind!s:.40})"
    if not isinstance(author, str) or not isinstance(kind, str):
        raise LedgerError(f"{where}: author and kind must be text")
    for name, cell in (("body", body), ("digest", digest), ("signature", signature), ("seal", seal)):
        if not isinstance(cell, bytes):
            raise LedgerError(f"{where}: the {name} must be bytes, got {type(cell).__name__}")
    try:
        parsed = json.loads(body)
        if canonical(parsed) != body:
            raise ValueError("not in canonical form")
        if not isinstance(parsed, dict):
            raise ValueError(f"expected an object, got {type(parsed).__name__}")
    except (ValueError, RecursionError, LedgerError) as error:
        raise LedgerError(f"{where}: the body cannot be read: {error}") from error
    return Record(seq, author, kind, parsed, digest, signature, seal)


def content(author: str, kind: str, body: Mapping[str, Any]) -> bytes:
    """What an author signs: SHA-256 of the canonical record, apart from its place in the chain."""
    plain = canonical({"author": author, "kind": kind, "body": body})
    return hashlib.sha256(b"fedmerit record 1\0" + plain).digest()


def link(previous: bytes, seq: int, content_: bytes, signature: bytes) -> bytes:
    """The digest of record ``seq``: what the server seals and the next record builds on."""
    parts = previous + seq.to_bytes(8, "big") + content_ + hashlib.sha256(signature).digest()
    return hashlib.sha256(b"fedmerit chain 1\0" + parts).digest()


def canonical(body: Any) -> bytes:
    """One encoding per value: JSON with sorted keys and no spaces, ASCII; floats are refused.

    >>> canonical({"b": [1, None], "a": "é"})
    b'{"a":"\\\\u00e9","b":[1,null]}'
    """
    _refuse_floats(body, "record")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)
    return text.encode("ascii")


def exact(value: float) -> str:
    """A float as text that reads back to the same bits.

    >>> exact(0.1), number(exact(0.1))
    ('0x1.999999999999ap-4', 0.1)
    """
    return float(value).hex()


def number(text: Any) -> float:
    """The float that :func:`exact` wrote."""
    try:
        return float.fromhex(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise LedgerError(f"expected a number in hexadecimal, got {text!r}") from error


def verify_chain(ledger: Ledger, keys: Callable[[Record], Mapping[str, bytes]]) -> bool:
    """Check every digest, signature and seal; the error names the first record that is wrong.

    Args:
        ledger: to be checked.
        keys: from the first record, the public keys by author (the server's among them); an empty mapping
            for an unsigned ledger.

    Returns:
        Whether the ledger is signed.
    """
    previous, known = START, None
    for expected, record in enumerate(ledger.records(), start=1):
        where = f"record {record.seq} ({record.kind} by {record.author})"
        if record.seq != expected:
            raise LedgerError(f"record {expected} is missing: the next one is number {record.seq}")
        digest = link(
            previous, record.seq, content(record.author, record.kind, record.body), record.signature
        )
        if digest != record.digest:
            raise LedgerError(f"{where}: altered, or the records before it are")
        known = keys(record) if known is None else known
        if known:
            _check_signature(known, record.author, record.signature, _signed(record), where)
            _check_signature(known, SERVER, record.seal, digest, f"{where}: seal")
        elif record.signature or record.seal:
            raise LedgerError(f"{where}: signed, in a ledger whose first record names no keys")
        previous = digest
    if known is None:
        raise LedgerError(f"{ledger.path}: the ledger is empty")
    return bool(known)


def _signed(record: Record) -> bytes:
    return content(record.author, record.kind, record.body)


def _check_signature(
    keys: Mapping[str, bytes], author: str, signature: bytes, message: bytes, where: str
) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if author not in keys:
        raise LedgerError(f"{where}: {author!r} is not on the roster")
    try:
        key = Ed25519PublicKey.from_public_bytes(keys[author])
    except ValueError as error:
        raise LedgerError(f"{where}: the roster's key of {author!r} is not an Ed25519 key") from error
    try:
        key.verify(signature, message)
    except InvalidSignature as error:
        raise LedgerError(f"{where}: not signed by {author}") from error


def _refuse_floats(value: Any, where: str) -> None:
    if isinstance(value, float):
        raise LedgerError(f"{where}: floats have no place in a signed record, use exact()")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise LedgerError(f"{where}: keys must be text, got {key!r}")
            _refuse_floats(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item, f"{where}[]")
    elif value is not None and not isinstance(value, str | int):
        raise LedgerError(f"{where}: cannot be recorded: {type(value).__name__}")
