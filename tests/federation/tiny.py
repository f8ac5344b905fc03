"""A federation small enough to run many of: real data, a real network, seconds; scored by reports."""

from fedmerit.config import from_dict

TINY = {
    "data": {"test_size": 50},
    "partition": {"clients": 4, "scheme": "sizes", "sizes": [60, 50, 70, 40]},
    "model": {"name": "network:tiny"},
    "training": {"rounds": 2, "local_epochs": 1, "batch_size": 16},
    "scoring": {"method": "reports", "utilities": ["expected-accuracy", "accuracy"]},
}


ALL = "scoring.utilities=['expected-accuracy', 'accuracy', 'brier']"
"""The utilities that a run has unless told otherwise."""


def tiny(*overrides):
    return from_dict(TINY, overrides)
