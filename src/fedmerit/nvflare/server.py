"""The server of a job: it runs the rounds, or goes on with those of a job before it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nvflare.collab import collab

from fedmerit.carriers.folders import kinds_in
from fedmerit.carriers.folders import rehearsal as keys_in
from fedmerit.carriers.host import Host
from fedmerit.carriers.shape import Shape
from fedmerit.errors import ConfigError
from fedmerit.ledger.chain import LEDGER
from fedmerit.nvflare.site import JobTask
from fedmerit.nvflare.transport import CollabTransport
from fedmerit.protocol.hearing import finish
from fedmerit.protocol.outcome import Evaluations, Model
from fedmerit.protocol.terms import NVFLARE, NVFLARE_SIMULATED, least_scheduled
from fedmerit.report.page.html import page_of_run
from fedmerit.storage.recorder import LedgerRecorder
from fedmerit.storage.run_folder import Folder

log = logging.getLogger("fedmerit")


class Hub:
    """What a job runs on the server.

    Args:
        task: the name of the module with the task.
        num_rounds: how many rounds are trained.
        spare_rounds: how many more may be scheduled, in place of those that have no sum.
        options: arguments of `Host` that are numbers and texts, by name.
        rehearsal: the folder with everybody's key, instead of a roster.
        timeout: seconds for a member who trains or evaluates.
    """

    def __init__(
        self,
        task: str,
        num_rounds: int,
        options: dict[str, Any],
        rehearsal: str = "",
        timeout: float = 3600.0,
        spare_rounds: int = 0,
    ) -> None:
        self.task, self.num_rounds, self.options = task, num_rounds, options
        self.rehearsal, self.timeout, self.spare_rounds = rehearsal, timeout, spare_rounds

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> dict[str, Any]:
        """Run the job, and return the content of ``scores.json``."""
        names = sorted(client.name for client in collab.clients)
        options = dict(self.options)
        if self.rehearsal:
            options["roster"] = str(keys_in(self.rehearsal, names))
        return JobHost(JobTask(self.task), options, self.timeout).run(self.num_rounds, self.spare_rounds)


class JobHost(Host):
    """A run whose model is the plain average, round after round."""

    transport = CollabTransport

    def __init__(self, task: JobTask, options: Mapping[str, Any], timeout: float) -> None:
        test = None if task.test_set is None else task.test_set()
        super().__init__(test=test, value=task.value, gradient=task.gradient, **options)
        self.first, self.timeout, self.wanted = task.call("first_model"), timeout, 0

    def run(self, rounds: int, spare: int = 0) -> dict[str, Any]:
        """Run the rounds that are not over yet, settle, and return the scores."""
        self.wanted, rounds = rounds, rounds + spare
        shape = Shape.of(self.first)
        simulated = any("Simulator" in kind.__name__ for kind in type(collab.fl_ctx.get_engine()).__mro__)
        engine = NVFLARE_SIMULATED if simulated else NVFLARE
        transport = self.transport(
            shape=shape, patience=self.patience, join=self.join, timeout=self.timeout, total=rounds
        )
        begun = "schedule" in kinds_in(self.folder / LEDGER)[0]
        opened = self._again if begun else self._new
        with opened(engine, shape, rounds, transport) as recorder:
            model = self._taken_over(recorder, transport.coordinator, shape.vector) if begun else shape.vector
            self._go_on(recorder, transport, model, rounds)
        if self.page:
            log.info("%s", page_of_run(self.folder))
        return self.scores

    def _go_on(self, recorder: LedgerRecorder, transport: CollabTransport, model: Model, rounds: int) -> None:
        """Run the rounds that the ledger does not hold, and end the run."""
        coordinator, run = transport.coordinator, recorder.resumed
        least = least_scheduled(coordinator.config)
        if run is not None and run.end is not None:
            log.warning("%s: this run is over; another one needs another folder", self.folder.resolve())
            self.scores = recorder.write_scores()
            if coordinator.config.settles:
                self._check_settled(run)
            if not run.seen >= {*self.roster.names}:
                transport.gather(0)
                left = [name for name in transport.nodes if name not in run.seen]
                coordinator.seal(left, run.end.digest.hex())
            return
        transport.rounds = len(recorder.rounds)
        transport.gather(least)
        try:
            while transport.rounds < rounds and _summed(recorder) < self.wanted:
                transport.enough(least)
                after = transport.next_round(model)
                model = model if after is None else after
            try:
                transport.check_closed()
            finally:  # no round is left, so that the run is over in any case
                transport.awaited(coordinator.config.clients)
                finish(coordinator, model)
        finally:
            self.scores = recorder.write_scores()
        if not self._tell_unsettled(coordinator):
            log.info("ledger and scores: fedmerit score %s", self.folder.resolve())

    @contextmanager
    def _again(
        self, engine: str, shape: Shape, rounds: int, transport: CollabTransport
    ) -> Iterator[LedgerRecorder]:
        """Go on with the run in the folder, in which another job stopped."""
        config, run = self._begun(engine)
        if config.training.rounds != rounds:
            raise ConfigError(
                f"num_rounds: the run in {self.folder} has {config.training.rounds}, got {rounds}"
            )
        with Folder(self.folder, config, resume=True) as folder:
            recorder, pool = self._taken_up(folder, config, run)
            recorder.check_same(shape.vector)
            evaluate, slope = self._measures(config, shape)
            if slope is not None and (opened := self._opened(engine)):
                opened.check(pool.settlement(), recorder.run)
            self._coordinator(recorder, pool, transport, evaluate and Evaluations(evaluate), slope)
            yield recorder


def _summed(recorder: LedgerRecorder) -> int:
    """Return how many rounds have a sum."""
    return sum(not closed.aborted for closed in recorder.rounds)
