"""Whether reports can be believed: one rule for the terminal, the page, the statements and decisions.

alpha equals the Shapley value up to third order in the updates, so the contributions of a round add up to
about its gain. If they do not, or if the measure fell, somebody must look before anybody is paid. The texts
name no member, because statements and pages under pseudonyms repeat them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from fedmerit.errors import DoubtfulShares
from fedmerit.notes import Note, words
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.metrics import is_whole
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
ROUNDS = 3
"""The fewest rounds that tell whose columns are swapped: in one or two, others may fit as well by chance."""

Code = Literal[
    "swapped",
    "strays",
    "lower-is-better",
    "fell",
    "lower-rose",
    "renormalised",
    "unchecked",
    "whole",
    "chance",
]

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
    "auc", "f1", "c-index", "rmse-skill", "mae-skill",
})  # fmt: skip
"""Utilities whose name says that more is better. "brier" does not: in most books, less is better."""


@dataclass(frozen=True)
class Doubt:
    """A reason to look at the reports before paying."""

    code: Code
    title: str  # a sentence without its full stop, with numbers
    text: str  # likely causes and what to do
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
    """The sum of the contributions against the gain, in the rounds on which every summed member reported.

    If ``partial``, it covers all rounds, and in each the members who reported.
    """

    gain: float
    said: float
    swapped: float  # the sum if alone and without were swapped
    error: float | None  # what chance explains: two standard errors per member, added up; None if unknown
    rounding: float
    fits_swapped: bool  # swapped, the rounds fit far better, one by one
    partial: bool = False

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

        A partial sum is gross only if it looks swapped: in honest runs, a silent saboteur left the others
        with four times the gain.
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

    Members share test samples, so their errors may point the same way. Standard errors are therefore added up
    over members, which bounds the error of the sum. Swapping alone and without turns each alpha into the gain
    minus alpha. With two members this keeps the distance from the gain, so the swap cannot be seen.

    Args:
        rounds: reports of one utility.
        partial: use all rounds, and in each the members who reported. What silent members added is unknown,
            so in a round that has some, any sum from 0 to the gain fits.

    >>> balance([Reports(empty=0, grand=3, alone=[3, 2, 1], without=[0, 1, 2])])  # doctest: +ELLIPSIS
    Balance(gain=3.0, said=6.0, swapped=3.0, error=None, rounding=..., fits_swapped=True, partial=False)
    """
    taken = [one for one in rounds if partial or not one.silent]
    if not taken:
        return None
    sums = [math.fsum(alpha(one).raw.tolist()) for one in taken]
    gains = [one.gain for one in taken]
    turned = [one.n * one.gain - said for one, said in zip(taken, sums, strict=True)]
    lost = _rounding(taken)
    misfit, other = (
        math.fsum(_off(one, said) for one, said in zip(taken, each, strict=True)) for each in (sums, turned)
    )
    return Balance(
        gain=math.fsum(gains),
        said=math.fsum(sums),
        swapped=math.fsum(turned),
        error=_chance(taken),
        rounding=lost,
        fits_swapped=other + lost < BETTER * misfit,
        partial=partial,
    )


def _off(one: Reports, said: float) -> float:
    """Return how far a sum lies from the gain; with silent members, from the range from 0 to the gain."""
    if not one.silent:
        return abs(said - one.gain)
    return max(min(0.0, one.gain) - said, said - max(0.0, one.gain), 0.0)


def _chance(rounds: Sequence[Reports]) -> float | None:
    """Return two standard errors per member, added up; None if a report carries none."""
    errors = accumulate(rounds).stderr
    return None if errors is None else ERRORS * math.fsum(errors.tolist())


def _rounding(rounds: Sequence[Reports]) -> float:
    return math.fsum(math.fsum(noise(one).tolist()) for one in rounds)


