"""Standard errors of what a member measures: the formula, and whether intervals made of them cover."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedmerit.protocol.measurement import Evaluations, Scorer
from fedmerit.protocol.pool import Sampling
from fedmerit.scoring.sampling import error_parts, least_error, sketch
from fedmerit.scoring.types import Scores
from fedmerit.scoring.uncertainty import intervals


def joint(utility, labels, *parts, balanced=True):
    """Errors by class, of a member that measured these outcomes."""
    shown = SimpleNamespace(id="s", y=np.array(labels))
    values = [{utility: np.array(part, dtype=float)} for part in parts]
    member = Scorer("A", Evaluations(lambda model, shown: {}), "additive", Sampling(balanced))
    return member, member._measure(utility, SimpleNamespace(slice=shown, round=1), values, None)


def test_errors_by_class_where_the_pool_was_drawn_by_class():
    # LOO per sample (.1, .3 | .5, .5), IOI 0: only class 0 varies, sd .1414, over sqrt 2, times 2/4
    before, after, outside = [0.5] * 4, [0.6, 0.8, 1.0, 1.0], [0.5] * 4
    _, one = joint("u", [0, 0, 1, 1], before, after, before, outside)
    assert one.se_loo == pytest.approx(0.05, rel=1e-3)
    assert one.se_alpha == pytest.approx(0.025, rel=1e-3)
    assert (one.freedom, len(one.sketch)) == (2, 32)
    parts = error_parts(np.array([0.05, 0.15, 0.25, 0.25]), np.array([0, 0, 1, 1]))
    least = least_error([np.array(part) for part in (before, after, before, outside)]) / 2
    stated = sketch(parts, least, slice_id="s", round=1, client="A")
    assert one.sketch == pytest.approx(stated, abs=1e-6 * max(stated))
    _, other = joint("u", [0, 0, 1, 1], before, after, before, outside, balanced=False)
    assert other.se_loo == pytest.approx(np.std([0.1, 0.3, 0.5, 0.5], ddof=1) / 2, rel=1e-3)
    assert other.freedom == 3


def test_one_changed_answer_is_added_each_way_and_counts_half_in_alpha():
    right = [1, 0, 1, 1, 0, 1]
    member, one = joint("accuracy", [0, 0, 0, 1, 1, 1], right, right, right, right)
    assert (one.se_loo, one.se_ioi) == (pytest.approx(2**0.5 / 6), pytest.approx(2**0.5 / 6))
    assert (one.se_alpha, one.se_alpha_total) == (pytest.approx(2**0.5 / 12), pytest.approx(2**0.5 / 12))
    assert np.abs(one.sketch) == pytest.approx(2**0.5 / 12, rel=1e-6)
    assert (
        member.sampling.freedom("accuracy", SimpleNamespace(y=np.array([0, 0, 0, 1, 1, 1])))
        == one.freedom
        == 4
    )


def test_balanced_accuracy_counts_a_sample_of_the_rarest_class():
    labels = [0] * 8 + [1] * 2
    scale = np.array([10 / (2 * 8)] * 8 + [10 / (2 * 2)] * 2)
    right = scale * [1, 1, 0, 1, 0, 1, 1, 1, 1, 0]
    _, one = joint("balanced-accuracy", labels, right, right, right, right, balanced=False)
    assert one.se_loo == pytest.approx(2**0.5 * 2.5 / 10)
    assert one.freedom == 8  # classes are strata however the pool was drawn


def error_of(differences, *, counted):
    """The error of a mean difference of right answers, as members state it or without the least error."""
    before, after = (np.where(differences == kind, 0.0, 1.0) for kind in (1, -1))
    least = least_error([before, after]) if counted else 0.0
    return math.hypot(least, np.linalg.norm(error_parts(differences, np.zeros(len(differences), np.int64))))


def coverage(m, changed, upwards, counted, seed=0, repeats=4000):
    """How often the 95 % interval of an accuracy's LOO holds the true one; how often it has no width."""
    up, down = changed * upwards, changed * (1 - upwards)
    drawn = np.random.default_rng(seed).multinomial(m, [up, down, 1 - changed], size=repeats)
    kinds, times = np.unique(drawn, axis=0, return_counts=True)
    errors = [error_of(np.repeat([1.0, -1.0, 0.0], kind), counted=counted) for kind in kinds]
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
    ("m", "plain", "here"),
    [
        (25, 0.11, 0.96),
        (50, 0.22, 0.96),
        (100, 0.39, 0.95),
        (200, 0.63, 0.94),
        (500, 0.83, 0.94),
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
    assert error_of(samples, counted=True) == pytest.approx(error_of(samples, counted=False), rel=0.006)
