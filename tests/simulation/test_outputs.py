"""Networks that end in a sigmoid or softmax: refused until somebody says so, and then measured right."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedmerit.config import from_dict
from fedmerit.errors import ConfigError
from fedmerit.simulation.direction import slope
from fedmerit.simulation.setup import prepare
from fedmerit.simulation.training import loss_of
from fedmerit.simulation.utilities import (
    check_kind,
    evaluate,
    look_like_probabilities,
    metric_of,
    resolve,
    resolve_all,
)

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
        right = metric_of(probabilities, x, y, resolve(name, probabilities=True))
        assert right == pytest.approx(metric_of(logits, x, y, resolve(name)), abs=1e-6)
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
    x = torch.as_tensor(samples(outputs)[0][:16])
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
    with pytest.raises(ConfigError) as refused:
        check_kind(network, samples(5)[0], resolve_all(["brier"]))
    assert refused.value.setting == "model.outputs"
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
    with pytest.raises(ConfigError) as refused:
        prepare(from_dict(given))
    assert refused.value.setting == "model.outputs"
    hashes = set()
    for said in ("logits", "probabilities"):
        federation = prepare(from_dict(given | {"model": {**given["model"], "outputs": said}}))
        assert all(one.probabilities == (said == "probabilities") for one in federation.utilities)
        assert federation.training.loss.probabilities == (said == "probabilities")
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
        with pytest.raises(ConfigError) as refused:
            function(arrays, test)
        assert refused.value.setting == "model.outputs"
    with pytest.raises(ConfigError):
        torch_scoring(lambda: probabilities, outputs="odds")
    right = torch_scoring(lambda: probabilities, "expected-accuracy", outputs="probabilities")
    wrong = torch_scoring(lambda: probabilities, "expected-accuracy", outputs="logits")
    said = [float(np.mean(one.value(arrays, test))) for one in (right, wrong)]
    assert said[0] > 0.9
    assert said[1] < 0.75
    assert right.gradient(arrays, test)[0] == pytest.approx(said[0], abs=1e-5)
    assert vars(right.value)["definition"] != vars(wrong.value)["definition"]
