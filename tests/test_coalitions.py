"""Coalition models and their utilities: every fast way equals the plain one."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedmerit.errors import ConfigError, DataError, InputError, ReportError
from fedmerit.simulation.coalitions import Evaluation, Evaluator, coalition_tables, coefficients
from fedmerit.simulation.models import build, flatten, load_vector, prepare, to_vector
from fedmerit.simulation.strategies import EvaluationSet, Packing, Single, Stacked, Strategy, choose, sample
from fedmerit.simulation.utilities import UTILITIES, evaluate, resolve_all
from networks import Branching, network

DEVICE = os.environ.get("FEDMERIT_TEST_DEVICE", "cpu")
ALL = list(UTILITIES)
WEIGHTS = [1.0, 2.0, 5.0]


class Attention(nn.Module):
    """A user's model with dropout, attention and tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 2, stride=2)
        self.attend = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, batch_first=True)
        self.drop = nn.Dropout(0.5)
        self.mix = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.mix.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        tokens = self.attend(self.embed(x).flatten(2).transpose(1, 2))
        return self.head(self.drop(self.again(torch.relu(self.mix(tokens.mean(1))))))


def model_named(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = network(name, 2) or Attention()
        if name == "resnet-batch":  # running statistics worth carrying
            made.train()(torch.randn(8, 2, 20, 20))
    return made.to(DEVICE)


def ready(x, y, names, batch=12):
    return EvaluationSet(prepare(x, DEVICE), torch.from_numpy(y).to(DEVICE), resolve_all(names), batch)


def coalition_rows(m0, updates):
    return torch.from_numpy(m0 + coefficients(range(8), WEIGHTS) @ updates).float().to(DEVICE)


def pool(m=12, shape=(6, 6, 1), seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (m, *shape), dtype=np.uint8), np.arange(m) % 3


def updates_for(model, n=3, scale=0.05, seed=1):
    m0 = to_vector(model)
    rng = np.random.default_rng(seed)
    weights = np.array(WEIGHTS[:n])
    local = m0 + scale * np.abs(m0).mean() * rng.standard_normal((n, len(m0))).astype(np.float32)
    return m0, local, (weights[:, None] / weights.sum() * (local - m0)).astype(np.float32)


def by_hand(model, m0, local, weights, game, x, y):
    """One coalition after another, from the definition of the game over the local models."""
    n, w, rows = len(local), np.asarray(weights), []
    for mask in range(1 << n):
        inside = [i for i in range(n) if mask >> i & 1]
        total = w.sum() if game == "additive" else w[inside].sum()
        vector = m0 + sum((w[i] / total * (local[i] - m0) for i in inside), np.zeros_like(m0))
        load_vector(model, vector.astype(np.float32))
        rows.append([values.mean() for values in evaluate(model, x, y, ALL).values()])
    load_vector(model, m0)
    return np.array(rows)


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-pool", "resnet-group", "resnet-batch", "attention"])
@pytest.mark.parametrize("game", ["additive", "renormalised"])
def test_fast_equals_slow(name, game):
    model = model_named(name)
    x, y = pool(shape=(20, 20, 2) if "resnet" in name else (6, 6, 1))
    m0, local, updates = updates_for(model)
    expected = by_hand(model, m0, local, WEIGHTS, game, x, y)
    assert len(np.unique(expected[:, 0])) == 8  # every coalition is another model
    for method in ("single", "stacked"):
        got, record = coalition_tables(model, m0, updates, WEIGHTS, x, y, ALL, game=game, method=method)
        assert (record.method, record.checked, record.coalitions) == (f"{method} float32", 0, 8)
        for i, utility in enumerate(ALL):
            np.testing.assert_allclose(got[utility].values, expected[:, i], rtol=1e-4, atol=2e-6)
    assert np.array_equal(to_vector(model), m0)


@pytest.mark.parametrize("game", ["additive", "renormalised"])
def test_both_games_agree_on_nobody_and_everybody(game):
    c = coefficients(range(8), WEIGHTS, game)
    assert c[0].tolist() == [0, 0, 0]
    assert c[7].tolist() == [1, 1, 1]
    assert (c[5] > 0).tolist() == [True, False, True]


def test_many_batches_and_chunks_give_the_same_and_progress_is_told():
    model = model_named("cnn")
    x, y = pool(40)
    m0, _, updates = updates_for(model)
    whole = Evaluator(model, x, y, ["brier", "balanced-accuracy"])
    tight = Evaluator(
        model, x, y, ["brier", "balanced-accuracy"], memory_limit=whole.need(3) + 9 * whole.per_image
    )
    told = []
    expected, record = whole.tables(m0, updates, WEIGHTS)
    got, small = tight.tables(m0, updates, WEIGHTS, progress=lambda done, total: told.append((done, total)))
    assert (record.batch, small.batch) == (40, 4)
    for utility in expected:
        np.testing.assert_allclose(got[utility].values, expected[utility].values, atol=1e-6)
    assert told[-1] == (8, 8)
    assert len(told) > 1


def test_an_evaluator_serves_several_rounds_and_names_clients():
    model = model_named("mlp")
    x, y = pool()
    evaluator = Evaluator(model, x, y, ["accuracy"])
    for seed in (1, 2):
        m0, local, updates = updates_for(model, seed=seed, scale=2.0)
        got, _ = evaluator.tables(m0, updates, WEIGHTS, clients=["A", "B", "C"])
        expected = by_hand(model, m0, local, WEIGHTS, "additive", x, y)[:, ALL.index("accuracy")]
        assert got["accuracy"].values.tolist() == pytest.approx(expected.tolist())
        assert got["accuracy"].clients == ("A", "B", "C")


def test_packed_rows_are_the_models_tensors_in_either_layout():
    model = model_named("resnet-batch")
    vector = flatten(model)
    for channels_last in (False, True):
        packing = Packing(model, channels_last=channels_last)
        views = packing.views(packing.pack(vector[None])[0])
        for name, value in views.items():
            assert torch.equal(
                value, model.get_parameter(name) if "running" not in name else model.get_buffer(name)
            )
            assert value.storage_offset() % 64 == 0
        assert views["conv1.weight"].is_contiguous(memory_format=torch.channels_last) or not channels_last


def test_the_chosen_strategy_agrees_with_float32_and_says_what_was_tried():
    model = model_named("cnn")
    x, y = pool()
    m0, _, updates = updates_for(model)
    rows = coalition_rows(m0, updates)
    exact = Single(model, ready(x, y, ["expected-accuracy", "brier"]))
    settings = {"total": 512, "effort": "none", "stack": 64}
    best, record = choose(model, exact, lambda s: s.packing.pack(rows), tolerance=2e-2, **settings)
    assert {
        "single float32",
        "single float16",
        "single float16, channels last",
        "stacked by 8 float16",
        "stacked by 64 tf32",
    } < set(record.tried)
    got = best(best.packing.pack(rows))
    assert (got - exact(exact.packing.pack(rows))).abs().max() <= 2e-2
    assert record.precision == best.precision
    _, strict = choose(model, exact, lambda s: s.packing.pack(rows), tolerance=1e-7, **settings)
    assert "strays from float32 by" in strict.tried["single float16"]
    assert "bfloat16" in " ".join(strict.tried)
    assert strict.precision in ("float32", "tf32")  # on a CPU the same arithmetic


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU evaluates one model after another, in float32")
@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-pool", "resnet-group", "resnet-batch", "attention"])
@pytest.mark.parametrize("game", ["additive", "renormalised"])
def test_on_a_gpu_the_measured_choice_agrees_with_a_plain_loop(name, game):
    model = model_named(name)
    shape = (20, 20, 2) if "resnet" in name else (6, 6, 1)
    x, y = pool(60, shape)
    rng = np.random.default_rng(5)
    m0 = to_vector(model)
    updates = (0.01 * np.abs(m0).mean() * rng.standard_normal((7, len(m0)))).astype(np.float32)
    plain, _ = coalition_tables(
        model, m0, updates, [1.0] * 7, x, y, ["expected-accuracy", "brier"], game=game, method="single"
    )
    got, record = coalition_tables(
        model, m0, updates, [1.0] * 7, x, y, ["expected-accuracy", "brier"], game=game
    )
    assert record.checked == 16 or record.precision == "float32"
    assert max(record.deviation.values()) <= 2e-3  # of the coalitions that were checked
    for utility, table in plain.items():
        assert np.abs(got[utility].values - table.values).max() < 1e-2


def test_half_precision_out_of_range_is_repaired_in_float32():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).to(DEVICE)
    x, y = pool()
    m0, updates = to_vector(model), np.zeros((3, 111), dtype=np.float32)
    updates[2, :36] = 7e4  # beyond float16
    expected, _ = coalition_tables(model, m0, updates, WEIGHTS, x, y, ["accuracy"])
    play = Evaluator(model, x, y, ["accuracy"]).game(m0, updates, WEIGHTS)
    half = replace(play, strategy=Single(model, ready(x, y, ["accuracy"]), "float16"))
    assert not np.isfinite(half.unrepaired(np.arange(8))).all()
    assert half.values(np.arange(8))[:, 0].tolist() == expected["accuracy"].values.tolist()


