"""What the page says first: no winner where there is none, everybody on the roster, what was decided."""

import math
import re
import shutil
from dataclasses import replace
from decimal import Decimal
from html import unescape

import pytest
from sample import changed, write_scores
from typer.testing import CliRunner

from fedmerit.cli import app
from fedmerit.ledger.decisions import Terms
from fedmerit.report.page import text as words
from fedmerit.report.page.html import facts_of, page, render
from fedmerit.scoring.files import as_csv, as_json, document
from fedmerit.scoring.types import Reports
from fedmerit.scoring.uncertainty import TRAINING
from fedmerit.verify import record_decision


def said_of(path, **how):
    text = re.sub(r"<(script|style)\b.*?</\1>", "", page(path, **how), flags=re.S)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


ONE_TRAINING = math.hypot(1, TRAINING)
"""How much wider intervals are for the allowance that one training needs."""


def file_of(folder, alpha, *, names=("A", "B", "C"), se=None, silent=(), slices=("s",), starts=(0.1,)):
    """Rounds with these contributions each, on these slices, beginning at these utilities; gain 0.2 each."""
    rounds = [
        Reports(
            empty=start,
            grand=start + 0.2,
            alone=[start + a for a in alpha],
            without=[start + 0.2 - a for a in alpha],
            clients=names,
            silent=silent,
            se_alpha=None if se is None else [se] * len(alpha),
            slice=slice_,
            round=k,
        )
        for k, (slice_, start) in enumerate(zip(slices, starts, strict=True), start=1)
    ]
    path = folder / "reports.csv"
    path.write_text(as_csv(document(rounds)))
    return path


@pytest.mark.parametrize(
    ("alpha", "expected", "place"),
    [
        (
            [0.1, 0.1, 0.1],
            "All three members contributed the same",
            "All three members have the same contribution, +0.1000.",
        ),
        ([-0.1, -0.2, -0.3], "No member improved the model", None),  # and that is no sum of a gain
        ([0, 0, 0], "No member improved the model", None),
        (
            [0.1, 0.1, 0],
            "A and B contributed most, each the same amount",
            "A and B share the first place with +0.1000.",
        ),
        ([0.1, 0, 0], "A contributed most", "B and C share the last place with +0.0000."),
    ],
)
def test_there_is_no_winner_where_there_is_none(tmp_path, alpha, expected, place):
    facts = facts_of(file_of(tmp_path, alpha))
    assert words.headline(facts) == f"{expected}; without standard errors nobody can say how sure this is"
    if place is None:  # nobody is praised or accused by numbers that contradict themselves
        assert words.lede(facts) == [
            "Over one round the utility of the shared model rose by 0.2000, from 0.1000 to 0.3000."
        ]
    else:
        assert place in words.lede(facts)


def test_two_are_both(tmp_path):
    facts = facts_of(file_of(tmp_path, [0.1, 0.1], names=("A", "B")))
    assert (
        words.headline(facts)
        == "Both members contributed the same; without standard errors nobody can say how sure this is"
    )
    assert "Both members have the same contribution, +0.1000." in words.lede(facts)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        ([0.2, 0, -0.021], "A contributed most"),  # below zero by its own interval, one of three such
        ([0.2, 0, -0.025], "A contributed most; C made the model worse"),
        ([0.021, 0, -0.021], "No member has surely improved the model"),
        ([0, 0, -0.1], "No member has surely improved the model; C made the model worse"),
        ([-0.1, -0.1, -0.1], "No member has surely improved the model; A, B and C made the model worse"),
        ([0.1, 0.09, 0], "A and B contributed most and are statistically indistinguishable"),
        ([0.03, 0, 0], "All three members are statistically indistinguishable"),
        (
            [0.03, 0, -0.03],
            "A is first, but one other member is statistically indistinguishable; C made the model worse",
        ),
        (
            [0.0275, 0, 0, 0, 0, -0.0275],
            "All six members are statistically indistinguishable",
        ),  # so F is not accused
    ],
)
def test_the_headline_is_sure_of_all_that_it_says_at_once(tmp_path, alpha, expected):
    facts = facts_of(file_of(tmp_path, alpha, names=tuple("ABCDEF"[: len(alpha)]), se=0.01 / ONE_TRAINING))
    assert words.headline(facts) == expected
    printed = CliRunner().invoke(app, ["score", str(tmp_path / "reports.csv")]).stdout.splitlines()
    worse = [line for line in printed if line.endswith(" made the model worse")]
    accused = [part for part in expected.split("; ") if part.endswith(" made the model worse")]
    doubted = any(line.startswith("WARNING: ") for line in printed)  # numbers that accuse nobody
    assert worse == ([] if doubted else accused)


