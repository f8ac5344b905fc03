"""Partitions are disjoint, complete and repeatable; corruptions do what they say to whom they name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.data.partitions import apply, by_group, label_flip, members, restore, save, split
from fedmerit.errors import DataError
from fedmerit.notes import two_spellings
from fedmerit.settings import Corruption
from raising import raises


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


labels = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(np.array)


@given(labels, st.integers(1, 9), st.integers(1, 5), st.floats(1e-6, 100), st.integers(0, 99))
def test_iid_and_dirichlet_deal_every_sample_once_and_meet_the_minimum(y, clients, minimum, mu, seed):
    for scheme in ("iid", "dirichlet"):
        if clients * minimum > len(y):
            with raises(DataError, setting="partition.clients"):
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


def test_groups_become_clients_in_natural_order():
    groups = np.array(["b", "a", "c", "a", "b", "a"])
    parts = split(np.zeros(6, int), scheme="group", groups=groups, rng=generator())
    assert [part.tolist() for part in parts] == [[1, 3, 5], [0, 4], [2]]
    groups = np.array(["Site 10", "Site 2", "Site 1", "Site 02", "site"])
    assert list(by_group(groups)) == ["Site 1", "Site 02", "Site 2", "Site 10", "site"]
    for kind in ("int16", "uint8"):
        assert list(by_group(np.array([10, 9, 100, 9], kind))) == ["9", "10", "100"]
    assert list(by_group(np.array([3, -20, -3, 0]))) == ["-20", "-3", "0", "3"]
    groups = np.array(["Abbey", "Elm / North", "Abbey", "a\\b"])
    assert list(by_group(groups)) == ["Abbey", "Elm - North", "a-b"]
    assert "'Elm / North' is 'Elm - North'" in members("group", groups=groups)[1][0]


NAMES = st.text(st.sampled_from("ab 0127-_.é"), min_size=1, max_size=5).filter(
    lambda name: name == name.strip() and name not in (".", "..")
)
GROUPS = st.lists(NAMES, min_size=1, max_size=40).filter(lambda names: two_spellings(names) is None)


@given(GROUPS | st.lists(st.integers(-20, 20), min_size=1, max_size=40), st.data())
def test_the_samples_of_a_member_are_those_whose_group_is_its_name(listed, data):
    groups, y = np.array(listed), np.zeros(len(listed), int)
    there = {str(value) for value in listed}
    everybody, notes = members("group", groups=groups)
    assert set(everybody) == there
    assert len(everybody) == len(there)
    assert notes == ()
    chosen = data.draw(st.permutations(sorted(there)).flatmap(lambda all_: st.integers(0, len(all_)).map(
        lambda count: all_[:count]
    )))  # fmt: skip
    names, notes = members("group", chosen, groups=groups)
    assert names == (tuple(chosen) or everybody)
    parts = split(y, scheme="group", groups=groups, names=chosen, rng=generator())
    for name, part in zip(names, parts, strict=True):
        assert part.tolist() == [i for i, value in enumerate(listed) if str(value) == name]
    left = there - set(names)
    assert len(notes) == bool(left)
    unused = sum(str(value) in left for value in listed)
    for note in notes:
        start = f"partition.names leaves out {len(left)} of the {len(there)} groups of the data, {unused} of "
        assert note.startswith(f"{start}{len(listed)} training samples: ")


@pytest.mark.parametrize(
    ("groups", "settings", "setting", "told"),
    [
        ("ABCC", {"names": ["A", "C", "D"]}, "names", "'D' not among the groups of the data"),
        ("ABCD", {"clients": 3}, "clients", "expected 4, as many as there are groups of the data (A, B,"),
        (["Ulm", "ULM", "B", "C"], {}, "scheme", "names that nobody mixes up, got 'ULM' and 'Ulm'"),
        (["a/b", "A-B", "B", "C"], {}, "scheme", "names that nobody mixes up"),
        (["a/b", "a-b", "B", "C"], {}, "scheme", "groups 'a-b', 'a/b' would be one member"),
        (["", "A", "B", "C"], {}, "scheme", "must be 1 to 64 printable characters, got ''"),
        ("ABCC", {"names": ["A", "B", "A"]}, "names", "expected different names, got A, B, A"),
        ("ABCC", {"clients": 3, "names": ["A", "B"]}, "names", "expected 3 names, got A, B"),
        ("ABCC", {"minimum": 2, "names": ["C", "A"]}, "clients", "A would hold 1 samples, expected at le"),
    ],
)
def test_groups_that_cannot_be_members_as_asked(groups, settings, setting, told):
    with raises(DataError, setting=f"partition.{setting}") as caught:
        split(np.zeros(4, int), scheme="group", groups=np.array([*groups]), rng=generator(), **settings)
    assert told in str(caught.value)


def test_a_message_about_very_many_groups_stays_short():
    with raises(DataError, setting="partition.clients") as caught:
        members("group", clients=3, groups=np.array([f"g{i}" for i in range(5000)]))
    assert len(str(caught.value)) < 600


def test_a_saved_partition_is_read_by_name(tmp_path: Path):
    parts, y = [np.array([0, 1]), np.array([4]), np.array([3, 2])], np.zeros(5, int)
    save(tmp_path / "p.json", parts, 5, names=["Ulm", "Bonn", "Köln"])
    assert restore(tmp_path / "p.json")[1] == ("Ulm", "Bonn", "Köln")
    assert members("file", file=tmp_path / "p.json") == (("Ulm", "Bonn", "Köln"), ())
    dealt = {"scheme": "file", "file": tmp_path / "p.json", "rng": generator()}
    assert [part.tolist() for part in split(y, **dealt)] == [[0, 1], [4], [2, 3]]
    turned = split(y, 3, names=["Köln", "Ulm", "Bonn"], **dealt)
    assert [part.tolist() for part in turned] == [[2, 3], [0, 1], [4]]
    for names in (["Köln", "Ulm", "Bern"], ["Köln", "Ulm"], ["Köln", "Ulm", "Bonn", "Bern"]):
        with pytest.raises(DataError) as caught:
            split(y, names=names, **dealt)
        assert str(caught.value) == (
            f"partition.names: expected the names in {tmp_path / 'p.json'}; asked for: {', '.join(names)}; "
            "in the file: Ulm, Bonn, Köln"
        )


def test_a_partition_without_names_says_that_nobody_checks_them(tmp_path: Path):
    save(tmp_path / "p.json", [np.array([0, 1]), np.array([4]), np.array([3])], 5)
    assert restore(tmp_path / "p.json")[1] == ()
    dealt = split(np.zeros(5, int), 3, "file", file=tmp_path / "p.json", rng=generator())
    assert [part.tolist() for part in dealt] == [[0, 1], [4], [3]]
    there, (note,) = members("file", file=tmp_path / "p.json")
    assert there == ("client-0", "client-1", "client-2")
    assert note.endswith("has no names: client-0, client-1, ... are given to its parts in order, unchecked")
    assert members("file", there, file=tmp_path / "p.json") == (there, (note,))
    names, notes = members("file", ["Ulm", "Bonn", "Köln"], file=tmp_path / "p.json")
    assert names == ("Ulm", "Bonn", "Köln")
    assert [note.partition("p.json ")[2] for note in notes] == [
        "has no names: partition.names are given to its parts in order, unchecked"
    ]
    for asked in ({"names": ["Ulm", "Bonn"]}, {"clients": 2}):
        with raises(DataError, setting="partition.scheme"):
            split(np.zeros(5, int), scheme="file", file=tmp_path / "p.json", rng=generator(), **asked)


@pytest.mark.parametrize(
    "names", ['["a"]', '["a", "a"]', '["a", 3]', '["a", "A"]', '{"a": 0, "b": 1}', '"ab"', '["a", "b/"]']
)
def test_names_of_a_partition_file_are_checked(tmp_path: Path, names: str):
    (tmp_path / "p.json").write_text(f'{{"samples": 3, "clients": [[0], [1]], "names": {names}}}')
    with pytest.raises(DataError, match=r"p\.json: names: .*, got |p\.json: names: 'b/' cannot be"):
        restore(tmp_path / "p.json")
    with pytest.raises(DataError, match="names: expected 2 different names, one per client, got"):
        save(tmp_path / "q.json", [np.array([0]), np.array([1])], 3, names=["a"])


def test_sizes_as_counts_and_as_fractions():
    y = np.zeros(20, int)
    assert [len(p) for p in split(y, 3, "sizes", sizes=[2, 3, 4], rng=generator())] == [2, 3, 4]
    assert [len(p) for p in split(y, scheme="sizes", sizes=[0.5, 0.25, 0.25], rng=generator())] == [10, 5, 5]
    assert [len(p) for p in split(y, 1, "sizes", sizes=[1.0], rng=generator())] == [20]
    parts = split(y, 3, "sizes", sizes=[1 / 3] * 3, rng=generator())
    assert sorted(np.concatenate(parts)) == list(range(20))


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"scheme": "random"}, "partition.scheme"),
        ({"clients": 11}, "partition.clients"),
        ({"clients": 3, "minimum": 4}, "partition.clients"),
        ({"clients": 0}, "partition.clients"),
        ({"clients": None}, "partition.clients"),
        *(({"scheme": "dirichlet", "mu": mu}, "partition.mu") for mu in (0, -1.5, np.nan, np.inf, 1e308)),
        ({"scheme": "group"}, "partition.scheme"),
        ({"scheme": "group", "groups": np.arange(10) % 2}, "partition.clients"),
        ({"scheme": "sizes"}, "partition.sizes"),
        ({"scheme": "sizes", "sizes": [1, 2]}, "partition.sizes"),
        ({"scheme": "sizes", "sizes": [1, 0, 2]}, "partition.sizes"),
        ({"scheme": "sizes", "sizes": [4, 4, 4]}, "partition.sizes"),
        ({"scheme": "sizes", "sizes": [0.5, 0.5, 0.5]}, "partition.sizes"),
        ({"scheme": "sizes", "sizes": [0.5, 0.4, 0.01]}, "partition.clients"),
        ({"scheme": "file"}, "partition.scheme"),
        ({"scheme": "file", "file": "absent.json"}, ""),
    ],
)
def test_what_cannot_be_dealt_is_refused(settings, setting):
    with raises(DataError, setting=setting):
        split(np.zeros(10, int), **{"clients": 3, "rng": generator(), **settings})


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
        ('{"samples": "10", "clients": [[0], [1]]}', "samples must be a whole number of at least 1, got '10"),
        ('{"samples": null, "clients": [[0], [1]]}', "samples must be a whole number of at least 1, got No"),
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
    with raises(DataError, setting="partition.clients"):
        split(np.zeros(3, int), 2, "file", file=tmp_path / "p.json", rng=generator())


# ---------------------------------------------------------------------------------------------- corruptions


FOUR = ["A", "B", "C", "D"]
Y = np.arange(4000) % 10
X = np.arange(4000, dtype=np.float32).reshape(-1, 1, 1, 1)
PARTS = np.split(np.arange(4000), 4)


def corrupt(**settings):
    clients = apply(X, Y, PARTS, FOUR, 10, np.random.default_rng(0), Corruption(**settings))
    assert [client.name for client in clients] == FOUR
    return clients


def wrong(client) -> float:
    """Share of labels that are not the sample's own (sample i has label i mod 10)."""
    return float(np.mean(client.y != client.x.reshape(-1) % 10))


