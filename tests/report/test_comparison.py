"""Runs that repeat each other, on a page and in a table: findings, words, hostile names."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from attacked import settling
from fedmerit.errors import CopyDiffers, NotComparable
from fedmerit.files.documents import as_csv, as_json, document
from fedmerit.report.comparison import compared
from fedmerit.report.page.html import render_comparison
from fedmerit.report.terminal import print_comparison
from raising import raises
from sample import HOSTILE, NAMES, of_alpha, read_aloud
from tests.report.test_words import left_over, second_language  # noqa: F401 - a fixture


def reports(alpha, names=NAMES, *, count=5, se=0.004, **more):
    """Members with these contributions in each of several rounds."""
    more = {"slice": "one", "utility": "expected-accuracy", "names": names, "se": se} | more
    gain = sum(alpha)
    return [of_alpha(alpha, gain, start=0.1 + k * gain, round=k + 1, **more) for k in range(count)]


TRAININGS = ([0.05, 0.03, 0.03, -0.02], [0.05, 0.02, 0.03, -0.02], [0.06, 0.03, 0.02, -0.02])
"""The first and the last keep their ranks; South and East are level once, and then once above each other."""


def written(folder, *runs, suffix=".json"):
    paths = []
    for number, rounds in enumerate(runs, start=1):
        paths.append(folder / f"{number}{suffix}")
        content = document(rounds)
        paths[-1].write_text(as_json(content) if suffix == ".json" else as_csv(content), encoding="utf-8")
    return paths


@pytest.fixture
def three(tmp_path):
    return written(tmp_path, *map(reports, TRAININGS))


# ------------------------------------------------------------------------------------------------- findings


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_files_of_reports_are_compared(tmp_path, suffix):
    found = compared(written(tmp_path, *map(reports, TRAININGS), suffix=suffix))
    assert [row.client for row in found.rows] == ["North", "South", "East", "West"]
    assert found.numbers.scores == pytest.approx(5 * np.array(TRAININGS))
    assert found.numbers.test == pytest.approx([0.02] * 4)  # five rounds on one slice, added up
    north = found.rows[0]
    assert (north.scores, north.ranks) == (pytest.approx((0.25, 0.25, 0.3)), (1, 1, 1))
    assert north.training == pytest.approx(0.05 / np.sqrt(3))
    assert [note.code for note in found.notes] == ["repeats-files"]


def test_the_page_says_what_holds_and_what_does_not(three):
    found = compared(three)
    told = read_aloud(render_comparison(found))
    assert "North is first each of three times, but 1 of 6 pairs of members changes places" in told
    assert "5 of 6 pairs of members keep their order in all runs. North and West have the same rank" in told
    assert "South East 1 of 3 1 of 3" in told
    assert "by chance with a probability of at least 1 in 4" in told
    assert "the true one is 0.5 to 6.3 times as large as shown" in told
    assert "training again moves a score by 2.50 points (standard deviation)" in told
    assert re.search(r"North \+26\.67 ± 8\.17 2\.89 2\.00 3\.51 \+25\.00 \+25\.00 \+30\.00", told)


def test_the_table_says_the_same(three, capsys):
    found = compared(three)
    print_comparison(Console(width=160), found)
    told = capsys.readouterr().out
    assert re.search(
        r"North +\+0\.2667 ± \d\.\d{4} +0\.0289 +0\.0200 +1 +\+0\.2500 +\+0\.2500 +\+0\.3000", told
    )
    assert "South and East change places: South is above in 1 of 3 runs, East in 1 of 3" in told
    print_comparison(Console(width=60), found)
    assert "run 3" in capsys.readouterr().out


def test_a_sure_difference_that_another_run_turns_round_is_named(tmp_path):
    found = compared(
        written(tmp_path, reports([0.05, 0.01, 0.0, 0.0], se=1e-4), reports([0.01, 0.05, 0.0, 0.0], se=1e-4))
    )
    assert found.headline == "Who is first changes when the same members train two times"
    assert found.order[-1].startswith("One run alone calls these differences statistically significant, and ")
    assert "North over South; South over North" in found.order[-1]


def test_without_standard_errors_nobody_says_what_the_test_set_adds(tmp_path):
    found = compared(written(tmp_path, *(reports(one, se=None) for one in TRAININGS)))
    told = read_aloud(render_comparison(found))
    assert "No standard errors were reported, so nobody can say what the test set adds." in told
    assert "±" not in "".join(map(found.mean_text, found.rows))
    assert found.wider == ""


def test_for_programs_there_is_json(three):
    told = json.loads(json.dumps(compared(three).as_dict()))
    assert told["clients"] == list(NAMES)
    assert told["swaps"] == [{"client": "South", "other": "East", "above": 1, "below": 1}]
    assert (told["pairs"], told["holding"], told["same_rank"]) == (6, 5, ["North", "West"])
    assert [one["since"] for one in told["convergence"]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (reports(TRAININGS[1], ["North", "South", "East", "Ulm"]), "members"),
        (reports(TRAININGS[1], count=4), "rounds"),
        (reports(TRAININGS[1], utility="accuracy"), "utility"),
        (reports(TRAININGS[1], slice="two"), "pool"),
        (reports(TRAININGS[0]), "same"),
    ],
)
def test_other_files_are_refused(tmp_path, other, code):
    with raises(NotComparable, code=code):
        compared(written(tmp_path, reports(TRAININGS[0]), other))


def test_a_run_and_a_file_are_not_compared(run_folder, three):
    with raises(NotComparable, code="kind", expected="a run folder", got="a file of reports"):
        compared([run_folder, three[0]])


@pytest.mark.parametrize(("lost", "code"), [("agreed", "unsettled"), ("state", "unfinished")])
def test_runs_without_a_settlement_or_with_an_open_one_are_not_compared(tmp_path, lost, code):
    pair = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        made = settling(tmp_path / name, naming=False, scoring={"method": "both"})
        made.reaches = lambda name, ask: ask.exchange != lost or (lost == "state" and name != "client-3")
        pair.append(made.run().folder)
    with raises(NotComparable, code=code):
        compared(pair)


def test_a_run_whose_score_file_was_changed_is_not_compared(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    text = (folder / "scores.json").read_text()
    (folder / "scores.json").write_text(text.replace('"round": 2', '"round": 9', 1))
    with raises(CopyDiffers, file="scores.json"):
        compared([run_folder, folder])


def test_whoever_was_away_more_often_in_one_run_is_noted(tmp_path):
    fewer = reports(TRAININGS[1])
    kept = {key: list(getattr(fewer[0], key))[:3] for key in ("alone", "without", "se_alpha", "clients")}
    fewer[0] = replace(fewer[0], **kept)
    found = compared(written(tmp_path, reports(TRAININGS[0]), fewer))
    codes = [(note.code, note.values.get("client")) for note in found.notes]
    assert codes == [("repeats-files", None), ("repeats-away", "West")]


# ---------------------------------------------------------------------------------------------------- words


def test_neither_page_nor_table_has_a_word_of_the_first_language(three, second_language, capsys):  # noqa: F811
    found = compared(three)
    left = {word for path in three for word in re.findall(r"[A-Za-z]+", str(path))}
    assert left_over(render_comparison(found)) - left == set()
    print_comparison(Console(width=200), found)
    told = set(re.findall(r"[A-Za-z]*[a-z][A-Za-z]+", capsys.readouterr().out))
    assert told - left - {*NAMES, "expected", "accuracy"} == set()


def test_names_are_only_text_and_the_same_runs_give_the_same_page(tmp_path):
    paths = written(tmp_path, *(reports(one, HOSTILE) for one in TRAININGS))
    page = render_comparison(compared(paths))
    assert not re.search("<img|<b>bold", page)
    assert "{{ 7 * 7 }}" in page
    assert page == render_comparison(compared(paths))
