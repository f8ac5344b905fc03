"""Four members in this process with a model of a few numbers: quick, and free in how they train."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from federation_in import NODES, node_config, server
from fedmerit.carriers.host import SETTINGS
from inprocess import InProcess


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


def members(home, train=None, run_config=None, nodes=NODES, **options):
    """A grid of all members; ``train(name, message)`` gives a reply, by default one with a little noise.

    Options are arguments of `secure`.
    """
    rng, apps, configs = np.random.default_rng(0), {}, {}

    def noisy(name, message):
        return reply(message, rng.normal() / 100, **{"num-examples": 10})

    for name, node in nodes.items():
        apps[node] = fedmerit.flower.secure(ClientApp(), **{"value": value, **options})

        @apps[node].train()
        def train_locally(message, context, name=name):
            return (train or noisy)(name, message)

        configs[node] = node_config(home, name)
    return InProcess(apps, configs, run_config)


def contributions(home, strategy=None, **options):
    """A wrapped FedAvg; options are settings by their names, or arguments of `Contributions`."""
    ours = {key for keys in SETTINGS.values() for key in keys} & {*options}
    settings = {"weights": "uniform", "method": "reports"} | {key: options.pop(key) for key in ours}
    usual = {
        "roster": home / "roster.toml",
        "test": (np.zeros((20, 1)), np.zeros(20)),
        "value": value,
        "config": server.sections(**settings),
        "folder": home / "run",
        "page": False,
        "join": 0.5,
    }
    return fedmerit.flower.Contributions(
        strategy or FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2),
        **{**usual, **options},
    )


def start(strategy, grid, rounds, **options):
    """Run it from the first model."""
    return strategy.start(grid=grid, initial_arrays=first(), num_rounds=rounds, **options)
