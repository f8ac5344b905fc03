"""Payout decisions: who is paid what and by which rule, as records of the ledger, and read back from them.

A ``decision`` holds its terms (budget, rule, score, ...) and the result: shares and exact cents. A later
decision names the one it replaces. If only the coordinator sees everything, the decision holds what all
members may know, and each member's share and cents are in a salted ``payout`` record of its own.
`DecisionFold` recomputes decisions from the rounds before them; from a copy that withholds what others
reported, a member's own part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, cast

import numpy as np
from msgspec import UNSET, to_builtins

from fedmerit.config import Config
from fedmerit.errors import LedgerError, UnsettledShares
from fedmerit.identity import exact, new_salt, number
from fedmerit.ledger import kinds
from fedmerit.ledger.account import Account, SettlementFold
from fedmerit.ledger.chain import Record, reading
from fedmerit.ledger.kinds import TOLERANCE, compare, numbers
from fedmerit.ledger.rounds import Rounds, own_total
from fedmerit.notes import Note, called, words
from fedmerit.protocol.outcome import Round, scored
from fedmerit.scoring.accumulate import Missing, accumulate
from fedmerit.scoring.amounts import Division, Payouts, division, money_of, payouts, rounds_down, spelled
from fedmerit.scoring.doubts import Doubt, at_chance, doubts
from fedmerit.scoring.panel import share_errors
from fedmerit.scoring.rewards import TIMES, USUAL_RULE, AnyRule, Fence, Shares, shares
from fedmerit.scoring.types import Scores
from fedmerit.settings import NO_HEADING, Heading, Payment, wrong

# ----------------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True)
class Terms:
    """The terms of a decision."""

    budget: str
    utility: str
    rule: AnyRule = USUAL_RULE
    score: str = "ALPHA"
    missing: Missing = "zero"
    equal: float = 0.0
    floor: float = 0.0
    cap: float = 1.0
    forfeit: float = 1.0  # part of its share that a member loses if the settlement named it
    currency: str = ""
    despite_doubts: bool = False  # whether to pay despite gross doubts about the reports

    @classmethod
    def agreed(cls, payment: Payment, budget: str, utility: str, score: str) -> Terms:
        """Return terms that follow these settings."""
        settings = vars(payment) | {"score": score}
        if score == "PANEL":
            settings |= {"rule": "hands", "equal": 0.0, "floor": 0.0, "cap": 1.0}
        return cls(
            budget, utility, **{key: settings[key] for key in cls.__dataclass_fields__ if key in settings}
        )

    def divide(self, total: Scores, liars: Iterable[str] = (), rule: AnyRule | None = None) -> Shares:
        """Return the shares of these scores by these terms, or by another rule.

        ``liars`` are the members whom the settlement named; the forfeit is theirs.
        """
        by = rule or self.rule
        assert by != "hands"  # a panel's scores pay nobody
        return shares(
            total,
            by,
            equal=self.equal if by == self.rule or by in ("fair", "fenced") else 0.0,
            floor=self.floor,
            cap=self.cap,
            forfeits={name: self.forfeit for name in liars if name in total.clients and self.forfeit},
        )

    def body(self) -> dict[str, Any]:
        numbers = {name: exact(getattr(self, name)) for name in _NUMBERS}
        return {**vars(self), "budget": spelled(self.budget, self.currency), **numbers}

    @classmethod
    def of(cls, body: kinds.DecisionBody) -> Terms:
        plain = {key: getattr(body, key) for key in cls.__dataclass_fields__}
        if expected := wrong("currency", plain["currency"]):
            raise LedgerError(f"currency: expected {expected}, got {plain['currency']!r:.40}")
        if (again := spelled(plain["budget"], plain["currency"])) != plain["budget"]:
            raise LedgerError(f"budget: expected {again}, got {plain['budget']!r:.40}")
        return cls(**{**plain, **{name: number(plain[name]) for name in _NUMBERS}})


_NUMBERS = ("equal", "floor", "cap", "forfeit")


FEWEST = 5
"""Members of a panel without which it pays nobody: fewer have no witnesses."""


class Departure(NamedTuple):
    """A term of a decision that is not the one which members signed."""

    term: str
    signed: Any
    used: Any


def departs(departures: Sequence[Departure]) -> Note | None:
    """Return in what terms are not the signed ones; None if they are."""
    notes = tuple(
        Note("departs-in", term=words(f"term.{term}"), used=_shown(used), signed=_shown(signed))
        for term, signed, used in departures
    )
    return Note("departs", departures=notes) if notes else None


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else called("term-value", value or "none")


def departures_of(terms: Terms, config: Config) -> tuple[Departure, ...]:
    """Return in what a decision departs from the terms of payment in the settings."""
    signed = Terms.agreed(config.payment, terms.budget, config.scoring.utilities[0], config.paid_score)
    compared = ("utility", "rule", "score", "missing", *_NUMBERS, "currency")
    pairs = ((key, getattr(signed, key), getattr(terms, key)) for key in compared)
    return tuple(Departure(key, agreed, used) for key, agreed, used in pairs if agreed != used)


@dataclass(frozen=True)
class Decision:
    """Who is paid what, and why."""

    number: int
    replaces: int | None
    rounds: int
    terms: Terms
    total: Scores
    shares: Shares
    paid: Payouts
    doubts: tuple[Doubt, ...] = ()  # about the reports that the decision rests on
    record: int = 0  # its place in the ledger, once it is recorded
    heading: Heading = NO_HEADING  # title and date; the currency is that of the terms
    departures: tuple[Departure, ...] = ()  # from the terms that members signed

    def __post_init__(self) -> None:
        object.__setattr__(self, "heading", replace(self.heading, currency=self.terms.currency))

    @property
    def overruled(self) -> tuple[Doubt, ...]:
        """The gross doubts that the decision overrules; none under the rule equal, which uses no score."""
        return tuple(doubt for doubt in self.doubts if doubt.gross and self.terms.rule != "equal")

    def records(self, visibility: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the kind and body of each record of this decision."""
        heading = {key: value for key, value in self.heading.body().items() if key != "currency"}
        body: dict[str, Any] = {
            "decision": self.number,
            "replaces": self.replaces,
            "rounds": self.rounds,
            **self.terms.body(),
            "departures": [departure.term for departure in self.departures],
            "unpaid": self.paid.cents(self.paid.unpaid),
        }
        if heading:
            body["heading"] = heading
        if self.shares.fence:
            body["fence"] = {key: exact(value) for key, value in self.shares.fence.as_dict().items()}
        amounts = {name: self.paid.cents(amount) for name, amount in self.paid.items()}
        if visibility == "all":
            divided = {name: exact(share) for name, share in self.shares.items()}
            yield "decision", {**body, "shares": divided, "cents": amounts}
            return
        yield "decision", {**body, "totals": to_builtins(totals_in(self.total, self.shares, self.terms))}
        for name, share in self.shares.items():
            own = {"member": name, "salt": new_salt(), "share": exact(share), "cents": amounts[name]}
            yield "payout", {"decision": self.number, **own}


