"""The charts of a page as Vega-Lite specs. Colours are CSS variables, so one chart serves screen and print.

Every chart is a function from facts to a spec as wide as its container: plain dictionaries, which `layer`,
`field` and `dressed` write. A name may contain any character, because names are only data here, never part of
an expression.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Any, TypeVar

from fedmerit.notes import words
from fedmerit.report.comparison import ComparedMember, Comparison
from fedmerit.report.facts import Facts
from fedmerit.report.text import spoken, worth
from fedmerit.scoring.accumulate import number_of
from fedmerit.scoring.types import UNIT_UTILITIES

# ------------------------------------------------------------------------------------------------- drawing

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
PLAIN_ZERO = "datum.value === 0 ? '0' : datum.label"
AT_END: dict[str, Any] = {"titleAnchor": "end", "titleAlign": "right"}
"""Where the title of an axis is that may be longer than the axis: left of it, below the names, is room."""
SIGNED: dict[str, Any] = {"tickCount": 5, "format": "+~f", "labelExpr": PLAIN_ZERO}
"""The axis of contributions and gains."""
DOT: dict[str, Any] = {"filled": True, "color": "var(--accent)", "opacity": 1}

Spec = dict[str, Any]
"""A part of a chart, or a whole one, as Vega-Lite reads it."""
_KINDS = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}


def locale() -> dict[str, Any]:
    """Return how numbers are written; a minus sign as on the terminal."""
    marks = {"decimal": words("number.decimal"), "thousands": words("number.thousands")}
    sign = {"percent": words("number.percent"), "minus": "-"}
    return {"number": {**marks, **sign, "grouping": [3], "currency": ["", ""]}}


def field(shorthand: str, **options: Any) -> Spec:
    """Return how a channel shows a column.

    >>> field("total:Q", title=None)
    {'field': 'total', 'type': 'quantitative', 'title': None}
    """
    name, _, kind = shorthand.partition(":")
    return {"field": name, "type": _KINDS[kind], **options}


def layer(rows: list[dict[str, Any]], mark: str, encoding: Spec, *, only: str = "", **look: Any) -> Spec:
    """Return a layer of a chart; ``mark`` is what a row becomes, ``only`` an expression that chooses rows."""
    chosen = {"transform": [{"filter": only}]} if only else {}
    return {"data": {"values": rows}, **chosen, "mark": {"type": mark, **look}, "encoding": encoding}


def either(test: str, one: Any, other: Any) -> Spec:
    """Return a channel with one value in rows that pass a test, and another value in the others."""
    return {"condition": {"test": test, "value": one}, "value": other}


def zero(*, horizontal: bool = False) -> Spec:
    at = {"y" if horizontal else "x": {"datum": 0}}
    return layer([{}], "rule", at, color="var(--soft)", strokeWidth=1)


def scale_of(values: list[float]) -> Spec:
    """Return a scale from the least to the largest value, with room around them if all are equal."""
    if max(values) > min(values):
        return {"zero": False}
    room = 0.1 * abs(values[0]) or 1.0
    return {"domain": [values[0] - room, values[0] + room], "nice": False}


def with_room(low: float, high: float, left: int, right: int) -> Spec:
    """Return a domain that leaves this many pixels free on either side at any width."""
    span = (high - low) or 1.0
    pixel = f"{span!r} / max(60, width - {left + right})"
    return {"expr": f"[{low!r} - {left} * {pixel}, {high!r} + {right} * {pixel}]"}


def dressed(*layers: Spec, description: str, height: int | Spec, ticks: int = 12, **more: Any) -> Spec:
    """Return a whole chart of layers, the first one at the bottom."""
    return {
        "layer": [*layers],
        "width": "container",
        "height": height,
        "description": description,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": {
            "locale": locale(),
            "font": FONT,
            "background": "transparent",
            "padding": {"left": 0, "right": 4, "top": 4, "bottom": 5},
            "view": {"stroke": None},
            "axis": {
                **{f"{part}Color": "var(--line)" for part in ("domain", "grid", "tick")},
                **{f"{part}Color": "var(--soft)" for part in ("label", "title")},
                "labelFontSize": ticks,
                "titleFontSize": 12,
                "titleFontWeight": "normal",
                "titlePadding": 8,
            },
            "mark": {"aria": False},
        },
        **more,
    }


# -------------------------------------------------------------------------------------------------- charts

MOST_ROWS = 60
"""The most members in a chart that compares runs; of more, it shows the first."""
MOST_SMALL = 24
"""The most small charts of one member each."""
ROW = {"step": 30}
MOST_BARS = 120
"""The most rounds in a bar chart; of more, it shows the last."""
LABEL, NAME = 62, 88
"""Width of a number and of a name in pixels."""


def contribution(facts: Facts) -> Spec:
    """Return bars of the contributions with 95 % intervals, best first."""
    rows: list[dict[str, Any]] = []
    short, unit = _labels(facts), facts.unit
    for standing in ends(facts.standings):
        low, high = (end * unit for end in standing.interval or (standing.total, standing.total))
        total, below, text = standing.total * unit, standing.total < 0, worth(facts, standing.total)
        end = min(low, total) if below else max(high, total)
        row = {"member": short[standing.client], "total": total, "low": low, "high": high}
        rows.append(row | {"below": below, "text": text, "end": end})
    low, high = min(0.0, *(row["low"] for row in rows)), max(0.0, *(row["high"] for row in rows))
    room = with_room(low, high, LABEL if low < 0 else 0, LABEL if high > 0 else 0)  # beside the bars
    y, title = _members(rows, facts), _contribution_title(unit, facts.utility)
    axis = {**SIGNED, "labelBound": True, **AT_END}
    x = field("total:Q", title=title, scale={"domain": room, "nice": False}, axis=axis)
    colour = either("datum.below", "var(--below)", "var(--accent)")
    layers = [zero(), layer(rows, "bar", {"x": x, "y": y, "color": colour}, size=13, opacity=0.72)]
    if facts.total.stderr is not None:
        layers += _whiskers(rows, y, width=1.6)
    for side, align, shift in (("!datum.below", "left", 7), ("datum.below", "right", -7)):
        at = {"x": field("end:Q"), "y": y, "text": field("text:N")}
        look: Spec = {"align": align, "dx": shift, "fontSize": 12, "color": "var(--ink)"}
        layers.append(layer(rows, "text", at, only=side, **look))
    return dressed(*layers, height=ROW, description=words("chart.contribution"))


def ranks(facts: Facts) -> Spec | None:
    """Return the simultaneous 95 % intervals of all members' ranks; None without standard errors."""
    if facts.total.stderr is None:
        return None
    short, rows, dots = _labels(facts), [], []
    for standing in ends(facts.standings):
        if standing.rank_interval is not None:
            member, (low, high) = short[standing.client], standing.rank_interval
            rows.append({"member": member, "low": low, "high": high})
            dots.append({"member": member, "rank": standing.rank})
    y, title = _members(rows, facts), words("chart.ranks")
    return _rank_chart(rows, dots, facts.total.n, y, title, shape="diamond", size=75)


