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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedmerit.carriers.door import Place, check_update, invites, named, participant, refusal
from fedmerit.carriers.measures import Gradient, Value
from fedmerit.carriers.shape import Shape
from fedmerit.config import Config
from fedmerit.errors import ConfigError, MessageError, RefusedError
from fedmerit.flower import codec
from fedmerit.flower.codec import BYTES, RecordShape
from fedmerit.identity import read_roster
from fedmerit.protocol.member import Participant
from fedmerit.protocol.messages import Parcel
from fedmerit.protocol.outcome import Trained, Work
from fedmerit.protocol.terms import FLOWER, SIMULATED, cautious

HeldOut = Callable[[Context], tuple[Any, Any]]
METRICS = "metrics"
LOGGED = "fedmerit.logged"
"""The record in the node's state that says which log lines of this run are not to be repeated."""
log = logging.getLogger("fedmerit")


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
    held_out: HeldOut | None = None

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
            refused = refusal(error, data)
            if refused is error:
                raise
            raise refused from None

    def _answer(self, data: Parcel, message: Message, context: Context, kind: str) -> Message:
        del message.content[BYTES]
        metrics: list[MetricRecord] = []
        place = self.place(context)
        if place.rehearsal and invites(data):
            log.warning("a rehearsal: the run names %s, so whoever started it holds this key too", place.key)
        member = self._member(place, context)
        work = partial(self._work, member, message, context, metrics) if kind == "train" else None
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
        return participant(
            *(place, self.value, self.gradient, RecordShape),
            engines=(FLOWER, SIMULATED),
            accept=self.accept,
            seed=self.seed,
            run_config=codec.config_digest(context.run_config),
            held_out=None if self.held_out is None else partial(self.held_out, context),
        )

    def _work(
        self, member: Participant, message: Message, context: Context, metrics: list[MetricRecord]
    ) -> Work:
        """Return the model in a message, or that which the sum beside it comes to, and its training."""
        if not codec.only_arrays(message.content) and member.reached:
            key, (shape_of_it, model) = next(iter(message.content.array_records)), member.reached
            message.content[key] = RecordShape.load(shape_of_it).record(model)
        shape = RecordShape.of(codec.only_arrays(message.content))
        train = partial(self.training, shape, message, context, metrics)
        check = partial(check_update, shape, self.weighted_by)
        return Work(shape.vector, codec.digest(message, member.run_config), train, check)

    def training(
        self, shape: Shape, message: Message, context: Context, shared: list[MetricRecord]
    ) -> Trained:
        """Run the user's training on a message as the strategy made it; append the metrics it shares."""
        for function in (self.value, self.gradient, self.held_out):
            if isinstance(function, Named):  # a wrong name is found here, not after the last round
                function.loaded()
        reply = self._inner(message, context)
        try:
            m0, after = shape.vector, shape.read(codec.only_arrays(reply.content))
        except MessageError as error:
            told = f"training must return the arrays it was given, trained: {error}"
            raise RefusedError(told, stage="masked", code="arrays") from None
        metrics = _metrics(reply.content)
        samples = metrics.get(self.weighted_by)
        if isinstance(samples, list):
            raise RefusedError(f"{self.weighted_by!r} must be a single number", stage="masked")
        if listed_metrics := self._shared(metrics, context, "training"):
            shared.append(MetricRecord(listed_metrics))
        return Trained(after - m0, samples, shape.dump())

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


def _metrics(content: RecordDict) -> MetricRecord:
    return next(iter(content.metric_records.values()), MetricRecord())


def secure(
    app: ClientApp | str,
    *,
    value: Value | str,
    gradient: Gradient | str | None = None,
    held_out: HeldOut | str | None = None,
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
        held_out: ``held_out(context)`` returns samples and labels of this member that it does not train on. A
            run with a panel needs them: by these it judges the others.
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
    functions = (app, value, gradient, held_out)
    given: Iterator[Any] = (Named(one) if isinstance(one, str) else one for one in functions)
    inner, measure, slope, own = given
    return Secured(inner, measure, tuple(metrics), place, weighted_by, accept, seed, slope, own)
