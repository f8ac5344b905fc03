"""Numbers, names and terms as text: what terminal, page, statements and notebooks share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from fedmerit.identity import SERVER
from fedmerit.ledger.account import Account
from fedmerit.ledger.decisions import FEWEST, Terms
from fedmerit.notes import Note, called, formatted, moment, signed, words
from fedmerit.report.facts import Facts, Standing
from fedmerit.report.panel import Reading
from fedmerit.scoring.amounts import Payouts
from fedmerit.scoring.rewards import PaidApart
from fedmerit.scoring.sampling import SCALED, as_error, scale_of

# ------------------------------------------------------------------------------------------------- numbers


def unit_values(facts: Facts) -> dict[str, str] | None:
    """Return first and last error in the unit of y: name (RMSE or MAE), low, high, scale; None without."""
    if facts.panel is not None:  # nothing was measured on a shared test set
        return None
    ends = facts.measured[0].empty, facts.measured[-1].grand
    first, last = (as_error(facts.utility, value) for value in ends)
    if first is None or last is None or not facts.one_slice:
        return None
    digits = max(0, 2 - math.floor(math.log10(max(first[1], last[1], 1e-12))))
    low, high = (formatted(value, f".{digits}f") for _, value in (first, last))
    scale = formatted(scale_of(facts.utility) or 0.0, "g")
    return {"name": first[0], "low": low, "high": high, "scale": scale}


def total_text(one: Standing) -> str:
    """Return a member's total, with the half width of its interval if it has one."""
    total = signed(one.total, one.digits)
    if one.interval is None:
        return total
    return f"{total} ± {formatted((one.interval[1] - one.interval[0]) / 2, f'.{one.digits}f')}"


def worth(facts: Facts, value: float | None, *, unit: bool = False, sign: str = "+") -> str:
    """Return a contribution for people: in points of a measure from 0 to 1, which ``unit`` names.

    ``sign`` "+" also shows the sign of numbers above zero; an unknown value is a dash.
    """
    if value is None:
        return "-"
    number = formatted(value * facts.unit, f"{sign}.{facts.unit_digits}f")
    return words("number.points", value=number) if unit and facts.unit != 1 else number


def cell_text(facts: Facts, value: float) -> str:
    """Return an entry of a panel's matrix as `worth` does; a false judge may make it as large as it likes."""
    return worth(facts, value) if abs(value * facts.unit) < 1000 else formatted(value * facts.unit, "+.0e")


def sure_worth(facts: Facts, one: Standing, *, unit: bool = False) -> str:
    """Return a member's total as `worth` does, with the half width of its interval if it has one."""
    if one.interval is None:
        return worth(facts, one.total, unit=unit)
    half = formatted((one.interval[1] - one.interval[0]) / 2 * facts.unit, f".{facts.unit_digits}f")
    number = f"{worth(facts, one.total)} ± {half}"
    return words("number.points", value=number) if unit and facts.unit != 1 else number


def level(facts: Facts, value: float) -> str:
    """Return the quality of the shared model, in the unit of contributions."""
    return formatted(value * facts.unit, f".{facts.level_digits}f")


def level_change(facts: Facts, value: float, *, sign: str = "+") -> str:
    """Return a change of the shared model's quality, with its unit."""
    number = formatted(value * facts.unit, f"{sign}.{facts.level_digits}f")
    return words("number.points", value=number) if facts.unit != 1 else number


def money_text(amount: Decimal, currency: str = "") -> str:
    """Return an amount of money, with its currency if that is known."""
    number = formatted(amount, ",")
    if not currency:
        return number
    return words("number.money" if currency.isalpha() else "number.sign", amount=number, currency=currency)


def rank_text(one: Standing) -> str:
    """Return a member's rank, with the possible ranks if there are several."""
    if one.rank_interval is None or one.rank_interval[0] == one.rank_interval[1]:
        return str(one.rank)
    return f"{one.rank} ({one.rank_interval[0]}-{one.rank_interval[1]})"


def share_text(share: float | None, digits: int = 1) -> str:
    """Return a share in percent, or a dash."""
    return "-" if share is None else formatted(share, f".{digits}%")


def span_text(span: tuple[float, float] | None, digits: int = 1) -> str:
    """Return the interval of a share in percent, or a dash.

    >>> span_text((0.1, 0.25))
    '10.0-25.0%'
    """
    if span is None:
        return "-"
    return f"{formatted(100 * span[0], f'.{digits}f')}-{formatted(span[1], f'.{digits}%')}"


