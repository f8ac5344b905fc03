"""The values that flow between the steps: reports of a round, a table of coalitions, scores.

``Reports`` hold exactly what secure aggregation leaves: two numbers that everybody knows, and two per client
that only the client itself can compute. A ``Table`` holds all 2^N coalitions, which it never yields.

First come the checks of what callers pass in: sequences of numbers, names of clients, fields of dataclasses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, KeysView, Mapping, Sequence
from collections.abc import Set as AnySet
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, NeedsTable, ReportError, ValueRefused

# ------------------------------------------------------------------------------------------------- vectors


def is_number(value: Any) -> bool:
    """Return whether this is one real number; text and booleans are not, though float() would take them."""
    if type(value) is float:
        return True
    if hasattr(value, "__array__"):  # numpy scalars, and tensors without an axis
        try:
            return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf"
        except (TypeError, ValueError, RuntimeError):  # such as a tensor on a GPU, or with a gradient
            return False
    return isinstance(value, Real | Decimal) and not isinstance(value, bool)


def number(value: Any) -> float | None:
    """Return the value as float; None if it is not one real number, or is larger than any float.

    >>> number(10**400), number("1"), number([1]), number(True), number(np.float32(0.5))
    (None, None, None, None, 0.5)
    """
    try:
        return float(value) if is_number(value) else None
    except (TypeError, ValueError, OverflowError):
        return None


def sequence(values: Any, what: str) -> npt.NDArray[Any] | Sequence[Any]:
    """Return the values as an array or sequence; a single number becomes one value.

    Mappings, sets, iterators and text are refused.
    """
    if type(values) is list and values and all(type(item) is float for item in values):
        return np.array(values)  # the usual case, from a file
    if np.ma.is_masked(values):
        raise ReportError(f"{what}: expected a number in every place, got an array with masked entries")
    if hasattr(values, "__array__"):
        try:
            return np.atleast_1d(np.asarray(values))
        except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor on a GPU
            raise ReportError(f"{what}: expected a sequence of numbers: {error}"[:300]) from error
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray):
        return values
    if values is not None and np.isscalar(values) and not isinstance(values, str | bytes):
        return [values]
    raise ReportError(f"{what}: expected a sequence of numbers, got {type(values).__name__}")


def floats(values: Any, what: str) -> npt.NDArray[np.float64]:
    """Return the values as float64, if they are real numbers: no text, booleans, None or complex numbers."""
    listed = sequence(values, what)
    if isinstance(listed, np.ndarray) and listed.dtype != object:
        if listed.dtype.kind not in "iuf":
            raise ReportError(f"{what}: expected numbers, got an array of {listed.dtype}")
        return np.array(listed, dtype=np.float64)
    try:
        items = np.array(listed, dtype=object)
        numbers = np.array([is_number(item) for item in items.flat], dtype=bool)
        if numbers.all():
            return items.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ReportError(f"{what}: expected numbers, got {values!r}"[:300]) from error
    first = int(np.argmin(numbers))
    where = f"[{first}]" if items.ndim == 1 else ""
    raise ReportError(f"{what}{where}: expected a number, got {items.flat[first]!r:.100}")


def labels_of(values: Any) -> tuple[Hashable, ...] | None:
    """Return the labels of a pandas Series or the like; None if it has none, or only 0, 1, ..."""
    index = getattr(values, "index", None)
    if not hasattr(values, "__array__") or index is None or callable(index) or np.ndim(values) != 1:
        return None
    labels = tuple(index)
    return None if labels == tuple(range(len(labels))) else labels


def _in_order_of(clients: Sequence[str], values: Any, what: str) -> Any:
    """Return labelled values in the order of the clients, whose names the labels must be; others as given."""
    labels = labels_of(values)
    if labels is None:
        return values
    if len(labels) != len(clients) or set(labels) != set(clients):
        expected = f"{_listed(clients)}, in any order, or 0, 1, ... in the order of the clients"
        raise ReportError(f"{what}: expected the clients as labels, {expected}; got {_listed(labels)}")
    return np.asarray(values)[[labels.index(client) for client in clients]]


def frozen(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    values.flags.writeable = False
    return values


class ReadOnly:
    """Base of frozen dataclasses whose arrays stay read-only when copied or pickled, unlike numpy's own."""

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, frozen(value) if isinstance(value, np.ndarray) else value)


