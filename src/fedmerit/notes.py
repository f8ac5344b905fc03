"""Words for people: one catalogue of words by code, and notes, which are texts that carry their code.

`words` fills values into the words of a code. A `Note` is text that carries its code and the values it was
made from. Code decides by ``code`` and ``values``, never by the text. The page and the command line use them
to say the same in other words, and pseudonyms replace names in the values before the text is made
(`Note.renamed`).
"""

from __future__ import annotations

import difflib
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmerit.config import Corruption

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
    """Return the whole catalogue of a language."""
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
    said = catalogue()
    marks: dict[str, str | int | None] = {
        ".": said["number.decimal"],
        ",": said["number.thousands"],
        "%": said["number.percent"],
    }
    return format(value, spec).translate(str.maketrans(marks))


def day(date: str) -> str:
    """Return a day such as 2026-11-30 for people.

    >>> day("2026-11-30")
    '30 November 2026'
    """
    year, month, number = date.split("-")
    return words("date.day", day=int(number), month=words("date.months").split()[int(month) - 1], year=year)


def capital(text: str) -> str:
    """Return text whose first letter is a capital."""
    return text[:1].upper() + text[1:]


MARKS = ("b", "/b", "code", "/code", "key", "/key", "below", "/below")
_UNMARKED = dict.fromkeys(MARKS, "")

# --------------------------------------------------------------------------------------------------- notes

NAMES = frozenset({"client", "other", "clients"})
"""Keys of values that are members' names."""
PLAIN = frozenset({
    "score", "status", "utility", "rule", "decided", "used", "zero", "noise", "doubt", "doubts", "holder",
    "what", "head", "hash", "file", "money", "currency", "until", "term", "signed",
    "python", "version", "system", "extra", "packages", "gpu", "clock",
})  # fmt: skip
"""Keys of values that never contain a member's text: our own words, hashes, amounts, names of utilities."""
HIDDEN = {"path": "DIR"}
"""Key -> what replaces a value that is withheld."""


class Note(str):
    """Text made from a code and values; it compares, hashes and prints as that text.

    >>> note = Note("partly-zero", client="Ulm", seen=1, rounds=2)
    >>> print(note)
    member 'Ulm' reported 1 of 2 rounds; the rest counts as zero
    >>> note.code, note.values["client"], print(note.renamed({"Ulm": "Member A"}))
    member 'Member A' reported 1 of 2 rounds; the rest counts as zero
    ('partly-zero', 'Ulm', None)
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

    def worded(self, section: str, *, named: bool = False, **more: Any) -> Note:
        """Return the same note, and the notes inside it, in the words of a writer.

        Args:
            section: of the catalogue; a code that it does not have keeps the library's words.
            named: whether a score gets its name for people: contribution for ALPHA.
            more: further values that these words need.
        """
        values = {
            key: _each(value, lambda one: one.worded(section, named=named, **more))
            for key, value in self.values.items()
        }
        shown = values | ({"score": called("score", values["score"])} if named and "score" in values else {})
        known = catalogue()
        template = known.get(f"{section}.{self.code}", known[self.code])
        return self._from(self.code, values, template, {**more, **shown})

    def renamed(self, names: Mapping[str, str]) -> Note:
        """Return the same note with these names in place of the real ones, sorted by the new names.

        Members without a new name become "another member". All other text in the values is withheld unless
        its key is in ``PLAIN``, so a key that nobody declared hides too much rather than too little.
        """
        return Note(self.code, **{key: _renamed(key, value, names) for key, value in self.values.items()})

    def part(self, code: str) -> Note | None:
        """Return this note, or a note inside it, that has this code; None if there is none."""
        inside: list[Note] = []
        for value in self.values.values():
            _each(value, inside.append)
        found = (one.part(code) for one in inside)
        return self if self.code == code else next((one for one in found if one is not None), None)


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


def _renamed(key: str, value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Note):
        return value.renamed(names)
    if isinstance(value, tuple):
        return tuple(sorted((_renamed(key, one, names) for one in value), key=_by_name(key)))
    if key in PLAIN or value is None or value == "" or isinstance(value, int | float | Decimal):
        return value
    if key in NAMES:
        return names.get(value, words("name.somebody"))
    return HIDDEN.get(key) or words("name.withheld")


def _by_name(key: str) -> Callable[[Any], str]:
    """Return the key that sorts a list by the names shown; a list without names keeps its order."""

    def name(one: Any) -> str:
        found = one.values.get("client", "") if isinstance(one, Note) else one if key in NAMES else ""
        return str(found)

    return name


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
    parts = []
    for literal, key, spec, conversion in _parsed(words):
        parts.append(literal)
        if key is not None:
            value = values[key]
            parts.append(_shown(_CONVERTED[conversion](value) if conversion else value, spec or ""))
    return "".join(parts)


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
    told = _by(mark, items, most)
    return told if len(items) <= most else words(code, items=told, left=len(items) - most)


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

# -------------------------------------------------------------------------------------------- names, short

WIDTH = 18
"""Width of a label in letters; a wide letter counts as two."""


def labels(names: Sequence[str], width: int = WIDTH) -> dict[str, str]:
    """Return name -> label: long names lose their middle, at a place where no two labels become equal.

    >>> clinics = ["Universitätsklinikum Bonn", "Universitätsklinikum Köln", "Ulm"]
    >>> list(labels(clinics).values())
    ['Universit…kum Bonn', 'Universit…kum Köln', 'Ulm']
    """
    for tail in range((width - 1) // 2, width):  # names often differ at the end
        found = {name: _cut(name, width - 1 - tail, tail) for name in names}
        if len(set(found.values())) == len(names):
            return found
    taken = {
        name: f" ({place})" for place, name in enumerate(names, start=1)
    }  # they differ only in the middle
    return {name: _head(name, width - len(mark) - 1) + "…" + mark for name, mark in taken.items()}


def quoted(name: str) -> str:
    """Return a name for use in a list: in quotes if it would read as two names.

    >>> quoted("Ulm"), quoted("Bonn, Radiology")
    ('Ulm', '“Bonn, Radiology”')
    """
    return words("list.quoted", name=name) if re.search("[,;]| and | und ", name) else name


def _cut(name: str, head: int, tail: int) -> str:
    if sum(map(_width, name)) <= head + 1 + tail:
        return name
    return f"{_head(name, head).rstrip()}…{_head(name[::-1], tail)[::-1].lstrip()}"


def _head(name: str, width: int) -> str:
    used = 0
    for place, letter in enumerate(name):
        used += _width(letter)
        if used > width:
            return name[:place]
    return name


def _width(letter: str) -> int:
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


# ----------------------------------------------------------------------------------------------- sentences


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return names as a phrase.

    >>> listed(["A", "B", "C"]), listed(list("ABCDEFGH"), most=3)
    ('A, B and C', 'A, B, C and 5 more')
    >>> listed(["Ulm", "Bonn, Radiology"])
    'Ulm and “Bonn, Radiology”'
    """
    if len(names) == 1:
        return names[0]
    told = [quoted(name) for name in names[:most]]
    if len(names) > most:
        return words("list.more", items=_by("comma", told, most), left=len(names) - most)
    return words("list.last", items=_by("comma", told[:-1], most), last=told[-1])


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names for a message, and how many more there are.

    >>> first_names(["A", "B"], 2), first_names(["A", "B", "C"], 2)
    ('A, B', 'A, B and 1 more')
    """
    return _cut_off("list.more", "comma", names, most)


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.6, exact: int = 0) -> str:
    """Return the known name that a name is almost, or an empty text.

    Case, blanks, hyphens and underscores do not count.

    Args:
        name: as somebody wrote it.
        known: the names that there are.
        likeness: from 0 to 1: how much of both names must be the same.
        exact: known names of at most so many letters must be the same in all that counts.

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
    told = [str(number) for number in numbers[:most]]
    left = len(numbers) - most
    last = words("list.left", left=left) if left > 0 else told.pop()
    phrase = words("list.last", items=_by("comma", told, most), last=last) if told else last
    return words("list.rounds", count=len(numbers), numbers=phrase)


