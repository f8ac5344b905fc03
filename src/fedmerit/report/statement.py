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
from typing import Any, Literal, get_args

from fedmerit.config import VERSION
from fedmerit.files.documents import html_table
from fedmerit.ledger.decisions import Decision, departs
from fedmerit.ledger.run import Run
from fedmerit.notes import day, formatted, speaking, words
from fedmerit.report.facts import Facts, Happened
from fedmerit.report.page.html import refreshed
from fedmerit.report.payment import Proposal, absence_cost
from fedmerit.report.source import source_as_decided
from fedmerit.report.text import (
    INSIDE,
    about,
    cell_text,
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
from fedmerit.scoring.amounts import money_of
from fedmerit.scoring.rewards import amounts_within
from fedmerit.settings import Heading, planted
from fedmerit.storage.checks import renew
from fedmerit.storage.recorder import record_decision
from fedmerit.storage.run_folder import write

STATUSES: tuple[Happened, ...] = get_args(Happened)[:-1]
"""What can happen in a round of a ledger: all that is known."""


def facts_as_decided(run: Run, decision: Decision) -> Facts:
    """Return the facts of a recorded decision."""
    return Facts(source_as_decided(run, decision), score=decision.terms.score)


def write_statements(run: Run) -> int:
    """Write ``statements/NAME.md``, ``.html`` and ``.json`` of the last decision; return how many members."""
    target = run.path.parent / "statements"
    target.mkdir(exist_ok=True)
    facts = facts_as_decided(run, run.decisions[-1])
    for name in facts.source.clients:
        write(target / f"{name}.md", as_markdown(facts, name).encode())
        write(target / f"{name}.html", as_html(facts, name).encode())
        write(target / f"{name}.json", (json.dumps(as_dict(facts, name), indent=1) + "\n").encode())
    return len(facts.source.clients)


def record(run: Run, proposal: Proposal, heading: Heading, language: str | None) -> str:
    """Record a decision, write everybody's statement, refresh the page; return what was done, in words."""
    folder = run.path.parent
    renewed = renew(folder, run)
    terms = replace(proposal.terms, budget=str(proposal.paid.budget))
    paid, new = record_decision(run, terms, replace(heading, currency=terms.currency))
    decision = paid.decisions[-1]
    with speaking(language or "en"):
        count = write_statements(paid)
    recorded = f"decision {decision.number}, record {decision.record} of the ledger"
    if not new:
        recorded += ", is unchanged"
    elif decision.replaces:
        recorded = f"recorded as {recorded}, in place of decision {decision.replaces}"
    else:
        recorded = f"recorded as {recorded}"
    written = f"{recorded}; {count} statements in {folder / 'statements'}"
    return "\n".join(filter(None, [renewed, written, refreshed(paid, language), f"head: {paid.head}"]))


Row = tuple[str, ...]
Block = tuple[Literal["h1", "h2", "p", "lead", "ul", "pre", "table", "fields"], str | Row | tuple[Row, ...]]
"""A part of a statement: heading, paragraph, list, heads of ledgers, table (heading first), named values."""
BLANK = "…" * 20
"""What is filled in by hand."""
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
        elif kind == "fields":
            parts.append("\n".join(f"- {markdown(one[0])}: {markdown(one[1])}" for one in content))
        else:
            parts.append("\n".join(f"    {line}" for line in content))
    return "\n\n".join(parts) + "\n"


def as_html(facts: Facts, client: str) -> str:
    """Return a member's statement as one HTML file that prints on a page or two, and loads nothing."""
    body = []
    for kind, content in _blocks(facts, client):
        if kind == "table":
            body.append(_table([tuple(row) for row in content]))
        elif kind == "ul":
            body.append("<ul>" + "".join(f"<li>{_marked(str(line))}</li>" for line in content) + "</ul>")
        elif kind == "fields":
            lines = (f"<div><dt>{_marked(one[0])}:</dt> <dd>{_marked(one[1])}</dd></div>" for one in content)
            body.append(f"<dl>{''.join(lines)}</dl>")
        elif kind == "pre":
            body.append("".join(f"<pre>{escape(str(line))}</pre>" for line in content))
        else:
            opened = 'p class="lead"' if kind == "lead" else kind
            body.append(f"<{opened}>{_marked(str(content))}</{opened.split()[0]}>")
    title = words("statement.title", client=client)
    if named := facts.source.heading.title:
        title = words("title.document", named=(named,), title=title)
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="{words("page.language")}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="fedmerit {VERSION}">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


_TAGS = str.maketrans({"\x01": "<strong>", "\x02": "</strong>", "\x03": "<code>", "\x04": "</code>"})
_STYLE = Path(__file__).with_name("statement.css")


def _table(rows: Sequence[Row]) -> str:
    """Return a table as HTML; on a narrow screen it scrolls."""
    label = escape(words("statement.adds-up"))
    table = html_table(rows[0], rows[1:])
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">{table}</div>'


def _marked(text: str) -> str:
    return escape(unbroken(text)).translate(_TAGS)


def _blocks(facts: Facts, client: str) -> Iterator[Block]:
    """Yield a member's statement, part by part: first what it earns."""
    decision, run = _decision(facts)
    yield "h1", words("statement.title", client=client)
    if departed := departs(decision.departures):
        yield "lead", words("statement.departs", INSIDE, text=departed)
    yield "p", words("list.clause").join(_identity(facts))
    yield "fields", tuple(_addressed(facts, client))
    if faults := _planted(facts, client):
        yield "p", faults
    yield "lead", next(earns := _earns(facts, client))
    yield "p", " ".join(_opening(facts))
    for doubt in decision.doubts:
        text = words("statement.doubt", INSIDE, title=doubt.title, text=doubt.text)
        yield "p", f"{text} {words('statement.despite')}" if doubt in decision.overruled else text
    yield "h2", words("statement.earn")
    if more := " ".join(earns):
        yield "p", more
    yield "p", about(decision.terms)
    yield "h2", words("statement.sure")
    yield "p", " ".join(_sure(facts, client))
    yield "h2", words("statement.did")
    yield "ul", tuple(_did(facts, client))
    yield "h2", words("statement.cost", settled=facts.settled)
    yield "p", " ".join(_costs(facts, client))
    if facts.panel is not None:
        yield "h2", words("helped.title")
        yield "table", tuple(_helped(facts, client))
        yield "p", words("statement.helped", points=facts.unit != 1)
        yield "h2", words("statement.adds-up")
        yield "p", " ".join(settlement_sentences(facts))
    elif facts.settled:
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
    yield "pre", (run.head,)
    yield "p", " ".join(filter(None, (signed_by(facts), words("statement.keep", INSIDE))))
    yield "h2", words("statement.received")
    amount = _money(facts, decision.paid.by_client.get(client, decision.paid.nothing))
    yield "p", words("statement.receipt", INSIDE, client=client, number=decision.number, amount=amount)
    yield "fields", ((words("statement.place"), BLANK), (words("statement.signature"), BLANK))


def _decision(facts: Facts) -> tuple[Decision, Run]:
    """Return the decision that the facts are of, and its run."""
    assert facts.decision is not None
    assert facts.source.run is not None
    return facts.decision, facts.source.run


def _identity(facts: Facts) -> Iterator[str]:
    """Yield what the statement is about: title, date, run, and whether it is a rehearsal."""
    heading, run = facts.source.heading, _decision(facts)[1]
    if heading.title:
        yield heading.title
    if heading.date:
        yield day(heading.date)
    yield words("page.run", run=run.id)
    if run.rehearsal:
        yield words("page.rehearsal")


def _addressed(facts: Facts, client: str) -> Iterator[Row]:
    """Yield to whom the statement goes, whom to ask, and until when to object."""
    heading = facts.source.heading
    yield words("statement.to"), client
    yield words("statement.contact"), heading.contact or BLANK
    if heading.objections:
        yield words("statement.objections"), words("statement.until", date=day(heading.objections))
    else:
        yield words("statement.objections"), words("statement.by-contract")


def own_settlement(facts: Facts, client: str) -> dict[str, Any]:
    """Return what a member stated in the settlement, and what everybody may know of the others."""
    account, rounds = facts.account, []
    for line in account.rounds:
        if client in line.participants:
            place = line.participants.index(client)
            stated, counted = line.stated[place], line.counted[place]
            rounds.append({
                "round": line.round,
                "stated": None if stated is None else str(stated),
                "counted": None if counted is None else str(counted),
                "utility": None if counted is None else counted * account.scale,
                "sum": None if line.sum is None else str(line.sum),
                "product": str(line.product),
                "holds": line.holds,
            })  # fmt: skip
    return {
        "rounds": rounds,
        "named": list(account.liars),
        "missing": list(account.missing),
        "countersigned": len(account.countersigned),
    }


def own_panel(facts: Facts, client: str) -> dict[str, Any]:
    """Return what a member did for each other member's data, and what each did for its own; never more."""
    panel, account = facts.panel, facts.account
    assert panel is not None
    names, columns = panel.whole.clients, account.columns
    row = panel.whole.matrix[names.index(client)] if client in names else ()
    column = panel.whole.matrix[:, names.index(client)] if client in columns else ()
    did, got = (dict(zip(names, map(float, part), strict=False)) for part in (row, column))
    others = [name for name in names if name != client]
    return {
        "did": {name: did.get(name) if name in columns else None for name in others},
        "received": {name: got.get(name) for name in others},
        "adds_up": columns.get(client),
        "named": list(account.liars),
        "missing": list(account.missing),
        "countersigned": len(account.countersigned),
    }


def _helped(facts: Facts, client: str) -> Iterator[Row]:
    """Yield the heading and the lines of the table: what a member did for each other one, and each for it."""
    own = own_panel(facts, client)
    yield words("column.member"), words("statement.col-did"), words("statement.col-got")
    for name, did in own["did"].items():
        got = own["received"][name]
        yield name, *("-" if value is None else cell_text(facts, value) for value in (did, got))


def _equations(facts: Facts, lines: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield the heading and the lines of the table of a member's equations; of many rounds, their sums."""
    columns = ("statement.col-stated", "statement.col-worth", "statement.col-sum", "statement.col-product")
    yield tuple(map(words, ("column.round", *columns)))

    def row(where: str, line: Mapping[str, Any]) -> Row:
        numbers = (line[key] for key in ("stated", "sum", "product"))
        stated, *others = ("-" if number is None else formatted(int(number), ",") for number in numbers)
        return where, stated, worth(facts, line["utility"], unit=True), *others

    if len(lines) <= MOST_LINES:
        yield from (row(words("settled.round", round=line["round"]), line) for line in lines)
        return
    whole: dict[str, Any] = {}
    for key in ("stated", "sum", "product", "utility"):
        each = [line[key] for line in lines]
        whole[key] = None if None in each else sum(each if key == "utility" else map(int, each))
    yield row(words("settled.all-rounds"), whole)


def _odd_lines(facts: Facts, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is to be said of the equations that do not hold, or in which another number counts."""
    for line in lines:
        where = words("settled.round", round=line["round"])
        if line["stated"] is None:
            yield words("statement.settled-missing", where=where)
            continue
        if line["sum"] is None:
            yield words("statement.settled-open", where=where)
        elif not line["holds"]:
            yield words("statement.settled-fails", where=where)
        if (counted := int(line["counted"])) != int(line["stated"]):
            value = worth(facts, line["utility"], unit=True)
            yield words("statement.settled-counted", where=where, counted=counted, worth=value)


def _planted(facts: Facts, client: str) -> str:
    """Return which faults the settings planted; others are named only if members see everybody's numbers."""
    return planted(facts.source.corruption, client if facts.source.private else None)


def _opening(facts: Facts) -> Iterator[str]:
    decision, _ = _decision(facts)
    numbers = {"number": decision.number, "rounds": decision.rounds, "members": len(facts.source.clients)}
    if decision.rounds < (planned := facts.source.planned or 0):
        yield words("statement.decision-partly", planned=planned, **numbers)
    else:
        yield words("statement.decision", **numbers)
    if decision.replaces:
        yield words("statement.replaces", replaces=decision.replaces)


def _did(facts: Facts, client: str) -> Iterator[str]:
    counted, possible = len(facts.rounds_of(client, "counted")), len(facts.happened[client])
    if client in facts.liars:
        yield words("statement.counted-named", counted=counted, possible=possible)
    else:
        yield words("statement.counted", counted=counted, possible=possible, settled=facts.settled)
    for status in STATUSES[1:]:
        if rounds := facts.rounds_of(client, status):
            yield words(f"why-you.{status}", rounds=rounds)
    if facts.source.aborted:
        yield words("statement.aborted", rounds=tuple(facts.source.aborted))
    if facts.source.unreported:
        yield words("statement.unreported", rounds=facts.source.unreported)


def _earns(facts: Facts, client: str) -> Iterator[str]:
    (decision, _), standing = _decision(facts), facts.standing.get(client)
    paid, terms, divided = decision.paid, decision.terms, decision.shares
    budget = _money(facts, paid.budget)
    if standing is None:
        nothing = _money(facts, paid.nothing)
        yield words("statement.never", INSIDE, amount=nothing, budget=budget, settled=facts.settled)
        return
    amount, share = _money(facts, paid[client]), divided[client]
    yield words("statement.paid", INSIDE, amount=amount, budget=budget, share=share, rule=terms.rule)
    proven = client in facts.liars
    values = {
        "score": words("statement.proven") if proven else words(f"score-of-yours.{terms.score}"),
        "total": worth(facts, standing.total, unit=True),
        "measure": spoken(terms.utility),
        "gain": worth(facts, facts.total.gain, unit=True),
    }
    if facts.panel is not None:
        gave = worth(facts, facts.panel.gave[client], unit=True)
        yield words("statement.gave", gave=gave, total=values["total"])
    elif left_out := facts.source.unreported:
        yield words("statement.score-reported", rounds=left_out, **values)
    else:
        yield words("statement.score", **values)
    if facts.panel is not None and client in facts.account.unwitnessed:
        yield words("statement.unwitnessed")
    elif part := divided.forfeits.get(client):
        yield words("statement.forfeited", part=part)
    if standing.total < 0 and terms.rule not in ("equal", "hands"):
        yield words("statement.below")
    if client in facts.harmful:
        first, (turned, unconfirmed) = spoken(facts.utility), facts.otherwise(client)
        if facts.panel is not None:
            yield words("statement.harmed")
        elif turned:
            yield words("statement.worse-turned", first=first, measures=spoken_list(turned))
        elif unconfirmed:
            yield words("statement.worse-alone", first=first, measures=spoken_list(unconfirmed))
        else:
            yield words("statement.worse")


def _money(facts: Facts, amount: Decimal | int) -> str:
    """Return an amount, or a number of cents, with the currency of the decision."""
    currency = facts.terms.currency
    return money_text(money_of(amount, currency) if isinstance(amount, int) else amount, currency)


def _costs(facts: Facts, client: str) -> Iterator[str]:
    standing, cost = facts.standing.get(client), absence_cost(facts, client)
    if standing is None:
        yield words("statement.cost-never", settled=facts.settled)
        return
    if facts.panel is not None and (rounds := facts.rounds_of(client, *STATUSES[1:])):
        yield words("statement.missed-panel", rounds=rounds)
        return
    if cost is None:
        yield words("statement.cost-none", settled=facts.settled)
        return
    missed, settled = facts.rounds_of(client, *STATUSES[1:]), facts.settled
    other, own = (worth(facts, value, unit=True) for value in (cost.other, cost.score))
    values = {"score": noun(facts.terms.score), "other": other, "own": own}
    if facts.terms.missing == "zero":
        yield words("statement.missed-zero", rounds=missed, settled=settled)
        then = words("statement.other-own-mean", settled=settled, **values)
    else:
        yield words("statement.missed-own-mean", rounds=missed, settled=settled)
        then = words("statement.other-zero", **values)
    if cost.other_cents is None:
        yield words("statement.other-none", then=then)
    elif cost.other_cents == cost.cents:
        yield words("statement.other-same", then=then, amount=_money(facts, cost.cents))
    else:
        gap = cost.other_cents - cost.cents
        amounts = {"amount": _money(facts, cost.other_cents), "gap": _money(facts, abs(gap))}
        yield words("statement.other-more", then=then, **amounts, more=gap > 0)
    yield words("statement.estimate")


def _sure(facts: Facts, client: str) -> Iterator[str]:
    """Yield how sure a member's score, rank and share are, and which ties are paid apart."""
    (decision, _), standing = _decision(facts), facts.standing.get(client)
    if standing is None:
        yield words("statement.sure-never")
        return
    if standing.rank_interval is None:
        yield words("sure.unknown")
        return
    low, high = standing.rank_interval
    score, total = noun(decision.terms.score), sure_worth(facts, standing, unit=True)
    values = {"score": score, "total": total, "low": low, "n": facts.total.n}
    if facts.panel is not None:
        code = "statement.rank-panel" if low == high else "statement.ranks-panel"
        yield words(code, **values, **({} if low == high else {"high": high}))
    elif low == high:
        yield words("statement.rank", **values)
    else:
        yield words("statement.ranks", high=high, **values)
    like = facts.alike.get(client)
    if like is not None and not like:
        yield words("statement.alone")
    if like:
        yield _who(facts, like, "statement.like", "statement.like-others")
    if facts.spans is not None and any(facts.spans[client]):
        low_share, high_share = facts.spans[client]
        least, most = (_money(facts, end) for end in amounts_within(facts.spans, decision.paid)[client])
        ends = {"low": low_share, "high": high_share, "low_amount": least, "high_amount": most}
        code = "statement.span" if facts.panel is None else "statement.span-panel"
        yield words(code, **ends)
    for more, others in zip((True, False), facts.apart_from(client), strict=True):
        if others:
            yield _who(facts, others, "statement.apart", "statement.apart-others", more=more)


def _who(facts: Facts, clients: tuple[str, ...], named: str, counted: str, **values: Any) -> str:
    """Return words that name other members, or count them where members see only their own numbers."""
    if facts.source.private:
        return words(counted, others=len(clients), **values)
    return words(named, clients=clients, **values)


def as_dict(facts: Facts, client: str) -> dict[str, Any]:
    """Return a member's statement as a dictionary for JSON."""
    decision, run = _decision(facts)
    paid, private = decision.paid, facts.source.private
    standing, like, cost = facts.standing.get(client), facts.alike.get(client), absence_cost(facts, client)
    spans = facts.spans or {}
    ends = amounts_within(spans, paid)
    return {
        "member": client,
        **facts.source.heading.body(),
        "run": run.id,
        "rehearsal": run.rehearsal,
        "decision": decision.number,
        "replaces": decision.replaces,
        "record": decision.record,
        "head": run.head,
        **vars(decision.terms),
        "departures": {one.term: {"signed": one.signed, "used": one.used} for one in decision.departures},
        "planted": _planted(facts, client),
        "doubts": [str(doubt) for doubt in decision.doubts],
        "rounds": {
            status: list(facts.rounds_of(client, status))
            for status in STATUSES
            if status != "unstated" or facts.settled
        },
        **(
            {"panel": own_panel(facts, client)}
            if facts.panel is not None
            else {"settlement": own_settlement(facts, client)}
            if facts.settled
            else {}
        ),
        "aborted": list(facts.source.aborted),
        "unreported": list(facts.source.unreported),
        "cents": paid.cents(paid.by_client.get(client, paid.nothing)),
        "cents_interval": [paid.cents(end) for end in ends[client]] if client in ends else None,
        "share": decision.shares.by_client.get(client, 0.0),
        "share_interval": list(spans[client]) if client in spans else None,
        "contribution": None if standing is None else standing.total,
        "made_worse": client in facts.harmful,
        "disagreeing": list(filter(None, itertools.chain(*facts.otherwise(client)))),
        "interval": None if standing is None or standing.interval is None else list(standing.interval),
        "ranks": None if standing is None or standing.rank_interval is None else list(standing.rank_interval),
        "cannot_be_told_apart_from": len(like) if like is not None and private else like,
        "indistinguishable_but_paid": {
            code: len(others) if private else list(others)
            for code, others in zip(("less", "more"), facts.apart_from(client), strict=True)
        },
        "absence": None if cost is None else {"estimate": True, **vars(cost)},
    }
