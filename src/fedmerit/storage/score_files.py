"""The score files of a run folder: written from its ledger, and compared with it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedmerit.config import Config
from fedmerit.errors import CopyDiffers, FedmeritError, LedgerError
from fedmerit.ledger.account import Account, block_of
from fedmerit.ledger.records import compare, score_files, scores_document
from fedmerit.notes import Note
from fedmerit.protocol.outcome import Round
from fedmerit.scoring.validate import written_number
from fedmerit.storage.run_folder import write

SCORE_FILES = ("scores.json", "scores.csv")

ScoreFiles = Mapping[str, bytes | None]
"""Name of a score file -> its content; None if there is no such file."""


def read_scores(path: Path) -> ScoreFiles:
    """Return the current content of a folder's score files."""
    found: dict[str, bytes | None] = {}
    for name in SCORE_FILES:
        try:
            found[name] = (path / name).read_bytes()
        except FileNotFoundError:
            found[name] = None
        except OSError as error:
            raise LedgerError(f"{path / name}: cannot be read: {error}") from error
    return found


def check_scores(
    path: Path,
    found: ScoreFiles,
    rounds: Sequence[Round],
    config: Config,
    accounts: Sequence[Account] = (),
) -> dict[str, int]:
    """Check that ``scores.json`` and ``scores.csv`` follow from all of the ledger's rounds, or the first few.

    If a process is killed after the ledger's transaction and before it writes these files, they stay one
    round behind, or lack the settlement. They are then correct, but the ledger has more.

    Args:
        path: path of the folder.
        found: the files as `read_scores` read them.
        rounds: rounds of the ledger.
        config: config of the run.
        accounts: of the settlement, each time that it was recorded.

    Returns:
        The files that are older than the ledger, and by how many rounds (0: by the settlement alone); empty
        if none is.

    Raises:
        CopyDiffers: a file says something else, or cannot be read.
    """
    made: dict[tuple[int, int], dict[str, bytes]] = {}
    known: tuple[Account | None, ...] = (None, *accounts)

    def expected(count: int, settled: int = 0) -> dict[str, bytes]:
        """Return the files after so many rounds and records of the settlement, computed once."""
        if (count, settled) not in made:
            made[count, settled] = _expected(rounds[:count], config, account=known[settled])
        return made[count, settled]

    late = {}
    text = found["scores.json"]
    held = 0
    if text is not None:
        with _copy(path, "scores.json", config):
            there = _json(path / "scores.json", text)
        listed = there.get("rounds")
        held = min(len(listed), len(rounds)) if isinstance(listed, list) else len(rounds)
        states = range(len(known) if held == len(rounds) else 1)
        right = (json.loads(expected(held, settled)["scores.json"]) for settled in reversed(states))
        with _copy(path, "scores.json", config):
            if _first_alike(there, right, "scores.json"):
                late["scores.json"] = 0
    if held < len(rounds):
        late["scores.json"] = len(rounds) - held
    text = found["scores.csv"]
    held = 0
    if text is not None:
        with _copy(path, "scores.csv", config):
            table = _table(path / "scores.csv", text)
        held = len(rounds) if accounts else _last_round(table, len(rounds))
        states = range(len(known) if held == len(rounds) else 1)
        options = [_rows(expected(held, settled)["scores.csv"].decode()) for settled in reversed(states)]
        if table.get("1") != options[0]["1"]:  # columns of more rounds than it has: it was cut
            options = [_rows(expected(len(rounds))["scores.csv"].decode())]
        with _copy(path, "scores.csv", config):
            if _first_alike(table, options, "scores.csv line") and options[-1] != options[0]:
                late["scores.csv"] = 0
    lines = any(one.reports if config.reports else one.included for one in rounds[held:])
    if lines or (text is None and rounds):  # others have no line
        late["scores.csv"] = len(rounds) - held
    return late


def _first_alike(there: Any, options: Iterable[Any], where: str) -> int:
    """Return the place of the first option that equals what is there; raise as the first one differs."""
    wrong: LedgerError | None = None
    for place, option in enumerate(options):
        try:
            compare(there, option, where)
        except LedgerError as error:
            wrong = wrong or error
        else:
            return place
    assert wrong is not None
    raise wrong


