r"""What a panel settles: the drawn coordinates, what each judge shows by hash, and the directions of a round.

The manifest of a panel is a `Manifest` with a `Bench`. Its rounds have no gradient of a shared test set; the
hash of a round's directions stands for the draw and for everything that all judges show, and the products of
the sum are packed: two numbers per judge (:mod:`fedmerit.secagg.board`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.errors import BindingError, MessageError
from fedmerit.identity import canonical, exact, number
from fedmerit.protocol.column import column_hash, coordinates, halves, malformed
from fedmerit.protocol.outcome import integer
from fedmerit.protocol.pool import Indices, slice_id
from fedmerit.scoring.panel import Panel
from fedmerit.secagg.board import Board, signed_lanes
from fedmerit.secagg.quantise import Words

COORDINATES: Final = "coordinates"
"""What the draw before a panel belongs to, in the place of a settlement's digest."""
LEAST: Final = 300
"""Held-out samples of a judge: on fewer, what it shows tells too much of each. A rehearsal needs fewer."""
LEAST_REHEARSED: Final = 20
OFF: Final = 0.05
"""How far a column may be off its judge's gain beside four standard errors; nothing is refused beyond."""
DIGITS: Final = 1e-3  # utilities are stated to three decimals
LARGEST: Final = 1e60  # beyond any number of a judge; scores made from larger ones would overflow
_PARTS: Final = 10**6


def least_samples(config: Config, *, rehearsal: bool) -> int:
    """Return how many held-out samples a judge must have."""
    return config.panel.least or (LEAST_REHEARSED if rehearsal else LEAST)


def lanes_in(config: Config) -> int:
    """Return how many numbers a product has at most: one in a settlement, two per judge in a panel."""
    return 2 * len(config.clients) if config.judged else 1


def held_out_body(salt: bytes, x: Any, y: Any, nonce: str, noise: bytes) -> dict[str, Any]:
    """Return what a member commits to when it joins: its own samples, and two secrets.

    An audit at home can find a changed set; nobody else learns more than the number of samples.
    """
    data = hashlib.sha256(b"fedmerit/held-out/1\n" + salt + slice_id(x, y).encode()).hexdigest()
    seed = hashlib.sha256(b"fedmerit/noise/1\n" + noise).hexdigest()
    return {"data": data, "samples": len(y), "nonce": nonce, "noise": seed}


@dataclass(frozen=True)
class Showing:
    """What one judge shows: its column by hash, and what it says of its own samples.

    ``scale`` is what one unit of its column is worth, ``first`` and ``last`` its utility of the first and the
    last model, ``rest`` what innovation took away from its gain, ``error`` the standard error of what its
    column adds up to, because it shows a few coordinates alone.
    """

    judge: str
    column: str
    scale: float
    samples: int
    first: float
    last: float
    rest: float
    error: float

    def body(self) -> dict[str, Any]:
        """Return it without floats, for hashing and the ledger."""
        return {key: exact(value) if isinstance(value, float) else value for key, value in vars(self).items()}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Showing:
        """Read it; raise MessageError if it is nothing of this kind."""
        try:
            floats = {key: number(body[key]) for key in ("scale", "first", "last", "rest", "error")}
            read = cls(str(body["judge"]), str(body["column"]), samples=integer(body["samples"]), **floats)
            sized = 1 / LARGEST <= read.scale <= LARGEST and all(
                abs(one) <= LARGEST for one in floats.values()
            )
            if read.body() != dict(body) or not sized or read.error < 0 or read.samples < 1:
                raise ValueError("numbers that no judge has")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MessageError(f"not what a judge shows: {error!r:.120}", stage="judged") from None
        return read

    def is_odd(self, total: float) -> bool:
        """Return whether its column adds up to something else than its samples gained (``total``)."""
        off = abs(self.gained - self.rest - total)
        return off > OFF * abs(self.gained) + 4 * self.error + DIGITS

    @property
    def gained(self) -> float:
        """How much the utility of its own samples rose over the run."""
        return self.last - self.first


def showing_body(run: str, facts: str, showing: Showing) -> dict[str, Any]:
    """Return what a judge signs; ``facts`` is the digest of the rounds that it judged."""
    return {"run": run, "facts": facts, **showing.body()}


def showings_hash(showings: Iterable[Showing]) -> str:
    """Return the hash of what all judges show: whoever shows its column has seen this list."""
    return hashlib.sha256(b"fedmerit/showings/1\n" + canonical([one.body() for one in showings])).hexdigest()


