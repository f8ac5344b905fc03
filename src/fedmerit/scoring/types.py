"""The values that flow between the steps: reports of a round, a table of coalitions, scores.

``Reports`` stands between the two halves of fedmerit: everything before it is federation, everything after it
is arithmetic. It holds exactly what secure aggregation leaves: two numbers that everybody knows, and two per
client that only the client itself can compute. A ``Table`` holds all 2^N coalitions, which secure aggregation
never yields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from importlib import import_module
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

    One number per client is a list, an array, or a pandas Series. The labels of a Series are 0, 1, ..., in
    the order of ``clients``, or the clients' names, in any order.

    Args:
        empty: v(M0), the utility before the round.
        grand: v(M), the utility of the aggregate.
        alone: shape (N,), v(M0 + U_i).
        without: shape (N,), v(M - U_i).
        clients: names; by default ``client-0``, ``client-1``, ...
        silent: clients that were summed but sent no valid report. They are not in ``clients``.
        se_loo: paired standard error of LOO_i, as the client reports it.
        se_ioi: paired standard error of IOI_i.
        se_alpha: paired standard error of alpha_i.
        se_alpha_total: standard error of alpha_i summed over all rounds so far, on the same test samples.
        slice: id of the test samples; equal ids mean equal samples.
        samples: number of training samples of each client, if disclosed.
        cosine: cosine of U_i and M - M0; None or NaN if there is none, as for a zero update.
        solo: utility of the model that client i trained alone from the first model.
        solo_empty: utility of that first model on this slice.
        utility: name of the utility; values of those in ``UNIT_UTILITIES`` must lie in [0, 1].
        round: round number, 0 or more.
        since: number of the first round of its run, if several runs are counted as one; None for the first.
        sketch: shape (N, K), each client's sketch of the error of alpha on this slice; see
            :mod:`fedmerit.scoring.sampling`. With them, the errors of differences between clients are known.
        freedom: degrees of freedom of these errors: test samples minus strata.

    >>> r = Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1], clients=["A", "B", "C"])
    >>> r.n, r.gain
    (3, 3.0)
    """

    empty: float
    grand: float
    alone: Vector
    without: Vector
    clients: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    se_loo: Vector | None = None
    se_ioi: Vector | None = None
    se_alpha: Vector | None = None
    se_alpha_total: Vector | None = None
    slice: str | None = None
    samples: Vector | None = None
    cosine: Vector | None = None
    solo: Vector | None = None
    solo_empty: float | None = None
    utility: str | None = None
    round: int | None = None
    since: int | None = None
    sketch: npt.NDArray[np.float64] | None = None
    freedom: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "round", round_of(self.round))
        object.__setattr__(self, "since", round_of(self.since, "since"))
        try:
            if self.since is not None and (self.round is None or self.round < self.since):
                raise ReportError(f"expected a round from {self.since} on, where its run begins (since)")
            self._check()
        except ReportError as error:
            raise type(error)(error.problem, error.client, round=self.round) from error.__cause__

    def _check(self) -> None:
        """Check every field and store numbers as read-only float64."""
        alone = sequence(self.alone, "alone")
        clients = names_of(self.clients, len(alone), "", counted="alone")
        silent = names_of(self.silent, None, "")
        both = set(clients) & set(silent)
        if both:
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
        _check_sketch(self, clients)
        put.vector("cosine", optional=True, nullable=True, minimum=-1.0 - 1e-6, maximum=1.0 + 1e-6)
        put.vector("solo", optional=True, unit=unit)
        if self.solo is not None and self.solo_empty is None:
            raise ReportError("solo needs solo_empty, the utility of the first model on this slice")
        if self.solo_empty is not None:
            put.scalar("solo_empty", unit=unit)
        object.__setattr__(self, "clients", clients)
        object.__setattr__(self, "silent", silent)

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
        bits = 1 << np.arange(table.n)
        full = (1 << table.n) - 1
        return cls(
            empty=float(table.values[0]),
            grand=float(table.values[full]),
            alone=table.values[bits],
            without=table.values[full ^ bits],
            clients=table.clients,
            **extra,
        )


