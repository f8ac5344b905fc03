"""What tests of a whole run share."""

import shutil

import pytest

from linear_federation import Federation


@pytest.fixture(scope="session")
def once_finished(tmp_path_factory):
    return Federation(tmp_path_factory.mktemp("finished"), files=True).run().home


@pytest.fixture(scope="session")
def rehearsed(tmp_path_factory):
    """What `tiny` gives with all utilities, and the folder of that run; not to be changed."""
    from tiny import ALL, tiny

    from fedmerit.simulation.run import run

    folder = tmp_path_factory.mktemp("rehearsed") / "run"
    return run(tiny(ALL), folder), folder


@pytest.fixture
def finished(once_finished, tmp_path):
    """A copy of the folder of a run that went well: keys, roster, members' files, and ``run``."""
    return shutil.copytree(once_finished, tmp_path / "home")
