"""Names, keys, the roster, and the encoding of signed values, used by secure sums, protocol and ledger.

The roster is fixed before round 1 and its hash enters every mask and every signature, so a server cannot
swap a key without being caught. Only its owner may read a private key file: the file is written in one step
with mode 600, and refused if its mode is looser.

A roster file is TOML::

    format = "fedmerit roster 1"
    server = "ed25519:77ab..."  # the server's key; members of a run between machines refuse any other
    quorum = 4                  # optional: members who must sign the next roster; more than half unless given

    [[members]]
    name = "Hospital A"
    key = "ed25519:8f1c..."     # as `fedmerit keys new` printed it; 64 hexadecimal digits
    weight = 1200               # optional: this member's public weight

Between runs a roster can change. The next one states the hash of the one before it (``previous``) and carries
the ``signatures`` of its members, and the whole chain back to the first roster (``history``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerit.errors import KeyFileError, LedgerError
from fedmerit.notes import spelled, two_spellings
from fedmerit.scoring.types import written_number

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# ------------------------------------------------------------------------------- encoding of signed values
# Every value that is signed or hashed has one encoding: canonical JSON without floats.

DEEPEST = 32
"""Deepest nesting of a value that can be recorded."""
SERVER = "server"
Signer = Callable[[bytes], bytes]
"""Message -> signature with an Ed25519 key."""


def canonical(body: Any) -> bytes:
    """Return the only encoding of a value: ASCII JSON with sorted keys and no spaces; refuse floats.

    >>> canonical({"b": [1, None], "a": "é"})
    b'{"a":"\\\\u00e9","b":[1,null]}'
    """
    _refuse_floats(body, "record")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)
    return text.encode("ascii")


def seed_from(seed: int, *what: str | int) -> int:
    """Return a seed that depends only on another seed and on its purpose ``what``."""
    text = canonical(["fedmerit seed 1", seed, *what])
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def exact(value: float) -> str:
    """Return a float as text that reads back to the same bits.

    >>> exact(0.1), number(exact(0.1))
    ('0x1.999999999999ap-4', 0.1)
    """
    return float(value).hex()


def number(text: Any) -> float:
    """Return the float that :func:`exact` wrote; raise LedgerError for any other spelling."""
    try:
        value = float.fromhex(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise LedgerError(f"expected a number in hexadecimal, got {text!r:.60}") from error
    if exact(value) != text:
        raise LedgerError(f"expected a number as it is recorded, got {text!r:.60}")
    return value


def _refuse_floats(value: Any, where: str, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise LedgerError(f"{where:.80}: nested deeper than {DEEPEST} levels")
    if value is None or isinstance(value, (str, int)):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise LedgerError(f"{where}: keys must be text, got {key!r}")
            _refuse_floats(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item, f"{where}[]", depth + 1)
    elif isinstance(value, float):
        raise LedgerError(f"{where}: floats have no place in a signed record, use exact()")
    else:
        raise LedgerError(f"{where}: cannot be recorded: {type(value).__name__}")


def content(author: str, kind: str, body: Mapping[str, Any]) -> bytes:
    """Return what an author signs: a hash of author, kind and body, independent of the place in the chain."""
    return content_of(author, kind, commitment(body))


def commitment(body: Mapping[str, Any]) -> bytes:
    """Return the hash of a body. It reveals nothing about a body that has a ``salt``."""
    return hashlib.sha256(b"fedmerit body 1\0" + canonical(body)).digest()


def new_salt() -> str:
    """Return 128 random bits as hex, for a body that may be withheld from others."""
    return secrets.token_hex(16)


def content_of(author: str, kind: str, body: bytes) -> bytes:
    plain = canonical({"author": author, "kind": kind, "body": body.hex()})
    return hashlib.sha256(b"fedmerit record 2\0" + plain).digest()


# --------------------------------------------------------------------------------------------------- names
# A name is used on the roster, in records, in file names and in the keys of a checkpoint. A name that a run
# would refuse is refused when the roster is made, before the roster is handed out.

LONGEST_NAME = 64
NAME_BYTES = 200
"""Most bytes of a name, so that a file name has room for an ending."""
RESERVED_NAMES = (".", "..", "server")


def check_name(name: Any) -> None:
    """Raise KeyFileError unless a name looks the same to all readers and can be part of a file name.

    It must be short and printable, in Unicode's composed form (NFC), and without blanks at its ends.
    """
    good = (
        isinstance(name, str)
        and 1 <= len(name) <= LONGEST_NAME
        and name.isprintable()
        and name == name.strip()
        and name == unicodedata.normalize("NFC", name)
    )
    if not good:
        raise KeyFileError(
            f"a member's name must be 1 to {LONGEST_NAME} printable characters, got {name!r:.100}"
        )
    if {*name} & {*"/\\"} or name in RESERVED_NAMES:
        why = "it is part of file names: expected no / and no \\, and neither '.', '..' nor 'server'"
        raise KeyFileError(f"{name!r} cannot be a member's name, because {why}")
    if len(name.encode()) > NAME_BYTES:
        raise KeyFileError(f"{name!r} is longer than {NAME_BYTES} bytes")


def check_names(names: Sequence[str]) -> None:
    """Raise KeyFileError unless all names are valid and no two can be mixed up.

    >>> check_names(["Abbey", "Bridge", "ABBEY"])
    Traceback (most recent call last):
    ...
    fedmerit.errors.KeyFileError: expected names that nobody mixes up, got 'Abbey' and 'ABBEY', which differ \
