"""Coalition models and their utilities, against the definition of the game over local models."""

from __future__ import annotations

import numpy as np
import pytest

from fedmerit.errors import ReportError
from fedmerit.simulation.analysis import Evaluator
from fedmerit.simulation.models import build, load_vector, to_vector
from fedmerit.simulation.utilities import evaluate
from networks import ALL, WEIGHTS, game_of, model_named, module_of, pool, updates_for


def by_hand(model, m0, local, kind, x, y):
    """One coalition after another, from the definition of the game over the local models."""
    w, rows = np.asarray(WEIGHTS), []
    for mask in range(8):
        inside = [i for i in range(3) if mask >> i & 1]
        total = w.sum() if kind == "additive" else w[inside].sum()
        vector = m0 + sum((w[i] / total * (local[i] - m0) for i in inside), np.zeros_like(m0))
        load_vector(model, vector.astype(np.float32))
        rows.append([values.mean() for values in evaluate(model, x, y, ALL).values()])
    load_vector(model, m0)
    return np.array(rows)


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-pool", "resnet-group", "resnet-batch", "attention"])
@pytest.mark.parametrize("kind", ["additive", "renormalised"])
def test_every_coalition_has_the_model_of_its_definition(name, kind):
    model = model_named(name)
    x, y = pool(150, (20, 20, 2) if "resnet" in name else (6, 6, 1))  # two batches
    m0, local, updates = updates_for(model)
    expected, told = by_hand(model, m0, local, kind, x, y), []
    assert len(np.unique(expected[:, 0])) == 8  # every coalition is another model
    evaluator = Evaluator(model, x, y, ALL)
    tables = evaluator.tables(game_of(m0, updates, kind=kind), lambda *steps: told.append(steps))
    for i, utility in enumerate(ALL):
        np.testing.assert_allclose(tables[utility].values, expected[:, i], rtol=1e-4, atol=2e-6)
        assert tables[utility].clients == ("A", "B", "C")
    assert np.array_equal(to_vector(model), m0)
    assert told == [(8, 8)]


OWN = """
def sure(model, images, labels):
    return model(images).softmax(1).amax(1)
def percent(model, images, labels):
    return 100 * model(images).softmax(1).amax(1)
def infinite(model, images, labels):
    return model(images).softmax(1).amax(1) / 0
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    yield from module_of("my_coalition_utility", OWN, tmp_path, monkeypatch)


def test_a_users_utility_sees_every_coalition(own):
    model, names = model_named("cnn"), ["accuracy", f"{own}:sure", "auc"]
    (x, y), (m0, _, updates) = pool(), updates_for(model)
    values = Evaluator(model, x, y, names).values(game_of(m0, updates), np.arange(8))
    load_vector(model, m0 + updates[0] + updates[2])
    found = evaluate(model, x, y, names)
    assert values[5].tolist() == pytest.approx([found[name].mean() for name in names], rel=1e-5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("percent", r"of sample 0 must lie in \[0, 1\], got \d"),
        ("infinite", r"coalition \{\}: .* of sample 0 is inf, expected a number"),
    ],
)
def test_a_users_utility_is_held_to_what_it_promises(own, function, message):
    model = build("mlp", (6, 6, 1), 3)
    (x, y), (m0, _, updates) = pool(), updates_for(model)
    evaluator = Evaluator(model, x, y, ["accuracy", f"{own}:{function}"])
    with pytest.raises(ReportError, match=message):
        evaluator.values(game_of(m0, updates), np.arange(8))


def test_a_coalition_that_diverges_is_named():
    model = build("mlp", (6, 6, 1), 3)
    m0, _, updates = updates_for(model)
    updates[1:] = 3e38 / 2  # finite alone, not together
    with pytest.raises(ReportError, match=r"coalition \{B\}: .* not finite"):
        Evaluator(model, *pool(), ["accuracy"]).values(game_of(m0, updates), np.arange(8))
