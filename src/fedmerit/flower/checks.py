"""What a server is given, checked before anybody trains: strategy, key, utilities, value and gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from fedmerit.errors import (
    ConfigError,
)
from fedmerit.flower.codec import (
    Gradient,
    Value,
)
from fedmerit.flower.folders import NEW_KEY
from fedmerit.identity import (
    PREFIX,
    Roster,
    load_key,
    public_key,
)
from fedmerit.protocol.direction import Slope
from fedmerit.protocol.outcome import Evaluate, Model, mean
from fedmerit.protocol.pool import Slice
from fedmerit.protocol.terms import FLOWER, SIMULATED

AVERAGING = ("FedAvg", "FedProx")
OPTIMISERS = ("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedOpt")
REFUSED = {
    "Krum": "it compares members' updates with each other",
    "MultiKrum": "it compares members' updates with each other",
    "Bulyan": "it compares members' updates with each other",
    "FedMedian": "it needs the median of every coordinate over members' updates",
    "FedTrimmedAvg": "it sorts every coordinate of members' updates",
    "QFedAvg": "it weighs members by their losses and needs each one's update",
    "FedXgbBagging": "trees are not averaged",
    "FedXgbCyclic": "trees are not averaged",
}


def method_of(given: str | None, gradient: Gradient | None) -> str:
    """Return how members are scored; raise ConfigError if that needs a gradient and there is none."""
    if gradient is None and given is None:
        raise ConfigError(
            "method: expected gradient=..., the gradient of the paid utility, for scores that are settled "
            'after the last round; or method="reports", for scores by what members report in every round'
        )
    if gradient is None and given != "reports":
        raise ConfigError(
            f"method: {given!r} needs gradient=..., the gradient of the paid utility "
            "(fedmerit.flower.torch_scoring makes it for a PyTorch model)"
        )
    return given or "settled"


def utilities_of(
    measure: Value | Gradient | None, utilities: Sequence[str] | None, whole: Sequence[str]
) -> dict[str, Any]:
    """Return what is measured, named by the user or by `torch_scoring`, and which are of all samples."""
    if isinstance(utilities, str):
        raise ConfigError(f"utilities: expected a list of names, got {utilities!r}: write [{utilities!r}]")
    known = {"utilities": ["value"], **getattr(measure, "scoring", {})}
    if utilities is not None:
        known = {**(known if list(utilities) == known["utilities"] else {}), "utilities": list(utilities)}
    known |= {"whole": list(whole)} if whole else {}
    return {name: given for name, given in known.items() if given}


FEW = 16
"""Test samples on which ``value`` and ``gradient`` are compared before anybody trains."""


def check_slope(slope: Slope, evaluate: Evaluate | None, model: Model, shown: Slice, utility: str) -> None:
    """Raise ConfigError unless the user's gradient works and is about what the user's value measures."""
    few = Slice(index=shown.index, x=shown.x[:FEW], y=shown.y[:FEW], salts=b"", path=())
    every = np.arange(len(few.y))
    found, uphill = slope(model, few, every)
    if not (np.isfinite(found) and np.isfinite(uphill).all()):
        raise ConfigError("gradient: of the first model, it returns numbers that are not finite")
    if evaluate is not None:
        expected = mean(evaluate(model, few)[utility])
        if not abs(found - expected) <= 1e-3:
            raise ConfigError(
                f"gradient: it says that the mean {utility} of {len(few.y)} test samples is {found:g}, but "
                f"value says {expected:g}: both must measure the same"
            )
    check_rise(lambda at: slope(at, few, every)[0], model, found, uphill)


RISE = 1e-3
"""By how much a small step along the gradient is to raise the utility, by the gradient's own account."""
LEAST_RISE = 1e-5
"""What rounding may hide: where the longest step promises less, nothing is checked."""
LONGEST = 0.05
"""The longest step, as a part of the model's own length."""


