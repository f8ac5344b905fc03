"""From local models to one sum: weights, encoding, attempts, with masks or without."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config, recorded_hash
from fedmerit.errors import BoundError, ProtocolError, RoundAborted
from fedmerit.ledger.records import Round
from fedmerit.protocol.messages import Model, model_hash
from fedmerit.protocol.terms import are_public, encoding_of, from_past, roster_weights
from fedmerit.secagg.quantise import Encoding, Words
from fedmerit.secagg.setting import LEAST_IN_SUM, Setting, Task
from fedmerit.simulation.data.partitions import ClientData
from fedmerit.simulation.setup import Federation, generator_for, seed_for
from fedmerit.simulation.training import train_many

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedmerit.secagg.setting import Setting, Task
    from fedmerit.secagg.state import Released
    from fedmerit.simulation.identities import Identities

# ------------------------------------------------------------------------------------------------- one sum

Observer = Callable[[str, str, bytes], None]
"""Sees (stage, member, bytes) of everything the server receives."""

SUM_STAGES = ("advertise", "share", "masked", "check", "unmask")


@dataclass(frozen=True, eq=False)
class Offer:
    """What one member brings: its update, or None if it withdrew, its weight and its rounding seed."""

    name: str
    delta: npt.NDArray[np.float32] | None
    weight: float | None
    seed: int

    def words(self, encoding: Encoding) -> Words:
        """Its weighted update as integers modulo 2^32; not kept, as that would be a second model a member."""
        if self.delta is None:
            raise BoundError("withdrew: its update is not finite")
        return encoding.encode(self.delta, weight=self.weight, seed=self.seed).words

    def contribution(self, encoding: Encoding) -> npt.NDArray[np.float64]:
        """w_i d_i as it was summed: after rounding to integers and back."""
        return encoding.dequantise(self.words(encoding))


@dataclass(eq=False)
class Attempt:
    """What came of it."""

    included: tuple[str, ...] = ()
    weighted_sum: npt.NDArray[np.float64] | None = None  # None: aborted
    total_weight: float = 0.0
    aborted: str = ""  # why
    declined: dict[str, str] = field(default_factory=dict)  # who left by itself; the reason stays with it
    masked_hashes: dict[str, str] = field(default_factory=dict)
    bytes_up: int = 0


def lost_at(lost: Mapping[str, str], name: str) -> int:
    """Number of the first stage whose message of this member never arrives."""
    stage = lost.get(name, "report")
    return SUM_STAGES.index(stage) if stage in SUM_STAGES else len(SUM_STAGES)


def plain_sum(
    encoding: Encoding,
    offers: Sequence[Offer],
    *,
    need: Callable[[str], int],
    lost: Mapping[str, str],
    public_weights: Sequence[float] | None,
) -> Attempt:
    """Add the words as they are. ``need(stage)`` is how many members a stage needs."""
    attempt, left = Attempt(), [offer.name for offer in offers]
    total = np.zeros(encoding.words, np.uint32)
    for at, stage in enumerate(SUM_STAGES):
        here = [offer for offer in offers if offer.name in left and lost_at(lost, offer.name) > at]
        if stage == "masked":
            summed = []
            for offer in here:
                try:
                    np.add(total, offer.words(encoding), out=total)
                except BoundError as error:
                    attempt.declined[offer.name] = str(error)
                    continue
                summed.append(offer)
            here = summed
            attempt.included = tuple(offer.name for offer in here)
            if public_weights is not None and sum(bool(offer.weight) for offer in here) < LEAST_IN_SUM:
                attempt.aborted = f"stage {stage}: fewer than {LEAST_IN_SUM} members with a weight in the sum"
                return attempt
        left = [offer.name for offer in here]
        if len(here) < need(stage):
            attempt.aborted = f"stage {stage}: {len(here)} members left, {need(stage)} are needed"
            return attempt
    _finish(attempt, encoding, total, [offer.name for offer in offers], public_weights)
    return attempt


def _finish(
    attempt: Attempt,
    encoding: Encoding,
    total: npt.NDArray[np.uint32],
    names: Sequence[str],
    public_weights: Sequence[float] | None,
) -> None:
    weight = None
    if public_weights is not None:
        of = dict(zip(names, public_weights, strict=True))
        weight = math.fsum(of[name] for name in attempt.included)
    decoded = encoding.decode(total, included=len(attempt.included), public_total=weight)
    attempt.weighted_sum, attempt.total_weight = decoded.weighted_sum, decoded.total_weight


def masked_sum(
    setting: Setting,
    task: Task,
    offers: Sequence[Offer],
    identities: Mapping[str, Ed25519PrivateKey],
    released: Mapping[str, Released],
    *,
    lost: Mapping[str, str],
    observe: Observer | None = None,
) -> Attempt:
    """Drive the two state machines of `fedmerit.secagg` through all stages."""
    from fedmerit.secagg import Client, Server, Update

    server = Server(setting, task)
    clients = {
        name: Client(setting, name, identities[name], released=released[name]) for name in setting.members
    }
    offered = {offer.name: offer for offer in offers}
    attempt = Attempt()
    shown: dict[str, bytes | None] = dict.fromkeys(setting.members)
    for stage in setting.stages:
        for name, broadcast in shown.items():
            if lost_at(lost, name) <= SUM_STAGES.index(stage):
                continue
            client, offer = clients[name], offered[name]
            message, declined = _answer(client, stage, broadcast, offer, task, Update)
            if declined:
                attempt.declined[name] = declined
            attempt.bytes_up += len(message)
            if observe:
                observe(stage, name, message)
            server.receive(message, name)
        try:
            shown = dict(server.advance())
        except RoundAborted as error:
            attempt.aborted = str(error)
            return attempt
        if stage == "masked":
            attempt.included = tuple(server.heads[stage])
            attempt.masked_hashes = {
                name: bytes(head.body[2]).hex() for name, head in server.heads["masked"].items()
            }
    assert server.result is not None
    attempt.weighted_sum, attempt.total_weight = server.result.weighted_sum, server.result.total_weight
    return attempt


def _answer(
    client: Any, stage: str, broadcast: bytes | None, offer: Offer, task: Task, update: Any
) -> tuple[bytes, str]:
    """A member's message of a stage, or its refusal and the reason, which the server does not learn."""
    if stage != "masked":
        return client.handle(broadcast), ""
    if offer.delta is None:
        return client.decline(), "withdrew: its update is not finite"
    try:
        return client.masked(broadcast, update(task, offer.delta, offer.weight, offer.seed)), ""
    except ProtocolError as error:
        return client.decline(), str(error)


# --------------------------------------------------------------------------------------- the sums of a run


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


# ------------------------------------------------------------------------------------------ local training

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
