"""A Grid that turns a strategy's train messages into fedmerit's exchanges, and returns one reply to it: M.

The strategy keeps its own loop and its own sampling. It sees a node once the node has proved, by a signature,
that it is a member on the roster. A node that refuses or stops answering is left out until it answers an
invitation again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedmerit.config import VERSION
from fedmerit.errors import ProtocolError, RunAborted
from fedmerit.flower.codec import QUERY, Shape, answer_in, digest, only_arrays, put
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.messages import PROTOCOL, Exchange, Parcel
from fedmerit.protocol.outcome import Model
from fedmerit.protocol.settler import SETTLING
from fedmerit.protocol.terms import least_scheduled

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
LONG = ("train", "report", "open", "agree", "table")
"""Exchanges in which a member computes: `timeout` of `start` applies, not the patience for an answer."""
PLAIN = "No query function registered"
"""What Flower says for an app that knows nothing of fedmerit."""
UNAVAILABLE = 5
"""Flower's error code for a node that is gone."""


class SecureGrid(Grid):
    """Carries a coordinator's exchanges over another Grid.

    Args:
        grid: Flower's grid.
        shape: the model's shape; members get these types, even if a strategy has changed those of integers.
        patience: seconds to wait for an answer that needs neither training nor evaluation.
        join: seconds to wait for members to come back if too few are present for a round.
        weighted_by: the metric that the strategy averages by.
        available: the number of members that the strategy waits for before it begins a round.
        timeout: seconds to wait for members who compute, until a train step brings the strategy's own.
    """

    def __init__(
        self,
        grid: Grid,
        shape: Shape,
        patience: float,
        join: float,
        weighted_by: str,
        available: int = 0,
        timeout: float | None = None,
    ) -> None:
        self.grid, self.shape, self.patience, self.join = grid, shape, patience, join
        self.weighted_by, self.available = weighted_by, available
        self.coordinator: Coordinator | None = None
        self.nodes: dict[str, int] = {}  # members who are there
        self.rounds = 0
        self._waits = 0  # waits without success since the last round began
        self.model: Model | None = None  # after the last round
        self.seconds: dict[str, list[float]] = {}  # by exchange, for measurements
        self._refused: dict[int, tuple[float, float]] = {}  # node -> next invitation, and the wait after it
        self._invited: dict[str, int] = {}  # message id -> node
        self._train: dict[str, Message] = {}  # the strategy's messages in this round, by member
        self._metrics: dict[str, MetricRecord] = {}
        self._timeout = timeout
        self._looked = -math.inf
        self._noted = 0  # number of notes before this round
        self._withheld: set[str] = set()  # training metrics already reported as missing
        self._unshared = False  # whether the log says that no evaluation metric is shared
        self._declined: set[str] = set()  # who refused in the settlement
        self._await_until: float | None = None  # when the wait for members who are away ends

    # ----------------------------------------------------------------------------------------- for a strategy

    def set_run(self, run: Any) -> None:
        """Call the same method of Flower's grid."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run of Flower's grid."""
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Call the same method of Flower's grid."""
        return self.grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes of members who are present; invite new ones, and wait if too few are left."""
        if time.monotonic() <= self._looked + SAME:
            return list(self.nodes.values())
        self._welcome()
        began = told = time.monotonic()
        while self.rounds and len(self.nodes) < self._least() and time.monotonic() < began + self.join:
            told = self._tell(told, f"{len(self.nodes)} present, {self._least()} needed", self._missing())
            time.sleep(POLL)
            self._welcome()
        self._waits = self._waits + 1 if self.rounds and len(self.nodes) < self._least() else 0
        if self._waits >= IN_A_ROW:  # a strategy that needs more nodes would ask forever
            there = f"{len(self.nodes)} members are present, {self._least()} are needed"
            raise self._given_up(f"{there}; waited {IN_A_ROW} times for {self.join:g} s")
        self._looked = time.monotonic()
        return list(self.nodes.values())

    def _least(self) -> int:
        """Return the fewest members a round begins with, by the terms of the run and by the strategy."""
        assert self.coordinator is not None
        return max(least_scheduled(self.coordinator.config), self.available)

    def _missing(self) -> list[str]:
        assert self.coordinator is not None
        return [name for name in self.coordinator.config.clients if name not in self.nodes]

    def _tell(self, told: float, what: str, names: Iterable[str]) -> float:
        """Log about once a minute whom the server waits for; return the time of the last such line."""
        now = time.monotonic()
        if now < told + TOLD:
            return told
        log.info("round %d: %s, waiting for %s", self.rounds, what, ", ".join(names))
        return now

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Pass messages on to Flower's grid; refuse train messages, which would bring plain updates."""
        listed = list(messages)
        if any(_trains(message) for message in listed):
            raise ProtocolError("train messages go through send_and_receive, as secure stages")
        return self.grid.push_messages(listed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Call the same method of Flower's grid."""
        return self.grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Turn a train step into a round of fedmerit; pass other messages on to Flower's grid."""
        listed = list(messages)
        for message in listed:
            self._restore(message)
        if not any(_trains(message) for message in listed):
            replies = list(self.grid.send_and_receive(listed, timeout=timeout))
            self._tell_unshared(replies)
            return replies
        names = {node: name for name, node in self.nodes.items()}
        for message in listed:
            if not _trains(message) or message.metadata.dst_node_id not in names:
                raise ProtocolError("a train step must hold one train message for each of its members")
        self._train = {names[message.metadata.dst_node_id]: message for message in listed}
        self._metrics, self._timeout = {}, timeout
        assert self.coordinator is not None
        self._noted = len(self.coordinator.refused)
        first, run_config = listed[0], self.coordinator.run_config(tuple(self._train))
        m0, extra = self.shape.read(only_arrays(first.content)), digest(first, run_config)
        for message in listed[1:]:
            if not _same(message, first) and digest(message, run_config) != extra:
                name = names[message.metadata.dst_node_id]
                raise ProtocolError(
                    "the strategy sends it a message that differs from the others", member=name
                )
        self.rounds, self._waits, self._looked = self.rounds + 1, 0, -math.inf
        model = self.coordinator.round(self.rounds, m0, tuple(self._train), extra)
        self.model = m0 if model is None else model
        if model is None:
            self._check_going()
            return []
        return [self._reply(listed[0], model)]

    def _check_going(self) -> None:
        """Raise `RunAborted` if the last `IN_A_ROW` rounds were aborted and more are to come."""
        assert self.coordinator is not None
        last = self.coordinator.recorder.rounds[-IN_A_ROW:]
        more = self.rounds < self.coordinator.config.training.rounds
        if more and len(last) == IN_A_ROW and all(one.aborted for one in last):
            raise self._given_up(f"{IN_A_ROW} rounds in a row were aborted")

    def check_closed(self) -> None:
        """Raise `RunAborted` if there were rounds but none was closed."""
        assert self.coordinator is not None
        rounds = self.coordinator.recorder.rounds
        if rounds and all(one.aborted for one in rounds):
            raise self._given_up("no round was closed")

    def _given_up(self, what: str) -> RunAborted:
        """Return an error that says which rounds were aborted, why, and who caused the last of them."""
        assert self.coordinator is not None
        rounds = self.coordinator.recorder.rounds
        closed = tuple(one.number for one in rounds if not one.aborted)
        aborted = tuple(one.number for one in rounds if one.aborted)
        last_ones = [one for one in rounds[-IN_A_ROW:-1] if one.aborted]
        before = [f"round {one.number} aborted: {one.aborted}" for one in last_ones]
        last = self.coordinator.refused[self._noted :]  # also members who were away, declined or were refused
        away = [f"missing: {', '.join(self._missing())}"] if self._missing() else []
        planned = self.coordinator.config.training.rounds
        reached = f"{len(aborted)} of {planned} rounds aborted, {len(closed)} closed"
        if closed:
            reached += ", which stay valid: to go on from the last model, see fedmerit.flower.last_model"
        told = "; ".join(dict.fromkeys([*before, *last, *away]))
        return RunAborted(f"{what} ({reached}); {told}", closed=closed, aborted=aborted)

    def _restore(self, message: Message) -> None:
        """Restore the first model's types and integers in a message, because averaging changes them."""
        models = list(message.content.array_records.items()) if message.has_content() else []
        if len(models) == 1 and set(models[0][1]) == set(self.shape.arrays):
            key, record = models[0]
            given = {name: array.dtype.name for name, array in self.shape.arrays.items()}
            if any(record[name].dtype != given[name] for name in given):
                message.content[key] = self.shape.record(self.shape.read(record))

    def _reply(self, message: Message, model: Model) -> Message:
        """Return what an averaging strategy sees as the only reply: M, with a weight of 1."""
        metrics = MetricRecord({self.weighted_by: 1})
        assert self.coordinator is not None
        included = self.coordinator.recorder.rounds[-1].included
        given = [self._metrics[name] for name in included if name in self._metrics]
        named = dict.fromkeys(key for record in given for key in record if key != self.weighted_by)
        for key in named:
            numbers = [record.get(key) for record in given]
            if all(_is_number(number) for number in numbers):
                metrics[key] = sum(numbers) / len(numbers)  # type: ignore[arg-type]
        self._tell_withheld([key for key in named if key not in metrics], any_shared=bool(given))
        key = next(iter(message.content.array_records))
        content = RecordDict({key: self.shape.record(model), "metrics": metrics})
        return Message(content, reply_to=message)

    def _tell_withheld(self, names: Sequence[str], *, any_shared: bool) -> None:
        """Log once which training metrics the strategy does not get, and why."""
        if new := [name for name in names if name not in self._withheld]:
            log.warning(
                "the strategy does not get the training metrics %s: a mean needs a number from every member "
                "who shares any metric",
                ", ".join(new),
            )
        if not any_shared and "" not in self._withheld:
            log.info(
                "the strategy gets no training metrics: they leave a member's machine only if its own "
                "secure(..., metrics=[...]) lists them"
            )
        self._withheld |= {*names} if any_shared else {""}

    def _tell_unshared(self, replies: Sequence[Message]) -> None:
        """Log once that members who evaluated share no metric, because the strategy then shows none."""
        records = [
            record
            for reply in replies
            if reply.metadata.message_type.partition(".")[0] == "evaluate" and reply.has_content()
            for record in reply.content.metric_records.values()
        ]
        if records and not self._unshared and not any({*one} - {self.weighted_by} for one in records):
            self._unshared = True
            log.info(
                "the strategy gets no evaluation metrics: they leave a member's machine only if its own "
                "secure(..., metrics=[...]) lists them"
            )

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
        told = time.monotonic()
        while away:
            self._welcome()
            if back := [name for name in away if name in self.nodes]:
                return back
            if time.monotonic() > self._await_until:
                break
            told = self._tell(told, "settlement", away)
            time.sleep(POLL)
        return []

    def exchange(self, kind: Exchange, asks: Mapping[str, Parcel]) -> Iterator[tuple[str, bytes]]:
        """Send, and yield answers that come in time; a member who gives none is away until it rejoins."""
        began = time.monotonic()
        contents = {id(parcel): put(parcel) for parcel in asks.values()}  # mostly one parcel for all members
        messages = {
            name: self._message(kind, name, contents[id(parcel)])
            for name, parcel in asks.items()
            if name in self.nodes
        }
        ids = self.grid.push_messages(messages.values())
        waiting = dict(zip(ids, messages, strict=True))
        limit = self._timeout if kind in LONG else self.patience
        deadline = math.inf if limit is None else began + limit
        told = began
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
                told = self._tell(told, f"{kind} for {passed:.0f} s", waiting.values())
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
        assert self.coordinator is not None
        self.coordinator.note(f"{name}: {reason}")
        if kind in SETTLING:
            self._declined.add(name)
        elif kind not in ("report", "close"):
            self._put_off(self.nodes.pop(name), 0.0)

    def _gone(self, name: str, reason: str) -> None:
        if self.nodes.pop(name, None) is not None and self.coordinator is not None:
            self.coordinator.note(f"{name} is away: {reason}")

    def _welcome(self) -> None:
        """Invite unknown nodes and admit those that have answered, without waiting."""
        coordinator = self.coordinator
        assert coordinator is not None
        listed, now = set(self.grid.get_node_ids()), time.monotonic()
        later = {node for node, (not_before, _) in self._refused.items() if now < not_before}
        known = {*self.nodes.values(), *later, *self._invited.values()}
        new = [node for node in sorted(listed) if node not in known]
        if new:
            parcel = coordinator.invitation()
            messages = [Message(put(parcel), dst_node_id=node, message_type=QUERY) for node in new]
            self._invited |= dict(zip(self.grid.push_messages(messages), new, strict=True))
        for reply in self.grid.pull_messages(list(self._invited)) if self._invited else ():
            node = self._invited.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            if reply.has_error():
                if reply.error.code != UNAVAILABLE:
                    by = f"invited by fedmerit {VERSION}, which speaks protocol {PROTOCOL}"
                    bare = PLAIN in str(reply.error.reason)
                    hint = "; is its ClientApp inside fedmerit.flower.secure?" if bare else ""
                    self._stranger(node, f"{reply.error.reason} ({by}{hint})")
                continue
            try:
                name = coordinator.admit(str(node), answer_in(reply.content))
            except Exception as error:  # a stranger may send anything
                self._stranger(node, str(error))
                continue
            if self.nodes.get(name) in listed:
                self._stranger(node, f"{name} has joined already, at node {self.nodes[name]}")
            else:
                self.nodes[name] = node

    def _stranger(self, node: int, reason: str) -> None:
        """Note that a node does not take part, and invite it again later, in case somebody fixes it."""
        self._put_off(node, AGAIN)
        if self.coordinator is not None:
            self.coordinator.note(f"node {node} does not take part: {reason}")

    def _put_off(self, node: int, first: float) -> None:
        """Delay the next invitation, longer each time until the node answers an exchange."""
        wait = self._refused.get(node, (0.0, first))[1]
        self._refused[node] = time.monotonic() + wait, max(2 * wait, AGAIN)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _same(one: Message, other: Message) -> bool:
    """Return whether two messages have one type and share their content, as in Flower's own strategies."""
    return one.content is other.content and one.metadata.message_type == other.metadata.message_type


def _trains(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == "train"
