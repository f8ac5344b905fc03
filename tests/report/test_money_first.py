"""A page with a decision is about money first; title, currency, language; long tables; statements as HTML."""

import json
import re
import shutil
from dataclasses import replace
from decimal import Decimal

import pytest

from command_line import call
from fedmerit.errors import FedmeritError, InputError
from fedmerit.ledger.decisions import Terms
from fedmerit.notes import speaking
from fedmerit.report.page import text
from fedmerit.report.page.html import facts_of, page, page_path, paid_table
from fedmerit.report.payment import rules_of
from fedmerit.report.statement import as_dict, as_html, as_markdown
from fedmerit.report.text import money_text, sure_share_text
from fedmerit.scoring.amounts import amount_of
from fedmerit.settings import Heading, file_part
from fedmerit.verify import verify_folder
from runs import facts_as_decided, read_run, record_decision
from sample import of_alpha, read_aloud, write_scores
from tests.report.test_statements import decided

HEADING = Heading("Lung nodules", "2026-11-30", "EUR")


@pytest.fixture
def folder(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "autumn")


def decide(folder, budget="1000.00", heading=HEADING, **terms):
    return record_decision(folder, Terms(budget, "expected-accuracy", **terms), heading=heading)


# ---------------------------------------------------------------------------------------------------- money


def test_title_opening_and_first_part_are_about_money(folder):
    made, new = decide(folder)
    assert new
    html = page(folder)
    said, best = read_aloud(html), max(made.paid, key=made.paid.get)
    headline = re.search(r"<h1>(.*?)</h1>", html, flags=re.S)[1].replace("\u00a0", " ")
    assert headline.endswith("; Dale gets nothing")
    assert f"{best} is paid most" not in headline  # others are statistically indistinguishable
    glance = "budget 1,000.00 EUR members paid 4 of 5 approved by 0 of 5"
    order = ("1 What is each member paid?", "2 Who signed, and who approved?", "3 Who contributed what")
    assert ["Decision 1 is in force", glance, *order] == sorted(
        ("Decision 1 is in force", glance, *order), key=said.index
    )
    assert "No member has approved decision 1 yet. This was a rehearsal: one process held all keys" in said
    assert html.count("<table id=") == html.count('id="payouts"') == 1
    facts = facts_of(folder)
    for line in paid_table(facts, "0", rules_of(facts)[0])[0]:
        assert f"{line.client} {line.amount} {line.amount_span} {line.share} {line.why}" in said


NAMES = tuple("ABCDE")
ALIKE, NOTHING = "and are statistically indistinguishable", "E gets nothing"


@pytest.mark.parametrize(
    ("alpha", "se", "said"),
    [
        ([0.20, 0.19, 0.18, 0.17, -0.1], 0.001,
         f"Four of five members share about equally: 230 to 270 each; {NOTHING}"),
        ([0.21, 0.20, 0.20, 0.19, 0.20], 0.001, "All five members share about equally: 190 to 210 each"),
        ([0.40, 0.38, 0.10, 0.05, -0.1], 0.02, f"A and B are paid most, 409 to 430 each, {ALIKE}; {NOTHING}"),
        ([0.30, 0.29, 0.28, 0.27, 0.05], 0.02,
         f"Four of five members are paid most, 227 to 252 each, {ALIKE}"),
        ([0.40, 0.20, 0.10, 0.05, -0.1], 0.001, f"A is paid most: 533 of 1000; {NOTHING}"),
        ([0.40, 0.38, 0.10, 0.05, -0.1], None, f"A is paid most: 430 of 1000; {NOTHING}"),
    ],
)  # fmt: skip
def test_a_headline_calls_nobody_first_among_indistinguishable_members(alpha, se, said):
    one = of_alpha(alpha, 0.8, names=NAMES, se=se, slice="1", round=1)
    told = text.title(decided([one], Terms("1000", "x", rule="fair")))
    assert re.sub(r"[\d,]+\.\d\d", lambda one: f"{float(one[0].replace(',', '')):.0f}", told) == said


@pytest.mark.parametrize(
    ("share", "interval", "said"),
    [
        (0.207, (0.201, 0.219), "20.7% (20-22%)"),
        (0.1663, (0.1651, 0.1675), "16.6% (16.5-16.8%)"),  # not 16.6% (17-17%)
        (0.0, (0.0, 0.0), "0.0% (0-0%)"),
        (0.25, None, "25.0%"),
    ],
)
def test_a_share_lies_within_the_interval_beside_it(folder, share, interval, said):
    standing = replace(facts_of(folder).standings[0], share=share, share_interval=interval)
    assert sure_share_text(standing) == said


