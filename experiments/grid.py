"""Numbers as text that every processor writes alike.

Another processor adds up in another order, and the last bits of a sum differ. No character may hang on them:

- what is added up for a text is added up exactly (``math.fsum``);
- values closer than ``TIE`` are made equal before they are ranked, counted or compared (:func:`settled`);
- a number is rounded to ``DIGITS`` decimals before it becomes text (:func:`text`), so that what is 0.375 on
  paper is 0.375 wherever it was computed, and zero has no sign.

Utilities and scores are of the order of 1, so both are absolute: nine significant digits of a difference
that is zero on paper would be digits of its rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

DIGITS = 9
TIE = 2.5e-10
"""Half of the smallest step of a score: results hold 9 digits, and alpha is half of a difference."""


def grid(value: float) -> float:
    """Return the number rounded to ``DIGITS`` decimals; zero has no sign.

    >>> grid(0.1 + 0.2), grid(-1e-17)
    (0.3, 0.0)
    """
    return round(float(value), DIGITS) + 0.0


def text(value: float, form: str) -> str:
    """Return the number in a format such as ".2f", "+.3f", ".1%" or ".0e".

    >>> text(0.375 - 1e-16, ".2f"), text(-0.001, ".2f"), text(-1e-17, "+.3f"), text(0.25, ".0%")
    ('0.38', '0.00', '+0.000', '25%')
    """
    sign = form[: form.startswith("+")]
    return format(grid(value), f"{sign}z{form[len(sign) :]}")


def rounded(value: float, digits: int) -> float:
    """Return the number with so many decimals, as a CSV file holds it.

    >>> rounded(-1e-17, 4), rounded(0.1 + 0.2, 4)
    (0.0, 0.3)
    """
    return round(grid(value), digits) + 0.0


def mean(values: Iterable[float]) -> float:
    """Return the mean, on the grid.

    >>> mean([0.1] * 10)
    0.1
    """
    known = list(values)
    return grid(math.fsum(known) / len(known))


def settled(values: Sequence[float] | np.ndarray, tie: float = TIE) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the values; neighbours closer than ``tie`` become one number, and those next to zero zero.

    A value with no neighbour stays as it is, so nothing depends on where a grid has its edges.

    >>> settled([0.1 + 0.2, 0.3, 0.5, 1e-17, -1e-17]).tolist()
    [0.30000000000000004, 0.30000000000000004, 0.5, 0.0, 0.0]
    """
    given = np.asarray(values, dtype=np.float64)
    order = np.argsort(given, kind="stable")
    ordered = given[order].tolist()
    found = np.empty_like(given)
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end] - ordered[end - 1] >= tie:
            first, last = ordered[start], ordered[end - 1]
            near_zero = first - tie < 0 < last + tie
            found[order[start:end]] = 0.0 if near_zero else math.fsum((first, last)) / 2
            start = end
    return found
