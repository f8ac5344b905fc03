"""Values from a full table: published games, axioms, the definition; sampled ones; agreement with them."""

import math
import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedmerit.scoring.ground_truth import (
    agreement,
    banzhaf,
    multi_round,
    normalise,
    sampled_shapley,
    semivalue,
    shapley,
)
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.types import Reports, Scores, Table
from fedmerit.scoring.uncertainty import intervals
from games import shapley_by_permutations, tables, two_additive_tables


def game(n, v):
    return Table([v({i for i in range(n) if mask >> i & 1}) for mask in range(1 << n)])


def slow_semivalue(table, weights):
    """The definition in exact rationals, coalition by coalition."""
    v = [Fraction(x) for x in table.values.tolist()]
    out = []
    for i in range(table.n):
        without = [s for s in range(1 << table.n) if not s >> i & 1]
        out.append(sum((v[s | 1 << i] - v[s]) * Fraction(weights[s.bit_count()]) for s in without))
    return out


def slow_shapley(table):
    n = table.n
    return slow_semivalue(table, [Fraction(1, n * math.comb(n - 1, k)) for k in range(n)])


def test_glove_game():
    # One left glove (0), two right gloves (1, 2); a pair is worth 1. Client 0 completes a pair unless it
    # arrives first, which happens in 1 of 3 orders: 2/3. The rest is split by symmetry: 1/6 each.
    s = shapley(game(3, lambda m: float(0 in m and len(m) > 1)))
    assert s.values == pytest.approx([2 / 3, 1 / 6, 1 / 6], abs=1e-15)
    assert s.ranking() == ("client-0", "client-1", "client-2")
    # Banzhaf: 0 is decisive in {1}, {2}, {1,2} of 4 coalitions; 1 in {0} only.
    assert banzhaf(game(3, lambda m: float(0 in m and len(m) > 1))).values.tolist() == [0.75, 0.25, 0.25]


def test_airport_game():
    # Littlechild & Owen 1973: runway costs c = 1, 3, 6, 10; v(S) = -max cost. Each segment is shared by those
    # who need it: 1/4; + 2/3; + 3/2; + 4/1.
    cost = [1, 3, 6, 10]
    s = shapley(game(4, lambda m: -float(max((cost[i] for i in m), default=0))))
    expected = np.cumsum([1 / 4, 2 / 3, 3 / 2, 4])
    assert s.values == pytest.approx(-expected, abs=1e-14)
    assert s.gain == -10


def test_security_council():
    # 5 permanent members with a veto, 10 others, 4 of whom are needed (quota 39 with weights 7 and 1).
    # A temporary member is pivotal iff it comes 9th, after all 5 permanent and exactly 3 of the other 9:
    # C(9,3) 8! 6! / 15! = 84 * 8! * 6! / 15! = 4/2145. The permanent ones share the rest: (1 - 40/2145)/5.
    masks = np.arange(1 << 15)
    weight = np.where(np.arange(15) < 5, 7, 1)
    votes = ((masks[:, None] >> np.arange(15)) & 1) @ weight
    s = shapley(Table((votes >= 39).astype(float)))
    assert s.values[:5] == pytest.approx([421 / 2145] * 5, rel=1e-12)
    assert s.values[5:] == pytest.approx([4 / 2145] * 10, rel=1e-12)
    assert len(set(s.ranks().tolist())) == 2  # equals come out equal up to rounding


@given(tables(max_clients=6))
def test_shapley_is_the_mean_over_permutations(t):
    assert shapley(t).values == pytest.approx(shapley_by_permutations(t), abs=1e-12)


@given(tables(max_clients=5), st.data())
def test_semivalue_is_the_definition(t, data):
    weights = data.draw(st.lists(st.integers(0, 64).map(lambda k: k / 64), min_size=t.n, max_size=t.n))
    # multiples of 1/64 everywhere, so float arithmetic is exact
    assert semivalue(t, weights).values.tolist() == [float(x) for x in slow_semivalue(t, weights)]


@given(tables(max_clients=5))
def test_banzhaf_is_the_definition(t):
    expected = slow_semivalue(t, [Fraction(1, 2 ** (t.n - 1))] * t.n)
    assert banzhaf(t).values.tolist() == [float(x) for x in expected]
    assert banzhaf(t).score == "BANZHAF"


@given(tables(max_clients=5))
def test_order_is_that_of_exact_rationals(t):
    truth = slow_shapley(t)
    assert sum(truth) == Fraction(t.gain)  # efficiency, exactly
    expected = [1 + sum(other > own for other in truth) for own in truth]
    assert shapley(t).ranks().tolist() == expected


