"""What the page says, without a browser: the facts, the words, the escaping, the files."""

import json
import re
import shutil
import sqlite3
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from sample import HOSTILE, changed, rounds, write_scores
from typer.testing import CliRunner

from fedmerit.cli import app
from fedmerit.cli.run import write_page
from fedmerit.errors import InputError, StoreError
from fedmerit.notes import listed
from fedmerit.report.page import text as words
from fedmerit.report.page.html import OURS, PATH, bundle, facts_of, figures, page
from fedmerit.report.source import read_costs, timed
from fedmerit.report.text import dashed, rank_text, sure_worth, total_text, worth
from fedmerit.scoring.accumulate import accumulate
from fedmerit.scoring.files import as_csv, document
from fedmerit.scoring.rewards import shares

QUESTIONS = [
    "Who contributed what, and how sure is it?",
    "How did it build up?",
    "What would each member be paid?",
    "Can we trust it?",
    "How was it computed?",
]


class Outline(HTMLParser):
    """Headings, tables, ids and plain text of a page, scripts and styles left out."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.ids, self.labels, self.text = [], [], [], []
        self.tables, self.unscoped, self.skip = [], 0, 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag in ("script", "style"):
            self.skip += 1
        if re.fullmatch("h[1-6]", tag):
            self.headings.append([int(tag[1]), ""])
        if tag == "table":
            self.tables.append(False)
        if tag == "caption":
            self.tables[-1] = True
        if tag == "th" and attrs.get("scope") not in ("row", "col"):
            self.unscoped += 1
        if tag == "label":
            self.labels.append(attrs["for"])
        if "id" in attrs:
            self.ids.append(attrs["id"])
        self.tag = tag

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.skip -= 1
        self.tag = ""

    def handle_data(self, data):
        if not self.skip:
            self.text.append(data)
            if self.headings and re.fullmatch("h[1-6]", self.tag or "h1"):
                self.headings[-1][1] += data

    @property
    def said(self):
        return " ".join(" ".join(self.text).split())


def test_the_page_answers_five_questions_in_order(run_folder):
    text = page(run_folder)
    outline = Outline(text)
    titles = re.findall(r"<h2[^>]*><span[^>]*>(\d)</span> ([^<]+)</h2>", text)
    assert titles == [(str(k), title) for k, title in enumerate(QUESTIONS, start=1)]
    levels = [level for level, _ in outline.headings]
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert all(outline.tables)  # every table has a caption
    assert len(outline.tables) >= 8
    assert outline.unscoped == 0
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.labels) <= set(outline.ids)
    assert '<html lang="en">' in text


def test_the_page_is_one_small_file_and_the_same_each_time(run_folder):
    text = page(run_folder)
    assert len(text.encode()) < 2_000_000
    assert text == page(run_folder)
    outside = re.sub(
        r"<script type=\"module\">.*?</script>", "", text, flags=re.S
    )  # Vega names its namespaces
    assert "http:" not in outside
    assert "https:" not in outside
    assert "default-src 'none'" in text


def test_numbers_are_those_of_the_terminal(run_folder):
    facts = facts_of(run_folder)
    said = Outline(page(run_folder)).said
    terminal = CliRunner().invoke(app, ["score", str(run_folder)]).output
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
    said = Outline(page(run_folder)).said
    counted = f"at the member’s own mean it would have counted {worth(facts, elm.at_own_mean, unit=True)}."
    assert f"Elm has no report in round 1. This round counts as zero; {counted}" in said
    assert "1 (away)" in said


def test_a_run_tells_how_it_was_computed(run_folder):
    facts = facts_of(run_folder)
    said = Outline(page(run_folder)).said
    book = facts.source.book
    for fact in (book.head, book.pool["root"], book.run["config_hash"], f"version {book.run['version']}"):
        assert fact in said
    assert "chain and signatures in order" in said
    assert "any member's model update" in said
    assert "label_noise" in said
    assert f"{4 * facts.source.costs.parameters:,} bytes" in said


def test_a_tampered_ledger_is_the_first_thing_one_reads(run_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run_folder, folder)
    db = sqlite3.connect(folder / "ledger.sqlite")
    db.execute("UPDATE records SET author = 'Castle' WHERE author = 'Dale'")
    db.commit()
    db.close()
    said = Outline(page(folder)).said
    alarm = said.index("The ledger of this run does not verify. record")
    assert alarm < said.index(QUESTIONS[0])
    assert "rely on nothing here" in said
    assert "All scores here were recomputed" not in said


def test_a_lone_file_gives_a_page_that_says_what_is_absent(tmp_path):
    path = write_scores(tmp_path)
    said = Outline(page(path)).said
    assert "From a file of reports; there is no ledger beside it." in said
    assert "There are no settings beside the reports." in said
    assert "Only one measure was recorded" in said
    assert "not recorded" in said  # the time it took
    assert words.headline(facts_of(path)) == "North contributed most; West made the model worse"
    csv = tmp_path / "scores.csv"
    csv.write_text(as_csv(document(rounds())), encoding="utf-8")
    assert words.headline(facts_of(csv)) == words.headline(facts_of(path))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"se": None}, "North contributed most; without standard errors nobody can say how sure this is"),
        (
            {"se": 0.008, "count": 1},
            "North, South and East contributed most and are statistically indistinguishable",
        ),
        ({"se": 0.019, "count": 1}, "All four members are statistically indistinguishable"),
        ({"se": 0.5}, "No member has surely improved the model"),
    ],
)
def test_the_headline_says_no_more_than_the_errors_allow(tmp_path, how, expected):
    assert words.headline(facts_of(write_scores(tmp_path, **how))) == expected


def test_companions_that_disagree_are_named(tmp_path):
    facts = facts_of(write_scores(tmp_path, companion=True))
    (accuracy,) = facts.companions
    assert ("North", "West") in accuracy.contradicts
    assert accuracy.turned == {"West": True, "North": False}
    assert accuracy.spearman < 0
    said = Outline(page(tmp_path / "scores.json")).said
    assert (
        "Accuracy significantly contradicts the ranking: by this measure, West contributed more than North."
        in said
    )
    assert (
        "By accuracy, West improved the model; by the paid measure, the member made it worse. "
        "Both findings are statistically significant." in said
    )
    assert "Accuracy is the part of the test samples for which the model's first answer is right." in said
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
    said = Outline(page(path)).said
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
    said = Outline(page(path)).said
    assert "FP in round 3: none: a member in the sum sent no report." in said
    assert "West has no report in round 3." in said
    assert "3 (in the sum, no report)" in said


def test_a_rule_without_shares_says_why(tmp_path):
    facts = facts_of(write_scores(tmp_path, se=0.5))
    fair = facts.rules[0]
    assert fair.problem.startswith("the positive part of ALPHA is")
    assert facts.rules[-1].name == "equal"
    assert not facts.rules[-1].problem


def test_shares_are_exact(run_folder):
    facts = facts_of(run_folder)
    total = accumulate(facts.source.rounds, missing=facts.source.missing)
    for rule in facts.rules:
        for name, share in shares(total, rule.name).items():
            assert rule.parts[name] / rule.one == share


def test_names_are_text_whatever_they_hold(tmp_path):
    text = page(write_scores(tmp_path, HOSTILE, companion=True))
    for name in HOSTILE[:3]:
        assert name not in text
    outline = Outline(text)
    for name in HOSTILE:
        assert " ".join(name.split()) in outline.said
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, flags=re.S)[1])
    assert {name for name, *_ in data["rules"]["fair"]["parts"]} == set(HOSTILE)


def test_pseudonyms_leave_no_name_and_no_order_of_the_roster(run_folder):
    text = page(run_folder, pseudonyms=True)
    for name in ("Abbey", "Bridge", "Castle", "Dale", "Elm"):
        assert not re.search(rf"\b{name}\b", text)
    shown, real = facts_of(run_folder, pseudonyms=True), facts_of(run_folder)
    assert [one.client for one in shown.standings] == [f"Member {mark}" for mark in "ABCDE"]
    assert [one.total for one in shown.standings] == [one.total for one in real.standings]
    assert shown.source.clients == tuple(sorted(shown.source.clients))
    assert shown.source.settings["partition"]["names"] == sorted(shown.source.names.values())
    assert shown.source.settings["partition"]["sizes"] == "withheld"
    mine, theirs = shown.rules[0], real.rules[0]
    assert mine.parts == {shown.source.names[name]: part for name, part in theirs.parts.items()}
    (away,) = shown.absences
    assert away.client == shown.source.names["Elm"]


def test_ground_truth_is_compared_where_it_is_there(tmp_path):
    path = write_scores(tmp_path)
    changed(path, lambda content: content.update(truth={"MR-SV": [4, 3, 2, 1]}, analysis=True))
    ((utility, value, found),) = facts_of(path).truth
    assert (utility, value) == ("expected-accuracy", "MR-SV")
    assert found["ALPHA"] > 0.9
    hidden = facts_of(path, pseudonyms=True).truth[0][2]
    assert hidden == found
    assert "Agreement with ground truth" in page(path)


@pytest.mark.long
def test_many_members_and_rounds_still_fit(tmp_path):
    names = tuple(f"client-{k}" for k in range(150))
    wide = []
    for number in range(1, 121):
        alpha = [0.001 * (k % 7) / 7 for k in range(150)]
        wide.append(
            rounds()[0].__class__(
                empty=0.1, grand=0.2, alone=[0.1 + a for a in alpha], without=[0.2 - a for a in alpha],
                clients=names, se_alpha=[0.0001] * 150, round=number,
            )
        )  # fmt: skip
    path = tmp_path / "scores.csv"
    path.write_text(as_csv(document(wide)), encoding="utf-8")
    text = page(path)
    assert len(text.encode()) < 2_000_000
    said = Outline(text).said
    assert said.count("Show the 125 members in between") == 2  # contributions, payouts
    assert "the first and the last of 150 members, 24 in all" in said
    drawn = json.loads(re.search(r'id="data">(.*?)</script>', text, flags=re.S)[1])["charts"]["contribution"]
    assert "⋮ 125 more" in json.dumps(drawn, ensure_ascii=False)
    assert "All sums of all rounds are in scores.csv." in said


@pytest.mark.parametrize(("kind", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<svg")])
def test_figures(tmp_path, kind, magic):
    made = dict(figures(facts_of(write_scores(tmp_path)), kind))
    assert set(made) == {f"{name}.{kind}" for name in ("contribution", "ranks", "quality", "sums")} | {
        f"course-0{k}.{kind}" for k in range(1, 5)
    }
    assert all(content.startswith(magic) for content in made.values())
    if kind == "svg":
        assert b"var(" not in made["contribution.svg"]
        assert b"North" in made["contribution.svg"]


def test_an_unknown_kind_of_figure_is_refused(tmp_path):
    with pytest.raises(InputError, match="png, pdf, svg, got 'gif'"):
        list(figures(facts_of(write_scores(tmp_path)), "gif"))


def test_the_shipped_vega_is_the_one_that_vl_convert_carries():
    assert PATH.read_text(encoding="utf-8") == bundle()


def test_the_command_writes_where_it_is_told(tmp_path):
    path = write_scores(tmp_path)
    target = tmp_path / "board" / "report.html"
    target.parent.mkdir()
    command = ["page", str(path), "--out", str(target), "--pseudonyms", "--figures", "svg"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "Member A" in target.read_text(encoding="utf-8")
    assert b"Member A" in (target.parent / "report-contribution.svg").read_bytes()
    assert CliRunner().invoke(app, ["page", str(path)]).exit_code == 0
    assert "North" in (tmp_path / "scores.html").read_text(encoding="utf-8")


def test_the_command_overwrites_only_pages(tmp_path):
    path, target = write_scores(tmp_path), tmp_path / "mine.html"
    target.write_text("<p>mine</p>")
    refused = CliRunner().invoke(app, ["page", str(path), "--out", str(target)]).exception
    assert str(refused) == f"{target}: exists, and is no page of fedmerit: --out another file, or --force"
    assert target.read_text() == "<p>mine</p>"
    for force in (["--force"], []):  # then it is one
        assert CliRunner().invoke(app, ["page", str(path), "--out", str(target), *force]).exit_code == 0
    assert "North" in target.read_text(encoding="utf-8")
    assert OURS in target.read_text(encoding="utf-8")
    for name in ("page.pdf", "page"):
        other = tmp_path / name
        refused = CliRunner().invoke(app, ["page", str(path), "--out", str(other), "--force"]).exception
        assert str(refused) == f"{other}: a page is HTML: expected a name that ends in .html"
        assert not other.exists()
    lost = tmp_path / "gone" / "x.html"
    refused = CliRunner().invoke(app, ["page", str(path), "--out", str(lost)]).exception
    assert str(refused) == f"{lost}: could not be written: there is no folder {lost.parent}"


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
    done = CliRunner().invoke(
        app, ["run", str(config), "--out", str(tmp_path / "run")], catch_exceptions=False
    )
    assert f"open {tmp_path / 'run' / 'page-run.html'} in a browser" in done.output
    assert (tmp_path / "run" / "page-run.html").read_text(encoding="utf-8") == page(tmp_path / "run")
    assert len(read_costs(tmp_path / "run").seconds) == 1


def test_without_jinja_a_run_says_how_to_get_a_page(run_folder, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(run_folder, tmp_path / "copy")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    write_page(folder)
    assert "pip install 'fedmerit[page]', then fedmerit page" in capsys.readouterr().out
    assert not [*folder.glob("page*.html")]


def test_without_jinja_the_command_says_what_it_needs(tmp_path):
    program = "import sys; sys.modules['jinja2'] = None; from fedmerit.cli import main; main()"
    command = [sys.executable, "-c", program, "page", str(write_scores(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: the page needs: pip install 'fedmerit[page]'\n"
    assert not (tmp_path / "scores.html").exists()
