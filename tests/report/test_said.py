"""What the page says first: no winner where there is none, everybody on the roster, what was decided."""

import math
import re
import shutil
from dataclasses import replace

import pytest

from command_line import call
from fedmerit.files.documents import as_json, document
from fedmerit.ledger.decisions import Terms
from fedmerit.report.facts import Facts
from fedmerit.report.page import text as words
from fedmerit.report.page.html import facts_of, page, render
from fedmerit.scoring.uncertainty import TRAINING
from runs import record_decision
from sample import changed, of_alpha, read_aloud, write_csv, write_scores


def said_of(path):
    return read_aloud(page(path))


ONE_TRAINING = math.hypot(1, TRAINING)
"""How much wider intervals are for the allowance that one training needs."""


def file_of(folder, alpha, *, names=("A", "B", "C"), se=None, silent=(), slices=("s",), starts=(0.1,)):
    """Rounds with these contributions each, on these slices, beginning at these utilities; gain 0.2 each."""
    places = enumerate(zip(slices, starts, strict=True), start=1)
    more = {"names": names, "silent": silent, "se": se}
    rounds = [of_alpha(alpha, 0.2, start=start, slice=one, round=k, **more) for k, (one, start) in places]
    return write_csv(folder, *rounds)


@pytest.mark.parametrize(
    ("alpha", "expected", "place"),
    [
        ([0.1, 0.1, 0.1], "All three members contributed the same",
         "All three members have the same contribution, +0.1000."),
        ([-0.1, -0.2, -0.3], "No member improved the model", None),  # and that is no sum of a gain
        ([0, 0, 0], "No member improved the model", None),
        ([0.1, 0.1, 0], "A and B contributed most, each the same amount",
         "A and B share the first place with +0.1000."),
        ([0.1, 0, 0], "A contributed most", "B and C share the last place with +0.0000."),
        ([0.1, 0.1], "Both members contributed the same",
         "Both members have the same contribution, +0.1000."),
    ],
)  # fmt: skip
def test_there_is_no_winner_where_there_is_none(tmp_path, alpha, expected, place):
    facts = facts_of(file_of(tmp_path, alpha, names=("A", "B", "C")[: len(alpha)]))
    assert words.headline(facts) == f"{expected}; without standard errors nobody can say how sure this is"
    if place is None:  # nobody is praised or accused by numbers that contradict themselves
        assert words.lede(facts) == [
            "Over one round the utility of the shared model rose by 0.2000, from 0.1000 to 0.3000."
        ]
    else:
        assert place in words.lede(facts)


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
        ([0.03, 0, -0.03],
         "A is first, but one other member is statistically indistinguishable; C made the model worse"),
        ([0.0275, 0, 0, 0, 0, -0.0275], "All six members are statistically indistinguishable"),  # not F
    ],
)  # fmt: skip
def test_the_headline_is_sure_of_all_that_it_says_at_once(tmp_path, alpha, expected):
    facts = facts_of(file_of(tmp_path, alpha, names=tuple("ABCDEF"[: len(alpha)]), se=0.01 / ONE_TRAINING))
    assert words.headline(facts) == expected
    printed = call("score", tmp_path / "reports.csv").stdout.splitlines()
    worse = [line for line in printed if line.endswith(" made the model worse")]
    accused = [part for part in expected.split("; ") if part.endswith(" made the model worse")]
    doubted = any(line.startswith("WARNING: ") for line in printed)  # numbers that accuse nobody
    assert worse == ([] if doubted else accused)


def test_the_terminal_names_all_that_made_the_model_worse(tmp_path):
    path = file_of(tmp_path, [0.5, 0.1, -0.1, -0.1, -0.1, -0.1, -0.1], names=tuple("ABCDEFG"), se=0.01)
    assert words.headline(facts_of(path)).endswith("; C, D and E made the model worse; so did 2 more")
    printed = call("score", path).stdout
    assert "C, D, E, F and G made the model worse" in printed.splitlines()
    assert "made the model worse" not in call("score", path, "--score", "LOO").stdout


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
    assert re.search(r"Eve 0\.00% never reported", said)


