"""What the page says, without a browser: the facts, the words, the escaping, the files."""

import csv
import io
import json
import re
import shutil
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from urllib.parse import unquote

import pytest
from msgspec import structs

from command_line import call
from fedmerit.errors import MissingExtra, StoreError
from fedmerit.identity import exact
from fedmerit.ledger.decisions import Terms
from fedmerit.notes import listed
from fedmerit.report.facts import Facts
from fedmerit.report.page import text as words
from fedmerit.report.page.html import OURS, approvals, facts_of, glance, page, page_of_run, render, signatures
from fedmerit.report.payment import rules_of
from fedmerit.report.text import dashed, rank_text, sure_worth, total_text, unbroken, worth
from fedmerit.scoring.accumulate import accumulate
from fedmerit.settings import Heading
from fedmerit.storage.recorder import record_approval, sign
from fedmerit.storage.run_folder import read_costs, timed
from fedmerit.verify import verify_folder
from linear_federation import Federation, write_key
from runs import record_decision, sound
from sample import HOSTILE, changed, of_alpha, read_aloud, rounds, write_csv, write_scores
from vega_bundle import PATH, bundle

QUESTIONS = [
    "Who contributed what, and how sure is it?",
    "How did it build up?",
    "What share does each member get?",
    "Who signed, and who approved?",
    "Can we trust it?",
    "How was it computed?",
]


def test_the_page_answers_six_questions_in_order(run_folder):
    text = page(run_folder)
    titles = re.findall(r"<h2[^>]*><span[^>]*>(\d)</span> ([^<]+)</h2>", text)
    assert titles == [(str(k), title) for k, title in enumerate(QUESTIONS, start=1)]
    html = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)
    levels = [int(level) for level in re.findall(r"<h([1-6])", html)]
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert len(re.findall(r"<table[^>]*>\s*<caption>", html)) == html.count("<table") >= 8
    assert not re.search(r'<th(?![^>]* scope="(row|col)")[ >]', html)
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'<label for="([^"]+)"', html)) <= set(ids)
    assert '<html lang="en">' in text


def test_the_page_is_one_small_file_and_the_same_each_time(run_folder):
    text = page(run_folder)
    assert len(text.encode()) < 2_000_000
    assert text == page(run_folder)
    ours = re.sub(r"<script type=\"module\">.*?</script>", "", text, flags=re.S)  # Vega names its namespaces
    assert not re.search("https?:", ours)
    assert "default-src 'none'" in text


def test_numbers_are_those_of_the_terminal(run_folder):
    facts = facts_of(run_folder)
    said = read_aloud(page(run_folder))
    terminal = call("score", run_folder).output
    for one in facts.standings:
        for cell in (one.client, rank_text(one), f"{one.share:.1%}"):
            assert dashed(cell) in said
            assert cell in terminal
        assert sure_worth(facts, one) in said
        assert sure_worth(facts, one, unit=True) == f"{sure_worth(facts, one)} points"
        assert sure_worth(facts, one).startswith(f"{100 * one.total:+.{facts.unit_digits}f} ± ")
        assert total_text(one) in terminal
    for group in facts.groups:
        if len(group) > 1:
            assert listed(group, 12) in said
            assert ", ".join(group) in terminal


def test_a_run_says_who_was_away_and_what_it_cost(run_folder):
    facts = facts_of(run_folder)
    (elm,) = facts.absences
    assert (elm.client, elm.rounds) == ("Elm", {1: "away"})
    mean = accumulate(facts.source.rounds, missing="own-mean").as_dict()["Elm"]
    assert elm.at_own_mean == pytest.approx(mean - accumulate(facts.source.rounds).as_dict()["Elm"])
    assert elm.gain == facts.source.rounds[0].gain
    said = read_aloud(page(run_folder))
    counted = f"at the member’s own mean it would have counted {worth(facts, elm.at_own_mean, unit=True)}."
    assert f"Elm has no report in round 1. This round counts as zero; {counted}" in said
    assert "1 (away)" in said


def test_a_run_tells_how_it_was_computed(run_folder):
    facts = facts_of(run_folder)
    said = read_aloud(page(run_folder))
    run = facts.source.run
    terms = run.first.terms
    for fact in (run.head, run.pool["root"], terms["config_hash"], f"version {terms['version']}"):
        assert fact in said
    assert "chain and signatures in order" in said
    assert "any member's model update" in said
    assert "label_noise" in said
    assert f"{4 * facts.source.costs.parameters:,} bytes" in said


PLANTED = "Rehearsal: labels were replaced by random ones on purpose: 90% at Dale (corruption.label_noise)."


