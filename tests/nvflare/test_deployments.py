"""Real processes on this machine: NVFlare's simulator, and server and sites with mutual TLS, one killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedmerit.nvflare
import linear_task
from federation_in import HERE
from fedmerit.verify import verify_folder
from loopback.flare import Flare
from loopback.processes import HANG, marked, wait_for
from runs import bodies_of, records_of, rounds_in
from scenarios import Scenario
from transports import make_keys

NAMES = Scenario().names
VICTIM = NAMES[2]
SETTINGS = {"secure_aggregation": {"bound": 8.0}, "scoring": {"method": "both"}}
JOB = """
import sys
import linear_task, fedmerit.nvflare
from nvflare.recipe import SimEnv
out, *names = sys.argv[1:]
recipe = fedmerit.nvflare.recipe(
    "simulated", linear_task, num_rounds=2, min_clients=len(names), folder=f"{out}/run",
    rehearsal=f"{out}/keys", page=False, seed=0,
    config={"secure_aggregation": {"bound": 8.0}, "scoring": {"method": "both"}},
)
recipe.execute(SimEnv(clients=names, workspace_root=f"{out}/simulator"))
"""


@pytest.mark.alone
@pytest.mark.timeout(HANG)
def test_a_simulation_is_a_rehearsal_that_settles(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(HERE), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path), *NAMES], env=environment, cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = list(verify_folder(tmp_path / "run", roster=tmp_path / "keys" / "roster.toml"))
    assert any(line.startswith("rehearsal: one simulation held all keys") for line in lines)
    assert "settlement: 2 of 2 equations hold" in lines
    assert [tuple(one.reports) for one in rounds_in(tmp_path / "run")] == [NAMES, NAMES]


@pytest.mark.alone
@pytest.mark.timeout(HANG)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of NVFlare's own client of the admin
def test_a_job_killed_on_strict_sites_is_gone_on_with(tmp_path, monkeypatch):
    """A job that brings code is refused; one that only names the task loses a site's process (kill -9)."""
    monkeypatch.setenv("HOME", str(tmp_path))
    make_keys(tmp_path, Scenario())
    out, roster = tmp_path / "run", tmp_path / "roster.toml"
    sites = {
        name: {"key": tmp_path / f"{name}.pem", "roster": roster, "task": "linear_task"} for name in NAMES
    }
    options = {"num_rounds": 2, "spare_rounds": 1, "min_clients": 4, "roster": roster, "folder": out}
    installed = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    with Flare(tmp_path / "poc", sites, installed, strict=True) as federation:
        bringing = fedmerit.nvflare.recipe("code", linear_task, config=SETTINGS, page=False, **options)
        assert federation.wait(federation.submit(bringing)) == "FINISHED:FAILED_TO_RUN"
        assert not out.exists()
        recipe = fedmerit.nvflare.recipe("named", "linear_task", config=SETTINGS, page=False, **options)
        job = federation.submit(recipe)
        wait_for("round 2", lambda: schedules(out) == 2, alive=federation.check)
        assert federation.kill_job(VICTIM)
        assert federation.wait(job) == "FINISHED:EXECUTION_EXCEPTION"
        before = [record.kind for record in records_of(out)]
        assert "end" not in before
        assert federation.wait(federation.submit(recipe)) == "FINISHED:COMPLETED"
        marks = [federation.mark(name) for name in NAMES]
    assert not any(map(marked, marks))
    assert [record.kind for record in records_of(out)][: len(before)] == before
    rounds = rounds_in(out)
    assert sum(not one.aborted for one in rounds) == 2
    assert not any(one.blamed or one.declined for one in rounds)
    (settled,) = bodies_of(out, "settled")
    assert (settled["missing"], settled["named"], settled["final"]) == ([], [], True)
    lines = list(verify_folder(out, roster=roster))
    assert any(line.startswith("members: 4 of 4 joined, each with its own key") for line in lines)
    assert "settlement: 2 of 2 equations hold" in lines


def schedules(out: Path) -> int:
    """How many rounds were begun."""
    return len(records_of(out, "schedule")) if (out / "ledger.sqlite").exists() else 0