def amounts_text(span: tuple[Decimal, Decimal] | None) -> str:
    """Return the interval of an amount, or a dash."""
    return "-" if span is None else f"{money_text(span[0])}-{money_text(span[1])}"


def sure_share_text(one: Standing) -> str:
    """Return a member's share, with its interval if it has one: in whole percent if these hold the share."""
    if one.share is None or one.share_interval is None:
        return share_text(one.share)
    low, high = (round(100 * end) for end in one.share_interval)
    digits = 0 if low <= round(100 * one.share, 1) <= high else 1
    return f"{share_text(one.share)} ({span_text(one.share_interval, digits)})"


def apart_text(apart: PaidApart, divided: Mapping[str, float]) -> str:
    """Return that indistinguishable members are paid visibly apart, with their shares."""
    more, less = apart.more, apart.less
    return words("pay.apart", more=more, less=less, first=divided[more], second=divided[less])


def samples_text(samples: float | None) -> str:
    """Return a number of samples, or a dash."""
    return "-" if samples is None else f"{samples:.0f}"


_BREAKS = re.compile(r"(?<=[0-9]) (?=[%±])|(?<=±) (?=[0-9])|(?<=95)-(?=%)|(?<=95-%)-(?=[A-Za-z])")
"""Where a line must not break: in 95 %, in 0.2 ± 0.1, and in the German 95-%-Intervall."""


def unbroken(text: str) -> str:
    """Return text for HTML in which no line breaks within a number and its sign.

    >>> unbroken("95 % of 0.2 ± 0.1"), unbroken("95-%-Intervall")
    ('95\\xa0% of 0.2\\xa0±\\xa00.1', '95\u2011%\u2011Intervall')
    """
    return _BREAKS.sub(lambda found: "\u2011" if found[0] == "-" else "\u00a0", text)


INSIDE = {"b": "\x01", "/b": "\x02", "code": "\x03", "/code": "\x04"}
"""Marks in text that is still to be escaped: no name contains these characters."""
_MARKS = str.maketrans({"\x01": "**", "\x02": "**", "\x03": "`", "\x04": "`"})


def markdown(text: str) -> str:
    """Return text for Markdown, where it is shown as it is: no HTML, link, heading, emphasis or new cell.

    >>> print(markdown("<b>A|B</b> owes [me](x) *much*"))
    &lt;b&gt;A\\|B&lt;/b&gt; owes \\[me\\](x) \\*much\\*
    >>> print(markdown("# A"), markdown("client_1"), markdown("_A_"), markdown("A & B"))
    \\# A client_1 \\_A\\_ A & B
    """
    told = re.sub(r"&(?=#?\w+;)", "&amp;", text).replace("<", "&lt;").replace(">", "&gt;")
    told = re.sub(r"([\\`*\[\]|~]|(?<!\w)_|_(?!\w))", r"\\\1", told)
    return re.sub(r"^(\s*)([#+=-])", r"\1\\\2", told).translate(_MARKS)


def dashed(numbers: str) -> str:
    """Return numbers for a page, with a dash between the ends of a range.

    >>> dashed("2 (1-5)"), dashed("-1.5")
    ('2 (1\u20135)', '-1.5')
    """
    return re.sub("(?<=[0-9])-(?=[0-9])", "\u2013", numbers)


# --------------------------------------------------------------------------------------------------- names


def spoken(utility: str | None) -> str:
    """Return a utility's name for use in a sentence.

    >>> spoken("expected-accuracy"), spoken("my-own"), spoken(None)
    ('expected accuracy', 'my own', 'utility')
    """
    if utility is None:
        return words("measure.none")
    name = utility.partition(":")[0]
    utility = name if name in SCALED else utility.removeprefix("whole:")
    found = called("measure", utility)
    return utility.replace("-", " ") if found == utility else found


def noun(score: str) -> str:
    """Return the name of a score: contribution for ALPHA."""
    return called("score", score)


