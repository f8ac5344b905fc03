"""How fields of the core types are checked: finite, complete, named, in range; errors say whose and where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import ReportError

UNIT = (-1e-9, 1.0 + 1e-9)
"""[0, 1], with room for the rounding of a mean."""
LARGEST = 1e100
"""Beyond this sums of a few numbers could overflow; no utility is anywhere near."""


def names_of(clients: Iterable[str], n: int | None, where: str) -> tuple[str, ...]:
    """Different, non-empty names: n of them (made up where none are given), or any number for n = None."""
    if isinstance(clients, str | bytes) or not isinstance(clients, Iterable):
        raise ReportError(f"{where}clients must be a list of names, got {clients!r:.100}")
    names = tuple(clients) or tuple(f"client-{i}" for i in range(n or 0))
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ReportError(f"{where}client names must be non-empty strings, got {name!r}")
    if n is not None and len(names) != n:
        raise ReportError(f"{where}expected {n} client names, one per value, got {len(names)}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ReportError(f"{where}client {twice!r} appears more than once")
    return names


def floats(values: Any, what: str) -> npt.NDArray[np.float64]:
    if isinstance(values, Mapping | str | bytes):
        raise ReportError(f"{what}: expected a sequence of numbers, got {type(values).__name__}")
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ReportError(f"{what}: expected numbers, got {values!r}"[:300]) from error


def frozen(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    values.flags.writeable = False
    return values


class Setter:
    """Checks the fields of a frozen dataclass and stores them as read-only float64."""

    def __init__(self, target: Any, clients: Sequence[str], where: str) -> None:
        self.target, self.clients, self.where = target, clients, where

    def scalar(self, name: str, *, unit: str | None = None) -> None:
        value = getattr(self.target, name)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ReportError(f"{self.where}{name}: expected a number, got {value!r:.100}") from error
        low, high = UNIT if unit else (None, None)
        self._check(name, number, None, low, high, unit)
        object.__setattr__(self.target, name, number)

    def vector(
        self,
        name: str,
        *,
        optional: bool = False,
        nullable: bool = False,
        minimum: float | None = None,
        maximum: float | None = None,
        unit: str | None = None,
    ) -> None:
        given = getattr(self.target, name)
        if given is None and optional:
            return
        if unit:
            minimum, maximum = UNIT
        what = f"{self.where}{name}"
        if isinstance(given, np.ndarray) and given.dtype != object:
            null = np.isnan(given) if nullable and given.dtype.kind == "f" else np.zeros(given.shape, bool)
            values = floats(given, what)
        else:
            listed = [given] if np.isscalar(given) or given is None else given
            if isinstance(listed, Mapping | str | bytes):
                raise ReportError(f"{what}: expected one number per client, got {type(given).__name__}")
            items = list(listed)
            null = np.array([item is None for item in items], dtype=bool)
            if null.any() and not nullable:
                missing = int(np.flatnonzero(null)[0])
                who = self.clients[missing] if missing < len(self.clients) else f"number {missing}"
                raise ReportError(f"{what} of client {who!r} is missing")
            values = floats([np.nan if gone else item for gone, item in zip(null, items, strict=True)], what)
        if values.shape != (len(self.clients),):
            expected = f"expected {len(self.clients)} values, one per client"
            raise ReportError(f"{what}: {expected}, got shape {values.shape}")
        wrong = ~(np.abs(values) <= LARGEST) & ~null
        if minimum is not None:
            wrong |= values < minimum
        if maximum is not None:
            wrong |= values > maximum
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            self._check(name, float(values[first]), self.clients[first], minimum, maximum, unit)
        object.__setattr__(self.target, name, frozen(values))

    def _check(
        self,
        name: str,
        value: float,
        client: str | None,
        minimum: float | None,
        maximum: float | None,
        unit: str | None,
    ) -> None:
        whose = f" of client {client!r}" if client else ""
        if not abs(value) <= LARGEST:
            raise ReportError(f"{self.where}{name}{whose} must be a finite number, got {value}")
        low = -np.inf if minimum is None else minimum
        high = np.inf if maximum is None else maximum
        if not low <= value <= high:
            why = f" (utility {unit!r} promises it)" if unit else ""
            range_ = f"[{round(low, 6) + 0.0:g}, {round(high, 6):g}]{why}"
            raise ReportError(f"{self.where}{name}{whose} must lie in {range_}, got {value:g}")
