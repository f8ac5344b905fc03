"""Scores where people look at tables: a pandas frame, tidy CSV, and the table that a notebook shows."""

from __future__ import annotations

import csv
import html
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerit.errors import MissingExtra
from fedmerit.scoring.uncertainty import intervals, rank_intervals

if TYPE_CHECKING:
    from fedmerit.scoring.types import Scores

MOST_ROWS = 60
"""Clients in a notebook's table."""


def columns(scores: Scores) -> dict[str, list[Any]]:
    """One list per column, in the order of the clients; what is unknown has no column.

    ``low`` and ``high`` are the 95 % interval of ``raw``; ``rank_low`` and ``rank_high`` the ranks it may
    have.

    >>> from fedmerit.scoring.types import Scores
    >>> s = Scores(score="LOO", clients=("A", "B"), values=[1, 3], raw=[1, 3], gain=4)
    >>> columns(s)
    {'client': ['A', 'B'], 'score': ['LOO', 'LOO'], 'value': [1.0, 3.0], 'raw': [1.0, 3.0], 'rank': [2, 1]}
    """
    found: dict[str, list[Any]] = {
        "client": list(scores.clients),
        "score": [scores.score] * scores.n,
        "value": scores.values.tolist(),
        "raw": scores.raw.tolist(),
        "rank": scores.ranks().tolist(),
    }
    if scores.stderr is not None:
        spans, ranks = intervals(scores), rank_intervals(scores)
        found["stderr"] = scores.stderr.tolist()
        found["low"], found["high"] = spans[:, 0].tolist(), spans[:, 1].tolist()
        found["rank_low"], found["rank_high"] = ranks[:, 0].tolist(), ranks[:, 1].tolist()
    if scores.coverage is not None:
        found["coverage"] = scores.coverage.tolist()
    return found


def as_frame(scores: Scores) -> Any:
    """A pandas frame, one row per client."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra("a frame needs: pip install 'fedmerit[pandas]'; to_csv() needs nothing") from error
    return pandas.DataFrame(columns(scores))


def as_csv(scores: Scores) -> str:
    """The same as text; floats read back as they are."""
    found = columns(scores)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(found)
    writer.writerows(zip(*found.values(), strict=True))
    return out.getvalue()


def as_html(scores: Scores) -> str:
    """The table that a notebook shows: best first, numbers as on the terminal, names escaped."""
    from fedmerit.report.summary import digits_for

    digits = digits_for(float(np.max(np.abs(scores.values))))
    found = columns(scores)
    place = {name: k for k, name in enumerate(scores.clients)}
    sure = scores.stderr is not None
    lines = []
    for name in scores.ranking()[:MOST_ROWS]:
        k = place[name]
        rank = str(found["rank"][k])
        value = f"{scores.values[k]:+.{digits}f}"
        if sure and found["rank_low"][k] != found["rank_high"][k]:
            rank += f" ({found['rank_low'][k]}-{found['rank_high'][k]})"
        if sure and found["value"] == found["raw"]:  # the interval is that of the raw score
            value += f" ± {(found['high'][k] - found['low'][k]) / 2:.{digits}f}"
        lines.append(f'<tr><th scope="row">{html.escape(name)}</th><td>{value}</td><td>{rank}</td></tr>')
    rounds = "" if scores.rounds == 1 else f" summed over {scores.rounds} rounds"
    said = [f"{scores.score}{rounds}, gain {scores.gain:+.{digits}f}"]
    if scores.status != "ok":
        said.append(f"status {scores.status}: do not rank or pay by these values")
    if scores.n > MOST_ROWS:
        said.append(f"the first {MOST_ROWS} of {scores.n}")
    head = "".join(f'<th scope="col">{name}</th>' for name in ("client", "value", "rank"))
    return (
        f"<table><caption>{html.escape('; '.join(said))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )
