"""One training is no verdict: claims and payments allow for what another training would change."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedmerit as fm
from fedmerit.config import from_dict
from fedmerit.errors import DoubtfulShares, UndefinedShares
from fedmerit.ledger.decisions import Terms
from fedmerit.report.facts import Facts
from fedmerit.report.source import read_source
from fedmerit.scoring.doubts import at_chance, check_payable, doubts
from fedmerit.scoring.scores import from_blocks
from fedmerit.scoring.types import RoundScatter, Scores
from fedmerit.scoring.uncertainty import (
    TRAINING,
    compare_pairs,
    error_of,
    gain_error,
    intervals,
    rank_intervals,
    repeats,
    training_of,
)
from runs import record_decision

BLOCKS = 16


def run(rng, contributions, test_error=1e-4):
    """PHI of a run with these contributions (rounds, members) on a large test set."""
    rounds = []
    for x in contributions:
        blocks = x + rng.normal(0, test_error * BLOCKS**0.5, (BLOCKS, x.size))
        rounds.append(from_blocks(blocks, [10] * BLOCKS))
    return fm.accumulate(rounds, score="PHI")


@pytest.mark.parametrize(("members", "rounds"), [(4, 3), (5, 6), (10, 10)])
@pytest.mark.parametrize("falling", [False, True])
def test_members_whose_training_is_random_are_indistinguishable(members, rounds, falling):
    """Equal members, a test set that leaves next to no error: whoever differs does so by luck."""
    rng = np.random.default_rng(members * rounds + falling)
    worth = np.linspace(1.0, 0.3, rounds) if falling else np.ones(rounds)
    claims = accused = 0
    for _ in range(100):
        total = run(rng, worth[:, None] * rng.normal(0.05, 0.02, (rounds, members)))
        better = compare_pairs(total).better
        claims += better.any()
        accused += (rank_intervals(total)[:, 0] == members).any()
    assert claims <= 12  # 100 of 100 by the error of the test set alone
    assert accused <= 5


def test_a_member_that_is_worse_is_still_found():
    rng = np.random.default_rng(1)
    for _ in range(20):
        x = rng.normal(0.05, 0.004, (6, 6))
        x[:, 5] -= [0.02, 0.04, 0.05, 0.06, 0.06, 0.06]  # as noisy labels do: worse with every round
        assert rank_intervals(run(rng, x))[:, 0].tolist()[5] == 6


def test_the_scatter_is_that_of_repeated_trainings():
    rng = np.random.default_rng(2)
    worth, part = np.array([5.0, 3.0, 2.0, 1.0, 1.0, 1.0])[:, None], rng.uniform(0.5, 2.0, 6)
    drawn = [worth * part + rng.normal(0, 0.3, (6, 6)) for _ in range(200)]
    found = [training_of([dict(enumerate(map(float, row))) for row in x]).scatter for x in drawn]
    truth = np.std([x.sum(axis=0) for x in drawn], axis=0).mean()
    assert 0.9 < np.sqrt(np.mean(np.square(found))) / truth < 1.5


numbers = st.floats(-1, 1, width=32)


@settings(deadline=None)
@given(st.integers(3, 6).flatmap(
    lambda n: st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=3, max_size=6)
), st.data())  # fmt: skip
def test_the_scatter_follows_unit_and_order(rows, data):
    of = [dict(enumerate(row)) for row in rows]
    found = training_of(of)
    assert np.isfinite(found.scatter)
    assert found.freedom == (len(rows) - 1) * (len(rows[0]) - 1)
    assert training_of([{k: 4 * v for k, v in one.items()} for one in of]).scatter == pytest.approx(
        4 * found.scatter, rel=1e-6, abs=1e-8
    )
    order = data.draw(st.permutations(range(len(rows[0]))))
    moved = training_of([{k: one[k] for k in order} for one in of])
    assert moved.scatter == pytest.approx(found.scatter, rel=1e-6, abs=1e-8)


@given(st.floats(-1e6, 1e6))
def test_one_member_cannot_take_all_claims_away(wild):
    """Whatever one of seven states, the median of the others decides about the scatter."""
    rng = np.random.default_rng(3)
    x = rng.normal(0.05, 0.004, (6, 7))
    honest = training_of([dict(enumerate(map(float, row))) for row in x[:, :6]]).scatter
    x[:, 6] = wild * np.array([1, -1, 1, -1, 1, -1])
    assert training_of([dict(enumerate(map(float, row))) for row in x]).scatter < 3 * honest


def test_few_rounds_and_gaps():
    assert training_of([]) == training_of([{"A": 1.0, "B": 2.0}] * 2) == RoundScatter()
    one = {"A": 1.0, "B": 2.0, "C": 3.0}
    assert training_of([one, one, {**one, "D": 9.0}]) == RoundScatter(0.0, 4)
    assert training_of([one, one, {"A": 1.0}, one, {"B": 2.0}]).freedom == 8


def test_without_scatter_the_stated_factor_counts():
    r = fm.Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1], se_alpha=[0.1, 0.2, 0.3])
    total = fm.accumulate([r])
    np.testing.assert_allclose(error_of(total), np.hypot(1, TRAINING) * total.stderr)
    alone = fm.alpha(r)  # of a round, not of a training
    np.testing.assert_allclose(intervals(alone)[:, 1] - alone.raw, 1.959964 * alone.stderr, rtol=1e-6)


def test_the_interval_of_a_share_allows_for_training_too():
    """Where blocks give a covariance, as in a settled run: by the test set alone it has 2 % of this width."""
    rng = np.random.default_rng(5)
    total = run(rng, rng.normal(0.05, 0.01, (6, 4)))
    assert total.covariance is not None
    paid = fm.shares(total)
    widths = [
        np.mean([high - low for low, high in fm.share_intervals(one, paid).values()])
        for one in (total, replace(total, training=None))
    ]
    assert widths[0] > 10 * widths[1]


def test_repeats_measure_what_one_run_allows_for():
    rng = np.random.default_rng(4)
    runs = [run(rng, rng.normal(0.05, 0.02, (3, 4))) for _ in range(3)]
    assert runs[0].training.scatter > 100 * runs[0].stderr.max()
    assert all(one.training is None for one in repeats(runs).runs)


def scores(gain, stderr, **more):
    return Scores(score="PHI", clients=("A", "B"), values=[gain / 2] * 2, raw=[gain / 2] * 2, gain=gain,
                  stderr=stderr, **more)  # fmt: skip


@pytest.mark.parametrize(
    ("total", "code"),
    [
        (scores(1.0, [0.1, 0.1], training=RoundScatter()), None),
        (scores(0.3, [0.1, 0.1], training=RoundScatter()), None),  # 2 * 0.1 < 0.3
        (scores(0.19, [0.1, 0.1], training=RoundScatter()), "chance"),
        (scores(-1.0, [0.1, 0.1], training=RoundScatter()), "chance"),
        (scores(1.0, [0.1, 0.1], training=RoundScatter(0.5, 4)), "chance"),
        (scores(0.3, [0.1, 0.1]), None),  # nothing is known about training
        (scores(0.0, None, training=RoundScatter()), None),
    ],
)
def test_a_gain_within_chance_is_a_doubt(total, code):
    found = at_chance(total)
    assert (None if found is None else found.code) == code
    assert found is None or found.gross
    assert (gain_error(total) is None) == (total.stderr is None or total.training is None)


def test_reports_at_chance_level_are_not_paid_unless_somebody_says_so():
    se = [0.001, 0.001, 0.001]
    r = fm.Reports(empty=0.5, grand=0.5002, alone=[0.5001] * 3, without=[0.5001] * 3, se_alpha=se)
    (found,) = (one for one in doubts([r]) if one.gross)
    with pytest.raises(DoubtfulShares) as refused:
        check_payable([found], "fenced", despite=False)
    assert refused.value.codes == ("chance",)
    check_payable([found], "fenced", despite=True)
    check_payable([found], "equal", despite=False)


def test_a_settled_run_at_chance_level_is_not_paid(tmp_path):
    from fedmerit.simulation.run import run as rehearse

    config = from_dict({
        "partition": {"scheme": "iid", "clients": 3}, "model": {"name": "mlp"},
        "training": {"rounds": 3, "local_epochs": 1},
        "corruption": {"label_flip": ["client-0", "client-1", "client-2"]},
        "scoring": {"method": "settled"}, "secure_aggregation": {"enabled": False},
    })  # fmt: skip
    rehearse(config, tmp_path / "run")
    assert [one.code for one in Facts(read_source(tmp_path / "run")).doubts] == ["chance"]
    terms = Terms("1000.00", "expected-accuracy", score="PHI")
    with pytest.raises(UndefinedShares):  # as DoubtfulShares are
        record_decision(tmp_path / "run", terms)
