"""A rehearsal: a federation whose members share one process, from its settings to its scores.

Coordinator, members, messages, terms and ledger are those of a run between machines. But one process holds
all keys, so only the code keeps members and server from seeing what they may not see.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedmerit.config import Config
from fedmerit.data.dataset import Dataset
from fedmerit.errors import StoreError
from fedmerit.identity import canonical
from fedmerit.ledger.chain import LEDGER, Ledger
from fedmerit.ledger.run import opening_of, replay
from fedmerit.notes import Note
from fedmerit.protocol import memory
from fedmerit.protocol.clearing import finish
from fedmerit.protocol.coordinator import Coordinator, Weights
from fedmerit.protocol.measurement import Evaluations
from fedmerit.protocol.messages import Signed, pack
from fedmerit.protocol.outcome import Model, Outcome, Round
from fedmerit.protocol.terms import EMBEDDED, SIMULATED, from_past, proposed
from fedmerit.scoring.sampling import as_error
from fedmerit.simulation.analysis import Phi, Truth
from fedmerit.simulation.direction import PathGradients
from fedmerit.simulation.setup import Federation, continued, prepare, read, resolve
from fedmerit.simulation.transport import Analysis, Identities, LocalTransport, Observer, Progress, Watch
from fedmerit.storage.recorder import Beside, LedgerRecorder
from fedmerit.storage.run_folder import (
    ARCHIVE,
    Folder,
    FolderArchive,
    check_usable,
    keep_pool_key,
    stored_pool_key,
)

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

    The folder is new or empty; with ``resume`` it holds a run of the same config, which goes on after the
    last round in the ledger. A ``pool_key`` is that of the run that this one repeats. For ``watch`` and
    ``observe``, see `Rehearsal`.
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
    """One run in one folder, which was opened with the same resolved config.

    Args:
        config: the resolved settings.
        folder: the run folder.
        watch: called with every step.
        observe: sees every byte that the server receives.
        dataset: the data, if it has been read.
        federation: made from both, if that is done; for a resumed run, with the pool key from its folder.
        evaluations: replace the federation's own, which all members share.
        truth: replaces the usual ground truth.
        phi: replaces the usual Aumann-Shapley scores, of all utilities that have a gradient.
        analyses: further ones that see every plain round.
        pool_key: of the run that this one repeats; a resumed run has its own.
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
        evaluations: Evaluations | None = None,
        truth: Truth | None = None,
        phi: Phi | None = None,
        analyses: Sequence[Analysis] = (),
        pool_key: bytes | None = None,
    ) -> None:
        self.folder, self.watch = folder, watch or (lambda _: None)
        started = len(folder.ledger) > 0
        if federation is None:  # wrong settings raise here
            key = stored_pool_key(folder.path) if started else pool_key or secrets.token_bytes(32)
            federation = prepare(config, pool_key=key, dataset=dataset)
        self.federation, self.config = federation, federation.config
        if not started:
            keep_pool_key(folder.path, federation.pool.key)
        for note in federation.notes:
            self._note(note)
        self.truth = truth
        if truth is None and self.config.scoring.truth:
            self.truth = Truth(federation, folder.path / "tables", partial(self._tell, "coalitions", None))
        self.phi = None
        if not self.config.settles:  # otherwise members state their scores
            if self.config.scoring.visibility == "all":  # a round's record is for everybody
                self.phi = phi or Phi(federation)
                self._notes_on_phi()
            else:
                self._note(Note("phi-private"))
        identities = Identities.of(self.config, folder.path / "keys", make=not started)
        self.recorder = self._recorder(identities, started=started)
        evaluations = evaluations or Evaluations(federation.evaluate)
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
            analyses=(*(analysis for analysis in (self.truth, self.phi) if analysis), *analyses),
            gradient=gradient,
            archive=archive,
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

    def _recorder(self, identities: Identities, *, started: bool) -> LedgerRecorder:
        text = self.config.to_toml()
        begun = replay(self.folder.ledger) if started else None
        terms = proposed(
            text, identities.roster, strategy="FedAvg", optimiser=False, evaluates="server", engine=EMBEDDED
        )
        return LedgerRecorder(
            self.folder,
            self.config,
            identities.roster,
            identities.server,
            begun.id if begun else secrets.token_hex(16),
            EMBEDDED,
            begun.first.terms if begun else terms,
            self.federation.pool.commitment,
            data=self.federation.fingerprint,
            rounds=list(begun.rounds) if begun else [],
            beside=self._beside,
            truth=self.truth.values if self.truth else None,
            resumed=begun,
        )

    def _restore(self) -> None:
        begun = self.recorder.resumed
        assert begun is not None
        for name in sorted(begun.joined):
            self.transport.states[name].put(memory.TERMS, self.recorder.agreed)
        self.transport.forget([len(self.recorder.rounds) + 1])  # a kill may have left it half done
        manifest = begun.settlement.manifest if begun.settlement else None
        if manifest is not None:
            text, shown = canonical(manifest.body()), self.federation.pool.settlement()
            for record in begun.records:
                if record.kind == "statement":  # about a manifest and a pool that its author was shown
                    state = self.transport.states[record.author]
                    state.put(memory.STATEMENT, pack(Signed(canonical(record.body), record.signature)))
                    state.put(memory.SETTLEMENT, memory.ShownManifest(manifest.digest, text))
                    state.put(memory.POOL, memory.ShownPool(shown.x, shown.y, shown.index))
        if not (rounds := self.recorder.rounds):
            return
        last = rounds[-1]
        self.model = self.recorder.model_after(last)
        before = self.recorder.model_after(rounds[-2]) if len(rounds) > 1 else self.federation.first
        memories = self.folder.load_checkpoint("members", last.number, last.body["members_checkpoint"])
        self.transport.restore(last, memories, before)

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
        new = [name for name, state in self.transport.states.items() if state.get(memory.TERMS) is None]
        asks = dict.fromkeys(new, self.coordinator.invitation()) if new else {}
        for _, answer in self.transport.exchange("join", asks) if asks else ():
            self.coordinator.admit("", answer)

    def _end(self) -> None:
        """Write the end record and collect all signatures under it, or those that a kill left missing."""
        begun = self.recorder.resumed
        if begun is None or begun.end is None:
            if self.config.settles:
                self._tell("settle", self.config.training.rounds)
            finish(self.coordinator, self.model)
            self._notes()
        else:
            missing = [name for name in self.federation.names if name not in begun.seen]
            if missing and self.recorder.key is not None:
                self.coordinator.seal(missing, begun.end.digest.hex())
        self._forget()

    def _forget(self) -> None:
        settled = self.recorder.recorded("settled")
        if not settled or settled[-1]["final"]:
            self.transport.forget(closed.number for closed in self.recorder.rounds)

    def _notes(self) -> None:
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

    def _beside(self, closed: Round, outcome: Outcome | None) -> Beside:
        """Return what only a rehearsal records of a round: members' memory, analyses."""
        analysis = self.transport.analysed(outcome) if outcome is not None else {}
        self.transport.end_round()
        memories, totals_on = self.transport.dump()
        fields: dict[str, Any] = {
            "members_checkpoint": self.folder.save_checkpoint("members", closed.number, memories),
            "totals_on": totals_on,
        }
        if self.phi is not None and outcome is not None:
            self._notes_on_phi()
            if recorded := self.phi.recorded(closed.number, self.config.scoring.utilities):
                fields["phi"] = recorded
        return Beside(fields, analysis or None)

    def _weights(self) -> Weights | None:
        """Return the function for weights from scores, which only a rehearsal has; None for other weights."""

        def past(number: int, m0: Model, scheduled: Sequence[str]) -> Mapping[str, float]:
            paid = self.config.scoring.utilities[0]
            reported = [closed.to_reports(paid) for closed in self.recorder.rounds]
            scored = [reports for reports in reported if reports is not None]
            return from_past(scored, self.federation.names, missing=self.config.payment.missing)

        return past if self.config.training.weights == "scores" else None

    # ------------------------------------------------------------------------------------------- progress

    def _summary(self) -> str:
        last, paid = self.recorder.rounds[-1], self.config.scoring.utilities[0]
        reports = last.to_reports(paid)
        if not self.config.reports and not last.aborted:
            return f"{len(last.included)} members summed"
        if reports is None:
            return last.aborted or "no reports"
        change = f"{paid} {reports.empty:.3f} -> {reports.grand:.3f}"
        before, after = (as_error(paid, value) for value in (reports.empty, reports.grand))
        if before is None or after is None:
            return change
        return f"{change}, {before[0]} {before[1]:.4g} -> {after[1]:.4g}"

    def _notes_on_phi(self) -> None:
        """Say which utilities have no Aumann-Shapley scores, and why, each once."""
        for note in self.phi.new_notes() if self.phi else ():
            self._note(note)

    def _note(self, text: str) -> None:
        self.watch(Progress("note", 0, self.config.training.rounds, text=text))

    def _tell(self, stage: Any, number: int | None, done: int = 0, total: int = 0) -> None:
        """Report a step of a round; None is the current one."""
        number = len(self.recorder.rounds) + 1 if number is None else number
        self.watch(Progress(stage, number, self.config.training.rounds, done, total))


# ------------------------------------------------------------------------------------------- the run folder


def check_engine(path: Path) -> None:
    """Raise `StoreError` if the folder holds a run of another engine, whose members' keys are not here."""
    file = path / LEDGER
    if not file.is_file():
        return
    with Ledger(file, read_only=True) as ledger:
        engine = opening_of(ledger)[0].engine if len(ledger) else EMBEDDED
    if engine != EMBEDDED:
        kind = "a Flower simulation" if engine == SIMULATED else "a run between machines"
        raise StoreError(
            f"{path}: cannot be resumed here: it holds {kind} (engine {engine!r}), which "
            "ends with its server. The rounds that were closed stay good (fedmerit verify, score, page, "
            "rewards); to train on, start a new run in a new folder from its last model "
            "(fedmerit.flower.last_model)"
        )
