"""Errors by stratum, sketches of them, and what follows for differences between clients."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmerit import Reports, accumulate, alpha, fp
from fedmerit.errors import InputError
from fedmerit.files.documents import as_csv, as_json, document
from fedmerit.files.reports import read
from fedmerit.protocol.direction import blocks_of
from fedmerit.scoring.sampling import (
    SKETCH,
    belongs,
    degrees,
    error_parts,
    least_error,
    pair_freedom,
    quantiles,
    resolvable_gap,
    signs,
    sketch,
    strata_for,
    strata_of,
    student_quantile,
)
from fedmerit.scoring.scores import from_blocks
from fedmerit.scoring.types import Scores
from fedmerit.scoring.uncertainty import (
    TRAINING,
    compare_pairs,
    intervals,
    pair_errors,
    rank_intervals,
)

LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=40)


def stratified(values, strata):
    square = 0.0
    for one in set(strata.tolist()):
        own = values[strata == one]
        square += (own.size / values.size) ** 2 * np.var(own, ddof=1) / own.size
    return math.sqrt(square)


@given(LABELS, st.integers(0, 2**32))
def test_the_length_of_the_parts_is_the_stratified_error(labels, seed):
    values, strata = np.random.default_rng(seed).normal(size=len(labels)), strata_of(labels)
    assert np.linalg.norm(error_parts(values, strata)) == pytest.approx(stratified(values, strata))
    whole = np.zeros(len(labels), np.int64)
    textbook = np.std(values, ddof=1) / math.sqrt(len(values))
    assert np.linalg.norm(error_parts(values, whole)) == pytest.approx(textbook)


@given(LABELS, st.integers(0, 2**32))
def test_what_differs_between_strata_alone_is_no_error(labels, seed):
    strata = strata_of(labels)
    levels = np.random.default_rng(seed).normal(size=strata.max() + 1)[strata]
    assert np.linalg.norm(error_parts(levels, strata)) < 1e-12


@given(LABELS)
def test_no_stratum_has_a_single_sample_and_larger_classes_stay_apart(labels):
    strata, given_ = strata_of(labels), np.array(labels)
    assert np.bincount(strata).min() >= 2
    assert set(strata.tolist()) == set(range(strata.max() + 1))
    assert degrees(strata) == len(labels) - strata.max() - 1
    large = [one for one in set(labels) if labels.count(one) > 1]
    assert len({int(strata[given_ == one][0]) for one in large}) == len(large)


def test_only_a_pool_drawn_by_class_has_classes_as_strata():
    assert strata_for([0, 0, 1, 1], balanced=True).tolist() == [0, 0, 1, 1]
    assert strata_for([0, 0, 1, 1], balanced=False).tolist() == [0] * 4
    assert strata_for([0.5, 0.5, 1, 1], balanced=True).tolist() == [0] * 4  # no classes
    assert strata_for(np.zeros((4, 2), int), balanced=True).tolist() == [0] * 4  # masks, not classes


def test_the_least_error_by_hand():
    right = np.array([1.0, 0, 1, 1, 0])
    assert least_error([right, right]) == pytest.approx(math.sqrt(2) / 5)  # one changed sample each way
    assert least_error([right], step=0.5) == pytest.approx(math.sqrt(2) / 10)
    assert least_error([right], np.array([1, 1, 1, 2, 1.0])) == pytest.approx(2 * math.sqrt(2) / 5)
    assert least_error([np.ones(5)]) == pytest.approx(math.sqrt(2) / 5)  # all right: still 0 or 1
    assert least_error([np.array([0.1, 0.2, 0.5, 0.4, 0.3])]) < 1e-3
    assert least_error([np.full(500, 0.01)]) < 1e-3  # an untrained model of 100 classes is not saturated
    assert least_error([np.array([0.99, 0.01, 0.995, 0.002, 0.99])]) > 0.6 * math.sqrt(2) / 5
    assert least_error([np.array([-1.0, 0, 0, 1, 1])]) == 0.0  # not in [0, 1]


def stated(parts, client="A", slice_id="s", round=1, least=0.0):
    return np.array(sketch(parts, least, slice_id=slice_id, round=round, client=client))


def test_signs_are_those_of_the_hash_and_balanced():
    found = signs("slice", 64, 1000)
    assert found.shape == (64, 1000)
    assert set(np.unique(found)) == {-1.0, 1.0}
    assert abs(found.mean()) < 0.02
    assert np.abs(found @ found.T / 1000 - np.eye(64)).max() < 0.2
    assert (signs("slice", 64, 1000) == found).all()
    assert (signs("other", 64, 1000) != found).any()


@given(st.integers(0, 2**32), st.integers(4, 50))
def test_sketches_add_up_as_errors_do(seed, samples):
    one, two = np.random.default_rng(seed).normal(size=(2, samples)) / samples
    added = stated(one) + stated(two, round=2)
    assert stated(one + two) == pytest.approx(added, abs=1e-6 * np.abs(added).max())
    assert belongs(stated(one), float(np.linalg.norm(one)))
    assert not belongs(10 * stated(one), float(np.linalg.norm(one)))
    assert not belongs(stated(one) / 10, float(np.linalg.norm(one)))


def test_sketches_estimate_the_covariance_and_what_is_ones_own_is_nobody_elses():
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(2, 40)) / 40
    parts[1] += parts[0]
    found, least = np.zeros((2, 2)), 0.05
    for k in range(400):
        z = np.stack([stated(one, name, f"s{k}", least=least) for one, name in zip(parts, "AB", strict=True)])
        found += z @ z.T / SKETCH / 400
    assert found == pytest.approx(parts @ parts.T + least**2 * np.eye(2), abs=0.1 * np.abs(found).max())


def drawn(number=1, clients="ABC", samples=60, seed=0, slice_id="s", **change):
    """Reports of one round, and the per-sample alpha behind them."""
    rng = np.random.default_rng([seed, number])
    values = 0.1 * (rng.normal(size=(samples, len(clients))) + rng.normal(size=(samples, 1)))
    values += np.arange(len(clients))
    strata = np.zeros(samples, np.int64)
    parts = [error_parts(column, strata) for column in values.T]
    made = Reports(
        empty=0, grand=1, alone=values.mean(axis=0), without=1 - values.mean(axis=0), clients=tuple(clients),
        se_alpha=[np.linalg.norm(one) for one in parts], slice=slice_id, round=number,
        sketch=[stated(one, name, slice_id) for one, name in zip(parts, clients, strict=True)],
        freedom=samples - 1,
    )  # fmt: skip
    return replace(made, **change), np.array(parts)


def test_a_round_knows_its_covariance():
    reports, parts = drawn()
    scores = alpha(reports)
    assert scores.covariance == pytest.approx(reports.sketch @ reports.sketch.T / SKETCH)
    exact = parts @ parts.T
    assert np.abs(scores.covariance - exact).max() < 0.8 * np.abs(exact).max()
    assert fp(reports).covariance == pytest.approx(scores.covariance)
    assert scores.freedom == 59
    assert [pair_freedom(*free) for free in ((32, 32), (1, 1), (32, 10**9))] == [16, 1, 31]


def test_sketches_of_rounds_are_summed_also_of_members_who_come_and_go():
    first, second = drawn(1)[0], drawn(2, "AB")[0]
    total = accumulate([first, second])
    expected = first.sketch.copy()
    expected[:2] += second.sketch
    assert total.sketch == pytest.approx(expected.T)
    twice = accumulate([first, second], missing="own-mean")
    assert twice.sketch[:, 2] == pytest.approx(2 * expected[2])
    assert accumulate([drawn(1)[0], drawn(2, samples=30, slice_id="t")[0]]).freedom == 29  # the least


def test_without_sketches_everything_is_as_it_was_and_a_note_says_so():
    with_, _ = drawn(1)
    without = replace(drawn(2)[0], sketch=None, freedom=None)
    total = accumulate([with_, without])
    assert total.covariance is None
    assert "1 of the rounds have no sketches" in str(total.notes)
    plain = accumulate([replace(with_, sketch=None, freedom=None), without])
    assert plain.notes == tuple(note for note in total.notes if "sketches" not in note)
    assert compare_pairs(plain).stderr[0, 1] == pytest.approx(
        math.hypot(1, TRAINING) * (plain.stderr[0] + plain.stderr[1])
    )


def test_every_claim_uses_the_covariance_and_students_quantiles():
    reports, _ = drawn(samples=41)
    scores = alpha(reports)
    pairs = compare_pairs(scores)
    z = reports.sketch
    assert pairs.stderr[0, 1] == pytest.approx(math.sqrt(np.mean((z[0] - z[1]) ** 2)))
    assert pair_errors(scores) == pytest.approx(pairs.stderr)
    left = 6 - int(pairs.better.sum())  # claims of Holm's method that are not made
    assert pairs.critical == pytest.approx(student_quantile(0.05 / left, pair_freedom(SKETCH, 40)))
    low, high = intervals(scores)[0]
    assert (high - low) / 2 == pytest.approx(student_quantile(0.025, 40) * scores.stderr[0])
    assert rank_intervals(scores)[:, 0].tolist() == (1 + pairs.better.sum(axis=0)).tolist()
    bound = compare_pairs(replace(scores, sketch=None))
    assert bound.stderr[0, 1] == pytest.approx(scores.stderr[0] + scores.stderr[1])
    settled = from_blocks(np.random.default_rng(1).normal(size=(8, 3)), [5] * 8)
    assert not compare_pairs(settled).better.any()
    assert compare_pairs(settled).critical == pytest.approx(student_quantile(0.05 / 6, 7))
    own = settled.covariance
    assert pair_errors(settled)[0, 1] == pytest.approx(math.sqrt(own[0, 0] + own[1, 1] - 2 * own[0, 1]))


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_files_hold_sketches(tmp_path, kind):
    rounds = [drawn(1)[0], drawn(2, "AB", silent=("C",))[0]]
    content = document(rounds)
    file = tmp_path / f"reports.{kind}"
    file.write_text(as_json(content) if kind == "json" else as_csv(content), encoding="utf-8")
    for one, other in zip(read(file), rounds, strict=True):
        assert (one.sketch == other.sketch).all()
        assert one.freedom == other.freedom
    assert accumulate(read(file)).covariance == pytest.approx(accumulate(rounds).covariance)


@pytest.mark.parametrize("sketch_", [1, [1, 1], {"A": 1, "B": 1}, [["x"], ["x"]], {"A": [None], "B": [None]}])
def test_a_file_with_something_else_as_a_sketch_is_refused(tmp_path, sketch_):
    content = document([drawn(1, "AB")[0]])
    content["rounds"][0]["reports"]["sketch"] = sketch_
    (tmp_path / "reports.json").write_text(as_json(content), encoding="utf-8")
    with pytest.raises(InputError, match="sketch"):
        read(tmp_path / "reports.json")


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "experiments"))
    import coverage

    assert hasattr(coverage, "simulate")
    return coverage


def test_the_simulation_judges_as_the_package_does(coverage):
    """Many test sets at once against one after the other."""
    cell = coverage.Cell("fixed", 4, 50)
    people = coverage.population(4, "expected accuracy", 1.0, 1.0, 0)
    rng = np.random.default_rng(0)
    at = coverage.drawn(rng, cell, people, 30)
    outcomes = people.outcomes[0][:, at].swapaxes(0, 1)
    values = people.alpha[0][at]
    found, plain, single, least, sketches = coverage.one_slice(rng, cell, people, values, outcomes)
    one, other = np.triu_indices(4, 1)
    strata = np.repeat(np.arange(10), 5)
    errors = np.sqrt(((sketches[:, :, one] - sketches[:, :, other]) ** 2).mean(axis=1))
    statistic = np.abs(found[:, one] - found[:, other]) / errors
    claims = coverage.told_apart(statistic, 12, pair_freedom(SKETCH, 40))
    for k in range(30):
        parts = [error_parts(column, strata) for column in values[k].T]
        assert single[k] == pytest.approx([np.linalg.norm(part) for part in parts])
        assert plain[k] == pytest.approx(values[k].std(axis=0, ddof=1) / math.sqrt(len(values[k])))
        assert least[k] == pytest.approx(least_error(list(outcomes[k]), step=0.5))
        scores = Scores(
            score="ALPHA", clients=tuple("ABCD"), values=found[k], raw=found[k], gain=1, stderr=single[k],
            sketch=sketches[k], freedom=40,
        )  # fmt: skip
        better = compare_pairs(scores).better
        assert ((better | better.T)[one, other] == claims[k]).all()
    assert 0 < claims.sum() < claims.size


@pytest.mark.parametrize("kind", ["fixed", "fresh", "settled"])
def test_intervals_cover_and_claims_are_seldom_wrong(coverage, kind):
    """A small version of experiments/coverage.py; the standard error of the shares is about .01."""
    found = coverage.simulate(coverage.Cell(kind, 3, 500), 400)
    assert 0.91 < found["now: interval"] < 0.985
    assert 0.91 < found["now: difference"] < 0.985
    assert found["now: any wrong claim"] < 0.09
    assert found["now: told apart"] > found["before: told apart"] + 0.1
    assert found["now: wrong pairs"] < 0.01


def test_settled_intervals_hold_on_pools_whose_mix_of_classes_is_due_to_chance():
    """By the blocks that members deal; dealt class by class, intervals would be too narrow."""
    rng, held = np.random.default_rng(1), {False: [], True: []}
    worth = rng.normal(size=(10, 4))  # of a sample, by its class and by member
    for k in range(400):
        y = rng.integers(10, size=200)
        values = worth[y] + rng.normal(size=(200, 4))
        mean = values.mean(axis=0)
        for balanced, found in held.items():
            shown = SimpleNamespace(y=y, id=f"{k:032x}")
            blocks, _ = blocks_of(shown, balanced=balanced)
            scores = Scores(
                score="PHI", clients=tuple("ABCD"), values=mean, raw=mean, gain=1,
                blocks=[values[block].mean(axis=0) for block in blocks], sizes=[len(b) for b in blocks],
            )  # fmt: skip
            width = student_quantile(0.025, len(blocks) - 1) * np.sqrt(np.diag(scores.covariance))
            found.append(np.abs(mean - worth.mean(axis=0)) <= width)
    assert 0.93 < np.mean(held[False]) < 0.97
    assert np.mean(held[True]) < 0.91


def test_rare_classes_and_saturated_outcomes_are_covered(coverage):
    rare = coverage.simulate(coverage.Cell("fixed", 3, 500, "balanced accuracy", "rare"), 200)
    assert rare["before: interval"] < 0.4
    assert rare["now: interval"] > 0.93
    sharp = coverage.simulate(coverage.Cell("fixed", 9, 50, sharp=40, size=0.2), 400)
    assert sharp["now: interval"] > 0.93 > sharp["before: interval"]


@pytest.mark.parametrize(("members", "freedom"), [(2, None), (3, 30), (9, 30), (9, 7), (20, 31)])
def test_the_planned_gap_is_found_with_the_planned_power(members, freedom):
    """Of pairs that differ by the gap, the tool's own test finds 80 %; standard error .006."""
    rng, sets = np.random.default_rng(members), 4000
    pairs = members * (members - 1) // 2
    gap = resolvable_gap(1, 1, comparisons=pairs, freedom=freedom)  # of a pair whose difference has sd 1
    errors = np.sqrt(rng.chisquare(freedom, sets) / freedom) if freedom else np.ones(sets)
    critical = quantiles(freedom)(0.05 / (2 * pairs))
    power = np.mean(gap + rng.normal(size=sets) > critical * errors)
    assert power == pytest.approx(0.8, abs=0.03)
