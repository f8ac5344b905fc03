"""What the library notes about reports, in the words of the page, and what of it the page says elsewhere."""

from __future__ import annotations

import re
from itertools import pairwise

from fedmerit.accumulate import join_up, number_of
from fedmerit.document import scores_of
from fedmerit.page.facts import Facts
from fedmerit.tables import advice

_GAPS = ("there are no reports between rounds ", "on the same test samples, round ")
"""How notes begin that tell of rounds that do not join up."""


def notes(facts: Facts) -> list[str]:
    """What to know beside the ranking; the status of FP and EE, which rank nobody, is told in part 4."""
    last = scores_of(facts.summary.last)
    elsewhere = {text for key in ("FP", "EE") if (one := last.get(key)) is not None for text in one.notes}
    known = gaps_known(facts)  # then the page opens with them
    return [
        note(text)
        for text in facts.summary.notes
        if text not in elsewhere and not (known and text.startswith(_GAPS))
    ]


def note(text: str) -> str:
    """A note of the library in the words of the page.

    >>> note("no shares: the positive part of ALPHA is 0, no more than rounding leaves (1e-12); and more")
    "nobody's contribution is above zero, so there is nothing to divide by"
    >>> note("client 'North' reported 1 of 2 rounds")
    "member 'North' reported 1 of 2 rounds"
    """
    text = advice(text.replace("ALPHA", "contribution"))
    none = re.match(r"(?:no shares: )?the positive part of (\w+) is \S+, no more than rounding leaves", text)
    if none:
        return f"nobody's {none[1]} is above zero, so there is nothing to divide by"
    text = text.replace("is on the list of clients but", "is on the list of members but")
    return re.sub(r"^client(s?) (?=['\"])", r"member\1 ", text)


def gaps_known(facts: Facts) -> bool:
    """Whether rounds do not join up, and only because of rounds that are known to have no report."""
    without = set(facts.source.unreported)
    for place, (earlier, later) in enumerate(pairwise(facts.source.rounds), start=1):
        between = range(number_of(earlier, place) + 1, number_of(later, place + 1))
        if not without.intersection(between) and not join_up(earlier, later, place):
            return False
    return bool(without)
