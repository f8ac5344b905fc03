"""Names, keys, the roster, and the encoding of signed values, used by secure sums, protocol and ledger.

The roster is fixed before round 1 and its hash enters every mask and every signature, so a server cannot
swap a key without being caught. Only its owner may read a private key file: the file is written in one step
with mode 600, and refused if its mode is looser.

A roster file is TOML (or the same content as JSON)::

    format = "fedmerit roster 1"

    [[members]]
    name = "Hospital A"
    key = "ed25519:8f1c..."     # as `fedmerit keys new` printed it; 64 hexadecimal digits
    weight = 1200               # optional: this member's public weight
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import stat
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerit.errors import KeyFileError, LedgerError
from fedmerit.scoring.validate import spelled, two_spellings, written_number

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = [
    "Member",
    "Roster",
    "load_key",
    "new_key",
    "parse_member",
    "public_key",
    "read_roster",
    "verifies",
    "write_roster",
]

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
        found = float.fromhex(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise LedgerError(f"expected a number in hexadecimal, got {text!r:.60}") from error
    if exact(found) != text:
        raise LedgerError(f"expected a number as it is recorded, got {text!r:.60}")
    return found


def _refuse_floats(value: Any, where: str, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise LedgerError(f"{where:.80}: nested deeper than {DEEPEST} levels")
    if isinstance(value, float):
        raise LedgerError(f"{where}: floats have no place in a signed record, use exact()")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise LedgerError(f"{where}: keys must be text, got {key!r}")
            _refuse_floats(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item, f"{where}[]", depth + 1)
    elif value is not None and not isinstance(value, str | int):
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
# One check of members' names for the roster and for a run's settings. A name is used on the roster, in
# records, in file names (keys, statements) and in the keys of a checkpoint. A name that a run would refuse
# is refused when the roster is made, before the roster is handed out.

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
    if any(character in name for character in "/\\") or name in RESERVED_NAMES:
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
only in case, blanks or how letters are composed
    """
    for name in names:
        check_name(name)
    twice = two_spellings(names)
    if twice:
        one, other = spelled(*twice)
        alike = "differ only in case, blanks or how letters are composed"
        raise KeyFileError(f"expected names that nobody mixes up, got {one} and {other}, which {alike}")


# ------------------------------------------------------------------------------------- keys and the roster

FORMAT = "fedmerit roster 1"
PREFIX = "ed25519:"
MOST_MEMBERS = 1024
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
        if not isinstance(self.key, bytes) or len(self.key) != 32:
            raise KeyFileError(f"{self.name}: a public key has 32 bytes")
        if _small_order(self.key):
            raise KeyFileError(
                f"{self.name}: {PREFIX}{self.key.hex()} protects nothing: anybody can make signatures that "
                "verify under it; make a key with `fedmerit keys new`"
            )
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight >= 0):
            raise KeyFileError(f"{self.name}: weight must be a number of at least 0, got {self.weight}")


@dataclass(frozen=True)
class Roster:
    """The names and public keys of all members, and optionally public weights. Order does not matter.

    >>> Roster([Member("B", b"b" * 32), Member("A", b"a" * 32)]).names
    ('A', 'B')
    """

    members: tuple[Member, ...]

    def __init__(self, members: Iterable[Member]) -> None:
        ordered = tuple(sorted(members, key=lambda member: member.name))
        object.__setattr__(self, "members", ordered)
        if not 1 <= len(ordered) <= MOST_MEMBERS:
            raise KeyFileError(f"a roster has 1 to {MOST_MEMBERS} members, got {len(ordered)}")
        names, keys = [m.name for m in ordered], [m.key for m in ordered]
        for member in ordered:
            if names.count(member.name) > 1:
                raise KeyFileError(f"{member.name}: on the roster twice")
            if keys.count(member.key) > 1:
                raise KeyFileError(f"{member.name}: shares its key with another member of the roster")
        check_names(names)
        if len({member.weight is None for member in ordered}) > 1:
            raise KeyFileError("expected a weight for every member of the roster or for none")

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
        """SHA-256 of the roster's content, the same for every order and file format."""
        rows = [[m.name, m.key.hex(), None if m.weight is None else float(m.weight)] for m in self.members]
        text = json.dumps([FORMAT, rows], ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).digest()

    def key(self, name: str) -> bytes:
        """Return the public key of a member."""
        for member in self.members:
            if member.name == name:
                return member.key
        raise KeyFileError(f"{name!r} is not on the roster")

    def verifies(self, name: str, signature: bytes, message: bytes) -> bool:
        """Return whether this member signed this message."""
        return verifies(self.key(name), signature, message)


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
    _write_new(path, pem, 0o600)
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
    if os.name == "posix" and mode & 0o077:
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
    """Write a new roster file: JSON if the name ends in .json, TOML otherwise."""
    rows: list[dict[str, Any]] = []
    for member in roster.members:
        row: dict[str, Any] = {"name": member.name, "key": PREFIX + member.key.hex()}
        rows.append(row if member.weight is None else row | {"weight": float(member.weight)})
    if Path(path).suffix == ".json":
        text = json.dumps({"format": FORMAT, "members": rows}, ensure_ascii=False, indent=1) + "\n"
    else:  # for every valid name, a JSON string or number is also one in TOML
        blocks = [
            "[[members]]\n" + "".join(f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in row.items())
            for row in rows
        ]
        text = f'format = "{FORMAT}"\n\n' + "\n".join(blocks)
    _write_new(Path(path), text.encode(), 0o644)


def read_roster(path: str | os.PathLike[str]) -> Roster:
    """Read a roster file; refuse unknown fields, duplicates and malformed keys."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot read the roster: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise KeyFileError(f"{path}: a roster has at most {MOST_BYTES} bytes")
    try:
        text = data.decode()
        table = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise KeyFileError(f"{path}: not a roster file: {error}") from None
    try:
        return _roster(table)
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from None


def _roster(table: Any) -> Roster:
    if not isinstance(table, Mapping) or table.get("format") != FORMAT:
        raise KeyFileError(f"expected a roster file with format = {FORMAT!r}")
    rows = table.get("members")
    if set(table) != {"format", "members"} or not isinstance(rows, list):
        raise KeyFileError(f"expected format and [[members]], got {', '.join(map(str, table))}")
    return Roster(_member(row) for row in rows)


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
        raise KeyFileError(f"{name}: weight must be a number of at least 0, got {weight!r}") from None


def _member(row: Any) -> Member:
    if not isinstance(row, Mapping) or not {"name", "key"} <= set(row) <= {"name", "key", "weight"}:
        raise KeyFileError(f"a member has a name, a key and perhaps a weight, got {row!r}")
    name, key, weight = row["name"], row["key"], row.get("weight")
    check_name(name)
    if not isinstance(key, str) or not key.startswith(PREFIX):
        raise KeyFileError(f"{name}: key must read {PREFIX} and 64 hexadecimal digits")
    try:
        raw = bytes.fromhex(key.removeprefix(PREFIX))
    except ValueError:
        raise KeyFileError(f"{name}: key must read {PREFIX} and 64 hexadecimal digits") from None
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise KeyFileError(f"{name}: weight must be a number of at least 0, got {weight!r}")
    return Member(name, raw, weight)


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


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Create a file in one step: complete, with its mode from the start, and never over an existing file."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)  # unlike a rename, fails if the name is taken
        finally:
            os.unlink(draft)
    except FileExistsError:
        raise KeyFileError(f"{path}: exists already and is not overwritten") from None
    except OSError as error:
        raise KeyFileError(f"{path}: cannot write: {error.strerror}") from None
