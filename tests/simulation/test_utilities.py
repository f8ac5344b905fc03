"""Per-sample utilities against values computed by hand."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from torch import nn

from fedmerit.errors import ConfigError, DataError, ReportError
from fedmerit.simulation import utilities
from fedmerit.simulation.models import build
from networks import module_of

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
