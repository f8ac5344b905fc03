"""The sentences of the page. They state findings, name members, and claim no more than the facts allow."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise

from fedmerit.ledger.decisions import Terms
from fedmerit.ledger.records import in_words
from fedmerit.notes import APART, NO_SCORE, Note, code_of, made_worse
from fedmerit.notes import listed as listed
from fedmerit.report.page.facts import Decided, Facts
from fedmerit.report.terminal import COMMAND, OPTION, Standing, signed, total_text
from fedmerit.scoring.accumulate import join_up, number_of
from fedmerit.scoring.rewards import null_share
from fedmerit.scoring.scores import NORMALISED

# --------------------------------------------------------------------------------------------------- notes

PAGE = {
    **COMMAND,
    "no-cosine": "{where}member {client!r} has no cosine (a zero or unknown update): it counts as 0",
    "spelled-alike": "members {client!r} and {other!r} " + APART,
    "composed-alike": "members {client!a} and {other!a} " + APART,
    "partly-zero": "member {client!r} reported {seen} of {rounds} rounds; the rest counts as zero",
    "partly-own-mean": (
        "member {client!r} reported {seen} of {rounds} rounds; the rest counts at its own mean"
    ),
    "never-reported": "member {client!r} was in the sum but never reported: " + NO_SCORE,
    "only-listed": "member {client!r} is on the list of members but never reported: " + NO_SCORE,
    "silent": "member {client!r} was summed but sent no report: round {rounds}",
    "nothing-positive": "nobody's {score} is above zero, so there is nothing to divide by",
}
"""Words of notes on the page, where its readers need other words than the library's."""
_CALLED = {"score": {"ALPHA": "contribution"}}
_GAPS = ("gap", "jump")
"""Codes of notes about rounds that do not start where the one before ended."""


def notes(facts: Facts) -> list[str]:
    """Return the notes on the ranking; the status of FP and EE, which rank nobody, is in part 4.

    With pseudonyms no text without a code is shown, because it may name a member.
    """
    known = _GAPS if gaps_known(facts) else ()  # the page opens with them
    told = [one for one in facts.summary.notes if code_of(one) not in (*NORMALISED, *known)]
    return [note(one) for one in told if code_of(one) or not facts.source.pseudonyms]


def note(text: str) -> str:
    """Return a note of the library in the words of the page; text without a code is unchanged.

    >>> print(note(Note("no-shares", why=Note("nothing-positive", score="ALPHA", positive=0.0))))
    nobody's contribution is above zero, so there is nothing to divide by
    >>> print(note(Note("partly-zero", client="North", seen=1, rounds=2)))
    member 'North' reported 1 of 2 rounds; the rest counts as zero
    """
    if not isinstance(text, Note):
        return text
    told = text.part("nothing-positive") or text  # no option helps then, so none is named
    return told.worded(PAGE, _CALLED, option=OPTION)


def gaps_known(facts: Facts) -> bool:
    """Return whether there are gaps between rounds, all explained by rounds known to have no report."""
    without = set(facts.source.unreported)
    for place, (earlier, later) in enumerate(pairwise(facts.source.rounds), start=1):
        between = range(number_of(earlier, place) + 1, number_of(later, place + 1))
        if not without.intersection(between) and not join_up(earlier, later, place):
            return False
    return bool(without)


# --------------------------------------------------------------------------------------------------- terms

RULES = {
    "fair": "In proportion to the summed {0}; whoever is below zero earns nothing.",
    "fenced": "As fair, but nobody is paid for more than the others' scores make plausible.",
    "impartial": "Nobody's own report touches its own share. Shares are nearly equal; a part stays unpaid.",
    "equal": "The same for everybody who ever reported, whatever the scores.",
}

SCORES = {
    "LOO": "what the shared model loses without {0} update",
    "IOI": "what {0} update alone adds to the starting model",
    "COS": "how far {0} update points the way of the sum",
    "MERIT": "what {0} own training reached alone, plus what {0} updates added alone",
}
"""Scores other than the contribution by which members may be paid."""


def noun(score: str) -> str:
    """Return the name of a score on the page and in statements."""
    return "contribution" if score == "ALPHA" else score


def basis(terms: Terms) -> str:
    """Return the score that a decision pays by, as the heading of a column."""
    return f"{noun(terms.score)} by {spoken(terms.utility)}"


def rule_text(rule: str, score: str = "ALPHA") -> str:
    """Return what a rule does.

    >>> rule_text("fair", "LOO")
    'In proportion to the summed LOO; whoever is below zero earns nothing.'
    """
    return RULES[rule].format(noun(score))


def about(terms: Terms) -> str:
    """Return what the rule of these terms does, and within which bounds."""
    return " ".join([rule_text(terms.rule, terms.score), *_bounds(terms)])


def _bounds(terms: Terms) -> list[str]:
    """Return the agreed smallest and largest shares, and who pays for them; empty if there are none."""
    ends = []
    if terms.floor > 0:
        ends.append(f"no member that reported has a share below {terms.floor:.2%}, whatever its score")
    if terms.cap < 1:
        ends.append(f"no member has a share above {terms.cap:.2%}")
    if not ends:
        return []
    rest = "spread over the others in proportion"
    if terms.rule == "impartial":
        rest = "taken from the unpaid part, or added to it"
    moved = "" if terms.rule == "equal" else f" What that gives or takes is {rest}."
    return [f"But by the terms of this decision {', and '.join(ends)}.{moved}"]


