"""Own data, model, loss and metric: what is measured, and what every mistake is told."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedmerit as fm
from fedmerit.config import from_dict
from fedmerit.data import load
from fedmerit.data.dataset import Dataset
from fedmerit.data.partitions import by_group, members
from fedmerit.errors import ConfigError, DataError, FedmeritError, MissingExtra, ReportError
from fedmerit.protocol.direction import deal
from fedmerit.protocol.pool import Slice, slice_id
from fedmerit.scoring.doubts import doubts
from fedmerit.scoring.metrics import auc, c_index, f1, jackknife
from fedmerit.simulation.direction import direction
from fedmerit.simulation.losses import loss_of
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.simulation.setup import prepare, read
from fedmerit.simulation.setup import resolve as resolve_members
from fedmerit.simulation.training import TrainingSettings, train_many
from fedmerit.simulation.utilities import checked, evaluate, resolve
from fedmerit.storage.run_folder import Folder
from networks import module_of

OWN = """
import numpy as np
import torch
from torch import nn

def rows(kind="numbers", n=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5, 0.0]) + rng.normal(0, 0.3, n)
    if kind == "classes":
        y = (y > 0).astype(int)
    half = n // 2
    site = np.array(["North", "South", "West"])[np.arange(half) % 3]
    return dict(x_train=x[:half], y_train=y[:half], x_test=x[half:], y_test=y[half:], group_train=site)

def sentences(n=60):
    rng = np.random.default_rng(1)
    x = rng.integers(0, 20, (n, 7))
    y = (x < 5).any(1).astype(int)
    return {"x_train": x[:30], "y_train": y[:30], "x_test": x[30:], "y_test": y[30:]}

def reads(shape, outputs):
    return nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(8 * shape[0], outputs))

def survival(n=60):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(n, 3))
    y = np.stack([np.exp(-x[:, 0] + rng.normal(0, 0.2, n)), rng.random(n) < 0.7], 1)
    return {"x_train": x[:30], "y_train": y[:30], "x_test": x[30:], "y_test": y[30:]}

def one(shape, outputs):
    return nn.Linear(shape[0], 1)

def cox(outputs, y):
    order = torch.argsort(y[:, 0], descending=True)
    risk = outputs[:, 0][order]
    return -((risk - torch.logcumsumexp(risk, 0)) * y[order, 1]).sum() / len(y)

def three(shape, outputs):
    return nn.Linear(shape[0], 3)

def no_number(outputs, y):
    return "small"

def fails(outputs, y):
    raise RuntimeError("no such organ")

def median_error(model, x, y):
    return 1 / (1 + (model(x)[:, 0] - y).abs().median())

def no_metric(model, x, y):
    return float("nan")

def broken_metric(model, x, y):
    raise RuntimeError("no such organ")

def too_large(model, x, y):
    return 2.0

def nothing():
    return 3

def misnamed():
    return {**rows(), "labels": 3}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    yield from module_of("my_own", OWN, tmp_path, monkeypatch)


def settings(**sections):
    plain = {
        "data": {"name": "my_own:rows", "test_size": 0},
        "partition": {"scheme": "group"},
        "model": {"name": "mlp"},
        "training": {"rounds": 2, "local_epochs": 2, "batch_size": 8, "loss": "mse"},
        "scoring": {"utilities": ["rmse-skill"], "scale": 10.0, "method": "reports"},
        "secure_aggregation": {"enabled": False},
    }
    return {name: {**plain.get(name, {}), **sections.get(name, {})} for name in {**plain, **sections}}


def refused(message, error=ConfigError, **sections):
    with pytest.raises(error, match=message):
        prepare(from_dict(settings(**sections)))


# --- metrics of the whole test set


def test_auc_f1_and_c_index_by_hand():
    logits = np.array([[0, 3.0], [0, 1.0], [0, 2.0], [0, -1.0]])
    # positives 3 and 2, negatives 1 and -1: every pair in order; then one of the four pairs is not
    assert auc(logits, np.array([1, 0, 1, 0])) == 1
    assert auc(logits, np.array([1, 1, 0, 0])) == 0.75
    three = np.eye(3)[[0, 1, 2, 0]] * 5
    assert auc(three, np.array([0, 1, 2, 0])) == 1
    assert f1(three, np.array([0, 1, 2, 1])) == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    risk, y = np.array([1.0, 2.0, 3.0]), np.array([[1, 1], [2, 1], [3, 0]])
    assert c_index(risk, y) == 0  # who had the event first had the least risk
    assert c_index(-risk, y) == 1


