"""One attempt at a round's sum, in one process: under masks, or the same integers without them.

Both ways add the same words of the same encoding, lose the same members at the same stages and give up under
the same conditions, so that a run with secure aggregation off ends with the same bytes as one with it on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BoundError, ProtocolError, RoundAborted
from fedmerit.secagg.quantise import Encoding, Words
from fedmerit.secagg.setting import LEAST_IN_SUM

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedmerit.secagg.released import Released
    from fedmerit.secagg.setting import Setting, Task

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
