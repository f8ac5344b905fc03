"""Own data, model, loss and metric: what is measured and paid, and what every mistake is told."""

import importlib.util
import math
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedmerit as fm
from fedmerit.cli import app
from fedmerit.config import from_dict
from fedmerit.data import load
from fedmerit.data.dataset import Dataset
from fedmerit.errors import ConfigError, DataError, ReportError
from fedmerit.notes import code_of
from fedmerit.protocol.direction import deal
from fedmerit.protocol.pool import Slice, slice_id
from fedmerit.report.facts import Facts
from fedmerit.report.page.html import facts_of
from fedmerit.report.source import read_source
from fedmerit.scoring.doubts import doubts
from fedmerit.scoring.sampling import auc, c_index, f1, jackknife
from fedmerit.simulation.direction import direction
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.simulation.setup import prepare, read
from fedmerit.simulation.setup import resolve as resolve_members
from fedmerit.simulation.training import Unit, loss_of
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

def nothing():
    return 3

def misnamed():
    return {**rows(), "labels": 3}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    yield from module_of("my_own", OWN, tmp_path, monkeypatch)


CLASSES = {"options": {"kind": "classes"}}


def settings(**sections):
    plain = {
        "data": {"name": "my_own:rows", "test_size": 0},
        "partition": {"scheme": "group"},
        "model": {"name": "mlp"},
        "training": {"rounds": 2, "local_epochs": 2, "batch_size": 8, "loss": "mse"},
        "scoring": {"utilities": ["rmse-skill:10"], "method": "reports"},
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
        (lambda p: auc(np.eye(2)[p % 2], (p == 0) * 1), "without block 1: AUC needs samples of class 1"),
    ],
)
def test_a_metric_that_gives_no_number_is_named(metric, message):
    with pytest.raises(ReportError, match=message):
        jackknife("m", metric, [np.array([0, 1]), np.array([2, 3])])


def test_scores_and_doubts_of_reports_say_that_contributions_need_not_add_up():
    far = fm.Reports(empty=0.0, grand=0.9, alone=[0.1, 0.1, 0.1], without=[0.9, 0.9, 0.9], utility="AUC")
    total = fm.accumulate([far])
    assert [note.code for note in total.notes if hasattr(note, "code")].count("whole-sum") == 1
    for utility, code, gross in (
        ("AUC", "whole", False),
        ("whole:ours", "whole", False),
        ("dice", "strays", True),
    ):
        [doubt] = doubts([replace(far, utility=utility)])
        assert (doubt.code, doubt.gross) == (code, gross)


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
    for scale in ("0", "-4", "inf"):
        with pytest.raises(ConfigError, match="expected rmse-skill:20"):
            resolve(f"rmse-skill:{scale}")
    x, y = np.array([[0.0], [1.0], [9.0]], np.float32), np.array([0.0, 3.0, 0.0], np.float32)
    square, plain = (resolve(name) for name in ("rmse-skill:4", "mae-skill:4"))
    found = evaluate(model, x, y, [square, plain])
    assert found["rmse-skill:4"].tolist() == [1.0, 0.75, 0.0]  # errors 0, 2 and 9, which is cut at 4
    assert found["mae-skill:4"].tolist() == [1.0, 0.5, 0.0]
    start, end = np.array([1.0, 0.0], np.float32), np.array([1.5, 0.5], np.float32)
    way = direction(model, start, end, x, y, square, blocks=1)
    assert float(way.gradient @ (end - start)) == pytest.approx(way.gain, rel=1e-3)


def test_one_logit_is_that_of_two_classes():
    x = np.array([[0.0], [math.log(3)]], np.float32)
    found = evaluate(nn.Identity(), x, np.array([0, 1]), ["expected-accuracy", "accuracy"])
    assert found["expected-accuracy"] == pytest.approx([0.5, 0.75])


# --- whole runs


@pytest.mark.parametrize("name", ["auc", "whole:my_own:median_error"])
def test_a_metric_of_the_whole_set_is_reported_with_errors(own, tmp_path, name):
    training = {"loss": "binary", "optimiser": "sgd", "lr": 0.1}
    raw = settings(data=CLASSES, training=training, scoring={"utilities": [name, "expected-accuracy"]})
    federation = prepare(from_dict(raw))
    assert any(getattr(note, "code", "") == "whole-metric" for note in federation.notes)
    assert federation.evaluate(federation.first, federation.pool.first)[name].shape == (10,)
    run(from_dict(raw), tmp_path / "run")
    last = fm.read(tmp_path / "run" / "scores.json")[-1]
    assert last.grand > 0.5 or name != "auc"
    assert last.freedom == 9  # of 10 blocks
    assert (last.se_alpha > 0).any()


