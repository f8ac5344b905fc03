"""What is written of scores: all that follows from reports, as JSON and CSV; scores as tables and charts.

It adds to `Scores`, `Shares` and `Payouts` how they are shown: as frames, as CSV and in a notebook.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedmerit.errors import MissingExtra
from fedmerit.files.reports import PER_CLIENT
from fedmerit.files.sheets import sheet_text
from fedmerit.notes import digits_for, formatted, signed, words
from fedmerit.scoring.accumulate import Missing, totals_of
from fedmerit.scoring.amounts import Payouts
from fedmerit.scoring.panel import Panel
from fedmerit.scoring.rewards import Shares
from fedmerit.scoring.scores import SCORES, scores_of
from fedmerit.scoring.types import SHOWN, Reports, Scores, Vector
from fedmerit.scoring.uncertainty import intervals, rank_intervals

_PER_ROUND = ("solo_empty", "slice", "freedom")


class RoundEntry(dict[str, Any]):
    """A round of a document, which is written again while rounds are added: it never changes."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self._texts: dict[Any, str] = {}

    def text(self, form: Any, made: Callable[[], str]) -> str:
        if form not in self._texts:
            self._texts[form] = made()
        return self._texts[form]


def document(
    rounds: Sequence[Reports], *, clients: Sequence[str] | None = None, missing: Missing = "zero"
) -> dict[str, Any]:
    """Return everything that follows from the reports of one utility, ready for JSON.

    ``clients`` is the whole roster, by default everybody who was in a round.
    """
    seen = dict.fromkeys(name for reports in rounds for name in (*reports.clients, *reports.silent))
    names = list(clients or seen)
    return {
        "clients": names,
        "utility": rounds[0].utility if rounds else None,
        "rounds": [round_object(reports) for reports in rounds],
        **sums_object(rounds, names, missing=missing),
    }


def sums_object(rounds: Sequence[Reports], names: Sequence[str], *, missing: Missing) -> dict[str, Any]:
    """Return what a document says of all rounds together; lists are in the order of ``names``."""
    totals = totals_of(rounds, missing=missing)
    return {
        "cumulative": {name: _spread(scores.values, scores, names) for name, scores in totals.items()},
        "stderr": {
            name: _spread(scores.stderr, scores, names)
            for name, scores in totals.items()
            if scores.stderr is not None
        },
        "coverage": _spread(totals["ALPHA"].coverage, totals["ALPHA"], names) if totals else [],
    }


def round_object(reports: Reports) -> dict[str, Any]:
    """Return one round for JSON: its clients, their reports, every score that exists, and status."""
    scores = scores_of(reports)
    optional = {name: _numbers(getattr(reports, name)) for name in PER_CLIENT}
    optional |= {name: getattr(reports, name) for name in _PER_ROUND}
    optional["sketch"] = None if reports.sketch is None else reports.sketch.tolist()
    return {
        "round": reports.round,
        "participants": list(reports.clients),
        **({"silent": list(reports.silent)} if reports.silent else {}),
        "reports": {
            "empty": reports.empty,
            "grand": reports.grand,
            "alone": _numbers(reports.alone),
            "without": _numbers(reports.without),
            **{name: value for name, value in optional.items() if value is not None},
        },
        "scores": {name: score and _numbers(score.values) for name, score in scores.items()},
        "status": {name: score.status for name, score in scores.items() if score and name in ("FP", "EE")},
    }


def as_json(content: Mapping[str, Any]) -> str:
    """Return the canonical text of a document: that of ``json.dumps(content, indent=1)``, in less time."""
    return _indented(content, "\n") + "\n"


def _indented(value: Any, line: str) -> str:
    """Return a value as JSON with one space per level; ``line`` is a line break and the indentation so far.

    With an indentation, Python's own encoder is not the fast one, but that one takes any separator.
    """
    inner = line + " "
    plain = partial(json.dumps, allow_nan=False, ensure_ascii=False, separators=("," + inner, ": "))
    if not isinstance(value, dict | list | tuple) or not value:
        return plain(value)
    if isinstance(value, RoundEntry):
        return value.text(line, lambda: _indented({**value}, line))
    parts = value.values() if isinstance(value, dict) else value
    if not any(isinstance(part, dict | list | tuple) for part in parts):
        body = plain(value)[1:-1]
    elif isinstance(value, dict):
        body = ("," + inner).join(f"{plain(key)}: {_indented(part, inner)}" for key, part in value.items())
    else:
        body = ("," + inner).join(_indented(part, inner) for part in value)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return start + inner + body + line + end


