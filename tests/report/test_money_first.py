"""A page with a decision is about money first, and says below what it says above; statements as HTML."""

import json
import re
import shutil
from dataclasses import replace
from decimal import Decimal

import pytest

from command_line import call
from fedmerit.errors import FedmeritError, InputError
from fedmerit.files.documents import document
from fedmerit.ledger.decisions import Terms
from fedmerit.notes import speaking
from fedmerit.report.comparison import compared
from fedmerit.report.facts import Facts
from fedmerit.report.page import text
from fedmerit.report.page.html import facts_of, page, page_path, paid_table, render_comparison
from fedmerit.report.payment import rules_of
from fedmerit.report.source import read_source
from fedmerit.report.statement import MOST_LINES, as_dict, as_html, as_markdown
from fedmerit.report.text import amounts_text, dashed, money_text, signed_by, sure_share_text
from fedmerit.scoring.amounts import amount_of
from fedmerit.settings import Heading, file_part
from fedmerit.verify import verify_folder
from linear_federation import LIAR, Federation
from runs import facts_as_decided, read_run, record_decision, run_in
from sample import of_alpha, read_aloud, rounds, write_csv, write_scores
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
    assert "This was a rehearsal: one process held all keys" in said
    assert html.count("<table id=") == html.count('id="payouts"') == 1
    facts = facts_of(folder)
    why = text.reasons(facts)
    for one in paid_table(facts, rules_of(facts)[0])[1]:
        amounts = f"{one.amount:,} {dashed(amounts_text(one.amount_span))}"
        assert f"{one.client} {amounts} {one.share:.2%} {why[one.client]}" in said


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


def test_what_opens_the_page_says_nothing_against_the_headline():
    """Three pairs out of ten indistinguishable ones differ visibly, and the headline says: about equally."""
    one = of_alpha([0.20, 0.19, 0.18, 0.17, 0.19], 0.9, names=NAMES, se=0.02, slice="1", round=1)
    facts = decided([one], Terms("1000", "x", rule="fair"))
    assert "share about equally" in text.title(facts)
    (told,) = [sentence for sentence in text.opening(facts) if "differ" in sentence]
    assert told.startswith(
        "Of the members who are statistically indistinguishable, A (21.5%) and D (18.3%) differ most"
    )


@pytest.mark.parametrize(
    ("se", "said"), [(None, "; how sure that is, nobody can say"), (0.3, ", but not surely")]
)
def test_without_standard_errors_nothing_is_called_unsure(tmp_path, se, said):
    path = write_csv(tmp_path, of_alpha([0.3, 0.2, -0.1], 0.4, names="ABC", se=se, slice="1", round=1))
    assert text.reasons(facts_of(path))["C"] == f"-0.1000: below zero{said}"


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


# --------------------------------------------------------------- what comes first agrees with what is below


SILENT = [("client-4", number, "report") for number in (1, 2)]


def decided_on(folder, heading=None, **terms):
    paid_by = run_in(folder).config.scoring.utilities[0]
    return record_decision(folder, Terms("1000.00", paid_by, **terms), heading=heading or Heading())[0]


def statement_facts(folder, made):
    facts = facts_as_decided(folder)
    assert facts.decision.number == made.number
    return facts


def test_a_headline_counts_members_without_a_score(tmp_path):
    folder = Federation(tmp_path, 5, 2, lost=SILENT).run().folder
    decided_on(folder, rule="equal")
    facts = facts_of(folder)
    assert facts.unscored == ("client-4",)
    alike = "Four of five members are paid the same: 250.00\xa0EUR each"
    assert text.title(facts) == f"{alike}; client-4 gets nothing"
    with speaking("de"):
        assert text.title(facts).endswith(": je 250,00\xa0EUR; client-4 erhält nichts")
    _, lines = paid_table(facts, rules_of(facts)[0])
    assert {line.client for line in lines if not line.amount} == {"client-4"}


