"""Data, model, training and utilities, all from the engine's own config."""

from __future__ import annotations

from functools import lru_cache

UTILITIES = ("expected-accuracy", "accuracy", "brier")
TINY = {
    "data": {"test_size": 50},
    "partition": {"clients": 4, "scheme": "sizes", "sizes": [60, 50, 70, 40]},
    "model": {"name": "contract.task:network"},
    "training": {"rounds": 2, "local_epochs": 1, "batch_size": 16},
    "scoring": {"method": "reports"},
}


def network(shape, classes):
    """Means of 16 pixels, and one layer."""
    from torch import nn

    height, width, channels = shape
    inputs = (height // 4) * (width // 4) * channels
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(inputs, classes))


def config(weights="uniform"):
    """The settings of the same run in one process."""
    from fedmerit.config import from_dict

    return from_dict({**TINY, "training": {**TINY["training"], "weights": weights}})


@lru_cache
def federation():
    """Everything but the keys; every process builds the same."""
    import torch

    from fedmerit.simulation.setup import prepare

    torch.set_num_threads(1)
    return prepare(config(), pool_key=bytes(32))


def first_model():
    """The model of before round 1 as a state dict."""
    from fedmerit.simulation.models import load_vector

    load_vector(federation().network, federation().first)
    return federation().network.state_dict()


def train(state, name, number):
    """One member's local training; the new state dict and the number of samples."""
    from fedmerit.simulation.setup import seed_for
    from fedmerit.simulation.training import train as train_here

    network = federation().network
    network.load_state_dict(state)
    client = next(client for client in federation().clients if client.name == name)
    settings = federation().training
    train_here(network, client.x, client.y, settings, seed_for(federation().config, "train", number, name))
    return network.state_dict(), len(client.y)


def own(name):
    """One member's samples."""
    client = next(client for client in federation().clients if client.name == name)
    return client.x, client.y


def value(arrays, test):
    """All utilities of all samples."""
    from fedmerit.simulation.utilities import evaluate

    network = federation().network
    network.load_state_dict(arrays.to_torch_state_dict())
    return evaluate(network, test.x, test.y, UTILITIES)


def gradient(arrays, test):
    """The paid utility and its gradient."""
    from fedmerit.flower import torch_scoring

    return torch_scoring(lambda: federation().network, UTILITIES).gradient(arrays, test)