@pytest.mark.parametrize("gone", ["", "config.toml", "ledger.sqlite"])
def test_a_fault_that_the_settings_planted_is_told_above_the_headline(run_folder, tmp_path, gone):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    if gone:
        (folder / gone).unlink()
    text = page(folder)
    assert f'<p class="alarm">{unbroken(PLANTED)}</p>' in text[: text.index("<h1>")]


def test_score_rewards_statements_and_verify_tell_a_planted_fault_first(run_folder, tmp_path, fedmerit):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    for command in (("score",), ("rewards", "--budget", "100.00", "--despite-doubts")):
        assert fedmerit.said(command[0], folder, *command[1:]).splitlines()[0] == PLANTED
    _, out, err = fedmerit("score", folder, "--format", "json")
    assert (err.splitlines()[0], "cumulative" in json.loads(out)) == (PLANTED, True)
    for name in ("Abbey", "Bridge", "Castle", "Dale", "Elm"):
        assert (folder / "statements" / f"{name}.md").read_text().split("\n\n")[3] == PLANTED
        assert json.loads((folder / "statements" / f"{name}.json").read_text())["planted"] == PLANTED
    assert PLANTED in list(verify_folder(folder))
    (folder / "ledger.sqlite").unlink()
    assert fedmerit.said("score", folder).splitlines()[0] == PLANTED


def test_a_tampered_ledger_is_the_first_thing_one_reads(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "copy")
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db, db:
        db.execute("UPDATE records SET author = 'Castle' WHERE author = 'Dale'")
    said = read_aloud(page(folder))
    alarm = said.index("The ledger of this run does not verify. record")
    assert alarm < said.index(QUESTIONS[0])
    assert "rely on nothing here" in said
    assert "All scores here were recomputed" not in said


def test_a_check_that_failed_stands_out_at_a_glance(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "copy")
    assert not any(failed for *_, failed in glance(facts_of(folder)))
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE records SET author = 'Castle' WHERE author = 'Dale'")
    assert [value for _, value, failed in glance(facts_of(folder)) if failed] == ["does not verify"]
    run = Federation(tmp_path, 4, 2, settings={"scoring": {"method": "settled"}})
    run.stating(7, key="2")
    lied = facts_of(run.run().folder)
    assert [value for _, value, failed in glance(lied) if failed] == ["1 of 2"]


def test_a_lone_file_gives_a_page_that_says_what_is_absent(tmp_path):
    path = write_scores(tmp_path)
    said = read_aloud(page(path))
    assert "From a file of reports; there is no ledger beside it." in said
    assert "There are no settings beside the reports." in said
    assert "Only one measure was recorded" in said
    assert "not recorded" in said  # the time it took
    assert words.headline(facts_of(path)) == "North contributed most; West made the model worse"
    csv = write_csv(tmp_path, *rounds(), name="scores.csv")
    assert words.headline(facts_of(csv)) == words.headline(facts_of(path))


def test_companions_that_disagree_are_named(tmp_path):
    facts = facts_of(write_scores(tmp_path, companion=True))
    (accuracy,) = facts.companions
    assert ("North", "West") in accuracy.contradicts
    assert accuracy.turned == {"West": True, "North": False}
    assert accuracy.spearman < 0
    said = read_aloud(page(tmp_path / "scores.json"))
    assert "contradicts the ranking: by this measure, West contributed more than North." in said
    assert "By accuracy, West improved the model; by the paid measure, the member made it worse." in said
    assert "The measures disagree about West and North" in said or "about North and West" in said


def test_rounds_that_are_not_in_order_are_named(tmp_path):
    path = write_scores(tmp_path)

    def change(content):
        second = content["rounds"][1]["reports"]  # everybody harmful: sum of alpha below zero, v(M) above
        second["alone"] = [second["empty"] - 0.05] * 4
        second["without"] = [second["grand"] + 0.05] * 4
        content["rounds"].append(
            {"round": 4, "participants": [], "reports": None, "scores": None, "aborted": True}
        )

    changed(path, change)
    said = read_aloud(page(path))
    assert "FP in round 2: reversed" in said
    assert "Round 4 was aborted: the model stayed as it was." in said
    assert "not scored: aborted" in said


def test_silent_members_are_named(tmp_path):
    path = write_scores(tmp_path)

    def change(content):
        last = content["rounds"][2]
        last["silent"] = [last["participants"].pop()]
        for values in last["reports"].values():
            if isinstance(values, list):
                values.pop()

    changed(path, change)
    said = read_aloud(page(path))
    assert "FP in round 3: none: a member in the sum sent no report." in said
    assert "West has no report in round 3." in said
    assert "3 (in the sum, no report)" in said


LINK = r'<a download="([^"]+)" href="data:([^,"]+),([^"]+)">'


