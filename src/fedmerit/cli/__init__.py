"""The command line. It parses, calls and prints; it computes nothing itself."""

from __future__ import annotations

import io
import sys

from fedmerit.cli import members, run, score
from fedmerit.cli.base import app, errors_as_messages

__all__ = ["app", "main", "members", "run", "score"]


def main() -> None:
    """Run the command line; our own errors become one line and exit code 2."""
    import numpy as np

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with errors_as_messages(), np.errstate(all="ignore"):  # the code refuses non-finite numbers itself
        app(prog_name="fedmerit")
