"""The page's charts as files: PNG, SVG or PDF, in the colours of white paper."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args

from fedmerit.errors import InputError, MissingExtra
from fedmerit.report.page.facts import Facts
from fedmerit.report.page.html import INSTALL

Kind = Literal["png", "pdf", "svg"]
WIDTH = 640
"""Pixels of a figure; PNG has three for each."""


def figures(facts: Facts, kind: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of all figures.

    Args:
        facts: of the page they belong to.
        kind: "png", "pdf" or "svg".
    """
    if kind not in get_args(Kind):
        raise InputError(f"figures must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        raise MissingExtra(f"figures need: {INSTALL}") from error
    for name, spec in _specs(facts):
        spec["width"], spec["background"] = WIDTH, "white"
        if kind == "png":
            made = vl_convert.vegalite_to_png(spec, vl_version="6.4", scale=3)
        elif kind == "pdf":
            made = vl_convert.vegalite_to_pdf(spec, vl_version="6.4")
        else:
            made = vl_convert.vegalite_to_svg(spec, vl_version="6.4").encode()
        yield f"{name}.{kind}", made


def _specs(facts: Facts) -> Iterator[tuple[str, dict[str, Any]]]:
    from fedmerit.report.page import charts

    rows = charts.course_rows(facts)
    drawn = {
        "contribution": charts.contribution(facts),
        "ranks": charts.ranks(facts),
        "quality": charts.quality(facts),
        "sums": charts.sums(facts),
    }
    for name, chart in drawn.items():
        if chart is not None:
            yield name, _on_paper(chart.to_dict())
    for place, one in enumerate(facts.courses[: charts.MOST_SMALL], start=1):
        spec = _on_paper(charts.course(facts, rows, one.client).to_dict())
        yield f"course-{place:02d}", {**spec, "title": one.client}


def _on_paper(spec: dict[str, Any]) -> dict[str, Any]:
    """The same chart with colours in place of CSS variables."""
    from fedmerit.report.page.charts import LIGHT

    plain = re.sub(r'"var\((--[a-z]+)\)"', lambda found: json.dumps(LIGHT[found[1]]), json.dumps(spec))
    made: dict[str, Any] = json.loads(plain)
    return made