def rounds_of_seven(model, scales, seed=5):
    """M0 and seven updates a round, of these sizes."""
    m0, rng = to_vector(model), np.random.default_rng(seed)
    for scale in scales:
        yield m0, (scale * rng.standard_normal((7, len(m0)))).astype(np.float32), [1.0] * 7


def with_bfloat16(model, x, y, tolerance=2e-3):
    """An evaluator that chose bfloat16 in some earlier round, and that strategy."""
    evaluator = Evaluator(model, x, y, ["neg-loss", "accuracy"], tolerance=tolerance)
    strategy = Single(model, ready(x, y, ["neg-loss", "accuracy"]), "bfloat16")
    record = Evaluation("single bfloat16", "bfloat16", {"neg-loss": 1e-9, "accuracy": 1e-9}, 12, 16)
    evaluator.chosen = strategy, record
    return evaluator, strategy


def test_every_round_records_its_own_deviation_from_float32():
    model = model_named("mlp")
    x, y = pool()
    evaluator, _ = with_bfloat16(model, x, y, tolerance=1.0)
    deviations = []
    for given in rounds_of_seven(model, (1e-3, 0.3)):
        exact, _ = coalition_tables(model, *given, x, y, ["neg-loss", "accuracy"], method="single")
        got, record = evaluator.tables(*given)
        assert (record.method, record.precision) == ("single bfloat16", "bfloat16")
        assert (record.checked, record.coalitions) == (16, 128)
        masks = sample(7)
        for name, table in exact.items():
            away = np.abs(got[name].values - table.values)
            assert record.deviation[name] == pytest.approx(away[masks].max(), abs=1e-6)
        deviations.append(record.deviation["neg-loss"])
    assert deviations[1] > 10 * deviations[0] > 0


