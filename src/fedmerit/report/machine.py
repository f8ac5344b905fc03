"""What this machine has that a run needs: Python, optional packages, a GPU, a clock that is right, disk."""

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
    "data": ("pillow",),
    "page": ("jinja2", "vl-convert-python"),
    "pandas": ("pandas",),
    "xlsx": ("openpyxl",),
    "plot": ("altair",),
    "flower": ("flwr",),
}
"""The extras that people install, and the packages in them."""
SLACK = 86_400
"""Seconds by which a file may be newer than the clock: copies keep the time of another machine."""


def examine_machine() -> Iterator[Note]:
    """Check what a run in this folder needs of the machine; "problem" is the code of faults."""
    yield Note("machine", python=platform.python_version(), version=VERSION, system=platform.platform())
    for extra, packages in EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        if missing := [package for package, number in versions.items() if not number]:
            yield Note("machine-without", extra=extra, packages=missing)
        else:
            named = [f"{package} {number}" for package, number in versions.items()]
            yield Note("machine-extra", extra=extra, packages=named)
    yield _processor()
    ours = Path(__file__).parents[1].rglob("*.py")
    now, newest = time.time(), max(path.stat().st_mtime for path in ours)
    if newest > now + SLACK:
        fault = f"the clock says {_utc(now)}, but files of fedmerit are from {_utc(newest)}: set the clock"
        yield Note("problem", what=fault)
    yield Note("machine-clock", clock=_utc(now))
    yield from examine_disk(Path.cwd(), SPARE)


def _version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> Note:
    """Return on what a run would train."""
    cores = os.cpu_count() or 1
    if _version("torch"):
        import torch

        if torch.cuda.is_available():
            return Note("machine-gpu", gpu=torch.cuda.get_device_name(), cores=cores)
    return Note("machine-cpu", cores=cores)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
