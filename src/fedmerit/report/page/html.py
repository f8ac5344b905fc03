"""The page as one HTML file that contains its styles, data, charts and scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import unescape
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fedmerit.config import VERSION, written
from fedmerit.errors import FedmeritError, InputError, MissingExtra, StoreError
from fedmerit.files.sheets import FOUND_OUT, SheetForm, sheet_text
from fedmerit.identity import SERVER
from fedmerit.ledger.decisions import departs
from fedmerit.ledger.run import Run
from fedmerit.notes import LANGUAGES, capital, day, formatted, install, speaking, words
from fedmerit.report.comparison import Comparison
from fedmerit.report.facts import Facts
from fedmerit.report.page import charts, text
from fedmerit.report.payment import PaidLine, RuleFacts, paid_lines, rules_of
from fedmerit.report.source import read_source
from fedmerit.report.text import (
    about,
    amounts_text,
    apart_text,
    cell_text,
    dashed,
    level,
    level_change,
    money_text,
    on_page,
    rank_text,
    rounds_enough,
    samples_text,
    settlement_sentences,
    share_text,
    signed_by,
    span_text,
    spoken,
    sure_share_text,
    sure_worth,
    unbroken,
    worth,
)
from fedmerit.scoring.accumulate import FEWEST_ROUNDS
from fedmerit.scoring.amounts import decimals_of, payouts
from fedmerit.scoring.rewards import STEP, Shares
from fedmerit.settings import Heading, file_part
from fedmerit.storage.run_folder import write

if TYPE_CHECKING:
    import jinja2

# ------------------------------------------------------------------------------------------------- writing

OURS = '<meta name="generator" content="fedmerit'
"""What every page has."""


def page_path(folder: Path, heading: Heading) -> Path:
    """Return where the page of a run is: its name says which run it is, also when it is sent to somebody."""
    parts = ("page", file_part(heading.title), file_part(folder.resolve().name))
    return folder / f"{'-'.join(filter(None, parts))}.html"


def page_of_run(folder: Path) -> str:
    """Write a run's page beside its scores; return where it is, or how to get one, or why there is none."""
    if not installed():
        return words("file.install", folder=folder, install=install("page"))
    try:
        facts = facts_of(folder)
        path = page_path(folder, facts.source.heading)
        write(path, render(facts).encode())
    except StoreError as error:  # no round is scored
        return words("file.none", why=error)
    return words("file.private" if facts.source.private else "file.open", path=path)


def refreshed(run: Run, language: str | None = None) -> str:
    """Rewrite the pages beside a run's scores, each in its language unless given; return what was done."""
    pages = sorted(run.path.parent.glob("page*.html"))
    return "\n".join(_refreshed(path, run, language) for path in pages)


def _refreshed(path: Path, run: Run, language: str | None) -> str:
    folder, there = path.parent, path.read_text(encoding="utf-8", errors="replace")
    if OURS not in there:
        return words("file.not-ours", path=path)
    if not installed():
        return words("file.old", path=path, folder=folder, install=install("page"))
    try:
        spoken_there = next((one for one in LANGUAGES if f'<html lang="{one}"' in there), LANGUAGES[0])
        with speaking(language or spoken_there):
            write(path, render(facts_of(folder, known=run)).encode())
    except (FedmeritError, OSError) as error:
        return words("file.old-failed", path=path, why=error)
    return words("file.shows", path=path)


def source_id(*measured: Facts) -> str:
    """Return what a page is about: the numbers of its runs, or the names of files of reports."""
    return " ".join(facts.source.run.id if facts.source.run else facts.source.run_name for facts in measured)


def check_target(path: Path, about: str = "", *, force: bool = False) -> None:
    """Raise `StoreError` if the name is not one of HTML, the folder is missing, or the file must stay.

    Only a page of ours may be replaced and, where that is known, only by one ``about`` the same source.
    """
    if path.suffix.lower() not in (".html", ".htm") and not path.is_dir():
        raise StoreError(f"{path}: a page is HTML: expected a name that ends in .html")
    if not path.parent.is_dir():
        raise StoreError(f"{path}: could not be written: there is no folder {path.parent}")
    if force or not path.exists():
        return
    there, other = path.read_text(encoding="utf-8", errors="replace"), "choose another --out, or --force"
    if OURS not in there:
        raise StoreError(f"{path}: exists, and was not written by fedmerit: {other}")
    told = re.search('<meta name="fedmerit-source" content="([^"]*)">', there)
    if about and (told is None or unescape(told[1]) != about):
        raise StoreError(f"{path}: exists, and is a page of another run or file: {other}")


