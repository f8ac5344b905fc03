"""How sure scores are, under the name that users import: see `fedmerit.scoring.uncertainty`."""

from fedmerit.scoring.uncertainty import *  # noqa: F403
from fedmerit.scoring.uncertainty import __all__ as __all__
