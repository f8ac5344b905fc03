"""Uncertainty: formulas by hand, Holm and max-T against slow versions, coverage by seeded simulation."""

import math
import time
from decimal import Decimal
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.errors import InputError, ReportError
from fedmerit.scoring.types import Scores
from fedmerit.scoring.uncertainty import (
    compare_pairs,
    indistinguishable,
    intervals,
    pair_errors,
    rank_intervals,
    resolvable_gap,
    samples_needed,
    student_quantile,
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


# --- intervals and pairs -------------------------------------------------------------------------------


def test_z_interval_by_hand():
    s = scored([1.0, 3.0], [0.5, 0.0])
    assert intervals(s) == pytest.approx(np.array([[1 - 1.959964 / 2, 1 + 1.959964 / 2], [3, 3]]), abs=1e-6)
    assert intervals(s, level=0.9)[0] == pytest.approx([1 - 1.644854 / 2, 1 + 1.644854 / 2], abs=1e-6)


def test_intervals_are_about_the_raw_vector():
    s = Scores(
        score="FP", clients=("A", "B"), values=[9, 1], raw=[1, 9], gain=1, status="reversed", stderr=[1, 1]
    )
    assert intervals(s).mean(axis=1).tolist() == [1, 9]


def test_pair_errors_by_hand():
    s = scored([1, 2], [3, 4])
    assert pair_errors(s).tolist() == [[0, 7], [7, 0]]
    assert pair_errors(s, errors="independent").tolist() == [[0, 5], [5, 0]]
    # c = 6: 9 + 16 - 12 = 13
    assert pair_errors(s, covariance=[[9, 6], [6, 16]]) == pytest.approx(np.sqrt([[0, 13], [13, 0]]))
    # fully correlated: |3 - 4|; fully anti-correlated: 3 + 4, the conservative bound is reached
    assert pair_errors(s, covariance=[[9, 12], [12, 16]])[0, 1] == pytest.approx(1)
    assert pair_errors(s, covariance=[[9, -12], [-12, 16]])[0, 1] == pytest.approx(7)
    # the same error in both cancels
    assert pair_errors(s, covariance=[[0.1 + 0.2, 0.3], [0.3, 0.3]])[0, 1] == 0.0


@given(noisy_scores(), st.floats(-1, 1))
def test_conservative_errors_bound_every_correlation(s, correlation):
    own = np.outer(s.stderr, s.stderr) * correlation
    np.fill_diagonal(own, s.stderr**2)
    if np.linalg.eigvalsh(own)[0] >= 0:
        assert (pair_errors(s, covariance=own) <= pair_errors(s) + 1e-9).all()


def slow_holm(s, level, errors):
    """Holm's step-down, one ordered pair after the other."""
    alpha, n = 1 - level, s.n
    p = {}
    for i in range(n):
        for j in range(n):
            if i != j:
                d = s.raw[i] - s.raw[j]
                se = (
                    s.stderr[i] + s.stderr[j]
                    if errors == "conservative"
                    else math.hypot(s.stderr[i], s.stderr[j])
                )
                p[i, j] = 1 - NormalDist().cdf(d / se) if se else float(d <= 0)
    better = np.zeros((n, n), bool)
    for k, pair in enumerate(sorted(p, key=p.get)):
        if p[pair] > alpha / (len(p) - k):
            break
        better[pair] = True
    return better


@given(
    noisy_scores(), st.sampled_from([0.5, 0.9, 0.95, 0.999]), st.sampled_from(["conservative", "independent"])
)
def test_pairs_are_those_of_holm(s, level, errors):
    assert (
        compare_pairs(s, level=level, errors=errors).better.tolist() == slow_holm(s, level, errors).tolist()
    )


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


def test_single_tests_find_more():
    s = scored([4.2, 0, 0.1], [1, 1, 1])  # 4.2 > 2 * 1.96, but not 2 * 2.394
    assert compare_pairs(s, simultaneous=False).better.tolist()[0] == [False, True, True]
    assert not compare_pairs(s).better.any()


def test_without_error_every_difference_counts_but_rounding():
    s = scored([0.3, 0.1 + 0.2, 0.5], [0, 0, 0])
    assert compare_pairs(s).better.tolist() == [[False] * 3, [False] * 3, [True, True, False]]
    assert rank_intervals(s).tolist() == [[2, 3], [2, 3], [1, 1]]
    assert compare_pairs(s, covariance=np.zeros((3, 3))).better.sum() == 2


def test_one_huge_score_ties_nobody_else():
    # alpha = (.35, .1, .2, -5e12)
    s = scored([0.35, 0.1, 0.2, -5e12], [0.001, 0.001, 0.001, 1e11])
    expected = [[1, 1], [3, 3], [2, 2], [4, 4]]
    assert rank_intervals(s).tolist() == rank_intervals(s, compare_pairs(s)).tolist() == expected


# --- max-T ---------------------------------------------------------------------------------------------


def test_max_t_does_not_hang_on_the_order_of_clients():
    root, raw, order = np.random.default_rng(0).normal(size=(4, 4)), np.array([1.0, 2, 2, 3]), [2, 0, 3, 1]
    known, names = root @ root.T, tuple("ABCD"[i] for i in order)
    one = compare_pairs(scored(raw, clients=tuple("ABCD")), covariance=known, draws=1000)
    other = compare_pairs(
        scored(raw[order], clients=names), covariance=known[np.ix_(order, order)], draws=1000
    )
    assert one.critical == other.critical


def test_max_t_critical_values():
    # Two clients: one difference, so the plain two-sided quantile.
    s = scored([0, 0], [1, 1])
    critical = compare_pairs(s, covariance=np.eye(2), draws=100_000).critical
    assert critical == pytest.approx(1.96, abs=0.02)
    # Nine independent clients, equal errors: the studentised range, q(.95; 9, inf) / sqrt 2 = 4.387/1.414.
    s = scored([0] * 9, [1] * 9)
    critical = compare_pairs(s, covariance=np.eye(9), draws=40_000).critical
    assert critical == pytest.approx(4.387 / math.sqrt(2), abs=0.03)
    assert critical == compare_pairs(s, covariance=np.eye(9), draws=40_000).critical  # seeded
    assert critical != compare_pairs(s, covariance=np.eye(9), draws=40_000, seed=1).critical


def test_correlation_sharpens():
    # Errors that go together cancel in differences: 1 - .99 of the variance is left.
    s = scored([0.5, 0.0, -0.5], [1, 1, 1])
    cov = 0.01 * np.eye(3) + 0.99
    assert compare_pairs(s, covariance=cov).better.tolist()[0] == [False, True, True]
    assert not compare_pairs(s, errors="independent").better.any()
    assert rank_intervals(s, compare_pairs(s, covariance=cov)).tolist() == [[1, 1], [2, 2], [3, 3]]


# --- ranks and groups ----------------------------------------------------------------------------------


def test_rank_intervals_by_hand():
    s = scored([10, 4.6, 0, 4.5], [1, 1, 1, 1], ("top", "mid", "low", "mid2"))
    # z(1 - .05/12) = 2.638: 10 beats all, by 5.4 > 5.28. Then z(1 - .05/9) = 2.539: 4.6 - 0 < 5.08.
    assert rank_intervals(s).tolist() == [[1, 1], [2, 4], [2, 4], [2, 4]]
    assert indistinguishable(s) == (("top",), ("mid", "mid2", "low"))


@given(noisy_scores(), st.sampled_from([0.8, 0.95]))
def test_sorting_gives_the_same_ranks_as_all_pairs(s, level):
    assert (
        rank_intervals(s, level=level).tolist() == rank_intervals(s, compare_pairs(s, level=level)).tolist()
    )


@given(noisy_scores())
def test_rank_intervals_hold_the_observed_ranks(s):
    low, high = rank_intervals(s).T
    assert (low >= 1).all()
    assert (high <= s.n).all()
    ranks = s.ranks()
    assert (low <= ranks).all()
    assert (ranks <= high).all()


@given(noisy_scores(), st.sampled_from(["conservative", "independent"]))
def test_two_are_in_a_group_together_just_if_they_are_not_apart(s, errors):
    pairs = compare_pairs(s, errors=errors)
    groups = indistinguishable(s, pairs)
    apart = pairs.better | pairs.better.T
    for i, one in enumerate(s.clients):
        for j, other in enumerate(s.clients):
            assert any({one, other} <= set(group) for group in groups) == (not apart[i, j])
    best = {name for name, low in zip(s.clients, rank_intervals(s, pairs)[:, 0], strict=True) if low == 1}
    assert set(groups[0]) == best
    for group in groups:
        assert list(group) == [name for name in s.ranking() if name in group]


def test_a_large_error_reaches_past_a_small_one():
    # .300 and .250 are apart by .05 > 2.394 (.005 + .005); .245 +- .05 is apart from neither
    s = scored([0.30, 0.25, 0.245], [0.005, 0.005, 0.05])
    assert compare_pairs(s).better.tolist() == [[False, True, False], [False] * 3, [False] * 3]
    assert indistinguishable(s) == (("A", "C"), ("B", "C"))


def test_groups_may_overlap():
    s = scored([0, 3, 6], [1, 1, 1])
    assert indistinguishable(s) == (("C", "B"), ("B", "A"))
    assert indistinguishable(s, compare_pairs(s, simultaneous=False, level=0.5)) == (("C",), ("B",), ("A",))


def test_pairs_of_other_clients_are_refused():
    pairs = compare_pairs(scored([1, 2], [1, 1]))
    for function in (rank_intervals, indistinguishable):
        with pytest.raises(
            ReportError, match=r"pairs are about the clients \('A', 'B'\), scores about \('X', 'Y'\)"
        ):
            function(scored([1, 2], [1, 1], ("X", "Y")), pairs)


def test_ten_thousand_clients():
    generator = np.random.default_rng(0)
    raw = generator.normal(size=10_000)
    s = scored(raw, np.full(10_000, 0.05), tuple(f"c{i}" for i in range(10_000)))
    start = time.process_time()
    ranks = rank_intervals(s)
    assert time.process_time() - start < 1
    assert (ranks[:, 1] - ranks[:, 0]).mean() < 5000
    assert (ranks[:, 0] <= s.ranks()).all()


# --- coverage ------------------------------------------------------------------------------------------

TRUTH = np.array([-0.5, 0.0, 0.0, 0.4, 0.8, 0.8, 1.5])


def simulate(covariance, repeats, seed):
    generator = np.random.default_rng(seed)
    return TRUTH + generator.multivariate_normal(np.zeros(TRUTH.size), covariance, size=repeats)


def covered(raw, stderr, **options):
    """Whether every true rank, ties included, lies in its interval."""
    s = scored(raw, stderr)
    low, high = rank_intervals(s, compare_pairs(s, **options)).T
    best = np.array([1 + (own < TRUTH).sum() for own in TRUTH])
    worst = np.array([(own <= TRUTH).sum() for own in TRUTH])
    return bool((low <= best).all() and (high >= worst).all())


def test_z_intervals_cover_as_often_as_they_say():
    x = simulate(np.eye(7) * 0.04, 1500, seed=1)
    inside = [
        (
            (intervals(scored(raw, [0.2] * 7))[:, 0] <= TRUTH)
            & (intervals(scored(raw, [0.2] * 7))[:, 1] >= TRUTH)
        )
        for raw in x
    ]
    # 10,500 intervals: standard error .002
    assert np.mean(inside) == pytest.approx(0.95, abs=0.008)


@pytest.mark.parametrize("correlation", [-0.15, 0.0, 0.6])
def test_rank_intervals_cover_simultaneously(correlation):
    cov = 0.04 * ((1 - correlation) * np.eye(7) + correlation)
    draws = simulate(cov, 400, seed=2)
    conservative = np.mean([covered(raw, [0.2] * 7) for raw in draws])
    assert conservative >= 0.99
    if correlation >= 0:
        assert np.mean([covered(raw, [0.2] * 7, errors="independent") for raw in draws]) >= 0.93


def test_max_t_covers_and_is_not_needlessly_wide():
    # All equal: a rank interval is right iff nobody is told apart, so max-T covers with just 95 %.
    generator = np.random.default_rng(5)
    cov = 0.04 * (0.7 * np.eye(6) + 0.3)
    raws = generator.multivariate_normal(np.zeros(6), cov, size=4000)
    critical = compare_pairs(scored(raws[0], [0.2] * 6), covariance=cov, draws=40_000).critical
    largest = (raws.max(axis=1) - raws.min(axis=1)) / math.sqrt(2 * 0.04 * 0.7)
    assert np.mean(largest <= critical) == pytest.approx(0.95, abs=0.012)  # standard error .0035


# --- planning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disagreement", "gap", "expected"),
    [
        (0.01, 0.001, 78e3),
        (0.02, 0.002, 39e3),
        (0.05, 0.005, 16e3),
        (0.05, 0.01, 3.9e3),
        (0.01, 0.005, 3.1e3),
    ],
)
def test_samples_needed_for_loo_with_accuracy(disagreement, gap, expected):
    # 7.85 (d - gap^2) / gap^2
    needed = samples_needed(gap, math.sqrt(disagreement - gap**2))
    assert needed == pytest.approx(expected, rel=0.02)