def test_auc_counts_probabilities_that_are_equal_on_paper_as_ties():
    """Logits 0, 1, 2 and 0, 2, 1 give class 0 the same probability, in whatever order they are added up."""
    logits, y = np.random.default_rng(13).integers(0, 4, (30, 3)).astype(float), np.arange(30) % 3
    p = np.round(np.exp(logits) / np.exp(logits).sum(1, keepdims=True), 12)
    each = [np.sign(p[y == c, c][:, None] - p[y != c, c][None, :]).mean() for c in range(3)]
    assert auc(logits, y) == pytest.approx((1 + np.mean(each)) / 2)


def test_the_jackknife_of_a_mean_is_its_standard_error_and_its_mean_is_the_metric():
    x = np.random.default_rng(0).normal(1, 1, size=20)
    one_each = [np.array([i]) for i in range(20)]
    found = jackknife("mean", lambda places: x[places].mean(), one_each, unit=False)
    assert found == pytest.approx(x)
    squares = jackknife("square", lambda places: x[places].mean() ** 2, one_each, unit=False)
    assert squares.mean() == pytest.approx(x.mean() ** 2, abs=1e-12)
    # by the delta method, the error of mean^2 is |2 mean| that of the mean, up to 1/n
    assert squares.std(ddof=1) == pytest.approx(abs(2 * x.mean()) * x.std(ddof=1), rel=0.2)


def test_jackknife_errors_of_auc_are_those_of_fresh_test_sets():
    rng = np.random.default_rng(0)
    values, errors = [], []
    for _ in range(200):
        y = np.arange(200) % 2
        score = np.stack([np.zeros(200), rng.normal(y * 1.0, 1)], 1)
        found = jackknife("auc", lambda p, s=score, y=y: auc(s[p], y[p]), deal(y, 10)[0])
        values.append(found.mean())
        errors.append(found.std(ddof=1) / math.sqrt(10))
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values), rel=0.2)


def test_jackknife_errors_of_f1_hold_where_the_mix_of_classes_is_due_to_chance():
    rng, net = np.random.default_rng(1), nn.Identity()
    values, errors = [], []
    for _ in range(300):
        y = (rng.random(200) < 0.2).astype(np.int64)
        x = np.stack([np.full(200, 0.5), rng.normal(y * 1.0, 1)], 1).astype(np.float32)
        found = evaluate(net, x, y, ["f1"])["f1"]
        values.append(found.mean())
        errors.append(found.std(ddof=1) / math.sqrt(10))
    # blocks dealt by class give about 0.8 times the true error
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(values), rel=0.12)
    by_class = evaluate(net, x, y, ["f1"], balanced=True)["f1"]
    blocks = deal(y, 10)[0]
    logits = x.astype(np.float64)
    assert by_class == pytest.approx(jackknife("f1", lambda p: f1(logits[p], y[p]), blocks))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda p: math.nan, "metric 'm' of the 4 test samples is nan, expected a number"),
        (lambda p: 1.5, r"must lie in \[0, 1\], got 1.5; a function with another range"),
        (lambda p: 1 / 0, "metric 'm' of the 4 test samples failed: ZeroDivisionError: division by zero"),
        (lambda p: "good", "failed: ValueError"),
        (lambda p: np.zeros(3), "failed: TypeError"),
        (lambda p: 0.5 if len(p) == 4 else math.inf, "of the 2 test samples without block 1 is inf"),
    ],
)
def test_a_metric_that_gives_no_number_is_named(metric, message):
    with pytest.raises(ReportError, match=message):
        jackknife("m", metric, [np.array([0, 1]), np.array([2, 3])])


def test_scores_and_doubts_of_reports_say_that_contributions_need_not_add_up():
    far = fm.Reports(empty=0.0, grand=0.9, alone=[0.1, 0.1, 0.1], without=[0.9, 0.9, 0.9], utility="AUC")
    total = fm.accumulate([far])
    assert [note.code for note in total.notes if hasattr(note, "code")].count("whole-sum") == 1
    [doubt] = doubts([far])
    assert (doubt.code, doubt.gross) == ("whole", False)
    assert "AUC is a metric of the whole test set" in doubt.text
    [other] = doubts([replace(far, utility="dice")])
    assert (other.code, other.gross) == ("strays", True)
    [listed] = doubts([replace(far, utility="ours")], metrics=["ours"])
    assert listed.code == "whole"


def test_auc_with_one_class_left_says_which():
    y = np.array([1, 0, 0, 0, 0, 0])
    logits = np.stack([np.zeros(6), np.arange(6.0)], 1)
    with pytest.raises(
        ReportError, match=r"without block \d: AUC needs samples of class 1 and others, got 0"
    ):
        jackknife("auc", lambda places: auc(logits[places], y[places]), deal(y, 6)[0])


# --- targets


def test_a_slice_binds_every_number_of_a_target():
    x, y = np.zeros((2, 3), np.float32), np.zeros((2, 40, 40), np.int64)
    other = y.copy()
    other[1, 20, 20] = 1  # numpy prints so large an array with dots
    assert slice_id(x, y) != slice_id(x, other)
    assert Slice(index=0, x=x, y=y, salts=b"", path=()).id == slice_id(x, y)


