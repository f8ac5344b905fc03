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
import pytest

import fedmerit as fm
from fedmerit import errors
from fedmerit.errors import NeedsTable, ReportError
from fedmerit.scoring.ground_truth import sampled_shapley
from fedmerit.scoring.types import Reports, Scores, Table, settle

GOOD = {"empty": 0.0, "grand": 3.0, "alone": [0, 1, 2], "without": [3, 2, 1]}


def test_the_contract_of_the_design():
    r = Reports(**GOOD, clients=["A", "B", "C"])
    assert (r.n, r.gain, r.clients) == (3, 3.0, ("A", "B", "C"))
    assert Reports(**GOOD).clients == ("client-0", "client-1", "client-2")
    assert r.alone.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        r.alone[0] = 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"empty": float("nan")}, "empty must be a finite number, at most 1e.100, got nan"),
        ({"grand": float("inf")}, "grand must be a finite number, at most 1e.100, got inf"),
        ({"grand": "three"}, "grand: expected a number, got 'three'"),
        (
            {"alone": [0, float("nan"), 2]},
            "alone of client 'client-1' must be a finite number, at most 1e.100, got nan",
        ),
        ({"without": [3, None, 1]}, "without of client 'client-1' is missing"),
        ({"without": [3, 2]}, r"without: expected 3 values, one per client, got shape \(2,\)"),
        ({"alone": [[0], [1], [2]]}, r"alone of client 'client-0': expected a number, got \[0\]"),
        ({"alone": np.ones((3, 1))}, r"alone: expected 3 values, one per client, got shape \(3, 1\)"),
        (
            {"alone": "abc", "without": "abc"},
            "alone: expected a sequence of numbers, got str",
        ),
        ({"alone": {"A": 1}}, "alone: expected a sequence of numbers, got dict"),
        ({"clients": ["A", "B"]}, "alone has 3 values, clients has 2 names"),
        ({"clients": ["A", "B", "A"]}, "client 'A' appears more than once"),
        ({"clients": ["A", "", "C"]}, "client names must be non-empty strings, got ''"),
        ({"clients": "ABC"}, "must be a list of names, got 'ABC'"),
        ({"clients": 5}, "must be a list of names, got 5"),
        ({"clients": np.array("ABC")}, "must be a list of names, got array"),
        ({"silent": 5}, "must be a list of names, got 5"),
        ({"utility": ["accuracy"]}, "utility must be a name"),
        ({"grand": 10**400}, "grand: expected a number"),
        ({"grand": 1e300}, "grand must be a finite number, at most 1e.100, got 1e\\+300"),
        ({"alone": [0, 10**400, 1]}, "alone: expected numbers"),
        ({"clients": ["A", "B", "C"], "silent": ["B"]}, "client 'B' is listed as silent but has a report"),
        ({"utility": "accuracy"}, r"grand must lie in \[0, 1\] \(as utility 'accuracy' promises\), got 3"),
        ({"se_alpha": [0.1, -0.1, 0]}, r"se_alpha of client 'client-1' must lie in \[0, inf\], got -0.1"),
        ({"cosine": [0, 1.5, None]}, "cosine of client 'client-1' must lie in"),
        ({"round": 7, "empty": float("nan")}, "^round 7: empty must be"),
        ({"empty": "0"}, "empty: expected a number, got '0'"),
        ({"grand": True}, "grand: expected a number, got True"),
        ({"grand": np.bool_(True)}, "grand: expected a number, got"),
        ({"grand": np.ones(1)}, "grand: expected a number, got"),
        ({"grand": 3 + 0j}, "grand: expected a number, got"),
        ({"alone": [0, "1", 2]}, "alone of client 'client-1': expected a number, got '1'"),
        ({"without": [3, True, 1]}, "without of client 'client-1': expected a number, got True"),
        ({"alone": np.array(["0", "1", "2"])}, "alone: expected numbers, got an array of <U1"),
        ({"alone": np.array([True, False, True])}, "alone: expected numbers, got an array of bool"),
        ({"alone": np.array([0, "1", 2], dtype=object)}, "alone of client 'client-1': expected a number"),
        ({"alone": None}, "alone: expected a sequence of numbers, got NoneType"),
        ({"alone": {0, 1, 2}}, "alone: expected a sequence of numbers, got set"),
        ({"alone": iter([0, 1, 2])}, "alone: expected a sequence of numbers, got list_iter"),
        ({"without": {3, 2, 1}}, "without: expected a sequence of numbers, got set"),
        ({"without": None}, "without: expected a sequence of numbers, got NoneType"),
        ({"clients": list("ABCD")}, "alone has 3 values, clients has 4 names"),
        ({"round": "1"}, "round must be a whole number, 0 or more, got '1'"),
        ({"round": True}, "round must be a whole number, 0 or more, got True"),
        ({"round": -1}, "round must be a whole number, 0 or more, got -1"),
        ({"round": 1.5}, "round must be a whole number, 0 or more, got 1.5"),
        ({"round": float("inf")}, "round must be a whole number, 0 or more, got inf"),
        ({"slice": 3}, "slice must be text, got 3"),
        ({"samples": [1, 1.5, 2]}, "samples of client 'client-1' must be a whole number, got 1.5"),
        ({"samples": [1, -2, 2]}, r"samples of client 'client-1' must lie in \[0, inf\], got -2"),
        ({"samples": [1, float("inf"), 2]}, "samples of client 'client-1' must be a finite number"),
        ({"alone": [0, 1j, 2]}, "alone of client 'client-1': expected a number, got 1j"),
        ({"alone": np.array([0, 1j, 2])}, "alone: expected numbers, got an array of complex128"),
        (
            {"alone": np.ma.array([0, 1, 2], mask=[False, True, False])},
            "alone: expected a number in every place, got an array with masked entries",
        ),
        ({"cosine": [np.ones(2), 0, 0]}, "cosine of client 'client-0': expected a number, got array"),
        ({"cosine": [0, Decimal("sNaN"), 0]}, "cosine: expected numbers, got"),
    ],
)
def test_reports_refuse_bad_input_and_say_whose(change, message):
    with pytest.raises(ReportError, match=message):
        Reports(**(GOOD | change))


