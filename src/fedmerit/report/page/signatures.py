"""Who signed what in a run, with the numbers of records; who approved the decision; the page at a glance."""

from __future__ import annotations

from dataclasses import dataclass

from fedmerit.identity import SERVER
from fedmerit.ledger.run import Run
from fedmerit.notes import day, words
from fedmerit.report.facts import Facts
from fedmerit.report.text import level_change, money_text

SIGNED = {
    "terms": ("join", "run"),
    "round": ("report", "round"),
    "statement": ("statement", ""),
    "sums": ("countersigned", "settled"),
    "end": ("seen", "end"),
}
"""What is signed -> the kinds of record by which a member and the server sign it."""
NONE = "-"


@dataclass(frozen=True)
class Signer:
    """The server or a member, and for each column the record that it signed, or a dash."""

    name: str
    role: str
    records: tuple[str, ...]


def signatures(facts: Facts) -> tuple[list[str], list[Signer]]:
    """Return columns and lines of the table: the last record of each kind; empty without signatures."""
    run, decision = facts.source.run, facts.decision
    if run is None or not run.signed:
        return [], []
    last = {(record.kind, record.author): record for record in run.records}
    kinds = [what for what, pair in SIGNED.items() if any((pair[0], name) in last for name in run.clients)]
    columns = [words(f"signed-col.{what}") for what in kinds]
    if decision is not None:
        date = f", {day(decision.heading.date)}" if decision.heading.date else ""
        columns.insert(0, words("signed.decision", number=decision.number, date=date))
    lines = []
    for name in (SERVER, *run.clients):
        cells = []
        for what in kinds:
            record = last.get((SIGNED[what][name == SERVER], name))
            cells.append(NONE if record is None else str(record.seq))
            if record is not None and what == "round":
                cells[-1] = words("signed.last", record=record.seq, round=record.body["round"])
        if decision is not None:
            own = _approval(run, name, decision.number)
            cells.insert(0, str(decision.record) if name == SERVER else own)
        shown = words("signed.server") if name == SERVER else name
        role = words("signed.role-server" if name == SERVER else "signed.role-member")
        lines.append(Signer(shown, role, tuple(cells)))
    return columns, lines


def _approval(run: Run, member: str, decision: int) -> str:
    """Return the record of a member's approval of a decision, or of the last one that it approved before."""
    own = [one for one in run.approvals if one.member == member]
    if not own:
        return words("signed.not-yet")
    one = max(own, key=lambda one: one.decision)
    if one.decision == decision:
        return str(one.record)
    return words("signed.older", record=one.record, decision=one.decision)


def approvals(facts: Facts) -> str:
    """Return who approved the decision in force, and who has not; empty if nobody can."""
    run, decision = facts.source.run, facts.decision
    if run is None or decision is None or not run.signed:
        return ""
    there, n = run.approved(decision.number), len(run.clients)
    if not there:
        return words("signed.approved-none", number=decision.number)
    if len(there) == n:
        return words("signed.approved-all", number=decision.number, n=n)
    missing = tuple(name for name in run.clients if name not in there)
    return words("signed.approved-some", number=decision.number, count=len(there), n=n, clients=missing)


def glance(facts: Facts) -> list[tuple[str, str]]:
    """Return the page at one glance, as names and values."""
    source, decision, run = facts.source, facts.decision, facts.source.run
    n, found = len(source.clients), dict[str, str]()
    if decision is not None:
        found["budget"] = money_text(decision.paid.budget, source.heading.currency)
        found["paid"] = words("glance.of", count=sum(map(bool, decision.paid.values())), n=n)
        if run is not None and run.signed:
            found["approved"] = words("glance.of", count=len(run.approved(decision.number)), n=n)
    else:
        found["members"] = str(n)
        if run is not None:
            found["rounds"] = words("glance.of", count=len(source.closed), n=source.planned or 0)
    found["model"] = level_change(facts, facts.total.gain)
    if facts.settled:
        account = facts.account
        found["equations"] = words("glance.of", count=account.holding, n=len(account.rounds))
    ledger = "broken" if source.broken else "verified" if run is not None else "lacking"
    found["ledger"] = words(f"glance.{ledger}")
    return [(words(f"glance.{code}"), value) for code, value in found.items()]
