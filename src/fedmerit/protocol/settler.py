"""A member's side of the settlement: it opens the test pool, recomputes every direction, and states.

Each message may reach a new process, so what was opened, agreed and stated is in the member's state. A member
agrees to one manifest only, trains in no round after the pool was opened, and states only once t members have
signed that every direction in that manifest is the gradient. It repeats its answers when it is asked again.
Being shown a second manifest before it agreed to one binds it to neither; who agreed to one takes another
only with t members' agreements, and none once it stated. It keeps both messages, whose signatures prove that
the server made two (`two_manifests`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedmerit.errors import BindingError, MessageError, RefusedError, placing
from fedmerit.identity import canonical, commitment
from fedmerit.protocol import memory
from fedmerit.protocol.direction import (
    BLOCKS_SLACK,
    REST,
    Entry,
    Manifest,
    Slopes,
    as_units,
    block_products,
    differs,
    manifest_limit,
    numeral,
    product,
    whole_number,
)
from fedmerit.protocol.memory import OwnProducts, TrainedUpdate, kept_line
from fedmerit.protocol.messages import (
    LEAST_SAMPLES,
    SLICE,
    Accord,
    Ask,
    Exchange,
    Parcel,
    Signed,
    StateAnswer,
    pack,
    parsed,
)
from fedmerit.protocol.outcome import included_hash, model_after, model_hash
from fedmerit.protocol.pool import Slice, samples_in
from fedmerit.protocol.prover import NEAR, Prover, Seat, manifest_in, masked
from fedmerit.protocol.settlement import (
    CLOCKS,
    DAY,
    Statement,
    agreement,
    countersignature,
    equations,
    last_round,
    table_body,
    tables_hash,
)
from fedmerit.protocol.witness import nonce_hash
from fedmerit.secagg.messages import decoded
from fedmerit.secagg.plain import PlainClient
from fedmerit.secagg.quantise import Direction, Encoding, Words
from fedmerit.secagg.setting import LEAST_IN_SUM

log = logging.getLogger("fedmerit")
SETTLING: tuple[Exchange, ...] = (
    "last", "judge", "judged", "column", "open", "agree", "agreed", "state", "draw", "drawn", "seal",
    "witness", "table", "pairs", "settle",
)  # fmt: skip
"""The exchanges of a settlement, in order."""


class Settler(Seat):
    """One member in the settlement of one run, while it answers a message with these signed bytes."""

    def answer(self, ask: Ask) -> bytes:
        """Answer one exchange of the settlement."""
        if self.config.scoring.method == "reports":
            raise RefusedError("this run is not settled", stage=ask.exchange, member=self.name)
        steps: Mapping[str, Callable[[Ask], bytes]] = {
            "last": self._last, "open": self._open, "agree": self._agree, "agreed": self._agreed,
            "state": self._state, "settle": self._settle,
        }  # fmt: skip
        with placing(ask.exchange, self.name):
            return steps.get(ask.exchange, Prover(*self.place).answer)(ask)

    # ------------------------------------------------------------------------------------------ open the pool

    def _last(self, ask: Ask) -> bytes:
        """Sign that a round is the last one, and take part in no later one."""
        total = self.config.training.rounds
        if not 1 <= ask.round < total:
            raise BindingError(f"expected a round before {total}, got round {ask.round}")
        if (last := self.state.get(memory.LAST)) not in (None, ask.round):
            raise RefusedError(f"has signed that round {last} is the last one")
        if last is None and self.state.get(memory.SETTLEMENT) is not None:
            raise RefusedError("has been shown the pool, after which no other end is signed")
        self.state.put(memory.LAST, ask.round)
        return self.member.sign("last", last_round(self.run, ask.round))

    def _open(self, ask: Ask) -> bytes:
        """Check the opened pool and the manifest, and keep both."""
        text, config = ask.body.manifest, self.config
        most = manifest_limit(config.training.rounds, self.member.roster.names)
        if len(text) > most:
            raise MessageError(f"a manifest has at most {most} bytes, got {len(text)}")
        manifest = manifest_in(text)
        if canonical(manifest.body()) != text:
            raise MessageError("a manifest that is not written as servers write it")
        before, accord = self.state.get(memory.SETTLEMENT), self.state.get(memory.AGREED)
        if before == text:
            return pack(manifest.digest)
        self._remember(ask.round, manifest.digest)
        bound = self.state.get(memory.STATEMENT) is not None or (accord is not None and not accord.wrong)
        if bound and not self._may_change(ask, manifest):
            self.state.save()  # the proof is kept although this is refused
            raise RefusedError("has agreed to another manifest")
        if (manifest.run, manifest.utility) != (self.run, config.scoring.utilities[0]):
            raise BindingError("a manifest of another run or utility")
        self.check_last(ask)
        if manifest.rounds[-1].round > ask.round:
            raise BindingError(f"a manifest with rounds after the last one, {ask.round}")
        self._check_participants(manifest)
        self._check_shown(ask, manifest)
        if before is not None:
            for entry in manifest_in(before).rounds:
                self.state.put(memory.STATED.of(entry.round), None)
            self.state.put(memory.AGREED, None)
        self.state.put(memory.SETTLEMENT, text)
        return pack(manifest.digest)

    def _check_shown(self, ask: Ask, manifest: Manifest) -> None:
        """Raise unless the pool is the one that was committed to, unknown so far, and the manifest's."""
        shown = ask.opened
        if len(shown.y) < LEAST_SAMPLES and not self.member.rehearsal:
            raise MessageError(
                f"expected at least {LEAST_SAMPLES} test samples: a statement on fewer reveals too much"
            )
        shown.verify(self.agreed.commitment, "settlement")
        blocks, by_class = self.blocks(shown)
        pool = shown.id, tuple(map(len, blocks)), by_class
        if (manifest.bench, manifest.pool, manifest.blocks, manifest.stratified) != (None, *pool):
            raise BindingError("the manifest is about another pool, or other blocks")
        if self.state.get(memory.SETTLEMENT) is None:  # there is one pool, which the commitment fixes
            self.state.room(shown.x.nbytes + shown.y.nbytes)
            self._refuse_known(shown)
            self.state.put(memory.POOL, memory.ShownPool(shown.x, shown.y, shown.index))

    def _may_change(self, ask: Ask, manifest: Manifest) -> bool:
        """Return whether t members agreed to this manifest, and this member has stated on no other.

        Then no other one will ever have t: who agreed to it would be kept from stating for good.
        """
        agreed = self.agreeing(ask.body.agreed, manifest)
        return self.state.get(memory.STATEMENT) is None and len(agreed) >= self.config.threshold

    def _remember(self, round: int, settlement: str) -> None:
        """Keep the signed messages of two manifests: they prove that one server made both."""
        manifests = dict(self.state.get(memory.MANIFESTS) or ())
        if settlement in manifests or len(manifests) == 2:
            return
        manifests[settlement] = self.head
        self.state.put(memory.MANIFESTS, manifests)
        self.state.add_kept(kept_line(round, "opened", settlement))
        if len(manifests) == 2 and not self.member.rehearsal:
            log.error(
                "%s was shown two manifests by one server, which proves that this server is dishonest: the "
                "signed messages are kept (fedmerit member show)",
                self.name,
            )

    def _check_participants(self, manifest: Manifest) -> None:
        """Raise unless every round has enough members that honest ones among them recompute its direction.

        Nobody else does so, and the scale of all directions follows from every round.
        """
        least, roster = max(LEAST_IN_SUM, self.config.threshold), {*self.member.roster.names}
        for entry in manifest.rounds:
            if len(entry.participants) < least or not {*entry.participants} <= roster:
                raise BindingError(
                    f"round {entry.round} of the manifest has {len(entry.participants)} members, expected at "
                    f"least {least} of the roster"
                )

    def _refuse_known(self, shown: Slice) -> None:
        """Raise if samples of this pool were shown before, in this run or an earlier one; remember them."""
        samples = samples_in(shown)
        if again := self.member.shown_before(self.state, self.agreed) & samples:
            raise RefusedError(
                f"{len(again)} of the {len(shown.y)} samples of the pool were opened before, so members may "
                "have trained on them: a settled run needs samples that nobody has seen"
            )
        self.member.remember_samples(self.state, self.agreed, samples)

    # ------------------------------------------------------------------------------------ agree on directions

    def _agree(self, ask: Ask) -> bytes:
        """Recompute the direction of a round and this member's product with it; say whether it is right."""
        manifest = self.manifest()
        entry = manifest.entry(ask.round)
        if self.name not in entry.participants:
            return pack(True)
        if (part := self.state.get(memory.STATED.of(ask.round))) is None:
            part = self._recompute(ask, manifest, entry)
            self.state.put(memory.STATED.of(ask.round), part)
        return pack(not part.problem)

    def _recompute(self, ask: Ask, manifest: Manifest, entry: Entry) -> OwnProducts:
        """Return this member's part in the gain of a round, or what is wrong with the direction."""
        client, update = self.member.brought(self.state, entry.round)
        task, encoding = client.task, client.task.encoding
        g = ask.array("g", "<i4", encoding.words, entry.g)
        m0, x = self.sums(ask, entry, encoding)
        if problem := self._contradiction(entry, client):
            return OwnProducts(problem=problem)
        if manifest.coordinates != encoding.length:
            return OwnProducts(
                problem=f"the model has {encoding.length} coordinates, not {manifest.coordinates}"
            )
        m, weight = model_after(m0, x, task, entry.participants)
        if (weight, encoding.step, model_hash(m)) != (entry.weight, entry.step, entry.m):
            return OwnProducts(problem="its total weight, step or model does not follow from the sum")
        slopes, rest = self.slopes(manifest, entry, m0, m, update.shape)
        # Whether it could state the product of a false direction would tell something of it: problems first.
        if problem := next(problems_of(manifest, entry, encoding, x, g, slopes, rest), ""):
            self.member.warn(
                "%s disagrees with the direction of round %d: %s", self.name, entry.round, problem
            )
            return OwnProducts(problem=problem)
        pairs, words = self._masks(client, g, update)
        own_blocks = block_products(words, slopes, encoding, entry.step, entry.weight)
        digits = [float(f"{value:.7g}") for value in own_blocks]  # seven do for standard errors
        return OwnProducts(
            str(product(words, g)), digits, pairs={peer: numeral(value) for peer, value in pairs.items()}
        )

    def _masks(
        self, client: PlainClient, g: Direction, update: TrainedUpdate
    ) -> tuple[dict[str, int], Words]:
        """Return the products of its masks with a direction, if they can prove any, and its integers."""
        if self.config.word_bytes == 4:
            return {}, client.words(update.delta)
        return masked(client).products(g, update.delta)

    def _contradiction(self, entry: Entry, client: PlainClient) -> str:
        """Return how the manifest contradicts what this member signed in the round; empty if it does not.

        A member who never acknowledged a sum still knows the model that it trained and whom it signed for.
        """
        signed = self.state.get(memory.SIGNED.of(entry.round))
        told = {"m0": entry.m0, "m": entry.m, "x": entry.x, "included": included_hash(entry.participants)}
        if signed is None:
            signed = {"m0": client.task.m0_hash.hex()}
            if survivors := client.survivors:
                signed["included"] = included_hash(survivors)
        odd = [key for key, value in signed.items() if told.get(key, value) != value]
        return f"its {', '.join(odd)} is not what was signed in the round" if odd else ""

    def _agreed(self, ask: Ask) -> bytes:
        """Sign the manifest, or which of its rounds are wrong."""
        manifest = self.manifest()
        listed = [entry.round for entry in manifest.rounds if self.name in entry.participants]
        wrong = []
        for round in listed:
            if (part := self.state.get(memory.STATED.of(round))) is None:
                raise BindingError(f"was not shown the direction of round {round}")
            wrong += [round] if part.problem else []
        unlisted = [round for round in self.state.get(memory.SUMMED) or () if round not in listed]
        wrong += [round for round in unlisted if self.state.get(memory.SIGNED.of(round)) is not None]
        released = [round for round in unlisted if round not in wrong]
        draw = nonce_hash(self.nonce(manifest))
        body = agreement(self.run, manifest.digest, sorted(wrong), released, draw)
        accord = Accord(tuple(sorted(wrong)), tuple(released), draw, self.member.sign("agreed", body))
        self.state.put(memory.AGREED, accord)
        return pack(accord)

    # ------------------------------------------------------------------------------------------------- state

    def _state(self, ask: Ask) -> bytes:
        """State, if t members agreed on the manifest; the same again if asked again."""
        manifest = self.manifest()
        own = self.state.get(memory.AGREED)
        if own is None or own.wrong:
            raise RefusedError("does not state: it did not agree to the directions")
        self.enough(self.agreeing(ask.body.agreed, manifest), "the directions")
        if (before := self.state.get(memory.STATEMENT)) is not None:
            return before
        tables = self._tables(manifest) if self.config.word_bytes == 8 else []
        statement = self.statement(manifest)
        if tables:
            statement = replace(statement, masks=tables_hash(tables))
        body = statement.body(self.run)
        signed = tuple(Signed(canonical(table), self.member.sign("table", table)) for table in tables)
        answer = pack(StateAnswer(canonical(body), self.member.sign("statement", body), signed))
        self.state.put(memory.STATEMENT, answer)
        stated = json.dumps(self.name), commitment(body).hex()
        self.state.add_kept(kept_line(ask.round, "stated", *stated))
        return answer

    def _tables(self, manifest: Manifest) -> list[dict[str, Any]]:
        """Return what this member says of its masks in each round that it was summed in."""
        tables = []
        for entry in manifest.rounds:
            if self.name not in entry.participants:
                continue
            part, client = (
                self.state.get(memory.STATED.of(entry.round)),
                self.member.client(self.state, entry.round),
            )
            assert part is not None  # it agreed to the manifest
            pairs = {peer: whole_number(value) for peer, value in part.pairs.items()}
            table = masked(client).tell(entry.g, pairs, lanes=manifest.lanes)
            tables.append(table_body(self.run, manifest.digest, manifest.along(entry.round), table))
            self.state.put(memory.CLIENT.of(entry.round), client)
            told = self.state.get(memory.TABLES.of(entry.round)) or {}
            self.state.put(memory.TABLES.of(entry.round), {**told, "": canonical(tables[-1])})
        return tables

    # -------------------------------------------------------------------------------------------- countersign

    def _settle(self, ask: Ask) -> bytes:
        """Countersign what the settlement came to, if this member's statement is in it and it adds up."""
        manifest, text = self.manifest(), ask.body.settled
        most = manifest_limit(len(manifest.rounds) + 2, self.member.roster.names)
        settled = parsed(text, "settlement", most)
        if canonical(settled) != text or settled.get("settlement") != manifest.digest:
            raise MessageError("not what this settlement came to")
        if self.state.get(memory.SETTLED) == text:
            return self.member.sign("countersigned", countersignature(self.run, settled))
        statements = self.statements_in(ask.body.statements, manifest)
        own, shown = self.state.get(memory.STATEMENT), ask.body.statements.get(self.name)
        silent = self.name in settled["silent"] and settled["final"]
        left_out = self.name in settled["missing"] or silent
        stated = None if own is None else decoded(own, StateAnswer, "a statement")
        if stated and (
            left_out or shown is None or (shown.text, shown.signature) != (stated.text, stated.signature)
        ):
            raise RefusedError("its statement is not in the settlement")
        self._check_sums(manifest, settled, statements)
        self._check_end(settled)
        self._check_asked(settled)
        self.state.put(memory.SETTLED, text)
        if settled["closes"] is not None:
            self.state.put(memory.CLOSES, settled["closes"])
        # Updates and secrets of rounds are kept also after a final end, which may be shown to this member
        # alone: a server would ask for its masks afterwards, with another statement of a friend.
        return self.member.sign("countersigned", countersignature(self.run, settled))

    def _check_sums(
        self, manifest: Manifest, settled: Mapping[str, Any], statements: Mapping[str, Statement]
    ) -> None:
        """Raise unless the sums follow from the statements, as far as this member is shown them."""
        own = [equation.body() for equation in equations(manifest, statements)]
        told = settled["rounds"]
        everything = set(manifest.members) <= {*statements, *settled["missing"]}
        if not everything and self.config.scoring.visibility == "all":
            raise BindingError("was not shown every statement that it counts")
        if everything and own != told:
            raise BindingError("its sums are not those of the statements")
        facts = [(row["round"], row["participants"], row["product"]) for row in own]
        if facts != [(row["round"], row["participants"], row["product"]) for row in told]:
            raise BindingError("its equations are not those of the manifest")
        if any(row["holds"] != (row["sum"] == row["product"]) for row in told):
            raise BindingError("an equation does not hold as it says")

    def _check_end(self, settled: Mapping[str, Any]) -> None:
        """Raise if somebody is named without need, or this member, or if the window is closed early."""
        adds_up = all(row["holds"] and not row["odd"] for row in settled["rounds"])
        if (
            settled["named"] and adds_up and self.config.word_bytes == 4
        ):  # else masks may show what sums do not
            raise BindingError("somebody is named though everything adds up")
        if self.name in settled["named"] and self.member.misstates is None:
            raise RefusedError("is named, and has not lied")
        closes, awaited = self.state.get(memory.CLOSES), [*settled["missing"], *settled["silent"]]
        if settled["final"] and awaited and (closes is None or time.time() < closes):
            raise RefusedError("was not told of a window that is over now")
        if settled["final"] and not {*awaited} <= {*self.member.without}:
            raise RefusedError(
                f"its owner has not agreed to close the settlement without {', '.join(awaited)} (fedmerit "
                "member state --without)"
            )
        if not settled["final"]:
            least = time.time() + self.config.settlement.window_days * DAY - CLOCKS
            if not settled["closes"] >= (least if closes is None else closes):
                raise RefusedError("the window is shorter than agreed")

    def _check_asked(self, settled: Mapping[str, Any]) -> None:
        """Raise if parts of a block fail for good and this member, asked no more, showed no masks."""
        if not settled["final"] or self.config.word_bytes == 4 or self.member.rehearsal:
            return
        for row in settled["rounds"]:
            shown = self.state.get(memory.TABLES.of(row["round"])) or {}
            if self.name in row["participants"] and not {*map(str, row["odd"])} <= {*shown}:
                raise RefusedError(
                    f"has not shown its masks of round {row['round']}, in which parts do not add up"
                )

    # ---------------------------------------------------------------------------------------------- internals