def test_the_terminal_names_all_that_made_the_model_worse(tmp_path):
    path = file_of(tmp_path, [0.5, 0.1, -0.1, -0.1, -0.1, -0.1, -0.1], names=tuple("ABCDEFG"), se=0.01)
    assert words.headline(facts_of(path)).endswith("; C, D and E made the model worse; so did 2 more")
    printed = CliRunner().invoke(app, ["score", str(path)]).stdout
    assert "C, D, E, F and G made the model worse" in printed.splitlines()
    assert (
        "made the model worse" not in CliRunner().invoke(app, ["score", str(path), "--score", "LOO"]).stdout
    )


@pytest.mark.parametrize("se", [None, 0.001])
def test_who_never_reported_is_on_the_page(tmp_path, se):
    path = file_of(tmp_path, [0.1, 0.1, 0.1], silent=("Eve",), se=se)
    facts, said = facts_of(path), said_of(path)
    assert words.headline(facts).startswith("All three members who reported contributed")
    assert "Eve never reported and has no score." in words.lede(facts)
    assert "No member missed a round" not in said
    nothing = "the member has no score, and no rule pays it"
    assert f"Eve has no report in any round (round 1): {nothing}." in said
    assert "Eve no report - -" in said
    assert re.search(r"Eve 0\.00 (- )?0\.00% never reported", said)
    assert not re.search(r"\bEve\b", page(path, pseudonyms=True))
    assert re.search(r"Member D 0\.00 (- )?0\.00% never", said_of(path, pseudonyms=True))


def test_some_of_those_that_reported_contributed_most(tmp_path):
    five = file_of(tmp_path, [0.1, 0.1, 0.1, 0.1, 0.02], names=tuple("ABCDE"), silent=("Eve",), se=0.001)
    expected = (
        "Four of the five members who reported contributed most and are statistically indistinguishable"
    )
    assert words.headline(facts_of(five)) == expected
    five = file_of(tmp_path, [0.1, 0.1, 0.1, 0.1, 0.02], names=tuple("ABCDE"), se=0.001)
    expected = "Four of five members contributed most and are statistically indistinguishable"
    assert words.headline(facts_of(five)) == expected


WARNING = "check the reports before you pay by this measure"
REFUSAL = "Do not pay by these numbers before somebody has checked them"


def test_a_silent_member_is_no_fault_of_the_measure(tmp_path):
    """Three members of 0.05 each in a gain of 0.2: three quarters, whether or not there was a fourth."""
    alone = words.adds_up(facts_of(file_of(tmp_path, [0.05] * 3)))
    assert "75% of the model’s gain of +0.2000. The sum is too far from the gain" in alone
    assert WARNING in alone
    said = words.adds_up(facts_of(file_of(tmp_path, [0.05] * 3, silent=("Eve",))))
    assert said.endswith(
        "75% of the model’s gain of +0.2000. This sum does not include what Eve added in rounds "
        "without a report from this member."
    )


