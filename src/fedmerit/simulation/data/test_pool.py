"""Which test samples everybody is measured on: as many of each class, or all of them."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedmerit.errors import DataError
from fedmerit.protocol.pool import KEY_BYTES, Labels, Pool, span_of
from fedmerit.simulation.data.dataset import Dataset


def choose_pool(
    dataset: Dataset,
    size: int | Literal["all"],
    rng: np.random.Generator,
    *,
    key: bytes,
    utility_hash: str,
    reveal: str = "fixed",
    rounds: int = 1,
) -> Pool:
    """Choose ``size`` test samples, as many of each class (numbers differ by at most one), and cut them.

    The samples of each class are shuffled and then taken in turn, one of every class, so that any consecutive
    slice is as balanced as the pool. ``size`` 0 or "all" takes the whole test set as it is, unbalanced; its
    slices then follow the class proportions of the whole.

    Args:
        dataset: only its test half is used.
        size: samples in the pool.
        rng: chooses and orders; equal state, equal pool.
        key: 32 secret bytes that the salts are derived from. Whoever has it can test guesses of test images.
        utility_hash: SHA-256, as 64 hex digits, of the definition of the utilities; part of the commitment.
        reveal: "fixed" or "per-round".
        rounds: number of slices for "per-round".
    """
    if len(key) != KEY_BYTES:
        raise DataError(f"the pool key must have {KEY_BYTES} bytes, got {len(key)}")
    if len(utility_hash) != 64 or set(utility_hash) - set("0123456789abcdef"):
        raise DataError(f"utility_hash must be 64 lower-case hex digits, got {utility_hash!r}")
    if reveal not in ("fixed", "per-round"):
        raise DataError(f"test_reveal must be fixed or per-round, got {reveal!r}")
    if rounds < 1:
        raise DataError(f"expected at least 1 round, got {rounds}")
    whole = size in (0, "all")
    if not whole and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        raise DataError(
            f'test_size must be a number of samples, or 0 or "all" for the whole set, got {size!r}'
        )
    counts = np.bincount(dataset.y_test, minlength=len(dataset.classes))
    absent = [name for name, count in zip(dataset.classes, counts, strict=True) if not count]
    if absent:
        raise DataError(f"{dataset.name}: class {absent[0]!r} has no test sample")
    total = len(dataset.y_test) if whole else int(size)
    if not whole:
        _check_fits(dataset, counts, total)
    slices = rounds if reveal == "per-round" else 1
    if total // slices < len(counts):
        raise DataError(
            f"a pool of {total} cut into {slices} slices leaves {total // slices} samples each, fewer than "
            f"the {len(counts)} classes: expected test_size of at least {slices * len(counts)}"
        )

    # Classes in random order, but those that can give one more than the others come first.
    order = rng.permutation(len(counts))
    order = order[np.argsort(counts[order] <= total // len(counts), kind="stable")]
    place = np.empty(len(dataset.y_test))
    turn = np.empty(len(dataset.y_test))
    for position, c in enumerate(order):
        members = rng.permutation(np.flatnonzero(dataset.y_test == c))
        place[members] = (np.arange(len(members)) + 0.5) / len(members) if whole else np.arange(len(members))
        turn[members] = position
    indices = np.lexsort((turn, place))[:total].astype(np.int64)
    pool = Pool(
        indices=indices,
        x=dataset.x_test[indices],
        y=dataset.y_test[indices],
        slices=slices,
        balanced=not whole,
        classes=len(counts),
        utility_hash=utility_hash,
        key=bytes(key),
    )
    for s in range(slices):
        lacking = set(range(len(counts))) - set(pool.y[span_of(total, slices, s)].tolist())
        if lacking:
            raise DataError(
                f"test slice {s} of {slices} has no sample of class {dataset.classes[min(lacking)]!r}: "
                "expected fewer rounds or a balanced pool"
            )
    return pool


def _check_fits(dataset: Dataset, counts: Labels, size: int) -> None:
    """The largest balanced pool holds min(counts) of every class, and one more of those that have it."""
    least = int(counts.min())
    fits = least * len(counts) + int((counts > least).sum())
    if size > fits:
        scarce = dataset.classes[int(counts.argmin())]
        raise DataError(
            f"{dataset.name}: a balanced test pool of {size} needs {size // len(counts)} or more samples of "
            f"every class, but class {scarce!r} has {least}: expected test_size of at most {fits}"
        )
