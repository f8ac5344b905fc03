"""Models of all kinds over a grid, and what a user may get wrong."""

import numpy as np
import pytest
from federation_in import NODES, grid_of
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx

import fedmerit.flower
from fedmerit.data import Pool
from fedmerit.errors import ConfigError, DataError, MessageError, ReportError, StoreError
from fedmerit.verify import verify_folder

X = np.random.default_rng(0).random((40, 3))
TEST = (X, np.arange(40) % 2)


def value(arrays, test):
    """A number that falls when the weights leave 0.3."""
    weight = arrays["weight"].numpy().astype(float)
    return np.clip(1 - np.abs(test.x @ (weight - 0.3)), 0, 1)


def app_for(seed, metrics=(), value_=value):
    app = fedmerit.flower.secure(ClientApp(), value=value_, metrics=metrics)

    @app.train()
    def train(message, context):
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        rng = np.random.default_rng([seed, message.content["config"]["server-round"]])
        for name, array in arrays.items():
            if array.dtype.kind == "f":
                arrays[name] = (array + rng.normal(0.1, 0.02, array.shape)).astype(array.dtype)
            else:
                arrays[name] = array + np.ones((), array.dtype)
        record = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
        told = MetricRecord({"num-examples": 10.0 + seed, "loss": float(seed)})
        return Message(RecordDict({"arrays": record, "m": told}), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        assert message.content["arrays"]["weight"].numpy().dtype == np.float32
        told = MetricRecord({"num-examples": 7, "accuracy": 0.5})
        return Message(RecordDict({"m": told}), reply_to=message)

    return app


def grid(home, **options):
    return grid_of(home, {name: app_for(i, **options) for i, name in enumerate(NODES)})


def model(**more):
    arrays = {"weight": np.zeros(3, np.float32), **more}
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def wrapped(home, strategy=None, **options):
    given = {"roster": home / "roster.toml", "test": TEST, "value": value, "folder": home / "run"}
    return fedmerit.flower.Contributions(
        strategy or FedAvg(), **{"page": False, "method": "reports", **given, **options}
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "count": np.array(0),
            "seen": np.array([1, 2], np.int64),
            "on": np.array([True]),
            "scale": np.array(1.0, np.float32),
            "wide": np.ones((2, 2), np.float64),
        },
    ],
)
@pytest.mark.parametrize("strategy", [FedAvg, FedProx, FedAdam])
def test_every_array_keeps_its_shape_and_type(home, strategy, more):
    """Integers stay as they are, whatever a strategy makes of them on the way."""
    made = strategy(proximal_mu=0.1) if strategy is FedProx else strategy()
    contributions = wrapped(home, made)
    result = contributions.start(grid(home), model(**more), 3)
    assert [len(one["participants"]) for one in contributions.scores["rounds"]] == [4, 4, 4]
    for name, array in {"weight": np.zeros(3, np.float32), **more}.items():
        after = result.arrays[name].numpy()
        assert (after.shape, after.dtype) == (array.shape, array.dtype)
        if array.dtype.kind != "f":
            np.testing.assert_array_equal(after, array)
    assert contributions.notes == []
    list(verify_folder(home / "run"))


def test_listed_metrics_of_training_and_evaluation_arrive(home):
    contributions = wrapped(home)
    result = contributions.start(grid(home, metrics=["loss", "accuracy"]), model(), 1)
    assert dict(result.train_metrics_clientapp[1]) == {"loss": 1.5}
    assert dict(result.evaluate_metrics_clientapp[1]) == {"accuracy": 0.5}


def test_a_run_ends_with_a_page(home):
    contributions = wrapped(home, page=True)
    contributions.start(grid(home), model(), 1)
    text = (home / "run" / "page-run.html").read_text()
    assert all(name in text for name in NODES)
    assert "one cosine a round" not in text


