"""Tests here import the scripts of experiments/."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))
