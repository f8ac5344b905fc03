"""Local training: stacked equals one after another, and both equal torch's own Adam."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedmerit.errors import ConfigError, DataError, InputError
from fedmerit.simulation.models import build, load_vector, prepare, to_vector
from fedmerit.simulation.training import Stack, TrainingSettings, batches, keep_memory, train, train_many
from networks import Branching, network

DEVICE = os.environ.get("FEDMERIT_TEST_DEVICE", "cpu")
SETTINGS = TrainingSettings(local_epochs=2, batch_size=4)


class Attention(nn.Module):
    """A user's model: patches as tokens, self-attention, dropout, a parameter that is never used."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 2, stride=2)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = self.norm(tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0])
        return self.head(self.drop(tokens.mean(1)))


class Mixing(Branching):
    def forward(self, x):
        y = self.layer(x.flatten(1))
        return y - y.mean(0)


class Counting(Branching):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return self.layer(x.flatten(1))


def data(sizes, side=6, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, 256, (n, side, side, 1), dtype=np.uint8), rng.integers(0, 3, n).astype(np.int64))
        for n in sizes
    ]


def model_named(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        own = {"attention": Attention, "branching": Branching, "mixing": Mixing, "counting": Counting}
        own["waiting"] = Waiting
        return (network(name, 1) or own[name]()).to(DEVICE)


def mlp():
    return build("mlp", (6, 6, 1), 3).to(DEVICE)


def close(a, b):
    # Where the true gradient is zero (the key bias of an attention), Adam makes steps of rounding errors.
    assert np.isclose(a, b, rtol=1e-3, atol=1e-4).mean() > 0.97
    assert np.abs(a - b).max() < 10 * SETTINGS.lr


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


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-pool", "resnet-group", "attention"])
def test_stacked_equals_one_after_another(name):
    sizes = [9, 3, 16, 1, 8]  # short last batches, fewer samples than a batch, a single one
    model = model_named(name)
    start = to_vector(model)
    loop = train_many(model, start, data(sizes), SETTINGS, range(5), method="loop")
    stacked = train_many(model, start, data(sizes), SETTINGS, range(5), method="stacked")
    assert (loop.method, stacked.method, stacked.note) == ("loop", "stacked", None)
    for a, b in zip(loop.vectors, stacked.vectors, strict=True):
        assert not np.array_equal(a, start)
        close(a, b)


def test_each_client_may_start_elsewhere_and_frozen_parameters_stay():
    model = mlp()
    model[1].weight.requires_grad_(False)
    starts = [to_vector(build("mlp", (6, 6, 1), 3, seed=s)) for s in range(3)]
    loop = train_many(model, starts, data([5, 6, 7]), SETTINGS, [1, 2, 3], method="loop").vectors
    stacked = train_many(model, starts, data([5, 6, 7]), SETTINGS, [1, 2, 3], method="stacked").vectors
    for start, a, b in zip(starts, loop, stacked, strict=True):
        close(a, b)
        assert np.array_equal(b[: 36 * 128], start[: 36 * 128])


@pytest.mark.parametrize("name", ["cnn", "attention"])
def test_many_models_on_the_batches_of_one_client(name):
    model = model_named(name)
    clients = data([10, 3, 17])
    starts = torch.from_numpy(np.stack([to_vector(model) * scale for scale in (1.0, 0.9, 1.1)]))
    starts = starts.to(DEVICE)
    sets = [(torch.from_numpy(x).to(DEVICE), torch.from_numpy(y).to(DEVICE)) for x, y in clients]
    stack = Stack(model, 3, sets, SETTINGS)
    for i, seed, few in ((0, 5, 2), (1, 6, 3), (2, 7, 1), (0, 5, 3)):  # one stack, one client after another
        got = stack.train(starts[:few], [i] * few, [seed] * few)
        for start, vector in zip(starts[:few], got, strict=True):
            load_vector(model, start)
            train(model, *clients[i], SETTINGS, seed=seed)
            close(to_vector(model), vector.cpu().numpy())
    assert bool(stack.graphs) == (DEVICE != "cpu")


class Waiting(Branching):
    """A user's model that waits for the device, which no CUDA graph can record."""

    def forward(self, x):
        if x.is_cuda:
            torch.cuda.synchronize()
        return self.layer(x.flatten(1))


def test_steps_that_cannot_be_recorded_run_as_usual_and_say_so():
    model = model_named("waiting")
    start, clients = to_vector(model), data([9, 30])
    loop = train_many(model, start, clients, SETTINGS, [1, 2], method="loop")
    stacked = train_many(model, start, clients, SETTINGS, [1, 2], method="stacked")
    for a, b in zip(loop.vectors, stacked.vectors, strict=True):
        close(a, b)
    said = "stacked, but steps of the model cannot be recorded as a CUDA graph: "
    assert stacked.note is None if DEVICE == "cpu" else stacked.note.startswith(said)
    test_dropout_is_seeded_and_leaves_the_global_generator_alone()


def test_members_with_few_samples_finish_early():
    model = model_named("cnn")
    start, sizes = to_vector(model), [40, 33, 26, 18, 12, 9, 3]
    loop = train_many(model, start, data(sizes), SETTINGS, range(7), method="loop")
    stacked = train_many(model, start, data(sizes), SETTINGS, range(7), method="stacked")
    for a, b in zip(loop.vectors, stacked.vectors, strict=True):
        close(a, b)


def test_a_result_depends_on_seed_and_data_only():
    model = model_named("cnn")
    start = to_vector(model)
    first = train_many(model, start, data([9, 6]), SETTINGS, [1, 2], method="loop").vectors
    torch.manual_seed(123)
    again = train_many(model, start, data([9, 6])[1:], SETTINGS, [2]).vectors
    assert np.array_equal(first[1], again[0])
    other = train_many(model, start, data([9, 6])[1:], SETTINGS, [3]).vectors
    assert not np.array_equal(first[1], other[0])


def test_dropout_is_seeded_and_leaves_the_global_generator_alone():
    model = Attention(dropout=0.5).to(DEVICE)
    start, before = to_vector(model), torch.get_rng_state()
    for method in ("loop", "stacked"):
        first = train_many(model, start, data([9, 9]), SETTINGS, [1, 1], method=method).vectors
        again = train_many(model, start, data([9, 9]), SETTINGS, [1, 1], method=method).vectors
        assert np.array_equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet-batch", "has BatchNorm, which normalises by the batch"),
        ("branching", "cannot be stacked: "),
        ("mixing", "lets the samples of a batch influence each other"),
        ("counting", "changes its buffer 'seen' while training"),
    ],
)
def test_a_model_that_cannot_be_stacked_says_so(name, reason, monkeypatch):
    model = model_named(name)
    start = to_vector(model)
    with pytest.raises(InputError, match=f"the model {reason}"):
        train_many(model, start, data([6, 5]), SETTINGS, [1, 2], method="stacked")
    # On a GPU the same models fall back to the loop; here the loop must not have been harmed by the attempt.
    after = train_many(model, start, data([6, 5]), SETTINGS, [1, 2])
    fresh = train_many(model_named(name), start, data([6, 5]), SETTINGS, [1, 2])
    assert np.array_equal(after.vectors, fresh.vectors)
    assert after.method == "loop"
    assert (
        after.note is None
        if DEVICE == "cpu"
        else f"one client after another: the model {reason}" in after.note
    )


