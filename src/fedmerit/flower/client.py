"""The member's side: a ClientApp that trains as before, but shows its update to nobody.

The member's own machine decides who the member is, never the server: the SuperNode's ``--node-config`` names
the private key (``fedmerit-key``) and the roster (``fedmerit-roster``). In a simulation all nodes share one
folder, ``fedmerit-rehearsal`` in the run config, with ``roster.toml`` and everybody's ``NAME.pem``.

This protects members only in runs whose app contains it, and the app comes from whoever starts a run. A
SuperNode runs any app, with the rights of its user and the paths of its node config, unless
``flower-supernode --trusted-entities`` names those whose signed apps it trusts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedmerit import errors
from fedmerit.config import Config
from fedmerit.errors import BoundError, ConfigError, FedmeritError, KeyFileError, MessageError, RefusedError
from fedmerit.flower import codec
from fedmerit.flower.codec import BYTES, Shape
from fedmerit.flower.measures import Gradient, Value, evaluator, slope_of
from fedmerit.identity import Roster, load_key, public_key, read_roster
from fedmerit.protocol.direction import Gradient as PathGradient
from fedmerit.protocol.direction import along_path
from fedmerit.protocol.member import REFUSED, Participant
from fedmerit.protocol.messages import Ask, Parcel
from fedmerit.protocol.outcome import Trained, Work
from fedmerit.protocol.terms import FLOWER, SIMULATED, cautious
from fedmerit.storage.member_state import MemberFiles

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

METRICS = "metrics"
LOGGED = "fedmerit.logged"
"""The record in the node's state that says which log lines of this run are not to be repeated."""
log = logging.getLogger("fedmerit")


@dataclass(frozen=True)
class Place:
    """Where a member's key and roster are; in a rehearsal, whoever starts the run chooses the folder."""

    key: Path
    roster: Path
    rehearsal: bool = False


def place_of(context: Context) -> Place:
    """Return the place from the node config; in a simulation, from the rehearsal's folder and node number."""
    node = context.node_config
    if "fedmerit-key" in node or "fedmerit-roster" in node:
        try:
            return Place(Path(str(node["fedmerit-key"])), Path(str(node["fedmerit-roster"])))
        except KeyError as error:
            raise ConfigError(
                f"the node config has no {error.args[0]}: expected fedmerit-key and fedmerit-roster"
            ) from None
    folder = context.run_config.get("fedmerit-rehearsal")
    if not folder or "partition-id" not in node:
        raise ConfigError(
            "who is this member? expected the files fedmerit-key and fedmerit-roster in --node-config, "
            "or in a simulation the run config fedmerit-rehearsal"
        )
    roster = Path(str(folder)) / "roster.toml"
    names, number = read_roster(roster).names, int(node["partition-id"])
    if not 0 <= number < len(names):
        raise ConfigError(
            f"node {number} of the simulation has no member: {roster} lists {len(names)} of them"
        )
    return Place(roster.with_name(f"{names[number]}.pem"), roster, rehearsal=True)


def member_of(context: Context, place: Callable[[Context], Place] = place_of) -> str:
    """Return the name of this node's member, from its key and roster: it trains as the member it signs as."""
    return named(place(context))[0]


def named(place: Place) -> tuple[str, Ed25519PrivateKey, Roster]:
    """Return the name of the member whose key this is, the key, and the roster that lists it."""
    identity, roster = load_key(place.key), read_roster(place.roster)
    for member in roster.members:
        if member.key == public_key(identity):
            return member.name, identity, roster
    raise KeyFileError(f"{place.key}: not the key of a member on the roster {place.roster}")


def path_gradient(gradient: Gradient, shape: Any, utility: str) -> PathGradient:
    """Return a user's gradient along a path, for models of the shape that a member stored."""
    return along_path(slope_of(gradient, Shape.load(shape)))


@dataclass(frozen=True)
class Named:
    """A user's function or app by its name, "module:attribute"; imported when it is first called."""

    name: str

    def __post_init__(self) -> None:
        if not all(self.name.partition(":")):
            raise ConfigError(f"expected a name such as 'task:value', got {self.name!r}")

    def loaded(self) -> Any:
        """Return what has this name."""
        module, _, attribute = self.name.partition(":")
        try:
            return attrgetter(attribute)(import_module(module))
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.name}: cannot be imported: {error}") from error

    def __call__(self, *args: Any) -> Any:
        return self.loaded()(*args)


