"""What an earlier version wrote is verified, resumed, scored, shown and paid by this one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedmerit
from fedmerit.cli import app
from fedmerit.config import load, of_folder
from fedmerit.errors import LedgerError, StoreError
from fedmerit.ledger.chain import Ledger
from fedmerit.simulation.run import run
from fedmerit.verify import verify_folder
from older_files import copied

pytestmark = pytest.mark.long

SCORED = ("masked", "unmasked", "grouped", "sampled", "interrupted", "flower", "flower-stopped")
ROUNDS = {"masked": 4, "unmasked": 2, "grouped": 2, "sampled": 3, "interrupted": 2, "flower": 3,
          "flower-stopped": 2}  # fmt: skip
SITES = [f"Site {i}" for i in range(1, 5)]


@pytest.fixture
def old(tmp_path, monkeypatch):
    """The files of version 0.1.0, in the folder where fedmerit runs."""
    monkeypatch.chdir(copied("0.1.0", tmp_path))
    return Path.cwd()


def call(*arguments):
    found = CliRunner().invoke(app, [str(one) for one in arguments])
    assert found.exit_code == 0, found.output
    return found.output


@pytest.mark.parametrize("name", SCORED)
def test_a_run_folder_verifies(old, name):
    lines = call("verify", name).splitlines()
    assert "scores: follow from the reports in the ledger" in lines
    assert any(line.startswith(f"rounds: {ROUNDS[name]} of ") for line in lines)
    with Ledger(old / name / "ledger.sqlite", read_only=True) as ledger:
        assert lines[0].startswith(f"ledger: {len(ledger)} records, chain ")
        assert lines[-1] == f"head: {ledger.head}"


def test_decisions_of_an_earlier_version_follow_to_the_cent(old):
    assert "1,000.00 by the rule fair follows from the scores, to the cent" in call("verify", "masked")
    assert "1,234.56 by the rule fenced follows from the scores, to the cent" in call("verify", "masked")
    assert "750.00 by the rule fair" in call("verify", "flower", "--roster", "roster.toml")
    assert "for client-1" in call("verify", "grouped-client-1.jsonl")


@pytest.mark.parametrize("run", ["flower", "flower-stopped"])
@pytest.mark.parametrize("site", SITES)
def test_a_members_own_file_is_compared(old, run, site):
    with Ledger(old / run / "ledger.sqlite", read_only=True) as ledger:
        (first,) = ledger.records("run")
    heads = old / "members" / f"{site}.pem.state" / first.body["run"] / "heads"
    assert "are on the chain" in call("verify", run, "--heads", heads, "--roster", "roster.toml")


@pytest.mark.parametrize("name", SCORED)
def test_a_run_folder_is_scored_and_shown(old, name):
    recorded = json.loads((old / name / "scores.json").read_text())
    ranked = sorted(
        (pair for pair in zip(recorded["clients"], recorded["cumulative"]["ALPHA"], strict=True)
         if pair[1] is not None),
        key=lambda pair: -pair[1],
    )  # fmt: skip
    said = call("score", name)
    places = [re.search(rf"^\W*\d*\W*{re.escape(client)}\b", said, re.MULTILINE) for client, _ in ranked]
    assert all(places)
    assert [one.start() for one in places] == sorted(one.start() for one in places)
    call("page", name)
    page = next((old / name).glob("page*.html")).read_text()
    assert all(client in page for client, _ in ranked)


@pytest.mark.parametrize("name", SCORED)
def test_a_run_folder_is_paid_and_the_decision_verifies(old, name):
    call("rewards", name, "--budget", "321.09")
    assert "321.09 by the rule shrunk follows from the scores, to the cent" in call("verify", name)
    cents = [json.loads(path.read_text())["cents"] for path in (old / name / "statements").glob("*.json")]
    assert sum(cents) == 32109


def test_score_files_are_read_by_themselves(old):
    for name in ("masked/scores.json", "masked/scores.csv", "hospitals.csv"):
        call("score", name)
        call("rewards", name, "--budget", "100.00")


def test_an_interrupted_run_is_resumed(old):
    with Ledger(old / "interrupted" / "ledger.sqlite", read_only=True) as ledger:
        before = [record.digest for record in ledger.records()]
    call("run", "interrupted.toml", "--out", "interrupted", "--resume")
    assert "rounds: 4 of 4, 0 aborted" in call("verify", "interrupted")
    with Ledger(old / "interrupted" / "ledger.sqlite", read_only=True) as ledger:
        assert [record.digest for record in ledger.records()][: len(before)] == before


def test_a_run_with_public_weights_is_resumed_as_its_version_recorded_them(old):
    """Everybody's weight, also that of who is away; no joins, and nobody says who evaluated."""
    call("run", "weighted.toml", "--out", "weighted", "--resume")
    assert "rounds: 4 of 4, 0 aborted" in call("verify", "weighted")
    with Ledger(old / "weighted" / "ledger.sqlite", read_only=True) as ledger:
        weights = [set(record.body["weights"]) for record in ledger.records("schedule")]
        assert weights == [{f"client-{i}" for i in range(4)}] * 4
        assert [record.body["members"] for record in ledger.records("schedule")][2] == [
            "client-0", "client-2", "client-3"
        ]  # fmt: skip
        assert not list(ledger.records("join"))


