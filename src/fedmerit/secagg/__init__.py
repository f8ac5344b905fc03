"""Secure aggregation: the server learns the sum of the members' updates and nothing else about them.

This is the protocol of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning" (2017), with its additions against active servers, as two state machines without I/O. Read the
modules in this order: `messages` (the stages), `setting`, `quantise`, `masks`, `state`, `client`, `server`,
`naming` (who misstated what it put into the sum).
docs/threats.md says what is promised against whom.

Importing the package loads only `quantise`, which needs nothing but numpy. Machines without the cryptographic
packages can therefore sum the same integers without masks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedmerit.secagg.quantise import Decoded, Encoded, Encoding

if TYPE_CHECKING:
    from fedmerit.secagg.audit import Opening, nonce_opens, replay
    from fedmerit.secagg.client import Client
    from fedmerit.secagg.messages import STAGES
    from fedmerit.secagg.naming import Evidence, MaskTable, Verdict
    from fedmerit.secagg.server import InMemory, Server, run_in_memory
    from fedmerit.secagg.setting import Result, Setting, Task, Update, default_threshold
    from fedmerit.secagg.state import Released, update_digest

__all__ = [
    "STAGES",
    "Client",
    "Decoded",
    "Encoded",
    "Encoding",
    "Evidence",
    "InMemory",
    "MaskTable",
    "Opening",
    "Released",
    "Result",
    "Server",
    "Setting",
    "Task",
    "Update",
    "Verdict",
    "default_threshold",
    "nonce_opens",
    "replay",
    "run_in_memory",
    "update_digest",
]

_LATER = {
    "audit": ("Opening", "nonce_opens", "replay"),
    "client": ("Client",),
    "messages": ("STAGES",),
    "naming": ("Evidence", "MaskTable", "Verdict"),
    "server": ("InMemory", "Server", "run_in_memory"),
    "setting": ("Result", "Setting", "Task", "Update", "default_threshold"),
    "state": ("Released", "update_digest"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
