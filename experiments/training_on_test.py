"""What training on the test set earns: the example train_on_test.py, its shares kept as raw results.

::

    python experiments/training_on_test.py [--seeds 3]     # two minutes a seed on a CPU
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src"), str(HERE.parent / "examples")]

from cells import write_json  # noqa: E402
from onecell import machine  # noqa: E402
from train_on_test import CHEAT, SETTINGS, share_of_cheat  # noqa: E402

OUT = HERE / "results" / "other" / "train-on-test.json"


def main() -> None:
    """Every combination of reveal and conduct, one share a seed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    began, shares = time.perf_counter(), {}
    for reveal in ("fixed", "per-round"):
        for conduct in ("honest", "cheating"):
            cheating = conduct == "cheating"
            shares[f"{reveal}, {conduct}"] = [
                float(share_of_cheat(seed, reveal, cheating=cheating)) for seed in range(options.seeds)
            ]
    found = {
        "settings": SETTINGS,
        "cheat": CHEAT,
        "shares": shares,
        "seconds": round(time.perf_counter() - began),
        "machine": machine(),
    }
    write_json(options.out, found)


if __name__ == "__main__":
    main()
