"""Networks and modules of users; models, updates and test sets for coalitions of three members."""

import sys

import numpy as np
import torch
from torch import nn

from fedmerit.simulation.analysis import Game
from fedmerit.simulation.models import ResNet, build, to_vector
from fedmerit.simulation.utilities import UTILITIES

ALL = list(UTILITIES)
WEIGHTS = [1.0, 2.0, 5.0]


def module_of(name, text, folder, monkeypatch):
    """A module of a user's own in the working directory, for as long as a fixture lives."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    yield name
    sys.modules.pop(name, None)


def network(name, channels):
    """A small network that fedmerit has; ResNets of so many channels. None for other names."""
    if name in ("mlp", "cnn", "cnn-pool"):
        return build(name, (6, 6, 1), 3)
    if name.startswith("resnet-"):
        return ResNet((1, 1, 1, 1), channels, 3, width=4, norm=name.removeprefix("resnet-"))
    return None


def client_data(sizes, side=6, seed=0):
    """Grey images and labels of three classes, for clients with so many samples."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, 256, (n, side, side, 1), dtype=np.uint8), rng.integers(0, 3, n).astype(np.int64))
        for n in sizes
    ]


def close(a, b):
    """Trained vectors are equal but for steps of rounding errors, which Adam makes where a gradient is 0."""
    assert np.isclose(a, b, rtol=1e-3, atol=1e-4).mean() > 0.97
    assert np.abs(a - b).max() < 0.01


class Attention(nn.Module):
    """A user's model with dropout, attention and tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 2, stride=2)
        self.attend = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.mix = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        tokens = self.attend(self.embed(x).flatten(2).transpose(1, 2))
        return self.head(self.drop(self.again(torch.relu(self.mix(tokens.mean(1))))))


def model_named(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = network(name, 2) or Attention()
        if name == "resnet-batch":  # running statistics worth carrying
            made.train()(torch.randn(8, 2, 20, 20))
    return made


def pool(m=12, shape=(6, 6, 1), seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (m, *shape), dtype=np.uint8), np.arange(m) % 3


def updates_for(model, scale=0.05, seed=1):
    """The first model, three local models, and their weighted updates."""
    m0 = to_vector(model)
    rng, weights = np.random.default_rng(seed), np.array(WEIGHTS)
    local = m0 + scale * np.abs(m0).mean() * rng.standard_normal((3, len(m0))).astype(np.float32)
    return m0, local, (weights[:, None] / weights.sum() * (local - m0)).astype(np.float32)


def game_of(m0, updates, weights=WEIGHTS, *, kind="additive", names="ABCDEFG", device="cpu"):
    vectors = [torch.as_tensor(values).to(device) for values in (m0, updates)]
    return Game(*vectors, weights, kind, tuple(names[: len(updates)]))
