"""One real run folder for all tests of the page."""

import pytest

from fedmerit.config import from_dict


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """Five members, three rounds, real training under secure aggregation; Elm misses the first round."""
    from fedmerit.simulation.run import run

    folder = tmp_path_factory.mktemp("run") / "five"
    config = from_dict(
        {
            "data": {"test_size": 50},
            "partition": {
                "clients": 5,
                "scheme": "sizes",
                "sizes": [60, 50, 70, 40, 50],
                "names": ["Abbey", "Bridge", "Castle", "Dale", "Elm"],
            },
            "corruption": {"label_noise": {"Dale": 0.9}},
            "model": {"name": "mlp"},
            "training": {"rounds": 3, "local_epochs": 1, "batch_size": 16},
            "participation": {"away": {"Elm": [1]}},
            "scoring": {"method": "reports"},
        }
    )
    run(config, folder)
    return folder
