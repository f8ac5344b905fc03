"""Run folders between machines: what a start may find, the last model, and answers that come later as files.

The server leaves signed messages in ``RUN/archive/messages``. A member's owner answers them on the member's
own machine (`state`), with its key, its stored updates and its own gradient. The result is a file that
anybody may hand on. Whoever has the server's key adds it to the ledger (`add`). When the window is over, t
members sign the end in the same way, and the server closes the settlement with their files (`close`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec import DecodeError, Struct, json

from fedmerit import errors
from fedmerit.carriers.door import Place, named, path_gradient
from fedmerit.carriers.shape import Shape
from fedmerit.config import of_folder
from fedmerit.errors import SettlementError, StoreError
from fedmerit.identity import Member, Roster, new_key, read_roster, write_roster
from fedmerit.ledger.chain import LEDGER, Ledger
from fedmerit.ledger.kinds import recorded_roster
from fedmerit.ledger.run import opening_of
from fedmerit.protocol.clearing import Clearing
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.hearing import clearing_of
from fedmerit.protocol.member import Participant
from fedmerit.protocol.memory import TERMS
from fedmerit.protocol.messages import Ask, Exchange, Parcel
from fedmerit.protocol.naming import HEAD, MESSAGES
from fedmerit.protocol.outcome import Model
from fedmerit.protocol.settlement import Settled, name_hash
from fedmerit.protocol.terms import EMBEDDED
from fedmerit.storage.checks import renew
from fedmerit.storage.member_state import MemberFiles
from fedmerit.storage.recorder import resumed
from fedmerit.storage.run_folder import (
    ARCHIVE,
    Folder,
    FolderArchive,
    held,
    read_checkpoint,
    write,
)
from fedmerit.verify import verified_run

log = logging.getLogger("fedmerit")

# ------------------------------------------------------------------------------------- a start in a folder

REMAINS = (
    *("config.toml", "notes.txt", "scores.csv", "scores.json", "keys/pool.key", "keys/server.pem", "keys"),
    *("checkpoints", f"{LEDGER}-wal", f"{LEDGER}-shm", LEDGER),
)
"""What a start may leave; the ledger goes last, because it shows that the rest may be removed."""
SETTLE = "what was trained in it can still be settled: strategy.settle(grid=grid, initial_arrays=arrays)"


def make_free(path: Path) -> None:
    """Remove the remains of a start that too few members joined; refuse a folder that holds anything else.

    Before the first schedule, no member was asked for anything, so nothing is lost. A folder whose ledger
    holds a schedule is never touched.
    """
    if not path.exists() or {item.name for item in path.iterdir()} <= {".lock"}:
        return
    remains = [path / name for name in REMAINS]
    foreign = {*path.iterdir(), *path.glob("*/*")} - {*remains, path / ".lock"}
    if foreign or not (path / LEDGER).exists():
        raise _used(path)
    try:
        with held(path):
            kinds, engine, _ = kinds_in(path / LEDGER)
            if not ("run" in kinds <= {"run", "pool", "join"} and engine != EMBEDDED):
                raise _used(path)
            for item in remains:
                if item.is_dir():
                    item.rmdir()
                else:
                    item.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be used again as a run folder: {error}") from error


def kinds_in(path: Path) -> tuple[set[str], str, bool]:
    """Return the kinds of records in a ledger, its engine, and whether members settle; none if unreadable."""
    try:
        with Ledger(path, read_only=True) as ledger:
            first, config = opening_of(ledger)
            return {record.kind for record in ledger.records()}, first.engine, config.settles
    except errors.FedmeritError:
        return set(), "", False


def _used(path: Path) -> StoreError:
    kinds, _, settles = kinds_in(path / LEDGER)
    to_settle = settles and "schedule" in kinds and "end" not in kinds
    return StoreError(
        f"{path}: not empty, and a Flower run cannot be resumed: give a new folder. To go on from the last "
        f"model in this one, start with fedmerit.flower.last_model({str(path)!r}, initial_arrays)"
        + (f"; {SETTLE}" if to_settle else "")
    )


def last_vector(path: Path, expected: int) -> Model:
    """Return the model after the last round in a run folder; see `fedmerit.flower.last_model`."""
    with Ledger(path / LEDGER, read_only=True) as ledger:
        rounds = list(ledger.records("round"))
    if not rounds:
        raise StoreError(f"{path}: no round is over; start from the first model, in a new folder")
    number, digest = int(rounds[-1].body["round"]), str(rounds[-1].body["checkpoint"])
    model: Model = read_checkpoint(path, "model", number, digest)["model"]
    if model.size != expected:
        raise StoreError(
            f"{path}: the model of round {number} has {model.size} numbers, but the given one has {expected}"
        )
    return model


def rehearsal(folder: str | Path, names: Sequence[str]) -> Path:
    """Make everybody's keys and the roster for a simulation, once; return the roster's file.

    In a simulation nobody has a machine of its own, so one folder holds all private keys. The nodes find it
    by ``fedmerit-rehearsal`` in the run config; node k of the simulation is the k-th member.

    Args:
        folder: new, or made here before.
        names: of the members, as many as there are simulated SuperNodes.

    Raises:
        ConfigError: the folder has a roster of other members, or no folder was given.
    """
    if not str(folder):
        raise errors.ConfigError("rehearsal: expected a folder for everybody's keys, got an empty text")
    path = Path(folder) / "roster.toml"
    if path.exists():
        if (there := read_roster(path).names) != tuple(names):
            expected = f"expected {', '.join(names)}: take a new folder"
            raise errors.ConfigError(f"{path} lists {', '.join(there)}, {expected}")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    members = [Member(name, new_key(path.with_name(f"{name}.pem"))) for name in names]
    write_roster(path, Roster(members, new_key(path.with_name("server.pem"))))
    return path


class Notes(list[str]):
    """A server's notes in a run. Each note is also written to a file at once, as one line with its time."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def append(self, note: str) -> None:
        """Add a note. If the file cannot be written, log an error and continue."""
        super().append(note)
        when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{when} {' '.join(note.split())}\n")
        except OSError as error:
            log.error("%s: could not be written: %s", self.path, error)


