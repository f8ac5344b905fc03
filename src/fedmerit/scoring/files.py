"""Reports read from and written to files: JSON, or a tidy CSV (see `tidy`).

JSON: one round, a list of rounds, or an object with ``rounds`` (such as a run's ``scores.json``). A round is
an object with the fields of :class:`~fedmerit.Reports`; a vector is a list, or an object by client name. A
round without a number gets its position in the list. If an object with ``rounds`` has ``clients``, it lists
all of them. If it has ``companions`` (documents by utility), the one for the requested utility is read.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedmerit.errors import (
    FileFormatError,
    InputError,
    NamesAlike,
    ReportError,
    UndefinedScore,
    ValueRefused,
)
from fedmerit.notes import Note
from fedmerit.scoring.accumulate import SUMMABLE, Missing, accumulate
from fedmerit.scoring.scores import SCORES, score_of
from fedmerit.scoring.spreadsheets import FOUND_OUT, SheetForm, check_form, fail, sheet_text
from fedmerit.scoring.tidy import PER_CLIENT, TEXT, VECTORS, FileRound, rounds_of_csv
from fedmerit.scoring.types import Reports, Scores, Vector
from fedmerit.scoring.validate import slips, spelled, two_spellings

LEDGER = "ledger.sqlite"
"""Name of the ledger in a run folder."""
_WORKBOOKS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")

# ----------------------------------------------------------------------------------------------- from JSON

_FIELDS = frozenset(field.name for field in fields(Reports))
_LARGEST = 10**300


def rounds_of_json(
    path: Path, text: str, utility: str | None
) -> tuple[list[FileRound], tuple[str, ...], tuple[Note, ...]]:
    """Return the rounds of a JSON file in its order, the clients it lists (or none), and notes on it."""
    try:
        document = json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        fail(path, f"line {error.lineno}", f"not JSON: {error.msg}")
    except RecursionError:
        raise FileFormatError(f"{path}: not reports: nested too deeply") from None
    except _Repeated as error:
        raise FileFormatError(f"{path}: not reports: {error}") from None
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise FileFormatError(
            f"{path}: expected numbers of ordinary size, got one of thousands of digits"
        ) from None
    shared: dict[str, Any] = {}
    clients: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    if isinstance(document, dict) and "rounds" in document:
        if document.get("settlement"):
            notes = (Note("file-settled"),)
        document = _of_utility(path, document, utility)
        clients = _listed(path, document)
        shared = {"utility": document.get("utility"), "clients": list(clients)}
        document = document["rounds"]
    rounds = [document] if isinstance(document, dict) else document
    if not isinstance(rounds, list) or not rounds:
        fail(path, "rounds", "expected a round, or a list of at least one round")
    found = [_round_object(path, k, one, shared) for k, one in enumerate(rounds, start=1)]
    kept = [one for one in found if one is not None]
    known = set(clients)
    for one in kept if clients else ():
        for name in (*one.given["clients"], *one.given["silent"]):
            if name not in known:
                fail(path, one.where, f"unknown client {name!r}; the file lists {', '.join(clients)}")
    return kept, clients, notes


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
    found = companions[utility]
    if not isinstance(found, dict) or "rounds" not in found:
        fail(path, f"companions: {utility}", "expected an object with rounds")
    return found


def _listed(path: Path, document: dict[str, Any]) -> tuple[str, ...]:
    names = document.get("clients")
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        fail(path, "clients", f"expected a list of names, got {names!r:.60}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        fail(path, "clients", f"{twice!r} appears more than once")
    return tuple(names)


class _Repeated(ValueError):
    """One object of a JSON file has a key twice."""


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Repeated(f"{key!r} appears twice in one object")
        found[key] = value
    return found


def _round_object(path: Path, place: int, one: Any, shared: Mapping[str, Any]) -> FileRound | None:
    where = f"round {place} of the file"
    if not isinstance(one, dict):
        fail(path, where, f"expected an object, got {type(one).__name__}")
    given = dict(one)
    if "reports" in given:  # as in a run's scores.json
        if given["reports"] is None:  # an aborted round is recorded but has nothing to score
            return None
        if not isinstance(given["reports"], dict):
            fail(path, where, f"reports: expected an object, got {type(given['reports']).__name__}")
        inner = dict(given["reports"])
        inner.setdefault("round", given.get("round"))
        inner.setdefault("clients", given.get("participants"))
        inner.setdefault("silent", given.get("silent"))
        given = inner
    for name, otherwise in (("utility", shared.get("utility")), ("round", place), ("silent", [])):
        if given.get(name) is None:
            given[name] = otherwise
    if given.get("clients") in (None, []):
        keyed = next((given[name] for name in VECTORS if isinstance(given.get(name), dict)), None)
        given["clients"] = list(keyed) if keyed is not None else shared.get("clients") or []
    where = _round_number(path, where, place, given)
    unknown = sorted(set(given) - _FIELDS)
    if unknown:
        fail(path, where, f"unknown field {unknown[0]!r}; expected {', '.join(sorted(_FIELDS))}")
    for name in ("empty", "grand", "alone", "without"):
        if given.get(name) is None:
            fail(path, where, f"{name} is missing")
    _check_kinds(path, where, given)
    for name in (*VECTORS, "sketch"):
        if isinstance(given.get(name), dict):
            given[name] = _by_name(path, where, name, given[name], given["clients"])
    return FileRound(given, where)


def _round_number(path: Path, where: str, place: int, given: dict[str, Any]) -> str:
    """Check the number of a round and return what messages call that round."""
    number = given["round"]
    whole = isinstance(number, int | float) and not isinstance(number, bool) and number == number // 1
    if not whole or number < 0:
        fail(path, where, f"round: expected a whole number, 0 or more, got {number!r:.60}")
    given["round"] = int(number)
    return f"round {place}" if number == place else f"{where}, number {int(number)}"


def _check_kinds(path: Path, where: str, given: dict[str, Any]) -> None:
    """Raise FileFormatError if a field has the wrong type; nothing is converted silently."""
    for name in ("empty", "grand", "solo_empty", "since", "freedom"):
        if given.get(name) is not None:
            _check_number(path, where, name, given[name])
    for name in VECTORS:
        values = given.get(name)
        if values is None:
            continue
        if not isinstance(values, list | dict):
            fail(path, where, f"{name}: expected one number per client, got {values!r:.60}")
        for value in values.values() if isinstance(values, dict) else values:
            if value is not None:
                _check_number(path, where, name, value)
    rows = given.get("sketch")
    if rows is not None and not isinstance(rows, list | dict):
        fail(path, where, f"sketch: expected a list of numbers per client, got {rows!r:.60}")
    for row in (rows.values() if isinstance(rows, dict) else rows) or ():
        if not isinstance(row, list):
            fail(path, where, f"sketch: expected a list of numbers per client, got {row!r:.60}")
        for value in row:
            _check_number(path, where, "sketch", value)
    for name in ("clients", "silent"):
        if not isinstance(given[name], list) or not all(isinstance(one, str) for one in given[name]):
            fail(path, where, f"{name}: expected a list of names, got {given[name]!r:.60}")
    for name in TEXT:
        if not isinstance(given.get(name), str | None):
            fail(path, where, f"{name}: expected text, got {given[name]!r:.60}")


def _check_number(path: Path, where: str, name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        fail(path, where, f"{name}: expected a number, got {value!r:.60}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        fail(path, where, f"{name}: expected a number of ordinary size, got one of {len(str(value))} digits")


def _by_name(
    path: Path, where: str, name: str, values: Mapping[str, Any], clients: Sequence[str]
) -> list[Any]:
    known = set(clients)
    for client in values:
        if client not in known:
            fail(path, where, f"{name} names an unknown client {client!r}; known: {', '.join(clients)}")
    for client in clients:
        if client not in values:
            fail(path, where, f"{name} of client {client!r} is missing")
    return [values[client] for client in clients]


# --------------------------------------------------------------------------------------------- from a file

PERCENT = 10
"""How many times as large numbers must be that count as percent beside others that do not."""


@dataclass(frozen=True)
class Content:
    """The content of a file of reports."""

    rounds: list[Reports]
    clients: tuple[str, ...] = ()  # all clients, if the file lists them
    notes: tuple[Note, ...] = ()  # how the file was read, if it is not in the plain form


def read(
    path: str | Path,
    *,
    utility: str | None = None,
    delimiter: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    distinct: Sequence[str] = (),
) -> list[Reports]:
    """Return the reports of all rounds in a file, in order of the rounds.

    Args:
        path: a ``.csv`` or ``.json`` file.
        utility: name of the utility if the file does not say, or which one to read if it has several. The
            values of a utility known to lie in [0, 1] must do so.
        delimiter: what separates the cells of a CSV file: a comma, semicolon, tab or bar. This and the next
            two are found out from the file; they are needed where it can be read in two ways.
        decimal: the decimal mark in a CSV file, "." or ",".
        encoding: of a CSV file, such as "latin-1".
        distinct: names that look like another one in the file and are members of their own. Names that look
            like one, mistyped, and never share a round are refused otherwise.
    """
    form = SheetForm(delimiter, decimal, encoding, tuple(distinct))
    return read_content(path, utility=utility, form=form).rounds


def runs_below(folder: Path) -> str:
    """Return words for a message: which runs there are in a folder that holds none itself."""
    found = sorted(path.parent.name for path in folder.glob(f"*/{LEDGER}"))
    more = ", ..." if len(found) > 3 else ""
    return f"; there are runs in it: {', '.join(found[:3])}{more}" if found else ""


def scores_in(folder: Path) -> Path:
    """Return the file of reports in a run folder without a ledger."""
    if not (folder / "scores.json").is_file():
        raise FileFormatError(f"{folder} holds no run: no {LEDGER} and no scores.json{runs_below(folder)}")
    return folder / "scores.json"


def read_content(path: str | Path, *, utility: str | None = None, form: SheetForm = FOUND_OUT) -> Content:
    """Return the reports of all rounds in a file, as `read` does, and what else is to be known of the file.

    Args:
        path: a ``.csv`` or ``.json`` file.
        utility: as for `read`.
        form: how a CSV file is written, as far as its owner says so.
    """
    if not isinstance(path, str | Path):
        raise InputError(f"expected the path of a file of reports, got {type(path).__name__}")
    path = Path(path)
    try:
        path.stat()
    except OSError as error:
        gone = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = "no such file or folder" if gone else f"cannot be read: {error.strerror}"
        raise FileFormatError(f"{path!s:.300}: {why}") from error
    except ValueError:  # a zero byte in the name
        raise FileFormatError(f"{str(path)!r:.300}: no such file or folder") from None
    check_form(path, form)
    clients: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    if path.suffix.lower() == ".csv":
        rounds, notes = rounds_of_csv(path, form)
    elif path.suffix.lower() == ".json":
        rounds, clients, notes = rounds_of_json(path, _text(path), utility)
    else:
        hint = "; fedmerit.load reads a run folder" if path.is_dir() else ""
        if path.suffix.lower() in _WORKBOOKS:
            hint = "; save the sheet as CSV"
        raise FileFormatError(f"{path}: expected a name that ends in .csv or .json{hint}")
    if not rounds:
        raise FileFormatError(
            f"{path}: no round has reports to score; of a settled run, give the folder, whose ledger has "
            "the settled scores"
        )
    rounds.sort(key=lambda one: int(one.given["round"]))
    found = [_reports(path, one, utility) for one in rounds]
    for reports in found:
        _check_unit(path, reports)
    _check_order(path, found)
    _check_spellings(path, found, clients, form.distinct)
    return Content(found, clients, notes)


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{path}: expected JSON in UTF-8, got byte 0x{error.object[error.start]:02x} at place "
            f"{error.start}: save it as UTF-8"
        ) from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise FileFormatError(f"{path}: the file is empty")
    return text


def _check_unit(path: Path, reports: Reports) -> None:
    """Raise FileFormatError if some columns of a round are in percent and the others are not.

    Contributions would then add up to half the gain per member, whatever the members did.
    """
    ends = (reports.empty, reports.grand)
    parts = (*reports.alone.tolist(), *reports.without.tolist())
    for small, large, told in (
        (parts, ends, "empty and grand"),
        (ends, parts, "alone and without"),
    ):
        if min(small) >= 0 and max(small) <= 1 < min(large) and min(large) > PERCENT * max(small):
            raise FileFormatError(
                f"{path}: round {reports.round}: {told} are {min(large):g} and more, but the other two "
                f"columns {max(small):g} and less: expected all of them in one unit, such as 0.81 for 81%"
            )


def _check_order(path: Path, rounds: Sequence[Reports]) -> None:
    for earlier, later in pairwise(rounds):
        if earlier.round == later.round:
            raise FileFormatError(f"{path}: round {later.round} appears twice")
        if earlier.utility != later.utility:
            said = f"utility {later.utility!r}, but {earlier.utility!r} in round {earlier.round}"
            raise FileFormatError(f"{path}: round {later.round}: {said}; they cannot be added")


def _check_spellings(
    path: Path, rounds: Sequence[Reports], clients: Sequence[str], distinct: Sequence[str]
) -> None:
    """Raise NamesAlike if a name is spelled in two ways, which would split one member into two.

    Names that only may be one are two members if they share a round, if the file lists both, or if one of
    them is ``distinct``.
    """
    where: dict[str, list[str]] = {name: [] for name in clients}
    for reports in rounds:
        for name in (*reports.clients, *reports.silent):
            where.setdefault(name, []).append(str(reports.round))
    if unknown := [name for name in distinct if name not in where]:
        raise FileFormatError(f"{path}: distinct: expected names in the file, got {unknown[0]!r}")
    found, slip = two_spellings(where), False
    if found is None:
        apart = (
            (one, other)
            for one, other in slips(where)
            if not {one, other} & {*distinct}
            and not {one, other} <= {*clients}
            and not {*where[one]} & {*where[other]}
        )
        found, slip = next(apart, None), True
    if found is None:
        return
    at = [f"round {', '.join(where[name])}" if where[name] else "listed, in no round" for name in found]
    one, other = (f"{name} ({place})" for name, place in zip(spelled(*found), at, strict=True))
    if slip:
        raise NamesAlike(
            f"{path}: {one} and {other} look like one name, and never share a round: expected one spelling "
            f"per member; if they are two members, say so: --distinct {shlex.quote(found[1])} "
            f"(in Python, distinct=[{found[1]!r}])",
            found,
        )
    raise NamesAlike(
        f"{path}: {one} and {other} differ only in case, blanks or letters that look the same: expected one "
        "spelling per member",
        found,
    )


def _reports(path: Path, found: FileRound, utility: str | None) -> Reports:
    given = found.given
    if given.get("utility") is None:
        given["utility"] = utility
    elif utility is not None and given["utility"] != utility:
        fail(path, found.where, f"the file says utility {given['utility']!r}, asked for {utility!r}")
    try:
        return Reports(**given)
    except InputError as error:
        where = found.where_of(error.client) if isinstance(error, ValueRefused) else found.where
        problem = str(error)
        if isinstance(error, ReportError) and not found.lines:  # ``where`` already names the round
            problem = error.problem
        raise FileFormatError(f"{path}: {where}: {problem}") from error


# ----------------------------------------------------------------------------------------- into a document


class RoundEntry(dict[str, Any]):
    """A round of a document that is written again and again while rounds are added: its text is made once.

    Nothing in it changes once it has been written.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self._texts: dict[Any, str] = {}

    def text(self, form: Any, made: Callable[[], str]) -> str:
        """Return its text in this form."""
        if form not in self._texts:
            self._texts[form] = made()
        return self._texts[form]


