"""Metrics of the whole test set between machines: one number per model, with errors by a jackknife."""

from __future__ import annotations

import numpy as np
import pytest
from federation_in import NAMES, grid_of, make_keys, rounds_in
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from fedmerit.errors import ConfigError, ReportError
from fedmerit.scoring.metrics import auc

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 3))
Y = (X @ [1.0, -1.0, 0.3] + RNG.normal(0, 0.5, 120) > 0).astype(np.int64)


def value(arrays, test):
    """AUC of a linear model, and its probability of the right answer."""
    z = test.x @ arrays["w"].numpy()
    p = 1 / (1 + np.exp(-z))
    return {"auc": auc(np.stack([0 * z, z], 1), test.y), "right": np.where(test.y == 1, p, 1 - p)}


def apps(value=value):
    made = {}
    for place, name in enumerate(NAMES):
        app = fedmerit.flower.secure(ClientApp(), value=value, seed=0)

        @app.train()
        def train(message, context, place=place):
            w = message.content["arrays"]["w"].numpy()
            moved = w + np.array([0.5, -0.5, 0.1 * place], np.float32)
            content = {
                "arrays": ArrayRecord({"w": Array(moved)}),
                "metrics": MetricRecord({"num-examples": 10}),
            }
            return Message(RecordDict(content), reply_to=message)

        made[name] = app
    return made


def run(folder, value=value, **options):
    make_keys(folder)
    strategy = fedmerit.flower.Contributions(
        FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3),
        roster=folder / "roster.toml",
        test=(X, Y),
        value=value,
        **{"utilities": ("auc", "right"), "method": "reports", **options},
        folder=folder / "run",
        weights="uniform",
        page=False,
    )
    first = ArrayRecord({"w": Array(np.array([-0.1, 0.1, 0.1], np.float32))})
    strategy.start(grid=grid_of(folder, apps(value)), initial_arrays=first, num_rounds=2)
    return rounds_in(folder / "run")


def test_members_report_a_metric_of_the_whole_set_with_errors_of_blocks(tmp_path):
    rounds = run(tmp_path)
    whole, each = (rounds[0].to_reports(name) for name in ("auc", "right"))
    assert set(whole.clients) == set(NAMES)
    assert (whole.freedom, each.freedom) == (9, 119)
    assert whole.grand > 0.9 > whole.empty
    assert 0 < whole.se_alpha.max() < 0.2


def test_one_number_for_what_is_no_such_metric_is_refused_before_anybody_trains(tmp_path):
    def scalar(arrays, test):
        return {"auc": 0.5, "right": 0.5}

    with pytest.raises(ReportError, match="'right': expected one number for each of 120 test samples"):
        run(tmp_path, scalar)


def test_the_terms_say_which_of_a_users_own_are_such_metrics(tmp_path):
    def own(arrays, test):
        return float(np.median(value(arrays, test)["right"]))

    rounds = run(tmp_path, own, utilities=("median",), whole=("median",))
    assert rounds[-1].to_reports("median").freedom == 9


def test_such_a_metric_cannot_be_settled(tmp_path):
    with pytest.raises(ConfigError, match="'auc' has none: it is a metric of the whole test set"):
        run(tmp_path, gradient=lambda arrays, test: (0.5, [np.zeros(3)]), method="settled")


def test_torch_scoring_measures_real_numbers_and_metrics(tmp_path):
    torch = pytest.importorskip("torch")

    def network():
        return torch.nn.Linear(3, 1)

    class Some:
        x, y = X.astype(np.float32), Y

    arrays = ArrayRecord(network().state_dict())
    found = fedmerit.flower.torch_scoring(network, ["auc", "accuracy"]).value(arrays, Some)
    assert isinstance(found["auc"], float)
    assert found["accuracy"].shape == (120,)
    Some.y = X[:, 0].astype(np.float32)
    skill = fedmerit.flower.torch_scoring(network, "rmse-skill", scale=10.0)
    level, slope = skill.gradient(arrays, Some)
    assert level == pytest.approx(skill.value(arrays, Some).mean(), abs=1e-6)
    assert slope["weight"].shape == (1, 3)