def test_errors_become_skill_by_the_scale_and_have_a_gradient():
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    x, y = np.array([[0.0], [1.0], [9.0]], np.float32), np.array([0.0, 3.0, 0.0], np.float32)
    square, plain = (resolve(name, scale=4.0) for name in ("rmse-skill", "mae-skill"))
    found = evaluate(model, x, y, [square, plain])
    assert found["rmse-skill"].tolist() == [1.0, 0.75, 0.0]  # errors 0, 2 and 9, which is cut at 4
    assert found["mae-skill"].tolist() == [1.0, 0.5, 0.0]
    start, end = np.array([1.0, 0.0], np.float32), np.array([1.5, 0.5], np.float32)
    way = direction(model, start, end, x, y, square, blocks=1)
    assert float(way.gradient @ torch.tensor(end - start)) == pytest.approx(way.gain, rel=1e-3)


def test_one_logit_is_that_of_two_classes():
    class Echo(nn.Module):
        def forward(self, x):
            return x

    x = np.array([[0.0], [math.log(3)]], np.float32)
    found = evaluate(Echo(), x, np.array([0, 1]), ["expected-accuracy", "accuracy"])
    assert found["expected-accuracy"] == pytest.approx([0.5, 0.75])


# --- whole runs


def test_a_regression_is_settled_and_its_errors_fall(own, tmp_path):
    raw = settings(scoring={"method": "both"}, settlement={"blocks": 4})
    run(from_dict(raw), tmp_path / "run")
    rounds = fm.read(tmp_path / "run" / "scores.json")
    assert rounds[0].clients == ("North", "South", "West")
    assert rounds[-1].grand > rounds[0].empty


def test_a_metric_of_the_whole_set_is_reported_with_errors(own, tmp_path):
    raw = settings(
        data={"options": {"kind": "classes"}},
        training={"loss": "binary", "optimiser": "sgd", "lr": 0.1, "momentum": 0.9},
        scoring={"utilities": ["auc", "expected-accuracy"], "scale": 0.0},
    )
    federation = prepare(from_dict(raw))
    assert any(getattr(note, "code", "") == "whole-metric" for note in federation.notes)
    found = federation.evaluate(federation.first, federation.pool.first)
    assert found["auc"].shape == (10,)
    run(from_dict(raw), tmp_path / "run")
    last = fm.read(tmp_path / "run" / "scores.json")[-1]
    assert last.grand > 0.5
    assert last.freedom == 9  # of 10 blocks
    assert (last.se_alpha > 0).any()


def test_a_run_goes_on_with_the_sums_of_its_pseudo_values(own, tmp_path):
    raw = settings(
        data={"options": {"kind": "classes"}}, training={"loss": "binary"}, scoring={"utilities": ["auc"]}
    )
    run(from_dict(raw), tmp_path / "whole")
    dataset = read(from_dict(raw))
    config, _ = resolve_members(from_dict(raw), dataset)
    with Folder(tmp_path / "cut", config) as folder:
        rehearsal = Rehearsal(config, folder, dataset=dataset)
        rehearsal.join()
        rehearsal.round(1)
    run(from_dict(raw), tmp_path / "cut", resume=True)
    one, other = (fm.read(tmp_path / name / "scores.json")[-1] for name in ("whole", "cut"))
    assert one.se_alpha_total.tolist() == pytest.approx(other.se_alpha_total.tolist())


def test_the_users_own_metric_is_called_for_each_block(own, tmp_path):
    name = "my_own:median_error"
    federation = prepare(from_dict(settings(scoring={"utilities": [name], "whole": [name]})))
    found = federation.evaluate(federation.first, federation.pool.first)
    assert found[name].shape == (10,)
    run(from_dict(settings(scoring={"utilities": [name], "whole": [name]})), tmp_path / "run")


def test_tokens_and_survival_times(own, tmp_path):
    text = {
        "data": {"name": "my_own:sentences"},
        "model": {"name": "my_own:reads"},
        "training": {"loss": "cross-entropy", "optimiser": "adamw"},
        "scoring": {"utilities": ["expected-accuracy"]},
        "partition": {"scheme": "iid", "clients": 3, "minimum": 5},
    }
    run(from_dict(settings(**text)), tmp_path / "text")
    late = {
        "data": {"name": "my_own:survival"},
        "model": {"name": "my_own:one"},
        "training": {"loss": "my_own:cox"},
        "scoring": {"utilities": ["c-index"]},
        "partition": {"scheme": "iid", "clients": 3},
    }
    run(from_dict(settings(**late)), tmp_path / "late")


