"""Words for people: one catalogue of words by code, and notes, which are texts that carry their code.

Code decides by the ``code`` and ``values`` of a `Note`, never by its text; the page and the command line use
them to say the same in other words.
"""

from __future__ import annotations

import difflib
import math
import re
import string
import time
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

# ----------------------------------------------------------------------------------------------- catalogue

CATALOGUES = Path(__file__).with_name("words")
"""All words that people read, by code; one file for each language."""
LANGUAGES = ("en", "de")
_language = ContextVar("language", default="en")


@contextmanager
def speaking(language: str) -> Iterator[None]:
    """Say all words in a language within this context: page and statements are made in one.

    >>> with speaking("de"):
    ...     words("list.rounds", count=2, numbers="1, 2")
    'Runden 1, 2'
    """
    before = _language.set(language)
    try:
        yield
    finally:
        _language.reset(before)


def catalogue() -> dict[str, str]:
    """Return code -> words in the language that is spoken; all but notes as ``section.code``."""
    return catalogue_of(_language.get())


@cache
def catalogue_of(language: str) -> dict[str, str]:
    with (CATALOGUES / f"{language}.toml").open("rb") as file:
        sections = tomllib.load(file)
    notes: dict[str, str] = sections.pop("note")
    return notes | {f"{name}.{code}": text for name, part in sections.items() for code, text in part.items()}


def words(code: str, marks: Mapping[str, str] | None = None, /, **values: Any) -> str:
    """Return the words for a code, with their values filled in.

    Args:
        code: ``section.code`` in the catalogue.
        marks: what a writer puts for ``{b}``, ``{/b}`` and the other marks; nothing unless given.
        values: what the words take; lists are joined only here.

    >>> words("pay.stands", number=1, budget="5.00 EUR", rule="fair", rounds=2)
    'Decision 1 is in force: it divides 5.00 EUR by the rule “fair”, after two rounds.'
    """
    return _written(catalogue()[code], {**(marks or _UNMARKED), **values})


def called(section: str, key: str) -> str:
    """Return the word for a key, or the key itself if its section has none."""
    return catalogue().get(f"{section}.{key}", key)


def sentence(text: str) -> str:
    """Return a note as a sentence.

    >>> sentence("round 4 was aborted")
    'Round 4 was aborted.'
    """
    return f"{capital(text)}."


def formatted(value: float | Decimal, spec: str) -> str:
    """Return a number as the language writes it.

    >>> formatted(1234.5, ",.2f"), formatted(0.125, ".1%")
    ('1,234.50', '12.5%')
    >>> with speaking("de"):
    ...     formatted(1234.5, ",.2f")
    '1.234,50'
    """
    marks = {mark: words(f"number.{name}") for mark, name in _NUMBER_MARKS.items()}
    return "".join(marks.get(letter, letter) for letter in format(value, spec))


_NUMBER_MARKS = {".": "decimal", ",": "thousands", "%": "percent"}


def digits_for(largest: float) -> int:
    """Return the decimals for numbers up to this size: 4 as a rule, more for small, fewer for large ones.

    >>> [digits_for(size) for size in (0.0, 2e-5, 0.03, 1.0, 20_000.0, 1e9)]
    [4, 7, 4, 4, 2, 0]
    """
    if not largest:
        return 4
    power = math.floor(math.log10(largest))
    return min(15, 2 - power) if power < -2 else 4 if power < 3 else max(0, 6 - power)


def signed(value: float | None, digits: int = 4) -> str:
    """Return a number with its sign, or a dash."""
    return "-" if value is None else formatted(value, f"+.{digits}f")


def day(date: str) -> str:
    """Return a day such as 2026-11-30 for people.

    >>> day("2026-11-30")
    '30 November 2026'
    """
    year, month, number = date.split("-")
    return words("date.day", day=int(number), month=words("date.months").split()[int(month) - 1], year=year)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


MARKS = ("b", "/b", "code", "/code", "key", "/key", "below", "/below")
_UNMARKED = dict.fromkeys(MARKS, "")

# --------------------------------------------------------------------------------------------------- notes


