"""Data of a federation: read it, deal it to clients, corrupt it on purpose, commit to the test pool."""

from fedmerit.data.corruptions import Behaviour, ClientData, apply, label_flip, label_noise, ramp
from fedmerit.data.dataset import Dataset
from fedmerit.data.partitions import SCHEMES, restore, save, split
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
    "choose_pool",
    "label_flip",
    "label_noise",
    "load",
    "ramp",
    "restore",
    "save",
    "split",
]