@given(two_additive_tables())
def test_alpha_is_shapley_when_at_most_pairs_interact(t):
    found = alpha(Reports.from_table(t))
    assert shapley(t).values == pytest.approx(found.values, abs=1e-10)
    assert found.values.sum() == pytest.approx(t.gain, abs=1e-9)


def test_alpha_is_not_shapley_with_a_triple():
    # v = 1 iff all three: Shapley 1/3 each, alpha = (1 + 0)/2.
    t = Table([0, 0, 0, 0, 0, 0, 0, 1])
    assert shapley(t).values == pytest.approx([1 / 3] * 3)
    assert semivalue(t, [0.5, 0, 0.5]).values.tolist() == [0.5, 0.5, 0.5]


def test_weights_that_are_no_semivalue_are_noted():
    t = Table([0, 1, 2, 5])
    assert semivalue(t, [0.5, 0.5]).notes == ()
    assert semivalue(t, [1, 1]).values.tolist() == [4, 6]
    assert semivalue(t, [1, 1]).notes == (
        "the weights of all coalitions sum to 2, not 1: this is a multiple of a semivalue",
    )


def test_multi_round_is_the_mean_and_matches_by_name():
    first, second = Table([0, 1, 2, 5], ["A", "B"]), Table([1, 1, 3, 4], ["B", "A"])
    # second: bit 0 is B. B: (0 + 1)/2 = .5, A: (2 + 3)/2 = 2.5. A: (2 + 2.5)/2, B: (3 + .5)/2.
    s = multi_round([first, second])
    assert (s.score, s.as_dict(), s.gain, s.rounds) == ("MR-SV", {"A": 2.25, "B": 1.75}, 4.0, 2)
    assert s.raw.tolist() == s.values.tolist()
    assert multi_round(iter([first])).as_dict() == shapley(first).as_dict() == {"A": 2, "B": 3}
    assert (shapley(first).score, shapley(first).gain) == ("SV", 5)
    assert shapley(Table([0.25, 0.75])).values.tolist() == [0.5]


def test_twenty_clients_take_no_step_for_each_coalition_and_little_memory():
    size = np.zeros(1 << 20)
    for bit in range(20):
        size[1 << bit : 2 << bit] = size[: 1 << bit] + 1
    tracemalloc.start()  # sees numpy's buffers too
    try:
        table = Table(np.sqrt(size))
        before = time.process_time()
        values = shapley(table).values
        took = time.process_time() - before
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert values == pytest.approx(math.sqrt(20) / 20, abs=1e-14)  # all alike
    assert took < 20  # coalition by coalition it would be minutes
    assert peak < 100e6


# ----------------------------------------------------------------------------------- sampled Shapley values


class Random:
    """A game with pairwise synergies and a cubic bend; counts how often it is asked."""

    def __init__(self, n, seed=0):
        rng = np.random.default_rng(seed)
        self.own, self.pair, self.asked = rng.random(n), rng.standard_normal((n, n)) / n, []

    def __call__(self, mask):
        self.asked.append(mask)
        inside = (mask >> np.arange(len(self.own)) & 1).astype(float)
        total = inside @ self.own + inside @ self.pair @ inside
        return float(total + 0.05 * total**3)

    def exact(self):
        n = len(self.own)
        return shapley(Table(np.array([self(mask) for mask in range(1 << n)]))).raw


def test_it_agrees_with_the_exact_value_within_its_error():
    exact = Random(12).exact()
    got = sampled_shapley(Random(12), 12, budget=2000)
    assert got.stderr.any()
    assert (np.abs(got.raw - exact) < 4 * got.stderr).all()
    assert got.raw.sum() == pytest.approx(got.gain)


def test_its_intervals_cover():
    game = Random(10)
    values = [game(mask) for mask in range(1 << 10)]
    exact = shapley(Table(values)).raw
    hits = []
    for seed in range(200):
        got = sampled_shapley(values.__getitem__, 10, budget=190, seed=seed)
        assert 9 <= got.freedom <= 13
        low, high = intervals(got, level=0.9).T
        hits.append((low <= exact) & (exact <= high))
    # 2,000 intervals, correlated within a run; 90 % is asked for
    assert 0.86 < np.mean(hits) < 0.95