def test_a_run_goes_on_with_the_sums_of_its_pseudo_values(own, tmp_path):
    raw = settings(data=CLASSES, training={"loss": "binary"}, scoring={"utilities": ["auc"]})
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


def test_tokens_and_survival_times(own, tmp_path):
    text = {"loss": "cross-entropy", "optimiser": "adamw"}
    for data, model, training, utility in (
        ("sentences", "reads", text, "expected-accuracy"),
        ("survival", "one", {"loss": "my_own:cox"}, "c-index"),
    ):
        raw = settings(
            data={"name": f"my_own:{data}"}, model={"name": f"my_own:{model}"}, training=training,
            scoring={"utilities": [utility]}, partition={"scheme": "iid", "clients": 3},
        )  # fmt: skip
        run(from_dict(raw), tmp_path / data)


def test_coalitions_of_such_runs_have_tables(own, tmp_path):
    scoring = {"utilities": ["auc", "accuracy"], "truth": ["mr-shapley", "shapley"]}
    raw = settings(data=CLASSES, training={"loss": "binary"}, scoring=scoring)
    run(from_dict(raw), tmp_path / "run")
    last = fm.read(tmp_path / "run" / "scores.json")[-1]
    with np.load(tmp_path / "run" / "tables" / "round-0002.npz") as tables:
        assert tables["table/auc"][-1] == pytest.approx(last.grand, abs=1e-6)


# --- mistakes


def test_targets_that_do_not_fit_the_loss_the_deal_or_the_measure(own):
    classes, binary = CLASSES, {"loss": "binary"}
    refused("'cross-entropy' needs classes, .* are real numbers", training={"loss": "cross-entropy"})
    refused("training.loss: 'binary' needs two classes, or numbers in", training=binary)
    refused("training.loss: 'mse' needs real numbers", data=classes)
    refused("'accuracy' needs y of classes, .* take rmse-skill", scoring={"utilities": ["accuracy"]})
    refused("'rmse-skill:10' needs y of real numbers", data=classes, training=binary)
    refused("'dirichlet' deals class by class", partition={"scheme": "dirichlet", "clients": 3})
    refused("corruption.label_flip: only where y is classes", corruption={"label_flip": ["North"]})
    refused("data.test_size: expected at most the 30 test samples", data={"test_size": 31})
    refused("'cnn' takes images", model={"name": "cnn"})


def test_the_users_code_fails_before_the_first_round_with_its_reason(own):
    shape = r"must return numbers of shape \(30,\) like y, .* got \(30, 3\)"
    refused(shape, DataError, model={"name": "my_own:three"})
    gradient = "must return one number with a gradient, got str"
    refused(gradient, DataError, training={"loss": "my_own:no_number"})
    organ = "'my_own:fails' failed on outputs of shape .* RuntimeError: no such organ"
    refused(organ, DataError, training={"loss": "my_own:fails"})
    nan = r"metric 'whole:my_own:no_metric' of the 30 test samples is nan"
    refused(nan, ReportError, scoring={"utilities": ["whole:my_own:no_metric"]})
    mapping = "expected a Dataset, or a mapping with x_train, y_train, x_test, y_test, got int"
    refused(mapping, DataError, data={"name": "my_own:nothing"})
    refused("unknown key 'labels'", DataError, data={"name": "my_own:misnamed"})
    keyword = "TypeError: .* unexpected keyword argument 'colour'"
    refused(keyword, DataError, data={"options": {"colour": 1}})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"scoring": {"utilities": ["rmse"]}}, "'rmse' has no bound .* expected rmse-skill:20, where"),
        ({"scoring": {"utilities": ["rmse-skill"]}}, "'rmse-skill': expected rmse-skill:20"),
        ({"scoring": {"utilities": ["mae-skill:x"]}}, "'mae-skill:x': expected mae-skill:20"),
        ({"scoring": {"utilities": ["auc"], "method": "both"}}, "'auc' has none: it is a metric of"),
        ({"training": {"loss": "mae"}}, "training.loss: expected one of cross-entropy, binary, mse, or"),
    ],
)
def test_settings_that_mean_nothing(raw, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(raw)


def test_truth_values_and_texts_are_classes_and_whole_numbers_may_be_meant_as_real_ones(tmp_path):
    file, x = tmp_path / "d.npz", np.arange(12.0).reshape(6, 2)

    def stored(*y):
        np.savez(file, x_train=x, y_train=np.array(y), x_test=x, y_test=np.array(y))
        return load("npz", file)

    for classes, y in ((("0", "1"), (True, False)), (("healthy", "sick"), ("sick", "healthy"))):
        found = stored(*y * 3)
        assert (found.classes, found.y_train.tolist()) == (classes, [1, 0] * 3)
    hint = "whole numbers are classes; store y as floats if they are real numbers"
    for y, message in (
        (("sick", "Sick", "healthy") * 2, "y holds 'Sick' and 'sick', which would be two classes"),
        (("0.5", "1.5", "0.7") * 2, r"y holds numbers as text, such as '0\.5': store them as numbers"),
        ((-3, 5, 4, 3, 2, 1), rf"label -3 of sample 0 is outside 0 \.\. 5: {hint}"),
        ((1, 5, 4, 3, 2, 1), f"class '0' has no training sample: {hint}"),
    ):
        with pytest.raises(DataError, match=message):
            stored(*y)


def test_one_number_where_there_should_be_one_per_sample_leads_to_scoring_whole():
    with pytest.raises(ReportError, match=r"got shape \(1,\); a metric of the whole test set is called"):
        checked(resolve("brier"), np.array([0.5]), 4)


def test_a_member_may_have_one_row(own):
    x, y, groups = np.arange(10.0)[:, None], np.arange(10.0), np.array(["N"] * 5 + ["S"] * 4 + ["W"])
    dataset = Dataset(name="few", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4], group_train=groups)
    assert prepare(from_dict(settings()), dataset=dataset).names == ("N", "S", "W")


