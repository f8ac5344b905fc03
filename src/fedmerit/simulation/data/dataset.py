"""A dataset in memory: images, labels, class names, and who recorded what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import DataError
from fedmerit.protocol.pool import Images, Labels

Groups = npt.NDArray[Any]
"""Hospital, centre or slide of each sample, strings or integers, shape (samples,)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """Training and test images with labels. Checked and brought to one form when made.

    Args:
        name: for messages and records.
        x_train: (n, h, w, c) or (n, h, w); uint8, or floats (kept as float32).
        y_train: (n,) or (n, 1) integers in 0 .. len(classes) - 1; every class occurs.
        x_test: as ``x_train``, images of the same shape and kind.
        y_test: as ``y_train``, but a class may be absent (a balanced test pool then refuses).
        classes: names, by class number.
        group_train: (n,) strings or integers: who recorded the training image. None if unknown.
        notes: what a reader of results must know: licence, re-encoding, dropped images.
    """

    name: str
    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    classes: tuple[str, ...]
    group_train: Groups | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        classes = tuple(str(name) for name in self.classes)
        if len(classes) < 2:
            raise DataError(f"{self.name}: expected at least 2 classes, got {len(classes)}")
        if len(set(classes)) < len(classes):
            twice = next(name for name in classes if classes.count(name) > 1)
            raise DataError(f"{self.name}: class name {twice!r} appears twice")
        object.__setattr__(self, "classes", classes)
        for part in ("train", "test"):
            x = _images(getattr(self, f"x_{part}"), f"{self.name}: x_{part}")
            y = _labels(getattr(self, f"y_{part}"), f"{self.name}: y_{part}", len(classes))
            if len(x) != len(y):
                raise DataError(f"{self.name}: {len(x)} images in x_{part} but {len(y)} labels in y_{part}")
            object.__setattr__(self, f"x_{part}", x)
            object.__setattr__(self, f"y_{part}", y)
        train, test = self.x_train, self.x_test
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            kinds = [f"{'x'.join(map(str, x.shape[1:]))} {x.dtype}" for x in (train, test)]
            raise DataError(f"{self.name}: training images are {kinds[0]}, test images {kinds[1]}")
        missing = np.flatnonzero(np.bincount(self.y_train, minlength=len(classes)) == 0)
        if missing.size:
            raise DataError(f"{self.name}: class {classes[missing[0]]!r} has no training image")
        if self.group_train is not None:
            groups = np.asarray(self.group_train)
            if groups.shape != self.y_train.shape or groups.dtype.kind not in "iuU":
                raise DataError(
                    f"{self.name}: group_train must hold one string or integer per training image "
                    f"({len(self.y_train)}), got {groups.dtype} of shape {groups.shape}"
                )
            object.__setattr__(self, "group_train", groups)


def _images(x: Images, what: str) -> Images:
    x = np.asarray(x)
    if x.ndim == 3:
        x = x[..., np.newaxis]
    if x.ndim != 4 or 0 in x.shape:
        raise DataError(f"{what} must have shape (n, height, width, channels), none of them 0, got {x.shape}")
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    if x.dtype.kind != "f":
        raise DataError(f"{what} must be uint8 or floating point, got {x.dtype}")
    x = np.ascontiguousarray(x, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(x).all(axis=(1, 2, 3)))
    if bad.size:
        raise DataError(f"{what}: image {bad[0]} holds a value that is not finite")
    return x


def _labels(y: Labels, what: str, classes: int) -> Labels:
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{what} must be integers of shape (n,), got {y.dtype} of shape {y.shape}")
    bad = np.flatnonzero((y < 0) | (y >= classes))
    if bad.size:
        raise DataError(f"{what}: label {y[bad[0]]} of image {bad[0]} is outside 0 .. {classes - 1}")
    return y.astype(np.int64)
