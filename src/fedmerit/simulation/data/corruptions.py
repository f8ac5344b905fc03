"""Bad clients on purpose: what a client trains on, or does instead of training.

``apply`` takes the ``[corruption]`` settings, one corruption per client, and gives every client its samples::

    label_noise = {client-5 = 0.8}          or "ramp": client i of N at rate i/(N-1)
    label_flip  = ["client-2"]              y -> C-1-y
    duplicate   = {client-3 = "client-0"}   trains on what client-0 trains on
    test_set    = ["client-4"]              trains on the test pool
    free_rider  = {client-1 = "zero"}       sends no change, "noise", or a "stale" model (the engine does it)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast, get_args

import numpy as np

from fedmerit.errors import DataError
from fedmerit.protocol.pool import Images, Labels
from fedmerit.simulation.data.partitions import Indices

T = TypeVar("T")

Behaviour = Literal["honest", "zero", "noise", "stale"]
"""What a client sends: a trained update, none, random numbers, or an update of an old model."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ClientData:
    """What one client trains on, how it behaves, and what was done to it (empty: nothing)."""

    name: str
    x: Images
    y: Labels
    behaviour: Behaviour = "honest"
    corruption: str = ""


def label_noise(y: Labels, rate: float, classes: int, rng: np.random.Generator) -> Labels:
    """Each label is replaced, with probability ``rate``, by a uniformly random class (its own included).

    The expected share of wrong labels is rate * (1 - 1/C).

    >>> label_noise(np.array([1, 1, 1]), 0.0, 10, np.random.default_rng(0))
    array([1, 1, 1])
    """
    _check_rate(rate, "label noise:")
    hit = rng.random(len(y)) < rate
    return np.where(hit, rng.integers(classes, size=len(y)), y)


def label_flip(y: Labels, classes: int) -> Labels:
    """y -> C-1-y. With an odd number of classes the middle one stays.

    >>> label_flip(np.array([0, 1, 9]), 10)
    array([9, 8, 0])
    """
    return classes - 1 - y


def ramp(clients: int) -> list[float]:
    """Noise rates i/(N-1): the first client is clean, the last has random labels.

    >>> ramp(5)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    if clients < 2:
        raise DataError(f"corruption.label_noise: a ramp needs at least 2 clients, got {clients}")
    return [i / (clients - 1) for i in range(clients)]


def apply(
    x: Images,
    y: Labels,
    parts: Sequence[Indices],
    names: Sequence[str],
    classes: int,
    rng: np.random.Generator,
    *,
    label_noise: Mapping[str, float] | Literal["ramp"] | None = None,
    label_flip: Iterable[str] = (),
    free_rider: Mapping[str, str] | None = None,
    duplicate: Mapping[str, str] | None = None,
    test_set: Iterable[str] = (),
    pool: tuple[Images, Labels] | None = None,
) -> list[ClientData]:
    """Deal (x, y) to the clients and corrupt those that the settings name.

    Args:
        x: all training images.
        y: all training labels.
        parts: indices of each client, from `split`.
        names: of the clients, in the same order.
        classes: number of classes C.
        rng: one generator is spawned per client, so that one client's noise does not depend on the others'.
        label_noise: rate in [0, 1] by name, or "ramp" for everybody.
        label_flip: names.
        free_rider: "zero", "noise" or "stale" by name.
        duplicate: name -> whose data it trains on, corrupted or not.
        test_set: names.
        pool: images and labels of the test pool, for ``test_set``.
    """
    if len(parts) != len(names):
        raise DataError(f"{len(parts)} parts for {len(names)} clients")
    noise = _noise_rates(label_noise, names)
    riders, copies = _mapped(free_rider, "free_rider"), _mapped(duplicate, "duplicate")
    flippers, cheats = _listed(label_flip, "label_flip"), _listed(test_set, "test_set")
    _check_names(
        names,
        {
            "label_noise": noise,
            "label_flip": flippers,
            "free_rider": riders,
            "duplicate": copies,
            "test_set": cheats,
        },
    )
    _check_riders(riders)
    _check_copies(copies, names)
    if cheats and pool is None:
        raise DataError(f"corruption.test_set: client {cheats[0]!r} needs the test pool, but none was given")

    made: dict[str, ClientData] = {}
    for name, part, own in zip(names, parts, rng.spawn(len(names)), strict=True):
        images, labels, what = x[part], y[part], ""
        if name in noise:
            labels, what = _label_noise(labels, noise[name], classes, own), f"label noise {noise[name]:g}"
        elif name in flippers:
            labels, what = _label_flip(labels, classes), "labels flipped"
        elif name in riders:
            what = f"free rider: {riders[name]}"
        elif name in cheats and pool is not None:
            images, labels, what = pool[0], pool[1], "trains on the test pool"
        behaviour = cast(Behaviour, riders.get(name, "honest"))
        made[name] = ClientData(name=name, x=images, y=labels, behaviour=behaviour, corruption=what)
    for name, other in copies.items():
        source = made[other]
        made[name] = ClientData(name=name, x=source.x, y=source.y, corruption=f"data of {other}")
    return [made[name] for name in names]


_label_noise, _label_flip = label_noise, label_flip


def _noise_rates(
    given: Mapping[str, float] | Literal["ramp"] | None, names: Sequence[str]
) -> dict[str, float]:
    """Rates by name, without those of 0."""
    if isinstance(given, str):
        if given != "ramp":
            raise DataError(f'corruption.label_noise: expected "ramp" or a rate by client, got {given!r}')
        given = dict(zip(names, ramp(len(names)), strict=True))
    rates = _mapped(given, "label_noise")
    for name, rate in rates.items():
        _check_rate(rate, f"corruption.label_noise.{name}:")
    return {name: rate for name, rate in rates.items() if rate or name not in names}


def _check_rate(rate: float, what: str) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not 0 <= rate <= 1:
        raise DataError(f"{what} expected a rate in [0, 1], got {rate!r}")


def _listed(names: Iterable[str], setting: str) -> list[str]:
    if isinstance(names, str):
        raise DataError(f"corruption.{setting}: expected a list of client names, got the string {names!r}")
    return list(names)


def _mapped(given: Mapping[str, T] | None, setting: str) -> dict[str, T]:
    if given is not None and not isinstance(given, Mapping):
        raise DataError(f"corruption.{setting}: expected a value by client name, got {given!r}")
    return dict(given or {})


def _check_names(names: Sequence[str], settings: Mapping[str, Iterable[str]]) -> None:
    """Every name exists and has one corruption."""
    used: dict[str, str] = {}
    for setting, listed in settings.items():
        where = f"corruption.{setting}"
        for name in listed:
            if name not in names:
                raise DataError(f"{where}: no client {name!r}, expected one of {', '.join(names)}")
            if name in used:
                raise DataError(f"{where}: client {name!r} is in {used[name]} too: one corruption each")
            used[name] = setting


def _check_riders(riders: Mapping[str, str]) -> None:
    allowed = get_args(Behaviour)[1:]
    for name, kind in riders.items():
        if kind not in allowed:
            raise DataError(f"corruption.free_rider.{name}: expected {', '.join(allowed)}, got {kind!r}")


def _check_copies(copies: Mapping[str, str], names: Sequence[str]) -> None:
    for name, other in copies.items():
        if other not in names:
            raise DataError(
                f"corruption.duplicate.{name}: no client {other!r}, expected one of {', '.join(names)}"
            )
        if other in copies:
            why = "itself" if other == name else f"{other!r}, which is a duplicate too"
            raise DataError(f"corruption.duplicate: client {name!r} cannot copy {why}")
