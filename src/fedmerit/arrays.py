"""Numbers in an order, as people pass them: lists, arrays, tensors, Series; and what only looks like it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import ReportError


def is_number(value: Any) -> bool:
    """Whether this is one real number, and neither text nor a truth value that would pass for one."""
    if hasattr(value, "__array__"):  # numpy's own, and tensors without an axis
        return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf"
    return isinstance(value, Real | Decimal) and not isinstance(value, bool)


def number(value: Any) -> float | None:
    """As float; None for what is not one real number, or larger than any float.

    >>> number(10**400), number("1"), number([1]), number(True), number(np.float32(0.5))
    (None, None, None, None, 0.5)
    """
    try:
        return float(value) if is_number(value) else None
    except (TypeError, ValueError, OverflowError):
        return None


def sequence(values: Any, what: str) -> npt.NDArray[Any] | Sequence[Any]:
    """Values in an order, and how many is known: no mapping, set, iterator or text; a number is one value."""
    if np.ma.is_masked(values):
        raise ReportError(f"{what}: expected a number in every place, got an array with masked ones")
    if hasattr(values, "__array__"):
        try:
            return np.atleast_1d(np.asarray(values))
        except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor that is on a GPU
            raise ReportError(f"{what}: expected a sequence of numbers: {error}"[:300]) from error
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return values
    if values is not None and np.isscalar(values) and not isinstance(values, str | bytes):
        return [values]
    raise ReportError(f"{what}: expected a sequence of numbers, got {type(values).__name__}")


def floats(values: Any, what: str) -> npt.NDArray[np.float64]:
    """As float64, if they are real numbers: no text, truth values, nothings or complex numbers."""
    listed = sequence(values, what)
    if isinstance(listed, np.ndarray) and listed.dtype != object:
        if listed.dtype.kind not in "iuf":
            raise ReportError(f"{what}: expected numbers, got an array of {listed.dtype}")
        return np.array(listed, dtype=np.float64)
    try:
        items = np.array(listed, dtype=object)
        numbers = np.array([is_number(item) for item in items.flat], dtype=bool)
        if numbers.all():
            return items.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ReportError(f"{what}: expected numbers, got {values!r}"[:300]) from error
    first = int(np.argmin(numbers))
    where = f"[{first}]" if items.ndim == 1 else ""
    raise ReportError(f"{what}{where}: expected a number, got {items.flat[first]!r:.100}")


def labels_of(values: Any) -> tuple[Hashable, ...] | None:
    """Labels of a pandas Series, or of anything like one; None where they only count, 0, 1, ..."""
    index = getattr(values, "index", None)
    if not hasattr(values, "__array__") or index is None or callable(index) or np.ndim(values) != 1:
        return None
    return _labels(index)


def in_order_of(clients: Sequence[str], values: Any, what: str) -> Any:
    """Values with labels in the order of the clients, whose names the labels must be; others as they are."""
    labels = labels_of(values)
    if labels is None:
        return values
    return np.asarray(values)[_places(clients, labels, what)]


def in_order_of_both(clients: Sequence[str], values: Any, what: str) -> Any:
    """The same for a pandas frame with a row and a column per client: both are put in order."""
    index, columns = getattr(values, "index", None), getattr(values, "columns", None)
    if not hasattr(values, "__array__") or index is None or columns is None:
        return values
    rows, columns = _labels(index), _labels(columns)
    if rows is None and columns is None:
        return values
    counting = tuple(range(len(clients)))
    ordered = np.ix_(
        _places(clients, rows or counting, f"{what}, rows"),
        _places(clients, columns or counting, f"{what}, columns"),
    )
    return np.asarray(values)[ordered]


def _places(clients: Sequence[str], labels: Sequence[Hashable], what: str) -> list[int]:
    """Where each client is among the labels, which must be the clients."""
    if len(labels) != len(clients) or set(labels) != set(clients):
        raise ReportError(
            f"{what}: expected the clients as labels, {_listed(clients)}, in any order, or 0, 1, ... for "
            f"values in their order; got {_listed(labels)}"
        )
    return [labels.index(client) for client in clients]


def frozen(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    values.flags.writeable = False
    return values


class ReadOnly:
    """A frozen dataclass whose arrays stay read-only in copies too: numpy's own copies and pickles do not."""

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, frozen(value) if isinstance(value, np.ndarray) else value)


def _labels(index: Iterable[Hashable]) -> tuple[Hashable, ...] | None:
    labels = tuple(index)
    return None if labels == tuple(range(len(labels))) else labels


def _listed(names: Sequence[Hashable]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
