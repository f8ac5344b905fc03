"""Rounds from a tidy CSV: one line per round and client. Every error names its line."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmerit.checks import A_NUMBER, LARGEST, written_number
from fedmerit.errors import FileFormatError
from fedmerit.layout import PER_CLIENT, PER_ROUND, REQUIRED, TEXT, VECTORS, Found, fail
from fedmerit.scores import SCORES


def rounds_of_csv(path: Path, text: str) -> list[Found]:
    """The rounds of a tidy CSV file, in order."""
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        table = [(rows.line_num, row) for row in rows if any(cell.strip() for cell in row)]
    except csv.Error as error:
        fail(path, f"line {rows.line_num}", f"not CSV: {error}")
    if not table:
        raise FileFormatError(f"{path}: the file is empty")
    columns = [name.strip() for name in table[0][1]]
    _check_columns(path, table[0][0], columns)
    if len(table) == 1:
        fail(path, f"line {table[0][0]}", "only a header, no reports")
    grouped: dict[int, list[tuple[int, dict[str, str]]]] = {}
    for line, row in table[1:]:
        if len(row) != len(columns):
            fail(path, f"line {line}", f"expected {len(columns)} cells, got {len(row)}")
        cells = {name: cell.strip() for name, cell in zip(columns, row, strict=True)}
        number = _number(path, line, cells, "round")
        if not number.is_integer() or number < 0:
            fail(path, f"line {line}", f"round must be a whole number, 0 or more, got {cells['round']!r}")
        grouped.setdefault(int(number), []).append((line, cells))
    return [_round_of(path, number, grouped[number]) for number in sorted(grouped)]


def _check_columns(path: Path, line: int, columns: Sequence[str]) -> None:
    known = {*REQUIRED, *PER_CLIENT, *PER_ROUND, *SCORES, "silent"}
    missing = [name for name in REQUIRED if name not in columns]
    unknown = [name for name in columns if name not in known]
    if missing or unknown:
        problem = f"missing column {missing[0]!r}" if missing else f"unknown column {unknown[0]!r}"
        fail(path, f"line {line}", f"{problem}; expected {', '.join(REQUIRED)} and optionally "
              f"{', '.join(sorted(known - {*REQUIRED, *SCORES}))}; got {', '.join(columns)!r:.120}"
              f"{_advice(columns, known)}")  # fmt: skip
    if len(set(columns)) != len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        fail(path, f"line {line}", f"column {twice!r} appears twice")


def _advice(columns: Sequence[str], known: Collection[str]) -> str:
    """What to do about a header that nearly is one."""
    for mark, called in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(columns) == 1 and mark in columns[0]:
            return f": cells are separated by {called}; write them with commas, and numbers with a point"
    for name in columns:
        if name not in known and name.casefold() in known:
            return f": write {name.casefold()!r} in place of {name!r}"
    return ""


def _round_of(path: Path, number: int, lines: list[tuple[int, dict[str, str]]]) -> Found:
    first_line, first = lines[0]
    given: dict[str, Any] = {"round": number}
    for name in sorted(PER_ROUND, key=lambda one: one != "utility"):  # of two utilities all else differs too
        if name not in first:
            continue
        if first[name] == "" and name in REQUIRED:
            fail(path, f"line {first_line}", f"round {number}: {name} is missing")
        if first[name] != "":
            given[name] = first[name] if name in TEXT else _number(path, first_line, first, name)
        for line, cells in lines[1:]:
            numbers = name not in TEXT and first[name] != ""
            if cells[name] != first[name] and not (
                numbers and _number(path, line, cells, name) == given[name]
            ):
                other = f"but {first[name]!r} on line {first_line}; it is one for the whole round"
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
    reported = [(line, cells) for line, cells in lines if not _is_silent(path, number, line, cells)]
    where = f"lines {first_line}-{lines[-1][0]}"
    if not reported:
        fail(path, where, f"round {number}: every client is silent")
    lines, known = reported, {cells["client"] for _, cells in reported}
    given["clients"] = [name for name in seen if name in known]
    given["silent"] = [name for name in seen if name not in known]
    for name in VECTORS:
        filled = [cells.get(name, "") != "" for _, cells in lines]
        if name in REQUIRED or (any(filled) and name != "cosine"):
            given[name] = [_number(path, line, cells, name) for line, cells in lines]
        elif any(filled):
            given[name] = [
                _number(path, line, cells, name) if there else None
                for there, (line, cells) in zip(filled, lines, strict=True)
            ]
    return Found(given, where, seen)


def _is_silent(path: Path, number: int, line: int, cells: Mapping[str, str]) -> bool:
    said = cells.get("silent", "")
    if said not in ("", "yes"):
        fail(path, f"line {line}", f"round {number}: silent must be yes or left empty, got {said!r}")
    told = [name for name in VECTORS if cells.get(name, "") != ""]
    if said and told:
        who = f"client {cells['client']!r} is silent but has {told[0]}"
        fail(path, f"line {line}", f"round {number}: {who}")
    return bool(said)


def _number(path: Path, line: int, cells: Mapping[str, str], name: str) -> float:
    whose = f" of client {cells['client']!r}" if name not in (*PER_ROUND, "round") else ""
    at = f" in round {cells['round']}" if name != "round" else ""
    if cells.get(name, "") == "":
        fail(path, f"line {line}", f"{name}{whose}{at} is missing")
    try:
        number = written_number(cells[name])
    except ValueError:
        fail(path, f"line {line}", f"{name}{whose}{at} must be a number, got {cells[name]!r}")
    if name != "round" and not abs(number) <= LARGEST:
        fail(path, f"line {line}", f"{name}{whose}{at} must be {A_NUMBER}, got {cells[name]}")
    return number
