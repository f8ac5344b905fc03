"""What a page, a statement or a decision is about: title, consortium, date and currency."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import date
from typing import Any

from fedmerit.errors import InputError

MOST_LETTERS = 120
"""The most letters of a title or of the name of a consortium."""
_CURRENCY = re.compile(r"[A-Z]{3}|[$€£¥₩₪₴₹₺₽]")


@dataclass(frozen=True)
class Heading:
    """Title, consortium, date (as 2026-11-30) and currency (as EUR); what nobody named is empty.

    >>> Heading(title="Lung nodules", currency="EUR").body()
    {'title': 'Lung nodules', 'currency': 'EUR'}
    """

    title: str = ""
    consortium: str = ""
    date: str = ""
    currency: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            if expected := wrong(item.name, getattr(self, item.name)):
                raise InputError(f"{item.name}: expected {expected}, got {getattr(self, item.name)!r:.100}")

    def body(self) -> dict[str, str]:
        """Return what is not empty, as it is recorded."""
        return {name: value for name, value in vars(self).items() if value}

    def over(self, other: Heading) -> Heading:
        """Return this heading; what is empty in it is as in another one."""
        return Heading(**{**other.body(), **self.body()})

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Heading:
        """Read a recorded heading; raise InputError unless `body` could have written it."""
        odd = [name for name in body if name not in cls.__dataclass_fields__]
        if odd or not all(body.values()):
            raise InputError(
                f"heading: expected title, consortium, date or currency, got {dict(body)!r:.100}"
            )
        return cls(**body)


def wrong(name: str, value: Any) -> str:
    """Return what a part of a heading should be, if it is something else; an empty text if it is right.

    >>> wrong("date", "2026-02-30"), wrong("currency", "EUR")
    ('a day such as 2026-11-30', '')
    """
    if not isinstance(value, str):
        return "text"
    if not value:
        return ""
    if name == "date":
        try:
            right = date.fromisoformat(value).isoformat() == value
        except ValueError:
            right = False
        return "" if right else "a day such as 2026-11-30"
    if name == "currency":
        return "" if _CURRENCY.fullmatch(value) else "a code such as EUR, or a sign such as $"
    plain = value.isprintable() and value.strip() == value and len(value) <= MOST_LETTERS
    return "" if plain else f"one line of at most {MOST_LETTERS} letters"


def file_part(text: str) -> str:
    """Return text as a part of a file name: small letters, digits and hyphens.

    >>> file_part("Lungenrundherde: Köln & Bonn, 2026")
    'lungenrundherde-koln-bonn-2026'
    """
    plain = unicodedata.normalize("NFKD", text.casefold())
    kept = "".join(one if one.isalnum() else "-" for one in plain if not unicodedata.combining(one))
    return re.sub("-+", "-", kept).strip("-")[:60].rstrip("-")


NO_HEADING = Heading()
