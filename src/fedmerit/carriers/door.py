"""A member's door: who it is, what it checks of its own update, and what it tells the server of failures."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerit.carriers.measures import Gradient, Value, evaluator, slope_of
from fedmerit.carriers.shape import Shape, listed
from fedmerit.config import Config
from fedmerit.errors import (
    BoundError,
    FedmeritError,
    KeyFileError,
    MessageError,
    RefusedError,
    StoreError,
    VersionError,
)
from fedmerit.identity import Roster, load_key, public_key, read_roster
from fedmerit.protocol.direction import Gradient as PathGradient
from fedmerit.protocol.direction import along_path
from fedmerit.protocol.member import REFUSED, Participant
from fedmerit.protocol.messages import Ask, Parcel
from fedmerit.protocol.outcome import Trained
from fedmerit.storage.member_state import MemberFiles

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger("fedmerit")


@dataclass(frozen=True)
class Place:
    """Where a member's key and roster are; in a rehearsal, whoever starts the run chooses the folder."""

    key: Path
    roster: Path
    rehearsal: bool = False


def named(place: Place) -> tuple[str, Ed25519PrivateKey, Roster]:
    """Return the name of the member whose key this is, the key, and the roster that lists it."""
    identity, roster = load_key(place.key), read_roster(place.roster)
    for member in roster.members:
        if member.key == public_key(identity):
            return member.name, identity, roster
    raise KeyFileError(f"{place.key}: not the key of a member on the roster {place.roster}")


def path_gradient(gradient: Gradient, kind: type[Shape], shape: Any, utility: str) -> PathGradient:
    """Return a user's gradient along a path, for models of the shape that a member stored."""
    return along_path(slope_of(gradient, kind.load(shape)))


def participant(
    place: Place,
    value: Value,
    gradient: Gradient | None,
    kind: type[Shape],
    *,
    engines: tuple[str, str],
    **options: Any,
) -> Participant:
    """Return the member at a place, with its files beside its key.

    ``kind`` is the shape that makes what the user's functions get; ``engines`` are the carrier's names for a
    run between machines and for a rehearsal; ``options`` are those of `Participant`.
    """
    name, identity, roster = named(place)
    return Participant(
        *(name, identity, roster, partial(MemberFiles, place.key, identity)),
        lambda shape, utilities: evaluator(value, kind.load(shape), utilities),
        engines=engines if place.rehearsal else engines[:1],
        gradients=None if gradient is None else partial(path_gradient, gradient, kind),
        **options,
    )


def invites(data: Parcel) -> bool:
    """Return whether a message asks to join: the server may learn why a member cannot."""
    try:
        return Ask.unpack(data)[0].exchange == "join"
    except MessageError:
        return False


def refusal(error: Exception, data: Parcel | None) -> Exception:
    """Return the error that the server is told of, and log the true one.

    To the server all failures look the same; only an invitation is refused with a reason, and whoever runs
    the server must know which version to install. ``data`` is the message, if it could be read.
    """
    if isinstance(error, VersionError):
        log.warning("refuses a message: %s", error)
        return error
    if data is not None and isinstance(error, FedmeritError) and invites(data):
        if not isinstance(error, StoreError | KeyFileError):
            return error
        log.warning("does not join: %s", error)
        told = "cannot use its key or files; its own log says which"
        return RefusedError(told, stage="join", logged=True)
    if not isinstance(error, FedmeritError):
        log.error("refuses a message: this member's own code failed", exc_info=error)
    elif not (isinstance(error, RefusedError) and error.logged):  # otherwise it is in the log already
        log.warning("refuses a message: %s", error)
    return RefusedError(REFUSED, logged=True)


# ------------------------------------------------------------------------------------------ its own update


def check_update(shape: Shape, weighted_by: str, trained: Trained, config: Config) -> None:
    """Raise an error that this member's owner can act on if an update cannot be masked."""
    bound, largest = config.secure_aggregation.bound, shape.largest(trained.delta)
    if broken := [name for name, change in largest.items() if not math.isfinite(change)]:
        told = f"training left numbers that are not finite in {listed(broken)}"
        raise BoundError(told, stage="masked")
    if beyond := {name: change for name, change in largest.items() if change > bound}:
        names = sorted(beyond, key=beyond.__getitem__, reverse=True)
        statistics = any("running_" in name for name in beyond)
        usual = " (running statistics of BatchNorm, the usual ones)" if statistics else ""
        raise BoundError(
            f"the update lies beyond the bound {bound:g}: training changed a number of "
            f"{listed(names)}{usual} by {beyond[names[0]]:g}; if that is intended, the server has "
            "to use a larger secure_aggregation.bound",
            stage="masked",
        )
    if config.weighing == "secret":
        _check_samples(weighted_by, trained.samples, config.training.weight_cap)


def _check_samples(name: str, samples: float | None, cap: int) -> None:
    if samples is None:
        raise BoundError(
            f"training returned no metric {name!r}, by which this run weighs members: put the number of "
            f"training samples there, or name the metric that holds it (weighted_by=...)",
            stage="masked",
        )
    whole = float(samples).is_integer()
    if not (whole and 1 <= samples <= cap):
        larger = "the server has to use a larger training.weight_cap"
        raise BoundError(
            f"the metric {name!r} must be the number of training samples, a whole number from 1 to {cap},"
            f" got {samples:g}: {larger if whole and samples > cap else 'put that number there'}",
            stage="masked",
        )