@pytest.mark.parametrize(("share", "warns"), [(0.05, False), (0.02, True)])
def test_the_measure_is_judged_by_the_rounds_that_everybody_reported_on(tmp_path, share, warns):
    whole = {"empty": 0.1, "grand": 0.3, "clients": tuple("ABCD"), "slice": "s", "round": 1}
    partly = {"empty": 0.3, "grand": 0.5, "clients": tuple("ABC"), "silent": ("D",), "slice": "s", "round": 2}
    rounds = [
        Reports(**whole, alone=[0.1 + share] * 4, without=[0.3 - share] * 4),
        Reports(**partly, alone=[0.31] * 3, without=[0.49] * 3),
    ]
    path = tmp_path / "reports.csv"
    path.write_text(as_csv(document(rounds)))
    said = words.adds_up(facts_of(path))
    assert "This sum does not include what D added in rounds without a report from this member." in said
    assert (REFUSAL in said) is warns
    assert (
        "In the rounds that everybody reported on, the contributions add up to 40% of the gain." in said
    ) is warns


def test_the_leaders_are_all_that_may_be_first_however_many(tmp_path, monkeypatch):
    monkeypatch.setattr("fedmerit.report.standings.MOST_COMPARED", 2)
    facts = facts_of(file_of(tmp_path, [0.1, 0.09, 0], se=0.01))
    assert facts.groups == ()
    assert words.headline(facts) == "A and B contributed most and are statistically indistinguishable"


def test_a_measure_turns_nobody_by_one_of_many_intervals(tmp_path):
    """West has -0.06 by one measure and 0.24 by the other: 4.5 or 2.15 standard errors below zero."""
    for se, turned in ((0.006, {"West": True, "North": False}), (0.0125, {"North": False})):
        assert facts_of(write_scores(tmp_path, companion=True, se=se)).companions[0].turned == turned


def test_who_is_away_in_every_round_is_on_the_page(tmp_path):
    path = write_scores(tmp_path)
    changed(path, lambda content: content["clients"].append("Eve"))
    assert "Eve has no report in any round (rounds 1, 2 and 3)" in said_of(path)


def test_the_lede_states_no_sum_that_contradicts_its_ends(tmp_path):
    joined = file_of(tmp_path, [0.1, 0.1, 0.0], slices="ss", starts=(0.1, 0.3))
    assert "rose by 0.4000, from 0.1000 to 0.5000." in words.lede(facts_of(joined))[0]
    apart = file_of(tmp_path, [0.1, 0.1, 0.0], slices="ss", starts=(0.1, 0.15))
    expected = "went from 0.1000 to 0.3500, but the gains of the rounds add up to +0.4000"
    assert expected in words.lede(facts_of(apart))[0]
    assert "round 1 ends at 0.3 and round 2 begins at 0.15" in said_of(apart)


def with_a_gap(folder, *, jump=0.0):
    """Rounds 1, 2, 3 and 5 gain 0.2, 0.1, 0.1 and 0.1; round 4, that nobody reported on, 0.05."""
    ends = ((1, 0.1, 0.3), (2, 0.3 + jump, 0.4 + jump), (3, 0.4 + jump, 0.5 + jump), (5, 0.55, 0.65))
    content = document(
        [
            Reports(
                empty=low, grand=high, alone=[low + (high - low) / 2] * 2, without=[(low + high) / 2] * 2,
                clients=("A", "B"), slice="s", round=number,
            )
            for number, low, high in ends
        ]
    )  # fmt: skip
    content["rounds"].insert(3, {"round": 4, "participants": [], "reports": None, "scores": None})
    path = folder / "scores.json"
    path.write_text(as_json(content))
    return path


def test_a_round_without_reports_is_told_once_and_counted_in_no_part(tmp_path):
    path = with_a_gap(tmp_path)
    said = said_of(path)
    opening = "By round 5 the utility of the shared model went from 0.1000 to 0.6500; +0.5000 of that came in"
    assert f"{opening} rounds with reports. Round 4 was summed, but nobody reported on it:" in said
    assert "The first two of four rounds with reports brought 60% of their gain." in said
    assert "there are no reports between" not in said
    assert "do not join up" not in said
    assert "on the same test samples, round" not in said


def test_a_gap_that_no_known_round_explains_is_told(tmp_path):
    said = said_of(with_a_gap(tmp_path, jump=0.01))
    assert "the rounds do not join up" in said
    assert "round 1 ends at 0.3 and round 2 begins at 0.31" in said


