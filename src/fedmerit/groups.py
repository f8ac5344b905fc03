"""Largest groups of clients of which no two are apart, from the matrix that says who is better than whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedmerit.errors import ReportError

MOST_GROUPS = 4000
"""Nobody reads more, and with other errors than the default there can be 2^(N/2)."""


def largest_groups(better: npt.NDArray[np.bool_], ranking: Sequence[int]) -> list[tuple[int, ...]]:
    """All groups that no client could join, best first; each in the order of the ranking.

    In graph terms the maximal cliques of "not apart". Clients join one after the other, those with the best
    possible ranks first. Who joins takes along, of every group so far, those it is not apart from. If being
    apart means that two intervals do not overlap, then these are one group in themselves, the others are
    parts of it, and N clients have at most N groups (an interval graph). Other errors can give more.

    Args:
        better: shape (N, N), entry [i, j] says that i is better than j.
        ranking: positions 0 ... N-1, best first.

    >>> apart = np.zeros((3, 3), bool); apart[0, 1] = True       # 0 and 1 are apart, 2 is from neither
    >>> largest_groups(apart, [0, 1, 2])
    [(0, 2), (1, 2)]
    """
    n = len(ranking)
    in_order = better[np.ix_(ranking, ranking)]
    together = [_bits(row) for row in ~(in_order | in_order.T)]
    groups: set[int] = set()
    for who in np.argsort(in_order.sum(axis=0), kind="stable").tolist():
        joined: list[int] = []
        for part in sorted({group & together[who] for group in groups}, key=int.bit_count, reverse=True):
            if not any(part | larger == larger for larger in joined):
                joined.append(part)
        groups = {group for group in groups if group & ~together[who]}  # the others are part of a new one
        groups |= {part | 1 << who for part in joined or [0]}
        if len(groups) > max(n, MOST_GROUPS):
            raise ReportError(
                f"expected at most {max(n, MOST_GROUPS)} groups that cannot be told apart, {n} clients form "
                "more; compare_pairs(...).better says it pair by pair"
            )
    members = (tuple(k for k in range(n) if group >> k & 1) for group in groups)
    return [tuple(ranking[k] for k in group) for group in sorted(members)]


def _bits(row: npt.NDArray[np.bool_]) -> int:
    """Bit k is set iff entry k is true."""
    return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")