def test_f1_with_few_positives_has_a_least_error(monkeypatch):
    """Where blocks show no change, an interval would have no width: 95 % intervals covered 30 to 96 %."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "experiments"))
    from coverage import few_positives

    for samples, share in ((50, 0.2), (200, 0.05)):
        found = few_positives(samples, share, 0.3, 40)
        assert found["before"] < 0.92 <= found["now"]


def test_a_report_of_f1_carries_its_least_error(own, tmp_path):
    training, scoring = {"loss": "binary", "lr": 1e-9}, {"utilities": ["f1"]}
    raw = settings(data=CLASSES, training=training, scoring=scoring)
    run(from_dict(raw), tmp_path / "run")
    (first, *_) = fm.read(tmp_path / "run" / "scores.json")
    positives = int(prepare(from_dict(raw)).pool.first.y.sum())  # nothing changes, and that is not certain
    np.testing.assert_allclose(first.se_alpha, 1 / positives / 2, rtol=1e-6)
    np.testing.assert_allclose(first.se_loo, 1 / positives, rtol=1e-6)


# --------------------------------------------------------------------------------------------- real numbers


GUIDE = Path(__file__).parents[2] / "examples" / "bring-your-own"
CLINICS = ("Abbey", "Bridge", "Castle", "Dale", "Elm")


def guide(folder, exchanged="", **sections):
    """The guide's regression; the answers of one clinic's patients may be exchanged among them."""
    spec = importlib.util.spec_from_file_location("progression", GUIDE / "progression.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with mock.patch.dict(sys.modules, {"sklearn": None, "sklearn.datasets": None}):  # the made-up patients
        module.main(folder / "progression.csv", exchanged)
    raw = tomllib.loads((GUIDE / "progression.toml").read_text())
    raw["data"]["path"] = str(folder / "progression.csv")
    raw["secure_aggregation"] = {"enabled": False}
    return from_dict({name: {**raw.get(name, {}), **sections.get(name, {})} for name in {**raw, **sections}})


@pytest.mark.parametrize("clinics", [["Dale"], pytest.param(CLINICS, marks=pytest.mark.long)])
def test_a_clinic_with_exchanged_answers_is_last_whichever_it_is(tmp_path, clinics):
    ranks = {}
    for clinic in clinics:
        (tmp_path / clinic).mkdir()
        run(guide(tmp_path / clinic, clinic), tmp_path / clinic / "run")
        standing = Facts(read_source(tmp_path / clinic / "run")).standing[clinic]
        ranks[clinic] = standing.rank
        assert clinic != "Dale" or standing.share < 0.05  # as docs/bring-your-own.md says
    assert sum(rank == 5 for rank in ranks.values()) >= min(4, len(ranks))  # with plain outputs, 2 of 5
    assert min(ranks.values()) >= 4


def test_most_of_the_gain_is_not_for_a_constant_answer(tmp_path):
    """The first model answers about the mean; in the unit of y a note says that this would be paid."""
    federation = prepare(guide(tmp_path))
    codes = [code_of(note) for note in federation.notes]
    assert "standardised-y" in codes
    assert "constant-earns" not in codes
    plain = prepare(guide(tmp_path, model={"outputs": "plain"}))
    codes = [code_of(note) for note in plain.notes]
    assert "constant-earns" in codes
    assert any("leave it out" in note for note in plain.notes)
    run(guide(tmp_path, model={"outputs": "plain"}, training={"rounds": 2}), tmp_path / "plain")
    facts = Facts(read_source(tmp_path / "plain"))
    assert facts.source.run.first.mean_answer == plain.constant
    assert "mean" in [doubt.code for doubt in facts.doubts]
    assert "standardised-y" not in codes
    shown = federation.pool.settlement()
    first, far = (
        float(np.mean(one.evaluate(one.first, shown)["rmse-skill:350"])) for one in (federation, plain)
    )
    assert first > 0.93 > 0.85 > far  # RMSE below 93, and above 135, of a scale of 350


@pytest.mark.parametrize(
    ("outputs", "loss"), [("logits", "mse"), ("probabilities", "mse"), ("standardised", "tests.nowhere:loss")]
)
def test_what_the_network_returns_must_fit_y(tmp_path, outputs, loss):
    with pytest.raises(ConfigError) as caught:
        prepare(guide(tmp_path, model={"outputs": outputs}, training={"loss": loss}))
    assert caught.value.setting in ("model.outputs", "training.loss")


@pytest.mark.parametrize("shape", [(200,), (200, 3), (50, 4, 5)])
def test_outputs_and_loss_are_those_of_standardised_answers(shape):
    rng = np.random.default_rng(0)
    y = (1000 + rng.normal(size=shape) * (np.arange(1, 4) if shape[1:] == (3,) else 50)).astype(np.float32)
    unit, z = Unit(y), torch.as_tensor(rng.normal(size=shape), dtype=torch.float32)
    found = unit(None, None, z)
    standard = (torch.as_tensor(y) - torch.as_tensor(unit.mean)) / torch.as_tensor(unit.sd)
    losses = loss_of("mse", unit=unit)(found, torch.as_tensor(y)), loss_of("mse")(z, standard.float())
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    assert unit(None, None, "no tensor") == "no tensor"
    assert Unit(np.ones(3)).sd == 1  # nothing varies


def test_the_retrained_comparison_includes_the_score_that_pays(tmp_path):
    config = guide(tmp_path, training={"rounds": 1}, scoring={"method": "both", "truth": ["shapley"]})
    (tmp_path / "c.toml").write_text(config.to_toml())
    said = CliRunner().invoke(app, ["run", str(tmp_path / "c.toml"), "--out", str(tmp_path / "run")]).stdout
    line = " ".join(said.split()).split("retrained Shapley value of rmse-skill:350: ")[1].split("Spearman")[0]
    assert "PHI " in line
    near = {(utility, kind): found for utility, kind, found in facts_of(tmp_path / "run").near_truth("SV")}
    assert near["rmse-skill:350", "SV"]["PHI"] is not None
    assert "ALPHA" in near["rmse-skill:350", "SV"]


def test_a_run_on_numbers_whose_test_pool_is_drawn_at_random_verifies(tmp_path):
    """Its pool is not balanced, although the config asks for a number of test samples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 4)).astype(np.float32)
    arrays = {"x_train": x[:180], "x_test": x[180:], "y_train": x[:180].sum(1), "y_test": x[180:].sum(1)}
    np.savez(tmp_path / "numbers.npz", **arrays)
    config = from_dict({
        "data": {"name": "npz", "path": str(tmp_path / "numbers.npz"), "test_size": 60},
        "model": {"name": "mlp"},
        "partition": {"clients": 3, "scheme": "iid"},
        "training": {"rounds": 1, "local_epochs": 1, "loss": "mse"},
        "scoring": {"method": "reports", "utilities": ["rmse-skill:9"]},
        "secure_aggregation": {"enabled": False},
    })  # fmt: skip
    run(config, tmp_path / "run")
    source = read_source(tmp_path / "run")
    assert source.run.pool["balanced"] == 0
    assert source.run.first.mean_answer == pytest.approx(1 - np.mean(arrays["y_test"] ** 2) / 81, abs=0.01)
