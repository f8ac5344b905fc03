"""What this machine has for fedmerit: Python, optional packages, a GPU, the clock, the disk."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fedmerit.config import VERSION
from fedmerit.notes import Note
from fedmerit.storage.member_state import SPARE
from fedmerit.storage.run_folder import examine_disk

EXTRAS = {
    "engine": ("torch", "safetensors"),
    "data": ("pillow", "h5py"),
    "page": ("jinja2", "vl-convert-python"),
    "pandas": ("pandas",),
    "flower": ("flwr",),
    "tracking": ("tensorboard", "mlflow-skinny"),
}
"""The extras that people install, and the packages in them."""
SLACK = 86_400
"""Seconds by which a file may be newer than the clock: copies keep the time of another machine."""


def examine_machine(folder: Path) -> Iterator[Note]:
    """Check what a run needs of this machine and yield what was found; "problem" is the code of faults.

    Args:
        folder: where runs would be written.
    """
    yield Note("machine", python=platform.python_version(), version=VERSION, system=platform.platform())
    for name, packages in EXTRAS.items():
        found = {one: _version(one) for one in packages}
        if missing := [one for one, there in found.items() if not there]:
            yield Note("machine-without", extra=name, packages=missing)
        else:
            yield Note("machine-extra", extra=name, packages=[f"{one} {at}" for one, at in found.items()])
    yield _processor()
    now, newest = time.time(), _newest()
    if newest > now + SLACK:
        what = f"the clock says {_utc(now)}, but files of fedmerit are from {_utc(newest)}: set the clock"
        yield Note("problem", what=what)
    yield Note("machine-clock", clock=_utc(now))
    yield from examine_disk(folder, SPARE)


def _version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> Note:
    """Return on what a run would train."""
    cores = os.cpu_count() or 1
    if not _version("torch"):
        return Note("machine-cpu", cores=cores)
    import torch

    if torch.cuda.is_available():
        return Note("machine-gpu", gpu=torch.cuda.get_device_name(), cores=cores)
    return Note("machine-cpu", cores=cores)


def _newest() -> float:
    """Return when the newest file of this package was written."""
    return max(path.stat().st_mtime for path in Path(__file__).parents[1].rglob("*.py"))


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
