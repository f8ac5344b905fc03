"""The strategy inside Contributions, models of all kinds under it, and what cannot run here."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as stock
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx

import fedmerit.flower
from federation_in import NODES, client, grid_of, rounds_in, server, task
from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, DataError, MessageError, RefusedError, ReportError
from fedmerit.protocol.pool import Pool
from fedmerit.verify import verify_folder
from refusals import refused
from small import contributions, members, start


class Custom(FedAvg):
    """A user's own, which looks at its replies."""

    def __init__(self, **options):
        super().__init__(fraction_evaluate=0.0, **options)
        self.replies, self.mine = [], "kept"

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.replies.append(len(replies))
        return super().aggregate_train(server_round, replies)

    def double(self, number):
        return 2 * number

    @property
    def best(self):
        return max(self.replies)


class Further(Custom):
    """Inherits it."""


def test_what_the_strategy_has_is_reachable(home):
    inner = Custom(fraction_train=1.0, min_train_nodes=3)
    wrapped = contributions(home, inner)
    assert (wrapped.fraction_train, wrapped.min_train_nodes, wrapped.mine) == (1.0, 3, "kept")
    assert wrapped.double(21) == 42
    assert wrapped.weighted_by_key == "num-examples"
    start(wrapped, members(home), 2)
    assert wrapped.replies is inner.replies
    assert wrapped.best == 1


def test_ours_come_first_and_what_is_the_strategys_is_set_there(home):
    inner = Custom(fraction_train=1.0)
    inner.notes = inner.join = "the strategy's"
    wrapped = contributions(home, inner, join=7.0)
    assert (wrapped.join, wrapped.notes) == (7.0, [])
    with pytest.raises(AttributeError, match="'Custom' object has no attribute 'fraction_trian'"):
        _ = wrapped.fraction_trian
    assert getattr(wrapped, "nothing", None) is None
    with pytest.raises(AttributeError, match="fraction_train belongs to the Custom inside: set it there"):
        wrapped.fraction_train = 0.5
    assert wrapped.strategy.fraction_train == 1.0
    wrapped.join = 9.0
    wrapped.something_new = 1
    assert (wrapped.join, wrapped.something_new) == (9.0, 1)


def test_it_can_be_copied(home):
    wrapped = contributions(home, FedAvg(fraction_evaluate=0.0))
    assert copy.copy(wrapped).min_train_nodes == 2
    assert copy.copy(wrapped).strategy is wrapped.strategy
    assert pickle.loads(pickle.dumps(wrapped)).min_train_nodes == 2


@pytest.mark.parametrize(
    ("strategy", "told"),
    [(Custom, "Custom"), (Further, "Custom"), (FedAvg, ""), (FedProx, ""), (FedAdam, "")],
)
def test_an_aggregation_of_the_users_own_is_told_once_that_it_sees_one_reply(home, caplog, strategy, told):
    options = {"proximal_mu": 0.1} if strategy is FedProx else {}
    wrapped = contributions(home, strategy(**options))
    start(wrapped, members(home), 2)
    lines = [text for text in caplog.messages if "sees one reply per round, from the masked sum" in text]
    assert [line.partition(".")[0] for line in lines] == ([told] if told else [])


class Median(FedAvg):
    def aggregate_train(self, server_round, replies):
        return next((np.median(reply.content["arrays"]), None) for reply in replies)


class ByLoss(FedAvg):
    def aggregate_train(self, server_round, replies):
        losses = [reply.content["metrics"]["loss"] for reply in replies]
        return ArrayRecord([np.average(losses)]), None


def test_a_robust_aggregation_of_the_users_own_is_refused_and_one_by_loss_says_what_it_sees(home):
    with pytest.raises(
        ConfigError, match=r"Median\.aggregate_train cannot run .* it uses median, but the one"
    ):
        contributions(home, Median())
    with pytest.raises(ConfigError, match=r"asks for 'loss', which its one reply does not hold"):
        start(contributions(home, ByLoss(fraction_evaluate=0.0)), members(home), 1)
    list(verify_folder(home / "run"))


def test_metrics_are_aggregated_by_the_users_own_function_over_one_reply(home, caplog):
    def largest(replies, weighted_by):
        return MetricRecord({"replies": len(replies)})

    inner = FedAvg(fraction_evaluate=0.0, train_metrics_aggr_fn=largest)
    result = start(contributions(home, inner), members(home), 1)
    assert dict(result.train_metrics_clientapp[1]) == {"replies": 1}
    assert caplog.text.count("train_metrics_aggr_fn sees one reply per round: the plain means") == 1


