"""Workbooks (.xlsx), by openpyxl: a sheet read as a table of text, and tables written as sheets.

=============  ==========================================================================================
which sheet    the only visible one that has the columns; otherwise ``sheet`` says which
numbers        as stored: a cell that shows 81 % holds 0.81; text such as "0,5" is read as in a CSV file
formulas       their stored values; a formula without one is refused
merged cells   what is merged down a column counts in each of its rows; what is merged across is refused
hidden         rows and columns count as if they were shown, and a note names them
=============  ==========================================================================================

A workbook comes from somebody else. Its size, unpacked, and its number of cells are bounded, and parts that
declare a document type, whose entities can grow without end, are refused before anything is parsed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree
from xml.parsers import expat
from zipfile import ZipFile, is_zipfile

from fedmerit.errors import FedmeritError, FileFormatError, MissingExtra
from fedmerit.files import sheets
from fedmerit.files.sheets import (
    TOP,
    Exact,
    Expected,
    Line,
    Sheet,
    SheetForm,
    fail,
    in_sheet,
    letters,
)
from fedmerit.notes import Note

MOST_CELLS = 5_000_000
"""Cells of the largest sheet, with the empty ones before the last of a row."""
MOST_PARTS = 10_000
"""Files in the largest workbook."""


def read_workbook(path: Path, expected: Expected, form: SheetForm) -> Sheet:
    """Return the table in a workbook, or raise FileFormatError."""
    data = sheets.bytes_of(path)
    if not is_zipfile(BytesIO(data)):
        what = sheets.called(data) or ("text, such as CSV" if data else "an empty file")
        raise FileFormatError(f"{path}: expected a workbook (.xlsx), got {what}")
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise MissingExtra.of("workbooks (.xlsx) need", "xlsx", "CSV needs nothing") from error
    with _own_errors(path), ZipFile(BytesIO(data)) as archive:
        _check_parts(path, archive)
        book = load_workbook(BytesIO(data), read_only=True, data_only=True, keep_links=False)
        chosen = _chosen(path, book.worksheets, expected, form)
        marks = _Marks.of(archive, chosen._worksheet_path)
        lines = [*_lines(path, chosen)]
        lines, merged = _filled(path, chosen.title, lines, marks, expected)
        notes = []
        if len(book.worksheets) > 1:
            others = [one.title for one in book.worksheets if one is not chosen]
            notes.append(Note("book-sheet", sheet=chosen.title, others=others))
        if merged:
            notes.append(Note("book-merged", cells=merged))
        if marks.hidden:
            notes.append(Note("book-hidden", places=marks.hidden))
        found = sheets.sheet_of(path, lines, expected, form, line="row", name=chosen.title)
    return replace(found, notes=(*notes, *found.notes))


@contextmanager
def _own_errors(path: Path) -> Iterator[None]:
    """Raise our error for those of openpyxl, zipfile and the parsers; ignore their warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except FedmeritError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error!s:.100}"
        raise FileFormatError(f"{path}: cannot be read as a workbook ({why}): save it once more") from error


def _check_parts(path: Path, archive: ZipFile) -> None:
    """Raise FileFormatError if a workbook is too large to unpack, or declares types of documents."""
    parts = archive.infolist()
    if len(parts) > MOST_PARTS:
        raise FileFormatError(f"{path}: expected a workbook of at most {MOST_PARTS} files, got {len(parts)}")
    sheets.check_size(path, sum(part.file_size for part in parts), "workbook, unpacked,")
    if "[Content_Types].xml" not in archive.namelist():
        raise FileFormatError(
            f"{path}: expected a workbook (.xlsx), got another kind of archive: save it as .xlsx"
        )
    for part in parts:
        if not part.filename.endswith((".xml", ".rels")):
            continue
        with archive.open(part) as file:
            if _declares_type(file):
                declares = f"{part.filename} declares a document type"
                raise FileFormatError(f"{path}: {declares}, which no workbook needs: save it once more")


def _declares_type(file: IO[bytes]) -> bool:
    """Return whether a document type comes before the first element of XML."""
    begun: list[str] = []
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = lambda *_: begun.append("type")
    parser.StartElementHandler = lambda *_: begun.append("element")
    while not begun and (chunk := file.read(4096)):
        parser.Parse(chunk)
    return begun[:1] == ["type"]


