"""Members with the state that an earlier version kept take part in a run of this one."""

import numpy as np
import pytest
from federation_in import InProcess
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from fedmerit.identity import Roster, load_key, new_key, read_roster, write_roster
from fedmerit.keys import Change
from fedmerit.ledger.chain import Ledger
from fedmerit.protocol.terms import Agreed
from fedmerit.secagg import Client
from fedmerit.storage.member_state import MemberFiles
from fedmerit.verify import verify_folder
from older_files import copied

SITES = {f"Site {i}": 99 + i for i in range(1, 5)}
FIRST = [np.zeros((36, 3), np.float32), np.zeros(3, np.float32)]


def value(arrays, test):
    weights, bias = arrays.to_numpy_ndarrays()
    scores = np.exp(test.x @ weights + bias)
    return {"value": (scores / scores.sum(axis=1, keepdims=True))[np.arange(len(test.y)), test.y]}


app = fedmerit.flower.secure(ClientApp(), value=value)


@app.train()
def train(message, context):
    arrays = message.content["arrays"].to_numpy_ndarrays()
    number, node = message.content["config"]["server-round"], context.node_id
    changes = np.random.default_rng([number, node]).normal(scale=0.05, size=FIRST[0].shape)
    content = {
        "arrays": ArrayRecord([arrays[0] + changes.astype(np.float32), arrays[1]]),
        "metrics": MetricRecord({"num-examples": 60}),
    }
    return Message(RecordDict(content), reply_to=message)


@pytest.fixture
def old(tmp_path):
    return copied("0.1.0", tmp_path)


def with_a_server(old):
    """Their roster names no server: they sign a change that puts one on it."""
    before = read_roster(old / "roster.toml")
    change = Change.proposed(before, Roster(before.members, new_key(old / "server.pem")))
    for name in [*SITES][:3]:
        change = change.signed(load_key(old / "members" / f"{name}.pem"))
    write_roster(old / "new.toml", change.adopted())
    return old / "new.toml"


def test_they_join_a_new_run_and_are_scored(old):
    roster = with_a_server(old)
    configs = {
        node: {"fedmerit-key": str(old / "members" / f"{name}.pem"), "fedmerit-roster": str(roster)}
        for name, node in SITES.items()
    }
    data = np.load(old / "small.npz")
    test = data["x_test"].reshape(-1, 36).astype(np.float32) / 255, data["y_test"]
    strategy = fedmerit.flower.Contributions(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=roster, test=test, value=value, folder=old / "new", page=False,
        method="reports",
    )  # fmt: skip
    grid = InProcess(dict.fromkeys(SITES.values(), app), configs)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(FIRST), num_rounds=2)
    assert strategy.notes == []
    assert [one["participants"] for one in strategy.scores["rounds"]] == [list(SITES)] * 2
    lines = list(verify_folder(old / "new", roster=roster))
    assert any(line.startswith("rounds: 2 of 2") for line in lines)
    before = read_roster(old / "roster.toml").hash.hex()
    assert f"roster: follows from the one with hash {before}" in lines
    assert any("changes since then: 1" in line for line in verify_folder(old / "flower", roster=roster))


@pytest.mark.parametrize("name", SITES)
def test_a_run_that_was_under_way_can_be_read(old, name):
    """The terms it agreed to, and its state machine in the round that the server stopped in."""
    key_file = old / "members" / f"{name}.pem"
    with Ledger(old / "flower-stopped" / "ledger.sqlite", read_only=True) as ledger:
        (start,) = ledger.records("run")
    identity = load_key(key_file)
    keeping = MemberFiles(key_file, identity, start.body["run"])
    agreed = Agreed(*keeping.get("terms"))
    assert agreed.config.clients == tuple(SITES)
    assert agreed.config.scoring.visibility == "coordinator"
    client = Client.restore(keeping.get("0003.client"), identity, released=keeping.released())
    assert client.setting.round == 3
    assert client.setting.config_hash == agreed.hash
