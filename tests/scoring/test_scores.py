"""The formulas: the paper's example by hand, axioms as properties, the sign table; PHI and its blocks."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedmerit as fm
from fedmerit import SCORES, Reports, alpha, cos_model, ee, fp, influence, ioi, loo, normalise, surplus
from fedmerit.scoring.scores import from_blocks, mean_of_others, median_of_others, scores_of, sum_of_others
from fedmerit.scoring.types import Table
from fedmerit.scoring.uncertainty import compare_pairs
from games import exact, reports

EXAMPLE = Reports.from_table(Table([0, 0, 1, 1, 2, 2, 3, 3], ["A", "B", "C"]))
"""The paper's Example 2: A is a null player, B adds 1, C adds 2 (bit 0 = A)."""


def fractions(values):
    return [Fraction(value) for value in np.asarray(values).tolist()]


def ee_by_hand(r):
    """Definition 4, written as in the paper, on exact rationals."""
    n, v_m, v_0 = r.n, Fraction(r.grand), Fraction(r.empty)
    a, b = fractions(r.alone), fractions(r.without)
    beta = [sum(v_m - a[j] for j in range(n) if j != i) / Fraction((n - 1) ** 2) for i in range(n)]
    gamma = [sum(b[j] - v_0 for j in range(n) if j != i) / Fraction((n - 1) ** 2) for i in range(n)]
    return [(x + y) / 2 for x, y in zip(beta, gamma, strict=True)]


def alpha_by_hand(r):
    return [
        ((Fraction(r.grand) - b) + (a - Fraction(r.empty))) / 2
        for a, b in zip(fractions(r.alone), fractions(r.without), strict=True)
    ]


# --- the paper's null-player example ------------------------------------------------------------------------
# v(M0)=0, v(M)=3, alone=(0,1,2), without A = v({B,C}) = 3, without B = v({A,C}) = 2, without C = 1.
# alpha = (0,1,2), sum 3 = v(M), so FP = LOO = IOI = (0,1,2).
# r_j = (3 - alone_j) + (without_j - 0) = (6, 4, 2), T = 12; EE_i = (12 - r_i)/(2*12)*3 = (18, 24, 30)/24.


def test_the_papers_null_player_example():
    np.testing.assert_array_equal(ee(EXAMPLE).values, [3 / 4, 1, 5 / 4])
    for score in (fp, loo, ioi, alpha):
        np.testing.assert_array_equal(score(EXAMPLE).values, [0, 1, 2])
    assert {score(EXAMPLE).status for score in (fp, ee, loo)} == {"ok"}
    assert ee(EXAMPLE).ranking() == ("C", "B", "A")


@given(reports())
def test_scores_equal_the_definitions_on_exact_numbers(r):
    by_hand = alpha_by_hand(r)
    assert fractions(alpha(r).values) == by_hand
    assert fractions(loo(r).values) == [Fraction(r.grand) - b for b in fractions(r.without)]
    assert fractions(ioi(r).values) == [a - Fraction(r.empty) for a in fractions(r.alone)]
    np.testing.assert_allclose(ee(r).raw, [float(x) for x in ee_by_hand(r)], rtol=1e-15)


@given(reports())
def test_fp_and_ee_add_up_to_the_pot_and_surplus_to_the_gain(r):
    for score in (fp, ee):
        scores = score(r)
        scale = max(np.abs(scores.values).max(), 1)
        assert scores.values.sum() == pytest.approx(r.grand, abs=1e-9 * scale)
    assert surplus(r).values.sum() == pytest.approx(r.gain, abs=1e-9)


@given(reports(min_clients=3), st.sampled_from([fp, ee, surplus, alpha, loo, ioi]))
def test_equal_reports_get_equal_scores(r, score):
    alone, without = r.alone.copy(), r.without.copy()
    alone[1], without[1] = alone[0], without[0]
    scores = score(Reports(empty=r.empty, grand=r.grand, alone=alone, without=without))
    assert scores.values[0] == scores.values[1]
    assert scores.ranks()[0] == scores.ranks()[1]


