"""What one member is told, from reports with known answers; real runs are in ledger/test_decisions.py."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedmerit.config import from_dict
from fedmerit.ledger.decisions import Terms, decide
from fedmerit.report.facts import Facts
from fedmerit.report.payment import absence_cost
from fedmerit.report.source import Source
from fedmerit.report.statement import as_markdown
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.amounts import payouts
from fedmerit.scoring.rewards import shares
from fedmerit.scoring.types import Reports
from fedmerit.scoring.uncertainty import compare_pairs
from fedmerit.settings import Heading


def reports(alpha, se, *, clients=(), number=1, silent=()):
    alpha, gain = np.array(alpha), 0.4
    return Reports(
        empty=0, grand=gain, alone=alpha, without=gain - alpha, se_alpha=se, clients=clients, silent=silent,
        slice=str(number), round=number,
    )  # fmt: skip


def facts_from(one):
    return Facts(Source(rounds=(one,), clients=one.clients))


def test_a_member_is_like_those_that_no_pair_of_intervals_parts_it_from():
    """B lies between A and C and is apart from neither; D is far below all, E far above."""
    given = reports([0.30, 0.27, 0.24, 0.0, 0.9], [0.006] * 5, clients=tuple("ABCDE"))
    assert facts_from(given).alike == {"A": ("B",), "B": ("A", "C"), "C": ("B",), "D": (), "E": ()}


def test_whom_a_member_is_like_is_its_row_of_all_pairs():
    rng = np.random.default_rng(3)
    for _ in range(30):
        facts = facts_from(reports(rng.normal(0, 0.1, 7), rng.uniform(0, 0.05, 7)))
        names, better = facts.total.clients, compare_pairs(facts.total).better
        for i, name in enumerate(names):
            row = {names[j] for j in range(7) if j != i and not better[i, j] and not better[j, i]}
            assert set(facts.alike[name]) == row


def test_whom_a_member_is_like_cannot_be_said_without_errors_or_of_too_many(monkeypatch):
    assert facts_from(reports([0.1, 0.2], None)).alike == {}
    monkeypatch.setattr("fedmerit.report.facts.MOST_COMPARED", 1)
    assert facts_from(reports([0.1, 0.2], [0.01, 0.01])).alike == {}


def decided(rounds, terms, **report):
    told = [SimpleNamespace(to_reports=lambda _, one=one: one) for one in rounds]
    decision = decide(told, terms, from_dict({}))
    config = from_dict({"training": {"rounds": len(rounds)}, "report": report})
    first = SimpleNamespace(mean_answer=None)
    run = SimpleNamespace(
        id="7" * 32, head="0" * 64, rehearsal=False, signed=True, config=config, first=first
    )
    ledger = {"run": run, "decisions": (decision,)}
    source = Source(tuple(rounds), rounds[0].clients, terms.missing, config=config, **ledger)
    return Facts(source, score=terms.score)


def test_what_absence_cost_is_counted_with_the_errors_of_the_other_way():
    """At its own mean B has 0.2 +- 0.09, as zero 0.1 +- 0.045: 0.12 in all is above two standard errors of
    0.046, and not above two of 0.091."""
    rounds = [
        reports([0.01, 0.1], [0.001, 0.045], clients=("A", "B")),
        reports([0.01], [0.001], clients=("A",), silent=("B",), number=2),
    ]
    facts = decided(rounds, Terms("120.00", "accuracy", rule="fair", missing="own-mean"))
    cost = absence_cost(facts, "B")
    assert (cost.score, cost.other) == pytest.approx((0.2, 0.1))
    assert (cost.cents, cost.other_cents) == (10909, 10000)
    assert absence_cost(facts, "A") is None


def test_what_absence_cost_is_counted_with_the_sketches_of_the_other_way():
    """Errors are those of the sketches: at its own mean, B's are twice as large."""
    first = reports([0.1, 0.15, 0.3], [0.02] * 3, clients=tuple("ABC"))
    second = reports([0.1, 0.3], [0.02] * 2, clients=("A", "C"), silent=("B",), number=2)
    signs = 0.02 * np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1]])
    rounds = [replace(first, sketch=signs, freedom=50), replace(second, sketch=signs[[0, 2]], freedom=50)]
    facts = decided(rounds, Terms("1000.00", "accuracy", rule="fair"))
    total, other = facts.decision.total, accumulate(rounds, missing="own-mean")
    raw, sketch = np.array(total.raw), np.array(total.sketch)
    raw[1], sketch[:, 1] = other.raw[1], other.sketch[:, 1]
    paid = payouts(shares(replace(total, values=raw, raw=raw, sketch=sketch)), "1000.00")
    assert absence_cost(facts, "B").other_cents == 100 * paid["B"]


