"""Reports -> the document that ``scores.json`` holds and ``fedmerit score --format json`` prints.

It holds no time, duration, run id, key, signature, attempt number or setting of secure aggregation, and
floats in their shortest form that reads back the same, so that equal runs are equal files.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedmerit.accumulate import SUMMABLE, Missing, accumulate
from fedmerit.errors import UndefinedScore
from fedmerit.layout import PER_CLIENT
from fedmerit.scores import SCORES
from fedmerit.types import Reports, Scores, Vector


def document(
    rounds: Sequence[Reports], *, clients: Sequence[str] | None = None, missing: Missing = "zero"
) -> dict[str, Any]:
    """Everything that follows from the reports of one utility, ready for JSON.

    Args:
        rounds: reports in order; at least one.
        clients: the whole roster (everybody in some round unless given); those that never reported get
            null in ``cumulative``.
        missing: see :func:`fedmerit.accumulate`.
    """
    seen = dict.fromkeys(name for reports in rounds for name in (*reports.clients, *reports.silent))
    names = list(clients or seen)
    totals = totals_of(rounds, missing=missing)
    return {
        "clients": names,
        "utility": rounds[0].utility if rounds else None,
        "rounds": [round_object(reports) for reports in rounds],
        "cumulative": {name: _spread(scores.values, scores, names) for name, scores in totals.items()},
        "stderr": {
            name: _spread(scores.stderr, scores, names)
            for name, scores in totals.items()
            if scores.stderr is not None
        },
        "coverage": _spread(totals["ALPHA"].coverage, totals["ALPHA"], names) if totals else [],
    }


def totals_of(rounds: Sequence[Reports], *, missing: Missing = "zero") -> dict[str, Scores]:
    """Every score that can be summed over these rounds, summed."""
    if not rounds:
        return {}
    totals = {}
    for name in SUMMABLE:
        try:
            totals[name] = accumulate(rounds, score=name, missing=missing)
        except UndefinedScore:  # cosines or solo utilities were not given
            continue
    return totals


def round_object(reports: Reports) -> dict[str, Any]:
    """One round: who took part, what was reported, every score that exists, and its status."""
    scores = scores_of(reports)
    given = {name: _numbers(getattr(reports, name)) for name in PER_CLIENT}
    told = {"solo_empty": reports.solo_empty, "slice": reports.slice}
    return {
        "round": reports.round,
        "participants": list(reports.clients),
        **({"silent": list(reports.silent)} if reports.silent else {}),
        "reports": {
            "empty": reports.empty,
            "grand": reports.grand,
            "alone": _numbers(reports.alone),
            "without": _numbers(reports.without),
            **{name: value for name, value in {**given, **told}.items() if value is not None},
        },
        "scores": {name: None if one is None else _numbers(one.values) for name, one in scores.items()},
        "status": {name: one.status for name, one in scores.items() if one and name in ("FP", "EE")},
    }


def scores_of(reports: Reports) -> dict[str, Scores | None]:
    """Every score of one round; None where a silent client makes it undefined, absent where not asked for."""
    found: dict[str, Scores | None] = {}
    for name, entry in SCORES.items():
        if (name == "SOLO" and reports.solo is None) or (name == "COS" and reports.cosine is None):
            continue
        try:
            found[name] = entry.function(reports)
        except UndefinedScore:
            found[name] = None
    return found


def as_json(content: Mapping[str, Any]) -> str:
    """Canonical text of a document."""
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def as_csv(content: Mapping[str, Any]) -> str:
    """The same facts, tidy: one line per round and client; ``fedmerit score`` reads it back."""
    rounds = content["rounds"]
    per_client = [name for name in PER_CLIENT if any(name in one["reports"] for one in rounds)]
    per_round = [name for name in ("solo_empty", "slice") if any(name in one["reports"] for one in rounds)]
    scores = [name for name in SCORES if any(name in one["scores"] for one in rounds)]
    silent = ["silent"] if any(one.get("silent") for one in rounds) else []
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ["round", "client", *silent, "utility", "empty", "grand", *per_round]
    writer.writerow([*head, "alone", "without", *per_client, *scores])
    for one in rounds:
        reports = one["reports"]
        shared = [content["utility"], reports["empty"], reports["grand"]]
        shared += [reports.get(name) for name in per_round]
        for client in one.get("silent", ()):
            nothing = [None] * (2 + len(per_client) + len(scores))
            writer.writerow([one["round"], client, "yes", *shared, *nothing])
        for k, client in enumerate(one["participants"]):
            writer.writerow(
                [one["round"], client, *[None for _ in silent], *shared]
                + [
                    (reports[name][k] if name in reports else None)
                    for name in ("alone", "without", *per_client)
                ]
                + [(one["scores"][name][k] if one["scores"].get(name) else None) for name in scores]
            )
    return out.getvalue()


def _numbers(values: Vector | None) -> list[float | None] | None:
    if values is None:
        return None
    return [None if math.isnan(value) else value for value in values.tolist()]


def _spread(values: Vector | None, scores: Scores, names: Sequence[str]) -> list[float | None]:
    """Values in the order of ``names``, null for who is not scored."""
    known = {} if values is None else dict(zip(scores.clients, values.tolist(), strict=True))
    return [known.get(name) for name in names]
