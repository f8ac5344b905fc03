"""Reports in a CSV file with one line per round and client, as people and their programs write it.

Columns: round, client, empty, grand, alone, without; optional: se_loo, se_ioi, se_alpha, se_alpha_total,
samples, cosine, solo, solo_empty, slice, since, utility, silent, sketch, freedom. ``empty``, ``grand``,
``solo_empty``, ``slice``, ``since``, ``utility`` and ``freedom`` are the same on all lines of a round.
``sketch`` holds several numbers, separated by blanks. An empty cell of an optional column
means that the value is not given. A line with ``silent`` = yes names a client that was summed but sent no
report. Columns named after scores (LOO, FP, ...) are written by fedmerit itself; when it reads them back,
they are recomputed. Other columns are not read, and a note names them. `spreadsheets` says in which forms a
CSV file may be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmerit.errors import InputError
from fedmerit.notes import Note
from fedmerit.scoring.scores import SCORES
from fedmerit.scoring.spreadsheets import (
    FOUND_OUT,
    Sheet,
    SheetForm,
    fail,
    looks_like_a_date,
    read_sheet,
    sheet_text,
    text_of,
)
from fedmerit.scoring.validate import (
    A_NUMBER,
    LARGEST,
    LARGEST_ROUND,
    names_of,
    spelled,
    two_spellings,
    whole,
    written_number,
)

# -------------------------------------------------------------------------------------------------- fields

REQUIRED = ("round", "client", "empty", "grand", "alone", "without")
PER_CLIENT = ("se_loo", "se_ioi", "se_alpha", "se_alpha_total", "samples", "cosine", "solo")
PER_ROUND = ("empty", "grand", "solo_empty", "slice", "since", "utility", "freedom")
TEXT = ("slice", "utility")
VECTORS = ("alone", "without", *PER_CLIENT)


@dataclass(frozen=True)
class FileRound:
    """One round of a file: the arguments of ``Reports``, and where in the file they are."""

    given: dict[str, Any]
    where: str  # place of the whole round in the file
    lines: Mapping[str, int] = field(default_factory=dict)  # line of each client, in CSV

    def where_of(self, client: str | None) -> str:
        """Return where a client's value is in the file; None stands for a value of the whole round."""
        if not self.lines:
            return self.where
        first = min(self.lines.values())
        return f"line {first if client is None else self.lines.get(client, first)}"


# -------------------------------------------------------------------------------------------------- reading

_OPTIONAL = frozenset({*PER_CLIENT, *PER_ROUND, "silent", "sketch"}) - {*REQUIRED}
_NUMBERS = frozenset({"round", "alone", "without", *PER_CLIENT, *PER_ROUND}) - {*TEXT}
_COUNTS = ("round", "samples", "since")


def rounds_of_csv(path: Path, form: SheetForm = FOUND_OUT) -> tuple[list[FileRound], tuple[Note, ...]]:
    """Return the rounds of a tidy CSV file in order, and notes on how it was read."""
    sheet = read_sheet(path, REQUIRED, _OPTIONAL, ignored=SCORES, numbers=_NUMBERS, counts=_COUNTS, form=form)
    if not sheet.rows:
        fail(path, f"line {sheet.header}", "only a header, no reports")
    grouped: dict[int, list[tuple[int, Mapping[str, str]]]] = {}
    for line, written in sheet.rows:
        cells = {**written, **{name: text_of(written[name]) for name in ("client", *TEXT) if name in written}}
        number = _number(sheet, line, cells, "round")
        if not number.is_integer() or number < 0:
            fail(path, f"line {line}", f"round must be a whole number, 0 or more, got {cells['round']!r}")
        if number > LARGEST_ROUND:
            fail(path, f"line {line}", f"round must be at most {LARGEST_ROUND}, got {cells['round']!r:.40}")
        grouped.setdefault(int(number), []).append((line, cells))
    dates = dict.fromkeys(cells["client"] for _, cells in sheet.rows if looks_like_a_date(cells["client"]))
    notes = (*sheet.notes, *([Note("sheet-dates", clients=[*dates])] if dates else []))
    return [_round_of(sheet, number, grouped[number]) for number in sorted(grouped)], notes


