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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, get_args

import numpy as np

from fedmerit.config import Scoring
from fedmerit.errors import InputError, LedgerError, UnsettledShares
from fedmerit.heading import NO_HEADING, Heading
from fedmerit.identity import SERVER, canonical, exact, new_salt, number
from fedmerit.ledger.account import Account, account_of, total_of
from fedmerit.ledger.chain import Record, Records
from fedmerit.ledger.joined_runs import RunPart, joined, numbered_on, part_of
from fedmerit.ledger.records import config_of, own_total, reading
from fedmerit.notes import Note, formatted, moment
from fedmerit.protocol.outcome import Round
from fedmerit.scoring.accumulate import Missing, accumulate
from fedmerit.scoring.doubts import Doubt, doubts
from fedmerit.scoring.rewards import (
    FORMULA,
    Division,
    OnUndefined,
    Payouts,
    Rule,
    Shares,
    division,
    payouts,
    rounds_down,
    shares,
    spelled,
)
from fedmerit.scoring.shrinkage import TIMES, Pull
from fedmerit.scoring.types import Reports, Scores

# ----------------------------------------------------------------------------------------------- decisions

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Terms:
    """The terms of a decision."""

    budget: str
    utility: str
    rule: Rule = "fair"
    score: str = "ALPHA"
    missing: Missing = "zero"
    floor: float = 0.0
    cap: float = 1.0
    on_undefined: OnUndefined = "refuse"
    despite_doubts: bool = False  # whether to pay despite gross doubts about the reports
    formula: int = FORMULA  # version of the formulas behind the rules

    def divide(self, total: Scores, rule: Rule | None = None) -> Shares:
        """Return the shares of these scores by these terms, or by another rule."""
        by = rule or self.rule
        return shares(
            total,
            by,
            floor=self.floor,
            cap=self.cap,
            on_undefined=self.on_undefined,
            formula=self.formula if by == self.rule else FORMULA,
        )

    def body(self) -> dict[str, Any]:
        """Return the terms as they are recorded."""
        return {
            **vars(self),
            "budget": spelled(self.budget),
            "floor": exact(self.floor),
            "cap": exact(self.cap),
        }

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Terms:
        """Read the terms in a record."""
        plain = {"despite_doubts": False, "formula": 1, **body}  # decisions of earlier versions lack them
        plain = {key: plain[key] for key in cls.__dataclass_fields__}
        if type(plain["formula"]) is not int or not 1 <= plain["formula"] <= FORMULA:
            raise LedgerError(f"formula: expected 1 to {FORMULA}, got {plain['formula']!r:.40}")
        if not isinstance(plain["despite_doubts"], bool):
            raise LedgerError(f"despite_doubts: expected true or false, got {plain['despite_doubts']!r:.40}")
        if (again := spelled(plain["budget"])) != plain["budget"]:
            raise LedgerError(f"budget: expected {again}, got {plain['budget']!r:.40}")
        return cls(**{**plain, "floor": number(plain["floor"]), "cap": number(plain["cap"])})


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
    heading: Heading = NO_HEADING  # title, consortium, date and currency
    counts: tuple[int, ...] = ()  # how many rounds of each of these runs; empty if it was not recomputed

    def __post_init__(self) -> None:
        object.__setattr__(self, "paid", replace(self.paid, currency=self.heading.currency or None))

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

    def records(self, scoring: Scoring) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the kind and body of each record of this decision."""
        body: dict[str, Any] = {
            "decision": self.number,
            "replaces": self.replaces,
            "rounds": self.rounds,
            **self.terms.body(),
            "status": self.shares.status,
            "unpaid": cents(self.paid.unpaid),
            **({"after": [list(one) for one in self.after]} if self.after else {}),
            **({"pull": _pull(self.shares.pull)} if self.shares.pull else {}),
            **({"heading": heading} if (heading := self.heading.body()) else {}),
        }
        amounts = {name: cents(amount) for name, amount in self.paid.items()}
        if scoring.visibility == "all":
            divided = {name: exact(share) for name, share in self.shares.items()}
            yield "decision", {**body, "shares": divided, "cents": amounts}
            return
        assert self.total is not None
        yield "decision", {**body, "totals": _totals(self.total, self.shares, self.terms.budget)}
        for name, share in self.shares.items():
            own = {"member": name, "salt": new_salt(), "share": exact(share), "cents": amounts[name]}
            yield "payout", {"decision": self.number, **own}


def _pull(how: Pull) -> dict[str, str]:
    """Return the numbers behind "shrunk" or "fenced" as they are recorded."""
    return {name: exact(value) for name, value in how.as_dict().items()}


def cents(amount: Any) -> int:
    """Return an amount of money in cents."""
    return int(amount * 100)


def money(amount: int) -> str:
    """Return cents as text for people, for example 1,234.50."""
    return formatted(Decimal(amount) / 100, ",.2f")


def decide(
    rounds: Sequence[Round],
    terms: Terms,
    before: Sequence[Decision] = (),
    *,
    game: str | None = None,
    metrics: Sequence[str] = (),
    after: Sequence[RunPart] = (),
    account: Account | None = None,
) -> Decision:
    """Return what these rounds pay under these terms, as the decision that follows those in ``before``.

    ``after`` are the runs before this one that the first of the rounds are from (see `joined`). ``account``
    is the one of this run, if it is settled. ``game`` and ``metrics`` are those of `doubts`.
    """
    scored: list[Reports] = []
    if terms.score == "PHI":
        accounts = _settled([*(run.account for run in after), account], terms)
        total = total_of(accounts, terms.missing)
    else:
        scored = [reports for one in rounds if (reports := one.to_reports(terms.utility)) is not None]
        total = accumulate(scored, score=terms.score, missing=terms.missing)
    divided = terms.divide(total)
    return Decision(
        number=len(before) + 1,
        replaces=before[-1].number if before else None,
        rounds=len(rounds) - sum(len(run.rounds) for run in after),
        terms=terms,
        total=total,
        shares=divided,
        paid=payouts(divided, terms.budget),
        doubts=doubts(scored, game=game, metrics=metrics) if scored else (),
        after=tuple((run.id, run.head) for run in after),
        counts=tuple(len(run.rounds) for run in after),
    )


def _settled(accounts: Sequence[Account | None], terms: Terms) -> list[Account]:
    """Return the accounts of all runs of a decision; raise UnsettledShares unless they can be paid by."""
    for one in accounts:
        if one is None:
            raise UnsettledShares(Note("settlement-lacking"), code="unsettled")
        if one.utility != terms.utility:
            raise LedgerError(f"utility: expected {one.utility!r}, as settled, got {terms.utility!r:.40}")
        if not one.final:
            raise UnsettledShares(
                Note("settlement-open", clients=one.missing, until=moment(one.closes)), code="open"
            )
        one.check_payable(terms.rule, despite=terms.despite_doubts)
    return [one for one in accounts if one is not None]


def _totals(total: Scores, divided: Shares, budget: str) -> dict[str, Any]:
    """Return the totals from which a member can recompute its share and cents, and no more about others."""
    positive = math.fsum(np.maximum(total.raw, 0.0))
    clipped = None
    if divided.rule == "impartial" and total.gain > 0:
        clipped = exact(math.fsum(np.clip(total.raw / total.gain, 0.0, 1.0)))
    return {
        **_of_shares(divided, budget),
        "gain": exact(total.gain),
        "positive": exact(positive),
        "clipped": clipped,
    }


def _of_shares(divided: Shares, budget: str) -> dict[str, Any]:
    """Return those of the totals that follow from the shares."""
    made = division(divided, budget)
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
    ledger: Records, rounds: Sequence[Round], scoring: Scoring, earlier: Sequence[RunPart] = ()
) -> list[Decision]:
    """Return every decision of a ledger, recomputed; raise LedgerError at the first that differs.

    If a decision also rests on a run that is not in ``earlier``, only what follows from its shares is
    recomputed: ``Decision.recomputed`` is False.
    """
    found: list[Decision] = []
    for one in found_in(ledger):
        with reading(one.record):
            told = _stated(one, scoring)
            after = before_it(ledger, one, earlier)
            again = _again(
                one, rounds, found, scoring, after, told["shares"], _account_at(ledger, one, rounds)
            )
            _same(told["shares"], dict(again.shares), exactly=False)
            anew = division(Shares(told["shares"], again.shares.rule), again.terms.budget)
            paid = {name: anew.cents_of(name, share) for name, share in told["shares"].items()}
            _same(told["cents"], paid, exactly=True)
            if one.record.body["unpaid"] != anew.cents - sum(paid.values()):
                raise LedgerError("the unpaid amount is not the rest of the budget")
            if again.recomputed:
                _same_pull(one.record.body.get("pull"), again.shares.pull)
            if scoring.visibility == "coordinator":
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
    scoring: Scoring,
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
    terms = Terms.of(body)
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
            paid=payouts(divided, terms.budget),
            after=after_in(body),
        )
    else:
        whole = numbered_on(after, rounds[: one.rounds])
        made = decide(
            whole, terms, before, game=scoring.game, metrics=scoring.whole, after=after, account=account
        )
    if (body["decision"], body["replaces"]) != (made.number, made.replaces):
        raise LedgerError(f"expected decision {made.number}, which replaces {made.replaces}")
    if body["status"] != made.shares.status:
        raise LedgerError(f"states status {body['status']!r:.20}, the reports give {made.shares.status!r}")
    return Decision(**{**vars(made), "record": one.record.seq, "heading": _heading(body)})


def _heading(body: Mapping[str, Any]) -> Heading:
    """Return the heading of a decision; earlier versions wrote none."""
    if "heading" not in body:
        return NO_HEADING
    told = body["heading"]
    if not isinstance(told, dict) or not told:
        raise LedgerError(f"heading: expected title, consortium, date or currency, got {told!r:.80}")
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


def _stated(one: StatedDecision, scoring: Scoring) -> dict[str, dict[str, Any]]:
    """Return shares and cents as the decision or its payouts state them."""
    body = one.record.body
    if scoring.visibility == "all":
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


def _same_pull(told: Any, again: Pull | None) -> None:
    """Raise unless the numbers behind "shrunk" or "fenced" are those that the scores give."""
    right = {} if again is None else again.as_dict()
    if set(told or {}) != set(right):
        raise LedgerError(f"pull: expected {', '.join(right) or 'nothing'}, got {told!r:.80}")
    for name, value in right.items():
        if not math.isclose(number(told[name]), value, rel_tol=1e-9, abs_tol=TOLERANCE):
            raise LedgerError(f"pull.{name}: states {told[name]!r:.40}, the scores give {value!r}")


def _same_totals(told: Mapping[str, Any], again: Decision, stated: Mapping[str, float]) -> None:
    divided = Shares(stated, again.shares.rule)
    if again.total is None:
        right = _of_shares(divided, again.terms.budget)
    else:
        right = _totals(again.total, divided, again.terms.budget)
    if odd := sorted(set(told) ^ {"n", "gain", "positive", "clipped", "division"}):
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
    share: float
    recomputed: bool  # whether the share was recomputed too, not only the cents
    after: tuple[tuple[str, str], ...] = ()  # as in `Decision`
    given: bool = True  # whether the runs in ``after`` were given


def own_parts(
    ledger: Records,
    member: str,
    rounds: Sequence[Round],
    scoring: Scoring,
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
            mine = [record.body for record in one.payouts if record.body.get("member") == member]
            before, after = before_it(ledger, one, earlier), after_in(body)
            upto = numbered_on(before or (), rounds[: one.rounds])
            if terms.score == "PHI":
                own = _own_settled(member, [*(before or ()), _account_at(ledger, one, rounds)], terms.missing)
            elif terms.score in ("FP", "EE"):  # these rest on everybody's reports
                own = None
            else:
                own = own_total(member, upto, terms.utility, score=terms.score, missing=terms.missing)
            if not after and terms.score == "ALPHA" and terms.missing == scoring.missing:
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
                expected = _own_share(own, body, terms) if recomputed and own is not None else None
                recomputed = expected is not None
                near = _rounding(own, totals)
                if expected is not None and not math.isclose(share, expected, rel_tol=1e-9, abs_tol=near):
                    raise LedgerError(f"share of {member}: states {share!r}, the totals give {expected!r}")
                right = made.cents_of(member, share)
                if type(paid) is not int or paid != right:
                    raise LedgerError(f"cents of {member}: states {paid!r:.40}, its share gives {right}")
            found.append(OwnPart(body["decision"], paid, share, recomputed, after, before is not None))
    return found


def _own_settled(member: str, parts: Sequence[RunPart | Account | None], missing: Missing) -> float | None:
    """Return a member's settled score over these runs, from its own statements; None if it has none."""
    found = [one.account if isinstance(one, RunPart) else one for one in parts]
    known = [one for one in found if one is not None and member in one.values]
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
        cents=division({member: 1.0}, terms.budget).cents,
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


