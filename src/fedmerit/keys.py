"""Keys and rosters, under the name that users import: see `fedmerit.identity.keys`."""

from fedmerit.identity.keys import *  # noqa: F403
from fedmerit.identity.keys import __all__ as __all__
