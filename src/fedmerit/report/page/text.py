"""The sentences of the page. They state findings, name members, and claim no more than the facts allow."""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

from fedmerit.identity import SERVER
from fedmerit.ledger.account import SettledRound
from fedmerit.ledger.decisions import Decision
from fedmerit.ledger.rounds import in_words
from fedmerit.notes import called, capital, code_of, digits_for, formatted, quoted, sentence, signed, words
from fedmerit.report.facts import Facts, RoundFacts, Standing
from fedmerit.report.page import charts
from fedmerit.report.panel import JudgeFacts
from fedmerit.report.text import (
    about,
    apart_text,
    cell_text,
    level,
    level_change,
    lies,
    made_worse,
    money_text,
    noun,
    on_page,
    signed_by,
    spoken,
    sure_worth,
    suspicions,
    unit_values,
    worth,
)
from fedmerit.scoring.accumulate import join_up, number_of
from fedmerit.scoring.doubts import balance
from fedmerit.scoring.rewards import null_share
from fedmerit.scoring.sampling import is_whole
from fedmerit.scoring.scores import NORMALISED
from fedmerit.scoring.uncertainty import rank_intervals

# --------------------------------------------------------------------------------- 1: who contributed what

MOST_GROUPS = 4
"""The most groups of indistinguishable members whose names are listed."""
_GAPS = ("gap", "jump")
"""Codes of notes about rounds that do not start where the one before ended."""


def title(facts: Facts) -> str:
    """Return the title: what to do about a doubt that withholds the rest, or who is paid, or contributed.

    Proven liars come first.
    """
    for doubt in facts.doubts:
        if doubt.withholds:
            return words("title.do-not-pay" if doubt.gross else "title.look", why=doubt.short)
    said = headline(facts) if facts.decision is None else _who_is_paid(facts, facts.decision)
    if not facts.liars:
        return said
    clients = tuple(words("signed.server") if name == SERVER else name for name in facts.liars)
    proven = words("headline.proven", finding=said, clients=clients)
    return capital(proven) if facts.liars[0] == SERVER else proven  # names stay as they are


def document_title(facts: Facts) -> str:
    """Return the title of the document: which run it is about, then the headline."""
    named = tuple(filter(None, (facts.source.heading.title, facts.source.run_name)))
    return words("title.document", named=named, title=title(facts)) if named else title(facts)


def headline(facts: Facts) -> str:
    """Return in one sentence who contributed what."""
    if facts.total.stderr is None:
        return words("headline.unsure", finding=_without_errors(facts))
    finding, worse = _finding(facts), made_worse(facts, 3)
    return words("headline.and-worse", finding=finding, worse=worse) if worse else finding


def _finding(facts: Facts) -> str:
    """Return who contributed most, as far as that is sure."""
    leaders, left_out = _leading(facts, facts.leaders)
    n = facts.total.n - len(left_out)
    helpful = [one.client for one in facts.standings if one.surely > 0 and one.client not in left_out]
    if not helpful:
        return words("headline.none-surely" if facts.panel is None else "headline.none-helped")
    if len(leaders) == 1:
        return words("headline.most", client=leaders[0])
    if not set(leaders) <= set(helpful):  # not all of these surely improved the model
        if len(leaders) == n:
            return words("headline.alike", who=_some(n, facts, left_out))
        return words("headline.first-unsure", client=leaders[0], others=len(leaders) - 1)
    if len(leaders) <= 3 and len(leaders) < n:
        return words("headline.most-alike", clients=tuple(leaders))
    everybody_helpful = len(leaders) in (n, len(helpful))
    code = "headline.contributed-alike" if everybody_helpful else "headline.some-most-alike"
    return words(code, who=_some(len(leaders), facts, left_out))


def _leading(facts: Facts, leaders: Sequence[str]) -> tuple[Sequence[str], tuple[str, ...]]:
    """Leave proven liars out of several leaders; return the others, and who is not counted among members.

    If at most one other leads, they stay: it may not be said to lead alone.
    """
    others = [name for name in leaders if name not in facts.liars]
    if len(others) < 2:
        return leaders, ()
    return others, tuple(name for name in facts.liars if name in facts.standing)


def _without_errors(facts: Facts) -> str:
    """Return the headline without standard errors; it names no winner if there is none."""
    first = tuple(standing.client for standing in facts.standings if standing.rank == 1)
    leaders, left_out = _leading(facts, first)
    if facts.standings[0].total <= 0:
        return words("headline.none-improved" if facts.panel is None else "headline.none-helped")
    if len(leaders) == 1:
        return words("headline.most", client=leaders[0])
    counted = _some(len(leaders), facts, left_out)
    if len(leaders) == len(facts.standings) - len(left_out):
        return words("headline.same", who=counted)
    who = counted if len(leaders) > 3 else words("list.clients", clients=tuple(leaders))
    return words("headline.most-same", who=who)


