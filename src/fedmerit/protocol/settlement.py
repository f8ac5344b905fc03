r"""What members state when a run is over, the equations that check it, and what the whole comes to.

Every member in the sum of a round states one integer, its product with the public direction of that round
(:mod:`fedmerit.protocol.direction`). The products of all of them add up to the product of their sum,

.. math:: \sum_i \Phi_i = \langle X, g \rangle,

exactly. Everybody who is in the sum and honest states the truth, so the others cannot raise their total: it
is what is left. If all stated and the equation fails, the masks that were sent in the round say who lied
(:mod:`fedmerit.secagg.naming`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import MessageError
from fedmerit.identity import SERVER, canonical, new_salt
from fedmerit.protocol.direction import BLOCKS_SLACK, Entry, Manifest, whole_number
from fedmerit.scoring.scores import from_blocks
from fedmerit.scoring.types import Scores

ALL = "all"
"""In place of a round's number, where members state one number for the run."""

DAY = 86_400
CLOCKS = 3600
"""Seconds by which a member's clock may differ from the server's when it is told of a window."""
STATEMENT = 2048
"""Most bytes of a statement, for each round."""
MOST_PART = 1e9
"""Beyond any part in the gain of a block that a utility has; larger numbers would overflow in the scores."""

# --------------------------------------------------------------------------------------------- statements


