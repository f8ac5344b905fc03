"""A dataset in memory (samples, targets, class names, groups), and the test pool chosen from it."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmerit.errors import ConfigError, DataError, FileFormatError
from fedmerit.protocol.pool import KEY_BYTES, Images, Labels, Pool, apart, parts_of, span_of
from fedmerit.scoring.spreadsheets import Sheet, read_sheet

# -------------------------------------------------------------------------------------------------- tables
# Readers of .npz files, and of CSV files with a header in any form that spreadsheet programs write.


def sheet(file: Path, *columns: str) -> Sheet:
    """Return the table in a CSV file. The columns ``columns`` must exist."""
    try:
        return read_sheet(file, columns)
    except FileFormatError as error:
        raise DataError(str(error)) from error


def rows(file: Path, *columns: str) -> list[tuple[int, Mapping[str, str]]]:
    """Return (line number, cells by column) of every row of such a table."""
    return list(sheet(file, *columns).rows)


def arrays(file: Path) -> dict[str, Any]:
    """Return all arrays of an .npz file; refuse pickled objects."""
    try:
        with file.open("rb") as raw:
            content = np.load(raw, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise DataError(f"{file}: holds a single array, expected an .npz file")
            return {key: _array(file, content, key) for key in content.files}
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: cannot be read as .npz: {error}") from error


def _array(file: Path, content: Any, key: str) -> Any:
    """Return one array of an .npz file, if it holds no Python objects."""
    try:
        return content[key]
    except ValueError:
        if not _holds_objects(content, key):
            raise
    name = "groups" if key == "group_train" else key
    raise DataError(
        f"{file}: array {key} holds Python objects (dtype object, which pandas gives for text), and these "
        f"are refused: save text as np.asarray({name}, dtype=str), numbers with a dtype of numbers"
    )


def _holds_objects(content: Any, key: str) -> bool:
    with content.zip.open(f"{key}.npy") as raw:
        first = np.lib.format.read_magic(raw) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        return bool(read(raw)[2].hasobject)


# --------------------------------------------------------------------------------------------- the dataset

Groups = npt.NDArray[Any]
"""Hospital, centre or slide of each sample, strings or integers, shape (samples,)."""


REAL = "whole numbers are classes; store y as floats if they are real numbers"
Target = Literal["classes", "numbers", "arrays"]
"""What y is: class numbers, one real number per sample, or an array per sample."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset:
    """Training and test samples with their targets. They are checked and brought to one form on creation.

    Args:
        name: used in messages and records.
        x_train: (n, h, w, c) or (n, h, w) for images, or (n, ...); floats (kept as float32), uint8, or other
            integers (kept as int64, such as tokens).
        y_train: with ``classes``, (n,) or (n, 1) integers in 0 .. len(classes) - 1, of which every class must
            occur. Without, (n,) or (n, 1) real numbers (kept as float32), or arrays (n, ...) of numbers.
        x_test: like ``x_train``, with samples of the same shape and type.
        y_test: like ``y_train``, but a class may be absent (then a balanced test pool is refused).
        classes: names by class number; empty if y is no class.
        group_train: (n,) strings or integers: who recorded each training sample. None if unknown.
        notes: what readers of results must know, such as licence, re-encoding or dropped images.
        images: whether x of shape (n, a, b) are grey images; False leaves them as they are.
    """

    name: str
    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    classes: tuple[str, ...] = ()
    group_train: Groups | None = None
    notes: tuple[str, ...] = ()
    images: bool = True

    def __post_init__(self) -> None:
        classes = tuple(str(name) for name in self.classes)
        if len(classes) == 1:
            raise DataError(f"{self.name}: expected at least 2 classes, or none where y is no class, got 1")
        if len(set(classes)) < len(classes):
            twice = next(name for name in classes if classes.count(name) > 1)
            raise DataError(f"{self.name}: class name {twice!r} appears twice")
        object.__setattr__(self, "classes", classes)
        for part in ("train", "test"):
            x = _samples(getattr(self, f"x_{part}"), f"{self.name}: x_{part}", images=self.images)
            what, given = f"{self.name}: y_{part}", getattr(self, f"y_{part}")
            y = _labels(given, what, classes) if classes else _targets(given, what)
            if len(x) != len(y):
                raise DataError(f"{self.name}: {len(x)} samples in x_{part} but {len(y)} labels in y_{part}")
            object.__setattr__(self, f"x_{part}", x)
            object.__setattr__(self, f"y_{part}", y)
        for what, train, test in (("samples", self.x_train, self.x_test), ("y", self.y_train, self.y_test)):
            if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
                kinds = [f"{'x'.join(map(str, x.shape[1:])) or 'one'} {x.dtype}" for x in (train, test)]
                raise DataError(f"{self.name}: training {what} are {kinds[0]}, test {what} {kinds[1]}")
        self._check_values()
        if self.group_train is not None:
            groups = np.asarray(self.group_train)
            if groups.shape != (len(self.y_train),) or groups.dtype.kind not in "iuU":
                raise DataError(
                    f"{self.name}: group_train must hold one string or integer per training sample "
                    f"({len(self.y_train)}), got {groups.dtype} of shape {groups.shape}"
                )
            object.__setattr__(self, "group_train", groups)

    def _check_values(self) -> None:
        """Refuse a class without a training sample, and a number that is always the same."""
        if self.classes:
            missing = np.flatnonzero(np.bincount(self.y_train, minlength=len(self.classes)) == 0)
            if missing.size:
                name = self.classes[missing[0]]
                hint = f": {REAL}" if name.isdigit() else ""
                raise DataError(f"{self.name}: class {name!r} has no training sample{hint}")
        elif bool((self.y_train == self.y_train[:1]).all()):
            raise DataError(
                f"{self.name}: y_train is the same for every sample, so there is nothing to learn"
            )

    @property
    def target(self) -> Target:
        """What y is."""
        return "classes" if self.classes else "numbers" if self.y_train.ndim == 1 else "arrays"