def test_samples_needed_by_hand():
    # (1.959964 + 0.841621)^2 = 7.84888
    assert samples_needed(1, 1) == 8
    assert samples_needed(0.01, 1) == 78489
    assert samples_needed(0.01, 1, power=0.5) == 38415  # z(.5) = 0: 1.959964^2
    # Bonferroni over 36 pairs: z(1 - .05/72) = 3.19753
    assert samples_needed(0.01, 1, comparisons=36) == pytest.approx(
        (z(1 - 0.05 / 72) + z(0.8)) ** 2 * 1e4, abs=1
    )


@given(
    st.integers(10, 10**6),
    st.floats(0.01, 10),
    st.floats(0.5, 0.99),
    st.floats(0.6, 0.999),
    st.integers(1, 99),
)
def test_gap_and_samples_are_inverse(m, sd, power, level, comparisons):
    options = {"power": power, "level": level, "comparisons": comparisons}
    gap = resolvable_gap(m, sd, **options)
    assert abs(samples_needed(gap, sd, **options) - m) <= 1


def test_power_is_what_was_asked_for():
    gap, sd = 0.5, 2.0
    m = samples_needed(gap, sd)
    means = np.random.default_rng(4).normal(gap, sd / math.sqrt(m), size=20_000)
    assert np.mean(means / (sd / math.sqrt(m)) > z(0.975)) == pytest.approx(0.8, abs=0.01)


