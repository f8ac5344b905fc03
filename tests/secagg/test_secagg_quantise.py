"""Fixed point: exact sums, unbiased rounding that replays, and nothing cut or wrapped in silence."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.errors import BindingError, BoundError, ConfigError
from fedmerit.secagg.quantise import BLOCK, MODULUS, Encoding, rounding_bits


def plain_sum(encoding, vectors, weights=None, seed=0):
    total = np.zeros(encoding.words, np.uint32)
    for i, vector in enumerate(vectors):
        total += encoding.encode(vector, weight=weights and weights[i], seed=b"%d %d" % (seed, i)).words
    return total


@pytest.mark.parametrize("members", [*range(1, 65), 100, 1000, 1024])
def test_no_sum_can_wrap_and_the_range_is_the_largest_such(members):
    q = Encoding(length=1, members=members, bound=1.0).limit
    assert members * (2 * q + 1) <= MODULUS < members * (2 * (q + 1) + 1)
    assert members * q < 2**31


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("bound", [1.0, 0.1, 3.3, 4.0, 7e-5])
def test_everyone_at_the_bound_still_sums_exactly(sign, bound):
    encoding = Encoding(length=5, members=9, bound=bound)
    total = plain_sum(encoding, [np.full(5, sign * bound)] * 9)
    assert total.view(np.int32).tolist() == [int(sign) * 9 * encoding.limit] * 5
    assert encoding.decode(total, included=9).mean == pytest.approx(np.full(5, sign * bound), rel=1e-15)


def test_rounding_is_off_by_less_than_a_step_and_unbiased():
    encoding = Encoding(length=200_000, members=9, bound=1.0)
    d = np.full(encoding.length, 0.3 * encoding.step + 1000 * encoding.step)
    error = encoding.dequantise(encoding.encode(d, seed=3).words) / encoding.step - d / encoding.step
    assert np.abs(error).max() < 1
    # each is -0.3 with probability 0.7 and 0.7 with probability 0.3: variance 0.21, so five standard errors
    # are
    assert abs(error.mean()) < 5 * np.sqrt(0.21 / d.size)
    assert abs(error.var() - 0.21) < 0.01


def test_rounding_replays_from_its_seed_whatever_the_block_size(monkeypatch):
    encoding = Encoding(length=BLOCK + 7, members=4, bound=1.0)
    d = np.random.default_rng(1).uniform(-1, 1, encoding.length).astype(np.float32)
    words = encoding.encode(d, seed=b"seed").words
    assert np.array_equal(words, encoding.encode(d, seed=b"seed").words)
    assert not np.array_equal(words, encoding.encode(d, seed=b"other").words)
    monkeypatch.setattr("fedmerit.secagg.quantise.BLOCK", 1024)
    assert np.array_equal(words, encoding.encode(d, seed=b"seed").words)


def test_known_answers():
    # Q = (2^32 // 3 - 1) // 2 = 715827882; with bound 4 and seed 7, y = d/4*Q = -178956970.5, 0,
    # 17895697.05, Q.
    encoding = Encoding(length=4, members=3, bound=4.0)
    assert encoding.limit == 715827882
    got = encoding.encode(np.array([-1.0, 0.0, 0.1, 4.0]), seed=7).words.view(np.int32).tolist()
    assert got == [-178956970, 0, 17895697, 715827882]
    assert rounding_bits(b"seed").random_raw(2).tolist() == [14477782473940201537, 4903567798312917001]


def test_secret_weights_travel_as_one_more_word():
    encoding = Encoding(length=3, members=3, bound=1.0, weights="secret", weight_cap=200)
    vectors = [np.array([0.5, -0.5, 1.0]), np.array([0.1, 0.2, 0.3]), np.array([-1.0, 1.0, 0.0])]
    total = plain_sum(encoding, vectors, [100, 200, 7])
    decoded = encoding.decode(total, included=3)
    assert total[-1] == decoded.total_weight == 307
    expected = (100 * vectors[0] + 200 * vectors[1] + 7 * vectors[2]) / 307
    assert decoded.mean == pytest.approx(expected, abs=3 * encoding.step / 307)


def test_public_weights_use_the_known_total():
    encoding = Encoding(length=2, members=3, bound=1.0, weights="public", weight_cap=0.5)
    vectors = [np.array([1.0, 0.5]), np.array([-1.0, 0.25]), np.array([1.0, 1.0])]
    decoded = encoding.decode(plain_sum(encoding, vectors, [0.5, 0.25, 0.0]), included=3, public_total=0.75)
    assert decoded.mean == pytest.approx([1 / 3, (0.25 + 0.0625) / 0.75], abs=1e-8)


def test_what_a_member_put_in_adds_up_to_the_mean():
    encoding = Encoding(length=1000, members=5, bound=2.0, weights="secret", weight_cap=50)
    rng = np.random.default_rng(5)
    vectors = [rng.uniform(-2, 2, 1000).astype(np.float32) for _ in range(4)]
    words = [encoding.encode(d, weight=10 * i + 1, seed=i).words for i, d in enumerate(vectors)]
    decoded = encoding.decode(sum(words[1:], words[0].copy()), included=4)
    parts = [encoding.dequantise(word) / decoded.total_weight for word in words]
    assert sum(parts) == pytest.approx(decoded.mean, abs=1e-15)


def test_beyond_the_bound_is_an_error_that_says_how_many_and_how_far():
    encoding = Encoding(length=5, members=3, bound=1.0)
    with pytest.raises(BoundError, match=r"2 of 5 coordinates .* beyond the bound 1\.0, the largest is 3\.0"):
        encoding.encode(np.array([0.0, 2.0, -3.0, 1.0, -1.0]), seed=0)


def test_a_bound_that_is_missed_by_a_hair_is_told_apart():
    with pytest.raises(BoundError, match=r"beyond the bound 0\.1, the largest is 0\.10000000149"):
        Encoding(1, 3, 0.1).encode(np.array([0.1], np.float32), seed=0)


def test_a_clip_is_counted():
    encoding = Encoding(length=5, members=3, bound=1.0, clip=True)
    encoded = encoding.encode(np.array([0.0, 2.0, -3.0, 1.0, -1.0]), seed=0)
    assert (encoded.clipped, encoded.largest) == (2, 3.0)
    assert encoding.dequantise(encoded.words) == pytest.approx([0, 1, -1, 1, -1])


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_is_refused_even_when_clipping(bad, clip, dtype):
    encoding = Encoding(length=4, members=3, bound=1.0, clip=clip)
    with pytest.raises(BoundError, match="1 of 4 coordinates of the update are not finite"):
        encoding.encode(np.array([0.1, bad, 0.2, 5.0], dtype), seed=0)


@pytest.mark.parametrize(
    "vector",
    [np.zeros(3), np.zeros(5), np.zeros((4, 1)), np.zeros(0), np.zeros(4, int), np.zeros(4, complex)],
)
def test_a_vector_of_another_shape_or_type_is_refused(vector):
    with pytest.raises(BindingError, match="an update must"):
        Encoding(length=4, members=3, bound=1.0).encode(vector, seed=0)


@pytest.mark.parametrize("weight", [None, 0, 1.5, 201, -1, np.nan, np.inf])
def test_a_secret_weight_is_an_integer_up_to_the_cap_and_never_quoted(weight):
    encoding = Encoding(length=1, members=3, bound=1.0, weights="secret", weight_cap=200)
    with pytest.raises(BoundError) as error:
        encoding.encode(np.zeros(1), weight=weight, seed=0)
    assert "201" not in str(error.value)


@pytest.mark.parametrize("weight", [None, -0.1, 1.1, np.nan])
def test_a_public_weight_lies_within_the_cap(weight):
    with pytest.raises(BoundError):
        Encoding(length=1, members=3, bound=1.0, weights="public").encode(np.zeros(1), weight=weight, seed=0)


def test_a_uniform_member_brings_no_weight():
    with pytest.raises(BoundError):
        Encoding(length=1, members=3, bound=1.0).encode(np.zeros(1), weight=2, seed=0)


@pytest.mark.parametrize(
    "change",
    [
        {"length": 0},
        {"members": 0},
        {"members": 5000},
        {"bound": 0.0},
        {"bound": -1.0},
        {"bound": np.inf},
        {"bound": np.nan},
        {"bound": "1"},
        {"bound": None},
        {"bound": True},
        {"length": 1.5},
        {"members": "3"},
        {"weight_cap": None},
        {"weights": "none"},
        {"weight_cap": 2},
        {"weights": "secret", "weight_cap": 2**31},
        {"weights": "secret", "weight_cap": 1.5},
        {"weights": "public", "weight_cap": 0},
    ],
)
def test_impossible_settings_are_refused(change):
    with pytest.raises(ConfigError):
        Encoding(**{"length": 1, "members": 3, "bound": 1.0} | change)


def test_a_sum_that_honest_members_cannot_reach_is_refused():
    encoding = Encoding(length=2, members=9, bound=1.0, weights="secret", weight_cap=10)
    beyond = np.array([4 * encoding.limit, 0, 30], np.uint32)
    with pytest.raises(BoundError, match="3 members within the bound"):
        encoding.decode(beyond, included=3)
    # three members of weight 1 under a cap of 10 reach 3 Q / 10, not 3 Q
    light = np.array([0, -(encoding.limit // 10 * 3 + 5) % 2**32, 3], np.uint32)
    with pytest.raises(BoundError, match="3 members within the bound can reach with a total weight of 3"):
        encoding.decode(light, included=3)
    assert encoding.decode(light + np.array([0, 5, 0], np.uint32), included=3).total_weight == 3
    for weight in (0, 2, 31):
        with pytest.raises(BoundError, match="cannot have a total weight"):
            encoding.decode(np.array([0, 0, weight], np.uint32), included=3)


WORD = st.integers(0, MODULUS - 1) | st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**31 + 1, MODULUS - 1])


@settings(max_examples=300, deadline=None)
@given(members=st.integers(3, 40), bound=st.sampled_from([1e-6, 0.1, 4.0, 1e6]), data=st.data())
def test_whatever_words_are_summed_the_model_moves_by_the_bound_at_most_or_not_at_all(members, bound, data):
    """Whoever cheats can add anything modulo 2^32, so any words can come out."""
    kind = data.draw(st.sampled_from(["uniform", "public", "secret"]))
    cap = 1 if kind == "uniform" else data.draw(st.sampled_from([1, 100, 10**6]))
    n = data.draw(st.integers(3, members))
    encoding = Encoding(length=3, members=members, bound=bound, weights=kind, weight_cap=cap)
    size = data.draw(st.sampled_from([1, n, n * cap]) | st.integers(1, n * cap))  # most words are no weight
    words = data.draw(st.lists(WORD, min_size=3, max_size=3))
    words += [data.draw(WORD | st.just(size))] if kind == "secret" else []
    public = float(size) if kind == "public" else None
    try:
        decoded = encoding.decode(np.array(words, np.uint32), included=n, public_total=public)
    except BoundError:
        return
    total = decoded.total_weight
    assert (n if kind == "secret" else 0) <= total <= n * cap
    rounding = n * cap / (total * encoding.limit)
    assert np.abs(decoded.mean).max() <= bound * (1 + rounding + 1e-9)


def test_what_is_not_noticed_one_member_can_move_the_model_as_far_as_all_together():
    """Uniform weights and nobody missing: the last of nine puts in nine times its bound, less the others."""
    encoding = Encoding(length=4, members=9, bound=4.0)
    honest = plain_sum(encoding, [np.full(4, 0.01)] * 8)
    wanted = np.array([9, -9, 5, -1]) * encoding.limit
    bad = (wanted - honest.view(np.int32)).astype(np.int64) % MODULUS
    decoded = encoding.decode(honest + bad.astype(np.uint32), included=9)
    assert decoded.mean == pytest.approx(4.0 * wanted / (9 * encoding.limit), rel=1e-12)


def test_what_is_not_noticed_a_negative_secret_weight_makes_the_others_larger():
    """25 members, 24 of weight 100; the last says -2,300 and has no update: M moves 24 times as far. Members
    that report know a little better: `test_a_weight_below_ones_own_and_one_for_each_other_is_refused`."""
    encoding = Encoding(length=2, members=25, bound=4.0, weights="secret", weight_cap=1000)
    honest = plain_sum(encoding, [np.full(2, 0.1)] * 24, [100] * 24)
    for said, total in ((-2276, 124), (-2300, 100), (-2340, 60)):
        decoded = encoding.decode(honest + np.array([0, 0, said % MODULUS], np.uint32), included=25)
        assert decoded.total_weight == total
        assert decoded.mean == pytest.approx(np.full(2, 0.1 * 2400 / total), rel=1e-4)
    with pytest.raises(BoundError, match="beyond what 25 members within the bound can reach"):  # 9.6 times
        encoding.decode(honest + np.array([0, 0, -2375 % MODULUS], np.uint32), included=25)
    with pytest.raises(BoundError, match="25 members cannot have a total weight of 24"):
        encoding.decode(honest + np.array([0, 0, -2376 % MODULUS], np.uint32), included=25)


@settings(max_examples=60, deadline=None)
@given(
    members=st.integers(3, 40),
    length=st.integers(1, 50),
    bound=st.floats(1e-6, 1e6),
    seed=st.integers(0, 2**64),
    data=st.data(),
)
def test_the_decoded_sum_is_the_plain_sum_within_a_step_a_member(members, length, bound, seed, data):
    included = data.draw(st.integers(1, members))
    encoding = Encoding(length=length, members=members, bound=bound)
    rng = np.random.default_rng(seed)
    vectors = [np.clip(rng.normal(size=length), -1, 1) * bound for _ in range(included)]
    decoded = encoding.decode(plain_sum(encoding, vectors, seed=seed), included=included)
    assert np.abs(decoded.weighted_sum - sum(vectors)).max() <= included * encoding.step * (1 + 1e-6)


def test_it_loads_where_the_cryptographic_packages_are_absent():
    code = (
        "import sys\n"
        "for name in ('cryptography', 'Crypto', 'msgpack', 'torch'): sys.modules[name] = None\n"
        "from fedmerit.secagg import Encoding\n"
        "from fedmerit.secagg.quantise import rounding_bits\n"
        "import fedmerit.secagg\n"
        "from fedmerit.config import from_dict\n"
        "assert from_dict({}).threshold == 5\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
