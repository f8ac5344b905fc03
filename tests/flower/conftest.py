"""What all tests of the Flower adapter share."""

import shutil

import pytest


@pytest.fixture
def home(tmp_path):
    """A folder with everybody's keys and the roster."""
    from federation_in import make_keys

    make_keys(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def once_finished(tmp_path_factory):
    from federation_in import grid_of, make_keys, run

    home = tmp_path_factory.mktemp("run")
    make_keys(home)
    run(home, grid_of(home))
    return home


@pytest.fixture
def finished(once_finished, tmp_path):
    """A copy of the folder of a run that went well: keys, roster, members' files, and ``run``."""
    return shutil.copytree(once_finished, tmp_path / "home")