def test_notes_beside_the_ranking_are_for_those_who_read_it(tmp_path):
    part = r"The shares follow the rule(.*?)2 How did it build up"
    path = file_of(tmp_path, [-0.1, -0.1, -0.1], silent=("Eve",))
    (about,) = re.findall(part, unescape(said_of(path)))
    assert "nobody's contribution is above zero, so there is nothing to divide by" in about
    assert "member 'Eve' was in the sum but sent no report: round 1" in about
    for odd in ("client", "1e-12", "pot ", "FP"):
        assert odd not in about
    reversed_ = file_of(tmp_path, [-0.1, -0.1, 0.05])
    assert any("FP" in text for text in facts_of(reversed_).notes)
    (about,) = re.findall(part, unescape(said_of(reversed_)))
    assert "FP" not in about
    assert "FP in round 1: reversed" in said_of(reversed_)


def test_a_run_that_is_not_over_says_so_first(run_folder):
    facts = facts_of(run_folder)
    assert "not over" not in render(facts)
    settings = {**facts.source.settings, "training": {**facts.source.settings["training"], "rounds": 30}}
    text = render(replace(facts, source=replace(facts.source, settings=settings)))
    assert "Contributions of the members, after 3 of 30 rounds</p>" in text
    assert "After 3 of 30 rounds (the run is not over) the expected accuracy" in text


