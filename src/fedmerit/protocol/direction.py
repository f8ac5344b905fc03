r"""The public direction of every round as integers, and the manifest that fixes all of them at once.

A round's direction is the gradient of the paid utility, averaged over the path from M0 to M
(:mod:`fedmerit.simulation.direction`). What was summed are integers, so the direction is made of integers
too, on one scale s for the whole run. With q_i the integers of member i, X their sum and W the total weight,

.. math:: g = \mathrm{round}\Big(\frac{\bar g \cdot \mathrm{step}}{W s}\Big), \qquad
    \Phi_i = \langle q_i, g \rangle, \qquad \sum_i \Phi_i = \langle X, g \rangle

over the integers, without any rounding. A member's score in the round is phi_i = s Phi_i. The manifest names
the rounds, their models and sums by hash, every direction by hash, and the scale; members sign its digest.
This module needs nothing but numpy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, InputError, MessageError, SettlementError
from fedmerit.identity import canonical, exact, number
from fedmerit.protocol.outcome import Model
from fedmerit.protocol.pool import Indices, Slice
from fedmerit.scoring.metrics import BLOCKS as METRIC_BLOCKS
from fedmerit.secagg.quantise import BLOCK, Encoding, Words

POINTS: Final = (3, 7)
"""Gauss-Legendre points of the path: those used first, and where these leave too large a rest."""
REST: Final = 0.02
"""The largest rest, as a share of the gain, at which the first points are enough."""
LARGEST: Final = 2**31 - 1
TOLERANCE: Final = 1e-5
"""How far apart two machines may find a direction, as a share of its length.

Those of networks that compute in float64 are at least ten times closer (``benchmarks/gradients.py``).
"""
OFF_GAIN: Final = 0.01
"""How far the products of all rounds may be from what they stand for, as a share of the gain."""
ROUNDING: Final = 1.0
"""Squared units that rounding may cost beside it, where a direction is only a few units long."""
BLOCKS_SLACK: Final = 1e-3
"""How much two machines may disagree about a block's part of the gain, as a share of the largest part."""

Direction = npt.NDArray[np.int32]
"""Integers, one per word of the sum; 0 at the word of a secret weight."""

# ------------------------------------------------------------------------------------- gradients on a path


@dataclass(frozen=True, eq=False)
class Slopes:
    """The gradient of a utility, averaged over the path from M0 to M, by block of the test slice.

    Args:
        blocks: shape (B, P); of the mean over the samples of each block.
        empty: v(M0).
        grand: v(M).
    """

    blocks: npt.NDArray[Any]
    empty: float
    grand: float


Gradient = Callable[[Model, Model, Slice, Sequence[Indices], int], Slopes]
"""(M0, M, test slice, positions of each block's samples, points of the path) -> its slopes."""
Slope = Callable[[Model, Slice, Indices], tuple[float, npt.NDArray[Any]]]
"""(model, test slice, positions of samples) -> the mean utility of these samples, and its gradient."""


def along_path(slope: Slope) -> Gradient:
    """Return the gradient along a path from a function that returns value and gradient at one model."""

    def slopes(m0: Model, m: Model, shown: Slice, blocks: Sequence[Indices], points: int) -> Slopes:
        move = m.astype(np.float64) - m0
        nodes, weights = np.polynomial.legendre.leggauss(points)
        rows = np.zeros((len(blocks), m0.size), np.float32)
        for t, weight in zip((1 + nodes) / 2, weights / 2, strict=True):
            at = (m0 + t * move).astype(np.float32)
            for row, block in zip(rows, blocks, strict=True):
                row += (weight * np.asarray(slope(at, shown, block)[1], np.float64)).astype(np.float32)
        whole = np.arange(len(shown.y))
        return Slopes(rows, float(slope(m0, shown, whole)[0]), float(slope(m, shown, whole)[0]))

    return slopes


def deal(
    y: npt.ArrayLike, blocks: int, seed: str | int = 0, *, classes: bool = True
) -> tuple[list[Indices], bool]:
    """Deal samples to blocks: return the positions of each block's samples, and whether by class.

    Labels that are whole numbers are classes, unless ``classes`` is False. Samples are put in an order by
    SHA-256, sorted by class, and dealt one by one, so that two blocks differ by at most one sample, in all
    and in each class. Other samples are dealt in that order. Everybody who has the samples gets the same
    blocks.

    >>> blocks, by_class = deal(np.array([0, 1, 0, 1, 0, 1, 1]), 2)
    >>> [np.array([0, 1, 0, 1, 0, 1, 1])[block].tolist() for block in blocks], by_class
    ([[0, 0, 1, 1], [0, 1, 1]], True)
    """
    labels = np.asarray(y)
    n = len(labels)
    if isinstance(blocks, bool) or not isinstance(blocks, int) or not 1 <= blocks <= n:
        raise InputError(f"blocks must be a whole number from 1 to the {n} test samples, got {blocks!r:.100}")
    keys = [hashlib.sha256(f"fedmerit/deal/1 {seed} {n} {place}".encode()).digest() for place in range(n)]
    order = np.array(sorted(range(n), key=keys.__getitem__), dtype=np.int64)
    by_class = classes and labels.ndim == 1 and labels.dtype.kind in "iu"
    if by_class:
        order = order[np.argsort(labels[order], kind="stable")]
    return [order[first::blocks] for first in range(blocks)], by_class