@pytest.mark.parametrize(
    ("alpha", "liars", "expected"),
    [
        ([0.1] * 5, "E", "All four other members contributed and are statistically"),
        ([0.1] * 4 + [0.01], "A", "B, C and D contributed most and are statistically"),
        ([0.1] * 5 + [0.01], "A", "Four of the five other members contributed most and are"),
        ([0.1, 0.1, 0.01], "A", "A and B contributed most and are"),  # B does not lead alone
        ([0.1, 0.1, 0.01], "C", "Both other members contributed and are"),
    ],
)
def test_a_proven_liar_is_not_counted_among_the_best(tmp_path, monkeypatch, alpha, liars, expected):
    facts = facts_of(file_of(tmp_path, alpha, names=tuple("ABCDEF"[: len(alpha)]), se=0.001))
    monkeypatch.setattr(Facts, "liars", property(lambda self: tuple(liars)))
    monkeypatch.setattr(Facts, "doubts", ())
    assert words.headline(facts).startswith(expected)
    assert words.title(facts).startswith(f"{liars} is proven to have stated a false number. {expected}")


WARNING = "check the reports before you pay by this measure"
REFUSAL = "Do not pay by these numbers until somebody has checked them"


def test_a_silent_member_is_no_fault_of_the_measure(tmp_path):
    """Three members of 0.05 each in a gain of 0.2: three quarters, whether or not there was a fourth."""
    alone = words.adds_up(facts_of(file_of(tmp_path, [0.05] * 3)))
    assert "75% of the model’s gain of +0.2000. The sum is too far from the gain" in alone
    assert WARNING in alone
    said = words.adds_up(facts_of(file_of(tmp_path, [0.05] * 3, silent=("Eve",))))
    assert said.endswith(
        "This sum does not include what Eve added in rounds without a report from this member."
    )


@pytest.mark.parametrize(("share", "warns"), [(0.05, False), (0.02, True)])
def test_the_measure_is_judged_by_the_rounds_that_everybody_reported_on(tmp_path, share, warns):
    whole = of_alpha([share] * 4, 0.2, start=0.1, names="ABCD", slice="s", round=1)
    partly = of_alpha([0.01] * 3, 0.2, start=0.3, names="ABC", silent=("D",), slice="s", round=2)
    said = words.adds_up(facts_of(write_csv(tmp_path, whole, partly)))
    assert "This sum does not include what D added in rounds without a report from this member." in said
    assert (REFUSAL in said) is warns
    assert ("In the rounds that everybody reported on, the contributions add up to 40%" in said) is warns


def test_the_leaders_are_all_that_may_be_first_however_many(tmp_path, monkeypatch):
    monkeypatch.setattr("fedmerit.report.facts.MOST_COMPARED", 2)
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
            of_alpha([(high - low) / 2] * 2, high - low, start=low, names="AB", slice="s", round=number)
            for number, low, high in ends
        ]
    )
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
    (about,) = re.findall(part, said_of(path))
    assert "nobody's contribution is above zero, so there is nothing to divide by" in about
    assert "member 'Eve' was in the sum but sent no report: round 1" in about
    for odd in ("client", "1e-12", "pot ", "FP"):
        assert odd not in about
    reversed_ = file_of(tmp_path, [-0.1, -0.1, 0.05])
    assert any("FP" in text for text in facts_of(reversed_).notes)
    (about,) = re.findall(part, said_of(reversed_))
    assert "FP" not in about
    assert "FP in round 1: reversed" in said_of(reversed_)