def as_csv(content: Mapping[str, Any]) -> str:
    """Return a document as tidy CSV, one line per round and client; ``fedmerit score`` can read it."""
    columns = _columns(content["rounds"])
    text = sheet_text([columns])
    for entry in content["rounds"]:
        made = partial(sheet_text, _lines_of(entry, content["utility"], columns))
        text += entry.text(columns, made) if isinstance(entry, RoundEntry) else made()
    return text


def table_of(content: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield the heading and the lines of the same table; None is an empty cell."""
    yield (columns := _columns(content["rounds"]))
    for entry in content["rounds"]:
        yield from _lines_of(entry, content["utility"], columns)


def _columns(rounds: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    there = {name for entry in rounds for part in ("reports", "scores") for name in entry[part]}
    there |= {"empty", "grand", "alone", "without"}  # columns of every document, even without a round
    silent = ["silent"] if any(entry.get("silent") for entry in rounds) else []
    fields = ("empty", "grand", *_PER_ROUND, "alone", "without", *PER_CLIENT, "sketch", *SCORES)
    return ("round", "client", *silent, "utility", *(name for name in fields if name in there))


def _lines_of(
    entry: Mapping[str, Any], utility: str | None, columns: Sequence[str]
) -> Iterator[Sequence[Any]]:
    """Yield the lines of a round with these columns."""
    reports = entry["reports"]
    shared = {name: reports.get(name) for name in ("empty", "grand", *_PER_ROUND)}
    shared |= {"round": entry["round"], "utility": utility}
    lines = [{**shared, "client": client, "silent": "yes"} for client in entry.get("silent", ())]
    vectors = {name: reports[name] for name in ("alone", "without", *PER_CLIENT) if name in reports}
    vectors |= {name: values for name, values in entry["scores"].items() if values}
    if "sketch" in reports:
        vectors["sketch"] = [" ".join(map(str, row)) for row in reports["sketch"]]
    for k, client in enumerate(entry["participants"]):
        lines.append({**shared, "client": client, **{name: values[k] for name, values in vectors.items()}})
    yield from ([line.get(name) for name in columns] for line in lines)


def _numbers(values: Vector | None) -> list[float | None] | None:
    if values is None:
        return None
    return [None if math.isnan(value) else value for value in values.tolist()]


def _spread(values: Vector | None, scores: Scores, names: Sequence[str]) -> list[float | None]:
    """Return the values in the order of ``names``, with None for clients that have no score."""
    by_name = {} if values is None else dict(zip(scores.clients, values.tolist(), strict=True))
    return [by_name.get(name) for name in names]


# ------------------------------------------------------------------------------------------ scores as a table


def scores_columns(scores: Scores) -> dict[str, list[Any]]:
    """Return one list per column, in the order of the clients; values that are unknown get no column.

    ``low`` and ``high`` are the 95 % interval of ``raw``, ``rank_low`` and ``rank_high`` that of the rank.

    >>> s = Scores(score="LOO", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4)
    >>> scores_columns(s)
    {'client': ['A', 'B'], 'score': ['LOO', 'LOO'], 'value': [1.0, 3.0], 'raw': [1.0, 3.0], 'rank': [2, 1]}
    """
    table: dict[str, list[Any]] = {
        "client": list(scores.clients),
        "score": [scores.score] * scores.n,
        "value": scores.values.tolist(),
        "raw": scores.raw.tolist(),
        "rank": scores.ranks().tolist(),
    }
    if scores.stderr is not None:
        spans, ranks = intervals(scores), rank_intervals(scores)
        table["stderr"] = scores.stderr.tolist()
        table["low"], table["high"] = spans.T.tolist()
        table["rank_low"], table["rank_high"] = ranks.T.tolist()
    if scores.coverage is not None:
        table["coverage"] = scores.coverage.tolist()
    return table


def frame_of(columns: Mapping[str, Sequence[Any]]) -> Any:
    """Return columns as a pandas frame."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra.of("a frame needs", "pandas", "to_csv() needs nothing") from error
    return pandas.DataFrame(columns)


def _scores_csv(scores: Scores) -> str:
    """Return the same table as CSV; floats read back exactly."""
    table = scores_columns(scores)
    return sheet_text([table, *zip(*table.values(), strict=True)])


# ----------------------------------------------------------------------------------------- in a notebook

MOST_ROWS = 60
"""The most members in a table or chart."""


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return a table of text, all of it escaped; the first cell of each row is its heading."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in headings)
    lines = []
    for first, *cells in rows:
        each = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{html.escape(first)}</th>{each}</tr>')
    above = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _lines(scores: Scores) -> dict[str, dict[str, Any]]:
    """Return the lines of `scores_columns` by client."""
    table = scores_columns(scores)
    return {row[0]: dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)}


