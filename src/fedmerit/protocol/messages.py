"""The messages of the server to its members, as signed bytes of limited size and arrays beside them.

A member can prove what it was told, and compares sizes before it hashes or parses anything.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, cast, get_args

import msgpack
import numpy as np
import numpy.typing as npt

from fedmerit.config import VERSION
from fedmerit.errors import FedmeritError, MessageError, VersionError
from fedmerit.identity import Signer, canonical, verifies
from fedmerit.protocol.outcome import Told
from fedmerit.protocol.pool import SALT_BYTES, Slice
from fedmerit.secagg.messages import list_limit, refuse_many
from fedmerit.secagg.quantise import MOST_MEMBERS

# --------------------------------------------------------------------------------------------- on the wire

Exchange = Literal[
    "join", "advertise", "share", "train", "check", "unmask", "report",
    "last", "open", "agree", "agreed", "state", "table", "pairs", "settle", "close",
]  # fmt: skip
EXCHANGES: Final[tuple[Exchange, ...]] = get_args(Exchange)
PROTOCOL: Final = 4
"""The version of these messages. Packages of different versions work together if they have this number."""
_FORMATS: Final = "fedmerit remote {}"
PACKAGE: Final = "[0-9a-zA-Z.+-]{1,40}"
"""What the version of a package looks like."""
FORMAT: Final = _FORMATS.format(PROTOCOL)
LEAST_SAMPLES: Final = 10
KINDS: Final = "fiub"  # kinds of dtype in a message: numbers, never objects
SLICE_BYTES: Final = 2**31
"""Most bytes of the samples of a test slice."""
VALUES: Final = 256
"""Most values in a message of the server; six per member are added, for what each of them signed."""
SETTLEMENT_BYTES: Final = 2**26
"""Most bytes of a message of the settlement, which carries all rounds; not counting its arrays."""
_LONG: Final = ("open", "state", "table", "pairs", "settle")


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


@dataclass(frozen=True, eq=False)
class Ask:
    """One message of the coordinator: its exchange, its round and its content.

    The arrays of a message that was unpacked have not been compared with the types, shapes and hashes that
    the signed bytes name; `told` does that.
    """

    exchange: Exchange
    run: str
    round: int
    body: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    named: Mapping[str, Any] = field(default_factory=dict)  # type, shape and hash of every array

    def pack(self, sign: Signer) -> Parcel:
        """Return the message as a parcel signed by the server: its receiver can prove what it was told."""
        arrays = {name: _little(values) for name, values in self.arrays.items()}
        named = {name: _named(values) for name, values in arrays.items()}
        inner = pack([self.exchange, self.run, self.round, dict(self.body), named])
        return Parcel(pack([FORMAT, VERSION, inner, sign(_signed(inner))]), arrays)

    @classmethod
    def unpack(
        cls, parcel: Parcel, members: int = MOST_MEMBERS, reader: str | None = None
    ) -> tuple[Ask, Callable[[bytes], bool]]:
        """Return the message in a parcel, and a function that tells whether a given key signed it.

        Its author is not yet known, so unpacking takes at most a few times the memory of the parcel.

        Args:
            parcel: what was received.
            members: how many members the reader's roster has.
            reader: the member who reads it, for the error message.

        Raises:
            VersionError: it is a message of another protocol.
        """
        what, values = "a message of the server", VALUES + 6 * members
        _refuse_version(parcel.head, reader)
        match unpack(parcel.head, what, values=5):
            case [form, str(), bytes(inner), bytes(signature)] if form == FORMAT:
                match unpack(inner, what, values=values, text=words_limit(members)):
                    case [str(exchange), str(run), int(number), dict(body), dict(named)] if (
                        exchange in EXCHANGES and type(number) is int
                    ):
                        if len(parcel.head) > (limit := ask_limit(exchange, members)):
                            raise MessageError(
                                f"expected at most {limit} bytes, got {len(parcel.head)}", stage=exchange
                            )
                        needed, allowed = _arrays_of(exchange)
                        strange = set(named) - needed
                        if (
                            set(parcel.arrays) != set(named)
                            or not (needed <= set(named))
                            or (strange and strange != allowed)
                        ):
                            raise MessageError("other arrays beside it than expected", stage=exchange)
                        ask = cls(exchange, run, number, body, parcel.arrays, named)
                        return ask, partial(signed_by, inner, signature)
        raise MessageError(f"not a message of {FORMAT}")

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return an entry of the body; raise MessageError unless it has this type."""
        value = self.body.get(key)
        if not isinstance(value, kind):
            raise MessageError(f"{key} is missing or of the wrong type", stage=self.exchange)
        return value

    def array(self, name: str, kind: str, size: int) -> npt.NDArray[Any]:
        """Return a flat array of the message, compared with what the server signed: its size first."""
        if self.__dict__.get(f"_{name}") is None:  # members who share a process ask the same
            given = self.arrays[name]
            if given.dtype != np.dtype(kind) or given.shape != (size,):
                raise MessageError(
                    f"{name}: expected {size} numbers of type {np.dtype(kind)}, got {given.dtype} "
                    f"{given.shape}",
                    stage=self.exchange,
                )
            self.__dict__[f"_{name}"] = _named_by(self, name)
        found: npt.NDArray[Any] = self.__dict__[f"_{name}"]
        return found

    def opened(self) -> Slice:
        """Return the test slice beside a message, compared with what the server signed."""
        if "_opened" not in self.__dict__:
            self.__dict__["_opened"] = _slice(self)
        found: Slice = self.__dict__["_opened"]
        return found

    def told(self, words: int) -> Told:
        """Return what a request for a report says, with its arrays compared with what the server signed.

        Sizes are compared first, so that nobody can have a member hash more than a sum and a test slice. Call
        it once the author of the message is known.

        Args:
            words: how many integers the sum must have.
        """
        if self.__dict__.get("_told", (None,))[0] != words:  # members who share a process ask the same
            self.__dict__["_told"] = words, _told(self, words)
        told: Told = self.__dict__["_told"][1]
        return told


