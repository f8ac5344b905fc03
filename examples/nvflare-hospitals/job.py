"""The job in NVFlare's simulator: `python job.py --out run`; `--export` writes the job instead."""

import argparse
from pathlib import Path

from hospitals import task
from nvflare.recipe import SimEnv

import fedmerit.nvflare

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=Path("run"))
parser.add_argument("--rounds", type=int, default=3)
arguments, _ = parser.parse_known_args()
out = arguments.out.resolve()

recipe = fedmerit.nvflare.recipe(
    "hospitals",
    task,
    num_rounds=arguments.rounds,
    min_clients=len(task.HOSPITALS),
    folder=out / "run",
    rehearsal=out / "keys",  # everybody's keys in one folder; between machines: roster="roster.toml"
)
recipe.execute(SimEnv(clients=[*task.HOSPITALS], workspace_root=str(out / "simulator")))
