"""Results -> tidy rows behind each figure, one observation a row."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from cells import Result, Row, datasets
from grid import rounded
from measures import HIDDEN, SCORES, agreements, curve, detected, reports, scores, turned
from sections import done

from fedmerit import ee, fp, normalise

Rows = list[dict[str, Any]]
SHOWN = ("MR-SV", "ALPHA sum", "LOO", "FP", "EE", "COS sum")


def illustrate(rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> Rows:
    """Normalised scores of the 4 members of fig:illustrate; the paper's as drawn."""
    out: Rows = []
    for row in rows:
        if row.experiment != "fig-illustrate":
            continue
        for cell in done(row, results)[:1]:
            found = scores(cell, "expected-accuracy", row.at)
            last = reports(cell, "expected-accuracy")[-1]
            turned = {one.score for one in (fp(last), ee(last)) if one.status == "reversed"}
            for name in SHOWN:
                if name in found:
                    label = f"{name}, reversed" if name in turned else name
                    for member, value in zip("ABCD", normalise(found[name]), strict=False):
                        out.append(_bar(f"{datasets()[row.dataset]['short']}, ours", label, member, value))
    if out:
        for name, values in paper["illustrate"]["values"].items():
            for member, value in zip("ABCD", values, strict=True):
                out.append(_bar("ISIC 2019, the paper", name, member, value))
    return out


def _bar(panel: str, score: str, member: str, value: float) -> dict[str, Any]:
    return {"panel": panel, "score": score, "member": member, "value": rounded(value, 4)}


def perf(rows: Sequence[Row], results: Mapping[str, Result], _: Mapping[str, Any]) -> Rows:
    """The global model of every round under every way to weight, round 0 being the first model."""
    out: Rows = []
    for row in rows:
        if row.experiment != "fig-perf":
            continue
        for cell in done(row, results):
            for utility in cell["utilities"]:
                values = [float(reports(cell, utility)[0].empty), *curve(cell, utility)]
                for number, value in enumerate(values):
                    out.append(
                        {
                            "dataset": datasets()[row.dataset]["short"],
                            "weights": row.row,
                            "seed": cell["seed"],
                            "utility": utility,
                            "round": number,
                            "value": rounded(value, 6),
                        }
                    )
    return out


def misbeh(rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> Rows:
    """Whether the flipper is strictly last, per seed; the paper's medians as seed "paper"."""
    out: Rows = []
    for row in rows:
        if row.experiment != "fig-misbeh":
            continue
        cells, about = done(row, results), datasets()[row.dataset]
        pool = "" if "whole test set" in row.row else ", class-balanced test set"
        name_of = about["short"] + (f", {row.row}" if row.row else "") + pool
        for cell in cells:
            for utility in cell["utilities"]:
                for name, (last, _) in detected([cell], utility, row.at).items():
                    if name in SCORES and name != "samples":
                        by_sign = turned([cell], utility, row.at, name) if name in ("FP", "EE") else 0
                        out.append(_hit(name_of, utility, name, cell["seed"], last, by_sign))
        if cells:
            for name, value in paper["detection"]["values"][about["paper"]].items():
                out.append(_hit(name_of, "the paper's", name, "paper", value, 0))
    return out


def _hit(dataset: str, utility: str, score: str, seed: Any, value: float, by_sign: int) -> dict[str, Any]:
    found = {"dataset": dataset, "utility": utility, "score": score, "seed": seed}
    return {**found, "last": value, "by a turned sign": by_sign}


def retrained(rows: Sequence[Row], results: Mapping[str, Result], _: Mapping[str, Any]) -> Rows:
    """Spearman of every score with the retrained Shapley value, of its own utility and of accuracy."""
    out: Rows = []
    for row in rows:
        if row.experiment != "tab-error-game":
            continue
        for cell in done(row, results):
            for utility in cell["utilities"]:
                for truth in dict.fromkeys((utility, "accuracy")):
                    for name, close in agreements(cell, utility, row.at, "SV", truth).items():
                        value = close.spearman
                        out.append(
                            {
                                "dataset": datasets()[row.dataset]["short"],
                                "row": row.row,
                                "utility": utility,
                                "truth": truth,
                                "score": name,
                                "hidden": int(name in HIDDEN),
                                "seed": cell["seed"],
                                "spearman": "" if value is None else rounded(value, 4),
                            }
                        )
    return out


FIGURES = {"fig-illustrate": illustrate, "fig-perf": perf, "fig-misbeh": misbeh, "retrained": retrained}


def csv_text(rows: Rows) -> str:
    """As a CSV file."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
