"""Reports of rounds in files: JSON, or a table (CSV or .xlsx) with one line per round and client.

JSON: one round, a list of rounds, or an object with ``rounds`` (such as a run's ``scores.json``). A round is
an object with the fields of :class:`~fedmerit.Reports`; a vector is a list, or an object by client name. A
round without a number gets its position in the list. Beside ``rounds``, ``clients`` lists all of them, and
``companions`` holds documents by utility, of which the requested one is read.

Tables: the columns ``REQUIRED``, optionally ``PER_CLIENT``, ``PER_ROUND``, silent and sketch. The fields of
a round are the same on all of its lines. ``sketch`` holds several numbers, separated by blanks. An empty cell
of an optional column means that the value is not given. A line with ``silent`` = yes names a client that was
summed but sent no report. Columns named after scores (LOO, FP, ...) are recomputed. Other columns are not
read, and a note names them. Headings count in any case, and member is another word for client. `sheets` and
`workbooks` say in which forms a table may be written.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NoReturn

from fedmerit.errors import FileFormatError, InputError, NamesAlike, ReportError, ValueRefused
from fedmerit.files import sheets, workbooks
from fedmerit.files.sheets import FOUND_OUT, Sheet, SheetForm, fail, sheet_text
from fedmerit.notes import Note, slips, spelled, two_spellings, words
from fedmerit.scoring.scores import SCORES
from fedmerit.scoring.types import Reports, names_of, round_of, whole, written_number

REQUIRED = ("round", "client", "empty", "grand", "alone", "without")
PER_CLIENT = ("se_loo", "se_ioi", "se_alpha", "se_alpha_total", "samples", "cosine", "solo")
PER_ROUND = ("utility", "empty", "grand", "solo_empty", "slice", "freedom")
TEXT = ("slice", "utility")
VECTORS = ("alone", "without", *PER_CLIENT)
PERCENT = 10  # numbers so many times as large as others are taken for percentages beside fractions
_WORKBOOKS = (".xls", ".xlsm", ".xlsb", ".ods", ".numbers")


@dataclass(frozen=True)
class FileRound:
    """One round of a file: the arguments of ``Reports``, and where in the file they are."""

    given: dict[str, Any]
    where: str  # place of the whole round in the file
    lines: Mapping[str, _Line] = field(default_factory=dict)  # that of each client, in a table

    def fail(self, path: Path, error: ReportError) -> NoReturn:
        """Raise FileFormatError that says where in the file a round is wrong, by its cell if there is one."""
        if not self.lines:  # the place already names the round
            fail(path, self.where, error.problem)
        if isinstance(error, ValueRefused):
            first, *_ = self.lines.values()
            self.lines.get(error.client or "", first).fail(str(error), error.field)
        fail(path, self.where, str(error))


@dataclass(frozen=True)
class ReportFile:
    """The content of a file of reports."""

    rounds: list[Reports]
    clients: tuple[str, ...] = ()  # all clients, if the file lists them
    notes: tuple[Note, ...] = ()  # how the file was read, if it is not in the plain form


def read(
    path: str | Path | Any,
    *,
    utility: str | None = None,
    delimiter: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    sheet: str | None = None,
    distinct: Sequence[str] = (),
) -> list[Reports]:
    """Return the reports of all rounds in a ``.csv``, ``.xlsx`` or ``.json`` file, in order of the rounds.

    `fedmerit.load` reads run folders, with all else that is in them. Notes on how a file was understood are
    beside the reports that `fedmerit.files.reports.read_content` returns.

    Args:
        path: of the file; or a frame of pandas or polars with the columns of a table.
        utility: name of the utility if the file does not say, or which one to read if it has several.
        delimiter: what separates the cells of a CSV file: a comma, semicolon, tab or bar. This and the next
            two are detected; give them where a file can be read in two ways.
        decimal: the decimal mark in text, "." or ",".
        encoding: of a CSV file, such as "latin-1".
        sheet: the one to read of a workbook, if several have the columns.
        distinct: names that resemble another name in the file but belong to different members. Names that
            look like misspellings of each other and never share a round are refused otherwise.
    """
    form = SheetForm(delimiter, decimal, encoding, sheet, tuple(distinct))
    return read_content(path, utility=utility, form=form).rounds


def read_content(
    path: str | Path | Any, *, utility: str | None = None, form: SheetForm = FOUND_OUT
) -> ReportFile:
    """Return the reports of a file, as `read` does, with the clients that it lists and notes on it."""
    frame = path if hasattr(path, "shape") and hasattr(path, "columns") else None  # a lazy one has no shape
    if frame is None and not isinstance(path, str | Path):
        raise InputError(f"expected the path of a file of reports, or a frame, got {type(path).__name__}")
    path = Path(path if frame is None else "the frame")
    if frame is None:
        sheets.size_of(path)  # it is there
    sheets.check_form(path, form)
    clients: tuple[str, ...] = ()
    suffix = path.suffix.lower()
    if frame is not None:
        rounds, notes = _rounds_of_table(sheets.frame_sheet(path, frame, COLUMNS))
    elif suffix == ".csv":
        rounds, notes = _rounds_of_table(sheets.read_sheet(path, COLUMNS, form))
    elif suffix == ".xlsx":
        rounds, notes = _rounds_of_table(workbooks.read_workbook(path, COLUMNS, form))
    elif suffix == ".json":
        rounds, clients, notes = _rounds_of_json(path, utility)
    else:
        hint = "; fedmerit.load reads a run folder" if path.is_dir() else ""
        hint = "; save it as .xlsx or as CSV" if suffix in _WORKBOOKS else hint
        raise FileFormatError(f"{path}: expected a name that ends in .csv, .xlsx or .json{hint}")
    if not rounds:
        hint = "for a settled run, give its folder, whose ledger holds the settled scores"
        raise FileFormatError(f"{path}: no round has reports to score; {hint}")
    rounds.sort(key=lambda entry: int(entry.given["round"]))
    reported = [_reports(path, entry, utility) for entry in rounds]
    _check_order(path, reported)
    _check_spellings(path, reported, clients, form.distinct)
    return ReportFile(reported, clients, notes)


def _reports(path: Path, entry: FileRound, utility: str | None) -> Reports:
    fields = entry.given
    if fields.get("utility") is None:
        fields["utility"] = utility
    elif utility is not None and fields["utility"] != utility:
        fail(path, entry.where, f"the file says utility {fields['utility']!r}, asked for {utility!r}")
    try:
        reports = Reports(**fields)
        _check_unit(reports)
    except ReportError as error:
        entry.fail(path, error)
    return reports


# ----------------------------------------------------------------------------------------------- all rounds


def _check_unit(reports: Reports) -> None:
    """Raise ValueRefused if some columns of a round are in percent and the others are not.

    Contributions would then add up to half the gain per member, whatever the members did.
    """
    ends = (reports.empty, reports.grand)
    parts = (*reports.alone.tolist(), *reports.without.tolist())
    for small, large, columns in ((parts, ends, "empty and grand"), (ends, parts, "alone and without")):
        if min(small) >= 0 and max(small) <= 1 < min(large) and min(large) > PERCENT * max(small):
            apart = f"{min(large):g} or more, but the other two columns are {max(small):g} or less"
            raise ValueRefused(
                f"{columns} are {apart}: expected one unit in all four, such as 0.81 for 81%",
                field=columns.partition(" ")[0], round=reports.round,
            )  # fmt: skip


def _check_order(path: Path, rounds: Sequence[Reports]) -> None:
    for earlier, later in pairwise(rounds):
        if earlier.round == later.round:
            raise FileFormatError(f"{path}: round {later.round} appears twice")
        if earlier.utility != later.utility:
            utilities = f"utility {later.utility!r}, but {earlier.utility!r} in round {earlier.round}"
            fail(path, f"round {later.round}", f"{utilities}; they cannot be added")


def _check_spellings(
    path: Path, rounds: Sequence[Reports], clients: Sequence[str], distinct: Sequence[str]
) -> None:
    """Raise NamesAlike if one name is spelled in two ways, which would split a member into two.

    Names that merely resemble each other belong to two members if they share a round, if the file lists
    both, or if one of them is ``distinct``. Names that fill each other's gaps, so that they have every round
    between them, need only be one letter apart.
    """
    where: dict[str, list[str]] = {name: [] for name in clients}
    for reports in rounds:
        for name in (*reports.clients, *reports.silent):
            where.setdefault(name, []).append(str(reports.round))
    if unknown := [name for name in distinct if name not in where]:
        raise FileFormatError(f"{path}: distinct: expected names in the file, got {unknown[0]!r}")
    every = {str(reports.round) for reports in rounds}
    filled = (pair for pair in slips(where, anywhere=True) if {*where[pair[0]], *where[pair[1]]} == every)
    slipped = (
        (first, second)
        for first, second in chain(slips(where), filled)
        if not {first, second} & {*distinct}
        and not {first, second} <= {*clients}
        and not {*where[first]} & {*where[second]}
    )
    same = two_spellings(where)
    pair = same or next(slipped, None)
    if pair is None:
        return
    at = [f"round {', '.join(where[name])}" if where[name] else "listed, in no round" for name in pair]
    first, second = (f"{name} ({place})" for name, place in zip(spelled(*pair), at, strict=True))
    why = "differ only in case, blanks or letters that look the same: expected one spelling per member"
    if not same:
        why = (
            "look like one name and never share a round: expected one spelling per member; if they are two "
            f"members, say so with --distinct {shlex.quote(pair[1])} (in Python, distinct=[{pair[1]!r}])"
        )
    raise NamesAlike(f"{path}: {first} and {second} {why}", pair)


# ----------------------------------------------------------------------------------------------------- JSON

_FIELDS = frozenset(item.name for item in fields(Reports))


def _rounds_of_json(
    path: Path, utility: str | None
) -> tuple[list[FileRound], tuple[str, ...], tuple[Note, ...]]:
    """Return the rounds of a JSON file in its order, the clients it lists (or none), and notes on it."""
    document = _json(path)
    shared: dict[str, Any] = {}
    clients: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    if isinstance(document, dict) and "rounds" in document:
        if document.get("settlement"):
            notes = (Note("file-settled"),)
        document = _of_utility(path, document, utility)
        listed = document.get("clients")
        clients = () if listed is None else _names(path, "clients", listed)
        shared = {"utility": document.get("utility"), "clients": list(clients)}
        document = document["rounds"]
    rounds = [document] if isinstance(document, dict) else document
    if not isinstance(rounds, list) or not rounds:
        fail(path, "rounds", "expected a round, or a list of at least one round")
    entries = (_round_object(path, place, content, shared) for place, content in enumerate(rounds, start=1))
    reported = [entry for entry in entries if entry is not None]
    for entry in reported if clients else ():
        for name in (*entry.given["clients"], *entry.given["silent"]):
            if name not in clients:
                fail(path, entry.where, f"unknown client {name!r}; the file lists {', '.join(clients)}")
    return reported, clients, notes


def _json(path: Path) -> Any:
    def each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key, value in pairs:
            if key in content:
                fail(path, "not reports", f"{key!r} appears twice in one object")
            content[key] = value
        return content

    try:
        text = sheets.bytes_of(path).decode("utf-8-sig")
        if not text.strip():
            raise FileFormatError(f"{path}: the file is empty")
        return json.loads(text, object_pairs_hook=each_once)
    except FileFormatError:
        raise
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at place {error.start}"
        raise FileFormatError(f"{path}: expected JSON in UTF-8, got {byte}: save it as UTF-8") from error
    except json.JSONDecodeError as error:
        fail(path, f"line {error.lineno}", f"not JSON: {error.msg}")
    except RecursionError:
        fail(path, "not reports", "nested too deeply")
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        fail(path, "not reports", "expected numbers of ordinary size, got one of thousands of digits")


def _of_utility(path: Path, document: dict[str, Any], utility: str | None) -> dict[str, Any]:
    """Return the part of a run's document that is about the requested utility."""
    companions = document.get("companions")
    if utility is None or companions is None or document.get("utility") == utility:
        return document
    if not isinstance(companions, dict):
        fail(path, "companions", f"expected an object by utility, got {companions!r:.60}")
    if utility not in companions:
        known = ", ".join(map(str, (document.get("utility"), *companions)))
        raise FileFormatError(f"{path}: has no utility {utility!r}; it has {known}")
    companion = companions[utility]
    if not isinstance(companion, dict) or "rounds" not in companion:
        fail(path, f"companions: {utility}", "expected an object with rounds")
    return companion


