"""fedmerit: who contributed what in a federation, without anyone seeing anyone's model update.

>>> import fedmerit as fm
>>> r = fm.Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1], clients=["A", "B", "C"])
>>> fm.alpha(r).ranking()
('C', 'B', 'A')
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

from fedmerit.config import VERSION as _VERSION
from fedmerit.errors import FedmeritError
from fedmerit.files import documents as _documents  # noqa: F401  it adds to Scores how they are shown
from fedmerit.files.reports import read
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.amounts import payouts
from fedmerit.scoring.ground_truth import agreement, banzhaf, multi_round, normalise, semivalue, shapley
from fedmerit.scoring.panel import Panel, hands, panel
from fedmerit.scoring.rewards import share_intervals, shares
from fedmerit.scoring.scores import (
    SCORES,
    alpha,
    aumann_shapley,
    cos,
    cos_model,
    ee,
    fp,
    influence,
    ioi,
    loo,
    solo,
    surplus,
)
from fedmerit.scoring.types import Reports, Scores, Table

if _TYPE_CHECKING:
    from fedmerit.report.exports import LoadedRun as _Run

__version__ = _VERSION

__all__ = [
    "SCORES", "FedmeritError", "Panel", "Reports", "Scores", "Table", "accumulate", "agreement", "alpha",
    "aumann_shapley", "banzhaf", "cos", "cos_model", "ee", "fp", "hands", "influence", "ioi", "load", "loo",
    "multi_round", "normalise", "panel", "payouts", "read", "semivalue", "shapley", "share_intervals",
    "shares", "solo", "surplus",
]  # fmt: skip


def load(folder: str | _Path) -> "_Run":
    """Return the run in a folder: its scores, rounds and decisions. See `fedmerit.report.exports.load`."""
    from fedmerit.report.exports import load  # here, so that scores alone load no ledger

    return load(folder)
