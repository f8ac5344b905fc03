"""The ledger: an append-only SQLite table of records, each signed by its author and chained by hash.

A record has an ``author`` (the server or a member), a ``kind`` and a ``body``. The author signs the content,
and the server seals the record's place in the chain::

    body_k    = SHA-256("fedmerit body 1" 0 canonical(body))
    content_k = SHA-256("fedmerit record 2" 0 canonical({author, kind, body_k}))
    signed_k  = SHA-256(the author's signature of content_k)
    digest_k  = SHA-256("fedmerit chain 1" 0 digest_{k-1} k content_k signed_k), which the server seals

Altering, dropping, swapping or inserting a record therefore changes every later digest, and the last digest
(the head) stands for the whole ledger. Bodies hold no floats: :func:`exact` writes numbers that must be read
back exactly as hexadecimal strings. Without secure aggregation there are no keys. The chain is then unsigned,
and verification says so.

Only the hash of a body enters the chain. A copy for a member who may not see a body holds that hash in its
place. Digests, signatures and seals are those of the original, so the author, kind and place of every record
can still be checked. Bodies that may be withheld carry a ``salt`` of 128 random bits, drawn by their author.
The hash is then a commitment: it cannot be opened to another body, and nobody can confirm a guess with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, Signer, canonical, commitment, content, content_of
from fedmerit.identity import exact as exact
from fedmerit.identity import number as number
from fedmerit.scoring.files import runs_below

# ---------------------------------------------------------------------------------------------- the ledger

START = bytes(32)
WAIT = 5.0
"""Seconds to wait while another process is writing."""
STEPS = 1_000_000
"""How many steps SQLite may take to open a file: a ledger needs a few dozen."""
ROW = 10
"""The least bytes of a row besides its cells."""
_TABLE = (
    "CREATE TABLE records (seq INTEGER PRIMARY KEY, author TEXT NOT NULL, kind TEXT NOT NULL, "
    "body BLOB NOT NULL, digest BLOB NOT NULL, signature BLOB NOT NULL, seal BLOB NOT NULL)"
)
_CELLS = "seq, author, kind, body, digest, signature, seal"
_END = "pragma_user_version, pragma_application_id"
_ENDS = "user_version, application_id"
"""Two numbers in the file's header: how many records there are, and a part of the last digest (`_mark`)."""


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
    withheld: bytes = b""  # in a copy: the hash of a body that its reader may not see

    @property
    def commitment(self) -> bytes:
        """The hash of the body."""
        return self.withheld or commitment(self.body)

    @property
    def content(self) -> bytes:
        """The bytes that the author signed."""
        return content_of(self.author, self.kind, self.commitment)

    @property
    def name(self) -> str:
        """The record's name in messages."""
        return f"record {self.seq} ({self.kind} by {self.author})"


class Records(Protocol):
    """A ledger or a copy of one, to be read and verified."""

    path: Path

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """Yield all records in order, or those of one kind."""

    @property
    def head(self) -> str:
        """The last digest, as hex."""

    def __len__(self) -> int: ...


