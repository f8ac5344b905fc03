"""PHI: the axioms of Aumann and Shapley, its relation to alpha, its standard errors, its sums over rounds."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedmerit as fm
from fedmerit.scoring.scores import from_blocks
from fedmerit.scoring.uncertainty import compare_pairs

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
