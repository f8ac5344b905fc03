r"""From scores to shares: who gets which part of a reward, why, and how sure that is.

Shares follow ``Scores.raw``, never a normalised vector, and no decision is silent: scores that allow no
shares raise ``UndefinedShares``, and decisions made on the way are in ``Shares.notes``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, UndefinedShares
from fedmerit.notes import Note, code_of
from fedmerit.scoring.amounts import ByClient, Payouts, money_of
from fedmerit.scoring.sampling import upper_quantile
from fedmerit.scoring.scores import NORMALISED, median_of_others, sum_of_others
from fedmerit.scoring.types import SHOWN, Scores, Vector, in_order, level_of, number, rounding, settle
from fedmerit.scoring.uncertainty import compare_pairs, covariance_of, error_of, pair_quantile_of, sure_signs

# --------------------------------------------------------------------------------------------------- fence

Rows = npt.NDArray[np.float64]
"""One row per set of scores, one column per client."""

TIMES = 4.0
"""Nobody gets more than this many times the mean of the others who count."""
BELOW = 2.0
"""From this many standard errors below zero on, a member gets no part of what the fence cuts off."""
LARGEST_ERROR = 4.0
"""An error decides about money up to this many times the median of the others' errors. Of 639 members in the
committed runs 13 have larger ones, all of them with a planted fault or a cheat."""


@dataclass(frozen=True)
class Fence:
    """The numbers of a division by "fenced": with them, a client's score gives its share."""

    fence: float  # kappa, the largest share
    rest: float  # a, the equal part of everybody who counts fully
    positive: float  # U, the sum of the positive scores
    counted: float  # G, how many clients count
    error: float  # sigma, the root mean square of the standard errors; 0 if there are none

    def share(self, score: float) -> float:
        """Return the share of a client with this score."""
        counts = float(counts_of(np.array([score]), self.error)[0])
        return min(self.fence, max(score, 0.0) / self.positive + self.rest * counts)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def believed(errors: Vector) -> Vector:
    """Return how far each error decides about money: up to four times the median of the others' errors.

    Errors of 0 do not count in the median: whoever sends no update has no error. So half of those who have
    an error would have to lie together to raise the errors of others or to lower them.
    """
    limited, positive = np.array(errors, dtype=np.float64), np.asarray(errors) > 0
    if np.count_nonzero(positive) > 1:
        others = median_of_others(limited[positive])
        limited[positive] = np.minimum(limited[positive], LARGEST_ERROR * others)
    return limited


def pooled_error(scores: Scores) -> float | None:
    """Return sigma, the root mean square of the errors as far as they are believed; None without errors."""
    covariance = scores.covariance
    errors = scores.stderr if covariance is None else np.sqrt(np.diag(covariance))
    return None if errors is None else math.sqrt(math.fsum(believed(errors) ** 2) / scores.n)


def counts_of(raw: Rows, error: float) -> Rows:
    """Return g: 1 for scores that are not below zero, 0 from two standard errors below on."""
    if error <= 0:
        return np.ones_like(raw)
    return np.asarray(np.clip(1 + raw / (BELOW * error), 0.0, 1.0), dtype=np.float64)


