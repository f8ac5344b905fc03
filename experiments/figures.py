"""Draw figures/*.csv as PNG and PDF (needs the extras "page" and "data").

::

    python experiments/figures.py [--into FOLDER]
"""

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from PIL import Image

from fedmerit.report.page.charts import scale_of

HERE = Path(__file__).resolve().parent
Rows = list[dict[str, Any]]

INK, SOFT, LINE = "#1a1a1a", "#595959", "#dcdcd6"
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
MEMBERS = ["#1f5c99", "#e08214", "#4d9221", "#8e6bb0"]
WAYS = {
    "MR-SV": "#1a1a1a",
    "summed alpha (ours)": "#1f5c99",
    "summed alpha, renormalised": "#2a9d8f",
    "FP = EE": "#c2410c",
    "LOO": "#4d9221",
    "COS": "#b8860b",
    "FedAvg": "#8f8f8a",
}
AXIS = {
    "labelColor": INK,
    "titleColor": INK,
    "gridColor": LINE,
    "domainColor": SOFT,
    "titleFontWeight": "normal",
    "labelFontSize": 11,
}
TITLE = {
    "fontSize": 12,
    "offset": 10,
    "color": INK,
    "subtitleColor": SOFT,
    "subtitleFontSize": 11,
    "anchor": "start",
    "frame": "group",
}
TITLES = {
    "expected-accuracy": "expected accuracy",
    "accuracy": "accuracy",
    "brier": "Brier",
    "neg-loss": "−cross-entropy",
}
DATA = "data: re-encoded, mostly subsets, see experiments/README.md"
SETS = ["#1f5c99", "#c2410c", "#4d9221", "#8e6bb0"]


def illustrate(rows: Rows) -> alt.TopLevelMixin:
    """Grouped bars, a panel per run."""
    order = ["MR-SV", "ALPHA sum", "LOO", "FP", "FP, reversed", "EE", "EE, reversed", "COS sum"]
    panels = []
    for panel in dict.fromkeys(row["panel"] for row in rows):
        some = [row for row in rows if row["panel"] == panel]
        bars = alt.Chart(alt.Data(values=some)).mark_bar().encode(
            x=alt.X("score:N", sort=order, title=None, axis=alt.Axis(labelAngle=0, grid=False)),
            xOffset=alt.XOffset("member:N"),
            y=alt.Y("value:Q", title="normalised score"),
            color=alt.Color("member:N", title="member", scale=alt.Scale(range=MEMBERS)),
        )  # fmt: skip
        panels.append(bars.properties(width=430, height=150, title=panel))
    return alt.vconcat(*panels).properties(
        title=alt.Title(
            "All scores of 4 members, 10th round",
            subtitle=[
                "ours: expected accuracy, one seed; minus the smallest, divided by the mean",
                "the paper's as drawn: the smallest is not subtracted",
                DATA,
            ],
        )
    )


def perf(rows: Rows) -> alt.TopLevelMixin:
    """Mean over seeds per round, with the range of the seeds; negative loss and accuracy."""
    panels, names = [], {"neg-loss": "negative loss", "accuracy": "accuracy"}
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        for utility, title in names.items():
            some = [row for row in rows if row["dataset"] == dataset and row["utility"] == utility]
            ways = [way for way in WAYS if any(row["weights"] == way for row in some)]
            colours = alt.Scale(domain=ways, range=[WAYS[way] for way in ways])
            legend = alt.Legend(symbolOpacity=1, symbolType="stroke")
            colour = alt.Color("weights:N", title="weights from", scale=colours, legend=legend)
            base = alt.Chart(alt.Data(values=some)).encode(
                x=alt.X("round:Q", title="round", axis=alt.Axis(format="d"))
            )
            scale = scale_of([row["value"] for row in some])
            band = base.mark_area(opacity=0.13).encode(
                y=alt.Y(
                    "min(value):Q",
                    title=f"{title} of the global model",
                    scale=scale,
                ),
                y2="max(value):Q",
                color=colour,
            )
            line = base.mark_line(strokeWidth=1.8).encode(y="mean(value):Q", color=colour)
            panels.append(
                (band + line).properties(width=300, height=250, title=[dataset, *_seeds(some, ways)])
            )
    return alt.concat(*panels, columns=2).properties(
        title=alt.Title(
            "Global model under weights from scores, 9 IID members with label noise from 0 to 1",
            subtitle=[
                "ours: scores of the rounds before, in one secure sum; MR-SV, FP = EE, LOO and COS: of the "
                "same round, which secure aggregation rules out",
                "ISIC: class-balanced test set; at the rate 0.001 FedAvg, summed alpha and FP = EE only",
                f"band: range of the seeds; {DATA}",
            ],
        )
    )


