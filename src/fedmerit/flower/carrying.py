"""fedmerit's bytes inside Flower messages, and what a train message says besides the model."""

from __future__ import annotations

import hashlib

from flwr.app import Array, ArrayRecord, RecordDict

from fedmerit.errors import MessageError
from fedmerit.secagg.setting import pack

QUERY = "query.fedmerit"
"""The type of all messages but those that train."""
BYTES = "fedmerit.bytes"
"""The record that holds our bytes: an array, because Flower cuts large arrays into pieces."""
KIND = "fedmerit.bytes.1"
"""How that array is serialised: not at all. Nothing is ever parsed before it is checked."""


def put(data: bytes) -> RecordDict:
    """A message's content that holds these bytes."""
    return RecordDict({BYTES: ArrayRecord({"0": Array("uint8", (len(data),), KIND, data)})})


def take(content: RecordDict) -> bytes:
    """The bytes that a message holds."""
    record = content.get(BYTES)
    if not isinstance(record, ArrayRecord) or len(record) != 1:
        raise MessageError("the message does not come from fedmerit")
    array = next(iter(record.values()))
    if array.stype != KIND or not isinstance(array.data, bytes):
        raise MessageError(f"expected bytes, got an array serialised as {array.stype!r:.40}")
    return array.data


def only_arrays(content: RecordDict) -> ArrayRecord:
    """The one model in a message of the user's."""
    records = [record for key, record in content.array_records.items() if key != BYTES]
    if len(records) != 1:
        raise MessageError(f"expected one ArrayRecord, the model, got {len(records)}")
    return records[0]


def digest(content: RecordDict) -> bytes:
    """SHA-256 of all a train message holds but our bytes: arrays of every type, settings, metrics.

    Members compare it before anything is unmasked: a server that told one of them to train otherwise than
    the others could read its update from the sum.
    """
    records: list[list[object]] = []
    for key in sorted(content):
        record = content[key]
        if key == BYTES:
            continue
        if isinstance(record, ArrayRecord):
            rows: list[list[object]] = [
                [name, array.dtype, list(array.shape), array.stype, hashlib.sha256(array.data).digest()]
                for name, array in record.items()
            ]
        else:
            rows = [[name, _plain(value)] for name, value in sorted(record.items())]
        records.append([key, type(record).__name__, rows])
    return hashlib.sha256(pack("fedmerit train message 1", records)).digest()


def _plain(value: object) -> object:
    return list(value) if isinstance(value, list | tuple) else value