def fenced(scores: Scores, weights: Vector) -> tuple[Vector, Fence]:
    r"""Return the shares of the rule "fenced", and the numbers behind them.

    With the raw scores x, the ``weights`` u_i = max(x_i, 0), their sum U, and standard errors s_i as far as
    they are `believed`:

    .. math::
        g_i = \mathrm{clip}\Big(1 + \frac{x_i}{2\sigma}, 0, 1\Big), \quad G = \sum_j g_j, \quad
        \sigma^2 = \frac1N \sum_j s_j^2, \qquad
        p_i = \min\Big(\kappa,\; \frac{u_i}{U} + a\, g_i\Big), \quad \kappa = \frac{4}{G + 3},
        \quad a \text{ such that } \sum_j p_j = 1

    Nobody gets more than kappa, four times the mean of the others who count. What is cut off is divided by g:
    equally, but a member two standard errors below zero gets no part of it. If nobody is above the fence,
    a = 0 and p is the rule "fair".

    Raising x_i alone never lowers p_i. p is continuous, so look at its derivative where the set of members at
    the fence (held, h of them) is fixed. Let f = u / U, and F, G' the sums of f and g over those not held, so
    that a = (1 - h kappa - F) / G'.

    1. *x_i > 0, not held*: raising x_i raises f_i by (1 - f_i) / U and F by (1 - F) / U per unit, so
       dp_i = ((1 - f_i) - (1 - F) / G') / U. That is at least 0, as f_i <= F and G' >= g_i = 1.
    2. *x_i > 0, held*: p_i = kappa, which does not depend on x_i > 0.
    3. *-2 sigma < x_i < 0*: p_i = a g_i. Raising g_i lowers kappa, which can only raise a, and raises G', so
       dp_i >= a (1 - g_i / G') >= 0 per unit of g_i.

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[0, 1, 9], raw=[0, 1, 9], gain=10)
    >>> shares, how = fenced(s, s.raw)          # kappa = 4/6; the other third: .1 + 2a = 1/3
    >>> round(how.fence, 4), shares.round(4).tolist()
    (0.6667, [0.1167, 0.2167, 0.6667])
    """
    error = pooled_error(scores) or 0.0
    counts, scale = counts_of(scores.raw, error), float(weights.max())  # scaled, so that sums stay finite
    u = weights / scale
    rows, rest, fence = cut(u[None, :] / math.fsum(u), counts[None, :])
    return rows[0], Fence(
        fence=float(fence[0]), rest=float(rest[0]), positive=math.fsum(u) * scale,
        counted=math.fsum(counts), error=error,
    )  # fmt: skip


def cut(base: Rows, counts: Rows) -> tuple[Rows, Vector, Vector]:
    """Return min(kappa, base + a * counts) with the a for which each row sums to 1; and a and kappa.

    Sort by the a at which each meets the fence, and take the smallest number of them for which the rest fits.
    ``base`` is at least 0 and sums to at most 1 per row; ``counts`` is g, 1 wherever base is positive.
    """
    n = base.shape[1]
    fence = TIMES / (np.sort(counts, axis=1).sum(axis=1) + TIMES - 1)  # sorted: client order does not matter
    with np.errstate(divide="ignore"):
        meets = np.where(counts > 0, (fence[:, None] - base) / counts, np.inf)
    order = np.argsort(meets, axis=1, kind="stable")
    free, among, at = (np.take_along_axis(rows, order, axis=1) for rows in (base, counts, meets))
    free, among = (np.cumsum(rows[:, ::-1], axis=1)[:, ::-1] for rows in (free, among))
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = (1 - np.arange(n) * fence[:, None] - free) / among
    held = np.argmax((rest <= at) & (among > 0), axis=1)
    rest = np.maximum(0.0, np.take_along_axis(rest, held[:, None], axis=1))
    shares_ = np.minimum(fence[:, None], base + rest * counts)
    return np.asarray(shares_), np.asarray(rest[:, 0]), np.asarray(fence)


# -------------------------------------------------------------------------------------------------- shares

Rule = Literal["fair", "fenced", "impartial", "equal"]
AnyRule = Rule | Literal["hands"]  # also that of a panel

SELF_REPORTED = frozenset({"ALPHA", "LOO", "IOI"})
"""Scores whose entry i is client i's own report, in units of the gain, and in which nothing else depends on
that report. FP is not among them: its raw entries are alpha, but any client can change its status for all."""

_NOTHING = 1e-12  # utility that may be left by rounding alone
_LEAST = 1e-200  # a weight that is smaller beside the largest one cannot be scaled with full precision


USUAL_RULE: Rule = "fenced"


