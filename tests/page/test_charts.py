"""Charts whose labels are right: whole rounds, different names, numbers that are not zero."""

import json
import re

import altair
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import ValidationError
from sample import write_scores

from fedmerit.notes import WIDTH, labels
from fedmerit.report.comparison import compared
from fedmerit.report.page import charts
from fedmerit.report.page.html import facts_of, figures
from fedmerit.scoring.files import as_csv, document
from fedmerit.scoring.types import Reports

CLINICS = ("Universitätsklinikum Bonn", "Universitätsklinikum Köln", "Universitätsklinikum Ulm", "West")


def drawn(path, name):
    """The texts in a figure."""
    made = dict(figures(facts_of(path), "svg"))[f"{name}.svg"].decode()
    return re.findall(r"<text[^>]*>([^<]*)</text>", made)


def test_a_small_chart_numbers_each_round_once(tmp_path):
    texts = drawn(write_scores(tmp_path), "course-01")
    assert [text for text in texts if text in ("1", "2", "3")] == ["1", "2", "3"]


@pytest.mark.parametrize("value", [0.4, 0.0, -3.0, 4e-5])
def test_quality_that_does_not_change_is_labelled_with_its_value(tmp_path, value):
    rounds = [
        Reports(empty=value, grand=value, alone=[value] * 2, without=[value] * 2, round=k) for k in (1, 2)
    ]
    path = tmp_path / "r.csv"
    path.write_text(as_csv(document(rounds)))
    numbers = [float(text) for text in drawn(path, "quality") if re.fullmatch(r"-?[0-9.]+", text)][2:]
    assert pytest.approx(value) in numbers
    assert len(set(numbers)) == len(numbers) >= 3


def test_long_names_stay_different_in_the_chart(tmp_path):
    path = write_scores(tmp_path, CLINICS)
    texts = drawn(path, "contribution")
    shown = set(labels(CLINICS).values())
    assert len(shown) == 4
    assert shown <= set(texts)
    assert charts.ranks(facts_of(path)) is not None


def test_every_chart_is_what_the_schema_of_vega_lite_describes(tmp_path):
    """What draws a chart passes over a key that is misspelt; the schema, which altair ships, does not."""
    path = write_scores(tmp_path, count=5, companion=True)
    (again := tmp_path / "again").mkdir()
    facts, found = facts_of(path), compared([path, write_scores(again, count=5, companion=True, se=0.005)])
    drawn = [
        charts.contribution(facts),
        charts.ranks(facts),
        charts.course(facts, charts.course_rows(facts), "North"),
        charts.quality(facts),
        charts.sums(facts),
        charts.settling([("", facts)]),
        charts.scores_of_runs(found),
        charts.spreads(found),
        charts.ranks_of_runs(found),
    ]
    for one in drawn:
        altair.LayerChart.from_dict(one)
    drawn[0]["layer"][1]["mark"]["opacty"] = drawn[0]["layer"][1]["mark"].pop("opacity")
    with pytest.raises(ValidationError):
        altair.LayerChart.from_dict(drawn[0])


@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=30, unique=True))
def test_labels_are_short_and_different(names):
    found = labels(names)
    assert list(found) == names
    assert len(set(found.values())) == len(names)
    assert all(len(label) <= WIDTH for label in found.values())


def test_names_that_differ_in_the_middle_are_numbered():
    names = [f"{'a' * 30}{k}{'b' * 30}" for k in range(3)]
    assert list(labels(names).values()) == [f"{'a' * 13}… ({k})" for k in (1, 2, 3)]


@pytest.mark.parametrize(("sign", "least"), [(1, 62), (-1, 10)])
def test_a_bracket_stands_beside_the_bars(tmp_path, sign, least):
    """Bars of members that all made the model worse end at zero, where the bracket would cross them."""
    alpha = [sign * 0.1] * 3
    rounds = [
        Reports(
            empty=0.1, grand=0.3, alone=[0.1 + a for a in alpha], without=[0.3 - a for a in alpha],
            clients=("A", "B", "C"), se_alpha=[0.01] * 3, round=1,
        )
    ]  # fmt: skip
    path = tmp_path / "r.csv"
    path.write_text(as_csv(document(rounds)))
    spec = json.dumps(charts.contribution(facts_of(path)))
    (right,) = set(re.findall(r"\+ (\d+) \* [\d.e-]+ / max\(60", spec))
    assert int(right) > least
