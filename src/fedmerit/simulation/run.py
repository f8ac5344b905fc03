"""A rehearsal: a federation whose members share one process, from its settings to its scores.

A rehearsal runs the real protocol over a local transport: the coordinator, the members, the messages, the
terms and the ledger are those of a run between machines. But one process holds all keys, so only the code
keeps members and server from seeing what they may not see.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmerit.config import Config
from fedmerit.data.dataset import Dataset
from fedmerit.errors import StoreError
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.recorder import Beside, LedgerRecorder
from fedmerit.ledger.records import first_body, rounds_of
from fedmerit.notes import Note
from fedmerit.protocol.coordinator import Coordinator, Weights
from fedmerit.protocol.outcome import Evaluations, Model, Outcome, Round
from fedmerit.protocol.terms import EMBEDDED, SIMULATED, from_past, proposed
from fedmerit.scoring.files import LEDGER
from fedmerit.scoring.metrics import as_error
from fedmerit.simulation.analysis import Phi, Truth, from_this_round
from fedmerit.simulation.contributions import DeviceEvaluations, Evaluate
from fedmerit.simulation.direction import PathGradients
from fedmerit.simulation.setup import Federation, continued, prepare, read, resolve
from fedmerit.simulation.transport import (
    Analysis,
    Identities,
    LocalTransport,
    Observer,
    Progress,
    Watch,
)
from fedmerit.storage.archive import ARCHIVE, FolderArchive
from fedmerit.storage.run_folder import Folder, check_usable, write

CurrentWeights = Callable[[int, Model, Mapping[str, Model]], Mapping[str, float]]
"""(round, M0, local models) -> weights of the members in this very round. Analysis only."""

__all__ = ["Progress", "Rehearsal", "Watch", "run"]


def run(
    config: Config,
    path: Any,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    observe: Observer | None = None,
    pool_key: bytes | None = None,
) -> dict[str, Any]:
    """Run or resume a federation and return the content of its ``scores.json``.

    Args:
        config: all settings.
        path: the run folder: new or empty, or with ``resume`` one that holds a run of the same config.
        resume: continue after the last round in the ledger.
        watch: called with every step.
        observe: sees every byte that the server receives.
        pool_key: of the run that this one repeats, so that both commit to the same pool and show the same
            fingerprint of the data; None makes a new one.
    """
    check_usable(Path(path), resume=resume)
    if resume:
        check_engine(Path(path))
        config = continued(config, Path(path))
    dataset = read(config)
    config, _ = resolve(config, dataset)
    with Folder(path, config, resume=resume) as folder:
        rehearsal = Rehearsal(config, folder, watch, observe=observe, dataset=dataset, pool_key=pool_key)
        del dataset  # members hold their own parts
        return rehearsal.run()


class Rehearsal:
    """One run in one folder.

    Args:
        config: the resolved settings with which the folder was opened.
        folder: the run folder.
        watch: called with every step.
        observe: sees every byte that the server receives.
        dataset: the data, if it has been read.
        federation: made from both, if that is done; for a resumed run, with the pool key from its folder.
        evaluate: replaces the federation's own evaluation.
        truth: replaces the usual ground truth.
        phi: replaces the usual Aumann-Shapley scores, of all utilities that have a gradient.
        analyses: further analyses that see every plain round.
        current_weights: returns members' weights from (round, M0, local models) if the settings ask for
            weights from current scores; None computes them from ``training.weight_score``.
        stacked: whether all members train at once; None does so on a GPU.
        pool_key: of the run that this one repeats; None makes a new one. A resumed run has its own.
    """

    def __init__(
        self,
        config: Config,
        folder: Folder,
        watch: Watch | None = None,
        *,
        observe: Observer | None = None,
        dataset: Dataset | None = None,
        federation: Federation | None = None,
        evaluate: Evaluate | None = None,
        truth: Truth | None = None,
        phi: Phi | None = None,
        analyses: Sequence[Analysis] = (),
        current_weights: CurrentWeights | None = None,
        stacked: bool | None = None,
        pool_key: bytes | None = None,
    ) -> None:
        self.folder, self.watch = folder, watch or (lambda _: None)
        started = len(folder.ledger) > 0
        if federation is None:  # wrong settings raise here
            key = pool_key_in(folder.path) if started else pool_key or secrets.token_bytes(32)
            federation = prepare(config, pool_key=key, dataset=dataset)
        self.federation, self.config = federation, federation.config
        if not started:
            keep_pool_key(folder, federation.pool.key)
        for note in federation.notes:
            self._note(note)
        self.truth = truth
        if truth is None and self.config.scoring.truth:
            self.truth = Truth(federation, folder.path / "tables", self._coalitions)
        self.phi = None if self.config.settles else self._phi(phi)
        self.evaluate = evaluate or federation.evaluate
        self.current_weights = current_weights or self._from_this_round
        identities = self._identities(make=not started)
        self.recorder = self._recorder(identities, started=started)
        evaluations = Evaluations(self.evaluate)
        if federation.device.type == "cuda":
            evaluations = DeviceEvaluations(self.evaluate, federation.device)
        gradient, archive = None, None
        if self.config.settles:
            gradient = PathGradients(federation.network, federation.utilities[0])
            archive = FolderArchive(folder.path / ARCHIVE)
        self.transport = LocalTransport(
            federation,
            identities,
            self.recorder.run,
            evaluations,
            self.watch,
            observe=observe,
            analyses=(*(one for one in (self.truth, self.phi) if one), *analyses),
            gradient=gradient,
            archive=archive,
            stacked=stacked,
        )
        self.coordinator = Coordinator(
            self.recorder,
            federation.pool,
            self.transport,
            evaluations,
            weights=self._weights(),
            first=federation.first if self.config.scoring.solo else None,
            rehearsal=True,
            gradient=gradient,
            archive=archive,
        )
        self.model = federation.first
        if started:
            self.recorder.check_same(federation.first)
            self._restore()
        else:
            self.recorder.begin(federation.first)

    def _phi(self, phi: Phi | None) -> Phi | None:
        """Return the analysis for Aumann-Shapley scores of rounds; members of a settled run state them."""
        if self.config.scoring.visibility != "all":  # a round's record is for everybody
            self._note(Note("phi-private"))
            return None
        found = phi or Phi(self.federation)
        self._without_phi(found)
        return found

    def _identities(self, *, make: bool) -> Identities:
        if not self.config.secure_aggregation.enabled:
            return Identities.none(self.config)
        return Identities.in_folder(self.folder.path / "keys", self.config, make=make)

    def _recorder(self, identities: Identities, *, started: bool) -> LedgerRecorder:
        text = self.config.to_toml()
        begun = first_body(self.folder.ledger, "run") if started else None
        terms = proposed(
            text, identities.roster, strategy="FedAvg", optimiser=False, evaluates="server", engine=EMBEDDED
        )
        return LedgerRecorder(
            self.folder,
            self.config,
            identities.roster,
            identities.server,
            begun["run"] if begun else secrets.token_hex(16),
            EMBEDDED,
            begun.get("terms", terms) if begun else terms,
            self.federation.pool.commitment,
            data=self.federation.fingerprint,
            rounds=rounds_of(self.folder.ledger) if started else [],
            beside=self._beside,
            truth=self.truth.values if self.truth else None,
            older=begun is not None and "terms" not in begun,
        )

    def _restore(self) -> None:
        """Restore the state after the last round in the ledger."""
        joined = {record.author for record in self.folder.ledger.records("join")}
        for name in self.federation.names if self.recorder.older else sorted(joined):
            self.transport.agree(name, self.recorder.agreed)
        self.transport.forget([len(self.recorder.rounds) + 1])  # a kill may have left it half done
        for record in self.folder.ledger.records("statement"):
            self.transport.restore_statement(record.author, record.body, record.signature)
        if not (rounds := self.recorder.rounds):
            return
        last = rounds[-1]
        self.model = self.recorder.model_after(last)
        before = self.recorder.model_after(rounds[-2]) if len(rounds) > 1 else self.federation.first
        kept = self.folder.load_checkpoint("members", last.number, last.body["members_checkpoint"])
        self.transport.restore(last, kept, before)

    # ----------------------------------------------------------------------------------------------- a run

    def run(self) -> dict[str, Any]:
        """Run all rounds that are not in the ledger yet, and return the scores."""
        total, closed = self.config.training.rounds, len(self.recorder.rounds)
        self.join()
        for number in range(closed + 1, total + 1):
            self.round(number)
        if self.truth and "shapley" in self.config.scoring.truth:
            self.truth.retrain(lambda done, whole: self._tell("retrain", total, done, whole))
        self._end()
        return self.recorder.write_scores()

    def join(self) -> None:
        """Let every member who has not joined yet agree to the terms."""
        new = [name for name in self.federation.names if not self.transport.has_agreed(name)]
        asks = dict.fromkeys(new, self.coordinator.invitation()) if new else {}
        for _, answer in self.transport.exchange("join", asks) if asks else ():
            self.coordinator.admit("", answer)

    def _end(self) -> None:
        """Write the end record and collect all signatures under it, or those that a kill left missing."""
        end = next(self.folder.ledger.records("end"), None)
        if end is None:
            if self.config.settles:
                self._tell("settle", self.config.training.rounds)
            self.coordinator.finish(self.model)
            self._notes()
            self._forget()
            return
        self._forget()
        signed = {record.author for record in self.folder.ledger.records("seen")}
        if self.recorder.key is not None and (missing := set(self.federation.names) - signed):
            self.coordinator.seal(
                [name for name in self.federation.names if name in missing], end.digest.hex()
            )

    def _forget(self) -> None:
        """Delete what members kept for the settlement, unless somebody may still state."""
        told = self.recorder.recorded("settled")
        if not told or told[-1]["final"]:
            self.transport.forget(one.number for one in self.recorder.rounds)

    def _notes(self) -> None:
        """Pass on what the server refused."""
        for text in self.coordinator.refused:
            self._note(text)
        self.coordinator.refused.clear()

    def round(self, number: int) -> None:
        """Run one round: train, sum, evaluate, record."""
        self.transport.begin_round(number, self.model)
        model = self.coordinator.round(number, self.model, self.transport.expected(number))
        self._notes()
        if model is not None:
            self.model = model
        total = self.config.training.rounds
        self.watch(Progress("round", number, total, done=number, total=total, text=self._summary()))

    def _beside(self, found: Round, outcome: Outcome | None) -> Beside:
        """Return what only a rehearsal records of a round: members' memory, sample counts, analyses."""
        analysis = self.transport.analysed(outcome) if outcome is not None else {}
        self.transport.end_round()
        kept, totals_on = self.transport.dump()
        samples = None
        if self.config.scoring.disclose_samples:
            samples = {client.name: len(client.y) for client in self.federation.clients}
        fields = {
            "samples": samples,
            "members_checkpoint": self.folder.save_checkpoint("members", found.number, kept),
            "totals_on": totals_on,
        }
        if self.phi is not None and outcome is not None and not self.recorder.older:
            self._without_phi(self.phi)
            if recorded := self.phi.recorded(found.number, self.config.scoring.utilities):
                fields["phi"] = recorded
        return Beside(fields, analysis or None)

    def _weights(self) -> Weights | None:
        """Return the function for weights from scores, which only a rehearsal has; None for other weights."""
        training, scoring = self.config.training, self.config.scoring

        def past(number: int, m0: Model, scheduled: Sequence[str]) -> Mapping[str, float]:
            found = [one.to_reports(scoring.utilities[0]) for one in self.recorder.rounds]
            scored = [reports for reports in found if reports is not None]
            names, score = self.federation.names, training.weight_score
            return from_past(scored, names, score=score, missing=self.config.payment.missing)

        def current(number: int, m0: Model, scheduled: Sequence[str]) -> Mapping[str, float]:
            return dict(self.current_weights(number, m0, self.transport.train(scheduled)))

        return {"scores": past, "current-scores": current}.get(training.weights)

    def _from_this_round(self, number: int, m0: Model, trained: Mapping[str, Model]) -> Mapping[str, float]:
        score = self.config.training.weight_score
        return from_this_round(self.federation, number, m0, trained, score, self.evaluate)

    # ------------------------------------------------------------------------------------------- progress

    def _summary(self) -> str:
        last, paid = self.recorder.rounds[-1], self.config.scoring.utilities[0]
        reports = last.to_reports(paid)
        if not self.config.reports and not last.aborted:
            return f"{len(last.included)} members summed"
        if reports is None:
            return last.aborted or "no reports"
        said = f"{paid} {reports.empty:.3f} -> {reports.grand:.3f}"
        scale = self.config.scoring.scale
        before, after = (as_error(paid, value, scale) for value in (reports.empty, reports.grand))
        if before is None or after is None:
            return said
        return f"{said}, {before[0]} {before[1]:.4g} -> {after[1]:.4g}"

    def _without_phi(self, phi: Phi) -> None:
        """Say which utilities have no Aumann-Shapley scores, and why, each once."""
        for note in phi.new_notes():
            self._note(note)

    def _note(self, text: str) -> None:
        self.watch(Progress("note", 0, self.config.training.rounds, text=text))

    def _tell(self, stage: Any, number: int, done: int = 0, total: int = 0) -> None:
        self.watch(Progress(stage, number, self.config.training.rounds, done, total))

    def _coalitions(self, done: int, total: int) -> None:
        self._tell("coalitions", len(self.recorder.rounds) + 1, done, total)


