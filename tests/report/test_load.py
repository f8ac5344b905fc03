"""`fedmerit.load`: a run folder as objects, frames and in a notebook."""

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

import fedmerit as fm
from fedmerit.errors import LedgerError, StoreError
from fedmerit.identity import exact, number
from fedmerit.ledger.chain import Ledger
from fedmerit.report.source import read_source
from fedmerit.simulation.run import run
from runs import records_of, run_in
from tiny import losing, tiny

NAMED = ("partition.names=['<i>A', 'B', 'C', 'D']", "scoring.utilities=['expected-accuracy']")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    home = tmp_path_factory.mktemp("load")
    for method in ("reports", "settled"):
        plain = (f"scoring.method={method}", "secure_aggregation.enabled=false")
        run(tiny(*NAMED, *plain, "training.rounds=3", "participation.away={C = [2]}"), home / method)
    return home


@pytest.mark.parametrize(("method", "score"), [("reports", "ALPHA"), ("settled", "PHI")])
def test_scores_rounds_and_decisions_are_those_of_the_command_line(runs, tmp_path, fedmerit, method, score):
    folder = shutil.copytree(runs / method, tmp_path / "run")
    found = fm.load(str(folder))
    assert (found.scores.score, found.scores.rounds) == (score, 3)
    assert found.clients == ("<i>A", "B", "C", "D")
    assert [one.number for one in found.rounds] == [1, 2, 3]
    assert found.rounds[1].included == ("<i>A", "B", "D")
    for name, value in found.scores.as_dict().items():
        parts = [one.scores.as_dict().get(name, 0.0) for one in found.rounds]
        assert sum(parts) == pytest.approx(value)
    assert (found.rounds[0].reports is None) == (method == "settled")
    assert found.decisions == ()
    assert any(note.code == "head" for note in found.checks)
    fedmerit.said("rewards", folder, "--budget", "100", "--rule", "equal")
    again = fm.load(folder)
    assert again.head != found.head
    (decision,) = again.decisions
    assert sum(decision.paid.values()) == 100
    assert decision.terms.rule == "equal"


def test_frames_have_one_row_per_member_per_round_and_per_payout(runs, tmp_path, fedmerit):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    folder = shutil.copytree(runs / "reports", tmp_path / "run")
    fedmerit("rewards", folder, "--budget", "100", "--rule", "equal")
    found = fm.load(folder)
    pandas.testing.assert_frame_equal(found.frame(), found.scores.to_pandas())
    rounds = found.frame("rounds")
    assert list(rounds.columns) == ["round", "client", "summed", "score", "value"]
    assert len(rounds) == 12
    assert rounds[~rounds["summed"]][["round", "client"]].values.tolist() == [[2, "C"]]
    assert rounds["value"].isna().sum() == 1
    paid = found.frame("decisions")
    assert list(paid.columns) == ["decision", "rule", "client", "share", "payout"]
    assert sum(paid["payout"]) == 100


def test_a_notebook_shows_scores_and_the_last_decision_and_runs_no_name(runs, tmp_path, fedmerit):
    folder = shutil.copytree(runs / "reports", tmp_path / "run")
    before = fm.load(folder)._repr_html_()
    assert "4 members, 3 of 3 rounds" in before
    assert "ALPHA summed over 3 rounds" in before
    assert "decision" not in before
    fedmerit("rewards", folder, "--budget", "100 EUR", "--rule", "equal")
    shown = fm.load(folder)._repr_html_()
    assert "decision 1: budget 100.00 EUR, rule equal" in shown.replace("\u00a0", " ")
    assert "<td>25.00</td>" in shown
    assert "&lt;i&gt;A" in shown
    assert "<i>" not in shown
    assert repr(fm.load(folder)) == f"Run({str(folder)!r}: 4 members, 3 of 3 rounds)"
    fedmerit("rewards", folder, "--budget", "100", "--currency", "JPY", "--rule", "equal")  # has no decimals
    assert "<td>25</td>" in fm.load(folder)._repr_html_()


def test_what_is_no_run_or_does_not_verify_is_refused(runs, tmp_path):
    (tmp_path / "reports.csv").write_text("round,client\n")
    for path, said in (
        (tmp_path, "holds no run: no ledger"),
        (tmp_path / "reports.csv", "got a file; fedmerit.r"),
    ):
        with pytest.raises(LedgerError, match=said):
            fm.load(path)
    folder = shutil.copytree(runs / "reports", tmp_path / "run")
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db, db:
        db.execute("UPDATE records SET body = replace(body, 'a', 'b') WHERE kind = 'report'")
    with pytest.raises(LedgerError) as caught:
        fm.load(folder)
    assert caught.value.record is not None


def test_a_score_file_that_was_changed_is_noted_and_not_read(runs, tmp_path):
    folder = shutil.copytree(runs / "reports", tmp_path / "run")
    file = folder / "scores.json"
    file.write_text(file.read_text().replace('"ALPHA": [\n', '"ALPHA": [\n  7.0,\n', 1))
    found = fm.load(folder)
    assert any(note.code == "problem" and "scores.json" in note for note in found.checks)
    assert found.scores.as_dict() == fm.load(runs / "reports").scores.as_dict()


def test_a_run_without_a_score_says_so(tmp_path):
    lost = dict.fromkeys(("B", "C"), "1:masked")
    with losing(lost):
        run(tiny(*NAMED, "training.rounds=1"), tmp_path / "run")
    with pytest.raises(StoreError, match="no round was scored"):
        fm.load(tmp_path / "run")


@pytest.mark.parametrize("shown", [fm.load, read_source, partial(read_source, damaged=True)])
@pytest.mark.parametrize("false", [1, 2])
def test_what_is_shown_is_what_was_verified(runs, tmp_path, monkeypatch, shown, false):
    """A ledger that answers falsely once: all that is shown comes from the reading that was verified."""
    folder = shutil.copytree(runs / "reports", tmp_path / "run")
    true, run, readings = records_of(folder), run_in(folder), []

    def read(ledger, kind=None):
        readings.append(kind)
        return map(doubled, true) if len(readings) == false else iter(true)

    monkeypatch.setattr(Ledger, "records", read)
    try:
        found = shown(folder)
    except LedgerError:
        assert false == 1
        return
    assert bool(getattr(found, "broken", "")) == (false == 1)
    assert bool(getattr(found, "broken", "")) or readings == [None]
    rounds = found.rounds
    values = [(getattr(one, "reports", None) or one).alone.tolist() for one in rounds]
    assert values == [one.to_reports("expected-accuracy").alone.tolist() for one in run.rounds]


def doubled(record):
    if record.kind != "report":
        return record
    measured = {
        name: {**one, "alone": exact(2 * number(one["alone"]))}
        for name, one in record.body["measured"].items()
    }
    return replace(record, body={**record.body, "measured": measured})