def test_a_page_has_one_currency(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    decided_on(folder)
    html = page(folder, heading=Heading(currency="EUR"))
    said = re.sub(r"<[^>]*>", " ", html.split("<body>")[1].split("<script")[0]).replace("\u00a0", " ")
    opening = said[: said.index("What would another budget")]
    assert len(re.findall(r"\d\.\d\d EUR", opening)) >= 4  # title and opening
    assert "(EUR)" in opening
    decided_on(folder, Heading(currency="CHF"))
    with pytest.raises(InputError, match="decision 2 is in CHF, got EUR"):
        page(folder, heading=Heading(currency="EUR"))
    assert "CHF" in page(folder, heading=Heading(currency="CHF"))


@pytest.mark.parametrize("turned", [True, False])
def test_a_reason_claims_no_more_dispute_than_the_part_on_other_measures(tmp_path, turned):
    path = write_scores(tmp_path)
    told = json.loads(path.read_text())
    other = rounds(utility="accuracy", turn=True, se=0.004 if turned else 0.5)
    path.write_text(json.dumps({**told, "companions": {"accuracy": document(other)}}))
    facts = facts_of(path)
    reason, below = text.reasons(facts)["West"], " ".join(text.companions(facts))
    assert ("contradicts none" in below) == (not turned)
    assert ("but improved it by other measures" in reason) == turned
    assert ("which other measures do not confirm" in reason) == (not turned)


def test_who_signed_a_rehearsal_is_said_as_the_ledger_says_it(run_folder, tmp_path):
    facts = facts_of(run_folder)
    assert any(line.code == "heads" and line.values["signed"] == 5 for line in facts.source.checks)
    assert signed_by(facts).endswith("signed for every member, so nobody owes anything.")
    plain = Federation(tmp_path, 4, 2, masks=False).run().folder
    assert signed_by(facts_of(plain)) == "Nobody signed: the run had secure aggregation off."
    made = decided_on(plain)
    assert "Nobody signed" in as_markdown(statement_facts(plain, made), "client-0")


def test_a_liar_is_named_in_its_reason_and_its_statement(tmp_path):
    run = Federation(tmp_path, 5, 2, settings={"scoring": {"method": "settled"}})
    run.stating(7, key="2")
    run.run()
    made = decided_on(run.folder, score="PHI")
    page_facts = facts_of(run.folder)
    assert text.title(page_facts).startswith(f"{LIAR} is proven to have stated a false number. ")
    with speaking("de"):
        assert text.title(page_facts).startswith(f"{LIAR} hat nachweislich eine falsche Zahl angegeben. ")
    why = text.reasons(page_facts)
    assert why[LIAR].endswith("; stated a false number; loses 100% of its share")
    assert not any("false" in reason for name, reason in why.items() if name != LIAR)
    facts = statement_facts(run.folder, made)
    said = as_markdown(facts, LIAR)
    assert "Your contribution, as the masks of the run prove it (PHI)" in said
    assert "as you stated it" not in said
    assert "you made a statement. Not all of it was true" in said
    assert "you stated what it is worth" not in said
    assert facts.decision.shares[LIAR] == 0
    apart = (facts.apart_from(name) for name in facts.total.clients)
    assert LIAR not in {other for pair in apart for others in pair for other in others}
    assert "## Why you get this amount" in said
    other = as_markdown(facts, "client-0")
    assert "as you stated it" in other
    assert "your update was in the sum, and you stated what it is worth." in other


@pytest.mark.parametrize("n", [2, 3])
def test_of_two_members_nobody_is_suspected(tmp_path, n):
    alpha = [0.3, -0.1, 0.3][:n]
    path = write_csv(tmp_path, of_alpha(alpha, 0.5, names="ABC"[:n], se=0.001, round=1))
    assert ("talk to this member" in " ".join(text.lede(facts_of(path))).lower()) == (n == 3)


def test_a_statement_names_its_run_and_stays_short(tmp_path):
    run = Federation(tmp_path, 4, 3, settings={"scoring": {"method": "settled"}}).run()
    facts = statement_facts(run.folder, decided_on(run.folder, score="PHI"))
    assert f"run {facts.source.run.id}" in as_markdown(facts, "client-0").split("##")[0]
    account = facts.source.account
    assert as_html(facts, "client-0").count("<tr>") == 1 + 3
    many = replace(account)
    many.__dict__["rounds"] = tuple(replace(account.rounds[0], round=k) for k in range(1, MOST_LINES + 2))
    longer = Facts(replace(facts.source, account=many), score="PHI")
    html = as_html(longer, "client-0")
    assert html.count("<tr>") == 2
    assert "all rounds together" in html
    stated = sum(int(line["stated"]) for line in as_dict(longer, "client-0")["settlement"]["rounds"])
    assert f"<td>{stated:,}</td>" in html


def test_a_page_that_compares_runs_has_their_heading(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "config.toml").write_text('[report]\ntitle = "Nodules"\n')
    path, other = write_scores(first), write_scores(second, turn=True)
    assert read_source(first).heading.title == "Nodules"
    assert '<p class="identity"></p>' in render_comparison(compared([path, other]))  # files alone have none