def _samples(x: Images, what: str, *, images: bool) -> Images:
    x = np.asarray(x)
    if x.ndim == 3 and images and (x.dtype == np.uint8 or x.dtype.kind == "f"):
        x = x[..., np.newaxis]
    if x.ndim < 2 or 0 in x.shape:
        raise DataError(
            f"{what} must have shape (n, height, width, channels) for images, or (n, ...), none of them 0, "
            f"got {x.shape}"
        )
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    return _numbers(x, what)


def _targets(y: Labels, what: str) -> Labels:
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim < 1 or 0 in y.shape:
        raise DataError(f"{what} must have shape (n,) or (n, ...), none of them 0, got {y.shape}")
    if y.ndim == 1 and y.dtype.kind in "iub":  # one number per sample is a real one
        y = y.astype(np.float32)
    return _numbers(y, what)


def _numbers(values: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    """Return finite floats as float32, and integers and truth values as int64."""
    if values.dtype.kind in "iub":
        return np.ascontiguousarray(values, dtype=np.int64)
    if values.dtype.kind != "f":
        raise DataError(f"{what} must be numbers, got {values.dtype}")
    with np.errstate(over="ignore"):  # found below
        values = np.ascontiguousarray(values, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if bad.size:
        raise DataError(f"{what}: sample {bad[0]} holds a value that is not finite")
    return values


def _labels(y: Labels, what: str, classes: tuple[str, ...]) -> Labels:
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "iub":
        raise DataError(
            f"{what} must be integers of shape (n,), because classes are named, got {y.dtype} of shape "
            f"{y.shape}; without names of classes, y may be real numbers or arrays"
        )
    y = y.astype(np.int64)
    bad = np.flatnonzero((y < 0) | (y >= len(classes)))
    if bad.size:
        hint = f": {REAL}" if classes[0].isdigit() else ""
        raise DataError(
            f"{what}: label {y[bad[0]]} of sample {bad[0]} is outside 0 .. {len(classes) - 1}{hint}"
        )
    return y


# ------------------------------------------------------------------------------------------- the test pool
# The test samples on which all members are measured: equally many of each class, or all samples. Where y is
# no class, they are drawn at random.


def choose_pool(
    dataset: Dataset,
    size: int | Literal["all"],
    rng: np.random.Generator,
    *,
    key: bytes,
    utility_hash: str,
    reveal: str = "fixed",
    rounds: int = 1,
    method: str = "reports",
    blocks: int = 1,
) -> Pool:
    """Choose ``size`` test samples, balanced over classes (counts differ by at most one), and slice them.

    The samples of each class are shuffled and then taken in turn, one of every class, so that any consecutive
    slice is as balanced as the pool. ``size`` 0 or "all" takes the whole test set, unbalanced; its slices
    then follow the class proportions of the whole. Where y is no class, the samples are drawn at random.

    Args:
        dataset: only its test half is used.
        size: samples in the pool.
        rng: chooses and orders the samples; the same state gives the same pool.
        key: 32 secret bytes from which the salts are derived. Whoever has them can test guesses of images.
        utility_hash: SHA-256 of the utilities' definitions as 64 hex digits; part of the commitment.
        reveal: "fixed" or "per-round"; "end" with the method "settled".
        rounds: number of slices for "per-round".
        method: "reports", or "both" or "settled", which leave half or all of the pool to the settlement.
        blocks: of the settlement's samples; it needs at least one sample for each.
    """
    if len(key) != KEY_BYTES:
        raise DataError(f"the pool key must have {KEY_BYTES} bytes, got {len(key)}")
    if len(utility_hash) != 64 or set(utility_hash) - set("0123456789abcdef"):
        raise DataError(f"utility_hash must be 64 lower-case hex digits, got {utility_hash!r}")
    indices, slices, settled = pool_order(
        dataset, size, rng, reveal=reveal, rounds=rounds, method=method, blocks=blocks
    )
    return Pool(
        indices=indices,
        x=dataset.x_test[indices],
        y=dataset.y_test[indices],
        slices=slices,
        balanced=bool(dataset.classes) and size not in (0, "all"),
        classes=len(dataset.classes),
        utility_hash=utility_hash,
        key=bytes(key),
        settled=settled,
    )


def pool_order(
    dataset: Dataset,
    size: int | Literal["all"],
    rng: np.random.Generator,
    *,
    reveal: str = "fixed",
    rounds: int = 1,
    method: str = "reports",
    blocks: int = 1,
) -> tuple[npt.NDArray[np.int64], int, int]:
    """Return the test samples of a pool in their order, its slices, and how many samples are settled.

    The arguments are those of `choose_pool`.

    Raises:
        ConfigError: the pool is too small for rounds and settlement.
        DataError: it cannot be chosen, a slice would lack a class, or copies of samples cannot be kept
            together (see `apart`).
    """
    allowed = ("end",) if method == "settled" else ("fixed", "per-round")
    if reveal not in allowed:
        raise DataError(f"test_reveal must be {' or '.join(allowed)}, got {reveal!r}")
    if rounds < 1:
        raise DataError(f"expected at least 1 round, got {rounds}")
    whole = size in (0, "all")
    if not whole and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        raise DataError(
            f'test_size must be a number of samples, or 0 or "all" for the whole set, got {size!r}'
        )
    if not dataset.classes:
        total = len(dataset.y_test) if whole else int(size)
        if total > len(dataset.y_test):
            raise ConfigError.at(
                "data.test_size",
                f"expected at most the {len(dataset.y_test)} test samples of {dataset.name}, got {total}",
            )
        slices, settled = parts_of(total, method=method, reveal=reveal, rounds=rounds)
        if method != "reports":
            _check_parts(total, 1, method, slices - 1, blocks)
        elif total < 2 * slices:
            raise ConfigError.at(
                "data.test_size",
                f"expected at least {2 * slices} samples, 2 for each of {slices} slices, got {total}",
            )
        indices = rng.permutation(len(dataset.y_test))[:total].astype(np.int64)
        return apart(indices, dataset.x_test, dataset.y_test, settled, by_class=False), slices, settled
    counts = np.bincount(dataset.y_test, minlength=len(dataset.classes))
    absent = [name for name, count in zip(dataset.classes, counts, strict=True) if not count]
    if absent:
        raise DataError(f"{dataset.name}: class {absent[0]!r} has no test sample")
    total = len(dataset.y_test) if whole else int(size)
    if not whole:
        _check_fits(dataset, counts, total)
    slices, settled = parts_of(total, method=method, reveal=reveal, rounds=rounds)
    if method != "reports":
        _check_parts(total, len(counts), method, slices - 1, blocks)
    elif total // slices < len(counts):
        raise DataError(
            f"a pool of {total} cut into {slices} slices leaves {total // slices} samples each, fewer than "
            f"the {len(counts)} classes: expected test_size of at least {slices * len(counts)}"
        )

    # Classes in random order, except that those with enough samples to give one more come first.
    order = rng.permutation(len(counts))
    order = order[np.argsort(counts[order] <= total // len(counts), kind="stable")]
    place = np.empty(len(dataset.y_test))
    turn = np.empty(len(dataset.y_test))
    for position, c in enumerate(order):
        members = rng.permutation(np.flatnonzero(dataset.y_test == c))
        place[members] = (np.arange(len(members)) + 0.5) / len(members) if whole else np.arange(len(members))
        turn[members] = position
    indices = np.lexsort((turn, place))[:total].astype(np.int64)
    y = dataset.y_test[indices]
    for s in range(slices):
        lacking = set(range(len(counts))) - set(y[span_of(total, slices, s, settled)].tolist())
        if lacking:
            raise DataError(
                f"test slice {s} of {slices} has no sample of class {dataset.classes[min(lacking)]!r}: "
                "expected fewer rounds or a balanced pool"
            )
    return apart(indices, dataset.x_test, dataset.y_test, settled, by_class=True), slices, settled


def _check_parts(total: int, classes: int, method: str, for_rounds: int, blocks: int) -> None:
    """Raise `ConfigError` if a pool is too small for slices of rounds and for the settlement."""
    settlement = max(classes, blocks)
    least = max(2 * for_rounds * classes - 1, 2 * settlement) if for_rounds else settlement
    if total < least:
        parts = "the settlement"
        if for_rounds:
            parts = f"{for_rounds} slices for rounds and a half for the settlement"
        raise ConfigError.at(
            "data.test_size",
            f"expected at least {least} samples with scoring.method = {method!r}, for {parts}, each with all "
            f"{classes} classes, and {blocks} blocks (settlement.blocks), got {total}",
        )


def _check_fits(dataset: Dataset, counts: Labels, size: int) -> None:
    """Raise `DataError` if the pool needs more than min(counts) per class, plus one from larger classes."""
    least = int(counts.min())
    fits = least * len(counts) + int((counts > least).sum())
    if size > fits:
        scarce = dataset.classes[int(counts.argmin())]
        raise DataError(
            f"{dataset.name}: a balanced test pool of {size} needs {size // len(counts)} or more samples of "
            f"every class, but class {scarce!r} has {least}: expected test_size of at most {fits}"
        )