def _pull_of(body: Mapping[str, Any], terms: Terms) -> Pull:
    """Return the numbers behind "shrunk" or "fenced", as a decision states them.

    Raises:
        LedgerError: they contradict each other or the totals. Only b, and how many members count, must be
            believed; the equal part is no less than what b leaves.
    """
    told, n = body["pull"], body["totals"]["n"]
    if odd := sorted(set(told) ^ set(Pull.__dataclass_fields__)):
        raise LedgerError(f"pull.{odd[0]}: {'not one of its numbers' if odd[0] in told else 'missing'}")
    how = Pull(**{name: number(value) for name, value in told.items()})
    if not (0 <= how.factor <= 1 and how.positive > 0 and how.rest >= 0 and 0 < how.counted <= n):
        raise LedgerError(f"pull: expected a factor from 0 to 1 and a positive sum, got {told!r:.120}")
    if terms.rule == "fenced" and how.factor != 1:
        raise LedgerError(f"pull.factor: expected 1 under 'fenced', got {how.factor!r}")
    for name, value, right in (
        ("positive", how.positive, number(body["totals"]["positive"])),
        ("mean", how.mean, how.positive / how.counted),
        ("fence", how.fence, TIMES / (how.counted + TIMES - 1)),
        ("rest", how.rest, max(how.rest, (1 - how.factor) / how.counted)),
    ):
        if not math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-9 * n):
            raise LedgerError(f"pull.{name}: states {value!r}, the totals give {right!r}")
    return how


