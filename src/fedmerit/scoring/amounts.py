"""Numbers and amounts of money as people write them, and a budget divided by shares, to the cent.

A comma or a point before exactly three digits can separate thousands or decimals: 10,000 is ten thousand in
London and ten in Berlin. Only the writer knows, so such an amount is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import TypeVar

import numpy as np

from fedmerit.errors import InputError
from fedmerit.scoring.types import SHOWN, is_number

# ------------------------------------------------------------------------------------------------- numbers

BLANKS = " \u00a0\u2009\u202f"
"""The blanks that separate thousands: plain, no-break, thin, and narrow no-break."""
_MARKS = {".": ",", ",": "."}
_GROUPED = r"[1-9][0-9]{0,2}(?:(?P<group>['\u2019" + BLANKS + r"]|\%s)[0-9]{3})(?:(?P=group)[0-9]{3})*"
_NUMBER = {
    mark: re.compile(
        rf"(?P<sign>[+\-\u2212]?)(?:(?P<whole>{_GROUPED % other}(?P<part>\{mark}[0-9]*)?)"
        rf"|(?P<plain>[0-9]+(?:\{mark}[0-9]*)?|\{mark}[0-9]+)(?P<power>[eE][+\-]?[0-9]+)?)"
    )
    for mark, other in _MARKS.items()
}


def readings(text: str) -> dict[str, str]:
    """Return every way to read a number: the decimal mark it assumes -> the number with a decimal point.

    Thousands are groups of three digits, separated throughout by the other mark, an apostrophe or a blank.

    >>> readings("0,25"), readings("1,234"), readings("10 000"), readings("high")
    ({',': '0.25'}, {'.': '1234', ',': '1.234'}, {'.': '10000', ',': '10000'}, {})
    """
    numbers = {}
    for mark, pattern in _NUMBER.items():
        if match := pattern.fullmatch(text):
            sign = match["sign"].replace("\u2212", "-")
            if match["plain"]:
                numbers[mark] = sign + match["plain"].replace(mark, ".") + (match["power"] or "")
            else:
                numbers[mark] = sign + match["whole"].replace(match["group"], "").replace(mark, ".")
    return numbers


# ------------------------------------------------------------------------------------------------- amounts

_CODES = """
AED AFN ALL AMD ANG AOA ARS AUD AWG AZN BAM BBD BDT BGN BHD BIF BMD BND BOB BRL BSD BTN BWP BYN BZD
CAD CDF CHF CLP CNY COP CRC CUP CVE CZK DJF DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD
GNF GTQ GYD HKD HNL HTG HUF IDR ILS INR IQD IRR ISK JMD JOD JPY KES KGS KHR KMF KPW KRW KWD KYD KZT
LAK LBP LKR LRD LSL LYD MAD MDL MGA MKD MMK MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR
NZD OMR PAB PEN PGK PHP PKR PLN PYG QAR RON RSD RUB RWF SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP
STN SVC SYP SZL THB TJS TMT TND TOP TRY TTD TWD TZS UAH UGX USD UYU UZS VES VND VUV WST XAF XCD XCG
XOF XPF YER ZAR ZMW ZWG
"""
CURRENCIES = frozenset(_CODES.split())
"""Codes of ISO 4217 for money that is in use."""
_UNITS = {
    0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX VND VUV XAF XOF XPF",
    3: "BHD IQD JOD KWD LYD OMR TND",
}
_DECIMALS = {code: decimals for decimals, codes in _UNITS.items() for code in codes.split()}
_SIGNS = {"€": "EUR"} | {sign: sign for sign in "$£¥₩₪₴₹₺₽"}  # other signs stand for several currencies
_CURRENCY = r"[A-Za-z]{3}|[" + "".join(_SIGNS) + "]"
_AMOUNT = re.compile(
    rf"(?P<before>{_CURRENCY})?[{BLANKS}]*(?P<number>[0-9]([0-9.,'\u2019{BLANKS}]*[0-9])?)[{BLANKS}]*"
    rf"(?P<after>{_CURRENCY})?"
)


def decimals_of(currency: str | None) -> int:
    """Return how many decimals amounts in a currency have; two if it is unknown, a sign, or None.

    >>> decimals_of("EUR"), decimals_of("JPY"), decimals_of("KWD"), decimals_of(None)
    (2, 0, 3, 2)
    """
    return _DECIMALS.get(currency or "", 2)


def decimals_assumed(currency: str) -> bool:
    """Return whether nobody knows how many decimals amounts have: ¥ and ₩ may be currencies without any.

    >>> decimals_assumed("XBT"), decimals_assumed("¥"), decimals_assumed("$"), decimals_assumed("JPY")
    (True, True, False, False)
    """
    return currency not in CURRENCIES and currency not in (set(_SIGNS) - set("¥₩"))


def amount_of(text: str) -> tuple[Decimal, str | None]:
    """Return an amount of money and its currency, or raise InputError if it is none, or can be read twice.

    The currency is a code of ISO 4217 or a sign, before or after the number; None if none is named.

    >>> amount_of("10,000.00"), amount_of("10 000,5 EUR"), amount_of("€10000")
    ((Decimal('10000.00'), None), (Decimal('10000.5'), 'EUR'), (Decimal('10000'), 'EUR'))
    """
    like = "an amount like 10000.00, 10,000.00 or 10 000,00 EUR"
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise InputError(f"expected {like}, got {text!r:.100}")
    named = [name for name in (match["before"], match["after"]) if name]
    codes = [_SIGNS.get(name, name.upper()) for name in named]
    for name, code in zip(named, codes, strict=True):
        if code not in CURRENCIES and code not in _SIGNS:
            raise InputError(f"expected a currency such as EUR in {text!r:.100}, got {name!r}")
    if len(set(codes)) > 1:
        raise InputError(f"expected one currency in {text!r:.100}, got {codes[0]} and {codes[1]}")
    numbers = sorted(set(readings(match["number"]).values()), key=Decimal, reverse=True)
    if not numbers:
        raise InputError(f"expected {like}, got {text!r:.100}")
    if len(numbers) > 1:
        large, small = numbers
        how = f"write it without a mark for thousands, such as {large}"
        raise InputError(f"{text!r:.100} can be read as {large} and as {small}: {how}")
    return Decimal(numbers[0]), codes[0] if codes else None


# --------------------------------------------------------------------------------------------------- cents

_WHOLE = 10**9  # shares are paid out in full if they sum to 1 within one part in this
_DUST = 10**6  # all rounding errors together are at most one part in this of a cent
_LARGEST_BUDGET = 10**24  # its cents fit into Decimal's default precision, so sums stay exact
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class ByClient(Mapping[str, Value]):
    """A mapping from names of clients, with more fields."""

    by_client: Mapping[str, Value]

    def __getitem__(self, client: str) -> Value:
        return self.by_client[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_client)

    def __len__(self) -> int:
        return len(self.by_client)


@dataclass(frozen=True, eq=False)
class Payouts(ByClient[Decimal]):
    """Amounts by name, exact to the cent. The amounts and ``unpaid`` add up to ``budget`` exactly.

    A cent is the smallest unit of the currency: a yen in JPY, a thousandth in KWD, a hundredth if no currency
    or an unknown one is named.
    """

    budget: Decimal
    unpaid: Decimal
    currency: str | None = None

    @property
    def nothing(self) -> Decimal:
        """An amount of 0, with the decimals of the currency."""
        return self.budget - self.budget

    def _repr_html_(self) -> str:
        return str(SHOWN["payouts_html"](self))

    def cents(self, amount: Decimal) -> int:
        return int(amount.scaleb(decimals_of(self.currency)))


def payouts(
    shares: Mapping[str, float | Fraction | Decimal], budget: str | int | Decimal, currency: str | None = None
) -> Payouts:
    """Divide a budget by shares into whole cents that, with ``unpaid``, add up to it exactly.

    Each client gets its share of the budget rounded down, and the cents left over go to the largest
    remainders; those equal up to a millionth of a cent are ordered by name. If the shares sum to less than 1,
    or the rule is "impartial", every amount is rounded down and the rest is ``unpaid``: no amount depends on
    another client's remainder. Shares by "hands" are divided slice by slice, see `in_slices`.

    Args:
        shares: name -> share, from :func:`~fedmerit.shares` or any mapping that sums to at most 1.
        budget: an int, a Decimal, or text such as "10000.00", "10,000.00" or "10 000,00 EUR" (`amount_of`),
            with no more decimals than the currency has. A float is refused, because it has no exact cents.
        currency: as in ISO 4217, if the budget does not name it.

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
    if slices := getattr(shares, "slices", None):
        return in_slices(slices, budget, currency)
    rule = division(shares, budget, currency)
    cents = {name: rule.cents_of(name, share) for name, share in shares.items()}
    return Payouts(
        by_client={name: money_of(amount, currency) for name, amount in cents.items()},
        budget=money_of(rule.cents, currency), currency=currency,
        unpaid=money_of(rule.cents - sum(cents.values()), currency),
    )  # fmt: skip


