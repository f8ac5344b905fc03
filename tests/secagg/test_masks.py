"""Known answers for every derivation; which pairs have a mask; masked words of four and eight bytes.

Each known answer is computed twice, with the standard library and pycryptodome too. A change of any makes old
transcripts unverifiable and needs a new version of the protocol.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import replace

import numpy as np
import pytest
from Crypto.Cipher import AES
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fedmerit.errors import BoundError
from fedmerit.identity import Member, Roster, public_key
from fedmerit.secagg import masks
from fedmerit.secagg.messages import Check, head_limit, open_broadcast, open_head, open_message, seal, seen_of
from fedmerit.secagg.quantise import BLOCK, Encoding
from fedmerit.secagg.setting import Released, Setting, Task, pack, update_digest
from parties import LENGTH, A, B, C, D, Parties, adds, commits_falsely

IDENTITIES = {name: Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i, name in enumerate("abc", 1)}
ROSTER = Roster(Member(name, public_key(key)) for name, key in IDENTITIES.items())
SETTING = Setting("run", 3, 1, ("a", "b", "c"), ROSTER, b"\x0c" * 32)
TASK = Task(b"\x0d" * 32, Encoding(4, 3, 1.0))
BINDING = TASK.binding(SETTING)
ALICE = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")


def packed(*fields):
    """msgpack, written down by hand for the few types that occur here."""
    return bytes([0x90 | len(fields)]) + b"".join(map(packed_value, fields))


def packed_value(value):
    match value:
        case list():
            return packed(*value)
        case None | True | False:
            return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
        case int():
            return bytes([value])
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return (bytes([0xA0 | len(data)]) if len(data) < 32 else b"\xd9" + bytes([len(data)])) + data
    short = len(value) < 256
    return (b"\xc4" + bytes([len(value)]) if short else b"\xc5" + struct.pack(">H", len(value))) + value


def sha(data):
    return hashlib.sha256(data).digest()


def hkdf(secret, info):
    """RFC 5869 with SHA-256, no salt, one block."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def aes_stream(key, words):
    cipher = AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=0)
    return np.frombuffer(cipher.encrypt(bytes(4 * words)), "<u4")


def test_packing():
    assert pack("a", b"b", 3, ["c"], None, 1.5, True) == packed("a", b"b", 3, ["c"], None, 1.5, True)
    assert pack("x" * 40, b"y" * 300) == packed("x" * 40, b"y" * 300)


SESSION = SETTING.session
PAIR = masks.pair_key(b"\x05" * 32, SESSION, "a", "b")
DERIVED = {  # by what it is: as it is computed here, computed again, and in hexadecimal
    "session": (
        SESSION,
        sha(packed("fedmerit secagg session 1", "run", 3, 1, ["a", "b", "c"], 3, ROSTER.hash, b"\x0c" * 32)),
        "4ef216221e97873580143810f926bfa4cece31e8740813930c138d75be73d8be",
    ),
    "task": (
        TASK.digest,
        sha(packed("fedmerit secagg task 1", b"\x0d" * 32, [4, 3, 1.0, "uniform", 1.0], None)),
        "c63303e3b421ed4bf44dad32d45f625818f7bb7b755116e5420742109b1579ed",
    ),
    "key of a pair, to which both ends commit": (
        PAIR,
        hkdf(b"\x05" * 32, packed("fedmerit secagg 1", "pair", SESSION, "a", "b")),
        "871d12d49ad84f0cb852455cc3f898e04eab729ad704aafe1b67b89caf94dae3",
    ),
    "key of a pair's mask, which also depends on model and encoding": (
        masks.stream_key(PAIR, BINDING),
        hkdf(PAIR, packed("fedmerit secagg 1", "pairwise mask", BINDING)),
        "a60685b2739f5c18ceb050542a30fcd6cef294384c54bce085e0af776f8b1a29",
    ),
    "commitment to the key of a pair": (
        masks.pair_commitment(PAIR, SESSION, "a", "b"),
        sha(packed("fedmerit secagg commitment 1", "pair", SESSION, "a", "b", PAIR)),
        "2d679121e3c4872d835b210129dc3caec023ac0b384db41d3973be409060f8e1",
    ),
    "key of a self-mask": (
        masks.self_key(b"\x06" * 32, "a", BINDING),
        hkdf(b"\x06" * 32, packed("fedmerit secagg 1", "self mask", "a", BINDING)),
        "d59efbf57ba63e33e5a93ac8b69a3bd82a32edccd2b492b84bed94be3269cbf8",
    ),
    "commitment to a seed": (
        masks.commitment("seed", b"\x07" * 32, SESSION, "a"),
        sha(packed("fedmerit secagg commitment 1", "seed", SESSION, "a", b"\x07" * 32)),
        "d74b09634edbece40a155473678ceda61670f919be63e5cb5844b316ee8e82d5",
    ),
    "commitments to both shares": (
        b"".join(masks.share_commitments(SESSION, "a", "b", [b"\x08" * 32] * 2)),
        b"".join(
            sha(packed("fedmerit secagg commitment 1", f"{kind} share", SESSION, "a", "b", b"\x08" * 32))
            for kind in ("key", "seed")
        ),
        "19e105ea8083824c0343539b0f26b7e74003e0fae4328908b1cb4ecbf1ec3f11",
    ),
}