@dataclass(frozen=True, eq=False)
class Shares(ByClient[float]):
    """Shares by name, which sum to 1 minus ``unpaid``; how sure they are says `share_intervals`."""

    rule: AnyRule
    unpaid: float = 0.0
    notes: tuple[str, ...] = ()
    fence: Fence | None = None  # the numbers behind "fenced"
    equal: float = 0.0  # these four as in `shares`
    floor: float = 0.0
    cap: float = 1.0
    forfeits: Mapping[str, float] = field(default_factory=dict)
    among: int = 0  # how many clients take part in the equal part
    slices: Mapping[str, Mapping[str, Fraction]] = field(default_factory=dict)  # "hands": judge -> its parts

    def plot(self) -> Any:
        """Return an Altair chart of the shares, largest first; nothing is shown."""
        return SHOWN["shares_plot"](self)


@runtime_checkable
class Judged(Protocol):
    """What members say of each other, which is divided by "hands": a `Panel`, which stands on this module."""

    def hands(self) -> Shares: ...


def shares(
    scores: Scores | Judged,
    rule: AnyRule = USUAL_RULE,
    *,
    equal: float = 0.0,
    floor: float = 0.0,
    cap: float = 1.0,
    forfeits: Mapping[str, float] | None = None,
) -> Shares:
    r"""Return the share of a reward that each client gets.

    .. math:: \text{fair: } \frac{w_i}{\sum_j w_j}, \quad w_i = \max(x_i, 0), \qquad
              \text{impartial: } \frac1N \Big(1 - \frac{1}{N-1}
              \sum_{j \ne i} \mathrm{clip}(x_j / D, 0, 1)\Big)

    where x is ``scores.raw`` and D ``scores.gain``. "fenced" is "fair" with a fence: nobody gets more than
    four times the mean of the others, and what is cut off is divided equally (`fenced`). Under "impartial", a
    client's own report does not affect its own share at all. In return, the shares are nearly equal, a part
    stays unpaid, D must be above 1e-12, and x must be ALPHA, LOO or IOI. "equal" ignores the scores. N is the
    number of clients that have a score: a client that never reported gets nothing under any rule. A negative
    score counts as 0, with a note, and so does one that only rounding separates from 0.

    With ``equal`` = e, "fair" and "fenced" divide only the rest, 1 - e. The part e is divided equally among
    the K clients whose score is not surely below zero (`takes_part`): p_i -> (1 - e) p_i + e / K.

    All rules but "equal" need scores with status "ok". "fair" and "fenced" also need something to divide: the
    positive scores must sum to more than 1e-12 and more than two standard errors, added up over clients,
    because errors on common test samples may point the same way. Clients state their own errors, so an error
    counts up to four times the median of the others' errors; a note names whose.

    Args:
        scores: usually ``alpha`` summed over rounds (``accumulate``); under "hands" a `Panel`.
        rule: "fair", "fenced", "impartial" or "equal"; or "hands" (:func:`fedmerit.hands`), which takes none
            of the following.
        equal: which part is divided equally, 0 to 1; only for "fair" and "fenced".
        floor: smallest share, 0 to 1/N.
        cap: largest share, 1/N to 1. What floor and cap change is spread over the other clients in
            proportion; under "impartial" it changes ``unpaid`` instead.
        forfeits: client -> which part of its share it loses, 0 to 1. That part stays unpaid.

    Raises:
        UndefinedShares: these scores allow no shares; its note says why. "equal" always pays.

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[-1, 1, 3], raw=[-1, 1, 3], gain=4)
    >>> dict(shares(s, "fair"))
    {'A': 0.0, 'B': 0.25, 'C': 0.75}
    >>> dict(shares(s, "fair", equal=0.75, forfeits={"C": 1.0}))
    {'A': 0.25, 'B': 0.3125, 'C': 0.0}
    >>> dict(shares(s, "impartial")), shares(s, "impartial").unpaid
    ({'A': 0.16666666666666666, 'B': 0.20833333333333334, 'C': 0.2916666666666667}, 0.33333333333333326)
    """
    if rule == "hands" or not isinstance(scores, Scores):
        return _handed(scores, rule, (equal, floor, cap, dict(forfeits or {})))
    equal, floor, cap, lost = _check(scores, rule, equal, floor, cap, forfeits or {})
    notes = _notes(scores, rule)
    if reason := _why_undefined(scores, rule):
        raise UndefinedShares(Note("undefined", reason=reason))
    takes = takes_part(scores) if equal else np.ones(scores.n, dtype=bool)
    vector, how = by_rule(scores, rule, equal, takes, floor, cap)
    notes += _notes_on(scores, rule, how)
    if not takes.all():
        left_out = [name for name, takes_it in zip(scores.clients, takes, strict=True) if not takes_it]
        notes.append(Note("not-equal", clients=left_out))
    for name, part in lost.items():
        vector[scores.clients.index(name)] *= 1 - part
        notes.append(Note("forfeited", client=name, part=part))
    unpaid = 1.0 - math.fsum(vector)
    return Shares(
        by_client=dict(zip(scores.clients, vector.tolist(), strict=True)), rule=rule,
        unpaid=unpaid if unpaid > 1e-9 else 0.0, notes=tuple(notes), fence=how, equal=equal, floor=floor,
        cap=cap, forfeits=lost, among=int(np.count_nonzero(takes)) if equal else 0,
    )  # fmt: skip


