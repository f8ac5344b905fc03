"""Folders of Flower runs: free for a new run, the last model in one, and the keys of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flwr.app import ArrayRecord

from fedmerit.errors import (
    ConfigError,
    FedmeritError,
    StoreError,
)
from fedmerit.flower.codec import (
    Shape,
)
from fedmerit.identity import (
    Member,
    Roster,
    new_key,
    read_roster,
    write_roster,
)
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.records import config_of
from fedmerit.protocol.pool import KEY_BYTES
from fedmerit.protocol.terms import FLOWER, SIMULATED
from fedmerit.scoring.files import LEDGER
from fedmerit.storage.run_folder import checkpoint_in, held, read_checkpoint

_FILES = ("config.toml", "notes.txt", "scores.csv", "scores.json")
_LEDGER = (f"{LEDGER}-wal", f"{LEDGER}-shm", LEDGER)
"""The ledger's files; the ledger goes last, because it shows that the rest may be removed."""
_KEYS = ("pool.key", "server.pem")
NEW_KEY = "make a key (fedmerit keys new --server server.pem)"
_KINDS = {"run", "pool", "join"}
"""The kinds of records of a start that reached no round."""


def make_free(path: Path) -> None:
    """Remove what is left of a start that too few members joined; refuse a folder that holds anything else.

    Before the first schedule, no member was asked for anything, so nothing is lost. A folder whose ledger
    holds a schedule is never touched.
    """
    if not path.exists() or {item.name for item in path.iterdir()} <= {".lock"}:
        return
    named = (*_FILES, *(f"keys/{key}" for key in _KEYS), "keys", "checkpoints", *_LEDGER)
    left = [path / name for name in named]
    strange = not {*path.iterdir(), *path.glob("*/*")} <= {*left, path / ".lock"}
    if strange or not (path / LEDGER).exists():
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
    with Ledger(path, read_only=True) as ledger:
        records = list(ledger.records())
    engines = {record.body.get("engine") for record in records if record.kind == "run"}
    return {record.kind for record in records} <= _KINDS and engines in ({FLOWER}, {SIMULATED})


def _used(path: Path) -> StoreError:
    return StoreError(
        f"{path}: not empty, and a Flower run cannot be resumed: give a new folder. To go on from the last "
        f"model in this one, start with fedmerit.flower.last_model({str(path)!r}, initial_arrays)"
        + (f"; {SETTLE}" if is_open(path) else "")
    )


SETTLE = "what was trained in it can still be settled: strategy.settle(grid=grid, initial_arrays=arrays)"


def is_open(path: Path) -> bool:
    """Return whether a folder holds a run with rounds that members are to settle, and that has no end."""
    try:
        with Ledger(path / LEDGER, read_only=True) as ledger:
            kinds = {record.kind for record in ledger.records()}
            return "schedule" in kinds and "end" not in kinds and config_of(ledger).settles
    except FedmeritError:
        return False


def last_model(folder: str | Path, like: ArrayRecord) -> ArrayRecord:
    """Return the model after the last round in a run folder, from which to start a new run in a new folder.

    It comes from the checkpoint of the last round in the ledger. If the strategy has a server optimiser, this
    is the average before the optimiser acted; the optimiser's own state is not kept.

    Args:
        folder: the folder of the run whose server died.
        like: a model with the same names, shapes and types, such as a fresh one; arrays of integers are
            taken from it.

    Raises:
        LedgerError: the folder holds no readable ledger.
        StoreError: no round is over in that folder, its checkpoint is gone or damaged, or it belongs to
            another model than ``like``.
    """
    path, shape = Path(folder), Shape.of(like)
    with Ledger(path / LEDGER, read_only=True) as ledger:
        rounds = list(ledger.records("round"))
    if not rounds:
        raise StoreError(f"{path}: no round is over; start from the first model, in a new folder")
    number, digest = int(rounds[-1].body["round"]), str(rounds[-1].body["checkpoint"])
    model = read_checkpoint(checkpoint_in(path, "model", number), number, digest)["model"]
    expected = shape.vector.size
    if model.shape != (expected,):
        raise StoreError(
            f"{path}: the model of round {number} has {model.size} numbers, but the given one has {expected}"
        )
    return shape.record(model)


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
        raise ConfigError("rehearsal: expected a folder for everybody's keys, got an empty text")
    path = Path(folder) / "roster.toml"
    if path.exists():
        if (there := read_roster(path).names) != tuple(names):
            raise ConfigError(
                f"{path} lists {', '.join(there)}, expected {', '.join(names)}: take a new folder"
            )
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    members = [Member(name, new_key(path.with_name(f"{name}.pem"))) for name in names]
    write_roster(path, Roster(members, new_key(path.with_name("server.pem"))))
    return path


def pool_key(path: Path) -> bytes:
    """Return the secret of a run's test pool."""
    file = path / "keys" / "pool.key"
    try:
        key = file.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{file}: the key of the test pool is gone, and nobody can open it: {error}"
        ) from error
    if len(key) != KEY_BYTES:
        raise StoreError(f"{file}: damaged: expected {KEY_BYTES} bytes, got {len(key)}")
    return key
