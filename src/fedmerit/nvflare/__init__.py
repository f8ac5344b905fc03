"""fedmerit inside NVFlare: `recipe` makes a job whose members are scored, over the Collab API."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedmerit.errors import MissingExtra

if TYPE_CHECKING:
    from fedmerit.carriers.folders import rehearsal
    from fedmerit.carriers.measures import torch_scoring
    from fedmerit.nvflare.job import recipe
    from fedmerit.protocol.terms import cautious, everybody

__all__ = ["cautious", "everybody", "recipe", "rehearsal", "torch_scoring"]

_LATER = {
    "fedmerit.carriers.folders": ("rehearsal",),
    "fedmerit.carriers.measures": ("torch_scoring",),
    "fedmerit.nvflare.job": ("recipe",),
    "fedmerit.protocol.terms": ("cautious", "everybody"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            try:
                return getattr(import_module(module), name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "nvflare":
                    raise
                raise MissingExtra.of("this needs NVFlare", "nvflare") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