def _some(number: int, facts: Facts, left_out: Sequence[str] = ()) -> str:
    """Return a count of the members who could be measured; members without a report are not judged."""
    n = facts.total.n - len(left_out)
    if left_out:
        return _of(number, n + len({*facts.unscored} - {*facts.liars}), _OTHERS)
    return _of(number, n, _MEASURED if facts.unscored else _EVERYBODY, settled=facts.settled)


_EVERYBODY = ("headline.some", "headline.both", "headline.all")
_OTHERS = ("headline.some-others", "headline.both-others", "headline.all-others")
_MEASURED = ("headline.some-reported", "headline.both-reported", "headline.all-reported")


def _of(number: int, n: int, codes: Sequence[str] = _EVERYBODY, **values: Any) -> str:
    """Return a count of members; ``codes`` are the words for some, both and all of them."""
    some, both, every = codes
    return words(some if number < n else both if n == 2 else every, number=number, n=n, **values)


ABOUT_EQUAL = 1.25
"""Amounts are about equal if the largest is at most this many times the smallest."""


def _who_is_paid(facts: Facts, decision: Decision) -> str:
    """Return in one sentence who gets what; among indistinguishable members nobody is called first."""
    amounts = sorted(decision.paid.items(), key=lambda item: (-item[1], item[0]))
    n, most = len(amounts) + len(facts.unscored), amounts[0][1]
    nothing = (*(name for name, amount in amounts if not amount), *facts.unscored)
    if not most:
        return words("money.nobody", budget=_amount(facts, decision.paid.budget))
    said = _division(facts, decision, [item for item in amounts if item[1]], n)
    if not nothing:
        return said
    if len(nothing) > 3:
        return words("money.and-some-nothing", said=said, number=len(nothing))
    return words("money.and-nothing", said=said, clients=nothing)


def _division(facts: Facts, decision: Decision, paid: Sequence[tuple[str, Decimal]], n: int) -> str:
    """Return how those share who are paid anything, best paid first."""
    most, least = (_amount(facts, amount) for _, amount in (paid[0], paid[-1]))
    best = tuple(name for name, amount in paid if amount == paid[0][1])
    if len(best) == len(paid) > 1:
        return words("money.same", who=_of(len(paid), n), amount=most)
    if len(paid) > 1 and paid[0][1] <= ABOUT_EQUAL * float(paid[-1][1]):
        return words("money.about-equal", who=_of(len(paid), n), low=least, high=most)
    total, leaders = facts.paid_total, list[str]()
    if total.stderr is not None:
        ranked = dict(zip(total.clients, rank_intervals(total)[:, 0], strict=True))
        leaders = [name for name in total.ranking() if ranked[name] == 1 and decision.paid[name]]
    if len(leaders) > 1 and set(best) <= set(leaders):
        ends = {"low": _amount(facts, min(decision.paid[name] for name in leaders)), "high": most}
        who = words("list.clients", clients=tuple(leaders)) if len(leaders) <= 3 else _of(len(leaders), n)
        return words("money.most-alike", who=who, **ends)
    if len(best) > 1:
        who = words("list.clients", clients=best) if len(best) <= 3 else _of(len(best), n)
        return words("money.most-shared", who=who, amount=most)
    return words("money.most", client=best[0], amount=most, budget=_amount(facts, decision.paid.budget))


def _amount(facts: Facts, amount: Decimal) -> str:
    return money_text(amount, facts.source.heading.currency)


def opening(facts: Facts) -> list[str]:
    """Return the few sentences below the title: about money once there is a decision."""
    if facts.decision is None:
        return lede(facts)
    rule = words(f"rule-in-short.{facts.terms.rule}", score=noun(facts.terms.score))
    sentences = [decision(facts)[0], rule, *unscored_rounds(facts)]
    if facts.panel is not None:
        sentences.append(words("helped.no-test-set"))
    if facts.spans is None:
        sentences.append(words("money.unsure"))
    elif apart := facts.decided_apart:
        sentences.append(apart_text(apart, facts.decision.shares))
    if not facts.withheld and (worse := made_worse(facts, 3)):
        sentences.append(words("money.worse", worse=worse))
    unsigned = facts.source.run is None or not facts.source.run.signed
    return [text for text in (*sentences, *_silent(facts), signed_by(facts) if unsigned else "") if text]


