"""The engine in one process: N members train, mask, evaluate and report; every round goes into the ledger.

It is a rehearsal of the real thing: the same state machines, the same messages, the same records, but one
process holds all keys. What a member or the server may not see is kept apart by the code, not by walls.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedmerit.config import Config
from fedmerit.errors import ProtocolError
from fedmerit.ledger.records import Round, first_body, rounds_of
from fedmerit.protocol.measure import Member
from fedmerit.protocol.messages import Known, Model, Outcome, Report, accept, model_hash, moved
from fedmerit.secagg.quantise import Encoding
from fedmerit.simulation.analysis import Truth, from_this_round
from fedmerit.simulation.data.dataset import Dataset
from fedmerit.simulation.recorder import (
    Books,
    Values,
    check_engine,
    identities_in,
    keep_pool_key,
    pool_key_in,
)
from fedmerit.simulation.setup import losses, prepare, read, resolve, schedule
from fedmerit.simulation.transport import Aggregation, LocalTraining, Observer, Offer
from fedmerit.storage.run_folder import Folder, check_usable


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
    check_usable(Path(path), resume=resume)
    if resume:
        check_engine(Path(path))
    dataset = read(config)
    config, _ = resolve(config, dataset)
    with Folder(path, config, resume=resume) as folder:
        engine = Engine(config, folder, watch or (lambda _: None), observe, dataset)
        del dataset  # members hold their own parts
        return engine.run()


class Engine:
    """One run in one folder."""

    def __init__(
        self,
        config: Config,
        folder: Folder,
        watch: Watch,
        observe: Observer | None = None,
        dataset: Dataset | None = None,
    ) -> None:
        """The folder was opened with the same, resolved config; ``dataset`` is its data, if that was read."""
        self.watch = watch
        started = len(folder.ledger) > 0
        pool_key = pool_key_in(folder) if started else secrets.token_bytes(32)
        # whatever is wrong with the settings shows here
        self.federation = prepare(config, pool_key=pool_key, dataset=dataset)
        config = self.config = self.federation.config
        if not started:
            keep_pool_key(folder, pool_key)
        secure = config.secure_aggregation.enabled
        identities = identities_in(folder, config, make=not started) if secure else None
        for note in self.federation.notes:
            self._note(note)
        run_id = first_body(folder.ledger, "run")["run"] if started else secrets.token_hex(16)
        self.books = Books(config, folder, self.federation, identities, run_id)
        self.local = LocalTraining(self.federation)
        self.truth = Truth(self.federation, folder.path / "tables") if config.scoring.truth else None
        self.aggregation = Aggregation(config, self.federation.clients, run_id, identities, observe)
        if started:
            self.books.check_same()
        else:
            self.books.begin()
        self.rounds: list[Round] = rounds_of(folder.ledger)
        commitment = self.federation.pool.commitment
        self.members = {
            name: Member(name, self.federation.evaluate, commitment, config.scoring.game)
            for name in self.federation.names
        }
        self.model = self.federation.first
        if config.scoring.solo:
            self.local.solo = dict.fromkeys(self.federation.names, self.federation.first)
        if self.rounds:
            self.model = self.books.model_after(self.rounds[-1])
            self.books.restore_members(self.rounds[-1], self.members, self.local.solo)

    # ----------------------------------------------------------------------------------------------- a run

    def run(self) -> dict[str, Any]:
        """All rounds that are not in the ledger yet."""
        total = self.config.training.rounds
        for number in range(len(self.rounds) + 1, total + 1):
            self._round(number)
            self.watch(Progress("round", number, total, done=number, total=total, text=self._summary()))
        if self.truth and "shapley" in self.config.scoring.truth:
            self.truth.retrain(lambda done, whole: self._tell("retrain", total, done, whole))
        self.books.end(self.model, len(self.rounds))
        return self._write_scores()

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
        attempt, encoding = self.aggregation.sum(number, self.model, offers, lost)
        found = Round(number, scheduled, attempt.included, tuple(attempt.declined), aborted=attempt.aborted)
        before_model, outcome, looked = self.model, None, None
        reports: list[Report] = []
        values: Values | None = None
        if attempt.weighted_sum is not None:
            self.model = moved(before_model, attempt.weighted_sum, attempt.total_weight)
            outcome = Outcome(
                number,
                self.model,
                attempt.total_weight,
                attempt.included,
                self.federation.pool.slice(number),
                model_hash(before_model),
                self.books.folder.ledger.head,
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
        self.books.close(
            found,
            self.rounds,
            model=self.model,
            members=self.members,
            solo=self.local.solo,
            masked=attempt.masked_hashes,
            outcome=outcome,
            values=values,
            reports=reports,
            weights=weights,
            looked=looked,
        )
        self.rounds.append(found)
        self.books.folder.drop_checkpoints(keep=number - 1)
        self._write_scores()
        if found.aborted:
            self._note(f"round {number} aborted, model unchanged: {found.aborted}")
        for (
            name,
            reason,
        ) in attempt.declined.items():  # to others than the rehearsal's owner it tells no reason
            self._note(f"round {number}: {name} declined and is not in the sum: {reason}")

    def _model_before(self) -> Model:
        """The global model of one round earlier."""
        return self.federation.first if len(self.rounds) < 2 else self.books.model_after(self.rounds[-2])

    def _evaluate(
        self,
        number: int,
        before_model: Model,
        outcome: Outcome,
        offers: Sequence[Offer],
        encoding: Encoding | None,
        lost: Mapping[str, str],
    ) -> tuple[Values, list[Report]]:
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
                encoding,
                public=self.aggregation.public_of(offers),
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

    def _write_scores(self) -> dict[str, Any]:
        scored = [one.number for one in self.rounds if one.included]
        truth = self.truth.values(scored) if self.truth else None
        return self.books.write_scores(self.rounds, truth)

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
