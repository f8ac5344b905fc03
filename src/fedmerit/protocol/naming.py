"""Who lied in a settlement: the server asks for tables of masks, around `fedmerit.secagg.naming`.

Only where everybody in a round's sum has stated and the equation fails, or the parts of a block do not add
up. Each member signs the products of its masks with the direction of the round, or of that block, and sends
its masked words again; where the two ends of a pair differ, both are asked to open its key. A member takes
part only if it is shown signed statements that do not add up. The manifest fixes no direction of a block, so
a member recomputes that one first, and compares its own product with the part that it stated: whoever
answers cannot be named for it (`fedmerit.protocol.settler`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerit.config import Config
from fedmerit.errors import FedmeritError, MessageError, SettlementError
from fedmerit.identity import canonical, exact
from fedmerit.protocol.coordinator import Archive, Arrays, Coordinator, Recorder, Summed, summed_rounds
from fedmerit.protocol.direction import (
    Along,
    Entry,
    Gradient,
    Manifest,
    block_scale,
    block_units,
    blocks_of,
    integers,
    product,
    slopes_of,
)
from fedmerit.protocol.messages import (
    Exchange,
    Opened,
    PairsAsk,
    Parcel,
    Signed,
    TableAsk,
    Tabled,
    answer_of,
    parsed,
)
from fedmerit.protocol.settlement import (
    Equation,
    Proof,
    Settled,
    Statement,
    fitting,
    name_hash,
    table_limit,
    table_of,
)
from fedmerit.protocol.terms import archived_task
from fedmerit.secagg.messages import decoded
from fedmerit.secagg.quantise import Direction, direction_hash
from fedmerit.secagg.setting import Setting, Task

if TYPE_CHECKING:
    from fedmerit.secagg.naming import Evidence, MaskTable, Verdict

MESSAGES, HEAD = "messages", "head"
"""Where the archive has messages for members who were away, and the array with their signed bytes."""


@dataclass(eq=False)
class Desk:
    """What a server settles with: directions, statements on them, and messages to members who were away."""

    coordinator: Coordinator
    gradient: Gradient
    archive: Archive
    statements: dict[str, tuple[Statement, bytes]] = field(default_factory=dict)
    handed: dict[tuple[str, int], dict[str, bytes]] = field(default_factory=dict)  # answers given by hand

    @property
    def recorder(self) -> Recorder:
        return self.coordinator.recorder

    @property
    def config(self) -> Config:
        return self.coordinator.config

    def rounds(self) -> Iterator[Summed]:
        """Yield every round with a sum, in order, from the archive."""
        return summed_rounds(self.archive, self.recorder.rounds, self.config)

    def direction(self, entry: Entry) -> Direction:
        """Return the direction of a round, from the archive."""
        g: Direction = self.archive.load("direction", entry.round)["g"]
        if direction_hash(g) != entry.g:
            raise SettlementError(
                f"the archived direction of round {entry.round} is not the one in the manifest",
                code="damaged",
            )
        return g

    def along(self, manifest: Manifest, equation: Equation, block: int | None) -> tuple[Along, Arrays]:
        """Return a direction of a round, and the arrays that members need to answer along it.

        That of a block is kept before it is shown to anybody, so that there is never a second one.
        """
        entry = equation.entry
        if block is None:
            return manifest.along(entry.round), {"g": self.direction(entry)}
        summed = next(summed for summed in self.rounds() if summed.round == entry.round)
        if not self.archive.has(kind := f"direction-{block}", entry.round):
            self._keep_blocks(summed, equation)
        archived = self.archive.load(kind, entry.round)
        g, scale = archived["g"], float(archived["scale"][0])
        along = Along(entry.round, block, direction_hash(g), scale, product(summed.words, g))
        return along, {"g": g, "m0": summed.m0, "sum": summed.words}

    def _keep_blocks(self, summed: Summed, equation: Equation) -> None:
        """Archive the directions of the blocks of a round in which parts do not add up."""
        entry, pool = equation.entry, self.coordinator.pool
        shown = pool.settlement()
        blocks, _ = blocks_of(shown, balanced=pool.balanced)
        slopes, _, _ = slopes_of(self.gradient, summed.m0, summed.m, shown, blocks, entry.points)
        for block in equation.odd:
            if not self.archive.has(kind := f"direction-{block}", entry.round):
                values = block_units(slopes, block, entry.step, entry.weight)
                g = integers(values, scale := block_scale(values), summed.task.encoding)
                self.archive.save(kind, entry.round, {"g": g, "scale": np.array([scale])})

    def shown_statements(self) -> dict[str, Signed]:
        """Return all statements as members signed them."""
        run, stated = self.recorder.run, self.statements.items()
        return {
            name: Signed(canonical(statement.body(run)), signature) for name, (statement, signature) in stated
        }

    def keep(self, kind: str, round: int, parcel: Parcel) -> None:
        """Keep a message for members who were away, to be answered by hand."""
        head = np.frombuffer(parcel.head, np.uint8)
        self.archive.save(f"{MESSAGES}/{kind}", round, {**parcel.arrays, HEAD: head})

    def keep_for(self, name: str, kind: Exchange, along: Along, parcel: Parcel) -> None:
        """Keep a message on masks for one member."""
        self.keep(f"{_label(kind, along)}-{name_hash(name)}", along.round, parcel)

    def answers(
        self, kind: Exchange, along: Along, asks: Mapping[str, Parcel]
    ) -> Iterator[tuple[str, bytes]]:
        """Yield members' answers: those that were handed in, then those of members who can be asked."""
        handed = self.handed.get((_label(kind, along), along.round), {})
        yield from ((name, handed[name]) for name in asks if name in handed)
        if rest := {name: ask for name, ask in asks.items() if name not in handed}:
            yield from self.coordinator.transport.exchange(kind, rest)


