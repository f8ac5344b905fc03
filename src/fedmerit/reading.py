"""Reports from files: JSON, or a tidy CSV with one line per round and client.

CSV columns: round, client, empty, grand, alone, without; optional: se_loo, se_ioi, se_alpha, se_alpha_total,
samples, cosine, solo, solo_empty, slice, utility, silent. ``empty``, ``grand``, ``solo_empty``, ``slice`` and
``utility`` are the same on all lines of a round. An empty cell of an optional column means: not given. A
line with ``silent`` = yes names a client that was summed but sent no report.
Columns named after scores (LOO, FP, ...) are what fedmerit itself writes beside them; they are computed anew.

JSON: one round, a list of rounds, or an object with ``rounds`` (such as a run's ``scores.json``). A round is
an object with the fields of :class:`~fedmerit.Reports`; a vector is a list, or an object by client name. A
round without a number takes its place in the list. Where an object with ``rounds`` has ``clients``, they are
all there are; where it has ``companions`` (documents by utility), the one of the utility asked for is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fedmerit.checks import spelled, two_spellings
from fedmerit.errors import FileFormatError, InputError, ValueRefused
from fedmerit.layout import LEDGER, Found, fail
from fedmerit.reading_csv import rounds_of_csv
from fedmerit.reading_json import rounds_of_json
from fedmerit.types import Reports


@dataclass(frozen=True)
class Content:
    """What a file of reports says."""

    rounds: list[Reports]
    clients: tuple[str, ...] = ()  # all there are, where the file lists them


def read(path: str | Path, *, utility: str | None = None) -> list[Reports]:
    """Reports of all rounds in a file, in order of the rounds.

    Args:
        path: a ``.csv`` or ``.json`` file.
        utility: name of the utility where the file does not say, or which one where it has several; a known
            name is held to its range.
    """
    return read_content(path, utility=utility).rounds


def scores_in(folder: Path) -> Path:
    """Return the file of reports in a run folder without a ledger."""
    if not (folder / "scores.json").is_file():
        raise FileFormatError(f"{folder}: not a run folder: no scores.json and no {LEDGER}")
    return folder / "scores.json"


def read_content(path: str | Path, *, utility: str | None = None) -> Content:
    """Reports of all rounds in a file, as `read`, and the clients that the file lists."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: cannot be read as text: {error}") from error
    if not text.strip():
        raise FileFormatError(f"{path}: the file is empty")
    clients: tuple[str, ...] = ()
    if path.suffix.lower() == ".csv":
        rounds = rounds_of_csv(path, text)
    elif path.suffix.lower() == ".json":
        rounds, clients = rounds_of_json(path, text, utility)
    else:
        raise FileFormatError(f"{path}: expected a name that ends in .csv or .json")
    if not rounds:
        raise FileFormatError(f"{path}: no round has reports to score")
    rounds.sort(key=lambda one: int(one.given["round"]))
    found = [_reports(path, one, utility) for one in rounds]
    _check_order(path, found)
    _check_spellings(path, found, clients)
    return Content(found, clients)


def _check_order(path: Path, rounds: Sequence[Reports]) -> None:
    for earlier, later in pairwise(rounds):
        if earlier.round == later.round:
            raise FileFormatError(f"{path}: round {later.round} appears twice")
        if earlier.utility != later.utility:
            said = f"utility {later.utility!r}, but {earlier.utility!r} in round {earlier.round}"
            raise FileFormatError(f"{path}: round {later.round}: {said}; they cannot be added")


def _check_spellings(path: Path, rounds: Sequence[Reports], clients: Sequence[str]) -> None:
    """Two spellings of one name would be two members, each with a part of the rounds."""
    where: dict[str, list[str]] = {name: [] for name in clients}
    for reports in rounds:
        for name in (*reports.clients, *reports.silent):
            where.setdefault(name, []).append(str(reports.round))
    found = two_spellings(where)
    if found is None:
        return
    at = [f"round {', '.join(where[name])}" if where[name] else "listed, in no round" for name in found]
    one, other = (f"{name} ({place})" for name, place in zip(spelled(*found), at, strict=True))
    raise FileFormatError(
        f"{path}: {one} and {other} differ only in case, blanks or how letters are composed: expected one "
        "spelling of one member"
    )


def _reports(path: Path, found: Found, utility: str | None) -> Reports:
    given = found.given
    if given.get("utility") is None:
        given["utility"] = utility
    elif utility is not None and given["utility"] != utility:
        fail(path, found.where, f"the file says utility {given['utility']!r}, asked for {utility!r}")
    try:
        return Reports(**given)
    except InputError as error:
        where = found.where_of(error.client) if isinstance(error, ValueRefused) else found.where
        problem = str(error) if found.lines else str(error).removeprefix(f"round {given['round']}: ")
        raise FileFormatError(f"{path}: {where}: {problem}") from error
