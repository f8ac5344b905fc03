"""A statement for each member: what it did, what it earns, what absence cost, and how sure that is.

Statements are for people who read nothing else about a run: HTML to print, Markdown, and JSON with the same
facts. A statement is written from the `Facts` of the rounds on which a decision rests.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from html import escape
from pathlib import Path
from typing import Any, Literal

from fedmerit.config import VERSION, Config
from fedmerit.ledger.account import Account
from fedmerit.ledger.chain import Ledger
from fedmerit.ledger.decisions import Decision, departs
from fedmerit.ledger.records import first_body
from fedmerit.notes import day, formatted, planted, words
from fedmerit.protocol.outcome import Round
from fedmerit.report.facts import Facts
from fedmerit.report.findings import Happened
from fedmerit.report.source import Span, source_as_decided
from fedmerit.report.text import (
    INSIDE,
    about,
    markdown,
    money_text,
    noun,
    settlement_sentences,
    signed_by,
    spoken,
    spoken_list,
    sure_worth,
    unbroken,
    worth,
)
from fedmerit.scoring.files import LEDGER
from fedmerit.scoring.rewards import money_of
from fedmerit.scoring.share_intervals import amounts_within
from fedmerit.storage.run_folder import write

STATUSES: tuple[Happened, ...] = ("counted", "silent", "unstated", "declined", "blamed", "lost", "away")
"""What can happen in a round of a ledger."""


def facts_as_decided(
    rounds: Sequence[Round],
    config: Config,
    decision: Decision,
    head: str,
    accounts: Sequence[Account] = (),
    run: Mapping[str, Any] | None = None,
    run_name: str = "",
) -> Facts:
    """Return the facts of a decision; arguments as in :func:`fedmerit.report.source.source_as_decided`."""
    settled = accounts if decision.terms.score == "PHI" else ()
    source = source_as_decided(rounds, config, decision, head, settled, run)
    return Facts(replace(source, run_name=run_name), score=decision.terms.score)


def write_statements(
    folder: Path,
    rounds: Sequence[Round],
    config: Config,
    decision: Decision,
    head: str,
    accounts: Sequence[Account] = (),
) -> int:
    """Write ``statements/NAME.md``, ``.html`` and ``.json`` for each member; return how many members."""
    target = folder / "statements"
    target.mkdir(exist_ok=True)
    with Ledger(folder / LEDGER, read_only=True) as ledger:
        run = first_body(ledger, "run")
    facts = facts_as_decided(rounds, config, decision, head, accounts, run, folder.resolve().name)
    for name in facts.source.clients:
        write(target / f"{name}.md", as_markdown(facts, name).encode())
        write(target / f"{name}.html", as_html(facts, name).encode())
        write(target / f"{name}.json", (json.dumps(as_dict(facts, name), indent=1) + "\n").encode())
    return len(facts.source.clients)


Row = tuple[str, ...]
Block = tuple[Literal["h1", "h2", "p", "lead", "ul", "pre", "table"], str | Row | tuple[Row, ...]]
"""A part of a statement: a heading, a paragraph, a list, heads of ledgers, or a table, its heading first."""
MOST_LINES = 40
"""The most rounds in the table of a statement, which is to be printed on one or two pages."""


def as_markdown(facts: Facts, client: str) -> str:
    """Return a member's statement as Markdown; names are text there, whatever letters they have."""
    prefix = {"h1": "# ", "h2": "## ", "p": "", "lead": ""}
    parts = []
    for kind, content in _blocks(facts, client):
        if isinstance(content, str):
            parts.append(prefix[kind] + markdown(content))
        elif kind == "table":
            rule = "|".join(["---", *["---:"] * (len(content[0]) - 1)])
            head, *rows = (f"| {' | '.join(map(markdown, row))} |" for row in content)
            parts.append("\n".join([head, f"|{rule}|", *rows]))
        elif kind == "ul":
            parts.append("\n".join(f"- {markdown(str(line))}" for line in content))
        else:
            parts.append("\n".join(f"    {line}" for line in content))
    return "\n\n".join(parts) + "\n"


