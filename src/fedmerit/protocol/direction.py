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
from fedmerit.protocol.bench import Bench, board_of, places
from fedmerit.protocol.outcome import Model, integer
from fedmerit.protocol.pool import Indices, Slice
from fedmerit.scoring.sampling import BLOCKS as METRIC_BLOCKS
from fedmerit.secagg.board import RING, Board
from fedmerit.secagg.quantise import BLOCK, Direction, Encoding, Words

POINTS: Final = (3, 7)
"""Gauss-Legendre points of the path: those used first, and where these leave too large a rest."""
REST: Final = 0.02
"""The largest rest, as a share of the gain, at which the first points are enough."""
LARGEST: Final = 2**31 - 1
LEAST_SIZE: Final = 1e-20
"""What |u|_1 of a block counts as at least: no part in a flatter one differs from 0."""
TOLERANCE: Final = 1e-5
"""How far apart two machines may find a direction, as a share of its length.

Those of networks that compute in float64 are at least ten times closer (``benchmarks/gradients.py``).
"""
MOST_BLUR: Final = 10
OFF_GAIN: Final = 0.01
"""How far the products of all rounds may be from what they stand for, as a share of the gain."""
ROUNDING: Final = 1.0
"""Squared units that rounding may cost beside it, where a direction is only a few units long."""
BLOCKS_SLACK: Final = 1e-4
"""How much two machines may disagree about a block's part of the gain, as a share of the largest part."""

# ------------------------------------------------------------------------------------- gradients on a path


@dataclass(frozen=True, eq=False)
class Slopes:
    """The gradient of the mean utility of each block, averaged over the path: shape (B, P); v(M0), v(M)."""

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

    They are dealt by class only if the samples were drawn class by class (``balanced``). Otherwise the mix of
    classes is due to chance too, and a metric that hangs on it, such as F1, would seem too certain.
    """
    return deal(y, min(METRIC_BLOCKS, len(np.asarray(y))), classes=balanced)[0]


BLOCKS = 16
"""Blocks of the settled samples, for standard errors; fewer if there are fewer samples."""


def blocks_of(shown: Slice, *, balanced: bool) -> tuple[list[Indices], bool]:
    """Return the blocks of the opened test slice, which follow from its samples, and whether by class.

    As in `metric_blocks`, they are dealt by class only if the pool was drawn class by class (``balanced``).
    """
    return deal(shown.y, min(BLOCKS, len(shown.y)), shown.id, classes=balanced)


def slopes_of(
    gradient: Gradient, m0: Model, m: Model, shown: Slice, blocks: Sequence[Indices], points: int | None
) -> tuple[Slopes, int, float]:
    r"""Return the slopes of a round, the points of the path that they need, and the rest of the gain.

    .. math:: \mathrm{rest} = v(M) - v(M_0) - \langle M - M_0, \bar g \rangle

    ``points`` None takes the first of `POINTS` that leaves at most `REST` of the gain.
    """
    sizes = [len(block) for block in blocks]
    for tried in POINTS if points is None else (points,):
        slopes = gradient(m0, m, shown, blocks, tried)
        if slopes.blocks.shape != (len(blocks), m0.size):
            raise InputError(f"gradient: expected shape {(len(blocks), m0.size)}, got {slopes.blocks.shape}")
        if not (np.isfinite(slopes.blocks).all() and math.isfinite(slopes.empty + slopes.grand)):
            raise SettlementError(
                "the gradient or the utility is not finite, so this round cannot be settled: take a utility "
                "that stays finite, such as expected-accuracy or brier",
                code="not-finite",
            )
        gain = slopes.grand - slopes.empty
        rest = gain - float(np.dot(whole(slopes.blocks, sizes), np.subtract(m, m0, dtype=np.float64)))
        if abs(rest) <= REST * abs(gain):
            break
    return slopes, tried, rest


def whole(blocks: npt.NDArray[Any], sizes: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the gradient of the whole test slice: the mean of the blocks, weighted by their sizes."""
    total = np.zeros(blocks.shape[1])
    for row, size in zip(blocks, sizes, strict=True):
        total += row.astype(np.float64) * (size / sum(sizes))
    return total