def document(
    rounds: Sequence[Reports], *, clients: Sequence[str] | None = None, missing: Missing = "zero"
) -> dict[str, Any]:
    """Return everything that follows from the reports of one utility, ready for JSON.

    Args:
        rounds: reports in order; at least one.
        clients: the whole roster; by default, everybody who was in a round. Clients that never reported get
            null in ``cumulative``.
        missing: see :func:`fedmerit.scoring.accumulate`.
    """
    seen = dict.fromkeys(name for reports in rounds for name in (*reports.clients, *reports.silent))
    names = list(clients or seen)
    return {
        "clients": names,
        "utility": rounds[0].utility if rounds else None,
        "rounds": [round_object(reports) for reports in rounds],
        **sums_object(rounds, names, missing=missing),
    }


def sums_object(
    rounds: Sequence[Reports], names: Sequence[str], *, missing: Missing = "zero"
) -> dict[str, Any]:
    """Return what a document says of all rounds together; lists are in the order of ``names``."""
    totals = totals_of(rounds, missing=missing)
    return {
        "cumulative": {name: _spread(scores.values, scores, names) for name, scores in totals.items()},
        "stderr": {
            name: _spread(scores.stderr, scores, names)
            for name, scores in totals.items()
            if scores.stderr is not None
        },
        "coverage": _spread(totals["ALPHA"].coverage, totals["ALPHA"], names) if totals else [],
    }


