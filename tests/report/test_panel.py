"""What people read of a panel: score, rewards, page and statements, and what a lying judge gets."""

import json
import shutil

import numpy as np
import pytest

import fedmerit as fm
from fedmerit.report.facts import Facts
from fedmerit.report.panel import Reading
from fedmerit.report.source import read_source


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
