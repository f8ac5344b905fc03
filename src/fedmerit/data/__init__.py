"""Data of a federation: reading it, dealing it to clients, corrupting it on purpose, choosing a test pool."""

from fedmerit.data.dataset import Dataset, choose_pool
from fedmerit.data.partitions import (
    SCHEMES,
    Behaviour,
    ClientData,
    apply,
    by_group,
    label_flip,
    label_noise,
    members,
    ramp,
    restore,
    save,
    saved_names,
    split,
)
from fedmerit.data.readers import READERS, load
from fedmerit.protocol.pool import Commitment, Pool, Slice

__all__ = [
    "READERS",
    "SCHEMES",
    "Behaviour",
    "ClientData",
    "Commitment",
    "Dataset",
    "Pool",
    "Slice",
    "apply",
    "by_group",
    "choose_pool",
    "label_flip",
    "label_noise",
    "load",
    "members",
    "ramp",
    "restore",
    "save",
    "saved_names",
    "split",
]
