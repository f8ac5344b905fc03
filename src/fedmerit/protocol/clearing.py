"""The server's side of the settlement: it opens the pool, makes the directions, and checks what is stated.

It needs what it archived of every round: the integers that were summed and the model that they moved. All
directions are made, and fixed in the manifest, before any member is asked. Every step is in the ledger before
the next one begins, and a settlement that was cut short goes on where it stopped, with the same manifest.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from fedmerit.errors import FedmeritError, MessageError, SettlementError
from fedmerit.identity import canonical
from fedmerit.notes import moment
from fedmerit.protocol.coordinator import Summed
from fedmerit.protocol.direction import (
    Entry,
    Manifest,
    as_units,
    block_products,
    blocks_of,
    integers,
    product,
    scale_of,
    slopes_of,
)
from fedmerit.protocol.drawing import Drawing
from fedmerit.protocol.messages import (
    ANSWER,
    Accord,
    AskBody,
    OpenAsk,
    Parcel,
    SettleAsk,
    Signed,
    StateAnswer,
    StateAsk,
    answer_of,
    parsed,
    slice_arrays,
)
from fedmerit.protocol.naming import Desk, named
from fedmerit.protocol.outcome import model_hash, sum_hash
from fedmerit.protocol.settlement import (
    CLOCKS,
    DAY,
    Settled,
    Statement,
    agreement,
    countersignature,
    last_round,
    name_hash,
    statement_limit,
    table_limit,
    table_of,
    tables_hash,
)
from fedmerit.protocol.witness import tables_by_round
from fedmerit.secagg.board import signed_lanes
from fedmerit.secagg.quantise import direction_hash, largest_stated

T = TypeVar("T")


@dataclass(eq=False)
class Clearing(Desk):
    """The settlement of one run, whose rounds are over, as its server conducts it."""

    waits: bool = False  # whether a run that is not settled may still be, once more members are there
    agreed: dict[str, Accord] = field(default_factory=dict)
    returned: dict[str, None] = field(default_factory=dict)  # who was away at first, and is back

    def run(self, present: Sequence[str]) -> Settled | None:
        """Settle the run with the members who are present; return None if it cannot be settled.

        What the ledger has of it, because a server died or too few were there, is reused. If it is closed,
        nobody states any more, and nothing is left to do but to countersign it.
        """
        coordinator, recorder = self.coordinator, self.recorder
        try:
            last = self._last(present)
            manifest = self._opening() or self._made(present, last)
        except SettlementError as error:
            coordinator.note(f"the run is not settled: {error}")
            recorder.state("unsettled", {"settlement": None, "why": error.code})
            self.waits = error.code in ("not-last", "not-drawn", "no-judges")
            return None
        self._read(manifest)
        if coordinator.opening and not self.config.judged:
            coordinator.opening(coordinator.pool.settlement())
        if any(body["final"] for body in recorder.recorded("settled")):
            settled = replace(self.settled(manifest), final=True)
            return self._closed(settled, self._open(manifest, present, last))
        opened = self._directions(manifest, list(dict.fromkeys((*present, *last, *self.returned))), last)
        while len(self.agreed) < self.config.threshold:
            if not (back := self._back(name for name in manifest.members if name not in self.agreed)):
                break
            opened += self._directions(manifest, back, last, whole=True)
        if not self._enough(manifest):
            return None
        self._statements(manifest, opened)
        if (so_far := self.settled(manifest)).missing and coordinator.awaited:
            self._keep_messages(manifest, last)  # a server that dies while it waits leaves a settlement
            recorder.state("settled", so_far.body())
        while back := self._back(self.settled(manifest).missing):
            self._statements(manifest, self._directions(manifest, back, last, whole=True))
            opened += [name for name in back if name not in opened]
        settled = self._named(self.settled(manifest))
        if self._back(settled.unproved):
            settled = self._named(self.settled(manifest))
        if settled.awaited:
            self._keep_messages(manifest, last)
        return self._closed(settled, opened)

    def _directions(
        self, manifest: Manifest, members: Sequence[str], last: Mapping[str, bytes], *, whole: bool = False
    ) -> list[str]:
        """Show members the pool and all directions, and collect what they sign; return who accepts them.

        ``whole`` shows all that a member may lack who was away.
        """
        opened = self._open(manifest, members, last)
        for summed, entry in zip(self.rounds(), manifest.rounds, strict=True):
            if names := [name for name in opened if name in entry.participants]:
                asks = dict.fromkeys(names, self._direction_ask(summed, entry, whole=whole))
                for name, right in self._exchange(asks, bool, "agree"):
                    if not right:
                        self.coordinator.note(f"{name} disagrees with the direction of round {entry.round}")
        self._agreements(manifest, opened)
        return opened

    def _back(self, missing: Iterable[str]) -> Sequence[str]:
        """Return members who were away and are back; nobody once waiting has ended."""
        names = list(missing)
        back = self.coordinator.awaited(names) if names and self.coordinator.awaited else []
        self.returned |= dict.fromkeys(back)
        return back

    # ----------------------------------------------------------------------------------------- the directions

    def _opening(self) -> Manifest | None:
        """Return the manifest that is in the ledger, if the settlement had begun."""
        for body in self.recorder.recorded("opening"):
            return Manifest.from_body(body["manifest"])
        return None

    def _made(self, present: Sequence[str] = (), last: Mapping[str, bytes] | None = None) -> Manifest:
        """Make all directions and put them on one scale; return the manifest, which is recorded."""
        shown = self.coordinator.pool.settlement()
        blocks, by_class = blocks_of(shown, balanced=self.coordinator.pool.balanced)
        sizes = tuple(len(block) for block in blocks)
        entries: list[Entry] = []
        for summed in self.rounds():
            assert self.gradient is not None
            slopes, points, rest = slopes_of(self.gradient, summed.m0, summed.m, shown, blocks, None)
            encoding, weight = summed.task.encoding, summed.weight
            values = as_units(slopes, sizes, encoding.step, weight)
            self.archive.save("units", summed.round, {"values": values})
            entry = Entry(
                round=summed.round,
                m0=summed.task.m0_hash.hex(),
                m=model_hash(summed.m),
                x=sum_hash(summed.words),
                weight=weight,
                step=encoding.step,
                participants=summed.participants,
                g="",  # it follows from the scale
                size=float(np.abs(values).sum()),
                product=0,
                blocks=block_products(summed.words, slopes, encoding, encoding.step, weight),
                empty=slopes.empty,
                grand=slopes.grand,
                rest=rest,
                points=points,
            )
            entries.append(entry)
        if not entries:
            raise SettlementError("no round has a sum, so there is nothing to settle", code="no-rounds")
        scale = scale_of(entry.size for entry in entries)
        for place, summed in enumerate(self.rounds()):
            encoding = summed.task.encoding
            g = integers(self.archive.load("units", summed.round)["values"], scale, encoding)
            self.archive.save("direction", summed.round, {"g": g})
            self.archive.drop("units", summed.round)
            entries[place] = replace(entries[place], g=direction_hash(g), product=product(summed.words, g))
        manifest = Manifest(
            self.recorder.run, self.config.scoring.utilities[0], shown.id, sizes, by_class, scale,
            encoding.length, tuple(entries),
        )  # fmt: skip
        if manifest.off_gain:
            raise SettlementError(
                f"all scores would add up to {manifest.scale * manifest.product:.4g}, which is not the gain: "
                "updates are so small beside the model, or so large, that models or directions are rounded "
                "too coarsely",
                code="off-gain",
            )
        self.recorder.state("opening", {"settlement": manifest.digest, "manifest": manifest.body()})
        return manifest

    # --------------------------------------------------------------------------------------------- exchanges

    def _last(self, present: Sequence[str]) -> dict[str, bytes]:
        """Return t signatures on the last round, if the run ends before all rounds that were agreed on.

        Once the pool is open, those in the ledger are all there are. If fewer sign, the pool stays shut.
        """
        recorder, config, number = self.recorder, self.config, len(self.recorder.rounds)
        if number >= config.training.rounds:
            return {}
        last = last_round(recorder.run, number)
        signed = {name: signature for name, body, signature in recorder.signed("last") if body == last}
        asked = [] if len(signed) >= config.threshold else [name for name in present if name not in signed]
        while asked:
            for name, signature in self.coordinator.exchange("last", number, asked, AskBody()):
                if recorder.said(name, "last", last, signature):
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
        """Return the message that opens the pool; archive the pool for those who check the settlement."""
        shown = self.coordinator.pool.settlement()
        if not self.archive.has("pool", 0):
            path = np.frombuffer(b"".join(shown.path), np.uint8)
            place = {"path": path, "index": np.array([shown.index])}
            self.archive.save("pool", 0, {**slice_arrays(shown), **place})
        agreed = self.agreed if len(self.agreed) >= self.config.threshold else {}
        body = OpenAsk(canonical(manifest.body()), (shown.index, shown.path), dict(last), agreed)
        return self.coordinator.ask("open", len(self.recorder.rounds), body, slice_arrays(shown))

    def _open(self, manifest: Manifest, present: Sequence[str], last: Mapping[str, bytes]) -> list[str]:
        """Open the pool; return the members who accept it and the manifest."""
        if not present:
            return []
        asks = dict.fromkeys(present, self._opening_ask(manifest, last))
        return [name for name, digest in self._exchange(asks, str, "open") if digest == manifest.digest]

    def _direction_ask(self, summed: Summed, entry: Entry, *, whole: bool = False) -> Parcel:
        """Return the message that shows the direction of a round."""
        arrays = {"g": self.direction(entry), "m0": summed.m0, "sum": summed.words}
        return self.coordinator.ask("agree", entry.round, AskBody(), arrays)

    def _exchange(
        self, asks: Mapping[str, Parcel], kind: type[T], stage: Any, most: int = ANSWER
    ) -> Iterator[tuple[str, T]]:
        """Yield what members answer; a member whose bytes cannot be read has not answered."""
        for name, answer in self.coordinator.transport.exchange(stage, asks):
            try:
                yield name, answer_of(name, answer, kind, stage, most)
            except MessageError as error:
                self.coordinator.note(f"refused: {error}")

    def _agreements(self, manifest: Manifest, members: Sequence[str]) -> None:
        """Collect the signatures under the manifest."""
        if not members:
            return
        recorder, note = self.recorder, self.coordinator.note
        before = {name: body for name, body, _ in recorder.signed("agreed")}
        asks = dict.fromkeys(members, self.coordinator.ask("agreed", len(recorder.rounds), AskBody()))
        most = ANSWER + 10 * self.config.training.rounds
        for name, answer in self._exchange(asks, Accord, "agreed", most):
            body = agreement(recorder.run, manifest.digest, answer.wrong, answer.released, answer.draw)
            if name in self.statements and name not in before:
                continue  # it stated by hand, and agreed to nothing before that
            if before.get(name, body) != body:
                note(f"refused: {name}: has signed another agreement before")
            elif not recorder.said(name, "agreed", body, answer.signature):
                note(f"{name} did not sign its agreement")
            elif answer.wrong:
                rounds = ", ".join(map(str, answer.wrong))
                note(f"{name} says that the directions of rounds {rounds} are wrong")
            else:
                self.agreed[name] = answer

    def _enough(self, manifest: Manifest) -> bool:
        """Return whether t members agree to all directions; record it if they do not."""
        recorder, config = self.recorder, self.config
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

    def _statements(self, manifest: Manifest, members: Sequence[str]) -> None:
        """Ask everybody who agreed to state, and record what they sign."""
        number, body = len(self.recorder.rounds), StateAsk(self.agreed)
        asked = [name for name in members if name in self.agreed]
        for name, answer in self.coordinator.exchange("state", number, asked, body):
            try:
                self.take(manifest, name, answer)
            except FedmeritError as error:
                self.coordinator.note(f"refused: {error}")

    def take(self, manifest: Manifest, name: str, answer: bytes) -> None:
        """Take a member's statement, from whichever hand; raise unless it signed it."""
        recorder = self.recorder
        most = statement_limit(manifest)
        each = table_limit(self.config.clients, manifest.lanes)
        tables_most = each * len(manifest.rounds) if self._proves else 0
        signed = answer_of(name, answer, StateAnswer, "state", most + tables_most)
        body = parsed(signed.text, "state", most)
        # whose it is comes first: what nobody signed counts against nobody
        if not recorder.verifies(name, "statement", body, signed.signature):
            raise MessageError("did not sign its statement", stage="state", member=name)
        statement = Statement.from_body(name, body, manifest)
        before = self.statements.get(name)
        if before is not None and before[0].body(recorder.run) != body:
            raise MessageError("has stated something else before", stage="state", member=name)
        tables = self._tables(manifest, statement, signed.tables) if self._proves else []
        for table, signature in tables:
            recorder.said(name, "table", table, signature)
        recorder.said(name, "statement", body, signed.signature)
        self.statements[name] = statement, signed.signature

    @property
    def _proves(self) -> bool:
        """Whether masks can prove what is stated."""
        return self.config.word_bytes == 8

    def _tables(
        self, manifest: Manifest, statement: Statement, shown: Sequence[Signed]
    ) -> list[tuple[dict[str, Any], bytes]]:
        """Return a member's tables, one for each round that it stated on; raise unless it signed them."""
        self._refuse_beyond(manifest, statement)
        name, found = statement.member, []
        if len(shown) != len(statement.rounds):
            raise MessageError("expected a table for each round", stage="state", member=name)
        for key, signed in zip(statement.rounds, shown, strict=True):
            body = parsed(signed.text, "state", table_limit(self.config.clients, manifest.lanes))
            where = self.recorder.run, manifest.digest, manifest.along(int(key)), manifest.lanes
            table_of(name, body, *where)
            if not self.recorder.verifies(name, "table", body, signed.signature):
                raise MessageError("did not sign its table", stage="state", member=name)
            found.append((body, signed.signature))
        if tables_hash(body for body, _ in found) != statement.masks:
            raise MessageError("other tables than those of its statement", stage="state", member=name)
        return found

    def _refuse_beyond(self, manifest: Manifest, statement: Statement) -> None:
        """Raise for a number that masks cannot prove: no honest member states one."""
        for key, stated in statement.rounds.items():
            most = largest_stated(len(manifest.entry(int(key)).participants))
            each = (stated,) if manifest.lanes == 1 else signed_lanes(stated, manifest.lanes)
            if abs(value := max(each, key=abs)) > most:
                raise MessageError(
                    f"states {value} for {key}, and masks can prove at most {most}",
                    stage="state",
                    member=statement.member,
                )

    # ------------------------------------------------------------------------------------------ late answers

    def late(self, name: str, *answers: tuple[str, int, bytes]) -> Settled:
        """Take answers that a member hands in later, and record what the settlement comes to now.

        Each is exchange, round and answer: its statement (``state``), what it shows of its masks
        (``table``, ``pairs``; with the number of a block, such as ``table.3``), or its signature under the
        window (``settle``).
        """
        manifest, last = self._before()
        if last["final"]:
            raise SettlementError("the settlement is closed", code="closed", member=name)
        recorder = self.recorder
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

        ``signed`` are signatures under the end that were handed in, by member; all others are asked.
        Raise SettlementError if the window is open (``open``), or fewer than t members countersigned the day
        on which it closes, or the end (``uncountersigned``).
        """
        manifest, last = self._before()
        settled, recorder, needed = self.settled(manifest), self.recorder, self._needed
        if last["final"]:
            return replace(settled, final=True)
        if last["closes"] is not None and now < last["closes"]:
            waiting = ", ".join(settled.awaited) or "members about their masks"
            raise SettlementError(
                f"answers of {waiting} are taken until {moment(last['closes'])}", code="open"
            )
        if (told := self._told_of(last["closes"])) < needed:
            opened = replace(settled, closes=self._until(now, 2))  # so that there is time to sign it by hand
            recorder.state("settled", opened.body())
            self._keep_ends(opened, manifest.members)
            raise SettlementError(
                f"{told} members countersigned when the window closes, {needed} are needed: it is open again "
                f"until {moment(opened.closes)}, for members to sign that (fedmerit member state)",
                code="uncountersigned",
            )
        settled = replace(settled, final=True)
        body, proofs = settled.body(), dict(signed or {})
        asks = {name: ask for name, ask in self._end_asks(settled, manifest.members) if name not in proofs}
        proofs |= dict(self.coordinator.transport.exchange("settle", asks))
        end = countersignature(recorder.run, body)
        good = {
            name: proof
            for name, proof in proofs.items()
            if recorder.verifies(name, "countersigned", end, proof)
        }
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
        return self.config.threshold if self.recorder.agreed.server else 0

    def _told_of(self, closes: int | None) -> int:
        """Return how many members countersigned a window that closes then."""
        run, ends = self.recorder.run, self.recorder.recorded("settled")
        opened = [body for body in ends if (body["closes"], body["final"]) == (closes, False)]
        sums = {countersignature(run, body)["sums"] for body in opened}
        signed = self.recorder.signed("countersigned")
        return len({name for name, body, _ in signed if body["sums"] in sums})

    def _until(self, now: float, windows: int = 1) -> int:
        """Return when a window closes that is opened now."""
        return int(now + windows * self.config.settlement.window_days * DAY)

    def _before(self) -> tuple[Manifest, Mapping[str, Any]]:
        """Return the manifest and the last word on the settlement; read what was stated, from the ledger."""
        manifest, ends = self._opening(), self.recorder.recorded("settled")
        if manifest is None or not ends:
            raise SettlementError("the run has not been settled", code="unfinished")
        self._read(manifest)
        return manifest, ends[-1]

    def _read(self, manifest: Manifest) -> None:
        """Read what was agreed and stated before, from the ledger."""
        for name, body, signature in self.recorder.signed("agreed"):
            if not body["wrong"]:
                self.agreed[name] = Accord((), tuple(body["released"]), body["draw"], signature)
        for name, body, signature in self.recorder.signed("statement"):
            self.statements[name] = Statement.from_body(name, body, manifest), signature

    def settled(self, manifest: Manifest) -> Settled:
        """Return what statements and verdicts come to so far; a window that was opened stays as it is."""
        statements = {name: statement for name, (statement, _) in self.statements.items()}
        ends = self.recorder.recorded("settled")
        settled = Settled(manifest, statements, closes=ends[-1]["closes"] if ends else None)
        for body in self.recorder.recorded("verdict"):
            settled = settled.judged(body)
        return self._dated(settled)

    def _counted(self, settled: Settled) -> Settled:
        """Return a settlement with how many pairs of members are witnessed."""
        tables = ((name, body) for name, body, _ in self.recorder.signed("table"))
        pairs = self.book(settled.manifest).pairs(tables_by_round(tables), settled.verdicts)
        return replace(settled, pairs=pairs)

    def _dated(self, settled: Settled) -> Settled:
        """Return a settlement that is final if nothing is open, else with the day on which it closes.

        Open is who is awaited, and an equation that fails and of which masks have not said why.
        """
        unsolved = any(settled.unsolved(equation) for equation in settled.equations)
        settled = self._counted(settled)
        if not settled.awaited and not (self._proves and unsolved):
            return replace(settled, closes=None, final=True)
        closes = self._until(time.time()) if settled.closes is None else settled.closes
        return replace(settled, closes=closes, final=False)

    def _named(self, settled: Settled) -> Settled:
        """Let pairs be witnessed, and find out what masks prove of every round."""
        if not self._proves:
            return settled
        Drawing(self, settled.manifest, self.agreed).advance()
        return self._dated(named(self, settled))

    def _closed(self, settled: Settled, members: Sequence[str]) -> Settled:
        """Record what the settlement came to, and collect countersignatures."""
        recorder = self.recorder
        if not settled.final and self._told_of(settled.closes) < self._needed:
            least = self._until(time.time())  # who is told only now signs no shorter window
            settled = replace(settled, closes=max(least - CLOCKS // 2, settled.closes or least))
        body = settled.body()
        if [canonical(body)] != [canonical(end) for end in recorder.recorded("settled")[-1:]]:
            recorder.state("settled", body)  # else nobody came back since it was recorded
        signed, asks = countersignature(recorder.run, body), dict(self._end_asks(settled, members))
        for name, signature in self.coordinator.transport.exchange("settle", asks) if asks else ():
            if not recorder.said(name, "countersigned", signed, signature):
                self.coordinator.note(f"{name} did not countersign the settlement")
        self._keep_ends(settled, settled.manifest.members)
        return settled

    def _end_asks(self, settled: Settled, members: Iterable[str]) -> Iterator[tuple[str, Parcel]]:
        """Yield the requests to countersign what the settlement came to."""
        shown, everybody = self.shown_statements(), self.config.scoring.visibility == "all"
        number, text = len(self.recorder.rounds), canonical(settled.body())
        whole = self.coordinator.ask("settle", number, SettleAsk(text, shown))
        for name in members:
            own = SettleAsk(text, {key: signed for key, signed in shown.items() if key == name})
            yield name, whole if everybody else self.coordinator.ask("settle", number, own)

    # ------------------------------------------------------------------------------------- who is missing

    def _keep_messages(self, manifest: Manifest, last: Mapping[str, bytes]) -> None:
        """Keep the messages that a member needs to state when the server is gone; the pool is open anyway."""
        ask, number = self.coordinator.ask, len(self.recorder.rounds)
        self.keep("open", number, self._opening_ask(manifest, last))
        for summed, entry in zip(self.rounds(), manifest.rounds, strict=True):
            self.keep("agree", summed.round, self._direction_ask(summed, entry, whole=True))
        self.keep("agreed", number, ask("agreed", number, AskBody()))
        self.keep("state", number, ask("state", number, StateAsk(self.agreed)))

    def _keep_ends(self, settled: Settled, members: Iterable[str]) -> None:
        """Keep the requests for countersignatures while anybody is awaited: t of them end the window."""
        for name, ask in self._end_asks(settled, members) if settled.awaited else ():
            self.keep(f"settle-{name_hash(name)}", len(self.recorder.rounds), ask)
