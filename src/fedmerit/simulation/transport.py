"""The members of a rehearsal: in one process, they train, mask, evaluate and report as in a run elsewhere.

Each is a `protocol.member.Participant` with its own key and its own memory, and receives the same messages as
a member of a run between machines. Only the code keeps members apart: they share one array per model, train
together on a GPU, and share evaluations that all of them need. This module also lets members get lost: a lost
member stops answering at a given stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgpack
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmerit.config import Config
from fedmerit.data.partitions import ClientData
from fedmerit.errors import MissingExtra, ProtocolError
from fedmerit.identity import SERVER, Roster, canonical, load_key, new_key, public_key
from fedmerit.limits import STAGES
from fedmerit.protocol.clearing import Archive
from fedmerit.protocol.direction import Gradient
from fedmerit.protocol.member import Participant
from fedmerit.protocol.memory import MemoryState
from fedmerit.protocol.messages import Ask, Exchange, Parcel, exchange_of, pack
from fedmerit.protocol.outcome import (
    Contribution,
    Evaluations,
    Model,
    Outcome,
    Round,
    Trained,
    Work,
    file_name,
    model_hash,
)
from fedmerit.protocol.settler import SETTLING
from fedmerit.protocol.terms import Agreed, roster_in
from fedmerit.secagg.state import Released
from fedmerit.simulation.contributions import contribution_on, quotient
from fedmerit.simulation.setup import Federation, losses, schedule
from fedmerit.simulation.training import train_many

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


@dataclass(frozen=True, eq=False)
class PlainRound:
    """A round with each member's update as it was summed, which no server may see.

    Args:
        m0: the model that all members started from.
        outcome: the outcome of the round.
        weights: w_i of the members in the sum, in the order of ``outcome.included``.
        device: where models are evaluated.
    """

    m0: Model
    outcome: Outcome
    weights: tuple[float, ...]
    device: torch.device
    _contribution: Callable[[str], Contribution]

    def contribution(self, name: str) -> Contribution:
        """Return w_i d_i after rounding to integers.

        It is as large as a model. Under masks it is computed anew, and so kept if there are several analyses.
        """
        return self._contribution(name)

    def update(self, name: str) -> Model:
        """Return U_i = w_i d_i / W."""
        return self.contribution(name).update(self.outcome.total_weight)

    @cached_property
    def updates(self) -> Tensor:
        """U_i of the members in the sum, shape (N, P), on the device; all analyses share them."""
        rows = torch.empty(len(self.outcome.included), self.m0.size, device=self.device)
        for row, name in zip(rows, self.outcome.included, strict=True):
            own = contribution_on(self.device, self.contribution(name))
            row.copy_(quotient(own, self.outcome.total_weight))
        return rows


class Analysis(Protocol):
    """Something that looks at plain rounds, which only a rehearsal has."""

    def summed(self, plain: PlainRound) -> Mapping[str, Any] | None:
        """Return what the ledger should record about a round, if anything; called after its reports."""


# -------------------------------------------------------------------------------------------------- keys


@dataclass(frozen=True, repr=False)
class Identities:
    """The private keys of the server and the members of a rehearsal, and the roster of their public keys.

    Without masks there are no keys.
    """

    roster: Roster
    server: Ed25519PrivateKey | None
    members: Mapping[str, Ed25519PrivateKey | None]

    @classmethod
    def none(cls, config: Config) -> Identities:
        """Return the members without keys."""
        return cls(roster_in(config, None), None, dict.fromkeys(config.clients))

    @classmethod
    def in_folder(cls, folder: Path, config: Config, *, make: bool) -> Identities:
        """Read the keys from a folder; with ``make``, make missing ones (mode 600)."""
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


class Keeping:
    """What members keep of every round until the run is settled: one file per round, one round in memory.

    Args:
        archive: holds the files.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self._number, self._round = 0, dict[str, dict[str, Any]]()

    def save(self, number: int, states: Mapping[str, MemoryState]) -> None:
        """Keep update, client and signed outcome of every member who brought something to a round."""
        arrays = {}
        for name, state in states.items():
            client, update = (state.get(file_name(number, what)) for what in ("client", "update"))
            if client is None or update is None:
                continue
            delta, *rest = update
            signed = state.get(file_name(number, "signed"))
            arrays[f"delta/{name}"] = delta
            arrays[f"kept/{name}"] = np.frombuffer(pack([client.dump(), rest, signed]), np.uint8)
        if arrays:
            self.archive.save(MEMBERS, number, arrays)
        self._number, self._round = 0, {}  # it may have been looked for before it was there

    def get(self, number: int, name: str, what: str) -> Any:
        """Return a value that a member kept of a round, or None."""
        if number != self._number:
            self._number, self._round = number, {}
            arrays = self.archive.load(MEMBERS, number) if self.archive.has(MEMBERS, number) else {}
            for member in [key.partition("/")[2] for key in arrays if key.startswith("delta/")]:
                client, rest, signed = msgpack.unpackb(arrays[f"kept/{member}"].tobytes())
                update = [arrays[f"delta/{member}"], *rest]
                self._round[member] = {"client": client, "update": update, "signed": signed}
        return self._round.get(name, {}).get(what)

    def drop(self, number: int) -> None:
        """Delete what members kept of a round."""
        self.archive.drop(MEMBERS, number)
        self._number, self._round = 0, {}


