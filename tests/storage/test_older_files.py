"""Score files that a kill left older than the ledger: told, read past, written anew; never an error."""

import itertools
import json
import shutil
import sqlite3
import subprocess
import time

import pytest

from command_line import FEDMERIT, call
from fedmerit import verify
from fedmerit.config import from_dict
from fedmerit.errors import CopyDiffers, LedgerError, StoreError
from fedmerit.report.page.html import page
from fedmerit.simulation.run import run
from fedmerit.storage.checks import read_scores
from fedmerit.storage.recorder import score_files, scores_document
from fedmerit.storage.run_folder import Folder
from fedmerit.verify import verify_folder
from raising import raises
from runs import renew, rounds_in
from tiny import TINY, losing, tiny

pytestmark = pytest.mark.long

CONFIG = tiny("training.rounds=3")
BOTH = ("scores.json", "scores.csv")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("older") / "run"
    with losing({"client-3": "3:report"}):  # so that scores.csv gets a column with the last round
        run(CONFIG, path)
    return path


@pytest.fixture
def older(whole, tmp_path):
    """The folder with files as they were some rounds before; None: as before the first."""

    def made(held, *names):
        path = shutil.copytree(whole, tmp_path / "run")
        files = score_files(scores_document(rounds_in(path)[:held], CONFIG))
        for name in names or BOTH:
            if held:
                (path / name).write_bytes(files[name])
            else:
                (path / name).unlink()
        return path

    return made


@pytest.mark.parametrize(
    ("held", "names", "said"),
    [
        (2, BOTH, "scores.json is 1 round older than the ledger, scores.csv is 1 round older than the "),
        (1, BOTH, "scores.json is 2 rounds older than the ledger, scores.csv is 2 rounds older than the "),
        (2, BOTH[1:], "scores.csv is 1 round older than the ledger: `fedmerit page "),
        (0, BOTH, "scores.json is missing, scores.csv is missing: `fedmerit page "),
        (0, BOTH[1:], "scores.csv is missing: "),
    ],
)
def test_older_files_are_told_and_written_anew_as_the_engine_would_have(older, whole, held, names, said):
    folder = older(held, *names)
    lines = list(verify_folder(folder))
    (about,) = [line for line in lines if line.startswith("files: ")]
    assert about.startswith(f"files: {said}")
    assert "or `fedmerit rewards` writes what is missing, from the ledger" in about
    done = call("rewards", folder, "--budget", "10", "--rule", "equal")
    assert done.exit_code == 0
    assert f"wrote {' and '.join(names)} again, from the ledger" in done.output
    for name in BOTH:
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert not [line for line in verify_folder(folder) if line.startswith("files: ")]


def test_scores_and_page_of_older_files_have_all_rounds(older, whole):
    folder = older(1)
    for command in (("score",), ("score", "--format", "json"), ("rewards", "--budget", "9", "--dry-run")):
        assert call(command[0], folder, *command[1:]).output == call(command[0], whole, *command[1:]).output
    assert (folder / "scores.json").read_bytes() != (whole / "scores.json").read_bytes()
    elsewhere = folder.parent / "elsewhere.html"
    assert call("page", folder, "--out", elsewhere).exit_code == 0
    text = elsewhere.read_text()
    assert "Over three rounds" in text
    assert "scores.json is 2 rounds older than the ledger" in text
    assert (folder / "scores.json").read_bytes() != (whole / "scores.json").read_bytes()
    done = call("page", folder)
    assert "wrote scores.json and scores.csv again, from the ledger" in done.output
    assert (folder / "scores.json").read_bytes() == (whole / "scores.json").read_bytes()
    assert "older than the ledger" not in next(folder.glob("page*.html")).read_text()


