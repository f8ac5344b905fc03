"""Partitions: disjoint, complete, never below the minimum, the same for the same generator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.data import restore, save, split
from fedmerit.errors import DataError


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


labels = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(np.array)


@given(labels, st.integers(1, 9), st.integers(1, 5), st.floats(1e-6, 100), st.integers(0, 99))
def test_iid_and_dirichlet_deal_every_sample_once_and_meet_the_minimum(y, clients, minimum, mu, seed):
    for scheme in ("iid", "dirichlet"):
        if clients * minimum > len(y):
            with pytest.raises(DataError, match="samples, got"):
                split(y, clients, scheme, rng=generator(seed), mu=mu, minimum=minimum)
            continue
        parts = split(y, clients, scheme, rng=generator(seed), mu=mu, minimum=minimum)
        again = split(y, clients, scheme, rng=generator(seed), mu=mu, minimum=minimum)
        assert len(parts) == clients
        assert min(map(len, parts)) >= minimum
        assert sorted(np.concatenate(parts)) == list(range(len(y)))
        assert all(np.array_equal(part, np.sort(part)) and part.dtype == np.int64 for part in parts)
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(map(len, split(np.zeros(11, int), 4, rng=generator()))) == [2, 3, 3, 3]


def test_mu_controls_how_uneven_the_classes_are():
    y = np.repeat(np.arange(10), 200)

    def concentration(mu: float) -> float:
        """Mean share of a client's most frequent class."""
        parts = split(y, 5, "dirichlet", rng=generator(), mu=mu)
        return float(np.mean([np.bincount(y[part]).max() / len(part) for part in parts]))

    assert concentration(0.05) > 0.4 > concentration(0.5) > concentration(1000) > 0.1
    assert concentration(1000) < 0.13


def test_dirichlet_proportions_have_the_right_mean_and_variance():
    # The share of a class at one client is Beta(mu, (N-1) mu): mean 1/N, variance (N-1) / (N^2 (N mu + 1)).
    n, mu, y = 4, 0.5, np.zeros(1000, int)
    rng = generator()
    shares = [len(split(y, n, "dirichlet", rng=rng, mu=mu)[0]) / len(y) for _ in range(600)]
    assert np.mean(shares) == pytest.approx(1 / n, abs=0.04)
    assert np.var(shares) == pytest.approx((n - 1) / (n**2 * (n * mu + 1)), abs=0.015)


def test_dirichlet_repairs_what_redrawing_cannot_reach():
    parts = split(np.zeros(30, int), 3, "dirichlet", rng=generator(), mu=1e-6, minimum=10)
    assert [len(part) for part in parts] == [10, 10, 10]


def test_another_seed_gives_another_split():
    y = np.arange(100) % 10
    a, b = (split(y, 3, "dirichlet", rng=generator(seed)) for seed in (0, 1))
    assert not all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


def test_groups_become_clients_in_sorted_order():
    groups = np.array(["b", "a", "c", "a", "b", "a"])
    parts = split(np.zeros(6, int), scheme="group", groups=groups, rng=generator())
    assert [part.tolist() for part in parts] == [[1, 3, 5], [0, 4], [2]]


def test_more_groups_than_clients_are_dealt_whole_and_evenly():
    groups = np.repeat([0, 1, 2, 3], [5, 4, 3, 2])
    parts = split(np.zeros(14, int), 2, "group", groups=groups, rng=generator())
    assert [sorted(set(groups[part].tolist())) for part in parts] == [[0, 3], [1, 2]]


def test_sizes_as_counts_and_as_fractions():
    y = np.zeros(20, int)
    assert [len(p) for p in split(y, 3, "sizes", sizes=[2, 3, 4], rng=generator())] == [2, 3, 4]
    assert [len(p) for p in split(y, scheme="sizes", sizes=[0.5, 0.25, 0.25], rng=generator())] == [10, 5, 5]
    assert [len(p) for p in split(y, 1, "sizes", sizes=[1.0], rng=generator())] == [20]
    parts = split(y, 3, "sizes", sizes=[1 / 3] * 3, rng=generator())
    assert sorted(np.concatenate(parts)) == list(range(20))


