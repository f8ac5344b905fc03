"""Who may see what in the ledger: what the server states after a round, and what a member's copy withholds.

With ``scoring.visibility = "all"`` every member may read every record; after a round the server states all
cumulative scores in one record (``scores``). With ``"coordinator"`` it states the ``totals`` for everybody to
read, and each member's own score in a salted record of its own (``score``). A member's copy then shows the
hash of a body where the body is another member's report, score or payout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedmerit.config import Scoring
from fedmerit.errors import LedgerError
from fedmerit.identity.encoding import SERVER, exact, new_salt, number
from fedmerit.ledger.chain import Record
from fedmerit.ledger.forms import compare
from fedmerit.ledger.records import reading, stated
from fedmerit.protocol.messages import Round
from fedmerit.scoring.accumulate import Missing, accumulate
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.types import Reports, Vector

PRIVATE = ("score", "payout")
"""Records of the server about one member, who is named in the body."""


def after_round(rounds: Sequence[Round], scoring: Scoring) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and body of what the server states when the last of these rounds is closed."""
    last = rounds[-1].number
    told = stated(rounds, scoring.utilities, scoring.missing)
    if scoring.visibility == "all":
        yield "scores", {"round": last, "cumulative_alpha": told}
        return
    yield "totals", {"round": last, "utilities": totals(rounds, scoring)}
    for name in dict.fromkeys(name for each in told.values() for name in each):
        own = {utility: each[name] for utility, each in told.items()}
        yield "score", {"round": last, "member": name, "salt": new_salt(), "cumulative_alpha": own}


def totals(rounds: Sequence[Round], scoring: Scoring) -> dict[str, dict[str, Any]]:
    r"""Per utility what everybody may know: of the last round, and of all rounds so far.

    .. math:: N, \quad D = v(M) - v(M_0), \quad v(M), \quad A = \sum_i \alpha_i, \quad
        A^+ = \sum_i \max(\alpha_i, 0), \quad T = \sum_i 2 (D - \alpha_i)
    """
    found = {}
    for utility in scoring.utilities:
        scored = [reports for one in rounds if (reports := one.to_reports(utility)) is not None]
        if not scored:
            continue
        all_of_them = accumulate(scored, missing=scoring.missing)
        entry: dict[str, Any] = {
            "summed": {"n": all_of_them.n, "gain": exact(all_of_them.gain)} | _sums(all_of_them.raw),
        }
        last = rounds[-1].to_reports(utility)
        if last is not None:
            entry["round"] = _of_round(last)
        found[utility] = entry
    return found


def _of_round(reports: Reports) -> dict[str, Any]:
    own = alpha(reports).raw
    t = math.fsum(2 * (reports.gain - value) for value in own.tolist())
    facts = {"n": reports.n, "gain": exact(reports.gain), "grand": exact(reports.grand)}
    return facts | _sums(own) | {"t": exact(t)}


def _sums(own: Vector) -> dict[str, str]:
    return {"alpha": exact(math.fsum(own)), "alpha_plus": exact(math.fsum(np.maximum(own, 0.0)))}


def sees(member: str) -> Callable[[Record], bool]:
    """Whether a member may see a record's body, where the coordinator alone sees all."""

    def visible(record: Record) -> bool:
        if record.kind == "report":
            return record.author == member
        return record.kind not in PRIVATE or record.body.get("member") == member

    return visible


def own_total(
    member: str, rounds: Sequence[Round], utility: str, *, score: str = "ALPHA", missing: Missing = "zero"
) -> float | None:
    """A member's score summed over rounds, from its own reports alone; None where it has none."""
    heard = [one for one in rounds if not one.aborted and (one.reports or one.withheld)]
    reported = [one for one in heard if member in one.reports]
    own = [reports for one in reported if (reports := one.to_reports(utility)) is not None]
    if not own:
        return None
    factor = len(heard) / len(own) if missing == "own-mean" else 1.0
    total = accumulate(own, score=score).as_dict()[member]
    if score == "MERIT":  # only what was summed is scaled
        summed = accumulate(own, score="IOI").as_dict()[member]
        return summed * factor + (total - summed)
    return total * factor


def reader_of(records: Sequence[Record], members: Sequence[str], given: str | None) -> str | None:
    """Whom a copy was made for; None where it withholds nothing.

    Args:
        records: all of the copy.
        members: of the run.
        given: who reads it, if that is known; its own records must all be there.
    """
    withheld = [record for record in records if record.withheld]
    if given is not None and given not in members:
        raise LedgerError(f"{given!r} is not a member of the run; members are {', '.join(members)}")
    if not withheld:
        return None
    open_ = {record.author for record in records if record.kind == "report" and not record.withheld}
    if given is None:
        if len(open_) != 1:
            raise LedgerError("a copy with withheld records: say whose it is (--as NAME)")
        (given,) = open_
    for record in withheld:
        if record.kind not in ("report", *PRIVATE):
            raise LedgerError(f"{record.name}: withheld, though every member may see it")
        if record.kind == "report" and record.author == given:
            raise LedgerError(f"{record.name}: withheld from its own author")
    return given