only in case, blanks or letters that look the same
    """
    for name in names:
        check_name(name)
    if alike := two_spellings(names):
        first, second = spelled(*alike)
        raise KeyFileError(
            f"expected names that nobody mixes up, got {first} and {second}, which differ only in case, "
            "blanks or letters that look the same"
        )


# ------------------------------------------------------------------------------------- keys and the roster

FORMAT = "fedmerit roster 1"
PREFIX = "ed25519:"
MOST_MEMBERS = 1024
MOST_CHANGES = 200
"""Most rosters in a chain; a consortium that changes every month gets there in 16 years."""
MOST_BYTES = 1 << 20
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P)  # d in the curve equation of Ed25519 (RFC 8032, 5.1)


@dataclass(frozen=True)
class Member:
    """One entry of the roster."""

    name: str
    key: bytes  # raw Ed25519 public key, 32 bytes
    weight: float | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_key(self.name, self.key)
        weight = 0.0 if self.weight is None else self.weight
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (number and 0 <= weight <= 1e30):  # also if it is NaN
            raise KeyFileError(f"{self.name}: weight must be a number from 0 to 1e30, got {weight!r:.40}")


@dataclass(frozen=True)
class Roster:
    """The names and public keys of all members, and optionally public weights. Order does not matter.

    Args:
        members: at least one; either all or none of them have a weight.
        server: the server's public key. None is for rehearsals.
        previous: the roster before this one, whose members must have signed this one; or only its hash, if
            the chain is not known.
        quorum: how many members must sign the next roster; None for the smallest number above half of them.
        signatures: on this roster, of members of the roster before.
        stated: the hash that members signed, if it covers more than is known here.

    >>> Roster([Member("B", b"b" * 32), Member("A", b"a" * 32)]).names
    ('A', 'B')
    """

    members: tuple[Member, ...]
    server: bytes | None
    quorum: int | None
    previous: bytes | None  # the hash of the roster before
    before: Roster | None = field(compare=False, repr=False)
    signatures: Mapping[str, bytes] = field(compare=False, repr=False)
    stated: bytes | None = field(compare=False, repr=False)

    def __init__(
        self, members: Iterable[Member], server: bytes | None = None, previous: Roster | bytes | None = None,
        quorum: int | None = None, signatures: Mapping[str, bytes] | None = None, stated: bytes | None = None,
    ) -> None:  # fmt: skip
        before = previous if isinstance(previous, Roster) else None
        vars(self).update(
            members=tuple(sorted(members, key=lambda member: member.name)),
            server=server, quorum=quorum, before=before, signatures=dict(signatures or {}), stated=stated,
            previous=previous.hash if isinstance(previous, Roster) else previous,
        )  # fmt: skip
        self._check_members()
        if server is not None:
            _check_key(SERVER, server)
            if owner := next((member.name for member in self.members if member.key == server), ""):
                raise KeyFileError(f"the server's key is also that of {owner}")
        n = len(self.members)
        if quorum is not None and not (type(quorum) is int and n < 2 * quorum <= 2 * n):
            raise KeyFileError(
                f"quorum: expected a whole number above half of the {n} members and not above all of them, "
                f"got {quorum!r:.40}"
            )
        if before is not None:
            self._check_signed(before)

    def _check_members(self) -> None:
        if not 1 <= len(self.members) <= MOST_MEMBERS:
            raise KeyFileError(f"a roster has 1 to {MOST_MEMBERS} members, got {len(self.members)}")
        owners: dict[bytes, str] = {}
        for member in self.members:
            if self.names.count(member.name) > 1:
                raise KeyFileError(f"{member.name}: on the roster twice")
            if (owner := owners.setdefault(member.key, member.name)) != member.name:
                raise KeyFileError(f"{owner}: shares its key with another member of the roster")
        check_names(self.names)
        if len({member.weight is None for member in self.members}) > 1:
            raise KeyFileError("expected a weight for every member of the roster or for none")

    def _check_signed(self, before: Roster) -> None:
        check_signed(before, self, self.signatures)
        if len(self.signatures) < before.needed:
            raise KeyFileError(
                f"{len(self.signatures)} of the {len(before.members)} members of the roster before it signed "
                f"this roster ({', '.join(self.signatures) or 'nobody'}): {before.needed} must"
            )
        if len(before.chain) > MOST_CHANGES:
            raise KeyFileError(f"a roster changes at most {MOST_CHANGES} times")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def weights(self) -> dict[str, float] | None:
        """Public weights by name, or None if the roster has none."""
        pairs = {member.name: member.weight for member in self.members if member.weight is not None}
        return pairs or None

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the roster's content, the same for every order of the members."""
        if self.stated is not None:
            return self.stated
        rows = [[m.name, m.key.hex(), None if m.weight is None else float(m.weight)] for m in self.members]
        server, previous = self.server and self.server.hex(), self.previous and self.previous.hex()
        optional = {"server": server, "quorum": self.quorum, "previous": previous}
        more = {key: value for key, value in optional.items() if value is not None}
        whole = [FORMAT, rows, *([more] if more else ())]
        text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).digest()

    @property
    def needed(self) -> int:
        """How many members must sign the next roster."""
        return len(self.members) // 2 + 1 if self.quorum is None else self.quorum

    @cached_property
    def chain(self) -> tuple[Roster, ...]:
        """This roster and all before it, the newest first."""
        return (self, *(() if self.before is None else self.before.chain))

    @property
    def lineage(self) -> str:
        """The hash of the first roster of the chain, by which members remember a federation, as hex."""
        first = self.chain[-1]
        if first.previous is not None:
            raise KeyFileError(f"the roster before {first.hash.hex()} is not known: {first.previous.hex()}")
        return first.hash.hex()

    def key(self, name: str) -> bytes:
        for member in self.members:
            if member.name == name:
                return member.key
        raise KeyFileError(f"{name!r} is not on the roster")

    def verifies(self, name: str, signature: bytes, message: bytes) -> bool:
        return verifies(self.key(name), signature, message)