def _round_of(sheet: Sheet, number: int, lines: Sequence[tuple[int, Mapping[str, str]]]) -> FileRound:
    path, (first_line, first) = sheet.path, lines[0]
    given: dict[str, Any] = {"round": number}
    for name in sorted(PER_ROUND, key=lambda one: one != "utility"):  # it comes first: it explains the rest
        if name not in first:
            continue
        if first[name] == "" and name in REQUIRED:
            where = f"fill in cell {sheet.cell(first_line, name)}"
            fail(path, f"line {first_line}", f"round {number}: {name} is missing: {where}")
        if first[name] != "":
            given[name] = first[name] if name in TEXT else _number(sheet, first_line, first, name)
        for line, cells in lines[1:]:
            numbers = name not in TEXT and first[name] != ""
            if cells[name] != first[name] and not (
                numbers and _number(sheet, line, cells, name) == given[name]
            ):
                other = f"but {first[name]!r} on line {first_line}; expected one value for the whole round"
                if name == "utility":
                    other += "; several utilities go into JSON, under companions"
                fail(path, f"line {line}", f"round {number}: {name} is {cells[name]!r}, {other}")
    seen: dict[str, int] = {}
    for line, cells in lines:
        client = cells["client"]
        if not client:
            fail(path, f"line {line}", f"round {number}: the client has no name")
        if client in seen:
            fail(path, f"line {line}", f"round {number}: client {client!r} is already on line {seen[client]}")
        seen[client] = line
    reported = [(line, cells) for line, cells in lines if not _is_silent(sheet.path, number, line, cells)]
    last_line = lines[-1][0]
    where = f"line {first_line}" if last_line == first_line else f"lines {first_line}-{last_line}"
    if not reported:
        fail(path, where, f"round {number}: every client is silent")
    lines, known = reported, {cells["client"] for _, cells in reported}
    given["clients"] = [name for name in seen if name in known]
    given["silent"] = [name for name in seen if name not in known]
    for name in VECTORS:
        filled = [cells.get(name, "") != "" for _, cells in lines]
        if name in REQUIRED or (any(filled) and name != "cosine"):
            given[name] = [_number(sheet, line, cells, name) for line, cells in lines]
        elif any(filled):
            given[name] = [
                _number(sheet, line, cells, name) if there else None
                for there, (line, cells) in zip(filled, lines, strict=True)
            ]
    if any(cells.get("sketch", "") for _, cells in lines):
        given["sketch"] = [_sketch(sheet, line, cells) for line, cells in lines]
    return FileRound(given, where, seen)


def _sketch(sheet: Sheet, line: int, cells: Mapping[str, str]) -> list[float]:
    parts = cells["sketch"].split() or [""]
    return [_number(sheet, line, {**cells, "sketch": part}, "sketch") for part in parts]


def _is_silent(path: Path, number: int, line: int, cells: Mapping[str, str]) -> bool:
    said = cells.get("silent", "")
    if said not in ("", "yes"):
        fail(path, f"line {line}", f"round {number}: silent must be yes or left empty, got {said!r}")
    told = [name for name in (*VECTORS, "sketch") if cells.get(name, "") != ""]
    if said and told:
        who = f"client {cells['client']!r} is silent but has {told[0]}"
        fail(path, f"line {line}", f"round {number}: {who}")
    return bool(said)


def _number(sheet: Sheet, line: int, cells: Mapping[str, str], name: str) -> float:
    path = sheet.path
    whose = f" of client {cells['client']!r}" if name not in (*PER_ROUND, "round") else ""
    at = f" in round {cells['round']}" if name != "round" else ""
    if cells.get(name, "") == "":
        where = f"fill in cell {sheet.cell(line, name)}"
        fail(path, f"line {line}", f"{name}{whose}{at} is missing: {where}")
    try:
        number = written_number(cells[name])
    except ValueError:
        fail(path, f"line {line}", f"{name}{whose}{at} must be a number, got {cells[name]!r}")
    if name != "round" and not abs(number) <= LARGEST:
        fail(path, f"line {line}", f"{name}{whose}{at} must be {A_NUMBER}, got {cells[name]}")
    return number


# ---------------------------------------------------------------------------------------------- a template


def template(clients: Sequence[str], rounds: int, delimiter: str = ",") -> str:
    """Return a CSV file of reports to fill in: one line per round and client."""
    names = names_of(clients, None, "")
    if found := two_spellings(names):
        one, other = spelled(*found)
        raise InputError(f"{one} and {other} differ only in case, blanks or letters that look the same")
    columns = ("round", "client", "utility", "empty", "grand", "alone", "without", "se_alpha")
    numbers = range(1, whole(rounds, "rounds", least=1) + 1)
    rows = ([number, name, *[""] * (len(columns) - 2)] for number in numbers for name in names)
    return sheet_text([columns, *rows], SheetForm(delimiter).delimiter or ",")
