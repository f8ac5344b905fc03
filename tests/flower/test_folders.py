"""Run folders and the server's key: what a folder may hold, who goes on in it, and from which model."""

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

import fedmerit.flower
import small
from command_line import call
from federation_in import (
    NAMES,
    NODES,
    bodies_of,
    grid_of,
    make_keys,
    records_of,
    rounds_in,
    run,
    server,
    task,
)
from fedmerit.errors import ConfigError, KeyFileError, LedgerError, ProtocolError, RunAborted, StoreError
from fedmerit.flower.codec import RecordShape, put, take
from fedmerit.flower.grid import QUERY
from fedmerit.identity import Roster, load_key, new_key, public_key, read_roster, write_roster
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms
from fedmerit.protocol.messages import Parcel, pack
from fedmerit.protocol.outcome import model_hash
from fedmerit.verify import verify_folder
from lies import at, dies
from refusals import refused
from runs import record_decision


def everything(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


def failed_start(home):
    """Two of four join, in half a second."""
    grid = grid_of(home)
    grid.dead = {NODES["client-2"], NODES["client-3"]}
    with refused(ProtocolError, stage="join"):
        run(home, grid, join=0.5)
    grid.dead.clear()
    return grid


# ----------------------------------------------------------------------------------- a start without a round


def test_a_start_that_too_few_joined_leaves_its_folder_free(home):
    grid = failed_start(home)
    assert {record.kind for record in records_of(home / "run")} == {"run", "pool", "join"}
    (before,) = bodies_of(home / "run", "run")
    _, rounds = run(home, grid)
    assert [set(one.reports) for one in rounds] == [{*NAMES}] * 2
    list(verify_folder(home / "run"))
    (after,) = bodies_of(home / "run", "run")
    assert after["run"] != before["run"]


def test_a_folder_with_a_schedule_is_never_touched(home):
    """Also where no round came to an end: the server was killed in its first."""
    grid = grid_of(home)
    at(grid, "share", None, dies())
    with pytest.raises(KeyboardInterrupt):
        run(home, grid)
    (home / "run" / "scores.json").unlink()
    (home / "run" / "scores.csv").unlink()
    kept = everything(home / "run")
    with pytest.raises(
        StoreError, match="run: not empty, and a Flower run cannot be resumed: give a new fol"
    ):
        run(home, grid_of(home))
    assert everything(home / "run") == kept


def strange_file(home, name="thesis.tex"):
    (home / "run" / name).write_text("precious")


def strange_key(home):
    strange_file(home, "keys/mine.pem")


def strange_checkpoint(home):
    strange_file(home, "checkpoints/model-0001.safetensors")


def no_ledger(home):
    for path in (home / "run").glob("ledger.sqlite*"):
        path.unlink()


def of_one_process(home):
    """A ledger of the engine in one process."""
    (body,) = bodies_of(home / "run", "run")
    no_ledger(home)
    with Ledger(home / "run" / "ledger.sqlite") as ledger, ledger.transaction():
        ledger.append("server", "run", {**body, "terms": {**body["terms"], "engine": "embedded"}})


def damaged_ledger(home):
    path = home / "run" / "ledger.sqlite"
    path.write_bytes(path.read_bytes().replace(b'"terms"', b'"items"'))


@pytest.mark.parametrize(
    "change", [strange_file, strange_key, strange_checkpoint, no_ledger, of_one_process, damaged_ledger]
)
def test_what_no_start_wrote_is_never_removed(home, change):
    grid = failed_start(home)
    change(home)
    before = everything(home / "run")
    with pytest.raises(StoreError, match="not empty"):
        run(home, grid)
    assert everything(home / "run") == before


def test_a_start_that_is_going_on_keeps_its_folder(home):
    grid = grid_of(home)
    grid.dead = {NODES["client-2"], NODES["client-3"]}
    said = []

    def get_node_ids():
        if not said:
            with pytest.raises(StoreError) as caught:
                run(home, grid_of(home))
            said.append(str(caught.value))
        return [100, 101]

    grid.get_node_ids = get_node_ids
    with refused(ProtocolError, stage="join"):
        run(home, grid, join=0.5)
    assert "another process is running in this folder" in said[0]


# -------------------------------------------------------------------------------------------- its last model


def test_a_new_run_starts_from_the_last_model_of_one_that_died(home):
    """The server dies in round 3, after its checkpoint of round 2."""
    grid = grid_of(home)
    at(grid, "check", 3, dies())
    with pytest.raises(KeyboardInterrupt):
        run(home, grid, rounds=4)
    first = ArrayRecord(task.first_model())
    with pytest.raises(StoreError, match=r"fedmerit\.flower\.last_model\('.*run', initial_arrays\)"):
        run(home, grid_of(home))
    model = fedmerit.flower.last_model(home / "run", first)
    assert list(model) == list(first)
    assert [model[name].dtype for name in model] == [first[name].dtype for name in first]
    m = model_hash(RecordShape.of(first).read(model))
    assert bodies_of(home / "run", "outcome")[-1]["m"] == m
    strategy = small.contributions(
        home, test=task.federation().pool, value=None, utilities=task.UTILITIES, folder=home / "second"
    )
    strategy.start(grid=grid_of(home), initial_arrays=model, num_rounds=1)
    assert {report.bound_to["m0"] for report in rounds_in(home / "second")[0].reports.values()} == {m}
    terms = Terms("100.00", task.UTILITIES[0], rule="equal")
    made, _ = record_decision(home / "second", terms)
    assert made.rounds == 1
    assert "payouts" in [line.code for line in verify_folder(home / "second")]


def test_a_checkpoint_that_the_ledger_does_not_know_is_not_the_last_model(home):
    """A server that died between the two wrote the checkpoint first."""
    run(home, grid_of(home), rounds=1)
    checkpoints, first = home / "run" / "checkpoints", ArrayRecord(task.first_model())
    known = fedmerit.flower.last_model(home / "run", first)
    (checkpoints / "model-0002.safetensors").write_bytes(b"half a round")
    again = fedmerit.flower.last_model(str(home / "run"), first)
    assert all(np.array_equal(again[name].numpy(), known[name].numpy()) for name in first)


def test_what_is_wrong_with_a_last_model_is_said(home):
    like, small_one = ArrayRecord(task.first_model()), ArrayRecord({"w": Array(np.zeros(3, np.float32))})

    def said(like=like):
        with pytest.raises(StoreError) as caught:
            fedmerit.flower.last_model(home / "run", like)
        return str(caught.value)

    with refused(LedgerError):
        fedmerit.flower.last_model(home / "nothing", like)
    failed_start(home)
    assert "run: no round is over; start from the first model" in said()
    shutil.rmtree(home / "run")
    run(home, grid_of(home), rounds=1)
    assert re.search(r"the model of round 1 has \d+ numbers, but the given one has 3", said(small_one))
    checkpoint = home / "run" / "checkpoints" / "model-0001.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1] + b"?")
    assert "damaged: expected SHA-256" in said()
    checkpoint.unlink()
    assert "the checkpoint of round 1 is gone" in said()


def test_integers_and_types_are_those_of_the_model_given(home):
    """A run over float64 and a counter: the counter is the given one's."""

    def model(bias, steps):
        arrays = {name: array.numpy() for name, array in small.first().items()}
        arrays |= {"bias": np.full(2, bias, np.float64), "steps": np.array([steps], np.int64)}
        return ArrayRecord({name: Array(array) for name, array in arrays.items()})

    def train(name, message):
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        arrays["bias"] = arrays["bias"] + 0.1
        content = {"arrays": ArrayRecord({name: Array(array) for name, array in arrays.items()})}
        return Message(RecordDict({**content, "metrics": MetricRecord({})}), reply_to=message)

    strategy = small.contributions(home)
    strategy.start(grid=small.members(home, train), initial_arrays=model(0.0, 7), num_rounds=1)
    last = fedmerit.flower.last_model(home / "run", model(1.0, 9))
    assert last["steps"].numpy().tolist() == [9]
    assert last["bias"].numpy().dtype == np.float64
    assert 0 < np.abs(last["bias"].numpy()).max() < 0.5


# ------------------------------------------------------------------------------------------- a killed server


SUPPORT = Path(__file__).parents[1] / "support"
KILLED = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
import federation_in as federation
from fedmerit.storage import recorder
real, folder, written = recorder.write, Path({folder!r}), []

def write(path, data, **how):
    written.append(path.name)
    if path.name == {name!r} and written.count(path.name) == 2:
        os.kill(os.getpid(), 9)
    return real(path, data, **how)

recorder.write = write
federation.run(folder, federation.grid_of(folder), rounds=3)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["scores.json", "scores.csv"])
def test_killed_before_a_score_file_the_folder_is_scored_paid_and_repaired(tmp_path, name):
    make_keys(tmp_path)
    code = KILLED.format(here=str(SUPPORT), folder=str(tmp_path), name=name)
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
    assert "again, from the ledger" in paid.output
    assert not [line for line in verify_folder(folder) if line.startswith("files: ")]
    assert "this pays for 2 of 3 rounds" in paid.output


