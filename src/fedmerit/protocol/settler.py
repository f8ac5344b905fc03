"""A member's side of the settlement: it opens the test pool, recomputes every direction, and states.

Each message may reach a new process, so what was opened, agreed and stated is in the member's state. A member
agrees to one manifest only, trains in no round after the pool was opened, and states only once t members have
signed that every direction in that manifest is the gradient. It repeats its answers when it is asked again.
Being shown a second manifest before it agreed to one binds it to neither; it keeps both messages, whose
signatures prove that the server made two (`two_manifests`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import (
    BindingError,
    MessageError,
    RefusedError,
)
from fedmerit.identity import canonical, content
from fedmerit.protocol.direction import (
    BLOCKS_SLACK,
    REST,
    Direction,
    Entry,
    Gradient,
    Manifest,
    Slopes,
    as_units,
    block_products,
    blocks_of,
    differs,
    direction_hash,
    manifest_limit,
    product,
    slopes_of,
)
from fedmerit.protocol.memory import POOL, MemberState
from fedmerit.protocol.messages import LEAST_SAMPLES, Ask, pack, parsed, signed_by, unpack
from fedmerit.protocol.outcome import (
    as_array,
    file_name,
    included_hash,
    kept_opened,
    kept_stated,
    model_hash,
    moved,
    sum_hash,
)
from fedmerit.protocol.pool import Indices, Slice, samples_in
from fedmerit.protocol.settlement import (
    ALL,
    CLOCKS,
    DAY,
    Statement,
    agreement,
    countersignature,
    equations,
    last_round,
    statement_limit,
)
from fedmerit.protocol.terms import Agreed, lineage_of, scheduled_encoding
from fedmerit.secagg.quantise import Encoding, Words
from fedmerit.secagg.setting import LEAST_IN_SUM

if TYPE_CHECKING:
    from fedmerit.protocol.member import Participant

log = logging.getLogger("fedmerit")
Gradients = Callable[[Any, str], Gradient]
"""(shape noted by training, name of the utility) -> the gradient of its mean over a path."""

SETTLING = ("last", "open", "agree", "agreed", "state", "table", "pairs", "settle")
"""The exchanges of a settlement, in order."""
MANIFESTS = "manifests"
"""Where a member's state has the signed messages with which manifests were shown, by their digest."""
NEAR = 1e-3
"""How much two machines may disagree about the size of a direction, or a utility."""


