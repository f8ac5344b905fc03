"""Ground truth beside a run, and coalition models, against brute force; refused where it cannot be."""

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from fedmerit.errors import ConfigError, ReportError, StoreError
from fedmerit.report.facts import Facts
from fedmerit.report.source import read_source
from fedmerit.report.terminal import print_truth
from fedmerit.scoring.ground_truth import agreement, shapley
from fedmerit.scoring.types import Table
from fedmerit.simulation import setup
from fedmerit.simulation.analysis import RETRAINING, Evaluator, Truth
from fedmerit.simulation.models import build, load_vector, to_vector
from fedmerit.simulation.plan import plan
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.simulation.setup import prepare, seed_for
from fedmerit.simulation.training import trained
from fedmerit.simulation.utilities import evaluate
from fedmerit.storage.run_folder import Folder
from fedmerit.verify import verify_folder
from networks import ALL, WEIGHTS, game_of, model_named, module_of, pool, updates_for
from raising import raises
from runs import bodies_of
from tiny import received, tiny

BOTH = "scoring.truth=['mr-shapley', 'shapley']"


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth") / "run"
    return run(tiny(BOTH), folder), folder


def test_the_run_is_marked_in_scores_ledger_and_verification(analysed):
    content, folder = analysed
    assert content["analysis"] is True
    assert "mr-shapley" in bodies_of(folder, "run")[0]["terms"]["config"]
    assert [body["coalitions"] for body in bodies_of(folder, "analysis")] == [16, 16]
    assert any(line.startswith("analysis:") for line in verify_folder(folder))


def test_mr_sv_is_the_mean_of_the_rounds_own_shapley_values(analysed):
    content, folder = analysed
    assert "se_MR-SV" not in content["truth"]  # nothing was sampled
    for utility, holder in (("expected-accuracy", content), *content["companions"].items()):
        found = []
        for number in (1, 2):
            with np.load(folder / "tables" / f"round-{number:04d}.npz") as arrays:
                table = Table(arrays[f"table/{utility}"], tuple(arrays["clients"].tolist()))
            found.append(shapley(table).values)
            reports = holder["rounds"][number - 1]["reports"]
            np.testing.assert_allclose(table.values[[1, 2, 4, 8]], reports["alone"], atol=1e-6)
            np.testing.assert_allclose(table.values[[14, 13, 11, 7]], reports["without"], atol=1e-6)
            assert table.values[0] == pytest.approx(reports["empty"], abs=1e-6)
            assert table.values[15] == pytest.approx(reports["grand"], abs=1e-6)
        np.testing.assert_allclose(holder["truth"]["MR-SV"], np.mean(found, axis=0))
        np.testing.assert_allclose(holder["truth"]["rounds"], found)
    assert agreement(content["cumulative"]["ALPHA"], content["truth"]["MR-SV"]).pearson > 0.99


def test_the_shapley_value_of_the_last_round_needs_the_coalitions_of_that_round_only(
    analysed, tmp_path, capsys
):
    content = run(tiny("scoring.truth=['round-shapley']"), tmp_path / "last")
    assert sorted(path.name for path in (tmp_path / "last" / "tables").iterdir()) == ["round-0002.npz"]
    for utility, part in content["companions"].items():
        assert set(part["truth"]) == {"ROUND-SV"}
        np.testing.assert_allclose(
            part["truth"]["ROUND-SV"], analysed[0]["companions"][utility]["truth"]["rounds"][1], atol=1e-6
        )
    assert any(line.startswith("analysis:") for line in verify_folder(tmp_path / "last"))
    print_truth(Console(width=200), Facts(read_source(tmp_path / "last")))
    last = content["rounds"][-1]["scores"]["FP"]
    near = agreement(last, content["truth"]["ROUND-SV"]).spearman
    printed = capsys.readouterr().out
    assert f"FP {near:.2f}" in printed
    assert "Spearman of the last round's scores" in printed
    assert "paper's table as its authors' scripts compute it (" in printed
    print_truth(Console(width=200), Facts(read_source(analysed[1])))
    printed = capsys.readouterr().out
    assert "scripts compute it is missing" in printed  # its truth was not computed
    assert "Spearman of scores summed over rounds" in printed


