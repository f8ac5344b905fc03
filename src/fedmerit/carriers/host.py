"""The server's side of a run between machines, whatever carries its messages: what it checks and keeps."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedmerit.carriers.attendance import Attendance
from fedmerit.carriers.folders import SETTLE, Notes, make_free
from fedmerit.carriers.measures import Gradient, Value, check_slope, definition, evaluator, slope_of
from fedmerit.carriers.shape import Shape
from fedmerit.config import SECTIONS, Config, as_toml, from_dict, of_folder, parse, text_in
from fedmerit.errors import ConfigError, DataError, SettlementError, StoreError
from fedmerit.identity import PREFIX, Roster, load_key, new_key, public_key, read_roster
from fedmerit.ledger.chain import LEDGER
from fedmerit.ledger.run import Run, replay
from fedmerit.protocol.coordinator import Coordinator
from fedmerit.protocol.direction import Slope, along_path
from fedmerit.protocol.messages import LEAST_SAMPLES
from fedmerit.protocol.outcome import Evaluate, Evaluations, Model
from fedmerit.protocol.pool import KEY_BYTES, Pool, Sampling, apart, order_of, parts_of
from fedmerit.protocol.terms import REHEARSALS, proposed
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


class Host:
    """What a server brings to a run, checked when it is made. Its carrier is a subclass.

    The arguments are those of `fedmerit.flower.Contributions`.
    """

    kind: ClassVar[type[Shape]] = Shape
    """The shape that makes what users' functions get."""
    optimiser = False
    """Whether the model is moved on after the sum."""
    defers: ClassVar[bool] = False
    """Whether an exchange costs so much that a sum is acknowledged with the next round's first message."""

    def __init__(
        self,
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
        self.value, self.gradient, self.folder = value, gradient, Path(folder)
        self.roster = read_roster(roster)
        self.server_key = server_key_of(self.roster, roster, server_key)
        self.test, self.patience, self.join, self.page = test, patience, join, page
        measured = getattr(value or gradient, "utilities", ["value"])
        self._settings = settings_of(config, self.roster, gradient, measured, panel=test is None)
        self.scores: dict[str, Any] = {}
        self.notes: list[str] = []
        self.seconds: dict[str, list[float]] = {}

    def _averaging(self) -> str:
        """Return the name of what averages, as in the terms of the run."""
        return "FedAvg"

    # ------------------------------------------------------------------------------------------- a new run

    def _check_named(self, engine: str) -> None:
        """Raise ConfigError if nobody is named as the server of a run between machines."""
        if self.roster.server is None and engine not in REHEARSALS:
            raise ConfigError.at(
                "roster",
                "names no server, and members of a run between machines refuse that, because anybody "
                f"could be their server; {NEW_KEY}, and put it on the roster: fedmerit keys roster --server "
                "for a new one, fedmerit keys propose for one that members have taken part under",
            )

    @contextmanager
    def _new(self, engine: str, shape: Shape, rounds: int, transport: Attendance) -> Iterator[LedgerRecorder]:
        """Begin a run in a new folder, once all that can be tried before anybody trains has worked."""
        self._check_named(engine)
        config, text = self._config(rounds)
        for name in shape.left_out:
            log.warning("array %r is not summed, because it holds no floats: it stays as it is", name)
        pool = self._pool(config, secrets.token_bytes(KEY_BYTES))
        evaluate, slope = self._measures(config, shape)
        if evaluate is not None:  # finds errors in it before anybody trains
            for name, values in evaluate(shape.vector, pool.first).items():
                Sampling(pool.balanced).check(name, values, pool.first)
        if slope is not None:
            check_slope(slope, evaluate, shape.vector, pool.settlement(), config.scoring.utilities[0])
            if opened := self._opened(engine):
                opened.check(pool.settlement())
        make_free(self.folder)
        with Folder(self.folder, config, text=text) as folder:
            recorder = self._recorder(folder, config, text, pool, engine)
            recorder.begin(shape.vector)
            measure = evaluate and Evaluations(evaluate)
            self._coordinator(recorder, pool, transport, measure, slope)
            yield recorder

    def _measures(self, config: Config, shape: Shape) -> tuple[Evaluate | None, Slope | None]:
        """Return what evaluates a model, and its gradient; with a panel the server needs neither."""
        if config.judged:
            return None, None
        evaluate = self.value and evaluator(self.value, shape, config.scoring.utilities)
        return evaluate, slope_of(self.gradient, shape) if self.gradient and config.settles else None

    def _coordinator(
        self,
        recorder: LedgerRecorder,
        pool: Pool,
        transport: Attendance,
        measure: Evaluations | None,
        slope: Slope | None,
    ) -> Coordinator:
        """Return the coordinator of a run, which the transport serves from now on."""
        path, opened = recorder.folder.path, self._opened(recorder.engine)
        coordinator = Coordinator(
            *(recorder, pool, transport, measure),
            refused=Notes(path / "notes.txt"),
            defers=self.defers,
            gradient=slope and along_path(slope),
            archive=FolderArchive(path / ARCHIVE),
            awaited=transport.awaited,
            opening=None if opened is None else partial(opened.add, path, recorder.run),
        )
        transport.coordinator = coordinator
        self.notes, self.seconds = coordinator.refused, transport.seconds
        return coordinator

    def _opened(self, engine: str) -> OpenedSamples | None:
        """Return what this server has shown to these members; None in a simulation."""
        if self.server_key is None or engine in REHEARSALS:
            return None
        return OpenedSamples(self.server_key.resolve(), self.roster)

    # ------------------------------------------------------------------------------------- a run begun before

    def _begun(self, engine: str) -> tuple[Config, Run]:
        """Return the settings, and the run in the folder, which must verify.

        Raises:
            ConfigError: it is a run of another engine or roster.
            StoreError: the folder holds no run.
        """
        path = self.folder.resolve()
        if not (path / LEDGER).is_file():
            raise StoreError(f"{path}: expected the folder of a run to settle, found no {LEDGER}")
        run = verified_run(path)
        config, first = of_folder(path), run.first
        if first.engine != engine:
            raise ConfigError(f"the run in {path} took place in {first.engine!r}, this is {engine!r}")
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

    def _taken_over(self, recorder: LedgerRecorder, coordinator: Coordinator, first: Model) -> Model:
        """Close a round that a server left open when it died, and return the last model.

        Raises:
            SettlementError: no round has a sum, so there is nothing to go on from.
        """
        cut, archive = recorder.cut_off(), recorder.folder.path / ARCHIVE
        if cut is not None:  # of a first round with a sum, the model before it is in the archive
            before = recorder.model_after(recorder.rounds[-1]) if recorder.rounds else first
            coordinator.take_up(cut, before)
        if self._settings["scoring"]["method"] != "reports":
            check_sums(FolderArchive(archive), replay(recorder.folder.ledger))
        model = recorder.model_after(recorder.rounds[-1]) if recorder.rounds else first
        if model.shape != first.shape:
            raise ConfigError(
                f"initial_arrays: expected {model.size} numbers, as the model of round "
                f"{len(recorder.rounds)} in {recorder.folder.path} has, got {first.size}"
            )
        return model

    def _tell_unsettled(self, coordinator: Coordinator) -> bool:
        """Log that a run is not settled, and whether it still can be; return whether that is so."""
        unsettled = coordinator.config.settles and coordinator.settled is None
        if unsettled:
            remedy = "" if any(coordinator.recorder.recorded("end")) else f"; {SETTLE}"
            log.error("the run is not settled: %s%s", self.folder.resolve() / "notes.txt", remedy)
        return unsettled

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
        terms = proposed(
            *(text, self.roster),
            strategy=self._averaging(),
            optimiser=self.optimiser,
            evaluates="members" if self.value is None else "server",
            engine=engine,
        )
        run, commitment = secrets.token_hex(16), pool.commitment
        return LedgerRecorder(folder, config, self.roster, load_key(key), run, engine, terms, commitment)

    def _pool(self, config: Config, key: bytes) -> Pool:
        """Return the test pool, in an order that follows from its key; with a panel, an empty one."""
        if config.judged:
            nothing = np.zeros(0, np.int64)
            utility = definition(self.value or self.gradient, self._settings["scoring"]["utilities"])
            return Pool(
                indices=nothing, x=nothing, y=nothing, slices=0, balanced=False, classes=0,
                utility_hash=utility, key=key,
            )  # fmt: skip
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
    "panel": ("least", "coordinates", "most", "noise", "blur", "epsilon", "delta"),
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
    *,
    panel: bool = False,
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
    usual = "panel" if panel else "settled"
    scoring = {"method": usual, "utilities": list(measured), **sections.get("scoring", {})}
    if panel and scoring["method"] != "panel":
        raise ConfigError.at(
            "scoring.method",
            f"{scoring['method']!r} measures on shared test samples: give test=..., or leave the method out, "
            "and members judge each other on data of their own",
        )
    if gradient is None and scoring["method"] not in ("reports", "panel"):
        raise ConfigError.at(
            "scoring.method",
            f"{scoring['method']!r} needs gradient=..., the gradient of the paid utility "
            '(torch_scoring makes it for a PyTorch model): give it, or choose "reports", '
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
