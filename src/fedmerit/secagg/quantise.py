r"""Fixed point: turns an update into integers modulo 2^32, and a sum of such integers back into numbers.

A coordinate of the weighted update becomes an integer q in [-Q, Q], a 32-bit word in two's complement. With N
members scheduled,

.. math:: N (2Q + 1) \le 2^{32} \quad\Rightarrow\quad |\sum_i q_i| \le NQ < 2^{31},

so the sum of the words modulo 2^32, read as a signed integer, IS the sum of the integers, whoever drops out.
The step is bound / Q: 4.2e-9 of the bound for 9 members. With words of eight bytes the same integers are
masked modulo 2^64 (`masks.payload_of`); their sum still fits into 32 bits. This module needs nothing but
numpy, so an engine that runs without masks adds the same words.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, BoundError, ConfigError
from fedmerit.identity import MOST_MEMBERS

Words = npt.NDArray[np.uint32]
"""Integers modulo 2^32; negative ones in two's complement. Shape ``(Encoding.words,)``."""

Direction = npt.NDArray[np.int32]
"""Whole numbers, shape ``(Encoding.words,)``; 0 at the word of a secret weight."""

MODULUS = 2**32
BLOCK = 2**16  # coordinates at a time: 256 KiB of words, and temporaries that fit into the processor's cache
MOST_COORDINATES = 2**31


def largest_stated(members: int) -> int:
    """Return the largest size of a product that a member may state, with so many members in the sum.

    >>> largest_stated(9)
    1024819115206086200
    """
    return (2**63 - 1) // members


def direction_hash(direction: Direction) -> str:
    """Return the SHA-256 of a direction as 32-bit integers, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(direction, "<i4").data).hexdigest()


def is_number(value: object) -> bool:
    """Return whether a value is a finite real number of Python or numpy; a bool does not count."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def whole(value: object) -> int | None:
    """Return an integer of Python or numpy as a Python int, and None for everything else."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def seed_bytes(seed: int | bytes) -> bytes:
    """Return a seed as bytes; a number and its bytes give the same rounding."""
    if isinstance(seed, bytes):
        return seed
    number = whole(seed)
    if number is None:
        raise ConfigError(f"a seed must be a whole number or bytes, got {type(seed).__name__}")
    return b"int:%d" % number


def rounding_bits(seed: int | bytes) -> np.random.Philox:
    """Return the stream of random bits that rounds one update; read it through ``random_raw``. No secret.

    It is Philox4x64-10, keyed with the first 16 bytes of SHA-256("fedmerit rounding 1" and the seed). numpy
    keeps the raw output of a named generator stable, but not its distributions.

    >>> [hex(word) for word in rounding_bits(0).random_raw(2).tolist()]
    ['0xebf88b2e47af5411', '0x1a87897f30077a2b']
    """
    key = int.from_bytes(hashlib.sha256(b"fedmerit rounding 1\0" + seed_bytes(seed)).digest()[:16], "little")
    return np.random.Philox(key=key)


@dataclass(frozen=True)
class Decoded:
    """What the sum of the included members' words stands for."""

    weighted_sum: npt.NDArray[np.float64]  # sum of w_i d_i, shape (length,)
    total_weight: float  # W, sum of w_i

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """The weighted mean of the included updates, M - M0."""
        return self.weighted_sum / self.total_weight


