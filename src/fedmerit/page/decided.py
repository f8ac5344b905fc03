"""The payout decision that stands, as a page shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedmerit.alarms import Doubt
from fedmerit.federation.decisions import Decision, Terms
from fedmerit.page.source import Source
from fedmerit.summary import digits_for
from fedmerit.tables import signed


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
    doubts: tuple[Doubt, ...]  # about the reports that it rests on
    overruled: tuple[Doubt, ...]  # those of them that it was made despite
    basis: Mapping[str, str]  # what it pays by, where that is not the contribution of part 1


def terms_of(source: Source) -> Terms:
    """The terms of the decision that stands; the usual ones where there is none."""
    last = _last(source)
    return Terms("0", str(source.rounds[0].utility), missing=source.missing) if last is None else last.terms


def _last(source: Source) -> Decision | None:
    if source.book is None or not source.book.decisions or source.settings is None:
        return None
    return source.book.decisions[-1]


def decided(source: Source, unscored: tuple[str, ...]) -> Decided | None:
    """The decision that stands, or None where there is none that verifies.

    Args:
        source: with the names to be shown.
        unscored: who never reported, under those names.
    """
    last = _last(source)
    if last is None:
        return None
    assert source.settings is not None
    paid, names = last.paid, source.names
    best_first = sorted(paid, key=lambda name: (-paid[name], names[name]))
    terms, raw = last.terms, last.total.raw.tolist()
    basis = {}
    if (terms.utility, terms.score, terms.missing) != (source.rounds[0].utility, "ALPHA", source.missing):
        digits = digits_for(max(map(abs, raw)))
        basis = {
            names[name]: signed(value, digits) for name, value in zip(last.total.clients, raw, strict=True)
        }
    lines = [(names[name], f"{last.shares[name]:.2%}", f"{paid[name]:,.2f}") for name in best_first]
    return Decided(
        number=last.number,
        record=last.record,
        replaces=last.replaces,
        rounds=last.rounds,
        planned=source.settings["training"]["rounds"],
        terms=terms,
        defined=last.shares.status == "ok",
        budget=str(paid.budget),
        lines=(*lines, *((name, "0.00%", "0.00") for name in unscored)),
        foot=(("unpaid", f"{paid.unpaid:,.2f}"), ("budget", f"{paid.budget:,.2f}")),
        doubts=last.doubts,
        overruled=last.overruled,
        basis=basis,
    )
