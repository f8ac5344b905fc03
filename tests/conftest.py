"""Settings for all tests: one thread, also in processes that tests start, so that equal runs are equal."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("COLUMNS", "200")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("fedmerit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedmerit")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
