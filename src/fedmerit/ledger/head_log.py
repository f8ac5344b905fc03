"""How much of the ledger each member has seen: heads that members signed, or stored in their own files.

A report signs the head before its round, and ``seen`` signs the head after the last round. Anyone who holds
an old head, signed or merely written down, can detect a later rewrite: the head is then not on the chain.

In a run between machines, a member keeps an ASCII file of what it was shown and did, one entry per line::

    ROUND HEAD                       the head after that round, as it was shown
    ROUND trained M0                 it masked an update: hash of the model that this update starts from
    ROUND masked NAME DIGEST         and sent it: its own name (JSON), SHA-256 of the masked words
    ROUND complained ["A", "B"]      A, this member, complained that B dealt it a bad share (JSON)
    ROUND released ["A", "B", "C"]   it released shares, for the sum of these members (JSON)
    ROUND report REPORT OUTCOME      hashes of what it reported, and of what the server said the round was
    ROUND opened MANIFEST            after the last round, it was shown this list of directions (digest)
    ROUND stated NAME HASH           and stated: its own name (JSON), hash of its statement

Each line is written before the message that it describes is sent. The lines detect a server that misstates a
run:

- ``complained``: the ledger does not blame the dealer, although it has the masked input that the complaint
  came with.
- ``masked``: the ledger does not have the masked input that the member sent.
- ``report``: the server told the member a different M from the one it recorded.
- ``opened``: the server showed the member another manifest than the one it recorded.
- ``stated``: the ledger has another statement of the member, or was closed without it.
- ``trained`` and ``released``: the server has more sums than it states. Two sums of the same updates from the
  same M0, one of them without a member, give that member's update by subtraction.

Models that differ at all have different hashes. If the server moves the model between rounds (an optimiser),
the comparison of M0 only finds models that are exactly equal.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, canonical
from fedmerit.ledger.chain import Record
from fedmerit.ledger.records import moves, reading
from fedmerit.notes import Note

Ended = Literal["summed", "aborted", "open"]
"""How a round ended, if it did."""


@dataclass(frozen=True)
class HeadPlace:
    """The place of a head in the ledger."""

    record: int
    rounds: int  # how many rounds were closed by then

    @property
    def words(self) -> Note:
        """The place in words, for lines and messages."""
        if not self.rounds:
            return Note("place-before", record=self.record)
        return Note("place", record=self.record, rounds=self.rounds)

    def __str__(self) -> str:
        return str(self.words)


def places_of(records: Sequence[Record]) -> dict[str, HeadPlace]:
    """Return the place of every head that the ledger ever had."""
    found, rounds = {}, 0
    for record in records:
        rounds += record.kind == "round"
        found[record.digest.hex()] = HeadPlace(record.seq, rounds)
    return found


def check_head(head: str, places: Mapping[str, HeadPlace]) -> HeadPlace:
    """Return the place of a stored head; raise LedgerError if it is not on this chain."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", head):
        raise LedgerError(f"a head is 64 hexadecimal digits, got {head!r:.80}")
    if head.lower() not in places:
        raise LedgerError(
            f"head {head.lower()} is not on this chain: the ledger was rewritten or cut off after somebody "
            "stored this head, or it is the head of another run"
        )
    return places[head.lower()]