def _label(kind: Exchange, along: Along) -> str:
    """Return under what messages on masks are kept: the exchange, and the block if there is one."""
    return kind if along.block is None else f"{kind}.{along.block}"


def named(desk: Desk, settled: Settled) -> Settled:
    """Return the settlement with what masks prove wherever everybody stated and it does not add up.

    Who does not show its masks is silent there, and is asked again whenever this is called again. The
    settlement is not final until it answers, or t members close it without.
    """
    for equation in settled.equations:
        failing = () if equation.holds or equation.missing else (None,)
        for block in (*failing, *equation.odd):
            before = settled.verdicts.get((equation.round, block))
            # the direction of a block needs the gradient once
            known = block is None or desk.archive.has(f"direction-{block}", equation.round)
            if (before is None or before.silent) and (known or desk.gradient is not None):
                settled = settled.judged(_Naming(desk, settled, equation, block).recorded())
    for round, liars in settled.named.items():
        for name, why in liars.items():
            desk.coordinator.note(f"{name} lied in round {round} ({why}), as its masks prove")
    return settled


def proof_of(along: Along, verdict: Verdict) -> Proof:
    """Return what a verdict says of a direction; along a block, a false number is a false part."""
    values = {name: value for name, value in verdict.values.items() if value is not None}
    liars: dict[str, str] = dict(verdict.named)
    if along.block is not None:
        liars = {name: "part" if why in ("stated", "range") else why for name, why in liars.items()}
    return Proof(along, values, liars, silent_in(verdict))


def silent_in(verdict: Verdict) -> tuple[str, ...]:
    """Return who has not shown what would prove its product: its table, its words, the key of a dispute.

    In a small sum nobody may open a key. Who disputes with one member only, who disputes with several, is
    not to suffer from that.
    """
    disputes = Counter(name for pair in verdict.disputed for name in pair)
    shut = {
        name
        for pair in verdict.disputed
        for name, peer in (pair, pair[::-1])
        if disputes[name] > 1 or disputes[peer] == 1
    }
    return tuple(name for name in verdict.values if name in verdict.unproved or name in shut)


