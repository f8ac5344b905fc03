"""Words for people: notes and lines with a code, and the sentences that terminal, page and statements share.

A `Note` is text that carries a code and the values it was made from. Code decides by ``code`` and ``values``,
never by the text. The page and the command line use them to say the same in their own words. Pseudonyms
replace names in the values before the text is made (`Note.renamed`).
"""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmerit.config import Corruption
    from fedmerit.report.terminal import Standing

# --------------------------------------------------------------------------------------------------- notes

NO_SCORE = "it has no score and is paid nothing under any rule"
"""Said of a member without a single report."""

_ZERO = "{where}{score}: the {zero:sum of|sums of} {zero} over clients {zero:is|are} zero; "
_STATED = "keys: taken from the ledger itself; compare with --roster FILE"
APART = "differ only in case, blanks or how letters are composed: they count as two"
_PAID = "payouts: decision {decision}{after}: {money} for {client}: "
_RELEASED = (
    "kept: shares were released in round {round} for the sum of {clients}, but in the ledger that round "
)
_UNTOLD = (
    ": the server may know a sum that it told nobody. This also happens if too few members answered at the "
    "end, or if the server was stopped"
)

WORDS: dict[str, str] = {
    "nothing": "",
    # scores of one round
    "no-cosine": "{where}client {client!r} has no cosine (a zero or unknown update): it counts as 0",
    "fallback": _ZERO + "computed from {used} alone",
    "split-equally": _ZERO + "split equally",
    "opposite-signs": "{where}{score}: pot {pot:.6g} and sum {sum:.6g} have opposite signs",
    "empty-pot": "{where}{score}: nothing to distribute, the pot is 0",
    "empty-up-to-rounding": "{where}{score}: nothing to distribute, the pot is 0 up to rounding",
    "phi-no-gradient": "PHI of {utility} is left out: the utility has no gradient",
    "phi-no-coordinate": "PHI of {utility} is left out: it has no gradient at {what!r}, a part of the model",
    "phi-failed": "PHI of {utility} is left out: no gradient could be computed in round {round}",
    "phi-private": "PHI is left out: members may not see each other's scores (scoring.visibility)",
    # values of a table
    "multiple": "the weights of all coalitions sum to {total:.6g}, not 1: this is a multiple of a semivalue",
    "few-orders": "no standard error from {pairs} pairs of orders, {least} are needed",
    # sums over rounds
    "spelled-alike": "clients {client!r} and {other!r} " + APART,
    "composed-alike": "clients {client!a} and {other!a} " + APART,
    "partly-zero": "client {client!r} reported {seen} of {rounds} rounds; the rest counts as zero",
    "partly-own-mean": (
        "client {client!r} reported {seen} of {rounds} rounds; the rest counts at its own mean"
    ),
    "summed-zero": "client {client!r} was in {seen} of {rounds} rounds' sums; the rest counts as zero",
    "summed-own-mean": (
        "client {client!r} was in {seen} of {rounds} rounds' sums; the rest counts at its own mean"
    ),
    "never-reported": "client {client!r} was in the sum but never reported: " + NO_SCORE,
    "only-listed": "client {client!r} is on the list of clients but never reported: " + NO_SCORE,
    "silent": "client {client!r} was summed but sent no report: round {rounds}",
    "gap": "there are no reports between rounds {gaps:few 3}: what changed then is in nobody's score",
    "gap-between": "{earlier} and {later}",
    "jump": "on the same test samples, {jumps:few 3}: what changed in between is in nobody's score",
    "jump-between": "round {earlier} ends at {ends:.6g} and round {later} begins at {begins:.6g}",
    "bound-unnamed": "standard errors of rounds that do not name their slice were added up: an upper bound",
    "bound-shared": "standard errors of rounds on the same test samples were added up: an upper bound",
    "bound-blocks": "standard errors of rounds with other blocks were added up: an upper bound",
    "aborted": "{rounds:numbered} {rounds:was|were} aborted: the model stayed as it was",
    "unreported": (
        "{rounds:numbered} {rounds:was|were} summed, but nobody reported on {rounds:it|them}: what changed "
        "in the model then is in nobody's score and in no gain"
    ),
    # shares
    "negative-refused": "negative {score} of {clients:first 5}, and negative='refuse' is set",
    "negative": "negative {score} counts as zero: {clients:first 5}",
    "negative-for-others": "negative {score} counts as zero in the shares of the others: {clients:first 5}",
    "no-gain": "the utility did not rise (gain {gain:.6g}): there is no gain to attribute",
    "raw-ee": "raw EE is close to an equal split by construction, whatever the contributions",
    "fenced": "held back by the fence: {clients:first 5}",
    "status": "{score} has status {status!r}, not 'ok'",
    "no-gain-to-divide": "the gain is {gain:.6g}, and 'impartial' divides by it",
    "nothing-positive": (
        "the positive part of {score} is {positive:.6g}, which rounding alone can leave (up to 1e-12)"
    ),
    "within-errors": (
        "the positive part of {score} is {positive:.6g}, no more than two standard errors ({noise:.6g})"
    ),
    "all-fenced": "the fence leaves no positive {score}: the others' scores are all too low",
    "undefined": "{reason}; set on_undefined to 'equal' or 'zero' to say what to do then",
    "undefined-decided": "{reason}; on_undefined={decided!r} decided",
    "no-shares": "no shares: {why}",
    "no-division": "these scores allow no shares by this rule",
    "doubted": (
        "nothing is paid: {doubts:spaced} despite_doubts=True pays anyway, and the ledger of a run then says "
        "so"
    ),
    # what a rehearsal planted
    "planted": "Rehearsal: {faults:clauses}.",
    "planted-ramp": (
        "labels were replaced by random ones on purpose, from none at the first member to all at the last "
        'one (corruption.label_noise = "{noise}")'
    ),
    "planted-noise": (
        "labels were replaced by random ones on purpose, {each:so on 12} (corruption.label_noise)"
    ),
    "planted-rate": "{percent:g} % at {client:quoted}",
    "planted-flips": "the labels of {clients:listed 12} were flipped on purpose (corruption.label_flip)",
    "planted-riders": "in place of training, {each:so on 12} on purpose (corruption.free_rider)",
    "rider-zero": "{client:quoted} sent no change",
    "rider-noise": "{client:quoted} sent random numbers",
    "rider-stale": "{client:quoted} sent back the model of one round earlier",
    "planted-copies": "{each:so on 12} on purpose (corruption.duplicate)",
    "planted-copy": "{client:quoted} trained on the data of {other:quoted}",
    "planted-tests": "{clients:listed 12} trained on test samples on purpose (corruption.test_set)",
    # what verifying a run finds, line by line
    "chain": "ledger: {records} records, chain in order",
    "chain-signed": "ledger: {records} records, chain and signatures in order",
    "unsigned": "unsigned: the run had secure aggregation off, so anyone could have written it",
    "rehearsal": "rehearsal: {holder} held all keys, so signatures prove order, not who spoke",
    "members": (
        "members: {joined} of {members} joined, each with its own key; this cannot show whose machines they "
        "were"
    ),
    "keys": "keys: they match {roster}, roster hash {hash}",
    "keys-held": (
        "keys: they match {roster}, roster hash {hash}; but {holder} held all of them, so they do not show "
        "who spoke"
    ),
    "keys-stated": _STATED,
    "keys-hashed": _STATED + ", or the hash of your roster with {hash}",
    "keys-weighted": (
        _STATED + " (there is no roster hash to compare: the hash in the terms covers other keys, or public "
        "weights that are not in the ledger)"
    ),
    "heads-none": "heads: no member has signed one yet, so everything here rests on the server alone",
    "heads": "heads: {signed} of {members} members signed the head of {place}; there are {records} records",
    "place": "record {record}, after round {rounds}",
    "place-before": "record {record}, before round 1",
    "on-chain": "head {head}...: on the chain: {place}",
    "kept-heads": "kept: all {heads} heads in {path} are on the chain",
    "kept-trained": "kept: trained in {rounds} rounds, from the models that the ledger states",
    "kept-open": _RELEASED + "does not end" + _UNTOLD,
    "kept-aborted": _RELEASED + "is aborted" + _UNTOLD,
    "kept-same": (
        "kept: rounds {rounds} started from the same M0, and not all of them have the same members in the "
        "sum ({sums:clauses}): anybody who knows these sums can subtract them"
    ),
    "kept-sum": "round {round}: {clients}",
    "kept-reports": (
        "kept: {there} of {reports} reports are in the ledger, on the outcomes that the member was told"
    ),
    "kept-lost": (
        "kept: the report of round {rounds} is not in the ledger: it was lost on the way, the server was "
        "stopped before recording it, or the server left it out"
    ),
    "signed": "{client}: last signed the head of {place}",
    "signed-none": "{client}: signed no head",
    "rounds": "rounds: {closed} of {planned}, {aborted} aborted",
    "rounds-unreported": (
        "rounds: {closed} of {planned}, {aborted} aborted, {unreported} summed without any report "
        "({rounds:numbered})"
    ),
    "moves": "models: the server's optimiser moves the model between rounds, so M0 cannot be checked",
    "differs": "round {round}: {client} {how}",
    "differs-how": "signed {what} = {own:g} of {utility}, the round is scored with {used:g}",
    "analysis": "analysis: plain updates were looked at",
    "scores": "scores: follow from the reports in the ledger",
    "scores-unwritten": "scores: not written yet",
    "scores-none": "scores: none yet",
    "scores-own": "scores: {client}'s follow from its own reports; nobody else's were recomputed",
    "files": "files: {files}: {how}",
    "file-gone": "{file} is missing",
    "file-older": "{file} is {rounds} {rounds:round|rounds} older than the ledger",
    "files-by-command": (
        "`fedmerit page {path}` or `fedmerit rewards` writes what is missing, from the ledger"
    ),
    "files-by-process": "a process is running in this folder, and writes them after the ledger",
    "files-by-resume": "`fedmerit run --resume` writes what is missing, with the ground truth",
    "withheld": "withheld: {records} records about others; this copy holds only their hashes",
    "payouts": (
        "payouts: decision {decision} (record {record}){instead}{after}: {budget:,.2f} by the rule {rule} "
        "follows from the scores, to the cent{mine}"
    ),
    "payouts-instead": ", in place of decision {decision}",
    "payouts-after": ", after round {round} of {planned}",
    "payouts-mine": "; {amount:,.2f} for {client}",
    "payout": _PAID + "share and cents follow from its scores and the totals; nobody else's were recomputed",
    "payout-stated": (
        _PAID + "cents follow from the stated share, but the share cannot be recomputed from the totals; "
        "nobody else's were recomputed"
    ),
    "despite": "doubts: decision {decision} was made despite this, as its record says: {doubt}",
    "despite-unsaid": (
        "doubts: decision {decision} was made despite this, which its record does not say: {doubt}"
    ),
    "despite-any": "doubts: by its record, decision {decision} was to be made despite any doubts",
    "head": "head: {head}",
    # in place of text that may contain a name
    "untold": "This page does not say what is wrong, because that may name members: `fedmerit verify` does",
    "untold-record": (
        "Record {record} is wrong. This page does not say how, because that may name members: `fedmerit "
        "verify` does"
    ),
    "untold-copy": "This page does not say how, because that may name members: `fedmerit verify` does",
}
"""Code -> the library's words for a note. ``{where}`` is made from the value ``round``."""

