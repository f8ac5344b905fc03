"""From scores to shares to money: who gets which part of a budget, to the cent, and why.

Shares follow ``Scores.raw``, never a normalised vector, and no decision is silent: scores that allow no
shares raise ``UndefinedShares``, and decisions made on the way are in ``Shares.notes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, UndefinedShares
from fedmerit.notes import Note, code_of
from fedmerit.scoring.amounts import amount_of, decimals_of
from fedmerit.scoring.fence import Fence, believed, fenced
from fedmerit.scoring.scores import NORMALISED, sum_of_others
from fedmerit.scoring.types import Scores, Vector, rounding, settle
from fedmerit.scoring.uncertainty import sure_signs
from fedmerit.scoring.validate import is_number, number

# --------------------------------------------------------------------------------------------------- cents

_WHOLE = 10**9  # shares are paid out in full if they sum to 1 within one part in this
_DUST = 10**6  # all rounding errors together are at most one part in this of a cent
_LARGEST_BUDGET = 10**24  # its cents fit into Decimal's default precision, so sums stay exact


@dataclass(frozen=True, eq=False)
class Payouts(Mapping[str, Decimal]):
    """Amounts by name, exact to the cent. The amounts and ``unpaid`` add up to ``budget`` exactly.

    A cent is the smallest unit of the currency: a yen in JPY, a thousandth in KWD, a hundredth if no currency
    or an unknown one is named. ``currency`` is None if nobody named one.
    """

    by_client: Mapping[str, Decimal]
    budget: Decimal
    unpaid: Decimal
    currency: str | None = None

    @property
    def nothing(self) -> Decimal:
        """An amount of 0, with the decimals of the currency."""
        return self.budget - self.budget

    def cents(self, amount: Decimal) -> int:
        """Return one of the amounts in cents."""
        return int(amount.scaleb(decimals_of(self.currency)))

    def __getitem__(self, client: str) -> Decimal:
        return self.by_client[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_client)

    def __len__(self) -> int:
        return len(self.by_client)


def payouts(
    shares: Mapping[str, float | Fraction | Decimal], budget: str | int | Decimal, currency: str | None = None
) -> Payouts:
    r"""Divide a budget by shares into whole cents that, with ``unpaid``, add up to it exactly.

    Each client gets its share of the budget rounded down, and the cents left over go to the largest
    remainders. Remainders that are equal up to a millionth of a cent are ordered by name, so that neither
    rounding nor the order of clients decides. If the shares sum to less than 1, or the rule is "impartial",
    every amount is rounded down and the rest is ``unpaid``: no amount depends on another client's remainder.

    Args:
        shares: name -> share, from :func:`~fedmerit.shares` or any mapping that sums to at most 1.
        budget: an int, a Decimal, or text such as "10000.00", "10,000.00" or "10 000,00 EUR" (see
            :func:`~fedmerit.scoring.amounts.amount_of`), with no more decimals than the currency has. A float
            is refused, because it has no exact cents.
        currency: as in ISO 4217, if the budget does not name it. It decides how many decimals amounts have:
            none in JPY, three in KWD, two in most; also two without a currency or in an unknown one.

    >>> paid = payouts({"A": 1 / 3, "B": 1 / 3, "C": 1 / 3}, budget="100.00")
    >>> {name: str(amount) for name, amount in paid.items()}
    {'A': '33.34', 'B': '33.33', 'C': '33.33'}
    >>> {name: str(amount) for name, amount in payouts({"A": 0.5, "B": 0.5}, "101 JPY").items()}
    {'A': '51', 'B': '50'}
    """
    named = _amount(budget)[1] if isinstance(budget, str) else None
    if named and currency and named != {"€": "EUR"}.get(currency, currency):
        raise InputError(f"budget: expected an amount in {currency}, got one in {named}")
    currency = currency or named or None
    divided = division(shares, budget, currency)
    amounts = {name: divided.cents_of(name, share) for name, share in shares.items()}
    return Payouts(
        by_client={name: money_of(amount, currency) for name, amount in amounts.items()},
        budget=money_of(divided.cents, currency),
        unpaid=money_of(divided.cents - sum(amounts.values()), currency),
        currency=currency,
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


def division(
    shares: Mapping[str, float | Fraction | Decimal], budget: str | int | Decimal, currency: str | None = None
) -> Division:
    """Return how :func:`payouts` divides a budget by these shares."""
    cents = _cents(budget, currency)
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


def _cents(budget: str | int | Decimal, currency: str | None) -> int:
    if isinstance(budget, np.integer):
        budget = int(budget)
    if isinstance(budget, bool) or not isinstance(budget, str | int | Decimal):
        why = "; a float has no exact cents" if isinstance(budget, float) else ""
        raise InputError(f"budget must be text, int or Decimal, like '10000.00', got {budget!r}{why}")
    amount, named = _amount(budget) if isinstance(budget, str) else (Decimal(budget), None)
    if not amount.is_finite() or not 0 <= amount < _LARGEST_BUDGET:
        raise InputError(f"budget must be finite, at least 0 and below 1e24, got {budget!r}")
    decimals = decimals_of(currency := currency or named)
    cents = Fraction(amount) * 10**decimals
    written = -int(amount.as_tuple().exponent) if isinstance(budget, str) else 0
    if cents.denominator != 1 or written > max(decimals, 2):
        raise InputError(
            f"budget must have at most {decimals} decimals{f' in {currency}' if currency else ''}, "
            f"got {budget!r}"
        )
    return int(cents)


def _amount(budget: str) -> tuple[Decimal, str | None]:
    try:
        return amount_of(budget)
    except InputError as error:
        raise InputError(f"budget: {error}") from error


def spelled(budget: str, currency: str | None = None) -> str:
    """Return a budget in the form in which it is recorded.

    >>> spelled("0750.5"), spelled("10 000 JPY")
    ('750.50', '10000')
    """
    currency = currency or _amount(budget)[1]
    return str(money_of(_cents(budget, currency), currency))


def money_of(cents: int, currency: str | None) -> Decimal:
    """Return a number of cents as an amount with the decimals of the currency."""
    return Decimal(f"{cents}e-{decimals_of(currency)}")


# -------------------------------------------------------------------------------------------------- shares

Rule = Literal["fair", "fenced", "impartial", "equal"]
Negative = Literal["zero", "refuse"]
OnUndefined = Literal["refuse", "equal", "zero"]

SELF_REPORTED = frozenset({"ALPHA", "LOO", "IOI"})
"""Scores whose entry i is client i's own report, in units of the gain, and in which nothing else depends on
that report. FP is not among them: its raw entries are alpha, but any client can change its status for all."""

_NOTHING = 1e-12  # utility that may be left by rounding alone
_LEAST = 1e-200  # a weight that is smaller beside the largest one cannot be scaled with full precision


USUAL_RULE: Rule = "fenced"
"""The rule unless another one is chosen, in Python, on the command line and on the page."""


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
    fence: Fence | None = None  # the numbers behind "fenced"
    equal: float = 0.0  # these four as in `shares`
    floor: float = 0.0
    cap: float = 1.0
    forfeits: Mapping[str, float] = field(default_factory=dict)
    among: int = 0  # how many clients take part in the equal part

    def __getitem__(self, client: str) -> float:
        return self.by_client[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_client)

    def __len__(self) -> int:
        return len(self.by_client)


def shares(
    scores: Scores,
    rule: Rule = USUAL_RULE,
    *,
    equal: float = 0.0,
    floor: float = 0.0,
    cap: float = 1.0,
    forfeits: Mapping[str, float] | None = None,
    negative: Negative = "zero",
    on_undefined: OnUndefined = "refuse",
) -> Shares:
    r"""Return the share of a reward that each client gets.

    .. math:: \text{fair: } \frac{w_i}{\sum_j w_j}, \quad w_i = \max(x_i, 0), \qquad
              \text{impartial: } \frac1N \Big(1 - \frac{1}{N-1}
              \sum_{j \ne i} \mathrm{clip}(x_j / D, 0, 1)\Big)

    where x is ``scores.raw`` and D ``scores.gain``. "fenced" is "fair" with a fence: nobody gets more than
    four times the mean of the others, and what is cut off is divided equally. `fedmerit.scoring.fence` has
    the whole formula and the proof that it never pays less for a higher score. "fair" and "fenced" sum to 1.
    Under "impartial", a client's own report does not affect its own share at all. In return, the shares are
    nearly equal, a part stays unpaid, D must be above 1e-12, and x must be ALPHA, LOO or IOI. "equal" ignores
    the scores. N is the number of clients that have a score: a client that never reported gets nothing under
    any rule, not even under "equal". A score that only rounding separates from 0 counts as 0.

    With ``equal`` = e, "fair" and "fenced" divide only the rest, 1 - e. The part e is divided equally among
    the K clients whose score is not surely below zero (`takes_part`): p_i -> (1 - e) p_i + e / K. A client
    that contributes nothing then gets e / K.

    All rules but "equal" need scores with status "ok". "fair" and "fenced" also need something to divide: the
    positive scores must sum to more than 1e-12 and more than two standard errors. The standard errors of the
    clients with a positive score are added up, because clients share their test samples and errors may point
    the same way. So a client whose score rises above zero brings its error with it, and that alone can leave
    scores without shares; where there are shares, a higher score never gets less. Clients state their own
    errors, so an error counts up to four times the median of the others' errors; a note names whose.

    Args:
        scores: usually ``alpha`` summed over rounds (``accumulate``).
        rule: "fair", "fenced", "impartial" or "equal".
        equal: which part is divided equally, 0 to 1; only for "fair" and "fenced".
        floor: smallest share a client may get, 0 to 1/N.
        cap: largest share a client may get, 1/N to 1. The difference that floor and cap make is spread over
            the other clients in proportion. Under "impartial" it changes ``unpaid`` instead, so that the rule
            stays impartial.
        forfeits: client -> which part of its share it loses, 0 to 1. That part stays unpaid.
        negative: what to do about a negative score. "zero" gives no share beyond the floor and the equal part
            (under "impartial", the score counts as zero in the others' shares) and adds a note. "refuse"
            raises; it cannot be used with "impartial", where anybody could stop all payment by a negative
            report.
        on_undefined: what to do if the scores allow no shares: "refuse" raises, "equal" gives 1/N to each,
            "zero" gives the floor to each.

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[-1, 1, 3], raw=[-1, 1, 3], gain=4)
    >>> dict(shares(s, "fair"))
    {'A': 0.0, 'B': 0.25, 'C': 0.75}
    >>> dict(shares(s, "fair", equal=0.75, forfeits={"C": 1.0}))
    {'A': 0.25, 'B': 0.3125, 'C': 0.0}
    >>> dict(shares(s, "impartial")), shares(s, "impartial").unpaid
    ({'A': 0.16666666666666666, 'B': 0.20833333333333334, 'C': 0.2916666666666667}, 0.33333333333333326)
    """
    equal, floor, cap, lost = _check(scores, rule, equal, floor, cap, forfeits or {}, negative, on_undefined)
    below = [scores.clients[i] for i in np.flatnonzero(scores.raw < -rounding(scores.raw))]
    if below and negative == "refuse" and rule != "equal":
        raise UndefinedShares(Note("negative-refused", score=scores.score, clients=below))
    notes = _notes(scores, rule, below)
    reason, how, among = _why_undefined(scores, rule), None, 0
    if reason is None:
        takes = takes_part(scores) if equal else np.ones(scores.n, dtype=bool)
        among = int(np.count_nonzero(takes)) if equal else 0
        vector, how = by_rule(scores, rule, equal, takes, floor, cap)
        notes += _notes_on(scores, rule, how)
        if not takes.all():
            left_out = [name for name, takes_it in zip(scores.clients, takes, strict=True) if not takes_it]
            notes.append(Note("not-equal", clients=left_out))
    elif on_undefined == "refuse":
        raise UndefinedShares(Note("undefined", reason=reason))
    else:
        vector = np.full(scores.n, 1 / scores.n if on_undefined == "equal" else floor)
        notes.append(Note("undefined-decided", reason=reason, decided=on_undefined))
    for name, part in lost.items():
        vector[scores.clients.index(name)] *= 1 - part
        notes.append(Note("forfeited", client=name, part=part))
    left = 1.0 - math.fsum(vector)
    return Shares(
        by_client=dict(zip(scores.clients, vector.tolist(), strict=True)),
        rule=rule,
        status="ok" if reason is None else "undefined",
        unpaid=left if left > 1e-9 else 0.0,
        notes=tuple(notes),
        fence=how,
        equal=equal,
        floor=floor,
        cap=cap,
        forfeits=lost,
        among=among,
    )


def takes_part(scores: Scores) -> npt.NDArray[np.bool_]:
    """Return who takes part in what is divided equally: everybody whose score is not surely below zero.

    Sure is what `sure_signs` calls so, all claims together at 95 %, with errors as far as they are believed
    (`fedmerit.scoring.fence.believed`). Without errors nothing is sure, so everybody takes part.

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[1, -2.2, -9], raw=[1, -2.2, -9], gain=4,
    ...            stderr=[1, 1, 1])
    >>> takes_part(s).tolist()
    [True, True, False]
    """
    if scores.stderr is None:
        return np.ones(scores.n, dtype=bool)
    return np.array(sure_signs(replace(scores, stderr=believed(scores.stderr)))) >= 0


def null_share(scores: Scores, equal: float = 0.0) -> float | None:
    r"""Return the share that a client without contribution may expect under "fair"; None if unknown.

    Noise alone pays it

    .. math:: \frac{\mathrm{E} \max(s Z, 0)}{\sum_j \max(x_j, 0)} = \frac{s}{\sqrt{2 \pi} \sum_j \max(x_j, 0)}

    with s the median standard error: max(x, 0) keeps such a client's good luck and drops its bad luck. To
    that comes its part of what is divided equally.

    Args:
        scores: with ``stderr``; without it, the result is None.
        equal: as in :func:`shares`.

    >>> s = Scores(score="ALPHA", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4, stderr=[.1, .1])
    >>> round(null_share(s), 4), round(null_share(s, 0.5), 4)
    (0.01, 0.255)
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
    elif equal or (floor, cap) == (0.0, 1.0):
        weights = _between(weights, 0.0, 1.0)
    if equal:
        weights = (1 - equal) * weights + equal * takes / np.count_nonzero(takes)
    return (weights if (floor, cap) == (0.0, 1.0) else _between(weights, floor, cap)), how


