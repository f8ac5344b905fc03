r"""What members state when a run is over, the equations that check it, and what the whole comes to.

Every member in the sum of a round states one integer, its product with the public direction of that round
(:mod:`fedmerit.protocol.direction`). The products of all of them add up to the product of their sum,

.. math:: \sum_i \Phi_i = \langle X, g \rangle,

exactly. Everybody who is in the sum and honest states the truth, so the others cannot raise their total: it
is what is left. The masks that were sent in the round prove everybody's product
(:mod:`fedmerit.secagg.naming`), and a drawn witness checks what both ends of a pair say of their mask
(:mod:`fedmerit.protocol.witness`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import MessageError, placing
from fedmerit.identity import SERVER, canonical, new_salt
from fedmerit.protocol.bench import panel_of
from fedmerit.protocol.direction import BLOCKS_SLACK, Along, Entry, Manifest, numeral, whole_number
from fedmerit.scoring.panel import Panel
from fedmerit.scoring.scores import from_blocks
from fedmerit.scoring.types import Scores
from fedmerit.secagg.board import RING, less, packed, part_of, signed_lanes, total

if TYPE_CHECKING:
    from fedmerit.secagg.naming import MaskTable

DAY = 86_400
CLOCKS = 3600
"""Seconds by which a member's clock may differ from the server's when it is told of a window."""
DIGITS = 17
"""Most bytes of a number of 64 bits, as text."""
STATEMENT = 2048
"""Most bytes of a statement, for each round."""
MOST_PART = 1e9
"""Beyond any part in the gain of a block that a utility has; larger numbers would overflow in the scores."""

# --------------------------------------------------------------------------------------------- statements


@dataclass(frozen=True)
class Statement:
    """What one member states, by the number of each round that it was summed in.

    ``rounds`` are its products, ``blocks`` its update's products with the gradient of every block, for
    standard errors; ``settlement`` is the digest of the manifest, ``masks`` the hash of its tables of masks
    (`tables_hash`), empty with words of 4 bytes.
    """

    member: str
    settlement: str
    rounds: Mapping[str, int]
    blocks: Mapping[str, tuple[float, ...]]
    masks: str = ""
    salt: str = field(default_factory=new_salt, compare=False)

    def body(self, run: str) -> dict[str, Any]:
        """Return the statement as it is signed and recorded."""
        return {
            "run": run,
            "salt": self.salt,
            "settlement": self.settlement,
            "masks": self.masks,
            "rounds": {key: numeral(value) for key, value in self.rounds.items()},
            "blocks": {key: [f"{value:.7g}" for value in values] for key, values in self.blocks.items()},
        }

    @classmethod
    def from_body(cls, member: str, body: Mapping[str, Any], manifest: Manifest) -> Statement:
        """Read a statement; raise MessageError unless it is one about this manifest."""
        expected = [str(entry.round) for entry in manifest.rounds if member in entry.participants]
        with placing("state", member):
            try:
                rounds = {str(key): whole_number(value) for key, value in body["rounds"].items()}
                blocks = {str(key): tuple(map(float, values)) for key, values in body["blocks"].items()}
                where = str(body["settlement"]), rounds, blocks
                read = cls(member, *where, str(body["masks"]), str(body["salt"]))
                same = read.body(manifest.run) == dict(body)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise MessageError(f"not a statement: {error!r:.120}") from None
            if not same or read.settlement != manifest.digest:
                raise MessageError("a statement of another run or settlement")
            if set(rounds) != set(expected) or set(blocks) != set(expected):
                raise MessageError(
                    f"expected a statement on the rounds {', '.join(expected)}, got one on "
                    f"{', '.join(rounds)!r:.100}"
                )
            sizes = {len(values) for values in blocks.values()} - {len(manifest.blocks)}
            if sizes or not all(abs(value) <= MOST_PART for values in blocks.values() for value in values):
                raise MessageError(
                    f"expected {len(manifest.blocks)} numbers per round, at most {MOST_PART:g}"
                )
            most = RING**manifest.lanes
            if manifest.lanes > 1 and not all(0 <= value < most for value in rounds.values()):
                raise MessageError("a statement with numbers of another size")
        in_order = {key: rounds[key] for key in expected}  # what is signed sorts 10 before 2
        return replace(read, rounds=in_order, blocks={key: blocks[key] for key in expected})


def statement_limit(manifest: Manifest) -> int:
    """Return the most bytes of a statement, which its reader compares before it parses one."""
    return STATEMENT * (2 + len(manifest.rounds)) + DIGITS * manifest.lanes * len(manifest.rounds)


def agreement(
    run: str, settlement: str, wrong: Sequence[int], released: Sequence[int], draw: str
) -> dict[str, Any]:
    """Return what a member signs after it has recomputed every direction.

    ``wrong`` are rounds whose direction, model or sum is not what it should be; ``released`` those that the
    manifest lacks although this member released shares for their sum. ``draw`` is the hash of the number that
    it opens for the draw of witnesses.
    """
    rounds = {"wrong": list(wrong), "released": list(released)}
    return {"run": run, "settlement": settlement, **rounds, "draw": draw}


def last_round(run: str, number: int) -> dict[str, Any]:
    """Return what members sign if a run ends before all its rounds are run."""
    return {"run": run, "last": number}


def countersignature(run: str, settled: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a member signs when it has seen what the settlement came to."""
    digest = hashlib.sha256(b"fedmerit/settled/1\n" + canonical(settled)).hexdigest()
    return {"run": run, "settlement": settled["settlement"], "sums": digest}