def _names(path: Path, where: str, names: Any) -> tuple[str, ...]:
    if not isinstance(names, list):
        fail(path, where, f"expected a list of names, got {names!r:.60}")
    try:
        return names_of(names, None, "")
    except ReportError as error:
        fail(path, where, error.problem)


def _round_object(path: Path, place: int, content: Any, shared: Mapping[str, Any]) -> FileRound | None:
    """Return a round of a JSON file, whose numbers `Reports` checks; None for one without reports."""
    where = f"round {place} of the file"
    if not isinstance(content, dict):
        fail(path, where, f"expected an object, got {type(content).__name__}")
    given = dict(content)
    if "reports" in given:  # as in a run's scores.json
        if given["reports"] is None:  # an aborted round
            return None
        if not isinstance(given["reports"], dict):
            fail(path, where, f"reports: expected an object, got {type(given['reports']).__name__}")
        around = {"round": "round", "clients": "participants", "silent": "silent"}
        given = {name: content.get(source) for name, source in around.items()} | given["reports"]
    for name, otherwise in (("utility", shared.get("utility")), ("round", place), ("silent", [])):
        if given.get(name) is None:
            given[name] = otherwise
    if given.get("clients") in (None, []):
        keyed = next((given[name] for name in VECTORS if isinstance(given.get(name), dict)), None)
        given["clients"] = list(keyed) if keyed is not None else shared.get("clients") or []
    try:
        given["round"] = round_of(given["round"])
    except ReportError as error:
        fail(path, where, error.problem)
    where = f"round {place}" if given["round"] == place else f"{where}, number {given['round']}"
    if unknown := sorted(set(given) - _FIELDS):
        fail(path, where, f"unknown field {unknown[0]!r}; expected {', '.join(sorted(_FIELDS))}")
    for name in ("empty", "grand", "alone", "without"):
        if given.get(name) is None:
            fail(path, where, f"{name} is missing")
    for name in ("clients", "silent"):
        _names(path, f"{where}: {name}", given[name])
    for name in (*VECTORS, "sketch"):
        if isinstance(given.get(name), dict):
            given[name] = _in_order(path, where, name, given[name], given["clients"])
    return FileRound(given, where)


