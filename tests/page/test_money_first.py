"""A page with a decision is about money first; title, currency, language; long tables; statements as HTML."""

import json
import re
import shutil
from dataclasses import replace
from decimal import Decimal
from html import unescape

import pytest
from sample import NAMES, changed, write_scores
from typer.testing import CliRunner

from fedmerit.cli import app
from fedmerit.config import of_folder
from fedmerit.errors import InputError, LedgerError
from fedmerit.heading import Heading, file_part
from fedmerit.ledger.decisions import Terms
from fedmerit.notes import speaking
from fedmerit.report.facts import Facts
from fedmerit.report.page import money, text
from fedmerit.report.page.charts import MOST, ends
from fedmerit.report.page.html import facts_of, page, page_path
from fedmerit.report.statement import as_dict, as_html, as_markdown, facts_as_decided
from fedmerit.report.text import money_text, sure_share_text
from fedmerit.scoring import share_intervals
from fedmerit.scoring.amounts import amount_of
from fedmerit.scoring.files import as_csv, document
from fedmerit.scoring.types import Reports
from fedmerit.verify import read_run, record_decision, verify_folder

HEADING = Heading("Lung nodules", "Rhine hospitals", "2026-11-30", "EUR")


@pytest.fixture
def folder(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "autumn")


def shown(html):
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def decide(folder, budget="1000.00", heading=HEADING, **terms):
    return record_decision(folder, Terms(budget, "expected-accuracy", **terms), heading=heading)


# ---------------------------------------------------------------------------------------------------- money


def test_title_opening_and_first_part_are_about_money(folder):
    made, new = decide(folder)
    assert new
    html = page(folder)
    said, best = shown(html), max(made.paid, key=made.paid.get)
    headline = re.search(r"<h1>(.*?)</h1>", html, flags=re.S)[1].replace("\u00a0", " ")
    assert headline.startswith(f"{best} is paid most: {made.paid[best]:,.2f} EUR of 1,000.00 EUR")
    assert "Dale gets nothing" in headline
    for one in (
        "Decision 1 is in force",
        "(95% interval for test set and training",
        "one process held all keys and signed",
    ):
        assert said.index(one) < said.index("1 What is each member paid?")
    assert said.index("1 What is each member paid?") < said.index("2 Who contributed what")
    assert html.count("<table id=") == html.count('id="payouts"') == 1
    facts = facts_of(folder)
    for line in money.decided(facts).lines:
        assert f"{line.client} {line.amount} {line.amount_span} {line.share} {line.why}" in said


def test_the_opening_says_how_many_are_not_apart_from_the_best_paid(folder, monkeypatch):
    monkeypatch.setattr(Facts, "decided_apart", None)  # that sentence would say more
    made, _ = decide(folder)
    best, facts = max(made.paid, key=made.paid.get), facts_of(folder)
    facts.__dict__["alike"] = {best: ()}
    said = f"{best} is statistically indistinguishable from two other members."
    assert said not in text.opening(facts)
    facts.__dict__["alike"] = {best: ("Bridge", "Elm")}
    assert said in text.opening(facts)
    decide(folder, rule="equal")
    equal = facts_of(folder)
    equal.__dict__["alike"] = {best: ("Bridge", "Elm")}
    assert said not in text.opening(equal)


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
    why = money.reasons(facts)
    assert set(why) == set(facts.source.clients)
    assert re.fullmatch(r"-[\d.]+ points: made the model worse.*", why["Dale"])
    assert re.fullmatch(r"added [\d.]+ points; counted in 67% of the rounds", why["Elm"])
    assert re.fullmatch(r"added [\d.]+ points", why["Castle"])


def test_a_reason_names_the_measure_if_it_has_no_points(tmp_path):
    why = money.reasons(facts_of(write_scores(tmp_path, utility="auc")))
    assert why["North"] == "added 0.2400 (AUC)"
    assert why["West"] == "-0.0600 (AUC): made the model worse"


def test_columns_name_their_unit_where_units_differ(tmp_path):
    said = shown(page(write_scores(tmp_path, companion=True)))
    assert "expected accuracy (paid) accuracy North" in said
    said = shown(page(write_scores(tmp_path, companion=True, utility="auc")))
    assert "AUC (paid) accuracy, points North" in said


@pytest.mark.parametrize("rule", ["fair", "fenced", "impartial", "equal"])
def test_the_opening_says_in_short_what_the_rule_does(folder, rule):
    decide(folder, rule=rule)
    told = text.opening(facts_of(folder))
    assert f"by the rule “{rule}”" in told[0]
    assert re.match("(Each|No|All) .*(share|members)", told[1])


