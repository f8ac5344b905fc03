"""Masks: keys from secrets by HKDF, and streams of words from keys by AES-256 in counter mode.

A pairwise mask is added by the member that comes first in the schedule and subtracted by the other, so it
leaves the sum; a self-mask hides the update of a member whose pairwise masks the server can rebuild, because
the server believed, or claimed, that it was lost.

A mask's key depends on the shared secret AND on run, round, attempt, both names, roster, config, model and
encoding. It is used for one stream only, so the counter starts at zero. AES is in the hardware of every
machine this runs on and in every list of approved ciphers.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmerit.errors import BindingError
from fedmerit.secagg.quantise import BLOCK, Words
from fedmerit.secagg.setting import Setting, pack

__all__ = [
    "add_masks",
    "agree",
    "commitment",
    "derive",
    "from_wire",
    "of_member",
    "pair_key",
    "public",
    "refuse_small_order",
    "self_key",
    "to_wire",
    "with_peers",
]

_ZEROS = bytes(4 * BLOCK)


def derive(secret: bytes, label: str, *context: str | bytes) -> bytes:
    """HKDF-SHA256 of a secret, 32 bytes, bound to what it is for."""
    info = pack("fedmerit secagg 1", label, *context)
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def commitment(label: str, secret: bytes, *context: str | bytes) -> bytes:
    """SHA-256 of what a secret is for and the secret: binding, and hiding as it is 32 random bytes."""
    return hashlib.sha256(pack("fedmerit secagg commitment 1", label, *context, secret)).digest()


def public(private: bytes) -> bytes:
    """The X25519 public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, peer_public: bytes, *, stage: str, peer: str) -> bytes:
    """The X25519 secret shared with a peer."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(peer_public)
        )
    except ValueError:  # a point of small order: the "secret" would be known to everybody
        raise BindingError(
            "advertised a key that agrees on nothing secret", stage=stage, member=peer
        ) from None


def refuse_small_order(keys: Iterable[bytes], *, stage: str, peer: str) -> None:
    """Stop here at a key with which every private key agrees on the same, known secret: one shows it."""
    for key in keys:
        agree(b"\x01" * 32, key, stage=stage, peer=peer)


def pair_key(shared: bytes, low: str, high: str, binding: bytes) -> bytes:
    """Key of the mask of two members, given in the order of the schedule."""
    return derive(shared, "pairwise mask", low, high, binding)


def self_key(seed: bytes, name: str, binding: bytes) -> bytes:
    """Key of a member's self-mask."""
    return derive(seed, "self mask", name, binding)


def with_peers(
    setting: Setting, name: str, private: bytes, peers: Mapping[str, bytes], binding: bytes
) -> list[tuple[bytes, int]]:
    """Keys and signs of a member's masks with each peer, from its private and their public mask keys."""
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
    """All masks of a member: its own, and one with every other peer."""
    others = {peer: key for peer, key in peers.items() if peer != name}
    return [(self_key(seed, name, binding), 1), *with_peers(setting, name, private, others, binding)]


def add_masks(words: Words, masks: Sequence[tuple[bytes, int]]) -> None:
    """Add (+1) or subtract (-1) the streams of these keys to words, in place, modulo 2^32.

    One block of words takes all masks while it sits in the processor's cache; no mask is ever held whole.
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
    """Words as bytes, least significant first; a view where the machine stores them so."""
    return (words if sys.byteorder == "little" else words.byteswap()).data.cast("B")


def from_wire(payload: memoryview) -> Words:
    """The words of a payload; a view where the machine stores them so."""
    words = np.frombuffer(payload, dtype="<u4")
    return words if sys.byteorder == "little" else words.astype(np.uint32)
