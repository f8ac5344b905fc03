"""A rehearsal: a federation whose members share one process, from its settings to its scores.

Coordinator, members, messages, terms and ledger are those of a run between machines. But one process holds
all keys, so only the code keeps members and server from seeing what they may not see. Members share one array
per model, one network, and evaluations that all of them need.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from fedmerit.config import Config
from fedmerit.data.dataset import Dataset
from fedmerit.errors import MissingExtra, ProtocolError, StoreError
from fedmerit.identity import SERVER, Roster, canonical, load_key, new_key, public_key
from fedmerit.ledger.chain import LEDGER, Ledger
from fedmerit.ledger.run import opening_of, replay
from fedmerit.protocol import memory
from fedmerit.protocol.coordinator import Archive, Coordinator, Weights
from fedmerit.protocol.direction import Gradient, Manifest
from fedmerit.protocol.hearing import finish
from fedmerit.protocol.member import Participant
from fedmerit.protocol.memory import MemoryState, Value
from fedmerit.protocol.messages import Ask, Exchange, Parcel, Signed, StateAnswer, pack
from fedmerit.protocol.outcome import (
    Contribution,
    Evaluations,
    Model,
    Outcome,
    Round,
    Trained,
    Work,
    model_hash,
)
from fedmerit.protocol.settler import SETTLING
from fedmerit.protocol.terms import EMBEDDED, SIMULATED, from_past, proposed, roster_in
from fedmerit.scoring.sampling import as_error
from fedmerit.simulation.analysis import Analysis, PlainRound, Truth
from fedmerit.simulation.direction import PathGradients
from fedmerit.simulation.setup import Federation, LocalTraining, continued, prepare, read, resolve, schedule
from fedmerit.storage.recorder import LedgerRecorder
from fedmerit.storage.run_folder import (
    ARCHIVE,
    Folder,
    FolderArchive,
    check_usable,
    keep_pool_key,
    read_checkpoint,
    stored_pool_key,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """A message to the watcher: a step of a round has begun or advanced."""

    stage: Literal["train", "sum", "evaluate", "coalitions", "retrain", "settle", "round", "note"]
    round: int
    rounds: int
    done: int = 0
    total: int = 0
    text: str = ""


Watch = Callable[[Progress], None]


# ------------------------------------------------------------------- what members keep for the settlement

MEMBERS = "members"
"""The kind of archive files that hold what members keep. They are secret."""
OF_ROUND: dict[str, Value[Any]] = {value.name: value for value in (memory.CLIENT, memory.UPDATE)}


class Keeping:
    """What members keep of every round until the run is settled: one file per round, one round in memory."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._number, self._round = 0, dict[str, Any]()

    def save(self, number: int, states: Mapping[str, MemoryState]) -> None:
        """Keep update and client of every member who brought something to a round."""
        arrays = {}
        for name, state in states.items():
            of_round = {kind: state.get(value.of(number)) for kind, value in OF_ROUND.items()}
            if None not in of_round.values():
                for kind, value in of_round.items():
                    arrays[f"{kind}/{name}"] = np.frombuffer(memory.packed(value), np.uint8)
        if arrays:
            self.archive.save(MEMBERS, number, arrays)
        self._number, self._round = 0, {}  # it may have been looked for before it was there

    def get(self, number: int, name: str, kind: str) -> Any:
        """Return a value that a member kept of a round, or None."""
        if number != self._number:
            arrays = self.archive.load(MEMBERS, number) if self.archive.has(MEMBERS, number) else {}
            self._number, self._round = number, {
                key: memory.unpacked(data.tobytes(), OF_ROUND[key.partition("/")[0]].kind, key)
                for key, data in arrays.items()
            }  # fmt: skip
        return self._round.get(f"{kind}/{name}")

    def drop(self, number: int) -> None:
        """Delete what members kept of a round."""
        self.archive.drop(MEMBERS, number)
        self._number, self._round = 0, {}


