"""The settlement of a run, read from its records with every number recomputed that can be, and its account.

After the last round come ``last`` (only if the run ended early), ``opening`` (the manifest of all
directions), ``agreed`` by the members who recomputed them, ``table`` and ``statement`` by everybody who
states, what is said of witnesses (`fedmerit.protocol.witness`), where masks prove another number than was
stated ``verdict``, then ``settled`` (what it comes to) and ``countersigned``. A statement or a table may come
late, also after the end of the run; then another ``settled`` follows. While anybody is awaited, ``settled``
is final only if t members countersigned the day on which its window closes and, after that day, the final
record itself. A run that could not be settled has ``unsettled``, once for every attempt; a later one may
succeed.

Scores, payouts, the page and the score files of a settled run are made from its `Account`. A member who was
in a sum and has not stated has no score, and no rule pays it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np

from fedmerit.errors import LedgerError, UnsettledShares
from fedmerit.identity import SERVER, canonical, exact
from fedmerit.ledger import kinds
from fedmerit.ledger.chain import Record
from fedmerit.ledger.rounds import Rounds
from fedmerit.notes import Note, moment, words
from fedmerit.protocol.bench import COORDINATES, showing_body
from fedmerit.protocol.direction import Along, Entry, Manifest, whole_number
from fedmerit.protocol.judge import rounds_of
from fedmerit.protocol.settlement import (
    Equation,
    Proof,
    Settled,
    Statement,
    countersignature,
    fitting,
    tables_hash,
)
from fedmerit.protocol.terms import EMBEDDED
from fedmerit.protocol.witness import Book, drawn_for, is_witnessed, list_hash, nonce_hash, seed_of
from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.panel import Panel, hands, held_back
from fedmerit.scoring.rewards import Shares
from fedmerit.scoring.types import Scores
from fedmerit.scoring.uncertainty import training_of
from fedmerit.secagg.board import RING, less, signed_lanes, total

# --------------------------------------------------------------------------------------------- the account


@dataclass(frozen=True, eq=False)
class SettledRound:
    """A round with a sum: its equation, and its utility before and after on the settled test samples.

    What counts is as stated, unless the masks prove another number; for who has none, once the settlement is
    final, its part of what the others leave.
    """

    round: int
    participants: tuple[str, ...]
    stated: tuple[int | None, ...]  # None where nobody did, or where a copy withholds it
    counted: tuple[int | None, ...]  # None for who has none
    sum: int | None  # of what was stated; None while somebody is missing
    product: int  # what the sum must be, from the members' summed updates
    holds: bool
    left: tuple[str, ...]  # who stated nothing that counts, and masks prove no number either
    utility: str
    slice: str  # the settled test samples
    empty: float
    grand: float
    silent: tuple[str, ...]  # in the sum, but without a statement
    clients: tuple[str, ...] = ()  # who has a score
    scores: Scores | None = None  # their PHI; None if there are none

    @property
    def gain(self) -> float:
        """How much the utility of the shared model rose."""
        return self.grand - self.empty


@dataclass(frozen=True, eq=False)
class Account(Settled):
    """A settlement for scores, money and people: with what is derived from it, and who countersigned it."""

    clients: tuple[str, ...] = ()  # all members of the run
    threshold: int = 0  # how many countersignatures are needed
    countersigned: tuple[str, ...] = ()
    unwitnessed: tuple[str, ...] = ()  # who has a pair of which nothing proves what both ends say
    paying: tuple[int, ...] = ()  # the rounds that count for money in a panel: whose pairs have witnesses

    @property
    def scale(self) -> float:
        """Utility per integer unit of the equations."""
        return self.manifest.scale

    @cached_property
    def scored(self) -> tuple[str, ...]:
        """Who has a score: whoever stated, and once it is final also who did not."""
        stated = {name for name, statement in self.statements.items() if statement.rounds}
        if self.final:
            stated |= {*self.missing}  # what the others leave of a sum is then theirs
        return tuple(name for name in self.clients if name in stated)

    @cached_property
    def rounds(self) -> tuple[SettledRound, ...]:
        """The rounds with a sum, in order."""
        rows = zip(self.equations, self.body()["rounds"], strict=True)
        return tuple(self._round(equation, recorded) for equation, recorded in rows)

    def _round(self, equation: Equation, recorded: Mapping[str, Any]) -> SettledRound:
        entry = equation.entry
        clients = tuple(name for name in entry.participants if name in self.scored)
        return SettledRound(
            round=entry.round,
            participants=entry.participants,
            stated=equation.stated,
            counted=tuple(self.counts(entry, name) for name in entry.participants),
            sum=None if recorded["sum"] is None else whole_number(recorded["sum"]),
            product=entry.product,
            holds=recorded["holds"],
            left=self.left(entry),
            utility=self.manifest.utility,
            slice=self.manifest.pool,
            empty=entry.empty,
            grand=entry.grand,
            silent=tuple(name for name in entry.participants if name in self.missing),
            clients=clients,
            scores=self.round_scores(entry, clients) if clients and self.manifest.bench is None else None,
        )

    @property
    def panelists(self) -> tuple[str, ...]:
        there = super().panelists
        return tuple(name for name in self.clients if name in there)

    @property
    def gain(self) -> float:
        """The gain of all rounds, on the settled test samples; in a panel, of all judges together."""
        if self.panel is not None:
            return math.fsum(self.panel.scores.values)
        return math.fsum(entry.gain for entry in self.rounds)

    @property
    def unclaimed(self) -> float:
        """What the updates of missing members are worth together: nobody has claimed it."""
        if not self.missing or self.panel is not None:
            return 0.0
        open_ = (entry for entry in self.rounds if None in entry.counted)
        return sum(entry.product - sum(value or 0 for value in entry.counted) for entry in open_) * self.scale

    @property
    def unexplained(self) -> tuple[SettledRound, ...]:
        """The rounds whose equation fails although everybody stated, and for which nobody was named.

        But not those that t members closed without the masks of members who kept silent: what the others
        leave is theirs, as if they had not stated.
        """
        failed = [entry for entry in self.rounds if entry.sum not in (None, entry.product)]
        return tuple(
            entry for entry in failed if not self.named.get(entry.round) and not (self.final and entry.left)
        )

    def scores(self, missing: Missing = "zero") -> Scores:
        """Return PHI over the run, of everybody who stated; raise UnsettledShares if nobody has.

        With ``missing`` = "own-mean", a round without a member in its sum counts at the member's own mean.
        """
        count = len(self.rounds)
        if not self.scored:
            raise UnsettledShares(Note("settlement-nobody"), code="nobody")
        if self.panel is not None:
            return replace(self.panel.scores, rounds=count, notes=tuple(self._notes()))
        summed_in = [sum(name in entry.participants for entry in self.rounds) for name in self.scored]
        seen = np.array(summed_in, np.float64)
        factor = count / seen if missing == "own-mean" else np.ones(len(seen))
        partly = "summed-zero" if missing == "zero" else "summed-own-mean"
        notes = [
            Note(partly, client=name, seen=rounds, rounds=count)
            for name, rounds in zip(self.scored, summed_in, strict=True)
            if rounds < count
        ]
        own = self.totals(self.scored)
        by_round = [entry.scores.as_dict() for entry in self.rounds if entry.scores is not None]
        summed = replace(
            own,
            values=own.values * factor,
            raw=own.values * factor,
            stderr=None,
            blocks=None if own.blocks is None else own.blocks * factor,
            rounds=count,
            coverage=seen / count,
            gain=self.gain,
            training=training_of(by_round),
            notes=(*notes, *self._notes()),
        )
        covariance = summed.covariance
        return summed if covariance is None else replace(summed, stderr=np.sqrt(np.diag(covariance)))

    def _notes(self) -> Iterator[Note]:
        for name in self.missing:
            yield Note("not-stated-final" if self.final else "not-stated", client=name)
        for name in self.unproved:
            yield Note("not-shown-final" if self.final else "not-shown", client=name)
        if self.doubtful:
            yield Note("false-parts", clients=self.doubtful)
        if not self.has_errors:
            yield Note("no-errors")

    def provisional(self) -> Note | None:
        """Return why the settlement is not final: ``open``, ``silent`` or ``unclosed``; None if it is."""
        if self.final:
            return None
        if self.unproved:
            return Note("settlement-silent", clients=self.unproved)
        if self.closes is not None and time.time() >= self.closes:
            return Note("settlement-unclosed", clients=self.missing, needed=self.threshold)
        return Note("settlement-open", clients=self.missing, until=moment(self.closes))

    def check_payable(self, rule: str, *, despite: bool) -> None:
        """Raise UnsettledShares if an equation fails and nobody was named for it, unless paid ``despite`` it.

        The rule "equal" needs no score.
        """
        if self.unexplained and rule != "equal" and not despite:
            rounds = tuple(words("settled.round", round=entry.round) for entry in self.unexplained)
            raise UnsettledShares(Note("settlement-fails", rounds=rounds), code="fails")

    def shares(self, most: float, losses: Mapping[str, float]) -> Shares:
        """Return the shares of a panel: the rule hands, less what unwitnessed members and liars lose."""
        panel = self.paid
        return held_back(hands(panel.matrix, most, panel.clients), losses)

    @cached_property
    def paid(self) -> Panel:
        """The panel of the rounds that count for money; of all, for show, where none does.

        In a sum with too few members for witnesses, two of them could move credit.
        """
        assert self.panel is not None
        return self.panel_in(self.paying) if self.paying else self.panel

    def panel_block(self, clients: Sequence[str], most: float) -> dict[str, Any]:
        """Return the block ``panel`` of ``scores.json``: integers as text, null for what is unknown."""
        panel, bench, count = self.panel, self.manifest.bench, self.manifest.lanes
        assert panel is not None
        assert bench is not None
        rows = {name: place for place, name in enumerate(panel.clients)}
        places = [rows[name] for name in bench.names]
        matrix = {name: panel.matrix[row, places].tolist() for name, row in rows.items()}
        stated: dict[str, list[int]] = {}
        for entry in self.manifest.rounds:
            for name in entry.participants:
                if (value := self.counts(entry, name)) is not None:
                    own = zip(stated.get(name, [0] * count), signed_lanes(value, count), strict=True)
                    stated[name] = [before + more for before, more in own]
        sums = [sum(own) for own in zip(*stated.values(), strict=True)] or [0] * count
        errors, shares_ = panel.stderr, self.shares(most, {}) if len(panel.clients) >= 3 else {}
        scores = panel.scores.as_dict()

        def halves(numbers: Sequence[int] | None) -> list[list[str]] | None:
            if numbers is None:
                return None
            return [[str(numbers[2 * b]), str(numbers[2 * b + 1])] for b in range(len(bench.names))]

        return {
            "judges": list(bench.names),
            "matrix": [matrix.get(name) for name in clients],
            "stderr": None if errors is None else errors[places].tolist(),
            "stated": [halves(stated.get(name)) for name in clients],
            "sums": halves(sums),
            "holds": list(self.columns.values()),
            "gained": [judge.gained for judge in bench.judges],
            "rest": [judge.rest for judge in bench.judges],
            "odd": list(self.odd_judges),
            "PANEL": [scores.get(name) for name in clients],
            "shares": [shares_.get(name) for name in clients],
            "named": list(self.liars),
            "missing": list(self.missing),
            "silent": list(self.unproved),
            "witnessed": self.witnessed,
        }

    @property
    def odd_judges(self) -> tuple[str, ...]:
        """The judges whose columns add up to something else than their own samples gained."""
        panel, bench = self.panel, self.manifest.bench
        if panel is None or bench is None:
            return ()
        totals = dict(zip(panel.clients, panel.matrix.sum(axis=0).tolist(), strict=True))
        return tuple(judge.judge for judge in bench.judges if judge.is_odd(totals[judge.judge]))

    def block(self, clients: Sequence[str], missing: Missing = "zero") -> dict[str, Any]:
        """Return the block ``settlement`` of ``scores.json``: integers as text, null for what is unknown."""
        scores = self.scores(missing) if self.scored else None
        values = {} if scores is None else scores.as_dict()
        errors: dict[str, float] = {}
        if scores is not None and scores.stderr is not None:
            errors = dict(zip(scores.clients, scores.stderr.tolist(), strict=True))
        return {
            "score": "PHI",
            "cumulative": [values.get(name) for name in clients],
            "stderr": [errors.get(name) for name in clients],
            "rounds": [
                {
                    "round": entry.round,
                    "participants": list(entry.participants),
                    "phi": [None if value is None else value * self.scale for value in entry.counted],
                    "stated": [_text(value) for value in entry.stated],
                    "sum": _text(entry.sum),
                    "product": str(entry.product),
                    "holds": entry.holds,
                }
                for entry in self.rounds
            ],
            "named": list(self.liars),
            "missing": list(self.missing),
            "silent": list(self.unproved),
            "witnessed": self.witnessed,
        }


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


# ------------------------------------------------------------------------------------------ from a ledger

KINDS = {
    "last", "judged", "opening", "agreed", "statement", "table", "draw", "nonce", "drawn", "sealed",
    "witness", "verdict", "settled", "unsettled", "countersigned",
}  # fmt: skip
"""The kinds of records of a settlement."""
LIES = ("stated", "part", "pair", "range", "sum")
"""For what a verdict names somebody (`fedmerit.secagg.naming.Reason`); the last is for the server only."""
UNSETTLED = (
    "not-last",
    "not-drawn",
    "no-judges",
    "no-rounds",
    "no-gain",
    "not-finite",
    "no-gradient",
    "damaged",
    "off-gain",
)
"""Why a pool was not opened; once it is open, only ``not-agreed`` is left."""
UNCOUNTERSIGNED = "uncountersigned"
"""Code of the error for a settlement that was closed without t members' signatures."""


