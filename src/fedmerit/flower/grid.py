"""A Grid that turns a strategy's train messages into fedmerit's exchanges, and returns one reply to it: M.

The strategy keeps its own loop and its own sampling. It sees a node once the node has proved by a signature
that it is a member. A node that refuses or stops answering is left out until it answers an invitation again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedmerit.config import VERSION
from fedmerit.errors import ProtocolError, RunAborted
from fedmerit.flower.codec import QUERY, Shape, answer_in, digest, listed, only_arrays, put
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.messages import PROTOCOL, Exchange, Parcel
from fedmerit.protocol.outcome import Model, Outcome
from fedmerit.protocol.settler import SETTLING
from fedmerit.protocol.terms import least_scheduled, task_of

log = logging.getLogger("fedmerit")
POLL = 0.25
"""Seconds between two polls for replies; Flower's own send_and_receive waits 3."""
AGAIN = 15.0
"""Seconds until a node that refused an invitation is invited again; the wait doubles each time."""
SAME = 0.1
"""Seconds for which the list of nodes is kept: a strategy that samples first asks how many, then who."""
TOLD = 60.0
"""Seconds between two log lines that say whom the server waits for."""
IN_A_ROW = 3
"""Aborted rounds in a row after which a run is given up; a short outage costs one or two."""
LONG = ("train", "report", "open", "agree", "witness", "table")
"""Exchanges in which a member computes: `timeout` of `start` applies, not the patience for an answer."""
PLAIN = "No query function registered"
"""What Flower says for an app that knows nothing of fedmerit."""
UNAVAILABLE = 5
"""Flower's error code for a node that is gone."""