# ------------------------------------------------------------------------------------------ the server's key


def roster_without(home):
    members = read_roster(home / "roster.toml").members
    (home / "roster.toml").unlink()
    write_roster(home / "roster.toml", Roster(members))


def test_the_run_folder_holds_a_link_to_the_one_key(home):
    small.start(small.contributions(home), small.members(home), 1)
    link = home / "run" / "keys" / "server.pem"
    assert link.is_symlink()
    assert link.resolve() == home / "server.pem"
    assert stat.S_IMODE(os.stat(link).st_mode) == 0o600
    named = read_roster(home / "roster.toml").server.hex()
    (begun,) = bodies_of(home / "run", "run")
    assert begun["keys"]["server"] == named == public_key(load_key(home / "server.pem")).hex()


def test_the_key_may_lie_elsewhere(home):
    (home / "vault").mkdir()
    (home / "server.pem").rename(home / "vault" / "ours.pem")
    with refused(ConfigError, setting="server_key"):
        small.contributions(home)
    strategy = small.contributions(home, server_key=home / "vault" / "ours.pem")
    small.start(strategy, small.members(home), 1)
    assert len(strategy.scores["rounds"]) == 1


def test_another_key_is_refused_before_anybody_is_invited(home):
    new_key(home / "other.pem")
    with refused(ConfigError, setting="server_key"):
        small.contributions(home, server_key=home / "other.pem")
    (home / "server.pem").chmod(0o644)
    with refused(KeyFileError):
        small.contributions(home)