@pytest.fixture
def folder(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


@pytest.mark.long
def test_a_decision_is_shown_before_what_another_would_pay(folder):
    record_decision(folder, Terms("1000.00", "accuracy", on_undefined="equal"))
    made, _ = record_decision(folder, Terms("25000.00", "expected-accuracy", rule="fenced", cap=0.5))
    said = said_of(folder)
    assert said.index("1 What is each member paid?") < said.index("2 Who contributed what")
    opening, decided = said.split("1 What is each member paid?")
    decided, other = decided.split("What would another budget or rule pay?")
    assert (
        "Decision 2 is in force: it divides 25,000.00 EUR by the rule “fenced”, after three rounds."
        in opening
    )
    most = max(made.paid, key=made.paid.get)
    assert f"{most} is paid most: {made.paid[most]:,.2f} EUR of 25,000.00 EUR" in opening
    assert "This was a rehearsal: one process held all keys and signed for every member." in opening
    assert f"The decision is record {made.record} of the ledger and replaces decision 1." in decided
    assert "It pays by expected accuracy (ALPHA)" in decided
    assert "By the terms of this decision, no member has a share above 50.00%." in decided
    for name, amount in made.paid.items():
        assert re.search(
            rf"{name} {amount:,.2f} [\d,.]+-[\d,.]+ {made.shares[name]:.2%} \S*\d\.\d|added", decided
        )
    assert "budget 25,000.00" in decided
    assert "This does not change the decision." in other
    hidden = said_of(folder, pseudonyms=True)
    assert "Decision 2 is in force: it divides 25,000.00" in hidden
    amounts = re.findall(r"Member [A-E] ([\d,]+\.\d\d) ", hidden.split("What is each member paid?")[2])[:5]
    assert sorted(Decimal(one.replace(",", "")) for one in amounts) == sorted(made.paid.values())


def calculator(text):
    """Member -> amount and share that the page opens with."""
    table = text.split('<table id="payouts"')[1].split("</table>")[0]
    found = re.findall(r'>([^<]+)</th>.*?<td class="amount"[^>]*>([\d,.]+)<.*?"share">([\d.]+%)<', table)
    return {name: rest for name, *rest in found}


@pytest.mark.long
@pytest.mark.parametrize(
    "terms",
    [
        {"floor": 0.1, "cap": 0.5},
        {"score": "LOO"},
        {"utility": "accuracy", "on_undefined": "equal"},
        {"missing": "own-mean"},
    ],
)
def test_the_page_divides_as_the_decision_did(folder, terms):
    made, _ = record_decision(folder, Terms("1000.00", **{"utility": "expected-accuracy", **terms}))
    paid = {name: [f"{amount:,.2f}", f"{made.shares[name]:.2%}"] for name, amount in made.paid.items()}
    assert calculator(page(folder)) == paid
    assert "gives the same amounts under the terms of the decision" in said_of(folder)


@pytest.mark.long
def test_a_smallest_and_a_largest_share_are_told_with_who_pays_for_them(folder):
    record_decision(folder, Terms("1000.00", "expected-accuracy", floor=0.1, cap=0.5))
    said = said_of(folder)
    assert (
        "also among members at zero. By the terms of this decision, no member who reported has a "
        "share below 10.00%, whatever the score, and no member has a share above 50.00%. The others gain or "
        "lose the difference in proportion."
    ) in said
    assert said.count("no member who reported has a share below 10.00%") == 2  # decision and calculator
    assert "The score and the smallest and largest share are as decided." in said
    other = "The shares follow the rule “fenced”, not the decision in part 1, which has other terms."
    assert other in said
    assert "By chance alone" not in said  # that is of shares without bounds


def test_what_is_paid_by_is_marked_and_shown(folder):
    made, _ = record_decision(folder, Terms("1000.00", "accuracy", score="LOO", on_undefined="equal"))
    said = said_of(folder)
    assert "It pays by accuracy (LOO: what the shared model loses without a member’s update);" in said
    assert (
        "It does not pay by the contribution of part 2, but by LOO by accuracy; the table shows that." in said
    )
    for name, value in zip(made.total.clients, made.total.raw, strict=True):
        assert f"{made.shares[name]:.2%} LOO {value:+.4f}" in said.split(f"{name} {made.paid[name]:,.2f}")[1]
    assert "accuracy (paid, by LOO)" in said
    assert "expected accuracy (paid" not in said
    assert "The line in front is expected accuracy; members are paid by accuracy." in said
    assert "the paid measure" not in said


def test_rewards_write_the_page_anew_where_there_is_one_of_ours(folder):
    def pay(budget):
        return CliRunner().invoke(app, ["rewards", str(folder), "--budget", budget], catch_exceptions=False)

    path = folder / "page.html"
    assert "page.html" not in pay("1000.00").output
    assert not path.exists()
    path.write_text(page(folder, pseudonyms=True), encoding="utf-8")
    assert f"{path} shows this decision" in pay("2000.00").output
    text = path.read_text(encoding="utf-8")
    assert text == page(folder, pseudonyms=True)
    assert "Decision 2 is in force: it divides 2,000.00" in text
    path.write_text("<p>mine</p>")
    assert f"{path} is no page of fedmerit and was left as it is" in pay("3000.00").output
    assert path.read_text() == "<p>mine</p>"


def test_without_jinja_a_decision_says_that_the_page_is_old(folder, monkeypatch):
    import sys

    path = folder / "page.html"
    path.write_text(page(folder), encoding="utf-8")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    said = CliRunner().invoke(app, ["rewards", str(folder), "--budget", "1000"]).output
    assert f"{path} is older than this result" in said
    assert f"to write it again: pip install 'fedmerit[page]', then fedmerit page {folder}" in said


def test_a_name_with_a_comma_does_not_read_as_two(tmp_path):
    names = ("A", "Lübeck, Campus 2", "C")
    path = file_of(tmp_path, [0.1, 0.1, 0.1], names=names, silent=("Bonn, Radiology", "Eve"), se=0.01)
    said = said_of(path)
    assert "A, “Lübeck, Campus 2” and C are statistically indistinguishable." in said
    assert "no report from “Bonn, Radiology”, Eve" in said


def test_small_utilities_are_not_all_zero(tmp_path):
    rounds = [
        Reports(
            empty=0.1, grand=0.10003, alone=[0.10002, 0.10001], without=[0.10001, 0.10002],
            clients=("A", "B"), slice="s", round=1,
        )
    ]  # fmt: skip
    path = tmp_path / "r.csv"
    path.write_text(as_csv(document(rounds)))
    said = said_of(path)
    assert "rose by 0.0000300, from 0.1000000 to 0.1000300." in said
    assert "A +0.0000200 1 66.7%" in said
    assert "The contributions add up to +0.0000300, which is 100% of the model’s gain of +0.0000300." in said
    assert "+0.0000 " not in said
