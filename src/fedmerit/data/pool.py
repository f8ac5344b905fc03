"""The test pool that all clients are measured on, committed before the first round.

The pool is put in one random order and cut into consecutive slices: a single one that serves every round
(``reveal="fixed"``), or one per round, each revealed once (``reveal="per-round"``). What is published before
round 1 binds every image, every label and the order, and tells nothing about them::

    sample  = "fedmerit/sample/1 <dtype> <h>x<w>x<c> label <y>\\n" + pixels, C order, little-endian
    salt_k  = HMAC-SHA256(pool key, "fedmerit/salt/1" + k as u64)          k = place in the pool
    leaf_k  = SHA-256(0x00 + salt_k + sample_k)
    slice_s = SHA-256(0x02 + s as u32 + samples in it as u32 + merkle(its leaves))
    root    = merkle(all slices)              merkle: RFC 6962, node = SHA-256(0x01 + left + right)

A revealed `Slice` carries its samples, their salts and its path to the root; `Slice.verify` is what a client
calls before it evaluates anything. Salts of other slices cannot be derived from revealed ones.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedmerit.data import merkle
from fedmerit.data.dataset import Dataset, Images, Labels
from fedmerit.data.partitions import Indices
from fedmerit.errors import BindingError, DataError

Commitment = dict[str, int | str]
"""version, root (hex), size, slices, classes, balanced (0 or 1), utility (hex): integers and strings only."""

KEY_BYTES = SALT_BYTES = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class Slice:
    """Test samples of a round and the proof that they were committed to.

    ``id`` is the SHA-256 of the samples in order, without salts: equal samples, equal id, in any run.
    """

    index: int
    x: Images
    y: Labels
    salts: bytes
    path: tuple[bytes, ...]
    id: str = field(init=False)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise BindingError(f"test slice {self.index} has {len(self.x)} images and {len(self.y)} labels")
        object.__setattr__(self, "id", slice_id(self.x, self.y))

    def verify(self, commitment: Mapping[str, Any], round: int | None = None) -> None:
        """Raise `BindingError` unless exactly these samples were committed to (for this ``round``, if given).

        Args:
            commitment: what was published before round 1.
            round: counted from 1; with one slice per round, only slice ``round`` will do.
        """
        try:
            version, root = commitment["version"], bytes.fromhex(commitment["root"])
            size, slices = int(commitment["size"]), int(commitment["slices"])
        except (KeyError, TypeError, ValueError) as error:
            raise BindingError(f"not the commitment of a test pool: {error!r}") from error
        if version != 1:
            raise BindingError(f"test pool commitment of version {version!r}, expected 1")
        if not 0 <= self.index < slices:
            raise BindingError(f"test slice {self.index} was not committed: the pool has {slices}")
        expected = 0 if slices == 1 or round is None else round - 1
        if round is not None and self.index != expected:
            raise BindingError(f"round {round} is measured on test slice {expected}, got slice {self.index}")
        span, m = _span(size, slices, self.index), len(self.y)
        if not m == len(self.salts) / SALT_BYTES == span.stop - span.start:
            raise BindingError(f"test slice {self.index} has {m} samples, which is not what was committed")
        salts = [self.salts[k : k + SALT_BYTES] for k in range(0, len(self.salts), SALT_BYTES)]
        node = _slice_node(self.index, _leaves(self.x, self.y, salts))
        if merkle.climb(node, self.index, slices, self.path) != root or self.id != slice_id(self.x, self.y):
            raise BindingError(f"test slice {self.index} differs from what was committed before round 1")


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool:
    """The chosen test samples in committed order; made by `choose_pool`. ``key`` must stay secret."""

    indices: Indices
    x: Images
    y: Labels
    slices: int
    balanced: bool
    classes: int
    utility_hash: str
    key: bytes = field(repr=False)
    nodes: tuple[bytes, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        salts = [_salt(self.key, k) for k in range(len(self.y))]
        leaves = _leaves(self.x, self.y, salts)
        nodes = [_slice_node(s, leaves[_span(len(leaves), self.slices, s)]) for s in range(self.slices)]
        object.__setattr__(self, "nodes", tuple(nodes))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def commitment(self) -> Commitment:
        """To be published before round 1."""
        return {
            "version": 1,
            "root": merkle.root(self.nodes).hex(),
            "size": len(self.y),
            "slices": self.slices,
            "classes": self.classes,
            "balanced": int(self.balanced),
            "utility": self.utility_hash,
        }

    def slice(self, round: int) -> Slice:
        """What ``round`` (counted from 1) is measured on."""
        if round < 1 or (self.slices > 1 and round > self.slices):
            raise DataError(
                f"round {round} has no test slice: the pool was cut for rounds 1 .. {self.slices}"
            )
        index = 0 if self.slices == 1 else round - 1
        span = _span(len(self.y), self.slices, index)
        salts = b"".join(_salt(self.key, k) for k in range(span.start, span.stop))
        path = merkle.path(self.nodes, index)
        return Slice(index=index, x=self.x[span], y=self.y[span], salts=salts, path=path)


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
        lacking = set(range(len(counts))) - set(pool.y[_span(total, slices, s)].tolist())
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


def slice_id(x: Images, y: Labels) -> str:
    """SHA-256 of the SHA-256 of every sample, in order."""
    each = (hashlib.sha256(_sample(image, label)).digest() for image, label in zip(x, y, strict=True))
    return hashlib.sha256(b"fedmerit/slice/1" + b"".join(each)).hexdigest()


def _sample(image: Images, label: Any) -> bytes:
    image = np.ascontiguousarray(image, dtype=image.dtype.newbyteorder("<"))
    shape = "x".join(map(str, image.shape))
    return f"fedmerit/sample/1 {image.dtype.str} {shape} label {label}\n".encode() + image.tobytes()


def _salt(key: bytes, k: int) -> bytes:
    return hmac.digest(key, b"fedmerit/salt/1" + k.to_bytes(8, "big"), "sha256")


def _leaves(x: Images, y: Labels, salts: Sequence[bytes]) -> list[bytes]:
    return [
        hashlib.sha256(b"\x00" + salt + _sample(image, label)).digest()
        for image, label, salt in zip(x, y, salts, strict=True)
    ]


def _slice_node(index: int, leaves: Sequence[bytes]) -> bytes:
    head = b"\x02" + index.to_bytes(4, "big") + len(leaves).to_bytes(4, "big")
    return hashlib.sha256(head + merkle.root(leaves)).digest()


def _span(size: int, slices: int, index: int) -> slice:
    """Places of slice ``index`` in the pool; sizes differ by at most one, larger ones first."""
    least, more = divmod(size, slices)
    start = index * least + min(index, more)
    return slice(start, start + least + (index < more))
