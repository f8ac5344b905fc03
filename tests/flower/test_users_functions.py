"""What users write themselves, value, gradient and training: mistakes are found, and the message helps."""

import itertools

import numpy as np
import pytest
from federation_in import NAMES, NODES
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from inprocess import InProcess
from small import contributions, members, reply, start

import fedmerit.flower
from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, DataError, MessageError, NoGradient, ProtocolError, RefusedError
from fedmerit.flower.checks import check_rise
from fedmerit.flower.codec import Samples
from fedmerit.identity import read_roster
from fedmerit.protocol.pool import samples_in

SMALL = {"layer.weight": 5, "norm.running_var": 3}


def value(arrays, test):
    """The logistic function of all coordinates, for every sample."""
    total = sum(array.numpy().astype(np.float64).sum() for array in arrays.values())
    return np.full(len(test.y), 1 / (1 + np.exp(-total / 10)))


def gradient(arrays, test, times=1.0):
    mean = float(np.mean(value(arrays, test)))
    slope = mean * (1 - mean) / 10 * times
    return mean, {name: np.full(size, slope) for name, size in SMALL.items()}


def settled(home, gradient, **options):
    return contributions(home, gradient=gradient, method="settled", weights="uniform", **options)


def begin(home, gradient, **options):
    wrapped = settled(home, gradient, **options)
    wrapped.value = value
    return start(wrapped, InProcess({}, {}), 1)


@pytest.mark.parametrize("times", [-1.0, 16.0, 0.1])
def test_a_gradient_of_a_loss_or_of_a_sum_is_found_before_anybody_trains(home, times):
    with pytest.raises(ConfigError, match="not of a loss, and not of a sum"):
        begin(home, lambda arrays, test: gradient(arrays, test, times))


def test_a_right_gradient_passes_this_check_and_a_flat_one_too(home):
    """Then nobody joins, because the grid is empty."""
    with pytest.raises(ProtocolError, match="0 of 4 members joined"):
        begin(home, gradient)
    with pytest.raises(ProtocolError, match="0 of 4 members joined"):
        begin(home, lambda arrays, test: gradient(arrays, test, 1e-6))


@pytest.mark.parametrize("at", [-20.0, -3.0, 0.0, 3.0, 8.0, 14.0, 20.0, 60.0])
def test_a_right_gradient_is_never_refused_where_the_utility_is_curved(at):
    """The logistic function of a sum of coordinates, nearly flat at both ends."""
    model = np.full(4, at / 4, np.float32)

    def measured(vector):
        return float(np.float32(1 / (1 + np.exp(-vector.astype(np.float64).sum()))))

    slope = measured(model) * (1 - measured(model))  # of each coordinate
    check_rise(measured, model, measured(model), np.full(4, slope, np.float32))


def test_a_gradient_that_is_not_finite_is_found_before_anybody_trains(home):
    with pytest.raises(ConfigError, match="not finite"):
        begin(home, lambda arrays, test: gradient(arrays, test, np.nan))


@pytest.mark.parametrize(
    ("rename", "reason"),
    [
        (lambda name: f"module.{name}", "'layer.weight', but for 'module.layer.weight', 'module.norm.run"),
        (lambda name: name.replace("norm.running_var", "other"), "'norm.running_var', .* running statistics"),
    ],
)
def test_an_array_without_a_gradient_is_named_beside_those_that_have_one(home, rename, reason):
    def renamed(arrays, test):
        mean, parts = gradient(arrays, test)
        return mean, {rename(name): part for name, part in parts.items()}

    with pytest.raises(NoGradient, match=reason):
        begin(home, renamed)


def test_training_that_returns_other_arrays_declines_and_its_log_names_them(home, caplog):
    def train(name, message):
        if name != "client-1":
            return reply(message, hash(name) % 97 / 1e4, **{"num-examples": 10})
        arrays = ArrayRecord([array.numpy() for array in message.content["arrays"].values()])
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({})}), reply_to=message)

    strategy = contributions(home)
    start(strategy, members(home, train), 1)
    assert strategy.notes == ["round 1: declined: client-1; their own logs say why"]
    assert "arrays it was given, trained: expected an array 'layer.weight', got '0', '1'" in caplog.text


def test_metrics_of_an_evaluation_that_nobody_shares_are_missed_aloud(home, caplog):
    grid = members(home)
    for app in grid.apps.values():

        @app.evaluate()
        def evaluate(message, context):
            metrics = MetricRecord({"accuracy": 0.5, "num-examples": 10})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

    with caplog.at_level("INFO", "fedmerit"):
        start(contributions(home, FedAvg()), grid, 2)
    assert caplog.text.count("the strategy gets no evaluation metrics") == 1


