"""What coordinator and member say to each other, as bounded bytes (msgpack; nothing is ever unpickled)."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, get_args

import msgpack
import numpy as np

from fedmerit.data.pool import Slice
from fedmerit.errors import FedmeritError, MessageError
from fedmerit.federation.protocol import Outcome
from fedmerit.keys import verifies
from fedmerit.ledger import Signer, canonical
from fedmerit.secagg.messages import list_limit, refuse_many
from fedmerit.secagg.quantise import MOST_MEMBERS

Exchange = Literal["join", "advertise", "share", "train", "check", "unmask", "report", "close"]
EXCHANGES: Final[tuple[Exchange, ...]] = get_args(Exchange)
FORMAT: Final = "fedmerit remote 1"
LEAST_SAMPLES: Final = 10
KINDS: Final = "fiub"  # of test samples: numbers, never objects
VALUES: Final = 256
"""Most values in a message of the server, and two more a member: it holds one list of names at a time."""


@dataclass(frozen=True)
class Ask:
    """One message of the coordinator: which exchange of which round, and what goes with it."""

    exchange: Exchange
    run: str
    round: int
    body: Mapping[str, Any]

    def pack(self, sign: Signer) -> bytes:
        """As bytes, signed by the server: whoever is told something can prove it."""
        inner = pack([self.exchange, self.run, self.round, dict(self.body)])
        return pack([FORMAT, inner, sign(_signed(inner))])

    @classmethod
    def unpack(cls, data: bytes, members: int = MOST_MEMBERS) -> tuple[Ask, Callable[[bytes], bool]]:
        """A message to one of so many members, and what tells whether a key signed it.

        Before its author is known it costs no more memory than a few times its size.
        """
        what, values = "a message of the server", VALUES + 2 * members
        match unpack(data, what, values=4):
            case [form, bytes(inner), bytes(signature)] if form == FORMAT:
                match unpack(inner, what, values=values, text=words_limit(members)):
                    case [str(exchange), str(run), int(number), dict(body)] if (
                        exchange in EXCHANGES and type(number) is int
                    ):
                        if len(data) > (limit := ask_limit(exchange, members)):
                            raise MessageError(
                                f"expected at most {limit} bytes, got {len(data)}", stage=exchange
                            )
                        return cls(exchange, run, number, body), partial(_verifies, inner, signature)
        raise MessageError(f"not a message of {FORMAT}")

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """An entry of the body that must have this type."""
        value = self.body.get(key)
        if not isinstance(value, kind):
            raise MessageError(f"{key} is missing or of the wrong type", stage=self.exchange)
        return value


def _signed(inner: bytes) -> bytes:
    return b"fedmerit remote message 1\0" + hashlib.sha256(inner).digest()


def _verifies(inner: bytes, signature: bytes, key: bytes) -> bool:
    return verifies(key, signature, _signed(inner))


def pack(value: Any) -> bytes:
    """A value as bytes."""
    return bytes(msgpack.packb(value))


def unpack(data: bytes, what: str, *, values: int | None = None, text: int = -1) -> Any:
    """The value that these bytes stand for.

    Args:
        data: the bytes.
        what: they should be, for the error.
        values: most values in it, counted before any is made; None for what this machine wrote itself.
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


def words_limit(members: int) -> int:
    """Most bytes of names and settings: a member keeps them, so nobody may make them large."""
    return 65_536 + 1024 * members


def ask_limit(exchange: Exchange, members: int) -> float:
    """Most bytes of a message to one of so many members.

    A request for a report holds a model and test samples. It is compared with the member's own model and the
    pool's commitment, and has no other limit than that of the transport.
    """
    if exchange == "report":
        return math.inf
    return words_limit(members) + (0 if exchange in ("join", "advertise", "close") else list_limit(members))


def join_body(
    run: str,
    address: str,
    terms: Mapping[str, Any],
    commitment: Mapping[str, Any],
    server: bytes,
    *,
    run_config: bytes,
) -> dict[str, Any]:
    """What a member signs when it joins: where it is, what it was handed, and everything it agrees to."""
    return {
        "run": run,
        "address": address,
        "run_config": run_config.hex(),
        "terms": dict(terms),
        "commitment": dict(commitment),
        "server": server.hex(),
    }


def pack_outcome(outcome: Outcome, following: Sequence[str]) -> dict[str, Any]:
    """A round's outcome as the body of ``report``; ``following`` is the schedule of the next round."""
    shown = outcome.slice
    return {
        "model": np.ascontiguousarray(outcome.model, dtype="<f4").tobytes(),
        "total": outcome.total_weight,
        "included": list(outcome.included),
        "m0": outcome.m0_hash,
        "head": outcome.head,
        "slice": [shown.index, _array(shown.x), _array(shown.y), shown.salts, list(shown.path)],
        "next": list(following),
    }


def unpack_outcome(ask: Ask, length: int) -> Outcome:
    """The outcome of a round whose model has this many numbers."""
    model = ask.get("model", bytes)
    if len(model) != 4 * length:
        raise MessageError(f"expected a model of {length} numbers, got {len(model)} bytes", stage="report")
    try:
        index, x, y, salts, path = ask.get("slice", list)
        if not (isinstance(salts, bytes) and all(isinstance(node, bytes) for node in path)):
            raise MessageError("salts and path of a test slice must be bytes", stage="report")
        images, labels = _unarray(x), _unarray(y)
        if labels.ndim != 1 or not LEAST_SAMPLES <= len(labels) == len(images):
            raise MessageError(
                f"a test slice has {LEAST_SAMPLES} samples or more: fewer say too much about each",
                stage="report",
            )
        shown = Slice(index=int(index), x=images, y=labels, salts=salts, path=tuple(path))
        return Outcome(
            round=ask.round,
            model=np.frombuffer(model, "<f4").astype(np.float32),
            total_weight=float(ask.get("total", float)),
            included=tuple(str(name) for name in ask.get("included", list)),
            slice=shown,
            m0_hash=ask.get("m0", str),
            head=checked_head(ask),
        )
    except FedmeritError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise MessageError(f"not the outcome of a round: {error!s:.100}", stage="report") from None


def checked_head(ask: Ask) -> str:
    """A head of the ledger in a message: 64 hexadecimal digits."""
    head: str = ask.get("head", str)
    if not re.fullmatch("[0-9a-f]{64}", head):
        raise MessageError("not a head of a ledger", stage=ask.exchange)
    return head


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two bodies are the same record."""
    return canonical(one) == canonical(other)


def _array(values: np.ndarray[Any, Any]) -> list[Any]:
    if values.dtype.kind not in KINDS:
        raise MessageError(f"test samples must be numbers, got {values.dtype}", stage="report")
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return [little.dtype.str, list(values.shape), little.tobytes()]


def _unarray(packed: Any) -> np.ndarray[Any, Any]:
    kind, shape, data = packed
    dtype = np.dtype(kind)
    if dtype.kind not in KINDS:
        raise MessageError(f"test samples must be numbers, got {dtype}", stage="report")
    if not shape or any(type(size) is not int or size < 1 for size in shape):
        raise MessageError("test samples must have a shape", stage="report")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise MessageError("test samples of another size than their shape", stage="report")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))
