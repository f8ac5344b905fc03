"""The sentences of the page. They state findings, name members, and claim no more than the facts allow."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from fedmerit.config import recorded
from fedmerit.ledger.account import Line
from fedmerit.ledger.records import in_words
from fedmerit.notes import called, capital, code_of, formatted, quoted, sentence, words
from fedmerit.protocol.terms import REHEARSALS
from fedmerit.report.facts import Facts
from fedmerit.report.findings import RoundFacts, Standing
from fedmerit.report.page import charts, money
from fedmerit.report.text import (
    about,
    apart_text,
    level,
    level_change,
    lies,
    made_worse,
    money_text,
    noun,
    on_page,
    settlement_sentences,
    signed_by,
    spoken,
    sure_worth,
    unit_values,
    worth,
)
from fedmerit.scoring.accumulate import join_up, number_of
from fedmerit.scoring.doubts import balance
from fedmerit.scoring.metrics import is_whole
from fedmerit.scoring.rewards import null_share
from fedmerit.scoring.scores import NORMALISED

# --------------------------------------------------------------------------------- 1: who contributed what

MOST_GROUPS = 4
"""The most groups of indistinguishable members whose names are listed."""
_GAPS = ("gap", "jump")
"""Codes of notes about rounds that do not start where the one before ended."""


def title(facts: Facts) -> str:
    """Return the title: what to do about a doubt that withholds the rest, or who contributed what."""
    for doubt in facts.doubts:
        if doubt.withholds:
            return words("title.do-not-pay" if doubt.gross else "title.look", why=doubt.short)
    return headline(facts) if facts.decision is None else money.headline(facts, facts.decision)


def document_title(facts: Facts) -> str:
    """Return the title of the document: which run it is about, then the headline."""
    heading, run = facts.source.heading, facts.source.run_name
    named = tuple(one for one in (heading.title, heading.consortium, run) if one)
    return words("title.document", named=named, title=title(facts)) if named else title(facts)


def headline(facts: Facts) -> str:
    """Return in one sentence who contributed what."""
    if facts.total.stderr is None:
        return words("headline.unsure", finding=_without_errors(facts))
    finding, worse = _finding(facts), made_worse(facts, 3)
    return words("headline.and-worse", finding=finding, worse=worse) if worse else finding


def _leaders(facts: Facts) -> list[str]:
    """Return the members whose rank may be first."""
    return [one.client for one in facts.standings if one.rank_interval and one.rank_interval[0] == 1]


def _finding(facts: Facts) -> str:
    """Return who contributed most, as far as that is sure."""
    n, leaders = facts.total.n, _leaders(facts)
    helpful = [one.client for one in facts.standings if one.surely > 0]
    if not helpful:
        return words("headline.none-surely")
    if len(leaders) == 1:
        return words("headline.most", client=leaders[0])
    if not set(leaders) <= set(helpful):  # not all of these surely improved the model
        if len(leaders) == n:
            return words("headline.alike", who=_some(n, facts))
        return words("headline.first-unsure", client=leaders[0], others=len(leaders) - 1)
    if len(leaders) == n:
        return words("headline.contributed-alike", who=_some(n, facts))
    if len(leaders) <= 3:
        return words("headline.most-alike", clients=tuple(leaders))
    code = "headline.some-most-alike" if len(helpful) > len(leaders) else "headline.contributed-alike"
    return words(code, who=_some(len(leaders), facts))


def _without_errors(facts: Facts) -> str:
    """Return the headline without standard errors; it names no winner if there is none."""
    standings = facts.standings
    leaders = tuple(one.client for one in standings if one.rank == 1)
    if standings[0].total <= 0:
        return words("headline.none-improved")
    if len(leaders) == 1:
        return words("headline.most", client=leaders[0])
    if len(leaders) == len(standings):
        return words("headline.same", who=_some(len(leaders), facts))
    who = _some(len(leaders), facts) if len(leaders) > 3 else words("list.clients", clients=leaders)
    return words("headline.most-same", who=who)


def _some(number: int, facts: Facts) -> str:
    """Return a count of the members who could be measured; members without a report are not judged."""
    n = facts.total.n
    if not facts.unscored:
        if number < n:
            return words("headline.some", number=number, n=n)
        return words("headline.both") if n == 2 else words("headline.all", n=n)
    if number < n:
        return words(
            "headline.some-stated" if facts.settled else "headline.some-reported", number=number, n=n
        )
    if n == 2:
        return words("headline.both-stated" if facts.settled else "headline.both-reported")
    return words("headline.all-stated" if facts.settled else "headline.all-reported", n=n)


def opening(facts: Facts) -> list[str]:
    """Return the few sentences below the title: about money once there is a decision."""
    one = facts.decision
    if one is None:
        return lede(facts)
    rule = words(f"rule-in-short.{facts.terms.rule}", score=noun(facts.terms.score))
    said = [decision(facts)[0], rule, _change(facts), *_rounds_left_out(facts), *money.sure(facts, one)]
    said += [money.worse(facts), *_silent(facts), signed_by(facts)]
    return [text for text in said if text]


def lede(facts: Facts) -> list[str]:
    """Return the finding in a few sentences with numbers."""
    said = [_change(facts), *_rounds_left_out(facts)]
    if not facts.withheld:
        said += _places(facts)
    said += _silent(facts)
    turned = {client: spoken(one.utility) for one in facts.companions for client in one.turned}
    if turned and not facts.withheld:
        measures = tuple(dict.fromkeys(turned.values()))
        said.append(words("lede.disagree", clients=tuple(turned), measures=measures))
    return said


def _rounds_left_out(facts: Facts) -> Iterator[str]:
    """Yield which rounds are not scored, and why; `notes` leaves that to the opening."""
    return map(sentence, in_words(tuple(facts.source.aborted), facts.source.unreported))


def _silent(facts: Facts) -> Iterator[str]:
    """Yield who has no score because it never reported, or never stated."""
    if facts.unscored:
        code = "lede.never-stated" if facts.settled else "lede.never-reported"
        yield words(code, clients=facts.unscored)


def _places(facts: Facts) -> Iterator[str]:
    """Yield who is first, and who is last."""
    standings, n = facts.standings, facts.total.n
    best, worst = standings[0], standings[-1]
    first = [one for one in standings if one.rank == best.rank]
    if len(first) == len(standings) > 1:
        yield words("lede.all-same", who=_some(n, facts), total=sure_worth(facts, best, unit=True))
        return
    yield _place(facts, first, "first")
    if worst.client in facts.suspects:
        yield words("lede.suspect", client=worst.client, total=sure_worth(facts, worst, unit=True))
    elif worst is not best:
        yield _place(facts, [one for one in standings if one.rank == worst.rank], "last")


def _place(facts: Facts, equals: Sequence[Standing], where: str) -> str:
    one, total, n = equals[0], sure_worth(facts, equals[0], unit=True), facts.total.n
    if len(equals) > 1:
        clients = tuple(each.client for each in equals)
        return words(
            "lede.first-shared" if where == "first" else "lede.last-shared", clients=clients, total=total
        )
    if one.rank_interval is None or one.rank_interval[0] == one.rank_interval[1]:
        return words("lede.first" if where == "first" else "lede.last", client=one.client, total=total)
    low, high = one.rank_interval
    code = "lede.first-may" if where == "first" else "lede.last-may"
    return words(code, client=one.client, total=total, low=low, high=high, n=n)


def _change(facts: Facts) -> str:
    """Return how the shared model changed, in numbers that are rounded consistently."""
    total, reports = facts.total, facts.measured
    span, measure = _span(facts), spoken(facts.utility) if defined(facts) else facts.utility
    low, high = reports[0].empty, reports[-1].grand
    ends = {"low": level(facts, low), "high": level(facts, high)} if facts.one_slice else {}
    if ends and abs((high - low) - total.gain) > 1e-6 * max(abs(low), abs(high), abs(total.gain)):
        code = "lede.partly" if gaps_known(facts) else "lede.apart"
        gain = level_change(facts, total.gain)
        return words(code, span=span, measure=measure, low=ends["low"], high=ends["high"], gain=gain)
    way = "rose" if total.gain > 0 else "fell" if total.gain < 0 else "same"
    change = {} if way == "same" else {"change": level_change(facts, abs(total.gain), sign="")}
    said = words(f"change.{way}{'-between' if ends else ''}", span=span, measure=measure, **change, **ends)
    if (unit := unit_values(facts)) is None:
        return said
    name, first, last, scale = (unit[key] for key in ("name", "low", "high", "scale"))
    return f"{said} {words('lede.in-unit', name=name, low=first, high=last, scale=scale)}"


def _span(facts: Facts) -> str:
    """Return which rounds the change covers."""
    last = facts.measured[-1].round
    if facts.unfinished:
        closed, planned = facts.unfinished
        return words("lede.after", closed=closed, planned=planned)
    if facts.source.unreported and facts.one_slice and last is not None:
        return words("lede.by-round", round=last)
    return words("lede.over-reported" if facts.source.unreported else "lede.over", n=facts.total.rounds)


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
    if len(groups) > MOST_GROUPS or facts.total.n > charts.MOST:
        n, alike = facts.total.n, sum(map(len, facts.alike.values())) // 2
        return words("sure.many-groups", alike=alike, pairs=n * (n - 1) // 2)
    lettered = zip(string.ascii_lowercase, facts.groups, strict=False)
    each = tuple(words("sure.group", letter=a, clients=group) for a, group in lettered if len(group) > 1)
    return words("sure.groups", groups=each)


def notes(facts: Facts) -> list[str]:
    """Return the notes on the ranking; the status of FP and EE, which rank nobody, is in the appendix.

    With pseudonyms no text without a code is shown, because it may name a member.
    """
    known = _GAPS if gaps_known(facts) else ()  # the page opens with them
    told = [one for one in facts.notes if code_of(one) not in (*NORMALISED, *known)]
    return [on_page(one) for one in told if code_of(one) or not facts.source.pseudonyms]


def defined(facts: Facts) -> bool:
    """Return whether the utility means what its name means here; in a file, a lower "brier" may be better."""
    return facts.utility != "brier" or facts.source.settings is not None


def measure(facts: Facts) -> str:
    """Return what the measure means, if that is known."""
    known = str(facts.utility)
    means = called("measure-means", known)
    if means == known or not defined(facts):
        return ""
    return words("page.measure", measure=capital(spoken(known)), means=means)


# ---------------------------------------------------------------------------------- 2: how did it build up


def built_up(facts: Facts) -> str:
    """Return in which rounds the gain was made."""
    reports, gain, partly = facts.measured, facts.total.gain, facts.source.unreported
    if gain <= 0 or len(reports) < 3:
        told = level_change(facts, gain)
        return words("course.changed-reported" if partly else "course.changed", gain=told)
    sums = list(itertools.accumulate(one.gain for one in reports))
    place = next(k for k, so_far in enumerate(sums, start=1) if so_far >= gain / 2 or k == len(sums))
    code = "course.half-reported" if partly else "course.half"
    return words(code, place=place, n=len(reports), part=sums[place - 1] / gain)


def away(facts: Facts) -> list[str]:
    """Return who missed rounds, and what that cost."""
    said = []
    for one in facts.absences:
        client, rounds = one.client, tuple(one.rounds)
        if one.at_own_mean is None:
            code = "course.missed-all-settled" if facts.settled else "course.missed-all"
            said.append(words(code, client=client, rounds=rounds, no_score=words("said.no-score")))
            continue
        own = worth(facts, one.at_own_mean, unit=True)
        if facts.source.missing == "zero":
            counts = "course.missed-zero-settled" if facts.settled else "course.missed-zero"
        else:
            counts = "course.missed-own-mean-settled" if facts.settled else "course.missed-own-mean"
        said.append(words(counts, client=client, rounds=rounds, own=own))
    return said or [words("course.nobody-missed")]


def missed(rounds: dict[int, str]) -> str:
    """Return the rounds that a member missed, and why."""
    each = (words("page.missed-why", round=number, why=words(f"why.{why}")) for number, why in rounds.items())
    return words("list.comma").join(each)


# ----------------------------------------------------------------------------------------- 3: what is paid


def basis(facts: Facts) -> str:
    """Return the score that the decision pays by, as the heading of a column."""
    return words("pay.basis", score=noun(facts.terms.score), measure=spoken(facts.terms.utility))


def decision(facts: Facts) -> list[str]:
    """Return what was decided in one sentence, then the terms."""
    one, terms = facts.decision, facts.terms
    assert one is not None
    planned, budget = facts.source.planned or 0, money_text(one.paid.budget, facts.source.heading.currency)
    if one.after:
        each, runs = (
            tuple(words("pay.run", run=run, head=head) for run, head in one.after),
            len(one.after) + 1,
        )
        said = [
            words("pay.stands-runs", number=one.number, budget=budget, rule=terms.rule, runs=runs),
            words("pay.rest-runs", rounds=one.rounds, earlier=each),
        ]
        if one.rounds < planned:
            said.append(words("pay.later"))
    elif one.rounds < planned:
        said = [
            words(
                "pay.stands-partly",
                number=one.number, budget=budget, rule=terms.rule, rounds=one.rounds, planned=planned,
            ),
            words("pay.later"),
        ]  # fmt: skip
    else:
        said = [words("pay.stands", number=one.number, budget=budget, rule=terms.rule, rounds=one.rounds)]
    if one.replaces:
        said.append(words("pay.record-replaces", record=one.record, replaces=one.replaces))
    else:
        said.append(words("pay.record", record=one.record))
    score = terms.score
    if score != "ALPHA":
        score = words("pay.score-means", score=score, means=words(f"score-means.{score}"))
    counts = "pay.by-zero" if terms.missing == "zero" else "pay.by-own-mean"
    said.append(words(counts, measure=spoken(terms.utility), score=score))
    if facts.other_basis and not facts.other_runs:
        said.append(words("pay.other-basis", basis=basis(facts)))
    if one.shares.status != "ok":
        said.append(words("pay.fallback"))
    return [*said, about(terms)]


def decided_apart(facts: Facts) -> str:
    """Return that the decision pays indistinguishable members visibly apart; empty if it does not."""
    apart, one = facts.decided_apart, facts.decision
    return apart_text(apart, one.shares, facts.source.names) if apart is not None and one is not None else ""


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
    explained = float(facts.total.raw.sum())
    total, told = facts.total, worth(facts, explained, unit=True)
    gain, found = worth(facts, total.gain, unit=True), facts.doubts
    strays = []
    if any(one.gross for one in found):
        strays = [words("trust.gross")]
    elif any(one.code in ("swapped", "strays") for one in found):
        strays = [words("trust.strays")]
    if total.gain <= 0:
        return " ".join([words("trust.no-gain", explained=told, gain=gain), *strays])
    code = "trust.adds-up-reported" if facts.source.unreported else "trust.adds-up"
    said = [words(code, explained=told, part=explained / total.gain, gain=gain)]
    if facts.settled:
        return " ".join([*said, words("trust.settled")])
    if is_whole(facts.utility, facts.source.metrics):
        said.append(words("trust.whole"))
    if silent := tuple(dict.fromkeys(name for one in facts.source.rounds for name in one.silent)):
        lacks = "trust.silent-zero" if facts.source.missing == "zero" else "trust.silent-own-mean"
        said.append(words(lacks, clients=silent))
        judged = balance(facts.source.rounds)
        if strays and judged and judged.gain > 0:
            said.append(words("trust.complete", part=judged.said / judged.gain))
    return " ".join([*said, *strays])


def unscored_rounds(facts: Facts) -> list[str]:
    """Return which rounds were aborted, or have no report."""
    return [sentence(text) for text in in_words(list(facts.source.aborted), facts.source.unreported)]


def statuses(facts: Facts) -> list[str]:
    """Return in which rounds FP and EE, the paper's normalised scores, are in order, and in which not."""
    scored = [(one.number, one.status) for one in facts.rounds if one.status is not None]
    said = []
    good = tuple(key for key in ("FP", "EE") if all(status[key] == "ok" for _, status in scored))
    if good and scored:
        said.append(words("trust.good", scores=good, rounds=len(scored)))
    for key in ("FP", "EE"):
        for kind in dict.fromkeys(status[key] for _, status in scored if status[key] != "ok"):
            rounds = tuple(number for number, status in scored if status[key] == kind)
            said.append(words("trust.odd", score=key, rounds=rounds, status=words(f"status.{kind}")))
    return said


