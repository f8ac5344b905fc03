"""Who takes part in a run between machines, and when a server gives up; whatever carries the messages.

A member is present once it has proved by a signature who it is. One who refuses or stops answering is left
out until it answers an invitation again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fedmerit.carriers.shape import Shape, listed
from fedmerit.errors import ProtocolError, RunAborted
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.messages import Exchange, Parcel
from fedmerit.protocol.outcome import Model, Outcome
from fedmerit.protocol.settler import SETTLING
from fedmerit.protocol.terms import task_of

log = logging.getLogger("fedmerit")
POLL = 0.25
"""Seconds between two looks for answers."""
AGAIN = 15.0
"""Seconds until a node that refused an invitation is invited again; the wait doubles each time."""
TOLD = 60.0
"""Seconds between two log lines that say whom the server waits for."""
IN_A_ROW = 3
"""Aborted rounds in a row after which a run is given up; a short outage costs one or two."""
LONG = ("train", "report", "judge", "open", "agree", "witness", "table")
"""Exchanges in which a member computes: `timeout` of `start` applies, not the patience for an answer."""


@dataclass(eq=False, repr=False, kw_only=True)
class Attendance:
    """The members of a run who are present; the base of a transport between machines."""

    shape: Shape
    patience: float  # seconds to wait for an answer that needs neither training nor evaluation
    join: float  # seconds to wait for members to come back if too few are present for a round
    timeout: float | None = None  # for members who compute
    coordinator: Coordinator = field(init=False)  # made with this transport
    nodes: dict[str, Any] = field(default_factory=dict)  # members who are present, and where
    rounds: int = 0
    model: Model | None = None  # after the last round
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by exchange, for measurements
    _waits: int = 0  # waits without success since the last round began
    _refused: dict[Any, tuple[float, float]] = field(default_factory=dict)  # node -> next invitation, wait
    _noted: int = 0  # number of notes before this round
    _logged: set[str] = field(default_factory=set)  # what is logged once per run
    _declined: set[str] = field(default_factory=set)  # who refused in the settlement
    _await_until: float | None = None  # when the wait for members who are away ends
    go_on: ClassVar[str]  # how to go on from the last model

    def _welcome(self) -> None:
        """Invite unknown nodes and admit those that have answered, without waiting."""
        raise NotImplementedError

    def exchange(self, kind: Exchange, asks: Mapping[str, Parcel]) -> Iterator[tuple[str, bytes]]:
        """Send, and yield answers that come in time; a member who gives none is away until it rejoins."""
        raise NotImplementedError

    def take(self, m0: Model, members: Sequence[str], extra: bytes) -> Model | None:
        """Run the next round; return M, or None if it was aborted. ``extra`` is as in `Coordinator.round`."""
        self.rounds, self._waits = self.rounds + 1, 0
        model = self.coordinator.round(self.rounds, m0, tuple(members), extra)
        self.model = m0 if model is None else model
        if model is None:
            self._check_going()
        else:
            self._check_rounding(model - m0)
        return model

    @property
    def outcome(self) -> Outcome:
        """What the last round that was not aborted came to."""
        assert self.coordinator.outcome is not None
        return self.coordinator.outcome

    def enough(self, least: int) -> None:
        """Wait until so many members are present; give up after `IN_A_ROW` waits in vain."""
        enough = self._wait(self.coordinator.config.clients, least, time.monotonic() + self.join)
        self._waits = 0 if enough else self._waits + 1
        if self._waits >= IN_A_ROW:  # whoever needs more nodes would ask forever
            counts = f"{len(self.nodes)} members are present, {least} are needed"
            raise self._given_up(f"{counts}; waited {IN_A_ROW} times for {self.join:g} s")

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

    def _check_rounding(self, moved: Model) -> None:
        """Note, once per run, which arrays training changed by less than the sum was rounded by."""
        config, outcome = self.coordinator.config, self.outcome
        step = task_of(config, outcome.m0_hash, moved.size, self.coordinator.scheduled).encoding.step
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
            counts += f", which stay valid: {self.go_on}"
        text = f"{reason} ({counts}); {'; '.join(dict.fromkeys(causes))}"
        return RunAborted(text, closed=closed, aborted=aborted)

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

    def _admit(self, node: Any, answer: bytes, connected: Iterable[Any]) -> None:
        """Take a node's answer to an invitation."""
        try:
            name = self.coordinator.admit(str(node), answer)
        except Exception as error:  # a stranger may send anything
            self._stranger(node, str(error))
            return
        if (other := self.nodes.get(name)) in connected:
            twice = f"it signs with the key of {name}, who has joined already, at node {other}"
            why = f"{name} was started again, or one of the two machines has another member's key file"
            self._stranger(node, f"{twice}: {why}")
        else:
            self.nodes[name] = node

    def _stranger(self, node: Any, reason: str) -> None:
        """Note that a node does not take part, and invite it again later, in case somebody fixes it."""
        self._put_off(node, AGAIN)
        self.coordinator.note(f"node {node} does not take part: {reason}")

    def _put_off(self, node: Any, first: float) -> None:
        """Delay the next invitation, longer each time until the node answers an exchange."""
        wait = self._refused.get(node, (0.0, first))[1]
        self._refused[node] = time.monotonic() + wait, max(2 * wait, AGAIN)