# ------------------------------------------------------------------------------------------- the run folder


def check_engine(path: Path) -> None:
    """Raise `StoreError` if the folder holds a run of another engine, whose members' keys are not here."""
    file = path / LEDGER
    if not file.is_file():
        return
    with Ledger(file, read_only=True) as ledger:
        engines = [record.body.get("engine") for record in ledger.records("run")]
    if engines and engines[0] != EMBEDDED:
        what = "a Flower simulation" if engines[0] == SIMULATED else "a run between machines"
        raise StoreError(
            f"{path}: cannot be resumed here: it holds {what} (engine {engines[0]!r}), which "
            "ends with its server. The rounds that were closed stay good (fedmerit verify, score, page, "
            "rewards); to train on, start a new run in a new folder from its last model "
            "(fedmerit.flower.last_model)"
        )


def keep_pool_key(folder: Folder, key: bytes) -> None:
    """Store the secret from which the pool's salts are derived, with mode 600."""
    path = folder.path / "keys" / "pool.key"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write(path, key, mode=0o600)


def pool_key_in(folder: Path) -> bytes:
    """Return the secret from which the pool's salts are derived, as stored when the run started."""
    path = folder / "keys" / "pool.key"
    try:
        key = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: the key of the test pool is gone: {error}") from error
    if len(key) != 32:
        raise StoreError(f"{path}: damaged: expected 32 bytes, got {len(key)}")
    return key
