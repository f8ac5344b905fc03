"""The witnesses of a settlement: how they are drawn, what members sign about that, and the server's part.

Members commit to a number when they agree to the directions. Once everybody who is there has stated, they are
shown the hashes of all statements and of their authors' numbers, and open their own for this list (``draw``).
The seed follows from statements and numbers; t members sign it (``drawn``) before anybody hands out a key, so
that no server shows two draws. Then
the ends of each pair seal the pair's key for its witness (``seal``), and the witness recomputes and signs
what both ends said (``witness``); `fedmerit.secagg.witness` says what follows. Each round's sum has its own
order.

A number that is opened late, or never, changes no draw; its author is unproved until it is there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from fedmerit.config import Config
from fedmerit.errors import MessageError
from fedmerit.identity import canonical
from fedmerit.protocol.direction import Entry, Manifest, numeral, whole_number

if TYPE_CHECKING:
    from fedmerit.secagg.naming import Attempt, MaskTable
    from fedmerit.secagg.setting import Setting
    from fedmerit.secagg.witness import Handed, Sighting, Weighed

KINDS = ("agreed", "draw", "nonce", "drawn", "sealed", "witness")
"""The kinds of records about witnesses: "draw" is the server's, the others are members'."""

# ------------------------------------------------------------------------------------------- what is signed


def nonce_hash(nonce: bytes) -> str:
    """Return what a member commits to when it agrees."""
    return hashlib.sha256(b"fedmerit/draw/1\n" + nonce).hexdigest()


def list_hash(statements: Mapping[str, str], committed: Mapping[str, str]) -> str:
    """Return the hash of a list: of all statements and of their authors' numbers, each by its own hash."""
    both = {"statements": dict(statements), "committed": dict(committed)}
    return hashlib.sha256(b"fedmerit/statements/1\n" + canonical(both)).hexdigest()


def opening(run: str, settlement: str, listed: str, nonce: bytes) -> dict[str, Any]:
    """Return what a member signs when it opens its number for a list, whose hash this is."""
    return {"run": run, "settlement": settlement, "listed": listed, "nonce": nonce.hex()}


def seed_of(settlement: str, statements: Mapping[str, str], nonces: Mapping[str, str]) -> str:
    """Return the seed of a draw, which no member knew when it stated."""
    drawn = {"settlement": settlement, "statements": dict(statements), "nonces": dict(nonces)}
    return hashlib.sha256(b"fedmerit/seed/1\n" + canonical(drawn)).hexdigest()


def drawn_body(run: str, settlement: str, seed: str) -> dict[str, Any]:
    """Return what a member signs about the draw: the only one it takes part in."""
    return {"run": run, "settlement": settlement, "seed": seed}


def handed_body(run: str, settlement: str, seed: str, round: int, handed: Handed) -> dict[str, Any]:
    """Return what a member signs when it hands the keys of its pairs to their witnesses."""
    parts = {"sealed": handed.sealed, "open": handed.open}
    keys = {part: {peer: _text(key) for peer, key in found.items()} for part, found in parts.items()}
    return {**drawn_body(run, settlement, seed), "round": round, **keys}


def handed_in(body: Mapping[str, Any]) -> Handed:
    """Read what an end handed over; raise MessageError if it is nothing of this kind."""
    from fedmerit.secagg.witness import Handed

    def keys(part: str, size: int) -> dict[str, bytes]:
        return {str(peer): _bytes(text, size) for peer, text in body[part].items()}

    with _reading("seal"):
        return Handed(keys("sealed", 48), keys("open", 32))


def sealed_limit(members: Collection[str], lanes: int = 1) -> int:
    """Return the most bytes of what an end hands over, or a witness signs, in one round."""
    return 1024 + sum(24 * len(name) + 256 + 17 * lanes for name in members)


def sighting_body(run: str, settlement: str, seed: str, round: int, seen: Sighting) -> dict[str, Any]:
    """Return what a witness signs of the pairs that it was drawn for."""
    values = [[*pair, numeral(value)] for pair, value in sorted(seen.values.items())]
    keys = [[*pair, _text(key)] for pair, key in sorted(seen.keys.items())]
    channels = {end: _text(shared) for end, shared in seen.channels.items()}
    shown = {"values": values, "keys": keys, "channels": channels}
    return {**drawn_body(run, settlement, seed), "round": round, **shown}


def sighting_in(body: Mapping[str, Any]) -> Sighting:
    """Read what a witness signed; raise MessageError if it is nothing of this kind."""
    from fedmerit.secagg.witness import Sighting

    with _reading("witness"):
        values = {(str(low), str(high)): whole_number(text) for low, high, text in body["values"]}
        keys = {(str(low), str(high)): _bytes(text, 32) for low, high, text in body["keys"]}
        return Sighting(values, keys, {str(end): _bytes(text, 32) for end, text in body["channels"].items()})