def with_null_player(r):
    alone, without = r.alone.copy(), r.without.copy()
    alone[0], without[0] = r.empty, r.grand
    return Reports(empty=r.empty, grand=r.grand, alone=alone, without=without)


@given(reports())
def test_a_null_player_gets_nothing_from_fp_alpha_loo(r):
    r = with_null_player(r)
    assert alpha(r).values[0] == loo(r).values[0] == ioi(r).values[0] == 0
    if fp(r).status in ("ok", "reversed", "fallback"):
        assert fp(r).values[0] == 0


def test_the_null_player_axiom_fails_for_ee_and_surplus():
    assert ee(EXAMPLE).values[0] == 0.75
    # alone (0,1,2), without (6,5,4), v(M)=6: A is null, alpha sums to 3, the rest of 3 is shared equally
    r = Reports(empty=0, grand=6, alone=[0, 1, 2], without=[6, 5, 4])
    assert alpha(r).values[0] == 0
    assert surplus(r).values[0] == 1


@given(st.data(), st.sampled_from([alpha, surplus, loo, ioi]), exact, exact)
def test_linear_scores_are_linear(data, score, c, d):
    n = data.draw(st.integers(2, 5))
    r, q = (data.draw(reports(min_clients=n, max_clients=n)) for _ in range(2))
    mix = Reports(
        empty=c * r.empty + d * q.empty,
        grand=c * r.grand + d * q.grand,
        alone=c * r.alone + d * q.alone,
        without=c * r.without + d * q.without,
    )
    expected = c * score(r).values + d * score(q).values
    np.testing.assert_allclose(score(mix).values, expected, rtol=1e-12, atol=1e-9)


def test_fp_and_ee_are_not_linear():
    other = Reports(empty=0, grand=3, alone=[2, 1, 2], without=[3, 3, 1])
    both = Reports(empty=0, grand=6, alone=[2, 2, 4], without=[6, 5, 2])
    for score in (fp, ee):
        assert not np.allclose(score(both).values, score(EXAMPLE).values + score(other).values)


@given(reports(), st.data(), st.sampled_from(["mean", "median"]))
def test_raw_ee_of_i_ignores_report_i_bit_for_bit(r, data, combine):
    i = data.draw(st.integers(0, r.n - 1))
    lie = st.floats(-1e12, 1e12, allow_nan=False)
    alone, without = r.alone.copy(), r.without.copy()
    alone[i], without[i] = data.draw(lie), data.draw(lie)
    told = Reports(empty=r.empty, grand=r.grand, alone=alone, without=without)
    assert ee(told, combine=combine).raw[i] == ee(r, combine=combine).raw[i]


def test_but_the_share_and_the_rank_of_i_do_move_with_report_i():
    lie = Reports(empty=0, grand=3, alone=[3, 1, 2], without=[0, 2, 1])  # A: "I am everything"
    assert ee(lie).raw[0] == ee(EXAMPLE).raw[0]
    assert ee(lie).values[0] > ee(EXAMPLE).values[0]
    assert ee(EXAMPLE).ranking()[-1] == "A"
    assert ee(lie).ranking()[0] == "client-0"
    assert loo(lie).values[0] != loo(EXAMPLE).values[0]


