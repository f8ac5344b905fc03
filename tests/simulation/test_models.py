"""Networks and the vector of a model."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedmerit.errors import ConfigError, DataError, InputError
from fedmerit.simulation import models
from networks import module_of

USER = """
from torch import nn

def small(input_shape, classes):
    h, w, c = input_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(h * w * c, classes))

def number(input_shape, classes):
    return 3

def complex_one(input_shape, classes):
    import torch
    model = small(input_shape, classes)
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model

constant = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    yield from module_of("my_models", USER, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", models.MODELS)
def test_every_network_gives_one_logit_per_class(name):
    model = models.build(name, (9, 11, 2), 3).eval()
    assert model(torch.zeros(2, 2, 9, 11)).shape == (2, 3)


def test_the_papers_shapes():
    assert models.CNN((224, 224, 3), 4, pool=True).fc1.in_features == 100352
    cifar = models.build("cnn", (32, 32, 3), 10)
    assert {k: tuple(v.shape) for k, v in cifar.state_dict().items() if "weight" in k} == {
        "conv1.weight": (16, 3, 3, 3),
        "conv2.weight": (32, 16, 3, 3),
        "fc1.weight": (128, 32768),
        "fc2.weight": (10, 128),
    }


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnets_have_the_sizes_and_names_of_torchvision(norm):
    r18 = models.ResNet((2, 2, 2, 2), 3, 1000, norm=norm)
    r50 = models.ResNet((3, 4, 6, 3), 3, 1000, norm=norm, bottleneck=True)
    assert sum(p.numel() for p in r18.parameters()) == 11_689_512
    assert sum(p.numel() for p in r50.parameters()) == 25_557_032
    names = "conv1.weight bn1.bias layer2.0.downsample.1.weight layer4.1.conv2.weight fc.bias"
    assert set(names.split()) < set(r18.state_dict())
    names = "layer1.0.downsample.0.weight layer3.5.bn3.weight layer4.2.conv3.weight"
    assert set(names.split()) < set(r50.state_dict())


def test_weights_depend_on_the_seed_only_and_the_global_generator_is_untouched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = models.to_vector(models.build("cnn", (8, 8, 1), 3, seed=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert np.array_equal(first, models.to_vector(models.build("cnn", (8, 8, 1), 3, seed=1)))
    assert not np.array_equal(first, models.to_vector(models.build("cnn", (8, 8, 1), 3, seed=2)))


def test_the_vector_holds_parameters_and_running_statistics_and_names_what_it_leaves_out():
    source = models.ResNet((1, 1, 1, 1), 1, 3, norm="batch", width=4)
    source.train()(torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(0)))
    vector = models.to_vector(source)
    target = models.ResNet((1, 1, 1, 1), 1, 3, norm="batch", width=4)
    models.load_vector(target, vector)
    assert vector.dtype == np.float32
    assert len(vector) == models.state_length(source)
    assert np.array_equal(models.to_vector(target), vector)
    assert torch.equal(target.bn1.running_var, source.bn1.running_var)
    assert not torch.equal(target.bn1.running_mean, torch.zeros(4))
    assert set(models.left_out(target)) == {
        k for k in target.state_dict() if k.endswith("num_batches_tracked")
    }
    assert models.left_out(models.build("resnet18", (8, 8, 1), 2)) == ()


def test_tied_parameters_are_in_the_vector_once_and_passing_buffers_not_at_all():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("scratch", torch.ones(5), persistent=False)
    assert models.state_length(model) == 9
    models.load_vector(model, np.arange(9, dtype=np.float32))
    assert torch.equal(model[1].weight.flatten(), torch.arange(9.0))
    with pytest.raises(InputError, match=r"the model has 9 values, got a vector of shape \(5,\)"):
        models.load_vector(model, np.zeros(5, dtype=np.float32))


def test_prepare_scales_bytes_and_passes_floats():
    x = np.array([0, 255, 51], dtype=np.uint8).reshape(1, 1, 1, 3)
    assert models.prepare(x).flatten().tolist() == pytest.approx([-1.0, 1.0, -0.6])
    frozen = np.full((2, 3, 4, 1), 7.5)
    frozen.flags.writeable = False
    out = models.prepare(frozen)
    assert out.shape == (2, 1, 3, 4)
    assert out.dtype == torch.float32
    assert out.unique().tolist() == [7.5]
    for wrong in (np.zeros(2), np.zeros((2, 3), dtype=complex)):
        with pytest.raises(DataError, match="samples must be numbers of shape"):
            models.prepare(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("vgg", "model.name: must be one of mlp, .*, resnet50 or 'module:factory', got 'vgg'"),
        ("no_such_module:f", "model.name: cannot load 'no_such_module:f': No module named"),
        ("my_models:nothing", "cannot load 'my_models:nothing': module 'my_models' has no attribute"),
        ("my_models:constant", "model.name: 'my_models:constant' is not callable"),
        ("my_models:number", r"'my_models:number' must return a torch.nn.Module, got int"),
        ("my_models:complex_one", "complex parameters cannot be summed"),
        ({"input_shape": (8, 8)}, r"takes images of shape .*, and samples have shape \(8, 8\)"),
        ({"input_shape": (3, 8, 1), "name": "cnn-pool"}, r"at least 4 x 4, got \(3, 8\)"),
        ({"classes": 0}, "a model needs at least 1 output, got 0"),
        ({"input_shape": (), "name": "mlp"}, r"input_shape must be the shape of one sample, got \(\)"),
    ],
)
def test_a_users_factory_is_found_in_the_current_folder_and_what_is_no_model_is_refused(
    user_module, change, message
):
    path = list(sys.path)
    assert models.state_length(models.build(f"{user_module}:small", (2, 2, 1), 3)) == 15
    assert sys.path == path
    given = {"name": change} if isinstance(change, str) else change
    with pytest.raises(ConfigError, match=message):
        models.build(**({"name": "cnn", "input_shape": (8, 8, 1), "classes": 3} | given))


@pytest.mark.parametrize("shape", [(8, 8, 1), (13, 10, 3)])
def test_pooling_before_relu_is_pooling_after_it(shape):
    model = models.build("cnn-pool", shape, 4)
    x = torch.randn(5, shape[2], *shape[:2], generator=torch.Generator().manual_seed(0))
    x[:, :, :5] = -1.0  # a background, so that the largest of four is often there twice

    def slow(x):
        for conv in (model.conv1, model.conv2):
            x = functional.max_pool2d(functional.relu(conv(x)), 2)
        return model.fc2(functional.relu(model.fc1(x.flatten(1))))

    assert torch.allclose(model(x), slow(x), rtol=1e-5, atol=1e-6)
    weights = list(model.parameters())
    fast, right = (torch.autograd.grad(f(x).square().sum(), weights) for f in (model, slow))
    for one, other in zip(fast, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_on_a_cpu_pooling_gets_channels_side_by_side_from_the_layer_before(channels):
    """In that layout it is several times as fast; a copy between two layers would take what that saves."""
    model, seen = models.build("cnn-pool", (8, 8, channels), 4), []
    for conv in (model.conv1, model.conv2):
        conv.register_forward_hook(lambda _, given, out: seen.append(out))
    model(torch.randn(5, channels, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert [out.is_contiguous(memory_format=torch.channels_last) for out in seen] == [True, True]