def metric_blocks(y: npt.ArrayLike, *, balanced: bool) -> list[Indices]:
    """Return the blocks of the jackknife of a metric of the whole test set.

    They are dealt by class only if the samples were drawn class by class. Otherwise the mix of classes is
    due to chance too, and a metric that hangs on it, such as F1, would seem too certain.

    Args:
        y: targets.
        balanced: whether the samples were drawn class by class.
    """
    return deal(y, min(METRIC_BLOCKS, len(np.asarray(y))), classes=balanced)[0]


def blocks_of(shown: Slice, blocks: int, *, balanced: bool) -> tuple[list[Indices], bool]:
    """Return the blocks of the opened test slice, which follow from its samples, and whether by class.

    As in `metric_blocks`, they are dealt by class only if the pool was drawn class by class: blocks with the
    same mix of classes do not show how far a score follows from the mix that chance gave the pool.

    Args:
        shown: the slice.
        blocks: how many, at most one per sample.
        balanced: whether the pool was drawn class by class.
    """
    return deal(shown.y, min(blocks, len(shown.y)), shown.id, classes=balanced)


def slopes_of(
    gradient: Gradient, m0: Model, m: Model, shown: Slice, blocks: Sequence[Indices], points: int | None
) -> tuple[Slopes, int, float]:
    """Return the slopes of a round, the points of the path that they need, and the rest of the gain.

    .. math:: \\mathrm{rest} = v(M) - v(M_0) - \\langle M - M_0, \\bar g \\rangle

    Args:
        gradient: the member's or server's own function.
        m0: model before the round.
        m: model after it.
        shown: the test slice.
        blocks: positions of each block's samples.
        points: of the path; None takes the first of `POINTS` that leaves at most `REST` of the gain.

    Raises:
        SettlementError: the gradient is not finite.
    """
    sizes = [len(block) for block in blocks]
    for tried in POINTS if points is None else (points,):
        found = gradient(m0, m, shown, blocks, tried)
        if found.blocks.shape != (len(blocks), m0.size):
            raise InputError(f"gradient: expected shape {(len(blocks), m0.size)}, got {found.blocks.shape}")
        if not (np.isfinite(found.blocks).all() and math.isfinite(found.empty + found.grand)):
            raise SettlementError(
                "the gradient or the utility is not finite, so this round cannot be settled: take a utility "
                "that stays finite, such as expected-accuracy or brier",
                code="not-finite",
            )
        gain = found.grand - found.empty
        rest = gain - float(np.dot(whole(found, sizes), np.subtract(m, m0, dtype=np.float64)))
        if abs(rest) <= REST * abs(gain):
            break
    return found, tried, rest