def pairs_by_hand(game, n, pairs, seed):
    """What each client adds on arrival, one row a pair, from the same random orders."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(pairs):
        order = rng.permutation(n).tolist()
        row = np.zeros(n)
        for one in (order, order[::-1]):
            for place, i in enumerate(one):
                before = sum(1 << k for k in one[:place])
                row[i] += (game(before | 1 << i) - game(before)) / 2
        rows.append(row)
    return np.array(rows)


def test_the_standard_error_is_that_of_the_mean_over_pairs():
    from scipy.stats import t

    got = sampled_shapley(Random(12), 12, budget=270, seed=5)
    pairs = got.freedom + 1
    assert 10 <= pairs < 20
    rows = pairs_by_hand(Random(12), 12, pairs, seed=5)
    np.testing.assert_allclose(got.raw, rows.mean(axis=0))
    np.testing.assert_allclose(got.stderr, rows.std(axis=0, ddof=1) / np.sqrt(pairs))
    low, high = intervals(got, level=0.9).T
    np.testing.assert_allclose(high - low, 2 * t.ppf(0.95, pairs - 1) * got.stderr)


def test_below_ten_pairs_there_is_a_value_and_no_standard_error():
    few, nearly, enough = (sampled_shapley(Random(18), 18, budget=budget) for budget in (70, 305, 330))
    for scores, pairs in ((few, 2), (nearly, 9)):
        assert scores.stderr is None
        assert scores.notes == (f"no standard error from {pairs} pairs of orders, 10 are needed",)
    np.testing.assert_allclose(few.raw, pairs_by_hand(Random(18), 18, 2, seed=0).mean(axis=0))
    assert (enough.freedom, enough.notes) == (9, ())
    assert enough.stderr is not None


def vote(mask):
    """Nine votes: passed by five, and not without client 0."""
    return float(mask & 1 and mask.bit_count() >= 5)


@pytest.mark.parametrize(
    ("game", "n", "shares"),  # the numbers of docs/scores/shapley.md
    [(Random(9), 9, {2: 0.87, 10: 0.94}), (vote, 9, {10: 0.69, 20: 0.91})],
    ids=["smooth", "vote"],
)
def test_what_student_intervals_of_few_pairs_are_worth(game, n, shares):
    from scipy.stats import t

    values = [game(mask) for mask in range(1 << n)]
    exact = shapley(Table(values)).raw
    rows = pairs_by_hand(values.__getitem__, n, 4000, seed=0)
    for k, expected in shares.items():
        groups = rows[: 4000 // k * k].reshape(-1, k, n)
        half = t.ppf(0.975, k - 1) * groups.std(axis=1, ddof=1) / np.sqrt(k)
        held = np.abs(groups.mean(axis=1) - exact) <= half + 1e-12
        assert held.mean() == pytest.approx(expected, abs=0.03)


def test_reversed_orders_make_pairwise_games_exact_at_once():
    # an order and its reverse together see every synergy from both of its sides
    rng = np.random.default_rng(1)
    own, pair = rng.random(20), rng.random((20, 20))

    def game(mask):
        inside = (mask >> np.arange(20) & 1).astype(float)
        return float(inside @ own + inside @ pair @ inside)

    got = sampled_shapley(game, 20, budget=100)
    expected = own + np.diag(pair) + (pair.sum(0) + pair.sum(1) - 2 * np.diag(pair)) / 2
    np.testing.assert_allclose(got.raw, expected)


def test_nothing_is_asked_twice_and_the_budget_holds():
    game = Random(18)
    sampled_shapley(game, 18, budget=500)
    assert 400 < len(game.asked) == len(set(game.asked)) <= 500


@pytest.mark.parametrize(("n", "budget"), [(4, 16), (3, 100)])
def test_when_all_coalitions_are_known_it_is_exact(n, budget):
    names = ["A", "B", "C", "D"][:n]
    game = Random(n)
    got = sampled_shapley(game, names, budget=budget)
    np.testing.assert_allclose(got.raw, Random(n).exact())
    assert (len(game.asked), got.clients) == (2**n, tuple(names))
    assert intervals(got)[:, 0].tolist() == got.raw.tolist()


def test_a_seed_gives_the_same_numbers_and_numbers_of_numpy_are_numbers():
    kinds = [(18, 300, 1), map(np.int64, (18, 300, 1)), (18, 300, 2)]
    runs = [sampled_shapley(Random(18), n, budget=budget, seed=seed) for n, budget, seed in kinds]
    values = [found.raw.tolist() for found in runs]
    assert values[0] == values[1] != values[2]


# --------------------------------------------------------------------------------- agreement of two vectors


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


def test_published_values_are_compared_not_raw_ones():
    reversed_ = scored([3, 2, 1], raw=[1, 2, 3], status="reversed")
    assert agreement(reversed_, [1, 2, 3]).spearman == -1.0
    assert agreement(reversed_.raw, [1, 2, 3]).spearman == 1.0
