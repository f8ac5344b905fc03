"""Uncertainty: formulas by hand, Holm the slow way, seeded coverage; what training again changes."""

import math
import time
from dataclasses import replace
from itertools import combinations, permutations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, t

from fedmerit.errors import ReportError
from fedmerit.scoring.sampling import resolvable_gap, spread_factors, student_quantile
from fedmerit.scoring.types import Scores
from fedmerit.scoring.uncertainty import (
    MOST_GROUPS,
    compare_pairs,
    indistinguishable,
    intervals,
    largest_groups,
    pair_errors,
    rank_intervals,
    repeats,
    sure_signs,
)

z = NormalDist().inv_cdf


def scored(raw, stderr=None, clients=()):
    names = clients or tuple("ABCDEFGHIJKLMNOP"[: len(raw)])
    return Scores(score="ALPHA", clients=names, values=raw, raw=raw, gain=1.0, stderr=stderr)


@st.composite
def noisy_scores(draw):
    n = draw(st.integers(2, 8))
    raw = draw(st.lists(st.integers(-64, 64).map(lambda k: k / 8), min_size=n, max_size=n))
    return scored(raw, draw(st.lists(st.integers(0, 32).map(lambda k: k / 32), min_size=n, max_size=n)))


def test_z_interval_by_hand():
    s = scored([1.0, 3.0], [0.5, 0.0])
    assert intervals(s) == pytest.approx(np.array([[1 - 1.959964 / 2, 1 + 1.959964 / 2], [3, 3]]), abs=1e-6)
    assert intervals(s, level=0.9)[0] == pytest.approx([1 - 1.644854 / 2, 1 + 1.644854 / 2], abs=1e-6)
    assert intervals(replace(s, values=[9, 1])).tolist() == intervals(s).tolist()  # about the raw vector


def correlated(s, covariance):
    """The same scores with a sketch that gives this covariance, with endless degrees of freedom."""
    sizes, directions = np.linalg.eigh(np.asarray(covariance, dtype=float))
    root = np.sqrt(s.n * np.maximum(sizes, 0)) * directions
    return replace(s, sketch=np.tile(root.T, (2000, 1)), freedom=10**6)


def independent(s):
    return correlated(s, np.diag(s.stderr**2))


def test_pair_errors_by_hand():
    s = scored([1, 2], [3, 4])
    assert pair_errors(s).tolist() == [[0, 7], [7, 0]]
    assert pair_errors(correlated(s, [[9, 0], [0, 16]])) == pytest.approx(np.array([[0, 5], [5, 0]]))
    # c = 6: 9 + 16 - 12 = 13
    assert pair_errors(correlated(s, [[9, 6], [6, 16]])) == pytest.approx(np.sqrt([[0, 13], [13, 0]]))
    # fully correlated: |3 - 4|; fully anti-correlated: 3 + 4, the conservative bound is reached
    assert pair_errors(correlated(s, [[9, 12], [12, 16]]))[0, 1] == pytest.approx(1)
    assert pair_errors(correlated(s, [[9, -12], [-12, 16]]))[0, 1] == pytest.approx(7)
    # the same error in both cancels
    assert pair_errors(replace(s, sketch=[[0.3, 0.1 + 0.2]], freedom=9))[0, 1] == 0.0


@given(noisy_scores(), st.floats(-1, 1))
def test_conservative_errors_bound_every_correlation(s, correlation):
    own = np.outer(s.stderr, s.stderr) * correlation
    np.fill_diagonal(own, s.stderr**2)
    if np.linalg.eigvalsh(own)[0] >= 0:
        assert (pair_errors(correlated(s, own)) <= pair_errors(s) + 1e-6).all()


def slow_holm(s, level):
    """Holm's step-down, one ordered pair after the other."""
    alpha, n, errors = 1 - level, s.n, pair_errors(s)
    p = {}
    for i, j in permutations(range(n), 2):
        d = s.raw[i] - s.raw[j]
        p[i, j] = 1 - NormalDist().cdf(d / errors[i, j]) if errors[i, j] else float(d <= 0)
    better = np.zeros((n, n), bool)
    for k, pair in enumerate(sorted(p, key=p.get)):
        if p[pair] > alpha / (len(p) - k):
            break
        better[pair] = True
    return better


@given(noisy_scores(), st.sampled_from([0.5, 0.9, 0.95, 0.999]), st.booleans())
def test_pairs_are_those_of_holm(s, level, sketched):
    s = independent(s) if sketched else s
    assert compare_pairs(s, level=level).better.tolist() == slow_holm(s, level).tolist()