@contextmanager
def _reading(stage: str) -> Iterator[None]:
    """Turn what Python says of a value of another form into a MessageError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"not an answer to {stage}: {error!r:.100}", stage=stage) from None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any, size: int) -> bytes:
    data = base64.b64decode(text, validate=True)
    if len(data) != size or _text(data) != text:
        raise ValueError(f"expected {size} bytes")
    return data


# ------------------------------------------------------------------------------------------------ the draw


def colluding(config: Config) -> int:
    """Return how many members may collude with the server; all they see as witnesses unmasks nobody."""
    members, t = len(config.clients), config.threshold
    return max(min(members - t, 2 * t - members - 1), 0)


def drawn_for(entry: Entry, seed: str, config: Config) -> dict[frozenset[str], str]:
    """Return the witness of each pair of members in the sum of a round; none if there are too few of them."""
    from fedmerit.secagg.witness import witnesses

    def place(name: str) -> bytes:
        return hashlib.sha256(canonical([seed, entry.round, name])).digest()

    return witnesses(sorted(entry.participants, key=place), colluding(config))


def is_witnessed(entry: Entry, config: Config) -> bool:
    """Return whether the pairs of members in a sum have witnesses."""
    if config.word_bytes != 8:
        return False
    from fedmerit.secagg.witness import has_witnesses  # it needs cryptography

    return has_witnesses(len(entry.participants), colluding(config))


Tables = Mapping[str, Mapping[str, str]]
"""What members signed of their masks in one round: by member and peer."""


def tables_by_round(
    records: Iterable[tuple[str, Mapping[str, Any]]],
) -> dict[int, dict[str, Mapping[str, str]]]:
    """Return the tables of rounds in records, as (author, body)."""
    found: dict[int, dict[str, Mapping[str, str]]] = {}
    for author, body in records:
        if body["block"] is None:
            found.setdefault(body["round"], {})[author] = body["pairs"]
    return found


@dataclass
class Book:
    """What the records of a settlement say of its witnesses."""

    manifest: Manifest | None  # none before a panel has one
    config: Config
    committed: dict[str, str] = field(default_factory=dict)  # hashes of the numbers of who agreed
    statements: Mapping[str, str] = field(default_factory=dict)  # hashes of those made before the draw
    listed: Mapping[str, str] = field(default_factory=dict)  # hashes of their authors' numbers
    nonces: dict[str, str] = field(default_factory=dict)
    seed: str = ""
    drawn: set[str] = field(default_factory=set)  # who signed the seed
    handed: dict[tuple[int, str], Handed] = field(default_factory=dict)  # by round and end
    sightings: dict[tuple[int, str], Sighting] = field(default_factory=dict)  # by round and witness

    @classmethod
    def read(
        cls, manifest: Manifest | None, config: Config, records: Iterable[tuple[str, str, Mapping[str, Any]]]
    ) -> Book:
        """Read records, as (author, kind, body)."""
        book = cls(manifest, config)
        for author, kind, body in records:
            book.add(author, kind, body)
        return book

    def add(self, author: str, kind: str, body: Mapping[str, Any]) -> None:
        """Add one record; what a witness signed before stays as it is."""
        if self.manifest is not None and body.get("settlement") != self.manifest.digest:
            return  # of the draw of a panel's coordinates
        if kind == "agreed" and not body["wrong"]:
            self.committed[author] = body["draw"]
        elif kind == "draw":
            self.statements, self.listed = dict(body["statements"]), dict(body["committed"])
            self.seed = body["seed"]
        elif kind == "nonce":
            self.nonces[author] = body["nonce"]
        elif kind == "drawn":
            self.drawn.add(author)
        elif kind == "sealed":
            self.handed[body["round"], author] = handed_in(body)
        elif kind == "witness":
            from fedmerit.secagg.witness import Sighting

            new, key = sighting_in(body), (body["round"], author)
            old = self.sightings.get(key, new)
            parts = ("values", "keys", "channels")
            self.sightings[key] = Sighting(*({**getattr(new, part), **getattr(old, part)} for part in parts))

    def weigh(
        self,
        entry: Entry,
        setting: Setting,
        attempt: Attempt,
        tables: Mapping[str, MaskTable],
        stated: Collection[str],
    ) -> Weighed:
        """Return what witnesses prove of a sum, and who has not said what would prove the rest."""
        from fedmerit.secagg.witness import Weighed, Witnessed

        if not is_witnessed(entry, self.config):
            return Weighed({}, {})
        begun = bool(self.statements)  # else too few have stated
        weighed, late = Weighed({}, {}), {name for name in stated if begun and name in self.unopened}
        if self.is_drawn:
            drawn = drawn_for(entry, self.seed, self.config)
            handed = {name: one for (number, name), one in self.handed.items() if number == entry.round}
            seen = {name: one for (number, name), one in self.sightings.items() if number == entry.round}
            sums = Witnessed(setting, attempt, drawn, bytes.fromhex(self.seed))
            weighed = sums.weigh(tables, handed, seen)
        elif self.seed or (begun and len(self.nonces) >= self.config.threshold):  # then there must be a seed
            late |= {name for name in stated if name not in self.drawn}
        silent = {*weighed.silent} | late
        return replace(weighed, silent=tuple(name for name in entry.participants if name in silent))

    @property
    def lanes(self) -> int:
        """How many numbers a product has."""
        return 1 if self.manifest is None else self.manifest.lanes

    @property
    def unopened(self) -> tuple[str, ...]:
        """Who has not opened the number that the draw lists."""
        return tuple(name for name in self.listed if name not in self.nonces)

    @property
    def is_drawn(self) -> bool:
        """Whether t members signed the draw."""
        return bool(self.seed) and len(self.drawn) >= self.config.threshold

    def pairs(
        self, tables: Mapping[int, Tables], verdicts: Mapping[tuple[int, int | None], Any]
    ) -> tuple[int, int]:
        """Return how many pairs in all sums are proved, and how many there are.

        A verdict without anybody silent proves all pairs of its round.
        """
        shown, count = 0, 0
        assert self.manifest is not None
        for entry in self.manifest.rounds:
            unseen, here = self.unseen(entry, tables.get(entry.round, {}))
            proof = verdicts.get((entry.round, None))
            proved = self.is_drawn and proof and not proof.silent and is_witnessed(entry, self.config)
            shown, count = shown + here - (0 if proved else unseen), count + here
        return shown, count

    def unseen(self, entry: Entry, tables: Tables) -> tuple[int, int]:
        """Return of how many pairs in a sum no witness signed what both ends said, and how many there are.

        ``tables`` are the numbers that members signed of their masks in this round, by peer.
        """
        missing, count = self._unseen(entry, tables)
        return len(missing), count

    def unwitnessed(
        self,
        tables: Mapping[int, Tables],
        verdicts: Mapping[tuple[int, int | None], Any],
        away: Collection[str] = (),
    ) -> tuple[str, ...]:
        """Return the ends of all pairs that are not proved, in some sum whose pairs have witnesses.

        Once t members closed the settlement without those who are ``away``, a pair whose witness is one of
        them suffers nothing by that if an end handed over its key: else anybody could keep all others from
        being paid.
        """
        assert self.manifest is not None
        found: set[str] = set()
        for entry in self.manifest.rounds:
            proof = verdicts.get((entry.round, None))
            if not is_witnessed(entry, self.config) or (self.is_drawn and proof and not proof.silent):
                continue
            drawn = drawn_for(entry, self.seed, self.config)
            for pair in self._unseen(entry, tables.get(entry.round, {}))[0]:
                seen = self.sightings.get((entry.round, drawn[pair])) if self.is_drawn else None
                shown = seen is not None and pair in map(frozenset, seen.keys)
                excused = self.is_drawn and drawn[pair] in away and self._is_handed(entry.round, pair)
                found |= set() if shown or excused else pair
        return tuple(name for name in self.manifest.members if name in found)

    def _is_handed(self, round: int, pair: Iterable[str]) -> bool:
        """Return whether an end of a pair handed over its key."""
        low, high = pair
        handed = ((self.handed.get((round, end)), peer) for end, peer in ((low, high), (high, low)))
        return any(one is not None and peer in {*one.sealed, *one.open} for one, peer in handed)

    def _unseen(self, entry: Entry, tables: Tables) -> tuple[list[frozenset[str]], int]:
        if not is_witnessed(entry, self.config):
            masked = entry.participants if self.config.word_bytes == 8 else ()
            every = [frozenset(pair) for pair in combinations(masked, 2)]
            return every, len(every)
        unseen, count = [], 0
        for pair, witness in drawn_for(entry, self.seed, self.config).items():
            low, high = sorted(pair)
            ends = ((low, high), (high, low))
            said = {tables[end].get(peer) for end, peer in ends if end in tables}
            if said == {None}:
                continue  # they have no mask
            seen = self.sightings.get((entry.round, witness)) if self.is_drawn else None
            values = {frozenset(one): numeral(value) for one, value in seen.values.items()} if seen else {}
            count += 1
            if said != {values.get(pair)}:
                unseen.append(pair)
        return unseen, count
