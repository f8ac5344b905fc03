"""Masks, shares of secrets, and who is to blame for a bad share.

HKDF makes keys from secrets, AES-256 in counter mode makes words from keys. Of a pair, the member who comes
first in the schedule adds the mask and the other subtracts it. Where their two commitments to its key differ,
the pair has no mask (`masked_with`). A self-mask protects a member whom the server believed, or claimed, to
be lost. A mask's key depends on the shared secret AND on run, round, attempt, both names, roster, config,
model and encoding; each key makes one stream only, so the counter starts at zero.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from operator import xor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import to_builtins

from fedmerit.errors import BindingError, BoundError, RoundAborted, ShareError
from fedmerit.secagg.messages import (
    Blame,
    Complained,
    Head,
    Rebuilt,
    dealt_to,
    digest_of,
    list_digest,
    open_head,
    revealed,
)
from fedmerit.secagg.quantise import BLOCK, Encoding, Words
from fedmerit.secagg.setting import Setting, pack

_ZEROS = bytes(4 * BLOCK)
_FIELD = 2**128 + 2**7 + 2**2 + 2 + 1  # the polynomial that makes GF(2^128)
KINDS = ("key", "seed")  # what is shared out: the mask key and the self-mask seed


def derive(secret: bytes, label: str, *context: str | bytes) -> bytes:
    """Return 32 bytes: the HKDF-SHA256 of a secret, bound to its purpose."""
    info = pack("fedmerit secagg 1", label, *context)
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def commitment(label: str, secret: bytes, *context: str | bytes) -> bytes:
    """Return SHA-256 of a secret and its purpose: binding, and hiding because secrets are 32 random bytes."""
    return hashlib.sha256(pack("fedmerit secagg commitment 1", label, *context, secret)).digest()


def public(private: bytes) -> bytes:
    """Return the X25519 public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, peer_public: bytes, *, stage: str, peer: str) -> bytes:
    """Return the X25519 secret shared with a peer."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(peer_public)
        )
    except ValueError:  # a point of small order: everybody would know the "secret"
        raise BindingError(
            "advertised a key that gives a secret which everybody knows", stage=stage, member=peer
        ) from None


def pair_key(shared: bytes, session: bytes, low: str, high: str) -> bytes:
    """Return the key that two members, given in the order of the schedule, commit to before they mask."""
    return derive(shared, "pair", session, low, high)


def pair_commitment(pair: bytes, session: bytes, low: str, high: str) -> bytes:
    """Return what both ends of a pair sign about its key in the stage share."""
    return commitment("pair", pair, session, low, high)


def stream_key(pair: bytes, binding: bytes) -> bytes:
    """Return the key of the mask between two members, from the key that they committed to."""
    return derive(pair, "pairwise mask", binding)


def self_key(seed: bytes, name: str, binding: bytes) -> bytes:
    """Return the key of a member's self-mask."""
    return derive(seed, "self mask", name, binding)


def in_order(setting: Setting, name: str, peer: str) -> tuple[str, str]:
    """Return the two ends of a pair in the order of the schedule."""
    low, high = sorted((name, peer), key=setting.members.index)
    return low, high


def pair_with(
    setting: Setting, name: str, private: bytes, peer: str, peer_public: bytes, *, stage: str = "masked"
) -> bytes:
    """Return the key of a member's pair with a peer, from its private and the peer's public mask key."""
    shared = agree(private, peer_public, stage=stage, peer=peer)
    return pair_key(shared, setting.session, *in_order(setting, name, peer))


def with_peers(
    setting: Setting, name: str, private: bytes, peers: Mapping[str, bytes], binding: bytes
) -> list[tuple[bytes, int]]:
    """Return keys and signs of a member's pairwise masks, from its private and the public mask keys."""
    pairs = {peer: pair_with(setting, name, private, peer, key) for peer, key in peers.items()}
    return [(stream_key(pair, binding), sign_of(setting, name, peer)) for peer, pair in pairs.items()]


def sign_of(setting: Setting, name: str, peer: str) -> int:
    """Return +1 if a member adds its mask with this peer, -1 if it subtracts it."""
    return 1 if in_order(setting, name, peer)[0] == name else -1