def test_holm_by_hand():
    # Two clients, two one-sided hypotheses at 2.5 % each: critical value z(.975) with s = 1 + 1.
    bar = 2 * z(0.975)
    assert compare_pairs(scored([bar * 1.001, 0], [1, 1])).better.tolist() == [[False, True], [False, False]]
    assert not compare_pairs(scored([bar * 0.999, 0], [1, 1])).better.any()
    # Three clients: the first rejections need z(1 - .05/6) = 2.394. 10 - 0 and 10 - 4.6 pass at once; then
    # z(1 - .05/4) = 2.241 is enough: 4.6 > 2 * 2.241 = 4.483, although 4.6 < 2 * 2.394 = 4.788.
    s = scored([10, 4.6, 0], [1, 1, 1])
    pairs = compare_pairs(s)
    assert pairs.better.tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert pairs.difference[0, 2] == 10
    assert pairs.stderr[0, 2] == 2
    assert not compare_pairs(scored([10, 4.4, 0], [1, 1, 1])).better[1, 2]


def test_a_low_level_never_claims_both_ways():
    # z(1 - .7/2) = .385: .8 > 2 * .385 is found; what is left would be tested at z(.3) < 0.
    pairs = compare_pairs(scored([0.8, 0], [1, 1]), level=0.3)
    assert pairs.better.tolist() == [[False, True], [False, False]]
    for s in (scored([9, 0], [1, 1]), scored([9], [1])):  # what is left would be tested at a tail of 1
        assert compare_pairs(s, level=1e-20).better.sum() == s.n - 1
        assert rank_intervals(s, level=1e-20)[:, 0].tolist() == [1, 2][: s.n]
        assert sure_signs(s, level=1e-20)[0] == 1


def ranks_in(pairs):
    """The best and the worst rank of each client, from the definition."""
    n = len(pairs.clients)
    return np.array([[1 + pairs.better[:, i].sum(), n - pairs.better[i].sum()] for i in range(n)])


def test_without_error_every_difference_counts_but_rounding():
    s = scored([0.3, 0.1 + 0.2, 0.5], [0, 0, 0])
    assert compare_pairs(s).better.tolist() == [[False] * 3, [False] * 3, [True, True, False]]
    assert rank_intervals(s).tolist() == [[2, 3], [2, 3], [1, 1]]
    s = scored([0.35, 0.1, 0.2, -5e12], [0.001, 0.001, 0.001, 1e11])  # a huge score ties nobody else
    expected = [[1, 1], [3, 3], [2, 2], [4, 4]]
    assert rank_intervals(s).tolist() == ranks_in(compare_pairs(s)).tolist() == expected


def test_rank_intervals_by_hand():
    s = scored([10, 4.6, 0, 4.5], [1, 1, 1, 1], ("top", "mid", "low", "mid2"))
    # z(1 - .05/12) = 2.638: 10 beats all, by 5.4 > 5.28. Then z(1 - .05/9) = 2.539: 4.6 - 0 < 5.08.
    assert rank_intervals(s).tolist() == [[1, 1], [2, 4], [2, 4], [2, 4]]
    assert indistinguishable(s) == (("top",), ("mid", "mid2", "low"))


@given(noisy_scores(), st.sampled_from([0.8, 0.95]))
def test_rank_intervals_are_those_of_all_pairs_and_hold_the_observed_ranks(s, level):
    low, high = rank_intervals(s, level=level).T
    assert ranks_in(compare_pairs(s, level=level)).T.tolist() == [low.tolist(), high.tolist()]
    assert (low >= 1).all()
    assert (high <= s.n).all()
    assert (low <= s.ranks()).all()
    assert (s.ranks() <= high).all()


@given(noisy_scores(), st.booleans())
def test_two_are_in_a_group_together_just_if_they_are_not_apart(s, sketched):
    s = independent(s) if sketched else s
    pairs = compare_pairs(s)
    groups = indistinguishable(s)
    apart = pairs.better | pairs.better.T
    for i, one in enumerate(s.clients):
        for j, other in enumerate(s.clients):
            assert any({one, other} <= set(group) for group in groups) == (not apart[i, j])
    best = {name for name, low in zip(s.clients, rank_intervals(s)[:, 0], strict=True) if low == 1}
    assert set(groups[0]) == best
    for group in groups:
        assert list(group) == [name for name in s.ranking() if name in group]


def test_groups_may_overlap_and_a_large_error_reaches_past_a_small_one():
    s = scored([0, 3, 6], [1, 1, 1])
    assert indistinguishable(s) == (("C", "B"), ("B", "A"))
    assert indistinguishable(s, level=0.1) == (("C",), ("B",), ("A",))
    # .300 and .250 are apart by .05 > 2.394 (.005 + .005); .245 +- .05 is apart from neither
    s = scored([0.30, 0.25, 0.245], [0.005, 0.005, 0.05])
    assert compare_pairs(s).better.tolist() == [[False, True, False], [False] * 3, [False] * 3]
    assert indistinguishable(s) == (("A", "C"), ("B", "C"))


def groups_by_hand(better, ranking):
    """Every subset without a pair apart that is part of no other such subset."""
    n = len(ranking)
    apart = better | better.T
    clean = [
        set(some)
        for size in range(1, n + 1)
        for some in combinations(range(n), size)
        if not any(apart[i, j] for i, j in combinations(some, 2))
    ]
    largest = [some for some in clean if not any(some < other for other in clean)]
    places = sorted(sorted(ranking.index(i) for i in some) for some in largest)
    return [tuple(ranking[k] for k in some) for some in places]


