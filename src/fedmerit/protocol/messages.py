"""The messages between members and server about contributions, independent of transport and framework.

After the secure sum the server sends every included member what was summed (:class:`Told`). The member
computes the model M from it (:class:`Outcome`), builds the two models that nobody else can build, evaluates
them on the revealed test slice and answers with a :class:`Report`. A report carries the hashes of what it was
computed on. The server drops a report that was computed on anything else, and a member stops if the server's
hashes differ from its own.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, Literal, cast, get_args

import msgpack
import numpy as np
import numpy.typing as npt

from fedmerit.config import VERSION, Config
from fedmerit.errors import BindingError, FedmeritError, LedgerError, MessageError, VersionError
from fedmerit.identity import Signer, canonical, exact, new_salt, number, verifies
from fedmerit.notes import Note
from fedmerit.protocol.pool import SALT_BYTES, Slice
from fedmerit.scoring.scores import from_blocks
from fedmerit.scoring.types import Reports, Scores
from fedmerit.secagg.messages import list_limit, refuse_many
from fedmerit.secagg.quantise import MOST_MEMBERS, Decoded, Encoding, Words
from fedmerit.secagg.setting import LEAST_IN_SUM, Result

# -------------------------------------------------------------------------------------- outcome and report

Model = npt.NDArray[np.float32]
"""A model as one flat vector, shape (P,)."""
PerSample = Mapping[str, npt.NDArray[np.float64]]
"""Utility -> one number per test sample, shape (m,)."""
Evaluate = Callable[[Model, Slice], PerSample]
Game = Literal["additive", "renormalised"]


def model_hash(model: Model) -> str:
    """Return the SHA-256 of the float32 numbers, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(model, dtype="<f4").data).hexdigest()


def sum_hash(words: Words) -> str:
    """Return the SHA-256 of the integers that were summed, as 32-bit words, little-endian."""
    return hashlib.sha256(np.ascontiguousarray(words, dtype="<u4").data).hexdigest()


def moved(m0: Model, weighted_sum: npt.NDArray[np.float64], total_weight: float) -> Model:
    """Return M = M0 + sum of w_i d_i / W, rounded once so that members and server get the same bits."""
    with np.errstate(over="ignore", invalid="ignore"):  # `Outcome.of` refuses what is not finite
        model: Model = (m0.astype(np.float64) + weighted_sum / total_weight).astype(np.float32)
    return model


def included_hash(included: Sequence[str]) -> str:
    """Return the SHA-256 of the names in a sum, in the order of the schedule."""
    return hashlib.sha256(canonical(list(included))).hexdigest()