def whole(slopes: Slopes, sizes: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the gradient of the whole test slice: the mean of the blocks, weighted by their sizes."""
    total = np.zeros(slopes.blocks.shape[1])
    for row, size in zip(slopes.blocks, sizes, strict=True):
        total += row.astype(np.float64) * (size / sum(sizes))
    return total


# ---------------------------------------------------------------------------------------------- integers


def product(words: Words, direction: npt.NDArray[np.integer[Any]]) -> int:
    """Return the scalar product of integers modulo 2^32, read as signed ones, and a direction; exact.

    The two halves of the direction are multiplied each on its own, so that no sum exceeds 63 bits.

    >>> product(np.array([3, 2**32 - 1], np.uint32), np.array([2, 5], np.int32))
    1
    """
    if words.shape != direction.shape:
        raise BindingError(f"expected a direction of {words.size} integers, got {direction.size}")
    signed, total = words.view(np.int32), 0
    for start in range(0, signed.size, BLOCK):
        part = slice(start, start + BLOCK)
        own, g = signed[part].astype(np.int64), direction[part].astype(np.int64)
        total += (int(np.dot(own, g >> 16)) << 16) + int(np.dot(own, g & 0xFFFF))
    return total


def scale_of(sizes: Iterable[float]) -> float:
    """Return the scale s of a run.

    .. math:: s = \\frac{\\max_t |u_t|_1}{2^{31} - 1}, \\qquad u_t = \\bar g_t \\, \\mathrm{step}_t / W_t

    So a direction has about 2^31 units in all, and each coordinate fits into 32 bits. The integers of n
    members within the bound are at most 2^31 / n in size, so nobody's product exceeds 2^62 / n by more than
    rounding: masks of 64 bits prove it, whatever the others send. Rounding P coordinates changes the product
    with an update by about sqrt(P) 2^-33 of their lengths, and `differs` sees that it favours nobody.

    Args:
        sizes: |u|_1 of every round.

    Raises:
        SettlementError: all directions are zero.
    """
    if not (most := max(sizes)):
        raise SettlementError(
            "the gradient is zero in every round, so there is no gain to divide: the utility does not follow "
            "from the model, or the model did not move",
            code="no-gain",
        )
    return most / LARGEST


def integers(values: npt.NDArray[np.float64], scale: float, encoding: Encoding) -> Direction:
    """Return u / s as integers, with a 0 for the word of a secret weight."""
    direction = np.zeros(encoding.words, np.int32)
    direction[: encoding.length] = np.clip(np.rint(values / scale), -LARGEST, LARGEST)
    return direction


def differs(direction: Direction, values: npt.NDArray[np.float64], scale: float, encoding: Encoding) -> str:
    r"""Return why a direction is not the one that follows from these own numbers; empty text if it is.

    With v = u / s of this machine, the direction may lie further from v than the nearest integers do by

    .. math:: |g - v|^2 - |\mathrm{round}(v) - v|^2 \le (\tau |v|)^2, \qquad \tau = \mathtt{TOLERANCE}.

    If another machine finds v + e, then |e|^2 is what rounding its numbers costs on the average. Whatever
    integers a server chooses within this, they move a member's product by no more than about
    tau |q| |v|.
    """
    if direction.shape != (encoding.words,) or direction.dtype != np.int32:
        return f"expected {encoding.words} integers of 32 bits, got {direction.dtype} {direction.shape}"
    if direction[encoding.length :].any():
        return "it is not 0 at the word of the secret weight"
    excess, size = 0.0, 0.0
    for start in range(0, encoding.length, BLOCK):
        own = values[start : start + BLOCK] / scale
        off, least = direction[start : start + own.size] - own, np.rint(own) - own
        excess += float(np.dot(off, off) - np.dot(least, least))
        size += float(np.dot(own, own))
    if excess <= TOLERANCE**2 * size + ROUNDING:
        return ""
    far = math.sqrt(excess / size) if size else math.inf
    return f"it is {far:.2g} of its length away from the gradient, expected at most {TOLERANCE:.2g}"


def direction_hash(direction: Direction) -> str:
    """Return the SHA-256 of a direction as 32-bit integers, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(direction, "<i4").data).hexdigest()


# ---------------------------------------------------------------------------------------------- manifest


@dataclass(frozen=True)
class Entry:
    """A round in the manifest: hashes of models, sum and direction, and what everybody can recompute."""

    round: int
    m0: str
    m: str
    x: str
    weight: float
    step: float
    participants: tuple[str, ...]
    g: str  # hash of the direction
    size: float  # |u|_1
    product: int  # <X, g>
    blocks: tuple[float, ...]  # <M - M0, gbar_b>, the part of each block's mean utility in the gain
    empty: float
    grand: float
    rest: float
    points: int

    def body(self) -> dict[str, Any]:
        """Return the entry without floats, for hashing and the ledger."""
        return {key: _plain(value) for key, value in vars(self).items()} | {"product": str(self.product)}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Entry:
        """Read an entry."""
        values: dict[str, Any] = {key: number(body[key]) for key in _FLOATS}
        values |= {key: str(body[key]) for key in ("m0", "m", "x", "g")}
        return cls(
            round=_whole(body["round"]),
            points=_whole(body["points"]),
            product=whole_number(body["product"]),
            participants=tuple(str(name) for name in body["participants"]),
            blocks=tuple(number(value) for value in body["blocks"]),
            **values,
        )


_FLOATS = ("weight", "step", "size", "empty", "grand", "rest")


_FACTS = ("run", "utility", "pool", "blocks", "stratified", "scale", "coordinates")


