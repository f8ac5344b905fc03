"""What all tests of the Flower adapter share."""

import pytest


@pytest.fixture
def home(tmp_path):
    """A folder with everybody's keys and the roster."""
    from federation_in import make_keys

    make_keys(tmp_path)
    return tmp_path
