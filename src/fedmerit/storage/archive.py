"""What the server keeps of every round for the settlement: sums, models, directions, proofs of masks.

One file of arrays per kind and round in ``DIR/archive``::

    round-0003       X, the integers that were summed, and M0 unless it is the M of the round before
    masks-0003       the signed lists of the round, and the secrets that were rebuilt to unmask its sum
    direction-0003   g, the public direction as integers
    words-0003       masked words that members sent again, where an equation failed
    messages/        if somebody was away: the signed messages to which it can still answer with its statement

Whoever has the folder, the ledger and the test pool can recompute every number of the settlement
(``fedmerit verify DIR --archive``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import StoreError
from fedmerit.storage.run_folder import safetensors, write

ARCHIVE = "archive"


class FolderArchive:
    """A `protocol.clearing.Archive` in a folder; every file carries its own checksum.

    Args:
        path: the folder; made when something is first kept.
    """

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
        arrays: dict[str, npt.NDArray[Any]] = safetensors().load(data[32:])
        return arrays

    def has(self, kind: str, number: int) -> bool:
        """Return whether there is such a file."""
        return self._file(kind, number).exists()

    def drop(self, kind: str, number: int) -> None:
        """Delete a file."""
        self._file(kind, number).unlink(missing_ok=True)

    def _file(self, kind: str, number: int) -> Path:
        return self.path / f"{kind}-{number:04d}.arrays"
