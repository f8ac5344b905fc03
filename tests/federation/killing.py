"""Rehearsals in processes of their own, which are killed with -9."""

import os
import signal
import subprocess
import sys
from pathlib import Path

CHILD = """
import sys
import torch
torch.set_num_threads(1)
sys.path[:0] = {paths!r}
from {module} import config
from fedmerit.simulation.run import run
print("ready", flush=True)
run(config(), {folder!r}, resume={resume!r}, watch=lambda step: print(step.stage, flush=True))
"""


def killed(module, folder, live):
    """Run or resume ``config()`` of a test module in a folder, and kill it; return whether it was over.

    ``live`` reads its stages, one a line, for as long as the run is to live.
    """
    here, resume = Path(__file__).parent, folder.joinpath("config.toml").exists()
    paths = [str(here), str(here.parent)]
    code = CHILD.format(paths=paths, module=module, folder=str(folder), resume=resume)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout.readline() == "ready\n"
        live(process.stdout)
    finally:
        finished = process.poll() is not None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not finished or process.returncode == 0
    return finished
