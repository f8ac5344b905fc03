"""Which pairs have a mask, and masked words of four and eight bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from Crypto.Cipher import AES
from parties import LENGTH, A, B, C, D, Parties, altered, caught, commits_falsely

from fedmerit.errors import BindingError, BoundError, ConfigError, ProtocolError
from fedmerit.secagg import STAGES, Encoding, Server, Task, Update, masks, replay
from fedmerit.secagg.messages import open_broadcast, open_message
from fedmerit.secagg.plain import PlainClient, PlainServer
from fedmerit.secagg.quantise import BLOCK

# ----------------------------------------------------------------------------------- pairs without a mask


def words_of(parties, name):
    message = parties.sent["masked"][name]
    payload = open_message(message, parties.setting, len(message))[1]
    return masks.from_wire(payload, 4).copy()


def bare(parties, name, peers):
    """A member's words without its self-mask and its masks with these peers."""
    s, words = parties.clients[name]._state, words_of(parties, name)
    publics = {peer: masks.public(parties.clients[peer]._state.mask) for peer in peers}
    binding = parties.task.binding(parties.setting)
    keys = masks.of_member(parties.setting, name, s.mask, s.seed, publics, binding)
    masks.add_masks(words, [(key, -sign) for key, sign in keys])
    return words


def plain(parties, name):
    update = parties.update(name)
    return parties.encoding.encode(update.delta, weight=update.weight, seed=update.seed).words


def test_honest_ends_commit_to_one_key_and_nobody_else_can_tell_it():
    parties = Parties(4).play()
    heads = parties.server.heads["share"]
    rows = {name: {row[0]: row[4] for row in head.body[0]} for name, head in heads.items()}
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
    """Members, the server that rebuilds masks of lost dealers, and an audit read this from one list."""
    parties = commits_falsely(Parties(5), {A: [B, D]})
    shown = open_broadcast(parties.shown[A], parties.setting, "share")
    assert masks.masked_with(parties.setting, A, shown) == (C, "hospital-e")
    parties.play(lost=lost)
    included = parties.server.result.included
    assert set(included) == set(parties.names) - {name for _, name in lost}
    assert np.abs(parties.server.result.mean - parties.plain_mean(included)).max() < parties.encoding.step
    for name in included:
        has = {A: [C, "hospital-e"], B: [C, D, "hospital-e"]}.get(name)
        if has:
            assert np.array_equal(bare(parties, name, has), plain(parties, name))
        shown = dict(parties.server.broadcasts)
        lists = {
            "advertised": shown["advertise"],
            "shared": shown["share"],
            "masked": shown["masked"],
            "checked": shown["check"],
        }
        client = parties.clients[name]
        replay(parties.setting, parties.task, client.opening(), parties.vectors[name], **lists)


def test_who_commits_falsely_gains_nothing():
    """Without the pair's mask, what hides B is what hid it from A before: its masks with the others."""
    honest, cheated = Parties(4, length=500), Parties(4, length=500)
    honest.play(until="check")
    commits_falsely(cheated, {A: [B]}).play(until="check")
    for parties, with_a in ((honest, [A]), (cheated, [])):
        left = bare(parties, B, with_a)  # all that A knows is off, and the self-mask too
        rest = plain(parties, B) - left
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
    for head in shown.values():
        head.body[0][:] = [
            row for row in head.body[0] if {row[0], parties.names.index(head.sender)} != {0, 1}
        ]
    assert masks.masked_with(parties.setting, A, shown) == (C, D)
    assert masks.masked_with(parties.setting, B, shown) == (C, D)


# ------------------------------------------------------------------------------------ words of eight bytes


def same_people(parties, **change):
    """The same members, updates and rounding in a run of their own."""
    return replace(parties, keys=parties.keys, released={}, **change)


@pytest.mark.parametrize("lost", [[], [("masked", B)], [("share", A)], [("masked", A), ("check", C)]])
@pytest.mark.parametrize("kind", ["uniform", "secret", "public"])
def test_sums_with_eight_bytes_equal_those_with_four(kind, lost):
    weights = {
        "secret": {"weights": [7, 2**29, 5, 1, 9, 3]},
        "public": {"public": (1.0, 2.0, 3.5, 0.5, 1.0, 2.0)},
    }
    four = Parties(6, threshold=4, **weights.get(kind, {}))
    eight = same_people(four, word_bytes=8)
    for parties in (four, eight):
        parties.play(lost=lost)
    one, two = four.server.result, eight.server.result
    assert one.included == two.included
    assert two.words.dtype == np.uint32
    assert np.array_equal(one.words, two.words)
    assert np.array_equal(one.mean, two.mean)
    assert one.total_weight == two.total_weight
    for name in two.included:
        sizes = [len(parties.sent["masked"][name]) for parties in (four, eight)]
        assert sizes[1] - sizes[0] == 4 * eight.encoding.words


