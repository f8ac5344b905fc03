"""The member's side: a ClientApp that trains as before, but shows its update to nobody.

::

    app = fedmerit.flower.secure(ClientApp(), value=evaluate)

    @app.train()                      # the user's own, unchanged
    def train(message, context): ...

The member's own machine decides who the member is, never the server: the SuperNode's ``--node-config`` names
the private key (``fedmerit-key``) and the roster (``fedmerit-roster``). In a simulation all nodes share one
folder, ``fedmerit-rehearsal`` in the run config, with ``roster.toml`` and everybody's ``NAME.pem``.

This protects members only in runs whose app contains it. The app itself comes from whoever starts a run. A
SuperNode runs any app, with the rights of its user and the paths of its node config, unless it is told whose
signed apps to trust (``flower-supernode --trusted-entities``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedmerit.config import Config
from fedmerit.errors import (
    BoundError,
    ConfigError,
    FedmeritError,
    KeyFileError,
    MessageError,
    RefusedError,
    StoreError,
    VersionError,
)
from fedmerit.flower.codec import (
    BYTES,
    Gradient,
    Shape,
    Value,
    config_digest,
    digest,
    evaluator,
    listed,
    log_inside_flower,
    only_arrays,
    put,
    slope_of,
    take,
)
from fedmerit.identity import Roster, load_key, public_key, read_roster
from fedmerit.protocol.direction import Gradient as PathGradient
from fedmerit.protocol.direction import along_path
from fedmerit.protocol.member import REFUSED, Participant
from fedmerit.protocol.messages import Ask, Parcel
from fedmerit.protocol.outcome import Evaluate, Trained, Work
from fedmerit.protocol.terms import FLOWER, SIMULATED, cautious
from fedmerit.storage.member_state import MemberFiles

METRICS = "metrics"
TOLD = "fedmerit.told"
"""The record in the node's state that keeps, for the run, what its log has said once."""
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


def named(place: Place) -> tuple[str, Roster]:
    """Return the name of the member whose key this is, and the roster that lists it."""
    own, roster = public_key(load_key(place.key)), read_roster(place.roster)
    for member in roster.members:
        if member.key == own:
            return member.name, roster
    raise KeyFileError(f"{place.key}: not the key of a member on the roster {place.roster}")


def path_gradient(gradient: Gradient, shape: Any, utility: str) -> PathGradient:
    """Return a user's gradient along a path, for models of the shape that a member stored."""
    return along_path(slope_of(gradient, Shape.load(shape)))