def test_an_app_without_secure_is_told_apart_from_one_that_refuses(home):
    plain = dict.fromkeys(NODES.values(), ClientApp())
    with pytest.raises(ProtocolError, match=r"is its ClientApp inside fedmerit\.flower\.secure\?"):
        start(contributions(home), InProcess(plain, {node: {} for node in plain}), 1)


def test_a_list_of_utilities_is_a_list(home):
    with pytest.raises(ConfigError, match=r"expected a list of names, got 'auc': write \['auc'\]"):
        contributions(home, utilities="auc")


# ---------------------------------------------------------------------------------------------- torch_scoring


def flat_network():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 4))


def convolution():
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 4 * 4, 4))


def pictures(kind):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (8, 3, 6, 6), np.uint8) if kind == "uint8" else rng.normal(size=(8, 3, 6, 6))
    return x.astype(kind), rng.integers(0, 4, 8)


@pytest.mark.parametrize("kind", ["float32", "uint8"])
@pytest.mark.parametrize("network", [flat_network, convolution])
def test_images_with_their_channels_first_are_measured_as_those_with_channels_last(network, kind):
    x, y = pictures(kind)
    arrays = ArrayRecord(network().state_dict())
    first_, last_ = (fedmerit.flower.torch_scoring(network, channels=where) for where in ("first", "last"))
    given, turned = Samples(x, y), Samples(np.ascontiguousarray(x.transpose(0, 2, 3, 1)), y)
    np.testing.assert_array_equal(first_.value(arrays, given), last_.value(arrays, turned))
    ours, theirs = first_.gradient(arrays, given), last_.gradient(arrays, turned)
    assert ours[0] == theirs[0]
    for name, part in ours[1].items():
        np.testing.assert_array_equal(part, theirs[1][name])


def kinked():
    """Units with the activation 1e-9, which float32 rounds to 0 in some order of summation."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 6, bias=False), nn.ReLU(), nn.Linear(6, 4))
    made[0].weight.data = torch.tensor(list(itertools.permutations([1.0, 1e-9, -1.0])))
    return made


def test_gradients_are_computed_in_float64():
    arrays, test = ArrayRecord(kinked().state_dict()), Samples(np.ones((8, 3), np.float32), np.arange(8) % 4)
    _, found = fedmerit.flower.torch_scoring(kinked, "brier").gradient(arrays, test)
    assert found["0.weight"].all()


def test_images_that_seem_to_have_their_channels_first_are_refused_unless_told(home):
    """A network that flattens its samples would take them in another order without an error."""
    x, y = pictures("float32")
    arrays = ArrayRecord(flat_network().state_dict())
    measures = fedmerit.flower.torch_scoring(flat_network)
    for measure in measures:
        with pytest.raises(DataError, match=r"\(8, 3, 6, 6\) look like images .* channels='first'"):
            measure(arrays, Samples(x, y))
    fedmerit.flower.torch_scoring(flat_network, channels="last").value(arrays, Samples(x, y))
    with pytest.raises(ConfigError, match="channels: expected 'first' or 'last', got 'second'"):
        fedmerit.flower.torch_scoring(flat_network, channels="second")


def test_an_app_with_it_can_be_pickled_as_a_simulation_does_without_the_network():
    """Flower's simulation sends the whole ClientApp to its workers with every message."""
    from ray import cloudpickle

    x, y = pictures("float32")
    arrays = ArrayRecord(flat_network().state_dict())
    value, gradient = fedmerit.flower.torch_scoring(flat_network, channels="first")
    expected = value(arrays, Samples(x, y))
    packed = cloudpickle.dumps(fedmerit.flower.secure(ClientApp(), value=value, gradient=gradient))
    assert arrays["1.weight"].numpy().tobytes() not in packed
    copy = cloudpickle.loads(packed)
    np.testing.assert_array_equal(copy.value(arrays, Samples(x, y)), expected)
    assert copy.gradient(arrays, Samples(x, y))[0] == gradient(arrays, Samples(x, y))[0]


def test_a_network_that_fails_on_images_says_what_it_got():
    x, y = pictures("float32")
    wide = Samples(np.concatenate([x, x], 1), y)
    with pytest.raises(RuntimeError) as found:
        fedmerit.flower.torch_scoring(convolution).value(ArrayRecord(convolution().state_dict()), wide)
    assert "(8, 6, 6, 6) reached the network as images of shape (m, 6, 6, 6)" in found.value.__notes__[0]


