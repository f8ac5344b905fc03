"""fedmerit inside Flower: `secure` for a ClientApp, `Contributions` around an averaging strategy.

Names are loaded when they are used, because a SuperNode starts a process for every message.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedmerit.errors import MissingExtra

if TYPE_CHECKING:
    from fedmerit.flower.client import Place, member_of, place_of, secure
    from fedmerit.flower.folders import last_model, rehearsal
    from fedmerit.flower.measures import torch_scoring
    from fedmerit.flower.server import Contributions
    from fedmerit.protocol.terms import cautious, everybody

__all__ = [
    "Contributions", "Place", "cautious", "everybody", "last_model", "member_of", "place_of", "rehearsal",
    "secure", "torch_scoring",
]  # fmt: skip

_LATER = {
    "fedmerit.flower.client": ("Place", "member_of", "place_of", "secure"),
    "fedmerit.flower.folders": ("last_model", "rehearsal"),
    "fedmerit.flower.measures": ("torch_scoring",),
    "fedmerit.flower.server": ("Contributions",),
    "fedmerit.protocol.terms": ("cautious", "everybody"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            try:
                return getattr(import_module(module), name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "flwr":
                    raise
                raise MissingExtra.of("this needs Flower", "flower") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
