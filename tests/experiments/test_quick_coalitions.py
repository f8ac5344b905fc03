"""Quick ways to evaluate coalition models agree with the plain one."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from quick_coalitions import QuickEvaluator
from strategies import Evaluation, EvaluationSet, Single, Stacked, Strategy, choose, sample
from torch import nn

from fedmerit.errors import InputError
from fedmerit.simulation.analysis import Evaluator
from fedmerit.simulation.models import build, flatten, prepare, to_vector
from fedmerit.simulation.utilities import resolve_all
from networks import ALL, Branching, game_of, model_named, pool, updates_for

DEVICE = os.environ.get("FEDMERIT_TEST_DEVICE", "cpu")


def ready(x, y, names, batch=12):
    return EvaluationSet(prepare(x, DEVICE), torch.from_numpy(y).to(DEVICE), resolve_all(names), batch)


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-pool", "resnet-group", "resnet-batch", "attention"])
@pytest.mark.parametrize("kind", ["additive", "renormalised"])
def test_one_by_one_and_stacked_equal_the_plain_evaluation(name, kind):
    model = model_named(name).to(DEVICE)
    x, y = pool(shape=(20, 20, 2) if "resnet" in name else (6, 6, 1))
    m0, _, updates = updates_for(model)
    game = game_of(m0, updates, kind=kind, device=DEVICE)
    plain = Evaluator(model, x, y, ALL).values(game, np.arange(8))
    quick = QuickEvaluator(model, x, y, ALL)
    np.testing.assert_allclose(quick.values(game, np.arange(8)), plain, rtol=1e-4, atol=2e-6)
    same = dict.fromkeys(ALL, "0x0.0p+0")
    assert quick.how == {"method": "single float32", "precision": "float32", "deviation": same}
    assert (quick.record.checked, quick.record.coalitions) == (0, 8)
    quick.exact = Stacked(model, quick.pool(3))
    np.testing.assert_allclose(quick.values(game, np.arange(8)), plain, rtol=1e-4, atol=2e-6)
    assert np.array_equal(to_vector(model), m0)


def test_many_batches_and_chunks_give_the_same():
    model = model_named("cnn").to(DEVICE)
    (x, y), (m0, _, updates) = pool(40), updates_for(model)
    names, game = ["brier", "balanced-accuracy"], game_of(m0, updates, device=DEVICE)
    whole = QuickEvaluator(model, x, y, names)
    tight = QuickEvaluator(model, x, y, names, memory_limit=whole.need(3) + 9 * whole.per_image)
    told = []
    plain = whole.values(game, np.arange(8))
    values = tight.values(game, np.arange(8), lambda done, total: told.append((done, total)))
    assert (whole.record.batch, tight.record.batch) == (40, 4)
    np.testing.assert_allclose(values, plain, atol=1e-6)
    assert told[-1] == (8, 8)
    assert len(told) > 1
    with pytest.raises(InputError, match=r"8 coalitions of this model need .* MB, 0 MB may be used"):
        QuickEvaluator(model, x, y, names, memory_limit=1000).values(game, np.arange(8))


def test_the_chosen_strategy_agrees_with_float32_and_says_what_was_tried():
    model = model_named("cnn").to(DEVICE)
    (x, y), (m0, _, updates) = pool(), updates_for(model)
    rows = game_of(m0, updates, device=DEVICE).vectors(np.arange(8))
    exact = Single(model, ready(x, y, ["expected-accuracy", "brier"]))
    settings = {"total": 512, "effort": "none", "stack": 64}
    best, record = choose(model, exact, lambda s: s.packing.pack(rows), tolerance=2e-2, **settings)
    ways = {"single float32", "single float16", "single float16, channels last"}
    assert ways | {"stacked by 8 float16", "stacked by 64 tf32"} < set(record.tried)
    values = best(best.packing.pack(rows))
    assert (values - exact(exact.packing.pack(rows))).abs().max() <= 2e-2
    assert record.precision == best.precision
    _, strict = choose(model, exact, lambda s: s.packing.pack(rows), tolerance=1e-7, **settings)
    assert "strays from float32 by" in strict.tried["single float16"]
    assert "bfloat16" in " ".join(strict.tried)
    assert strict.precision in ("float32", "tf32")  # on a CPU the same arithmetic


def test_half_precision_out_of_range_is_repaired_in_float32(monkeypatch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).to(DEVICE)
    x, y = pool()
    m0, updates = to_vector(model), np.zeros((7, 111), dtype=np.float32)
    updates[2, :36] = 7e4  # beyond float16
    game, masks = game_of(m0, updates, [1.0] * 7, device=DEVICE), np.arange(128)
    quick = QuickEvaluator(model, x, y, ["accuracy"], tolerance=np.inf)
    half = Single(model, ready(x, y, ["accuracy"]), "float16")
    record = Evaluation("single float16", "float16", {"accuracy": 0.0}, 12)
    monkeypatch.setattr(quick, "_faster", lambda game, total: (half, record))
    values = quick.values(game, masks)
    assert not np.isfinite(quick.unrepaired(half, game, masks)).all()
    assert values.tolist() == Evaluator(model, x, y, ["accuracy"]).values(game, masks).tolist()


def rounds_of_seven(model, scales, seed=5):
    """M0 and seven updates a round, of these sizes."""
    m0, rng = to_vector(model), np.random.default_rng(seed)
    for scale in scales:
        yield m0, (scale * rng.standard_normal((7, len(m0)))).astype(np.float32)


def with_bfloat16(model, x, y, tolerance=2e-3):
    """An evaluator that chose bfloat16 in some earlier round."""
    quick = QuickEvaluator(model, x, y, ["neg-loss", "accuracy"], tolerance=tolerance)
    strategy = Single(model, ready(x, y, ["neg-loss", "accuracy"]), "bfloat16")
    deviation = {"neg-loss": 1e-9, "accuracy": 1e-9}
    quick.chosen = strategy, Evaluation("single bfloat16", "bfloat16", deviation, 12, 16)
    return quick


def test_every_round_records_its_own_deviation_from_float32():
    model = model_named("mlp").to(DEVICE)
    x, y = pool()
    quick, deviations, masks = with_bfloat16(model, x, y, tolerance=1.0), [], np.arange(128)
    plain = Evaluator(model, x, y, ["neg-loss", "accuracy"])
    for given in rounds_of_seven(model, (1e-3, 0.3)):
        game = game_of(*given, [1.0] * 7, device=DEVICE)
        away = np.abs(quick.values(game, masks) - plain.values(game, masks))[sample(7)].max(0)
        assert (quick.how["method"], quick.record.checked) == ("single bfloat16", 16)
        assert [*quick.record.deviation.values()] == pytest.approx(away.tolist(), abs=1e-6)
        deviations.append(quick.record.deviation["neg-loss"])
    assert deviations[1] > 10 * deviations[0] > 0


def test_a_round_that_strays_too_far_is_not_evaluated_that_way():
    model = model_named("mlp").to(DEVICE)
    x, y = pool()
    quick, masks = with_bfloat16(model, x, y), np.arange(128)
    fine, coarse, after = (
        game_of(*given, [1.0] * 7, device=DEVICE) for given in rounds_of_seven(model, (1e-3, 0.3, 1e-3))
    )
    quick.values(fine, masks)
    assert quick.record.precision == "bfloat16"
    values = quick.values(coarse, masks)
    plain = Evaluator(model, x, y, ["neg-loss", "accuracy"]).values(coarse, masks)
    assert np.abs(values - plain).max() <= 2e-3
    if DEVICE == "cpu":  # a GPU may find TF32 or float16 close enough
        assert (quick.record.method, quick.record.deviation["neg-loss"]) == ("single float32", 0)
    quick.values(after, masks)
    assert max(quick.record.deviation.values()) <= 2e-3


def test_comparing_a_round_with_float32_takes_a_sample_and_a_short_round_is_float32(monkeypatch):
    model = model_named("mlp").to(DEVICE)
    x, y = pool()
    quick = with_bfloat16(model, x, y)
    game = game_of(*next(rounds_of_seven(model, (1e-3,))), [1.0] * 7, device=DEVICE)
    counts, real = {"float32": 0, "bfloat16": 0}, Single._sums

    def counting(self, rows):
        counts[self.precision] += len(rows)
        return real(self, rows)

    monkeypatch.setattr(Single, "_sums", counting)
    quick.values(game, np.arange(128))
    assert counts == {"float32": 16, "bfloat16": 16 + 128}
    counts.update(float32=0, bfloat16=0)
    quick.values(game, np.arange(64))
    assert (counts, quick.record.checked) == ({"float32": 64, "bfloat16": 0}, 0)


def test_stacked_needs_no_more_than_vmap_can_do():
    model = Branching().to(DEVICE)
    x, y = pool()
    test = ready(x, y, ["brier"])
    rows = flatten(model)[None].expand(4, -1)
    exact = Single(model, test)
    settings = {"total": 512, "tolerance": 1e-2, "effort": "none", "stack": 8}
    _, record = choose(model, exact, lambda s: s.packing.pack(rows), **settings)
    assert "data-dependent control flow" in record.tried["stacked by 8 tf32"]
    assert record.method.startswith("single")
    with pytest.raises(RuntimeError):
        Stacked(model, test)(exact.packing.pack(rows))


def test_where_the_memory_does_not_suffice_after_all_coalitions_go_in_halves(monkeypatch):
    """A GPU may be fuller than it was when the strategy was chosen."""
    model = build("mlp", (6, 6, 1), 3).to(DEVICE)
    (x, y), (m0, _, updates) = pool(), updates_for(model)
    game, quick = game_of(m0, updates, device=DEVICE), QuickEvaluator(model, x, y, ["accuracy", "brier"])
    whole, real, sizes = quick.values(game, np.arange(8)), Strategy.__call__, []

    def full(self, rows, most=2):
        sizes.append(len(rows))
        if len(rows) > most:
            raise torch.cuda.OutOfMemoryError("full")
        return real(self, rows)

    monkeypatch.setattr(Strategy, "__call__", full)
    np.testing.assert_allclose(quick.values(game, np.arange(8)), whole, atol=1e-6)
    assert max(sizes) > 2 >= min(sizes)
    monkeypatch.setattr(Strategy, "__call__", lambda self, rows: full(self, rows, most=0))
    with pytest.raises(InputError, match="one coalition does not fit into the"):
        quick.values(game, np.arange(8))