def test_the_course_of_every_member_is_summed_once(monkeypatch):
    rounds = tuple(reports([0.1, 0.2], [0.01] * 2, clients=("A", "B"), number=k) for k in range(1, 9))
    rounds += (reports([0.3], [0.01], clients=("B",), silent=("A",), number=9),)
    for missing in ("zero", "own-mean"):
        facts = Facts(Source(rounds, ("A", "B"), missing))
        parts = [accumulate(rounds[:k], missing=missing).as_dict() for k in range(1, 10)]
        assert facts.standings  # sums of all rounds
        with monkeypatch.context() as patch:
            patch.setattr("fedmerit.report.facts.accumulate", None)
            courses = facts.courses
        assert courses == {name: tuple(part[name] for part in parts) for name in ("B", "A")}


def told(member, alpha, terms):
    given = reports(alpha, [0.01] * len(alpha), clients=tuple("ABCD"[: len(alpha)]))
    return as_markdown(decided([given], terms), member)


def test_a_smallest_share_is_named_beside_the_rule_it_bends():
    plain, floored = (
        told("C", [0.3, 0.2, -0.1], Terms("1000.00", "accuracy", rule="fair", floor=floor))
        for floor in (0.0, 0.05)
    )
    assert "**50.00** of 1,000.00" in floored
    assert "By the terms of this decision, no member who reported has a share below 5.00%" in floored
    assert "terms of this decision" not in plain


def test_another_score_than_the_contribution_is_named():
    text = told("A", [0.3, 0.1, 0.0], Terms("1000.00", "accuracy", rule="fair", score="LOO"))
    assert "What the shared model loses without your update (LOO), summed over rounds, is +0.3000;" in text
    assert "Shares are in proportion to the summed LOO;" in text
    assert "ontribution" not in text
    text = told("A", [0.3, 0.1, 0.0], Terms("1000.00", "accuracy", rule="fair"))
    assert "Your contribution, summed over rounds, is +0.3000;" in text
    assert "Your contribution is +0.3000 ± 0.0306" in text


def test_a_statement_says_whom_to_ask_until_when_and_where_to_sign():
    given = reports([0.3, 0.2, 0.1], [0.01] * 3, clients=tuple("ABC"))
    facts = decided([given], Terms("1000.00", "accuracy"))
    heading = Heading(contact="office@example.org", objections="2026-12-30")
    told = as_markdown(Facts(replace(facts.source, heading=heading), score="ALPHA"), "B")
    assert "- To: B\n- Contact: office@example.org\n" in told
    assert "- Objections: until 30 December 2026, to the contact;" in told
    assert re.search(r"- Place, date: …+\n- Signature: …+\n$", told)
    plain = as_markdown(decided([given], Terms("1000.00", "accuracy")), "B")
    assert "- Contact: …" in plain
    assert "- Objections: as the contract says, to the contact;" in plain


def test_the_cent_left_over_is_in_no_share():
    """Thirds of 100.00: the first has 33.34, for a share of 33.33%."""
    text = told("A", [0.1, 0.1, 0.1], Terms("100.00", "accuracy", rule="fair"))
    assert "**33.34** of 100.00, for a share of 33.33%, by the rule “fair”." in text


def test_no_name_is_html_or_a_link_in_markdown():
    names = ("<img src=x>", "[B](http://x)", "**C**")
    given = reports([0.3, 0.2, 0.1], [0.01] * 3, clients=names)
    for name in names:
        text = as_markdown(decided([given], Terms("1000.00", "accuracy")), name)
        assert "<" not in text
        assert "](" not in text.replace(r"\](", "")
        assert "**C**" not in text
        assert text.startswith("# ")
        assert "**" in text  # our own
