"""Payout decisions: who is paid what and by which rule, as records of the ledger, and their recomputation.

A ``decision`` holds its terms (budget, rule, score, ...) and the result: shares and exact cents. A later
decision names the one it replaces. If only the coordinator sees everything, the decision holds what all
members may know, and each member's share and cents are in a salted ``payout`` record of its own.

A decision may also rest on runs that this one follows (`joined`). It then names them and the heads of their
ledgers in ``after``. Without these ledgers it can be read, but not recomputed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, get_args

import numpy as np

from fedmerit.config import Config, Payment
from fedmerit.errors import InputError, LedgerError, UnsettledShares
from fedmerit.heading import NO_HEADING, Heading, wrong
from fedmerit.identity import SERVER, canonical, exact, new_salt, number
from fedmerit.ledger.account import Account, account_of, total_of
from fedmerit.ledger.chain import Record, Records
from fedmerit.ledger.joined_runs import RunPart, joined, numbered_on, part_of
from fedmerit.ledger.records import config_of, own_total, reading
from fedmerit.notes import Note, called, words
from fedmerit.protocol.outcome import Round
from fedmerit.scoring.accumulate import Missing, accumulate
from fedmerit.scoring.doubts import Doubt, at_chance, doubts
from fedmerit.scoring.fence import TIMES, Fence
from fedmerit.scoring.rewards import (
    USUAL_RULE,
    Division,
    OnUndefined,
    Payouts,
    Rule,
    Shares,
    division,
    money_of,
    payouts,
    rounds_down,
    shares,
    spelled,
)
from fedmerit.scoring.types import Reports, Scores

# ----------------------------------------------------------------------------------------------- decisions

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Terms:
    """The terms of a decision."""

    budget: str
    utility: str
    rule: Rule = USUAL_RULE
    score: str = "ALPHA"
    missing: Missing = "zero"
    equal: float = 0.0
    floor: float = 0.0
    cap: float = 1.0
    forfeit: float = 1.0  # part of its share that a member loses if the settlement named it
    currency: str = ""
    on_undefined: OnUndefined = "refuse"
    despite_doubts: bool = False  # whether to pay despite gross doubts about the reports

    @classmethod
    def agreed(cls, payment: Payment, budget: str, utility: str, score: str) -> Terms:
        """Return terms that follow these settings."""
        given = vars(payment) | {"score": score}
        return cls(budget, utility, **{key: given[key] for key in cls.__dataclass_fields__ if key in given})

    def divide(self, total: Scores, liars: Iterable[str] = (), rule: Rule | None = None) -> Shares:
        """Return the shares of these scores by these terms, or by another rule.

        ``liars`` are the members whom the settlement named; the forfeit is theirs.
        """
        by = rule or self.rule
        return shares(
            total,
            by,
            equal=self.equal if by == self.rule or by in ("fair", "fenced") else 0.0,
            floor=self.floor,
            cap=self.cap,
            forfeits={name: self.forfeit for name in liars if name in total.clients and self.forfeit},
            on_undefined=self.on_undefined,
        )

    def body(self) -> dict[str, Any]:
        """Return the terms as they are recorded."""
        numbers = {name: exact(getattr(self, name)) for name in _NUMBERS}
        return {**vars(self), "budget": spelled(self.budget, self.currency), **numbers}

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Terms:
        """Read the terms in a record."""
        plain = {key: body[key] for key in cls.__dataclass_fields__}
        if not isinstance(plain["despite_doubts"], bool):
            raise LedgerError(f"despite_doubts: expected true or false, got {plain['despite_doubts']!r:.40}")
        if expected := wrong("currency", plain["currency"]):
            raise LedgerError(f"currency: expected {expected}, got {plain['currency']!r:.40}")
        if (again := spelled(plain["budget"], plain["currency"])) != plain["budget"]:
            raise LedgerError(f"budget: expected {again}, got {plain['budget']!r:.40}")
        return cls(**{**plain, **{name: number(plain[name]) for name in _NUMBERS}})


_NUMBERS = ("equal", "floor", "cap", "forfeit")


class Departure(NamedTuple):
    """A term of a decision that is not the one which members signed."""

    term: str
    signed: Any
    used: Any


def departs(found: Sequence[Departure]) -> Note | None:
    """Return in what terms are not the signed ones; None if they are."""
    each = tuple(
        Note("departs-in", term=words(f"term.{one.term}"), used=_shown(one.used), signed=_shown(one.signed))
        for one in found
    )
    return Note("departs", departures=each) if each else None


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else called("term-value", value or "none")


def departures_of(terms: Terms, config: Config, status: str = "ok") -> tuple[Departure, ...]:
    """Return in what a decision departs from the terms of payment in the settings.

    Args:
        terms: of the decision.
        config: the settings that members signed.
        status: of the shares; if it is "undefined", ``on_undefined`` decided, which nobody agreed on before.
    """
    signed = Terms.agreed(config.payment, terms.budget, config.scoring.utilities[0], config.paid_score)
    compared = ["utility", "rule", "score", "missing", *_NUMBERS, "currency"]
    if status == "undefined":
        compared.append("on_undefined")
    pairs = ((key, getattr(signed, key), getattr(terms, key)) for key in compared)
    return tuple(Departure(key, agreed, used) for key, agreed, used in pairs if agreed != used)


@dataclass(frozen=True)
class Decision:
    """Who is paid what, and why."""

    number: int
    replaces: int | None
    rounds: int
    terms: Terms
    total: Scores | None  # None if it was not recomputed
    shares: Shares
    paid: Payouts
    doubts: tuple[Doubt, ...] = ()  # about the reports that the decision rests on
    record: int = 0  # its place in the ledger, once it is recorded
    after: tuple[tuple[str, str], ...] = ()  # run and head of the runs before this one, if it rests on them
    heading: Heading = NO_HEADING  # title, consortium and date; the currency is that of the terms
    counts: tuple[int, ...] = ()  # how many rounds of each of these runs; empty if it was not recomputed
    departures: tuple[Departure, ...] = ()  # from the terms that members signed

    def __post_init__(self) -> None:
        object.__setattr__(self, "heading", replace(self.heading, currency=self.terms.currency))

    @property
    def recomputed(self) -> bool:
        """Whether shares and cents were recomputed from all reports that the decision rests on."""
        return self.total is not None

    @property
    def counted(self) -> int:
        """All rounds that it rests on, as far as they are known."""
        return sum(self.counts) + self.rounds

    @property
    def overruled(self) -> tuple[Doubt, ...]:
        """The gross doubts that the decision overrules; none under the rule equal, which uses no score."""
        return tuple(one for one in self.doubts if one.gross and self.terms.rule != "equal")

    def records(self, visibility: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the kind and body of each record of this decision."""
        heading = {key: value for key, value in self.heading.body().items() if key != "currency"}
        body: dict[str, Any] = {
            "decision": self.number,
            "replaces": self.replaces,
            "rounds": self.rounds,
            **self.terms.body(),
            "departures": [one.term for one in self.departures],
            "status": self.shares.status,
            "unpaid": self.paid.cents(self.paid.unpaid),
            **({"after": [list(one) for one in self.after]} if self.after else {}),
            **({"fence": _fence(self.shares.fence)} if self.shares.fence else {}),
            **({"heading": heading} if heading else {}),
        }
        amounts = {name: self.paid.cents(amount) for name, amount in self.paid.items()}
        if visibility == "all":
            divided = {name: exact(share) for name, share in self.shares.items()}
            yield "decision", {**body, "shares": divided, "cents": amounts}
            return
        assert self.total is not None
        yield "decision", {**body, "totals": _totals(self.total, self.shares, self.terms)}
        for name, share in self.shares.items():
            own = {"member": name, "salt": new_salt(), "share": exact(share), "cents": amounts[name]}
            yield "payout", {"decision": self.number, **own}