def test_numbers_of_numpy_and_whole_floats_are_numbers():
    r = Reports(
        empty=np.float32(0),
        grand=np.array(3),
        alone=np.arange(3),
        without=[np.int64(3), Fraction(2), np.float64(1)],
        samples=[10.0, np.int32(20), 30],
        round=np.int64(4),
    )
    assert (r.empty, r.grand, r.round, type(r.round)) == (0.0, 3.0, 4, int)
    assert r.without.tolist() == [3, 2, 1]
    assert r.samples.tolist() == [10, 20, 30]
    assert Reports(**GOOD, round=0).round == 0


def test_a_tensor_that_numpy_cannot_read_is_refused_in_words():
    """One with a gradient, or one whose numbers are not in this machine's memory, as on a GPU."""
    torch = pytest.importorskip("torch")
    for given in (torch.tensor(1.0, requires_grad=True), torch.empty((), device="meta")):
        with pytest.raises(ReportError, match=r"grand: expected a number, got tensor"):
            Reports(**(GOOD | {"grand": given}))
        with pytest.raises(ReportError, match=r"alone of client 'client-1': expected a number, got tensor"):
            Reports(**(GOOD | {"alone": [0, given, 2]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [0, 0]}, "X: sizes must be positive numbers, one per block, got"),
        ({"sizes": [1, math.nan]}, "X: sizes must be positive numbers, one per block, got"),
        ({"sizes": [[1, 2], [3, 4]]}, "X: sizes must be positive numbers, one per block, got"),
        ({"freedom": 0}, "X: freedom must be 1 or more, got 0"),
        ({"freedom": -1}, "X: freedom must be a whole number, 0 or more, got -1"),
        ({"freedom": "many"}, "X: freedom must be a whole number, 0 or more, got 'many'"),
    ],
)
def test_scores_refuse_what_would_make_their_errors_undefined(change, message):
    good = {"score": "X", "clients": ("A", "B"), "values": [1, 2], "raw": [1, 2], "gain": 3}
    blocks = {"blocks": [[1, 2], [2, 1]], "sizes": [1, 2]}
    assert Scores(**good, **blocks, freedom=np.int64(5)).freedom == 5
    with pytest.raises(ReportError, match=message):
        Scores(**(good | blocks | change))


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
        with pytest.raises(ReportError, match="clients must be names in an order, such as a list, got a set"):
            make(unordered)
        assert make({"A": 1, "B": 2}.keys())
        assert make(np.array(["A", "B"]))
    r = Reports(**GOOD, clients=np.array(list("ABC")))
    assert repr(r.clients) == "('A', 'B', 'C')"


