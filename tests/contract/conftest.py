"""What the contract of all transports shares."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks():
    """Most of a run of a second would be waiting for a disk; a power cut is not part of this contract."""
    real, os.fsync = os.fsync, lambda file: None
    yield
    os.fsync = real
