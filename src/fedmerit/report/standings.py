"""How members stand: scores, ranks, groups, doubts, and what happened per member and round."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedmerit.errors import InputError, UndefinedShares
from fedmerit.ledger.account import SettledRound, total_of
from fedmerit.ledger.decisions import Terms, liars_in
from fedmerit.notes import Note
from fedmerit.report.findings import (
    Absence,
    Happened,
    RoundFacts,
    Standing,
)
from fedmerit.report.source import Source
from fedmerit.report.text import digits_for
from fedmerit.scoring.accumulate import Missing, ScoredRound, accumulate, number_of, running_sums
from fedmerit.scoring.convergence import Convergence, convergence_of
from fedmerit.scoring.doubts import Doubt, at_chance, doubts
from fedmerit.scoring.files import scores_of
from fedmerit.scoring.rewards import Shares
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.share_intervals import PaidApart, paid_apart, share_intervals
from fedmerit.scoring.types import UNIT_UTILITIES, Reports, Scores
from fedmerit.scoring.uncertainty import (
    compare_pairs,
    indistinguishable,
    intervals,
    rank_intervals,
    sure_signs,
)

MOST_COMPARED = 1000
"""With more clients pairs are not compared: that takes N^2 memory, and the groups are too long to read."""
MOST_POINTS = 60
"""The most rounds shown of one member's course; of more, evenly spaced ones."""

# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Standings:
    """What happened in a run, and how sure that is.

    Args:
        source: what the run left behind, with the names to be shown.
        original: the same with the real names. Shares are computed from it, so that they equal those of
            ``fedmerit rewards`` to the last bit, whatever names are shown. By default ``source``.
        score: which score is summed over rounds; None takes the settled one (PHI), or ALPHA without it.
    """

    source: Source
    original: Source | None = None
    score: str | None = None

    @property
    def ranked_by(self) -> str:
        """The score that ranks members."""
        return self.score or ("PHI" if self.source.accounts else "ALPHA")

    @property
    def settled(self) -> bool:
        """Whether members are ranked by what they stated in the settlement."""
        return self.ranked_by == "PHI"

    @property
    def measured(self) -> tuple[ScoredRound, ...]:
        """The scored rounds: as reported, or as settled."""
        return self.source.settled_rounds if self.settled else self.source.rounds

    @property
    def by_round(self) -> bool:
        """Whether the scores of single rounds are known: not if members state one number for the run."""
        return not self.settled or all(one.scores is not None for one in self.source.settled_rounds)

    @property
    def agreed(self) -> Terms:
        """The terms that pay unless somebody chooses others: those of the settings."""
        payment, currency = self.source.payment, self.source.heading.currency
        made = Terms.agreed(payment, "0", str(self.utility), self.ranked_by)
        return replace(made, missing=self.source.missing, currency=currency)

    def liars(self, source: Source) -> tuple[str, ...]:
        """Return everybody whom the settlement named, if it ranks members."""
        return liars_in(source.accounts) if self.settled else ()

    # ------------------------------------------------------------------------------------------ who, how much

    @cached_property
    def total(self) -> Scores:
        """The score summed over rounds."""
        return self._summed(self.source, self.ranked_by, self.source.missing)

    def _summed(
        self, source: Source, score: str, missing: Missing, rounds: Sequence[Reports] | None = None
    ) -> Scores:
        """Return a score summed over the rounds of a source."""
        if score == "PHI":
            return total_of(source.accounts, missing)
        return accumulate(source.rounds if rounds is None else rounds, score=score, missing=missing)

    @cached_property
    def standings(self) -> tuple[Standing, ...]:
        """Everybody who ever reported, best first."""
        total, last, found = self.total, self.last, self._last_scores
        spans = None if total.stderr is None else intervals(total)
        signs = [0] * total.n if total.stderr is None else sure_signs(total)
        at = {name: i for i, name in enumerate(total.clients)}
        of_last = {name: k for k, name in enumerate(last.clients)} if last else {}
        samples: dict[str, float] = {}
        if last is not None and last.samples is not None:
            samples = dict(zip(last.clients, last.samples.tolist(), strict=True))
        reported: dict[str, float] = {}
        if self.settled and self.source.rounds:
            reported = accumulate(self.source.rounds, missing=self.source.missing).as_dict()
        places, digits = total.ranks(), digits_for(float(np.max(np.abs(total.raw))))
        ranks, divided = self._ranks, self._usual[0]
        sure = None if divided is None else share_intervals(total, divided)
        made = []
        for name in total.ranking():
            i, k = at[name], of_last.get(name)
            of_round: dict[str, float | None] = {}
            for key in ("LOO", "FP", "EE"):
                one = found.get(key)
                of_round[key] = None if one is None or k is None else float(one.values[k])
            made.append(
                Standing(
                    client=name,
                    rank=int(places[i]),
                    rank_interval=None if ranks is None else (int(ranks[i, 0]), int(ranks[i, 1])),
                    total=float(total.raw[i]),
                    interval=None if spans is None else (float(spans[i, 0]), float(spans[i, 1])),
                    coverage=1.0 if total.coverage is None else float(total.coverage[i]),
                    last=of_round,
                    share=None if divided is None else divided[name],
                    share_interval=None if sure is None else sure[name],
                    samples=samples.get(name),
                    digits=digits,
                    surely=signs[i],
                    reported=reported.get(name),
                )
            )
        return tuple(made)

    @cached_property
    def standing(self) -> dict[str, Standing]:
        """Member -> how it stands, of everybody who ever reported."""
        return {one.client: one for one in self.standings}

    @cached_property
    def _ranks(self) -> npt.NDArray[np.int64] | None:
        return None if self.total.stderr is None else rank_intervals(self.total)

    @cached_property
    def _usual(self) -> tuple[Shares | None, tuple[str, ...]]:
        """The shares of the usual rule, if there are any, and the notes on them."""
        try:
            divided = self.agreed.divide(self.total, self.liars(self.source))
        except UndefinedShares as error:
            return None, (Note("no-shares", why=error.note),)
        except InputError as error:  # terms for another number of members, or for another score
            return None, (Note("no-shares", why=str(error)),)
        return divided, divided.notes

    @property
    def last(self) -> Reports | None:
        """The last round with reports, if there is one."""
        return self.source.rounds[-1] if self.source.rounds else None

    @cached_property
    def _last_scores(self) -> Mapping[str, Scores | None]:
        return {} if self.last is None else scores_of(self.last)

    @property
    def status(self) -> dict[str, str]:
        """Status of FP and EE in the last round, where they exist."""
        return {key: one.status for key in ("FP", "EE") if (one := self._last_scores.get(key)) is not None}

    @property
    def digits(self) -> int:
        """Decimals to show for contributions of this size."""
        return self.standings[0].digits

    @property
    def unit(self) -> int:
        """By what contributions are multiplied for people: 100, for points, if the measure is from 0 to 1."""
        return 100 if self.utility in UNIT_UTILITIES and self.ranked_by != "COS" else 1

    @property
    def unit_digits(self) -> int:
        """Decimals of contributions for people: three digits in points, and at least one decimal."""
        if self.unit == 1:
            return self.digits
        return _point_digits(100 * float(np.max(np.abs(self.total.raw))))

    @property
    def level_digits(self) -> int:
        """Decimals for the utilities of the shared model and their changes, for people."""
        if self.unit == 100:
            return _point_digits(100 * abs(self.total.gain))
        levels = [abs(value) for one in self.measured for value in (one.empty, one.grand)]
        return max(digits_for(max(levels)), digits_for(abs(self.total.gain)))

    @property
    def utility(self) -> str | None:
        """Name of the utility that ranks members here: the paid one unless a decision names another."""
        return self.measured[0].utility

    # ----------------------------------------------------------------------------------------------- how sure

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Statistically indistinguishable members; empty if unknown."""
        compared = self.total.stderr is not None and self.total.n <= MOST_COMPARED
        return indistinguishable(self.total) if compared else ()

    @property
    def letters(self) -> dict[str, str]:
        """Letters a, b, ... per member; members with a common letter are statistically indistinguishable."""
        if not any(len(group) > 1 for group in self.groups) or len(self.groups) > 26:
            return {}
        lettered = tuple(zip(string.ascii_lowercase, self.groups, strict=False))
        return {
            one.client: "".join(letter for letter, group in lettered if one.client in group)
            for one in self.standings
        }

    @cached_property
    def alike(self) -> dict[str, tuple[str, ...]]:
        """Member -> members statistically indistinguishable from it, best first; empty if unknown."""
        total = self.total
        if total.stderr is None or total.n > MOST_COMPARED:
            return {}
        better = self._better
        assert better is not None
        alike = ~(better | better.T)
        np.fill_diagonal(alike, False)
        rows = dict(zip(total.clients, alike, strict=True))
        at = {name: i for i, name in enumerate(total.clients)}
        return {name: tuple(one for one in total.ranking() if row[at[one]]) for name, row in rows.items()}

    @cached_property
    def convergence(self) -> Convergence | None:
        """How the order of members settled over the rounds; None if that cannot be said."""
        if self.ranked_by == "MERIT" or not self.by_round:  # more than a sum over rounds, or not known
            return None
        rounds: Sequence[Reports] | Sequence[Scores] = self.source.rounds
        if self.settled:
            rounds = [one.scores for one in self.source.settled_rounds if one.scores is not None]
        numbers = [number_of(one, place) for place, one in enumerate(self.measured, start=1)]
        return convergence_of(self.total, rounds, numbers, missing=self.source.missing)

    @cached_property
    def _better(self) -> npt.NDArray[np.bool_] | None:
        """Who is significantly better than whom, shape (N, N); None if unknown."""
        return better_than(self.total)

    def apart(self, divided: Mapping[str, float]) -> PaidApart | None:
        """Return indistinguishable members whose shares differ visibly; the score that ranks them decides."""
        better = self._better
        if better is None or set(divided) != set(self.total.clients):
            return None
        return paid_apart(self.total, divided, better)

    @cached_property
    def suspects(self) -> tuple[str, ...]:
        """Members who reported in every round and are below all others, surely; of two, one always is."""
        total, ranks = self.total, self._ranks
        if ranks is None or total.n < 3:
            return ()
        last_for_sure = ranks[:, 0] == total.n
        if total.coverage is not None:  # nobody is accused for missed rounds
            last_for_sure &= total.coverage >= 1
        return tuple(name for name, sure in zip(total.clients, last_for_sure, strict=True) if sure)

    @property
    def harmful(self) -> list[str]:
        """Members who surely made the model worse.

        If some member surely improved the model, a member whose rank may still be first is not accused.
        """
        improved = any(one.surely > 0 for one in self.standings)
        return [
            one.client
            for one in self.standings
            if one.surely < 0 and not (improved and one.rank_interval and one.rank_interval[0] == 1)
        ]

    @cached_property
    def doubts(self) -> tuple[Doubt, ...]:
        """Reasons to look at the reports before anybody is paid; shown before everything else."""
        if self.settled:
            return () if (found := at_chance(self.total)) is None else (found,)
        return doubts(self.source.rounds, game=self.source.game, metrics=self.source.metrics)

    @property
    def withheld(self) -> bool:
        """Whether a doubt forbids praising or accusing members by these numbers until it is resolved."""
        return any(one.withholds for one in self.doubts)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What readers should know before they rely on the standings."""
        found = [*self.source.notes, *self.total.notes, *self.absence_notes]
        if self.utility in self.source.metrics:
            found.append(Note("whole-sum", utility=self.utility))
        for one in self._last_scores.values():
            found += one.notes if one else ()
        return tuple(dict.fromkeys([*found, *self._usual[1]]))

    # ----------------------------------------------------------------------------- member by member and round

    @cached_property
    def happened(self) -> dict[str, dict[int, Happened]]:
        """Member -> scored round -> what happened; everybody on the roster or in a sum."""
        numbered = {number_of(one, place): one for place, one in enumerate(self.measured, start=1)}
        books = {one.number: one for one in self.source.book.rounds} if self.source.book else {}
        blamed = {(name, one.since): one.number for one in books.values() for name in one.blamed}
        seen = (name for one in self.measured for name in (*one.clients, *one.silent))
        found: dict[str, dict[int, Happened]] = {
            name: {} for name in dict.fromkeys((*self.source.clients, *seen))
        }
        for number, reports in numbered.items():
            reported, silent, book = set(reports.clients), set(reports.silent), books.get(number)
            for name, of_member in found.items():
                code: Happened = "unknown"
                if name in reported:
                    code = "counted"
                elif name in silent:
                    code = "unstated" if self.settled else "silent"
                elif book is not None and name in book.declined:
                    code = "declined"
                elif book is not None and blamed.get((name, book.since), number + 1) <= number:
                    code = "blamed"
                elif book is not None:
                    code = "lost" if name in book.scheduled else "away"
                of_member[number] = code
        return found

    @property
    def blamed(self) -> dict[str, int]:
        """Member who broke the protocol -> the round in which it did, as the ledger proves."""
        rounds = self.source.book.rounds if self.source.book else ()
        return {name: one.number for one in rounds for name in one.blamed}

    def rounds_of(self, client: str, *codes: Happened) -> tuple[int, ...]:
        """Return the rounds in which one of these things happened to a member."""
        return tuple(number for number, code in self.happened[client].items() if code in codes)

    def clients_with(self, number: int, code: Happened) -> tuple[str, ...]:
        """Return the members to whom this happened in a round."""
        return tuple(name for name, each in self.happened.items() if each[number] == code)

    @cached_property
    def unscored(self) -> tuple[str, ...]:
        """Members who are on the roster, or were in a sum, and never reported, or never stated."""
        return tuple(name for name, each in self.happened.items() if "counted" not in each.values())

    @property
    def absence_notes(self) -> Iterator[Note]:
        """Notes on members who were summed without a report, and on those who were in no round at all."""
        for name in self.happened:
            if silent := self.rounds_of(name, "silent"):
                yield Note("silent", client=name, rounds=silent)
        for name in self.unscored:
            if not self.rounds_of(name, "silent", "unstated"):
                yield Note("never-summed" if self.settled else "only-listed", client=name)

    @cached_property
    def absences(self) -> tuple[Absence, ...]:
        """Members who missed a scored round."""
        rounds, score = self.measured, "PHI" if self.settled else "ALPHA"
        mean = self._summed(self.source, score, "own-mean").as_dict()
        zero = self._summed(self.source, score, "zero").as_dict()
        gains = {number_of(one, place): one.gain for place, one in enumerate(rounds, start=1)}
        found = []
        for name, each in self.happened.items():
            if missed := {number: code for number, code in each.items() if code != "counted"}:
                own = mean[name] - zero[name] if name in mean else None
                found.append(Absence(name, missed, math.fsum(gains[number] for number in missed), own))
        return tuple(found)

    @cached_property
    def shown(self) -> dict[int, int]:
        """Round number -> its place, of at most MOST_POINTS evenly spaced rounds, first and last included."""
        count = len(self.measured)
        step = max(1.0, (count - 1) / (MOST_POINTS - 1))
        places = sorted({1 + round(k * step) for k in range(min(count, MOST_POINTS))})
        return {number_of(self.measured[place - 1], place): place for place in places}

    @cached_property
    def courses(self) -> dict[str, tuple[float | None, ...]]:
        """Member -> its sum after each round shown, best first; empty if single rounds are unknown."""
        rounds: Sequence[Reports] | Sequence[Scores] = self.source.rounds
        if not self.by_round:
            return {}
        if self.settled:
            rounds = [one.scores for one in self.source.settled_rounds if one.scores is not None]
        sums = running_sums(rounds, self.shown.values(), missing=self.source.missing)
        return {one.client: tuple(total.get(one.client) for total in sums) for one in self.standings}

    @cached_property
    def rounds(self) -> tuple[RoundFacts, ...]:
        """Every round that is over, with those that have no score."""
        found = [RoundFacts(number, aborted=why) for number, why in self.source.aborted.items()]
        found += [RoundFacts(number) for number in self.source.unreported]
        if self.settled:
            found += map(self._settled_round, self.source.settled_rounds)
            return tuple(sorted(found, key=lambda one: one.number))
        for place, reports in enumerate(self.source.rounds, start=1):
            number, scores = number_of(reports, place), scores_of(reports)
            found.append(
                RoundFacts(
                    number,
                    reported=reports.n,
                    gain=reports.gain,
                    explained=math.fsum(alpha(reports).values.tolist()),
                    status={
                        k: "none" if (one := scores.get(k)) is None else one.status for k in ("FP", "EE")
                    },
                    silent=self.clients_with(number, "silent"),
                    declined=self.clients_with(number, "declined"),
                    blamed=tuple(name for name, at in self.blamed.items() if at == number),
                )
            )
        return tuple(sorted(found, key=lambda one: one.number))

    def _settled_round(self, one: SettledRound) -> RoundFacts:
        told = next((reports for reports in self.source.rounds if reports.round == one.round), None)
        scores = {} if told is None else scores_of(told)
        status = {k: "none" if (own := scores.get(k)) is None else own.status for k in ("FP", "EE")}
        return RoundFacts(
            one.round,
            reported=len(one.clients),
            gain=one.gain,
            explained=None if one.scores is None else math.fsum(one.scores.values.tolist()),
            status=None if told is None else status,
            silent=one.silent,
            declined=self.clients_with(one.round, "declined"),
            blamed=tuple(name for name, at in self.blamed.items() if at == one.round),
        )

    @property
    def unfinished(self) -> tuple[int, int] | None:
        """Closed and planned rounds of a run that is not over; None if it is over, or not a run."""
        if self.source.book is None or self.source.planned is None:
            return None
        closed = len(self.source.book.rounds)
        return (closed, self.source.planned) if closed < self.source.planned else None

    @property
    def sliced(self) -> bool:
        """Whether every round names its test samples."""
        return all(one.slice is not None for one in self.measured)

    @property
    def one_slice(self) -> bool:
        """Whether all rounds are known to be measured on the same test samples."""
        return self.sliced and len({one.slice for one in self.measured}) == 1


def _point_digits(points: float) -> int:
    return min(12, max(1, 2 - math.floor(math.log10(points)))) if points else 1


def better_than(total: Scores) -> npt.NDArray[np.bool_] | None:
    compared = total.stderr is not None and total.n <= MOST_COMPARED
    return compare_pairs(total).better if compared else None