def test_the_standings_can_be_downloaded_without_a_server(run_folder, tmp_path):
    facts = facts_of(run_folder)
    links = re.findall(LINK, page(run_folder))
    files = {name: unquote(content) for name, _, content in links}
    assert [*files] == ["five.csv", "five.json"]
    rows = list(csv.DictReader(io.StringIO(files["five.csv"])))
    members = json.loads(files["five.json"])["members"]
    assert [row["client"] for row in rows] == [one["client"] for one in members] == [*facts.standing]
    for row, one in zip(rows, facts.standings, strict=True):
        assert (float(row["contribution"]), int(row["rank"]), float(row["share"])) == (
            one.total, one.rank, one.share,
        )  # fmt: skip
    path = write_scores(tmp_path, ("=1+1", "B", "C", "D"))
    ((_, _, first), *_) = re.findall(LINK, page(path))
    assert "\n'=1+1," in unquote(first)  # no spreadsheet runs a name


def test_the_page_says_who_signed_what_and_who_approved(tmp_path):
    made = Federation(tmp_path, 4, 2, settings={"scoring": {"method": "settled"}}).run()
    pay = {"utility": made.config.scoring.utilities[0], "score": "PHI"}
    record_decision(made.folder, Terms("100.00", **pay), heading=Heading(date="2026-11-30"))
    for name in ("client-0", "client-2"):
        write_key(tmp_path / f"{name}.pem", made.keys[name])
    record_approval(sound(made.folder), sign(sound(made.folder), tmp_path / "client-0.pem"))
    facts = facts_of(made.folder)
    columns, lines = signatures(facts)
    kinds = {(record.kind, record.author): str(record.seq) for record in facts.source.run.records}
    assert columns == ["decision 1", "terms", "last round", "statement", "sums", "end"]
    assert [line[:2] for line in lines[:2]] == [("the server", "server"), ("client-0", "member")]
    by_server = [kinds[kind, "server"] for kind in ("decision", "run", "round", "settled", "end")]
    by_server[2:3] = [f"{by_server[2]} (round\u00a02)", "-"]
    assert lines[0][2] == by_server
    each = ("approval", "join", "report", "statement", "countersigned", "seen")
    own = [kinds[kind, "client-0"] for kind in each]
    own[2] += " (round\u00a02)"
    assert lines[1][2] == own
    assert [cells[0] for *_, cells in lines[2:]] == ["not yet"] * 3
    approved = "One of four members approved decision"
    assert approvals(facts) == f"{approved} 1; not yet: client-1, client-2 and client-3."
    record_decision(made.folder, Terms("200.00", **pay))
    record_approval(sound(made.folder), sign(sound(made.folder), tmp_path / "client-2.pem"))
    said = read_aloud(page(made.folder))
    assert f"{approved} 2; not yet: client-0, client-1 and client-3." in said
    assert f"{kinds['approval', 'client-0']} (decision 1)" in said
    assert "approved by 1 of 4" in said


def test_a_rule_without_shares_says_why(tmp_path):
    fair, *_, equal = rules_of(facts_of(write_scores(tmp_path, se=0.5)))
    assert fair.problem.startswith("the positive part of ALPHA is")
    assert equal.name == "equal"
    assert not equal.problem


def test_names_are_text_whatever_they_hold(tmp_path):
    text = page(write_scores(tmp_path, HOSTILE, companion=True))
    for name in HOSTILE[:3]:
        assert name not in text
    said = read_aloud(text)
    for name in HOSTILE:
        assert " ".join(name.split()) in said
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, flags=re.S)[1])
    assert {name for name, *_ in data["rules"]["fair"]["parts"]} == set(HOSTILE)


def test_ground_truth_is_compared_where_it_is_there(tmp_path):
    path = write_scores(tmp_path)
    changed(path, lambda content: content.update(truth={"MR-SV": [4, 3, 2, 1]}, analysis=True))
    ((utility, value, found),) = facts_of(path).near_truth("MR-SV", "SV")
    assert (utility, value) == ("expected-accuracy", "MR-SV")
    assert found["ALPHA"] > 0.9
    assert "Agreement with ground truth" in page(path)


@pytest.mark.long
def test_many_members_and_rounds_still_fit(tmp_path):
    names = tuple(f"client-{k}" for k in range(150))
    alpha = [0.001 * (k % 7) / 7 for k in range(150)]
    wide = [of_alpha(alpha, 0.1, start=0.1, names=names, se=0.0001, round=k) for k in range(1, 121)]
    text = page(write_csv(tmp_path, *wide, name="scores.csv"))
    assert len(text.encode()) < 2_000_000
    table = text.split('<table id="payouts"')[1].split("</table>")[0]
    assert (table.count('class="middle"'), table.count('class="fold"')) == (125, 1)
    assert all(name in table for name in names)
    said = read_aloud(text)
    assert said.count("Show the 125 members in between") == 2  # contributions, payouts
    assert "the first and the last of 150 members, 24 in all" in said
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', text, flags=re.S)[1])["charts"]["contribution"]
    assert "⋮ 125 more" in json.dumps(drawn, ensure_ascii=False)
    assert "All sums of all rounds are in scores.csv." in said


