"""What the page says in sentences. They state findings, name who, and never more than the facts allow."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence

from fedmerit.accumulate import NO_SCORE
from fedmerit.federation.unscored import in_words
from fedmerit.page.facts import Facts
from fedmerit.page.notes import gaps_known
from fedmerit.rewards import null_share
from fedmerit.sentences import listed as listed
from fedmerit.sentences import made_worse
from fedmerit.summary import Standing
from fedmerit.tables import signed, total_text

_COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

UTILITIES = {
    "expected-accuracy": "the probability the model gives to the right answer, averaged over test samples",
    "accuracy": "the part of the test samples for which the model's first answer is right",
    "balanced-accuracy": "accuracy with every class counted alike",
    "brier": "1 less half the squared distance between predicted probabilities and the truth",
    "neg-loss": "minus the cross-entropy loss",
    "dice": "the overlap of predicted and true regions",
}

STATUS = {
    "ok": "in order",
    "reversed": "reversed: it would rank the members the wrong way round",
    "fallback": "fallback: its denominator is zero, a replacement was used",
    "undefined": "undefined: nothing to distribute, split equally",
    "none": "none: somebody in the sum sent no report",
}


def count(number: int) -> str:
    """A small number as a word."""
    return _COUNTS[number] if number < len(_COUNTS) else str(number)


def rounds(number: int) -> str:
    """So many rounds."""
    return "one round" if number == 1 else f"{count(number)} rounds"


def title(facts: Facts) -> str:
    """What the page opens with: what to do about a doubt that withholds the rest, or who contributed what."""
    for doubt in facts.summary.doubts:
        if doubt.withholds:
            return f"{'Do not pay by these numbers' if doubt.gross else 'Look before you pay'}: {doubt.short}"
    return headline(facts)


def headline(facts: Facts) -> str:
    """Who contributed what, in one sentence."""
    standings, n = facts.summary.standings, facts.total.n
    if facts.total.stderr is None:
        return f"{_without_errors(facts)}; how sure that is cannot be said"
    helpful = [one.client for one in standings if one.surely > 0]
    leaders = [one.client for one in standings if one.rank_interval and one.rank_interval[0] == 1]
    harmful = made_worse(standings, 3)
    worse = f"; {harmful}" if harmful else ""
    roster = n + len(facts.unscored)
    if not helpful:
        return "No member is sure to have improved the model" + worse
    if len(leaders) == 1:
        return f"{leaders[0]} contributed most" + worse
    if not set(leaders) <= set(helpful):  # the first is known to have improved the model, not all of these
        if len(leaders) == roster:
            return f"The {count(n)} members cannot be told apart"
        if len(leaders) == n:
            return f"{count(n).capitalize()} of {count(roster)} members reported, and cannot be told apart"
        others = "one other" if len(leaders) == 2 else f"{count(len(leaders) - 1)} others"
        return f"{leaders[0]} stands first, but cannot be told apart from {others}{worse}"
    if len(leaders) == n:
        return f"{_some(n, facts)} contributed, and cannot be told apart"
    if len(leaders) <= 3:
        return f"{listed(leaders)} contributed most, and cannot be told apart{worse}"
    most = " most" if len(helpful) > len(leaders) else ""
    return f"{_some(len(leaders), facts)} contributed{most} and cannot be told apart{worse}"


def _without_errors(facts: Facts) -> str:
    """The headline where nothing is known about errors: no winner where there is none."""
    standings = facts.summary.standings
    leaders = [one.client for one in standings if one.rank == 1]
    if standings[0].total <= 0:
        return "No member improved the model"
    if len(leaders) == 1:
        return f"{leaders[0]} contributed most"
    if len(leaders) == len(standings) or len(leaders) > 3:
        most = "" if len(leaders) == len(standings) else " most, and"
        return f"{_some(len(leaders), facts)} contributed{most} alike"
    return f"{listed(leaders)} contributed most, and alike"


def _all(number: int) -> str:
    return "Both" if number == 2 else f"All {count(number)}"


def _some(number: int, facts: Facts) -> str:
    """So many of those that could be measured: nothing is said against who sent no report."""
    n = facts.total.n
    which = "members that reported" if facts.unscored else "members"
    if number == n:
        return f"{_all(n)} {which}"
    the = "the " if facts.unscored else ""
    return f"{count(number).capitalize()} of {the}{count(n)} {which}"


def lede(facts: Facts) -> list[str]:
    """The finding in a few sentences, numbers included."""
    said = [_change(facts), *map(sentence, in_words((), facts.source.unreported))]
    if not facts.summary.withheld:
        said += _places(facts)
    if facts.unscored:
        have = "has" if len(facts.unscored) == 1 else "have"
        said.append(f"{listed(facts.unscored)} never reported and {have} no score.")
    turned = {client: one for one in facts.companions for client in one.turned}
    if turned and not facts.summary.withheld:
        which = dict.fromkeys(spoken(one.utility) for one in turned.values())
        said.append(
            f"Not every measure agrees about {listed(list(turned), 3)}: see {listed(list(which))} in part 4."
        )
    return said


def _places(facts: Facts) -> list[str]:
    """Who stands first, and who last."""
    total, said = facts.total, []
    standings = facts.summary.standings
    best, worst = standings[0], standings[-1]
    first = [one for one in standings if one.rank == best.rank]
    if len(first) == len(standings) > 1:
        said.append(f"{_all(total.n)} stand alike with {total_text(best)}.")
    else:
        said.append(_place(first, "first", total.n))
        if worst.client in facts.summary.suspects:
            said.append(
                f"{worst.client} stands last with {total_text(worst)}, significantly below everybody else: "
                "worth a conversation."
            )
        elif worst is not best:
            said.append(_place([one for one in standings if one.rank == worst.rank], "last", total.n))
    return said


def _change(facts: Facts) -> str:
    """How the shared model changed, in numbers that agree with each other."""
    total, reports, digits = facts.total, facts.source.rounds, facts.level_digits
    span = _span(facts)
    measure = f"the {spoken(facts.utility) if defined(facts) else facts.utility} of the shared model"
    moved = "rose" if total.gain > 0 else "fell" if total.gain < 0 else "stayed the same"
    change = "" if total.gain == 0 else f" by {abs(total.gain):.{digits}f}"
    if facts.one_slice:
        low, high = reports[0].empty, reports[-1].grand
        ends = f"from {low:.{digits}f} to {high:.{digits}f}"
        if abs((high - low) - total.gain) > 1e-6 * max(abs(low), abs(high), abs(total.gain)):
            if gaps_known(facts):
                part = f"{signed(total.gain, digits)} of that came in rounds with reports"
                return f"{span} {measure} went {ends}; {part}."
            return (
                f"{span} {measure} went {ends}, but the gains of the rounds add up to "
                f"{signed(total.gain, digits)}: the rounds do not join up."
            )
        change += f", {ends}"
    return f"{span} {measure} {moved}{change}."


def _span(facts: Facts) -> str:
    """Which rounds the change covers."""
    number, last = facts.total.rounds, facts.source.rounds[-1].round
    if facts.unfinished:
        closed, planned = facts.unfinished
        return f"After {closed} of {planned} rounds (the run is not over)"
    if facts.source.unreported and facts.one_slice and last is not None:
        return f"By round {last}"
    if number == 1:
        return "In one round"
    return f"Over {rounds(number)}" + (" with reports" if facts.source.unreported else "")


def _place(equals: Sequence[Standing], where: str, n: int) -> str:
    one = equals[0]
    if len(equals) > 1:
        return f"{listed([each.client for each in equals])} share the {where} place with {total_text(one)}."
    sentence = f"{one.client} stands {where} with {total_text(one)}"
    if one.rank_interval is None or one.rank_interval[0] == one.rank_interval[1]:
        return sentence + "."
    low, high = one.rank_interval
    return sentence + f", and may rank anywhere from {low} to {high} of {n}."


def how_sure(facts: Facts) -> str:
    """What the plus-minus covers and what it does not."""
    if facts.total.stderr is None:
        return "No standard errors were reported, so how sure this is cannot be said."
    return (
        "± and the whiskers are 95 % intervals for the sampling error of the test set in this run, each for "
        "one member alone. Ranks, who can be told apart, and who is said to have improved the model or made "
        "it worse: that holds with 95 % for all members at once. "
        "Training again would move the numbers too, and no single run can say by how much."
    )


def together(facts: Facts) -> str:
    """Who cannot be told apart."""
    if facts.total.stderr is None:
        return ""
    groups = [group for group in facts.summary.groups if len(group) > 1]
    if not groups:
        return "Every member can be told apart from every other."
    if len(groups) == 1:
        return f"The test cannot tell {listed(groups[0], 12)} apart."
    lettered = zip(string.ascii_lowercase, facts.summary.groups, strict=False)
    each = [f"{letter}) {listed(group, 12)}" for letter, group in lettered if len(group) > 1]
    return "Inside each of these groups the test cannot tell members apart: " + "; ".join(each) + "."


def built_up(facts: Facts) -> str:
    """When the gain was made."""
    reports, gain = facts.source.rounds, facts.total.gain
    if gain <= 0 or len(reports) < 3:
        which = "The rounds with reports" if facts.source.unreported else "The rounds"
        return f"{which} changed the shared model by {signed(gain, facts.level_digits)} in all."
    sums = list(itertools.accumulate(one.gain for one in reports))
    place = next(k for k, so_far in enumerate(sums, start=1) if so_far >= gain / 2 or k == len(sums))
    first = "The first round" if place == 1 else f"The first {count(place)} rounds"
    part = f"{sums[place - 1] / gain:.0%}"
    of = f"{count(len(reports))} with reports" if facts.source.unreported else count(len(reports))
    gained = "the gain in rounds with reports" if facts.source.unreported else "the whole gain"
    return f"{first} of {of} brought {part} of {gained}. Who is away then misses most."


def away(facts: Facts) -> list[str]:
    """Who was away, and what it cost."""
    if not facts.absences:
        return ["Nobody missed a round."]
    said = []
    for one in facts.absences:
        which = listed([str(number) for number in one.rounds], 12)
        missed = f"{one.client} has no report in round{'s' if len(one.rounds) > 1 else ''} {which}"
        if one.at_own_mean is None:
            said.append(f"{missed}, that is none at all: {NO_SCORE}.")
        elif facts.source.missing == "zero":
            own = signed(one.at_own_mean, facts.summary.digits)
            said.append(f"{missed}. That counts as zero; at its own mean it would have counted {own}.")
        else:
            own = signed(one.at_own_mean, facts.summary.digits)
            said.append(f"{missed}. That counts at its own mean, {own} in all.")
    return said


def noise_share(facts: Facts) -> str:
    """What a member without any contribution could expect from luck."""
    terms = facts.terms
    nothing = null_share(facts.payable)
    if nothing is None or (terms.floor, terms.cap) != (0.0, 1.0):
        return ""
    return (
        f"From noise alone, a member that contributed nothing could expect {nothing:.2%} under the rule fair."
    )


def defined(facts: Facts) -> bool:
    """Whether the utility is what its name means here: a file may hold a Brier score that falls."""
    return facts.utility != "brier" or facts.source.settings is not None


def spoken(utility: str | None) -> str:
    """A utility's name in a sentence."""
    return {"brier": "1 - Brier/2", None: "utility"}.get(utility) or str(utility).replace("-", " ")


def sentence(text: str) -> str:
    """A note as a sentence.

    >>> sentence("round 4 was aborted")
    'Round 4 was aborted.'
    """
    return f"{text[:1].upper()}{text[1:]}."
