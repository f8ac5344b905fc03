r"""Many directions of one round at a few coordinates: what the judges of a panel ask of everybody's update.

Judge b shows small integers at the drawn coordinates K, each half of its data at half of them. A product with
all of these directions has two numbers per judge. They are packed into one integer, 64 bits for each, and so
signed, compared and proved as the product with one direction is (`naming`): what is said of it is equal, or
it is not.

So that no judge learns an exact number, the two ends of a pair add and subtract the same noise, made from
the key of their mask: c_ij - n_ij takes the place of c_ij. The noise cancels, and columns add up exactly.
Random bits are SHAKE-256 of a secret and what they are for; a mask is read at K alone, as AES in counter mode
allows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError

RING: Final = 2**64
NORMAL: Final = 32
"""`normal` has a standard deviation of two to the power of this."""

# ------------------------------------------------------------------------------------------- packed numbers


def packed(numbers: Iterable[int]) -> int:
    """Return numbers modulo 2^64 as one integer, the first in its lowest bits.

    >>> packed([1, -1]) == 1 + ((2**64 - 1) << 64)
    True
    """
    data = b"".join((number % RING).to_bytes(8, "little") for number in numbers)
    return int.from_bytes(data, "little")


def lanes(value: int, count: int) -> tuple[int, ...]:
    """Return the numbers in a packed integer, in [0, 2^64).

    >>> lanes(packed([1, -1, 5]), 3) == (1, 2**64 - 1, 5)
    True
    """
    data = value.to_bytes(8 * count, "little")
    return tuple(int.from_bytes(data[at : at + 8], "little") for at in range(0, 8 * count, 8))


def signed_lanes(value: int, count: int) -> tuple[int, ...]:
    """Return them in [-2^63, 2^63).

    >>> signed_lanes(packed([1, -1]), 2)
    (1, -1)
    """
    return tuple((number + RING // 2) % RING - RING // 2 for number in lanes(value, count))


def total(values: Sequence[int], count: int) -> int:
    """Return the sum of integers: of packed ones number by number, of plain ones (``count`` 1) as it is.

    >>> total([packed([1, -1]), packed([2, 3])], 2) == packed([3, 2]), total([5, -7], 1)
    (True, -2)
    """
    if count == 1:
        return sum(values)
    return packed(map(sum, zip(*(lanes(value, count) for value in values), strict=True)))


def less(value: int, taken: int, count: int) -> int:
    """Return a difference of such integers, likewise.

    >>> less(packed([1, 5]), packed([2, 3]), 2) == packed([-1, 2]), less(5, 7, 1)
    (True, -2)
    """
    if count == 1:
        return value - taken
    return packed(a - b for a, b in zip(lanes(value, count), lanes(taken, count), strict=True))


def part_of(value: int, parts: int, place: int, count: int) -> int:
    """Return one of so many nearly equal parts of such an integer; all of them add up to it.

    >>> [part_of(7, 3, place, 1) for place in range(3)]
    [3, 2, 2]
    """
    each = (value,) if count == 1 else signed_lanes(value, count)
    own = [one // parts + (place < one % parts) for one in each]
    return own[0] if count == 1 else packed(own)


# ---------------------------------------------------------------------------------------------- random bits


def bits(count: int, purpose: str, *context: bytes | str | int) -> npt.NDArray[np.uint64]:
    """Return so many random integers of 64 bits, which follow from a purpose and what it is about."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in (purpose, *context)]
    head = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return np.frombuffer(hashlib.shake_256(b"fedmerit/panel/1" + head).digest(8 * count), "<u8")


def normal(count: int, purpose: str, *context: bytes | str | int) -> npt.NDArray[np.int64]:
    """Return integers, nearly normal, with mean 0 and standard deviation 2^32: each a sum of twelve.

    >>> drawn = normal(10_000, "doctest") / 2**32
    >>> bool(abs(drawn.mean()) < 0.05), bool(abs(drawn.std() - 1) < 0.05)
    (True, True)
    """
    words = bits(6 * count, purpose, *context).view("<u4").astype(np.int64)
    summed: npt.NDArray[np.int64] = words.reshape(count, 12).sum(axis=1) - 6 * 2**NORMAL
    return summed


# ---------------------------------------------------------------------------------------------- directions


@dataclass(frozen=True, eq=False)
class Board:
    """The directions of all judges in one round.

    ``at`` are the drawn coordinates, shape (n,), in the order of the draw; ``rows`` integers of 8 bits, shape
    (judges, n); half 1 of a judge's data is at the first ``middle`` coordinates. ``blur`` has the standard
    deviation of the noise of one pair, for each number; it is empty if there is none. That noise is made from
    ``seed``, the draw of the coordinates, and from nothing that a judge or the server chooses: an end of a
    pair could else try out columns until its own noise is in its favour.
    """

    at: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int8]
    middle: int
    seed: str
    blur: tuple[int, ...] = field(default=(), repr=False)

    @property
    def lanes(self) -> int:
        """How many numbers a product has: two per judge, judge by judge."""
        return 2 * len(self.rows)

    @property
    def size(self) -> int:
        """How many coordinates an update must have at least."""
        return int(self.at.max()) + 1

    @cached_property
    def _halves(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        rows = self.rows.astype(np.int64).view(np.uint64)
        return rows[:, : self.middle], rows[:, self.middle :]

    def products(self, words: npt.NDArray[Any]) -> int:
        """Return the products with words of 8 bytes modulo 2^64, which are given at ``at`` alone."""
        first, second = self._halves
        both = (first @ words[: self.middle], second @ words[self.middle :])
        return packed(int(number) for pair in zip(*both, strict=True) for number in pair)

    def of_words(self, words: npt.NDArray[Any]) -> int:
        """Return the products with a whole vector of words, of 8 bytes or, with a sign, of 4."""
        if words.size < self.size:
            raise BindingError(f"expected at least {self.size} words, got {words.size}")
        chosen = words[self.at]
        return self.products(
            chosen if chosen.itemsize == 8 else chosen.view(np.int32).astype(np.int64).view(np.uint64)
        )

    def of_key(self, key: bytes) -> int:
        """Return the products with the mask that this key makes."""
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        counters = np.zeros((self.at.size, 2), ">u8")
        counters[:, 1] = self.at // 2
        # counter mode, as `masks.Streams` has it, at these counters alone
        blocks = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters.tobytes())  # noqa: S305
        words = np.frombuffer(blocks, "<u8").reshape(-1, 2)[np.arange(self.at.size), self.at % 2]
        return self.products(words)

    def of_pair(self, key: bytes) -> int:
        """Return the products with the mask of two members who are in the sum, less their noise."""
        noise = self.noise(key)
        return packed(c - n for c, n in zip(lanes(self.of_key(key), self.lanes), noise, strict=True))

    def noise(self, key: bytes) -> tuple[int, ...]:
        """Return the noise that the first end of a pair adds and the other subtracts."""
        if not self.blur:
            return (0,) * self.lanes
        drawn = normal(self.lanes, "blur", hashlib.sha256(b"fedmerit/blur/1" + key).digest(), self.seed)
        return tuple(int(word) * spread >> NORMAL for word, spread in zip(drawn, self.blur, strict=True))
