"""A run as its ledger has it, folded from the records in one pass: `replay(ledger) -> Run`.

A ledger is read in the order in which it was written. Each record is checked once, against the run up to
there, and the first that is wrong ends the reading with a LedgerError that has its number. The fold is
divided by what records are about: `rounds.Rounds`, `account.SettlementFold`, `decisions.DecisionFold`. In a
member's copy, bodies that it withholds are None.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedmerit.config import Config
from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, canonical, commitment
from fedmerit.ledger import kinds
from fedmerit.ledger.account import KINDS as OF_SETTLEMENT
from fedmerit.ledger.account import Account, SettlementFold
from fedmerit.ledger.chain import LEDGER, Copy, Record, Records, reading, verified
from fedmerit.ledger.decisions import Approval, Decision, DecisionFold, OwnPart
from fedmerit.ledger.rounds import Rounds
from fedmerit.notes import Note, words
from fedmerit.protocol.outcome import Round
from fedmerit.protocol.pool import parts_of
from fedmerit.protocol.terms import EMBEDDED, REHEARSALS, roster_in
from fedmerit.scoring.sampling import scale_of

# --------------------------------------------------------------------------------------------- what it gives


@dataclass(frozen=True)
class HeadPlace:
    """The place of a head in the ledger."""

    record: int
    rounds: int  # how many rounds were closed by then

    @property
    def words(self) -> Note:
        """The place in words, for lines and messages."""
        if not self.rounds:
            return Note("place-before", record=self.record)
        return Note("place", record=self.record, rounds=self.rounds)


@dataclass(frozen=True, eq=False)
class Run:
    """What happened in a run, up to the last record of its ledger or copy."""

    path: Path  # of the ledger or the copy
    first: kinds.First  # the first record: keys, terms, first model
    pool: Mapping[str, Any]  # the second one: the commitment to the test pool
    config: Config  # the settings in the first record
    records: tuple[Record, ...]  # all of them, for what is judged with the archive
    rounds: tuple[Round, ...] = ()  # all closed ones, with their reports
    reader: str | None = None  # of a copy that withholds what others reported
    joined: tuple[str, ...] = ()  # who agreed to the terms
    open: Round | None = None  # that was begun and not closed
    settlement: SettlementFold | None = None  # what was stated and agreed, the equations, the verdicts
    accounts: tuple[Account, ...] = ()  # what that came to, each time it was recorded; the last one counts
    decisions: tuple[Decision, ...] = ()  # on payouts, recomputed
    approvals: tuple[Approval, ...] = ()  # of decisions, by members
    own: tuple[OwnPart, ...] = ()  # in a member's copy, what it can compute of its part in them
    heads: Mapping[str, HeadPlace] = field(default_factory=dict)  # the last one that each member signed
    places: Mapping[str, HeadPlace] = field(default_factory=dict)  # of every head there was
    end: Record | None = None  # the record that ends the run
    seen: frozenset[str] = frozenset()  # who signed the head after it

    @property
    def id(self) -> str:
        """The id of the run."""
        return self.first.run

    @property
    def name(self) -> str:
        """The folder or file, for messages."""
        return str(self.path.parent if self.path.name == LEDGER else self.path)

    @property
    def clients(self) -> tuple[str, ...]:
        """All members."""
        return self.config.clients

    @property
    def signed(self) -> bool:
        """Whether records are signed; without secure aggregation there are no keys."""
        return bool(self.first.keys)

    @property
    def rehearsal(self) -> bool:
        """Whether one process or one simulation held all keys."""
        return self.first.engine in REHEARSALS

    @property
    def head(self) -> str:
        """The last digest of the ledger."""
        return self.records[-1].digest.hex()

    @property
    def begun(self) -> tuple[Round, ...]:
        """All rounds that were begun."""
        return self.rounds if self.open is None else (*self.rounds, self.open)

    @property
    def account(self) -> Account | None:
        """What the settlement came to; None if the run is not settled."""
        return self.accounts[-1] if self.accounts else None

    def of(self, kind: str) -> list[Record]:
        """Return the records of a kind, in order."""
        return [record for record in self.records if record.kind == kind]

    def approved(self, decision: int) -> tuple[str, ...]:
        """Return who approved a decision."""
        return tuple(approval.member for approval in self.approvals if approval.decision == decision)

    @property
    def unsettled(self) -> str:
        """Why a run that members settle has no account, in words; empty if it has one, or none is due."""
        if self.account is not None or not self.config.settles:
            return ""
        return words(f"unsettled.{(self.settlement and self.settlement.why) or 'unfinished'}")

    def extended(self, decision: Decision, written: Sequence[Record]) -> Run:
        """Return the run with one more decision, whose records were just written."""
        return replace(
            self,
            decisions=(*self.decisions, replace(decision, record=written[0].seq)),
            records=(*self.records, *written),
        )


# ------------------------------------------------------------------------------------------------- replay


def replay(ledger: Records, *, member: str | None = None) -> Run:
    """Return the run in a ledger or in a copy of one; raise LedgerError at the first record that is wrong.

    ``member`` is who reads a copy that withholds records, if known; nothing of its own may be withheld.
    """
    fold: _Fold | None = None
    for record in verified(ledger.records(), kinds.keys_of):
        fold = fold or _Fold.begun(ledger, record, member)
        fold.add(record)
    return (fold or _Fold.begun(ledger, None, member)).finished()


def opening_of(ledger: Records) -> tuple[kinds.First, Config]:
    """Return what a ledger begins with, without reading on: keys and terms, and the settings."""
    return kinds.first_in(next(iter(ledger.records()), None), ledger.path)


# ------------------------------------------------------------------------------------------------- the fold


@dataclass
class _Fold:
    path: Path
    rounds: Rounds
    records: list[Record] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    heads: dict[str, HeadPlace] = field(default_factory=dict)
    places: dict[str, HeadPlace] = field(default_factory=dict)
    end: Record | None = None
    seen: set[str] = field(default_factory=set)

    @classmethod
    def begun(cls, ledger: Records, record: Record | None, member: str | None) -> _Fold:
        """Return a fold that has read nothing, from the first record; raise LedgerError if there is none."""
        first, config = kinds.first_in(record, ledger.path)
        assert record is not None
        with reading(record):
            _check_first(first, config)
        return cls(ledger.path, Rounds(first, {}, config, reader_of(ledger, config.clients, member)))

    def __post_init__(self) -> None:
        self.settlement = SettlementFold(self.rounds)
        self.decisions = DecisionFold(self.rounds, self.settlement)

    def add(self, record: Record) -> None:
        """Check the next record, and add what it says to the run."""
        if record.kind != "payout" and self.records:
            self.decisions.complete()
        config, reader = self.rounds.config, self.rounds.reader
        with reading(record):
            body = kinds.typed(record, config.clients, config.scoring.visibility)
            self._check_place(record)
            if record.withheld and reader in (None, record.author):
                raise LedgerError("withheld from its own author")
            if record.kind in ("report", "seen", "approval") and record.author not in self.joined:
                raise LedgerError("its author has not joined the run")
            self._fold(record, body)
        self.records.append(record)
        self.places[record.digest.hex()] = HeadPlace(record.seq, len(self.rounds.closed))

    def _check_place(self, record: Record) -> None:
        first = ("run", "pool")
        at = len(self.records)
        if record.kind != first[at] if at < len(first) else record.kind in first:
            raise LedgerError("expected the records run and pool first, and once")
        if self.end is not None and not kinds.KINDS[record.kind].late:
            raise LedgerError("comes after the end of the run")

    def _fold(self, record: Record, body: Any) -> None:
        kind, rounds = record.kind, self.rounds
        match kind:
            case "run":
                pass
            case "pool":
                _check_pool(body, rounds.first, rounds.config)
                rounds.pool = record.body
            case "join":
                self._join(record, body)
            case "seen":
                self._see(record, body)
            case "schedule":
                rounds.schedule(record, body, self.records[-1].digest.hex())
            case "scores" | "totals" | "score":
                rounds.states(record, body)
                self.decisions.totals |= {body.round: body.utilities} if kind == "totals" else {}
            case "decision" | "payout":
                self.decisions.add(record, body)
            case "approval":
                self.decisions.approve(record, body)
            case "end":
                rounds.end(record, body)
                self.end = record
            case _ if kind in OF_SETTLEMENT:
                self.settlement.add(record, body)
            case _:
                getattr(rounds, kind)(record, body)
                if kind == "report" and body and (place := self.places.get(body.bound_to["head"])):
                    self.heads[record.author] = place

    def _join(self, record: Record, body: kinds.Join) -> None:
        first = self.rounds.first
        agreed = {
            "identifier": (body.run, first.run),
            "terms": (body.terms, first.terms),
            "test pool": (body.commitment, self.rounds.pool),
            "server key": (body.server, (first.keys or {SERVER: ""})[SERVER]),
        }
        for term, (signed, recorded_) in agreed.items():
            if canonical(signed) != canonical(recorded_):
                raise LedgerError(f"its author did not agree to the run's {term}")
        if isinstance(body.held_out, kinds.HeldOut) != self.rounds.config.judged:
            raise LedgerError("commits to held-out samples without a panel, or not to any with one")
        if body.held_out and self.rounds.held_out.setdefault(record.author, body.held_out) != body.held_out:
            raise LedgerError("commits to other held-out samples than before")
        self.joined.append(record.author)

    def _see(self, record: Record, body: kinds.Seen) -> None:
        if body.run != self.rounds.first.run:
            raise LedgerError("belongs to another run")
        place = self.places.get(body.head)
        if place is None:
            raise LedgerError(f"its author saw a different history: no head before it is {body.head:.64}")
        if not body.round == place.rounds == len(self.rounds.closed):
            raise LedgerError(f"signs round {body.round}, but its head is of {place.words}")
        if self.end is None or record.author in self.seen:
            raise LedgerError("comes before the end of the run, or is the second one of its author")
        self.seen.add(record.author)
        self.heads[record.author] = place

    def finished(self) -> Run:
        """Return the run; raise LedgerError if something is lacking at the end."""
        if len(self.records) < 2:
            raise LedgerError("expected a ledger that begins with the records run and pool")
        self.rounds.check_stated()
        self.settlement.check_end()
        self.decisions.complete()
        rounds = self.rounds
        return Run(
            path=self.path,
            first=rounds.first,
            pool=rounds.pool,
            config=rounds.config,
            records=tuple(self.records),
            rounds=tuple(rounds.closed),
            reader=rounds.reader,
            joined=tuple(dict.fromkeys(self.joined)),
            open=None if rounds.open is None else _cut(rounds.open),
            settlement=self.settlement if self.settlement.begun else None,
            accounts=tuple(self.settlement.accounts),
            decisions=tuple(self.decisions.made),
            approvals=tuple(self.decisions.approvals),
            own=tuple(self.decisions.own),
            heads=self.heads,
            places=self.places,
            end=self.end,
            seen=frozenset(self.seen),
        )


def _cut(open_: Round) -> Round:
    """Return the round that is open; whoever has a masked input on record counts as included."""
    return replace(open_, included=tuple(name for name in open_.scheduled if name in (open_.inputs or {})))


def reader_of(ledger: Records, members: Sequence[str], given: str | None) -> str | None:
    """Return the member that a copy was made for, which may be given; None if it withholds nothing."""
    if given is not None and given not in members:
        raise LedgerError(f"{given!r} is not a member of the run; members are {', '.join(members)}")
    if not isinstance(ledger, Copy) or not any(record.withheld for record in ledger.records()):
        return None
    open_ = {record.author for record in ledger.records("report") if not record.withheld}
    if given is None and len(open_) != 1:
        raise LedgerError("this copy withholds records: say whose copy it is (--as NAME)")
    return given or next(iter(open_))


# --------------------------------------------------------------------------------- the first two records


def _check_first(first: kinds.First, config: Config) -> None:
    if not config.clients:
        raise LedgerError("its config names no members")
    if config.secure_aggregation.enabled != bool(first.keys):
        state = "off, but the ledger is signed" if first.keys else "on, but the ledger is unsigned"
        raise LedgerError(f"its config has secure aggregation {state}")
    if first.keys and set(first.keys) != {SERVER, *config.clients}:
        raise LedgerError("its keys are not those of the server and the members")
    if first.data is None and first.engine == EMBEDDED:
        raise LedgerError("data: expected a fingerprint of the training data")
    measures_numbers = first.engine == EMBEDDED and scale_of(config.scoring.utilities[0]) is not None
    if measures_numbers != (first.mean_answer is not None and math.isfinite(first.mean_answer)):
        needed = "a finite number" if measures_numbers else "no such field"
        raise LedgerError(f"constant: expected {needed}, got {first.mean_answer}")
    if first.engine == EMBEDDED:
        expected = (roster_in(config, first.public).hash.hex(), False, "server")
        if tuple(first.terms[key] for key in ("roster", "optimiser", "evaluates")) != expected:
            raise LedgerError("terms: not the terms of a rehearsal with its keys")


def _check_pool(pool: kinds.PoolBody, first: kinds.First, config: Config) -> None:
    size, slices, data, method = pool.size, pool.slices, config.data, config.scoring.method
    if slices > size or (not slices and method != "panel"):
        raise LedgerError(f"{size} test samples cannot be cut into {slices} slices")
    settled = pool.settled if isinstance(pool.settled, int) else None
    if (settled is not None) != config.settles:
        raise LedgerError(f"settled: expected only where members settle, but the method is {method!r}")
    whole = method == "settled" or (method == "panel" and size)
    if whole and (settled, slices) != (size, 1):
        raise LedgerError(f"settled: expected all {size} test samples in one slice, got {settled}")
    fits = settled is None or (1 <= settled < size and 1 <= slices - 1 <= size - settled)
    if method == "both" and not fits:
        raise LedgerError(
            f"settled: {settled} of {size} test samples in the last of {slices} slices leave too few for "
            "the rounds or for the settlement"
        )
    if first.engine != EMBEDDED:
        return  # the server brought its own test set
    if data.test_size not in (0, size) or bool(pool.balanced) != bool(data.test_size and pool.classes):
        raise LedgerError(f"holds {size} test samples, but the config asks for {data.test_size or 'all'}")
    reveal, rounds = data.test_reveal, config.training.rounds
    if (slices, settled or 0) != parts_of(size, method=method, reveal=reveal, rounds=rounds):
        raise LedgerError(
            f"{slices} slices, with {settled or 0} samples for the settlement, are not what "
            f"test_reveal = {reveal!r} and method = {method!r} make"
        )


# ------------------------------------------------------------------------------ what each member has seen
#
# A report signs the head before its round, and ``seen`` signs the head after the last round. Anyone who holds
# an old head, signed or merely written down, can detect a later rewrite: the head is then not on the chain.
#
# In a run between machines, a member keeps an ASCII file of what it was shown and did. Each line is written
# before the message that it describes is sent, and detects a server that misstates a run::
#
#     ROUND HEAD                       the head after that round, as it was shown
#     ROUND trained M0                 it masked an update: hash of the model that this update starts from
#     ROUND masked NAME DIGEST         and sent it: its own name (JSON), SHA-256 of the masked words
#     ROUND complained ["A", "B"]      A, this member, complained that B dealt it a bad share (JSON)
#     ROUND released ["A", "B", "C"]   it released shares, for the sum of these members (JSON)
#     ROUND report REPORT OUTCOME      hashes of what it reported, and of what the server said the round was
#     ROUND opened MANIFEST            after the last round, it was shown this list of directions (digest)
#     ROUND stated NAME HASH           and stated: its own name (JSON), hash of its statement
#
# ``trained`` and ``released`` show that the server has more sums than it states. Two sums of the same updates
# from the same M0, one of them without a member, give that member's update by subtraction. Models that differ
# at all have different hashes. If the server moves the model between rounds (an optimiser), the comparison of
# M0 only finds models that are exactly equal.

ENTRIES = ("trained", "masked", "complained", "released", "report", "opened", "stated")


def check_head(head: str, run: Run) -> HeadPlace:
    """Return the place of a stored head; raise LedgerError if it is not on this chain."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", head):
        raise LedgerError(f"a head is 64 hexadecimal digits, got {head!r:.80}")
    if head.lower() not in run.places:
        raise LedgerError(
            f"head {head.lower()} is not on this chain: the ledger was rewritten or cut off after somebody "
            "stored this head, or it is the head of another run"
        )
    return run.places[head.lower()]


