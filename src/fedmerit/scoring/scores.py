r"""The scores that work under secure aggregation, computed from two reported numbers per client.

Equation numbers are those of "Beyond Leave-One-Out: Private and Robust Contribution Evaluation in Federated
Learning" (the paper). fedmerit corrects four slips there: eq. 1 needs the *inverse* binomial
(:func:`fedmerit.shapley`); the sum in the denominator of EE runs over j; the proof of Theorem 1 has a minus
where alpha has a plus; and :func:`surplus` is linear, efficient and compatible with secure aggregation.

``Scores.status`` says what the normalisation did to the order of ``Scores.raw``:

==========  ==============================================================================================
ok          ``values`` orders the clients as ``raw`` does
reversed    pot and denominator have opposite signs: ``values`` orders the clients the wrong way round
fallback    the denominator is zero; the paper's replacement was used (Remark 1)
undefined   every denominator is zero, or there is nothing to distribute: equal split
==========  ==============================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, NeedsTable, ReportError, UndefinedScore
from fedmerit.notes import Note
from fedmerit.scoring.types import (
    A_NUMBER,
    LARGEST,
    Reports,
    Scores,
    Status,
    Table,
    Vector,
    floats,
    names_of,
    sequence,
)

# ------------------------------------------------------------------------------------------ everybody else


def sum_of_others(values: Vector) -> Vector:
    """Return the sums over j != i in twice the working precision; equals stay equal.

    >>> sum_of_others(np.array([1e17, 1.0, 2.0]))[0]
    np.float64(3.0)
    """
    high = math.fsum(values)
    low = math.fsum([*values.tolist(), -high])  # what the total lost to rounding
    others = high - values
    step = others - high
    lost = (high - (others - step)) - (values + step)  # what each difference lost to rounding (TwoSum)
    return others + (lost + low)


def mean_of_others(values: Vector) -> Vector:
    return sum_of_others(values) / (values.size - 1)


def median_of_others(values: Vector) -> Vector:
    """Return the medians over j != i from one sort: removing position p shifts what comes after it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    position = np.empty_like(order)
    position[order] = np.arange(values.size)
    others = values.size - 1
    low, high = (others - 1) // 2, others // 2
    middle: Vector = (ordered[low + (position <= low)] + ordered[high + (position <= high)]) / 2
    return middle


# ---------------------------------------------------------------------------------------------------- pots

Empty = Literal["model", "zero"]

NORMALISED = frozenset({"fallback", "split-equally", "opposite-signs", "empty-pot"})
"""Codes of the notes about the status of FP and EE."""

_EPSILON = float(np.finfo(np.float64).eps)

Candidate = tuple[str, Vector, Vector]
"""The name of a raw vector, the vector, and a bound on the rounding error of each entry."""


def noise(reports: Reports) -> Vector:
    r"""Return what rounding alone can leave per client where its four utilities cancel on paper.

    .. math:: 2 \epsilon \, (|v(M_0)| + |v(M)| + |v(M_0 + U_i)| + |v(M - U_i)|), \qquad \epsilon = 2^{-52}
    """
    shared = abs(reports.empty) + abs(reports.grand)
    return 2 * _EPSILON * (shared + np.abs(reports.alone) + np.abs(reports.without))


