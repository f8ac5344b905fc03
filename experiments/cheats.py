"""Members who cheat with what they send, rather than with what they say.

A settled score cannot be lied about, but what is scored is still what members send. Each cheat has no other
knowledge than its name says: the global models of all rounds are public, the test pool is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from side_by_side import StackedTraining

from fedmerit.protocol.outcome import Model
from fedmerit.protocol.pool import Slice
from fedmerit.simulation.setup import Federation

Kind = Literal["pool", "replay", "scale", "pair", "empty pair"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def who(names: Sequence[str], kind: Kind) -> tuple[str, ...]:
    """Return who cheats: the last member; as a pair the last two, of whom the first one is to gain."""
    return tuple(names[-2:] if kind.endswith("pair") else names[-1:])


def told_the_pool(federation: Federation) -> Federation:
    """The same federation, but its last member has the test pool in the place of data of its own."""
    return told(federation, federation.pool.slice(1))


def told(federation: Federation, shown: Slice) -> Federation:
    """The same federation, but its last member trains on these samples."""
    *others, cheat = federation.clients
    return replace(federation, clients=(*others, replace(cheat, x=shown.x, y=shown.y)))


@dataclass(eq=False)
class Cheating(StackedTraining):
    """Local training, after which somebody sends something else.

    - "pool": trains on the test pool; the update gets ``factor`` times the mean length of the others'.
    - "replay": sends ``factor`` times the last public update; nothing in the first round.
    - "scale": sends ``factor`` times its own honest update.
    - "pair": two honest members add and take away ``factor`` times the last public update; their sum, and so
      the model, stays as it was.
    - "empty pair": two members without data do so.
    """

    kind: Kind = "scale"
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"experiment.cheat: expected one of {', '.join(KINDS)}, got {self.kind!r}")

    def train(
        self,
        number: int,
        scheduled: Sequence[str],
        start: Model,
        stale: Model,
        tell: Callable[[int, int], None],
    ) -> dict[str, Model]:
        """As honest members do, then cheat."""
        models = super().train(number, scheduled, start, stale, tell)
        cheats = who(self.federation.names, self.kind)
        public = start - stale  # zero in the first round
        if self.kind.endswith("pair"):
            for name, sign in zip(cheats, (1, -1), strict=True):
                own = start if self.kind == "empty pair" else models[name]
                models[name] = own + np.float32(sign * self.factor) * public
            return models
        update = models[cheats[0]] - start
        if self.kind == "replay":
            update = public
        length = self.factor
        if self.kind == "pool":
            others = [
                float(np.linalg.norm(model - start)) for name, model in models.items() if name not in cheats
            ]
            length *= float(np.mean(others)) / float(np.linalg.norm(update))
        models[cheats[0]] = (start + np.float32(length) * update).astype(np.float32)
        return models
