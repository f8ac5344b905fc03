"""Standard errors of what a member measures: the formula, and whether intervals made of them cover."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedmerit.protocol.outcome import Evaluations, Scorer, standard_error
from fedmerit.scoring.types import Scores
from fedmerit.scoring.uncertainty import intervals


def test_the_formula_by_hand():
    # sd of (3, 1): sqrt 2, over sqrt 2
    assert standard_error(np.array([3.0, 1.0])) == pytest.approx(1.0)
    # counted: no sample changed, plus one each way: sum of squares 2, over 51 * 52
    assert standard_error(np.zeros(50)) == 0.0
    assert standard_error(np.zeros(50), counted=True) == pytest.approx((2 / 51 / 52) ** 0.5)


def measured(before, after, inside, outside):
    parts = [{"u": np.array(part, dtype=float)} for part in (before, after, inside, outside)]
    outcome = SimpleNamespace(slice=SimpleNamespace(id="s"))
    return Scorer("A", Evaluations(lambda model, shown: {}))._measure("u", outcome, *parts, None)


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


def coverage(m, changed, upwards, counted, seed=0, repeats=4000):
    """How often the 95 % interval of an accuracy's LOO holds the true one; how often it has no width."""
    up, down = changed * upwards, changed * (1 - upwards)
    drawn = np.random.default_rng(seed).multinomial(m, [up, down, 1 - changed], size=repeats)
    kinds, times = np.unique(drawn, axis=0, return_counts=True)
    errors = [standard_error(np.repeat([1.0, -1.0, 0.0], kind), counted=counted) for kind in kinds]
    found = (kinds[:, 0] - kinds[:, 1]) / m
    names = tuple(f"test-set-{k}" for k in range(len(kinds)))
    scores = Scores(score="LOO", clients=names, values=found, raw=found, gain=1, stderr=errors)
    low, high = intervals(scores).T
    held = (low <= up - down + 1e-12) & (up - down <= high + 1e-12)
    return np.average(held, weights=times), np.average(np.array(errors) == 0, weights=times)


def test_a_small_test_set_often_shows_nothing():
    # 50 samples, 2 % change: .98^50 = 36 % of the test sets show none. Standard error of a share: .008
    covered, collapsed = coverage(50, 0.02, 0.75, counted=False)
    assert (covered, collapsed) == (pytest.approx(0.634, abs=0.03), pytest.approx(0.364, abs=0.03))
    covered, collapsed = coverage(50, 0.02, 0.75, counted=True)
    assert covered > 0.99
    assert collapsed == 0


@pytest.mark.parametrize(
    ("m", "plain", "here"),  # the table in docs/scores/index.md
    [
        (25, 0.12, 0.95),
        (50, 0.22, 0.94),
        (100, 0.39, 0.95),
        (200, 0.63, 0.94),
        (500, 0.85, 0.94),
        (1000, 0.87, 0.95),
    ],
)
def test_intervals_of_accuracy_cover(m, plain, here):
    every = [
        (changed, upwards)
        for changed in (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)
        for upwards in (0.5, 0.75, 0.9, 1)
    ]
    worst = [min(coverage(m, *one, counted=counted)[0] for one in every) for counted in (False, True)]
    # of 32 shares with a standard error of .0035 the lowest
    assert worst[0] == pytest.approx(plain, abs=0.02)
    assert worst[1] == pytest.approx(here, abs=0.015)


def test_it_costs_nothing_where_there_is_enough_to_see():
    samples = np.random.default_rng(0).choice([1.0, -1.0, 0.0], p=[0.1, 0.1, 0.8], size=1000)
    assert standard_error(samples, counted=True) == pytest.approx(standard_error(samples), rel=0.005)
