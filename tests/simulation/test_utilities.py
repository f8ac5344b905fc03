"""Per-sample utilities against values computed by hand; networks that end in a sigmoid or softmax."""

import hashlib
import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedmerit.config import from_dict
from fedmerit.errors import ConfigError, DataError, ReportError
from fedmerit.notes import code_of
from fedmerit.simulation import utilities
from fedmerit.simulation.direction import slope
from fedmerit.simulation.models import build
from fedmerit.simulation.setup import prepare
from fedmerit.simulation.training import loss_of
from fedmerit.simulation.utilities import (
    check_kind,
    evaluate,
    look_like_probabilities,
    resolve,
    resolve_all,
    values_of,
)
from networks import module_of
from raising import raises

USER = """
import torch

def margin(model, images, labels):
    top = model(images).topk(2, dim=1).values
    return (top[:, 0] - top[:, 1])
margin.unit = False

def half(model, images, labels):
    return [0.5] * len(labels)

def two(model, images, labels):
    return torch.full((len(labels),), 2.0)

def nan(model, images, labels):
    return torch.full((len(labels),), float("nan"))

def scalar(model, images, labels):
    return 0.5

def broken(model, images, labels):
    raise RuntimeError("no such organ")
"""


class Echo(nn.Module):
    """The image's first C pixels are the logits."""

    def forward(self, x):
        return x.flatten(1)


def logits_as_images(rows):
    return np.asarray(rows, dtype=np.float32)[:, None, :, None].transpose(0, 2, 1, 3)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    yield from module_of("my_utilities", USER, tmp_path, monkeypatch)


# logits log(1, 2, 1) give p = (1/4, 1/2, 1/4); log(6, 1, 1) give p = (3/4, 1/8, 1/8)
X = logits_as_images([[0, math.log(2), 0], [math.log(6), 0, 0], [0, math.log(2), 0]])
Y = np.array([1, 0, 2])


def test_values_by_hand():
    got = utilities.evaluate(Echo(), X, Y, list(utilities.UTILITIES))
    assert got["expected-accuracy"] == pytest.approx([1 / 2, 3 / 4, 1 / 4])
    assert got["accuracy"].tolist() == [1, 1, 0]
    assert got["balanced-accuracy"].tolist() == [1, 1, 0]  # m / (C m_y) = 3 / (3 * 1)
    # 1 - (1/16 + 1/4 + 1/16) / 2; 1 - (1/16 + 1/64 + 1/64) / 2; 1 - (1/16 + 1/4 + 9/16) / 2
    assert got["brier"] == pytest.approx([13 / 16, 61 / 64, 9 / 16])
    assert got["neg-loss"] == pytest.approx(np.log([1 / 2, 3 / 4, 1 / 4]), rel=1e-6)
    assert all(value.dtype == np.float64 for value in got.values())


def test_balanced_accuracy_weighs_classes_equally():
    x = X[[0, 0, 0, 1, 2]]
    y = np.array([1, 1, 1, 0, 2])  # classes 0, 1, 2 have 1, 3, 1 samples; class 2 is missed
    got = utilities.evaluate(Echo(), x, y, ["balanced-accuracy"])["balanced-accuracy"]
    assert got == pytest.approx([5 / 9, 5 / 9, 5 / 9, 5 / 3, 0])
    assert got.mean() == pytest.approx(2 / 3)


def test_one_forward_pass_serves_all_and_modes_are_restored(monkeypatch):
    calls = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Dropout(0.5).eval()

        def forward(self, x):
            calls.append((len(x), self.training, torch.is_inference_mode_enabled()))
            return x.flatten(1)

    model = Counting()
    assert model.training
    monkeypatch.setattr(utilities, "batch_of", lambda device: 2)
    utilities.evaluate(model, X, Y, ["accuracy", "brier", "neg-loss"])
    assert calls == [(2, False, True), (1, False, True)]
    assert model.training
    assert not model.inner.training


def test_same_numbers_whatever_the_batch_size_and_twice(monkeypatch):
    model = build("cnn", (6, 6, 1), 3)
    x = np.random.default_rng(0).integers(0, 256, (7, 6, 6, 1), dtype=np.uint8)
    y = np.array([0, 1, 2, 0, 1, 2, 0])
    first = utilities.evaluate(model, x, y, ["brier"])["brier"]
    assert np.array_equal(first, utilities.evaluate(model, x, y, ["brier"])["brier"])
    monkeypatch.setattr(utilities, "batch_of", lambda device: 3)
    assert utilities.evaluate(model, x, y, ["brier"])["brier"] == pytest.approx(first, abs=1e-6)


def test_a_sure_model_stays_in_the_unit_interval():
    x = logits_as_images([[80.0, -80.0], [-80.0, 80.0]])
    got = utilities.evaluate(Echo(), x, np.array([0, 0]), ["expected-accuracy", "brier"])
    assert got["expected-accuracy"].tolist() == [1, 0]
    assert got["brier"].tolist() == [1, 0]