def _create(path: Path) -> None:
    """Make an empty ledger that only its owner can read; a crash never leaves a partial one.

    If another process was quicker, its ledger counts. Where files have one name only, the file is made empty.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with suppress(OSError, sqlite3.Error):
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o600))
        with closing(sqlite3.connect(temporary)) as made:
            made.execute("PRAGMA journal_mode=MEMORY")  # without a second file
            made.execute(_TABLE)
        os.link(temporary, path)
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
        os.close(os.open(path, os.O_CREAT, 0o600))  # SQLite gives -wal and -shm the mode of the file


class Ledger:
    """The records of one run. Use it as a context manager, and write inside :meth:`transaction`.

    A file that somebody else wrote is only data: it must hold the table of records and nothing else (no view,
    trigger or virtual table), and reading it costs no more than its size.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path, self._read_only = Path(path), read_only
        if read_only and not self.path.exists():
            folder = self.path.parent
            none = f" holds no run: no {self.path.name}{runs_below(folder)}"
            raise LedgerError(f"{folder}{none if folder.is_dir() else ': no such folder'}")
        if not read_only and not self.path.exists():
            _create(self.path)
        address = self.path.absolute().as_uri()
        if read_only:  # without a log nobody is writing: read the file alone, even on read-only media
            address += "?mode=ro" if self._log.exists() else "?immutable=1"
        try:
            self._db = sqlite3.connect(address, uri=True, isolation_level=None, timeout=WAIT)
        except sqlite3.Error as error:
            raise LedgerError(f"{self.path}: cannot be opened as a ledger: {error}") from error
        try:
            self._db.execute("PRAGMA trusted_schema=OFF")
            self._db.set_progress_handler(lambda: 1, STEPS)
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
            self._check_schema()
            self._db.set_progress_handler(None, 0)
        except (sqlite3.Error, OSError) as error:
            self._db.close()
            raise LedgerError(f"{self.path}: cannot be opened as a ledger: {error}") from error
        except LedgerError:
            self._db.close()
            raise

    def _check_schema(self) -> None:
        """Raise LedgerError unless the file holds exactly the table of records, which a new file gets."""
        query = "SELECT type, name, sql FROM sqlite_master LIMIT 2"
        found = self._db.execute(query).fetchall()
        if not found and not self._read_only:
            self._db.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))
            found = self._db.execute(query).fetchall()
        if found != [("table", "records", _TABLE)]:
            held = ", ".join(f"{kind} {name!s:.40}" for kind, name, _ in found) or "nothing"
            raise LedgerError(
                f"{self.path}: cannot be opened as a ledger: expected the table of records and nothing else, "
                f"got {held}",
                code="schema",
            )

    @property
    def _log(self) -> Path:
        return self.path.with_name(self.path.name + "-wal")

    def _most(self) -> int:
        """Return how many bytes rows may have together: far more than fit into the file and its log.

        Rows that are longer come from pages that are used more than once. A process may be writing meanwhile.
        """
        size = 0
        for one in (self._log, self.path):
            with suppress(FileNotFoundError):  # of the log, which its writer deletes
                size += one.stat().st_size
        return 2 * size + 2**20

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all records that are appended inside, or none of them."""
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite may have rolled back already, for example on a full disk
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
        """Append a record. ``signature`` is its author's, over :func:`content`; ``seal`` signs as server."""
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
        self._execute(f"PRAGMA user_version = {record.seq}")
        self._execute(f"PRAGMA application_id = {_mark(digest)}")
        return record

    @property
    def head(self) -> str:
        """The last digest, as hex; it stands for the whole ledger."""
        return self._tip()[1].hex()

    def __len__(self) -> int:
        return self._tip()[0]

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """Yield all records in order, or those of one kind. Bodies are parsed, but nothing is verified."""
        where, values = ("WHERE kind = ?", (kind,)) if kind else ("", ())
        query = f"SELECT {_CELLS}, {_ENDS} FROM records, {_END} {where} ORDER BY seq"  # noqa: S608 - no outside text
        left = self._most() if self._read_only else None
        if left is not None:
            self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, left)
        rows = self._execute(query, values)
        last, digest, kept, mark = 0, START, 0, 0
        while True:
            try:
                row = rows.fetchone()
            except (sqlite3.Error, OverflowError) as error:
                raise self._damaged(f"after record {last}: {error}") from error
            if row is None:
                break
            *cells, kept, mark = row
            if left is not None:
                left -= ROW + sum(len(cell) for cell in cells[1:] if isinstance(cell, str | bytes))
                if left < 0:
                    raise self._damaged(f"after record {last}: its rows are longer than the file")
            found = parsed_record(*cells)
            yield found
            last, digest = found.seq, found.digest
        if kind is None and last:
            self._check_end(last, digest, kept, mark)

    def _tip(self) -> tuple[int, bytes]:
        """Return the last record's number and digest; raise LedgerError if the file's header differs."""
        query = f"SELECT seq, digest, {_ENDS} FROM records, {_END} ORDER BY seq DESC LIMIT 1"  # noqa: S608
        try:
            row = self._execute(query).fetchone()
        except sqlite3.Error as error:
            raise self._damaged(str(error)) from error
        if row is None:
            row = (0, START, *self._execute(f"SELECT {_ENDS} FROM {_END}").fetchone())  # noqa: S608
        seq, digest, kept, mark = row
        if not isinstance(digest, bytes) or len(digest) != len(START):
            raise self._damaged(f"the digest of record {seq}, the last one, is not a digest")
        self._check_end(seq, digest, kept, mark)
        return int(seq), digest

    def _check_end(self, seq: int, digest: bytes, kept: int, mark: int) -> None:
        """Raise LedgerError if the header of the file names another last record.

        A damaged page of the table can make the last records disappear, and what is left is a valid chain.

        Args:
            seq: number of the last record.
            digest: its digest.
            kept: number of the last record, according to the header.
            mark: part of that record's digest, according to the header.
        """
        if (kept, mark) != (seq, _mark(digest)):
            here = f"the last one here is record {seq}" if kept != seq else "which is another one here"
            raise self._damaged(f"by its header it ends with record {kept}, {here}")

    def _damaged(self, how: str) -> LedgerError:
        return LedgerError(f"{self.path}: damaged: {how}", code="damaged")

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except (sqlite3.Error, UnicodeEncodeError) as error:
            raise LedgerError(f"{self.path}: {error}") from error


def parsed_record(
    seq: int, author: Any, kind: Any, body: Any, digest: Any, signature: Any, seal: Any
) -> Record:
    """Return a row as a record; raise LedgerError if a cell has a wrong type or the body is not canonical."""
    where = f"record {seq} ({kind!s:.40})"
    if not isinstance(author, str) or not isinstance(kind, str):
        raise LedgerError(f"{where}: author and kind must be text", record=seq, code="unreadable")
    for name, cell in (("body", body), ("digest", digest), ("signature", signature), ("seal", seal)):
        if not isinstance(cell, bytes):
            raise LedgerError(
                f"{where}: the {name} must be bytes, got {type(cell).__name__}", record=seq, code="unreadable"
            )
    try:
        parsed = json.loads(body)
        if canonical(parsed) != body:
            raise ValueError("not in canonical form")
        if not isinstance(parsed, dict):
            raise ValueError(f"expected an object, got {type(parsed).__name__}")
    except (ValueError, RecursionError, LedgerError) as error:
        raise LedgerError(
            f"{where}: the body cannot be read: {error}", record=seq, code="unreadable"
        ) from error
    return Record(seq, author, kind, parsed, digest, signature, seal)


