"""Tables of text as spreadsheet programs write them: how they are written is found out, said, never guessed.

What can differ is the encoding of letters, what separates cells, and the decimal mark:

=========  ==============================================================================================
encoding   a byte order mark decides (UTF-8, UTF-16); then UTF-8 if it is valid; then Windows-1252, if all
           other bytes are letters and signs of Western Europe there
cells      the separator under which the header has the columns that must be there; a line ``sep=;`` says it
numbers    the decimal mark that all cells allow: 0,5 has a decimal comma, and 1,234.5 a decimal point
=========  ==============================================================================================

If this leaves two ways to read a table, it is refused, and `SheetForm` says which one is meant. A table in
UTF-8 with commas between cells and decimal points is the plain form. All else is in ``Sheet.notes``.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from fedmerit.errors import FileFormatError, InputError
from fedmerit.notes import Note, nearest
from fedmerit.scoring.amounts import readings

LARGEST = 200 * 2**20
"""Bytes of the largest table; reports of 300 members in 1000 rounds have a third of it."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
"""What can separate cells -> its name in messages."""


@dataclass(frozen=True)
class SheetForm:
    """What the owner of a file says of it; None is found out from the file itself."""

    delimiter: str | None = None  # one of SEPARATORS
    decimal: str | None = None  # "." or ","
    encoding: str | None = None  # such as "latin-1"
    distinct: tuple[str, ...] = ()  # names that look like another one, and are members of their own

    def __post_init__(self) -> None:
        if self.delimiter not in (None, *SEPARATORS):
            raise InputError(f"delimiter: expected ',', ';', '|' or a tab, got {self.delimiter!r:.40}")
        if self.decimal not in (None, ".", ","):
            raise InputError(f"decimal: expected '.' or ',', got {self.decimal!r:.40}")
        try:
            b"text".decode("utf-8" if self.encoding is None else self.encoding, "ignore")
        except (LookupError, TypeError, ValueError):  # ValueError: codecs that are no encodings of a file
            expected = "the name of an encoding, such as utf-8, latin-1 or cp1250"
            raise InputError(f"encoding: expected {expected}, got {self.encoding!r:.40}") from None


FOUND_OUT = SheetForm()
"""Nothing is said: all of it is found out."""


def check_form(path: Path, form: SheetForm) -> None:
    """Raise FileFormatError if something is said about a table, but there is no CSV file."""
    if replace(form, distinct=()) != FOUND_OUT and (path.is_dir() or path.suffix.lower() != ".csv"):
        raise FileFormatError(f"{path}: delimiter, decimal and encoding are only of CSV files")


@dataclass(frozen=True)
class Sheet:
    """A table: its columns, and per row the line in the file and the text of every cell by column.

    Numbers are written in one way here: with a decimal point, and nothing between thousands.
    """

    path: Path
    columns: tuple[str, ...]  # a column without a name is an empty text
    header: int  # the line of the columns
    rows: tuple[tuple[int, Mapping[str, str]], ...]
    places: Mapping[int, int]  # line in the file -> row as spreadsheet programs count
    delimiter: str = ","
    notes: tuple[Note, ...] = ()

    def cell(self, line: int, column: str) -> str:
        """Return what spreadsheet programs call a cell, such as C2."""
        return f"{_letters(self.columns.index(column))}{self.places[line]}"


def fail(path: Path, where: str, problem: str) -> NoReturn:
    """Raise FileFormatError with the place and the problem."""
    raise FileFormatError(f"{path}: {where}: {problem}") from None


# ------------------------------------------------------------------------------------------------- written

_PLACE = r"(^|[;,|\t\r\n])"
_FORMULA = r"[' ]*[=+\-@\uff1d\uff0b\uff0d\uff20]"
_LIVE, _QUOTED = re.compile(rf"{_PLACE}(?={_FORMULA})"), re.compile(rf"{_PLACE}'(?={_FORMULA})")
_NUMBER = r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?"
_PLAIN = re.compile(rf"{_NUMBER}( {_NUMBER})*")