def lede(facts: Facts) -> list[str]:
    """Return the finding in a few sentences with numbers."""
    if facts.panel is None:
        sentences = [_change(facts), *unscored_rounds(facts)]
    else:
        rounds, judges = facts.total.rounds, len(facts.account.columns)
        sentences = [words("helped.question", rounds=rounds, judges=judges), *unscored_rounds(facts)]
    if not facts.withheld:
        sentences += _places(facts)
    sentences += _silent(facts)
    turned = {client: spoken(one.utility) for one in facts.companions for client in one.turned}
    if turned and not facts.withheld:
        measures = tuple(dict.fromkeys(turned.values()))
        sentences.append(words("lede.disagree", clients=tuple(turned), measures=measures))
    return sentences


def _silent(facts: Facts) -> Iterator[str]:
    """Yield who has no score because it never reported, or never stated."""
    if facts.unscored:
        code = "lede.never-stated" if facts.settled else "lede.never-reported"
        yield words(code, clients=facts.unscored)


def _places(facts: Facts) -> Iterator[str]:
    """Yield who is first, and who is last."""
    standings, best, worst = facts.standings, facts.standings[0], facts.standings[-1]
    first = [standing for standing in standings if standing.rank == best.rank]
    if len(first) == len(standings) > 1:
        total = sure_worth(facts, best, unit=True)
        yield words("lede.all-same", who=_some(facts.total.n, facts), total=total)
        return
    yield _place(facts, first, ("lede.first", "lede.first-may", "lede.first-shared"))
    if worst.client in facts.suspects:
        yield words("lede.suspect", client=worst.client, total=sure_worth(facts, worst, unit=True))
    elif worst is not best:
        last = [standing for standing in standings if standing.rank == worst.rank]
        yield _place(facts, last, ("lede.last", "lede.last-may", "lede.last-shared"))


def _place(facts: Facts, equals: Sequence[Standing], codes: tuple[str, str, str]) -> str:
    """Return who has a place: surely, possibly, or together with others."""
    surely, possibly, shared = codes
    one, total = equals[0], sure_worth(facts, equals[0], unit=True)
    if len(equals) > 1:
        return words(shared, clients=tuple(standing.client for standing in equals), total=total)
    low, high = one.rank_interval or (one.rank, one.rank)
    if low == high:
        return words(surely, client=one.client, total=total)
    return words(possibly, client=one.client, total=total, low=low, high=high, n=facts.total.n)


def _change(facts: Facts) -> str:
    """Return how the shared model changed, in numbers that are rounded consistently."""
    gain, span = facts.total.gain, _span(facts)
    measure = spoken(facts.utility) if defined(facts) else facts.utility
    low, high = facts.measured[0].empty, facts.measured[-1].grand
    ends = {"low": level(facts, low), "high": level(facts, high)} if facts.one_slice else {}
    if ends and abs((high - low) - gain) > 1e-6 * max(abs(low), abs(high), abs(gain)):
        code = "lede.partly" if gaps_known(facts) else "lede.apart"
        moved = level_change(facts, gain)
        return words(code, span=span, measure=measure, low=ends["low"], high=ends["high"], gain=moved)
    way = "rose" if gain > 0 else "fell" if gain < 0 else "same"
    change = {} if way == "same" else {"change": level_change(facts, abs(gain), sign="")}
    text = words(f"change.{way}{'-between' if ends else ''}", span=span, measure=measure, **change, **ends)
    return f"{text} {words('lede.in-unit', **unit)}" if (unit := unit_values(facts)) else text


def _span(facts: Facts) -> str:
    """Return which rounds the change covers."""
    last = facts.measured[-1].round
    if facts.unfinished:
        closed, planned = facts.unfinished
        return words("lede.after", closed=closed, planned=planned)
    if facts.source.unreported and facts.one_slice and last is not None:
        return words("lede.by-round", round=last)
    return words("lede.over", n=facts.total.rounds, partly=bool(facts.source.unreported))


def gaps_known(facts: Facts) -> bool:
    """Return whether there are gaps between rounds, all explained by rounds known to have no report."""
    without = set(facts.source.unreported)
    for place, (earlier, later) in enumerate(pairwise(facts.measured), start=1):
        between = range(number_of(earlier, place) + 1, number_of(later, place + 1))
        if not without.intersection(between) and not join_up(earlier, later, place):
            return False
    return bool(without)


def how_sure(facts: Facts) -> str:
    """Return what the plus-minus covers and what it does not."""
    if facts.total.stderr is None:
        return words("sure.unknown")
    if facts.panel is not None:
        return words("helped.sure")
    return words("sure.covers" if facts.total.covariance is not None else "sure.covers-bound")