def _listed(names: Sequence[Hashable]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")


# -------------------------------------------------------------------------------------------------- fields

UNIT = (-1e-9, 1.0 + 1e-9)  # [0, 1], with a margin for the rounding of a mean
_ANY = (-math.inf, math.inf)
LARGEST = 1e100  # absolute value of an input; no utility comes near it
A_NUMBER = f"a finite number, at most {LARGEST:g}"
LARGEST_ROUND = 2**31  # as in the setting ``training.rounds``
LARGEST_SCORE = 1e150  # scores may exceed inputs, but their sums and squares cannot overflow
_WRITTEN = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE
)


def written_number(text: str) -> float:
    """Return the number of a text; raise ValueError for 0_5 or other digits, which float() reads too.

    >>> written_number("-.5e3")
    -500.0
    """
    if not _WRITTEN.fullmatch(text):
        raise ValueError(f"expected a number such as 0.25, got {text!r:.60}")
    return float(text)


def writable(text: str) -> bool:
    """Return whether a text can be written: JSON can hold half a letter (a surrogate), which no file takes.

    >>> writable("Köln"), writable("\\ud800")
    (True, False)
    """
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def names_of(clients: Iterable[str], n: int | None, where: str) -> tuple[str, ...]:
    """Return the names of clients, or raise ReportError if they are not n different, non-empty texts.

    If none are given, n names are made up; for n = None, any number of names will do.
    """
    single = isinstance(clients, str | bytes) or (isinstance(clients, np.ndarray) and clients.ndim != 1)
    if single or not isinstance(clients, Iterable):
        raise ReportError(f"{where}clients must be a list of names, got {clients!r:.100}")
    if isinstance(clients, AnySet) and not isinstance(clients, KeysView):
        expected = "must be names in an order, such as a list"
        raise ReportError(f"{where}clients {expected}, got a set, which has no order")
    names = tuple(str(name) if isinstance(name, np.str_) else name for name in clients)
    names = names or tuple(f"client-{i}" for i in range(n or 0))
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ReportError(f"{where}client names must be non-empty strings, got {name!r}")
        if not writable(name):
            raise ReportError(f"{where}client names must be letters of Unicode, got {name!a:.100}")
    if n is not None and len(names) != n:
        raise ReportError(f"{where}expected {n} client names, one per value, got {len(names)}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ReportError(f"{where}client {twice!r} appears more than once")
    return names


def round_of(value: Any, name: str = "round") -> int | None:
    """Return the number of a round as int, or None if it has none."""
    if value is None:
        return None
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not real or not value >= 0 or value != value // 1:
        raise ReportError(f"{name} must be a whole number, 0 or more, got {value!r:.100}")
    if int(value) > LARGEST_ROUND:
        raise ReportError(f"{name} must be at most {LARGEST_ROUND}, got {value!r:.100}")
    return int(value)


def whole(value: Any, name: str, least: int = 0) -> int:
    """Return a setting that counts something as int, or raise InputError."""
    counts = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (counts and least <= value <= LARGEST):
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r:.100}")
    return int(value)


def level_of(value: Any) -> float:
    """Return a confidence level as float, or raise InputError."""
    level = number(value)
    if level is None or not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, got {value!r:.100}")
    return level


