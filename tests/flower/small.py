"""Four members in this process with a model of a few numbers: quick, and free in how they train."""

from __future__ import annotations

import numpy as np
from federation_in import NODES
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from inprocess import InProcess

import fedmerit.flower


def value(arrays, test):
    return np.full(len(test.y), 0.5)


def first():
    """The first model: two arrays."""
    arrays = {"layer.weight": np.ones(5), "norm.running_var": np.ones(3)}
    return ArrayRecord({name: Array(array.astype(np.float32)) for name, array in arrays.items()})


def reply(message, change=0.01, **metrics):
    """What a member's training returns: every array changed by a number of its own, or by one for all."""
    arrays = {}
    for name, array in message.content["arrays"].items():
        by = change.get(name, 0.01) if isinstance(change, dict) else change
        arrays[name] = Array((array.numpy() + by).astype(np.float32))
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


def members(home, train=None, run_config=None, **options):
    """A grid of all members; ``train(name, message)`` gives a reply, by default one with a little noise."""
    rng, apps, configs = np.random.default_rng(0), {}, {}

    def noisy(name, message):
        return reply(message, rng.normal() / 100, **{"num-examples": 10})

    for name, node in NODES.items():
        apps[node] = fedmerit.flower.secure(ClientApp(), value=value, **options)

        @apps[node].train()
        def train_locally(message, context, name=name):
            return (train or noisy)(name, message)

        configs[node] = {
            "fedmerit-key": str(home / f"{name}.pem"),
            "fedmerit-roster": str(home / "roster.toml"),
        }
    return InProcess(apps, configs, run_config)


def contributions(home, strategy=None, **options):
    """A wrapped FedAvg."""
    settings = {"folder": home / "run", "weights": "uniform", "page": False, "join": 0.5}
    settings |= {"method": "reports"} | options
    return fedmerit.flower.Contributions(
        strategy or FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2),
        roster=home / "roster.toml",
        test=(np.zeros((20, 1)), np.zeros(20)),
        value=value,
        **settings,
    )


def start(strategy, grid, rounds, **options):
    """Run it from the first model."""
    return strategy.start(grid=grid, initial_arrays=first(), num_rounds=rounds, **options)