def test_all_alike_and_nobody_have_headlines_of_their_own(folder):
    same, _ = decide(folder, rule="equal")
    assert text.title(facts_of(folder)) == "All five members are paid the same: 200.00\u00a0EUR each"
    assert same.heading == HEADING
    decide(folder, "0.00", rule="equal")
    assert text.title(facts_of(folder)) == "Nobody is paid: all of the 0.00\u00a0EUR stay unpaid"


def test_without_a_decision_contributions_are_in_points(run_folder):
    said = shown(page(run_folder))
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
    made, _ = decide(folder)
    rounds, _, head = read_run(folder)
    facts = facts_as_decided(rounds, of_folder(folder), made, head)
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


def test_a_heading_that_nobody_could_have_written_is_refused():
    from fedmerit.ledger.decisions import _heading

    assert _heading({}) == Heading()
    for wrong in ({"title": ""}, {}, {"owner": "x"}, {"date": "30.11.2026"}, {"currency": 3}, "x", ["x"]):
        with pytest.raises(LedgerError):
            _heading({"heading": wrong})
    with pytest.raises(
        InputError, match=r"^currency: expected a code such as EUR, or a sign such as \$, got"
    ):
        Heading(currency="Euro")


def test_two_pages_differ_at_a_glance_and_in_their_names(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "Winter 2")
    titled = page(folder, heading=HEADING)
    assert "<title>Lung nodules, Rhine hospitals, autumn – " in titled
    said = shown(titled)
    assert "Lung nodules Rhine hospitals 30 November 2026 run autumn Rehearsal" in said
    assert "run Winter 2 Rehearsal" in shown(page(other))
    assert page_path(folder, HEADING).name == "page-lung-nodules-autumn.html"
    assert page_path(other, HEADING).name == "page-lung-nodules-winter-2.html"
    assert page_path(other, Heading()).name == "page-winter-2.html"
    assert file_part("Größe: 3/4") == "grosse-3-4"


def test_pseudonyms_hide_a_title_that_may_name_a_member(folder):
    decide(folder, heading=Heading("Study of Abbey", currency="EUR"))
    assert "Study of" not in page(folder, pseudonyms=True)
    assert "Shown" in page(folder, pseudonyms=True, heading=Heading("Shown"))
    assert "EUR" in page(folder, pseudonyms=True)


def test_the_commands_take_title_currency_and_language(folder):
    def call(*arguments):
        return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=True)

    named = ("--currency", "EUR", "--title", "Nodules")
    assert call("rewards", folder, "--budget", "1000", *named, "--language", "de").exit_code == 0
    statement = json.loads((folder / "statements" / "Castle.json").read_text())
    assert (statement["title"], statement["currency"], statement["rehearsal"]) == ("Nodules", "EUR", True)
    assert '<html lang="de">' in (folder / "statements" / "Castle.html").read_text(encoding="utf-8")
    assert call("page", folder, "--language", "de").exit_code == 0
    html = (folder / "page-nodules-autumn.html").read_text(encoding="utf-8")
    assert '<html lang="de"' in html
    assert "erhält am meisten" in html
    assert call("rewards", folder, "--budget", "2000", *named).exit_code == 0
    again = (folder / "page-nodules-autumn.html").read_text(encoding="utf-8")
    assert "2.000,00\u00a0EUR" in again  # still German
    assert "--date: expected a day" in str(call("page", folder, "--date", "tomorrow").exception)


# ----------------------------------------------------------------------------------------------- many members


@pytest.mark.long
def test_three_hundred_members_stay_readable(tmp_path):
    n = 300
    names = tuple(f"Hospital {k:03d}" for k in range(n))
    rounds = []
    for number in range(1, 6):
        alpha = [0.0001 * (k % 17) for k in range(n)]
        rounds.append(
            Reports(
                empty=0.1, grand=0.2, alone=[0.1 + a for a in alpha], without=[0.2 - a for a in alpha],
                clients=names, se_alpha=[0.00001] * n, round=number, utility="accuracy",
            )
        )  # fmt: skip
    path = tmp_path / "many.csv"
    path.write_text(as_csv(document(rounds)), encoding="utf-8")
    html = page(path)
    assert len(html.encode()) < 3_000_000
    table = html.split('<table id="payouts"')[1].split("</table>")[0]
    assert table.count('class="middle"') == n - 25
    assert table.count('class="fold"') == 1
    assert all(name in table for name in names)
    assert 'class="middle"' not in page(write_scores(tmp_path))
    told = text.together(facts_of(path))
    assert re.fullmatch(
        r"[\d,]+ of the 44,850 pairs of members are statistically indistinguishable; .*", told
    )
    assert len(ends(range(n))) == 25
    assert len(ends(range(MOST))) == MOST


# ------------------------------------------------------------------------------------------------- statements