def test_coalitions_of_such_runs_have_tables(own, tmp_path):
    raw = settings(
        data={"options": {"kind": "classes"}},
        training={"loss": "binary"},
        scoring={"utilities": ["auc", "accuracy"], "scale": 0.0, "truth": ["mr-shapley", "shapley"]},
    )
    run(from_dict(raw), tmp_path / "run")
    last = fm.read(tmp_path / "run" / "scores.json")[-1]
    with np.load(tmp_path / "run" / "tables" / "round-0002.npz") as tables:
        assert tables["table/auc"][-1] == pytest.approx(last.grand, abs=1e-6)


def test_other_losses_are_not_stacked_and_a_note_says_so():
    x, y = np.ones((4, 2), np.float32), np.ones(4, np.float32)
    once = TrainingSettings(local_epochs=1, loss=loss_of("mse"))
    model = nn.Linear(2, 1)
    start = np.zeros(3, np.float32)
    with pytest.raises(
        FedmeritError, match="trains on the loss 'mse', and a stack only on the cross-entropy"
    ):
        train_many(model, start, [(x, y)] * 2, once, [0, 1], "stacked")
    assert train_many(model, start, [(x, y)] * 2, once, [0, 1]).method == "loop"


# --- mistakes


def test_targets_that_do_not_fit_the_loss_the_deal_or_the_measure(own):
    classes, binary = {"options": {"kind": "classes"}}, {"loss": "binary"}
    refused("'cross-entropy' needs classes, .* are real numbers", training={"loss": "cross-entropy"})
    refused("training.loss: 'binary' needs two classes, or numbers in", training=binary)
    refused("training.loss: 'mse' needs real numbers", data=classes)
    refused("'accuracy' needs y of classes, .* take rmse-skill", scoring={"utilities": ["accuracy"]})
    refused("'rmse-skill' needs y of real numbers", data=classes, training=binary)
    refused("'dirichlet' deals class by class", partition={"scheme": "dirichlet", "clients": 3})
    refused("corruption.label_flip: only where y is classes", corruption={"label_flip": ["North"]})
    refused("data.test_size: expected at most the 30 test samples", data={"test_size": 31})
    refused("'cnn' takes images", model={"name": "cnn"})


def test_the_users_code_fails_before_the_first_round_with_its_reason(own):
    shape = r"must return numbers of shape \(30,\) like y, .* got \(30, 3\)"
    refused(shape, DataError, model={"name": "my_own:three"})
    refused("must return one number with a gradient, got str", DataError,
            training={"loss": "my_own:no_number"})  # fmt: skip
    refused("'my_own:fails' failed on outputs of shape .* RuntimeError: no such organ", DataError,
            training={"loss": "my_own:fails"})  # fmt: skip
    for name, why in (("no_metric", "is nan"), ("broken_metric", "no such organ"), ("too_large", "must lie")):
        full = f"my_own:{name}"
        refused(f"metric '{full}' of the 30 test samples.*{why}", ReportError,
                scoring={"utilities": [full], "whole": [full]})  # fmt: skip
    refused("expected a Dataset, or a mapping with x_train, y_train, x_test, y_test, got int", DataError,
            data={"name": "my_own:nothing"})  # fmt: skip
    refused("unknown key 'labels'", DataError, data={"name": "my_own:misnamed"})
    refused("TypeError: .* unexpected keyword argument 'colour'", DataError,
            data={"options": {"colour": 1}})  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"scoring": {"utilities": ["rmse"]}}, "'rmse' has no bound .* expected rmse-skill, with scoring.sc"),
        ({"scoring": {"utilities": ["rmse-skill"]}}, "scoring.scale: 'rmse-skill' needs it"),
        ({"scoring": {"whole": ["auc"]}}, "scoring.whole: expected names in scoring.utilities"),
        (
            {"scoring": {"utilities": ["auc"], "method": "both"}},
            "'auc' has none: it is a metric of the whole",
        ),
        ({"training": {"loss": "mae"}}, "training.loss: expected one of cross-entropy, binary, mse, or"),
        ({"training": {"momentum": 0.9}}, "training.momentum: only with training.optimiser = "),
    ],
)
def test_settings_that_mean_nothing(raw, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(raw)


def test_a_metric_without_gradient_is_reported_unless_asked_otherwise():
    assert from_dict({"scoring": {"utilities": ["auc"]}}).scoring.method == "reports"


# --- groups


def test_groups_keep_their_names_where_they_can_and_a_note_says_which_cannot():
    groups = np.array(["Abbey", "Elm / North", "Abbey", "a\\b"])
    assert list(by_group(groups)) == ["Abbey", "Elm - North", "a-b"]
    names, notes = members("group", groups=groups)
    assert names == ("Abbey", "Elm - North", "a-b")
    assert "'Elm / North' is 'Elm - North'" in notes[0]
    with pytest.raises(DataError, match="names that nobody mixes up"):
        by_group(np.array(["a/b", "A-B"]))


def test_two_groups_never_become_one_by_their_new_names():
    with pytest.raises(DataError, match="groups 'a-b', 'a/b' would be one member"):
        by_group(np.array(["a/b", "a-b"]))


def test_truth_values_and_texts_are_classes_and_whole_numbers_may_be_meant_as_real_ones(tmp_path):
    file, x = tmp_path / "d.npz", np.arange(12.0).reshape(6, 2)

    def stored(y):
        np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)
        return load("npz", file)

    found = stored(np.array([True, False] * 3))
    assert (found.classes, found.y_train.tolist()) == (("0", "1"), [1, 0] * 3)
    found = stored(np.array(["sick", "healthy"] * 3))
    assert (found.classes, found.y_train.tolist()) == (("healthy", "sick"), [1, 0] * 3)
    with pytest.raises(DataError, match="y holds 'Sick' and 'sick', which would be two classes"):
        stored(np.array(["sick", "Sick", "healthy"] * 2))
    with pytest.raises(DataError, match=r"y holds numbers as text, such as '0\.5': store them as numbers"):
        stored(np.array(["0.5", "1.5", "0.7"] * 2))
    hint = "whole numbers are classes; store y as floats if they are real numbers"
    with pytest.raises(DataError, match=rf"label -3 of sample 0 is outside 0 \.\. 5: {hint}"):
        stored(np.array([-3, 5, 4, 3, 2, 1]))
    with pytest.raises(DataError, match=f"class '0' has no training sample: {hint}"):
        stored(np.array([1, 5, 4, 3, 2, 1]))


