"""Values from a full table: published games, axioms, the definition by permutations."""

import math
import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.scoring.ground_truth import banzhaf, multi_round, semivalue, shapley
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.types import Reports, Table
from games import exact, shapley_by_permutations, tables, two_additive_tables


def game(n, v):
    """A table from a function of the set of members."""
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


@given(tables(min_clients=2), st.data())
def test_symmetric_clients_get_the_same(t, data):
    i, j = data.draw(st.permutations(range(t.n)))[:2]
    swap = [
        (mask & ~(1 << i) & ~(1 << j)) | (mask >> i & 1) << j | (mask >> j & 1) << i
        for mask in range(1 << t.n)
    ]
    same = Table((t.values + t.values[swap]) / 2)
    for s in (shapley(same), banzhaf(same)):
        assert s.values[i] == pytest.approx(s.values[j], abs=1e-13)
        assert s.ranks()[i] == s.ranks()[j]


@given(tables(), st.data())
def test_null_client_gets_exactly_zero(t, data):
    i = data.draw(st.integers(0, t.n - 1))
    null = Table(t.values[np.arange(1 << t.n) & ~(1 << i)])
    for s in (shapley(null), banzhaf(null), semivalue(null, np.arange(t.n))):
        assert s.values[i] == 0.0


@given(
    st.integers(1, 5).flatmap(lambda n: st.tuples(*[st.lists(exact, min_size=2**n, max_size=2**n)] * 2)),
    exact,
)
def test_linearity(pair, factor):
    a, b = (Table(values) for values in pair)
    both = Table(a.values + factor * b.values)
    for value in (shapley, banzhaf):
        assert value(both).raw == pytest.approx(value(a).raw + factor * value(b).raw, abs=1e-11)


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


def test_twenty_clients_in_about_a_second_and_little_memory():
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
    assert took < 2
    assert peak < 100e6
