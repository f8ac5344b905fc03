"""The experiments on the panel: what is counted, and that every question is answered at toy size."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import panel
import pytest
from cheats import Cheating, told
from judges import alarms, closeness, covered, moved, taken, takings
from panel import Cell, Columns, blurred

from fedmerit.scoring.panel import hands

HERE = Path(__file__).resolve().parents[2] / "experiments"


def test_blur_adds_up_to_nothing_in_every_column_and_has_the_size_asked_for():
    rng, known = np.random.default_rng(0), np.full((2, 6), 4.0)
    drawn = np.stack([blurred(known, 10.0, 0.5, rng) for _ in range(2000)])
    np.testing.assert_allclose(drawn.sum(axis=2), 0, atol=1e-12)
    assert drawn.std() == pytest.approx(0.5 * 24.0 / 6, rel=0.03)  # of max(24, .05 * 10) / N


def test_the_mean_of_both_halves_is_the_matrix_and_half_their_difference_its_error():
    one = Columns(np.array([[[1.0, 2], [3, 4]], [[3, 2], [5, 0]]]), np.zeros(2), np.zeros(2)).panel()
    assert one.matrix.tolist() == [[2, 2], [4, 2]]
    assert one.apart.tolist() == [[-1, 0], [-1, 2]]


def test_what_cheats_take_is_counted_seed_by_seed_and_for_the_judge_who_told_too():
    honest = {"attack": "nobody cheats", "cheats": [], "columns": [0.2, 0.3, 0.5], "fenced": None}
    cheating = {
        "attack": "told one judge's set",
        "cheats": [2, 0],
        "columns": [0.1, 0.2, 0.7],
        "fenced": [1, 0, 0],
    }
    found = takings([one | {"seed": seed} for seed in (1, 2) for one in (honest, cheating)])
    assert found["told one judge's set"] == {"columns": [(0.5, 0.7)] * 2}  # the other rule refused
    both = found["told one judge's set, with the judge"]["columns"]
    np.testing.assert_allclose(both, [(0.7, 0.8)] * 2)
    assert taken(both) == "70% → 80% (80% to 80%)"
    assert taken(None) == "–"


def test_a_matrix_that_is_the_truth_has_no_error_and_a_spearman_of_one():
    truth = np.random.default_rng(1).standard_normal((4, 4))
    same = [(truth + np.diag([5.0] * 4)).tolist()] * 2  # the diagonal does not count
    lost = [truth.tolist(), truth.tolist(), (-truth).tolist()]
    found = closeness({"members": 4, "exact": same, "column": same, "shapley": truth, "lost": lost})
    assert found["exact, Shapley"] == [1]
    assert found["error"] == [0]
    assert found["exact, lost: all"] == found["column, lost: within a judge"] == [1, -1]
    assert found["lost, lost: rows"] == [1, -1, -1]


def test_alarms_moves_and_coverage_are_counted_judge_by_judge():
    checks = [[[0.04, 0.30], [0.0, 0.01]], [[0.06, 0.0], [0.0, 0.0]]]  # 5 % of a gain of 1, and four errors
    assert alarms([{"checks": checks, "gained": [-1.0, 1.0]}]) == (2, 4)
    run = {"exact": [0.5, 0.5], "shares": {"a": [[0.4, 0.6], [0.5, 0.5]]}}
    assert moved([run]) == {"a": [0.05]}
    draws = {"columns": [[[0.5, 0.5], [0.1, 0.1]], [[0.8, 0.2], [0.1, 0.2]]]}
    assert covered([{"truth": [0.5, 0.5], "draws": draws}], "columns") == [0.75]


@pytest.fixture(scope="module")
def home():
    return panel.home_of(Cell("fashion-mini", 6, 5.0, 0, toy=True))


def test_every_judge_holds_a_fifth_of_its_data_out(home):
    for client, held in zip(home.federation.clients, home.held, strict=True):
        assert len(held.y) == round(0.2 * (len(held.y) + len(client.y)))
    parts = [home.federation.evaluate(home.federation.first, one)[panel.UTILITY].mean() for one in home.held]
    np.testing.assert_allclose(home.values(home.federation.first), parts, rtol=1e-6)


def test_an_empty_pair_adds_and_takes_away_a_public_update_and_leaves_the_sum_to_the_others(home):
    local = Cheating(home.federation, kind="empty pair", factor=3.0, stacked=False)
    models, moves = panel.trained(home, local)
    np.testing.assert_allclose(moves[1, -2], 3 * (models[1] - models[0]) / 6, atol=1e-6)
    np.testing.assert_allclose(moves[:, -2], -moves[:, -1], atol=1e-6)
    assert not moves[0, -2:].any()


def test_who_is_told_a_judges_samples_trains_on_them(home):
    federation = told(home.federation, home.held[0])
    assert federation.clients[-1].y.tolist() == home.held[0].y.tolist()
    assert federation.clients[0] is home.federation.clients[0]


@pytest.mark.long
def test_every_question_is_answered_at_toy_size_and_only_once(tmp_path):
    call = [
        sys.executable,
        str(HERE / "panel.py"),
        "--toy",
        "--out",
        str(tmp_path),
        "--seeds",
        "0:1",
        "--mu",
        "5",
    ]
    said = [subprocess.run(call, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert "4 of 4" in said[0]
    assert said[1] == ""
    lines = [json.loads(line) for line in (tmp_path / "fashion-mini.jsonl").read_text().splitlines()]
    assert {one["what"] for one in lines} == set(panel.QUESTIONS)
    transfer = lines[[one.get("attack") for one in lines].index("transfer by an empty pair, no witness")]
    assert sum(transfer["hands"][i] for i in transfer["cheats"]) == pytest.approx(0.6)
    run = next(one for one in lines if one["what"] == "fidelity")
    assert sum(hands(np.mean(run["exact"], axis=0)).values()) <= 1 + 1e-9