def test_one_number_where_there_should_be_one_per_sample_leads_to_scoring_whole():
    with pytest.raises(ReportError, match=r"got shape \(1,\); scoring\.whole lists metrics of the whole"):
        checked(resolve("brier"), np.array([0.5]), 4)


# --- tables


def table(tmp_path, text, **options):
    file = tmp_path / "t.csv"
    file.write_text(text, encoding="utf-8")
    return load("table", file, **{"target": "y", "test_fraction": 0.34, **options})


ROWS = "site,age,sex,y\n" + "".join(f"{'NS'[i % 2]},{20 + i},{'fm'[i % 2]},{i // 2 % 2}\n" for i in range(12))


def test_a_table_by_explicit_choice(tmp_path):
    found = table(tmp_path, ROWS, group="site", features=["age"])
    assert found.classes == ("0", "1")
    assert found.x_train.shape == (8, 1)
    assert len(found.y_test) == 4
    assert found.y_test.tolist().count(0) == 2  # drawn from each class and member alike
    assert set(found.group_train) == {"N", "S"}
    hot = table(tmp_path, ROWS, group="site", categories="one-hot", standardise=True)
    assert hot.x_train.shape == (8, 3)
    assert hot.x_train.mean(0) == pytest.approx(0, abs=1e-6)
    numbers = table(tmp_path, ROWS, kind="numbers", features=["age"])
    assert numbers.target == "numbers"
    assert numbers.classes == ()
    comma = ROWS.replace(",", ";").replace("20;", "20,5;")
    assert (
        20.5
        in table(tmp_path, comma, features=["age"], separator=";", decimal=",", test_fraction=0.1).x_train
    )


def test_rows_may_say_which_are_for_the_test(tmp_path):
    marked = "use,x,y\n" + "".join(f"{'test' if i > 7 else 'train'},{i},{i % 2}\n" for i in range(12))
    found = table(tmp_path, marked, test="use")
    assert found.x_test[:, 0].tolist() == [8, 9, 10, 11]
    (tmp_path / "more.csv").write_text("x,y\n50,0\n51,1\n")
    found = table(tmp_path, "x,y\n1,0\n2,1\n", test=str(tmp_path / "more.csv"))
    assert found.x_test[:, 0].tolist() == [50, 51]
    with pytest.raises(DataError, match="row 3 below the header: 'use' must be train or test, got 'both'"):
        table(tmp_path, "use,x,y\ntrain,1,0\ntest,2,1\nboth,3,1\n", test="use")


HOLES = "x,y\n1,0\n,1\n3,0\nNA,1\n5,0\n6,1\n7,0\n8,1\n9,0\n"