# -------------------------------------------------------------- answers by hand: on a member's machine

ORDER = (
    "open", "agree", "agreed", "state", "draw", "drawn", "seal", "witness", "table", "pairs", "settle",
)  # fmt: skip
HANDED = ORDER[3:]
"""Which answers are handed in; the others only prepare these."""


class Answers(Struct, frozen=True, forbid_unknown_fields=True):
    """What a member signed, as a file: kind, round and bytes of each answer."""

    format: Literal["fedmerit answers 1"]
    member: str
    answers: tuple[tuple[str, int, bytes], ...]


def state(
    key: Path,
    roster: Path,
    messages: Path,
    gradient: Callable[..., Any] | None,
    target: Path,
    without: Sequence[str] = (),
    kinds: Callable[[str], type[Shape]] = lambda engine: Shape,
) -> tuple[str, list[str]]:
    """Answer the messages of a settlement, and write what this member signs; return its name and the kinds.

    Args:
        key: the member's private key, with its state beside it.
        roster: the member's roster.
        messages: the folder ``archive/messages`` of the run, or a copy.
        gradient: as in `secure`; a member that has stated needs it only where parts of blocks do not add up.
        target: where the answers are written.
        without: members without whose statements or masks this member's owner agrees to close the
            settlement when its window is over; they share the remainder.
        kinds: returns the shape that makes what ``gradient`` gets, by a run's engine.

    Raises:
        RefusedError: the member does not state; the log says why.
    """
    name, identity, members = named(Place(key, roster))

    def shape_kind() -> type[Shape]:
        agreed = member.state(Ask.unpack(parcel)[0].run).get(TERMS)
        return kinds(agreed.terms["engine"] if agreed else "")

    member = Participant(
        *(name, identity, members, partial(MemberFiles, key, identity), _no_evaluator),
        gradients=lambda shape, utility: path_gradient(
            gradient or _no_gradient, shape_kind(), shape, utility
        ),
    )
    member.without = tuple(without)
    answers: list[tuple[str, int, bytes]] = []
    for kind, number, parcel in _parcels(messages, name):
        try:
            answer = member.answer(parcel, "")
        except errors.RefusedError:
            if _exchange(kind) not in HANDED[1:]:
                raise
            continue  # its log says why; the statement is handed in all the same
        if _exchange(kind) in HANDED:
            answers.append((kind, number, answer))
    content = Answers("fedmerit answers 1", name, tuple(answers))
    write(target, json.format(json.encode(content), indent=1) + b"\n")
    return name, [kind for kind, _, _ in answers]


def _exchange(kind: str) -> str:
    """Return the exchange of a message that may be about one block, such as ``table.3``."""
    exchange, dot, block = kind.partition(".")
    return exchange if block.isdecimal() == bool(dot) else kind