@pytest.mark.parametrize("name", ["parts.json", "parts.npz"])
def test_a_saved_partition_comes_back(tmp_path: Path, name: str):
    y = np.arange(50) % 5
    parts = split(y, 12, "dirichlet", rng=generator())
    save(tmp_path / name, parts, samples=len(y))
    for clients in (None, 12):
        back = split(y, clients, "file", file=tmp_path / name, rng=generator(7))
        assert all(np.array_equal(a, b) for a, b in zip(parts, back, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"scheme": "random"},
            "partition.scheme: expected one of iid, dirichlet, group, sizes, file, got 'random'",
        ),
        ({"clients": 11}, "partition.minimum: 11 clients with at least 1 each need 11 samples, got 10"),
        (
            {"clients": 3, "minimum": 4},
            "partition.minimum: 3 clients with at least 4 each need 12 samples, got 10",
        ),
        ({"clients": 0}, "partition.clients: expected at least 1 client, got 0"),
        ({"clients": None}, "partition.clients: scheme 'iid' needs the number of clients"),
        ({"minimum": 0}, "partition.minimum: expected at least 1 sample per client, got 0"),
        ({"scheme": "dirichlet", "mu": 0}, "partition.mu: expected a positive number, at most 1e+100, got 0"),
        (
            {"scheme": "dirichlet", "mu": -1.5},
            "partition.mu: expected a positive number, at most 1e+100, got -1.5",
        ),
        (
            {"scheme": "dirichlet", "mu": float("nan")},
            "partition.mu: expected a positive number, at most 1e+100, got nan",
        ),
        (
            {"scheme": "dirichlet", "mu": float("inf")},
            "partition.mu: expected a positive number, at most 1e+100, got inf",
        ),
        (
            {"scheme": "dirichlet", "mu": 1e308},
            "partition.mu: expected a positive number, at most 1e+100, got 1e+308",
        ),
        ({"scheme": "group"}, "partition.scheme: 'group' needs groups (this dataset has none)"),
        (
            {"scheme": "group", "groups": np.zeros(9)},
            "expected 10 group values, one per sample, got shape (9,)",
        ),
        (
            {"scheme": "group", "groups": np.arange(10) % 2},
            "partition.clients: 3 clients but only 2 groups: 0, 1",
        ),
        ({"scheme": "sizes"}, "partition.scheme: 'sizes' needs sizes"),
        ({"scheme": "sizes", "sizes": [1, 2]}, "partition.sizes: expected 3 sizes, one per client, got 2"),
        (
            {"scheme": "sizes", "sizes": [1, 0, 2]},
            "partition.sizes: size of client 1 must be positive, got 0",
        ),
        (
            {"scheme": "sizes", "sizes": [4, 4, 4]},
            "partition.sizes: they add up to 12 samples, the data has 10",
        ),
        (
            {"scheme": "sizes", "sizes": [0.5, 0.5, 0.5]},
            "partition.sizes: sizes that are not all integers are fractions with a sum of at most 1, got 1.5",
        ),
        (
            {"scheme": "sizes", "sizes": [0.5, 0.4, 0.01]},
            "partition.minimum: client 2 would hold 0 samples, expected at least 1",
        ),
        ({"scheme": "file"}, "partition.scheme: 'file' needs file"),
        ({"scheme": "file", "file": "absent.json"}, "absent.json: no such file"),
        ({"scheme": "file", "file": "parts.txt"}, "parts.txt: a partition file ends in .json or .npz"),
    ],
)
def test_what_cannot_be_dealt_is_said(settings, message):
    with pytest.raises(DataError) as caught:
        split(np.zeros(10, int), **{"clients": 3, "rng": generator(), **settings})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"samples": 10, "clients": [[0, 1], [1, 2]]}', "sample 1 is held by clients 0 and 1"),
        ('{"samples": 10, "clients": [[0, 0], [2]]}', "sample 0 is held by clients 0 and 0"),
        ('{"samples": 10, "clients": [[0], [10]]}', "client 1 holds sample 10, outside 0 .. 9"),
        ('{"samples": 10, "clients": [[-1], [1]]}', "client 0 holds sample -1, outside 0 .. 9"),
        ('{"samples": 10, "clients": [[0.5], [1]]}', "client 0 must be a list of integers"),
        ('{"samples": 9, "clients": [[0], [1]]}', "made for 9 samples, the dataset has 10"),
        ('{"samples": 10, "clients": [[0], [1], [2]]}', "holds 3 clients, expected 2"),
        ('{"clients": [[0], [1]]}', "not a partition file: samples is missing"),
        ('{"samples": 10, "clients": [[0]', "not a partition file: Expecting"),
        ("[1, 2]", "not a partition file: list indices"),
    ],
)
def test_damaged_partition_files_are_refused(tmp_path: Path, content: str, message: str):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(DataError, match=r"p\.json: ") as caught:
        split(np.zeros(10, int), 2, "file", file=tmp_path / "p.json", rng=generator())
    assert message in str(caught.value)


def test_a_client_without_samples_in_the_file_is_refused(tmp_path: Path):
    (tmp_path / "p.json").write_text(json.dumps({"samples": 3, "clients": [[0], []]}))
    with pytest.raises(DataError, match="client 1 would hold 0 samples"):
        split(np.zeros(3, int), 2, "file", file=tmp_path / "p.json", rng=generator())


def test_a_truncated_npz_is_refused(tmp_path: Path):
    file = tmp_path / "p.npz"
    save(file, [np.arange(3)], samples=3)
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DataError, match=r"p\.npz: cannot be read as \.npz"):
        restore(file)
