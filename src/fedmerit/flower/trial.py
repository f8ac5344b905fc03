"""A trial of a ClientApp on one machine before anybody trains: what would be refused, settings that fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fedmerit.carriers.door import check_update
from fedmerit.carriers.shape import listed
from fedmerit.config import Config, from_dict
from fedmerit.errors import ConfigError, FedmeritError, MessageError
from fedmerit.flower.client import Secured
from fedmerit.flower.codec import RecordShape
from fedmerit.protocol.outcome import Trained
from fedmerit.secagg.quantise import Encoding

TRIALS = {"the first": (1, 1), "that of another run": (2, 1), "that of the next round": (1, 2)}
"""Run and round of the trainings, all of the first model."""


@dataclass
class Trial:
    """What a trial came to.

    Attributes:
        found: what has to be changed, by code: "arrays", "training", "bound", "weight", "repeats",
            "rounding".
        told: what is good to know, by code: "dtype", "counters", "unchanged".
        settings: sections for ``config`` of `Contributions`; this machine's update has room to double.
    """

    found: dict[str, str] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"to change: {text} ({code})" for code, text in self.found.items()]
        lines += [f"{text} ({code})" for code, text in self.told.items()]
        return "\n".join([*lines, f"config={self.settings}"])


def check(
    app: ClientApp,
    arrays: ArrayRecord,
    *,
    members: int = 3,
    config: Mapping[str, Mapping[str, Any]] | None = None,
    run_config: Mapping[str, Any] | None = None,
    node_config: Mapping[str, Any] | None = None,
) -> Trial:
    """Train the first model three times on this machine's data; return what a run would stumble over.

    ::

        print(fedmerit.flower.check(app, ArrayRecord(network().state_dict())))

    Nothing leaves the machine, and no key is needed. ``value`` and ``gradient`` are not tried: `start` of
    `Contributions` does that before anybody trains.

    Args:
        app: what `secure` returned.
        arrays: the first model.
        members: how many members there will be.
        config: settings as for `Contributions`.
        run_config: what the app finds in ``context.run_config``.
        node_config: what it finds in ``context.node_config``.
    """
    if not isinstance(app, Secured):
        raise ConfigError("check: expected an app that fedmerit.flower.secure returned")
    trial, given = Trial(), dict(config or {})
    given["training"] = {"weights": "secret", **given.get("training", {})}
    settings = from_dict({**given, "partition": {"names": [f"member-{i}" for i in range(members)]}})
    try:
        shape = RecordShape.of(arrays)
        trained = [
            app.training(shape, *_asked(arrays, place, run_config, node_config), [])
            for place in TRIALS.values()
        ]
    except FedmeritError as error:
        arrays_differ = isinstance(error, MessageError) or getattr(error, "code", "") == "arrays"
        trial.found["arrays" if arrays_differ else "training"] = str(error)
        return trial
    except Exception as error:  # the user's
        trial.found["training"] = f"training fails: {type(error).__name__}: {error}"
        return trial
    if wide := [name for name, array in shape.arrays.items() if array.dtype == np.float64]:
        trial.told["dtype"] = f"{listed(wide)}, of float64, summed as float32"
    if shape.left_out:
        trial.told["counters"] = (
            f"{listed(shape.left_out)}, without floats, not summed: as in the first model"
        )
    _judge(trial, shape, app.weighted_by, settings, trained)
    return trial


def _asked(
    arrays: ArrayRecord,
    place: tuple[int, int],
    run_config: Mapping[str, Any] | None,
    node_config: Mapping[str, Any] | None,
) -> tuple[Message, Context]:
    """Return the message of a train step in this run and round, and the context of its node."""
    run, number = place
    try:
        _ = TaskIdentity.task_id  # messages ask for it
    except RuntimeError:  # outside Flower
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": number})})
    context = Context(run, 1, dict(node_config or {}), RecordDict(), dict(run_config or {}))
    return Message(content, dst_node_id=1, message_type="train"), context


def _judge(
    trial: Trial, shape: RecordShape, weighted_by: str, config: Config, trained: list[Trained]
) -> None:
    """Compare updates with settings and with each other, and propose settings."""
    first, *others = trained
    for code, update in (("weight", Trained(0 * first.delta, first.samples)), ("bound", first)):
        try:
            check_update(shape, weighted_by, update, config)
        except FedmeritError as error:
            trial.found[code] = str(error)
            break
    same = [name for name, one in zip(TRIALS, trained, strict=True) if np.array_equal(one.delta, first.delta)]
    if others and len(same) > 1:
        trial.found["repeats"] = (
            f"{' and '.join(same[1:])} is the update of the first training again, and members sum none "
            "twice: mix context.run_id and the round into the seed"
        )
    largest = {
        name: max(shape.largest(one.delta)[name] for one in trained) for name in shape.largest(first.delta)
    }
    if still := [name for name, change in largest.items() if change == 0]:
        trial.told["unchanged"] = f"{listed(still)}, which training leaves as they are, need not be sent"
    if not 0 < (top := max(largest.values())) < math.inf or first.samples is None or "weight" in trial.found:
        return
    bound, cap = 2.0 ** math.ceil(math.log2(2 * top)), 10 ** math.ceil(math.log10(2 * first.samples))
    trial.settings = {"secure_aggregation": {"bound": bound}}
    secret = config.weighing == "secret"
    if secret:
        trial.settings["training"] = {"weight_cap": cap}
    encoding = Encoding(
        first.delta.size, len(config.clients), bound, "secret" if secret else "uniform", cap if secret else 1
    )
    rounding = encoding.step / 2 / math.sqrt(len(config.clients)) / (first.samples if secret else 1)
    if lost := [name for name, size in shape.typical(first.delta).items() if 0 < size < 2 * rounding]:
        trial.found["rounding"] = (
            f"with these settings, rounding ({rounding:.1e}) hides what training changes in {listed(lost)}: "
            "one bound serves all arrays"
        )