def problems_of(
    manifest: Manifest,
    entry: Entry,
    encoding: Encoding,
    x: Words,
    g: Direction,
    slopes: Slopes,
    rest: float,
) -> Iterator[str]:
    """Yield what is wrong with a round of the manifest, in words; ``slopes`` and ``rest`` were recomputed."""
    values = as_units(slopes, manifest.blocks, entry.step, entry.weight)
    if problem := differs(g, values, manifest.scale, encoding):
        yield problem
    size = float(np.abs(values).sum())
    if not abs(size - entry.size) <= NEAR * size:  # the scale follows from this
        yield "the size of the direction differs from ours"
    utilities = ((slopes.empty, entry.empty), (slopes.grand, entry.grand), (rest, entry.rest))
    most = NEAR * max(abs(slopes.empty), abs(slopes.grand)) + 1e-9
    if not all(abs(own - stated) <= most for own, stated in utilities):
        yield "the utility of a model, or the rest of the gain, differs from ours"
    if product(x, g) != entry.product:
        yield "the product of the sum and the direction differs from ours"
    gain = slopes.grand - slopes.empty
    if entry.points < 7 and abs(rest) > 1.05 * REST * abs(gain) + 1e-9:
        yield f"{entry.points} points of the path leave a rest of {rest:.3g} of the gain {gain:.3g}"
    whole = block_products(x, slopes, encoding, entry.step, entry.weight)
    most = BLOCKS_SLACK * max(map(abs, whole), default=0.0) + 1e-9
    if not all(abs(own - stated) <= most for own, stated in zip(whole, entry.blocks, strict=True)):
        yield "block products differ from ours"


def two_manifests(messages: Mapping[str, bytes], server: bytes) -> bool:
    """Return whether signed messages prove that a server made two manifests for one run."""
    manifests = set()
    for head in messages.values():
        ask, signed_by = Ask.unpack(Parcel(head, dict.fromkeys(SLICE, np.zeros(0))))
        if ask.exchange == "open" and signed_by(server):
            manifests.add((ask.run, ask.body.manifest))
    return len(manifests) > len({run for run, _ in manifests})
