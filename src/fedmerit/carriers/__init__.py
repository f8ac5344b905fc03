"""What every carrier between machines needs, whatever carries the bytes: shapes, measures, run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from fedmerit.errors import MissingExtra


def loaded(package: str, name: str, later: Mapping[str, Sequence[str]], needs: str, engine: str) -> Any:
    """Return a name of a carrier's package from the module that has it, which is imported only now.

    ``later`` has the names by module, ``needs`` is the engine's own package.
    """
    for module, names in later.items():
        if name in names:
            try:
                return getattr(import_module(module), name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != needs:
                    raise
                raise MissingExtra.of(f"this needs {engine}", engine.lower()) from error
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
