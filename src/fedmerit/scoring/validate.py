"""Checks of what callers pass in: sequences of numbers, client names, settings, and fields of dataclasses."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Hashable, Iterable, Iterator, KeysView, Mapping, Sequence
from collections.abc import Set as AnySet
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, ReportError, ValueRefused

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


def _is_nan(value: Any) -> bool:
    found = number(value)
    return found is not None and math.isnan(found)


def sequence(values: Any, what: str) -> npt.NDArray[Any] | Sequence[Any]:
    """Return the values as an array or sequence; a single number becomes one value.

    Mappings, sets, iterators and text are refused.
    """
    if type(values) is list and values and all(type(one) is float for one in values):
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
    return _labels(index)


def in_order_of(clients: Sequence[str], values: Any, what: str) -> Any:
    """Return labelled values in the order of the clients, whose names the labels must be; others as given."""
    labels = labels_of(values)
    if labels is None:
        return values
    return np.asarray(values)[_places(clients, labels, what)]


def in_order_of_both(clients: Sequence[str], values: Any, what: str) -> Any:
    """Return a pandas frame with rows and columns in the order of the clients; other values as given."""
    index, columns = getattr(values, "index", None), getattr(values, "columns", None)
    if not hasattr(values, "__array__") or index is None or columns is None:
        return values
    rows, columns = _labels(index), _labels(columns)
    if rows is None and columns is None:
        return values
    counting = tuple(range(len(clients)))
    ordered = np.ix_(
        _places(clients, rows or counting, f"{what}, rows"),
        _places(clients, columns or counting, f"{what}, columns"),
    )
    return np.asarray(values)[ordered]


def _places(clients: Sequence[str], labels: Sequence[Hashable], what: str) -> list[int]:
    """Return the position of each client among the labels, which must be the clients' names."""
    if len(labels) != len(clients) or set(labels) != set(clients):
        raise ReportError(
            f"{what}: expected the clients as labels, {_listed(clients)}, in any order, or 0, 1, ... in the "
            f"order of the clients; got {_listed(labels)}"
        )
    return [labels.index(client) for client in clients]


def frozen(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    values.flags.writeable = False
    return values


class ReadOnly:
    """Base of frozen dataclasses whose arrays stay read-only when copied or pickled, unlike numpy's own."""

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, frozen(value) if isinstance(value, np.ndarray) else value)


def _labels(index: Iterable[Hashable]) -> tuple[Hashable, ...] | None:
    labels = tuple(index)
    return None if labels == tuple(range(len(labels))) else labels


