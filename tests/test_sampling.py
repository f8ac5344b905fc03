"""Sampled Shapley values: right on average, honest about their error, frugal."""

from __future__ import annotations

import numpy as np
import pytest

from fedmerit.errors import InputError, ReportError
from fedmerit.scoring.ground_truth import sampled_shapley, shapley
from fedmerit.scoring.types import Table


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
    got = sampled_shapley(Random(12), 12, tolerance=0.05)
    assert got.stopped == "tolerance"
    assert got.scores.stderr.max() <= 0.05
    assert np.abs(got.scores.raw - exact).max() < 4 * 0.05
    assert got.scores.raw.sum() == pytest.approx(got.scores.gain)


def test_its_intervals_cover():
    game = Random(10)
    values = [game(mask) for mask in range(1 << 10)]
    exact = shapley(Table(values)).raw
    hits = []
    for seed in range(200):
        got = sampled_shapley(values.__getitem__, 10, budget=190, seed=seed)
        assert got.stopped == "budget"
        assert 20 <= got.orders <= 28
        low, high = got.interval(level=0.9).T
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
    pairs = got.orders // 2
    assert 10 <= pairs < 20
    rows = pairs_by_hand(Random(12), 12, pairs, seed=5)
    np.testing.assert_allclose(got.scores.raw, rows.mean(axis=0))
    np.testing.assert_allclose(got.scores.stderr, rows.std(axis=0, ddof=1) / np.sqrt(pairs))
    low, high = got.interval(level=0.9).T
    np.testing.assert_allclose(high - low, 2 * t.ppf(0.95, pairs - 1) * got.scores.stderr)


def test_below_ten_pairs_there_is_a_value_and_no_standard_error():
    few, nearly, enough = (sampled_shapley(Random(18), 18, budget=budget) for budget in (70, 305, 330))
    assert (few.orders, nearly.orders, enough.orders) == (4, 18, 20)
    assert nearly.scores.stderr is None
    assert few.scores.stderr is None
    assert few.scores.notes == ("no standard error from 2 pairs of orders, 10 are needed",)
    np.testing.assert_allclose(few.scores.raw, pairs_by_hand(Random(18), 18, 2, seed=0).mean(axis=0))
    with pytest.raises(InputError, match="an interval needs at least 10 pairs of orders, got 2"):
        few.interval()
    assert enough.scores.stderr is not None
    assert enough.scores.notes == ()
    for level in (0, 1, "x", float("nan")):
        with pytest.raises(InputError, match="level must lie between 0 and 1"):
            enough.interval(level=level)


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


def test_a_tolerance_is_believed_after_twenty_pairs():
    assert sampled_shapley(Random(18), 18, tolerance=1e9).orders == 40


def test_reversed_orders_make_pairwise_games_exact_at_once():
    # an order and its reverse together see every synergy from both of its sides
    rng = np.random.default_rng(1)
    own, pair = rng.random(20), rng.random((20, 20))

    def game(mask):
        inside = (mask >> np.arange(20) & 1).astype(float)
        return float(inside @ own + inside @ pair @ inside)

    got = sampled_shapley(game, 20, tolerance=1e-9)
    expected = own + np.diag(pair) + (pair.sum(0) + pair.sum(1) - 2 * np.diag(pair)) / 2
    np.testing.assert_allclose(got.scores.raw, expected)


def test_nothing_is_asked_twice_and_the_budget_holds():
    game = Random(18)
    got = sampled_shapley(game, 18, budget=500)
    assert len(game.asked) == len(set(game.asked)) == got.evaluations <= 500
    assert got.evaluations > 400


