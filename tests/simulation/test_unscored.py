"""Rounds without a score: aborted ones and those that nobody reported on are told apart, everywhere."""

import json
import re
import shutil

import pytest

import ledgers
from command_line import call
from fedmerit.errors import StoreError
from fedmerit.files.reports import read_content
from fedmerit.ledger.rounds import aborted, unreported
from fedmerit.report.page.html import page, page_of_run
from fedmerit.simulation.run import run
from runs import read_run, records_of, source_in
from tiny import losing, tiny

UNHEARD = ("training.rounds=4", "participation.away={client-0 = [3], client-1 = [3]}")
SUMMED = "round 1 was summed, but nobody reported on it: what changed in the model then is in no score"
ABORTED = "round 3 was aborted: the model stayed as it was"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Round 1 is summed and all reports on it are lost; round 3 is aborted; 2 and 4 are as they should be."""
    path = tmp_path_factory.mktemp("unheard") / "run"
    with losing({f"client-{i}": "1:report" for i in range(4)}):
        run(tiny(*UNHEARD), path)
    return path


@pytest.fixture
def folder(made, tmp_path):
    """A copy, so that what one test decides is not what another one reads."""
    return shutil.copytree(made, tmp_path / "copied")


def test_the_two_kinds_are_told_apart(folder):
    rounds, _, _ = read_run(folder)
    counts = [(len(closed.included), len(closed.reports)) for closed in rounds]
    assert counts == [(4, 0), (4, 4), (0, 0), (4, 4)]
    assert (aborted(rounds), unreported(rounds)) == ((3,), (1,))
    verified = call("verify", folder).output
    assert "rounds: 4 of 4, 1 aborted, 1 summed without any report (round 1)\n" in verified


def test_a_statement_does_not_say_that_a_summed_round_did_not_come_about(folder):
    assert call("rewards", folder, "--budget", "100", "--rule", "equal").exit_code == 0
    text = (folder / "statements" / "client-2.md").read_text()
    assert "- Round 3 was aborted: the shared model stayed as it was." in text
    assert "- Round 1 was summed, but no member reported on it: nobody's score includes" in text
    assert "in all." not in text
    plain = json.loads((folder / "statements" / "client-2.json").read_text())
    assert (plain["aborted"], plain["unreported"]) == ([3], [1])


@pytest.mark.parametrize("command", [("score",), ("rewards", "--budget", "1", "--dry-run")])
def test_scores_and_payouts_come_with_a_note_of_either_kind(folder, command):
    said = call(command[0], folder, *command[1:]).output
    assert f"note: {SUMMED} and in no gain\n" in said
    assert f"note: {ABORTED}\n" in said


@pytest.mark.parametrize("decided", [False, True])
def test_the_page_says_it_where_it_is_read_first(folder, decided):
    if decided:
        assert call("rewards", folder, "--budget", "100", "--rule", "equal").exit_code == 0
    said = re.sub(r"<(script|style)\b.*?</\1>", "", page(folder), flags=re.S)
    lede = said[said.index('<p class="lede">') :].split("</p>")[0]
    assert "Round 1 was summed, but nobody reported on it" in lede
    assert "not scored: summed, but no member reported" in said
    assert "Round 3 was aborted: the model stayed as it was." in said
    assert re.search("model’s gain of [^ ]+ points in the rounds with reports[.]", said)


def test_reports_of_the_ledger_are_those_of_the_score_file(folder):
    for utility in (None, "accuracy"):
        ledger = source_in(folder, utility=utility)
        file = read_content(folder / "scores.json", utility=utility)
        assert ledger.clients == file.clients
        for one, other in zip(ledger.rounds, file.rounds, strict=True):
            assert repr(one) == repr(other)


# ------------------------------------------------------------------------------------------- nothing scored


@pytest.fixture
def begun(folder, tmp_path):
    """The folder of a run whose ledger was cut after so many records of a kind."""

    def cut(kind, which):
        path = tmp_path / "run"
        path.mkdir()
        for name in ("config.toml", "ledger.sqlite"):
            (path / name).write_bytes((folder / name).read_bytes())
        last = records_of(path, kind)[which].seq if kind else 0
        ledgers.cut(path / "ledger.sqlite", last)
        return path

    return cut


@pytest.mark.parametrize(
    ("kind", "which", "holds"),
    [
        ("", 0, "its ledger is empty"),
        ("pool", 0, "its ledger holds 2 records, 0 of 4 rounds closed"),
        ("schedule", 0, "its ledger holds 7 records, 0 of 4 rounds closed; round 1 begun and not closed"),
        ("scores", 0, "its ledger holds 11 records, 1 of 4 rounds closed; round 1 summed, but without any"
         " report"),
    ],
)  # fmt: skip
def test_without_a_scored_round_commands_say_so_and_what_there_is(begun, kind, which, holds):
    path = begun(kind, which)
    for command in (("score",), ("rewards", "--budget", "1"), ("page",)):
        error = call(command[0], path, *command[1:]).exception
        assert isinstance(error, StoreError)
        assert str(error) == f"{path}: no round is scored yet: {holds}"
    assert page_of_run(path) == f"no page: {path}: no round is scored yet: {holds}"
    assert sorted(item.name for item in path.iterdir()) == ["config.toml", "ledger.sqlite"]


@pytest.mark.parametrize(
    ("lost", "why", "lacked"),
    [
        ("masked", "round 1 aborted (round 1: stage masked: 3 members left, 5 are needed)",
         "more members who stay to the end of a round or a lower secure_aggregation.threshold, which "
         "protects less"),
        ("report", "round 1 summed, but without any report", "members who report"),
    ],
)  # fmt: skip
def test_a_run_that_is_over_without_a_score_says_why_and_what_another_needs(tmp_path, lost, why, lacked):
    gone = {f"client-{i}": f"1:{lost}" for i in range(3 if lost != "report" else 6)}
    six = ("partition.clients=6", "partition.sizes=[40, 40, 40, 40, 40, 40]")
    with losing(gone):
        run(tiny("training.rounds=1", *six), tmp_path / "run")
    error = call("score", tmp_path / "run").exception
    assert isinstance(error, StoreError)
    assert re.sub(r"\d+ records", "N records", str(error)) == (
        f"{tmp_path / 'run'}: no round was scored, and the run is over: its ledger holds N records, "
        f"1 of 1 rounds closed; {why}; start another in a new folder, with {lacked}"
    )


def test_scores_of_a_run_that_is_not_over_say_so(folder, begun):
    path, said = begun("scores", 1), "WARNING: the run is not over: this covers 2 of 4 rounds\n"
    assert call("score", path).stdout.startswith(said)
    for kind in ("json", "csv"):
        result = call("score", path, "--format", kind)
        assert (result.exit_code, result.stderr) == (0, said)
        assert "WARNING" not in result.stdout
    assert "WARNING" not in call("score", folder).output
