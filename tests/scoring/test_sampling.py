"""Sampled Shapley values: right on average, honest about their error, frugal."""

from __future__ import annotations

import numpy as np
import pytest

from fedmerit.scoring.ground_truth import sampled_shapley, shapley
from fedmerit.scoring.types import Table
from fedmerit.scoring.uncertainty import intervals


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
