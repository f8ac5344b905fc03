"""The retraining game: stacked equals one coalition after another, and finished work is kept."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from fedmerit.errors import InputError, ReportError
from fedmerit.simulation.coalitions import retrain_tables
from fedmerit.simulation.models import ResNet, build, load_vector, to_vector
from fedmerit.simulation.training import TrainingSettings, train
from fedmerit.simulation.utilities import evaluate

DEVICE = os.environ.get("FEDMERIT_TEST_DEVICE", "cpu")
SETTINGS = TrainingSettings(local_epochs=1, batch_size=4)
SEEDS = [[10, 11, 12], [20, 21, 22]]
WEIGHTS = [5.0, 8.0, 6.0]
UTILITIES = ["expected-accuracy", "accuracy"]


def images(n, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 6, 6, 2), dtype=np.uint8), np.arange(n) % 3


DATA = [images(5, 1), images(8, 2), images(6, 3)]
X, Y = images(9, 4)


def run(model=None, **settings):
    model = (model or build("cnn", (6, 6, 2), 3)).to(DEVICE)
    given = {"weights": WEIGHTS, "data": DATA, "seeds": SEEDS, "m0": to_vector(model)} | settings
    return retrain_tables(model, settings=SETTINGS, x=X, y=Y, utilities=UTILITIES, **given)


def federation(model, mask):
    """A coalition's own two rounds, from the definition."""
    m0 = to_vector(model)
    vector, inside = m0, [i for i in range(3) if mask >> i & 1]
    for seeds in SEEDS:
        local = []
        for i in inside:
            load_vector(model, vector)
            train(model, *DATA[i], SETTINGS, seeds[i])
            local.append(WEIGHTS[i] * to_vector(model))
        if inside:
            vector = sum(local) / sum(WEIGHTS[i] for i in inside)
    load_vector(model, vector)
    values = evaluate(model, X, Y, UTILITIES)
    load_vector(model, m0)
    return {name: value.mean() for name, value in values.items()}


def test_every_coalition_is_its_own_federation():
    model = build("cnn", (6, 6, 2), 3).to(DEVICE)
    expected = [federation(model, mask)["expected-accuracy"] for mask in range(8)]
    assert len(set(expected)) == 8
    own = ("loop", 1) if DEVICE == "cpu" else ("stacked", 4)
    for stacked, method, size in ((False, "loop", 1), (True, "stacked", 4), (None, *own)):
        tables, record = run(stacked=stacked, stack=4, clients=["A", "B", "C"])
        np.testing.assert_allclose(
            tables["expected-accuracy"].values, expected, atol=2e-5 if DEVICE == "cpu" else 2e-4
        )
        assert (record.method, record.stack, record.trained, record.known) == (method, size, 7, 0)
        assert tables["accuracy"].clients == ("A", "B", "C")


def test_batch_norm_trains_one_coalition_after_another_with_its_statistics():
    torch.manual_seed(0)  # training amplifies last bits, more from some first models than from others
    model = ResNet((1, 1, 1, 1), 2, 3, width=4, norm="batch").to(DEVICE)
    start = to_vector(model)
    expected = federation(model, 5)["expected-accuracy"]
    tables, record = run(model, m0=start)
    assert tables["expected-accuracy"].values[5] == pytest.approx(
        expected, abs=1e-5 if DEVICE == "cpu" else 1e-3
    )
    assert record.method == "loop"
    with pytest.raises(InputError, match="the model has BatchNorm"):
        run(ResNet((1, 1, 1, 1), 2, 3, width=4, norm="batch"), stacked=True)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_killed_run_goes_on_where_it_was(stacked):
    whole, _ = run(stacked=stacked, stack=2)
    kept = {}

    def store(mask, values):
        if len(kept) == 4:
            raise KeyboardInterrupt
        kept[mask] = values

    with pytest.raises(KeyboardInterrupt):
        run(stacked=stacked, stack=2, store=store)
    told = []
    resumed, record = run(
        stacked=stacked, stack=2, known=kept, progress=lambda done, total: told.append((done, total))
    )
    assert (record.known, record.trained) == (4, 4)
    np.testing.assert_allclose(resumed["accuracy"].values, whole["accuracy"].values)
    np.testing.assert_allclose(
        resumed["expected-accuracy"].values, whole["expected-accuracy"].values, atol=1e-5
    )
    assert told[-1][0] == told[-1][1] == 2 * (1 + 2 + 2 + 3)  # two rounds of {C}, {A, C}, {B, C}, all
    finished, record = run(stacked=stacked, known=dict.fromkeys(range(8), dict.fromkeys(UTILITIES, 0.5)))
    assert record.trained == 0
    assert finished["accuracy"].values.tolist() == [0.5] * 8


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weights": [1.0, 2.0]}, InputError, "expected 3 weights, names and seeds a round, one per client"),
        ({"seeds": []}, InputError, "at least 1 round"),
        ({"seeds": [[1, 2]]}, InputError, "expected 3 weights, names and seeds a round"),
        ({"memory_limit": 10**6}, InputError, "retraining needs .* MB, 1 MB may be used"),
        ({"m0": np.full(38611, np.nan)}, InputError, "M0 "),
    ],
)
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        run(**change)


def test_a_coalition_that_diverges_is_named():
    bad = [(x.astype(np.float32), y) for x, y in DATA]
    bad[1] = (np.full_like(bad[1][0], np.inf), bad[1][1])
    with pytest.raises(ReportError, match=r"the model of coalition \{B\} diverged in retraining"):
        run(data=bad, clients=["A", "B", "C"])


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    run()
    assert torch.equal(torch.get_rng_state(), before)
