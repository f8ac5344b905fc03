"""The charts of a page as Vega-Lite specs. Colours are CSS variables, so one chart serves screen and print.

Every chart is a function from facts to an altair chart as wide as its container. A name may contain any
character, because names are only data here, never part of an expression.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import altair as alt

from fedmerit.notes import labels, words
from fedmerit.report.comparison import Comparison
from fedmerit.report.facts import Facts
from fedmerit.report.page.folded import HEAD, ends
from fedmerit.report.text import spoken, worth
from fedmerit.scoring.accumulate import number_of
from fedmerit.scoring.types import UNIT_UTILITIES

# ------------------------------------------------------------------------------------------------- drawing

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
PLAIN_ZERO = "datum.value === 0 ? '0' : datum.label"
AT_END: dict[str, Any] = {"titleAnchor": "end", "titleAlign": "right"}
"""Where the title of an axis is that may be longer than the axis: left of it, below the names, is room."""


def locale() -> dict[str, Any]:
    """Return how numbers are written; a minus sign as on the terminal."""
    marks = {"decimal": words("number.decimal"), "thousands": words("number.thousands")}
    sign = {"percent": words("number.percent"), "minus": "-"}
    return {"number": {**marks, **sign, "grouping": [3], "currency": ["", ""]}}


def on(rows: list[dict[str, Any]]) -> Any:
    """Return a chart of these rows; typed Any, because altair's own types are too loose to be checked."""
    return alt.Chart(alt.Data(values=rows))  # type: ignore[no-untyped-call]


def zero(*, horizontal: bool = False) -> Any:
    rule = on([{}]).mark_rule(color="var(--soft)", strokeWidth=1)
    return rule.encode(y=alt.datum(0)) if horizontal else rule.encode(x=alt.datum(0))


