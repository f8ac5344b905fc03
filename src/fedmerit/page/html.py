"""Facts -> one HTML file that needs nothing else: styles, data, charts and scripts are inside."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from fractions import Fraction
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from fedmerit import __version__
from fedmerit.errors import MissingExtra
from fedmerit.money import payouts
from fedmerit.page import doubts, notes, promises, terms, words
from fedmerit.page.facts import MOST_CELLS, Facts, gather
from fedmerit.page.source import pseudonymised, read_source
from fedmerit.tables import bare_text, rank_text, signed, total_text
from fedmerit.toml import written

INSTALL = "pip install 'fedmerit[page]'"
BUDGET = "10000.00"
"""What the page divides until somebody types another budget; that of the decision where there is one."""


def page(path: str | Path, *, pseudonyms: bool = False) -> str:
    """The page of a run folder or a file of reports, as text; the same bytes for the same folder.

    Args:
        path: see :func:`fedmerit.page.source.read_source`.
        pseudonyms: whether names are replaced.
    """
    return render(facts_of(path, pseudonyms=pseudonyms))


def facts_of(path: str | Path, *, pseudonyms: bool = False) -> Facts:
    """The facts behind a page; arguments as :func:`page`."""
    original = read_source(path)
    return gather(pseudonymised(original) if pseudonyms else original, original)


def render(facts: Facts) -> str:
    """The page that says these facts."""
    try:
        import jinja2
        import vl_convert

        from fedmerit.page import charts
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
            specs[name].pop("$schema", None)  # an address, and nothing here looks anything up
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
        terms=terms,
        notes=notes.notes(facts),
        doubts=doubts,
        version=__version__,
        budget=_budget(facts),
        paid=_paid(facts),
        about=_rules(facts)[facts.rules[0].name]["about"],
        checks=[line for line in facts.source.checks if not line.startswith("head:")],  # has its own line
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
    """What the payouts are computed from: integers as text, names in the order in which equals get a cent."""
    return {
        one.name: {
            "problem": notes.note(one.problem),
            "one": str(one.one),
            "parts": [[name, str(one.parts[name]), f"{one.shares[name]:.2%}"] for name in sorted(one.parts)],
            "notes": [notes.note(text) for text in one.notes],
            "about": terms.about(replace(facts.terms, rule=one.name)),
        }
        for one in facts.rules
    }


def _paid(facts: Facts) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """The payouts that the page opens with: lines of the table, and its foot."""
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
    return resources.files("fedmerit.page").joinpath(name).read_text(encoding="utf-8")


def _json(content: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """As a content security policy names an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