def decide(
    rounds: Sequence[Round],
    terms: Terms,
    config: Config,
    before: Sequence[Decision] = (),
    account: Account | None = None,
) -> Decision:
    """Return what these rounds pay under these terms, as the decision that follows those in ``before``.

    ``account`` is that of the settlement, if there is one. ``config`` are the settings of the run.
    """
    liars: tuple[str, ...] = ()
    doubted: tuple[Doubt, ...] = ()
    if terms.score == "PANEL":
        return _by_panel(rounds, terms, config, before, _payable(account, terms))
    if terms.score == "PHI":
        settled = _payable(account, terms)
        total, liars = settled.scores(terms.missing), settled.liars
        if by_chance := at_chance(total):
            doubted = (by_chance,)
    else:
        reports = scored(rounds, terms.utility)
        total = accumulate(reports, score=terms.score, missing=terms.missing)
        doubted = doubts(reports, game=config.scoring.game)
    divided = terms.divide(total, liars)
    return Decision(
        number=len(before) + 1,
        replaces=before[-1].number if before else None,
        rounds=len(rounds),
        terms=terms,
        total=total,
        shares=divided,
        paid=payouts(divided, terms.budget, terms.currency or None),
        doubts=doubted,
        departures=departures_of(terms, config),
    )


def _by_panel(
    rounds: Sequence[Round], terms: Terms, config: Config, before: Sequence[Decision], account: Account
) -> Decision:
    """Return what a panel pays: each judge hands out an equal part (`by_hands`)."""
    divided = by_hands(account, terms, config.panel.most)
    return Decision(
        number=len(before) + 1,
        replaces=before[-1].number if before else None,
        rounds=len(rounds),
        terms=terms,
        total=account.scores(terms.missing),
        shares=divided,
        paid=payouts(divided, terms.budget, terms.currency or None),
        departures=departures_of(terms, config),
    )


