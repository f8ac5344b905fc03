r"""The test pool that all members are measured on, committed before the first round.

The pool is put in one random order and cut into slices: one that serves every round (``reveal="fixed"``), or
one per round, each revealed once (``"per-round"``). If members settle, the last slice is the settlement's,
which never serves a round: half of the pool with the method "both", all of it with "settled". The commitment
published before round 1 binds every image, every label and their order, and reveals nothing about them::

    sample  = "fedmerit/sample/1 <dtype> <h>x<w>x<c> label <y>\n" + numbers of x, C order, little-endian
    sample  = "fedmerit/sample/2 <dtype> <shape> target <dtype> <shape>\n" + x + y    where y is an array
    salt_k  = HMAC-SHA256(pool key, "fedmerit/salt/1" + k as u64)          k = place in the pool
    leaf_k  = SHA-256(0x00 + salt_k + sample_k)
    slice_s = SHA-256(0x02 + s as u32 + samples in it as u32 + merkle(its leaves))
    root    = merkle(all slices)              merkle: RFC 6962, node = SHA-256(0x01 + left + right)
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, DataError, ReportError
from fedmerit.scoring.sampling import BLOCKS, Strata, degrees, is_whole, strata_for

# --------------------------------------------------------------------------------------------- Merkle tree


def merkle_root(nodes: Sequence[bytes]) -> bytes:
    """Return the root hash over ``nodes``; without any, that of nothing."""
    if not nodes:
        return hashlib.sha256(b"").digest()
    while len(nodes) > 1:
        nodes = _parents(nodes)
    return nodes[0]


def merkle_path(nodes: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """Return the siblings on the way from ``nodes[index]`` to the root."""
    siblings: list[bytes] = []
    while len(nodes) > 1:
        siblings += nodes[index ^ 1 : (index ^ 1) + 1]
        nodes, index = _parents(nodes), index // 2
    return tuple(siblings)


def merkle_climb(node: bytes, index: int, width: int, siblings: Sequence[bytes]) -> bytes | None:
    """Return the root above ``node``, number ``index`` of ``width``; None if the path has a wrong length."""
    rest = list(siblings)
    while width > 1:
        if index ^ 1 < width:
            if not rest:
                return None
            sibling = rest.pop(0)
            node = _parent(sibling, node) if index & 1 else _parent(node, sibling)
        index, width = index // 2, (width + 1) // 2
    return None if rest else node


def _parent(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _parents(nodes: Sequence[bytes]) -> list[bytes]:
    """Return the next level up; a node without a sibling moves up unchanged."""
    pairs = [_parent(left, right) for left, right in zip(nodes[::2], nodes[1::2], strict=False)]
    return pairs + list(nodes[2 * len(pairs) :])


# ------------------------------------------------------------------------------------------------ the pool

Images = npt.NDArray[Any]
"""Samples: images, uint8 in [0, 255] or float32 of shape (samples, height, width, channels); or any numbers
of shape (samples, ...)."""
Labels = npt.NDArray[Any]
"""Targets: class numbers 0 .. C-1 or real numbers, shape (samples,); or arrays, shape (samples, ...)."""
Indices = npt.NDArray[np.int64]
"""Places of samples in a dataset."""
Commitment = dict[str, int | str]
"""version, root (hex), size, slices, classes, balanced (0 or 1), utility (hex): integers and strings only.

