"""Keys and rosters, under the name that users import: see `fedmerit.identity`."""

from fedmerit.identity import *  # noqa: F403
from fedmerit.identity import __all__ as __all__