def remark(one: RoundFacts, *, settled: bool = False) -> str:
    """Return what was odd in a round."""
    if one.gain is None:
        return words("round.aborted", why=one.aborted) if one.aborted else words("round.unreported")
    said = []
    if one.silent:
        code = "round.unstated" if settled else "round.silent"
        said.append(words(code, clients=tuple(map(quoted, one.silent))))
    if one.declined:
        said.append(words("round.declined", clients=tuple(map(quoted, one.declined))))
    if one.blamed:
        said.append(words("round.blamed", clients=tuple(map(quoted, one.blamed))))
    return words("list.clause").join(said)


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
    said = []
    first = words("trust.the-paid") if facts.paid_by == facts.utility else spoken(facts.utility)
    for one in facts.companions:
        name = words("trust.as-reported") if one.reported else capital(spoken(one.utility))
        close = "" if one.spearman is None else words("trust.close", spearman=one.spearman)
        for better, worse in one.contradicts[:4]:
            said.append(words("trust.opposite", measure=name, better=better, worse=worse))
        if len(one.contradicts) > 4:
            said.append(words("trust.opposite-more", measure=name, left=len(one.contradicts) - 4))
        for client, helped in one.turned.items():
            code = "trust.turned-better" if helped else "trust.turned-worse"
            measure_ = words("trust.the-reports") if one.reported else spoken(one.utility)
            said.append(words(code, measure=measure_, client=client, first=first))
        if not one.sure:
            said.append(words("trust.nothing-sure", measure=name, close=close, first=first))
        elif not one.contradicts:
            said.append(
                words(
                    "trust.agrees",
                    measure=name, close=close, sure=one.sure, first=first, confirms=one.confirms,
                )
            )  # fmt: skip
    return said


