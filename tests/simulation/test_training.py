"""Local training equals torch's own Adam in a plain loop, bit for bit."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedmerit.errors import DataError, InputError
from fedmerit.simulation.models import build, load_vector, prepare, to_vector
from fedmerit.simulation.training import TrainingSettings, keep_memory, train, trained
from networks import client_data as data
from networks import close, network

DEVICE = os.environ.get("FEDMERIT_TEST_DEVICE", "cpu")
SETTINGS = TrainingSettings(local_epochs=2, batch_size=4)


def model_named(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return network(name, 1).to(DEVICE)


def mlp():
    return build("mlp", (6, 6, 1), 3).to(DEVICE)


def test_a_plain_loop_with_torchs_adam_gives_the_same_bits():
    model = model_named("cnn")
    ((x, y),) = data([10])
    train(model, x, y, SETTINGS, seed=7)

    for fused in (True, False):
        reference = model_named("cnn")
        adam = torch.optim.Adam(reference.parameters(), lr=0.001, weight_decay=0.001, fused=fused)
        generator = torch.Generator().manual_seed(7)
        for _ in range(2):
            order = torch.randperm(10, generator=generator)
            for index in (order[:4], order[4:8], order[8:]):
                adam.zero_grad()
                F.cross_entropy(
                    reference(prepare(x, DEVICE)[index]), torch.from_numpy(y).to(DEVICE)[index]
                ).backward()
                adam.step()
        if DEVICE == "cpu" and fused:
            assert np.array_equal(to_vector(model), to_vector(reference))
        close(to_vector(model), to_vector(reference))


@pytest.mark.parametrize("optimiser", ["adam", "adamw", "sgd"])
def test_a_parameter_that_is_part_of_a_larger_tensor_trains_like_any_other(optimiser):
    """As where a network for colour images is taken for grey ones: ``weight[:, :1]``."""
    settings = TrainingSettings(local_epochs=2, batch_size=4, lr=0.05, optimiser=optimiser)
    whole, part = (network("cnn", 1).to(DEVICE) for _ in range(2))
    larger = torch.cat([whole.conv1.weight.detach()] * 3, dim=1)
    part.conv1.weight = nn.Parameter(larger[:, :1])
    assert not part.conv1.weight.is_contiguous()
    for model in (whole, part):
        train(model, *data([11])[0], settings, 7)
    torch.testing.assert_close(part.conv1.weight, whole.conv1.weight, rtol=0, atol=0.01)
    rest = larger[:, 1:]
    assert torch.equal(rest[:, 0], rest[:, 1])  # nothing was written beside it


@pytest.mark.parametrize("dropout", [False, True])
def test_a_result_depends_on_seed_and_data_only_and_the_global_generator_stays_as_it_was(dropout):
    model, ((x, y),) = model_named("cnn"), data([9])
    if dropout:
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3)).to(DEVICE)
    start, before = to_vector(model), torch.get_rng_state()
    first = trained(model, start, x, y, SETTINGS, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    trained(model, start, x[:5], y[:5], SETTINGS, 1)
    assert np.array_equal(trained(model, start, x, y, SETTINGS, 2), first)
    assert not np.array_equal(trained(model, start, x, y, SETTINGS, 3), first)
    bad = np.full(x.shape, np.inf, dtype=np.float32)  # what diverges is returned as it is
    assert not np.isfinite(trained(model, start, bad, y, SETTINGS, 1)).all()


def test_batch_norm_statistics_are_trained_a_single_last_sample_is_skipped_and_counters_are_put_back():
    model, ((x, y),) = model_named("resnet-batch"), data([5], side=8)
    start, settings = to_vector(model), TrainingSettings(local_epochs=1, batch_size=4)
    vector = trained(model, start, x, y, settings, 0)
    assert int(model.bn1.num_batches_tracked) == 0
    load_vector(model, start)
    train(model, x, y, settings, 0)
    assert np.array_equal(to_vector(model), vector)
    assert int(model.bn1.num_batches_tracked) == 1
    assert not torch.equal(model.bn1.running_mean.cpu(), torch.zeros(4))


def test_bad_data():
    model, ((x, y),) = mlp(), data([4])
    start = to_vector(model)
    for images, labels, message in (
        (x[:0], y[:0], "cannot train on 0 images"),
        (x, y * 0 + 7, "labels must lie in 0 ... 2, got 7"),
        (x, y[:3], "labels must be 4 integers"),
    ):
        with pytest.raises(DataError, match=message):
            trained(model, start, images, labels, SETTINGS, 1)
    with pytest.raises(DataError, match="the model must return a tensor, got list"):
        SETTINGS.loss([1.0], torch.as_tensor(y))
    with pytest.raises(InputError, match="the model has no parameter to train"):
        trained(mlp().requires_grad_(False), start, x, y, SETTINGS, 1)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33")
def test_freed_memory_is_kept_for_the_next_array():
    class Info(ctypes.Structure):
        _fields_ = [(f"word{k}", ctypes.c_size_t) for k in range(10)]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Info

    def mapped():  # bytes of arrays that are mappings of their own, so go back to the system when freed
        before = libc.mallinfo2().word4
        array = torch.empty(2 << 30, dtype=torch.uint8)  # larger than what the heap may have; never touched
        return libc.mallinfo2().word4 - before if len(array) else 0

    libc.mallopt(-4, 65536)  # glibc's default
    assert mapped() >= 2 << 30
    keep_memory()
    assert mapped() == 0
