"""The command line: parse, call, print. No numerics here."""

from __future__ import annotations

import io
import sys

from fedmerit.cli import run, score
from fedmerit.cli.base import app, errors_as_messages

__all__ = ["app", "main", "run", "score"]


def main() -> None:
    """Entry point: our own errors become one line and exit code 2."""
    import numpy as np

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with errors_as_messages(), np.errstate(all="ignore"):  # what is not finite is refused where it matters
        app()
