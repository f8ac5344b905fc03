"""How sure scores are, under the name that users import: see `fedmerit.scoring.uncertainty`."""

from fedmerit.scoring.uncertainty import (
    Pairs,
    compare_pairs,
    indistinguishable,
    intervals,
    pair_errors,
    rank_intervals,
    resolvable_gap,
    samples_needed,
)

__all__ = [
    "Pairs",
    "compare_pairs",
    "indistinguishable",
    "intervals",
    "pair_errors",
    "rank_intervals",
    "resolvable_gap",
    "samples_needed",
]
