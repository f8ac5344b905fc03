"""The messages between members and server, as signed bytes of limited size.

THE STAGES, in order. In each stage a member sends one message. The server then shows the signed heads of all
these messages, unchanged, to everybody who sent one. A server never says anything but that list, so nobody
has to trust its word::

    stage      a member sends                                          and has checked before
    advertise  a mask key and a channel key for every peer;            nothing: it can be sent early
               commitments to self-mask seed and nonce
    share      for every peer, encrypted shares of its secrets and     everybody's keys, signed by roster keys
               a commitment to the key of the pair's mask
    masked     digests of model, task and masked words; complaints     the shares it was dealt, by commitments
               about bad shares; the words
    check      its signature on the list of masked inputs              all trained one model, saw the same,
                                                                       every complaint is true
    unmask     for every peer ONE share: of its self-mask seed if it   t members in the sum signed the same
               is in the sum, of its mask key if it is not             list and hold good shares

A member can also decline at any stage; the server learns nothing else. In a run without the check
(`Setting.checked`), a member answers the list of masked inputs with its shares at once.

Every head holds ``seen``, the digest of the last list its sender was shown. Each list consists of such heads,
so two members who were shown different lists find out one stage later, before any share is released. The
digest is over the digests of the heads in the list, so these and one head prove that a member saw this head.

On the wire, a message is four bytes that name the format, four for the length of the head, the head, and the
payload (masked words). Only heads are signed. The head of a masked message holds the digest of its payload.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

import msgpack

from fedmerit.errors import BindingError, MessageError, ProtocolError, SignatureError
from fedmerit.secagg.setting import STAGES, Setting, pack

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = [
    "NOTHING_SEEN",
    "STAGES",
    "Blame",
    "Head",
    "open_broadcast",
    "open_message",
    "seal",
    "to_broadcast",
]

DECLINE: Final = "decline"

VERSION: Final = 3
MESSAGE: Final = b"FMS3"
BROADCAST: Final = b"FMB3"
DOMAIN: Final = b"fedmerit secagg head 1\0"
NOTHING_SEEN: Final = bytes(32)
SEALED_SHARES: Final = 12 + 64 + 16  # nonce, two shares of 32 bytes, tag
TOKEN: Final = 32 + 64  # mask key or digest of masked words, signature that binds a counter to it
FOR_EACH: Final = "32 bytes for each scheduled member, in their order"

# What a body holds. A number means a byte string of that size. A list of one tuple means a table with such
# rows, whose first column is the position of a peer in the schedule, in ascending order.
BODIES: Final[dict[str, Any]] = {
    # mask key, commitments to seed and nonce, channel keys, counter of the member's state, its signature
    "advertise": (32, 32, 32, FOR_EACH, int, 64),
    # peer, its shares, commitments to key share, seed share and pair key (zeros in the dealer's own row);
    # stale peer, its newer counter and token
    "share": ([(int, SEALED_SHARES, 32, 32, 32)], [(int, int, TOKEN)]),
    # digest of the task, of M0, of the masked words; complaints: dealer, private channel key towards it;
    # counter of the member's state, its signature
    "masked": (32, 32, 32, [(int, 32)], int, 64),
    "check": (),
    "unmask": [(int, str, 32)],  # peer, "key" or "seed", the share
    DECLINE: (),
}


@dataclass(frozen=True)
class Head:
    """The signed part of a member's message, after all checks."""

    stage: str
    sender: str
    seen: bytes = field(repr=False)
    body: Any = field(repr=False)  # as in BODIES; holds shares, so it is never shown
    raw: bytes = field(repr=False)


Why = Literal["share", "complaint", "secret"]
"""For what a member is blamed: it dealt a bad share, complained falsely, or shared out something else than it
committed to."""


@dataclass(frozen=True)
class Blame:
    """A member that provably broke the protocol, and the evidence, which `masks.judge` judges anew.

    Args:
        member: who is blamed.
        by: who complained; None if it was found when a secret was rebuilt.
        why: for what.
        evidence: signed heads, digests of lists and opened values, all in hexadecimal.
    """

    member: str
    by: str | None
    why: Why
    evidence: Mapping[str, Any] = field(repr=False)


def head_limit(members: int) -> int:
    """Return the largest size of a head in bytes, for this number of scheduled members."""
    return 1024 + 320 * members


def list_limit(members: int) -> int:
    """Return the largest size of a list of heads in bytes, for this number of scheduled members."""
    return len(BROADCAST) + 64 + members * (head_limit(members) + 5)


