"""The settlement in the ledger: read from its records, with every number recomputed that can be.

After the last round come ``last`` (only if the run ended early), ``opening`` (the manifest of all
directions), ``agreed`` by the members who recomputed them, ``statement`` by everybody who states, where an
equation fails ``table`` and ``verdict``, then ``settled`` (what it comes to) and ``countersigned``. A
statement or a table may come late, also after the end of the run; then another ``settled`` follows. While
anybody is awaited, ``settled`` is final only if t members countersigned the day on which its window closes
and, after that day, the final record itself. A run that could not be settled has ``unsettled``, once for
every attempt; a later one may succeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

from fedmerit.config import Config
from fedmerit.errors import LedgerError
from fedmerit.identity import SERVER, canonical, exact
from fedmerit.ledger.chain import Record, Records
from fedmerit.ledger.records import first_body, reading
from fedmerit.notes import Note, words
from fedmerit.protocol.direction import Entry, Manifest, whole_number
from fedmerit.protocol.outcome import Round
from fedmerit.protocol.settlement import Settled, Statement, countersignature, proved_in

KINDS = (
    "last",
    "opening",
    "agreed",
    "statement",
    "table",
    "verdict",
    "settled",
    "unsettled",
    "countersigned",
)
"""The kinds of records of a settlement."""
LIES = ("stated", "pair", "masked", "range", "sum")
"""For what a verdict names somebody (`fedmerit.secagg.naming.Reason`); the last is for the server only."""
UNSETTLED = ("not-last", "no-rounds", "no-gain", "not-finite", "no-gradient", "damaged", "off-gain")
"""Why a pool was not opened; once it is open, only ``not-agreed`` is left."""
UNCOUNTERSIGNED = "uncountersigned"
"""Code of the error for a settlement that was closed without t members' signatures."""
RING = 2**64
"""Masks prove integers modulo this."""


@dataclass(eq=False)
class Book:
    """The settlement of a run, as its ledger has it.

    Args:
        manifest: the directions; None if none were made.
        agreed: who signed that they are right, and who that some are wrong.
        released: likewise for which rounds that are not settled it released shares.
        settled: what it came to; None if it was not settled (yet).
        why: why it was not, as a code; empty if it was.
        countersigned: who countersigned the last word.
        threshold: how many signatures it needs.
    """

    manifest: Manifest | None = None
    agreed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    released: dict[str, tuple[int, ...]] = field(default_factory=dict)
    statements: dict[str, Statement] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()  # in a copy: who stated what its reader may not see
    values: dict[int, dict[str, int]] = field(default_factory=dict)
    named: dict[int, dict[str, str]] = field(default_factory=dict)
    silent: dict[int, tuple[str, ...]] = field(default_factory=dict)
    settled: Settled | None = None
    history: list[Settled] = field(default_factory=list)  # every one that was recorded, in order
    why: str = ""
    countersigned: tuple[str, ...] = ()
    windows: dict[int, set[str]] = field(default_factory=dict)  # by closing time, who countersigned it
    threshold: int = 0
    told: Mapping[str, Any] = field(default_factory=dict)  # the last record ``settled``

    @property
    def holding(self) -> int:
        """How many equations hold."""
        return 0 if self.settled is None else self.settled.holding

    def lines(self, *, judged: bool) -> Iterator[Note]:
        """Yield what `verify` says of the settlement.

        Args:
            judged: whether every verdict is judged anew; otherwise the lines on who lied say how to do that.
        """
        for number in sorted({one for wrong in self.agreed.values() for one in wrong}):
            clients = tuple(name for name, wrong in self.agreed.items() if number in wrong)
            yield Note("settlement-disagreed", round=number, clients=clients)
        for number in sorted({one for rounds in self.released.values() for one in rounds}):
            clients = tuple(name for name, rounds in self.released.items() if number in rounds)
            yield Note("settlement-released", round=number, clients=clients)
        if self.settled is None:
            yield Note("settlement-none", why=words(f"unsettled.{self.why or 'unfinished'}"))
            return
        yield from about(self.settled, judged=judged)
        for one in self.settled.equations:
            if (forgers := self.settled.odd_parts.get(one.round)) is not None:
                clients = forgers or one.participants
                if one.round is None:
                    code = "settlement-parts-false-run" if forgers else "settlement-parts-run"
                    yield Note(code, clients=clients)
                else:
                    code = "settlement-parts-false" if forgers else "settlement-parts"
                    yield Note(code, round=one.round, clients=clients)
        if self.settled.awaited and not self.settled.final:
            signed = len(self.windows.get(self.settled.closes or 0, ()))
            if signed < self.threshold:
                yield Note("settlement-unopened", count=signed, needed=self.threshold)
        elif len(self.countersigned) < self.threshold:
            yield Note("settlement-uncountersigned", count=len(self.countersigned), needed=self.threshold)


