"""Data of a federation: read it, deal it to clients, corrupt it on purpose, commit to the test pool."""

from fedmerit.data.dataset import Dataset
from fedmerit.data.partitions import restore, save, split
from fedmerit.data.pool import Commitment, Pool, Slice, choose_pool
from fedmerit.data.readers import load

__all__ = ["Commitment", "Dataset", "Pool", "Slice", "choose_pool", "load", "restore", "save", "split"]
