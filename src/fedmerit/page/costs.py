"""What a run cost: seconds a round, size of the model. Kept apart from scores, which hold no time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmerit.errors import StoreError
from fedmerit.store import write

NAME = "costs.json"
BYTES_A_PARAMETER = 4
"""Of a masked input on the wire (see docs/threats.md)."""


@dataclass(frozen=True)
class Costs:
    """Seconds of each timed round, parameters of the model; None where unknown."""

    seconds: tuple[float, ...] | None = None
    parameters: int | None = None


def timed(watch: Callable[[Any], None], folder: Path) -> Callable[[Any], None]:
    """A watch that also notes how long each round took, in ``costs.json``.

    Args:
        watch: called with every step first.
        folder: of the run; a resumed run adds to what the file holds.
    """
    last = [time.monotonic()]

    def watched(step: Any) -> None:
        watch(step)
        if step.stage == "round":
            now = time.monotonic()
            seconds = _seconds(folder) | {str(step.round): round(now - last[0], 3)}
            write(folder / NAME, (json.dumps({"seconds": seconds}, indent=1) + "\n").encode())
            last[0] = now

    return watched


def read_costs(folder: Path) -> Costs:
    """What is known about the cost of the run in this folder."""
    seconds = _seconds(folder)
    checkpoints = sorted((folder / "checkpoints").glob("model-*.safetensors"))
    return Costs(
        seconds=tuple(seconds[key] for key in sorted(seconds, key=int)) or None,
        parameters=_parameters(checkpoints[-1]) if checkpoints else None,
    )


def _seconds(folder: Path) -> dict[str, float]:
    path = folder / NAME
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())["seconds"]
        return {str(int(key)): float(value) for key, value in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{path}: expected seconds by round, got something else: {error!r:.80}") from error


def _parameters(path: Path) -> int:
    """Numbers in a safetensors file, from its header: u64 length, then JSON with the shapes."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return sum(math.prod(one["shape"]) for key, one in header.items() if key != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError) as error:
        raise StoreError(f"{path}: damaged: not a checkpoint: {error!r:.80}") from error
