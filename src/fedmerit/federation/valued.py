"""v(M0) and v(M): what a round is scored with, against what its members signed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmerit.errors import LedgerError
from fedmerit.ledger import number

if TYPE_CHECKING:
    from fedmerit.federation.journal import Round

TOLERANCE = 1e-6
"""Machines that evaluate the same model on the same samples may differ by this much."""


def differences(one: Round, tolerance: float = TOLERANCE) -> dict[str, str]:
    """Members whose own v(M0) or v(M) is not the one their round was scored with -> which, in words."""
    found: dict[str, str] = {}
    for name, report in one.reports.items():
        for utility, used in one.body["utilities"].items():
            own = report.measured[utility]
            for what, mine, its in (
                ("v(M0)", own.empty, number(used["empty"])),
                ("v(M)", own.grand, number(used["grand"])),
            ):
                if mine is not None and not abs(mine - its) <= tolerance:
                    words = f"signed {what} = {mine:g} of {utility}, the round is scored with {its:g}"
                    found.setdefault(name, words)
    return found


def check_server(one: Round) -> None:
    """Where the server evaluated, no more than half of the members that reported may have measured otherwise.

    Reports that a copy withholds count as if they agreed: its reader cannot know.
    """
    away, heard = differences(one), len(one.reports) + len(one.withheld)
    if 2 * len(away) > heard:
        name, words = next(iter(away.items()))
        raise LedgerError(
            f"round {one.number}: {len(away)} of {heard} members measured another v(M0) or v(M) than the "
            f"server states: {name} {words}"
        )
