"""A model as its carrier shows it, named arrays, and as it is summed: one vector."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedmerit.errors import MessageError, NoGradient, ReportError
from fedmerit.protocol.outcome import Model

NamedArrays = Mapping[str, Any]
"""Arrays by name: numpy's, PyTorch's, or any that ``array.numpy()`` turns into numpy's."""


def numbers(array: Any) -> npt.NDArray[Any]:
    """Return an array of any kind as numpy's."""
    return np.asarray(array.numpy() if hasattr(array, "numpy") else array)


@dataclass(frozen=True, eq=False)
class Shape:
    """Names, shapes and types of a model's arrays; arrays of integers, such as counters, are not summed."""

    arrays: dict[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, record: NamedArrays) -> Self:
        """Return the shape of a record; refuse a model without floating-point numbers, or with float16."""
        arrays = _arrays_in(record)
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
    def load(cls, dumped: list[Any]) -> Self:
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
        return self.flatten(self.arrays)

    def read(self, record: NamedArrays) -> Model:
        """Return another model of the same shape as one vector."""
        arrays = _arrays_in(record)
        for name, array in self.arrays.items():
            if name not in arrays:
                raise MessageError(f"expected an array {name!r}, got {listed(list(arrays))}")
            if (shape := arrays[name].shape) != array.shape:
                raise MessageError(f"array {name!r}: expected shape {array.shape}, got {shape}")
        if len(arrays) != len(self.arrays):
            raise MessageError(f"expected {len(self.arrays)} arrays, got {len(arrays)}")
        return self.flatten(arrays)

    def flatten(self, arrays: dict[str, npt.NDArray[Any]]) -> Model:
        """Return the floating-point arrays end to end, as float32."""
        parts = [arrays[name].ravel() for name, array in self.arrays.items() if _summed(array)]
        return np.concatenate(parts).astype(np.float32)

    def gradient(self, parts: Any) -> npt.NDArray[np.float32]:
        """Return the gradients of the summed arrays, by name or in their order, end to end."""
        summed = {name: array.shape for name, array in self.arrays.items() if _summed(array)}
        if not isinstance(parts, Mapping):
            if len(parts := list(parts)) != len(summed):
                expected = f"expected {len(summed)} arrays, one per floating-point array of the model"
                raise ReportError(f"gradient: {expected}, got {len(parts)}")
            parts = dict(zip(summed, parts, strict=True))
        vectors = []
        for name, shape in summed.items():
            part = parts.get(name)
            if part is None:
                raise NoGradient(
                    f"gradient: none for the array {name!r}, but for {listed(list(parts))}; expected one for "
                    "every floating-point array of the model, running statistics too (torch_scoring makes "
                    "them for a PyTorch model)",
                    coordinate=name,
                )
            values = np.asarray(numbers(part), np.float32)
            if values.shape != shape:
                raise ReportError(f"gradient of {name!r}: expected shape {shape}, got {values.shape}")
            vectors.append(values.ravel())
        return np.concatenate(vectors)

    def largest(self, vector: Model) -> dict[str, float]:
        """Return the largest absolute number of every summed array; NaN if the array contains one."""
        return {name: float(np.abs(part).max(initial=0.0)) for name, part in self._parts(vector)}

    def typical(self, vector: Model) -> dict[str, float]:
        """Return the root mean square of every summed array that is not empty."""
        parts = [(name, part) for name, part in self._parts(vector) if part.size]
        return {name: float(np.linalg.norm(part)) / math.sqrt(part.size) for name, part in parts}

    def named(self, vector: Model) -> dict[str, npt.NDArray[Any]]:
        """Return a vector as named arrays with the types of this shape."""
        arrays = dict(self.arrays)
        for name, part in self._parts(vector):
            arrays[name] = part.reshape(arrays[name].shape).astype(arrays[name].dtype)
        return arrays

    def record(self, vector: Model) -> NamedArrays:
        """Return a vector as users' functions get it."""
        return self.named(vector)

    def _parts(self, vector: Model) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yield the summed arrays' names and their parts of a vector."""
        begin = 0
        for name, array in self.arrays.items():
            if _summed(array):
                yield name, vector[begin : begin + array.size]
                begin += array.size


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


def _arrays_in(record: NamedArrays) -> dict[str, npt.NDArray[Any]]:
    return {name: numbers(array) for name, array in record.items()}
