"""One real run folder for all tests of the page."""

import pytest

from tiny import ALL, tiny

NAMES = ["Abbey", "Bridge", "Castle", "Dale", "Elm"]


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """Five members, three rounds, real training under secure aggregation; Elm misses the first round."""
    from fedmerit.simulation.run import run

    folder = tmp_path_factory.mktemp("run") / "five"
    five = ("partition.clients=5", "partition.sizes=[60, 50, 70, 40, 50]", f"partition.names={NAMES}")
    wrong = ("corruption.label_noise={Dale = 0.9}", "participation.away={Elm = [1]}")
    run(tiny(*five, *wrong, ALL, "model.name=mlp", "training.rounds=3"), folder)
    return folder
