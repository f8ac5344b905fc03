"""The fields of a file of reports, where one of them stands, and what a run folder's ledger is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fedmerit.errors import FileFormatError

REQUIRED = ("round", "client", "empty", "grand", "alone", "without")
PER_CLIENT = ("se_loo", "se_ioi", "se_alpha", "se_alpha_total", "samples", "cosine", "solo")
PER_ROUND = ("empty", "grand", "solo_empty", "slice", "utility")
TEXT = ("slice", "utility")
VECTORS = ("alone", "without", *PER_CLIENT)
LEDGER = "ledger.sqlite"
"""In a run folder."""


@dataclass(frozen=True)
class Found:
    """One round of a file: the arguments of ``Reports``, and where they stand."""

    given: dict[str, Any]
    where: str  # of the round as a whole
    lines: Mapping[str, int] = field(default_factory=dict)  # of each client, where there are lines

    def where_of(self, client: str | None) -> str:
        """Where the value of a client stands (None: a value of the whole round)."""
        if not self.lines:
            return self.where
        first = min(self.lines.values())
        return f"line {first if client is None else self.lines.get(client, first)}"


def fail(path: Path, where: str, problem: str) -> NoReturn:
    """Refuse a file."""
    raise FileFormatError(f"{path}: {where}: {problem}") from None