@pytest.mark.parametrize("what", DERIVED)
def test_what_is_derived_and_committed_to(what):
    value, again, known = DERIVED[what]
    assert value == again
    assert value[:32].hex() == known


def test_what_masks_are_bound_to():
    assert packed("run", 3, 1, SESSION, ROSTER.hash, b"\x0c" * 32, b"\x0d" * 32, TASK.digest) == BINDING


def test_key_agreement_is_x25519():
    # RFC 7748, section 6.1
    assert masks.public(ALICE).hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    shared = masks.agree(ALICE, masks.public(BOB), stage="masked", peer="bob")
    assert shared.hex() == "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert masks.agree(BOB, masks.public(ALICE), stage="masked", peer="alice") == shared


def test_channel_keys():
    """One for each pair and direction, from one secret; the pair agrees on one secret of its own."""
    key = masks.channel_key(b"\x0b" * 32, SESSION, "a", "b")
    assert key == hkdf(b"\x0b" * 32, packed("fedmerit secagg 1", "channel", SESSION, "a", "b"))
    keys = {(x, y): masks.channel_key(x.encode() * 32, SESSION, x, y) for x in "abc" for y in "abc"}
    assert len(set(keys.values())) == 9
    secrets = {
        pair: masks.agree(keys[pair], masks.public(keys[pair[::-1]]), stage="", peer="") for pair in keys
    }
    assert all(secrets[pair] == secrets[pair[::-1]] for pair in keys)
    assert len(set(secrets.values())) == 6


def test_what_members_sign_as_seen():
    heads = [seal(SETTING, name, IDENTITIES[name], "check", b"\x01" * 32, Check())[1] for name in ("a", "b")]
    expected = sha(packed("fedmerit secagg list 1", "check", [sha(head) for head in heads]))
    assert seen_of("check", [open_head(head, SETTING) for head in heads]) == expected


def test_share_encryption():
    key = hkdf(b"\x09" * 32, packed("fedmerit secagg 1", "share encryption", SESSION, "a", "b"))
    sealed = masks.seal_shares(b"\x09" * 32, SESSION, "a", "b", b"\x0a" * 64)
    cipher = AES.new(key, AES.MODE_GCM, nonce=sealed[:12]).update(packed(SESSION, "a", "b"))
    assert cipher.decrypt_and_verify(sealed[12:-16], sealed[-16:]) == b"\x0a" * 64
    assert len(sealed) == 12 + 64 + 16
    assert masks.open_shares(b"\x09" * 32, SESSION, "a", "b", sealed) == b"\x0a" * 64


@pytest.mark.parametrize("words", [1, 4, 65536, 65537, 150_001])
def test_masks_are_aes_256_in_counter_mode_added_modulo_2_32(words):
    start = np.arange(words, dtype=np.uint32) * np.uint32(2654435761)
    one, two = bytes(range(32)), bytes(range(1, 33))
    masked = start.copy()
    masks.add_masks(masked, [(one, 1), (two, -1)])
    assert np.array_equal(masked, start + aes_stream(one, words) - aes_stream(two, words))


def test_who_adds_and_who_subtracts():
    privates = {name: bytes([40 + i]) * 32 for i, name in enumerate("abc")}
    publics = {name: masks.public(private) for name, private in privates.items()}
    signs = {
        name: [sign for _, sign in masks.of_member(SETTING, name, private, b"s" * 32, publics, BINDING)]
        for name, private in privates.items()
    }
    assert signs == {"a": [1, 1, 1], "b": [1, -1, 1], "c": [1, -1, -1]}  # own mask first, then by schedule
    shared = masks.agree(privates["a"], publics["b"], stage="", peer="")
    key = masks.stream_key(masks.pair_key(shared, SESSION, "a", "b"), BINDING)
    for name, peer in (("a", "b"), ("b", "a")):  # both derive the same key, names in the schedule's order
        assert masks.with_peers(SETTING, name, privates[name], {peer: publics[peer]}, BINDING)[0][0] == key


