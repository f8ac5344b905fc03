"""The messages of the server to its members, and their answers: typed, and of limited size.

A member can prove what it was told: the server signs every message, and names the large arrays beside it by
hash. Whoever reads a message compares its size with a limit first, then its bytes with the types below and
with the one way to write them (`decoded`). So what is read takes a small multiple of these bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt
from msgspec import Meta, MsgspecError, Raw, Struct, msgpack

from fedmerit.config import VERSION
from fedmerit.errors import BindingError, MessageError, VersionError, placing
from fedmerit.identity import MOST_MEMBERS, Signer, verifies
from fedmerit.protocol.outcome import Told
from fedmerit.protocol.pool import SALT_BYTES, Slice
from fedmerit.secagg.messages import Wire, decoded, list_limit

# --------------------------------------------------------------------------------------------- on the wire

Exchange = Literal[
    "join", "advertise", "share", "train", "check", "unmask", "report",
    "last", "judge", "judged", "column", "open", "agree", "agreed", "state", "draw", "drawn", "seal",
    "witness", "table", "pairs", "settle", "close",
]  # fmt: skip
EXCHANGES: Final[tuple[Exchange, ...]] = get_args(Exchange)
PROTOCOL: Final = 1
"""The version of these messages. Packages of different versions work together if they have this number."""
_FORMATS: Final = "fedmerit remote {}"
PACKAGE: Final = "[0-9a-zA-Z.+-]{1,40}"
"""What the version of a package looks like."""
FORMAT: Final = _FORMATS.format(PROTOCOL)
LEAST_SAMPLES: Final = 10
KINDS: Final = "fiub"  # kinds of dtype in a message: numbers, never objects
SLICE_BYTES: Final = 2**31
"""Most bytes of the samples of a test slice."""
SETTLEMENT_BYTES: Final = 2**26
"""Most bytes of a message of the settlement, which carries all rounds; not counting its arrays."""
ANSWER: Final = 4096
"""Most bytes of a member's answer, not counting what depends on the settings."""
SLICE: Final = {"x", "y", "salts"}

T = TypeVar("T")
MEMBERS: Final = Meta(max_length=MOST_MEMBERS)
Names = Annotated[tuple[str, ...], MEMBERS]
Rounds = Annotated[tuple[int, ...], Meta(max_length=4096)]
Hash = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Signature = Annotated[bytes, Meta(max_length=64)]
Place = tuple[int, Annotated[tuple[bytes, ...], Meta(max_length=64)]]
"""The number of a test slice, and its path in the tree of the pool."""


class Signed(Wire, frozen=True):
    """JSON that a member signed."""

    text: bytes
    signature: Signature


SignedTexts = Annotated[dict[str, Signed], MEMBERS]
"""By member."""
Texts = Annotated[tuple[Signed, ...], Meta(max_length=4096)]
"""By round."""