def _chosen(path: Path, found: Sequence[Any], expected: Expected, form: SheetForm) -> Any:
    """Return the sheet with the table, or raise FileFormatError that says what to name."""
    if form.sheet is not None:
        titles = ", ".join(one.title for one in found)
        found = [one for one in found if one.title == form.sheet]
        if not found:
            raise FileFormatError(f"{path}: has no sheet {form.sheet!r}; it has {titles}")
    tops = {one.title: [*islice(_lines(path, one), TOP)] for one in found}
    fitting = [one for one in found if tops[one.title] and expected.fit(tops[one.title][0][2])]
    shown = [one for one in fitting if form.sheet or one.sheet_state == "visible"]
    if len(shown) == 1:
        return shown[0]
    how = "say which to read with --sheet (sheet in Python)"
    if fitting:
        many = f"{len(shown)} sheets have" if shown else "only a hidden sheet has"
        names = ", ".join(one.title for one in shown or fitting)
        raise FileFormatError(f"{path}: {many} the columns of the table: {names}; {how}")
    for one in found:
        for line, _, cells in tops[one.title]:
            if expected.fit(cells):
                fail(path, f"sheet {one.title!r}", sheets.title_above(expected, f"row {line}"))
    filled = [one for one in found if tops[one.title]]
    if not filled:
        raise FileFormatError(f"{path}: the workbook is empty")
    return max(filled, key=lambda one: len({*expected.required} & {*expected.columns(tops[one.title][0][2])}))


def _lines(path: Path, sheet: Any) -> Iterator[Line]:
    """Yield the rows of a sheet that are not empty."""
    sheet.reset_dimensions()  # what the file says of them may be wrong, and pads every row
    seen = 0
    for number, row in enumerate(sheet.iter_rows(), start=1):
        seen += max(len(row), 1)
        if seen > MOST_CELLS:
            raise FileFormatError(
                f"{path}: sheet {sheet.title!r}: expected at most {MOST_CELLS:,} cells, got more"
            )
        cells = [_text(cell) for cell in row]
        if any(cells):
            yield number, number, cells


def _text(cell: Any) -> str:
    text = sheets.cell_text(cell.value)
    if isinstance(text, Exact):
        text.percent = "%" in _UNQUOTED.sub("", cell.number_format or "")
    return text


_UNQUOTED = re.compile(r'"[^"]*"|\\.')  # in a number format, what is shown as it is


# -------------------------------------------------------------------------------- what openpyxl does not say


@dataclass
class _Marks:
    """What a sheet says beside its values, which openpyxl does not read row by row."""

    merged: list[str] = field(default_factory=list)  # ranges such as A2:A4
    unstored: set[str] = field(default_factory=set)  # cells with a formula and no value
    hidden: list[str] = field(default_factory=list)  # rows and columns

    @classmethod
    def of(cls, archive: ZipFile, part: str) -> _Marks:
        """Return the marks in the part of a workbook that holds a sheet."""
        marks = cls()
        with archive.open(part) as file:
            for _, element in ElementTree.iterparse(file):  # noqa: S314 - without a document type, no entities
                marks._add(element.tag.rpartition("}")[2], element)
        return marks

    def _add(self, tag: str, element: ElementTree.Element) -> None:
        is_hidden = element.get("hidden") in ("1", "true")
        if tag == "c":
            inside = {one.tag.rpartition("}")[2]: one.text for one in element}
            if "f" in inside and inside.get("v") is None:
                self.unstored.add(element.get("r", ""))
        elif tag == "mergeCell":
            self.merged.append(element.get("ref", ""))
        elif tag == "row":
            self.hidden += [f"row {element.get('r')}"] if is_hidden else []
            element.clear()
        elif tag == "col" and is_hidden:
            first, last = (letters(int(element.get(end, "1")) - 1) for end in ("min", "max"))
            self.hidden.append(f"column {first}" if first == last else f"columns {first}-{last}")