def test_signed_heads():
    message, head = seal(SETTING, "a", IDENTITIES["a"], "check", b"\x01" * 32, Check())
    content = packed("check", "run", 3, 1, "a", SESSION, b"\x01" * 32, [])
    signature = IDENTITIES["a"].sign(b"fedmerit secagg head 1\0" + sha(content))
    assert head == packed(content, signature)
    assert message == b"FMS1" + len(head).to_bytes(4, "big") + head
    assert sha(message).hex() == "db1a13f7509a90f57d8affc7298cab409c41d6b21274f3c118d7bceafcba07e6"
    assert open_message(message, SETTING, 0)[0].sender == "a"
    assert len(head) < head_limit(SETTING.n)


def test_any_t_shares_rebuild_a_secret_and_fewer_say_nothing():
    secret = bytes(range(32))
    shares = dict(enumerate(masks.split_secret(secret, 3, 5)))
    for chosen in ((0, 1, 2), (4, 2, 0), (1, 3, 4), (0, 1, 2, 3, 4)):
        assert masks.combine_shares({i: shares[i] for i in chosen}, 3) == secret
    assert masks.combine_shares({0: shares[0], 1: shares[1], 2: shares[3]}, 3) != secret
    other = dict(enumerate(masks.split_secret(secret, 3, 5)))
    assert all(shares[i] != other[i] for i in range(5))  # fresh polynomials
    assert shares[0][:16] != shares[0][16:]


@given(st.dictionaries(st.integers(0, 1023), st.binary(min_size=32, max_size=32), min_size=1, max_size=9))
def test_any_shares_are_put_together_as_pycryptodome_does(shares):
    halves = ([(place + 1, share[at : at + 16]) for place, share in shares.items()] for at in (0, 16))
    assert masks.combine_shares(shares, len(shares)) == b"".join(map(Shamir.combine, halves))


def test_what_names_an_update():
    delta = np.array([1.0, -2.0], np.float32)
    expected = sha(packed("fedmerit update 1", b"\x0d" * 32, 2) + delta.tobytes())
    assert update_digest(b"\x0d" * 32, delta) == expected
    zeros = np.array([0.0, 1.0], np.float32)
    minus = np.array([-0.0, 1.0])
    assert update_digest(b"\x0d" * 32, minus) == update_digest(b"\x0d" * 32, zeros)
    assert update_digest(b"\x0e" * 32, zeros) != update_digest(b"\x0d" * 32, zeros)  # of another M0
    released = Released()
    released.add(SETTING, expected)
    round_entry = sha(packed("fedmerit released 1", "round", "run", 3, ROSTER.hash))
    assert released.dump() == b"".join(sorted([expected, round_entry]))


def test_what_names_a_schedule():
    released = Released()
    released.same_schedule(SETTING)
    where = ("run", 3, ROSTER.hash)
    entries = [packed("fedmerit released 1", "masked", *where)]
    entries.append(packed("fedmerit released 1", "masked for", *where, ["a", "b", "c"], 3))
    assert released.dump() == b"".join(sorted(map(sha, entries)))


def test_a_large_update_is_named_by_evenly_spaced_coordinates():
    delta = np.arange(2_000_003, dtype=np.float64) / 7
    sample = delta[::7].astype("<f4")  # 2000003 // 2^18 = 7
    assert 2**18 <= sample.size < 2**19
    assert update_digest(b"m", delta) == sha(pack("fedmerit update 1", b"m", delta.size) + sample.tobytes())
    for at in (0, 7, 1_999_998):
        other = delta.copy()
        other[at] += 1
        assert update_digest(b"m", other) != update_digest(b"m", delta)
    assert update_digest(b"n", delta) != update_digest(b"m", delta)


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
    total += masks.from_wire(memoryview(b"?" + payload)[1:], 8)  # words begin anywhere, also at odd addresses
    assert np.array_equal(total, masks.from_wire(payload, 8))
    masks.add_masks(total, [(key, -sign) for key, sign in keys])
    found = masks.narrowed(total, encoding)
    assert found.dtype == np.uint32
    assert [int(word) for word in found] == [value % 2**32 for value in plain]


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