def _no_gradient(*_: Any) -> Any:
    raise SettlementError("this member has not stated yet, which needs the gradient", code="no-gradient")


def _no_evaluator(shape: Any, utilities: Any) -> Any:
    raise AssertionError("a settlement evaluates nothing but the gradient")


def _parcels(folder: Path, name: str) -> Iterator[tuple[str, int, Parcel]]:
    """Yield the messages of a settlement to a member, in the order in which they are answered."""
    archive, empty = FolderArchive(folder), True
    for exchange in ORDER:
        for path in sorted(folder.glob(f"{exchange}*.arrays")):
            own, _, number = path.stem.rpartition("-")
            kind, _, whose = own.partition("-")
            if number.isdecimal() and _exchange(kind) == exchange and whose in ("", name_hash(name)):
                arrays = archive.load(own, int(number))
                if HEAD not in arrays:
                    raise StoreError(f"{path}: expected a message of a settlement, got one without a head")
                empty = False
                yield kind, int(number), Parcel(arrays.pop(HEAD).tobytes(), arrays)
    if empty:
        raise StoreError(f"{folder}: expected the messages of a settlement, RUN/{ARCHIVE}/{MESSAGES}")


# ---------------------------------------------------------------- answers by hand: on the server's side


def add(path: Path, file: Path, key: Path | None = None) -> Settled:
    """Add a member's answers to the ledger of a run; return what the settlement comes to with them.

    Args:
        path: the run folder.
        file: the answers; their signatures count, whoever hands them in.
        key: the server's private key; by default the one in the run folder.

    Raises:
        MessageError: the member did not sign it, or has stated something else before.
        SettlementError: the run was not settled, or its settlement is closed.
    """
    member, answers = _answers_in(file)
    with _opened(path, key) as clearing:
        if member not in clearing.coordinator.config.clients:
            raise errors.FileFormatError(f"{file}: {member!r:.60} is not a member of the run in {path}")
        settled = clearing.late(member, *answers)
    renew(path, verified_run(path))
    return settled


def close(
    path: Path, key: Path | None = None, signed: Sequence[Path] = (), *, now: float | None = None
) -> Settled:
    """Close the settlement of a run once its window is over; return what it came to.

    Args:
        path: the run folder.
        key: as for `add`.
        signed: answers of t members, with their signatures under the end; not needed if nobody is awaited.
        now: the time, in seconds since 1970.

    Raises:
        SettlementError: the window is not over, or fewer than t members signed its beginning or its end. The
            messages for members to sign are in ``archive/messages`` then.
    """
    files = [_answers_in(file) for file in signed]
    ends = {name: end for name, answers in files for kind, _, end in answers if kind == "settle"}
    with _opened(path, key) as clearing:
        settled = clearing.close(time.time() if now is None else now, ends)
    renew(path, verified_run(path))
    return settled


class _Nobody:
    """A transport that reaches nobody: the members' machines are elsewhere, and the run is over."""

    def exchange(self, kind: Exchange, asks: Mapping[str, Parcel]) -> Iterable[tuple[str, bytes]]:
        return ()

    def expected(self, number: int) -> Sequence[str]:
        return ()


@contextmanager
def _opened(path: Path, key: Path | None) -> Iterator[Clearing]:
    """Open the settlement of a run that verifies, to sign with the server's key."""
    run, config = verified_run(path), of_folder(path)
    with Folder(path, config, resume=True) as folder:
        recorder = resumed(run, folder, config, recorded_roster(run.first, config), key)
        nothing: Any = None  # neither the pool nor the gradient is needed any more
        coordinator = Coordinator(recorder, nothing, _Nobody(), None)
        yield clearing_of(coordinator, nothing, FolderArchive(path / ARCHIVE))


def _answers_in(file: Path) -> tuple[str, tuple[tuple[str, int, bytes], ...]]:
    try:
        handed = json.decode(file.read_bytes(), type=Answers)
    except OSError as error:
        raise errors.FileFormatError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (DecodeError, ValueError, RecursionError) as error:
        raise errors.FileFormatError(f"{file}: not a member's answers: {error!s:.120}") from error
    if other := [kind for kind, _, _ in handed.answers if _exchange(kind) not in HANDED]:
        raise errors.FileFormatError(f"{file}: not a member's answers: {other[0]!r:.40} is not handed in")
    return handed.member, handed.answers