SLICE: Final = {"x", "y", "salts"}


def _arrays_of(exchange: str) -> tuple[set[str], set[str]]:
    """Return the names of the arrays that a message must have, and of those that it may have."""
    needed = {"report": {"sum"}, "open": SLICE, "agree": {"g", "m0", "sum"}, "table": {"g"}}
    return needed.get(exchange, set()), SLICE if exchange == "report" else set()


def _refuse_version(head: bytes, reader: str | None) -> None:
    """Raise VersionError for a message of another protocol.

    A message of any protocol begins with its format; from protocol 3 on, the version of the package follows,
    which nobody has signed and which is only shown.
    """
    reads = msgpack.Unpacker(max_str_len=len(head))
    reads.feed(head[:256])
    try:
        reads.read_array_header()
        form, theirs = reads.unpack(), None
        found = re.fullmatch(_FORMATS.format("([0-9]{1,9})"), form) if isinstance(form, str) else None
        if found is None or int(found[1]) == PROTOCOL:
            return
        if int(found[1]) > 2:
            theirs = reads.unpack()
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return  # not a message at all, which `unpack` says
    shown = isinstance(theirs, str) and re.fullmatch(PACKAGE, theirs)
    raise VersionError(
        f"the server{f' has fedmerit {theirs} and' if shown else ''} speaks protocol {found[1]}, this member "
        f"has fedmerit {VERSION} and speaks protocol {PROTOCOL}: install versions with one protocol",
        stage="join",
        member=reader,
    )


def _signed(inner: bytes) -> bytes:
    return b"fedmerit remote message 3\0" + hashlib.sha256(inner).digest()


def signed_by(inner: bytes, signature: bytes, key: bytes) -> bool:
    """Return whether a server with this public key signed the inner bytes of a message."""
    return verifies(key, signature, _signed(inner))


