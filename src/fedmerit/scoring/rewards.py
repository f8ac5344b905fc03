"""From scores to shares to money: who gets which part of a budget, to the cent, and why.

Shares follow ``Scores.raw``, never a normalised vector, and no decision is silent: scores that allow no
shares raise ``UndefinedShares``, and decisions made on the way are in ``Shares.notes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from fedmerit.errors import InputError, UndefinedShares
from fedmerit.notes import Note, code_of
from fedmerit.scoring.amounts import amount_of
from fedmerit.scoring.scores import NORMALISED, median_of_others, sum_of_others
from fedmerit.scoring.shrinkage import Pull, believed, pulled
from fedmerit.scoring.types import Scores, Vector, rounding, settle
from fedmerit.scoring.validate import is_number, number

# --------------------------------------------------------------------------------------------------- cents

_WHOLE = 10**9  # shares are paid out in full if they sum to 1 within one part in this
_DUST = 10**6  # all rounding errors together are at most one part in this of a cent
_LARGEST_BUDGET = 10**24  # its cents fit into Decimal's default precision, so sums stay exact


@dataclass(frozen=True, eq=False)
class Payouts(Mapping[str, Decimal]):
    """Amounts by name, exact to the cent. The amounts and ``unpaid`` add up to ``budget`` exactly.

    ``currency`` is the one that the budget named, if it did.
    """

    by_client: Mapping[str, Decimal]
    budget: Decimal
    unpaid: Decimal
    currency: str | None = None

    def __getitem__(self, client: str) -> Decimal:
        return self.by_client[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_client)

    def __len__(self) -> int:
        return len(self.by_client)


def payouts(shares: Mapping[str, float | Fraction | Decimal], budget: str | int | Decimal) -> Payouts:
    r"""Divide a budget by shares into whole cents that, with ``unpaid``, add up to it exactly.

    Each client gets its share of the budget rounded down, and the cents left over go to the largest
    remainders. Remainders that are equal up to a millionth of a cent are ordered by name, so that neither
    rounding nor the order of clients decides. If the shares sum to less than 1, or the rule is "impartial",
    every amount is rounded down and the rest is ``unpaid``: no amount depends on another client's remainder.

    Args:
        shares: name -> share, from :func:`~fedmerit.shares` or any mapping that sums to at most 1.
        budget: an amount with at most 2 decimals: an int, a Decimal, or text such as "10000.00",
            "10,000.00" or "10 000,00 EUR" (see :func:`~fedmerit.scoring.amounts.amount_of`). A float is
            refused, because it has no exact cents.

    >>> paid = payouts({"A": 1 / 3, "B": 1 / 3, "C": 1 / 3}, budget="100.00")
    >>> {name: str(amount) for name, amount in paid.items()}
    {'A': '33.34', 'B': '33.33', 'C': '33.33'}
    """
    divided = division(shares, budget)
    amounts = {name: divided.cents_of(name, share) for name, share in shares.items()}
    return Payouts(
        by_client={name: _money(amount) for name, amount in amounts.items()},
        budget=_money(divided.cents),
        unpaid=_money(divided.cents - sum(amounts.values())),
        currency=_amount(budget)[1] if isinstance(budget, str) else None,
    )


@dataclass(frozen=True)
class Division:
    """The rule that divides a budget: with it, a client's share alone gives that client's exact cents.

    The cents left over go to remainders of at least ``high``, and to remainders of at least ``low`` whose
    names are not after ``last``. Both bounds are as coarse as possible, because the exact remainder of a
    client would reveal its share.
    """

    cents: int  # the budget
    n: int
    total: int  # sum of all shares, in units of 1 / one
    one: int
    down: bool  # whether every amount is rounded down
    low: Fraction = Fraction(1)
    high: Fraction = Fraction(1)
    last: str = ""

    def cents_of(self, name: str, share: float | Fraction | Decimal) -> int:
        """Return what a client with this name and share is paid, in cents."""
        top, bottom = _ratio(name, share)
        if self.one % bottom:
            raise InputError(f"share of {name!r} is not one of those that were divided: {share!r}")
        part = top * (self.one // bottom)
        if self.down:
            unit = max(self.total, self.one)
            dust = unit // (_DUST * self.n)  # 0.25 minus a rounding error counts as 0.25
            return (self.cents * part + dust) // unit
        amount, rest = divmod(self.cents * part, self.total)
        more = rest >= self.high * self.total or (rest >= self.low * self.total and name <= self.last)
        return amount + more


def division(shares: Mapping[str, float | Fraction | Decimal], budget: str | int | Decimal) -> Division:
    """Return how :func:`payouts` divides a budget by these shares."""
    cents = _cents(budget)
    parts, one = _integers(shares)
    total = sum(parts.values())
    if total - one > one // _WHOLE:
        raise InputError(f"shares must sum to at most 1, got {total / one:.12g}")
    made = Division(cents, len(parts), total, one, rounds_down(total, one, getattr(shares, "rule", None)))
    left = 0 if made.down else cents - sum(cents * part // total for part in parts.values())
    if not left:
        return made
    rest_of = {name: cents * part % total for name, part in parts.items()}
    rests = sorted(rest_of.values(), reverse=True)
    dust = total // (_DUST * len(rests))
    first = end = left  # remainders first ... end - 1 each equal the next up to dust
    while first and rests[first - 1] - rests[first] <= dust:
        first -= 1
    if first == left:
        cut = _cut_between(rests[left], rests[left - 1], total)
        return replace(made, low=cut, high=cut)
    while end < len(rests) and rests[end - 1] - rests[end] <= dust:
        end += 1
    low = _cut_between(rests[end] if end < len(rests) else -1, rests[end - 1], total)
    high = _cut_between(rests[first], rests[first - 1] if first else total, total)
    equal = sorted(name for name, rest in rest_of.items() if rests[end - 1] <= rest <= rests[first])
    return replace(made, low=low, high=high, last=equal[left - first - 1])


def _cut_between(low: int, high: int, total: int) -> Fraction:
    """Return the number with the fewest binary digits above low / total and at most high / total."""
    digits = 0
    while (high << digits) // total * total <= low << digits:
        digits += 1
    return Fraction((high << digits) // total, 1 << digits)


def rounds_down(total: int, one: int, rule: str | None) -> bool:
    """Return whether leftover cents stay unpaid: shares sum to less than 1, or the rule is "impartial"."""
    return one - total > one // _WHOLE or rule == "impartial"


def _integers(shares: Mapping[str, float | Fraction | Decimal]) -> tuple[dict[str, int], int]:
    """Return the shares as integers over a common denominator, and that denominator; nothing is rounded."""
    if not isinstance(shares, Mapping) or not shares:
        raise InputError(f"payouts takes a mapping of name to share, got {shares!r}"[:300])
    ratios = {}
    for name, share in shares.items():
        if not isinstance(name, str):
            raise InputError(f"names of clients must be text, got {name!r:.100}")
        ratios[name] = _ratio(name, share)
        if ratios[name][0] < 0:
            raise InputError(f"share of {name!r} must not be negative, got {share!r}")
    one = math.lcm(*(denominator for _, denominator in ratios.values()))
    return {name: top * (one // bottom) for name, (top, bottom) in ratios.items()}, one


def _ratio(name: str, share: float | Fraction | Decimal) -> tuple[int, int]:
    """Return exactly this share, as numerator and denominator."""
    try:
        if not is_number(share):
            raise TypeError
        exact = int(share) if isinstance(share, np.integer) else share
        return exact.as_integer_ratio()
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise InputError(f"share of {name!r} must be a finite number, got {share!r}") from error


def _cents(budget: str | int | Decimal) -> int:
    if isinstance(budget, np.integer):
        budget = int(budget)
    if isinstance(budget, bool) or not isinstance(budget, str | int | Decimal):
        why = "; a float has no exact cents" if isinstance(budget, float) else ""
        raise InputError(f"budget must be text, int or Decimal, like '10000.00', got {budget!r}{why}")
    amount = _amount(budget)[0] if isinstance(budget, str) else Decimal(budget)
    if not amount.is_finite() or not 0 <= amount < _LARGEST_BUDGET:
        raise InputError(f"budget must be finite, at least 0 and below 1e24, got {budget!r}")
    cents = Fraction(amount) * 100
    if cents.denominator != 1 or (isinstance(budget, str) and int(amount.as_tuple().exponent) < -2):
        raise InputError(f"budget must have at most 2 decimals, got {budget!r}")
    return int(cents)


def _amount(budget: str) -> tuple[Decimal, str | None]:
    try:
        return amount_of(budget)
    except InputError as error:
        raise InputError(f"budget: {error}") from error


def spelled(budget: str) -> str:
    """Return a budget in the form in which it is recorded.

    >>> spelled("0750.5")
    '750.50'
    """
    return str(_money(_cents(budget)))


def _money(cents: int) -> Decimal:
    return Decimal(f"{cents // 100}.{cents % 100:02d}")


# -------------------------------------------------------------------------------------------------- shares

Rule = Literal["fair", "shrunk", "fenced", "impartial", "equal"]
Negative = Literal["zero", "refuse"]
OnUndefined = Literal["refuse", "equal", "zero"]

SELF_REPORTED = frozenset({"ALPHA", "LOO", "IOI"})
"""Scores whose entry i is client i's own report, in units of the gain, and in which nothing else depends on
that report. FP is not among them: its raw entries are alpha, but any client can change its status for all."""

_NOTHING = 1e-12  # utility that may be left by rounding alone
_LEAST = 1e-200  # a weight that is smaller beside the largest one cannot be scaled with full precision


USUAL_RULE: Rule = "shrunk"
"""The rule that commands and the page use unless another one is chosen; :func:`shares` itself uses "fair"."""
FORMULA = 2
"""Version of the formulas behind the rules. Version 1, of earlier decisions: "fenced" by :func:`fence`, which
is not monotone, scores that only rounding separates from 0 had a weight, and errors counted however large."""


@dataclass(frozen=True, eq=False)
class Shares(Mapping[str, float]):
    """Shares by name. They sum to 1 minus ``unpaid``.

    ``status`` is "ok", or "undefined" if the scores allowed no shares and ``on_undefined`` decided. How sure
    they are: :func:`~fedmerit.share_intervals`.
    """

    by_client: Mapping[str, float]
    rule: Rule
    status: Literal["ok", "undefined"] = "ok"
    unpaid: float = 0.0
    notes: tuple[str, ...] = ()
    pull: Pull | None = None  # the numbers behind "shrunk" and "fenced"

    def __getitem__(self, client: str) -> float:
        return self.by_client[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_client)

    def __len__(self) -> int:
        return len(self.by_client)


def shares(
    scores: Scores,
    rule: Rule = "fair",
    *,
    floor: float = 0.0,
    cap: float = 1.0,
    negative: Negative = "zero",
    on_undefined: OnUndefined = "refuse",
    formula: int = FORMULA,
) -> Shares:
    r"""Return the share of a reward that each client gets.

    .. math:: \text{fair: } \frac{w_i}{\sum_j w_j}, \quad w_i = \max(x_i, 0), \qquad
              \text{shrunk: } \frac{m + b\,(w_i - m)}{\sum_j w_j}, \qquad
              \text{impartial: } \frac1N \Big(1 - \frac{1}{N-1}
              \sum_{j \ne i} \mathrm{clip}(x_j / D, 0, 1)\Big)

    where x is ``scores.raw``, m the mean of w, b the part of its variance that is not noise, and D
    ``scores.gain``. "shrunk" also has a fence: nobody gets more than four times the mean of the others, and
    what is cut off is divided equally. "fenced" is the same with b = 1. `fedmerit.scoring.shrinkage` has the
    whole formula and the proof that it never pays less for a higher score. "fair", "shrunk" and "fenced" sum
    to 1. Under "impartial", a client's own report does not affect its own share at all. In return, the shares
    are nearly equal, a part stays unpaid, D must be above 1e-12, and x must be ALPHA, LOO or IOI. "equal"
    ignores the scores. N is the number of clients that have a score: a client that never reported gets
    nothing under any rule, not even under "equal". A score that only rounding separates from 0 counts as 0.

    All rules but "equal" need scores with status "ok". "fair", "shrunk" and "fenced" also need something to
    divide: the positive scores must sum to more than 1e-12 and more than two standard errors. The standard
    errors of the clients with a positive score are added up, because clients share their test samples and
    errors may point the same way. So a client whose score rises above zero brings its error with it, and that
    alone can leave scores without shares; where there are shares, a higher score never gets less. Clients
    state their own errors, so an error counts up to four times the median of the others' errors, here and in
    b; a note names whose.

    Args:
        scores: usually ``alpha`` summed over rounds (``accumulate``).
        rule: "fair", "shrunk", "fenced", "impartial" or "equal".
        floor: smallest share a client may get, 0 to 1/N.
        cap: largest share a client may get, 1/N to 1. The difference that floor and cap make is spread over
            the other clients in proportion. Under "impartial" it changes ``unpaid`` instead, so that the rule
            stays impartial.
        negative: what to do about a negative score. "zero" gives no share beyond the floor (under
            "impartial", the score counts as zero in the others' shares) and adds a note. "refuse" raises; it
            cannot be used with "impartial", where anybody could stop all payment by a negative report.
        on_undefined: what to do if the scores allow no shares: "refuse" raises, "equal" gives 1/N to each,
            "zero" gives the floor to each.
        formula: version of the formulas; 1 recomputes decisions of earlier versions.

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[-1, 1, 3], raw=[-1, 1, 3], gain=4)
    >>> dict(shares(s))
    {'A': 0.0, 'B': 0.25, 'C': 0.75}
    >>> dict(shares(s, "impartial")), shares(s, "impartial").unpaid
    ({'A': 0.16666666666666666, 'B': 0.20833333333333334, 'C': 0.2916666666666667}, 0.33333333333333326)
    """
    floor, cap = _check(scores, rule, floor, cap, negative, on_undefined, formula)
    below = [scores.clients[i] for i in np.flatnonzero(scores.raw < -rounding(scores.raw))]
    if below and negative == "refuse" and rule != "equal":
        raise UndefinedShares(Note("negative-refused", score=scores.score, clients=below))
    notes = _notes(scores, rule, below)
    reason, how = _why_undefined(scores, rule, formula), None
    if reason is None:
        vector, how = by_rule(scores, rule, floor, cap, formula)
        notes += _notes_on(scores, rule, formula, how)
    elif on_undefined == "refuse":
        raise UndefinedShares(Note("undefined", reason=reason))
    else:
        vector = np.full(scores.n, 1 / scores.n if on_undefined == "equal" else floor)
        notes.append(Note("undefined-decided", reason=reason, decided=on_undefined))
    left = 1.0 - math.fsum(vector)
    return Shares(
        by_client=dict(zip(scores.clients, vector.tolist(), strict=True)),
        rule=rule,
        status="ok" if reason is None else "undefined",
        unpaid=left if left > 1e-9 else 0.0,
        notes=tuple(notes),
        pull=how,
    )


def fence(scores: Scores) -> Vector:
    r"""Return the largest score each client was paid for under "fenced" of formula 1; infinite if no fence.

    .. math:: h_i = \max\big(0,\;
              \mathrm{med}_{-i} + 3 \max(1.4826\, \mathrm{MAD}_{-i},\, \mathrm{SE}_{-i})\big)

    Decisions that earlier versions recorded are recomputed with it. It is not monotone: by raising its score,
    a client also raises the fences of the others. These are the median, the median absolute deviation and the
    median standard error of the OTHERS. If
    neither of the last two is positive (above 1e-12, to allow for rounding), there is no fence, because it
    would pay the only contributor nothing.

    Args:
        scores: of N clients; a client's own entry does not enter its own fence.

    >>> raw = [1, 2, 3, 4, 50]
    >>> fence(Scores(score="ALPHA", clients=tuple("ABCDE"), values=raw, raw=raw, gain=60)).round(2)
    array([ 7.95, 10.17,  9.67,  6.95,  6.95])
    """
    if scores.n < 2:
        return np.full(scores.n, np.inf)
    centre = median_of_others(scores.raw)
    spread = np.zeros(scores.n)
    for middle in np.unique(centre):  # at most three distinct values
        who = centre == middle
        spread[who] = 1.4826 * median_of_others(np.abs(scores.raw - middle))[who]
    if scores.stderr is not None:
        spread = np.maximum(spread, median_of_others(scores.stderr))
    return np.where(spread > _NOTHING, np.maximum(0.0, centre + 3 * spread), np.inf)


_COUNTS_OF_NULL = 0.8048
"""The mean of clip(1 + Z / 2, 0, 1) for a standard normal Z."""


def null_share(scores: Scores, rule: Rule = "fair") -> float | None:
    r"""Return the share that a client without contribution may expect from noise; None if unknown.

    Under "fair", noise alone pays it

    .. math:: \frac{\mathrm{E} \max(s Z, 0)}{\sum_j \max(x_j, 0)} = \frac{s}{\sqrt{2 \pi} \sum_j \max(x_j, 0)}

    with s the median standard error: max(x, 0) keeps such a client's good luck and drops its bad luck. Under
    "shrunk" it gets b times that, and the equal part as far as it counts: 80 % of it on average, because in
    half of all cases it is below zero.

    Args:
        scores: with ``stderr``; without it, the result is None.
        rule: "fair" or "shrunk".

    >>> s = Scores(score="ALPHA", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4, stderr=[.1, .1])
    >>> round(null_share(s), 4)
    0.01
    """
    positive = math.fsum(np.maximum(scores.raw, 0.0))
    if scores.stderr is None or positive <= 0:
        return None
    lucky = float(np.median(scores.stderr)) / math.sqrt(2 * math.pi) / positive
    if rule == "fair" or not weights_of(scores).max() > 0:
        return lucky
    how = pulled(scores, weights_of(scores))[1]
    return how.factor * lucky + _COUNTS_OF_NULL * how.rest


def by_rule(scores: Scores, rule: Rule, floor: float, cap: float, formula: int) -> tuple[Vector, Pull | None]:
    """Return the shares of scores that allow them, and the numbers behind "shrunk" and "fenced"."""
    if rule == "equal":
        return np.full(scores.n, 1 / scores.n), None
    if rule == "impartial":  # each share is at most 1/N, and so is the floor: no overspending
        part = np.clip(scores.raw, 0.0, scores.gain) / scores.gain
        return np.clip((1 - sum_of_others(part) / (scores.n - 1)) / scores.n, floor, cap), None
    weights, how = weights_of(scores, rule, formula), None
    if rule == "shrunk" or (rule == "fenced" and formula > 1):
        weights, how = pulled(scores, weights, pull=rule == "shrunk")
        if (floor, cap) == (0.0, 1.0):
            return weights, how
    return _between(weights, floor, cap), how


def weights_of(scores: Scores, rule: Rule = "fair", formula: int = FORMULA) -> Vector:
    """Return the positive part of each score; scores that are equal up to rounding have equal weights."""
    weights = np.maximum(scores.raw, 0.0)
    if formula > 1:
        weights[weights <= np.maximum(rounding(scores.raw), _LEAST * weights.max())] = 0.0
    elif rule == "fenced":
        weights = np.minimum(weights, fence(scores))
    ordered = np.sort(weights)
    grid, first = np.unique(settle(ordered), return_index=True)
    return ordered[first][np.searchsorted(grid, settle(weights))]  # equal up to rounding: equal to the cent


def _between(weights: Vector, floor: float, cap: float) -> Vector:
    """Return the shares clip(t * weights, floor, cap), with the t for which they sum to 1.

    The sum rises with t and is linear between the points where a client leaves the floor or meets the cap.
    Find the linear piece by bisection, then t on it from the clients strictly between floor and cap.
    """
    w = weights / weights.max()
    positive = w[w > 0]
    rest = (w.size - positive.size) * floor  # clients without weight stay on the floor
    if rest + positive.size * cap < 1 - 1e-12:
        raise InputError(
            f"cap={cap:g} leaves a part that nobody may take: only {positive.size} of {w.size} clients have "
            "a positive weight; raise the cap or the floor"
        )
    with np.errstate(over="ignore"):  # a weight may be too small for a finite t to take it to the cap
        leave, meet = floor / positive, cap / positive
    corners = np.unique(np.concatenate([leave, meet]))
    low, high = 0, corners.size - 1
    while low < high:  # the last corner at which the sum is still at most 1
        middle = (low + high + 1) // 2
        if rest + math.fsum(np.clip(corners[middle] * positive, floor, cap)) <= 1:
            low = middle
        else:
            high = middle - 1
    t = float(corners[low])
    free = (leave <= t) & (t < meet)
    if free.any():
        held = math.fsum(np.where(t >= meet, cap, floor)[~free])
        sum_ = math.fsum(positive[free])  # exact sums do not depend on the order of clients
        t = max(t, (1 - rest - held) / sum_)  # rounding must not take t below the corner
    return np.asarray(np.clip(t * w, floor, cap), dtype=np.float64)


def _why_undefined(scores: Scores, rule: Rule, formula: int) -> Note | None:
    """Return why this rule must not turn these scores into money; None if it may."""
    if rule == "equal":
        return None
    if scores.status != "ok":
        told = [note for note in scores.notes if isinstance(note, Note) and note.code in NORMALISED]
        found = [note.values["round"] for note in told]
        if scores.rounds > 1 and found and None not in found:
            return Note("status-in", score=scores.score, status=scores.status, rounds=found)
        return Note("status", score=scores.score, status=scores.status)
    if rule == "impartial":
        return None if scores.gain > _NOTHING else Note("no-gain-to-divide", gain=scores.gain)
    above = scores.raw > 0
    positive = math.fsum(scores.raw[above])
    stderr = np.zeros(scores.n) if scores.stderr is None else scores.stderr
    noise = 2 * math.fsum((believed(stderr) if formula > 1 else stderr)[above])
    if positive <= max(_NOTHING, noise):
        if noise > _NOTHING:
            return Note("within-errors", score=scores.score, positive=positive, noise=noise)
        return Note("nothing-positive", score=scores.score, positive=positive)
    if (
        formula > 1 and not weights_of(scores).max() > 0
    ):  # all of it is rounding, beside larger scores below 0
        return Note("nothing-positive", score=scores.score, positive=positive)
    if rule == "fenced" and weights_of(scores, rule, formula).max() <= _NOTHING:
        return Note("all-fenced", score=scores.score)
    return None


def _notes(scores: Scores, rule: Rule, below: list[str]) -> list[str]:
    if rule == "equal":  # the only note that matters then: clients without a score
        return [note for note in scores.notes if code_of(note) == "never-reported"]
    notes = list(scores.notes)
    if below:
        code = "negative-for-others" if rule == "impartial" else "negative"
        notes.append(Note(code, score=scores.score, clients=below))
    if scores.gain <= _NOTHING:
        notes.append(Note("no-gain", gain=scores.gain))
    if scores.score == "EE":
        notes.append(Note("raw-ee"))
    return notes


def _notes_on(scores: Scores, rule: Rule, formula: int, how: Pull | None) -> list[str]:
    """Return notes on what a rule did to the scores."""
    notes: list[str] = []
    if formula > 1 and rule != "impartial" and (large := _large_errors(scores)):
        notes.append(Note("large-errors", clients=large))
    if rule == "shrunk" and how is not None:
        if how.error <= 0:
            notes.append(Note("not-pulled", score=scores.score))
        elif how.factor <= 0:
            notes.append(Note("pulled-together", score=scores.score))
        elif how.factor < 0.995:
            notes.append(Note("pulled", score=scores.score, part=1 - how.factor))
    held = np.zeros(scores.n, dtype=bool)
    if how is not None:
        part = how.factor * np.maximum(scores.raw, 0.0) / how.positive
        held = part + how.rest > how.fence * (1 + 1e-12)
    elif rule == "fenced" and formula == 1:
        held = scores.raw > np.maximum(fence(scores), 0.0)
    if held.any():
        notes.append(Note("fenced", clients=[scores.clients[i] for i in np.flatnonzero(held)]))
    return notes


def _large_errors(scores: Scores) -> list[str]:
    """Return the clients whose errors do not count in full."""
    known = scores.covariance
    stated = [np.sqrt(np.diag(known))] if known is not None else []
    stated += [scores.stderr] if scores.stderr is not None else []
    large = np.zeros(scores.n, dtype=bool)
    for errors in stated:
        large |= believed(errors) < errors * (1 - 1e-12)
    return [scores.clients[i] for i in np.flatnonzero(large)]


def _check(
    scores: Scores,
    rule: Rule,
    floor: float,
    cap: float,
    negative: Negative,
    on_undefined: OnUndefined,
    formula: int,
) -> tuple[float, float]:
    """Check all arguments; return floor and cap as float64."""
    if not isinstance(scores, Scores):
        raise InputError(f"shares takes Scores, got {type(scores).__name__}")
    for name, given, allowed in (
        ("rule", rule, Rule), ("negative", negative, Negative), ("on_undefined", on_undefined, OnUndefined)
    ):  # fmt: skip
        if given not in get_args(allowed):
            raise InputError(f"{name} must be one of {', '.join(get_args(allowed))}, got {given!r}")
    if formula not in (1, FORMULA) or isinstance(formula, bool) or (rule == "shrunk" and formula == 1):
        raise InputError(
            f"formula must be {FORMULA}, or 1 for decisions of earlier versions, got {formula!r:.40}"
        )
    floor, cap = check_limits(scores, floor, cap)
    if rule == "impartial" and scores.n < 2:
        raise InputError(f"rule 'impartial' needs at least 2 clients, got {scores.n}")
    if rule == "impartial" and scores.score not in SELF_REPORTED:
        raise InputError(
            f"rule 'impartial' needs scores whose entry i is client i's own report, in units of the gain, "
            f"and nothing else depends on it ({', '.join(sorted(SELF_REPORTED))}); {scores.score} is not"
        )
    if rule == "impartial" and negative == "refuse":
        raise InputError(
            "rule 'impartial' needs negative='zero', got 'refuse': any client could stop all payment by "
            "reporting a negative score"
        )
    return floor, cap


def check_limits(scores: Scores, floor: float, cap: float) -> tuple[float, float]:
    """Return the smallest and the largest share as float, or raise InputError if not all can be between."""
    floor, cap, n = _number("floor", floor), _number("cap", cap), scores.n
    if not (floor >= 0 and floor * n <= 1 + 1e-12):
        raise InputError(f"floor must lie between 0 and 1/N = {1 / n:.6g} for {n} clients, got {floor}")
    if not (cap <= 1 and cap * n >= 1 - 1e-12):
        raise InputError(f"cap must lie between 1/N = {1 / n:.6g} and 1 for {n} clients, got {cap}")
    return floor, cap


def _number(name: str, given: float) -> float:
    if (found := number(given)) is None:
        raise InputError(f"{name} must be a number, got {given!r:.100}")
    return found
