"""Who has seen how much of the ledger: heads that members signed, were shown, or kept.

A report signs the head before its round, ``seen`` the head after the last one. Whoever holds an old head,
signed or merely written down, sees a later rewrite: the head is then no longer on the chain.

A member between machines keeps a file of both, one a line::

    ROUND HEAD                       the head after that round, as it was shown
    ROUND report REPORT OUTCOME      hashes of what it reported, and of what the server said the round was

The second kind shows a server that told one member another M than it wrote down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmerit.errors import LedgerError
from fedmerit.federation.journal import reading
from fedmerit.ledger import Record, canonical, commitment


@dataclass(frozen=True)
class Place:
    """Where a head lies."""

    record: int
    rounds: int  # closed by then

    def __str__(self) -> str:
        after = f"after round {self.rounds}" if self.rounds else "before round 1"
        return f"record {self.record}, {after}"


def places_of(records: Sequence[Record]) -> dict[str, Place]:
    """Every head the ledger ever had -> where it lies."""
    found, rounds = {}, 0
    for record in records:
        rounds += record.kind == "round"
        found[record.digest.hex()] = Place(record.seq, rounds)
    return found


def check_head(head: str, places: Mapping[str, Place]) -> Place:
    """Where a head that somebody kept lies, if the ledger still has it."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", head):
        raise LedgerError(f"a head is 64 hexadecimal digits, got {head!r:.80}")
    if head.lower() not in places:
        raise LedgerError(
            f"head {head.lower()} is not on this chain: the ledger was rewritten or cut off after somebody "
            "kept it, or it is the head of another run"
        )
    return places[head.lower()]


def kept_head(number: int, head: str) -> str:
    """The line of a head that was shown as the one after a round."""
    return f"{number} {head}"


def kept_report(number: int, body: Mapping[str, Any], bound_to: Mapping[str, Any]) -> str:
    """The line of a report and of the outcome that it speaks of."""
    outcome = commitment({"round": number, **bound_to})
    return f"{number} report {commitment(body).hex()} {outcome.hex()}"


def check_kept(path: Path, places: Mapping[str, Place], records: Sequence[Record]) -> Iterator[str]:
    """Check a member's own file of what it was shown and said; a line for each kind of thing in it."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error
    outcomes = {one.body["round"]: one.commitment.hex() for one in records if one.kind == "outcome"}
    held = {one.commitment.hex() for one in records if one.kind == "report"}
    heads, reports, gone = 0, 0, []
    for at, line in enumerate(lines, start=1):
        try:
            match line.split(" "):
                case [number, "report", report, outcome] if number.isdecimal():
                    reports += 1
                    _check_told(int(number), outcome, outcomes)
                    if report not in held:
                        gone.append(number)
                case [number, head] if number.isdecimal():
                    heads += 1
                    _check_shown(int(number), head, places)
                case _:
                    raise LedgerError(f"expected a round and a head, or a report, got {line!r:.80}")
        except LedgerError as error:
            raise LedgerError(f"{path}: line {at}: {error}") from error
    if not heads:
        raise LedgerError(f"{path}: holds no head")
    yield f"kept: all {heads} heads in {path} are on the chain"
    if reports:
        yield f"kept: {reports - len(gone)} of {reports} reports are in the ledger, about what was told"
    if gone:
        yield (
            f"kept: the report of round {', '.join(gone)} is not in the ledger: it was lost on the way, "
            "or the server left it out"
        )


def _check_shown(number: int, head: str, places: Mapping[str, Place]) -> None:
    place = check_head(head, places)
    if place.rounds != number:
        raise LedgerError(f"shown as the head after round {number}, but it is that of {place}")


def _check_told(number: int, outcome: str, outcomes: Mapping[int, str]) -> None:
    """What a report was about must be what the ledger says of the round."""
    if outcomes.get(number) != outcome:
        wrote = "it wrote down" if number in outcomes else "none, as it wrote down"
        raise LedgerError(
            f"the server told this member another outcome of round {number} (M0, M, total weight, who is in "
            f"the sum, test slice) than {wrote}"
        )


def signed_heads(
    records: Sequence[Record], run: Mapping[str, Any], pool: Mapping[str, Any], places: Mapping[str, Place]
) -> dict[str, Place]:
    """Member -> the last head it signed; checks ``join`` and ``seen`` records on the way.

    A report's head is compared with its round's outcome where rounds are read (`rounds_of`).
    """
    last: dict[str, Place] = {}
    joined: set[str] = set()
    rounds = 0
    for record in records:
        body = record.body
        with reading(record):
            if record.kind == "round":
                rounds += 1
            elif record.kind == "join":
                _check_join(body, run, pool)
                joined.add(record.author)
            elif record.kind in ("report", "seen") and "terms" in run and record.author not in joined:
                raise LedgerError("its author has not joined the run")
            if record.kind == "seen":
                if body["run"] != run["run"]:
                    raise LedgerError("belongs to another run")
                place = places.get(body["head"])
                if place is None or place.record >= record.seq:
                    raise LedgerError(
                        f"its author saw another history: {body['head']!s:.64} is not before it"
                    )
                if not body["round"] == place.rounds == rounds:
                    raise LedgerError(f"signs round {body['round']!r:.20}, but its head is that of {place}")
                last[record.author] = place
            elif record.kind == "report" and not record.withheld:
                head = places.get(body["bound_to"]["head"])
                last |= {} if head is None else {record.author: head}
    return last


def _check_join(body: Mapping[str, Any], run: Mapping[str, Any], pool: Mapping[str, Any]) -> None:
    for what, there, here in (
        ("run", body["run"], run["run"]),
        ("terms", body["terms"], run["terms"]),
        ("test pool", body["commitment"], pool),
        ("server's key", body["server"], run["keys"]["server"]),
    ):
        if canonical(there) != canonical(here):
            raise LedgerError(f"its author agreed to another {what} than the run's")


def told(signed: Mapping[str, Place], members: Sequence[str], length: int) -> Iterator[str]:
    """How far members' signatures reach, in a line."""
    if not signed:
        yield "heads: no member has signed one yet; what is here rests on the server alone"
        return
    furthest = max(signed.values(), key=lambda place: place.record)
    count = sum(place == furthest for place in signed.values())
    yield f"heads: {count} of {len(members)} members signed that of {furthest}, of {length} records"