def _handed(scores: object, rule: str, options: tuple[object, ...]) -> Shares:
    if not isinstance(scores, Judged):
        expected = "a Panel under the rule 'hands'" if rule == "hands" else "Scores"
        raise InputError(f"shares takes {expected}, got {type(scores).__name__}")
    if rule != "hands":
        raise InputError(f"shares divides a Panel by the rule 'hands', got {rule!r:.100}")
    if options != (0.0, 0.0, 1.0, {}):
        raise InputError("shares: the rule 'hands' takes no equal part, floor, cap or forfeits")
    return scores.hands()


def takes_part(scores: Scores) -> npt.NDArray[np.bool_]:
    """Return who takes part in what is divided equally: all whose score is not surely below zero."""
    if scores.stderr is None:
        return np.ones(scores.n, dtype=bool)
    return np.array(sure_signs(replace(scores, stderr=believed(scores.stderr)))) >= 0


def null_share(scores: Scores, equal: float = 0.0) -> float | None:
    r"""Return the share that a client without contribution may expect under "fair"; None if unknown.

    .. math:: \frac{\mathrm{E} \max(s Z, 0)}{\sum_j \max(x_j, 0)} = \frac{s}{\sqrt{2 \pi} \sum_j \max(x_j, 0)}

    with s the median standard error, since max(x, 0) drops bad luck; and its part of what is divided equally.
    """
    positive = math.fsum(np.maximum(scores.raw, 0.0))
    if scores.stderr is None or positive <= 0:
        return None
    lucky = float(np.median(scores.stderr)) / math.sqrt(2 * math.pi) / positive
    return (1 - equal) * lucky + equal / max(1, int(np.count_nonzero(takes_part(scores))))


def by_rule(
    scores: Scores, rule: Rule, equal: float, takes: npt.NDArray[np.bool_], floor: float, cap: float
) -> tuple[Vector, Fence | None]:
    """Return the shares of scores that allow them, and the numbers behind "fenced"."""
    if rule == "equal":
        return np.full(scores.n, 1 / scores.n), None
    if rule == "impartial":  # each share is at most 1/N, and so is the floor: no overspending
        part = np.clip(scores.raw, 0.0, scores.gain) / scores.gain
        return np.clip((1 - sum_of_others(part) / (scores.n - 1)) / scores.n, floor, cap), None
    weights, how = weights_of(scores), None
    if rule == "fenced":
        weights, how = fenced(scores, weights)
    else:
        weights = weights / weights.max()  # scaled, so that the sum stays finite
        weights = weights * (1 / math.fsum(weights))
    if equal:
        weights = (1 - equal) * weights + equal * takes / np.count_nonzero(takes)
    if (floor, cap) == (0.0, 1.0):
        return weights, how
    limited = _between(weights[None], floor, cap)[0]
    if np.isnan(limited).any():
        raise InputError(
            f"cap={cap:g} leaves a part that nobody may take: only {np.count_nonzero(weights)} of {scores.n} "
            "clients have a positive weight; raise the cap or the floor"
        )
    return limited, how