class Note(str):
    """Text made from a code and values; it compares, hashes and prints as that text.

    >>> note = Note("partly-zero", client="Ulm", seen=1, rounds=2)
    >>> print(note)
    member 'Ulm' reported 1 of 2 rounds; the rest counts as zero
    >>> note.code, note.values["client"]
    ('partly-zero', 'Ulm')
    """

    code: str
    values: Mapping[str, Any]

    def __new__(cls, code: str, /, **values: Any) -> Note:
        kept = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls._from(code, kept, catalogue()[code], kept)

    @classmethod
    def _from(cls, code: str, values: Mapping[str, Any], template: str, shown: Mapping[str, Any]) -> Note:
        number = values.get("round")
        where = "" if number is None else words("list.where", round=number)
        return _restored(_written(template, {"where": where, **shown}), code, values)

    def __reduce__(self) -> tuple[Callable[..., Note], tuple[str, str, Mapping[str, Any]]]:
        return _restored, (str(self), self.code, self.values)

    def named(self) -> Note:
        """Return the same note with scores, also in the notes inside it, under their names for people."""
        values = {key: _each(value, Note.named) for key, value in self.values.items()}
        score = {"score": called("score", values["score"])} if "score" in values else {}
        return self._from(self.code, values, catalogue()[self.code], {**values, **score})

    def part(self, code: str) -> Note | None:
        """Return this note, or a note inside it, that has this code; None if there is none."""
        if self.code == code:
            return self
        inside: list[Note] = []
        for value in self.values.values():
            _each(value, inside.append)
        return next(filter(None, (note.part(code) for note in inside)), None)


def code_of(text: str) -> str:
    """Return the code of a note; empty for plain text, such as a note from a file or from other software."""
    return text.code if isinstance(text, Note) else ""


def _restored(text: str, code: str, values: Mapping[str, Any]) -> Note:
    note = str.__new__(Note, text)
    note.code, note.values = code, values
    return note


def _each(value: Any, change: Callable[[Note], Any]) -> Any:
    """Return a value with ``change`` applied to each note in it."""
    if isinstance(value, Note):
        return change(value)
    return tuple(_each(one, change) for one in value) if isinstance(value, tuple) else value


def _written(words: str, values: Mapping[str, Any]) -> str:
    """Return words with their values filled in. Lists and plurals are made only here, as the words ask for:

    ====================  ==========================================================================
    ``{x}``               A, B, C
    ``{x:first 2}``       A, B and 1 more
    ``{x:listed 2}``      A, B and 1 more; A, B and C where there are not more (see `listed`)
    ``{x:so on 2}``       A, B, and so on for 1 more
    ``{x:few 2}``         A; B; and 1 more
    ``{x:clauses}``       A; B; C
    ``{x:spaced}``        A B C
    ``{x:numbered}``      rounds 1, 2 and 3; ``{x:Numbered}`` begins with a capital letter
    ``{n:count}``         three, or 12; ``{n:Count}`` begins with a capital letter
    ``{x:is|are}``        the first word for one, the second for any other number
    ``{x:quoted}``        a name as it may stand in a list (see `quoted`)
    ``{x!r}``             a name in quotation marks, without characters that cannot be printed
    ====================  ==========================================================================
    """
    text = ""
    for literal, key, spec, conversion in _parsed(words):
        text += literal
        if key is not None:
            value = values[key]
            text += _shown(_CONVERTED[conversion](value) if conversion else value, spec or "")
    return text


@cache
def _parsed(words: str) -> tuple[tuple[str, str | None, str | None, str | None], ...]:
    return tuple(string.Formatter().parse(words))


def _in_quotes(value: Any, write: Callable[[Any], str]) -> str:
    """Return a value as Python writes it; text between the quotation marks of the language."""
    marks, shown = catalogue()["list.quotes"].split(), write(value)
    return f"{marks[0]}{shown[1:-1]}{marks[1]}" if marks and isinstance(value, str) else shown


_CONVERTED = {"r": partial(_in_quotes, write=repr), "a": partial(_in_quotes, write=ascii)}


def _shown(value: Any, spec: str) -> str:
    if "|" in spec:
        one, _, more = spec.partition("|")
        return one if (value if isinstance(value, int) else len(value)) == 1 else more
    if spec[:1].isupper():
        return capital(_shown(value, spec.lower()))
    if spec == "count":
        small = words("list.counts").split()
        return small[value] if value < len(small) else str(value)
    if spec == "quoted":
        return quoted(value)
    if not isinstance(value, tuple):
        return formatted(value, spec) if isinstance(value, int | float | Decimal) else format(value, spec)
    how, _, most = spec.rpartition(" ") if spec[-1:].isdigit() else (spec, "", "")
    return _JOINED[how](value, int(most or _MOST.get(how, len(value))))


def _by(code: str, items: Sequence[Any], most: int) -> str:
    return words(f"list.{code}").join(map(str, items[:most]))


def _cut_off(code: str, mark: str, items: Sequence[Any], most: int) -> str:
    shown = _by(mark, items, most)
    return shown if len(items) <= most else words(code, items=shown, left=len(items) - most)