def masked_with(setting: Setting, name: str, dealt: Mapping[str, Head]) -> tuple[str, ...]:
    """Return the peers with whom a member has a mask: both dealt, and committed to the same pair key.

    ``dealt`` are all heads of stage share that were shown, in schedule order.
    """

    def committed(dealer: str, holder: str) -> bytes | None:
        row = dealt_to(dealt[dealer], setting.members.index(holder))
        return None if row is None else row.pair

    return tuple(
        peer
        for peer in dealt
        if peer != name and (pair := committed(peer, name)) is not None and pair == committed(name, peer)
    )


def of_member(
    setting: Setting, name: str, private: bytes, seed: bytes, peers: Mapping[str, bytes], binding: bytes
) -> list[tuple[bytes, int]]:
    """Return keys and signs of all masks of a member: the self-mask, and one with every other peer."""
    others = {peer: key for peer, key in peers.items() if peer != name}
    return [(self_key(seed, name, binding), 1), *with_peers(setting, name, private, others, binding)]


# --------------------------------------------------------------------------------------------------- words
# A masked word has 4 or 8 bytes, in memory and on the wire, and is an integer modulo 2^32 or 2^64. A
# coordinate is sign-extended into a word of 8 bytes; a secret weight has no sign.

Wide = npt.NDArray[np.uint64]
"""Integers modulo 2^64. Shape ``(Encoding.words,)``."""

RING = 2**64


def add_masks(words: Words | Wide, masks: Sequence[tuple[bytes, int]]) -> None:
    """Add (+1) the streams of these keys to words or subtract them (-1), in place, modulo 2^32 or 2^64.

    Each block of words takes all masks while it is in the processor's cache. No mask is ever held whole.
    """
    streams, size = Streams([key for key, _ in masks], words.itemsize), len(_ZEROS) // words.itemsize
    for start in range(0, words.size, size):
        block = words[start : start + size]
        for stream, (_, sign) in zip(streams.next(block.size), masks, strict=True):
            (np.add if sign > 0 else np.subtract)(block, stream, out=block)