def test_a_round_that_strays_too_far_is_not_evaluated_that_way():
    model = model_named("mlp")
    x, y = pool()
    evaluator, _ = with_bfloat16(model, x, y)
    fine, coarse, again = rounds_of_seven(model, (1e-3, 0.3, 1e-3))
    assert evaluator.tables(*fine)[1].precision == "bfloat16"
    exact, _ = coalition_tables(model, *coarse, x, y, ["neg-loss"], method="single")
    got, record = evaluator.tables(*coarse)
    assert np.abs(got["neg-loss"].values - exact["neg-loss"].values).max() <= 2e-3
    if DEVICE == "cpu":  # a GPU may find TF32 or float16 close enough
        assert (record.method, record.deviation["neg-loss"]) == ("single float32", 0)
        assert got["neg-loss"].values.tolist() == exact["neg-loss"].values.tolist()
    assert max(evaluator.tables(*again)[1].deviation.values()) <= 2e-3


def test_holding_a_round_against_float32_takes_a_sample_and_a_short_round_is_float32(monkeypatch):
    model = model_named("mlp")
    x, y = pool()
    evaluator, fast = with_bfloat16(model, x, y)
    (given,) = rounds_of_seven(model, (1e-3,))
    counts, real = {"float32": 0, "bfloat16": 0}, Single._sums

    def counting(self, rows):
        counts[self.precision] += len(rows)
        return real(self, rows)

    monkeypatch.setattr(Single, "_sums", counting)
    evaluator.tables(*given)
    assert counts == {"float32": 16, "bfloat16": 16 + 128}
    counts.update(float32=0, bfloat16=0)
    _, record = evaluator.tables(given[0], given[1][:6], given[2][:6])  # 64 coalitions
    assert (counts, record.checked) == ({"float32": 64, "bfloat16": 0}, 0)
    assert evaluator.game(*given, total=500).strategy is fast  # a short round decides for no other
    assert evaluator.game(*given).strategy.precision == "float32"
    small = rounds_of_seven(model, (1e-3,))
    m0, updates, weights = next(small)
    one = evaluator.game(m0, updates[:1], weights[:1], total=500)  # two coalitions, asked for often
    assert one.record.checked == 2