# --------------------------------------------------------------------------------------- models of all kinds


X = np.random.default_rng(0).random((40, 3))
TEST = (X, np.arange(40) % 2)


def value(arrays, test):
    """A number that falls when the weights leave 0.3."""
    weight = arrays["weight"].numpy().astype(float)
    return np.clip(1 - np.abs(test.x @ (weight - 0.3)), 0, 1)


def train(name, message):
    """Change every array, integers too."""
    seed = [*NODES].index(name)
    rng = np.random.default_rng([seed, message.content["config"]["server-round"]])
    arrays = {}
    for key, array in message.content["arrays"].items():
        values = array.numpy()
        by = rng.normal(0.1, 0.02, values.shape) if values.dtype.kind == "f" else np.ones((), values.dtype)
        arrays[key] = Array(np.asarray(values + by).astype(values.dtype))
    metrics = MetricRecord({"num-examples": 10.0 + seed, "loss": float(seed)})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "m": metrics}), reply_to=message)


def grid(home, **options):
    made = members(home, train, value=value, **options)
    for app in made.apps.values():

        @app.evaluate()
        def evaluate(message, context):
            assert message.content["arrays"]["weight"].numpy().dtype == np.float32
            metrics = MetricRecord({"num-examples": 7, "accuracy": 0.5})
            return Message(RecordDict({"m": metrics}), reply_to=message)

    return made


def model(**more):
    arrays = {"weight": np.zeros(3, np.float32), **more}
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def wrapped(home, strategy=None, **options):
    return contributions(
        home, strategy or FedAvg(), **{"test": TEST, "value": value, "weights": "secret", **options}
    )


MORE = {
    "count": np.array(0),
    "seen": np.array([1, 2], np.int64),
    "on": np.array([True]),
    "scale": np.array(1.0, np.float32),
    "wide": np.ones((2, 2), np.float64),
}


@pytest.mark.parametrize("more", [{}, MORE])
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


def test_listed_metrics_of_training_and_evaluation_arrive_and_a_run_ends_with_a_page(home):
    contributions = wrapped(home, page=True)
    result = contributions.start(grid(home, metrics=["loss", "accuracy"]), model(), 1)
    assert dict(result.train_metrics_clientapp[1]) == {"loss": 1.5}
    assert dict(result.evaluate_metrics_clientapp[1]) == {"accuracy": 0.5}
    text = (home / "run" / "page-run.html").read_text()
    assert all(name in text for name in NODES)
    assert "one cosine a round" not in text


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
        ({"test": HALVED}, DataError, "a pool for method='reports', got one that was cut for 'both'"),
        ({"strategy": FedAvg(min_train_nodes=5)}, ConfigError, "min_train_nodes is 5, but the roster has 4"),
    ],
)
def test_what_cannot_work_is_said_at_once(home, options, error, reason):
    with pytest.raises(error, match=reason):
        wrapped(home, **options).start(grid(home), model(), 1)


def test_a_model_that_is_too_coarse_is_refused(home):
    with refused(MessageError):
        wrapped(home).start(grid(home), model(half=np.ones(2, np.float16)), 1)


def test_what_cannot_run_here_is_refused_with_the_reason(home):
    options = {"roster": home / "roster.toml", "test": ([[1.0]] * 4, [0] * 4), "value": None, "folder": home}
    settings = {"config": {"scoring": {"method": "reports"}}}
    with pytest.raises(ConfigError, match="SimpleNamespace is not known to average"):
        fedmerit.flower.Contributions(SimpleNamespace(), **options, **settings)
    half = stock.FedAvg(fraction_train=0.5)
    with refused(ConfigError, setting="fraction_train"):
        fedmerit.flower.Contributions(half, **options, config=server.sections(method="reports", threshold=4))
    for section, key, value in (
        ("scoring", "truth", ["shapley"]),
        ("scoring", "utilities", "auc"),
        ("scoring", "methd", "reports"),
        ("model", "name", "mlp"),
        ("participation", "fraction", 0.9),
        ("training", "weights", "roster"),
    ):
        config = {**settings["config"], section: {"method": "reports", key: value}}
        config[section] = {key: value} if section != "scoring" else config[section]
        with refused(ConfigError, setting=f"{section}.{key}"):
            fedmerit.flower.Contributions(stock.FedAvg(), **options, config=config)
    with refused(ConfigError):
        fedmerit.flower.secure(client.app, value=task.value)