def seal(
    setting: Setting,
    sender: str,
    identity: Ed25519PrivateKey,
    stage: str,
    seen: bytes,
    body: Sequence[Any],
    payload: bytes | memoryview = b"",
) -> tuple[bytes, bytes]:
    """Sign a message; return the message, and its head alone."""
    content = pack(
        VERSION,
        *(stage, setting.run, setting.round, setting.attempt, sender),
        *(setting.session, seen, list(body)),
    )
    head = pack(content, identity.sign(DOMAIN + hashlib.sha256(content).digest()))
    return b"".join([MESSAGE, struct.pack(">I", len(head)), head, payload]), head


def open_message(data: bytes, setting: Setting, most_payload: int) -> tuple[Head, memoryview]:
    """Check a member's message and take it apart; the payload is a view into ``data``, not a copy.

    The caller must check that the stage is due, and compare the payload with its digest.
    """
    least, limit = 8, head_limit(setting.n)
    if not least <= len(data) <= least + limit + most_payload:
        raise MessageError(f"a message has {least} to {least + limit + most_payload} bytes, got {len(data)}")
    if data[:4] != MESSAGE:
        raise MessageError(f"a message starts with {MESSAGE!r}, got {data[:4]!r}")
    (size,) = struct.unpack(">I", data[4:8])
    if not 0 < size <= min(limit, len(data) - least):
        raise MessageError(f"a head of {size} bytes does not fit into a message of {len(data)} bytes")
    head = open_head(data[least : least + size], setting)
    payload = memoryview(data)[least + size :]
    if payload and head.stage != "masked":
        raise MessageError(f"{len(payload)} bytes too many", stage=head.stage, member=head.sender)
    return head, payload


def open_head(raw: bytes, setting: Setting) -> Head:
    """Check form, binding and signature of a head."""
    content, signature = _fields(raw, (bytes, 64), head_limit(setting.n), 3)
    most = 12 + 10 * setting.n  # shares for every peer and a token of every peer are the largest body
    fields = _fields(content, (int, str, str, int, int, str, 32, 32, list), head_limit(setting.n), most)
    if pack(content, signature) != raw or pack(*fields) != content:
        raise MessageError("not encoded as members encode it")
    version, stage, run, number, attempt, sender, session, seen, body = fields
    if version != VERSION:
        raise MessageError(f"expected version {VERSION} of the protocol, got {version}")
    if stage not in BODIES:
        raise MessageError(f"unknown stage {stage!r:.40}")
    if sender not in setting.members:
        raise BindingError(f"{sender!r:.80} is not scheduled in this round", stage=stage)
    for name, got, expected in (
        ("run", run, setting.run),
        ("round", number, setting.round),
        ("attempt", attempt, setting.attempt),
    ):
        if got != expected:
            raise BindingError(
                f"expected a message of {name} {expected!r}, got {name} {got!r:.140}",
                stage=stage,
                member=sender,
            )
    if session != setting.session:
        raise BindingError(
            "made for a different schedule, threshold, roster or config", stage=stage, member=sender
        )
    if not setting.roster.verifies(sender, signature, DOMAIN + hashlib.sha256(content).digest()):
        raise SignatureError("not signed by this member's key on the roster", stage=stage, member=sender)
    if not _fits(body, BODIES[stage], setting.n):
        raise MessageError("a body that no member of this protocol writes", stage=stage, member=sender)
    return Head(stage, sender, seen, body, raw)


def to_broadcast(stage: str, heads: Iterable[bytes]) -> bytes:
    """Return what the server shows to members: the signed heads of one stage, in schedule order."""
    return BROADCAST + pack(VERSION, stage, list(heads))


def list_digest(stage: str, digests: Iterable[bytes]) -> bytes:
    """Return what members sign as ``seen`` for a list of heads, given the heads' digests in order."""
    return digest_of(pack("fedmerit secagg list 1", stage, list(digests)))


def seen_of(stage: str, heads: Iterable[Head]) -> bytes:
    """Return what members sign as ``seen`` for a list of these heads, in schedule order."""
    return list_digest(stage, (digest_of(head.raw) for head in heads))


