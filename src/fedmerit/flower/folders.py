"""What a run folder is good for after its server: to be used again if no round began, or its last model."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord

from fedmerit.errors import StoreError
from fedmerit.federation.journal import FLOWER, SIMULATED
from fedmerit.flower.arrays import Shape
from fedmerit.layout import LEDGER
from fedmerit.ledger import Ledger
from fedmerit.store import checkpoint_in, held, read_checkpoint

_FILES = ("config.toml", "notes.txt", "scores.csv", "scores.json")
_LEDGER = (f"{LEDGER}-wal", f"{LEDGER}-shm", LEDGER)
"""Last, since it says that the rest may go."""
_KEYS = ("pool.key", "server.pem")
_KINDS = {"run", "pool", "join"}
"""Records of a start that came to no round."""


def make_free(path: Path) -> None:
    """Remove what a start left in which too few joined; refuse a folder that holds anything else.

    Before the first schedule nobody was asked for anything, so nothing is lost. A folder with a schedule is
    never touched.
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
        f"{path}: not empty; a Flower run cannot be resumed, give a new folder; to go on from the last model "
        f"in this one, start with fedmerit.flower.last_model({str(path)!r}, initial_arrays)"
    )


def last_model(folder: str | Path, like: ArrayRecord) -> ArrayRecord:
    """The model after the last round in a run folder, to start a new run in a new folder from.

    It is read from the checkpoint of the last round that the ledger holds. Where the strategy has a server
    optimiser, this is the average before the optimiser acted; the optimiser's own state is not kept.

    Args:
        folder: of the run whose server died.
        like: a model with the same names, shapes and types, such as a fresh one; arrays of integers are
            taken from it.

    Raises:
        LedgerError: the folder holds no ledger that can be read.
        StoreError: no round is over in that folder, its checkpoint is gone or damaged, or it is of another
            model than ``like``.
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
            f"{path}: the model of round {number} has {model.size} numbers, the one given has {expected}"
        )
    return shape.record(model)
