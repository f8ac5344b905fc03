"""What a member makes of an outcome: whether it can be true, and what it kept to measure itself by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedmerit.errors import BindingError
from fedmerit.federation.measuring import Member
from fedmerit.federation.protocol import Evaluate, Model, Outcome, model_hash
from fedmerit.federation.remote.agreeing import Agreed
from fedmerit.federation.remote.keeping import Keeping
from fedmerit.federation.remote.wire import Ask, unpack_outcome
from fedmerit.federation.weighing import scheduled_encoding
from fedmerit.secagg import Client

Evaluator = Callable[[Any, Sequence[str]], Evaluate]
"""From the shape that training noted and the utilities' names, what evaluates a model on a test slice."""


def told(ask: Ask, agreed: Agreed, client: Client, update: Sequence[Any], member: str) -> Outcome:
    """What the server says came out of a round, if it can be true.

    Args:
        ask: the request for a report.
        agreed: what the member signed when it joined.
        client: its state machine of the round; knows who is in the sum.
        update: what it kept: M0, its change, its weight.
        member: its name.
    """
    m0 = vector(update[0])
    outcome = unpack_outcome(ask, m0.size)
    if outcome.included != client.survivors:
        raise BindingError("others are in the sum than we signed", stage="report", member=member)
    if outcome.m0_hash != model_hash(m0):
        raise BindingError("the server speaks of another M0 than ours", stage="report", member=member)
    encoding, public = scheduled_encoding(agreed.config, m0.size, client.setting.members)
    weight = 1.0 if update[2] is None else float(update[2])
    outcome.check(member, m0, weight, encoding, public)
    outcome.slice.verify(agreed.commitment, outcome.round)
    return outcome


def scoring_side(
    keeping: Keeping, agreed: Agreed, number: int, member: str, evaluator: Evaluator, shape: Any
) -> Member:
    """The member's side of scoring, with the sums it kept with its last report."""
    config = agreed.config
    evaluate = evaluator(shape, config.scoring.utilities)
    side = Member(member, evaluate, agreed.commitment, config.scoring.game)
    if (last := keeping.last("report", number)) is not None:
        side.totals_on = last[4]
        side.totals = {name: np.frombuffer(data, "<f8").copy() for name, data in last[5].items()}
    return side


def vector(data: bytes) -> Model:
    """A model from a member's file."""
    return np.frombuffer(data, "<f4").astype(np.float32)
