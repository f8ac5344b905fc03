"""The user's ``value`` function, checked: one number in [0, 1] per test sample, for every utility."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord

from fedmerit.errors import ReportError
from fedmerit.flower.codec import Shape
from fedmerit.identity.encoding import canonical
from fedmerit.protocol.messages import Evaluate, Model, PerSample
from fedmerit.protocol.pool import Slice

Value = Callable[[ArrayRecord, Slice], npt.ArrayLike | Mapping[str, npt.ArrayLike]]
"""(model, test slice with ``x`` and ``y``) -> a number in [0, 1] per sample, or several such by name."""


def evaluator(value: Value, shape: Shape, utilities: Sequence[str]) -> Evaluate:
    """How good a model is on a slice, for models of this shape."""

    def evaluate(model: Model, shown: Slice) -> PerSample:
        given = value(shape.record(model), shown)
        if not isinstance(given, Mapping):
            given = {utilities[0]: given} if len(utilities) == 1 else {}
        if set(given) != set(utilities):
            got = ", ".join(map(str, given)) or "one unnamed array"
            raise ReportError(f"value: expected the utilities {', '.join(utilities)}, got {got}")
        return {name: _checked(name, given[name], len(shown.y)) for name in utilities}

    return evaluate


def definition(value: Value | None, utilities: Sequence[str]) -> str:
    """SHA-256 of the names and, where Python can find it, of the function's source."""
    try:
        source = "" if value is None else inspect.getsource(value)
    except (OSError, TypeError):
        source = ""
    return hashlib.sha256(canonical([list(utilities), source])).hexdigest()


def _checked(name: str, given: Any, samples: int) -> npt.NDArray[np.float64]:
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's, where a gradient is attached
        raise ReportError(f"value {name!r}: expected numbers: {error}") from None
    if values.shape != (samples,):
        raise ReportError(
            f"value {name!r}: expected {samples} numbers, one per sample, got shape {values.shape}"
        )
    bad = np.flatnonzero(~((values >= 0) & (values <= 1)))
    if bad.size:
        raise ReportError(f"value {name!r} of sample {bad[0]} must lie in [0, 1], got {values[bad[0]]}")
    return values
