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

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedmerit.carriers.attendance import LONG, POLL, Attendance
from fedmerit.config import VERSION
from fedmerit.errors import ProtocolError
from fedmerit.flower.codec import BYTES, QUERY, RecordShape, answer_in, digest, only_arrays, put
from fedmerit.protocol.messages import PROTOCOL, Exchange, Parcel
from fedmerit.protocol.outcome import Model
from fedmerit.protocol.terms import least_scheduled

log = logging.getLogger("fedmerit")
SAME = 0.1
"""Seconds for which the list of nodes is kept: a strategy that samples first asks how many, then who."""
PLAIN = "No query function registered"
"""What Flower says for an app that knows nothing of fedmerit."""
UNAVAILABLE = 5
"""Flower's error code for a node that is gone."""


@dataclass(eq=False, repr=False, kw_only=True)
class SecureGrid(Attendance, Grid):
    """Carries a coordinator's exchanges over another Grid; ``timeout`` is that of the last train step."""

    grid: Grid  # Flower's
    shape: RecordShape  # members get these types, even if a strategy has changed those of integers
    weighted_by: str  # the metric that the strategy averages by
    available: int = 0  # how many members the strategy waits for before it begins a round
    _invited: dict[str, int] = field(default_factory=dict)  # message id -> node
    _train: dict[str, Message] = field(default_factory=dict)  # the strategy's messages of the round
    _metrics: dict[str, MetricRecord] = field(default_factory=dict)
    _known: bool = False  # whether members can make the model of this train step from the sum before it
    _looked: float = -math.inf  # when the strategy last got the list of nodes
    go_on = "to go on from the last model, see fedmerit.flower.last_model"

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
        self.enough(least)
        self._looked = time.monotonic()
        return list(self.nodes.values())

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
        self._looked, self._known = -math.inf, self._is_known(only_arrays(first.content))
        model = self.take(m0, tuple(self._train), extra)
        return [] if model is None else [self._reply(first, model)]

    def _is_known(self, record: ArrayRecord) -> bool:
        """Return whether a model is M of the round before, byte for byte: members make it from the sum."""
        last = self.coordinator.outcome
        made = self.shape.record(last.model) if last else {}
        return [*made] == [*record] and all(made[name] == array for name, array in record.items())

    def _restore(self, message: Message) -> None:
        """Restore the first model's types and integers in a message, because averaging changes them."""
        models = list(message.content.array_records.items()) if message.has_content() else []
        if len(models) == 1 and set(models[0][1]) == set(self.shape.arrays):
            key, record = models[0]
            if any(record[name].dtype != array.dtype.name for name, array in self.shape.arrays.items()):
                message.content[key] = self.shape.record(self.shape.read(record))

    def _reply(self, message: Message, model: Model) -> Message:
        """Return what an averaging strategy sees as the only reply: M, with a weight of 1."""
        means = MetricRecord({self.weighted_by: 1})
        records = [self._metrics[name] for name in self.outcome.included if name in self._metrics]
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
        content = RecordDict({key: self.shape.record(model), "metrics": means})
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
            if self._known and len(ours[BYTES]) > 1:  # beside the sum
                content[next(iter(theirs.content.array_records))] = ArrayRecord()
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
                answer = answer_in(reply.content)
            except Exception as error:  # a stranger may send anything
                self._stranger(node, str(error))
                continue
            self._admit(node, answer, connected)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _same(first: Message, second: Message) -> bool:
    """Return whether two messages have one type and share their content, as in Flower's own strategies."""
    return first.content is second.content and first.metadata.message_type == second.metadata.message_type


def _kind(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def _trains(message: Message) -> bool:
    return _kind(message) == "train"
