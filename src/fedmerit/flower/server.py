"""The server's side: a wrapper around an averaging strategy.

::

    strategy = fedmerit.flower.Contributions(
        FedAvg(), roster="roster.toml", test=(images, labels), value=evaluate, gradient=slope,
        folder="runs/ours",
    )
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)

Attributes of the wrapped strategy can be read through the wrapper: ``strategy.fraction_train``.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result, Strategy

from fedmerit.config import Config, as_toml, from_dict
from fedmerit.errors import ConfigError, DataError, ProtocolError, StoreError
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
from fedmerit.flower.grid import SecureGrid
from fedmerit.identity import (
    PREFIX,
    Member,
    Roster,
    load_key,
    new_key,
    public_key,
    read_roster,
    write_roster,
)
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.recorder import LedgerRecorder
from fedmerit.limits import check_schedule
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.direction import Slope, along_path
from fedmerit.protocol.messages import LEAST_SAMPLES
from fedmerit.protocol.outcome import Evaluate, Evaluations, Model, mean
from fedmerit.protocol.pool import Pool, Sampling, Slice, parts_of
from fedmerit.protocol.terms import FLOWER, SIMULATED, least_scheduled, proposed
from fedmerit.report.page.html import page_of_run
from fedmerit.scoring.files import LEDGER
from fedmerit.storage.archive import ARCHIVE, FolderArchive
from fedmerit.storage.opened_samples import OpenedSamples
from fedmerit.storage.run_folder import Folder, checkpoint_in, held, read_checkpoint, write

# ------------------------------------------------------------------------------------------------- folders

_FILES = ("config.toml", "notes.txt", "scores.csv", "scores.json")
_LEDGER = (f"{LEDGER}-wal", f"{LEDGER}-shm", LEDGER)
"""The ledger's files; the ledger goes last, because it shows that the rest may be removed."""
_KEYS = ("pool.key", "server.pem")
NEW_KEY = "make a key (fedmerit keys new --server server.pem)"
_KINDS = {"run", "pool", "join"}
"""The kinds of records of a start that reached no round."""


def make_free(path: Path) -> None:
    """Remove what is left of a start that too few members joined; refuse a folder that holds anything else.

    Before the first schedule, no member was asked for anything, so nothing is lost. A folder whose ledger
    holds a schedule is never touched.
    """
    if not path.exists() or {item.name for item in path.iterdir()} <= {".lock"}:
        return
    named = (*_FILES, *(f"keys/{key}" for key in _KEYS), "keys", "checkpoints", *_LEDGER)
    left = [path / name for name in named]
    strange = not {*path.iterdir(), *path.glob("*/*")} <= {*left, path / ".lock"}
    if strange or not (path / LEDGER).exists():
        raise _used(path)
    try:
        with held(path):
            if not _came_to_nothing(path / LEDGER):
                raise _used(path)
            for item in left:
                if item.is_dir():
                    item.rmdir()
                else:
                    item.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be used again as a run folder: {error}") from error


def _came_to_nothing(path: Path) -> bool:
    with Ledger(path, read_only=True) as ledger:
        records = list(ledger.records())
    engines = {record.body.get("engine") for record in records if record.kind == "run"}
    return {record.kind for record in records} <= _KINDS and engines in ({FLOWER}, {SIMULATED})


def _used(path: Path) -> StoreError:
    return StoreError(
        f"{path}: not empty, and a Flower run cannot be resumed: give a new folder. To go on from the last "
        f"model in this one, start with fedmerit.flower.last_model({str(path)!r}, initial_arrays)"
    )


def last_model(folder: str | Path, like: ArrayRecord) -> ArrayRecord:
    """Return the model after the last round in a run folder, from which to start a new run in a new folder.

    It comes from the checkpoint of the last round in the ledger. If the strategy has a server optimiser, this
    is the average before the optimiser acted; the optimiser's own state is not kept.

    Args:
        folder: the folder of the run whose server died.
        like: a model with the same names, shapes and types, such as a fresh one; arrays of integers are
            taken from it.

    Raises:
        LedgerError: the folder holds no readable ledger.
        StoreError: no round is over in that folder, its checkpoint is gone or damaged, or it belongs to
            another model than ``like``.
    """
    path, shape = Path(folder), Shape.of(like)
    with Ledger(path / LEDGER, read_only=True) as ledger:
        rounds = list(ledger.records("round"))
    if not rounds:
        raise StoreError(f"{path}: no round is over; start from the first model, in a new folder")
    number, digest = int(rounds[-1].body["round"]), str(rounds[-1].body["checkpoint"])
    model = read_checkpoint(checkpoint_in(path, "model", number), number, digest)["model"]
    expected = shape.vector.size
    if model.shape != (expected,):
        raise StoreError(
            f"{path}: the model of round {number} has {model.size} numbers, but the given one has {expected}"
        )
    return shape.record(model)


