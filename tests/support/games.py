"""Small cooperative games for the tests, on exact numbers: multiples of 1/64 add without rounding."""

from itertools import permutations

import numpy as np
from hypothesis import strategies as st

from fedmerit.scoring.types import Reports, Table

exact = st.integers(-512, 512).map(lambda k: k / 64)
"""Floats whose sums and differences are exact."""


@st.composite
def reports(draw, min_clients=2, max_clients=7, **fixed):
    """Random reports; nothing is assumed of them."""
    n = draw(st.integers(min_clients, max_clients))
    vectors = st.lists(exact, min_size=n, max_size=n)
    return Reports(empty=draw(exact), grand=draw(exact), alone=draw(vectors), without=draw(vectors), **fixed)


@st.composite
def tables(draw, min_clients=1, max_clients=6):
    """Random games: every coalition any value."""
    n = draw(st.integers(min_clients, max_clients))
    return Table(draw(st.lists(exact, min_size=1 << n, max_size=1 << n)))


@st.composite
def two_additive_tables(draw, min_clients=2, max_clients=6):
    """Games whose dividends vanish beyond pairs: v(S) = c + sum of singles + sum of pairs inside S."""
    n = draw(st.integers(min_clients, max_clients))
    single = np.array(draw(st.lists(exact, min_size=n, max_size=n)))
    pair = np.triu(np.array(draw(st.lists(exact, min_size=n * n, max_size=n * n))).reshape(n, n), 1)
    inside = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
    return Table(draw(exact) + inside @ single + np.einsum("si,ij,sj->s", inside, pair, inside))


def shapley_by_permutations(table):
    """The definition: the mean marginal contribution over all orders of arrival."""
    total = np.zeros(table.n)
    orders = list(permutations(range(table.n)))
    for order in orders:
        mask = 0
        for i in order:
            total[i] += table.values[mask | 1 << i] - table.values[mask]
            mask |= 1 << i
    return total / len(orders)