def test_the_retrained_coalition_of_two_is_what_two_members_train_to(analysed):
    """Slow path: clients 0 and 2 alone, two rounds, averaged, with the run's seeds."""
    _, folder = analysed
    config = tiny()
    federation = prepare(config)
    model, pair = federation.first, [federation.clients[0], federation.clients[2]]
    for number in (1, 2):
        local = [
            trained(
                federation.network, model, client.x, client.y, federation.training,
                seed_for(config, "train", number, client.name),
            )
            for client in pair
        ]  # fmt: skip
        model = np.mean(np.stack(local, dtype=np.float64), axis=0).astype(np.float32)
    value = np.mean(federation.evaluate(model, federation.pool.slice(2))["expected-accuracy"])
    with np.load(folder / "tables" / "retrained.npz") as arrays:
        assert arrays["table/expected-accuracy"][0b101] == pytest.approx(value, abs=1e-5)


def test_retraining_goes_on_after_a_kill_and_cuts_off_half_a_line(analysed, tmp_path):
    content, _ = analysed
    run(tiny(BOTH, "training.rounds=2"), tmp_path / "run")
    log = tmp_path / "run" / "tables" / RETRAINING
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:5]) + lines[5][:10])  # killed while writing the sixth
    (tmp_path / "run" / "tables" / "retrained.npz").unlink()
    seen = []
    again = run(tiny(BOTH), tmp_path / "run", resume=True, watch=lambda step: seen.append(step))
    assert again["truth"]["SV"] == content["truth"]["SV"]
    left = sum(mask.bit_count() for mask in range(5, 16))  # nothing is trained twice
    steps = [(step.done, step.total) for step in seen if step.stage == "retrain"]
    assert steps == [(done, 2 * left) for done in range(2 * left + 1)]
    assert log.read_bytes().splitlines(keepends=True) == lines
    log.write_bytes(b"not json\n")
    (tmp_path / "run" / "tables" / "retrained.npz").unlink()
    with pytest.raises(StoreError, match=r"retraining.jsonl: line 1 cannot be read"):
        run(tiny(BOTH), tmp_path / "run", resume=True)


def test_a_coalition_that_diverges_in_retraining_is_named(tmp_path):
    federation = prepare(tiny("scoring.truth=['shapley']"))
    (one, two, *others) = federation.clients
    bad = np.full(two.x.shape, np.inf, dtype=np.float32)
    truth = Truth(replace(federation, clients=(one, replace(two, x=bad), *others)), tmp_path / "tables")
    with pytest.raises(ReportError, match=r"coalition \{client-1\}: .* not finite"):
        truth.retrain(lambda done, total: None)
    assert len((tmp_path / "tables" / RETRAINING).read_text().splitlines()) == 2  # {} and {client-0}


def sampled(config, path, budget):
    """A run whose Shapley values are sampled for more than three members."""
    with Folder(path, config) as folder:
        federation = prepare(config)
        truth = Truth(federation, path / "tables", most_exact=3, budget=budget)
        return Rehearsal(config, folder, federation=federation, truth=truth).run()


def test_many_members_are_sampled_with_standard_errors(tmp_path):
    sizes = ("partition.clients=7", f"partition.sizes={[20] * 7}")
    config = tiny("scoring.truth=['mr-shapley']", "participation.away={client-1=[2]}", *sizes)
    content = sampled(config, tmp_path / "run", budget=110)
    truth = content["truth"]
    gains = [one["reports"]["grand"] - one["reports"]["empty"] for one in content["rounds"]]
    assert sum(truth["MR-SV"]) == pytest.approx(np.mean(gains), abs=1e-6)
    # the first round is sampled: 110 of 128 coalitions; the second, of six members, needs but 64
    found = []
    for number in (1, 2):
        with np.load(tmp_path / "run" / "tables" / f"round-000{number}.npz") as arrays:
            found.append(dict(zip(arrays["clients"], arrays["stderr/expected-accuracy"], strict=True)))
    assert min(found[0].values()) > 0
    assert set(found[1].values()) == {0.0}
    # independent rounds: squares add up, and the mean is over two
    assert truth["se_MR-SV"] == pytest.approx([found[0][f"client-{i}"] / 2 for i in range(7)])
    assert "se_MR-SV" in content["companions"]["accuracy"]["truth"]
    assert verify_folder(tmp_path / "run")