def printable(text: str) -> str:
    r"""Return text that is safe on a terminal: characters that move the cursor or break lines are escaped.

    >>> print(printable("north\x1b[2J"))
    north\x1b[2J
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def made_worse(facts: Facts, most: int | None = None) -> str:
    """Return who surely made the model worse, at ``most`` so many names; empty if that is nobody."""
    named, first = facts.harmful[:most], spoken(facts.utility)
    if named and facts.panel is not None:
        clauses = [words("said.harmed", clients=tuple(named))]
        left = len(facts.harmful) - len(named)
        return words("list.clause").join([*clauses, *([words("said.worse-more", left=left)] if left else [])])
    otherwise = {name: facts.otherwise(name) for name in named}
    agreed = tuple(name for name in named if not any(otherwise[name]))
    clauses = [words("said.worse", clients=agreed)] if agreed else []
    for name, (turned, unconfirmed) in otherwise.items():
        if turned:
            clauses.append(words("said.worse-turned", client=name, first=first, measures=spoken_list(turned)))
        elif unconfirmed:
            doubted_by = spoken_list(unconfirmed)
            clauses.append(words("said.worse-alone", client=name, first=first, measures=doubted_by))
    if left := len(facts.harmful) - len(named):
        clauses.append(words("said.worse-more", left=left))
    return words("list.clause").join(clauses)


def spoken_list(utilities: Sequence[str]) -> tuple[str, ...]:
    """Return the names of measures for use in a sentence; an empty one is what members reported."""
    return tuple(dict.fromkeys(spoken(one) if one else words("trust.the-reports") for one in utilities))


def rounds_enough(facts: Facts) -> str:
    """Return whether the order of members has settled over the rounds; empty if that cannot be said."""
    found = facts.convergence
    if found is None:
        return ""
    since, last, sure = found.since, found.numbers[-1], found.sure_since
    if since == found.numbers[0]:
        return words("enough.always")
    if found.settled(since):
        return words("enough.settled", since=since, last=last)
    if sure is None:
        return words("enough.changing", since=since, last=last)
    if not found.settled(sure):
        return words("enough.changing-sure", since=since, last=last)
    if sure == found.numbers[0]:
        return words("enough.alike-always", since=since, last=last)
    return words("enough.alike", since=since, last=last, sure=sure)


# ---------------------------------------------------------------------------------------------- settlement


def lies(account: Account) -> list[str]:
    """Return who was named in the settlement, in which round and for what."""
    sentences = []
    for number, named in account.named.items():
        for name, how in named.items():
            lie = {"where": words("settled.in-round", round=number), "how": words(f"lie.{how}")}
            if name == SERVER:
                sentences.append(words("settled.named-server", **lie))
            else:
                sentences.append(words("settled.named", client=name, **lie))
    return sentences


def settlement_sentences(facts: Facts) -> list[str]:
    """Return what the settlement came to: whether it adds up, who was named, who is missing, who signed."""
    account = facts.account
    if facts.panel is not None:
        sentences = [*_judged(facts, facts.panel), *lies(account)]
    else:
        holding, count = account.holding, len(account.rounds)
        adds_up = "settled.holds" if holding == count else "settled.partly"
        sentences = [words(adds_up, holding=holding, count=count), *lies(account)]
    if account.unexplained:
        sentences.append(words("settled.unnamed"))
    if account.missing:
        unclaimed = worth(facts, account.unclaimed, unit=True)
        if facts.panel is not None:
            sentences.append(words("settled.panel-missing", clients=account.missing))
        else:
            sentences.append(words("settled.missing", clients=account.missing, worth=unclaimed))
        if account.final:
            sentences.append(words("settled.over", clients=account.missing))
        else:
            sentences.append(words("settled.until", until=moment(account.closes)))
    if account.unproved:
        masks = "settled.given-up" if account.final else "settled.silent"
        sentences.append(words(masks, clients=account.unproved))
    signers, needed = len(account.countersigned), account.threshold
    code = "settled.signed" if signers >= needed else "settled.unsigned"
    return [*sentences, words(code, count=signers, needed=needed)]


def _judged(facts: Facts, panel: Reading) -> Iterator[str]:
    """Yield whether columns add up, who did not judge, and what is suspicious."""
    columns = facts.account.columns
    adds_up = "settled.panel-holds" if all(columns.values()) else "settled.panel-partly"
    yield words(adds_up, holding=sum(columns.values()), count=len(columns))
    if silent := tuple(name for name in panel.whole.clients if name not in columns):
        yield words("settled.no-judge", clients=silent)
    yield from suspicions(facts, panel)


def suspicions(facts: Facts, panel: Reading) -> Iterator[str]:
    """Yield whose column is odd or opposed, and whom nobody witnessed."""
    if odd := tuple(one.name for one in panel.judges if one.odd):
        yield words("settled.odd", clients=odd, left_out=bool(panel.left_out))
    if opposed := tuple(one.name for one in panel.judges if one.opposed):
        yield words("settled.opposed", clients=opposed)
    if facts.account.unwitnessed and panel.whole.n >= FEWEST:
        yield words("settled.unwitnessed", clients=facts.account.unwitnessed)


def signed_by(facts: Facts) -> str:
    """Return who signed what the decision rests on; empty if that is unknown."""
    known = {line.code: line.values for line in facts.source.checks}
    masked = facts.source.config is None or facts.source.config.secure_aggregation.enabled
    if "unsigned" in known or not masked:
        return words("money.signed-not")
    if facts.source.rehearsal:
        return words("money.signed-rehearsal")
    if facts.settled:
        account = facts.account
        return words("money.countersigned", count=len(account.countersigned), n=len(facts.source.clients))
    if "heads" in known:
        return words("money.signed", count=known["heads"]["signed"], n=known["heads"]["members"])
    return words("money.signed-none") if "heads-none" in known else ""


# --------------------------------------------------------------------------------------------------- terms


def about(terms: Terms) -> str:
    """Return what the rule of these terms does, and within which bounds.

    >>> about(Terms("1", "accuracy", rule="fair", score="LOO"))
    'Shares are in proportion to the summed LOO; a member below zero earns nothing.'
    """
    rule = words(f"rule.{terms.rule}", score=noun(terms.score))
    if terms.rule == "hands":
        return rule
    if terms.equal and terms.rule in ("fair", "fenced"):
        rule = words("bound.equal", equal=terms.equal, score=noun(terms.score), rule=rule)
    floor, cap = terms.floor > 0, terms.cap < 1
    if not (floor or cap):
        return rule
    if floor and cap:
        bounds = words("bound.both", floor=terms.floor, cap=terms.cap)
    elif floor:
        bounds = words("bound.floor", floor=terms.floor)
    else:
        bounds = words("bound.cap", cap=terms.cap)
    if terms.rule == "equal":
        return f"{rule} {bounds}"
    return f"{rule} {bounds} {words('bound.unpaid' if terms.rule == 'impartial' else 'bound.spread')}"


# ------------------------------------------------------------------------------- for terminal and workbooks


def findings(facts: Facts) -> Iterator[str]:
    """Yield what the table shows: of which rounds, and how sure it is."""
    total, utility = facts.total, facts.utility
    gain, summed = (signed(value, facts.digits) for value in (total.gain, float(total.raw.sum())))
    if facts.panel is not None:
        judges = len(facts.account.columns)
        yield words("terminal.caption-panel", rounds=total.rounds, utility=utility, judges=judges)
    elif utility:
        yield words(
            "terminal.caption-utility",
            score=total.score, rounds=total.rounds, utility=utility, gain=gain, summed=summed,
        )  # fmt: skip
        if unit := unit_values(facts):
            yield words("terminal.caption-unit", name=unit["name"], low=unit["low"], high=unit["high"])
    else:
        yield words("terminal.caption", score=total.score, rounds=total.rounds, gain=gain, summed=summed)
    if facts.settled and facts.source.rounds:
        yield words("terminal.beside")
    if facts.settled:
        yield from settlement_sentences(facts)
    if groups := tuple(words("list.comma").join(group) for group in facts.groups if len(group) > 1):
        yield words("terminal.alike", groups=groups)
    if total.stderr is None:
        yield words("terminal.unsure")
    else:
        yield words("terminal.sure" if facts.panel is None else "terminal.sure-panel")
        if total.covariance is None and total.n > 1 and facts.panel is None:
            yield words("terminal.bound")
    if enough := rounds_enough(facts):
        yield enough
    if total.score in ("ALPHA", "PHI", "PANEL") and not facts.withheld and (worse := made_worse(facts)):
        yield worse
    for name in () if facts.withheld else facts.suspects:
        yield words("terminal.suspect", client=name)
    if facts.panel is not None and facts.panel.helped_nobody:
        yield words("helped.nobody", clients=facts.panel.helped_nobody)


def budget_text(paid: Payouts, rule: str) -> str:
    """Return what was divided, by which rule, and what is left."""
    budget = f"{formatted(paid.budget, ',')} {paid.currency or ''}".rstrip()
    return words("terminal.paid", budget=budget, rule=rule, unpaid=paid.unpaid)


# --------------------------------------------------------------------------------------------------- notes


def on_page(text: str) -> str:
    """Return a note of the library in the words of the page; text without a code is unchanged.

    >>> print(on_page(Note("no-shares", why=Note("nothing-positive", score="ALPHA", positive=0.0))))
    nobody's contribution is above zero, so there is nothing to divide by
    """
    if not isinstance(text, Note):
        return text
    if nothing := text.part("nothing-positive"):  # no option helps then, so none is named
        return words("pay.nothing-positive", score=noun(nothing.values["score"]))
    return text.named()