NAMES = frozenset({"client", "other", "clients"})
"""Keys of values that are members' names."""
PLAIN = frozenset({
    "score", "status", "utility", "rule", "decided", "used", "zero", "noise", "doubt", "doubts", "holder",
    "what", "head", "hash", "file", "money",
})  # fmt: skip
"""Keys of values that never contain a member's text: our own words, hashes, amounts, names of utilities."""
SOMEBODY = "another member"
"""Stands for a member whose name is not shown."""
HIDDEN = {"path": "DIR"}
"""Key -> what replaces a value that is withheld."""


class Note(str):
    """Text made from a code and values; it compares, hashes and prints as that text.

    >>> note = Note("partly-zero", client="Ulm", seen=1, rounds=2)
    >>> print(note)
    client 'Ulm' reported 1 of 2 rounds; the rest counts as zero
    >>> note.code, note.values["client"], print(note.renamed({"Ulm": "Member A"}))
    client 'Member A' reported 1 of 2 rounds; the rest counts as zero
    ('partly-zero', 'Ulm', None)
    """

    code: str
    values: Mapping[str, Any]

    def __new__(cls, code: str, /, **values: Any) -> Note:
        kept = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls._from(code, kept, WORDS[code], kept)

    @classmethod
    def _from(cls, code: str, values: Mapping[str, Any], words: str, shown: Mapping[str, Any]) -> Note:
        number = values.get("round")
        where = "" if number is None else f"round {number}: "
        return _restored(_written(words, {"where": where, **shown}), code, values)

    def __reduce__(self) -> tuple[Callable[..., Note], tuple[str, str, Mapping[str, Any]]]:
        return _restored, (str(self), self.code, self.values)

    def worded(
        self, words: Mapping[str, str], called: Mapping[str, Mapping[str, str]] | None = None, **more: Any
    ) -> Note:
        """Return the same note, and the notes inside it, in other words.

        Args:
            words: code -> words; a code that is missing keeps the library's words.
            called: key -> value -> the word for this value.
            more: further values that these words need.
        """
        values = {
            key: _each(value, lambda one: one.worded(words, called, **more))
            for key, value in self.values.items()
        }
        shown = dict(values)
        for key in shown.keys() & (called or {}).keys():
            shown[key] = (called or {})[key].get(shown[key], shown[key])
        return self._from(self.code, values, words.get(self.code, WORDS[self.code]), {**more, **shown})

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
        return names.get(value, SOMEBODY)
    return HIDDEN.get(key, "withheld")


