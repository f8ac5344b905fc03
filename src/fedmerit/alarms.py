"""Whether reports can be believed: one rule for terminal, page, statements and decisions.

alpha equals the Shapley value up to third order in the updates, so the contributions of a round add up to
about its gain. Where they do not, or where the measure fell, somebody must look before anybody is paid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedmerit.accumulate import accumulate
from fedmerit.errors import DoubtfulShares
from fedmerit.pots import noise
from fedmerit.scores import alpha
from fedmerit.types import Reports

TOLERANCE = 0.2
"""How far the sum of alpha may lie from the gain, as a part of it, before anybody is warned."""
LEAST, MOST = 0.5, 2.0
"""Between these multiples of the gain money may be paid from reports that do not add up."""
ERRORS = 2.0
"""Standard errors that may be chance."""
BETTER = 0.5
"""Swapped columns are suspected where swapping them back leaves at most this part of the misfit."""

Code = Literal["swapped", "strays", "lower-is-better", "fell", "lower-rose", "renormalised", "unchecked"]

_LOWER = frozenset({
    "rmse", "mse", "mae", "mape", "smape", "msle", "rmsle", "nrmse", "loss", "losses", "logloss", "nll",
    "error", "errors", "err", "perplexity", "ppl", "entropy", "crossentropy", "xent", "deviance",
    "divergence", "residual", "residuals", "wer", "cer", "cost", "risk", "regret",
})  # fmt: skip
_TURNED = frozenset({
    "neg", "negative", "negated", "minus", "inverse", "inverted", "inv", "complement", "reduction",
    "improvement", "skill", "free",
})  # fmt: skip


@dataclass(frozen=True)
class Doubt:
    """One reason to look before paying."""

    code: Code
    title: str  # a sentence without its point, numbers included
    text: str  # what it may come from, what to do
    gross: bool = False  # whether nothing may be paid unless somebody says: despite it

    def __str__(self) -> str:
        return f"{self.title}. {self.text}"


@dataclass(frozen=True)
class Balance:
    """What contributions add up to, against the gain, in the rounds that everybody in the sum reported on."""

    gain: float
    said: float
    swapped: float  # what they would add up to with alone and without swapped
    error: float | None  # what chance explains: two standard errors of everybody, added up; None if unknown
    rounding: float
    fits_swapped: bool  # far better, round by round

    @property
    def strays(self) -> bool:
        """Whether the sum is further from the gain than chance and ``TOLERANCE`` explain."""
        return abs(self.said - self.gain) > max(self._chance, TOLERANCE * abs(self.gain))

    @property
    def gross(self) -> bool:
        """Whether it is, beyond chance, below LEAST or above MOST times the gain, or as if swapped."""
        low, high = sorted((LEAST * self.gain, MOST * self.gain))
        outside = max(low - self.said, self.said - high) > self._chance
        return self.strays and (outside or self.fits_swapped)

    @property
    def _chance(self) -> float:
        return (self.error or 0.0) + self.rounding


def balance(rounds: Sequence[Reports]) -> Balance | None:
    r"""The sum of alpha against the gain; None where no round has a report from everybody in its sum.

    .. math:: \sum_t \sum_i \alpha_t(i) \quad \text{against} \quad \sum_t v(M_t) - v(M_{0,t})

    Members share test samples, so their errors may point the same way: standard errors are added up over
    members, which bounds the error of the sum. Swapping alone and without turns each alpha into the gain less
    alpha; with two members in a sum that keeps the distance from the gain, so there it cannot be seen.

    >>> balance([Reports(empty=0, grand=3, alone=[3, 2, 1], without=[0, 1, 2])])  # doctest: +ELLIPSIS
    Balance(gain=3.0, said=6.0, swapped=3.0, error=None, rounding=..., fits_swapped=True)
    """
    whole = [one for one in rounds if not one.silent]
    if not whole:
        return None
    sums = [math.fsum(alpha(one).raw.tolist()) for one in whole]
    gains = [one.gain for one in whole]
    turned = [one.n * one.gain - said for one, said in zip(whole, sums, strict=True)]
    lost = math.fsum(math.fsum(noise(one).tolist()) for one in whole)
    errors = accumulate(whole).stderr
    misfit, other = (
        math.fsum(abs(said - gain) for said, gain in zip(each, gains, strict=True)) for each in (sums, turned)
    )
    return Balance(
        gain=math.fsum(gains),
        said=math.fsum(sums),
        swapped=math.fsum(turned),
        error=None if errors is None else ERRORS * math.fsum(errors.tolist()),
        rounding=lost,
        fits_swapped=other + lost < BETTER * misfit,
    )


def doubts(rounds: Sequence[Reports], *, game: str | None = None) -> tuple[Doubt, ...]:
    """Every reason to look before these reports are paid from, the gross ones first.

    The rule looks at alpha, whatever score is paid by: what spoils alpha spoils the others too.

    Args:
        rounds: of one utility; at least one.
        game: of the run, where known; only the additive game's contributions add up to the gain.

    >>> doubts([Reports(empty=0, grand=3, alone=[0, 1, 2], without=[3, 2, 1])])
    ()
    >>> [one.code for one in doubts([Reports(empty=0, grand=3, alone=[3, 2, 1], without=[0, 1, 2])])]
    ['swapped']
    """
    found = [*_about_measure(rounds)]
    if game == "renormalised":
        found.append(
            Doubt(
                "renormalised",
                "The game is renormalised, so contributions need not add up to the gain",
                "Nothing can be checked by their sum; pay by the additive game.",
            )
        )
    elif (summed := balance(rounds)) is None:
        found.append(
            Doubt(
                "unchecked",
                "No round has a report from everybody in its sum",
                "So nobody can check whether the contributions add up to the gain.",
            )
        )
    elif summed.strays:
        found.append(_about_sum(summed, all(one.silent == () for one in rounds)))
    return tuple(sorted(found, key=lambda one: not one.gross))


def check_payable(found: Sequence[Doubt], rule: str, *, despite: bool) -> None:
    """Raise DoubtfulShares if a doubt is gross, unless told to go on; "equal" pays by no score."""
    gross = [one for one in found if one.gross]
    if gross and rule != "equal" and not despite:
        raise DoubtfulShares(
            f"nothing is paid: {' '.join(map(str, gross))} "
            "despite_doubts=True pays all the same; the ledger of a run then says so",
            tuple(one.code for one in gross),
        )


def lower_is_better(utility: str | None) -> bool:
    """Whether a utility's name is that of a measure of which less is better, and says of no negation.

    >>> [lower_is_better(name) for name in ("val_rmse", "test-loss", "neg-loss", "-rmse", "1 - error")]
    [True, True, False, False, False]
    """
    name = (utility or "").rpartition(":")[2].strip()
    if re.match(r"1\s*[-\u2212\u2013/]", name) or re.search(r"(?<![\w\s])[-\u2212\u2013]\s*[A-Za-z]", name):
        return False
    parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return not parts.isdisjoint(_LOWER) and parts.isdisjoint(_TURNED)


def _about_measure(rounds: Sequence[Reports]) -> list[Doubt]:
    gain = math.fsum(one.gain for one in rounds)
    if abs(gain) <= math.fsum(math.fsum(noise(one).tolist()) for one in rounds):
        return []
    utility = rounds[0].utility
    name = "The utility" if utility is None else f"The utility {utility!r}"
    moved = f"{name} {'rose' if gain > 0 else 'fell'} by {abs(gain):.4g}, and higher counts as better"
    negate = "report -x in its place, or 1 - x if it lies in [0, 1]"
    if lower_is_better(utility):
        if gain < 0:
            text = f"By its name lower is better: then all scores are upside down, so {negate}."
            return [Doubt("lower-is-better", moved, text, gross=True)]
        text = (
            "By its name lower is better: then the model got worse and all scores are upside down, so "
            f"{negate}. If it is negated already, let its name say so (neg-...)."
        )
        return [Doubt("lower-rose", moved, text)]
    if gain > 0:
        return []
    text = f"Either the model got worse, or lower is better in this measure: then {negate}."
    return [Doubt("fell", moved, text)]


def _about_sum(summed: Balance, everywhere: bool) -> Doubt:
    where = "" if everywhere else " in the rounds that everybody reported on"
    title = f"The contributions add up to {summed.said:+.4g}, but the model gained {summed.gain:+.4g}{where}"
    part = f"That is {summed.said / summed.gain:.0%} of the gain; " if summed.gain > 0 else ""
    chance = "no standard errors were reported, so none of the difference is taken for chance."
    if summed.error is not None:
        chance = f"standard errors explain at most {summed.error:.4g} of the difference."
    text = part + chance if part else chance[0].upper() + chance[1:]
    if summed.fits_swapped:
        text += (
            f" With alone and without swapped they would add up to {summed.swapped:+.4g}: "
            "the two columns are probably swapped."
        )
        return Doubt("swapped", title, text, gross=True)
    text += (
        " Likely causes: a wrong or missing report, a measure that jumps or has no bound (accuracy, Brier, "
        "cross-entropy), long local training, or another game than the additive one."
    )
    return Doubt("strays", title, text, gross=summed.gross)
