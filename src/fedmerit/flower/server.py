"""The server's side: a wrapper around an averaging strategy.

::

    strategy = fedmerit.flower.Contributions(
        FedAvg(), roster="roster.toml", test=(images, labels), value=evaluate, gradient=slope,
        folder="runs/ours",
    )
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)

If the server of a settled run dies, another one settles what was trained: ``strategy.settle(grid=grid,
initial_arrays=arrays)``, with the same arguments and the same folder.

Attributes of the wrapped strategy can be read through the wrapper: ``strategy.fraction_train``.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedmerit.config import Config, Payment, as_toml, from_dict, of_folder
from fedmerit.errors import (
    ConfigError,
    DataError,
    KeyFileError,
    ProtocolError,
    SettlementError,
    StoreError,
)
from fedmerit.flower.checks import (
    averages,
    check_slope,
    check_strategy,
    engine_of,
    method_of,
    own_aggregation,
    server_key_of,
    utilities_of,
)
from fedmerit.flower.codec import (
    Gradient,
    Notes,
    Shape,
    Value,
    definition,
    evaluator,
    log_inside_flower,
    slope_of,
)
from fedmerit.flower.folders import NEW_KEY, SETTLE, make_free, pool_key
from fedmerit.flower.grid import SecureGrid
from fedmerit.identity import (
    SERVER,
    Roster,
    load_key,
    new_key,
    public_key,
    read_roster,
)
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.recorder import LedgerRecorder
from fedmerit.ledger.records import first_body, rounds_of
from fedmerit.limits import check_schedule
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.direction import Slope, along_path
from fedmerit.protocol.messages import LEAST_SAMPLES
from fedmerit.protocol.outcome import Evaluations
from fedmerit.protocol.pool import KEY_BYTES, Pool, Sampling, apart, order_of, parts_of
from fedmerit.protocol.terms import FLOWER, least_scheduled, proposed
from fedmerit.report.page.html import page_of_run
from fedmerit.scoring.files import LEDGER
from fedmerit.storage.archive import ARCHIVE, FolderArchive, check_sums
from fedmerit.storage.run_folder import Folder, OpenedSamples, write
from fedmerit.verify import verify_folder

log = logging.getLogger("fedmerit")


class Contributions:
    """Secure aggregation and contribution scores around a strategy that averages.

    Args:
        strategy: FedAvg, FedProx or one with a server optimiser (scores are taken before the optimiser acts).
        roster: everybody's public keys, or the file that holds them.
        test: samples and labels on which all members are measured; the server commits to them before round 1.
        value: measures how good a model is, the same function that the members use. None if the server cannot
            evaluate: v(M0) and v(M) are then the medians of what the members measured.
        gradient: returns the mean of the paid utility over some test samples and its gradient, the same
            function that the members use. A settled run needs it (see `secure`).
        method: ``settled`` (members state their part in the gain after the last round, and the statements
            must add up exactly), ``reports`` (they report in every round what they measured), or ``both``, on
            different parts of the test set. With a gradient it is ``settled`` unless given; without one, it
            must be given.
        folder: where ledger, scores, notes and the server's key go; new, empty, or left by a start that too
            few members joined.
        utilities: names of what ``value`` measures, the paid one first; unless given, those that
            `torch_scoring` was given, or else "value".
        whole: which of them are metrics of the whole test set (AUC, F1), so that ``value`` returns one number
            for each; "auc", "f1" and "c-index" always are. They have no gradient, so ``method`` is "reports".
        weights: ``secret`` (the members' sample counts, hidden), ``uniform``, or ``roster`` (in its file).
        weight_cap: for secret weights, the largest sample count anyone may claim; public.
        bound: largest change of a coordinate in one round.
        clip: cut what lies beyond the bound; by default such a member leaves the round.
        threshold: number of members needed to finish a round; None for floor(2/3 of the roster) + 1.
        check: False saves an exchange per round; updates are then hidden from an honest server only, and
            members must have agreed to that (``accept`` of `secure`).
        least: fewest members a round may schedule; None for the threshold.
        reveal: one test slice for all rounds (``fixed``), on which a member could train from round 2 on, or
            a fresh one each round (``per-round``), for test sets that are large enough. In a settled run the
            test set is shown after the last round (``end``).
        blocks: of a settlement: into how many blocks the test set is dealt, for standard errors.
        detail: of a settlement: members state a number for every round (``rounds``), or one (``run``).
        naming: of a settlement: whether a false statement can be traced to its author.
        window_days: of a settlement: how long members who were away may still hand in their statements.
        game: how coalition models are built.
        payment: terms of payment that are not the usual ones, such as ``{"equal": 0.5, "currency": "CHF"}``;
            keys as in the section ``[payment]`` of a config. Members sign them with all other settings.
        visibility: whether all members may read all records, or each only its own and the totals.
        errors: ``joint``: members add 32 numbers to a report, from which the error of a difference between
            two of them follows; ``plain``: they do not, and differences are judged by an upper bound.
        patience: seconds to wait for an answer that needs neither training nor evaluation; for those two,
            ``timeout`` of `start` applies.
        join: seconds to wait at the start for all members of the roster, later for enough of them, and at a
            settlement for those who are away.
        page: write page.html into the folder at the end, if the packages it needs are installed.
        server_key: the file of the server's private key, whose public half is on the roster; unless given,
            ``server.pem`` beside the roster file. A simulation may do without: it makes a key of its own.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        roster: Roster | str | Path,
        test: tuple[npt.ArrayLike, npt.ArrayLike] | Pool,
        value: Value | None,
        folder: str | Path,
        gradient: Gradient | None = None,
        method: Literal["settled", "both", "reports"] | None = None,
        utilities: Sequence[str] | None = None,
        whole: Sequence[str] = (),
        weights: Literal["secret", "uniform", "roster"] = "secret",
        weight_cap: int = 100_000,
        bound: float = 4.0,
        clip: bool = False,
        threshold: int | None = None,
        check: bool = True,
        least: int | None = None,
        reveal: Literal["fixed", "per-round", "end"] | None = None,
        blocks: int = 16,
        detail: Literal["rounds", "run"] = "rounds",
        naming: bool = True,
        window_days: float = 14.0,
        game: Literal["additive", "renormalised"] = "additive",
        payment: Mapping[str, Any] | None = None,
        visibility: Literal["all", "coordinator"] = "all",
        errors: Literal["joint", "plain"] = "joint",
        patience: float = 120.0,
        join: float = 300.0,
        page: bool = True,
        truth: Sequence[str] = (),
        server_key: str | Path | None = None,
    ) -> None:
        check_strategy(strategy)
        if own := own_aggregation(strategy):
            log.warning(
                "%s.aggregate_train sees one reply per round, from the masked sum: M, with a weight of 1 and "
                "the means of shared metrics; members are scored on M, before aggregate_train changes it",
                own,
            )
        if truth:
            raise ConfigError(
                "truth: needs plain updates, which this server never sees; rehearse in one process"
            )
        if weights not in ("secret", "uniform", "roster"):
            raise ConfigError(f"weights: expected secret, uniform or roster, got {weights!r}")
        scored_by = method_of(method, gradient)
        self.strategy, self.value, self.gradient, self.folder = strategy, value, gradient, Path(folder)
        self.roster = roster if isinstance(roster, Roster) else read_roster(roster)
        self.server_key = server_key_of(self.roster, roster, server_key)
        if weights == "roster" and self.roster.weights is None:
            raise ConfigError("weights: the roster holds none; expected secret or uniform")
        for name in ("min_train_nodes", "min_available_nodes"):
            if (asked := getattr(strategy, name, 0)) > len(self.roster.names):
                raise ConfigError(f"{name} is {asked}, but the roster has {len(self.roster.names)} members")
        fraction = self._fraction()
        if fraction < 1:
            log.warning(
                "fraction_train below 1 schedules %g of the members: they take part only if their own "
                "secure(..., accept=...) allows it, as partial(fedmerit.flower.cautious, fraction=%.2g) does",
                *(fraction, math.floor(100 * fraction) / 100),
            )
        self.test, self.patience, self.join = test, patience, join
        self.page = page
        training: dict[str, Any] = {"weights": weights}
        if weights == "secret":
            training["weight_cap"] = weight_cap
        if weights == "roster":
            training["roster_weights"] = self.roster.weights
        self._settings: dict[str, dict[str, Any]] = {
            "data": {"test_reveal": reveal or ("end" if scored_by == "settled" else "fixed")},
            "partition": {"names": list(self.roster.names)},
            "training": training,
            "participation": {"fraction": fraction},
            "scoring": {
                "method": scored_by,
                **utilities_of(value or gradient, utilities, whole),
                "game": game,
                "visibility": visibility,
                "errors": errors,
            },
            "payment": {**vars(Payment()), **(payment or {})},
            "secure_aggregation": {
                "bound": float(bound),
                "threshold": threshold or 0,
                "least": least or 0,
                "check": check,
                "clip": clip,
            },
        }
        if scored_by != "reports":
            self._settings["settlement"] = {
                "blocks": blocks, "detail": detail, "naming": naming, "window_days": float(window_days),
            }  # fmt: skip
        config, _ = self._config(1)  # finds wrong settings now
        self._check_fraction(config)
        check_schedule(config)
        self.scores: dict[str, Any] = {}
        self.notes: list[str] = []
        self.seconds: dict[str, list[float]] = {}
        self._made = True

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped strategy if this class has none of that name."""
        if name.startswith("__") or name in ("strategy", "_made"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to hide an attribute of the wrapped strategy, which would keep using its own value."""
        hidden = "_made" in vars(self) and name not in vars(self) and hasattr(self.strategy, name)
        if hidden:
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
        """Run the strategy's own ``start`` with every train step made secure, and return its result.

        If the last rounds were aborted, the result holds the model of the last round that was closed.

        Args:
            grid: Flower's grid.
            initial_arrays: the first model.
            num_rounds: number of rounds.
            timeout: seconds to wait for members who train or evaluate.
            options: further arguments of the strategy's ``start``.

        Raises:
            RunAborted: no round was closed, or several in a row were aborted and more were to come. The
                content of the folder is sound, and closed rounds stay valid.
        """
        log_inside_flower()
        if self.roster.server is None and engine_of(grid) == FLOWER:
            raise ConfigError(
                "roster: names no server, and members of a run between machines refuse that, because anybody "
                f"could be their server; {NEW_KEY}, and put it on the roster: fedmerit keys roster --server "
                "for a new one, fedmerit keys propose for one that members have taken part under"
            )
        config, text = self._config(num_rounds)
        shape = Shape.of(initial_arrays)
        for name in shape.left_out:
            log.warning("array %r is not summed, because it holds no floats: it stays as it is", name)
        pool = self._pool(config, secrets.token_bytes(KEY_BYTES))
        evaluate = None
        if self.value is not None:
            evaluate = evaluator(self.value, shape, config.scoring.utilities)
            first = evaluate(shape.vector, pool.first)  # finds errors in it before anybody trains
            for name, found in first.items():
                Sampling.of(config, pool.commitment).check(name, found, pool.first)
        slope = None
        if config.settles:
            assert self.gradient is not None
            slope = slope_of(self.gradient, shape)
            check_slope(slope, evaluate, shape.vector, pool.settlement(), config.scoring.utilities[0])
        if config.settles and (opened := self._opened(grid)):
            opened.check(pool.settlement())
        make_free(self.folder)
        secure = self._secure(grid, shape)
        with Folder(self.folder, config, text=text) as folder:
            recorder = self._recorder(folder, config, text, pool, engine_of(grid))
            recorder.begin(shape.vector)
            measure = evaluate and Evaluations(evaluate)
            coordinator = self._coordinator(recorder, pool, secure, measure, slope)
            self._gather(secure, max(least_scheduled(config), secure.available))
            try:
                result = self.strategy.start(
                    grid=secure,
                    initial_arrays=initial_arrays,
                    num_rounds=num_rounds,
                    timeout=timeout,
                    **options,
                )
                secure.check_closed()
                model = shape.read(result.arrays or initial_arrays)
            except Exception:
                self._end_early(coordinator, secure)
                raise
            finally:
                self.scores = recorder.write_scores()
            result.arrays = shape.record(model)
            if not any(one.reports for one in recorder.rounds):
                log.error("no round was scored: %s", "; ".join(self.notes[-3:]) or "nobody reported")
            coordinator.finish(model)
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
        the run has its end, members who have not signed that are asked to.

        Args:
            grid: Flower's grid.
            initial_arrays: a model with the same names, shapes and types as the first one.
            timeout: seconds to wait for members who compute.

        Raises:
            ConfigError: roster, settings or ``value`` are not those of the run.
            DataError: ``test`` does not hold the samples that were committed to before round 1.
            ProtocolError: too few members joined.
            SettlementError: the run was not settled, or cannot be.
            StoreError: the folder holds no such run, or a file of it is gone or damaged.
        """
        log_inside_flower()
        config, run = self._begun(grid)
        shape, path = Shape.of(initial_arrays), self.folder.resolve()
        with Folder(self.folder, config, resume=True) as folder:
            end = next(folder.ledger.records("end"), None)
            if end is not None:
                self._check_settled(folder.ledger)
                signed = {record.author for record in folder.ledger.records("seen")}
                if signed >= {*self.roster.names}:
                    return
            recorder, pool = self._taken_up(folder, config, run)
            if opened := self._opened(grid):
                opened.check(pool.settlement(), recorder.run)
            assert self.gradient is not None
            slope, secure = slope_of(self.gradient, shape), self._secure(grid, shape, timeout)
            coordinator = self._coordinator(recorder, pool, secure, None, slope)
            if end is not None:  # a server that was killed then has not asked everybody to sign it
                self._gather(secure, 0)
                there = secure.expected(len(recorder.rounds) + 1)
                coordinator.seal([name for name in there if name not in signed], end.digest.hex())
                return
            cut, archive = recorder.cut_off(), FolderArchive(folder.path / ARCHIVE)
            known = cut is not None and archive.has("round", cut[0].number)
            if all(one.aborted for one in recorder.rounds) and not known:
                raise SettlementError(f"{path}: no round has a sum: nothing to settle", code="no-rounds")
            if cut is not None:  # of a first round with a sum, the model before it is in the archive
                before = recorder.model_after(recorder.rounds[-1]) if recorder.rounds else shape.vector
                coordinator.take_up(*cut, before)
            check_sums(archive, folder.ledger, recorder.rounds, config)
            model = recorder.model_after(recorder.rounds[-1])
            if model.shape != shape.vector.shape:
                raise ConfigError(
                    f"initial_arrays: expected {model.size} numbers, as the model of round "
                    f"{len(recorder.rounds)} in {path} has, got {shape.vector.size}"
                )
            if not recorder.recorded("opening"):
                evaluate = self.value and evaluator(self.value, shape, config.scoring.utilities)
                check_slope(slope, evaluate, model, pool.settlement(), config.scoring.utilities[0])
            agreed = sum(not body["wrong"] for body in recorder.recorded("agreed"))
            self._gather(secure, 0 if agreed >= config.threshold else config.threshold)
            try:
                coordinator.finish(model)
            finally:
                self.scores = recorder.write_scores()
            if coordinator.settled is None:
                why = str(recorder.recorded("unsettled")[-1]["why"])
                again = "" if recorder.recorded("end") else "; try again when more members are there"
                raise SettlementError(f"{path}: {self.notes[-1]}{again}", code=why)
        log.info("ledger and scores: fedmerit score %s", path)
        if self.page:
            log.info("%s", page_of_run(self.folder))

    def _begun(self, grid: Grid) -> tuple[Config, Mapping[str, Any]]:
        """Return the settings and the first record of the run in the folder, which must verify.

        Raises:
            ConfigError: it is a run of another engine, method or roster.
            StoreError: there is none.
        """
        path = self.folder.resolve()
        if not (path / LEDGER).is_file():
            raise StoreError(f"{path}: expected the folder of a run to settle, found no {LEDGER}")
        for _ in verify_folder(path):  # only what verifies is gone on with
            pass
        there = of_folder(path)
        with Ledger(path / LEDGER, read_only=True) as ledger:
            run = first_body(ledger, "run")
        if not there.settles or self.gradient is None:
            raise ConfigError(
                f"settle: expected a run whose members settle, and its gradient; the run in {path} has "
                f"method={there.scoring.method!r}" + (", no gradient was given" * (self.gradient is None))
            )
        if run["engine"] != (here := engine_of(grid)):
            raise ConfigError(f"settle: the run in {path} took place in {run['engine']!r}, this is {here!r}")
        if run["terms"]["roster"] != self.roster.hash.hex():
            raise ConfigError(
                f"roster: expected that of the run in {path}, {run['terms']['roster']}, got "
                f"{self.roster.hash.hex()}: members answer in a run only under the roster it began with"
            )
        return self._config(there.training.rounds)[0], run

    def _check_settled(self, ledger: Ledger) -> None:
        """Say that a run which is over is settled; raise SettlementError if it is not."""
        path, told = self.folder.resolve(), [record.body for record in ledger.records("settled")]
        if not told:
            why = [str(record.body["why"]) for record in ledger.records("unsettled")]
            code = why[-1] if why else "unfinished"
            raise SettlementError(f"{path}: the run has ended, and it was not settled ({code})", code=code)
        awaited = ", ".join((*told[-1]["missing"], *told[-1]["silent"]))
        late = f"; answers of {awaited} are still taken (fedmerit settle add)"
        log.info("%s: settled before%s", path, "" if told[-1]["final"] else late)

    def _taken_up(
        self, folder: Folder, config: Config, run: Mapping[str, Any]
    ) -> tuple[LedgerRecorder, Pool]:
        """Return the recorder of a run that was begun, and its test pool, which stays as it was committed."""
        path, key = folder.path, self.server_key or folder.path / "keys" / "server.pem"
        if not key.exists():
            raise KeyFileError(f"{key}: no such file; expected the private key of the server of this run")
        identity, commitment = load_key(key), first_body(folder.ledger, "pool")
        if public_key(identity).hex() != run["keys"][SERVER]:
            raise KeyFileError(f"{key}: not the server's key according to the ledger in {path}")
        pool = self._pool(config, pool_key(path))
        if pool.commitment["utility"] != commitment["utility"]:
            raise ConfigError(
                f"value: not the function, or not the utilities, that the run in {path} began with"
            )
        if pool.commitment != dict(commitment):
            raise DataError(
                f"test: expected the {commitment['size']} samples, in the same order, that were committed to "
                f"before round 1 of the run in {path}, and {len(pool)} samples that differ were given"
            )
        recorder = LedgerRecorder(
            *(folder, config, self.roster, identity, run["run"], run["engine"], run["terms"], commitment),
            rounds=rounds_of(folder.ledger),
        )
        return recorder, pool

    def _secure(self, grid: Grid, shape: Shape, timeout: float | None = None) -> SecureGrid:
        weighted_by = getattr(self.strategy, "weighted_by_key", "num-examples")
        available = int(getattr(self.strategy, "min_available_nodes", 0))
        return SecureGrid(grid, shape, self.patience, self.join, weighted_by, available, timeout)

    def _coordinator(
        self,
        recorder: LedgerRecorder,
        pool: Pool,
        secure: SecureGrid,
        measure: Evaluations | None,
        slope: Slope | None,
    ) -> Coordinator:
        """Return the coordinator of a run, which the grid then serves."""
        path, opened = recorder.folder.path, self._opened(secure.grid)

        coordinator = Coordinator(
            *(recorder, pool, secure, measure),
            refused=Notes(path / "notes.txt"),
            gradient=slope and along_path(slope),
            archive=FolderArchive(path / ARCHIVE),
            awaited=secure.awaited,
            opening=None if opened is None else partial(opened.add, path, recorder.run),
        )
        secure.coordinator, self.notes, self.seconds = coordinator, coordinator.refused, secure.seconds
        return coordinator

    def _opened(self, grid: Grid) -> OpenedSamples | None:
        """Return what this server has shown to these members; None in a simulation."""
        if self.server_key is None or engine_of(grid) != FLOWER:
            return None
        return OpenedSamples(self.server_key.resolve(), self.roster)

    def _end_early(self, coordinator: Coordinator, secure: SecureGrid) -> None:
        """Close the ledger of a run that an error ended between two rounds, and ask the members to sign it.

        Before the first round there is nothing to close. If the error came in the middle of a round, the
        ledger stays open and shows that.
        """
        if secure.model is None or len(coordinator.recorder.rounds) != secure.rounds:
            return
        try:
            coordinator.finish(secure.model)
            self._tell_unsettled(coordinator)
        except Exception:  # the caller should see the error that ended the run
            log.exception("the ledger has no last record: it could not be written")

    def _tell_unsettled(self, coordinator: Coordinator) -> bool:
        """Log that a run is not settled, and whether it still can be; return whether that is so."""
        unsettled = coordinator.config.settles and coordinator.settled is None
        if unsettled:
            ended = any(coordinator.recorder.recorded("end"))
            told = self.folder.resolve() / "notes.txt"
            log.error("the run is not settled: %s%s", told, "" if ended else f"; {SETTLE}")
        return unsettled

    def _fraction(self) -> float:
        """Return which part of the members a round schedules if nobody is away.

        Flower samples ``fraction_train`` of the members, rounded down, and at least ``min_train_nodes``.
        """
        members, fraction = len(self.roster.names), float(getattr(self.strategy, "fraction_train", 1.0))
        if not 0 < fraction < 1:
            return 1.0
        return max(int(members * fraction), getattr(self.strategy, "min_train_nodes", 0)) / members

    def _check_fraction(self, config: Config) -> None:
        """Refuse a strategy that samples fewer members for a round than must stay to its end."""
        members, count = len(self.roster.names), round(self._fraction() * len(self.roster.names))
        if count < min(config.threshold, members):
            raise ConfigError(
                f"fraction_train {self.strategy.fraction_train:g} of {members} members schedules {count}, "  # type: ignore[attr-defined]
                f"but {config.threshold} must stay to the end: expected min_train_nodes={config.threshold} "
                "or a larger fraction"
            )

    def _config(self, rounds: int) -> tuple[Config, str]:
        """Return the settings of a run, and the same as TOML."""
        settings = {**self._settings, "training": {"rounds": rounds, **self._settings["training"]}}
        return from_dict(settings), as_toml(settings)

    def _recorder(self, folder: Folder, config: Config, text: str, pool: Pool, engine: str) -> LedgerRecorder:
        key = folder.path / "keys" / "server.pem"
        key.parent.mkdir(mode=0o700, exist_ok=True)
        if self.server_key is None:  # a simulation
            new_key(key)
        else:  # a link, so that there is one copy of this key
            key.symlink_to(self.server_key.resolve())
        write(key.with_name("pool.key"), pool.key, mode=0o600)
        terms = proposed(
            text,
            self.roster,
            strategy=type(self.strategy).__name__,
            optimiser=not averages(self.strategy),
            evaluates="members" if self.value is None else "server",
            engine=engine,
        )
        run, commitment = secrets.token_hex(16), pool.commitment
        return LedgerRecorder(folder, config, self.roster, load_key(key), run, engine, terms, commitment)

    def _pool(self, config: Config, key: bytes) -> Pool:
        """Return the test pool, in an order that follows from its key."""
        if isinstance(self.test, Pool):
            own = self.test.settled > 0, self.test.slices > (self.test.settled > 0)
            if own != (config.settles, config.reports):
                cut = {(True, True): "both", (True, False): "settled", (False, True): "reports"}[own]
                raise DataError(
                    f"test: expected a pool for method={config.scoring.method!r}, got one that was cut for "
                    f"{cut!r} (scoring.method of the settings it was made with)"
                )
            return self.test
        if not isinstance(self.test, tuple | list) or len(self.test) != 2:
            raise DataError(
                f"test: expected (samples, labels), two arrays, got a {type(self.test).__name__}"
                + (f" of {len(self.test)}" if isinstance(self.test, tuple | list) else "")
            )
        x, y = (np.asarray(part) for part in self.test)
        for what, part in (("samples", x), ("labels", y)):
            if part.dtype.kind not in "fiub":
                raise DataError(f"test: {what} must be numbers, got {part.dtype}")
        method, reveal, rounds = config.scoring.method, config.data.test_reveal, config.training.rounds
        slices, settled = parts_of(len(y), method=method, reveal=reveal, rounds=rounds)
        least = 2 * (slices - 1) if method == "both" else slices  # half of the pool is settled
        if len(x) != len(y) or len(y) < LEAST_SAMPLES * least:
            raise DataError(
                f"test: expected as many labels as samples and at least {LEAST_SAMPLES} per slice "
                f"({slices} slices), got {len(x)} samples and {len(y)} labels"
            )
        order = apart(order_of(key, len(y)), x, y, settled, by_class=False)
        return Pool(
            indices=order,
            x=x[order],
            y=y[order],
            slices=slices,
            balanced=False,
            classes=0,
            utility_hash=definition(self.value or self.gradient, self._settings["scoring"]["utilities"]),
            key=key,
            settled=settled,
        )

    def _gather(self, secure: SecureGrid, least: int) -> None:
        """Wait until everybody has joined or ``join`` seconds have passed; raise if too few have joined."""
        began, told = time.monotonic(), 0
        while len(there := list(secure.get_node_ids())) < len(self.roster.names):
            waited = time.monotonic() - began
            if waited > self.join:
                break
            if waited > 10 * (told + 1):
                told += 1
                missing = [name for name in self.roster.names if name not in secure.nodes]
                log.warning("%d joined, waiting for %s", len(there), ", ".join(missing))
            time.sleep(0.2)
        if len(there) < least:
            raise ProtocolError(
                f"{len(there)} of {len(self.roster.names)} members joined within {self.join:g} s, "
                f"{least} are needed" + "".join(f"; {note}" for note in self.notes[:3]),
                stage="join",
            )
