"""Scores as a frame, as CSV, and in a notebook."""

import csv
import io
import subprocess
import sys

import numpy as np
import pytest

import fedmerit as fm
from fedmerit.scoring.uncertainty import TRAINING

ROUND = fm.Reports(
    empty=0.1, grand=0.7, alone=[0.1, 0.3, 0.5], without=[0.7, 0.5, 0.3], clients=["A", "<b>B</b>", "C"],
    se_alpha=[0.01, 0.2, 0.2], round=1,
)  # fmt: skip


def test_a_frame_has_one_row_per_client():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    total = fm.accumulate([ROUND])
    frame = total.to_pandas()
    assert list(frame["client"]) == ["A", "<b>B</b>", "C"]
    np.testing.assert_array_equal(frame["raw"], total.raw)
    np.testing.assert_array_equal(frame["rank"], [3, 2, 1])
    np.testing.assert_allclose(
        frame["high"] - frame["low"], 2 * 1.959964 * np.hypot(1, TRAINING) * total.stderr, rtol=1e-6
    )
    assert list(frame["rank_low"]) == [1, 1, 1]
    assert set(frame["coverage"]) == {1.0}
    again = pandas.read_csv(io.StringIO(total.to_csv()), float_precision="round_trip")
    pandas.testing.assert_frame_equal(again, frame, check_exact=True)


def test_csv_reads_back_and_leaves_out_what_is_unknown():
    rows = list(csv.DictReader(io.StringIO(fm.loo(ROUND).to_csv())))
    assert [float(row["value"]) for row in rows] == fm.loo(ROUND).values.tolist()
    assert set(rows[0]) == {"client", "score", "value", "raw", "rank"}  # LOO has no standard error here


def test_a_notebook_shows_the_best_first_and_runs_no_name():
    shown = fm.accumulate([ROUND])._repr_html_()
    assert shown.index(">C<") < shown.index("&lt;b&gt;B&lt;/b&gt;") < shown.index(">A<")
    assert "<b>" not in shown
    assert "<td>+0.4000 ± 0.6123</td><td>1 (1-3)</td>" in shown
    assert "ALPHA, gain +0.6000" in shown


def test_a_notebook_says_when_values_must_not_be_used_and_what_is_cut_short():
    worse = fm.Reports(empty=0.5, grand=0.4, alone=[0.4, 0.45], without=[0.5, 0.45])  # alpha below zero
    shown = fm.fp(worse)._repr_html_()
    assert "status reversed: do not rank or pay by these values" in shown
    assert "±" not in shown

    names = tuple(f"c{k}" for k in range(99))
    shown = fm.Scores(score="ALPHA", clients=names, values=range(99), raw=range(99), gain=1)._repr_html_()
    assert shown.count('scope="row"') == 60
    assert "the first 60 of 99" in shown


RAGGED = {
    "Round": [1, 1.0, 2, 2], "member": ["A", "B", "A", "B"], "empty": [0.1, 0.1, 0.4, 0.4],
    "grand": ["0.5", 0.5, 0.6, 0.6], "alone": [0.2, 0.3, None, 0.5], "without": [0.4, 0.3, None, 0.5],
    "silent": [None, None, "yes", None], "se_alpha": [0.01, float("nan"), None, None],
}  # fmt: skip


def frames_of(columns):
    """The columns as a pandas frame and as one of polars, where a column has one type."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    polars = pytest.importorskip("polars", reason="polars is not installed")
    typed = {
        name: [*map(str, values)] if len({*map(type, values)}) > 1 and "0.5" in values else values
        for name, values in columns.items()
    }
    return pandas.DataFrame(columns), polars.DataFrame(typed, strict=False)


def test_frames_of_reports_are_read_like_tables(tmp_path):
    columns = RAGGED | {"se_alpha": [0.01, 0.02, None, 0.03]}
    for frame in frames_of(columns):
        one, two = fm.read(frame, utility="accuracy")
        assert (one.clients, two.clients, two.silent) == (("A", "B"), ("B",), ("A",))
        assert (one.alone.tolist(), two.empty, two.utility) == ([0.2, 0.3], 0.4, "accuracy")
        assert (one.round, one.se_alpha.tolist()) == (1, [0.01, 0.02])
    for frame in frames_of(RAGGED):
        with pytest.raises(fm.FedmeritError) as refused:
            fm.read(frame)
        assert str(refused.value).startswith("the frame: row 2: se_alpha of client 'B' in round 1")
        assert str(refused.value).endswith("is missing: fill in cell 'se_alpha' of row 2")
        with pytest.raises(fm.FedmeritError, match=r"the frame: decimal is only of \.csv and \.xlsx files"):
            fm.read(frame, decimal=",")
    with pytest.raises(
        fm.FedmeritError, match="expected the path of a file of reports, or a frame, got Lazy"
    ):
        fm.read(frames_of(columns)[1].lazy())
    for frame in frames_of({"round": [1], "member": ["A"]}):
        with pytest.raises(fm.FedmeritError, match="missing columns 'empty', 'grand', 'alone', 'without'"):
            fm.read(frame)
    twice = frames_of(columns)[0].rename(columns={"Round": "member"})
    with pytest.raises(fm.FedmeritError, match="the frame: column 'member' appears twice"):
        fm.read(twice)


def test_payouts_are_a_table_in_a_notebook():
    shown = fm.payouts({"<b>A</b>": 0.25, "B": 0.5}, "1000.00 EUR")._repr_html_()
    assert "budget 1,000.00 EUR, unpaid 250.00 EUR" in shown
    assert shown.index(">B</th><td>500.00<") < shown.index(">&lt;b&gt;A&lt;/b&gt;</th><td>250.00<")


def test_scores_shares_and_panels_are_plotted_best_first_and_nothing_is_shown():
    pytest.importorskip("altair", reason="altair is not installed")
    total = fm.accumulate([ROUND])
    drawn = total.plot().to_dict()
    bars, whiskers = drawn["layer"]
    (rows,) = drawn["datasets"].values()
    assert [row["client"] for row in rows] == ["C", "<b>B</b>", "A"]
    frame = total.to_pandas().set_index("client")
    assert {row["client"]: row["low"] for row in rows} == dict(frame["low"])
    assert (bars["encoding"]["x"]["field"], whiskers["encoding"]["x2"]["field"]) == ("raw", "high")
    plain = fm.shares(total, rule="equal").plot().to_dict()
    assert len(plain["layer"]) == 1
    assert plain["layer"][0]["encoding"]["x"]["field"] == "share"
    drawn = fm.Panel([[5, 1, 3], [2, 4, 0], [0, 1, 2]], ["A", "<b>B</b>", "C"]).plot().to_dict()
    (cells,) = drawn["datasets"].values()
    assert [cell["value"] for cell in cells if cell["client"] == "<b>B</b>"] == [2, 4, 0]
    assert {name: drawn["encoding"][name]["field"] for name in "xy"} == {"x": "judge", "y": "client"}


def test_without_pandas_one_is_told_what_to_do():
    program = (
        "import sys; sys.modules['pandas'] = None\nimport fedmerit as fm\n"
        "s = fm.Scores(score='ALPHA', clients=('A',), values=[1], raw=[1], gain=1)\n"
        "try: s.to_pandas()\nexcept fm.FedmeritError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "a frame needs: pip install pandas; to_csv() needs nothing\n"