def as_html(facts: Facts, client: str) -> str:
    """Return a member's statement as one HTML file that prints on a page or two, and loads nothing."""
    body = []
    for kind, content in _blocks(facts, client):
        if kind == "ul":
            body.append("<ul>" + "".join(f"<li>{_marked(str(line))}</li>" for line in content) + "</ul>")
        elif kind == "pre":
            body.append("".join(f"<pre>{escape(str(line))}</pre>" for line in content))
        elif kind == "table":
            body.append(_table([tuple(row) for row in content]))
        elif kind == "lead":
            body.append(f'<p class="lead">{_marked(str(content))}</p>')
        else:
            body.append(f"<{kind}>{_marked(str(content))}</{kind}>")
    title = words("statement.title", client=client)
    named = tuple(one for one in (facts.source.heading.title, facts.source.heading.consortium) if one)
    if named:
        title = words("title.document", named=named, title=title)
    style = f"<style>{_STYLE}</style>"
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="{words("page.language")}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="fedmerit {VERSION}">\n<title>{escape(title)}</title>\n{style}\n'
        "</head>\n<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


_TAGS = str.maketrans({"\x01": "<strong>", "\x02": "</strong>", "\x03": "<code>", "\x04": "</code>"})
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #595959; --line: #d9d9d4; --paper: #fff; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #ececea; --soft: #a9a9a4; --line: #3a3a3c;
  --paper: #161618; } }
body { margin: 0 auto; padding: 2rem 1.2rem 3rem; max-width: 44rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; border-top: 1px solid var(--line); padding-top: .8rem; }
p, ul, table { margin: 0 0 .7rem; }
table { border-collapse: collapse; width: 100%; font-size: .9em; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15rem 0 .15rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; padding-left: 0; }
thead th { font-weight: 400; color: var(--soft); vertical-align: bottom; }
.scroll { overflow-x: auto; }
.lead { font-size: 1.2rem; }
.lead strong { font-size: 1.5rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 .6rem; color: var(--soft); }
code, pre { font: .85rem ui-monospace, Menlo, Consolas, "Liberation Mono", monospace; }
@media print { @page { size: A4; margin: 16mm; } html { font-size: 9.5pt; }
  body { padding: 0; max-width: none; }
  h1 { font-size: 15pt; } h2 { font-size: 10.5pt; margin-top: .9rem; break-after: avoid; }
  li, p, tr { break-inside: avoid; } td, th { padding-block: .05rem; } }
"""


def _table(rows: Sequence[Row]) -> str:
    """Return a table as HTML; on a narrow screen it scrolls."""
    head, *others = rows
    label = escape(words("statement.adds-up"))
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in others
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table><thead><tr>{cells}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _marked(text: str) -> str:
    return escape(unbroken(text)).translate(_TAGS)


def _blocks(facts: Facts, client: str) -> Iterator[Block]:
    """Yield a member's statement, part by part: first what it earns."""
    marks = INSIDE
    decision, book = _decided(facts)
    yield "h1", words("statement.title", client=client)
    if told := departs(decision.departures):
        yield "lead", words("statement.departs", marks, text=told)
    if about_it := words("list.clause").join(_identity(facts)):
        yield "p", about_it
    if faults := _planted(facts, client):
        yield "p", faults
    yield "lead", next(earns := _earns(facts, client, marks))
    yield "p", " ".join(_opening(facts))
    for doubt in _doubts(decision, marks):
        yield "p", doubt
    yield "h2", words("statement.earn")
    if more := " ".join(earns):
        yield "p", more
    yield "p", about(decision.terms)
    yield "h2", words("statement.sure")
    yield "p", " ".join(_sure(facts, client))
    yield "h2", words("statement.did")
    yield "ul", tuple(_did(facts, client))
    yield "h2", words("statement.cost-settled" if facts.settled else "statement.cost")
    yield "p", " ".join(_costs(facts, client))
    if facts.settled:
        yield "h2", words("statement.adds-up")
        if lines := own_settlement(facts, client)["rounds"]:
            if len(lines) > MOST_LINES:
                yield "p", words("statement.all-lines", rounds=len(lines))
            yield "table", tuple(_equations(facts, lines))
            if odd := tuple(_odd_lines(facts, lines)):
                yield "ul", odd
        yield "p", " ".join(settlement_sentences(facts))
    yield "h2", words("statement.rests")
    yield "p", words("statement.record", record=decision.record)
    yield "pre", (book.head,)
    yield "p", " ".join(filter(None, (signed_by(facts), words("statement.keep", marks))))
    if decision.after:
        yield "p", words("statement.after")
        yield "pre", tuple(head for _, head in decision.after)
        yield "p", words("statement.keep-after", marks)


