"""From local models to one sum: weights, encoding, attempts, with masks or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedmerit.config import Config, recorded_hash
from fedmerit.data.corruptions import ClientData
from fedmerit.federation.journal import Round
from fedmerit.federation.protocol import Model, model_hash
from fedmerit.federation.reweighting import from_past
from fedmerit.federation.setup import seed_for
from fedmerit.federation.summing import Attempt, Observer, Offer, masked_sum, plain_sum
from fedmerit.federation.weighing import are_public, encoding_of, roster_weights
from fedmerit.secagg.quantise import Encoding
from fedmerit.secagg.setting import LEAST_IN_SUM, Setting, Task

if TYPE_CHECKING:
    from fedmerit.federation.identities import Identities


@dataclass(frozen=True, eq=False)
class Aggregation:
    """How the sums of a run are made; without ``identities`` the same integers are added unmasked."""

    config: Config
    clients: Sequence[ClientData]
    run_id: str
    identities: Identities | None
    observe: Observer | None

    @property
    def names(self) -> tuple[str, ...]:
        """The members."""
        return tuple(client.name for client in self.clients)

    def offers(
        self,
        number: int,
        model: Model,
        scheduled: Sequence[str],
        trained: dict[str, Model],
        weights: Mapping[str, float] | None,
    ) -> list[Offer]:
        """What each scheduled member brings to the sum; a member whose update is not finite withdraws."""
        counts = {client.name: len(client.y) for client in self.clients}
        offers = []
        for name in scheduled:
            with np.errstate(all="ignore"):
                delta = trained.pop(name) - model  # at most one model a member at a time
            weight: float | None = None
            if self.config.training.weights == "secret":
                weight = counts[name]
            elif weights is not None:
                weight = weights[name]
            seed = seed_for(self.config, "rounding", number, name)
            offers.append(Offer(name, delta if bool(np.isfinite(delta).all()) else None, weight, seed))
        return offers

    def public_weights(self, rounds: Sequence[Round]) -> dict[str, float] | None:
        """Weights known to all before the round: from the roster, or from the scores of earlier rounds."""
        kind = self.config.training.weights
        if kind == "roster":
            return roster_weights(self.config)
        if kind != "scores":
            return None
        paid = self.config.scoring.utilities[0]
        scored = [found for one in rounds if (found := one.to_reports(paid)) is not None]
        score, missing = self.config.training.weight_score, self.config.scoring.missing
        return from_past(scored, self.names, score=score, missing=missing)

    def sum(
        self, number: int, model: Model, offers: Sequence[Offer], lost: Mapping[str, str]
    ) -> tuple[Attempt, Encoding | None]:
        """One attempt with everybody the schedule names; who is lost stays lost for this round.

        N is that of the schedule and the threshold that of all members, never those of who answered:
        otherwise a server could choose the members of a small sum by losing the others. In one process a
        retry would lose the same members again, so there is none.
        """
        least = max(LEAST_IN_SUM, self.config.threshold)
        if len(offers) < least:
            everybody = len(self.config.clients)
            said = f"{len(offers)} members scheduled, {least} of all {everybody} are needed"
            return Attempt(aborted=said), None
        encoding = encoding_of(self.config, model.size, len(offers), self.public_of(offers))
        return self._attempt(number, model, offers, encoding, lost), encoding

    def public_of(self, offers: Sequence[Offer]) -> dict[str, float] | None:
        """The weights of a round where they are public."""
        if not are_public(self.config):
            return None
        return {offer.name: float(offer.weight or 0.0) for offer in offers}

    def _attempt(
        self,
        number: int,
        model: Model,
        offers: Sequence[Offer],
        encoding: Encoding,
        lost: Mapping[str, str],
    ) -> Attempt:
        public = self.public_of(offers)
        weights = None if public is None else tuple(public.values())
        threshold = self.config.threshold
        if self.identities is None:

            def need(stage: str) -> int:
                return threshold if stage in ("check", "unmask") else max(threshold, LEAST_IN_SUM)

            return plain_sum(encoding, offers, need=need, lost=lost, public_weights=weights)
        setting = Setting(
            run=self.run_id,
            round=number,
            attempt=0,
            members=tuple(offer.name for offer in offers),
            roster=self.identities.roster,
            config_hash=bytes.fromhex(recorded_hash(self.config.to_toml())),
            threshold=threshold,
            checked=self.config.secure_aggregation.check,
        )
        task = Task(bytes.fromhex(model_hash(model)), encoding, weights)
        identities = self.identities
        return masked_sum(
            setting, task, offers, identities.members, identities.released, lost=lost, observe=self.observe
        )
