"""What may happen in a run, said without any transport, and what must come of it.

`expected` is the rule in a few lines. It knows no message and no key, only who is there when.
"""

from __future__ import annotations

from dataclasses import dataclass

from linear_federation import STAGES

LEAST = 3
"""Fewest members in a sum."""


@dataclass(frozen=True)
class Scenario:
    """A run, as it was planned and as it goes.

    Args:
        members: how many; they are called client-0, client-1, ...
        rounds: how many.
        weights: uniform, secret (the members' sample counts) or roster.
        lost: (member, round, stage): its answers from that stage to the end of that round never arrive.
        away: (member, round): it is not scheduled.
        beyond: members whose update lies beyond the bound, in every round.
        bad: (dealer, round, holder): it deals this holder a bad share.
        threshold: members needed to finish; 0 for floor(2/3 of all members) + 1.
        reveal: one test slice for all rounds (fixed) or a fresh one each (per-round).
        visibility: of the records: all, or coordinator.
        method: reports, settled, or both.
    """

    members: int = 4
    rounds: int = 2
    weights: str = "uniform"
    lost: tuple[tuple[int, int, str], ...] = ()
    away: tuple[tuple[int, int], ...] = ()
    beyond: tuple[int, ...] = ()
    bad: tuple[tuple[int, int, int], ...] = ()
    threshold: int = 0
    reveal: str = "fixed"
    visibility: str = "all"
    method: str = "reports"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name_of(i) for i in range(self.members))

    @property
    def needed(self) -> int:
        """t: members that must stay to the end of a round."""
        return self.threshold or 2 * self.members // 3 + 1

    @property
    def samples(self) -> dict[str, int]:
        """Training samples; whoever is beyond the bound has so many that its training leads there."""
        counts = [300 if i in self.beyond else (60, 50, 70, 40)[i % 4] for i in range(self.members)]
        return dict(zip(self.names, counts, strict=True))

    @property
    def roster(self) -> dict[str, float]:
        """The weights that the roster states, where they count."""
        return {name_of(i): 1 + i / 2 for i in range(self.members)}

    @property
    def weight_of(self) -> dict[str, float]:
        """What each member counts in a sum."""
        return {"uniform": dict.fromkeys(self.names, 1), "secret": self.samples, "roster": self.roster}[
            self.weights
        ]

    def losses(self, number: int) -> dict[str, str]:
        """Who is lost in a round, and where."""
        return {name_of(i): stage for i, at, stage in self.lost if at == number}

    def is_lost(self, name: str, number: int, stage: str) -> bool:
        """Whether this member's answer of this stage never arrives."""
        at = self.losses(number).get(name)
        return at is not None and STAGES.index(stage) >= STAGES.index(at)

    def is_away(self, name: str, number: int) -> bool:
        return any((name_of(i), at) == (name, number) for i, at in self.away)


def name_of(i: int) -> str:
    return f"client-{i}"


@dataclass(frozen=True)
class Expected:
    """Who is where in one round."""

    scheduled: tuple[str, ...]
    included: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    blamed: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    aborted: bool = True


def expected(scenario: Scenario, number: int) -> Expected:
    """What must come of a round.

    >>> four = Scenario(lost=((0, 1, "masked"), (1, 2, "check"), (2, 3, "share"), (3, 3, "unmask")), rounds=3)
    >>> expected(four, 1).included, expected(four, 1).silent
    (('client-1', 'client-2', 'client-3'), ())
    >>> expected(four, 2).included, expected(four, 2).silent
    (('client-0', 'client-1', 'client-2', 'client-3'), ('client-1',))
    >>> expected(four, 3).aborted
    True
    """
    before = {name for earlier in range(1, number) for name in expected(scenario, earlier).blamed}
    scheduled = tuple(n for n in scenario.names if not scenario.is_away(n, number) and n not in before)
    left, included, declined, against = scheduled, (), (), {}
    if len(left) < max(LEAST, scenario.needed):
        return Expected(scheduled)
    for stage in STAGES[:-1]:
        left = tuple(name for name in left if not scenario.is_lost(name, number, stage))
        if stage == "masked":
            declined = tuple(name_of(i) for i in scenario.beyond if name_of(i) in left)
            left = included = tuple(name for name in left if name not in declined)
            for dealer in scenario.names:
                pairs = ((name_of(d), name_of(h)) for d, at, h in scenario.bad if at == number)
                complained = {holder for d, holder in pairs if d == dealer and holder in included}
                against |= {dealer: complained} if complained else {}
        good = min((len({*left} - complained) for complained in against.values()), default=len(left))
        if min(len(left), good) < (scenario.needed if included else max(LEAST, scenario.needed)):
            return Expected(scheduled, declined=declined, blamed=tuple(against))
    heard = [name for name in left if not scenario.is_lost(name, number, "report")]
    silent = tuple(name for name in included if name not in heard)
    return Expected(scheduled, included, declined, tuple(against), silent, aborted=False)


ONE = (("advertise", "report"), ("share", "unmask"), ("masked", "check"), ("report", "advertise"))
"""Stages at which one member is lost, in rounds 1 and 2."""
TWO = (("advertise", "share"), ("masked", "check"), ("unmask", "report"))
"""Stages at which two of four are lost, in rounds 1 and 2; a third round follows."""
SCENARIOS = {
    "everybody": Scenario(),
    "secret-weights": Scenario(weights="secret", lost=((0, 1, "masked"), (3, 2, "check"))),
    "roster-weights": Scenario(weights="roster", lost=((3, 1, "masked"), (0, 2, "unmask"))),
    "fresh-slices": Scenario(reveal="per-round"),
    "coordinator-sees": Scenario(visibility="coordinator", lost=((1, 2, "report"),)),
    **{f"one-lost-at-{a}-{b}": Scenario(lost=((2, 1, a), (0, 2, b))) for a, b in ONE},
    **{
        f"two-lost-at-{a}-{b}": Scenario(rounds=3, lost=((1, 1, a), (3, 1, a), (0, 2, b), (2, 2, b)))
        for a, b in TWO
    },
    "lost-twice": Scenario(lost=((2, 1, "check"), (2, 2, "masked"))),
    "nobody-reports": Scenario(lost=tuple((i, 1, "report") for i in range(4))),
    "one-after-another": Scenario(
        members=7, weights="secret", lost=((0, 1, "share"), (3, 1, "unmask"), (5, 2, "masked"))
    ),
    "aborted-in-the-middle": Scenario(rounds=3, lost=((0, 2, "check"), (1, 2, "check"))),
    "all-are-needed": Scenario(threshold=4, lost=((0, 1, "unmask"), (1, 2, "report"))),
    "one-beyond": Scenario(beyond=(1,), lost=((2, 1, "masked"),)),
    "one-beyond-and-all-needed": Scenario(rounds=1, threshold=4, beyond=(1,)),
    "bad-shares": Scenario(members=7, rounds=3, bad=((1, 1, 2), (4, 2, 0)), lost=((5, 1, "check"),)),
    "bad-shares-to-many": Scenario(bad=((1, 1, 0), (1, 1, 2))),
    "settled": Scenario(method="settled", lost=((1, 1, "report"), (3, 2, "check"))),
    "settled-secretly": Scenario(method="settled", weights="secret", visibility="coordinator"),
    "settled-and-reported": Scenario(method="both", lost=((2, 2, "masked"),), reveal="per-round"),
    "one-away": Scenario(away=((3, 1), (0, 2))),
    "too-few-scheduled": Scenario(away=((0, 1), (1, 1))),
}
