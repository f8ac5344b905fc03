"""The run folder: config, ledger, scores and checkpoints, written so that a crash cannot damage them.

::

    DIR/config.toml       all settings, defaults included
    DIR/ledger.sqlite     every step, hash-chained; a round is closed in one transaction
    DIR/scores.json       the scores; scores.csv has the same numbers as a tidy table
    DIR/statements/       each member's statement of a payout decision (fedmerit rewards)
    DIR/checkpoints/      model-0003: the global model after round 3; members-0003: the members' private state
    DIR/keys/             in a rehearsal, the private keys of all members and the server (mode 600)
    DIR/notes.txt         between machines: members who were away, refused or declined, as the server noted
    DIR/tables/           utilities of all coalitions, if ground truth was asked for

A round counts once its closing transaction is in the ledger. Its checkpoint is written before that. The score
files follow from the ledger and are written after it. If a process is killed in between, this is redone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from fedmerit.config import Config, difference, of_folder
from fedmerit.errors import ConfigError, DataError, LedgerError, MissingExtra, StoreError
from fedmerit.identity import Roster, drafted
from fedmerit.ledger.chain import LEDGER, Ledger
from fedmerit.notes import Note
from fedmerit.protocol.pool import KEY_BYTES, Slice, samples_in

# ---------------------------------------------------------------------------------------------- the folder

Arrays = Mapping[str, npt.NDArray[Any]]
_EARLY = {".lock", "config.toml", "checkpoints", "keys"} | {
    f"ledger.sqlite{end}" for end in ("", "-wal", "-shm")
}
"""Files left by a run that failed before its first record; a folder with only these can be used again."""
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")


class Folder:
    """A run folder, held by one process at a time."""

    def __init__(
        self, path: str | Path, config: Config, *, resume: bool = False, text: str | None = None
    ) -> None:
        """Open the folder; ``text``, if given, becomes its config.toml. It must mean the same settings."""
        self.path = Path(path)
        self._text = config.to_toml() if text is None else text
        check_usable(self.path, resume=resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as unless_open:
                self._lock = unless_open.enter_context(held(self.path))
                self._open(config, resume=resume)
                unless_open.pop_all()
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _open(self, config: Config, *, resume: bool) -> None:
        recorded = False
        if (self.path / LEDGER).exists():
            with Ledger(self.path / LEDGER) as ledger:
                recorded = len(ledger) > 0
        trained = any((self.path / "checkpoints").glob("*.safetensors"))
        if resume:
            check_settings(self.path, config)
            if trained and not recorded:
                raise StoreError(f"{self.path}: damaged run folder: checkpoints, but no record of a run")
        else:
            if trained or recorded:
                raise not_empty(self.path)
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

    def save_checkpoint(self, name: str, number: int, arrays: Arrays) -> str:
        """Write a checkpoint in one step, readable only by its owner; return its SHA-256."""
        save = safetensors().save
        data: bytes = save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        write(checkpoint_in(self.path, name, number), data, mode=0o600)
        return hashlib.sha256(data).hexdigest()

    def drop_checkpoints(self, *, keep: int) -> None:
        """Delete the checkpoints of rounds before ``keep``."""
        for path in (self.path / "checkpoints").glob("*.safetensors"):
            number = path.stem.rpartition("-")[2]
            if number.isdecimal() and int(number) < keep:
                path.unlink(missing_ok=True)


def check_usable(path: Path, *, resume: bool) -> None:
    """Raise StoreError if a run cannot begin in a folder or, with ``resume``, go on; write nothing."""
    if resume and not (path / "config.toml").exists():
        raise StoreError(f"{path}: nothing to resume, there is no config.toml")
    try:
        names = {item.name for item in path.iterdir()} if path.exists() and not resume else set()
        if any(name not in _EARLY and not TEMPORARY.fullmatch(name) for name in names):
            raise not_empty(path)
    except OSError as error:
        raise _unusable(path, error) from error


def check_settings(path: Path, config: Config) -> None:
    """Raise StoreError unless a run folder holds a run of these settings.

    Settings whose members the data names (see `Config.resolved`) are compared without names and numbers.
    """
    try:
        stored = of_folder(path)
    except ConfigError as error:
        raise StoreError(f"{path}: damaged run folder: {error}") from error
    if stored.resolved and not config.resolved:
        who = stored.partition
        config = replace(config, partition=replace(config.partition, names=who.names, clients=who.clients))
    if differs := difference(stored, config):
        raise StoreError(f"{path}: holds a run with a different config: {differs}")


def write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file in one step: a crash leaves either the old content or the new."""
    if not path.name:
        raise StoreError(f"{path}: expected the name of a file, got a folder")
    try:
        with drafted(path, data, mode) as draft:
            draft.replace(path)
        if os.name == "posix":  # Windows opens no folders
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except OSError as error:
        raise StoreError(f"{path}: could not be written: {error.strerror or error}") from error