@dataclass(frozen=True)
class Bench:
    """The part of a manifest that only a panel has.

    ``seed`` is that of the coordinates, ``drawn`` how many of each round; ``blur`` the noise of what judges
    learn, 0 in a rehearsal, which has nothing to hide and is repeatable. ``judges`` is empty before they have
    judged.
    """

    seed: str
    drawn: int
    blur: float
    judges: tuple[Showing, ...] = ()

    def body(self) -> dict[str, Any]:
        """Return it without floats."""
        return {
            "seed": self.seed,
            "drawn": self.drawn,
            "blur": exact(self.blur),
            "judges": [judge.body() for judge in self.judges],
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Bench:
        """Read it."""
        judges = tuple(Showing.from_body(judge) for judge in body["judges"])
        names = [judge.judge for judge in judges]
        if len({*names}) != len(names):
            raise ValueError("a judge twice")
        return cls(str(body["seed"]), integer(body["drawn"]), number(body["blur"]), judges)

    @property
    def names(self) -> tuple[str, ...]:
        """The judges."""
        return tuple(judge.judge for judge in self.judges)

    @property
    def lanes(self) -> int:
        """How many numbers a product has."""
        return 2 * len(self.judges)

    def lines_hash(self, round: int) -> str:
        """Return the hash of the directions of a round, which stands for all directions of the run."""
        return hashlib.sha256(b"fedmerit/board/1\n" + canonical([self.body(), round])).hexdigest()

    def problem_with(self, columns: npt.NDArray[Any], rounds: int) -> str:
        """Return what is wrong with the columns of all judges, shape (judges, rounds, |K|)."""
        if columns.shape != (len(self.judges), rounds, self.drawn):
            return f"expected columns of {len(self.judges)} judges, got shape {columns.shape}"
        for judge, column in zip(self.judges, columns, strict=True):
            if column_hash(column) != judge.column:
                return f"the column of {judge.judge} is not the one that it signed"
            if wrong := malformed(column, (rounds, self.drawn)):
                return f"the column of {judge.judge}: {wrong}"
        return ""


@lru_cache(maxsize=64)
def places(seed: str, round: int, length: int, drawn: int) -> Indices:
    """Return the coordinates of a round; a process draws them once."""
    return coordinates(seed, round, length, drawn)


def board_of(
    bench: Bench,
    at: Indices,
    rows: npt.NDArray[np.int8],
    x: Words | None,
    rounds: int,
    members: int,
) -> Board:
    """Return the directions of a round at its coordinates; with noise it takes the sum.

    ``rows`` are what the judges show of the round, ``rounds`` is how many there are, ``members`` how many are
    in the sum.
    """
    middle = halves(bench.drawn)[0].stop
    plain = Board(at, rows, middle, bench.seed)
    if not bench.blur:
        return plain
    if x is None:
        raise BindingError("has not kept the sum of this round")
    return Board(
        at, rows, middle, bench.seed, _spread(plain, x[at].view(np.int32), bench.blur, rounds, members)
    )


def _spread(
    board: Board, x: npt.NDArray[np.int32], blur: float, rounds: int, members: int
) -> tuple[int, ...]:
    r"""Return the standard deviation of the noise of one pair, for each number of a product.

    .. math:: \mathrm{sd} = \frac{\mathrm{blur} \sqrt{T}}{n \sqrt{n - 1}}
        \max\big(|\langle X, g \rangle|, \tfrac{1}{20} |X| |g|\big)

    A statement has the noise of n - 1 pairs. Over T rounds, the noise of a score is ``blur`` times an equal
    part of what all of them did. All of it is in whole numbers, which are the same on every machine.
    """
    part = Fraction(round(blur * _PARTS), _PARTS)
    spread = []
    for row, half, product in _lines(board, x):
        most = max(abs(product), isqrt(_squares(half) * _squares(row)) // 20)
        spread.append(isqrt(int(Fraction(most) ** 2 * part**2 * rounds / (members**2 * (members - 1)))))
    return tuple(spread)


def _lines(
    board: Board, x: npt.NDArray[np.int32]
) -> Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any], int]]:
    products = iter(signed_lanes(board.products(x.astype(np.int64).view(np.uint64)), board.lanes))
    for row in board.rows:
        for half in (slice(0, board.middle), slice(board.middle, None)):
            yield row[half], x[half], next(products)


def _squares(values: npt.NDArray[Any]) -> int:
    """Return the sum of squares of integers of at most 32 bits, exactly."""
    wide = values.astype(np.int64)
    high, low = wide >> 16, wide & 0xFFFF
    return (int(high @ high) << 32) + (int(high @ low) << 17) + int(low @ low)


def panel_of(
    bench: Bench, length: int, counted: Sequence[Mapping[str, tuple[int, ...]]], clients: Sequence[str]
) -> Panel:
    r"""Return who helped whom, from the numbers that count for each member in each round.

    .. math:: s_{ib,h} = c_b \frac{P}{|K_h|} \sum_t \Phi_{ib,h}^t, \qquad
        s_{ib} = \frac{s_{ib,1} + s_{ib,2}}{2}

    with |K_h| coordinates at half h of a model of P (``length``). The column of who did not judge is 0.
    """
    sums = {name: [0] * bench.lanes for name in clients}
    for entry in counted:
        for name, values in entry.items():
            sums[name] = [before + value for before, value in zip(sums[name], values, strict=True)]
    sizes = [part.stop - part.start for part in halves(bench.drawn)]
    both = np.zeros((2, len(clients), len(clients)))
    for place, judge in enumerate(bench.judges):
        for half, size in enumerate(sizes):
            worth = judge.scale * length / max(size, 1)
            column = [sums[name][2 * place + half] * worth for name in clients]
            both[half, :, clients.index(judge.judge)] = column
    return Panel(both.mean(axis=0), tuple(clients), (both[0] - both[1]) / 2)
