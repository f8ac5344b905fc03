"""Quick ways to evaluate and to train many models agree with the plain ones."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from device import DeviceEvaluations, contribution_on, models_on, updates_on
from quick_coalitions import QuickEvaluator, retrained
from side_by_side import Stack, StackedTraining, train_many
from strategies import Evaluation, EvaluationSet, Single, Stacked, Strategy, choose
from torch import nn

from fedmerit.errors import BoundError, DataError, InputError
from fedmerit.protocol.outcome import Contribution, Outcome, coalition_models
from fedmerit.simulation import models
from fedmerit.simulation.analysis import Evaluator, Truth
from fedmerit.simulation.models import build, load_vector, to_vector
from fedmerit.simulation.run import Rehearsal
from fedmerit.simulation.setup import prepare
from fedmerit.simulation.training import TrainingSettings, loss_of, train
from fedmerit.simulation.utilities import resolve_all
from fedmerit.storage.run_folder import Folder
from networks import ALL, close, game_of, model_named, network, pool, updates_for
from networks import client_data as data
from tiny import tiny

DEVICE = os.environ.get("FEDMERIT_TEST_DEVICE", "cpu")


def ready(x, y, names, batch=12):
    return EvaluationSet(models.prepare(x, DEVICE), torch.from_numpy(y).to(DEVICE), resolve_all(names), batch)


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


# ----------------------------------------------------------------------- models that are made on the device


CPU = torch.device("cpu")


@pytest.mark.parametrize("game", ["additive", "renormalised"])
@pytest.mark.parametrize(("weight", "total"), [(1.0, 9.0), (13.0, 57.0), (0.3, 1.7)])
def test_the_two_models_of_a_member_are_those_that_numpy_makes(game, weight, total):
    rng, size = np.random.default_rng(5), 70_001  # more than a block of numpy's
    m0, model = rng.normal(size=(2, size)).astype(np.float32)
    own = Contribution(rng.integers(-(2**31), 2**31, size, np.int32), 0.7e-9)
    outcome = Outcome(1, np.zeros(0, np.uint32), ("A", "B", "C"), None, "", "", model, total)
    expected = coalition_models(game, m0, outcome, own, weight)
    given = torch.as_tensor(m0), torch.as_tensor(model), contribution_on(CPU, own)
    for found, one in zip(models_on(game, *given, weight, total), expected, strict=True):
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found.numpy(), one)
    if game == "renormalised":
        with pytest.raises(BoundError, match="the renormalised game needs 0 < w_i < W"):
            models_on(game, *given, total, total)


def test_updates_before_a_sum_are_those_that_numpy_makes():
    start, *trained = np.random.default_rng(6).normal(size=(8, 1000)).astype(np.float32)
    for found, model in zip(updates_on(CPU, start, trained), trained, strict=True):
        np.testing.assert_array_equal(found.numpy(), (model - start) / np.float32(7))


@pytest.mark.parametrize("game", ["additive", "renormalised"])
@pytest.mark.parametrize("masks", [True, False])
def test_a_run_whose_models_are_made_on_the_device_has_the_same_scores(tmp_path, game, masks):
    config = tiny(f"scoring.game={game}", "training.weights=secret", "training.rounds=1")
    config = replace(config, secure_aggregation=replace(config.secure_aggregation, enabled=masks))
    reports, seen = [], []

    class Spy:
        def summed(self, plain):
            seen.append(plain)
            each = [plain.update(name) for name in plain.outcome.included]
            np.testing.assert_array_equal(plain.updates.numpy(), np.stack(each))

    for path in ("numpy", "device"):
        with Folder(tmp_path / path, config) as folder:
            federation = prepare(config, pool_key=bytes(32))
            rehearsal = Rehearsal(config, folder, federation=federation, analyses=[Spy()])
            if path == "device":
                on_device = DeviceEvaluations(federation.evaluate, CPU)
                rehearsal.coordinator.evaluate.of_member = on_device.of_member
            rehearsal.run()
            reports.append(rehearsal.recorder.rounds[0].reports)
    assert on_device._round is not None  # it was used
    assert len(seen) == 2
    assert len(reports[0]) == 4
    for name, one in reports[0].items():
        assert one.measured == reports[1][name].measured
        assert one.cosine == pytest.approx(reports[1][name].cosine, rel=1e-9)


# --------------------------------------------------------------------------- models that train side by side


SETTINGS = TrainingSettings(local_epochs=2, batch_size=4)


class Patches(nn.Module):
    """A user's model: patches as tokens, self-attention, dropout, a parameter that is never used."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 2, stride=2)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = self.norm(tokens + self.attend(tokens, tokens, tokens, need_weights=False)[0])
        return self.head(self.drop(tokens.mean(1)))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 3)

    def forward(self, x):
        y = self.layer(x.flatten(1))
        return y if y.sum() > 0 else 2 * y


class Mixing(Branching):
    def forward(self, x):
        y = self.layer(x.flatten(1))
        return y - y.mean(0)


class Counting(Branching):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return self.layer(x.flatten(1))


class Waiting(Branching):
    """A user's model that waits for the device, which no CUDA graph can record."""

    def forward(self, x):
        if x.is_cuda:
            torch.cuda.synchronize()
        return self.layer(x.flatten(1))


OWN = {
    "attention": Patches, "branching": Branching, "mixing": Mixing, "counting": Counting, "waiting": Waiting
}  # fmt: skip


