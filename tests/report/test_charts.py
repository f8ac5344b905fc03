"""Charts whose labels are right: whole rounds, different names, numbers that are not zero."""

import re

import altair
import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import ValidationError

from fedmerit.report.comparison import compared
from fedmerit.report.page import charts
from fedmerit.report.page.charts import WIDTH, labels
from fedmerit.report.page.html import facts_of
from sample import of_alpha, write_csv, write_scores

CLINICS = ("Universitätsklinikum Bonn", "Universitätsklinikum Köln", "Universitätsklinikum Ulm", "West")


def drawn(spec):
    made = vl_convert.vegalite_to_svg({**spec, "width": 640}, vl_version="6.4")
    return re.findall(r"<text[^>]*>([^<]*)</text>", made)


def test_a_small_chart_numbers_each_round_once(tmp_path):
    facts = facts_of(write_scores(tmp_path))
    texts = drawn(charts.course(facts, charts.course_rows(facts), "North"))
    assert [text for text in texts if text in ("1", "2", "3")] == ["1", "2", "3"]


@pytest.mark.parametrize("value", [0.4, 0.0, -3.0, 4e-5])
def test_quality_that_does_not_change_is_labelled_with_its_value(tmp_path, value):
    path = write_csv(tmp_path, *(of_alpha([0, 0], 0, start=value, round=k) for k in (1, 2)))
    texts = drawn(charts.quality(facts_of(path)))
    numbers = [float(text) for text in texts if re.fullmatch(r"-?[0-9.]+", text)][2:]
    assert pytest.approx(value) in numbers
    assert len(set(numbers)) == len(numbers) >= 3


def test_long_names_stay_different_in_the_chart(tmp_path):
    path = write_scores(tmp_path, CLINICS)
    texts = drawn(charts.contribution(facts_of(path)))
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