def by_hands(account: Account, terms: Terms, most: float) -> Shares:
    """Return the shares of a panel; what an unwitnessed member or a liar loses stays unpaid.

    Raise UnsettledShares where a panel pays nobody: with fewer than five members, or with errors of shares
    above a third of an equal share.
    """
    panel = account.panel
    assert panel is not None
    if (n := panel.n) < FEWEST:
        raise UnsettledShares(Note("panel-few", count=n, least=FEWEST), code="few")
    if not account.paying:
        raise UnsettledShares(Note("settlement-credit"), code="unwitnessed")
    errors = share_errors(account.paid, most=most)
    middle = 0.0 if errors is None else float(np.median([*errors.values()]))
    if middle > 1 / (3 * n) and not terms.despite_doubts:
        raise UnsettledShares(
            Note("panel-uncertain", error=100 * middle, most=100 / (3 * n)), code="uncertain"
        )
    losses = {name: terms.forfeit for name in account.liars if name in panel.clients and terms.forfeit}
    return account.shares(most, losses | dict.fromkeys(account.unwitnessed, 1.0))


def _payable(account: Account | None, terms: Terms) -> Account:
    if account is None:
        raise UnsettledShares(Note("settlement-lacking"), code="unsettled")
    if (utility := account.manifest.utility) != terms.utility:
        raise LedgerError(f"utility: expected {utility!r}, as settled, got {terms.utility!r:.40}")
    if still := account.provisional():
        raise UnsettledShares(still, code=still.code.removeprefix("settlement-"))
    account.check_payable(terms.rule, despite=terms.despite_doubts)
    return account


def totals_in(total: Scores, divided: Shares, terms: Terms) -> kinds.DecisionTotals:
    """Return the totals from which a member can recompute its share and cents, and no more about others."""
    made = division(divided, terms.budget, terms.currency or None)
    clipped = None
    if divided.rule == "impartial" and total.gain > 0:
        clipped = exact(math.fsum(np.clip(total.raw / total.gain, 0.0, 1.0)))
    bounds = (made.low.numerator, made.low.denominator, made.high.numerator, made.high.denominator)
    return kinds.DecisionTotals(
        n=len(divided),
        division=(made.total, made.one, *bounds, made.last),
        among=divided.among,
        gain=exact(total.gain),
        positive=exact(math.fsum(np.maximum(total.raw, 0.0))),
        clipped=clipped,
    )


@dataclass(frozen=True)
class OwnPart:
    """What one member can check of a decision from its own records and the totals."""

    number: int
    rounds: int
    terms: Terms
    departures: tuple[Departure, ...]
    cents: int
    recomputed: bool  # whether the share was recomputed too, not only the cents

    @property
    def amount(self) -> Decimal:
        """What the member is paid."""
        return money_of(self.cents, self.terms.currency)


