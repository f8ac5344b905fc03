"""The members of a rehearsal: in one process, they train, mask, evaluate and report as in a run elsewhere.

Each is a `protocol.member.Participant` with its own key and memory. Only the code keeps members apart: they
share one array per model, one network, and evaluations that all of them need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmerit.config import Config
from fedmerit.data.partitions import ClientData
from fedmerit.errors import MissingExtra, ProtocolError
from fedmerit.identity import SERVER, Roster, load_key, new_key, public_key
from fedmerit.protocol import memory
from fedmerit.protocol.coordinator import Archive
from fedmerit.protocol.direction import Gradient
from fedmerit.protocol.measurement import Contribution, Evaluations, Trained, Work
from fedmerit.protocol.member import Participant
from fedmerit.protocol.memory import MemoryState, T, Value
from fedmerit.protocol.messages import Ask, Exchange, Parcel, exchange_of
from fedmerit.protocol.outcome import Model, Outcome, Round, model_hash
from fedmerit.protocol.settler import SETTLING
from fedmerit.protocol.terms import roster_in
from fedmerit.secagg.setting import STAGES, Released
from fedmerit.simulation.models import as_tensor
from fedmerit.simulation.setup import Federation, schedule
from fedmerit.simulation.training import trained

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# ------------------------------------------------------------------------------- progress and plain rounds
Observer = Callable[[str, str, bytes], None]
"""Called with (stage or exchange, member, bytes) for everything that the server receives."""


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
Tell = Callable[[int, int], None]
"""Called with (done, total)."""


@dataclass(frozen=True, eq=False)
class PlainRound:
    """A round with each member's update as it was summed, which no server may see."""

    m0: Model  # that all members started from
    outcome: Outcome
    weights: tuple[float, ...]  # w_i, in the order of ``outcome.included``
    device: torch.device  # where models are evaluated
    _contribution: Callable[[str], Contribution]

    def contribution(self, name: str) -> Contribution:
        """Return w_i d_i after rounding to integers; under masks it is computed anew."""
        return self._contribution(name)

    def update(self, name: str) -> Model:
        """Return U_i = w_i d_i / W."""
        return self.contribution(name).update(self.outcome.total_weight)

    @cached_property
    def updates(self) -> Tensor:
        """U_i of the members in the sum, shape (N, P), on the device; all analyses share them."""
        rows = torch.empty(len(self.outcome.included), self.m0.size, device=self.device)
        for row, name in zip(rows, self.outcome.included, strict=True):
            row.copy_(as_tensor(self.update(name)))
        return rows


class Analysis(Protocol):
    """Something that looks at plain rounds, which only a rehearsal has."""

    def summed(self, plain: PlainRound) -> Mapping[str, Any] | None:
        """Return what the ledger should record about a round, if anything; called after its reports."""


# -------------------------------------------------------------------------------------------------- keys


@dataclass(frozen=True, repr=False)
class Identities:
    """Private keys of a rehearsal's server and members, and the roster; without masks there are no keys."""

    roster: Roster
    server: Ed25519PrivateKey | None
    members: Mapping[str, Ed25519PrivateKey | None]

    @classmethod
    def of(cls, config: Config, folder: Path, *, make: bool) -> Identities:
        """Read the keys from a folder; with ``make``, make missing ones (mode 600)."""
        if not config.secure_aggregation.enabled:
            return cls(roster_in(config, None), None, dict.fromkeys(config.clients))
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
        server = keys.pop(SERVER)
        return cls(roster_in(config, {name: public_key(key) for name, key in keys.items()}), server, keys)


# ------------------------------------------------------------------- what members keep for the settlement

MEMBERS = "members"
"""The kind of archive files that hold what members keep. They are secret."""
OF_ROUND: tuple[Value[Any], ...] = (memory.CLIENT, memory.UPDATE, memory.SIGNED)


