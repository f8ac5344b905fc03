"""A judge's column: drawn coordinates, innovation, noise and eight bits, whatever the gradient looks like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmerit.errors import SettlementError
from fedmerit.protocol.column import (
    RMS,
    column_hash,
    coordinates,
    dealt,
    halves,
    innovation,
    malformed,
    rounded,
    shown,
)

SEEDS = st.integers(0, 2**32)


@given(st.text(max_size=8), st.integers(1, 400), st.integers(1, 400))
def test_coordinates_are_distinct_in_range_and_those_of_the_seed_and_round(seed, length, count):
    drawn = coordinates(seed, 3, length, count)
    assert len(drawn) == len(set(drawn.tolist())) == min(length, count)
    assert 0 <= drawn.min() <= drawn.max() < length
    assert drawn.tolist() == coordinates(seed, 3, length, count).tolist()


def test_coordinates_are_uniform_in_every_place_and_drawn_anew_in_every_round():
    drawn = np.array([coordinates("uniform", t, 10, 5) for t in range(4000)])
    for place in range(5):  # chi-square with 9 degrees of freedom: 33.7 has p = 1e-4
        counts = np.bincount(drawn[:, place], minlength=10)
        assert ((counts - 400) ** 2 / 400).sum() < 33.7


@given(st.integers(0, 300), st.binary(min_size=1, max_size=32))
def test_samples_are_dealt_to_two_halves_each_once(samples, seed):
    parts = dealt(samples, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    assert [len(part) for part in parts] == [(samples + 1) // 2, samples // 2]


@given(SEEDS, st.integers(0, 5), st.integers(6, 60), st.booleans())
def test_what_innovation_leaves_is_orthogonal_to_public_updates(seed, count, length, twice):
    rng = np.random.default_rng(seed)
    gradient, publics = rng.standard_normal(length), rng.standard_normal((count, length))
    if twice and count > 1:
        publics[-1] = 3 * publics[0]
    left, removed = innovation(gradient, publics)
    np.testing.assert_allclose(left + removed, gradient, atol=1e-9)
    np.testing.assert_allclose(publics @ left, 0, atol=1e-8)
    np.testing.assert_allclose(innovation(left, publics)[0], left, atol=1e-8)


@given(SEEDS, st.sampled_from([0.0, 2.0]), st.integers(1, 7))
def test_a_replay_of_any_length_is_worth_nothing_noise_or_not(seed, noise, rounds):
    rng = np.random.default_rng(seed)
    slopes, publics = rng.standard_t(2, (2, 80)), rng.standard_normal((rounds, 80))
    left, removed = shown(slopes, publics, noise, seed)
    for half in halves(80):
        np.testing.assert_allclose(publics[-5:, half] @ left[half], 0, atol=1e-6 * np.abs(slopes).max())
    if not noise:
        raw = np.concatenate([row[half] for row, half in zip(slopes, halves(80), strict=True)])
        np.testing.assert_allclose(left + removed, raw, atol=1e-9 * np.abs(slopes).max())


def test_two_who_add_and_take_away_a_public_update_are_not_paid_through_spikes():
    rng = np.random.default_rng(0)
    public, slopes = rng.standard_normal(2000), rng.standard_normal((2, 2000))
    slopes[:, :5] = 500.0  # beyond eight bits, and cut before innovation
    column, _ = rounded([shown(slopes, public[None], 2.0, "spikes")[0]])
    at_most = 3 * np.linalg.norm(public) / np.sqrt(12)  # of rounding alone, three standard deviations
    assert abs(float(public @ column[0])) < at_most


def test_the_noise_follows_from_its_seed_and_has_the_length_asked_for():
    slopes = np.random.default_rng(1).standard_normal((2, 20_000))
    bare, _ = shown(slopes, [], 0.0, b"secret", 1)
    first, second, other = (shown(slopes, [], 2.0, *seed)[0] for seed in (("a", 1), ("a", 1), ("a", 2)))
    assert (first == second).all()
    assert np.std(first - bare) == pytest.approx(2 * np.std(bare), rel=0.02)
    assert abs(np.corrcoef(first - bare, other - bare)[0, 1]) < 0.05


@settings(deadline=None)
@given(
    SEEDS,
    st.sampled_from([1.0, 1.5, 3.0, 30.0]),
    st.floats(0.05, 1.0),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e20]),
)
def test_a_column_has_the_root_mean_square_asked_for_with_heavy_tails_too(seed, freedom, dense, size):
    rng = np.random.default_rng(seed)
    values = size * rng.standard_t(freedom, (3, 700)) * (rng.random((3, 700)) < dense)
    column, scale = rounded(list(values))
    assert column.dtype == np.int8
    assert np.sqrt(np.mean(column.astype(float) ** 2)) == pytest.approx(RMS, rel=0.01)
    inside = np.abs(values) < 126 * scale
    assert np.abs(column * scale - values)[inside].max() <= 0.5001 * scale


def test_a_gradient_that_no_scale_fits_makes_no_column_and_noise_helps():
    sparse = np.zeros((2, 1000))
    sparse[:, :5] = 1.0
    with pytest.raises(SettlementError) as caught:
        rounded(list(sparse))
    assert caught.value.code == "spiky"
    column, _ = rounded([shown(np.stack([row] * 2), [], 2.0, "seed")[0] for row in sparse])
    assert not malformed(column, (2, 1000))


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_gradient_of_zeros_or_not_finite_makes_no_column(value):
    with pytest.raises(SettlementError) as caught:
        rounded([np.full(200, value)])
    assert caught.value.code == "no-gain"


def test_what_is_no_column_is_malformed_and_a_column_is_not():
    column, _ = rounded([np.random.default_rng(2).standard_normal(500)])
    assert malformed(column, (1, 500)) == ""
    assert "8 bits" in malformed(column.astype(np.int16), (1, 500))
    assert "shape" in malformed(column, (2, 250))
    assert "root mean square" in malformed(column // 2, (1, 500))
    below = column.copy()
    below[0, 0] = -128
    assert "-127" in malformed(below, (1, 500))
    other = column.copy()
    other[0, 1] += 1
    assert column_hash(column) != column_hash(other)
