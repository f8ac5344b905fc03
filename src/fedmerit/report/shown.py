"""What a notebook shows of scores, shares and payouts: tables, and charts that are returned, never shown."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fedmerit.errors import MissingExtra
from fedmerit.files.documents import scores_columns
from fedmerit.notes import digits_for, formatted, signed, words
from fedmerit.scoring.amounts import Payouts, decimals_of
from fedmerit.scoring.rewards import Shares
from fedmerit.scoring.types import Scores

# -------------------------------------------------------------------------------------------------- tables

MOST_ROWS = 60
"""The most members in a table or chart."""


def html_table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of text, all of it escaped; the first cell of each row is its heading."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in headings)
    lines = []
    for first, *cells in rows:
        each = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{html.escape(first)}</th>{each}</tr>')
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def scores_html(scores: Scores) -> str:
    """Return the table that a notebook shows: best first, numbers as on the terminal."""
    digits = digits_for(float(np.max(np.abs(scores.values))))
    table = scores_columns(scores)
    found = {row[0]: dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)}
    rows = []
    for name in scores.ranking()[:MOST_ROWS]:
        row = found[name]
        rank, value = str(row["rank"]), signed(row["value"], digits)
        if scores.stderr is not None and row["rank_low"] != row["rank_high"]:
            rank += f" ({row['rank_low']}-{row['rank_high']})"
        if scores.stderr is not None and table["value"] == table["raw"]:  # the interval is of the raw score
            value += f" ± {(row['high'] - row['low']) / 2:.{digits}f}"
        rows.append((name, value, rank))
    gain = signed(scores.gain, digits)
    caption = [words("notebook.caption", score=scores.score, gain=gain)]
    if scores.rounds > 1:
        caption = [words("notebook.caption-rounds", score=scores.score, rounds=scores.rounds, gain=gain)]
    if scores.status != "ok":
        caption.append(words("notebook.status", status=words(f"status-short.{scores.status}")))
    if scores.n > MOST_ROWS:
        caption.append(words("notebook.first", most=MOST_ROWS, all=scores.n))
    headings = (words("notebook.client"), words("notebook.value"), words("notebook.rank"))
    return html_table(words("list.clause").join(caption), headings, rows)


def payouts_html(paid: Payouts) -> str:
    """Return the table that a notebook shows of amounts: best paid first."""
    spec = f",.{decimals_of(paid.currency)}f"
    budget, unpaid = (" ".join(filter(None, (formatted(amount, spec), paid.currency)))
                      for amount in (paid.budget, paid.unpaid))  # fmt: skip
    rows = [(name, formatted(amount, spec))
            for name, amount in sorted(paid.items(), key=lambda item: (-item[1], item[0]))]  # fmt: skip
    headings = (words("notebook.client"), words("terminal.payout"))
    return html_table(words("notebook.payouts", budget=budget, unpaid=unpaid), headings, rows)


# -------------------------------------------------------------------------------------------------- charts


def scores_plot(scores: Scores) -> Any:
    """Return an Altair chart of the raw scores, best first, with their 95 % intervals if they are known."""
    table = scores_columns(scores)
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    return _bars({row["client"]: row for row in rows}, scores.ranking(), "raw", scores.score)


def shares_plot(shares: Shares) -> Any:
    """Return an Altair chart of the shares, largest first."""
    rows = {name: {"client": name, "share": share} for name, share in shares.items()}
    order = sorted(shares, key=lambda name: (-shares[name], name))
    return _bars(rows, order, "share", words("terminal.share"), format="%")


def _bars(rows: dict[str, dict[str, Any]], order: Sequence[str], of: str, title: str, **axis: Any) -> Any:
    """Return bars with whiskers; names are data, so none is read as an expression."""
    try:
        import altair
    except ImportError as error:
        raise MissingExtra("a plot needs: pip install 'fedmerit[plot]'; to_csv() needs nothing") from error
    first = [rows[name] for name in order[:MOST_ROWS]]
    base = altair.Chart(altair.InlineData(values=first))
    y = altair.Y("client", type="nominal", sort=None, title=None, axis=altair.Axis(labelLimit=300))
    x = altair.X(of, type="quantitative", title=title, axis=altair.Axis(**axis))
    bars = base.mark_bar(opacity=0.8).encode(x=x, y=y)
    if not first or "low" not in first[0]:
        return altair.layer(bars)
    return bars + base.mark_rule(strokeWidth=2).encode(
        x=altair.X("low", type="quantitative", title=title), x2="high", y=y
    )