class Setter:
    """A checker for the fields of a frozen dataclass, which stores them as read-only float64."""

    def __init__(self, target: Any, clients: Sequence[str], where: str, largest: float = LARGEST) -> None:
        self.target, self.clients, self.where, self.largest = target, clients, where, largest

    def scalar(self, name: str, *, unit: str | None = None) -> None:
        field = getattr(self.target, name)
        value = number(field)
        if value is None and is_number(field):  # larger than any float
            value = math.inf
        if value is None:
            raise ValueRefused(f"{self.where}{name}: expected a number, got {field!r:.100}", None, name)
        self._check(name, value, None, *(UNIT if unit else _ANY), unit)
        object.__setattr__(self.target, name, value)

    def vector(
        self, name: str, *, optional: bool = False, nullable: bool = False, whole: bool = False,
        minimum: float = -math.inf, maximum: float = math.inf, unit: str | None = None,
    ) -> None:  # fmt: skip
        """Store one number per client; None and NaN are allowed in the place of one if ``nullable``."""
        field = getattr(self.target, name)
        if field is None and optional:
            return
        if unit:
            minimum, maximum = UNIT
        what = f"{self.where}{name}"
        listed = sequence(_in_order_of(self.clients, field, what), what)
        if not isinstance(listed, np.ndarray) or listed.dtype == object:
            listed = [self._item(name, k, item, nullable) for k, item in enumerate(listed)]
        values = floats(listed, what)
        if values.shape != (len(self.clients),):
            expected = f"expected {len(self.clients)} values, one per client"
            raise ReportError(f"{what}: {expected}, got shape {values.shape}")
        right = (np.abs(values) <= self.largest) & (minimum <= values) & (values <= maximum)
        if whole:
            right &= values == np.floor(values)
        wrong = np.flatnonzero(~right & ~(np.isnan(values) & nullable))
        if wrong.size:
            value, who = float(values[wrong[0]]), self.clients[wrong[0]]
            self._check(name, value, who, minimum, maximum, unit)
            raise ValueRefused(f"{what} of client {who!r} must be a whole number, got {value:g}", who, name)
        object.__setattr__(self.target, name, frozen(values))

    def matrix(self, name: str, shape: tuple[int | None, int | None], expected: str) -> None:
        """Store finite numbers of this shape, of which None is any number but 0."""
        values = floats(getattr(self.target, name), f"{self.where}{name}")
        fits = values.ndim == 2 and all(
            size if side is None else size == side for side, size in zip(shape, values.shape, strict=True)
        )
        if not fits or not (np.abs(values) <= self.largest).all():
            must = f"must be finite numbers of shape {expected}"
            raise ReportError(f"{self.where}{name} {must}, got shape {values.shape}")
        object.__setattr__(self.target, name, frozen(values))

    def _item(self, name: str, k: int, item: Any, nullable: bool) -> Any:
        if item is None and nullable:
            return math.nan
        if not is_number(item):
            who = self.clients[k] if k < len(self.clients) else f"number {k}"
            problem = " is missing" if item is None else f": expected a number, got {item!r:.100}"
            raise ValueRefused(f"{self.where}{name} of client {who!r}{problem}", who, name)
        return item

    def _check(
        self, name: str, value: float, client: str | None, low: float, high: float, unit: str | None
    ) -> None:
        whose = f" of client {client!r}" if client else ""
        if not abs(value) <= self.largest:
            must = f"must be a finite number, at most {self.largest:g}"
            raise ValueRefused(f"{self.where}{name}{whose} {must}, got {value}", client, name)
        if not low <= value <= high:
            why = f" (as utility {unit!r} promises)" if unit else ""
            range_ = f"[{round(low, 6) + 0.0:g}, {round(high, 6):g}]{why}"
            raise ValueRefused(f"{self.where}{name}{whose} must lie in {range_}, got {value:g}", client, name)


# -------------------------------------------------------------------------------------------------- values

Vector = npt.NDArray[np.float64]
"""One number per client, shape (N,)."""

Status = Literal["ok", "fallback", "reversed", "undefined"]

UNIT_UTILITIES = frozenset({
    "expected-accuracy", "accuracy", "sharpened-accuracy", "balanced-accuracy", "brier", "dice"
})  # fmt: skip
"""Utilities whose values lie in [0, 1]; other values are refused."""

MAX_TABLE_CLIENTS = 26


