"""Reports from files: JSON, or a tidy CSV with one line per round and client.

CSV columns: round, client, empty, grand, alone, without; optional: se_loo, se_ioi, se_alpha, se_alpha_total,
samples, cosine, solo, solo_empty, slice, utility, silent. ``empty``, ``grand``, ``solo_empty``, ``slice`` and
``utility`` are the same on all lines of a round. An empty cell of an optional column means: not given. A
line with ``silent`` = yes names a client that was summed but sent no report.
Columns named after scores (LOO, FP, ...) are what fedmerit itself writes beside them; they are computed anew.

JSON: one round, a list of rounds, or an object with ``rounds`` (such as a run's ``scores.json``). A round is
an object with the fields of :class:`~fedmerit.Reports`; a vector is a list, or an object by client name. A
round without a number takes its place in the list.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
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
_LARGEST = 10**300


def read(path: str | Path, *, utility: str | None = None) -> list[Reports]:
    """Reports of all rounds in a file, in order of the rounds.

    Args:
        path: a ``.csv`` or ``.json`` file.
        utility: name of the utility where the file does not say; a known name is held to its range.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
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
    if not rounds:
        raise FileFormatError(f"{path}: no round has reports to score")
    rounds.sort(key=lambda pair: int(pair[1]["round"]))
    found = [_reports(path, where, given, utility) for where, given in rounds]
    for earlier, later in pairwise(found):
        if earlier.round == later.round:
            raise FileFormatError(f"{path}: round {later.round} appears twice")
        if earlier.utility != later.utility:
            said = f"utility {later.utility!r}, but {earlier.utility!r} in round {earlier.round}"
            raise FileFormatError(f"{path}: round {later.round}: {said}; they cannot be added")
    return found


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
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        table = [(rows.line_num, row) for row in rows if any(cell.strip() for cell in row)]
    except csv.Error as error:
        _fail(path, f"line {rows.line_num}", f"not CSV: {error}")
    if not table:
        raise FileFormatError(f"{path}: the file is empty")
    columns = [name.strip() for name in table[0][1]]
    _check_columns(path, table[0][0], columns)
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


def _check_columns(path: Path, line: int, columns: Sequence[str]) -> None:
    known = {*REQUIRED, *PER_CLIENT, *PER_ROUND, *SCORES, "silent"}
    missing = [name for name in REQUIRED if name not in columns]
    unknown = [name for name in columns if name not in known]
    if missing or unknown:
        problem = f"missing column {missing[0]!r}" if missing else f"unknown column {unknown[0]!r}"
        _fail(path, f"line {line}", f"{problem}; expected {', '.join(REQUIRED)} and optionally "
              f"{', '.join(sorted(known - {*REQUIRED, *SCORES}))}")  # fmt: skip
    if len(set(columns)) != len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        _fail(path, f"line {line}", f"column {twice!r} appears twice")


def _round_of(path: Path, number: int, lines: list[tuple[int, dict[str, str]]]) -> tuple[str, dict[str, Any]]:
    first_line, first = lines[0]
    given: dict[str, Any] = {"round": number}
    for name in PER_ROUND:
        if name not in first:
            continue
        if first[name] == "" and name in REQUIRED:
            _fail(path, f"line {first_line}", f"round {number}: {name} is missing")
        if first[name] != "":
            given[name] = first[name] if name in TEXT else _number(path, first_line, first, name)
        for line, cells in lines[1:]:
            numbers = name not in TEXT and first[name] != ""
            if cells[name] != first[name] and not (
                numbers and _number(path, line, cells, name) == given[name]
            ):
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
    reported = [(line, cells) for line, cells in lines if not _is_silent(path, number, line, cells)]
    where = f"lines {first_line}-{lines[-1][0]}"
    if not reported:
        _fail(path, where, f"round {number}: every client is silent")
    lines, known = reported, {cells["client"] for _, cells in reported}
    given["clients"] = [name for name in seen if name in known]
    given["silent"] = [name for name in seen if name not in known]
    for name in _VECTORS:
        filled = [cells.get(name, "") != "" for _, cells in lines]
        if name in REQUIRED or (any(filled) and name != "cosine"):
            given[name] = [_number(path, line, cells, name) for line, cells in lines]
        elif any(filled):
            given[name] = [
                _number(path, line, cells, name) if there else None
                for there, (line, cells) in zip(filled, lines, strict=True)
            ]
    return where, given


