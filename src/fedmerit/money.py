"""From shares to money: a budget in whole cents that add up exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

import numpy as np

from fedmerit.arrays import is_number
from fedmerit.errors import InputError

_WHOLE = 10**9  # shares that sum to 1 within one part in this are paid out in full
_DUST = 10**6  # all rounding errors together: at most one part in this of a cent
_LARGEST_BUDGET = 10**24  # in cents still fewer digits than Decimal's default precision: sums stay exact


@dataclass(frozen=True, eq=False)
class Payouts(Mapping[str, Decimal]):
    """Name -> amount in cents' precision. The amounts and ``unpaid`` add up to ``budget`` exactly."""

    by_client: Mapping[str, Decimal]
    budget: Decimal
    unpaid: Decimal

    def __getitem__(self, client: str) -> Decimal:
        return self.by_client[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_client)

    def __len__(self) -> int:
        return len(self.by_client)


def payouts(shares: Mapping[str, float | Fraction | Decimal], budget: str | int | Decimal) -> Payouts:
    r"""A budget divided by shares, in whole cents that add up to it exactly.

    Each client gets its share of the budget rounded down, and the cents left over go to the largest
    remainders; equal ones, up to a millionth of a cent, by name, so that neither rounding nor the order of
    clients decides. Where shares sum to less than 1, and under the rule "impartial", every amount is rounded
    down and the rest is ``unpaid``: nobody's cent depends on another's remainder.

    Args:
        shares: name -> share, from :func:`~fedmerit.shares` or any mapping that sums to at most 1.
        budget: an amount with at most 2 decimals: an int, a Decimal, or text of digits such as "10000.00"; a
            float has no exact cents.

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
    )


@dataclass(frozen=True)
class Division:
    """How a budget is divided, apart from who gets what: with it, a share alone gives its exact cents.

    Cents that are left over go to remainders from ``high`` on, and from ``low`` on to names up to ``last``.
    Both are as coarse as they can be: an exact remainder of somebody would tell its share.
    """

    cents: int  # the budget
    n: int
    total: int  # of all shares, in units of 1 / one
    one: int
    down: bool  # every amount is rounded down
    low: Fraction = Fraction(1)
    high: Fraction = Fraction(1)
    last: str = ""

    def cents_of(self, name: str, share: float | Fraction | Decimal) -> int:
        """What somebody with this share is paid."""
        top, bottom = _ratio(name, share)
        if self.one % bottom:
            raise InputError(f"share of {name!r} is none of those that were divided: {share!r}")
        part = top * (self.one // bottom)
        if self.down:
            unit = max(self.total, self.one)
            dust = unit // (_DUST * self.n)  # a share of 0.25 less a rounding error is 0.25
            return (self.cents * part + dust) // unit
        amount, rest = divmod(self.cents * part, self.total)
        more = rest >= self.high * self.total or (rest >= self.low * self.total and name <= self.last)
        return amount + more


def division(shares: Mapping[str, float | Fraction | Decimal], budget: str | int | Decimal) -> Division:
    """How :func:`payouts` divides a budget by these shares."""
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
    first = end = left  # remainders first ... end - 1 are equal up to dust, each to the next
    while first and rests[first - 1] - rests[first] <= dust:
        first -= 1
    if first == left:
        cut = _between(rests[left], rests[left - 1], total)
        return replace(made, low=cut, high=cut)
    while end < len(rests) and rests[end - 1] - rests[end] <= dust:
        end += 1
    low = _between(rests[end] if end < len(rests) else -1, rests[end - 1], total)
    high = _between(rests[first], rests[first - 1] if first else total, total)
    equal = sorted(name for name, rest in rest_of.items() if rests[end - 1] <= rest <= rests[first])
    return replace(made, low=low, high=high, last=equal[left - first - 1])


def _between(low: int, high: int, total: int) -> Fraction:
    """The number of fewest binary digits above low / total and up to high / total."""
    digits = 0
    while (high << digits) // total * total <= low << digits:
        digits += 1
    return Fraction((high << digits) // total, 1 << digits)


def rounds_down(total: int, one: int, rule: str | None) -> bool:
    """Whether nobody gets a cent that is left over: shares leave a part unpaid, or the rule is impartial."""
    return one - total > one // _WHOLE or rule == "impartial"


def _integers(shares: Mapping[str, float | Fraction | Decimal]) -> tuple[dict[str, int], int]:
    """Shares as integers over a common denominator, and that denominator; nothing is rounded."""
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
    """Exactly this share, as numerator and denominator."""
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
    if isinstance(budget, str) and not re.fullmatch(r"[0-9]+(\.[0-9]+)?", budget):
        comma = ", without a comma" if "," in budget else ""
        raise InputError(f"budget must be an amount like '10000.00'{comma}, got {budget!r:.100}")
    if isinstance(budget, str) and len(budget.partition(".")[2]) > 2:
        raise InputError(f"budget must have at most 2 decimals, got {budget!r:.100}")
    amount = Decimal(budget)
    if not amount.is_finite() or not 0 <= amount < _LARGEST_BUDGET:
        raise InputError(f"budget must be finite, at least 0 and below 1e24, got {budget!r}")
    cents = Fraction(amount) * 100
    if cents.denominator != 1:
        raise InputError(f"budget must have at most 2 decimals, got {budget!r}")
    return int(cents)


def spelled(budget: str) -> str:
    """Return a budget as it is recorded.

    >>> spelled("0750.5")
    '750.50'
    """
    return str(_money(_cents(budget)))


def _money(cents: int) -> Decimal:
    return Decimal(f"{cents // 100}.{cents % 100:02d}")