@dataclass(frozen=True, eq=False, kw_only=True)
class Reports(ReadOnly):
    """What is known after one round: v(M0), v(M), and per client v(M0 + U_i) and v(M - U_i).

    One number per client is a list, an array, or a pandas Series with labels 0, 1, ... or the clients' names.

    >>> r = Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1], clients=["A", "B", "C"])
    >>> r.n, r.gain
    (3, 3.0)
    """

    empty: float  # v(M0), the utility before the round
    grand: float  # v(M), the utility of the aggregate
    alone: Vector  # v(M0 + U_i)
    without: Vector  # v(M - U_i)
    clients: tuple[str, ...] = ()  # names; by default client-0, client-1, ...
    silent: tuple[str, ...] = ()  # clients that were summed but sent no valid report; not in clients
    se_loo: Vector | None = None  # paired standard error of LOO_i, as the client reports it
    se_ioi: Vector | None = None
    se_alpha: Vector | None = None
    se_alpha_total: Vector | None = None  # that of alpha_i summed over all rounds so far, on the same samples
    slice: str | None = None  # id of the test samples; equal ids mean equal samples
    samples: Vector | None = None  # number of training samples, if disclosed
    cosine: Vector | None = None  # of U_i and M - M0; None or NaN if there is none, as for a zero update
    solo: Vector | None = None  # utility of the model that client i trained alone from the first model
    solo_empty: float | None = None  # utility of that first model on this slice
    utility: str | None = None  # its name; values of those in UNIT_UTILITIES must lie in [0, 1]
    round: int | None = None  # 0 or more
    sketch: npt.NDArray[np.float64] | None = None  # (N, K), of each client's error of alpha: see `sampling`
    freedom: int | None = None  # degrees of freedom of these errors: test samples minus strata

    def __post_init__(self) -> None:
        object.__setattr__(self, "round", round_of(self.round))
        try:
            self._check()
        except ReportError as error:
            raise type(error)(error.problem, error.client, error.field, round=self.round) from error.__cause__

    def _check(self) -> None:
        clients = names_of(self.clients, len(sequence(self.alone, "alone")), "")
        silent = names_of(self.silent, None, "")
        if both := set(clients) & set(silent):
            raise ReportError(f"client {min(both)!r} is listed as silent but has a report")
        if len(clients) + len(silent) < 2:
            raise ReportError(f"expected at least 2 clients, got {len(clients)}")

        for name, kind in (("utility", "a name"), ("slice", "text")):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and writable(text)):
                raise ReportError(f"{name} must be {kind}, got {text!a:.100}")
        unit = self.utility if self.utility in UNIT_UTILITIES else None
        put = Setter(self, clients, "")
        put.scalar("empty", unit=unit)
        put.scalar("grand", unit=unit)
        put.vector("alone", unit=unit)
        put.vector("without", unit=unit)
        for name in ("se_loo", "se_ioi", "se_alpha", "se_alpha_total"):
            put.vector(name, optional=True, minimum=0.0)
        put.vector("samples", optional=True, minimum=0.0, whole=True)
        if self.sketch is not None or self.freedom is not None:
            self._check_sketch(put)
        put.vector("cosine", optional=True, nullable=True, minimum=-1.0 - 1e-6, maximum=1.0 + 1e-6)
        put.vector("solo", optional=True, unit=unit)
        if self.solo is not None and self.solo_empty is None:
            raise ReportError("solo needs solo_empty, the utility of the first model on this slice")
        if self.solo_empty is not None:
            put.scalar("solo_empty", unit=unit)
        vars(self).update(clients=clients, silent=silent)

    def _check_sketch(self, put: Setter) -> None:
        freedom = round_of(self.freedom, "freedom")
        if self.sketch is None or not freedom:
            raise ReportError("sketch and freedom (1 or more) belong together, got one without the other")
        if self.slice is None:
            raise ReportError("sketches are about a test slice, which must be named (slice)")
        n = len(put.clients)
        put.matrix("sketch", (n, None), f"({n}, K), one row per client")
        vars(self).update(freedom=freedom)

    @property
    def n(self) -> int:
        """Number of clients that reported."""
        return len(self.clients)

    @property
    def gain(self) -> float:
        """v(M) - v(M0), which the round has to distribute."""
        return self.grand - self.empty

    @property
    def where(self) -> str:
        """Prefix for messages that names the round, if known."""
        return "" if self.round is None else f"round {self.round}: "

    @classmethod
    def from_table(cls, table: Table, **extra: Any) -> Reports:
        """Return reports with the 2N + 2 coalitions of ``table`` that secure aggregation would leave."""
        if not isinstance(table, Table):
            raise NeedsTable(f"from_table takes a Table of 2^N utilities, got {type(table).__name__}")
        values, bits = table.values, 1 << np.arange(table.n)
        return cls(
            empty=float(values[0]), grand=float(values[-1]), alone=values[bits],
            without=values[len(values) - 1 ^ bits], clients=table.clients, **extra,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Table(ReadOnly):
    """The utility of every coalition. The index is a bitmask: bit i is set iff client i is in the coalition.

    >>> Table([0, 1, 2, 3], ["A", "B"]).n
    2
    """

    values: Vector
    clients: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.values, Reports):
            raise NeedsTable("expected all 2^N coalitions, got Reports, which hold 2N + 2 of them")
        if (size := len(sequence(self.values, "table"))) > 1 << MAX_TABLE_CLIENTS:
            most = f"at most {MAX_TABLE_CLIENTS} clients (2^N utilities)"
            raise ReportError(f"a table holds {most}, got {size} utilities")
        if (labels := labels_of(self.values)) is not None:
            raise ReportError(f"table: labels must be the bitmasks 0, 1, 2, ..., got {labels[0]!r:.50} first")
        values = floats(self.values, "table")
        n = int(values.size).bit_length() - 1
        if values.ndim != 1 or n < 1 or values.size != 1 << n:
            raise ReportError(f"a table needs 2^N utilities with N >= 1, got shape {values.shape}")
        for place in np.flatnonzero(~(np.abs(values) <= LARGEST)):
            raise ReportError(f"utility of coalition {place:#b} is {values[place]}, expected {A_NUMBER}")
        vars(self).update(values=frozen(values), clients=names_of(self.clients, n, "table: "))

    @property
    def n(self) -> int:
        return len(self.clients)

    @property
    def gain(self) -> float:
        """v(everyone) - v(nobody)."""
        return float(self.values[-1] - self.values[0])


