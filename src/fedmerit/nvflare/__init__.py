"""fedmerit inside NVFlare: `recipe` makes a job whose members are scored, over the Collab API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedmerit.carriers import loaded

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
    return loaded(__name__, name, _LATER, "nvflare", "NVFlare")
