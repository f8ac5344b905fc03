"""The command line, in this process and in one of its own; and settings of a run of seconds."""

import os
import subprocess
import sys

from typer.testing import CliRunner

FEDMERIT = [sys.executable, "-m", "fedmerit"]
TINY = """
[data]
test_size = 50
[partition]
clients = 3
scheme = "sizes"
sizes = [40, 30, 50]
[model]
name = "mlp"
[training]
rounds = 2
local_epochs = 1
"""


def call(*arguments, given=None):
    """Run a command here, and return its result; our errors are in it as they were raised."""
    from fedmerit.cli import app

    return CliRunner().invoke(app, [str(one) for one in arguments], input=given)


def shell(*arguments, columns=80, **env):
    return subprocess.run(
        [*FEDMERIT, *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        check=False,
        env=os.environ | {"COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"} | env,
    )
