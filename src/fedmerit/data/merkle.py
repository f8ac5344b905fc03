"""Merkle trees of RFC 6962 over nodes that are hashes already: node = SHA-256(0x01 + left + right)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def root(nodes: Sequence[bytes]) -> bytes:
    """The hash above all ``nodes``, of which there must be at least one."""
    while len(nodes) > 1:
        nodes = _parents(nodes)
    return nodes[0]


def path(nodes: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """The siblings on the way from ``nodes[index]`` to the root."""
    siblings: list[bytes] = []
    while len(nodes) > 1:
        siblings += nodes[index ^ 1 : (index ^ 1) + 1]
        nodes, index = _parents(nodes), index // 2
    return tuple(siblings)


def climb(node: bytes, index: int, width: int, siblings: Sequence[bytes]) -> bytes | None:
    """The root above ``node``, number ``index`` of ``width``; None if the path has the wrong length."""
    rest = list(siblings)
    while width > 1:
        if index ^ 1 < width:
            if not rest:
                return None
            sibling = rest.pop(0)
            node = _parent(sibling, node) if index & 1 else _parent(node, sibling)
        index, width = index // 2, (width + 1) // 2
    return None if rest else node


def _parent(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _parents(nodes: Sequence[bytes]) -> list[bytes]:
    """The next level up; a node without a sibling moves up unchanged."""
    pairs = [_parent(left, right) for left, right in zip(nodes[::2], nodes[1::2], strict=False)]
    return pairs + list(nodes[2 * len(pairs) :])