def weights_of(scores: Scores) -> Vector:
    """Return the positive part of each score; scores that are equal up to rounding have equal weights."""
    weights = np.maximum(scores.raw, 0.0)
    weights[weights <= np.maximum(rounding(scores.raw), _LEAST * weights.max())] = 0.0
    ordered = np.sort(weights)
    grid, first = np.unique(settle(ordered), return_index=True)
    return ordered[first][np.searchsorted(grid, settle(weights))]  # equal up to rounding: equal to the cent


def _between(weights: Rows, floor: float, cap: float) -> Rows:
    """Return clip(t * weights, floor, cap) with the t for which each row sums to 1; NaN where there is none.

    The sum rises with t and is linear between the points where a client leaves the floor or meets the cap.
    Find the linear piece by bisection, then t on it from the clients strictly between floor and cap.
    """
    w = np.sort(weights, axis=1)  # so that sums do not depend on the order of clients
    positive = w > 0
    rest, many = floor * np.count_nonzero(~positive, axis=1), np.count_nonzero(positive, axis=1)
    never = np.full(w.shape, np.inf)
    with np.errstate(over="ignore"):  # a weight may be too small for a finite t to take it to the cap
        leave, meet = (np.divide(end, w, out=never.copy(), where=positive) for end in (floor, cap))
    corners = np.sort(np.concatenate([leave, meet], axis=1), axis=1)
    low, high = np.zeros(len(w), np.int64), np.maximum(2 * many - 1, 0)
    every = np.arange(len(w))
    while (low < high).any():  # the last corner at which the sum is still at most 1
        middle = (low + high + 1) // 2
        at = np.clip(corners[every, middle, None] * w, floor, cap, where=positive, out=np.zeros(w.shape))
        fits = rest + at.sum(axis=1) <= 1
        low, high = np.where(fits, middle, low), np.where(fits, high, np.maximum(middle - 1, low))
    t = corners[every, low][:, None]
    free = positive & (leave <= t) & (t < meet)
    held = np.where(t >= meet, cap, floor).sum(axis=1, where=positive & ~free)
    among = w.sum(axis=1, where=free)
    more = np.divide(1 - rest - held, among, out=np.zeros(len(w)), where=among > 0)
    t = np.maximum(t, more[:, None])  # rounding must not take t below the corner
    limited = np.clip(t * weights, floor, cap)
    limited[(many == 0) | (rest + many * cap < 1 - 1e-12)] = np.nan
    return np.asarray(limited, dtype=np.float64)


def _why_undefined(scores: Scores, rule: Rule) -> Note | None:
    """Return why this rule must not turn these scores into money; None if it may."""
    if rule == "equal":
        return None
    if scores.status != "ok":
        about_status = (note for note in scores.notes if isinstance(note, Note) and note.code in NORMALISED)
        rounds = [note.values["round"] for note in about_status]
        if scores.rounds > 1 and rounds and None not in rounds:
            return Note("status-in", score=scores.score, status=scores.status, rounds=rounds)
        return Note("status", score=scores.score, status=scores.status)
    if rule == "impartial":
        return None if scores.gain > _NOTHING else Note("no-gain-to-divide", gain=scores.gain)
    above = scores.raw > 0
    positive = math.fsum(scores.raw[above])
    noise = 0.0 if scores.stderr is None else 2 * math.fsum(believed(scores.stderr)[above])
    if positive <= max(_NOTHING, noise) and noise > _NOTHING:
        return Note("within-errors", score=scores.score, positive=positive, noise=noise)
    if positive <= _NOTHING or not weights_of(scores).max() > 0:  # or all of it is rounding, beside others
        return Note("nothing-positive", score=scores.score, positive=positive)
    return None


