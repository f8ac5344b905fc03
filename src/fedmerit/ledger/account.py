"""The account of a settled run: the scores that statements give, and the equations behind them, in numbers.

Scores, payouts, the page and the score files of a settled run are made from its account. A member who was in
a sum and has not stated has no score, and no rule pays it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedmerit.config import Config
from fedmerit.errors import UnsettledShares
from fedmerit.ledger.chain import Records
from fedmerit.ledger.settled import Book, settlement_of
from fedmerit.notes import Note, moment, words
from fedmerit.protocol.outcome import Round
from fedmerit.protocol.settlement import Settled
from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.types import Scores, Vector
from fedmerit.scoring.uncertainty import training_of

# --------------------------------------------------------------------------------------------- its parts


@dataclass(frozen=True)
class Line:
    """An equation, of one round or of all at once: what was stated, what counts, and what it must give.

    Args:
        round: its number; None for all rounds at once.
        participants: everybody in the sum.
        stated: what each of them stated; None where nobody did, or where a copy withholds it.
        counted: likewise what counts: as stated, unless the masks prove another number; None for who has
            none, and once the settlement is final, its part of what the others leave.
        sum: of what was stated; None while somebody is missing.
        product: what the sum must be, from the members' summed updates.
        holds: whether it is.
        left: who has no number of its own: it stated nothing that counts, and masks prove none.
    """

    round: int | None
    participants: tuple[str, ...]
    stated: tuple[int | None, ...]
    counted: tuple[int | None, ...]
    sum: int | None
    product: int
    holds: bool
    left: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class SettledRound:
    """A round with a sum: the utility before and after it on the settled test samples, and who stated.

    ``scores`` is PHI of those who stated; None if members state one number for the whole run.
    """

    round: int
    clients: tuple[str, ...]
    silent: tuple[str, ...]  # in the sum, but without a statement
    empty: float
    grand: float
    utility: str
    slice: str
    scores: Scores | None = None

    @property
    def gain(self) -> float:
        """How much the utility of the shared model rose."""
        return self.grand - self.empty


@dataclass(frozen=True, eq=False)
class Account:
    """What a settlement came to.

    Args:
        utility: which was settled.
        scale: utility per integer unit of the equations.
        values: by member who stated, its score over the run; once it is final, also of those who did not.
        blocks: likewise, in each block of the test samples.
        sizes: of the blocks; none if their parts give no standard errors.
        rounds: with a sum, in order.
        lines: the equations.
        named: by round (0: in one of them), who lied and how, as a code; the server may be one of them.
        missing: who was in a sum and has not stated.
        unproved: who stated, and did not show its masks when an equation failed.
        closes: when the window closes, in seconds since 1970; None once nobody is awaited.
        final: whether nothing can change any more.
        countersigned: who countersigned the sums.
        threshold: how many countersignatures are needed.
        doubtful: of whom one has a false standard error, as parts of blocks do not add up.
    """

    utility: str
    scale: float
    values: Mapping[str, float]
    blocks: Mapping[str, tuple[float, ...]]
    sizes: tuple[int, ...]
    rounds: tuple[SettledRound, ...]
    lines: tuple[Line, ...]
    named: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()
    closes: int | None = None
    final: bool = False
    countersigned: tuple[str, ...] = ()
    threshold: int = 0
    doubtful: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """The gain of all rounds, on the settled test samples."""
        return math.fsum(one.gain for one in self.rounds)

    @property
    def unclaimed(self) -> float:
        """What the updates of missing members are worth together: nobody has claimed it."""
        open_ = (line for line in self.lines if None in line.counted)
        lost = sum(line.product - sum(value or 0 for value in line.counted) for line in open_)
        return lost * self.scale if self.missing else 0.0

    @property
    def holding(self) -> int:
        """How many equations hold."""
        return sum(line.holds for line in self.lines)

    @property
    def liars(self) -> tuple[str, ...]:
        """Everybody who was named."""
        return tuple(dict.fromkeys(name for each in self.named.values() for name in each))

    @property
    def unexplained(self) -> tuple[Line, ...]:
        """The equations that fail although everybody stated, and for which nobody was named.

        But not those that t members closed without the masks of members who kept silent: what the others
        leave is theirs, as if they had not stated.
        """
        failed = [line for line in self.lines if line.sum not in (None, line.product)]
        return tuple(
            line for line in failed if not self.named.get(line.round or 0) and not (self.final and line.left)
        )

    def seen(self, name: str) -> int:
        """Return in how many rounds a member's update was in the sum."""
        return sum(name in (*one.clients, *one.silent) for one in self.rounds)

    def scores(self, missing: Missing = "zero") -> Scores:
        """Return PHI over the run, of everybody who stated."""
        return total_of([self], missing)

    def provisional(self) -> Note | None:
        """Return why the settlement is not final: ``open``, ``silent`` or ``unclosed``; None if it is."""
        if self.final:
            return None
        if self.unproved:
            return Note("settlement-silent", clients=self.unproved)
        if self.closes is not None and time.time() >= self.closes:
            return Note("settlement-unclosed", clients=self.missing, needed=self.threshold)
        return Note("settlement-open", clients=self.missing, until=moment(self.closes))

    def check_final(self) -> None:
        """Raise UnsettledShares while the settlement can still change; its code is that of `provisional`."""
        if still := self.provisional():
            raise UnsettledShares(still, code=still.code.removeprefix("settlement-"))

    def check_payable(self, rule: str, *, despite: bool) -> None:
        """Raise UnsettledShares if an equation fails and nobody was named for it.

        Args:
            rule: by which members are paid; "equal" needs no score.
            despite: whether to pay anyway.
        """
        if self.unexplained and rule != "equal" and not despite:
            rounds = tuple(line_name(line) for line in self.unexplained)
            raise UnsettledShares(Note("settlement-fails", rounds=rounds), code="fails")

    def renamed(self, names: Mapping[str, str]) -> Account:
        """Return the same account with other names, in their order."""

        def order(own: Iterable[str]) -> tuple[str, ...]:
            return tuple(sorted(names.get(name, name) for name in own))

        def line(one: Line) -> Line:
            rows = sorted(
                (names[name], said, counts)
                for name, said, counts in zip(one.participants, one.stated, one.counted, strict=True)
            )
            shown, said, counts = zip(*rows, strict=True)
            return replace(one, participants=shown, stated=said, counted=counts, left=order(one.left))

        def part(one: SettledRound) -> SettledRound:
            scores = one.scores
            if scores is not None:
                scores = _renamed(scores, names)
            return replace(one, clients=order(one.clients), silent=order(one.silent), scores=scores)

        return replace(
            self,
            values=dict(sorted((names[name], value) for name, value in self.values.items())),
            blocks=dict(sorted((names[name], value) for name, value in self.blocks.items())),
            rounds=tuple(map(part, self.rounds)),
            lines=tuple(map(line, self.lines)),
            named={
                number: {names.get(name, name): how for name, how in each.items()}
                for number, each in self.named.items()
            },
            missing=order(self.missing),
            unproved=order(self.unproved),
            countersigned=order(self.countersigned),
            doubtful=order(self.doubtful),
        )


