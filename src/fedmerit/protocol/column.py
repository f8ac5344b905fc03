r"""A judge's column: its gradients at drawn coordinates, as small integers on one scale.

After the last round, numbers that members committed to fix the coordinates K_t of each round t. Judge b
computes the mean gradient of its utility on the way from M0 to M on two random halves of its held-out data,
and shows half 1 at the first half of K_t, half 2 at the rest: each coordinate once. It takes away what the
last public updates already said (*innovation*), adds noise that it committed to, and rounds to eight bits, on
one scale c_b for all rounds. With q_i the integers of member i,

.. math:: \Phi_{ib,h}^t = \sum_{k \in K_t^h} q_{ik}^t g_{bk}^t, \qquad
    s_{ib} = c_b \frac{P}{|K|} \sum_t \big(\Phi_{ib,1}^t + \Phi_{ib,2}^t\big),

an estimate of what the updates of i did for the data of b (:mod:`fedmerit.scoring.panel`). This module needs
nothing but numpy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedmerit.errors import SettlementError
from fedmerit.protocol.pool import Indices
from fedmerit.secagg.board import NORMAL, bits, normal

Column = npt.NDArray[np.int8]
"""A judge's gradients, shape (rounds, |K|), coordinates in the order in which they were drawn."""
Values = npt.NDArray[np.float64]

HALVES: Final = 2
INNOVATION: Final = 5
"""How many updates before a round are taken out of a judge's gradient: who replays one gains nothing."""
RMS: Final = 16.0
"""The root mean square of a column, over all rounds; within 1 %, a larger one would weigh more."""
LARGEST: Final = 127
SPIKE: Final = 5.0
"""The largest coordinate of a gradient, in root mean squares of a round with its noise."""
_SLACK: Final = 0.01


def coordinates(seed: str, round: int, length: int, count: int) -> Indices:
    """Return the coordinates of a round in the order in which they are drawn, without repetition.

    >>> drawn = coordinates("seed", 1, 10, 6)
    >>> len(drawn), len(set(drawn.tolist())), bool(drawn.max() < 10)
    (6, 6, True)
    >>> sorted(coordinates("seed", 1, 4, 9).tolist())
    [0, 1, 2, 3]
    """
    count, found, part = min(count, length), np.zeros(0, np.int64), 0
    while len(found) < count:
        more = (bits(2 * count, "coordinates", seed, round, part) % np.uint64(length)).astype(np.int64)
        found, part = np.concatenate([found, more]), part + 1
        _, first = np.unique(found, return_index=True)
        found = found[np.sort(first)]
    return found[:count]


def halves(count: int) -> tuple[slice, slice]:
    """Return the places of each half among the drawn coordinates.

    >>> halves(5)
    (slice(0, 3, None), slice(3, 5, None))
    """
    middle = (count + 1) // HALVES
    return slice(0, middle), slice(middle, count)


def dealt(samples: int, seed: bytes) -> list[Indices]:
    """Return the positions of the samples of each random half of a judge's data."""
    order = np.argsort(bits(samples, "halves", seed), kind="stable").astype(np.int64)
    return [np.sort(order[half]) for half in halves(samples)]


def innovation(gradient: Values, publics: npt.ArrayLike) -> tuple[Values, Values]:
    r"""Return a gradient without its projection on public updates, and that projection.

    ``gradient`` has shape (n,), ``publics`` shape (k, n): the updates of the rounds before, at the same
    coordinates. Who adds a multiple of one to its update gains nothing by it.

    >>> left, removed = innovation(np.array([3.0, 4.0]), [[2.0, 0.0]])
    >>> left.tolist(), removed.tolist()
    ([0.0, 4.0], [3.0, 0.0])
    """
    rows = np.asarray(publics, np.float64).reshape(-1, gradient.size)
    if not len(rows) or not rows.any():
        return gradient, np.zeros_like(gradient)
    sizes = np.linalg.norm(rows, axis=1, keepdims=True)
    basis = rows / np.where(sizes > 0, sizes, 1.0)
    removed = basis.T @ np.linalg.lstsq(basis.T, gradient, rcond=None)[0]
    return gradient - removed, removed