@dataclass(frozen=True)
class Approval:
    """That a member signed a decision, which a later one may have replaced."""

    member: str
    decision: int
    record: int


# ---------------------------------------------------------------------------------- read back and recomputed


@dataclass
class DecisionFold:
    """The decisions of a run so far; a decision is complete with the payouts that follow it."""

    rounds: Rounds
    settlement: SettlementFold
    made: list[Decision] = field(default_factory=list)
    own: list[OwnPart] = field(default_factory=list)
    totals: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # that all may know after each round
    approvals: list[Approval] = field(default_factory=list)
    _digests: dict[int, tuple[str, int]] = field(default_factory=dict)  # of decisions, with their numbers
    _open: tuple[Record, kinds.DecisionBody] | None = None
    _payouts: list[tuple[Record, kinds.PayoutBody | None]] = field(default_factory=list)

    def add(self, record: Record, body: Any) -> None:
        """Take a decision, or one of its payouts; ``body`` is None if a copy withholds it."""
        if record.kind == "decision":
            self._open = record, body
            self._digests[record.seq] = record.digest.hex(), body.decision
        elif self._open is None:
            raise LedgerError("follows no decision")
        else:
            self._payouts.append((record, body))

    def approve(self, record: Record, body: kinds.Approved) -> None:
        """Take a member's approval; raise LedgerError unless it is its first one of a decision here."""
        first = self.rounds.first
        if not first.keys:
            raise LedgerError("an approval is a signature, and nobody signs in this run")
        if body.run != first.run:
            raise LedgerError("belongs to another run")
        digest, number = self._digests.get(body.record, ("", 0))
        if body.decision != digest:
            expected = f"expected {digest}" if digest else "which is no decision"
            raise LedgerError(f"approves another decision than record {body.record}, {expected}")
        if (record.author, number) in [(before.member, before.decision) for before in self.approvals]:
            raise LedgerError(f"{record.author} has approved decision {number} before")
        self.approvals.append(Approval(record.author, number, record.seq))

    def complete(self) -> None:
        """Recompute the decision that is open, if there is one."""
        if self._open is None:
            return
        record, body = self._open
        with reading(record):
            before = len(self.made) + len(self.own)
            if (body.decision, body.replaces) != (before + 1, before or None):
                raise LedgerError(f"expected decision {before + 1}, which replaces {before or None}")
            if body.rounds != (closed := len(self.rounds.closed)):
                raise LedgerError(f"rests on {body.rounds} rounds, but {closed} were closed before it")
            if (reader := self.rounds.reader) is None:
                self.made.append(self._recomputed(record, body))
            else:
                self.own.append(self._own_part(cast(kinds.PrivateDecision, body), reader))
        self._open, self._payouts = None, []

    def _recomputed(self, record: Record, body: kinds.DecisionBody) -> Decision:
        (shares_, cents), terms = self._stated(body), Terms.of(body)
        made = decide(self.rounds.closed, terms, self.rounds.config, self.made, self._account(terms))
        _check_marked(body, made.departures)
        compare(shares_, dict(made.shares), "share")
        if terms.score == "PANEL":
            due = {name: made.paid.cents(amount) for name, amount in made.paid.items()}
            compare(cents, due, "cents")
            if body.unpaid != made.paid.cents(made.paid.unpaid):
                raise LedgerError("the unpaid amount is not the rest of the budget")
            return replace(made, record=record.seq, heading=_heading(body))
        divided = Shares(shares_, terms.rule, among=made.shares.among)
        anew = division(divided, terms.budget, terms.currency or None)
        right = {name: anew.cents_of(name, share) for name, share in shares_.items()}
        compare(cents, right, "cents")
        if body.unpaid != anew.cents - sum(right.values()):
            raise LedgerError("the unpaid amount is not the rest of the budget")
        fence = made.shares.fence.as_dict() if made.shares.fence else {}
        compare(numbers(_as_dict(body.fence)), fence, "fence", within=1e-9, near=TOLERANCE)
        if isinstance(body, kinds.PrivateDecision):
            recorded, totals = _as_dict(body.totals), _as_dict(totals_in(made.total, divided, terms))
            if recorded.pop("division") != totals.pop("division"):
                raise LedgerError("totals.division: not how these shares are divided")
            compare(numbers(recorded), numbers(totals), "totals")
        return replace(made, record=record.seq, heading=_heading(body))

    def _stated(self, body: kinds.DecisionBody) -> tuple[dict[str, float], dict[str, int]]:
        if isinstance(body, kinds.OpenDecision):
            return numbers(body.shares), dict(body.cents)
        divided: dict[str, float] = {}
        cents: dict[str, int] = {}
        for record, payout in self._payouts:
            with reading(record):
                assert payout is not None  # withheld only from the reader of a copy
                name = payout.member
                if payout.decision != body.decision or name in divided:
                    raise LedgerError("belongs to another decision, or is the second one for its member")
                divided[name], cents[name] = number(payout.share), payout.cents
        return divided, cents

    def _account(self, terms: Terms) -> Account | None:
        if terms.score not in ("PHI", "PANEL"):
            return None
        account = self.settlement.account
        if account is None or not account.final:
            raise LedgerError("pays by settled scores, but the settlement was not final before it")
        return account

    def _own_part(self, body: kinds.PrivateDecision, member: str) -> OwnPart:
        """Return a member's part of a decision in its copy, recomputed as far as possible."""
        terms, totals = Terms.of(body), body.totals
        if len(self._payouts) != totals.n:
            raise LedgerError(f"expected a payout for each of {totals.n} members, got {len(self._payouts)}")
        _heading(body)
        rounds, config = self.rounds.closed, self.rounds.config
        departures = departures_of(terms, config)
        _check_marked(body, departures)
        account = self._account(terms)
        score = _own_score(member, terms, rounds, account)
        if terms.score == "ALPHA" and terms.missing == config.payment.missing:
            summed = self.totals[len(rounds)][terms.utility]["summed"]
            for key, other in (("n", "n"), ("gain", "gain"), ("positive", "alpha_plus")):
                if getattr(totals, key) != summed[other]:
                    raise LedgerError(f"totals.{key}: not the {other} stated after round {len(rounds)}")
        mine = [payout for _, payout in self._payouts if payout is not None and payout.member == member]
        unknown = score is None and terms.score in ("FP", "EE")  # these rest on what it may not see
        if len(mine) not in ((0, 1) if unknown else (score is not None,)):
            raise LedgerError(f"holds {len(mine)} payouts of {member}")
        share, cents = (number(mine[0].share), mine[0].cents) if mine else (0.0, 0)
        made = _division(member, totals, terms)
        _check_unpaid(body.unpaid, made, cents)
        recomputed = True
        if mine:
            loss = terms.forfeit if account is not None and member in account.liars else 0.0
            options = [] if score is None else [(1 - loss) * part for part in _own_shares(score, body, terms)]
            recomputed, near = bool(options), _rounding(score, totals)
            if options and not any(
                math.isclose(share, option, rel_tol=1e-9, abs_tol=near) for option in options
            ):
                raise LedgerError(f"share of {member}: states {share!r}, the totals give {options[0]!r}")
            if cents != (right := made.cents_of(member, share)):
                raise LedgerError(f"cents of {member}: states {cents}, its share gives {right}")
        return OwnPart(body.decision, len(rounds), terms, departures, cents, recomputed)