@dataclass(frozen=True)
class Statement:
    """What one member states.

    Args:
        member: its name.
        settlement: digest of the manifest.
        rounds: by the number of each round that it was summed in, its product; or one for `ALL` of them.
        blocks: likewise, its update's products with the gradient of every block, for standard errors.
        salt: so that the record's hash reveals nothing.
    """

    member: str
    settlement: str
    rounds: Mapping[str, int]
    blocks: Mapping[str, tuple[float, ...]]
    salt: str = field(default_factory=new_salt, compare=False)

    def body(self, run: str) -> dict[str, Any]:
        """Return the statement as it is signed and recorded."""
        return {
            "run": run,
            "salt": self.salt,
            "settlement": self.settlement,
            "rounds": {key: str(value) for key, value in self.rounds.items()},
            "blocks": {key: [f"{value:.7g}" for value in values] for key, values in self.blocks.items()},
        }

    @classmethod
    def from_body(cls, member: str, body: Mapping[str, Any], manifest: Manifest, *, detail: str) -> Statement:
        """Read a statement; raise MessageError unless it is one about this manifest."""
        try:
            found = cls(
                member,
                str(body["settlement"]),
                {str(key): whole_number(value) for key, value in body["rounds"].items()},
                {str(key): tuple(map(float, values)) for key, values in body["blocks"].items()},
                str(body["salt"]),
            )
            same = found.body(manifest.run) == dict(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MessageError(f"not a statement: {error!r:.120}", stage="state", member=member) from None
        expected = due(manifest, member, detail)
        if not same or found.settlement != manifest.digest:
            raise MessageError("a statement of another run or settlement", stage="state", member=member)
        if set(found.rounds) != set(expected) or set(found.blocks) != set(expected):
            raise MessageError(
                f"expected a statement on the rounds {', '.join(expected)}, got one on "
                f"{', '.join(found.rounds)!r:.100}",
                stage="state",
                member=member,
            )
        for values in found.blocks.values():
            if len(values) != len(manifest.blocks) or not all(abs(value) <= MOST_PART for value in values):
                raise MessageError(
                    f"expected {len(manifest.blocks)} numbers per round, at most {MOST_PART:g}",
                    stage="state",
                    member=member,
                )
        rounds = {key: found.rounds[key] for key in expected}  # what is signed sorts 10 before 2
        return replace(found, rounds=rounds, blocks={key: found.blocks[key] for key in expected})


def statement_limit(manifest: Manifest) -> int:
    """Return the most bytes of a statement, which its reader compares before it parses one."""
    return STATEMENT * (2 + len(manifest.rounds))


def due(manifest: Manifest, member: str, detail: str) -> list[str]:
    """Return what a member must state on: the rounds that it was summed in, or all of them at once."""
    rounds = [str(one.round) for one in manifest.rounds if member in one.participants]
    return ([ALL] if rounds else []) if detail == "run" else rounds


def agreement(run: str, settlement: str, wrong: Sequence[int], released: Sequence[int]) -> dict[str, Any]:
    """Return what a member signs after it has recomputed every direction.

    Args:
        run: identifier of the run.
        settlement: digest of the manifest.
        wrong: rounds whose direction, model or sum is not what it should be.
        released: rounds that the manifest lacks although this member released shares for their sum.
    """
    return {"run": run, "settlement": settlement, "wrong": list(wrong), "released": list(released)}


def last_round(run: str, number_: int) -> dict[str, Any]:
    """Return what members sign if a run ends before all its rounds are run."""
    return {"run": run, "last": number_}


def countersignature(run: str, settled: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a member signs when it has seen what the settlement came to."""
    digest = hashlib.sha256(b"fedmerit/settled/1\n" + canonical(settled)).hexdigest()
    return {"run": run, "settlement": settled["settlement"], "sums": digest}


def name_hash(name: str) -> str:
    """Return a part of a file's name that stands for a member."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- equations


@dataclass(frozen=True)
class Equation:
    """The equation of a round, or of `ALL` rounds at once: what was stated, and what it must add up to."""

    round: int | None  # None for all at once
    participants: tuple[str, ...]
    stated: tuple[int | None, ...]  # None where nobody stated
    product: int

    @property
    def key(self) -> str:
        """Under what statements have it."""
        return ALL if self.round is None else str(self.round)

    @property
    def missing(self) -> tuple[str, ...]:
        """The members in the sum who have not stated."""
        return tuple(n for n, value in zip(self.participants, self.stated, strict=True) if value is None)

    @property
    def sum(self) -> int | None:
        """What was stated in all; None while somebody is missing."""
        return None if self.missing else sum(value for value in self.stated if value is not None)

    @property
    def rest(self) -> int:
        """What nobody has claimed yet."""
        return self.product - sum(value for value in self.stated if value is not None)

    @property
    def holds(self) -> bool:
        """Whether everybody stated, and it adds up."""
        return self.sum == self.product

    def body(self) -> dict[str, Any]:
        """Return what the ledger says of it."""
        return {
            "round": self.round,
            "participants": list(self.participants),
            "sum": None if self.sum is None else str(self.sum),
            "product": str(self.product),
            "holds": self.holds,
        }


def equations(manifest: Manifest, statements: Mapping[str, Statement], detail: str) -> list[Equation]:
    """Return the equation of every round, or one of all rounds."""

    def said(name: str, key: str) -> int | None:
        return statements[name].rounds[key] if name in statements else None

    if detail == "run":
        names = manifest.members
        return [Equation(None, names, tuple(said(name, ALL) for name in names), manifest.product)]
    return [
        Equation(
            one.round,
            one.participants,
            tuple(said(name, str(one.round)) for name in one.participants),
            one.product,
        )
        for one in manifest.rounds
    ]


def proved_in(verdict: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, str], tuple[str, ...]]:
    """Return what a record ``verdict`` says: proved integers, who is named for what, who was silent."""
    values = {str(name): whole_number(value) for name, value in verdict["values"].items()}
    named = {str(name): str(why) for name, why in verdict["named"].items()}
    return values, named, tuple(map(str, verdict["silent"]))


# --------------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True)
class Settled:
    """What a settlement came to.

    Args:
        manifest: the directions.
        statements: by member.
        detail: whether members stated per round ("rounds") or once ("run").
        values: by round and member, what masks proved in place of a statement.
        named: by round, who lied and how; the server may be one of them.
        silent: by round whose equation fails, who has not shown what would prove its statement.
        closes: when the window closes, in seconds since 1970; None once nobody is awaited.
        final: whether it is closed: nothing changes any more. While anybody is awaited, t members sign that.
        withheld: in a copy, who stated what its reader may not see.
        told: in such a copy, the equations as they are recorded.
    """

    manifest: Manifest
    statements: Mapping[str, Statement]
    detail: str = "rounds"
    values: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    named: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    closes: int | None = None
    final: bool = False
    silent: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()  # in a copy: who stated what its reader may not see
    told: Sequence[Mapping[str, Any]] | None = None  # in such a copy: the equations as they are recorded

    @cached_property
    def equations(self) -> list[Equation]:
        """The equations, with what was stated."""
        return equations(self.manifest, self.statements, self.detail)

    @property
    def holding(self) -> int:
        """How many equations hold."""
        return sum(one["holds"] for one in self.body()["rounds"])

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Everybody who was summed and has not stated."""
        found = dict.fromkeys(name for one in self.equations for name in one.missing)
        return tuple(name for name in found if name not in self.withheld)

    @property
    def unproved(self) -> tuple[str, ...]:
        """Everybody who stated, and was silent about its masks when an equation failed."""
        return tuple(dict.fromkeys(name for each in self.silent.values() for name in each))

    @property
    def awaited(self) -> tuple[str, ...]:
        """Everybody without whom the settlement is not final, unless t members sign that it is."""
        return (*self.missing, *self.unproved)

    @property
    def liars(self) -> tuple[str, ...]:
        """Everybody who was named in a round."""
        return tuple(dict.fromkeys(name for each in self.named.values() for name in each))

    @property
    def lies_over_run(self) -> dict[str, str]:
        """Who stated another number for the run than masks proved, round by round."""
        return {
            name: "stated"
            for name, statement in self.statements.items()
            if (proved := self.proved(name)) is not None and proved != statement.rounds.get(ALL, 0)
        }

    @cached_property
    def odd_parts(self) -> dict[int | None, tuple[str, ...]]:
        """By round in which everybody stated and the parts of the blocks do not add up: whose are false.

        Nobody's, as far as anybody can tell, if all of them agree with the integers of their authors.
        """
        whole_ones = [one for one in self.equations if not (self.withheld or one.missing)]
        return {one.round: forgers for one in whole_ones if (forgers := self._forgers(one)) is not None}

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Everybody in a sum of which parts are false, and nothing says whose."""
        odd = [one for one in self.equations if self.odd_parts.get(one.round) == ()]
        return tuple(dict.fromkeys(name for one in odd for name in one.participants))

    def _parts(self, equation: Equation) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return what everybody in a sum stated of every block, and what that must add up to."""
        entries = [entry.blocks for entry in self.manifest.rounds if equation.round in (None, entry.round)]
        stated = [self.statements[name].blocks[equation.key] for name in equation.participants]
        return np.array(stated), np.sum(entries, axis=0)

    def _forgers(self, equation: Equation) -> tuple[str, ...] | None:
        r"""Return whose parts contradict its own integer; None if the parts of every block add up.

        With m_b of the m test samples in block b, the parts of a member are false unless

        .. math:: \sum_b \frac{m_b}{m} p_{ib} = s \Phi_i

        as far as machines agree. How far that is follows from the gain and from the median of the members'
        largest parts, so that who states false ones does not make room for them.
        """
        parts, whole = self._parts(equation)
        usual = len(parts) * float(np.median(np.abs(parts).max(axis=1)))
        most = BLOCKS_SLACK * (float(np.abs(whole).max()) + usual) + 1e-9
        if (np.abs(parts.sum(axis=0) - whole) <= most).all():
            return None
        own = np.average(parts, axis=1, weights=self.manifest.blocks)
        due = [(self.counts(equation, name) or 0) * self.manifest.scale for name in equation.participants]
        false = np.abs(own - due) > most
        return tuple(name for name, odd in zip(equation.participants, false, strict=True) if odd)

    @property
    def has_errors(self) -> bool:
        """Whether the parts of the blocks give standard errors of the scores of the run.

        Nobody's do where the settlement was closed without somebody's statement. Where parts do not add up,
        everybody keeps its own, which no other member can change.
        """
        return not self.final or bool(self.withheld) or not any(one.missing for one in self.equations)

    def body(self) -> dict[str, Any]:
        """Return the record ``settled``."""
        return {
            "settlement": self.manifest.digest,
            "rounds": [one.body() for one in self.equations] if self.told is None else list(self.told),
            "named": list(self.liars),
            "missing": list(self.missing),
            "silent": list(self.unproved),
            "closes": self.closes,
            "final": self.final,
        }

    def judged(self, verdict: Mapping[str, Any]) -> Settled:
        """Return the settlement with one more record ``verdict``, which replaces an earlier one."""
        number = verdict["round"]
        values, named, silent = proved_in(verdict)
        return replace(
            self,
            values={**self.values, number: values} if number else self.values,
            named={**self.named, number: named},
            silent={**self.silent, number: silent},
        )

    def value(self, entry: Entry, name: str) -> int | None:
        """Return a member's integer in a round: as proved, else as stated; None if neither counts.

        A statement counts unless its author is named. Who is silent about its masks keeps it too, until t
        members close the settlement without them.
        """
        if (proved := self.values.get(entry.round, {}).get(name)) is not None:
            return proved
        if name in self.named.get(entry.round, {}) or self._given_up(name, entry.round):
            return None
        return self.statements[name].rounds[str(entry.round)] if name in self.statements else None

    def counted(self, entry: Entry, name: str) -> int:
        """Return the integer that counts for a member in a round.

        While the settlement is open, who has none counts 0. Once it is final, those without one share what is
        left of the sum, also if that is negative. So no coalition gains by a member who keeps silent: what
        the others of it took is missing there.
        """
        own = self.value(entry, name)
        if own is not None:
            return own
        known = {who: self.value(entry, who) for who in entry.participants}
        return self._of_rest(known, name, entry.product, entry.round)

    def counts(self, equation: Equation, name: str) -> int | None:
        """Return the integer that counts for a member in an equation; None while it has none."""
        final = self.final and not self.withheld
        if equation.round is None:
            return self._counted_over_run(name) if final else self._over_run(name)
        entry = self.manifest.entry(equation.round)
        return self.counted(entry, name) if final else self.value(entry, name)

    def left(self, equation: Equation) -> tuple[str, ...]:
        """Return who has no integer of its own in an equation: what the others leave is theirs."""
        if equation.round is None:
            return tuple(name for name in equation.participants if self._over_run(name) is None)
        entry = self.manifest.entry(equation.round)
        return tuple(name for name in equation.participants if self.value(entry, name) is None)

    def _given_up(self, name: str, number_: int) -> bool:
        """Return whether the settlement was closed without a member's masks of a round."""
        return self.final and name in self.silent.get(number_, ())

    def _of_rest(self, known: Mapping[str, int | None], name: str, product: int, number_: int) -> int:
        """Return a member's part of what is left of a sum."""
        if not self.final or self.withheld or SERVER in self.named.get(number_, {}):
            return 0
        left = [who for who, value in known.items() if value is None]
        part, more = divmod(product - sum(value for value in known.values() if value is not None), len(left))
        return part + (left.index(name) < more)

    def _counted_over_run(self, name: str) -> int:
        own = self._over_run(name)
        if own is not None:
            return own
        if name not in self.manifest.members:
            return 0
        known = {who: self._over_run(who) for who in self.manifest.members}
        return self._of_rest(known, name, self.manifest.product, 0)

    def proved(self, name: str) -> int | None:
        """Return a member's integer over all its rounds, if masks proved each of them; else None."""
        found = [self.values.get(one.round, {}).get(name) for one in self._of(name)]
        return None if any(value is None for value in found) else sum(value or 0 for value in found)

    def _over_run(self, name: str) -> int | None:
        """Return a member's integer over the run, where it states one number: as proved, else as stated."""
        if (proved := self.proved(name)) is not None:
            return proved
        if name in self.liars or any(self._given_up(name, number_) for number_ in self.silent):
            return None
        return self.statements[name].rounds.get(ALL, 0) if name in self.statements else None

    def _of(self, name: str) -> list[Entry]:
        return [one for one in self.manifest.rounds if name in one.participants]

    def round_scores(self, entry: Entry) -> Scores:
        """Return everybody's score in a round. Needs detail "rounds"."""
        own = [self.counted(entry, name) for name in entry.participants]
        equation = self.equations[self.manifest.rounds.index(entry)]
        parts = [self._blocks(equation, name) for name in entry.participants]
        return self._scores(entry.participants, own, parts)

    def scores(self, clients: Sequence[str]) -> Scores:
        """Return everybody's score over the run, with standard errors from the blocks."""
        if self.detail == "run":
            own = [self._counted_over_run(name) for name in clients]
        else:
            own = [sum(self.counted(one, name) for one in self._of(name)) for name in clients]
        return self._scores(clients, own, [self.blocks(name) for name in clients])

    def blocks(self, name: str) -> tuple[float, ...]:
        """Return a member's products with every block, over the run; 0 if it did not state."""
        parts = [self._blocks(one, name) for one in self.equations if name in one.participants]
        return tuple(np.sum(parts, axis=0).tolist()) if parts else (0.0,) * len(self.manifest.blocks)

    def _blocks(self, equation: Equation, name: str) -> tuple[float, ...]:
        """Return a member's parts as stated; who stated false ones shares what the others leave."""
        if name in (forgers := self.odd_parts.get(equation.round, ())):
            parts, whole = self._parts(equation)
            honest = [who not in forgers for who in equation.participants]
            return tuple(((whole - parts[honest].sum(axis=0)) / len(forgers)).tolist())
        if name in self.statements:
            return self.statements[name].blocks[equation.key]
        return (0.0,) * len(self.manifest.blocks)

    def _scores(
        self, clients: Sequence[str], own: Sequence[int], columns: Sequence[Sequence[float]]
    ) -> Scores:
        values = np.array([value * self.manifest.scale for value in own])
        if not self.has_errors:
            return Scores(
                score="PHI", clients=tuple(clients), values=values, raw=values, gain=math.fsum(values)
            )
        found = from_blocks(np.transpose(columns), self.manifest.blocks, clients)
        return replace(found, values=values, raw=values, gain=math.fsum(values))
