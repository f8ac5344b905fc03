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
import secrets
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedmerit.config import SECTIONS, Config, as_toml, check_schedule, from_dict, of_folder, parse, text_in
from fedmerit.errors import ConfigError, DataError, SettlementError, StoreError
from fedmerit.flower.codec import Shape, log_inside_flower
from fedmerit.flower.folders import SETTLE, Notes, make_free
from fedmerit.flower.grid import SecureGrid
from fedmerit.flower.measures import Gradient, Value, check_slope, definition, evaluator, slope_of
from fedmerit.identity import PREFIX, Roster, load_key, new_key, public_key, read_roster
from fedmerit.ledger.chain import LEDGER
from fedmerit.ledger.run import Run, replay
from fedmerit.protocol.clearing import finish
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.direction import Slope, along_path
from fedmerit.protocol.messages import LEAST_SAMPLES
from fedmerit.protocol.outcome import Evaluations
from fedmerit.protocol.pool import KEY_BYTES, Pool, Sampling, apart, order_of, parts_of
from fedmerit.protocol.terms import FLOWER, SIMULATED, least_scheduled, proposed
from fedmerit.report.page.html import page_of_run
from fedmerit.settings import Payment
from fedmerit.storage.checks import check_sums
from fedmerit.storage.recorder import LedgerRecorder, resumed
from fedmerit.storage.run_folder import (
    ARCHIVE,
    Folder,
    FolderArchive,
    OpenedSamples,
    keep_pool_key,
    stored_pool_key,
)
from fedmerit.verify import verified_run

log = logging.getLogger("fedmerit")
NEW_KEY = "make a key (fedmerit keys new --server server.pem)"


