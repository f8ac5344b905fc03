"""Draw figures/*.csv as PNG and PDF (needs the extras "page" and "data").

::

    python experiments/figures.py [--into FOLDER]
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import altair as alt  # noqa: E402
import vl_convert  # noqa: E402
from measures import ENOUGH, interval  # noqa: E402
from overview import PRINTED_WAY  # noqa: E402
from PIL import Image  # noqa: E402

from fedmerit.report.page.charts import scale_of  # noqa: E402

Rows = list[dict[str, Any]]

INK, SOFT, LINE = "#1a1a1a", "#595959", "#dcdcd6"
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
MEMBERS = ["#1f5c99", "#e08214", "#4d9221", "#8e6bb0"]
WAYS = {
    "MR-SV": "#1a1a1a",
    "FP": "#c2410c",
    "EE": "#d9a08a",
    "FP = EE": "#c2410c",
    "LOO": "#4d9221",
    "COS": "#b8860b",
    "FedAvg": "#8f8f8a",
    "summed alpha (ours)": "#1f5c99",
    "summed alpha, renormalised": "#2a9d8f",
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
FLUSH: dict[str, Any] = {"bounds": "flush", "spacing": {"row": 98, "column": 66}}
"""Panels in line, whatever their labels; the room between them is for titles and axes."""
SETS = ["#1f5c99", "#c2410c", "#4d9221", "#8e6bb0"]


def illustrate(rows: Rows) -> alt.TopLevelMixin:
    """Grouped bars as in the paper; its own panel first, then a panel per run."""
    names = {"COS sum": "COS", "ALPHA sum": "alpha, summed", "PHI sum": "PHI, summed"}
    order = ["MR-SV", "LOO", "FP", "EE", "COS", "alpha, summed", "PHI, summed"]
    listed = {names.get(row["score"], row["score"]) for row in rows}
    order = [name for name in order if name in listed]
    panels = []
    for panel in sorted(
        {row["panel"] for row in rows}, key=lambda name: ("paper" not in name, "Brain" in name, name)
    ):
        some = [
            {**row, "score": names.get(row["score"], row["score"])} for row in rows if row["panel"] == panel
        ]
        x = alt.X(
            "score:N",
            sort=order,
            scale=alt.Scale(domain=order),
            title=None,
            axis=alt.Axis(labelAngle=0, grid=False, ticks=False),
        )
        bars = alt.Chart(alt.Data(values=some)).mark_bar().encode(
            x=x,
            xOffset=alt.XOffset("member:N"),
            y=alt.Y("value:Q", title="score, normalised"),
            color=alt.Color("member:N", title="hospital", scale=alt.Scale(range=MEMBERS)),
        )  # fmt: skip
        turned = {row["score"]: row for row in some if row["by a turned sign"]}
        notes = [{"score": name, "text": "sign turned"} for name in turned]
        label = (
            alt.Chart(alt.Data(values=notes))
            .mark_text(color=SOFT, fontSize=10, dy=-2, baseline="bottom")
            .encode(x=x, y=alt.value(0), text="text:N")
        )
        layers = bars + label if notes else bars
        panels.append(layers.properties(width=400, height=150, title=panel))
    return alt.concat(*panels, columns=2, **FLUSH).properties(
        title=alt.Title(
            "All scores of 4 members, 10th round",
            subtitle=[
                "ours: expected accuracy, one seed; minus the smallest, which becomes 0, divided by the mean",
                "the paper's as drawn: the smallest is not subtracted, and COS is of models, not of updates",
                DATA,
            ],
        )
    )


def perf(rows: Rows) -> alt.TopLevelMixin:
    """As the paper: CIFAR-10 left, ISIC right. Its own curves, our negative loss, our accuracy.

    The last line is CIFAR-10 by the weights and the label noise that the paper prints.
    """
    printed = [row for row in rows if row["weights"].endswith(PRINTED_WAY)]
    rows = [row for row in rows if not row["weights"].endswith(PRINTED_WAY)]
    columns = [("CIFAR10", "CIFAR-10"), ("ISIC", "ISIC 2019 (HAM10000 part), learning rate 0.0001")]
    names = {"neg-loss": "negative loss", "accuracy": "accuracy"}
    panels = []
    for which, utility in (("paper", "neg-loss"), ("ours", "neg-loss"), ("ours", "accuracy")):
        for theirs, ours in columns:
            dataset = theirs if which == "paper" else ours
            some = [row for row in rows if row["dataset"] == dataset and row["utility"] == utility]
            if not some:
                continue
            about = ["the paper"] if which == "paper" else _seeds(some)
            heading = dataset.replace("CIFAR10", "CIFAR-10")
            panels.append(_curves(some, f"{names[utility]} of the global model", [heading, *about]))
    for utility, name in names.items():
        some = [
            {**row, "weights": row["weights"].removesuffix(PRINTED_WAY)}
            for row in printed
            if row["utility"] == utility
        ]
        if some:
            heading = ["CIFAR-10, weights and noise as printed", *_seeds(some)]
            panels.append(_curves(some, f"{name} of the global model", heading))
    return (
        alt.concat(*panels, columns=2, **FLUSH)
        .resolve_scale(color="shared")
        .properties(
            title=alt.Title(
                "Global model under weights from scores, 9 IID members with label noise from 0 to 1",
                subtitle=[
                    "summed alpha: of the rounds before, in one secure sum; MR-SV, FP, EE, LOO, COS: of the "
                    "same round, which secure aggregation rules out",
                    "the paper counts rounds from 0, its learning rate is 0.001; band: range of the seeds",
                    f"ISIC: class-balanced test set; {DATA}",
                ],
            )
        )
    )


def _curves(some: Rows, title: str, heading: Sequence[str]) -> alt.TopLevelMixin:
    """The mean over seeds per round, with their range."""
    colours = alt.Scale(domain=list(WAYS), range=list(WAYS.values()))
    legend = alt.Legend(symbolOpacity=1, symbolType="stroke")
    colour = alt.Color("weights:N", title="weights from", scale=colours, legend=legend)
    base = alt.Chart(alt.Data(values=some)).encode(
        x=alt.X("round:Q", title="round", scale=alt.Scale(domain=[0, 10]), axis=alt.Axis(format="d"))
    )
    scale = scale_of([row["value"] for row in some])
    band = base.mark_area(opacity=0.13).encode(
        y=alt.Y("min(value):Q", title=title, scale=scale), y2="max(value):Q", color=colour
    )
    line = base.mark_line(strokeWidth=1.8).encode(y="mean(value):Q", color=colour)
    return (band + line).properties(width=330, height=210, title=list(heading))


def _seeds(rows: Rows) -> list[str]:
    """How many seeds the lines of a panel have; where that differs, the least and the most."""
    seeds: dict[str, set[Any]] = {}
    for row in rows:
        seeds.setdefault(row["weights"], set()).add(row["seed"])
    counts = sorted({len(each) for each in seeds.values()})
    said = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return [f"ours, {said} seed{'s' * (counts[-1] > 1)}{', thin' if counts[0] < ENOUGH else ''}"]


BOXES = {
    "CIFAR-10": ("CIFAR-10, class-balanced test set",),
    "ISIC, class-balanced test set": (
        "ISIC 2019 (HAM10000 part), learning rate 0.0001, class-balanced test set",
        "ISIC 2019 (HAM10000 part), learning rate 0.0001, with MR-SV, class-balanced test set",
    ),
    "ISIC, test images as they are": ("ISIC 2019 (HAM10000 part), learning rate 0.0001, whole test set",),
}
"""Columns of fig-misbeh and the runs behind them; a score is of the first that has it."""


def misbeh(rows: Rows) -> alt.TopLevelMixin:
    """As the paper: scores side by side, CIFAR-10 left, ISIC right; its boxes behind our shares of runs."""
    names = {
        "COS sum": "COS",
        "ALPHA sum": "alpha",
        "PHI sum": "PHI",
        "ALPHA sum, renormalised": "alpha, ren.",
    }
    order = ["MR-SV", "COS", "LOO", "FP", "EE", "alpha", "PHI", "alpha, ren."]
    panels = []
    for utility, title in TITLES.items():
        for column, runs in BOXES.items():
            some = [row for row in rows if row["dataset"] in runs and row["utility"] == utility]
            theirs = [row for row in rows if row["dataset"] == runs[0] and row["utility"] == "the paper's"]
            body: Rows = []
            for score in dict.fromkeys(row["score"] for row in some):
                own = [row for row in some if row["score"] == score]
                own = [row for row in own if row["dataset"] == own[0]["dataset"]]
                hits, total = int(sum(row["last"] for row in own)), len(own)
                low, high = interval(hits, total)
                by_sign = int(sum(row["by a turned sign"] for row in own))
                said = f"{hits}/{total}" + ("*" if by_sign else "")
                body.append(
                    {
                        "score": names.get(score, score),
                        "share": hits / total,
                        "low": low,
                        "high": high,
                        "text": said,
                    }
                )
            boxes: dict[str, dict[str, Any]] = {}
            for row in theirs:
                name = names.get(row["score"], row["score"])
                boxes.setdefault(name, {"score": name})[row["seed"].removeprefix("paper, ")] = row["last"]
            body = [row for row in body if row["score"] in order]
            if body:
                panels.append(_boxes(body, list(boxes.values()), order, [column, title]))
    return alt.concat(*panels, columns=len(BOXES), **FLUSH).properties(
        title=alt.Title(
            "How often the label flipper gets the lowest score",
            subtitle=[
                "orange: the paper, whose utility is not named; blue: ours, with exact 95 % intervals; LOO, "
                "FP and EE of the last round, the others summed over the rounds",
                "*: some of them only because the sign of FP or EE had turned; ren.: the renormalised game",
                f"the paper's COS is of models, ours of updates; {DATA}",
            ],
        )
    )


def _boxes(body: Rows, boxes: Rows, order: Sequence[str], heading: Sequence[str]) -> alt.TopLevelMixin:
    """One panel."""
    x = alt.X(
        "score:N",
        sort=list(order),
        scale=alt.Scale(domain=list(order)),
        title=None,
        axis=alt.Axis(labelAngle=-40, grid=False, ticks=False),
    )

    def y(field: str) -> alt.Y:
        axis = alt.Axis(values=[0, 0.2, 0.4, 0.6, 0.8, 1])
        return alt.Y(f"{field}:Q", title="flipper lowest", scale=alt.Scale(domain=[0, 1.12]), axis=axis)

    paper, ours = alt.Chart(alt.Data(values=boxes)).encode(x=x), alt.Chart(alt.Data(values=body)).encode(x=x)
    layers = [
        paper.mark_rule(color=SETS[1]).encode(y=y("low"), y2="high:Q"),
        paper.mark_bar(color="#f6c7ae", stroke=SETS[1], size=20).encode(
            y=y("first quartile"), y2="third quartile:Q"
        ),
        paper.mark_tick(color=SETS[1], thickness=2.5, size=20).encode(y=y("median")),
        ours.mark_rule(color=SETS[0], strokeWidth=1.6).encode(y=y("low"), y2="high:Q"),
        ours.mark_point(color=SETS[0], filled=True, size=60, opacity=1).encode(y=y("share")),
        ours.mark_text(color=INK, fontSize=10).encode(y=alt.value(4), text="text:N"),
    ]
    return alt.layer(*layers).properties(width=280, height=150, title=list(heading))


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
            scale=alt.Scale(domain=list(shown.values())),  # a panel may lack a score
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
            subtitle=[about, f"tick: mean; † needs what secure aggregation hides; PHI: of repeats; {DATA}"],
        )
    )


DRAWN: dict[str, Callable[[Rows], alt.TopLevelMixin]] = {
    "fig-illustrate": illustrate,
    "fig-perf": perf,
    "fig-misbeh": misbeh,
    "retrained": retrained,
}


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
