"""What people read of a panel: score, rewards, page and statements, and what a lying judge gets."""

import json
import re
import shutil

import numpy as np
import pytest

import fedmerit as fm
from fedmerit.report.facts import Facts
from fedmerit.report.page.html import page
from fedmerit.report.panel import Reading
from fedmerit.report.source import read_source
from fedmerit.report.text import settlement_sentences

from .conftest import NAMES, panel


def facts(folder):
    return Facts(read_source(folder))


class Stub:
    """An account with a panel that was solved by hand."""

    class manifest:
        class bench:
            judges = ()

    odd_judges = ("C",)

    def __init__(self, names):
        self.columns = dict.fromkeys(names, True)
        self.manifest.bench.judges = [Showing(name) for name in names]


class Showing:
    samples, gained, rest = 30, 0.5, 0.1

    def __init__(self, judge):
        self.judge = judge


def test_a_column_of_any_scale_counts_in_no_ranking():
    matrix = [[9, 2, -3e9, 2], [1, 9, 5e9, 4], [3, 3, 9e9, 3], [-1, 0, 2e9, 9]]
    whole = fm.Panel(matrix, ["A", "B", "C", "D"])
    read = Reading(Stub(whole.clients), whole)
    assert read.left_out == ("C",)
    found = read.scores(whole.scores)
    # A: (2 + 2) / 2, B: (1 + 4) / 2, C: (3 + 3 + 3) / 3, D: (-1 + 0) / 2
    np.testing.assert_allclose(found.raw, [2, 2.5, 3, -0.5])
    assert [whole.clients[i] for i in read.order] == ["C", "B", "A", "D"]
    assert read.gave == {"A": 4, "B": 5, "C": 9, "D": -1}
    assert read.received == {"A": 3, "B": 5, "C": None, "D": 9}
    assert read.helped_nobody == ("D",)


def test_with_too_few_judges_left_every_column_counts():
    whole = fm.Panel([[0, 1, 2], [1, 0, 2], [1, 1, 0]], ["A", "B", "C"])
    read = Reading(Stub(whole.clients), whole)
    assert read.left_out == ()
    assert read.scores(whole.scores) is not None
    assert read.received == {"A": 2, "B": 2, "C": 4}


def test_standings_are_those_of_the_panel(panel_folder):
    found = facts(panel_folder)
    scores = json.loads((panel_folder / "scores.json").read_text())
    assert found.ranked_by == "PANEL"
    assert {one.client: one.total for one in found.standings} == dict(
        zip(scores["clients"], scores["cumulative"]["PANEL"], strict=True)
    )
    shares = dict(zip(scores["clients"], scores["panel"]["shares"], strict=True))
    assert {one.client: one.share for one in found.standings} == shares
    for one in found.standings:
        assert one.share_interval[0] <= one.share <= one.share_interval[1]
    assert found.standings[-1].client == "Elm"
    assert found.panel.helped_nobody == ("Elm",)
    assert [one.name for one in found.panel.judges if one.opposed] == ["Elm"]
    assert found.panel.left_out == ()


def test_score_shows_who_helped_whom(fedmerit, panel_folder):
    said = fedmerit.said("score", panel_folder).splitlines()
    elm = next(line for line in said if line.strip().startswith("Elm") and "(" in line and "-" in line)
    assert "0.0%" in elm
    matrix = [line.split() for line in said[said.index(next(x for x in said if "who helped" in x)) :]]
    assert [row[0] for row in matrix[2:7]][-1] == "Elm"
    assert sum(cell.startswith("(") for row in matrix[2:7] for cell in row) == 5  # the diagonal


def paid(fedmerit, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / folder.name)
    return json.loads(fedmerit.said("rewards", copy, "--budget", "10000", "--format", "json")), copy


def test_a_lying_judge_gains_nothing_to_the_last_cent(fedmerit, panel_folder, praise_folder, tmp_path):
    honest, _ = paid(fedmerit, panel_folder, tmp_path)
    lying, folder = paid(fedmerit, praise_folder, tmp_path)
    assert honest["payouts"]["Dale"] == lying["payouts"]["Dale"]
    assert honest["shares"]["Dale"] == lying["shares"]["Dale"]
    assert honest["rule"] == "hands"
    assert honest["payouts"]["Elm"] == lying["payouts"]["Elm"] == "0.00"
    assert sum(map(float, lying["payouts"].values())) + float(lying["unpaid"]) == pytest.approx(10000)
    # the most that a friend may get of a slice of a fifth is 3/4: more than before, but bounded
    gained = lying["shares"]["Bridge"] - honest["shares"]["Bridge"]
    assert 0 < gained <= 0.75 / 5
    read = facts(folder)
    assert read.panel.left_out == ("Dale",)
    assert not {one.client for one in read.standings} & set(read.harmful) - {"Elm"}
    assert read.decision.terms.rule == "hands"
    assert fm.load(folder).decisions[-1].paid["Dale"] == read.decision.paid["Dale"]


@pytest.mark.parametrize("term", [("--rule", "equal"), ("--cap", "0.5"), ("--equal", "0.1")])
def test_a_panel_pays_by_its_rule_alone(fedmerit, panel_folder, term):
    assert term[0] in fedmerit.refused("rewards", panel_folder, "--budget", "100", *term)