def _mark(digest: bytes) -> int:
    """Return the part of a digest that fits into the file's header: 31 bits."""
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def link(previous: bytes, seq: int, content_: bytes, signature: bytes) -> bytes:
    """Return the digest of record ``seq``, which the server seals and the next record builds on."""
    parts = previous + seq.to_bytes(8, "big") + content_ + hashlib.sha256(signature).digest()
    return hashlib.sha256(b"fedmerit chain 1\0" + parts).digest()


def verify_chain(ledger: Records, keys: Callable[[Record], Mapping[str, bytes]]) -> bool:
    """Raise LedgerError at the first record whose digest, signature or seal is wrong.

    Args:
        ledger: the ledger, or a copy.
        keys: returns the public keys by author (including the server's), given the first record; an empty
            mapping for an unsigned ledger.

    Returns:
        Whether the ledger is signed.
    """
    previous, known, check = START, None, _Signatures({})
    for expected, record in enumerate(ledger.records(), start=1):
        if record.seq != expected:
            raise LedgerError(
                f"record {expected} is missing: the next one is number {record.seq}",
                record=expected,
                code="missing",
            )
        said = record.content
        digest = link(previous, record.seq, said, record.signature)
        if digest != record.digest:
            raise LedgerError(
                f"{record.name}: this record was altered, or one before it was",
                record=expected,
                code="altered",
            )
        if known is None:
            known = keys(record)
            check = _Signatures(known)
        if known:
            check(record.author, record.signature, said, record.name, expected, "unsigned")
            check(SERVER, record.seal, digest, f"{record.name}: seal", expected, "unsealed")
        elif record.signature or record.seal:
            raise LedgerError(
                f"{record.name}: signed, in a ledger whose first record names no keys", record=expected
            )
        previous = digest
    if known is None:
        raise LedgerError(f"{ledger.path}: the ledger is empty")
    return bool(known)


class _Signatures:
    """The keys of known authors, ready to check signatures."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._raw = keys
        self._keys: dict[str, Any] = {}

    def __call__(
        self, author: str, signature: bytes, message: bytes, where: str, record: int, code: str
    ) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if author not in self._raw:
            raise LedgerError(f"{where}: {author!r} is not on the roster", record=record, code="stranger")
        if author not in self._keys:
            try:
                self._keys[author] = Ed25519PublicKey.from_public_bytes(self._raw[author])
            except ValueError as error:
                raise LedgerError(
                    f"{where}: the key of {author!r} on the roster is not an Ed25519 key",
                    record=record,
                    code="stranger",
                ) from error
        try:
            self._keys[author].verify(signature, message)
        except InvalidSignature as error:
            raise LedgerError(f"{where}: not signed by {author}", record=record, code=code) from error


# -------------------------------------------------------------------------------------------------- copies

_FIELDS = {"seq", "author", "kind", "digest", "signature", "seal"}


def exported(ledger: Records, visible: Callable[[Record], bool] = lambda _: True) -> Iterator[bytes]:
    """Yield the lines of a copy, without the bodies that are not ``visible``."""
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
    """A copy of a ledger in memory, with the reading methods of a ledger."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot be read: {error}") from error
        if lines.pop():
            raise LedgerError(f"{self.path}: the last line is incomplete", code="damaged")
        self._records = [self._read(number, line) for number, line in enumerate(lines, start=1)]

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """Return all records in order, or those of one kind."""
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
            raise LedgerError(f"{where}: cannot be read: {error!s:.100}", code="unreadable") from error
        if not isinstance(found, dict) or set(found) not in (_FIELDS | {"body"}, _FIELDS | {"withheld"}):
            raise LedgerError(
                f"{where}: expected the fields of a record, and either body or withheld", code="unreadable"
            )
        hexadecimal = {"withheld": "", **found}
        try:
            raw = {
                key: bytes.fromhex(hexadecimal[key]) for key in ("digest", "signature", "seal", "withheld")
            }
            if any(hexadecimal[key] != value.hex() for key, value in raw.items()):
                raise ValueError("not lower-case hexadecimal")
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"{where}: its hashes or signatures cannot be read: {error!s:.60}", code="unreadable"
            ) from error
        withheld = raw.pop("withheld")
        if type(found["seq"]) is not int or ("withheld" in found and len(withheld) != 32):
            raise LedgerError(f"{where}: expected a number and a hash of 32 bytes", code="unreadable")
        body = canonical(found.get("body", {}))
        record = parsed_record(found["seq"], found["author"], found["kind"], body, **raw)
        if not withheld:
            return record
        return Record(**{**vars(record), "withheld": withheld})
