"""Real processes on 127.0.0.1, with TLS and node authentication: SuperLink, SuperNodes, Flower's simulation.

What a test in one process cannot show: members and servers that are killed (-9), bytes in the SuperLink's own
database, nodes that Flower itself refuses. Everything waits for an event: an answer, a line of a log, the end
of a process, or the SuperLink's word that a node is gone, about a minute after its last sign of life. No
limit is one that a busy machine meets.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from safetensors.numpy import load_file

from federation_in import HERE, NAMES, bodies_of, make_keys, node_config, records_of, rounds_in, task
from fedmerit.errors import FedmeritError, LedgerError
from fedmerit.simulation.models import load_vector
from fedmerit.simulation.run import run as run_embedded
from fedmerit.verify import verify_folder
from loopback import Loopback, Simulation
from loopback.certificates import loopback_certificates, supernode_key
from loopback.processes import HANG, kill, marked, start, wait_for
from loopback.superlink import pairs
from scenarios import Scenario
from tests.protocol.test_contract import hold, pays, said
from tiny import losing
from transports import Ran
from transports import kept as kept_by_members

APP = HERE / "contract_app"
VICTIM = "client-2"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LOST, LIAR, VERIFIER = "Dale", "Bridge", "Abbey"
LIES = """

class Liar(type(app)):
    def _member(self, place, context):
        member = super()._member(place, context)
        member.misstates = context.node_config.get("misstates")
        if context.node_config.get("judges-falsely"):
            member.falsely = lambda manifest: [wave(manifest.bench.drawn) for _ in manifest.rounds]
        return member


def wave(count):
    import numpy as np

    return np.sin(np.arange(count))