def test_a_statement_is_also_html_that_loads_nothing_and_says_the_amount_first(folder):
    made, _ = decide(folder)
    rounds, _, head = read_run(folder)
    facts = facts_as_decided(rounds, of_folder(folder), made, head)
    html, markdown = as_html(facts, "Castle"), as_markdown(facts, "Castle")
    amount = f"{made.paid['Castle']:,.2f}\u00a0EUR"
    assert f'<p class="lead"><strong>{amount}</strong> of 1,000.00\u00a0EUR' in html
    assert "size: A4" in html
    assert not re.search(r"(src|href)=|url\(|@import|<script", html)
    plain = re.sub(r"[*`#]|^- |^    ", "", markdown, flags=re.MULTILINE)
    said = shown(html.split("<main>")[1])
    assert said.startswith("Statement for Castle Lung nodules; Rhine hospitals; 30 November 2026 ")
    assert re.sub(r" ([.,])", r"\1", said) == " ".join(plain.split())


def test_a_name_cannot_write_html_into_a_statement(tmp_path):
    from linear_federation import Federation

    names = ["<b>bold", "& co", "C", "D"]
    federation = Federation(tmp_path, names, rounds=2).run()
    made, _ = record_decision(federation.folder, Terms("100.00", federation.config.scoring.utilities[0]))
    rounds, _, head = read_run(federation.folder)
    html = as_html(facts_as_decided(rounds, federation.config, made, head), "<b>bold")
    assert "<b>" not in html
    assert "&lt;b&gt;bold" in html


# --------------------------------------------------------------------------------------------------- German


ENGLISH = """
the of and is are were with without from by for to member members round rounds share shares rule
paid pays payout payouts model worse better rank ranks which who what how sure not this that these
those than each every all nobody somebody they their its it has have had can cannot be been would
reported report reports stated statement ledger record records signed update updates score scores
sum sums gain samples coordinator quality change changed measure measures table page settings value
interval intervals contribution contributions because but only other others between before after
"""
"""Words that no German page says."""


def english_left(html):
    """English words that a German page still says; code, settings and names are not read."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, flags=re.S)[1])
    said = [rule[key] for rule in data["rules"].values() for key in ("problem", "about")]
    said += [note for rule in data["rules"].values() for note in rule["notes"]]
    said += [*data["words"].values(), *data["why"].values()]
    said += re.findall(r'(?:aria-label|title|data-trial)="([^"]*)"', html)
    said += re.findall(
        r'"(?:title|description)":"([^"]*)"', json.dumps(data["charts"], separators=(",", ":"))
    )
    body = re.sub(r"<(script|style|code)\b.*?</\1>", " ", html, flags=re.S)
    said.append(re.sub(r"<[^>]*>", " ", re.sub(r'<th scope="row">[a-z_]+\.[a-z0-9_]+</th>', " ", body)))
    read = re.sub(r"fedmerit \w+( --[\w-]+)*|--[\w-]+|\w+\.(csv|json)", " ", unescape(" ".join(said)))
    return {*ENGLISH.split()} & {*re.findall(r"[A-Za-zÄÖÜäöüß]+", read)}


def test_the_test_finds_english(run_folder):
    assert {"the", "member", "rounds", "paid"} <= english_left(page(run_folder))


@pytest.mark.parametrize("pseudonyms", [False, True])
def test_a_german_page_has_no_english_left(folder, monkeypatch, pseudonyms):
    monkeypatch.setattr(share_intervals, "DRAWS", 40)  # words, not ends of intervals
    assert english_left(page(folder, language="de", pseudonyms=pseudonyms)) == set()
    decide(folder, score="LOO", floor=0.05, on_undefined="equal")
    assert english_left(page(folder, language="de", pseudonyms=pseudonyms)) == set()


@pytest.mark.long
def test_nor_has_one_of_reports_in_doubt(tmp_path):
    path = write_scores(tmp_path, companion=True)

    def change(content):
        first = content["rounds"][0]["reports"]
        first["alone"], first["without"] = first["without"], first["alone"]

    changed(path, change)
    assert facts_of(path).doubts
    assert english_left(page(path, language="de")) == {"scores"}  # the name of the file
    assert all(name in page(path, language="de") for name in NAMES)


def test_numbers_and_dates_are_in_german_form(folder):
    decide(folder, "12345.60")
    html = page(folder, language="de")
    said = shown(html).replace("\u00a0", " ")
    assert "Antrieb: ein einziger Prozess" in said
    assert "30. November 2026" in said
    assert "12.345,60 EUR" in said
    assert re.search(r"[+-]\d+,\d+ ± \d+,\d+ ", said)
    assert not re.search(r"\d\.\d+ ?%|\d\.\d+ Punkte", said)
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, flags=re.S)[1])
    assert data["charts"]["contribution"]["config"]["locale"]["number"]["decimal"] == ","
    assert (data["words"]["decimal"], data["words"]["thousands"]) == (",", ".")
    assert 'value="12345,60"' in html