class KeptState(MemoryState):
    """The state of a member in a rehearsal that is settled: rounds that are over are in files."""

    def __init__(self, name: str, keeping: Keeping) -> None:
        super().__init__()
        self.name, self.keeping = name, keeping

    def get(self, name: str) -> Any:
        """Return the value stored under a name, here or in the file of its round; or None."""
        number, _, what = name.partition(".")
        if (found := super().get(name)) is None and what in ("client", "update", "signed"):
            return self.keeping.get(int(number), self.name, what)
        return found


# ------------------------------------------------------------------------------------------ the transport


class LocalTransport:
    """A `protocol.coordinator.Transport` that carries messages to members in this process.

    Args:
        federation: data, network and settings.
        identities: the keys of server and members.
        run: identifier of the run.
        evaluate: the evaluations that all members share.
        watch: called with every step.
        observe: sees every byte that the server receives.
        analyses: look at the plain updates of every round with a sum.
        gradient: of the paid utility, which all members share; needed where the run is settled.
        archive: where members keep what a settlement needs; needed there too.
        stacked: whether all members train at once; None does so on a GPU.
    """

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
        stacked: bool | None = None,
    ) -> None:
        self.federation, self.run, self.watch = federation, run, watch
        self.observe, self.analyses = observe, analyses
        self.keeping = None if archive is None else Keeping(archive)
        self.states = {name: self._state(name) for name in federation.names}
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
        self.local = LocalTraining(federation, stacked=stacked)
        if federation.config.scoring.solo:
            self.local.solo = dict.fromkeys(federation.names, federation.first)
        self.m0 = federation.first  # start of the current round
        self.before = federation.first  # start of the round before
        self._trained: dict[str, Model] = {}
        self._number, self._m0_hash = 0, ""

    def _state(self, name: str) -> MemoryState:
        return MemoryState() if self.keeping is None else KeptState(name, self.keeping)

    def begin_round(self, number: int, m0: Model) -> None:
        """Set the number and the starting model of the next round."""
        self._number, self.m0, self._m0_hash, self._trained = number, m0, "", {}
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
            self._trained |= self.local.train(
                self._number,
                missing,
                self.m0,
                self.before,
                lambda done, total: self._tell("train", done, total),
            )
            while self.local.notes:
                self.note(self.local.notes.pop())
        return self._trained

    def expected(self, number: int) -> Sequence[str]:
        """Return who is scheduled in a round; after the last round, all members."""
        names = self.federation.names
        over = number > self.federation.config.training.rounds
        return names if over else schedule(self.federation.config, names, number)

    def exchange(self, kind: Exchange, asks: Mapping[str, Parcel]) -> Iterator[tuple[str, bytes]]:
        """Yield each member's answer as it is made, so that at most one masked update is held at a time."""
        work, opened, config = None, _Opened(), self.federation.config
        number = opened(next(iter(asks.values())))[0].round
        lost, following = losses(config, number), losses(config, number + 1)
        here = [name for name in asks if not _is_lost(lost, name, kind)]
        if kind == "train":
            self.train(here)
        settling = kind in SETTLING
        stage = "settle" if settling else "evaluate" if kind == "report" and config.reports else "sum"
        if number:
            self._tell(stage, number if settling else 0, config.training.rounds if settling else len(asks))
        for done, name in enumerate(here, start=1):
            member, parcel = self.members[name], asks[name]
            if kind == "train":
                work = self._work(name)
            elif kind == "report":
                member.solo = self.local.solo.get(name)
                member.early = not _is_lost(following, name, "advertise")
            try:
                answer = member.answer_opened(*opened(parcel), parcel, "", work)
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
            if kind == "report":
                self._tell(stage, done, len(asks))

    def _work(self, name: str) -> Callable[[], Work]:
        trained, m0 = self._trained.pop(name), self.m0
        client = next(client for client in self.federation.clients if client.name == name)

        def train() -> Trained:
            with np.errstate(all="ignore"):  # encoding refuses a diverged model
                return Trained(m0, trained - m0, len(client.y))

        return lambda: Work(m0, b"", train, m0_hash=self.m0_hash)

    @property
    def m0_hash(self) -> str:
        """Hash of the model that all members start from, computed once per round."""
        self._m0_hash = self._m0_hash or model_hash(self.m0)
        return self._m0_hash

    def analysed(self, outcome: Outcome) -> dict[str, Any]:
        """Return what the analyses record about a round with a sum."""
        weights = tuple(self.members[name].weight(self.run, outcome.round) for name in outcome.included)

        def contribution(name: str) -> Contribution:
            return self.members[name].contribution(self.run, outcome.round)

        kept = cache(contribution) if len(self.analyses) > 1 else contribution
        plain = PlainRound(self.m0, outcome, weights, self.federation.device, kept)
        said: dict[str, Any] = {}
        for analysis in self.analyses:
            said |= analysis.summed(plain) or {}
        return said

    # -------------------------------------------------------------------------------- what members remember

    def dump(self) -> tuple[dict[str, npt.NDArray[Any]], str]:
        """Return what members must remember between rounds, and the test slice of their reported sums."""
        kept: dict[str, npt.NDArray[Any]] = {f"solo/{name}": one for name, one in self.local.solo.items()}
        totals_on = ""
        for name, state in self.states.items():
            kept[f"released/{name}"] = np.frombuffer(state.released().dump(), np.uint8)
            if released := state.get("summed"):
                kept[f"summed/{name}"] = np.array(released)
            if shown := state.get("shown"):
                kept[f"shown/{name}"] = np.frombuffer(b"".join(shown), np.uint8).reshape(len(shown), -1)
            if (last := self.members[name].sums(self.run, self._number + 1)) is not None:
                totals_on = totals_on or last[0]
                kept |= {f"totals/{name}/{utility}": values for utility, values in last[1].items()}
        return kept, totals_on

    def agree(self, name: str, agreed: Agreed) -> None:
        """Restore the terms that a member agreed to when it joined."""
        self.states[name].put("terms", [agreed.terms, agreed.commitment, agreed.server])

    def has_agreed(self, name: str) -> bool:
        """Return whether a member has joined."""
        return self.states[name].get("terms") is not None

    def restore(self, last: Round, kept: Mapping[str, npt.NDArray[Any]], before: Model) -> None:
        """Restore what members remembered after the last round, and the model that it started from."""
        totals: dict[str, dict[str, npt.NDArray[Any]]] = {}
        for key, values in kept.items():
            kind, name, *rest = key.split("/")
            if kind == "solo":
                self.local.solo[name] = values
            elif kind == "released":
                self.states[name].put_released(Released.load(values.tobytes()))
            elif kind == "summed":
                self.states[name].put("summed", values.tolist())
            elif kind == "shown":
                self.states[name].put("shown", [row.tobytes() for row in values])
            else:
                totals.setdefault(name, {})["/".join(rest)] = values
        for name, sums in totals.items():
            told = (last.number, last.body["m"], last.body["totals_on"])
            self.members[name].restore_sums(self.run, *told, sums)
        self.before, self._number = before, last.number

    def forget(self, numbers: Iterable[int]) -> None:
        """Delete what members kept of these rounds: they are to be run again, or the run is settled."""
        if self.keeping is not None:
            for number in numbers:
                self.keeping.drop(number)

    def restore_statement(self, name: str, body: Mapping[str, Any], signature: bytes) -> None:
        """Restore what a member stated, so that it says the same again."""
        self.states[name].put("statement", pack([canonical(body), signature]))

    # ----------------------------------------------------------------------------------------------- progress

    def note(self, text: str) -> None:
        """Send a note to the watcher."""
        self.watch(Progress("note", 0, self.federation.config.training.rounds, text=text))

    def _tell(self, stage: Any, done: int = 0, total: int = 0) -> None:
        self.watch(Progress(stage, self._number, self.federation.config.training.rounds, done, total))


