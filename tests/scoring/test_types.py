"""The core types: what they accept, what they refuse and in which words."""

import copy
import math
import pickle
import time
from decimal import Decimal
from fractions import Fraction
from inspect import ismodule
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedmerit as fm
from fedmerit import errors
from fedmerit.errors import ReportError, ValueRefused
from fedmerit.scoring.ground_truth import agreement, sampled_shapley, semivalue
from fedmerit.scoring.types import Reports, Scores, Table, settle
from fedmerit.scoring.uncertainty import rank_intervals
from raising import raises

GOOD = {"empty": 0.0, "grand": 3.0, "alone": [0, 1, 2], "without": [3, 2, 1]}


def test_numbers_of_numpy_and_whole_floats_are_numbers():
    r = Reports(
        empty=np.float32(0), grand=np.array(3), alone=np.arange(3), samples=[10.0, np.int32(20), 30],
        without=[np.int64(3), Fraction(2), np.float64(1)], round=np.int64(4),
    )  # fmt: skip
    assert (r.n, r.gain, r.clients) == (3, 3.0, ("client-0", "client-1", "client-2"))
    assert r.alone.dtype == np.float64
    assert (r.empty, r.grand, r.round, type(r.round)) == (0.0, 3.0, 4, int)
    assert r.without.tolist() == [3, 2, 1]
    assert r.samples.tolist() == [10, 20, 30]
    assert Reports(**GOOD, round=0).round == 0


def test_a_series_is_matched_by_its_labels():
    names = ["A", "B", "C"]
    r = Reports(
        empty=0, grand=3, clients=names,
        alone=pd.Series({"C": 2, "A": 0, "B": 1}),  # as after a sort or a groupby
        without=pd.Series([3, 2, 1]),  # labels that only count
        cosine=pd.Series({"B": 0.5, "A": None, "C": 1.0}),
        se_alpha=np.ma.array([0.1, 0.2, 0.3]),  # nothing is masked
    )  # fmt: skip
    assert r.alone.tolist() == [0, 1, 2]
    assert r.without.tolist() == [3, 2, 1]
    assert np.isnan(r.cosine[0])
    assert r.cosine[1:].tolist() == [0.5, 1.0]
    assert r.se_alpha.tolist() == [0.1, 0.2, 0.3]
    table = Table(pd.Series([0, 1, 2, 5]))
    assert semivalue(table, pd.Series([0, 1])).values.tolist() == [3, 4]  # labels that only count


def test_series_are_matched_by_label_where_both_sides_have_names():
    truth = pd.Series({"C": 3, "A": 1, "B": 2})
    named = Scores(score="ALPHA", clients=("A", "B", "C"), values=[1, 2, 3], raw=[1, 2, 3], gain=1.0)
    assert agreement(named, truth).spearman == 1.0
    assert agreement(truth, named).spearman == 1.0
    assert agreement(pd.Series({"B": 20, "C": 30, "A": 10}), truth).spearman == 1.0
    assert (
        agreement(pd.Series([1, 2, 3], index=[7, 5, 6]), pd.Series([2, 3, 1], index=[5, 6, 7])).kendall == 1
    )
    assert agreement([3, 1, 2], truth).spearman == 1.0  # a list has no names: by position
    assert agreement(pd.Series([3, 1, 2]), truth).spearman == 1.0


def test_a_tensor_that_numpy_cannot_read_is_refused_in_words():
    """One with a gradient, or one whose numbers are not in this machine's memory, as on a GPU."""
    torch = pytest.importorskip("torch")
    for given in (torch.tensor(1.0, requires_grad=True), torch.empty((), device="meta")):
        with raises(ValueRefused, client=None):
            Reports(**(GOOD | {"grand": given}))
        with raises(ValueRefused, client="client-1"):
            Reports(**(GOOD | {"alone": [0, given, 2]}))


