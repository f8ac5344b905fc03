"""The page as one HTML file that contains its styles, data, charts and scripts; and its figures as files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache, partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedmerit.config import VERSION, of_folder
from fedmerit.errors import FedmeritError, InputError, MissingExtra, StoreError
from fedmerit.heading import Heading, file_part
from fedmerit.ledger.decisions import departs
from fedmerit.notes import LANGUAGES, capital, day, formatted, speaking, words
from fedmerit.report.comparison import Comparison
from fedmerit.report.facts import Facts
from fedmerit.report.page import money, text
from fedmerit.report.source import pseudonymised, read_source
from fedmerit.report.text import (
    about,
    apart_text,
    dashed,
    level,
    on_page,
    rank_text,
    rounds_enough,
    samples_text,
    share_text,
    span_text,
    spoken,
    sure_share_text,
    sure_worth,
    unbroken,
    worth,
)
from fedmerit.scoring.amounts import decimals_of
from fedmerit.scoring.convergence import FEWEST_ROUNDS
from fedmerit.scoring.rewards import spelled
from fedmerit.scoring.share_intervals import STEP, Spans
from fedmerit.scoring.spreadsheets import FOUND_OUT, SheetForm
from fedmerit.storage.run_folder import write
from fedmerit.toml_values import written

if TYPE_CHECKING:
    import jinja2

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

OURS = '<meta name="generator" content="fedmerit'
"""What every page has."""
HIDDEN = ' data-names="hidden">'
"""What a page without names has. No name can hold it, because names are escaped."""


def page_path(folder: Path, heading: Heading) -> Path:
    """Return where the page of a run is: its name says which run it is, also when it is sent to somebody."""
    parts = ("page", file_part(heading.title), file_part(folder.resolve().name))
    return folder / f"{'-'.join(filter(None, parts))}.html"


def language_of(path: str | Path) -> str:
    """Return the language in which the settings beside reports want a page."""
    there = (Path(path) / "config.toml").is_file()
    return of_folder(path).report.language if there else "en"


def page_of_run(folder: Path) -> str:
    """Write a run's page beside its scores; return where it is, or how to get one, or why there is none."""
    if not installed():
        return words("file.install", folder=folder)
    try:
        with speaking(language_of(folder)):
            facts = facts_of(folder)
            path = page_path(folder, facts.source.heading)
            write(path, render(facts).encode())
    except StoreError as error:  # no round is scored
        return words("file.none", why=error)
    return for_coordinator(path) if facts.source.private else words("file.open", path=path)


def for_coordinator(path: Path) -> str:
    """Return a message that the page is only for the coordinator, for runs with private numbers."""
    return words("file.private", path=path)


def refreshed(folder: Path, language: str | None = None) -> str:
    """Rewrite the pages beside a run's scores if there are any; return what was done, or an empty string.

    Args:
        folder: of the run.
        language: of the pages; by default each stays in its own.
    """
    return "\n".join(_refreshed(path, language) for path in sorted(folder.glob("page*.html")))


def _refreshed(path: Path, language: str | None) -> str:
    folder, there = path.parent, path.read_text(encoding="utf-8", errors="replace")
    if not _ours(there):
        return words("file.not-ours", path=path)
    if not installed():
        return words("file.old", path=path, folder=folder)
    try:
        hidden = HIDDEN in there
        spoken_there = next((one for one in LANGUAGES if f'<html lang="{one}"' in there), LANGUAGES[0])
        write(path, page(folder, pseudonyms=hidden, language=language or spoken_there).encode())
    except (FedmeritError, OSError) as error:
        return words("file.old-failed", path=path, why=error)
    return words("file.shows", path=path)


def _ours(page: str) -> bool:
    return OURS in page


def check_target(path: Path, *, force: bool) -> None:
    """Raise `StoreError` if the name is not one of HTML, the folder is missing, or the file is not ours."""
    if path.suffix.lower() not in (".html", ".htm") and not path.is_dir():
        raise StoreError(f"{path}: a page is HTML: expected a name that ends in .html")
    if not path.parent.is_dir():
        raise StoreError(f"{path}: could not be written: there is no folder {path.parent}")
    if path.exists() and not force and not _ours(path.read_text(encoding="utf-8", errors="replace")):
        raise StoreError(f"{path}: exists, and is no page of fedmerit: --out another file, or --force")


def installed() -> bool:
    """Return whether everything that a page needs is installed."""
    return all(find_spec(name) is not None for name in ("jinja2", "vl_convert"))


# ------------------------------------------------------------------------------------------------ the page

INSTALL = "pip install 'fedmerit[page]'"
BUDGET = "10000.00"
"""The budget on the page until the reader types another, if there is no decision with a budget."""
MOST_NOTES = 12
"""The most notes, and sentences on members who were away, that are shown at once."""
MOST_COLUMNS = 10
"""The most members in the columns of a table on paper."""
MOST_CELLS = 4000
"""The most cells in a table of members and rounds; larger tables are only in scores.csv."""