def test_every_member_has_one_reason(folder):
    decide(folder)
    facts = facts_of(folder)
    why = text.reasons(facts)
    assert set(why) == set(facts.source.clients)
    assert re.fullmatch(r"-[\d.]+ points: made the model worse.*", why["Dale"])
    assert re.fullmatch(r"added [\d.]+ points; counted in 67% of the rounds", why["Elm"])
    assert re.fullmatch(r"added [\d.]+ points", why["Castle"])


def test_all_alike_and_nobody_have_headlines_of_their_own(folder):
    same, _ = decide(folder, rule="equal")
    assert text.title(facts_of(folder)) == "All five members are paid the same: 200.00\u00a0EUR each"
    assert same.heading == HEADING
    decide(folder, "0.00", rule="equal")
    assert text.title(facts_of(folder)) == "Nobody is paid: all of the 0.00\u00a0EUR stays unpaid"


def test_without_a_decision_contributions_are_in_points(run_folder):
    said = read_aloud(page(run_folder))
    assert "1 Who contributed what" in said
    assert re.search(r"the expected accuracy of the shared model rose by \d+\.\d+ points, from \d", said)
    assert "contribution, points" in said
    assert not re.search(r"[+-]0\.\d{4}\b", said.split("A Appendix")[0])


def test_a_sign_stands_where_the_language_puts_it_and_can_be_pasted_back():
    told = money_text(Decimal("5000.00"), "$"), money_text(Decimal("5000.00"), "EUR")
    assert told == ("$5,000.00", "5,000.00\u00a0EUR")
    with speaking("de"):
        german = money_text(Decimal("5000.00"), "$")
    assert german == "5.000,00\u00a0$"
    for one in (*told, german):
        assert amount_of(one)[0] == Decimal("5000.00")


def test_no_line_breaks_within_a_number_and_its_sign(run_folder):
    body = page(run_folder).split("<body>")[1].split("<script")[0]
    assert not re.search(r"\d [%±]|± \d", body)
    assert "95%" in body
    german = page(run_folder, language="de").split("<body>")[1].split("<script")[0]
    assert not re.search(r"\d [%±]|± \d|95-%", german)
    assert "95\u2011%\u2011Intervall" in german


# --------------------------------------------------------------------------------------------- contradiction


def test_a_headline_that_other_measures_dispute_says_so_in_the_same_sentence(tmp_path):
    facts = facts_of(write_scores(tmp_path, companion=True))
    disputed = "West made the model worse by expected accuracy, but improved it by accuracy"
    assert text.title(facts) == f"North contributed most; {disputed}"
    assert facts.otherwise("West") == (("accuracy",), ())
    undisputed = facts_of(write_scores(tmp_path))
    assert text.title(undisputed) == "North contributed most; West made the model worse"


def test_a_statement_says_it_too(folder):
    decide(folder)
    facts = facts_as_decided(folder)
    assert facts.harmful == ["Dale"]
    turned, unconfirmed = facts.otherwise("Dale")
    said, told = as_markdown(facts, "Dale"), as_dict(facts, "Dale")
    assert told["made_worse"]
    assert set(told["disagreeing"]) == {*turned, *unconfirmed}
    assert ("by expected accuracy, " in said) == bool(turned or unconfirmed)
    assert "Your updates made the model worse" in said
    assert not as_dict(facts, "Castle")["made_worse"]
    assert "made the model worse" not in as_markdown(facts, "Castle")


# ------------------------------------------------------------------------------------- title, currency, names


def test_a_decision_records_its_heading_and_a_repeated_one_is_not_new(folder):
    made, _ = decide(folder)
    assert not decide(folder)[1]
    assert decide(folder, heading=Heading("Another", currency="EUR"))[1]
    unnamed, new = decide(folder, heading=None)
    assert new
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", unnamed.heading.date)
    assert not decide(folder, heading=None)[1]  # also on another day: nobody named one
    assert [*verify_folder(folder)]
    assert read_run(folder)[1][0].heading == made.heading == HEADING


def test_a_decision_records_whom_to_ask_until_when(folder):
    asked = ("--contact", "office@example.org", "--objections", "2026-12-31")
    assert call("rewards", folder, "--budget", "1000", "--contact", "two\nlines").exit_code == 1
    assert call("rewards", folder, "--budget", "1000", *asked).exit_code == 0
    heading = read_run(folder)[1][0].heading
    assert (heading.contact, heading.objections) == (asked[1], asked[3])
    for path in (folder / "statements").glob("*.json"):
        statement = json.loads(path.read_text())
        assert (statement["contact"], statement["objections"]) == (asked[1], asked[3])
    assert "payouts: decision 1 " in " ".join(verify_folder(folder))


