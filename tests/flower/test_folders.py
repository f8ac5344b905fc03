"""A folder in which nobody was scheduled can be used again; from any other a new run takes its last model."""

import hashlib
import shutil

import numpy as np
import pytest
from federation_in import NAMES, NODES, grid_of, rounds_in, run, task
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvg
from lies import exchange_of

import fedmerit.flower
from fedmerit.errors import LedgerError, ProtocolError, StoreError
from fedmerit.flower.codec import Shape
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Terms
from fedmerit.protocol.outcome import model_hash
from fedmerit.verify import record_decision, verify_folder
from raising import raises


def everything(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


def failed_start(home):
    """Two of four join, in half a second."""
    grid = grid_of(home)
    grid.dead = {NODES["client-2"], NODES["client-3"]}
    with raises(ProtocolError, stage="join"):
        run(home, grid, join=0.5)
    grid.dead.clear()
    return grid


# ------------------------------------------------------------------------------------ a start without a round


def test_a_start_that_too_few_joined_leaves_its_folder_free(home):
    grid = failed_start(home)
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert {record.kind for record in ledger.records()} == {"run", "pool", "join"}
        before = next(ledger.records("run")).body["run"]
    _, rounds = run(home, grid)
    assert [set(one.reports) for one in rounds] == [{*NAMES}] * 2
    list(verify_folder(home / "run"))
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        (record,) = ledger.records("run")
        assert record.body["run"] != before


def test_a_folder_with_a_schedule_is_never_touched(home):
    """Also where no round came to an end: the server was killed in its first."""
    grid = grid_of(home)

    def before(node, message):
        if exchange_of(message).exchange == "share":
            raise KeyboardInterrupt

    grid.before = before
    with pytest.raises(KeyboardInterrupt):
        run(home, grid)
    (home / "run" / "scores.json").unlink()
    (home / "run" / "scores.csv").unlink()
    kept = everything(home / "run")
    with pytest.raises(
        StoreError, match="run: not empty, and a Flower run cannot be resumed: give a new folder"
    ):
        run(home, grid_of(home))
    assert everything(home / "run") == kept


@pytest.mark.parametrize("name", ["thesis.tex", "keys/mine.pem", "checkpoints/model-0001.safetensors"])
def test_what_no_start_wrote_is_never_removed(home, name):
    grid = failed_start(home)
    (home / "run" / name).write_text("precious")
    kept = everything(home / "run")
    with pytest.raises(StoreError, match="not empty"):
        run(home, grid)
    assert everything(home / "run") == kept


def test_a_folder_without_a_ledger_is_somebody_elses(home):
    (home / "run" / "keys").mkdir(parents=True)
    for name in ("notes.txt", "config.toml", "keys/server.pem"):
        (home / "run" / name).write_text("precious")
    kept = everything(home / "run")
    with pytest.raises(StoreError, match="not empty"):
        run(home, grid_of(home))
    assert everything(home / "run") == kept


def test_a_folder_of_the_engine_in_one_process_is_not_touched(home):
    failed_start(home)
    with Ledger(home / "run" / "ledger.sqlite") as ledger:
        (record,) = ledger.records("run")
    for path in (home / "run").glob("ledger.sqlite*"):
        path.unlink()
    with Ledger(home / "run" / "ledger.sqlite") as ledger, ledger.transaction():
        ledger.append("server", "run", {**record.body, "engine": "embedded"})
    with pytest.raises(StoreError, match="not empty"):
        run(home, grid_of(home))


def test_a_start_that_is_going_on_keeps_its_folder(home):
    grid = grid_of(home)
    grid.dead = {NODES["client-2"], NODES["client-3"]}
    refused = []

    def get_node_ids():
        if not refused:
            with pytest.raises(StoreError) as caught:
                run(home, grid_of(home))
            refused.append(str(caught.value))
        return [100, 101]

    grid.get_node_ids = get_node_ids
    with raises(ProtocolError, stage="join"):
        run(home, grid, join=0.5)
    assert "another process is running in this folder" in refused[0]


# --------------------------------------------------------------------------------------------- its last model


def test_a_new_run_starts_from_the_last_model_of_one_that_died(home):
    """The server dies in round 3, after its checkpoint of round 2."""
    grid = grid_of(home)

    def before(node, message):
        ask = exchange_of(message)
        if (ask.exchange, ask.round) == ("check", 3):
            raise KeyboardInterrupt

    grid.before = before
    with pytest.raises(KeyboardInterrupt):
        run(home, grid, rounds=4)
    first = ArrayRecord(task.first_model())
    with pytest.raises(StoreError, match=r"fedmerit\.flower\.last_model\('.*run', initial_arrays\)"):
        run(home, grid_of(home))
    model = fedmerit.flower.last_model(home / "run", first)
    assert list(model) == list(first)
    assert [model[name].dtype for name in model] == [first[name].dtype for name in first]
    m = model_hash(Shape.of(first).read(model))
    with Ledger(home / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert [record.body["m"] for record in ledger.records("outcome")][-1] == m
    strategy = fedmerit.flower.Contributions(
        FedAvg(fraction_evaluate=0.0), roster=home / "roster.toml", test=task.federation().pool, value=None,
        method="reports",
        utilities=list(task.UTILITIES), folder=home / "second", weights="uniform", page=False,
    )  # fmt: skip
    strategy.start(grid=grid_of(home), initial_arrays=model, num_rounds=1)
    assert {report.bound_to["m0"] for report in rounds_in(home / "second")[0].reports.values()} == {m}
    terms = Terms("100.00", task.UTILITIES[0], on_undefined="equal", despite_doubts=True)
    made, _ = record_decision(home / "second", terms, [home / "run"])
    assert (made.counts, made.rounds) == ((2,), 1)
    assert "payouts" in [line.code for line in verify_folder(home / "second", after=[home / "run"])]


def test_a_checkpoint_that_the_ledger_does_not_know_is_not_the_last_model(home):
    """A server that died between the two wrote the checkpoint first."""
    run(home, grid_of(home), rounds=1)
    checkpoints, first = home / "run" / "checkpoints", ArrayRecord(task.first_model())
    known = fedmerit.flower.last_model(home / "run", first)
    (checkpoints / "model-0002.safetensors").write_bytes(b"half a round")
    again = fedmerit.flower.last_model(str(home / "run"), first)
    assert all(np.array_equal(again[name].numpy(), known[name].numpy()) for name in first)


def test_what_is_wrong_with_a_last_model_is_said(home):
    like = ArrayRecord(task.first_model())
    with pytest.raises(LedgerError, match="nothing: no such folder"):
        fedmerit.flower.last_model(home / "nothing", like)
    failed_start(home)
    with pytest.raises(StoreError, match="run: no round is over; start from the first model"):
        fedmerit.flower.last_model(home / "run", like)
    shutil.rmtree(home / "run")
    run(home, grid_of(home), rounds=1)
    with pytest.raises(StoreError, match=r"the model of round 1 has \d+ numbers, but the given one has 3"):
        fedmerit.flower.last_model(home / "run", ArrayRecord({"w": Array(np.zeros(3, np.float32))}))
    checkpoint = home / "run" / "checkpoints" / "model-0001.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1] + b"?")
    with pytest.raises(StoreError, match="damaged: expected SHA-256"):
        fedmerit.flower.last_model(home / "run", like)
    checkpoint.unlink()
    with pytest.raises(StoreError, match="the checkpoint of round 1 is gone"):
        fedmerit.flower.last_model(home / "run", like)


def test_integers_and_types_are_those_of_the_model_given(home):
    """A run over float64 and a counter: the counter is the given one's."""
    from test_grid_models import grid, model, wrapped

    given = model(bias=np.zeros(2, np.float64), steps=np.array([7], np.int64))
    wrapped(home).start(grid=grid(home), initial_arrays=given, num_rounds=1)
    like = model(bias=np.ones(2, np.float64), steps=np.array([9], np.int64))
    last = fedmerit.flower.last_model(home / "run", like)
    assert last["steps"].numpy().tolist() == [9]
    assert last["bias"].numpy().dtype == np.float64
    assert 0 < np.abs(last["bias"].numpy()).max() < 0.5