def sheet_text(rows: Iterable[Iterable[Any]], delimiter: str = ",") -> str:
    """Return rows as CSV, in which no text is a formula; numbers stay numbers and read back exactly."""
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\n")
    writer.writerows([text_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return out.getvalue()


def text_cell(text: str) -> str:
    """Return a text as a cell that no spreadsheet program runs: an apostrophe before what begins a formula.

    A program that separates cells elsewhere sees a cell behind every separator, so these count too.

    >>> text_cell("=1+1"), text_cell("Ulm;@SUM(A1)"), text_cell("-12.5"), text_cell("Site-1")
    ("'=1+1", "Ulm;'@SUM(A1)", '-12.5', 'Site-1')
    """
    return text if _PLAIN.fullmatch(text) else _LIVE.sub(r"\1'", text)


def text_of(cell: str) -> str:
    """Return the text of which `text_cell` made a cell."""
    return _QUOTED.sub(r"\1", cell)


# ---------------------------------------------------------------------------------------------------- read


def read_sheet(
    path: Path,
    required: Sequence[str],
    optional: Collection[str] = (),
    *,
    ignored: Collection[str] = (),
    likely: Sequence[str] = (),
    numbers: Collection[str] = (),
    counts: Collection[str] = (),
    form: SheetForm = FOUND_OUT,
) -> Sheet:
    """Return a table from a file, or raise FileFormatError.

    Args:
        path: the file.
        required: columns that must be there.
        optional: columns that may be there. If there are none, all other columns are taken as they are. If
            there are some, others are named in a note, or refused if they are almost spelled like known ones.
        ignored: columns that need no note, although nobody reads them.
        likely: columns that show what separates cells, if none are required.
        numbers: columns whose cells are numbers, or empty.
        counts: those among them that count something, in which 1,234 is read as 1234 if the decimal mark of
            the table is a point.
        form: what the owner of the table says about it.
    """
    text, told = _decoded(path, _bytes(path), form)
    if not text.strip("".join(SEPARATORS) + "\r\n "):
        raise FileFormatError(f"{path}: the file is empty")
    delimiter, text, before = _separator(path, text, required or likely, form)
    lines = _lines(path, text, delimiter, before)
    if not lines:
        raise FileFormatError(f"{path}: the file is empty")
    columns = _columns(path, lines[0], required, optional, ignored)
    rows = tuple(_rows(path, columns, lines, delimiter))
    places = {line: place for line, place, _ in lines}
    sheet = Sheet(path, columns, lines[0][0], rows, places, delimiter)
    sheet, decimal, grouped = _with_plain_numbers(sheet, numbers, counts, delimiter, form)
    if delimiter != ",":
        told.append(Note(_SAID[delimiter]))
    if decimal == ",":
        told.append(Note("sheet-decimal"))
    if grouped:
        told.append(Note("sheet-thousands", count=grouped))
    notes = [Note("sheet-form", each=told)] if told else []
    known = {"", *required, *optional, *ignored}
    if optional and (extra := [name for name in columns if name not in known]):
        notes.append(Note("sheet-extra", columns=extra))
    unnamed = [place for place, name in enumerate(columns) if not name]
    if filled := [_letters(place) for place in unnamed if any(cells[place] for _, _, cells in lines[1:])]:
        notes.append(Note("sheet-unnamed", columns=filled))
    return replace(sheet, notes=tuple(notes))


_SAID = {";": "sheet-semicolons", "\t": "sheet-tabs", "|": "sheet-bars"}

# ------------------------------------------------------------------------------------------------- letters

_WORKBOOKS = {
    b"PK\x03\x04": "an Excel or OpenDocument workbook",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook",
    b"%PDF": "a PDF document",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a compressed file (gzip)",
    b"\x89PNG": "a picture",
    b"<!DOCTYPE": "a web page",
    b"<!doctype": "a web page",
    b"<html": "a web page",
    b"<HTML": "a web page",
}
_MARKED = {
    codecs.BOM_UTF8: ("utf-8", ""),
    codecs.BOM_UTF16_LE: ("utf-16-le", "UTF-16"),
    codecs.BOM_UTF16_BE: ("utf-16-be", "UTF-16"),
}
_WESTERN = frozenset(
    chain(
        range(0x80), range(0xC0, 0x100), b"\x80\x84\x85\x91\x92\x93\x94\x96\x97\xa0\xa7\xab\xb0\xb4\xb7\xbb"
    )
) - {0xD7, 0xF7}  # letters, €, quotation marks, dashes, §, °
_WORD = re.compile(r"\w*[^\x00-\x7f]+\w*")


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise FileFormatError(
                f"{path}: expected a table of at most {LARGEST >> 20} MiB, got {size >> 20} MiB"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such file") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror or error}") from error


def _decoded(path: Path, data: bytes, form: SheetForm) -> tuple[str, list[Note]]:
    """Return the text of a table, and what is to be said about its letters."""
    for mark, called in _WORKBOOKS.items():
        if data.startswith(mark):
            raise FileFormatError(f"{path}: this is {called}, not CSV: open it and save it as CSV (UTF-8)")
    marked = next((mark for mark in _MARKED if data.startswith(mark)), b"")
    encoding, called = _MARKED.get(marked, ("utf-8", ""))
    if said := form.encoding:
        same = codecs.lookup(said).name in (encoding, "utf-16" if called else "utf-8-sig")
        if marked and not same:
            raise FileFormatError(f"{path}: its first bytes say {called or 'UTF-8'}, but not {said}")
        if not marked and not same:
            encoding, called = said, said
    try:
        text = data[len(marked) :].decode(encoding)
        notes = [_believed(data, text, called)] if called else []
    except UnicodeError as error:
        if marked or said:
            raise FileFormatError(f"{path}: cannot be read as {called or 'UTF-8'}: {error}") from error
        text, notes = _western(path, data)
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        fail(path, f"line {line}", "expected text, got a NUL byte: save the table as CSV (UTF-8) once more")
    return text, notes


def _believed(data: bytes, text: str, called: str) -> Note:
    """Return what is said of letters that are not read as UTF-8, although they may be UTF-8 too."""
    try:
        found = _WORD.search(plain := data.decode())
    except UnicodeError:
        found = None
    if found is None or plain == text:
        return Note("sheet-encoding", what=called)
    read = _WORD.search(text)
    return Note("sheet-believed", what=called, text=read[0] if read else "", meant=found[0])


def _western(path: Path, data: bytes) -> tuple[str, list[Note]]:
    strange = next((place for place, byte in enumerate(data) if byte not in _WESTERN), None)
    if strange is not None:
        line = data.count(b"\n", 0, strange) + 1
        fail(path, f"line {line}",
             f"the letters are neither UTF-8 nor surely Windows-1252 (byte 0x{data[strange]:02x}): save the "
             "table as CSV (UTF-8), or name the encoding, such as cp1250, with --encoding (encoding in "
             "Python)")  # fmt: skip
    text = data.decode("cp1252")
    found = _WORD.search(text)
    return text, [Note("sheet-western", text=found[0] if found else "")]


# --------------------------------------------------------------------------------------------------- cells

_Line = tuple[int, int, list[str]]
"""The line in the file, the row as a spreadsheet program counts, and the cells."""


def _separator(path: Path, text: str, required: Sequence[str], form: SheetForm) -> tuple[str, str, int]:
    """Return what separates cells, the text without a line that says so, and the lines before that text."""
    said, before = form.delimiter, 0
    if match := re.match(r'"?sep=(.)"?[,;\t|]*(\r\n|\r|\n)', text, re.IGNORECASE):
        if match[1] not in SEPARATORS or said not in (None, match[1]):
            expected = SEPARATORS[said] if said else ", ".join(SEPARATORS.values())
            fail(path, "line 1", f"expected cells separated by {expected}, got {match[0].strip()!r}")
        said, text, before = match[1], text[match.end() :], 1
    if said:
        return said, text, before
    headers = {mark: _header(text, mark) for mark in SEPARATORS}
    fitting = {mark: cells for mark, cells in headers.items() if set(required) <= set(cells)}
    if len(set(map(tuple, fitting.values()))) > 1:
        named = " or ".join(SEPARATORS[mark] for mark in fitting)
        raise FileFormatError(
            f"{path}: cells may be separated by {named}: say by which with --delimiter (delimiter in Python)"
        )
    if fitting:
        return next(iter(fitting)), text, before
    below = [(line, mark) for mark in SEPARATORS if (line := _header_below(text, mark, required))]
    if required and below:
        line, _ = min(below)
        fail(path, "line 1", f"expected the columns {', '.join(required)}, which are on line "
             f"{line + before}: delete the lines above it")  # fmt: skip
    # none fits: the separator that makes the most cells of the header leads to the best message
    likely = max(headers, key=lambda mark: (len(set(required) & set(headers[mark])), len(headers[mark])))
    cells = headers[likely]
    if len(cells) == 1 and any(len(_header(cells[0], mark)) > 1 for mark in SEPARATORS):
        fail(path, "line 1", "every line is one cell in quotation marks, which holds the whole line: split "
             "the column in the spreadsheet program (text to columns), and save it again")  # fmt: skip
    return likely, text, before


def _header(text: str, mark: str) -> list[str]:
    """Return the cells of the first line that is not empty, as this mark separates them."""
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True):
            if any(cell.strip(f"{mark},; ") for cell in row):
                return [cell.strip() for cell in row]
    except csv.Error:
        pass
    return [""]


def _header_below(text: str, mark: str, required: Sequence[str]) -> int:
    """Return which of the first twenty lines holds the columns, as this mark separates them; 0 if none."""
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
    with contextlib.suppress(csv.Error):
        for row in islice(rows, 20):
            if {*required} <= {cell.strip() for cell in row}:
                return rows.line_num
    return 0


def _lines(path: Path, text: str, delimiter: str, before: int) -> list[_Line]:
    """Return all lines that are not empty."""
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    found, line = [], before
    try:
        for place, row in enumerate(rows, start=1):
            first, line = line + 1, rows.line_num + before
            cells = [cell.strip() for cell in row]
            if any(cells):
                found.append((first, place, cells))
    except csv.Error as error:
        fail(path, f"line {rows.line_num + before}", f"not CSV: {error}")
    return found


def _columns(
    path: Path, header: _Line, required: Sequence[str], optional: Collection[str], ignored: Collection[str]
) -> tuple[str, ...]:
    """Return the names of the columns, without columns at the end that have none."""
    line, _, columns = header
    while not columns[-1]:
        columns = columns[:-1]
    known = [*required, *optional, *ignored]
    missing = [name for name in required if name not in columns]
    others = [name for name in columns if name not in known]
    near = [(name, almost) for name in others if (almost := nearest(name, known, likeness=0.8, exact=3))]
    if "client" in missing:  # what people call it
        near += [(name, "client") for name in others if name.casefold() in ("member", "members")]
    if missing or (near and optional):
        name, almost = next((pair for pair in near if not missing or pair[1] in missing), ("", ""))
        lacking = f"missing column{'s'[: len(missing) > 1]} {', '.join(map(repr, missing))}"
        problem = lacking if missing else f"unknown column {name!r}"
        more = f" and optionally {', '.join(sorted(optional))}" if optional else ""
        asked = f": did you mean {almost!r} by {name!r}?" if almost else ""
        fail(path, f"line {line}", f"{problem}; expected {', '.join(required)}{more}; "
             f"got {', '.join(columns)!r:.120}{asked}")  # fmt: skip
    for name in columns:
        if name and columns.count(name) > 1:
            fail(path, f"line {line}", f"column {name!r} appears twice")
    return tuple(columns)


def _rows(
    path: Path, columns: Sequence[str], lines: Sequence[_Line], delimiter: str
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield line and cells of every row below the header. Cells beyond the last column must be empty."""
    for line, _, cells in lines[1:]:
        if len(cells) < len(columns) or any(cells[len(columns) :]):
            how = ""
            if delimiter != ",":
                how = f" (the header separates cells by {SEPARATORS[delimiter]})"
            elif len(cells) > len(columns):
                how = " (a number with a decimal comma must be in quotation marks here)"
            fail(path, f"line {line}", f"expected {len(columns)} cells, got {len(cells)}{how}")
        yield line, {name: cell for name, cell in zip(columns, cells, strict=False) if name}


def _letters(place: int) -> str:
    """Return how spreadsheet programs call a column.

    >>> _letters(0), _letters(25), _letters(26)
    ('A', 'Z', 'AA')
    """
    high, low = divmod(place, 26)
    return (_letters(high - 1) if high else "") + chr(ord("A") + low)


# ------------------------------------------------------------------------------------------------- numbers

_Cell = tuple[int, str, str, Mapping[str, str]]
"""Line, column, text, and how the text can be read as a number."""
_MARK = {".": "point", ",": "comma"}
_MONTH = (
    "(jan|feb|mar|apr|may|jun|jul|aug|sept?|oct|nov|dec|mär|mrz|mai|okt|dez|janv|févr|mars|avr|juin|juil|août|"
    r"déc|ene|abr|ago|dic|gen|mag|giu|lug|set|ott)\.?"
)
_DATE = re.compile(
    rf"\d{{1,4}}([./-])\d{{1,2}}\1\d{{1,4}}( .*)?|\d{{1,2}}[./-]? ?{_MONTH}([ ./-]?\d{{2,4}})?"
    rf"|{_MONTH}[ ./-]?\d{{1,4}}|\d{{1,2}}[-/]\d{{1,2}}",
    re.IGNORECASE,
)


def looks_like_a_date(text: str) -> bool:
    """Return whether a cell looks like a date, which a spreadsheet program may have made of something else.

    >>> [looks_like_a_date(text) for text in ("02. Jan", "Feb 01", "01.02.2026", "0.5", "Site 2", "Mary 3")]
    [True, True, True, False, False, False]
    """
    return _DATE.fullmatch(text) is not None


def _with_plain_numbers(
    sheet: Sheet, numbers: Collection[str], counts: Collection[str], delimiter: str, form: SheetForm
) -> tuple[Sheet, str, int]:
    """Return the table with plain numbers, the decimal mark, and how many cells had marks for thousands."""
    cells = []
    for line, row in sheet.rows:
        for name, text in row.items():
            if name not in numbers or not text:
                continue
            if found := readings(text):
                cells.append((line, name, text, found))
            elif problem := _no_number(text):  # of other text, whoever needs the number says what is expected
                _refuse(sheet, (line, name, text, found), problem)
    mark = form.decimal or _decimal(sheet, cells, delimiter)
    plain = {line: dict(row) for line, row in sheet.rows}
    grouped = 0
    for cell in cells:
        line, name, text, found = cell
        if mark not in found:
            _refuse(sheet, cell, f"does not have a decimal {_MARK[mark]}, which was asked for")
        thousands = len(found[mark]) < len(text)
        if thousands and _is_doubtful(found) and not form.decimal and name not in counts:
            _refuse(sheet, cell, f"{_twice(found)}: write it without a mark for thousands")
        plain[line][name] = found[mark]
        grouped += thousands
    return replace(sheet, rows=tuple(plain.items())), mark, grouped


def _decimal(sheet: Sheet, cells: Sequence[_Cell], delimiter: str) -> str:
    """Return the decimal mark that all cells allow; a point if there is no mark at all."""
    sure = {mark: next((cell for cell in cells if [*cell[3]] == [mark]), None) for mark in _MARK}
    point, comma = sure["."], sure[","]
    if point and comma:
        other = f"but {point[2]!r:.40} in cell {sheet.cell(*point[:2])} a decimal point"
        _refuse(sheet, comma, f"has a decimal comma, {other}: write all numbers in one way")
    if point or comma:
        return "." if point else ","
    for cell in cells:
        plain = delimiter == "," and "," not in cell[2]  # 1.234 between commas, as programs write it
        if _is_doubtful(cell[3]) and not plain:
            how = "name the decimal mark with --decimal (decimal in Python)"
            _refuse(sheet, cell, f"{_twice(cell[3])}, and no other number shows which: {how}")
    return "."


def _is_doubtful(found: Mapping[str, str]) -> bool:
    return len(set(found.values())) > 1


def _twice(found: Mapping[str, str]) -> str:
    return f"can be read as {found['.']} and as {found[',']}"


def _no_number(text: str) -> str:
    """Return what is wrong with a cell that spreadsheets are known for, or an empty text."""
    if text.endswith("%"):
        return "has a percent sign: write 0.81 for 81% in all columns, or leave the sign out in all of them"
    if text.startswith("="):
        return "is a formula: save the table with values in place of formulas"
    if text.startswith("#"):
        return "is an error of the spreadsheet program: repair the formula that was there"
    if looks_like_a_date(text):
        return (
            "looks like a date, which spreadsheet programs make of numbers such as 1.2 and 1-2: format the "
            "cell as text, and type the number again"
        )
    return ""


def _refuse(sheet: Sheet, cell: _Cell, problem: str) -> NoReturn:
    line, name, text, _ = cell
    fail(sheet.path, f"line {line}", f"{name} in cell {sheet.cell(line, name)}: {text!r:.60} {problem}")