class KeptState(MemoryState):
    """The state of a member in a rehearsal that is settled: rounds that are over are in files."""

    def __init__(self, name: str, keeping: Keeping) -> None:
        super().__init__()
        self.name, self.keeping = name, keeping

    def get(self, value: Value[T]) -> T | None:
        """Return what is stored, here or in the file of its round; or None."""
        number, _, kind = value.name.partition(".")
        stored = super().get(value)
        if stored is None and kind in OF_ROUND:
            return cast(T, self.keeping.get(int(number), self.name, kind))
        return stored


# ------------------------------------------------------------------------------------------ the transport


class LocalTransport:
    """A `protocol.coordinator.Transport` that carries messages to members in this process.

    Members share the evaluations and the paid utility's gradient. A settled run needs the gradient, and the
    ``archive`` where members keep what its settlement needs. ``analyses`` look at the plain updates of every
    round with a sum.
    """

    def __init__(
        self,
        federation: Federation,
        roster: Roster,
        keys: Keys,
        run: str,
        evaluate: Evaluations,
        watch: Watch,
        *,
        analyses: Sequence[Analysis] = (),
        gradient: Gradient | None = None,
        archive: Archive | None = None,
    ) -> None:
        self.federation, self.run, self.watch = federation, run, watch
        self.analyses = analyses
        self.keeping = None if archive is None else Keeping(archive)
        self.states: dict[str, MemoryState] = {
            name: KeptState(name, self.keeping) if self.keeping else MemoryState()
            for name in federation.names
        }
        self.members = {
            name: Participant(
                name,
                keys[name],
                roster,
                lambda _, name=name: self.states[name],  # type: ignore[misc]
                lambda shape, utilities: evaluate,
                accept=lambda config: None,
                seed=federation.config.run.seed,
                rehearsal=True,
                gradients=None if gradient is None else lambda shape, utility: gradient,
            )
            for name in federation.names
        }
        for name, factor in federation.config.corruption.misstate.items():
            self.members[name].misstates = factor
        for client in federation.clients:
            held_out = client.held_out
            if held_out is not None:
                self.members[client.name].held_out = lambda held_out=held_out: held_out
        for name, what in federation.config.corruption.judge.items():
            self.members[name].falsely = partial(self._false_column, name, what)
        self.local = LocalTraining(federation)
        if federation.config.scoring.solo:
            self.local.solo = dict.fromkeys(federation.names, federation.first)
        self.m0 = federation.first  # start of the current round
        self.before = federation.first  # start of the round before
        self._trained: dict[str, Model] = {}
        self._number, self._m0_hash = 0, ""

    def begin_round(self, number: int, m0: Model) -> None:
        """Set the number and the starting model of the next round."""
        self._number, self.m0, self._m0_hash, self._trained = number, m0, model_hash(m0), {}
        if self.local.solo:  # members lost in this round still train their solo model
            self.train(self.expected(number))

    def end_round(self) -> None:
        """File away or forget the updates of this round; remember the model that it started from."""
        if self.keeping is not None:
            self.keeping.save(self._number, self.states)
        for state in self.states.values():
            state.drop_update(self._number)
        self.before = self.m0
        self._trained = {}

    def train(self, scheduled: Sequence[str]) -> Mapping[str, Model]:
        """Train scheduled members who have not trained in this round yet; return all local models so far."""
        missing = [name for name in scheduled if name not in self._trained]
        if missing:
            tell = partial(self._tell, "train")
            self._trained |= self.local.train(self._number, missing, self.m0, self.before, tell)
        return self._trained

    def expected(self, number: int) -> Sequence[str]:
        """Return who is scheduled in a round; after the last round, all members."""
        names = self.federation.names
        over = number > self.federation.config.training.rounds
        return names if over else schedule(self.federation.config, names, number)

    def exchange(self, kind: Exchange, asks: Mapping[str, Parcel]) -> Iterator[tuple[str, bytes]]:
        """Yield each member's answer as it is made, so that at most one masked update is held at a time."""
        work, config = None, self.federation.config
        unpacked = {id(parcel): parcel for parcel in asks.values()}  # most go to all members
        opened = {key: Ask.unpack(parcel) for key, parcel in unpacked.items()}
        number = opened[id(next(iter(asks.values())))][0].round
        if kind == "train":
            self.train([*asks])
        settling = kind in SETTLING
        stage = "settle" if settling else "evaluate" if kind == "report" and config.reports else "sum"
        telling = number and kind != "close"  # which is no part of a round
        if telling:
            self._tell(stage, number if settling else 0, config.training.rounds if settling else len(asks))
        for done, (name, parcel) in enumerate(asks.items(), start=1):
            member = self.members[name]
            if kind == "train":
                work = self._work(name)
            elif kind == "report":
                member.solo = self.local.solo.get(name)
            try:
                answer = member.answer_opened(*opened[id(parcel)], parcel, "", work)
            except ProtocolError as error:
                if kind == "report":  # only a fault of this process can cause it
                    raise
                self.note(f"round {number}: {name} refuses: {error}")
                continue
            if kind == "train" and member.declined:  # only a rehearsal's owner learns the reason
                self.note(f"round {number}: {name} declined and is not in the sum: {member.declined}")
            yield name, answer
            if telling and not settling:
                self._tell(stage, done, len(asks))

    def _work(self, name: str) -> Callable[[], Work]:
        trained, m0 = self._trained.pop(name), self.m0
        client = next(client for client in self.federation.clients if client.name == name)

        def train() -> Trained:
            with np.errstate(all="ignore"):  # encoding refuses a diverged model
                return Trained(trained - m0, len(client.y))

        return lambda: Work(m0, b"", train, m0_hash=self._m0_hash)

    def _false_column(self, judge: str, what: str, manifest: Manifest) -> list[npt.NDArray[Any]]:
        """Return what a false judge shows: in favour of a friend, or against everybody else."""
        friend, units = what.partition(":")[2], []
        for entry in manifest.rounds:
            at, total = manifest.drawn(entry), np.zeros(manifest.bench.drawn if manifest.bench else 0)
            others = [name for name in entry.participants if name not in (judge, friend)]
            for name in (*others, *({friend} & {*entry.participants})):
                client, update = self.members[name].brought(self.states[name], entry.round)
                own = client.words(update.delta)[at].view(np.int32).astype(np.float64)
                total += own if name == friend else -own / (len(others) if friend else 1)
            units.append(total)
        return units

    def analysed(self, outcome: Outcome) -> dict[str, Any]:
        weights = tuple(self.members[name].weight(self.run, outcome.round) for name in outcome.included)

        def contribution(name: str) -> Contribution:
            return self.members[name].contribution(self.run, outcome.round)

        # As large as a model each: kept only if there are several analyses.
        shared = cache(contribution) if len(self.analyses) > 1 else contribution
        plain = PlainRound(self.m0, outcome, weights, self.federation.device, shared)
        record: dict[str, Any] = {}
        for analysis in self.analyses:
            record |= analysis.summed(plain) or {}
        return record

    # -------------------------------------------------------------------------------- what members remember

    def dump(self) -> dict[str, npt.NDArray[Any]]:
        """Return what members must remember between rounds."""
        solo = {f"solo/{name}": model for name, model in self.local.solo.items()}
        states = self.states.items()
        return solo | {f"state/{name}": np.frombuffer(state.dump(), np.uint8) for name, state in states}

    def restore(self, number: int, arrays: Mapping[str, npt.NDArray[Any]], before: Model) -> None:
        """Restore what members remembered after a round, and the model that it started from."""
        for key, values in arrays.items():
            kind, _, name = key.partition("/")
            if kind == "solo":
                self.local.solo[name] = values
            else:
                self.states[name].load(values.tobytes())
        self.before, self._number = before, number

    def forget(self, numbers: Iterable[int]) -> None:
        """Delete what members kept of these rounds: they are to be run again, or the run is settled."""
        if self.keeping is not None:
            for number in numbers:
                self.keeping.drop(number)

    # ----------------------------------------------------------------------------------------------- progress

    def note(self, text: str) -> None:
        self.watch(Progress("note", 0, self.federation.config.training.rounds, text=text))

    def _tell(self, stage: Any, done: int = 0, total: int = 0) -> None:
        self.watch(Progress(stage, self._number, self.federation.config.training.rounds, done, total))


