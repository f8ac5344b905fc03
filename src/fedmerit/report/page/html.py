"""The page as one HTML file that contains its styles, data, charts and scripts; and its figures as files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from fedmerit.config import VERSION, written
from fedmerit.errors import FedmeritError, InputError, MissingExtra, StoreError
from fedmerit.report.page import promises
from fedmerit.report.page import text as words
from fedmerit.report.page.facts import MOST_CELLS, Facts, gather
from fedmerit.report.page.promises import private
from fedmerit.report.page.source import pseudonymised, read_source
from fedmerit.report.terminal import bare_text, rank_text, signed, total_text
from fedmerit.scoring.rewards import payouts
from fedmerit.storage.run_folder import write

# -------------------------------------------------------------------------------------------------- bundle

NOTICE = """\
/* Vega, as bundled by vl-convert. Copyright (c) 2015-2023 University of Washington Interactive Data Lab
   (BSD-3-Clause). With d3, topojson-client and internmap, Copyright 2010-2023 Mike Bostock (ISC), and
   delaunator, Copyright 2021 Mapbox (ISC). The licences are in the file NOTICE of fedmerit. */
"""
PATH = Path(__file__).with_name("vega.js")


def bundle() -> str:
    """Return the script that defines ``vega`` (View, parse, Warn) for charts that are compiled to Vega."""
    import vl_convert

    address = (
        f"https://cdn.jsdelivr.net/npm/vega@{vl_convert.get_vega_version()}/+esm.js"  # a name, not fetched
    )
    names = "View, parse, Warn"
    script = vl_convert.javascript_bundle(f'import {{{names}}} from "{address}"; window.vega = {{{names}}};')
    return NOTICE + script.strip() + "\n"


if __name__ == "__main__":
    PATH.write_text(bundle(), encoding="utf-8")


# ------------------------------------------------------------------------------------------------- writing

NAME = "page.html"
OURS = "<p>Made by fedmerit "
"""Every page has it."""
HIDDEN = ('<html lang="en" data-names="hidden">', '<p class="quiet">Members are shown under pseudonyms')
"""A page without names has the first; one that an earlier version made has the second alone. No name can hold
either, because names are escaped."""


def page_of_run(folder: Path) -> str:
    """Write a run's page beside its scores; return where it is, or how to get one, or why there is none."""
    if not _installed():
        return f"for a page that anybody can open: pip install 'fedmerit[page]', then fedmerit page {folder}"

    try:
        facts = facts_of(folder)
    except StoreError as error:  # no round is scored
        return f"no page: {error}"
    write(folder / NAME, render(facts).encode())
    if private(facts):
        return for_coordinator(folder / NAME)
    return f"for everybody else: open {folder / NAME} in a browser"


def for_coordinator(path: Path) -> str:
    """Return a message that the page is only for the coordinator, for runs with private numbers."""
    return (
        f"{path} shows everybody's numbers: it is for the coordinator alone; a member gets its own statement "
        "(fedmerit rewards) and its own copy of the ledger (fedmerit export --for NAME)"
    )


def refreshed(folder: Path) -> str:
    """Rewrite the page beside a run's scores if there is one; return what was done, or an empty string."""
    path = folder / NAME
    if not path.is_file():
        return ""
    there = path.read_text(encoding="utf-8", errors="replace")
    if OURS not in there:
        return f"{path} is no page of fedmerit and was left as it is"
    if not _installed():
        return f"{path} is from before this: pip install 'fedmerit[page]', then fedmerit page {folder}"

    try:
        hidden = any(mark in there for mark in HIDDEN)
        write(path, page(folder, pseudonyms=hidden).encode())
    except (FedmeritError, OSError) as error:
        return f"{path} is from before this, and could not be written anew: {error}"
    return f"{path} shows it"


def check_target(path: Path, *, force: bool) -> None:
    """Raise `StoreError` if the folder is missing, or if the file exists and is not one of our pages."""
    if not path.parent.is_dir():
        raise StoreError(f"{path}: could not be written: there is no folder {path.parent}")
    if path.exists() and not force and OURS not in path.read_text(encoding="utf-8", errors="replace"):
        raise StoreError(f"{path}: exists, and is no page of fedmerit: --out another file, or --force")


def _installed() -> bool:
    return all(find_spec(name) is not None for name in ("altair", "jinja2", "vl_convert"))


# ------------------------------------------------------------------------------------------------ the page

INSTALL = "pip install 'fedmerit[page]'"
BUDGET = "10000.00"
"""The budget on the page until the reader types another, if there is no decision with a budget."""


def page(path: str | Path, *, pseudonyms: bool = False) -> str:
    """Return the page of a run folder or a file of reports; the same input gives the same bytes.

    Args:
        path: see :func:`fedmerit.report.page.source.read_source`.
        pseudonyms: whether to replace names.
    """
    return render(facts_of(path, pseudonyms=pseudonyms))


def facts_of(path: str | Path, *, pseudonyms: bool = False) -> Facts:
    """Return the facts of a page; arguments as in :func:`page`."""
    original = read_source(path)
    return gather(pseudonymised(original) if pseudonyms else original, original)


