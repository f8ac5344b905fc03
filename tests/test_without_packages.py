"""Without cryptography, Flower and what the page needs, a rehearsal without masks runs all the same."""

import json
import subprocess
import sys

import pytest

ABSENT = ("cryptography", "Crypto", "pydantic", "altair", "flwr", "jinja2", "pandas")
BLOCK = "import sys\nfor name in {!r}: sys.modules[name] = None\n"
RUN = """
from fedmerit.config import from_dict
from fedmerit.errors import MissingExtra
from fedmerit.simulation.run import run
try:
    run(from_dict({tiny!r}), {home!r} + "/masked")
except MissingExtra as error:
    print(error)
run(from_dict({tiny!r}, {overrides!r}), {home!r} + "/plain")
"""
TINY = {
    "data": {"test_size": 50},
    "partition": {"clients": 4, "scheme": "sizes", "sizes": [60, 50, 70, 40]},
    "model": {"name": "mlp"},
    "training": {"rounds": 1, "local_epochs": 1, "batch_size": 16},
}


PLAIN = ["secure_aggregation.enabled=false", 'scoring.truth=["mr-shapley"]']


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A process that tries a run with masks, then makes one without them; and the folder of both."""
    home = tmp_path_factory.mktemp("without")
    program = BLOCK.format(ABSENT) + RUN.format(tiny=TINY, overrides=PLAIN, home=str(home))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False), home


def test_a_run_without_masks_and_with_ground_truth(process):
    found, home = process
    assert found.returncode == 0, found.stderr
    scores = json.loads((home / "plain" / "scores.json").read_text())
    assert len(scores["cumulative"]["ALPHA"]) == 4
    assert len(scores["truth"]["MR-SV"]) == 4


def test_a_run_with_masks_says_what_to_install(process):
    found, home = process
    assert "secure aggregation needs the packages cryptography and pycryptodome" in found.stdout
    assert not (home / "masked" / "scores.json").exists()


INTEGERS = """
import fedmerit.secagg.quantise
from fedmerit.config import from_dict
assert from_dict({}).threshold == 5
"""


@pytest.mark.parametrize(
    ("absent", "program"),
    [
        (ABSENT, "import fedmerit, fedmerit.cli"),
        (("PIL", "h5py", "torch", "scipy", "cryptography"), "import fedmerit.data"),
        (("cryptography", "Crypto", "msgspec", "torch"), INTEGERS),
    ],
    ids=["rehearsals", "data", "settings and integers"],
)
def test_what_needs_none_of_them_loads(absent, program):
    found = subprocess.run(
        [sys.executable, "-c", BLOCK.format(absent) + program], capture_output=True, check=False
    )
    assert found.returncode == 0, found.stderr
