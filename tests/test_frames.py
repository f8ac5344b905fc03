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
    assert set(rows[0]) == {
        "client",
        "score",
        "value",
        "raw",
        "rank",
    }  # no standard error of LOO was reported


def test_a_notebook_shows_the_best_first_and_runs_no_name():
    shown = fm.accumulate([ROUND])._repr_html_()
    assert shown.index(">C<") < shown.index("&lt;b&gt;B&lt;/b&gt;") < shown.index(">A<")
    assert "<b>" not in shown
    assert "<td>+0.4000 ± 0.6123</td><td>1 (1-3)</td>" in shown
    assert "ALPHA, gain +0.6000" in shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [(2e-5, "+0.0000200 ± 0.0000020"), (2.0, "+2.0000 ± 0.1960"), (2e4, "+20000.00 ± 1959.96")],
)
def test_a_notebook_shows_as_many_decimals_as_the_terminal(size, shown):
    raw = np.array([size, -size / 2])
    found = fm.Scores(
        score="ALPHA", clients=("A", "B"), values=raw, raw=raw, gain=size, stderr=[size / 20] * 2
    )
    assert f"<td>{shown}</td>" in found._repr_html_()
    assert f"gain {shown.split()[0]}" in found._repr_html_()


def test_a_notebook_says_when_values_must_not_be_used():
    worse = fm.Reports(empty=0.5, grand=0.4, alone=[0.4, 0.45], without=[0.5, 0.45])  # alpha below zero
    shown = fm.fp(worse)._repr_html_()
    assert "status reversed: do not rank or pay by these values" in shown
    assert "±" not in shown


def test_many_clients_are_cut_short_and_it_is_said():
    many = fm.Scores(
        score="ALPHA", clients=tuple(f"c{k}" for k in range(99)), values=range(99), raw=range(99), gain=1
    )
    shown = many._repr_html_()
    assert shown.count('scope="row"') == 60
    assert "the first 60 of 99" in shown


def test_without_pandas_one_is_told_what_to_do():
    program = (
        "import sys; sys.modules['pandas'] = None\nimport fedmerit as fm\n"
        "s = fm.Scores(score='ALPHA', clients=('A',), values=[1], raw=[1], gain=1)\n"
        "try: s.to_pandas()\nexcept fm.FedmeritError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "a frame needs: pip install 'fedmerit[pandas]'; to_csv() needs nothing\n"