@st.composite
def relations(draw):
    n = draw(st.integers(1, 7))
    upper, many = np.zeros((n, n), bool), n * (n - 1) // 2
    upper[np.triu_indices(n, 1)] = draw(st.lists(st.booleans(), min_size=many, max_size=many))
    ranking = draw(st.permutations(range(n)))
    better = np.zeros((n, n), bool)
    better[np.ix_(ranking, ranking)] = upper
    return better, list(ranking)


@given(relations())
def test_they_are_all_the_groups_that_nobody_could_join(relation):
    assert largest_groups(*relation) == groups_by_hand(*relation)


def test_intervals_of_n_clients_form_at_most_n_groups_quickly():
    rng = np.random.default_rng(0)
    raw, reach = rng.normal(size=1000), rng.exponential(0.1, 1000)
    better = (raw - reach)[:, None] > (raw + reach)[None, :]
    start = time.process_time()
    found = largest_groups(better, np.argsort(-raw).tolist())
    assert time.process_time() - start < 60  # subset by subset it would not end
    assert 100 < len(found) <= 1000
    assert {i for group in found for i in group} == set(range(1000))


def pairs_apart(k):
    """Client 2i is better than 2i + 1 and there is nothing else to say: one of each pair is a group."""
    better = np.zeros((2 * k, 2 * k), bool)
    better[2 * np.arange(k), 2 * np.arange(k) + 1] = True
    return better, list(range(2 * k))


def test_too_many_groups_are_refused():
    assert len(largest_groups(*pairs_apart(10))) == 2**10
    with pytest.raises(ReportError, match=f"expected at most {MOST_GROUPS} groups .* 300 form more"):
        largest_groups(*pairs_apart(150))


TRUTH = np.array([-0.5, 0.0, 0.0, 0.4, 0.8, 0.8, 1.5])


def simulate(covariance, repeats, seed):
    generator = np.random.default_rng(seed)
    return TRUTH + generator.multivariate_normal(np.zeros(TRUTH.size), covariance, size=repeats)


def covered(s):
    """Whether every true rank, ties included, lies in its interval."""
    low, high = rank_intervals(s).T
    best = np.array([1 + (own < TRUTH).sum() for own in TRUTH])
    worst = np.array([(own <= TRUTH).sum() for own in TRUTH])
    return bool((low <= best).all() and (high >= worst).all())


@pytest.mark.parametrize("correlation", [-0.15, 0.0, 0.6])
def test_rank_intervals_cover_simultaneously(correlation):
    cov = 0.04 * ((1 - correlation) * np.eye(7) + correlation)
    draws = simulate(cov, 400, seed=2)
    assert np.mean([covered(scored(raw, [0.2] * 7)) for raw in draws]) >= 0.99
    if correlation >= 0:
        assert np.mean([covered(independent(scored(raw, [0.2] * 7))) for raw in draws]) >= 0.93


def test_the_resolvable_gap_by_hand():
    # (1.959964 + 0.841621)^2 = 7.84888
    assert resolvable_gap(78488.8, 1) == pytest.approx(0.01)
    assert resolvable_gap(38414.6, 1, power=0.5) == pytest.approx(0.01)  # z(.5) = 0: 1.959964^2
    assert resolvable_gap(400, 3, power=0.5) == pytest.approx(3 * 1.959964 / 20)
    # Bonferroni over 36 pairs: z(1 - .05/72) = 3.19753
    assert resolvable_gap(1, 1, comparisons=36) == pytest.approx(z(1 - 0.05 / 72) + z(0.8))


def test_tails_too_thin_for_one_minus_them():
    # P(Z > 8.2923) = 5.55e-17, half of what is left of the largest level below 1; and 1e-18 of .025
    level = math.nextafter(1, 0)
    assert intervals(scored([0.0, 0.0], [1, 1]), level=level)[0, 1] == pytest.approx(8.2924, abs=1e-3)
    assert compare_pairs(scored([17.0, 0.0], [1, 1]), level=level).better[0, 1]
    assert resolvable_gap(1, 1, power=0.5, comparisons=10**18) == pytest.approx(9.2, abs=0.1)
    assert resolvable_gap(1, 1, comparisons=np.int64(36)) == resolvable_gap(1, 1, comparisons=36)
    for many in (10**7, 10**15, 10**50):
        assert resolvable_gap(1, 1, freedom=many) == pytest.approx(resolvable_gap(1, 1), rel=1e-6)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 29, 30, 101, 1000, 2001])
@pytest.mark.parametrize("tail", [0.5, 0.4, 0.1, 0.025, 0.005, 1e-4, 1e-6])
def test_the_quantile_of_students_t_is_that_of_scipy(freedom, tail):
    from scipy.stats import t

    assert student_quantile(tail, freedom) == pytest.approx(t.isf(tail, freedom), rel=1e-8, abs=1e-12)


# ------------------------------------------------------------------------------ what training again changes


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
