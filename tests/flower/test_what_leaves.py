"""What leaves a member, what stays, what it costs, and what cannot run here."""

import numpy as np
import pytest
from federation_in import NODES, client, grid_of, rounds_in, run, task
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from lies import checked, exchange_of

import fedmerit.flower
from fedmerit.errors import ConfigError
from fedmerit.flower.codec import BYTES, take
from fedmerit.verify import verify_folder


def test_what_leaves_a_member_is_masked_and_little(home):
    """Neither the update nor its words nor the sample count is in any reply; 4 bytes a parameter go up."""
    grid = grid_of(home)
    strategy, rounds = run(home, grid, weights="secret")
    checked(strategy, rounds, home)
    size = task.federation().first.size
    up = {}
    for node, message, reply in grid.seen:
        ask = exchange_of(message)
        assert set(reply.content) == {BYTES}  # no metrics, no arrays of the user's
        up.setdefault((node, ask.round), []).append(len(take(reply.content)))
        if ask.exchange == "train":
            assert len(take(reply.content)) < 4 * size + 600
    assert all(sum(sizes) < 4 * size + 8000 for sizes in up.values())


def test_a_steady_round_takes_five_exchanges_and_four_evaluations(home):
    counted = []

    def value(arrays, test):
        counted.append(1)
        return task.value(arrays, test)

    app = fedmerit.flower.secure(client.app.inner, value=value, seed=0)
    grid = grid_of(home, dict.fromkeys(NODES, app))
    strategy, _ = run(home, grid, rounds=3, server_evaluates=False)
    kinds = {name: len(times) for name, times in strategy.seconds.items()}
    assert kinds == {"advertise": 1, "share": 3, "train": 3, "check": 3, "unmask": 3, "report": 3, "close": 1}
    assert len(counted) == 4 * 4 * 3


def test_without_the_check_it_takes_four(home):
    """If, and only if, the members agree to it."""
    app = fedmerit.flower.secure(client.app.inner, value=task.value, accept=lambda config: None)
    strategy, rounds = run(home, grid_of(home, dict.fromkeys(NODES, app)), check=False)
    checked(strategy, rounds, home)
    assert "check" not in strategy.seconds
    assert [len(one.reports) for one in rounds] == [4, 4]


def test_members_own_metrics_only_where_listed(home):
    app = fedmerit.flower.secure(client.app.inner, value=task.value, seed=0, metrics=["num-examples"])
    grid = grid_of(home, dict.fromkeys(NODES, app))
    from flwr.serverapp.strategy import FedAvg

    seen = []

    class Looks(FedAvg):
        def aggregate_train(self, server_round, replies):
            seen.extend(replies := list(replies))
            return super().aggregate_train(server_round, replies)

    strategy = fedmerit.flower.Contributions(
        Looks(fraction_evaluate=0.0, weighted_by_key="weight"),
        roster=home / "roster.toml", test=task.federation().pool, value=task.value,
        method="reports",
        utilities=task.UTILITIES, folder=home / "run", weights="uniform",
    )  # fmt: skip
    strategy.start(grid=grid, initial_arrays=ArrayRecord(task.first_model()), num_rounds=1)
    assert len(seen) == 1  # one reply, whoever averages
    assert dict(seen[0].content["metrics"]) == {"weight": 1, "num-examples": 55.0}


def test_an_evaluation_tells_listed_metrics_and_no_sample_count(home):
    app = fedmerit.flower.secure(ClientApp(), value=task.value, metrics=["accuracy"])

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": 1234, "accuracy": 0.5, "secret": 1.0})
        return Message(RecordDict({"m": metrics, "arrays": ArrayRecord([np.ones(3)])}), reply_to=message)

    message = Message(RecordDict(), dst_node_id=101, message_type="evaluate")
    reply = app(message, grid_of(home).contexts[101])
    assert {key: dict(record) for key, record in reply.content.items()} == {
        "metrics": {"num-examples": 1, "accuracy": 0.5}
    }


def test_what_cannot_run_here_is_refused_with_the_reason(home):
    from flwr.serverapp import strategy as stock

    options = {
        "roster": home / "roster.toml",
        "test": ([[1.0]] * 4, [0] * 4),
        "value": None,
        "folder": home / "r",
        "method": "reports",
    }
    for strategy, reason in (
        (stock.Krum(), "Krum cannot run under secure aggregation: it compares members' updates"),
        (stock.FedMedian(), "FedMedian cannot run under secure aggregation: it needs the median"),
        (stock.QFedAvg(0.1), "QFedAvg cannot run under secure aggregation: it weighs members"),
    ):
        with pytest.raises(ConfigError, match=reason):
            fedmerit.flower.Contributions(strategy, **options)
    half = stock.FedAvg(fraction_train=0.5)
    with pytest.raises(
        ConfigError, match="schedules 2, but 4 must stay to the end: expected min_train_nodes=4"
    ):
        fedmerit.flower.Contributions(half, **options, threshold=4)
    with pytest.raises(ConfigError, match="truth: needs plain updates"):
        fedmerit.flower.Contributions(stock.FedAvg(), **options, truth=["shapley"])
    with pytest.raises(ConfigError, match="the roster holds none"):
        fedmerit.flower.Contributions(stock.FedAvg(), **options, weights="roster")
    with pytest.raises(ConfigError, match="secured already"):
        fedmerit.flower.secure(client.app, value=task.value)


def test_a_server_optimiser_is_scored_before_it_acts(home):
    from flwr.serverapp.strategy import FedAdam

    strategy = fedmerit.flower.Contributions(
        FedAdam(fraction_evaluate=0.0), roster=home / "roster.toml", test=task.federation().pool,
        value=task.value, utilities=task.UTILITIES, folder=home / "run", weights="uniform",
        method="reports",
    )  # fmt: skip
    strategy.start(grid=grid_of(home), initial_arrays=ArrayRecord(task.first_model()), num_rounds=2)
    one, two = rounds_in(home / "run")
    assert two.reports["client-0"].bound_to["m0"] != one.body["m"]  # the optimiser moved it
    list(verify_folder(home / "run"))