app.__class__ = Liar
"""
"""A member of the example whose own machine says so misstates; all others are as in the example."""
KEEP = """
CREATE TABLE kept (content BLOB);
CREATE TRIGGER keep_new AFTER INSERT ON objects BEGIN INSERT INTO kept VALUES (new.content); END;
CREATE TRIGGER keep_changed AFTER UPDATE ON objects BEGIN INSERT INTO kept VALUES (new.content); END;
"""


def keep_everything(database):
    """From now on, a curious SuperLink: objects that Flower deletes stay in table ``kept``."""
    with sqlite3.connect(database, timeout=HANG) as connection:
        connection.executescript(KEEP)


def everything_kept(database):
    """All objects the SuperLink ever held, one after another."""
    with sqlite3.connect(database, timeout=HANG) as connection:
        return b"\0".join(bytes(row[0]) for row in connection.execute("SELECT content FROM kept") if row[0])


def everything_in(folder):
    return b"\0".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def stretches(vector, baseline, sizes, length=16):
    """Some runs of ``length`` numbers of a vector, all of them unlike the baseline, as bytes.

    Each lies in one array of the model, whose ``sizes`` are given: Flower sends every array by itself.
    """
    differs = vector != baseline
    ends = np.cumsum(sizes)
    assert ends[-1] == len(vector)
    begins = [
        k for end, size in zip(ends, sizes, strict=True) for k in range(end - size, end - length, length)
    ]
    starts = [k for k in begins if differs[k : k + length].all()]
    assert starts, "the vector is the baseline"
    chosen = starts[:: max(1, len(starts) // 8)]
    return [vector[k : k + length].tobytes() for k in chosen]


def found(needles, haystack):
    return sum(needle in haystack for needle in needles)


def verified(out, copy, roster):
    """What another member is told who has its roster and a copy of the folder, with any archive."""
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns("keys"))  # the server's stay there
    program = Path(sys.executable).parent / "fedmerit"
    arguments = ["verify", copy, "--roster", roster]
    if (copy / "archive").is_dir():
        arguments += ["--archive", copy / "archive"]
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.alone
@pytest.mark.timeout(4 * HANG)
def test_a_deployment_scores_everyone_hides_updates_and_survives_a_kill(tmp_path):
    roster, out = make_keys(tmp_path), tmp_path / "run"
    nodes = {name: node_config(tmp_path, name) for name in NAMES}
    with Loopback(tmp_path / "federation", nodes, ONE_THREAD) as federation:
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
    with losing({VICTIM: "2:check"}):
        run_embedded(task.config(), tmp_path / "embedded")
    ran = Ran(out, dead=(VICTIM,))
    assert said(ran) == said(Ran(tmp_path / "embedded"))
    ran.heads = {name: path for name, path in kept_by_members(tmp_path, ran).items() if name != VICTIM}
    hold(Scenario(lost=((2, 2, "check"),)), ran)
    the_operator_reads_what_happened(run.output, out)
    the_wary_node_runs_no_app_that_nobody_signed(federation, out)
    another_member_verifies(out, tmp_path / "copy", roster)
    seen = [kept, everything_in(federation.home("superlink")), everything_in(out)]
    no_plain_update_reached_the_server(out, b"\0".join(seen))
    pays(out)


@pytest.mark.alone
@pytest.mark.timeout(4 * HANG)
def test_a_server_app_killed_after_training_is_settled_by_the_next_one(request, tmp_path, monkeypatch):
    """One hospital is killed in the last round, its masked update sent, and is back later; another lies."""
    example = request.config.rootpath / "examples" / "flower-hospitals"
    monkeypatch.syspath_prepend(str(example))
    import demo
    from hospitals.task import HOSPITALS

    app = shutil.copytree(example, tmp_path / "app")
    client = app / "hospitals" / "secured.py"
    client.write_text(client.read_text() + LIES)
    roster, out = demo.make_roster(tmp_path), tmp_path / "run"
    nodes = {
        name: {"fedmerit-key": str(demo.key_of(tmp_path, name)), "fedmerit-roster": str(roster)}
        for name in HOSPITALS
    }
    nodes[LIAR]["misstates"] = 1.01
    config = {"roster": str(roster), "server-key": str(demo.server_key(tmp_path)), "out": str(out)}
    config |= {"rounds": 2, "patience": HANG, "join": HANG}
    with Loopback(tmp_path / "federation", nodes, demo.THREADS) as federation:
        run = federation.submit(app, config)

        def alive():
            goes_on(federation, run)

        wait_for(f"{LOST} sends its last update", lambda: federation.sent(LOST, "train") == 2, alive=alive)
        federation.kill(LOST)
        wait_for("the pool is opened", lambda: "opening" in kinds(out), alive=alive)
        assert f"{LOST} is away" in (out / "notes.txt").read_text()
        killed = server_app(federation)
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_for("the ServerApp is gone", lambda: not server_app(federation), alive=lambda: None)
        before = kinds(out)
        assert before.count("round") == 2
        assert not {"statement", "settled", "end"} & {*before}
        federation.start_member(LOST)
        federation.submit(app, {**config, "settle": True}).wait()
    after = kinds(out)
    assert after[: len(before)] == before
    assert [after.count(kind) for kind in ("opening", "round", "end")] == [1, 2, 1]
    for kind in ("statement", "seen"):
        assert {record.author for record in records_of(out, kind)} == {*HOSPITALS}
    settled = bodies_of(out, "settled")[-1]
    assert (settled["missing"], settled["named"], settled["final"]) == ([], [LIAR], True)
    lines = verified(out, tmp_path / VERIFIER, roster)
    assert "settlement: 0 of 2 equations hold" in lines
    for number in (1, 2):
        assert f"settlement: in round {number} {LIAR}" in lines


@pytest.mark.alone
@pytest.mark.timeout(4 * HANG)
def test_five_hospitals_judge_each_other_and_one_of_them_falsely(request, tmp_path, monkeypatch):
    """No test set anywhere. One is killed, its last update sent, and is back before coordinates are drawn."""
    example = request.config.rootpath / "examples" / "flower-hospitals"
    monkeypatch.syspath_prepend(str(example))
    import demo
    from hospitals.task import HOSPITALS, NOISY

    app = shutil.copytree(example, tmp_path / "app")
    client = app / "hospitals" / "secured.py"
    client.write_text(client.read_text() + LIES)
    roster, out = demo.make_roster(tmp_path), tmp_path / "run"
    nodes = {
        name: {"fedmerit-key": str(demo.key_of(tmp_path, name)), "fedmerit-roster": str(roster)}
        for name in HOSPITALS
    }
    nodes[LIAR]["judges-falsely"] = True
    config = {"roster": str(roster), "server-key": str(demo.server_key(tmp_path)), "out": str(out)}
    config |= {"rounds": 2, "patience": HANG, "join": HANG, "panel": True}
    with Loopback(tmp_path / "federation", nodes, demo.THREADS) as federation:
        run = federation.submit(app, config)

        def alive():
            goes_on(federation, run)

        wait_for(f"{LOST} sends its last update", lambda: federation.sent(LOST, "train") == 2, alive=alive)
        federation.kill(LOST)
        wait_for(f"{LOST} is missed", lambda: f"{LOST} is away" in notes_of(out), alive=alive)
        federation.start_member(LOST)
        run.wait()
    block = json.loads((out / "scores.json").read_text())["panel"]
    assert (block["judges"], block["holds"]) == ([*HOSPITALS], [True] * 5)
    assert (block["missing"], block["named"], block["witnessed"]) == ([], [], True)
    assert LIAR in block["odd"]
    honest = [k for k, name in enumerate(HOSPITALS) if name != LIAR]
    gave = {
        name: sum(row[k] for k in honest if HOSPITALS[k] != name)
        for name, row in zip(HOSPITALS, block["matrix"], strict=True)
    }
    (noisy,) = NOISY
    assert sorted(gave, key=gave.__getitem__).index(noisy) < 2  # of five, whatever the false judge shows
    assert "panel: 5 of 5 columns add up" in verified(out, tmp_path / VERIFIER, roster)


def notes_of(out):
    return (out / "notes.txt").read_text() if (out / "notes.txt").exists() else ""


@pytest.mark.alone
@pytest.mark.timeout(2 * HANG)
def test_a_simulation_is_scored_both_ways_and_is_called_a_rehearsal(tmp_path):
    roster, out = make_keys(tmp_path), tmp_path / "run"
    with Simulation(tmp_path / "simulation", ONE_THREAD) as simulation:
        config = {"roster": str(roster), "out": str(out), "fedmerit-rehearsal": str(tmp_path)}
        config |= {"method": "both", "patience": HANG, "join": HANG}
        simulation.simulate(APP, len(NAMES), config).wait()
    lines = list(verify_folder(out, archive=out / "archive"))
    assert "settlement: 2 of 2 equations hold" in lines
    assert any(line.startswith("rehearsal: one simulation held all keys") for line in lines)
    assert [{*closed.reports} for closed in rounds_in(out)] == [{*NAMES}] * 2


def kinds(out):
    with contextlib.suppress(LedgerError, sqlite3.Error):
        return [record.kind for record in records_of(out)]
    return []


def server_app(federation):
    found = []
    for pid in federation.pids("superlink"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += [pid] if any(Path(word.decode()).name == "flwr-serverapp" for word in words) else []
    return found


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


def the_operator_reads_what_happened(output, out):
    when = r"fedmerit \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: "
    assert len(re.findall(when + "round 1: 4 scheduled, 4 summed, 4 reported", output)) == 1
    assert len(re.findall(when + f"{VICTIM} is away: ", output)) == 1
    assert f" {VICTIM} is away: " in (out / "notes.txt").read_text()


def another_member_verifies(out, copy, roster):
    assert "rounds: 2 of 2, 0 aborted" in verified(out, copy, roster)
    ledger = copy / "ledger.sqlite"
    ledger.write_bytes(ledger.read_bytes().replace(VICTIM.encode(), b"client-3"))
    with pytest.raises(LedgerError):
        list(verify_folder(copy))


def no_plain_update_reached_the_server(out, seen):
    """Neither a trained model nor its change; what everybody gets, M0 and M, is found by the same search."""
    starts = [task.federation().first, load_file(out / "checkpoints" / "model-0001.safetensors")["model"]]
    nothing = np.zeros_like(starts[0])
    sizes = [array.numel() for array in task.federation().network.state_dict().values()]
    for number, m0 in enumerate(starts, 1):
        public = stretches(m0, nothing, sizes)
        assert found(public, seen) == len(public) > 4
        for name in NAMES:
            load_vector(task.federation().network, m0)
            state, _ = task.train(task.federation().network.state_dict(), name, number)
            trained = np.concatenate([array.numpy().ravel() for array in state.values()])
            change = trained - m0
            secret = stretches(trained, m0, sizes) + stretches(change, nothing, sizes)
            secret += stretches(change.astype(np.float64), nothing, sizes)
            assert found(secret, seen) == 0, f"the update of {name} in round {number} lies on the server"


# ----------------------------------------------------------- the tool that runs a federation on one machine


TOOLS = Path(__file__).resolve().parents[2] / "tools"
CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"


@pytest.fixture
def mark():
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield mark
    kill(mark)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("waits", [True, False], ids=["with its starter", "orphaned"])
def test_detached_children_are_found_and_killed(tmp_path, mark, waits):
    code = f"import subprocess, sys, time; {CHILD}" + ("; time.sleep(600)" if waits else "")
    process = start(["python", "-c", code], mark, tmp_path / "log", {})
    if waits:
        wait_for("two processes", lambda: len(marked(mark)) == 2, alive=lambda: None)
    else:
        assert process.wait(HANG) == 0
    pids = marked(mark)
    assert sorted(kill(mark)) == sorted(pids)
    assert len(pids) == 1 + waits
    assert process.wait(HANG) == (-signal.SIGKILL if waits else 0)
    assert not any(is_alive(pid) for pid in pids)


def test_nothing_survives_a_starter_that_is_killed(tmp_path, mark):
    code = (
        "import sys, time; from pathlib import Path\n"
        f"sys.path.insert(0, {str(TOOLS)!r}); from loopback.processes import start\n"
        "start(['python', '-c', 'import time; time.sleep(600)'], sys.argv[1], Path(sys.argv[2]), {})\n"
        "time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, mark, str(tmp_path / "log")])
    try:
        wait_for("a process", lambda: bool(marked(mark)), alive=lambda: None)
    finally:
        starter.kill()
        starter.wait()
    wait_for("its end", lambda: not marked(mark), alive=lambda: None)


def test_keys_are_for_their_owner_alone(tmp_path):
    """That certificates are good, and for whom, the deployment shows."""
    keys = (loopback_certificates(tmp_path).key, supernode_key(tmp_path / "node.key"))
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}


def test_what_cannot_be_started_or_does_not_come_is_named(tmp_path, mark):
    with pytest.raises(FedmeritError, match="flower-nothing does not exist"):
        start(["flower-nothing"], mark, tmp_path / "log", {})
    with pytest.raises(FedmeritError, match="rain: did not happen"):
        wait_for("rain", lambda: False, deadline=0.2, alive=lambda: None)
    with pytest.raises(FedmeritError, match="name: no quote"):
        pairs({"name": 'the "best"'})