def installed() -> bool:
    """Return whether everything that a page needs is installed."""
    return all(find_spec(name) is not None for name in ("jinja2", "vl_convert"))


# ------------------------------------------------------------------------------------------------ the page

NOMINAL = "1000000000.00"
"""What is divided where nobody has named a budget; the page then shows only shares."""
MOST_NOTES = 12
"""The most notes, and sentences on members who were away, that are shown at once."""
MOST_COLUMNS = 10
"""The most members in the columns of a table on paper."""
MOST_CELLS = 4000
"""The most cells in a table of members and rounds; larger tables are only in scores.csv."""


def page(path: str | Path, *, language: str | None = None, heading: Heading | None = None) -> str:
    """Return the page of a run folder or a file of reports; the same input gives the same bytes.

    ``language`` is "en" (the default) or "de". What ``heading`` leaves empty is as in the decision in force,
    or in the settings.
    """
    with speaking(language or "en"):
        return render(facts_of(path, heading=heading))


def facts_of(
    path: str | Path,
    *,
    form: SheetForm = FOUND_OUT,
    heading: Heading | None = None,
    known: Run | None = None,
) -> Facts:
    """Return the facts of a page; arguments as in :func:`page` and :func:`read_source`."""
    source, asked = read_source(path, form=form, damaged=True, known=known), heading or Heading()
    facts = Facts(replace(source, heading=asked.over(source.heading)))
    one, currency = facts.decision, facts.source.heading.currency
    if one and one.heading.currency not in ("", currency):
        raise InputError(f"currency: decision {one.number} is in {one.heading.currency}, got {currency}")
    return facts


def render(facts: Facts) -> str:
    """Return the page with these facts."""
    decision, currency, rules = facts.decision, facts.terms.currency, rules_of(facts)
    any_spans = facts.spans is not None or any(rule.spans for rule in rules)
    divided, lines = paid_table(facts, rules[0])
    rows, members, reasons = charts.course_rows(facts), list(facts.courses), text.reasons(facts)
    signed_columns, signers = signatures(facts)
    drawn = {
        "contribution": charts.contribution(facts),
        "ranks": charts.ranks(facts),
        "course": charts.course(facts, rows, members[0]) if members else None,
        "settling": charts.settling([("", facts)]) if facts.convergence else None,
        "quality": None if facts.panel else charts.quality(facts),
        "sums": None if facts.panel else charts.sums(facts),
    }
    return _page(
        "page.html",
        drawn,
        scripts=("money.js", "page.js"),
        data={
            "rules": _rules(facts, rules),
            "unscored": facts.unscored,
            "words": _script_words(decimals_of(currency)),
            "decimals": decimals_of(currency),
            "sure": any_spans,
            "why": reasons,
            "decided": decision is not None,
            "fold": [charts.HEAD, charts.TAIL, charts.MOST],
        },
        source_id=source_id(facts),
        facts=facts,
        departs=departs(decision.departures) if decision else None,
        rules=rules,
        text=text,
        approvals=approvals(facts),
        glance=glance(facts),
        signed_columns=signed_columns,
        signers=signers,
        signed_by=signed_by(facts),
        downloads=downloads(facts),
        enough=rounds_enough(facts),
        settlement=settlement_sentences(facts) if facts.settled else [],
        not_meant=text.not_meant(facts),
        fewest=FEWEST_ROUNDS,
        worth=worth,
        paid=decision.paid if decision else None,
        unpaid=_unpaid(divided) if divided else "",
        lines=lines,
        why=reasons,
        percent=_percent_of_longest(lines),
        any_spans=any_spans,
        about=about(facts.terms),
        checks=[line for line in facts.source.checks if line.code != "head"],  # shown separately
        small=charts.ends(members, charts.MOST_SMALL),
        most_notes=MOST_NOTES,
        most_columns=MOST_COLUMNS,
        cells=len(members) <= charts.MOST and len(members) * len(facts.shown) <= MOST_CELLS,
    )