def _by_name(key: str) -> Callable[[Any], str]:
    """Return the key that sorts a list by the names shown; a list without names keeps its order."""

    def name(one: Any) -> str:
        found = one.values.get("client", "") if isinstance(one, Note) else one if key in NAMES else ""
        return str(found)

    return name


def _written(words: str, values: Mapping[str, Any]) -> str:
    """Return words with their values filled in. Lists are joined only here, as the words ask for:

    ====================  ==========================================================================
    ``{x}``               A, B, C
    ``{x:first 2}``       A, B and 1 more
    ``{x:listed 2}``      A, B and 1 more; A, B and C where there are not more (see `listed`)
    ``{x:so on 2}``       A, B, and so on for 1 more
    ``{x:few 2}``         A; B; and 1 more
    ``{x:clauses}``       A; B; C
    ``{x:spaced}``        A B C
    ``{x:numbered}``      rounds 1, 2 and 3
    ``{x:is|are}``        the first word for one, the second for any other number
    ``{x:quoted}``        a name as it may stand in a list (see `quoted`)
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


_CONVERTED = {"r": repr, "a": ascii}


def _shown(value: Any, spec: str) -> str:
    if "|" in spec:
        one, _, more = spec.partition("|")
        return one if (value if isinstance(value, int) else len(value)) == 1 else more
    if spec == "quoted":
        return quoted(value)
    if not isinstance(value, tuple):
        return format(value, spec)
    how, _, most = spec.rpartition(" ")
    return _JOINED[how or spec](value, int(most) if how else len(value))


def _left(items: Sequence[Any], most: int, words: str) -> str:
    return words.format(len(items) - most) if len(items) > most else ""


def _by(mark: str, items: Sequence[Any], most: int) -> str:
    return mark.join(map(str, items[:most]))


_JOINED: dict[str, Callable[[Sequence[Any], int], str]] = {
    "": lambda items, most: _by(", ", items, most),
    "first": lambda items, most: first_names(items, most),
    "listed": lambda items, most: listed(items, most),
    "so on": lambda items, most: _by(", ", items, most) + _left(items, most, ", and so on for {} more"),
    "few": lambda items, most: _by("; ", items, most) + _left(items, most, "; and {} more"),
    "clauses": lambda items, most: _by("; ", items, most),
    "spaced": lambda items, most: _by(" ", items, most),
    "numbered": lambda items, most: numbered(items),
}

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
    return f"“{name}”" if "," in name or ";" in name or " and " in name else name


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
        return ", ".join(told) + f" and {len(names) - most} more"
    return ", ".join(told[:-1]) + " and " + told[-1]


def first_names(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names for a message, and how many more there are.

    >>> first_names(["A", "B"], 2), first_names(["A", "B", "C"], 2)
    ('A, B', 'A, B and 1 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def numbered(numbers: Sequence[int], most: int = 30) -> str:
    """Return round numbers as a phrase.

    >>> numbered([3]), numbered([1, 2, 5]), numbered([1, 2, 5, 6], most=2)
    ('round 3', 'rounds 1, 2 and 5', 'rounds 1, 2 and 2 more')
    """
    told = [str(number) for number in numbers[:most]]
    last = f"{len(numbers) - most} more" if len(numbers) > most else told.pop()
    return f"round{'' if len(numbers) == 1 else 's'} " + (f"{', '.join(told)} and {last}" if told else last)


def made_worse(standings: Sequence[Standing], most: int | None = None) -> str:
    """Return who surely made the model worse, without a full stop; empty if nobody surely did.

    If some member surely improved the model, a member whose rank may still be first is not accused.

    Args:
        standings: all members' standings by alpha.
        most: the most names to list; None lists all.
    """
    improved = any(one.surely > 0 for one in standings)
    harmful = [
        one.client
        for one in standings
        if one.surely < 0 and not (improved and one.rank_interval and one.rank_interval[0] == 1)
    ]
    return f"{listed(harmful, most or len(harmful))} made the model worse" if harmful else ""


def planted(corruption: Corruption, names: Mapping[str, str] | None = None) -> Note:
    """Return a sentence that says which faults the settings planted in which members; empty if none.

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


_RIDERS = {"zero": "rider-zero", "noise": "rider-noise", "stale": "rider-stale"}