# --- bad input -----------------------------------------------------------------------------------------

GOOD = scored([1, 2], [1, 1])


@pytest.mark.parametrize(
    "function", [intervals, pair_errors, compare_pairs, rank_intervals, indistinguishable]
)
def test_no_standard_errors(function):
    with pytest.raises(ReportError, match="ALPHA carries no standard errors"):
        function(scored([1, 2]))
    with pytest.raises(ReportError, match="expected Scores, got list"):
        function([1, 2])


@pytest.mark.parametrize("level", [0, 1, -0.5, 95, math.nan])
def test_bad_level(level):
    for function in (intervals, compare_pairs, rank_intervals):
        with pytest.raises(InputError, match=f"level must lie between 0 and 1, got {level}"):
            function(GOOD, level=level)
    with pytest.raises(InputError, match="level must lie between 0 and 1"):
        samples_needed(1, 1, level=level)


@pytest.mark.parametrize(
    ("covariance", "message"),
    [
        ([[1, 0, 0]], r"expected shape \(2, 2\), got \(1, 3\)"),
        ([[1, math.nan], [0, 1]], "every entry must be a finite number"),
        ([[1, 0.5], [0.2, 1]], "must be symmetric"),
        ([[1, 2], [2, 1]], "positive semi-definite"),
        ([["a", "b"], ["c", "d"]], "covariance: expected a number, got 'a'"),
        ([["1", "0"], ["0", "1"]], "covariance: expected a number, got '1'"),
        (np.eye(2) * 1j, "covariance: expected numbers, got an array of complex128"),
        (np.eye(2) * 1e101, r"every entry must be a finite number, at most 1e\+100"),
    ],
)
def test_bad_covariance(covariance, message):
    with pytest.raises(ReportError, match=message):
        compare_pairs(GOOD, covariance=covariance)


