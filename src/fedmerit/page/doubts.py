"""What the page says about whether to believe it: sums against gains, statuses, other measures."""

from __future__ import annotations

from collections.abc import Sequence

from fedmerit.alarms import balance
from fedmerit.federation.unscored import in_words
from fedmerit.page.facts import Facts
from fedmerit.page.words import STATUS, count, listed, rounds, sentence, spoken
from fedmerit.tables import signed

_STRAYS = " That strays from the gain: look at the reports before you pay by this measure."
_GROSS = " No: do not pay by these numbers before somebody has looked; see the top of this page."


def adds_up(facts: Facts) -> str:
    """The sum of the contributions against the gain."""
    said = float(facts.total.raw.sum())
    gain, explained = (signed(value, facts.summary.digits) for value in (facts.total.gain, said))
    found = facts.summary.doubts
    strays = _STRAYS if any(one.code in ("swapped", "strays") for one in found) else ""
    if any(one.gross for one in found):
        strays = _GROSS
    if facts.total.gain <= 0:
        return f"The contributions add up to {explained}, and there is no gain to attribute ({gain}).{strays}"
    ratio = said / facts.total.gain
    where = " in the rounds with reports" if facts.source.unreported else ""
    told = f"The contributions add up to {explained}, {ratio:.0%} of the {gain} that the model gained{where}"
    silent = list(dict.fromkeys(name for one in facts.source.rounds for name in one.silent))
    if not silent:
        return f"{told}.{strays}"
    whose = "its" if len(silent) == 1 else "their"
    lacks = "not in it" if facts.source.missing == "zero" else "not measured"
    told += f"; what {listed(silent)} added in rounds without {whose} report is {lacks}."
    judged = balance(facts.source.rounds)
    if strays and judged and judged.gain > 0:
        told += f" Where everybody reported, they make {judged.said / judged.gain:.0%} of the gain."
    return told + strays


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
    said += [sentence(text) for text in in_words(list(facts.source.aborted), facts.source.unreported)]
    return said


def _s(items: Sequence[object]) -> str:
    return "" if len(items) == 1 else "s"


def heading(facts: Facts, utility: str | None) -> str:
    """A measure as the head of a column: with a mark where it is paid by."""
    if utility != facts.paid_by:
        return spoken(utility)
    return (
        f"{spoken(utility)} ({'paid' if facts.terms.score == 'ALPHA' else f'paid, by {facts.terms.score}'})"
    )


def _first(facts: Facts) -> str:
    """The measure that ranks members on this page."""
    return "the paid measure" if facts.paid_by == facts.utility else spoken(facts.utility)


def _turned(client: str, helped: bool, measure: str, first: str) -> str:
    here, paid = (
        ("improved the model", "made it worse") if helped else ("made the model worse", "improved it")
    )
    return f"Measured by {measure}, {client} surely {here}; by {first} it surely {paid}"


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
            said.append(_turned(client, helped, spoken(one.utility), _first(facts)) + ".")
        if not one.sure:
            said.append(f"{name}{close} contradicts nothing: {_first(facts)} is sure of no difference.")
        elif not one.contradicts:
            pairs = "the one difference" if one.sure == 1 else f"any of the {one.sure} differences"
            confirmed = "all" if one.confirms == one.sure else count(one.confirms) if one.confirms else "none"
            said.append(
                f"{name}{close} does not contradict {pairs} that {_first(facts)} is sure of, "
                f"and confirms {confirmed} of them."
            )
    return said