def _as_dict(form: Any) -> dict[str, Any]:
    return {} if form is UNSET else cast(dict[str, Any], to_builtins(form))


def _own_score(member: str, terms: Terms, rounds: Sequence[Round], account: Account | None) -> float | None:
    """Return a member's score as it follows from its own records; None if it does not, or has none."""
    if account is not None:
        return account.scores(terms.missing).as_dict().get(member) if account.scored else None
    if terms.score in ("FP", "EE"):  # these rest on everybody's reports
        return None
    return own_total(member, rounds, terms.utility, score=terms.score, missing=terms.missing)


def _check_marked(body: kinds.DecisionBody, departures: Sequence[Departure]) -> None:
    if body.departures != (right := tuple(departure.term for departure in departures)):
        expected = f"expected {list(right)}, by the terms that the members signed"
        raise LedgerError(f"departures: {expected}, got {body.departures!r:.80}")


def _heading(body: kinds.DecisionBody) -> Heading:
    return NO_HEADING if body.heading is UNSET else Heading.of(dict(body.heading.items()))


# --------------------------------------------------------------------------------------- one member's part


def _division(member: str, totals: kinds.DecisionTotals, terms: Terms) -> Division:
    total, unit, a, b, c, d, last = totals.division
    return Division(
        cents=division({member: 1.0}, terms.budget, terms.currency or None).cents,
        n=totals.n,
        total=total,
        one=unit,
        down=rounds_down(total, unit, terms.rule),
        low=Fraction(a, b),
        high=Fraction(c, d),
        last=last,
    )


