"""Whose keys a ledger was verified with: those its first record states, and whether they are a roster's.

The server writes the first record. Whoever forges a whole ledger puts keys of its own there, and every
signature verifies; only a roster that the reader has from elsewhere shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedmerit.config import Config
from fedmerit.errors import KeyFileError, LedgerError
from fedmerit.federation.journal import REHEARSALS
from fedmerit.keys import Member, Roster


def about_keys(run: Mapping[str, Any], config: Config, roster: Roster | None, name: str) -> Iterator[str]:
    """Compare a run's keys with a roster, or say that nobody has; the lines that tell.

    Args:
        run: the ledger's first record.
        config: in it.
        roster: the reader's own.
        name: of the roster, for messages.

    Raises:
        LedgerError: names whose key differs.
    """
    rehearsal = REHEARSALS.get(run["engine"])
    if roster is not None:
        _check(run, config, roster, name)
        but = f"; but {rehearsal} held them all, so they do not show who spoke" if rehearsal else ""
        yield f"keys: those of {name}, roster hash {roster.hash.hex()}{but}"
    elif run["keys"] and not rehearsal:
        yield f"keys: as the ledger states them; {_how_to_compare(run, config)}"


def _check(run: Mapping[str, Any], config: Config, roster: Roster, name: str) -> None:
    """Names, keys, public weights and hash must be those of the roster."""
    if not run["keys"]:
        raise LedgerError(f"an unsigned ledger has no keys, so there is nothing to compare with {name}")
    listed, wrong = {member.name: member.key for member in roster.members}, []
    for member in dict.fromkeys((*config.clients, *listed)):
        if member not in listed:
            wrong.append(f"{member} is not on it")
        elif member not in config.clients:
            wrong.append(f"{member} is on it and not in the run")
        elif bytes.fromhex(run["keys"][member]) != listed[member]:
            theirs, here = listed[member].hex(), run["keys"][member]
            wrong.append(f"the key of {member} is {here[:16]}..., on the roster {theirs[:16]}...")
    if wrong:
        made = "; a rehearsal makes keys of its own" if run["engine"] in REHEARSALS else ""
        raise LedgerError(f"its keys are not those of {name}: {'; '.join(wrong)}{made}")
    training = config.training
    if training.weights == "roster" and training.roster_weights != roster.weights:
        raise LedgerError(f"its public weights are not those of {name}")
    stated = run.get("terms", {}).get("roster", roster.hash.hex())
    if stated != roster.hash.hex():
        raise LedgerError(
            f"its members agreed to the roster with hash {stated!s:.64}, {name} has {roster.hash.hex()}: "
            "names and keys are the same, public weights are not"
        )


def _how_to_compare(run: Mapping[str, Any], config: Config) -> str:
    """What shows whose keys they are; the hash only where it is that of these very keys."""
    stated, training = run.get("terms", {}).get("roster"), config.training
    weights = training.roster_weights if training.weights == "roster" else {}
    members = (Member(name, bytes.fromhex(run["keys"][name]), weights.get(name)) for name in config.clients)
    try:
        computed = Roster(members).hash.hex()
    except KeyFileError as error:
        raise LedgerError(f"its keys are no roster: {error}") from error
    if stated == computed:
        return f"compare with --roster FILE, or the hash of your roster with {computed}"
    if weights:
        raise LedgerError("its members agreed to another roster than its keys and public weights make")
    if stated is None:
        return "compare with --roster FILE"
    return (
        "compare with --roster FILE (they give no roster hash to compare: the one in its terms is of public "
        "weights that are not in the ledger, or of other keys)"
    )
