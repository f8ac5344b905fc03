"""Data of a federation: reading it, dealing it to clients, corrupting it on purpose, choosing a test pool."""

from fedmerit.data.dataset import Dataset as Dataset
from fedmerit.data.dataset import load as load
from fedmerit.data.partitions import apply as apply
from fedmerit.data.partitions import choose_pool as choose_pool
from fedmerit.data.partitions import hold_out as hold_out
from fedmerit.data.partitions import label_flip as label_flip
from fedmerit.data.partitions import label_noise as label_noise
from fedmerit.data.partitions import members as members
from fedmerit.data.partitions import save as save
from fedmerit.data.partitions import split as split