@dataclass(frozen=True, eq=False)
class Told:
    """What the server says about a round: the integers that were summed, whose they are, the test slice.

    The model M is not said. Members compute it from the integers, so what they sign for is the sum itself.
    """

    round: int
    words: Words  # X, the sum of the members' integers modulo 2^32
    included: tuple[str, ...]
    slice: Slice
    m0_hash: str
    head: str  # of the ledger before this round; a report signs it, and so the history so far

    def outcome(self, m0: Model, encoding: Encoding, public: Mapping[str, float] | None) -> Outcome:
        """Return W and M as they follow from the integers; computed once for members who share a process.

        Args:
            m0: the model with the hash ``m0_hash``, from which the members started.
            encoding: how their updates became integers.
            public: the weights of the scheduled members, if these are public.

        Raises:
            BoundError: members within the bound and the weight cap cannot have this sum.
            BindingError: M is not finite.
        """
        asked = (encoding, public)
        if "_outcome" not in self.__dict__ or self.__dict__["_outcome"][0] != asked:
            total = None
            if public is not None:
                total = math.fsum(public.get(name, math.nan) for name in self.included)
            decoded = encoding.decode(self.words, included=len(self.included), public_total=total)
            found = Outcome.of(self, moved(m0, decoded.weighted_sum, decoded.total_weight), decoded)
            self.__dict__["_outcome"] = asked, found
        outcome: Outcome = self.__dict__["_outcome"][1]
        return outcome


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a round, the same for the server and for every included member."""

    round: int
    model: Model
    total_weight: float
    included: tuple[str, ...]
    slice: Slice
    m0_hash: str
    head: str  # of the ledger before this round; a report signs it, and so the history so far
    sum_hash: str  # of the integers that were summed

    @classmethod
    def of(cls, told: Told, model: Model, result: Result | Decoded) -> Outcome:
        """Return the outcome of a round whose integers stand for ``result`` and move M0 to ``model``."""
        if not np.isfinite(model).all():
            raise BindingError("M is not finite", stage="report")
        where = (told.included, told.slice, told.m0_hash, told.head)
        return cls(told.round, model, result.total_weight, *where, sum_hash(told.words))

    def change(self, m0: Model) -> npt.NDArray[np.float64]:
        """Return M - M0, computed once for the M0 of this round."""
        if "_change" not in self.__dict__:
            self.__dict__["_change"] = np.subtract(self.model, m0, dtype=np.float64)
        change: npt.NDArray[np.float64] = self.__dict__["_change"]
        return change

    @cached_property
    def bound_to(self) -> Mapping[str, str]:
        """What a report depends on: hashes of models, sum, slice and names, the total weight, the head."""
        return {
            "m0": self.m0_hash,
            "m": model_hash(self.model),
            "x": self.sum_hash,
            "weight": exact(self.total_weight),
            "slice": self.slice.id,
            "included": included_hash(self.included),
            "head": self.head,
        }

    def check(self, member: str, weight: float, encoding: Encoding) -> None:
        """Raise BindingError unless this can be a sum that a member of this weight is in.

        That the sum lies within the bound has been checked when it was decoded (`Told.outcome`).
        """
        n, total = len(self.included), self.total_weight
        least = weight + (n - 1) if encoding.weights == "secret" else 0.0
        problem = ""
        if member not in self.included or len(set(self.included)) != n:
            problem = "asked to report on a sum we are not in"
        elif n < LEAST_IN_SUM:
            problem = f"a sum of {n} members hides no update"
        elif not total >= least:
            problem = f"{n} members cannot have a total weight of {total:g}"
        if problem:
            raise BindingError(problem, stage="report", member=member)


@dataclass(frozen=True)
class Measured:
    """One utility as one member measured it, with standard errors paired over the test samples."""

    alone: float
    without: float
    se_loo: float
    se_ioi: float
    se_alpha: float
    se_alpha_total: float | None = None
    solo: float | None = None
    empty: float | None = None  # v(M0) and v(M) as the member measured them
    grand: float | None = None


@dataclass(frozen=True)
class Report:
    """One member's report on one round."""

    client: str
    round: int
    bound_to: Mapping[str, str]
    measured: Mapping[str, Measured]
    cosine: float | None
    salt: str = field(default_factory=new_salt, compare=False)  # so that the record's hash reveals nothing

    def body(self, run: str) -> dict[str, Any]:
        """Return the report as it is recorded and sent: without floats, bound to the run."""
        return {
            "run": run,
            "salt": self.salt,
            "round": self.round,
            "bound_to": dict(self.bound_to),
            "cosine": None if self.cosine is None else exact(self.cosine),
            "measured": {
                name: {key: exact(value) for key, value in vars(one).items() if value is not None}
                for name, one in self.measured.items()
            },
        }

    @classmethod
    def from_body(cls, client: str, body: Mapping[str, Any], *, run: str) -> Report:
        """Read a report; raise MessageError or BindingError if it is not one of this run."""
        try:
            if body["run"] != run:
                raise BindingError("belongs to another run", stage="report", member=client)
            cosine = body["cosine"]
            return cls(
                client=client,
                round=_whole(body["round"]),
                bound_to={str(key): str(value) for key, value in body["bound_to"].items()},
                measured={
                    str(name): Measured(**{key: _finite(value) for key, value in one.items()})
                    for name, one in body["measured"].items()
                },
                cosine=None if cosine is None else _finite(cosine),
                salt=_salt(body["salt"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, LedgerError) as error:
            raise MessageError(f"not a report: {error!r:.200}", stage="report", member=client) from error


def accept(report: Report, outcome: Outcome, utilities: Sequence[str]) -> None:
    """Raise unless a report is about this round and computed on exactly these models, weights and samples."""
    if report.round != outcome.round:
        raise BindingError(
            f"answers round {report.round}, but this is round {outcome.round}",
            stage="report",
            member=report.client,
        )
    if report.client not in outcome.included:
        raise BindingError("reports on a sum it is not in", stage="report", member=report.client)
    for what in {**outcome.bound_to, **report.bound_to}:
        if report.bound_to.get(what) != outcome.bound_to.get(what):
            named = what if what in outcome.bound_to else f"{what!r:.40}"
            raise BindingError(
                f"computed on a different {named} from ours", stage="report", member=report.client
            )
    if set(report.measured) != set(utilities):
        raise MessageError(
            f"expected utilities {', '.join(utilities)}, got {sorted(report.measured)!r:.200}",
            stage="report",
            member=report.client,
        )


def _salt(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{32}", value):
        raise ValueError("a salt is 32 hexadecimal digits")
    return value


def _finite(text: Any) -> float:
    if not math.isfinite(found := number(text)):
        raise ValueError(f"a report holds finite numbers, got {found}")
    return found


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("a round is a whole number")
    return value


def check_numbers(report: Report) -> None:
    """Raise MessageError if a report has numbers that no utility in [0, 1] can have; not for rehearsals."""
    for name, one in report.measured.items():
        for key, value in vars(one).items():
            most = float(report.round) if key == "se_alpha_total" else 1.0
            needed = key in ("empty", "grand")
            if (value is None and needed) or (value is not None and not 0 <= value <= most):
                raise MessageError(
                    f"{key} of {name} must lie in [0, {most:g}], got {value}",
                    stage="report",
                    member=report.client,
                )
    if report.cosine is not None and not -1 <= report.cosine <= 1:
        raise MessageError(
            f"cosine must lie in [-1, 1], got {report.cosine:g}", stage="report", member=report.client
        )


# ------------------------------------------------------------------------------------------------- a round

_COLUMNS = ("alone", "without", "se_loo", "se_ioi", "se_alpha", "se_alpha_total")
TOLERANCE = 1e-6
"""Members who differ by more are named; machines of the same kind differ by less."""


@dataclass(eq=False)
class Round:
    """One round: who took part, their reports, and how it was closed."""

    number: int
    scheduled: tuple[str, ...]
    included: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    blamed: tuple[str, ...] = ()  # members who provably broke the protocol in this round
    silent: tuple[str, ...] = ()
    aborted: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)  # of the closing record
    reports: dict[str, Report] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()  # in a copy: members whose reports its reader may not see
    since: int | None = None  # the first round of its run, if it follows others

    def to_phi(self, utility: str) -> Scores | None:
        """Return the Aumann-Shapley scores of everybody in the sum, or None if the round has none."""
        found = (self.body.get("phi") or {}).get(utility)
        if found is None:
            return None
        columns = [[number(value) for value in found["blocks"][name]] for name in self.included]
        return from_blocks(np.transpose(columns), found["sizes"], self.included)

    def to_reports(self, utility: str) -> Reports | None:
        """Return the reports that scores take (in a copy, those it shows), or None if there are none."""
        if self.aborted or not self.reports:
            return None
        named = [name for name in self.included if name in self.reports]
        measured = [self.reports[name].measured[utility] for name in named]

        def column(key: str) -> list[float] | None:
            values = [getattr(one, key) for one in measured]
            return None if any(value is None for value in values) else values

        cosines = [self.reports[name].cosine for name in named]  # all None where members leave them out
        utilities, samples = self.body["utilities"][utility], self.body.get("samples")
        solo = column("solo") if "first" in utilities else None
        return Reports(
            empty=number(utilities["empty"]),
            grand=number(utilities["grand"]),
            clients=tuple(named),
            silent=(*self.silent, *self.withheld),
            slice=self.body["slice"],
            samples=None if samples is None else [samples[name] for name in named],  # type: ignore[arg-type]
            cosine=cosines if any(one is not None for one in cosines) else None,  # type: ignore[arg-type]
            solo=solo,  # type: ignore[arg-type]
            solo_empty=None if solo is None else number(utilities["first"]),
            utility=utility,
            round=self.number,
            since=self.since,
            **{key: column(key) for key in _COLUMNS},  # type: ignore[arg-type]
        )

    def differences(self, tolerance: float = TOLERANCE) -> dict[str, Note]:
        """Return the members whose own v(M0) or v(M) differs from the one the round is scored with, and how.

        ``tolerance`` is relative to 1 or to the value that the round is scored with, whichever is larger.
        """
        found: dict[str, Note] = {}
        for name, report in self.reports.items():
            for utility, used in self.body["utilities"].items():
                own = report.measured[utility]
                for what, mine, its in (
                    ("v(M0)", own.empty, number(used["empty"])),
                    ("v(M)", own.grand, number(used["grand"])),
                ):
                    if mine is not None and not abs(mine - its) <= tolerance * max(1.0, abs(its)):
                        how = Note("differs-how", what=what, own=mine, utility=utility, used=its)
                        found.setdefault(name, how)
        return found


# ------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True, eq=False)
class Trained:
    """The result of local training: the model it started from, the change, the number of samples, and what an
    evaluation must know about the model's shape (anything that msgpack can carry)."""

    m0: Model
    delta: npt.NDArray[np.float32]
    samples: float | None
    shape: Any = None


def no_check(trained: Trained, config: Config) -> None:
    """Accept any update; masking refuses the bad ones."""


@dataclass(frozen=True, eq=False)
class Work:
    """A model to train: M0, the digest of everything else that came with it, the function that trains it, and
    a check that explains, in the app's own words, why the settings do not allow an update."""

    m0: Model
    extra: bytes
    train: Callable[[], Trained]
    check: Callable[[Trained, Config], None] = no_check
    m0_hash: str = ""  # given if it is known: many members of one process start from one array

    def __post_init__(self) -> None:
        object.__setattr__(self, "m0_hash", self.m0_hash or model_hash(self.m0))


# --------------------------------------------------------------------------------------------- on the wire

Exchange = Literal["join", "advertise", "share", "train", "check", "unmask", "report", "close"]
EXCHANGES: Final[tuple[Exchange, ...]] = get_args(Exchange)
PROTOCOL: Final = 3
"""The version of these messages. Packages of different versions work together if they have this number."""
_FORMATS: Final = "fedmerit remote {}"
PACKAGE: Final = "[0-9a-zA-Z.+-]{1,40}"
"""What the version of a package looks like."""
FORMAT: Final = _FORMATS.format(PROTOCOL)
LEAST_SAMPLES: Final = 10
KINDS: Final = "fiub"  # kinds of dtype in a message: numbers, never objects
SLICE_BYTES: Final = 2**31
"""Most bytes of the samples of a test slice."""
VALUES: Final = 256
"""Most values in a message of the server; two per member are added, for its one list of names."""


def exchange_of(stage: str) -> Exchange:
    """Return the exchange of a stage of secure aggregation: ``train`` asks for the masked update."""
    return "train" if stage == "masked" else cast(Exchange, stage)


@dataclass(frozen=True, eq=False)
class Parcel:
    """A message as it is carried: signed bytes, and the large arrays that they name by hash.

    If server and members share a process, the arrays are never copied.
    """

    head: bytes
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the total number of bytes."""
        return len(self.head) + sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True, eq=False)
class Ask:
    """One message of the coordinator: its exchange, its round and its content.

    The arrays of a message that was unpacked have not been compared with the types, shapes and hashes that
    the signed bytes name; `told` does that.
    """

    exchange: Exchange
    run: str
    round: int
    body: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    named: Mapping[str, Any] = field(default_factory=dict)  # type, shape and hash of every array

    def pack(self, sign: Signer) -> Parcel:
        """Return the message as a parcel signed by the server: its receiver can prove what it was told."""
        arrays = {name: _little(values) for name, values in self.arrays.items()}
        named = {name: _named(values) for name, values in arrays.items()}
        inner = pack([self.exchange, self.run, self.round, dict(self.body), named])
        return Parcel(pack([FORMAT, VERSION, inner, sign(_signed(inner))]), arrays)

    @classmethod
    def unpack(
        cls, parcel: Parcel, members: int = MOST_MEMBERS, reader: str | None = None
    ) -> tuple[Ask, Callable[[bytes], bool]]:
        """Return the message in a parcel, and a function that tells whether a given key signed it.

        Its author is not yet known, so unpacking takes at most a few times the memory of the parcel.

        Args:
            parcel: what was received.
            members: how many members the reader's roster has.
            reader: the member who reads it, for the error message.

        Raises:
            VersionError: it is a message of another protocol.
        """
        what, values = "a message of the server", VALUES + 2 * members
        _refuse_version(parcel.head, reader)
        match unpack(parcel.head, what, values=5):
            case [form, str(), bytes(inner), bytes(signature)] if form == FORMAT:
                match unpack(inner, what, values=values, text=words_limit(members)):
                    case [str(exchange), str(run), int(number), dict(body), dict(named)] if (
                        exchange in EXCHANGES and type(number) is int
                    ):
                        if len(parcel.head) > (limit := ask_limit(exchange, members)):
                            raise MessageError(
                                f"expected at most {limit} bytes, got {len(parcel.head)}", stage=exchange
                            )
                        if set(parcel.arrays) != set(named) or set(named) != _arrays_of(exchange):
                            raise MessageError("other arrays beside it than expected", stage=exchange)
                        ask = cls(exchange, run, number, body, parcel.arrays, named)
                        return ask, partial(_verifies, inner, signature)
        raise MessageError(f"not a message of {FORMAT}")

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return an entry of the body; raise MessageError unless it has this type."""
        value = self.body.get(key)
        if not isinstance(value, kind):
            raise MessageError(f"{key} is missing or of the wrong type", stage=self.exchange)
        return value

    def told(self, words: int) -> Told:
        """Return what a request for a report says, with its arrays compared with what the server signed.

        Sizes are compared first, so that nobody can have a member hash more than a sum and a test slice. Call
        it once the author of the message is known.

        Args:
            words: how many integers the sum must have.
        """
        if self.__dict__.get("_told", (None,))[0] != words:  # members who share a process ask the same
            self.__dict__["_told"] = words, _told(self, words)
        told: Told = self.__dict__["_told"][1]
        return told


def _arrays_of(exchange: str) -> set[str]:
    """Return the names of the arrays beside a message."""
    return {"sum", "x", "y", "salts"} if exchange == "report" else set()


def _refuse_version(head: bytes, reader: str | None) -> None:
    """Raise VersionError for a message of another protocol.

    A message of any protocol begins with its format; from protocol 3 on, the version of the package follows,
    which nobody has signed and which is only shown.
    """
    reads = msgpack.Unpacker(max_str_len=len(head))
    reads.feed(head[:256])
    try:
        reads.read_array_header()
        form, theirs = reads.unpack(), None
        found = re.fullmatch(_FORMATS.format("([0-9]{1,9})"), form) if isinstance(form, str) else None
        if found is None or int(found[1]) == PROTOCOL:
            return
        if int(found[1]) > 2:
            theirs = reads.unpack()
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return  # not a message at all, which `unpack` says
    shown = isinstance(theirs, str) and re.fullmatch(PACKAGE, theirs)
    raise VersionError(
        f"the server{f' has fedmerit {theirs} and' if shown else ''} speaks protocol {found[1]}, this member "
        f"has fedmerit {VERSION} and speaks protocol {PROTOCOL}: install versions with one protocol",
        stage="join",
        member=reader,
    )


def _signed(inner: bytes) -> bytes:
    return b"fedmerit remote message 3\0" + hashlib.sha256(inner).digest()


def _verifies(inner: bytes, signature: bytes, key: bytes) -> bool:
    return verifies(key, signature, _signed(inner))


def _little(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array as it is hashed and sent: C order, little-endian; copy it only if needed."""
    if values.dtype.kind not in KINDS:
        raise MessageError(f"a message carries numbers, got {values.dtype}", stage="report")
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))


def _named(values: npt.NDArray[Any]) -> list[Any]:
    return [values.dtype.str, list(values.shape), hashlib.sha256(values.data).digest()]


def pack(value: Any) -> bytes:
    """Return a value as msgpack bytes."""
    return bytes(msgpack.packb(value))


def unpack(data: bytes, what: str, *, values: int | None = None, text: int = -1) -> Any:
    """Return the value in msgpack bytes.

    Args:
        data: the bytes.
        what: what the bytes should be, for the error message.
        values: most values allowed, counted before any is built; None for bytes that this machine wrote.
        text: most bytes of one text.
    """
    try:
        if values is not None:
            refuse_many(data, values)
        return msgpack.unpackb(data, max_str_len=text)
    except MessageError as error:
        raise MessageError(f"not {what}: {error}") from None
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MessageError(f"not {what}: {type(error).__name__}") from None


def words_limit(members: int) -> int:
    """Return the most bytes that names and settings may have, few because a member stores them."""
    return 65_536 + 1024 * members


def ask_limit(exchange: Exchange, members: int) -> int:
    """Return the most bytes that a message in a run with this many members may have, without its arrays.

    Only a request for a report has arrays: a sum as long as the member's own model, and a test slice of at
    most ``SLICE_BYTES``. Both limits are checked before anything is hashed.
    """
    lists = exchange not in ("join", "advertise", "report", "close")
    return words_limit(members) + (list_limit(members) if lists else 0)


def join_body(
    run: str,
    address: str,
    terms: Mapping[str, Any],
    commitment: Mapping[str, Any],
    server: bytes,
    *,
    run_config: bytes,
) -> dict[str, Any]:
    """Return what a member signs when it joins: its address, its run config and all that it agrees to."""
    return {
        "run": run,
        "address": address,
        "run_config": run_config.hex(),
        "terms": dict(terms),
        "commitment": dict(commitment),
        "server": server.hex(),
    }


def outcome_ask(run: str, told: Told, following: Sequence[str]) -> Ask:
    """Return the request for a report on a round; ``following`` is the schedule of the next round."""
    shown = told.slice
    body = {
        "included": list(told.included),
        "m0": told.m0_hash,
        "head": told.head,
        "slice": [shown.index, list(shown.path)],
        "next": list(following),
    }
    salts = np.frombuffer(shown.salts, np.uint8)
    arrays = {"sum": told.words, "x": shown.x, "y": shown.y, "salts": salts}
    return Ask("report", run, told.round, body, arrays)


def _told(ask: Ask, words: int) -> Told:
    try:
        given, x, y, salts = (ask.arrays[name] for name in ("sum", "x", "y", "salts"))
        index, path = ask.get("slice", list)
        if given.dtype != np.uint32 or given.shape != (words,):
            raise MessageError(
                f"expected a sum of {words} words of 32 bits, got {given.dtype} {given.shape}", stage="report"
            )
        if x.ndim < 1 or y.ndim != 1 or len(y) != len(x) or 0 in x.shape:
            raise MessageError("a test slice has as many samples as labels", stage="report")
        if salts.dtype != np.uint8 or not all(isinstance(node, bytes) for node in path):
            raise MessageError("salts and path of a test slice must be bytes", stage="report")
        if x.nbytes > SLICE_BYTES or salts.shape != (SALT_BYTES * len(y),):
            raise MessageError(
                f"expected at most {SLICE_BYTES} bytes of samples and {SALT_BYTES} of salt each, got "
                f"{x.nbytes} and {salts.nbytes} for {len(y)}",
                stage="report",
            )
        arrays = {name: _little(array) for name, array in ask.arrays.items()}
        if any(ask.named[name] != _named(array) for name, array in arrays.items()):
            raise MessageError("its arrays do not match the hashes that it names", stage="report")
        return Told(
            round=ask.round,
            words=arrays["sum"],
            included=tuple(str(name) for name in ask.get("included", list)),
            slice=Slice(
                index=int(index), x=arrays["x"], y=arrays["y"], salts=salts.tobytes(), path=tuple(path)
            ),
            m0_hash=ask.get("m0", str),
            head=checked_head(ask),
        )
    except FedmeritError:
        raise
    except (LookupError, ValueError, TypeError, OverflowError) as error:
        raise MessageError(f"not the outcome of a round: {error!s:.100}", stage="report") from None


def checked_head(ask: Ask) -> str:
    """Return the ledger's head in a message; raise MessageError unless it is 64 hexadecimal digits."""
    head: str = ask.get("head", str)
    if not re.fullmatch("[0-9a-f]{64}", head):
        raise MessageError("not the head of a ledger", stage=ask.exchange)
    return head


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two bodies have the same canonical form."""
    return canonical(one) == canonical(other)
