"""Corruptions do what they say to the clients they name, and to nobody else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.data import apply, label_flip, label_noise, ramp
from fedmerit.errors import DataError

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


def test_flip_duplicate_and_free_riders():
    flipped, copy, other, rider = corrupt(label_flip=["A"], duplicate={"B": "A"}, free_rider={"D": "stale"})
    assert np.array_equal(flipped.y, 9 - Y[PARTS[0]])
    assert np.array_equal(copy.x, flipped.x)
    assert np.array_equal(copy.y, flipped.y)
    assert copy.corruption == "data of A"
    assert np.array_equal(other.y, Y[PARTS[2]])
    assert (rider.behaviour, rider.corruption) == ("stale", "free rider: stale")
    assert np.array_equal(rider.y, Y[PARTS[3]])


def test_a_copy_of_a_free_rider_is_honest():
    copy = corrupt(free_rider={"A": "zero"}, duplicate={"B": "A"})[1]
    assert copy.behaviour == "honest"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_noise": {"A": 1.5}}, "corruption.label_noise.A: expected a rate in [0, 1], got 1.5"),
        ({"label_noise": {"A": -0.1}}, "corruption.label_noise.A: expected a rate in [0, 1], got -0.1"),
        (
            {"label_noise": {"A": float("nan")}},
            "corruption.label_noise.A: expected a rate in [0, 1], got nan",
        ),
        ({"label_noise": {"A": "half"}}, "corruption.label_noise.A: expected a rate in [0, 1], got 'half'"),
        ({"label_noise": {"A": True}}, "corruption.label_noise.A: expected a rate in [0, 1], got True"),
        (
            {"label_noise": "hill"},
            "corruption.label_noise: expected \"ramp\" or a rate by client, got 'hill'",
        ),
        ({"label_noise": [0.5]}, "corruption.label_noise: expected a value by client name, got [0.5]"),
        ({"label_noise": {"E": 0}}, "corruption.label_noise: no client 'E', expected one of A, B, C, D"),
        ({"label_flip": ["E"]}, "corruption.label_flip: no client 'E', expected one of A, B, C, D"),
        ({"label_flip": "A"}, "corruption.label_flip: expected a list of client names, got the string 'A'"),
        (
            {"label_flip": ["A", "A"]},
            "corruption.label_flip: client 'A' is in label_flip too: one corruption each",
        ),
        ({"free_rider": {"A": "lazy"}}, "corruption.free_rider.A: expected zero, noise, stale, got 'lazy'"),
        (
            {"free_rider": {"A": "honest"}},
            "corruption.free_rider.A: expected zero, noise, stale, got 'honest'",
        ),
        ({"free_rider": ["A"]}, "corruption.free_rider: expected a value by client name, got ['A']"),
        ({"duplicate": {"A": "E"}}, "corruption.duplicate.A: no client 'E', expected one of A, B, C, D"),
        ({"duplicate": {"A": "A"}}, "corruption.duplicate: client 'A' cannot copy itself"),
        (
            {"duplicate": {"A": "B", "B": "C"}},
            "corruption.duplicate: client 'A' cannot copy 'B', which is a duplicate too",
        ),
        (
            {"label_noise": {"A": 0.5}, "label_flip": ["A"]},
            "corruption.label_flip: client 'A' is in label_noise too: one corruption each",
        ),
        (
            {"label_noise": "ramp", "free_rider": {"B": "zero"}},
            "corruption.free_rider: client 'B' is in label_noise too: one corruption each",
        ),
    ],
)
def test_impossible_settings_are_named(settings, message):
    with pytest.raises(DataError) as caught:
        corrupt(**settings)
    assert str(caught.value) == message


def test_other_bad_input():
    with pytest.raises(DataError, match="label noise: expected a rate"):
        label_noise(Y, 2, 10, np.random.default_rng(0))
    with pytest.raises(DataError, match="label_noise: a ramp needs at least 2 clients, got 1"):
        ramp(1)
    with pytest.raises(DataError, match="3 parts for 4 clients"):
        apply(X, Y, PARTS[:3], NAMES, 10, np.random.default_rng(0))
