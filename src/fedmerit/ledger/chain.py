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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fedmerit.errors import FedmeritError, FileFormatError, LedgerError
from fedmerit.identity import SERVER, Signer, canonical, commitment, content, content_of, verifies

# ---------------------------------------------------------------------------------------------- the ledger

LEDGER = "ledger.sqlite"
"""Name of the ledger in a run folder."""
START = bytes(32)
WAIT = 5.0
"""Seconds to wait while another process is writing."""
STEPS = 1_000_000
"""How many steps SQLite may take to open a file: a ledger needs a few dozen."""
HASH = r"\A[0-9a-f]{64}\Z"
ROW = 10
"""The least bytes of a row besides its cells."""
_TABLE = (
    "CREATE TABLE records (seq INTEGER PRIMARY KEY, author TEXT NOT NULL, kind TEXT NOT NULL, "
    "body BLOB NOT NULL, digest BLOB NOT NULL, signature BLOB NOT NULL, seal BLOB NOT NULL)"
)
_COLUMNS = {"author": str, "kind": str, "body": bytes, "digest": bytes, "signature": bytes, "seal": bytes}
_CELLS = ", ".join(("seq", *_COLUMNS))
_END = "pragma_user_version, pragma_application_id"
_ENDS = "user_version, application_id"
"""Two numbers in the file's header: how many records there are, and a part of the last digest (`_mark`)."""


def runs_below(folder: Path) -> str:
    """Return words for a message: which runs there are in a folder that holds none itself."""
    names = sorted(path.parent.name for path in folder.glob(f"*/{LEDGER}"))
    more = ", ..." if len(names) > 3 else ""
    return f"; there are runs in it: {', '.join(names[:3])}{more}" if names else ""


def scores_in(folder: Path) -> Path:
    """Return the file of reports in a run folder without a ledger."""
    if not (folder / "scores.json").is_file():
        raise FileFormatError(f"{folder} holds no run: no {LEDGER} and no scores.json{runs_below(folder)}")
    return folder / "scores.json"


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
        return self.withheld or commitment(self.body)

    @property
    def content(self) -> bytes:
        """The bytes that the author signed."""
        return content_of(self.author, self.kind, self.commitment)

    @property
    def name(self) -> str:
        return f"record {self.seq} ({self.kind} by {self.author})"


@contextmanager
def reading(record: Record) -> Iterator[None]:
    """Turn any error about a record's body into a LedgerError that names the record, unless it names one."""
    try:
        yield
    except FedmeritError as error:
        if isinstance(error, LedgerError) and error.record:
            raise
        code = error.code if isinstance(error, LedgerError) else ""
        raise LedgerError(f"{record.name}: {error}", record=record.seq, code=code) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"{record.name}: not a record of its kind: {error!r:.80}"
        raise LedgerError(problem, record=record.seq) from error


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
            with ExitStack() as unless_open:
                unless_open.callback(self._db.close)
                self._db.execute("PRAGMA trusted_schema=OFF")
                self._db.set_progress_handler(lambda: 1, STEPS)
                if not read_only:
                    self._db.execute("PRAGMA journal_mode=WAL")
                    self._db.execute("PRAGMA synchronous=FULL")
                self._check_schema()
                self._db.set_progress_handler(None, 0)
                unless_open.pop_all()
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(f"{self.path}: cannot be opened as a ledger: {error}") from error

    def _check_schema(self) -> None:
        """Raise LedgerError unless the file holds exactly the table of records, which a new file gets."""
        query = "SELECT type, name, sql FROM sqlite_master LIMIT 2"
        schema = self._db.execute(query).fetchall()
        if not schema and not self._read_only:
            self._db.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))
            schema = self._db.execute(query).fetchall()
        if schema != [("table", "records", _TABLE)]:
            held = ", ".join(f"{kind} {name!s:.40}" for kind, name, _ in schema) or "nothing"
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
        for file in (self._log, self.path):
            with suppress(FileNotFoundError):  # of the log, which its writer deletes
                size += file.stat().st_size
        return 2 * size + 2**20

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all records that are appended inside, or none."""
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
        """Append a record: ``signature`` is its author's, over :func:`content`; ``seal`` signs as the server.

        A record of the server without a signature is signed by ``seal`` too.
        """
        if not self._db.in_transaction:
            raise LedgerError("records are appended inside a transaction")
        if seal and author == SERVER and not signature:
            signature = seal(content(author, kind, body))
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
        room = self._most() if self._read_only else None
        if room is not None:
            self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, room)
        last, digest, count, mark = 0, START, 0, 0
        try:
            for row in self._execute(query, values):
                *cells, count, mark = row
                if room is not None:
                    room -= ROW + sum(len(cell) for cell in cells[1:] if isinstance(cell, str | bytes))
                    if room < 0:
                        raise self._damaged(f"after record {last}: its rows are longer than the file")
                record = parsed_record(*cells)
                yield record
                last, digest = record.seq, record.digest
        except (sqlite3.Error, OverflowError) as error:
            raise self._damaged(f"after record {last}: {error}") from error
        if kind is None and last:
            self._check_end(last, digest, count, mark)

    def _tip(self) -> tuple[int, bytes]:
        query = f"SELECT seq, digest, {_ENDS} FROM records, {_END} ORDER BY seq DESC LIMIT 1"  # noqa: S608
        try:
            row = self._execute(query).fetchone()
        except sqlite3.Error as error:
            raise self._damaged(str(error)) from error
        if row is None:
            row = (0, START, *self._execute(f"SELECT {_ENDS} FROM {_END}").fetchone())  # noqa: S608
        seq, digest, count, mark = row
        if not isinstance(digest, bytes) or len(digest) != len(START):
            raise self._damaged(f"the digest of record {seq}, the last one, is not a digest")
        self._check_end(seq, digest, count, mark)
        return int(seq), digest

    def _check_end(self, seq: int, digest: bytes, count: int, mark: int) -> None:
        """Raise LedgerError unless the header has the number and a part of the digest of the last record.

        A damaged page of the table can make the last records disappear, and what is left is a valid chain.
        """
        if (count, mark) != (seq, _mark(digest)):
            here = f"the last one here is record {seq}" if count != seq else "which is another one here"
            raise self._damaged(f"by its header it ends with record {count}, {here}")

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
    try:
        cells = (author, kind, body, digest, signature, seal)
        for (name, expected), cell in zip(_COLUMNS.items(), cells, strict=True):
            if not isinstance(cell, expected):
                raise ValueError(f"the {name} must be {expected.__name__}, got {type(cell).__name__}")
        parsed = _canonical_value(body)
        if not isinstance(parsed, dict):
            raise ValueError(f"expected an object as its body, got {type(parsed).__name__}")
    except (ValueError, RecursionError, LedgerError) as error:
        where = f"record {seq} ({kind!s:.40})"
        raise LedgerError(f"{where}: cannot be read: {error}", record=seq, code="unreadable") from error
    return Record(seq, author, kind, parsed, digest, signature, seal)


def _canonical_value(text: bytes) -> Any:
    value = json.loads(text)
    if canonical(value) != text:
        raise ValueError("not in canonical form")
    return value


def _mark(digest: bytes) -> int:
    """Return the part of a digest that fits into the file's header: 31 bits."""
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def link(previous: bytes, seq: int, content_: bytes, signature: bytes) -> bytes:
    """Return the digest of record ``seq``, which the server seals and the next record builds on."""
    parts = previous + seq.to_bytes(8, "big") + content_ + hashlib.sha256(signature).digest()
    return hashlib.sha256(b"fedmerit chain 1\0" + parts).digest()


