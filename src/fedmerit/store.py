"""The run folder: config, ledger, scores and checkpoints, written so that a crash leaves nothing half done.

::

    DIR/config.toml       all settings, defaults included
    DIR/ledger.sqlite     every step, hash-chained; a round is one transaction
    DIR/scores.json       what follows from the reports; scores.csv has the same, tidy
    DIR/statements/       what each member is told about a payout decision (fedmerit rewards)
    DIR/checkpoints/      model-0003: the global model after round 3; members-0003: the members' private state
    DIR/keys/             in a rehearsal, everybody's private keys (mode 600)
    DIR/notes.txt         between machines: who was away, refused or declined, as the server noted it
    DIR/tables/           utilities of all coalitions, where ground truth was asked for

A round counts once its transaction is in the ledger. Its checkpoint is written before, the score files after
it; both follow from what the ledger holds, so whatever a kill interrupts is redone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config, difference, of_folder
from fedmerit.errors import ConfigError, MissingExtra, StoreError
from fedmerit.layout import LEDGER
from fedmerit.ledger import Ledger

Arrays = Mapping[str, npt.NDArray[Any]]
_EARLY = {".lock", "config.toml", "checkpoints", "keys"} | {
    f"ledger.sqlite{end}" for end in ("", "-wal", "-shm")
}
"""What a run that failed before its first record leaves behind: such a folder can be used again."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")


class Folder:
    """A run folder, held by one process at a time."""

    def __init__(
        self, path: str | Path, config: Config, *, resume: bool = False, text: str | None = None
    ) -> None:
        """``text`` is written as config.toml where not all settings apply; it must mean the same."""
        self.path = Path(path)
        self._text = config.to_toml() if text is None else text
        check_usable(self.path, resume=resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = held(self.path)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be used as a run folder: {error}") from error
        try:
            self._open(config, resume=resume)
        except OSError as error:
            self._lock.close()
            raise StoreError(f"{self.path}: cannot be used as a run folder: {error}") from error
        except BaseException:
            self._lock.close()
            raise

    def _open(self, config: Config, *, resume: bool) -> None:
        recorded = (self.path / LEDGER).exists() and _has_records(self.path / LEDGER)
        trained = any((self.path / "checkpoints").glob("*.safetensors"))
        if resume:
            self._check_config(config)
            if trained and not recorded:
                raise StoreError(f"{self.path}: damaged run folder: checkpoints, but no record of a run")
        else:
            if trained or recorded:
                raise _not_empty(self.path)
            write(self.path / "config.toml", self._text.encode())
        (self.path / "checkpoints").mkdir(exist_ok=True)
        for folder in (self.path, self.path / "checkpoints", self.path / "keys"):
            sweep(folder)
        self.ledger = Ledger(self.path / LEDGER)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.ledger.close()
        self._lock.close()

    def _check_config(self, config: Config) -> None:
        try:
            there = of_folder(self.path)
        except ConfigError as error:
            raise StoreError(f"{self.path}: damaged run folder: {error}") from error
        older = ""
        if config.resolved and not there.resolved:
            there = replace(there, partition=replace(there.partition, names=there.clients))
            older = "; the version that started it did not take members and names from the data"
        if found := difference(there, config):
            raise StoreError(f"{self.path}: holds a run of another config: {found}{older}")

    def checkpoint(self, name: str, number: int) -> Path:
        """Where a checkpoint of a round lies."""
        return checkpoint_in(self.path, name, number)

    def save_checkpoint(self, name: str, number: int, arrays: Arrays) -> str:
        """Write one atomically, readable by its owner alone; returns its SHA-256."""
        save = _safetensors().save
        data: bytes = save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        write(self.checkpoint(name, number), data, mode=0o600)
        return hashlib.sha256(data).hexdigest()

    def load_checkpoint(self, name: str, number: int, digest: str) -> dict[str, npt.NDArray[Any]]:
        """Read one that must have this SHA-256."""
        return read_checkpoint(self.checkpoint(name, number), number, digest)

    def drop_checkpoints(self, *, keep: int) -> None:
        """Delete those of rounds before ``keep``."""
        for path in (self.path / "checkpoints").glob("*.safetensors"):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal() and int(number) < keep:
                path.unlink(missing_ok=True)


def check_usable(path: Path, *, resume: bool) -> None:
    """Raise StoreError if a run cannot begin in a folder, or with ``resume`` go on; writes nothing."""
    if resume and not (path / "config.toml").exists():
        raise StoreError(f"{path}: nothing to resume, there is no config.toml")
    try:
        if not resume and path.exists() and not all(_is_early(item.name) for item in path.iterdir()):
            raise _not_empty(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be used as a run folder: {error}") from error


def write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file in one step: all of it is there, or what was there before."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StoreError(f"{path}: could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def checkpoint_in(folder: Path, name: str, number: int) -> Path:
    """Where a checkpoint of a round lies in a run folder."""
    return folder / "checkpoints" / f"{name}-{number:04d}.safetensors"


def read_checkpoint(path: Path, number: int, digest: str) -> dict[str, npt.NDArray[Any]]:
    """The arrays in a checkpoint that must have this SHA-256."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: the checkpoint of round {number} is gone: {error}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise StoreError(f"{path}: damaged: expected SHA-256 {digest[:16]}..., found {found[:16]}...")
    arrays: dict[str, npt.NDArray[Any]] = _safetensors().load(data)
    return arrays


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise MissingExtra("running a federation needs: pip install 'fedmerit[engine]'") from error
    return safetensors.numpy


def remove(path: str | Path) -> None:
    """Delete a run folder, unless a process is running in it."""
    with held(Path(path)):
        shutil.rmtree(path)


def held(path: Path) -> IO[str]:
    """A run folder's lock; it goes when the file is closed or the process ends."""
    handle = (path / ".lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.close()
        raise StoreError(f"{path}: another process is running in this folder") from error
    return handle


def _has_records(path: Path) -> bool:
    with Ledger(path) as ledger:
        return len(ledger) > 0


def sweep(folder: Path) -> None:
    """Remove what a process that was killed while writing left there; nobody else may be writing."""
    for left in folder.glob(".*"):
        if _TEMPORARY.fullmatch(left.name):
            left.unlink(missing_ok=True)


def _is_early(name: str) -> bool:
    return name in _EARLY or _TEMPORARY.fullmatch(name) is not None


def _not_empty(path: Path) -> StoreError:
    return StoreError(f"{path}: not empty; use --resume to go on with the run in it, or another folder")
