"""What the hospitals do, with or without a federation: their data, their network, training and measuring it.

torch is imported where it is needed: Flower starts a process for every message, and most need no network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import fedmerit.data
from fedmerit.flower import torch_scoring

if TYPE_CHECKING:
    from flwr.app import ArrayRecord
    from torch import Tensor, nn

HOSPITALS = ("Abbey", "Bridge", "Castle", "Dale", "Harbour")
NOISY = {"Harbour": 0.8}  # this share of its labels is random


HELD_OUT = 5  # every so many-th sample of a hospital is kept out of training


def local_data(hospital: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels on which one hospital trains."""
    images, labels = all_data(hospital)
    trains = np.arange(len(labels)) % HELD_OUT > 0
    return images[trains], labels[trains]


def own_data(hospital: str) -> tuple[np.ndarray, np.ndarray]:
    """Those on which it does not train, by which it judges the others in a panel."""
    images, labels = all_data(hospital)
    return images[::HELD_OUT], labels[::HELD_OUT]


def all_data(hospital: str) -> tuple[np.ndarray, np.ndarray]:
    """A fifth of fashion-mini."""
    dataset = fedmerit.data.load("fashion-mini")
    parts = fedmerit.data.split(dataset.y_train, len(HOSPITALS), "iid", rng=np.random.default_rng(0))
    mine = parts[HOSPITALS.index(hospital)]
    labels = dataset.y_train[mine]
    if hospital in NOISY:
        labels = fedmerit.data.label_noise(labels, NOISY[hospital], 10, np.random.default_rng(1))
    return dataset.x_train[mine], labels


def test_data() -> tuple[np.ndarray, np.ndarray]:
    """What everybody is measured on."""
    dataset = fedmerit.data.load("fashion-mini")
    return dataset.x_test, dataset.y_test


def network(arrays: ArrayRecord | None = None) -> nn.Module:
    """A small convolutional network with these weights, or fresh ones."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )
    if arrays is not None:
        net.load_state_dict(arrays.to_torch_state_dict())
    return net


def train(net: nn.Module, images: np.ndarray, labels: np.ndarray, epochs: int, lr: float, seed: int) -> float:
    """Train in place; the mean loss of the last epoch."""
    import torch

    x, y = _tensor(images), torch.from_numpy(labels)
    generator = torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam(net.parameters(), lr=lr)
    net.train()
    for _ in range(epochs):
        losses = []
        for batch in torch.randperm(len(y), generator=generator).split(32):
            loss = torch.nn.functional.cross_entropy(net(x[batch]), y[batch])
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(loss.item())
    return float(np.mean(losses))


# What is paid for: the probability that the network gives to the right answer. The functions import torch
# only when they are called.
value, gradient = torch_scoring(network, "expected-accuracy")


def _tensor(images: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