def line_name(line: Line) -> str:
    """Return which rounds an equation is about, in words."""
    if line.round is None:
        return words("settled.all-rounds")
    return words("settled.round", round=line.round)


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def _renamed(scores: Scores, names: Mapping[str, str]) -> Scores:
    shown = [names[name] for name in scores.clients]
    at = np.argsort(shown).tolist()
    return replace(_at(scores, at), clients=tuple(shown[i] for i in at))


def _at(scores: Scores, at: list[int]) -> Scores:
    """Return the scores of the members at these places, in this order."""
    return replace(
        scores,
        clients=tuple(scores.clients[i] for i in at),
        values=scores.values[at],
        raw=scores.raw[at],
        stderr=None if scores.stderr is None else scores.stderr[at],
        blocks=None if scores.blocks is None else scores.blocks[:, at],
    )


# ---------------------------------------------------------------------------------------------- the total


def total_of(accounts: Sequence[Account], missing: Missing = "zero") -> Scores:
    """Return PHI summed over settled runs that follow each other; usually there is one.

    With ``missing`` = "own-mean", a round without a member in its sum counts at the member's own mean.

    Raises:
        UnsettledShares: nobody has stated.
    """
    clients = tuple(dict.fromkeys(name for one in accounts for name in one.values))
    if not clients:
        raise UnsettledShares(Note("settlement-nobody"), code="nobody")
    count = sum(len(one.rounds) for one in accounts)
    seen = np.array([float(sum(one.seen(name) for one in accounts)) for name in clients])
    factor = count / seen if missing == "own-mean" else np.ones(len(clients))
    values = np.array([math.fsum(one.values.get(name, 0.0) for one in accounts) for name in clients]) * factor
    notes = []
    for name, rounds in zip(clients, seen.tolist(), strict=True):
        if rounds < count:
            code = "summed-zero" if missing == "zero" else "summed-own-mean"
            notes.append(Note(code, client=name, seen=int(rounds), rounds=count))
    for one in accounts:
        code = "not-stated-final" if one.final else "not-stated"
        notes += [Note(code, client=name) for name in one.missing]
        code = "not-shown-final" if one.final else "not-shown"
        notes += [Note(code, client=name) for name in one.unproved]
        notes += [Note("false-parts", clients=one.doubtful)] if one.doubtful else []
    if not all(one.sizes for one in accounts):
        notes.append(Note("no-errors"))
    parts = [one.scores for account in accounts for one in account.rounds]
    by_round = [one.as_dict() for one in parts if one is not None]
    made = Scores(
        score="PHI", clients=clients, values=values, raw=values, rounds=count, coverage=seen / count,
        gain=math.fsum(one.gain for one in accounts), training=training_of(by_round),
    )  # fmt: skip
    if len(accounts) == 1:
        return replace(_with_blocks(made, accounts[0], factor), notes=tuple(notes))
    errors: list[Vector] = []
    for one in accounts:
        own = _with_blocks(made, one, factor)
        if own.stderr is None:
            return replace(made, notes=tuple(notes))
        errors.append(own.stderr)
    return replace(made, stderr=np.sum(errors, axis=0), notes=(*notes, Note("bound-runs")))


