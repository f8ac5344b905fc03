"""What the terms of a payout decision mean, in words: for the page and for members' statements."""

from __future__ import annotations

from decimal import Decimal

from fedmerit.federation.decisions import Terms
from fedmerit.page.decided import Decided
from fedmerit.page.words import rounds, spoken

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
"""Scores that may be paid by, other than the contribution."""


def noun(score: str) -> str:
    """A score as the page and the statements call it."""
    return "contribution" if score == "ALPHA" else score


def basis(terms: Terms) -> str:
    """What a decision pays by, as the name of a column."""
    return f"{noun(terms.score)} by {spoken(terms.utility)}"


def rule_text(rule: str, score: str = "ALPHA") -> str:
    """What a rule does.

    >>> rule_text("fair", "LOO")
    'In proportion to the summed LOO; whoever is below zero earns nothing.'
    """
    return RULES[rule].format(noun(score))


def about(terms: Terms) -> str:
    """What the rule of these terms does, within which bounds."""
    return " ".join([rule_text(terms.rule, terms.score), *_bounds(terms)])


def _bounds(terms: Terms) -> list[str]:
    """What smallest and largest shares were agreed, and who pays for them; nothing where none were."""
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
    """Whether nothing but budget, rule and measure was chosen."""
    return (terms.score, terms.floor, terms.cap) == ("ALPHA", 0.0, 1.0)


def decision(one: Decided) -> list[str]:
    """What was decided: in one sentence, then on which terms."""
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
        said.append("The scores allowed no shares, so that the agreed way out was taken.")
    return [*said, about(terms)]
