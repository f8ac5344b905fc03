"""The server's side: a wrapper around an averaging strategy.

::

    strategy = fedmerit.flower.Contributions(
        FedAvg(), roster="roster.toml", test=(images, labels), value=evaluate, gradient=slope,
        folder="runs/ours",
    )
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)

If the server of a settled run dies, the next one settles what was trained: ``strategy.settle(grid=grid,
initial_arrays=arrays)``, with the same arguments and folder.

Attributes of the wrapped strategy can be read through the wrapper: ``strategy.fraction_train``.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import numpy.typing as npt
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedmerit.carriers.folders import last_vector
from fedmerit.carriers.host import Host
from fedmerit.carriers.measures import Gradient, Value, check_slope, evaluator, slope_of
from fedmerit.config import check_schedule, of_folder
from fedmerit.errors import ConfigError, SettlementError
from fedmerit.flower.codec import RecordShape, log_inside_flower
from fedmerit.flower.grid import SecureGrid
from fedmerit.protocol.hearing import finish
from fedmerit.protocol.pool import Pool
from fedmerit.protocol.terms import FLOWER, SIMULATED, least_scheduled
from fedmerit.report.page.html import page_of_run
from fedmerit.storage.run_folder import ARCHIVE, Folder, FolderArchive

log = logging.getLogger("fedmerit")


class Contributions(Host):
    """Secure aggregation and contribution scores around a strategy that averages.

    Args:
        strategy: FedAvg, FedProx or one with a server optimiser (scores are taken before the optimiser acts).
        roster: the file of everybody's public keys.
        test: samples and labels on which all members are measured; the server commits to them before round 1.
            Without them, members judge each other in a panel, each on data of its own (``held_out`` of
            `secure`), and neither value nor gradient is needed here.
        value: the members' function that measures how good a model is. None if the server cannot evaluate:
            v(M0) and v(M) are then the medians of what the members measured.
        folder: where ledger, scores, notes and the server's key go; new, empty, or left by a start that too
            few members joined.
        gradient: the members' function that returns the mean of the paid utility and its gradient (see
            `secure`). A settled run needs it.
        config: settings as sections or as a TOML file: those of ``SETTINGS``. By default
            ``scoring.method`` is "settled" if there is a gradient, ``scoring.utilities`` are those that
            `torch_scoring` was given, or else "value", and ``training.weights`` are "secret".
        patience: seconds to wait for an answer that needs neither training nor evaluation; for those two,
            ``timeout`` of `start` applies.
        join: seconds to wait at the start for all members of the roster, later for enough of them, and at a
            settlement for those who are away.
        page: write page.html into the folder at the end, if the packages it needs are installed.
        server_key: the file of the server's private key; by default ``server.pem`` beside the roster file. A
            simulation whose roster names no server makes a key of its own.
    """

    defers = True  # Flower starts a process for every message

    def __init__(
        self,
        strategy: Strategy,
        *,
        roster: str | Path,
        folder: str | Path,
        test: tuple[npt.ArrayLike, npt.ArrayLike] | Pool | None = None,
        value: Value | None = None,
        gradient: Gradient | None = None,
        config: Mapping[str, Mapping[str, Any]] | str | Path | None = None,
        patience: float = 120.0,
        join: float = 300.0,
        page: bool = True,
        server_key: str | Path | None = None,
    ) -> None:
        log_inside_flower()
        check_strategy(strategy)
        self.strategy = strategy
        super().__init__(
            roster=roster, test=test, value=value, folder=folder, gradient=gradient, config=config,
            patience=patience, join=join, page=page, server_key=server_key,
        )  # fmt: skip
        self.optimiser = aggregator(strategy) is not FedAvg
        self._settings["participation"] = {"fraction": self._fraction()}
        check_schedule(self._config(1)[0])  # wrong settings are found now
        self._made = True

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped strategy if this class has none of that name."""
        if name.startswith("__") or name in ("strategy", "_made"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to hide an attribute of the wrapped strategy, which would keep using its own value."""
        if "_made" in vars(self) and name not in vars(self) and hasattr(self.strategy, name):
            kind = type(self.strategy).__name__
            raise AttributeError(f"{name} belongs to the {kind} inside: set it there, before it is wrapped")
        super().__setattr__(name, value)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600.0,
        **options: Any,
    ) -> Result:
        """Run the strategy's own ``start``, whose arguments these are, with every train step made secure.

        ``timeout`` is in seconds, for members who train or evaluate. If the last rounds were aborted, the
        result holds the model of the last round that was closed.

        Raises:
            RunAborted: no round was closed, or several in a row were aborted and more were to come. The
                content of the folder is sound, and closed rounds stay valid.
        """
        shape = RecordShape.of(initial_arrays)
        secure = self._grid(grid, shape)
        with self._new(engine_of(grid), shape, num_rounds, secure) as recorder:
            coordinator = secure.coordinator
            secure.gather(max(least_scheduled(coordinator.config), secure.available))
            try:
                options |= {"num_rounds": num_rounds, "timeout": timeout}
                result = self.strategy.start(grid=secure, initial_arrays=initial_arrays, **options)
                secure.check_closed()
                model = shape.read(result.arrays or initial_arrays)
            except Exception as error:
                self._end_early(secure)
                check_asked(error)
                raise
            finally:
                self.scores = recorder.write_scores()
            result.arrays = shape.record(model)
            if not any(closed.reports for closed in recorder.rounds):
                log.error("no round was scored: %s", "; ".join(self.notes[-3:]) or "nobody reported")
            finish(coordinator, model)
            self.scores = recorder.write_scores()
            if not self._tell_unsettled(coordinator):
                log.info("ledger and scores: fedmerit score %s", self.folder.resolve())
        if self.page:
            log.info("%s", page_of_run(self.folder))
        return result

    def settle(self, grid: Grid, initial_arrays: ArrayRecord, timeout: float = 3600.0) -> None:
        """Settle a run whose server died, or that too few members could settle; nothing is trained.

        The folder must hold a run of these settings that members are to settle. If the server died before the
        last round was over, the run ends with the rounds that have a sum, once enough members sign that.
        Whatever was opened, agreed or stated before stays as it was. If this fails, it can be tried again. If
        the run has its end, members who have not signed that are asked to. ``initial_arrays`` has the names,
        shapes and types of the first model; ``timeout`` is for members who compute.

        Raises:
            ConfigError: roster, settings or ``value`` are not those of the run.
            DataError: ``test`` does not hold the samples that were committed to before round 1.
            ProtocolError: too few members joined.
            SettlementError: the run was not settled, or cannot be.
            StoreError: the folder holds no such run, or a file of it is gone or damaged.
        """
        engine = engine_of(grid)
        config, run = self._begun(engine)
        shape, path = RecordShape.of(initial_arrays), self.folder.resolve()
        recorded = of_folder(path)
        if not recorded.settles or (self.gradient is None and not recorded.judged):
            raise ConfigError(
                f"settle: expected a run whose members settle, and its gradient; the run in {path} has "
                f"method={recorded.scoring.method!r}" + (", no gradient was given" * (self.gradient is None))
            )
        with Folder(self.folder, config, resume=True) as folder:
            end = run.end
            if end is not None:
                self._check_settled(run)
                if run.seen >= {*self.roster.names}:
                    return
            recorder, pool = self._taken_up(folder, config, run)
            slope, secure = None, self._grid(grid, shape, timeout)
            if not recorded.judged:
                assert self.gradient is not None
                slope = slope_of(self.gradient, shape)
                if opened := self._opened(engine):
                    opened.check(pool.settlement(), recorder.run)
            coordinator = self._coordinator(recorder, pool, secure, None, slope)
            if end is not None:  # a server that was killed then has not asked everybody to sign it
                secure.gather(0)
                coordinator.seal([name for name in secure.nodes if name not in run.seen], end.digest.hex())
                return
            cut, archive = recorder.cut_off(), FolderArchive(folder.path / ARCHIVE)
            summed = cut is not None and archive.has("round", cut.number)
            if all(closed.aborted for closed in recorder.rounds) and not summed:
                raise SettlementError(f"{path}: no round has a sum: nothing to settle", code="no-rounds")
            model = self._taken_over(recorder, coordinator, shape.vector)
            if slope is not None and not recorder.recorded("opening"):
                evaluate = self.value and evaluator(self.value, shape, config.scoring.utilities)
                check_slope(slope, evaluate, model, pool.settlement(), config.scoring.utilities[0])
            agreed = sum(not body["wrong"] for body in recorder.recorded("agreed"))
            secure.gather(0 if agreed >= config.threshold else config.threshold)
            try:
                finish(coordinator, model)
            finally:
                self.scores = recorder.write_scores()
            if coordinator.settled is None:
                why = str(recorder.recorded("unsettled")[-1]["why"])
                again = "" if recorder.recorded("end") else "; try again when more members are there"
                raise SettlementError(f"{path}: {self.notes[-1]}{again}", code=why)
        log.info("ledger and scores: fedmerit score %s", path)
        if self.page:
            log.info("%s", page_of_run(self.folder))

    def _grid(self, grid: Grid, shape: RecordShape, timeout: float | None = None) -> SecureGrid:
        """Return the grid of a run; its coordinator comes later."""
        return SecureGrid(
            grid=grid,
            shape=shape,
            patience=self.patience,
            join=self.join,
            weighted_by=getattr(self.strategy, "weighted_by_key", "num-examples"),
            available=int(getattr(self.strategy, "min_available_nodes", 0)),
            timeout=timeout,
        )

    def _averaging(self) -> str:
        return type(self.strategy).__name__

    def _end_early(self, secure: SecureGrid) -> None:
        """Close the ledger of a run that an error ended between two rounds, and ask the members to sign it.

        Before the first round there is nothing to close. If the error came in the middle of a round, the
        ledger stays open and shows that.
        """
        try:
            secure.coordinator.acknowledge()
            if secure.model is None or len(secure.coordinator.recorder.rounds) != secure.rounds:
                return
            finish(secure.coordinator, secure.model)
            self._tell_unsettled(secure.coordinator)
        except Exception:  # the caller should see the error that ended the run
            log.exception("the ledger has no last record: it could not be written")

    def _fraction(self) -> float:
        """Return which part of the members a round schedules if nobody is away.

        Flower samples ``fraction_train`` of the members, rounded down, and at least ``min_train_nodes``.

        Raises:
            ConfigError: the strategy wants more members than there are, or samples fewer than must stay.
        """
        members, fraction = len(self.roster.names), float(getattr(self.strategy, "fraction_train", 1.0))
        for name in ("min_train_nodes", "min_available_nodes"):
            if (asked := getattr(self.strategy, name, 0)) > members:
                raise ConfigError(f"{name} is {asked}, but the roster has {members} members")
        if not 0 < fraction < 1:
            return 1.0
        count = max(int(members * fraction), getattr(self.strategy, "min_train_nodes", 0))
        if count < (least := min(self._config(1)[0].threshold, members)):
            raise ConfigError.at(
                "fraction_train",
                f"{fraction:g} of {members} members schedules {count}, but {least} must stay to the end: "
                f"expected min_train_nodes={least} or a larger fraction",
            )
        if count < members:
            log.warning(
                "fraction_train below 1 schedules %g of the members: they take part only if their own "
                "secure(..., accept=...) allows it, as partial(fedmerit.flower.cautious, fraction=%.2g) does",
                *(count / members, math.floor(100 * count / members) / 100),
            )
        return count / members


def last_model(folder: str | Path, like: ArrayRecord) -> ArrayRecord:
    """Return the model after the last round in a run folder, from which to start a new run in a new folder.

    It comes from the checkpoint of the last round in the ledger. If the strategy has a server optimiser, this
    is the average before the optimiser acted; the optimiser's own state is not kept. ``like`` is a model with
    the same names, shapes and types, such as a fresh one; arrays of integers are taken from it.

    Raises:
        LedgerError: the folder holds no readable ledger.
        StoreError: no round is over in that folder, its checkpoint is gone or damaged, or it belongs to
            another model than ``like``.
    """
    shape = RecordShape.of(like)
    return shape.record(last_vector(Path(folder), shape.vector.size))


# ---------------------------------------------------------------------------------- what a server begins with

REFUSED = {
    "it compares members' updates with each other": ("Krum", "MultiKrum", "Bulyan"),
    "it needs the median of every coordinate over members' updates": ("FedMedian",),
    "it sorts every coordinate of members' updates": ("FedTrimmedAvg",),
    "it weighs members by their losses and needs each one's update": ("QFedAvg",),
    "trees are not averaged": ("FedXgbBagging", "FedXgbCyclic"),
}


ROBUST = ("median", "trim", "quantile", "percentile", "krum")
"""What is in the names of functions that compare updates."""


def check_strategy(strategy: Strategy) -> None:
    """Raise `ConfigError` if a strategy needs to see individual updates, or is not known to average.

    Log what functions of the user's own see: one reply.
    """
    expected = "expected one that averages: FedAvg, FedProx, FedAvgM, FedAdagrad, FedAdam, FedYogi, FedOpt"
    for kind in type(strategy).__mro__:
        for why, names in REFUSED.items():
            if kind.__name__ in names:
                raise ConfigError(f"{kind.__name__} cannot run under secure aggregation: {why}; {expected}")
    if not isinstance(strategy, FedAvg):
        raise ConfigError(f"{type(strategy).__name__} is not known to average; {expected}, or a subclass")
    own = aggregator(strategy)
    if is_users(own):
        name = f"{own.__name__}.aggregate_train"
        used = names_in(getattr(strategy.aggregate_train, "__code__", None))
        if robust := sorted(one for one in used if any(word in one.lower() for word in ROBUST)):
            raise ConfigError(
                f"{name} cannot run under secure aggregation: it uses {', '.join(robust)}, but the one reply "
                f"that it sees is the sum of all updates, so nothing is compared; {expected}"
            )
        log.warning(
            "%s sees one reply per round, from the masked sum: M, with a weight of 1 and the means of shared "
            "metrics; members are scored on M, before aggregate_train changes it",
            name,
        )
    if is_users(getattr(strategy, "train_metrics_aggr_fn", FedAvg)):
        log.warning(
            "train_metrics_aggr_fn sees one reply per round: the plain means of the metrics that members "
            "share, with a weight of 1, and so no maximum, no sum and no weighted mean over members"
        )


def is_users(code: object) -> bool:
    """Return whether a class or function is not Flower's own."""
    return str(getattr(code, "__module__", "")).partition(".")[0] != "flwr"


def names_in(code: object) -> set[str]:
    """Return the names that code uses, also in functions inside it."""
    if not isinstance(code, CodeType):
        return set()
    return {*code.co_names}.union(*map(names_in, code.co_consts))


def check_asked(error: Exception) -> None:
    """Raise `ConfigError` if a strategy's aggregation asked its one reply for what nobody shares."""
    asked = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if isinstance(error, KeyError) and "aggregate_train" in asked:
        raise ConfigError(
            f"aggregate_train asks for {error.args[0]!r}, which its one reply does not hold: it holds M, a "
            "weight of 1, and the means of metrics that members share, each those that its own "
            "secure(..., metrics=[...]) lists. Nothing can weigh the updates, because M is their sum already"
        ) from error


def engine_of(grid: Grid) -> str:
    """Return what the ledger calls a run over this grid.

    In Flower's simulation, the grid of nodes is in the server's own memory. Behind any other grid, the
    machines may belong to anybody.
    """
    simulated = any(kind.__name__ == "InMemoryGrid" for kind in type(grid).__mro__)
    return SIMULATED if simulated else FLOWER


def aggregator(strategy: Strategy) -> type:
    """Return the class that a strategy has ``aggregate_train`` from; with `FedAvg`, its next model is M."""
    return next(kind for kind in type(strategy).__mro__ if "aggregate_train" in vars(kind))