def render_comparison(found: Comparison) -> str:
    """Return the page that compares runs."""
    found = replace(found, points=True)
    labelled = zip(found.labels, found.runs, strict=True)
    settled = [(label, run.facts) for label, run in labelled if run.facts.convergence is not None]
    drawn = {
        "scores": charts.scores_of_runs(found),
        "spreads": charts.spreads(found),
        "ranks": charts.ranks_of_runs(found),
        "settling": charts.settling(settled) if settled else None,
    }
    return _page(
        "comparison.html",
        drawn,
        source_id=source_id(*(run.facts for run in found.runs)),
        found=found,
        settled=settled,
        fewest=FEWEST_ROUNDS,
        each=len(found.rows) * len(found.runs) <= MOST_CELLS,
    )


def _page(
    template: str,
    drawn: Mapping[str, Any],
    *,
    scripts: Sequence[str] = (),
    data: Mapping[str, Any] | None = None,
    **shown: Any,
) -> str:
    """Return a page from its template with charts, own scripts and their data; it loads nothing.

    Raises:
        MissingExtra: what a page needs is not installed.
    """
    if not installed():
        raise MissingExtra.of("the page needs", "page")
    import vl_convert

    specs = {}
    for name, chart in drawn.items():
        if chart is not None:
            specs[name] = vl_convert.vegalite_to_vega(chart, vl_version="6.4")
            specs[name].pop("$schema", None)  # an address, but the page fetches nothing
    style = _asset("page.css")
    script = "\n".join([_asset("vega.js"), _DATA, *map(_asset, scripts), _asset("charts.js")])
    return (
        _environment()
        .get_template(template)
        .render(
            words=words,
            marked=_marked,
            charts=charts,
            version=VERSION,
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
            data=_json({"charts": specs, **(data or {})}),
            **shown,
        )
    )


@cache
def _environment() -> jinja2.Environment:
    """Return what reads templates, and keeps them compiled while this process lives."""
    import jinja2

    def of(shown: str, write: Callable[[Any, Any], str]) -> Callable[..., str]:
        """Return a filter that also takes the facts, or the comparison, that the page shows."""
        return jinja2.pass_context(lambda context, value: write(context[shown], value))

    made = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_asset),
        optimized=False,  # what is compiled serves both languages
        finalize=_shown,
    )
    made.filters |= {
        "cell": of("facts", cell_text),
        "signed": of("facts", worth), "total": of("facts", sure_worth), "level": of("facts", level),
        "score": of("found", Comparison.score_text), "mean": of("found", Comparison.mean_text),
        "spread": of("found", Comparison.spread_text), "rank": lambda one: dashed(rank_text(one)),
        "share": share_text, "sure": lambda one: dashed(sure_share_text(one)), "samples": samples_text,
        "money": money_text, "within": lambda span: dashed(amounts_text(span)), "spoken": spoken,
        "span": lambda span: dashed(span_text(span)),
        "capital": capital, "formatted": formatted, "day": day, "toml": written,
    }  # fmt: skip
    return made


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


def _script_words(decimals: int) -> dict[str, str]:
    """Return the words that the page's script says."""
    return {
        "problem": words("pay.no-payouts", why="%s"), "unpaid": words("pay.unpaid"),
        "budget": words("pay.budget"), "amount": words("pay.no-amount"), "twice": words("pay.two-amounts"),
        "decimals": words("pay.many-decimals", decimals=decimals), "large": words("pay.too-large"),
        "decimal": words("number.decimal"), "thousands": words("number.thousands"),
        "nothing": share_text(0.0, 2), "between": words("page.between", left="%s"),
        "sort": words("page.sort"), "shares": words("page.shares-caption"),
    }  # fmt: skip


