"""Bytes of msgpack as plain values, and what a message of the server says, to be changed and sent again."""

from typing import Any

from msgspec import msgpack, to_builtins

from fedmerit.protocol.messages import ASKS, Ask


def unpack(data: bytes) -> Any:
    """Return the value in bytes of msgpack."""
    return msgpack.decode(data)


def parts(answer: bytes) -> tuple[bytes, bytes]:
    """Return the answer to train, check or unmask, and what came with it."""
    size = int.from_bytes(answer[:4], "big")
    return answer[4 + size :], answer[4 : 4 + size]


def said_in(ask: Ask) -> dict[str, Any]:
    """Return the body of a message as plain values that can be changed."""
    return to_builtins(ask.body, builtin_types=(bytes,))


def told(ask: Ask, body: dict[str, Any], arrays: dict[str, Any]) -> Ask:
    """Return the message with another body and other arrays, however false they are."""
    try:
        return Ask(ask.exchange, ask.run, ask.round, ASKS[ask.exchange](**body), arrays)
    except TypeError:  # it has other fields
        return Ask(ask.exchange, ask.run, ask.round, body, arrays)
