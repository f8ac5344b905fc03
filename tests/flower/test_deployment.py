"""The contract app on real Flower: deployed on a SuperLink and four SuperNodes, and simulated.

The deployment is on 127.0.0.1 with TLS and node authentication. Of four members three must be left (t = 3).
The third is killed (-9) in round 2, when its masked update has left and before anything was unmasked.
Everything waits for an event: an answer, a line of a log, the end of a process, or the SuperLink's word that
a node is gone, about a minute after its last sign of life. No limit is one that a busy machine meets.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from deployment import everything_in, everything_kept, found, keep_everything, stretches
from federation_in import HERE, NAMES, make_keys, rounds_in, said, task
from safetensors.numpy import load_file

from fedmerit.errors import FedmeritError
from fedmerit.simulation.models import load_vector
from fedmerit.simulation.run import run as run_embedded
from fedmerit.verify import verify_folder
from loopback import Loopback, Simulation
from loopback.processes import HANG, wait_for

APP = HERE / "contract_app"
VICTIM = "client-2"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.alone
@pytest.mark.timeout(4 * HANG)
def test_a_deployment_scores_everyone_hides_updates_and_survives_a_kill(tmp_path):
    roster, out = make_keys(tmp_path), tmp_path / "run"
    with Loopback(tmp_path / "federation", node_configs(tmp_path, roster), ONE_THREAD) as federation:
        keep_everything(federation.database)
        start_a_node_that_trusts_signed_apps_only(federation)
        config = {"roster": str(roster), "out": str(out), "patience": HANG, "join": HANG}
        run = federation.submit(APP, config)
        an_unregistered_node_is_refused(federation)
        wait_for(
            f"{VICTIM} sends its masked update of round 2",
            lambda: federation.sent(VICTIM, "train") == 2,
            alive=lambda: goes_on(federation, run),
        )
        killed = federation.kill(VICTIM)
        assert len(killed) >= 2  # its SuperNode and SuperExec at least
        run.wait()
        kept = everything_kept(federation.database)
        assert all(federation.pids(name) for name in ("superlink", *NAMES) if name != VICTIM)
    assert not any(federation.pids(name) for name in ("superlink", "Mallory", "Wary", *NAMES))
    its_reports_are_those_of_the_engine_in_one_process(out, tmp_path / "embedded", **{VICTIM: "2:check"})
    round_2_has_the_victims_update_and_not_its_report(out)
    the_operator_reads_what_happened(run.output, out)
    the_wary_node_runs_no_app_that_nobody_signed(federation, out)
    another_member_verifies(out, tmp_path / "copy")
    seen = [kept, everything_in(federation.home("superlink")), everything_in(out)]
    no_plain_update_reached_the_server(out, b"\0".join(seen))


@pytest.mark.alone
@pytest.mark.timeout(2 * HANG)
def test_a_simulation_has_the_same_reports_and_is_called_a_rehearsal(tmp_path):
    roster, out = make_keys(tmp_path), tmp_path / "run"
    with Simulation(tmp_path / "simulation", ONE_THREAD) as simulation:
        config = {"roster": str(roster), "out": str(out), "fedmerit-rehearsal": str(tmp_path)}
        simulation.simulate(APP, len(NAMES), {**config, "patience": HANG, "join": HANG}).wait()
    lines = list(verify_folder(out))
    assert (
        "rehearsal: one simulation held all keys, so signatures prove the order of records, not their authors"
        in lines
    )
    its_reports_are_those_of_the_engine_in_one_process(out, tmp_path / "embedded")


def node_configs(folder, roster):
    return {
        name: {"name": name, "fedmerit-key": str(folder / f"{name}.pem"), "fedmerit-roster": str(roster)}
        for name in NAMES
    }


def goes_on(federation, run):
    federation.check()
    if run.over:
        raise FedmeritError(f"the run is over already:\n{run.output[-3000:]}")


def start_a_node_that_trusts_signed_apps_only(federation):
    federation.make_node_key("Wary")
    federation.register("Wary")
    key = Ed25519PrivateKey.generate().public_key()
    public = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    trusted = federation.home("Wary") / "trusted.yaml"
    trusted.write_text(f"fpk_0: {public} a reviewer\n")
    federation.start_member("Wary", ["--trusted-entities", str(trusted)])
    federation.wait_until_connected("Wary")


def the_wary_node_runs_no_app_that_nobody_signed(federation, out):
    reason = "does not take part: The FAB could not be verified."
    assert f" node {federation.node_ids['Wary']} {reason}" in (out / "notes.txt").read_text()
    log = (federation.home("Wary") / "log").read_text()
    assert (
        "App verification is not supported by the connected SuperLink." in log
    )  # it says so of any local app


def an_unregistered_node_is_refused(federation):
    federation.make_node_key("Mallory")
    federation.start_member("Mallory")
    log = federation.last_words("Mallory")
    assert "[code: 2004] Failed to activate SuperNode." in log
    assert "SuperNode ID:" not in log


def its_reports_are_those_of_the_engine_in_one_process(out, embedded, **lost):
    run_embedded(task.config(**lost), embedded)
    assert said(rounds_in(out)) == said(rounds_in(embedded))


def round_2_has_the_victims_update_and_not_its_report(out):
    scores = json.loads((out / "scores.json").read_text())
    first, second = scores["rounds"]
    assert first["participants"] == scores["clients"] == list(NAMES)
    assert second["participants"] == [name for name in NAMES if name != VICTIM]
    assert second["silent"] == [VICTIM]
    for one in (first, second):
        assert len(one["scores"]["ALPHA"]) == len(one["participants"])
        assert np.isfinite(one["scores"]["ALPHA"]).all()
    assert np.isfinite(scores["cumulative"]["ALPHA"]).all()


def the_operator_reads_what_happened(output, out):
    when = r"fedmerit \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: "
    assert len(re.findall(when + "round 1: 4 scheduled, 4 summed, 4 reported", output)) == 1
    assert len(re.findall(when + f"{VICTIM} is away: ", output)) == 1
    assert f" {VICTIM} is away: " in (out / "notes.txt").read_text()


def another_member_verifies(out, copy):
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns("keys"))  # the server's stay there
    program = Path(sys.executable).parent / "fedmerit"
    done = subprocess.run([program, "verify", copy], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rounds: 2 of 2, 0 aborted" in done.stdout
    ledger = copy / "ledger.sqlite"
    ledger.write_bytes(ledger.read_bytes().replace(VICTIM.encode(), b"client-3"))
    assert subprocess.run([program, "verify", copy], capture_output=True).returncode != 0


def no_plain_update_reached_the_server(out, seen):
    """Neither a trained model nor its change; what everybody gets, M0 and M, is found by the same search."""
    starts = [task.federation().first, load_file(out / "checkpoints" / "model-0001.safetensors")["model"]]
    nothing = np.zeros_like(starts[0])
    sizes = [array.numel() for array in task.federation().network.state_dict().values()]
    for number, start in enumerate(starts, 1):
        public = stretches(start, nothing, sizes)
        assert found(public, seen) == len(public) > 4
        for name in NAMES:
            load_vector(task.federation().network, start)
            state, _ = task.train(task.federation().network.state_dict(), name, number)
            trained = np.concatenate([array.numpy().ravel() for array in state.values()])
            change = trained - start
            secret = stretches(trained, start, sizes) + stretches(change, nothing, sizes)
            secret += stretches(change.astype(np.float64), nothing, sizes)
            assert found(secret, seen) == 0, f"the update of {name} in round {number} lies on the server"
