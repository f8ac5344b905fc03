"""One encoding for every value that is signed or hashed: canonical JSON without floats."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from fedmerit.errors import LedgerError

DEEPEST = 32
"""Most levels of a value that is recorded."""


SERVER = "server"
Signer = Callable[[bytes], bytes]
"""Signs a message with somebody's Ed25519 key."""


def canonical(body: Any) -> bytes:
    """One encoding per value: JSON with sorted keys and no spaces, ASCII; floats are refused.

    >>> canonical({"b": [1, None], "a": "é"})
    b'{"a":"\\\\u00e9","b":[1,null]}'
    """
    _refuse_floats(body, "record")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=dict)
    return text.encode("ascii")


def seed_from(seed: int, *what: str | int) -> int:
    """A seed that depends on another one and on what it is for, and on nothing else."""
    text = canonical(["fedmerit seed 1", seed, *what])
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def exact(value: float) -> str:
    """A float as text that reads back to the same bits.

    >>> exact(0.1), number(exact(0.1))
    ('0x1.999999999999ap-4', 0.1)
    """
    return float(value).hex()


def number(text: Any) -> float:
    """The float that :func:`exact` wrote, in that spelling alone."""
    try:
        found = float.fromhex(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise LedgerError(f"expected a number in hexadecimal, got {text!r:.60}") from error
    if exact(found) != text:
        raise LedgerError(f"expected a number as it is recorded, got {text!r:.60}")
    return found


def _refuse_floats(value: Any, where: str, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise LedgerError(f"{where:.80}: deeper than {DEEPEST} levels")
    if isinstance(value, float):
        raise LedgerError(f"{where}: floats have no place in a signed record, use exact()")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise LedgerError(f"{where}: keys must be text, got {key!r}")
            _refuse_floats(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item, f"{where}[]", depth + 1)
    elif value is not None and not isinstance(value, str | int):
        raise LedgerError(f"{where}: cannot be recorded: {type(value).__name__}")


def content(author: str, kind: str, body: Mapping[str, Any]) -> bytes:
    """What an author signs: author, kind and the body's hash, apart from its place in the chain."""
    return content_of(author, kind, commitment(body))


def commitment(body: Mapping[str, Any]) -> bytes:
    """The hash of a body; with a ``salt`` in it, all that a copy without the body says about it."""
    return hashlib.sha256(b"fedmerit body 1\0" + canonical(body)).digest()


def new_salt() -> str:
    """128 random bits for a body that may be withheld from others."""
    return secrets.token_hex(16)


def content_of(author: str, kind: str, body: bytes) -> bytes:
    plain = canonical({"author": author, "kind": kind, "body": body.hex()})
    return hashlib.sha256(b"fedmerit record 2\0" + plain).digest()
