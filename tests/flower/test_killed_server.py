"""A server that is killed between the ledger and the score files: the folder stays good, and is repaired."""

import subprocess
import sys
from pathlib import Path

import pytest
from federation_in import make_keys, rounds_in

from command_line import call
from fedmerit.verify import verify_folder

HERE = Path(__file__).parent
KILLED = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
import federation_in as federation
from fedmerit.storage import run_folder
real, folder, written = run_folder.write, Path({folder!r}), []

def write(path, data, **how):
    written.append(path.name)
    if path.name == {name!r} and written.count(path.name) == 2:
        os.kill(os.getpid(), 9)
    return real(path, data, **how)

run_folder.write = write
federation.run(folder, federation.grid_of(folder), rounds=3)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["scores.json", "scores.csv"])
def test_killed_before_a_score_file_the_folder_is_scored_paid_and_repaired(tmp_path, name):
    make_keys(tmp_path)
    code = KILLED.format(here=str(HERE), folder=str(tmp_path), name=name)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    folder = tmp_path / "run"
    assert len(rounds_in(folder)) == 2
    lines = list(verify_folder(folder))
    (about,) = [line for line in lines if line.startswith("files: ")]
    assert f"{name} is 1 round older than the ledger" in about
    assert "summed over 2 rounds" in call("score", folder).output
    resumed = call("run", folder / "config.toml", "--out", folder, "--resume").exception
    assert str(resumed).startswith(
        f"{folder}: cannot be resumed here: it holds a run between machines (engine 'flower')"
    )
    assert "start a new run in a new folder from its last model" in str(resumed)
    paid = call("rewards", folder, "--budget", "10", "--rule", "equal")
    assert paid.exit_code == 0
    assert "again, which" in paid.output
    assert not [line for line in verify_folder(folder) if line.startswith("files: ")]
    assert "this pays for 2 of 3 rounds" in paid.output
