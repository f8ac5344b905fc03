"""What the page says in sentences. They state findings, name who, and never more than the facts allow."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence

from fedmerit.page.facts import Facts
from fedmerit.rewards import null_share
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

RULES = {
    "fair": "In proportion to the summed contribution. A contribution below zero earns nothing.",
    "fenced": "As fair, but nobody is paid for more than the others' scores make plausible.",
    "impartial": "Nobody's own report touches its own share. Shares are nearly equal; a part stays unpaid.",
    "equal": "The same for everybody, whatever the scores.",
}

STATUS = {
    "ok": "in order",
    "reversed": "reversed: it would rank the members the wrong way round",
    "fallback": "fallback: its denominator is zero, a replacement was used",
    "undefined": "undefined: nothing to distribute, split equally",
    "none": "none: somebody in the sum sent no report",
}


def listed(names: Sequence[str], most: int = 6) -> str:
    """Names as one reads them out.

    >>> listed(["A", "B", "C"]), listed(list("ABCDEFGH"), most=3)
    ('A, B and C', 'A, B, C and 5 more')
    """
    if len(names) > most:
        return ", ".join(names[:most]) + f" and {len(names) - most} more"
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def count(number: int) -> str:
    """A small number as a word."""
    return _COUNTS[number] if number < len(_COUNTS) else str(number)


def rounds(number: int) -> str:
    """So many rounds."""
    return "one round" if number == 1 else f"{count(number)} rounds"


def headline(facts: Facts) -> str:
    """Who contributed what, in one sentence."""
    standings, n = facts.summary.standings, facts.total.n
    if facts.total.stderr is None:
        return f"{standings[0].client} contributed most; how sure that is cannot be said"
    harmful = [one.client for one in standings if one.interval and one.interval[1] < 0]
    helpful = [one.client for one in standings if one.interval and one.interval[0] > 0]
    worse = f"; {listed(harmful, 3)} made the model worse" if harmful else ""
    leaders = list(facts.summary.groups[0]) if facts.summary.groups else [standings[0].client]
    if not helpful:
        return "No member is sure to have improved the model" + worse
    if len(leaders) == 1:
        return f"{leaders[0]} contributed most" + worse
    if not set(leaders) <= set(helpful):  # the first is known to have improved the model, not all of these
        if len(leaders) == n:
            return f"The {count(n)} members cannot be told apart"
        others = "one other" if len(leaders) == 2 else f"{count(len(leaders) - 1)} others"
        return f"{leaders[0]} stands first, but cannot be told apart from {others}{worse}"
    if len(leaders) == n:
        return f"All {count(n)} members contributed, and cannot be told apart"
    if len(leaders) <= 3:
        return f"{listed(leaders)} contributed most, and cannot be told apart{worse}"
    who = f"{count(len(leaders)).capitalize()} of {count(n)} members"
    most = " most" if len(helpful) > len(leaders) else ""
    return f"{who} contributed{most} and cannot be told apart{worse}"


def lede(facts: Facts) -> list[str]:
    """The finding in a few sentences, numbers included."""
    total, reports = facts.total, facts.source.rounds
    span = "In one round" if total.rounds == 1 else f"Over {rounds(total.rounds)}"
    measure = (
        f"the {spoken(facts.utility)} of the shared model"
        if facts.utility
        else "the utility of the shared model"
    )
    moved = "rose" if total.gain > 0 else "fell" if total.gain < 0 else "stayed the same"
    change = "" if total.gain == 0 else f" by {abs(total.gain):.4f}"
    if facts.one_slice:
        change += f", from {reports[0].empty:.4f} to {reports[-1].grand:.4f}"
    said = [f"{span} {measure} {moved}{change}."]
    best, worst = facts.summary.standings[0], facts.summary.standings[-1]
    said.append(_place(best, "first", total.n))
    if worst.client in facts.summary.suspects:
        said.append(
            f"{worst.client} stands last with {total_text(worst)}, significantly below everybody else: "
            "worth a conversation."
        )
    elif worst is not best:
        said.append(_place(worst, "last", total.n))
    turned = {client: one for one in facts.companions for client in one.turned}
    if turned:
        which = dict.fromkeys(spoken(one.utility) for one in turned.values())
        said.append(
            f"Not every measure agrees about {listed(list(turned), 3)}: see {listed(list(which))} in part 4."
        )
    return said


def _place(one: Standing, where: str, n: int) -> str:
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
        "± and the whiskers are 95 % intervals for the sampling error of the test set in this run. "
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
        return f"The shared model changed by {signed(gain)} in all."
    sums = list(itertools.accumulate(one.gain for one in reports))
    place = next(k for k, so_far in enumerate(sums, start=1) if so_far >= gain / 2 or k == len(sums))
    first = "The first round" if place == 1 else f"The first {count(place)} rounds"
    part = f"{sums[place - 1] / gain:.0%}"
    return f"{first} of {count(len(reports))} brought {part} of the whole gain. Who is away then misses most."


def away(facts: Facts) -> list[str]:
    """Who was away, and what it cost."""
    if not facts.absences:
        return ["Nobody missed a round."]
    said = []
    for one in facts.absences:
        which = listed([str(number) for number in one.rounds], 12)
        missed = f"{one.client} has no report in round{'s' if len(one.rounds) > 1 else ''} {which}"
        if facts.source.missing == "zero":
            own = signed(one.at_own_mean)
            said.append(f"{missed}. That counts as zero; at its own mean it would have counted {own}.")
        else:
            said.append(f"{missed}. That counts at its own mean, {signed(one.at_own_mean)} in all.")
    return said


def noise_share(facts: Facts) -> str:
    """What a member without any contribution could expect from luck."""
    nothing = null_share(facts.total)
    if nothing is None:
        return ""
    return (
        f"From noise alone, a member that contributed nothing could expect {nothing:.2%} under the rule fair."
    )


def adds_up(facts: Facts) -> str:
    """The sum of the contributions against the gain."""
    said = float(facts.total.raw.sum())
    gain = signed(facts.total.gain)
    if facts.total.gain <= 0:
        return f"The contributions add up to {signed(said)}, and there is no gain to attribute ({gain})."
    ratio = said / facts.total.gain
    sentence = f"The contributions add up to {signed(said)}, {ratio:.0%} of the {gain} that the model gained."
    if abs(ratio - 1) > 0.2:
        sentence += " That strays far from the gain: think twice before paying from this measure."
    return sentence


def statuses(facts: Facts) -> list[str]:
    """In which rounds the paper's normalised scores are not in order."""
    scored = [one for one in facts.rounds if one.gain is not None]
    said = []
    good = [key for key in ("FP", "EE") if all(one.status[key] == "ok" for one in scored)]
    if good:
        every = "the one round" if len(scored) == 1 else f"all {rounds(len(scored))}"
        said.append(f"{listed(good)} {'is' if len(good) == 1 else 'are'} in order in {every}.")
    for key in ("FP", "EE"):
        odd = [one for one in scored if one.status[key] != "ok"]
        for kind in dict.fromkeys(one.status[key] for one in odd):
            which = [str(one.number) for one in odd if one.status[key] == kind]
            said.append(f"{key} in round{_s(which)} {listed(which, 20)}: {STATUS[kind]}.")
    gone = [str(one.number) for one in facts.rounds if one.gain is None]
    if gone:
        said.append(f"Round{_s(gone)} {listed(gone, 20)} {'has' if len(gone) == 1 else 'have'} no scores.")
    return said


