"""v(M0) and v(M): what a round is scored with, against what its members signed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmerit.errors import LedgerError
from fedmerit.ledger import number

if TYPE_CHECKING:
    from fedmerit.federation.journal import Round

TOLERANCE = 1e-6
"""Who differs by more is named; machines alike differ by less."""
FAR = 1e-2
"""If most differ by more (of 1 or of the value, whichever is larger) the ledger is refused: that is no other
processor, no TF32 and no other order of additions."""


def differences(one: Round, tolerance: float = TOLERANCE) -> dict[str, str]:
    """Members whose own v(M0) or v(M) is not the one their round was scored with -> which, in words.

    ``tolerance`` is of 1, or of the value that the round is scored with where that is larger.
    """
    found: dict[str, str] = {}
    for name, report in one.reports.items():
        for utility, used in one.body["utilities"].items():
            own = report.measured[utility]
            for what, mine, its in (
                ("v(M0)", own.empty, number(used["empty"])),
                ("v(M)", own.grand, number(used["grand"])),
            ):
                if mine is not None and not abs(mine - its) <= tolerance * max(1.0, abs(its)):
                    words = f"signed {what} = {mine:g} of {utility}, the round is scored with {its:g}"
                    found.setdefault(name, words)
    return found


def check_server(one: Round) -> None:
    """Where the server evaluated, no more than half of those that reported may be far from what it states.

    Reports that a copy withholds count as if they agreed: its reader cannot know.
    """
    away, heard = differences(one, FAR), len(one.reports) + len(one.withheld)
    if 2 * len(away) > heard:
        name, words = next(iter(away.items()))
        raise LedgerError(
            f"round {one.number}: {len(away)} of {heard} members measured another v(M0) or v(M) than the "
            f"server states: {name} {words}"
        )
