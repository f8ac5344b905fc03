"""How far from M0 a member lets the M lie that it is told: as far as honest members can move it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.errors import BindingError
from fedmerit.protocol.messages import Outcome, model_hash, moved
from fedmerit.secagg.quantise import Encoding

NAMES = ("A", "B", "C", "D", "E", "F", "G")


class Shown:
    """A test slice of which only the name matters here."""

    id = "s"


def told(m0, model, total=4.0, included=NAMES[:4]):
    return Outcome(1, model, total, tuple(included), Shown, model_hash(m0), "00" * 32)


@st.composite
def honest(draw):
    """M0 of any magnitudes, updates within the bound and often at it, and what their sum makes of M0."""
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
        words += encoding.encode(delta, weight=each[-1], seed=k).words
    public = dict(zip(NAMES, map(float, each), strict=False)) if kind == "public" else None
    decoded = encoding.decode(words, included=n, public_total=public and float(np.sum(each)))
    return m0, encoding, each, public, decoded


@settings(max_examples=200)
@given(honest())
def test_what_members_within_the_bound_summed_to_is_accepted_whatever_the_magnitudes(case):
    m0, encoding, weights, public, decoded = case
    total = math.fsum(public.values()) if public else decoded.total_weight
    model = moved(m0, decoded.weighted_sum, total)
    names = NAMES[: len(weights)]
    told(m0, model, total, names).check("A", m0, float(weights[0]), encoding, public)


def test_small_weights_under_a_large_cap_are_rounded_coarsely_and_still_accepted():
    """Seven members of weight 1 under a cap of 100000, all clipped to the bound: integers of only 3000."""
    encoding = Encoding(1000, 7, 4.0, "secret", 100_000, clip=True)
    words = np.zeros(encoding.words, np.uint32)
    for k in range(7):
        words += encoding.encode(np.full(1000, 9.0), weight=1, seed=k).words
    decoded = encoding.decode(words, included=7)
    m0 = np.zeros(1000, np.float32)
    model = moved(m0, decoded.weighted_sum, decoded.total_weight)
    assert model.max() > 4.0 * (1 + 1e-5)  # so a fixed tolerance of that size would refuse it
    told(m0, model, 7.0, NAMES).check("A", m0, 1.0, encoding, None)


@pytest.mark.parametrize("large", [0.0, 1e10, 3e38])
@pytest.mark.parametrize("by", [4.001, 9e3])
def test_a_large_number_in_m0_excuses_no_other_coordinate(large, by):
    m0 = np.zeros(5, np.float32)
    m0[0] = large
    encoding = Encoding(5, 4, 4.0)
    for sign in (-1, 1):
        model = m0.copy()
        model[3] += np.float32(sign * by)
        with pytest.raises(
            BindingError, match=r"member A: M lies further from M0 .* the bound 4 can move it"
        ):
            told(m0, model).check("A", m0, 1.0, encoding, None)
        model[3] = m0[3] + np.float32(sign * 4)
        told(m0, model).check("A", m0, 1.0, encoding, None)


def test_a_large_coordinate_may_move_by_the_bound_and_one_rounding_and_no_more():
    m0 = np.array([1e10, 1.0], np.float32)
    encoding = Encoding(2, 4, 4.0)
    step = np.spacing(m0[0])  # 1024: the next float32
    told(m0, np.array([m0[0] + step, 1.0], np.float32)).check("A", m0, 1.0, encoding, None)
    with pytest.raises(BindingError, match="M lies further from M0"):
        told(m0, np.array([m0[0] + 2 * step, 1.0], np.float32)).check("A", m0, 1.0, encoding, None)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["m0", "m", "both"])
def test_a_model_that_is_not_finite_is_refused(odd, where):
    m0, model = np.zeros(5, np.float32), np.zeros(5, np.float32)
    if where in ("m0", "both"):
        m0[2] = odd
    if where in ("m", "both"):
        model[2] = odd
    with pytest.raises(BindingError, match="M lies further from M0"):
        told(m0, model).check("A", m0, 1.0, Encoding(5, 4, 4.0), None)


def test_members_that_weigh_nothing_together_have_summed_to_nothing():
    m0 = np.zeros(5, np.float32)
    with pytest.raises(BindingError, match="4 members cannot have a total weight of 0"):
        told(m0, m0, 0.0).check("A", m0, 0.0, Encoding(5, 4, 4.0, "public", 1), dict.fromkeys("ABCD", 0.0))


def test_a_weight_below_ones_own_and_one_for_each_other_is_refused():
    """A member that says a negative secret weight makes W small; so does a server that makes W up."""
    m0, encoding = np.zeros(3, np.float32), Encoding(3, 7, 4.0, "secret", 1000)
    for total in (106.0, 7000.0):
        told(m0, m0, total, NAMES).check("A", m0, 100.0, encoding, None)
    for total in (105.0, 7.0, 7001.0):
        with pytest.raises(BindingError, match=f"7 members cannot have a total weight of {total:g}"):
            told(m0, m0, total, NAMES).check("A", m0, 100.0, encoding, None)