class Contributions:
    """Secure aggregation and contribution scores around a strategy that averages.

    Args:
        strategy: FedAvg, FedProx or one with a server optimiser (scores are taken before the optimiser acts).
        roster: the file of everybody's public keys.
        test: samples and labels on which all members are measured; the server commits to them before round 1.
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

    def __init__(
        self,
        strategy: Strategy,
        *,
        roster: str | Path,
        test: tuple[npt.ArrayLike, npt.ArrayLike] | Pool,
        value: Value | None,
        folder: str | Path,
        gradient: Gradient | None = None,
        config: Mapping[str, Mapping[str, Any]] | str | Path | None = None,
        patience: float = 120.0,
        join: float = 300.0,
        page: bool = True,
        server_key: str | Path | None = None,
    ) -> None:
        log_inside_flower()
        check_strategy(strategy)
        self.strategy, self.value, self.gradient, self.folder = strategy, value, gradient, Path(folder)
        self.roster = read_roster(roster)
        self.server_key = server_key_of(self.roster, roster, server_key)
        self.test, self.patience, self.join, self.page = test, patience, join, page
        measured = getattr(value or gradient, "utilities", ["value"])
        self._settings = settings_of(config, self.roster, gradient, measured)
        self._settings["participation"] = {"fraction": self._fraction()}
        check_schedule(self._config(1)[0])  # wrong settings are found now
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
        if self.roster.server is None and engine_of(grid) == FLOWER:
            raise ConfigError.at(
                "roster",
                "names no server, and members of a run between machines refuse that, because anybody "
                f"could be their server; {NEW_KEY}, and put it on the roster: fedmerit keys roster --server "
                "for a new one, fedmerit keys propose for one that members have taken part under",
            )
        config, text = self._config(num_rounds)
        shape = Shape.of(initial_arrays)
        for name in shape.left_out:
            log.warning("array %r is not summed, because it holds no floats: it stays as it is", name)
        pool = self._pool(config, secrets.token_bytes(KEY_BYTES))
        evaluate = self.value and evaluator(self.value, shape, config.scoring.utilities)
        if evaluate is not None:  # finds errors in it before anybody trains
            for name, values in evaluate(shape.vector, pool.first).items():
                Sampling(pool.balanced).check(name, values, pool.first)
        slope = slope_of(self.gradient, shape) if self.gradient and config.settles else None
        if slope is not None:
            check_slope(slope, evaluate, shape.vector, pool.settlement(), config.scoring.utilities[0])
            if opened := self._opened(grid):
                opened.check(pool.settlement())
        make_free(self.folder)
        with Folder(self.folder, config, text=text) as folder:
            recorder = self._recorder(folder, config, text, pool, engine_of(grid))
            recorder.begin(shape.vector)
            secure = self._grid(recorder, pool, grid, shape, evaluate and Evaluations(evaluate), slope)
            coordinator = secure.coordinator
            secure.gather(max(least_scheduled(config), secure.available))
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
        config, run = self._begun(grid)
        shape, path = Shape.of(initial_arrays), self.folder.resolve()
        with Folder(self.folder, config, resume=True) as folder:
            end = run.end
            if end is not None:
                self._check_settled(run)
                if run.seen >= {*self.roster.names}:
                    return
            recorder, pool = self._taken_up(folder, config, run)
            if opened := self._opened(grid):
                opened.check(pool.settlement(), recorder.run)
            assert self.gradient is not None
            slope = slope_of(self.gradient, shape)
            secure = self._grid(recorder, pool, grid, shape, None, slope, timeout)
            coordinator = secure.coordinator
            if end is not None:  # a server that was killed then has not asked everybody to sign it
                secure.gather(0)
                coordinator.seal([name for name in secure.nodes if name not in run.seen], end.digest.hex())
                return
            cut, archive = recorder.cut_off(), FolderArchive(folder.path / ARCHIVE)
            summed = cut is not None and archive.has("round", cut.number)
            if all(closed.aborted for closed in recorder.rounds) and not summed:
                raise SettlementError(f"{path}: no round has a sum: nothing to settle", code="no-rounds")
            if cut is not None:  # of a first round with a sum, the model before it is in the archive
                before = recorder.model_after(recorder.rounds[-1]) if recorder.rounds else shape.vector
                coordinator.take_up(cut, before)
            check_sums(archive, replay(folder.ledger))
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

    def _begun(self, grid: Grid) -> tuple[Config, Run]:
        """Return the settings, and the run in the folder, which must verify.

        Raises:
            ConfigError: it is a run of another engine, method or roster.
            StoreError: the folder holds no run.
        """
        path = self.folder.resolve()
        if not (path / LEDGER).is_file():
            raise StoreError(f"{path}: expected the folder of a run to settle, found no {LEDGER}")
        run = verified_run(path)
        config, first = of_folder(path), run.first
        if not config.settles or self.gradient is None:
            raise ConfigError(
                f"settle: expected a run whose members settle, and its gradient; the run in {path} has "
                f"method={config.scoring.method!r}" + (", no gradient was given" * (self.gradient is None))
            )
        if first.engine != (here := engine_of(grid)):
            raise ConfigError(f"settle: the run in {path} took place in {first.engine!r}, this is {here!r}")
        if first.terms["roster"] != self.roster.hash.hex():
            raise ConfigError(
                f"roster: expected that of the run in {path}, {first.terms['roster']}, got "
                f"{self.roster.hash.hex()}: members answer in a run only under the roster it began with"
            )
        return self._config(config.training.rounds)[0], run

    def _check_settled(self, run: Run) -> None:
        """Say that a run which is over is settled; raise SettlementError if it is not."""
        path, account = self.folder.resolve(), run.account
        if account is None:
            code = (run.settlement and run.settlement.why) or "unfinished"
            raise SettlementError(f"{path}: the run has ended, and it was not settled ({code})", code=code)
        awaited = ", ".join((*account.missing, *account.unproved))
        late = f"; answers of {awaited} are still taken (fedmerit settle add)"
        log.info("%s: settled before%s", path, "" if account.final else late)

    def _taken_up(self, folder: Folder, config: Config, run: Run) -> tuple[LedgerRecorder, Pool]:
        """Return the recorder of a run that was begun, and its test pool, which stays as it was committed."""
        path, commitment = folder.path, run.pool
        recorder = resumed(run, folder, config, self.roster, self.server_key)
        pool = self._pool(config, stored_pool_key(path))
        if pool.commitment["utility"] != commitment["utility"]:
            raise ConfigError(f"value: not the function, or the utilities, that the run in {path} began with")
        if pool.commitment != dict(commitment):
            raise DataError(
                f"test: expected the {commitment['size']} samples, in the same order, that were committed to "
                f"before round 1 of the run in {path}, and {len(pool)} samples that differ were given"
            )
        return recorder, pool

    def _grid(
        self,
        recorder: LedgerRecorder,
        pool: Pool,
        grid: Grid,
        shape: Shape,
        measure: Evaluations | None,
        slope: Slope | None,
        timeout: float | None = None,
    ) -> SecureGrid:
        """Return the grid of a run, with the coordinator that it serves."""
        weighted_by = getattr(self.strategy, "weighted_by_key", "num-examples")
        available = int(getattr(self.strategy, "min_available_nodes", 0))
        secure = SecureGrid(grid, shape, self.patience, self.join, weighted_by, available, timeout)
        path, opened = recorder.folder.path, self._opened(grid)
        coordinator = Coordinator(
            *(recorder, pool, secure, measure),
            refused=Notes(path / "notes.txt"),
            defers=True,
            gradient=slope and along_path(slope),
            archive=FolderArchive(path / ARCHIVE),
            awaited=secure.awaited,
            opening=None if opened is None else partial(opened.add, path, recorder.run),
        )
        secure.coordinator, self.notes, self.seconds = coordinator, coordinator.refused, secure.seconds
        return secure

    def _opened(self, grid: Grid) -> OpenedSamples | None:
        """Return what this server has shown to these members; None in a simulation."""
        if self.server_key is None or engine_of(grid) != FLOWER:
            return None
        return OpenedSamples(self.server_key.resolve(), self.roster)

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

    def _tell_unsettled(self, coordinator: Coordinator) -> bool:
        """Log that a run is not settled, and whether it still can be; return whether that is so."""
        unsettled = coordinator.config.settles and coordinator.settled is None
        if unsettled:
            remedy = "" if any(coordinator.recorder.recorded("end")) else f"; {SETTLE}"
            log.error("the run is not settled: %s%s", self.folder.resolve() / "notes.txt", remedy)
        return unsettled

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
        keep_pool_key(folder.path, pool.key)
        strategy, evaluates = type(self.strategy).__name__, "members" if self.value is None else "server"
        optimiser = aggregator(self.strategy) is not FedAvg
        terms = proposed(
            text, self.roster, strategy=strategy, optimiser=optimiser, evaluates=evaluates, engine=engine
        )
        run, commitment = secrets.token_hex(16), pool.commitment
        return LedgerRecorder(folder, config, self.roster, load_key(key), run, engine, terms, commitment)

    def _pool(self, config: Config, key: bytes) -> Pool:
        """Return the test pool, in an order that follows from its key."""
        if isinstance(self.test, Pool):
            parts = self.test.settled > 0, self.test.slices > (self.test.settled > 0)
            if parts != (config.settles, config.reports):
                cut = {(True, True): "both", (True, False): "settled", (False, True): "reports"}[parts]
                raise DataError(
                    f"test: expected a pool for method={config.scoring.method!r}, got one that was cut for "
                    f"{cut!r} (scoring.method of the settings it was made with)"
                )
            return self.test
        if not isinstance(self.test, tuple | list) or len(self.test) != 2:
            count = f" of {len(self.test)}" if isinstance(self.test, tuple | list) else ""
            kind = type(self.test).__name__
            raise DataError(f"test: expected (samples, labels), two arrays, got a {kind}{count}")
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
        utility = definition(self.value or self.gradient, self._settings["scoring"]["utilities"])
        return Pool(
            indices=order, x=x[order], y=y[order], slices=slices, settled=settled, balanced=False, classes=0,
            utility_hash=utility, key=key,
        )  # fmt: skip


# ---------------------------------------------------------------------------------- what a server begins with

SETTINGS: dict[str, tuple[str, ...]] = {
    "data": ("test_reveal",),
    "training": ("weights", "weight_cap"),
    "scoring": ("method", "utilities", "game", "visibility"),
    "settlement": ("naming", "window_days"),
    "payment": tuple(vars(Payment())),
    "secure_aggregation": ("bound", "threshold"),
    "report": ("title",),
}
"""The settings of a run between machines; members' apps, the strategy and the roster decide all others."""