def _s(items: Sequence[object]) -> str:
    return "" if len(items) == 1 else "s"


def _turned(client: str, helped: bool, measure: str) -> str:
    here, paid = (
        ("improved the model", "made it worse") if helped else ("made the model worse", "improved it")
    )
    return f"Measured by {measure}, {client} surely {here}; by the paid measure it surely {paid}"


def companions(facts: Facts) -> list[str]:
    """Whether other measures of quality tell another story."""
    said = []
    for one in facts.companions:
        name = spoken(one.utility)
        name = name[0].upper() + name[1:]
        close = "" if one.spearman is None else f" (rank correlation {one.spearman:.2f})"
        for better, worse in one.contradicts[:4]:
            said.append(
                f"{name} says the opposite, and is sure of it: {worse} contributed more than {better}."
            )
        if len(one.contradicts) > 4:
            said.append(f"{name} contradicts {len(one.contradicts) - 4} more differences.")
        for client, helped in one.turned.items():
            said.append(_turned(client, helped, spoken(one.utility)) + ".")
        if not one.sure:
            said.append(f"{name}{close} contradicts nothing: the paid measure is sure of no difference.")
        elif not one.contradicts:
            pairs = "the one difference" if one.sure == 1 else f"any of the {one.sure} differences"
            confirmed = "all" if one.confirms == one.sure else count(one.confirms) if one.confirms else "none"
            said.append(
                f"{name}{close} does not contradict {pairs} that the paid measure is sure of, "
                f"and confirms {confirmed} of them."
            )
    return said


def spoken(utility: str | None) -> str:
    """A utility's name in a sentence."""
    return {"brier": "Brier score", None: "utility"}.get(utility) or str(utility).replace("-", " ")


def note(text: str) -> str:
    """A note of the library in the page's word for the score."""
    return text.replace("ALPHA", "contribution")
