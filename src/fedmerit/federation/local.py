"""What happens at the members' homes: local training, the solo track, and members that only pretend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedmerit.data.corruptions import ClientData
from fedmerit.federation.protocol import Model
from fedmerit.federation.setup import Federation, generator_for, seed_for
from fedmerit.training import train_many

NOISE = 0.01
"""A noise free rider's standard deviation, in units of the model's."""


@dataclass(eq=False)
class LocalTraining:
    """Trains the members of a federation, one after another on a CPU, stacked on a GPU.

    Args:
        federation: data, network and settings.
        solo: per member the model it trains alone from the first one; empty where nobody does.
        notes: what somebody should be told, once.
    """

    federation: Federation
    solo: dict[str, Model] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def train(
        self,
        number: int,
        scheduled: Sequence[str],
        start: Model,
        stale: Callable[[], Model],
        tell: Callable[[int, int], None],
    ) -> dict[str, Model]:
        """Every scheduled member's local model after round ``number`` at home.

        Seeds depend on run seed, round and member only.

        Args:
            number: of the round.
            scheduled: who takes part.
            start: the global model.
            stale: gives the global model of one round earlier, which a stale free rider sends back.
            tell: told (done, total) members.
        """
        clients = [client for client in self.federation.clients if client.name in scheduled]
        honest = [client for client in clients if client.behaviour == "honest"]
        stacked = self.federation.device.type == "cuda"
        groups = [honest] if stacked else [[client] for client in honest]
        models: dict[str, Model] = {}
        for group in filter(None, groups):
            tell(len(models), len(honest))
            models |= self._group(number, group, start)
        tell(len(honest), len(honest))
        for client in clients:
            if client.behaviour == "zero":
                models[client.name] = start
            elif client.behaviour == "stale":
                models[client.name] = stale()
            elif client.behaviour == "noise":
                noise = generator_for(self.federation.config, "noise", number, client.name)
                made_up = noise.normal(0.0, NOISE * float(np.std(start)), start.size)
                models[client.name] = (start + made_up).astype(np.float32)
        return models

    def _group(self, number: int, group: Sequence[ClientData], start: Model) -> dict[str, Model]:
        federation = self.federation
        names = [client.name for client in group]
        seeds = [seed_for(federation.config, "train", number, name) for name in names]
        data = [federation.training_data(client, number) for client in group]
        trained = train_many(federation.network, start, data, federation.training, seeds)
        if trained.note and trained.note not in self.notes:
            self.notes.append(trained.note)
        if self.solo:
            starts = [self.solo[name] for name in names]
            alone = train_many(federation.network, starts, data, federation.training, seeds)
            self.solo |= dict(zip(names, alone.vectors, strict=True))
        return dict(zip(names, trained.vectors, strict=True))
