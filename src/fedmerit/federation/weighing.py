"""How a config's weights enter the sum: the encoding that members and server must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from fedmerit.config import Config
from fedmerit.secagg.quantise import Encoding

_KINDS: dict[str, Literal["uniform", "public", "secret"]] = {
    "uniform": "uniform",
    "secret": "secret",
    "roster": "public",
    "scores": "public",
    "current-scores": "public",
}


def are_public(config: Config) -> bool:
    """Whether everybody knows everybody's weight before the sum."""
    return _KINDS[config.training.weights] == "public"


def roster_weights(config: Config) -> dict[str, float]:
    """Everybody's weight, where the roster fixes them."""
    return {name: float(config.training.roster_weights[name]) for name in config.clients}


def encoding_of(config: Config, length: int, members: int, public: Mapping[str, float] | None) -> Encoding:
    """How updates of ``members`` scheduled members become integers.

    Args:
        config: of the run.
        length: numbers in a model.
        members: how many are scheduled.
        public: their weights, where these are public.
    """
    kind, cap = config.training.weights, 1.0
    if kind == "secret":
        cap = config.training.weight_cap
    elif public is not None:
        cap = max(public.values())
    return Encoding(
        length=length,
        members=members,
        bound=config.secure_aggregation.bound,
        weights=_KINDS[kind],
        weight_cap=cap if kind != "uniform" else 1,
        clip=config.secure_aggregation.clip,
    )


def scheduled_encoding(
    config: Config, length: int, members: Sequence[str]
) -> tuple[Encoding, dict[str, float] | None]:
    """The encoding of a round between machines, and the weights of its members where these are public."""
    public = None
    if are_public(config):
        everybody = roster_weights(config)
        public = {name: everybody[name] for name in members}
    return encoding_of(config, length, len(members), public), public