def test_missing_values_are_refused_left_out_or_replaced(tmp_path):
    with pytest.raises(DataError, match=r"row 2 below the header has no 'x': choose data\.options\.missing"):
        table(tmp_path, HOLES)
    dropped = table(tmp_path, HOLES, missing="drop")
    assert len(dropped.y_train) + len(dropped.y_test) == 7
    assert dropped.notes[-1] == "t.csv: 2 of 9 rows with empty cells were left out"
    filled = table(tmp_path, HOLES, missing="mean")
    assert len(filled.y_train) + len(filled.y_test) == 9
    assert np.isfinite(filled.x_train).all()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (ROWS, {"target": "Y "}, r"column 'Y ' is missing \(did you mean 'y'\?\); found site, age, sex"),
        (ROWS, {"features": ["ages"]}, r"column 'ages' is missing \(did you mean 'age'\?\)"),
        (ROWS, {"group": "hospital"}, "column 'hospital' is missing; found"),
        (ROWS, {}, "row 1 below the header: 'site' is 'N', which is no number: choose data.options.categor"),
        ("x,y\n1,nan\n2,0\n", {}, "row 1 below the header has no 'y'; an empty one is refused"),
        (
            "x,y\n1,0.5\n2,0\n",
            {},
            "the target 'y' holds real numbers, such as 0.5, .*kind = 'numbers'",
        ),
        ("x,y\n1,a\n2,0\n", {"kind": "numbers"}, "the target 'y' is 'a', which is no number"),
        ("x,y\n1,2\n2,2\n3,2\n", {"kind": "numbers"}, "y_train is the same for every sample"),
        ("x,y\n1,2\n2,2\n3,2\n", {}, "at least 2 classes"),
        (
            "x,y\n" + "".join(f"n{i},{i % 2}\n" for i in range(300)),
            {"categories": "one-hot"},
            "column 'x' has .* different values, expected at most 100 categories",
        ),
        (
            "site,x,y\n" + "".join(f"N,{i},{i % 2}\n" for i in range(9)) + "W,,1\n",
            {"group": "site", "missing": "drop"},
            "no row is left to train on for site 'W'",
        ),
        ("x,x,y\n1,2,3\n", {}, "column 'x' appears twice"),
        ("x,y\n1\n", {}, "line 2: expected 2 cells, got 1"),
        ("x,y\n", {}, "has no row below its header"),
        ("x,y\n1,0\n2,1\n", {"missing": "guess"}, "data.options.missing: expected refuse or drop or mean"),
        ("x,y\n1,0\n2,1\n", {"test_fraction": 2}, "data.options.test_fraction: expected a number between 0"),
        # numbers that can be read in two ways: never guessed
        (
            "n;y\n726;0\n1.230;1\n",
            {},
            "row 2 .*'n' is '1.230', which can be read as 1.230 and as 1230, and no",
        ),
        ("n;z;y\n726;0,5;0\n1.230;0,6;1\n", {}, "row 2 .*'n' is '1.230', which can be read as 1.230 and as"),
        (
            'n,y\n726,0\n"1,230",1\n',
            {},
            "row 2 .*'n' is '1,230', which can be read as 1230 and as 1.230, and",
        ),
        ("n;z;y\n0.5;0,5;0\n1;1;1\n", {}, "'z' is '0,5', with a decimal comma, but .*'n' is '0.5', with a"),
        ("n;y\n0.5;0\n1;1\n", {"decimal": ","}, "'n' is '0.5', which is no number with a decimal comma"),
        (
            "n,y\n1e999,0\n1,1\n2,0\n3,1\n",
            {},
            "row 1 below the header: 'n' is '1e999', which is too large a number",
        ),
        # categories that are slips of the pen
        (
            "age,y\n1,0\nunknown,1\n3,0\n",
            {"categories": "one-hot"},
            "row 2 .*'unknown', but '1', a number, in row 1",
        ),
        (
            "age;y\n1,5;0\nunknown;1\n3;0\n",
            {"categories": "one-hot"},
            "row 2 .*'unknown', but '1,5', a number, in",
        ),
        (
            "x,y\n50%,0\n60%,1\n50%,0\n60%,1\n",
            {"categories": "one-hot"},
            "'x' is '50%', a percentage, formula or error",
        ),
        (
            "s,y\nf,0\nF,1\nf,0\nF,1\nf,1\nF,0\n",
            {"categories": "one-hot"},
            "holds 'F' and 'f', which differ only",
        ),
        ("x,y\n1,0\n2,0.0\n3,1\n", {}, "the target 'y' holds '0' and '0.0', which would be two classes"),
        ("x,y\n1,dead\n2,Dead\n3,alive\n", {}, "the target 'y' holds 'Dead' and 'dead', which would be two"),
        (
            "x;y\n1;0,5\n2;1,5\n3;0,5\n",
            {},
            "the target 'y' holds real numbers, such as 0,5, .*kind = 'numbers'",
        ),
        # options that are missing, or of a wrong type
        (ROWS, {"targt": "y"}, r"data.options: 'table' has no option 'targt' \(did you mean target\?\)"),
        (ROWS, {"standardise": "no"}, "data.options.standardise: expected true or false, got 'no'"),
        (
            ROWS,
            {"test_fraction": "0.3"},
            "data.options.test_fraction: expected a number between 0 and 1, got '0",
        ),
        (ROWS, {"split_seed": "1"}, "data.options.split_seed: expected a whole number, 0 or more, got '1'"),
        (ROWS, {"features": [1]}, r"data.options.features: expected a list of columns, got \[1\]"),
        (ROWS, {"target": 3}, "data.options.target: expected a text, got 3"),
        (ROWS, {"decimal": "comma"}, "data.options.decimal: expected a point or a comma, got 'comma'"),
        (
            ROWS,
            {"features": ["age"], "categories": ["sex"]},
            "categories: expected features, got 'sex', which is none",
        ),
    ],
)
def test_tables_with_mistakes(tmp_path, text, options, message):
    with pytest.raises(DataError, match=message):
        table(tmp_path, text, **options)