def _check_unpaid(unpaid: int, made: Division, own: int) -> None:
    """Raise unless the unpaid rest follows from the sum of all shares, to within a cent per member."""
    rest = Fraction(0)
    if made.down:
        rest = made.cents * (1 - Fraction(made.total, max(made.total, made.one)))
    if not (rest - 1 < unpaid < rest + made.n if made.down else unpaid == 0) or unpaid + own > made.cents:
        raise LedgerError(f"unpaid: states {unpaid}, the division leaves about {float(rest):.0f}")


def _fence_of(body: kinds.PrivateDecision) -> Fence:
    """Return the numbers behind "fenced", as a decision states them.

    Raise LedgerError if they contradict each other or the totals. How many members count must be believed.
    """
    n = body.totals.n
    if body.fence is UNSET:
        raise LedgerError("fence: missing")
    how = Fence(**numbers(_as_dict(body.fence)))
    if not (how.positive > 0 and how.rest >= 0 and 0 < how.counted <= n):
        raise LedgerError(f"fence: expected a positive sum, and 1 to {n} who count, got {how}")
    for name, value, right in (
        ("positive", how.positive, number(body.totals.positive)),
        ("fence", how.fence, TIMES / (how.counted + TIMES - 1)),
    ):
        if not math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-9 * n):
            raise LedgerError(f"fence.{name}: states {value!r}, the totals give {right!r}")
    return how


def _rounding(own: float | None, totals: kinds.DecisionTotals) -> float:
    """Return how far a share may be from what its score gives: see `fedmerit.scoring.types.rounding`."""
    positive = number(totals.positive)
    return 1e-9 * max(1.0, abs(own or 0.0)) / positive if positive > 0 else 1e-15


def _own_shares(own: float, body: kinds.PrivateDecision, terms: Terms) -> list[float]:
    """Return what a member's share may be by the totals; nothing if it depends on more than they state.

    It is one number, but two for a member below zero if a part is divided equally: whether it is surely below
    zero depends on the others' errors too.
    """
    totals, n = body.totals, body.totals.n
    if terms.rule == "equal":
        return [1 / n]
    if (terms.floor, terms.cap) != (0.0, 1.0):
        return []
    if terms.rule == "impartial":
        part = min(max(own / number(totals.gain), 0.0), 1.0)
        return [(1 - (number(totals.clipped) - part) / (n - 1)) / n]
    if terms.rule == "fenced":
        share = _fence_of(body).share(own)
    else:
        share = max(own, 0.0) / number(totals.positive)
    if not terms.equal:
        return [share]
    if not 0 < totals.among <= n:
        raise LedgerError(f"totals.among: expected 1 to {n} members, got {totals.among}")
    rest = (1 - terms.equal) * share
    return [rest + terms.equal / totals.among, *([rest] if own < 0 else [])]
