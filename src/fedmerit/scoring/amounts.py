"""Numbers and amounts of money as people write them: read if there is one way to read them, else refused.

A comma or a point before exactly three digits can separate thousands or decimals: 10,000 is ten thousand in
London and ten in Berlin. Nothing but the writer knows, and a mistake is one of a factor of 1000. So such an
amount is refused, although amounts have no third decimal.
"""

from __future__ import annotations

import re
from decimal import Decimal

from fedmerit.errors import InputError

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
    found = {}
    for mark, pattern in _NUMBER.items():
        if match := pattern.fullmatch(text):
            sign = match["sign"].replace("\u2212", "-")
            if match["plain"]:
                found[mark] = sign + match["plain"].replace(mark, ".") + (match["power"] or "")
            else:
                whole = match["whole"].replace(match["group"], "")
                found[mark] = sign + whole.replace(mark, ".")
    return found


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

    The currency is a code of ISO 4217 or a sign, before or after the number; € is EUR, and other signs stay
    as they are. None means that none is named.

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
    found = set(readings(match["number"]).values())
    if not found:
        raise InputError(f"expected {like}, got {text!r:.100}")
    if len(found) > 1:
        one, other = sorted(found, key=Decimal, reverse=True)
        raise InputError(
            f"{text!r:.100} can be read as {one} and as {other}: write it without a mark for thousands, "
            f"such as {one}"
        )
    return Decimal(found.pop()), codes[0] if codes else None
