"""What one member can compute anew of payout decisions, from its own records and the totals alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, get_args

from fedmerit.config import Scoring
from fedmerit.errors import LedgerError
from fedmerit.federation.decisions import Terms, found_in
from fedmerit.federation.journal import Round, reading
from fedmerit.federation.visibility import own_total
from fedmerit.ledger import Records, number
from fedmerit.money import Division, division, rounds_down
from fedmerit.rewards import OnUndefined, Rule


@dataclass(frozen=True)
class OwnPart:
    """What one member can check of a decision from its own records and the totals."""

    number: int
    cents: int
    share: float
    recomputed: bool  # the share too, not only the cents that follow from it


def own_parts(ledger: Records, member: str, rounds: Sequence[Round], scoring: Scoring) -> list[OwnPart]:
    """A member's part of every decision in its copy, computed anew as far as it can be."""
    found: list[OwnPart] = []
    summed = {record.body["round"]: record.body["utilities"] for record in ledger.records("totals")}
    for one in found_in(ledger):
        body = one.record.body
        with reading(one.record):
            terms, totals = Terms.of(body), body["totals"]
            numbered = (body["decision"], body["replaces"]) == (len(found) + 1, len(found) or None)
            if not numbered or len(one.payouts) != totals["n"]:
                raise LedgerError("not the next decision, or not with a payout for everybody who has a score")
            if body["rounds"] != one.rounds:
                raise LedgerError(
                    f"rests on {body['rounds']!r:.20} rounds, {one.rounds} were closed before it"
                )
            _check_words(body, terms)
            mine = [record.body for record in one.payouts if record.body.get("member") == member]
            upto = rounds[: one.rounds]
            own = own_total(member, upto, terms.utility, score=terms.score, missing=terms.missing)
            if terms.score == "ALPHA" and terms.missing == scoring.missing:
                known = summed[one.rounds][terms.utility]["summed"]
                for key, other in (("n", "n"), ("gain", "gain"), ("positive", "alpha_plus")):
                    if totals[key] != known[other]:
                        raise LedgerError(f"totals.{key}: not the {other} stated after round {one.rounds}")
            if len(mine) != (own is not None):
                raise LedgerError(f"holds {len(mine)} payouts of {member}")
            share, paid = (number(mine[0]["share"]), mine[0]["cents"]) if mine else (0.0, 0)
            recomputed = True
            made = _division(member, totals, terms)
            _check_unpaid(body["unpaid"], made, paid)
            if own is not None:
                expected = _own_share(own, body, terms)
                recomputed = expected is not None
                if expected is not None and not math.isclose(share, expected, rel_tol=1e-9, abs_tol=1e-15):
                    raise LedgerError(f"share of {member}: states {share!r}, the totals give {expected!r}")
                right = made.cents_of(member, share)
                if type(paid) is not int or paid != right:
                    raise LedgerError(f"cents of {member}: states {paid!r:.40}, its share gives {right}")
            found.append(OwnPart(body["decision"], paid, share, recomputed))
    return found


def _check_words(body: Mapping[str, Any], terms: Terms) -> None:
    """Terms and status must be some that there are, and that go together."""
    for what, given, known in (
        ("rule", terms.rule, get_args(Rule)),
        ("on_undefined", terms.on_undefined, get_args(OnUndefined)),
        ("status", body["status"], ("ok", "undefined")),
    ):
        if given not in known:
            raise LedgerError(f"{what}: expected one of {', '.join(known)}, got {given!r:.40}")
    if body["status"] == "undefined" and terms.on_undefined == "refuse":
        raise LedgerError("status: undefined, where its terms refuse to pay")
    if body["status"] == "undefined" and terms.rule == "equal":
        raise LedgerError("status: undefined, but equal shares never are")


def _division(member: str, totals: Mapping[str, Any], terms: Terms) -> Division:
    """How the budget was divided, as the totals say."""
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
    """What is left over follows from the sum of all shares, to less than a cent a member."""
    rest = Fraction(0)
    if made.down:
        rest = made.cents * (1 - Fraction(made.total, max(made.total, made.one)))
    if not (rest - 1 < unpaid < rest + made.n if made.down else unpaid == 0) or unpaid + own > made.cents:
        raise LedgerError(f"unpaid: states {unpaid!r:.40}, the division leaves about {float(rest):.0f}")


def _own_share(own: float, body: Mapping[str, Any], terms: Terms) -> float | None:
    """The share that the totals give; None where it depends on more than they tell."""
    totals = body["totals"]
    n = totals["n"]
    if terms.rule == "equal" or (body["status"] == "undefined" and terms.on_undefined == "equal"):
        return 1 / float(n)
    if body["status"] == "undefined":
        return terms.floor
    if (terms.floor, terms.cap) != (0.0, 1.0) or terms.rule == "fenced":
        return None
    if terms.rule == "impartial":
        part = min(max(own / number(totals["gain"]), 0.0), 1.0)
        return float((1 - (number(totals["clipped"]) - part) / (n - 1)) / n)
    return max(own, 0.0) / number(totals["positive"])