def _in_order(
    path: Path, where: str, name: str, values: Mapping[str, Any], clients: Sequence[str]
) -> list[Any]:
    if strangers := [client for client in values if client not in clients]:
        fail(path, where, f"{name} names an unknown client {strangers[0]!r}; known: {', '.join(clients)}")
    if missing := [client for client in clients if client not in values]:
        fail(path, where, f"{name} of client {missing[0]!r} is missing")
    return [values[client] for client in clients]


# ------------------------------------------------------------------------------------------------------ CSV

COLUMNS = sheets.Expected(
    required=REQUIRED,
    optional=frozenset({*PER_CLIENT, *PER_ROUND, "silent", "sketch"}) - {*REQUIRED},
    ignored=SCORES,
    numbers=frozenset({"round", "alone", "without", *PER_CLIENT, *PER_ROUND}) - {*TEXT},
    counts=("round", "samples"),
    also={"member": "client"},
)
"""The columns of a table of reports."""


@dataclass(frozen=True)
class _Line:
    """A line of the table: what one client reported in one round."""

    sheet: Sheet
    number: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def fail(self, problem: str, column: str, how: str = "mend") -> NoReturn:
        self.sheet.fail(self.number, f"{problem}: {how} cell {self.sheet.cell(self.number, column)}", column)

    def missing(self, what: str, column: str) -> NoReturn:
        self.fail(f"{what} is missing", column, "fill in")

    def value(self, column: str, text: str | None = None) -> float:
        """Return the number in a cell, or in a part of its text; raise FileFormatError if it holds none."""
        text = self.text(column) if text is None else text
        whose = f" of client {self.text('client')!r}" if column not in (*PER_ROUND, "round") else ""
        what = f"{column}{whose}" + (f" in round {self.text('round')}" if column != "round" else "")
        if not text:
            self.missing(what, column)
        try:
            return written_number(text)
        except ValueError:
            self.fail(f"{what} must be a number, got {text!r}", column)

    def round_number(self) -> int:
        try:
            return round_of(self.value("round")) or 0
        except ReportError as error:
            self.fail(error.problem, "round")

    def is_silent(self, where: str) -> bool:
        silent = self.text("silent")
        if silent not in ("", "yes"):
            self.fail(f"{where}: silent must be yes or left empty, got {silent!r}", "silent")
        filled = [column for column in (*VECTORS, "sketch") if self.text(column)]
        if silent and filled:
            self.fail(f"{where}: client {self.text('client')!r} is silent but has {filled[0]}", filled[0])
        return bool(silent)


