"""Whether reports can be believed: one rule for the terminal, the page, the statements and decisions.

alpha equals the Shapley value up to third order in the updates, so the contributions of a round add up to
about its gain. If they do not, or if the measure fell, somebody must look before anybody is paid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from fedmerit.errors import DoubtfulShares
from fedmerit.notes import Note, words
from fedmerit.scoring.accumulate import accumulate, joins
from fedmerit.scoring.sampling import is_whole, scale_of
from fedmerit.scoring.scores import alpha, noise
from fedmerit.scoring.types import Reports, Scores
from fedmerit.scoring.uncertainty import gain_error

TOLERANCE = 0.2
"""How far the sum of alpha may lie from the gain, as a fraction of the gain, without a warning."""
LEAST, MOST = 0.5, 2.0
"""Money may be paid from reports that do not add up if their sum lies between these multiples of the gain."""
ERRORS = 2.0
"""How many standard errors are put down to chance."""
BETTER = 0.5
"""Swapped columns are suspected if swapping them back leaves less than this fraction of the misfit."""
FAR = 0.5
"""Where alone and without are always below this part of v(M0) or v(M), they may be changes of the utility."""
MOST_BY_MEAN = 0.5
"""Most of a gain is for learning the mean of y if a model that always answers it has more than this part."""
ROUNDS = 3
"""The fewest rounds that tell whose columns are swapped: in one or two, others may fit as well by chance."""

Code = Literal[
    "swapped", "changes", "strays", "lower-is-better", "fell", "lower-rose", "renormalised", "unchecked",
    "whole", "chance", "mean",
]  # fmt: skip

_LOWER = frozenset({
    "rmse", "mse", "mae", "mape", "smape", "msle", "rmsle", "nrmse", "loss", "losses", "logloss", "nll",
    "error", "errors", "err", "perplexity", "ppl", "entropy", "crossentropy", "xent", "deviance",
    "divergence", "residual", "residuals", "wer", "cer", "ece", "fid", "hausdorff", "misclassification",
})  # fmt: skip
_LOWER_AT_THE_END = frozenset({"cost", "costs", "risk", "regret", "distance"})
_TURNED = frozenset({
    "neg", "negative", "negated", "minus", "inverse", "inverted", "inv", "complement", "reduction",
    "improvement", "skill", "free", "correction", "savings", "saved", "avoided", "prevented",
})  # fmt: skip
_RISING = frozenset({
    "expected-accuracy", "accuracy", "sharpened-accuracy", "balanced-accuracy", "neg-loss", "dice",
    "auc", "f1", "c-index",
})  # fmt: skip
"""Utilities whose name says that more is better, besides skills. "brier" does not: in most books, less is."""


@dataclass(frozen=True)
class Doubt:
    """A reason to look at the reports before paying."""

    code: Code
    title: str  # a sentence without its full stop, with numbers
    text: str  # likely causes and what to do; like all texts but ``named``, it names no member
    short: str  # the reason in a few words, without numbers
    gross: bool = False  # whether payment needs somebody to say "despite it"
    named: str = ""  # a sentence that names a member, for the coordinator alone

    @property
    def withholds(self) -> bool:
        """Whether somebody must look before these numbers are used to praise or accuse anybody."""
        return self.gross or self.code == "lower-rose"

    @property
    def told(self) -> str:
        """The doubt for the coordinator, with the member whom it names, if any."""
        return " ".join(filter(None, (str(self), self.named)))

    def __str__(self) -> str:
        return f"{self.title}. {self.text}"


@dataclass(frozen=True)
class Balance:
    """The sum of the contributions against the gain, see `balance`."""

    gain: float
    said: float
    swapped: float  # the sum if alone and without were swapped
    error: float | None  # what chance explains: two standard errors per member, added up; None if unknown
    rounding: float
    fits_swapped: bool  # swapped, the rounds fit far better, one by one
    partial: bool = False  # whether it covers all rounds, and in each the members who reported

    @property
    def strays(self) -> bool:
        """Whether the sum is further from the gain than chance and ``TOLERANCE`` explain.

        A partial sum may be any part of the gain, so it strays only above ``MOST`` times the gain.
        """
        if self.partial:
            return self._above > self._chance
        return abs(self.said - self.gain) > max(self._chance, TOLERANCE * abs(self.gain))

    @property
    def gross(self) -> bool:
        """Whether the sum is below LEAST or above MOST times the gain, beyond chance, or looks swapped.

        A partial sum must look swapped: in honest runs, a silent saboteur left the others 4 times the gain.
        """
        below = min(LEAST * self.gain, MOST * self.gain) - self.said
        outside = not self.partial and max(below, self._above) > self._chance
        return self.strays and (outside or self.fits_swapped)

    @property
    def _above(self) -> float:
        return self.said - max(LEAST * self.gain, MOST * self.gain)

    @property
    def _chance(self) -> float:
        return (self.error or 0.0) + self.rounding


def balance(rounds: Sequence[Reports], *, partial: bool = False) -> Balance | None:
    r"""Compare the sum of alpha with the gain; None if no round has a report from every summed member.

    .. math:: \sum_t \sum_i \alpha_t(i) \quad \text{against} \quad \sum_t v(M_t) - v(M_{0,t})

    Members share test samples, so their standard errors are added up, which bounds the error of the sum.
    Swapping alone and without turns each alpha into the gain minus alpha. With two members this keeps the
    distance from the gain, so the swap cannot be seen.

    If ``partial``, all rounds count, and in each the members who reported. What silent members added is
    unknown, so in a round that has some, any sum from 0 to the gain fits.
    """
    taken = [reports for reports in rounds if partial or not reports.silent]
    if not taken:
        return None
    sums = [math.fsum(alpha(reports).raw.tolist()) for reports in taken]
    turned = [reports.n * reports.gain - total for reports, total in zip(taken, sums, strict=True)]
    rounding = _rounding(taken)
    misfit, turned_misfit = (math.fsum(map(_off, taken, totals)) for totals in (sums, turned))
    return Balance(
        gain=math.fsum(reports.gain for reports in taken), said=math.fsum(sums), swapped=math.fsum(turned),
        error=_chance(taken), rounding=rounding, partial=partial,
        fits_swapped=turned_misfit + rounding < BETTER * misfit,
    )  # fmt: skip


def _off(reports: Reports, total: float) -> float:
    """Return how far a sum lies from the gain; with silent members, from the range from 0 to the gain."""
    ends = (0.0 if reports.silent else reports.gain, reports.gain)
    return max(min(ends) - total, total - max(ends), 0.0)


def _chance(rounds: Sequence[Reports]) -> float | None:
    """Return two standard errors per member, added up; None if a report carries none."""
    errors = accumulate(rounds).stderr
    return None if errors is None else ERRORS * math.fsum(errors.tolist())


def _rounding(rounds: Sequence[Reports]) -> float:
    return math.fsum(math.fsum(noise(reports).tolist()) for reports in rounds)


def doubts(rounds: Sequence[Reports], *, game: str | None = None) -> tuple[Doubt, ...]:
    """Return every reason to look before anybody is paid from these reports, the gross ones first.

    The rule looks at alpha, whichever score decides the payment: what spoils alpha spoils the others too.

    Args:
        rounds: at least one, all of one utility.
        game: game of the run, if known; only in the additive game do contributions add up to the gain.

    >>> doubts([Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])])
    ()
    >>> [doubt.code for doubt in doubts([Reports(empty=0, grand=3, alone=[3, 2, 1], without=[0, 1, 2])])]
    ['swapped']
    """
    if _are_changes(rounds):
        return (_doubt("changes", gross=True),)
    reasons = [_doubt("renormalised")] if game == "renormalised" else _about_sums(rounds)
    reasons += _about_measure(rounds, engine=game is not None)
    if not any(doubt.gross for doubt in reasons) and (by_chance := at_chance(accumulate(rounds))):
        reasons.append(by_chance)
    return tuple(sorted(reasons, key=lambda doubt: (not doubt.gross, _FIRST.get(doubt.code, 2))))


def _are_changes(rounds: Sequence[Reports]) -> bool:
    """Whether alone and without look like changes of the utility: far below it, and as such they add up."""
    for reports in rounds:
        if max(abs(v) for v in (*reports.alone, *reports.without)) >= FAR * max(reports.empty, reports.grand):
            return False
    as_changes = [math.fsum((*reports.alone, *reports.without)) / 2 for reports in rounds]
    as_given = [math.fsum(alpha(reports).raw.tolist()) for reports in rounds]
    near, far = (math.fsum(map(_off, rounds, totals)) for totals in (as_changes, as_given))
    return near + _rounding(rounds) < BETTER * far


def _doubt(code: Code, *, gross: bool = False, **values: float) -> Doubt:
    title, text, short = (f"doubt-of.{code}-{part}" for part in ("title", "text", "short"))
    return Doubt(code, words(title, **values), words(text), words(short), gross)


def _about_sums(rounds: Sequence[Reports]) -> list[Doubt]:
    """Return the doubt that the sum of the contributions raises, if any."""
    complete = [reports for reports in rounds if not reports.silent]
    whole = balance(rounds)
    reported = balance(rounds, partial=True) if len(complete) < len(rounds) else None
    for summed in (whole, reported):
        if summed is None or not summed.strays:
            continue
        doubt = _about_sum(summed, rounds)
        if doubt.code == "strays" and is_whole(rounds[0].utility):
            text = words("doubt.whole", utility=rounds[0].utility)
            return [Doubt("whole", doubt.title, text, words("doubt.whole-short"))]
        if doubt.code == "strays" and not summed.partial and (name := swapped_member(complete)):
            text, short = f"{doubt.text} {words('doubt.swapped-one')}", words("doubt.swapped-short")
            named = words("doubt.swapped-named", client=name)
            return [Doubt("swapped", doubt.title, text, short, gross=True, named=named)]
        return [doubt]
    return [_doubt("unchecked")] if whole is None else []


_FIRST = {"swapped": 0, "lower-is-better": 1, "fell": 1}
"""Order among equally grave doubts: those that explain others come first."""


def at_chance(total: Scores) -> Doubt | None:
    r"""Return that the gain is within what chance explains; None if it is beyond that, or nobody knows.

    .. math:: v(M) - v(M_0) \le 2 \, \mathrm{error}

    with the error of test set and training together (`gain_error`). What nobody gained cannot be divided by
    who gained it.
    """
    error = gain_error(total)
    if error is None or total.gain > ERRORS * error:
        return None
    return _doubt("chance", gross=True, gain=total.gain, error=ERRORS * error)


def by_mean(first: float, gain: float, constant: float | None) -> Doubt | None:
    """Return that most of the gain is for learning the mean of y; None if it is not, or nobody knows.

    Args:
        first: the utility of the first model.
        gain: of the whole run.
        constant: the utility of a model that always answers the mean of y; None where nobody knows it.
    """
    if constant is None or not constant - first > MOST_BY_MEAN * gain > 0:
        return None
    return _doubt("mean", first=first, constant=constant, gain=gain)


def check_payable(reasons: Sequence[Doubt], rule: str, *, despite: bool) -> None:
    """Raise DoubtfulShares if a doubt is gross, unless ``despite``; not for "equal", which uses no score."""
    gross = [doubt for doubt in reasons if doubt.gross]
    if gross and rule != "equal" and not despite:
        note = Note("doubted", doubts=tuple(doubt.told for doubt in gross))
        raise DoubtfulShares(note, tuple(doubt.code for doubt in gross))


def lower_is_better(utility: str | None) -> bool:
    """Return whether the name is that of a measure where less is better, and does not say it is negated.

    >>> [lower_is_better(name) for name in ("val_rmse", "test-loss", "neg-loss", "-rmse", "1 - error")]
    [True, True, False, False, False]
    >>> [lower_is_better(name) for name in ("hospital risk", "hospital risk score")]
    [True, False]
    """
    name = (utility or "").rpartition(":")[2].strip()
    if re.match(r"1\s*[-\u2212\u2013/]", name) or re.search(r"(?<![\w\s])[-\u2212\u2013]\s*[A-Za-z]", name):
        return False
    parts = [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    lower = not _LOWER.isdisjoint(parts) or not _LOWER_AT_THE_END.isdisjoint(parts[-1:])
    return lower and _TURNED.isdisjoint(parts)


def _about_measure(rounds: Sequence[Reports], *, engine: bool) -> list[Doubt]:
    """Return the doubts that the change of the utility raises; ``engine``: a fedmerit run measured it.

    Nobody reports the error of the gain. The bound on the error of the sum of contributions, which is about
    the gain, is used in its place, scaled up for silent members.
    """
    gain = math.fsum(reports.gain for reports in rounds)
    rounding = _rounding(rounds)
    if abs(gain) <= rounding:
        return []
    utility, fell = rounds[0].utility, words("doubt.measure-fell-short")
    measure = words("doubt.the-utility")
    if utility is not None:
        measure = words("doubt.the-utility-named", utility=utility)
    code = "doubt.measure-rose" if gain > 0 else "doubt.measure-fell"
    moved = words(code, measure=measure, change=abs(gain))
    if lower_is_better(utility):
        if gain < 0:
            return [Doubt("lower-is-better", moved, words("doubt.lower-fell"), fell, gross=True)]
        return [Doubt("lower-rose", moved, words("doubt.lower-rose"), words("doubt.lower-rose-short"))]
    chance = _chance(rounds) or 0.0
    everybody = max((reports.n + len(reports.silent)) / reports.n for reports in rounds)
    if gain > 0 or -gain <= everybody * chance + rounding:
        return []
    if utility in _RISING or scale_of(utility) is not None or (utility == "brier" and engine):
        text = words("doubt.fell-exchanged" if _swapped_pair(rounds) == "empty and grand" else "doubt.fell")
        return [Doubt("fell", moved, text, words("doubt.model-worse-short"), gross=True)]
    return [Doubt("fell", moved, words("doubt.fell-unknown"), fell, gross=True)]


def _swapped_pair(rounds: Sequence[Reports]) -> str:
    """Return which pair of columns must be swapped, judging by how rounds join up; "" if that does not tell.

    A round begins with the utility that the one before ended with. If the rounds join up only with empty and
    grand exchanged, these two are swapped; if they join up only as given, alone and without are.
    """
    as_given = all(joins(before.grand, after.empty) for before, after in pairwise(rounds))
    if as_given == all(joins(before.empty, after.grand) for before, after in pairwise(rounds)):
        return ""
    return "alone and without" if as_given else "empty and grand"


def _about_sum(summed: Balance, rounds: Sequence[Reports]) -> Doubt:
    code = "doubt.sum"
    if summed.partial:
        code = "doubt.sum-partial"
    elif any(reports.silent for reports in rounds):
        code = "doubt.sum-where"
    title = words(code, said=summed.said, gain=summed.gain)
    text = [words("doubt.part", part=summed.said / summed.gain)] if summed.gain > 0 else []
    known = summed.error is not None
    text.append(words("doubt.chance", error=summed.error) if known else words("doubt.chance-unknown"))
    if summed.partial:
        text.append(words("doubt.silent", excess=summed.said - summed.gain))
    if summed.fits_swapped:
        text.append(_which(summed, rounds))
        return Doubt("swapped", title, " ".join(text), words("doubt.swapped-short"), gross=True)
    if summed.partial:
        return Doubt("strays", title, " ".join(text), words("doubt.exceed-short"))
    text.append(words("doubt.causes"))
    return Doubt("strays", title, " ".join(text), words("doubt.strays-short"), gross=summed.gross)


def swapped_member(rounds: Sequence[Reports]) -> str | None:
    r"""Return the member whose columns alone and without are probably swapped, if it is only one.

    Swapping them back turns the member's alpha into the gain minus alpha, and so the misfit of a round into

    .. math:: \sum_j \alpha_t(j) - g_t + g_t - 2 \alpha_t(i)

    It is suspected if this leaves less than ``BETTER`` of the sum of all misfits, and less than ``BETTER`` of
    what swapping any other member's columns leaves, over at least ``ROUNDS`` rounds. No honest run in
    experiments/results raises this suspicion (docs/choosing.md).
    """
    if len(rounds) < ROUNDS:
        return None
    by_round = [alpha(reports).as_dict() for reports in rounds]
    misfits = [math.fsum(a.values()) - reports.gain for reports, a in zip(rounds, by_round, strict=True)]
    rest = dict.fromkeys((name for a in by_round for name in a), _rounding(rounds))
    for name in rest:
        for reports, a, misfit in zip(rounds, by_round, misfits, strict=True):
            rest[name] += abs(misfit + (reports.gain - 2 * a[name] if name in a else 0.0))
    ranked = sorted(rest, key=lambda name: (rest[name], name))
    if len(ranked) < 2 or rest[ranked[0]] >= BETTER * min(math.fsum(map(abs, misfits)), rest[ranked[1]]):
        return None
    return ranked[0]


def _which(summed: Balance, rounds: Sequence[Reports]) -> str:
    """Say which columns are swapped; the sums alone do not tell, as both swaps change them alike."""
    pair = _swapped_pair(rounds) or ("" if summed.gain < 0 else "alone and without")
    if pair == "empty and grand":
        return words("doubt.swapped-ends")
    if pair == "alone and without":
        return words("doubt.swapped-alone", swapped=summed.swapped)
    return words("doubt.swapped-either", swapped=summed.swapped, exchanged=-summed.swapped, gain=-summed.gain)
