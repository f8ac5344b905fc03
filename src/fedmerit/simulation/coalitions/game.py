"""Which model belongs to a coalition: two games over the updates of one round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedmerit.errors import ConfigError, InputError
from fedmerit.scoring.types import MAX_TABLE_CLIENTS

GAMES = ("additive", "renormalised")
Masks = npt.NDArray[np.int64]
"""Coalitions as bitmasks: bit i is set iff client i is in."""


def coefficients(
    masks: Sequence[int] | Masks, weights: Sequence[float] | npt.NDArray[np.float64], game: str = "additive"
) -> npt.NDArray[np.float64]:
    r"""The matrix that turns updates into coalition models, M(S) = M_0 + \sum_i c_{S,i} U_i, shape (K, N).

    .. math:: c_{S,i} = 1[i \in S] \quad\text{(additive)}, \qquad
              c_{S,i} = 1[i \in S] \frac{\sum_j w_j}{\sum_{j \in S} w_j} \quad\text{(renormalised)}

    where :math:`U_i = w_i (M_i - M_0) / \sum_j w_j`, so that the renormalised model is the weighted mean of
    the local models of S. Both games agree on nobody and on everybody.

    >>> coefficients([0, 1, 3], [1, 3], "renormalised")
    array([[0., 0.],
           [4., 0.],
           [1., 1.]])
    """
    w = np.asarray(weights, dtype=np.float64)
    if game not in GAMES:
        raise ConfigError(f"scoring.game must be 'additive' or 'renormalised', got {game!r}")
    if w.ndim != 1 or not np.isfinite(w).all() or (w <= 0).any():
        raise InputError(f"weights must be positive numbers, one per client, got {w.tolist()}")
    bits = np.asarray(masks, dtype=np.int64)[:, None] >> np.arange(len(w)) & 1
    member: npt.NDArray[np.float64] = bits.astype(np.float64)
    if game == "additive":
        return member
    held = member @ w
    member *= np.divide(w.sum(), held, out=np.zeros_like(held), where=held > 0)[:, None]
    return member


def check_count(n: int) -> None:
    """A table over n clients can be built at all."""
    if not 1 <= n <= MAX_TABLE_CLIENTS:
        raise InputError(
            f"a table has 2^N coalitions, so N must lie in 1 ... {MAX_TABLE_CLIENTS}, got {n};"
            " sampled_shapley does without a table"
        )


def name(mask: int, clients: Sequence[str]) -> str:
    """The members of a coalition, for messages.

    >>> name(5, ["A", "B", "C"])
    '{A, C}'
    """
    return "{" + ", ".join(client for i, client in enumerate(clients) if mask >> i & 1) + "}"