def _little(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array as it is hashed and sent: C order, little-endian; copy it only if needed."""
    if values.dtype.kind not in KINDS:
        raise MessageError(f"a message carries numbers, got {values.dtype}", stage="report")
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))


def _named(values: npt.NDArray[Any]) -> list[Any]:
    return [values.dtype.str, list(values.shape), hashlib.sha256(values.data).digest()]


def pack(value: Any) -> bytes:
    """Return a value as msgpack bytes."""
    return bytes(msgpack.packb(value))


def unpack(data: bytes, what: str, *, values: int | None = None, text: int = -1) -> Any:
    """Return the value in msgpack bytes.

    Args:
        data: the bytes.
        what: what the bytes should be, for the error message.
        values: most values allowed, counted before any is built; None for bytes that this machine wrote.
        text: most bytes of one text.
    """
    try:
        if values is not None:
            refuse_many(data, values)
        return msgpack.unpackb(data, max_str_len=text)
    except MessageError as error:
        raise MessageError(f"not {what}: {error}") from None
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MessageError(f"not {what}: {type(error).__name__}") from None


def parsed(text: bytes, stage: str, most: int | None = None) -> dict[str, Any]:
    """Return the mapping in JSON that somebody signed; raise MessageError for anything else.

    Args:
        text: the JSON.
        stage: for the error message.
        most: most bytes that it may have: parsed, it takes up to 25 times as many. None if it was measured.
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
    """Return the most bytes that a message in a run with this many members may have, without its arrays.

    Only a request for a report has arrays: a sum as long as the member's own model, and a test slice of at
    most ``SLICE_BYTES``. Both limits are checked before anything is hashed.
    """
    if exchange in _LONG:
        return SETTLEMENT_BYTES
    lists = exchange not in ("join", "advertise", "report", "close")
    return words_limit(members) + (list_limit(members) if lists else 0)


def join_body(
    run: str,
    address: str,
    terms: Mapping[str, Any],
    commitment: Mapping[str, Any],
    server: bytes,
    *,
    run_config: bytes,
) -> dict[str, Any]:
    """Return what a member signs when it joins: its address, its run config and all that it agrees to."""
    return {
        "run": run,
        "address": address,
        "run_config": run_config.hex(),
        "terms": dict(terms),
        "commitment": dict(commitment),
        "server": server.hex(),
    }


def outcome_ask(run: str, told: Told, following: Sequence[str]) -> Ask:
    """Return the request for a report on a round; ``following`` is the schedule of the next round.

    Without a test slice it asks for an acknowledgement.
    """
    body: dict[str, Any] = {
        "included": list(told.included),
        "m0": told.m0_hash,
        "head": told.head,
        "next": list(following),
    }
    arrays: dict[str, npt.NDArray[Any]] = {"sum": told.words}
    if told.slice is not None:
        body |= {"slice": [told.slice.index, list(told.slice.path)]}
        arrays |= slice_arrays(told.slice)
    return Ask("report", run, told.round, body, arrays)


def slice_arrays(shown: Slice) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that carry a test slice."""
    return {"x": shown.x, "y": shown.y, "salts": np.frombuffer(shown.salts, np.uint8)}


def _named_by(ask: Ask, name: str) -> npt.NDArray[Any]:
    """Return an array that has the hash which the signed bytes name."""
    array = _little(ask.arrays[name])
    if ask.named[name] != _named(array):
        raise MessageError("its arrays do not match the hashes that it names", stage=ask.exchange)
    return array


def _slice(ask: Ask) -> Slice:
    try:
        x, y, salts = (ask.arrays[name] for name in ("x", "y", "salts"))
        index, path = ask.get("slice", list)
        if x.ndim < 1 or y.ndim < 1 or len(y) != len(x) or 0 in x.shape or 0 in y.shape:
            raise MessageError("a test slice has as many samples as labels", stage=ask.exchange)
        if salts.dtype != np.uint8 or not all(isinstance(node, bytes) for node in path):
            raise MessageError("salts and path of a test slice must be bytes", stage=ask.exchange)
        if x.nbytes + y.nbytes > SLICE_BYTES or salts.shape != (SALT_BYTES * len(y),):
            raise MessageError(
                f"expected at most {SLICE_BYTES} bytes of samples and {SALT_BYTES} of salt each, got "
                f"{x.nbytes + y.nbytes} and {salts.nbytes} for {len(y)}",
                stage=ask.exchange,
            )
        x, y, salts = (_named_by(ask, name) for name in ("x", "y", "salts"))
        return Slice(index=int(index), x=x, y=y, salts=salts.tobytes(), path=tuple(path))
    except FedmeritError:
        raise
    except (LookupError, ValueError, TypeError, OverflowError) as error:
        raise MessageError(f"not a test slice: {error!s:.100}", stage=ask.exchange) from None


def _told(ask: Ask, words: int) -> Told:
    shown = ask.opened() if "x" in ask.arrays else None
    return Told(
        round=ask.round,
        words=ask.array("sum", "<u4", words),
        included=tuple(str(name) for name in ask.get("included", list)),
        slice=shown,
        m0_hash=ask.get("m0", str),
        head=checked_head(ask),
    )


def checked_head(ask: Ask) -> str:
    """Return the ledger's head in a message; raise MessageError unless it is 64 hexadecimal digits."""
    head: str = ask.get("head", str)
    if not re.fullmatch("[0-9a-f]{64}", head):
        raise MessageError("not the head of a ledger", stage=ask.exchange)
    return head


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two bodies have the same canonical form."""
    return canonical(one) == canonical(other)