_JOINED: dict[str, Callable[[Sequence[Any], int], str]] = {
    "": lambda items, most: _by("comma", items, most),
    "first": lambda items, most: first_names(items, most),
    "listed": lambda items, most: listed(items, most),
    "so on": lambda items, most: _cut_off("list.so-on", "comma", items, most),
    "few": lambda items, most: _cut_off("list.few", "clause", items, most),
    "clauses": lambda items, most: _by("clause", items, most),
    "spaced": lambda items, most: " ".join(map(str, items)),
    "numbered": lambda items, most: numbered(items, most),
}
_MOST = {"listed": 6, "numbered": 30}
"""The most items that these name unless the words say another number."""

# ----------------------------------------------------------------------------------------------- sentences


def quoted(name: str) -> str:
    """Return a name for use in a list: in quotes if it would read as two names.

    >>> quoted("Ulm"), quoted("Bonn, Radiology")
    ('Ulm', '“Bonn, Radiology”')
    """
    return words("list.quoted", name=name) if re.search("[,;]| and | und ", name) else name


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return names as a phrase.

    >>> listed(["A", "B", "C"]), listed(list("ABCDEFGH"), most=3)
    ('A, B and C', 'A, B, C and 5 more')
    >>> listed(["Ulm", "Bonn, Radiology"])
    'Ulm and “Bonn, Radiology”'
    """
    if len(names) == 1:
        return names[0]
    named = [*map(quoted, names)]
    if len(names) > most:
        return first_names(named, most)
    return words("list.last", items=_by("comma", named[:-1], most), last=named[-1])


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names for a message, and how many more there are: A, B and 1 more."""
    return _cut_off("list.more", "comma", names, most)


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6, exact: int = 0) -> str:
    """Return the known name that a name is almost, or an empty text; case, blanks, "-" and "_" do not count.

    ``likeness`` says how much of both names must be the same, from 0 to 1. Known names of at most ``exact``
    letters must be the same in all that counts.

    >>> nearest("round", ["rounds", "lr"]), nearest("Se-Alpha", ["se_alpha"]), nearest("colour", ["rounds"])
    ('rounds', 'se_alpha', '')
    """
    folded = {_folded(one): one for one in reversed([*known])}
    own = _folded(name)
    if own in folded:
        return folded[own]
    close = difflib.get_close_matches(own, [one for one in folded if len(one) > exact], 1, likeness)
    return folded[close[0]] if close else ""


def meant(name: str, known: Iterable[str]) -> str:
    """Return a question for messages that names the known name closest to this one; empty if none is close.

    >>> meant("round", ["rounds", "lr"])
    ' (did you mean rounds?)'
    """
    close = nearest(name, known)
    return f" (did you mean {close}?)" if close else ""


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


def numbered(numbers: Sequence[int], most: int = 30) -> str:
    """Return round numbers as a phrase.

    >>> numbered([3]), numbered([1, 2, 5]), numbered([1, 2, 5, 6], most=2)
    ('round 3', 'rounds 1, 2 and 5', 'rounds 1, 2 and 2 more')
    """
    phrase = listed([*map(str, numbers)], most)
    return words("list.rounds", count=len(numbers), numbers=phrase)


def moment(seconds: int | None) -> str:
    """Return a time for people, in UTC.

    >>> moment(0)
    '1970-01-01 00:00 UTC'
    """
    return "" if seconds is None else time.strftime(words("date.moment"), time.gmtime(seconds))


# --------------------------------------------------------- names that may be one, spelled differently

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


def look_alike(first: str, second: str) -> bool:
    """Return whether two different names look the same, so that a message must escape their letters."""
    return _seen(first).translate(_ALIKE) == _seen(second).translate(_ALIKE)


def _seen(name: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFC", name) if unicodedata.category(c) != "Cf")


def spelled(first: str, second: str) -> tuple[str, str]:
    """Return two names as a message shows them, with escaped letters if they would look the same."""
    shown = ascii if look_alike(first, second) else repr
    return shown(first), shown(second)


# ------------------------------------------------------------------------------------------- what to install

EXTRAS = {
    "engine": ("torch", "safetensors"),
    "data": ("pillow",),
    "page": ("jinja2", "vl-convert-python"),
    "pandas": ("pandas",),
    "xlsx": ("openpyxl",),
    "plot": ("altair",),
    "flower": ("flwr",),
    "nvflare": ("nvflare",),
    "dp": ("dp-accounting",),
}
"""The extras that people install, and the packages in them."""


def install(extra: str) -> str:
    """Return the command that installs an extra, wherever fedmerit itself came from.

    >>> install("page")
    'pip install jinja2 vl-convert-python'
    """
    return " ".join(("pip install", *EXTRAS[extra]))
