"""Agreement of two vectors: against scipy, by hand, matched by name, and None where undefined."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedmerit.scoring.ground_truth import agreement, normalise
from fedmerit.scoring.types import Scores

numbers = st.integers(-512, 512).map(lambda k: k / 64)


def scored(values, clients=None, score="ALPHA", **extra):
    names = clients or tuple(f"client-{i}" for i in range(len(values)))
    return Scores(score=score, clients=names, values=values, raw=extra.pop("raw", values), gain=1.0, **extra)


def test_normalise_by_hand():
    # min 1: (0, 1, 5), mean 2
    assert normalise([1, 2, 6]).tolist() == normalise(scored([1, 2, 6])).tolist() == [0.0, 0.5, 2.5]
    assert normalise([-1e308, 1e308]).tolist() == [0.0, 2.0]
    # (0, 2/3, 4/3, 2) and (0, 2/3, 2, 4/3): distance sqrt(2 * (2/3)^2), not its square
    assert agreement([1, 2, 3, 4], [1, 2, 4, 3]).l2 == pytest.approx(math.sqrt(8 / 9))


@given(st.lists(numbers, min_size=1, max_size=9), st.integers(1, 100), numbers)
def test_normalise_ignores_scale_and_shift(values, scale, shift):
    x = np.array(values)
    n = normalise(x)
    assert n.mean() == pytest.approx(1.0)
    assert n.min() >= 0
    assert normalise(scale * x + shift) == pytest.approx(n, abs=1e-9)


@pytest.mark.parametrize(
    "values", [[0, 0, 0], [0.3, 0.1 + 0.2], [7], [-2.5, -2.5], [1e300, 1e300], [0.1 * 3 / 3, 0.1]]
)
def test_normalise_of_equals_is_all_ones(values):
    assert normalise(values).tolist() == [1.0] * len(values)


@given(st.integers(2, 12).flatmap(lambda n: st.tuples(*[st.lists(numbers, min_size=n, max_size=n)] * 2)))
def test_coefficients_are_those_of_scipy(pair):
    from scipy import stats

    x, y = (np.array(values) for values in pair)
    assume(np.ptp(x) > 0 and np.ptp(y) > 0)
    a = agreement(x, y)
    assert a.spearman == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert a.kendall == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-12)
    assert a.pearson == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)


@given(st.lists(numbers, min_size=2, max_size=9), st.integers(1, 50), numbers)
def test_a_positive_affine_image_agrees_perfectly(values, scale, shift):
    x = np.array(values)
    assume(np.ptp(x) > 0)
    a = agreement(x, scale * x + shift)
    assert (a.spearman, a.kendall, a.pearson) == (1.0, 1.0, 1.0)
    assert a.l2 == pytest.approx(0, abs=1e-9)
    back = agreement(x, -x)
    assert (back.spearman, back.kendall, back.pearson) == (-1.0, -1.0, -1.0)


def test_undefined_is_none_and_never_zero():
    for x, y in [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [0.3, 0.1 + 0.2, 0.3]), ([0, 0], [0, 0])]:
        a = agreement(x, y)
        assert (a.spearman, a.kendall, a.pearson) == (None, None, None)
    # constant counts as all ones; the other one is (0, 1, 2): distance sqrt(2)
    assert agreement([1, 1, 1], [1, 2, 3]).l2 == pytest.approx(math.sqrt(2))


def test_values_that_differ_by_rounding_are_ties_and_others_are_not():
    noisy = [0.3, 0.1 + 0.2, 1.0]
    assert noisy[0] != noisy[1]
    assert agreement(noisy, [1, 2, 3]).kendall == pytest.approx(2 / math.sqrt(6))
    a = agreement([0.35, 0.1, 0.2, -5e12], [4, 2, 3, 1])  # a huge value ties nobody else
    assert (a.spearman, a.kendall) == (1.0, 1.0)
    assert agreement([-1e308, 1e308, 0], [1, 3, 2]).kendall == 1.0  # differences beyond the largest float
    x = 1 + np.arange(50) * 1.5e-10  # each beside the next
    assert agreement(x, np.arange(50)).kendall is None
    assert normalise(x).tolist() == [1.0] * 50


def test_scores_are_matched_by_name():
    x = scored([1, 2, 3], ("A", "B", "C"))
    assert agreement(x, scored([3, 1, 2], ("C", "A", "B"))).spearman == 1.0
    assert agreement(x, [3, 1, 2]).spearman == pytest.approx(-0.5)  # an array: by position


def test_published_values_are_compared_not_raw_ones():
    reversed_ = scored([3, 2, 1], raw=[1, 2, 3], status="reversed")
    assert agreement(reversed_, [1, 2, 3]).spearman == -1.0
    assert agreement(reversed_.raw, [1, 2, 3]).spearman == 1.0
