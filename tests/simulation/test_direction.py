"""The direction of a round: finite differences, formulas, blocks, users' utilities, refusals."""

import itertools
import os
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedmerit as fm
from fedmerit.errors import InputError, NoGradient, ReportError
from fedmerit.protocol.direction import deal
from fedmerit.simulation.direction import direction, missing_gradient
from fedmerit.simulation.models import build, load_vector, state, to_vector
from fedmerit.simulation.utilities import UTILITIES, evaluate, resolve
from networks import module_of, network
from raising import raises

DEVICE = os.environ.get("FEDMERIT_TEST_DEVICE", "cpu")
SMOOTH = ("expected-accuracy", "sharpened-accuracy", "brier", "neg-loss")


class Normed(nn.Module):
    """A user's model with every kind of layer that treats evaluation in its own way."""

    def __init__(self, norm=None):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = norm or nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.norm(self.conv(x))).flatten(1)))


class Overridden(nn.BatchNorm2d):
    """A user's own normalisation, which does more than PyTorch's."""

    def forward(self, x):
        return 2 * super().forward(x)


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make()
        if any(isinstance(one, nn.modules.batchnorm._NormBase) for one in model.modules()):
            model.train()(torch.randn(16, 1, 6, 6))  # running statistics worth carrying
    return model.to(DEVICE)


def pool(m=24, classes=3, seed=0, side=6):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (m, side, side, 1), dtype=np.uint8), rng.permutation(np.arange(m) % classes)


def moved(model, scale=0.3, seed=1):
    """M0, and a model that is a step away from it, whose running variances stay positive."""
    m0 = to_vector(model)
    step = np.abs(m0).mean() * np.random.default_rng(seed).standard_normal(len(m0))
    return m0, (m0 + scale * step).astype(np.float32)


def in_double(model, vector, x, y, utility):
    """v of a model in float64, from the definition."""
    double = {}
    begin = 0
    for name, value in state(model).items():
        double[name] = torch.as_tensor(vector[begin : begin + value.numel()]).view(value.shape).double()
        begin += value.numel()
    images = torch.as_tensor(x).permute(0, 3, 1, 2).double() / 127.5 - 1
    copy = seeded(lambda: type(model)() if isinstance(model, Normed) else model).cpu().double().eval()
    with torch.no_grad():
        logits = torch.func.functional_call(copy, double, (images,))
    model.to(DEVICE).float()
    return float(utility.of_logits(logits, torch.as_tensor(y)).mean())


def whole(found):
    return found.gradient


# ------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("utility", SMOOTH)
def test_at_one_point_it_is_the_gradient_of_finite_differences(utility):
    """With M = M0 the path is a point. BatchNorm's statistics are among the coordinates that are moved."""
    model = seeded(Normed)
    x, y = pool()
    m0 = to_vector(model).astype(np.float64)
    found = whole(direction(model, m0, m0, x, y, utility))
    names = [name for name, value in state(model).items() for _ in range(value.numel())]
    rng = np.random.default_rng(5)
    some = sorted({*rng.integers(0, len(m0), 30), *(k for k, name in enumerate(names) if "running" in name)})
    assert {names[k] for k in some} >= {"norm.running_mean", "norm.running_var"}
    for k in some:
        step = np.zeros_like(m0)
        step[k] = 1e-5
        above, below = (in_double(model, m0 + s * step, x, y, resolve(utility)) for s in (1, -1))
        expected = (above - below) / 2e-5
        assert found[k] == pytest.approx(expected, rel=2e-4, abs=2e-6), names[k]
    running = [k for k, name in enumerate(names) if "running" in name]
    assert np.abs(found[running]).min() > 0


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm2d(4, affine=False),
        lambda: Overridden(4),
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        lambda: nn.InstanceNorm2d(4),
        lambda: nn.BatchNorm2d(4, track_running_stats=False),
        lambda: nn.GroupNorm(2, 4),
    ],
    ids=["no affine", "overridden", "instance, running", "instance", "batch statistics", "group"],
)
def test_other_normalisations_evaluate_as_they_are(norm):
    """What the direction says of v(M0), v(M) and of the gain is what the network itself evaluates to."""
    model = seeded(lambda: Normed(norm()))
    x, y = pool()
    m0, m = moved(model)
    found = direction(model, m0, m, x, y, "expected-accuracy", blocks=1)
    for vector, value in ((m0, found.empty), (m, found.grand)):
        load_vector(model, vector)
        assert value == pytest.approx(
            evaluate(model, x, y, ["expected-accuracy"])["expected-accuracy"].mean()
        )
    assert abs(found.rest) <= 0.02 * abs(found.gain)
    assert found.gain != 0