def test_one_client_is_refused():
    with pytest.raises(ReportError, match="expected at least 2 clients, got 1"):
        Reports(empty=0, grand=1, alone=[1], without=[0])


def test_values_outside_the_unit_interval_are_fine_where_nothing_was_promised():
    assert Reports(**GOOD, utility="neg-loss").grand == 3.0


def test_a_mean_that_rounds_to_just_above_one_is_not_a_lie():
    Reports(empty=0, grand=1 + 2e-16, alone=[0, 1], without=[1, 0], utility="balanced-accuracy")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 1, 2], r"2\^N utilities with N >= 1, got shape \(3,\)"),
        ([1], r"2\^N utilities"),
        ([], r"2\^N utilities with N >= 1, got shape \(0,\)"),
        ([0, 1, 2, float("nan")], "utility of coalition 0b11 is nan"),
        ([[0, 1], [2, 3]], "2\\^N utilities"),
        (np.broadcast_to(0.0, 1 << 27), "at most 26 clients"),
        ("abc", "expected a sequence of numbers"),
        (["0", "1"], r"table\[0\]: expected a number, got '0'"),
        ([True, False], r"table\[0\]: expected a number, got True"),
        (np.array([True, False]), "table: expected numbers, got an array of bool"),
        (np.array([0, 1j]), "table: expected numbers, got an array of complex128"),
        ([0, 1j], r"table\[1\]: expected a number, got 1j"),
        ([0, np.complex128(1j)], r"table\[1\]: expected a number"),
        ([0, None], r"table\[1\]: expected a number, got None"),
        ([0, 1e101], r"coalition 0b1 is 1e\+101, expected a finite number, at most 1e\+100"),
        ([[0, 1], [2]], r"table\[0\]: expected a number, got \[0, 1\]"),
        (np.ma.array([0, 1], mask=[False, True]), "table: expected a number in every place, got .* masked"),
    ],
)
def test_tables_refuse_bad_input(values, message):
    with pytest.raises(ReportError, match=message):
        Table(values)


def test_reports_of_a_table_hold_its_single_clients_and_all_but_one():
    #          {}  A  B  AB  C  AC  BC  ABC
    r = Reports.from_table(Table([0, 1, 2, 12, 3, 13, 23, 123], ["A", "B", "C"]), round=5)
    assert (r.empty, r.grand, r.round, r.clients) == (0, 123, 5, ("A", "B", "C"))
    assert r.alone.tolist() == [1, 2, 3]
    assert r.without.tolist() == [23, 13, 12]


@pytest.mark.parametrize("given", [[0, 1, 2, 3], None, Reports(**GOOD)])
def test_reports_come_from_a_table_alone(given):
    with pytest.raises(NeedsTable, match=f"from_table takes a Table .* got {type(given).__name__}"):
        Reports.from_table(given)


@pytest.mark.parametrize(
    "cosine", [[math.nan, 0.5, None], np.array([math.nan, 0.5, math.nan]), [np.nan, 0.5, None]]
)
def test_no_cosine_is_no_cosine_in_a_list_and_in_an_array(cosine):
    scores = fm.cos(Reports(**GOOD, cosine=cosine))
    assert scores.values.tolist() == [0, 0.5, 0]
    assert [note.partition(" has ")[2][:9] for note in scores.notes] == ["no cosine", "no cosine"]
    with pytest.raises(ReportError, match="alone of client 'client-0' must be a finite number"):
        Reports(**(GOOD | {"alone": cosine[:1] * 3 if isinstance(cosine, list) else cosine}))


