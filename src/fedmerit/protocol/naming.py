"""What masks prove in a settlement, and who lied: the server's side, around `fedmerit.secagg.naming`.

Of each round, the server has everybody's masked words, the tables that came with the statements, and what
witnesses signed: so every stated number is proved, or somebody is named, or silent. Nothing more is recorded
of a round in which every number is proved as it was stated; of any other, a record ``verdict`` with its
evidence.

Where parts of a block do not add up, members are asked for tables along that block. The manifest fixes no
direction of a block, so a member recomputes that one first, and compares its own product with the part that
it stated: whoever answers cannot be named for it (`fedmerit.protocol.prover`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerit.config import Config
from fedmerit.errors import FedmeritError, MessageError, SettlementError
from fedmerit.identity import canonical, exact
from fedmerit.protocol.coordinator import Archive, Coordinator, Recorder, Summed, summed_rounds
from fedmerit.protocol.direction import (
    Along,
    Entry,
    Gradient,
    Manifest,
    block_scale,
    block_units,
    blocks_of,
    integers,
    numeral,
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
    words_kind,
)
from fedmerit.protocol.terms import archived_task
from fedmerit.protocol.witness import KINDS, Book
from fedmerit.secagg.messages import decoded
from fedmerit.secagg.quantise import Direction, direction_hash
from fedmerit.secagg.setting import Setting, Task

if TYPE_CHECKING:
    from fedmerit.secagg.naming import Evidence, Lines, MaskTable, Verdict

MESSAGES, HEAD = "messages", "head"
"""Where the archive has messages for members who were away, and the array with their signed bytes."""


@dataclass(eq=False)
class Desk:
    """What a server settles with: directions, statements on them, and messages to members who were away."""

    coordinator: Coordinator
    gradient: Gradient | None  # of the pool, which a panel does not have
    archive: Archive
    statements: dict[str, tuple[Statement, bytes]] = field(default_factory=dict)
    handed: dict[tuple[str, int], dict[str, bytes]] = field(default_factory=dict)  # answers given by hand
    products: dict[tuple[int, str], int] = field(default_factory=dict)  # <y_i, g> by round and member

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

    def lines(self, manifest: Manifest, entry: Entry) -> Lines:
        """Return the direction of a round, or all those of a panel."""
        return self.direction(entry)

    def along(
        self, manifest: Manifest, equation: Equation, block: int | None
    ) -> tuple[Along, dict[str, Any]]:
        """Return a direction of a round, and the arrays that members need to answer along it.

        That of a block is kept before it is shown to anybody, so that there is never a second one.
        """
        entry = equation.entry
        if block is None:
            return manifest.along(entry.round), {"g": self.lines(manifest, entry)}
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
        assert self.gradient is not None
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
        """Yield members' answers about a direction, as `collected` does."""
        return self.collected(kind, along.round, asks, _label(kind, along))

    def collected(
        self, kind: Exchange, number: int, asks: Mapping[str, Parcel], label: str = ""
    ) -> Iterator[tuple[str, bytes]]:
        """Yield members' answers: those that were handed in, then those of members who can be asked."""
        handed = self.handed.get((label or kind, number), {})
        yield from ((name, handed[name]) for name in asks if name in handed)
        if rest := {name: ask for name, ask in asks.items() if name not in handed}:
            yield from self.coordinator.transport.exchange(kind, rest)

    def book(self, manifest: Manifest) -> Book:
        """Return what the ledger has of witnesses."""
        signed = self.recorder.signed
        records = ((author, kind, body) for kind in KINDS for author, body, _ in signed(kind))
        return Book.read(manifest, self.config, records)

    def tables(self, manifest: Manifest, along: Along) -> dict[str, tuple[MaskTable, Signed]]:
        """Return what members signed of their masks in a direction, according to the ledger."""
        where, found = (self.recorder.run, manifest.digest, along), {}
        for name, body, signature in self.recorder.signed("table"):
            if (body["round"], body["block"]) == (along.round, along.block):
                found[name] = table_of(name, body, *where, manifest.lanes), Signed(canonical(body), signature)
        return found

    def attempt(self, manifest: Manifest, entry: Entry, evidence: Evidence) -> tuple[Setting, Task]:
        """Return setting and task of a round, as its members had them."""
        recorder, number = self.recorder, entry.round
        (scheduled,) = (round.scheduled for round in recorder.rounds if round.number == number)
        setting = recorder.agreed.setting(recorder.run, number, scheduled, recorder.roster)
        archived, size = self.archive.load("round", number), manifest.coordinates
        return setting, archived_task(archived, self.config, entry.m0, size, scheduled, evidence.extra)