def test_the_shipped_vega_is_the_one_that_vl_convert_carries():
    assert PATH.read_text(encoding="utf-8") == bundle()


def test_the_command_overwrites_only_pages(tmp_path):
    path, target = write_scores(tmp_path), tmp_path / "mine.html"
    target.write_text("<p>mine</p>")
    refused = str(call("page", path, "--out", target).exception)
    assert refused == f"{target}: exists, and was not written by fedmerit: choose another --out, or --force"
    assert target.read_text() == "<p>mine</p>"
    for force in (["--force"], []):  # then it is one
        assert call("page", path, "--out", target, *force).exit_code == 0
    assert "North" in target.read_text(encoding="utf-8")
    assert OURS in target.read_text(encoding="utf-8")
    for name in ("page.pdf", "page"):
        other = tmp_path / name
        refused = call("page", path, "--out", other, "--force").exception
        assert str(refused) == f"{other}: a page is HTML: expected a name that ends in .html"
        assert not other.exists()
    lost = tmp_path / "gone" / "x.html"
    refused = call("page", path, "--out", lost).exception
    assert str(refused) == f"{lost}: could not be written: there is no folder {lost.parent}"


def test_a_page_takes_the_place_of_no_page_of_another_run(run_folder, tmp_path):
    path, target = write_scores(tmp_path), tmp_path / "mine.html"
    other = (tmp_path / 'a "b" & c').with_suffix(".json")
    other.write_bytes(path.read_bytes())
    for _ in range(2):  # a second page of the same file takes the place of the first
        assert call("page", other, "--out", target).exit_code == 0
    before = target.read_bytes()
    for source in (path, run_folder):
        refused = str(call("page", source, "--out", target).exception)
        assert (
            refused
            == f"{target}: exists, and is a page of another run or file: choose another --out, or --force"
        )
        assert target.read_bytes() == before
    assert call("page", path, "--out", target, "--force").exit_code == 0


def test_a_gain_that_is_for_the_mean_of_y_is_doubted(run_folder):
    facts = facts_of(run_folder)
    run, gain, first = facts.source.run, facts.total.gain, facts.measured[0].empty
    assert facts.doubts == ()
    for part, codes in ((0.4, []), (0.6, ["mean"])):
        begun = structs.replace(run.first, constant=exact(first + part * gain))
        told = Facts(replace(facts.source, run=replace(run, first=begun)))
        assert [doubt.code for doubt in told.doubts] == codes
        assert ("Most of the gain is for learning that mean" in read_aloud(render(told))) == bool(codes)


def test_rounds_are_timed_and_a_resumed_run_adds_to_it(tmp_path):
    class Step:
        def __init__(self, stage, round):
            self.stage, self.round = stage, round

    seen = []
    watch = timed(seen.append, tmp_path)
    watch(Step("train", 1))
    assert read_costs(tmp_path).seconds is None
    watch(Step("round", 1))
    timed(seen.append, tmp_path)(Step("round", 2))
    assert len(read_costs(tmp_path).seconds) == 2
    assert len(seen) == 3
    (tmp_path / "costs.json").write_text("[]")
    with pytest.raises(StoreError, match="expected seconds by round"):
        read_costs(tmp_path)


def test_a_run_ends_with_its_page(tmp_path):
    config = tmp_path / "tiny.toml"
    config.write_text(
        "[data]\ntest_size = 50\n[partition]\nclients = 3\n[model]\nname = 'mlp'\n"
        "[training]\nrounds = 1\nlocal_epochs = 1\n"
    )
    done = call("run", config, "--out", tmp_path / "run")
    assert f"open {tmp_path / 'run' / 'page-run.html'} in a browser" in done.output
    assert (tmp_path / "run" / "page-run.html").read_text(encoding="utf-8") == page(tmp_path / "run")
    assert len(read_costs(tmp_path / "run").seconds) == 1


def test_without_jinja_a_run_says_how_to_get_a_page(run_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(run_folder, tmp_path / "copy")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install jinja2 vl-convert-python, then fedmerit page" in page_of_run(folder)
    assert not [*folder.glob("page*.html")]
    with pytest.raises(MissingExtra, match="the page needs: pip install"):
        page(folder)