class _Opened:
    """Unpacks messages, and a message that goes to all members only once."""

    def __init__(self) -> None:
        self._last: tuple[Parcel | None, Any] = (None, None)

    def __call__(self, parcel: Parcel) -> tuple[Ask, Callable[[bytes], bool]]:
        if self._last[0] is not parcel:
            self._last = (parcel, Ask.unpack(parcel))
        ask, signed_by = self._last[1]
        return ask, signed_by


def _is_lost(lost: Mapping[str, str], name: str, kind: Exchange) -> bool:
    """Return whether a member is lost at or before this exchange, and so does not answer it."""
    order = [exchange_of(stage) for stage in STAGES]
    return name in lost and kind in order[order.index(exchange_of(lost[name])) :]


# ------------------------------------------------------------------------------------------ local training

NOISE = 0.01
"""Standard deviation of a noise free rider's update, as a multiple of that of the model's weights."""


@dataclass(eq=False)
class LocalTraining:
    """The local training of a federation's members: one after another on a CPU, stacked on a GPU.

    Args:
        federation: data, network and settings.
        solo: per member, the model that it trains alone from the first one; empty without a solo track.
        notes: what users should be told once.
        stacked: whether all members train at once; None does so on a GPU, where it is faster.
    """

    federation: Federation
    solo: dict[str, Model] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stacked: bool | None = None

    def train(
        self,
        number: int,
        scheduled: Sequence[str],
        start: Model,
        stale: Model,
        tell: Callable[[int, int], None],
    ) -> dict[str, Model]:
        """Return the local model of every scheduled member after training in round ``number``.

        Seeds depend only on run seed, round and member.

        Args:
            number: the round.
            scheduled: names of the members who take part.
            start: the global model.
            stale: the global model of one round earlier, which a stale free rider sends back.
            tell: called with (done, total) members.
        """
        clients = [client for client in self.federation.clients if client.name in scheduled]
        honest = [client for client in clients if client.behaviour == "honest"]
        stacked = self.federation.device.type == "cuda" if self.stacked is None else self.stacked
        groups = [honest] if stacked else [[client] for client in honest]
        models: dict[str, Model] = {}
        for group in filter(None, groups):
            tell(len(models), len(honest))
            models |= self._group(number, group, start)
        tell(len(honest), len(honest))
        for client in clients:
            if client.behaviour == "zero":
                models[client.name] = start
            elif client.behaviour == "stale":
                models[client.name] = stale
            elif client.behaviour == "noise":
                noise = np.random.default_rng(self.federation.seed("noise", number, client.name))
                made_up = noise.normal(0.0, NOISE * float(np.std(start)), start.size)
                models[client.name] = (start + made_up).astype(np.float32)
        return models

    def _group(self, number: int, group: Sequence[ClientData], start: Model) -> dict[str, Model]:
        federation = self.federation
        names = [client.name for client in group]
        seeds = [federation.seed("train", number, name) for name in names]
        data = [federation.training_data(client, number) for client in group]
        trained = train_many(federation.network, start, data, federation.training, seeds)
        if trained.note and trained.note not in self.notes:
            self.notes.append(trained.note)
        if self.solo:
            starts = [self.solo[name] for name in names]
            alone = train_many(federation.network, starts, data, federation.training, seeds)
            self.solo |= dict(zip(names, alone.vectors, strict=True))
        return dict(zip(names, trained.vectors, strict=True))