def verified(records: Iterable[Record], keys: Callable[[Record], Mapping[str, bytes]]) -> Iterator[Record]:
    """Yield records in order; raise LedgerError at the first whose digest, signature or seal is wrong.

    ``keys`` returns the public keys by author, given the first record; none for an unsigned ledger.
    """
    previous = START
    raw: Mapping[str, bytes] | None = None
    for expected, record in enumerate(records, start=1):
        if record.seq != expected:
            raise LedgerError(
                f"record {expected} is missing: the next one is number {record.seq}",
                record=expected,
                code="missing",
            )
        signed = record.content
        digest = link(previous, record.seq, signed, record.signature)
        if digest != record.digest:
            raise LedgerError(
                f"{record.name}: this record was altered, or one before it was",
                record=expected,
                code="altered",
            )
        if raw is None:
            raw = keys(record)
        if raw:
            _check_signature(record, signed, raw)
            _check_signature(record, digest, raw, seal=True)
        elif record.signature or record.seal:
            raise LedgerError(
                f"{record.name}: signed, in a ledger whose first record names no keys", record=expected
            )
        yield record
        previous = digest


def _check_signature(record: Record, message: bytes, raw: Mapping[str, bytes], *, seal: bool = False) -> None:
    """Raise LedgerError unless the author signed the record, or the server sealed it."""
    author, signature = (SERVER, record.seal) if seal else (record.author, record.signature)
    if author not in raw:
        problem, code = f"{author!r} is not on the roster", "stranger"
    elif not verifies(raw[author], signature, message):
        problem, code = f"not signed by {author}", "unsealed" if seal else "unsigned"
    else:
        return
    where = f"{record.name}: seal" if seal else record.name
    raise LedgerError(f"{where}: {problem}", record=record.seq, code=code)


# -------------------------------------------------------------------------------------------------- copies

Bytes = Annotated[str, Meta(pattern=r"\A([0-9a-f]{2})*\Z")]


class _CopiedRecord(msgspec.Struct, forbid_unknown_fields=True):
    seq: int
    author: str
    kind: str
    digest: Bytes
    signature: Bytes
    seal: Bytes
    body: Any = UNSET
    withheld: Annotated[str, Meta(pattern=HASH)] | UnsetType = UNSET


def exported(ledger: Records, visible: Callable[[Record], bool] = lambda _: True) -> Iterator[bytes]:
    """Yield the lines of a copy, without the bodies that are not ``visible``."""
    for record in ledger.records():
        line: dict[str, Any] = {"seq": record.seq, "author": record.author, "kind": record.kind}
        line |= {name: getattr(record, name).hex() for name in ("digest", "signature", "seal")}
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
        return (record for record in self._records if kind is None or record.kind == kind)

    @property
    def head(self) -> str:
        return (self._records[-1].digest if self._records else START).hex()

    def __len__(self) -> int:
        return len(self._records)

    def _read(self, number: int, text: bytes) -> Record:
        try:
            line = msgspec.convert(_canonical_value(text), _CopiedRecord)
            if (line.body is UNSET) == (line.withheld is UNSET):
                raise ValueError("expected either body or withheld")
        except (ValueError, RecursionError, LedgerError) as error:
            raise LedgerError(
                f"{self.path}: line {number}: cannot be read: {error!s:.100}", code="unreadable"
            ) from error
        cells = (bytes.fromhex(cell) for cell in (line.digest, line.signature, line.seal))
        body = canonical({} if line.body is UNSET else line.body)
        record = parsed_record(line.seq, line.author, line.kind, body, *cells)
        return record if line.withheld is UNSET else replace(record, withheld=bytes.fromhex(line.withheld))


Records = Ledger | Copy
"""What is read and verified."""