def rehearsal(folder: str | Path, names: Sequence[str]) -> Path:
    """Make everybody's keys and the roster for a simulation, once; return the roster's file.

    In a simulation nobody has a machine of its own, so one folder holds all private keys. The nodes find it
    by ``fedmerit-rehearsal`` in the run config; node k of the simulation is the k-th member.

    Args:
        folder: new, or made here before.
        names: of the members, as many as there are simulated SuperNodes.

    Raises:
        ConfigError: the folder has a roster of other members, or no folder was given.
    """
    if not str(folder):
        raise ConfigError("rehearsal: expected a folder for everybody's keys, got an empty text")
    path = Path(folder) / "roster.toml"
    if path.exists():
        if (there := read_roster(path).names) != tuple(names):
            raise ConfigError(
                f"{path} lists {', '.join(there)}, expected {', '.join(names)}: take a new folder"
            )
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    members = [Member(name, new_key(path.with_name(f"{name}.pem"))) for name in names]
    write_roster(path, Roster(members, new_key(path.with_name("server.pem"))))
    return path


# -------------------------------------------------------------------------------------------- the strategy

log = logging.getLogger("fedmerit")
AVERAGING = ("FedAvg", "FedProx")
OPTIMISERS = ("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedOpt")
REFUSED = {
    "Krum": "it compares members' updates with each other",
    "MultiKrum": "it compares members' updates with each other",
    "Bulyan": "it compares members' updates with each other",
    "FedMedian": "it needs the median of every coordinate over members' updates",
    "FedTrimmedAvg": "it sorts every coordinate of members' updates",
    "QFedAvg": "it weighs members by their losses and needs each one's update",
    "FedXgbBagging": "trees are not averaged",
    "FedXgbCyclic": "trees are not averaged",
}


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
        missing: what a missed round counts in the sum.
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
        blocks: int = 8,
        detail: Literal["rounds", "run"] = "rounds",
        naming: bool = True,
        window_days: float = 14.0,
        game: Literal["additive", "renormalised"] = "additive",
        missing: Literal["zero", "own-mean"] = "zero",
        visibility: Literal["all", "coordinator"] = "all",
        errors: Literal["joint", "plain"] = "joint",
        patience: float = 120.0,
        join: float = 300.0,
        page: bool = True,
        truth: Sequence[str] = (),
        server_key: str | Path | None = None,
    ) -> None:
        check_strategy(strategy)
        if own := _own_aggregation(strategy):
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
        scored_by = _method(method, gradient)
        self.strategy, self.value, self.gradient, self.folder = strategy, value, gradient, Path(folder)
        self.roster = roster if isinstance(roster, Roster) else read_roster(roster)
        self.server_key = _server_key(self.roster, roster, server_key)
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
                **_utilities(value or gradient, utilities, whole),
                "game": game,
                "missing": missing,
                "visibility": visibility,
                "errors": errors,
            },
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
        pool = self._pool(config)
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
            _check_slope(slope, evaluate, shape.vector, pool.settlement(), config.scoring.utilities[0])
        opened = None
        if config.settles and self.server_key is not None and engine_of(grid) == FLOWER:
            opened = OpenedSamples(self.server_key.resolve(), self.roster)
            opened.check(pool.settlement())
        make_free(self.folder)
        weighted_by = getattr(self.strategy, "weighted_by_key", "num-examples")
        available = int(getattr(self.strategy, "min_available_nodes", 0))
        secure = SecureGrid(grid, shape, self.patience, self.join, weighted_by, available)
        with Folder(self.folder, config, text=text) as folder:
            recorder = self._recorder(folder, config, text, pool, engine_of(grid))
            recorder.begin(shape.vector)
            measure, notes = evaluate and Evaluations(evaluate), Notes(folder.path / "notes.txt")
            coordinator = Coordinator(
                *(recorder, pool, secure, measure),
                refused=notes,
                gradient=slope and along_path(slope),
                archive=FolderArchive(folder.path / ARCHIVE),
                awaited=secure.awaited,
            )
            secure.coordinator, self.notes, self.seconds = coordinator, coordinator.refused, secure.seconds
            self._gather(secure, max(least_scheduled(config), available))
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
                self._end_early(coordinator, secure, opened)
                raise
            finally:
                self.scores = recorder.write_scores()
            result.arrays = shape.record(model)
            if not any(one.reports for one in recorder.rounds):
                log.error("no round was scored: %s", "; ".join(self.notes[-3:]) or "nobody reported")
            self._finish(coordinator, model, opened)
            self.scores = recorder.write_scores()
        if config.settles and coordinator.settled is None:
            log.error("the run is not settled: %s", self.folder.resolve() / "notes.txt")
        else:
            log.info("ledger and scores: fedmerit score %s", self.folder.resolve())
        if self.page:
            log.info("%s", page_of_run(self.folder))
        return result

    def _finish(self, coordinator: Coordinator, model: Model, opened: OpenedSamples | None) -> None:
        """End the run; if its settlement opened the test samples, remember that."""
        try:
            coordinator.finish(model)
        finally:
            if opened is not None and coordinator.recorder.recorded("opening"):
                try:
                    opened.add(self.folder, coordinator.pool.settlement())
                except StoreError as error:
                    log.warning(
                        "the next run cannot tell which test samples were opened in this one: %s", error
                    )

    def _end_early(self, coordinator: Coordinator, secure: SecureGrid, opened: OpenedSamples | None) -> None:
        """Close the ledger of a run that an error ended between two rounds, and ask the members to sign it.

        Before the first round there is nothing to close. If the error came in the middle of a round, the
        ledger stays open and shows that.
        """
        if secure.model is None or len(coordinator.recorder.rounds) != secure.rounds:
            return
        try:
            self._finish(coordinator, secure.model, opened)
        except Exception:  # the caller should see the error that ended the run
            log.exception("the ledger has no last record: it could not be written")

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
            optimiser=not _averages(self.strategy),
            evaluates="members" if self.value is None else "server",
            engine=engine,
        )
        run, commitment = secrets.token_hex(16), pool.commitment
        return LedgerRecorder(folder, config, self.roster, load_key(key), run, engine, terms, commitment)

    def _pool(self, config: Config) -> Pool:
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
        order = np.random.default_rng(secrets.randbits(128)).permutation(len(y))
        return Pool(
            indices=order,
            x=x[order],
            y=y[order],
            slices=slices,
            balanced=False,
            classes=0,
            utility_hash=definition(self.value or self.gradient, self._settings["scoring"]["utilities"]),
            key=secrets.token_bytes(32),
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


def _method(given: str | None, gradient: Gradient | None) -> str:
    """Return how members are scored; raise ConfigError if that needs a gradient and there is none."""
    if gradient is None and given is None:
        raise ConfigError(
            "method: expected gradient=..., the gradient of the paid utility, for scores that are settled "
            'after the last round; or method="reports", for scores by what members report in every round'
        )
    if gradient is None and given != "reports":
        raise ConfigError(
            f"method: {given!r} needs gradient=..., the gradient of the paid utility "
            "(fedmerit.flower.torch_scoring makes it for a PyTorch model)"
        )
    return given or "settled"


def _utilities(
    measure: Value | Gradient | None, utilities: Sequence[str] | None, whole: Sequence[str]
) -> dict[str, Any]:
    """Return what is measured, named by the user or by `torch_scoring`, and which are of all samples."""
    if isinstance(utilities, str):
        raise ConfigError(f"utilities: expected a list of names, got {utilities!r}: write [{utilities!r}]")
    known = {"utilities": ["value"], **getattr(measure, "scoring", {})}
    if utilities is not None:
        known = {**(known if list(utilities) == known["utilities"] else {}), "utilities": list(utilities)}
    known |= {"whole": list(whole)} if whole else {}
    return {name: given for name, given in known.items() if given}


FEW = 16
"""Test samples on which ``value`` and ``gradient`` are compared before anybody trains."""


def _check_slope(slope: Slope, evaluate: Evaluate | None, model: Model, shown: Slice, utility: str) -> None:
    """Raise ConfigError unless the user's gradient works and is about what the user's value measures."""
    few = Slice(index=shown.index, x=shown.x[:FEW], y=shown.y[:FEW], salts=b"", path=())
    every = np.arange(len(few.y))
    found, uphill = slope(model, few, every)
    if not (np.isfinite(found) and np.isfinite(uphill).all()):
        raise ConfigError("gradient: of the first model, it returns numbers that are not finite")
    if evaluate is not None:
        expected = mean(evaluate(model, few)[utility])
        if not abs(found - expected) <= 1e-3:
            raise ConfigError(
                f"gradient: it says that the mean {utility} of {len(few.y)} test samples is {found:g}, but "
                f"value says {expected:g}: both must measure the same"
            )
    _check_rise(lambda at: slope(at, few, every)[0], model, found, uphill)


RISE = 1e-3
"""By how much a small step along the gradient is to raise the utility, by the gradient's own account."""
LEAST_RISE = 1e-5
"""What rounding may hide: where the longest step promises less, nothing is checked."""
LONGEST = 0.05
"""The longest step, as a part of the model's own length."""


def _check_rise(
    measured: Callable[[Model], float], model: Model, value: float, uphill: npt.NDArray[Any]
) -> None:
    """Raise ConfigError unless a small step along the gradient raises the utility about as it promises.

    A wrong sign, or a sum in place of a mean, is found; a factor of 2 is not. Nothing is checked where the
    utility is nearly 0 or 1, or a shorter step says something else: there it is curved too much.
    """
    steepest = float(np.linalg.norm(uphill.astype(np.float64)))
    longest = LONGEST * float(np.linalg.norm(model.astype(np.float64)))
    rise = min(RISE, value / 10, (1 - value) / 10, steepest * longest)
    if rise < LEAST_RISE:
        return
    length = rise / steepest

    def kept(length: float) -> float:
        """Return which part of the promised change there is."""
        step = (uphill * (length / steepest)).astype(np.float32)
        return (measured(model + step) - measured(model - step)) / (2 * length * steepest)

    found, shorter = kept(length), kept(length / 4)
    if abs(found - shorter) <= max(1.0, abs(found), abs(shorter)) / 4 and not 0.5 <= found <= 2:
        raise ConfigError(
            f"gradient: a small step along it changes the mean utility by {found:.2g} times what it "
            "promises: expected the gradient of the mean over the given samples, of a utility that is better "
            "the higher it is (not of a loss, and not of a sum)"
        )


def _server_key(roster: Roster, given: Any, key: str | Path | None) -> Path | None:
    """Return the file of the server's private key; None if the roster names no server.

    Raises:
        ConfigError: there is no such file, or it holds another key than the roster names.
    """
    if roster.server is None:
        if key is not None:
            raise ConfigError(f"server_key: {key} was given, but the roster names no server")
        return None
    if key is None and isinstance(given, Roster):
        raise ConfigError("server_key: expected the file of the server's private key, got none")
    path = Path(given).with_name("server.pem") if key is None else Path(key)
    named = PREFIX + roster.server.hex()
    if not path.exists():
        raise ConfigError(
            f"server_key: {path} does not exist; expected the private key of the server on the roster, "
            f"{named}. Put it there, or give its file as server_key. If it is lost, {NEW_KEY} and change the "
            "roster (fedmerit keys propose)"
        )
    if (found := public_key(load_key(path))) != roster.server:
        raise ConfigError(
            f"server_key: {path} is the key {PREFIX}{found.hex()}, but the roster names {named} as the server"
        )
    return path


def check_strategy(strategy: Strategy) -> None:
    """Raise `ConfigError` if a strategy needs to see individual updates, or is not known to average."""
    for kind in type(strategy).__mro__:
        if kind.__name__ in REFUSED:
            raise ConfigError(
                f"{kind.__name__} cannot run under secure aggregation: {REFUSED[kind.__name__]}; "
                f"expected one that averages: {', '.join(AVERAGING + OPTIMISERS)}"
            )
    if not isinstance(strategy, FedAvg):
        raise ConfigError(
            f"{type(strategy).__name__} is not known to average; expected one of "
            f"{', '.join(AVERAGING + OPTIMISERS)}, or a subclass"
        )


def engine_of(grid: Grid) -> str:
    """Return what the ledger calls a run over this grid.

    In Flower's simulation, the grid of nodes is in the server's own memory. Behind any other grid, the
    machines may belong to anybody.
    """
    simulated = any(kind.__name__ == "InMemoryGrid" for kind in type(grid).__mro__)
    return SIMULATED if simulated else FLOWER


def _own_aggregation(strategy: Strategy) -> str:
    """Return the name of the user's class that overrides ``aggregate_train``, or an empty text."""
    for kind in type(strategy).__mro__:
        if "aggregate_train" in vars(kind):
            return "" if kind.__module__.partition(".")[0] == "flwr" else kind.__name__
    return ""


def _averages(strategy: Strategy) -> bool:
    """Return whether the strategy's next model is M itself, because it aggregates as FedAvg does."""
    return type(strategy).aggregate_train is FedAvg.aggregate_train