def page(
    path: str | Path,
    *,
    pseudonyms: bool = False,
    form: SheetForm = FOUND_OUT,
    language: str | None = None,
    heading: Heading | None = None,
) -> str:
    """Return the page of a run folder or a file of reports; the same input gives the same bytes.

    Args:
        path: see :func:`fedmerit.report.source.read_source`.
        pseudonyms: whether to replace names.
        form: how a CSV file is written, as far as its owner says so.
        language: "en" or "de"; by default as in the settings of the run.
        heading: title, consortium, date and currency; what it leaves empty is as in the decision in force, or
            in the settings. With pseudonyms, only a title and a consortium given here are shown.
    """
    with speaking(language or language_of(path)):
        return render(facts_of(path, pseudonyms=pseudonyms, form=form, heading=heading))


def facts_of(
    path: str | Path,
    *,
    pseudonyms: bool = False,
    form: SheetForm = FOUND_OUT,
    heading: Heading | None = None,
) -> Facts:
    """Return the facts of a page; arguments as in :func:`page`."""
    original, asked = read_source(path, form), heading or Heading()
    source = pseudonymised(original) if pseudonyms else original
    facts = Facts(replace(source, heading=asked.over(source.heading)), original)
    one, currency = facts.decision, facts.source.heading.currency
    if one and one.heading.currency not in ("", currency):
        raise InputError(f"currency: decision {one.number} is in {one.heading.currency}, got {currency}")
    return facts


def render(facts: Facts) -> str:
    """Return the page with these facts."""
    charts = _charts()
    rows = charts.course_rows(facts)
    drawn = {
        "contribution": charts.contribution(facts),
        "ranks": charts.ranks(facts),
        "course": charts.course(facts, rows, next(iter(facts.courses))) if facts.courses else None,
        "settling": charts.settling([("", facts)]) if facts.convergence else None,
        "quality": charts.quality(facts),
        "sums": charts.sums(facts),
    }
    filters = {
        "signed": partial(worth, facts), "total": partial(sure_worth, facts), "level": partial(level, facts),
        "rank": lambda one: dashed(rank_text(one)), "share": share_text,
        "sure": lambda one: dashed(sure_share_text(one)), "samples": samples_text,
        "toml": written,
    }  # fmt: skip
    return _page(
        "page.html",
        drawn,
        filters,
        scripts=("money.js", "page.js"),
        data={
            "rules": _rules(facts),
            "unscored": facts.unscored,
            "words": _script_words(decimals_of(facts.terms.currency)),
            "decimals": decimals_of(facts.terms.currency),
            "sure": any(one.spans for one in facts.rules),
            "why": money.reasons(facts),
            "decided": facts.decision is not None,
            "decidedSure": facts.spans is not None,
            "fold": [charts.HEAD, charts.TAIL, charts.MOST],
        },
        facts=facts,
        departs=departs(facts.decision.departures) if facts.decision else None,
        text=text,
        enough=rounds_enough(facts),
        fewest=FEWEST_ROUNDS,
        money=money,
        worth=worth,
        budget=formatted(Decimal(_budget(facts)), "f"),
        paid=money.decided(facts) if facts.decision else money.proposed(facts, _budget(facts)),
        sure_rules=any(one.spans for one in facts.rules),
        is_middle=charts.is_middle,
        shown_rows=charts.HEAD + charts.TAIL,
        about=about(facts.terms) if facts.decision else _rules(facts)[facts.rules[0].name]["about"],
        checks=[line for line in facts.source.checks if line.code != "head"],  # shown separately
        small=charts.ends(list(facts.courses), charts.MOST_SMALL),
        most_notes=MOST_NOTES,
        most_columns=MOST_COLUMNS,
        most_bars=charts.MOST_BARS,
        brackets=0 < sum(len(group) > 1 for group in facts.groups) <= charts.MOST_BRACKETS,
        cells=len(facts.courses) <= charts.MOST and len(facts.courses) * len(facts.shown) <= MOST_CELLS,
    )


def render_comparison(found: Comparison) -> str:
    """Return the page that compares runs."""
    charts, found = _charts(), replace(found, points=True)
    settled = [
        (label, run.facts)
        for label, run in zip(found.labels, found.runs, strict=True)
        if run.facts.convergence is not None
    ]
    drawn = {
        "scores": charts.scores_of_runs(found),
        "spreads": charts.spreads(found),
        "ranks": charts.ranks_of_runs(found),
        "settling": charts.settling(settled) if settled else None,
    }
    filters = {"score": found.score_text, "mean": found.mean_text, "spread": found.spread_text}
    return _page(
        "comparison.html",
        drawn,
        filters,
        found=found,
        settled=settled,
        fewest=FEWEST_ROUNDS,
        most_rows=charts.MOST_ROWS,
        each=len(found.rows) * len(found.runs) <= MOST_CELLS,
    )


def _charts() -> ModuleType:
    """Return the charts; raise MissingExtra if what a page needs is not installed."""
    if not installed():
        raise MissingExtra(f"the page needs: {INSTALL}")
    from fedmerit.report.page import charts

    return charts