def _identity(facts: Facts) -> Iterator[str]:
    """Yield what the statement is about: title, consortium, date, run, and whether it is a rehearsal."""
    heading = facts.source.heading
    yield from (one for one in (heading.title, heading.consortium) if one)
    if heading.date:
        yield day(heading.date)
    if facts.source.run_name:
        yield words("page.run", run=facts.source.run_name)
    if facts.source.rehearsal:
        yield words("page.rehearsal")


def own_settlement(facts: Facts, client: str) -> dict[str, Any]:
    """Return what a member stated in the settlement, and what everybody may know of the others."""
    lines = []
    for one, past in _accounts(facts):
        for line in one.lines:
            if client in line.participants:
                place = line.participants.index(client)
                lines.append({
                    "round": None if line.round is None else past + line.round,
                    "stated": None if (value := line.stated[place]) is None else str(value),
                    "counted": None if (value := line.counted[place]) is None else str(value),
                    "utility": None if value is None else value * one.scale,
                    "sum": None if line.sum is None else str(line.sum),
                    "product": str(line.product),
                    "holds": line.holds,
                })  # fmt: skip
    accounts = facts.source.accounts
    return {
        "rounds": lines,
        "named": list(dict.fromkeys(name for one in accounts for name in one.liars)),
        "missing": list(dict.fromkeys(name for one in accounts for name in one.missing)),
        "countersigned": len(accounts[-1].countersigned),
    }


def _accounts(facts: Facts) -> Iterator[tuple[Account, int]]:
    """Yield the account of each run, and how many rounds there are before it."""
    past = [span.before for span in facts.source.spans] or [0]
    yield from zip(facts.source.accounts, past, strict=True)