@pytest.mark.parametrize("length", [1, BLOCK // 2 - 1, BLOCK // 2, BLOCK // 2 + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("kind", ["uniform", "secret"])
def test_masked_words_of_eight_bytes_are_sums_of_streams_modulo_2_64(length, kind):
    """Computed a second time with another library, whole and not in blocks."""
    encoding = Encoding(length, 3, 1.0, kind, 2**30 if kind == "secret" else 1, word_bytes=8)
    rng = np.random.default_rng(length)
    weight = 2**30 if kind == "secret" else None
    words = encoding.encode(rng.uniform(-1, 1, length), weight=weight, seed=0).words
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
    assert four.digest == Task(four.m0_hash, Encoding(four.encoding.length, 4, 1.0)).digest
    for bad in (6, 5, 8.0, "8", True, None):
        with pytest.raises(ConfigError, match="word_bytes must be 4 or 8"):
            Encoding(1, 3, 1.0, word_bytes=bad)


def test_members_with_another_size_of_words_are_caught():
    parties = Parties(4, word_bytes=8).play(until="masked")
    short = Update(
        replace(parties.task, encoding=replace(parties.encoding, word_bytes=4)), parties.vectors[A]
    )
    message = parties.clients[A].masked(parties.shown[A], short)
    with pytest.raises(BindingError, match="a different encoding") as error:
        parties.server.receive(message, A)
    caught(error, BindingError, "masked", A)


@pytest.mark.parametrize("change", [-1, 1, 8])
def test_a_payload_of_another_size_is_refused(change):
    parties = Parties(4, word_bytes=8).play(until="masked")
    message = parties.answer(A)
    with pytest.raises(ProtocolError):
        parties.server.receive(message[:change] if change < 0 else message + bytes(change), A)
    parties.server.receive(message, A)


def adds(parties, name, at, amount):
    """Play to the end; one member adds an amount to one of its words, beyond what it may claim."""
    parties.play(until="masked")
    for each in parties.names:
        message = parties.answer(each)
        if each == name:
            message = altered(parties, name, message, {at: amount})
        parties.server.receive(message, each)
    parties.shown = parties.server.advance()
    return parties.play()


@pytest.mark.parametrize("amount", [2**32, -(2**32), 2**40, -(2**62), 2**63])
def test_a_sum_beyond_32_bits_is_a_bound_error(amount):
    parties = Parties(4, word_bytes=8)
    with pytest.raises(BoundError, match="coordinate of the sum does not fit into 32 bits"):
        adds(parties, B, 3, amount)
    assert parties.server.stage == "aborted"
    assert parties.server.result is None


@pytest.mark.parametrize("amount", [2**32, -(10**6), 2**63])
def test_a_total_weight_beyond_32_bits_is_a_bound_error(amount):
    parties = Parties(4, word_bytes=8, weights=[1, 2, 3, 4])
    with pytest.raises(BoundError, match="total weight does not fit into 32 bits"):
        adds(parties, B, LENGTH, amount)


def test_a_small_lie_in_eight_bytes_is_what_it_is_in_four():
    """Within the bound nobody sees it, and decoding reads exactly what was added."""
    lied, honest = adds(Parties(4, word_bytes=8), B, 3, 1000), Parties(4, word_bytes=8).play()
    gap = lied.server.result.words.view(np.int32) - honest.server.result.words.view(np.int32)
    assert gap.tolist() == [0, 0, 0, 1000, *[0] * (LENGTH - 4)]


def test_an_audit_replays_words_of_eight_bytes():
    parties = Parties(4, word_bytes=8, weights=[1, 2, 3, 4]).play()
    shown = parties.server.broadcasts
    lists = {"advertised": shown["advertise"], "shared": shown["share"]}
    lists |= {"masked": shown["masked"], "checked": shown["check"]}
    for name, client in parties.clients.items():
        words = replay(parties.setting, parties.task, client.opening(), parties.vectors[name], **lists)
        message = parties.sent["masked"][name]
        payload = open_message(message, parties.setting, len(message))[1]
        assert words.dtype == np.uint64
        assert np.array_equal(words, masks.from_wire(payload, 8))
        with pytest.raises(BindingError, match="did not mask"):
            replay(parties.setting, parties.task, client.opening(), -parties.vectors[name], **lists)


def test_the_server_keeps_the_secrets_it_rebuilt():
    parties = Parties(6, word_bytes=8, threshold=4).play(lost=[("masked", B), ("share", D)])
    server = parties.server
    assert server.seeds == {name: parties.clients[name]._state.seed for name in server.result.included}
    assert server.keys == {B: parties.clients[B]._state.mask}
    assert Server(parties.setting, parties.task).seeds == {}


def test_without_masks_words_have_four_bytes_on_the_wire():
    parties = Parties(4, word_bytes=8)
    server = PlainServer(parties.setting, parties.task)
    clients = {name: PlainClient(parties.setting, name) for name in parties.names}
    shown = dict.fromkeys(parties.names, b"")
    for stage in STAGES:
        for name, client in clients.items():
            said = (
                client.masked(shown[name], parties.update(name))
                if stage == "masked"
                else client.handle(shown[name])
            )
            server.receive(said, name)
            assert stage != "masked" or len(said) == 1 + 32 + 4 * LENGTH
        shown = server.advance()
    assert np.array_equal(server.result.words, parties.play().server.result.words)
