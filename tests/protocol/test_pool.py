"""The test pool: balanced, cut into disjoint slices, and bound by its commitment."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit.data import Dataset, choose_pool
from fedmerit.errors import BindingError, ConfigError, DataError
from fedmerit.protocol.pool import Pool, Slice, apart, least_shown, merkle_climb, merkle_path, merkle_root
from raising import raises

KEY, HASH = bytes(range(32)), "ab" * 32


def dataset(counts=(9, 7, 8), dtype=np.uint8) -> Dataset:
    """Image i is filled with i, so that samples can be told apart."""
    y = np.repeat(np.arange(len(counts)), counts)
    x = np.arange(len(y)).reshape(-1, 1, 1, 1) * np.ones((1, 2, 2, 1))
    classes = tuple("abcdefgh"[: len(counts)])
    train = np.arange(len(counts))
    return Dataset(
        name="toy",
        x_train=np.zeros((len(counts), 2, 2, 1), dtype),
        y_train=train,
        x_test=x.astype(dtype),
        y_test=y,
        classes=classes,
    )


def choose(size: int | str = 12, seed: int = 0, data: Dataset | None = None, **settings) -> Pool:
    settings = {"key": KEY, "utility_hash": HASH, **settings}
    return choose_pool(data or dataset(), size, np.random.default_rng(seed), **settings)


def balanced(y: np.ndarray, classes: int) -> bool:
    counts = np.bincount(y, minlength=classes)
    return bool(counts.max() - counts.min() <= 1)


@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=5),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 99),
)
def test_pool_and_slices_are_balanced_disjoint_and_verify(counts, size, rounds, seed):
    data, least = dataset(counts), min(counts)
    fits = size <= least * len(counts) + sum(count > least for count in counts)
    if not fits or size // rounds < len(counts):
        with pytest.raises(DataError):
            choose(size, seed, data, reveal="per-round", rounds=rounds)
        return
    pool = choose(size, seed, data, reveal="per-round", rounds=rounds)
    assert len(pool) == len(set(pool.indices.tolist())) == size
    assert balanced(pool.y, len(counts))
    slices = [pool.slice(round) for round in range(1, rounds + 1)]
    for round, part in enumerate(slices, 1):
        assert balanced(part.y, len(counts))
        part.verify(pool.commitment, round)
    assert np.array_equal(np.concatenate([part.x for part in slices]), data.x_test[pool.indices])
    assert np.array_equal(np.concatenate([part.y for part in slices]), data.y_test[pool.indices])
    assert len({part.id for part in slices}) == rounds
    assert len({len(part.y) for part in slices}) <= 2


@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=4),
    st.integers(0, 60),
    st.sampled_from([("settled", "end"), ("both", "fixed"), ("both", "per-round")]),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_rounds_and_settlement_have_disjoint_parts_as_balanced_as_the_pool(
    counts, size, how, rounds, blocks, seed
):
    """Also of a pool that is the whole test set: each part has a class in proportion, to within one."""
    (method, reveal), data = how, dataset(counts)
    settings = {"method": method, "reveal": reveal, "rounds": rounds, "blocks": blocks}
    try:
        pool = choose(size, seed, data, **settings)
    except (ConfigError, DataError):
        return
    total, of_class = len(pool), np.bincount(pool.y, minlength=len(counts))
    last = pool.settlement()
    assert len(last.y) == pool.settled == pool.commitment["settled"] == total // (1 + (method == "both"))
    assert len(last.y) >= blocks
    last.verify(pool.commitment, "settlement")
    shown = {}
    for round in range(1, rounds + 1) if method == "both" else ():
        part = pool.slice(round)
        part.verify(pool.commitment, round)
        shown[part.index] = part
        with pytest.raises(BindingError):
            part.verify(pool.commitment, "settlement")
        with pytest.raises(BindingError):
            last.verify(pool.commitment, round)
    with pytest.raises(BindingError):
        last.verify(pool.commitment, 1)
    assert len(shown) == pool.commitment["slices"] - 1
    everything = np.concatenate([*(one.x for one in shown.values()), last.x])
    assert np.array_equal(everything, data.x_test[pool.indices])
    assert len({len(one.y) for one in shown.values()}) <= 2
    for part in (*shown.values(), last):
        here = np.bincount(part.y, minlength=len(counts))
        assert here.min() > 0
        assert np.all(np.abs(here - of_class * len(part.y) / total) < 2)
        assert size == 0 or balanced(part.y, len(counts))
    assert pool.first.id == (shown.get(0) or last).id
    fewest = min((len(one.y) for one in shown.values()), default=0)
    assert least_shown(pool.commitment) == fewest


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=2, max_size=40),
    st.integers(0, 40),
    st.booleans(),
)
def test_copies_of_a_sample_are_all_settled_or_none_is(samples, settled, by_class):
    x, y = (np.array(column) for column in zip(*samples, strict=True))
    order = np.random.default_rng(len(x)).permutation(len(x))
    cut = len(x) - min(settled, len(x))

    def sides(places):
        return [{(int(x[k]), int(y[k])) for k in part} for part in (places[:cut], places[cut:])]

    before = sides(order)
    try:
        found = apart(order, x[:, None], y, len(x) - cut, by_class=by_class)
    except DataError:
        assert before[0] & before[1]
        return
    if not before[0] & before[1]:
        assert np.array_equal(found, order)
    after = sides(found)
    assert not after[0] & after[1]
    assert sorted(found) == sorted(order)
    if by_class:
        assert np.array_equal(y[found], y[order])


@given(st.lists(st.integers(2, 5), max_size=12), st.integers(0, 99))
def test_copies_are_kept_together_wherever_enough_samples_are_there_once(groups, seed):
    """Largest first, to the side with more room: what does not fit there needs more than is left over."""
    once = max(groups, default=1)
    x = np.repeat(np.arange(len(groups) + once), [*groups, *([1] * once)])
    order = np.random.default_rng(seed).permutation(len(x))
    found = apart(order, x[:, None], np.zeros(len(x), int), len(x) // 2, by_class=True)
    cut = len(x) - len(x) // 2
    assert not {*x[found[:cut]]} & {*x[found[cut:]]}


def test_a_pool_of_copies_alone_cannot_be_cut():
    data = dataset((8, 8))
    data = replace(data, x_test=np.zeros_like(data.x_test))
    with pytest.raises(DataError):
        choose(16, 0, data, method="both")
    assert len(choose(16, 0, data, method="settled", reveal="end")) == 16


@pytest.mark.parametrize(
    ("settings", "least", "message"),
    [
        ({"method": "settled", "reveal": "end"}, 3, "for the settlement, each with all 3 classes"),
        ({"method": "settled", "reveal": "end", "blocks": 8}, 8, "and 8 blocks"),
        ({"method": "both"}, 6, "for 1 slices for rounds and a half for the settlement"),
        ({"method": "both", "blocks": 8}, 16, "with scoring.method = 'both'"),
        ({"method": "both", "reveal": "per-round", "rounds": 3}, 17, "for 3 slices for rounds and a half"),
    ],
)
def test_a_pool_that_is_too_small_for_its_parts_says_how_many_samples_it_needs(settings, least, message):
    assert len(choose(least, **settings)) == least
    with raises(ConfigError, setting="data.test_size") as caught:
        choose(least - 1, **settings)
    assert re.search(message, str(caught.value))
    assert f"expected at least {least} samples" in str(caught.value)


def test_a_fixed_pool_is_one_slice_for_all_rounds():
    pool = choose(reveal="fixed", rounds=5)
    first, last = pool.slice(1), pool.slice(5)
    assert first.id == last.id
    assert len(first.y) == 12
    last.verify(pool.commitment, 5)


def test_the_whole_test_set_can_be_the_pool():
    pool = choose(0, reveal="per-round", rounds=4)
    assert sorted(pool.indices) == list(range(24))
    assert pool.commitment["balanced"] == 0
    # Proportional: 9, 7 and 8 over four slices are 2 or so of each.
    for round in range(1, 5):
        counts = np.bincount(pool.slice(round).y, minlength=3).tolist()
        assert counts in ([2, 2, 2], [3, 1, 2], [2, 1, 3], [3, 2, 1])


def test_the_same_generator_gives_the_same_pool_and_the_key_only_changes_the_salts():
    a, b, other = choose(), choose(), choose(key=bytes(32))
    assert a.commitment == b.commitment
    assert a.slice(1).id == other.slice(1).id
    assert a.commitment["root"] != other.commitment["root"]
    assert choose(seed=1).slice(1).id != a.slice(1).id


def test_the_commitment_holds_integers_and_strings_only():
    pool = choose(reveal="per-round", rounds=3)
    assert json.loads(json.dumps(pool.commitment)) == pool.commitment
    assert {key: type(value) for key, value in pool.commitment.items()} == {
        "version": int,
        "root": str,
        "size": int,
        "slices": int,
        "classes": int,
        "balanced": int,
        "utility": str,
    }
    assert (pool.commitment["size"], pool.commitment["slices"], pool.commitment["utility"]) == (12, 3, HASH)
    assert KEY.hex() not in repr(pool)


def test_the_root_follows_the_documented_formula():
    pool = choose(6, reveal="per-round", rounds=2)

    def sha(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(parts)).digest()

    leaves = []
    for k, (x, y) in enumerate(zip(pool.x, pool.y, strict=True)):
        salt = hmac.new(KEY, b"fedmerit/salt/1" + k.to_bytes(8, "big"), "sha256").digest()
        leaves.append(
            sha(b"\0", salt, f"fedmerit/sample/1 |u1 2x2x1 label {y}\n".encode(), bytes(x.ravel().tolist()))
        )
    nodes = []
    for s in (0, 1):
        a, b, c = leaves[3 * s : 3 * s + 3]
        tree = sha(b"\1", sha(b"\1", a, b), c)
        nodes.append(sha(b"\2", s.to_bytes(4, "big"), (3).to_bytes(4, "big"), tree))
    assert pool.commitment["root"] == sha(b"\1", *nodes).hex()


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=20, unique=True), st.data())
def test_merkle_paths_lead_to_the_root_from_the_right_place_only(nodes, data):
    index = data.draw(st.integers(0, len(nodes) - 1))
    root, path = merkle_root(nodes), merkle_path(nodes, index)
    assert merkle_climb(nodes[index], index, len(nodes), path) == root
    assert merkle_climb(nodes[index], index, len(nodes), (*path, bytes(32))) is None
    if path:
        assert merkle_climb(nodes[index], index, len(nodes), path[:-1]) is None
        assert merkle_climb(bytes(32), index, len(nodes), path) != root


def changed(part: Slice, what: str) -> Slice:
    x, y, salts = part.x.copy(), part.y.copy(), bytearray(part.salts)
    if what == "pixel":
        x[1, 0, 0, 0] += 1
    elif what == "label":
        y[1] = (y[1] + 1) % 3
    elif what == "label kind":
        y = y.astype(float)
    elif what == "image kind":
        x = x.astype(np.float32)
    elif what == "shape":
        x = x.reshape(len(x), 1, 4, 1)
    elif what == "order":
        x, y = x[::-1], y[::-1]
        salts = bytearray(b"".join(part.salts[k : k + 32] for k in range(len(part.salts) - 32, -1, -32)))
    elif what == "salt":
        salts[40] ^= 1
    elif what == "one less":
        x, y, salts = x[:-1], y[:-1], salts[:-32]
    elif what == "one more":
        x, y = np.concatenate([x, x[:1]]), np.concatenate([y, y[:1]])
        salts += salts[:32]
    path = tuple(bytes(32) for _ in part.path) if what == "path" else part.path
    path = path[:-1] if what == "short path" else path
    return Slice(index=part.index, x=x, y=y, salts=bytes(salts), path=path)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_an_unchanged_copy_is_accepted(dtype):
    pool = choose(12, data=dataset(dtype=dtype), reveal="per-round", rounds=3)
    copy = changed(pool.slice(2), "nothing")
    copy.verify(pool.commitment, 2)
    assert copy.id == pool.slice(2).id


ONE, THREE, BOTH = choose(12), choose(12, reveal="per-round", rounds=3), choose(12, method="both")
DIFFERS, COUNTED, NONE = (
    "differs from what was committed",
    "samples were committed",
    "not the commitment of a",
)
KINDS = ("pixel", "label", "label kind", "image kind", "shape", "order", "salt", "path", "short path")


def moved_on():
    part = changed(ONE.slice(1), "nothing")
    part.x[0] += 1  # in place, after the reveal
    part.verify(ONE.commitment, 1)


@pytest.mark.parametrize(
    ("says", "verify"),
    [
        *(
            (DIFFERS, lambda what=what: changed(THREE.slice(2), what).verify(THREE.commitment, 2))
            for what in KINDS
        ),
        *(
            (
                DIFFERS,
                lambda what=what: changed(BOTH.settlement(), what).verify(BOTH.commitment, "settlement"),
            )
            for what in ("pixel", "label", "order", "salt", "path")
        ),
        *(
            (COUNTED, lambda what=what: changed(THREE.slice(2), what).verify(THREE.commitment, 2))
            for what in ("one less", "one more")
        ),
        *(
            (says, lambda n=n: BOTH.settlement().verify({**BOTH.commitment, "settled": n}, "settlement"))
            for says, n in ((COUNTED, 5), (COUNTED, 7), (NONE, -1), (NONE, 13), (NONE, "many"), (NONE, None))
        ),
        *(
            (says, lambda change=change: ONE.slice(1).verify({**ONE.commitment, **change}, 1))
            for says, change in (
                (NONE, {"root": "xyz"}),
                (NONE, {"root": None}),
                (NONE, {"size": "many"}),
                ("of version 2, expected 1", {"version": 2}),
            )
        ),
        (NONE, lambda: ONE.slice(1).verify({}, 1)),
        (DIFFERS, moved_on),
        (
            "round 3 is measured on test slice 2, got slice 1",
            lambda: THREE.slice(2).verify(THREE.commitment, 3),
        ),
        ("slice 2 was not committed: the pool has 1", lambda: THREE.slice(3).verify(ONE.commitment, 3)),
        (DIFFERS, lambda: replace(THREE.slice(2), index=0).verify(THREE.commitment, 1)),
        (DIFFERS, lambda: choose(12, 1, reveal="per-round", rounds=3).slice(2).verify(THREE.commitment, 2)),
        (
            "0 is for a round, not for the settlement",
            lambda: ONE.slice(1).verify(ONE.commitment, "settlement"),
        ),
        ("12 images and 11 labels", lambda: Slice(index=0, x=ONE.x, y=ONE.y[1:], salts=b"", path=())),
    ],
)
def test_samples_that_were_not_committed_to_this_use_are_refused(says, verify):
    with pytest.raises(BindingError, match=says):
        verify()


def test_what_a_pool_has_no_slice_for_is_refused():
    settled = choose(12, method="settled", reveal="end")
    assert "settled" not in ONE.commitment
    assert (settled.commitment["slices"], settled.commitment["settled"]) == (1, 12)
    for reveal in (
        ONE.settlement,
        *(partial(pool.slice, n) for pool, n in ((settled, 1), (THREE, 0), (THREE, 4))),
    ):
        with pytest.raises(DataError):
            reveal()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"size": 24},
            "toy: a balanced test pool of 24 needs 8 or more samples of every class, but class 'b' has 7: "
            "expected test_size of at most 23",
        ),
        (
            {"size": 12, "reveal": "per-round", "rounds": 5},
            "a pool of 12 cut into 5 slices leaves 2 samples each, fewer than the 3 classes: "
            "expected test_size of at least 15",
        ),
        (
            {"size": 2},
            "a pool of 2 cut into 1 slices leaves 2 samples each, fewer than the 3 classes: "
            "expected test_size of at least 3",
        ),
        ({"data": dataset((3, 0, 3))}, "toy: class 'b' has no test sample"),
        (
            {"size": 0, "data": dataset((9, 1)), "reveal": "per-round", "rounds": 2},
            "test slice 0 of 2 has no sample of class 'b': expected fewer rounds or a balanced pool",
        ),
    ],
)
def test_impossible_pools_are_explained(settings, message):
    with pytest.raises(DataError) as caught:
        choose(**settings)
    assert str(caught.value) == message


def test_the_largest_pool_that_fits_is_found_for_any_order_of_the_classes():
    for seed in range(20):
        assert np.bincount(choose(23, seed).y).tolist() == [8, 7, 8]
