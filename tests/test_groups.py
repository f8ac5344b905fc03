"""Groups of clients of which no two are apart: against every subset, and bounded."""

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.errors import ReportError
from fedmerit.scoring.uncertainty import MOST_GROUPS, largest_groups


def by_hand(better, ranking):
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
    upper = np.zeros((n, n), bool)
    upper[np.triu_indices(n, 1)] = draw(
        st.lists(st.booleans(), min_size=n * (n - 1) // 2, max_size=n * (n - 1) // 2)
    )
    ranking = draw(st.permutations(range(n)))
    better = np.zeros((n, n), bool)
    better[np.ix_(ranking, ranking)] = upper
    return better, list(ranking)


@given(relations())
def test_they_are_all_the_groups_that_nobody_could_join(relation):
    assert largest_groups(*relation) == by_hand(*relation)


def test_intervals_of_n_clients_form_at_most_n_groups_quickly():
    rng = np.random.default_rng(0)
    raw, reach = rng.normal(size=1000), rng.exponential(0.1, 1000)
    better = (raw - reach)[:, None] > (raw + reach)[None, :]
    start = time.process_time()
    found = largest_groups(better, np.argsort(-raw).tolist())
    assert time.process_time() - start < 5
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
