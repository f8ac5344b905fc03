"""Results -> tidy rows behind each figure, one observation a row."""

from __future__ import annotations

import csv
import io
from collections.abc import Container, Mapping, Sequence
from typing import Any

from cells import Result, Row, datasets
from grid import rounded
from measures import HIDDEN, SCORES, agreements, curve, detected, repeats, reports, scores, turned
from sections import done

from fedmerit import ee, fp, normalise

Rows = list[dict[str, Any]]
SHOWN = ("MR-SV", "LOO", "FP", "EE", "COS sum", "ALPHA sum", "PHI sum")
"""As the paper has them, then ours."""
PARTS = ("low", "first quartile", "median", "third quartile", "high")


def illustrate(rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> Rows:
    """Normalised scores of the 4 members of fig:illustrate, the paper's as drawn; a turned sign is marked."""
    out: Rows = []
    for name, values in paper["illustrate"]["values"].items():
        for member, value in zip("ABCD", values, strict=True):
            out.append(_bar("ISIC 2019, the paper", name, member, value, 0))
    for row in rows:
        if row.experiment != "fig-illustrate":
            continue
        for cell in done(row, results)[:1]:
            found = scores(cell, "expected-accuracy", row.at)
            last = reports(cell, "expected-accuracy")[-1]
            turned = {one.score for one in (fp(last), ee(last)) if one.status == "reversed"}
            for name in SHOWN:
                if name in found:
                    for member, value in zip("ABCD", normalise(found[name]), strict=False):
                        panel = f"{datasets()[row.dataset]['short']}, ours"
                        out.append(_bar(panel, name, member, value, int(name in turned)))
    return out


def _bar(panel: str, score: str, member: str, value: float, by_sign: int) -> dict[str, Any]:
    made = {"panel": panel, "score": score, "member": member, "value": rounded(value, 4)}
    return {**made, "by a turned sign": by_sign}


def perf(rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> Rows:
    """The global model of every round under every way to weight, round 0 being the first model."""
    out: Rows = []
    for dataset, curves in paper["performance"]["curves"].items():
        for way, values in curves.items():
            for number, value in enumerate(values):
                out.append(_point(dataset, way, "paper", "neg-loss", number, value))
    for row in rows:
        if row.experiment != "fig-perf":
            continue
        for cell in done(row, results):
            for utility in cell["utilities"]:
                values = [float(reports(cell, utility)[0].empty), *curve(cell, utility)]
                for number, value in enumerate(values):
                    short = datasets()[row.dataset]["short"]
                    out.append(_point(short, row.row, cell["seed"], utility, number, value))
    return out


def _point(dataset: str, way: str, seed: Any, utility: str, number: int, value: float) -> dict[str, Any]:
    made = {"dataset": dataset, "weights": way, "seed": seed, "utility": utility}
    return {**made, "round": number, "value": rounded(value, 6)}


def misbeh(rows: Sequence[Row], results: Mapping[str, Result], paper: Mapping[str, Any]) -> Rows:
    """Whether the flipper is strictly last, per seed; the paper's boxes as seeds "paper, low" and so on."""
    out: Rows = []
    for row in rows:
        if row.experiment != "fig-misbeh":
            continue
        cells, about = done(row, results), datasets()[row.dataset]
        pool = "" if "whole test set" in row.row else ", class-balanced test set"
        name_of = about["short"] + (f", {row.row}" if row.row else "") + pool
        others, _ = repeats(cells, results, "PHI sum", truth="")
        for cell in (*cells, *others):
            for utility in cell["utilities"]:
                for name, (last, _) in detected([cell], utility, row.at).items():
                    if name in SCORES and name != "samples" and (cell in cells or name == "PHI sum"):
                        by_sign = turned([cell], utility, row.at, name) if name in ("FP", "EE") else 0
                        out.append(_hit(name_of, utility, name, cell["seed"], last, by_sign))
        if cells:
            for name, values in paper["detection"]["boxes"][about["paper"]].items():
                for part, value in zip(PARTS, values, strict=True):
                    out.append(_hit(name_of, "the paper's", name, f"paper, {part}", value, 0))
    return out


def _hit(dataset: str, utility: str, score: str, seed: Any, value: float, by_sign: int) -> dict[str, Any]:
    found = {"dataset": dataset, "utility": utility, "score": score, "seed": seed}
    return {**found, "last": value, "by a turned sign": by_sign}


def retrained(rows: Sequence[Row], results: Mapping[str, Result], _: Mapping[str, Any]) -> Rows:
    """Spearman of every score with the retrained Shapley value, of its own utility and of accuracy.

    Runs without PHI have that of their repeats.
    """
    out: Rows = []
    for row in rows:
        if row.experiment != "tab-error-game":
            continue
        cells = done(row, results)
        others, repeated = repeats(cells, results, "PHI sum", truth="SV")
        asked: list[tuple[Result, Container[str]]] = [(cell, SCORES) for cell in cells]
        asked += [(cell, ("PHI sum",)) for cell in others if repeated]
        for cell, names in asked:
            for utility in cell["utilities"]:
                for truth in dict.fromkeys((utility, "accuracy")):
                    for name, close in agreements(cell, utility, row.at, "SV", truth).items():
                        if name not in names:
                            continue
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