def totals_of(rounds: Sequence[Reports], *, missing: Missing = "zero") -> dict[str, Scores]:
    """Return the sums over these rounds of every score that can be summed, by name."""
    if not rounds:
        return {}
    totals = {}
    for name in SUMMABLE:
        try:
            totals[name] = accumulate(rounds, score=name, missing=missing)
        except UndefinedScore:  # no cosines or solo utilities were given
            continue
    return totals


def round_object(reports: Reports) -> dict[str, Any]:
    """Return one round for JSON: its clients, their reports, every score that exists, and status."""
    scores = scores_of(reports)
    given = {name: _numbers(getattr(reports, name)) for name in PER_CLIENT}
    told = {name: getattr(reports, name) for name in ("solo_empty", "slice", "since", "freedom")}
    told["sketch"] = None if reports.sketch is None else reports.sketch.tolist()
    return {
        "round": reports.round,
        "participants": list(reports.clients),
        **({"silent": list(reports.silent)} if reports.silent else {}),
        "reports": {
            "empty": reports.empty,
            "grand": reports.grand,
            "alone": _numbers(reports.alone),
            "without": _numbers(reports.without),
            **{name: value for name, value in {**given, **told}.items() if value is not None},
        },
        "scores": {name: None if one is None else _numbers(one.values) for name, one in scores.items()},
        "status": {name: one.status for name, one in scores.items() if one and name in ("FP", "EE")},
    }


