"""One contract for every way to run: the same seed and partition give the same reports."""

import pytest
from federation_in import grid_of, make_keys, rounds_in, run, said, task

from fedmerit.simulation.run import run as run_embedded
from fedmerit.verify import verify_folder


@pytest.mark.parametrize("weights", ["uniform", "secret"])
def test_over_a_grid_the_reports_are_those_of_the_engine_in_one_process(tmp_path, weights):
    make_keys(tmp_path)
    _, rounds = run(tmp_path, grid_of(tmp_path), weights=weights)
    run_embedded(task.config(weights), tmp_path / "embedded")
    assert said(rounds) == said(rounds_in(tmp_path / "embedded"))
    assert all(len(one.reports) == 4 for one in rounds)
    list(verify_folder(tmp_path / "run"))


def test_who_is_lost_is_lost_in_both(tmp_path):
    """Killed after its masked update left: summed, and silent."""
    make_keys(tmp_path)
    grid = grid_of(tmp_path)
    grid.before = lambda node, message: grid.dead.add(node) if late(grid, node) else None

    def late(grid, node):
        heard = [reply for one, message, reply in grid.seen if one == node and trains(message)]
        return node == 102 and len(heard) == 2

    _, rounds = run(tmp_path, grid)
    run_embedded(task.config(**{"client-2": "2:check"}), tmp_path / "embedded")
    assert said(rounds) == said(rounds_in(tmp_path / "embedded"))
    assert rounds[1].silent == ("client-2",)
    assert "client-2" in rounds[1].included


def trains(message):
    return message.metadata.message_type == "train"
