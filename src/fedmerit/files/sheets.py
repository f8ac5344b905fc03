"""Tables as spreadsheet programs write them: their form is detected and reported, never guessed.

This is how CSV is read; `workbooks` reads .xlsx into lines of the same kind, and both become a `Sheet` here.

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
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import chain
from numbers import Number
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
    """What the owner of a file says of it; None is detected."""

    delimiter: str | None = None  # one of SEPARATORS
    decimal: str | None = None  # "." or ","
    encoding: str | None = None  # such as "latin-1"
    sheet: str | None = None  # of a workbook
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


_OF_FILES = {"delimiter": (".csv",), "decimal": (".csv", ".xlsx"), "encoding": (".csv",), "sheet": (".xlsx",)}
"""What can be said of a file -> the endings of files of which it can be said."""


def check_form(path: Path, form: SheetForm) -> None:
    """Raise FileFormatError if something is said about a file that is only said of other files."""
    for name, endings in _OF_FILES.items():
        if getattr(form, name) is not None and (path.is_dir() or path.suffix.lower() not in endings):
            raise FileFormatError(f"{path}: {name} is only of {' and '.join(endings)} files")


@dataclass(frozen=True)
class Expected:
    """What a reader expects of the columns of a table."""

    required: Sequence[str] = ()
    optional: Collection[str] = ()
    """Columns that may be there. Without any, all others are taken as they are. Otherwise, headings count in
    any case, and others are named in a note, or refused if they are almost spelled like known ones."""
    ignored: Collection[str] = ()  # those that need no note, although nobody reads them
    likely: Sequence[str] = ()  # those that show what separates cells, if none are required
    numbers: Collection[str] = ()  # those whose cells are numbers, or empty
    counts: Collection[str] = ()  # those in which 1,234 is 1234 if the decimal mark of the table is a point
    also: Mapping[str, str] = field(default_factory=dict)  # another heading -> the column that it stands for

    def columns(self, headings: Iterable[str]) -> list[str]:
        """Return the columns for which headings stand; headings that are not known stay as they are."""
        known = {name: name for name in (*self.required, *self.optional)} | {**self.also}
        if not self.optional:
            return [*headings]
        exact = {*known.values(), *self.ignored}
        return [
            name if name in exact else known.get(nearest(name, known, likeness=1), name) for name in headings
        ]

    def fit(self, headings: Iterable[str]) -> bool:
        """Return whether the required columns, or else the likely ones, are among these."""
        return {*(self.required or self.likely)} <= {*self.columns(headings)}


class Exact(str):
    """The text of a number that a workbook or a frame holds as one: there is one way to read it."""

    percent = False  # whether the workbook shows it as a percentage


@dataclass(frozen=True)
class Sheet:
    """A table, in which numbers have a decimal point, and nothing between thousands."""

    path: Path
    columns: tuple[str, ...]  # a column without a name is an empty text
    header: int  # the line of the columns
    rows: tuple[tuple[int, Mapping[str, str]], ...]  # line in the file, and the text of every cell by column
    places: Mapping[int, int] = field(default_factory=dict)  # line -> row as programs count, if not the same
    delimiter: str = ","
    notes: tuple[Note, ...] = ()
    line: str = "line"  # what a line is called
    name: str = ""  # of the sheet in a workbook

    def cell(self, line: int, column: str) -> str:
        """Return what spreadsheet programs call a cell, such as C2, or Reports!C2 in a workbook."""
        if self.line == "row" and not self.name:  # of a frame
            return f"{column!r} of row {line}"
        return in_sheet(self.name, f"{letters(self.columns.index(column))}{self.places.get(line, line)}")

    def fail(self, line: int, problem: str, column: str = "") -> NoReturn:
        """Raise FileFormatError about a line, or about the cell in a column of it."""
        cell = self.cell(line, column) if column else ""
        fail(self.path, cell if cell and self.name else f"{self.line} {line}", problem, cell)


def in_sheet(name: str, cell: str) -> str:
    """Return a cell with the name of its sheet, as spreadsheet programs write it.

    >>> in_sheet("Reports", "F13"), in_sheet("Round 1", "F13"), in_sheet("", "F13")
    ('Reports!F13', "'Round 1'!F13", 'F13')
    """
    return f"{name if name.isalnum() else repr(name)}!{cell}" if name else cell


def fail(path: Path, where: str, problem: str, cell: str = "") -> NoReturn:
    raise FileFormatError(f"{path}: {where}: {problem}", cell=cell) from None


def size_of(path: Path) -> int:
    """Return the size of a file or folder, or raise FileFormatError."""
    try:
        return path.stat().st_size
    except OSError as error:
        gone = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = "no such file or folder" if gone else f"cannot be read: {error.strerror}"
        raise FileFormatError(f"{path!s:.300}: {why}") from error
    except ValueError:  # a zero byte in the name
        raise FileFormatError(f"{str(path)!r:.300}: no such file or folder") from None


def check_size(path: Path, size: int, what: str = "file") -> None:
    """Raise FileFormatError if there are too many bytes to read."""
    if size > LARGEST:
        raise FileFormatError(
            f"{path}: expected a {what} of at most {LARGEST >> 20} MiB, got {size >> 20} MiB"
        )


def bytes_of(path: Path) -> bytes:
    """Return the content of a file, or raise FileFormatError."""
    check_size(path, size_of(path))
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror or error}") from error


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

REMARK = "# "
"""How the first cell of a line begins that explains a table of reports, and is not read."""
Line = tuple[int, int, list[str]]
"""The line in the file, the row as a spreadsheet program counts, and the cells."""


def read_sheet(path: Path, expected: Expected, form: SheetForm = FOUND_OUT) -> Sheet:
    """Return the table in a CSV file, or raise FileFormatError."""
    lines, delimiter, notes = _csv_lines(path, expected, form)
    return sheet_of(path, lines, expected, form, delimiter=delimiter, notes=notes)


def frame_sheet(path: Path, frame: Any, expected: Expected) -> Sheet:
    """Return the table in a frame of pandas or polars; its rows count from 1."""
    names = [*frame.columns]
    if twice := [name for name, count in Counter(map(str, names)).items() if count > 1]:
        raise FileFormatError(f"{path}: column {twice[0]!r} appears twice")
    columns = [[cell_text(value) for value in frame[name]] for name in names]
    rows = [[*map(str, names)], *map(list, zip(*columns, strict=True))]
    return sheet_of(path, [(k, k, row) for k, row in enumerate(rows)], expected, line="row")


def cell_text(value: Any) -> str:
    """Return what a cell of a workbook or frame holds as text; missing values are empty."""
    if isinstance(value, str):
        return value.strip()
    if value is None or str(value) in ("nan", "NaT", "<NA>"):
        return ""
    if isinstance(value, Number) and not isinstance(value, bool):
        return Exact(int(value) if isinstance(value, float) and value.is_integer() else value)
    return str(value).removesuffix(" 00:00:00")  # of a day


def sheet_of(
    path: Path,
    lines: Sequence[Line],
    expected: Expected,
    form: SheetForm = FOUND_OUT,
    *,
    delimiter: str = ",",
    notes: Sequence[Note] = (),
    line: str = "line",
    name: str = "",
) -> Sheet:
    """Return lines of text, the header first, as a table; ``notes`` say in which form they were.

    ``line`` is what a line is called, and ``name`` is that of the sheet in a workbook.
    """
    sheet = Sheet(path, tuple(lines[0][2]), lines[0][0], (), delimiter=delimiter, line=line, name=name)
    sheet = replace(sheet, places={number: place for number, place, _ in lines if number != place})
    read = [one for one in lines if not (expected.optional and one[2][0].startswith(REMARK))]
    remarks, lines = len(lines) - len(read), read
    columns, renamed = _columns(sheet, expected)
    sheet = replace(sheet, columns=columns)
    sheet = replace(sheet, rows=tuple(_rows(sheet, lines)))
    percent = _check_numbers(sheet, expected.numbers)
    decimal, how = form.decimal or "", "name the decimal mark with --decimal (decimal in Python)"
    sheet, decimal, grouped = plain_numbers(
        sheet, expected.numbers, counts=expected.counts, decimal=decimal, how=how
    )
    forms = list(notes)
    if decimal == ",":
        forms.append(Note("sheet-decimal"))
    if grouped:
        forms.append(Note("sheet-thousands", count=sum(grouped.values())))
    if percent:
        forms.append(Note("sheet-percent"))
    found = [Note("sheet-form", each=forms)] if forms else []
    if renamed:
        found.append(Note("sheet-headings", headings=renamed))
    if remarks:
        found.append(Note("sheet-remarks", count=remarks))
    known = {"", *expected.required, *expected.optional, *expected.ignored}
    if expected.optional and (extra := [one for one in columns if one not in known]):
        found.append(Note("sheet-extra", columns=extra))
    unnamed = [place for place, one in enumerate(columns) if not one]
    if filled := [letters(place) for place in unnamed if any(cells[place] for _, _, cells in lines[1:])]:
        found.append(Note("sheet-unnamed", columns=filled))
    return replace(sheet, notes=tuple(found))


def _columns(sheet: Sheet, expected: Expected) -> tuple[tuple[str, ...], list[Note]]:
    """Return the columns, without those at the end that have no name, and which headings were renamed."""
    headings = [*sheet.columns]
    while not headings[-1]:
        headings.pop()
    columns = expected.columns(headings)
    known = [*expected.required, *expected.optional, *expected.ignored]
    missing = [name for name in expected.required if name not in columns]
    words = {name: name for name in known} | {**expected.also}
    near = [(name, words[almost]) for name in columns
            if name not in known and (almost := nearest(name, words, likeness=0.8, exact=3))]  # fmt: skip
    if missing or (near and expected.optional):
        name, almost = next((pair for pair in near if not missing or pair[1] in missing), ("", ""))
        lacking = f"missing column{'s'[: len(missing) > 1]} {', '.join(map(repr, missing))}"
        problem = lacking if missing else f"unknown column {name!r}"
        more = f" and optionally {', '.join(sorted(expected.optional))}" if expected.optional else ""
        asked = f": did you mean {almost!r} by {name!r}?" if almost else ""
        sheet.fail(sheet.header, f"{problem}; expected {', '.join(expected.required)}{more}; "
                   f"got {', '.join(headings)!r:.120}{asked}", name)  # fmt: skip
    for name in columns:
        if name and columns.count(name) > 1:
            said = [heading for heading, one in zip(headings, columns, strict=True) if one == name]
            written = "" if {*said} == {name} else f", as {' and as '.join(map(repr, said))}"
            sheet.fail(sheet.header, f"column {name!r} appears twice{written}", said[-1])
    pairs = zip(headings, columns, strict=True)
    renamed = [pair for pair in pairs if pair[0].casefold() != pair[1].casefold()]
    return tuple(columns), [
        Note("sheet-heading", heading=heading, column=column) for heading, column in renamed
    ]


def _rows(sheet: Sheet, lines: Sequence[Line]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield line and cells of every row below the header. Cells beyond the last column must be empty."""
    columns = sheet.columns
    for line, _, cells in lines[1:]:
        if len(cells) < len(columns) or any(cells[len(columns) :]):
            how = ""
            if sheet.delimiter != ",":
                how = f" (the header separates cells by {SEPARATORS[sheet.delimiter]})"
            elif len(cells) > len(columns) and not sheet.name:
                how = " (a number with a decimal comma must be in quotation marks here)"
            sheet.fail(line, f"expected {len(columns)} cells, got {len(cells)}{how}")
        yield line, {name: cell for name, cell in zip(columns, cells, strict=False) if name}


