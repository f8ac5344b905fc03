"""What members may be called: one check for the roster and for a run's settings.

A name stands on the roster, in every record, in names of files (keys, statements) and in the keys of a
checkpoint. Whatever a run would refuse is refused when the roster is made, before it goes round.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from fedmerit.errors import KeyFileError
from fedmerit.scoring.validate import spelled, two_spellings

LONGEST = 64
MOST_BYTES = 200
"""Of a name in a file name, with room for an ending."""
RESERVED = (".", "..", "server")


def check_name(name: Any) -> None:
    """A name looks the same to all, and can be part of a file name.

    It is short, printable, has one spelling in Unicode and no blanks at its ends.
    """
    good = (
        isinstance(name, str)
        and 1 <= len(name) <= LONGEST
        and name.isprintable()
        and name == name.strip()
        and name == unicodedata.normalize("NFC", name)
    )
    if not good:
        raise KeyFileError(f"a member's name must be 1 to {LONGEST} printable characters, got {name!r:.100}")
    if any(character in name for character in "/\\") or name in RESERVED:
        why = "it is part of file names: expected no / and no \\, and neither '.', '..' nor 'server'"
        raise KeyFileError(f"{name!r} cannot be a member's name, because {why}")
    if len(name.encode()) > MOST_BYTES:
        raise KeyFileError(f"{name!r} is longer than {MOST_BYTES} bytes")


def check_names(names: Sequence[str]) -> None:
    """Names of different members: each can be one, and no two can be mixed up.

    >>> check_names(["Abbey", "Bridge", "ABBEY"])
    Traceback (most recent call last):
    ...
    fedmerit.errors.KeyFileError: expected names that nobody mixes up, got 'Abbey' and 'ABBEY', which differ \
only in case, blanks or how letters are composed
    """
    for name in names:
        check_name(name)
    twice = two_spellings(names)
    if twice:
        one, other = spelled(*twice)
        alike = "differ only in case, blanks or how letters are composed"
        raise KeyFileError(f"expected names that nobody mixes up, got {one} and {other}, which {alike}")