class Settler:
    """One member in the settlement of one run, for the time it takes to answer a message.

    Args:
        member: the participant.
        state: what it remembers of the run.
        agreed: what it agreed to when it joined.
        run: identifier of the run.
        head: the signed bytes of the message that is answered.
    """

    def __init__(
        self, member: Participant, state: MemberState, agreed: Agreed, run: str, head: bytes = b""
    ) -> None:
        self.member, self.state, self.agreed, self.run, self.head = member, state, agreed, run, head
        self.config, self.name = agreed.config, member.name

    def answer(self, ask: Ask) -> bytes:
        """Answer one exchange of the settlement."""
        if self.config.scoring.method == "reports":
            raise RefusedError("this run is not settled", stage=ask.exchange, member=self.name)
        steps = {
            "last": self._last, "open": self._open, "agree": self._agree, "agreed": self._agreed,
            "state": self._state, "table": self._table, "pairs": self._pairs, "settle": self._settle,
        }  # fmt: skip
        return steps[ask.exchange](ask)

    # ------------------------------------------------------------------------------------------ open the pool

    def _last(self, ask: Ask) -> bytes:
        """Sign that a round is the last one, and take part in no later one."""
        total = self.config.training.rounds
        if not 1 <= ask.round < total:
            raise BindingError(f"expected a round before {total}, got round {ask.round}", stage="last")
        if (known := self.state.get("last")) not in (None, ask.round):
            raise RefusedError(f"has signed that round {known} is the last one", stage="last")
        if known is None and self.state.get("settlement") is not None:
            raise RefusedError("has been shown the pool, after which no other end is signed", stage="last")
        self.state.put("last", ask.round)
        return self.member.sign("last", last_round(self.run, ask.round))

    def _open(self, ask: Ask) -> bytes:
        """Check the opened pool and the manifest, and keep both."""
        text, config = ask.get("manifest", bytes), self.config
        most = manifest_limit(config.training.rounds, config.settlement.blocks, self.member.roster.names)
        if len(text) > most:
            raise MessageError(f"a manifest has at most {most} bytes, got {len(text)}", stage="open")
        manifest = _manifest_in(text)
        if canonical(manifest.body()) != text:
            raise MessageError("a manifest that is not written as servers write it", stage="open")
        kept, signed = self.state.get("settlement"), self.state.get("agreed")
        if kept is not None and kept[0] == manifest.digest:
            return pack([manifest.digest])
        self._remember(ask.round, manifest.digest)
        if signed is not None and not signed[0]:
            self.state.save()  # the proof is kept although this is refused
            raise RefusedError("has agreed to another manifest", stage="open", member=self.name)
        if (manifest.run, manifest.utility) != (self.run, self.config.scoring.utilities[0]):
            raise BindingError("a manifest of another run or utility", stage="open", member=self.name)
        self._check_last(ask)
        if manifest.rounds[-1].round > ask.round:
            raise BindingError(f"a manifest with rounds after the last one, {ask.round}", stage="open")
        self._check_participants(manifest)
        shown = ask.opened()
        if len(shown.y) < LEAST_SAMPLES and not self.member.rehearsal:
            raise MessageError(
                f"expected at least {LEAST_SAMPLES} test samples: a statement on fewer reveals too much",
                stage="open",
            )
        shown.verify_settlement(self.agreed.commitment)
        blocks, by_class = self._blocks(shown)
        if (manifest.pool, manifest.blocks) != (shown.id, tuple(map(len, blocks))) or (
            manifest.stratified != by_class
        ):
            raise BindingError("the manifest is about another pool, or other blocks", stage="open")
        if kept is None:  # there is one pool, which the commitment fixes
            self.state.room(shown.x.nbytes + shown.y.nbytes)
            self._refuse_known(shown)
            self.state.put(POOL, [_flat(shown.x), _flat(shown.y), shown.index])
        else:
            for entry in _manifest_in(bytes(kept[1])).rounds:
                self.state.put(file_name(entry.round, "stated"), None)
            self.state.put("agreed", None)
        self.state.put("settlement", [manifest.digest, text])
        return pack([manifest.digest])

    def _remember(self, number: int, settlement: str) -> None:
        """Keep the signed messages of two manifests: they prove that one server made both."""
        shown = dict(self.state.get(MANIFESTS) or {})
        if settlement in shown or len(shown) == 2:
            return
        shown[settlement] = self.head
        self.state.put(MANIFESTS, shown)
        self.state.add_kept(kept_opened(number, settlement))
        if len(shown) == 2 and not self.member.rehearsal:
            log.error(
                "%s was shown two manifests by one server, which proves that this server is dishonest: the "
                "signed messages are kept (fedmerit member show)",
                self.name,
            )

    def _check_participants(self, manifest: Manifest) -> None:
        """Raise unless every round has enough members that honest ones among them recompute its direction.

        Nobody else does so, and the scale of all directions follows from every round.
        """
        least = max(LEAST_IN_SUM, self.config.threshold)
        for entry in manifest.rounds:
            if len(entry.participants) < least or not set(entry.participants) <= set(
                self.member.roster.names
            ):
                raise BindingError(
                    f"round {entry.round} of the manifest has {len(entry.participants)} members, expected at "
                    f"least {least} of the roster",
                    stage="open",
                    member=self.name,
                )

    def _check_last(self, ask: Ask) -> None:
        """Raise unless the last round is the one agreed on, or t members signed that it is another."""
        if ask.round == self.config.training.rounds:
            return
        signed = ask.get("last", dict)
        body = last_round(self.run, ask.round)
        self._enough(
            (name for name, signature in signed.items() if self.is_signed(name, "last", body, signature)),
            f"that round {ask.round} is the last one",
            "open",
        )

    def _refuse_known(self, shown: Slice) -> None:
        """Raise if samples of this pool were shown before, in this run or an earlier one; remember them."""
        samples = samples_in(shown)
        before = set(self.state.get("shown") or ())
        lineage = None
        if self.member.between(self.agreed.terms):
            lineage = self.state.lineage(lineage_of(self.member.roster))
            before |= lineage.opened
        if known := before & samples:
            raise RefusedError(
                f"{len(known)} of the {len(shown.y)} samples of the pool were opened before, so members may "
                "have trained on them: a settled run needs samples that nobody has seen",
                stage="open",
                member=self.name,
            )
        if lineage is not None:
            lineage.opened |= samples
            self.state.put_lineage(lineage_of(self.member.roster), lineage)

    # ------------------------------------------------------------------------------------ agree on directions

    def _agree(self, ask: Ask) -> bytes:
        """Recompute the direction of a round and this member's product with it; say whether it is right."""
        manifest = self._manifest("agree")
        entry = manifest.entry(ask.round)
        if self.name not in entry.participants:
            return pack([True])
        if (stated := self.state.get(file_name(ask.round, "stated"))) is None:
            stated = self._recompute(ask, manifest, entry)
            self.state.put(file_name(ask.round, "stated"), stated)
        return pack([not stated[2]])

    def _recompute(self, ask: Ask, manifest: Manifest, entry: Entry) -> list[Any]:
        """Return this member's product in a round, those with every block, and what is wrong, if anything."""
        encoding, public, words, shape = self.contribution(entry.round)
        g = ask.array("g", "<i4", encoding.words)
        m0 = ask.array("m0", "<f4", encoding.length)
        x = ask.array("sum", "<u4", encoding.words)
        for what, found, expected in (
            ("direction", _cached(ask, "g", direction_hash, g), entry.g),
            ("M0", _cached(ask, "m0", model_hash, m0), entry.m0),
            ("sum", _cached(ask, "sum", sum_hash, x), entry.x),
        ):
            if found != expected:
                raise BindingError(f"a {what} that is not the manifest's", stage="agree", member=self.name)
        if problem := self._contradiction(entry):
            return ["0", [], problem]
        if manifest.coordinates != encoding.length:
            return ["0", [], f"the model has {encoding.length} coordinates, not {manifest.coordinates}"]
        total = None if public is None else math.fsum(public[name] for name in entry.participants)
        decoded = encoding.decode(x, included=len(entry.participants), public_total=total)
        m = moved(m0, decoded.weighted_sum, decoded.total_weight)
        if (decoded.total_weight, encoding.step, model_hash(m)) != (entry.weight, entry.step, entry.m):
            return ["0", [], "its total weight, step or model does not follow from the sum"]
        shown = self._pool(manifest)
        blocks, _ = self._blocks(shown)
        slopes, _, rest = slopes_of(
            self.member.gradient_for(shape, manifest.utility), m0, m, shown, blocks, entry.points
        )
        again = _Recomputed(manifest, entry, encoding, x, g, slopes, rest)
        problem = next(again.problems(), "")
        if problem:  # whether it could state the product of a false direction would tell something of it
            if not self.member.rehearsal:
                log.warning(
                    "%s disagrees with the direction of round %d: %s", self.name, entry.round, problem
                )
            return ["0", [], problem]
        own_blocks = block_products(words, slopes, encoding, entry.step, entry.weight)
        digits = [float(f"{value:.7g}") for value in own_blocks]  # seven do for standard errors
        return [str(product(words, g)), digits, ""]

    def _contradiction(self, entry: Entry) -> str:
        """Return how the manifest contradicts what this member signed in the round; empty if it does not.

        A member who never acknowledged a sum still knows the model that it trained and whom it signed for.
        """
        signed = self.state.get(file_name(entry.round, "signed"))
        told = {"m0": entry.m0, "m": entry.m, "x": entry.x, "included": included_hash(entry.participants)}
        if signed is None:
            client, _ = self.member.summed(self.state, entry.round)
            signed = {"m0": self.state.get(file_name(entry.round, "began"))}
            if client.survivors:
                signed["included"] = included_hash(client.survivors)
        odd = [key for key, value in signed.items() if told.get(key, value) != value]
        return f"its {', '.join(odd)} is not what was signed in the round" if odd else ""

    def contribution(self, number: int) -> tuple[Encoding, Mapping[str, float] | None, Words, Any]:
        """Return what this member brought to a sum: encoding, public weights, integers, shape."""
        client, update = self.member.summed(self.state, number)
        encoding, public = scheduled_encoding(
            self.config, as_array(update[0], "<f4").size, client.setting.members, update[3]
        )
        assert client.rounding is not None
        words = encoding.encode(as_array(update[0], "<f4"), weight=update[1], seed=client.rounding).words
        return encoding, public, words, update[2]

    def _agreed(self, ask: Ask) -> bytes:
        """Sign the manifest, or which of its rounds are wrong."""
        manifest = self._manifest("agreed")
        wrong = []
        for entry in manifest.rounds:
            if self.name not in entry.participants:
                continue
            stated = self.state.get(file_name(entry.round, "stated"))
            if stated is None:
                raise BindingError(f"was not shown the direction of round {entry.round}", stage="agreed")
            wrong += [entry.round] if stated[2] else []
        listed = {entry.round for entry in manifest.rounds if self.name in entry.participants}
        unlisted = [number for number in self._released() if number not in listed]
        wrong += [n for n in unlisted if self.state.get(file_name(n, "signed")) is not None]
        released = [n for n in unlisted if n not in wrong]
        body = agreement(self.run, manifest.digest, sorted(wrong), released)
        self.state.put("agreed", [sorted(wrong), released])
        return pack([sorted(wrong), released, self.member.sign("agreed", body)])

    def _released(self) -> list[int]:
        """Return the rounds for whose sum this member released shares."""
        return [int(number) for number in self.state.get("summed") or ()]

    # ------------------------------------------------------------------------------------------------- state

    def _state(self, ask: Ask) -> bytes:
        """State, if t members agreed on the manifest; the same again if asked again."""
        manifest = self._manifest("state")
        self._check_agreed(ask, manifest)
        if (said := self.state.get("statement")) is not None:
            return bytes(said)
        statement = self.statement(manifest)
        body = statement.body(self.run)
        answer = pack([canonical(body), self.member.sign("statement", body)])
        self.state.put("statement", answer)
        self.state.add_kept(kept_stated(ask.round, self.name, body))
        return answer

    def statement(self, manifest: Manifest) -> Statement:
        """Return what this member states."""
        rounds: dict[str, int] = {}
        blocks: dict[str, tuple[float, ...]] = {}
        for entry in manifest.rounds:
            if self.name in entry.participants:
                own, parts, _ = self.state.get(file_name(entry.round, "stated"))
                rounds[str(entry.round)], blocks[str(entry.round)] = self._said(int(own)), tuple(parts)
        if self.config.settlement.detail == "run" and rounds:
            summed = np.sum([list(values) for values in blocks.values()], axis=0)
            rounds, blocks = {ALL: sum(rounds.values())}, {ALL: tuple(summed.tolist())}
        return Statement(self.name, manifest.digest, rounds, blocks)

    def _said(self, own: int) -> int:
        """Return what this member says in place of its product; another number only in a rehearsal."""
        factor = self.member.misstates
        return own if factor is None else round(own * factor) + (round(own * factor) == own)

    def _check_agreed(self, ask: Ask, manifest: Manifest) -> None:
        own = self.state.get("agreed")
        if own is None or own[0]:
            raise RefusedError(
                "does not state: it did not agree to the directions", stage="state", member=self.name
            )
        good = []
        for row in ask.get("agreed", list):
            match row:
                case [str(name), list(released), bytes(signature)]:
                    body = agreement(self.run, manifest.digest, [], released)
                    if self.is_signed(name, "agreed", body, signature):
                        good.append(name)
        self._enough(good, "the directions", "state")

    # --------------------------------------------------------------------------------------------- naming

    def _table(self, ask: Ask) -> bytes:
        """Return the projections of this member's masks in a round, and its masked words again."""
        from fedmerit.protocol.naming import table_answer

        return table_answer(self, self._manifest("table"), ask)

    def _pairs(self, ask: Ask) -> bytes:
        """Open the keys of pairs about which the other end signed another number."""
        from fedmerit.protocol.naming import pairs_answer

        return pairs_answer(self, self._manifest("pairs"), ask)

    # -------------------------------------------------------------------------------------------- countersign

    def _settle(self, ask: Ask) -> bytes:
        """Countersign what the settlement came to, if this member's statement is in it and it adds up."""
        manifest = self._manifest("settle")
        text = ask.get("settled", bytes)
        names = self.member.roster.names
        most = manifest_limit(len(manifest.rounds) + 2, self.config.settlement.blocks, names)
        settled = parsed(text, "settlement", most)
        if canonical(settled) != text or settled.get("settlement") != manifest.digest:
            raise MessageError("not what this settlement came to", stage="settle")
        if (signed := self.state.get("settled")) is not None and bytes(signed) == text:
            return self.member.sign("countersigned", countersignature(self.run, settled))
        statements = self.statements_in(ask, manifest)
        said = self.state.get("statement")
        silent = self.name in settled["silent"] and settled["final"]
        left_out = self.name in settled["missing"] or silent
        if said is not None and (left_out or not self._is_in(ask, bytes(said))):
            raise RefusedError("its statement is not in the settlement", stage="settle", member=self.name)
        self._check_sums(manifest, settled, statements)
        self._check_end(settled)
        self._check_asked(manifest, settled)
        self.state.put("settled", text)
        self.state.put("closes", settled["closes"])
        if settled["final"] and not (settled["missing"] or settled["silent"]):
            self._forget()  # else a late answer can still come, if too few members sign this end
        return self.member.sign("countersigned", countersignature(self.run, settled))

    def _forget(self) -> None:
        """Delete updates, secrets of rounds and the pool: nobody will ask for them any more."""
        self.state.drop_rounds(before=self.config.training.rounds + 1, keep=("signed", "stated"))
        self.state.put(POOL, None)

    def statements_in(self, ask: Ask, manifest: Manifest) -> dict[str, Statement]:
        """Return the statements that this member is shown; each signed by its author."""
        found = {}
        for name, shown in ask.get("statements", dict).items():
            match shown:
                case [bytes(text), bytes(signature)]:
                    body = parsed(text, "settlement", statement_limit(manifest))
                    if not self.is_signed(str(name), "statement", body, signature):
                        raise BindingError(
                            "shown a statement that it did not sign", stage="settle", member=name
                        )
                    found[str(name)] = Statement.from_body(
                        str(name), body, manifest, detail=self.config.settlement.detail
                    )
        return found

    def _is_in(self, ask: Ask, said: bytes) -> bool:
        shown = ask.get("statements", dict).get(self.name)
        return shown is not None and pack(shown) == said

    def _check_sums(
        self, manifest: Manifest, settled: Mapping[str, Any], statements: Mapping[str, Statement]
    ) -> None:
        """Raise unless the sums follow from the statements, as far as this member is shown them."""
        own = [one.body() for one in equations(manifest, statements, self.config.settlement.detail)]
        told = settled["rounds"]
        everything = set(manifest.members) <= {*statements, *settled["missing"]}
        if not everything and self.config.scoring.visibility == "all":
            raise BindingError(
                "was not shown every statement that it counts", stage="settle", member=self.name
            )
        if everything and own != told:
            raise BindingError("its sums are not those of the statements", stage="settle", member=self.name)
        facts = [(one["round"], one["participants"], one["product"]) for one in own]
        if facts != [(one["round"], one["participants"], one["product"]) for one in told]:
            raise BindingError(
                "its equations are not those of the manifest", stage="settle", member=self.name
            )
        for one in told:
            if one["holds"] != (one["sum"] == one["product"]):
                raise BindingError("an equation does not hold as it says", stage="settle", member=self.name)

    def _check_end(self, settled: Mapping[str, Any]) -> None:
        """Raise if somebody is named without need, or this member, or if the window is closed early."""
        if settled["named"] and all(one["holds"] for one in settled["rounds"]):
            raise BindingError(
                "somebody is named though every equation holds", stage="settle", member=self.name
            )
        if self.name in settled["named"] and self.member.misstates is None:
            raise RefusedError("is named, and has not lied", stage="settle", member=self.name)
        closes, awaited = self.state.get("closes"), [*settled["missing"], *settled["silent"]]
        if settled["final"] and awaited and (closes is None or time.time() < closes):
            raise RefusedError("was not told of a window that is over now", stage="settle", member=self.name)
        if settled["final"] and not {*awaited} <= {*self.member.without}:
            raise RefusedError(
                f"its owner has not agreed to close the settlement without {', '.join(awaited)} (fedmerit "
                "member state --without)",
                stage="settle",
                member=self.name,
            )
        if not settled["final"]:
            least = time.time() + self.config.settlement.window_days * DAY - CLOCKS
            if not settled["closes"] >= (least if closes is None else closes):
                raise RefusedError("the window is shorter than agreed", stage="settle", member=self.name)

    def _check_asked(self, manifest: Manifest, settled: Mapping[str, Any]) -> None:
        """Raise if an equation fails for good and this member, which now forgets its masks, showed none."""
        if not settled["final"] or self.config.word_bytes == 4 or self.member.rehearsal:
            return
        failed = [one["round"] for one in settled["rounds"] if one["sum"] not in (None, one["product"])]
        for entry in manifest.rounds:
            due = self.name in entry.participants and (entry.round in failed or None in failed)
            if due and self.state.get(file_name(entry.round, "table")) is None:
                raise RefusedError(
                    f"has not been asked for its masks of round {entry.round}, whose equation fails",
                    stage="settle",
                    member=self.name,
                )

    # ---------------------------------------------------------------------------------------------- internals

    def _manifest(self, stage: str) -> Manifest:
        if (kept := self.state.get("settlement")) is None:
            raise BindingError("was not shown the pool", stage=stage, member=self.name)
        return _manifest_in(bytes(kept[1]))

    def _pool(self, manifest: Manifest) -> Slice:
        """Return the opened samples; they were hashed, and compared with the manifest, when they came."""
        x, y, index = self.state.get(POOL)
        return Slice(index=index, x=_shaped(x), y=_shaped(y), salts=b"", path=(), id=manifest.pool)

    def _blocks(self, shown: Slice) -> tuple[list[Indices], bool]:
        balanced = bool(self.agreed.commitment["balanced"])
        return blocks_of(shown, self.config.settlement.blocks, balanced=balanced)

    def is_signed(self, name: str, kind: str, body: Mapping[str, Any], signature: Any) -> bool:
        """Return whether a member signed a record; True in a rehearsal where nothing is signed."""
        if name not in self.member.roster.names:
            return False
        if self.member.identity is None:
            return True
        return isinstance(signature, bytes) and self.member.roster.verifies(
            name, signature, content(name, kind, body)
        )

    def _enough(self, names: Iterator[str] | Sequence[str], what: str, stage: str) -> None:
        given = len(set(names))
        if given < self.config.threshold:
            raise RefusedError(
                f"{given} members signed {what}, {self.config.threshold} are needed",
                stage=stage,
                member=self.name,
            )