@pytest.mark.parametrize("unordered", [{"A", "B"}, frozenset("AB"), {"A": 1, "B": 2}.keys() & {"A", "B"}])
def test_names_without_an_order_are_refused_since_pay_would_follow_the_hash(unordered):
    """Which value is whose would depend on PYTHONHASHSEED."""
    for make in (
        lambda names: Reports(empty=0, grand=3, alone=[0, 1], without=[3, 2], clients=names),
        lambda names: Table([0, 1, 2, 5], names),
        lambda names: Scores(score="ALPHA", clients=names, values=[1, 2], raw=[1, 2], gain=3),
        lambda names: sampled_shapley(float, names, budget=4),
        lambda names: fm.aumann_shapley([[1, 0], [0, 1]], [3, 2], names),
    ):
        with pytest.raises(ReportError, match="got a set"):
            make(unordered)
        assert make({"A": 1, "B": 2}.keys())
        assert make(np.array(["A", "B"]))
    r = Reports(**GOOD, clients=np.array(list("ABC")))
    assert repr(r.clients) == "('A', 'B', 'C')"


def test_only_what_a_utility_promises_must_lie_in_the_unit_interval():
    assert Reports(**GOOD, utility="neg-loss").grand == 3.0
    Reports(empty=0, grand=1 + 2e-16, alone=[0, 1], without=[1, 0], utility="balanced-accuracy")  # rounding


def test_reports_of_a_table_hold_its_single_clients_and_all_but_one():
    #          {}  A  B  AB  C  AC  BC  ABC
    r = Reports.from_table(Table([0, 1, 2, 12, 3, 13, 23, 123], ["A", "B", "C"]), round=5)
    assert (r.empty, r.grand, r.round, r.clients) == (0, 123, 5, ("A", "B", "C"))
    assert r.alone.tolist() == [1, 2, 3]
    assert r.without.tolist() == [23, 13, 12]


@pytest.mark.parametrize(
    "cosine", [[math.nan, 0.5, None], np.array([math.nan, 0.5, math.nan]), [np.nan, 0.5, None]]
)
def test_no_cosine_is_no_cosine_in_a_list_and_in_an_array(cosine):
    scores = fm.cos(Reports(**GOOD, cosine=cosine, round=4))
    assert scores.values.tolist() == [0, 0.5, 0]
    missing = [{"client": name, "round": 4} for name in ("client-0", "client-2")]
    assert [(note.code, note.values) for note in scores.notes] == [
        ("no-cosine", values) for values in missing
    ]
    with raises(ValueRefused, client="client-0"):
        Reports(**(GOOD | {"alone": cosine[:1] * 3 if isinstance(cosine, list) else cosine}))


def test_what_reports_and_tables_accept_scores_can_hold():
    assert fm.shapley(Table([-1e100, 1e100])).values.tolist() == [2e100]
    extreme = Reports(empty=-1e100, grand=1e100, alone=[1e100, 0], without=[-1e100, 0])
    assert fm.alpha(extreme).gain == 2e100
    assert fm.accumulate([extreme] * 3).gain == 3 * 2e100
    lever = Reports(empty=0, grand=1e95, alone=[1e95, -1e95 + 1e84], without=[1e95, 1e95])
    assert 1e105 < np.abs(fm.fp(lever).values).max() < 1e107


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_are_read_only_too(again):
    r = Reports(**GOOD, cosine=[0, None, 1], round=3)
    for made in (r, Table([0, 1, 2, 5]), fm.alpha(r), fm.Panel([[1, 2], [3, 4]], apart=[[0, 1], [1, 0]])):
        got = again(made)
        assert repr(got) == repr(made)
        for name, value in vars(got).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(value, getattr(made, name))
                with pytest.raises(ValueError, match="read-only"):
                    value[0] = 99


def test_ranks_share_ties_that_differ_by_rounding_only():
    raw = np.array([0.3 - 0.2, 0.2 - 0.1, 0.5])
    scores = Scores(score="X", clients=("A", "B", "C"), values=-raw, raw=raw, gain=1.0)
    assert raw[0] != raw[1]
    assert scores.ranks().tolist() == [2, 2, 1]
    assert scores.ranking() == ("C", "A", "B")
    assert settle(np.zeros(2)).tolist() == [0, 0]
    # a fixed grid would part these two: they lie on either side of a multiple of 1/8192
    assert settle(np.array([1.0, 1 / 8192, np.nextafter(1 / 8192, 1)])).tolist() == [1, 0, 0]

    r = Reports(empty=-2.3, grand=-1.5, alone=[-2.0, -2.2, -2.1, -1e13], without=[-1.9, -1.6, -1.7, -1.5])
    assert fm.alpha(r).ranks().tolist() == [1, 3, 2, 4]
    assert fm.alpha(r).ranking() == ("client-0", "client-2", "client-1", "client-3")


