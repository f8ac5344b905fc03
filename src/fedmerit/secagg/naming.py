r"""Who misstated a product with a public direction: named from masks that were sent before.

After a round, let X be the sum of the members' integers q_i, and g a public integer direction. Each member i
states <q_i, g>, and the statements must add up to <X, g>. If they do not, the masked words prove everybody's
product. With words of 8 bytes, what member i sent is, modulo 2^64,

.. math:: y_i = q_i + b_i + \sum_{j} \epsilon_{ij} m_{ij}, \qquad \epsilon_{ij} = 1 \text{ if } i
    \text{ comes before } j \text{ in the schedule, else } -1,

where b_i is its self-mask and m_ij = m_ji the mask of a pair; a pair has one only if both ends committed to
one key before (`masks.masked_with`). So c_ij = <m_ij, g>, without a sign, gives

.. math:: \langle q_i, g \rangle = \langle y_i, g \rangle - \langle b_i, g \rangle
    - \sum_j \epsilon_{ij} c_{ij} \pmod{2^{64}}.

y_i fits the digest that i signed, and b_i follows from a seed that was rebuilt and that i committed to. Each
member signs its c_ij (`MaskTable`). Where two ends agree, this number is used for both. Where they differ,
one of them opens the key of the pair, which fits what both committed to, and who signed the wrong number is
named. Masks with a dealer who was lost before the sum follow from its rebuilt key. `judge` says what follows:

- Nobody honest is named. An honest member's numbers are true, and an opened key is the one it committed to,
  so whatever is compared with its numbers equals them.
- The values add up to <sum of the y_i - masks that the server removed, g>, whatever the c_ij are, because
  each is added once and subtracted once. So if all values are known and do not add up to <X, g>, X is false
  and the server is named. Else somebody who stated another value is named, if the equation fails.
- Two ends that agree on a false c_ij move credit between each other, and to nobody else.
- Who is silent is missing, never blamed. The values of its peers are then not proved either.

A number tells its sender's product and no more, but a second direction tells a second product, and an opened
key takes a mask away. `Client.project` therefore answers one direction only, and `Client.open_pair` keeps two
masks with members of the sum.

All this is modulo 2^64. With n members in the sum, nobody may state more than `largest_stated` (n), about
2^63 / n, in size: who finds its own product beyond it does not state. Statements then add up to less than
2^63, so if <X, g> is smaller too, an equation that holds modulo 2^64 holds. If it does not, somebody stated
more than it may, and is named.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from fedmerit.errors import BindingError, MessageError, RefusedError, ShareError
from fedmerit.identity import SERVER
from fedmerit.secagg import masks
from fedmerit.secagg.masks import RING
from fedmerit.secagg.messages import Head, digest_of, open_broadcast, seen_of
from fedmerit.secagg.quantise import BLOCK, Encoding, Words, largest_stated
from fedmerit.secagg.setting import Setting, Task, pack

__all__ = [
    "RING",
    "SERVER",
    "Direction",
    "Evidence",
    "MaskTable",
    "Verdict",
    "judge",
    "largest_stated",
    "mask_products",
    "product",
    "signed",
    "sum_again",
]

Direction = npt.NDArray[np.signedinteger[Any]]
"""Whole numbers of 32 or 64 bits, shape ``(Encoding.words,)``; 0 at the word of a secret weight."""

Key = TypeVar("Key", bound=Hashable)
Pair = tuple[str, str]
"""Two members in the order of the schedule."""

Reason = Literal["stated", "pair", "masked", "range", "sum"]
"""For what somebody is named: it stated another product than its masks prove or than its own table gives; it
signed a wrong c_ij; its table holds another product of its masked words; it stated more than `largest_stated`
in an equation that fails by a multiple of 2^64; X is not the sum (the server)."""

_BLOCK: Final = BLOCK // 2  # words of 8 bytes at a time

# ------------------------------------------------------------------------------------------------ products


def signed(value: int) -> int:
    """Return the integer in [-2^63, 2^63) that equals a value modulo 2^64.

    >>> signed(5), signed(2**64 - 5), signed(2**63)
    (5, -5, -9223372036854775808)
    """
    return (value + RING // 2) % RING - RING // 2


def product(words: bytes | memoryview | npt.NDArray[Any], direction: Direction) -> int:
    """Return <words, g> modulo 2^64.

    Args:
        words: a payload of 8 bytes a word, or an array; words of 32 bits are read as signed.
        direction: g.

    >>> product(np.array([1, 2**32 - 1], np.uint32), np.array([3, 4], np.int32)) == 2**64 - 1
    True
    """
    if not isinstance(words, np.ndarray):
        if len(words) != 8 * direction.size:
            raise BindingError(f"expected {direction.size} words of 8 bytes, got {len(words)} bytes")
        words = masks.from_wire(words, 8)
    if words.shape != direction.shape:
        raise BindingError(f"expected {direction.size} words, got an array of shape {words.shape}")
    array = words.view(np.int32) if words.dtype == np.uint32 else words
    parts = (slice(at, at + _BLOCK) for at in range(0, array.size, _BLOCK))
    return sum(_dot(_wide(array[part]), _wide(direction[part])) for part in parts) % RING


def mask_products(keys: Mapping[Key, bytes], direction: Direction) -> dict[Key, int]:
    """Return <mask, g> modulo 2^64 for the masks of these keys; no mask is ever held whole."""
    streams, found = masks.Streams(list(keys.values()), 8), dict.fromkeys(keys, 0)
    for start in range(0, direction.size, _BLOCK):
        part = _wide(direction[start : start + _BLOCK])
        for key, words in zip(keys, streams.next(part.size), strict=True):
            found[key] = (found[key] + _dot(words, part)) % RING
    return found


def _wide(block: npt.NDArray[Any]) -> masks.Wide:
    """Return whole numbers as words of 64 bits, in two's complement."""
    return block if block.dtype == np.uint64 else block.astype(np.int64).view(np.uint64)


