"""A model as Flower carries it (named arrays) and as fedmerit sums it (one flat vector of float32)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from fedmerit.errors import MessageError
from fedmerit.federation.protocol import Model


@dataclass(frozen=True, eq=False)
class Shape:
    """Names, shapes and types of a model's arrays, and what is not summed: integers, such as counters."""

    arrays: dict[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, record: ArrayRecord) -> Shape:
        """That of a record; a model without a floating-point number is refused."""
        arrays = {name: array.numpy() for name, array in record.items()}
        if not any(_summed(array) for array in arrays.values()):
            raise MessageError("the model holds no floating-point numbers")
        for name, array in arrays.items():
            if array.dtype == np.float16:
                raise MessageError(f"array {name!r} is float16, too coarse for a sum: expected float32")
        return cls(arrays)

    def dump(self) -> list[Any]:
        """Names, types and shapes, and the values of what is not summed; for a member's files."""
        return [
            [name, array.dtype.str, list(array.shape), b"" if _summed(array) else array.tobytes()]
            for name, array in self.arrays.items()
        ]

    @classmethod
    def load(cls, dumped: list[Any]) -> Shape:
        """What `dump` wrote; the numbers that are summed are zero."""
        arrays = {}
        for name, kind, shape, data in dumped:
            flat = np.frombuffer(data, kind) if data else np.zeros(math.prod(shape), kind)
            arrays[name] = flat.reshape(shape)
        return cls(arrays)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Arrays that stay as they are."""
        return tuple(name for name, array in self.arrays.items() if not _summed(array))

    @property
    def vector(self) -> Model:
        """The model itself as one vector."""
        return self.flatten(self.arrays)

    def read(self, record: ArrayRecord) -> Model:
        """Another model of the same shape as one vector."""
        arrays = {name: array.numpy() for name, array in record.items()}
        for name, array in self.arrays.items():
            if name not in arrays or arrays[name].shape != array.shape:
                got = arrays[name].shape if name in arrays else "nothing"
                raise MessageError(f"array {name!r}: expected shape {array.shape}, got {got}")
        if len(arrays) != len(self.arrays):
            raise MessageError(f"expected {len(self.arrays)} arrays, got {len(arrays)}")
        return self.flatten(arrays)

    def flatten(self, arrays: dict[str, npt.NDArray[Any]]) -> Model:
        """The floating-point arrays end to end, as float32."""
        parts = [arrays[name].ravel() for name, array in self.arrays.items() if _summed(array)]
        return np.concatenate(parts).astype(np.float32)

    def largest(self, vector: Model) -> dict[str, float]:
        """The largest absolute number of every array that is summed; NaN where one is."""
        found, begin = {}, 0
        for name, array in self.arrays.items():
            if _summed(array):
                part = vector[begin : begin + array.size]
                found[name], begin = float(np.abs(part).max(initial=0.0)), begin + array.size
        return found

    def record(self, vector: Model) -> ArrayRecord:
        """A vector as named arrays of the first model's types."""
        found, begin = {}, 0
        for name, array in self.arrays.items():
            if _summed(array):
                size = math.prod(array.shape)
                part = vector[begin : begin + size].reshape(array.shape).astype(array.dtype)
                found[name], begin = Array(part.copy()), begin + size
            else:
                found[name] = Array(array)
        return ArrayRecord(found)


def _summed(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind == "f"