class RoundScatter(NamedTuple):
    """How far contributions scatter over the rounds of one training; see ``uncertainty.training_of``."""

    scatter: float = 0.0  # standard error that it leaves in a sum over all rounds; 0 if it is not known
    freedom: int = 0  # degrees of freedom of this estimate


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores(ReadOnly):
    """One number per client, the unnormalised numbers behind it, and whether it can be trusted.

    ``values`` follows the definition to the letter, normalisation included. Rankings and shares use ``raw``,
    because a normalisation can reverse the order. With ``training``, intervals and comparisons allow for what
    another training would change (:mod:`fedmerit.scoring.uncertainty`).
    """

    score: str
    clients: tuple[str, ...]
    values: Vector
    raw: Vector  # before normalisation
    gain: float
    status: Status = "ok"
    stderr: Vector | None = None  # standard error of ``raw`` that the test set leaves
    rounds: int = 1
    coverage: Vector | None = None
    notes: tuple[str, ...] = ()
    blocks: npt.NDArray[np.float64] | None = None  # (B, N): ``raw`` in each block of the test set
    sizes: Vector | None = None  # numbers of samples in the blocks
    sketch: npt.NDArray[np.float64] | None = None  # (K, N): how the clients' errors correlate
    freedom: int | None = None  # degrees of freedom of a sketch's errors
    training: RoundScatter | None = None

    def __post_init__(self) -> None:
        where = f"{self.score}: "
        clients = names_of(self.clients, None, where)
        if not clients:
            raise ReportError(f"{where}expected at least 1 client, got none")
        put = Setter(self, clients, where, largest=LARGEST_SCORE)
        put.vector("values")
        put.vector("raw")
        put.scalar("gain")
        put.vector("stderr", optional=True, minimum=0.0)
        put.vector("coverage", optional=True, minimum=0.0)
        if (self.blocks is None) != (self.sizes is None):
            raise ReportError(f"{where}blocks and sizes belong together, got one without the other")
        if self.sizes is not None:
            sizes = floats(self.sizes, f"{where}sizes")
            if sizes.ndim != 1 or not ((sizes > 0) & (sizes <= LARGEST)).all():
                raise ReportError(f"{where}sizes must be positive numbers, one per block, got {sizes}")
            shape = (len(sizes), len(clients))
            put.matrix("blocks", shape, f"{shape}, one row per size and one column per client")
            vars(self).update(sizes=frozen(sizes))
        if self.sketch is not None:
            put.matrix("sketch", (None, len(clients)), f"(K, {len(clients)})")
        freedom = round_of(self.freedom, f"{where}freedom")
        if freedom == 0:
            raise ReportError(f"{where}freedom must be 1 or more, got 0")
        vars(self).update(freedom=freedom, clients=clients)

    @property
    def n(self) -> int:
        return len(self.clients)

    @property
    def covariance(self) -> npt.NDArray[np.float64] | None:
        r"""The covariance of ``raw`` that the test set leaves, (N, N), from blocks or sketches; None without.

        .. math:: \frac{1}{B - 1} \sum_b \frac{n_b}{n} (x_b - x)(x_b - x)^\top, \qquad
                  x = \sum_b \frac{n_b}{n} x_b

        The n_b samples of each of the B blocks stand for a test set of their own; B - 1 degrees of freedom.
        From a sketch z, it is :math:`z^\top z / K` (:mod:`fedmerit.scoring.sampling`).
        """
        if self.sketch is not None:
            return np.asarray(self.sketch.T @ self.sketch / len(self.sketch), dtype=np.float64)
        if self.blocks is None or self.sizes is None or len(self.blocks) < 2:
            return None
        weights = self.sizes / self.sizes.sum()
        away = self.blocks - weights @ self.blocks
        return np.asarray((weights[:, None] * away).T @ away / (len(weights) - 1), dtype=np.float64)

    def ranking(self) -> tuple[str, ...]:
        """Return the names, best first, by the raw vector; ties are in the order of ``clients``."""
        return tuple(self.clients[i] for i in np.argsort(-settle(self.raw), kind="stable"))

    def ranks(self) -> npt.NDArray[np.int64]:
        """Return the rank of each client by the raw vector, 1 = best; ties share the better rank."""
        settled = settle(self.raw)
        ordered = np.sort(-settled)
        return np.searchsorted(ordered, -settled, side="left") + 1

    def as_dict(self) -> dict[str, float]:
        """Return ``values`` by name."""
        return dict(zip(self.clients, self.values.tolist(), strict=True))

    def to_pandas(self) -> Any:
        """Return a frame with one row per client; see `fedmerit.files.documents.scores_columns`."""
        return SHOWN["to_pandas"](self)

    def to_csv(self) -> str:
        """Return the same as tidy CSV."""
        return str(SHOWN["to_csv"](self))

    def plot(self) -> Any:
        """Return an Altair chart of the raw scores, best first, with 95 % intervals; nothing is shown."""
        return SHOWN["scores_plot"](self)

    def _repr_html_(self) -> str:
        return str(SHOWN["scores_html"](self))


