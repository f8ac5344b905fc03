"""Were there enough rounds: how an order settles, by hand and against sums made the slow way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.report.facts import Facts
from fedmerit.report.source import Source
from fedmerit.report.text import rounds_enough
from fedmerit.scoring.accumulate import MOST_CLIENTS, accumulate, convergence_of
from fedmerit.scoring.types import Reports, Scores


def convergence(each, numbers, stderr=None):
    """How the order settled of clients with these scores in each round."""
    clients = tuple(f"client-{i}" for i in range(np.shape(each)[1]))

    def scores(values, **more):
        return Scores(score="ALPHA", clients=clients, values=values, raw=values, gain=0.0, **more)

    error = None if stderr is None else np.full(len(clients), stderr)
    return convergence_of(scores(np.sum(each, axis=0), stderr=error), [*map(scores, each)], numbers)


def test_an_order_that_settles_by_hand():
    # sums: A 1 3 4 5 6 7 8 9, B 2 2 3 4 5 6 7 8, C 0 0 0 0 0 0 0 0: B is before A after round 1 only
    each = np.array([[1, 2, 0], [2, 0, 0], *[[1, 1, 0]] * 6], float)
    found = convergence(each, range(1, 9))
    assert found.numbers == (1, 2, 3, 4, 5, 6, 7, 8)
    assert (found.pairs, found.ordered) == (3, (2, 3, 3, 3, 3, 3, 3, 3))
    assert found.spearman == pytest.approx((0.5, *[1.0] * 7))
    assert (found.since, found.sure_since) == (2, None)
    assert found.settled(found.since)
    tie = convergence(np.array([[1, 0], [0, 1], [1, 1], [1, 1]], float), range(1, 5))
    assert (tie.pairs, tie.ordered, tie.since) == (0, (0, 0, 0, 0), 2)


def test_what_still_changes_in_the_last_quarter_is_not_settled():
    def since(last):  # B overtakes A in this round
        each = np.array([[1.0, 0.0]] + [[0.0, 0.0]] * 7)
        each[last - 1] = [0.0, 3.0]
        found = convergence(each, range(11, 19))
        assert found.since == 10 + last
        return found.settled(found.since)

    assert [since(last) for last in (2, 5, 6, 7, 8)] == [True, True, True, False, False]


def test_pairs_that_are_told_apart_are_judged_on_their_own():
    each = np.array([[5, 1, 2], [5, 1, 1], [5, 1, 1], [5, 4, 1]], float)  # B overtakes C in round 4
    found = convergence(each, range(1, 5), stderr=1.0)  # sums 20, 7 and 5: A is above both, B and C are alike
    assert (found.since, found.sure_since) == (4, 1)
    assert convergence(each, range(1, 5), stderr=0.1).sure_since == 4


@pytest.mark.parametrize("shape", [(3, 4), (9, 1), (4, MOST_CLIENTS + 1)])
def test_few_rounds_or_very_many_clients_say_nothing(shape):
    assert convergence(np.ones(shape), range(1, shape[0] + 1)) is None


VALUES = st.integers(-20, 20).map(lambda k: k / 8)


@st.composite
def histories(draw):
    """Reports of members who come and go; everybody is in the first round."""
    names = "ABCDE"[: draw(st.integers(2, 5))]
    rounds, level = [], 0.0
    for number in range(1, draw(st.integers(4, 9)) + 1):
        away = draw(st.sampled_from(["", *names])) if number > 1 and len(names) > 2 else ""
        here = [name for name in names if name != away]
        grand = draw(VALUES)
        alone, without = (draw(st.lists(VALUES, min_size=len(here), max_size=len(here))) for _ in range(2))
        rounds.append(
            Reports(empty=level, grand=grand, alone=alone, without=without, clients=here, round=number)
        )
        level = grand
    return rounds


def above(total, clients):
    values = total.as_dict()
    return [(one, other) for one in clients for other in clients if values[one] - values[other] > 1e-7]


@given(histories(), st.sampled_from(["zero", "own-mean"]), st.sampled_from(["ALPHA", "LOO"]))
def test_it_is_the_order_of_sums_that_accumulate_makes(rounds, missing, score):
    total = accumulate(rounds, score=score, missing=missing)
    numbers = [one.round for one in rounds]
    found = convergence_of(total, rounds, numbers, missing=missing)
    orders = [
        above(accumulate(rounds[:place], score=score, missing=missing), total.clients) for place in numbers
    ]
    final = orders[-1]
    assert found.pairs == len(final)
    assert list(found.ordered) == [len(set(one) & set(final)) for one in orders]
    changed = [place for place, one in zip(numbers, orders, strict=True) if set(one) != set(final)]
    assert found.since == (changed[-1] + 1 if changed else 1)


def facts(*rounds, stderr=None):
    """Members with these contributions in each round."""
    level, made = 0.0, []
    for number, values in enumerate(rounds, start=1):
        n = len(values)
        gain = sum(values)
        made.append(
            Reports(
                empty=level, grand=level + gain, alone=[level + value for value in values],
                without=[level + gain - value for value in values], clients=list("ABCD"[:n]), round=number,
                se_alpha=None if stderr is None else [stderr] * n, slice="s", utility="u",
            )
        )  # fmt: skip
        level += gain
    return Facts(Source(rounds=tuple(made), clients=tuple("ABCD"[: len(rounds[0])])))


def test_one_sentence_says_whether_there_were_rounds_enough():
    same = [[0.3, 0.2, 0.1]] * 8
    assert rounds_enough(facts(*same)) == "The order of members has been the same since the first round."
    early = [[0.1, 0.2, 0.0], [0.3, 0.1, 0.0], *same[2:]]
    told = "The order of members has not changed since round 2 of 8."
    assert rounds_enough(facts(*early)) == told
    late = [*same[:7], [0.0, 0.9, 0.0]]
    told = "The order of members still changed in round 8 of 8"
    assert rounds_enough(facts(*late)) == f"{told}: more rounds may change it again."
    within = [*[[0.01, 0.0, -9.0]] * 7, [0.0, 0.09, -9.0]]
    assert rounds_enough(facts(*within, stderr=0.1)) == (
        f"{told}, but only between members who are statistically indistinguishable; all others have kept "
        "their order since the first round."
    )
    within[0] = [0.01, 0.0, 9.0]
    assert rounds_enough(facts(*within, stderr=0.1)).endswith(
        "all others have kept their order since round 3."
    )
    assert rounds_enough(facts(*late, stderr=0.001)).startswith(f"{told}, and not only between members who ")
    assert rounds_enough(facts(*same[:3])) == ""
