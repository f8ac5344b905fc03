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

from fedmerit.accumulate import accumulate
from fedmerit.config import Scoring
from fedmerit.errors import LedgerError
from fedmerit.federation.journal import Round, stated
from fedmerit.ledger import Record, exact, new_salt
from fedmerit.scores import alpha
from fedmerit.types import Reports, Vector

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


def of_member(record: Record, member: str) -> Mapping[str, Any] | None:
    """The body of one of the server's records about a member, if it is about this one and shown."""
    return record.body if record.kind in PRIVATE and record.body.get("member") == member else None