def test_coalitions_of_a_sample_are_evaluated_in_one_go_and_once(tmp_path, monkeypatch):
    asked, plain = [], Evaluator.values

    def values(self, game, masks, tell=None):
        asked.append(masks.tolist())
        return plain(self, game, masks, tell)

    monkeypatch.setattr(Evaluator, "values", values)
    content = sampled(tiny("scoring.truth=['mr-shapley']"), tmp_path / "run", budget=14)
    assert set(content["truth"]) == {"MR-SV", "COS-MODEL", "rounds"}  # too few for standard errors
    drawn = [body["coalitions"] for body in bodies_of(tmp_path / "run", "analysis")]
    assert [len(masks) for masks in asked] == [len(set(masks)) for masks in asked] == drawn


def test_truth_in_the_renormalised_game_and_with_an_absent_member(analysed, tmp_path):
    settings = ("scoring.game=renormalised", "participation.away={client-1=[2]}")
    content = run(tiny("scoring.truth=['mr-shapley']", *settings), tmp_path / "run")
    first, second = content["truth"]["rounds"]
    assert second[1] is None
    assert content["truth"]["MR-SV"][1] == pytest.approx(first[1] / 2)
    with np.load(tmp_path / "run" / "tables" / "round-0001.npz") as arrays:
        table, reports = arrays["table/expected-accuracy"], content["rounds"][0]["reports"]
    np.testing.assert_allclose(table[[1, 2, 4, 8]], reports["alone"], atol=1e-6)
    np.testing.assert_allclose(table[[14, 13, 11, 7]], reports["without"], atol=1e-6)
    ours = analysed[0]["rounds"][0]["reports"]
    assert (ours["empty"], ours["grand"]) == (reports["empty"], reports["grand"])  # the games agree on both
    # U_i is a quarter of d_i: alone in the renormalised game moves four times as far
    near, far = (np.abs(np.array(one["alone"]) - one["empty"]).mean() for one in (ours, reports))
    assert far > near


def test_what_cannot_be_retrained_is_refused_before_anything_runs(tmp_path):
    sizes = f"partition.sizes={[20] * 17}"
    for settings in (("training.weights=scores",), ("partition.clients=17", sizes)):
        with raises(ConfigError, setting="scoring.truth"):
            run(tiny("scoring.truth=['shapley']", *settings), tmp_path / "run")
        assert not [*tmp_path.glob("run/tables/*")]


def test_the_plan_counts_what_the_run_then_does(tmp_path, monkeypatch):
    config = tiny("scoring.solo=true", "participation.away={client-1=[2]}", "model.name=mlp")
    expected = plan(config, calibrate=False)
    assert [cost.models for cost in expected.costs] == [(2 * 4 + 2) + (2 * 3 + 1), 4 + 3]
    assert expected.local_trainings == 7
    assert expected.pool == 50
    assert expected.flower_models == 6
    count = []
    original = setup.Federation.evaluate
    monkeypatch.setattr(setup.Federation, "evaluate", lambda *a: count.append(1) or original(*a))
    with received() as transcript:
        run(config, tmp_path / "run")
    sent = sum(len(data) for _, name, data in transcript if name == "client-0")
    assert len(count) == sum(cost.models for cost in expected.costs)
    assert expected.bytes_up == pytest.approx(sent / 2, rel=0.02)


def test_the_plan_of_ground_truth(brief_plans):
    found = plan(tiny(BOTH))
    by_name = {cost.name: cost for cost in found.costs}
    assert by_name["MR-SV (analysis)"].models == 2 * 16
    assert by_name["retrained SV (analysis)"].models == 16
    assert by_name["retrained SV (analysis)"].trainings == 4 * 8 * 2  # a member is in half of 16 coalitions
    assert all(cost.minutes > 0 for cost in found.costs)
    assert found.resolution.gaps[0] < found.resolution.gaps[1]


# ----------------------------------------------------------------------------------------- coalition models


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
