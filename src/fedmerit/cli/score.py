"""Commands on reports: score, rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedmerit.cli.base import (
    Consortium_,
    Currency_,
    Date_,
    Decimal_,
    Delimiter_,
    Distinct_,
    Encoding_,
    Language_,
    Title_,
    app,
    err,
    fail,
    form_of,
    heading_of,
    out,
    write,
)
from fedmerit.scoring.files import LEDGER

if TYPE_CHECKING:
    from rich.console import Console

    from fedmerit.config import Config
    from fedmerit.heading import Heading
    from fedmerit.ledger.decisions import Departure, Terms
    from fedmerit.notes import Note
    from fedmerit.report.source import Source
    from fedmerit.scoring.doubts import Doubt
    from fedmerit.scoring.files import Content
    from fedmerit.scoring.rewards import Payouts, Shares
    from fedmerit.scoring.share_intervals import Spans
    from fedmerit.scoring.spreadsheets import SheetForm
    from fedmerit.storage.run_folder import Recorded


class Format(StrEnum):
    """Output formats of results."""

    table = "table"
    json = "json"
    csv = "csv"


class Missing(StrEnum):
    """What a missed round counts in the sum."""

    zero = "zero"
    own_mean = "own-mean"


class SummedScore(StrEnum):
    """Scores that can be summed over rounds."""

    alpha = "ALPHA"
    loo = "LOO"
    ioi = "IOI"
    fp = "FP"
    ee = "EE"
    cos = "COS"
    merit = "MERIT"
    phi = "PHI"


class Rule(StrEnum):
    """Rules by which scores become shares."""

    fenced = "fenced"
    fair = "fair"
    impartial = "impartial"
    equal = "equal"


class OnUndefined(StrEnum):
    """What happens if scores allow no shares."""

    refuse = "refuse"
    equal = "equal"
    zero = "zero"


def _number(text: str) -> float:
    from fedmerit.scoring.validate import written_number

    return written_number(str(text))


Reports_ = Annotated[
    list[Path],
    typer.Argument(
        help="Reports (.json or .csv), or a run folder; or the folders of runs that follow each other.",
        metavar="SOURCE...",
    ),
]
Utility_ = Annotated[
    str | None,
    typer.Option(
        help="Name of the utility if the file does not say it, or the one to read if it has several."
    ),
]
Missing_ = Annotated[
    Missing | None,
    typer.Option(help="What a missed round counts as.", show_default="as in the run, otherwise zero"),
]
Score_ = Annotated[
    SummedScore | None,
    typer.Option(
        help="The score that is summed over rounds.",
        case_sensitive=False,
        show_default="PHI if the run is settled, otherwise ALPHA",
    ),
]


@app.command()
def score(
    files: Reports_,
    format: Annotated[Format, typer.Option(help="How to print.")] = Format.table,
    utility: Utility_ = None,
    score: Score_ = None,
    missing: Missing_ = None,
    delimiter: Delimiter_ = None,
    decimal: Decimal_ = None,
    encoding: Encoding_ = None,
    distinct: Distinct_ = None,
) -> None:
    """Print scores, ranks and intervals from reports: who contributed what, and how sure that is.

    SOURCE is a file of reports (.json or .csv), or a run folder. Several run folders are counted as one if
    each run follows the one before.
    """
    from fedmerit.report.facts import Facts
    from fedmerit.report.source import document_in, source_of
    from fedmerit.report.terminal import print_facts, print_truth

    if format is Format.csv and (score or missing):
        fail(
            f"--{'score' if score else 'missing'}: expected --format table or json, got csv, which holds the "
            "scores of single rounds but no sums"
        )
    *earlier, file = files
    form = form_of(delimiter, decimal, encoding, distinct)
    content, run = read_reports(file, utility, after=earlier, form=form)
    config = _settings(file)
    counts = _missing(config, missing)
    source = source_of(content, run, config, missing=counts)
    _check_score(score and score.value, source)
    facts = Facts(source, score=score and score.value)
    screen = out if format is Format.table else err
    _tell_planted(source, screen)
    if warning := _unfinished(run, "covers"):
        screen.print(f"WARNING: {warning}")
    if format is Format.table:
        print_facts(out, facts)
        if config and config.analysis and not earlier and (file / "scores.json").is_file():
            print_truth(out, document_in(file / "scores.json"), source.rounds)
    else:
        write(_scores_as(format, content, run, counts))
        _warn([*([source.unsettled] if source.unsettled else []), *facts.doubts])
        tell_read(source, err)


def _check_score(score: str | None, source: Source) -> None:
    """Fail if a score was asked for that this source does not have."""
    from fedmerit.notes import words

    if score == "PHI" and not source.accounts:
        fail(f"--score: {source.unsettled or words('unsettled.not-settled')}")
    if score not in (None, "PHI") and not source.rounds:
        fail(f"--score: expected PHI, because the members of this run report nothing, got {score}")


def _scores_as(format: Format, content: Content, run: Recorded | None, missing: Any) -> str:
    """Return scores as text for programs, as in a run's score files."""
    from fedmerit.ledger.account import block_of
    from fedmerit.ledger.records import put_phi, score_files, scores_document
    from fedmerit.scoring.files import as_csv, as_json, document

    block = None
    if run and run.accounts:
        past = [sum(len(part.rounds) for part in run.runs[:k]) for k in range(len(run.accounts))]
        block = block_of(run.accounts, content.clients, missing, past)
    if run and not content.rounds:
        utilities = run.config.scoring.utilities
        made = scores_document(run.rounds, content.clients, utilities, settlement=block, settled=True)
        return dict(score_files(made))[f"scores.{format.value}"].decode()
    written = document(content.rounds, clients=content.clients, missing=missing)
    if run:
        put_phi(written, run.rounds, str(content.rounds[0].utility), missing)
    if block is not None:
        written["settlement"] = block
    return as_json(written) if format is Format.json else as_csv(written)


