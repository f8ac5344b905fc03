"""Masks and shares of secrets: HKDF makes keys from secrets, AES-256 in counter mode makes words from keys.

The member who comes first in the schedule adds a pairwise mask and the other subtracts it, so it cancels in
the sum. A self-mask protects a member whom the server believed, or claimed, to be lost: the server can
rebuild that member's pairwise masks, and the self-mask still hides the update.

A mask's key depends on the shared secret AND on run, round, attempt, both names, roster, config, model and
encoding. Each key makes one stream only, so the counter starts at zero. Every machine this runs on has AES in
its hardware, and every list of approved ciphers contains it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmerit.errors import BindingError, ShareError
from fedmerit.secagg.quantise import BLOCK, Words
from fedmerit.secagg.setting import Setting, pack

__all__ = [
    "add_masks",
    "agree",
    "combine_shares",
    "commitment",
    "derive",
    "from_wire",
    "of_member",
    "open_shares",
    "pair_key",
    "public",
    "refuse_small_order",
    "seal_shares",
    "self_key",
    "share_commitment",
    "split_secret",
    "to_wire",
    "with_peers",
]

_ZEROS = bytes(4 * BLOCK)


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


def refuse_small_order(keys: Iterable[bytes], *, stage: str, peer: str) -> None:
    """Raise if a key gives the same known secret with every private key; trying one of them shows it."""
    for key in keys:
        agree(b"\x01" * 32, key, stage=stage, peer=peer)


def pair_key(shared: bytes, low: str, high: str, binding: bytes) -> bytes:
    """Return the key of the mask between two members, given in the order of the schedule."""
    return derive(shared, "pairwise mask", low, high, binding)


def self_key(seed: bytes, name: str, binding: bytes) -> bytes:
    """Return the key of a member's self-mask."""
    return derive(seed, "self mask", name, binding)


def with_peers(
    setting: Setting, name: str, private: bytes, peers: Mapping[str, bytes], binding: bytes
) -> list[tuple[bytes, int]]:
    """Return keys and signs of a member's pairwise masks, from its private and the public mask keys."""
    place = setting.members.index(name)
    masks = []
    for peer, peer_public in peers.items():
        first = place < setting.members.index(peer)
        shared = agree(private, peer_public, stage="masked", peer=peer)
        masks.append(
            (pair_key(shared, *((name, peer) if first else (peer, name)), binding), 1 if first else -1)
        )
    return masks


def of_member(
    setting: Setting, name: str, private: bytes, seed: bytes, peers: Mapping[str, bytes], binding: bytes
) -> list[tuple[bytes, int]]:
    """Return keys and signs of all masks of a member: the self-mask, and one with every other peer."""
    others = {peer: key for peer, key in peers.items() if peer != name}
    return [(self_key(seed, name, binding), 1), *with_peers(setting, name, private, others, binding)]


def add_masks(words: Words, masks: Sequence[tuple[bytes, int]]) -> None:
    """Add (+1) the streams of these keys to words or subtract them (-1), in place, modulo 2^32.

    Each block of words takes all masks while it is in the processor's cache. No mask is ever held whole.
    """
    streams = [(Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor(), sign) for key, sign in masks]
    buffer = np.empty(BLOCK, "<u4")
    zeros, room = memoryview(_ZEROS), buffer.data.cast("B")
    for start in range(0, words.size, BLOCK):
        block = words[start : start + BLOCK]
        size = block.size
        for stream, sign in streams:
            stream.update_into(zeros[: 4 * size], room[: 4 * size])
            if sign > 0:
                np.add(block, buffer[:size], out=block)
            else:
                np.subtract(block, buffer[:size], out=block)


def to_wire(words: Words) -> memoryview:
    """Return words as bytes, least significant first; a view if the machine stores them in that order."""
    return (words if sys.byteorder == "little" else words.byteswap()).data.cast("B")


def from_wire(payload: memoryview) -> Words:
    """Return the words of a payload; a view if the machine stores them in that order."""
    words = np.frombuffer(payload, dtype="<u4")
    return words if sys.byteorder == "little" else words.astype(np.uint32)


# ------------------------------------------------------------------------------------------------- sharing
# A secret is shared among the members so that any t of them can rebuild it. Anybody who lies about a share is
# named.
#
# Shamir's scheme comes from pycryptodome and works over GF(2^128), so it shares 16 bytes. Our secrets have 32
# (an X25519 key, a self-mask seed), so each half is shared on its own and a share is two field elements.
# (Sharing a 16-byte seed instead would halve the bytes, but would limit it to 128 bits where everything else
# has 256.)
#
# A dealer signs a hash of every single share. The holder checks the hash on arrival and the server checks it
# after release. A member who sends a share that it was not dealt is named, and so is a dealer whose shares
# rebuild a secret that it did not commit to. Fewer than t shares are uniformly random, 32 bytes each, so
# their hashes hide them.


def split_secret(secret: bytes, threshold: int, members: int) -> list[bytes]:
    """Return one share of 32 bytes per position in the schedule; any ``threshold`` give the secret."""
    halves = [Shamir.split(threshold, members, secret[at : at + 16], False) for at in (0, 16)]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def combine_shares(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Rebuild a secret from ``threshold`` shares, given by position; raise if there are fewer."""
    if len(shares) < threshold:
        raise ShareError(f"{threshold} shares are needed, got {len(shares)}")
    used = sorted(shares.items())[:threshold]
    return b"".join(
        bytes(Shamir.combine([(place + 1, share[at : at + 16]) for place, share in used], False))
        for at in (0, 16)
    )


def share_commitment(kind: str, share: bytes, session: bytes, dealer: str, holder: str) -> bytes:
    """Return the hash of one share that its dealer signs."""
    return commitment(f"{kind} share", share, session, dealer, holder)


def seal_shares(shared: bytes, session: bytes, dealer: str, holder: str, shares: bytes) -> bytes:
    """Encrypt a holder's two shares with AES-256-GCM, under a key for this session, dealer and holder only.

    The key serves one message. The nonce is random all the same: a client that was restored from an old copy
    of its state may deal twice, and must not use a nonce twice.
    """
    nonce = os.urandom(12)
    cipher = AESGCM(_share_key(shared, session, dealer, holder))
    return nonce + cipher.encrypt(nonce, shares, pack(session, dealer, holder))


def open_shares(shared: bytes, session: bytes, dealer: str, holder: str, sealed: bytes) -> bytes:
    """Decrypt what ``seal_shares`` made; raise a `ShareError` that names the dealer for anything else."""
    try:
        return AESGCM(_share_key(shared, session, dealer, holder)).decrypt(
            sealed[:12], sealed[12:], pack(session, dealer, holder)
        )
    except InvalidTag:
        raise ShareError("dealt a share that does not decrypt", stage="share", member=dealer) from None


def _share_key(shared: bytes, session: bytes, dealer: str, holder: str) -> bytes:
    return derive(shared, "share encryption", session, dealer, holder)