def _filled(
    path: Path, name: str, lines: list[Line], marks: _Marks, expected: Expected
) -> tuple[list[Line], list[str]]:
    """Return rows as wide as the header, merged cells filled in, and which these are.

    Raise FileFormatError where a value that is needed is not in the file, or merged with another column.
    """
    from openpyxl.utils import range_boundaries

    header, _, headings = lines[0]
    columns = expected.columns(headings)
    known = {place for place, one in enumerate(columns) if one in {*expected.required, *expected.optional}}
    cells_of = {line: [*cells, *[""] * (len(headings) - len(cells))] for line, _, cells in lines}
    filled, left = [], MOST_CELLS
    for span in sorted(marks.merged):
        first, top, last, bottom = range_boundaries(span)
        if top <= header or not known & {*range(first - 1, last)}:
            continue
        if first != last:
            fail(
                path,
                in_sheet(name, span),
                "merged cells of several columns: unmerge them",
                in_sheet(name, span),
            )
        left -= bottom - top
        if left < 0:
            raise FileFormatError(f"{path}: sheet {name!r}: expected fewer merged cells")
        for line in range(top + 1, bottom + 1):
            if line in cells_of:
                cells_of[line][first - 1] = cells_of.get(top, headings)[first - 1]
        filled.append(span)
    for line, cells in cells_of.items() if marks.unstored else ():
        for place in sorted(known):
            if not cells[place] and (cell := f"{letters(place)}{line}") in marks.unstored:
                where = in_sheet(name, cell)
                how = "open it in the spreadsheet program, and save it again"
                fail(path, where, f"{columns[place]}: a formula whose value is not in the file: {how}", where)
    return [(line, line, cells) for line, cells in cells_of.items()], filled


# ------------------------------------------------------------------------------------------------- written

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a text begins that spreadsheet programs may take for a formula."""


SHARE, PART, WHOLE = "0.00%", "0%", "0"
"""How numbers look: shares, parts of rounds, ranks."""


def decimals(count: int, whole: str = "0") -> str:
    """Return how numbers with so many decimals look.

    >>> decimals(4), decimals(2, "#,##0"), decimals(0)
    ('0.0000', '#,##0.00', '0')
    """
    return f"{whole}.{'0' * count}" if count else whole


class Total(tuple[Any, ...]):
    """A row that adds up those above it."""


def workbook(
    tables: Mapping[str, Iterable[Sequence[Any]]],
    *,
    forms: Mapping[str, Sequence[str]] | None = None,
    notes: Sequence[int] = (),
) -> bytes:
    """Return tables as the sheets of a workbook, by title; the first row of each is its header.

    No text is a formula or a link. ``forms`` holds how the numbers of each column look, by title. Rows with a
    number in ``notes`` are set in grey, as words for people, and so is a sheet of a single column.
    """
    try:
        from openpyxl import Workbook
        from openpyxl.cell import WriteOnlyCell
        from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
        from openpyxl.styles import Alignment, Font
    except ImportError as error:
        raise MissingExtra.of("workbooks (.xlsx) need", "xlsx", "CSV needs nothing") from error

    def written(value: Any, row: int, form: str, *, bold: bool, words: bool) -> Any:
        if text := isinstance(value, str):
            value = ILLEGAL_CHARACTERS_RE.sub(lambda found: f"\\x{ord(found[0]):02x}", value)
        cell = WriteOnlyCell(sheet, value)
        if text:
            cell.data_type = "s"  # also of what openpyxl takes for a formula or an error
            cell.quotePrefix = value[:1] in FORMULA  # so it stays text when somebody edits it
        elif form and row > 1:
            cell.number_format = form
        if bold:
            cell.font = Font(bold=True)
        elif row in notes:
            cell.font = Font(italic=True, color="00666666")
        if words or row == 1 or row in notes:
            cell.alignment = Alignment(wrap_text=True, vertical="top")
        return cell

    book = Workbook(write_only=True)
    for title, rows in tables.items():
        sheet = book.create_sheet(title)
        sheet.freeze_panes = "A2"
        lines = [*rows]
        columns = len(lines[0])
        for place in range(columns):
            sheet.column_dimensions[letters(place)].width = 110 if columns == 1 else 22
        shown = [*(forms or {}).get(title, ()), *[""] * columns]
        for number, row in enumerate(lines, start=1):
            style = {"bold": number == 1 or isinstance(row, Total), "words": columns == 1}
            sheet.append(
                [written(value, number, form, **style) for value, form in zip(row, shown, strict=False)]
            )
    target = BytesIO()
    book.save(target)
    return target.getvalue()
