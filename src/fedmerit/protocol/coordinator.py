"""The server of a run between machines: one train step becomes the secure stages and a round of reports.

It knows its members by name; a `Transport` carries bytes to them and back. Whatever goes wrong with a member
(no answer, an error, bytes that are refused) costs that member the round, is told to whoever watches, and the
run goes on: a round with too few members is aborted, leaves the model as it was and is recorded.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedmerit.config import Config
from fedmerit.errors import BindingError, FedmeritError, MessageError, ProtocolError
from fedmerit.identity.keys import public_key
from fedmerit.ledger.recorder import Books
from fedmerit.ledger.records import Round, disagreeing
from fedmerit.protocol.measure import mean
from fedmerit.protocol.messages import (
    Ask,
    Evaluate,
    Exchange,
    Model,
    Outcome,
    Report,
    accept,
    check_numbers,
    model_hash,
    moved,
    pack_outcome,
    unpack,
)
from fedmerit.protocol.pool import Pool
from fedmerit.protocol.terms import are_public, least_scheduled, roster_weights, scheduled_encoding
from fedmerit.secagg import Server, Setting, Task
from fedmerit.secagg.messages import head_limit

log = logging.getLogger("fedmerit")
ANSWER = 4096
"""Most bytes of a member's answer, beside what depends on the settings."""
_KIND: dict[str, Exchange] = {"share": "share", "masked": "train", "check": "check", "unmask": "unmask"}


