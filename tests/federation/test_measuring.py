"""Standard errors of what a member measures: the formula, and whether intervals made of them cover."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedmerit.federation.measuring import Member, standard_error
from fedmerit.types import Scores
from fedmerit.uncertainty import intervals


def test_the_formula_by_hand():
    # sd of (3, 1): sqrt 2, over sqrt 2
    assert standard_error(np.array([3.0, 1.0])) == pytest.approx(1.0)
    # counted: no sample changed, plus one each way: sum of squares 2, over 51 * 52
    assert standard_error(np.zeros(50)) == 0.0
    assert standard_error(np.zeros(50), counted=True) == pytest.approx((2 / 51 / 52) ** 0.5)


def measured(before, after, inside, outside):
    parts = [{"u": np.array(part, dtype=float)} for part in (before, after, inside, outside)]
    outcome = SimpleNamespace(slice=SimpleNamespace(id="s"))
    return Member("A", lambda model, shown: {}, {})._measure("u", outcome, *parts, None)


def test_right_answers_are_counted_and_anything_else_is_not():
    zeros, ones, half = [0, 0, 1], [1, 0, 1], [0.5, 0.0, 1.0]
    one = measured(zeros, ones, zeros, zeros)  # LOO per sample (1, 0, 0), IOI (0, 0, 0)
    assert one.se_loo == standard_error(np.array([1.0, 0, 0]), counted=True)
    assert one.se_ioi == standard_error(np.zeros(3), counted=True)
    assert one.se_alpha == one.se_alpha_total == standard_error(np.array([0.5, 0, 0]), counted=True)
    for place in range(4):
        parts = [zeros] * 4
        parts[place] = half
        other = measured(*parts)
        assert 0.0 in (other.se_loo, other.se_ioi)  # the difference that does not know of the half
        assert other.se_alpha == pytest.approx(0.25 / 3)  # sd of (.25, 0, 0) over sqrt 3


def coverage(m, changed, upwards, counted, seed=0, repeats=1500):
    """How often the 95 % interval of an accuracy's LOO holds the true one; how often it has no width."""
    rng = np.random.default_rng(seed)
    up, down = changed * upwards, changed * (1 - upwards)
    samples = rng.choice([1.0, -1.0, 0.0], p=[up, down, 1 - changed], size=(repeats, m))
    errors = np.array([standard_error(row, counted=counted) for row in samples])
    names = tuple(f"test-set-{k}" for k in range(repeats))
    found = samples.mean(axis=1)
    low, high = intervals(
        Scores(score="LOO", clients=names, values=found, raw=found, gain=1, stderr=errors)
    ).T
    truth = up - down
    return np.mean((low <= truth + 1e-12) & (truth <= high + 1e-12)), np.mean(errors == 0)


def test_intervals_of_accuracy_cover_on_small_test_sets():
    # 50 samples, 2 % change: .98^50 = 36 % of the test sets show nothing. Standard error of a share: .0125
    covered, collapsed = coverage(50, 0.02, 0.75, counted=False)
    assert (covered, collapsed) == (pytest.approx(0.63, abs=0.04), pytest.approx(0.364, abs=0.04))
    for m in (25, 50, 200, 1000):
        for changed in (0.01, 0.02, 0.1, 0.3):
            for upwards in (0.5, 1.0):
                covered, collapsed = coverage(m, changed, upwards, counted=True)
                assert collapsed == 0
                assert covered > 0.92
    # and it costs nothing where there is enough to see
    samples = np.random.default_rng(0).choice([1.0, -1.0, 0.0], p=[0.1, 0.1, 0.8], size=1000)
    assert standard_error(samples, counted=True) == pytest.approx(standard_error(samples), rel=0.005)