def course_rows(facts: Facts) -> list[dict[str, Any]]:
    """Return one row per member and round shown."""
    return [
        {
            "member": client,
            "round": number,
            "total": (total or 0.0) * facts.unit,
            "missed": facts.happened[client][number] != "counted",
        }
        for client, totals in ends(list(facts.courses.items()), MOST_SMALL)
        for number, total in zip(facts.shown, totals, strict=True)
    ]


def course(facts: Facts, rows: list[dict[str, Any]], who: str) -> Spec:
    """Return one member's sum over the rounds, with the other members behind it."""
    shown = list(facts.shown)
    scale = {"domain": [shown[0], max(shown[-1], shown[0] + 1)], "nice": False}
    axis = {**_rounds_axis(shown[0], shown[-1], most=4), "labelFlush": True}
    x = field("round:Q", title=None, scale=scale, axis=axis)
    totals = [row["total"] for row in rows]
    scale = {"domain": [min(0.0, *totals), max(0.0, *totals)], "nice": True}
    at = {"x": x, "y": field("total:Q", title=None, axis={**SIGNED, "tickCount": 3}, scale=scale)}
    own, last = "datum.member === who", f"datum.round === {shown[-1]}"
    away = {**DOT, "shape": "cross", "angle": 45, "size": 70, "color": "var(--below)"}
    return dressed(
        zero(horizontal=True),
        layer(rows, "line", {**at, "detail": field("member:N")}, strokeWidth=1, color="var(--ghost)"),
        layer(rows, "line", at, only=own, strokeWidth=2.4, color="var(--accent)"),
        layer(rows, "point", at, only=f"{own} && {last}", **DOT, size=38),
        layer(rows, "point", at, only=f"{own} && datum.missed", **away),
        params=[{"name": "who", "value": who}],
        height=96,
        description=words("chart.course"),
        ticks=10,
    )


