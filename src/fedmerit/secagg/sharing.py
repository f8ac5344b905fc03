"""Sharing a secret among the members so that any t can rebuild it, and a lie about a share has a name.

Shamir's scheme comes from pycryptodome, over GF(2^128): it shares 16 bytes. Our secrets have 32 (an X25519
key, a self-mask seed), so each half is shared on its own and a share is two field elements. (Sharing a
16-byte seed instead would halve the bytes, and cap at 128 bits what everything else does with 256.)

A dealer signs a hash of every single share. The holder checks it on arrival and the server after release:
whoever sends another share than was dealt is named, and so is a dealer whose shares rebuild something else
than what it committed to. Fewer than t shares are uniformly random, 32 bytes each, so their hashes hide them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedmerit.errors import ShareError
from fedmerit.secagg.masks import commitment, derive
from fedmerit.secagg.setting import pack

__all__ = ["combine", "open_shares", "seal_shares", "share_commitment", "split"]


def split(secret: bytes, threshold: int, members: int) -> list[bytes]:
    """One share of 32 bytes for each position in the schedule; any ``threshold`` give the secret."""
    halves = [Shamir.split(threshold, members, secret[at : at + 16], False) for at in (0, 16)]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret from the shares of ``threshold`` members, by position. More are not used, fewer an error."""
    if len(shares) < threshold:
        raise ShareError(f"{threshold} shares are needed, got {len(shares)}")
    used = sorted(shares.items())[:threshold]
    return b"".join(
        bytes(Shamir.combine([(place + 1, share[at : at + 16]) for place, share in used], False))
        for at in (0, 16)
    )


def share_commitment(kind: str, share: bytes, session: bytes, dealer: str, holder: str) -> bytes:
    """What the dealer signs of one share."""
    return commitment(f"{kind} share", share, session, dealer, holder)


def seal_shares(shared: bytes, session: bytes, dealer: str, holder: str, shares: bytes) -> bytes:
    """Encrypt a holder's two shares with AES-256-GCM under a key of this session, dealer and holder alone.

    The key serves one message. The nonce is random all the same: a client restored from an old copy of its
    state may deal twice, and must not do so under one nonce.
    """
    nonce = os.urandom(12)
    cipher = AESGCM(_key(shared, session, dealer, holder))
    return nonce + cipher.encrypt(nonce, shares, pack(session, dealer, holder))


def open_shares(shared: bytes, session: bytes, dealer: str, holder: str, sealed: bytes) -> bytes:
    """Decrypt what ``seal_shares`` made; anything else is a `ShareError` that names the dealer."""
    try:
        return AESGCM(_key(shared, session, dealer, holder)).decrypt(
            sealed[:12], sealed[12:], pack(session, dealer, holder)
        )
    except InvalidTag:
        raise ShareError("dealt a share that does not decrypt", stage="share", member=dealer) from None


def _key(shared: bytes, session: bytes, dealer: str, holder: str) -> bytes:
    return derive(shared, "share encryption", session, dealer, holder)