# ------------------------------------------------------------------------------------------ computed anew


def check_stated(
    records: Sequence[Record], rounds: Sequence[Round], scoring: Scoring, reader: str | None
) -> None:
    """What the server stated after each round, computed anew; in a member's copy, what that member can."""
    kinds = ("scores",) if scoring.visibility == "all" else ("totals", "score")
    stated_in: dict[int, list[Record]] = {one.number: [] for one in rounds}
    closed = 0
    for record in records:
        closed += record.kind == "round"
        if record.kind in kinds:
            with reading(record):
                if record.author != SERVER or (not record.withheld and record.body["round"] != closed):
                    raise LedgerError(f"expected what the server states after round {closed}")
                stated_in[closed].append(record)
    for one in rounds:
        upto = rounds[: one.number]
        for record in stated_in[one.number]:
            with reading(record):
                _check_one(record, upto, scoring, reader)
        if scoring.visibility == "all":
            if len(stated_in[one.number]) != 1:
                many = len(stated_in[one.number])
                raise LedgerError(f"after round {one.number}: expected one record of scores, found {many}")
        else:
            _check_complete(one, upto, stated_in[one.number], scoring, reader)


def _check_one(record: Record, upto: Sequence[Round], scoring: Scoring, reader: str | None) -> None:
    if record.withheld:
        return
    if record.kind == "totals":
        if reader is None:
            compare(_read(record.body["utilities"]), _read(totals(upto, scoring)), "utilities")
        else:
            _check_totals(record.body["utilities"], upto[-1], scoring)
        return
    told = _read(record.body["cumulative_alpha"])
    if record.kind == "score":
        name = record.body["member"]
        own = {
            utility: own_total(name, upto, utility, missing=scoring.missing) for utility in scoring.utilities
        }
        compare(told, own, f"cumulative alpha of {name}")
        return
    again = _read(stated(upto, scoring.utilities, scoring.missing))
    for utility, each in told.items():
        compare(each, again[utility], f"cumulative alpha of {utility}")
    if lacking := sorted(set(again) - set(told)):
        raise LedgerError(f"cumulative alpha of {lacking[0]}: missing")


def _check_totals(told: Mapping[str, Any], one: Round, scoring: Scoring) -> None:
    """What a member can say about totals: they fit the round they close, and each other."""
    for part in (part for each in told.values() for part in each.values()):
        if any(
            type(value) is not int if key == "n" else number(value) is None for key, value in part.items()
        ):
            raise LedgerError("totals: expected a whole number n, and numbers")
    for utility in scoring.utilities if one.reports or one.withheld else ():
        facts, used = told[utility]["round"], one.body["utilities"][utility]
        grand, gain = number(used["grand"]), number(used["grand"]) - number(used["empty"])
        n, sum_ = len(one.reports) + len(one.withheld), number(facts["alpha"])
        again = {"n": n, "gain": gain, "grand": grand}
        compare({key: value for key, value in _read(facts).items() if key in again}, again, f"{utility}")
        scale = n * abs(gain) + abs(sum_)
        if not math.isclose(number(facts["t"]), 2 * (n * gain - sum_), rel_tol=1e-9, abs_tol=1e-9 * scale):
            raise LedgerError(f"{utility}.t: not 2 (N gain - sum of alpha)")


def _check_complete(
    one: Round, upto: Sequence[Round], found: Sequence[Record], scoring: Scoring, reader: str | None
) -> None:
    """After a round there are totals once, and one score for everybody who has ever reported."""
    heard = {name for earlier in upto for name in (*earlier.reports, *earlier.withheld)}
    kinds = [record.kind for record in found]
    if kinds != ["totals"] + ["score"] * len(heard):
        raise LedgerError(
            f"after round {one.number}: expected totals and {len(heard)} scores, "
            f"found {kinds.count('totals')} and {kinds.count('score')}"
        )
    open_ = [record.body["member"] for record in found if record.kind == "score" and not record.withheld]
    expected = heard if reader is None else heard & {reader}
    if len(open_) != len(expected) or set(open_) != expected:
        raise LedgerError(f"after round {one.number}: expected the scores of {', '.join(sorted(expected))}")


def _read(value: Any) -> Any:
    """Numbers in hexadecimal as numbers, everywhere in a value."""
    if isinstance(value, Mapping):
        return {key: _read(item) for key, item in value.items()}
    return number(value) if isinstance(value, str) else value