def settings_of(
    config: Mapping[str, Mapping[str, Any]] | str | Path | None,
    roster: Roster,
    gradient: Gradient | None,
    measured: Sequence[str],
) -> dict[str, dict[str, Any]]:
    """Return the settings that a server is given, with what they leave out; raise unless they are its own."""
    stated = parse(text_in(config)) if isinstance(config, str | Path) else config or {}
    sections: dict[str, Any] = {name: part for name, part in stated.items() if name != "schema"}
    for section, part in sections.items():
        if section not in SECTIONS or not isinstance(part, Mapping):
            from_dict({section: part})  # says what is wrong with it
        for key in part:
            if key not in SETTINGS.get(section, ()):
                from_dict({section: {key: part[key]}})
                raise ConfigError.at(
                    f"{section}.{key}",
                    "no setting of a run between machines, where members' apps, the strategy and the roster "
                    "decide it: leave it out",
                )
    scoring = {"method": "settled", "utilities": list(measured), **sections.get("scoring", {})}
    if gradient is None and scoring["method"] != "reports":
        raise ConfigError.at(
            "scoring.method",
            f"{scoring['method']!r} needs gradient=..., the gradient of the paid utility "
            '(fedmerit.flower.torch_scoring makes it for a PyTorch model): give it, or choose "reports", '
            "scores by what members report in every round",
        )
    training = {"weights": "secret", **sections.get("training", {})}
    if training["weights"] == "roster":
        if roster.weights is None:
            raise ConfigError.at("training.weights", "the roster holds none; expected secret or uniform")
        training["weights"] = roster.weights
    sections |= {"scoring": scoring, "training": training, "partition": {"names": list(roster.names)}}
    every = from_dict(sections).as_dict()
    settings = {section: {key: every[section][key] for key in keys} for section, keys in SETTINGS.items()}
    return {**settings, "partition": {"names": list(roster.names)}}


def server_key_of(roster: Roster, source: str | Path, key: str | Path | None) -> Path | None:
    """Return the file of the server's private key; None if the roster names no server.

    Raises:
        ConfigError: there is no such file, or it holds another key than the roster names.
    """
    if roster.server is None:
        if key is not None:
            raise ConfigError.at("server_key", f"{key} was given, but the roster names no server")
        return None
    path = Path(source).with_name("server.pem") if key is None else Path(key)
    named = PREFIX + roster.server.hex()
    if not path.exists():
        raise ConfigError.at(
            "server_key",
            f"{path} does not exist; expected the private key of the server on the roster, "
            f"{named}. Put it there, or give its file as server_key. If it is lost, {NEW_KEY} and change the "
            "roster (fedmerit keys propose)",
        )
    if (own := public_key(load_key(path))) != roster.server:
        found = f"{path} is the key {PREFIX}{own.hex()}"
        raise ConfigError.at("server_key", f"{found}, but the roster names {named} as the server")
    return path


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