def check_kept(path: Path, run: Run) -> Iterator[Note]:
    """Check a member's own file against the ledger; yield a line per kind of entry."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error
    log = _HeadLog(run)
    for at, line in enumerate(lines, start=1):
        try:
            log.add(line)
        except (LedgerError, ValueError) as error:  # int() refuses thousands of digits
            code = error.code if isinstance(error, LedgerError) else ""
            raise LedgerError(f"{path}: line {at}: {error!s:.400}", code=code) from error
    if not log.heads and not log.trained:
        raise LedgerError(f"{path}: holds no head")
    if log.heads:
        yield Note("kept-heads", heads=log.heads, path=str(path))
    yield from log.lines()


@dataclass
class _HeadLog:
    run: Run
    heads: int = 0
    trained: dict[int, str] = field(default_factory=dict)  # M0 by round
    released: dict[int, tuple[str, ...]] = field(default_factory=dict)  # members of the sum by round
    reports: int = 0
    lost: list[int] = field(default_factory=list)  # rounds whose report the ledger does not have
    unheard: list[Note] = field(default_factory=list)
    stated: list[Note] = field(default_factory=list)

    def add(self, words: str) -> None:
        """Compare one entry; raise LedgerError, or ValueError for a number that is none, if it differs."""
        number, _, entry = words.partition(" ")
        kind, _, text = entry.partition(" ")
        right = kind in ENTRIES and (kind != "report" or text.count(" ") == 1)
        if not number.isdecimal() or not entry or (text and not right):
            raise LedgerError(
                f"expected a round, and then a head or an entry ({', '.join(ENTRIES)}), as a member writes "
                f"them, got {words!r:.80}"
            )
        if text:
            getattr(self, f"_{kind}")(int(number), text)
        else:
            self._head(int(number), entry)

    def _head(self, number: int, head: str) -> None:
        self.heads += 1
        place = check_head(head, self.run)
        if place.rounds != number:
            raise LedgerError(f"shown as the head after round {number}, but it is the head of {place.words}")

    def _trained(self, number: int, m0: str) -> None:
        stated = self._m0(number)
        if stated not in (None, m0):
            raise LedgerError(
                f"this member did not train from the M0 that the ledger states for round {number}: "
                f"it trained from {m0:.64}, the ledger states {stated}"
            )
        self.trained[number] = m0

    def _masked(self, number: int, text: str) -> None:
        """Raise if the ledger has other masked words of this member; it has none if the answer was lost."""
        member, digest = _name_and_digest(text)
        if (stated := (self._round(number).inputs or {}).get(member, digest)) != digest:
            raise LedgerError(
                f"{member} did not send the masked words that the ledger states for round {number}: it sent "
                f"{digest:.64}, the ledger states {stated:.64}"
            )

    def _complained(self, number: int, text: str) -> None:
        """Raise if the ledger has the masked input that came with the complaint, and no blame."""
        member, dealer = _names(text, 2)
        round_ = self._round(number)
        if round_ is self.run.open or dealer in round_.blamed:
            return
        if member in (round_.inputs or {}):
            raise LedgerError(
                f"{member} complained in round {number} that {dealer} dealt it a bad share; the ledger has "
                "the masked input that this came with, and does not blame anybody for it"
            )
        self.unheard.append(Note("kept-unheard", round=number, client=member, other=dealer))

    def _released(self, number: int, text: str) -> None:
        included, round_ = _names(text), self._round(number)
        if self._ended(round_) == "summed" and included != round_.included:
            raise LedgerError(
                f"this member released shares for the sum of {', '.join(included)} in round {number}, but "
                f"the ledger says that the sum is of {', '.join(round_.included)}"
            )
        self.released[number] = included

    def _report(self, number: int, text: str) -> None:
        report, _, outcome = text.partition(" ")
        self.reports += 1
        round_ = self._round(number)
        recorded = round_.outcome and commitment({"round": number, **round_.outcome}).hex()
        if round_ is not self.run.open and recorded != outcome:
            raise LedgerError(
                f"the server told this member an outcome of round {number} (M0, M, total weight, who is in "
                f"the sum, test slice), but wrote {'a different one' if recorded else 'none'} into the ledger"
            )
        if report not in self._hashes["report"]:
            self.lost.append(number)

    def _opened(self, number: int, digest: str) -> None:
        manifest = None if self.run.settlement is None else self.run.settlement.manifest
        if manifest is not None and manifest.digest != digest:
            raise LedgerError(
                f"the server showed this member a manifest with digest {digest:.64}, and recorded another "
                f"one, {manifest.digest}: two manifests signed by one server prove that it is dishonest "
                "(fedmerit member show)",
                code="other-manifest",
            )

    def _stated(self, number: int, text: str) -> None:
        member, digest = _name_and_digest(text)
        recorded, account = self._hashes["statement"].get(member), self.run.account
        if recorded not in (None, digest):
            raise LedgerError(
                f"the ledger has another statement of {member} than it made: {recorded}, not {digest:.64}",
                code="left-out",
            )
        if recorded is None and account is not None and account.final:
            raise LedgerError(
                f"{member} stated, and the settlement was closed without its statement, {digest:.64}",
                code="left-out",
            )
        self.stated.append(Note("kept-stated" if recorded else "kept-unstated", client=member))

    @cached_property
    def _hashes(self) -> Mapping[str, Mapping[Any, str]]:
        """Hashes of bodies: of statements by author, of reports by themselves."""
        return {
            "statement": {one.author: one.commitment.hex() for one in self.run.of("statement")},
            "report": {one.commitment.hex(): one.author for one in self.run.of("report")},
        }

    def _round(self, number: int) -> Round:
        if not 1 <= number <= len(self.run.begun):
            raise LedgerError(
                f"this member trained in round {number}, which is not in the ledger: it was left out or cut "
                "off, or this is the file of another run"
            )
        return self.run.begun[number - 1]

    def _ended(self, round_: Round) -> Literal["summed", "aborted", "open"]:
        if round_ is self.run.open:
            return "open"
        return "aborted" if round_.aborted else "summed"

    def _m0(self, number: int) -> str | None:
        """Return the M0 that the ledger states for a round; None in an open round, if the server moves it."""
        round_ = self._round(number)
        if round_.outcome:
            return round_.outcome["m0"]
        if round_ is not self.run.open:
            return str(round_.body["m"])
        if number == 1:
            return self.run.first.m0
        return None if self.run.first.moves else str(self.run.rounds[number - 2].body["m"])

    def lines(self) -> Iterator[Note]:
        """Yield lines on what agrees, and on sums from which a server could learn an update."""
        if self.trained:
            yield Note("kept-trained", rounds=len(self.trained))
        for number, included in self.released.items():
            if (ended := self._ended(self._round(number))) != "summed":
                code = "kept-open" if ended == "open" else "kept-aborted"
                yield Note(code, round=number, clients=included)
        yield from self._sums_of_one_model()
        yield from self.unheard
        if self.reports:
            yield Note("kept-reports", there=self.reports - len(self.lost), reports=self.reports)
        if self.lost:
            yield Note("kept-lost", rounds=self.lost)
        yield from self.stated

    def _sums_of_one_model(self) -> Iterator[Note]:
        """Yield a line for each M0 from which different members were summed, this one among them."""
        summed = {
            closed.number: (self._m0(closed.number), closed.included)
            for closed in self.run.rounds
            if not closed.aborted
        }
        summed |= {number: (self.trained.get(number), names) for number, names in self.released.items()}
        by_model: dict[str | None, list[int]] = defaultdict(list)
        for number, (m0, _) in sorted(summed.items()):
            by_model[m0].append(number)
        for numbers in by_model.values():
            ours = any(number in self.released for number in numbers)
            if ours and len({frozenset(summed[number][1]) for number in numbers}) > 1:
                sums = [Note("kept-sum", round=number, clients=summed[number][1]) for number in numbers]
                yield Note("kept-same", rounds=numbers, sums=sums)


def _name_and_digest(text: str) -> tuple[str, str]:
    name, _, digest = text.rpartition(" ")
    return _names(f"[{name}]", 1)[0], digest


def _names(text: str, count: int | None = None) -> tuple[str, ...]:
    try:
        names = tuple(str(name) for name in json.loads(text))
    except (ValueError, TypeError, RecursionError):
        names = None
    if names is None or count not in (None, len(names)):
        raise LedgerError(f"expected the names of members as JSON, got {text!r:.80}")
    return names


def heads_signed(run: Run) -> Note:
    """Return a line on how far members' signatures reach."""
    if not run.heads:
        return Note("heads-none")
    furthest = max(run.heads.values(), key=lambda place: place.record)
    count = sum(place == furthest for place in run.heads.values())
    length = len(run.records)
    return Note("heads", signed=count, members=len(run.clients), place=furthest.words, records=length)