def test_a_users_utility(user_module):
    got = utilities.evaluate(Echo(), X, Y, ["accuracy", f"{user_module}:margin", f"{user_module}:half"])
    assert got[f"{user_module}:margin"] == pytest.approx([math.log(2), math.log(6), math.log(2)])
    assert got[f"{user_module}:half"].tolist() == [0.5] * 3


def test_the_definition_hash_follows_the_source(user_module):
    utility = utilities.resolve(f"{user_module}:half")
    source = "def half(model, images, labels):\n    return [0.5] * len(labels)\n"
    assert utility.definition_hash() == hashlib.sha256(source.encode()).hexdigest()
    hashes = {u.definition_hash() for u in utilities.UTILITIES.values()}
    assert len(hashes) == len(utilities.UTILITIES)
    # Committed in ledgers: this hash may only change when the definition does.
    digest = "dba66b3bb673c41e542ad03769d7781c52c5ca257ee124b868622bbf46849175"
    assert utilities.resolve("expected-accuracy").definition_hash() == digest


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("two", ReportError, r"utility 'my_utilities:two' of sample 0 must lie in \[0, 1\], got 2"),
        ("nan", ReportError, "utility 'my_utilities:nan' of sample 0 is nan, expected a number"),
        ("scalar", ReportError, r"must return 3 numbers, one per sample, got shape \(1,\)"),
        ("broken", ReportError, "utility 'my_utilities:broken' failed: RuntimeError: no such organ"),
        ("absent", ConfigError, "scoring.utilities: cannot load 'my_utilities:absent'"),
    ],
)
def test_bad_users_utilities(user_module, name, error, message):
    with pytest.raises(error, match=message):
        utilities.evaluate(Echo(), X, Y, [f"{user_module}:{name}"])


@pytest.mark.parametrize(
    ("x", "y", "names", "error", "message"),
    [
        (X, Y, ["f2"], ConfigError, "scoring.utilities: expected expected-accuracy, .*, got 'f2'"),
        (X, Y, [], ConfigError, r"expected different names, got \[\]"),
        (X, Y, ["brier", "brier"], ConfigError, "expected different names"),
        (X, Y, ["math:sqrt"], ConfigError, "'math:sqrt' has no source"),
        (X, Y[:2], ["brier"], DataError, r"labels must be 3 integers, one per image, got shape \(2,\)"),
        (X, Y / 2, ["brier"], DataError, "labels must be 3 integers.*float64"),
        (X[:0], Y[:0], ["brier"], DataError, "cannot evaluate on 0 images"),
        (X, np.array([0, 1, 3]), ["brier"], DataError, r"labels must lie in 0 ... 2, got 3"),
        (X, np.array([0, 1, -1]), ["brier"], DataError, r"labels must lie in 0 ... 2, got -1"),
        (X, np.array([0, 1, 1]), ["balanced-accuracy"], DataError, "class 2 of 3 has no sample"),
        (X * np.nan, Y, ["accuracy"], ReportError, "the model's answers are not finite"),
    ],
)
def test_bad_input(x, y, names, error, message):
    with pytest.raises(error, match=message):
        utilities.evaluate(Echo(), x, y, names)
    model = Echo()
    for answer, got in ((lambda x: x.flatten(1)[:1], r"shape \(1, 3\)"), (lambda x: [1], "list")):
        model.forward = answer
        with pytest.raises(DataError, match=rf"must return logits of shape \(3, classes\), got {got}"):
            utilities.evaluate(model, X, Y, ["brier"])


# ---------------------------------------------------------------- networks that end in a sigmoid or softmax


NAMES = ("expected-accuracy", "accuracy", "balanced-accuracy", "sharpened-accuracy", "brier", "neg-loss")


def networks(outputs):
    """Two networks with the same weights: one returns logits, the other one probabilities."""
    torch.manual_seed(outputs)
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))
    return body, nn.Sequential(*body, nn.Sigmoid() if outputs == 1 else nn.Softmax(1))


def samples(outputs, count=60):
    rng = np.random.default_rng(outputs)
    return (3 * rng.normal(size=(count, 4))).astype(np.float32), np.arange(count) % max(2, outputs)


@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_probabilities_are_measured_as_their_logits_are(outputs):
    logits, probabilities = networks(outputs)
    x, y = samples(outputs)
    expected = evaluate(logits, x, y, resolve_all(NAMES))
    found = evaluate(probabilities, x, y, resolve_all(NAMES, probabilities=True))
    for name in NAMES:
        np.testing.assert_allclose(found[name], expected[name], atol=2e-5, err_msg=name)
    for name in ("auc", "f1"):
        right = values_of(probabilities, x, y, [resolve(name, probabilities=True)])
        assert right == pytest.approx(values_of(logits, x, y, [resolve(name)]), abs=1e-6)
    silent = evaluate(probabilities, x, y, resolve_all(NAMES))  # read as logits
    assert np.abs(silent["expected-accuracy"] - expected["expected-accuracy"]).max() > 0.1