def test_what_counts_as_rounding():
    # accuracies of 100,000 samples: one more that is right is no rounding, however it was added up
    m, rng = 100_000, np.random.default_rng(0)
    alone, without = rng.integers(-3, 4, size=(2, 20))
    r = Reports(empty=0.7, grand=70_003 / m, alone=(70_000 + alone) / m, without=(70_003 - without) / m)
    paper = alone + without
    assert fm.alpha(r).ranks().tolist() == [1 + (paper > own).sum() for own in paper]
    assert len(set(fm.alpha(r).raw)) > len(set(paper))  # rounding alone would have told them apart
    assert settle(np.array([1.0, 1 + 1e-8])).tolist() == [0, 1]
    assert settle(np.array([1e-30, 2e-30, 3e-30])).tolist() == [0, 1, 2]  # all small: nothing to compare with
    assert settle(np.array([0.0, 3e-17, -2e-17, 5.0])).tolist() == [0, 0, 0, 1]
    assert settle(np.array([1e6, 1e6 + 1e-6, 2e6])).tolist() == [0, 0, 1]
    assert settle(np.array([])).tolist() == []


def every_score(r):
    for score in (fm.loo, fm.ioi, fm.alpha, fm.fp, fm.ee, fm.surplus):
        score(r)
    fm.ee(r, combine="median")


def every_payment(r):
    for rule in ("fair", "fenced", "impartial", "equal"):
        paid = fm.payouts(fm.shares(fm.alpha(r), rule), "1234567.89")
        assert sum(paid.values()) + paid.unpaid == Decimal("1234567.89")


@pytest.mark.parametrize("work", [every_score, every_payment, lambda r: rank_intervals(fm.alpha(r))])
def test_ten_thousand_clients_take_no_quadratic_step(work):
    """No bound on seconds: ten times the clients may not cost fifty times the time."""
    rng = np.random.default_rng(0)

    def seconds(n):
        errors = np.full(n, 1e-3)
        r = Reports(empty=0.1, grand=0.9, alone=rng.random(n), without=rng.random(n), se_alpha=errors)
        start = time.process_time()
        work(r)
        return time.process_time() - start

    assert min(seconds(10_000) for _ in range(3)) < 50 * min(seconds(1_000) for _ in range(5))


def test_the_public_names_are_what_is_exported():
    contract = """Reports Table Scores loo ioi alpha fp ee surplus solo shapley banzhaf semivalue accumulate
        influence agreement normalise shares payouts"""
    assert set(contract.split()) <= set(fm.__all__)
    assert len(set(fm.__all__)) == len(fm.__all__)
    public = {name for name, value in vars(fm).items() if not name.startswith("_") and not ismodule(value)}
    assert public == set(fm.__all__)


def test_errors_and_the_sampled_value_are_in_the_reference():
    reference = (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")
    for name in ("errors", "scoring.ground_truth.sampled_shapley"):
        assert f"::: fedmerit.{name}\n" in reference


def test_an_error_about_reports_knows_round_client_and_the_problem_without_them():
    given = {"empty": 0.1, "grand": 0.5, "alone": [0.2, 0.3], "without": [0.4, 0.4], "clients": ["A", "B"]}
    with pytest.raises(errors.ValueRefused) as caught:
        Reports(**{**given, "alone": [0.2, math.inf]}, round=3)
    error = caught.value
    assert (error.round, error.client) == (3, "B")
    assert str(error) == f"round 3: {error.problem}"
    assert error.problem.startswith("alone of client 'B' must be a finite number")
    with pytest.raises(ReportError) as caught:
        Reports(**given, silent=["A"], round=None)
    assert (caught.value.round, str(caught.value)) == (None, caught.value.problem)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