def _notes(scores: Scores, rule: Rule) -> list[str]:
    if rule == "equal":  # the only note that matters then: clients without a score
        return [note for note in scores.notes if code_of(note) == "never-reported"]
    notes = list(scores.notes)
    if below := [scores.clients[i] for i in np.flatnonzero(scores.raw < -rounding(scores.raw))]:
        code = "negative-for-others" if rule == "impartial" else "negative"
        notes.append(Note(code, score=scores.score, clients=below))
    if scores.gain <= _NOTHING:
        notes.append(Note("no-gain", gain=scores.gain))
    if scores.score == "EE":
        notes.append(Note("raw-ee"))
    return notes


def _notes_on(scores: Scores, rule: Rule, how: Fence | None) -> list[str]:
    """Return notes on what a rule did to the scores."""
    notes: list[str] = []
    if rule in ("fair", "fenced") and (large := _large_errors(scores)):
        notes.append(Note("large-errors", clients=large))
    if how is not None:
        held = np.maximum(scores.raw, 0.0) / how.positive + how.rest > how.fence * (1 + 1e-12)
        if held.any():
            notes.append(Note("fenced", clients=[scores.clients[i] for i in np.flatnonzero(held)]))
    return notes


def _large_errors(scores: Scores) -> list[str]:
    """Return the clients whose errors do not count in full."""
    large = np.zeros(scores.n, dtype=bool)
    covariance = scores.covariance
    for errors in (scores.stderr, None if covariance is None else np.sqrt(np.diag(covariance))):
        if errors is not None:
            large |= believed(errors) < errors * (1 - 1e-12)
    return [scores.clients[i] for i in np.flatnonzero(large)]


def _check(
    scores: Scores, rule: Rule, equal: float, floor: float, cap: float, forfeits: Mapping[str, float],
) -> tuple[float, float, float, dict[str, float]]:  # fmt: skip
    if scores.score == "PANEL":
        raise InputError("shares: PANEL ranks and pays nobody: the panel itself is divided, by rule 'hands'")
    if rule not in get_args(Rule):
        raise InputError(f"rule must be one of {', '.join(get_args(Rule))}, got {rule!r}")
    floor, cap, n = _number("floor", floor), _number("cap", cap), scores.n
    if not (floor >= 0 and floor * n <= 1 + 1e-12):
        raise InputError(f"floor must lie between 0 and 1/N = {1 / n:.6g} for {n} clients, got {floor}")
    if not (cap <= 1 and cap * n >= 1 - 1e-12):
        raise InputError(f"cap must lie between 1/N = {1 / n:.6g} and 1 for {n} clients, got {cap}")
    equal = _part("equal", equal)
    if equal and rule not in ("fair", "fenced"):
        raise InputError(f"equal must be 0 under the rule {rule!r}, got {equal}")
    lost = {name: _part(f"forfeits of {name!r}", part) for name, part in forfeits.items()}
    if strangers := sorted(set(lost) - set(scores.clients)):
        raise InputError(f"forfeits: expected clients that have a score, got {strangers[0]!r}")
    if rule == "impartial" and scores.n < 2:
        raise InputError(f"rule 'impartial' needs at least 2 clients, got {scores.n}")
    if rule == "impartial" and scores.score not in SELF_REPORTED:
        raise InputError(
            f"rule 'impartial' needs scores whose entry i is client i's own report, in units of the gain, "
            f"and nothing else depends on it ({', '.join(sorted(SELF_REPORTED))}); {scores.score} is not"
        )
    return equal, floor, cap, lost


def _number(name: str, setting: float) -> float:
    if (value := number(setting)) is None:
        raise InputError(f"{name} must be a number, got {setting!r:.100}")
    return value


def _part(name: str, setting: float) -> float:
    if not 0 <= (part := _number(name, setting)) <= 1:
        raise InputError(f"{name} must lie between 0 and 1, got {part}")
    return part