@dataclass(eq=False)
class Secured(ClientApp):
    """A ClientApp whose updates leave only under masks; made by `secure`."""

    inner: ClientApp | Named
    value: Value
    shared: Sequence[str]
    place: Callable[[Context], Place]
    weighted_by: str
    accept: Callable[[Config], None]
    seed: int | None
    gradient: Gradient | None = None

    def __post_init__(self) -> None:
        super().__init__()
        if isinstance(self.inner, Named):
            return  # its functions are registered with the app inside
        for register in ("train", "evaluate", "query", "lifespan"):  # so are those registered from now on
            setattr(self, register, getattr(self.inner, register))

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, fedmerit's own or one for the user's functions; refuse plain training.

        This member's own log says what went wrong. To the server all failures look the same; only an
        invitation is refused with a reason.
        """
        codec.log_inside_flower()
        kind, data = message.metadata.message_type.partition(".")[0], None
        ours = message.has_content() and BYTES in message.content
        if not ours and kind == "train":
            told = "asked for a plain update: expected a strategy inside fedmerit.flower.Contributions"
            raise RefusedError(told, stage="train")
        try:
            if not ours:
                return self._users(message, context, kind)
            data = codec.take(message.content)
            return self._answer(data, message, context, kind)
        except Exception as error:
            if isinstance(error, errors.VersionError):  # whoever runs the server must know what to install
                log.warning("refuses a message: %s", error)
                raise
            if data is not None and isinstance(error, FedmeritError) and _invites(data):
                if not isinstance(error, errors.StoreError | KeyFileError):
                    raise
                log.warning("does not join: %s", error)
                told = "cannot use its key or files; its own log says which"
                raise RefusedError(told, stage="join", logged=True) from None
            if not isinstance(error, FedmeritError):
                log.exception("refuses a message: this member's own code failed")
            elif not (isinstance(error, RefusedError) and error.logged):  # otherwise it is in the log already
                log.warning("refuses a message: %s", error)
            raise RefusedError(REFUSED, logged=True) from None

    def _answer(self, data: Parcel, message: Message, context: Context, kind: str) -> Message:
        del message.content[BYTES]
        metrics: list[MetricRecord] = []
        place = self.place(context)
        if place.rehearsal and _invites(data):
            log.warning("a rehearsal: the run names %s, so whoever started it holds this key too", place.key)
        member = self._member(place, context)
        work = partial(self._work, message, context, member.run_config, metrics) if kind == "train" else None
        content = codec.put(Parcel(member.answer(data, str(context.node_id), work)))
        if metrics and member.masked:
            content[METRICS] = metrics[0]
        return Message(content, reply_to=message)

    def _users(self, message: Message, context: Context, kind: str) -> Message:
        """Return the reply of a user's function; of an evaluation only the listed metrics, with weight 1."""
        reply = self._inner(message, context)
        if kind != "evaluate":
            return reply
        shared = self._shared(_metrics(reply.content), context, "evaluation")
        record = MetricRecord({self.weighted_by: 1, **shared})
        return Message(RecordDict({METRICS: record}), reply_to=message)

    def _inner(self, message: Message, context: Context) -> Message:
        """Call the user's app, then undo its changes to the run config, because members compare it."""
        run_config = dict(context.run_config)
        try:
            reply = self.inner(message, context)
        finally:
            context.run_config = run_config
        if reply.has_error():
            raise RefusedError(f"the app answered with an error: {reply.error.reason}", stage="masked")
        return reply

    def _member(self, place: Place, context: Context) -> Participant:
        name, identity, roster = named(place)
        return Participant(
            *(name, identity, roster, partial(MemberFiles, place.key, identity)),
            lambda shape, utilities: evaluator(self.value, Shape.load(shape), utilities),
            accept=self.accept,
            seed=self.seed,
            run_config=codec.config_digest(context.run_config),
            engines=(FLOWER, SIMULATED) if place.rehearsal else (FLOWER,),
            gradients=None if self.gradient is None else partial(path_gradient, self.gradient),
        )

    def _work(self, message: Message, context: Context, config: bytes, metrics: list[MetricRecord]) -> Work:
        """Return the model in a message, and the user's training of it."""
        shape = Shape.of(codec.only_arrays(message.content))
        train = partial(self._train, shape, message, context, metrics)
        return Work(shape.vector, codec.digest(message, config), train, partial(self._check, shape))

    def _train(self, shape: Shape, message: Message, context: Context, shared: list[MetricRecord]) -> Trained:
        """Run the user's training on a message as the strategy made it; append the metrics it shares."""
        for function in (self.value, self.gradient):
            if isinstance(function, Named):  # a wrong name is found here, not after the last round
                function.loaded()
        reply = self._inner(message, context)
        try:
            m0, after = shape.vector, shape.read(codec.only_arrays(reply.content))
        except MessageError as error:
            told = f"training must return the arrays it was given, trained: {error}"
            raise RefusedError(told, stage="masked") from None
        metrics = _metrics(reply.content)
        samples = metrics.get(self.weighted_by)
        if isinstance(samples, list):
            raise RefusedError(f"{self.weighted_by!r} must be a single number", stage="masked")
        if listed_metrics := self._shared(metrics, context, "training"):
            shared.append(MetricRecord(listed_metrics))
        return Trained(after - m0, samples, shape.dump())

    def _check(self, shape: Shape, trained: Trained, config: Config) -> None:
        """Raise an error that this member's owner can act on if an update cannot be masked."""
        bound, largest = config.secure_aggregation.bound, shape.largest(trained.delta)
        if broken := [name for name, change in largest.items() if not math.isfinite(change)]:
            told = f"training left numbers that are not finite in {codec.listed(broken)}"
            raise BoundError(told, stage="masked")
        if beyond := {name: change for name, change in largest.items() if change > bound}:
            names = sorted(beyond, key=beyond.__getitem__, reverse=True)
            statistics = any("running_" in name for name in beyond)
            usual = " (running statistics of BatchNorm, the usual ones)" if statistics else ""
            raise BoundError(
                f"the update lies beyond the bound {bound:g}: training changed a number of "
                f"{codec.listed(names)}{usual} by {beyond[names[0]]:g}; if that is intended, the server has "
                "to use a larger secure_aggregation.bound",
                stage="masked",
            )
        if config.weighing == "secret":
            self._check_samples(trained.samples, config.training.weight_cap)

    def _check_samples(self, samples: float | None, cap: int) -> None:
        name = self.weighted_by
        if samples is None:
            raise BoundError(
                f"training returned no metric {name!r}, by which this run weighs members: put the number of "
                f"training samples there, or name the metric that holds it in secure(..., weighted_by=...)",
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

    def _shared(self, metrics: MetricRecord, context: Context, step: str) -> dict[str, Any]:
        """Return the metrics that may leave; once per run, the log names those that do not."""
        logged = context.state.config_records.get(LOGGED, ConfigRecord())
        private = sorted({*metrics} - {*self.shared, self.weighted_by})
        if private and step not in logged:
            log.info(
                "metrics %s of %s stay on this machine: secure(..., metrics=[...]) lists those that leave",
                *(", ".join(private), step),
            )
            context.state[LOGGED] = ConfigRecord({**logged, step: True})
        return {key: metrics[key] for key in self.shared if key in metrics}


def _invites(data: Parcel) -> bool:
    """Return whether this asks to join: the server may learn why a node cannot join."""
    try:
        return Ask.unpack(data)[0].exchange == "join"
    except MessageError:
        return False


def _metrics(content: RecordDict) -> MetricRecord:
    return next(iter(content.metric_records.values()), MetricRecord())


def secure(
    app: ClientApp | str,
    *,
    value: Value | str,
    gradient: Gradient | str | None = None,
    metrics: Sequence[str] = (),
    place: Callable[[Context], Place] = place_of,
    weighted_by: str = "num-examples",
    accept: Callable[[Config], None] = cautious,
    seed: int | None = None,
) -> ClientApp:
    """Make a ClientApp part of a federation with secure contribution scores.

    ::

        app = fedmerit.flower.secure("hospitals.client_app:app", value="hospitals.task:value")

    Flower starts a process for every message, and most only carry bytes. An app and functions given by name
    are imported when they are needed.

    Args:
        app: the user's app, or its name; functions may be registered before or after.
        value: ``value(arrays, test)`` says how good a model is on test samples ``test.x``, ``test.y``: one
            number in [0, 1] per sample, one number for a metric of the whole test set, or a mapping from
            names to several of these.
        gradient: ``gradient(arrays, test)`` returns the mean of the paid utility over test samples, and its
            gradient: an array for each floating-point array of the model, by name or in their order. A
            settled run needs it; `torch_scoring` makes it for a PyTorch model.
        metrics: names of training and evaluation metrics that may leave this machine; by default none.
        place: returns where this member's key and roster are, if not where `place_of` looks; in a simulation,
            the place must say ``rehearsal=True``.
        weighted_by: the metric that holds the number of training samples; it stays secret.
        accept: called with the settings the server proposes; raises a `RefusedError` for those this member
            does not agree to. By default a member agrees to nothing weaker than fedmerit's own choice.
        seed: seed of the stochastic rounding, for rehearsals that must be exactly repeatable.
    """
    if isinstance(app, Secured):
        raise ConfigError("this ClientApp is secured already")
    given: Iterator[Any] = (Named(one) if isinstance(one, str) else one for one in (app, value, gradient))
    inner, measure, slope = given
    return Secured(inner, measure, tuple(metrics), place, weighted_by, accept, seed, slope)