def _label(kind: Exchange, along: Along) -> str:
    """Return under what messages on masks are kept: the exchange, and the block if there is one."""
    return kind if along.block is None else f"{kind}.{along.block}"


def named(desk: Desk, settled: Settled) -> Settled:
    """Return the settlement with what masks prove of every round, and where parts do not add up.

    Who has not shown what it takes is silent there, and is asked again whenever this is called again. The
    settlement is not final until it answers, or t members close it without.
    """
    for equation in settled.equations:
        for block in (None, *equation.odd):
            before = settled.verdicts.get((equation.round, block))
            # the direction of a block needs the gradient once
            known = block is None or desk.archive.has(f"direction-{block}", equation.round)
            if (before is None or before.silent) and (known or desk.gradient is not None):
                found = _Naming(desk, settled, equation, block).recorded(anew=before is not None)
                settled = settled if found is None else settled.judged(found)
    for round, liars in settled.named.items():
        for name, why in liars.items():
            desk.coordinator.note(f"{name} lied in round {round} ({why}), as its masks prove")
    return settled


@dataclass(frozen=True, eq=False)
class Case:
    """What a direction is judged by: whatever the server, or a reader of the ledger and the archive, has."""

    entry: Entry
    along: Along
    g: Lines
    setting: Setting
    task: Task
    evidence: Evidence
    tables: Mapping[str, MaskTable]
    products: Mapping[str, int]  # <y_i, g> of everybody in the sum
    statements: Mapping[str, Statement]  # of everybody who stated
    book: Book

    def judged(self) -> tuple[Verdict, Proof, Evidence]:
        """Return what is proved, as it is recorded, and the evidence with all keys that were shown."""
        from fedmerit.secagg.naming import judge
        from fedmerit.secagg.witness import Weighed

        evidence, weighed, stated = self.evidence, Weighed({}, {}), {*self.statements}
        if self.along.block is None:
            attempt = evidence.check(self.setting, self.task)
            here = [name for name in self.entry.participants if name in stated]
            weighed = self.book.weigh(self.entry, self.setting, attempt, self.tables, here)
            for pair, key in weighed.keys.items():
                evidence = evidence.with_opened(self.setting, *pair, key)
        fits = {
            name: fitting(self.statements[name], self.entry, self.along)
            for name in self.entry.participants
            if name in stated
        }
        products = {name: value for name, value in self.products.items() if name in stated}
        about = (self.setting, self.task, self.g, evidence, self.tables, products, fits)
        verdict = judge(*about, self.along.product, weighed.values)
        return verdict, proof_of(self.along, verdict, weighed.silent), evidence

    def is_plain(self, proof: Proof, evidence: Evidence) -> bool:
        """Return whether everybody who stated is proved to have stated the truth, and no key was shown."""
        return not (proof.named or evidence.opened or {*proof.silent} & {*self.statements})


def proof_of(along: Along, verdict: Verdict, more: Sequence[str] = ()) -> Proof:
    """Return what a verdict says of a direction; along a block, a false number is a false part.

    ``more`` are silent about something else.
    """
    values = {name: value for name, value in verdict.values.items() if value is not None}
    liars: dict[str, str] = dict(verdict.named)
    if along.block is not None:
        liars = {name: "part" if why in ("stated", "range") else why for name, why in liars.items()}
    silent = {*silent_in(verdict), *more}
    return Proof(along, values, liars, tuple(name for name in verdict.values if name in silent))