class _Naming:
    """One direction in which statements do not add up: the server collects tables, words and opened keys."""

    def __init__(self, desk: Desk, settled: Settled, equation: Equation, block: int | None) -> None:
        self.desk, self.manifest, self.entry = desk, settled.manifest, equation.entry
        self.coordinator, self.recorder = desk.coordinator, desk.recorder
        self.along, self.arrays = desk.along(settled.manifest, equation, block)
        self.g: Direction = self.arrays["g"]
        self.stated = {name: settled.statements[name] for name in equation.participants}
        self.evidence = evidence_in(desk.archive, equation.round)
        self.setting, self.task = self._attempt()
        self.sent = self.evidence.check(self.setting, self.task).digests  # of the words in the round
        self.tables: dict[str, tuple[MaskTable, Signed]] = {}
        self.products: dict[str, int] = {}
        self.where = (self.recorder.run, settled.manifest.digest, self.along)

    def _attempt(self) -> tuple[Setting, Task]:
        recorder, number = self.recorder, self.entry.round
        (scheduled,) = (round.scheduled for round in recorder.rounds if round.number == number)
        setting = recorder.agreed.setting(recorder.run, number, scheduled, recorder.roster)
        archived, size = self.desk.archive.load("round", number), self.manifest.coordinates
        extra = self.evidence.extra
        return setting, archived_task(archived, recorder.config, self.entry.m0, size, scheduled, extra)

    def recorded(self) -> dict[str, Any]:
        """Find out who lied; return the verdict as it is recorded, with its evidence."""
        self._recall()
        self._ask_tables()
        verdict = self._judge()
        if verdict.disputed:
            self._ask_keys(verdict.disputed)
            verdict = self._judge()
        self._keep_asks(verdict)
        products = {name: str(value) for name, value in sorted(self.products.items())}
        evidence = {**self.evidence.to_dict(), "products": products}
        proof = proof_of(self.along, verdict).body()
        body = {**proof, "settlement": self.manifest.digest, "evidence": evidence}
        self.recorder.state("verdict", body)
        return body

    def _recall(self) -> None:
        """Take what members showed when they were asked before."""
        from fedmerit.secagg.naming import product

        archive, round = self.desk.archive, self.entry.round
        for name, body, signature in self.recorder.signed("table"):
            if (body["round"], body["block"]) == (round, self.along.block):
                self.tables[name] = table_of(name, body, *self.where), Signed(canonical(body), signature)
                if archive.has(kind := f"words-{name_hash(name)}", round):
                    self.products[name] = product(archive.load(kind, round)[name].tobytes(), self.g)
        for body in self.recorder.recorded("verdict"):
            if body["round"] == round:
                evidence, _ = recorded_evidence(body)
                self.evidence = replace(self.evidence, opened=evidence.opened)

    def _judge(self) -> Verdict:
        from fedmerit.secagg.naming import judge

        tables = {name: table for name, (table, _) in self.tables.items()}
        fits = {name: fitting(stated, self.entry, self.along) for name, stated in self.stated.items()}
        about = (self.setting, self.task, self.g, self.evidence)
        return judge(*about, tables, self.products, fits, self.along.product)

    def _ask_tables(self) -> None:
        """Ask everybody in the sum for its table and its masked words; record what they sign."""
        from fedmerit.secagg.naming import product

        number, asks = self.entry.round, self._table_asks(self.entry.participants)
        for name, answer in self.desk.answers("table", self.along, asks):
            try:
                shown = answer_of(name, answer, Tabled, "table", self._most())
                table = self._take(name, parsed(shown.text, "table"), shown.signature)
                self.tables[name] = table, Signed(shown.text, shown.signature)
                if hashlib.sha256(shown.words).hexdigest() == self.sent[name]:
                    self.products[name] = product(shown.words, self.g)
                    words = {name: np.frombuffer(shown.words, np.uint8)}
                    self.desk.archive.save(f"words-{name_hash(name)}", number, words)
                else:
                    self.coordinator.note(f"{name} sent other words than in round {number}")
            except (FedmeritError, ValueError) as error:
                self.coordinator.note(f"round {number}: refused: {error!s:.200}")

    def _table_asks(self, names: Sequence[str]) -> dict[str, Parcel]:
        """Return the requests for these members' tables.

        Where statements are withheld, each is shown its own, and what all of them add up to.
        """
        shown, number, block = self.desk.shown_statements(), self.entry.round, self.along.block
        along = None if block is None else self.along.body()  # that of the round is in the manifest
        if self.desk.config.scoring.visibility == "all":
            ask = self.coordinator.ask("table", number, TableAsk(shown, along=along), self.arrays)
            return dict.fromkeys(names, ask)
        key, stated = str(number), self.stated.values()
        if block is None:
            total = str(sum(statement.rounds[key] for statement in stated))
        else:
            total = exact(sum(statement.blocks[key][block] for statement in stated))
        bodies = {name: TableAsk({name: shown[name]}, total, along) for name in names}
        return {
            name: self.coordinator.ask("table", number, body, self.arrays) for name, body in bodies.items()
        }

    def _keep_asks(self, verdict: Verdict) -> None:
        """Keep what members who are silent can still answer by hand: for their tables, else for keys."""
        unshown = [name for name in silent_in(verdict) if name in verdict.unproved]
        for name, ask in self._table_asks(unshown).items():
            self.desk.keep_for(name, "table", self.along, ask)
        for name, ask in self._key_asks(verdict.disputed).items():
            self.desk.keep_for(name, "pairs", self.along, ask)

    def _key_asks(self, disputed: Sequence[tuple[str, str]]) -> dict[str, Parcel]:
        """Return the requests for the keys of disputed pairs, to both ends of each."""
        peers: dict[str, dict[str, Signed]] = {}
        for name, peer in (ends for pair in disputed for ends in (pair, pair[::-1])):
            peers.setdefault(name, {})[peer] = self.tables[peer][1]
        number, purpose = self.entry.round, self.along.purpose
        return {
            name: self.coordinator.ask("pairs", number, PairsAsk(tables, purpose))
            for name, tables in peers.items()
        }

    def _take(self, name: str, body: Mapping[str, Any], signature: bytes) -> MaskTable:
        table = table_of(name, body, *self.where)
        if name in self.tables and self.tables[name][0] != table:
            raise MessageError("has signed another table before", stage="table", member=name)
        if not self.recorder.said(name, "table", body, signature):
            raise MessageError("did not sign its table", stage="table", member=name)
        return table

    def _most(self) -> int:
        """Return the most bytes of a table, with the words beside it."""
        return table_limit(self.setting.members) + self.task.encoding.word_bytes * self.task.encoding.words

    def _ask_keys(self, disputed: Sequence[tuple[str, str]]) -> None:
        """Ask both ends of every disputed pair for its key."""
        number = self.entry.round
        for name, answer in self.desk.answers("pairs", self.along, self._key_asks(disputed)):
            try:
                for peer, key in answer_of(name, answer, Opened, "pairs", self._most()):
                    trial = self.evidence.with_opened(self.setting, name, peer, key)
                    trial.check(self.setting, self.task)
                    self.evidence = trial
            except (FedmeritError, ValueError) as error:
                self.coordinator.note(f"round {number}: {name} opened no key: {error!s:.200}")


def evidence_in(archive: Archive, round: int) -> Evidence:
    """Return the evidence that was archived with a round."""
    from fedmerit.secagg.naming import Evidence

    return decoded(archive.load("masks", round)["proof"].tobytes(), Evidence, "evidence")


def recorded_evidence(body: Mapping[str, Any]) -> tuple[Evidence, Mapping[str, str]]:
    """Return the evidence in a record ``verdict``, and the products of masked words in it."""
    from fedmerit.secagg.naming import Evidence

    parts = dict(body["evidence"])
    products = parts.pop("products")
    return Evidence.from_dict(parts), products
