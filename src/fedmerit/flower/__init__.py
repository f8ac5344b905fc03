"""fedmerit inside Flower: `secure` for a ClientApp, `Contributions` around an averaging strategy.

The client's half and the server's half are loaded separately, because a SuperNode starts a process for every
message.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedmerit.errors import MissingExtra
from fedmerit.protocol.terms import cautious, everybody

if TYPE_CHECKING:
    from fedmerit.flower.client import Place, member_of, place_of, secure
    from fedmerit.flower.folders import last_model, rehearsal
    from fedmerit.flower.network import torch_scoring
    from fedmerit.flower.server import Contributions

__all__ = [
    "Contributions",
    "Place",
    "cautious",
    "everybody",
    "last_model",
    "member_of",
    "place_of",
    "rehearsal",
    "secure",
    "torch_scoring",
]

_LATER = {
    "client": ("Place", "member_of", "place_of", "secure"),
    "folders": ("last_model", "rehearsal"),
    "network": ("torch_scoring",),
    "server": ("Contributions",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            try:
                return getattr(import_module(f"{__name__}.{module}"), name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "flwr":
                    raise
                raise MissingExtra("Flower is needed here: pip install 'fedmerit[flower]'") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