def _rules(facts: Facts, rules: Sequence[RuleFacts]) -> dict[str, Any]:
    """Return the data for computing payouts: integers as text, names in the order that breaks ties."""
    found: dict[str, Any] = {}
    for rule in rules:
        ratios = {name: share.as_integer_ratio() for name, share in sorted((rule.shares or {}).items())}
        whole = math.lcm(*(bottom for _, bottom in ratios.values()))
        parts = []
        for name, (top, bottom) in ratios.items():
            parts.append([name, str(top * (whole // bottom)), share_text(top / bottom, 2)])
            if rule.spans is not None:  # as text, and its ends in steps
                span = rule.spans[name]
                parts[-1] += [dashed(span_text(span)), *(str(round(end * STEP)) for end in span)]
        apart = [apart_text(rule.apart, rule.shares)] if rule.apart and rule.shares else []
        found[rule.name] = {
            "problem": on_page(rule.problem),
            "one": str(whole),
            "parts": parts,
            "unpaid": _unpaid(rule.shares) if rule.shares else "",
            "notes": [*apart, *map(on_page, rule.notes)],
            "about": about(replace(facts.terms, rule=rule.name)),
        }
    return found


# ------------------------------------------------------------------------------------ the table of payouts


def paid_table(facts: Facts, usual: RuleFacts) -> tuple[Shares | None, list[PaidLine]]:
    """Return the shares, and the lines of their table; None if there are no shares.

    They are those of the decision in force. Without one they are those of the usual rule, and the amounts
    mean nothing.
    """
    if (decision := facts.decision) is not None:
        return decision.shares, paid_lines(decision.shares, decision.paid, facts.spans, facts.unscored)
    if usual.shares is None:
        return None, []
    return usual.shares, paid_lines(usual.shares, payouts(usual.shares, NOMINAL), usual.spans, facts.unscored)


def _unpaid(divided: Shares) -> str:
    """Return which part of any budget stays unpaid."""
    return share_text(max(0.0, 1 - math.fsum(share for _, share in divided.items())), 2)


def _percent_of_longest(lines: Sequence[PaidLine]) -> Callable[[float], float]:
    """Return what tells the length of a bar in percent: all, with their intervals, fit into the column."""
    longest = max([one.share_span[1] if one.share_span else one.share for one in lines], default=0.0) or 1.0
    return lambda share: round(100 * share / longest, 2)


# ----------------------------------------------------------------------------- who signed, and at a glance

SIGNED = {
    "terms": ("join", "run"),
    "round": ("report", "round"),
    "statement": ("statement", ""),
    "sums": ("countersigned", "settled"),
    "end": ("seen", "end"),
}
"""What is signed -> the kinds of record by which a member and the server sign it."""


def signatures(facts: Facts) -> tuple[list[str], list[tuple[str, str, list[str]]]]:
    """Return columns and lines (name, role, cells) of the table: the last record of each kind, or a dash.

    Both are empty without signatures.
    """
    run, decision = facts.source.run, facts.decision
    if run is None or not run.signed:
        return [], []
    last = {(record.kind, record.author): record for record in run.records}
    kinds = [what for what, pair in SIGNED.items() if any((pair[0], name) in last for name in run.clients)]
    columns = [words(f"signed-col.{what}") for what in kinds]
    if decision is not None:
        columns.insert(0, words("signed.decision", number=decision.number))
    lines = []
    for name in (SERVER, *run.clients):
        cells = []
        for what in kinds:
            record = last.get((SIGNED[what][name == SERVER], name))
            cells.append("-" if record is None else str(record.seq))
            if record is not None and what == "round":
                cells[-1] = words("signed.last", record=record.seq, round=record.body["round"])
        if decision is not None:
            own = _approval(run, name, decision.number)
            cells.insert(0, str(decision.record) if name == SERVER else own)
        shown = words("signed.server") if name == SERVER else name
        role = words("signed.role-server" if name == SERVER else "signed.role-member")
        lines.append((shown, role, cells))
    return columns, lines


def _approval(run: Run, member: str, decision: int) -> str:
    """Return the record of a member's approval of a decision, or of the last one that it approved before."""
    own = [one for one in run.approvals if one.member == member]
    if not own:
        return words("signed.not-yet")
    one = max(own, key=lambda one: one.decision)
    if one.decision == decision:
        return str(one.record)
    return words("signed.older", record=one.record, decision=one.decision)


def approvals(facts: Facts) -> str:
    """Return who approved the decision in force, and who has not; empty if nobody can."""
    run, decision = facts.source.run, facts.decision
    if run is None or decision is None or not run.signed:
        return ""
    there, n = run.approved(decision.number), len(run.clients)
    if not there:
        return words("signed.approved-none", number=decision.number)
    if len(there) == n:
        return words("signed.approved-all", number=decision.number, n=n)
    missing = tuple(name for name in run.clients if name not in there)
    return words("signed.approved-some", number=decision.number, count=len(there), n=n, clients=missing)


def glance(facts: Facts) -> list[tuple[str, str, bool]]:
    """Return the page at one glance, as names and values, and whether a value is a check that failed."""
    source, decision, run = facts.source, facts.decision, facts.source.run
    n, found, failed = len(source.clients), dict[str, str](), {"ledger"} if source.broken else set[str]()
    if decision is not None:
        found["budget"] = money_text(decision.paid.budget, source.heading.currency)
        found["paid"] = words("glance.of", count=sum(map(bool, decision.paid.values())), n=n)
        if run is not None and run.signed:
            found["approved"] = words("glance.of", count=len(run.approved(decision.number)), n=n)
    else:
        found["members"] = str(n)
        if run is not None:
            found["rounds"] = words("glance.of", count=len(source.closed), n=source.planned or 0)
    if facts.panel is not None:
        columns = facts.account.columns
        found["columns"] = words("glance.of", count=sum(columns.values()), n=len(columns))
        failed |= {"columns"} if not all(columns.values()) else set()
    else:
        found["model"] = level_change(facts, facts.total.gain)
    if facts.settled and facts.panel is None:
        account = facts.account
        found["equations"] = words("glance.of", count=account.holding, n=len(account.rounds))
        failed |= {"equations"} if account.holding < len(account.rounds) else set()
    ledger = "broken" if source.broken else "verified" if run is not None else "lacking"
    found["ledger"] = words(f"glance.{ledger}")
    return [(words(f"glance.{code}"), value, code in failed) for code, value in found.items()]


# ------------------------------------------------------------------------------------------------ downloads


def downloads(facts: Facts) -> list[tuple[str, str, str]]:
    """Return the standings for other programs, as name, file and link: CSV and JSON within the page."""
    decision, rows = facts.decision, []
    for one in facts.standings:
        share, paid = one.share, None
        if decision is not None:
            share, paid = (
                decision.shares.by_client.get(one.client, 0.0),
                str(decision.paid.by_client[one.client]),
            )
        rows.append({
            "client": one.client, "contribution": one.total,
            "low": one.interval and one.interval[0], "high": one.interval and one.interval[1],
            "rank": one.rank, "rank_low": one.rank_interval and one.rank_interval[0],
            "rank_high": one.rank_interval and one.rank_interval[1], "share": share, "payout": paid,
        })  # fmt: skip
    about: dict[str, Any] = {
        "run": facts.source.run.id if facts.source.run else None,
        **facts.source.heading.body(),
    }
    about |= {"score": facts.ranked_by, "utility": facts.utility, "decision": decision and decision.number}
    table = sheet_text(
        [[*rows[0]], *([("" if cell is None else cell) for cell in row.values()] for row in rows)]
    )
    name = file_part(facts.source.run_name) or "contributions"
    files = (
        ("page.download-csv", "csv", "text/csv", table),
        ("page.download-json", "json", "application/json", json.dumps({**about, "members": rows})),
    )
    return [
        (words(code), f"{name}.{kind}", f"data:{mime};charset=utf-8,{quote(content)}")
        for code, kind, mime, content in files
    ]


# ----------------------------------------------------------------------------------------------- own files


def _asset(name: str) -> str:
    return resources.files("fedmerit.report.page").joinpath(name).read_text(encoding="utf-8")


def _json(content: Any) -> str:
    """Return JSON that is safe in a script element: it can neither end the element nor begin a comment."""
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """Return the hash by which a content security policy names an inline element."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
