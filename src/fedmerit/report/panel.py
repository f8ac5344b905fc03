"""A panel as people read it: who helped whom, and what is known of each judge.

A judge chooses the scale of its column, and a false one would drown all the others. So the column of a judge
that adds up to something else than its own samples gained counts in no ranking, as long as three others are
left; by the rule hands, its judge still hands out an equal part, which no scale can change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedmerit.ledger.account import Account
from fedmerit.scoring.panel import Panel
from fedmerit.scoring.types import Scores

FEWEST_OPINIONS = 5
"""Members of a panel without which nobody can say that a judge contradicts the others."""
FEWEST_LEFT = 3
"""Judges that must be left, or odd ones count too."""


@dataclass(frozen=True)
class JudgeFacts:
    """A judge: what its own samples gained, and what is odd about its column."""

    name: str
    samples: int
    gained: float
    rest: float  # of the gain, what repeats earlier rounds: nobody is credited with it
    total: float  # what its column adds up to, itself included
    holds: bool  # whether the column adds up to what the summed updates are worth
    odd: bool  # whether that is something else than its samples gained
    opposed: bool  # whether it contradicts every other judge


@dataclass(frozen=True, eq=False)
class Reading:
    """The panel of an account; ``whole`` is the panel as it was stated."""

    account: Account
    whole: Panel

    @cached_property
    def judges(self) -> tuple[JudgeFacts, ...]:
        """The judges, in the order of the roster."""
        bench, place, holds = self.account.manifest.bench, self._place, self.account.columns
        assert bench is not None
        opposed = opposed_in(self.whole, [place[one.judge] for one in bench.judges])
        return tuple(
            JudgeFacts(
                one.judge, one.samples, one.gained, one.rest,
                total=float(self.whole.matrix[:, place[one.judge]].sum()), holds=holds[one.judge],
                odd=one.judge in self.account.odd_judges, opposed=place[one.judge] in opposed,
            )
            for one in sorted(bench.judges, key=lambda one: place[one.judge])
        )  # fmt: skip

    @property
    def _place(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.whole.clients)}

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """The judges whose columns count in no ranking."""
        odd = tuple(one.name for one in self.judges if one.odd)
        return odd if len(self.judges) - len(odd) >= FEWEST_LEFT else ()

    @cached_property
    def _counted(self) -> Panel:
        """The panel with 0 in the columns that do not count."""
        kept = np.array([name not in self.left_out for name in self.whole.clients], dtype=float)
        apart = None if self.whole.apart is None else self.whole.apart * kept
        return Panel(self.whole.matrix * kept, self.whole.clients, apart)

    def scores(self, recorded: Scores) -> Scores:
        """Return the score PANEL from the judges that count, in the place of the ``recorded`` one."""
        if not self.left_out:
            return recorded
        n, own = self.whole.n, self._counted.scores
        out = np.array([len({*self.left_out} - {name}) for name in self.whole.clients])
        factor = (n - 1) / (n - 1 - out)
        values = own.values * factor
        error = None if own.stderr is None else own.stderr * factor
        return replace(recorded, values=values, raw=values, gain=float(values.sum()), stderr=error)

    @cached_property
    def order(self) -> list[int]:
        """The places of the members, whoever gave most first."""
        return [self._place[name] for name in self.scores(self.whole.scores).ranking()]

    @cached_property
    def gave(self) -> dict[str, float]:
        """What each member did for the others, by the judges that count."""
        return dict(zip(self.whole.clients, self._counted.gave.tolist(), strict=True))

    @cached_property
    def received(self) -> dict[str, float | None]:
        """What the others did for each member; None for who did not judge, or whose column does not count."""
        known = {one.name for one in self.judges} - {*self.left_out}
        sums = zip(self.whole.clients, self._counted.received.tolist(), strict=True)
        return {name: value if name in known else None for name, value in sums}

    @cached_property
    def helped_nobody(self) -> tuple[str, ...]:
        """The members whose updates did nothing good for any other member's data."""
        others = np.where(np.eye(self.whole.n, dtype=bool), 0.0, self._counted.matrix)
        return tuple(self.whole.clients[i] for i in np.flatnonzero((others <= 0).all(axis=1)))


def opposed_in(panel: Panel, judges: list[int]) -> set[int]:
    """Return the judges who contradict every other one: what helped by their columns did harm by the others.

    >>> matrix = [[9, 3, 3, 3, -1], [2, 9, 2, 2, -2], [1, 1, 9, 1, -3], [1, 1, 2, 9, -4], [-5, -2, -1, -2, 9]]
    >>> opposed_in(Panel(matrix), [0, 1, 2, 3, 4])
    {4}
    """
    if panel.n < FEWEST_OPINIONS or len(judges) < FEWEST_LEFT:
        return set()

    def agree(b: int, c: int) -> float:
        left, right = panel.matrix[np.setdiff1d(np.arange(panel.n), [b, c])][:, [b, c]].T
        return float(left @ right)

    return {b for b in judges if all(agree(b, c) < 0 for c in judges if c != b)}