COMPARES, UNKNOWN = "it compares members' updates with each other", "is not known to average"
STRATEGIES = {
    **dict.fromkeys(("FedAvg", "FedProx", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"), ""),
    **dict.fromkeys(("Krum", "MultiKrum", "Bulyan"), COMPARES),
    "FedMedian": "it needs the median of every coordinate",
    "FedTrimmedAvg": "it sorts every coordinate",
    "QFedAvg": "it weighs members by their losses",
    **dict.fromkeys(("FedXgbBagging", "FedXgbCyclic"), "trees are not averaged"),
    **{
        f"DifferentialPrivacy{side}Side{kind}Clipping": UNKNOWN
        for side in ("Client", "Server")
        for kind in ("Adaptive", "Fixed")
    },
}
"""What becomes of each of Flower's strategies: it works, or why it is refused."""
GIVEN = {
    "FedProx": {"proximal_mu": 0.1},
    "FedAvgM": {"server_learning_rate": 1.0, "server_momentum": 0.5},
    "QFedAvg": {"client_learning_rate": 0.1},
}


def test_the_table_holds_all_of_flowers_strategies():
    classes = {name: vars(stock)[name] for name in stock.__all__ if isinstance(vars(stock)[name], type)}
    found = {name for name, kind in classes.items() if issubclass(kind, stock.Strategy)}
    assert found - {"Strategy"} == {*STRATEGIES}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_of_flowers_works_or_is_refused_with_the_reason(home, name):
    given = GIVEN.get(name, {})
    if name.startswith("Differential"):
        given = {"strategy": FedAvg(), "noise_multiplier": 0.1, "num_sampled_clients": 4}
        given |= {} if "Adaptive" in name else {"clipping_norm": 1.0}
    strategy = getattr(stock, name)(**given)
    if STRATEGIES[name]:
        with pytest.raises(ConfigError, match=STRATEGIES[name]):
            contributions(home, strategy)
        return
    wrapped = contributions(home, strategy)
    result = start(wrapped, members(home), 2)
    assert [len(one.reports) for one in rounds_in(home / "run")] == [4, 4]
    assert not np.array_equal(result.arrays["layer.weight"].numpy(), np.ones(5))


def test_a_server_optimiser_is_scored_before_it_acts(home):
    strategy = contributions(
        home, FedAdam(fraction_evaluate=0.0), test=task.federation().pool, value=task.value,
        utilities=task.UTILITIES,
    )  # fmt: skip
    strategy.start(grid=grid_of(home), initial_arrays=ArrayRecord(task.first_model()), num_rounds=2)
    one, two = rounds_in(home / "run")
    assert two.reports["client-0"].bound_to["m0"] != one.body["m"]  # the optimiser moved it
    list(verify_folder(home / "run"))


# ------------------------------------------------------------------------------------ some members per round


def test_min_train_nodes_makes_up_for_a_small_fraction(home, caplog):
    """Flower takes the larger number of the two: here everybody, or three of four."""
    config, _ = contributions(home, FedAvg(fraction_train=0.5, min_train_nodes=4))._config(1)
    assert (config.participation.fraction, caplog.text) == (1.0, "")
    config, _ = contributions(home, FedAvg(fraction_train=0.5, min_train_nodes=3))._config(1)
    assert config.participation.fraction == 0.75
    assert "partial(fedmerit.flower.cautious, fraction=0.75)" in caplog.text
    contributions(home, FedAvg(fraction_train=0.75))  # three of four
    contributions(home, FedAvg(fraction_train=0.74, min_train_nodes=3))
    for fraction in (0.5, 0.74):  # two by Flower's rule, though .74 of four rounds to three
        with refused(ConfigError, setting="fraction_train"):
            contributions(home, FedAvg(fraction_train=fraction))


def test_a_member_says_how_few_members_a_round_may_have(home):
    config = from_dict({"participation": {"fraction": 0.8}})
    fedmerit.flower.cautious(config, fraction=0.8)
    for fraction in (0.81, 1.0):
        with pytest.raises(RefusedError, match=rf"chooses 0\.8 of the members .* at least {fraction:g}"):
            fedmerit.flower.cautious(config, fraction)