@given(reports())
def test_fp_ee_and_alpha_are_one_ranking_and_one_normalised_vector_when_ok(r):
    a, f, e = alpha(r), fp(r), ee(r)
    order = sorted(range(r.n), key=lambda i: (-alpha_by_hand(r)[i], i))
    assert a.ranking() == tuple(r.clients[i] for i in order) == f.ranking() == e.ranking()
    if f.status == e.status == "ok":
        np.testing.assert_allclose(normalise(f.values), normalise(a.values), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(normalise(e.values), normalise(a.values), rtol=1e-6, atol=1e-9)


@given(reports())
def test_status_follows_the_sign_table(r):
    """P5: FP keeps the order iff v(M) * A > 0, EE iff v(M) * (N D - A) > 0 (exact arithmetic)."""
    v_m, gain = Fraction(r.grand), Fraction(r.grand) - Fraction(r.empty)
    total = sum(alpha_by_hand(r))
    for score, denominator in ((fp, total), (ee, r.n * gain - total)):
        status = score(r).status
        if v_m == 0:
            assert status == "undefined"
        elif denominator == 0:
            assert status in ("fallback", "undefined")
        else:
            assert status == ("ok" if v_m * denominator > 0 else "reversed")


def test_what_turns_signs_is_ranked_the_right_way_round_and_flagged():
    # negative cross-entropy: v(M0) = -2, v(M) = -1; C helps most. FP = alpha/A * (-1): reversed.
    r = Reports(empty=-2, grand=-1, alone=[-1.9, -1.8, -1.6], without=[-1.1, -1.2, -1.5], clients=list("ABC"))
    for scores in (fp(r), ee(r)):
        assert scores.status == "reversed"
        assert scores.ranking() == ("C", "B", "A")
        assert scores.values[2] < scores.values[0]
        assert "opposite signs" in scores.notes[0]

    # v fell from .6 to .5. A did the harm (LOO -.2), B and C little. D = -.1, A = -.15 in all.
    r = Reports(empty=0.6, grand=0.5, alone=[0.5, 0.6, 0.6], without=[0.7, 0.5, 0.5], clients=list("ABC"))
    assert fp(r).status == "reversed"
    assert fp(r).values[0] > fp(r).values[1]  # the letter of the definition pays the culprit
    assert fp(r).ranking() == alpha(r).ranking() == ("B", "C", "A")


def test_fp_falls_back_to_loo_and_then_to_an_equal_split():
    # LOO = (1, 1), IOI = (-1, -1): alpha sums to 0, LOO does not
    r = Reports(empty=1, grand=3, alone=[0, 0], without=[2, 2])
    assert fp(r).status == "fallback"
    np.testing.assert_array_equal(fp(r).values, [1.5, 1.5])
    assert fp(r).notes == ("FP: the sum of alpha over members is zero; computed from LOO alone",)
    # LOO = (1, 3), IOI = (-4, 0): shares follow LOO, the ranking follows alpha = (-1.5, 1.5)
    r = Reports(empty=4, grand=8, alone=[0, 4], without=[7, 5], clients=["A", "B"])
    np.testing.assert_array_equal(fp(r).values, [2, 6])
    assert fp(r).ranking() == ("B", "A")
    # nobody moved anything (and if alpha and LOO both sum to 0, so does IOI = 2 alpha - LOO)
    r = Reports(empty=2, grand=2, alone=[2, 2], without=[2, 2])
    assert fp(r).status == ee(r).status == "undefined"
    np.testing.assert_array_equal(fp(r).values, [1, 1])


def test_ee_falls_back_to_gamma_then_beta():
    # beta terms v(M)-alone = (-1, -1), gamma terms without-v(M0) = (1, 1): r sums to 0
    r = Reports(empty=0, grand=3, alone=[4, 4], without=[1, 1])
    assert ee(r).status == "fallback"
    assert ee(r).notes[-1].endswith("is zero; computed from gamma alone")
    # gamma = (1, -1) sums to 0, beta = (-1, 1): both zero -> equal split
    r = Reports(empty=0, grand=3, alone=[4, 2], without=[1, -1])
    assert ee(r).status == "undefined"
    np.testing.assert_array_equal(ee(r).values, [1.5, 1.5])


def test_rounding_noise_is_not_a_denominator():
    # On paper alpha = (0, 0): .3-.1 and .1-.3, .7-.5 and .5-.7; in floats the sum is about 1e-17
    r = Reports(empty=0.3, grand=0.7, alone=[0.1, 0.1], without=[0.5, 0.5])
    assert fp(r).status == "fallback"


@given(reports(min_clients=3), st.sampled_from(["mean", "median"]))
def test_combining_equals_the_slow_way(r, combine):
    said = 2 * (r.gain - alpha(r).values)

    slow = getattr(np, combine)
    expected = [slow(np.delete(said, i)) / (2 * (r.n - 1)) for i in range(r.n)]
    np.testing.assert_allclose(ee(r, combine=combine).raw, expected, atol=1e-12)


@given(reports(min_clients=5, max_clients=12))
def test_a_median_tells_at_most_three_groups_apart(r):
    assert len(np.unique(ee(r, combine="median").raw)) <= 3


@pytest.mark.parametrize("lie", [1e17, -1e17, 1e40])
def test_a_lie_that_is_not_counted_costs_no_precision(lie):
    # the liar is client 4; r of the honest = (6, 4, 2, 4), of the liar about -lie
    r = Reports(empty=0, grand=3, alone=[0, 1, 2, 1, lie], without=[3, 2, 1, 2, 2.5])
    outside = -1 if lie > 0 else 1  # the lie counts as the lowest or the highest of the words
    scores = ee(r, combine="median")
    assert scores.status == "ok"
    assert scores.values.sum() == pytest.approx(3)
    # about the liar 2, 4, 4, 6 are left; about client 0 the lie, 2, 4, 4
    about_0 = {-1: (2 + 4) / 2, 1: (4 + 4) / 2}[outside]
    assert scores.raw[[0, 4]].tolist() == [about_0 / 8, 4 / 8]
    # nor are the others' words about the liar lost in its own: 6, 4, 2, 4 of 16
    assert influence(r)[:, 4].tolist() == [6 / 16, 4 / 16, 2 / 16, 4 / 16, 0]


def test_influence_has_the_shape_and_sums_of_the_papers_table():
    rng = np.random.default_rng(0)
    r = Reports(empty=0.2, grand=0.9, alone=rng.uniform(0.2, 0.6, 6), without=rng.uniform(0.6, 0.9, 6))
    matrix = influence(r)
    assert matrix.shape == (6, 6)
    np.testing.assert_array_equal(np.diag(matrix), 0)
    np.testing.assert_allclose(matrix.sum(axis=0), 1)
    # row i is proportional to r_i: in every column the ratio of two rows is the same
    np.testing.assert_allclose(matrix[0, 2:] / matrix[1, 2:], matrix[0, 2] / matrix[1, 2])


def test_each_score_carries_the_standard_error_of_its_own_raw_vector():
    errors = {"se_loo": [0.1, 0.2], "se_ioi": [0.3, 0.4], "se_alpha": [0.5, 0.6]}
    r = Reports(empty=0, grand=2, alone=[0, 1], without=[1, 0], **errors, se_alpha_total=[0.7, 0.8])
    assert loo(r).stderr.tolist() == [0.1, 0.2]
    assert ioi(r).stderr.tolist() == [0.3, 0.4]
    assert alpha(r).stderr.tolist() == fp(r).stderr.tolist() == [0.5, 0.6]
    assert ee(r).stderr is surplus(r).stderr is None  # mixtures of several clients' errors


def test_a_silent_member_leaves_alpha_and_takes_fp_ee_and_surplus():
    r = Reports(empty=0, grand=3, alone=[0, 1], without=[3, 2], clients=["A", "B"], silent=["C"], round=2)
    assert alpha(r).values.tolist() == [0, 1]
    assert [name for name, score in SCORES.items() if not score.reported] == ["COS-MODEL", "PHI"]
    assert {name for name, scores in scores_of(r).items() if scores is None} == {"FP", "EE", "SURPLUS"}


@pytest.mark.parametrize("scale", [1, 1e-170, 1e90])
def test_a_reversal_is_seen_at_any_scale_and_ends_where_nobody_counts_as_zero(scale):
    """A product of two small numbers would be zero."""
    numbers = {"empty": 0.8, "grand": 0.79, "alone": [0.79, 0.78], "without": [0.8, 0.82]}
    r = Reports(**{name: np.multiply(number, scale) for name, number in numbers.items()}, se_alpha=[0.1, 0.1])
    assert (fp(r).status, fp(r, empty="zero").status) == ("reversed", "ok")
    assert alpha(r).stderr is not None
    assert alpha(r, empty="zero").stderr is None


@given(reports())
def test_with_nobody_worth_zero_the_scores_are_those_of_that_game(r):
    """Alpha grows by v(M0)/2 for everybody; FP, EE and influence are those of reports with empty = 0."""
    zero = Reports(empty=0, grand=r.grand, alone=r.alone, without=r.without, clients=r.clients)
    for score in (alpha, fp, ee):
        np.testing.assert_array_equal(score(r, empty="zero").values, score(zero).values)
        assert score(r, empty="zero").status == score(zero).status
    np.testing.assert_allclose(alpha(r, empty="zero").raw, alpha(r).raw + r.empty / 2, atol=1e-9)
    said = r.grand - r.alone + r.without
    if np.all(said > 0):
        np.testing.assert_array_equal(influence(r, empty="zero"), influence(zero))


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_papers_cosine_is_that_of_the_models(n, length, seed):
    rng = np.random.default_rng(seed)
    start, updates = rng.normal(size=length), rng.normal(size=(n, length))
    grand = start + updates.sum(0)
    by_hand = [(start + u) @ grand / np.linalg.norm(start + u) / np.linalg.norm(grand) for u in updates]
    np.testing.assert_allclose(cos_model(updates, start).values, by_hand, atol=1e-9)


# --- everybody else: right to the last bits, however large a lie somebody tells

tame = st.integers(-64, 64).map(lambda k: k / 8)
wild = st.builds(lambda x, k: x * 10.0**k, st.floats(-1, 1), st.integers(-20, 40))


def exactly(values, function):
    those = [Fraction(value) for value in values]
    return [function(sorted(those[:i] + those[i + 1 :])) for i in range(len(values))]


def median(others):
    return (others[(len(others) - 1) // 2] + others[len(others) // 2]) / 2


@given(values=st.lists(tame | wild, min_size=4, max_size=9))
@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        (sum_of_others, sum),
        (mean_of_others, lambda others: sum(others) / len(others)),
        (median_of_others, median),
    ],
)
def test_they_are_right_to_the_last_bits_of_the_answer(values, fast, slow):
    for got, expected in zip(fast(np.array(values)), exactly(values, slow), strict=True):
        assert abs(Fraction(float(got)) - expected) <= abs(expected) * Fraction(1, 2**51) + Fraction(
            1, 2**1070
        )


def test_equals_stay_equal():
    x = np.array([0.1, 0.7, 0.1, 0.3, 0.7, 0.1])
    for function in (sum_of_others, median_of_others):
        got = function(x)
        assert got[0] == got[2] == got[5]
        assert got[1] == got[4]


# ------------------------------------------------------------------------------------------------------ PHI


NUMBERS = st.floats(-100, 100).map(lambda x: round(x, 3))


@st.composite
def rounds(draw, blocks=None):
    """Updates (N, P) and a gradient (P,) or (B, P) that is not zero."""
    n, p = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    updates = draw(arrays(float, (n, p), elements=NUMBERS))
    gradient = draw(arrays(float, (p,) if blocks is None else (blocks, p), elements=NUMBERS))
    assume(np.abs(gradient if blocks is None else gradient.mean(0)).max() > 0.01)
    return updates, gradient


def phi(updates, gradient):
    return fm.aumann_shapley(updates, gradient).values


def close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-7)


