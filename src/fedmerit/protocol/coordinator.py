"""The server of a run, which turns each train step into a secure sum and a round of reports.

The server knows its members by name. A `Transport` carries messages to them and back: over Flower between
machines, or to members in this process for a rehearsal. If a member does not answer, answers with an error or
sends bytes that are refused, it loses the round, the server logs the reason, and the run continues. A round
with too few members is aborted and recorded, and the model stays as it was.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.errors import BindingError, MessageError, ProtocolError, RoundAborted, StoreError
from fedmerit.identity import Roster
from fedmerit.protocol.direction import Gradient
from fedmerit.protocol.messages import (
    ANSWER,
    AdvertiseAsk,
    Ask,
    AskBody,
    CheckAsk,
    CloseAsk,
    Exchange,
    HeadsAsk,
    JoinAsk,
    Joined,
    Parcel,
    Signed,
    TrainAsk,
    UnmaskAsk,
    answer_of,
    exchange_of,
    join_body,
    outcome_ask,
    parsed,
    without_more,
)
from fedmerit.protocol.outcome import (
    Evaluations,
    Model,
    Outcome,
    Report,
    Round,
    Told,
    accept,
    check_numbers,
    mean,
    model_after,
    model_hash,
    moved,
)
from fedmerit.protocol.pool import Pool, Sampling, Slice
from fedmerit.protocol.settlement import Settled, words_kind
from fedmerit.protocol.terms import (
    Agreed,
    archived_task,
    are_public,
    least_scheduled,
    roster_weights,
    task_of,
)
from fedmerit.secagg.messages import Blame, Why, head_limit
from fedmerit.secagg.plain import PlainServer
from fedmerit.secagg.quantise import Words
from fedmerit.secagg.setting import STAGES, Task

log = logging.getLogger("fedmerit")
Arrays = Mapping[str, npt.NDArray[Any]]
Weights = Callable[[int, Model, Sequence[str]], Mapping[str, float]]
"""(round, M0, schedule) -> the weight of every member, if weights are public."""


BLAMED: dict[Why, str] = {
    "share": "dealt {by} a bad share",
    "complaint": "complained falsely",
    "secret": "shared out something else than it committed to",
}
"""What a blamed member did, for the server's notes."""


class Transport(Protocol):
    """Carries one exchange: the same kind of message to many members, and the answers that came in time."""

    def exchange(self, kind: Exchange, asks: Mapping[str, Parcel]) -> Iterable[tuple[str, bytes]]:
        """Yield members and their answers as they arrive, without those who failed or did not answer."""

    def expected(self, number: int) -> Sequence[str]:
        """Return the members who can be scheduled for a round, as far as is known."""