def false_number(value: int, factor: float, lanes: int) -> int:
    """Return another product, about so many times as large, for a rehearsal's lie."""
    each = (value,) if lanes == 1 else signed_lanes(value, lanes)
    false = [round(one * factor) + (round(one * factor) == one) for one in each]
    return false[0] if lanes == 1 else packed(false)


def name_hash(name: str) -> str:
    """Return a part of a file's name that stands for a member."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def words_kind(name: str) -> str:
    """Return the kind of archive file that holds a member's masked words of a round."""
    return f"words-{name_hash(name)}"


def table_body(run: str, settlement: str, along: Along, table: MaskTable) -> dict[str, Any]:
    """Return what a member signs of its masks in a direction."""
    pairs = {peer: numeral(value) for peer, value in table.pairs.items()}
    where = {"run": run, "settlement": settlement, **along.body()}
    return {**where, "pairs": pairs}


def tables_hash(tables: Iterable[Mapping[str, Any]]) -> str:
    """Return the hash of a member's tables of masks, as it signs them, in the order of the rounds."""
    return hashlib.sha256(b"fedmerit/tables/1\n" + canonical([*tables])).hexdigest()


def table_limit(members: Sequence[str], lanes: int = 1) -> int:
    """Return the most bytes of a table, which its reader compares before it parses one."""
    most = DIGITS * lanes
    return 1024 + most + sum(12 * len(name) + 64 + most for name in members)


def table_of(
    member: str, body: Mapping[str, Any], run: str, settlement: str, along: Along, lanes: int = 1
) -> MaskTable:
    """Read a table; raise MessageError unless it is one of this direction and settlement."""
    from fedmerit.secagg.naming import MaskTable  # it needs cryptography

    try:
        pairs = {str(peer): whole_number(value) for peer, value in body["pairs"].items()}
        table = MaskTable(member, pairs, lanes)
        same = table_body(run, settlement, along, table) == dict(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"not a table of masks: {error!r:.100}", stage="table", member=member) from None
    if not same:
        raise MessageError("a table of another direction or settlement", stage="table", member=member)
    return table


# ---------------------------------------------------------------------------------------------- equations