def check_kept(path: Path, places: Mapping[str, HeadPlace], records: Sequence[Record]) -> Iterator[Note]:
    """Check a member's own file against the ledger; yield a line per kind of entry."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error
    outcomes = {one.body["round"]: one.commitment.hex() for one in records if one.kind == "outcome"}
    held = {one.commitment.hex() for one in records if one.kind == "report"}
    heads, reports, gone, did = 0, 0, [], _Did(_written(records))
    unheard: list[Note] = []
    stated: list[Note] = []
    for at, line in enumerate(lines, start=1):
        try:
            match line.split(" ", 2):
                case [number, "report", hashes] if number.isdecimal() and hashes.count(" ") == 1:
                    report, outcome = hashes.split(" ")
                    reports += 1
                    if not did.is_open(int(number)):
                        _check_told(int(number), outcome, outcomes)
                    if report not in held:
                        gone.append(int(number))
                case [number, "trained", m0_hash] if number.isdecimal():
                    did.train(int(number), m0_hash)
                case [number, "masked", sent] if number.isdecimal() and " " in sent:
                    _check_sent(int(number), sent, records)
                case [number, "opened", digest] if number.isdecimal():
                    _check_opened(digest, records)
                case [number, "stated", said] if number.isdecimal() and " " in said:
                    stated.append(_check_stated(said, records))
                case [number, "complained", names] if number.isdecimal():
                    unheard += _unheard(int(number), names, records, did)
                case [number, "released", names] if number.isdecimal():
                    did.release(int(number), names)
                case [number, head] if number.isdecimal():
                    heads += 1
                    _check_shown(int(number), head, places)
                case _:
                    raise LedgerError(
                        "expected a round, and then a head or an entry trained, masked, released, report, "
                        f"opened or stated, as a member writes them, got {line!r:.80}"
                    )
        except (LedgerError, ValueError) as error:  # int() refuses thousands of digits
            code = error.code if isinstance(error, LedgerError) else ""
            raise LedgerError(f"{path}: line {at}: {error!s:.400}", code=code) from error
    if not heads and not did.trained:
        raise LedgerError(f"{path}: holds no head")
    if heads:
        yield Note("kept-heads", heads=heads, path=str(path))
    yield from did.lines()
    yield from unheard
    if reports:
        yield Note("kept-reports", there=reports - len(gone), reports=reports)
    if gone:
        yield Note("kept-lost", rounds=gone)
    yield from stated


@dataclass
class _Written:
    """What the ledger states about a round."""

    m0: str | None  # None if not stated: in an open round of a server that moves the model
    included: tuple[str, ...] = ()
    ended: Ended = "open"


def _written(records: Sequence[Record]) -> dict[int, _Written]:
    """Return what the ledger states about each round, from records that `rounds_of` has checked."""
    found: dict[int, _Written] = {}
    last, moving = None, False
    for record in records:
        body = record.body
        if record.kind == "run":
            last, moving = body["m0"], moves(body)
        elif record.kind == "schedule":
            found[body["round"]] = _Written(None if moving and found else last)
        elif record.kind == "outcome":
            found[body["round"]].m0 = body["m0"]
        elif record.kind == "round":
            one, last = found[body["round"]], body["m"]
            one.included, one.ended = tuple(body["included"]), "aborted" if body["aborted"] else "summed"
            one.m0 = last if body["aborted"] else one.m0
    return found


@dataclass
class _Did:
    """What a member did according to its file, and what the ledger states."""

    ledger: Mapping[int, _Written]
    trained: dict[int, str] = field(default_factory=dict)
    released: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def train(self, number: int, m0_hash: str) -> None:
        """Note that the member trained from a model; raise if the ledger states another M0."""
        stated = self._round(number).m0
        if stated not in (None, m0_hash):
            raise LedgerError(
                f"this member did not train from the M0 that the ledger states for round {number}: "
                f"it trained from {m0_hash:.64}, the ledger states {stated}"
            )
        self.trained[number] = m0_hash

    def release(self, number: int, names: str) -> None:
        """Note that the member released shares for a sum; raise if the ledger states another sum."""
        try:
            included = tuple(str(name) for name in json.loads(names))
        except (ValueError, TypeError, RecursionError):
            raise LedgerError(f"expected the names of members as JSON, got {names!r:.80}") from None
        one = self._round(number)
        if one.ended == "summed" and included != one.included:
            raise LedgerError(
                f"this member released shares for the sum of {', '.join(included)} in round {number}, but "
                f"the ledger says that the sum is of {', '.join(one.included)}"
            )
        self.released[number] = included

    def is_open(self, number: int) -> bool:
        """Return whether the ledger has the beginning of a round, but not its end."""
        return number in self.ledger and self.ledger[number].ended == "open"

    def _round(self, number: int) -> _Written:
        if number not in self.ledger:
            raise LedgerError(
                f"this member trained in round {number}, which is not in the ledger: it was left out or cut "
                "off, or this is the file of another run"
            )
        return self.ledger[number]

    def lines(self) -> Iterator[Note]:
        """Yield lines on what agrees, and on sums from which a server could learn an update."""
        if self.trained:
            yield Note("kept-trained", rounds=len(self.trained))
        for number, included in self.released.items():
            if (ended := self.ledger[number].ended) != "summed":
                code = "kept-open" if ended == "open" else "kept-aborted"
                yield Note(code, round=number, clients=included)
        summed = {n: (one.m0, one.included) for n, one in self.ledger.items() if one.ended == "summed"}
        summed |= {n: (self.trained.get(n), included) for n, included in self.released.items()}
        by_model: dict[str | None, list[int]] = defaultdict(list)
        for number, (m0, _) in sorted(summed.items()):
            by_model[m0].append(number)
        for numbers in by_model.values():
            ours = any(number in self.released for number in numbers)
            if ours and len({frozenset(summed[number][1]) for number in numbers}) > 1:
                sums = [Note("kept-sum", round=number, clients=summed[number][1]) for number in numbers]
                yield Note("kept-same", rounds=numbers, sums=sums)


def _check_shown(number: int, head: str, places: Mapping[str, HeadPlace]) -> None:
    place = check_head(head, places)
    if place.rounds != number:
        raise LedgerError(f"shown as the head after round {number}, but it is the head of {place}")


def _check_sent(number: int, sent: str, records: Sequence[Record]) -> None:
    """Raise if the ledger has different masked words of this member; it has none if the answer was lost."""
    name, _, digest = sent.rpartition(" ")
    try:
        member = str(json.loads(name))
    except (ValueError, RecursionError):
        raise LedgerError(f"expected a member's name as JSON, got {name!r:.80}") from None
    for record in records:
        if record.kind == "masked" and record.body["round"] == number:
            stated = record.body["inputs"].get(member, digest)
            if stated != digest:
                raise LedgerError(
                    f"{member} did not send the masked words that the ledger states for round {number}: "
                    f"it sent {digest:.64}, the ledger states {stated!s:.64}"
                )


def _check_opened(digest: str, records: Sequence[Record]) -> None:
    """Raise if the server recorded another manifest than it showed; it may have recorded none."""
    for record in records:
        if record.kind == "opening" and record.body["settlement"] != digest:
            raise LedgerError(
                f"the server showed this member a manifest with digest {digest:.64}, and recorded another "
                f"one, {record.body['settlement']!s:.64}: two manifests signed by one server prove that it "
                "is dishonest (fedmerit member show)",
                code="other-manifest",
            )


def _check_stated(said: str, records: Sequence[Record]) -> Note:
    """Raise if the ledger has another statement of this member, or was closed without the one it made."""
    name, _, digest = said.rpartition(" ")
    try:
        member = str(json.loads(name))
    except (ValueError, RecursionError):
        raise LedgerError(f"expected a member's name as JSON, got {name!r:.80}") from None
    for record in records:
        if record.kind == "statement" and record.author == member:
            if record.commitment.hex() == digest:
                return Note("kept-stated", client=member)
            raise LedgerError(
                f"the ledger has another statement of {member} than it made: {record.commitment.hex()}, it "
                f"made {digest:.64}",
                code="left-out",
            )
    if any(record.kind == "settled" and record.body["final"] for record in records):
        raise LedgerError(
            f"{member} stated, and the settlement was closed without its statement, {digest:.64}",
            code="left-out",
        )
    return Note("kept-unstated", client=member)


def _unheard(number: int, names: str, records: Sequence[Record], did: _Did) -> list[Note]:
    """Raise if the ledger has a complainer's masked input and does not blame the dealer.

    Return a line if it has neither: the answer with the complaint was lost, or left out.
    """
    try:
        member, dealer = (str(name) for name in json.loads(names))
    except (ValueError, TypeError, RecursionError):
        raise LedgerError(f"expected the names of two members as JSON, got {names!r:.80}") from None
    there = [one for one in records if one.kind in ("masked", "blame") and one.body["round"] == number]
    if did.is_open(number) or any(one.kind == "blame" and one.body["member"] == dealer for one in there):
        return []
    if any(one.kind == "masked" and member in one.body["inputs"] for one in there):
        raise LedgerError(
            f"{member} complained in round {number} that {dealer} dealt it a bad share; the ledger has the "
            "masked input that this came with, and does not blame anybody for it"
        )
    return [Note("kept-unheard", round=number, client=member, other=dealer)]


def _check_told(number: int, outcome: str, outcomes: Mapping[int, str]) -> None:
    """Raise unless the outcome that a report was about is the one in the ledger."""
    if outcomes.get(number) != outcome:
        wrote = "a different one" if number in outcomes else "none"
        raise LedgerError(
            f"the server told this member an outcome of round {number} (M0, M, total weight, who is in the "
            f"sum, test slice), but wrote {wrote} into the ledger"
        )


def signed_heads(
    records: Sequence[Record],
    run: Mapping[str, Any],
    pool: Mapping[str, Any],
    places: Mapping[str, HeadPlace],
) -> dict[str, HeadPlace]:
    """Return the last head that each member signed, and check ``join`` and ``seen`` records.

    `rounds_of` compares the head in a report with the outcome of its round.
    """
    last: dict[str, HeadPlace] = {}
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
                        f"its author saw a different history: no head before it is {body['head']!s:.64}"
                    )
                if not body["round"] == place.rounds == rounds:
                    raise LedgerError(f"signs round {body['round']!r:.20}, but its head is of {place}")
                last[record.author] = place
            elif record.kind == "report" and not record.withheld:
                head = places.get(body["bound_to"]["head"])
                last |= {} if head is None else {record.author: head}
    return last


def _check_join(body: Mapping[str, Any], run: Mapping[str, Any], pool: Mapping[str, Any]) -> None:
    for what, there, here in (
        ("identifier", body["run"], run["run"]),
        ("terms", body["terms"], run["terms"]),
        ("test pool", body["commitment"], pool),
        ("server key", body["server"], (run["keys"] or {SERVER: ""})[SERVER]),
    ):
        if canonical(there) != canonical(here):
            raise LedgerError(f"its author did not agree to the run's {what}")


def told(signed: Mapping[str, HeadPlace], members: Sequence[str], length: int) -> Iterator[Note]:
    """Yield a line on how far members' signatures reach."""
    if not signed:
        yield Note("heads-none")
        return
    furthest = max(signed.values(), key=lambda place: place.record)
    count = sum(place == furthest for place in signed.values())
    yield Note("heads", signed=count, members=len(members), place=furthest.words, records=length)
