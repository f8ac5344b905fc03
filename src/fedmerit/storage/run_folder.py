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
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config, difference, of_folder
from fedmerit.errors import (
    ConfigError,
    DataError,
    FileFormatError,
    LedgerError,
    MissingExtra,
    StoreError,
)
from fedmerit.identity import Roster
from fedmerit.ledger.account import Account, account_of, why_unsettled
from fedmerit.ledger.chain import START, Ledger, Record
from fedmerit.ledger.joined_runs import RunPart, joined, part_of
from fedmerit.ledger.records import (
    aborted,
    about,
    config_of,
    rounds_of,
    unreported,
)
from fedmerit.notes import Note, numbered, words
from fedmerit.protocol.outcome import Round
from fedmerit.protocol.pool import Slice, samples_in
from fedmerit.protocol.terms import lineage_of
from fedmerit.scoring.files import LEDGER, Content
from fedmerit.scoring.types import Reports
from fedmerit.secagg.setting import LEAST_IN_SUM

# ---------------------------------------------------------------------------------------------- the folder

Arrays = Mapping[str, npt.NDArray[Any]]
_EARLY = {".lock", "config.toml", "checkpoints", "keys"} | {
    f"ledger.sqlite{end}" for end in ("", "-wal", "-shm")
}
"""Files left by a run that failed before its first record; a folder with only these can be used again."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}")


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
            self._lock = held(self.path)
        except OSError as error:
            raise _unusable(self.path, error) from error
        try:
            self._open(config, resume=resume)
        except OSError as error:
            self._lock.close()
            raise _unusable(self.path, error) from error
        except BaseException:
            self._lock.close()
            raise

    def _open(self, config: Config, *, resume: bool) -> None:
        recorded = (self.path / LEDGER).exists() and _has_records(self.path / LEDGER)
        trained = any((self.path / "checkpoints").glob("*.safetensors"))
        if resume:
            check_settings(self.path, config)
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

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the run in one step."""
        write(self.path / name, data)

    def checkpoint(self, name: str, number: int) -> Path:
        """Return the path of a round's checkpoint."""
        return checkpoint_in(self.path, name, number)

    def save_checkpoint(self, name: str, number: int, arrays: Arrays) -> str:
        """Write a checkpoint in one step, readable only by its owner; return its SHA-256."""
        save = safetensors().save
        data: bytes = save({key: np.ascontiguousarray(value) for key, value in arrays.items()})
        write(self.checkpoint(name, number), data, mode=0o600)
        return hashlib.sha256(data).hexdigest()

    def load_checkpoint(self, name: str, number: int, digest: str) -> dict[str, npt.NDArray[Any]]:
        """Read a checkpoint; raise StoreError unless it has this SHA-256."""
        return read_checkpoint(self.checkpoint(name, number), number, digest)

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
        if not resume and path.exists() and not all(_is_early(item.name) for item in path.iterdir()):
            raise _not_empty(path)
    except OSError as error:
        raise _unusable(path, error) from error


def check_settings(path: Path, config: Config) -> None:
    """Raise StoreError unless a run folder holds a run of these settings.

    Settings whose members the data names (see `Config.resolved`) are compared without names and numbers.
    """
    try:
        there = of_folder(path)
    except ConfigError as error:
        raise StoreError(f"{path}: damaged run folder: {error}") from error
    if there.resolved and not config.resolved:
        who = there.partition
        config = replace(config, partition=replace(config.partition, names=who.names, clients=who.clients))
    if found := difference(there, config):
        raise StoreError(f"{path}: holds a run with a different config: {found}")


def write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file in one step: a crash leaves either the old content or the new."""
    if not path.name:
        raise StoreError(f"{path}: expected the name of a file, got a folder")
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
        raise StoreError(f"{path}: could not be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # on a disk that cannot be written, nothing was left
            temporary.unlink(missing_ok=True)


def checkpoint_in(folder: Path, name: str, number: int) -> Path:
    """Return the path of a round's checkpoint in a run folder."""
    return folder / "checkpoints" / f"{name}-{number:04d}.safetensors"