def test_a_node_that_could_not_join_is_asked_again(home, monkeypatch):
    monkeypatch.setattr("fedmerit.flower.grid.AGAIN", 0.1)
    nodes = grid(home)
    right = nodes.contexts[101].node_config["fedmerit-key"]
    nodes.contexts[101].node_config["fedmerit-key"] = "nowhere.pem"

    def repaired(node, message):
        if message.metadata.message_type == "train":
            nodes.contexts[101].node_config["fedmerit-key"] = right

    nodes.before = repaired
    contributions = wrapped(home, join=0.5)
    contributions.start(nodes, model(), 12)
    assert "client-1" not in contributions.scores["rounds"][0]["participants"]
    assert "client-1" in contributions.scores["rounds"][-1]["participants"]
    assert any("node 101 does not take part" in note for note in contributions.notes)
    assert not any("nowhere.pem" in note for note in contributions.notes)  # that is in the member's own log


def test_too_few_are_waited_for(home):
    """An outage of two members costs the round in which it is noticed, and no more."""
    nodes, asked = grid(home), []

    def listed():
        if nodes.dead:
            asked.append(1)
            if len(asked) > 4:
                nodes.dead.clear()
        return [node for node in NODES.values() if node not in nodes.dead]

    def before(node, message):
        if message.metadata.message_type == "evaluate" and not asked:
            nodes.dead |= {102, 103}

    nodes.before, nodes.get_node_ids = before, listed
    contributions = wrapped(home, FedAvg(min_evaluate_nodes=1, fraction_evaluate=0.25), join=600.0)
    contributions.start(nodes, model(), 3)
    assert [len(one["participants"]) for one in contributions.scores["rounds"]] == [4, 0, 4]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda arrays, test: np.ones(3), "expected 40 numbers, one per sample"),
        (lambda arrays, test: np.full(40, 2.0), r"must lie in \[0, 1\], got 2"),
        (lambda arrays, test: {"a": np.ones(40)}, "expected the utilities value, got a"),
        (lambda arrays, test: ["x"] * 40, "expected numbers"),
    ],
)
def test_a_broken_value_shows_before_anybody_trains(home, wrong, reason):
    nodes = grid(home)
    with pytest.raises(ReportError, match=reason):
        wrapped(home, value=wrong).start(nodes, model(), 1)
    assert nodes.seen == []
    assert not (home / "run").exists()


HALVED = Pool(
    indices=np.arange(40), x=X, y=np.arange(40) % 2, slices=2, balanced=False, classes=2,
    utility_hash="0" * 64, key=bytes(32), settled=20,
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"test": (X, ["a"] * 40)}, DataError, "labels must be numbers"),
        ({"test": (X[:5], np.zeros(5))}, DataError, "at least 10 per slice"),
        ({"test": (X, X[:, 0], X)}, DataError, "two arrays, got a tuple of 3"),
        (
            {"test": HALVED},
            DataError,
            "expected a pool for method='reports', got one that was cut for 'both'",
        ),
        ({"strategy": FedAvg(min_train_nodes=5)}, ConfigError, "min_train_nodes is 5, but the roster has 4"),
    ],
)
def test_what_cannot_work_is_said_at_once(home, options, error, reason):
    with pytest.raises(error, match=reason):
        wrapped(home, **options).start(grid(home), model(), 1)


def test_a_folder_that_is_used_and_a_model_that_is_too_coarse(home):
    (home / "run").mkdir()
    (home / "run" / "file").touch()
    with pytest.raises(StoreError, match="a Flower run cannot be resumed: give a new folder"):
        wrapped(home).start(grid(home), model(), 1)
    with pytest.raises(MessageError, match="'half' is float16"):
        wrapped(home, folder=home / "other").start(grid(home), model(half=np.ones(2, np.float16)), 1)


def test_a_strategy_that_tells_members_different_things_is_stopped(home):
    class Different(FedAvg):
        def configure_train(self, *args):
            for i, message in enumerate(super().configure_train(*args)):
                content = RecordDict(dict(message.content))
                content["config"] = type(content["config"])({**content["config"], "lr": float(i)})
                yield Message(content, dst_node_id=message.metadata.dst_node_id, message_type="train")

    with pytest.raises(Exception, match="the strategy sends it a message that differs from the others"):
        wrapped(home, Different()).start(grid(home), model(), 1)