def scores_of(reports: Reports) -> dict[str, Scores | None]:
    """Return every score of one round; a silent client makes some undefined, which are None.

    SOLO and COS are left out if their inputs were not reported.
    """
    found: dict[str, Scores | None] = {}
    for name, entry in SCORES.items():
        if (
            not entry.reported
            or (name == "SOLO" and reports.solo is None)
            or (name == "COS" and reports.cosine is None)
        ):
            continue
        try:
            found[name] = score_of(reports, name)
        except UndefinedScore:
            found[name] = None
    return found


def add_phi(
    content: dict[str, Any], total: Scores | None, rounds: Mapping[int, tuple[Scores, Mapping[str, Any]]]
) -> None:
    """Add PHI to a document: its sum, and per round its values and what is known beside them."""
    if total is not None:
        content["cumulative"]["PHI"] = _spread(total.values, total, content["clients"])
        if total.stderr is not None:
            content.setdefault("stderr", {})["PHI"] = _spread(total.stderr, total, content["clients"])
    for one in content["rounds"]:
        if one["round"] in rounds:
            scores, beside = rounds[one["round"]]
            told = {"phi": _numbers(scores.values), "stderr": _numbers(scores.stderr), **beside}
            one["phi"] = {"participants": list(scores.clients), **told}
            if one["scores"] is not None:
                one["scores"]["PHI"] = _spread(scores.values, scores, one["participants"])