def silent_in(verdict: Verdict) -> tuple[str, ...]:
    """Return who has not shown what would prove its product: its table, the key of a dispute.

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
    """One direction of a round: the server judges it, and collects tables along blocks and opened keys."""

    def __init__(self, desk: Desk, settled: Settled, equation: Equation, block: int | None) -> None:
        self.desk, self.manifest, self.entry = desk, settled.manifest, equation.entry
        self.coordinator, self.recorder = desk.coordinator, desk.recorder
        self.along, self.arrays = desk.along(settled.manifest, equation, block)
        evidence = evidence_in(desk.archive, equation.round)
        for body in self.recorder.recorded("verdict"):
            if body["round"] == equation.round:
                evidence = replace(evidence, opened=recorded_evidence(body)[0].opened)
        self.evidence = evidence
        self.setting, self.task = desk.attempt(settled.manifest, equation.entry, evidence)
        self.statements, g = settled.statements, self.arrays["g"]
        self.tables = desk.tables(settled.manifest, self.along)
        self.products = {name: self._product(name, g) for name in equation.participants}

    def _product(self, name: str, g: Lines) -> int:
        """Return <y_i, g>, from the masked words that the server kept."""
        key = self.entry.round, f"{name} {self.along.g}"
        if key not in self.desk.products:
            self.desk.products[key] = masked_product(self.desk.archive, self.entry.round, name, g)
        return self.desk.products[key]

    def recorded(self, *, anew: bool) -> dict[str, Any] | None:
        """Find out who lied; return the verdict as it is recorded, with its evidence, or None if none is due.

        One is due if there was one before (``anew``), or if not every number is proved as it was stated.
        """
        if self.along.block is not None:
            self._ask_tables()
        verdict, proof, evidence = self._case().judged()
        if verdict.disputed:
            self._ask_keys(verdict.disputed)
            verdict, proof, evidence = self._case().judged()
        self._keep_asks(verdict)
        if self.along.block is None and not anew and self._case().is_plain(proof, evidence):
            return None
        products = {name: numeral(value) for name, value in sorted(self.products.items())}
        shown = {**evidence.to_dict(), "products": products}
        body = {**proof.body(), "settlement": self.manifest.digest, "evidence": shown}
        self.recorder.state("verdict", body)
        return body

    def _case(self) -> Case:
        tables = {name: table for name, (table, _) in self.tables.items()}
        where = (self.entry, self.along, self.arrays["g"], self.setting, self.task, self.evidence)
        return Case(*where, tables, self.products, self.statements, self.desk.book(self.manifest))

    def _ask_tables(self) -> None:
        """Ask everybody in the sum for its table along a block; record what they sign."""
        number, asks = self.entry.round, self._table_asks(self.entry.participants)
        for name, answer in self.desk.answers("table", self.along, asks):
            try:
                shown = answer_of(name, answer, Signed, "table", self._most())
                body = parsed(shown.text, "table")
                table = table_of(name, body, self.recorder.run, self.manifest.digest, self.along)
                if name in self.tables and self.tables[name][0] != table:
                    raise MessageError("has signed another table before", stage="table", member=name)
                if not self.recorder.said(name, "table", body, shown.signature):
                    raise MessageError("did not sign its table", stage="table", member=name)
                self.tables[name] = table, shown
            except (FedmeritError, ValueError) as error:
                self.coordinator.note(f"round {number}: refused: {error!s:.200}")

    def _table_asks(self, names: Sequence[str]) -> dict[str, Parcel]:
        """Return the requests for these members' tables.

        Where statements are withheld, each is shown its own, and what all of them add up to.
        """
        shown, number, block = self.desk.shown_statements(), self.entry.round, self.along.block
        along = self.along.body()
        if self.desk.config.scoring.visibility == "all":
            ask = self.coordinator.ask("table", number, TableAsk(shown, along), self.arrays)
            return dict.fromkeys(names, ask)
        assert block is not None
        stated = (self.statements[name].blocks[str(number)][block] for name in self.entry.participants)
        total = exact(sum(stated))
        bodies = {name: TableAsk({name: shown[name]}, along, total) for name in names}
        return {
            name: self.coordinator.ask("table", number, body, self.arrays) for name, body in bodies.items()
        }

    def _keep_asks(self, verdict: Verdict) -> None:
        """Keep what members who are silent can still answer by hand: for their tables, else for keys."""
        unshown = [name for name in silent_in(verdict) if name in verdict.unproved]
        for name, ask in self._table_asks(unshown).items() if self.along.block is not None else ():
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

    def _most(self) -> int:
        """Return the most bytes of a table."""
        return table_limit(self.setting.members, self.manifest.lanes)

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


def masked_product(archive: Archive, round: int, name: str, g: Lines) -> int:
    """Return <y_i, g> modulo 2^64, from the masked words that were archived when they came."""
    from fedmerit.secagg.naming import product

    return product(archive.load(words_kind(name), round)[name].data, g)


def recorded_evidence(body: Mapping[str, Any]) -> tuple[Evidence, Mapping[str, str]]:
    """Return the evidence in a record ``verdict``, and the products of masked words in it."""
    from fedmerit.secagg.naming import Evidence

    parts = dict(body["evidence"])
    products = parts.pop("products")
    return Evidence.from_dict(parts), products
