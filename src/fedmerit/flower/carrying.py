"""fedmerit's bytes inside Flower messages."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from fedmerit.errors import MessageError

QUERY = "query.fedmerit"
"""The type of all messages but those that train."""
BYTES = "fedmerit.bytes"
"""The record that holds our bytes: an array, because Flower cuts large arrays into pieces."""


def put(data: bytes) -> RecordDict:
    """A message's content that holds these bytes."""
    return RecordDict({BYTES: ArrayRecord([np.frombuffer(data, np.uint8)])})


def take(content: RecordDict) -> bytes:
    """The bytes that a message holds."""
    record = content.get(BYTES)
    if not isinstance(record, ArrayRecord) or len(record) != 1:
        raise MessageError("the message does not come from fedmerit")
    try:
        array = next(iter(record.values())).numpy()
    except (TypeError, ValueError, KeyError) as error:
        raise MessageError(f"the message cannot be read: {type(error).__name__}") from None
    if array.dtype != np.uint8 or array.ndim != 1:
        raise MessageError(f"expected bytes, got an array of {array.dtype} with {array.ndim} axes")
    return array.tobytes()


def only_arrays(content: RecordDict) -> ArrayRecord:
    """The one model in a message of the user's."""
    records = [record for key, record in content.array_records.items() if key != BYTES]
    if len(records) != 1:
        raise MessageError(f"expected one ArrayRecord, the model, got {len(records)}")
    return records[0]