@dataclass(frozen=True)
class Encoding:
    """How the updates of one round become words; public, and the same for every member.

    Args:
        length: number of coordinates of an update.
        members: N, the number of members that the round's schedule names (not how many answer).
        bound: largest allowed |coordinate| of an update.
        weights: ``"uniform"`` (every w = 1), ``"public"`` (w known to all) or ``"secret"``: w is the member's
            own sample count and one more masked coordinate, so only the total becomes known.
        weight_cap: largest possible w; for secret weights an integer with N * cap < 2^32. Rounding acts on
            w / cap * d, so a cap far above the real weights costs precision. A member can claim any secret
            weight up to the cap, and nobody will see it.
        word_bytes: size of a masked word on the wire. With 8, who misstated a product can be named.
    """

    length: int
    members: int
    bound: float
    weights: Literal["uniform", "public", "secret"] = "uniform"
    weight_cap: float = 1
    word_bytes: Literal[4, 8] = 4

    def __post_init__(self) -> None:
        for name, most in (("length", MOST_COORDINATES), ("members", MOST_MEMBERS)):
            number = whole(getattr(self, name))
            if number is None or not 1 <= number <= most:
                raise ConfigError(f"{name} must be 1 to {most}, got {getattr(self, name)!r:.40}")
            object.__setattr__(self, name, number)
        if type(self.word_bytes) is not int or self.word_bytes not in (4, 8):
            raise ConfigError(f"word_bytes must be 4 or 8, got {self.word_bytes!r:.40}")
        if self.weights not in ("uniform", "public", "secret"):
            raise ConfigError(f"weights must be uniform, public or secret, got {self.weights!r}")
        for name in ("bound", "weight_cap"):  # so that `step` and every weighted sum are finite
            value = getattr(self, name)
            if not (is_number(value) and 1e-30 <= value <= 1e30):
                raise ConfigError(f"{name} must be a number from 1e-30 to 1e30, got {value!r:.40}")
            object.__setattr__(self, name, float(value))  # a saved state holds Python's floats
        if self.weights == "uniform" and self.weight_cap != 1:
            raise ConfigError(f"weight_cap must be 1 with uniform weights, got {self.weight_cap}")
        fits = self.weight_cap.is_integer() and self.members * self.weight_cap < MODULUS
        if self.weights == "secret" and not fits:
            raise ConfigError(
                f"weight_cap must be an integer with members * weight_cap < 2^32 for secret weights, "
                f"got {self.members} * {self.weight_cap}"
            )
        if self.members * (2 * self.limit + 1) > MODULUS:  # the proof that no sum can wrap
            raise ConfigError(f"{self.members} members do not fit into 32 bits")

    @property
    def limit(self) -> int:
        """Q, the largest integer with N (2Q + 1) <= 2^32."""
        return (MODULUS // self.members - 1) // 2

    @property
    def words(self) -> int:
        """The number of words in one message: one per coordinate, and one more for a secret weight."""
        return self.length + (self.weights == "secret")

    @property
    def step(self) -> float:
        """The value of one unit of the integers, in units of w * d."""
        return self.bound * self.weight_cap / self.limit

    def encode(
        self, delta: npt.NDArray[np.floating[Any]], *, weight: float | None = None, seed: int | bytes
    ) -> Words:
        """Round one member's weighted update to words.

        With y = (w / cap) (Q / bound) d, the word is floor(y), plus one with probability y - floor(y), so
        errors average out. 16 random bits r per coordinate decide: r + 1/2 < 2^16 (y - floor(y)) makes the
        probability right to 2^-17, which is 1e-13 of the bound and itself unbiased. |word| <= Q always holds.
        """
        delta = np.asarray(delta)
        if not np.issubdtype(delta.dtype, np.floating):
            raise BindingError(f"an update must hold floating-point numbers, got {delta.dtype}")
        if delta.shape != (self.length,):
            raise BindingError(f"an update must have shape ({self.length},), got {delta.shape}")
        weight = self._checked(weight)
        scale = weight / self.weight_cap * (self.limit / self.bound)
        words = np.empty(self.words, np.uint32)
        bits = rounding_bits(seed)
        scratch = np.empty((2, min(BLOCK, self.length)))
        beyond, infinite, largest = 0, 0, 0.0
        for at in blocks(self.length):
            block = delta[at]
            y, floor = scratch[:, : block.size]
            top = max(float(block.max()), -float(block.min()))
            if not top <= self.bound:  # also when it is NaN
                block, top, bad, cut = _repaired(block, self.bound)
                infinite, beyond = infinite + bad, beyond + cut
            largest = max(largest, top)
            np.multiply(block, scale, out=y, dtype=np.float64)
            if top * scale > self.limit:  # by the rounding of the factors alone
                np.clip(y, -self.limit, self.limit, out=y)
            np.floor(y, out=floor)
            y -= floor
            y *= 2**16
            y -= 0.5
            drawn = np.asarray(bits.random_raw(-(-y.size // 4)), dtype="<u8").view("<u2")[: y.size]
            signed = words[at].view(np.int32)
            np.copyto(signed, floor, casting="unsafe")
            signed += drawn < y
        if infinite:
            raise BoundError(f"{infinite} of {self.length} coordinates of the update are not finite")
        if beyond:
            raise BoundError(
                f"{beyond} of {self.length} coordinates of the update lie beyond the bound "
                f"{float(self.bound)!r}, the largest is {largest!r}"
            )
        if self.weights == "secret":
            words[-1] = int(weight)
        return words

    def dequantise(self, words: Words) -> npt.NDArray[np.float64]:
        """Return the numbers w * d that words stand for; divided by W, those of one member are its U_i."""
        if words.dtype != np.uint32 or words.shape != (self.words,):
            raise BindingError(f"expected {self.words} words of 32 bits, got {words.dtype} {words.shape}")
        numbers: npt.NDArray[np.float64] = words[: self.length].view(np.int32) * np.float64(self.step)
        return numbers

    def decode(self, words: Words, *, included: int, public_total: float | None = None) -> Decoded:
        """Return the weighted sum and the total weight, given the sum of the included members' words.

        A member who cheats can add any words at all, and only the sum is known. Raise BoundError for a sum
        that would move the model further than the bound, and for a W that these members cannot have. With W
        in [n, n cap], every coordinate of the mean is within bound (1 + n cap / (W Q)); a smaller lie goes
        unnoticed.
        """
        if not 1 <= included <= self.members:
            raise ConfigError(f"included must be 1 to {self.members} members, got {included}")
        if (self.weights == "public") != (public_total is not None):
            raise ConfigError("public_total goes with public weights, and only with them")
        total_weight = float(included if public_total is None else public_total)
        if self.weights == "secret":
            total_weight = float(words[-1])
        least = included if self.weights == "secret" else 0.0
        if not (least <= total_weight <= included * self.weight_cap and total_weight > 0):
            raise BoundError(f"{included} members cannot have a total weight of {total_weight:g}")
        weighted_sum = self.dequantise(words)
        # each |q_i| <= (w_i / cap) Q, rounded up; the factor allows for the rounding of this product itself
        share = total_weight / self.weight_cap * self.limit * (1 + 2**-40)
        reach = min(included * self.limit, math.floor(share) + included)
        signed = words[: self.length].view(np.int32)
        if int(signed.max()) > reach or int(signed.min()) < -reach:
            raise BoundError(
                f"the sum lies beyond what {included} members within the bound can reach "
                f"with a total weight of {total_weight:g}"
            )
        return Decoded(weighted_sum, total_weight)

    def _checked(self, weight: float | None) -> float:
        """Return a member's weight; raise `BoundError` if it is outside the range of its kind."""
        if self.weights == "uniform" and weight not in (None, 1):
            raise BoundError("weights are uniform in this run: a member cannot bring its own")
        if self.weights == "uniform":
            return 1.0
        if weight is None or not is_number(weight):
            raise BoundError("a member's weight must be a number")
        if self.weights == "secret" and not (float(weight).is_integer() and 1 <= weight <= self.weight_cap):
            raise BoundError(f"a secret weight must be an integer from 1 to the cap {self.weight_cap:g}")
        if not 0 <= weight <= self.weight_cap:
            raise BoundError(f"a public weight must lie in [0, {self.weight_cap:g}], got {weight:g}")
        return float(weight)


def _repaired(block: npt.NDArray[Any], bound: float) -> tuple[npt.NDArray[np.float64], float, int, int]:
    """Return a block cut to the bound, its largest finite size, and how many were not finite or too large."""
    y = block.astype(np.float64)
    infinite = ~np.isfinite(y)
    y[infinite] = 0.0
    size = np.abs(y)
    beyond = size > bound
    return np.clip(y, -bound, bound), float(size.max()), int(infinite.sum()), int(beyond.sum())


def blocks(length: int) -> Iterator[slice]:
    """Yield slices of a multiple of 4 coordinates (but for the last): a block draws whole 64-bit outputs."""
    return (slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))
