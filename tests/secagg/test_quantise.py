"""Fixed point: exact sums, unbiased rounding that replays, and nothing cut or wrapped in silence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.errors import BindingError, BoundError, ConfigError
from fedmerit.secagg.quantise import BLOCK, MODULUS, Encoding, rounding_bits
from refusals import refused


def plain_sum(encoding, vectors, weights=None, seed=0):
    total = np.zeros(encoding.words, np.uint32)
    for i, vector in enumerate(vectors):
        total += encoding.encode(vector, weight=weights and weights[i], seed=b"%d %d" % (seed, i))
    return total


@pytest.mark.parametrize("members", [*range(1, 65), 100, 1000, 1024])
def test_no_sum_can_wrap_and_the_range_is_the_largest_such(members):
    q = Encoding(length=1, members=members, bound=1.0).limit
    assert members * (2 * q + 1) <= MODULUS < members * (2 * (q + 1) + 1)
    assert members * q < 2**31


def test_rounding_is_off_by_less_than_a_step_and_unbiased():
    encoding = Encoding(length=200_000, members=9, bound=1.0)
    d = np.full(encoding.length, 0.3 * encoding.step + 1000 * encoding.step)
    error = encoding.dequantise(encoding.encode(d, seed=3)) / encoding.step - d / encoding.step
    assert np.abs(error).max() < 1
    # each is -0.3 with probability 0.7 and 0.7 with probability 0.3: variance 0.21; five standard errors
    assert abs(error.mean()) < 5 * np.sqrt(0.21 / d.size)
    assert abs(error.var() - 0.21) < 0.01


def test_rounding_replays_from_its_seed_whatever_the_block_size(monkeypatch):
    encoding = Encoding(length=BLOCK + 7, members=4, bound=1.0)
    d = np.random.default_rng(1).uniform(-1, 1, encoding.length).astype(np.float32)
    words = encoding.encode(d, seed=b"seed")
    assert np.array_equal(words, encoding.encode(d, seed=b"seed"))
    assert not np.array_equal(words, encoding.encode(d, seed=b"other"))
    monkeypatch.setattr("fedmerit.secagg.quantise.BLOCK", 1024)
    assert np.array_equal(words, encoding.encode(d, seed=b"seed"))


def test_known_answers():
    # Q = (2^32 // 3 - 1) // 2 = 715827882; with bound 4 and seed 7, y = d/4*Q = -178956970.5, 0,
    # 17895697.05, Q.
    encoding = Encoding(length=4, members=3, bound=4.0)
    assert encoding.limit == 715827882
    got = encoding.encode(np.array([-1.0, 0.0, 0.1, 4.0]), seed=7).view(np.int32).tolist()
    assert got == [-178956970, 0, 17895697, 715827882]
    assert rounding_bits(b"seed").random_raw(2).tolist() == [14477782473940201537, 4903567798312917001]


def test_beyond_the_bound_is_an_error_that_says_how_many_and_how_far():
    encoding = Encoding(length=5, members=3, bound=1.0)
    with pytest.raises(BoundError, match=r"2 of 5 coordinates .* beyond the bound 1\.0, the largest is 3\.0"):
        encoding.encode(np.array([0.0, 2.0, -3.0, 1.0, -1.0]), seed=0)
    with pytest.raises(BoundError, match=r"beyond the bound 0\.1, the largest is 0\.10000000149"):
        Encoding(1, 3, 0.1).encode(np.array([0.1], np.float32), seed=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_is_refused(bad, dtype):
    encoding = Encoding(length=4, members=3, bound=1.0)
    with pytest.raises(BoundError, match="1 of 4 coordinates of the update are not finite"):
        encoding.encode(np.array([0.1, bad, 0.2, 5.0], dtype), seed=0)


@pytest.mark.parametrize(
    "vector",
    [np.zeros(3), np.zeros(5), np.zeros((4, 1)), np.zeros(0), np.zeros(4, int), np.zeros(4, complex)],
)
def test_a_vector_of_another_shape_or_type_is_refused(vector):
    with refused(BindingError):
        Encoding(length=4, members=3, bound=1.0).encode(vector, seed=0)


@pytest.mark.parametrize(
    ("kind", "cap", "weights"),
    [
        ("secret", 200, [None, 0, 1.5, 201, -1, np.nan, np.inf]),
        ("public", 1, [None, -0.1, 1.1, np.nan]),
        ("uniform", 1, [2]),
    ],
)
def test_a_weight_is_one_of_its_kind_and_a_secret_one_is_never_quoted(kind, cap, weights):
    encoding = Encoding(length=1, members=3, bound=1.0, weights=kind, weight_cap=cap)
    for weight in weights:
        with refused(BoundError) as error:
            encoding.encode(np.zeros(1), weight=weight, seed=0)
        assert "201" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        *[{"length": length} for length in (0, 1.5)],
        *[{"members": members} for members in (0, 5000, "3")],
        *[{"bound": bound} for bound in (0.0, -1.0, np.inf, np.nan, "1", None, True, 1e31)],
        *[{"weight_cap": cap} for cap in (None, 2)],
        {"weights": "none"},
        *[{"word_bytes": size} for size in (6, 5, 8.0, "8", True, None)],
        *[{"weights": "secret", "weight_cap": cap} for cap in (2**31, 1.5)],
        *[{"weights": "public", "weight_cap": cap} for cap in (0, 1e300)],
    ],
)
def test_impossible_settings_are_refused(change):
    with refused(ConfigError):
        Encoding(**{"length": 1, "members": 3, "bound": 1.0} | change)


def test_words_and_totals_that_do_not_fit_the_encoding_are_refused():
    encoding = Encoding(length=2, members=3, bound=1.0)
    for words in (np.zeros(2, np.int32), np.zeros(3, np.uint32)):
        with refused(BindingError):
            encoding.dequantise(words)
    for change in ({"public_total": 1.0}, {"included": 4}):
        with refused(ConfigError):
            encoding.decode(np.zeros(2, np.uint32), **{"included": 3} | change)


def test_the_largest_settings_give_finite_numbers():
    encoding = Encoding(length=1, members=3, bound=1e30, weights="public", weight_cap=1e30)
    decoded = encoding.decode(plain_sum(encoding, [[1e30]] * 3, [1e30] * 3), included=3, public_total=3e30)
    assert decoded.mean == pytest.approx([1e30])


def test_a_sum_that_honest_members_cannot_reach_is_refused():
    encoding = Encoding(length=2, members=9, bound=1.0, weights="secret", weight_cap=10)
    beyond = np.array([4 * encoding.limit, 0, 30], np.uint32)
    with refused(BoundError):
        encoding.decode(beyond, included=3)
    # three members of weight 1 under a cap of 10 reach 3 Q / 10, not 3 Q
    light = np.array([0, -(encoding.limit // 10 * 3 + 5) % 2**32, 3], np.uint32)
    with refused(BoundError):
        encoding.decode(light, included=3)
    assert encoding.decode(light + np.array([0, 5, 0], np.uint32), included=3).total_weight == 3
    for weight in (0, 2, 31):
        with refused(BoundError):
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
    with refused(BoundError):  # 9.6 times
        encoding.decode(honest + np.array([0, 0, -2375 % MODULUS], np.uint32), included=25)
    with refused(BoundError):
        encoding.decode(honest + np.array([0, 0, -2376 % MODULUS], np.uint32), included=25)


@settings(max_examples=100, deadline=None)
@given(
    members=st.integers(3, 40),
    length=st.integers(1, 50),
    bound=st.floats(1e-6, 1e6),
    kind=st.sampled_from(["uniform", "public", "secret"]),
    seed=st.integers(0, 2**64),
    data=st.data(),
)
def test_the_decoded_sum_is_the_plain_sum_within_a_step_a_member(members, length, bound, kind, seed, data):
    included = data.draw(st.integers(1, members))
    encoding = Encoding(length, members, bound, kind, 1 if kind == "uniform" else 200)
    rng = np.random.default_rng(seed)
    vectors = [np.clip(rng.normal(size=length), -1, 1) * bound for _ in range(included)]
    weights = [1] * included if kind == "uniform" else rng.integers(1, 201, included).tolist()
    words = [
        encoding.encode(d, weight=w, seed=i) for i, (d, w) in enumerate(zip(vectors, weights, strict=True))
    ]
    total = sum(words, np.zeros(encoding.words, np.uint32))
    known = sum(weights) if kind == "public" else None
    decoded = encoding.decode(total, included=included, public_total=known)
    assert decoded.total_weight == sum(weights)
    assert total[length:].tolist() == ([sum(weights)] if kind == "secret" else [])
    expected = sum(w * d for w, d in zip(weights, vectors, strict=True))
    assert np.abs(decoded.weighted_sum - expected).max() <= included * encoding.step * (1 + 1e-6)
    assert decoded.mean == pytest.approx(decoded.weighted_sum / sum(weights), rel=1e-12)
    parts = sum(encoding.dequantise(word) for word in words)  # what members put in adds up to it
    assert parts == pytest.approx(decoded.weighted_sum, rel=1e-9, abs=1e-9 * encoding.step)
