"""Sentences that terminal, page, statements and ``verify`` share: each is made here, and only here."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedmerit.config import Corruption
    from fedmerit.report.terminal import Standing

# -------------------------------------------------------------------------------------------- names, short

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
    if sum(map(_width, name)) <= head + 1 + tail:
        return name
    return f"{_head(name, head).rstrip()}…{_head(name[::-1], tail)[::-1].lstrip()}"


def _head(name: str, width: int) -> str:
    used = 0
    for place, letter in enumerate(name):
        used += _width(letter)
        if used > width:
            return name[:place]
    return name


def _width(letter: str) -> int:
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


# ----------------------------------------------------------------------------------------------- sentences

MOST_PLANTED = 12
"""Members named of one kind of planted fault."""

_RIDERS = {
    "zero": "sent no change",
    "noise": "sent random numbers",
    "stale": "sent back the model of one round earlier",
}


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names as one reads them out.

    >>> listed(["A", "B", "C"]), listed(list("ABCDEFGH"), most=3)
    ('A, B and C', 'A, B, C and 5 more')
    >>> listed(["Ulm", "Bonn, Radiology"])
    'Ulm and “Bonn, Radiology”'
    """
    if len(names) == 1:
        return names[0]
    told = [quoted(name) for name in names[:most]]
    if len(names) > most:
        return ", ".join(told) + f" and {len(names) - most} more"
    return ", ".join(told[:-1]) + " and " + told[-1]


def made_worse(standings: Sequence[Standing], most: int | None = None) -> str:
    """Return who surely made the model worse, without a point; nothing where that can be said of nobody.

    Where somebody surely improved the model, who may still be the best is not accused beside it.

    Args:
        standings: by alpha, of all members.
        most: names told; None: all.
    """
    improved = any(one.surely > 0 for one in standings)
    harmful = [
        one.client
        for one in standings
        if one.surely < 0 and not (improved and one.rank_interval and one.rank_interval[0] == 1)
    ]
    return f"{listed(harmful, most or len(harmful))} made the model worse" if harmful else ""


def planted(corruption: Corruption, names: Mapping[str, str] | None = None) -> str:
    """Return which faults the settings planted, and in whom, as a sentence; nothing where there are none.

    Args:
        corruption: of the settings.
        names: member -> name shown, where names are hidden; members then come in the order of these, and
            who is not among them stays unnamed.

    >>> from fedmerit.config import Corruption
    >>> planted(Corruption(label_flip=["Site 10"]))
    'Rehearsal: the labels of Site 10 were flipped on purpose (corruption.label_flip).'
    """
    clauses = "; ".join(_planted(corruption, names))
    return f"Rehearsal: {clauses}." if clauses else ""


def _planted(corruption: Corruption, names: Mapping[str, str] | None) -> Iterator[str]:
    def shown(name: str) -> str:
        return names.get(name, "another member") if names else name

    def told(members: Mapping[str, str]) -> str:
        """A clause for each member."""
        each = [members[name].format(quoted(shown(name))) for name in ordered(members)]
        more = f", and so on for {len(each) - MOST_PLANTED} more" if len(each) > MOST_PLANTED else ""
        return ", ".join(each[:MOST_PLANTED]) + more

    def ordered(members: Sequence[str] | Mapping[str, str]) -> list[str]:
        return sorted(members, key=shown) if names else list(members)

    def people(members: Sequence[str]) -> str:
        return listed([shown(name) for name in ordered(members)], MOST_PLANTED)

    noise = corruption.label_noise
    if isinstance(noise, str):
        yield (
            "labels were replaced by random ones on purpose, from none at the first member to all at the "
            f'last one (corruption.label_noise = "{noise}")'
        )
    elif rates := {name: f"{100 * rate:g} % at {{}}" for name, rate in noise.items() if rate}:
        yield f"labels were replaced by random ones on purpose, {told(rates)} (corruption.label_noise)"
    if corruption.label_flip:
        yield f"the labels of {people(corruption.label_flip)} were flipped on purpose (corruption.label_flip)"
    if riders := {name: f"{{}} {_RIDERS[kind]}" for name, kind in corruption.free_rider.items()}:
        yield f"in place of training, {told(riders)} on purpose (corruption.free_rider)"
    if copies := {
        name: f"{{}} trained on the data of {_braced(quoted(shown(other)))}"
        for name, other in corruption.duplicate.items()
    }:
        yield f"{told(copies)} on purpose (corruption.duplicate)"
    if corruption.test_set:
        yield f"{people(corruption.test_set)} trained on test samples on purpose (corruption.test_set)"


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
