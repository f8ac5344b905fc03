"""The server's side of the settlement: it opens the pool, makes the directions, and checks what is stated.

It needs what it archived of every round: the integers that were summed and the model that they moved. All
directions are made, and fixed in the manifest, before any member is asked. Every step is in the ledger before
the next one begins, and a settlement that was cut short goes on where it stopped, with the same manifest.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.errors import FedmeritError, MessageError, SettlementError, StoreError
from fedmerit.identity import canonical
from fedmerit.notes import moment
from fedmerit.protocol.direction import (
    Direction,
    Entry,
    Gradient,
    Manifest,
    as_units,
    block_products,
    blocks_of,
    direction_hash,
    integers,
    product,
    scale_of,
    slopes_of,
)
from fedmerit.protocol.messages import Exchange, Parcel, parsed, slice_arrays, unpack
from fedmerit.protocol.outcome import Model, Round, model_hash, moved, sum_hash
from fedmerit.protocol.pool import Slice
from fedmerit.protocol.settlement import (
    ALL,
    CLOCKS,
    DAY,
    Settled,
    Statement,
    agreement,
    countersignature,
    last_round,
    name_hash,
    statement_limit,
)
from fedmerit.protocol.terms import archived_weights, scheduled_encoding
from fedmerit.secagg.quantise import Encoding, Words, largest_stated

if TYPE_CHECKING:
    from fedmerit.protocol.coordinator import Coordinator

log = logging.getLogger("fedmerit")
Arrays = Mapping[str, npt.NDArray[Any]]
MESSAGES, HEAD = "messages", "head"
"""Where the archive has messages for members who were away, and the array with their signed bytes."""


class Archive(Protocol):
    """Where the server keeps what a settlement needs, one set of arrays per kind and round."""

    def save(self, kind: str, number: int, arrays: Arrays) -> None:
        """Keep arrays, whole or not at all."""

    def load(self, kind: str, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return what was kept; raise StoreError if it is gone or damaged."""

    def has(self, kind: str, number: int) -> bool:
        """Return whether there is such a set of arrays."""

    def drop(self, kind: str, number: int) -> None:
        """Delete a set of arrays."""


@dataclass(frozen=True, eq=False)
class Summed:
    """A round as the archive holds it: the sum, the models before and after it, and how it is encoded."""

    round: int
    participants: tuple[str, ...]
    m0: Model
    m: Model
    words: Words
    weight: float
    encoding: Encoding


def summed_rounds(archive: Archive, rounds: Iterable[Round], config: Config) -> Iterator[Summed]:
    """Yield every round with a sum, in order, as an archive holds it.

    Raises:
        StoreError: the archive has no model that a round starts from.
    """
    m: Model | None = None
    for one in rounds:
        if one.aborted:
            continue
        kept = archive.load("round", one.number)
        m0 = kept.get("m0", m)
        if m0 is None:
            raise StoreError(f"the archive has no model of round {one.number}")
        encoding, public = scheduled_encoding(
            config, m0.size, one.scheduled, archived_weights(kept, one.scheduled)
        )
        total = None if public is None else math.fsum(public[name] for name in one.included)
        decoded = encoding.decode(kept["x"], included=len(one.included), public_total=total)
        m = moved(m0, decoded.weighted_sum, decoded.total_weight)
        yield Summed(one.number, one.included, m0, m, kept["x"], decoded.total_weight, encoding)