def test_a_table_without_a_target_and_groups_without_a_column_say_what_is_needed(tmp_path):
    (tmp_path / "t.csv").write_text(ROWS)
    with pytest.raises(
        DataError, match=r"^data\.options: 'table' needs the option 'target', such as target = "
    ):
        load("table", tmp_path / "t.csv")
    with pytest.raises(
        DataError, match=r"none: data\.options\.group names their column in a table, and an \.npz"
    ):
        members("group")


def test_numbers_of_a_table_are_read_as_they_are_meant(tmp_path):
    german = "n;z;y\n726;0,5;0\n1.230;0,6;1\n2.500;1;0\n900;2;1\n"
    found = table(tmp_path, german, decimal=",", test_fraction=0.25)
    every = np.concatenate([found.x_train, found.x_test])
    assert sorted(every[:, 0].tolist()) == [726, 900, 1230, 2500]
    assert sorted(every[:, 1].tolist()) == pytest.approx([0.5, 0.6, 1, 2])
    assert found.notes[-2:] == (
        "t.csv: 2 columns are features (data.options.features): n, z",
        "t.csv: numbers were read with decimal commas and marks between thousands in n",
    )
    british = 'n,y\n726,0\n"1,230",1\n900,0\n800,1\n'
    found = table(tmp_path, british, decimal=".", test_fraction=0.25)
    assert 1230 in np.concatenate([found.x_train, found.x_test])
    found = table(tmp_path, "n;y\n0,123;0\n1;1\n2;0\n3;1\n", test_fraction=0.25)  # a comma, surely
    assert 0.123 in np.concatenate([found.x_train, found.x_test]).round(6)
    programs = table(tmp_path, "n,y\n1.234,0\n1.235,1\n1.236,0\n1.237,1\n", test_fraction=0.25)
    assert programs.x_train.max() < 2


def test_a_category_may_be_a_number_or_be_called_none(tmp_path):
    smoking = "s,code,y\n" + "".join(
        f"{'none' if i % 3 else 'some'},{i % 2 + 1},{i % 2}\n" for i in range(12)
    )
    found = table(tmp_path, smoking, categories=["s", "code"], missing="drop")
    assert len(found.y_train) + len(found.y_test) == 12
    assert set(np.unique(found.x_train)) == {0, 1}
    assert found.x_train.shape[1] == 4
    holes = "s,y\n" + "".join(f"{('a', '', 'NA', 'b')[i % 4]},{i % 2}\n" for i in range(24))
    empty = table(tmp_path, holes, categories="one-hot", missing="mean")  # all empty cells are one category
    assert empty.x_train.shape[1] == 3
    hot = table(tmp_path, smoking, categories="one-hot")  # numbers stay numbers
    assert hot.x_train.shape[1] == 3


def test_the_test_file_is_named_where_its_rows_are_wrong(tmp_path):
    more = tmp_path / "more.csv"
    more.write_text("x,s,y\n50,a,0\n,new,1\n")
    with pytest.raises(DataError, match=r"more\.csv: row 2 below the header has no 'x'"):
        table(tmp_path, "x,s,y\n1,a,0\n2,b,1\n", test=str(more), categories="one-hot")
    more.write_text("x,s,y\n50,a,0\n51,new,1\n")
    found = table(tmp_path, "x,s,y\n1,a,0\n2,b,1\n", test=str(more), categories="one-hot")
    assert found.notes[-1] == "t.csv: s: only test rows hold 'new', which is none of the categories"
    with pytest.raises(DataError, match=r"data\.options\.test: expected another file than"):
        table(tmp_path, "x,s,y\n1,a,0\n2,b,1\n", test=str(tmp_path / "t.csv"))


