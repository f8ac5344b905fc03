"""What a member computes from the integers it is told, and which sums it takes for possible."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.errors import BindingError, BoundError
from fedmerit.protocol.outcome import Told, model_hash, moved, sum_hash
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.setting import Task
from refusals import refused

NAMES = ("A", "B", "C", "D", "E", "F", "G")


class Shown:
    """A test slice of which only the name matters here."""

    id = "s"


def told(m0, words, included=NAMES[:4]):
    return Told(1, words, tuple(included), Shown, model_hash(m0), "00" * 32)


def summed(*numbers, total=None):
    """Return integers as the words of a sum, with the total weight as the last one if it is secret."""
    words = np.array(numbers, np.int64) % 2**32
    return np.append(words, [] if total is None else [total]).astype(np.uint32)


@st.composite
def honest(draw):
    """M0 of any magnitudes, and the sum of updates within the bound and often at it."""
    n, coordinates = draw(st.integers(3, 7)), draw(st.integers(1, 6))
    bound = draw(st.sampled_from([1e-30, 1e-6, 0.1, 4.0, 100.0, 1e6]) | st.floats(1e-9, 1e9))
    kind = draw(st.sampled_from(["uniform", "public", "secret"]))
    cap = 1 if kind == "uniform" else draw(st.sampled_from([1, 10, 100_000, 600_000_000 // n]))
    weights = {
        "uniform": st.just(1),
        "public": st.floats(cap * 1e-6, cap),
        "secret": st.integers(1, min(cap, 5)) | st.integers(1, cap),
    }[kind]
    size = st.sampled_from([0.0, 1e-45, 1e-38, 1e-6, 1.0, 1e4, 1e10, 1e30])
    values = st.builds(lambda big, x: big * x, size, st.floats(-1, 1, width=32))
    m0 = np.array(draw(st.lists(values, min_size=coordinates, max_size=coordinates)), np.float32)
    part = st.sampled_from([-1.0, 1.0, 1.0, 0.0]) | st.floats(-1, 1)
    parts = st.lists(part, min_size=coordinates, max_size=coordinates)
    together = draw(st.none() | parts)  # everybody at the same place: the sum reaches the bound too
    encoding = Encoding(coordinates, n, bound, kind, cap)
    words, each = np.zeros(encoding.words, np.uint32), []
    for k in range(n):
        each.append(draw(weights))
        delta = bound * np.array(together or draw(parts))
        words += encoding.encode(delta, weight=each[-1], seed=k)
    public = dict(zip(NAMES, map(float, each), strict=False)) if kind == "public" else None
    return m0, encoding, each, public, words


@settings(max_examples=80)
@given(honest())
def test_every_member_computes_from_the_integers_the_m_that_the_server_has(case):
    m0, encoding, weights, public, words = case
    total = math.fsum(public.values()) if public else None
    decoded = encoding.decode(words, included=len(weights), public_total=total)
    for number, name in enumerate(NAMES[: len(weights)]):
        found = told(m0, words, NAMES[: len(weights)]).outcome(m0, Task(bytes(32), encoding, public))
        found.check(name, float(weights[number]), encoding)
        assert found.total_weight == decoded.total_weight
        assert model_hash(found.model) == model_hash(moved(m0, decoded.weighted_sum, decoded.total_weight))
        assert found.bound_to["x"] == sum_hash(words)


def test_one_unit_more_in_one_place_is_another_outcome():
    """M is rounded to float32, so it may be the same; the digest of the integers is not."""
    m0, encoding = np.full(3, 1e6, np.float32), Encoding(3, 4, 4.0)
    one = told(m0, summed(5, 6, 7)).outcome(m0, Task(bytes(32), encoding))
    other = told(m0, summed(5, 6, 8)).outcome(m0, Task(bytes(32), encoding))
    assert one.bound_to["m"] == other.bound_to["m"]
    assert {key for key in one.bound_to if one.bound_to[key] != other.bound_to[key]} == {"x"}


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_sum_beyond_the_reach_of_those_who_are_in_it_is_refused(sign):
    m0, encoding = np.zeros(3, np.float32), Encoding(3, 7, 4.0)
    reach = 4 * encoding.limit
    found = told(m0, summed(0, sign * reach, 0)).outcome(m0, Task(bytes(32), encoding))
    assert found.model[1] == pytest.approx(sign * 4.0)
    with pytest.raises(BoundError):
        told(m0, summed(0, sign * (reach + 1), 0)).outcome(m0, Task(bytes(32), encoding))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_model_that_is_not_finite_is_refused(odd):
    m0 = np.zeros(5, np.float32)
    m0[2] = odd
    with pytest.raises(BindingError):
        told(m0, summed(*range(5))).outcome(m0, Task(bytes(32), Encoding(5, 4, 4.0)))


def test_members_that_weigh_nothing_together_have_summed_to_nothing():
    m0, encoding = np.zeros(5, np.float32), Encoding(5, 4, 4.0, "public", 1)
    with pytest.raises(BoundError):
        told(m0, summed(*[0] * 5)).outcome(m0, Task(bytes(32), encoding, dict.fromkeys("ABCD", 0.0)))


def test_a_weight_below_ones_own_and_one_for_each_other_is_refused():
    """A member that says a negative secret weight makes W small; so does a server that makes W up."""
    m0, encoding = np.zeros(3, np.float32), Encoding(3, 7, 4.0, "secret", 1000)
    for total in (106, 7000):
        told(m0, summed(0, 0, 0, total=total), NAMES).outcome(m0, Task(bytes(32), encoding)).check(
            "A", 100.0, encoding
        )
    for total in (105, 7):
        found = told(m0, summed(0, 0, 0, total=total), NAMES).outcome(m0, Task(bytes(32), encoding))
        with refused(BindingError, stage="report", member="A"):
            found.check("A", 100.0, encoding)
    for total in (6, 7001):
        with pytest.raises(BoundError):
            told(m0, summed(0, 0, 0, total=total), NAMES).outcome(m0, Task(bytes(32), encoding))


def test_a_sum_of_others_or_of_two_is_refused():
    m0, encoding = np.zeros(3, np.float32), Encoding(3, 4, 4.0)
    for included in (("B", "C", "D"), ("A", "B"), ("A", "B", "A")):
        found = told(m0, summed(0, 0, 0), included).outcome(m0, Task(bytes(32), encoding))
        with pytest.raises(BindingError):
            found.check("A", 1.0, encoding)
