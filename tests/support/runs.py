"""Runs in folders, as tests read, pay and forge them."""

from pathlib import Path
from types import SimpleNamespace

from fedmerit.config import recorded
from fedmerit.errors import LedgerError
from fedmerit.ledger.chain import Copy, Ledger, exported
from fedmerit.ledger.chain import verified as verified_records
from fedmerit.ledger.rounds import sees
from fedmerit.ledger.run import _Fold, replay
from fedmerit.protocol.outcome import Report, Round
from fedmerit.report.source import source_of
from fedmerit.report.statement import facts_as_decided as of_decision
from fedmerit.storage import checks, recorder
from fedmerit.verify import verified


def ledger_of(folder):
    return Ledger(Path(folder) / "ledger.sqlite", read_only=True)


def records_of(folder, kind=None):
    with ledger_of(folder) as ledger:
        return list(ledger.records(kind))


def bodies_of(folder, kind):
    return [record.body for record in records_of(folder, kind)]


def rounds_in(folder):
    with ledger_of(folder) as ledger:
        return rounds_of(ledger)


def copied(folder, path, shown=lambda record: True):
    """A copy of a folder's ledger: whole, what a member sees, or bodies for which ``shown`` is true."""
    with ledger_of(folder) as ledger:
        path.write_bytes(b"".join(exported(ledger, sees(shown) if isinstance(shown, str) else shown)))
    return path


def run_in(folder):
    if Path(folder).suffix == ".jsonl":
        return replay(Copy(folder))
    with ledger_of(folder) as ledger:
        return replay(ledger)


def sound(folder):
    """The run in a folder that verifies."""
    run, differs = verified(folder, [])
    if differs:
        raise differs
    return run


def record_decision(folder, terms, heading=None):
    """Verify a run, and record a decision in its ledger; return it, and whether it is new."""
    paid, new = recorder.record_decision(sound(folder), terms, heading)
    return paid.decisions[-1], new


def read_run(folder):
    """The rounds of a run, its decisions and its head."""
    run = sound(folder)
    return list(run.rounds), list(run.decisions), run.head


def renew(folder):
    """Rewrite score files that are older than the ledger."""
    return checks.renew(Path(folder), run_in(folder))


def first_body(ledger, kind):
    """The body of the only record of a kind."""
    (record,) = ledger.records(kind)
    return record.body


def config_of(ledger):
    return recorded(first_body(ledger, "run")["terms"]["config"])


def rounds_of(ledger):
    """The closed rounds of a ledger, read by a program that looks for no lies."""
    found, run = [], None
    for record in ledger.records():
        body = record.body
        if record.kind == "run":
            run = body["run"]
        elif record.kind == "schedule":
            one = Round(body["round"], tuple(body["members"]))
        elif record.kind == "blame":
            one.blamed += (body["member"],)
        elif record.kind == "report":
            if record.withheld:
                one.withheld += (record.author,)
                continue
            try:
                one.reports[record.author] = Report.from_body(record.author, body, run=run)
            except Exception as error:
                raise LedgerError(f"{record.name}: {error}", record=record.seq) from error
        elif record.kind == "round":
            one.included, one.declined = tuple(body["included"]), tuple(body["declined"])
            one.silent, one.aborted, one.body = tuple(body["silent"]), body["aborted"], body
            found.append(one)
    return found


def verify_chain(ledger, keys):
    """Check digests, signatures and seals alone; return whether there are keys."""
    known = []

    def noted(record):
        known.append(keys(record))
        return known[0]

    if not list(verified_records(ledger.records(), noted)):
        raise LedgerError(f"{ledger.path}: the ledger is empty")
    return bool(known[0])


def folded(records, path=Path("forged.sqlite")):
    """The run in these records, whose digests and signatures are not looked at."""
    fold = _Fold.begun(SimpleNamespace(path=path), records[0], None)
    for record in records:
        fold.add(record)
    return fold.finished()


def source_in(folder, utility=None):
    """The reports of a run, as they are scored."""
    return source_of(sound(folder), utility=utility)


def facts_as_decided(folder):
    """The facts of the last decision in a folder."""
    run = sound(folder)
    return of_decision(run, run.decisions[-1])