def scores_html(scores: Scores) -> str:
    """Return the table that a notebook shows: best first, numbers as on the terminal."""
    digits = digits_for(float(np.max(np.abs(scores.values))))
    lines, rows = _lines(scores), []
    for name in scores.ranking()[:MOST_ROWS]:
        row = lines[name]
        rank, value = str(row["rank"]), signed(row["value"], digits)
        if scores.stderr is not None and row["rank_low"] != row["rank_high"]:
            rank += f" ({row['rank_low']}-{row['rank_high']})"
        if scores.stderr is not None and np.array_equal(scores.values, scores.raw):  # the interval is of raw
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
    headings = (words("column.member"), words("column.value"), words("column.rank"))
    return html_table(headings, rows, words("list.clause").join(caption))


def payouts_html(paid: Payouts) -> str:
    """Return the table that a notebook shows of amounts: best paid first."""
    coin = paid.currency or ""
    budget, unpaid = (f"{formatted(amount, ',')} {coin}".rstrip() for amount in (paid.budget, paid.unpaid))
    best_first = sorted(paid.items(), key=lambda item: (-item[1], item[0]))
    rows = [(name, formatted(amount, ",")) for name, amount in best_first]
    headings = (words("column.member"), words("column.payout"))
    return html_table(headings, rows, words("notebook.payouts", budget=budget, unpaid=unpaid))


def scores_plot(scores: Scores) -> Any:
    """Return an Altair chart of the raw scores, best first, with their 95 % intervals if they are known."""
    return _bars(_lines(scores), scores.ranking(), "raw", scores.score)


def shares_plot(shares: Shares) -> Any:
    """Return an Altair chart of the shares, largest first."""
    rows = {name: {"client": name, "share": share} for name, share in shares.items()}
    order = sorted(shares, key=lambda name: (-shares[name], name))
    return _bars(rows, order, "share", words("column.share"), format="%")


def _bars(rows: dict[str, dict[str, Any]], order: Sequence[str], of: str, title: str, **axis: Any) -> Any:
    """Return bars with whiskers; names are data, so none is read as an expression."""
    altair = _altair()
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


def panel_plot(found: Panel) -> Any:
    """Return an Altair chart with a row per client and a column per judge; help is blue, and harm is red."""
    altair, names = _altair(), found.clients[:MOST_ROWS]
    cells = [
        {"client": name, "judge": judge, "value": value}
        for name, row in zip(names, found.matrix.tolist(), strict=False)
        for judge, value in zip(names, row, strict=False)
    ]
    color = altair.Color(
        "value", type="quantitative", title=None, scale=altair.Scale(scheme="redblue", domainMid=0)
    )
    return altair.Chart(altair.InlineData(values=cells)).mark_rect().encode(
        x=altair.X("judge", type="nominal", sort=None),
        y=altair.Y("client", type="nominal", sort=None),
        color=color,
        tooltip=["client:N", "judge:N", "value:Q"],
    )  # fmt: skip


def _altair() -> Any:
    try:
        import altair
    except ImportError as error:
        raise MissingExtra.of("a plot needs", "plot", "to_csv() needs nothing") from error
    return altair


SHOWN.update(
    to_pandas=lambda scores: frame_of(scores_columns(scores)), to_csv=_scores_csv, scores_html=scores_html,
    scores_plot=scores_plot, shares_plot=shares_plot, panel_plot=panel_plot, payouts_html=payouts_html,
)  # fmt: skip
