"""What somebody states against what is computed anew."""

from __future__ import annotations

import math
from typing import Any

from fedmerit.errors import LedgerError

TOLERANCE = 1e-12


def compare(there: Any, here: Any, where: str) -> None:
    """Equal, numbers up to a relative 1e-12; the error names the first place that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        odd = [key for key in (*here, *there) if (key in here) != (key in there)]
        for key in here:
            if key in there:
                compare(there[key], here[key], f"{where}.{key}")
        if odd:
            raise LedgerError(f"{where}.{odd[0]}: {'not in the ledger' if odd[0] in there else 'missing'}")
    elif isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            raise LedgerError(f"{where}: holds {len(there)} entries, the reports give {len(here)}")
        for k, (one, other) in enumerate(zip(there, here, strict=True)):
            compare(one, other, f"{where}[{k}]")
    elif isinstance(there, float) and isinstance(here, float):
        if not math.isclose(there, here, rel_tol=TOLERANCE, abs_tol=0.0):
            raise LedgerError(f"{where}: states {there!r}, the reports give {here!r}")
    elif there != here or isinstance(there, bool) != isinstance(here, bool):
        raise LedgerError(f"{where}: states {there!r:.60}, the reports give {here!r:.60}")