# ---------------------------------------------------------------------------------------------- integers


def product(words: Words, direction: npt.NDArray[np.integer[Any]] | Board) -> int:
    """Return the scalar product of integers modulo 2^32, read as signed ones, and a direction; exact.

    The two halves of the direction are multiplied each on its own, so that no sum exceeds 63 bits.

    >>> product(np.array([3, 2**32 - 1], np.uint32), np.array([2, 5], np.int32))
    1
    """
    if isinstance(direction, Board):
        return direction.of_words(words)
    if words.shape != direction.shape:
        raise BindingError(f"expected a direction of {words.size} integers, got {direction.size}")
    signed, total = words.view(np.int32), 0
    for start in range(0, signed.size, BLOCK):
        part = slice(start, start + BLOCK)
        own, g = signed[part].astype(np.int64), direction[part].astype(np.int64)
        total += (int(np.dot(own, g >> 16)) << 16) + int(np.dot(own, g & 0xFFFF))
    return total


def scale_of(sizes: Iterable[float]) -> float:
    r"""Return the scale s of a run, from |u|_1 of every round.

    .. math:: s = \frac{\max_t |u_t|_1}{2^{31} - 1}, \qquad u_t = \bar g_t \, \mathrm{step}_t / W_t

    So each coordinate fits into 32 bits, and nobody's product exceeds 2^62 / n by more than rounding: masks
    of 64 bits prove it. Rounding P coordinates changes the product with an update by about sqrt(P) 2^-33 of
    their lengths, and `differs` sees that it favours nobody.
    """
    if not (most := max(sizes)):
        raise SettlementError(
            "the gradient is zero in every round, so there is no gain to divide: the utility does not follow "
            "from the model, or the model did not move",
            code="no-gain",
        )
    return most / LARGEST


def block_scale(values: npt.NDArray[np.float64]) -> float:
    """Return the scale of the direction of one block, by the rule of `scale_of`."""
    return max(float(np.abs(values).sum()), LEAST_SIZE) / LARGEST


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


# ---------------------------------------------------------------------------------------------- manifest


