"""Members with the state that an earlier version kept take part in a run of this one."""

import numpy as np
import pytest
from federation_in import InProcess
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from fedmerit.identity import load_key
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


def test_they_join_a_new_run_and_are_scored(old):
    configs = {
        node: {
            "fedmerit-key": str(old / "members" / f"{name}.pem"),
            "fedmerit-roster": str(old / "roster.toml"),
        }
        for name, node in SITES.items()
    }
    data = np.load(old / "small.npz")
    test = data["x_test"].reshape(-1, 36).astype(np.float32) / 255, data["y_test"]
    strategy = fedmerit.flower.Contributions(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=old / "roster.toml", test=test, value=value, folder=old / "new", page=False,
    )  # fmt: skip
    grid = InProcess(dict.fromkeys(SITES.values(), app), configs)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(FIRST), num_rounds=2)
    assert strategy.notes == []
    assert [one["participants"] for one in strategy.scores["rounds"]] == [list(SITES)] * 2
    assert any(line.startswith("rounds: 2 of 2") for line in verify_folder(old / "new"))


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
