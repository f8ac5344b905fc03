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
    CloseAsk,
    Exchange,
    HeadsAsk,
    JoinAsk,
    Joined,
    Parcel,
    ReportAnswer,
    TrainAsk,
    answer_of,
    exchange_of,
    join_body,
    outcome_ask,
    parsed,
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
class Coordinator:
    """The server's side of a run: it runs the rounds.

    Args:
        evaluate: returns per-sample utilities of a model; None if the server cannot evaluate.
        weights: returns public weights that do not come from the roster; only in a rehearsal.
        first: the first model, if its utilities are recorded too; only in a rehearsal.
        rehearsal: whether one process holds all members. Utilities may then have any range, and errors of
            user code end the run.
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
    gradient: Gradient | None = None
    archive: Archive | None = None
    awaited: Callable[[Sequence[str]], Sequence[str]] | None = None
    opening: Callable[[Slice], None] | None = None
    refused: list[str] = field(default_factory=list)  # what was refused, and why
    _handed: dict[str, bytes] = field(default_factory=dict)  # digests of members' run configs
    settled: Settled | None = None  # what the settlement came to
    _early: tuple[PlainServer, int] | None = None  # keys that came with the last reports

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
        """
        blamed = self._blamed()
        scheduled = tuple(name for name in self.config.clients if name in {*members} - blamed)
        head, current = self.recorder.head, Round(number, scheduled)
        everybody = self._weights(number, m0, scheduled)
        m0_hash = model_hash(m0)
        self.recorder.schedule(number, scheduled, everybody)
        try:
            if len(scheduled) < (least := least_scheduled(self.config)):
                of_all = f"at least {least} of the {len(self.config.clients)} members are needed"
                left_out = f"; left out, because blamed: {', '.join(sorted(blamed))}" if blamed else ""
                raise RoundAborted(f"{len(scheduled)} scheduled, {of_all}{left_out}")
            server = self._server(number, scheduled)
            task = task_of(self.config, m0_hash, m0.size, scheduled, everybody, extra)
            server.begin(task)
            if self.config.word_bytes == 8:
                server.keep = partial(self._keep_words, number)
            self._sum(server, number, current, task)
            result = server.result
            assert result is not None
            shown = self.pool.slice(number) if self.config.reports else None
            told = Told(number, result.words, result.included, shown, m0_hash, head)
            m = moved(m0, result.weighted_sum, result.total_weight)
            outcome = told.moved_to(m, result.total_weight)
            self._keep(number, m0, server, task)
        except ProtocolError as error:
            self._drop_words(number, scheduled)
            current.aborted, current.included = str(error), ()
            self.note(f"round {number} aborted, the model is unchanged: {error}")
            self.recorder.close(current, m0, None, None)
            return None
        current.included = outcome.included
        present = [name for name in result.included if name in server.heads["unmask"]]
        del server, result  # its sums are as large as three models
        if shown is not None and self.opening is not None:
            self.opening(shown)
        self._reports(current, told, outcome, present)
        self.recorder.close(current, outcome.model, outcome, self._measured(m0, outcome))
        summed, reported = len(current.included), len(current.reports)
        self.tell(f"round {number}: {len(scheduled)} scheduled, {summed} summed, {reported} reported")
        for name in current.differences():
            self.note(
                f"round {number}: {name} measured a different v(M0) or v(M) from the one used for scores"
            )
        return outcome.model

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

    def _server(self, number: int, scheduled: tuple[str, ...]) -> PlainServer:
        """Return the state machine of a round with all keys: those that came early, or ask for them now."""
        early, self._early = self._early, None
        if early is not None and early[1] == number and early[0].setting.members == scheduled:
            return early[0]
        server = self._new_server(number, scheduled)
        for name, answer in self.exchange("advertise", number, scheduled, AdvertiseAsk(scheduled)):
            self._receive(server, name, answer)
        return server

    def _sum(self, server: PlainServer, number: int, current: Round, task: Task) -> None:
        """Run the stages after the keys; record the hashes of the masked inputs before any unmasking."""
        weights = dict(task.weights) if task.weights is not None and self.weights else None
        try:
            shown = server.advance()
            for stage in STAGES[1:]:
                heads = next(iter(shown.values()))
                body = TrainAsk(heads, weights) if stage == "masked" else HeadsAsk(heads)
                for name, answer in self.exchange(exchange_of(stage), number, [*shown], body):
                    self._receive(server, name, answer)
                if stage == "masked":
                    self.recorder.masked(number, server.inputs)
                shown = self._advance(server, current)
        finally:
            current.declined = tuple(server.declined)
            if current.declined and not self.rehearsal:
                self.note(f"round {number}: declined: {', '.join(current.declined)}; their own logs say why")

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

    def _reports(self, current: Round, told: Told, outcome: Outcome, members: Sequence[str]) -> None:
        """Ask members for reports and, in the same message, for keys for the next round."""
        number = current.number
        following: list[str] = []
        if number < self.config.training.rounds:
            expected = set(self.transport.expected(number + 1)) - self._blamed(*current.blamed)
            following = [name for name in self.config.clients if name in expected]
        server = None
        if len(following) >= least_scheduled(self.config):
            server = self._new_server(number + 1, following)
        ask = outcome_ask(self.recorder.run, told, following if server else [])
        asks = dict.fromkeys(members, ask.pack(self.recorder.sign)) if members else {}
        utilities = self.config.scoring.utilities if self.config.reports else ()
        sampling = Sampling(self.recorder.agreed.balanced)
        for name, answer in self.transport.exchange("report", asks) if asks else ():
            try:
                report, keys = self._opened(name, answer)
                accept(report, outcome, utilities, sampling)
                if not self.rehearsal:
                    check_numbers(report)
                body = report.body(self.recorder.run)
                if not self.recorder.verifies(name, "report", body, report.signature):
                    raise BindingError("did not sign its report", stage="report", member=name)
            except Exception as error:  # a bad answer costs only this member its report
                self.note(f"round {number}: refused: {error}")
                continue
            current.reports[name] = report
            if server and keys:
                self._receive(server, name, keys)
        current.reports = {
            name: current.reports[name] for name in current.included if name in current.reports
        }
        if server is None:
            return
        others = [name for name in following if name not in asks]
        for name, answer in self.exchange("advertise", number + 1, others, AdvertiseAsk(tuple(following))):
            self._receive(server, name, answer)
        if set(following) <= {*server.heads["advertise"]}:
            self._early = server, number + 1

    def _opened(self, name: str, answer: bytes) -> tuple[Report, bytes]:
        """Return a member's report, and its keys for the next round."""
        utilities = self.config.scoring.utilities  # a name takes up to 12 bytes per character as JSON
        limit = ANSWER + sum(ANSWER + 12 * len(utility) for utility in utilities)
        limit += head_limit(len(self.config.clients))
        reported = answer_of(name, answer, ReportAnswer, "report", limit)
        report = Report.from_body(name, parsed(reported.text, "report"), run=self.recorder.run)
        return replace(report, signature=reported.signature), reported.keys

    def _measured(self, m0: Model, outcome: Outcome) -> dict[str, dict[str, float]] | None:
        """Return v(M0) and v(M) of every utility as the server measures them; None if it cannot evaluate."""
        evaluate, shown = self.evaluate, outcome.slice
        if shown is None:
            return {}
        if evaluate is None:
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
        self, kind: Exchange, number: int, members: Sequence[str], body: AskBody
    ) -> Iterable[tuple[str, bytes]]:
        """Send one message, packed and signed once, to all of these members."""
        if not members:
            return ()
        return self.transport.exchange(kind, dict.fromkeys(members, self.ask(kind, number, body)))

    def _receive(self, server: PlainServer, name: str, answer: bytes) -> None:
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
