"""Without cryptography, Flower and what the page needs, a rehearsal without masks runs all the same."""

import json
import subprocess
import sys

BLOCK = (
    "import sys\n"
    "for name in ('cryptography', 'Crypto', 'pydantic', 'altair', 'flwr', 'jinja2', 'pandas'):\n"
    "    sys.modules[name] = None\n"
)
RUN = """
from fedmerit.config import from_dict
from fedmerit.simulation.run import run
run(from_dict({tiny!r}, {overrides!r}), {folder!r})
"""
TINY = {
    "data": {"test_size": 50},
    "partition": {"clients": 4, "scheme": "sizes", "sizes": [60, 50, 70, 40]},
    "model": {"name": "mlp"},
    "training": {"rounds": 1, "local_epochs": 1, "batch_size": 16},
}


def run(folder, *overrides):
    program = BLOCK + RUN.format(tiny=TINY, overrides=list(overrides), folder=str(folder))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_a_run_without_masks_and_with_ground_truth(tmp_path):
    found = run(tmp_path / "run", "secure_aggregation.enabled=false", 'scoring.truth=["mr-shapley"]')
    assert found.returncode == 0, found.stderr
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    assert len(scores["cumulative"]["ALPHA"]) == 4
    assert len(scores["truth"]["MR-SV"]) == 4


def test_a_run_with_masks_says_what_to_install(tmp_path):
    found = run(tmp_path / "run")
    assert found.returncode != 0
    assert "secure aggregation needs the packages cryptography and pycryptodome" in found.stderr


def test_what_needs_none_of_them_loads():
    program = f"{BLOCK}import fedmerit, fedmerit.cli, fedmerit.data"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert found.returncode == 0, found.stderr