def quality(facts: Facts) -> Spec:
    """Return the utility of the shared model after each round: the paid one in front, companions behind."""
    measured: dict[str, Sequence[Any]] = {facts.utility or "utility": facts.measured}
    if facts.utility in UNIT_UTILITIES:
        others = facts.source.companions.items()
        measured |= {name: rounds for name, rounds in others if rounds and name in UNIT_UTILITIES}
    rows: list[dict[str, Any]] = []
    shown = list(facts.shown)
    for name, rounds in measured.items():
        if facts.one_slice:  # v(M0) of round 1 was measured on the same samples
            rows.append({"utility": name, "round": shown[0] - 1, "value": rounds[0].empty * facts.unit})
        for place, one in enumerate(rounds, start=1):
            number = number_of(one, place)
            if number in facts.shown:
                rows.append({"utility": name, "round": number, "value": one.grand * facts.unit})
    paid = next(iter(measured))
    for row in rows:
        row["paid"] = row["utility"] == paid
    labelled = _apart([row for row in rows if row["round"] == shown[-1]], rows)
    first, last = min(row["round"] for row in rows), max(shown[-1], shown[0] + 1)
    title = words("chart.round-zero" if facts.one_slice else "column.round")
    scale = {"domain": with_room(first, last, 0, NAME), "nice": False}
    axis = {**_rounds_axis(first, shown[-1]), "domain": False}
    x = field("round:Q", title=title, scale=scale, axis=axis)
    title = words("chart.utility-points" if facts.unit != 1 else "chart.utility")
    scale = scale_of([row["value"] for row in rows])
    y = field("value:Q", title=title, scale=scale, axis={"tickCount": 5})
    at = {"x": x, "y": y, "color": either("datum.paid", "var(--accent)", "var(--mute)")}
    line = {**at, "detail": field("utility:N"), "strokeWidth": either("datum.paid", 2.6, 1.4)}
    label = {"x": field("round:Q"), "y": field("at:Q"), "text": field("label:N")}
    label["color"] = either("datum.paid", "var(--accent)", "var(--soft)")
    return dressed(
        layer(rows, "line", line, point=False),
        layer(rows, "point", at, filled=True, size=34, opacity=1),
        layer(labelled, "text", label, align="left", baseline="middle", dx=10, fontSize=12.5),
        height=250,
        description=words("chart.quality"),
    )