def test_a_linear_softmax_has_the_gradient_of_the_book():
    """log p_y has gradient (1[k = y] - p_k) x; its mean over three Gauss-Legendre points is the direction."""
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    x, y = pool()
    m0, m = moved(model)
    flat = x.reshape(len(x), -1) / 127.5 - 1
    expected = np.zeros(len(m0))
    for t, weight in ((0.5 - np.sqrt(0.15), 5 / 18), (0.5, 8 / 18), (0.5 + np.sqrt(0.15), 5 / 18)):
        at = m0.astype(np.float64) + t * (m.astype(np.float64) - m0)
        logits = flat @ at[:108].reshape(3, 36).T + at[108:]
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        away = (np.eye(3)[y] - p) / len(y)
        expected += weight * np.concatenate([(away.T @ flat).ravel(), away.sum(0)])
    found = direction(model, m0, m, x, y, "neg-loss", points=3)
    assert found.points == 3
    np.testing.assert_allclose(whole(found), expected, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------- efficiency and points


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-pool", "resnet-group", "resnet-batch"])
def test_scores_add_up_to_the_gain_up_to_the_rest(name):
    resnet = name.startswith("resnet")
    model = seeded(lambda: network(name, 1))
    x, y = pool(side=40 if resnet else 6)
    before = m0 = to_vector(model)
    uphill = whole(direction(model, m0, m0, x, y, "expected-accuracy", blocks=1))  # as training moves
    m = (m0 + (0.01 if resnet else 0.5) * uphill / np.linalg.norm(uphill)).astype(np.float32)
    rng = np.random.default_rng(2)
    parts = rng.dirichlet([1, 1, 1], len(m0)).T * (m.astype(np.float64) - m0)
    found = direction(model, m0, m, x, y, "expected-accuracy")
    assert (found.blocks.shape, found.blocks.dtype) == ((16, len(m0)), np.float32)
    scores = fm.aumann_shapley(parts, found.blocks, ["A", "B", "C"], sizes=found.sizes)
    assert scores.values.sum() + found.rest == pytest.approx(found.gain, abs=1e-8)
    assert found.gain > 0.0005
    assert abs(found.rest) <= 0.02 * found.gain
    assert np.array_equal(to_vector(model), before)  # M0's network was not touched
    assert model.training


def test_seven_points_are_used_where_three_leave_too_much():
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    x, y = pool()
    m0, m = moved(model, scale=12)  # far away, through a sharp bend
    coarse = direction(model, m0, m, x, y, "sharpened-accuracy", points=3)
    fine = direction(model, m0, m, x, y, "sharpened-accuracy")
    assert (coarse.points, fine.points) == (3, 7)
    assert abs(coarse.rest) > 0.02 * abs(coarse.gain)
    assert abs(fine.rest) < abs(coarse.rest)
    near = direction(model, m0, moved(model, scale=0.1)[1], x, y, "sharpened-accuracy")
    assert near.points == 3
    assert direction(model, m0, m, x, y, "brier", points=2).points == 2


# --------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize(("m", "blocks"), [(24, 8), (25, 4), (23, 23), (24, 1)])
def test_blocks_make_up_the_whole(m, blocks, monkeypatch):
    model = build("mlp", (6, 6, 1), 3).to(DEVICE)
    x, y = pool(m)
    m0, m_ = moved(model)
    one = direction(model, m0, m_, x, y, "brier", blocks=1)
    monkeypatch.setattr("fedmerit.simulation.direction.batch_of", lambda device: 5)
    many = direction(model, m0, m_, x, y, "brier", blocks=blocks)
    assert (sum(many.sizes), len(many.sizes)) == (m, blocks)
    assert many.blocks.shape == (blocks, len(m0))
    np.testing.assert_allclose(whole(many), whole(one), rtol=1e-3, atol=1e-6)
    assert many.rest == pytest.approx(one.rest, abs=1e-6)
    real, batches = model.forward, []

    def full(images):
        batches.append(len(images))
        if len(images) > 1 and len(batches) > 4:
            raise torch.cuda.OutOfMemoryError("full")
        return real(images)

    monkeypatch.setattr(model, "forward", full)  # a GPU whose memory another program fills
    halved = direction(model, m0, m_, x, y, "brier", blocks=blocks)
    np.testing.assert_allclose(whole(halved), whole(one), rtol=1e-3, atol=1e-6)
    assert {5, 2, 1} >= set(batches[1:]) >= {1}
    weights = np.array(many.sizes) / m
    np.testing.assert_allclose(whole(many), weights @ many.blocks, rtol=1e-4, atol=1e-7)


def test_a_block_has_the_gradient_of_its_own_samples():
    model = build("mlp", (6, 6, 1), 3).to(DEVICE)
    x, y = pool(20)
    m0, m = moved(model)
    found = direction(model, m0, m, x, y, "expected-accuracy", blocks=3, points=3)
    dealt, _ = deal(y, 3)
    own = dealt[1]
    alone = direction(model, m0, m, x[own], y[own], "expected-accuracy", blocks=1, points=3)
    np.testing.assert_allclose(found.blocks[1], alone.blocks[0], rtol=1e-3, atol=1e-7)
    given = direction(model, m0, m, x, y, "expected-accuracy", blocks=dealt, points=3)
    assert np.array_equal(given.blocks, found.blocks)
    with pytest.raises(InputError, match="the positions of all 20 samples, each once"):
        direction(model, m0, m, x, y, "expected-accuracy", blocks=[*dealt[:2], dealt[0]])


def test_samples_are_dealt_by_class_or_at_random():
    y = np.repeat([0, 1, 2], [17, 5, 10])
    blocks, by_class = deal(y, 4, seed=1)
    assert by_class
    assert sorted(np.concatenate(blocks)) == list(range(32))
    assert [len(block) for block in blocks] == [8, 8, 8, 8]
    dealt = [np.bincount(y[block], minlength=3) for block in blocks]
    assert np.ptp(dealt, axis=0).max() <= 1
    assert not np.array_equal(blocks, deal(y, 4, seed=2)[0])
    assert deal(y.astype(float), 4)[1] is False
    for wrong in (0, 33, 1.5, True):
        with pytest.raises(InputError, match="blocks must be a whole number from 1 to the 32 test samples"):
            deal(y, wrong)


# ----------------------------------------------------------------------------------------- users' utilities

OWN = '''
import numpy as np
import torch

def margin(model, images, labels):
    """Differentiable, and one sample's value depends on the others."""
    right = torch.tanh(model(images).gather(1, labels[:, None])[:, 0])
    return (right - right.mean()) ** 2 / 4

def as_numpy(model, images, labels):
    return model(images).softmax(1)[:, 0].numpy()

def detached(model, images, labels):
    return model(images).softmax(1)[:, 0].detach()

def root(model, images, labels):
    return (0 * model(images)[:, 0]).sqrt()

def target(model, images, labels):
    return -(model(images)[:, 0] - labels) ** 2
target.unit = False
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    yield from module_of("own_measure", OWN, tmp_path, monkeypatch)


def test_a_users_utility_is_differentiated_as_it_is(own):
    model = build("mlp", (6, 6, 1), 3).to(DEVICE)
    x, y = pool()
    m0, m = moved(model)
    one, many = (direction(model, m0, m, x, y, "own_measure:margin", blocks=b) for b in (1, 4))
    load_vector(model, m)
    assert one.grand == pytest.approx(
        evaluate(model, x, y, ["own_measure:margin"])["own_measure:margin"].mean()
    )
    assert abs(one.rest) <= 0.02 * abs(one.gain)
    np.testing.assert_allclose(whole(many), whole(one), rtol=1e-3, atol=1e-7)
    y = np.random.default_rng(0).standard_normal(len(x)).astype(np.float32)  # no classes: dealt at random
    found = direction(model, m0, m, x, y, "own_measure:target")
    assert not found.stratified
    assert found.gain != 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("accuracy", "sharpened-accuracy in the place of accuracy, or score by reports"),
        ("balanced-accuracy", "sharpened-accuracy in the place of accuracy, or score by reports"),
        ("auc", "has no gradient (it is a metric of the whole test set): take a mean over samples"),
        ("own_measure:as_numpy", "return a torch tensor"),
        ("own_measure:detached", "return a torch tensor"),
    ],
)
def test_a_utility_without_a_gradient_is_refused_and_the_error_says_what_has_one(own, name, told):
    model = build("mlp", (6, 6, 1), 3).to(DEVICE)
    if DEVICE != "cpu" and name.endswith("as_numpy"):
        pytest.skip("a tensor on a GPU is no numpy array")
    x, y = pool()
    with raises(NoGradient, utility=name) as caught:
        direction(model, *moved(model), x, y, name)
    assert told in str(caught.value)
    assert missing_gradient(model, x, y, name).utility == name
    with pytest.raises(ReportError, match=r"'own_measure:root' is not finite at '1\.weight'"):
        direction(model, *moved(model), x, y, "own_measure:root")


class Unused(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.head = nn.Linear(36, 3)
        self.kind = kind
        if kind == "parameter":
            self.extra = nn.Parameter(torch.ones(2))
        else:
            self.register_buffer("extra", torch.ones(3))

    def forward(self, x):
        y = self.head(x.flatten(1))
        return y if self.kind == "parameter" else y * self.extra.detach()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_coordinate_without_a_gradient_is_named_never_zero(kind):
    model = seeded(lambda: Unused(kind))
    x, y = pool()
    m0, m = moved(model)
    with raises(NoGradient, coordinate="extra"):
        direction(model, m0, m, x, y, "brier")
    assert missing_gradient(model, x, y, "brier").coordinate == "extra"


ORDERS = torch.tensor(list(itertools.permutations([1.0, 1e-9, -1.0])))


class Kinked(nn.Module):
    """Its units have the activation 1e-9, which float32 rounds to 0 in some order of summation."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.units, self.head, self.kind = nn.Linear(3, 6, bias=False), nn.Linear(6, 3), kind
        self.units.weight.data = ORDERS.clone()
        self.register_buffer("turned", torch.eye(3), persistent=False)
        self.loose = torch.eye(3)

    def forward(self, x):
        if self.kind == "cast":
            x = x.float().to(torch.float32).type(torch.float32).to(dtype=torch.float32)
        elif self.kind == "made":
            x = torch.zeros(x.shape, device=x.device).addmm(x, torch.ones(3, 3, device=x.device) / 3)
        elif self.kind == "buffer":
            x = x @ self.turned
        elif self.kind == "attribute":
            x = x @ self.loose.to(x.device)
        return self.head(torch.relu(self.units(x)))


@pytest.mark.parametrize("kind", ["plain", "cast", "made", "buffer"])
def test_activations_beside_a_kink_are_on_the_side_where_float64_sees_them(kind):
    model = seeded(lambda: Kinked(kind))
    vector, x, y = to_vector(model), np.ones((24, 3), np.float32), np.arange(24) % 3
    found = whole(direction(model, vector, vector, x, y, "brier"))[:18].reshape(6, 3)
    copy = seeded(Kinked).cpu().double()
    copy.units.weight.data = torch.full((6, 3), 1 / 3, dtype=torch.float64)  # far from the kink, all active
    hidden = copy.units(torch.ones(24, 3).double()) * 3e-9
    UTILITIES["brier"].of_logits(copy.head(torch.relu(hidden)), torch.as_tensor(y)).mean().backward()
    np.testing.assert_allclose(found, copy.units.weight.grad / 3e-9, rtol=1e-5)
    assert not missing_gradient(model, x, y, "brier")
    assert model.units.weight.dtype == model.turned.dtype == torch.float32


def test_a_network_that_fails_in_float64_has_no_direction():
    model, x, y = seeded(lambda: Kinked("attribute")), np.ones((24, 3), np.float32), np.arange(24) % 3
    assert set(evaluate(model, x, y, [resolve("brier")])) == {"brier"}
    with raises(NoGradient, utility="brier"):
        direction(model, to_vector(model), to_vector(model), x, y, "brier")
    assert missing_gradient(model, x, y, "brier").utility == "brier"


def test_recurrent_networks_and_tied_weights_have_gradients():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.LSTM(6, 6, batch_first=True)
            self.mix = nn.Linear(6, 6, bias=False)
            self.again = nn.Linear(6, 6, bias=False)
            self.again.weight = self.mix.weight
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.again(torch.tanh(self.mix(self.rows(x[:, 0])[0][:, -1]))))

    model = seeded(Recurrent)
    x, y = pool()
    m0, m = moved(model)
    found = direction(model, m0, m, x, y, "neg-loss")
    assert abs(found.rest) <= 0.02 * abs(found.gain)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"m": np.zeros(3)}, InputError, "M must have 13187 values like the model"),
        ({"m0": np.full(13187, np.nan)}, InputError, "M0 is not finite"),
        ({"blocks": 25}, InputError, "blocks must be a whole number from 1 to the 24"),
        ({"y": np.zeros(24)}, InputError, "labels must be 24 integers"),
    ],
)
def test_wrong_input_is_named(change, error, says):
    model = build("mlp", (6, 6, 1), 3).to(DEVICE)
    m0, m = moved(model)
    x, y = pool()
    given = {"m0": m0, "m": m, "x": x, "y": y, "utility": "brier", **change}
    with pytest.raises(error, match=says):
        direction(model, **given)


# ---------------------------------------------------------------------------------------- sharpened accuracy


def test_sharpened_accuracy_lies_between_expected_accuracy_and_accuracy():
    model = build("mlp", (6, 6, 1), 3, seed=2).to(DEVICE)
    load_vector(model, 3 * to_vector(model))
    x, y = pool(60)
    found = evaluate(model, x, y, [*SMOOTH, "accuracy"])
    sharp, plain = (np.abs(found[name] - found["accuracy"]).mean() for name in (SMOOTH[1], SMOOTH[0]))
    assert sharp < plain
    logits, labels = torch.tensor([[0.0, 0.5, -1.0]]), torch.tensor([1])
    expected = F.softmax(torch.tensor([0.0, 2.0, -4.0]), 0)[1]
    assert UTILITIES["sharpened-accuracy"].of_logits(logits, labels)[0] == expected
    assert UTILITIES["sharpened-accuracy"].unit
    assert "own_measure" not in sys.modules
