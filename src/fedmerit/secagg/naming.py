r"""Who misstated a product with a public direction: named from masks that were sent before.

Let X be the sum of the members' integers q_i, and g a public integer direction. What members state as
<q_i, g> must add up to <X, g>. If it does not, the masked words prove everybody's product. Modulo 2^64,
member i sent

.. math:: y_i = q_i + b_i + \sum_{j} \epsilon_{ij} m_{ij}, \qquad \epsilon_{ij} = 1 \text{ if } i
    \text{ comes before } j \text{ in the schedule, else } -1,

with b_i its self-mask and m_ij = m_ji the mask of a pair (`masks.masked_with`). So c_ij = <m_ij, g> gives

.. math:: \langle q_i, g \rangle = \langle y_i, g \rangle - \langle b_i, g \rangle
    - \sum_j \epsilon_{ij} c_{ij} \pmod{2^{64}}.

The server kept y_i, which fits the digest that i signed; b_i is of the seed that was rebuilt. Each member
signs its c_ij (`MaskTable`). Where the two ends differ, the key of the pair is opened, and who signed the
wrong number is named. Two ends that agree on a false c_ij would move credit between each other, and to nobody
else: a drawn witness of each pair finds that out (`witness`).

- Nobody honest is named: whatever is compared with an honest member's numbers equals them.
- The values add up to the sum without the masks that the server removed, whatever the c_ij are. So if all are
  known and do not add up to <X, g>, X is false and the server is named.
- A silent member is missing, never blamed. The values of its peers are then not proved, unless a witness of
  the pair signed the peer's number.

A second direction would tell a second product, and an opened key takes a mask away. `Client.project`
therefore answers one direction for each purpose, and `Client.open_pair` keeps two masks with members of the
sum. With n members in the sum, nobody may state more than `largest_stated` (n): statements then add up to
less than 2^63, so an equation that holds modulo 2^64 holds, or somebody stated more than it may and is named.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import to_builtins

from fedmerit.errors import BindingError, RefusedError, ShareError, placing
from fedmerit.identity import SERVER
from fedmerit.secagg import masks
from fedmerit.secagg.board import Board, lanes, packed, signed_lanes
from fedmerit.secagg.masks import RING
from fedmerit.secagg.messages import Digest, Head, dealt_to, open_broadcast, revealed, seen_of
from fedmerit.secagg.quantise import BLOCK, Direction, Encoding, largest_stated
from fedmerit.secagg.setting import Setting, Task

Key = TypeVar("Key", bound=Hashable)
Pair = tuple[str, str]
"""Two members in the order of the schedule."""

Reason = Literal["stated", "part", "pair", "range", "sum"]
"""For what somebody is named: it stated another product than its masks prove or than its own table gives
("part" where that is a part of a block); it signed a wrong c_ij; it stated more than `largest_stated` in an
equation that fails by a multiple of 2^64; X is not the sum (the server)."""

Lines = Direction | Board
"""One direction, whose products are plain integers, or those of a panel, whose products are packed."""
_BLOCK: Final = BLOCK // 2  # words of 8 bytes at a time

# ------------------------------------------------------------------------------------------------ products


def signed(value: int) -> int:
    """Return the integer in [-2^63, 2^63) that equals a value modulo 2^64.

    >>> signed(5), signed(2**64 - 5), signed(2**63)
    (5, -5, -9223372036854775808)
    """
    return (value + RING // 2) % RING - RING // 2


def product(payload: bytes | memoryview, direction: Lines) -> int:
    """Return <words, g> modulo 2^64, given words of 8 bytes each.

    >>> product(np.array([1, 2**64 - 1], "<u8").tobytes(), np.array([3, 4], np.int32)) == 2**64 - 1
    True
    """
    if isinstance(direction, Board):
        return direction.of_words(masks.from_wire(payload, 8))
    if len(payload) != 8 * direction.size:
        raise BindingError(f"expected {direction.size} words of 8 bytes, got {len(payload)} bytes")
    words = masks.from_wire(payload, 8)
    parts = (slice(at, at + _BLOCK) for at in range(0, words.size, _BLOCK))
    return sum(_dot(words[part], direction[part]) for part in parts) % RING


def mask_products(keys: Mapping[Key, bytes], direction: Lines, *, pairs: bool = False) -> dict[Key, int]:
    """Return <mask, g> modulo 2^64 for the masks of these keys; no mask is ever held whole.

    Those of ``pairs`` in the sum are without the noise that a panel adds to them.
    """
    if isinstance(direction, Board):
        return {key: (direction.of_pair if pairs else direction.of_key)(own) for key, own in keys.items()}
    streams, products = masks.Streams(list(keys.values()), 8), dict.fromkeys(keys, 0)
    for start in range(0, direction.size, _BLOCK):
        part = direction[start : start + _BLOCK]
        for key, words in zip(keys, streams.next(part.size), strict=True):
            products[key] = (products[key] + _dot(words, part)) % RING
    return products


def _dot(words: npt.NDArray[Any], direction: Direction) -> int:
    """Return the product modulo 2^64 of words of 8 bytes and a direction."""
    return int(np.dot(words, direction.astype(np.int64).view(np.uint64)))


def refuse_direction(encoding: Encoding, direction: Lines) -> None:
    """Raise unless this is a direction for words of 8 bytes that leaves a secret weight alone."""
    if encoding.word_bytes != 8:
        raise RefusedError("only words of 8 bytes can name anybody")
    if isinstance(direction, Board):
        if direction.size > encoding.length:
            raise BindingError(f"expected coordinates of {encoding.length}, got number {direction.size}")
        return
    if direction.dtype != np.int32 or direction.shape != (encoding.words,):
        raise BindingError(
            f"expected a direction of {encoding.words} whole numbers of 32 bits, "
            f"got {direction.dtype} {direction.shape}"
        )
    if direction[encoding.length :].any():
        raise RefusedError("the direction would tell a secret weight")


# -------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class MaskTable:
    """What a member says of its masks in one direction, modulo 2^64: c_ij by peer.

    Those of a panel are packed, ``lanes`` numbers in one.
    """

    member: str
    pairs: Mapping[str, int] = field(repr=False)
    lanes: int = 1

    def lane(self, place: int) -> MaskTable:
        """Return the table of one of the packed numbers."""
        return MaskTable(
            self.member, {peer: lanes(value, self.lanes)[place] for peer, value in self.pairs.items()}
        )


@dataclass(frozen=True)
class Verdict:
    """What signed tables, masked words and rebuilt secrets prove.

    If nobody is named, nothing is disputed and nobody unproved, then every value is what was stated, modulo
    2^64, and the statements add up, unless the size of <X, g> is 2^63 or more.
    """

    values: Mapping[str, int | None]  # the product by member, in [-2^63, 2^63); None: not proved
    named: Mapping[str, Reason]  # a member or "server", and why
    disputed: tuple[Pair, ...]  # pairs whose ends differ and whose key is not opened yet
    unproved: tuple[str, ...]  # members without a whole table or a statement


@dataclass(frozen=True)
class Evidence:
    """Everything about one attempt that a verdict rests on and that others can check."""

    advertised: bytes = field(repr=False)  # the list of heads that members were shown after this stage
    shared: bytes = field(repr=False)
    masked: bytes = field(repr=False)
    seeds: Mapping[str, Digest] = field(repr=False)  # of the self-mask of every member in the sum
    keys: Mapping[str, Digest] = field(repr=False)  # mask keys of all dealers who are not in the sum
    extra: bytes = field(default=b"", repr=False)  # `Task.extra`
    opened: tuple[tuple[str, str, Digest], ...] = field(default=(), repr=False)
    """The ends of pairs within the sum in the order of the schedule, and the pair's key."""

    def with_opened(self, setting: Setting, one: str, other: str, key: bytes) -> Evidence:
        """Return the evidence with the key of one more pair."""
        keys = {row[:2]: row for row in self.opened}
        low, high = masks.in_order(setting, one, other)
        return replace(self, opened=tuple(sorted({**keys, (low, high): (low, high, key)}.values())))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; bytes in base64."""
        values: dict[str, Any] = to_builtins(self)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evidence:
        """Read what `to_dict` returned; raise `MessageError` for anything else."""
        with placing("naming"):
            return revealed(values, cls)

    @placing("naming")
    def check(self, setting: Setting, task: Task) -> Attempt:
        """Return what the evidence shows; raise a `ProtocolError` unless it is of this attempt and whole."""
        attempt = attempt_in((self.advertised, self.shared, self.masked), setting, task)
        keys, dealt, inputs = attempt.advertised, attempt.dealt, attempt.inputs
        lost = [name for name in dealt if name not in inputs]
        for kind, owners, secrets in (("seed", [*inputs], self.seeds), ("key", lost, self.keys)):
            if sorted(owners) != sorted(secrets):
                raise BindingError(f"expected the {kind}s of {owners}, got those of {[*secrets]}")
            for name, secret in secrets.items():
                if len(secret) != 32 or not masks.is_secret_of(keys[name], kind, secret, setting.session):
                    raise ShareError(f"did not commit to this {kind}", member=name)
        if list(self.opened) != sorted({row[:2]: row for row in self.opened}.values()):
            raise BindingError("opened pairs twice or out of order")
        for low, high, key in self.opened:
            if not attempt.is_masked(low, high) or masks.in_order(setting, low, high) != (low, high):
                raise BindingError(f"{low} and {high} are no pair with a mask in the sum")
            if not attempt.is_key(setting, (low, high), key):
                raise ShareError(f"did not commit to this key with {high}", member=low)
        return attempt


@dataclass(frozen=True)
class Attempt:
    """What the signed lists of an attempt show."""

    advertised: Mapping[str, Head] = field(repr=False)
    dealt: Mapping[str, Head] = field(repr=False)
    inputs: Mapping[str, Head] = field(repr=False)  # heads of stage masked
    pairs: Mapping[str, tuple[str, ...]]  # by member in the sum: with whom it has a mask, also lost dealers

    @property
    def included(self) -> tuple[str, ...]:
        """The members in the sum."""
        return tuple(self.inputs)

    @property
    def digests(self) -> dict[str, str]:
        """The hashes of the masked words in the sum, by member, as `Server.inputs` has them."""
        return {name: head.body.words.hex() for name, head in self.inputs.items()}

    def is_masked(self, name: str, peer: str) -> bool:
        """Return whether two members are in the sum, with a mask between them."""
        return peer in self.inputs and peer in self.pairs.get(name, ())

    def is_key(self, setting: Setting, pair: Pair, key: bytes) -> bool:
        """Return whether both ends of a pair, in the order of the schedule, committed to this key."""
        row = dealt_to(self.dealt[pair[0]], setting.members.index(pair[1]))
        return row is not None and masks.pair_commitment(key, setting.session, *pair) == row.pair


def attempt_in(lists: tuple[bytes, bytes, bytes], setting: Setting, task: Task) -> Attempt:
    """Return what lists of heads show (advertise, share, masked); raise unless they belong to each other."""
    stages = ("advertise", "share", "masked")
    keys, dealt, inputs = (
        open_broadcast(data, setting, stage) for data, stage in zip(lists, stages, strict=True)
    )
    for heads, before, shown in ((dealt, keys, "advertise"), (inputs, dealt, "share")):
        seen = seen_of(shown, before.values())
        for name, head in heads.items():
            if name not in before or head.seen != seen:
                raise BindingError(f"answers another list of stage {shown}", member=name)
    for name, head in inputs.items():
        if (head.body.task, head.body.m0) != (task.digest, task.m0_hash):
            raise BindingError("masked for another task", member=name)
    return Attempt(keys, dealt, inputs, {name: masks.masked_with(setting, name, dealt) for name in inputs})


# ------------------------------------------------------------------------------------------------- verdict


@placing("naming")
def judge(
    setting: Setting,
    task: Task,
    direction: Lines,
    evidence: Evidence,
    tables: Mapping[str, MaskTable],
    masked_products: Mapping[str, int],
    stated: Mapping[str, range],
    total: int,
    witnessed: Mapping[Pair, int | None] | None = None,
) -> Verdict:
    """Return the products that are proved, and who is named.

    The caller has checked signature, session and direction of tables and statements, that masked words have
    the digest in their member's masked head, and that `Attempt.digests` of the evidence are those recorded in
    the round: a member that signed two masked inputs could otherwise show the one that was not summed, and an
    honest server would seem to have a false X.

    ``masked_products`` are <y_i, g> by member who stated, of its masked words; ``stated`` the integers that
    fit what it signed; ``total`` is <X, g>, an ordinary integer. ``witnessed`` has the c_ij that a pair's
    witness signed, which counts where one end's is missing; None where it should have been able to, and was
    not: what both ends say proves nothing then. All numbers of a panel are packed.
    """
    refuse_direction(task.encoding, direction)
    attempt = evidence.check(setting, task)
    for name in (*tables, *masked_products, *stated):
        if name not in attempt.included:
            raise BindingError("is not in the sum", member=name)
    selves, rebuilt = _rebuilt(setting, task, direction, evidence, attempt)
    where = _Sum(setting, attempt, selves, rebuilt)
    if not isinstance(direction, Board):
        return where.judged(tables, masked_products, stated, total, witnessed or {})
    count, each = direction.lanes, []
    whole = {name: table for name, table in tables.items() if _is_whole(table, name, attempt.pairs[name])}
    sights = {
        pair: value if value is not None and 0 <= value < RING**count else None
        for pair, value in (witnessed or {}).items()
    }
    for lane in range(count):

        def own(value: int, lane: int = lane) -> int:
            return lanes(value, count)[lane]

        def alone(value: int, lane: int = lane) -> range:
            number = signed_lanes(value, count)[lane]
            return range(number, number + 1)

        part = replace(
            where,
            selves={name: own(value) for name, value in selves.items()},
            rebuilt={pair: own(value) for pair, value in rebuilt.items()},
        )
        seen = {pair: None if value is None else own(value) for pair, value in sights.items()}
        each.append(
            part.judged(
                {name: table.lane(lane) for name, table in whole.items()},
                {name: own(value) for name, value in masked_products.items()},
                {name: alone(fits.start) for name, fits in stated.items()},
                alone(total).start,
                seen,
            )
        )
    return _together(each, attempt.included)


def _together(each: Sequence[Verdict], names: Sequence[str]) -> Verdict:
    """Return one verdict about packed numbers from those about each of them."""
    values: dict[str, int | None] = {}
    for name in names:
        numbers = [verdict.values[name] for verdict in each]
        known = [number for number in numbers if number is not None]
        values[name] = packed(known) if len(known) == len(numbers) else None
    named: dict[str, Reason] = {}
    for verdict in each:
        named = {**verdict.named, **named}
    disputed = dict.fromkeys(pair for verdict in each for pair in verdict.disputed)
    unproved = [name for name in names if any(name in verdict.unproved for verdict in each)]
    return Verdict(values, named, tuple(disputed), tuple(unproved))


@dataclass(frozen=True, eq=False)
class _Sum:
    """One sum and the products of masks in it that are known: self-masks, and masks whose key is known."""

    setting: Setting
    attempt: Attempt
    selves: Mapping[str, int]
    rebuilt: Mapping[Pair, int]

    def judged(
        self,
        tables: Mapping[str, MaskTable],
        masked_products: Mapping[str, int],
        stated: Mapping[str, range],
        total: int,
        witnessed: Mapping[Pair, int | None],
    ) -> Verdict:
        """Return the products in one direction that are proved, and who is named."""
        setting, attempt, selves, known = self.setting, self.attempt, self.selves, {**self.rebuilt}
        whole = {name: table for name, table in tables.items() if _is_whole(table, name, attempt.pairs[name])}
        named, disputed = _compared(setting, attempt, whole, known, witnessed)

        def unmasked(name: str, masked: int, pairs: Mapping[str, int]) -> int:
            mask = sum(masks.sign_of(setting, name, peer) * value for peer, value in pairs.items())
            return masked - selves[name] - mask

        values: dict[str, int | None] = {}
        for name in attempt.included:
            pairs = {peer: masks.in_order(setting, name, peer) for peer in attempt.pairs[name]}
            values[name], shown = None, []  # shown: the products that masks, and its own table, give
            if name in masked_products and all(pair in known for pair in pairs.values()):
                proved = {peer: known[pair] for peer, pair in pairs.items()}
                values[name] = value = signed(unmasked(name, masked_products[name], proved))
                shown.append(value)
            if name in whole and name in masked_products:  # both must hold together, whatever others say
                shown.append(unmasked(name, masked_products[name], whole[name].pairs))
            fits = stated.get(name)
            if fits and any((value - fits.start) % RING >= fits.stop - fits.start for value in shown):
                named.setdefault(name, "stated")
        unproved = [name for name in attempt.included if name not in whole or name not in masked_products]
        return Verdict(values, {**_by_sum(values, stated, total), **named}, tuple(disputed), tuple(unproved))


def _compared(
    setting: Setting,
    attempt: Attempt,
    tables: Mapping[str, MaskTable],
    known: dict[Pair, int],
    witnessed: Mapping[Pair, int | None],
) -> tuple[dict[str, Reason], list[Pair]]:
    """Add to the known products those on which two agree: both ends, or one of them and the witness.

    Return who is wrong, and who disagrees.
    """
    named: dict[str, Reason] = {}
    disputed: list[Pair] = []
    rebuilt = {*known}
    for name, table in tables.items():
        for peer in attempt.pairs[name]:
            pair, value = masks.in_order(setting, name, peer), table.pairs[peer]
            if pair in rebuilt:
                if value != known[pair]:
                    named[name] = "pair"
            elif pair not in witnessed or witnessed[pair] is not None:
                if value == (tables[peer].pairs[name] if peer in tables else witnessed.get(pair)):
                    known[pair] = value
                elif name == pair[0] and peer in tables:
                    disputed.append(pair)
    return named, disputed


def _by_sum(values: Mapping[str, int | None], stated: Mapping[str, range], total: int) -> dict[str, Reason]:
    """Return who is named because all proved values are known, and what they add up to."""
    proved = [value for value in values.values() if value is not None]
    if len(proved) < len(values):
        return {}
    if (sum(proved) - total) % RING:
        return {SERVER: "sum"}
    if sum(proved) == total:  # then no product lies beyond 64 bits, and statements must fit the values
        return {name: "stated" for name, fits in stated.items() if values[name] not in fits}
    least = sum(fits.start for fits in stated.values())
    most = sum(fits.stop - 1 for fits in stated.values())
    if least <= total <= most or abs(total) >= RING // 2:
        return {}
    bound = largest_stated(len(values))
    return {name: "range" for name, fits in stated.items() if fits.start > bound or fits.stop <= -bound}


def _rebuilt(
    setting: Setting, task: Task, direction: Lines, evidence: Evidence, attempt: Attempt
) -> tuple[dict[str, int], dict[Pair, int]]:
    """Return the products of self-masks, and of masks whose key is known: of lost dealers, and opened."""
    binding = task.binding(setting)
    selves = {name: masks.self_key(seed, name, binding) for name, seed in evidence.seeds.items()}
    opened = {(low, high): masks.stream_key(key, binding) for low, high, key in evidence.opened}
    gone: dict[Pair, bytes] = {}  # of lost dealers
    for name, peers in attempt.pairs.items():
        for lost in (peer for peer in peers if peer in evidence.keys):
            public = attempt.advertised[name].body.mask
            key = masks.pair_with(setting, lost, evidence.keys[lost], name, public, stage="naming")
            gone[masks.in_order(setting, name, lost)] = masks.stream_key(key, binding)
    known = mask_products(gone, direction) | mask_products(opened, direction, pairs=True)
    return mask_products(selves, direction), known


def _is_whole(table: MaskTable, name: str, peers: tuple[str, ...]) -> bool:
    """Return whether a table is this member's and holds one number for each of its masks, and no other."""
    fit = all(type(number) is int and 0 <= number < RING**table.lanes for number in table.pairs.values())
    return table.member == name and sorted(table.pairs) == sorted(peers) and fit