def _seeds(rows: Rows, ways: Sequence[str]) -> list[str]:
    """How many seeds the lines of a panel have; where that differs, which have how many."""
    groups: dict[int, list[str]] = {}
    for way in ways:
        groups.setdefault(len({row["seed"] for row in rows if row["weights"] == way}), []).append(way)
    words = {count: f"{count} seed{'s' * (count > 1)}" for count in sorted(groups, reverse=True)}
    if len(words) == 1:
        return list(words.values())
    return [f"{word}: {', '.join(groups[count])}" for count, word in words.items()]


def misbeh(rows: Rows) -> alt.TopLevelMixin:
    """Share of seeds in which the flipper is last, with Wilson intervals; the paper's medians as ticks."""
    order = ["MR-SV", "ALPHA sum", "ALPHA sum, renormalised", "IOI sum", "LOO", "FP", "EE", "COS sum"]
    panels = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        theirs = [
            {"score": row["score"], "last": row["last"]}
            for row in rows
            if row["dataset"] == dataset and row["seed"] == "paper"
        ]
        for utility, title in TITLES.items():
            body: Rows = []
            for score in order:
                own = [
                    row
                    for row in rows
                    if (row["dataset"], row["utility"], row["score"]) == (dataset, utility, score)
                ]
                hits = [row["last"] for row in own]
                if hits:
                    low, high = wilson(sum(hits), len(hits))
                    by_sign = int(sum(row["by a turned sign"] for row in own))
                    text = f"{int(sum(hits))}/{len(hits)}" + (f", {by_sign} turned" if by_sign else "")
                    mean = sum(hits) / len(hits)
                    body.append({"score": score, "mean": mean, "low": low, "high": high, "text": text})
            if not body:
                continue
            shown = [row["score"] for row in body]
            first = utility == next(iter(TITLES))
            y = alt.Y("score:N", sort=shown, title=None, axis=alt.Axis(labels=first, ticks=False))
            base = alt.Chart(alt.Data(values=body)).encode(y=y)
            x = alt.X(
                "mean:Q",
                title="flipper last",
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(format="%", values=[0, 0.5, 1]),
            )
            bars = base.mark_bar(color=SETS[0], opacity=0.85, size=11).encode(x=x)
            rule = base.mark_rule(color=INK).encode(x="low:Q", x2="high:Q")
            given = [row for row in theirs if row["score"] in shown]
            tick = (
                alt.Chart(alt.Data(values=given))
                .mark_tick(color=SETS[1], thickness=3, size=16)
                .encode(x="last:Q", y=y)
            )
            label = base.mark_text(align="left", dx=4, color=SOFT, fontSize=10).encode(
                x=alt.value(162), text="text:N"
            )
            layers = (bars + rule + tick + label).properties(
                width=160, height=alt.Step(20), title=[*dataset.split(", "), title]
            )
            panels.append(layers)
    return alt.concat(*panels, columns=4).properties(
        title=alt.Title(
            "How often the label flipper is put last",
            subtitle=[
                "blue: ours, with 95 % intervals (Wilson) over seeds; orange: the paper's median",
                '"turned": so many of them only because the sign of FP or EE had turned',
                "the paper's COS is of models, ours of updates",
                DATA,
            ],
        )
    )


