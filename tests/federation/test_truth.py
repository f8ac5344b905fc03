"""Ground truth beside a run: against brute force, marked, resumable, and refused where it cannot be."""

import json

import numpy as np
import pytest
from rich.console import Console
from tiny import tiny

from fedmerit.errors import ConfigError, StoreError
from fedmerit.ledger.chain import Ledger
from fedmerit.report.terminal import print_truth
from fedmerit.scoring.agreement import agreement
from fedmerit.scoring.files import read
from fedmerit.scoring.ground_truth import shapley
from fedmerit.scoring.types import Table
from fedmerit.simulation.analysis import Truth
from fedmerit.simulation.coalitions import Game
from fedmerit.simulation.plan import plan
from fedmerit.simulation.run import Rehearsal, run
from fedmerit.simulation.setup import prepare, seed_for
from fedmerit.simulation.training import train_many
from fedmerit.storage.run_folder import Folder
from fedmerit.verify import verify_folder

BOTH = "scoring.truth=['mr-shapley', 'shapley']"


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth") / "run"
    return run(tiny(BOTH), folder), folder


def test_the_run_is_marked_in_scores_ledger_and_verification(analysed):
    content, folder = analysed
    assert content["analysis"] is True
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        assert next(ledger.records("run")).body["analysis"] is True
        assert [record.body["coalitions"] for record in ledger.records("analysis")] == [16, 16]
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
    print_truth(Console(width=200), content, read(tmp_path / "last" / "scores.json"))
    last = content["rounds"][-1]["scores"]["FP"]
    near = agreement(last, content["truth"]["ROUND-SV"]).spearman
    assert f"FP {near:.2f}" in capsys.readouterr().out


def test_alpha_tracks_the_rounds_shapley_value_of_a_smooth_utility(analysed):
    content, _ = analysed
    assert agreement(content["cumulative"]["ALPHA"], content["truth"]["MR-SV"]).pearson > 0.99


def test_the_retrained_coalition_of_two_is_what_two_members_train_to(analysed):
    """Slow path: clients 0 and 2 alone, two rounds, averaged, with the run's seeds."""
    _, folder = analysed
    config = tiny()
    federation = prepare(config)
    model, pair = federation.first, [federation.clients[0], federation.clients[2]]
    for number in (1, 2):
        seeds = [seed_for(config, "train", number, client.name) for client in pair]
        data = [(client.x, client.y) for client in pair]
        trained = train_many(federation.network, model, data, federation.training, seeds).vectors
        model = np.mean(np.stack(trained, dtype=np.float64), axis=0).astype(np.float32)
    value = np.mean(federation.evaluate(model, federation.pool.slice(2))["expected-accuracy"])
    with np.load(folder / "tables" / "retrained.npz") as arrays:
        assert arrays["table/expected-accuracy"][0b101] == pytest.approx(value, abs=1e-5)


def test_retraining_goes_on_after_a_kill_and_cuts_off_half_a_line(analysed, tmp_path):
    content, _ = analysed
    run(tiny(BOTH, "training.rounds=2"), tmp_path / "run")
    log = tmp_path / "run" / "tables" / "retraining.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:5]) + lines[5][:10])  # killed while writing the sixth
    (tmp_path / "run" / "tables" / "retrained.npz").unlink()
    seen = []
    again = run(tiny(BOTH), tmp_path / "run", resume=True, watch=lambda step: seen.append(step))
    assert again["truth"]["SV"] == pytest.approx(content["truth"]["SV"], abs=1e-6)
    how = json.loads((tmp_path / "run" / "tables" / "retraining.json").read_text())
    assert how["known"] == 5
    assert any(step.stage == "retrain" for step in seen)
    log.write_bytes(b"not json\n")
    (tmp_path / "run" / "tables" / "retrained.npz").unlink()
    with pytest.raises(StoreError, match=r"retraining.jsonl: line 1 cannot be read"):
        run(tiny(BOTH), tmp_path / "run", resume=True)


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


def test_a_sample_too_small_for_standard_errors_has_none(tmp_path):
    config = tiny("scoring.truth=['mr-shapley']", "training.rounds=1")
    content = sampled(config, tmp_path / "run", budget=14)
    assert set(content["truth"]) == {"MR-SV", "COS-MODEL", "rounds"}


def test_coalitions_of_a_sample_are_evaluated_in_one_go_and_once(tmp_path, monkeypatch):
    asked, plain = [], Game.values

    def values(self, masks, progress=None):
        asked.append(masks.tolist())
        return plain(self, masks, progress)

    monkeypatch.setattr(Game, "values", values)
    sampled(tiny("scoring.truth=['mr-shapley']"), tmp_path / "run", budget=14)
    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        drawn = [record.body["coalitions"] for record in ledger.records("analysis")]
    assert [len(masks) for masks in asked] == [len(set(masks)) for masks in asked] == drawn


def test_truth_in_the_renormalised_game_and_with_an_absent_member(tmp_path):
    content = run(
        tiny(
            "scoring.truth=['mr-shapley']", "scoring.game=renormalised", "participation.away={client-1=[2]}"
        ),
        tmp_path / "run",
    )
    first, second = content["truth"]["rounds"]
    assert second[1] is None
    assert content["truth"]["MR-SV"][1] == pytest.approx(first[1] / 2)


def test_what_cannot_be_retrained_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="retrains with fixed weights"):
        run(tiny("scoring.truth=['shapley']", "training.weights=scores"), tmp_path / "a")
    sizes = f"partition.sizes={[20] * 17}"
    with pytest.raises(ConfigError, match=r'"shapley" trains 2\^N models; at most 16 members, got 17'):
        run(tiny("scoring.truth=['shapley']", "partition.clients=17", sizes), tmp_path / "b")


def test_the_plan_counts_what_the_run_then_does(tmp_path, monkeypatch):
    from fedmerit.simulation import setup

    config = tiny("scoring.solo=true", "participation.away={client-1=[2]}", "model.name=mlp")
    expected = plan(config, calibrate=False)
    assert [cost.models for cost in expected.costs] == [(2 * 4 + 2) + (2 * 3 + 1), 4 + 3]
    assert expected.local_trainings == 7
    assert expected.pool == 50
    assert expected.flower_models == 6
    count = []
    original = setup.Federation.evaluate
    monkeypatch.setattr(setup.Federation, "evaluate", lambda *a: count.append(1) or original(*a))
    received = {}
    run(
        config,
        tmp_path / "run",
        observe=lambda stage, name, data: received.setdefault(name, []).append(len(data)),
    )
    assert len(count) == sum(cost.models for cost in expected.costs)
    per_round = sum(received["client-0"]) / 2
    assert expected.bytes_up == pytest.approx(per_round, rel=0.02)


def test_the_plan_of_ground_truth(brief_plans):
    found = plan(tiny(BOTH))
    by_name = {cost.name: cost for cost in found.costs}
    assert by_name["MR-SV (analysis)"].models == 2 * 16
    assert by_name["retrained SV (analysis)"].models == 16
    assert (
        by_name["retrained SV (analysis)"].trainings == 4 * 8 * 2
    )  # every member is in half of 16 coalitions
    assert all(cost.minutes > 0 for cost in found.costs)
    assert found.resolution.gaps[0] < found.resolution.gaps[1]
