"""Which members a long table or chart shows at once: the first and the last; those between are folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

MOST = 30
"""The most members that are all shown at once."""
HEAD, TAIL = 15, 10
"""Of more members: how many of the first and of the last."""

Item = TypeVar("Item")


def is_middle(place: int, count: int) -> bool:
    """Return whether the member at a place, counted from 0, is folded.

    >>> [is_middle(place, 40) for place in (14, 15, 29, 30)], is_middle(15, 30)
    ([False, True, True, False], False)
    """
    return count > MOST and HEAD <= place < count - TAIL


def ends(items: Sequence[Item], most: int | None = None) -> list[Item]:
    """Return the items that are shown; of more than ``most``, equally many of the first and the last."""
    if most is not None:
        head = most - most // 2
        return list(items) if len(items) <= most else [*items[:head], *items[len(items) - most // 2 :]]
    return [one for place, one in enumerate(items) if not is_middle(place, len(items))]
