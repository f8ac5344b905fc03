r"""Differential privacy of what a judge shows: gradients of single samples are clipped, and get normal noise.

Each sample's path gradient, at the coordinates of its half, is cut to the length C. Half h shows in a round

.. math:: \frac1{m_h} \Big(\sum_{x \in h} \mathrm{clip}_C(g_x) + z\, C\, \xi\Big), \qquad
    \xi \sim \mathcal N(0, 1)

One sample more or less changes the sum by at most C, so all rounds are (epsilon, delta)-private for each
sample with z from `multiplier` (Dong, Roth & Su 2022), if C and the m_h do not depend on the samples. What
else a judge says of them, such as its utility, is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fedmerit.errors import InputError, MissingExtra, SettlementError
from fedmerit.protocol.column import HALVES, Values, halves
from fedmerit.protocol.direction import Gradient
from fedmerit.protocol.outcome import Model
from fedmerit.protocol.pool import Indices, Slice
from fedmerit.secagg.board import bits

MOST = 1 << 28  # bytes of the gradients of single samples at a time


def multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Return z, the standard deviation of the noise in units of C, for so many rounds."""
    if not (0 < epsilon < math.inf and 0 < delta < 1 and rounds >= 1):
        raise InputError(f"expected epsilon > 0, 0 < delta < 1 and a round, got {epsilon}, {delta}, {rounds}")
    try:
        from dp_accounting import get_sigma_gaussian
    except ImportError as error:
        raise MissingExtra.of("panel.epsilon needs dp-accounting", "dp") from error
    return float(get_sigma_gaussian(epsilon, delta)) * math.sqrt(rounds)  # T normal ones compose to one


def clipped(
    gradient: Gradient, m0: Model, m: Model, own: Slice, parts: Sequence[Indices], at: Indices,
    clip: float, points: int,
) -> Values:  # fmt: skip
    """Return the mean of each half's clipped gradients at its coordinates, (2, |K|), and 0 at the others."""
    rows, some = np.zeros((HALVES, len(at))), max(1, MOST // (4 * m0.size))
    for row, part, half in zip(rows, parts, halves(len(at)), strict=True):
        for few in (part[start : start + some] for start in range(0, len(part), some)):
            shown = Slice(index=0, x=own.x[few], y=own.y[few], salts=b"", path=())
            blocks = gradient(m0, m, shown, list(np.arange(len(few))[:, None]), points).blocks
            each = blocks[:, at[half]].astype(np.float64)
            sizes = np.maximum(np.linalg.norm(each, axis=1, keepdims=True), clip)
            row[half] += (each * (clip / sizes)).sum(axis=0) / len(part)
    return rows


def noised(rows: Values, sizes: Sequence[int], clip: float, z: float, *seed: bytes | str | int) -> Values:
    """Return what `clipped` found with its noise; who knows the seed, as an auditor does, can take it off."""
    made, count = rows.copy(), rows.shape[1]
    u, w = (((bits(count, "epsilon", *seed, part) >> np.uint64(11)) + 0.5) / 2.0**53 for part in (0, 1))
    drawn = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * w)  # Box & Muller 1958: uniform sums have no tails
    for row, size, half in zip(made, sizes, halves(count), strict=True):
        row[half] += z * clip / size * drawn[half]
    return made


def error(moves: Iterable[float], samples: int, clip: float, z: float, share: float) -> float:
    r"""Return the standard error of s_ib that the noise brings, with |U_i| of each round.

    .. math:: \sqrt{\sum_t |U_i^t|^2} \; \frac{2 z C}{m} \sqrt{P / |K|}

    for m samples in two halves; ``share`` is |K| / P. C grows with the root of |K|, so |K| does not matter.

    >>> round(error([3.0, 4.0], samples=100, clip=0.1, z=2.0, share=0.25), 3)
    0.04
    """
    return math.hypot(*moves) * HALVES * z * clip / samples / math.sqrt(share)


def not_drowned(noise: float, signal: float) -> None:
    """Raise `SettlementError` where the noise of an entry exceeds what entries are worth."""
    if not noise <= abs(signal):
        raise SettlementError(
            f"panel.epsilon: the noise in what a member did for a judge is {noise:.3g}, but what members "
            f"did is about {abs(signal):.3g}: hold out more data, or take a larger epsilon",
            code="drowned",
        )
