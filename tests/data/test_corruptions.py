"""Corruptions do what they say to the clients they name, and to nobody else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.data.partitions import apply, label_flip, ramp
from fedmerit.errors import DataError
from refusals import refused

NAMES = ["A", "B", "C", "D"]
Y = np.arange(4000) % 10
X = np.arange(4000, dtype=np.float32).reshape(-1, 1, 1, 1)
PARTS = np.split(np.arange(4000), 4)


def corrupt(**settings):
    clients = apply(X, Y, PARTS, NAMES, 10, np.random.default_rng(0), **settings)
    assert [client.name for client in clients] == NAMES
    return clients


def wrong(client) -> float:
    """Share of labels that are not the sample's own (sample i has label i mod 10)."""
    return float(np.mean(client.y != client.x.reshape(-1) % 10))


def test_without_settings_everybody_keeps_what_was_dealt():
    for client, part in zip(corrupt(), PARTS, strict=True):
        assert np.array_equal(client.x, X[part])
        assert np.array_equal(client.y, Y[part])
        assert (client.behaviour, client.corruption) == ("honest", "")


def test_label_noise_hits_the_stated_share_and_leaves_the_input_alone():
    clients = corrupt(label_noise={"B": 0.5, "C": 1.0, "D": 0})
    # A replaced label is right again by chance once in 10 classes: rate * 0.9 end up wrong.
    assert [wrong(client) for client in clients] == pytest.approx([0, 0.45, 0.9, 0], abs=0.03)
    assert np.array_equal(Y, np.arange(4000) % 10)
    assert clients[1].corruption == "label noise 0.5"
    assert clients[1].y.dtype == np.int64


def test_noise_of_one_client_does_not_depend_on_the_others():
    one, both = corrupt(label_noise={"C": 0.5})[2], corrupt(label_noise={"A": 0.3, "C": 0.5})[2]
    assert np.array_equal(one.y, both.y)


def test_the_ramp_goes_from_clean_to_random():
    assert [wrong(client) for client in corrupt(label_noise="ramp")] == pytest.approx(
        [0, 0.3, 0.6, 0.9], abs=0.05
    )
    assert ramp(2) == [0.0, 1.0]


@given(st.lists(st.integers(0, 6), max_size=20).map(lambda v: np.array(v, dtype=np.int64)))
def test_flipping_twice_is_no_change(y):
    flipped = label_flip(y, 7)
    assert np.array_equal(label_flip(flipped, 7), y)
    assert np.array_equal(flipped + y, np.full(len(y), 6))


def test_flips_and_free_riders():
    flipped, _, other, rider = corrupt(label_flip=["A"], free_rider={"D": "stale"})
    assert np.array_equal(flipped.y, 9 - Y[PARTS[0]])
    assert np.array_equal(other.y, Y[PARTS[2]])
    assert (rider.behaviour, rider.corruption) == ("stale", "free rider: stale")
    assert np.array_equal(rider.y, Y[PARTS[3]])


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"label_noise": {"A": 1.5}}, "label_noise"),
        ({"label_noise": {"A": -0.1}}, "label_noise"),
        ({"label_noise": {"A": float("nan")}}, "label_noise"),
        ({"label_flip": ["A", "A"]}, "label_flip"),
        ({"free_rider": {"A": "lazy"}}, "free_rider"),
        ({"free_rider": {"A": "honest"}}, "free_rider"),
        ({"label_noise": {"A": 0.5}, "label_flip": ["A"]}, "label_flip"),
        ({"label_noise": "ramp", "free_rider": {"B": "zero"}}, "free_rider"),
    ],
)
def test_impossible_settings_are_named(settings, setting):
    with refused(DataError, setting=f"corruption.{setting}"):
        corrupt(**settings)