def letters(place: int) -> str:
    """Return how spreadsheet programs call a column: A, ..., Z, AA, ...

    >>> letters(0), letters(25), letters(26)
    ('A', 'Z', 'AA')
    """
    high, low = divmod(place, 26)
    return (letters(high - 1) if high else "") + chr(ord("A") + low)


# ----------------------------------------------------------------------------------------------------- CSV


def _csv_lines(path: Path, expected: Expected, form: SheetForm) -> tuple[list[Line], str, list[Note]]:
    """Return the lines of a CSV file that are not empty, what separates its cells, and notes on both."""
    text, notes = _decoded(path, bytes_of(path), form)
    if not text.strip("".join(SEPARATORS) + "\r\n "):
        raise FileFormatError(f"{path}: the file is empty")
    delimiter, text, before = _separator(path, text, expected, form)
    notes += [Note(_SAID[delimiter])] if delimiter != "," else []
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines, line = [], before
    try:
        for place, row in enumerate(rows, start=1):
            first, line = line + 1, rows.line_num + before
            cells = [cell.strip() for cell in row]
            if any(cells):
                lines.append((first, place, cells))
    except csv.Error as error:
        fail(path, f"line {rows.line_num + before}", f"not CSV: {error}")
    if not lines:  # or only characters that `strip` takes for spaces
        raise FileFormatError(f"{path}: the file is empty")
    return lines, delimiter, notes


