"""What a member shows of its masks in a settlement: for its witnesses, as one, and where parts do not add up.

A table tells the product of its update with a direction, so a member signs one only where it tells this
product anyway: of each round with its statement, and of a block that does not add up once it has recomputed
that direction. It opens its number for one draw only, hands each key to one witness only, and only when t
members have signed that draw: two draws would show a server twice as many pairs. Every answer is repeated
when it is asked again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fedmerit.errors import BindingError, RefusedError
from fedmerit.identity import canonical, commitment, number
from fedmerit.protocol import memory
from fedmerit.protocol.bench import COORDINATES, lanes_in
from fedmerit.protocol.direction import (
    BLOCKS_SLACK,
    Along,
    Entry,
    Manifest,
    Slopes,
    block_scale,
    block_units,
    blocks_of,
    differs,
    product,
    slopes_of,
    whole_number,
)
from fedmerit.protocol.memory import MemberState, Signatory, TrainedUpdate
from fedmerit.protocol.messages import (
    Accord,
    Accords,
    Ask,
    Signed,
    SignedTexts,
    StateAnswer,
    pack,
    parsed,
)
from fedmerit.protocol.outcome import Model, model_after
from fedmerit.protocol.pool import Indices, Slice
from fedmerit.protocol.settlement import (
    Statement,
    agreement,
    equations,
    false_number,
    fitting,
    last_round,
    statement_limit,
    table_body,
    table_limit,
    table_of,
)
from fedmerit.protocol.terms import Agreed
from fedmerit.protocol.witness import (
    drawn_body,
    drawn_for,
    handed_body,
    handed_in,
    list_hash,
    nonce_hash,
    opening,
    sealed_limit,
    seed_of,
    sighting_body,
)
from fedmerit.secagg.messages import decoded
from fedmerit.secagg.plain import PlainClient
from fedmerit.secagg.quantise import Direction, Encoding, Words

if TYPE_CHECKING:
    from fedmerit.secagg.client import Client
    from fedmerit.secagg.naming import Lines, MaskTable
    from fedmerit.secagg.witness import Handed, Sighting, Witnessed

NEAR = 1e-3
"""How much two machines may disagree about the size of a direction, or a utility."""


class Seat:
    """One member in the settlement of one run, while it answers a message with these signed bytes."""

    def __init__(
        self, member: Signatory, state: MemberState, agreed: Agreed, run: str, head: bytes = b""
    ) -> None:
        self.place = member, state, agreed, run, head
        self.member, self.state, self.agreed, self.run, self.head = self.place
        self.config, self.name = agreed.config, member.name

    @property
    def draw(self) -> str:
        """What the draw that is under way belongs to: a settlement, or before a panel the coordinates."""
        begun = self.state.get(memory.SETTLEMENT) is not None or not self.config.judged
        return self.manifest().digest if begun else COORDINATES

    def lines(self, ask: Ask, entry: Entry, encoding: Encoding) -> Lines:
        """Return the direction of a round beside a message; those of a panel are kept by this member."""
        if not self.config.judged:
            return ask.array("g", "<i4", encoding.words, entry.g)
        columns, x = self.state.get(memory.COLUMNS), self.state.get(memory.SUM.of(entry.round))
        if columns is None:
            raise BindingError("has not kept what judges showed")
        return self.manifest().board(entry, columns, x)

    def check_last(self, ask: Ask) -> None:
        """Raise unless the last round is the one agreed on, or t members signed that it is another."""
        if ask.round == self.config.training.rounds:
            return
        body = last_round(self.run, ask.round)
        signatures = ask.body.last.items()
        signed = [name for name, proof in signatures if self.member.is_signed(name, "last", body, proof)]
        self.enough(signed, f"that round {ask.round} is the last one")

    def manifest(self) -> Manifest:
        if (text := self.state.get(memory.SETTLEMENT)) is None:
            raise BindingError("was not shown the pool")
        return manifest_in(text)

    def nonce(self, manifest: Manifest) -> bytes:
        """Return the number that this member opens for the draw; it follows from its key, for nobody else."""
        where = {"run": self.run, "settlement": manifest.digest}
        return hashlib.sha256(self.member.sign("number for a draw", where)).digest()

    def agreeing(self, accords: Accords, manifest: Manifest) -> set[str]:
        """Return who signed that all directions of a manifest are right."""

        def signed(name: str, accord: Accord) -> bool:
            body = agreement(self.run, manifest.digest, [], accord.released, accord.draw)
            return self.member.is_signed(name, "agreed", body, accord.signature)

        return {name for name, accord in accords.items() if signed(name, accord)}

    def statements_in(self, shown: SignedTexts, manifest: Manifest) -> dict[str, Statement]:
        """Return the statements that this member is shown; each signed by its author."""
        statements = {}
        for name, signed in shown.items():
            body = parsed(signed.text, "settlement", statement_limit(manifest))
            if not self.member.is_signed(name, "statement", body, signed.signature):
                raise BindingError("shown a statement that it did not sign", member=name)
            statements[name] = Statement.from_body(name, body, manifest)
        return statements

    def statement(self, manifest: Manifest) -> Statement:
        """Return what this member states; another number than its product only in a rehearsal."""
        rounds: dict[str, int] = {}
        blocks: dict[str, tuple[float, ...]] = {}
        factor = self.member.misstates
        for entry in manifest.rounds:
            if self.name in entry.participants:
                part, key = self.state.get(memory.STATED.of(entry.round)), str(entry.round)
                assert part is not None  # it agreed to the manifest
                rounds[key], blocks[key] = whole_number(part.product), tuple(part.blocks)
                if factor is not None:
                    rounds[key] = false_number(rounds[key], factor, manifest.lanes)
        return Statement(self.name, manifest.digest, rounds, blocks)

    def sums(self, ask: Ask, entry: Entry, encoding: Encoding) -> tuple[Model, Words]:
        """Return M0 and the sum of a round beside a message, compared with the manifest."""
        m0 = ask.array("m0", "<f4", encoding.length, entry.m0)
        return m0, ask.array("sum", "<u4", encoding.words, entry.x)

    def slopes(
        self, manifest: Manifest, entry: Entry, m0: Model, m: Model, shape: Any
    ) -> tuple[Slopes, float]:
        """Return the slopes of a round as this member computes them, and the rest of the gain."""
        shown = self.pool(manifest)
        blocks, _ = self.blocks(shown)
        gradients = self.member.gradients
        assert gradients is not None  # a member without any does not join
        slopes, _, rest = slopes_of(gradients(shape, manifest.utility), m0, m, shown, blocks, entry.points)
        return slopes, rest

    def pool(self, manifest: Manifest) -> Slice:
        """Return the opened samples; they were hashed, and compared with the manifest, when they came."""
        pool = self.state.get(memory.POOL)
        assert pool is not None  # it came with the manifest
        return Slice(index=pool.index, x=pool.x, y=pool.y, salts=b"", path=(), id=manifest.pool)

    def blocks(self, shown: Slice) -> tuple[list[Indices], bool]:
        return blocks_of(shown, balanced=self.agreed.balanced)

    def enough(self, names: Iterable[str], what: str) -> None:
        signed = len(set(names))
        if signed < self.config.threshold:
            raise RefusedError(f"{signed} members signed {what}, {self.config.threshold} are needed")


class Prover(Seat):
    """One member in a settlement, while it answers what its masks prove."""

    def answer(self, ask: Ask) -> bytes:
        """Answer one exchange, if this member has stated."""
        steps: Mapping[str, Callable[[Ask], bytes]] = {
            "draw": self._draw, "drawn": self._drawn, "seal": self._seal, "witness": self._witness,
            "table": self._table, "pairs": self._pairs,
        }  # fmt: skip
        first = ask.exchange in ("draw", "drawn") and self.draw == COORDINATES
        if self.state.get(memory.STATEMENT) is None and not first:
            raise RefusedError("has not stated")
        return steps[ask.exchange](ask)

    # ---------------------------------------------------------------------------------------------- the draw

    def _draw(self, ask: Ask) -> bytes:
        """Open the number that this member committed to, for one list of statements.

        The coordinates of a panel are drawn before there are any, with the numbers of everybody who joined.
        """
        draw, statements, committed = self.draw, ask.body.statements, ask.body.committed
        if draw == COORDINATES:
            nonce, own = self.member.secret(COORDINATES, self.run), None
            self.check_last(ask)
        else:
            nonce = self.nonce(self.manifest())
            own = commitment(parsed(self._stated().text, "draw")).hex()
        due = committed if draw == COORDINATES else statements
        self.enough(due, "what it would open its number for")
        hashes = statements.get(self.name), committed.get(self.name)
        if hashes not in ((None, None), (own, nonce_hash(nonce))):
            raise RefusedError("was shown another statement than it made, or another number")
        shown, opened = list_hash(statements, committed), self.state.get(memory.OPENED) or {}
        # Once t members signed a draw, which this member took part in, no number changes it any more.
        if opened.get(draw, shown) != shown and (draw == COORDINATES or not self.state.get(memory.SEALED)):
            raise RefusedError("has opened its number for other statements")
        self.state.put(memory.OPENED, {**opened, draw: shown})
        body = opening(self.run, draw, shown, nonce)
        return pack([nonce, self.member.sign("nonce", body)])

    def _stated(self) -> StateAnswer:
        answer = self.state.get(memory.STATEMENT)
        assert answer is not None
        return decoded(answer, StateAnswer, "a statement")

    def _drawn(self, ask: Ask) -> bytes:
        """Sign the seed that follows from t members' numbers, and no other one."""
        told, digest = ask.body, self.draw
        listed = list_hash(told.statements, told.committed)
        if (self.state.get(memory.OPENED) or {}).get(digest, listed) != listed:
            raise RefusedError("has opened its number for other statements")
        if digest == COORDINATES:
            self.check_last(ask)
        for name, opened in told.openings.items():
            body = opening(self.run, digest, listed, opened.nonce)
            signed = self.member.is_signed(name, "nonce", body, opened.signature)
            if not signed or nonce_hash(opened.nonce) != told.committed.get(name):
                raise BindingError("did not open the number that it committed to", member=name)
        self.enough(told.openings, "what they opened for the draw")
        nonces = {name: opened.nonce.hex() for name, opened in told.openings.items()}
        seed = seed_of(digest, told.statements, nonces)
        drawn = self.state.get(memory.DRAWN) or {}
        if drawn.get(digest, seed) != seed:
            raise RefusedError("takes part in another draw")
        self.state.put(memory.DRAWN, {**drawn, digest: seed})
        return pack(self.member.sign("drawn", drawn_body(self.run, digest, seed)))

    def _seed(self) -> str:
        seed = self.state.get(memory.SEALED) or (self.state.get(memory.DRAWN) or {}).get(self.draw)
        if seed is None:
            raise RefusedError("has signed no draw of witnesses")
        return seed

    def _seal(self, ask: Ask) -> bytes:
        """Hand the keys of this member's pairs to their witnesses, for the draw that t members signed.

        There is no second one, unless so many members lie that they could read updates anyway. So a member
        that was shown another list before, takes part in this one.
        """
        seed, answers = ask.body.seed, []
        body = drawn_body(self.run, self.manifest().digest, seed)
        signed = (
            name for name, own in ask.body.drawn.items() if self.member.is_signed(name, "drawn", body, own)
        )
        self.enough(signed, "this draw")
        if self.state.get(memory.SEALED) not in (None, seed):
            raise RefusedError("has handed over its keys for another draw")
        self.state.put(memory.SEALED, seed)
        for entry in self.manifest().rounds:
            drawn = drawn_for(entry, seed, self.config) if self.name in entry.participants else {}
            if drawn:
                handed = self._handed(entry, drawn, seed)
                body = handed_body(self.run, self.manifest().digest, seed, entry.round, handed)
                answers.append(Signed(canonical(body), self.member.sign("sealed", body)))
        return pack(answers)

    def _handed(self, entry: Entry, drawn: Mapping[frozenset[str], str], seed: str) -> Handed:
        from fedmerit.secagg.witness import Handed

        client, _ = self._masks(entry)
        sealed: dict[str, bytes] = {}
        opened: dict[str, bytes] = {}
        for peer in client.masked_peers:
            is_open, key = client.hand_over(peer, drawn[frozenset((self.name, peer))], bytes.fromhex(seed))
            (opened if is_open else sealed)[peer] = key
        return Handed(sealed, opened)

    # ------------------------------------------------------------------------------------------ as a witness

    def _witness(self, ask: Ask) -> bytes:
        """Recompute what the ends said of the pairs that this member witnesses in a round, and sign it."""
        from fedmerit.secagg.naming import attempt_in
        from fedmerit.secagg.witness import Witnessed

        entry, seed = self.manifest().entry(ask.round), self._seed()
        if self.name not in entry.participants:
            raise RefusedError("is not in the sum")
        client, _ = self._masks(entry)
        g = self.lines(ask, entry, client.task.encoding)
        attempt = attempt_in(ask.body.lists, client.setting, client.task)
        if attempt.included != entry.participants or attempt.digests[self.name] != client.sent:
            raise BindingError("was shown other masked inputs than those of the sum")
        drawn = drawn_for(entry, seed, self.config)
        sums = Witnessed(client.setting, attempt, drawn, bytes.fromhex(seed))
        seen = self._sighting(client, sums, g, self._tables_in(ask, entry), self._handed_in(ask, seed))
        body = sighting_body(self.run, self.manifest().digest, seed, entry.round, seen)
        return pack(Signed(canonical(body), self.member.sign("witness", body)))

    def _tables_in(self, ask: Ask, entry: Entry) -> dict[str, MaskTable]:
        """Return the tables of a round that this member is shown, each signed by its author."""
        where = (self.run, self.manifest().digest, self.manifest().along(entry.round))
        most = table_limit(self.config.clients, lanes_in(self.config))
        shown = self._signed_in(ask.body.tables, "table", most)
        return {name: table_of(name, body, *where, self.manifest().lanes) for name, body in shown}

    def _handed_in(self, ask: Ask, seed: str) -> dict[str, Handed]:
        """Return what ends handed over in a round, each signed by its author."""
        where = {**drawn_body(self.run, self.manifest().digest, seed), "round": ask.round}
        found = {}
        for name, body in self._signed_in(ask.body.sealed, "sealed", sealed_limit(self.config.clients)):
            if {**body, **where} != body:
                raise BindingError("handed this over in another round or draw", member=name)
            found[name] = handed_in(body)
        return found

    def _signed_in(self, shown: SignedTexts, kind: str, most: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, signed in shown.items():
            body = parsed(signed.text, "witness", most)
            if not self.member.is_signed(name, kind, body, signed.signature):
                raise BindingError(f"did not sign this {kind}", member=name)
            yield name, body

    def _sighting(
        self,
        client: Client,
        sums: Witnessed,
        g: Lines,
        tables: Mapping[str, MaskTable],
        handed: Mapping[str, Handed],
    ) -> Sighting:
        """Return c_ij of every pair whose key came; the key itself where an end said something else."""
        from fedmerit.secagg import masks
        from fedmerit.secagg.naming import mask_products
        from fedmerit.secagg.witness import Sighting, said_of

        keys: dict[tuple[str, str], bytes] = {}
        channels: dict[str, bytes] = {}
        for pair in (pair for pair, witness in sums.pairs.items() if witness == self.name):
            found = {"": sums.opened(pair, handed)}
            for end, sealed in sums.sealed(pair, handed).items():
                found[end] = sums.key(pair, end, sealed, client.channel(end))
            if key := next((key for key in found.values() if key), None):
                keys[pair] = key
            else:
                channels |= {end: client.channel(end) for end in found if end}
        binding = client.task.binding(client.setting)
        streams = {pair: masks.stream_key(key, binding) for pair, key in keys.items()}
        products = mask_products(streams, g, pairs=True)
        false = {pair for pair, value in products.items() if not said_of(tables, pair) <= {value}}
        values = {pair: value for pair, value in products.items() if pair not in false}
        return Sighting(values, {pair: keys[pair] for pair in false}, channels)

    # ---------------------------------------------------------------------------------------- show the masks

    def _table(self, ask: Ask) -> bytes:
        """Return this member's signed table along a block, if it is shown that its parts do not add up."""
        manifest = self.manifest()
        entry = manifest.entry(ask.round)
        if self.name not in entry.participants:
            raise RefusedError("has not stated on this round")
        along = Along.from_body(ask.body.along)
        if along.round != entry.round or along.block not in range(len(manifest.blocks)):
            raise BindingError("a block that the pool does not have")
        statements = self.statements_in(ask.body.statements, manifest)
        self._refuse_if_it_holds(along, statements, ask.body.total or "")
        client, update = self._masks(entry)
        g = ask.array("g", "<i4", client.task.encoding.words, along.g)
        if problem := self._problem_with(ask, along, g):
            raise RefusedError(f"block {along.block}: {problem}")
        products, _ = client.products(g, update.delta)
        body = table_body(self.run, manifest.digest, along, client.tell(along.g, products, along.purpose))
        tables = self.state.get(memory.TABLES.of(entry.round)) or {}
        self.state.put(memory.CLIENT.of(entry.round), client)
        self.state.put(memory.TABLES.of(entry.round), {**tables, along.purpose: canonical(body)})
        return pack(Signed(canonical(body), self.member.sign("table", body)))

    def _masks(self, entry: Entry) -> tuple[Client, TrainedUpdate]:
        client, update = self.member.brought(self.state, entry.round)
        return masked(client), update

    def _refuse_if_it_holds(self, along: Along, statements: Mapping[str, Statement], total: str) -> None:
        """Raise unless parts do not add up: as they show or, if they are withheld, as the server signs."""
        entry, everybody = self.manifest().entry(along.round), self.config.scoring.visibility == "all"
        assert along.block is not None
        if not {*(entry.participants if everybody else (self.name,))} <= {*statements}:
            raise RefusedError("was not shown everybody's statement, so nobody can be named")
        if everybody:
            equation = next(
                each for each in equations(self.manifest(), statements) if each.round == along.round
            )
            fails = along.block in equation.odd
        else:
            off = number(total) - entry.blocks[along.block]
            fails = abs(off) > BLOCKS_SLACK * max(map(abs, entry.blocks))
        if not fails:
            raise RefusedError("the parts add up, so nobody lied")

    def _pairs(self, ask: Ask) -> bytes:
        """Return the keys of pairs whose other end signed another number; write down first what is opened."""
        manifest, purpose = self.manifest(), ask.body.purpose
        entry = manifest.entry(ask.round)
        text = (self.state.get(memory.TABLES.of(entry.round)) or {}).get(purpose)
        if text is None:
            raise BindingError("has told nothing of its masks")
        body = parsed(text, "pairs")
        where = (self.run, manifest.digest, Along.from_body(body))
        ours = table_of(self.name, body, *where, manifest.lanes)
        client, _ = self._masks(entry)
        client.tell(where[2].g, ours.pairs, purpose)
        opened = []
        for peer, signed in sorted(ask.body.tables.items()):
            body = parsed(signed.text, "pairs", table_limit(client.setting.members, lanes_in(self.config)))
            if not self.member.is_signed(peer, "table", body, signed.signature):
                raise BindingError("did not sign this table", member=peer)
            theirs = table_of(peer, body, *where, manifest.lanes)
            opened.append((peer, client.open_pair(peer, ours, theirs, purpose)))
        self.state.put(memory.CLIENT.of(entry.round), client)
        return pack(opened)

    def _problem_with(self, ask: Ask, along: Along, g: Direction) -> str:
        """Return what is wrong with the direction of a block for this member; empty text if nothing is.

        It must be the gradient of that block, as far as machines agree. The product of this member's update
        with it must fit the part that it stated, which is then no false one.
        """
        assert along.block is not None
        manifest = self.manifest()
        entry = manifest.entry(along.round)
        client, update = self.member.brought(self.state, entry.round)
        m0, x = self.sums(ask, entry, client.task.encoding)
        m, _ = model_after(m0, x, client.task, entry.participants)
        slopes, _ = self.slopes(manifest, entry, m0, m, update.shape)
        values = block_units(slopes, along.block, entry.step, entry.weight)
        if not abs(block_scale(values) - along.scale) <= NEAR * along.scale:
            return "its scale differs from ours"
        if problem := differs(g, values, along.scale, client.task.encoding):
            return problem
        if product(x, g) != along.product:
            return "the product of the sum and the direction differs from ours"
        fits = fitting(self.statement(manifest), entry, along)
        own = product(client.words(update.delta), g)
        return "" if own in fits else "this member's part would seem false along it"


def masked(client: PlainClient | None) -> Client:
    """Return a client with masks; who has none joins no run that names anybody."""
    from fedmerit.secagg.client import Client

    assert isinstance(client, Client)
    return client


@lru_cache(maxsize=2)
def manifest_in(text: bytes) -> Manifest:
    """Return a manifest; a process reads it once, though it is asked about every round in it."""
    return Manifest.from_body(parsed(text, "settlement"))