@dataclass(frozen=True)
class Equation:
    """The equation of a round: what was stated, and what it must add up to, also in each block."""

    entry: Entry
    stated: tuple[int | None, ...]  # None where nobody stated
    parts: tuple[tuple[float, ...] | None, ...]  # likewise, in each block
    lanes: int = 1  # numbers in each; more than one are packed

    @property
    def round(self) -> int:
        """Its number."""
        return self.entry.round

    @property
    def participants(self) -> tuple[str, ...]:
        """Everybody in the sum."""
        return self.entry.participants

    @property
    def product(self) -> int:
        """What must have been stated in all."""
        return self.entry.product

    @property
    def missing(self) -> tuple[str, ...]:
        """The members in the sum who have not stated."""
        return tuple(n for n, value in zip(self.participants, self.stated, strict=True) if value is None)

    @property
    def sum(self) -> int | None:
        """What was stated in all; None while somebody is missing."""
        return None if self.missing else self._total

    @property
    def rest(self) -> int:
        """What nobody has claimed yet."""
        return less(self.product, self._total, self.lanes)

    @property
    def _total(self) -> int:
        return total([value for value in self.stated if value is not None], self.lanes)

    @property
    def holds(self) -> bool:
        """Whether everybody stated, and it adds up."""
        return self.sum == self.product

    @cached_property
    def room(self) -> float:
        """How far sums of parts may be off, as far as machines agree.

        It follows from the median of the members' largest parts, so that who states false ones makes no room.
        """
        parts = np.array([part for part in self.parts if part is not None])
        usual = len(parts) * float(np.median(np.abs(parts).max(axis=1)))
        return BLOCKS_SLACK * (max(map(abs, self.entry.blocks)) + usual) + 1e-9

    @cached_property
    def odd(self) -> tuple[int, ...]:
        """The blocks in which everybody stated and the parts do not add up."""
        if self.missing or not self.entry.blocks:
            return ()
        off = np.abs(np.array(self.parts, np.float64).sum(axis=0) - self.entry.blocks)
        return tuple(np.flatnonzero(~(off <= self.room)).tolist())

    def body(self) -> dict[str, Any]:
        """Return what the ledger says of it."""
        return {
            "round": self.round,
            "participants": list(self.participants),
            "sum": None if self.sum is None else numeral(self.sum),
            "product": numeral(self.product),
            "holds": self.holds,
            "odd": list(self.odd),
        }


def equations(manifest: Manifest, statements: Mapping[str, Statement]) -> list[Equation]:
    """Return the equation of every round."""
    every = []
    for entry in manifest.rounds:
        stated, key = [statements.get(name) for name in entry.participants], str(entry.round)
        products = tuple(None if statement is None else statement.rounds[key] for statement in stated)
        parts = tuple(None if statement is None else statement.blocks[key] for statement in stated)
        every.append(Equation(entry, products, parts, manifest.lanes))
    return every


def fitting(statement: Statement, entry: Entry, along: Along) -> range:
    """Return the products in a direction that fit what a member stated.

    A part of a block fits within what its rounding and machines that differ explain.
    """
    key = str(along.round)
    if along.block is None:
        return range(statement.rounds[key], statement.rounds[key] + 1)
    part = statement.blocks[key][along.block]
    slack = BLOCKS_SLACK * max(map(abs, entry.blocks)) / len(entry.participants) + 1e-6 * abs(part)
    least, most = (part - slack) / along.scale, (part + slack) / along.scale
    return range(math.floor(least), math.ceil(most) + 1)