_SAID = {";": "sheet-semicolons", "\t": "sheet-tabs", "|": "sheet-bars"}

# ------------------------------------------------------------------------------------------------- letters

_WORKBOOKS = {
    b"PK\x03\x04": "an Excel or OpenDocument workbook",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook, or one with a password",
    b"%PDF": "a PDF document",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "a compressed file (gzip)",
    b"\x89PNG": "a picture",
    **dict.fromkeys((b"<!DOCTYPE", b"<!doctype", b"<html", b"<HTML"), "a web page"),
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


def called(data: bytes) -> str:
    """Return what kind of file begins with these bytes, if it is known and no text."""
    return next((what for mark, what in _WORKBOOKS.items() if data.startswith(mark)), "")


def _decoded(path: Path, data: bytes, form: SheetForm) -> tuple[str, list[Note]]:
    """Return the text of a table, and notes on its encoding."""
    if what := called(data):
        raise FileFormatError(f"{path}: this is {what}, not CSV: open it and save it as CSV (UTF-8) or .xlsx")
    marked = next((mark for mark in _MARKED if data.startswith(mark)), b"")
    encoding, told = _MARKED.get(marked, ("utf-8", ""))
    asked = form.encoding
    if asked and codecs.lookup(asked).name not in (encoding, "utf-16" if told else "utf-8-sig"):
        if marked:
            raise FileFormatError(f"{path}: its first bytes say {told or 'UTF-8'}, but not {asked}")
        encoding, told = asked, asked
    try:
        text = data[len(marked) :].decode(encoding)
        notes = [_believed(data, text, told)] if told else []
    except UnicodeError as error:
        if marked or asked:
            raise FileFormatError(f"{path}: cannot be read as {told or 'UTF-8'}: {error}") from error
        text, notes = _western(path, data)
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        fail(path, f"line {line}", "expected text, got a NUL byte: save the table as CSV (UTF-8) once more")
    return text, notes


def _believed(data: bytes, text: str, called: str) -> Note:
    """Return the note on letters that are not read as UTF-8, although they may be UTF-8 too."""
    try:
        meant = _word(data.decode())
    except UnicodeError:
        meant = ""
    if not meant or data.decode() == text:
        return Note("sheet-encoding", what=called)
    return Note("sheet-believed", what=called, text=_word(text), meant=meant)


def _word(text: str) -> str:
    """Return the first word with letters that encodings write in different ways."""
    match = re.search(r"\w*[^\x00-\x7f]+\w*", text)
    return match[0] if match else ""


def _western(path: Path, data: bytes) -> tuple[str, list[Note]]:
    strange = next((place for place, byte in enumerate(data) if byte not in _WESTERN), None)
    if strange is not None:
        line = data.count(b"\n", 0, strange) + 1
        fail(path, f"line {line}",
             f"the letters are neither UTF-8 nor surely Windows-1252 (byte 0x{data[strange]:02x}): save the "
             "table as CSV (UTF-8), or name the encoding, such as cp1250, with --encoding (encoding in "
             "Python)")  # fmt: skip
    text = data.decode("cp1252")
    return text, [Note("sheet-western", text=_word(text))]


# --------------------------------------------------------------------------------------------------- cells


def _separator(path: Path, text: str, expected: Expected, form: SheetForm) -> tuple[str, str, int]:
    """Return what separates cells, the text without a line that says so, and the lines before that text."""
    asked, before = form.delimiter, 0
    if match := re.match(r'"?sep=(.)"?[,;\t|]*(\r\n|\r|\n)', text, re.IGNORECASE):
        if match[1] not in SEPARATORS or asked not in (None, match[1]):
            marks = SEPARATORS[asked] if asked else ", ".join(SEPARATORS.values())
            fail(path, "line 1", f"expected cells separated by {marks}, got {match[0].strip()!r}")
        asked, text, before = match[1], text[match.end() :], 1
    if asked:
        return asked, text, before
    tops = {mark: _top(text, mark) for mark in SEPARATORS}
    headers = {mark: top[0][1] for mark, top in tops.items()}
    fitting = {mark: tuple(cells) for mark, cells in headers.items() if expected.fit(cells)}
    if len({*fitting.values()}) > 1:
        named = " or ".join(SEPARATORS[mark] for mark in fitting)
        how = "say by which with --delimiter (delimiter in Python)"
        raise FileFormatError(f"{path}: cells may be separated by {named}: {how}")
    if fitting:
        return next(iter(fitting)), text, before
    below = [line for top in tops.values() for line, cells in top if expected.fit(cells)]
    if expected.required and below:
        fail(path, "line 1", title_above(expected, f"line {min(below) + before}"))
    # none fits: the separator that makes the most cells of the header leads to the best message
    wanted = {*(expected.required or expected.likely)}
    likely = max(headers, key=lambda mark: (len(wanted & {*headers[mark]}), len(headers[mark])))
    cells = headers[likely]
    if len(cells) == 1 and any(len(_top(cells[0], mark)[0][1]) > 1 for mark in SEPARATORS):
        fail(path, "line 1", "every line is one cell in quotation marks, which holds the whole line: split "
             "the column in the spreadsheet program (text to columns), and save it again")  # fmt: skip
    return likely, text, before


def title_above(expected: Expected, place: str) -> str:
    """Return what to say of a table whose header is further down."""
    columns = ", ".join(expected.required)
    return f"expected the columns {columns}, which are on {place}: delete the lines above it"


def _top(text: str, mark: str) -> list[tuple[int, list[str]]]:
    """Return lines and cells of the first twenty rows that are not empty, as this mark separates them."""
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
    found = []
    with contextlib.suppress(csv.Error):
        for row in rows:
            if any(cell.strip(f"{mark},; ") for cell in row):
                found.append((rows.line_num, [cell.strip() for cell in row]))
            if len(found) == TOP:
                break
    return found or [(1, [""])]


TOP = 20
"""Rows in which a header is looked for."""

# ------------------------------------------------------------------------------------------------- numbers

_Readings = Mapping[str, str]  # of a text, as `readings` returns them
_Cell = tuple[int, str, str]  # line, column and text
_PROGRAM = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
MARKS = {".": "point", ",": "comma"}  # the decimal marks, and their names in messages
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


def plain_numbers(
    sheet: Sheet, columns: Collection[str], *, counts: Collection[str] = (), decimal: str, how: str
) -> tuple[Sheet, str, dict[str, int]]:
    """Return the table with plain numbers, the decimal mark, and how many marks for thousands columns had.

    Args:
        sheet: the table; cells that hold no number stay as they are.
        columns: those with numbers.
        counts: as in `read_sheet`.
        decimal: the mark, if the owner of the table says so; detected otherwise.
        how: how the owner can say so, for messages.
    """
    plain = sheet.delimiter == ","  # there, 1.234 has a decimal point, as programs write it
    texts = {text for _, row in sheet.rows for name, text in row.items()
             if name in columns and not isinstance(text, Exact)}  # fmt: skip
    if (
        plain
        and decimal != ","
        and all(_PROGRAM.fullmatch(text) or not readings(_bare(text)) for text in texts)
    ):
        return sheet, ".", {}  # the usual case
    ways = {text: ways_ for text in texts if (ways_ := readings(_bare(text)))}
    cells = [(line, name, text) for line, row in sheet.rows for name, text in row.items()
             if name in columns and text in ways and not isinstance(text, Exact)]  # fmt: skip
    mark = decimal or _decimal(sheet, cells, ways, plain=plain, how=how)
    rows = {line: dict(row) for line, row in sheet.rows}
    grouped: Counter[str] = Counter()
    for cell in cells:
        line, name, text = cell
        by_mark = ways[text]
        if mark not in by_mark:
            _refuse(sheet, cell, f"does not have a decimal {MARKS[mark]}, which was asked for")
        if len(by_mark[mark]) < len(_bare(text)):
            if _is_doubtful(by_mark) and not decimal and name not in counts:
                _refuse(sheet, cell, f"{_twice(by_mark)}: write it without a mark for thousands")
            grouped[name] += 1
        number = by_mark[mark]
        rows[line][name] = str(Decimal(number).scaleb(-2)) if text.endswith("%") else number
    return replace(sheet, rows=tuple(rows.items())), mark, grouped


def _decimal(
    sheet: Sheet, cells: Sequence[_Cell], ways: Mapping[str, _Readings], *, plain: bool, how: str
) -> str:
    """Return the decimal mark that all cells allow; a point if there is no mark at all."""
    sure = {mark: next((cell for cell in cells if [*ways[cell[2]]] == [mark]), None) for mark in MARKS}
    point, comma = sure["."], sure[","]
    if point and comma:
        other = f"but {point[2]!r:.40} in cell {sheet.cell(*point[:2])} has a decimal point"
        _refuse(sheet, comma, f"has a decimal comma, {other}: write all numbers in one way")
    if point or comma:
        return "." if point else ","
    for cell in cells:
        if _is_doubtful(ways[cell[2]]) and not (plain and "," not in cell[2]):
            _refuse(sheet, cell, f"{_twice(ways[cell[2]])}, and no other number shows which: {how}")
    return "."


def _is_doubtful(by_mark: _Readings) -> bool:
    return len(set(by_mark.values())) > 1


def _twice(by_mark: _Readings) -> str:
    return f"can be read as {by_mark['.']} and as {by_mark[',']}"


def _check_numbers(sheet: Sheet, columns: Collection[str]) -> bool:
    """Refuse what spreadsheet programs make of numbers; return whether any number is in percent.

    Of other text, whoever needs the number complains. A column is in percent as a whole, or not at all.
    """
    first: dict[tuple[str, bool], _Cell] = {}
    count: Counter[tuple[str, bool]] = Counter()
    for line, row in sheet.rows:
        for name in row.keys() & columns:
            text = row[name]
            if not (_PROGRAM.fullmatch(text) or readings(_bare(text))):
                if problem := _no_number(text):
                    _refuse(sheet, (line, name, text), problem)
            elif text.strip("0.,"):  # 0 is 0 %
                count[kind := (name, _in_percent(text))] += 1
                first.setdefault(kind, (line, name, text))
    for (name, percent), cell in first.items():
        other = first.get((name, not percent))
        if other and (count[name, percent], not percent) < (count[name, not percent], percent):
            is_, is_not = ("is", "is not") if percent else ("is not", "is")
            _refuse(sheet, cell, f"{is_} in percent, but cell {sheet.cell(*other[:2])} {is_not}: expected "
                    "percent signs in all cells of a column, or in none of them")  # fmt: skip
    return any(percent for _, percent in first)


def _bare(text: str) -> str:
    return text.removesuffix("%").rstrip()


def _in_percent(text: str) -> bool:
    return text.endswith("%") or (isinstance(text, Exact) and text.percent)


def _no_number(text: str) -> str:
    """Return what is wrong with a cell that spreadsheets are known for, or an empty text."""
    if text.startswith("="):
        return "is a formula: save the table with values in place of formulas"
    if text.startswith("#"):
        return "is an error of the spreadsheet program: repair the formula that was there"
    date = "looks like a date, which spreadsheet programs make of numbers such as 1.2 and 1-2"
    return f"{date}: format the cell as text, and type the number again" if looks_like_a_date(text) else ""


def _refuse(sheet: Sheet, cell: _Cell, problem: str) -> NoReturn:
    line, name, text = cell
    where = name if sheet.name else f"{name} in cell {sheet.cell(line, name)}"
    sheet.fail(line, f"{where}: {text!r:.60} {problem}", name)
