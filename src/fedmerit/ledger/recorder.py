"""What a coordinator writes: the same ledger and run folder as the engine in one process.

Unlike that engine it does not know how a round will end when it begins. So the schedule is in the ledger
before anybody is asked for keys, and the hashes of the masked inputs before anybody is asked for a share:
a server that is killed, or tries twice, leaves a trace. Reports carry the signatures their authors made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedmerit import __version__
from fedmerit.config import Config
from fedmerit.identity.encoding import SERVER, content, exact
from fedmerit.identity.keys import Roster, public_key
from fedmerit.ledger.records import Journal, Round, closing, medians, score_files, scores_document
from fedmerit.ledger.visibility import after_round
from fedmerit.protocol.messages import Model, Outcome, Report, join_body, model_hash
from fedmerit.protocol.terms import Agreed
from fedmerit.storage.run_folder import Folder, write

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(eq=False)
class Books:
    """The ledger, the model's checkpoints and the score files of one run between machines."""

    folder: Folder
    config: Config
    roster: Roster
    key: Ed25519PrivateKey
    run: str
    engine: str
    terms: Mapping[str, Any]
    commitment: Mapping[str, Any]
    rounds: list[Round] = field(default_factory=list)
    _signatures: dict[bytes, bytes] = field(default_factory=dict)
    _masked: int = 0  # the last round with a record of its masked inputs

    @cached_property
    def agreed(self) -> Agreed:
        """What members sign when they join."""
        return Agreed(self.terms, self.commitment, public_key(self.key))

    @property
    def head(self) -> str:
        """Of the ledger, as it is now."""
        return self.folder.ledger.head

    def begin(self, first: Model) -> None:
        """The first records: settings, keys, first model, the test pool's commitment."""
        keys = {SERVER: public_key(self.key).hex()}
        keys |= {member.name: member.key.hex() for member in self.roster.members}
        with self.folder.ledger.transaction():
            self._write(
                SERVER,
                "run",
                {
                    "run": self.run,
                    "version": __version__,
                    "engine": self.engine,
                    "config": self.terms["config"],
                    "config_hash": self.terms["config_hash"],
                    "terms": dict(self.terms),
                    "members": list(self.config.clients),
                    "keys": keys,
                    "m0": model_hash(first),
                    "data": None,
                    "analysis": False,
                },
            )
            self._write(SERVER, "pool", self.commitment)

    def joined(self, name: str, address: str, run_config: bytes, signature: bytes) -> bool:
        """Record that a member joined, if it signed for this address, this run config and these terms."""
        terms = (self.terms, self.commitment, public_key(self.key))
        body = join_body(self.run, address, *terms, run_config=run_config)
        if not self.roster.verifies(name, signature, content(name, "join", body)):
            return False
        with self.folder.ledger.transaction():
            self._write(name, "join", body, signature)
        return True

    # ----------------------------------------------------------------------------------------------- a round

    def schedule(self, number: int, members: Sequence[str], public: Mapping[str, float] | None) -> None:
        """Before anybody is asked for anything."""
        weights = None if public is None else {name: exact(weight) for name, weight in public.items()}
        with self.folder.ledger.transaction():
            self._write(SERVER, "schedule", {"round": number, "members": list(members), "weights": weights})

    def masked(self, number: int, inputs: Mapping[str, str]) -> None:
        """Before anybody is asked for a share."""
        with self.folder.ledger.transaction():
            self._write(SERVER, "masked", {"round": number, "inputs": dict(inputs)})
        self._masked = number

    def take(self, report: Report, signature: bytes) -> bool:
        """Keep a report's signature for its record; False if its author did not sign it."""
        message = content(report.client, "report", report.body(self.run))
        self._signatures[message] = signature
        return self.roster.verifies(report.client, signature, message)

    def close(
        self,
        found: Round,
        model: Model,
        outcome: Outcome | None,
        utilities: Mapping[str, Mapping[str, float]] | None,
    ) -> None:
        """The end of a round: outcome, reports, and what follows from them, in one transaction.

        Args:
            found: who was scheduled, summed, heard.
            model: M, or the unchanged M0 where the round was aborted.
            outcome: what the members were told.
            utilities: v(M0) and v(M) as the server measured them; None takes the members' medians.
        """
        number = found.number
        measured, evaluated = {}, "server"
        if found.reports and outcome is not None:
            if utilities is None:
                evaluated, measured = "members", medians(found.reports.values())
            else:
                measured = {
                    name: {key: exact(value) for key, value in one.items()} for name, one in utilities.items()
                }
        found.body = {
            **closing(found, model, outcome),
            "utilities": measured,
            "evaluated": evaluated,
            "samples": None,
            "checkpoint": self.folder.save_checkpoint("model", number, {"model": model}),
        }
        with self.folder.ledger.transaction():
            if self._masked != number:  # it was aborted before anybody had masked
                self._write(SERVER, "masked", {"round": number, "inputs": {}})
            if outcome is not None:
                self._write(SERVER, "outcome", {"round": number, **outcome.bound_to})
            for report in found.reports.values():
                self._write(report.client, "report", report.body(self.run))
            self._write(SERVER, "round", found.body)
            self.rounds.append(found)
            for kind, body in after_round(self.rounds, self.config.scoring):
                self._write(SERVER, kind, body)
        self._signatures.clear()
        self.folder.drop_checkpoints(keep=number - 1)
        self.write_scores()

    def end(self, model: Model) -> None:
        """The last record of the server: the model the run ended with."""
        with self.folder.ledger.transaction():
            self._write(SERVER, "end", {"rounds": len(self.rounds), "model": model_hash(model)})

    def seen(self, name: str, head: str, signature: bytes) -> bool:
        """Record that a member has seen the ledger up to this head, if it signed that."""
        body = {"run": self.run, "round": len(self.rounds), "head": head}
        if not self.roster.verifies(name, signature, content(name, "seen", body)):
            return False
        with self.folder.ledger.transaction():
            self._write(name, "seen", body, signature)
        return True

    def write_scores(self) -> dict[str, Any]:
        """``scores.json`` and ``scores.csv``, from the rounds so far."""
        scoring = self.config.scoring
        document = scores_document(
            self.rounds, self.config.clients, scoring.utilities, missing=scoring.missing
        )
        for name, data in score_files(document):
            write(self.folder.path / name, data)
        return document

    def _write(self, author: str, kind: str, body: Mapping[str, Any], signature: bytes = b"") -> None:
        def sign(who: str, message: bytes) -> bytes:
            if who == SERVER:
                return self.key.sign(message)
            return signature or self._signatures[message]

        Journal(self.folder.ledger, sign).write(author, kind, body)
