"""What tests of a deployment look at: what a server stored, bytes of updates in it, what `verify` says."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from loopback.processes import HANG

KEEP = """
CREATE TABLE kept (content BLOB);
CREATE TRIGGER keep_new AFTER INSERT ON objects BEGIN INSERT INTO kept VALUES (new.content); END;
CREATE TRIGGER keep_changed AFTER UPDATE ON objects BEGIN INSERT INTO kept VALUES (new.content); END;
"""


def keep_everything(database: Path) -> None:
    """From now on, a curious SuperLink: objects that Flower deletes stay in table ``kept``."""
    with sqlite3.connect(database, timeout=HANG) as connection:
        connection.executescript(KEEP)


def everything_kept(database: Path) -> bytes:
    """All objects the SuperLink ever held, one after another."""
    with sqlite3.connect(database, timeout=HANG) as connection:
        return b"\0".join(bytes(row[0]) for row in connection.execute("SELECT content FROM kept") if row[0])


def everything_in(folder: Path) -> bytes:
    """All files below a folder, one after another."""
    return b"\0".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def stretches(
    vector: np.ndarray, baseline: np.ndarray, sizes: Sequence[int], length: int = 16
) -> list[bytes]:
    """Some runs of ``length`` numbers of a vector, all of them unlike the baseline, as bytes.

    Each lies in one array of the model, whose ``sizes`` are given: Flower sends every array by itself.
    """
    differs = vector != baseline
    ends = np.cumsum(sizes)
    assert ends[-1] == len(vector)
    begins = [
        k for end, size in zip(ends, sizes, strict=True) for k in range(end - size, end - length, length)
    ]
    starts = [k for k in begins if differs[k : k + length].all()]
    assert starts, "the vector is the baseline"
    chosen = starts[:: max(1, len(starts) // 8)]
    return [vector[k : k + length].tobytes() for k in chosen]


def found(needles: list[bytes], haystack: bytes) -> int:
    """How many of them are there."""
    return sum(needle in haystack for needle in needles)


def verified(out, copy, roster):
    """What another member is told who has its roster and a copy of the folder, with any archive."""
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns("keys"))  # the server's stay there
    program = Path(sys.executable).parent / "fedmerit"
    arguments = ["verify", copy, "--roster", roster]
    if (copy / "archive").is_dir():
        arguments += ["--archive", copy / "archive"]
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