def test_other_bad_arguments():
    with pytest.raises(InputError, match="errors must be 'conservative' or 'independent', got 'none'"):
        pair_errors(GOOD, errors="none")
    with pytest.raises(InputError, match="draws must be a whole number of at least 100, got 5"):
        compare_pairs(GOOD, covariance=np.eye(2), draws=5)
    with pytest.raises(InputError, match="seed must be a whole number of at least 0, got -1"):
        compare_pairs(GOOD, covariance=np.eye(2), seed=-1)
    for name, call in {
        "gap": lambda bad: samples_needed(bad, 1),
        "sd": lambda bad: samples_needed(1, bad),
        "samples": lambda bad: resolvable_gap(bad, 1),
    }.items():
        for bad in (0, -1, math.nan, math.inf):
            with pytest.raises(InputError, match=f"{name} must be a finite number above 0, got {bad}"):
                call(bad)
    with pytest.raises(InputError, match=r"power must lie in \[0.5, 1\), got 1"):
        samples_needed(1, 1, power=1)
    for bad in (0, math.nan, 1.5, "x", True, 10**400):
        with pytest.raises(InputError, match="comparisons must be a whole number of at least 1, got"):
            resolvable_gap(1, 1, comparisons=bad)
    for bad in ("x", None, 1j, [0.9], object(), Decimal("nan"), 10**400):
        with pytest.raises(InputError, match="gap must be a finite number above 0, got"):
            samples_needed(bad, 1)
        with pytest.raises(InputError, match="level must lie between 0 and 1, got"):
            intervals(GOOD, level=bad)
        with pytest.raises(InputError, match=r"power must lie in \[0.5, 1\), got"):
            samples_needed(1, 1, power=bad)
    with pytest.raises(InputError, match="gap 1e-160 is too small beside sd 1: more than 1e30 samples"):
        samples_needed(1e-160, 1.0)


