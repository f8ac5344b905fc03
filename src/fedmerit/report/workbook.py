"""Tables for people with a spreadsheet program: one to fill in, and workbooks of scores and of payouts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from io import BytesIO
from typing import Any

from fedmerit.errors import InputError, MissingExtra
from fedmerit.files.sheets import SheetForm, letters, sheet_text, text_of
from fedmerit.files.workbooks import NEEDS
from fedmerit.notes import words
from fedmerit.report.facts import Facts
from fedmerit.report.payment import Proposal
from fedmerit.report.source import scores_as
from fedmerit.report.terminal import budget_text, findings
from fedmerit.report.text import on_terminal
from fedmerit.scoring.validate import names_of, spelled, two_spellings, whole

Row = Sequence[Any]

# ----------------------------------------------------------------------------------------------- to fill in

TEMPLATE = {
    "round": 1, "member": "Bonn", "utility": "accuracy", "empty": 0.70, "grand": 0.81, "alone": 0.74,
    "without": 0.79, "se_alpha": 0.01,
}  # fmt: skip
"""The columns of a table of reports to fill in, each with an example."""
REMARKS = 2
"""Lines below its header that explain: they begin with #, and are not read."""


def template(members: Sequence[str], rounds: int) -> list[Row]:
    """Return a table to fill in: a header, what to write, an example, a line per round and member."""
    names = names_of(members, None, "")
    if alike := two_spellings(names):
        first, second = spelled(*alike)
        raise InputError(f"{first} and {second} differ only in case, blanks or letters that look the same")
    numbers = range(1, whole(rounds, "rounds", least=1) + 1)
    means, example = [words(f"template.{name}") for name in TEMPLATE], [*TEMPLATE.values()]
    example[0] = words("book.example", round=example[0])
    empty = [""] * (len(TEMPLATE) - 2)
    rows = ([number, name, *empty] for number in numbers for name in names)
    return [[*TEMPLATE], [f"# {means[0]}", *means[1:]], [f"# {example[0]}", *example[1:]], *rows]


def template_csv(table: Iterable[Row], delimiter: str) -> str:
    """Return a table to fill in as CSV, with the mark by which spreadsheet programs know UTF-8."""
    return "\ufeff" + sheet_text(table, SheetForm(delimiter).delimiter or ",")


# ------------------------------------------------------------------------------------------------ workbooks


STANDINGS = (
    "rank", "rank_low", "rank_high", "score", "low", "high", "share", "share_low", "share_high", "coverage"
)  # fmt: skip
"""The columns of scores beside the member's name."""


def scores_workbook(facts: Facts) -> bytes:
    """Return scores with intervals and shares, the reports of all rounds, and how scores were computed."""
    tables = {words("book.scores"): _scores(facts)}
    if facts.source.rounds:
        tables[words("book.rounds")] = _rounds(facts)
    return workbook({**tables, words("book.how"): _told(_basis(facts), facts.notes)})


def payouts_workbook(found: Proposal) -> bytes:
    """Return amounts and shares with their intervals, the scores that they follow from, and by which rule."""
    (_, *names), *rows = found.rows()
    header = [words("terminal.member"), *(words(f"book-column.{name}") for name in names)]
    amounts = [[row[0], *map(_number, row[1:])] for row in rows]
    rule = found.shares.rule
    basis = [budget_text(found.paid, rule), words(f"rule.{rule}", score=found.facts.total.score)]
    basis += [words("terminal.spans")] if found.spans is not None else []
    notes = [*found.warnings, *filter(None, [found.apart]), *found.notes]
    return workbook({
        words("book.payouts"): [header, *sorted(amounts, key=lambda row: (-row[2], row[0]))],
        words("book.scores"): _scores(found.facts),
        words("book.how"): _told([*basis, *_basis(found.facts)], notes),
    })  # fmt: skip


def _scores(facts: Facts) -> Iterator[Row]:
    score = facts.total.score
    headings = [score if name == "score" else words(f"book-column.{name}", score=score) for name in STANDINGS]
    yield [words("terminal.member"), *headings]
    for one in facts.standings:
        unknown = (None, None)
        spans = [span or unknown for span in (one.rank_interval, one.interval, one.share_interval)]
        yield [one.client, one.rank, *spans[0], one.total, *spans[1], one.share, *spans[2], one.coverage]


def _rounds(facts: Facts) -> Iterator[Row]:
    """Yield the reports and scores of single rounds, as `fedmerit score` reads them again."""
    header, *rows = csv.reader(io.StringIO(scores_as(facts.source, "csv")))
    yield header
    for row in rows:
        yield [text_of(cell) if name in ("client", "utility", "slice", "silent", "sketch") else _number(cell)
               for name, cell in zip(header, row, strict=True)]  # fmt: skip


def _basis(facts: Facts) -> list[str]:
    return [*(words("terminal.warning", text=one.told) for one in facts.doubts), *findings(facts)]


def _told(basis: Iterable[str], notes: Iterable[str]) -> Iterator[Row]:
    """Yield sentences as rows: how numbers came about, then notes."""
    yield [words("book.how")]
    yield from ([line] for line in dict.fromkeys(basis))
    yield from ([words("terminal.note", text=on_terminal(note))] for note in dict.fromkeys(notes))


def _number(value: Any) -> Any:
    """Return text that holds a number as that number; an empty cell for empty text."""
    return (Decimal(value) if value else None) if isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------- written

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a text begins that spreadsheet programs may take for a formula."""


def workbook(tables: Mapping[str, Iterable[Sequence[Any]]], *, notes: Sequence[int] = ()) -> bytes:
    """Return tables as the sheets of a workbook, by title; the first row of each is its header.

    No text is a formula or a link. Rows with a number in ``notes`` are set in grey, as words for people.
    """
    try:
        from openpyxl import Workbook
        from openpyxl.cell import WriteOnlyCell
        from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
        from openpyxl.styles import Alignment, Font
    except ImportError as error:
        raise MissingExtra(NEEDS) from error

    def written(value: Any, row: int) -> Any:
        text = isinstance(value, str)
        cell = WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub(_escaped, value) if text else value)
        if text:
            cell.data_type = "s"  # also of what openpyxl takes for a formula or an error
            cell.quotePrefix = value[:1] in FORMULA  # so it stays text when somebody edits it
        if row == 1:
            cell.font = Font(bold=True)
        elif row in notes:
            cell.font, cell.alignment = (
                Font(italic=True, color="00666666"),
                Alignment(wrap_text=True, vertical="top"),
            )
        return cell

    book = Workbook(write_only=True)
    for title, rows in tables.items():
        sheet = book.create_sheet(title)
        sheet.freeze_panes = "A2"
        for place in range(16):
            sheet.column_dimensions[letters(place)].width = 22
        for number, row in enumerate(rows, start=1):
            sheet.append([written(value, number) for value in row])
    target = BytesIO()
    book.save(target)
    return target.getvalue()


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"