def _rounding(own: float | None, totals: Mapping[str, Any]) -> float:
    """Return how far a share may be from what its score gives: scores that only rounding separates are equal.

    That is for scores that only rounding separates from 0 or from another member's, see
    `fedmerit.scoring.types.rounding`.
    """
    positive = number(totals["positive"])
    return 1e-9 * max(1.0, abs(own or 0.0)) / positive if positive > 0 else 1e-15


def _own_share(own: float, body: Mapping[str, Any], terms: Terms) -> float | None:
    """Return a member's share from the totals; None if it depends on more than they state."""
    totals = body["totals"]
    n = totals["n"]
    if terms.rule == "equal" or (body["status"] == "undefined" and terms.on_undefined == "equal"):
        return 1 / float(n)
    if body["status"] == "undefined":
        return terms.floor
    if (terms.floor, terms.cap) != (0.0, 1.0) or (terms.rule == "fenced" and terms.formula == 1):
        return None
    if terms.rule in ("shrunk", "fenced"):
        return _pull_of(body, terms).share(own)
    if terms.rule == "impartial":
        part = min(max(own / number(totals["gain"]), 0.0), 1.0)
        return float((1 - (number(totals["clipped"]) - part) / (n - 1)) / n)
    return max(own, 0.0) / number(totals["positive"])
