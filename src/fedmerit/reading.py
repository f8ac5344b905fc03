"""Reports from files: JSON, or a tidy CSV with one line per round and client.

CSV columns: round, client, empty, grand, alone, without; optional: se_loo, se_ioi, se_alpha, se_alpha_total,
samples, cosine, solo, solo_empty, slice, utility. ``empty``, ``grand``, ``solo_empty``, ``slice`` and
``utility`` are the same on all lines of a round. An empty cell of an optional column means: not given.
Columns named after scores (LOO, FP, ...) are what fedmerit itself writes beside them; they are computed anew.

JSON: one round, a list of rounds, or an object with ``rounds`` (such as a run's ``scores.json``). A round is
an object with the fields of :class:`~fedmerit.Reports`; a vector is a list, or an object by client name. A
round without a number takes its place in the list.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from fedmerit.errors import FileFormatError, InputError
from fedmerit.scores import SCORES
from fedmerit.types import Reports

REQUIRED = ("round", "client", "empty", "grand", "alone", "without")
PER_CLIENT = ("se_loo", "se_ioi", "se_alpha", "se_alpha_total", "samples", "cosine", "solo")
PER_ROUND = ("empty", "grand", "solo_empty", "slice", "utility")
TEXT = ("slice", "utility")
_FIELDS = frozenset(field.name for field in fields(Reports))
_VECTORS = ("alone", "without", *PER_CLIENT)


def read(path: str | Path, *, utility: str | None = None) -> list[Reports]:
    """Reports of all rounds in a file, in order of the rounds.

    Args:
        path: a ``.csv`` or ``.json`` file.
        utility: name of the utility where the file does not say; a known name is held to its range.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: cannot be read as text: {error}") from error
    if not text.strip():
        raise FileFormatError(f"{path}: the file is empty")
    if path.suffix.lower() == ".csv":
        rounds = _from_csv(path, text)
    elif path.suffix.lower() == ".json":
        rounds = _from_json(path, text)
    else:
        raise FileFormatError(f"{path}: expected a name that ends in .csv or .json")
    return [_reports(path, where, given, utility) for where, given in rounds]


def _reports(path: Path, where: str, given: dict[str, Any], utility: str | None) -> Reports:
    if given.get("utility") is None:
        given["utility"] = utility
    elif utility is not None and given["utility"] != utility:
        _fail(path, where, f"the file says utility {given['utility']!r}, asked for {utility!r}")
    try:
        return Reports(**given)
    except InputError as error:
        raise FileFormatError(f"{path}: {where}: {error}") from error


