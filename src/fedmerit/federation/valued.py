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
"""By this much (of 1 or of the value, whichever is larger) most members differ from a server that lies; other
processors, TF32 or another order of additions make less of a difference, a few samples of a small test set
aside: see `check_server`."""
FLIPS = 3
"""Test samples that may fall on the other side on other processors."""
LEAST_AGAINST = 3
"""Members that must contradict the server before the ledger is refused."""


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


def check_server(one: Round, samples: int) -> None:
    """Where the server evaluated, most members of the sum must not be far from what it states.

    Far is ``FAR``, or ``FLIPS`` of the round's test samples where that is more. Reports that a copy withholds
    count as if they agreed: its reader cannot know.
    """
    if one.body.get("evaluated") == "members":
        return
    away = differences(one, max(FAR, FLIPS / samples))
    if len(away) >= LEAST_AGAINST and 2 * len(away) > len(one.included):
        name, words = next(iter(away.items()))
        raise LedgerError(
            f"round {one.number}: {len(away)} of {len(one.included)} members measured another v(M0) or v(M) "
            f"than the server states: {name} {words}"
        )