def sums(facts: Facts) -> Spec:
    """Return each round's gain as a bar, and the sum of its contributions as a diamond."""
    scored = [one for one in facts.rounds if one.gain is not None][-MOST_BARS:]
    rows = [{"round": one.number, "gain": (one.gain or 0.0) * facts.unit} for one in scored]
    known = {one.number: one.explained for one in scored if one.explained is not None}
    explained = [{"round": number, "explained": value * facts.unit} for number, value in known.items()]
    axis = {"labelAngle": 0, "labelOverlap": True, "grid": False, "ticks": False}
    x = field("round:O", title=words("column.round"), axis=axis)
    title = words("chart.change-points" if facts.unit != 1 else "chart.change")
    y = field("gain:Q", title=title, axis=SIGNED)
    width = min(26, max(3, 600 // max(1, len(rows)) // 2))
    grey: Spec = {"color": "var(--ghost)", "stroke": "var(--mute)", "strokeWidth": 1}
    bars = layer(rows, "bar", {"x": x, "y": y}, size=width, **grey)
    edge: Spec = {"shape": "diamond", "size": 110, "stroke": "var(--paper)", "strokeWidth": 1.5}
    points = layer(explained, "point", {"x": x, "y": field("explained:Q")}, **DOT, **edge)
    return dressed(zero(horizontal=True), bars, points, height=220, description=words("chart.sums"))


def settling(runs: Sequence[tuple[str, Facts]]) -> Spec:
    """Return the share of pairs of members in their final order after each round, one line for each run."""
    rows: list[dict[str, Any]] = [
        {"run": name, "round": number, "share": ordered / max(1, found.pairs)}
        for name, facts in runs
        if (found := facts.convergence) is not None
        for number, ordered in zip(found.numbers, found.ordered, strict=True)
    ]
    first, last = rows[0]["round"], rows[-1]["round"]
    scale, axis = {"domain": [first, last], "nice": False}, _rounds_axis(first, last)
    x = field("round:Q", title=words("column.round"), scale=scale, axis=axis)
    axis = {"tickCount": 5, "format": "%"}
    y = field("share:Q", title=words("chart.settling"), scale={"domain": [0, 1]}, axis=axis)
    at, look = {"x": x, "y": y}, Spec(color="var(--accent)", opacity=0.75)
    return dressed(
        layer(rows, "line", {**at, "detail": field("run:N")}, strokeWidth=2, **look),
        layer(rows, "point", at, filled=True, size=30, **look),
        height=180,
        description=words("chart.settling-title"),
    )


# ------------------------------------------------------------------------------------------------ comparison


def _compared(found: Comparison) -> list[tuple[str, ComparedMember]]:
    """Return the members shown, each with its label."""
    members = found.rows[:MOST_ROWS]
    return list(zip(labels([member.client for member in members]).values(), members, strict=True))


def scores_of_runs(found: Comparison) -> Spec:
    """Return every member's mean over runs as a bar, with the runs as dots and the interval as whiskers."""
    rows: list[dict[str, Any]] = []
    dots = []
    for label, member in _compared(found):
        interval = member.interval or (member.mean, member.mean)
        mean, low, high = (value * found.unit for value in (member.mean, *interval))
        rows.append({"member": label, "mean": mean, "low": low, "high": high})
        dots += [{"member": label, "score": value * found.unit} for value in member.scores]
    title = _contribution_title(found.unit, found.first.utility)
    x = field("mean:Q", title=title, axis={**SIGNED, "format": "+f", "labelBound": True})
    y = _members(rows)
    layers = [zero(), layer(rows, "bar", {"x": x, "y": y}, size=17, color="var(--ghost)", opacity=0.55)]
    if found.numbers.test is not None:
        layers += _whiskers(rows, y, width=1.4)
    look: Spec = DOT | {"size": 58, "stroke": "var(--paper)", "strokeWidth": 1, "opacity": 0.9}
    point = layer(dots, "point", {"x": field("score:Q"), "y": y}, **look)
    return dressed(*layers, point, height=ROW, description=words("chart.scores"))


def spreads(found: Comparison) -> Spec:
    """Return both spreads of every member, one bar above the other."""
    rows: list[dict[str, Any]] = []
    for label, member in _compared(found):
        training, test = member.training * found.unit, (member.test or 0.0) * found.unit
        rows.append({"member": label, "training": training, "test": test})
    title = words("chart.spread-points" if found.unit != 1 else "chart.spread")
    sure = found.numbers.test is not None
    axis = {"tickCount": 4, "labelBound": True}
    layers = []
    for key, colour, shift in (("training", "accent", -5), ("test", "below", 5))[: 2 if sure else 1]:
        at = {"x": field(f"{key}:Q", title=title, axis=axis), "y": _members(rows)}
        look: Spec = {"color": f"var(--{colour})", "opacity": 0.75, "yOffset": shift if sure else 0}
        layers.append(layer(rows, "bar", at, size=9, **look))
    return dressed(*layers, height=ROW, description=words("chart.spreads"))


def ranks_of_runs(found: Comparison) -> Spec:
    """Return every member's ranks in the runs as dots, on a band from the best to the worst."""
    ranks = {label: member.ranks for label, member in _compared(found)}
    rows = [{"member": label, "low": min(own), "high": max(own)} for label, own in ranks.items()]
    dots = [{"member": label, "rank": rank} for label, own in ranks.items() for rank in sorted(set(own))]
    title = words("chart.ranks-of-runs")
    return _rank_chart(rows, dots, len(found.rows), _members(rows), title, size=60)


# -------------------------------------------------------------------------------------------------- helpers


def _contribution_title(unit: int, utility: str | None) -> str:
    code = "chart.contribution-points" if unit != 1 else "chart.contribution-to"
    return words(code, measure=spoken(utility))


def _rounds_axis(first: int, last: int, most: int = 8) -> Spec:
    step = max(1, -(-(last - first) // most))
    return {"format": "d", "values": list(range(first, last + 1, step)), "grid": False}


def _whiskers(rows: list[dict[str, Any]], y: Spec, *, width: float) -> list[Spec]:
    """Return a line from ``low`` to ``high``, with a tick at either end."""
    span = {"x": field("low:Q"), "x2": {"field": "high"}, "y": y}
    found = [layer(rows, "rule", span, strokeWidth=width, color="var(--ink)")]
    for end in ("low", "high"):
        at = {"x": field(f"{end}:Q"), "y": y}
        found.append(layer(rows, "tick", at, thickness=width, size=9, color="var(--ink)"))
    return found


def _rank_chart(
    rows: list[dict[str, Any]], dots: list[dict[str, Any]], n: int, y: Spec, description: str, **look: Any
) -> Spec:
    """Return the ranks of n members as dots, on broad lines from ``low`` to ``high``."""
    axis = {"format": "d", "tickMinStep": 1, "tickCount": min(n, 10), "grid": True, **AT_END}
    scale = {"domain": [0.7, n + 0.3], "nice": False}
    x = field("low:Q", title=words("chart.rank"), scale=scale, axis=axis)
    broad: Spec = {"strokeWidth": 7, "strokeCap": "round", "color": "var(--accent)", "opacity": 0.3}
    band = layer(rows, "rule", {"x": x, "x2": {"field": "high"}, "y": y}, **broad)
    points = layer(dots, "point", {"x": field("rank:Q"), "y": y}, **DOT, **look)
    return dressed(band, points, height=ROW, description=description)


def _apart(last: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the labels at the ends of lines, best first, moved down where they would overlap."""
    values = [row["value"] for row in rows]
    line = 0.065 * ((max(values) - min(values)) or 1.0)  # the height of a line of text
    placed: list[dict[str, Any]] = []
    free = max(values) + line
    for row in sorted(last, key=lambda row: -row["value"]):
        label = textwrap.wrap(spoken(row["utility"]), 12)
        at = min(row["value"], free - len(label) * line / 2)
        free = at - len(label) * line / 2
        placed.append({**row, "at": at, "label": label})
    return placed


def _labels(facts: Facts) -> dict[str, str]:
    return labels([one.client for one in ends(facts.standings)])


def _members(rows: list[dict[str, Any]], facts: Facts | None = None) -> Spec:
    """Return the axis of members; a line of its own stands for those who are folded."""
    domain = [row["member"] for row in rows]
    if facts is not None and (left := len(facts.standings) - len(domain)) > 0:
        domain.insert(HEAD, words("chart.between", left=left))
    axis = {"domain": False, "ticks": False, "labelPadding": 8, "labelLimit": 0}
    ink = {"labelFontSize": 13, "labelColor": "var(--ink)"}
    return field("member:N", title=None, scale={"domain": domain}, axis=axis | ink)


# ------------------------------------------------------ which members a long table or chart shows at once

MOST = 30
"""The most members that are all shown at once."""
HEAD, TAIL = 15, 10
"""Of more members: how many of the first and of the last."""

Item = TypeVar("Item")


def is_middle(place: int, count: int) -> bool:
    """Return whether the member at a place, counted from 0, is folded.

    >>> [is_middle(place, 40) for place in (14, 15, 29, 30)], is_middle(15, 30)
    ([False, True, True, False], False)
    """
    return count > MOST and HEAD <= place < count - TAIL


def ends(items: Sequence[Item], most: int | None = None) -> list[Item]:
    """Return the items that are shown; of more than ``most``, equally many of the first and the last."""
    if most is not None:
        head = most - most // 2
        return list(items) if len(items) <= most else [*items[:head], *items[len(items) - most // 2 :]]
    return [one for place, one in enumerate(items) if not is_middle(place, len(items))]


# -------------------------------------------------------------------------------------------- short names

WIDTH = 18
"""Width of a label in letters; a wide letter counts as two."""


def labels(names: Sequence[str]) -> dict[str, str]:
    """Return name -> label: long names lose their middle, at a place where no two labels become equal.

    >>> clinics = ["Universitätsklinikum Bonn", "Universitätsklinikum Köln", "Ulm"]
    >>> list(labels(clinics).values())
    ['Universit…kum Bonn', 'Universit…kum Köln', 'Ulm']
    """
    for tail in range((WIDTH - 1) // 2, WIDTH):  # names often differ at the end
        found = {name: _cut(name, WIDTH - 1 - tail, tail) for name in names}
        if len(set(found.values())) == len(names):
            return found
    marks = [f"… ({place})" for place in range(1, len(names) + 1)]  # they differ only in the middle
    return {name: _head(name, WIDTH - len(mark)) + mark for name, mark in zip(names, marks, strict=True)}


def _cut(name: str, head: int, tail: int) -> str:
    if sum(map(_width, name)) <= head + 1 + tail:
        return name
    return f"{_head(name, head).rstrip()}…{_head(name[::-1], tail)[::-1].lstrip()}"


def _head(name: str, width: int) -> str:
    used = 0
    for place, letter in enumerate(name):
        used += _width(letter)
        if used > width:
            return name[:place]
    return name


def _width(letter: str) -> int:
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