def test_what_reports_and_tables_accept_scores_can_hold():
    assert fm.shapley(Table([-1e100, 1e100])).values.tolist() == [2e100]
    extreme = Reports(empty=-1e100, grand=1e100, alone=[1e100, 0], without=[-1e100, 0])
    assert fm.alpha(extreme).gain == 2e100
    assert fm.accumulate([extreme] * 3).gain == 3 * 2e100
    lever = Reports(empty=0, grand=1e95, alone=[1e95, -1e95 + 1e84], without=[1e95, 1e95])
    assert 1e105 < np.abs(fm.fp(lever).values).max() < 1e107
    with pytest.raises(
        ReportError, match=r"values of client 'A' must be a finite number, at most 1e\+150, got 1e"
    ):
        Scores(score="X", clients=("A",), values=[1e160], raw=[1], gain=1)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_are_read_only_too(again):
    r = Reports(**GOOD, cosine=[0, None, 1], round=3)
    for made in (r, Table([0, 1, 2, 5]), fm.alpha(r)):
        got = again(made)
        assert repr(got) == repr(made)
        for name, value in vars(got).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(value, getattr(made, name))
                with pytest.raises(ValueError, match="read-only"):
                    value[0] = 99


def test_a_table_of_reports_is_refused_with_the_reason():
    with pytest.raises(NeedsTable, match="all 2\\^N coalitions"):
        Table(Reports(**GOOD))


def test_ranks_share_ties_that_differ_by_rounding_only():
    raw = np.array([0.3 - 0.2, 0.2 - 0.1, 0.5])
    scores = Scores(score="X", clients=("A", "B", "C"), values=raw, raw=raw, gain=1.0)
    assert raw[0] != raw[1]
    assert scores.ranks().tolist() == [2, 2, 1]
    assert scores.ranking() == ("C", "A", "B")
    assert settle(np.zeros(2)).tolist() == [0, 0]
    # a fixed grid would part these two: they lie on either side of a multiple of 1/8192
    assert settle(np.array([1.0, 1 / 8192, np.nextafter(1 / 8192, 1)])).tolist() == [1, 0, 0]


def test_one_huge_score_ties_nobody_else():
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


def test_the_ranking_follows_raw_and_never_the_values():
    raw = np.array([1.0, 2.0])
    assert Scores(score="X", clients=("A", "B"), values=-raw, raw=raw, gain=0).ranking() == ("B", "A")


def test_ten_thousand_clients_score_without_a_quadratic_step():
    """No bound on seconds: ten times the clients may not cost fifty times the time."""
    rng = np.random.default_rng(0)

    def seconds(n):
        r = Reports(empty=0.1, grand=0.9, alone=rng.random(n), without=rng.random(n))
        start = time.perf_counter()
        for score in (fm.loo, fm.ioi, fm.alpha, fm.fp, fm.ee, fm.surplus):
            score(r)
        fm.ee(r, combine="median")
        fm.ee(r, combine="trimmed")
        return time.perf_counter() - start

    small = min(seconds(1_000) for _ in range(5))
    large = min(seconds(10_000) for _ in range(5))
    assert large < 50 * small


def test_the_public_names_are_what_is_exported():
    contract = """Reports Table Scores loo ioi alpha fp ee surplus solo shapley banzhaf semivalue accumulate
        influence agreement normalise shares payouts"""
    assert set(contract.split()) <= set(fm.__all__)
    assert len(set(fm.__all__)) == len(fm.__all__)
    public = {name for name, value in vars(fm).items() if not name.startswith("_") and not ismodule(value)}
    assert public == set(fm.__all__)


def test_every_error_and_the_sampled_value_are_in_the_reference():
    reference = (Path(__file__).parents[1] / "docs/api.md").read_text(encoding="utf-8")
    raised = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert len(raised) > 20
    for name in [
        *(f"errors.{name}" for name in raised),
        "scoring.ground_truth.sampled_shapley",
        "scoring.ground_truth.Sampled",
    ]:
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
