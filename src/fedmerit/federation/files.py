"""The files of a run folder against its ledger: the config, and the scores that follow from the reports."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedmerit.checks import written_number
from fedmerit.config import Config, difference, of_folder
from fedmerit.errors import ConfigError, CopyDiffers, FedmeritError, LedgerError
from fedmerit.federation.comparing import compare
from fedmerit.federation.journal import Round, score_files, scores_document
from fedmerit.store import checkpoint_in, write

SCORE_FILES = ("scores.json", "scores.csv")


def check_config(path: Path, config: Config) -> None:
    """``config.toml`` must be the config in the ledger."""
    try:
        there = of_folder(path)
    except ConfigError as error:
        raise LedgerError(f"config.toml is damaged: {error}") from error
    if found := difference(there, config):
        raise LedgerError(f"{path / 'config.toml'}: not the config in the ledger: {found}")


def check_checkpoints(path: Path, rounds: Sequence[Round]) -> None:
    """Raise LedgerError where a checkpoint that is still there is not the one that its round recorded."""
    for one in rounds:
        for name, field in (("model", "checkpoint"), ("members", "members_checkpoint")):
            file = checkpoint_in(path, name, one.number)
            if field not in one.body or not file.exists():  # only the last ones are kept
                continue
            try:
                found = hashlib.sha256(file.read_bytes()).hexdigest()
            except OSError as error:
                raise LedgerError(f"{file}: cannot be read: {error}") from error
            if found != one.body[field]:
                raise LedgerError(f"{file}: not the checkpoint that round {one.number} recorded")


Found = Mapping[str, bytes | None]
"""Name of a score file -> what it holds; None where there is none."""


def read_scores(path: Path) -> Found:
    """The score files of a folder as they are now."""
    found: dict[str, bytes | None] = {}
    for name in SCORE_FILES:
        try:
            found[name] = (path / name).read_bytes()
        except FileNotFoundError:
            found[name] = None
        except OSError as error:
            raise LedgerError(f"{path / name}: cannot be read: {error}") from error
    return found


def check_scores(path: Path, found: Found, rounds: Sequence[Round], config: Config) -> dict[str, int]:
    """``scores.json`` and ``scores.csv`` must follow from the rounds in the ledger, or from the first ones.

    A process that is killed after the ledger's transaction and before it wrote these files leaves them as
    they were a round earlier. Then all they say is true, and the ledger says more.

    Args:
        path: of the folder.
        found: what `read_scores` read there.
        rounds: of the ledger.
        config: of the run.

    Returns:
        Which file is older than the ledger, and by how many rounds; empty where none is.

    Raises:
        CopyDiffers: a file says something else, or cannot be read.
    """
    made: dict[int, dict[str, bytes]] = {}

    def expected(count: int) -> dict[str, bytes]:
        """The files after so many rounds, computed once."""
        if count not in made:
            made[count] = _expected(rounds[:count], config)
        return made[count]

    late = {}
    text = found["scores.json"]
    held = 0
    if text is not None:
        with _copy(path, "scores.json", config):
            there = _json(path / "scores.json", text)
        listed = there.get("rounds")
        held = min(len(listed), len(rounds)) if isinstance(listed, list) else len(rounds)
        right = json.loads(expected(held)["scores.json"])
        with _copy(path, "scores.json", config):
            compare(there, right, "scores.json")
    if held < len(rounds):
        late["scores.json"] = len(rounds) - held
    text = found["scores.csv"]
    held = 0
    if text is not None:
        with _copy(path, "scores.csv", config):
            table = _table(path / "scores.csv", text)
        held = _last_round(table, len(rounds))
        right = _rows(expected(held)["scores.csv"].decode())
        if table.get("1") != right["1"]:  # its columns are not those of so few rounds: it was cut
            right = _rows(expected(len(rounds))["scores.csv"].decode())
        with _copy(path, "scores.csv", config):
            compare(table, right, "scores.csv line")
    if any(one.reports for one in rounds[held:]) or (text is None and rounds):  # others have no line in it
        late["scores.csv"] = len(rounds) - held
    return late


@contextmanager
def _copy(path: Path, name: str, config: Config) -> Iterator[None]:
    """What is wrong with a score file is wrong with a copy, not with the ledger: says how to mend it."""
    try:
        yield
    except LedgerError as error:
        how = "`fedmerit run --resume`" if config.scoring.truth else f"`fedmerit page {path}`"
        raise CopyDiffers(
            f"{error}. The ledger is the record, and {name} a copy that was changed: delete it, and {how} "
            "writes it anew",
            name,
        ) from error


def about_scores(
    path: Path, found: Found, late: Mapping[str, int], config: Config, *, running: bool = False
) -> Iterator[str]:
    """What `check_scores` found, in words; ``running``: a process keeps writing in the folder."""
    there = [name for name, data in found.items() if data is not None]
    if there:
        yield "scores: follow from the reports in the ledger"
    else:
        yield "scores: not written yet" if late else "scores: none yet"
    if not late:
        return
    older = {
        name: f"is {count} round{'' if count == 1 else 's'} older than the ledger"
        for name, count in late.items()
    }
    said = ", ".join(f"{name} {told if name in there else 'is not there'}" for name, told in older.items())
    how = f"`fedmerit page {path}` or `fedmerit rewards` writes what is missing, from the ledger"
    if running:
        how = "a process is running in this folder, and writes them after the ledger"
    elif config.scoring.truth:
        how = "`fedmerit run --resume` writes what is missing, with the ground truth"
    yield f"files: {said}: {how}"


def write_scores(path: Path, rounds: Sequence[Round], config: Config) -> None:
    """The score files anew, from the ledger alone; not for a run whose scores hold ground truth."""
    for name, data in _expected(rounds, config, analysis=config.analysis).items():
        write(path / name, data)


def _expected(rounds: Sequence[Round], config: Config, *, analysis: bool = False) -> dict[str, bytes]:
    scoring = config.scoring
    try:
        content = scores_document(
            rounds, config.clients, scoring.utilities, missing=scoring.missing, analysis=analysis
        )
    except (FedmeritError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise LedgerError(f"the reports in the ledger give no scores: {error!s:.200}") from error
    return dict(score_files(content))


def _json(path: Path, text: bytes) -> dict[str, Any]:
    """What the file says that follows from reports."""
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
    """The round of the last line; all of them where it names none that the ledger has."""
    if len(table) < 2:
        return 0
    last = table[str(len(table))].get("round")
    return int(last) if isinstance(last, float) and last in range(1, rounds + 1) else rounds


def _rows(text: str) -> dict[str, dict[str, Any]]:
    """Lines of a CSV file by number, cells by column; numbers as such."""
    lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    head = dict(enumerate(lines[0])) if lines else {}
    return {
        str(number): {head.get(k, f"column {k + 1}"): _cell(cell) for k, cell in enumerate(line)}
        for number, line in enumerate(lines, start=1)
    }


def _cell(text: str) -> Any:
    try:
        return written_number(text)
    except ValueError:
        return text