def test_arrays_without_names_are_refused_with_what_is_expected():
    unnamed = ArrayRecord([part.numpy() for part in flat_network().state_dict().values()])
    with pytest.raises(MessageError, match=r"expected ArrayRecord\(model\.state_dict\(\)\)"):
        fedmerit.flower.torch_scoring(flat_network, channels="first").value(
            unnamed, Samples(*pictures("float32"))
        )


@pytest.mark.parametrize(
    ("measures", "options", "expected"),
    [
        (("brier",), {}, {"utilities": ["brier"]}),
        ((["sharpened-accuracy", "accuracy"],), {}, {"utilities": ["sharpened-accuracy", "accuracy"]}),
        (("brier",), {"utilities": ["quality"]}, {"utilities": ["quality"]}),
    ],
)
def test_a_run_has_the_names_that_torch_scoring_was_given(home, measures, options, expected):
    value, gradient = fedmerit.flower.torch_scoring(flat_network, *measures)
    wrapped = fedmerit.flower.Contributions(
        FedAvg(),
        roster=home / "roster.toml",
        test=pictures("float32"),
        value=value,
        gradient=gradient,
        folder=home / "run",
        **options,
    )
    found = wrapped._settings["scoring"]
    assert {key: found[key] for key in ("utilities", "scale", "whole") if key in found} == expected


def test_a_utility_of_errors_brings_its_scale(home):
    value, _ = fedmerit.flower.torch_scoring(flat_network, "rmse-skill", scale=10.0)
    wrapped = fedmerit.flower.Contributions(
        FedAvg(),
        roster=home / "roster.toml",
        test=pictures("float32"),
        value=value,
        method="reports",
        folder=home / "run",
    )
    config, _ = wrapped._config(1)
    assert (config.scoring.utilities, config.scoring.scale) == (("rmse-skill",), 10.0)


def test_copies_of_a_test_sample_stay_on_one_side_of_the_cut(home):
    """Else members would refuse the settlement when all rounds are over."""
    value, gradient = fedmerit.flower.torch_scoring(flat_network, "brier")
    images, labels = pictures("float32")
    wrapped = fedmerit.flower.Contributions(
        FedAvg(),
        roster=home / "roster.toml",
        test=(np.concatenate([images] * 4), np.concatenate([labels] * 4)),
        value=value,
        gradient=gradient,
        method="both",
        folder=home / "run",
    )
    pool = wrapped._pool(wrapped._config(2)[0], bytes(32))
    assert not samples_in(pool.slice(1)) & samples_in(pool.settlement())


# ------------------------------------------------------------------------------------ some members per round


def test_min_train_nodes_makes_up_for_a_small_fraction(home, caplog):
    """Flower takes the larger number of the two: here everybody, or three of four."""
    config, _ = contributions(home, FedAvg(fraction_train=0.5, min_train_nodes=4))._config(1)
    assert (config.participation.fraction, caplog.text) == (1.0, "")
    config, _ = contributions(home, FedAvg(fraction_train=0.5, min_train_nodes=3))._config(1)
    assert config.participation.fraction == 0.75
    assert "partial(fedmerit.flower.cautious, fraction=0.75)" in caplog.text
    with pytest.raises(ConfigError, match="schedules 2, but 3 must stay to the end: expected min_train_nod"):
        contributions(home, FedAvg(fraction_train=0.5))


def test_a_member_says_how_few_members_a_round_may_have(home):
    config = from_dict({"participation": {"fraction": 0.8}})
    fedmerit.flower.cautious(config, fraction=0.8)
    for fraction in (0.81, 1.0):
        with pytest.raises(RefusedError, match=rf"choose 0\.8 of the members .* at least {fraction:g}"):
            fedmerit.flower.cautious(config, fraction)


# ------------------------------------------------------------------------------------------------- rehearsals


def test_keys_for_a_simulation_are_made_once(tmp_path):
    roster = fedmerit.flower.rehearsal(tmp_path / "keys", NAMES)
    before = roster.read_bytes()
    assert fedmerit.flower.rehearsal(tmp_path / "keys", NAMES) == roster
    assert roster.read_bytes() == before
    assert read_roster(roster).names == NAMES
    assert {path.name for path in roster.parent.iterdir()} == {
        "roster.toml",
        "server.pem",
        *(f"{name}.pem" for name in NAMES),
    }
    with pytest.raises(ConfigError, match=r"lists client-0, .* expected a, b, c: take a new folder"):
        fedmerit.flower.rehearsal(tmp_path / "keys", ["a", "b", "c"])
    with pytest.raises(ConfigError, match="got an empty text"):
        fedmerit.flower.rehearsal("", NAMES)
