"""The engine in one process: N members train, mask, evaluate and report; every round goes into the ledger.

It is a rehearsal of the real thing: the same state machines, the same messages, the same records, but one
process holds all keys. What a member or the server may not see is kept apart by the code, not by walls.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedmerit import __version__
from fedmerit.accumulate import accumulate
from fedmerit.config import Config
from fedmerit.errors import MissingExtra, ProtocolError, StoreError
from fedmerit.federation.aggregation import Aggregation
from fedmerit.federation.journal import Journal, Round, first_body, rounds_of, score_files, scores_document
from fedmerit.federation.local import LocalTraining
from fedmerit.federation.protocol import (
    Known,
    Member,
    Model,
    Outcome,
    PerSample,
    Report,
    accept,
    mean,
    model_hash,
)
from fedmerit.federation.reweighting import from_this_round
from fedmerit.federation.setup import Federation, losses, prepare, schedule
from fedmerit.federation.summing import Observer, Offer
from fedmerit.federation.truth import Truth
from fedmerit.ledger import SERVER, exact
from fedmerit.secagg.quantise import Encoding
from fedmerit.store import Folder, write

if TYPE_CHECKING:
    from fedmerit.federation.identities import Identities


@dataclass(frozen=True)
class Progress:
    """Told to whoever watches: a step of a round has begun or advanced."""

    stage: Literal["train", "sum", "evaluate", "coalitions", "retrain", "round", "note"]
    round: int
    rounds: int
    done: int = 0
    total: int = 0
    text: str = ""


Watch = Callable[[Progress], None]


def run(
    config: Config,
    path: Any,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    observe: Observer | None = None,
) -> dict[str, Any]:
    """Run a federation, or go on with one, and return the content of its ``scores.json``.

    Args:
        config: all settings.
        path: the run folder: new or empty, or with ``resume`` one that holds a run of the same config.
        resume: go on after the last round in the ledger.
        watch: told what happens.
        observe: sees every byte the server receives under secure aggregation.
    """
    with Folder(path, config, resume=resume) as folder:
        return Engine(config, folder, watch or (lambda _: None), observe).run()


class Engine:
    """One run in one folder."""

    def __init__(self, config: Config, folder: Folder, watch: Watch, observe: Observer | None = None) -> None:
        self.config, self.folder, self.watch = config, folder, watch
        self.identities: Identities | None = None
        started = len(folder.ledger) > 0
        if config.secure_aggregation.enabled:
            self.identities = _identities(folder, config, make=not started)
        self.journal = Journal(folder.ledger, self._sign)
        key = _pool_key(folder, fresh=not started)
        self.federation: Federation = prepare(config, pool_key=key)
        for note in self.federation.notes:
            self._note(note)
        self.run_id: str = first_body(folder.ledger, "run")["run"] if started else secrets.token_hex(16)
        self.local = LocalTraining(self.federation)
        self.truth = Truth(self.federation, folder.path / "tables") if config.scoring.truth else None
        self.aggregation = Aggregation(
            config, self.federation.clients, self.run_id, self.identities, observe, self._note
        )
        if started:
            self._check_same()
        else:
            self._begin()
        self.rounds: list[Round] = rounds_of(folder.ledger)
        self.members = {
            client.name: Member(
                client.name, self.federation.evaluate, self.federation.pool.commitment, config.scoring.game
            )
            for client in self.federation.clients
        }
        self.model = self._restore()

    # ----------------------------------------------------------------------------------------------- a run

    def run(self) -> dict[str, Any]:
        """All rounds that are not in the ledger yet."""
        total = self.config.training.rounds
        for number in range(len(self.rounds) + 1, total + 1):
            self._round(number)
            self.watch(Progress("round", number, total, done=number, total=total, text=self._summary()))
        if self.truth and "shapley" in self.config.scoring.truth:
            self.truth.retrain(lambda done, whole: self._tell("retrain", total, done, whole))
        return self._write_scores()

    def _begin(self) -> None:
        config, identities = self.config, self.identities
        keys = None if identities is None else {name: key.hex() for name, key in identities.public.items()}
        commitment = dict(self.federation.pool.commitment)
        with self.folder.ledger.transaction():
            self.journal.write(
                SERVER,
                "run",
                {
                    "run": self.run_id,
                    "version": __version__,
                    "engine": "embedded",
                    "config": config.to_toml(),
                    "config_hash": config.hash(),
                    "members": list(self.federation.names),
                    "keys": keys,
                    "m0": model_hash(self.federation.first),
                    "data": self.federation.fingerprint,
                    "analysis": config.analysis,
                },
            )
            self.journal.write(SERVER, "pool", commitment)

    def _check_same(self) -> None:
        """A resumed run must have the keys, the test pool, the data and the first model it started with."""
        run, pool = (first_body(self.folder.ledger, kind) for kind in ("run", "pool"))
        keys = None if self.identities is None else self.identities.public
        same = {
            "keys": run["keys"]
            == (None if keys is None else {name: key.hex() for name, key in keys.items()}),
            "test pool or its key": pool == dict(self.federation.pool.commitment),
            "training data": run["data"] == self.federation.fingerprint,
            "first model": run["m0"] == model_hash(self.federation.first),
        }
        for what, is_same in same.items():
            if not is_same:
                raise StoreError(
                    f"{self.folder.path}: cannot be resumed: the {what} changed since it started"
                )

    def _restore(self) -> Model:
        """Model and private states after the last round in the ledger."""
        first = self.federation.first
        if self.config.scoring.solo:
            self.local.solo = dict.fromkeys(self.federation.names, first)
        if not self.rounds:
            return first
        last = self.rounds[-1]
        model = self.folder.load_checkpoint("model", last.number, last.body["checkpoint"])["model"]
        if model_hash(model) != last.body["m"]:
            raise StoreError(f"{self.folder.path}: the checkpoint of round {last.number} is not its model")
        kept = self.folder.load_checkpoint("members", last.number, last.body["members_checkpoint"])
        for key, values in kept.items():
            kind, name, *rest = key.split("/")
            if kind == "solo":
                self.local.solo[name] = values
            elif kind == "totals":
                member = self.members[name]
                member.totals[rest[0]] = values
                member.totals_on = last.body["totals_on"]
        return model

    def _sign(self, author: str, message: bytes) -> bytes:
        return b"" if self.identities is None else self.identities.sign(author, message)

    # --------------------------------------------------------------------------------------------- a round

    def _round(self, number: int) -> None:
        scheduled = schedule(self.config, self.federation.names, number)
        lost = losses(self.config, number)
        weights = self.aggregation.public_weights(self.rounds)
        trained = self.local.train(
            number,
            scheduled,
            self.model,
            self._model_before,
            lambda done, total: self._tell("train", number, done, total),
        )
        while self.local.notes:
            self._note(self.local.notes.pop())
        if self.config.training.weights == "current-scores":
            score = self.config.training.weight_score
            weights = from_this_round(self.federation, number, self.model, trained, score)
        self._tell("sum", number)
        offers = self.aggregation.offers(number, self.model, scheduled, trained, weights)
        attempt, encoding, attempts = self.aggregation.sum(number, self.model, offers, lost)
        found = Round(number, scheduled, attempt.included, tuple(attempt.declined), aborted=attempt.aborted)
        before_model, outcome, looked = self.model, None, None
        reports: list[Report] = []
        values: tuple[PerSample, PerSample, PerSample | None] | None = None
        if attempt.weighted_sum is not None:
            change = attempt.weighted_sum / attempt.total_weight
            self.model = (before_model.astype(np.float64) + change).astype(np.float32)
            outcome = Outcome(
                number,
                self.model,
                attempt.total_weight,
                attempt.included,
                self.federation.pool.slice(number),
                model_hash(before_model),
            )
            values, reports = self._evaluate(number, before_model, outcome, offers, encoding, lost)
            if self.truth and "mr-shapley" in self.config.scoring.truth and encoding is not None:
                looked = self.truth.after_round(
                    before_model,
                    outcome,
                    offers,
                    encoding,
                    lambda done, total: self._tell("coalitions", number, done, total),
                )
        self._close(found, attempts, outcome, values, reports, weights, looked)

    def _model_before(self) -> Model:
        """The global model of one round earlier."""
        if len(self.rounds) < 2:
            return self.federation.first
        before = self.rounds[-2]
        model: Model = self.folder.load_checkpoint("model", before.number, before.body["checkpoint"])["model"]
        return model

    def _evaluate(
        self,
        number: int,
        before_model: Model,
        outcome: Outcome,
        offers: Sequence[Offer],
        encoding: Encoding | None,
        lost: Mapping[str, str],
    ) -> tuple[tuple[PerSample, PerSample, PerSample | None], list[Report]]:
        """The server's two evaluations, and two by every member that is still there."""
        assert encoding is not None
        federation = self.federation
        self._tell("evaluate", number, 0, len(outcome.included))
        before = federation.evaluate(before_model, outcome.slice)
        after = federation.evaluate(outcome.model, outcome.slice)
        first = federation.evaluate(federation.first, outcome.slice) if self.local.solo else None
        outcome.slice.verify(federation.pool.commitment, number)
        known = Known(outcome.m0_hash, before, after)
        reports = []
        offered = {offer.name: offer for offer in offers}
        for done, name in enumerate(outcome.included, start=1):
            if name in lost:
                continue  # it was summed and then lost: it stays silent
            offer = offered[name]
            report = self.members[name].report(
                before_model,
                outcome,
                offer.contribution(encoding),
                1.0 if offer.weight is None else float(offer.weight),
                known=known,
                solo=self.local.solo.get(name),
            )
            try:
                accept(report, outcome, [utility.name for utility in federation.utilities])
            except ProtocolError as error:
                self._note(f"report refused: {error}")
                continue
            reports.append(report)
            self._tell("evaluate", number, done, len(outcome.included))
        for report in reports:  # every member sees the others' signed reports and stops where they differ
            self.members[report.client].compare(report, reports)
        return (before, after, first), reports

    def _close(
        self,
        found: Round,
        attempts: Sequence[Mapping[str, Any]],
        outcome: Outcome | None,
        values: tuple[PerSample, PerSample, PerSample | None] | None,
        reports: Sequence[Report],
        weights: Mapping[str, float] | None,
        looked: Mapping[str, Any] | None,
    ) -> None:
        """Checkpoint first, then all records of the round in one transaction, then the score files."""
        number, folder = found.number, self.folder
        reporters = {report.client for report in reports}
        found.silent = () if outcome is None else tuple(n for n in found.included if n not in reporters)
        found.included = () if outcome is None else found.included
        utilities: dict[str, dict[str, str]] = {}
        if values is not None:
            for utility in self.federation.utilities:
                named = zip(("empty", "grand", "first"), values, strict=True)
                utilities[utility.name] = {
                    key: exact(mean(one[utility.name])) for key, one in named if one is not None
                }
        samples = None
        if self.config.scoring.disclose_samples:
            samples = {client.name: len(client.y) for client in self.federation.clients}
        found.body = {
            "round": number,
            "included": list(found.included),
            "declined": list(found.declined),
            "silent": list(found.silent),
            "aborted": found.aborted,
            "m": model_hash(self.model),
            "slice": outcome.slice.id if outcome else None,
            "utilities": utilities,
            "samples": samples,
            "checkpoint": folder.save_checkpoint("model", number, {"model": self.model}),
            "members_checkpoint": folder.save_checkpoint("members", number, self._private()),
            "totals_on": next((m.totals_on for m in self.members.values() if m.totals_on), ""),
        }
        public = None if weights is None else {name: exact(weight) for name, weight in weights.items()}
        write_ = self.journal.write
        with folder.ledger.transaction():
            write_(SERVER, "schedule", {"round": number, "members": list(found.scheduled), "weights": public})
            write_(SERVER, "masked", {"round": number, "attempts": list(attempts)})
            if outcome is not None:
                write_(SERVER, "outcome", {"round": number, **outcome.bound_to})
            for report in reports:
                write_(report.client, "report", report.body(self.run_id))
                found.reports[report.client] = report
            if looked is not None:
                write_(SERVER, "analysis", {"round": number, **looked})
            write_(SERVER, "round", found.body)
            write_(SERVER, "scores", {"round": number, **self._scores_body([*self.rounds, found])})
        self.rounds.append(found)
        folder.drop_checkpoints(keep=number - 1)
        self._write_scores()
        if found.aborted:
            self._note(f"round {number} aborted, model unchanged: {found.aborted}")
        for name in found.declined:
            self._note(f"round {number}: {name} declined and is not in the sum")

    def _private(self) -> dict[str, np.ndarray[Any, Any]]:
        """What members keep between rounds."""
        kept: dict[str, np.ndarray[Any, Any]] = {
            f"solo/{name}": model for name, model in self.local.solo.items()
        }
        for member in self.members.values():
            kept |= {f"totals/{member.name}/{name}": values for name, values in member.totals.items()}
        return kept

    def _scores_body(self, rounds: Sequence[Round]) -> dict[str, Any]:
        """Cumulative alpha after this round, as the server states it."""
        stated: dict[str, Any] = {}
        for utility in self.config.scoring.utilities:
            scored = [reports for one in rounds if (reports := one.to_reports(utility)) is not None]
            if scored:
                total = accumulate(scored, missing=self.config.scoring.missing)
                pairs = zip(total.clients, total.values.tolist(), strict=True)
                stated[utility] = {name: exact(value) for name, value in pairs}
        return {"cumulative_alpha": stated}

    def _write_scores(self) -> dict[str, Any]:
        scoring = self.config.scoring
        scored = [one.number for one in self.rounds if one.included]
        content = scores_document(
            self.rounds,
            self.federation.names,
            scoring.utilities,
            missing=scoring.missing,
            truth=self.truth.values(scored) if self.truth else None,
            analysis=self.config.analysis,
        )
        for name, data in score_files(content):
            write(self.folder.path / name, data)
        return content

    def _summary(self) -> str:
        last, paid = self.rounds[-1], self.config.scoring.utilities[0]
        reports = last.to_reports(paid)
        if reports is None:
            return last.aborted or "no reports"
        return f"{paid} {reports.empty:.3f} -> {reports.grand:.3f}"

    def _note(self, text: str) -> None:
        self.watch(Progress("note", 0, self.config.training.rounds, text=text))

    def _tell(self, stage: Any, number: int, done: int = 0, total: int = 0, text: str = "") -> None:
        self.watch(Progress(stage, number, self.config.training.rounds, done, total, text))


def _identities(folder: Folder, config: Config, *, make: bool) -> Identities:
    try:
        from fedmerit.federation.identities import Identities
    except ImportError as error:
        raise MissingExtra(
            "secure aggregation needs the packages cryptography and pycryptodome; "
            "or set secure_aggregation.enabled = false"
        ) from error
    return Identities.in_folder(folder.path / "keys", config.clients, make=make)


def _pool_key(folder: Folder, *, fresh: bool) -> bytes:
    """The secret behind the pool's salts: made once, kept with mode 600."""
    path = folder.path / "keys" / "pool.key"
    if fresh and not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write(path, secrets.token_bytes(32), mode=0o600)
    try:
        key = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: the key of the test pool is gone: {error}") from error
    if len(key) != 32:
        raise StoreError(f"{path}: damaged: expected 32 bytes, got {len(key)}")
    return key
