"""What a coordinator writes: the records of a run, a checkpoint per round, and the score files.

Between machines, a round may be cut short. So the schedule is in the ledger before any member is asked for
its update, and the hashes of the masked inputs before any member is asked for a share: a server that is
killed, or tries twice, leaves a trace. A rehearsal can be resumed and repeats a round that was cut short, so
it writes each round in one transaction. Reports carry their authors' signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedmerit.config import VERSION, Config
from fedmerit.errors import StoreError
from fedmerit.identity import SERVER, Roster, content, exact, public_key
from fedmerit.ledger.account import account_of, block_of
from fedmerit.ledger.records import (
    Journal,
    after_round,
    closing,
    first_body,
    medians,
    score_files,
    scores_document,
)
from fedmerit.protocol.messages import join_body
from fedmerit.protocol.outcome import Model, Outcome, Report, Round, model_hash
from fedmerit.protocol.settlement import countersignature
from fedmerit.protocol.terms import EMBEDDED, Agreed
from fedmerit.secagg.messages import Blame

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedmerit.storage.run_folder import Folder


@dataclass(frozen=True)
class Beside:
    """What a rehearsal adds to the records of a round: fields of the closing record, and an analysis."""

    fields: Mapping[str, Any]
    analysis: Mapping[str, Any] | None = None


@dataclass(eq=False)
class LedgerRecorder:
    """The ledger, the model's checkpoints and the score files of one run: a `protocol.coordinator.Recorder`.

    Args:
        folder: the run folder.
        config: of the run.
        roster: the public keys of all members.
        key: the server's private key; None in a rehearsal without masks, whose ledger is unsigned.
        run: identifier of the run.
        engine: name of the engine that carries its messages.
        terms: what members agree to.
        commitment: of the test pool.
        data: fingerprint of a rehearsal's training data.
        rounds: the rounds closed so far.
        beside: (round, outcome) -> what a rehearsal adds to the records of the round.
        truth: numbers of rounds with a sum -> ground truth over them; only in a rehearsal.
    """

    folder: Folder
    config: Config
    roster: Roster
    key: Ed25519PrivateKey | None
    run: str
    engine: str
    terms: Mapping[str, Any]
    commitment: Mapping[str, Any]
    data: str | None = None
    rounds: list[Round] = field(default_factory=list)
    beside: Callable[[Round, Outcome | None], Beside] | None = None
    truth: Callable[[Sequence[int]], Mapping[str, Any]] | None = None
    older: bool = False  # whether a version without joins in rehearsals began this ledger
    _signatures: dict[bytes, bytes] = field(default_factory=dict)
    _masked: int = 0  # the last round with a record of its masked inputs
    _pending: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)  # of a rehearsal's round

    @cached_property
    def agreed(self) -> Agreed:
        """What members sign when they join."""
        return Agreed(self.terms, self.commitment, self.server)

    @cached_property
    def server(self) -> bytes:
        """The server's public key; empty if nothing is signed."""
        return b"" if self.key is None else public_key(self.key)

    @property
    def head(self) -> str:
        """The current head of the ledger."""
        return self.folder.ledger.head

    def sign(self, message: bytes) -> bytes:
        """Sign a message with the server's key; return empty bytes if there is none."""
        return b"" if self.key is None else self.key.sign(message)

    # ----------------------------------------------------------------------------------------- start and end

    def begin(self, first: Model) -> None:
        """Write the first records: settings, keys, first model, and the test pool's commitment."""
        with self.folder.ledger.transaction():
            self._write(
                SERVER,
                "run",
                {
                    "run": self.run,
                    "version": VERSION,
                    "engine": self.engine,
                    "config": self.terms["config"],
                    "config_hash": self.terms["config_hash"],
                    "terms": dict(self.terms),
                    "members": list(self.config.clients),
                    "keys": self._keys,
                    "m0": model_hash(first),
                    "data": self.data,
                    "analysis": self.config.analysis,
                },
            )
            self._write(SERVER, "pool", self.commitment)

    def check_same(self, first: Model) -> None:
        """Raise StoreError if keys, test pool, data or first model have changed since the run started."""
        run, pool = (first_body(self.folder.ledger, kind) for kind in ("run", "pool"))
        same = {
            "keys": run["keys"] == self._keys,
            "test pool or its key": pool == dict(self.commitment),
            "training data": run["data"] == self.data,
            "first model": run["m0"] == model_hash(first),
        }
        for what, is_same in same.items():
            if not is_same:
                raise StoreError(
                    f"{self.folder.path}: cannot be resumed: the {what} changed since it started"
                )

    @property
    def _keys(self) -> dict[str, str] | None:
        if self.key is None:
            return None
        return {SERVER: self.server.hex()} | {one.name: one.key.hex() for one in self.roster.members}

    def joined(self, name: str, address: str, run_config: bytes, signature: bytes) -> bool:
        """Record a join if the member signed for address, run config and terms; return whether it did."""
        terms = (self.terms, self.commitment, self.server)
        body = join_body(self.run, address, *terms, run_config=run_config)
        if not self._verifies(name, signature, content(name, "join", body)):
            return False
        if not self.older:
            with self.folder.ledger.transaction():
                self._write(name, "join", body, signature)
        return True

    def verifies(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> bool:
        """Return whether a member signed this; nothing is recorded."""
        return self._verifies(name, signature, content(name, kind, body))

    def said(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> bool:
        """Record what a member signed, once; return whether it did sign it."""
        if not self.verifies(name, kind, body, signature):
            return False
        if (name, dict(body)) not in [(author, found) for author, found, _ in self.signed(kind)]:
            with self.folder.ledger.transaction():
                self._write(name, kind, body, signature)
        return True

    def state(
        self, kind: str, body: Mapping[str, Any], countersigned: Mapping[str, bytes] | None = None
    ) -> None:
        """Record what the server states about the settlement, unless it is its last word of this kind.

        With ``countersigned``, members' signatures under it are recorded in the same step.
        """
        if [*self.recorded(kind)][-1:] != [dict(body)]:
            with self.folder.ledger.transaction():
                self._write(SERVER, kind, body)
                for name, signature in (countersigned or {}).items():
                    self._write(name, "countersigned", countersignature(self.run, body), signature)
            if kind == "settled":
                self.write_scores()

    def recorded(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Return the bodies of all records of a kind, in order."""
        return [record.body for record in self.folder.ledger.records(kind)]

    def signed(self, kind: str) -> Sequence[tuple[str, Mapping[str, Any], bytes]]:
        """Return author, body and signature of all records of a kind, in order."""
        found = self.folder.ledger.records(kind)
        return [(record.author, dict(record.body), record.signature) for record in found]

    def end(self, model: Model) -> None:
        """Record the end of the run, and the model it ended with."""
        with self.folder.ledger.transaction():
            self._write(SERVER, "end", {"rounds": len(self.rounds), "model": model_hash(model)})

    def seen(self, name: str, head: str, signature: bytes) -> bool:
        """Record that a member has seen this head of the ledger, if it signed it; return whether it did."""
        body = {"run": self.run, "round": len(self.rounds), "head": head}
        if not self._verifies(name, signature, content(name, "seen", body)):
            return False
        if self.key is not None:  # without a signature it would prove nothing
            with self.folder.ledger.transaction():
                self._write(name, "seen", body, signature)
        return True

    def cut_off(self) -> tuple[Round, str] | None:
        """Return a round that was begun and never closed, and the head before it; None if there is none.

        Whoever has a masked input on record counts as included.
        """
        found, head, last = None, "", ""
        for record in self.folder.ledger.records():
            body = record.body
            if record.kind == "schedule":
                found, head = Round(body["round"], tuple(body["members"])), last
            elif record.kind == "masked" and found is not None:
                self._masked = found.number
                found.included = tuple(name for name in found.scheduled if name in body["inputs"])
            elif record.kind == "blame" and found is not None:
                found.blamed += (body["member"],)
            elif record.kind == "round":
                found = None
            last = record.digest.hex()
        return None if found is None else (found, head)

    # ----------------------------------------------------------------------------------------------- a round

    def schedule(self, number: int, members: Sequence[str], weights: Mapping[str, float] | None) -> None:
        """Record who takes part, and their weights if they are public; the first step of a round."""
        named = weights if self.older else members  # earlier rehearsals recorded the weights of all
        told = None if weights is None else {name: exact(weights[name]) for name in named or ()}
        self._pending.clear()
        self._soon("schedule", {"round": number, "members": list(members), "weights": told})

    def masked(self, number: int, inputs: Mapping[str, str]) -> None:
        """Record the hashes of the masked inputs, before any member is asked for a share."""
        self._soon("masked", {"round": number, "inputs": dict(inputs)})
        self._masked = number

    def blame(self, number: int, blame: Blame) -> None:
        """Record that a member broke the protocol, with the evidence; after the masked inputs."""
        what = {"member": blame.member, "by": blame.by, "why": blame.why}
        self._soon("blame", {"round": number, **what, "evidence": dict(blame.evidence)})

    def take(self, report: Report, signature: bytes) -> bool:
        """Keep a report's signature for its record; return whether its author made it."""
        message = content(report.client, "report", report.body(self.run))
        self._signatures[message] = signature
        return self._verifies(report.client, signature, message)

    def close(
        self,
        found: Round,
        model: Model,
        outcome: Outcome | None,
        utilities: Mapping[str, Mapping[str, float]] | None,
    ) -> None:
        """Record the end of a round: outcome, reports and the scores they give, in one transaction.

        Args:
            found: the round: who was scheduled, summed and heard.
            model: M, or the unchanged M0 if the round was aborted.
            outcome: what the members were told; None if the round was aborted.
            utilities: v(M0) and v(M) as the server measured them; None takes the members' medians.
        """
        number = found.number
        measured, evaluated = {}, "server"
        if outcome is not None and (found.reports or self.beside is not None):
            if utilities is None:
                evaluated, measured = "members", medians(found.reports.values())
            else:
                measured = {
                    name: {key: exact(value) for key, value in one.items()} for name, one in utilities.items()
                }
        beside = Beside({}) if self.beside is None else self.beside(found, outcome)
        found.body = {
            **closing(found, model, outcome),
            "utilities": measured,
            **({} if self.older else {"evaluated": evaluated}),
            "samples": None,
            "checkpoint": self.folder.save_checkpoint("model", number, {"model": model}),
            **beside.fields,
        }
        if self._masked != number:  # it was aborted before the masked inputs were recorded
            self._pending.append(("masked", {"round": number, "inputs": {}}))
        with self.folder.ledger.transaction():
            for kind, body in self._pending:
                self._write(SERVER, kind, body)
            if outcome is not None:
                self._write(SERVER, "outcome", {"round": number, **outcome.bound_to})
            for report in found.reports.values():
                self._write(report.client, "report", report.body(self.run))
            if beside.analysis is not None:
                self._write(SERVER, "analysis", {"round": number, **beside.analysis})
            self._write(SERVER, "round", found.body)
            for kind, body in after_round([*self.rounds, found], self.config):
                self._write(SERVER, kind, body)
        self.rounds.append(found)
        self._pending.clear()
        self._signatures.clear()
        self.folder.drop_checkpoints(keep=number - 1)
        self.write_scores()

    def write_scores(self) -> dict[str, Any]:
        """Write ``scores.json`` and ``scores.csv`` from the rounds so far; return what they hold."""
        scoring = self.config.scoring
        account = None
        if self.recorded("settled"):
            account = account_of(self.folder.ledger, self.rounds, self.config)
        document = scores_document(
            self.rounds,
            self.config.clients,
            scoring.utilities,
            missing=(missing := self.config.payment.missing),
            truth=self.truth([one.number for one in self.rounds if one.included]) if self.truth else None,
            analysis=self.config.analysis,
            settlement=None if account is None else block_of([account], self.config.clients, missing),
            settled=not self.config.reports,
        )
        for name, data in score_files(document):
            self.folder.write(name, data)
        return document

    def model_after(self, one: Round) -> Model:
        """Return the global model after a round, from its checkpoint."""
        model: Model = self.folder.load_checkpoint("model", one.number, one.body["checkpoint"])["model"]
        if model_hash(model) != one.body["m"]:
            raise StoreError(f"{self.folder.path}: the checkpoint of round {one.number} is not its model")
        return model

    # --------------------------------------------------------------------------------------------- internals

    def _verifies(self, name: str, signature: bytes, message: bytes) -> bool:
        return self.key is None or self.roster.verifies(name, signature, message)

    def _soon(self, kind: str, body: Mapping[str, Any]) -> None:
        """Write a record of the server now or, in a rehearsal, with the rest of its round."""
        self._pending.append((kind, body))
        if self.engine != EMBEDDED:
            with self.folder.ledger.transaction():
                while self._pending:
                    self._write(SERVER, *self._pending.pop(0))

    def _write(self, author: str, kind: str, body: Mapping[str, Any], signature: bytes = b"") -> None:
        def sign(who: str, message: bytes) -> bytes:
            if who == SERVER or self.key is None:
                return self.sign(message)
            return signature or self._signatures[message]

        Journal(self.folder.ledger, sign).write(author, kind, body)