def test_a_finished_run_is_resumed_to_the_same_scores(old):
    before = json.loads((old / "unmasked" / "scores.json").read_text())
    call("run", "unmasked.toml", "--out", "unmasked", "--resume")
    after = json.loads((old / "unmasked" / "scores.json").read_text())
    assert after["cumulative"]["ALPHA"] == pytest.approx(before["cumulative"]["ALPHA"], rel=1e-9)
    call("verify", "unmasked")


def test_another_config_is_still_refused(old):
    other = load("interrupted.toml", ["training.lr=0.002"])
    with pytest.raises(StoreError, match=r"a different config: training\.lr is 0\.001 there and 0\.002 here"):
        run(other, old / "interrupted", resume=True)


def test_a_changed_config_in_an_old_ledger_is_still_found(old):
    file = old / "masked" / "config.toml"
    file.write_text(file.read_text().replace("weight_cap = 1000\n", "weight_cap = 1001\n"))
    with pytest.raises(LedgerError, match=r"config in the ledger: training\.weight_cap is 1001 there"):
        list(verify_folder(old / "masked"))


LATER = {
    '    seed: int = setting(0)\n': '    seed: int = setting(0)\n    brand_new: str = setting("x")\n',
    "    bound: float = setting(4.0,": "    bound: float = setting(5.0,",
    '["zero", "own-mean"] = setting("zero"': '["zero", "own-mean"] = setting("own-mean"',
    "SCHEMA = 3\n": "SCHEMA = 4\n",
}  # fmt: skip


def test_a_later_version_with_another_key_and_other_defaults_reads_all_of_them(old, tmp_path):
    """The package as somebody will change it: one key more, other defaults, the next schema."""
    package = shutil.copytree(
        Path(fedmerit.__file__).parent, tmp_path / "later" / "fedmerit",
        ignore=shutil.ignore_patterns("__pycache__"),
    )  # fmt: skip
    source = (package / "config.py").read_text()
    for today, later in LATER.items():
        assert source.count(today) == 1
        source = source.replace(today, later)
    (package / "config.py").write_text(source)
    call("run", "unmasked.toml", "--out", "todays", "--set", "training.rounds=1")  # schema 3
    script = (
        "import sys; from fedmerit.cli import main\n"
        "from fedmerit.config import Config, of_folder, SCHEMA\n"
        "assert SCHEMA == 4 and Config().secure_aggregation.bound == 5.0\n"
        "for name in sys.argv[1].split():\n"
        "    assert of_folder(name).secure_aggregation.bound == 4.0, name\n"
        "    assert of_folder(name).scoring.missing == 'zero', name\n"
        "    sys.argv[1:] = ['verify', name]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, name\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    found = subprocess.run(
        [sys.executable, "-c", script, " ".join((*SCORED, "todays"))],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("head: ") == len(SCORED) + 1


def test_recorded_settings_of_schema_1_keep_what_they_meant(old):
    assert of_folder(old / "sampled").participation.fraction == 0.5
    assert of_folder(old / "flower").clients == tuple(SITES)