@given(rounds())
def test_it_adds_up_to_the_sum_along_the_gradient(given_):
    updates, gradient = given_
    close(phi(updates, gradient).sum(), updates.sum(0) @ gradient)
    close(fm.aumann_shapley(updates, gradient).gain, updates.sum(0) @ gradient)


@given(rounds(), st.randoms())
def test_equals_are_treated_alike_and_the_order_does_not_matter(given_, random):
    updates, gradient = given_
    twice = phi([*updates, updates[0]], gradient)
    assert twice[0] == twice[-1]
    order = random.sample(range(len(updates)), len(updates))
    close(phi(updates[order], gradient), phi(updates, gradient)[order])


@given(rounds())
def test_who_changes_nothing_gets_nothing(given_):
    updates, gradient = given_
    assert phi([*updates, np.zeros(len(gradient))], gradient)[-1] == 0
    across = np.zeros(len(gradient) + 1)
    across[-1] = 5  # moves the model, but not along the gradient
    wider = np.pad(updates, [(0, 0), (0, 1)])
    assert phi([*wider, across], np.append(gradient, 0))[-1] == 0


@given(rounds(), st.data())
def test_it_is_linear_in_the_utility(given_, data):
    updates, gradient = given_
    other = data.draw(arrays(float, gradient.shape, elements=NUMBERS))
    assume(np.abs(other).max() > 0.01 and np.abs(2 * gradient + 3 * other).max() > 0.01)
    close(phi(updates, 2 * gradient + 3 * other), 2 * phi(updates, gradient) + 3 * phi(updates, other))


