"""Everybody is honest, somebody is away for a moment: it costs a round at most, never the run."""

import numpy as np
from federation_in import NODES, grid_of, make_keys, rounds_in, run
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from inprocess import InProcess
from lies import LIAR, checked, exchange_of, telling

import fedmerit.flower
from fedmerit.verify import verify_folder

NINE = {f"m{i}": 100 + i for i in range(9)}


def value(arrays, test):
    return np.full(len(test.y), 0.5)


def nine_members(home, seed=0):
    """Nine nodes that add a little noise to a model of five numbers."""
    app, rng = fedmerit.flower.secure(ClientApp(), value=value), np.random.default_rng(seed)

    @app.train()
    def train(message, context):
        weights = message.content["arrays"]["w"].numpy() + 0.01 * rng.normal(size=5)
        arrays = ArrayRecord({"w": Array(weights.astype(np.float32))})
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    make_keys(home, NINE)
    configs = {
        node: {"fedmerit-key": str(home / f"{name}.pem"), "fedmerit-roster": str(home / "roster.toml")}
        for name, node in NINE.items()
    }
    return InProcess(dict.fromkeys(NINE.values(), app), configs)


def test_a_short_outage_of_some_costs_nobody_a_later_round(tmp_path):
    """One of nine is away, another misses one message at the end of round 1; then all are back.

    Seven are there when round 1 is over, and seven of the nine must stay to the end of any round.
    """
    grid = nine_members(tmp_path)
    grid.dead = {108}

    def before(node, message):
        ask = exchange_of(message)
        if (node, ask.exchange, ask.round) == (106, "unmask", 1):
            grid.dead.add(106)
        if (ask.exchange, ask.round) == ("report", 1):
            grid.dead.clear()

    grid.before = before
    strategy = fedmerit.flower.Contributions(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=tmp_path / "roster.toml", test=(np.zeros((20, 1)), np.zeros(20)), value=value,
        method="reports",
        folder=tmp_path / "run", weights="uniform", page=False, join=0.5,
    )  # fmt: skip
    first = ArrayRecord({"w": Array(np.zeros(5, np.float32))})
    strategy.start(grid=grid, initial_arrays=first, num_rounds=3)
    rounds = rounds_in(tmp_path / "run")
    counted = [(len(one.scheduled), len(one.included), len(one.reports)) for one in rounds]
    assert counted == [(8, 8, 7), (9, 9, 9), (9, 9, 9)]
    assert not any("refused" in note or "leaves" in note for note in strategy.notes)
    list(verify_folder(tmp_path / "run"))


def test_a_member_that_is_proposed_too_small_a_round_reports_and_stays(home, caplog):
    """It gives no keys for that round; what it is told of the round before is true all the same."""
    grid = grid_of(home)
    grid.before = telling(home, "report", 1, lambda body: body.update(next=["client-0", LIAR]))
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert [set(one.reports) for one in rounds] == [{*NODES}, {*NODES}]
    assert f"{LIAR} gives no keys for round 2: stage advertise: scheduled with 2 members" in caplog.text


def test_a_next_schedule_that_cannot_be_read_costs_no_report(home, caplog):
    grid = grid_of(home)
    grid.before = telling(home, "report", 1, lambda body: body.update(next="everybody"))
    strategy, rounds = run(home, grid)
    checked(strategy, rounds, home)
    assert [set(one.reports) for one in rounds] == [{*NODES}, {*NODES}]
    assert f"{LIAR} gives no keys for round 2: stage report: next is missing" in caplog.text