def _page(
    template: str,
    drawn: Mapping[str, Any],
    filters: Mapping[str, Any],
    *,
    scripts: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
    **shown: Any,
) -> str:
    """Return a page from its template: with styles, scripts, charts and data, and nothing to load.

    Args:
        template: its file.
        drawn: its charts, by the name that the template gives them; None where there is none.
        filters: that the template uses.
        scripts: files of its own scripts.
        data: what these scripts read, beside the charts.
        shown: what the template shows.
    """
    import jinja2
    import vl_convert

    specs = {}
    for name, chart in drawn.items():
        if chart is not None:
            specs[name] = vl_convert.vegalite_to_vega(chart, vl_version="6.4")
            specs[name].pop("$schema", None)  # an address, but the page fetches nothing
    style = _asset("page.css")
    script = "\n".join([_asset("vega.js"), _DATA, *map(_asset, scripts), _asset("charts.js")])
    loader = jinja2.FunctionLoader(_asset)
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=loader,
        optimized=False,  # what is compiled serves both languages
        bytecode_cache=_compiled(),
        finalize=_shown,
    )
    environment.filters |= {
        "spoken": spoken,
        "capital": capital,
        "formatted": formatted,
        "day": day,
        **filters,
    }
    return environment.get_template(template).render(
        words=words,
        marked=_marked,
        version=VERSION,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=_json({"charts": specs, **(data or {})}),
        **shown,
    )


@cache
def _compiled() -> jinja2.BytecodeCache:
    """Return where compiled templates are kept while this process lives."""
    import jinja2.bccache

    codes: dict[str, Any] = {}

    class Compiled(jinja2.BytecodeCache):
        def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            bucket.code = codes.get(bucket.key)

        def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            codes[bucket.key] = bucket.code

    return Compiled()


_DATA = 'const data = JSON.parse(document.getElementById("data").textContent);'
_HTML = {
    "b": "<strong>", "/b": "</strong>", "code": "<code>", "/code": "</code>", "key": '<span class="key">',
    "/key": "</span>", "below": '<span class="key below">', "/below": "</span>",
}  # fmt: skip


def _marked(code: str, **values: Any) -> Any:
    """Return the words for a code as HTML: marks become tags, and values are escaped."""
    from markupsafe import Markup, escape

    escaped = {key: escape(value) if isinstance(value, str) else value for key, value in values.items()}
    return Markup(unbroken(words(code, _HTML, **escaped)))  # noqa: S704 - the catalogue is ours


def _shown(value: Any) -> Any:
    """Return what a template writes for a value: in text, no line breaks within a number and its sign."""
    return unbroken(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _script_words(decimals: int = 2) -> dict[str, str]:
    """Return the words that the page's script says."""
    return {
        "problem": words("pay.no-payouts", why="%s"), "unpaid": words("pay.unpaid"),
        "budget": words("pay.budget"), "amount": words("pay.no-amount"), "twice": words("pay.two-amounts"),
        "decimals": words("pay.many-decimals", decimals=decimals), "large": words("pay.too-large"),
        "decimal": words("number.decimal"), "thousands": words("number.thousands"),
        "nothing": share_text(0.0, 2), "between": words("page.between", left="%s"),
    }  # fmt: skip


def _rules(facts: Facts) -> dict[str, Any]:
    """Return the data for computing payouts: integers as text, names in the order that breaks ties."""
    return {
        one.name: {
            "problem": on_page(one.problem),
            "one": str(one.one),
            "parts": [
                [name, str(one.parts[name]), share_text(one.shares[name], 2), *_span(one.spans, name)]
                for name in sorted(one.parts)
            ],
            "notes": [
                *([apart_text(one.apart, one.shares)] if one.apart else []),
                *(on_page(note) for note in one.notes),
            ],
            "about": about(replace(facts.terms, rule=one.name)),
        }
        for one in facts.rules
    }


def _span(spans: Spans | None, name: str) -> list[Any]:
    """Return the interval of a share as text, and its ends in steps; nothing if there is none."""
    if spans is None:
        return []
    return [span_text(spans[name]), *(str(round(end * STEP)) for end in spans[name])]


def _budget(facts: Facts) -> str:
    return str(facts.decision.paid.budget) if facts.decision else spelled(BUDGET, facts.terms.currency)


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
        "settling": charts.settling([("", facts)]) if facts.convergence else None,
        "quality": charts.quality(facts),
        "sums": charts.sums(facts),
    }
    for name, chart in drawn.items():
        if chart is not None:
            yield name, _on_paper(chart)
    for place, client in enumerate(charts.ends(list(facts.courses), charts.MOST_SMALL), start=1):
        spec = _on_paper(charts.course(facts, rows, client))
        yield f"course-{place:02d}", {**spec, "title": client}


def _on_paper(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the same chart with colours in place of CSS variables."""
    from fedmerit.report.page.charts import LIGHT

    plain = re.sub(r'"var\((--[a-z]+)\)"', lambda found: json.dumps(LIGHT[found[1]]), json.dumps(spec))
    made: dict[str, Any] = json.loads(plain)
    return made