def weights_of(scores: Scores) -> Vector:
    """Return the positive part of each score; scores that are equal up to rounding have equal weights."""
    weights = np.maximum(scores.raw, 0.0)
    weights[weights <= np.maximum(rounding(scores.raw), _LEAST * weights.max())] = 0.0
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


def _why_undefined(scores: Scores, rule: Rule) -> Note | None:
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
    noise = 0.0 if scores.stderr is None else 2 * math.fsum(believed(scores.stderr)[above])
    if positive <= max(_NOTHING, noise) and noise > _NOTHING:
        return Note("within-errors", score=scores.score, positive=positive, noise=noise)
    if positive <= _NOTHING or not weights_of(scores).max() > 0:  # or all of it is rounding, beside others
        return Note("nothing-positive", score=scores.score, positive=positive)
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
    equal: float,
    floor: float,
    cap: float,
    forfeits: Mapping[str, float],
    negative: Negative,
    on_undefined: OnUndefined,
) -> tuple[float, float, float, dict[str, float]]:
    """Check all arguments; return the equal part, floor, cap and forfeits as float64."""
    if not isinstance(scores, Scores):
        raise InputError(f"shares takes Scores, got {type(scores).__name__}")
    for name, given, allowed in (
        ("rule", rule, Rule), ("negative", negative, Negative), ("on_undefined", on_undefined, OnUndefined)
    ):  # fmt: skip
        if given not in get_args(allowed):
            raise InputError(f"{name} must be one of {', '.join(get_args(allowed))}, got {given!r}")
    floor, cap = check_limits(scores, floor, cap)
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
    if rule == "impartial" and negative == "refuse":
        raise InputError(
            "rule 'impartial' needs negative='zero', got 'refuse': any client could stop all payment by "
            "reporting a negative score"
        )
    return equal, floor, cap, lost


def _part(name: str, given: float) -> float:
    found = _number(name, given)
    if not 0 <= found <= 1:
        raise InputError(f"{name} must lie between 0 and 1, got {found}")
    return found


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