def about(settled: Settled, *, judged: bool = True) -> Iterator[Note]:
    """Yield what a settlement came to: how many equations hold, who was named, who is missing."""
    yield Note("settlement", holding=settled.holding, equations=len(settled.equations))
    for number, named in settled.named.items():
        for name, why in named.items():
            how = words(f"lie.{why}")
            if number:
                code = "settlement-named" if judged else "settlement-verdict"
                yield Note(code, round=number, client=name, how=how)
            else:
                code = "settlement-named-run" if judged else "settlement-verdict-run"
                yield Note(code, client=name, how=how)
    if settled.missing:
        yield Note("settlement-rest" if settled.final else "settlement-missing", clients=settled.missing)
    if settled.unproved:
        code = "settlement-unshown-rest" if settled.final else "settlement-unshown"
        yield Note(code, clients=settled.unproved)


def settlement_of(ledger: Records, rounds: Sequence[Round], config: Config) -> Book | None:
    """Return the settlement in a ledger, or None if it has none; raise LedgerError where it contradicts."""
    if not config.settles:
        return None
    book, walk = Book(threshold=config.threshold), None
    for record in ledger.records():
        if record.kind in KINDS:
            walk = walk or _SettlementWalk(book, rounds, config, ledger)
            with reading(record):
                getattr(walk, record.kind)(record)
    if walk is not None:
        walk.check_end()
    return None if walk is None else book


