"""Rehearsals that end as a kill would end them: within this process, or in one of their own, with -9."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from fedmerit.simulation.run import Rehearsal, run


class Crash(BaseException):
    """Ends a run as a kill would."""


def crash(config, folder, where, name, call=1, when=lambda *given: True, **options):
    """Run until the so manyth call of a method that ``when`` counts, which does not happen any more."""
    real, calls = getattr(where, name), []

    def wrapped(*args, **kwargs):
        if when(*args):
            calls.append(1)
            if len(calls) == call:
                raise Crash
        return real(*args, **kwargs)

    with patch.object(where, name, wrapped), pytest.raises(Crash):
        run(config, folder, **options)


def half_run(config, folder, **options):
    """Run until the second round would begin; return the folder."""
    crash(config, folder, Rehearsal, "round", 2, **options)
    return folder


CHILD = """
import sys
import torch
torch.set_num_threads(1)
sys.path[:0] = {paths!r}
import {module} as told
from fedmerit.simulation.run import run
from fedmerit.simulation.run import LocalTransport
LocalTransport.lost = getattr(told, "LOST", {{}})
print("ready", flush=True)
run(told.config(), {folder!r}, resume={resume!r}, watch=lambda step: print(step.stage, flush=True))
"""


def killed(module, folder, live):
    """Run or resume ``config()`` of a test module in a folder, and kill it; return whether it was over.

    ``live`` reads its stages, one a line, for as long as the run is to live.
    """
    here, resume = Path(__file__).parent, folder.joinpath("config.toml").exists()
    paths = [str(here), str(here.parents[1])]
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