@given(rounds(), st.floats(-2, 2))
def test_splitting_a_member_into_two_changes_nothing(given_, part):
    updates, gradient = given_
    split = phi([*updates[1:], part * updates[0], (1 - part) * updates[0]], gradient)
    whole = phi(updates, gradient)
    close(split[-2:].sum(), whole[0])
    close(split[:-2], whole[1:])


@given(rounds(), st.data())
def test_on_a_quadratic_utility_it_is_alpha_and_the_shapley_value(given_, data):
    """v(x) = <a, x> + <x, H x> / 2. The mean gradient on the way from 0 to s is a + H s / 2.

    Alpha of U is [v(s) - v(s - U) + v(U)] / 2 = <a, U> + (<s, H U> - <U, H U> / 2 + <U, H U> / 2) / 2, which
    is <U, a + H s / 2>.
    """
    updates, a = given_
    assume(len(updates) > 1)
    half = data.draw(arrays(float, (len(a), len(a)), elements=st.floats(-1, 1)))
    hessian = half + half.T

    def v(x):
        return a @ x + x @ hessian @ x / 2

    gradient = a + hessian @ updates.sum(0) / 2
    assume(np.abs(gradient).max() > 1e-3)
    members = range(len(updates))
    table = fm.Table([v(sum((updates[i] for i in members if mask >> i & 1), np.zeros(len(a))))
                      for mask in range(1 << len(updates))])  # fmt: skip
    found, scale = phi(updates, gradient), 1e-10 * (1 + np.abs(table.values).max())
    np.testing.assert_allclose(found, fm.alpha(fm.Reports.from_table(table)).values, rtol=1e-9, atol=scale)
    np.testing.assert_allclose(found, fm.shapley(table).values, rtol=1e-9, atol=scale)