def test_a_users_utility_sees_every_coalition(tmp_path, monkeypatch):
    source = "def sure(model, images, labels):\n    return model(images).softmax(1).amax(1)\n"
    (tmp_path / "my_coalition_utility.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    model = model_named("cnn")
    x, y = pool()
    m0, _, updates = updates_for(model)
    names = ["accuracy", "my_coalition_utility:sure"]
    got, _ = coalition_tables(model, m0, updates, WEIGHTS, x, y, names)
    load_vector(model, m0 + updates[0] + updates[2])
    assert got[names[1]].values[5] == pytest.approx(evaluate(model, x, y, names)[names[1]].mean(), rel=1e-5)
    with pytest.raises(InputError, match="takes one model at a time"):
        coalition_tables(model, m0, updates, WEIGHTS, x, y, names, method="stacked")
    sys.modules.pop("my_coalition_utility")


WRONG_ANSWERS = """
def mean(model, images, labels):
    return model(images).softmax(1).amax(1).mean()
def every(model, images, labels):
    return model(images).softmax(1)
def percent(model, images, labels):
    return 100 * model(images).softmax(1).amax(1)
def infinite(model, images, labels):
    return model(images).softmax(1).amax(1) / 0
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mean", r"must return 12 numbers, one per sample, got shape \(1,\)"),
        ("every", r"must return 12 numbers, one per sample, got shape \(12, 3\)"),
        ("percent", r"of sample 0 must lie in \[0, 1\], got \d"),
        ("infinite", r"of coalition \{\} is not finite"),
    ],
)
def test_a_users_utility_is_held_to_what_it_promises(tmp_path, monkeypatch, function, message):
    (tmp_path / "my_wrong_utility.py").write_text(WRONG_ANSWERS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReportError, match=f"utility 'my_wrong_utility:{function}' {message}"):
        run(utilities=["accuracy", f"my_wrong_utility:{function}"])
    sys.modules.pop("my_wrong_utility")


def run(**change):
    model = change.pop("model", None) or build("mlp", (6, 6, 1), 3)
    x, y = pool()
    m0, _, updates = updates_for(build("mlp", (6, 6, 1), 3))
    given = {"m0": m0, "updates": updates, "weights": WEIGHTS, "x": x, "y": y, "utilities": ["accuracy"]}
    return coalition_tables(model, **(given | change))


def bad_update():
    updates = updates_for(build("mlp", (6, 6, 1), 3))[2]
    updates[1, 7] = np.nan
    return updates


class Failing(nn.Linear):
    def forward(self, x):
        raise RuntimeError("no such layer")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"updates": bad_update()}, InputError, "the update of client-1 is not finite"),
        ({"updates": bad_update(), "clients": ["A", "B", "C"]}, InputError, "the update of B is not finite"),
        ({"m0": np.zeros(5)}, InputError, r"M0 must have \d+ values like the model, got shape \(5,\)"),
        (
            {"weights": [1.0, 2.0]},
            InputError,
            "expected 3 weights and 3 names, one per update, got 2 weights",
        ),
        ({"clients": {"A", "B", "C"}}, InputError, "coalitions: clients must be names in an order"),
        ({"weights": [1.0, 2.0, 0.0]}, InputError, "weights must be positive numbers, one per client"),
        (
            {"game": "zero-sum"},
            ConfigError,
            "scoring.game must be 'additive' or 'renormalised', got 'zero-sum'",
        ),
        ({"updates": np.zeros((27, 1))}, InputError, r"N must lie in 1 ... 26, got 27; sampled_shapley does"),
        ({"memory_limit": 1000}, InputError, "8 coalitions of this model need .* MB, 0 MB may be used"),
        ({"method": "magic"}, InputError, "method must be 'auto', 'single' or 'stacked', got 'magic'"),
        ({"y": np.arange(12)}, DataError, "labels must lie in 0 ... 2, got 11"),
        (
            {"y": np.arange(12) % 2, "utilities": ["balanced-accuracy"]},
            DataError,
            "class 2 of 3 has no sample",
        ),
        (
            {"model": Failing(2, 2)},
            InputError,
            r"the model fails on a sample of shape \(6, 6, 1\): RuntimeError: no such layer",
        ),
    ],
)
def test_bad_input_is_named_before_anything_is_evaluated(change, error, message):
    with pytest.raises(error, match=message):
        run(**change)


def test_a_coalition_that_diverges_is_named():
    model = build("mlp", (6, 6, 1), 3)
    m0, _, updates = updates_for(model)
    updates[1:] = 3e38 / 2  # finite alone, not together
    with pytest.raises(ReportError, match=r"utility 'accuracy' of coalition \{B\} is not finite"):
        run(updates=updates, m0=m0, clients=["A", "B", "C"])


def test_stacked_needs_no_more_than_vmap_can_do():
    model = Branching().to(DEVICE)
    x, y = pool()
    test = ready(x, y, ["brier"])
    rows = flatten(model)[None].expand(4, -1)
    exact = Single(model, test)
    _, record = choose(
        model, exact, lambda s: s.packing.pack(rows), total=512, tolerance=1e-2, effort="none", stack=8
    )
    assert "data-dependent control flow" in record.tried["stacked by 8 tf32"]
    assert record.method.startswith("single")
    with pytest.raises(RuntimeError):
        Stacked(model, test)(exact.packing.pack(rows))


def test_a_strategy_that_cannot_evaluate_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Strategy(None, None, "float32", channels_last=False)


def test_where_the_memory_does_not_suffice_after_all_coalitions_go_in_halves(monkeypatch):
    """A GPU may be fuller than it was when the strategy was chosen."""
    torch.manual_seed(0)
    model = build("mlp", (4, 4, 1), 3).to(DEVICE)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (12, 4, 4, 1), np.uint8), np.arange(12) % 3
    m0 = to_vector(model)
    updates = rng.normal(0, 0.1, (3, len(m0))).astype(np.float32)
    game = Evaluator(model, x, y, ["accuracy", "brier"]).game(m0, updates, WEIGHTS)
    whole, real, sizes = game.values(np.arange(8)), type(game.strategy).__call__, []

    def full(self, rows, most=2):
        sizes.append(len(rows))
        if len(rows) > most:
            raise torch.cuda.OutOfMemoryError("full")
        return real(self, rows)

    monkeypatch.setattr(type(game.strategy), "__call__", full)
    np.testing.assert_allclose(game.values(np.arange(8)), whole, atol=1e-6)  # other sizes, other kernels
    assert max(sizes) > 2 >= min(sizes)
    monkeypatch.setattr(type(game.strategy), "__call__", lambda self, rows: full(self, rows, most=0))
    with pytest.raises(InputError, match="one coalition does not fit into the"):
        game.values(np.arange(8))
