r"""Standard errors of a mean over test samples, and sketches from which the errors of differences follow.

Everything here is a vector :math:`e` with one entry per test sample: what the sample adds to the error of a
mean. Its length is the standard error. The product of two members' vectors is their covariance, but nobody
sees both vectors. So each member states a *sketch*, K products of its vector with signs that everybody can
compute:

.. math:: z_k = \sum_s r_{ks} e_s, \quad r_{ks} = \pm 1, \qquad
          \mathrm{cov}(i, j) \approx \frac1K \sum_k z_{ik} z_{jk}

The signs of a test slice follow from its id, so sketches of rounds on one slice add up, as errors do. Slices
with other samples have other signs, so sketches add up there too, as variances do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.scoring.types import Vector

SKETCH = 32
"""K, the numbers in a sketch: they estimate a variance with 32 degrees of freedom. Of the pairs of 20
members, 500 samples tell 39 % apart with 16 numbers, 44 % with 32, 47 % with 64, and 35 % with 16 blocks of
samples (experiments/tables/coverage.md)."""
SHARPNESS = 16
"""How soon outcomes count as 0 or 1, see `least_error`; chosen by simulation (experiments/coverage.py)."""
PLAUSIBLE = 16.0
"""A sketch whose mean square is this many times the variance, or this part of it, does not belong to it."""

Strata = npt.NDArray[np.int64]
"""The stratum of every test sample, shape (m,): 0, 1, ..."""


def strata_of(labels: npt.ArrayLike) -> Strata:
    """Return the class of every sample as its stratum; classes with a single sample are merged.

    A variance needs two samples. All classes with one sample make up one stratum; if that leaves a stratum of
    one, it joins the smallest other one.

    >>> strata_of([0, 0, 1, 2, 3, 3, 3]).tolist(), strata_of([0, 0, 1]).tolist()
    ([0, 0, 2, 2, 1, 1, 1], [0, 0, 0])
    """
    _, found, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    single = counts == 1
    into = np.arange(len(counts))
    into[single] = len(counts)
    if np.count_nonzero(single) == 1 and len(counts) > 1:
        into[single] = np.argmin(np.where(single, len(found) + 1, counts))
    return np.unique(into[found], return_inverse=True)[1].astype(np.int64)


def degrees(strata: Strata) -> int:
    """Return the degrees of freedom of standard errors over these samples: samples minus strata."""
    return max(1, len(strata) - (int(strata.max()) + 1 if strata.size else 0))


def error_parts(values: Vector, strata: Strata) -> Vector:
    r"""Return what each sample adds to the error of the mean of ``values``, shape (m,).

    .. math:: e_s = \frac1m \sqrt{\frac{m_c}{m_c - 1}} \, (x_s - \bar x_c), \qquad
        |e|^2 = \sum_c \Big(\frac{m_c}{m}\Big)^2 \frac{\mathrm{sd}_c^2}{m_c}

    with :math:`m_c` samples and mean :math:`\bar x_c` in the stratum c of sample s. Differences between
    strata do not count: a test set drawn class by class has the same mix of classes every time. With a single
    stratum, :math:`|e|` is the usual :math:`\mathrm{sd} / \sqrt m`.

    >>> x = np.array([1.0, 3.0, 10.0, 10.0])
    >>> error_parts(x, np.array([0, 0, 1, 1])).round(3).tolist()
    [-0.354, 0.354, 0.0, 0.0]
    """
    counts = np.bincount(strata).astype(np.float64)
    centred = values - (np.bincount(strata, weights=values) / counts)[strata]
    return np.asarray(centred * np.sqrt(counts / np.maximum(counts - 1, 1))[strata] / len(values))


def least_error(outcomes: Sequence[Vector], scale: Vector | float = 1.0, step: float = 1.0) -> float:
    r"""Return the error that remains even if no sample changes: for outcomes that are 0 or 1, or nearly.

    .. math:: \sqrt 2 \, \frac{h}{m} \max_s(\mathrm{scale}_s) \, \rho^{16}, \qquad
        \rho = 1 - \frac{\overline{v (1 - v)}}{\bar v (1 - \bar v)}

    where v are all outcomes, and a 0 and a 1. If 2 % of 50 answers change, 36 % of all test sets show no
    change, and the standard error would be 0. So one changed sample is added in each direction (Bonett &
    Price 2012; after Agresti & Min 2005), each as large as one change makes the score, h. With a ``scale``,
    which balanced accuracy has, the sample counts as much as one of the rarest class. Outcomes that are only
    nearly 0 or 1 mislead in the same way; :math:`\rho` is 1 if all are 0 or 1, and far below 1 for answers of
    various probabilities.

    Args:
        outcomes: utilities per sample of each model behind the score, before scaling.
        scale: what a sample's outcome is multiplied by.
        step: h, by how much one changed outcome changes the score of the sample: 1/2 for alpha.

    Returns:
        The error; 0 if an outcome is not in [0, 1].

    >>> [round(least_error([np.array(v)]), 3) for v in ([0.0, 1, 1, 0], [0.3, 0.5, 0.4, 0.6])]
    [0.354, 0.0]
    """
    v = np.concatenate([*outcomes, [0.0, 1.0]])
    if not (v.min() >= 0 and v.max() <= 1):
        return 0.0
    middle = float(v.mean())
    sharp = max(0.0, 1 - float(np.mean(v * (1 - v))) / (middle * (1 - middle)))
    return math.sqrt(2) * step * float(np.max(scale)) / len(outcomes[0]) * sharp**SHARPNESS


def signs(seed: str, count: int, samples: int) -> npt.NDArray[np.float64]:
    """Return public random signs, shape (count, samples): bits of SHAKE-256, 1 for +1.

    >>> signs("a", 2, 3).tolist()
    [[1.0, 1.0, 1.0], [1.0, -1.0, 1.0]]
    """
    width = (samples + 7) // 8
    stream = hashlib.shake_256(f"fedmerit/sketch/1 {seed}".encode()).digest(count * width)
    bits = np.unpackbits(np.frombuffer(stream, np.uint8).reshape(count, width), axis=1)[:, :samples]
    return np.asarray(2.0 * bits - 1.0, dtype=np.float64)


_slice_signs = lru_cache(maxsize=2)(signs)


def sketch(parts: Vector, least: float, *, slice_id: str, round: int, client: str) -> tuple[float, ...]:
    """Return the sketch of one member's error: K numbers with seven digits.

    ``least`` counts with signs of the member's own in every round: it is nobody else's error.

    Args:
        parts: from `error_parts`.
        least: from `least_error`.
        slice_id: id of the test slice.
        round: number of the round.
        client: the member's name.
    """
    own = signs(f"{slice_id} {round} {client}", SKETCH, 1)[:, 0]
    found = _slice_signs(slice_id, SKETCH, len(parts)) @ parts + least * own
    return tuple(float(f"{value:.7g}") for value in found)


def belongs(numbers: Sequence[float], stderr: float) -> bool:
    """Return whether a sketch can be that of an error of this size; chance fails one in 10^8 sketches."""
    square, expected = math.fsum(value * value for value in numbers) / len(numbers), stderr * stderr
    return expected / PLAUSIBLE - 1e-24 <= square <= expected * PLAUSIBLE + 1e-24


def pair_freedom(count: int, samples: int | None) -> int:
    r"""Return the degrees of freedom of a variance from a sketch of so many numbers.

    .. math:: \nu = \lfloor 1 / (1/K + 1/\nu_m) \rfloor

    A sketch estimates what the samples say, and the samples estimate the variance, with :math:`\nu_m` degrees
    of freedom (``samples``; None for very many). Relative variances of the two add up.

    >>> pair_freedom(32, 490), pair_freedom(32, 40), pair_freedom(32, None)
    (30, 17, 32)
    """
    return max(1, count if samples is None else count * samples // (count + samples))


def standard_error(values: npt.NDArray[np.float64], *, counted: bool = False) -> float:
    r"""Return the standard error of a mean over test samples that were drawn at random.

    .. math:: \frac{\mathrm{sd}(x_1, \ldots, x_m)}{\sqrt m}, \qquad \text{counted: }
        \frac{\mathrm{sd}(x_1, \ldots, x_m, 1, -1)}{\sqrt{m + 2}}

    Runs with ``scoring.errors = "plain"``, and those of earlier versions, use it. With ``counted``, one
    changed sample is added in each direction (Bonett & Price 2012); see `least_error` for why.

    Args:
        values: shape (m,), differences of utilities.
        counted: whether all utilities behind the differences are 0 or 1.
    """
    if counted:
        values = np.append(values, (1.0, -1.0))
    return float(np.std(values, ddof=1) / math.sqrt(values.size)) if values.size > 1 else 0.0


def strata_for(labels: Any, *, balanced: bool) -> Strata:
    """Return the strata of a test slice: its classes if it was drawn class by class, else a single one.

    Labels that are not whole numbers, one per sample, are not classes.
    """
    given = np.asarray(labels)
    classes = balanced and given.ndim == 1 and given.dtype.kind in "iu"
    return strata_of(given) if classes else np.zeros(len(given), np.int64)