def test_a_heading_that_nobody_could_have_written_is_refused():
    from fedmerit.ledger.kinds import RecordedHeading, converted

    for wrong in (
        {"title": ""},
        {},
        {"owner": "x"},
        {"date": "30.11.2026"},
        {"objections": "soon"},
        {"currency": 3},
        "x",
        ["x"],
    ):
        with pytest.raises(FedmeritError):
            Heading.of(converted(wrong, RecordedHeading))
    with pytest.raises(
        InputError, match=r"^currency: expected a code such as EUR, or a sign such as \$, got"
    ):
        Heading(currency="Euro")


def test_two_pages_differ_at_a_glance_and_in_their_names(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "Winter 2")
    titled = page(folder, heading=HEADING)
    assert "<title>Lung nodules, autumn – " in titled
    said = read_aloud(titled)
    assert "Lung nodules 30 November 2026 run autumn Rehearsal" in said
    assert "run Winter 2 Rehearsal" in read_aloud(page(other))
    assert page_path(folder, HEADING).name == "page-lung-nodules-autumn.html"
    assert page_path(other, HEADING).name == "page-lung-nodules-winter-2.html"
    assert page_path(other, Heading()).name == "page-winter-2.html"
    assert file_part("Größe: 3/4") == "grosse-3-4"


def test_the_commands_take_title_currency_and_language(folder):
    named = ("--currency", "EUR", "--title", "Nodules")
    assert call("rewards", folder, "--budget", "1000", *named, "--language", "de").exit_code == 0
    statement = json.loads((folder / "statements" / "Castle.json").read_text())
    assert (statement["title"], statement["currency"], statement["rehearsal"]) == ("Nodules", "EUR", True)
    assert '<html lang="de">' in (folder / "statements" / "Castle.html").read_text(encoding="utf-8")
    assert call("page", folder, "--language", "de").exit_code == 0
    html = (folder / "page-nodules-autumn.html").read_text(encoding="utf-8")
    assert '<html lang="de"' in html
    assert "erhalten am meisten" in html or "etwa gleich viel" in html
    assert call("rewards", folder, "--budget", "2000", *named).exit_code == 0
    again = (folder / "page-nodules-autumn.html").read_text(encoding="utf-8")
    assert "2.000,00\u00a0EUR" in again  # still German
    assert "--date: expected a day" in str(call("page", folder, "--date", "tomorrow").exception)


# ------------------------------------------------------------------------------------------------- statements


def test_a_statement_is_also_html_that_loads_nothing_and_says_the_amount_first(folder):
    made, _ = decide(folder)
    facts = facts_as_decided(folder)
    html, markdown = as_html(facts, "Castle"), as_markdown(facts, "Castle")
    amount = f"{made.paid['Castle']:,.2f}\u00a0EUR"
    assert f'<p class="lead"><strong>{amount}</strong> of 1,000.00\u00a0EUR' in html
    assert "size: A4" in html
    assert not re.search(r"(src|href)=|url\(|@import|<script", html)
    plain = re.sub(r"[*`#]|^- |^    ", "", markdown, flags=re.MULTILINE)
    said = read_aloud(html.split("<main>")[1])
    identity = f"Lung nodules; 30 November 2026; run {facts.source.run.id}; Rehearsal "
    assert said.startswith(f"Statement for Castle {identity}")
    assert re.sub(r" ([.,])", r"\1", said) == " ".join(plain.split())


def test_a_name_cannot_write_html_into_a_statement(tmp_path):
    from linear_federation import Federation

    names = ["<b>bold", "& co", "C", "D"]
    federation = Federation(tmp_path, names, rounds=2).run()
    record_decision(federation.folder, Terms("100.00", federation.config.scoring.utilities[0]))
    html = as_html(facts_as_decided(federation.folder), "<b>bold")
    assert "<b>" not in html
    assert "&lt;b&gt;bold" in html


# --------------------------------------------------------------------------------------------------- German


def test_numbers_and_dates_are_in_german_form(folder):
    decide(folder, "12345.60")
    html = page(folder, language="de")
    said = read_aloud(html).replace("\u00a0", " ")
    assert "Antrieb: ein einziger Prozess" in said
    assert "30. November 2026" in said
    assert "12.345,60 EUR" in said
    assert re.search(r"[+-]\d+,\d+ ± \d+,\d+ ", said)
    assert not re.search(r"\d\.\d+ ?%|\d\.\d+ Punkte", said)
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, flags=re.S)[1])
    assert data["charts"]["contribution"]["config"]["locale"]["number"]["decimal"] == ","
    assert (data["words"]["decimal"], data["words"]["thousands"]) == (",", ".")
    assert 'value="12345,60"' in html