def in_slices(
    slices: Mapping[str, Mapping[str, Fraction]], budget: str | int | Decimal, currency: str | None
) -> Payouts:
    """Divide a budget among judges equally, and each judge's slice by its parts, into whole cents.

    What a slice leaves unpaid is divided like one more part of it. In every division the cents left over go
    to the largest remainders, equal ones in the order of a hash: no name is always first. So the amount of a
    client depends on nothing that it said as a judge.
    """

    def place(*names: str) -> str:
        return hashlib.sha256(json.dumps(["fedmerit/hands/1", *names]).encode()).hexdigest()

    each = payouts({place(judge): Fraction(1, len(slices)) for judge in slices}, budget, currency)
    total = dict.fromkeys(slices, 0)
    for judge, parts in slices.items():
        own = {place(judge, name): part for name, part in parts.items()}
        own[place(judge)] = 1 - sum(own.values(), Fraction(0))
        paid = payouts(own, each[place(judge)], currency)
        for name in parts:
            total[name] += paid.cents(paid[place(judge, name)])
    return Payouts(
        by_client={name: money_of(cents, currency) for name, cents in total.items()}, budget=each.budget,
        currency=currency, unpaid=money_of(each.cents(each.budget) - sum(total.values()), currency),
    )  # fmt: skip


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
    rule = Division(cents, len(parts), total, one, rounds_down(total, one, getattr(shares, "rule", None)))
    leftover = 0 if rule.down else cents - sum(cents * part // total for part in parts.values())
    if not leftover:
        return rule
    rest_of = {name: cents * part % total for name, part in parts.items()}
    rests = sorted(rest_of.values(), reverse=True)
    dust = total // (_DUST * len(rests))
    first = end = leftover  # remainders first ... end - 1 each equal the next up to dust
    while first and rests[first - 1] - rests[first] <= dust:
        first -= 1
    if first == leftover:
        cut = _cut_between(rests[leftover], rests[leftover - 1], total)
        return replace(rule, low=cut, high=cut)
    while end < len(rests) and rests[end - 1] - rests[end] <= dust:
        end += 1
    low = _cut_between(rests[end] if end < len(rests) else -1, rests[end - 1], total)
    high = _cut_between(rests[first], rests[first - 1] if first else total, total)
    equal = sorted(name for name, rest in rest_of.items() if rests[end - 1] <= rest <= rests[first])
    return replace(rule, low=low, high=high, last=equal[leftover - first - 1])


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
    """Return the shares as integers over a common denominator, and that denominator."""
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
        where = f" in {currency}" if currency else ""
        raise InputError(f"budget must have at most {decimals} decimals{where}, got {budget!r}")
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