class Keeping:
    """What members keep of every round until the run is settled: one file per round, one round in memory."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._number, self._round = 0, dict[str, Any]()

    def save(self, number: int, states: Mapping[str, MemoryState]) -> None:
        """Keep update, client and signed outcome of every member who brought something to a round."""
        arrays = {}
        for name, state in states.items():
            of_round = {value.name: state.get(value.of(number)) for value in OF_ROUND}
            if of_round[memory.CLIENT.name] is not None and of_round[memory.UPDATE.name] is not None:
                for kind, value in of_round.items():
                    arrays[f"{kind}/{name}"] = np.frombuffer(memory.packed(value), np.uint8)
        if arrays:
            self.archive.save(MEMBERS, number, arrays)
        self._number, self._round = 0, {}  # it may have been looked for before it was there

    def get(self, number: int, name: str, kind: str) -> Any:
        """Return a value that a member kept of a round, or None."""
        if number != self._number:
            arrays = self.archive.load(MEMBERS, number) if self.archive.has(MEMBERS, number) else {}
            kinds = {value.name: value.kind for value in OF_ROUND}
            self._number, self._round = number, {
                key: memory.unpacked(data.tobytes(), kinds[key.partition("/")[0]] | None, key)
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
        if stored is None and kind in [of_round.name for of_round in OF_ROUND]:
            return cast(T, self.keeping.get(int(number), self.name, kind))
        return stored


# ------------------------------------------------------------------------------------------ the transport


class LocalTransport:
    """A `protocol.coordinator.Transport` that carries messages to members in this process.

    Members share the evaluations and the paid utility's gradient. A settled run needs the gradient, and the
    ``archive`` where members keep what its settlement needs. ``observe`` sees every byte that the server
    receives; ``analyses`` look at the plain updates of every round with a sum.
    """

    lost: Mapping[str, str] = MappingProxyType({})
    """Members whose answers get lost, as {"client-2": "3:masked"}; set by tests and benchmarks."""

    def __init__(
        self,
        federation: Federation,
        identities: Identities,
        run: str,
        evaluate: Evaluations,
        watch: Watch,
        *,
        observe: Observer | None = None,
        analyses: Sequence[Analysis] = (),
        gradient: Gradient | None = None,
        archive: Archive | None = None,
    ) -> None:
        self.federation, self.run, self.watch = federation, run, watch
        self.observe, self.analyses = observe, analyses
        self.keeping = None if archive is None else Keeping(archive)
        self.states: dict[str, MemoryState] = {
            name: KeptState(name, self.keeping) if self.keeping else MemoryState()
            for name in federation.names
        }
        self.members = {
            name: Participant(
                name,
                identities.members[name],
                identities.roster,
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
        self.local = LocalTraining(federation)
        if federation.config.scoring.solo:
            self.local.solo = dict.fromkeys(federation.names, federation.first)
        self.m0 = federation.first  # start of the current round
        self.before = federation.first  # start of the round before
        self._trained: dict[str, Model] = {}
        self._number, self._m0_hash = 0, ""

    def _is_lost(self, name: str, number: int, kind: Exchange) -> bool:
        if name not in self.lost:
            return False
        at, stage = self.lost[name].split(":")
        order = [exchange_of(later) for later in (*STAGES, "report")]
        return int(at) == number and kind in order[order.index(exchange_of(stage)) :]

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
        here = [name for name in asks if not self._is_lost(name, number, kind)]
        if kind == "train":
            self.train(here)
        settling = kind in SETTLING
        stage = "settle" if settling else "evaluate" if kind == "report" and config.reports else "sum"
        telling = number and kind != "close"  # which is no part of a round
        if telling:
            self._tell(stage, number if settling else 0, config.training.rounds if settling else len(asks))
        for done, name in enumerate(here, start=1):
            member, parcel = self.members[name], asks[name]
            if kind == "train":
                work = self._work(name)
            elif kind == "report":
                member.solo = self.local.solo.get(name)
                member.early = not self._is_lost(name, number + 1, "advertise")
            try:
                answer = member.answer_opened(*opened[id(parcel)], parcel, "", work)
            except ProtocolError as error:
                if kind == "report":  # only a fault of this process can cause it
                    raise
                self.note(f"round {number}: {name} refuses: {error}")
                continue
            if kind == "train" and member.declined:  # only a rehearsal's owner learns the reason
                self.note(f"round {number}: {name} declined and is not in the sum: {member.declined}")
            if self.observe:
                self.observe("masked" if kind == "train" else kind, name, answer)
            yield name, answer
            if telling and not settling:
                self._tell(stage, done, len(asks))
        if telling and not settling and len(here) < len(asks):  # those who are lost are waited for no more
            self._tell(stage, len(asks), len(asks))

    def _work(self, name: str) -> Callable[[], Work]:
        trained, m0 = self._trained.pop(name), self.m0
        client = next(client for client in self.federation.clients if client.name == name)

        def train() -> Trained:
            with np.errstate(all="ignore"):  # encoding refuses a diverged model
                return Trained(m0, trained - m0, len(client.y))

        return lambda: Work(m0, b"", train, m0_hash=self._m0_hash)

    def analysed(self, outcome: Outcome) -> dict[str, Any]:
        """Return what the analyses record about a round with a sum."""
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

    def dump(self) -> tuple[dict[str, npt.NDArray[Any]], str]:
        """Return what members must remember between rounds, and the test slice of their reported sums."""
        arrays: dict[str, npt.NDArray[Any]]
        arrays, totals_on = {f"solo/{name}": model for name, model in self.local.solo.items()}, ""
        for name, state in self.states.items():
            arrays[f"released/{name}"] = np.frombuffer(state.released().dump(), np.uint8)
            if summed := state.get(memory.SUMMED):
                arrays[f"summed/{name}"] = np.array(summed)
            if shown := state.get(memory.SHOWN):
                arrays[f"shown/{name}"] = np.frombuffer(b"".join(shown), np.uint8).reshape(len(shown), -1)
            if (last := self.members[name].last_report(self.run, self._number + 1)) is not None:
                totals_on = totals_on or last.totals_on
                arrays |= {f"totals/{name}/{utility}": values for utility, values in last.totals.items()}
        return arrays, totals_on

    def restore(self, last: Round, arrays: Mapping[str, npt.NDArray[Any]], before: Model) -> None:
        """Restore what members remembered after the last round, and the model that it started from."""
        totals = dict[str, dict[str, npt.NDArray[Any]]]()
        for key, values in arrays.items():
            kind, name, *rest = key.split("/")
            if kind == "solo":
                self.local.solo[name] = values
            elif kind == "released":
                self.states[name].put_released(Released.load(values.tobytes()))
            elif kind == "summed":
                self.states[name].put(memory.SUMMED, values.tolist())
            elif kind == "shown":
                self.states[name].put(memory.SHOWN, [row.tobytes() for row in values])
            else:
                totals.setdefault(name, {})["/".join(rest)] = values
        for name, sums in totals.items():
            on = last.body["m"], last.body["totals_on"]
            self.members[name].restore_sums(self.run, last.number, *on, sums)
        self.before, self._number = before, last.number

    def forget(self, numbers: Iterable[int]) -> None:
        """Delete what members kept of these rounds: they are to be run again, or the run is settled."""
        if self.keeping is not None:
            for number in numbers:
                self.keeping.drop(number)

    # ----------------------------------------------------------------------------------------------- progress

    def note(self, text: str) -> None:
        """Send a note to the watcher."""
        self.watch(Progress("note", 0, self.federation.config.training.rounds, text=text))

    def _tell(self, stage: Any, done: int = 0, total: int = 0) -> None:
        self.watch(Progress(stage, self._number, self.federation.config.training.rounds, done, total))


# ------------------------------------------------------------------------------------------ local training

NOISE = 0.01
"""Standard deviation of a noise free rider's update, as a multiple of that of the model's weights."""


@dataclass(eq=False)
class LocalTraining:
    """The local training of a federation's members, one after another."""

    federation: Federation
    solo: dict[str, Model] = field(default_factory=dict)
    """Per member, the model that it trains alone from the first one; empty without a solo track."""

    def train(
        self, number: int, scheduled: Sequence[str], start: Model, stale: Model, tell: Tell
    ) -> dict[str, Model]:
        """Return the local model of every scheduled member after training from ``start`` in a round.

        ``stale`` is the global model of one round earlier, which a stale free rider sends back.
        """
        clients = [client for client in self.federation.clients if client.name in scheduled]
        honest = [client for client in clients if client.behaviour == "honest"]
        tell(0, len(honest))
        models = self.honest(number, honest, start, tell)
        for client in clients:
            if client.behaviour == "zero":
                models[client.name] = start
            elif client.behaviour == "stale":
                models[client.name] = stale
            elif client.behaviour == "noise":
                generator = np.random.default_rng(self.federation.seed("noise", number, client.name))
                noise = generator.normal(0.0, NOISE * float(np.std(start)), start.size)
                models[client.name] = (start + noise).astype(np.float32)
        return models

    def honest(
        self, number: int, clients: Sequence[ClientData], start: Model, tell: Tell
    ) -> dict[str, Model]:
        """Train these members, and their solo models."""
        federation, models = self.federation, dict[str, Model]()
        for done, client in enumerate(clients, start=1):
            seed = federation.seed("train", number, client.name)
            how = *federation.training_data(client, number), federation.training, seed
            models[client.name] = trained(federation.network, start, *how)
            if self.solo:
                self.solo[client.name] = trained(federation.network, self.solo[client.name], *how)
            tell(done, len(clients))
        return models