def test_tails_too_thin_for_one_minus_them():
    # P(Z > 8.2923) = 5.55e-17, half of what is left of the largest level below 1; and 1e-18 of .025
    level = math.nextafter(1, 0)
    assert intervals(scored([0.0, 0.0], [1, 1]), level=level)[0, 1] == pytest.approx(8.2924, abs=1e-3)
    assert compare_pairs(scored([17.0, 0.0], [1, 1]), level=level).better[0, 1]
    assert resolvable_gap(1, 1, power=0.5, comparisons=10**18) == pytest.approx(9.2, abs=0.1)
    assert resolvable_gap(1, 1, comparisons=np.int64(36)) == resolvable_gap(1, 1, comparisons=36)


def test_very_many_degrees_of_freedom_are_as_good_as_endless_ones():
    for many in (10**7, 10**15, 10**50):
        assert resolvable_gap(1, 1, freedom=many) == pytest.approx(resolvable_gap(1, 1), rel=1e-6)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 9, 10, 29, 30, 101, 1000, 2001])
@pytest.mark.parametrize("tail", [0.5, 0.4, 0.1, 0.025, 0.005, 1e-4, 1e-6])
def test_the_quantile_of_students_t_is_that_of_scipy(freedom, tail):
    from scipy.stats import t

    assert student_quantile(tail, freedom) == pytest.approx(t.isf(tail, freedom), rel=1e-8, abs=1e-12)