@dataclass(eq=False)
class SettlementFold:
    """The settlement of a run as its ledger has it, folded from its records one by one."""

    rounds: Rounds
    begun: bool = False
    last_signed: set[str] = field(default_factory=set)  # who signed that the run ended early
    manifest: Manifest | None = None  # the directions; None if none were made
    agreed: dict[str, kinds.AgreedTo] = field(default_factory=dict)  # by who signed it
    statements: dict[str, Statement] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()  # in a copy: who stated what its reader may not see
    hashes: dict[str, str] = field(default_factory=dict)  # of all statements, by author
    tables: dict[int, dict[str, Mapping[str, str]]] = field(default_factory=dict)  # of rounds, by member
    signed_tables: dict[str, list[Record]] = field(default_factory=dict)  # likewise, by author
    bench: Book | None = None  # the draw of a panel's coordinates, before there are directions
    showings: dict[str, Record] = field(default_factory=dict)  # what its judges show
    book: Book | None = None  # what is said of witnesses, once there are directions
    verdicts: dict[tuple[int, int | None], Proof] = field(default_factory=dict)
    accounts: list[Account] = field(default_factory=list)  # every time that it was recorded, in order
    why: str = ""  # why it was not settled, as a code
    windows: dict[int, set[str]] = field(default_factory=dict)  # by closing time, who countersigned it

    @property
    def needed(self) -> int:
        """How many countersignatures a window needs: none in a rehearsal where nothing is signed."""
        return self.rounds.config.threshold if self.rounds.first.keys else 0

    @property
    def account(self) -> Account | None:
        """What the settlement came to last."""
        return self.accounts[-1] if self.accounts else None

    def add(self, record: Record, body: Any) -> None:
        """Check a record with its typed body (None if a copy withholds it), and add what it says."""
        if not self.rounds.config.settles:
            raise LedgerError("is about a settlement, which this run does not have")
        self.begun = True
        if getattr(body, "run", self.rounds.first.run) != self.rounds.first.run:
            raise LedgerError("belongs to another run")
        before = getattr(body, "settlement", "") == COORDINATES or record.kind == "judged"
        if before and (self.manifest is not None or not self.rounds.config.judged):
            raise LedgerError("is about coordinates that are drawn, or judges without a panel")
        if not before and record.kind not in ("last", "opening", "unsettled"):
            self._check_manifest(body)
        getattr(self, f"_{record.kind}")(record, body)
        self.rounds.settling = self.rounds.settling or before or record.kind in ("last", "opening")

    def _check_manifest(self, body: Any) -> None:
        manifest = self.manifest
        if manifest is None or getattr(body, "settlement", manifest.digest) != manifest.digest:
            raise LedgerError("belongs to no manifest, or to another one")

    def _last(self, record: Record, body: kinds.Last) -> None:
        if self.manifest is not None or body.last != len(self.rounds.closed):
            raise LedgerError("signs another last round, or comes after the pool was opened")
        self.last_signed.add(record.author)

    def _opening(self, record: Record, body: kinds.Opening) -> None:
        if self.manifest is not None:
            raise LedgerError("opens the pool a second time")
        manifest = Manifest.from_body(record.body["manifest"])
        if body.settlement != manifest.digest:
            raise LedgerError("its manifest does not match its digest")
        if manifest.run != self.rounds.first.run:
            raise LedgerError("its manifest is of another run")
        self._check_bench(manifest)
        config, count = self.rounds.config, len(self.rounds.closed)
        planned, paid, signed = config.training.rounds, config.scoring.utilities[0], len(self.last_signed)
        if self.rounds.open is not None:
            raise LedgerError(f"opens the pool while round {self.rounds.open.number} is open")
        if count < planned and signed < config.threshold:
            raise LedgerError(
                f"opens the pool after {count} of {planned} rounds: {signed} members signed that this was "
                f"the last, {config.threshold} must"
            )
        if manifest.utility != paid:
            raise LedgerError(f"settles {manifest.utility}, expected {paid}")
        summed = [closed for closed in self.rounds.closed if not closed.aborted]
        if [closed.number for closed in summed] != [entry.round for entry in manifest.rounds]:
            raise LedgerError("its rounds are not those with a sum")
        for closed, entry in zip(summed, manifest.rounds, strict=True):
            stated = {"m0": entry.m0, "m": entry.m, "x": entry.x, "weight": exact(entry.weight)}
            outcome = closed.outcome or {}
            if {**outcome, **stated} != outcome or entry.participants != closed.included:
                raise LedgerError(f"its round {entry.round} is not the one that was summed")
        self.manifest, self.why, self.book = manifest, "", Book(manifest, config)

    def _check_bench(self, manifest: Manifest) -> None:
        """Raise LedgerError unless a panel's manifest follows from its draw, and from what judges signed."""
        config, bench, drawn = self.rounds.config, manifest.bench, self.bench
        if (bench is not None) != config.judged:
            raise LedgerError("is a panel where none was agreed on, or none where one was")
        if bench is None:
            return
        if drawn is None or not drawn.is_drawn or drawn.seed != bench.seed:
            raise LedgerError("its coordinates are not those that were drawn")
        blur = 0.0 if self.rounds.first.engine == EMBEDDED else config.panel.blur
        due = min(config.panel.coordinates, manifest.coordinates)
        if (bench.drawn, bench.blur) != (due, blur):
            raise LedgerError("its coordinates, their number or the noise are not those that were agreed on")
        if len(bench.judges) < config.threshold:
            raise LedgerError(f"has {len(bench.judges)} judges, and {config.threshold} are needed")
        facts = rounds_of(manifest).digest
        for judge in bench.judges:
            signed = self.showings.get(judge.judge)
            if signed is None or canonical(signed.body) != canonical(
                showing_body(self.rounds.first.run, facts, judge)
            ):
                raise LedgerError(f"{judge.judge} did not sign what it says of its column")

    def _judged(self, record: Record, body: kinds.JudgedBody) -> None:
        if record.author in self.showings or body.judge != record.author:
            raise LedgerError("judges a second time, or for somebody else")
        if self.bench is None or not self.bench.is_drawn:
            raise LedgerError("judges before its coordinates are drawn")
        held_out = self.rounds.held_out.get(record.author)
        if held_out is None or held_out.samples != body.samples:
            raise LedgerError("judges by other samples than its author committed to")
        self.showings[record.author] = record

    def _coordinates(self, record: Record, body: Any) -> None:
        """Take a record of the draw of a panel's coordinates, of numbers that members committed to."""
        t, config = self.rounds.config.threshold, self.rounds.config
        committed = {name: self.rounds.held_out[name].nonce for name in self.rounds.held_out}
        if self.bench is None:
            count, signed = len(self.rounds.closed), len(self.last_signed)
            if record.kind != "draw" or self.rounds.open is not None:
                raise LedgerError("comes before the draw of coordinates, or while a round is open")
            if count < config.training.rounds and signed < t:
                raise LedgerError("draws coordinates although too few members signed the last round")
            self.bench = Book(None, config, committed=committed)
        book = self.bench
        if record.kind == "draw" and (body.statements or not body.committed.items() <= committed.items()):
            raise LedgerError("lists numbers to which their authors did not commit")
        if record.kind == "draw" and len(body.committed) < t:
            raise LedgerError("is a draw among too few")
        getattr(self, f"_{record.kind}_of")(book, record, body)

    @property
    def _agreeing(self) -> int:
        return sum(not body.wrong for body in self.agreed.values())

    def _agreed(self, record: Record, body: kinds.AgreedTo) -> None:
        if record.author in self.agreed or record.author in self.statements:
            raise LedgerError("its author agreed or stated before")
        self.agreed[record.author] = body
        self._book.add(record.author, record.kind, record.body)

    def _statement(self, record: Record, body: kinds.StatementBody | None) -> None:
        assert self.manifest is not None
        if self._agreeing < self.rounds.config.threshold:
            raise LedgerError(
                f"states although {self._agreeing} members agreed and {self.rounds.config.threshold} must"
            )
        if record.author in self.statements or record.author in self.withheld:
            raise LedgerError("its author has stated before")
        self._check_open()
        self.hashes[record.author] = record.commitment.hex()
        if body is None:
            self.withheld += (record.author,)
            return
        statement = Statement.from_body(record.author, record.body, self.manifest)
        tables = [table.body for table in self.signed_tables.get(record.author, ())]
        rounds = [str(table["round"]) for table in tables]
        proves = self.rounds.config.word_bytes == 8
        if rounds != [*statement.rounds] * proves or statement.masks != (
            tables_hash(tables) if proves else ""
        ):
            raise LedgerError("its author signed other tables of masks before it")
        self.statements[record.author] = statement

    def _check_open(self) -> None:
        if self.account is not None and self.account.final:
            raise LedgerError("comes after the settlement was closed")

    def _table(self, record: Record, body: kinds.TableBody) -> None:
        entry = self._entry(Along.from_body(record.body))
        if record.author not in entry.participants:
            raise LedgerError("its author is not in the sum")
        for value in body.pairs.values():
            whole_number(value)
        if body.block is None:
            if record.author in self.tables.setdefault(body.round, {}):
                raise LedgerError("is the second table of its author")
            self.tables[body.round][record.author] = body.pairs
            self.signed_tables.setdefault(record.author, []).append(record)

    # ------------------------------------------------------------------------------------------- witnesses

    def _draw(self, record: Record, body: kinds.DrawBody) -> None:
        if body.settlement == COORDINATES:
            self._coordinates(record, body)
            return
        book, t = self._book, self.rounds.config.threshold
        if len(body.statements) < t or not body.statements.items() <= self.hashes.items():
            raise LedgerError("is a draw among statements that were not made")
        if dict(body.committed) != {name: book.committed.get(name) for name in body.statements}:
            raise LedgerError("lists numbers to which their authors did not commit")
        self._draw_of(book, record, body)

    def _draw_of(self, book: Book, record: Record, body: kinds.DrawBody) -> None:
        lists, t = (dict(body.statements), dict(body.committed)), self.rounds.config.threshold
        if book.seed or (book.listed and lists != (book.statements, book.listed)):
            raise LedgerError("is about another draw than the first one")
        if body.seed:
            counted = dict(body.nonces)
            true = len(counted) >= t and counted.items() <= book.nonces.items()
            if not true or seed_of(body.settlement, body.statements, counted) != body.seed:
                raise LedgerError("its seed does not follow from what members opened")
        elif body.nonces:
            raise LedgerError("states what was opened before it was")
        book.add(record.author, record.kind, record.body)

    def _nonce(self, record: Record, body: kinds.Opened) -> None:
        if body.settlement == COORDINATES:
            self._coordinates(record, body)
        else:
            self._nonce_of(self._book, record, body)

    def _nonce_of(self, book: Book, record: Record, body: kinds.Opened) -> None:
        if body.listed != list_hash(book.statements, book.listed) or record.author in book.nonces:
            raise LedgerError("opens a number for another draw, or a second time")
        if book.listed.get(record.author) != nonce_hash(bytes.fromhex(body.nonce)):
            raise LedgerError("opens another number than its author committed to")
        book.add(record.author, record.kind, record.body)

    def _drawn(self, record: Record, body: kinds.Drawn) -> None:
        if body.settlement == COORDINATES:
            self._coordinates(record, body)
        else:
            self._drawn_of(self._book, record, body)

    def _drawn_of(self, book: Book, record: Record, body: kinds.Drawn) -> None:
        if not book.seed or body.seed != book.seed or record.author in book.drawn:
            raise LedgerError("signs another draw, or a second time")
        book.add(record.author, record.kind, record.body)

    def _sealed(self, record: Record, body: kinds.Sealed) -> None:
        peers = {*body.sealed, *body.open}
        self._check_drawn(record, body, peers)
        if (body.round, record.author) in self._book.handed or record.author in peers:
            raise LedgerError("hands over keys a second time, or that of no pair")
        self._book.add(record.author, record.kind, record.body)

    def _witness(self, record: Record, body: kinds.Sighted) -> None:
        drawn = self._check_drawn(record, body, body.channels)
        for low, high, _ in (*body.values, *body.keys):
            if drawn.get(frozenset((low, high))) != record.author:
                raise LedgerError("is about a pair that its author does not witness")
        self._book.add(record.author, record.kind, record.body)

    def _check_drawn(
        self, record: Record, body: kinds.Sealed | kinds.Sighted, about: Iterable[str]
    ) -> dict[frozenset[str], str]:
        """Return the witnesses of a round; raise LedgerError unless this is about pairs that have some."""
        assert self.manifest is not None
        book, entry = self._book, self.manifest.entry(body.round)
        if not book.is_drawn or body.seed != book.seed:
            raise LedgerError("belongs to no draw that enough members signed, or to another one")
        if not is_witnessed(entry, book.config) or not {record.author, *about} <= {*entry.participants}:
            raise LedgerError("is about pairs that have no witnesses, or about members outside the sum")
        return drawn_for(entry, book.seed, book.config)

    @property
    def _book(self) -> Book:
        assert self.book is not None  # there is a manifest
        return self.book

    def _entry(self, along: Along) -> Entry:
        assert self.manifest is not None
        entry = self.manifest.entry(along.round)
        own = self.manifest.along(along.round) if along.block is None else None
        if own not in (None, along) or (own is None and (along.block or 0) >= len(self.manifest.blocks)):
            raise LedgerError("is about a direction that the manifest does not have")
        return entry

    def _verdict(self, record: Record, body: kinds.VerdictBody) -> None:
        proof = Proof.from_body(record.body)
        entry = self._entry(proof.along)
        key = (proof.along.round, proof.along.block)
        if (before := self.verdicts.get(key)) and (before.along != proof.along or not before.silent):
            raise LedgerError("is the second verdict on its direction, although nobody was silent before")
        if not {*proof.values, *proof.silent} <= set(entry.participants):
            raise LedgerError("is about members who are not in the sum")
        false = {"stated", "range"} if proof.along.block is not None else {"part"}
        for name, why in proof.named.items():
            if (why == LIES[-1]) != (name == SERVER) or why not in {*LIES} - false:
                raise LedgerError(f"names {name!r:.60} for {why!r:.40}")
        if not {*proof.named} <= {SERVER, *entry.participants}:
            raise LedgerError("names somebody who is not in the sum")
        self._check_proved(entry, proof)
        self.verdicts[key] = proof

    def _check_proved(self, entry: Entry, proof: Proof) -> None:
        """Raise LedgerError for proved integers that no evidence can give, so far as statements tell.

        Who is not named stated what its masks prove; and the integers of all members give the product of the
        sum, or the server is named.
        """
        stated, values = self.statements, proof.values
        for name in (name for name in values if name in stated and name not in proof.named):
            if values[name] not in fitting(stated[name], entry, proof.along):
                raise LedgerError(f"gives {name} another number than it stated, and does not name it")
        whole = {*values} == {*entry.participants}
        rest = less(proof.along.product, total([*values.values()], self._book.lanes), self._book.lanes)
        false = whole and rest % RING**self._book.lanes != 0
        if false != (SERVER in proof.named):
            raise LedgerError("its numbers do not add up, or it names the server although they do")

    def _settled(self, record: Record, body: kinds.SettledSums) -> None:
        assert self.manifest is not None
        config = self.rounds.config
        settled = Account(
            self.manifest, dict(self.statements), dict(self.verdicts), body.closes, body.final,
            self._book.pairs(self.tables, self.verdicts), self.withheld,
            body.rounds if self.withheld else None, config.clients, config.threshold,
        )  # fmt: skip
        away = settled.awaited if body.final else ()
        signed = bool(self.rounds.first.keys)  # else it is a rehearsal without masks, where nobody lies
        settled = replace(
            settled,
            unwitnessed=self._book.unwitnessed(self.tables, self.verdicts, away),
            paying=tuple(
                entry.round for entry in self.manifest.rounds if not signed or is_witnessed(entry, config)
            ),
        )
        if canonical(settled.body()) != canonical(record.body) or self._contradicts(settled):
            raise LedgerError("does not follow from the statements before it")
        self._check_verdicts(settled)
        self._check_window(settled)
        self._check_open()
        if config.judged:
            settled.panel_block(config.clients, config.panel.most)
        else:
            settled.block(config.clients)  # raises here if it gives no scores
        self.accounts.append(settled)

    def _contradicts(self, settled: Settled) -> bool:
        for own, recorded in zip_longest(settled.equations, settled.body()["rounds"]):
            if own is None or recorded is None or set(recorded) != set(own.body()):
                return True
            for key in ("sum", "product"):
                if recorded[key] is not None:
                    whole_number(recorded[key])
            open_ = not {*own.missing} <= {*self.withheld}
            odd = [block for block in range(len(own.entry.blocks)) if block in recorded["odd"]]
            holds = recorded["sum"] == recorded["product"]
            facts = {**own.body(), "sum": recorded["sum"], "holds": holds}
            facts |= {"odd": odd} if own.missing and not open_ else {}
            if canonical(recorded) != canonical(facts) or open_ != (recorded["sum"] is None):
                return True
        return False

    def _check_verdicts(self, settled: Settled) -> None:
        rounds = settled.body()["rounds"]
        failed = {(entry["round"], None) for entry in rounds if entry["sum"] not in (None, entry["product"])}
        failed |= {(entry["round"], block) for entry in rounds for block in entry["odd"]}
        for key in settled.verdicts:
            if key not in failed and (key[1] is not None or self.rounds.config.word_bytes == 4):
                raise LedgerError(f"comes after a verdict on round {key[0]}, whose equation does not fail")
        drawable = len(self.hashes) >= self.rounds.config.threshold
        for equation in settled.equations if settled.final and drawable else ():
            entry = equation.entry
            unseen, _ = self._book.unseen(entry, self.tables.get(entry.round, {}))
            proof = settled.verdicts.get((entry.round, None))
            excused = proof is not None and (self._book.is_drawn or bool(proof.silent))
            if not is_witnessed(entry, self.rounds.config) or equation.missing or excused:
                continue
            if unseen:
                raise LedgerError(f"is final, but nobody witnessed {unseen} pairs of round {entry.round}")

    def _check_window(self, settled: Settled) -> None:
        before = None if self.account is None else self.account.closes
        if not settled.final and settled.closes is None:
            raise LedgerError("is open, but states no day on which it closes")
        if before is not None and settled.closes is not None and settled.closes < before:
            raise LedgerError("closes earlier than stated before")
        if not (settled.final and settled.awaited):
            return
        if settled.closes is None or settled.closes != before:
            raise LedgerError("is closed without a window, although somebody is awaited")
        if (signed := len(self.windows.get(before, ()))) < self.needed:
            raise LedgerError(
                f"closes a window that {signed} members countersigned, {self.needed} are needed",
                code=UNCOUNTERSIGNED,
            )

    def check_end(self) -> None:
        """Raise LedgerError if the settlement was closed on members who are awaited, and t did not sign."""
        account = self.account
        if account is None or not account.final or not account.awaited:
            return
        if (signed := len(account.countersigned)) < self.needed:
            raise LedgerError(
                f"the settlement was closed without {', '.join(account.awaited)}, which {signed} members "
                f"countersigned, {self.needed} are needed",
                code=UNCOUNTERSIGNED,
            )

    def _unsettled(self, record: Record, body: kinds.Unsettled) -> None:
        if self.accounts:
            raise LedgerError("comes after the settlement")
        if body.settlement != (None if self.manifest is None else self.manifest.digest):
            raise LedgerError("belongs to no manifest, or to another one")
        if body.why not in (UNSETTLED if self.manifest is None else ("not-agreed",)):
            raise LedgerError(f"states an unknown reason: {body.why!r:.40}")
        signed = len(self.last_signed) if body.why == "not-last" else 0
        if max(self._agreeing, signed) >= self.rounds.config.threshold:
            raise LedgerError("states that too few members signed, but enough did")
        self.why = body.why

    def _countersigned(self, record: Record, body: kinds.Countersigned) -> None:
        account = self.account
        expected = account and countersignature(self.rounds.first.run, account.body())
        if account is None or dict(record.body) != expected or record.author in account.countersigned:
            raise LedgerError("countersigns something else, or a second time")
        self.accounts[-1] = replace(account, countersigned=(*account.countersigned, record.author))
        if not account.final and account.closes is not None:
            self.windows.setdefault(account.closes, set()).add(record.author)

    def lines(self, *, judged: bool) -> Iterator[Note]:
        """Yield what `verify` says; unless verdicts are ``judged`` anew, also how that is done."""
        for code, doubt in (("settlement-disagreed", "wrong"), ("settlement-released", "released")):
            doubted = {name: getattr(body, doubt) for name, body in self.agreed.items()}
            for number in sorted({number for numbers in doubted.values() for number in numbers}):
                clients = tuple(name for name, numbers in doubted.items() if number in numbers)
                yield Note(code, round=number, clients=clients)
        if (account := self.account) is None:
            yield Note("settlement-none", why=words(f"unsettled.{self.why or 'unfinished'}"))
            return
        yield from about(account, judged=judged)
        for equation in account.equations:
            if (forgers := account.odd_parts.get(equation.round)) is not None:
                clients = forgers or equation.participants
                code = "settlement-parts-false" if forgers else "settlement-parts"
                yield Note(code, round=equation.round, clients=clients)
        needed = account.threshold
        if account.awaited and not account.final:
            signed = len(self.windows.get(account.closes or 0, ()))
            if signed < needed:
                yield Note("settlement-unopened", count=signed, needed=needed)
        elif len(account.countersigned) < needed:
            yield Note("settlement-uncountersigned", count=len(account.countersigned), needed=needed)


def about(settled: Settled, *, judged: bool = True) -> Iterator[Note]:
    """Yield what a settlement came to: how many equations hold, who was named, who is missing."""
    if columns := settled.columns:
        yield Note("panel", holding=sum(columns.values()), judges=len(columns))
    else:
        yield Note("settlement", holding=settled.holding, equations=len(settled.equations))
    if settled.pairs[1]:
        code = "settlement-witnessed" if judged else "settlement-witnessed-told"
        yield Note(code, seen=settled.pairs[0], pairs=settled.pairs[1])
    for number, named in settled.named.items():
        for name, why in named.items():
            code = "settlement-named" if judged else "settlement-verdict"
            yield Note(code, round=number, client=name, how=words(f"lie.{why}"))
    if settled.missing:
        yield Note("settlement-rest" if settled.final else "settlement-missing", clients=settled.missing)
    if settled.unproved:
        code = "settlement-unshown-rest" if settled.final else "settlement-unshown"
        yield Note(code, clients=settled.unproved)
