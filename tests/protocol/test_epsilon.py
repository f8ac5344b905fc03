"""Differential privacy of a judge: multiplier, clipping per sample, noise, and when it drowns the scores."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from fedmerit.errors import InputError, MissingExtra, SettlementError
from fedmerit.protocol import epsilon
from fedmerit.protocol.column import halves
from fedmerit.protocol.direction import along_path
from fedmerit.protocol.epsilon import clipped, error, multiplier, noised, not_drowned
from fedmerit.protocol.pool import Slice


def delta_of(z: float, epsilon: float) -> float:
    """The exact delta of normal noise (Balle & Wang 2018, theorem 8)."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    return below(0.5 / z - epsilon * z) - math.exp(epsilon) * below(-0.5 / z - epsilon * z)


@pytest.mark.parametrize(("budget", "rounds"), [(0.5, 1), (4.0, 1), (4.0, 8), (8.0, 100)])
def test_the_multiplier_spends_the_whole_budget_and_no_more(budget, rounds):
    pytest.importorskip("dp_accounting")
    z = multiplier(budget, 1e-5, rounds)
    assert delta_of(z / math.sqrt(rounds), budget) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("asked", [(0, 1e-5, 1), (math.inf, 1e-5, 1), (4, 0, 1), (4, 1, 1), (4, 1e-5, 0)])
def test_no_budget_is_an_error(asked):
    with pytest.raises(InputError):
        multiplier(*asked)


def test_without_the_extra_an_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingExtra, match="dp-accounting"):
        multiplier(4.0, 1e-5, 8)


M0, M = np.zeros(40, np.float32), np.ones(40, np.float32)


def slope(_model, shown, places):
    """The gradient of a sample is the sample itself: means of rows."""
    return 0.0, np.mean(shown.x[places], axis=0)


def judged(x, clip):
    own = Slice(index=0, x=x, y=np.zeros(len(x), np.int64), salts=b"", path=())
    parts, at = [np.arange(0, len(x), 2), np.arange(1, len(x), 2)], np.arange(40)[::-1][:20]
    return clipped(along_path(slope), M0, M, own, parts, at, clip, 3), parts, at


@pytest.mark.parametrize("most", [1, 1 << 28])
def test_each_half_shows_the_mean_of_its_own_clipped_samples_at_its_own_coordinates(monkeypatch, most):
    monkeypatch.setattr(epsilon, "MOST", most)  # one sample at a time, or all of them
    x = np.random.default_rng(0).standard_normal((9, 40)).astype(np.float32)
    rows, parts, at = judged(x, 1.5)
    for row, part, half in zip(rows, parts, halves(20), strict=True):
        own = x[part][:, at[half]].astype(float)
        shorter = np.minimum(1, 1.5 / np.linalg.norm(own, axis=1, keepdims=True))
        assert (shorter < 1).any()
        np.testing.assert_allclose(row[half], (own * shorter).mean(axis=0), rtol=1e-5)
        assert np.count_nonzero(row) == half.stop - half.start


def test_one_sample_moves_what_is_shown_by_no_more_than_its_clip():
    x = np.random.default_rng(1).standard_normal((8, 40)).astype(np.float32)
    other = x.copy()
    other[2] *= -1000
    (before, *_), (after, *_) = judged(x, 0.5), judged(other, 0.5)
    assert np.linalg.norm(after - before) <= 2 * 0.5 / 4 * (
        1 + 1e-6
    )  # one taken away, one added; 4 in its half


def test_the_noise_is_normal_of_the_length_stated_and_the_same_for_the_same_seed():
    rows = np.zeros((2, 40_000))
    made = noised(rows, [50, 25], 0.1, 3.0, b"secret", 1)
    assert (made == noised(rows, [50, 25], 0.1, 3.0, b"secret", 1)).all()
    assert (made != noised(rows, [50, 25], 0.1, 3.0, b"secret", 2)).any()
    for row, size, half in zip(made, [50, 25], halves(40_000), strict=True):
        units = row[half] / (3.0 * 0.1 / size)
        assert np.std(units) == pytest.approx(1, abs=0.03)
        assert np.mean(units**4) == pytest.approx(3, abs=0.3)  # of a sum of twelve uniform numbers: 2.9
        assert not row[: half.start].any()
        assert not row[half.stop :].any()


def test_the_error_stated_is_that_of_products_with_the_noise():
    rng, length, count = np.random.default_rng(3), 4000, 1000
    moves, found = rng.standard_normal((2, length)), []
    for draw in range(400):
        total = 0.0
        for t, move in enumerate(moves):
            at = rng.permutation(length)[:count]
            total += (
                length
                / count
                * float(noised(np.zeros((2, count)), [30, 30], 0.2, 2.0, draw, t).sum(0) @ move[at])
            )
        found.append(total)
    stated = error(np.linalg.norm(moves, axis=1), samples=60, clip=0.2, z=2.0, share=count / length)
    assert np.std(found) == pytest.approx(stated, rel=0.12)


def test_noise_above_the_signal_is_refused_in_words():
    not_drowned(0.01, -0.02)
    for noise, signal in ((0.03, 0.02), (math.nan, 0.02)):
        with pytest.raises(SettlementError, match="larger epsilon") as caught:
            not_drowned(noise, signal)
        assert caught.value.code == "drowned"