def _fence(how: Fence) -> dict[str, str]:
    """Return the numbers behind "fenced" as they are recorded."""
    return {name: exact(value) for name, value in how.as_dict().items()}


def decide(
    rounds: Sequence[Round],
    terms: Terms,
    config: Config,
    before: Sequence[Decision] = (),
    *,
    after: Sequence[RunPart] = (),
    account: Account | None = None,
) -> Decision:
    """Return what these rounds pay under these terms, as the decision that follows those in ``before``.

    ``after`` are the runs before this one that the first of the rounds are from (see `joined`). ``account``
    is the one of this run, if it is settled. ``config`` are its settings.
    """
    scored: list[Reports] = []
    accounts: list[Account] = []
    if terms.score == "PHI":
        accounts = _settled([*(run.account for run in after), account], terms)
        total = total_of(accounts, terms.missing)
    else:
        scored = [reports for one in rounds if (reports := one.to_reports(terms.utility)) is not None]
        total = accumulate(scored, score=terms.score, missing=terms.missing)
    scoring = config.scoring
    found = doubts(scored, game=scoring.game, metrics=scoring.whole) if scored else ()
    if not scored and (by_chance := at_chance(total)):
        found = (by_chance,)
    divided = terms.divide(total, liars_in(accounts))
    return Decision(
        number=len(before) + 1,
        replaces=before[-1].number if before else None,
        rounds=len(rounds) - sum(len(run.rounds) for run in after),
        terms=terms,
        total=total,
        shares=divided,
        paid=payouts(divided, terms.budget, terms.currency or None),
        doubts=found,
        after=tuple((run.id, run.head) for run in after),
        counts=tuple(len(run.rounds) for run in after),
        departures=departures_of(terms, config, divided.status),
    )