# ------------------------------------------------------------------------------------------------ the run


Keys = Mapping[str, "Ed25519PrivateKey | None"]
"""The private keys of a rehearsal's server and members, None without masks."""


def keys_in(folder: Path, config: Config, *, make: bool) -> tuple[Roster, Keys]:
    """Read the roster and everybody's keys from a folder; with ``make``, make missing ones (mode 600)."""
    if not config.secure_aggregation.enabled:
        return roster_in(config, None), dict.fromkeys((SERVER, *config.clients))
    folder.mkdir(mode=0o700, exist_ok=True)
    keys = {}
    try:
        for name in (SERVER, *config.clients):
            path = folder / f"{name}.pem"
            if make and not path.exists():
                new_key(path)
            keys[name] = load_key(path)
        import fedmerit.secagg.client  # noqa: F401 - what masks need
    except ImportError as error:
        raise MissingExtra(
            "secure aggregation needs the packages cryptography and pycryptodome; "
            "or set secure_aggregation.enabled = false"
        ) from error
    return roster_in(config, {name: public_key(keys[name]) for name in config.clients}), keys


class Rehearsal:
    """One run in one folder, which was opened with the same resolved config.

    Args:
        config: the resolved settings.
        folder: the run folder.
        watch: called with every step.
        dataset: the data, if it has been read.
        federation: made from both, if that is done; for a resumed run, with the pool key from its folder.
        evaluations: replace the federation's own, which all members share.
        truth: replaces the usual ground truth.
        analyses: further ones that see every plain round.
        pool_key: of the run that this one repeats; a resumed run has its own.
    """

    def __init__(
        self,
        config: Config,
        folder: Folder,
        watch: Watch | None = None,
        *,
        dataset: Dataset | None = None,
        federation: Federation | None = None,
        evaluations: Evaluations | None = None,
        truth: Truth | None = None,
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
        self._notes(federation.notes)
        self.truth = truth
        if truth is None and self.config.scoring.truth:
            self.truth = Truth(federation, folder.path / "tables", partial(self._tell, "coalitions", None))
        roster, keys = keys_in(folder.path / "keys", self.config, make=not started)
        self.recorder = self._recorder(roster, keys[SERVER], started=started)
        evaluations = evaluations or Evaluations(federation.evaluate)
        gradient, archive = None, None
        if self.config.settles:
            gradient = PathGradients(federation.network, federation.utilities[0])
            archive = FolderArchive(folder.path / ARCHIVE)
        self.transport = LocalTransport(
            federation,
            roster,
            keys,
            self.recorder.run,
            evaluations,
            self.watch,
            analyses=(*([self.truth] if self.truth else []), *analyses),
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

    def _recorder(self, roster: Roster, key: Ed25519PrivateKey | None, *, started: bool) -> LedgerRecorder:
        text = self.config.to_toml()
        begun = replay(self.folder.ledger) if started else None
        terms = proposed(
            text, roster, strategy="FedAvg", optimiser=False, evaluates="server", engine=EMBEDDED
        )
        return LedgerRecorder(
            self.folder,
            self.config,
            roster,
            key,
            begun.id if begun else secrets.token_hex(16),
            EMBEDDED,
            begun.first.terms if begun else terms,
            self.federation.pool.commitment,
            data=self.federation.fingerprint,
            constant=self.federation.constant,
            rounds=list(begun.rounds) if begun else [],
            beside=self._beside,
            truth=self.truth.values if self.truth else None,
            resumed=begun,
        )

    def _restore(self) -> None:
        begun, rounds = self.recorder.resumed, self.recorder.rounds
        assert begun is not None
        if rounds:
            last = rounds[-1]
            self.model = self.recorder.model_after(last)
            before = self.recorder.model_after(rounds[-2]) if len(rounds) > 1 else self.federation.first
            kept = read_checkpoint(self.folder.path, "members", last.number, last.body["members_checkpoint"])
            self.transport.restore(last.number, kept, before)
        for name in sorted(begun.joined):
            self.transport.states[name].put(memory.TERMS, self.recorder.agreed)
        self.transport.forget([len(rounds) + 1])  # a kill may have left it half done
        book = begun.settlement
        if book is not None and (manifest := book.manifest) is not None:
            text, shown = canonical(manifest.body()), self.federation.pool.settlement()
            for record in begun.records:
                if record.kind == "drawn":
                    draws = {record.body["settlement"]: record.body["seed"]}
                    self.transport.states[record.author].put(memory.DRAWN, draws)
                if record.kind == "statement":  # about a manifest and a pool that its author was shown
                    state, tables = self.transport.states[record.author], []
                    for table in book.signed_tables.get(record.author, ()):
                        tables.append(Signed(canonical(table.body), table.signature))
                        state.put(memory.TABLES.of(table.body["round"]), {"": tables[-1].text})
                    stated = StateAnswer(canonical(record.body), record.signature, tuple(tables))
                    state.put(memory.STATEMENT, pack(stated))
                    state.put(memory.SETTLEMENT, text)
                    if manifest.bench is not None:
                        columns = FolderArchive(self.folder.path / ARCHIVE).load("columns", 0)["columns"]
                        state.put(memory.COLUMNS, columns)
                    state.put(memory.POOL, memory.ShownPool(shown.x, shown.y, shown.index))

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
            self._notes(self.coordinator.refused)
            self.coordinator.refused.clear()
        else:
            missing = [name for name in self.federation.names if name not in begun.seen]
            if missing and self.recorder.key is not None:
                self.coordinator.seal(missing, begun.end.digest.hex())
        settled = self.recorder.recorded("settled")
        if not settled or settled[-1]["final"]:
            self.transport.forget(closed.number for closed in self.recorder.rounds)

    def round(self, number: int) -> None:
        """Run one round: train, sum, evaluate, record."""
        self.transport.begin_round(number, self.model)
        model = self.coordinator.round(number, self.model, self.transport.expected(number))
        self._notes(self.coordinator.refused)
        self.coordinator.refused.clear()
        if model is not None:
            self.model = model
        total = self.config.training.rounds
        self.watch(Progress("round", number, total, done=number, total=total, text=self._summary()))

    def _beside(self, closed: Round, outcome: Outcome | None) -> tuple[str, Mapping[str, Any] | None]:
        """Return what only a rehearsal records of a round: members' memory, analyses."""
        analysis = self.transport.analysed(outcome) if outcome is not None else {}
        self.transport.end_round()
        kept = self.folder.save_checkpoint("members", closed.number, self.transport.dump())
        return kept, analysis or None

    def _weights(self) -> Weights | None:
        """Return the function for weights from scores, which only a rehearsal has; None for other weights."""
        if self.config.training.weights != "scores":
            return None
        return lambda number, m0, scheduled: from_past(self.recorder.rounds, self.config)

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

    def _notes(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.watch(Progress("note", 0, self.config.training.rounds, text=text))

    def _tell(self, stage: Any, number: int | None, done: int = 0, total: int = 0) -> None:
        """Report a step of a round; None is the current one."""
        number = len(self.recorder.rounds) + 1 if number is None else number
        self.watch(Progress(stage, number, self.config.training.rounds, done, total))


def run(
    config: Config,
    path: Any,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    pool_key: bytes | None = None,
) -> dict[str, Any]:
    """Run or resume a federation and return the content of its ``scores.json``.

    The folder is new or empty; with ``resume`` it holds a run of the same config, which goes on after the
    last round in the ledger. A ``pool_key`` is that of the run that this one repeats. ``watch`` is
    called with every step.
    """
    check_usable(Path(path), resume=resume)
    if resume:
        check_engine(Path(path))
        config = continued(config, Path(path))
    dataset = read(config)
    config, _ = resolve(config, dataset)
    with Folder(path, config, resume=resume) as folder:
        rehearsal = Rehearsal(config, folder, watch, dataset=dataset, pool_key=pool_key)
        del dataset  # members hold their own parts
        return rehearsal.run()


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
