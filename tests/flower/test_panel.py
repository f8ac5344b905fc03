"""A panel over Flower: no test set anywhere, each member judges on data of its own."""

import json

import pytest
from flwr.serverapp.strategy import FedAvg

import fedmerit.flower
from command_line import call
from federation_in import NAMES, NODES, bodies_of, grid_of, run
from fedmerit.errors import ConfigError
from fedmerit.verify import verify_folder
from lies import at, dies


def panel(home, grid, **options):
    return run(home, grid, method="panel", settlement={"least": 20}, **options)


def verified(home):
    return [line.code for line in verify_folder(home / "run", archive=home / "run" / "archive")]


def test_a_panel_runs_and_verifies_without_any_test_set(home):
    strategy, rounds = panel(home, grid_of(home))
    assert [one.included for one in rounds] == [NAMES, NAMES]
    block = strategy.scores["panel"]
    assert (block["judges"], block["holds"], block["missing"]) == ([*NAMES], [True] * 4, [])
    assert bodies_of(home / "run", "pool")[0]["size"] == 0
    assert {"panel", "archive"} <= {*verified(home)}
    assert json.loads((home / "run" / "scores.json").read_text())["panel"] == block


def test_a_member_that_dies_and_is_back_judges_all_rounds(home):
    grid = grid_of(home)
    at(grid, "check", 2, lambda message: grid.dead.add(NODES["client-2"]), who=NODES["client-2"])
    at(grid, "draw", None, lambda message: grid.dead.clear())
    strategy, _ = panel(home, grid)
    block = strategy.scores["panel"]
    assert ("client-2" in block["judges"], all(block["holds"])) == (True, True)
    assert "panel" in verified(home)


@pytest.mark.parametrize("exchange", ["drawn", "judge", "judged", "column", "open", "state"])
def test_the_next_server_goes_on_where_one_died(home, exchange):
    grid = grid_of(home)
    at(grid, exchange, None, dies())
    with pytest.raises(KeyboardInterrupt):
        panel(home, grid)
    panel(home, grid_of(home), settle=True)
    assert "panel" in verified(home)


@pytest.mark.parametrize("method", ["settled", "both", "reports"])
def test_without_a_test_set_only_a_panel_is_possible(home, method):
    with pytest.raises(ConfigError):
        fedmerit.flower.Contributions(
            FedAvg(), roster=home / "roster.toml", folder=home / "run", config={"scoring": {"method": method}}
        )


def test_score_and_verify_on_the_command_line(home):
    panel(home, grid_of(home))
    assert "4 of 4 columns add up" in call("verify", home / "run").output