def usual(terms: Terms) -> bool:
    """Return whether the terms pay by the contribution, without bounds on shares."""
    return (terms.score, terms.floor, terms.cap) == ("ALPHA", 0.0, 1.0)


def decision(one: Decided) -> list[str]:
    """Return what was decided in one sentence, then the terms."""
    terms = one.terms
    covers = f"{one.rounds} of {one.planned} rounds" if one.rounds < one.planned else rounds(one.rounds)
    said = [
        f"Decision {one.number} stands: {Decimal(one.budget):,.2f} by the rule {terms.rule}, after {covers}."
    ]
    if one.rounds < one.planned:
        said.append("What later rounds bring is in no decision yet.")
    instead = f", in place of decision {one.replaces}" if one.replaces else ""
    counts = "as zero" if terms.missing == "zero" else "at the member’s own mean"
    said.append(f"Record {one.record} of the ledger{instead}.")
    what = terms.score
    if what in SCORES:
        what += f": {SCORES[what].format('a member’s')}"
    said.append(f"Paid by {spoken(terms.utility)} ({what}); missed rounds count {counts}.")
    if one.basis:
        said.append(f"It does not pay by the contribution of part 1, but by the column “{basis(terms)}”.")
    if not one.defined:
        said.append("The scores could not be turned into shares, so the agreed fallback was used.")
    return [*said, about(terms)]


# ----------------------------------------------------------------------------------------------- sentences

_COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

UTILITIES = {
    "expected-accuracy": "the probability the model gives to the right answer, averaged over test samples",
    "accuracy": "the part of the test samples for which the model's first answer is right",
    "sharpened-accuracy": "as expected accuracy, with the model's answers four times as decided: close to "
    "accuracy, but smooth",
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
    """Return a small number as a word."""
    return _COUNTS[number] if number < len(_COUNTS) else str(number)


def rounds(number: int) -> str:
    """Return a number of rounds in words."""
    return "one round" if number == 1 else f"{count(number)} rounds"


def title(facts: Facts) -> str:
    """Return the title: what to do about a doubt that withholds the rest, or who contributed what."""
    for doubt in facts.summary.doubts:
        if doubt.withholds:
            return f"{'Do not pay by these numbers' if doubt.gross else 'Look before you pay'}: {doubt.short}"
    return headline(facts)


def headline(facts: Facts) -> str:
    """Return in one sentence who contributed what."""
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
    if not set(leaders) <= set(helpful):  # not all of these surely improved the model
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
    """Return the headline without standard errors; it names no winner if there is none."""
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
    """Return a count of the members who could be measured; members without a report are not judged."""
    n = facts.total.n
    which = "members that reported" if facts.unscored else "members"
    if number == n:
        return f"{_all(n)} {which}"
    the = "the " if facts.unscored else ""
    return f"{count(number).capitalize()} of {the}{count(n)} {which}"


def lede(facts: Facts) -> list[str]:
    """Return the finding in a few sentences with numbers."""
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
    """Return who stands first, and who last."""
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
    """Return how the shared model changed, in numbers that are rounded consistently."""
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
    """Return which rounds the change covers."""
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
    """Return what the plus-minus covers and what it does not."""
    if facts.total.stderr is None:
        return "No standard errors were reported, so how sure this is cannot be said."
    return (
        "± and the whiskers are 95 % intervals for the sampling error of the test set in this run, each for "
        "one member alone. Ranks, who can be told apart, and who is said to have improved the model or made "
        "it worse: that holds with 95 % for all members at once. "
        "Training again would move the numbers too, and no single run can say by how much."
    )


def together(facts: Facts) -> str:
    """Return which members are statistically indistinguishable."""
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
    """Return in which rounds the gain was made."""
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
    return f"{first} of {of} brought {part} of {gained}. A member that is absent then misses the most."


def away(facts: Facts) -> list[str]:
    """Return who missed rounds, and what that cost."""
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
    """Return the share that a member without any contribution could expect from noise."""
    terms = facts.terms
    nothing = null_share(facts.payable)
    if nothing is None or (terms.floor, terms.cap) != (0.0, 1.0):
        return ""
    return (
        f"From noise alone, a member that contributed nothing could expect {nothing:.2%} under the rule fair."
    )


def defined(facts: Facts) -> bool:
    """Return whether the utility means what its name means here; in a file, a lower "brier" may be better."""
    return facts.utility != "brier" or facts.source.settings is not None


def spoken(utility: str | None) -> str:
    """Return a utility's name for use in a sentence."""
    return {"brier": "1 - Brier/2", None: "utility"}.get(utility) or str(utility).replace("-", " ")


def sentence(text: str) -> str:
    """Return a note as a sentence.

    >>> sentence("round 4 was aborted")
    'Round 4 was aborted.'
    """
    return f"{text[:1].upper()}{text[1:]}."