@pytest.mark.parametrize("outputs", [1, 5])
@pytest.mark.parametrize("utility", ["expected-accuracy", "brier"])
def test_their_gradient_is_that_of_the_logits(outputs, utility):
    logits, probabilities = networks(outputs)
    x, y = samples(outputs)
    value, of_logits = slope(logits, x, y, resolve(utility))
    found, of_probabilities = slope(probabilities, x, y, resolve(utility, probabilities=True))
    assert found == pytest.approx(value, abs=1e-6)
    for name, one in of_logits.items():
        torch.testing.assert_close(of_probabilities[name], one, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("outputs", "name"), [(1, "binary"), (5, "cross-entropy")])
def test_their_loss_is_that_of_the_logits(outputs, name):
    logits, probabilities = networks(outputs)
    x, y = map(torch.as_tensor, samples(outputs))
    expected, found = loss_of(name)(logits(x), y), loss_of(name, probabilities=True)(probabilities(x), y)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert loss_of(name, probabilities=True) != loss_of(name)
    certain = torch.eye(5)[y] if outputs == 5 else y[:, None].float()  # right, with probability 1
    assert float(loss_of(name, probabilities=True)(certain, y)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_a_network_that_ends_in_probabilities_is_found_and_no_other(outputs):
    logits, probabilities = networks(outputs)
    x = samples(outputs)[0]
    assert look_like_probabilities(probabilities, x, adding_up=True) == (outputs > 1)
    assert not look_like_probabilities(nn.Sequential(logits, nn.Sigmoid()), x, adding_up=True)
    assert look_like_probabilities(probabilities, x)
    assert look_like_probabilities(nn.Sequential(logits, nn.Sigmoid()), x)  # of several, they do not sum to 1
    assert not look_like_probabilities(logits, x)
    assert not look_like_probabilities(nn.Sequential(logits, nn.ReLU()), x)
    before = [one.clone() for one in logits.parameters()]
    with torch.no_grad():  # logits that lie in [0, 1] and sum to 1 before training
        for one in logits[-1].parameters():
            one.zero_()
        logits[-1].bias += 1 / outputs if outputs > 1 else 0.3
    assert not look_like_probabilities(logits, x)
    assert all(one.shape == was.shape for one, was in zip(logits.parameters(), before, strict=True))


def test_the_first_model_is_left_as_it_was():
    _, network = networks(5)
    before = {name: one.clone() for name, one in network.state_dict().items()}
    with raises(ConfigError, setting="model.outputs"):
        check_kind(network, samples(5)[0], resolve_all(["brier"]))
    assert all(torch.equal(before[name], one) for name, one in network.state_dict().items())
    check_kind(network, samples(5)[0], resolve_all(["brier"]), "logits")  # somebody said so


@pytest.fixture
def module(monkeypatch):
    """A user's module with networks that end in probabilities."""
    made = ModuleType("ends_in_softmax")

    def net(input_shape, outputs):
        width = int(np.prod(input_shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(width, outputs), nn.Softmax(1))

    made.net = net
    monkeypatch.setitem(sys.modules, "ends_in_softmax", made)


def test_a_rehearsal_refuses_them_until_the_config_says_which(module):
    given = {"model": {"name": "ends_in_softmax:net"}, "scoring": {"method": "settled"}}
    given["partition"] = {"scheme": "iid", "clients": 3}
    with raises(ConfigError, setting="model.outputs"):
        prepare(from_dict(given))
    hashes = set()
    for said in ("logits", "probabilities"):
        federation = prepare(from_dict(given | {"model": {**given["model"], "outputs": said}}))
        assert all(one.probabilities == (said == "probabilities") for one in federation.utilities)
        assert federation.training.loss.probabilities == (said == "probabilities")
        assert ("called-logits" in map(code_of, federation.notes)) == (said == "logits")
        hashes.add(federation.utilities[0].definition_hash())
    assert len(hashes) == 2  # members agree to what is measured


def test_torch_scoring_refuses_them_until_it_is_told_which():
    pytest.importorskip("flwr", reason="flwr is not installed")
    from flwr.app import ArrayRecord

    from fedmerit.flower import torch_scoring

    logits, probabilities = networks(2)
    with torch.no_grad():
        logits[-1].weight *= 20  # decided answers, so that reading them wrongly shows
    x, _ = samples(2)
    y = logits(torch.as_tensor(x)).argmax(1).numpy()
    test, arrays = SimpleNamespace(x=x, y=y), ArrayRecord(probabilities.state_dict())
    for function in torch_scoring(lambda: probabilities, "expected-accuracy"):
        with raises(ConfigError, setting="model.outputs"):
            function(arrays, test)
    with pytest.raises(ConfigError):
        torch_scoring(lambda: probabilities, outputs="odds")
    right = torch_scoring(lambda: probabilities, "expected-accuracy", outputs="probabilities")
    wrong = torch_scoring(lambda: probabilities, "expected-accuracy", outputs="logits")
    said = [float(np.mean(one.value(arrays, test))) for one in (right, wrong)]
    assert said[0] > 0.9
    assert said[1] < 0.75
    assert right.gradient(arrays, test)[0] == pytest.approx(said[0], abs=1e-5)
    assert vars(right.value)["definition"] != vars(wrong.value)["definition"]
