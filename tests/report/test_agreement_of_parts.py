"""What a page or a statement says first agrees with what it says below."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from fedmerit.errors import InputError
from fedmerit.files.documents import document
from fedmerit.ledger.decisions import Terms
from fedmerit.notes import speaking
from fedmerit.report.comparison import compared
from fedmerit.report.facts import Facts
from fedmerit.report.page import text
from fedmerit.report.page.html import facts_of, page, paid_table, render_comparison
from fedmerit.report.payment import rules_of
from fedmerit.report.source import read_source
from fedmerit.report.statement import MOST_LINES, as_dict, as_html, as_markdown
from fedmerit.report.text import signed_by
from fedmerit.settings import Heading
from linear_federation import LIAR, Federation
from runs import facts_as_decided, record_decision, run_in
from sample import of_alpha, rounds, write_csv, write_scores

SILENT = [("client-4", number, "report") for number in (1, 2)]


def decide(folder, heading=None, **terms):
    paid_by = run_in(folder).config.scoring.utilities[0]
    return record_decision(folder, Terms("1000.00", paid_by, **terms), heading=heading or Heading())[0]


def statement_facts(folder, made):
    facts = facts_as_decided(folder)
    assert facts.decision.number == made.number
    return facts


def test_a_headline_counts_members_without_a_score(tmp_path):
    folder = Federation(tmp_path, 5, 2, lost=SILENT).run().folder
    decide(folder, rule="equal")
    facts = facts_of(folder)
    assert facts.unscored == ("client-4",)
    alike = "Four of five members are paid the same: 250.00\xa0EUR each"
    assert text.title(facts) == f"{alike}; client-4 gets nothing"
    with speaking("de"):
        assert text.title(facts).endswith(": je 250,00\xa0EUR; client-4 erhält nichts")
    lines, _ = paid_table(facts, "0", rules_of(facts)[0])
    assert {line.client for line in lines if line.amount == "0.00"} == {"client-4"}


def test_a_page_has_one_currency(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    decide(folder)
    html = page(folder, heading=Heading(currency="EUR"))
    said = re.sub(r"<[^>]*>", " ", html.split("<body>")[1].split("<script")[0]).replace("\u00a0", " ")
    opening = said[: said.index("What would another budget")]
    assert len(re.findall(r"\d\.\d\d EUR", opening)) >= 4  # title and opening
    assert "(EUR)" in opening
    decide(folder, Heading(currency="CHF"))
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
    assert signed_by(facts).endswith("one process held all keys and signed for every member.")
    plain = Federation(tmp_path, 4, 2, masks=False).run().folder
    assert signed_by(facts_of(plain)) == "Nobody signed: the run had secure aggregation off."
    made = decide(plain)
    assert "Nobody signed" in as_markdown(statement_facts(plain, made), "client-0")


def test_a_liar_is_named_in_its_reason_and_its_statement(tmp_path):
    run = Federation(tmp_path, 5, 2, settings={"scoring": {"method": "settled"}})
    run.stating(7, key="2")
    run.run()
    made = decide(run.folder, score="PHI")
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
    facts = statement_facts(run.folder, decide(run.folder, score="PHI"))
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