def read_checkpoint(path: Path, number: int, digest: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays in a checkpoint; raise StoreError unless it has this SHA-256."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: the checkpoint of round {number} is gone: {error}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise StoreError(f"{path}: damaged: expected SHA-256 {digest[:16]}..., found {found[:16]}...")
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
        raise MissingExtra("running a federation needs: pip install 'fedmerit[engine]'") from error
    return safetensors.numpy


def remove(path: str | Path) -> None:
    """Delete a run folder, unless a process is running in it."""
    with held(Path(path)):
        shutil.rmtree(path)


def held(path: Path) -> IO[str]:
    """Return a run folder's lock, which is released when the file is closed or the process ends."""
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


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary files of a killed process, if no other process is writing in the folder."""
    return [left for left in folder.glob(".*") if _TEMPORARY.fullmatch(left.name)]


def sweep(folder: Path) -> None:
    """Remove temporary files of a killed process; no other process may be writing in the folder."""
    for left in leftovers(folder):
        left.unlink(missing_ok=True)


def examine_disk(folder: Path, least: int) -> Iterator[Note]:
    """Yield how much room a folder's disk has, after a problem if that is less than so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < least:
        yield Note("problem", what=f"{folder}: the disk has {free} bytes left, expected {least}")
    yield Note("free", size=free / 2**30)


def _is_early(name: str) -> bool:
    return name in _EARLY or _TEMPORARY.fullmatch(name) is not None


def _unusable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot be used as a run folder: {error.strerror or error}")


def _not_empty(path: Path) -> StoreError:
    return StoreError(f"{path}: not empty; use --resume to go on with the run in it, or another folder")


# ---------------------------------------------------------------------------------- while a process writes


@dataclass(eq=False)
class Snapshot:
    """The records of a ledger as they were at one moment."""

    path: Path
    all: tuple[Record, ...]
    damaged: LedgerError | None = None  # raised after the last record

    def records(self, kind: str | None = None) -> Iterator[Record]:
        """Yield all records in order, or those of one kind."""
        yield from (record for record in self.all if kind is None or record.kind == kind)
        if self.damaged is not None:
            raise self.damaged

    @property
    def head(self) -> str:
        """The last digest, as hex."""
        return (self.all[-1].digest if self.all else START).hex()

    def __len__(self) -> int:
        return len(self.all)


def snapshot(path: Path) -> Snapshot:
    """Read a ledger with one query, which sees one state of the table."""
    found: list[Record] = []
    damaged = None
    with Ledger(path, read_only=True) as ledger:
        try:
            for record in ledger.records():
                found.append(record)
        except LedgerError as error:
            damaged = error
    return Snapshot(path, tuple(found), damaged)


def head_of(path: Path) -> str:
    """Return the current head of a ledger; an empty string if it cannot be read."""
    try:
        with Ledger(path, read_only=True) as ledger:
            return ledger.head
    except LedgerError:
        return ""


# ----------------------------------------------------------------------------------------------- its files


def check_config(path: Path, config: Config) -> None:
    """Raise LedgerError unless ``config.toml`` is the config in the ledger."""
    try:
        there = of_folder(path)
    except ConfigError as error:
        raise LedgerError(f"config.toml is damaged: {error}") from error
    if found := difference(there, config):
        raise LedgerError(f"{path / 'config.toml'}: not the config in the ledger: {found}")


def check_checkpoints(path: Path, rounds: Sequence[Round]) -> Iterator[Note]:
    """Check the checkpoints that are still there, and yield a line if the last model is not.

    Raises:
        LedgerError: one is not the checkpoint that its round recorded.
    """
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
    if rounds and "checkpoint" in rounds[-1].body:
        last = rounds[-1].number
        if not checkpoint_in(path, "model", last).exists():
            yield Note("checkpoint-gone", round=last)


# ---------------------------------------------------------------------------------------- reports of a run


@dataclass(frozen=True)
class Recorded:
    """A run's ledger at one moment, with its rounds ready to be scored."""

    ledger: Snapshot
    config: Config
    rounds: tuple[Round, ...]  # of the runs before it too, if there are any, numbered on
    content: Content
    runs: tuple[RunPart, ...] = ()  # if there are several, in order; the last one is this run
    accounts: tuple[Account, ...] = ()  # of the settlements of all of them; empty unless all are settled
    unsettled: str = ""  # why there are none although members settle, in words

    @property
    def planned(self) -> int:
        """How many rounds there are once this run is over."""
        return sum(len(run.rounds) for run in self.runs[:-1]) + self.config.training.rounds

    @property
    def notes(self) -> tuple[Note, ...]:
        """Remarks on the rounds that have no score."""
        return tuple(about(self.rounds))


def recorded(
    folder: str | Path | Snapshot, *, utility: str | None = None, after: Sequence[str | Path | Snapshot] = ()
) -> Recorded:
    """Return the reports of all rounds of a run that have any.

    Args:
        folder: the run folder, whose records are read, not verified; or its ledger as it was verified.
        utility: the utility to read; the paid one unless given.
        after: the runs before this one, in order, whose rounds are counted too.

    Raises:
        DoesNotFollow: one of the runs does not follow the one before it.
        StoreError: no round is scored; it says what the ledger holds and, if the run is over, what to do.
    """
    ledger = _book(folder)
    path, folder = ledger.path, ledger.path.parent
    config, rounds, runs = config_of(ledger), rounds_of(ledger), tuple[RunPart, ...]()
    if after:
        runs = (*(part_of(_book(one)) for one in after), part_of(ledger))
        rounds = list(joined(runs))
    utilities = config.scoring.utilities
    if utility is not None and utility not in utilities:
        raise FileFormatError(f"{path}: has no utility {utility!r}; it has {', '.join(utilities)}")
    scored = scored_in(rounds, utility or utilities[0])
    accounts, unsettled = _accounts(ledger, rounds, config, runs)
    if not config.reports and utility not in (None, utilities[0]):
        raise FileFormatError(f"{path}: only {utilities[0]!r} is settled, and {utility!r} was not reported")
    if utility not in (None, utilities[0]):
        accounts = ()
    if not scored and not accounts:
        holds = _holds(ledger, rounds, config)
        if unsettled:
            holds = f"{holds}; {unsettled}"
        if runs or len(rounds) < config.training.rounds:
            raise StoreError(f"{folder}: no round is scored yet: {holds}")
        if not config.reports:
            raise StoreError(f"{folder}: no round was scored, because the run is not settled: {holds}")
        raise StoreError(
            f"{folder}: no round was scored, and the run is over: {holds}; "
            f"start another in a new folder, with {_needed(rounds, config)}"
        )
    clients = tuple(dict.fromkeys((*config.clients, *(name for run in runs for name in run.config.clients))))
    return Recorded(ledger, config, tuple(rounds), Content(scored, clients), runs, accounts, unsettled)


def _book(run: str | Path | Snapshot) -> Snapshot:
    return run if isinstance(run, Snapshot) else snapshot(Path(run) / LEDGER)


def _accounts(
    ledger: Snapshot, rounds: Sequence[Round], config: Config, runs: Sequence[RunPart]
) -> tuple[tuple[Account, ...], str]:
    """Return the accounts of these runs; none, and why, if one of them is not settled."""
    if not config.settles:
        return (), ""
    if not runs:
        one = account_of(ledger, rounds, config)
        return ((one,), "") if one else ((), why_unsettled(ledger, rounds, config))
    found = tuple(run.account for run in runs if run.account is not None)
    lacking = [run.name for run in runs if run.account is None]
    return ((), words("unsettled.run", path=lacking[0])) if lacking else (found, "")


def scored_in(rounds: Sequence[Round], utility: str) -> list[Reports]:
    """Return the reports that scores take, for the rounds that have any."""
    return [found for one in rounds if (found := one.to_reports(utility)) is not None]


def _holds(ledger: Snapshot, rounds: Sequence[Round], config: Config) -> str:
    """Say what the ledger holds instead of scores."""
    begun = max((record.body["round"] for record in ledger.records("schedule")), default=0)
    said = []
    if why := [f"(round {one.number}: {one.aborted})" for one in rounds if one.aborted]:
        said.append(f"{numbered(aborted(rounds))} aborted {why[-1]}")
    if without := unreported(rounds):
        said.append(f"{numbered(without)} summed, but without any report")
    if begun > len(rounds):
        said.append(f"round {begun} begun and not closed")
    closed = f"{len(rounds)} of {config.training.rounds} rounds closed"
    return f"its ledger holds {len(ledger)} records, {'; '.join([closed, *said])}"


def _needed(rounds: Sequence[Round], config: Config) -> str:
    """Say what another run would need to be scored."""
    if not aborted(rounds):
        return "members who report"
    lower = ""
    if config.threshold > LEAST_IN_SUM:
        lower = " or a lower secure_aggregation.threshold, which protects less"
    return f"more members who stay to the end of a round{lower}"


# ------------------------------------------------------------------------------------ beside a server's key

log = logging.getLogger("fedmerit")


class OpenedSamples:
    """Which test samples a server has shown to members, in rounds and settlements: they settle on none.

    ``KEY.opened`` beside the server's key (mode 600) has one line of JSON per test slice: the federation, the
    run folder, the run, and eight bytes of a hash for every sample. Members keep the same in their own state.

    Args:
        key: the file of the server's private key.
        roster: of the federation.
    """

    def __init__(self, key: Path, roster: Roster) -> None:
        self.path, self.federation = key.with_name(f"{key.name}.opened"), lineage_of(roster)

    def check(self, shown: Slice, run: str = "") -> None:
        """Raise DataError if another run opened one of these samples, because members would not settle."""
        samples = {sample.hex() for sample in samples_in(shown)}
        for line in self._lines():
            if run and line.get("id") == run:
                continue
            known = samples & {*line["samples"]}
            if known and line["federation"] == self.federation:
                raise DataError(
                    f"test: {len(known)} of {len(shown.y)} samples were shown to these members in "
                    f"{line['run']}, and members settle on no sample that they saw before, because they may "
                    'have trained on it: give samples that nobody has seen, or method="reports"'
                )

    def add(self, folder: Path, run: str, shown: Slice) -> None:
        """Remember, once, that these samples are shown to the members of a run.

        If that cannot be written down, the run goes on, and a warning says what the next one will not know.
        """
        samples = sorted(sample.hex() for sample in samples_in(shown))
        line = {
            "federation": self.federation, "run": str(folder.resolve()), "id": run, "samples": samples,
        }  # fmt: skip
        try:
            known = self._lines()
            if all(
                any(line[key] != one.get(key) for key in ("federation", "id", "samples")) for one in known
            ):
                text = "".join(json.dumps(one) + "\n" for one in [*known, line])
                write(self.path, text.encode(), mode=0o600)
        except StoreError as error:
            log.warning("the next run cannot tell which test samples were shown in this one: %s", error)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            found = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
            for number, line in enumerate(found, 1):
                if not all(isinstance(line[key], str) for key in ("federation", "run")) or not all(
                    isinstance(sample, str) for sample in line["samples"]
                ):
                    raise ValueError(f"line {number} names no federation, run or samples")
            return found
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise StoreError(
                f"{self.path}: cannot be read: {error}; it says which test samples were opened before"
            ) from error