def as_json(content: Mapping[str, Any]) -> str:
    """Return the canonical text of a document: that of ``json.dumps(content, indent=1)``, in less time."""
    return _indented(content, "\n") + "\n"


def _indented(value: Any, line: str) -> str:
    """Return a value as JSON with one space per level; ``line`` is a line break and the indentation so far.

    With an indentation, Python's own encoder is not the fast one, but that one takes any separator.
    """
    inner = line + " "
    plain = partial(json.dumps, allow_nan=False, ensure_ascii=False, separators=("," + inner, ": "))
    if not isinstance(value, dict | list | tuple) or not value:
        return plain(value)
    if isinstance(value, RoundEntry):
        return value.text(line, lambda: _indented({**value}, line))
    parts = value.values() if isinstance(value, dict) else value
    if not any(isinstance(part, dict | list | tuple) for part in parts):
        body = plain(value)[1:-1]
    elif isinstance(value, dict):
        body = ("," + inner).join(f"{plain(key)}: {_indented(part, inner)}" for key, part in value.items())
    else:
        body = ("," + inner).join(_indented(part, inner) for part in value)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return start + inner + body + line + end


def as_csv(content: Mapping[str, Any]) -> str:
    """Return a document as tidy CSV, one line per round and client; ``fedmerit score`` can read it."""
    rounds = content["rounds"]
    per_client = tuple(name for name in PER_CLIENT if any(name in one["reports"] for one in rounds))
    told = ("solo_empty", "slice", "since", "freedom")
    sketch = ("sketch",) if any("sketch" in one["reports"] for one in rounds) else ()
    per_round = tuple(name for name in told if any(name in one["reports"] for one in rounds))
    scores = tuple(name for name in SCORES if any(name in one["scores"] for one in rounds))
    silent = ("silent",) if any(one.get("silent") for one in rounds) else ()
    columns = (silent, per_round, per_client, sketch, scores)
    head = ["round", "client", *silent, "utility", "empty", "grand", *per_round]
    text = sheet_text([[*head, "alone", "without", *per_client, *sketch, *scores]])
    for one in rounds:
        made = partial(_csv_round, one, content["utility"], *columns)
        text += one.text(columns, made) if isinstance(one, RoundEntry) else made()
    return text


