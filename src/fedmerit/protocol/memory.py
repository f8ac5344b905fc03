"""What a member remembers of a run between two messages.

`Value` names every value and its type. `MemberState` is the interface of what stores them: `MemoryState` in
memory, `fedmerit.storage.member_state` in sealed files beside the key.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, get_origin

import numpy as np
import numpy.typing as npt
from msgspec import MsgspecError, Raw, Struct, field, msgpack

from fedmerit.errors import BindingError, MessageError, RefusedError
from fedmerit.identity import Roster, canonical, content
from fedmerit.protocol.direction import Gradient, Manifest
from fedmerit.protocol.messages import Accord
from fedmerit.protocol.terms import FLOWER, REHEARSALS, Agreed, Lineage
from fedmerit.secagg.plain import PlainClient
from fedmerit.secagg.setting import Released

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger("fedmerit")
T = TypeVar("T")
Gradients = Callable[[Any, str], Gradient]
"""(shape noted by training, name of the utility) -> the gradient of its mean over a path."""
Array = npt.NDArray[Any]
HeldOut = Callable[[], tuple[Array, Array]]
"""Returns a judge's own samples, which it does not train on, and their labels."""

# ------------------------------------------------------------------------------------------ what is stored


@dataclass(frozen=True)
class Value(Generic[T]):
    """The name and the type of a value; one of a round has the number of that round in its name."""

    name: str
    kind: Any

    def of(self, number: int) -> Value[T]:
        """Return the value of a round."""
        return Value(f"{number:04d}.{self.name}", self.kind)


class Known(Struct):
    """What a member remembers from run to run."""

    released: Released = field(default_factory=Released)  # what it must never do again
    lineages: dict[str, Lineage] = field(default_factory=dict)  # by federation
    roster: bytes | None = None  # hash of the roster that it last took part under, between machines
    stopped: str = ""  # why it answers nothing more: others have seen a later state than this one

    def lineage(self, roster: Roster) -> Lineage:
        """Return what it remembers of a federation; it counts once it is among the ``lineages``."""
        return self.lineages.get(roster.lineage) or Lineage()


class SignedHead(Struct, frozen=True):
    """The last head that a member signed."""

    round: int
    head: str


class ShownPool(Struct, frozen=True):
    """The opened test pool."""

    x: Array
    y: Array
    index: int


class TrainedUpdate(Struct, frozen=True):
    """What a member masked, and what its evaluations must know about the model's shape."""

    delta: Array
    shape: Any


class GivenReport(Struct, frozen=True):
    """The answer to a request for a report, and the sums behind cumulative standard errors."""

    asked: bytes  # hash of the request
    reply: bytes
    round: int
    m: str  # hash of the model M
    totals_on: str  # id of the test slice
    totals: dict[str, Array]


class OwnProducts(Struct, frozen=True):
    """A member's part in the gain of a round, and what is wrong with the direction, if anything.

    With words of 8 bytes also the products of its masks, by peer. All products are text.
    """

    product: str = "0"
    blocks: list[float] = []
    problem: str = ""
    pairs: dict[str, str] = {}


class JudgedRound(Struct, frozen=True):
    """A judge's gradient of a round as it shows it, before it is rounded."""

    units: Array
    removed: float  # the product of the sum with what innovation took away
    variance: float  # of what the sum gives with this, because it is at a few coordinates alone
    empty: float
    grand: float


TERMS: Final = Value[Agreed]("terms", Agreed)
LEFT: Final = Value[str]("left", str)  # why it has left the run
SEEN: Final = Value[SignedHead]("seen", SignedHead)
FLOOR: Final = Value[int]("floor", int)  # rounds before this one are over
SUMMED: Final = Value[list[int]]("summed", list[int])  # rounds that it released shares for
SHOWN: Final = Value[list[bytes]]("shown", list[bytes])  # test samples, by 8 bytes each
LAST: Final = Value[int]("last", int)  # the last round, if it signed that the run ends early
MANIFESTS: Final = Value[dict[str, bytes]]("manifests", dict[str, bytes])
"""The signed messages with which manifests were shown, by their digest."""
SETTLEMENT: Final = Value[bytes]("settlement", bytes)  # the manifest that it accepted
POOL: Final = Value[ShownPool]("pool", ShownPool)
AGREED: Final = Value[Accord]("agreed", Accord)  # its answer
STATEMENT: Final = Value[bytes]("statement", bytes)  # its answer
OPENED: Final = Value[dict[str, str]]("opened", dict[str, str])  # by draw: for which list, by its hash
DRAWN: Final = Value[dict[str, str]]("drawn", dict[str, str])  # by draw: the only seed that it signed
SEALED: Final = Value[str]("sealed", str)  # the seed of the draw for which it handed over keys
HELD_OUT: Final = Value[dict[str, Any]]("held-out", dict[str, Any])  # what it committed to as a judge
JUDGING: Final = Value[bytes]("judging", bytes)  # the rounds that it judges, without directions
SHOWING: Final = Value[bytes]("showing", bytes)  # its answer: what it shows as a judge, by hash
COLUMN: Final = Value[Array]("column", Array)  # what it shows as a judge
LISTED: Final = Value[dict[str, str]]("listed", dict[str, str])  # the list for which it showed it, by judge
COLUMNS: Final = Value[Array]("columns", Array)  # of all judges
SETTLED: Final = Value[bytes]("settled", bytes)  # what it countersigned
CLOSES: Final = Value[int]("closes", int)  # when the window closes that it signed
# of each round:
CLIENT: Final = Value[Any]("client", bytes)  # the state machine, with its secrets, or its dump
BEGAN: Final = Value[str]("began", str)  # hash of the model that it began to train
M0: Final = Value[Array]("m0", Array)
UPDATE: Final = Value[TrainedUpdate]("update", TrainedUpdate)
ASKED: Final = Value[bytes]("asked", bytes)  # hash of the only request for a report that it answers
REPORT: Final = Value[GivenReport]("report", GivenReport)
SIGNED: Final = Value[dict[str, str]]("signed", dict[str, str])  # the outcome that it signed for
STATED: Final = Value[OwnProducts]("stated", OwnProducts)
TABLES: Final = Value[dict[str, bytes]]("table", dict[str, bytes])  # by what a direction is for
SUM: Final = Value[Array]("sum", Array)  # X, in a run with a panel
JUDGED: Final = Value[JudgedRound]("judged", JudgedRound)  # its gradient at the drawn coordinates