def _from_csv(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    rows = csv.reader(text.splitlines(), strict=True)
    try:
        table = [(rows.line_num, row) for row in rows if any(cell.strip() for cell in row)]
    except csv.Error as error:
        _fail(path, f"line {rows.line_num}", f"not CSV: {error}")
    columns = [name.strip() for name in table[0][1]]
    _check_columns(path, columns)
    if len(table) == 1:
        _fail(path, f"line {table[0][0]}", "only a header, no reports")
    grouped: dict[int, list[tuple[int, dict[str, str]]]] = {}
    for line, row in table[1:]:
        if len(row) != len(columns):
            _fail(path, f"line {line}", f"expected {len(columns)} cells, got {len(row)}")
        cells = {name: cell.strip() for name, cell in zip(columns, row, strict=True)}
        number = _number(path, line, cells, "round")
        if not number.is_integer():
            _fail(path, f"line {line}", f"round must be a whole number, got {cells['round']!r}")
        grouped.setdefault(int(number), []).append((line, cells))
    return [_round_of(path, number, grouped[number]) for number in sorted(grouped)]


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    known = {*REQUIRED, *PER_CLIENT, *PER_ROUND, *SCORES}
    missing = [name for name in REQUIRED if name not in columns]
    unknown = [name for name in columns if name not in known]
    if missing or unknown:
        problem = f"missing column {missing[0]!r}" if missing else f"unknown column {unknown[0]!r}"
        _fail(path, "line 1", f"{problem}; expected {', '.join(REQUIRED)} and optionally "
              f"{', '.join(sorted(known - {*REQUIRED, *SCORES}))}")  # fmt: skip
    if len(set(columns)) != len(columns):
        _fail(path, "line 1", f"column {next(c for c in columns if columns.count(c) > 1)!r} appears twice")


def _round_of(path: Path, number: int, lines: list[tuple[int, dict[str, str]]]) -> tuple[str, dict[str, Any]]:
    first_line, first = lines[0]
    given: dict[str, Any] = {"round": number}
    for name in PER_ROUND:
        if first.get(name, "") == "":
            if name in REQUIRED:
                _fail(path, f"line {first_line}", f"round {number}: {name} is missing")
            continue
        given[name] = first[name] if name in TEXT else _number(path, first_line, first, name)
        for line, cells in lines[1:]:
            same = cells[name] == first[name] or (
                name not in TEXT and _number(path, line, cells, name) == given[name]
            )
            if not same:
                other = f"but {first[name]!r} on line {first_line}; it is one for the whole round"
                _fail(path, f"line {line}", f"round {number}: {name} is {cells[name]!r}, {other}")
    seen: dict[str, int] = {}
    for line, cells in lines:
        client = cells["client"]
        if not client:
            _fail(path, f"line {line}", f"round {number}: the client has no name")
        if client in seen:
            _fail(
                path, f"line {line}", f"round {number}: client {client!r} is already on line {seen[client]}"
            )
        seen[client] = line
    given["clients"] = list(seen)
    for name in _VECTORS:
        filled = [cells.get(name, "") != "" for _, cells in lines]
        if name in REQUIRED or (any(filled) and name != "cosine"):
            given[name] = [_number(path, line, cells, name) for line, cells in lines]
        elif any(filled):
            given[name] = [
                _number(path, line, cells, name) if there else None
                for there, (line, cells) in zip(filled, lines, strict=True)
            ]
    return f"lines {first_line}-{lines[-1][0]}", given


def _number(path: Path, line: int, cells: Mapping[str, str], name: str) -> float:
    whose = f" of client {cells['client']!r}" if name not in (*PER_ROUND, "round") else ""
    at = f" in round {cells['round']}" if name != "round" else ""
    if cells.get(name, "") == "":
        _fail(path, f"line {line}", f"{name}{whose}{at} is missing")
    try:
        return float(cells[name])
    except ValueError:
        _fail(path, f"line {line}", f"{name}{whose}{at} must be a number, got {cells[name]!r}")


def _from_json(path: Path, text: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        _fail(path, f"line {error.lineno}", f"not JSON: {error.msg}")
    shared: dict[str, Any] = {}
    if isinstance(document, dict) and "rounds" in document:
        shared = {"utility": document.get("utility"), "clients": document.get("clients")}
        document = document["rounds"]
    rounds = [document] if isinstance(document, dict) else document
    if not isinstance(rounds, list) or not rounds:
        _fail(path, "rounds", "expected a round, or a list of at least one round")
    found = [_round_object(path, k, one, shared) for k, one in enumerate(rounds, start=1)]
    return [pair for pair in found if pair is not None]


def _round_object(
    path: Path, place: int, one: Any, shared: Mapping[str, Any]
) -> tuple[str, dict[str, Any]] | None:
    where = f"round {place} of the file"
    if not isinstance(one, dict):
        _fail(path, where, f"expected an object, got {type(one).__name__}")
    given = dict(one)
    if "reports" in given:  # the shape of a run's scores.json
        if given["reports"] is None:  # an aborted round: recorded there, nothing to score
            return None
        inner = dict(given["reports"])
        inner.setdefault("round", given.get("round"))
        inner.setdefault("clients", given.get("participants"))
        inner.setdefault("silent", given.get("silent", ()))
        given = inner
    if given.get("utility") is None:
        given["utility"] = shared.get("utility")
    if given.get("round") is None:
        given["round"] = place
    if not given.get("clients"):
        keyed = next((given[name] for name in _VECTORS if isinstance(given.get(name), dict)), None)
        given["clients"] = list(keyed) if keyed is not None else shared.get("clients") or ()
    unknown = sorted(set(given) - _FIELDS)
    if unknown:
        _fail(path, where, f"unknown field {unknown[0]!r}; expected {', '.join(sorted(_FIELDS))}")
    for name in ("empty", "grand", "alone", "without"):
        if given.get(name) is None:
            _fail(path, where, f"{name} is missing")
    for name in _VECTORS:
        if isinstance(given.get(name), dict):
            given[name] = _by_name(path, where, name, given[name], given["clients"])
    return where, given


def _by_name(
    path: Path, where: str, name: str, values: Mapping[str, Any], clients: Sequence[str]
) -> list[Any]:
    for client in values:
        if client not in clients:
            _fail(path, where, f"{name} names an unknown client {client!r}; known: {', '.join(clients)}")
    for client in clients:
        if client not in values:
            _fail(path, where, f"{name} of client {client!r} is missing")
    return [values[client] for client in clients]


def _fail(path: Path, where: str, problem: str) -> NoReturn:
    raise FileFormatError(f"{path}: {where}: {problem}") from None