def _is_silent(path: Path, number: int, line: int, cells: Mapping[str, str]) -> bool:
    said = cells.get("silent", "")
    if said not in ("", "yes"):
        _fail(path, f"line {line}", f"round {number}: silent must be yes or left empty, got {said!r}")
    told = [name for name in _VECTORS if cells.get(name, "") != ""]
    if said and told:
        who = f"client {cells['client']!r} is silent but has {told[0]}"
        _fail(path, f"line {line}", f"round {number}: {who}")
    return bool(said)


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
        document = json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        _fail(path, f"line {error.lineno}", f"not JSON: {error.msg}")
    except RecursionError:
        raise FileFormatError(f"{path}: not reports: nested too deeply") from None
    except ValueError as error:  # a key twice, or a number of thousands of digits
        raise FileFormatError(f"{path}: not reports: {error}") from None
    shared: dict[str, Any] = {}
    if isinstance(document, dict) and "rounds" in document:
        shared = {"utility": document.get("utility"), "clients": document.get("clients")}
        document = document["rounds"]
    rounds = [document] if isinstance(document, dict) else document
    if not isinstance(rounds, list) or not rounds:
        _fail(path, "rounds", "expected a round, or a list of at least one round")
    found = [_round_object(path, k, one, shared) for k, one in enumerate(rounds, start=1)]
    return [pair for pair in found if pair is not None]


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} appears twice in one object")
        found[key] = value
    return found


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
        if not isinstance(given["reports"], dict):
            _fail(path, where, f"reports: expected an object, got {type(given['reports']).__name__}")
        inner = dict(given["reports"])
        inner.setdefault("round", given.get("round"))
        inner.setdefault("clients", given.get("participants"))
        inner.setdefault("silent", given.get("silent"))
        given = inner
    for name, otherwise in (("utility", shared.get("utility")), ("round", place), ("silent", [])):
        if given.get(name) is None:
            given[name] = otherwise
    if given.get("clients") in (None, []):
        keyed = next((given[name] for name in _VECTORS if isinstance(given.get(name), dict)), None)
        given["clients"] = list(keyed) if keyed is not None else shared.get("clients") or []
    unknown = sorted(set(given) - _FIELDS)
    if unknown:
        _fail(path, where, f"unknown field {unknown[0]!r}; expected {', '.join(sorted(_FIELDS))}")
    for name in ("empty", "grand", "alone", "without"):
        if given.get(name) is None:
            _fail(path, where, f"{name} is missing")
    _check_kinds(path, where, given)
    for name in _VECTORS:
        if isinstance(given.get(name), dict):
            given[name] = _by_name(path, where, name, given[name], given["clients"])
    return where, given


def _check_kinds(path: Path, where: str, given: dict[str, Any]) -> None:
    """Every field has the type it should have, and none is converted silently."""
    number = given["round"]
    if not isinstance(number, int | float) or isinstance(number, bool) or number != number // 1:
        _fail(path, where, f"round: expected a whole number, got {number!r:.60}")
    given["round"] = int(number)
    where = f"{where}: round {number}"
    for name in ("empty", "grand", "solo_empty"):
        if given.get(name) is not None:
            _check_number(path, where, name, given[name])
    for name in _VECTORS:
        values = given.get(name)
        if values is None:
            continue
        if not isinstance(values, list | dict):
            _fail(path, where, f"{name}: expected one number per client, got {values!r:.60}")
        for value in values.values() if isinstance(values, dict) else values:
            if value is not None:
                _check_number(path, where, name, value)
    for name in ("clients", "silent"):
        if not isinstance(given[name], list) or not all(isinstance(one, str) for one in given[name]):
            _fail(path, where, f"{name}: expected a list of names, got {given[name]!r:.60}")
    for name in TEXT:
        if not isinstance(given.get(name), str | None):
            _fail(path, where, f"{name}: expected text, got {given[name]!r:.60}")


def _check_number(path: Path, where: str, name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        _fail(path, where, f"{name}: expected a number, got {value!r:.60}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        _fail(path, where, f"{name}: expected a number of ordinary size, got one of {len(str(value))} digits")


def _by_name(
    path: Path, where: str, name: str, values: Mapping[str, Any], clients: Sequence[str]
) -> list[Any]:
    known = set(clients)
    for client in values:
        if client not in known:
            _fail(path, where, f"{name} names an unknown client {client!r}; known: {', '.join(clients)}")
    for client in clients:
        if client not in values:
            _fail(path, where, f"{name} of client {client!r} is missing")
    return [values[client] for client in clients]


def _fail(path: Path, where: str, problem: str) -> NoReturn:
    raise FileFormatError(f"{path}: {where}: {problem}") from None