@dataclass(frozen=True)
class Manifest:
    """All directions of a run, by hash; its digest is what members agree on before anybody states.

    Args:
        run: identifier of the run.
        utility: the paid one.
        pool: id of the opened test slice.
        blocks: samples in each block.
        stratified: whether each block has the same mix of classes.
        scale: s.
        coordinates: P.
        rounds: every round with a sum, in order.
    """

    run: str
    utility: str
    pool: str
    blocks: tuple[int, ...]
    stratified: bool
    scale: float
    coordinates: int
    rounds: tuple[Entry, ...]

    def body(self) -> dict[str, Any]:
        """Return the manifest without floats, for hashing and the ledger."""
        plain = {key: _plain(value) for key, value in vars(self).items() if key in _FACTS}
        return {**plain, "rounds": [one.body() for one in self.rounds]}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Manifest:
        """Read a manifest; raise MessageError if it is none or contradicts itself."""
        try:
            found = cls(
                run=str(body["run"]),
                utility=str(body["utility"]),
                pool=str(body["pool"]),
                blocks=tuple(_whole(size) for size in body["blocks"]),
                stratified=body["stratified"],
                scale=number(body["scale"]),
                coordinates=_whole(body["coordinates"]),
                rounds=tuple(Entry.from_body(one) for one in body["rounds"]),
            )
            wrong = found._wrong() or ("not written as servers write it" if found.body() != body else "")
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise MessageError(f"not a manifest of directions: {error!r:.120}", stage="open") from None
        if wrong:
            raise MessageError(f"not a manifest of directions: {wrong}", stage="open")
        return found

    def _wrong(self) -> str:
        numbers = [one.round for one in self.rounds]
        if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 1:
            return "expected rounds in order"
        if not self.blocks or min(self.blocks) < 1 or type(self.stratified) is not bool:
            return "expected blocks of at least one sample"
        for one in self.rounds:
            if not one.participants or len(set(one.participants)) != len(one.participants):
                return f"round {one.round} names a member twice, or nobody"
            if len(one.blocks) != len(self.blocks) or one.points not in POINTS:
                return f"round {one.round} has other blocks or points"
            if not (one.step > 0 and one.weight > 0 and math.isfinite(one.size)):
                return f"round {one.round} has numbers that no round has"
        if self.scale != scale_of(one.size for one in self.rounds):
            return "its scale does not follow from its rounds"
        return "its directions do not add up to the gain" if self.off_gain else ""

    @property
    def off_gain(self) -> bool:
        """Whether the scores of all members would add up to another number than the gain.

        Beside the rest that the path leaves in each round, at most `OFF_GAIN` of the gain may be lost, in the
        rounding of directions and of models.
        """
        gains = [one.grand - one.empty for one in self.rounds]
        due = math.fsum(gain - one.rest for gain, one in zip(gains, self.rounds, strict=True))
        return abs(self.scale * self.product - due) > OFF_GAIN * math.fsum(map(abs, gains)) + 1e-9

    @cached_property
    def digest(self) -> str:
        """G, the SHA-256 of the manifest."""
        return hashlib.sha256(b"fedmerit/manifest/1\n" + canonical(self.body())).hexdigest()

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Everybody who was summed in a round."""
        return tuple(dict.fromkeys(name for one in self.rounds for name in one.participants))

    @cached_property
    def product(self) -> int:
        """The sum of the products of all rounds."""
        return sum(one.product for one in self.rounds)

    def entry(self, round: int) -> Entry:
        """Return a round's entry; raise MessageError if there is none."""
        found = self._entries.get(round) if isinstance(round, int) else None  # messages name anything
        if found is None:
            raise MessageError(f"the manifest has no round {round}", stage="agree")
        return found

    @cached_property
    def _entries(self) -> dict[int, Entry]:
        return {one.round: one for one in self.rounds}


def manifest_limit(rounds: int, blocks: int, members: Iterable[str]) -> int:
    """Return the most bytes of a manifest, which a member compares before it parses one."""
    names = sum(12 * len(name) + 4 for name in members)  # as JSON, a character has up to 12 bytes
    return 2048 + 32 * blocks + rounds * (2048 + 32 * blocks + names)


def block_products(
    words: Words, slopes: Slopes, encoding: Encoding, step: float, weight: float
) -> tuple[float, ...]:
    """Return <U, gbar_b> of every block, with U the change that these integers stand for."""
    signed = words[: encoding.length].view(np.int32)
    totals = np.zeros(len(slopes.blocks))
    for start in range(0, signed.size, BLOCK):
        part = slice(start, start + BLOCK)
        totals += slopes.blocks[:, part].astype(np.float64) @ signed[part].astype(np.float64)
    return tuple((totals * (step / weight)).tolist())


def as_units(slopes: Slopes, sizes: Sequence[int], step: float, weight: float) -> npt.NDArray[np.float64]:
    """Return u, the direction before it is rounded to integers."""
    return whole(slopes, sizes) * (step / weight)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return exact(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value


def whole_number(text: Any) -> int:
    """Return an integer that is written as text, in the one way that it is written."""
    value = int(text) if isinstance(text, str) and len(text) < 40 else 0
    if str(value) != text:
        raise ValueError(f"expected a whole number as text, got {text!r:.40}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected a whole number, got {value!r:.40}")
    return value