def _check_sketch(reports: Reports, clients: tuple[str, ...]) -> None:
    """Check the sketches of a round and store them as a read-only array."""
    freedom = round_of(reports.freedom, "freedom")
    if (reports.sketch is None) != (freedom is None) or freedom == 0:
        raise ReportError("sketch and freedom (1 or more) belong together, got one without the other")
    if reports.sketch is None:
        return
    if reports.slice is None:
        raise ReportError("sketches are about a test slice, which must be named (slice)")
    found = floats(reports.sketch, "sketch")
    if (
        found.ndim != 2
        or len(found) != len(clients)
        or not found.shape[1]
        or not (abs(found) <= LARGEST).all()
    ):
        raise ReportError(
            f"sketch: expected finite numbers of shape ({len(clients)}, K), one row per client, got shape "
            f"{found.shape}"
        )
    object.__setattr__(reports, "sketch", frozen(found))
    object.__setattr__(reports, "freedom", freedom)


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
            raise ReportError(
                f"a table holds at most {MAX_TABLE_CLIENTS} clients (2^N utilities), got {size} utilities"
            )
        if (labels := labels_of(self.values)) is not None:
            raise ReportError(f"table: labels must be the bitmasks 0, 1, 2, ..., got {labels[0]!r:.50} first")
        values = floats(self.values, "table")
        n = int(values.size).bit_length() - 1
        if values.ndim != 1 or n < 1 or values.size != 1 << n:
            raise ReportError(f"a table needs 2^N utilities with N >= 1, got shape {values.shape}")
        bad = np.flatnonzero(~(np.abs(values) <= LARGEST))
        if bad.size:
            said = f"utility of coalition {int(bad[0]):#b} is {values[bad[0]]}"
            raise ReportError(f"{said}, expected {A_NUMBER}")
        object.__setattr__(self, "values", frozen(values))
        object.__setattr__(self, "clients", names_of(self.clients, n, "table: "))

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

    ``values`` follows the definition to the letter, normalisation included. ``raw`` is the vector before
    normalisation; rankings and shares use it, because a normalisation can reverse the order. ``stderr`` is
    the standard error of ``raw`` that the test set leaves. ``training`` is there if one training stands for
    all: intervals and comparisons then allow for what another training would change
    (:mod:`fedmerit.scoring.uncertainty`). None means that they are about the test set alone.
    ``blocks`` is ``raw`` in each block of the test set, shape (B, N), if it was measured so; ``sizes`` are
    the numbers of samples in the blocks. ``sketch``, shape (K, N), says how the clients' errors hang together
    if they were measured on single samples, with ``freedom`` degrees of freedom.
    """

    score: str
    clients: tuple[str, ...]
    values: Vector
    raw: Vector
    gain: float
    status: Status = "ok"
    stderr: Vector | None = None
    rounds: int = 1
    coverage: Vector | None = None
    notes: tuple[str, ...] = ()
    blocks: npt.NDArray[np.float64] | None = None
    sizes: Vector | None = None
    sketch: npt.NDArray[np.float64] | None = None
    freedom: int | None = None
    training: RoundScatter | None = None

    def __post_init__(self) -> None:
        clients = names_of(self.clients, None, f"{self.score}: ")
        if not clients:
            raise ReportError(f"{self.score}: expected at least 1 client, got none")
        put = Setter(self, clients, f"{self.score}: ", largest=LARGEST_SCORE)
        put.vector("values")
        put.vector("raw")
        put.scalar("gain")
        put.vector("stderr", optional=True, minimum=0.0)
        put.vector("coverage", optional=True, minimum=0.0)
        if (self.blocks is None) != (self.sizes is None):
            raise ReportError(f"{self.score}: blocks and sizes belong together, got one without the other")
        if self.blocks is not None:
            blocks, sizes = (floats(one, f"{self.score}: blocks") for one in (self.blocks, self.sizes))
            if sizes.ndim != 1 or not ((sizes > 0) & (sizes <= LARGEST)).all():
                raise ReportError(f"{self.score}: sizes must be positive numbers, one per block, got {sizes}")
            if blocks.shape != (len(sizes), len(clients)) or not (np.abs(blocks) <= LARGEST_SCORE).all():
                raise ReportError(
                    f"{self.score}: blocks must be finite numbers of shape ({len(sizes)}, {len(clients)}), "
                    f"one row per size and one column per client, got shape {blocks.shape}"
                )
            object.__setattr__(self, "blocks", frozen(blocks))
            object.__setattr__(self, "sizes", frozen(sizes))
        if self.sketch is not None:
            found = floats(self.sketch, f"{self.score}: sketch")
            if (
                found.ndim != 2
                or found.shape[1] != len(clients)
                or not (np.abs(found) <= LARGEST_SCORE).all()
            ):
                raise ReportError(
                    f"{self.score}: sketch must be finite numbers of shape (K, {len(clients)}), got shape "
                    f"{found.shape}"
                )
            object.__setattr__(self, "sketch", frozen(found))
        freedom = round_of(self.freedom, f"{self.score}: freedom")
        if freedom == 0:
            raise ReportError(f"{self.score}: freedom must be 1 or more, got 0")
        object.__setattr__(self, "freedom", freedom)
        object.__setattr__(self, "clients", clients)

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.clients)

    @property
    def covariance(self) -> npt.NDArray[np.float64] | None:
        r"""The covariance of ``raw`` that the test set leaves, (N, N), from blocks or sketches; None without.

        .. math:: \frac{1}{B - 1} \sum_b \frac{n_b}{n} (x_b - x)(x_b - x)^\top, \qquad
                  x = \sum_b \frac{n_b}{n} x_b

        The n_b samples of each of the B blocks stand for a test set of their own. Blocks with the same mix of
        classes do not show what another mix would change. B - 1 degrees of freedom. From a sketch z of K
        numbers per client, it is the mean of their products, :math:`z^\top z / K`
        (:mod:`fedmerit.scoring.sampling`).
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
        """Return a frame with one row per client; see `fedmerit.report.exports.columns`."""
        return _shown(self, "as_frame")

    def to_csv(self) -> str:
        """Return the same as tidy CSV."""
        return str(_shown(self, "as_csv"))

    def _repr_html_(self) -> str:
        return str(_shown(self, "as_html"))


