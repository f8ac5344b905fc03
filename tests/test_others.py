"""Statistics over everybody else: against exact fractions, however large a lie somebody tells."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.scoring.scores import mean_of_others, median_of_others, sum_of_others, trimmed_mean_of_others

tame = st.integers(-64, 64).map(lambda k: k / 8)
wild = st.builds(lambda x, k: x * 10.0**k, st.floats(-1, 1), st.integers(-20, 40))


def exactly(values, function):
    fractions = [Fraction(value) for value in values]
    return [function(sorted(fractions[:i] + fractions[i + 1 :])) for i in range(len(values))]


def median(others):
    return (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2


def trimmed(others):
    return sum(others[1:-1]) / (len(others) - 2)


@given(values=st.lists(tame | wild, min_size=4, max_size=9))
@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (sum_of_others, sum),
        (mean_of_others, lambda others: sum(others) / len(others)),
        (median_of_others, median),
        (trimmed_mean_of_others, trimmed),
    ],
)
def test_they_are_right_to_the_last_bits_of_the_answer(values, fast, slow):
    for got, expected in zip(fast(np.array(values)), exactly(values, slow), strict=True):
        assert abs(Fraction(float(got)) - expected) <= abs(expected) * Fraction(1, 2**51) + Fraction(
            1, 2**1070
        )


def test_what_is_trimmed_leaves_no_trace():
    said = np.array([1.0, 2.0, 3.0, 4.0, 1e20])
    assert trimmed_mean_of_others(said).tolist() == [3.5, 3.5, 3.0, 2.5, 2.5]
    assert trimmed_mean_of_others(-said).tolist() == [-3.5, -3.5, -3.0, -2.5, -2.5]
    assert trimmed_mean_of_others(np.array([1e20, -1e20, 1.0, 2.0])).tolist() == [1.0, 2.0, 2.0, 1.0]


def test_a_sum_of_others_is_that_of_adding_them_alone():
    assert sum_of_others(np.array([1e17, 1.0, 2.0]))[0] == 3.0  # what rounding took from the total comes back
    for x in ([0.1, 0.2, 0.3, 0.4], [0.3, 0.6, 0.9, 0.2, 0.8]):  # and what it took from a difference
        assert sum_of_others(np.array(x)).tolist() == [math.fsum(x[:i] + x[i + 1 :]) for i in range(len(x))]


def test_equals_stay_equal():
    x = np.array([0.1, 0.7, 0.1, 0.3, 0.7, 0.1])
    for function in (sum_of_others, median_of_others, trimmed_mean_of_others):
        got = function(x)
        assert got[0] == got[2] == got[5]
        assert got[1] == got[4]