class Transport(Protocol):
    """Carries one exchange: the same kind of message to many members, and what they answered in time."""

    def exchange(self, kind: Exchange, asks: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Answers by member; who did not answer, or answered with an error, is not among them."""

    def present(self) -> Sequence[str]:
        """Members that have joined and can be reached, as far as is known."""


@dataclass(eq=False)
class Coordinator:
    """Runs the rounds.

    Args:
        books: where all of it is written.
        pool: the test pool.
        transport: carries bytes to members.
        evaluate: per-sample utilities of a model; None where the server cannot evaluate.
    """

    books: Books
    pool: Pool
    transport: Transport
    evaluate: Evaluate | None
    refused: list[str] = field(default_factory=list)  # what was refused and why, for whoever asks
    _handed: dict[str, bytes] = field(default_factory=dict)  # digests of members' run configs
    _early: tuple[Server, int] | None = None  # keys that came with the last reports, and their round

    @property
    def config(self) -> Config:
        return self.books.config

    def ask(self, kind: Exchange, number: int, body: Mapping[str, Any]) -> bytes:
        """A message of this run."""
        return Ask(kind, self.books.run, number, body).pack(self.books.key.sign)

    def invitation(self) -> bytes:
        """What a member is asked to sign before anything else."""
        server = public_key(self.books.key)
        terms, commitment = dict(self.books.terms), dict(self.books.commitment)
        return self.ask("join", 0, {"terms": terms, "commitment": commitment, "server": server})

    def admit(self, address: str, answer: bytes) -> str:
        """The member at an address, if it proves to be one; the run's ledger then says so."""
        if len(answer) > ANSWER:
            raise MessageError(
                f"the node at {address} answers an invitation with {len(answer)} bytes", stage="join"
            )
        match unpack(answer, "an answer to an invitation", values=4):
            case [str(name), bytes(signature), bytes(handed)] if name in self.config.clients:
                if self.books.joined(name, address, handed, signature):
                    self._handed[name] = handed
                    return name
                raise BindingError("its signature is not that of the roster's key", stage="join", member=name)
        raise MessageError(f"the node at {address} is not a member of the roster", stage="join")

    def run_config(self, members: Sequence[str]) -> bytes:
        """Digest of the run config that most of these members were handed; nobody else can be summed.

        It reaches members by another way than our messages, and they compare it with each other.
        """
        counted = Counter(self._handed[name] for name in sorted(members))
        most = counted.most_common(1)[0][0]
        for name in members:
            if self._handed[name] != most:
                self.note(f"{name} was handed another run config than most: it cannot be summed")
        return most

    # ----------------------------------------------------------------------------------------------- a round

    def round(self, number: int, m0: Model, members: Sequence[str], extra: bytes = b"") -> Model | None:
        """Train, sum, evaluate, record; M, or None where the round was aborted.

        Args:
            number: from 1.
            m0: the model that the train messages carry.
            members: the schedule, in the order of the config.
            extra: digest of what else the train messages carry, the same for all.
        """
        scheduled = tuple(name for name in self.config.clients if name in members)
        head, found = self.books.head, Round(number, scheduled)
        public = self._weights(scheduled)
        self.books.schedule(number, scheduled, public)
        try:
            server = self._server(number, scheduled)
            encoding, _ = scheduled_encoding(self.config, m0.size, scheduled)
            weights = None if public is None else tuple(public[name] for name in scheduled)
            server.begin(Task(bytes.fromhex(model_hash(m0)), encoding, weights, extra))
            self._sum(server, number, found)
        except FedmeritError as error:
            found.aborted, found.included = str(error), ()
            self.note(f"round {number} aborted, the model is unchanged: {error}")
            self.books.close(found, m0, None, None)
            return None
        assert server.result is not None
        model = moved(m0, server.result.weighted_sum, server.result.total_weight)
        outcome = Outcome(
            number,
            model,
            server.result.total_weight,
            server.result.included,
            self.pool.slice(number),
            model_hash(m0),
            head,
        )
        found.included = outcome.included
        self._reports(found, outcome, self._there(server))
        self.books.close(found, model, outcome, self._measured(m0, outcome))
        log.info(
            "round %d: %d scheduled, %d summed, %d reported",
            *(number, len(scheduled), len(found.included), len(found.reports)),
        )
        for name in disagreeing(found):
            self.note(f"round {number}: {name} measured another v(M0) or v(M) than the round is scored with")
        return model

    def _weights(self, scheduled: Sequence[str]) -> dict[str, float] | None:
        if not are_public(self.config):
            return None
        everybody = roster_weights(self.config)
        return {name: everybody[name] for name in scheduled}

    def _setting(self, number: int, scheduled: Sequence[str]) -> Setting:
        return self.books.agreed.setting(self.books.run, number, scheduled, self.books.roster)

    def _server(self, number: int, scheduled: tuple[str, ...]) -> Server:
        """The state machine of a round, with everybody's keys: those that came early, or asked for now."""
        early, self._early = self._early, None
        if early is not None and early[1] == number and early[0].setting.members == scheduled:
            return early[0]
        server = Server(self._setting(number, scheduled))
        body = {"members": list(scheduled)}
        for name, answer in self._exchange("advertise", number, dict.fromkeys(scheduled, body)).items():
            self._receive(server, name, answer)
        return server

    def _sum(self, server: Server, number: int, found: Round) -> None:
        """The stages after the keys; the hashes of the masked inputs are recorded before any unmasking."""
        try:
            shown = server.advance()
            for stage in server.setting.stages[1:]:
                kind = _KIND[stage]
                asks = {name: {"list": broadcast} for name, broadcast in shown.items()}
                for name, answer in self._exchange(kind, number, asks).items():
                    self._receive(server, name, answer)
                if stage == "masked":
                    heads = server.heads["masked"]
                    self.books.masked(number, {n: bytes(h.body[2]).hex() for n, h in heads.items()})
                shown = server.advance()
        finally:
            found.declined = tuple(server.declined)
            if found.declined:
                self.note(f"round {number}: declined: {', '.join(found.declined)}; their own logs say why")

    def _there(self, server: Server) -> list[str]:
        """Who is in the sum and was heard at the end of it."""
        assert server.result is not None
        return [name for name in server.result.included if name in server.heads["unmask"]]

    # -------------------------------------------------------------------------------------------- its reports

    def _reports(self, found: Round, outcome: Outcome, there: Sequence[str]) -> None:
        """Ask who is left for a report, and for the keys of the next round while at it."""
        number = found.number
        present = set(self.transport.present())
        following: list[str] = []
        if number < self.config.training.rounds:
            following = [name for name in self.config.clients if name in present]
        server = None
        if len(following) >= least_scheduled(self.config):
            server = Server(self._setting(number + 1, following))
        body = pack_outcome(outcome, following if server else [])
        asks: dict[str, Mapping[str, Any]] = dict.fromkeys(there, body)
        for name, answer in self._exchange("report", number, asks).items():
            try:
                report, signature, keys = self._opened(name, answer)
                accept(report, outcome, list(self.config.scoring.utilities))
                check_numbers(report)
                if not self.books.take(report, signature):
                    raise BindingError("its report is not signed by it", stage="report", member=name)
            except Exception as error:  # whatever a member made up costs that member its report
                self._refuse(number, error)
                continue
            found.reports[name] = report
            if server and keys:
                self._receive(server, name, keys)
        found.reports = {name: found.reports[name] for name in found.included if name in found.reports}
        if server is None:
            return
        others = {name: {"members": following} for name in following if name not in asks}
        for name, answer in self._exchange("advertise", number + 1, others).items():
            self._receive(server, name, answer)
        if set(following) <= {*server.heads["advertise"]}:
            self._early = server, number + 1

    def _opened(self, name: str, answer: bytes) -> tuple[Report, bytes, bytes]:
        utilities = self.config.scoring.utilities  # a name takes up to 12 bytes a character as JSON
        limit = ANSWER + sum(ANSWER + 12 * len(utility) for utility in utilities)
        limit += head_limit(len(self.config.clients))
        if len(answer) > limit:
            raise MessageError(
                f"a report has at most {limit} bytes, got {len(answer)}", stage="report", member=name
            )
        match unpack(answer, "an answer to a request for a report", values=4):
            case [bytes(body), bytes(signature), bytes(keys)]:
                try:
                    parsed = json.loads(body)
                except (ValueError, RecursionError):
                    raise MessageError("its report cannot be read", stage="report", member=name) from None
                return Report.from_body(name, parsed, run=self.books.run), signature, keys
        raise MessageError("not a report", stage="report", member=name)

    def _measured(self, m0: Model, outcome: Outcome) -> dict[str, dict[str, float]] | None:
        """v(M0) and v(M) of every utility by the server itself; None where it cannot evaluate."""
        if self.evaluate is None:
            return None
        try:
            before, after = (self.evaluate(model, outcome.slice) for model in (m0, outcome.model))
        except Exception as error:  # the user's own function: a run must not die of one model
            log.exception("the server could not evaluate")
            self.note(f"round {outcome.round}: the members' medians count, the server failed: {error}")
            return None
        return {name: {"empty": mean(before[name]), "grand": mean(after[name])} for name in before}

    def finish(self, model: Model) -> None:
        """Record the last model, and have everybody who is there sign the ledger's head."""
        present = self.transport.present()  # whoever comes back now joins before the end
        self.books.end(model)
        head, number = self.books.head, min(len(self.books.rounds), self.config.training.rounds)
        body = {"head": head}
        asks = dict.fromkeys(present, body)
        for name, signature in self._exchange("close", number, asks).items():
            if not self.books.seen(name, head, signature):
                self.note(f"{name} did not sign the ledger's head")

    # -------------------------------------------------------------------------------------------- inner parts

    def _exchange(
        self, kind: Exchange, number: int, bodies: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, bytes]:
        if not bodies:
            return {}
        packed: dict[int, bytes] = {}
        asks = {}
        for name, body in bodies.items():  # mostly one body for all: packed once
            asks[name] = packed.setdefault(id(body), b"") or self.ask(kind, number, body)
            packed[id(body)] = asks[name]
        return self.transport.exchange(kind, asks)

    def _receive(self, server: Server, name: str, answer: bytes) -> None:
        try:
            server.receive(answer, name)
        except ProtocolError as error:
            self._refuse(server.setting.round, error)

    def _refuse(self, number: int, error: Exception) -> None:
        self.note(f"round {number}: refused: {error}")

    def note(self, text: str) -> None:
        """Tell whoever watches, now and afterwards."""
        self.refused.append(text)
        log.warning("%s", text)
