"""What is guaranteed and what is not, and what the server saw: for the run at hand, not in general."""

from __future__ import annotations

from typing import Any

from fedmerit.federation.journal import REHEARSALS
from fedmerit.page.costs import BYTES_A_PARAMETER
from fedmerit.page.facts import Facts


def guaranteed(facts: Facts) -> list[str]:
    """What holds."""
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
    """Whether members of this run see their own numbers only, so that the page is for the coordinator."""
    settings = facts.source.settings
    return settings is not None and settings["scoring"]["visibility"] == "coordinator"


def not_guaranteed(facts: Facts) -> list[str]:
    """What does not hold, or is not known."""
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
    """What the server saw and did not see; None where nothing is known about it."""
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
    """What the run took."""
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
    """Name, value, and whether the value is a fingerprint."""
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