def ticks_of(first: int, last: int, most: int = 8) -> list[int]:
    step = max(1, -(-(last - first) // most))
    return list(range(first, last + 1, step))


def scale_of(values: list[float]) -> alt.Scale:
    """Return a scale from the least to the largest value, with room around them if all are equal."""
    if max(values) > min(values):
        return alt.Scale(zero=False)
    room = 0.1 * abs(values[0]) or 1.0
    return alt.Scale(domain=[values[0] - room, values[0] + room], nice=False)


def with_room(low: float, high: float, left: int, right: int) -> alt.ExprRef:
    """Return a domain that leaves this many pixels free on either side at any width."""
    span = (high - low) or 1.0
    pixel = f"{span!r} / max(60, width - {left + right})"
    return alt.ExprRef(f"[{low!r} - {left} * {pixel}, {high!r} + {right} * {pixel}]")


def dressed(chart: Any, description: str, *, ticks: int = 12) -> alt.TopLevelMixin:
    dressed: alt.TopLevelMixin = chart.properties(
        width="container",
        description=description,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
    ).configure(  # at once: altair copies the chart at every call
        locale=locale(),
        font=FONT,
        background="transparent",
        padding={"left": 0, "right": 4, "top": 4, "bottom": 5},
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(
            domainColor="var(--line)",
            gridColor="var(--line)",
            tickColor="var(--line)",
            labelColor="var(--soft)",
            titleColor="var(--soft)",
            labelFontSize=ticks,
            titleFontSize=12,
            titleFontWeight="normal",
            titlePadding=8,
        ),
        mark=alt.MarkConfig(aria=False),
    )
    return dressed


# -------------------------------------------------------------------------------------------------- charts

LIGHT = {
    "--ink": "#1a1a1a",
    "--soft": "#595959",
    "--line": "#d9d9d4",
    "--accent": "#1f5c99",
    "--below": "#b04a00",
    "--ghost": "#b9b9b4",
    "--mute": "#85857f",
    "--paper": "#ffffff",
}
"""The values on white paper of the CSS variables that charts use."""

MOST_ROWS = 60
"""The most members in a chart that compares runs; of more, it shows the first."""
MOST_SMALL = 24
"""The most small charts of one member each."""
ROW = 30
MOST_BRACKETS = 3
"""The most groups marked in a chart; of more, it marks none."""
MOST_BARS = 120
"""The most rounds in a bar chart; of more, it shows the last."""
LABEL, NAME = 62, 88
"""Width of a number and of a name in pixels."""


def contribution(facts: Facts) -> alt.TopLevelMixin:
    """Return bars of the contributions with 95 % intervals, best first."""
    rows: list[dict[str, Any]] = []
    short, unit = _labels(facts), facts.unit
    for one in ends(facts.standings):
        low, high = (end * unit for end in one.interval or (one.total, one.total))
        total, below = one.total * unit, one.total < 0
        rows.append(
            {
                "member": short[one.client],
                "total": total,
                "low": low,
                "high": high,
                "text": worth(facts, one.total),
                "below": below,
                "end": min(low, total) if below else max(high, total),
            }
        )
    low, high = min(0.0, *(row["low"] for row in rows)), max(0.0, *(row["high"] for row in rows))
    brackets = _brackets(facts, rows)
    room = 5 * len(brackets)
    right = LABEL + room if high > 0 else room + 8 if brackets else 0  # free space beside the bars
    scale = alt.Scale(domain=with_room(low, high, LABEL if low < 0 else 0, right), nice=False)
    base = on(rows)
    y = _members(rows, facts)
    axis = alt.Axis(tickCount=5, format="+~f", labelExpr=PLAIN_ZERO, labelBound=True, **AT_END)
    code = "chart.contribution-points" if unit != 1 else "chart.contribution-to"
    x = alt.X("total:Q", title=words(code, measure=spoken(facts.utility)), scale=scale, axis=axis)
    colour = alt.condition("datum.below", alt.value("var(--below)"), alt.value("var(--accent)"))
    bars = base.mark_bar(size=13, opacity=0.72).encode(x=x, y=y, color=colour)
    layers = [zero(), bars]
    if facts.total.stderr is not None:
        layers.append(
            base.mark_rule(strokeWidth=1.6, color="var(--ink)").encode(x=alt.X("low:Q"), x2="high:Q", y=y)
        )
        for end in ("low", "high"):
            layers.append(
                base.mark_tick(thickness=1.6, size=9, color="var(--ink)").encode(x=alt.X(f"{end}:Q"), y=y)
            )
    for side, align in (("!datum.below", "left"), ("datum.below", "right")):
        text = base.mark_text(align=align, dx=7 if align == "left" else -7, fontSize=12, color="var(--ink)")
        layers.append(text.encode(x="end:Q", y=y, text="text:N").transform_filter(side))
    return dressed(
        alt.layer(*layers, *brackets).properties(height=alt.Step(ROW)),
        words("chart.contribution"),
    )


def ranks(facts: Facts) -> alt.TopLevelMixin | None:
    """Return the simultaneous 95 % intervals of all members' ranks; None without standard errors."""
    if facts.total.stderr is None:
        return None
    short = _labels(facts)
    rows = [
        {
            "member": short[one.client],
            "rank": one.rank,
            "low": one.rank_interval[0],
            "high": one.rank_interval[1],
        }
        for one in ends(facts.standings)
        if one.rank_interval is not None
    ]
    n = facts.total.n
    axis = alt.Axis(format="d", tickMinStep=1, tickCount=min(n, 10), grid=True, **AT_END)
    x = alt.X(
        "low:Q", title=words("chart.rank"), scale=alt.Scale(domain=[0.7, n + 0.3], nice=False), axis=axis
    )
    base, y = on(rows), _members(rows, facts)
    span = base.mark_rule(strokeWidth=7, strokeCap="round", color="var(--accent)", opacity=0.3)
    point = base.mark_point(shape="diamond", filled=True, size=75, color="var(--accent)", opacity=1)
    chart = alt.layer(span.encode(x=x, x2="high:Q", y=y), point.encode(x="rank:Q", y=y))
    return dressed(chart.properties(height=alt.Step(ROW)), words("chart.ranks"))


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


def course(facts: Facts, rows: list[dict[str, Any]], who: str, *, param: str = "who") -> alt.TopLevelMixin:
    """Return one member's sum over the rounds, with the other members behind it."""
    chosen = alt.param(name=param, value=who)
    base, shown = on(rows), list(facts.shown)
    x = alt.X(
        "round:Q",
        title=None,
        scale=alt.Scale(domain=[shown[0], max(shown[-1], shown[0] + 1)], nice=False),
        axis=alt.Axis(format="d", values=ticks_of(shown[0], shown[-1], most=4), grid=False, labelFlush=True),
    )
    known = [row["total"] for row in rows if row["total"] is not None]
    y = alt.Y(
        "total:Q",
        title=None,
        axis=alt.Axis(tickCount=3, format="+~f", labelExpr=PLAIN_ZERO),
        scale=alt.Scale(domain=[min(0.0, *known), max(0.0, *known)], nice=True),
    )
    own = f"datum.member === {param}"
    others = base.mark_line(strokeWidth=1, color="var(--ghost)").encode(x=x, y=y, detail="member:N")
    line = base.mark_line(strokeWidth=2.4, color="var(--accent)").encode(x=x, y=y).transform_filter(own)
    away = base.mark_point(shape="cross", angle=45, filled=True, size=70, color="var(--below)", opacity=1)
    last = base.mark_point(filled=True, size=38, color="var(--accent)", opacity=1)
    layers = (
        zero(horizontal=True),
        others,
        line,
        last.encode(x=x, y=y).transform_filter(f"{own} && datum.round === {shown[-1]}"),
        away.encode(x=x, y=y).transform_filter(f"{own} && datum.missed"),
    )
    chart = alt.layer(*layers).add_params(chosen).properties(height=96)
    return dressed(chart, words("chart.course"), ticks=10)


def quality(facts: Facts) -> alt.TopLevelMixin:
    """Return the utility of the shared model after each round: the paid one in front, companions behind."""
    measured: dict[str, Sequence[Any]] = {facts.utility or "utility": facts.measured}
    if facts.utility in UNIT_UTILITIES:
        measured |= {
            name: rounds
            for name, rounds in facts.source.companions.items()
            if rounds and name in UNIT_UTILITIES
        }
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
    x = alt.X(
        "round:Q",
        title=words("chart.round-zero" if facts.one_slice else "chart.round"),
        scale=alt.Scale(domain=with_room(first, last, 0, NAME), nice=False),
        axis=alt.Axis(format="d", values=ticks_of(first, shown[-1]), grid=False, domain=False),
    )
    y = alt.Y(
        "value:Q",
        title=words("chart.utility-points" if facts.unit != 1 else "chart.utility"),
        scale=scale_of([row["value"] for row in rows]),
        axis=alt.Axis(tickCount=5),
    )
    base = on(rows)
    colour = alt.condition("datum.paid", alt.value("var(--accent)"), alt.value("var(--mute)"))
    lines = base.mark_line(point=False).encode(
        x=x,
        y=y,
        detail="utility:N",
        color=colour,
        strokeWidth=alt.condition("datum.paid", alt.value(2.6), alt.value(1.4)),
    )
    points = base.mark_point(filled=True, size=34, opacity=1).encode(x=x, y=y, color=colour)
    ink = alt.condition("datum.paid", alt.value("var(--accent)"), alt.value("var(--soft)"))
    names = on(labelled).mark_text(align="left", baseline="middle", dx=10, fontSize=12.5)
    names = names.encode(x="round:Q", y="at:Q", text="label:N", color=ink)
    return dressed(alt.layer(lines, points, names).properties(height=250), words("chart.quality"))


def sums(facts: Facts) -> alt.TopLevelMixin:
    """Return each round's gain as a bar, and the sum of its contributions as a diamond."""
    kept = [one for one in facts.rounds if one.gain is not None][-MOST_BARS:]
    rows = [
        {
            "round": one.number,
            "gain": (one.gain or 0.0) * facts.unit,
            "explained": None if one.explained is None else one.explained * facts.unit,
        }
        for one in kept
    ]
    known = [row for row in rows if row["explained"] is not None]
    base = on(rows)
    x = alt.X(
        "round:O",
        title=words("chart.round"),
        axis=alt.Axis(labelAngle=0, labelOverlap=True, grid=False, ticks=False),
    )
    y = alt.Y(
        "gain:Q",
        title=words("chart.change-points" if facts.unit != 1 else "chart.change"),
        axis=alt.Axis(tickCount=5, format="+~f", labelExpr=PLAIN_ZERO),
    )
    bars = base.mark_bar(
        color="var(--ghost)",
        stroke="var(--mute)",
        strokeWidth=1,
        size=min(26, max(3, 600 // max(1, len(rows)) // 2)),
    ).encode(x=x, y=y)
    points = on(known).mark_point(
        shape="diamond",
        filled=True,
        size=110,
        color="var(--accent)",
        stroke="var(--paper)",
        strokeWidth=1.5,
        opacity=1,
    )
    chart = alt.layer(zero(horizontal=True), bars, points.encode(x=x, y="explained:Q"))
    return dressed(chart.properties(height=220), words("chart.sums"))


def settling(runs: Sequence[tuple[str, Facts]]) -> alt.TopLevelMixin:
    """Return the share of pairs of members in their final order after each round, one line for each run."""
    rows: list[dict[str, Any]] = [
        {"run": name, "round": number, "share": ordered / max(1, found.pairs)}
        for name, facts in runs
        if (found := facts.convergence) is not None
        for number, ordered in zip(found.numbers, found.ordered, strict=True)
    ]
    first, last = rows[0]["round"], rows[-1]["round"]
    x = alt.X(
        "round:Q",
        title=words("chart.round"),
        scale=alt.Scale(domain=[first, last], nice=False),
        axis=alt.Axis(format="d", values=ticks_of(first, last), grid=False),
    )
    y = alt.Y(
        "share:Q",
        title=words("chart.settling"),
        scale=alt.Scale(domain=[0, 1]),
        axis=alt.Axis(tickCount=5, format="%"),
    )
    base = on(rows)
    line = base.mark_line(strokeWidth=2, color="var(--accent)", opacity=0.75)
    point = base.mark_point(filled=True, size=30, color="var(--accent)", opacity=0.75)
    chart = alt.layer(line.encode(x=x, y=y, detail="run:N"), point.encode(x=x, y=y))
    return dressed(chart.properties(height=180), words("chart.settling-title"))


# ------------------------------------------------------------------------------------------------ comparison


def scores_of_runs(found: Comparison) -> alt.TopLevelMixin:
    """Return every member's mean over runs as a bar, with the runs as dots and the interval as whiskers."""
    kept = found.rows[:MOST_ROWS]
    short = labels([one.client for one in kept])
    rows: list[dict[str, Any]] = []
    dots = []
    for one in kept:
        mean, *ends = (value * found.unit for value in (one.mean, *(one.interval or (one.mean, one.mean))))
        rows.append({"member": short[one.client], "mean": mean, "low": ends[0], "high": ends[1]})
        dots += [{"member": short[one.client], "score": value * found.unit} for value in one.scores]
    code = "chart.contribution-points" if found.unit != 1 else "chart.contribution-to"
    x = alt.X(
        "mean:Q",
        title=words(code, measure=spoken(found.first.utility)),
        axis=alt.Axis(tickCount=5, format="+f", labelExpr=PLAIN_ZERO, labelBound=True),
    )
    base, y = on(rows), _members(rows)
    layers = [zero(), base.mark_bar(size=17, color="var(--ghost)", opacity=0.55).encode(x=x, y=y)]
    if found.numbers.test is not None:
        rule = base.mark_rule(strokeWidth=1.4, color="var(--ink)")
        layers.append(rule.encode(x=alt.X("low:Q"), x2="high:Q", y=y))
        for end in ("low", "high"):
            tick = base.mark_tick(thickness=1.4, size=9, color="var(--ink)")
            layers.append(tick.encode(x=alt.X(f"{end}:Q"), y=y))
    point = on(dots).mark_point(
        filled=True, size=58, color="var(--accent)", stroke="var(--paper)", strokeWidth=1, opacity=0.9
    )
    layers.append(point.encode(x="score:Q", y=y))
    return dressed(alt.layer(*layers).properties(height=alt.Step(ROW)), words("chart.scores"))


def spreads(found: Comparison) -> alt.TopLevelMixin:
    """Return both spreads of every member, one bar above the other."""
    kept = found.rows[:MOST_ROWS]
    short = labels([one.client for one in kept])
    rows = [
        {
            "member": short[one.client],
            "training": one.training * found.unit,
            "test": (one.test or 0.0) * found.unit,
        }
        for one in kept
    ]
    title = words("chart.spread-points" if found.unit != 1 else "chart.spread")
    sure = found.numbers.test is not None
    axis = alt.Axis(tickCount=4, labelBound=True)
    layers = []
    for key, colour, shift in (("training", "accent", -5), ("test", "below", 5))[: 2 if sure else 1]:
        bar = on(rows).mark_bar(size=9, color=f"var(--{colour})", opacity=0.75, yOffset=shift if sure else 0)
        layers.append(bar.encode(x=alt.X(f"{key}:Q", title=title, axis=axis), y=_members(rows)))
    return dressed(alt.layer(*layers).properties(height=alt.Step(ROW)), words("chart.spreads"))


def ranks_of_runs(found: Comparison) -> alt.TopLevelMixin:
    """Return every member's ranks in the runs as dots, on a band from the best to the worst."""
    kept = found.rows[:MOST_ROWS]
    short = labels([one.client for one in kept])
    rows = [{"member": short[one.client], "low": min(one.ranks), "high": max(one.ranks)} for one in kept]
    dots = [{"member": short[one.client], "rank": rank} for one in kept for rank in sorted(set(one.ranks))]
    n = len(found.rows)
    axis = alt.Axis(format="d", tickMinStep=1, tickCount=min(n, 10), grid=True, **AT_END)
    scale = alt.Scale(domain=[0.7, n + 0.3], nice=False)
    x = alt.X("low:Q", title=words("chart.rank"), scale=scale, axis=axis)
    y = _members(rows)
    span = on(rows).mark_rule(strokeWidth=7, strokeCap="round", color="var(--accent)", opacity=0.3)
    point = on(dots).mark_point(filled=True, size=60, color="var(--accent)", opacity=1)
    chart = alt.layer(span.encode(x=x, x2="high:Q", y=y), point.encode(x="rank:Q", y=y))
    return dressed(chart.properties(height=alt.Step(ROW)), words("chart.ranks-of-runs"))


# -------------------------------------------------------------------------------------------------- helpers


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


def _brackets(facts: Facts, rows: list[dict[str, Any]]) -> list[Any]:
    """Return brackets at the right edge for groups of indistinguishable members, if there are few groups.

    Each member of a group has a tick, because a group may skip a member in the ranking.
    """
    drawn = {row["member"] for row in rows}
    called = _labels(facts)
    several = [[called.get(name, "") for name in group] for group in facts.groups if len(group) > 1]
    groups = [[name for name in group if name in drawn] for group in several]
    found: list[Any] = []
    for place, group in enumerate(groups if len(groups) <= MOST_BRACKETS else ()):
        if len(group) < 2:
            continue
        marks = [{"first": group[0], "last": group[-1], "member": name} for name in group]
        at = alt.value({"expr": f"width - {7 * place}"})
        colour = "var(--soft)"
        line = on(marks[:1]).mark_rule(color=colour, strokeWidth=1.4)
        tick = on(marks).mark_rule(color=colour, strokeWidth=1.4)
        found.append(line.encode(x=at, y=alt.Y("first:N", scale=_order(rows, facts)), y2="last:N"))
        short = alt.value({"expr": f"width - {7 * place + 5}"})
        found.append(tick.encode(x=short, x2=at, y=alt.Y("member:N", scale=_order(rows, facts))))
    return found


def _labels(facts: Facts) -> dict[str, str]:
    return labels([one.client for one in ends(facts.standings)])


def _order(rows: list[dict[str, Any]], facts: Facts | None = None) -> alt.Scale:
    """Return the scale of members; a line of its own stands for those who are folded."""
    domain = [row["member"] for row in rows]
    if facts is not None and (left := len(facts.standings) - len(domain)) > 0:
        domain.insert(HEAD, words("chart.between", left=left))
    return alt.Scale(domain=domain)


def _members(rows: list[dict[str, Any]], facts: Facts | None = None) -> alt.Y:
    axis = alt.Axis(
        domain=False, ticks=False, labelPadding=8, labelLimit=0, labelFontSize=13, labelColor="var(--ink)"
    )
    return alt.Y("member:N", title=None, scale=_order(rows, facts), axis=axis)
