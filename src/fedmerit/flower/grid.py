"""A Grid that turns a strategy's train messages into fedmerit's exchanges, and hands it one reply: M.

The strategy keeps its own loop and its own sampling. Nodes exist for it once they have proved, by signature,
to be a member of the roster; whoever stops answering is gone until it answers an invitation again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedmerit.errors import FedmeritError, ProtocolError
from fedmerit.federation.protocol import Model
from fedmerit.federation.remote.coordinator import Coordinator
from fedmerit.federation.remote.wire import Exchange
from fedmerit.flower.arrays import Shape
from fedmerit.flower.carrying import QUERY, digest, only_arrays, put, take

log = logging.getLogger("fedmerit")
POLL = 0.25
"""Seconds between two looks for replies; Flower's own send_and_receive waits 3."""
UNAVAILABLE = 5
"""Flower's error code of a node that is gone."""


class SecureGrid(Grid):
    """Carries a coordinator's exchanges over another Grid.

    Args:
        grid: Flower's.
        patience: seconds to wait for an answer that needs no training.
        weighted_by: the metric that the strategy averages by.
    """

    def __init__(self, grid: Grid, patience: float, weighted_by: str) -> None:
        self.grid, self.patience, self.weighted_by = grid, patience, weighted_by
        self.coordinator: Coordinator | None = None
        self.nodes: dict[str, int] = {}  # members that are there
        self.rounds = 0
        self.seconds: dict[str, list[float]] = {}  # by exchange, for whoever measures
        self._strangers: set[int] = set()
        self._invited: dict[str, int] = {}  # message id -> node
        self._train: dict[str, Message] = {}  # the strategy's messages of this round, by member
        self._metrics: dict[str, MetricRecord] = {}
        self._timeout: float | None = None

    # ----------------------------------------------------------------------------------------- for a strategy

    def set_run(self, run: Any) -> None:
        """Passed on."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """Passed on."""
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Passed on."""
        return self.grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Nodes of members that are there; newcomers are invited on the way."""
        self._welcome()
        return list(self.nodes.values())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Passed on, unless it would bring plain updates."""
        listed = list(messages)
        if any(_trains(message) for message in listed):
            raise ProtocolError("train messages go through send_and_receive, as secure stages")
        return self.grid.push_messages(listed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Passed on."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Other messages are passed on; a train step becomes a round of fedmerit."""
        listed = list(messages)
        if not any(_trains(message) for message in listed):
            return self.grid.send_and_receive(listed, timeout=timeout)
        names = {node: name for name, node in self.nodes.items()}
        for message in listed:
            if not _trains(message) or message.metadata.dst_node_id not in names:
                raise ProtocolError("a train step must hold one train message for each of its members")
        self._train = {names[message.metadata.dst_node_id]: message for message in listed}
        self._metrics, self._timeout = {}, timeout
        assert self.coordinator is not None
        self.rounds += 1
        shape, extra = Shape.of(only_arrays(listed[0].content)), digest(listed[0].content)
        if any(digest(message.content) != extra for message in listed[1:]):
            raise ProtocolError("the strategy tells members different things, which secure members refuse")
        model = self.coordinator.round(self.rounds, shape.vector, tuple(self._train), extra)
        return [] if model is None else [self._reply(listed[0], shape, model)]

    def _reply(self, message: Message, shape: Shape, model: Model) -> Message:
        """What an averaging strategy takes for the only reply: M, with a weight of 1."""
        metrics = MetricRecord({self.weighted_by: 1})
        assert self.coordinator is not None
        included = self.coordinator.books.rounds[-1].included
        given = [record for name, record in self._metrics.items() if name in included]
        for key in given[0] if given else ():
            numbers = [record.get(key) for record in given]
            if key != self.weighted_by and all(_is_number(number) for number in numbers):
                metrics[key] = sum(numbers) / len(numbers)  # type: ignore[arg-type]
        key = next(iter(message.content.array_records))
        content = RecordDict({key: shape.record(model), "metrics": metrics})
        return Message(content, reply_to=message)

    # -------------------------------------------------------------------------------------- for a coordinator

    def present(self) -> Sequence[str]:
        """Members that are there."""
        self._welcome()
        return list(self.nodes)

    def exchange(self, kind: Exchange, asks: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Send, wait, and return what came in time; who did not answer is gone until it joins again."""
        began = time.monotonic()
        messages = {}
        for name, data in asks.items():
            if name in self.nodes:
                messages[name] = self._message(kind, name, data)
        ids = self.grid.push_messages(messages.values())
        waiting = dict(zip(ids, messages, strict=True))
        deadline = began + (self.patience if kind != "train" or self._timeout is None else self._timeout)
        answers: dict[str, bytes] = {}
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                to = reply.metadata.reply_to_message_id
                if to in waiting and (answer := self._opened(kind, waiting[to], reply)) is not None:
                    answers[waiting[to]] = answer
                waiting.pop(to, "")
            if waiting and time.monotonic() > deadline:
                for name in waiting.values():
                    self._gone(name, f"no answer to {kind} in time")
                break
            if waiting:
                time.sleep(POLL)
        self.seconds.setdefault(kind, []).append(time.monotonic() - began)
        return {name: answers[name] for name in asks if name in answers}

    def _message(self, kind: Exchange, name: str, data: bytes) -> Message:
        content, message_type = put(data), QUERY
        if kind == "train":
            theirs = self._train[name]
            message_type = theirs.metadata.message_type
            content = RecordDict({**theirs.content, **content})
        return Message(content, dst_node_id=self.nodes[name], message_type=message_type)

    def _opened(self, kind: Exchange, name: str, reply: Message) -> bytes | None:
        """The bytes of a reply, or None where there are none to be had."""
        if reply.has_error():
            if reply.error.code == UNAVAILABLE:
                self._gone(name, str(reply.error.reason))
            else:
                log.warning("%s: %s failed: %s", name, kind, reply.error.reason)
            return None
        try:
            data = take(reply.content)
        except FedmeritError as error:
            log.warning("%s: %s: %s", name, kind, error)
            return None
        if kind == "train" and reply.content.metric_records:
            self._metrics[name] = next(iter(reply.content.metric_records.values()))
        return data

    def _gone(self, name: str, reason: str) -> None:
        if self.nodes.pop(name, None) is not None:
            log.warning("%s is away: %s", name, reason)

    def _welcome(self) -> None:
        """Invite nodes that are not known, and admit those that have answered; never waits."""
        coordinator = self.coordinator
        assert coordinator is not None
        known = {*self.nodes.values(), *self._strangers, *self._invited.values()}
        new = [node for node in self.grid.get_node_ids() if node not in known]
        if new:
            data = coordinator.invitation()
            messages = [Message(put(data), dst_node_id=node, message_type=QUERY) for node in new]
            self._invited |= dict(zip(self.grid.push_messages(messages), new, strict=True))
        for reply in self.grid.pull_messages(list(self._invited)) if self._invited else ():
            node = self._invited.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            if reply.has_error():
                if reply.error.code != UNAVAILABLE:
                    self._stranger(node, str(reply.error.reason))
                continue
            try:
                name = coordinator.admit(str(node), take(reply.content))
            except FedmeritError as error:
                self._stranger(node, str(error))
                continue
            if name in self.nodes:
                self._stranger(node, f"{name} is at node {self.nodes[name]}")
            else:
                self.nodes[name] = node

    def _stranger(self, node: int, reason: str) -> None:
        self._strangers.add(node)
        log.warning("node %d does not take part: %s", node, reason)
        if self.coordinator is not None:
            self.coordinator.refused.append(f"node {node} does not take part: {reason}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _trains(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == "train"