def render(facts: Facts) -> str:
    """Return the page with these facts."""
    try:
        import jinja2
        import vl_convert

        from fedmerit.report.page import charts
    except ModuleNotFoundError as error:
        if error.name not in ("altair", "jinja2", "vl_convert"):
            raise
        raise MissingExtra(f"the page needs: {INSTALL}") from error
    rows = charts.course_rows(facts)
    drawn = {
        "contribution": charts.contribution(facts),
        "ranks": charts.ranks(facts),
        "course": charts.course(facts, rows, facts.courses[0].client),
        "quality": charts.quality(facts),
        "sums": charts.sums(facts),
    }
    specs = {}
    for name, chart in drawn.items():
        if chart is not None:
            specs[name] = vl_convert.vegalite_to_vega(chart.to_dict(), vl_version="6.4")
            specs[name].pop("$schema", None)  # an address, but the page fetches nothing
    style = _asset("page.css")
    script = _asset("vega.js") + "\n" + _asset("money.js") + "\n" + _asset("page.js")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "signed": partial(signed, digits=facts.summary.digits), "total": total_text, "bare": bare_text,
        "level": f"{{:.{facts.level_digits}f}}".format, "rank": rank_text, "listed": words.listed,
        "toml": written,
    }  # fmt: skip
    return environment.from_string(
        _asset("page.html")
    ).render(
        facts=facts,
        words=words,
        promises=promises,
        notes=words.notes(facts),
        version=VERSION,
        budget=_budget(facts),
        paid=_paid(facts),
        about=_rules(facts)[facts.rules[0].name]["about"],
        checks=[line for line in facts.source.checks if line.code != "head"],  # shown separately
        small=[one.client for one in facts.courses[: charts.MOST_SMALL]],
        most_rows=charts.MOST_ROWS,
        most_bars=charts.MOST_BARS,
        brackets=0 < sum(len(group) > 1 for group in facts.summary.groups) <= charts.MOST_BRACKETS,
        cells=len(facts.courses) * len(facts.shown) <= MOST_CELLS,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=_json({"charts": specs, "rules": _rules(facts), "unscored": facts.unscored}),
    )


def _rules(facts: Facts) -> dict[str, Any]:
    """Return the data for computing payouts: integers as text, names in the order that breaks ties."""
    return {
        one.name: {
            "problem": words.note(one.problem),
            "one": str(one.one),
            "parts": [[name, str(one.parts[name]), f"{one.shares[name]:.2%}"] for name in sorted(one.parts)],
            "notes": [words.note(text) for text in one.notes],
            "about": words.about(replace(facts.terms, rule=one.name)),
        }
        for one in facts.rules
    }


def _paid(facts: Facts) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return the payouts that the page first shows: the lines of the table, and its foot."""
    first = facts.rules[0]
    if first.problem:
        return [], []
    paid = payouts({name: Fraction(part, first.one) for name, part in first.parts.items()}, _budget(facts))
    best_first = sorted(paid.items(), key=lambda item: (-item[1], item[0]))
    lines = [(name, f"{first.shares[name]:.2%}", f"{amount:,.2f}") for name, amount in best_first]
    return lines, [("unpaid", f"{paid.unpaid:,.2f}"), ("budget", f"{paid.budget:,.2f}")]


def _budget(facts: Facts) -> str:
    return facts.decided.budget if facts.decided else BUDGET


def _asset(name: str) -> str:
    return resources.files("fedmerit.report.page").joinpath(name).read_text(encoding="utf-8")


def _json(content: Any) -> str:
    """Return JSON that is safe in a script element: it can neither end the element nor begin a comment."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """Return the hash by which a content security policy names an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# ------------------------------------------------------------------------------------------------- figures
# The page's charts as PNG, SVG or PDF files, in colours for white paper.

Kind = Literal["png", "pdf", "svg"]
WIDTH = 640
"""Width of a figure in pixels; a PNG has three times as many."""


def figures(facts: Facts, kind: str) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of all figures.

    Args:
        facts: the facts of the page.
        kind: "png", "pdf" or "svg".
    """
    if kind not in get_args(Kind):
        raise InputError(f"figures must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        raise MissingExtra(f"figures need: {INSTALL}") from error
    for name, spec in _specs(facts):
        spec["width"], spec["background"] = WIDTH, "white"
        if kind == "png":
            made = vl_convert.vegalite_to_png(spec, vl_version="6.4", scale=3)
        elif kind == "pdf":
            made = vl_convert.vegalite_to_pdf(spec, vl_version="6.4")
        else:
            made = vl_convert.vegalite_to_svg(spec, vl_version="6.4").encode()
        yield f"{name}.{kind}", made


def _specs(facts: Facts) -> Iterator[tuple[str, dict[str, Any]]]:
    from fedmerit.report.page import charts

    rows = charts.course_rows(facts)
    drawn = {
        "contribution": charts.contribution(facts),
        "ranks": charts.ranks(facts),
        "quality": charts.quality(facts),
        "sums": charts.sums(facts),
    }
    for name, chart in drawn.items():
        if chart is not None:
            yield name, _on_paper(chart.to_dict())
    for place, one in enumerate(facts.courses[: charts.MOST_SMALL], start=1):
        spec = _on_paper(charts.course(facts, rows, one.client).to_dict())
        yield f"course-{place:02d}", {**spec, "title": one.client}


def _on_paper(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the same chart with colours in place of CSS variables."""
    from fedmerit.report.page.charts import LIGHT

    plain = re.sub(r'"var\((--[a-z]+)\)"', lambda found: json.dumps(LIGHT[found[1]]), json.dumps(spec))
    made: dict[str, Any] = json.loads(plain)
    return made