def _listed(names: Sequence[Hashable]) -> str:
    return ", ".join(repr(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")


# -------------------------------------------------------------------------------------------------- fields

UNIT = (-1e-9, 1.0 + 1e-9)
"""[0, 1], with a margin for the rounding of a mean."""
LARGEST = 1e100
"""Largest absolute value of an input; no utility comes near it."""
A_NUMBER = f"a finite number, at most {LARGEST:g}"
LARGEST_ROUND = 2**31
"""The largest number of a round, as in the setting ``training.rounds``; charts take no more than 2^53."""
LARGEST_SCORE = 1e150
"""Largest absolute value of a score: scores may exceed inputs, but their sums and squares cannot overflow."""


_WRITTEN = re.compile(
    r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE
)


def written_number(text: str) -> float:
    """Return the number that a text writes in the usual way.

    Raise ValueError for anything else that float() reads, such as 0_5 or the digits of other scripts.

    >>> written_number("-.5e3")
    -500.0
    """
    if not _WRITTEN.fullmatch(text):
        raise ValueError(f"expected a number such as 0.25, got {text!r:.60}")
    return float(text)


_ALIKE = str.maketrans(
    # Cyrillic, Greek and others that are drawn like a Latin letter; dashes and apostrophes
    "АВЕКМНОРСТУХІЈЅԚԜҮӀЁаеорсухіјѕһԁԛԝӏкёѵ" "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧαονρικυχγ" "օսցıɡɑ" "‐‒–—―−’‘ʼ´`",
    "ABEKMHOPCTYXIJSQWYIËaeopcyxijshdqwlkëv" "ABEZHIKMNOPTYXaovpikuxy" "ougiga" "------" + 5 * "'",
)  # fmt: skip


def two_spellings(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first two names that differ only in case, blanks, or letters that look the same.

    Letters that look the same are those of other alphabets, and those composed in another way. Characters
    that nobody sees, such as a blank of no width, do not count.

    >>> two_spellings(["Ulm", "Bonn", "BONN "]), two_spellings(["Abbey", "\u0410bbey"])
    (('Bonn', 'BONN '), ('Abbey', 'Аbbey'))
    """
    known: dict[tuple[bool, str], str] = {}
    for name in names:
        seen = unicodedata.normalize("NFKC", _seen(name))
        for drawn in (False, True):
            letters = seen.translate(_ALIKE) if drawn else seen
            folded = unicodedata.normalize("NFC", letters.casefold())
            first = known.setdefault((drawn, " ".join(folded.split())), name)
            if first != name:
                return first, name
    return None


_WORD = 5
"""Letters of the shortest word in which one wrong letter counts as a slip."""
_SAME = 3
"""Letters of the shortest name that accents, blanks and hyphens do not tell from another."""


def slips(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names that may be one, mistyped: "LMU Munchen", "LMU Mnüchen" and "LMU-München".

    They differ in accents, blanks, hyphens and the like; or in one word of at least five letters, by one
    letter inside it that is wrong, missing or too many, or by two neighbours that are swapped. Names with
    different digits are different, and so are those that differ in the first or last letter of a word.

    >>> list(slips(["Site 1", "Site 2", "Site 11", "Site A", "Site B", "nodeA", "nodeB"]))
    []
    """
    buckets: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        digits, words = _bare(name)
        keys: set[tuple[Any, ...]] = {(digits, "".join(words))}
        for k, word in enumerate(words):
            if len(word) >= _WORD - 1:
                cut = {word[:i] + word[i + 1 :] for i in range(len(word))} | {word}
                keys |= {(digits, k, *words[:k], one, *words[k + 1 :]) for one in cut}
        others = dict.fromkeys(other for key in sorted(keys, key=repr) for other in buckets.get(key, ()))
        yield from ((other, name) for other in others if _is_slip(other, name))
        for key in keys:
            buckets.setdefault(key, []).append(name)


def _bare(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the digits of a name, and its words without accents, in small Latin letters if they look so."""
    seen = unicodedata.normalize("NFKC", _seen(name)).translate(_ALIKE)
    plain = "".join(c for c in unicodedata.normalize("NFD", seen) if not unicodedata.combining(c)).casefold()
    words = re.findall(r"[^\W\d_]+|[^\w\s\-.,/'&]", plain)
    return tuple(re.findall(r"\d+", plain)), tuple(words)


def _is_slip(one: str, other: str) -> bool:
    (digits, words), (others, theirs) = _bare(one), _bare(other)
    if digits != others:
        return False
    if "".join(words) == "".join(theirs):
        return len("".join(words)) >= _SAME
    pairs = [pair for pair in zip(words, theirs, strict=False) if pair[0] != pair[1]]
    if len(words) != len(theirs) or len(pairs) != 1:
        return False
    short, long = sorted(pairs[0], key=len)
    inside = range(1, len(long) - 1)
    if len(long) < _WORD:
        return False
    if len(short) < len(long):
        return short not in (long[1:], long[:-1]) and any(long[:i] + long[i + 1 :] == short for i in inside)
    off = [i for i in range(len(long)) if short[i] != long[i]]
    swapped = len(off) == 2 and off[1] == off[0] + 1 and {*short[off[0] :][:2]} == {*long[off[0] :][:2]}
    return swapped or (len(off) == 1 and off[0] in inside)


def writable(text: str) -> bool:
    """Return whether a text can be written: JSON can hold half a letter (a surrogate), which no file takes.

    >>> writable("Köln"), writable("\\ud800")
    (True, False)
    """
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def look_alike(one: str, other: str) -> bool:
    """Return whether two different names look the same, so that a message must escape their letters."""
    return _seen(one).translate(_ALIKE) == _seen(other).translate(_ALIKE)


def _seen(name: str) -> str:
    """Return a name with composed letters, without characters that nobody sees."""
    return "".join(c for c in unicodedata.normalize("NFC", name) if unicodedata.category(c) != "Cf")


def spelled(one: str, other: str) -> tuple[str, str]:
    """Return two names as a message shows them, with escaped letters if they would look the same."""
    return (ascii(one), ascii(other)) if look_alike(one, other) else (repr(one), repr(other))


def names_of(clients: Iterable[str], n: int | None, where: str, *, counted: str = "") -> tuple[str, ...]:
    """Return the names of clients, or raise ReportError if they are not n different, non-empty texts.

    If none are given, n names are made up; for n = None, any number of names will do. Names are matched to
    values by their order, so a set is refused; the keys of a dict have an order.
    """
    one = isinstance(clients, str | bytes) or (isinstance(clients, np.ndarray) and clients.ndim != 1)
    if one or not isinstance(clients, Iterable):
        raise ReportError(f"{where}clients must be a list of names, got {clients!r:.100}")
    if isinstance(clients, AnySet) and not isinstance(clients, KeysView):
        raise ReportError(
            f"{where}clients must be names in an order, such as a list, got a set, which has no order"
        )
    given = (str(name) if isinstance(name, np.str_) else name for name in clients)
    names = tuple(given) or tuple(f"client-{i}" for i in range(n or 0))
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ReportError(f"{where}client names must be non-empty strings, got {name!r}")
        if not writable(name):
            raise ReportError(f"{where}client names must be letters of Unicode, got {name!a:.100}")
    if counted and len(names) != n:
        raise ReportError(
            f"{where}{counted} has {n} values, clients has {len(names)} names: one each expected"
        )
    if n is not None and len(names) != n:
        raise ReportError(f"{where}expected {n} client names, one per value, got {len(names)}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ReportError(f"{where}client {twice!r} appears more than once")
    return names


def round_of(given: Any, name: str = "round") -> int | None:
    """Return the number of a round as int, or None if it has none."""
    if given is None:
        return None
    whole = isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool)
    if not whole or not given >= 0 or given != given // 1:
        raise ReportError(f"{name} must be a whole number, 0 or more, got {given!r:.100}")
    if (found := int(given)) > LARGEST_ROUND:
        raise ReportError(f"{name} must be at most {LARGEST_ROUND}, got {given!r:.100}")
    return found


def whole(given: Any, name: str, least: int = 0) -> int:
    """Return a setting that counts something as int, or raise InputError."""
    counts = isinstance(given, int | np.integer) and not isinstance(given, bool)
    if not (counts and least <= given <= LARGEST):
        raise InputError(f"{name} must be a whole number of at least {least}, got {given!r:.100}")
    return int(given)


def level_of(given: Any) -> float:
    """Return a confidence level as float, or raise InputError."""
    level = number(given)
    if level is None or not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, got {given!r:.100}")
    return level


class Setter:
    """A checker for the fields of a frozen dataclass, which stores them as read-only float64."""

    def __init__(self, target: Any, clients: Sequence[str], where: str, largest: float = LARGEST) -> None:
        self.target, self.clients, self.where, self.largest = target, clients, where, largest

    def scalar(self, name: str, *, unit: str | None = None) -> None:
        value = getattr(self.target, name)
        found = number(value)
        if found is None:
            raise ValueRefused(f"{self.where}{name}: expected a number, got {value!r:.100}", None)
        low, high = UNIT if unit else (None, None)
        self._check(name, found, None, low, high, unit)
        object.__setattr__(self.target, name, found)

    def vector(
        self,
        name: str,
        *,
        optional: bool = False,
        nullable: bool = False,
        minimum: float | None = None,
        maximum: float | None = None,
        unit: str | None = None,
        whole: bool = False,
    ) -> None:
        given = getattr(self.target, name)
        if given is None and optional:
            return
        if unit:
            minimum, maximum = UNIT
        what = f"{self.where}{name}"
        listed = sequence(in_order_of(self.clients, given, what), what)
        if isinstance(listed, np.ndarray) and listed.dtype != object:
            null = np.isnan(listed) if nullable and listed.dtype.kind == "f" else np.zeros(listed.shape, bool)
            values = floats(listed, what)
        else:
            items = list(listed)
            for k, item in enumerate(items):
                self._check_item(what, k, item, nullable)
            null = np.array([item is None or (nullable and _is_nan(item)) for item in items], dtype=bool)
            values = floats([np.nan if gone else item for gone, item in zip(null, items, strict=True)], what)
        if values.shape != (len(self.clients),):
            expected = f"expected {len(self.clients)} values, one per client"
            raise ReportError(f"{what}: {expected}, got shape {values.shape}")
        wrong = ~(np.abs(values) <= self.largest) & ~null
        if minimum is not None:
            wrong |= values < minimum
        if maximum is not None:
            wrong |= values > maximum
        if whole:
            wrong |= values != np.floor(values)
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            self._check(name, float(values[first]), self.clients[first], minimum, maximum, unit)
            who = self.clients[first]
            raise ValueRefused(f"{what} of client {who!r} must be a whole number, got {values[first]:g}", who)
        object.__setattr__(self.target, name, frozen(values))

    def _check_item(self, what: str, k: int, item: Any, nullable: bool) -> None:
        who = self.clients[k] if k < len(self.clients) else f"number {k}"
        if item is None and not nullable:
            raise ValueRefused(f"{what} of client {who!r} is missing", who)
        if item is not None and not is_number(item):
            raise ValueRefused(f"{what} of client {who!r}: expected a number, got {item!r:.100}", who)

    def _check(
        self,
        name: str,
        value: float,
        client: str | None,
        minimum: float | None,
        maximum: float | None,
        unit: str | None,
    ) -> None:
        whose = f" of client {client!r}" if client else ""
        if not abs(value) <= self.largest:
            must = f"must be a finite number, at most {self.largest:g}"
            raise ValueRefused(f"{self.where}{name}{whose} {must}, got {value}", client)
        low = -np.inf if minimum is None else minimum
        high = np.inf if maximum is None else maximum
        if not low <= value <= high:
            why = f" (as utility {unit!r} promises)" if unit else ""
            range_ = f"[{round(low, 6) + 0.0:g}, {round(high, 6):g}]{why}"
            raise ValueRefused(f"{self.where}{name}{whose} must lie in {range_}, got {value:g}", client)
