"""Where a number was measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version


def machine() -> dict[str, object]:
    """Processor, cores, device and versions."""
    found: dict[str, object] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    for package in ("numpy", "torch", "cryptography", "pycryptodome", "flwr"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    try:
        import torch

        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    except ImportError:
        pass
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.machine()