def _equations(facts: Facts, lines: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield the heading and the lines of the table of a member's equations; of many rounds, their sums."""
    yield (
        words("page.round"),
        words("statement.col-stated"),
        words("statement.col-worth"),
        words("statement.col-sum"),
        words("statement.col-product"),
    )
    if len(lines) <= MOST_LINES:
        for line in lines:
            yield (
                _where(line),
                _units(line["stated"]),
                worth(facts, line["utility"], unit=True),
                _units(line["sum"]),
                _units(line["product"]),
            )
        return
    known = {key: [line[key] for line in lines] for key in ("stated", "sum", "product", "utility")}
    whole = {
        key: None if None in each else sum(map(int, each)) for key, each in known.items() if key != "utility"
    }
    summed = None if None in known["utility"] else sum(known["utility"])
    yield (
        words("settled.all-rounds"),
        _units(whole["stated"]),
        worth(facts, summed, unit=True),
        _units(whole["sum"]),
        _units(whole["product"]),
    )


def _units(number: str | int | None) -> str:
    """Return a whole number of units, or a dash."""
    return "-" if number is None else formatted(int(number), ",")


def _where(line: Mapping[str, Any]) -> str:
    if line["round"] is None:
        return words("settled.all-rounds")
    return words("settled.round", round=line["round"])


def _odd_lines(facts: Facts, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is to be said of the equations that do not hold, or in which another number counts."""
    for line in lines:
        where = _where(line)
        if line["stated"] is None:
            yield words("statement.settled-missing", where=where)
            continue
        if line["sum"] is None:
            yield words("statement.settled-open", where=where)
        elif not line["holds"]:
            yield words("statement.settled-fails", where=where)
        if (counted := int(line["counted"])) != int(line["stated"]):
            told = worth(facts, line["utility"], unit=True)
            yield words("statement.settled-counted", where=where, counted=counted, worth=told)


def _decided(facts: Facts) -> tuple[Decision, Any]:
    assert facts.decision is not None
    return facts.decision, facts.source.book


def _planted(facts: Facts, client: str) -> str:
    """Return which faults the settings planted; others are named only if members see everybody's numbers."""
    return planted(facts.source.corruption, {client: client} if facts.source.private else None)


def _opening(facts: Facts) -> Iterator[str]:
    decision, _ = _decided(facts)
    planned, members = facts.source.planned or 0, len(facts.source.clients)
    number, rounds = decision.number, decision.counted
    if rounds < planned:
        yield words(
            "statement.decision-partly", number=number, rounds=rounds, planned=planned, members=members
        )
    else:
        yield words("statement.decision", number=number, rounds=rounds, members=members)
    if decision.replaces:
        yield words("statement.replaces", replaces=decision.replaces)
    if spans := facts.source.spans:
        each = tuple(_span(span) for span in spans if span.count)
        yield words("statement.runs", runs=len(spans), each=each)


def _span(span: Span) -> str:
    """Return which rounds are those of one of several runs."""
    first, last = span.before + 1, span.before + span.count
    run = words("statement.run-id", run=span.name) if span.name else words("statement.run-own")
    if span.count == 1:
        return words("statement.run-one", first=first, run=run)
    return words("statement.run", first=first, last=last, run=run)


def _doubts(decision: Decision, marks: Mapping[str, str]) -> Iterator[str]:
    """Yield the doubts about the reports on which the decision rests."""
    for doubt in decision.doubts:
        said = words("statement.doubt", marks, title=doubt.title, text=doubt.text)
        yield f"{said} {words('statement.despite')}" if doubt in decision.overruled else said


def _did(facts: Facts, client: str) -> Iterator[str]:
    counted = len(facts.rounds_of(client, "counted"))
    code = "statement.counted-settled" if facts.settled else "statement.counted"
    if facts.settled and client in own_settlement(facts, client)["named"]:
        code = "statement.counted-named"
    yield words(code, counted=counted, possible=len(facts.happened[client]))
    for status in STATUSES[1:]:
        if rounds := facts.rounds_of(client, status):
            yield words(f"why-you.{status}", rounds=rounds)
    if facts.source.aborted:
        yield words("statement.aborted", rounds=tuple(facts.source.aborted))
    if facts.source.unreported:
        yield words("statement.unreported", rounds=facts.source.unreported)


def _earns(facts: Facts, client: str, marks: Mapping[str, str]) -> Iterator[str]:
    decision, _ = _decided(facts)
    standing, terms = facts.standing.get(client), decision.terms
    budget, nothing = _money(facts, decision.paid.budget), _money(facts, decision.paid.nothing)
    if standing is None:
        code = "statement.never-stated" if facts.settled else "statement.never"
        yield words(code, marks, amount=nothing, budget=budget)
        return
    amount, share = _money(facts, decision.paid[client]), decision.shares[client]
    yield words("statement.paid", marks, amount=amount, budget=budget, share=share, rule=terms.rule)
    gain = worth(facts, facts.total.gain, unit=True)
    score, measure = words(f"score-of-yours.{terms.score}"), spoken(terms.utility)
    if facts.settled and client in own_settlement(facts, client)["named"]:
        score = words("statement.proven")
    total = worth(facts, standing.total, unit=True)
    if left_out := facts.source.unreported:
        yield words(
            "statement.score-reported", score=score, total=total, measure=measure, gain=gain, rounds=left_out
        )
    else:
        yield words("statement.score", score=score, total=total, measure=measure, gain=gain)
    if decision.shares.status != "ok":
        yield words("pay.fallback")
    if part := decision.shares.forfeits.get(client):
        yield words("statement.forfeited", part=part)
    if standing.total < 0 and terms.rule != "equal":
        yield words("statement.below")
    yield from _judged(facts, client)


def _money(facts: Facts, amount: Decimal | int) -> str:
    """Return an amount, or a number of cents, with the currency of the decision."""
    currency = facts.terms.currency
    return money_text(money_of(amount, currency) if isinstance(amount, int) else amount, currency)


def _judged(facts: Facts, client: str) -> Iterator[str]:
    """Yield that a member made the model worse, in one sentence with the measures that say otherwise."""
    if client not in facts.harmful:
        return
    first, (turned, unconfirmed) = spoken(facts.utility), facts.otherwise(client)
    if turned:
        yield words("statement.worse-turned", first=first, measures=spoken_list(turned))
    elif unconfirmed:
        yield words("statement.worse-alone", first=first, measures=spoken_list(unconfirmed))
    else:
        yield words("statement.worse")


def _costs(facts: Facts, client: str) -> Iterator[str]:
    decision, _ = _decided(facts)
    standing, cost = facts.standing.get(client), facts.absence_cost(client)
    if standing is None:
        yield words("statement.cost-never-settled" if facts.settled else "statement.cost-never")
        return
    if cost is None:
        yield words("statement.cost-none-settled" if facts.settled else "statement.cost-none")
        return
    missed = facts.rounds_of(client, *STATUSES[1:])
    zero = decision.terms.missing == "zero"
    if facts.settled:
        told = "statement.missed-zero-settled" if zero else "statement.missed-own-mean-settled"
    else:
        told = "statement.missed-zero" if zero else "statement.missed-own-mean"
    yield words(told, rounds=missed)
    other, own = (worth(facts, value, unit=True) for value in (cost.other, cost.score))
    mean = "statement.other-own-mean-settled" if facts.settled else "statement.other-own-mean"
    counts = mean if zero else "statement.other-zero"
    then = words(counts, score=noun(decision.terms.score), other=other, own=own)
    if cost.other_cents is None:
        yield words("statement.other-none", then=then)
    elif cost.other_cents == cost.cents:
        yield words("statement.other-same", then=then, amount=_money(facts, cost.cents))
    else:
        gap = cost.other_cents - cost.cents
        code = "statement.other-more" if gap > 0 else "statement.other-less"
        yield words(code, then=then, amount=_money(facts, cost.other_cents), gap=_money(facts, abs(gap)))
    yield words("statement.estimate")


def _sure(facts: Facts, client: str) -> Iterator[str]:
    decision, _ = _decided(facts)
    standing = facts.standing.get(client)
    if standing is None:
        yield words("statement.sure-never")
        return
    if standing.rank_interval is None:
        yield words("sure.unknown")
        return
    low, high = standing.rank_interval
    score, total, n = noun(decision.terms.score), sure_worth(facts, standing, unit=True), facts.total.n
    if low == high:
        yield words("statement.rank", score=score, total=total, low=low, n=n)
    else:
        yield words("statement.ranks", score=score, total=total, low=low, high=high, n=n)
    like = facts.alike.get(client)
    if like is not None and not like:
        yield words("statement.alone")
    elif like and facts.source.private:
        yield words("statement.like-others", others=len(like))
    elif like:
        yield words("statement.like", clients=like)
    yield from _share_sure(facts, client)


def _share_sure(facts: Facts, client: str) -> Iterator[str]:
    """Yield how sure a member's share is, and which ties are paid apart."""
    decision, _ = _decided(facts)
    if facts.spans is not None:
        low, high = facts.spans[client]
        ends = [_money(facts, end) for end in amounts_within(facts.spans, decision.paid)[client]]
        yield words("statement.span", low=low, high=high, low_amount=ends[0], high_amount=ends[1])
    less, more = facts.apart_from(client)
    private = facts.source.private
    if less and private:
        yield words("statement.apart-more-others", others=len(less))
    elif less:
        yield words("statement.apart-more", clients=less)
    if more and private:
        yield words("statement.apart-less-others", others=len(more))
    elif more:
        yield words("statement.apart-less", clients=more)


def as_dict(facts: Facts, client: str) -> dict[str, Any]:
    """Return a member's statement as a dictionary for JSON."""
    decision, book = _decided(facts)
    paid = decision.paid
    standing, like, cost = facts.standing.get(client), facts.alike.get(client), facts.absence_cost(client)
    spans = None if facts.spans is None or client not in facts.spans else facts.spans
    ends = None if spans is None else amounts_within(spans, decision.paid)
    return {
        "member": client,
        **facts.source.heading.body(),
        "rehearsal": facts.source.rehearsal,
        "decision": decision.number,
        "replaces": decision.replaces,
        "record": decision.record,
        "head": book.head,
        **({"after": [list(one) for one in decision.after]} if decision.after else {}),
        **vars(decision.terms),
        "departures": {one.term: {"signed": one.signed, "used": one.used} for one in decision.departures},
        "planted": _planted(facts, client),
        "doubts": [str(doubt) for doubt in decision.doubts],
        "rounds": {
            status: list(facts.rounds_of(client, status))
            for status in STATUSES
            if status != "unstated" or facts.settled
        },
        **({"settlement": own_settlement(facts, client)} if facts.settled else {}),
        "aborted": list(facts.source.aborted),
        "unreported": list(facts.source.unreported),
        "cents": paid.cents(paid.by_client.get(client, paid.nothing)),
        "cents_interval": None if ends is None else [paid.cents(end) for end in ends[client]],
        "share": decision.shares.by_client.get(client, 0.0),
        "share_interval": None if spans is None else list(spans[client]),
        "contribution": None if standing is None else standing.total,
        "made_worse": client in facts.harmful,
        "disagreeing": list(filter(None, itertools.chain(*facts.otherwise(client)))),
        "interval": None if standing is None or standing.interval is None else list(standing.interval),
        "ranks": None if standing is None or standing.rank_interval is None else list(standing.rank_interval),
        "cannot_be_told_apart_from": len(like) if like is not None and facts.source.private else like,
        "indistinguishable_but_paid": {
            code: len(others) if facts.source.private else list(others)
            for code, others in zip(("less", "more"), facts.apart_from(client), strict=True)
        },
        "absence": None if cost is None else {"estimate": True, **vars(cost)},
    }
