"""What fedmerit and Flower exchange: models, our bytes inside messages, log lines."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedmerit.carriers.shape import Shape
from fedmerit.errors import MessageError
from fedmerit.protocol.messages import Parcel
from fedmerit.protocol.outcome import Model
from fedmerit.secagg.setting import pack

# -------------------------------------------------------------------------------------------------- shapes


class RecordShape(Shape):
    """The shape of a model that users' functions get as an ArrayRecord."""

    def record(self, vector: Model) -> ArrayRecord:
        """Return a vector as named arrays with the types of this shape."""
        return ArrayRecord({name: Array(array) for name, array in self.named(vector).items()})


# ------------------------------------------------------------------------------------------------- records

QUERY = "query.fedmerit"
"""The type of all messages except those that train."""
BYTES = "fedmerit.bytes"
"""The record that holds our bytes, as arrays, because Flower cuts large arrays into pieces."""
KIND = "fedmerit.bytes.1"
"""The serialisation type of those arrays: plain bytes. Nothing is parsed before it is checked."""
HEAD = "0"
"""The array with the signed bytes, which hold the hashes of the arrays beside it."""
MOST_ARRAYS = 8
NUMBERS = "[<>|]?[fiub](1|2|4|8)"
"""The allowed types of arrays beside the signed bytes."""


def put(parcel: Parcel) -> RecordDict:
    """Return the content of a message that holds a parcel."""
    arrays = {HEAD: Array("uint8", (len(parcel.head),), KIND, parcel.head)}
    for name, values in parcel.arrays.items():
        arrays[name] = Array(values.dtype.str, values.shape, KIND, values.tobytes())
    return RecordDict({BYTES: ArrayRecord(arrays)})


def take(content: RecordDict) -> Parcel:
    """Return the parcel in the content of a message."""
    record = content.get(BYTES)
    if not isinstance(record, ArrayRecord) or HEAD not in record or len(record) > MOST_ARRAYS:
        raise MessageError("the message does not come from fedmerit")
    for array in record.values():
        if array.stype != KIND or not isinstance(array.data, bytes):
            raise MessageError(f"expected bytes, got an array serialised as {array.stype!r:.40}")
    arrays = {name: _numbers(array) for name, array in record.items() if name != HEAD}
    return Parcel(record[HEAD].data, arrays)


def answer_in(content: RecordDict) -> bytes:
    """Return the bytes of a member's answer; refuse arrays beside them."""
    parcel = take(content)
    if parcel.arrays:
        raise MessageError("the answer does not come from fedmerit")
    return parcel.head


def _numbers(array: Array) -> npt.NDArray[Any]:
    """Return an array of numbers; raise `MessageError` unless its bytes fit its shape."""
    if not isinstance(array.dtype, str) or not re.fullmatch(NUMBERS, array.dtype):  # numpy would parse it
        raise MessageError(f"expected numbers, got {array.dtype!r:.40}")
    try:
        kind, shape = np.dtype(array.dtype), tuple(array.shape)
        if math.prod(shape) * kind.itemsize != len(array.data) or min(shape, default=1) < 0:
            raise MessageError("the array's size does not match its shape")
        return np.frombuffer(array.data, kind).reshape(shape)
    except (TypeError, ValueError):
        raise MessageError(f"expected an array of numbers, got {array.dtype!r:.40}") from None


def only_arrays(content: RecordDict) -> ArrayRecord:
    """Return the one model in a user's message."""
    records = [record for key, record in content.array_records.items() if key != BYTES]
    if len(records) != 1:
        raise MessageError(f"expected one ArrayRecord, the model, got {len(records)}")
    return records[0]


def config_digest(config: Mapping[str, object]) -> bytes:
    """Return the SHA-256 of a run config. It depends on the types of values, but not on the order of keys.

    Flower builds the run config from the app's defaults and the run's overrides, so all nodes of an honest
    run have the same one. A node's owner sets the node config, which is private and does not enter.
    """
    for key, value in config.items():
        if not isinstance(value, bool | int | float | str | bytes):
            kind = type(value).__name__
            raise MessageError(f"run config: {key} must be a number, a text or a truth value, got a {kind}")
    rows = [[key, config[key]] for key in sorted(config)]
    try:
        return hashlib.sha256(pack("fedmerit run config 1", rows)).digest()
    except OverflowError:
        raise MessageError("run config: a whole number has more than 64 bits") from None


def digest(message: Message, run_config: bytes) -> bytes:
    """Return the SHA-256 of everything that says how to train: the message's type, its records (arrays of
    every type, settings, metrics) except our bytes, and the digest of the run config.

    Members compare it before anything is unmasked. Otherwise a server could tell one of them to train
    differently from the others, and read that member's update from the sum.
    """
    content, kind = message.content, message.metadata.message_type
    records: list[list[object]] = []
    for key in sorted(content):
        record = content[key]
        if key == BYTES:
            continue
        rows: list[list[object]] = []
        for name, value in record.items() if isinstance(record, ArrayRecord) else sorted(record.items()):
            if isinstance(value, Array):
                hashed = hashlib.sha256(value.data).digest()
                rows.append([name, value.dtype, list(value.shape), value.stype, hashed])
            else:
                rows.append([name, list(value) if isinstance(value, list | tuple) else value])
        records.append([key, type(record).__name__, rows])
    return hashlib.sha256(pack("fedmerit train message 1", kind, run_config, records)).digest()


# ----------------------------------------------------------------------------------------------- log lines
# Flower prints what its logger ``flwr`` receives; any other logger has neither handler nor level. So inside
# Flower, and only there, the lines of ``fedmerit`` go to Flower's handlers, unless the user has given the
# logger ``fedmerit`` a handler.

log = logging.getLogger("fedmerit")


class Relay(logging.Handler):
    """Passes lines on to Flower's handlers; on its console with our name, and the time if it shows none."""

    def emit(self, record: logging.LogRecord) -> None:
        flower = logging.getLogger("flwr")
        for handler in flower.handlers if flower.isEnabledFor(record.levelno) else ():
            if record.levelno >= handler.level:
                handler.handle(_with_name(record, handler) if hasattr(handler, "timestamps") else record)


def _with_name(record: logging.LogRecord, console: Any) -> logging.LogRecord:
    has_time = console.timestamps or getattr(console, "json", False)
    when = "" if has_time else logging.Formatter().formatTime(record, " %Y-%m-%d %H:%M:%S")
    named = copy.copy(record)
    named.msg, named.args = f"fedmerit{when}: {record.getMessage()}", ()
    return named


def log_inside_flower() -> None:
    """Send fedmerit's lines, INFO and above, to Flower's handlers from now on; acts once per process."""
    if log.handlers:
        return
    log.addHandler(Relay())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