def parquet(file, **columns):
    """A Parquet file with a target of two classes."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    write_table(pa.table({**columns, "y": ["a", "b"] * 10}), file)
    return file


def test_parquet_needs_pyarrow_and_says_so(tmp_path, monkeypatch):
    file = parquet(tmp_path / "t.parquet", x=np.arange(20.0))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match="reading Parquet needs pyarrow: pip install pyarrow"):
        load("table", file, target="y")


def test_a_parquet_file_is_read_as_the_same_table_in_csv(tmp_path):
    columns = {
        "x": np.linspace(-1, 1, 20),
        "n": np.arange(20) % 7,
        "price": [Decimal("1.50"), Decimal("2.25")] * 10,
        "ward": ["north", "south", "north", "west"] * 5,
    }
    file = parquet(tmp_path / "t.parquet", **columns)
    rows = zip(*columns.values(), ["a", "b"] * 10, strict=True)
    lines = [",".join([*columns, "y"]), *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    one, other = (
        load("table", path, target="y", categories="one-hot") for path in (file, tmp_path / "t.csv")
    )
    for name in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.classes == other.classes == ("a", "b")
    assert one.x_train.shape[1] == 6


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([True, False] * 10, "'x' is 'True', which is no number: choose"),
        ([[1.0, 2.0]] * 20, r"'x' is '\[1.0, 2.0\]', which is no number: choose"),
        ([None] * 20, "row 1 below the header has no 'x': choose"),
        ([1.0, float("nan")] * 10, "row 2 below the header has no 'x': choose"),
        ([float("inf")] * 20, "'x' is 'inf', which is no number"),
    ],
)
def test_cells_of_a_parquet_file_that_are_no_numbers_are_refused(tmp_path, values, said):
    with pytest.raises(DataError, match=rf"t\.parquet: .*{said}"):
        load("table", parquet(tmp_path / "t.parquet", x=values), target="y")


def test_a_parquet_file_without_rows_or_that_is_none_is_refused(tmp_path):
    import pyarrow as pa
    from pyarrow.parquet import write_table

    file = tmp_path / "t.parquet"
    write_table(pa.table({"x": pa.array([], pa.float64()), "y": pa.array([], pa.string())}), file)
    with pytest.raises(DataError, match=r"t\.parquet: has no row$"):
        load("table", file, target="y")
    file.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"t\.parquet: cannot be read as Parquet: "):
        load("table", file, target="y")


def test_a_member_with_one_row_is_refused_unless_the_minimum_allows_it(own):
    rows = {
        "x_train": np.arange(10.0)[:, None],
        "y_train": np.arange(10.0),
        "x_test": np.ones((4, 1)),
        "y_test": np.arange(4.0),
        "group_train": np.array(["N"] * 5 + ["S"] * 4 + ["W"]),
    }
    dataset = Dataset(name="few", **rows)
    with pytest.raises(DataError, match="W would hold 1 samples, expected at least 2"):
        prepare(from_dict(settings(partition={"minimum": 2})), dataset=dataset)
    assert prepare(from_dict(settings(partition={"minimum": 1})), dataset=dataset).names == ("N", "S", "W")


def test_a_feature_that_never_varies_in_training_is_not_blown_up_by_rounding(tmp_path):
    rows = "".join(f"0.1,{i},{i % 2},train\n" for i in range(9)) + "0.2,1,0,test\n0.1,2,1,test\n"
    found = table(tmp_path, f"dose,age,y,part\n{rows}", test="part", standardise=True)
    assert found.x_test[:, 0] == pytest.approx([0.1, 0.0])


def test_a_number_that_is_too_large_for_a_model_is_named_with_its_row_and_column(tmp_path):
    rows = ROWS.replace("N,24,", "N,1e300,")
    message = r"t\.csv: row 5 below the header: 'age' is '1e300': expected at most 3\.4e\+38"
    with pytest.raises(DataError, match=message):
        table(tmp_path, rows, features=["age"])


def test_f1_with_few_positives_has_a_least_error(monkeypatch):
    """Where blocks show no change, an interval would have no width: 95 % intervals covered 30 to 96 %."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "experiments"))
    from coverage import few_positives

    for samples, share in ((50, 0.2), (200, 0.05)):
        found = few_positives(samples, share, 0.3, 40)
        assert found["before"] < 0.92 <= found["now"]


def test_a_report_of_f1_carries_its_least_error(own, tmp_path):
    raw = settings(
        data={"options": {"kind": "classes"}},
        training={"loss": "binary", "lr": 1e-9},
        scoring={"utilities": ["f1"], "scale": 0.0},
    )
    run(from_dict(raw), tmp_path / "run")
    (first, *_) = fm.read(tmp_path / "run" / "scores.json")
    positives = int(prepare(from_dict(raw)).pool.first.y.sum())  # nothing changes, and that is not certain
    np.testing.assert_allclose(first.se_alpha, 1 / positives / 2, rtol=1e-6)
    np.testing.assert_allclose(first.se_loo, 1 / positives, rtol=1e-6)