def share_out(score: str, candidates: Sequence[Candidate], reports: Reports, stderr: Vector | None) -> Scores:
    r"""Rescale the first candidate x whose sum is not zero, so that it adds up to the pot, v(M).

    .. math:: \frac{x_i}{\sum_j x_j} \cdot v(M)

    A sum counts as zero if it is at most 1e-12 times the sum of absolute values, or at most what rounding can
    leave. ``raw`` is always the first candidate.
    """
    amount = reports.grand
    about = partial(Note, score=score, round=reports.round)
    status: Status = "ok"
    note: Note | None = None
    values = equal = np.full(reports.n, amount / reports.n)
    zero: list[str] = []  # candidates whose sum is zero
    for name, raw, lost in candidates:
        total = math.fsum(raw)
        if abs(total) <= max(1e-12 * math.fsum(np.abs(raw)), math.fsum(lost)):
            zero.append(name)
            continue
        values = raw / total * amount
        if zero:
            status, note = "fallback", about("fallback", zero=zero, used=name)
        elif (amount < 0) != (total < 0):  # a pot of zero is handled below
            status, note = "reversed", about("opposite-signs", pot=amount, sum=total)
        break
    else:
        status, note = "undefined", about("split-equally", zero=zero)
    if not amount:
        values, status, note = equal, "undefined", about("empty-pot")
    return Scores(
        score=score, clients=reports.clients, values=values, raw=candidates[0][1], gain=reports.gain,
        status=status, stderr=stderr, notes=(note,) if note else (),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- the scores

Combine = Literal["mean", "median"]


def loo(reports: Reports) -> Scores:
    r"""Return Leave-One-Out (Definition 2): what the aggregate loses without client i.

    .. math:: \mathrm{LOO}(i) = v(M) - v(M - U_i)

    >>> loo(Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])).values
    array([0., 1., 2.])
    """
    _check(reports, "LOO")
    return _linear("LOO", reports.grand - reports.without, reports, reports.se_loo)


def ioi(reports: Reports) -> Scores:
    r"""Return Include-One-In: what client i alone adds to the starting model (second term of eq. 3).

    .. math:: \mathrm{IOI}(i) = v(M_0 + U_i) - v(M_0)

    >>> ioi(Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])).values
    array([0., 1., 2.])
    """
    _check(reports, "IOI")
    return _linear("IOI", reports.alone - reports.empty, reports, reports.se_ioi)


def alpha(reports: Reports, *, empty: Empty = "model") -> Scores:
    r"""Return the mean of LOO and IOI (eq. 3): raw, signed, never reversed; it pays where members report.

    .. math:: \alpha(i) = \frac{[v(M) - v(M - U_i)] + [v(M_0 + U_i) - v(M_0)]}{2}

    It equals the Shapley value in games where at most two clients interact at a time, and hence up to third
    order in the updates for a smooth utility. ``empty`` is what nobody's coalition is worth: v(M0)
    (``"model"``), as in the paper, or 0 (``"zero"``), as in the code published with it. Every alpha then
    grows by v(M0)/2 and has no standard error.

    >>> alpha(Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])).values
    array([0., 1., 2.])
    """
    _check(reports, "ALPHA")
    reports = _played(reports, empty)
    return replace(_linear("ALPHA", _alpha(reports), reports, reports.se_alpha), **_sketched(reports))


def fp(reports: Reports, *, empty: Empty = "model") -> Scores:
    r"""Return Fair-Private (Definition 3, eq. 2): alpha, rescaled to add up to v(M).

    .. math:: \mathrm{FP}(i) = \frac{\alpha(i)}{\sum_{j=1}^N \alpha(j)} \cdot v(M)

    If the denominator is zero, LOO takes the place of alpha, then IOI (the paper's Remark 1). ``empty``
    is explained at :func:`alpha`; with ``"zero"`` and a utility like accuracy, signs hardly ever turn.

    >>> fp(Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])).values
    array([0., 1., 2.])
    >>> worse = Reports(empty=6, grand=5, alone=[4, 5], without=[5, 4])     # B is the better one
    >>> fp(worse).status, fp(worse, empty="zero").values
    ('reversed', array([2., 3.]))
    """
    _check(reports, "FP", everyone=True)
    reports = _played(reports, empty)
    lost = noise(reports)
    candidates = (
        ("alpha", _alpha(reports), lost),
        ("LOO", reports.grand - reports.without, lost),
        ("IOI", reports.alone - reports.empty, lost),
    )
    shared = share_out("FP", candidates, reports, stderr=reports.se_alpha)
    return replace(shared, **_sketched(reports))


def ee(reports: Reports, *, combine: Combine = "mean", empty: Empty = "model") -> Scores:
    r"""Return Everybody-Else: what client i is worth according to all others (Definition 4, eqs. 4 and 5).

    .. math::
        \beta(i) = \sum_{j \ne i} \frac{v(M) - v(M_0 + U_j)}{(N-1)^2}, \quad
        \gamma(i) = \sum_{j \ne i} \frac{v(M - U_j) - v(M_0)}{(N-1)^2}, \quad
        \mathrm{EE}(i) = \frac{[\beta(i) + \gamma(i)]/2}{\sum_j [\beta(j) + \gamma(j)]/2} \cdot v(M)

    ``raw`` is (beta + gamma)/2. Client i's own report does not enter ``raw[i]``; it does enter i's rank and,
    through the denominator, i's share. If the denominator is zero, gamma alone is used, then beta alone.
    ``combine="median"`` takes the median of the others' reports in the place of their mean; it gives at most
    three values. ``empty`` is explained at :func:`alpha`.

    >>> ee(Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])).values
    array([0.75, 1.  , 1.25])
    """
    _check(reports, "EE", everyone=True)
    reports = _played(reports, empty)
    if combine not in ("mean", "median"):
        raise InputError(f"combine must be 'mean' or 'median', got {combine!r}")
    others = mean_of_others if combine == "mean" else median_of_others
    beta = reports.grand - reports.alone
    gamma = reports.without - reports.empty
    coalition = 2 * (reports.n - 1)  # a mean over N-1 others, each about a coalition of N-1
    lost = others(noise(reports)) / coalition  # a false report that is not counted costs no precision
    candidates = tuple(
        (name, others(r) / coalition, lost)
        for name, r in (("beta + gamma", beta + gamma), ("gamma", 2 * gamma), ("beta", 2 * beta))
    )
    return share_out("EE", candidates, reports, stderr=None)


def surplus(reports: Reports) -> Scores:
    r"""Return alpha plus an equal share of the rest of the gain: linear, and it adds up to the gain.

    .. math:: \mathrm{SUR}(i) = \alpha(i) + \frac{v(M) - v(M_0) - \sum_j \alpha(j)}{N}

    It is the mean of the CIS and ENSC values of game theory, and needs a report from everyone in the sum. A
    null player does not get 0, so it serves bookkeeping, not payment.

    >>> surplus(Reports(empty=0, grand=6, alone=[0, 1, 2], without=[6, 5, 4])).values
    array([1., 2., 3.])
    """
    _check(reports, "SURPLUS", everyone=True)
    share = _alpha(reports)
    share = share + (reports.gain - math.fsum(share)) / reports.n
    return _linear("SURPLUS", share, reports)


def solo(reports: Reports) -> Scores:
    r"""Return SOLO: how much better than the first model the model is that client i trained alone.

    .. math:: \mathrm{SOLO}(i) = v(M^{\{i\}}) - v(M^{\emptyset})

    These are the singleton coalitions of the retraining game. Nobody but the client can check it.

    >>> solo(Reports(empty=0, grand=2, alone=[0, 1], without=[1, 0], solo=[.5, .75], solo_empty=.25)).values
    array([0.25, 0.5 ])
    """
    _check(reports, "SOLO")
    if reports.solo is None or reports.solo_empty is None:
        raise UndefinedScore(f"{reports.where}SOLO needs the utility of models trained alone (solo=)")
    return _linear("SOLO", reports.solo - reports.solo_empty, reports)


def cos(reports: Reports) -> Scores:
    """Return COS: the cosine of a client's update and the aggregate's; without one 0, with a note.

    >>> cos(Reports(empty=0, grand=2, alone=[0, 1], without=[1, 0], cosine=[0.5, None])).values
    array([0.5, 0. ])
    """
    _check(reports, "COS")
    if reports.cosine is None:
        raise UndefinedScore(f"{reports.where}COS needs the clients' cosines (cosine=)")
    null = np.isnan(reports.cosine)
    notes = tuple(
        Note("no-cosine", client=reports.clients[i], round=reports.round) for i in np.flatnonzero(null)
    )
    return _linear("COS", np.where(null, 0.0, reports.cosine), reports, notes=notes)


def influence(
    reports: Reports, *, empty: Empty = "model"
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    r"""Return whose reports move whose EE (the paper's table of relative influence), shape (N, N).

    .. math:: \mathrm{influence}[i, j] = \frac{r_i}{T - r_j} \ (i \ne j), \qquad
        r_i = [v(M) - v(M_0 + U_i)] + [v(M - U_i) - v(M_0)], \quad T = \sum_k r_k

    Entry [i, j] is the weight of reporter i in the score of client j. Columns sum to 1; the diagonal is 0.

    >>> influence(Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])).round(3)
    array([[0.   , 0.75 , 0.6  ],
           [0.667, 0.   , 0.4  ],
           [0.333, 0.25 , 0.   ]])
    """
    _check(reports, "influence", everyone=True)
    reports = _played(reports, empty)
    r = (reports.grand - reports.alone) + (reports.without - reports.empty)
    about = sum_of_others(r)
    zero = np.flatnonzero(np.abs(about) <= sum_of_others(1e-12 * np.abs(r) + noise(reports)))
    if zero.size:
        name = reports.clients[zero[0]]
        raise UndefinedScore(f"{reports.where}the others' reports on client {name!r} add up to zero")
    matrix = r[:, None] / about[None, :]
    np.fill_diagonal(matrix, 0.0)
    return matrix


# ------------------------------------------------------------------------------------- from plain updates


def cos_model(updates: npt.ArrayLike, start: npt.ArrayLike, clients: Iterable[str] | None = None) -> Scores:
    r"""Return COS-MODEL, the paper's COS: the cosine of two models, M0 + U_i and M.

    .. math:: \frac{\langle M_0 + U_i, M \rangle}{\| M_0 + U_i \| \, \| M \|}, \qquad M = M_0 + \sum_j U_j

    ``updates`` are U_i, shape (N, P), which sum up to M - M0; ``start`` is M0, shape (P,). All models contain
    M0, so the values are close to 1 and to each other; :func:`cos` compares updates. ``gain`` is 0: a cosine
    divides nothing. It is undefined if one of the models is zero.

    >>> cos_model([[3, 0], [0, 1]], [0, 3], ["A", "B"]).values.round(2)        # (3, 3) and (0, 4) with (3, 4)
    array([0.99, 0.8 ])
    """
    moves = matrix_of(updates, "updates", "client", "COS-MODEL")
    first = matrix_of(np.asarray(start)[None], "start", "model", "COS-MODEL")[0]
    if (p := moves.shape[1]) != (q := len(first)):
        raise ReportError(f"COS-MODEL: expected updates and start of the same length, got {p} and {q}")
    products, squares, whole = np.zeros(len(moves)), np.zeros(len(moves)), 0.0
    for begin in range(0, len(first), COLUMNS):
        part = slice(begin, begin + COLUMNS)
        own, base = moves[:, part].astype(np.float64), first[part].astype(np.float64)
        grand, alone = base + own.sum(0), base + own
        products, squares = products + alone @ grand, squares + (alone * alone).sum(1)
        whole += float(grand @ grand)
    if not whole or not squares.all():
        raise UndefinedScore("COS-MODEL: a model is zero, so it has no direction")
    names = names_of(() if clients is None else clients, len(moves), "COS-MODEL: ")
    values = products / np.sqrt(squares * whole)
    return Scores(score="COS-MODEL", clients=names, values=values, raw=values, gain=0.0)


# -------------------------------------------------------------------------------- along a public direction


def aumann_shapley(
    updates: npt.ArrayLike,
    gradient: npt.ArrayLike,
    clients: Iterable[str] | None = None,
    *,
    sizes: npt.ArrayLike | None = None,
) -> Scores:
    r"""Return PHI, the Aumann-Shapley value of a round: how far an update leads along the mean gradient.

    .. math:: \phi_i = \langle U_i, \bar g \rangle, \qquad
        \bar g = \int_0^1 \nabla v(M_0 + t (M - M_0)) \, dt

    It is the value of the continuous game :math:`v(M_0 + \sum_i t_i U_i)` (Aumann & Shapley 1974): linear in
    the update, adding up to v(M) - v(M0) up to the error of the integral, and unchanged if a client splits
    into two. :func:`fedmerit.simulation.direction.direction` computes the gradient. A gradient that is zero
    everywhere leaves it undefined. ``gain`` is the sum of the scores.

    With the gradient of each of B >= 2 blocks of the test set, ``stderr`` is the root of the diagonal of
    ``covariance`` (see :class:`~fedmerit.Scores`), with B - 1 degrees of freedom.

    Args:
        updates: U_i, shape (N, P); they sum up to M - M0.
        gradient: shape (P,), or (B, P) by block of the test set.
        clients: names; by default ``client-0``, ``client-1``, ...
        sizes: samples in each block, shape (B,); by default equal.

    >>> two = aumann_shapley([[1, 0], [0, 1]], [[4, 1], [2, 3]], ["A", "B"])  # v = 3 x + 2 y on the whole
    >>> two.as_dict(), two.gain, two.stderr
    ({'A': 3.0, 'B': 2.0}, 5.0, array([1., 1.]))
    """
    moves, slopes = matrix_of(updates, "updates", "client"), matrix_of(gradient, "gradient", "block")
    if (p := moves.shape[1]) != (q := slopes.shape[1]):
        raise ReportError(f"PHI: expected updates and gradient of the same length, got {p} and {q}")
    sizes = np.ones(len(slopes)) if sizes is None else sizes
    weights, products = _block_weights(sizes, len(slopes)), products_of(slopes, moves)
    if not any((weights @ slopes[:, at : at + COLUMNS]).any() for at in range(0, p, COLUMNS)):
        raise UndefinedScore("PHI: the gradient is zero everywhere, so there is no gain to divide")
    return from_blocks(products, sizes, clients)


def from_blocks(
    products: npt.ArrayLike, sizes: npt.ArrayLike, clients: Iterable[str] | None = None
) -> Scores:
    """Return PHI from the scalar products <U_i, g_b> of all blocks and clients, shape (B, N).

    >>> from_blocks([[4, 1], [2, 3]], [1, 3]).values
    array([2.5, 2.5])
    """
    blocks = floats(products, "PHI: products")
    weights = _block_weights(sizes, len(blocks))
    names = names_of(() if clients is None else clients, blocks.shape[1], "PHI: ")
    values = np.array([math.fsum(column) for column in (weights[:, None] * blocks).T])
    scores = Scores(score="PHI", clients=names, values=values, raw=values, gain=math.fsum(values))
    if len(blocks) == 1:
        return scores
    scores = replace(scores, blocks=blocks, sizes=floats(sizes, "PHI: sizes"))
    return replace(scores, stderr=None if scores.covariance is None else np.sqrt(np.diag(scores.covariance)))


COLUMNS = 1 << 20
"""Coordinates of updates at a time: their products are in float64."""


def products_of(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the scalar products of the rows of two matrices, shape (rows on the left, on the right)."""
    products = np.zeros((len(left), len(right)))
    for start in range(0, left.shape[1], COLUMNS):
        part = slice(start, start + COLUMNS)
        products += left[:, part].astype(np.float64) @ right[:, part].astype(np.float64).T
    return products


def matrix_of(values: Any, what: str, row: str, score: str = "PHI") -> npt.NDArray[Any]:
    """Return real, finite numbers as a matrix, without a copy if they are in an array."""
    listed = sequence(values, f"{score}: {what}")
    array = listed if isinstance(listed, np.ndarray) and listed.dtype.kind in "iuf" else floats(listed, what)
    if array.ndim == 1 and what == "gradient":
        array = array[None]
    if array.ndim != 2 or not array.size:
        expected = "(P,) or (blocks, P)" if what == "gradient" else "(clients, P)"
        raise ReportError(f"{score}: {what} must have shape {expected}, none of them 0, got {array.shape}")
    for place, vector in enumerate(array):
        if not max(-float(vector.min()), float(vector.max())) <= LARGEST:  # false also with a NaN
            problem = f"every value must be {A_NUMBER}; {row} {place} has another one"
            raise ReportError(f"{score}: {what}: {problem}")
    return array


def _block_weights(sizes: npt.ArrayLike, blocks: int) -> Vector:
    counts = floats(sizes, "PHI: sizes")
    if counts.shape != (blocks,) or not (counts > 0).all() or not (counts <= LARGEST).all():
        raise ReportError(f"PHI: sizes must be {blocks} positive numbers, one per block, got {sizes!r:.100}")
    return np.asarray(counts / counts.sum(), dtype=np.float64)


# ------------------------------------------------------------------------------------------- the catalogue


@dataclass(frozen=True)
class Score:
    """An entry of the catalogue: a score's function and name, where it is defined, and what it needs."""

    function: Callable[..., Scores]
    title: str
    equation: str
    needs: str
    reported: bool = True  # whether ``function`` takes `Reports` and nothing else


SCORES = {
    "LOO": Score(loo, "Leave-One-Out", "Definition 2", "without"),
    "IOI": Score(ioi, "Include-One-In", "eq. 3, second term", "alone"),
    "ALPHA": Score(alpha, "mean of LOO and IOI", "eq. 3", "alone, without"),
    "FP": Score(fp, "Fair-Private", "eq. 2", "alone, without of everyone"),
    "EE": Score(ee, "Everybody-Else", "eqs. 4, 5", "alone, without of everyone"),
    "SURPLUS": Score(surplus, "alpha plus an equal rest", "beyond the paper", "alone, without of everyone"),
    "SOLO": Score(solo, "trained alone", "beyond the paper", "solo, solo_empty"),
    "COS": Score(cos, "cosine of updates", "section 5.1, in words", "cosine"),
    "COS-MODEL": Score(cos_model, "cosine of models", "section 5.1, formula", "updates, M0", reported=False),
    "PHI": Score(aumann_shapley, "Aumann-Shapley", "beyond the paper", "updates, gradient", reported=False),
}
"""Every score of one round, by its name in files and on the command line."""

_COMPUTED: WeakKeyDictionary[Reports, dict[str, Scores]] = WeakKeyDictionary()


def score_of(reports: Reports, name: str) -> Scores:
    """Return a score of the catalogue, computed once per reports."""
    computed = _COMPUTED.setdefault(reports, {})
    if name not in computed:
        computed[name] = SCORES[name].function(reports)
    return computed[name]


def scores_of(reports: Reports) -> dict[str, Scores | None]:
    """Return every score of one round whose inputs were reported; a silent client makes some None."""
    inputs = {"SOLO": reports.solo, "COS": reports.cosine}
    scores: dict[str, Scores | None] = {}
    for name, entry in SCORES.items():
        if entry.reported and inputs.get(name, reports) is not None:
            try:
                scores[name] = score_of(reports, name)
            except UndefinedScore:
                scores[name] = None
    return scores


def _sketched(reports: Reports) -> dict[str, Any]:
    return {} if reports.sketch is None else {"sketch": reports.sketch.T, "freedom": reports.freedom}


def _played(reports: Reports, empty: Empty) -> Reports:
    """Return the reports of the game in which nobody's coalition is worth v(M0), or 0.

    Standard errors are those of differences from v(M0), so with 0 there are none.
    """
    if empty == "model":
        return reports
    if empty != "zero":
        raise InputError(f"empty must be 'model' (v(M0)) or 'zero', got {empty!r}")
    return replace(
        reports, empty=0.0, se_ioi=None, se_alpha=None, se_alpha_total=None, sketch=None, freedom=None
    )


def _alpha(reports: Reports) -> Vector:
    return ((reports.grand - reports.without) + (reports.alone - reports.empty)) / 2


def _check(reports: Reports, score: str, *, everyone: bool = False) -> None:
    if isinstance(reports, Table):
        raise NeedsTable(f"{score} takes Reports; from a full table use Reports.from_table(table)")
    if not isinstance(reports, Reports):
        raise ReportError(f"{score} takes Reports, got {type(reports).__name__}")
    if everyone and reports.silent:
        problem = f"needs a report from everyone in the sum; silent: {', '.join(reports.silent)}"
        raise UndefinedScore(f"{reports.where}{score} {problem}")


def _linear(
    score: str, raw: Vector, reports: Reports, stderr: Vector | None = None, notes: tuple[str, ...] = ()
) -> Scores:
    return Scores(
        score=score, clients=reports.clients, values=raw, raw=raw, gain=reports.gain, stderr=stderr,
        notes=notes,
    )  # fmt: skip
