"""The paper's experiments at toy size: every kind runs, is resumed, merged, and ends in tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def call(script, *arguments):
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_experiment_runs_at_toy_size_and_ends_in_a_table(tmp_path):
    said = call("run.py", "--toy", "--out", tmp_path / "run", "--budget-minutes", 4)
    assert "nothing is left" in said
    assert "FAILED" not in said
    assert "nothing is left" in call("run.py", "--toy", "--out", tmp_path / "run", "--list")

    call("merge.py", tmp_path / "run" / "cells.jsonl", "--into", tmp_path / "results")
    cells = [json.loads(line) for line in (tmp_path / "run" / "cells.jsonl").read_text().splitlines()]
    assert len(list((tmp_path / "results").glob("*.json"))) == len(cells)
    assert "0 new cells" in call("merge.py", tmp_path / "run" / "cells.jsonl", "--into", tmp_path / "results")

    readme = tmp_path / "README.md"
    call("tables.py", "--toy", "--results", tmp_path / "results", "--out", readme)
    text = readme.read_text()
    for label in ("tab:error", "tab:error_game", "tab:round", "tab:client", "tab:alpha", "tab:attack"):
        assert f"## {label}:" in text
    assert "not run yet" not in text
    assert "with the retrained Shapley value" in text
    assert "| ALPHA sum | " in text
    assert "0.904 ± 0.042" in text  # the paper's, of paper.json
    call("tables.py", "--toy", "--results", tmp_path / "results", "--out", readme, "--check")


def test_a_cell_that_does_not_fit_the_budget_is_left_with_its_cost(tmp_path):
    said = call("run.py", "--toy", "--out", tmp_path, "--budget-minutes", 0.01, "--only", "tab-error")
    assert "left: 6 cells" in said
    assert not (tmp_path / "cells.jsonl").exists()