@pytest.mark.parametrize("name", BOTH)
def test_an_older_file_that_says_something_else_is_an_error_and_stays(older, name):
    folder = older(2)
    text = (folder / name).read_text()
    places = [k for k, letter in enumerate(text) if letter == "." and text[k + 1] in "12345678"]
    k = places[len(places) // 2]
    changed = text[: k + 1] + "9" + text[k + 2 :]
    (folder / name).write_text(changed)
    with pytest.raises(LedgerError, match=rf"^{name}.*: states "):
        list(verify_folder(folder))
    assert "states" in str(call("rewards", folder, "--budget", "1").exception)
    assert (folder / name).read_text() == changed


def rounded(folder):
    """scores.csv as a spreadsheet saves what it shows: ten digits of every number."""
    rows = [line.split(",") for line in (folder / "scores.csv").read_text().splitlines()]
    for row in rows:  # a sketch is text to it
        row[:] = [f"{float(cell):.10g}" if "." in cell and " " not in cell else cell for cell in row]
    (folder / "scores.csv").write_text("".join(",".join(row) + "\n" for row in rows))


@pytest.mark.parametrize("without_json", [False, True])
def test_a_changed_copy_accuses_no_ledger_and_hides_no_decision(whole, tmp_path, without_json):
    folder = shutil.copytree(whole, tmp_path / "run")
    assert call("rewards", folder, "--budget", "10", "--rule", "equal").exit_code == 0
    rounded(folder)
    if without_json:
        (folder / "scores.json").unlink()
    lines = []
    with pytest.raises(CopyDiffers, match=r"^scores\.csv line\.2\..*: states ") as caught:
        lines.extend(verify_folder(folder))
    advice = f"scores.csv is a copy that was changed: delete it, and `fedmerit page {folder}` writes it again"
    assert advice in str(caught.value)
    assert any(line.startswith("payouts: decision 1 ") for line in lines)
    assert lines[-1].startswith("head: ")
    done = call("page", folder)
    assert done.exit_code == 0
    assert advice in done.output.replace("\n", " ")
    said = next(folder.glob("page*.html")).read_text()
    assert "does not verify" not in said
    assert "scores.csv beside the ledger was changed." in said
    assert "Decision 1 is in force: it divides 10.00 EUR by the rule “equal”" in said.replace("\xa0", " ")
    assert str(call("rewards", folder, "--budget", "9").exception).endswith(advice)
    (folder / "scores.csv").unlink()  # as advised
    assert call("page", folder).exit_code == 0
    assert "was changed" not in next(folder.glob("page*.html")).read_text()
    assert (folder / "scores.csv").read_bytes() == (whole / "scores.csv").read_bytes()
    assert list(verify_folder(folder))


def test_a_last_round_that_was_aborted_leaves_the_tidy_file_as_it_is(tmp_path):
    config = tiny("participation.away={client-0 = [2], client-1 = [2]}")
    run(config, tmp_path / "run")
    content = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert content["rounds"][1]["aborted"]
    assert not [line for line in verify_folder(tmp_path / "run") if line.startswith("files: ")]


def test_what_only_a_resumed_run_can_write_is_left_to_it(tmp_path):
    config = tiny("training.rounds=1", "scoring.truth=['mr-shapley']")
    run(config, tmp_path / "run")
    (tmp_path / "run" / "scores.csv").unlink()
    (about,) = [line for line in verify_folder(tmp_path / "run") if line.startswith("files: ")]
    assert about.startswith("files: scores.csv is missing: `fedmerit run --resume` writes what is missing")
    with pytest.raises(
        StoreError, match="holds ground truth, which the ledger does not: `fedmerit run --resume`"
    ):
        renew(tmp_path / "run")
    run(config, tmp_path / "run", resume=True)
    assert renew(tmp_path / "run") == ""


def test_files_are_not_written_beside_a_process_that_holds_the_folder(older):
    folder = older(2)
    before = read_scores(folder)
    with Folder(folder, CONFIG, resume=True):
        done = call("page", folder)
        assert "score files were left as they are: " in done.output
        assert "another process is running in this folder" in done.output
        refused = call("rewards", folder, "--budget", "1", "--rule", "equal").exception
        assert "another process is running in this folder" in str(refused)
    assert read_scores(folder) == before


# -------------------------------------------------------------------------------- beside a running process


@pytest.mark.timeout(1800)
def test_a_run_that_goes_on_raises_no_false_alarm(tmp_path, monkeypatch):
    """A real `fedmerit run` of short rounds, and verify beside it until it saw five different counts.

    Between a round and its score files the run may wait long for a busy machine: verify has more patience.
    """
    monkeypatch.setattr(verify, "PAUSE", 3.0)
    config, folder = tmp_path / "short.toml", tmp_path / "run"
    settings = ["model.name=mlp", "training.rounds=2000", "scoring.utilities=['accuracy']"]
    config.write_text(from_dict(TINY, settings).to_toml())
    command = [*FEDMERIT, "run", config, "--out", folder]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seen = []
    try:
        while not (folder / "scores.csv").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        while len(set(seen)) < 5:
            assert process.poll() is None, process.stderr.read()
            lines = list(verify_folder(folder))
            (rounds,) = [line for line in lines if line.startswith("rounds: ")]
            seen.append(int(rounds.split()[1]))
            for line in lines:
                assert not line.startswith("files: ") or "a process is running in this folder" in line
    finally:
        process.kill()
        process.communicate()
    assert seen == sorted(seen)
    assert list(verify_folder(folder))


def test_a_file_that_is_written_while_it_is_read_is_read_again(older, whole, monkeypatch):
    folder = older(2)
    readings = []

    def slowly(path):
        readings.append(read_scores(path))
        for name in BOTH:
            shutil.copy(whole / name, folder / name)  # the process that holds the folder gets there now
        return readings[-1]

    monkeypatch.setattr(verify, "read_scores", slowly)
    assert not [line for line in verify_folder(folder) if line.startswith("files: ")]
    assert len(readings) == 2


def test_a_ledger_that_never_rests_is_said_to_be_written_in(older, monkeypatch):
    folder = older(2)
    (folder / "scores.json").write_text("{}")
    monkeypatch.setattr(verify, "PAUSE", 0)
    heads = itertools.count()
    monkeypatch.setattr(verify, "head_of", lambda _: str(next(heads)))
    with pytest.raises(
        LedgerError, match=r"a process keeps writing in this folder: .* each of 5 readings; .*"
    ):
        list(verify_folder(folder))
    assert next(heads) == 2 * verify.ATTEMPTS


def test_a_damaged_ledger_is_damaged_and_not_in_motion_or_without_scores(older, monkeypatch):
    folder = older(0)
    monkeypatch.setattr(verify, "PAUSE", 3600)
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        db.execute("UPDATE records SET body = x'7b' WHERE seq = 8")
    db.close()
    with raises(LedgerError, record=8, code="unreadable"):
        list(verify_folder(folder))
    with raises(LedgerError, record=8, code="unreadable"):
        page(folder)