def liars_in(accounts: Iterable[Account]) -> tuple[str, ...]:
    """Return everybody whom these settlements named for a lie."""
    return tuple(dict.fromkeys(name for one in accounts for name in one.liars))


def _settled(accounts: Sequence[Account | None], terms: Terms) -> list[Account]:
    """Return the accounts of all runs of a decision; raise UnsettledShares unless they can be paid by."""
    for one in accounts:
        if one is None:
            raise UnsettledShares(Note("settlement-lacking"), code="unsettled")
        if one.utility != terms.utility:
            raise LedgerError(f"utility: expected {one.utility!r}, as settled, got {terms.utility!r:.40}")
        one.check_final()
        one.check_payable(terms.rule, despite=terms.despite_doubts)
    return [one for one in accounts if one is not None]


def _totals(total: Scores, divided: Shares, terms: Terms) -> dict[str, Any]:
    """Return the totals from which a member can recompute its share and cents, and no more about others."""
    positive = math.fsum(np.maximum(total.raw, 0.0))
    clipped = None
    if divided.rule == "impartial" and total.gain > 0:
        clipped = exact(math.fsum(np.clip(total.raw / total.gain, 0.0, 1.0)))
    return {
        **_of_shares(divided, terms),
        "among": divided.among,
        "gain": exact(total.gain),
        "positive": exact(positive),
        "clipped": clipped,
    }


def _of_shares(divided: Shares, terms: Terms) -> dict[str, Any]:
    """Return those of the totals that follow from the shares."""
    made = division(divided, terms.budget, terms.currency or None)
    split = [made.total, made.one, *_ratio(made.low), *_ratio(made.high), made.last]
    return {"n": len(divided), "division": split}


def _ratio(number_: Fraction) -> tuple[int, int]:
    return number_.numerator, number_.denominator


# ---------------------------------------------------------------------------------------------- recomputed


@dataclass
class StatedDecision:
    """A decision as the ledger states it."""

    record: Record
    rounds: int
    payouts: list[Record] = field(default_factory=list)


def decisions_of(
    ledger: Records, rounds: Sequence[Round], config: Config, earlier: Sequence[RunPart] = ()
) -> list[Decision]:
    """Return every decision of a ledger, recomputed; raise LedgerError at the first that differs.

    If a decision also rests on a run that is not in ``earlier``, only what follows from its shares is
    recomputed: ``Decision.recomputed`` is False.
    """
    found: list[Decision] = []
    for one in found_in(ledger):
        with reading(one.record):
            told, terms = _stated(one, config), Terms.of(one.record.body)
            after = before_it(ledger, one, earlier)
            again = _again(
                one, rounds, found, config, terms, after, told["shares"], _account_at(ledger, one, rounds)
            )
            _same(told["shares"], dict(again.shares), exactly=False)
            anew = division(Shares(told["shares"], terms.rule), terms.budget, terms.currency or None)
            paid = {name: anew.cents_of(name, share) for name, share in told["shares"].items()}
            _same(told["cents"], paid, exactly=True)
            if one.record.body["unpaid"] != anew.cents - sum(paid.values()):
                raise LedgerError("the unpaid amount is not the rest of the budget")
            if again.recomputed:
                _same_fence(one.record.body.get("fence"), again.shares.fence)
            if config.scoring.visibility == "coordinator":
                _same_totals(one.record.body["totals"], again, told["shares"])
            found.append(again)
    return found


