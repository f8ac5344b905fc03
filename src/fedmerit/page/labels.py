"""Names that stand beside a bar or in a list: short enough, and still different from each other."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

WIDTH = 18
"""Of a label, in letters; a wide one counts as two."""


def labels(names: Sequence[str], width: int = WIDTH) -> dict[str, str]:
    """Name -> label: long names lose their middle, in such a place that no two labels are the same.

    >>> clinics = ["Universitätsklinikum Bonn", "Universitätsklinikum Köln", "Ulm"]
    >>> list(labels(clinics).values())
    ['Universit…kum Bonn', 'Universit…kum Köln', 'Ulm']
    """
    for tail in range((width - 1) // 2, width):  # what differs often stands at the end
        found = {name: _cut(name, width - 1 - tail, tail) for name in names}
        if len(set(found.values())) == len(names):
            return found
    taken = {
        name: f" ({place})" for place, name in enumerate(names, start=1)
    }  # they differ in the middle only
    return {name: _head(name, width - len(mark) - 1) + "…" + mark for name, mark in taken.items()}


def quoted(name: str) -> str:
    """A name as it may stand in a list: in quotes where it would read as two.

    >>> quoted("Ulm"), quoted("Bonn, Radiology")
    ('Ulm', '“Bonn, Radiology”')
    """
    return f"“{name}”" if "," in name or ";" in name or " and " in name else name


def _cut(name: str, head: int, tail: int) -> str:
    if sum(map(_letters, name)) <= head + 1 + tail:
        return name
    return f"{_head(name, head).rstrip()}…{_head(name[::-1], tail)[::-1].lstrip()}"


def _head(name: str, width: int) -> str:
    used = 0
    for place, letter in enumerate(name):
        used += _letters(letter)
        if used > width:
            return name[:place]
    return name


def _letters(letter: str) -> int:
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
