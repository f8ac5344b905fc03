"""What training again changes: spreads by hand, intervals that cover, orders that hold or swap."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, t

from fedmerit.scoring.sampling import spread_factors
from fedmerit.scoring.types import Scores
from fedmerit.scoring.uncertainty import repeats


def run(raw, stderr=None, clients=None, **more):
    names = clients or tuple("ABCDEFGH"[: len(raw)])
    return Scores(score="PHI", clients=names, values=raw, raw=raw, gain=1.0, stderr=stderr, **more)


def test_both_spreads_by_hand():
    # A: 1, 2, 3: mean 2, deviations -1, 0, 1, so T^2 = 2 / 2 = 1
    # B: 4, 4, 7: mean 5, deviations -1, -1, 2, so T^2 = 6 / 2 = 3
    found = repeats([run([1, 4], [0.3, 0.1]), run([2, 4], [0.4, 0.1]), run([3, 7], [0.5, 0.1])])
    assert found.mean.tolist() == [2, 5]
    assert found.training == pytest.approx([1, math.sqrt(3)])
    # S^2 of A is (.09 + .16 + .25) / 3 = 1/6
    assert found.test == pytest.approx([math.sqrt(1 / 6), 0.1])
    assert found.total == pytest.approx([math.sqrt(1 / 6 + 1), math.sqrt(0.01 + 3)])
    assert found.mean_error == pytest.approx([math.sqrt(1 / 6 + 1 / 3), math.sqrt(0.01 + 1)])
    assert found.overall == pytest.approx((math.sqrt(2), math.sqrt((1 / 6 + 0.01) / 2)))
    assert (found.count, found.freedom) == (3, 2)


def test_the_interval_of_a_mean_by_hand():
    # T^2 / K = 1/3 with 2 degrees of freedom, S = .5: half widths 4.302653 * .577350 and 1.959964 * .5
    found = repeats([run([1], [0.5]), run([2], [0.5]), run([3], [0.5])])
    half = math.hypot(4.302653 * 0.577350, 1.959964 * 0.5)
    assert found.intervals()[0] == pytest.approx([2 - half, 2 + half], rel=1e-5)

    # T = 0, so only the test set counts, with the 3 degrees of freedom of its 4 blocks
    blocks = {"blocks": [[1.0], [2.0], [3.0], [2.0]], "sizes": [5.0, 5.0, 5.0, 5.0]}
    found = repeats([run([2], [0.5], **blocks), run([2], [0.5], **blocks)])
    half = t.ppf(0.975, 3) * 0.5
    assert found.intervals()[0] == pytest.approx([2 - half, 2 + half], rel=1e-6)


def test_without_standard_errors_training_alone_is_known():
    found = repeats([run([1, 4], [0.1, 0.1]), run([3, 4])])
    assert found.training == pytest.approx([math.sqrt(2), 0])
    assert found.test is found.total is found.mean_error is found.intervals() is found.told_apart is None
    assert found.overall == (1.0, None)
    assert found.broken == ()


def test_ranks_that_hold_and_pairs_that_swap_by_hand():
    found = repeats([run([3, 2, 1, 0]), run([3, 1, 2, 0]), run([3, 1.5, 1.5, 0])])
    assert found.ranks.tolist() == [[1, 2, 3, 4], [1, 3, 2, 4], [1, 2, 2, 4]]
    assert found.same_rank == ("A", "D")
    assert found.swaps == (("B", "C", 1, 1),)  # the tie of the third run counts for neither
    assert (found.holding, found.pairs, found.by_chance) == (5, 6, 0.25)
    found = repeats([run([2, 1]), run([1, 1 + 1e-15])])  # a tie neither holds nor swaps
    assert (found.holding, found.swaps) == (0, ())
    found = repeats([run([2, 1], [0.01, 0.01]), run([1, 2], [1.0, 1.0])])  # sure, but turned round
    assert found.broken == (("A", "B"),)
    assert found.told_apart.tolist() == [[0, 1], [0, 0]]


def test_clients_may_come_in_another_order():
    one = run([1, 2, 3], [0.1, 0.2, 0.3], blocks=[[1, 2, 3], [1, 2, 3]], sizes=[4, 6])
    other = run([3, 1, 2], [0.3, 0.1, 0.2], clients=("C", "A", "B"), blocks=[[3, 1, 2]] * 2, sizes=[4, 6])
    found = repeats([one, other])
    assert found.training.tolist() == [0, 0, 0]
    assert found.test == pytest.approx([0.1, 0.2, 0.3])
    assert found.runs[1].blocks.tolist() == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("n", [3, 40])
def test_sketches_go_with_their_clients(n):
    names, raw = tuple(f"m{i}" for i in range(n)), np.arange(float(n))
    known = np.random.default_rng(0).normal(size=(32, n)) * (1 + raw)
    more = {"stderr": 1 + raw, "sketch": known, "freedom": 100}
    other = {"stderr": 1 + raw[::-1], "sketch": known[:, ::-1], "freedom": 100}
    found = repeats([run(raw, clients=names, **more), run(raw[::-1], clients=names[::-1], **other)])
    assert found.runs[1].sketch.tolist() == known.tolist()
    assert found.average.covariance is None  # it is without errors


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 101])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_factors_of_a_spread_are_those_of_chi_square(freedom, level):
    low, high = (1 - level) / 2, (1 + level) / 2
    expected = [math.sqrt(freedom / chi2.ppf(p, freedom)) for p in (high, low)]
    assert spread_factors(freedom, level=level) == pytest.approx(expected, rel=1e-8)


NUMBERS = st.integers(-40, 40).map(lambda k: k / 8)


@st.composite
def several(draw):
    n, k = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    errors = st.integers(1, 16).map(lambda one: one / 16)
    rows = draw(st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=k, max_size=k))
    return [run(row, draw(st.lists(errors, min_size=n, max_size=n))) for row in rows]


@given(several(), st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(runs, rng):
    mixed = rng.sample(runs, len(runs))
    one, other = repeats(runs), repeats(mixed)
    for name in ("mean", "training", "test", "total", "mean_error"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-12)
    assert (one.above == other.above).all()
    assert one.intervals() == pytest.approx(other.intervals(), abs=1e-9)
    assert (set(one.swaps), set(one.broken)) == (set(other.swaps), set(other.broken))
    assert one.holding == other.holding


@given(several(), st.lists(NUMBERS, min_size=5, max_size=5))
def test_an_error_that_is_in_all_runs_is_no_part_of_the_spread(runs, errors):
    """That of the test pool: it moves every mean and no spread."""
    own = np.array(errors[: runs[0].n])
    moved = [run(one.raw + own, one.stderr) for one in runs]
    one, other = repeats(runs), repeats(moved)
    assert other.training == pytest.approx(one.training, abs=1e-9)
    assert other.mean == pytest.approx(one.mean + own, abs=1e-9)
    assert other.mean_error == pytest.approx(one.mean_error, abs=1e-9)


@given(several())
def test_every_pair_holds_swaps_or_ties(runs):
    found = repeats(runs)
    n, count = len(found.clients), found.count
    ties = 0
    for i in range(n):
        for j in range(i + 1, n):
            above, below = found.above[i, j], found.above[j, i]
            assert above + below <= count
            ties += max(above, below) < count and not (above and below)
    assert found.holding + len(found.swaps) + ties == found.pairs
    for one, other, above, below in found.swaps:
        at = [found.clients.index(name) for name in (one, other)]
        assert found.mean[at[0]] >= found.mean[at[1]] - 1e-9
        assert above == sum(each.raw[at[0]] > each.raw[at[1]] for each in runs)
        assert below == sum(each.raw[at[0]] < each.raw[at[1]] for each in runs)


@pytest.mark.parametrize("runs", [2, 3, 8])
@pytest.mark.parametrize("training", [0.2, 1.0, 4.0])
def test_intervals_cover_over_trainings_and_test_sets(runs, training):
    """3,000 clients: each has an error of its test pool, common to its runs, and one of every training."""
    rng = np.random.default_rng(20261116)
    n = 3000
    pool = rng.standard_normal(n)
    names = tuple(f"c{i}" for i in range(n))
    found = repeats(
        [run(pool + training * rng.standard_normal(n), np.ones(n), clients=names) for _ in range(runs)]
    )
    low, high = found.intervals().T
    covered = float(np.mean((low <= 0) & (high >= 0)))
    assert 0.94 <= covered <= 0.995
    assert float(np.mean(found.training**2)) == pytest.approx(training**2, rel=0.1)