class Recorder(Protocol):
    """Where a coordinator writes: it records each step before it asks for the next one."""

    @property
    def agreed(self) -> Agreed:
        """What members sign when they join."""

    @property
    def config(self) -> Config:
        """The settings of the run."""

    @property
    def run(self) -> str:
        """The identifier of the run."""

    @property
    def roster(self) -> Roster:
        """The public keys of all members."""

    @property
    def rounds(self) -> Sequence[Round]:
        """The rounds that are closed."""

    @property
    def head(self) -> str:
        """The current head of the ledger."""

    def sign(self, message: bytes) -> bytes:
        """Sign a message with the server's key."""

    def schedule(self, number: int, members: Sequence[str], weights: Mapping[str, float] | None) -> None:
        """Record who takes part, and all weights if they are public; the first step of a round."""

    def masked(self, number: int, inputs: Mapping[str, str]) -> None:
        """Record the hashes of the masked inputs, before any member is asked for a share."""

    def blame(self, number: int, blame: Blame) -> None:
        """Record that a member broke the protocol in a round, with the evidence; after the masked inputs."""

    def close(
        self,
        closed: Round,
        model: Model,
        outcome: Outcome | None,
        utilities: Mapping[str, Mapping[str, float]] | None,
    ) -> None:
        """Record the end of a round."""

    def verifies(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> bool:
        """Return whether a member signed this; nothing is recorded."""

    def said(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> bool:
        """Record what a member signed, once; return whether it did sign it."""

    def state(
        self, kind: str, body: Mapping[str, Any], countersigned: Mapping[str, bytes] | None = None
    ) -> None:
        """Record what the server states about the settlement, in one step with members' signatures."""

    def recorded(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Return the bodies of all records of a kind, in order."""

    def signed(self, kind: str) -> Sequence[tuple[str, Mapping[str, Any], bytes]]:
        """Return author, body and signature of all records of a kind that members signed, in order."""

    def end(self, model: Model) -> None:
        """Record the end of the run."""


class Archive(Protocol):
    """Where the server keeps what a settlement needs, one set of arrays per kind and round."""

    def save(self, kind: str, number: int, arrays: Arrays) -> None:
        """Keep arrays, whole or not at all."""

    def load(self, kind: str, number: int) -> dict[str, npt.NDArray[Any]]:
        """Return what was kept; raise StoreError if it is gone or damaged."""

    def has(self, kind: str, number: int) -> bool:
        """Return whether there is such a set of arrays."""

    def drop(self, kind: str, number: int) -> None:
        """Delete a set of arrays."""


@dataclass(frozen=True, eq=False)
class Summed:
    """A round as the archive holds it: the sum, the models before and after it, and what was summed."""

    round: int
    participants: tuple[str, ...]
    m0: Model
    m: Model
    words: Words
    weight: float
    task: Task


def summed_rounds(archive: Archive, rounds: Iterable[Round], config: Config) -> Iterator[Summed]:
    """Yield every round with a sum, in order, as an archive holds it."""
    m: Model | None = None
    for round in rounds:
        if round.aborted:
            continue
        archived = archive.load("round", round.number)
        m0, x = archived.get("m0", m), archived["x"]
        if m0 is None:
            raise StoreError(f"the archive has no model of round {round.number}")
        task = archived_task(archived, config, model_hash(m0), m0.size, round.scheduled)
        m, weight = model_after(m0, x, task, round.included)
        yield Summed(round.number, round.included, m0, m, x, weight, task)


@dataclass(eq=False)
class Owed:
    """A round that has its sum, and still lacks the reports on it."""

    current: Round
    outcome: Outcome
    members: tuple[str, ...]  # who can report
    m0: Model | None  # unless the sum is only to be acknowledged
    asked: bool = False  # whether members were asked with another message

    def ask(self, run: str) -> Ask:
        """Return the request for these reports."""
        return outcome_ask(run, self.outcome)


@dataclass(eq=False)
class Coordinator:
    """The server's side of a run: it runs the rounds.

    Args:
        evaluate: returns per-sample utilities of a model; None if the server cannot evaluate.
        weights: returns public weights that do not come from the roster; only in a rehearsal.
        first: the first model, if its utilities are recorded too; only in a rehearsal.
        rehearsal: whether one process holds all members. Utilities may then have any range, and errors of
            user code end the run.
        defers: whether members acknowledge a sum with the first message of the next round.
        gradient: of the paid utility along a path; like ``archive``, needed where the run is settled.
        awaited: waits for members who are away at the settlement; returns those who are back, or nobody.
        opening: is told of test samples before any member is shown them.
    """

    recorder: Recorder
    pool: Pool
    transport: Transport
    evaluate: Evaluations | None
    weights: Weights | None = None
    first: Model | None = None
    rehearsal: bool = False
    defers: bool = False
    gradient: Gradient | None = None
    archive: Archive | None = None
    awaited: Callable[[Sequence[str]], Sequence[str]] | None = None
    opening: Callable[[Slice], None] | None = None
    refused: list[str] = field(default_factory=list)  # what was refused, and why
    _handed: dict[str, bytes] = field(default_factory=dict)  # digests of members' run configs
    settled: Settled | None = None  # what the settlement came to
    scheduled: tuple[str, ...] = ()  # for the last round
    outcome: Outcome | None = None  # of the last round that was not aborted
    _early: PlainServer | None = None  # of the next round, with keys and shares that came ahead
    _owed: Owed | None = None  # the round whose sum is still to be acknowledged

    @property
    def config(self) -> Config:
        return self.recorder.config

    def ask(
        self, kind: Exchange, number: int, body: AskBody, arrays: Mapping[str, Any] | None = None
    ) -> Parcel:
        """Return a signed message of this run, with arrays beside it."""
        return Ask(kind, self.recorder.run, number, body, arrays or {}).pack(self.recorder.sign)

    def invitation(self) -> Parcel:
        """Return the message that asks a member to join: the terms it is to sign."""
        agreed = self.recorder.agreed
        return self.ask("join", 0, JoinAsk(dict(agreed.terms), dict(agreed.commitment), agreed.server))

    def admit(self, address: str, answer: bytes) -> str:
        """Return the member at an address and record that it joined; raise unless it proves who it is."""
        joined = answer_of(f"the node at {address}", answer, Joined, "join")
        if (name := joined.name) not in self.config.clients:
            raise MessageError(f"the node at {address} is not a member of the roster", stage="join")
        agreed = self.recorder.agreed
        terms = (agreed.terms, agreed.commitment, agreed.server)
        held_out = parsed(joined.held_out, "join") if self.config.judged else None
        body = join_body(self.recorder.run, address, *terms, run_config=joined.run_config, held_out=held_out)
        if not self.recorder.said(name, "join", body, joined.signature):
            raise BindingError("did not sign with its key on the roster", stage="join", member=name)
        self._handed[name] = joined.run_config
        return name

    def run_config(self, members: Sequence[str]) -> bytes:
        """Return the digest of the run config that most of these members have; note the members who differ.

        The transport hands the run config to members outside our messages. Members compare it, so an update
        made with a different one cannot be summed.
        """
        counted = Counter(self._handed[name] for name in sorted(members))
        most = counted.most_common(1)[0][0]
        for name in members:
            if self._handed[name] != most:
                self.note(f"{name} has a different run config from most members: its update cannot be summed")
        return most

    # ----------------------------------------------------------------------------------------------- a round

    def round(self, number: int, m0: Model, members: Sequence[str], extra: bytes = b"") -> Model | None:
        """Run and record one round; return M, or None if the round was aborted.

        ``extra`` is the digest of all that the train messages carry beside M0, the same for all members.
        If the round is only to be acknowledged, it may be recorded as closed with the next one's first
        message, or by `acknowledge`.
        """
        blamed = self._blamed(*(self._owed.current.blamed if self._owed else ()))
        scheduled = tuple(name for name in self.config.clients if name in {*members} - blamed)
        current, everybody = Round(number, scheduled), self._weights(number, m0, scheduled)
        self.scheduled = scheduled
        m0_hash, early = model_hash(m0), self._came_early(number, scheduled)
        begin = partial(self._begin, current, everybody)
        if self._owed is None or early is None or {*scheduled} != {*self._owed.members}:
            begin()
        try:
            if len(scheduled) < (least := least_scheduled(self.config)):
                of_all = f"at least {least} of the {len(self.config.clients)} members are needed"
                left_out = f"; left out, because blamed: {', '.join(sorted(blamed))}" if blamed else ""
                raise RoundAborted(f"{len(scheduled)} scheduled, {of_all}{left_out}")
            server = early or self._with_keys(number, scheduled)
            task = task_of(self.config, m0_hash, m0.size, scheduled, everybody, extra)
            server.begin(task)
            if self.config.word_bytes == 8:
                server.keep = partial(self._keep_words, number)
            self._sum(server, current, task, begin)
            result = server.result
            assert result is not None
            shown = self.pool.slice(number) if self.config.reports else None
            told = Told(number, result.words, result.included, shown, m0_hash, current.head)
            m = moved(m0, result.weighted_sum, result.total_weight)
            outcome = told.moved_to(m, result.total_weight)
            self._keep(number, m0, server, task)
        except ProtocolError as error:
            begin()
            self._drop_words(number, scheduled)
            current.aborted, current.included = str(error), ()
            self.note(f"round {number} aborted, the model is unchanged: {error}")
            self.recorder.close(current, m0, None, None)
            return None
        current.included = outcome.included
        present = [name for name in result.included if name in server.heads["unmask"]]
        del server, early, result  # its sums are as large as three models
        if shown is not None and self.opening is not None:
            self.opening(shown)
        defers = self.defers and shown is None and self._early is not None
        self._owed = Owed(current, outcome, tuple(present), None if defers else m0)
        self.outcome = outcome
        if not defers:
            self.acknowledge()
        return outcome.model

    def _begin(self, current: Round, weights: Mapping[str, float] | None) -> None:
        """Record the schedule of a round, once, and before that how the round before it was closed."""
        if current.head:
            return
        self.acknowledge()
        current.head = self.recorder.head
        self.recorder.schedule(current.number, current.scheduled, weights)

    def _keep(self, number: int, m0: Model, server: PlainServer, task: Task) -> None:
        """Archive what a settlement needs of a round: X, M0 unless it follows, and what masks can prove."""
        if not self.config.settles:
            return
        assert self.archive is not None
        assert server.result is not None
        arrays: dict[str, Any] = {"x": server.result.words}
        before = [round for round in self.recorder.rounds if not round.aborted]
        if not before or before[-1].body["m"] != task.m0_hash.hex():
            arrays["m0"] = m0
        if task.weights is not None:
            arrays["weights"] = np.array([*task.weights.values()])
        if proof := server.proof:
            self.archive.save("masks", number, {"proof": np.frombuffer(proof, np.uint8)})
        self.archive.save("round", number, arrays)  # last: where it is, the rest is too

    def _keep_words(self, number: int, name: str, payload: memoryview) -> None:
        """Archive a member's masked words as they come: a settlement proves its product by them."""
        assert self.archive is not None
        self.archive.save(words_kind(name), number, {name: np.frombuffer(payload, np.uint8)})

    def _drop_words(self, number: int, names: Iterable[str]) -> None:
        """Delete the masked words of a round without a sum."""
        if self.config.word_bytes == 8 and self.archive is not None:
            for name in names:
                self.archive.drop(words_kind(name), number)

    def take_up(self, current: Round, model: Model) -> None:
        """Close a round that a server left open when it died.

        If its sum was archived, the round counts, and everybody in it is silent: members may have
        acknowledged the sum already, and would not settle without it. Otherwise it is aborted.
        """
        assert self.archive is not None
        number = current.number
        if not self.archive.has("round", number):
            self._drop_words(number, current.scheduled)
            current.aborted, current.included = "the server stopped before it had the sum", ()
            self.note(f"round {number} aborted, the model is unchanged: {current.aborted}")
            self.recorder.close(current, model, None, None)
            return
        *_, last = summed_rounds(self.archive, [*self.recorder.rounds, current], self.config)
        shown = self.pool.slice(number) if self.config.reports else None
        told = Told(number, last.words, last.participants, shown, last.task.m0_hash.hex(), current.head)
        self.note(f"round {number} is closed with its sum, which was known when the server stopped")
        self.recorder.close(current, last.m, told.moved_to(last.m, last.weight), {})

    def _weights(self, number: int, m0: Model, scheduled: Sequence[str]) -> Mapping[str, float] | None:
        """Return the weight of every member, or None if weights are not public."""
        if not are_public(self.config):
            return None
        return self.weights(number, m0, scheduled) if self.weights else roster_weights(self.config)

    def _new_server(self, number: int, scheduled: Sequence[str]) -> PlainServer:
        recorder = self.recorder
        setting = recorder.agreed.setting(recorder.run, number, scheduled, recorder.roster)
        if not self.config.secure_aggregation.enabled:
            return PlainServer(setting)
        from fedmerit.secagg.server import Server

        return Server(setting)

    def _came_early(self, number: int, scheduled: Sequence[str]) -> PlainServer | None:
        """Return the state machine of a round if keys and shares of all who are scheduled came ahead."""
        early, self._early = self._early, None
        if early is None or early.setting.round != number or early.setting.members != scheduled:
            return None
        return None if early.waiting else early

    def _with_keys(self, number: int, scheduled: tuple[str, ...]) -> PlainServer:
        """Return the state machine of a round, after asking for keys."""
        server = self._new_server(number, scheduled)
        for name, answer in self.exchange("advertise", number, scheduled, AdvertiseAsk(scheduled)):
            self._receive(server, name, answer)
        return server

    def _sum(self, server: PlainServer, current: Round, task: Task, begin: Callable[[], None]) -> None:
        """Run the stages after those that came early, and the first two of the next round with the last two.

        Record the hashes of the masked inputs before any unmasking.
        """
        weights = dict(task.weights) if task.weights is not None and self.weights else None
        number, keys = current.number, b""
        ahead: PlainServer | None = None
        try:
            shown = server.advance()
            for stage in STAGES[STAGES.index(server.stage) :]:
                heads, asked = next(iter(shown.values())), [*shown]
                body: AskBody = HeadsAsk(heads)
                owed = self._owed if stage == "masked" else None
                if stage == "masked":
                    before = owed.ask(self.recorder.run).body if owed else None
                    body = TrainAsk(heads, weights, before)
                elif stage == "check":
                    ahead = self._next(number, asked, current)
                    body = CheckAsk(heads, ahead.setting.members if ahead else ())
                elif stage == "unmask":
                    keys = self._keys_of(ahead) if ahead else b""
                    body = UnmaskAsk(heads, keys)
                arrays = {"sum": owed.outcome.words} if owed else None
                for name, answer in self.exchange(exchange_of(stage), number, asked, body, arrays):
                    if stage == "share":
                        self._receive(server, name, answer)
                    else:
                        self._receive_both(server, name, answer, stage, owed or ahead)
                if stage == "masked":
                    begin()
                    self.recorder.masked(number, server.inputs)
                shown = self._advance(server, current)
            self._early = ahead if keys else None
        finally:
            current.declined = tuple(server.declined)
            if current.declined and not self.rehearsal:
                self.note(f"round {number}: declined: {', '.join(current.declined)}; their own logs say why")

    def _next(self, number: int, present: Sequence[str], current: Round) -> PlainServer | None:
        """Return the state machine of the next round if all its members are present in this one."""
        if number >= self.config.training.rounds:
            return None
        expected = {*self.transport.expected(number + 1)} - self._blamed(*current.blamed)
        following = [name for name in self.config.clients if name in expected]
        if len(following) < least_scheduled(self.config) or not expected <= {*present}:
            return None
        return self._new_server(number + 1, following)

    def _keys_of(self, ahead: PlainServer) -> bytes:
        """Return everybody's keys for the next round as they are shown; empty bytes if some are missing."""
        return b"" if ahead.waiting else next(iter(ahead.advance().values()))

    def _receive_both(
        self, server: PlainServer, name: str, data: bytes, stage: str, other: PlainServer | Owed | None
    ) -> None:
        """Take an answer of this round, and what came with it: for the next round, or the round before."""
        try:
            answer, more = without_more(name, data, stage, self._most())
        except MessageError as error:
            self.note(f"round {server.setting.round}: refused: {error}")
            return
        self._receive(server, name, answer)
        if more and isinstance(other, Owed):
            self._reported(other, name, more)
        elif more and isinstance(other, PlainServer):
            self._receive(other, name, more)

    def _advance(self, server: PlainServer, current: Round) -> dict[str, bytes]:
        """Close a stage; record who broke the protocol in it before anybody is asked for anything else."""
        try:
            return server.advance()
        finally:
            for blame in server.blames[len(current.blamed) :]:
                current.blamed += (blame.member,)
                self.recorder.blame(current.number, blame)
                did = BLAMED[blame.why].format(by=blame.by)
                self.note(f"round {current.number}: {blame.member} {did}: it takes part in no later round")

    def _blamed(self, *more: str) -> set[str]:
        """Return who was blamed in an earlier round or now; no such member is scheduled again."""
        return {name for round in self.recorder.rounds for name in round.blamed} | {*more}

    # ----------------------------------------------------------------------------------------------- reports

    def acknowledge(self) -> None:
        """Close the round that lacks its reports; ask for them unless they came with another message."""
        owed, self._owed = self._owed, None
        if owed is None:
            return
        current, outcome = owed.current, owed.outcome
        if not owed.asked and owed.members:
            ask = owed.ask(self.recorder.run).pack(self.recorder.sign)
            for name, answer in self.transport.exchange("report", dict.fromkeys(owed.members, ask)):
                self._reported(owed, name, answer)
        current.reports = {
            name: current.reports[name] for name in current.included if name in current.reports
        }
        self.recorder.close(current, outcome.model, outcome, self._measured(owed.m0, outcome))
        number, summed, reported = current.number, len(current.included), len(current.reports)
        self.tell(f"round {number}: {len(current.scheduled)} scheduled, {summed} summed, {reported} reported")
        for name in current.differences():
            self.note(
                f"round {number}: {name} measured a different v(M0) or v(M) from the one used for scores"
            )

    def _reported(self, owed: Owed, name: str, answer: bytes) -> None:
        """Take a member's report; a bad one costs only this member its report."""
        owed.asked = True
        try:
            reported = answer_of(name, answer, Signed, "report", self._most())
            said = Report.from_body(name, parsed(reported.text, "report"), run=self.recorder.run)
            report = replace(said, signature=reported.signature)
            utilities = self.config.scoring.utilities if self.config.reports else ()
            accept(report, owed.outcome, utilities, Sampling(self.recorder.agreed.balanced))
            if not self.rehearsal:
                check_numbers(report)
            body = report.body(self.recorder.run)
            if not self.recorder.verifies(name, "report", body, report.signature):
                raise BindingError("did not sign its report", stage="report", member=name)
        except Exception as error:
            self.note(f"round {owed.current.number}: refused: {error}")
            return
        owed.current.reports[name] = report

    def _most(self) -> int:
        """Return the most bytes of a report, or of keys or shares for the next round."""
        utilities = self.config.scoring.utilities  # a name takes up to 12 bytes per character as JSON
        limit = ANSWER + sum(ANSWER + 12 * len(utility) for utility in utilities)
        return limit + head_limit(len(self.config.clients))

    def _measured(self, m0: Model | None, outcome: Outcome) -> dict[str, dict[str, float]] | None:
        """Return v(M0) and v(M) of every utility as the server measures them; None if it cannot evaluate."""
        evaluate, shown = self.evaluate, outcome.slice
        if shown is None:
            return {}
        if evaluate is None or m0 is None:
            return None
        try:
            of_model = {
                "empty": evaluate(m0, shown, outcome.m0_hash),
                "grand": evaluate(outcome.model, shown, outcome.bound_to["m"]),
            }
            if self.first is not None:
                of_model["first"] = evaluate(self.first, shown, model_hash(self.first))
        except Exception as error:  # user code: one model must not end the run
            if self.rehearsal:
                raise
            log.exception("the server could not evaluate")
            self.note(
                f"round {outcome.round}: the server cannot evaluate, so the members' medians count: {error}"
            )
            return None
        return {
            name: {which: mean(values[name]) for which, values in of_model.items()}
            for name in of_model["empty"]
        }

    def seal(self, members: Sequence[str], head: str) -> None:
        """Ask members to sign the ledger's head at the end of the run; a member signs only one."""
        number = min(len(self.recorder.rounds), self.config.training.rounds)
        seen = {"run": self.recorder.run, "round": number, "head": head}
        for name, signature in self.exchange("close", number, members, CloseAsk(head)):
            # without the server's key nothing is signed, so it would prove nothing
            if self.recorder.agreed.server and not self.recorder.said(name, "seen", seen, signature):
                self.note(f"{name} did not sign the ledger's head")

    # --------------------------------------------------------------------------------------------- internals

    def exchange(
        self,
        kind: Exchange,
        number: int,
        members: Sequence[str],
        body: AskBody,
        arrays: Mapping[str, Any] | None = None,
    ) -> Iterable[tuple[str, bytes]]:
        """Send one message, packed and signed once, to all of these members."""
        if not members:
            return ()
        return self.transport.exchange(kind, dict.fromkeys(members, self.ask(kind, number, body, arrays)))

    def _receive(self, server: PlainServer, name: str, answer: bytes | memoryview) -> None:
        try:
            server.receive(answer, name)
        except ProtocolError as error:
            self.note(f"round {server.setting.round}: refused: {error}")

    def tell(self, text: str) -> None:
        """Log progress, outside of rehearsals, which show their own."""
        if not self.rehearsal:
            log.info("%s", text)

    def note(self, text: str) -> None:
        """Keep a remark in `refused` and, outside of rehearsals, log it."""
        self.refused.append(text)
        if not self.rehearsal:
            log.warning("%s", text)
