"""All parties in one process: exact, and bad arguments have typed errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmerit.errors import BindingError, BoundError, ConfigError, RefusedError, RoundAborted
from fedmerit.secagg import STAGES, run_in_memory


def test_in_memory_keeps_the_contract():
    vectors = np.random.default_rng(0).normal(size=(5, 30)).astype(np.float32)
    weights = [5, 2.0, 8, 1, 4]
    run = run_in_memory(vectors, np.array(weights), 3, lost={"masked": [1], "unmask": [4]}, seed=3)
    expected = np.average(vectors[[0, 2, 3, 4]].astype(float), axis=0, weights=[5, 8, 1, 4])
    assert run.mean == pytest.approx(expected, abs=1e-7)
    assert (run.total_weight, run.included) == (18, (0, 2, 3, 4))
    assert {stage: sorted(run.transcript[stage]) for stage in STAGES} == {
        "advertise": [0, 1, 2, 3, 4],
        "share": [0, 1, 2, 3, 4],
        "masked": [0, 2, 3, 4],
        "check": [0, 2, 3, 4],
        "unmask": [0, 2, 3],
    }
    assert all(isinstance(data, bytes) for stage in STAGES for data in run.transcript[stage].values())


def test_without_a_transcript_the_result_is_the_same_and_no_message_is_kept():
    vectors = np.random.default_rng(0).normal(size=(4, 30))
    run, bare = run_in_memory(vectors, seed=3), run_in_memory(vectors, seed=3, transcript=False)
    assert np.array_equal(bare.mean, run.mean)
    assert bare.transcript == {stage: {} for stage in STAGES}


def test_the_seed_feeds_the_rounding_and_nothing_else():
    vectors = np.random.default_rng(1).normal(size=(3, 30))
    one, two, other = (run_in_memory(vectors, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.mean, two.mean)
    assert not np.array_equal(one.mean, other.mean)
    for stage in ("advertise", "share", "masked", "unmask"):
        assert one.transcript[stage][0] != two.transcript[stage][0]


@pytest.mark.parametrize(
    ("vectors", "error", "member"),
    [
        ([[1.0, np.nan], [1.0, 1.0], [1.0, 1.0]], BoundError, "client-0"),
        ([[1.0, 1.0], [1.0, np.inf], [1.0, 1.0]], BoundError, "client-1"),
        ([[1.0, 1.0], [1.0, 1.0], [1.0]], BindingError, "client-2"),
        ([np.ones(2), np.ones(2, int), np.ones(2)], BindingError, "client-1"),
        ([np.ones((2, 1))] * 3, BindingError, "client-0"),
        ([[1.0], [], [1.0]], BindingError, "client-1"),
        ([["a"], [1.0], [1.0]], BindingError, "client-0"),
    ],
)
def test_bad_vectors_are_named(vectors, error, member):
    with pytest.raises(error) as caught:
        run_in_memory(vectors)
    assert (caught.value.stage, caught.value.member) == ("masked", member)


def test_bad_arguments_of_in_memory():
    good = np.ones((4, 2))
    for few in ([], good[:1], good[:2]):
        with pytest.raises(RefusedError):
            run_in_memory(few)
    for weights in ([1, 2, 3], [1, 2, 3, 4, 5]):
        with pytest.raises(BindingError, match="weights"):
            run_in_memory(good, weights)
    for weights in ([1, 2, 3, 0], [1, 2, 3, 1.5], [1, 2, 3, -1], [1, 2, 3, np.nan]):
        with pytest.raises((BoundError, ConfigError)):
            run_in_memory(good, weights)
    for weights in (["3"] * 4, [True] * 4, 5, [1, 2, 3, None], [1, 2, 3, 2**31], [1, 2, 3, 9.5]):
        with pytest.raises(ConfigError, match="weight"):
            run_in_memory(good, weights)
    for lost in (
        *({"train": [0]}, {"masked": [4]}, {"masked": [-1]}),
        *({"masked": 0}, {"masked": [0.0]}, {"masked": ["0"]}, {3: [0]}, [0], "masked"),
    ):
        with pytest.raises(ConfigError, match="lost"):
            run_in_memory(good, lost=lost)
    with pytest.raises(BoundError):
        run_in_memory(good, bound=0.5)
    for bound in ("x", None, 0, -1.0, np.nan, np.inf, [1.0], np.ones(2)):
        with pytest.raises(ConfigError, match="bound must be"):
            run_in_memory(good, bound=bound)
    for threshold in (2, 5, 3.0, "3", True):
        with pytest.raises(RefusedError, match="threshold"):
            run_in_memory(good, threshold=threshold)
    for seed in ("s", 1.5, [1]):
        with pytest.raises(ConfigError, match="a seed must be"):
            run_in_memory(good, seed=seed)
    with pytest.raises(ConfigError, match="vectors"):
        run_in_memory(5)


def test_numpy_scalars_are_fine():
    vectors = np.random.default_rng(2).normal(size=(4, 9))
    counts = np.array([3, 1, 2, 5], np.float32)
    lost = {"masked": np.array([1])}
    run = run_in_memory(vectors, counts, np.int64(3), lost, np.float32(9), np.int64(4))
    same = run_in_memory(vectors, [3, 1, 2, 5], 3, {"masked": [1]}, 9.0, 4)
    assert np.array_equal(run.mean, same.mean)
    assert (run.total_weight, run.included) == (10, (0, 2, 3))


def test_vectors_of_zeros_have_a_mean():
    assert run_in_memory(np.zeros((3, 4))).mean.tolist() == [0, 0, 0, 0]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_result_is_the_plain_sum_over_the_included_or_the_round_is_aborted(data):
    n = data.draw(st.integers(3, 8))
    t = data.draw(st.integers(n // 2 + 1, n))
    leaves = data.draw(st.lists(st.sampled_from([*STAGES, None, None, None]), min_size=n, max_size=n))
    weighted = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(n, data.draw(st.integers(1, 40)))) * 10.0 ** rng.integers(-6, 6)
    weights = rng.integers(1, 1000, n).tolist() if weighted else None
    lost = {stage: [i for i in range(n) if leaves[i] == stage] for stage in STAGES}
    here = [n]  # how many are left after each stage
    for stage in STAGES:
        here.append(here[-1] - len(lost[stage]))
    needed = [max(t, 3)] * 3 + [t] * 2
    aborts = any(left < need for left, need in zip(here[1:], needed, strict=True))
    if aborts:
        with pytest.raises(RoundAborted):
            run_in_memory(vectors, weights, t, lost, seed=seed)
        return
    run = run_in_memory(vectors, weights, t, lost, seed=seed)
    included = [i for i in range(n) if leaves[i] not in ("advertise", "share", "masked")]
    chosen = None if weights is None else [weights[i] for i in included]
    expected = np.average(vectors[included], axis=0, weights=chosen)
    step = np.abs(vectors).max() / ((2**32 // n - 1) // 2)
    worst = len(included) * step * (max(weights) if weights else 1) / run.total_weight
    assert run.included == tuple(included)
    assert run.total_weight == (sum(chosen) if chosen else len(included))
    assert np.abs(run.mean - expected).max() <= worst * (1 + 1e-6)
