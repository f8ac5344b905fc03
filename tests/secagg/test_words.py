"""Which pairs have a mask, and masked words of four and eight bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from Crypto.Cipher import AES
from msgspec import structs

from fedmerit.errors import BoundError
from fedmerit.secagg import masks
from fedmerit.secagg.messages import open_broadcast
from fedmerit.secagg.quantise import BLOCK, Encoding
from parties import LENGTH, A, B, C, D, Parties, adds, commits_falsely

# ----------------------------------------------------------------------------------- pairs without a mask


def bare(parties, name, peers):
    """A member's words without its self-mask and its masks with these peers."""
    s, words = parties.clients[name]._state, masks.from_wire(parties.payload(name), 4).copy()
    publics = {peer: masks.public(parties.clients[peer]._state.mask) for peer in peers}
    binding = parties.task.binding(parties.setting)
    keys = masks.of_member(parties.setting, name, s.mask, s.seed, publics, binding)
    masks.add_masks(words, [(key, -sign) for key, sign in keys])
    return words


def test_honest_ends_commit_to_one_key_and_nobody_else_can_tell_it():
    parties = Parties(4).play()
    heads = parties.server.heads["share"]
    rows = {name: {row.place: row.pair for row in head.body.rows} for name, head in heads.items()}
    for i, one in enumerate(parties.names):
        assert rows[one][i] == bytes(32)
        for j, two in enumerate(parties.names):
            assert rows[one][j] == rows[two][i]
    said = {value for row in rows.values() for value in row.values()}
    assert len(said) == 1 + 6  # zeros, and one for each pair
    for name in parties.names:
        assert masks.masked_with(parties.setting, name, heads) == tuple(n for n in parties.names if n != name)


@pytest.mark.parametrize("lost", [[], [("masked", A)], [("masked", B)], [("masked", C)]])
def test_a_pair_whose_ends_differ_has_no_mask(lost):
    """Members, and the server that rebuilds masks of lost dealers, read this from one list."""
    parties = commits_falsely(Parties(5), {A: [B, D]}).play(until="masked")
    shown = open_broadcast(parties.shown[A], parties.setting, "share")
    assert masks.masked_with(parties.setting, A, shown) == (C, "hospital-e")
    parties.play(lost=lost)
    included = parties.server.result.included
    assert set(included) == set(parties.names) - {name for _, name in lost}
    assert np.abs(parties.server.result.mean - parties.plain_mean(included)).max() < parties.encoding.step
    for name in included:
        has = {A: [C, "hospital-e"], B: [C, D, "hospital-e"]}.get(name)
        if has:
            assert np.array_equal(bare(parties, name, has), parties.words(name))


def test_who_commits_falsely_gains_nothing():
    """Without the pair's mask, what hides B is what hid it from A before: its masks with the others."""
    honest, cheated = Parties(4, length=500), Parties(4, length=500)
    honest.play(until="check")
    commits_falsely(cheated, {A: [B]}).play(until="check")
    for parties, with_a in ((honest, [A]), (cheated, [])):
        left = bare(parties, B, with_a)  # all that A knows is off, and the self-mask too
        rest = parties.words(B) - left
        assert np.count_nonzero(rest) > 490
        publics = {peer: masks.public(parties.clients[peer]._state.mask) for peer in (C, D)}
        binding = parties.task.binding(parties.setting)
        keys = masks.with_peers(parties.setting, B, parties.clients[B]._state.mask, publics, binding)
        masks.add_masks(rest, keys)
        assert not rest.any()


def test_a_row_that_is_missing_is_no_commitment():
    """Only a server that does not follow the protocol shows such a head; everybody still reads one rule."""
    parties = Parties(4).play(until="masked")
    shown = open_broadcast(parties.shown[A], parties.setting, "share")
    for name, head in shown.items():
        own = parties.names.index(name)
        rows = tuple(row for row in head.body.rows if {row.place, own} != {0, 1})
        shown[name] = replace(head, body=structs.replace(head.body, rows=rows))
    assert masks.masked_with(parties.setting, A, shown) == (C, D)
    assert masks.masked_with(parties.setting, B, shown) == (C, D)


# ------------------------------------------------------------------------------------ words of eight bytes


def same_people(parties, **change):
    """The same members, updates and rounding in a run of their own."""
    return replace(parties, keys=parties.keys, released={}, **change)