def test_without_settings_everybody_keeps_what_was_dealt():
    for client, part in zip(corrupt(), PARTS, strict=True):
        assert np.array_equal(client.x, X[part])
        assert np.array_equal(client.y, Y[part])
        assert client.behaviour == "honest"


def test_label_noise_hits_the_stated_share_and_leaves_the_input_alone():
    clients = corrupt(label_noise={"B": 0.5, "C": 1.0, "D": 0})
    # A replaced label is right again by chance once in 10 classes: rate * 0.9 end up wrong.
    assert [wrong(client) for client in clients] == pytest.approx([0, 0.45, 0.9, 0], abs=0.03)
    assert np.array_equal(Y, np.arange(4000) % 10)
    assert clients[1].y.dtype == np.int64


def test_noise_of_one_client_does_not_depend_on_the_others():
    one, both = corrupt(label_noise={"C": 0.5})[2], corrupt(label_noise={"A": 0.3, "C": 0.5})[2]
    assert np.array_equal(one.y, both.y)


def test_the_ramp_goes_from_clean_to_random():
    assert [wrong(client) for client in corrupt(label_noise="ramp")] == pytest.approx(
        [0, 0.3, 0.6, 0.9], abs=0.05
    )


@given(st.lists(st.integers(0, 6), max_size=20).map(lambda v: np.array(v, dtype=np.int64)))
def test_flipping_twice_is_no_change(y):
    flipped = label_flip(y, 7)
    assert np.array_equal(label_flip(flipped, 7), y)
    assert np.array_equal(flipped + y, np.full(len(y), 6))


def test_flips_and_free_riders():
    flipped, _, other, rider = corrupt(label_flip=["A"], free_rider={"D": "stale"})
    assert np.array_equal(flipped.y, 9 - Y[PARTS[0]])
    assert np.array_equal(other.y, Y[PARTS[2]])
    assert rider.behaviour == "stale"
    assert np.array_equal(rider.y, Y[PARTS[3]])


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"label_noise": {"A": 1.5}}, "label_noise"),
        ({"label_noise": {"A": -0.1}}, "label_noise"),
        ({"label_noise": {"A": float("nan")}}, "label_noise"),
        ({"label_flip": ["A", "A"]}, "label_flip"),
        ({"label_noise": {"A": 0.5}, "label_flip": ["A"]}, "label_flip"),
        ({"label_noise": "ramp", "free_rider": {"B": "zero"}}, "free_rider"),
    ],
)
def test_impossible_settings_are_named(settings, setting):
    with raises(DataError, setting=f"corruption.{setting}"):
        corrupt(**settings)