class Streams:
    """The streams of masks with these keys, read in blocks of words of so many bytes (``width``)."""

    def __init__(self, keys: Sequence[bytes], width: int) -> None:
        self._streams = [Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor() for key in keys]
        self._width = width
        self._buffer = np.empty(len(_ZEROS) // width, f"<u{width}")
        self._room = self._buffer.data.cast("B")

    def next(self, size: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the next words of each stream in turn, at most a block; the next one overwrites them."""
        zeros = memoryview(_ZEROS)[: self._width * size]
        for stream in self._streams:
            stream.update_into(zeros, self._room[: self._width * size])
            yield self._buffer[:size]


def payload_of(words: Words, encoding: Encoding, masks: Sequence[tuple[bytes, int]]) -> memoryview:
    """Return a member's words under these masks as they travel; it may mask them in place."""
    masked: Words | Wide = words
    if encoding.word_bytes == 8:
        masked = words.view(np.int32).astype(np.int64).view(np.uint64)
        masked[encoding.length :] = words[encoding.length :]  # a secret weight
    add_masks(masked, masks)
    return masked.astype(masked.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


def from_wire(payload: bytes | memoryview, word_bytes: int) -> npt.NDArray[Any]:
    """Return the words of a payload, as a view."""
    return np.frombuffer(payload, f"<u{word_bytes}")


def narrowed(total: Words | Wide, encoding: Encoding) -> Words:
    """Return a sum without masks as words of 32 bits; raise `BoundError` if a word does not fit."""
    if encoding.word_bytes == 4:
        return total.view(np.uint32)
    if (total[encoding.length :] >= 2**32).any():
        raise BoundError("the total weight does not fit into 32 bits, so somebody cheated")
    signed = total[: encoding.length].view(np.int64)
    if signed.max() >= 2**31 or signed.min() < -(2**31):
        raise BoundError("a coordinate of the sum does not fit into 32 bits, so somebody cheated")
    return total.astype(np.uint32)  # the low half of each word


# ------------------------------------------------------------------------------------------------- sharing
# Any t members can rebuild a secret that was shared among all. Anybody who lies about a share is named.
#
# Shamir's scheme comes from pycryptodome and works over GF(2^128), so it shares 16 bytes. Our secrets have 32
# (an X25519 key, a self-mask seed), so each half is shared on its own and a share is two field elements. Only
# released shares are put together here, with one set of coefficients for the secrets of all dealers.
#
# A dealer signs a hash of every share. The holder checks it on arrival and the server after release. A member
# who sends a share that it was not dealt is named, and so is a dealer whose shares rebuild a secret that it
# did not commit to. Fewer than t shares are uniformly random, 32 bytes each, so their hashes hide them.
#
# Shares between two members are encrypted under a channel of these two alone: each has a fresh key pair for
# each peer. So a holder can open what one dealer sent it, and what it sent this dealer, and nothing else.


def channel_key(secret: bytes, session: bytes, name: str, peer: str) -> bytes:
    """Return a member's private X25519 key of its channel with one peer; it tells nothing of other keys."""
    return derive(secret, "channel", session, name, peer)


def channel_of(advertised: Head, place: int) -> bytes:
    """Return the public key that a member advertised for its channel with the member at this place."""
    return bytes(advertised.body.channels[32 * place : 32 * (place + 1)])


def split_secret(secret: bytes, threshold: int, members: int) -> list[bytes]:
    """Return one share of 32 bytes per position in the schedule; any ``threshold`` give the secret."""
    halves = [Shamir.split(threshold, members, secret[at : at + 16], False) for at in (0, 16)]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def combine_shares(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Rebuild a secret from the first ``threshold`` shares by position; raise if there are fewer.

    pycryptodome would compute the coefficients anew for each secret. They depend on the holders alone.
    """
    if len(shares) < threshold:
        raise ShareError(f"{threshold} shares are needed, got {len(shares)}")
    places, used = zip(*sorted(shares.items())[:threshold], strict=True)
    coefficients, secret = _coefficients(places), b""
    for at in (0, 16):
        values = (int.from_bytes(share[at : at + 16], "big") for share in used)
        secret += reduce(xor, map(_times, coefficients, values)).to_bytes(16, "big")
    return secret


@lru_cache(maxsize=64)
def _coefficients(places: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's coefficients at zero for shares at these places, in GF(2^128).

    With points x = place + 1, that of share j is the product of x_m / (x_m - x_j) over all other m; both
    products here have x_j as one more factor.
    """
    points = [place + 1 for place in places]
    above = reduce(_times, points, 1)
    below = (reduce(_times, (point ^ other or point for other in points), 1) for point in points)
    return tuple(_times(above, _inverse(value)) for value in below)


def _times(a: int, b: int) -> int:
    """Return a product in GF(2^128). It takes longer for a larger b: so only for what is public or opened."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a, b = a << 1, b >> 1
        if a >> 128:
            a ^= _FIELD
    return product


def _inverse(value: int) -> int:
    """Return 1 / value in GF(2^128), by Euclid's algorithm for polynomials."""
    rest, other, inverse, factor = value, _FIELD, 1, 0
    while rest != 1:
        shift = rest.bit_length() - other.bit_length()
        if shift < 0:
            rest, other, inverse, factor, shift = other, rest, factor, inverse, -shift
        rest, inverse = rest ^ other << shift, inverse ^ factor << shift
    return inverse


def share_commitments(session: bytes, dealer: str, holder: str, shares: Sequence[bytes]) -> list[bytes]:
    """Return the hashes of a holder's key share and seed share that their dealer signs."""
    return [
        commitment(f"{kind} share", share, session, dealer, holder)
        for kind, share in zip(KINDS, shares, strict=True)
    ]


def seal_shares(shared: bytes, session: bytes, dealer: str, holder: str, shares: bytes) -> bytes:
    """Encrypt a holder's two shares with AES-256-GCM, under a key for this session, dealer and holder only.

    The nonce is random: a client that was restored from an old copy of its state may deal twice.
    """
    nonce, cipher = os.urandom(12), _cipher(shared, session, dealer, holder)
    return nonce + cipher.encrypt(nonce, shares, pack(session, dealer, holder))


def open_shares(shared: bytes, session: bytes, dealer: str, holder: str, sealed: bytes) -> bytes:
    """Decrypt what ``seal_shares`` made; raise a `ShareError` that names the dealer for anything else."""
    cipher = _cipher(shared, session, dealer, holder)
    try:
        return cipher.decrypt(sealed[:12], sealed[12:], pack(session, dealer, holder))
    except InvalidTag:
        raise ShareError("dealt a share that does not decrypt", stage="share", member=dealer) from None


def seal_key(
    shared: bytes, setting: Setting, seed: bytes, sender: str, pair: tuple[str, str], key: bytes
) -> bytes:
    """Encrypt the key of a sender's pair for the witness with whom it shares a secret, in one way.

    Each such key encrypts this one message, so the nonce is constant, and an answer can be repeated.
    """
    return _for_witness(shared, setting, seed, sender, pair).encrypt(bytes(12), key, None)


def open_key(
    shared: bytes, setting: Setting, seed: bytes, sender: str, pair: tuple[str, str], sealed: bytes
) -> bytes | None:
    """Decrypt what `seal_key` made; None for anything else."""
    try:
        return _for_witness(shared, setting, seed, sender, pair).decrypt(bytes(12), sealed, None)
    except (InvalidTag, ValueError):
        return None


def _for_witness(shared: bytes, setting: Setting, seed: bytes, sender: str, pair: tuple[str, str]) -> AESGCM:
    return AESGCM(derive(shared, "witness", setting.session, seed, sender, *pair))


def _cipher(shared: bytes, session: bytes, dealer: str, holder: str) -> AESGCM:
    return AESGCM(derive(shared, "share encryption", session, dealer, holder))


def is_secret_of(advertised: Head, kind: str, secret: bytes, session: bytes) -> bool:
    """Return whether this is the mask key (key) or self-mask seed (seed) that a member advertised."""
    if kind == "key":
        return public(secret) == bytes(advertised.body.mask)
    return commitment("seed", secret, session, advertised.sender) == bytes(advertised.body.seed)


# --------------------------------------------------------------------------------------------------- blame
# A holder that was dealt a bad share publishes its private key of the channel with that dealer. Anybody can
# then open what the dealer sent it: either the share is bad and the dealer is to blame, or it is good and the
# complaint is false.
#
# Nobody honest can be blamed. What a member signs as ``seen`` ties its message to the very heads it was
# shown, so a share cannot be judged by keys that were advertised another time. An honest dealer encrypts good
# shares under the keys in the list it signed, and a complaint must open the private key of the advertised
# one. An honest holder complains only if `open_row` fails, and everybody else sees the same failure.
# docs/protocol.md says why a complaint does not help to unmask a member.


def open_row(
    setting: Setting, dealer: str, holder: str, channel: bytes, dealt: Head, private: bytes
) -> list[bytes] | None:
    """Return the key share and the seed share that a dealer sent a holder; None if they are bad.

    ``channel`` is the dealer's public key of their channel, ``private`` the holder's private one.
    """
    row = dealt_to(dealt, setting.members.index(holder))
    if row is None:
        return None
    try:
        shared = agree(private, channel, stage="share", peer=dealer)
        opened = open_shares(shared, setting.session, dealer, holder, row.sealed)
    except (BindingError, ShareError):
        return None
    shares = [opened[:32], opened[32:]]
    good = share_commitments(setting.session, dealer, holder, shares) == [row.key, row.seed]
    return shares if good else None


def is_true(setting: Setting, place: int, private: bytes, holder: Head, dealer: Head, dealt: Head) -> bool:
    """Return whether a complaint is true: it opens the holder's advertised key, and the share is bad.

    ``place`` is the dealer's, ``private`` the opened key; the heads are of stage advertise, advertise, share.
    """
    if public(private) != channel_of(holder, place):
        return False
    channel = channel_of(dealer, setting.members.index(holder.sender))
    return open_row(setting, dealer.sender, holder.sender, channel, dealt, private) is None


def refuse_few_good_shares(
    setting: Setting, against: Mapping[str, Container[str]], holders: Collection[str], *, stage: str
) -> None:
    """Raise unless t of these holders have good shares of every dealer; else a sum could not be unmasked.

    ``against`` names every dealer, and who complained about it.
    """
    for dealer, complainers in against.items():
        good = sum(holder not in complainers for holder in holders)
        if good < setting.t:
            raise RoundAborted(
                f"{good} of the {len(holders)} members left hold good shares of the secrets of {dealer}, "
                f"{setting.t} are needed",
                stage=stage,
            )


def blame_for_complaint(
    setting: Setting, complaint: Head, dealer: str, advertised: Mapping[str, Head], dealt: Mapping[str, Head]
) -> Blame:
    """Judge a complaint about a dealer in a head of stage masked: return who is to blame, with the evidence.

    ``advertised`` and ``dealt`` are all heads that were shown after these stages, in their order.
    """
    heads = (advertised[complaint.sender], advertised[dealer], dealt[dealer], complaint)
    holder, accused, share, masked = (head.raw for head in heads)
    return _judged_complaint(
        setting, Complained(_digests(advertised), _digests(dealt), (holder, accused, share, masked))
    )


def blame_for_secret(
    setting: Setting,
    dealer: str,
    kind: Literal["key", "seed"],
    shares: Mapping[int, bytes],
    advertised: Mapping[str, Head],
    dealt: Head,
) -> Blame:
    """Return the blame of a dealer whose shares, by place, rebuild something else than it committed to."""
    heads, used = (advertised[dealer].raw, dealt.raw), tuple(sorted(shares.items())[: setting.t])
    return _judged_secret(setting, Rebuilt(_digests(advertised), heads, kind, used))


def judge(setting: Setting, evidence: Mapping[str, Any]) -> Blame:
    """Return who is to blame according to this evidence; raise a `ProtocolError` if it proves nothing."""
    if "shares" in evidence:
        return _judged_secret(setting, revealed(evidence, Rebuilt))
    return _judged_complaint(setting, revealed(evidence, Complained))


def _judged_complaint(setting: Setting, evidence: Complained) -> Blame:
    holder, dealer, dealt, complaint = _heads(
        setting, evidence.heads, ("advertise", "advertise", "share", "masked")
    )
    _refuse_unless_seen(dealt, evidence.advertised, holder, dealer)
    _refuse_unless_seen(complaint, evidence.dealt, dealt)
    place = setting.members.index(dealer.sender)
    opened = next((row.key for row in complaint.body.complaints if row.place == place), None)
    if holder.sender != complaint.sender or dealer.sender != dealt.sender or opened is None:
        raise BindingError("the heads of a complaint are not those of one holder and one dealer")
    if is_true(setting, place, opened, holder, dealer, dealt):
        return Blame(dealer.sender, holder.sender, "share", to_builtins(evidence))
    return Blame(holder.sender, holder.sender, "complaint", to_builtins(evidence))


def _judged_secret(setting: Setting, evidence: Rebuilt) -> Blame:
    dealer, dealt = _heads(setting, evidence.heads, ("advertise", "share"))
    _refuse_unless_seen(dealt, evidence.advertised, dealer)
    kind, name, shares = evidence.kind, dealer.sender, dict(evidence.shares)
    places = [place for place, _ in evidence.shares]
    in_schedule = all(place < setting.n for place in places)
    if dealt.sender != name or len(shares) != setting.t or not in_schedule or places != sorted(shares):
        raise BindingError(f"expected {setting.t} shares of one dealer")
    for place, share in shares.items():
        row, context = dealt_to(dealt, place), (setting.session, name, setting.members[place])
        if row is None or commitment(f"{kind} share", share, *context) != getattr(row, kind):
            raise ShareError("not a share that it dealt", member=name)
    if is_secret_of(dealer, kind, combine_shares(shares, setting.t), setting.session):
        raise ShareError("dealt shares of what it committed to", member=name)
    return Blame(name, None, "secret", to_builtins(evidence))


def _digests(shown: Mapping[str, Head]) -> tuple[bytes, ...]:
    return tuple(digest_of(head.raw) for head in shown.values())


def _heads(setting: Setting, raws: Sequence[bytes], stages: Sequence[str]) -> list[Head]:
    heads = [open_head(raw, setting) for raw in raws]
    if [head.stage for head in heads] != list(stages):
        raise BindingError(f"expected heads of the stages {', '.join(stages)}")
    return heads


def _refuse_unless_seen(head: Head, digests: Sequence[bytes], *shown: Head) -> None:
    """Raise unless the author of a head was shown these other heads, by the digests of the list it signed."""
    stage = shown[0].stage
    if head.seen != list_digest(stage, digests) or not {digest_of(seen.raw) for seen in shown} <= {*digests}:
        raise BindingError(f"answers another list of stage {stage}", stage=head.stage, member=head.sender)