def signed_as(roster: Roster) -> bytes:
    """Return what members of the roster before sign: the hash of this one, which states that of theirs."""
    return b"fedmerit roster change 1\0" + roster.hash


def check_signed(old: Roster, new: Roster, signatures: Mapping[str, bytes]) -> None:
    """Raise KeyFileError unless these are signatures on the new roster by members of the old one."""
    for name, signature in signatures.items():
        if name not in old.names:
            raise KeyFileError(f"{name!r:.70} signed, but is not on the roster before it")
        if not old.verifies(name, signature, signed_as(new)):
            raise KeyFileError(f"the signature of {name} is not by its key on the roster before it")


def new_key(path: str | os.PathLike[str]) -> bytes:
    """Make an identity key, write it to a new file with mode 600, and return the public key.

    The file appears complete or not at all. An existing file is never overwritten, because a lost identity
    cannot be recovered.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = Path(path)
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_new(path, pem, 0o600)
    return public_key(key)


def load_key(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """Read an identity key; refuse a file that anybody but its owner can access."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(MOST_BYTES)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot read the private key: {error.strerror}") from None
    if b"PRIVATE KEY-----" in data and os.name == "posix" and mode & 0o077:
        raise KeyFileError(f"{path}: a private key must have mode 600, got {mode:o}; run: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError):
        key = None  # the parser's message may quote the file, so it is not shown
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(f"{path}: expected an unencrypted Ed25519 private key in PEM form")
    return key


def public_key(key: Ed25519PrivateKey) -> bytes:
    """Return the public key of a private key: the 32 bytes that the roster holds."""
    return key.public_key().public_bytes_raw()


@lru_cache(maxsize=4096)  # in a rehearsal every member checks the same signatures in one process
def verifies(key: bytes, signature: bytes, message: bytes) -> bool:
    """Return whether the owner of this public key signed this message; False if the key is not valid."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def write_roster(path: str | os.PathLike[str], roster: Roster) -> None:
    table = {"format": FORMAT, **stated(roster, roster.signatures, roster.before)}
    write_new(Path(path), toml_of(table).encode())


def stated(roster: Roster, signatures: Mapping[str, bytes], before: Roster | None = None) -> dict[str, Any]:
    """Return a roster as the table of a file, with its history if the roster before it is given."""
    table: dict[str, Any] = {}
    if roster.server is not None:
        table["server"] = PREFIX + roster.server.hex()
    if roster.quorum is not None:
        table["quorum"] = roster.quorum
    if roster.previous is not None:
        table["previous"] = roster.previous.hex()
    table["members"] = [
        {"name": member.name, "key": PREFIX + member.key.hex()}
        | ({} if member.weight is None else {"weight": float(member.weight)})
        for member in roster.members
    ]
    if roster.previous is not None:
        table["signatures"] = [
            {"name": name, "signature": signature.hex()} for name, signature in signatures.items()
        ]
    if before is not None:
        table["history"] = [stated(earlier, earlier.signatures) for earlier in before.chain[::-1]]
    return table


def toml_of(table: Mapping[str, Any], under: str = "") -> str:
    """Return a table as TOML: for every valid name, a JSON string or number is also one in TOML."""
    plain = {key: value for key, value in table.items() if not isinstance(value, list)}
    lines = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in plain.items())
    return lines + "".join(
        f"\n[[{under}{key}]]\n{toml_of(row, f'{under}{key}.')}"
        for key, rows in table.items()
        if isinstance(rows, list)
        for row in rows
    )


def read_roster(path: str | os.PathLike[str]) -> Roster:
    """Read a roster file; refuse unknown fields, duplicates, malformed keys, and unsigned changes."""
    table, before = read_history(path, FORMAT)
    with named(path):
        return roster_of(table, before)


def read_history(path: str | os.PathLike[str], form: str) -> tuple[dict[str, Any], Roster | None]:
    """Return the table in a roster file without its history, and the last roster in that history."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot read the roster: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise KeyFileError(f"{path}: a roster has at most {MOST_BYTES} bytes")
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise KeyFileError(f"{path}: not a roster file: {error}") from None
    with named(path):
        if table.pop("format", None) != form:
            raise KeyFileError(f"expected a roster file with format = {form!r}")
        history, before = table.pop("history", []), None
        if not isinstance(history, list) or len(history) > MOST_CHANGES:
            raise KeyFileError(f"history: expected at most {MOST_CHANGES} earlier rosters")
        for row in history:
            before = roster_of(row, before)
    return table, before


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the name of a file in front of errors about it."""
    try:
        yield
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from None


def roster_of(row: Any, before: Roster | bytes | None) -> Roster:
    """Return one roster of a file, which follows the one before it."""
    fields = {"members", "server", "quorum", "previous", "signatures"}
    if not isinstance(row, Mapping) or not set(row) <= fields or not isinstance(row.get("members"), list):
        got = ", ".join(map(str, row)) if isinstance(row, Mapping) else repr(row)
        raise KeyFileError(f"expected format and [[members]], perhaps server and quorum, got {got:.200}")
    previous = before.hash if isinstance(before, Roster) else before
    if row.get("previous") != (previous and previous.hex()):
        raise KeyFileError(
            f"states {row.get('previous')!r:.70} as the hash of the roster before it, its history ends with "
            f"{previous.hex() if previous else 'nothing'}"
        )
    server = row.get("server")
    return Roster(
        (_member(member) for member in row["members"]),
        None if server is None else parse_key(SERVER, server),
        before,
        row.get("quorum"),
        signatures_of(row),
    )


def signatures_of(row: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the signatures in the table of a roster, by name."""
    signatures: dict[str, bytes] = {}
    rows = row.get("signatures", [])
    for signed in rows if isinstance(rows, list) else [rows]:
        match signed:
            case {"name": str(name), "signature": str(text)} if re.fullmatch("[0-9a-f]{128}", text):
                if name in signatures:
                    raise KeyFileError(f"{name!r:.70} signed twice")
                signatures[name] = bytes.fromhex(text)
            case _:
                raise KeyFileError(f"a signature has a name and 128 hexadecimal digits, got {signed!r:.200}")
    return signatures


def parse_member(text: str) -> Member:
    """Return a member from NAME=ed25519:PUBLICKEY or NAME=ed25519:PUBLICKEY,WEIGHT, as in commands.

    >>> parse_member("Hospital A=ed25519:" + 32 * "0f" + ",1200").weight
    1200.0
    """
    name, equals, rest = text.rpartition("=")
    key, comma, weight = rest.partition(",")
    if not equals:
        raise KeyFileError(f"expected NAME={PREFIX}PUBLICKEY or NAME={PREFIX}PUBLICKEY,WEIGHT, got {text!r}")
    row: dict[str, Any] = {"name": name, "key": key}
    try:
        return _member(row | {"weight": written_number(weight)} if comma else row)
    except ValueError:
        raise KeyFileError(f"{name}: weight must be a number from 0 to 1e30, got {weight!r}") from None


def _member(row: Any) -> Member:
    if not isinstance(row, Mapping) or not {"name", "key"} <= set(row) <= {"name", "key", "weight"}:
        raise KeyFileError(f"a member has a name, a key and perhaps a weight, got {row!r}")
    check_name(row["name"])
    return Member(row["name"], parse_key(row["name"], row["key"]), row.get("weight"))


def parse_key(name: str, text: Any) -> bytes:
    """Return a public key from ed25519:PUBLICKEY; ``name`` says whose it is, for the error."""
    if not isinstance(text, str) or not re.fullmatch(f"{PREFIX}(?:[0-9a-fA-F]{{2}})*", text):
        raise KeyFileError(f"{name}: key must read {PREFIX} and 64 hexadecimal digits")
    raw = bytes.fromhex(text.removeprefix(PREFIX))
    _check_key(name, raw)
    return raw


def _check_key(name: str, key: Any) -> None:
    if not isinstance(key, bytes) or len(key) != 32:
        raise KeyFileError(f"{name}: a public key has 32 bytes")
    if _small_order(key):
        raise KeyFileError(
            f"{name}: {PREFIX}{key.hex()} protects nothing: anybody can make signatures that verify under "
            "it; make a key with `fedmerit keys new`"
        )


def _small_order(key: bytes) -> bool:
    r"""Return whether a public key is one of the eight points whose order divides 8, in any encoding.

    The lower 255 bits are y, perhaps not reduced modulo :math:`p`; the highest bit is the sign of x. On the
    curve :math:`-x^2 + y^2 = 1 + d x^2 y^2`, points of order 1 and 2 have :math:`y = \pm 1`, and points of
    order 4 have :math:`y = 0`. Twice a point of order 8 has :math:`y = 0`, so the point itself has
    :math:`x^2 = -y^2`, and the curve equation becomes:

    .. math:: d y^4 + 2 y^2 - 1 = 0
    """
    y = (int.from_bytes(key, "little") & (1 << 255) - 1) % _P
    return y * (y * y - 1) * (_D * y**4 + 2 * y * y - 1) % _P == 0


@contextmanager
def drafted(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """Write data to a new file beside ``path``, which is to take its place here; nothing of it is left."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        with suppress(OSError):  # on a disk that cannot be written, nothing was left
            draft.unlink(missing_ok=True)


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Create a file in one step: complete, with its mode from the start, and never over an existing file."""
    if not path.name:
        raise KeyFileError(f"{path}: expected the name of a file, got a folder")
    try:
        with drafted(path, data, mode) as draft:
            os.link(draft, path)  # unlike a rename, fails if the name is taken
    except FileExistsError:
        raise KeyFileError(f"{path}: exists already and is not overwritten") from None
    except OSError as error:
        raise KeyFileError(f"{path}: cannot write: {error.strerror}") from None


# ------------------------------------------------------------------------------------- changes of a roster
# Between two runs, members may join, leave or replace a key, and the server may get another key. Somebody
# writes the new roster and proposes it. Members of the old roster sign the change, each on its own machine.
# As soon as enough of them have signed (``Roster.needed``), it is adopted: the new roster file holds the
# signatures and all rosters before it. A member follows no other change. See docs/operations.md.

CHANGE = "fedmerit roster change 1"


@dataclass(frozen=True)
class Change:
    """A roster that is proposed in place of another, with the signatures that it has so far.

    Raises:
        KeyFileError: somebody signed who is not on the old roster, or a signature is not that member's.
    """

    old: Roster
    new: Roster
    signatures: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_signed(self.old, self.new, self.signatures)

    @classmethod
    def proposed(cls, old: Roster, new: Roster) -> Change:
        """Return the change from one roster to another, which nobody has signed yet."""
        if new.previous is not None:
            raise KeyFileError(
                "the new roster states one before it: expected a file as `fedmerit keys roster` writes it"
            )
        if new == Roster(old.members, old.server, quorum=old.quorum):
            raise KeyFileError("the new roster is the old one: there is nothing to sign")
        return cls(old, Roster(new.members, new.server, old.hash, new.quorum))

    @property
    def missing(self) -> int:
        """How many signatures are still missing."""
        return max(0, self.old.needed - len(self.signatures))

    def signed(self, key: Ed25519PrivateKey) -> Change:
        """Return the change with one more signature; its author must be on the old roster."""
        for member in self.old.members:
            if member.key == public_key(key):
                return self._with({member.name: key.sign(signed_as(self.new))})
        raise KeyFileError("this is not the key of a member on the old roster, and only those sign")

    def joined(self, other: Change) -> Change:
        """Return the change with the signatures of both."""
        if other.new.hash != self.new.hash:
            raise KeyFileError(
                f"expected signatures on one new roster, got those on {self.new.hash.hex()} and on "
                f"{other.new.hash.hex()}"
            )
        return self._with(other.signatures)

    def _with(self, more: Mapping[str, bytes]) -> Change:
        return Change(self.old, self.new, dict(sorted({**self.signatures, **more}.items())))

    def adopted(self) -> Roster:
        """Return the new roster with its chain; raise KeyFileError if too few have signed."""
        return Roster(self.new.members, self.new.server, self.old, self.new.quorum, self.signatures)

    def text(self) -> str:
        return toml_of({"format": CHANGE, **stated(self.new, self.signatures, self.old)})

    def differences(self) -> Iterator[str]:
        """Yield what changes, one line each."""
        before = {member.name: member for member in self.old.members}
        after = {member.name: member for member in self.new.members}
        for name in sorted({*before, *after}):
            old, new = before.get(name), after.get(name)
            if new is None:
                yield f"{name} leaves"
            elif old is None:
                yield f"{name} joins  {PREFIX}{new.key.hex()}"
            elif old.key != new.key:
                yield f"{name} has a new key  {PREFIX}{new.key.hex()}, not {PREFIX}{old.key.hex()}"
            if old and new and old.weight != new.weight:
                yield f"{name} has another weight: {_weight(new.weight)}, not {_weight(old.weight)}"
        if self.old.server != self.new.server:
            yield f"the server has a new key  {_key(self.new.server)}, not {_key(self.old.server)}"
        if self.old.needed != self.new.needed:
            yield (
                f"the next change needs {self.new.needed} of {len(after)} members, not {self.old.needed} of "
                f"{len(before)}"
            )


def _weight(weight: float | None) -> str:
    return "none" if weight is None else f"{weight:g}"


def _key(key: bytes | None) -> str:
    return "none" if key is None else PREFIX + key.hex()


def read_change(path: str | os.PathLike[str]) -> Change:
    """Read a proposed change of a roster, with the signatures it has so far."""
    table, old = read_history(path, CHANGE)
    with named(path):
        if old is None:
            raise KeyFileError("expected the old roster in [[history]]")
        given = signatures_of(table)
        return Change(old, roster_of({**table, "signatures": []}, old.hash), given)
