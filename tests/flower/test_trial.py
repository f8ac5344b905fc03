"""What a trial on one machine finds before anybody trains."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

import fedmerit.flower
from fedmerit.errors import ConfigError
from small import first, reply, value


def tried(train, arrays=None, **options):
    app = fedmerit.flower.secure(ClientApp(), value=value)
    app.train()(train)
    return fedmerit.flower.check(app, arrays or first(), **options)


def seeded(message, context, scale=0.01, **metrics):
    """An update of its own in every round of every run."""
    number = message.content["config"]["server-round"]
    change = scale * (1 + np.random.default_rng([context.run_id, number]).random())
    return reply(message, change, **{"num-examples": 50, **metrics})


def test_an_app_that_works_gets_settings_that_fit():
    trial = tried(seeded)
    assert (trial.found, trial.told) == ({}, {})
    assert trial.settings == {"secure_aggregation": {"bound": 2**-4}, "training": {"weight_cap": 100}}
    again = tried(seeded, config=trial.settings)
    assert (again.found, again.settings) == ({}, trial.settings)


CASES = {
    "arrays": lambda message, context: drop(seeded(message, context)),
    "training": lambda message, context: 1 / 0,
    "bound": lambda message, context: seeded(message, context, scale=100.0),
    "weight": lambda message, context: seeded(message, context, **{"num-examples": 0.5}),
    "repeats": lambda message, context: reply(message, 0.01, **{"num-examples": 50}),
    "rounding": lambda message, context: reply(
        message,
        {
            "layer.weight": 1000.0 + message.content["config"]["server-round"] + context.run_id,
            "norm.running_var": 1e-6,
        },
        **{"num-examples": 50},
    ),
}


def drop(given):
    record = next(iter(given.content.array_records.values()))
    del record["norm.running_var"]
    return given


@pytest.mark.parametrize("code", CASES)
def test_what_a_run_would_stumble_over_is_found(code):
    trial = tried(CASES[code])
    assert code in trial.found
    assert {*trial.found} <= {code, "bound"}
    assert trial.found[code] in str(trial)


def test_a_model_that_cannot_be_summed_is_found():
    half = ArrayRecord({"a": Array(np.ones(3, np.float16))})
    assert {*tried(seeded, half).found} == {"arrays"}


def test_what_is_summed_otherwise_or_not_at_all_is_told():
    def train(message, context):
        wide = 0.1 * context.run_id + message.content["config"]["server-round"]
        return reply(message, {"fixed": 0.0, "wide": wide}, **{"num-examples": 3})

    arrays = {"wide": np.ones(3), "fixed": np.ones(2, np.float32), "counter": np.array([3])}
    trial = tried(train, ArrayRecord({name: Array(array) for name, array in arrays.items()}))
    assert not trial.found
    assert {*trial.told} == {"dtype", "counters", "unchanged"}
    assert "'fixed'" in trial.told["unchanged"]


def test_an_app_that_is_not_secured_is_refused():
    with pytest.raises(ConfigError, match="secure returned"):
        fedmerit.flower.check(ClientApp(), first())
