"""fedmerit inside Flower: `secure` for a ClientApp, `Contributions` around an averaging strategy.

Names are loaded when they are used, because a SuperNode starts a process for every message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedmerit.carriers import loaded

if TYPE_CHECKING:
    from fedmerit.carriers.door import Place
    from fedmerit.carriers.folders import rehearsal
    from fedmerit.carriers.measures import torch_scoring
    from fedmerit.flower.client import member_of, place_of, secure
    from fedmerit.flower.server import Contributions, last_model
    from fedmerit.flower.trial import check
    from fedmerit.protocol.terms import cautious, everybody

__all__ = [
    "Contributions", "Place", "cautious", "check", "everybody", "last_model", "member_of", "place_of",
    "rehearsal", "secure", "torch_scoring",
]  # fmt: skip

_LATER = {
    "fedmerit.carriers.door": ("Place",),
    "fedmerit.carriers.folders": ("rehearsal",),
    "fedmerit.carriers.measures": ("torch_scoring",),
    "fedmerit.flower.client": ("member_of", "place_of", "secure"),
    "fedmerit.flower.server": ("Contributions", "last_model"),
    "fedmerit.flower.trial": ("check",),
    "fedmerit.protocol.terms": ("cautious", "everybody"),
}


def __getattr__(name: str) -> Any:
    return loaded(__name__, name, _LATER, "flwr", "Flower")
