"""Commands on reports: score, compare, rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from typer import Argument, Option

from fedmerit.cli import base
from fedmerit.cli.base import app, err, fail, form_of, heading_of, out, write, write_json
from fedmerit.notes import words
from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.rewards import Rule

if TYPE_CHECKING:
    from fedmerit.report.source import Source


Format_ = Annotated[
    Literal["table", "json", "csv", "xlsx"],
    Option("--format", help="Output format; xlsx is a workbook, which goes to --out."),
]
Out_ = Annotated[Path | None, Option("--out", help="Where to write a workbook (--format xlsx), a new file.")]
SummedScore = Literal["ALPHA", "LOO", "IOI", "FP", "EE", "COS", "MERIT", "PHI", "PANEL"]


def _each(section: str, values: Sequence[str]) -> str:
    """Return what each value of an option means, in the words of the page."""
    means = {value: words(f"{section}.{value}", score=words("score.ALPHA")) for value in values}
    return (
        "; ".join(f"{value}: {text[:1].lower()}{text[1:].rstrip('.')}" for value, text in means.items()) + "."
    )


def _number(text: str) -> float:
    from fedmerit.scoring.types import written_number

    return written_number(str(text))


def _part(help_: str, usual: str) -> Any:
    """Return an option that takes a number, as people write it."""
    shown = f"as in the run, otherwise {usual}"
    return Option(help=help_, parser=_number, metavar="NUMBER", show_default=shown)


Reports_ = Annotated[Path, Argument(metavar="SOURCE")]
Utility_ = Annotated[
    str | None,
    Option(help="Name of the utility if the file does not say it, or the one to read if it has several."),
]
Missing_ = Annotated[
    Missing | None,
    Option(help="What a missed round counts as.", show_default="as in the run, otherwise zero"),
]
Score_ = Annotated[
    SummedScore | None,
    Option(
        help=f"The score that is summed over rounds. {_each('score-means', get_args(SummedScore))}",
        case_sensitive=False,
        show_default="PANEL with a panel, PHI if the run is settled, otherwise ALPHA",
    ),
]


@app.command()
def score(
    file: Reports_,
    format: Format_ = "table",
    out_: Out_ = None,
    utility: Utility_ = None,
    score: Score_ = None,
    missing: Missing_ = None,
    last_round: Annotated[
        bool, Option("--last-round", help="Also print LOO, FP and EE of the last round.")
    ] = False,
) -> None:
    """Print scores, ranks and intervals from reports: who contributed what, and how sure that is.

    SOURCE is a file of reports (.csv, .xlsx or .json), a run folder, or - for a file on standard input.
    """
    from fedmerit.report.exports import origin_text, scores_as, scores_workbook
    from fedmerit.report.facts import Facts
    from fedmerit.report.source import read_source
    from fedmerit.report.terminal import print_facts, print_truth, tell_notes, tell_planted, warn

    _check_out(out_, format)
    if format == "csv" and (score or missing):
        fail(
            f"--{'score' if score else 'missing'}: expected --format table or json, got csv, which holds the "
            "scores of single rounds but no sums"
        )
    with base.on_disk(file) as there:
        source = read_source(there, utility, form=form_of(), missing=missing)
    _check_score(score, source)
    facts = Facts(source, score=score)
    screen = out if format == "table" else err
    tell_planted(screen, source)
    if facts.unfinished:
        closed, planned = facts.unfinished
        screen.print(f"WARNING: {words('terminal.covers-unfinished', closed=closed, planned=planned)}")
    if format == "table":
        print_facts(out, facts, last_round=last_round)
        if source.analysed and source.run is not None:
            print_truth(out, facts)
    else:
        if out_ is None:
            write(scores_as(source, format))
        else:
            _write_workbook(out_, scores_workbook(facts, origin_text(file, "")))
        warn(err, [*([source.unsettled] if source.unsettled else []), *facts.doubts])
        tell_notes(err, source.notes)


def _check_out(path: Path | None, format: str) -> None:
    """Fail unless a workbook has a new file, and nothing else has one."""
    if (path is None) == (format == "xlsx"):
        fail("expected --format xlsx and --out FILE.xlsx together")
    if path is not None and (path.suffix.lower() != ".xlsx" or path.exists()):
        taken = "exists already and is not overwritten" if path.exists() else ""
        fail(f"{path}: {taken or 'expected a name that ends in .xlsx'}")


def _write_workbook(path: Path, data: bytes) -> None:
    from fedmerit.storage.run_folder import write as write_file

    write_file(path, data)
    err.print(f"wrote {path}")


def _check_score(score: str | None, source: Source) -> None:
    """Fail if a score was asked for that this source does not have."""

    judged = source.config is not None and source.config.judged
    settled = "PANEL" if judged else "PHI"
    if score in ("PHI", "PANEL") and (score != settled or not source.account):
        why = source.unsettled if score == settled else ""
        fail(f"--score: {why or words('unsettled.no-PHI' if score == 'PHI' else 'unsettled.no-PANEL')}")
    if score not in (None, settled) and not source.rounds:
        fail(f"--score: expected {settled}, because the members of this run report nothing, got {score}")


@app.command()
def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN...")],
    out_: Annotated[
        Path | None, Option("--out", help="Also write one HTML page that anybody can open.")
    ] = None,
    format: base.PlainFormat = "table",
    utility: Utility_ = None,
    score: Score_ = None,
    missing: Missing_ = None,
    force: base.Force = False,
) -> None:
    """Print what training again changes: each member's score over runs that repeat each other.

    RUN are the folders of at least two runs with the same members, data, settings and test pool, such as
    `fedmerit run --repeat` makes; or the one folder that holds them; or files of reports. Others are refused.
    """
    from fedmerit.report.comparison import compared
    from fedmerit.report.page.html import check_target, render_comparison, source_id
    from fedmerit.report.terminal import print_comparison, tell_notes
    from fedmerit.storage.run_folder import runs_of
    from fedmerit.storage.run_folder import write as write_file

    found = compared(runs_of(runs), utility=utility, score=score, missing=missing, form=form_of())
    if out_ is not None:
        check_target(out_, source_id(*(run.facts for run in found.runs)), force=force)
    screen = out if format == "table" else err
    if format == "table":
        print_comparison(out, found)
    else:
        write_json(found.as_dict())
    for run in found.runs:
        tell_notes(screen, run.facts.source.notes, name=run.name)
    if out_ is not None:
        write_file(out_, render_comparison(found).encode())
        screen.print(f"wrote {out_}")


@app.command()
def rewards(
    file: Reports_,
    budget: Annotated[
        str, Option(help="The amount to divide, such as 10000.00 or '10 000,00 EUR'.", metavar="AMOUNT")
    ],
    rule: Annotated[
        Rule | None,
        Option(
            help=f"How scores become shares. {_each('rule-in-short', get_args(Rule))}",
            show_default="as in the run, otherwise fenced",
        ),
    ] = None,
    utility: Utility_ = None,
    score: Score_ = None,
    missing: Missing_ = None,
    equal: Annotated[
        float | None,
        _part("Part of the budget that is divided equally among members not surely below zero.", "0"),
    ] = None,
    floor: Annotated[float | None, _part("Smallest share of each member who has a score.", "0")] = None,
    cap: Annotated[float | None, _part("Largest share of a member.", "1")] = None,
    format: Format_ = "table",
    out_: Out_ = None,
    despite_doubts: Annotated[
        bool,
        Option(
            "--despite-doubts", help="Pay although the reports contradict themselves; the ledger records it."
        ),
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only print; record and write nothing.")] = False,
    title: base.Title = None,
    date: base.Date = None,
    currency: base.Currency = None,
    contact: Annotated[
        str | None, Option(help="Whom members write to about the decision.", show_default="nobody")
    ] = None,
    objections: Annotated[
        str | None,
        Option(
            help="The last day for objections, such as 2026-12-31.",
            metavar="DAY",
            show_default="as the contract says",
        ),
    ] = None,
    language: base.Language = None,
) -> None:
    """Divide a budget into exact cents; for a run folder, record that and write a statement per member.

    A run is paid by the terms in its settings, which its members signed. Options that ask for
    others make the decision a departure, which is recorded and told first.

    SOURCE is a file of reports (.csv, .xlsx or .json), - for a file on standard input, or a run folder, which
    gets the record and the statements. Members who never reported are paid nothing.
    """
    from fedmerit.files.sheets import sheet_text
    from fedmerit.ledger.decisions import departs
    from fedmerit.notes import speaking
    from fedmerit.report.exports import origin_text, payouts_workbook
    from fedmerit.report.facts import Facts
    from fedmerit.report.payment import propose, score_to_pay
    from fedmerit.report.source import read_source
    from fedmerit.report.statement import record
    from fedmerit.report.terminal import print_proposal, tell_notes, tell_planted, warn
    from fedmerit.report.text import printable

    _check_out(out_, format)
    heading = heading_of(currency, title=title, date=date, contact=contact, objections=objections)
    with base.on_disk(file) as there:
        source = read_source(there, utility, form=form_of(), missing=missing)
    paid_by = score_to_pay(source, score)
    _check_score(paid_by, source)
    facts = Facts(source, score=paid_by)
    chosen = {
        "rule": rule, "equal": equal, "floor": floor, "cap": cap,
        "currency": heading.currency or None, "despite_doubts": despite_doubts,
    }  # fmt: skip
    found = propose(facts, budget, chosen, dry_run=dry_run)
    said = ""
    if source.run and not dry_run:  # record it before printing, so that what is printed is in the ledger
        said = record(source.run, found, heading, language)
    screen = out if format == "table" else err
    if departed := departs(found.departures):
        screen.print(f"WARNING: {printable(departed)}")
    tell_planted(screen, source)
    if format == "table":
        print_proposal(out, found)
    else:
        warn(err, [*found.warnings, *facts.doubts])
        tell_notes(err, source.notes)
        if out_ is not None:
            with speaking(language or "en"):
                origin = origin_text(file, heading.date)
                _write_workbook(out_, payouts_workbook(found, origin))
        elif format == "json":
            write_json(found.as_dict())
        else:
            write(sheet_text(found.rows()))
    if said:
        screen.print(said)


@app.command()
def approve(
    source: Annotated[Path, Argument(metavar="RUN")],
    file: Annotated[Path | None, Argument(metavar="FILE")] = None,
    key: Annotated[Path | None, Option(help="The member's private key.")] = None,
    out_: Annotated[
        Path | None, Option("--out", help="Write the approval to a new file; record nothing.")
    ] = None,
) -> None:
    """Approve the latest decision as a member, with its key; or record an approval that a member signed.

    RUN is a run folder, or a member's copy of its ledger (.jsonl) with --out. FILE is what a member signed on
    its own machine. Only the holder of the server's key records approvals; they cannot be forged without the
    member's.
    """
    import msgspec

    from fedmerit.identity import load_key, public_key, write_new
    from fedmerit.report.page.html import refreshed
    from fedmerit.storage.recorder import read_approval, record_approval, sign
    from fedmerit.verify import is_copy, verified_run

    if (key is None) == (file is None) or (file is not None and out_ is not None):
        fail("approve: expected either --key, also with --out, or the FILE of a member")
    signed = None if file is None else read_approval(file)
    run = verified_run(source, None if key is None else public_key(load_key(key)))
    if signed is None:
        assert key is not None
        signed = sign(run, key)
    if out_ is not None:
        write_new(out_, msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n")
        out.print(
            words("terminal.approval-written", client=signed.member, record=signed.approval.record, path=out_)
        )
        return
    if is_copy(source):
        fail(f"{source}: a copy records nothing: expected the run folder, or --out FILE to sign into a file")
    run = record_approval(run, signed)
    approval = run.approvals[-1]
    done = {"client": approval.member, "decision": approval.decision, "record": approval.record}
    out.print(words("terminal.approved", **done))
    there = run.approved(approval.decision)
    if missing := tuple(name for name in run.clients if name not in there):
        out.print(words("terminal.approvals-missing", clients=missing))
    if said := refreshed(run):
        out.print(said)
    out.print(f"head: {run.head}")