def one_named(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return (network(name, 1) or OWN[name]()).to(DEVICE)


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn-pool", "resnet-group", "attention", "waiting"])
def test_stacked_equals_one_after_another(name):
    sizes = [9, 3, 16, 1, 8]  # short last batches, fewer samples than a batch, a single one
    model = one_named(name)
    start = to_vector(model)
    loop = train_many(model, start, data(sizes), SETTINGS, range(5), method="loop")
    stacked = train_many(model, start, data(sizes), SETTINGS, range(5), method="stacked")
    assert (loop.method, stacked.method) == ("loop", "stacked")
    if name == "waiting" and DEVICE != "cpu":
        assert "cannot be recorded as a CUDA graph" in stacked.note
    else:
        assert stacked.note is None
    for a, b in zip(loop.vectors, stacked.vectors, strict=True):
        assert not np.array_equal(a, start)
        close(a, b)


def test_each_client_may_start_elsewhere_and_frozen_parameters_stay():
    model = build("mlp", (6, 6, 1), 3).to(DEVICE)
    model[1].weight.requires_grad_(False)
    starts = [to_vector(build("mlp", (6, 6, 1), 3, seed=s)) for s in range(3)]
    both = [
        train_many(model, starts, data([5, 6, 7]), SETTINGS, [1, 2, 3], method=method).vectors
        for method in ("loop", "stacked")
    ]
    for start, a, b in zip(starts, *both, strict=True):
        close(a, b)
        assert np.array_equal(b[: 36 * 128], start[: 36 * 128])


@pytest.mark.parametrize("name", ["cnn", "attention"])
def test_many_models_on_the_batches_of_one_client(name):
    model = one_named(name)
    clients = data([10, 3, 17])
    starts = torch.from_numpy(np.stack([to_vector(model) * scale for scale in (1.0, 0.9, 1.1)]))
    starts = starts.to(DEVICE)
    sets = [(torch.from_numpy(x).to(DEVICE), torch.from_numpy(y).to(DEVICE)) for x, y in clients]
    stack = Stack(model, 3, sets, SETTINGS)
    for i, seed, few in ((0, 5, 2), (1, 6, 3), (2, 7, 1), (0, 5, 3)):  # one stack, one client after another
        trained = stack.train(starts[:few], [i] * few, [seed] * few)
        for start, vector in zip(starts[:few], trained, strict=True):
            load_vector(model, start)
            train(model, *clients[i], SETTINGS, seed=seed)
            close(to_vector(model), vector.cpu().numpy())
    assert bool(stack.graphs) == (DEVICE != "cpu")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet-batch", "has BatchNorm, which normalises by the batch"),
        ("branching", "cannot be stacked: "),
        ("mixing", "lets the samples of a batch influence each other"),
        ("counting", "changes its buffer 'seen' while training"),
    ],
)
def test_a_model_that_cannot_be_stacked_says_so_and_trains_one_by_one(name, reason):
    model = one_named(name)
    start = to_vector(model)
    with pytest.raises(InputError, match=f"the model {reason}"):
        train_many(model, start, data([6, 5]), SETTINGS, [1, 2], method="stacked")
    after = train_many(model, start, data([6, 5]), SETTINGS, [1, 2])
    fresh = train_many(one_named(name), start, data([6, 5]), SETTINGS, [1, 2])
    assert np.array_equal(after.vectors, fresh.vectors)  # the attempt has not harmed the model
    assert after.method == "loop"
    assert (after.note is None) == (DEVICE == "cpu")


def test_what_a_stack_cannot_train_is_refused():
    model = one_named("mlp")
    start, ((x, y), one) = to_vector(model), data([4, 4])
    with pytest.raises(DataError):
        train_many(model, start, [one, (x, y * 0 + 7)], SETTINGS, [1, 2], method="stacked")
    squares = replace(SETTINGS, loss=loss_of("mse"))
    with pytest.raises(InputError, match="trains on the loss 'mse'"):
        train_many(model, start, [one, one], squares, [1, 2], method="stacked")
    with pytest.raises(InputError, match="has no parameter to train"):
        train_many(model.requires_grad_(False), start, [one, one], SETTINGS, [1, 2], method="stacked")


def test_members_of_a_rehearsal_and_their_solo_models_train_side_by_side():
    federation = prepare(tiny("scoring.solo=true"))
    found = []
    for stacked in (False, True):
        local = StackedTraining(federation, stacked=stacked)
        local.solo = dict.fromkeys(federation.names, federation.first)
        models = local.train(1, federation.names, federation.first, federation.first, lambda *_: None)
        found.append([*models.values(), *local.solo.values()])
    for a, b in zip(*found, strict=True):
        close(a, b)


@pytest.mark.parametrize("size", [2, 64])
def test_coalitions_retrain_in_stacks_as_one_after_another(tmp_path, size):
    federation = prepare(tiny("scoring.truth=['shapley']"))
    truth, masks, told = Truth(federation, tmp_path / "tables"), [0, 3, 7, 15], []
    slow = dict(truth.retrained(masks, lambda *_: None))
    seeds = [[federation.seed("train", number, name) for name in federation.names] for number in (1, 2)]
    sets = [(client.x, client.y) for client in federation.clients]
    quick = dict(
        retrained(
            federation.network, slow[0], sets, federation.training, seeds, truth.shares, masks,
            method="stacked", stack=size, progress=lambda done, total: told.append((done, total)),
        )
    )  # fmt: skip
    assert list(quick) == masks
    assert told[-1] == (18, 18)
    for mask in masks:
        close(slow[mask].numpy(), quick[mask].numpy())