def test_a_roster_without_a_server_is_for_simulations(home):
    roster_without(home)
    with refused(ConfigError, setting="server_key"):
        small.contributions(home, server_key=home / "server.pem")
    strategy = small.contributions(home)
    with refused(ConfigError, setting="roster"):
        small.start(strategy, small.members(home), 1)
    assert not (home / "run").exists()


def test_a_message_of_another_protocol_is_refused_with_both_versions(home):
    """Also to the server, which is told nothing else: whoever runs it must know what to install."""
    grid = grid_of(home)
    parcel = Parcel(pack(["fedmerit remote 9", "4.5", b"", b""]))
    message = Message(put(parcel), dst_node_id=NODES["client-2"], message_type=QUERY)
    assert take(message.content).head == parcel.head
    (reply,) = grid.send_and_receive([message])
    assert "VersionError" in reply.error.reason
    assert (
        "member client-2: the server has fedmerit 4.5 and speaks protocol 9, this member"
        in reply.error.reason
    )


# -------------------------------------------------------------------------- a second run, and members' files


def start(home, out):
    """A second run of one round from the same model: members join, and decline the same update."""
    with pytest.raises(RunAborted, match=r"declined: client-0, client-1, client-2, client-3") as caught:
        server.run(grid_of(home), roster=home / "roster.toml", out=home / out, join=1.0, rounds=1)
    return caught.value


@pytest.mark.parametrize("exchange", ["check", "report"])
def test_a_second_run_does_not_cost_the_first_its_round(home, exchange):
    """Members join it in the middle of a round of the first: neither shares nor updates are lost by that."""
    grid, begun = grid_of(home), []

    def begin(message):
        if not begun:
            begun.append(start(home, "other"))

    at(grid, exchange, 2, begin)
    _, rounds = run(home, grid, rounds=3)
    assert begun
    assert [(len(one.included), len(one.reports)) for one in rounds] == [(4, 4)] * 3


def test_what_a_killed_member_left_half_written_is_removed(home):
    run(home, grid_of(home), rounds=1)
    folder = next(home.glob("client-0.pem.state/*/heads")).parent
    for place in (folder, folder.parent):
        (place / ".0001.update.72052f7f").write_bytes(b"half")
    start(home, "next")
    assert not list(home.glob("client-0.pem.state/**/.0001.update.*"))
    assert (folder / "heads").exists()