def _rounds_of_table(sheet: Sheet) -> tuple[list[FileRound], tuple[Note, ...]]:
    """Return the rounds of a table in order, and notes on how it was read."""
    if not sheet.rows:
        sheet.fail(sheet.header, "only a header, no reports")
    grouped: dict[int, list[_Line]] = {}
    for number, written in sheet.rows:
        plain = {name: sheets.text_of(written[name]) for name in ("client", *TEXT) if name in written}
        line = _Line(sheet, number, {**written, **plain} if sheet.line == "line" else written)
        grouped.setdefault(line.round_number(), []).append(line)
    clients = dict.fromkeys(cells["client"] for _, cells in sheet.rows)
    dates = [name for name in clients if sheets.looks_like_a_date(name)]
    notes = (*sheet.notes, *([Note("sheet-dates", clients=dates)] if dates else []))
    return [_round_of_lines(number, grouped[number]) for number in sorted(grouped)], notes


def _round_of_lines(number: int, lines: Sequence[_Line]) -> FileRound:
    where, word = f"round {number}", lines[0].sheet.line
    given: dict[str, Any] = {"round": number, **_shared(where, lines)}
    named: dict[str, _Line] = {}
    for line in lines:
        client = line.text("client")
        if not client:
            line.missing(f"{where}: the name of the client", "client")
        if client in named:
            line.fail(f"{where}: client {client!r} is already on {word} {named[client].number}", "client")
        named[client] = line
    reported = [line for line in lines if not line.is_silent(where)]
    first, last = lines[0].number, lines[-1].number
    place = f"{word} {first}" if first == last else f"{word}s {first}-{last}"
    if not reported:
        fail(lines[0].sheet.path, place, f"{where}: every client is silent")
    given["clients"] = [line.text("client") for line in reported]
    given["silent"] = [name for name in named if name not in given["clients"]]
    for name in VECTORS:
        if name in REQUIRED or any(line.text(name) for line in reported):
            nullable = name == "cosine"
            given[name] = [line.value(name) if line.text(name) or not nullable else None for line in reported]
    if any(line.text("sketch") for line in reported):
        given["sketch"] = [
            [line.value("sketch", part) for part in line.text("sketch").split() or [""]] for line in reported
        ]
    return FileRound(given, place, named)


