"""Models that train side by side equal those that train one after another, up to rounding."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from quick_coalitions import retrained
from side_by_side import Stack, StackedTraining, train_many
from torch import nn

from fedmerit.errors import DataError, InputError
from fedmerit.simulation.analysis import Truth
from fedmerit.simulation.models import build, load_vector, to_vector
from fedmerit.simulation.setup import prepare
from fedmerit.simulation.training import TrainingSettings, loss_of, train
from networks import Branching, close, network
from networks import client_data as data
from tiny import tiny

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


class Waiting(Branching):
    """A user's model that waits for the device, which no CUDA graph can record."""

    def forward(self, x):
        if x.is_cuda:
            torch.cuda.synchronize()
        return self.layer(x.flatten(1))


OWN = {
    "attention": Attention, "branching": Branching, "mixing": Mixing, "counting": Counting, "waiting": Waiting
}  # fmt: skip


def model_named(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return (network(name, 1) or OWN[name]()).to(DEVICE)


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-pool", "resnet-group", "attention", "waiting"])
def test_stacked_equals_one_after_another(name):
    sizes = [9, 3, 16, 1, 8]  # short last batches, fewer samples than a batch, a single one
    model = model_named(name)
    start = to_vector(model)
    loop = train_many(model, start, data(sizes), SETTINGS, range(5), method="loop")
    stacked = train_many(model, start, data(sizes), SETTINGS, range(5), method="stacked")
    assert (loop.method, stacked.method) == ("loop", "stacked")
    if name == "waiting" and DEVICE != "cpu":
        assert "cannot be recorded as a CUDA graph" in stacked.note
    else:
        assert stacked.note is None
    for a, b in zip(loop.vectors, stacked.vectors, strict=True):
        assert not np.array_equal(a, start)
        close(a, b)


def test_each_client_may_start_elsewhere_and_frozen_parameters_stay():
    model = build("mlp", (6, 6, 1), 3).to(DEVICE)
    model[1].weight.requires_grad_(False)
    starts = [to_vector(build("mlp", (6, 6, 1), 3, seed=s)) for s in range(3)]
    both = [
        train_many(model, starts, data([5, 6, 7]), SETTINGS, [1, 2, 3], method=method).vectors
        for method in ("loop", "stacked")
    ]
    for start, a, b in zip(starts, *both, strict=True):
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
        trained = stack.train(starts[:few], [i] * few, [seed] * few)
        for start, vector in zip(starts[:few], trained, strict=True):
            load_vector(model, start)
            train(model, *clients[i], SETTINGS, seed=seed)
            close(to_vector(model), vector.cpu().numpy())
    assert bool(stack.graphs) == (DEVICE != "cpu")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet-batch", "has BatchNorm, which normalises by the batch"),
        ("branching", "cannot be stacked: "),
        ("mixing", "lets the samples of a batch influence each other"),
        ("counting", "changes its buffer 'seen' while training"),
    ],
)
def test_a_model_that_cannot_be_stacked_says_so_and_trains_one_by_one(name, reason):
    model = model_named(name)
    start = to_vector(model)
    with pytest.raises(InputError, match=f"the model {reason}"):
        train_many(model, start, data([6, 5]), SETTINGS, [1, 2], method="stacked")
    after = train_many(model, start, data([6, 5]), SETTINGS, [1, 2])
    fresh = train_many(model_named(name), start, data([6, 5]), SETTINGS, [1, 2])
    assert np.array_equal(after.vectors, fresh.vectors)  # the attempt has not harmed the model
    assert after.method == "loop"
    assert (after.note is None) == (DEVICE == "cpu")


def test_what_a_stack_cannot_train_is_refused():
    model = model_named("mlp")
    start, ((x, y), one) = to_vector(model), data([4, 4])
    with pytest.raises(DataError):
        train_many(model, start, [one, (x, y * 0 + 7)], SETTINGS, [1, 2], method="stacked")
    squares = replace(SETTINGS, loss=loss_of("mse"))
    with pytest.raises(InputError, match="trains on the loss 'mse'"):
        train_many(model, start, [one, one], squares, [1, 2], method="stacked")
    with pytest.raises(InputError, match="has no parameter to train"):
        train_many(model.requires_grad_(False), start, [one, one], SETTINGS, [1, 2], method="stacked")


def test_members_of_a_rehearsal_and_their_solo_models_train_side_by_side():
    federation = prepare(tiny("scoring.solo=true"))
    found = []
    for stacked in (False, True):
        local = StackedTraining(federation, stacked=stacked)
        local.solo = dict.fromkeys(federation.names, federation.first)
        models = local.train(1, federation.names, federation.first, federation.first, lambda *_: None)
        found.append([*models.values(), *local.solo.values()])
    for a, b in zip(*found, strict=True):
        close(a, b)


@pytest.mark.parametrize("size", [2, 64])
def test_coalitions_retrain_in_stacks_as_one_after_another(tmp_path, size):
    federation = prepare(tiny("scoring.truth=['shapley']"))
    truth, masks, told = Truth(federation, tmp_path / "tables"), [0, 3, 7, 15], []
    slow = dict(truth.retrained(masks, lambda *_: None))
    seeds = [[federation.seed("train", number, name) for name in federation.names] for number in (1, 2)]
    sets = [(client.x, client.y) for client in federation.clients]
    quick = dict(
        retrained(
            federation.network, slow[0], sets, federation.training, seeds, truth.shares, masks,
            method="stacked", stack=size, progress=lambda done, total: told.append((done, total)),
        )
    )  # fmt: skip
    assert list(quick) == masks
    assert told[-1] == (18, 18)
    for mask in masks:
        close(slow[mask].numpy(), quick[mask].numpy())
