"""The messages between members and server, as signed bytes of limited size.

In each stage a member sends one message. The server then shows the signed heads of all these messages,
unchanged, to everybody who sent one, and says nothing else::

    stage      a member sends                                          and has checked before
    advertise  a mask key and a channel key for every peer;            nothing: it can be sent early
               commitment to the self-mask seed
    share      for every peer, encrypted shares of its secrets and     everybody's keys, signed by roster keys
               a commitment to the key of the pair's mask
    masked     digests of model, task and masked words; complaints     the shares it was dealt, by commitments
               about bad shares; the words
    check      its signature on the list of masked inputs              all trained one model, saw the same,
                                                                       every complaint is true
    unmask     for every peer ONE share: of its self-mask seed if it   t members in the sum signed the same
               is in the sum, of its mask key if it is not             list and hold good shares

A member can also decline. Every head holds ``seen``, the digest of the last list its sender was shown, so two
members who were shown different lists find out one stage later, before any share is released. A message is
four bytes that name the format, four for the length of the head, the head, and the payload (masked words,
whose digest the head holds). Heads are msgpack, each class below a list of its fields, written in one way.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from msgspec import Meta, MsgspecError, Raw, Struct, convert, msgpack, to_builtins

from fedmerit.errors import BindingError, LedgerError, MessageError, SignatureError, placing
from fedmerit.identity import canonical
from fedmerit.secagg.setting import Setting, pack

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


DECLINE: Final = "decline"
MESSAGE: Final = b"FMS1"
BROADCAST: Final = b"FMB1"
DOMAIN: Final = b"fedmerit secagg head 1\0"
NOTHING_SEEN: Final = bytes(32)
SEALED_SHARES: Final = 12 + 64 + 16  # nonce, two shares of 32 bytes, tag
TOKEN: Final = 32 + 64  # mask key or digest of masked words, signature that binds a counter to it

# ----------------------------------------------------------------------------------------------- on the wire

T = TypeVar("T")
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""32 bytes: a SHA-256, a key, a share or a secret."""
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Sealed = Annotated[bytes, Meta(min_length=SEALED_SHARES, max_length=SEALED_SHARES)]
Token = Annotated[bytes, Meta(min_length=TOKEN, max_length=TOKEN)]
Count = Annotated[int, Meta(ge=0)]


