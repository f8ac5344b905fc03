"""Checks of what callers pass in: sequences of numbers, names of clients, and fields of dataclasses."""

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


_ALIKE = str.maketrans(
    # Cyrillic, Greek and others that are drawn like a Latin letter; dashes and apostrophes
    "АВЕКМНОРСТУХІЈЅԚԜҮӀЁаеорсухіјѕһԁԛԝӏкёѵ" "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧαονρικυχγ" "օսցıɡɑ" "‐‒–—―−’‘ʼ´`",
    "ABEKMHOPCTYXIJSQWYIËaeopcyxijshdqwlkëv" "ABEZHIKMNOPTYXaovpikuxy" "ougiga" "------" + 5 * "'",
)  # fmt: skip


def two_spellings(names: Iterable[str]) -> tuple[str, str] | None:
    r"""Return the first two names that differ only in case, blanks, or letters that look the same.

    Letters of other alphabets may look the same, or letters composed in another way. Characters that nobody
    sees do not count.

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


_DRAWN = str.maketrans("OoIl", "0011")  # letters that are drawn like a digit
_WORD = 5  # letters of the shortest word in which one wrong letter counts as a slip
_DOUBLED = 4  # letters of the shortest word that may have lost one of two same neighbours ("Bonn")
_ANYWHERE = 3  # letters of the shortest word that may be wrong anywhere
_COUNTING = re.compile(r"[ivx]+|(.)\1*")  # words that number: "II", "viii", "B", "AA"
_SAME = 3  # letters of the shortest name that accents, blanks and hyphens do not tell from another


def slips(names: Iterable[str], *, anywhere: bool = False) -> Iterator[tuple[str, str]]:
    """Yield pairs of names that may be one, mistyped: "LMU Munchen", "LMU Mnüchen" and "LMU-München".

    They differ in accents, blanks, hyphens and the like; or in one word of at least five letters, by one
    letter inside it that is wrong, missing or too many, or by two neighbours that are swapped; or by one of
    two same neighbours ("Bonn", "Bon"); or by digits that look like letters ("Site 0", "Site O"). Other
    digits, the first or last letter of a word, and words that number ("II") tell names apart. With
    ``anywhere``, words of at least three letters may differ in any one letter ("Köln", "Kön").

    >>> list(slips(["Site 1", "Site 2", "Site 11", "Site A", "Site B", "nodeA", "nodeB"], anywhere=True))
    []
    """
    buckets: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        digits, words = _bare(name)
        keys: set[tuple[Any, ...]] = {(digits, "".join(words)), ("drawn", _seen(name).translate(_DRAWN))}
        for k, word in enumerate(words):
            if len(word) >= _ANYWHERE - 1:
                shorter = {word[:i] + word[i + 1 :] for i in range(len(word))} | {word}
                keys |= {(digits, k, *words[:k], part, *words[k + 1 :]) for part in shorter}
        others = dict.fromkeys(other for key in sorted(keys, key=repr) for other in buckets.get(key, ()))
        yield from ((other, name) for other in others if _is_slip(other, name, anywhere))
        for key in keys:
            buckets.setdefault(key, []).append(name)


def _bare(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the digits of a name, and its words without accents, in small Latin letters if they look so."""
    seen = unicodedata.normalize("NFKC", _seen(name)).translate(_ALIKE)
    seen = re.sub(r"(?<=[a-z])(?=[A-Z]+(?![^\W\d_]))", " ", seen)  # "nodeA" is "node A"
    plain = "".join(c for c in unicodedata.normalize("NFD", seen) if not unicodedata.combining(c)).casefold()
    words = re.findall(r"[^\W\d_]+|[^\w\s\-.,/'&]", plain)
    return tuple(re.findall(r"\d+", plain)), tuple(words)


def _is_slip(first: str, second: str, anywhere: bool) -> bool:
    (digits, words), (other_digits, other_words) = _bare(first), _bare(second)
    if digits != other_digits:
        places = list(zip(_seen(first), _seen(second), strict=False))
        drawn = _seen(first).translate(_DRAWN) == _seen(second).translate(_DRAWN)
        return drawn and all(a == b or a.isdigit() != b.isdigit() for a, b in places)
    if "".join(words) == "".join(other_words):
        return len("".join(words)) >= _SAME
    pairs = [pair for pair in zip(words, other_words, strict=False) if pair[0] != pair[1]]
    if len(words) != len(other_words) or len(pairs) != 1:
        return False
    short, long = sorted(pairs[0], key=len)
    if len(long) < _ANYWHERE or all(_COUNTING.fullmatch(word) for word in pairs[0]):
        return False
    spots = range(len(long))
    if len(short) < len(long):
        off = [i for i in spots if long[:i] + long[i + 1 :] == short]  # several if same neighbours
        if len(off) > 1 and len(long) >= _DOUBLED:
            return True
        one, swapped = bool(off), False
    else:
        off = [i for i in spots if short[i] != long[i]]
        one = len(off) == 1
        swapped = len(off) == 2 and off[1] == off[0] + 1 and {*short[off[0] :][:2]} == {*long[off[0] :][:2]}
    if anywhere:
        return one or swapped
    return len(long) >= _WORD and (swapped or (one and off[0] in spots[1:-1]))


def writable(text: str) -> bool:
    """Return whether a text can be written: JSON can hold half a letter (a surrogate), which no file takes.

    >>> writable("Köln"), writable("\\ud800")
    (True, False)
    """
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def look_alike(first: str, second: str) -> bool:
    """Return whether two different names look the same, so that a message must escape their letters."""
    return _seen(first).translate(_ALIKE) == _seen(second).translate(_ALIKE)


def _seen(name: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFC", name) if unicodedata.category(c) != "Cf")


def spelled(first: str, second: str) -> tuple[str, str]:
    """Return two names as a message shows them, with escaped letters if they would look the same."""
    shown = ascii if look_alike(first, second) else repr
    return shown(first), shown(second)


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
            raise ValueRefused(f"{self.where}{name}: expected a number, got {field!r:.100}", None)
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
            listed = [self._item(what, k, item, nullable) for k, item in enumerate(listed)]
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
            raise ValueRefused(f"{what} of client {who!r} must be a whole number, got {value:g}", who)
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

    def _item(self, what: str, k: int, item: Any, nullable: bool) -> Any:
        if item is None and nullable:
            return math.nan
        if not is_number(item):
            who = self.clients[k] if k < len(self.clients) else f"number {k}"
            problem = " is missing" if item is None else f": expected a number, got {item!r:.100}"
            raise ValueRefused(f"{what} of client {who!r}{problem}", who)
        return item

    def _check(
        self, name: str, value: float, client: str | None, low: float, high: float, unit: str | None
    ) -> None:
        whose = f" of client {client!r}" if client else ""
        if not abs(value) <= self.largest:
            must = f"must be a finite number, at most {self.largest:g}"
            raise ValueRefused(f"{self.where}{name}{whose} {must}, got {value}", client)
        if not low <= value <= high:
            why = f" (as utility {unit!r} promises)" if unit else ""
            range_ = f"[{round(low, 6) + 0.0:g}, {round(high, 6):g}]{why}"
            raise ValueRefused(f"{self.where}{name}{whose} must lie in {range_}, got {value:g}", client)