def test_truncation_saves_evaluations_and_owns_up_to_its_bias():
    def saturating(mask):
        return 1 - 0.3 ** mask.bit_count()

    plain = sampled_shapley(saturating, 18, tolerance=0.02, seed=3)
    short = sampled_shapley(saturating, 18, tolerance=0.02, truncation=0.005, seed=3)
    assert short.evaluations < plain.evaluations / 2
    assert (plain.bias, short.bias) == (0, 0.01)
    low, high = short.interval().T
    assert ((low <= plain.scores.raw) & (plain.scores.raw <= high)).all()
    nothing = sampled_shapley(lambda mask: 0.5, 18, budget=100, truncation=0.1)
    assert nothing.scores.raw.tolist() == [0] * 18
    assert nothing.evaluations == 2


def test_when_all_coalitions_are_known_it_is_exact():
    exact = Random(4).exact()
    for settings in ({"budget": 16}, {"tolerance": 1e-9}):
        got = sampled_shapley(Random(4), ["A", "B", "C", "D"], **settings)
        np.testing.assert_allclose(got.scores.raw, exact)
        assert (got.stopped, got.evaluations) == ("exact", 16)
        assert got.interval()[:, 0].tolist() == got.scores.raw.tolist()
        assert got.scores.clients == ("A", "B", "C", "D")


def test_a_seed_gives_the_same_numbers():
    runs = [sampled_shapley(Random(18), 18, budget=300, seed=s).scores.raw.tolist() for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs a tolerance or a budget to know when to stop"),
        ({"clients": 1, "budget": 9}, "needs 2 to 62 clients, got 1"),
        ({"clients": 10**9, "budget": 9}, "needs 2 to 62 clients, got 1000000000"),
        ({"clients": "AB", "budget": 9}, "sampled_shapley: clients must be a list of names, got 'AB'"),
        ({"tolerance": 0.0}, "tolerance must be positive, got 0.0"),
        ({"budget": 70, "truncation": -1.0}, "truncation must be at least 0, got -1.0"),
        (
            {"budget": 69},
            "budget for two pairs of .* 18 clients must be a whole number of at least 70, got 69",
        ),
        ({"budget": float("nan")}, "must be a whole number of at least 70, got nan"),
        ({"budget": "x"}, "must be a whole number of at least 70, got 'x'"),
        ({"budget": 100.5}, "must be a whole number of at least 70, got 100.5"),
        ({"tolerance": "x"}, "tolerance must be positive, got 'x'"),
        ({"tolerance": 1, "seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"tolerance": 1, "seed": 0.5}, "seed must be a whole number of at least 0, got 0.5"),
        ({"tolerance": 1, "truncation": "x"}, "truncation must be at least 0, got 'x'"),
        ({"tolerance": 1, "clients": "AB"}, "must be a list of names, got 'AB'"),
        ({"tolerance": 1, "clients": ["A", "A"]}, "client 'A' appears more than once"),
        (
            {"tolerance": 1, "clients": None},
            "clients, unless they are names, must be a whole number of at least 1, got None",
        ),
        (
            {"tolerance": 1, "clients": 5.0},
            "clients, unless they are names, must be a whole number of at least 1, got 5.0",
        ),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InputError, match=message):
        sampled_shapley(Random(18), **({"clients": 18} | settings))


def test_numbers_of_numpy_are_numbers():
    game = Random(5)
    one = sampled_shapley(game, np.int64(5), budget=np.int64(20), seed=np.int64(3))
    assert one.scores.raw.tolist() == sampled_shapley(game, 5, budget=20, seed=3).scores.raw.tolist()


def test_a_utility_that_is_not_a_number_is_named():
    with pytest.raises(ReportError, match=r"utility of coalition \{\} is nan, expected a finite number"):
        sampled_shapley(lambda mask: float("nan") if mask == 0 else 1.0, 3, tolerance=0.1)
    for wrong in (None, "1.5", True, 1j, np.ones(1), 1e101):
        with pytest.raises(ReportError, match=r"utility of coalition \{A, B\} is .*, expected a finite"):
            sampled_shapley(lambda mask, wrong=wrong: wrong, ["A", "B"], tolerance=0.1)
