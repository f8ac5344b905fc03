"""Members who cheat with what they send, rather than with what they say.

A settled score cannot be lied about, but what is scored is still what members send. Each cheat has no other
knowledge than its name says: the global models of all rounds are public, the test pool is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from fedmerit.protocol.outcome import Model
from fedmerit.simulation.direction import direction
from fedmerit.simulation.models import as_tensor
from fedmerit.simulation.setup import Federation
from fedmerit.simulation.transport import LocalTraining, PlainRound

Kind = Literal["pool", "replay", "scale", "pair"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LAST = 5
"""Public updates that count as known already, for the innovation of a round."""


def who(names: Sequence[str], kind: Kind) -> tuple[str, ...]:
    """Return who cheats: the last member; as a pair the last two, of whom the first one is to gain."""
    return tuple(names[-2:] if kind == "pair" else names[-1:])


def told_the_pool(federation: Federation) -> Federation:
    """The same federation, but its last member has the test pool in the place of data of its own."""
    shown, (*others, cheat) = federation.pool.slice(1), federation.clients
    return replace(federation, clients=[*others, replace(cheat, x=shown.x, y=shown.y)])


@dataclass(eq=False)
class Cheating(LocalTraining):
    """Local training, after which somebody sends something else.

    - "pool": trains on the test pool; the update gets ``factor`` times the mean length of the others'.
    - "replay": sends ``factor`` times the last public update; nothing in the first round.
    - "scale": sends ``factor`` times its own honest update.
    - "pair": two honest members add and take away ``factor`` times the last public update; their sum, and so
      the model, stays as it was.
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
        if self.kind == "pair":
            for name, sign in zip(cheats, (1, -1), strict=True):
                models[name] = models[name] + np.float32(sign * self.factor) * public
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


class Innovation:
    r"""An analysis of plain rounds: scores along what the last public updates do not show already.

    .. math:: \langle U_i, g - P g \rangle

    with P the projection on the last five public updates. Who replays them gets nothing.
    """

    def __init__(self, federation: Federation, rounds: dict[int, dict[str, dict[str, Any]]]) -> None:
        self.federation, self.rounds = federation, rounds
        self.known: list[torch.Tensor] = []

    def summed(self, plain: PlainRound) -> None:
        """Add the products beside the round's other Aumann-Shapley scores."""
        outcome, federation = plain.outcome, self.federation
        device, utility = federation.device, federation.utilities[0]
        shown = outcome.slice
        assert shown is not None
        x, y = as_tensor(shown.x).to(device), as_tensor(shown.y).to(device)
        way = direction(federation.network, plain.m0, outcome.model, x, y, utility, blocks=1)
        gradient = way.gradient.double()
        if self.known:
            basis, _ = torch.linalg.qr(torch.stack(self.known, dim=1))
            gradient = gradient - basis @ (basis.T @ gradient)
        updates = [as_tensor(plain.update(name)).to(device).double() for name in outcome.included]
        public = torch.stack(updates).sum(0)
        products = [float(update @ gradient) for update in updates]
        self.rounds[outcome.round]["innovation"] = {
            "participants": list(outcome.included),
            "blocks": [products],
            "sizes": [len(shown.y)],
            "gain": way.gain,
            "rest": way.gain - sum(products),
        }
        if float(public.norm()) > 0:
            self.known = [*self.known[1 - LAST :], public]
