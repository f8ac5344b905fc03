"""The server's part in the draw of witnesses: it asks, step by step, for whatever is not in the ledger yet.

Who does not answer is asked again whenever this is called again, by whichever server, or answers by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedmerit.errors import BindingError, FedmeritError, MessageError
from fedmerit.identity import canonical, commitment
from fedmerit.protocol.direction import Entry, Manifest
from fedmerit.protocol.messages import (
    Accord,
    AskBody,
    DrawAsk,
    DrawnAsk,
    Exchange,
    NonceAnswer,
    Parcel,
    SealAsk,
    Signature,
    Signed,
    Texts,
    WitnessAsk,
    answer_of,
    parsed,
)
from fedmerit.protocol.naming import Desk, evidence_in
from fedmerit.protocol.settlement import name_hash
from fedmerit.protocol.witness import (
    drawn_body,
    drawn_for,
    handed_body,
    handed_in,
    is_witnessed,
    list_hash,
    nonce_hash,
    opening,
    sealed_limit,
    seed_of,
    sighting_body,
    sighting_in,
)

Take = Callable[[str, bytes], None]


class Drawing:
    """The witnesses of one settlement, as the server asks for them."""

    def __init__(self, desk: Desk, manifest: Manifest, agreed: Mapping[str, Accord]) -> None:
        self.desk, self.manifest, self.agreed = desk, manifest, agreed
        self.recorder, self.config = desk.recorder, desk.config
        self.settlement, self.run = manifest.digest, desk.recorder.run
        self.entries = [entry for entry in manifest.rounds if is_witnessed(entry, desk.config)]
        self.members = dict.fromkeys(name for entry in self.entries for name in entry.participants)
        self.book = desk.book(manifest)  # as it was before the step that is under way

    def advance(self) -> None:
        """Go as far as answers allow: draw, seal, witness."""
        t = self.config.threshold
        made = {name: one for name, (one, _) in self.desk.statements.items() if name in self.agreed}
        if not self.entries or len(made) < t:
            return  # too few could sign a draw
        if not self.book.statements:
            hashes = {name: commitment(one.body(self.run)).hex() for name, one in made.items()}
            self._state_draw(hashes, {name: self.agreed[name].draw for name in made}, {})
        book = self.book
        late = [name for name in book.unopened if name in self.members]
        self._ask("draw", late, DrawAsk(dict(book.statements), dict(book.listed)), self._open)
        if not self.book.seed and len(self.book.nonces) >= t:
            self._state_draw(book.statements, book.listed, self.book.nonces)
        if not (book := self.book).seed:
            return
        late = [name for name in self.members if name not in book.drawn]
        shown = DrawnAsk(dict(book.statements), dict(book.listed), self._opened())
        self._ask("drawn", late, shown, self._sign)
        if not self.book.is_drawn:
            return
        self._ask("seal", self._unsealed(), SealAsk(self.book.seed, dict(self._drawn())), self._seal)
        for entry in self.entries:
            self._ask_witnesses(entry)

    def _state_draw(
        self, statements: Mapping[str, str], listed: Mapping[str, str], nonces: Mapping[str, str]
    ) -> None:
        """Record the statements for which members open their numbers; then whose numbers make the seed."""
        seed = seed_of(self.settlement, statements, nonces) if nonces else ""
        what = {"statements": dict(statements), "committed": dict(listed), "nonces": dict(nonces)}
        self.recorder.state("draw", {"settlement": self.settlement, **what, "seed": seed})
        self.book = self.desk.book(self.manifest)

    def _ask(
        self, kind: Exchange, names: Sequence[str], body: AskBody, take: Take, number: int = 0, **arrays: Any
    ) -> None:
        """Ask members who have stated; keep the message for those who have not answered."""
        number = number or len(self.recorder.rounds)
        if not names:
            return
        asks: dict[str, Parcel] = dict.fromkeys(names, self.desk.coordinator.ask(kind, number, body, arrays))
        stated = {name: ask for name, ask in asks.items() if name in self.desk.statements}
        waiting = {*names}
        for name, answer in self.desk.collected(kind, number, stated):
            try:
                take(name, answer)
                waiting.discard(name)
            except (FedmeritError, ValueError) as error:
                self.desk.coordinator.note(f"refused: {name}: {error!s:.200}")
        for name in waiting:
            self.desk.keep(f"{kind}-{name_hash(name)}", number, asks[name])
        self.book = self.desk.book(self.manifest)

    # --------------------------------------------------------------------------------------------- the draw

    def _open(self, name: str, answer: bytes) -> None:
        opened = answer_of(name, answer, NonceAnswer, "draw")
        if nonce_hash(opened.nonce) != self.book.listed.get(name):
            raise BindingError("opened another number than it committed to", stage="draw", member=name)
        listed = list_hash(self.book.statements, self.book.listed)
        body = opening(self.run, self.settlement, listed, opened.nonce)
        self._said(name, "nonce", body, opened.signature)

    def _sign(self, name: str, answer: bytes) -> None:
        signature = answer_of(name, answer, Signature, "drawn")
        self._said(name, "drawn", drawn_body(self.run, self.settlement, self.book.seed), signature)

    def _opened(self) -> dict[str, NonceAnswer]:
        """Return the numbers that the seed was made from."""
        nonces = self.recorder.recorded("draw")[-1]["nonces"]
        signed = self._signed("nonce")
        return {name: NonceAnswer(bytes.fromhex(nonce), signed[name]) for name, nonce in nonces.items()}

    def _drawn(self) -> dict[str, bytes]:
        return self._signed("drawn")

    def _signed(self, kind: str) -> dict[str, bytes]:
        """Return the signatures under what members said in this settlement."""
        rows = self.recorder.signed(kind)
        return {name: own for name, body, own in rows if body["settlement"] == self.settlement}

    def _said(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> None:
        if not self.recorder.said(name, kind, body, signature):
            raise MessageError(f"did not sign its answer ({kind})", member=name)

    # ------------------------------------------------------------------------------------- seal and witness

    def _unsealed(self) -> list[str]:
        """Return who has not handed over the keys of its pairs."""
        handed = self.book.handed
        due = ((entry.round, name) for entry in self.entries for name in entry.participants)
        return list(dict.fromkeys(name for round, name in due if (round, name) not in handed))

    def _seal(self, name: str, answer: bytes) -> None:
        limit = sealed_limit(self.config.clients)
        due = {entry.round: entry for entry in self.entries if name in entry.participants}
        for signed in answer_of(name, answer, Texts, "seal", limit * (1 + len(due))):
            body = parsed(signed.text, "seal", limit)
            where = drawn_body(self.run, self.settlement, self.book.seed)
            if {**body, **where} != body or body.get("round") not in due:
                raise BindingError("handed over keys of another round or draw", stage="seal", member=name)
            handed = handed_in(body)
            peers = {*due[body["round"]].participants} - {name}
            same = body == handed_body(self.run, self.settlement, self.book.seed, body["round"], handed)
            if not same or not {*handed.sealed, *handed.open} <= peers:
                raise BindingError("handed over keys of a pair outside the sum", stage="seal", member=name)
            if (body["round"], name) in self.book.handed:
                continue  # the first one counts
            self._said(name, "sealed", body, signed.signature)

    def _ask_witnesses(self, entry: Entry) -> None:
        """Ask those witnesses of a round who owe something for which there is a key."""
        desk, book = self.desk, self.book
        evidence = evidence_in(desk.archive, entry.round)
        setting, task = desk.attempt(self.manifest, entry, evidence)
        attempt = evidence.check(setting, task)
        signed = desk.tables(self.manifest, self.manifest.along(entry.round))
        tables = {name: table for name, (table, _) in signed.items()}
        here = [name for name in entry.participants if name in desk.statements]
        owing = book.weigh(entry, setting, attempt, tables, here).owing
        if not owing:
            return
        sealed = {
            name: Signed(canonical(body), signature)
            for name, body, signature in self.recorder.signed("sealed")
            if body["round"] == entry.round
        }
        lists = (evidence.advertised, evidence.shared, evidence.masked)
        shown = WitnessAsk(lists, {name: text for name, (_, text) in signed.items()}, sealed)
        arrays = {} if self.config.judged else {"g": desk.direction(entry)}
        self._ask("witness", owing, shown, self._see, entry.round, **arrays)

    def _see(self, name: str, answer: bytes) -> None:
        limit = sealed_limit(self.config.clients, self.manifest.lanes) * len(self.config.clients)
        signed = answer_of(name, answer, Signed, "witness", limit)
        body = parsed(signed.text, "witness", limit)
        where = drawn_body(self.run, self.settlement, self.book.seed)
        if {**body, **where} != body or body.get("round") not in [entry.round for entry in self.entries]:
            raise BindingError("witnessed another round or draw", stage="witness", member=name)
        seen, entry = sighting_in(body), self.manifest.entry(body["round"])
        drawn = drawn_for(entry, self.book.seed, self.config)
        own = all(drawn.get(frozenset(pair)) == name for pair in (*seen.values, *seen.keys))
        same = body == sighting_body(self.run, self.settlement, self.book.seed, entry.round, seen)
        if not (own and same and {*seen.channels, name} <= {*entry.participants}):
            raise BindingError("signed something else than its pairs", stage="witness", member=name)
        self._said(name, "witness", body, signed.signature)