# --------------------------------------------------------------------------------------- does it add up


def settled(facts: Facts) -> list[str]:
    """Return what the settlement came to."""
    return settlement_sentences(facts)


def settlement_alarms(facts: Facts) -> list[str]:
    """Return what readers must know first: no settlement, a lie, or a settlement that is still open."""
    if facts.source.unsettled:
        return [words("page.unsettled", why=facts.source.unsettled)]
    if not facts.settled:
        return []
    account = facts.source.accounts[-1]
    still = account.provisional()
    return [*lies(account), *([sentence(on_page(still))] if still else [])]


MOST_COLUMNS = 24
"""The most members with a column of their own in the table of equations."""


def columns(facts: Facts) -> list[str]:
    """Return the members with a column in the table of equations: best first, then those who did not state.

    With many members there is none; ``scores.json`` has all numbers.
    """
    names = [one.client for one in facts.standings] + list(facts.source.accounts[-1].missing)
    return names if len(names) <= MOST_COLUMNS else []


def stated(facts: Facts, line: Line, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return what each member stated in an equation: in units, and what counts of it in the utility."""
    scale, cells = facts.source.accounts[-1].scale, []
    own = {
        name: (said, counts)
        for name, said, counts in zip(line.participants, line.stated, line.counted, strict=True)
    }
    for name in names:
        said, counts = own.get(name, (None, None))
        if name not in own:
            cells.append(("·", ""))
        elif said is None or counts is None:
            cells.append((words("page.not-stated"), ""))
        else:
            told = worth(facts, counts * scale)
            proved = words("page.proved", counts=counts, worth=told) if counts != said else told
            cells.append((formatted(said, ","), proved))
    return cells


def unit(scale: float) -> str:
    """Return a very small number for people.

    >>> unit(4.9896e-13)
    '5.0e-13'
    """
    return formatted(scale, ".1e")


def not_meant() -> list[str]:
    """Return what an equation that holds does not mean."""
    return [words("lacks.pool-owner"), words("lacks.together"), words("lacks.larger")]


# -------------------------------------------------------------------------------------- what is guaranteed


def guaranteed(facts: Facts) -> list[str]:
    """Return what this run guarantees."""
    found = [words("holds.raw"), words("holds.cents")]
    book, settings = facts.source.book, facts.source.settings
    if facts.settled and all(line.holds for line in facts.source.accounts[-1].lines):
        found.insert(0, words("holds.settled"))
    if book is not None:
        again = words("holds.recomputed-settled" if facts.settled else "holds.recomputed")
        found += [again, words("holds.chained"), words("holds.pool")]
        if settings is not None and settings["secure_aggregation"]["enabled"] and not book.run["analysis"]:
            found.insert(0, words("holds.masked"))
    return found


def not_guaranteed(facts: Facts) -> list[str]:
    """Return what this run does not guarantee, or what is unknown."""
    source, found = facts.source, []
    if source.private:
        found.append(words("lacks.private"))
    if source.broken:
        found.append(words("lacks.broken"))
    elif source.book is None:
        found.append(words("lacks.reports"))
    else:
        if (engine := source.book.run["engine"]) in REHEARSALS:
            found.append(words("lacks.rehearsal", holder=words(f"holder.{engine}")))
        elif source.book.run["keys"]:
            found.append(words("lacks.keys"))
        if source.book.run["analysis"]:
            found.append(words("lacks.analysis"))
        if source.settings is not None and not source.settings["secure_aggregation"]["enabled"]:
            found.append(words("lacks.plain"))
        found.append(words("lacks.withheld"))
    if facts.settled:
        found += not_meant()
    elif facts.one_slice and len(source.rounds) > 1:
        found.append(words("lacks.one-slice"))
    found += [*(() if facts.settled else (words("lacks.lies"),)), words("lacks.leaks"), words("lacks.audit")]
    if source.pseudonyms:
        found.append(words("lacks.names"))
    return found


# ---------------------------------------------------------------------------------- 5: how was it computed


def server_saw(facts: Facts) -> tuple[list[str], list[str]] | None:
    """Return what the server saw and what it did not see; None if that is unknown."""
    book, settings = facts.source.book, facts.source.settings
    if book is None or settings is None:
        return None
    saw = [words("saw.sum"), *([words("saw.utilities")] if facts.source.rounds else [])]
    if facts.settled:
        saw.append(words("saw.stated" if facts.by_round else "saw.stated-run"))
    if any(report.cosine is not None for one in book.rounds for report in one.reports.values()):
        saw.append(words("saw.cosine"))
    saw.append(words("saw.who"))
    if settings["scoring"]["disclose_samples"]:
        saw.append(words("saw.samples"))
    if settings["scoring"]["solo"]:
        saw.append(words("saw.solo"))
    if not settings["secure_aggregation"]["enabled"] or book.run["analysis"]:
        return [words("saw.updates"), *saw], [words("saw.not-data")]
    return saw, [words("saw.not-updates"), words("saw.not-data"), words("saw.not-samples")]


def costs(facts: Facts) -> list[tuple[str, str]]:
    """Return what the run cost, as names and values."""
    known, book, scored = facts.source.costs, facts.source.book, facts.source.rounds
    took = words("cost.unknown")
    if known.seconds is not None:
        total, longest = sum(known.seconds), max(known.seconds)
        took = words("cost.seconds", total=total, rounds=len(known.seconds), longest=longest)
    found = [(words("cost.time"), took)]
    if known.parameters is not None:
        found.append((words("cost.model"), words("cost.parameters", parameters=known.parameters)))
        if book is not None and book.run["keys"]:
            sent = recorded(book.run["config"]).word_bytes * known.parameters
            found.append((words("cost.sent"), words("cost.bytes", bytes=sent)))
    if scored:
        models = sum(2 * one.n + 2 for one in scored)
        found.append((words("cost.evaluated"), words("cost.models", models=models, rounds=len(scored))))
    return found


def provenance(facts: Facts) -> list[tuple[str, str, bool]]:
    """Return where the numbers come from: name, value, and whether the value is a fingerprint."""
    book = facts.source.book
    if book is None:
        return []
    pool: dict[str, Any] = dict(book.pool)
    size, classes, slices = pool["size"], pool["classes"], int(pool["slices"])
    samples = words("origin.slices", size=size, classes=classes, slices=slices)
    if slices == 1:
        samples = words("origin.one-slice", size=size, classes=classes)
    if settled := int(pool.get("settled", 0)):
        samples = words("origin.settled", size=size, classes=classes, settled=settled)
        if settled == size:
            samples = words("origin.all-settled", size=size, classes=classes)
    engine = called("engine", book.run["engine"])
    version = words("origin.version", version=book.run["version"], engine=engine)
    return [
        ("fedmerit", version, False),
        (words("origin.pool"), samples, False),
        (words("origin.root"), str(pool["root"]), True),
        (words("origin.settings"), str(book.run["config_hash"]), True),
        (words("origin.ledger"), words("origin.records", records=book.records), False),
        (words("origin.head"), book.head, True),
    ]