With a settlement also ``settled``, the samples of its slice. ``slices`` counts that slice too.
"""

KEY_BYTES = SALT_BYTES = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class Slice:
    """Test samples of a round or of the settlement, and the proof that they were committed to.

    ``id`` is a SHA-256 over the samples in order, without salts: equal samples have equal ids in any run. It
    is computed unless whoever makes the slice has done so before.
    """

    index: int
    x: Images
    y: Labels
    salts: bytes
    path: tuple[bytes, ...]
    id: str = ""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise BindingError(f"test slice {self.index} has {len(self.x)} images and {len(self.y)} labels")
        if not self.id:
            object.__setattr__(self, "id", slice_id(self.x, self.y))

    def verify(self, commitment: Mapping[str, Any], use: int | Literal["settlement"]) -> None:
        """Raise `BindingError` unless the commitment binds just these samples to a round or the settlement.

        With one slice per round, it must be this round's.
        """
        checked = (dict(commitment), use)
        if self.__dict__.get("_checked") == checked:
            return  # members who share a process are shown the same slice
        try:
            version, root = commitment["version"], bytes.fromhex(commitment["root"])
            size, slices = int(commitment["size"]), int(commitment["slices"])
            settled = int(commitment.get("settled", 0))
            if not 0 <= settled <= size:
                raise ValueError(f"{settled} of {size} samples are settled")
        except (KeyError, TypeError, ValueError) as error:
            raise BindingError(f"not the commitment of a test pool: {error!r}") from error
        if version != 1:
            raise BindingError(f"test pool commitment of version {version!r}, expected 1")
        if not 0 <= self.index < slices:
            raise BindingError(f"test slice {self.index} was not committed: the pool has {slices}")
        for_rounds = slices - (settled > 0)
        if use == "settlement":
            if self.index < for_rounds:
                raise BindingError(f"test slice {self.index} is for a round, not for the settlement")
        elif self.index >= for_rounds:
            raise BindingError(f"test slice {self.index} is for the settlement, not for a round")
        elif self.index != (expected := 0 if for_rounds == 1 else use - 1):
            raise BindingError(f"round {use} is measured on test slice {expected}, got slice {self.index}")
        span, m = span_of(size, slices, self.index, settled), len(self.y)
        if not m == len(self.salts) / SALT_BYTES == span.stop - span.start:
            raise BindingError(
                f"test slice {self.index} has {m} samples and {len(self.salts)} bytes of salts, but "
                f"{span.stop - span.start} samples were committed"
            )
        salts = [self.salts[k : k + SALT_BYTES] for k in range(0, len(self.salts), SALT_BYTES)]
        node = _slice_node(self.index, _leaves(self.x, self.y, salts))
        if merkle_climb(node, self.index, slices, self.path) != root or self.id != slice_id(self.x, self.y):
            raise BindingError(f"test slice {self.index} differs from what was committed before round 1")
        self.__dict__["_checked"] = checked


@dataclass(frozen=True, eq=False, kw_only=True)
class Pool:
    """The chosen test samples in committed order; made by `choose_pool`. ``key`` must stay secret.

    ``settled``: how many samples at the end of the pool are the settlement's. ``slices`` counts their slice.
    """

    indices: Indices
    x: Images
    y: Labels
    slices: int
    balanced: bool
    classes: int
    utility_hash: str
    key: bytes = field(repr=False)
    settled: int = 0
    nodes: tuple[bytes, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        salts = [_salt(self.key, k) for k in range(len(self.y))]
        leaves = _leaves(self.x, self.y, salts)
        nodes = [_slice_node(s, leaves[self.span(s)]) for s in range(self.slices)]
        object.__setattr__(self, "nodes", tuple(nodes))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def commitment(self) -> Commitment:
        """The commitment to publish before round 1."""
        return {
            "version": 1,
            "root": merkle_root(self.nodes).hex(),
            "size": len(self.y),
            "slices": self.slices,
            "classes": self.classes,
            "balanced": int(self.balanced),
            "utility": self.utility_hash,
            **({"settled": self.settled} if self.settled or not self.slices else {}),
        }

    def span(self, index: int) -> builtins.slice:
        """Return the places of slice ``index`` in the pool."""
        return span_of(len(self.y), self.slices, index, self.settled)

    def slice(self, round: int) -> Slice:
        """Return the slice that ``round`` (counted from 1) is measured on."""
        for_rounds = self.slices - (self.settled > 0)
        if not for_rounds:
            raise DataError(f"round {round} has no test slice: the pool is revealed after the last round")
        if round < 1 or (for_rounds > 1 and round > for_rounds):
            raise DataError(f"round {round} has no test slice: the pool was cut for rounds 1 .. {for_rounds}")
        return self._revealed(0 if for_rounds == 1 else round - 1)

    def settlement(self) -> Slice:
        """Return the slice of the settlement, which nobody may see before the last round is over."""
        if not self.settled:
            raise DataError("the pool has no slice for a settlement")
        return self._revealed(self.slices - 1)

    @property
    def first(self) -> Slice:
        """The slice of round 1, or of the settlement if no round has one."""
        return self._revealed(0)

    def _revealed(self, index: int) -> Slice:
        span = self.span(index)
        salts = b"".join(_salt(self.key, k) for k in range(span.start, span.stop))
        path = merkle_path(self.nodes, index)
        return Slice(index=index, x=self.x[span], y=self.y[span], salts=salts, path=path)


def order_of(key: bytes, size: int) -> Indices:
    """Return a random order of so many samples that follows from a secret, the same wherever it is made."""
    drawn = [hmac.digest(key, b"fedmerit/order/1" + k.to_bytes(8, "big"), "sha256") for k in range(size)]
    return np.array(sorted(range(size), key=drawn.__getitem__), np.int64)


def apart(order: Indices, x: Images, y: Labels, settled: int, *, by_class: bool) -> Indices:
    """Return an order in which all copies of a sample are settled, or none of them is.

    Members settle on no sample that a round has shown, so a copy on either side would cost the run its
    settlement. Copies are moved within their class (if ``by_class``), so that slices stay as balanced as they
    were. Raise DataError if no cut with ``settled`` samples at its end keeps all copies together.
    """
    cut = len(order) - settled
    if not 0 < settled < len(order):
        return order
    copies: dict[bytes, list[int]] = {}
    for place, k in enumerate(order.tolist()):
        copies.setdefault(hashlib.sha256(_sample(x[k], y[k])).digest(), []).append(place)
    classes = y[order].tolist() if by_class else [0] * len(order)
    found = order.copy()
    for label in {classes[places[0]] for places in copies.values() if places[0] < cut <= places[-1]}:
        room = [[p for p in range(*span) if classes[p] == label] for span in ((0, cut), (cut, len(order)))]
        sides: tuple[list[int], list[int]] = [], []
        groups = [places for places in copies.values() if classes[places[0]] == label]
        for places in sorted(groups, key=len, reverse=True):
            free = [len(room[side]) - len(sides[side]) for side in (0, 1)]
            side = int(free[1] > free[0])
            if len(places) > free[side]:
                many = sum(map(len, copies.values())) - len(copies)
                raise DataError(
                    f"test: {many} of {len(order)} samples are copies of others, and no cut into {cut} for "
                    f"rounds and {settled} for the settlement keeps copies together: leave copies out, or "
                    'measure by one of the two alone (method "settled" or "reports")'
                )
            sides[side].extend(places)
        for places, own in zip(room, sides, strict=True):
            found[places] = order[sorted(own)]
    return found


def slice_id(x: Images, y: Labels) -> str:
    """Return a SHA-256 over the SHA-256 of every sample, in order."""
    each = (hashlib.sha256(_sample(image, label)).digest() for image, label in zip(x, y, strict=True))
    return hashlib.sha256(b"fedmerit/slice/1" + b"".join(each)).hexdigest()


def samples_in(shown: Slice) -> set[bytes]:
    """Return 8 bytes for every sample of a slice, by which it is known again in any run."""
    pairs = zip(shown.x, shown.y, strict=True)
    return {hashlib.sha256(_sample(image, label)).digest()[:8] for image, label in pairs}


def _sample(image: Images, label: Any) -> bytes:
    image = np.ascontiguousarray(image, dtype=image.dtype.newbyteorder("<"))
    shape = "x".join(map(str, image.shape))
    if not np.ndim(label):
        return f"fedmerit/sample/1 {image.dtype.str} {shape} label {label}\n".encode() + image.tobytes()
    target = np.ascontiguousarray(label, dtype=label.dtype.newbyteorder("<"))
    form = f"target {target.dtype.str} {'x'.join(map(str, target.shape))}"
    head = f"fedmerit/sample/2 {image.dtype.str} {shape} {form}\n"
    return head.encode() + image.tobytes() + target.tobytes()


def _salt(key: bytes, k: int) -> bytes:
    return hmac.digest(key, b"fedmerit/salt/1" + k.to_bytes(8, "big"), "sha256")


def _leaves(x: Images, y: Labels, salts: Sequence[bytes]) -> list[bytes]:
    return [
        hashlib.sha256(b"\x00" + salt + _sample(image, label)).digest()
        for image, label, salt in zip(x, y, salts, strict=True)
    ]


def _slice_node(index: int, leaves: Sequence[bytes]) -> bytes:
    head = b"\x02" + index.to_bytes(4, "big") + len(leaves).to_bytes(4, "big")
    return hashlib.sha256(head + merkle_root(leaves)).digest()


def span_of(size: int, slices: int, index: int, settled: int = 0) -> slice:
    """Return the places of slice ``index`` in the pool.

    The last slice has the ``settled`` samples at the end of the pool, if there are any. The sizes of all
    others differ by at most one, larger slices first.
    """
    if settled and index == slices - 1:
        return slice(size - settled, size)
    least, more = divmod(size - settled, slices - (settled > 0))
    start = index * least + min(index, more)
    return slice(start, start + least + (index < more))


def parts_of(size: int, *, method: str, reveal: str, rounds: int) -> tuple[int, int]:
    """Return into how many slices a pool is cut, and how many samples are the settlement's."""
    for_rounds = 0 if method in ("settled", "panel") else rounds if reveal == "per-round" else 1
    settled = {"settled": size, "panel": size, "both": size // 2, "reports": 0}[method]
    return for_rounds + (settled > 0), settled


def least_shown(commitment: Mapping[str, Any]) -> int:
    """Return the fewest samples that a committed pool has for a round; 0 if no round is measured."""
    size, slices, settled = (int(commitment.get(key, 0)) for key in ("size", "slices", "settled"))
    for_rounds = slices - (settled > 0)
    return (size - settled) // for_rounds if for_rounds else 0


# ------------------------------------------------------------------------------------------ standard errors

BALANCED = "balanced-accuracy"
"""The utility that is a mean over classes: each class is a stratum, however the test set was drawn."""


@dataclass(frozen=True)
class Sampling:
    """How standard errors are measured, which follows from the terms and the commitment to the test pool.

    Args:
        balanced: whether the pool was drawn class by class.
    """

    balanced: bool = False

    def strata(self, utility: str, shown: Slice) -> Strata:
        """Return the strata of a test slice, or of its blocks."""
        if is_whole(utility):
            return np.zeros(min(BLOCKS, len(shown.y)), np.int64)
        return strata_for(shown.y, balanced=self.balanced or utility == BALANCED)

    def check(self, utility: str, values: npt.NDArray[np.float64], shown: Slice) -> None:
        """Raise `ReportError` unless a utility is measured as agreed: per sample, or of the whole set."""
        whole = is_whole(utility)
        if len(values) != (min(BLOCKS, len(shown.y)) if whole else len(shown.y)):
            one = "one number, which a metric of the whole test set is"
            each = f"one number for each of {len(shown.y)} test samples"
            raise ReportError(
                f"utility {utility!r}: expected {one if whole else each}, got {each if whole else one}; "
                "the name of a metric of the whole test set begins with whole:"
            )

    def freedom(self, utility: str, shown: Slice) -> int:
        """Return the degrees of freedom that every report on this slice must name."""
        return degrees(self.strata(utility, shown))