KEPT = tuple(value.name for value in (UPDATE, CLIENT, SIGNED, STATED, TABLES, SUM, JUDGED))
"""What a member keeps of every round until a settlement is over; with a panel also M0."""
LARGE: Final = (CLIENT, M0, UPDATE, SUM)
"""What is of a round, and as large as a model."""
_KINDS = {value.name: value.kind for value in [*globals().values()] if isinstance(value, Value)}


def packed(value: Any) -> bytes:
    """Return a value as bytes: arrays little-endian, a client and what was released as their dumps."""
    return msgpack.encode(value, enc_hook=_plain)


def unpacked(data: bytes, kind: Any, what: str) -> Any:
    """Return the value that `packed` wrote; ``what`` is for the error message."""
    try:
        return msgpack.decode(data, type=kind, dec_hook=_restored)
    except (MsgspecError, ValueError, RecursionError) as error:
        raise MessageError(f"not {what}: {type(error).__name__}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        values = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return values.dtype.str, value.shape, values.reshape(-1).data.cast("B") if values.size else b""
    return value.item() if isinstance(value, np.generic) else value.dump()


def _restored(kind: Any, stored: Any) -> Any:
    if kind is Released:
        return Released.load(stored)
    if get_origin(kind) is not np.ndarray:
        raise TypeError(f"no value of type {kind}")
    dtype, shape, data = stored
    return np.frombuffer(data, dtype).reshape(shape).copy()


class MemberState(Protocol):
    """What one member remembers of one run between messages. A member writes first and answers afterwards.

    A state returns a client as it is or as its dump.
    """

    @property
    def counter(self) -> int:
        """A number greater than in any message that this member sent before."""

    @property
    def known(self) -> Known:
        """What the member remembers from run to run; `save` makes changes count."""

    def held(self) -> AbstractContextManager[None]:
        """Return a lock that lets one message at a time through."""

    def check(self) -> None:
        """Raise StoreError if anything is lost that this member needs to answer."""

    def open(self) -> None:
        """Prepare to store a run."""

    def save(self) -> None:
        """Write what was set; only then may the answer leave."""

    def room(self, size: int) -> None:
        """Raise StoreError unless so many more bytes may be stored."""

    def put(self, value: Value[T], given: T | None) -> None:
        """Set a value, or delete it with None; `save` makes it count."""

    def get(self, value: Value[T]) -> T | None:
        """Return what is stored, or None."""

    def last(self, value: Value[T], before: int) -> T | None:
        """Return what is stored of the latest round before this one that has such a value, or None."""

    def add_kept(self, *lines: str) -> None:
        """Add lines about what the member was shown, did and said, for a comparison with the ledger."""

    def drop_rounds(self, *, before: int, keep: Sequence[str] = ()) -> None:
        """Delete what is stored of rounds before this one; but not the latest report, nor what to keep."""


class Signatory:
    """A member with its key, its own roster file and the word of its owner."""

    def __init__(
        self,
        name: str,
        identity: Ed25519PrivateKey | None,
        roster: Roster,
        gradients: Gradients | None,
        rehearsal: bool,
    ) -> None:
        if identity is None and not rehearsal:
            raise RefusedError("has no key: only a rehearsal can do without one", member=name)
        self.name, self.identity, self.roster = name, identity, roster
        self.gradients, self.rehearsal = gradients, rehearsal
        self.misstates: float | None = None  # in a rehearsal, the factor by which it misstates
        self.held_out: HeldOut | None = None  # its samples as a judge of a panel, where it is one
        self.falsely: Callable[[Manifest], list[Array]] | None = None  # what it shows as a false judge
        self.seed: int | None = None  # of a rehearsal that must be repeatable
        self.without: tuple[str, ...] = ()  # whose answers its owner agrees to close a settlement without

    def secret(self, purpose: str, run: str) -> bytes:
        """Return 32 bytes that follow from this member's key alone; in a rehearsal from its seed."""
        if self.rehearsal:
            return hashlib.sha256(canonical([purpose, self.name, self.seed])).digest()
        return hashlib.sha256(self.sign(purpose, {"run": run})).digest()

    def sign(self, kind: str, body: Mapping[str, Any]) -> bytes:
        """Sign a record of this member; return empty bytes if it has no key."""
        return b"" if self.identity is None else self.identity.sign(content(self.name, kind, body))

    def is_signed(self, name: str, kind: str, body: Mapping[str, Any], signature: bytes) -> bool:
        """Return whether a member signed a record; True in a rehearsal where nothing is signed."""
        if name not in self.roster.names:
            return False
        return self.identity is None or self.roster.verifies(name, signature, content(name, kind, body))

    def between(self, terms: Mapping[str, Any]) -> bool:
        """Return whether a run is one between machines."""
        return not self.rehearsal and terms.get("engine", FLOWER) not in REHEARSALS

    def client(self, state: MemberState, number: int) -> PlainClient | None:
        """Return the state machine of a round, or None."""
        stored: Any = state.get(CLIENT.of(number))
        if not isinstance(stored, bytes):
            client: PlainClient | None = stored
            return client
        if self.identity is None:
            return PlainClient.restore(stored, released=state.known.released)
        from fedmerit.secagg.client import Client

        return Client.restore(stored, self.identity, released=state.known.released, counter=state.counter)

    def brought(self, state: MemberState, number: int) -> tuple[PlainClient, TrainedUpdate]:
        """Return what this member brought to a sum; raise BindingError if that is nothing."""
        client, update = self.client(state, number), state.get(UPDATE.of(number))
        if client is None or update is None:
            raise BindingError(f"brought nothing to the sum of round {number}")
        return client, update

    def shown_before(self, state: MemberState, agreed: Agreed) -> set[bytes]:
        """Return the test samples that this member was shown, in this run or an earlier one."""
        before = set(state.get(SHOWN) or ())
        if self.between(agreed.terms):
            before |= state.known.lineage(self.roster).opened
        return before

    def remember_samples(self, state: MemberState, agreed: Agreed, samples: set[bytes]) -> None:
        """Note samples that were shown: no settlement, of this run or a later one, may be about them."""
        if agreed.config.settles:
            state.put(SHOWN, sorted({*(state.get(SHOWN) or ()), *samples}))
        if self.between(agreed.terms):
            lineage = state.known.lineage(self.roster)
            lineage.opened |= samples
            state.known.lineages[self.roster.lineage] = lineage

    def warn(self, text: str, *values: object) -> None:
        """Log what the owner should know, outside of rehearsals."""
        if not self.rehearsal:
            log.warning(text, *values)


class MemoryState:
    """A member's state in memory, a `MemberState`: a rehearsal can be repeated."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self.known = Known()
        self.counter = 1

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing: there are no files, and nobody puts back an older copy or compares lines."""

    check = open = room = add_kept = _nothing

    def save(self) -> None:
        """Count up."""
        self.counter += 1

    def put(self, value: Value[T], given: T | None) -> None:
        self._values[value.name] = given
        if given is None:
            del self._values[value.name]

    def get(self, value: Value[T]) -> T | None:
        return self._values.get(value.name)

    def last(self, value: Value[T], before: int) -> T | None:
        names = [name for name in self._values if name.endswith(f".{value.name}") and _number(name) < before]
        return self._values[max(names, key=_number)] if names else None

    def drop_update(self, number: int) -> None:
        """Delete a round's models and client, which are as large as a model."""
        for value in LARGE:
            self.put(value.of(number), None)

    def dump(self) -> bytes:
        """Return all but what is as large as a model; for a rehearsal's checkpoint."""
        large = {value.name for value in LARGE}
        kept = {name: value for name, value in self._values.items() if _kind(name) not in large}
        return packed((self.known, kept))

    def load(self, data: bytes) -> None:
        """Take what `dump` returned in the place of everything that is here."""
        self.known, kept = unpacked(data, tuple[Known, dict[str, Raw]], "what a member remembers")
        self._values = {name: unpacked(value, _KINDS[_kind(name)], name) for name, value in kept.items()}

    def drop_rounds(self, *, before: int, keep: Sequence[str] = ()) -> None:
        rounds = [name for name in self._values if "." in name and name.partition(".")[2] not in keep]
        last = max((name for name in rounds if name.endswith(".report")), key=_number, default="")
        for name in rounds:
            if _number(name) < before and name != last:
                del self._values[name]


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _number(name: str) -> int:
    return int(name.partition(".")[0])


def kept_line(number: int, *facts: str | Sequence[str]) -> str:
    """Return a line on a round of a member's own file; `ledger.run` explains these lines and compares them.

    >>> kept_line(2, "released", ["A", "B", "C"])
    '2 released ["A", "B", "C"]'
    """
    return " ".join([str(number), *(one if isinstance(one, str) else json.dumps([*one]) for one in facts)])
