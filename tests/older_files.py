"""Copies of the files that earlier versions wrote, with the modes that Git does not keep."""

import shutil
from pathlib import Path

HERE = Path(__file__).parent / "older"


def copied(version, folder):
    """Copy the files of a version into a new folder; return where they are."""
    there = shutil.copytree(HERE / version, folder / version)
    for path in there.rglob("*"):
        private = {"keys", "members"} & {parent.name for parent in (path, *path.parents)}
        if private or "checkpoints" in path.parts:
            path.chmod(0o700 if path.is_dir() else 0o600)
    return there