def _shared(where: str, lines: Sequence[_Line]) -> dict[str, Any]:
    """Return what all lines of a round say of it; raise FileFormatError where they differ."""
    first, *others = lines
    given: dict[str, Any] = {}
    for name in PER_ROUND:  # the utility comes first: it explains the rest
        if name not in first.cells:
            continue
        if name in REQUIRED and not first.text(name):
            first.missing(f"{where}: {name}", name)
        value = (first.text(name) if name in TEXT else first.value(name)) if first.text(name) else None
        for line in others:
            if line.text(name) == first.text(name):
                continue
            if isinstance(value, float) and line.value(name) == value:
                continue
            more = "; several utilities go into JSON, under companions" if name == "utility" else ""
            line.fail(
                f"{where}: {name} is {line.text(name)!r}, but {first.text(name)!r} on {first.sheet.line} "
                f"{first.number}; expected one value for the whole round{more}",
                name,
            )
        if value is not None:
            given[name] = value
    return given


# ----------------------------------------------------------------------------------------------- to fill in

TEMPLATE = {
    "round": 1, "member": "Bonn", "utility": "accuracy", "empty": 0.70, "grand": 0.81, "alone": 0.74,
    "without": 0.79, "se_alpha": 0.01,
}  # fmt: skip
"""The columns of a table of reports to fill in, each with an example."""
REMARKS = 2
"""Lines below its header that explain: they begin with #, and are not read."""


def template(members: Sequence[str], rounds: int) -> list[Sequence[Any]]:
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


def template_csv(table: Iterable[Sequence[Any]], delimiter: str = ",") -> str:
    """Return a table to fill in as CSV, with the mark by which spreadsheet programs know UTF-8."""
    return "\ufeff" + sheet_text(table, delimiter)
