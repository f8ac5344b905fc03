"""What every chart of the page is drawn with: scales, ticks, type."""

from __future__ import annotations

from typing import Any

import altair as alt

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
_LOCALE = {"number": {"decimal": ".", "thousands": ",", "grouping": [3], "currency": ["", ""], "minus": "-"}}
"""A minus as the terminal writes it."""
PLAIN_ZERO = "datum.value === 0 ? '0' : datum.label"


def on(rows: list[dict[str, Any]]) -> Any:
    """A chart of these rows; altair's own types are too loose to be checked beyond this."""
    return alt.Chart(alt.Data(values=rows))  # type: ignore[no-untyped-call]


def zero(*, horizontal: bool = False) -> Any:
    rule = on([{}]).mark_rule(color="var(--soft)", strokeWidth=1)
    return rule.encode(y=alt.datum(0)) if horizontal else rule.encode(x=alt.datum(0))


def ticks_of(first: int, last: int, most: int = 8) -> list[int]:
    step = max(1, -(-(last - first) // most))
    return list(range(first, last + 1, step))


def scale_of(values: list[float]) -> alt.Scale:
    """From the least to the largest value; room around them where they are all the same."""
    if max(values) > min(values):
        return alt.Scale(zero=False)
    room = 0.1 * abs(values[0]) or 1.0
    return alt.Scale(domain=[values[0] - room, values[0] + room], nice=False)


def with_room(low: float, high: float, left: int, right: int) -> alt.ExprRef:
    """A domain that leaves so many pixels free on either side, whatever the width."""
    span = (high - low) or 1.0
    pixel = f"{span!r} / max(60, width - {left + right})"
    return alt.ExprRef(f"[{low!r} - {left} * {pixel}, {high!r} + {right} * {pixel}]")


def dressed(chart: Any, description: str, *, ticks: int = 12) -> alt.TopLevelMixin:
    dressed: alt.TopLevelMixin = (
        chart.properties(
            width="container",
            description=description,
            autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        )
        .configure(
            locale=_LOCALE,
            font=FONT,
            background="transparent",
            padding={"left": 0, "right": 4, "top": 4, "bottom": 5},
        )
        .configure_view(stroke=None)
        .configure_axis(
            domainColor="var(--line)",
            gridColor="var(--line)",
            tickColor="var(--line)",
            labelColor="var(--soft)",
            titleColor="var(--soft)",
            labelFontSize=ticks,
            titleFontSize=12,
            titleFontWeight="normal",
            titlePadding=8,
        )
        .configure_mark(aria=False)
    )
    return dressed