def _account_at(ledger: Records, one: StatedDecision, rounds: Sequence[Round]) -> Account | None:
    """Return the account on which a decision by settled scores rests; None for other decisions.

    Raises:
        LedgerError: the settlement was not final before the decision.
    """
    if one.record.body["score"] != "PHI":
        return None
    if not any(record.body["final"] and record.seq < one.record.seq for record in ledger.records("settled")):
        raise LedgerError("pays by settled scores, but the settlement was not final before it")
    return account_of(ledger, rounds, config_of(ledger))


def after_in(body: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the runs before this one on which a decision rests, with their heads, as it states them."""
    if "after" not in body:
        return ()
    try:
        found = tuple((run, head) for run, head in body["after"])
        right = all(re.fullmatch(r"[0-9a-f]{32} [0-9a-f]{64}", run + " " + head) for run, head in found)
    except (TypeError, ValueError):
        found, right = (), False
    if not right or not found or len({run for run, _ in found}) < len(found):
        raise LedgerError(
            f"after: expected pairs of a run and a head, each run once, got {body['after']!r:.80}"
        )
    return found


def before_it(ledger: Records, one: StatedDecision, earlier: Sequence[RunPart]) -> list[RunPart] | None:
    """Return the runs before this one as a decision rests on them; None if one of them is not given.

    Raises:
        LedgerError: a head is not on the chain of its run, or one run does not follow the other.
    """
    given, stated = {run.id: run for run in earlier}, after_in(one.record.body)
    if not stated:
        return []
    own = part_of(ledger)
    if any(run == own.id for run, _ in stated):
        raise LedgerError(f"after: names its own run, {own.id}")
    found = [given[run].upto(head) for run, head in stated if run in given]
    if len(found) < len(stated):
        return None
    joined([*found, own])  # raises if one does not follow the other
    return found


def _again(
    one: StatedDecision,
    rounds: Sequence[Round],
    before: Sequence[Decision],
    config: Config,
    terms: Terms,
    after: Sequence[RunPart] | None,
    stated: Mapping[str, float],
    account: Account | None,
) -> Decision:
    """Return the decision recomputed from the rounds that were closed before it."""
    body = one.record.body
    if one.record.author != SERVER:
        raise LedgerError("only the server writes decisions")
    if body["rounds"] != one.rounds:
        raise LedgerError(f"rests on {body['rounds']!r:.20} rounds, but {one.rounds} were closed before it")
    if after is None:
        _check_words(body, terms)
        divided = Shares(stated, terms.rule, body["status"])
        made = Decision(
            number=len(before) + 1,
            replaces=before[-1].number if before else None,
            rounds=one.rounds,
            terms=terms,
            total=None,
            shares=divided,
            paid=payouts(divided, terms.budget, terms.currency or None),
            after=after_in(body),
            departures=departures_of(terms, config, body["status"]),
        )
    else:
        whole = numbered_on(after, rounds[: one.rounds])
        made = decide(whole, terms, config, before, after=after, account=account)
    if (body["decision"], body["replaces"]) != (made.number, made.replaces):
        raise LedgerError(f"expected decision {made.number}, which replaces {made.replaces}")
    if body["status"] != made.shares.status:
        raise LedgerError(f"states status {body['status']!r:.20}, the reports give {made.shares.status!r}")
    check_marked(body, made.departures)
    return Decision(**{**vars(made), "record": one.record.seq, "heading": _heading(body)})


def check_marked(body: Mapping[str, Any], found: Sequence[Departure]) -> None:
    """Raise LedgerError unless a decision marks exactly those terms that are not the signed ones."""
    if body["departures"] != (right := [one.term for one in found]):
        told = f"{body['departures']!r:.80}"
        raise LedgerError(f"departures: expected {right}, by the terms that the members signed, got {told}")


def _heading(body: Mapping[str, Any]) -> Heading:
    """Return the heading of a decision, if it has one."""
    if "heading" not in body:
        return NO_HEADING
    told = body["heading"]
    if not isinstance(told, dict) or not told or "currency" in told:
        raise LedgerError(f"heading: expected title, consortium or date, got {told!r:.80}")
    try:
        return Heading.of(told)
    except InputError as error:
        raise LedgerError(str(error)) from error


def found_in(ledger: Records) -> Iterator[StatedDecision]:
    """Yield decisions with their payout records, which follow immediately."""
    closed, last = 0, None
    for record in ledger.records():
        if record.kind == "payout":
            if last is None or record.author != SERVER:
                raise LedgerError(f"{record.name}: follows no decision", record=record.seq)
            last.payouts.append(record)
            continue
        if last is not None:
            yield last
            last = None
        closed += record.kind == "round"
        if record.kind == "decision":
            last = StatedDecision(record, closed)
    if last is not None:
        yield last


def _stated(one: StatedDecision, config: Config) -> dict[str, dict[str, Any]]:
    """Return shares and cents as the decision or its payouts state them."""
    body = one.record.body
    if config.scoring.visibility == "all":
        return {
            "shares": {name: number(share) for name, share in body["shares"].items()},
            "cents": dict(body["cents"]),
        }
    told: dict[str, dict[str, Any]] = {"shares": {}, "cents": {}}
    for record in one.payouts:
        with reading(record):
            name = record.body["member"]
            if record.body["decision"] != body["decision"] or name in told["shares"]:
                raise LedgerError("belongs to another decision, or is the second one for its member")
            told["shares"][name] = number(record.body["share"])
            told["cents"][name] = record.body["cents"]
    return told


def _same(told: Mapping[str, Any], again: Mapping[str, Any], *, exactly: bool) -> None:
    what = "cents" if exactly else "share"
    if set(told) != set(again):
        odd = min(set(told) ^ set(again))
        raise LedgerError(f"{what} of {odd}: {'not a member who has a score' if odd in told else 'missing'}")
    for name, value in again.items():
        right = type(told[name]) is int and told[name] == value
        if not exactly:
            right = math.isclose(told[name], value, rel_tol=TOLERANCE, abs_tol=0.0)
        if not right:
            raise LedgerError(f"{what} of {name}: states {told[name]!r:.40}, the reports give {value!r}")


def _same_fence(told: Any, again: Fence | None) -> None:
    """Raise unless the numbers behind "fenced" are those that the scores give."""
    right = {} if again is None else again.as_dict()
    if set(told or {}) != set(right):
        raise LedgerError(f"fence: expected {', '.join(right) or 'nothing'}, got {told!r:.80}")
    for name, value in right.items():
        if not math.isclose(number(told[name]), value, rel_tol=1e-9, abs_tol=TOLERANCE):
            raise LedgerError(f"fence.{name}: states {told[name]!r:.40}, the scores give {value!r}")


def _same_totals(told: Mapping[str, Any], again: Decision, stated: Mapping[str, float]) -> None:
    divided = Shares(stated, again.shares.rule, among=again.shares.among)
    if again.total is None:
        right = _of_shares(divided, again.terms)
    else:
        right = _totals(again.total, divided, again.terms)
    if odd := sorted(set(told) ^ {"n", "among", "gain", "positive", "clipped", "division"}):
        raise LedgerError(f"totals.{odd[0]}: {'not one of the totals' if odd[0] in told else 'missing'}")
    for key, value in right.items():
        same = canonical(told[key]) == canonical(value)
        if not same and isinstance(value, str):
            same = math.isclose(number(told[key]), number(value), rel_tol=TOLERANCE, abs_tol=0.0)
        if not same:
            raise LedgerError(f"totals.{key}: states {told[key]!r:.60}, the reports give {value!r:.60}")


# --------------------------------------------------------------------------------------- one member's part


@dataclass(frozen=True)
class OwnPart:
    """What one member can check of a decision from its own records and the totals."""

    number: int
    cents: int
    currency: str
    share: float
    recomputed: bool  # whether the share was recomputed too, not only the cents
    after: tuple[tuple[str, str], ...] = ()  # as in `Decision`
    given: bool = True  # whether the runs in ``after`` were given
    departures: tuple[Departure, ...] = ()  # as in `Decision`

    @property
    def amount(self) -> Decimal:
        """What the member is paid."""
        return money_of(self.cents, self.currency)


def own_parts(
    ledger: Records,
    member: str,
    rounds: Sequence[Round],
    config: Config,
    earlier: Sequence[RunPart] = (),
) -> list[OwnPart]:
    """Return a member's part of every decision in its copy, recomputed as far as possible.

    If a decision also rests on a run that is not in ``earlier``, its share is not recomputed.
    """
    found: list[OwnPart] = []
    summed = {record.body["round"]: record.body["utilities"] for record in ledger.records("totals")}
    for one in found_in(ledger):
        body = one.record.body
        with reading(one.record):
            terms, totals = Terms.of(body), body["totals"]
            numbered = (body["decision"], body["replaces"]) == (len(found) + 1, len(found) or None)
            if not numbered or len(one.payouts) != totals["n"]:
                raise LedgerError(
                    "not the next decision, or without a payout for each member who has a score"
                )
            if body["rounds"] != one.rounds:
                raise LedgerError(
                    f"rests on {body['rounds']!r:.20} rounds, but {one.rounds} were closed before it"
                )
            _check_words(body, terms)
            _heading(body)
            departures = departures_of(terms, config, body["status"])
            check_marked(body, departures)
            mine = [record.body for record in one.payouts if record.body.get("member") == member]
            before, after = before_it(ledger, one, earlier), after_in(body)
            upto = numbered_on(before or (), rounds[: one.rounds])
            accounts: list[Account] = []
            if terms.score == "PHI":
                known_of = [*(part.account for part in before or ()), _account_at(ledger, one, rounds)]
                accounts = [each for each in known_of if each is not None]
                own = _own_settled(member, accounts, terms.missing)
            elif terms.score in ("FP", "EE"):  # these rest on everybody's reports
                own = None
            else:
                own = own_total(member, upto, terms.utility, score=terms.score, missing=terms.missing)
            if not after and terms.score == "ALPHA" and terms.missing == config.payment.missing:
                known = summed[one.rounds][terms.utility]["summed"]
                for key, other in (("n", "n"), ("gain", "gain"), ("positive", "alpha_plus")):
                    if totals[key] != known[other]:
                        raise LedgerError(f"totals.{key}: not the {other} stated after round {one.rounds}")
            # it may have reported in a run that was not given, or its score rests on what it may not see
            unknown = own is None and (before is None or terms.score in ("FP", "EE"))
            if len(mine) not in ((0, 1) if unknown else (own is not None,)):
                raise LedgerError(f"holds {len(mine)} payouts of {member}")
            share, paid = (number(mine[0]["share"]), mine[0]["cents"]) if mine else (0.0, 0)
            recomputed = before is not None
            made = _division(member, totals, terms)
            _check_unpaid(body["unpaid"], made, paid)
            if mine:
                kept = 1 - terms.forfeit if member in liars_in(accounts) else 1.0
                expected = _own_shares(own, body, terms) if recomputed and own is not None else []
                recomputed = bool(expected)
                near = _rounding(own, totals)
                if expected and not any(
                    math.isclose(share, kept * one_of, rel_tol=1e-9, abs_tol=near) for one_of in expected
                ):
                    raise LedgerError(
                        f"share of {member}: states {share!r}, the totals give {kept * expected[0]!r}"
                    )
                right = made.cents_of(member, share)
                if type(paid) is not int or paid != right:
                    raise LedgerError(f"cents of {member}: states {paid!r:.40}, its share gives {right}")
            found.append(
                OwnPart(
                    body["decision"], paid, terms.currency, share, recomputed, after, before is not None,
                    departures,
                )
            )  # fmt: skip
    return found


def _own_settled(member: str, accounts: Sequence[Account], missing: Missing) -> float | None:
    """Return a member's settled score over these runs, from its own statements; None if it has none."""
    known = [one for one in accounts if member in one.values]
    return total_of(known, missing).as_dict()[member] if known else None


def _check_words(body: Mapping[str, Any], terms: Terms) -> None:
    """Raise LedgerError unless terms and status are known values that fit together."""
    for what, given, known in (
        ("rule", terms.rule, get_args(Rule)),
        ("on_undefined", terms.on_undefined, get_args(OnUndefined)),
        ("status", body["status"], ("ok", "undefined")),
    ):
        if given not in known:
            raise LedgerError(f"{what}: expected one of {', '.join(known)}, got {given!r:.40}")
    if body["status"] == "undefined" and terms.on_undefined == "refuse":
        raise LedgerError("status: undefined, but by its terms such a decision is refused")
    if body["status"] == "undefined" and terms.rule == "equal":
        raise LedgerError("status: undefined, but equal shares are always defined")


def _division(member: str, totals: Mapping[str, Any], terms: Terms) -> Division:
    """Return how the budget was divided, according to the totals."""
    total, unit, a, b, c, d, last = totals["division"]
    whole = all(type(part) is int for part in (totals["n"], total, unit, a, b, c, d))
    if not whole or not isinstance(last, str):
        raise LedgerError("totals.division: expected whole numbers and a name")
    return Division(
        cents=division({member: 1.0}, terms.budget, terms.currency or None).cents,
        n=totals["n"],
        total=total,
        one=unit,
        down=rounds_down(total, unit, terms.rule),
        low=Fraction(a, b),
        high=Fraction(c, d),
        last=last,
    )


def _check_unpaid(unpaid: Any, made: Division, own: int) -> None:
    """Raise unless the unpaid rest follows from the sum of all shares, to within a cent per member."""
    rest = Fraction(0)
    if made.down:
        rest = made.cents * (1 - Fraction(made.total, max(made.total, made.one)))
    if not (rest - 1 < unpaid < rest + made.n if made.down else unpaid == 0) or unpaid + own > made.cents:
        raise LedgerError(f"unpaid: states {unpaid!r:.40}, the division leaves about {float(rest):.0f}")


def _fence_of(body: Mapping[str, Any]) -> Fence:
    """Return the numbers behind "fenced", as a decision states them.

    Raises:
        LedgerError: they contradict each other or the totals. Only how many members count must be believed.
    """
    told, n = body["fence"], body["totals"]["n"]
    if odd := sorted(set(told) ^ set(Fence.__dataclass_fields__)):
        raise LedgerError(f"fence.{odd[0]}: {'not one of its numbers' if odd[0] in told else 'missing'}")
    how = Fence(**{name: number(value) for name, value in told.items()})
    if not (how.positive > 0 and how.rest >= 0 and 0 < how.counted <= n):
        raise LedgerError(f"fence: expected a positive sum, and 1 to {n} who count, got {told!r:.120}")
    for name, value, right in (
        ("positive", how.positive, number(body["totals"]["positive"])),
        ("fence", how.fence, TIMES / (how.counted + TIMES - 1)),
    ):
        if not math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-9 * n):
            raise LedgerError(f"fence.{name}: states {value!r}, the totals give {right!r}")
    return how


