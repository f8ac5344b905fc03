"""A run folder in which no round began can be used again."""

from __future__ import annotations

from pathlib import Path

from fedmerit.errors import StoreError
from fedmerit.ledger import Ledger
from fedmerit.store import held

LEDGER = "ledger.sqlite"
_FILES = (LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", "config.toml", "notes.txt", "scores.csv", "scores.json")
_KEYS = ("pool.key", "server.pem")
_KINDS = {"run", "pool", "join"}
"""Records of a start that came to no round."""


def make_free(path: Path) -> None:
    """Remove what a start left in which too few joined; refuse a folder that holds anything else.

    Before the first schedule nobody was asked for anything, so nothing is lost. A folder with a schedule is
    never touched.
    """
    if not path.exists() or not any(path.iterdir()):
        return
    left = [path / name for name in (*_FILES, *(f"keys/{key}" for key in _KEYS), "keys", "checkpoints")]
    if not {*path.iterdir(), *path.glob("*/*")} <= {*left, path / ".lock"}:
        raise _used(path)
    try:
        with held(path):
            if not _came_to_nothing(path / LEDGER):
                raise _used(path)
            for item in left:
                if item.is_dir():
                    item.rmdir()
                else:
                    item.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be used again as a run folder: {error}") from error


def _came_to_nothing(path: Path) -> bool:
    if not path.exists():
        return True
    with Ledger(path, read_only=True) as ledger:
        records = list(ledger.records())
    engines = {record.body.get("engine") for record in records if record.kind == "run"}
    return {record.kind for record in records} <= _KINDS and engines <= {"flower"}


def _used(path: Path) -> StoreError:
    return StoreError(f"{path}: not empty; a Flower run cannot be resumed, give a new folder")