@dataclass(frozen=True)
class Along:
    """A direction along which masks prove products: of a round, or of one block of the pool in it.

    ``g`` is its hash, ``scale`` what one unit of a product is worth, ``product`` <X, g>. With block None it
    is the round's own direction, which the manifest fixes.
    """

    round: int
    block: int | None
    g: str
    scale: float
    product: int

    def body(self) -> dict[str, Any]:
        """Return the direction without floats, for messages and the ledger."""
        return {**vars(self), "scale": exact(self.scale), "product": numeral(self.product)}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Along:
        """Read a direction; raise MessageError if it is none."""
        try:
            block = None if body["block"] is None else integer(body["block"])
            scale, product = number(body["scale"]), whole_number(body["product"])
            if not (LEAST_SIZE / LARGEST <= scale < math.inf) or (block or 0) < 0:
                raise ValueError("a block or a scale that there is not")
            return cls(integer(body["round"]), block, str(body["g"]), scale, product)
        except (LookupError, TypeError, ValueError) as error:
            raise MessageError(f"not a direction: {error!r:.120}", stage="table") from None

    @property
    def purpose(self) -> str:
        """Under what a member remembers that it answered this direction."""
        return "" if self.block is None else str(self.block)


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
    g: str = ""  # hash of the direction
    size: float = 0.0  # |u|_1
    product: int = 0  # <X, g>
    blocks: tuple[float, ...] = ()  # <M - M0, gbar_b>, the part of each block's mean utility in the gain
    empty: float = 0.0  # from here on as a panel has them
    grand: float = 0.0
    rest: float = 0.0
    points: int = POINTS[0]

    def body(self) -> dict[str, Any]:
        """Return the entry without floats, for hashing and the ledger."""
        return {key: _plain(value) for key, value in vars(self).items()} | {"product": numeral(self.product)}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Entry:
        """Read an entry."""
        values: dict[str, Any] = {key: number(body[key]) for key in _FLOATS}
        values |= {key: str(body[key]) for key in ("m0", "m", "x", "g")}
        return cls(
            round=integer(body["round"]),
            points=integer(body["points"]),
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

    ``blocks`` are the samples in each, ``stratified`` whether each has the same mix of classes, ``scale`` s,
    ``coordinates`` P, ``pool`` the id of the opened test slice, ``rounds`` every round with a sum, in order.
    """

    run: str
    utility: str
    pool: str
    blocks: tuple[int, ...]
    stratified: bool
    scale: float
    coordinates: int
    rounds: tuple[Entry, ...]
    bench: Bench | None = None

    @property
    def lanes(self) -> int:
        """How many numbers a product has: more than one are packed."""
        return 1 if self.bench is None else self.bench.lanes

    def body(self) -> dict[str, Any]:
        """Return the manifest without floats, for hashing and the ledger."""
        plain = {key: _plain(value) for key, value in vars(self).items() if key in _FACTS}
        bench = {} if self.bench is None else {"bench": self.bench.body()}
        return {**plain, "rounds": [entry.body() for entry in self.rounds], **bench}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Manifest:
        """Read a manifest; raise MessageError if it is none or contradicts itself."""
        try:
            read = cls(
                run=str(body["run"]),
                utility=str(body["utility"]),
                pool=str(body["pool"]),
                blocks=tuple(integer(size) for size in body["blocks"]),
                stratified=body["stratified"],
                scale=number(body["scale"]),
                coordinates=integer(body["coordinates"]),
                rounds=tuple(Entry.from_body(entry) for entry in body["rounds"]),
                bench=Bench.from_body(body["bench"]) if "bench" in body else None,
            )
            wrong = read._wrong() or ("not written as servers write it" if read.body() != body else "")
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise MessageError(f"not a manifest of directions: {error!r:.120}", stage="open") from None
        if wrong:
            raise MessageError(f"not a manifest of directions: {wrong}", stage="open")
        return read

    def _wrong(self) -> str:
        numbers = [entry.round for entry in self.rounds]
        if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 1:
            return "expected rounds in order"
        if self.bench is not None:
            return self._wrong_panel(self.bench)
        if not self.blocks or min(self.blocks) < 1 or type(self.stratified) is not bool:
            return "expected blocks of at least one sample"
        for entry in self.rounds:
            if not entry.participants or len(set(entry.participants)) != len(entry.participants):
                return f"round {entry.round} names a member twice, or nobody"
            if len(entry.blocks) != len(self.blocks) or entry.points not in POINTS:
                return f"round {entry.round} has other blocks or points"
            if not (entry.step > 0 and entry.weight > 0 and math.isfinite(entry.size)):
                return f"round {entry.round} has numbers that no round has"
        if self.scale != scale_of(entry.size for entry in self.rounds):
            return "its scale does not follow from its rounds"
        return "its directions do not add up to the gain" if self.off_gain else ""

    def _wrong_panel(self, bench: Bench) -> str:
        """Return what is wrong with the manifest of a panel; nothing in it is about a shared test set."""
        if (self.pool, self.blocks, self.stratified, self.scale) != ("", (), False, 1.0):
            return "a panel has no test pool"
        if not (0 < bench.drawn <= self.coordinates and 0 <= bench.blur <= MOST_BLUR):
            return "it draws other coordinates than the model has"
        for entry in self.rounds:
            if not entry.participants or len(set(entry.participants)) != len(entry.participants):
                return f"round {entry.round} names a member twice, or nobody"
            due = bench.lines_hash(entry.round) if bench.judges else ""
            facts = entry.g, entry.size, entry.blocks, entry.empty, entry.grand, entry.rest, entry.points
            if facts != (due, 0.0, (), 0.0, 0.0, 0.0, POINTS[0]) or not (entry.step > 0 and entry.weight > 0):
                return f"round {entry.round} has numbers that no round of a panel has"
            if not 0 <= entry.product < RING**bench.lanes:
                return f"round {entry.round} has a product of another size"
        return ""

    @property
    def off_gain(self) -> bool:
        """Whether the scores of all members would add up to another number than the gain.

        Beside the rest that the path leaves in each round, at most `OFF_GAIN` of the gain may be lost, in the
        rounding of directions and of models.
        """
        gains = [entry.grand - entry.empty for entry in self.rounds]
        due = math.fsum(gain - entry.rest for gain, entry in zip(gains, self.rounds, strict=True))
        return abs(self.scale * self.product - due) > OFF_GAIN * math.fsum(map(abs, gains)) + 1e-9

    def drawn(self, entry: Entry) -> Indices:
        """Return the drawn coordinates of a round of a panel."""
        assert self.bench is not None
        return places(self.bench.seed, entry.round, self.coordinates, self.bench.drawn)

    def board(self, entry: Entry, columns: npt.NDArray[np.int8], x: Words | None) -> Board:
        """Return the directions of a round of a panel, given the columns of all judges."""
        assert self.bench is not None
        rows, count = columns[:, self.rounds.index(entry)], len(self.rounds)
        return board_of(self.bench, self.drawn(entry), rows, x, count, len(entry.participants))

    @cached_property
    def digest(self) -> str:
        """G, the SHA-256 of the manifest."""
        return hashlib.sha256(b"fedmerit/manifest/1\n" + canonical(self.body())).hexdigest()

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Everybody who was summed in a round."""
        return tuple(dict.fromkeys(name for entry in self.rounds for name in entry.participants))

    @cached_property
    def product(self) -> int:
        """The sum of the products of all rounds."""
        return sum(entry.product for entry in self.rounds)

    def entry(self, round: int) -> Entry:
        """Return a round's entry; raise MessageError if there is none."""
        if not isinstance(round, int) or round not in self._entries:  # messages name anything
            raise MessageError(f"the manifest has no round {round}", stage="agree")
        return self._entries[round]

    def along(self, round: int) -> Along:
        """Return the direction of a round."""
        entry = self.entry(round)
        return Along(round, None, entry.g, self.scale, entry.product)

    @cached_property
    def _entries(self) -> dict[int, Entry]:
        return {entry.round: entry for entry in self.rounds}


def manifest_limit(rounds: int, members: Iterable[str]) -> int:
    """Return the most bytes of a manifest, which a member compares before it parses one."""
    names = sum(12 * len(name) + 4 for name in members)  # as JSON, a character has up to 12 bytes
    return 2048 + 32 * BLOCKS + rounds * (2048 + 32 * BLOCKS + names)


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
    return whole(slopes.blocks, sizes) * (step / weight)


def block_units(slopes: Slopes, block: int, step: float, weight: float) -> npt.NDArray[np.float64]:
    """Return the same of one block."""
    row: npt.NDArray[np.float64] = slopes.blocks[block].astype(np.float64)
    return row * (step / weight)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return exact(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def numeral(value: int) -> str:
    """Return an integer as text: packed numbers of a panel, which are long, in hexadecimal.

    >>> numeral(-12), numeral(2**64)
    ('-12', '0x10000000000000000')
    """
    return str(value) if abs(value) < RING else hex(value)


def whole_number(text: Any) -> int:
    """Return an integer that is written as text, in the one way that it is written."""
    value = 0
    if isinstance(text, str):
        value = int(text, 16) if text.startswith("0x") else int(text) if len(text) < 40 else 0
    if numeral(value) != text:
        raise ValueError(f"expected a whole number as text, got {text!r:.40}")
    return value
