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


def panel(folder, *changes):
    """Five members who judge each other; Elm's labels are turned round, also where it judges."""
    from fedmerit.simulation.run import run

    five = ("partition.clients=5", "partition.sizes=[100, 110, 120, 130, 140]", f"partition.names={NAMES}")
    wrong = ("corruption.label_flip=['Elm']", "training.local_epochs=4", "model.name=mlp")
    judged = ("scoring.method=panel", "scoring.utilities=['expected-accuracy']", "panel.coordinates=100000")
    run(tiny(*five, *wrong, *judged, *changes), folder)
    return folder


@pytest.fixture(scope="session")
def panel_folder(tmp_path_factory):
    """A panel of five."""
    return panel(tmp_path_factory.mktemp("run") / "panel")


@pytest.fixture(scope="session")
def praise_folder(tmp_path_factory):
    """The same panel, in which Dale judges falsely for its friend Bridge."""
    return panel(tmp_path_factory.mktemp("run") / "praise", "corruption.judge={Dale = 'praise:Bridge'}")
