r"""Who checks the mask of each pair of members in a sum, and what comes of it.

Masks prove products (`naming`) as far as the two ends of each pair state their c_ij truly: two who agree on a
false one move credit between each other. So one drawn member outside each pair, its *witness*, is given the
pair's key. It compares the key with what both ends committed to before they masked, recomputes c_ij and signs
it. Either end's key is enough. A key that fits cannot be false, so a witness accuses nobody without showing
it.

- The witness signs another c_ij than an end: it shows the key, from which anybody recomputes c_ij.
- An end sealed something else than the key: the witness shows the secret that it shares with this end
  (`Client.channel`), which fits what the two committed to, and anybody opens what was sealed.
- Neither end handed the key over: their products are not proved, until one does.
- The witness says nothing: nothing is held against the ends.

What a server learns with c colluding members: their own pairs, and the pairs that they witness. `witnesses`
deals the pairs so that the pairs of honest members that are left hold all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from fedmerit.secagg import masks
from fedmerit.secagg.naming import Attempt, MaskTable, Pair
from fedmerit.secagg.setting import Setting

FEWEST = 5
"""Members of a sum without which its pairs have no witnesses."""


def has_witnesses(members: int, colluding: int) -> bool:
    """Return whether the pairs of so many members in a sum have witnesses (`witnesses`)."""
    return members >= FEWEST and members > 3 * colluding


def witnesses(order: Sequence[str], colluding: int) -> dict[frozenset[str], str]:
    r"""Return the witness of every pair of members in a drawn order; none if there are too few of them.

    With an odd number n of members, the witness of the places a and b is their midpoint (a + b) / 2 modulo n,
    which is neither of them, and each member sees exactly one pair of each other. With an even number, this
    holds of the first n - 1, and the pair of a and the last place is witnessed by a + 3 modulo n - 1.

    Privacy needs the graph of honest members to be connected, whose edges are the pairs of which no colluding
    member saw the key. It is if n > 3c, with c members ``colluding``. Proof: say the honest members fall into
    A and B, every pair between them has a witness in C, the colluding ones, and \|A\| + \|B\| = n - c. For
    odd n, a member of A has another witness with each of B, so \|B\| <= c; likewise \|A\| <= c, and n <= 3c.
    For even n, let the last place L be in B (if it is in C, which it never serves as a witness, fewer are
    left). Without L the same holds: \|A\| <= c, \|B\| <= c + 1, so n <= 3c + 1. With n = 3c + 1 all of this
    is equal. Then A + 3 = C because of the pairs with L, and A + b = 2C for every other b in B. So A is a
    union of cosets of the group that the differences of such b generate, which has at least c places, as they
    lie in one coset: A is one coset of the subgroup of order c modulo 3c, the multiples of 3. So A + 3 = A,
    which is not C.

    >>> witnesses("abcde", 1)[frozenset("ab")]
    'd'
    >>> witnesses("abcd", 1), witnesses("abcde", 2)
    ({}, {})
    """
    n = len(order)
    if not has_witnesses(n, colluding):
        return {}
    odd = n - (n % 2 == 0)
    half = (odd + 1) // 2  # of which twice is 1
    return {
        frozenset((order[a], order[b])): order[(a + 3 if b == odd else (a + b) * half) % odd]
        for a, b in combinations(range(n), 2)
    }


@dataclass(frozen=True)
class Handed:
    """What an end hands over of its pairs, by peer: keys that only the witness can read, and open ones."""

    sealed: Mapping[str, bytes] = field(repr=False)
    open: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class Sighting:
    """What a witness signs: c_ij of pairs, keys of pairs of which an end said something else, and the secrets
    that it shares with ends who sealed no key. Pairs are in the order of the schedule."""

    values: Mapping[Pair, int] = field(repr=False)
    keys: Mapping[Pair, bytes] = field(repr=False)
    channels: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class Weighed:
    """What witnesses prove of a sum.

    ``values`` are for `naming.judge`: c_ij by pair, and None for a pair whose ends handed nothing over;
    ``keys`` are those of pairs that were shown to everybody. Without an answer of those who are ``silent``
    something is not proved; ``owing`` are those of them who owe it as witnesses.
    """

    values: Mapping[Pair, int | None] = field(repr=False)
    keys: Mapping[Pair, bytes] = field(repr=False)
    silent: tuple[str, ...] = ()
    owing: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Witnessed:
    """The pairs in one sum, and who witnesses each."""

    setting: Setting
    attempt: Attempt
    drawn: Mapping[frozenset[str], str]
    seed: bytes

    @property
    def pairs(self) -> dict[Pair, str]:
        """The witness of every pair with a mask."""
        found = {masks.in_order(self.setting, *pair): name for pair, name in self.drawn.items()}
        return {pair: name for pair, name in found.items() if self.attempt.is_masked(*pair)}

    def key(self, pair: Pair, sender: str, sealed: bytes, shared: bytes) -> bytes | None:
        """Return the key that an end sealed, under the secret that it shares with the witness."""
        key = masks.open_key(shared, self.setting, self.seed, sender, pair, sealed)
        return key if key is not None and self.attempt.is_key(self.setting, pair, key) else None

    def opened(self, pair: Pair, handed: Mapping[str, Handed]) -> bytes | None:
        """Return the key of a pair that one of its ends handed over openly."""
        for end, peer in (pair, pair[::-1]):
            key = handed[end].open.get(peer) if end in handed else None
            if key is not None and self.attempt.is_key(self.setting, pair, key):
                return key
        return None

    def sealed(self, pair: Pair, handed: Mapping[str, Handed]) -> dict[str, bytes]:
        """Return what the ends of a pair sealed for its witness, with whom they have a mask."""
        ends = ((end, peer) for end, peer in (pair, pair[::-1]) if end in handed)
        found = {end: handed[end].sealed.get(peer) for end, peer in ends}
        witness = self.drawn[frozenset(pair)]
        return {
            end: one for end, one in found.items() if one is not None and self.attempt.is_masked(end, witness)
        }

    def weigh(
        self,
        tables: Mapping[str, MaskTable],
        handed: Mapping[str, Handed],
        sightings: Mapping[str, Sighting],
    ) -> Weighed:
        """Return what is proved, and who has not said what would prove the rest."""
        values: dict[Pair, int | None] = {}
        keys: dict[Pair, bytes] = {}
        silent: set[str] = set()  # ends who handed nothing over
        owing: set[str] = set()
        for pair, witness in self.pairs.items():
            seen = sightings.get(witness, Sighting({}, {}, {}))
            shown = self.opened(pair, handed) or seen.keys.get(pair) or self._complained(pair, handed, seen)
            if shown and self.attempt.is_key(self.setting, pair, shown):
                keys[pair] = shown
            elif pair in seen.values:
                if said_of(tables, pair) <= {seen.values[pair]}:
                    values[pair] = seen.values[pair]
                else:  # it accuses an end, and does not show the key
                    owing.add(witness)
            elif {*self.sealed(pair, handed)} <= self._bad(pair, seen):
                values[pair] = None
                silent |= {*pair}
            else:
                owing.add(witness)
        in_order = [name for name in self.attempt.included if name in silent | owing]
        return Weighed(values, keys, tuple(in_order), tuple(name for name in in_order if name in owing))

    def _complained(self, pair: Pair, handed: Mapping[str, Handed], seen: Sighting) -> bytes | None:
        """Return a key that a witness complains about, although it is the right one."""
        for end, sealed in self.sealed(pair, handed).items():
            if end in seen.channels and (key := self.key(pair, end, sealed, seen.channels[end])):
                return key
        return None

    def _bad(self, pair: Pair, seen: Sighting) -> set[str]:
        """Return the ends about whom the witness complains, with the secret that it does share with them."""
        witness, setting = self.drawn[frozenset(pair)], self.setting

        def fits(end: str) -> bool:
            ends = masks.in_order(setting, witness, end)
            key = masks.pair_key(seen.channels[end], setting.session, *ends)
            return self.attempt.is_masked(*ends) and self.attempt.is_key(setting, ends, key)

        return {end for end in pair if end in seen.channels and fits(end)}


def said_of(tables: Mapping[str, MaskTable], pair: Pair) -> set[int | None]:
    """Return what the ends of a pair signed of their mask; None for a table without it."""
    return {tables[end].pairs.get(peer) for end, peer in (pair, pair[::-1]) if end in tables}