@app.command()
def rewards(
    files: Reports_,
    budget: Annotated[
        str,
        typer.Option(help="The amount to divide, such as 10000.00 or '10 000,00 EUR'.", metavar="AMOUNT"),
    ],
    rule: Annotated[
        Rule | None,
        typer.Option(help="How scores become shares.", show_default="as in the run, otherwise fenced"),
    ] = None,
    utility: Utility_ = None,
    score: Score_ = None,
    missing: Missing_ = None,
    equal: Annotated[
        float | None,
        typer.Option(
            help="Part of the budget that is divided equally among members not surely below zero.",
            parser=_number,
            metavar="NUMBER",
            show_default="as in the run, otherwise 0",
        ),
    ] = None,
    floor: Annotated[
        float | None,
        typer.Option(
            help="Smallest share of each member who has a score.",
            parser=_number,
            metavar="NUMBER",
            show_default="as in the run, otherwise 0",
        ),
    ] = None,
    cap: Annotated[
        float | None,
        typer.Option(
            help="Largest share of a member.",
            parser=_number,
            metavar="NUMBER",
            show_default="as in the run, otherwise 1",
        ),
    ] = None,
    on_undefined: Annotated[
        OnUndefined, typer.Option(help="What to do if scores allow no shares.")
    ] = OnUndefined.refuse,
    format: Annotated[Format, typer.Option(help="How to print.")] = Format.table,
    despite_doubts: Annotated[
        bool,
        typer.Option(
            "--despite-doubts", help="Pay although the reports contradict themselves; the ledger records it."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print; record and write nothing.")] = False,
    title: Title_ = None,
    consortium: Consortium_ = None,
    date: Date_ = None,
    currency: Currency_ = None,
    language: Language_ = None,
    delimiter: Delimiter_ = None,
    decimal: Decimal_ = None,
    encoding: Encoding_ = None,
    distinct: Distinct_ = None,
) -> None:
    """Divide a budget into exact cents; for a run folder, record that and write a statement per member.

    A run is paid by the terms in its settings ([payment]), which its members signed. Options that ask for
    others make the decision a departure, which is recorded and told first.

    SOURCE is a file of reports (.json or .csv), or a run folder. Several run folders are paid as one if each
    run follows the one before; the last one gets the record and the statements. Members who never reported
    are paid nothing.
    """
    from fedmerit.errors import UnsettledShares
    from fedmerit.ledger.decisions import departs, departures_of
    from fedmerit.notes import Note
    from fedmerit.report.facts import Facts
    from fedmerit.report.source import source_of
    from fedmerit.report.terminal import print_payouts
    from fedmerit.report.text import apart_text, on_terminal, printable
    from fedmerit.scoring.doubts import check_payable
    from fedmerit.scoring.rewards import payouts
    from fedmerit.scoring.share_intervals import share_intervals

    *earlier, file = files
    heading = heading_of(title, consortium, date, currency)
    form = form_of(delimiter, decimal, encoding, distinct)
    content, run = read_reports(file, utility, after=earlier, form=form)
    config = run.config if run else _settings(file)
    agreed = config.payment if config else None
    asked = score.value if score else None
    if asked is None and agreed and agreed.score != "auto":
        asked = agreed.score
    counts = _missing(config, missing)
    source = source_of(content, run, config, missing=counts)
    _check_score(asked, source)
    if source.unsettled and asked is None:
        raise UnsettledShares(Note("settlement-reported", why=source.unsettled), code="unsettled")
    facts = Facts(source, score=asked)
    coin, unknown = _coin(budget, heading.currency, agreed.currency if agreed else "")
    chosen: dict[str, Any] = {
        "rule": rule and rule.value, "equal": equal, "floor": floor, "cap": cap, "currency": coin
    }  # fmt: skip
    terms = replace(
        facts.agreed,
        budget=budget,
        on_undefined=on_undefined.value,
        despite_doubts=despite_doubts,
        **{key: value for key, value in chosen.items() if value is not None},
    )
    total, doubted, without = facts.total, facts.doubts, facts.unscored
    with _option_names(doubted):
        check_payable(doubted, terms.rule, despite=despite_doubts)
        for account in source.accounts if facts.settled else ():
            account.check_payable(terms.rule, despite=despite_doubts)
        divided = terms.divide(total, facts.liars(source))
    paid = payouts(divided, budget, coin or None)
    departures = departures_of(terms, config, divided.status) if config else ()
    heading = replace(heading, currency=coin)
    told = (*divided.notes, *facts.absence_notes, *(run.notes if run else ()), *source.notes, *unknown)
    notes = dict.fromkeys(on_terminal(note, "--on-undefined") for note in told)
    divided = replace(divided, notes=tuple(notes))
    spans, apart = share_intervals(total, divided), facts.apart(divided)
    warning, said = _unfinished(run, "pays for"), ""
    if warning:
        warning += "; a later decision can replace it"
    if facts.settled and dry_run and (still := source.accounts[-1].provisional()):
        warning = "; ".join([*([warning] if warning else []), still])
    warning = "; ".join([*([warning] if warning else []), *_paid_before(run)])
    if run and not dry_run:  # record it before printing, so that what is printed is in the ledger
        spoken = language.value if language else None
        said = _record(file, replace(terms, budget=str(paid.budget)), heading, spoken, after=earlier)
    screen = out if format is Format.table else err
    if departed := departs(departures):
        screen.print(f"WARNING: {printable(departed)}")
    _tell_planted(source, screen)
    if format is Format.table:
        print_payouts(
            out, paid, divided, spans=spans, apart=apart, unscored=without, warning=warning, doubts=doubted
        )
    else:
        more = (*((apart_text(apart, divided),) if apart else ()), *((warning,) if warning else ()))
        noted = replace(divided, notes=(*map(str, doubted), *divided.notes, *more))
        if warning:
            err.print(f"WARNING: {warning}")
        write(_payouts_as(format, paid, noted, without, spans, departures))
        _warn(doubted)
        tell_read(source, err)
    if said:
        screen.print(said)


def _payouts_as(
    format: Format,
    paid: Payouts,
    divided: Shares,
    unscored: Sequence[str],
    spans: Spans | None,
    departures: Sequence[Departure],
) -> str:
    """Return payouts as text for programs; members who never reported are listed with 0."""
    from fedmerit.scoring.share_intervals import amounts_within
    from fedmerit.scoring.spreadsheets import sheet_text

    none = dict.fromkeys(unscored, 0.0)
    divided_all = {**divided, **none}
    amounts = {name: str(paid.by_client.get(name, paid.nothing)) for name in divided_all}
    within = spans or {}
    amounts_sure = amounts_within(within, paid)
    if format is Format.csv:
        ends = ("share_low", "share_high", "payout_low", "payout_high")
        rows: list[tuple[Any, ...]] = [("client", "share", "payout", *(ends if spans else ()))]
        for name, share in divided_all.items():
            sure = (*within.get(name, ("", "")), *amounts_sure.get(name, ("", "")))
            rows.append((name, share, amounts[name], *(sure if spans else ())))
        return sheet_text(rows)
    plain = {
        "departures": {one.term: {"signed": one.signed, "used": one.used} for one in departures},
        "budget": str(paid.budget),
        "currency": paid.currency,
        "rule": divided.rule,
        "status": divided.status,
        "unpaid": str(paid.unpaid),
        "shares": divided_all,
        "payouts": amounts,
        "share_intervals": None if spans is None else {name: list(span) for name, span in spans.items()},
        "payout_intervals": None
        if spans is None
        else {name: [str(end) for end in span] for name, span in amounts_sure.items()},
        "equal": divided.equal,
        "fence": None if divided.fence is None else divided.fence.as_dict(),
        "notes": list(divided.notes),
    }
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def _unfinished(run: Recorded | None, does: str) -> str:
    """Return a warning that the run is not over; an empty text if it is over, or if there is no run."""
    if run is None:
        return ""
    closed, planned = len(run.rounds), run.planned
    return f"the run is not over: this {does} {closed} of {planned} rounds" if closed < planned else ""


def _paid_before(run: Recorded | None) -> Iterator[str]:
    """Yield warnings that earlier runs have decisions of their own, so that their rounds are paid twice."""
    from fedmerit.notes import words

    for part in run.runs[:-1] if run else ():
        if part.decisions:
            yield words("terminal.paid-before", path=part.name, count=part.decisions)


def _record(
    folder: Path, terms: Terms, heading: Heading, language: str | None, *, after: Sequence[Path] = ()
) -> str:
    """Record a decision, write everybody's statement, refresh the page; return what was done, in words."""
    from fedmerit.config import of_folder
    from fedmerit.notes import speaking
    from fedmerit.report.page.html import refreshed
    from fedmerit.report.statement import write_statements
    from fedmerit.verify import read_accounts, read_run, record_decision, renew

    config = of_folder(folder)
    renewed = renew(folder)
    decision, new = record_decision(folder, terms, after, heading)
    with speaking(language or config.report.language):
        rounds, decisions, head = read_run(folder, after)
        accounts = read_accounts(folder, after)
        count = write_statements(folder, rounds, config, decisions[-1], head, accounts)
    recorded = f"recorded as decision {decision.number}, record {decision.record} of the ledger"
    if new and decision.replaces:
        recorded += f", in place of decision {decision.replaces}"
    if not new:
        recorded = f"decision {decision.number}, record {decision.record} of the ledger, is unchanged"
    shown = refreshed(folder, language)
    lines = [f"{recorded}; {count} statements in {folder / 'statements'}", *([shown] if shown else [])]
    return "\n".join([*([renewed] if renewed else []), *lines, f"head: {head}"])


@contextmanager
def _option_names(doubted: Sequence[Doubt]) -> Iterator[None]:
    """Reword the library's errors for the command line; add the doubts to those about undefined shares."""
    from fedmerit.errors import DoubtfulShares, UndefinedShares, UnsettledShares
    from fedmerit.report.text import on_terminal

    try:
        yield
    except DoubtfulShares as error:
        raise DoubtfulShares(on_terminal(error.note), error.codes) from error
    except UnsettledShares as error:
        raise UnsettledShares(on_terminal(error.note), code=error.code) from error
    except UndefinedShares as error:
        told = on_terminal(error.note, "--on-undefined")
        if doubted:
            told = f"nothing is paid: {told}. {' '.join(map(str, doubted))}"
        raise UndefinedShares(told) from error


def _warn(doubted: Sequence[Doubt | str]) -> None:
    """Print doubts as warnings on standard error, beside output for programs."""
    from fedmerit.report.text import printable

    for doubt in doubted:
        err.print(f"WARNING: {printable(doubt if isinstance(doubt, str) else doubt.told)}")


def tell_read(source: Source, screen: Console, name: str = "") -> None:
    """Print how a file of reports was read, with its name if there are several."""
    from fedmerit.report.text import on_terminal, printable

    for note in source.notes:
        screen.print(f"note: {name}{': ' if name else ''}{printable(on_terminal(note))}")


def read_reports(
    source: Path, utility: str | None = None, *, after: Sequence[Path] = (), form: SheetForm | None = None
) -> tuple[Content, Recorded | None]:
    """Return the reports of a file, or of a run's ledger, verified; for a run also what else its ledger says.

    ``after`` are the folders of the runs before it, if they are counted too. ``form`` says how a CSV file is
    written.
    """
    from fedmerit.scoring.files import read_content, scores_in
    from fedmerit.scoring.spreadsheets import FOUND_OUT, check_form

    check_form(source, form or FOUND_OUT)
    for one in (*after, source) if after else ():
        if not (one / LEDGER).is_file():
            fail(f"{one}: expected a run folder, because several runs were given: there is no {LEDGER} in it")
    if (source / LEDGER).is_file():
        from fedmerit.storage.run_folder import recorded
        from fedmerit.verify import verified

        *before, ledger = (verified(one, [])[0] for one in (*after, source))
        found = recorded(ledger, utility=utility, after=before)
        return found.content, found
    file = scores_in(source) if source.is_dir() else source
    return read_content(file, utility=utility, form=form or FOUND_OUT), None


def _settings(file: Path) -> Config | None:
    """Return the settings beside reports, or None if there are none."""
    from fedmerit.config import of_folder

    return of_folder(file) if (file / "config.toml").is_file() else None


def _tell_planted(source: Source, screen: Console) -> None:
    """Print which faults the settings of a run planted, if any."""
    from fedmerit.report.text import printable

    if said := source.planted:
        screen.print(printable(said))


def _coin(budget: str, asked: str, agreed: str) -> tuple[str, list[Note]]:
    """Return the currency of a budget, and a note if it is a code that nobody knows the decimals of.

    It is the one asked for, otherwise the one agreed on, otherwise the one that the budget names.
    """
    from fedmerit.errors import InputError
    from fedmerit.notes import Note
    from fedmerit.scoring.amounts import amount_of, decimals_assumed

    try:
        named, expected = amount_of(budget)[1], asked or agreed
    except InputError as error:
        fail(f"--budget: {error}")
    if named and expected and named != ("EUR" if expected == "€" else expected):
        fail(f"--budget: expected an amount in {expected}, got one in {named}")
    coin = expected or named or ""
    return coin, [Note("decimals-assumed", currency=coin)] if coin and decimals_assumed(coin) else []


def _missing(config: Config | None, given: Missing | None) -> Literal["zero", "own-mean"]:
    """Return what a missed round counts: as asked for, otherwise as in the settings, otherwise zero."""
    if given is None and config:
        return config.payment.missing
    return counted(given)


def counted(given: Missing | None) -> Literal["zero", "own-mean"]:
    """Return what a missed round counts, as asked for; zero if nobody asked."""
    return "own-mean" if given is Missing.own_mean else "zero"