@pytest.mark.parametrize("lost", [[], [("masked", B)], [("share", A)], [("masked", A), ("check", C)]])
@pytest.mark.parametrize("kind", ["uniform", "secret", "public"])
def test_the_sum_is_that_of_the_plain_integers_with_words_of_four_and_of_eight_bytes(kind, lost):
    weights = {
        "secret": {"weights": [7, 2**29, 5, 1, 9, 3]},
        "public": {"public": (1.0, 2.0, 3.5, 0.5, 1.0, 2.0)},
    }
    four = Parties(6, threshold=4, **weights.get(kind, {}))
    eight = same_people(four, word_bytes=8)
    gone = {name for stage, name in lost if stage != "check"}
    included = tuple(name for name in four.names if name not in gone)
    plain = sum((four.words(name) for name in included), np.zeros(four.encoding.words, np.uint32))
    by_name = dict(zip(four.names, four.public or (), strict=False))
    total = sum(by_name[name] for name in included) if by_name else None
    expected = four.encoding.decode(plain, included=len(included), public_total=total)
    for parties in (four, eight):
        result = parties.play(lost=lost).server.result
        assert (result.included, result.total_weight) == (included, expected.total_weight)
        assert result.words.dtype == np.uint32
        assert np.array_equal(result.words, plain)
        assert np.array_equal(result.mean, expected.mean)
        assert result.mean == pytest.approx(parties.plain_mean(included), abs=6 * parties.encoding.step)
    for name in included:
        sizes = [len(parties.sent["masked"][name]) for parties in (four, eight)]
        assert sizes[1] - sizes[0] == 4 * eight.encoding.words


@pytest.mark.parametrize("length", [1, BLOCK // 2 - 1, BLOCK // 2, BLOCK // 2 + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("kind", ["uniform", "secret"])
def test_masked_words_of_eight_bytes_are_sums_of_streams_modulo_2_64(length, kind):
    """Computed a second time with another library, whole and not in blocks."""
    encoding = Encoding(length, 3, 1.0, kind, 2**30 if kind == "secret" else 1, word_bytes=8)
    rng = np.random.default_rng(length)
    weight = 2**30 if kind == "secret" else None
    words = encoding.encode(rng.uniform(-1, 1, length), weight=weight, seed=0)
    if kind == "secret":
        words[-1] = 2**32 - 2  # more than a member may claim: it must stay unsigned
    keys = [(bytes([i]) * 32, sign) for i, sign in enumerate((1, -1, -1))]
    plain = [int(word) for word in words.view(np.int32)[:length]] + [int(word) for word in words[length:]]
    payload = bytes(masks.payload_of(words, encoding, keys))
    streams = [
        np.frombuffer(
            AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=0).encrypt(bytes(8 * words.size)), "<u8"
        )
        for key, _ in keys
    ]
    for at in {0, length // 2, length - 1, words.size - 1}:
        value = plain[at] + sum(
            sign * int(stream[at]) for stream, (_, sign) in zip(streams, keys, strict=True)
        )
        assert payload[8 * at : 8 * at + 8] == (value % 2**64).to_bytes(8, "little")
    total = np.zeros(words.size, np.uint64)
    masks.add_payload(total, memoryview(b"?" + payload)[1:])  # words begin anywhere, also at odd addresses
    assert np.array_equal(total, masks.from_wire(payload, 8))
    masks.add_masks(total, [(key, -sign) for key, sign in keys])
    found = masks.narrowed(total, encoding)
    assert found.dtype == np.uint32
    assert [int(word) for word in found] == [value % 2**32 for value in plain]


def test_the_size_of_a_word_is_part_of_the_task():
    four, eight = (Parties(4, word_bytes=size).task for size in (4, 8))
    assert four.digest != eight.digest


@pytest.mark.parametrize(
    ("place", "amount", "what"),
    [
        *[(3, amount, "coordinate of the sum") for amount in (2**32, -(2**32), 2**40, -(2**62), 2**63)],
        *[(LENGTH, amount, "total weight") for amount in (2**32, -(10**6), 2**63)],
    ],
)
def test_a_sum_or_weight_beyond_32_bits_is_a_bound_error(place, amount, what):
    parties = Parties(4, word_bytes=8, weights=[1, 2, 3, 4])
    with pytest.raises(BoundError, match=f"{what} does not fit into 32 bits"):
        adds(parties, {B: {place: amount}}).play()
    assert parties.server.stage == "aborted"
    assert parties.server.result is None


def test_a_small_lie_in_eight_bytes_is_what_it_is_in_four():
    """Within the bound nobody sees it, and decoding reads exactly what was added."""
    lied, honest = adds(Parties(4, word_bytes=8), {B: {3: 1000}}), Parties(4, word_bytes=8)
    gap = lied.play().server.result.words.view(np.int32) - honest.play().server.result.words.view(np.int32)
    assert gap.tolist() == [0, 0, 0, 1000, *[0] * (LENGTH - 4)]