def doubts(
    rounds: Sequence[Reports], *, game: str | None = None, metrics: Collection[str] = ()
) -> tuple[Doubt, ...]:
    """Return every reason to look before anybody is paid from these reports, the gross ones first.

    The rule looks at alpha, whichever score decides the payment: what spoils alpha spoils the others too.

    Args:
        rounds: at least one, all of one utility.
        game: game of the run, if known; only in the additive game do contributions add up to the gain.
        metrics: the utilities of the run that are metrics of the whole test set, besides those known by name.

    >>> doubts([Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])])
    ()
    >>> [one.code for one in doubts([Reports(empty=0, grand=3, alone=[3, 2, 1], without=[0, 1, 2])])]
    ['swapped']
    """
    found: list[Doubt] = []
    if game == "renormalised":
        found.append(
            Doubt(
                "renormalised",
                words("doubt.renormalised-title"),
                words("doubt.renormalised-text"),
                words("doubt.renormalised-short"),
            )
        )
    else:
        whole = balance(rounds)
        reported = balance(rounds, partial=True) if any(one.silent for one in rounds) else None
        for summed in (whole, reported):
            if summed is not None and summed.strays and not found:
                about = _about_sum(summed, rounds)
                if about.code == "strays" and not is_whole(rounds[0].utility, metrics):
                    about = _about_member(about, summed, rounds)
                elif about.code == "strays":
                    text, short = words("doubt.whole", utility=rounds[0].utility), words("doubt.whole-short")
                    about = Doubt("whole", about.title, text, short)
                found.append(about)
        if whole is None and not found:
            found.append(
                Doubt(
                    "unchecked",
                    words("doubt.unchecked-title"),
                    words("doubt.unchecked-text"),
                    words("doubt.unchecked-short"),
                )
            )
    found += _about_measure(rounds, engine=game is not None)
    if not any(one.gross for one in found) and (by_chance := at_chance(accumulate(rounds))):
        found.append(by_chance)
    return tuple(sorted(found, key=lambda one: (not one.gross, _FIRST.get(one.code, 2))))


_FIRST = {"swapped": 0, "lower-is-better": 1, "fell": 1}
"""Order among equally grave doubts: those that explain others come first."""


def at_chance(total: Scores) -> Doubt | None:
    r"""Return that the gain is within what chance explains; None if it is beyond that, or nobody knows.

    .. math:: v(M) - v(M_0) \le 2 \, \mathrm{error}

    with the error of test set and training together (`gain_error`). What nobody gained cannot be divided by
    who gained it.

    >>> from fedmerit.scoring.types import RoundScatter
    >>> s = Scores(score="PHI", clients=("A", "B"), values=[.1, .1], raw=[.1, .1], gain=.2, stderr=[.03, .03])
    >>> at_chance(s), at_chance(replace(s, training=RoundScatter(scatter=0.1, freedom=4))).code
    (None, 'chance')
    """
    error = gain_error(total)
    if error is None or total.gain > ERRORS * error:
        return None
    title = words("doubt.chance-title", gain=total.gain, error=ERRORS * error)
    return Doubt("chance", title, words("doubt.chance-text"), words("doubt.chance-short"), gross=True)