@dataclass(eq=False, repr=False)
class SecureGrid(Grid):
    """Carries a coordinator's exchanges over another Grid."""

    grid: Grid  # Flower's
    shape: Shape  # the model's; members get these types, even if a strategy has changed those of integers
    patience: float  # seconds to wait for an answer that needs neither training nor evaluation
    join: float  # seconds to wait for members to come back if too few are present for a round
    weighted_by: str  # the metric that the strategy averages by
    available: int = 0  # how many members the strategy waits for before it begins a round
    timeout: float | None = None  # for members who compute, until a train step brings the strategy's own
    coordinator: Coordinator = field(init=False)  # made with this grid as its transport
    nodes: dict[str, int] = field(default_factory=dict)  # members who are present
    rounds: int = 0
    model: Model | None = None  # after the last round
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by exchange, for measurements
    _waits: int = 0  # waits without success since the last round began
    _refused: dict[int, tuple[float, float]] = field(default_factory=dict)  # node -> next invitation, wait
    _invited: dict[str, int] = field(default_factory=dict)  # message id -> node
    _train: dict[str, Message] = field(default_factory=dict)  # the strategy's messages of the round
    _metrics: dict[str, MetricRecord] = field(default_factory=dict)
    _looked: float = -math.inf  # when the strategy last got the list of nodes
    _noted: int = 0  # number of notes before this round
    _logged: set[str] = field(default_factory=set)  # metrics of which the log says that they are not shared
    _declined: set[str] = field(default_factory=set)  # who refused in the settlement
    _await_until: float | None = None  # when the wait for members who are away ends

    # ----------------------------------------------------------------------------------------- for a strategy

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of members who are present; invite new ones, and wait if too few are left."""
        if time.monotonic() <= self._looked + SAME:
            return list(self.nodes.values())
        config = self.coordinator.config
        least = max(least_scheduled(config), self.available) if self.rounds else 0
        enough = self._wait(config.clients, least, time.monotonic() + self.join)
        self._waits = 0 if enough else self._waits + 1
        if self._waits >= IN_A_ROW:  # a strategy that needs more nodes would ask forever
            counts = f"{len(self.nodes)} members are present, {least} are needed"
            raise self._given_up(f"{counts}; waited {IN_A_ROW} times for {self.join:g} s")
        self._looked = time.monotonic()
        return list(self.nodes.values())

    def gather(self, least: int) -> None:
        """Wait until everybody has joined or ``join`` seconds have passed; raise if too few have joined."""
        names = self.coordinator.config.clients
        self._wait(names, len(names), time.monotonic() + self.join)
        if len(self.nodes) < least:
            raise ProtocolError(
                f"{len(self.nodes)} of {len(names)} members joined within {self.join:g} s, {least} are needed"
                + "".join(f"; {note}" for note in self.coordinator.refused[:3]),
                stage="join",
            )

    def _wait(self, names: Sequence[str], least: int, until: float) -> bool:
        """Invite, and wait until so many of these members are present; return whether they are."""
        logged = time.monotonic()
        while True:
            self._welcome()
            away = [name for name in names if name not in self.nodes]
            present = len(names) - len(away)
            if present >= least or time.monotonic() > until:
                return present >= least
            logged = self._log_wait(logged, f"{present} present, {least} needed", away)
            time.sleep(POLL)

    def _log_wait(self, logged: float, state: str, names: Iterable[str]) -> float:
        """Log about once a minute whom the server waits for; return the time of the last such line."""
        now = time.monotonic()
        if now < logged + TOLD:
            return logged
        log.info("round %d: %s, waiting for %s", self.rounds, state, ", ".join(names))
        return now

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Pass messages on to Flower's grid; refuse train messages, which would bring plain updates."""
        listed = list(messages)
        if any(map(_trains, listed)):
            raise ProtocolError("train messages go through send_and_receive, as secure stages")
        return self.grid.push_messages(listed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Turn a train step into a round of fedmerit; pass other messages on to Flower's grid."""
        listed = list(messages)
        for message in listed:
            self._restore(message)
        if not any(map(_trains, listed)):
            replies = list(self.grid.send_and_receive(listed, timeout=timeout))
            self._log_unshared(replies)
            return replies
        names = {node: name for name, node in self.nodes.items()}
        for message in listed:
            if not _trains(message) or message.metadata.dst_node_id not in names:
                raise ProtocolError("a train step must hold one train message for each of its members")
        self._train = {names[message.metadata.dst_node_id]: message for message in listed}
        self._metrics, self.timeout = {}, timeout
        self._noted = len(self.coordinator.refused)
        first, run_config = listed[0], self.coordinator.run_config(tuple(self._train))
        m0, extra = self.shape.read(only_arrays(first.content)), digest(first, run_config)
        for name, message in self._train.items():
            if not _same(message, first) and digest(message, run_config) != extra:
                told = "the strategy sends it a message that differs from the others"
                raise ProtocolError(told, member=name)
        self.rounds, self._waits, self._looked = self.rounds + 1, 0, -math.inf
        model = self.coordinator.round(self.rounds, m0, tuple(self._train), extra)
        self.model = m0 if model is None else model
        if model is None:
            self._check_going()
            return []
        outcome = self.coordinator.outcome
        assert outcome is not None
        self._check_rounding(outcome, m0)
        return [self._reply(first, outcome)]

    def _check_rounding(self, outcome: Outcome, m0: Model) -> None:
        """Note, once per run, which arrays training changed by less than the sum was rounded by."""
        config, moved = self.coordinator.config, outcome.model - m0
        step = task_of(config, outcome.bound_to["m"], moved.size, tuple(self._train)).encoding.step
        # the standard deviation of rounding, at most
        rounding = step / 2 * math.sqrt(len(outcome.included)) / outcome.total_weight
        lost = {name: size for name, size in self.shape.typical(moved).items() if 0 < size < 2 * rounding}
        if lost and "rounding" not in self._logged:
            self._logged.add("rounding")
            remedy = f"a smaller secure_aggregation.bound (it is {config.secure_aggregation.bound:g})"
            if config.weighing == "secret":
                remedy += f" or training.weight_cap (it is {config.training.weight_cap:g})"
            self.coordinator.note(
                f"round {self.rounds}: rounding, {rounding:.1e}, hides what training changed in "
                f"{listed([*lost])}, {max(lost.values()):.1e}: expected {remedy}"
            )

    def _check_going(self) -> None:
        """Raise `RunAborted` if the last `IN_A_ROW` rounds were aborted and more are to come."""
        last = self.coordinator.recorder.rounds[-IN_A_ROW:]
        more = self.rounds < self.coordinator.config.training.rounds
        if more and len(last) == IN_A_ROW and all(round_.aborted for round_ in last):
            raise self._given_up(f"{IN_A_ROW} rounds in a row were aborted")

    def check_closed(self) -> None:
        """Close the last round; raise `RunAborted` if there were rounds but none was closed."""
        self.coordinator.acknowledge()
        rounds = self.coordinator.recorder.rounds
        if rounds and all(round_.aborted for round_ in rounds):
            raise self._given_up("no round was closed")

    def _given_up(self, reason: str) -> RunAborted:
        """Return an error that says which rounds were aborted, why, and who caused the last of them."""
        self.coordinator.acknowledge()
        rounds, config = self.coordinator.recorder.rounds, self.coordinator.config
        closed = tuple(round_.number for round_ in rounds if not round_.aborted)
        aborted = tuple(round_.number for round_ in rounds if round_.aborted)
        before = [round_ for round_ in rounds[-IN_A_ROW:-1] if round_.aborted]
        causes = [f"round {round_.number} aborted: {round_.aborted}" for round_ in before]
        causes += self.coordinator.refused[self._noted :]  # also who was away, declined or was refused
        if away := [name for name in config.clients if name not in self.nodes]:
            causes.append(f"missing: {', '.join(away)}")
        counts = f"{len(aborted)} of {config.training.rounds} rounds aborted, {len(closed)} closed"
        if closed:
            counts += ", which stay valid: to go on from the last model, see fedmerit.flower.last_model"
        text = f"{reason} ({counts}); {'; '.join(dict.fromkeys(causes))}"
        return RunAborted(text, closed=closed, aborted=aborted)

    def _restore(self, message: Message) -> None:
        """Restore the first model's types and integers in a message, because averaging changes them."""
        models = list(message.content.array_records.items()) if message.has_content() else []
        if len(models) == 1 and set(models[0][1]) == set(self.shape.arrays):
            key, record = models[0]
            if any(record[name].dtype != array.dtype.name for name, array in self.shape.arrays.items()):
                message.content[key] = self.shape.record(self.shape.read(record))

    def _reply(self, message: Message, outcome: Outcome) -> Message:
        """Return what an averaging strategy sees as the only reply: M, with a weight of 1."""
        means = MetricRecord({self.weighted_by: 1})
        records = [self._metrics[name] for name in outcome.included if name in self._metrics]
        shared = dict.fromkeys(key for record in records for key in record if key != self.weighted_by)
        for key in shared:
            numbers = [record.get(key) for record in records]
            if all(map(_is_number, numbers)):
                means[key] = sum(numbers) / len(numbers)  # type: ignore[arg-type]
        if not records:
            self._log_none("training")
        if withheld := [key for key in shared if key not in means and key not in self._logged]:
            rule = "a mean needs a number from every member who shares any metric"
            log.warning("the strategy does not get the training metrics %s: %s", ", ".join(withheld), rule)
            self._logged |= {*withheld}
        key = next(iter(message.content.array_records))
        content = RecordDict({key: self.shape.record(outcome.model), "metrics": means})
        return Message(content, reply_to=message)

    def _log_unshared(self, replies: Sequence[Message]) -> None:
        """Log once that members who evaluated share no metric, because the strategy then shows none."""
        answers = [reply for reply in replies if _kind(reply) == "evaluate" and reply.has_content()]
        records = [record for reply in answers for record in reply.content.metric_records.values()]
        if records and not any({*record} - {self.weighted_by} for record in records):
            self._log_none("evaluation")

    def _log_none(self, step: str) -> None:
        if f"no {step}" not in self._logged:
            self._logged.add(f"no {step}")
            rule = "they leave a member's machine only if its own secure(..., metrics=[...]) lists them"
            log.info("the strategy gets no %s metrics: %s", step, rule)

    # -------------------------------------------------------------------------------------- for a coordinator

    def expected(self, number: int) -> Sequence[str]:
        """Return the members who are present; in every round the strategy schedules some of them."""
        self._welcome()
        return list(self.nodes)

    def awaited(self, names: Sequence[str]) -> Sequence[str]:
        """Wait for members who are away at the settlement, ``join`` seconds in all; return who is back.

        Members who refused are not waited for.
        """
        if self._await_until is None:
            self._await_until = time.monotonic() + self.join
        away = [name for name in names if name not in self.nodes and name not in self._declined]
        if away:
            self._wait(away, 1, self._await_until)
        return [name for name in away if name in self.nodes]

    def exchange(self, kind: Exchange, asks: Mapping[str, Parcel]) -> Iterator[tuple[str, bytes]]:
        """Send, and yield answers that come in time; a member who gives none is away until it rejoins."""
        began = time.monotonic()
        contents = {id(parcel): put(parcel) for parcel in asks.values()}  # mostly one parcel for all members
        present = {name: contents[id(parcel)] for name, parcel in asks.items() if name in self.nodes}
        messages = {name: self._message(kind, name, content) for name, content in present.items()}
        waiting = dict(zip(self.grid.push_messages(messages.values()), messages, strict=True))
        limit = self.timeout if kind in LONG else self.patience
        deadline = math.inf if limit is None else began + limit
        logged = began
        while waiting:
            now = time.monotonic()  # before the caller handles an answer, which may take long
            for reply in self.grid.pull_messages(list(waiting)):
                name = waiting.pop(reply.metadata.reply_to_message_id, "")
                if name and (answer := self._opened(kind, name, reply)) is not None:
                    yield name, answer
            if waiting and now > deadline:
                for name in waiting.values():
                    self._gone(name, f"no answer to {kind} in time")
                break
            if waiting:
                passed = time.monotonic() - began
                logged = self._log_wait(logged, f"{kind} for {passed:.0f} s", waiting.values())
                time.sleep(POLL)
        self.seconds.setdefault(kind, []).append(time.monotonic() - began)

    def _message(self, kind: Exchange, name: str, ours: RecordDict) -> Message:
        content, message_type = RecordDict({**ours}), QUERY
        if kind == "train":
            theirs = self._train[name]
            message_type = theirs.metadata.message_type
            content = RecordDict({**theirs.content, **content})
        return Message(content, dst_node_id=self.nodes[name], message_type=message_type)

    def _opened(self, kind: Exchange, name: str, reply: Message) -> bytes | None:
        """Return the bytes of a reply; without any, note the failure and return None."""
        if reply.has_error():
            if reply.error.code == UNAVAILABLE:
                self._gone(name, str(reply.error.reason))
            else:
                self._refuses(name, kind, f"{kind} failed: {reply.error.reason}")
            return None
        try:
            data = answer_in(reply.content)
        except Exception as error:  # a bad reply costs only its node the answer
            self._refuses(name, kind, f"{kind} cannot be read: {error}")
            return None
        if kind == "train" and reply.content.metric_records:
            self._metrics[name] = next(iter(reply.content.metric_records.values()))
        self._refused.pop(self.nodes[name], None)
        return data

    def _refuses(self, name: str, kind: Exchange, reason: str) -> None:
        """Take a member out of this round until it joins again, which it may do at once the first time.

        The reports end a round, so a member who fails to report stays and is asked for keys of the next one.
        """
        self.coordinator.note(f"{name}: {reason}")
        if kind in SETTLING:
            self._declined.add(name)
        elif kind not in ("report", "close"):
            self._put_off(self.nodes.pop(name), 0.0)

    def _gone(self, name: str, reason: str) -> None:
        if self.nodes.pop(name, None) is not None:
            self.coordinator.note(f"{name} is away: {reason}")

    def _welcome(self) -> None:
        """Invite unknown nodes and admit those that have answered, without waiting."""
        connected, now = set(self.grid.get_node_ids()), time.monotonic()
        later = {node for node, (not_before, _) in self._refused.items() if now < not_before}
        if new := sorted(connected - later - {*self.nodes.values(), *self._invited.values()}):
            parcel = self.coordinator.invitation()
            messages = [Message(put(parcel), dst_node_id=node, message_type=QUERY) for node in new]
            self._invited |= dict(zip(self.grid.push_messages(messages), new, strict=True))
        for reply in self.grid.pull_messages(list(self._invited)) if self._invited else ():
            node = self._invited.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            if reply.has_error():
                if reply.error.code != UNAVAILABLE:
                    reason = str(reply.error.reason)
                    hint = "; is its ClientApp inside fedmerit.flower.secure?" if PLAIN in reason else ""
                    by = f"invited by fedmerit {VERSION}, which speaks protocol {PROTOCOL}"
                    self._stranger(node, f"{reason} ({by}{hint})")
                continue
            try:
                name = self.coordinator.admit(str(node), answer_in(reply.content))
            except Exception as error:  # a stranger may send anything
                self._stranger(node, str(error))
                continue
            if (other := self.nodes.get(name)) in connected:
                twice = f"it signs with the key of {name}, who has joined already, at node {other}"
                why = f"{name} was started again, or one of the two machines has another member's key file"
                self._stranger(node, f"{twice}: {why}")
            else:
                self.nodes[name] = node

    def _stranger(self, node: int, reason: str) -> None:
        """Note that a node does not take part, and invite it again later, in case somebody fixes it."""
        self._put_off(node, AGAIN)
        self.coordinator.note(f"node {node} does not take part: {reason}")

    def _put_off(self, node: int, first: float) -> None:
        """Delay the next invitation, longer each time until the node answers an exchange."""
        wait = self._refused.get(node, (0.0, first))[1]
        self._refused[node] = time.monotonic() + wait, max(2 * wait, AGAIN)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _same(first: Message, second: Message) -> bool:
    """Return whether two messages have one type and share their content, as in Flower's own strategies."""
    return first.content is second.content and first.metadata.message_type == second.metadata.message_type


def _kind(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def _trains(message: Message) -> bool:
    return _kind(message) == "train"