def check_rise(
    measured: Callable[[Model], float], model: Model, value: float, uphill: npt.NDArray[Any]
) -> None:
    """Raise ConfigError unless a small step along the gradient raises the utility about as it promises.

    A wrong sign, or a sum in place of a mean, is found; a factor of 2 is not. Nothing is checked where the
    utility is nearly 0 or 1, or a shorter step says something else: there it is curved too much.
    """
    steepest = float(np.linalg.norm(uphill.astype(np.float64)))
    longest = LONGEST * float(np.linalg.norm(model.astype(np.float64)))
    rise = min(RISE, value / 10, (1 - value) / 10, steepest * longest)
    if rise < LEAST_RISE:
        return
    length = rise / steepest

    def kept(length: float) -> float:
        """Return which part of the promised change there is."""
        step = (uphill * (length / steepest)).astype(np.float32)
        return (measured(model + step) - measured(model - step)) / (2 * length * steepest)

    found, shorter = kept(length), kept(length / 4)
    if abs(found - shorter) <= max(1.0, abs(found), abs(shorter)) / 4 and not 0.5 <= found <= 2:
        raise ConfigError(
            f"gradient: a small step along it changes the mean utility by {found:.2g} times what it "
            "promises: expected the gradient of the mean over the given samples, of a utility that is better "
            "the higher it is (not of a loss, and not of a sum)"
        )


def server_key_of(roster: Roster, given: Any, key: str | Path | None) -> Path | None:
    """Return the file of the server's private key; None if the roster names no server.

    Raises:
        ConfigError: there is no such file, or it holds another key than the roster names.
    """
    if roster.server is None:
        if key is not None:
            raise ConfigError(f"server_key: {key} was given, but the roster names no server")
        return None
    if key is None and isinstance(given, Roster):
        raise ConfigError("server_key: expected the file of the server's private key, got none")
    path = Path(given).with_name("server.pem") if key is None else Path(key)
    named = PREFIX + roster.server.hex()
    if not path.exists():
        raise ConfigError(
            f"server_key: {path} does not exist; expected the private key of the server on the roster, "
            f"{named}. Put it there, or give its file as server_key. If it is lost, {NEW_KEY} and change the "
            "roster (fedmerit keys propose)"
        )
    if (found := public_key(load_key(path))) != roster.server:
        raise ConfigError(
            f"server_key: {path} is the key {PREFIX}{found.hex()}, but the roster names {named} as the server"
        )
    return path


def check_strategy(strategy: Strategy) -> None:
    """Raise `ConfigError` if a strategy needs to see individual updates, or is not known to average."""
    for kind in type(strategy).__mro__:
        if kind.__name__ in REFUSED:
            raise ConfigError(
                f"{kind.__name__} cannot run under secure aggregation: {REFUSED[kind.__name__]}; "
                f"expected one that averages: {', '.join(AVERAGING + OPTIMISERS)}"
            )
    if not isinstance(strategy, FedAvg):
        raise ConfigError(
            f"{type(strategy).__name__} is not known to average; expected one of "
            f"{', '.join(AVERAGING + OPTIMISERS)}, or a subclass"
        )


def engine_of(grid: Grid) -> str:
    """Return what the ledger calls a run over this grid.

    In Flower's simulation, the grid of nodes is in the server's own memory. Behind any other grid, the
    machines may belong to anybody.
    """
    simulated = any(kind.__name__ == "InMemoryGrid" for kind in type(grid).__mro__)
    return SIMULATED if simulated else FLOWER


def own_aggregation(strategy: Strategy) -> str:
    """Return the name of the user's class that overrides ``aggregate_train``, or an empty text."""
    for kind in type(strategy).__mro__:
        if "aggregate_train" in vars(kind):
            return "" if kind.__module__.partition(".")[0] == "flwr" else kind.__name__
    return ""


def averages(strategy: Strategy) -> bool:
    """Return whether the strategy's next model is M itself, because it aggregates as FedAvg does."""
    return type(strategy).aggregate_train is FedAvg.aggregate_train