def open_broadcast(data: bytes, setting: Setting, stage: str) -> dict[str, Head]:
    """Check a list of heads of this stage, each from a different scheduled member; return them by member."""
    limit = list_limit(setting.n)
    if len(data) > limit:
        raise MessageError(f"a list of heads has at most {limit} bytes, got {len(data)}", stage=stage)
    if data[: len(BROADCAST)] != BROADCAST:
        raise MessageError(f"a list of heads starts with {BROADCAST!r}, got {data[:4]!r}", stage=stage)
    version, which, raws = _fields(data[len(BROADCAST) :], (int, str, list), limit, 4 + 2 * setting.n)
    if version != VERSION:
        raise MessageError(f"expected version {VERSION} of the protocol, got {version}", stage=stage)
    if which != stage:
        raise BindingError(f"expected the heads of stage {stage}, got those of {which!r:.40}", stage=stage)
    if len(raws) > setting.n or not all(type(raw) is bytes for raw in raws):
        raise MessageError(f"expected at most {setting.n} heads", stage=stage)
    if to_broadcast(stage, raws) != data:
        raise MessageError("a list that is not encoded as servers encode it", stage=stage)
    heads = [open_head(raw, setting) for raw in raws]
    for head in heads:
        if head.stage != stage:
            raise BindingError(f"shown a head of stage {head.stage}", stage=stage, member=head.sender)
    places = [setting.members.index(head.sender) for head in heads]
    for before, after, head in zip(places, places[1:], heads[1:], strict=False):
        if before >= after:
            raise BindingError("shown twice or out of order", stage=stage, member=head.sender)
    return {head.sender: head for head in heads}


def placed(error: ProtocolError, stage: str, member: str | None) -> ProtocolError:
    """Return the error with stage and member added, if it does not name them yet."""
    return error if error.stage or error.member else type(error)(str(error), stage=stage, member=member)


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the SHA-256 of data."""
    return hashlib.sha256(data).digest()


def refuse_many(data: bytes, most: int) -> None:
    """Raise `MessageError` if these bytes of msgpack stand for more than ``most`` values.

    One byte can become a value of 64 bytes in memory, so the values are counted by their headers first.
    """
    at, due, seen = 0, 1, 0
    while due and at < len(data):
        kind, at, due, seen = data[at], at + 1, due - 1, seen + 1
        if kind in _SIZED:
            width, skip, inner = _SIZED[kind]
            count = int.from_bytes(data[at : at + width], "big") if width else 1
            at, due = at + width + skip * count + (kind in _EXT), due + inner * count
        elif 0x80 <= kind <= 0x9F:
            due += (kind & 15) * (2 if kind < 0x90 else 1)
        elif 0xA0 <= kind <= 0xBF:
            at += kind & 31
        if seen + due > most:
            raise MessageError(f"expected at most {most} values, got more")


# header byte -> bytes of the count that follows, bytes per unit of that count, values per unit
_SIZED: Final[dict[int, tuple[int, int, int]]] = {
    **{0xC4 + i: (2**i, 1, 0) for i in range(3)},  # bytes
    **{0xC7 + i: (2**i, 1, 0) for i in range(3)},  # extensions, and a byte for their type
    **{0xD9 + i: (2**i, 1, 0) for i in range(3)},  # text
    **{0xDC + i: (2 ** (i + 1), 0, 1) for i in range(2)},  # lists
    **{0xDE + i: (2 ** (i + 1), 0, 2) for i in range(2)},  # maps
    **{0xCA + i: (0, 4 * 2**i, 0) for i in range(2)},  # floats
    **{0xCC + i: (0, 2**i, 0) for i in range(4)},  # integers
    **{0xD0 + i: (0, 2**i, 0) for i in range(4)},
    **{0xD4 + i: (0, 1 + 2**i, 0) for i in range(5)},  # extensions of fixed size
}
_EXT: Final = (0xC7, 0xC8, 0xC9)


def _fields(data: bytes, shape: Sequence[Any], limit: int, most: int) -> list[Any]:
    """Unpack a list of this shape and of at most ``most`` values; refuse bytes after it."""
    if len(data) > limit:
        raise MessageError(f"expected at most {limit} bytes, got {len(data)}")
    refuse_many(data, most)
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        raise MessageError("bytes that no member of this protocol writes") from None
    if not _fits(value, tuple(shape), 0):
        raise MessageError("fields that no member of this protocol writes")
    return list(value)


def _fits(value: Any, shape: Any, members: int) -> bool:
    """Return whether a value has the shape of a body or of a part of one; see `BODIES`."""
    if isinstance(shape, tuple):
        return (
            type(value) is list
            and len(value) == len(shape)
            and all(_fits(item, kind, members) for item, kind in zip(value, shape, strict=True))
        )
    if isinstance(shape, list):
        if type(value) is not list or not all(_fits(row, shape[0], members) for row in value):
            return False
        places = [row[0] for row in value]
        return all(0 <= place < members for place in places) and all(
            before < after for before, after in pairwise(places)
        )
    if shape == FOR_EACH or isinstance(shape, int):
        return type(value) is bytes and len(value) == (shape if isinstance(shape, int) else 32 * members)
    return type(value) is shape