def moment(seconds: int | None) -> str:
    """Return a time for people, in UTC.

    >>> moment(0)
    '1970-01-01 00:00 UTC'
    """
    return "" if seconds is None else time.strftime(words("date.moment"), time.gmtime(seconds))


def planted(corruption: Corruption, names: Mapping[str, str] | None = None) -> Note:
    """Return a sentence that says which faults the settings planted in whom; empty if there are none.

    Args:
        corruption: the corruption settings.
        names: member -> name shown, if names are hidden; members are then sorted by the names shown, and
            members without one stay unnamed.

    >>> from fedmerit.config import Corruption
    >>> print(planted(Corruption(label_flip=["Site 10"])))
    Rehearsal: the labels of Site 10 were flipped on purpose (corruption.label_flip).
    """
    faults = tuple(_planted(corruption))
    found = Note("planted", faults=faults) if faults else Note("nothing")
    return found.renamed(names) if names else found


def _planted(corruption: Corruption) -> Iterator[Note]:
    noise = corruption.label_noise
    if isinstance(noise, str):
        yield Note("planted-ramp", noise=noise)
    elif rates := [
        Note("planted-rate", client=name, percent=100 * rate) for name, rate in noise.items() if rate
    ]:
        yield Note("planted-noise", each=rates)
    if corruption.label_flip:
        yield Note("planted-flips", clients=tuple(corruption.label_flip))
    if riders := [Note(_RIDERS[kind], client=name) for name, kind in corruption.free_rider.items()]:
        yield Note("planted-riders", each=riders)
    if copies := [
        Note("planted-copy", client=name, other=other) for name, other in corruption.duplicate.items()
    ]:
        yield Note("planted-copies", each=copies)
    if corruption.test_set:
        yield Note("planted-tests", clients=tuple(corruption.test_set))
    if lies := [
        Note("planted-lie", client=name, factor=factor) for name, factor in corruption.misstate.items()
    ]:
        yield Note("planted-lies", each=lies)


_RIDERS = {"zero": "rider-zero", "noise": "rider-noise", "stale": "rider-stale"}
