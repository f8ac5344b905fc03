"""What this particular run guarantees and what it does not, and what its server saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedmerit.ledger.records import in_words
from fedmerit.protocol.terms import REHEARSALS
from fedmerit.report.page.facts import Facts
from fedmerit.report.page.source import BYTES_A_PARAMETER
from fedmerit.report.page.text import STATUS, count, listed, rounds, sentence, spoken
from fedmerit.report.terminal import signed
from fedmerit.scoring.doubts import balance

# -------------------------------------------------------------------------------------------------- doubts

_STRAYS = " That strays from the gain: look at the reports before you pay by this measure."
_GROSS = " No: do not pay by these numbers before somebody has looked; see the top of this page."


def adds_up(facts: Facts) -> str:
    """Return a sentence that compares the sum of the contributions with the gain."""
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
    """Return in which rounds FP and EE, the paper's normalised scores, are in order, and in which not."""
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
    """Return a measure as the heading of a column, marked if members are paid by it."""
    if utility != facts.paid_by:
        return spoken(utility)
    return (
        f"{spoken(utility)} ({'paid' if facts.terms.score == 'ALPHA' else f'paid, by {facts.terms.score}'})"
    )


def _first(facts: Facts) -> str:
    """Return the name of the measure that ranks members on this page."""
    return "the paid measure" if facts.paid_by == facts.utility else spoken(facts.utility)


def _turned(client: str, helped: bool, measure: str, first: str) -> str:
    here, paid = (
        ("improved the model", "made it worse") if helped else ("made the model worse", "improved it")
    )
    return f"Measured by {measure}, {client} surely {here}; by {first} it surely {paid}"


def companions(facts: Facts) -> list[str]:
    """Return sentences on whether other measures of quality contradict the ranking."""
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


# ------------------------------------------------------------------------------------------------ promises


def guaranteed(facts: Facts) -> list[str]:
    """Return what this run guarantees."""
    found = [
        "Ranks and payouts follow raw contributions, with their sign, never a score that may be reversed.",
        "Payouts are whole cents and add up to the budget exactly, less what a rule leaves unpaid.",
    ]
    book, settings = facts.source.book, facts.source.settings
    if book is not None:
        found.append(
            "All scores here follow from the reports in the ledger; they were computed anew for this page."
        )
        found.append(
            "Records are chained by hash: altering, dropping or swapping one changes the ledger's head."
        )
        found.append("The test pool was committed to before the first round; nobody could exchange it later.")
        if settings is not None and settings["secure_aggregation"]["enabled"] and not book.run["analysis"]:
            found.insert(0, "Model updates were masked: the sum is all that came out of secure aggregation.")
    return found


def private(facts: Facts) -> bool:
    """Return whether members see only their own numbers, so that the page is for the coordinator alone."""
    settings = facts.source.settings
    return settings is not None and settings["scoring"]["visibility"] == "coordinator"


def not_guaranteed(facts: Facts) -> list[str]:
    """Return what this run does not guarantee, or what is unknown."""
    source = facts.source
    found = []
    if private(facts):
        found.append(
            "Members of this run see their own numbers only, and this page shows everybody's: it is for the "
            "coordinator alone, and whoever passes it on breaks what members were promised."
        )
    if source.broken:
        found.append("The ledger does not verify: rely on nothing here before it is known why.")
    elif source.book is None:
        found.append(
            "This page was made from reports alone: who wrote them, and from which models, is not known here."
        )
    else:
        if holder := REHEARSALS.get(source.book.run["engine"]):
            found.append(
                f"It was a rehearsal: {holder} held all keys, so signatures prove order, not who spoke."
            )
        elif source.book.run["keys"]:
            found.append(
                "Whose keys signed is known from the ledger alone, into which a forger would write its own: "
                "fedmerit verify --roster FILE compares them with the roster that you have. Nothing here can "
                "show on whose machines they lay."
            )
        if source.book.run["analysis"]:
            found.append(
                "Plain updates were looked at for analysis, which secure aggregation would have hidden."
            )
        if source.settings is not None and not source.settings["secure_aggregation"]["enabled"]:
            found.append("Secure aggregation was off: updates were not masked and the ledger is not signed.")
        found.append(
            "The server could withhold the last records: compare the ledger's head with the other members."
        )
    if facts.one_slice and len(source.rounds) > 1:
        found.append(
            "All rounds use the same test samples: a member that trained on them would be paid for it."
        )
    found += [
        "Members report their own two numbers. A lie that no check finds moves ranks and shares.",
        "What the shared model itself gives away about the training data is not limited here.",
        "Nobody outside the project has audited the software (version 0.x).",
    ]
    if source.pseudonyms:
        found.append("Names are replaced on this page. Whoever has the scores themselves can put them back.")
    return found


def server_saw(facts: Facts) -> tuple[list[str], list[str]] | None:
    """Return what the server saw and what it did not see; None if that is unknown."""
    book, settings = facts.source.book, facts.source.settings
    if book is None or settings is None:
        return None
    saw = [
        "the sum of all updates in a round, which is the new shared model, and the total weight",
        "of each member and measure, two utilities and their standard errors a round",
        "who took part, when, and how large the model is",
    ]
    if any(report.cosine is not None for one in book.rounds for report in one.reports.values()):
        saw.insert(2, "of each member, one cosine a round between its update and the sum")
    if settings["scoring"]["disclose_samples"]:
        saw.append("how many training samples each member holds")
    if settings["scoring"]["solo"]:
        saw.append("the utility of the model each member trained alone")
    if not settings["secure_aggregation"]["enabled"] or book.run["analysis"]:
        saw.insert(0, "every member's model update, in the clear")
        return saw, ["any member's training data"]
    return saw, [
        "any member's model update",
        "any member's training data",
        "which of the test samples a member got right",
    ]


def costs(facts: Facts) -> list[tuple[str, str]]:
    """Return what the run cost, as names and values."""
    found = []
    known, book = facts.source.costs, facts.source.book
    if known.seconds is not None:
        longest = f"the longest of {len(known.seconds)} rounds {max(known.seconds):.1f} s"
        found.append(("time", f"{sum(known.seconds):.1f} s; {longest}"))
    else:
        found.append(("time", "not recorded"))
    if known.parameters is not None:
        sent = BYTES_A_PARAMETER * known.parameters
        found.append(("model", f"{known.parameters:,} parameters"))
        if book is not None and book.run["keys"]:
            found.append(
                (
                    "sent by each member",
                    f"{sent:,} bytes of masked numbers a round, and a few messages beside them",
                )
            )
    scored = facts.source.rounds
    models = sum(2 * one.n + 2 for one in scored)
    found.append(
        (
            "models evaluated for the scores",
            f"{models:,} in {len(scored)} round{'s' if len(scored) > 1 else ''}",
        )
    )
    return found


def provenance(facts: Facts) -> list[tuple[str, str, bool]]:
    """Return where the numbers come from: name, value, and whether the value is a fingerprint."""
    book = facts.source.book
    if book is None:
        return []
    pool: dict[str, Any] = dict(book.pool)
    slices = int(pool["slices"])
    return [
        ("fedmerit", f"version {book.run['version']}, engine {book.run['engine']}", False),
        ("test pool", f"{pool['size']} samples of {pool['classes']} classes, "
         + ("one slice for all rounds" if slices == 1 else f"{slices} slices, one a round"), False),
        ("commitment to the test pool", str(pool["root"]), True),
        ("settings", str(book.run["config_hash"]), True),
        ("ledger", f"{book.records} records", False),
        ("head of the ledger", book.head, True),
    ]  # fmt: skip
