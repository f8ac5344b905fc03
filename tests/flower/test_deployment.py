"""One real federation: a SuperLink and four SuperNodes on 127.0.0.1, TLS and node authentication, one killed.

Of four members three must be left (t = 3). The third is killed (-9) in round 2, when its masked update has
left its machine and before anything was unmasked.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from deployment import everything_in, everything_kept, found, keep_everything, stretches

from fedmerit.errors import FedmeritError
from fedmerit.flower.loopback import Loopback
from fedmerit.flower.loopback.processes import wait_for
from fedmerit.keys import Member, Roster, new_key, write_roster

APP = Path(__file__).parent / "app"
MEMBERS = ("Abbey", "Bridge", "Castle", "Dale")
VICTIM = "Castle"


@pytest.mark.slow
@pytest.mark.timeout(295)
def test_a_deployment_scores_everyone_hides_updates_and_survives_a_kill(tmp_path):
    roster = make_keys(tmp_path)
    out = tmp_path / "run"
    with Loopback(tmp_path / "federation", node_configs(tmp_path, roster), QUICK) as federation:
        keep_everything(federation.database)
        run = federation.submit(APP, {"roster": str(roster), "out": str(out)})
        an_unregistered_node_is_refused(federation)
        wait_for(
            f"{VICTIM} sends its masked update of round 2",
            lambda: federation.sent(VICTIM, "train") == 2,
            deadline=150,
            alive=lambda: goes_on(federation, run),
        )
        killed = federation.kill(VICTIM)
        assert len(killed) >= 2  # its SuperNode and SuperExec at least
        run.wait(deadline=120)
        kept = everything_kept(federation.database)
        assert all(federation.pids(name) for name in ("superlink", *MEMBERS) if name != VICTIM)
    assert not any(federation.pids(name) for name in ("superlink", "Mallory", *MEMBERS))
    round_2_has_the_victims_update_and_not_its_report(out)
    another_member_verifies(out, tmp_path / "Bridge" / "copy")
    seen = [kept, everything_in(federation.home("superlink")), everything_in(out)]
    no_plain_update_reached_the_server(tmp_path, b"\0".join(seen))


QUICK = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def make_keys(folder):
    keys = {}
    for name in MEMBERS:
        (folder / name).mkdir()
        keys[name] = new_key(folder / name / "identity.pem")
    write_roster(folder / "roster.toml", Roster(Member(name, key) for name, key in keys.items()))
    return folder / "roster.toml"


def node_configs(folder, roster):
    return {
        name: {
            "part": part,
            "notes": str(folder / name),
            "fedmerit-key": str(folder / name / "identity.pem"),
            "fedmerit-roster": str(roster),
        }
        for part, name in enumerate(MEMBERS)
    }


def goes_on(federation, run):
    federation.check()
    if run.over:
        raise FedmeritError(f"the run is over already:\n{run.output[-3000:]}")


def an_unregistered_node_is_refused(federation):
    federation.make_node_key("Mallory")
    federation.start_member("Mallory")
    log = federation.last_words("Mallory")
    assert "[code: 2004] Failed to activate SuperNode." in log
    assert "SuperNode ID:" not in log


def round_2_has_the_victims_update_and_not_its_report(out):
    scores = json.loads((out / "scores.json").read_text())
    first, second = scores["rounds"]
    assert scores["clients"] == first["participants"] == list(MEMBERS)
    assert first.get("silent", []) == []
    assert second["participants"] == [name for name in MEMBERS if name != VICTIM]
    assert second["silent"] == [VICTIM]
    for one in (first, second):
        values = one["scores"]["ALPHA"]
        assert len(values) == len(one["participants"])
        assert np.isfinite(values).all()
        assert one["reports"]["grand"] > one["reports"]["empty"]  # they learn something
    assert len(scores["cumulative"]["ALPHA"]) == len(MEMBERS)


def another_member_verifies(out, copy):
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns("keys"))  # the server keeps its key
    program = Path(sys.executable).parent / "fedmerit"
    done = subprocess.run([program, "verify", copy], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rounds: 2 of 2, 0 aborted" in done.stdout
    ledger = copy / "ledger.sqlite"
    ledger.write_bytes(ledger.read_bytes().replace(b"Castle", b"Cattle"))
    assert subprocess.run([program, "verify", copy], capture_output=True).returncode != 0


def no_plain_update_reached_the_server(folder, seen):
    """Neither a trained model nor its change; what everybody gets, M0 and M, is found by the same search."""
    for name in MEMBERS:
        for number in (1, 2):
            with np.load(folder / name / f"round-{number}.npz") as notes:
                first, trained = notes["arr_0"].ravel(), notes["arr_2"].ravel()
            public = stretches(first, np.zeros_like(first))
            assert found(public, seen) == len(public) > 4
            secret = stretches(trained, first) + stretches(trained - first, np.zeros_like(first))
            secret += stretches((trained - first).astype(np.float64), np.zeros_like(first))
            assert found(secret, seen) == 0, f"an update of {name} in round {number} lies on the server"