def checkpoint_in(folder: Path, name: str, number: int) -> Path:
    """Return the path of a round's checkpoint in a run folder."""
    return folder / "checkpoints" / f"{name}-{number:04d}.safetensors"


def read_checkpoint(folder: Path, name: str, number: int, digest: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays in a checkpoint of a run folder; raise StoreError unless it has this SHA-256."""
    path = checkpoint_in(folder, name, number)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: the checkpoint of round {number} is gone: {error}") from error
    if (actual := hashlib.sha256(data).hexdigest()) != digest:
        raise StoreError(f"{path}: damaged: expected SHA-256 {digest[:16]}..., got {actual[:16]}...")
    return arrays_in(path, data)


def arrays_in(path: Path, data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays in the bytes of a file; raise StoreError if they hold none."""
    load = safetensors().load
    from safetensors import SafetensorError

    try:
        arrays: dict[str, npt.NDArray[Any]] = load(data)
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: damaged: it holds no arrays: {error!s:.100}") from error
    return arrays


def safetensors() -> Any:
    """Return the library that writes arrays; raise MissingExtra if it is not installed."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise MissingExtra.of("running a federation needs", "engine") from error
    return safetensors.numpy


def remove(path: str | Path) -> None:
    """Delete a run folder, unless a process is running in it."""
    with held(Path(path)):
        shutil.rmtree(path)


def held(path: Path) -> IO[str]:
    """Return a run folder's lock, which is released when the file is closed or the process ends."""
    handle = (path / ".lock").open("w")
    try:
        lock(handle)
    except BlockingIOError as error:
        handle.close()
        raise StoreError(f"{path}: another process is running in this folder") from error
    return handle


def lock(handle: IO[str], *, wait: bool = False) -> None:
    """Lock an open file for this process, or raise BlockingIOError; without locks, StoreError."""
    try:
        import fcntl
    except ImportError as error:  # Windows, where tables are read all the same
        system = "a run and a member's state need Linux or macOS: on Windows, use WSL or Docker"
        raise StoreError(f"{handle.name}: {system}") from error
    fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def sweep(folder: Path) -> None:
    """Remove temporary files of a killed process; no other process may be writing in the folder."""
    for path in folder.glob(".*"):
        if TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def examine_disk(folder: Path, least: int) -> Iterator[Note]:
    """Yield how much room a folder's disk has, after a problem if that is less than so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < least:
        yield Note("problem", what=f"{folder}: the disk has {free} bytes left, expected {least}")
    yield Note("free", size=free / 2**30)


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot be used as a run folder: {error.strerror or error}")


def not_empty(path: Path) -> StoreError:
    """Return the error for a folder that must be new."""
    return StoreError(f"{path}: not empty; use --resume to go on with the run in it, or another folder")


# ---------------------------------------------------------------------------------- while a process writes


def head_of(path: Path) -> str:
    """Return the current head of a ledger; an empty string if it cannot be read."""
    try:
        with Ledger(path, read_only=True) as ledger:
            return ledger.head
    except LedgerError:
        return ""


# ----------------------------------------------------------------------------- the secret of the test pool


def keep_pool_key(folder: Path, key: bytes) -> None:
    """Store the secret from which the pool's salts are derived, with mode 600."""
    path = folder / "keys" / "pool.key"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write(path, key, mode=0o600)


def stored_pool_key(folder: Path) -> bytes:
    """Return the secret from which the pool's salts are derived, as stored when the run started."""
    path = folder / "keys" / "pool.key"
    try:
        key = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: the key of the test pool is gone, nobody can open it: {error}") from error
    if len(key) != KEY_BYTES:
        raise StoreError(f"{path}: damaged: expected {KEY_BYTES} bytes, got {len(key)}")
    return key


# ------------------------------------------------------------------------- what a settlement is made from
#
# One file of arrays per kind and round in ``DIR/archive``::
#
#     round-0003       X, the integers that were summed, and M0 unless it is the M of the round before
#     masks-0003       the signed lists of the round, and the secrets that were rebuilt to unmask its sum
#     direction-0003   g, the public direction as integers
#     words-*-0003     masked words of a member (by a hash of its name), 8 bytes each
#     messages/        if somebody was away: signed messages to which it can still answer with its statement
#
# Whoever has the folder, the ledger and the test pool can recompute every number of the settlement
# (``fedmerit verify DIR --archive``).

ARCHIVE = "archive"


class FolderArchive:
    """A `protocol.coordinator.Archive` in a folder, made when needed; every file carries its own checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, kind: str, number: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep arrays in one step, readable by their owner only."""
        self._file(kind, number).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data: bytes = safetensors().save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        write(self._file(kind, number), hashlib.sha256(data).digest() + data, mode=0o600)

    def load(self, kind: str, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return what was kept; raise StoreError if it is gone or damaged."""
        path = self._file(kind, number)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path}: needed for the settlement, and gone: {error}") from error
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise StoreError(f"{path}: damaged")
        return arrays_in(path, data[32:])

    def has(self, kind: str, number: int) -> bool:
        return self._file(kind, number).exists()

    def drop(self, kind: str, number: int) -> None:
        self._file(kind, number).unlink(missing_ok=True)

    def _file(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:04d}.arrays"


# ---------------------------------------------------------------------------------------- what a run costs

COSTS = "costs.json"


@dataclass(frozen=True)
class Costs:
    """Seconds of each timed round, and the number of parameters of the model; None if unknown."""

    seconds: tuple[float, ...] | None = None
    parameters: int | None = None


def timed(watch: Callable[[Any], None], folder: Path) -> Callable[[Any], None]:
    """Return a watch that also adds to ``costs.json`` how long each round took."""
    last = [time.monotonic()]

    def watched(step: Any) -> None:
        watch(step)
        if step.stage == "round":
            now = time.monotonic()
            seconds = _seconds(folder) | {step.round: round(now - last[0], 3)}
            write(folder / COSTS, (json.dumps({"seconds": seconds}, indent=1) + "\n").encode())
            last[0] = now

    return watched


def read_costs(folder: Path) -> Costs:
    """Return what the run in this folder has cost."""
    seconds = _seconds(folder)
    checkpoints = sorted((folder / "checkpoints").glob("model-*.safetensors"))
    return Costs(
        seconds=tuple(seconds[number] for number in sorted(seconds)) or None,
        parameters=_parameters(checkpoints[-1]) if checkpoints else None,
    )


def _seconds(folder: Path) -> dict[int, float]:
    path = folder / COSTS
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[int, float]])["seconds"]
    except (OSError, ValueError, LookupError, RecursionError) as error:
        raise StoreError(f"{path}: expected seconds by round, got something else: {error!r:.80}") from error


def _parameters(path: Path) -> int:
    """Return how many numbers a safetensors file holds, from its header: u64 length, JSON with shapes."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return sum(math.prod(array["shape"]) for key, array in header.items() if key != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError) as error:
        raise StoreError(f"{path}: damaged: not a checkpoint: {error!r:.80}") from error


# ------------------------------------------------------------------------------------ trained several times
#
# DIR/run-1, DIR/run-2, ... are whole run folders. Every run trains on the same data and is measured on the
# same test pool; only the first model and the batch order differ (``run.repeat``). A killed process leaves
# finished runs and at most one that is not; ``resume`` goes on from there, also with more repeats.

PAGE = "comparison.html"
"""The page beside the runs that compares them."""
_REPEAT = re.compile(r"run-([1-9][0-9]*)")


@dataclass(frozen=True)
class Repeat:
    """One training of several: its number from 1, its folder, its settings, and whether it has begun."""

    number: int
    folder: Path
    config: Config
    begun: bool


def repeats_in(path: Path, config: Config, count: int, *, resume: bool) -> tuple[Repeat, ...]:
    """Return the ``count`` runs of a folder, in order; write nothing.

    Raises:
        StoreError: the folder holds something else, runs of other settings, or more runs than asked for.
    """
    runs = found_in(path)
    if runs and not resume:
        raise StoreError(
            f"{path}: holds {runs[0][1].name} already; use --resume to go on with it, or another folder"
        )
    if resume and not runs:
        raise StoreError(f"{path}: nothing to resume, there is no run-1 in it")
    if runs and runs[-1][0] > count:
        raise StoreError(
            f"{path}: holds {runs[-1][1].name}, and {count} runs were asked for: expected --repeat "
            f"{runs[-1][0]} or more"
        )
    repeats = []
    for number in range(1, count + 1):
        folder = path / f"run-{number}"
        begun = (folder / "config.toml").exists()
        own = replace(config, run=replace(config.run, repeat=number))
        if begun:
            check_settings(folder, own)
        else:
            check_usable(folder, resume=False)
        repeats.append(Repeat(number, folder, own, begun))
    return tuple(repeats)


def found_in(path: Path) -> list[tuple[int, Path]]:
    """Return number and path of each run in a folder of repeats; raise StoreError if it is something else."""
    if not path.exists():
        return []
    if not path.is_dir():
        raise StoreError(f"{path}: expected a folder, got a file")
    if (path / LEDGER).exists() or (path / "config.toml").exists():
        raise StoreError(f"{path}: holds a single run; repeats need a folder of their own")
    runs = []
    for item in path.iterdir():
        if (named := _REPEAT.fullmatch(item.name)) and item.is_dir():
            runs.append((int(named[1]), item))
        elif item.name != PAGE and not item.name.startswith(f".{PAGE}."):  # cut off while it was written
            raise StoreError(f"{path}: expected runs (run-1, run-2, ...) and {PAGE} in it, got {item.name}")
    return sorted(runs)


def runs_of(paths: Sequence[Path]) -> list[Path]:
    """Return these paths, with the runs in it in place of each folder of repeats."""
    runs: list[Path] = []
    for path in paths:
        repeats = path.is_dir() and not (path / LEDGER).exists() and (path / "run-1").is_dir()
        runs += [folder for _, folder in found_in(path)] if repeats else [path]
    return runs


# ------------------------------------------------------------------------------------ beside a server's key

log = logging.getLogger("fedmerit")


@dataclass(frozen=True)
class OpenedSlice:
    """A test slice that a server has shown to members."""

    federation: str
    run: str  # the run folder
    id: str  # of the run
    samples: list[str]  # eight bytes of a hash for every sample


class OpenedSamples:
    """Which test samples a server has shown to members, in rounds and settlements: they settle on none.

    ``KEY.opened`` beside the server's key (mode 600) has one line of JSON per test slice. Members keep the
    same in their own state.
    """

    def __init__(self, key: Path, roster: Roster) -> None:
        self.path, self.federation = key.with_name(f"{key.name}.opened"), roster.lineage

    def check(self, opened: Slice, run: str = "") -> None:
        """Raise DataError if another run opened one of these samples, because members would not settle."""
        samples = {sample.hex() for sample in samples_in(opened)}
        for line in self._lines():
            before = samples & {*line.samples}
            if before and line.federation == self.federation and line.id != run:
                raise DataError(
                    f"test: {len(before)} of {len(opened.y)} samples were shown to these members in "
                    f"{line.run}, and members settle on no sample that they saw before, because they may "
                    'have trained on it: give samples that nobody has seen, or method="reports"'
                )

    def add(self, folder: Path, run: str, opened: Slice) -> None:
        """Remember, once, that these samples are shown to the members of a run; warn if that fails."""
        samples = sorted(sample.hex() for sample in samples_in(opened))
        line = OpenedSlice(self.federation, str(folder.resolve()), run, samples)
        try:
            lines = self._lines()
            if not any(replace(other, run=line.run) == line for other in lines):
                write(self.path, msgspec.json.Encoder().encode_lines([*lines, line]), mode=0o600)
        except StoreError as error:
            log.warning("the next run cannot tell which test samples were shown in this one: %s", error)

    def _lines(self) -> list[OpenedSlice]:
        try:
            return msgspec.json.Decoder(OpenedSlice).decode_lines(self.path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(
                f"{self.path}: cannot be read: {error}; it says which test samples were opened before"
            ) from error
