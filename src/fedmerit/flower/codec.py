"""What fedmerit and Flower exchange: models, values of models, our bytes inside messages, log lines."""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedmerit.errors import FedmeritError, MessageError, NoGradient, ReportError
from fedmerit.identity import canonical
from fedmerit.protocol.direction import Slope, metric_blocks
from fedmerit.protocol.messages import Parcel
from fedmerit.protocol.outcome import Evaluate, Model, PerSample
from fedmerit.protocol.pool import Indices, Slice
from fedmerit.scoring.metrics import jackknife
from fedmerit.secagg.setting import pack

# -------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True, eq=False)
class Shape:
    """Names, shapes and types of a model's arrays; arrays of integers, such as counters, are not summed."""

    arrays: dict[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, record: ArrayRecord) -> Shape:
        """Return the shape of a record; refuse a model without floating-point numbers, or with float16."""
        arrays = {name: array.numpy() for name, array in record.items()}
        if not any(_summed(array) for array in arrays.values()):
            raise MessageError("the model holds no floating-point numbers")
        for name, array in arrays.items():
            if array.dtype == np.float16:
                raise MessageError(f"array {name!r} is float16, too coarse for a sum: expected float32")
        return cls(arrays)

    def dump(self) -> list[Any]:
        """Return names, types and shapes, and the values of arrays not summed, for a member's files."""
        return [
            [name, array.dtype.str, list(array.shape), b"" if _summed(array) else array.tobytes()]
            for name, array in self.arrays.items()
        ]

    @classmethod
    def load(cls, dumped: list[Any]) -> Shape:
        """Read what `dump` wrote; the numbers that are summed become zero."""
        arrays = {}
        for name, kind, shape, data in dumped:
            flat = np.frombuffer(data, kind) if data else np.zeros(math.prod(shape), kind)
            arrays[name] = flat.reshape(shape)
        return cls(arrays)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of arrays that are not summed and stay as they are."""
        return tuple(name for name, array in self.arrays.items() if not _summed(array))

    @property
    def vector(self) -> Model:
        """The model as one vector."""
        return self.flatten(self.arrays)

    def read(self, record: ArrayRecord) -> Model:
        """Return another model of the same shape as one vector."""
        arrays = {name: array.numpy() for name, array in record.items()}
        for name, array in self.arrays.items():
            if name not in arrays:
                raise MessageError(f"expected an array {name!r}, got {listed(list(arrays))}")
            if arrays[name].shape != array.shape:
                got = arrays[name].shape
                raise MessageError(f"array {name!r}: expected shape {array.shape}, got {got}")
        if len(arrays) != len(self.arrays):
            raise MessageError(f"expected {len(self.arrays)} arrays, got {len(arrays)}")
        return self.flatten(arrays)

    def flatten(self, arrays: dict[str, npt.NDArray[Any]]) -> Model:
        """Return the floating-point arrays end to end, as float32."""
        parts = [arrays[name].ravel() for name, array in self.arrays.items() if _summed(array)]
        return np.concatenate(parts).astype(np.float32)

    def gradient(self, given: Any) -> npt.NDArray[np.float32]:
        """Return the gradients of the summed arrays, by name or in their order, end to end."""
        summed = {name: array.shape for name, array in self.arrays.items() if _summed(array)}
        if not isinstance(given, Mapping):
            if len(parts := list(given)) != len(summed):
                raise ReportError(
                    f"gradient: expected {len(summed)} arrays, one per floating-point array of the model, "
                    f"got {len(parts)}"
                )
            given = dict(zip(summed, parts, strict=True))
        found = []
        for name, shape in summed.items():
            if given.get(name) is None:
                raise NoGradient(
                    f"gradient: none for the array {name!r}, but for {listed(list(given))}; expected one for "
                    "every floating-point array of the model, running statistics too (torch_scoring makes "
                    "them for a PyTorch model)",
                    coordinate=name,
                )
            part = given[name]
            values = np.asarray(part.numpy() if isinstance(part, Array) else part, np.float32)
            if values.shape != shape:
                raise ReportError(f"gradient of {name!r}: expected shape {shape}, got {values.shape}")
            found.append(values.ravel())
        return np.concatenate(found)

    def largest(self, vector: Model) -> dict[str, float]:
        """Return the largest absolute number of every summed array; NaN if the array contains one."""
        found, begin = {}, 0
        for name, array in self.arrays.items():
            if _summed(array):
                part = vector[begin : begin + array.size]
                found[name], begin = float(np.abs(part).max(initial=0.0)), begin + array.size
        return found

    def record(self, vector: Model) -> ArrayRecord:
        """Return a vector as named arrays with the types of this shape."""
        found, begin = {}, 0
        for name, array in self.arrays.items():
            if _summed(array):
                size = math.prod(array.shape)
                part = vector[begin : begin + size].reshape(array.shape).astype(array.dtype)
                found[name], begin = Array(part.copy()), begin + size
            else:
                found[name] = Array(array)
        return ArrayRecord(found)


def listed(names: Sequence[str]) -> str:
    """Return the first few names of arrays, for a message.

    >>> listed(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more arrays"
    >>> listed([])
    'none'
    """
    rest = f" and {len(names) - 3} more array{'s' if len(names) > 4 else ''}" if len(names) > 3 else ""
    return (", ".join(map(repr, names[:3])) or "none") + rest


def _summed(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind == "f"


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
    found = {HEAD: Array("uint8", (len(parcel.head),), KIND, parcel.head)}
    for name, values in parcel.arrays.items():
        found[name] = Array(values.dtype.str, values.shape, KIND, values.tobytes())
    return RecordDict({BYTES: ArrayRecord(found)})


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
    record = content.get(BYTES)
    if not isinstance(record, ArrayRecord) or len(record) != 1:
        raise MessageError("the answer does not come from fedmerit")
    return take(content).head


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
    """Return the SHA-256 of everything that says how to train: message (without our bytes), type, run config.

    Members compare it before anything is unmasked. Otherwise a server could tell one of them to train
    differently from the others, and read that member's update from the sum.

    Args:
        message: its type chooses the function; arrays of every type, settings and metrics enter the digest.
        run_config: digest of the run config.
    """
    content, kind = message.content, message.metadata.message_type
    records: list[list[object]] = []
    for key in sorted(content):
        record = content[key]
        if key == BYTES:
            continue
        if isinstance(record, ArrayRecord):
            rows: list[list[object]] = [
                [name, array.dtype, list(array.shape), array.stype, hashlib.sha256(array.data).digest()]
                for name, array in record.items()
            ]
        else:
            rows = [[name, _plain(value)] for name, value in sorted(record.items())]
        records.append([key, type(record).__name__, rows])
    return hashlib.sha256(pack("fedmerit train message 2", kind, run_config, records)).digest()


def _plain(value: object) -> object:
    return list(value) if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------------------------------- values of models
# The user's ``value`` function. It must give one number in [0, 1] per test sample for every utility, or one
# number for a metric of the whole test set.

Value = Callable[[ArrayRecord, Any], npt.ArrayLike | Mapping[str, npt.ArrayLike]]
"""(model, test samples with ``x`` and ``y``) -> one number in [0, 1] per sample, or several such by name; one
number in [0, 1] for a metric of the whole test set."""


def evaluator(value: Value, shape: Shape, utilities: Sequence[str]) -> Evaluate:
    """Return a function that measures how good a model of this shape is on a slice.

    Of what is one number, it returns a pseudo-value per block of samples (`fedmerit.scoring.metrics`); for
    these, ``value`` is called once more per block, with the samples outside it.
    """

    def named(model: ArrayRecord, test: Slice | Samples) -> Mapping[str, Any]:
        given = value(model, test)
        if not isinstance(given, Mapping):
            given = {utilities[0]: given} if len(utilities) == 1 else {}
        if set(given) != set(utilities):
            got = ", ".join(map(str, given)) or "one unnamed array"
            raise ReportError(f"value: expected the utilities {', '.join(utilities)}, got {got}")
        return given

    def evaluate(model: Model, shown: Slice) -> PerSample:
        record, every = shape.record(model), len(shown.y)
        given = named(record, shown)
        known = {np.arange(every).tobytes(): given}  # several metrics share their calls

        def metric(places: Indices, name: str) -> Any:
            if (key := places.tobytes()) not in known:
                known[key] = named(record, Samples(shown.x[places], shown.y[places]))
            return known[key][name]

        found = {}
        for name in utilities:
            if np.ndim(given[name]):
                found[name] = _checked(name, given[name], every)
            else:
                blocks = metric_blocks(shown.y, balanced=False)  # the owner of the test set drew it
                found[name] = jackknife(name, partial(metric, name=name), blocks)
        return found

    return evaluate


@dataclass(frozen=True, eq=False)
class Samples:
    """Some samples of the test set: ``x`` and ``y``."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]


Gradient = Callable[[ArrayRecord, Samples], tuple[float, Mapping[str, Any] | Sequence[Any]]]
"""(model, test samples with ``x`` and ``y``) -> the mean of the paid utility over these samples, and its
gradient: an array for each floating-point array of the model, by name or in their order."""


def slope_of(gradient: Gradient, shape: Shape) -> Slope:
    """Return value and gradient at one model, as vectors, from a user's ``gradient`` function."""

    def slope(model: Model, shown: Slice, places: Indices) -> tuple[float, npt.NDArray[Any]]:
        given = gradient(shape.record(model), Samples(shown.x[places], shown.y[places]))
        if not isinstance(given, tuple) or len(given) != 2:
            raise ReportError(f"gradient: expected (value, gradients), got {type(given).__name__}")
        value, parts = given
        try:
            return float(value), shape.gradient(parts)
        except FedmeritError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:  # torch raises it if a gradient is attached
            raise ReportError(f"gradient: expected a number, and arrays of numbers: {error}") from None

    return slope


def definition(value: Value | Gradient | None, utilities: Sequence[str]) -> str:
    """Return the SHA-256 of the utilities' names and, if Python can find it, of the function's source."""
    try:
        source = getattr(value, "definition", None) or ("" if value is None else inspect.getsource(value))
    except (OSError, TypeError):
        source = ""
    return hashlib.sha256(canonical([list(utilities), source])).hexdigest()


def _checked(name: str, given: Any, samples: int) -> npt.NDArray[np.float64]:
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises it if a gradient is attached
        raise ReportError(f"value {name!r}: expected numbers: {error}") from None
    if values.shape != (samples,):
        raise ReportError(
            f"value {name!r}: expected {samples} numbers, one per sample, got shape {values.shape}"
        )
    bad = np.flatnonzero(~((values >= 0) & (values <= 1)))
    if bad.size:
        raise ReportError(f"value {name!r} of sample {bad[0]} must lie in [0, 1], got {values[bad[0]]}")
    return values


# ----------------------------------------------------------------------------------------------- log lines
# fedmerit's log lines among Flower's own, and a server's notes in a file.
#
# Flower prints what its logger ``flwr`` receives; any other logger has neither handler nor level. So inside
# Flower, and only there, the lines of ``fedmerit`` go to Flower's handlers. If the user has given the logger
# ``fedmerit`` a handler, nothing changes.

log = logging.getLogger("fedmerit")


class Relay(logging.Handler):
    """Passes lines on to Flower's handlers; on its console with our name, and the time if it shows none."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a line to each handler that takes lines of its level."""
        flower = logging.getLogger("flwr")
        for handler in flower.handlers if flower.isEnabledFor(record.levelno) else ():
            if record.levelno >= handler.level:
                console = hasattr(handler, "timestamps")
                handler.handle(_with_name(record, handler) if console else record)


def _with_name(record: logging.LogRecord, console: logging.Handler) -> logging.LogRecord:
    has_time = getattr(console, "timestamps", False) or getattr(console, "json", False)
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


class Notes(list[str]):
    """A server's notes in a run. Each note is also written to a file at once, as one line with its time."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def append(self, note: str) -> None:
        """Add a note. If the file cannot be written, log an error and go on."""
        super().append(note)
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{when} {' '.join(note.split())}\n")
        except OSError as error:
            log.error("%s: could not be written: %s", self.path, error)