def test_on_a_cubic_utility_it_differs_from_alpha_in_the_third_order():
    """v(x) = x^3 and three equal updates u: phi is (3u)^3 / 3 = 9 u^3; alpha is (27 - 8 + 1) / 2 = 10 u^3."""
    u = 0.5
    gradient = (3 * u) ** 2  # the mean of 3 x^2 on [0, 3u]
    assert phi([[u]] * 3, [gradient]).tolist() == [9 * u**3] * 3
    table = fm.Table([(mask.bit_count() * u) ** 3 for mask in range(8)])
    assert fm.alpha(fm.Reports.from_table(table)).values.tolist() == [10 * u**3] * 3


@given(rounds(blocks=3), st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_blocks_are_weighted_by_their_sizes(given_, sizes):
    updates, gradient = given_
    weights = np.array(sizes) / sum(sizes)
    assume(np.abs(weights @ gradient).max() > 0.01)
    found = fm.aumann_shapley(updates, gradient, sizes=sizes)
    close(found.values, phi(updates, weights @ gradient))
    each = gradient @ updates.T
    close(found.blocks, each)
    away = each - found.values
    expected = sum(w * np.outer(row, row) for w, row in zip(weights, away, strict=True)) / 2
    np.testing.assert_allclose(found.covariance, expected, rtol=1e-9, atol=1e-4)
    np.testing.assert_allclose(found.stderr**2, np.diag(found.covariance), rtol=1e-9, atol=1e-12)


def test_the_standard_error_is_that_of_a_mean_over_blocks():
    """Blocks say 4 and 2 of A, 1 and 3 of B: deviations of 1, so sqrt(2) / sqrt(2) = 1; A + B is certain."""
    found = fm.aumann_shapley([[1, 0], [0, 1]], [[4, 1], [2, 3]], ["A", "B"])
    assert found.stderr.tolist() == [1, 1]
    assert found.covariance.tolist() == [[1, -1], [-1, 1]]
    assert compare_pairs(found).stderr[0, 1] == 2
    assert fm.aumann_shapley([[1, 0]], [4, 1]).stderr is None
    assert fm.aumann_shapley([[1, 0]], [[4, 1]]).covariance is None


def test_the_standard_error_covers_what_other_test_sets_say():
    """The errors of 400 test sets are as large as their standard errors say, within sampling error."""
    rng = np.random.default_rng(3)
    truth, updates = np.array([1.0, 2.0]), np.array([[1.0, 0.0], [1.0, 1.0]])
    samples = truth + rng.standard_normal((400, 200, 2))  # per-sample gradients
    each = [fm.aumann_shapley(updates, one.reshape(8, 25, 2).mean(1)) for one in samples]
    errors = np.array([one.values - updates @ truth for one in each])
    told = np.array([one.stderr for one in each])
    np.testing.assert_allclose((errors**2).mean(0), (told**2).mean(0), rtol=0.25)


def test_one_member_is_enough_and_a_long_update_is_summed_in_parts():
    rng = np.random.default_rng(0)
    update, gradient = rng.standard_normal((2, (1 << 20) + 7)).astype(np.float32)
    found = fm.aumann_shapley(update[None], gradient, ["A"])
    np.testing.assert_allclose(found.values, [update.astype(float) @ gradient.astype(float)], rtol=1e-9)


ONE = from_blocks([[4, 1], [2, 3]], [5, 5], ["A", "B"])
REPORTS = fm.Reports(empty=0, grand=1, alone=[0, 1], without=[1, 0])
TWO = from_blocks([[1, 5], [2, 3]], [5, 5], ["B", "C"])


def test_a_sum_over_rounds_keeps_the_blocks():
    """A: 3. B: 2 + 1.5, blocks 1 + 1 and 3 + 2, so half their distance is 1.5. C: 4, blocks 5 and 3."""
    total = fm.accumulate([ONE, TWO], score="PHI")
    assert total.as_dict() == {"A": 3, "B": 3.5, "C": 4}
    assert total.blocks.tolist() == [[4, 2, 5], [2, 5, 3]]
    np.testing.assert_allclose(total.stderr, [1, 1.5, 1])
    assert (total.gain, total.rounds, total.coverage.tolist()) == (10.5, 2, [0.5, 1, 0.5])
    assert [note.code for note in total.notes] == ["summed-zero", "summed-zero"]
    scaled = fm.accumulate([ONE, TWO], score="PHI", missing="own-mean")
    assert scaled.as_dict() == {"A": 6, "B": 3.5, "C": 8}
    np.testing.assert_allclose(scaled.stderr, [2, 1.5, 2])


def test_rounds_with_other_blocks_give_an_upper_bound():
    other = from_blocks([[4, 1], [2, 3], [3, 3]], [1, 1, 1], ["A", "B"])
    total = fm.accumulate([ONE, other], score="PHI")
    np.testing.assert_allclose(total.stderr, ONE.stderr + other.stderr)
    assert [note.code for note in total.notes] == ["bound-blocks"]
    assert fm.accumulate([ONE, fm.aumann_shapley([[1]], [2], ["A"])], score="PHI").stderr is None


@given(st.lists(rounds(blocks=4), min_size=1, max_size=3))
def test_the_standard_error_of_a_sum_is_at_most_the_sum_of_standard_errors(given_):
    each = [fm.aumann_shapley(*one) for one in given_]
    total = fm.accumulate(each, score="PHI")
    for name, error in zip(total.clients, total.stderr, strict=True):
        own = [dict(zip(one.clients, one.stderr, strict=True)).get(name, 0) for one in each]
        assert error <= sum(own) * (1 + 1e-9) + 1e-9