@dataclass(eq=False)
class Clearing:
    """The settlement of one run, as its server conducts it.

    Args:
        coordinator: of the run, whose rounds are over.
        gradient: the server's own function.
        archive: what it kept of the rounds.
    """

    coordinator: Coordinator
    gradient: Gradient
    archive: Archive
    waits: bool = False  # whether a run that is not settled may still be, once more members are there
    agreed: dict[str, tuple[list[int], bytes]] = field(default_factory=dict)  # released rounds, signature
    statements: dict[str, tuple[Statement, bytes]] = field(default_factory=dict)
    handed: dict[tuple[str, int], dict[str, bytes]] = field(default_factory=dict)  # answers given by hand

    def run(self, present: Sequence[str]) -> Settled | None:
        """Settle the run with the members who are present; return None if it cannot be settled.

        What the ledger has of it, because a server died or too few were there, counts and is not made anew.
        If it is closed, nobody states any more, and nothing is left to do but to countersign it.
        """
        recorder = self.coordinator.recorder
        try:
            last = self._last(present)
            manifest = self._opening() or self._made()
        except SettlementError as error:
            self.coordinator.note(f"the run is not settled: {error}")
            recorder.state("unsettled", {"settlement": None, "why": error.code})
            self.waits = error.code == "not-last"
            return None
        self._read(manifest)
        if self.coordinator.opening:
            self.coordinator.opening(self.coordinator.pool.settlement())
        if any(body["final"] for body in recorder.recorded("settled")):
            settled = replace(self.settled(manifest), final=True)
            return self._closed(settled, self._open(manifest, present, last))
        opened = self._directions(manifest, list(dict.fromkeys((*present, *last))), last)
        few = self.coordinator.config.threshold
        while len(self.agreed) < few and (back := self._back(self._not_agreed(manifest))):
            opened += self._directions(manifest, back, last)
        if not self._enough(manifest):
            return None
        self._statements(manifest, opened)
        if (so_far := self.settled(manifest)).missing and self.coordinator.awaited:
            self._keep_messages(manifest, last)  # a server that dies while it waits leaves a settlement
            recorder.state("settled", so_far.body())
        while back := self._back(self.settled(manifest).missing):
            self._statements(manifest, self._directions(manifest, back, last))
            opened += [name for name in back if name not in opened]
        settled = self._named(self.settled(manifest))
        if self._back(settled.unproved):
            settled = self._named(self.settled(manifest))
        if settled.awaited:
            self._keep_messages(manifest, last)
        return self._closed(settled, opened)

    def _directions(self, manifest: Manifest, members: Sequence[str], last: Mapping[str, bytes]) -> list[str]:
        """Show members the pool and all directions, and collect what they sign; return who accepts them."""
        opened = self._open(manifest, members, last)
        for one, entry in zip(self.rounds(), manifest.rounds, strict=True):
            self._agree(one, entry, [name for name in opened if name in entry.participants])
        self._agreements(manifest, opened)
        return opened

    def _not_agreed(self, manifest: Manifest) -> list[str]:
        return [name for name in manifest.members if name not in self.agreed]

    def _back(self, missing: Iterable[str]) -> Sequence[str]:
        """Return members who were away and are back; nobody if there is no waiting any more."""
        names = list(missing)
        return self.coordinator.awaited(names) if names and self.coordinator.awaited else []

    # ----------------------------------------------------------------------------------------- the directions

    def rounds(self) -> Iterator[Summed]:
        """Yield every round with a sum, in order, from the archive."""
        return summed_rounds(self.archive, self.coordinator.recorder.rounds, self.coordinator.config)

    def _opening(self) -> Manifest | None:
        """Return the manifest that is in the ledger, if the settlement had begun."""
        for body in self.coordinator.recorder.recorded("opening"):
            return Manifest.from_body(body["manifest"])
        return None

    def _made(self) -> Manifest:
        """Make all directions and put them on one scale; return the manifest, which is recorded."""
        config, recorder = self.coordinator.config, self.coordinator.recorder
        shown = self.coordinator.pool.settlement()
        blocks, by_class = blocks_of(shown, config.settlement.blocks, balanced=self.coordinator.pool.balanced)
        sizes = tuple(len(block) for block in blocks)
        drafts: list[dict[str, Any]] = []
        coordinates = 0
        for one in self.rounds():
            slopes, points, rest = slopes_of(self.gradient, one.m0, one.m, shown, blocks, None)
            step = one.encoding.step
            values = as_units(slopes, sizes, step, one.weight)
            self.archive.save("units", one.round, {"values": values})
            coordinates = one.encoding.length
            drafts.append({
                "round": one.round,
                "m0": model_hash(one.m0),
                "m": model_hash(one.m),
                "x": sum_hash(one.words),
                "weight": one.weight,
                "step": step,
                "participants": one.participants,
                "size": float(np.abs(values).sum()),
                "blocks": block_products(one.words, slopes, one.encoding, step, one.weight),
                "empty": slopes.empty,
                "grand": slopes.grand,
                "rest": rest,
                "points": points,
            })  # fmt: skip
        if not drafts:
            raise SettlementError("no round has a sum, so there is nothing to settle", code="no-rounds")
        scale = scale_of(one["size"] for one in drafts)
        entries = []
        for one, draft in zip(self.rounds(), drafts, strict=True):
            g = integers(self.archive.load("units", one.round)["values"], scale, one.encoding)
            self.archive.save("direction", one.round, {"g": g})
            entries.append(Entry(**draft, g=direction_hash(g), product=product(one.words, g)))
            self.archive.drop("units", one.round)
        manifest = Manifest(
            recorder.run, config.scoring.utilities[0], shown.id, sizes, by_class, scale, coordinates,
            tuple(entries),
        )  # fmt: skip
        if manifest.off_gain:
            raise SettlementError(
                f"all scores would add up to {manifest.scale * manifest.product:.4g}, which is not the gain: "
                "updates are so small beside the model, or so large, that models or directions are rounded "
                "too coarsely",
                code="off-gain",
            )
        recorder.state("opening", {"settlement": manifest.digest, "manifest": manifest.body()})
        return manifest

    def direction(self, entry: Entry) -> Direction:
        """Return the direction of a round, from the archive."""
        found: Direction = self.archive.load("direction", entry.round)["g"]
        if direction_hash(found) != entry.g:
            raise SettlementError(
                f"the archived direction of round {entry.round} is not the one in the manifest",
                code="damaged",
            )
        return found

    # --------------------------------------------------------------------------------------------- exchanges

    def _last(self, present: Sequence[str]) -> dict[str, bytes]:
        """Return t signatures on the last round, if the run ends before all rounds that were agreed on.

        Once the pool is open, those in the ledger are all there are.

        Raises:
            SettlementError: fewer members signed. The pool stays shut then.
        """
        recorder, config = self.coordinator.recorder, self.coordinator.config
        number = len(recorder.rounds)
        if number >= config.training.rounds:
            return {}
        body = last_round(recorder.run, number)
        signed = {name: signature for name, said, signature in recorder.signed("last") if said == body}
        asked = [] if len(signed) >= config.threshold else [name for name in present if name not in signed]
        while asked:
            for name, signature in self.coordinator.exchange("last", number, asked, {}):
                if recorder.said(name, "last", body, signature):
                    signed[name] = signature
            few = len(signed) < config.threshold
            asked = [*self._back(name for name in config.clients if name not in signed)] if few else []
        if len(signed) < config.threshold:
            raise SettlementError(
                f"{len(signed)} members signed that round {number} is the last one, {config.threshold} are "
                "needed",
                code="not-last",
            )
        return signed

    def _opening_ask(self, manifest: Manifest, last: Mapping[str, bytes]) -> Parcel:
        """Return the message that opens the pool."""
        shown = self.coordinator.pool.settlement()
        self._keep_pool(shown)
        body = {
            "manifest": canonical(manifest.body()),
            "slice": [shown.index, list(shown.path)],
            "last": dict(last),
        }
        number = len(self.coordinator.recorder.rounds)
        return self.coordinator.ask("open", number, body, slice_arrays(shown))

    def _open(self, manifest: Manifest, present: Sequence[str], last: Mapping[str, bytes]) -> list[str]:
        """Open the pool; return the members who accept it and the manifest."""
        if not present:
            return []
        ask, opened = self._opening_ask(manifest, last), []
        answers = self.coordinator.transport.exchange("open", dict.fromkeys(present, ask))
        for name, answer in self._read_all(answers, 2):
            if answer == [manifest.digest]:
                opened.append(name)
        return opened

    def _direction_ask(self, one: Summed, entry: Entry) -> Parcel:
        """Return the message that shows the direction of a round."""
        arrays = {"g": self.direction(entry), "m0": one.m0, "sum": one.words}
        return self.coordinator.ask("agree", entry.round, {}, arrays)

    def _keep_pool(self, shown: Slice) -> None:
        """Archive the opened pool, for those who check the settlement later."""
        if not self.archive.has("pool", 0):
            path = np.frombuffer(b"".join(shown.path), np.uint8)
            self.archive.save(
                "pool", 0, {**slice_arrays(shown), "path": path, "index": np.array([shown.index])}
            )

    def _agree(self, one: Summed, entry: Entry, members: Sequence[str]) -> None:
        """Show the members of a round its direction, to recompute it."""
        if not members:
            return
        ask = self._direction_ask(one, entry)
        answers = self.coordinator.transport.exchange("agree", dict.fromkeys(members, ask))
        for name, answer in self._read_all(answers, 2):
            if answer != [True]:
                self.coordinator.note(f"{name} disagrees with the direction of round {entry.round}")

    def _read_all(self, answers: Iterable[tuple[str, bytes]], values: int) -> Iterator[tuple[str, Any]]:
        """Yield what members answered; a member whose bytes cannot be read has not answered."""
        for name, answer in answers:
            try:
                yield name, unpack(answer, "an answer", values=values)
            except MessageError as error:
                self.coordinator.note(f"refused: {name}: {error}")

    def _agreements(self, manifest: Manifest, members: Sequence[str]) -> None:
        """Collect the signatures under the manifest."""
        recorder, config = self.coordinator.recorder, self.coordinator.config
        number = len(recorder.rounds)
        before = {name: body for name, body, _ in recorder.signed("agreed")}
        answers = self.coordinator.exchange("agreed", number, members, {})
        for name, answer in self._read_all(answers, 4 + 2 * config.training.rounds):
            match answer:
                case [list(wrong), list(released), bytes(signature)] if all(
                    type(one) is int for one in (*wrong, *released)
                ):
                    body = agreement(recorder.run, manifest.digest, wrong, released)
                    if before.get(name, body) != body:
                        self.coordinator.note(f"refused: {name}: has signed another agreement before")
                    elif not recorder.said(name, "agreed", body, signature):
                        self.coordinator.note(f"{name} did not sign its agreement")
                    elif wrong:
                        rounds = ", ".join(map(str, wrong))
                        self.coordinator.note(f"{name} says that the directions of rounds {rounds} are wrong")
                    else:
                        self.agreed[name] = released, signature
                case _:
                    self.coordinator.note(f"refused: {name}: not an agreement")

    def _enough(self, manifest: Manifest) -> bool:
        """Return whether t members agree to all directions; record it if they do not."""
        recorder, config = self.coordinator.recorder, self.coordinator.config
        if len(self.agreed) >= config.threshold:
            return True
        self.coordinator.note(
            f"the run is not settled: {len(self.agreed)} members agree to the directions, "
            f"{config.threshold} are needed"
        )
        recorder.state("unsettled", {"settlement": manifest.digest, "why": "not-agreed"})
        against = {name for name, body, _ in recorder.signed("agreed") if body["wrong"]}
        self.waits = len(config.clients) - len(against) >= config.threshold
        return False

    def _agreed_rows(self) -> list[list[Any]]:
        return [[name, released, signature] for name, (released, signature) in self.agreed.items()]

    def _statements(self, manifest: Manifest, members: Sequence[str]) -> None:
        """Ask everybody who agreed to state, and record what they sign."""
        recorder = self.coordinator.recorder
        number, body = len(recorder.rounds), {"agreed": self._agreed_rows()}
        asked = [name for name in members if name in self.agreed]
        for name, answer in self.coordinator.exchange("state", number, asked, body):
            try:
                self.take(manifest, name, answer)
            except FedmeritError as error:
                self.coordinator.note(f"refused: {error}")

    def take(self, manifest: Manifest, name: str, answer: bytes) -> None:
        """Take a member's statement, from whichever hand; raise unless it signed it."""
        recorder, config = self.coordinator.recorder, self.coordinator.config
        if len(answer) > (most := statement_limit(manifest)):
            raise MessageError(
                f"expected at most {most} bytes, got {len(answer)}", stage="state", member=name
            )
        match unpack(answer, "a statement", values=3):
            case [bytes(text), bytes(signature)]:
                body = parsed(text, "state")
                if not recorder.verifies(name, "statement", body, signature):
                    raise MessageError("did not sign its statement", stage="state", member=name)
                statement = Statement.from_body(name, body, manifest, detail=config.settlement.detail)
                if config.word_bytes == 8:
                    self._refuse_beyond(manifest, statement)
                before = self.statements.get(name)
                if before is not None and before[0].body(recorder.run) != body:
                    raise MessageError("has stated something else before", stage="state", member=name)
                recorder.said(name, "statement", body, signature)
                self.statements[name] = statement, signature
                return
        raise MessageError("not a statement", stage="state", member=name)

    def _refuse_beyond(self, manifest: Manifest, statement: Statement) -> None:
        """Raise for a number that masks cannot prove: no honest member states one."""
        entries = [one for one in manifest.rounds if statement.member in one.participants]
        most = {str(one.round): largest_stated(len(one.participants)) for one in entries}
        most[ALL] = sum(most.values())
        for key, value in statement.rounds.items():
            if abs(value) > most[key]:
                raise MessageError(
                    f"states {value} for {key}, and masks can prove at most {most[key]}",
                    stage="state",
                    member=statement.member,
                )

    def late(self, name: str, *answers: tuple[str, int, bytes]) -> Settled:
        """Take answers that a member hands in later, and record what the settlement comes to now.

        Args:
            name: the member.
            answers: exchange, round and answer: its statement (``state``), what it shows of its masks
                (``table``, ``pairs``), or its signature under the window (``settle``).
        """
        manifest, last = self._before()
        if last["final"]:
            raise SettlementError("the settlement is closed", code="closed", member=name)
        recorder = self.coordinator.recorder
        for exchange, number, answer in answers:
            if exchange == "state":
                self.take(manifest, name, answer)
            elif exchange == "settle":
                if not recorder.said(name, "countersigned", countersignature(recorder.run, last), answer):
                    raise SettlementError(
                        "did not countersign the last word on the settlement", code="unsigned", member=name
                    )
            else:
                self.handed.setdefault((exchange, number), {})[name] = answer
        settled = self._named(self.settled(manifest))
        recorder.state("settled", settled.body())
        self._keep_ends(settled, manifest.members)
        return settled

    def close(self, now: float, signed: Mapping[str, bytes] | None = None) -> Settled:
        """Close the settlement once its window is over: members who are still awaited share the remainder.

        Args:
            now: the time, in seconds since 1970.
            signed: by member, signatures under the end that were handed in; all others are asked.

        Raises:
            SettlementError: the window is open (``open``), or fewer than t members countersigned the day on
                which it closes, or the end (``uncountersigned``).
        """
        manifest, last = self._before()
        settled, recorder = self.settled(manifest), self.coordinator.recorder
        if last["final"]:
            return replace(settled, final=True)
        if last["closes"] is not None and now < last["closes"]:
            waiting = ", ".join(settled.awaited) or "members about their masks"
            raise SettlementError(
                f"answers of {waiting} are taken until {moment(last['closes'])}", code="open"
            )
        if (told := self._told_of(last["closes"])) < (needed := self._needed):
            opened = replace(settled, closes=self._until(now, 2))  # so that there is time to sign it by hand
            recorder.state("settled", opened.body())
            self._keep_ends(opened, manifest.members)
            raise SettlementError(
                f"{told} members countersigned when the window closes, {needed} are needed: it is open again "
                f"until {moment(opened.closes)}, for members to sign that (fedmerit member state)",
                code="uncountersigned",
            )
        settled = replace(settled, final=True)
        body = settled.body()
        end, given = countersignature(recorder.run, body), dict(signed or {})
        asks = {name: ask for name, ask in self._end_asks(settled, manifest.members) if name not in given}
        given |= dict(self.coordinator.transport.exchange("settle", asks))
        good = {who: one for who, one in given.items() if recorder.verifies(who, "countersigned", end, one)}
        if settled.awaited and len(good) < needed:
            self._keep_ends(settled, manifest.members)
            raise SettlementError(
                f"{len(good)} members signed that the settlement is closed without "
                f"{', '.join(settled.awaited)}, {needed} are needed",
                code="uncountersigned",
            )
        recorder.state("settled", body, countersigned=good)
        return settled

    @property
    def _needed(self) -> int:
        """How many members must countersign a window: none where nothing is signed."""
        return self.coordinator.config.threshold if self.coordinator.recorder.agreed.server else 0

    def _told_of(self, closes: int | None) -> int:
        """Return how many members countersigned a window that closes then."""
        recorder = self.coordinator.recorder
        opened = [
            one for one in recorder.recorded("settled") if (one["closes"], one["final"]) == (closes, False)
        ]
        sums = {countersignature(recorder.run, one)["sums"] for one in opened}
        return len({name for name, body, _ in recorder.signed("countersigned") if body["sums"] in sums})

    def _until(self, now: float, windows: int = 1) -> int:
        """Return when a window closes that is opened now."""
        return int(now + windows * self.coordinator.config.settlement.window_days * DAY)

    def _before(self) -> tuple[Manifest, Mapping[str, Any]]:
        """Return the manifest and the last word on the settlement; read what was stated, from the ledger."""
        manifest, said = self._opening(), self.coordinator.recorder.recorded("settled")
        if manifest is None or not said:
            raise SettlementError("the run has not been settled", code="unfinished")
        self._read(manifest)
        return manifest, said[-1]

    def _read(self, manifest: Manifest) -> None:
        """Read what was agreed and stated before, from the ledger."""
        detail = self.coordinator.config.settlement.detail
        for name, body, signature in self.coordinator.recorder.signed("agreed"):
            if not body["wrong"]:
                self.agreed[name] = list(body["released"]), signature
        for name, body, signature in self.coordinator.recorder.signed("statement"):
            self.statements[name] = Statement.from_body(name, body, manifest, detail=detail), signature

    def settled(self, manifest: Manifest) -> Settled:
        """Return what statements and verdicts come to so far; a window that was opened stays as it is."""
        recorder = self.coordinator.recorder
        found = {name: statement for name, (statement, _) in self.statements.items()}
        told = recorder.recorded("settled")
        closes = told[-1]["closes"] if told else None
        made = Settled(manifest, found, self.coordinator.config.settlement.detail, closes=closes)
        for body in recorder.recorded("verdict"):
            made = made.judged(body)
        return self._dated(made)

    def _dated(self, settled: Settled) -> Settled:
        """Return a settlement that is final if nothing is open, else with the day on which it closes.

        Open is who is awaited, and an equation that fails and of which masks have not said why.
        """
        asked = self.coordinator.config.word_bytes == 8
        failing = any(
            not one.holds and not (settled.liars if one.round is None else settled.named.get(one.round))
            for one in settled.equations
        )
        if not settled.awaited and not (asked and failing):
            return replace(settled, closes=None, final=True)
        closes = self._until(time.time()) if settled.closes is None else settled.closes
        return replace(settled, closes=closes, final=False)

    def _named(self, settled: Settled) -> Settled:
        """Find out who lied, in every round whose equation fails though everybody stated."""
        failed = [one for one in settled.equations if not one.missing and not one.holds]
        if not failed or self.coordinator.config.word_bytes == 4:
            return settled
        from fedmerit.protocol.naming import named

        return self._dated(named(self, settled, failed))

    def shown_statements(self) -> dict[str, list[bytes]]:
        """Return all statements as members signed them."""
        run, stated = self.coordinator.recorder.run, self.statements.items()
        return {name: [canonical(one.body(run)), signature] for name, (one, signature) in stated}

    def _closed(self, settled: Settled, members: Sequence[str]) -> Settled:
        """Record what the settlement came to, and collect countersignatures."""
        recorder = self.coordinator.recorder
        if not settled.final and self._told_of(settled.closes) < self._needed:
            least = self._until(time.time())  # who is told only now signs no shorter window
            settled = replace(settled, closes=max(least - CLOCKS // 2, settled.closes or least))
        body = settled.body()
        if [canonical(body)] != [canonical(one) for one in recorder.recorded("settled")[-1:]]:
            recorder.state("settled", body)  # else nobody came back since it was recorded
        signed, asks = countersignature(recorder.run, body), dict(self._end_asks(settled, members))
        for name, signature in self.coordinator.transport.exchange("settle", asks) if asks else ():
            if not recorder.said(name, "countersigned", signed, signature):
                self.coordinator.note(f"{name} did not countersign the settlement")
        self._keep_ends(settled, settled.manifest.members)
        return settled

    def _end_asks(self, settled: Settled, members: Iterable[str]) -> Iterator[tuple[str, Parcel]]:
        """Yield the requests to countersign what the settlement came to."""
        shown, everybody = self.shown_statements(), self.coordinator.config.scoring.visibility == "all"
        number, text = len(self.coordinator.recorder.rounds), canonical(settled.body())
        whole = self.coordinator.ask("settle", number, {"settled": text, "statements": shown})
        for name in members:
            own = {key: one for key, one in shown.items() if key == name}
            alone = {"settled": text, "statements": own}
            yield name, whole if everybody else self.coordinator.ask("settle", number, alone)

    # ------------------------------------------------------------------------------------- who is missing

    def _keep_messages(self, manifest: Manifest, last: Mapping[str, bytes]) -> None:
        """Keep the messages that a member needs to state when the server is gone; the pool is open anyway."""
        number = len(self.coordinator.recorder.rounds)
        self._keep("open", number, self._opening_ask(manifest, last))
        for one, entry in zip(self.rounds(), manifest.rounds, strict=True):
            self._keep("agree", one.round, self._direction_ask(one, entry))
        self._keep("agreed", number, self.coordinator.ask("agreed", number, {}))
        self._keep("state", number, self.coordinator.ask("state", number, {"agreed": self._agreed_rows()}))

    def _keep_ends(self, settled: Settled, members: Iterable[str]) -> None:
        """Keep the requests for countersignatures while anybody is awaited: t of them end the window."""
        for name, ask in self._end_asks(settled, members) if settled.awaited else ():
            self.keep_for(name, "settle", len(self.coordinator.recorder.rounds), ask)

    def keep_for(self, name: str, kind: str, number: int, parcel: Parcel) -> None:
        """Keep a message for one member, to be answered by hand."""
        self._keep(f"{kind}-{name_hash(name)}", number, parcel)

    def answers(self, kind: Exchange, number: int, asks: Mapping[str, Parcel]) -> Iterator[tuple[str, bytes]]:
        """Yield members' answers: those that were handed in, then those of members who can be asked."""
        handed = self.handed.get((kind, number), {})
        yield from ((name, handed[name]) for name in asks if name in handed)
        if rest := {name: ask for name, ask in asks.items() if name not in handed}:
            yield from self.coordinator.transport.exchange(kind, rest)

    def _keep(self, kind: str, number: int, parcel: Parcel) -> None:
        head = np.frombuffer(parcel.head, np.uint8)
        self.archive.save(f"{MESSAGES}/{kind}", number, {**parcel.arrays, HEAD: head})
