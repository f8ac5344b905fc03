"""Numbers with labels: a pandas Series is read by what its labels say, or refused."""

import numpy as np
import pytest

from fedmerit.errors import InputError, ReportError
from fedmerit.scoring.agreement import agreement
from fedmerit.scoring.ground_truth import semivalue
from fedmerit.scoring.types import Reports, Scores, Table
from fedmerit.scoring.uncertainty import compare_pairs, pair_errors

pd = pytest.importorskip("pandas", reason="pandas is not installed")

GOOD = {"empty": 0.0, "grand": 3.0, "alone": [0, 1, 2], "without": [3, 2, 1]}


def scored(values, clients):
    return Scores(score="ALPHA", clients=tuple(clients), values=values, raw=values, gain=1.0)


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


def test_a_series_of_coalitions_counts_them():
    assert Table(pd.Series([0, 1, 2, 5])).values.tolist() == [0, 1, 2, 5]
    with pytest.raises(ReportError, match=r"labels must be the bitmasks 0, 1, 2, ..., got 1 first"):
        Table(pd.Series([0, 1], index=[1, 0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"alone": pd.Series([0, 1, 2], index=[2, 1, 0])},
            "alone: expected the clients as labels, 'client-0', .* or 0, 1, ... in .*; got 2, 1, 0",
        ),
        (
            {"without": pd.Series([3, 2, 1], index=list("ABD")), "clients": list("ABC")},
            "without: expected the clients as labels, 'A', 'B', 'C', .* got 'A', 'B', 'D'",
        ),
        (
            {"without": pd.Series([3, 2, 1, 0], index=list("ABCC")), "clients": list("ABC")},
            "without: expected the clients as labels, 'A', 'B', 'C', .* got 'A', 'B', 'C', 'C'",
        ),
    ],
)
def test_labels_that_are_not_the_clients_are_refused(change, message):
    with pytest.raises(ReportError, match=message):
        Reports(**(GOOD | change))


def test_series_are_matched_by_label_where_both_sides_have_names():
    truth = pd.Series({"C": 3, "A": 1, "B": 2})
    assert agreement(scored([1, 2, 3], "ABC"), truth).spearman == 1.0
    assert agreement(truth, scored([1, 2, 3], "ABC")).spearman == 1.0
    assert agreement(pd.Series({"B": 20, "C": 30, "A": 10}), truth).spearman == 1.0
    assert (
        agreement(pd.Series([1, 2, 3], index=[7, 5, 6]), pd.Series([2, 3, 1], index=[5, 6, 7])).kendall == 1
    )
    assert agreement([3, 1, 2], truth).spearman == 1.0  # a list has no names: by position
    assert agreement(pd.Series([3, 1, 2]), truth).spearman == 1.0
    with pytest.raises(ReportError, match="client 'A' is only in ALPHA"):
        agreement(scored([1, 2], "AB"), pd.Series([1, 2], index=["B", "C"]))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (pd.Series([1, 2], index=["A", "A"]), [1, 2], "scores: label 'A' appears more than once"),
        (
            pd.Series({"A": 1, "B": 2}),
            pd.Series({"A": 1, "C": 2}),
            "client 'B' is only in scores; both need the same clients",
        ),
    ],
)
def test_labels_that_cannot_be_matched_are_named(x, y, message):
    with pytest.raises(ReportError, match=message):
        agreement(x, y)


def test_a_covariance_is_matched_by_its_labels():
    three = scored([1, 2, 3], "ABC")
    known = pd.DataFrame(np.diag([0.01, 0.01, 4.0]), index=list("ABC"), columns=list("ABC"))
    known.loc["A", "B"] = known.loc["B", "A"] = 0.005
    expected = compare_pairs(three, covariance=known.to_numpy())
    assert expected.better[1, 0]  # B better than A, and nobody better than B
    assert expected.better.sum() == 1
    for rows, columns in (("ABC", "ABC"), ("CBA", "CBA"), ("BCA", "CAB")):
        got = compare_pairs(three, covariance=known.loc[list(rows), list(columns)])
        assert got.better.tolist() == expected.better.tolist()
        assert got.stderr.tolist() == expected.stderr.tolist()
    counted = pd.DataFrame(known.to_numpy())
    assert compare_pairs(three, covariance=counted).stderr.tolist() == expected.stderr.tolist()
    for bad, axis, got in (
        (known.rename(index={"A": "D"}), "rows", "'D', 'B', 'C'"),
        (known.rename(columns={"A": "D"}), "columns", "'D', 'B', 'C'"),
        (known.reset_index(drop=True), "rows", "0, 1, 2"),
        (counted.iloc[::-1, ::-1], "rows", "2, 1, 0"),
        (known.iloc[:2, :2], "rows", "'A', 'B'"),
    ):
        with pytest.raises(
            ReportError, match=f"covariance, {axis}: expected the clients as labels, .*; got {got}"
        ):
            pair_errors(three, covariance=bad)


def test_weights_of_sizes_are_labelled_by_the_sizes_or_not_at_all():
    table = Table([0, 1, 2, 5])
    assert semivalue(table, pd.Series([0, 1])).values.tolist() == [3, 4]
    with pytest.raises(InputError, match=r"labels of weights must be the sizes 0, 1, 2, ..., got 1 first"):
        semivalue(table, pd.Series([1, 0], index=[1, 0]))