def test_a_run_that_is_not_over_says_so_first(run_folder):
    facts = facts_of(run_folder)
    assert "not over" not in render(facts)
    longer = replace(facts.source.config, training=replace(facts.source.config.training, rounds=30))
    text = render(replace(facts, source=replace(facts.source, config=longer)))
    assert "Contributions of the members, after 3 of 30 rounds</p>" in text
    assert "After 3 of 30 rounds (the run is not over) the expected accuracy" in text


@pytest.fixture
def folder(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


def calculator(text):
    table = text.split('<table id="payouts"')[1].split("</table>")[0]
    found = re.findall(r'>([^<]+)</th>.*?<td class="amount"[^>]*>([\d,.]+)<.*?"share">([\d.]+%)<', table)
    return {name: rest for name, *rest in found}


@pytest.mark.long
@pytest.mark.parametrize(
    "terms",
    [
        {"floor": 0.1, "cap": 0.5},
        {"score": "LOO"},
        {"utility": "accuracy", "rule": "equal"},
        {"missing": "own-mean"},
    ],
)
def test_the_page_divides_as_the_decision_did(folder, terms):
    made, _ = record_decision(folder, Terms("1000.00", **{"utility": "expected-accuracy", **terms}))
    paid = {name: [f"{amount:,.2f}", f"{made.shares[name]:.2%}"] for name, amount in made.paid.items()}
    paid["unpaid"] = [f"{made.paid.unpaid:,.2f}", f"{made.shares.unpaid:.2%}"]
    assert calculator(page(folder)) == paid
    assert "gives the same amounts under the terms of the decision" in said_of(folder)


def test_what_is_paid_by_is_marked_and_shown(folder):
    made, _ = record_decision(folder, Terms("1000.00", "brier", score="LOO"))
    said = said_of(folder)
    assert "It pays by 1 - Brier/2 (LOO: what the shared model loses without a member’s update);" in said
    assert (
        "It does not pay by the contribution of part 2, but by LOO by 1 - Brier/2; the table shows that."
        in said
    )
    for name, value in zip(made.total.clients, made.total.raw, strict=True):
        assert f"{made.shares[name]:.2%} LOO {value:+.4f}" in said.split(f"{name} {made.paid[name]:,.2f}")[1]
    assert "1 - Brier/2 (paid, by LOO)" in said
    assert "expected accuracy (paid" not in said


def test_rewards_write_the_page_anew_where_there_is_one_of_ours(folder):
    def pay(budget):
        return call("rewards", folder, "--budget", budget)

    path = folder / "page.html"
    assert "page.html" not in pay("1000.00").output
    assert not path.exists()
    path.write_text(page(folder), encoding="utf-8")
    assert f"{path} shows this decision" in pay("2000.00").output
    text = path.read_text(encoding="utf-8")
    assert text == page(folder)
    assert "Decision 2 is in force: it divides 2,000.00" in text
    path.write_text("<p>mine</p>")
    assert f"{path} was not written by fedmerit and was left as it is" in pay("3000.00").output
    assert path.read_text() == "<p>mine</p>"


def test_a_name_with_a_comma_does_not_read_as_two(tmp_path):
    names = ("A", "Lübeck, Campus 2", "C")
    path = file_of(tmp_path, [0.1, 0.1, 0.1], names=names, silent=("Bonn, Radiology", "Eve"), se=0.01)
    said = said_of(path)
    assert "A, “Lübeck, Campus 2” and C are statistically indistinguishable." in said
    assert "no report from “Bonn, Radiology”, Eve" in said


def test_small_utilities_are_not_all_zero(tmp_path):
    one = of_alpha([2e-5, 1e-5], 3e-5, start=0.1, names="AB", slice="s", round=1)
    said = said_of(write_csv(tmp_path, one))
    assert "rose by 0.0000300, from 0.1000000 to 0.1000300." in said
    assert "A +0.0000200 1 66.7%" in said
    assert "The contributions add up to +0.0000300, which is 100% of the model’s gain of +0.0000300." in said
    assert "+0.0000 " not in said