class Secured(ClientApp):
    """A ClientApp whose updates leave only under masks; made by `secure`."""

    def __init__(
        self,
        app: ClientApp,
        value: Value,
        metrics: Sequence[str],
        place: Callable[[Context], Place],
        weighted_by: str,
        accept: Callable[[Config], None],
        seed: int | None,
        gradient: Gradient | None = None,
    ) -> None:
        super().__init__()
        self.inner, self.value, self.shared, self.gradient = app, value, tuple(metrics), gradient
        self.place, self.weighted_by, self.accept, self.seed = place, weighted_by, accept, seed

    # functions registered with this app are registered with the one inside
    def train(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.evaluate(*args, **kwargs)

    def query(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.query(*args, **kwargs)

    def lifespan(self) -> Any:
        return self.inner.lifespan()

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message, fedmerit's own or one for the user's functions; refuse plain training.

        This member's own log says what went wrong. To the server all failures look the same; only an
        invitation is refused with a reason.
        """
        log_inside_flower()
        kind, data = message.metadata.message_type.partition(".")[0], None
        ours = message.has_content() and BYTES in message.content
        if not ours and kind == "train":
            raise RefusedError(
                "asked for a plain update: expected a strategy inside fedmerit.flower.Contributions",
                stage="train",
            )
        try:
            if not ours:
                return self._users(message, context, kind)
            data = take(message.content)
            return self._answer(data, message, context, kind)
        except Exception as error:
            if isinstance(error, VersionError):  # whoever runs the server must know what to install
                log.warning("refuses a message: %s", error)
                raise
            if data is not None and isinstance(error, FedmeritError) and _invites(data):
                if not isinstance(error, StoreError | KeyFileError):
                    raise
                log.warning("does not join: %s", error)
                raise RefusedError(
                    "cannot use its key or files; its own log says which", stage="join", logged=True
                ) from None
            if not isinstance(error, FedmeritError):
                log.exception("refuses a message: this member's own code failed")
            elif not (isinstance(error, RefusedError) and error.logged):  # otherwise it is in the log already
                log.warning("refuses a message: %s", error)
            raise RefusedError(REFUSED, logged=True) from None

    def _answer(self, data: Parcel, message: Message, context: Context, kind: str) -> Message:
        del message.content[BYTES]
        shown: list[MetricRecord] = []
        place = self.place(context)
        if place.rehearsal and _invites(data):
            log.warning("a rehearsal: the run names %s, so whoever started it holds this key too", place.key)
        member = self._member(place, context)
        work = (lambda: self._work(message, context, member.run_config, shown)) if kind == "train" else None
        content = put(Parcel(member.answer(data, str(context.node_id), work)))
        if shown and member.masked:
            content[METRICS] = shown[0]
        return Message(content, reply_to=message)

    def _users(self, message: Message, context: Context, kind: str) -> Message:
        """Return the reply of a user's function; of an evaluation only the listed metrics, with weight 1."""
        reply = self._inner(message, context)
        if reply.has_error():
            raise RefusedError(f"the app answered with an error: {reply.error.reason}", stage=kind)
        if kind != "evaluate":
            return reply
        shared = self._shared(_metrics(reply.content), context, "evaluation")
        record = MetricRecord({self.weighted_by: 1, **shared})
        return Message(RecordDict({METRICS: record}), reply_to=message)

    def _inner(self, message: Message, context: Context) -> Message:
        """Call the user's app, then undo its changes to the run config, because members compare it."""
        given = dict(context.run_config)
        try:
            return self.inner(message, context)
        finally:
            context.run_config = given

    def _member(self, place: Place, context: Context) -> Participant:
        name, roster = named(place)
        identity = load_key(place.key)
        return Participant(
            *(name, identity, roster, partial(MemberFiles, place.key, identity), self._evaluator),
            accept=self.accept,
            seed=self.seed,
            run_config=config_digest(context.run_config),
            engines=(FLOWER, SIMULATED) if place.rehearsal else (FLOWER,),
            gradients=None if self.gradient is None else partial(path_gradient, self.gradient),
        )

    def _evaluator(self, shape: Any, utilities: Sequence[str]) -> Evaluate:
        return evaluator(self.value, Shape.load(shape), utilities)

    def _work(self, message: Message, context: Context, run_config: bytes, shown: list[MetricRecord]) -> Work:
        """Return the model in a message, and the user's training of it."""
        shape = Shape.of(only_arrays(message.content))
        extra = digest(message, run_config)

        def train() -> Trained:
            return self._train(shape, message, context, shown)

        def check(trained: Trained, config: Config) -> None:
            self._check(shape, trained, config)

        return Work(shape.vector, extra, train, check)

    def _train(self, shape: Shape, message: Message, context: Context, shown: list[MetricRecord]) -> Trained:
        """Run the user's training on a message as the strategy made it."""
        reply = self._inner(message, context)
        if reply.has_error():
            raise RefusedError(f"training failed: {reply.error.reason}", stage="masked")
        try:
            m0, after = shape.vector, shape.read(only_arrays(reply.content))
        except MessageError as error:
            raise RefusedError(
                f"training must return the arrays it was given, trained: {error}", stage="masked"
            ) from None
        metrics = _metrics(reply.content)
        samples = metrics.get(self.weighted_by)
        if isinstance(samples, list):
            raise RefusedError(f"{self.weighted_by!r} must be a single number", stage="masked")
        shared = self._shared(metrics, context, "training")
        if shared:
            shown.append(MetricRecord(shared))
        return Trained(m0, after - m0, samples, shape.dump())

    def _check(self, shape: Shape, trained: Trained, config: Config) -> None:
        """Raise an error that this member's owner can act on if an update cannot be masked."""
        secure, training = config.secure_aggregation, config.training
        largest = shape.largest(trained.delta)
        if broken := [name for name, change in largest.items() if not math.isfinite(change)]:
            raise BoundError(f"training left numbers that are not finite in {listed(broken)}", stage="masked")
        beyond = {name: change for name, change in largest.items() if change > secure.bound}
        if beyond and not secure.clip:
            most = sorted(beyond, key=beyond.__getitem__, reverse=True)
            statistics = any("running_" in name for name in beyond)
            usual = " (running statistics of BatchNorm, the usual ones)" if statistics else ""
            raise BoundError(
                f"the update lies beyond the bound {secure.bound:g}: training changed a number of "
                f"{listed(most)}{usual} by {beyond[most[0]]:g}; if that is intended, the server has "
                "to use a larger `bound` in Contributions",
                stage="masked",
            )
        if training.weights == "secret":
            self._check_samples(trained.samples, training.weight_cap)

    def _check_samples(self, samples: float | None, cap: int) -> None:
        name = self.weighted_by
        if samples is None:
            raise BoundError(
                f"training returned no metric {name!r}, by which this run weighs members: put the number of "
                f"training samples there, or name the metric that holds it in secure(..., weighted_by=...)",
                stage="masked",
            )
        if float(samples).is_integer() and 1 <= samples <= cap:
            return
        too_many = float(samples).is_integer() and samples > cap
        larger = "the server has to use a larger `weight_cap` in Contributions"
        raise BoundError(
            f"the metric {name!r} must be the number of training samples, a whole number from 1 to {cap}, "
            f"got {samples:g}: {larger if too_many else 'put that number there'}",
            stage="masked",
        )

    def _shared(self, metrics: MetricRecord, context: Context, of: str) -> dict[str, Any]:
        """Return the metrics that may leave; once per run, the log names those that do not."""
        told = context.state.get(TOLD)
        kept = sorted({*metrics} - {*self.shared, self.weighted_by})
        if kept and (not isinstance(told, ConfigRecord) or of not in told):
            log.info(
                "metrics %s of %s stay on this machine: secure(..., metrics=[...]) lists those that leave",
                *(", ".join(kept), of),
            )
            context.state[TOLD] = ConfigRecord({**(told or {}), of: True})  # type: ignore[dict-item]
        return {key: metrics[key] for key in self.shared if key in metrics}


def _invites(data: Parcel) -> bool:
    """Return whether this asks to join: the server may learn why a node cannot join."""
    try:
        return Ask.unpack(data)[0].exchange == "join"
    except MessageError:
        return False


def _metrics(content: RecordDict) -> MetricRecord:
    found = list(content.metric_records.values())
    return found[0] if found else MetricRecord()


def secure(
    app: ClientApp,
    *,
    value: Value,
    gradient: Gradient | None = None,
    metrics: Sequence[str] = (),
    place: Callable[[Context], Place] = place_of,
    weighted_by: str = "num-examples",
    accept: Callable[[Config], None] = cautious,
    seed: int | None = None,
) -> ClientApp:
    """Make a ClientApp part of a federation with secure contribution scores.

    Args:
        app: the user's app; functions may be registered before or after.
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
    return Secured(app, value, metrics, place, weighted_by, accept, seed, gradient)
