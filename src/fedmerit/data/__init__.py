"""Data of a federation: read it, deal it to clients, corrupt it on purpose, commit to the test pool."""

from fedmerit.data.corruptions import Behaviour, ClientData, apply, label_flip, label_noise, ramp
from fedmerit.data.dataset import Dataset
from fedmerit.data.partitions import SCHEMES, by_group, members, restore, save, saved_names, split
from fedmerit.data.pool import Commitment, Pool, Slice, choose_pool
from fedmerit.data.readers import READERS, load

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
