"""PatchCamelyon: ``camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5``, read in slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedmerit.errors import DataError, MissingExtra
from fedmerit.protocol.pool import Images
from fedmerit.simulation.data.dataset import Dataset, Groups
from fedmerit.simulation.data.tables import rows

ROWS = 2048
"""Images read at a time."""


def pcam(path: Path, *, limit: int | None = None, test: str = "test") -> Dataset:
    """Patches with a tumour in the centre or not: data sets ``x`` (n, 96, 96, 3) and ``y`` (n, 1, 1, 1).

    Args:
        path: the folder of the unpacked files. ``..._train_meta.csv``, if there, gives the slide as group.
        limit: read only the first so many images of each half (the whole training half needs 7.2 GB).
        test: which half to test on, "test" or "valid".
    """
    if test not in ("test", "valid"):
        raise DataError(f"pcam: test must be test or valid, got {test!r}")
    if limit is not None and limit < 1:
        raise DataError(f"pcam: limit must be at least 1, got {limit}")
    halves: dict[str, Any] = {}
    for part, split in (("train", "train"), ("test", test)):
        for key in ("x", "y"):
            halves[f"{key}_{part}"] = _read(
                path / f"camelyonpatch_level_2_split_{split}_{key}.h5", key, limit
            )
        halves[f"y_{part}"] = halves[f"y_{part}"].reshape(len(halves[f"y_{part}"]), -1)
    return Dataset(
        name="pcam",
        **halves,
        classes=("normal", "tumour"),
        group_train=_slides(path / "camelyonpatch_level_2_split_train_meta.csv", len(halves["y_train"])),
        notes=("PatchCamelyon (B. Veeling et al., 2018): CC0",),
    )


def _read(file: Path, key: str, limit: int | None) -> Images:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtra("reading PCam's HDF5 files needs h5py: pip install 'fedmerit[data]'") from error
    if not file.is_file():
        packed = " (found it with .gz: unpack it first)" if Path(f"{file}.gz").exists() else ""
        raise DataError(f"{file}: no such file{packed}")
    try:
        with h5py.File(file, "r") as content:
            stored = content.get(key)
            if not isinstance(stored, h5py.Dataset) or not stored.shape:
                raise DataError(f"{file}: data set {key!r} is missing")
            n = len(stored) if limit is None else min(limit, len(stored))
            out = np.empty((n, *stored.shape[1:]), dtype=stored.dtype)
            for start in range(0, n, ROWS):
                out[start : start + ROWS] = stored[start : min(start + ROWS, n)]
            return out
    except DataError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as HDF5: {error}") from error


def _slides(file: Path, n: int) -> Groups | None:
    if not file.is_file():
        return None
    slides = [row["wsi"] for _, row in rows(file, "wsi")]
    if len(slides) < n:
        raise DataError(f"{file}: expected a slide for each of {n} images, got {len(slides)}")
    return np.array(slides[:n])
