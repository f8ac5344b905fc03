"""What users write themselves, value, gradient and training, and what torch_scoring writes for them."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedmerit.flower
from federation_in import NAMES, NODES, rounds_in
from fedmerit.carriers.measures import Samples, check_rise, slope_of
from fedmerit.errors import ConfigError, DataError, MessageError, NoGradient, ProtocolError, ReportError
from fedmerit.flower.codec import RecordShape
from fedmerit.protocol.pool import Slice, samples_in
from fedmerit.scoring.sampling import auc
from fedmerit.verify import verify_folder
from inprocess import InProcess
from refusals import refused
from small import contributions, members, reply, start

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


@pytest.mark.parametrize(
    ("times", "more", "words"),
    [
        *((times, 0.0, "not of a loss, and not of a sum") for times in (-1.0, 16.0, 0.1)),
        (np.nan, 0.0, "not finite"),
        (1.0, 0.01, "both must measure the same"),
    ],
)
def test_a_gradient_of_something_else_is_found_before_anybody_trains(home, times, more, words):
    def other(arrays, test):
        mean, parts = gradient(arrays, test, times)
        return mean + more, parts

    with pytest.raises(ConfigError, match=words):
        begin(home, other)
    assert not (home / "run").exists()


def test_a_right_gradient_passes_this_check_and_a_flat_one_too(home):
    """Then nobody joins, because the grid is empty."""
    with refused(ProtocolError, stage="join"):
        begin(home, gradient)
    with refused(ProtocolError, stage="join"):
        begin(home, lambda arrays, test: gradient(arrays, test, 1e-6))


@pytest.mark.parametrize("at", [-20.0, -3.0, 0.0, 3.0, 8.0, 14.0, 20.0, 60.0])
def test_a_right_gradient_is_never_refused_where_the_utility_is_curved(at):
    """The logistic function of a sum of coordinates, nearly flat at both ends."""
    model = np.full(4, at / 4, np.float32)

    def measured(vector):
        return float(np.float32(1 / (1 + np.exp(-vector.astype(np.float64).sum()))))

    slope = measured(model) * (1 - measured(model))  # of each coordinate
    check_rise(measured, model, measured(model), np.full(4, slope, np.float32))


@pytest.mark.parametrize(
    ("rename", "missing"),
    [
        (lambda name: f"module.{name}", "layer.weight"),
        (lambda name: name.replace("norm.running_var", "other"), "norm.running_var"),
    ],
)
def test_an_array_without_a_gradient_is_named_beside_those_that_have_one(home, rename, missing):
    def renamed(arrays, test):
        mean, parts = gradient(arrays, test)
        return mean, {rename(name): part for name, part in parts.items()}

    with refused(NoGradient, coordinate=missing):
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


def test_an_app_without_secure_is_told_apart_from_one_that_refuses(home):
    plain = dict.fromkeys(NODES.values(), ClientApp())
    with pytest.raises(ProtocolError, match=r"is its ClientApp inside fedmerit\.flower\.secure\?"):
        start(contributions(home), InProcess(plain, {node: {} for node in plain}), 1)


def arrays(**given):
    return ArrayRecord({name: Array(np.asarray(values)) for name, values in given.items()})


FIRST = arrays(a=np.ones((2, 3), np.float32), counter=np.array(7), b=np.zeros(2, np.float32))
SHOWN = Slice(index=0, x=np.arange(8.0).reshape(4, 2), y=np.array([0, 1, 0, 1]), salts=b"", path=())


def slope(result, seen=None):
    def gradient(given, test):
        if seen is not None:
            seen.append((given, test))
        return result

    shape = RecordShape.of(FIRST)
    return slope_of(gradient, shape)(shape.vector, SHOWN, np.array([3, 1]))


def test_gradients_come_by_name_or_in_order_and_integers_have_none():
    a, b = np.full((2, 3), 2.0), np.array([5.0, 6.0])
    seen = []
    for parts in ([a, b], {"b": b, "a": a, "counter": np.array(9)}, arrays(a=a, b=b)):
        value, vector = slope((0.25, parts), seen)
        assert value == 0.25
        assert vector.tolist() == [2.0] * 6 + [5.0, 6.0]
    given, test = seen[0]
    assert given["counter"].numpy() == 7
    assert isinstance(test, Samples)
    assert (test.x.tolist(), test.y.tolist()) == ([[6.0, 7.0], [2.0, 3.0]], [1, 1])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"a": np.ones(6, np.float32)}, r"array 'a': expected shape (2, 3), got (6,)"),
        ({"a": None}, "expected an array 'a', got 'b', 'counter'"),
        ({"more": np.ones(1, np.float32)}, "expected 3 arrays, got 4"),
        ({"a": np.ones((2, 3), np.float16)}, "array 'a' is float16, too coarse"),
        ({"a": np.array(1), "b": np.array(1)}, "the model holds no floating-point numbers"),
    ],
)
def test_arrays_of_another_model_are_named(changed, words):
    given = {"a": np.ones((2, 3), np.float32), "b": np.zeros(2, np.float32), "counter": np.array(7)} | changed
    record = arrays(**{name: array for name, array in given.items() if array is not None})
    with pytest.raises(MessageError) as found:
        RecordShape.of(record if words.startswith(("the", "array 'a' is")) else FIRST).read(record)
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (0.5, ReportError, "expected (value, gradients), got float"),
        ((0.5, [np.zeros((2, 3))]), ReportError, "expected 2 arrays, one per floating-point array"),
        ((0.5, {"a": np.zeros((2, 3))}), NoGradient, "none for the array 'b'"),
        ((0.5, [np.zeros((3, 2)), np.zeros(2)]), ReportError, "gradient of 'a': expected shape (2, 3)"),
        (("much", [np.zeros((2, 3)), np.zeros(2)]), ReportError, "expected a number"),
    ],
)
def test_what_is_no_gradient_is_refused(result, error, words):
    with pytest.raises(error) as found:
        slope(result)
    assert words in str(found.value)


def test_without_a_gradient_the_method_must_be_said(home):
    with refused(ConfigError, setting="scoring.method"):
        contributions(home, method=None)
    for method in ("settled", "both"):
        with refused(ConfigError, setting="scoring.method"):
            contributions(home, method=method)
    nothing = lambda given, test: None  # noqa: E731
    made = contributions(home, method=None, gradient=nothing)
    config, text = made._config(2)
    assert (config.scoring.method, config.data.test_reveal) == ("settled", "fixed")
    assert "window_days = 14.0" in text
    with refused(ConfigError, setting="data.test_reveal"):
        contributions(home, gradient=nothing, method="settled", test_reveal="per-round")


# --------------------------------------------------------------------------------------------- torch_scoring


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


def test_images_that_seem_to_have_their_channels_first_are_refused_unless_told(home):
    """A network that flattens its samples would take them in another order without an error."""
    x, y = pictures("float32")
    arrays = ArrayRecord(flat_network().state_dict())
    measures = fedmerit.flower.torch_scoring(flat_network)
    for measure in measures:
        with refused(DataError):
            measure(arrays, Samples(x, y))
    fedmerit.flower.torch_scoring(flat_network, channels="last").value(arrays, Samples(x, y))
    with refused(ConfigError):
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
    with refused(MessageError):
        fedmerit.flower.torch_scoring(flat_network, channels="first").value(
            unnamed, Samples(*pictures("float32"))
        )


@pytest.mark.parametrize(
    ("measures", "options", "expected"),
    [
        (("brier",), {}, {"utilities": ["brier"]}),
        ((["sharpened-accuracy", "accuracy"],), {}, {"utilities": ["sharpened-accuracy", "accuracy"]}),
        (("brier",), {"config": {"scoring": {"utilities": ["quality"]}}}, {"utilities": ["quality"]}),
    ],
)
def test_a_run_has_the_names_that_torch_scoring_was_given(home, measures, options, expected):
    value, gradient = fedmerit.flower.torch_scoring(flat_network, *measures)
    wrapped = contributions(home, test=pictures("float32"), value=value, gradient=gradient, **options)
    assert wrapped._settings["scoring"]["utilities"] == expected["utilities"]


def test_copies_of_a_test_sample_stay_on_one_side_of_the_cut(home):
    """Else members would refuse the settlement when all rounds are over."""
    value, gradient = fedmerit.flower.torch_scoring(flat_network, "brier")
    images, labels = pictures("float32")
    copies = np.concatenate([images] * 4), np.concatenate([labels] * 4)
    wrapped = contributions(home, test=copies, value=value, gradient=gradient, method="both")
    pool = wrapped._pool(wrapped._config(2)[0], bytes(32))
    assert not samples_in(pool.slice(1)) & samples_in(pool.settlement())


def checked_gradient(network, *size):
    """Return the parts of a gradient that agrees with a difference quotient over all coordinates."""
    rng = np.random.default_rng(0)
    test = Samples(rng.normal(size=(9, *size)).astype(np.float32), rng.integers(0, 3, 9))
    value, gradient = fedmerit.flower.torch_scoring(network, "brier")
    record = ArrayRecord(network().state_dict())
    shape = RecordShape.of(record)
    found, parts = gradient(record, test)
    assert found == pytest.approx(float(np.mean(value(record, test))), abs=1e-6)
    direction = rng.normal(size=shape.vector.size).astype(np.float32)
    ends = [float(np.mean(value(shape.record(shape.vector + h * direction), test))) for h in (1e-2, -1e-2)]
    assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(float(shape.gradient(parts) @ direction), rel=2e-2)
    return parts


def test_running_statistics_are_coordinates_and_counters_are_not():
    import torch
    from torch import nn

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    parts = checked_gradient(network, 2, 2, 3)
    assert "2.num_batches_tracked" not in parts
    assert np.abs(parts["2.running_var"]).max() > 0


def layers(kind):
    """Networks that need a word of advice, and the names of the arrays that are given."""
    import torch
    from torch import nn

    class Returning(nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            return {"logits": logits} if kind == "dict" else (logits, logits)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    torch.manual_seed(0)
    if kind == "tied":
        return Tied()
    if kind in ("dict", "tuple"):
        return Returning(3, 3)
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return made.double() if kind == "double" else made


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("double", ConfigError, "computes in float64, but samples reach it as float32"),
        ("dict", ConfigError, "got a dict: give a subclass"),
        ("tuple", ConfigError, "got a tuple: give a subclass"),
        ("partial", MessageError, "a part of the network, without '1.weight', '1.bias': expected all of"),
    ],
)
def test_a_network_that_cannot_be_measured_as_it_is_says_what_to_do(kind, error, words):
    state = layers(kind).state_dict()
    arrays = ArrayRecord({name: state[name] for name in state if kind != "partial" or name < "1"})
    test = Samples(np.ones((4, 3), np.float32), np.array([0, 1, 2, 0]))
    for measure in fedmerit.flower.torch_scoring(lambda: layers(kind)):
        with pytest.raises(error) as found:
            measure(arrays, test)
        assert words in str(found.value)


def test_of_tied_weights_the_name_that_is_loaded_last_has_the_gradient():
    parts = checked_gradient(lambda: layers("tied"), 3)
    assert {name: bool(part.any()) for name, part in parts.items()} == {
        "one.weight": False, "one.bias": True, "two.weight": True
    }  # fmt: skip


# ------------------------------------------------------------------ a transformer whose adapters are trained


def transformer():
    """A small one with random weights, frozen but for an adapter of low rank."""
    import torch
    from torch import nn

    class Adapted(nn.Linear):
        def __init__(self, inputs, outputs, rank=2):
            super().__init__(inputs, outputs)
            self.down, self.up = (
                nn.Parameter(torch.randn(rank, inputs)),
                nn.Parameter(torch.zeros(outputs, rank)),
            )

        def forward(self, x):
            return super().forward(x) + x @ self.down.T @ self.up.T

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.before, self.head = Adapted(8, 8), nn.Linear(8, 2)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, tokens):
            return self.head(self.layer(self.before(self.embedding(tokens))).mean(1))

    torch.manual_seed(0)
    return Classifier()


ADAPTER = ("before.down", "before.up")


def adapt(name, message):
    import torch

    net = transformer()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    rng = np.random.default_rng([NAMES.index(name), message.content["config"]["server-round"]])
    x = rng.integers(0, 11, (40, 5))
    loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x)), torch.from_numpy((x > 5).sum(1) // 3))
    parts = [dict(net.named_parameters())[one] for one in ADAPTER]
    with torch.no_grad():
        for part, slope in zip(parts, torch.autograd.grad(loss, parts), strict=True):
            part -= 0.5 * slope
    state = net.state_dict()
    content = {
        "arrays": ArrayRecord({one: state[one] for one in ADAPTER}),
        "metrics": MetricRecord({"num-examples": 40}),
    }
    return Message(RecordDict(content), reply_to=message)


def test_of_a_transformer_only_the_adapter_is_sent_summed_and_settled(home):
    scoring = fedmerit.flower.torch_scoring(transformer, part=True)
    functions = {"value": scoring.value, "gradient": scoring.gradient}
    x = np.random.default_rng(9).integers(0, 11, (40, 5))
    state = transformer().state_dict()
    first = ArrayRecord({name: state[name] for name in ADAPTER})
    strategy = contributions(home, test=(x, (x > 5).sum(1) // 3), method="settled", **functions)
    strategy.start(grid=members(home, adapt, **functions), initial_arrays=first, num_rounds=2)
    assert strategy.notes == []
    assert "settlement: 2 of 2 equations hold" in list(verify_folder(home / "run"))
    test = Samples(x, (x > 5).sum(1) // 3)
    _, parts = scoring.gradient(first, test)
    assert {*parts} == {*ADAPTER}
    assert parts["before.up"].any()
    assert not parts["before.down"].any()  # where up is 0


# ------------------------------------------------ metrics of the whole test set, with errors by a jackknife

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 3))
Y = (X @ [1.0, -1.0, 0.3] + RNG.normal(0, 0.5, 120) > 0).astype(np.int64)


def auc_and_right(arrays, test):
    """AUC of a linear model, and its probability of the right answer."""
    z = test.x @ arrays["w"].numpy()
    p = 1 / (1 + np.exp(-z))
    return {"auc": auc(np.stack([0 * z, z], 1), test.y), "right": np.where(test.y == 1, p, 1 - p)}


def push(name, message):
    moved = message.content["arrays"]["w"].numpy() + np.array(
        [0.5, -0.5, 0.1 * NAMES.index(name)], np.float32
    )
    content = {"arrays": ArrayRecord({"w": Array(moved)}), "metrics": MetricRecord({"num-examples": 10})}
    return Message(RecordDict(content), reply_to=message)


def pushed(home, value=auc_and_right, **options):
    strategy = contributions(
        home, **{"utilities": ["auc", "right"], "test": (X, Y), "value": value, **options}
    )
    first = ArrayRecord({"w": Array(np.array([-0.1, 0.1, 0.1], np.float32))})
    strategy.start(grid=members(home, push, value=value, seed=0), initial_arrays=first, num_rounds=2)
    return rounds_in(home / "run")


def test_members_report_a_metric_of_the_whole_set_with_errors_of_blocks(home):
    rounds = pushed(home)
    whole, each = (rounds[0].to_reports(name) for name in ("auc", "right"))
    assert set(whole.clients) == set(NAMES)
    assert (whole.freedom, each.freedom) == (9, 119)
    assert whole.grand > 0.9 > whole.empty
    assert 0 < whole.se_alpha.max() < 0.2


def test_one_number_for_what_is_no_such_metric_is_refused_before_anybody_trains(home):
    def scalar(arrays, test):
        return {"auc": 0.5, "right": 0.5}

    with pytest.raises(ReportError, match="'right': expected one number for each of 120 test samples"):
        pushed(home, scalar)


def test_the_terms_say_which_of_a_users_own_are_such_metrics(home):
    def own(arrays, test):
        return float(np.median(auc_and_right(arrays, test)["right"]))

    rounds = pushed(home, own, utilities=["whole:median"])
    assert rounds[-1].to_reports("whole:median").freedom == 9


def test_such_a_metric_cannot_be_settled(home):
    with refused(ConfigError, setting="scoring.utilities"):
        pushed(home, gradient=lambda arrays, test: (0.5, [np.zeros(3)]), method="settled")


def test_torch_scoring_measures_real_numbers_and_metrics(home):
    import torch

    def network():
        return torch.nn.Linear(3, 1)

    class Some:
        x, y = X.astype(np.float32), Y

    arrays = ArrayRecord(network().state_dict())
    found = fedmerit.flower.torch_scoring(network, ["auc", "accuracy"]).value(arrays, Some)
    assert isinstance(found["auc"], float)
    assert found["accuracy"].shape == (120,)
    Some.y = X[:, 0].astype(np.float32)
    skill = fedmerit.flower.torch_scoring(network, "rmse-skill:10")
    level, slope = skill.gradient(arrays, Some)
    assert level == pytest.approx(skill.value(arrays, Some).mean(), abs=1e-6)
    assert slope["weight"].shape == (1, 3)


@pytest.mark.parametrize("ends", ["Softmax", "Identity"])
def test_a_softmax_that_is_called_logits_is_named_once(ends, caplog):
    from torch import nn

    def network():
        return nn.Sequential(nn.Linear(2, 3), getattr(nn, ends)(*[-1] * (ends == "Softmax")))

    test = Samples(np.ones((9, 2), np.float32), np.arange(9) % 3)
    value, _ = fedmerit.flower.torch_scoring(network, outputs="logits")
    for _ in range(2):
        value(ArrayRecord(network().state_dict()), test)
    said = [record.args[0].code for record in caplog.records if record.name == "fedmerit"]
    assert said == ["called-logits"] * (ends == "Softmax")