@dataclass
class _SettlementWalk:
    """Reads the records of a settlement one by one."""

    book: Book
    rounds: Sequence[Round]
    config: Config
    ledger: Records
    last_signed: set[str] = field(default_factory=set)

    @cached_property
    def run(self) -> str:
        return str(first_body(self.ledger, "run")["run"])

    @cached_property
    def needed(self) -> int:
        """How many countersignatures a window needs: none in a rehearsal where nothing is signed."""
        return self.config.threshold if first_body(self.ledger, "run")["keys"] else 0

    def last(self, record: Record) -> None:
        if record.body["run"] != self.run:
            raise LedgerError("signs the last round of another run")
        if self.book.manifest is not None or record.body["last"] != len(self.rounds):
            raise LedgerError("signs another last round, or comes after the pool was opened")
        self.last_signed.add(record.author)

    def opening(self, record: Record) -> None:
        if self.book.manifest is not None:
            raise LedgerError("opens the pool a second time")
        manifest = Manifest.from_body(record.body["manifest"])
        if record.body["settlement"] != manifest.digest:
            raise LedgerError("its manifest does not match its digest")
        if manifest.run != self.run:
            raise LedgerError("its manifest is of another run")
        if len(self.rounds) < self.config.training.rounds and len(self.last_signed) < self.config.threshold:
            raise LedgerError(
                f"opens the pool after {len(self.rounds)} of {self.config.training.rounds} rounds, which "
                f"{len(self.last_signed)} members signed and {self.config.threshold} must"
            )
        if manifest.utility != self.config.scoring.utilities[0]:
            raise LedgerError(f"settles {manifest.utility}, expected {self.config.scoring.utilities[0]}")
        summed = [one for one in self.rounds if not one.aborted]
        if [one.number for one in summed] != [entry.round for entry in manifest.rounds]:
            raise LedgerError("its rounds are not those with a sum")
        outcomes = {one.body["round"]: one.body for one in self.ledger.records("outcome")}
        for one, entry in zip(summed, manifest.rounds, strict=True):
            outcome = outcomes[one.number]
            told = (entry.m0, entry.m, entry.x, exact(entry.weight), entry.participants)
            if told != (*(outcome[key] for key in ("m0", "m", "x", "weight")), one.included):
                raise LedgerError(f"its round {entry.round} is not the one that was summed")
        self.book.manifest, self.book.why = manifest, ""

    def _manifest(self, record: Record) -> Manifest:
        manifest = self.book.manifest
        if manifest is None or record.body.get("settlement", manifest.digest) != manifest.digest:
            raise LedgerError("belongs to no manifest, or to another one")
        if record.body.get("run", self.run) != self.run:
            raise LedgerError("belongs to another run")
        return manifest

    def agreed(self, record: Record) -> None:
        self._manifest(record)
        if record.author in self.book.agreed or record.author in self.book.statements:
            raise LedgerError("its author agreed or stated before")
        numbers = record.body["wrong"]
        if not all(type(number) is int for number in (*numbers, *record.body["released"])):
            raise LedgerError("expected rounds")
        self.book.agreed[record.author] = tuple(numbers)
        self.book.released[record.author] = tuple(record.body["released"])

    def statement(self, record: Record) -> None:
        if self.book.manifest is None:
            raise LedgerError("states before the directions were fixed")
        agreeing = sum(not wrong for wrong in self.book.agreed.values())
        if agreeing < self.config.threshold:
            raise LedgerError(f"states though {agreeing} members agreed, {self.config.threshold} are needed")
        if record.author in self.book.statements or record.author in self.book.withheld:
            raise LedgerError("its author has stated before")
        if self.book.told.get("final"):
            raise LedgerError("comes after the settlement was closed")
        if record.withheld:
            self.book.withheld += (record.author,)
            return
        manifest, detail = self._manifest(record), self.config.settlement.detail
        self.book.statements[record.author] = Statement.from_body(
            record.author, record.body, manifest, detail=detail
        )

    def table(self, record: Record) -> None:
        manifest = self._manifest(record)
        if record.author not in manifest.entry(record.body["round"]).participants:
            raise LedgerError("its author is not in the sum")
        for value in (*record.body["pairs"].values(), record.body["masked"]):
            whole_number(value)

    def verdict(self, record: Record) -> None:
        body, manifest = record.body, self._manifest(record)
        number = body["round"]
        if number and number in self.book.named and not self.book.silent[number]:
            raise LedgerError("is the second verdict on its round, though nobody was silent before")
        values, named, silent = proved_in(body)
        summed = manifest.entry(number).participants if number else ()
        if not {*values, *silent} <= set(summed):
            raise LedgerError("speaks of members who are not in the sum")
        for name, why in named.items():
            if (why == LIES[-1]) != (name == SERVER) or why not in LIES:
                raise LedgerError(f"names {name!r:.60} for {why!r:.40}")
        if not {*named} <= {SERVER, *(summed if number else manifest.members)}:
            raise LedgerError("names somebody who is not in the sum")
        if number:
            self._check_proved(manifest.entry(number), values, named)
            self.book.values[number] = values
        elif not self.book.withheld and named != self._so_far(manifest).lies_over_run:
            raise LedgerError("names others for the whole run than the verdicts on its rounds prove")
        self.book.silent[number] = silent
        self.book.named[number] = named

    def _check_proved(self, entry: Entry, values: Mapping[str, int], named: Mapping[str, str]) -> None:
        """Raise LedgerError for proved integers that no evidence can give, so far as statements tell.

        Who is not named stated what its masks prove; and the integers of all members give the product of the
        sum, or the server is named.
        """
        stated = self.book.statements if self.config.settlement.detail == "rounds" else {}
        for name, value in values.items():
            if name in stated and name not in named and stated[name].rounds[str(entry.round)] != value:
                raise LedgerError(f"gives {name} another number than it stated, and does not name it")
        false = {*values} == {*entry.participants} and (sum(values.values()) - entry.product) % RING != 0
        if false != (SERVER in named):
            raise LedgerError("its numbers do not add up, or name the server though they do")

    def _so_far(self, manifest: Manifest) -> Settled:
        book = self.book
        return Settled(manifest, book.statements, self.config.settlement.detail, book.values)

    def settled(self, record: Record) -> None:
        manifest, book = self._manifest(record), self.book
        body = record.body
        found = Settled(
            manifest, dict(book.statements), self.config.settlement.detail,
            dict(book.values), dict(book.named), body["closes"], body["final"], dict(book.silent),
            book.withheld,
            [*body["rounds"]] if book.withheld else None,
        )  # fmt: skip
        if type(body["final"]) is not bool or type(body["closes"]) not in (int, type(None)):
            raise LedgerError("expected whether it is final, and when its window closes in whole seconds")
        if canonical(found.body()) != canonical(body) or self._odd(found):
            raise LedgerError("does not follow from the statements before it")
        self._check_verdicts(found)
        self._check_window(found)
        if book.told.get("final"):
            raise LedgerError("comes after the settlement was closed")
        book.settled, book.told, book.countersigned = found, dict(body), ()
        book.history.append(found)

    def _odd(self, found: Settled) -> bool:
        """Return whether equations whose statements are withheld contradict the manifest or themselves."""
        for own, told in zip_longest(found.equations, found.body()["rounds"]):
            if own is None or told is None or set(told) != set(own.body()):
                return True
            for key in ("sum", "product"):
                if told[key] is not None:
                    whole_number(told[key])
            open_ = not {*own.missing} <= {*self.book.withheld}
            facts = {**own.body(), "sum": told["sum"], "holds": told["sum"] == told["product"]}
            if canonical(told) != canonical(facts) or open_ != (told["sum"] is None):
                return True
        return False

    def _check_verdicts(self, found: Settled) -> None:
        """Raise LedgerError for a verdict where nobody can have lied, and for one that is lacking."""
        failed = {one["round"] for one in found.body()["rounds"] if one["sum"] not in (None, one["product"])}
        for number in found.named:
            if (number if found.detail == "rounds" else None) not in failed:
                raise LedgerError(f"comes after a verdict on round {number}, whose equation does not fail")
        over_run = found.detail == "run" and found.values and not self.book.withheld
        if over_run and found.named.get(0, {}) != found.lies_over_run:
            raise LedgerError("lacks the verdict on the whole run that follows from those on its rounds")

    def _check_window(self, found: Settled) -> None:
        """Raise LedgerError if the window is closed before t members saw it open, or moved."""
        before = self.book.told.get("closes")
        if not found.final and found.closes is None:
            raise LedgerError("is open without a day on which it closes")
        if before is not None and found.closes is not None and found.closes < before:
            raise LedgerError("closes earlier than was said before")
        if not (found.final and found.awaited):
            return
        if found.closes is None or found.closes != before:
            raise LedgerError("is closed without a window, though somebody is awaited")
        if (signed := len(self.book.windows.get(before, ()))) < self.needed:
            raise LedgerError(
                f"closes a window that {signed} members countersigned, {self.needed} are needed",
                code=UNCOUNTERSIGNED,
            )

    def check_end(self) -> None:
        """Raise LedgerError if the settlement was closed on members who are awaited, and t did not sign."""
        book = self.book
        if book.settled is None or not book.settled.final or not book.settled.awaited:
            return
        if len(book.countersigned) < self.needed:
            awaited = ", ".join(book.settled.awaited)
            raise LedgerError(
                f"the settlement was closed without {awaited}, which {len(book.countersigned)} members "
                f"countersigned, {self.needed} are needed",
                code=UNCOUNTERSIGNED,
            )

    def unsettled(self, record: Record) -> None:
        if self.book.told:
            raise LedgerError("comes after the settlement")
        manifest, why = self.book.manifest, record.body["why"]
        if record.body["settlement"] != (None if manifest is None else manifest.digest):
            raise LedgerError("belongs to no manifest, or to another one")
        if why not in (UNSETTLED if manifest is None else ("not-agreed",)):
            raise LedgerError(f"gives a reason that there is not: {why!r:.40}")
        agreeing = sum(not wrong for wrong in self.book.agreed.values())
        if max(agreeing, len(self.last_signed) if why == "not-last" else 0) >= self.config.threshold:
            raise LedgerError("says that too few members signed, and enough of them did")
        self.book.why = why

    def countersigned(self, record: Record) -> None:
        self._manifest(record)
        expected = countersignature(self.run, self.book.told)
        if dict(record.body) != expected or record.author in self.book.countersigned:
            raise LedgerError("countersigns something else, or a second time")
        self.book.countersigned += (record.author,)
        if not self.book.told["final"] and self.book.told["closes"] is not None:
            self.book.windows.setdefault(self.book.told["closes"], set()).add(record.author)