@dataclass(frozen=True)
class Proof:
    """What a verdict says of everybody's products in one direction.

    ``values`` are the products that masks prove, ``named`` who is named and why, ``silent`` who has not shown
    its masks.
    """

    along: Along
    values: Mapping[str, int]
    named: Mapping[str, str]
    silent: tuple[str, ...]

    def body(self) -> dict[str, Any]:
        """Return what a record ``verdict`` says of it."""
        return {
            **self.along.body(),
            "named": dict(self.named),
            "values": {name: numeral(value) for name, value in self.values.items()},
            "silent": list(self.silent),
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Proof:
        """Read a record ``verdict``."""
        values = {str(name): whole_number(value) for name, value in body["values"].items()}
        named = {str(name): str(why) for name, why in body["named"].items()}
        return cls(Along.from_body(body), values, named, tuple(map(str, body["silent"])))


Verdicts = Mapping[tuple[int, int | None], Proof]
"""By round and block; None for the integers of the round."""


# --------------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True)
class Settled:
    """What a settlement came to.

    ``verdicts`` are what masks proved where an equation or the parts of a block do not add up; ``closes`` is
    when the window closes (None once nobody is awaited); ``final`` says that nothing changes any more.
    """

    manifest: Manifest
    statements: Mapping[str, Statement]
    verdicts: Verdicts = field(default_factory=dict)
    closes: int | None = None
    final: bool = False
    pairs: tuple[int, int] = (0, 0)  # how many pairs of members in sums are witnessed, and how many there are
    withheld: tuple[str, ...] = ()  # in a copy: who stated what its reader may not see
    told: Sequence[Mapping[str, Any]] | None = None  # in such a copy: the equations as they are recorded

    @cached_property
    def equations(self) -> list[Equation]:
        """The equations, with what was stated."""
        return equations(self.manifest, self.statements)

    @property
    def holding(self) -> int:
        """How many equations hold."""
        return sum(equation["holds"] for equation in self.body()["rounds"])

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Everybody who was summed and has not stated."""
        missing = (name for equation in self.equations for name in equation.missing)
        return _each(name for name in missing if name not in self.withheld)

    @cached_property
    def named(self) -> dict[int, dict[str, str]]:
        """By round with a verdict, who lied and how; the server may be one of them."""
        by_round: dict[int, dict[str, str]] = {}
        for (round, _), proof in self.verdicts.items():
            named = by_round.setdefault(round, {})
            for name, why in proof.named.items():
                named.setdefault(name, why)
        return by_round

    @property
    def silent(self) -> dict[int, tuple[str, ...]]:
        """By round with a verdict, who has not shown its masks."""
        by_round: dict[int, tuple[str, ...]] = {}
        for (round, _), proof in self.verdicts.items():
            by_round[round] = _each((*by_round.get(round, ()), *proof.silent))
        return by_round

    def unsolved(self, equation: Equation) -> tuple[int | None, ...]:
        """Return in which of its directions an equation fails and masks have not said why (None: its own)."""
        proof = self.verdicts.get((equation.round, None))
        whole = () if equation.holds or (proof and proof.named) else (None,)
        return (*whole, *(block for block in equation.odd if (equation.round, block) not in self.verdicts))

    @property
    def unproved(self) -> tuple[str, ...]:
        """Everybody who stated, and has not shown what would prove it: of its masks, or as a witness."""
        stated = {*self.statements, *self.withheld}
        return _each(name for each in self.silent.values() for name in each if name in stated)

    @property
    def witnessed(self) -> bool:
        """Whether a witness, or an opened key, proves what both ends say of each pair of members."""
        return self.pairs[0] == self.pairs[1] > 0

    @property
    def awaited(self) -> tuple[str, ...]:
        """Everybody without whom the settlement is not final, unless t members sign that it is."""
        return (*self.missing, *self.unproved)

    @property
    def liars(self) -> tuple[str, ...]:
        """Everybody who was named in a round."""
        return _each(name for named in self.named.values() for name in named)

    @cached_property
    def odd_parts(self) -> dict[int, tuple[str, ...]]:
        """By round in which parts of a block do not add up and no masks proved why: whose are false.

        Nobody's, as far as anybody can tell, if all of them agree with the integers of their authors.
        """
        unproved = [
            equation
            for equation in self.equations
            if any((equation.round, block) not in self.verdicts for block in equation.odd)
        ]
        return {equation.round: self._forgers(equation) for equation in unproved}

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Everybody in a sum of which parts are false, and nothing says whose."""
        odd = (number for number, forgers in self.odd_parts.items() if not forgers)
        return _each(name for number in odd for name in self.manifest.entry(number).participants)

    def _forgers(self, equation: Equation) -> tuple[str, ...]:
        r"""Return whose parts contradict its own integer: with m_b of the m test samples in block b, unless

        .. math:: \sum_b \frac{m_b}{m} p_{ib} = s \Phi_i.
        """
        own = np.average(np.array(equation.parts), axis=1, weights=self.manifest.blocks)
        due = [
            (self.counts(equation.entry, name) or 0) * self.manifest.scale for name in equation.participants
        ]
        false = np.abs(own - due) > equation.room
        return tuple(name for name, odd in zip(equation.participants, false, strict=True) if odd)

    def parts(self, equation: Equation) -> npt.NDArray[np.float64]:
        """Return everybody's parts that count in a round, shape (members, blocks); 0 without a statement.

        Of who is named, what masks prove counts. Whose part neither counts nor is proved, shares what the
        others leave in that block.
        """
        nothing = (0.0,) * len(self.manifest.blocks)
        counting = np.array([part or nothing for part in equation.parts])
        for block in equation.odd:
            proof = self.verdicts.get((equation.round, block))
            out = {*self.odd_parts.get(equation.round, ())}
            if proof is not None:
                out = {name for name in proof.named if name not in proof.values}
                out |= {*proof.silent} - {*proof.values} if self.final else set()
                for name in {*proof.named} & {*proof.values}:
                    place = equation.participants.index(name)
                    counting[place, block] = proof.values[name] * proof.along.scale
            left = [name in out for name in equation.participants]
            if any(left):
                rest = equation.entry.blocks[block] - counting[~np.array(left), block].sum()
                counting[left, block] = rest / sum(left)
        return counting

    @cached_property
    def has_errors(self) -> bool:
        """Whether the parts of the blocks give standard errors of the scores of the run.

        Nobody's do where the settlement was closed without somebody's statement.
        """
        return (
            not self.final or bool(self.withheld) or not any(equation.missing for equation in self.equations)
        )

    def body(self) -> dict[str, Any]:
        """Return the record ``settled``."""
        return {
            "settlement": self.manifest.digest,
            "rounds": [equation.body() for equation in self.equations]
            if self.told is None
            else list(self.told),
            "named": list(self.liars),
            "missing": list(self.missing),
            "silent": list(self.unproved),
            "witnessed": list(self.pairs),
            "closes": self.closes,
            "final": self.final,
        }

    def judged(self, verdict: Mapping[str, Any]) -> Settled:
        """Return the settlement with one more record ``verdict``, which replaces an earlier one."""
        proof = Proof.from_body(verdict)
        return replace(self, verdicts={**self.verdicts, (proof.along.round, proof.along.block): proof})

    def value(self, entry: Entry, name: str) -> int | None:
        """Return a member's integer in a round: as proved, else as stated; None if neither counts.

        A statement counts unless its author is named, or silent about its masks at the final end.
        """
        if proof := self.verdicts.get((entry.round, None)):
            if name in proof.values:
                return proof.values[name]
            if name in proof.named or (self.final and name in proof.silent):
                return None
        return self.statements[name].rounds[str(entry.round)] if name in self.statements else None

    def counted(self, entry: Entry, name: str) -> int:
        """Return the integer that counts for a member in a round.

        While the settlement is open, who has none counts 0. Once it is final, those without one share what is
        left of the sum, also if that is negative: no coalition gains by a member who keeps silent.
        """
        values = {who: self.value(entry, who) for who in entry.participants}
        if (own := values[name]) is not None:
            return own
        proof = self.verdicts.get((entry.round, None))
        if not self.final or self.withheld or (proof and SERVER in proof.named):
            return 0
        left = self.left(entry)
        lanes = self.manifest.lanes
        rest = less(
            entry.product, total([value for value in values.values() if value is not None], lanes), lanes
        )
        return part_of(rest, len(left), left.index(name), lanes)

    def counts(self, entry: Entry, name: str) -> int | None:
        """Return the integer that counts for a member in a round; None while it has none."""
        final = self.final and not self.withheld
        return self.counted(entry, name) if final else self.value(entry, name)

    def left(self, entry: Entry) -> tuple[str, ...]:
        """Return who has no integer of its own in a round: what the others leave is theirs."""
        return tuple(name for name in entry.participants if self.value(entry, name) is None)

    def round_scores(self, entry: Entry, clients: Sequence[str] | None = None) -> Scores:
        """Return the score of everybody in a round, or of these members in it."""
        names = entry.participants if clients is None else clients
        columns = self._counting[entry.round][[entry.participants.index(name) for name in names]]
        return self._scores(names, [self.counted(entry, name) for name in names], columns)

    @cached_property
    def _counting(self) -> dict[int, npt.NDArray[np.float64]]:
        """By round, everybody's parts that count."""
        return {equation.round: self.parts(equation) for equation in self.equations}

    @cached_property
    def panel(self) -> Panel | None:
        """Who helped whom, in a run with a panel."""
        every = [entry.round for entry in self.manifest.rounds]
        return None if self.manifest.bench is None else self.panel_in(every)

    def panel_in(self, rounds: Collection[int]) -> Panel:
        """Return who helped whom in these rounds."""
        bench = self.manifest.bench
        assert bench is not None
        lanes = self.manifest.lanes
        counted = [
            {name: signed_lanes(self.counted(entry, name), lanes) for name in entry.participants}
            for entry in self.manifest.rounds
            if entry.round in rounds
        ]
        return panel_of(bench, self.manifest.coordinates, counted, self.panelists)

    @cached_property
    def columns(self) -> dict[str, bool]:
        """By judge, whether what was stated along its column adds up in every round."""
        bench = self.manifest.bench
        if bench is None:
            return {}
        whole = dict.fromkeys(bench.names, True)
        for row in self.body()["rounds"]:
            lanes = bench.lanes
            sums = None if row["sum"] is None else signed_lanes(whole_number(row["sum"]), lanes)
            products = signed_lanes(whole_number(row["product"]), lanes)
            for place, name in enumerate(bench.names):
                own = slice(2 * place, 2 * place + 2)
                whole[name] &= sums is not None and sums[own] == products[own]
        return whole

    @property
    def panelists(self) -> tuple[str, ...]:
        """Everybody in a panel: who was summed, and who judged."""
        bench = self.manifest.bench
        return _each((*self.manifest.members, *(() if bench is None else bench.names)))

    def totals(self, clients: Sequence[str]) -> Scores:
        """Return everybody's score over the run, with standard errors from the blocks."""
        own = [
            sum(self.counted(entry, name) for entry in self.manifest.rounds if name in entry.participants)
            for name in clients
        ]
        return self._scores(clients, own, [self.blocks(name) for name in clients])

    def blocks(self, name: str) -> tuple[float, ...]:
        """Return a member's products with every block, over the run; 0 if it did not state."""
        own = np.zeros(len(self.manifest.blocks))
        for entry in self.manifest.rounds:
            if name in entry.participants:
                own = own + self._counting[entry.round][entry.participants.index(name)]
        return tuple(own.tolist())

    def _scores(self, clients: Sequence[str], own: Sequence[int], columns: npt.ArrayLike) -> Scores:
        values = np.array([value * self.manifest.scale for value in own])
        if not self.has_errors:
            whole = math.fsum(values)
            return Scores(score="PHI", clients=tuple(clients), values=values, raw=values, gain=whole)
        scores = from_blocks(np.transpose(columns), self.manifest.blocks, clients)
        return replace(scores, values=values, raw=values, gain=math.fsum(values))


def _each(names: Iterable[str]) -> tuple[str, ...]:
    """Return every name once."""
    return tuple(dict.fromkeys(names))