def retrained(rows: Rows) -> alt.TopLevelMixin:
    """Every seed a dot, the mean a bar; scores in the order of their mean for the expected accuracy."""
    used = [
        row for row in rows if not row["row"] and row["utility"] == row["truth"] and row["spearman"] != ""
    ]

    def mean(score: str, utility: str) -> float:
        values = [row["spearman"] for row in used if (row["score"], row["utility"]) == (score, utility)]
        return sum(values) / len(values)

    def runs(score: str) -> int:
        return len({(row["dataset"], row["seed"]) for row in used if row["score"] == score})

    listed = {row["score"] for row in used}
    most = max(map(runs, listed))  # scores of fewer runs come last: the others' means are of other runs
    names = sorted(listed, key=lambda name: (runs(name) < most, -mean(name, "expected-accuracy"), name))
    hidden = {row["score"] for row in used if row["hidden"]}
    shown = {name: f"{name} †" if name in hidden else name for name in names}
    for row in used:
        row["shown"] = shown[row["score"]]
    sets = list(dict.fromkeys(row["dataset"] for row in used))
    panels = []
    for utility, title in TITLES.items():
        some = [row for row in used if row["utility"] == utility]
        y = alt.Y(
            "shown:N",
            sort=list(shown.values()),
            title=None,
            axis=alt.Axis(labels=not panels, ticks=False, grid=True, labelLimit=240),
        )
        base = alt.Chart(alt.Data(values=some))
        x = alt.X(
            "spearman:Q",
            title="Spearman",
            scale=alt.Scale(domain=[-1.05, 1.05]),
            axis=alt.Axis(values=[-1, -0.5, 0, 0.5, 1]),
        )
        dots = base.mark_circle(size=34, opacity=0.55).encode(
            x=x,
            y=y,
            color=alt.Color("dataset:N", title=None, scale=alt.Scale(domain=sets, range=SETS[: len(sets)])),
        )
        bar = base.mark_tick(thickness=2.4, size=15, color=INK).encode(x="mean(spearman):Q", y=y)
        panels.append((dots + bar).properties(width=170, height=alt.Step(19), title=title))
    counts = [len({row["seed"] for row in used if row["dataset"] == one}) for one in sets]
    about = f"6 members, Dirichlet 0.5, 10 rounds, {' and '.join(map(str, counts))} seeds"
    fewer = [f"{name} ({runs(name)})" for name in names if runs(name) < most]
    about += f"; fewer runs: {', '.join(fewer)}" if fewer else ""
    return alt.hconcat(*panels).properties(
        title=alt.Title(
            "Which score tracks the retrained Shapley value of its utility?",
            subtitle=[about, f"tick: mean; † needs what secure aggregation hides; {DATA}"],
        )
    )


DRAWN: dict[str, Callable[[Rows], alt.TopLevelMixin]] = {
    "fig-illustrate": illustrate,
    "fig-perf": perf,
    "fig-misbeh": misbeh,
    "retrained": retrained,
}


def wilson(hits: float, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion."""
    share, weight = hits / total, 1 + z * z / total
    middle = (share + z * z / (2 * total)) / weight
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / weight
    return max(0.0, middle - half), min(1.0, middle + half)


def dressed(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart's spec with one look for all figures."""
    made: dict[str, Any] = (
        chart.configure(font=FONT, background="white", padding=10)
        .configure_view(stroke=None)
        .configure_axis(**AXIS)
        .configure_title(**TITLE)
        .configure_legend(labelColor=INK, titleColor=INK, symbolStrokeWidth=3, symbolOpacity=1)
        .to_dict()
    )  # fmt: skip
    return made


def read(file: Path) -> Rows:
    """A CSV file, numbers as numbers."""
    out = []
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            out.append({key: _number(value) if key != "row" else value for key, value in row.items()})
    return out


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    """Draw what there is."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--into", type=Path, default=HERE / "figures")
    options = parser.parse_args()
    for name, draw in DRAWN.items():
        file = options.into / f"{name}.csv"
        if not file.exists():
            print(f"{file}: no results yet")
            continue
        spec = dressed(draw(read(file)))
        with Image.open(io.BytesIO(vl_convert.vegalite_to_png(spec, scale=2))) as image:
            image.convert("RGB").save(options.into / f"{name}.png", optimize=True)
        (options.into / f"{name}.pdf").write_bytes(vl_convert.vegalite_to_pdf(spec))
        print(f"{options.into / name}.png, .pdf")


if __name__ == "__main__":
    main()