def two_manifests(messages: Mapping[str, bytes], server: bytes) -> bool:
    """Return whether signed messages prove that a server made two manifests for one run.

    Args:
        messages: as a member's state has them (`MANIFESTS`).
        server: the server's public key.
    """
    shown = set()
    for head in messages.values():
        try:
            (_, _, inner, signature) = unpack(bytes(head), "a message")
            exchange, run, _, body, _ = unpack(inner, "a message")
            good = exchange == "open" and signed_by(inner, signature, server)
            shown |= {(run, bytes(body["manifest"]))} if good else set()
        except (MessageError, LookupError, TypeError, ValueError):
            continue
    return len(shown) > len({run for run, _ in shown})


@lru_cache(maxsize=2)
def _manifest_in(text: bytes) -> Manifest:
    """Return a manifest; a process reads it once, though it is asked about every round in it."""
    return Manifest.from_body(parsed(text, "settlement"))


@dataclass(frozen=True, eq=False)
class _Recomputed:
    """A round as a member recomputes it, beside what the manifest says of it."""

    manifest: Manifest
    entry: Entry
    encoding: Encoding
    x: Words
    g: Direction
    slopes: Slopes
    rest: float

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the manifest, in words."""
        entry, slopes, rest = self.entry, self.slopes, self.rest
        values = as_units(slopes, self.manifest.blocks, entry.step, entry.weight)
        if problem := differs(self.g, values, self.manifest.scale, self.encoding):
            yield problem
        size = float(np.abs(values).sum())
        if not abs(size - entry.size) <= NEAR * size:  # the scale follows from this
            yield "the size of the direction is another"
        utilities = ((slopes.empty, entry.empty), (slopes.grand, entry.grand), (rest, entry.rest))
        most = NEAR * max(abs(slopes.empty), abs(slopes.grand)) + 1e-9
        if not all(abs(own - said) <= most for own, said in utilities):
            yield "the utility of a model, or the rest of the gain, is another"
        if product(self.x, self.g) != entry.product:
            yield "the product of the sum and the direction is another"
        gain = slopes.grand - slopes.empty
        if entry.points < 7 and abs(rest) > 1.05 * REST * abs(gain) + 1e-9:
            yield f"{entry.points} points of the path leave a rest of {rest:.3g} of the gain {gain:.3g}"
        whole = block_products(self.x, slopes, self.encoding, entry.step, entry.weight)
        most = BLOCKS_SLACK * max(map(abs, whole), default=0.0) + 1e-9
        if not all(abs(own - said) <= most for own, said in zip(whole, entry.blocks, strict=True)):
            yield "the parts of the blocks are others"


def _flat(values: npt.NDArray[Any]) -> list[Any]:
    return [values.dtype.str, list(values.shape), np.ascontiguousarray(values).reshape(-1)]


def _shaped(kept: Sequence[Any]) -> npt.NDArray[Any]:
    kind, shape, values = kept
    found: npt.NDArray[Any] = np.asarray(as_array(values, kind)).view(kind).reshape(shape)
    return found


def _cached(ask: Ask, name: str, digest: Callable[[Any], str], values: Any) -> str:
    """Return an array's hash, computed once for members who share a process."""
    key = f"_hash_{name}"
    if key not in ask.__dict__:
        ask.__dict__[key] = digest(values)
    found: str = ask.__dict__[key]
    return found
