"""Data of a federation: read it, deal it to clients, corrupt it on purpose, commit to the test pool."""

from fedmerit.protocol.pool import Commitment, Pool, Slice
from fedmerit.simulation.data.corruptions import Behaviour, ClientData, apply, label_flip, label_noise, ramp
from fedmerit.simulation.data.dataset import Dataset
from fedmerit.simulation.data.partitions import SCHEMES, by_group, members, restore, save, saved_names, split
from fedmerit.simulation.data.readers import READERS, load
from fedmerit.simulation.data.test_pool import choose_pool

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