def _csv_round(
    one: Mapping[str, Any],
    utility: str | None,
    silent: Sequence[str],
    per_round: Sequence[str],
    per_client: Sequence[str],
    sketch: Sequence[str],
    scores: Sequence[str],
) -> str:
    """Return the lines of a round with these columns."""
    reports = one["reports"]
    shared = [utility, reports["empty"], reports["grand"]]
    shared += [reports.get(name) for name in per_round]
    nothing = [None] * (2 + len(per_client) + len(sketch) + len(scores))
    lines = [[one["round"], client, "yes", *shared, *nothing] for client in one.get("silent", ())]
    for k, client in enumerate(one["participants"]):
        lines.append(
            [one["round"], client, *[None for _ in silent], *shared]
            + [(reports[name][k] if name in reports else None) for name in ("alone", "without", *per_client)]
            + [" ".join(map(str, reports["sketch"][k])) if name in reports else None for name in sketch]
            + [(one["scores"][name][k] if one["scores"].get(name) else None) for name in scores]
        )
    return sheet_text(lines)


def settled_csv(content: Mapping[str, Any]) -> str:
    """Return the settled scores of a run without reports as tidy CSV, one line per round and client.

    ``stated`` is the integer that the client stated, ``PHI`` its score in units of the utility, which is the
    one that counts. Both are empty until the run is settled, and where a client has not stated. If clients
    state one number for the run, the lines of the settlement have no round, and come after all rounds.
    """
    block = content.get("settlement", {"rounds": []})
    settled = {
        (line["round"], name): (stated, phi)
        for line in block["rounds"]
        for name, stated, phi in zip(line["participants"], line["stated"], line["phi"], strict=True)
    }
    rows = dict.fromkeys((one["round"], name) for one in content["rounds"] for name in one["participants"])
    found = (*rows, *(key for key in settled if key not in rows))
    return sheet_text(
        [
            ["round", "client", "utility", "stated", "PHI"],
            *([*key, content["utility"], *settled.get(key, (None, None))] for key in found),
        ]
    )


def _numbers(values: Vector | None) -> list[float | None] | None:
    if values is None:
        return None
    return [None if math.isnan(value) else value for value in values.tolist()]


def _spread(values: Vector | None, scores: Scores, names: Sequence[str]) -> list[float | None]:
    """Return the values in the order of ``names``, with None for clients that have no score."""
    known = {} if values is None else dict(zip(scores.clients, values.tolist(), strict=True))
    return [known.get(name) for name in names]