# ----------------------------------------------------------------------------------------------- intervals

Spans = Mapping[str, tuple[float, float]]
"""Client -> lower and upper end of the interval of its share."""

DRAWS = 4000
"""How often scores are drawn; less often for more than 1000 clients."""
STEP = 10_000
"""Ends of intervals are rounded outwards to one part in this: further digits are those of the simulation."""
VISIBLE = 0.1
"""Shares differ visibly if they differ by more than this part of an equal share."""


def share_intervals(
    scores: Scores, divided: Shares, *, level: float = 0.95
) -> dict[str, tuple[float, float]] | None:
    """Return the interval of each share: what the rule would pay by scores that are free of error.

    Scores are drawn around those that were measured, with their covariance (without one, errors count as
    uncorrelated), 4000 times with a fixed seed, and further apart if the covariance is an estimate, to fit
    Student's distribution. Each drawn vector is divided by the terms of the shares as if it were exact. The
    interval holds the middle ``level`` of these shares, each on its own, and the share that is paid, rounded
    outwards to 0.01 %. It is about the test set and, if the scores have ``training``, about what another
    training would change. Under the rule "equal", it is the share itself. The result is None if the scores
    have no errors, except under "equal".

    >>> s = Scores(score="ALPHA", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4, stderr=[.1, .1])
    >>> low, high = share_intervals(s, shares(s))["A"]
    >>> round(low, 2), round(high, 2)
    (0.21, 0.29)
    """
    if not isinstance(scores, Scores) or not isinstance(divided, Shares):
        got = f"{type(scores).__name__} and {type(divided).__name__}"
        raise InputError(f"share_intervals takes Scores and the Shares of them, got {got}")
    if missing := [name for name in scores.clients if name not in divided]:
        raise InputError(f"expected the shares of these scores, got some without client {missing[0]!r}")
    if divided.rule == "hands":
        raise InputError("share_intervals takes shares of Scores; for rule 'hands' see panel.share_errors")
    tail = (1 - level_of(level)) / 2
    if divided.rule == "equal":
        return {name: (share, share) for name, share in divided.items()}
    if error_of(scores) is None:
        return None
    clients, kind = scores.clients, _kinds(scores, divided)
    order = np.argsort(kind, kind="stable")
    scores, kind = in_order(scores, tuple(clients[i] for i in order)), kind[order]
    drawn = _drawn(scores, pair_quantile_of(scores)(tail) / upper_quantile(tail))
    rows = _divided(scores, drawn, divided)
    rows = rows[~np.isnan(rows).any(axis=1)]
    paid = np.array([divided[name] for name in scores.clients])
    ends = np.quantile(rows, [tail, 1 - tail], axis=0) if len(rows) else np.stack([paid, paid])
    for k, end in enumerate((np.minimum, np.maximum)):  # equal clients have one interval
        ends[k] = end.reduceat(ends[k], np.flatnonzero(np.diff(kind, prepend=-1)))[kind]
    low = np.floor(np.minimum(ends[0], paid) * STEP + 1e-5) / STEP  # what only rounding separates from a step
    high = np.ceil(np.maximum(ends[1], paid) * STEP - 1e-5) / STEP  # is that step
    ends_of = zip(low.tolist(), (high + 0.0).tolist(), strict=True)  # no minus zero
    spans = dict(zip(scores.clients, ends_of, strict=True))
    return {name: spans[name] for name in clients}


