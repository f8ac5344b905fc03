"""A member trains on the test set. What does it earn if the test pool is fixed, and if slices stay fresh?

Seven members share fashion-mini; the last one adds every test image it has seen so far to its training data.
With a fixed pool that is the whole pool from the start. With fresh slices it has only seen those of earlier
rounds, which are never scored again. Both times the other six are the same.

    python examples/train_on_test.py [--seeds 3]
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

import fedmerit as fm
from fedmerit.config import from_dict
from fedmerit.simulation.run import Rehearsal
from fedmerit.simulation.setup import ClientData, Federation, prepare
from fedmerit.storage.run_folder import Folder

CHEAT = "client-6"
SETTINGS = {
    "data": {"test_size": 500},
    "partition": {"clients": 7, "scheme": "iid"},
    "model": {"name": "mlp"},
    "training": {"rounds": 8, "local_epochs": 5},
    "scoring": {"method": "reports"},
}


def with_known_tests(
    federation: Federation, client: ClientData, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """What a member trains on in a round; the cheat adds the test samples that it has seen by then."""
    if client.name != CHEAT:
        return client.x, client.y
    fixed = federation.config.data.test_reveal == "fixed"
    known = [federation.pool.slice(one) for one in ((1,) if fixed else range(1, number))]
    x = np.concatenate([client.x, *(shown.x for shown in known)])
    return x, np.concatenate([client.y, *(shown.y for shown in known)])


def share_of_cheat(seed: int, reveal: str, *, cheating: bool) -> float:
    """Its share of the money, by alpha summed over rounds."""
    overrides = [f"run.seed={seed}", f"data.test_reveal={reveal}"]
    federation = prepare(from_dict(SETTINGS, overrides))
    if cheating:
        federation.training_data = partial(with_known_tests, federation)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with Folder(path, federation.config) as opened:
            Rehearsal(federation.config, opened, federation=federation).run()
        rounds = fm.read(path / "scores.json")
    return fm.shares(fm.accumulate(rounds), "fair")[CHEAT]


def main() -> None:
    """Print the shares side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    print(f"share of one of seven members, mean and range over {len(seeds)} seeds")
    print(f"{'test_reveal':12} {'honest':>22} {'trains on the test set':>26}")
    for reveal in ("fixed", "per-round"):
        cells = []
        for cheating in (False, True):
            found = [share_of_cheat(seed, reveal, cheating=cheating) for seed in seeds]
            cells.append(f"{np.mean(found):.1%} ({min(found):.1%} - {max(found):.1%})")
        print(f"{reveal:12} {cells[0]:>22} {cells[1]:>26}", flush=True)


if __name__ == "__main__":
    main()