def _with_blocks(made: Scores, one: Account, factor: Vector) -> Scores:
    """Return scores with the standard errors that the blocks of one run give."""
    if len(one.sizes) < 2:
        return made
    nothing = (0.0,) * len(one.sizes)
    blocks = np.transpose([one.blocks.get(name, nothing) for name in made.clients]) * factor
    found = replace(made, blocks=blocks, sizes=np.array(one.sizes, np.float64))
    assert found.covariance is not None
    return replace(found, stderr=np.sqrt(np.diag(found.covariance)))


def block_of(
    accounts: Sequence[Account], clients: Sequence[str], missing: Missing = "zero", past: Sequence[int] = (0,)
) -> dict[str, Any]:
    """Return the block ``settlement`` of ``scores.json``: integers as text, null for what is not known.

    Args:
        accounts: of runs that follow each other; usually there is one.
        clients: all members, in the order of ``cumulative``.
        missing: what a round counts in whose sum a member was not.
        past: how many rounds there are before each run.
    """
    total = total_of(accounts, missing) if any(one.values for one in accounts) else None
    values = {} if total is None else total.as_dict()
    errors: dict[str, float] = {}
    if total is not None and total.stderr is not None:
        errors = dict(zip(total.clients, total.stderr.tolist(), strict=True))
    return {
        "score": "PHI",
        "cumulative": [values.get(name) for name in clients],
        "stderr": [errors.get(name) for name in clients],
        "rounds": [
            {
                "round": None if line.round is None else before + line.round,
                "participants": list(line.participants),
                "phi": [None if value is None else value * one.scale for value in line.counted],
                "stated": [_text(value) for value in line.stated],
                "sum": _text(line.sum),
                "product": str(line.product),
                "holds": line.holds,
            }
            for one, before in zip(accounts, past, strict=True)
            for line in one.lines
        ],
        "named": list(dict.fromkeys(name for one in accounts for name in one.liars)),
        "missing": list(dict.fromkeys(name for one in accounts for name in one.missing)),
        "silent": list(dict.fromkeys(name for one in accounts for name in one.unproved)),
    }


# ------------------------------------------------------------------------------------------ from a ledger


def account_of(ledger: Records, rounds: Sequence[Round], config: Config) -> Account | None:
    """Return the account of a run; None if its ledger has none.

    Raises:
        LedgerError: the records of the settlement contradict each other.
    """
    found = accounts_of(ledger, rounds, config)
    return found[-1] if found else None


def accounts_of(ledger: Records, rounds: Sequence[Round], config: Config) -> list[Account]:
    """Return the account after every time that the run was settled: late statements give another one."""
    if not config.settles or not any(True for _ in ledger.records("settled")):
        return []
    book = settlement_of(ledger, rounds, config)
    assert book is not None
    found = [_account(one, config) for one in book.history]
    return [*found[:-1], replace(found[-1], countersigned=book.countersigned)]


def why_unsettled(ledger: Records, rounds: Sequence[Round], config: Config) -> str:
    """Return why a run that is to be settled has no account, in words."""
    book: Book | None = settlement_of(ledger, rounds, config)
    return words(f"unsettled.{(book and book.why) or 'unfinished'}")


def _account(found: Settled, config: Config) -> Account:
    manifest, said = found.manifest, found.statements
    lines = []
    for equation, told in zip(found.equations, found.body()["rounds"], strict=True):
        lines.append(
            Line(
                equation.round, equation.participants, equation.stated,
                tuple(found.counts(equation, name) for name in equation.participants),
                None if told["sum"] is None else int(told["sum"]), equation.product, told["holds"],
                found.left(equation),
            )
        )  # fmt: skip
    rest = found.missing if found.final else ()  # what is left of a sum is then theirs
    clients = [name for name in config.clients if (name in said and said[name].rounds) or name in rest]
    values = found.scores(clients).as_dict() if clients else {}
    blocks = {name: found.blocks(name) for name in clients if found.has_errors}
    parts = []
    for entry in manifest.rounds:
        known = [name for name in entry.participants if name in values]
        scores = None
        if found.detail == "rounds" and known:
            scores = _at(found.round_scores(entry), [entry.participants.index(name) for name in known])
        parts.append(
            SettledRound(
                entry.round, tuple(known),
                tuple(name for name in entry.participants if name in found.missing),
                entry.empty, entry.grand, manifest.utility, manifest.pool, scores,
            )
        )  # fmt: skip
    return Account(
        manifest.utility, manifest.scale,
        values, blocks, manifest.blocks if found.has_errors else (),
        tuple(parts), tuple(lines), found.named, found.missing, found.unproved, found.closes, found.final,
        threshold=config.threshold, doubtful=found.doubtful,
    )  # fmt: skip
