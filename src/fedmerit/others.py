"""Statistics over everybody else: one number per client, from all values but its own, in O(N log N)."""

from __future__ import annotations

import math

import numpy as np

from fedmerit.types import Vector


def sum_of_others(values: Vector) -> Vector:
    """Sum over j != i, in twice the working precision: right up to the last bit; equals stay equal.

    >>> sum_of_others(np.array([1e17, 1.0, 2.0]))[0]
    np.float64(3.0)
    """
    high = math.fsum(values)
    low = math.fsum([*values.tolist(), -high])  # what rounding took from the total
    left = high - values
    step = left - high
    lost = (high - (left - step)) - (values + step)  # what rounding took from each difference (TwoSum)
    return left + (lost + low)


def mean_of_others(said: Vector) -> Vector:
    return sum_of_others(said) / (said.size - 1)


def median_of_others(said: Vector) -> Vector:
    """Median over j != i from one sort: removing position p shifts what stood behind it."""
    order = np.argsort(said, kind="stable")
    ordered = said[order]
    position = np.empty_like(order)
    position[order] = np.arange(said.size)
    left = said.size - 1
    low, high = (left - 1) // 2, left // 2
    middle: Vector = (ordered[low + (position <= low)] + ordered[high + (position <= high)]) / 2
    return middle


def trimmed_mean_of_others(said: Vector) -> Vector:
    """Mean over j != i without the lowest and the highest of them, neither of which enters any sum.

    In order x_1 <= ... <= x_N the lowest and the highest of all are kept for nobody. Of the N - 2 between
    them each client loses one more: its own, or the one beside it where its own is at an end.

    >>> trimmed_mean_of_others(np.array([1.0, 2.0, 3.0, 4.0, 1e20]))
    array([3.5, 3.5, 3. , 2.5, 2.5])
    """
    order = np.argsort(said, kind="stable")
    lost = np.empty_like(order)
    lost[order] = np.clip(np.arange(said.size) - 1, 0, said.size - 3)
    mean: Vector = mean_of_others(said[order][1:-1])[lost]
    return mean
