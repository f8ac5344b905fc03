"""Data of a federation, under the name that users import: see `fedmerit.simulation.data`."""

from fedmerit.simulation.data import *  # noqa: F403
from fedmerit.simulation.data import __all__ as __all__