class Wire(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Part of a message: a list of its fields."""

    def __repr__(self) -> str:
        """Return the name only: many parts hold shares or keys."""
        return f"{type(self).__name__}(...)"


class Row(Wire, frozen=True):
    """Row of a table about members; rows ascend by ``place``, the member's position in the schedule."""

    place: Count


class Dealt(Row, frozen=True):
    """What a dealer deals one holder: its encrypted shares, and commitments to what they belong to."""

    sealed: Sealed
    key: Digest  # of the holder's share of the dealer's mask key
    seed: Digest  # of its share of the dealer's self-mask seed
    pair: Digest  # of the key of the mask between the two; zeros in the dealer's own row


class Stale(Row, frozen=True):
    """The counter of a peer's state as its sender knew it before, and the token that proves it."""

    counter: Count
    token: Token


class Complaint(Row, frozen=True):
    """A complaint about a dealer: it opens the sender's channel with that dealer."""

    key: Digest


class ReleasedShare(Row, frozen=True):
    """A share of one dealer's secret: of its mask key, or of its self-mask seed."""

    kind: Literal["key", "seed"]
    share: Digest


class Advertise(Wire, frozen=True):
    """The body of ``advertise``."""

    mask: Digest
    seed: Digest  # commitment to the self-mask seed
    channels: bytes  # 32 bytes for each scheduled member, in their order
    counter: Count  # of the member's state
    signature: Signature  # of the counter, with the mask key


class Share(Wire, frozen=True):
    """The body of ``share``."""

    rows: tuple[Dealt, ...]
    stale: tuple[Stale, ...]


class Masked(Wire, frozen=True):
    """The body of ``masked``."""

    task: Digest
    m0: Digest
    words: Digest
    complaints: tuple[Complaint, ...]
    counter: Count
    signature: Signature  # of the counter, with the digest of the words


class Check(Wire, frozen=True):
    """The body of ``check``: what is signed is the list that its sender has seen."""


class Unmask(Wire, frozen=True):
    """The body of ``unmask``."""

    rows: tuple[ReleasedShare, ...]


class Decline(Wire, frozen=True):
    """The body of a message with which a member leaves an attempt."""


Body = Advertise | Share | Masked | Check | Unmask | Decline
BODIES: Final[dict[str, type[Body]]] = {
    "advertise": Advertise,
    "share": Share,
    "masked": Masked,
    "check": Check,
    "unmask": Unmask,
    DECLINE: Decline,
}


class _Content(Wire, frozen=True):
    """What a member signs; the body is read once the signature is checked."""

    stage: str
    run: str
    round: int
    attempt: int
    sender: str
    session: Digest
    seen: Digest
    body: Raw


class _Signed(Wire, frozen=True):
    content: bytes
    signature: Signature


class _List(Wire, frozen=True):
    stage: str
    heads: tuple[bytes, ...]


def decoded(data: bytes | Raw, kind: type[T], what: str) -> T:
    """Return the value of this type in bytes whose number the caller has limited.

    Raise MessageError if they are not of this type, or not written in the one way in which we write it.
    """
    try:
        value = msgpack.decode(data, type=kind)
        canonical = msgpack.encode(value) == bytes(data)
    except (MsgspecError, ValueError, OverflowError, RecursionError, MemoryError):  # may hold secrets
        raise MessageError(f"expected {what}, got bytes that no member or server writes") from None
    if not canonical:
        raise MessageError(f"{what}: not encoded as members and servers encode it")
    return value


@dataclass(frozen=True)
class Head:
    """The signed part of a member's message, after all checks."""

    stage: str
    sender: str
    seen: bytes = field(repr=False)
    body: Any = field(repr=False)  # the class of the stage in `BODIES`
    raw: bytes = field(repr=False)


Why = Literal["share", "complaint", "secret"]


@dataclass(frozen=True)
class Blame:
    """A member that provably broke the protocol, who complained about it if anybody did, and why.

    It dealt a bad share, complained falsely, or shared out another secret than it committed to. ``evidence``
    is a `Complained` or a `Rebuilt` as plain values; `masks.judge` judges it anew.
    """

    member: str
    by: str | None
    why: Why
    evidence: Mapping[str, Any] = field(repr=False)


class Complained(Struct, frozen=True):
    """What shows whether a complaint is true: signed heads, and the digests of the lists they belong to."""

    advertised: tuple[Digest, ...]
    dealt: tuple[Digest, ...]
    heads: tuple[bytes, bytes, bytes, bytes]  # of holder and dealer in advertise, share, masked


class Rebuilt(Struct, frozen=True):
    """What shows that a dealer shared out something else than it committed to: shares of it, by place."""

    advertised: tuple[Digest, ...]
    heads: tuple[bytes, bytes]  # of the dealer in advertise and share
    kind: Literal["key", "seed"]
    shares: tuple[tuple[Count, Digest], ...]


def revealed(values: Mapping[str, Any], kind: type[T]) -> T:
    """Return the evidence of this type in plain values, with bytes in base64, written in the only way."""
    try:
        found = convert(values, kind)
        same = canonical(to_builtins(found)) == canonical(values)
    except (MsgspecError, LedgerError, ValueError, TypeError, RecursionError) as error:
        raise MessageError(f"not evidence: {error!s:.120}") from None
    if not same:
        raise MessageError("evidence in another form than it is written")
    return found


def dealt_to(head: Head, place: int) -> Dealt | None:
    """Return what a head of stage share deals the member at this place, if anything."""
    return next((row for row in head.body.rows if row.place == place), None)


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
    body: Body,
    payload: bytes | memoryview = b"",
) -> tuple[bytes, bytes]:
    """Sign a message; return the message, and its head alone."""
    where = (setting.run, setting.round, setting.attempt, sender, setting.session)
    content = pack(stage, *where, seen, body)
    head = pack(content, identity.sign(DOMAIN + digest_of(content)))
    return b"".join([MESSAGE, struct.pack(">I", len(head)), head, payload]), head


