"""Critical values that hold for all clients or pairs at once, with and without known correlations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.arrays import floats, in_order_of_both
from fedmerit.checks import A_NUMBER, LARGEST, whole
from fedmerit.errors import ReportError

Matrix = npt.NDArray[np.float64]
"""One number per pair of clients, shape (N, N)."""


def upper_quantile(tail: float) -> float:
    """z with P(Z > z) = tail, for a standard normal Z; exact also where 1 - tail would round to 1."""
    return -NormalDist().inv_cdf(tail)


def holm(rejected: Callable[[float], int], total: int, level: float) -> float:
    """Critical value of Holm's method (1979) for so many one-sided hypotheses, whatever their correlation.

    Holm compares the (k+1)-th smallest p-value with a/(M - k): from k = 0, take as k the number of those
    rejected so far, until nobody joins. "i is not better than j" are M = N(N-1) hypotheses.
    """
    k = 0
    while True:
        critical = max(0.0, upper_quantile((1 - level) / max(total - k, 1)))
        found = rejected(critical)
        if found <= k:
            return critical
        k = found


def max_t(covariance: Matrix, stderr: Matrix, level: float, draws: int, seed: int) -> float:
    """Quantile of the largest |e_i - e_j| / s_ij, where e is Gaussian with the given covariance."""
    draws, seed = whole(draws, "draws", 100), whole(seed, "seed")
    if not stderr.any():
        return upper_quantile((1 - level) / 2)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    inverse = np.divide(1.0, stderr, out=np.zeros_like(stderr), where=stderr > 0)
    generator = np.random.default_rng(seed)
    largest = np.empty(draws)
    rows = max(1, (1 << 22) // root.size)  # at a time: 32 MB
    for start in range(0, draws, rows):
        part = largest[start : start + rows]
        e = generator.standard_normal((part.size, len(root))) @ root.T
        part[:] = np.max(np.abs(e[:, :, None] - e[:, None, :]) * inverse, axis=(1, 2))
    return float(np.quantile(largest, level))


def checked_covariance(covariance: Any, clients: Sequence[str]) -> Matrix:
    """As an (N, N) array in the order of the clients, if it is a covariance matrix; a frame by its labels."""
    n = len(clients)
    matrix = floats(in_order_of_both(clients, covariance, "covariance"), "covariance")
    if matrix.shape != (n, n):
        raise ReportError(f"covariance: expected shape ({n}, {n}), got {matrix.shape}")
    if not (np.abs(matrix) <= LARGEST).all():
        raise ReportError(f"covariance: every entry must be {A_NUMBER}")
    scale = float(np.max(np.abs(matrix)))
    if np.max(np.abs(matrix - matrix.T)) > 1e-9 * scale:
        raise ReportError("covariance must be symmetric")
    if np.linalg.eigvalsh(matrix)[0] < -1e-9 * scale:
        raise ReportError("covariance must be positive semi-definite: it has a negative eigenvalue")
    return (matrix + matrix.T) / 2