def shown(
    slopes: npt.ArrayLike, publics: npt.ArrayLike, noise: float, *seed: bytes | str | int
) -> tuple[Values, Values]:
    r"""Return what a judge shows of a round, before it is rounded, and what it leaves out of its gradient.

    Coordinates beyond `SPIKE` of the final root mean squares are cut to that before innovation, and the noise
    is freed of the public updates as the gradient is. Where eight bits or the noise did it afterwards, two
    members without data could add and take away a public update, and be paid for what is left of it.

    Args:
        slopes: the gradient of each half of its data, shape (2, |K|), at the drawn coordinates.
        publics: the sums of the rounds before, shape (k, |K|), at most `INNOVATION` of them.
        noise: standard deviation of the noise, in root mean squares of what innovation leaves.
        seed: what the noise is made from.
    """
    rows = np.asarray(slopes, np.float64)
    parts = halves(rows.shape[1])
    before = np.asarray(publics, np.float64).reshape(-1, rows.shape[1])[-INNOVATION:]
    gradient = np.concatenate([row[half] for row, half in zip(rows, parts, strict=True)])
    most = SPIKE * math.hypot(1.0, noise) * math.sqrt(float(np.mean(gradient**2)))
    left = np.clip(gradient, -most, most)
    drawn = normal(left.size, "noise", *seed) / 2.0**NORMAL if noise else np.zeros(left.size)
    for half in parts:
        left[half], drawn[half] = (innovation(one[half], before[:, half])[0] for one in (left, drawn))
    return left + noise * math.sqrt(float(np.mean(left**2))) * drawn, gradient - left


def rounded(values: Sequence[Values]) -> tuple[Column, float]:
    """Return a judge's column and its scale: what one unit is worth.

    The scale makes the root mean square of all rounds `RMS`; what is beyond eight bits is cut off. Where no
    scale does, as with fewer than one number in 60 that is not 0, there is no column: noise prevents it.

    >>> column, scale = rounded([np.array([1.0, -1.0]), np.array([2.0, 0.0])])
    >>> column.tolist(), round(scale, 3)
    ([[13, -13], [26, 0]], 0.077)
    """
    units = np.stack([np.asarray(row, np.float64) for row in values])
    size = math.sqrt(float(np.mean(units**2)))
    if not (size > 0 and math.isfinite(size)):
        raise SettlementError(
            "the gradient of the held-out data is zero or not finite in all rounds, so there is nothing to "
            "judge by",
            code="no-gain",
        )
    scale = size / RMS
    for _ in range(60):
        column = np.clip(np.rint(units / scale), -LARGEST, LARGEST).astype(np.int8)
        if not (problem := malformed(column, column.shape)):
            return column, scale
        scale *= _rms(column) / RMS
    raise SettlementError(f"the gradients of the held-out data fit no eight bits: {problem}", code="spiky")


def malformed(column: npt.NDArray[Any], shape: tuple[int, ...]) -> str:
    """Return what is wrong with a column, whoever made it; empty text if nothing is."""
    if column.dtype != np.int8 or column.shape != shape:
        return f"expected integers of 8 bits, shape {shape}, got {column.dtype} {column.shape}"
    if (column == -128).any():
        return "it has a number below -127"
    size = _rms(column)
    if column.size >= 100 and abs(size - RMS) > _SLACK * RMS:
        return f"its root mean square is {size:.4g}, expected {RMS:g} within 1 %"
    return ""


def column_hash(column: Column) -> str:
    """Return the SHA-256 of a column."""
    return hashlib.sha256(b"fedmerit/column/1\n" + np.ascontiguousarray(column).tobytes()).hexdigest()


def _rms(column: npt.NDArray[Any]) -> float:
    return math.sqrt(float(np.mean(column.astype(np.float64) ** 2)))