def open_message(data: bytes | memoryview, setting: Setting, most_payload: int) -> tuple[Head, memoryview]:
    """Check a member's message and take it apart; the payload is a view into ``data``, not a copy.

    The caller must check that the stage is due, and compare the payload with its digest.
    """
    limit = head_limit(setting.n)
    if not 8 <= len(data) <= 8 + limit + most_payload:
        raise MessageError(f"a message has 8 to {8 + limit + most_payload} bytes, got {len(data)}")
    if data[:4] != MESSAGE:
        raise MessageError(f"a message starts with {MESSAGE!r}, got {bytes(data[:4])!r}")
    (size,) = struct.unpack(">I", data[4:8])
    if not 0 < size <= min(limit, len(data) - 8):
        raise MessageError(f"a head of {size} bytes does not fit into a message of {len(data)} bytes")
    head, payload = open_head(bytes(data[8 : 8 + size]), setting), memoryview(data)[8 + size :]
    if payload and head.stage != "masked":
        raise MessageError(f"{len(payload)} bytes too many", stage=head.stage, member=head.sender)
    return head, payload


def open_head(raw: bytes, setting: Setting) -> Head:
    """Check form, binding and signature of a head."""
    if len(raw) > (limit := head_limit(setting.n)):
        raise MessageError(f"a head has at most {limit} bytes, got {len(raw)}")
    signed = decoded(raw, _Signed, "a signed head")
    content = decoded(signed.content, _Content, "a head")
    stage, sender = content.stage, content.sender
    if stage not in BODIES:
        raise MessageError(f"unknown stage {stage!r:.40}")
    if sender not in setting.members:
        raise BindingError(f"{sender!r:.80} is not scheduled in this round", stage=stage)
    with placing(stage, sender):
        for name in ("run", "round", "attempt"):
            if (got := getattr(content, name)) != (expected := getattr(setting, name)):
                raise BindingError(f"expected a message of {name} {expected!r}, got {name} {got!r:.140}")
        if content.session != setting.session:
            raise BindingError("made for a different schedule, threshold, roster or config")
        if not setting.roster.verifies(sender, signed.signature, DOMAIN + digest_of(signed.content)):
            raise SignatureError("not signed by this member's key on the roster")
        body = decoded(content.body, BODIES[stage], "its body")
        if not _fits(body, setting.n):
            raise MessageError("places or keys that do not fit the schedule")
    return Head(stage, sender, content.seen, body, raw)


def _fits(body: Body, members: int) -> bool:
    """Return whether all places are in the schedule, in order, and a channel key is there for everybody."""
    if isinstance(body, Advertise) and len(body.channels) != 32 * members:
        return False
    tables = [getattr(body, name) for name in ("rows", "stale", "complaints") if hasattr(body, name)]
    return all(
        before < after
        for table in tables
        for before, after in pairwise([-1, *(row.place for row in table), members])
    )


def to_broadcast(stage: str, heads: Iterable[bytes]) -> bytes:
    """Return what the server shows to members: the signed heads of one stage, in schedule order."""
    return BROADCAST + pack(stage, list(heads))


def list_digest(stage: str, digests: Iterable[bytes]) -> bytes:
    """Return what members sign as ``seen`` for a list, given the digests of its heads in schedule order."""
    return digest_of(pack("fedmerit secagg list 1", stage, list(digests)))


def seen_of(stage: str, heads: Iterable[Head]) -> bytes:
    """Return what members sign as ``seen`` for a list of these heads."""
    return list_digest(stage, (digest_of(head.raw) for head in heads))


def open_broadcast(data: bytes, setting: Setting, stage: str) -> dict[str, Head]:
    """Check a list of heads of this stage, each from a different scheduled member; return them by member.

    Of a list that is too long, one head more than there are members is opened at most.
    """
    heads: dict[str, Head] = {}
    last = -1
    with placing(stage):
        if len(data) > (limit := list_limit(setting.n)):
            raise MessageError(f"a list of heads has at most {limit} bytes, got {len(data)}")
        if data[: len(BROADCAST)] != BROADCAST:
            raise MessageError(f"a list of heads starts with {BROADCAST!r}, got {data[:4]!r}")
        shown = decoded(data[len(BROADCAST) :], _List, "a list of heads")
        if shown.stage != stage:
            raise BindingError(f"expected the heads of stage {stage}, got those of {shown.stage!r:.40}")
        for raw in shown.heads:
            head = open_head(raw, setting)
            if head.stage != stage:
                raise BindingError(f"shown a head of stage {head.stage}", member=head.sender)
            if (place := setting.members.index(head.sender)) <= last:
                raise BindingError("shown twice or out of order", member=head.sender)
            heads[head.sender], last = head, place
    return heads


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the SHA-256 of data."""
    return hashlib.sha256(data).digest()
