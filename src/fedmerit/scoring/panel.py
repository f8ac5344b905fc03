r"""The panel: every member judges the others on data of its own, and hands out an equal part of the budget.

What the update :math:`U_i` of member i did for the held-out data of member b, the *judge*, is one number, the
scalar product of the update and the mean gradient of b's utility on the way from M0 to M (Aumann & Shapley
1974; :func:`fedmerit.aumann_shapley` has the same product with the gradient of a shared test set):

.. math:: s_{ib} = \langle U_i, \bar g_b \rangle

The matrix s says who helped whom. `hands` turns it into shares by a rule that is *impartial* (De Clippel,
Moulin & Tideman 2008): nothing that a member says as a judge changes its own share.

This module is arithmetic for numbers that one already has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, ReportError
from fedmerit.notes import Note
from fedmerit.scoring.rewards import STEP, Shares, Spans
from fedmerit.scoring.scores import matrix_of, products_of
from fedmerit.scoring.types import (
    LARGEST_SCORE,
    SHOWN,
    ReadOnly,
    Scores,
    Setter,
    Vector,
    floats,
    is_number,
    names_of,
    sequence,
)

Matrix = npt.NDArray[np.float64]
"""What the updates of member i did for the data of judge b, shape (N, N)."""

MOST = 3
"""Nobody gets more of a slice than this many times an equal part of it, and neither does a friend of its
judge: of six members at most 3/5 of a slice, a tenth of the budget."""
DRAWS = 1000
"""How often a matrix is drawn again for the errors of shares."""

# ------------------------------------------------------------------------------------------------- the matrix


@dataclass(frozen=True, eq=False)
class Panel(ReadOnly):
    """Who helped whom: ``matrix[i, b]`` is what the updates of client i did for the data of client b.

    >>> two = Panel([[5, 1, 3], [2, 4, 0], [0, 1, 2]], ["A", "B", "C"])
    >>> two.gave, two.received
    (array([4., 2., 1.]), array([2., 2., 3.]))
    >>> two.scores.as_dict()
    {'A': 2.0, 'B': 1.0, 'C': 0.5}
    """

    matrix: Matrix
    clients: tuple[str, ...] = ()  # names; by default client-0, client-1, ...
    apart: Matrix | None = None  # half the difference of what the two halves of a judge's data say

    def __post_init__(self) -> None:
        rows = len(sequence(self.matrix, "PANEL: matrix"))
        if rows < 2:
            raise ReportError(f"PANEL: expected at least 2 clients, got {rows}")
        clients = names_of(self.clients, rows, "PANEL: ")
        put = Setter(self, clients, "PANEL: ", largest=LARGEST_SCORE)
        for name in ("matrix", "apart") if self.apart is not None else ("matrix",):
            put.matrix(name, (rows, rows), f"{(rows, rows)}, one row per client and one column per judge")
        object.__setattr__(self, "clients", clients)

    @property
    def n(self) -> int:
        return len(self.clients)

    @property
    def gave(self) -> Vector:
        r"""What each client did for the others: :math:`\sum_{b \ne i} s_{ib}`."""
        return _sums(self.matrix)

    @property
    def received(self) -> Vector:
        r"""What the others did for each client: :math:`\sum_{i \ne b} s_{ib}`."""
        return _sums(self.matrix.T)

    @property
    def stderr(self) -> Vector | None:
        r"""The standard error of the entries of each judge's column; None without halves.

        .. math:: \mathrm{se}_b^2 = \frac{1}{N - 1} \sum_{i \ne b} \Big(\frac{s_{ib,1} - s_{ib,2}}{2}\Big)^2

        One number per judge: entry by entry, two halves say too little.
        """
        return None if self.apart is None else np.sqrt(_sums(self.apart.T**2) / (self.n - 1))

    @property
    def correlation(self) -> float:
        r"""How much the errors of two judges about one client have in common, from 0 to 1; 0 without halves.

        .. math:: \rho = \mathrm{clip}\bigg(\frac{\sum_i \sum_{b \ne c} d_{ib} d_{ic}}
            {\sum_i \sum_{b \ne c} \mathrm{se}_b \mathrm{se}_c}, 0, 1\bigg), \qquad
            d_{ib} = \frac{s_{ib,1} - s_{ib,2}}{2}

        where neither b nor c is i. Judges with samples of their own err on their own; the errors of judges
        who saw the same few coordinates of the updates point the same way.
        """
        errors = self.stderr
        if self.apart is None or errors is None:
            return 0.0
        both = (self.apart, np.broadcast_to(errors, (self.n, self.n)))
        known, most = (float(np.sum(_sums(rows) ** 2 - _sums(rows**2))) for rows in both)
        return min(1.0, max(0.0, known / most)) if most > 0 else 0.0

    @property
    def scores(self) -> Scores:
        r"""The score "PANEL": what a client did for another one, on average. It ranks, and pays nobody.

        .. math:: \mathrm{PANEL}(i) = \frac{1}{N - 1} \sum_{b \ne i} s_{ib}, \qquad
            \mathrm{se}_i^2 = \frac{1}{(N - 1)^2} \Big(\sum_{b \ne i} \mathrm{se}_b^2
            + \rho \sum_{b \ne c} \mathrm{se}_b \mathrm{se}_c\Big)

        with N - 1 degrees of freedom. In simulations, 95 % intervals held the true score in 94 to 99 % of
        cases. ``gain`` is the sum of the scores.
        """
        n, error = self.n, None
        if (errors := self.stderr) is not None:
            rows, common = np.broadcast_to(errors, (n, n)), self.correlation
            error = np.sqrt((1 - common) * _sums(rows**2) + common * _sums(rows) ** 2) / (n - 1)
        values = self.gave / (n - 1)
        return Scores(
            score="PANEL", clients=self.clients, values=values, raw=values, gain=math.fsum(values),
            stderr=error, freedom=None if error is None else n - 1,
        )  # fmt: skip

    def hands(self) -> Shares:
        """Return the shares by the rule "hands"; as :func:`fedmerit.hands` of the matrix."""
        return hands(self.matrix, clients=self.clients)

    def plot(self) -> Any:
        """Return an Altair chart of who helped whom; nothing is shown."""
        return SHOWN["panel_plot"](self)


def panel(updates: npt.ArrayLike, gradients: npt.ArrayLike, clients: Iterable[str] | None = None) -> Panel:
    r"""Return who helped whom: the scalar product of each client's update and each judge's gradient.

    .. math:: s_{ib} = \langle U_i, \bar g_b \rangle, \qquad
        \bar g_b = \int_0^1 \nabla v_b(M_0 + t (M - M_0)) \, dt

    where :math:`v_b` is the mean utility on the held-out data of judge b. Column b adds up to what b gained,
    :math:`v_b(M) - v_b(M_0)`, up to the error of the integral (Aumann & Shapley 1974). The diagonal, what a
    client did for itself, is in the matrix, and in no score and no share. Several rounds are summed if they
    stand one after another in the same P coordinates; a client that was away has an update of zeros.

    Args:
        updates: U_i, shape (N, P).
        gradients: of judge b, in the order of the clients: shape (N, P), or (N, 2, P) from each half of its
            data, whose mean counts; with halves, the panel has standard errors.
        clients: names; by default ``client-0``, ``client-1``, ...

    >>> judged = panel([[1, 0], [0, 1]], [[[4, 1], [2, 1]], [[0, 5], [0, 5]]], ["A", "B"])
    >>> judged.matrix.tolist(), judged.stderr.tolist()
    ([[3.0, 0.0], [1.0, 5.0]], [0.0, 0.0])
    """
    moves, halves = matrix_of(updates, "updates", "client", "PANEL"), _directions(gradients)
    (n, p), (judges, q) = moves.shape, halves[0].shape
    if (judges, q) != (n, p):
        ours, theirs = f"{n} updates of {p} coordinates", f"{judges} of {q}"
        raise ReportError(f"PANEL: expected as many gradients of the same length as {ours}, got {theirs}")
    products = np.stack([products_of(moves, half) for half in halves])
    names = names_of(() if clients is None else clients, n, "PANEL: ")
    apart = (products[0] - products[1]) / 2 if len(halves) == 2 else None
    return Panel(products.mean(axis=0), names, apart)


def _directions(gradients: Any) -> list[npt.NDArray[Any]]:
    """Return the gradients of all judges, shape (N, P), once or by half."""
    listed = sequence(gradients, "PANEL: gradients")
    known = isinstance(listed, np.ndarray) and listed.dtype != object
    array = np.asarray(listed) if known else floats(listed, "PANEL: gradients")
    if array.ndim == 3 and array.shape[1] == 2:
        return [matrix_of(array[:, k], "gradients", f"half {k + 1} of judge", "PANEL") for k in (0, 1)]
    if array.ndim != 2:
        raise ReportError(f"PANEL: gradients must have shape (N, P), or (N, 2, P) by half, got {array.shape}")
    return [matrix_of(array, "gradients", "judge", "PANEL")]


def _sums(matrix: Matrix) -> Vector:
    """Return the sum of each row without the diagonal; client order does not matter."""
    rows = enumerate(matrix.tolist())
    return np.array([math.fsum(row[:i] + row[i + 1 :]) for i, row in rows], dtype=np.float64)


# -------------------------------------------------------------------------------------------------- the rule


def hands(matrix: Any, most: float = MOST, clients: Iterable[str] | None = None) -> Shares:
    r"""Return the shares of the rule "hands": each judge hands out an equal part of the budget, a *slice*.

    .. math:: \mathrm{share}_i = \sum_{b \ne i} \frac1N \min\Big(\frac{s_{ib}^+}{\sum_{j \ne b} s_{jb}^+},
        \frac{\min(\mathrm{most}, N - 1)}{N - 1}\Big)

    A judge divides its slice among the others, in proportion to the positive part of its column. Nobody gets
    more of it than ``most`` times an equal part. What this limit leaves over is ``unpaid``: through other
    slices it would break impartiality, and divided equally it would pay who contributed nothing. A column
    without a positive entry, as that of a judge who is silent, is divided equally among the others.

    The rule is impartial (De Clippel, Moulin & Tideman 2008): column i does not enter share i. Raising
    s_ib never lowers share i. The shares are exact rationals, rounded once; ``slices`` holds them by judge,
    and :func:`fedmerit.payouts` divides a budget by these, to the cent.

    Args:
        matrix: entry [i, b] is what client i did for judge b, shape (N, N) with N at least 3: numbers, or
            Python integers of any size. The diagonal does not matter.
        most: how many times an equal part of a slice one client may get; N - 1 or more is no limit.
        clients: names; by default ``client-0``, ``client-1``, ...

    >>> divided = hands([[9, 2, 3], [1, 9, 1], [1, -5, 9]], clients=["A", "B", "C"])
    >>> {name: round(share, 4) for name, share in divided.items()}  # A: (1 + 3/4) / 3
    {'A': 0.5833, 'B': 0.25, 'C': 0.1667}
    >>> hands([[0, 9, 9], [0, 0, 0], [0, 0, 0]], most=1.5).unpaid  # A gets 3/4 of two slices
    0.16666666666666666
    """
    table = _exact(matrix)
    n, names = len(table), names_of(() if clients is None else clients, len(table), "hands: ")
    limit = _limit(most, n)
    slices: dict[str, dict[str, Fraction]] = {}
    exact, held, equal = dict.fromkeys(names, Fraction(0)), set(), []
    for b, judge in enumerate(names):
        said = {
            name: max(row[b], Fraction(0)) for name, row in zip(names, table, strict=True) if name != judge
        }
        total = sum(said.values())
        if not total:
            equal.append(judge)
        parts = {name: x / total if total else Fraction(1, n - 1) for name, x in said.items()}
        held |= {name for name, part in parts.items() if part > limit}
        slices[judge] = {name: min(part, limit) for name, part in parts.items()}
        for name, part in slices[judge].items():
            exact[name] += part / n
    notes = [Note("hands-equal", clients=equal)] if equal else []
    if held:
        notes.append(Note("hands-held", clients=[name for name in names if name in held], most=float(most)))
    return Shares(
        by_client={name: float(share) for name, share in exact.items()}, rule="hands",
        unpaid=float(1 - sum(exact.values())), notes=tuple(notes), slices=slices,
    )  # fmt: skip


def held_back(divided: Shares, losses: Mapping[str, float]) -> Shares:
    """Return shares by `hands` of which these clients lose a part, which stays unpaid.

    >>> both = hands([[0, 1, 1], [1, 0, 1], [1, 1, 0]], clients=["A", "B", "C"])
    >>> {name: round(share, 3) for name, share in held_back(both, {"B": 1.0}).items()}
    {'A': 0.333, 'B': 0.0, 'C': 0.333}
    """
    kept = {name: 1 - Fraction(losses.get(name, 0.0)) for name in divided}
    slices = {
        judge: {name: part * kept[name] for name, part in parts.items()}
        for judge, parts in divided.slices.items()
    }
    exact = dict.fromkeys(divided, Fraction(0))
    for parts in slices.values():
        for name, part in parts.items():
            exact[name] += part / len(slices)
    return replace(
        divided, by_client={name: float(share) for name, share in exact.items()},
        unpaid=float(1 - sum(exact.values())), slices=slices, forfeits=dict(losses),
    )  # fmt: skip


def share_errors(panel: Panel, *, most: float = MOST) -> dict[str, float] | None:
    """Return the standard error of each share by `hands`; None if the panel has no standard errors.

    The matrix is drawn 1000 times, with a fixed seed, around the one that was measured: entries with the
    standard error of their judge, and the errors about one client with their `Panel.correlation`. The spread
    of the shares is their error: what other samples of the judges would change. In simulations, shares plus
    and minus 1.96 of it held the true ones in 91 to 99 % of cases where the median error was below 1 / (6N),
    and in 80 % or more up to 1 / (3N): negative entries count as 0, so mere noise takes from the large ones.

    >>> judged = Panel([[0, 2, 3], [1, 0, 1], [1, 1, 0]], apart=[[0, 0.2, 0], [0, 0, 0], [0, 0.2, 0]])
    >>> {name: round(error, 2) for name, error in share_errors(judged).items()}  # only the second judge's
    {'client-0': 0.02, 'client-1': 0.0, 'client-2': 0.02}
    """
    limit, errors, n = float(_limit(most, panel.n)), panel.stderr, panel.n
    if errors is None:
        return None
    order = sorted(range(n), key=panel.clients.__getitem__)  # draws go by name: client order does not matter
    matrix, errors = panel.matrix[np.ix_(order, order)], errors[order]
    rng, shares, shared = np.random.default_rng(0), np.zeros((DRAWS, n)), math.sqrt(panel.correlation)
    common = shared * rng.standard_normal((DRAWS, n))
    for b in range(n):
        others = np.arange(n) != b
        away = common[:, others] + math.sqrt(1 - shared**2) * rng.standard_normal((DRAWS, n - 1))
        drawn = np.maximum(matrix[others, b] + errors[b] * away, 0.0)
        total = drawn.sum(axis=1, keepdims=True)
        part = np.divide(drawn, total, out=np.full(drawn.shape, 1 / (n - 1)), where=total > 0)
        shares[:, others] += np.minimum(part, limit) / n
    spread = dict(zip(order, shares.std(axis=0, ddof=1).tolist(), strict=True))
    return {name: spread[i] for i, name in enumerate(panel.clients)}


def share_spans(panel: Panel, divided: Shares, most: float = MOST) -> Spans | None:
    """Return the 95 % interval of each share by `hands`, each for one client alone; None without errors.

    It is the share and 1.96 times its error (`share_errors`), rounded outwards to 0.01 %, between 0 and 1.
    What a client loses is off its interval too.
    """
    errors = share_errors(panel, most=most)
    if errors is None:
        return None
    half = {name: 1.96 * errors[name] * (1 - divided.forfeits.get(name, 0.0)) for name in divided}
    return {
        name: (
            max(0.0, math.floor((share - half[name]) * STEP + 1e-5) / STEP),
            min(1.0, math.ceil((share + half[name]) * STEP - 1e-5) / STEP),
        )
        for name, share in divided.items()
    }


def _limit(most: Any, n: int) -> Fraction:
    """Return the largest part of a slice that one client may get, or raise InputError."""
    if n < 3:
        raise InputError(f"hands: expected at least 3 clients, because nobody judges itself, got {n}")
    times = _fraction(most)
    if times is None or times <= 0:
        raise InputError(f"most must be a finite number above 0, got {most!r:.100}")
    return min(times, Fraction(n - 1)) / (n - 1)


def _exact(matrix: Any) -> list[list[Fraction]]:
    """Return a square matrix of exact numbers, or raise ReportError."""
    rows = sequence(matrix, "hands: matrix")
    try:
        array = np.array(rows, dtype=object)
    except ValueError as error:  # rows that are matrices of several shapes
        raise ReportError(f"hands: matrix must have shape (N, N), got {matrix!r:.100}") from error
    if array.ndim != 2 or array.shape[0] != array.shape[1]:
        raise ReportError(f"hands: matrix must have shape (N, N), got shape {array.shape}")
    table = [[_fraction(entry) for entry in row] for row in array]
    for (i, b), entry in np.ndenumerate(array):
        if table[i][b] is None:
            raise ReportError(f"hands: matrix[{i}, {b}] must be a finite number, got {entry!r:.100}")
    return [[entry for entry in row if entry is not None] for row in table]


def _fraction(value: Any) -> Fraction | None:
    """Return a number exactly; None if it is no finite number."""
    if not is_number(value):
        return None
    try:
        return Fraction(*(value.item() if isinstance(value, np.generic) else value).as_integer_ratio())
    except (AttributeError, ValueError, OverflowError):
        return None
