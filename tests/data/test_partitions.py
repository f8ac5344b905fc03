"""Partitions: disjoint, complete, never below the minimum, the same for the same generator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.data import by_group, members, restore, save, saved_names, split
from fedmerit.data.partitions import NO_GROUPS
from fedmerit.errors import DataError
from fedmerit.scoring.validate import two_spellings


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


def test_groups_become_clients_in_natural_order():
    groups = np.array(["b", "a", "c", "a", "b", "a"])
    parts = split(np.zeros(6, int), scheme="group", groups=groups, rng=generator())
    assert [part.tolist() for part in parts] == [[1, 3, 5], [0, 4], [2]]
    groups = np.array(["Site 10", "Site 2", "Site 1", "Site 02", "site"])
    assert list(by_group(groups)) == ["Site 1", "Site 02", "Site 2", "Site 10", "site"]
    for kind in ("int16", "uint8"):
        assert list(by_group(np.array([10, 9, 100, 9], kind))) == ["9", "10", "100"]
    assert list(by_group(np.array([3, -20, -3, 0]))) == ["-20", "-3", "0", "3"]


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


@given(GROUPS, st.data())
def test_merged_groups_are_one_member_and_the_others_stay(listed, data):
    groups, there = np.array(listed), sorted(set(listed))
    some = data.draw(st.lists(st.sampled_from(there), unique=True, min_size=1))
    merge = {"Union": some}
    parts = split(np.zeros(len(listed), int), scheme="group", groups=groups, merge=merge, rng=generator())
    names, _ = members("group", groups=groups, merge=merge)
    assert set(names) == {"Union", *set(there) - set(some)}
    for name, part in zip(names, parts, strict=True):
        wanted = some if name == "Union" else [name]
        assert part.tolist() == [i for i, value in enumerate(listed) if value in wanted]


def test_merge_joins_spellings_and_gives_names_that_can_be_names():
    groups = np.array(["Ulm", "ULM", "", "Ulm"])
    held = by_group(groups, {"Ulm": ["Ulm", "ULM"], "unknown": [""]})
    assert {name: part.tolist() for name, part in held.items()} == {"Ulm": [0, 1, 3], "unknown": [2]}


@pytest.mark.parametrize(
    ("groups", "settings", "message"),
    [
        (
            ["A", "B", "C", "C"],
            {"names": ["A", "C", "D"]},
            "partition.names: 'D' not among the groups of the data; asked for: A, C, D; "
            "groups of the data: A, B, C",
        ),
        (
            ["A", "B", "C", "C"],
            {"names": ["A", "B"], "merge": {"North": ["A", "B"]}},
            "partition.names: 'A', 'B' not among the groups of the data after partition.merge; "
            "asked for: A, B; groups of the data after partition.merge: C, North",
        ),
        (
            ["A", "B", "C", "D"],
            {"clients": 3},
            "partition.clients: expected 4, as many as there are groups of the data (A, B, C, D), got 3: "
            "leave it out, choose groups in partition.names, or put groups together in partition.merge",
        ),
        (
            ["A", "B", "C", "D"],
            {"clients": 4, "merge": {"North": ["A", "B"]}},
            "partition.clients: expected 3, as many as there are groups of the data after partition.merge "
            "(C, D, North), got 4: leave it out, choose groups in partition.names, or put groups together in "
            "partition.merge",
        ),
        (
            ["A", "B", "C", "D"],
            {"merge": {"North": ["A", "E"]}},
            "partition.merge: 'E' not among the groups of the data; asked for: A, E; "
            "groups of the data: A, B, C, D",
        ),
        (
            ["A", "B", "C", "D"],
            {"merge": {"A": ["B"], "B": ["A"]}},
            "partition.merge.A: the data has a group of that name, which is not one of those that are "
            "merged into it: B",
        ),
        (
            ["Ulm", "ULM", "B", "C"],
            {},
            "partition.scheme: a group of the data is a member, and its value the name: expected names that "
            "nobody mixes up, got 'ULM' and 'Ulm', which differ only in case, blanks or letters that look "
            "the same; partition.merge can make groups one or name them anew",
        ),
        (
            ["", "A", "B", "C"],
            {},
            "partition.scheme: a group of the data is a member, and its value the name: a member's name must "
            "be 1 to 64 printable characters, got ''; partition.merge can make groups one or name them anew",
        ),
        (
            ["A", "B", "C", "C"],
            {"names": ["A", "B", "A"]},
            "partition.names: expected different names, got A, B, A",
        ),
        (
            ["A", "B", "C", "C"],
            {"clients": 3, "names": ["A", "B"]},
            "partition.names: expected 3 names, got A, B",
        ),
        (
            ["A", "B", "C", "C"],
            {"minimum": 2, "names": ["C", "A"]},
            "partition.minimum: A would hold 1 samples, expected at least 2",
        ),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_members_as_asked(groups, settings, message):
    with pytest.raises(DataError) as caught:
        split(np.zeros(4, int), scheme="group", groups=np.array(groups), rng=generator(), **settings)
    assert str(caught.value) == message


def test_a_message_about_very_many_groups_stays_short():
    with pytest.raises(DataError, match=r"g0, g1, .*g39 and 4960 more\), got 3") as caught:
        members("group", clients=3, groups=np.array([f"g{i}" for i in range(5000)]))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["parts.json", "parts.npz"])
def test_a_saved_partition_is_read_by_name(tmp_path: Path, name: str):
    parts, y = [np.array([0, 1]), np.array([4]), np.array([3, 2])], np.zeros(5, int)
    save(tmp_path / name, parts, 5, names=["Ulm", "Bonn", "Köln"])
    assert saved_names(tmp_path / name) == ("Ulm", "Bonn", "Köln")
    assert members("file", file=tmp_path / name) == (("Ulm", "Bonn", "Köln"), ())
    dealt = {"scheme": "file", "file": tmp_path / name, "rng": generator()}
    assert [part.tolist() for part in split(y, **dealt)] == [[0, 1], [4], [2, 3]]
    turned = split(y, 3, names=["Köln", "Ulm", "Bonn"], **dealt)
    assert [part.tolist() for part in turned] == [[2, 3], [0, 1], [4]]
    for names in (["Köln", "Ulm", "Bern"], ["Köln", "Ulm"], ["Köln", "Ulm", "Bonn", "Bern"]):
        with pytest.raises(DataError) as caught:
            split(y, names=names, **dealt)
        assert str(caught.value) == (
            f"partition.names: expected the names in {tmp_path / name}; asked for: {', '.join(names)}; "
            "in the file: Ulm, Bonn, Köln"
        )


@pytest.mark.parametrize("name", ["parts.json", "parts.npz"])
def test_a_partition_without_names_says_that_nobody_checks_them(tmp_path: Path, name: str):
    save(tmp_path / name, [np.array([0, 1]), np.array([4]), np.array([3])], 5)
    assert saved_names(tmp_path / name) == ()
    there, (note,) = members("file", file=tmp_path / name)
    assert there == ("client-0", "client-1", "client-2")
    assert note.endswith("has no names: client-0, client-1, ... are given to its parts in order, unchecked")
    assert members("file", there, file=tmp_path / name) == (there, (note,))
    names, notes = members("file", ["Ulm", "Bonn", "Köln"], file=tmp_path / name)
    assert names == ("Ulm", "Bonn", "Köln")
    assert notes == (
        f"partition.file: {tmp_path / name} has no names: partition.names are given to its parts in order, "
        "unchecked",
    )
    for asked in ({"names": ["Ulm", "Bonn"]}, {"clients": 2}):
        with pytest.raises(DataError, match="holds 3 clients, expected 2"):
            split(np.zeros(5, int), scheme="file", file=tmp_path / name, rng=generator(), **asked)


@pytest.mark.parametrize(
    "names", ['["a"]', '["a", "a"]', '["a", 3]', '["a", "A"]', '{"a": 0, "b": 1}', '"ab"', '["a", "b/"]']
)
def test_names_of_a_partition_file_are_checked(tmp_path: Path, names: str):
    (tmp_path / "p.json").write_text(f'{{"samples": 3, "clients": [[0], [1]], "names": {names}}}')
    with pytest.raises(DataError, match=r"p\.json: names: .*, got |p\.json: names: 'b/' cannot be"):
        restore(tmp_path / "p.json")
    with pytest.raises(DataError, match="names: expected 2 different names, one per client, got"):
        save(tmp_path / "q.json", [np.array([0]), np.array([1])], 3, names=["a"])


def test_names_of_sizes_are_in_the_order_they_were_written():
    names, y = ["Ulm", "Bonn", "Köln"], np.zeros(20, int)
    parts = split(y, scheme="sizes", sizes=[2, 3, 4], names=names, rng=generator())
    assert [len(part) for part in parts] == [2, 3, 4]
    with pytest.raises(
        DataError, match=r"^partition\.minimum: Ulm would hold 2 samples, expected at least 3"
    ):
        split(y, scheme="sizes", sizes=[2, 3, 4], names=names, minimum=3, rng=generator())


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
        ({"scheme": "group"}, f"partition.scheme: {NO_GROUPS}"),
        (
            {"scheme": "group", "groups": np.zeros(9)},
            "expected 10 group values, one per sample, got shape (9,)",
        ),
        (
            {"scheme": "group", "groups": np.arange(10) % 2},
            "partition.clients: expected 2, as many as there are groups of the data (0, 1), got 3: leave it "
            "out, choose groups in partition.names, or put groups together in partition.merge",
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
    with pytest.raises(DataError, match="client-1 would hold 0 samples"):
        split(np.zeros(3, int), 2, "file", file=tmp_path / "p.json", rng=generator())


def test_a_truncated_npz_is_refused(tmp_path: Path):
    file = tmp_path / "p.npz"
    save(file, [np.arange(3)], samples=3)
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DataError, match=r"p\.npz: cannot be read as \.npz"):
        restore(file)