def test_runs_with_a_panel_are_not_compared(fedmerit, panel_folder, praise_folder):
    assert "it has a panel" in fedmerit.refused("compare", panel_folder, praise_folder)


def test_other_scores_are_refused(fedmerit, panel_folder):
    assert "PHI" in fedmerit.refused("score", panel_folder, "--score", "PHI")
    assert "PANEL" in fedmerit.refused("score", panel_folder, "--score", "ALPHA")


def test_the_page_shows_who_helped_whom_before_money(panel_folder):
    html = page(panel_folder)
    titles = re.findall(r"<h2[^>]*><span[^>]*>\d</span> ([^<]+)</h2>", html)
    assert titles[:3] == ["Who helped whom?", "What share does each member get?", "Does it add up?"]
    assert "There is no shared test set" in html
    assert not re.search(
        "test samples|gain of the model|quality of the shared", html.split("<header>")[1].split("<script")[0]
    )
    heat = re.search(r'<table class="heat[^"]*">.*?</table>', html, re.S)[0]
    found = facts(panel_folder)
    rows = re.findall(r'<tr><th scope="row"([^>]*)>([^<]+)</th>(.*?)</tr>', heat, re.S)
    assert [name for _, name, _ in rows] == [one.client for one in found.standings]
    assert [name for kind, name, _ in rows if "problem" in kind] == ["Elm"]
    panel = found.panel.whole
    for row, (_, name, cells) in enumerate(rows):
        drawn = re.findall(r'<td class="(\w*)"><span>([^<]+)</span>', cells)
        assert len(drawn) == panel.n
        assert [kind for kind, _ in drawn].index("own") == row
        for b, (kind, number) in zip(found.panel.order, drawn, strict=True):
            value = panel.matrix[panel.clients.index(name), b]
            assert float(number) == pytest.approx(100 * value, abs=0.01)
            assert kind == "own" or kind[0] == ("p" if value > 0 else "n")
    assert "contradicts every other judge" in html


def test_a_page_of_many_members_has_no_numbers_in_its_cells_but_words(panel_folder, monkeypatch):
    monkeypatch.setattr("fedmerit.report.page.text.MOST_NUMBERS", 4)
    html = page(panel_folder)
    assert 'class="heat plain"' in html
    assert re.search(r'title="Dale for Abbey: \+[\d.]+"', html)


def test_an_odd_judge_is_told_first(praise_folder):
    html = page(praise_folder)
    assert "The column of Dale adds up to something else" in html.split("<h1>")[0]
    assert "Dale (odd)" in html


def test_the_page_speaks_german(panel_folder):
    html = page(panel_folder, language="de")
    assert "Wer hat wem geholfen?" in html
    assert "widerspricht allen anderen Gutachtern" in html


def test_a_statement_has_the_own_row_and_column_and_no_more(fedmerit, panel_folder, tmp_path):
    _, folder = paid(fedmerit, panel_folder, tmp_path)
    told = json.loads((folder / "statements" / "Abbey.json").read_text())
    panel = fm.load(folder).panel
    names, i = panel.clients, panel.clients.index("Abbey")
    others = [b for b in range(panel.n) if b != i]
    assert told["panel"]["did"] == {names[b]: panel.matrix[i, b] for b in others}
    assert told["panel"]["received"] == {names[b]: panel.matrix[b, i] for b in others}
    text = (folder / "statements" / "Abbey.md").read_text()
    told_numbers = set(re.findall(r"\\([+-][\d.]+) \|", text))
    allowed = {f"{100 * value:+.2f}" for value in [*panel.matrix[i, others], *panel.matrix[others, i]]}
    assert told_numbers == allowed
    assert "test set" not in text
    assert told["rule"] == "hands"


def test_a_notebook_shows_who_helped_whom(panel_folder):
    run = fm.load(panel_folder)
    columns = run.columns("panel")
    assert len(columns["value"]) == 25
    assert columns["value"][1] == run.panel.matrix[0, 1]
    assert (columns["client"][1], columns["judge"][1]) == run.clients[:2]
    assert run._repr_html_().count("<table>") == 2
    assert run.panel.hands()["Elm"] == 0


def test_workbooks_of_a_panel(fedmerit, panel_folder, tmp_path):
    fedmerit.said("score", panel_folder, "--format", "xlsx", "--out", tmp_path / "s.xlsx")
    fedmerit.said(
        "rewards",
        panel_folder,
        "--budget",
        "9",
        "--dry-run",
        "--format",
        "xlsx",
        "--out",
        tmp_path / "p.xlsx",
    )
    for name in ("s.xlsx", "p.xlsx"):
        assert (tmp_path / name).stat().st_size > 1000


def test_who_is_in_no_panel_is_not_told_off_for_its_judging(tmp_path):
    """Of six, one is away in the only round that counts: the panel is that of the other five."""
    sizes = "partition.sizes=[100, 110, 120, 130, 140, 90]"
    names = f"partition.names={[*NAMES, 'Fern']}"
    folder = panel(
        tmp_path / "six",
        "partition.clients=6",
        sizes,
        names,
        "participation.away={Fern = [1]}",
        "training.rounds=1",
    )
    found = facts(folder)
    assert found.panel.whole.clients == tuple(NAMES)
    assert found.unscored == ("Fern",)
    told = " ".join(settlement_sentences(found))
    assert "5 of 5 columns add up" in told
    assert "Fern" not in told
