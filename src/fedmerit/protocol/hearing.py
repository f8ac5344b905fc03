"""The server's side of a panel: it lets members draw coordinates and judge, and settles what they show.

All of it happens before there is a manifest, step by step, and whatever is in the ledger or the archive is
not asked for again: who drew the coordinates, which judge signed which column, the columns themselves. From
the manifest on it is a settlement (`Clearing`) with the directions of all judges. A member that does not
judge in time is no judge: what it would hand out is divided equally.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, FedmeritError, MessageError, SettlementError
from fedmerit.identity import canonical
from fedmerit.protocol.bench import (
    COORDINATES,
    Bench,
    Showing,
    showing_body,
)
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.column import INNOVATION, column_hash, malformed
from fedmerit.protocol.coordinator import Archive, Coordinator, Summed
from fedmerit.protocol.direction import Entry, Gradient, Manifest
from fedmerit.protocol.judge import SHOWING, rounds_of
from fedmerit.protocol.messages import (
    AskBody,
    ColumnAsk,
    DrawAsk,
    DrawnAsk,
    JudgeAsk,
    NonceAnswer,
    OpenAsk,
    Parcel,
    Signature,
    Signed,
    answer_of,
    parsed,
)
from fedmerit.protocol.outcome import Model, model_hash, sum_hash
from fedmerit.protocol.settlement import name_hash
from fedmerit.protocol.terms import EMBEDDED
from fedmerit.protocol.witness import drawn_body, list_hash, nonce_hash, opening, seed_of
from fedmerit.secagg.board import Board


class Hearing(Clearing):
    """The panel of one run, whose rounds are over, as its server conducts it."""

    def _made(self, present: Sequence[str] = (), last: Mapping[str, bytes] | None = None) -> Manifest:
        """Let members draw and judge; return the manifest, which is recorded."""
        facts = self._facts(self._seed(present, last or {}))
        fixed = self.archive.has("judges", 0)  # before anybody shows a column, the list is fixed
        if not fixed or self.coordinator.rehearsal:  # whose members forget what they judged when it is killed
            self._judged(facts, present)
        if not fixed:
            self._refuse_few(len(self._showings(facts)))
            names = canonical([*self._showings(facts)])
            self.archive.save("judges", 0, {"names": np.frombuffer(names, np.uint8)})
        listed = json.loads(self.archive.load("judges", 0)["names"].tobytes())
        showings = {name: one for name, one in self._showings(facts).items() if name in listed}
        columns = self._columns(facts, showings)
        judges = tuple(showing for name, showing in showings.items() if name in columns)
        self._refuse_few(len(judges))
        assert facts.bench is not None
        bench = replace(facts.bench, judges=judges)
        stacked = np.stack([columns[judge.judge] for judge in judges])
        self.archive.save("columns", 0, {"columns": stacked})
        entries = tuple(replace(entry, g=bench.lines_hash(entry.round)) for entry in facts.rounds)
        named = replace(facts, bench=bench, rounds=entries)
        products = [
            named.board(entry, stacked, summed.words).of_words(summed.words)
            for entry, summed in zip(entries, self.rounds(), strict=True)
        ]
        manifest = replace(
            named,
            rounds=tuple(replace(entry, product=own) for entry, own in zip(entries, products, strict=True)),
        )
        self.recorder.state("opening", {"settlement": manifest.digest, "manifest": manifest.body()})
        return manifest

    def _refuse_few(self, judges: int) -> None:
        """Raise unless t members judge: the slices of all others are divided equally, whoever did nothing."""
        if judges < (t := self.config.threshold):
            raise SettlementError(f"{judges} members judged, {t} are needed", code="no-judges")

    # -------------------------------------------------------------------------------- the draw of coordinates

    def _seed(self, present: Sequence[str], last: Mapping[str, bytes]) -> str:
        """Return the seed of the coordinates, from numbers to which members committed when they joined."""
        recorder, t, run = self.recorder, self.config.threshold, self.recorder.run
        committed = {name: body["held_out"]["nonce"] for name, body, _ in recorder.signed("join")}
        committed = {name: committed[name] for name in self.config.clients if name in committed}
        listed, number = list_hash({}, committed), len(recorder.rounds)
        if not self._draws():
            self._state_draw(committed, {}, "")

        def opened(name: str, answer: bytes) -> None:
            own = answer_of(name, answer, NonceAnswer, "draw")
            if nonce_hash(own.nonce) != committed.get(name):
                raise BindingError("opened another number than it committed to", stage="draw", member=name)
            self._said(name, "nonce", opening(run, COORDINATES, listed, own.nonce), own.signature)

        if not self._draws()[-1]["seed"]:
            ask = self.coordinator.ask("draw", number, DrawAsk({}, committed, dict(last)))
            self._collect("draw", ask, present, committed, "nonce", opened, t)
            nonces = {name: body["nonce"] for name, body, _ in self._signed("nonce")}
            if len(nonces) < t:
                self.waits = True
                raise SettlementError(
                    f"{len(nonces)} members opened their numbers for the coordinates, {t} are needed",
                    code="not-drawn",
                )
            self._state_draw(committed, nonces, seed_of(COORDINATES, {}, nonces))
        draw = self._draws()[-1]
        seed = str(draw["seed"])
        signed = {name: proof for name, _, proof in self._signed("nonce")}
        openings = {
            name: NonceAnswer(bytes.fromhex(nonce), signed[name]) for name, nonce in draw["nonces"].items()
        }

        def drawn(name: str, answer: bytes) -> None:
            signature = answer_of(name, answer, Signature, "drawn")
            self._said(name, "drawn", drawn_body(run, COORDINATES, seed), signature)

        ask = self.coordinator.ask("drawn", number, DrawnAsk({}, committed, openings, dict(last)))
        self._collect("drawn", ask, present, committed, "drawn", drawn, t)
        if len(self._signed("drawn")) < t:
            self.waits = True
            raise SettlementError("too few members signed the draw of coordinates", code="not-drawn")
        return seed

    def _draws(self) -> list[Mapping[str, Any]]:
        return [body for body in self.recorder.recorded("draw") if body["settlement"] == COORDINATES]

    def _signed(self, kind: str) -> list[tuple[str, Mapping[str, Any], bytes]]:
        """Return what members signed for the draw of coordinates."""
        return [row for row in self.recorder.signed(kind) if row[1]["settlement"] == COORDINATES]

    def _state_draw(self, committed: Mapping[str, str], nonces: Mapping[str, str], seed: str) -> None:
        what = {"statements": {}, "committed": dict(committed), "nonces": dict(nonces)}
        self.recorder.state("draw", {"settlement": COORDINATES, **what, "seed": seed})

    def _collect(
        self,
        kind: Any,
        ask: Parcel,
        present: Sequence[str],
        of: Iterable[str],
        record: str,
        take: Any,
        needed: int,
    ) -> None:
        """Ask members until enough have answered, or nobody is waited for any more."""
        members = list(of)
        asked = [name for name in members if name in present]
        while asked:
            before = {name for name, _, _ in self._signed(record)}
            asks = {name: ask for name in asked if name not in before}
            for name, answer in self.coordinator.transport.exchange(kind, asks) if asks else ():
                try:
                    take(name, answer)
                except (FedmeritError, ValueError) as error:
                    self.coordinator.note(f"refused: {name}: {error!s:.200}")
            have = {name for name, _, _ in self._signed(record)}
            few = len(have) < needed
            asked = [*self._back(name for name in members if name not in have)] if few else []

    def _said(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> None:
        if not self.recorder.said(name, kind, body, signature):
            raise MessageError(f"did not sign its answer ({kind})", member=name)

    # -------------------------------------------------------------------------------------------- the judging

    def _facts(self, seed: str) -> Manifest:
        """Return the rounds as judges are shown them, without directions."""
        entries, coordinates = [], 0
        for summed in self.rounds():
            coordinates = summed.m0.size
            entries.append(
                Entry(
                    round=summed.round,
                    m0=summed.task.m0_hash.hex(),
                    m=model_hash(summed.m),
                    x=sum_hash(summed.words),
                    weight=summed.weight,
                    step=summed.task.encoding.step,
                    participants=summed.participants,
                )
            )
        if not entries:
            raise SettlementError("no round has a sum, so there is nothing to settle", code="no-rounds")
        rehearsal = self.recorder.agreed.terms.get("engine") == EMBEDDED
        blur = 0.0 if rehearsal else self.config.panel.blur
        drawn = min(self.config.panel.coordinates, coordinates)
        return Manifest(
            self.recorder.run, self.config.scoring.utilities[0], "", (), False, 1.0, coordinates,
            tuple(entries), Bench(seed, drawn, blur),
        )  # fmt: skip

    def _judged(self, facts: Manifest, present: Sequence[str]) -> None:
        """Let judges compute their gradients, round by round, and record what they sign of their columns."""
        text = canonical(facts.body())
        drawn = {name: proof for name, _, proof in self._signed("drawn")}
        body, number = JudgeAsk(text, drawn), len(self.recorder.rounds)
        names, anew = list(present), self.coordinator.rehearsal
        while judges := [name for name in names if anew or name not in self._showings(facts)]:
            anew = False
            for place, (summed, entry) in enumerate(zip(self.rounds(), facts.rounds, strict=True)):
                judges = self._judge_round(body, facts, place, summed, entry, judges)
            ask = self.coordinator.ask("judged", number, AskBody())
            asks = dict.fromkeys(judges, ask)
            for name, answer in self._exchange(asks, Signed, "judged", SHOWING) if asks else ():
                try:
                    self._take_showing(facts, name, answer)
                except (FedmeritError, ValueError) as error:
                    self.coordinator.note(f"refused: {name}: {error!s:.200}")
            known = self._showings(facts)
            names = list(self._back(name for name in self.config.clients if name not in known))

    def _judge_round(
        self, body: JudgeAsk, facts: Manifest, place: int, summed: Summed, entry: Entry, judges: Sequence[str]
    ) -> list[str]:
        """Let judges compute their gradient of a round; return those that did."""
        done: list[str] = []
        rehearsal = self.coordinator.rehearsal
        lacking = list(judges)
        for arrays in ({}, self._shown(facts, place, summed, entry)):
            if not lacking or (rehearsal and not arrays):
                continue
            asks = dict.fromkeys(lacking, self.coordinator.ask("judge", entry.round, body, arrays))
            lacking = []
            for name, able in self._exchange(asks, bool, "judge"):
                (done if able else lacking).append(name)
        return done

    def _shown(self, facts: Manifest, place: int, summed: Summed, entry: Entry) -> dict[str, Any]:
        """Return models and sums of a round for who did not keep them."""
        at, earlier = facts.drawn(entry), facts.rounds[max(0, place - INNOVATION) : place]
        sums = [self.archive.load("round", one.round)["x"][at].view(np.int32) for one in earlier]
        before = np.concatenate(sums) if sums else np.zeros(0, np.int32)
        return {"m0": summed.m0, "sum": summed.words, "before": before}

    def _take_showing(self, facts: Manifest, name: str, answer: Signed) -> None:
        body = parsed(answer.text, "judged", SHOWING)
        showing = Showing.from_body({key: body.get(key) for key in Showing.__dataclass_fields__})
        joined = next(own for author, own, _ in self.recorder.signed("join") if author == name)
        if showing.judge != name or showing.samples != joined["held_out"]["samples"]:
            raise BindingError("judges by other samples than it committed to", stage="judged", member=name)
        if body != showing_body(self.recorder.run, facts.digest, showing):
            raise BindingError("judged other rounds", stage="judged", member=name)
        self._said(name, "judged", body, answer.signature)

    def _signed_showings(self, facts: Manifest) -> dict[str, tuple[Showing, Signed]]:
        found = {}
        for name, body, signature in self.recorder.signed("judged"):
            if body["facts"] == facts.digest:
                showing = Showing.from_body({key: body[key] for key in Showing.__dataclass_fields__})
                found[name] = showing, Signed(canonical(body), signature)
        return {name: found[name] for name in self.config.clients if name in found}

    def _showings(self, facts: Manifest) -> dict[str, Showing]:
        return {name: showing for name, (showing, _) in self._signed_showings(facts).items()}

    def _columns(self, facts: Manifest, showings: Mapping[str, Showing]) -> dict[str, npt.NDArray[np.int8]]:
        """Return the columns that judges show, once the hashes of all of them are on record.

        A judge who signed and shows nothing ends the panel's list: it is asked again until it is waited for
        no more, and the panel is settled without it.
        """
        assert facts.bench is not None
        shape = len(facts.rounds), facts.bench.drawn
        texts = {n: text for n, (_, text) in self._signed_showings(facts).items() if n in showings}
        found = {name: column for name in showings if (column := self._column(name)) is not None}
        names: Sequence[str] = list(showings)
        while names := [name for name in names if name not in found]:
            ask = self.coordinator.ask("column", len(self.recorder.rounds), ColumnAsk(texts))
            most = shape[0] * shape[1] + 1024
            for name, answer in self._exchange(dict.fromkeys(names, ask), bytes, "column", most):
                column = np.frombuffer(answer, np.int8)
                column = column.reshape(shape) if column.size == shape[0] * shape[1] else column
                wrong = malformed(column, shape)
                if wrong or column_hash(column) != showings[name].column:
                    self.coordinator.note(f"refused: {name}: its column: {wrong or 'not what it signed'}")
                    continue
                self.archive.save(f"column-{name_hash(name)}", 0, {"column": column})
                found[name] = column
            names = self._back(name for name in showings if name not in found)
        return {name: found[name] for name in showings if name in found}

    def _column(self, name: str) -> npt.NDArray[np.int8] | None:
        kind = f"column-{name_hash(name)}"
        return self.archive.load(kind, 0)["column"] if self.archive.has(kind, 0) else None

    # ------------------------------------------------------------------------------------------- from then on

    def _opening_ask(self, manifest: Manifest, last: Mapping[str, bytes]) -> Parcel:
        """Return the message that shows the manifest, and the columns of all judges."""
        agreed = self.agreed if len(self.agreed) >= self.config.threshold else {}
        assert manifest.bench is not None
        texts = {name: text for name, (_, text) in self._signed_showings(rounds_of(manifest)).items()}
        shown = {name: texts[name] for name in manifest.bench.names}
        body = OpenAsk(canonical(manifest.body()), None, dict(last), agreed, shown)
        columns = self.archive.load("columns", 0)["columns"].reshape(-1)
        return self.coordinator.ask("open", len(self.recorder.rounds), body, {"columns": columns})

    def _direction_ask(self, summed: Summed, entry: Entry, *, whole: bool = False) -> Parcel:
        """Return the message that asks about a round; who was away, or is in a rehearsal, kept no sum."""
        arrays = {"sum": summed.words} if whole or self.coordinator.rehearsal else {}
        return self.coordinator.ask("agree", entry.round, AskBody(), arrays)

    def lines(self, manifest: Manifest, entry: Entry) -> Board:
        """Return the directions of a round, from the archive."""
        columns = self.archive.load("columns", 0)["columns"]
        return manifest.board(entry, columns, self.archive.load("round", entry.round)["x"])


def clearing_of(coordinator: Coordinator, gradient: Gradient | None, archive: Archive) -> Clearing:
    """Return what settles a run: with a panel, members judge each other first."""
    return (Hearing if coordinator.config.judged else Clearing)(coordinator, gradient, archive)


def finish(coordinator: Coordinator, model: Model) -> None:
    """Settle a run, record its end, and ask all members who are present to sign the ledger's head.

    A run between machines has no end as long as it may still be settled with members who are away.
    """
    recorder, archive = coordinator.recorder, coordinator.archive
    present = coordinator.transport.expected(len(recorder.rounds) + 1)  # who comes back now joins in time
    if coordinator.config.settles:
        assert archive is not None
        summed = sum(not round.aborted for round in recorder.rounds)
        coordinator.tell(f"the rounds are over: members check the sums of {summed} of them, one by one")
        clearing = clearing_of(coordinator, coordinator.gradient, archive)
        coordinator.settled = settled = clearing.run(present)
        if clearing.waits and not coordinator.rehearsal:
            return
        if settled is not None:
            names = ", ".join(settled.awaited)
            away = f"; answers of {names} are still taken (fedmerit settle add)" if names else ""
            coordinator.tell(f"settled: {settled.holding} of {len(settled.equations)} equations hold{away}")
    recorder.end(model)
    coordinator.seal(present, recorder.head)