def _kinds(scores: Scores, divided: Shares) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... per client, by score, error and forfeit; those equal in all of them share a number.

    Scores are drawn in this order: neither the order of the clients nor their names matter then.
    """
    lost = np.array([divided.forfeits.get(name, 0.0) for name in scores.clients])
    numbers = [scores.raw, lost, *([] if scores.stderr is None else [scores.stderr])]
    numbers += [row for rows in (scores.sketch, scores.blocks) if rows is not None for row in rows]
    return np.unique(np.stack(numbers, axis=1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _drawn(scores: Scores, wider: float) -> Rows:
    """Return raw scores drawn around the measured ones, in pairs that mirror each other."""
    pairs = int(min(DRAWS, max(DRAWS / 10, 1000 * DRAWS / scores.n))) // 2
    normal = np.random.default_rng(0).standard_normal((pairs, scores.n))
    if (covariance := covariance_of(scores)) is not None:
        values, vectors = np.linalg.eigh(covariance)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T  # the one symmetric root
        away = normal @ root
    else:
        error = error_of(scores)
        assert error is not None
        away = normal * error
    return np.asarray(scores.raw + wider * np.concatenate([away, -away]), dtype=np.float64)


def _divided(scores: Scores, drawn: Rows, terms: Shares) -> Rows:
    """Return the shares of each drawn vector as if it were exact; a row of NaN where there are none."""
    floor, cap = terms.floor, terms.cap
    remaining = 1 - np.array([terms.forfeits.get(name, 0.0) for name in scores.clients])
    if terms.rule == "impartial":
        part = np.clip(drawn, 0.0, scores.gain) / scores.gain
        others = part.sum(axis=1, keepdims=True) - part
        return np.asarray(remaining * np.clip((1 - others / (scores.n - 1)) / scores.n, floor, cap))
    positive = np.maximum(drawn, 0.0)
    positive[positive <= rounding(drawn)] = 0.0
    total = positive.sum(axis=1, keepdims=True)
    part = np.divide(positive, total, out=np.full(drawn.shape, np.nan), where=total > 0)
    if terms.rule == "fenced":
        part = cut(part, counts_of(drawn, pooled_error(scores) or 0.0))[0]
    if terms.equal:
        takes = drawn >= -rounding(drawn)
        among = np.maximum(1, np.count_nonzero(takes, axis=1, keepdims=True))
        part = (1 - terms.equal) * part + terms.equal * takes / among
    return np.asarray(remaining * (part if (floor, cap) == (0.0, 1.0) else _between(part, floor, cap)))


def amounts_within(spans: Spans, paid: Payouts) -> dict[str, tuple[Decimal, Decimal]]:
    """Return the interval of each amount: that of its share, of the budget, rounded outwards to the cent."""
    within, budget = {}, paid.cents(paid.budget)
    for name, (low, high) in spans.items():
        amount = paid.cents(paid[name])
        down, up = budget * round(low * STEP) // STEP, -(-budget * round(high * STEP) // STEP)
        if low == high:
            down = up = amount
        within[name] = money_of(min(down, amount), paid.currency), money_of(max(up, amount), paid.currency)
    return within


@dataclass(frozen=True)
class PaidApart:
    """The two members whose shares differ most of all who are statistically indistinguishable."""

    more: str  # the better paid
    less: str


def visible_gaps(scores: Scores, divided: Shares, better: npt.NDArray[np.bool_] | None = None) -> Rows:
    """Return by how much the share of i exceeds that of j, shape (N, N); 0 unless it is a tie paid apart.

    Clients who forfeit are left out: the rule did not pay them apart.
    """
    if better is None:
        better = compare_pairs(scores).better
    share = np.array([divided[name] for name in scores.clients])
    gap = share[:, None] - share[None, :]
    visible = ~(better | better.T) & (gap > VISIBLE / scores.n + 1e-9)
    keeps = np.array([not divided.forfeits.get(name) for name in scores.clients])
    return np.where(visible & keeps[:, None] & keeps[None, :], gap, 0.0)


def paid_apart(
    scores: Scores, divided: Shares, better: npt.NDArray[np.bool_] | None = None
) -> PaidApart | None:
    """Return the pair of indistinguishable clients whose shares differ most, if they differ visibly."""
    gap = visible_gaps(scores, divided, better)
    if not gap.any():
        return None
    largest = np.argwhere(gap >= gap.max() - 1e-9)  # equal up to rounding: by name
    more, less = min((scores.clients[i], scores.clients[j]) for i, j in largest)
    return PaidApart(more, less)