def together(facts: Facts) -> str:
    """Return which members are statistically indistinguishable; empty if that is unknown."""
    if facts.total.stderr is None:
        return ""
    groups = [group for group in facts.groups if len(group) > 1]
    if not groups:
        return words("sure.all-apart")
    if len(groups) == 1:
        return words("sure.one-group", clients=groups[0])
    n = facts.total.n
    if len(groups) > MOST_GROUPS or n > charts.MOST:
        alike = sum(map(len, facts.alike.values())) // 2
        return words("sure.many-groups", alike=alike, pairs=n * (n - 1) // 2)
    lettered = zip(string.ascii_lowercase, facts.groups, strict=False)
    named = tuple(words("sure.group", letter=a, clients=group) for a, group in lettered if len(group) > 1)
    return words("sure.groups", groups=named)


def notes(facts: Facts) -> list[str]:
    """Return the notes on the ranking; the status of FP and EE, which rank nobody, is in the appendix."""
    elsewhere = (*NORMALISED, *(_GAPS if gaps_known(facts) else ()))  # the page opens with gaps
    return [on_page(note) for note in facts.notes if code_of(note) not in elsewhere]


def defined(facts: Facts) -> bool:
    """Return whether the utility means what its name means here; in a file, a lower "brier" may be better."""
    return facts.utility != "brier" or facts.source.config is not None


def measure(facts: Facts) -> str:
    """Return what the measure means, if that is known."""
    utility = str(facts.utility)
    means = called("measure-means", utility)
    if facts.panel is not None:
        return words("helped.measure", measure=spoken(utility))
    if means == utility or not defined(facts):
        return ""
    return words("page.measure", measure=capital(spoken(utility)), means=means)


# ---------------------------------------------------------------------------------- 2: how did it build up


def built_up(facts: Facts) -> str:
    """Return in which rounds the gain was made."""
    gain, n, partly = facts.total.gain, len(facts.measured), bool(facts.source.unreported)
    if gain <= 0 or n < 3:
        return words("course.changed", gain=level_change(facts, gain), partly=partly)
    sums = list(itertools.accumulate(measured.gain for measured in facts.measured))
    place = next(k for k, so_far in enumerate(sums, start=1) if so_far >= gain / 2 or k == n)
    return words("course.half", place=place, n=n, part=sums[place - 1] / gain, partly=partly)


def away(facts: Facts) -> list[str]:
    """Return who missed rounds, and what that cost."""
    sentences = []
    for absence in facts.absences:
        missed = {"client": absence.client, "rounds": tuple(absence.rounds), "settled": facts.settled}
        if facts.panel is not None:
            sentences.append(words("helped.missed", client=absence.client, rounds=tuple(absence.rounds)))
            continue
        if absence.at_own_mean is None:
            sentences.append(words("course.missed-all", **missed, no_score=words("said.no-score")))
            continue
        code = "course.missed-zero" if facts.source.missing == "zero" else "course.missed-own-mean"
        sentences.append(words(code, **missed, own=worth(facts, absence.at_own_mean, unit=True)))
    return sentences or [words("course.nobody-missed")]


def missed(rounds: dict[int, str]) -> str:
    """Return the rounds that a member missed, and why."""
    each = (words("page.missed-why", round=number, why=words(f"why.{why}")) for number, why in rounds.items())
    return words("list.comma").join(each)


# ----------------------------------------------------------------------------------------- 3: what is paid


def decision(facts: Facts) -> list[str]:
    """Return what was decided in one sentence, then the terms."""
    decision, terms, planned = facts.decision, facts.terms, facts.source.planned or 0
    assert decision is not None
    budget = money_text(decision.paid.budget, facts.source.heading.currency)
    stands = {"number": decision.number, "budget": budget, "rule": terms.rule, "rounds": decision.rounds}
    if decision.rounds < planned:
        sentences = [words("pay.stands-partly", **stands, planned=planned), words("pay.later")]
    else:
        sentences = [words("pay.stands", **stands)]
    if decision.replaces:
        sentences.append(words("pay.record-replaces", record=decision.record, replaces=decision.replaces))
    else:
        sentences.append(words("pay.record", record=decision.record))
    score = terms.score
    if score != "ALPHA":
        score = words("pay.score-means", score=score, means=words(f"score-means.{score}"))
    zero = terms.missing == "zero"
    if facts.panel is not None:
        return [*sentences, about(terms)]
    sentences.append(words("pay.by", measure=spoken(terms.utility), score=score, zero=zero))
    if facts.other_basis:
        basis = words("pay.basis", score=noun(terms.score), measure=spoken(terms.utility))
        sentences.append(words("pay.other-basis", basis=basis))
    return [*sentences, about(terms)]


def reasons(facts: Facts) -> dict[str, str]:
    """Return one line for each member shown: why it is paid what it is paid."""
    decision = facts.decision
    found = {one.client: _named(facts, one.client, _reason(facts, one)) for one in facts.standings}
    found |= dict.fromkeys(facts.unscored, words("reason.never-reported", settled=facts.settled))
    if decision is None or not facts.other_basis:
        return found
    values, score = decision.total.as_dict(), decision.terms.score
    digits = digits_for(max(map(abs, values.values())))
    return found | {
        name: words("reason.other", score=score, value=signed(value, digits))
        for name, value in values.items()
    }


def _named(facts: Facts, client: str, reason: str) -> str:
    """Return a member's reason; if the settlement named the member, also for what."""
    if facts.panel is not None and client in facts.account.unwitnessed:
        return words("reason.unwitnessed", reason=reason)
    named = facts.account.named.values() if facts.settled else ()
    lies_told = dict.fromkeys(of_round[client] for of_round in named if client in of_round)
    for how in lies_told:
        reason = words("reason.named", reason=reason, how=words(f"lie.{how}"))
    if lies_told and (part := facts.terms.forfeit):
        reason = words("reason.forfeited", reason=reason, part=part)
    return reason


def _reason(facts: Facts, standing: Standing) -> str:
    if facts.panel is not None:
        if standing.client in facts.panel.helped_nobody:
            return words("reason.helped-nobody")
        gave = worth(facts, facts.panel.gave[standing.client], unit=True)
        return words("reason.gave", gave=gave)
    added, plus = (worth(facts, standing.total, unit=True, sign=sign) for sign in ("+", ""))
    if facts.unit == 1 and facts.utility:
        measure = spoken(facts.utility)
        added, plus = (words("number.measured", value=value, measure=measure) for value in (added, plus))
    if facts.decision is not None and facts.terms.rule == "equal":
        return words("reason.equal", added=added)
    if standing.client in facts.harmful:
        turned, unconfirmed = facts.otherwise(standing.client)
        if turned:
            return words("reason.worse-turned", added=added)
        return words("reason.worse-alone" if unconfirmed else "reason.worse", added=added)
    known = standing.interval is not None
    if standing.total < 0:
        return words("reason.below" if known else "reason.below-unknown", added=added)
    if standing.surely <= 0 and known:
        return words("reason.maybe", added=added)
    if standing.coverage < 1:
        return words("reason.partly", added=plus, part=standing.coverage)
    return words("reason.added", added=plus)


def noise_share(facts: Facts) -> str:
    """Return the share that a member without any contribution could expect from noise."""
    terms = facts.terms
    if terms.rule not in ("fair", "fenced") or (terms.floor, terms.cap) != (0.0, 1.0):
        return ""
    nothing = null_share(facts.payable, terms.equal)
    return "" if nothing is None else words("pay.noise", share=nothing, rule=terms.rule)


# -------------------------------------------------------------------------------------- 4: can we trust it


def adds_up(facts: Facts) -> str:
    """Return sentences that compare the sum of the contributions with the gain."""
    if facts.panel is not None:
        return words("helped.trust", part=1 / facts.panel.whole.n)
    total, explained = facts.total, float(facts.total.raw.sum())
    amounts = {"explained": worth(facts, explained, unit=True), "gain": worth(facts, total.gain, unit=True)}
    strays = []
    if any(doubt.gross for doubt in facts.doubts):
        strays = [words("trust.gross")]
    elif any(doubt.code in ("swapped", "strays") for doubt in facts.doubts):
        strays = [words("trust.strays")]
    if total.gain <= 0:
        return " ".join([words("trust.no-gain", **amounts), *strays])
    partly = bool(facts.source.unreported)
    sentences = [words("trust.adds-up", part=explained / total.gain, partly=partly, **amounts)]
    if facts.settled:
        return " ".join([*sentences, words("trust.settled")])
    if is_whole(facts.utility):
        sentences.append(words("trust.whole"))
    if silent := tuple(dict.fromkeys(name for reports in facts.source.rounds for name in reports.silent)):
        lacks = "trust.silent-zero" if facts.source.missing == "zero" else "trust.silent-own-mean"
        sentences.append(words(lacks, clients=silent))
        judged = balance(facts.source.rounds)
        if strays and judged and judged.gain > 0:
            sentences.append(words("trust.complete", part=judged.said / judged.gain))
    return " ".join([*sentences, *strays])


def unscored_rounds(facts: Facts) -> list[str]:
    """Return which rounds are not scored, and why; `notes` leaves that to the opening."""
    return [sentence(text) for text in in_words(tuple(facts.source.aborted), facts.source.unreported)]


def statuses(facts: Facts) -> list[str]:
    """Return in which rounds FP and EE, the paper's normalised scores, are in order, and in which not."""
    scored = {one.number: one.status for one in facts.rounds if one.status is not None}
    good = tuple(name for name in ("FP", "EE") if {status[name] for status in scored.values()} == {"ok"})
    sentences = [words("trust.good", scores=good, rounds=len(scored))] if good else []
    for name in ("FP", "EE"):
        for kind in dict.fromkeys(status[name] for status in scored.values() if status[name] != "ok"):
            rounds = tuple(number for number, status in scored.items() if status[name] == kind)
            sentences.append(words("trust.odd", score=name, rounds=rounds, status=words(f"status.{kind}")))
    return sentences


def remark(one: RoundFacts, *, settled: bool = False) -> str:
    """Return what was odd in a round."""
    if one.gain is None:
        return words("round.aborted", why=one.aborted) if one.aborted else words("round.unreported")
    silent, declined, blamed = (tuple(map(quoted, who)) for who in (one.silent, one.declined, one.blamed))
    odd = [words("round.silent", clients=silent, settled=settled)] if silent else []
    odd += [words("round.declined", clients=declined)] if declined else []
    odd += [words("round.blamed", clients=blamed)] if blamed else []
    return words("list.clause").join(odd)


def heading(facts: Facts, utility: str | None) -> str:
    """Return a measure as the heading of a column, marked if members are paid by it."""
    if utility != facts.paid_by:
        return spoken(utility)
    if facts.terms.score == ("PHI" if facts.settled else "ALPHA"):
        return words("trust.paid", measure=spoken(utility))
    return words("trust.paid-by", measure=spoken(utility), score=facts.terms.score)


def in_unit(facts: Facts, measured: Facts, heading: str) -> str:
    """Return the heading of a column, with its unit where some measures have points and others have not."""
    mixed = {facts.unit, *(one.facts.unit for one in facts.companions)} != {facts.unit}
    return words("trust.in-points", heading=heading) if mixed and measured.unit != 1 else heading


def companions(facts: Facts) -> list[str]:
    """Return sentences on whether other measures of quality contradict the ranking."""
    sentences = []
    first = words("trust.the-paid") if facts.paid_by == facts.utility else spoken(facts.utility)
    for one in facts.companions:
        name = words("trust.as-reported") if one.reported else capital(spoken(one.utility))
        close = "" if one.spearman is None else words("trust.close", spearman=one.spearman)
        for better, worse in one.contradicts[:4]:
            sentences.append(words("trust.opposite", measure=name, better=better, worse=worse))
        if (left := len(one.contradicts) - 4) > 0:
            sentences.append(words("trust.opposite-more", measure=name, left=left))
        by = words("trust.the-reports") if one.reported else spoken(one.utility)
        for client, helped in one.turned.items():
            sentences.append(words("trust.turned", measure=by, client=client, first=first, helped=helped))
        agrees = {"measure": name, "close": close, "first": first}
        if not one.sure:
            sentences.append(words("trust.nothing-sure", **agrees))
        elif not one.contradicts:
            sentences.append(words("trust.agrees", **agrees, sure=one.sure, confirms=one.confirms))
    return sentences


# --------------------------------------------------------------------------------------- does it add up


def settlement_alarms(facts: Facts) -> list[str]:
    """Return what readers must know first: no settlement, a lie, or a settlement that is still open."""
    if facts.source.unsettled:
        return [words("page.unsettled", why=facts.source.unsettled)]
    if not facts.settled:
        return []
    still = facts.account.provisional()
    judged = [] if facts.panel is None else [*suspicions(facts, facts.panel)]
    return [*lies(facts.account), *judged, *([sentence(on_page(still))] if still else [])]


MOST_LINES = 4000
"""The most lines in the table of equations; of more, it shows the sums alone, and ``scores.json`` has all."""


def equations(facts: Facts) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the lines of the equations: round, who, units, their worth, and whether the round's sum holds."""
    names = [*facts.standing, *facts.account.missing]
    if len(names) * len(facts.account.rounds) > MOST_LINES:
        names = []
    for line in facts.account.rounds:
        holds = "page.holds-yes" if line.holds else "page.holds-open" if line.sum is None else "page.holds-no"
        total = "-" if line.sum is None else formatted(line.sum, ",")
        yield str(line.round), words("page.all-stated"), total, "", words(holds)
        product = worth(facts, line.product * facts.account.scale)
        yield "", words("page.col-product"), formatted(line.product, ","), product, ""
        for name, (units, counts) in zip(names, stated(facts, line, names), strict=True):
            yield "", name, units, counts, ""


def stated(facts: Facts, line: SettledRound, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return what each member stated in an equation: in units, and what counts of it in the utility."""
    cells, numbers = [], zip(line.stated, line.counted, strict=True)
    of_member = dict(zip(line.participants, numbers, strict=True))
    for name in names:
        units, counts = of_member.get(name, (None, None))
        if name not in of_member:
            cells.append(("·", ""))
        elif units is None or counts is None:
            cells.append((words("page.not-stated"), ""))
        else:
            value = worth(facts, counts * facts.account.scale)
            proved = words("page.proved", counts=counts, worth=value) if counts != units else value
            cells.append((formatted(units, ","), proved))
    return cells


NOT_MEANT = ("lacks.pool-owner", "lacks.together", "lacks.larger")
"""What an equation that holds does not mean."""
NOT_JUDGED = ("lacks.friends", "lacks.larger", "lacks.members")
"""What a column that adds up does not mean."""


def not_meant(facts: Facts) -> list[str]:
    """Return what it does not mean that all adds up."""
    return [words(code) for code in (NOT_MEANT if facts.panel is None else NOT_JUDGED)]


# ------------------------------------------------------------------------------------- who helped whom

MOST_NUMBERS = 12
"""The most members whose picture has a number in every cell."""
LEVELS = 10
"""How many shades of help, and of harm, the picture has."""


def has_numbers(facts: Facts) -> bool:
    return facts.panel is not None and facts.panel.whole.n <= MOST_NUMBERS


def has_long_names(facts: Facts) -> bool:
    """Return whether the names of judges stand upright."""
    names = charts.labels(facts.panel.whole.clients) if facts.panel is not None else {}
    return len(names) > 6 or max(map(len, names.values())) > 9


def helpless(facts: Facts) -> str:
    """Return who did nothing good for any other member, or that nobody is like that."""
    nobody = facts.panel.helped_nobody if facts.panel is not None else ()
    return f"{words('helped.nobody', clients=nobody)}." if nobody else words("helped.all")


def _shown_judges(facts: Facts) -> list[int]:
    panel = facts.panel
    assert panel is not None
    return [b for b in panel.order if panel.whole.clients[b] in facts.account.columns]


def judges_shown(facts: Facts) -> list[tuple[str, bool]]:
    """Return the judges, whoever gave most first, and whether their columns count in no ranking."""
    panel = facts.panel
    assert panel is not None
    short = charts.labels(panel.whole.clients)
    names = [panel.whole.clients[b] for b in _shown_judges(facts)]
    return [(short[name], name in panel.left_out) for name in names]


def who_helped_whom(facts: Facts) -> Iterator[tuple[str, bool, list[tuple[str, str, str]]]]:
    """Yield the rows of the picture: name, whether it helped nobody, and class, number and hint of cells."""
    panel = facts.panel
    assert panel is not None
    names, matrix = panel.whole.clients, panel.whole.matrix
    short, shown, judges = charts.labels(names), panel.order, _shown_judges(facts)
    counted = [b for b in judges if names[b] not in panel.left_out]
    largest = max((abs(float(matrix[i, b])) for i in shown for b in counted if i != b), default=0.0) or 1.0
    for i in shown:
        cells = []
        for b in judges:
            value = float(matrix[i, b])
            shade = min(LEVELS, math.ceil(LEVELS * abs(value) / largest))
            kind = "own" if i == b else "" if not shade else f"{'p' if value > 0 else 'n'}{shade}"
            told = cell_text(facts, value)
            hint = words("helped.cell", client=names[i], judge=names[b], value=told)
            cells.append((kind, told, "" if has_numbers(facts) else hint))
        yield short[names[i]], names[i] in panel.helped_nobody, cells


def judge_remark(one: JudgeFacts) -> str:
    """Return what is odd about a judge."""
    odd = [] if one.holds else [words("helped.does-not-add-up")]
    odd += [words("helped.is-odd")] if one.odd else []
    odd += [words("helped.is-opposed")] if one.opposed else []
    return words("list.clause").join(odd) or words("helped.adds-up")


# -------------------------------------------------------------------------------------- what is guaranteed


def guaranteed(facts: Facts) -> list[str]:
    """Return what this run guarantees."""
    run, found = facts.source.run, []
    if run is not None and run.config.secure_aggregation.enabled and not run.config.analysis:
        found.append(words("holds.masked"))
    if facts.settled and all(line.holds for line in facts.account.rounds):
        found.append(words("holds.settled" if facts.panel is None else "holds.panel"))
    found += [words("holds.raw"), words("holds.cents")]
    if run is not None:
        found.append(words("holds.recomputed", settled=facts.settled))
        found += [words("holds.chained"), words("holds.pool" if facts.panel is None else "holds.held-out")]
    return found


def not_guaranteed(facts: Facts) -> list[str]:
    """Return what this run does not guarantee, or what is unknown."""
    source, run, found = facts.source, facts.source.run, []
    if source.private:
        found.append(words("lacks.private"))
    if source.broken:
        found.append(words("lacks.broken"))
    elif run is None:
        found.append(words("lacks.reports"))
    else:
        if run.rehearsal:
            found.append(words("lacks.rehearsal", holder=words(f"holder.{run.first.engine}")))
        elif run.signed:
            found.append(words("lacks.keys"))
        if run.config.analysis:
            found.append(words("lacks.analysis"))
        if not run.config.secure_aggregation.enabled:
            found.append(words("lacks.plain"))
        found.append(words("lacks.withheld"))
    if facts.settled:
        found += not_meant(facts)
    else:
        if facts.one_slice and len(source.rounds) > 1:
            found.append(words("lacks.one-slice"))
        found.append(words("lacks.lies"))
    return [*found, words("lacks.leaks"), words("lacks.audit")]


# ---------------------------------------------------------------------------------- 5: how was it computed


def server_saw(facts: Facts) -> tuple[list[str], list[str]] | None:
    """Return what the server saw and what it did not see; None if that is unknown."""
    run = facts.source.run
    if run is None:
        return None
    saw = [words("saw.sum"), *([words("saw.utilities")] if facts.source.rounds else [])]
    if facts.settled:
        saw.append(words("saw.stated" if facts.panel is None else "saw.panel"))
    if any(report.cosine is not None for one in facts.source.closed for report in one.reports.values()):
        saw.append(words("saw.cosine"))
    saw.append(words("saw.who"))
    if run.config.scoring.solo:
        saw.append(words("saw.solo"))
    if not run.config.secure_aggregation.enabled or run.config.analysis:
        return [words("saw.updates"), *saw], [words("saw.not-data")]
    not_seen = [words("saw.not-updates"), words("saw.not-data")]
    return saw, [*not_seen, *([words("saw.not-samples")] if facts.panel is None else [])]


def costs(facts: Facts) -> list[tuple[str, str]]:
    """Return what the run cost, as names and values."""
    known, run, scored = facts.source.costs, facts.source.run, facts.source.rounds
    took = words("cost.unknown")
    if known.seconds is not None:
        total, longest = sum(known.seconds), max(known.seconds)
        took = words("cost.seconds", total=total, rounds=len(known.seconds), longest=longest)
    found = [(words("cost.time"), took)]
    if (parameters := known.parameters) is not None:
        found.append((words("cost.model"), words("cost.parameters", parameters=parameters)))
        if run is not None and run.signed:
            sent = words("cost.bytes", bytes=run.config.word_bytes * parameters)
            found.append((words("cost.sent"), sent))
    if scored:
        models = sum(2 * reports.n + 2 for reports in scored)
        found.append((words("cost.evaluated"), words("cost.models", models=models, rounds=len(scored))))
    return found


def provenance(facts: Facts) -> list[tuple[str, str, bool]]:
    """Return where the numbers come from: name, value, and whether the value is a fingerprint."""
    run = facts.source.run
    if run is None:
        return []
    pool, size, classes = run.pool, run.pool["size"], run.pool["classes"]
    settled, slices = int(pool.get("settled", 0)), int(pool["slices"])
    if facts.panel is not None:
        counts = [one.samples for one in facts.panel.judges]
        samples = words("origin.judges", least=min(counts), most=max(counts), judges=len(counts))
    elif settled == size:
        samples = words("origin.all-settled", size=size, classes=classes)
    elif settled:
        samples = words("origin.settled", size=size, classes=classes, settled=settled)
    elif slices == 1:
        samples = words("origin.one-slice", size=size, classes=classes)
    else:
        samples = words("origin.slices", size=size, classes=classes, slices=slices)
    engine = called("engine", run.first.engine)
    version = words("origin.version", version=run.first.terms["version"], engine=engine)
    return [
        ("fedmerit", version, False),
        (words("origin.pool"), samples, False),
        *([] if facts.panel else [(words("origin.root"), str(pool["root"]), True)]),
        (words("origin.settings"), run.first.terms["config_hash"], True),
        (words("origin.ledger"), words("origin.records", records=len(run.records)), False),
        (words("origin.head"), run.head, True),
    ]