def check_payable(found: Sequence[Doubt], rule: str, *, despite: bool) -> None:
    """Raise DoubtfulShares if a doubt is gross, unless ``despite``; not for "equal", which uses no score."""
    gross = [one for one in found if one.gross]
    if gross and rule != "equal" and not despite:
        note = Note("doubted", doubts=tuple(one.told for one in gross))
        raise DoubtfulShares(note, tuple(one.code for one in gross))


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

    Nobody reports the error of the gain. The contributions add up to about the gain, so the bound on the
    error of their sum is used in its place, scaled up for silent members.
    """
    gain = math.fsum(one.gain for one in rounds)
    rounding = _rounding(rounds)
    if abs(gain) <= rounding:
        return []
    utility = rounds[0].utility
    name = words("doubt.the-utility")
    if utility is not None:
        name = words("doubt.the-utility-named", utility=utility)
    code = "doubt.measure-rose" if gain > 0 else "doubt.measure-fell"
    moved = words(code, measure=name, change=abs(gain))
    if lower_is_better(utility):
        if gain < 0:
            short = words("doubt.measure-fell-short")
            return [Doubt("lower-is-better", moved, words("doubt.lower-fell"), short, gross=True)]
        return [Doubt("lower-rose", moved, words("doubt.lower-rose"), words("doubt.lower-rose-short"))]
    chance = _chance(rounds) or 0.0
    everybody = max((one.n + len(one.silent)) / one.n for one in rounds)
    if gain > 0 or -gain <= everybody * chance + rounding:
        return []
    if utility in _RISING or (utility == "brier" and engine):
        text = words("doubt.fell-exchanged" if _joins(rounds) == "empty and grand" else "doubt.fell")
        return [Doubt("fell", moved, text, words("doubt.model-worse-short"), gross=True)]
    return [Doubt("fell", moved, words("doubt.fell-unknown"), words("doubt.measure-fell-short"), gross=True)]


def _joins(rounds: Sequence[Reports]) -> str:
    """Return which pair of columns must be swapped, judging by how rounds join up; "" if that does not tell.

    A round begins with the utility that the one before ended with. If the rounds join up only with empty and
    grand exchanged, these two are swapped; if they join up only as given, alone and without are.
    """

    def join_up(given: Sequence[Reports]) -> bool:
        pairs = [(before.grand, after.empty) for before, after in pairwise(given)]
        return bool(pairs) and all(abs(a - b) <= 1e-6 * max(abs(a), abs(b)) for a, b in pairs)

    as_given = join_up(rounds)
    if as_given == join_up([replace(one, empty=one.grand, grand=one.empty) for one in rounds]):
        return ""
    return "alone and without" if as_given else "empty and grand"


def _about_sum(summed: Balance, rounds: Sequence[Reports]) -> Doubt:
    code = "doubt.sum"
    if summed.partial:
        code = "doubt.sum-partial"
    elif any(one.silent for one in rounds):
        code = "doubt.sum-where"
    title = words(code, said=summed.said, gain=summed.gain)
    text = [words("doubt.part", part=summed.said / summed.gain)] if summed.gain > 0 else []
    if summed.error is None:
        text.append(words("doubt.chance-unknown"))
    else:
        text.append(words("doubt.chance", error=summed.error))
    if summed.partial:
        text.append(words("doubt.silent", excess=summed.said - summed.gain))
    if summed.fits_swapped:
        told = " ".join([*text, _which(summed, rounds)])
        return Doubt("swapped", title, told, words("doubt.swapped-short"), gross=True)
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
    experiments/results raises this suspicion, in any utility; docs/choosing.md says how much that shows.
    """
    if len(rounds) < ROUNDS:
        return None
    misfit, lost = 0.0, _rounding(rounds)
    changes: dict[str, dict[int, float]] = {}
    offs = []
    for place, one in enumerate(rounds):
        found = alpha(one).as_dict()
        offs.append(math.fsum(found.values()) - one.gain)
        misfit += abs(offs[-1])
        for name, value in found.items():
            changes.setdefault(name, {})[place] = one.gain - 2 * value
    left = sorted(
        (math.fsum(abs(off + own.get(place, 0.0)) for place, off in enumerate(offs)) + lost, name)
        for name, own in changes.items()
    )
    if len(left) < 2 or left[0][0] >= BETTER * min(misfit, left[1][0]):
        return None
    return left[0][1]


def _about_member(about: Doubt, summed: Balance, rounds: Sequence[Reports]) -> Doubt:
    """Return the doubt about a sum, with the suspicion that one member's columns are swapped, if they are."""
    name = None if summed.partial else swapped_member([one for one in rounds if not one.silent])
    if name is None:
        return about
    text = f"{about.text} {words('doubt.swapped-one')}"
    named = words("doubt.swapped-named", client=name)
    return Doubt("swapped", about.title, text, words("doubt.swapped-short"), gross=True, named=named)


def _which(summed: Balance, rounds: Sequence[Reports]) -> str:
    """Say which columns are swapped; the sums alone do not tell, as both swaps change them alike."""
    found = _joins(rounds) or ("" if summed.gain < 0 else "alone and without")
    if found == "empty and grand":
        return words("doubt.swapped-ends")
    if found:
        return words("doubt.swapped-alone", swapped=summed.swapped)
    exchanged, gain = -summed.swapped, -summed.gain
    return words("doubt.swapped-either", swapped=summed.swapped, exchanged=exchanged, gain=gain)