class AskBody(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a message of the server says beside its exchange, run and round."""


class JoinAsk(AskBody, frozen=True):
    terms: dict[str, Any]
    commitment: dict[str, Any]
    server: Annotated[bytes, Meta(max_length=32)]


class AdvertiseAsk(AskBody, frozen=True):
    members: Names


class HeadsAsk(AskBody, frozen=True):
    list: bytes  # the signed heads of the stage before


class ReportAsk(AskBody, frozen=True):
    included: Names
    m0: Hash
    head: Hash
    slice: Place | None = None  # without one, the sum is to be acknowledged


class TrainAsk(HeadsAsk, frozen=True):
    weights: Annotated[dict[str, float], MEMBERS] | None = None  # that follow from scores, in a rehearsal
    before: ReportAsk | None = None  # on the round before, which is to be acknowledged first


class CheckAsk(HeadsAsk, frozen=True):
    next: Names  # the schedule of the next round, whose keys come with the answer


class UnmaskAsk(HeadsAsk, frozen=True):
    keys: bytes  # everybody's for the next round, whose shares come with the answer


class Accord(Wire, frozen=True):
    """The answer to ``agreed``: the rounds that are wrong, and those that the manifest lacks."""

    wrong: Rounds
    released: Rounds
    draw: Hash  # of the number that it opens for the draw of witnesses
    signature: Signature


Accords = Annotated[dict[str, Accord], MEMBERS]
"""By member."""


class OpenAsk(AskBody, frozen=True):
    manifest: bytes
    slice: Place | None  # none in a panel
    last: Annotated[dict[str, Signature], MEMBERS]  # signatures on the last round, if it came early
    agreed: Accords = {}  # of t members, for one who agreed to another
    showings: SignedTexts = {}  # of all judges


class JudgeAsk(AskBody, frozen=True):
    manifest: bytes  # the rounds that are judged, without directions
    drawn: Annotated[dict[str, Signature], MEMBERS]  # under the seed of the coordinates


class ColumnAsk(AskBody, frozen=True):
    showings: SignedTexts  # of all judges: what they show, by hash


class StateAsk(AskBody, frozen=True):
    agreed: Accords


class DrawAsk(AskBody, frozen=True):
    statements: Annotated[dict[str, Hash], MEMBERS]  # hashes of all that were made
    committed: Annotated[dict[str, Hash], MEMBERS]  # hashes of their authors' numbers
    last: Annotated[dict[str, Signature], MEMBERS] = {}  # as in ``open``, before the coordinates are drawn


class NonceAnswer(Wire, frozen=True):
    """The answer to ``draw``: the number that its author committed to when it agreed."""

    nonce: Annotated[bytes, Meta(min_length=32, max_length=32)]
    signature: Signature


class DrawnAsk(AskBody, frozen=True):
    statements: Annotated[dict[str, Hash], MEMBERS]
    committed: Annotated[dict[str, Hash], MEMBERS]
    openings: Annotated[dict[str, NonceAnswer], MEMBERS]
    last: Annotated[dict[str, Signature], MEMBERS] = {}


class SealAsk(AskBody, frozen=True):
    seed: Hash
    drawn: Annotated[dict[str, Signature], MEMBERS]  # under the seed of the draw


class WitnessAsk(AskBody, frozen=True):
    lists: tuple[bytes, bytes, bytes]  # the signed heads of the round: advertise, share, masked
    tables: SignedTexts
    sealed: SignedTexts


class TableAsk(AskBody, frozen=True):
    statements: SignedTexts
    along: dict[str, str | int | None]  # the direction of a block, which is not in the manifest
    total: str | None = None  # of all parts, if statements are withheld


class PairsAsk(AskBody, frozen=True):
    tables: SignedTexts  # of peers, which contradict the reader's own
    purpose: str


class SettleAsk(AskBody, frozen=True):
    settled: bytes
    statements: SignedTexts


class CloseAsk(AskBody, frozen=True):
    head: Hash


ASKS: Final[Mapping[Exchange, type[AskBody]]] = {
    "join": JoinAsk,
    "advertise": AdvertiseAsk,
    "share": HeadsAsk,
    "train": TrainAsk,
    "check": CheckAsk,
    "unmask": UnmaskAsk,
    "report": ReportAsk,
    "open": OpenAsk,
    **dict.fromkeys(("last", "judged", "agree", "agreed"), AskBody),
    "judge": JudgeAsk,
    "column": ColumnAsk,
    "state": StateAsk,
    "draw": DrawAsk,
    "drawn": DrawnAsk,
    "seal": SealAsk,
    "witness": WitnessAsk,
    "table": TableAsk,
    "pairs": PairsAsk,
    "settle": SettleAsk,
    "close": CloseAsk,
}
_ARRAYS: Final[Mapping[str, tuple[set[str], ...]]] = {
    "train": (set(), {"sum"}),
    "report": ({"sum"}, {"sum", *SLICE}),
    "judge": (set(), {"m0", "sum", "before"}),
    "open": (SLICE, {"columns"}),
    "agree": ({"g", "m0", "sum"}, {"sum"}, set()),
    "witness": ({"g"}, set()),
    "table": ({"g", "m0", "sum"},),
}
"""The arrays that a message has; in one of these ways."""
_LONG: Final = (
    "judge",
    "column",
    "open",
    "state",
    "draw",
    "drawn",
    "seal",
    "witness",
    "table",
    "pairs",
    "settle",
)


class Joined(Wire, frozen=True):
    """The answer to an invitation."""

    name: str
    signature: Signature
    run_config: bytes
    held_out: bytes = b""  # JSON: what a judge of a panel commits to


class StateAnswer(Signed, frozen=True):
    """The answer to ``state``: a statement, and with words of 8 bytes a table of masks for each round."""

    tables: Texts


Opened = Annotated[tuple[tuple[str, bytes], ...], MEMBERS]
"""The answer to a request for the keys of pairs: peers and keys."""


def answer_of(name: str, data: bytes, kind: type[T], stage: str, most: int = ANSWER) -> T:
    """Return a member's answer of this type; raise MessageError for any other or larger one."""
    if len(data) > most:
        raise MessageError(f"expected at most {most} bytes, got {len(data)}", stage=stage, member=name)
    with placing(stage, name):
        return decoded(data, kind, f"an answer to {stage}")


def with_more(answer: bytes, more: bytes) -> bytes:
    """Return the answer to train, check or unmask, and the little that comes with it: an acknowledgement of
    the round before, or keys or shares for the next one."""
    return b"".join([len(more).to_bytes(4, "big"), more, answer])


def without_more(name: str, data: bytes, stage: str, most: int) -> tuple[memoryview, bytes]:
    """Return what `with_more` joined, where at most so many bytes come with the answer."""
    size = int.from_bytes(data[:4], "big")
    if len(data) < 4 or size > min(most, len(data) - 4):
        raise MessageError(f"expected at most {most} bytes beside its answer", stage=stage, member=name)
    view = memoryview(data)
    return view[4 + size :], bytes(view[4 : 4 + size])


def exchange_of(stage: str) -> Exchange:
    """Return the exchange of a stage of secure aggregation: ``train`` asks for the masked update."""
    return "train" if stage == "masked" else cast(Exchange, stage)


@dataclass(frozen=True, eq=False)
class Parcel:
    """A message as it is carried: signed bytes, and the large arrays that they name by hash.

    If server and members share a process, the arrays are never copied.
    """

    head: bytes
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the total number of bytes."""
        return len(self.head) + sum(array.nbytes for array in self.arrays.values())


class _Form(Struct, array_like=True):
    """How a message of any protocol begins; nobody has signed the version, which is only shown."""

    form: str
    version: str


class _Outer(Struct, array_like=True, forbid_unknown_fields=True):
    form: str
    version: str
    inner: memoryview
    signature: Signature


class _First(Struct, array_like=True):
    exchange: Exchange


class _Inner(Wire, frozen=True):
    exchange: Exchange
    run: str
    round: int
    body: Raw
    named: Annotated[dict[str, tuple[str, tuple[int, ...], bytes]], Meta(max_length=4)]


@dataclass(frozen=True, eq=False)
class Ask:
    """One message of the coordinator: its exchange, its round and its content.

    The arrays of a message that was unpacked have not been compared with the types, shapes and hashes that
    the signed bytes name; `array`, `opened` and `told` do that.
    """

    exchange: Exchange
    run: str
    round: int
    body: Any  # the class of the exchange in `ASKS`
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    named: Mapping[str, Any] = field(default_factory=dict)  # type, shape and hash of every array
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def pack(self, sign: Signer) -> Parcel:
        """Return the message as a parcel signed by the server: its receiver can prove what it was told."""
        arrays = {name: _little(values) for name, values in self.arrays.items()}
        named = {name: _named(values) for name, values in arrays.items()}
        inner = pack([self.exchange, self.run, self.round, self.body, named])
        return Parcel(pack([FORMAT, VERSION, inner, sign(_signed(inner))]), arrays)

    @classmethod
    def unpack(
        cls, parcel: Parcel, members: int = MOST_MEMBERS, reader: str | None = None
    ) -> tuple[Ask, Callable[[bytes], bool]]:
        """Return the message in a parcel, and a function that tells whether a given key signed it.

        Its author is not yet known, so unpacking takes at most a few times the memory of the parcel.
        ``members`` is the size of the roster of the ``reader``. Raise VersionError for a message of another
        protocol.
        """
        what = f"a message of {FORMAT}"
        _refuse_version(_read(parcel.head, _Form), reader)
        outer = _read(parcel.head, _Outer)
        exchange = _read(outer.inner, _First).exchange
        if len(parcel.head) > (limit := ask_limit(exchange, members)):
            raise MessageError(f"expected at most {limit} bytes, got {len(parcel.head)}", stage=exchange)
        inner = decoded(bytes(outer.inner), _Inner, what)
        if {*parcel.arrays} != {*inner.named} or {*inner.named} not in _ARRAYS.get(exchange, (set(),)):
            raise MessageError("other arrays beside it than expected", stage=exchange)
        body = decoded(inner.body, ASKS[exchange], what)
        ask = cls(exchange, inner.run, inner.round, body, parcel.arrays, inner.named)
        return ask, partial(signed_by, bytes(outer.inner), outer.signature)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return what was made before under this key: members who share a process ask the same."""
        if key not in self._known:
            self._known[key] = make()
        return cast(T, self._known[key])

    def array(self, name: str, kind: str, size: int, digest: str | None = None) -> npt.NDArray[Any]:
        """Return a flat array of the message, compared with what the server signed: its size first.

        With ``digest``, the array must have this SHA-256, little-endian.
        """
        if (given := self.arrays.get(name)) is None:
            raise MessageError(f"expected the array {name} beside it")
        if given.dtype != np.dtype(kind) or given.shape != (size,):
            expected = f"{size} numbers of type {np.dtype(kind)}"
            raise MessageError(f"{name}: expected {expected}, got {given.dtype} {given.shape}")
        if digest is not None and self.named[name][2].hex() != digest:
            raise BindingError(f"{name}: not the one that the manifest names")
        return self.once(name, lambda: self._as_named(name))

    def _as_named(self, name: str) -> npt.NDArray[Any]:
        """Return an array that has the hash which the signed bytes name."""
        array = _little(self.arrays[name])
        if self.named[name] != _named(array):
            raise MessageError("its arrays do not match the hashes that it names")
        return array

    @cached_property
    def opened(self) -> Slice:
        """The test slice beside a message, compared with what the server signed."""
        x, y, salts = (self.arrays.get(name, np.zeros(0)) for name in ("x", "y", "salts"))
        if self.body.slice is None:
            raise MessageError("a test slice without its place in the pool")
        if x.ndim < 1 or y.ndim < 1 or len(y) != len(x) or 0 in x.shape or 0 in y.shape:
            raise MessageError("a test slice has as many samples as labels")
        if salts.dtype != np.uint8:
            raise MessageError("salts of a test slice must be bytes")
        if x.nbytes + y.nbytes > SLICE_BYTES or salts.shape != (SALT_BYTES * len(y),):
            raise MessageError(
                f"expected at most {SLICE_BYTES} bytes of samples and {SALT_BYTES} of salt each, got "
                f"{x.nbytes + y.nbytes} and {salts.nbytes} for {len(y)}"
            )
        x, y, salts = (self._as_named(name) for name in ("x", "y", "salts"))
        index, path = self.body.slice
        return Slice(index=index, x=x, y=y, salts=salts.tobytes(), path=path)

    def told(self, words: int) -> Told:
        """Return what a request for a report says; ``words`` is how many integers the sum must have.

        Sizes are compared before anything is hashed. Call it once the author of the message is known.
        """
        body = self.body

        def read() -> Told:
            shown = self.opened if "x" in self.arrays else None
            x = self.array("sum", "<u4", words)
            return Told(self.round, x, body.included, shown, body.m0, body.head)

        with placing(self.exchange):
            return self.once(("told", words), read)


def _read(data: bytes | memoryview, kind: type[T]) -> T:
    try:
        return msgpack.decode(data, type=kind)
    except (MsgspecError, ValueError, RecursionError) as error:
        raise MessageError(f"not a message of {FORMAT}: {type(error).__name__}") from None


def _refuse_version(first: _Form, reader: str | None) -> None:
    """Raise VersionError for a message of another protocol, and MessageError for anything else."""
    if first.form == FORMAT:
        return
    if (found := re.fullmatch(_FORMATS.format("([0-9]{1,9})"), first.form)) is None:
        raise MessageError(f"not a message of {FORMAT}")
    shown = f" has fedmerit {first.version} and" if re.fullmatch(PACKAGE, first.version) else ""
    raise VersionError(
        f"the server{shown} speaks protocol {found[1]}, this member has fedmerit {VERSION} and speaks "
        f"protocol {PROTOCOL}: install versions with one protocol",
        stage="join",
        member=reader,
    )


def _signed(inner: bytes) -> bytes:
    return b"fedmerit remote message 1\0" + hashlib.sha256(inner).digest()


def signed_by(inner: bytes, signature: bytes, key: bytes) -> bool:
    """Return whether a server with this public key signed the inner bytes of a message."""
    return verifies(key, signature, _signed(inner))


def _little(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array as it is hashed and sent: C order, little-endian; copy it only if needed."""
    if values.dtype.kind not in KINDS:
        raise MessageError(f"a message carries numbers, got {values.dtype}", stage="report")
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))


def _named(values: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return values.dtype.str, values.shape, hashlib.sha256(values.data).digest()


def pack(value: Any) -> bytes:
    """Return a value as msgpack bytes."""
    return msgpack.encode(value)


def parsed(text: bytes, stage: str, most: int | None = None) -> dict[str, Any]:
    """Return the mapping in JSON that somebody signed; raise MessageError for anything else.

    ``most`` bytes are allowed: parsed, it takes up to 25 times as many. None if it was measured before.
    """
    if most is not None and len(text) > most:
        raise MessageError(f"expected at most {most} bytes of JSON, got {len(text)}", stage=stage)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageError("not JSON", stage=stage) from None
    if not isinstance(found, dict):
        raise MessageError("not a mapping", stage=stage)
    return found


def words_limit(members: int) -> int:
    """Return the most bytes that names and settings may have, few because a member stores them."""
    return 65_536 + 1024 * members


def ask_limit(exchange: Exchange, members: int) -> int:
    """Return the most bytes that a message in a run with this many members may have, without its arrays."""
    if exchange in _LONG:
        return SETTLEMENT_BYTES
    lists = 0 if exchange in ("join", "advertise", "report", "close") else 1 + (exchange == "unmask")
    return words_limit(members) + lists * list_limit(members)


def join_body(
    run: str,
    address: str,
    terms: Mapping[str, Any],
    commitment: Mapping[str, Any],
    server: bytes,
    *,
    run_config: bytes,
    held_out: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a member signs when it joins: its address, its run config and all that it agrees to.

    In a run with a panel, also what it commits to as a judge.
    """
    panel = {} if held_out is None else {"held_out": dict(held_out)}
    return panel | {
        "run": run,
        "address": address,
        "run_config": run_config.hex(),
        "terms": dict(terms),
        "commitment": dict(commitment),
        "server": server.hex(),
    }


def outcome_ask(run: str, told: Told) -> Ask:
    """Return the request for a report on a round."""
    place, arrays = None, {"sum": told.words}
    if told.slice is not None:
        place, arrays = (told.slice.index, told.slice.path), arrays | slice_arrays(told.slice)
    body = ReportAsk(told.included, told.m0_hash, told.head, place)
    return Ask("report", run, told.round, body, arrays)


def slice_arrays(shown: Slice) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that carry a test slice."""
    return {"x": shown.x, "y": shown.y, "salts": np.frombuffer(shown.salts, np.uint8)}