def _dot(words: masks.Wide, direction: masks.Wide) -> int:
    """Return a product modulo 2^64."""
    return int(np.dot(words, direction))


def refuse_direction(encoding: Encoding, direction: Direction, *, member: str | None = None) -> None:
    """Raise unless this is a direction for words of 8 bytes that leaves a secret weight alone."""
    if encoding.word_bytes != 8:
        raise RefusedError("only words of 8 bytes can name anybody", stage="naming", member=member)
    if direction.dtype not in (np.int32, np.int64) or direction.shape != (encoding.words,):
        raise BindingError(
            f"expected a direction of {encoding.words} whole numbers of 32 or 64 bits, "
            f"got {direction.dtype} {direction.shape}",
            stage="naming",
            member=member,
        )
    if direction[encoding.length :].any():
        raise RefusedError("the direction would tell a secret weight", stage="naming", member=member)


def direction_digest(direction: Direction) -> bytes:
    """Return the SHA-256 of a direction, whatever the size of its numbers."""
    return digest_of(pack("fedmerit direction 1", digest_of(np.ascontiguousarray(direction, "<i8").data)))


# -------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class MaskTable:
    """What a member says of its masks in one direction; modulo 2^64.

    Args:
        member: whose.
        pairs: c_ij = <m_ij, g> by peer, for every peer with whom it has a mask; the same at both ends.
        masked: <y_i, g>, of its words as it sent them.
    """

    member: str
    pairs: Mapping[str, int] = field(repr=False)
    masked: int = field(repr=False)