@contextmanager
def _copy(path: Path, name: str, config: Config) -> Iterator[None]:
    """Turn an error in a score file, which is only a copy, into CopyDiffers, which says how to mend it."""
    try:
        yield
    except LedgerError as error:
        how = "`fedmerit run --resume`" if config.scoring.truth else f"`fedmerit page {path}`"
        raise CopyDiffers(
            f"{error}. The ledger is the record, and {name} is a copy that was changed: delete it, and {how} "
            "writes it again",
            name,
        ) from error


FOLLOW_FROM = {"reports": "scores", "settled": "scores-settled", "both": "scores-both"}
"""By `scoring.method`, the note that says what scores follow from."""


def about_scores(
    path: Path, found: ScoreFiles, late: Mapping[str, int], config: Config, *, running: bool = False
) -> Iterator[Note]:
    """Yield what `check_scores` found; ``running`` says that a process keeps writing in the folder."""
    there = [name for name, data in found.items() if data is not None]
    if there:
        yield Note(FOLLOW_FROM[config.scoring.method])
    else:
        yield Note("scores-unwritten" if late else "scores-none")
    if not late:
        return
    files = [
        Note("file-gone", file=name)
        if name not in there
        else Note("file-older", file=name, rounds=count)
        if count
        else Note("file-unsettled", file=name)
        for name, count in late.items()
    ]
    how = Note("files-by-command", path=str(path))
    if running:
        how = Note("files-by-process")
    elif config.scoring.truth:
        how = Note("files-by-resume")
    yield Note("files", files=files, how=how)


def write_scores(path: Path, rounds: Sequence[Round], config: Config, account: Account | None = None) -> None:
    """Write the score files from the ledger alone; not for runs whose scores hold ground truth."""
    for name, data in _expected(rounds, config, analysis=config.analysis, account=account).items():
        write(path / name, data)


def _expected(
    rounds: Sequence[Round], config: Config, *, analysis: bool = False, account: Account | None = None
) -> dict[str, bytes]:
    scoring, missing = config.scoring, config.payment.missing
    try:
        content = scores_document(
            rounds, config.clients, scoring.utilities, missing=missing, analysis=analysis,
            settlement=None if account is None else block_of([account], config.clients, missing),
            settled=not config.reports,
        )  # fmt: skip
    except (FedmeritError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise LedgerError(f"the reports in the ledger give no scores: {error!s:.200}") from error
    return dict(score_files(content))


def _json(path: Path, text: bytes) -> dict[str, Any]:
    """Return the part of the file that follows from reports."""
    try:
        found = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise LedgerError(f"{path}: expected an object, got {type(found).__name__}")
    others = found.get("companions")
    for one in (found, *(others.values() if isinstance(others, dict) else ())):
        for extra in ("truth", "analysis"):  # computed from plain updates, not from reports
            if isinstance(one, dict):
                one.pop(extra, None)
    return found


def _table(path: Path, text: bytes) -> dict[str, dict[str, Any]]:
    try:
        return _rows(text.decode("utf-8"))
    except (ValueError, csv.Error) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error


def _last_round(table: Mapping[str, Mapping[str, Any]], rounds: int) -> int:
    """Return the round of the last line, or ``rounds`` if it names no round of the ledger."""
    if len(table) < 2:
        return 0
    last = table[str(len(table))].get("round")
    return int(last) if isinstance(last, float) and last in range(1, rounds + 1) else rounds


def _rows(text: str) -> dict[str, dict[str, Any]]:
    """Return the cells of a CSV file by line number and column, with numbers parsed."""
    lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    head = dict(enumerate(lines[0])) if lines else {}
    return {
        str(number): {
            (name := head.get(k, f"column {k + 1}")): _cell(name, cell) for k, cell in enumerate(line)
        }
        for number, line in enumerate(lines, start=1)
    }


def _cell(name: str, text: str) -> Any:
    if name == "stated":  # integers that a float does not hold
        return text
    try:
        return written_number(text)
    except ValueError:
        return text
