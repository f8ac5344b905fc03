"""The payout decision that stands, as a page shows it."""

from __future__ import annotations

from dataclasses import dataclass

from fedmerit.federation.decisions import Terms
from fedmerit.page.source import Source


@dataclass(frozen=True)
class Decided:
    """The last decision of a ledger, with the names that the page shows."""

    number: int
    record: int
    replaces: int | None
    rounds: int  # it covers
    planned: int  # of the whole run
    terms: Terms
    defined: bool  # whether the scores allowed shares
    budget: str
    lines: tuple[tuple[str, str, str], ...]  # member, share, amount: best paid first
    foot: tuple[tuple[str, str], ...]


def decided(source: Source, unscored: tuple[str, ...]) -> Decided | None:
    """The decision that stands, or None where there is none that verifies.

    Args:
        source: with the names to be shown.
        unscored: who never reported, under those names.
    """
    if source.book is None or not source.book.decisions or source.settings is None:
        return None
    last = source.book.decisions[-1]
    paid, names = last.paid, source.names
    best_first = sorted(paid, key=lambda name: (-paid[name], names[name]))
    lines = [(names[name], f"{last.shares[name]:.2%}", f"{paid[name]:,.2f}") for name in best_first]
    return Decided(
        number=last.number,
        record=last.record,
        replaces=last.replaces,
        rounds=last.rounds,
        planned=source.settings["training"]["rounds"],
        terms=last.terms,
        defined=last.shares.status == "ok",
        budget=str(paid.budget),
        lines=(*lines, *((name, "0.00%", "0.00") for name in unscored)),
        foot=(("unpaid", f"{paid.unpaid:,.2f}"), ("budget", f"{paid.budget:,.2f}")),
    )