@dataclass(frozen=True)
class Verdict:
    """What signed tables, resent words and rebuilt secrets prove.

    If nobody is named, nothing is disputed and nobody unproved, then every value is what was stated, modulo
    2^64, and the statements add up, unless the size of <X, g> is 2^63 or more. Then either X is false by a
    multiple of 2^64 in this direction, which `sum_again` shows, or members put too much into the sum.

    Args:
        values: the proved product by member in the sum, in [-2^63, 2^63); None if it is not proved (yet).
        named: who is named, a member or "server", and why.
        disputed: pairs whose ends differ and whose key is not opened yet.
        unproved: members without a whole table or without their words.
    """

    values: Mapping[str, int | None]
    named: Mapping[str, Reason]
    disputed: tuple[Pair, ...]
    unproved: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """Everything about one attempt that a verdict rests on and that others can check.

    Args:
        advertised: the list of heads that members were shown after the stage advertise.
        shared: the same after the stage share.
        masked: the same after the stage masked: who is in the sum.
        seeds: of the self-mask of every member in the sum.
        keys: mask keys of all dealers who are not in the sum.
        opened: keys of pairs within the sum that one end has opened.
    """

    advertised: bytes = field(repr=False)
    shared: bytes = field(repr=False)
    masked: bytes = field(repr=False)
    seeds: Mapping[str, bytes] = field(repr=False)
    keys: Mapping[str, bytes] = field(repr=False)
    opened: Mapping[Pair, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, broadcasts: Mapping[str, bytes], seeds: Mapping[str, bytes], keys: Mapping[str, bytes]
    ) -> Evidence:
        """Return the evidence of a server's `broadcasts`, `seeds` and `keys`."""
        advertised, shared, masked = (broadcasts[stage] for stage in ("advertise", "share", "masked"))
        return cls(advertised, shared, masked, dict(seeds), dict(keys))

    def with_opened(self, setting: Setting, one: str, other: str, key: bytes) -> Evidence:
        """Return the evidence with the key of one more pair."""
        return replace(self, opened={**self.opened, masks.in_order(setting, one, other): key})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; bytes in hexadecimal."""
        return {
            **{name: getattr(self, name).hex() for name in ("advertised", "shared", "masked")},
            **{
                name: {who: one.hex() for who, one in getattr(self, name).items()}
                for name in ("seeds", "keys")
            },
            "opened": [[*pair, key.hex()] for pair, key in sorted(self.opened.items())],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evidence:
        """Read what `to_dict` returned; raise `MessageError` for anything else."""
        try:
            lists = {name: bytes.fromhex(values[name]) for name in ("advertised", "shared", "masked")}
            seeds, keys = (
                {who: bytes.fromhex(one) for who, one in values[name].items()} for name in ("seeds", "keys")
            )
            opened = {(low, high): bytes.fromhex(key) for low, high, key in values["opened"]}
            found = cls(**lists, seeds=seeds, keys=keys, opened=opened)
            same = found.to_dict() == values
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MessageError(f"not the evidence of a naming: {error!r:.80}", stage="naming") from None
        if not same:
            raise MessageError("evidence of a naming in another form than it is written", stage="naming")
        return found

    def check(self, setting: Setting, task: Task) -> Attempt:
        """Return what the evidence shows; raise a `ProtocolError` unless it is of this attempt and whole."""
        keys = open_broadcast(self.advertised, setting, "advertise")
        dealt = open_broadcast(self.shared, setting, "share")
        inputs = open_broadcast(self.masked, setting, "masked")
        for heads, before, shown in ((dealt, keys, "advertise"), (inputs, dealt, "share")):
            seen = seen_of(shown, before.values())
            for name, head in heads.items():
                if name not in before or head.seen != seen:
                    raise BindingError(f"answers another list of stage {shown}", stage="naming", member=name)
        for name, head in inputs.items():
            if head.body[:2] != [task.digest, task.m0_hash]:
                raise BindingError("masked for another task", stage="naming", member=name)
        lost = [name for name in dealt if name not in inputs]
        for kind, needed, given in (("seed", list(inputs), self.seeds), ("key", lost, self.keys)):
            if sorted(needed) != sorted(given):
                raise BindingError(
                    f"expected the {kind}s of {needed}, got those of {[*given]}", stage="naming"
                )
            for name, secret in given.items():
                if len(secret) != 32 or not masks.is_secret_of(keys[name], kind, secret, setting.session):
                    raise ShareError(f"did not commit to this {kind}", stage="naming", member=name)
        pairs = {name: masks.masked_with(setting, name, dealt) for name in inputs}
        for (low, high), key in self.opened.items():
            ends = low in inputs and high in inputs and high in pairs[low]
            if not ends or masks.in_order(setting, low, high) != (low, high):
                raise BindingError(f"{low} and {high} are no pair with a mask in the sum", stage="naming")
            place = setting.members.index(high)
            said = next(row[4] for row in dealt[low].body[0] if row[0] == place)
            if masks.pair_commitment(key, setting.session, low, high) != said:
                raise ShareError(f"did not commit to this key with {high}", stage="naming", member=low)
        return Attempt(keys, inputs, pairs)


@dataclass(frozen=True)
class Attempt:
    """What checked evidence shows of an attempt."""

    advertised: Mapping[str, Head] = field(repr=False)
    inputs: Mapping[str, Head] = field(repr=False)  # heads of stage masked
    pairs: Mapping[str, tuple[str, ...]]  # by member in the sum: with whom it has a mask, also lost dealers

    @property
    def included(self) -> tuple[str, ...]:
        """The members in the sum."""
        return tuple(self.inputs)

    @property
    def digests(self) -> dict[str, str]:
        """The hashes of the masked words in the sum, by member, as `Server.inputs` has them."""
        return {name: bytes(head.body[2]).hex() for name, head in self.inputs.items()}


# ------------------------------------------------------------------------------------------------- verdict


def judge(
    setting: Setting,
    task: Task,
    direction: Direction,
    evidence: Evidence,
    tables: Mapping[str, MaskTable],
    masked_products: Mapping[str, int],
    stated: Mapping[str, int],
    total: int,
) -> Verdict:
    """Return the products that are proved, and who is named.

    The caller has checked signature, session and direction of tables and statements, that resent words have
    the digest in their member's masked head, and that `Attempt.digests` of the evidence are those recorded in
    the round: a member that signed two masked inputs could otherwise show the one that was not summed, and an
    honest server would seem to have a false X.

    Args:
        setting: the attempt.
        task: model and encoding.
        direction: g.
        evidence: lists, rebuilt secrets and opened keys.
        tables: signed, by member.
        masked_products: <y_i, g> by member, of its resent words.
        stated: signed, by member.
        total: <X, g>, an ordinary integer.
    """
    refuse_direction(task.encoding, direction)
    attempt = evidence.check(setting, task)
    for name in (*tables, *masked_products, *stated):
        if name not in attempt.included:
            raise BindingError("is not in the sum", stage="naming", member=name)
    selves, known = _rebuilt(setting, task, direction, evidence, attempt)
    whole = {name: table for name, table in tables.items() if _is_whole(table, name, attempt.pairs[name])}
    named: dict[str, Reason] = {}
    disputed: list[Pair] = []
    for name in attempt.included:
        for peer in attempt.pairs[name]:
            pair = masks.in_order(setting, name, peer)
            if pair in known:
                if name in whole and whole[name].pairs[peer] != known[pair]:
                    named.setdefault(name, "pair")
            elif name == pair[0] and name in whole and peer in whole:
                said, other = whole[name].pairs[peer], whole[peer].pairs[name]
                if said == other:
                    known[pair] = said
                else:
                    disputed.append(pair)

    values: dict[str, int | None] = {}
    for name in attempt.included:
        value, table = None, whole.get(name)
        peers = {peer: masks.in_order(setting, name, peer) for peer in attempt.pairs[name]}
        signs = {peer: masks.sign_of(setting, name, peer) for peer in peers}
        if name in masked_products and all(pair in known for pair in peers.values()):
            mask = sum(signs[peer] * known[pair] for peer, pair in peers.items())
            value = signed(masked_products[name] - selves[name] - mask)
        values[name] = value
        if table is not None:  # what it says itself must hold together, whatever others say
            masked = masked_products.get(name, table.masked)
            if masked % RING != table.masked:
                named.setdefault(name, "masked")
            own = masked - selves[name] - sum(signs[peer] * table.pairs[peer] for peer in peers)
            if name in stated and (stated[name] - own) % RING:
                named.setdefault(name, "stated")
        if name in stated and value is not None and (stated[name] - value) % RING:
            named.setdefault(name, "stated")

    proved = [value for value in values.values() if value is not None]
    if len(proved) == len(values):
        if (sum(proved) - total) % RING:
            named[SERVER] = "sum"
        elif sum(proved) == total:  # then no product lies beyond 64 bits, and statements must equal values
            for name, said in stated.items():
                if said != values[name]:
                    named.setdefault(name, "stated")
        elif sum(stated.values()) != total and abs(total) < RING // 2:
            for name, said in stated.items():
                if abs(said) > largest_stated(len(values)):
                    named.setdefault(name, "range")
    unproved = [name for name in attempt.included if name not in whole or name not in masked_products]
    return Verdict(values, named, tuple(disputed), tuple(unproved))


def _rebuilt(
    setting: Setting, task: Task, direction: Direction, evidence: Evidence, attempt: Attempt
) -> tuple[dict[str, int], dict[Pair, int]]:
    """Return the products of self-masks, and of masks whose key is known: of lost dealers, and opened."""
    binding = task.binding(setting)
    selves = {name: masks.self_key(seed, name, binding) for name, seed in evidence.seeds.items()}
    pairs = {pair: masks.stream_key(key, binding) for pair, key in evidence.opened.items()}
    for name, peers in attempt.pairs.items():
        for lost in (peer for peer in peers if peer in evidence.keys):
            public = attempt.advertised[name].body[0]
            key = masks.pair_with(setting, lost, evidence.keys[lost], name, public, stage="naming")
            pairs[masks.in_order(setting, name, lost)] = masks.stream_key(key, binding)
    return mask_products(selves, direction), mask_products(pairs, direction)


def sum_again(
    setting: Setting, task: Task, evidence: Evidence, payloads: Iterable[tuple[str, bytes | memoryview]]
) -> Words:
    """Return X as anyone can compute it from the masked words of all members in the sum, sent again.

    `judge` sees products only. A server whose X is false by a multiple of 2^64 in the direction, or not at
    all, is found by this.

    Args:
        setting: the attempt.
        task: model and encoding.
        evidence: lists and rebuilt secrets.
        payloads: each member of the sum once, with its words; one is held at a time.

    Raises:
        BindingError: these are not the words of all members in the sum, as they signed them.
    """
    attempt, encoding, binding = evidence.check(setting, task), task.encoding, task.binding(setting)
    total: npt.NDArray[Any] = np.zeros(encoding.words, f"u{encoding.word_bytes}")
    due = dict(attempt.inputs)
    for name, payload in payloads:
        head = due.pop(name, None)
        size = encoding.word_bytes * encoding.words
        if head is None or len(payload) != size or digest_of(payload) != head.body[2]:
            raise BindingError("these are not the words that it signed", stage="naming", member=name)
        masks.add_payload(total, payload)
    if due:
        raise BindingError(f"the words of {', '.join(due)} are missing", stage="naming")
    keys = [(masks.self_key(seed, name, binding), -1) for name, seed in evidence.seeds.items()]
    for lost, key in evidence.keys.items():
        peers = {
            name: attempt.advertised[name].body[0] for name in attempt.included if lost in attempt.pairs[name]
        }
        keys += masks.with_peers(setting, lost, key, peers, binding)
    masks.add_masks(total, keys)
    return masks.narrowed(total, encoding)


def _is_whole(table: MaskTable, name: str, peers: tuple[str, ...]) -> bool:
    """Return whether a table is this member's and holds one number for each of its masks, and no other."""
    numbers = [table.masked, *table.pairs.values()]
    fit = all(type(number) is int and 0 <= number < RING for number in numbers)
    return table.member == name and sorted(table.pairs) == sorted(peers) and fit