def _shown(scores: Scores, how: str) -> Any:
    """Return how `fedmerit.report.exports` shows scores; that room is loaded only when somebody looks."""
    return getattr(import_module("fedmerit.report.exports"), how)(scores)


def in_order(scores: Scores, clients: tuple[str, ...]) -> Scores:
    """Return scores with the clients in this order."""
    if scores.clients == clients:
        return scores
    place = {name: i for i, name in enumerate(scores.clients)}
    at = [place[name] for name in clients]
    moved: dict[str, Any] = {}
    for one in fields(scores):
        value = getattr(scores, one.name)
        if isinstance(value, np.ndarray) and one.name != "sizes":  # clients are the last axis of all others
            moved[one.name] = value[..., at]
    return replace(scores, clients=clients, **moved)


def rounding(values: Vector) -> Vector:
    r"""Return a generous bound on the rounding error of each value; values tie if it explains the difference.

    .. math:: \rho_i = 10^{-10} \max(|x_i|, \min(1, \max_j |x_j|))

    The values may also be rows of such vectors.

    Scores are differences of utilities, which are about 1 in size and accurate to about 10^-16, so even a
    score near zero has an error of that size. Another client's score counts for at most 1 here, so that a
    huge one, say a false report, does not tie everybody else.

    >>> rounding(np.array([0.5, 0.0, -2.0, 1e13])).tolist()
    [1e-10, 1e-10, 2e-10, 1000.0]
    """
    size = np.abs(values)
    most = np.minimum(1.0, size.max(axis=-1, initial=0.0, keepdims=True))
    return np.asarray(1e-10 * np.maximum(size, most), dtype=np.float64)


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
