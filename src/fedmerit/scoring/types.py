"""The values that flow between the steps: reports of a round, a table of coalitions, scores.

``Reports`` hold exactly what secure aggregation leaves: two numbers that everybody knows, and two per client
that only the client itself can compute. A ``Table`` holds all 2^N coalitions, which it never yields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedmerit.errors import NeedsTable, ReportError
from fedmerit.scoring.validate import (
    A_NUMBER,
    LARGEST,
    LARGEST_SCORE,
    ReadOnly,
    Setter,
    floats,
    frozen,
    labels_of,
    names_of,
    round_of,
    sequence,
    writable,
)

Vector = npt.NDArray[np.float64]
"""One number per client, shape (N,)."""

Status = Literal["ok", "fallback", "reversed", "undefined"]

UNIT_UTILITIES = frozenset({
    "expected-accuracy", "accuracy", "sharpened-accuracy", "balanced-accuracy", "brier", "dice"
})  # fmt: skip
"""Utilities whose values lie in [0, 1]; other values are refused."""

MAX_TABLE_CLIENTS = 26


@dataclass(frozen=True, eq=False, kw_only=True)
class Reports(ReadOnly):
    """What is known after one round: v(M0), v(M), and per client v(M0 + U_i) and v(M - U_i).

    One number per client is a list, an array, or a pandas Series with labels 0, 1, ... or the clients' names.

    >>> r = Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1], clients=["A", "B", "C"])
    >>> r.n, r.gain
    (3, 3.0)
    """

    empty: float  # v(M0), the utility before the round
    grand: float  # v(M), the utility of the aggregate
    alone: Vector  # v(M0 + U_i)
    without: Vector  # v(M - U_i)
    clients: tuple[str, ...] = ()  # names; by default client-0, client-1, ...
    silent: tuple[str, ...] = ()  # clients that were summed but sent no valid report; not in clients
    se_loo: Vector | None = None  # paired standard error of LOO_i, as the client reports it
    se_ioi: Vector | None = None
    se_alpha: Vector | None = None
    se_alpha_total: Vector | None = None  # that of alpha_i summed over all rounds so far, on the same samples
    slice: str | None = None  # id of the test samples; equal ids mean equal samples
    samples: Vector | None = None  # number of training samples, if disclosed
    cosine: Vector | None = None  # of U_i and M - M0; None or NaN if there is none, as for a zero update
    solo: Vector | None = None  # utility of the model that client i trained alone from the first model
    solo_empty: float | None = None  # utility of that first model on this slice
    utility: str | None = None  # its name; values of those in UNIT_UTILITIES must lie in [0, 1]
    round: int | None = None  # 0 or more
    sketch: npt.NDArray[np.float64] | None = None  # (N, K), of each client's error of alpha: see `sampling`
    freedom: int | None = None  # degrees of freedom of these errors: test samples minus strata

    def __post_init__(self) -> None:
        object.__setattr__(self, "round", round_of(self.round))
        try:
            self._check()
        except ReportError as error:
            raise type(error)(error.problem, error.client, round=self.round) from error.__cause__

    def _check(self) -> None:
        clients = names_of(self.clients, len(sequence(self.alone, "alone")), "")
        silent = names_of(self.silent, None, "")
        if both := set(clients) & set(silent):
            raise ReportError(f"client {min(both)!r} is listed as silent but has a report")
        if len(clients) + len(silent) < 2:
            raise ReportError(f"expected at least 2 clients, got {len(clients)}")

        for name, kind in (("utility", "a name"), ("slice", "text")):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and writable(text)):
                raise ReportError(f"{name} must be {kind}, got {text!a:.100}")
        unit = self.utility if self.utility in UNIT_UTILITIES else None
        put = Setter(self, clients, "")
        put.scalar("empty", unit=unit)
        put.scalar("grand", unit=unit)
        put.vector("alone", unit=unit)
        put.vector("without", unit=unit)
        for name in ("se_loo", "se_ioi", "se_alpha", "se_alpha_total"):
            put.vector(name, optional=True, minimum=0.0)
        put.vector("samples", optional=True, minimum=0.0, whole=True)
        if self.sketch is not None or self.freedom is not None:
            self._check_sketch(put)
        put.vector("cosine", optional=True, nullable=True, minimum=-1.0 - 1e-6, maximum=1.0 + 1e-6)
        put.vector("solo", optional=True, unit=unit)
        if self.solo is not None and self.solo_empty is None:
            raise ReportError("solo needs solo_empty, the utility of the first model on this slice")
        if self.solo_empty is not None:
            put.scalar("solo_empty", unit=unit)
        vars(self).update(clients=clients, silent=silent)

    def _check_sketch(self, put: Setter) -> None:
        freedom = round_of(self.freedom, "freedom")
        if self.sketch is None or not freedom:
            raise ReportError("sketch and freedom (1 or more) belong together, got one without the other")
        if self.slice is None:
            raise ReportError("sketches are about a test slice, which must be named (slice)")
        n = len(put.clients)
        put.matrix("sketch", (n, None), f"({n}, K), one row per client")
        vars(self).update(freedom=freedom)

    @property
    def n(self) -> int:
        """Number of clients that reported."""
        return len(self.clients)

    @property
    def gain(self) -> float:
        """v(M) - v(M0), which the round has to distribute."""
        return self.grand - self.empty

    @property
    def where(self) -> str:
        """Prefix for messages that names the round, if known."""
        return "" if self.round is None else f"round {self.round}: "

    @classmethod
    def from_table(cls, table: Table, **extra: Any) -> Reports:
        """Return reports with the 2N + 2 coalitions of ``table`` that secure aggregation would leave."""
        if not isinstance(table, Table):
            raise NeedsTable(f"from_table takes a Table of 2^N utilities, got {type(table).__name__}")
        values, bits = table.values, 1 << np.arange(table.n)
        return cls(
            empty=float(values[0]), grand=float(values[-1]), alone=values[bits],
            without=values[len(values) - 1 ^ bits], clients=table.clients, **extra,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Table(ReadOnly):
    """The utility of every coalition. The index is a bitmask: bit i is set iff client i is in the coalition.

    >>> Table([0, 1, 2, 3], ["A", "B"]).n
    2
    """

    values: Vector
    clients: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.values, Reports):
            raise NeedsTable("expected all 2^N coalitions, got Reports, which hold 2N + 2 of them")
        if (size := len(sequence(self.values, "table"))) > 1 << MAX_TABLE_CLIENTS:
            most = f"at most {MAX_TABLE_CLIENTS} clients (2^N utilities)"
            raise ReportError(f"a table holds {most}, got {size} utilities")
        if (labels := labels_of(self.values)) is not None:
            raise ReportError(f"table: labels must be the bitmasks 0, 1, 2, ..., got {labels[0]!r:.50} first")
        values = floats(self.values, "table")
        n = int(values.size).bit_length() - 1
        if values.ndim != 1 or n < 1 or values.size != 1 << n:
            raise ReportError(f"a table needs 2^N utilities with N >= 1, got shape {values.shape}")
        for place in np.flatnonzero(~(np.abs(values) <= LARGEST)):
            raise ReportError(f"utility of coalition {place:#b} is {values[place]}, expected {A_NUMBER}")
        vars(self).update(values=frozen(values), clients=names_of(self.clients, n, "table: "))

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.clients)

    @property
    def gain(self) -> float:
        """v(everyone) - v(nobody)."""
        return float(self.values[-1] - self.values[0])


class RoundScatter(NamedTuple):
    """How far contributions scatter over the rounds of one training; see ``uncertainty.training_of``."""

    scatter: float = 0.0  # standard error that it leaves in a sum over all rounds; 0 if it is not known
    freedom: int = 0  # degrees of freedom of this estimate


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores(ReadOnly):
    """One number per client, the unnormalised numbers behind it, and whether it can be trusted.

    ``values`` follows the definition to the letter, normalisation included. Rankings and shares use ``raw``,
    because a normalisation can reverse the order. With ``training``, intervals and comparisons allow for what
    another training would change (:mod:`fedmerit.scoring.uncertainty`).
    """

    score: str
    clients: tuple[str, ...]
    values: Vector
    raw: Vector  # before normalisation
    gain: float
    status: Status = "ok"
    stderr: Vector | None = None  # standard error of ``raw`` that the test set leaves
    rounds: int = 1
    coverage: Vector | None = None
    notes: tuple[str, ...] = ()
    blocks: npt.NDArray[np.float64] | None = None  # (B, N): ``raw`` in each block of the test set
    sizes: Vector | None = None  # numbers of samples in the blocks
    sketch: npt.NDArray[np.float64] | None = None  # (K, N): how the clients' errors correlate
    freedom: int | None = None  # degrees of freedom of a sketch's errors
    training: RoundScatter | None = None

    def __post_init__(self) -> None:
        where = f"{self.score}: "
        clients = names_of(self.clients, None, where)
        if not clients:
            raise ReportError(f"{where}expected at least 1 client, got none")
        put = Setter(self, clients, where, largest=LARGEST_SCORE)
        put.vector("values")
        put.vector("raw")
        put.scalar("gain")
        put.vector("stderr", optional=True, minimum=0.0)
        put.vector("coverage", optional=True, minimum=0.0)
        if (self.blocks is None) != (self.sizes is None):
            raise ReportError(f"{where}blocks and sizes belong together, got one without the other")
        if self.sizes is not None:
            sizes = floats(self.sizes, f"{where}sizes")
            if sizes.ndim != 1 or not ((sizes > 0) & (sizes <= LARGEST)).all():
                raise ReportError(f"{where}sizes must be positive numbers, one per block, got {sizes}")
            shape = (len(sizes), len(clients))
            put.matrix("blocks", shape, f"{shape}, one row per size and one column per client")
            vars(self).update(sizes=frozen(sizes))
        if self.sketch is not None:
            put.matrix("sketch", (None, len(clients)), f"(K, {len(clients)})")
        freedom = round_of(self.freedom, f"{where}freedom")
        if freedom == 0:
            raise ReportError(f"{where}freedom must be 1 or more, got 0")
        vars(self).update(freedom=freedom, clients=clients)

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.clients)

    @property
    def covariance(self) -> npt.NDArray[np.float64] | None:
        r"""The covariance of ``raw`` that the test set leaves, (N, N), from blocks or sketches; None without.

        .. math:: \frac{1}{B - 1} \sum_b \frac{n_b}{n} (x_b - x)(x_b - x)^\top, \qquad
                  x = \sum_b \frac{n_b}{n} x_b

        The n_b samples of each of the B blocks stand for a test set of their own; B - 1 degrees of freedom.
        From a sketch z, it is :math:`z^\top z / K` (:mod:`fedmerit.scoring.sampling`).
        """
        if self.sketch is not None:
            return np.asarray(self.sketch.T @ self.sketch / len(self.sketch), dtype=np.float64)
        if self.blocks is None or self.sizes is None or len(self.blocks) < 2:
            return None
        weights = self.sizes / self.sizes.sum()
        away = self.blocks - weights @ self.blocks
        return np.asarray((weights[:, None] * away).T @ away / (len(weights) - 1), dtype=np.float64)

    def ranking(self) -> tuple[str, ...]:
        """Return the names, best first, by the raw vector; ties are in the order of ``clients``."""
        return tuple(self.clients[i] for i in np.argsort(-settle(self.raw), kind="stable"))

    def ranks(self) -> npt.NDArray[np.int64]:
        """Return the rank of each client by the raw vector, 1 = best; ties share the better rank."""
        settled = settle(self.raw)
        ordered = np.sort(-settled)
        return np.searchsorted(ordered, -settled, side="left") + 1

    def as_dict(self) -> dict[str, float]:
        """Return ``values`` by name."""
        return dict(zip(self.clients, self.values.tolist(), strict=True))

    def to_pandas(self) -> Any:
        """Return a frame with one row per client; see `fedmerit.files.documents.scores_columns`."""
        return SHOWN["to_pandas"](self)

    def to_csv(self) -> str:
        """Return the same as tidy CSV."""
        return str(SHOWN["to_csv"](self))

    def plot(self) -> Any:
        """Return an Altair chart of the raw scores, best first, with 95 % intervals; nothing is shown."""
        return SHOWN["scores_plot"](self)

    def _repr_html_(self) -> str:
        return str(SHOWN["scores_html"](self))


SHOWN: dict[str, Callable[[Any], Any]] = {}
"""How methods of scores, shares and payouts show them: `files.documents` and the package itself add it, so
that no formula knows pandas, HTML or charts."""


def in_order(scores: Scores, clients: tuple[str, ...]) -> Scores:
    """Return scores with the clients in this order."""
    place = {name: i for i, name in enumerate(scores.clients)}
    at = [place[name] for name in clients]
    arrays = {name: value for name, value in vars(scores).items() if isinstance(value, np.ndarray)}
    moved: dict[str, Any] = {name: value[..., at] for name, value in arrays.items() if name != "sizes"}
    return replace(scores, clients=clients, **moved)


def rounding(values: Vector) -> Vector:
    r"""Return a generous bound on the rounding error of each value; values tie if it explains the difference.

    .. math:: \rho_i = 10^{-10} \max(|x_i|, \min(1, \max_j |x_j|))

    The values may also be rows of such vectors. Scores are differences of utilities of about 1, accurate to
    about 10^-16, so even a score near zero has an error of that size. Another client's score counts for at
    most 1 here, so that a huge one, say a false report, does not tie everybody else.

    >>> rounding(np.array([0.5, 0.0, -2.0, 1e13])).tolist()
    [1e-10, 1e-10, 2e-10, 1000.0]
    """
    size = np.abs(values)
    most = np.minimum(1.0, size.max(axis=-1, initial=0.0, keepdims=True))
    return np.asarray(1e-10 * np.maximum(size, most), dtype=np.float64)


def order_signs(values: Vector) -> npt.NDArray[np.int8]:
    """Return 1 where i is above j, -1 where below, 0 where they tie, shape (N, N)."""
    places = settle(values)
    return np.sign(places[:, None] - places[None, :]).astype(np.int8)


def settle(values: Vector) -> Vector:
    """Return places in ascending order, 0, 1, ...; neighbours that only rounding may separate share a place.

    Scores that are equal on paper can differ by rounding, which must not decide their rank.

    >>> a = np.array([0.3 - 0.2, 0.2 - 0.1, 0.5]); bool(a[0] == a[1]), settle(a).tolist()
    (False, [0.0, 0.0, 1.0])
    """
    if not values.size:
        return values
    order = np.argsort(values, kind="stable")
    noise = rounding(values)[order]
    with np.errstate(over="ignore"):  # differences may exceed the largest float
        apart = np.diff(values[order]) > noise[1:] + noise[:-1]
    places = np.empty(values.size)
    places[order] = np.concatenate([[0], np.cumsum(apart)])
    return places