def test_batch_norm_statistics_are_trained_and_a_single_last_sample_is_skipped():
    model = model_named("resnet-batch")
    start = to_vector(model)
    settings = TrainingSettings(local_epochs=1, batch_size=4)
    (trained,) = train_many(model, start, data([5], side=8), settings, [0]).vectors
    assert int(model.bn1.num_batches_tracked) == 1
    load_vector(model, trained)
    assert not torch.equal(model.bn1.running_mean.cpu(), torch.zeros(4))


def test_a_diverging_client_is_returned_as_it_is_and_harms_nobody():
    model = mlp()
    start = to_vector(model)
    good, bad = data([6, 6])
    bad = (np.full_like(bad[0], np.inf, dtype=np.float32), bad[1])
    good = (good[0].astype(np.float32) / 255, good[1])
    for method in ("loop", "stacked"):
        first, second = train_many(model, start, [good, bad], SETTINGS, [1, 2], method=method).vectors
        assert np.isfinite(first).all()
        assert not np.isfinite(second).all()


def test_every_epoch_sees_every_sample_once():
    seen = torch.cat(list(batches(7, SETTINGS, seed=1))).view(2, 7)
    assert seen.sort(dim=1).values.tolist() == [list(range(7))] * 2
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local_epochs": 0}, "training.local_epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "training.batch_size must be at least 1, got 0"),
        ({"lr": 0.0}, "training.lr must be a positive number, got 0.0"),
        ({"lr": float("nan")}, "training.lr must be a positive number, got nan"),
        ({"weight_decay": -1.0}, "training.weight_decay must be at least 0, got -1.0"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ConfigError, match=message):
        TrainingSettings(**change)


@pytest.mark.parametrize("method", ["loop", "stacked"])
def test_bad_data(method):
    model = mlp()
    start = to_vector(model)
    (x, y), one = data([4, 4])
    with pytest.raises(DataError, match="cannot train on 0 images"):
        train_many(model, start, [one, (x[:0], y[:0])], SETTINGS, [1, 2], method=method)
    with pytest.raises(DataError, match=r"labels must lie in 0 ... 2, got 7"):
        train_many(model, start, [one, (x, y * 0 + 7)], SETTINGS, [1, 2], method=method)
    with pytest.raises(DataError, match="labels must be 4 integers"):
        train_many(model, start, [(x, y[:3]), one], SETTINGS, [1, 2], method=method)
    with pytest.raises(InputError, match="expected 2 seeds, one per client, got 1"):
        train_many(model, start, [one, one], SETTINGS, [1], method=method)
    with pytest.raises(InputError, match="expected one start or 2, one per client, got 3"):
        train_many(model, [start] * 3, [one, one], SETTINGS, [1, 2], method=method)
    frozen = mlp().requires_grad_(False)
    with pytest.raises(InputError, match="the model has no parameter to train"):
        train_many(frozen, start, [one, one], SETTINGS, [1, 2], method=method)


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
