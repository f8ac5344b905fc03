"""Federations that settle, and what everybody is due in them."""

from __future__ import annotations

from linear_federation import Federation


def settling(
    home, members=5, rounds=2, *, naming=True, scoring=None, settlement=None, sections=None, **given
):
    """A federation that settles: ``scoring`` and ``settlement`` are settings over those that this makes."""
    settings = {
        "scoring": {"method": "settled", **(scoring or {})},
        "settlement": {"naming": naming, **(settlement or {})},
        **(sections or {}),
    }
    return Federation(home, members, rounds, settings=settings, **given)


def judging(home, members=5, rounds=2, *, panel=None, sections=None, **given):
    """A federation whose members judge each other; ``panel`` are settings over those that this makes."""
    settings = {
        "scoring": {"method": "panel"},
        "panel": {"least": 20, **(panel or {})},
        **(sections or {}),
    }
    given.setdefault("accept", lambda config: None)  # also settings that show too much
    return Federation(home, members, rounds, settings=settings, **given)


def attacked(home, members=5, rounds=1, **given):
    """Five members and one settled round, for lies about it: nobody honest may have another number."""
    return settling(home, members, rounds, **{"ledger": False, **given})


def due_in(federation):
    found = federation.coordinator.settled
    (entry,) = found.manifest.rounds
    return {name: found.value(entry, name) for name in entry.participants}