def _rounding(own: float | None, totals: Mapping[str, Any]) -> float:
    """Return how far a share may be from what its score gives: scores that only rounding separates are equal.

    That is for scores that only rounding separates from 0 or from another member's, see
    `fedmerit.scoring.types.rounding`.
    """
    positive = number(totals["positive"])
    return 1e-9 * max(1.0, abs(own or 0.0)) / positive if positive > 0 else 1e-15


def _own_shares(own: float, body: Mapping[str, Any], terms: Terms) -> list[float]:
    """Return what a member's share may be by the totals; nothing if it depends on more than they state.

    It is one number, but two for a member below zero if a part is divided equally: whether it is surely below
    zero depends on the others' errors too.
    """
    totals = body["totals"]
    n = totals["n"]
    if terms.rule == "equal" or (body["status"] == "undefined" and terms.on_undefined == "equal"):
        return [1 / float(n)]
    if body["status"] == "undefined":
        return [terms.floor]
    if (terms.floor, terms.cap) != (0.0, 1.0):
        return []
    if terms.rule == "impartial":
        part = min(max(own / number(totals["gain"]), 0.0), 1.0)
        return [float((1 - (number(totals["clipped"]) - part) / (n - 1)) / n)]
    if terms.rule == "fenced":
        share = _fence_of(body).share(own)
    else:
        share = max(own, 0.0) / number(totals["positive"])
    if not terms.equal:
        return [share]
    if type(totals["among"]) is not int or not 0 < totals["among"] <= n:
        raise LedgerError(f"totals.among: expected 1 to {n} members, got {totals['among']!r:.40}")
    rest = (1 - terms.equal) * share
    return [rest + terms.equal / totals["among"], *([rest] if own < 0 else [])]