SHOWN: dict[str, Callable[[Any], Any]] = {}
"""How methods of scores, shares and payouts show them: `files.documents` and the package itself add it, so
that no formula knows pandas, HTML or charts."""


def in_order(scores: Scores, clients: tuple[str, ...]) -> Scores:
    """Return scores with the clients in this order."""
    place = {name: i for i, name in enumerate(scores.clients)}
    at = [place[name] for name in clients]
    arrays = {name: value for name, value in vars(scores).items() if isinstance(value, np.ndarray)}
    moved: dict[str, Any] = {name: value[..., at] for name, value in arrays.items() if name != "sizes"}
    return replace(scores, clients=clients, **moved)


def rounding(values: Vector) -> Vector:
    r"""Return a generous bound on the rounding error of each value; values tie if it explains the difference.

    .. math:: \rho_i = 10^{-10} \max(|x_i|, \min(1, \max_j |x_j|))

    The values may also be rows of such vectors. Scores are differences of utilities of about 1, accurate to
    about 10^-16, so even a score near zero has an error of that size. Another client's score counts for at
    most 1 here, so that a huge one, say a false report, does not tie everybody else.

    >>> rounding(np.array([0.5, 0.0, -2.0, 1e13])).tolist()
    [1e-10, 1e-10, 2e-10, 1000.0]
    """
    size = np.abs(values)
    most = np.minimum(1.0, size.max(axis=-1, initial=0.0, keepdims=True))
    return np.asarray(1e-10 * np.maximum(size, most), dtype=np.float64)


def order_signs(values: Vector) -> npt.NDArray[np.int8]:
    """Return 1 where i is above j, -1 where below, 0 where they tie, shape (N, N)."""
    places = settle(values)
    return np.sign(places[:, None] - places[None, :]).astype(np.int8)


def settle(values: Vector) -> Vector:
    """Return places in ascending order, 0, 1, ...; neighbours that only rounding may separate share a place.

    Scores that are equal on paper can differ by rounding, which must not decide their rank.

    >>> a = np.array([0.3 - 0.2, 0.2 - 0.1, 0.5]); bool(a[0] == a[1]), settle(a).tolist()
    (False, [0.0, 0.0, 1.0])
    """
    if not values.size:
        return values
    order = np.argsort(values, kind="stable")
    noise = rounding(values)[order]
    with np.errstate(over="ignore"):  # differences may exceed the largest float
        apart = np.diff(values[order]) > noise[1:] + noise[:-1]
    places = np.empty(values.size)
    places[order] = np.concatenate([[0], np.cumsum(apart)])
    return places
