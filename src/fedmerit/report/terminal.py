"""Facts on a terminal: tables of standings and payouts, notes, plans, and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedmerit.ledger.records import in_words
from fedmerit.notes import words
from fedmerit.report.comparison import Comparison
from fedmerit.report.facts import Facts
from fedmerit.report.text import (
    amounts_text,
    apart_text,
    made_worse,
    on_terminal,
    printable,
    rank_text,
    rounds_enough,
    samples_text,
    settlement_sentences,
    share_text,
    signed,
    span_text,
    sure_share_text,
    total_text,
    unit_values,
)
from fedmerit.scoring.agreement import PaperRow, agreement, by_scripts, by_text
from fedmerit.scoring.doubts import Doubt
from fedmerit.scoring.rewards import Payouts, Shares
from fedmerit.scoring.share_intervals import PaidApart, Spans, amounts_within
from fedmerit.scoring.types import Reports

if TYPE_CHECKING:
    from fedmerit.simulation.plan import Plan

# -------------------------------------------------------------------------------------------------- tables

Columns = dict[str, list[str]]
"""Heading -> cells; the first column holds names."""


def print_facts(console: Console, facts: Facts) -> None:
    """Print the doubts, the sums over rounds, the last round's scores in a table of their own, the notes."""
    unsettled = [words("terminal.unsettled", why=facts.source.unsettled)] if facts.source.unsettled else []
    _warn(console, [*unsettled, *facts.doubts])
    first = _standings(facts)
    if not _fits(first, console.width):
        first = _standings(facts, sure=False)
    _print_table(console, first)
    if facts.total.status != "ok":
        told = words(f"status-short.{facts.total.status}")
        _say(console, words("terminal.status-sum", score=facts.total.score, status=told))
    for line in _findings(facts):
        _say(console, line)
    if facts.last is not None:
        _say(console, _last(facts, facts.last))
        _print_table(console, _last_round(facts))
        for name, status in facts.status.items():
            if status != "ok":
                _say(console, words("terminal.status", score=name, status=words(f"status-short.{status}")))
    left_out = in_words(tuple(facts.source.aborted), facts.source.unreported)
    for note in (*facts.notes, *left_out):
        _say(console, words("terminal.note", text=on_terminal(note)))


def _findings(facts: Facts) -> Iterator[str]:
    """Yield what the table shows: of which rounds, and how sure it is."""
    total, utility = facts.total, facts.utility
    gain, summed = (signed(value, facts.digits) for value in (total.gain, float(total.raw.sum())))
    if utility:
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
    for span in facts.source.spans:
        path, first, last = span.name, span.before + 1, span.before + span.count
        if span.count > 1:
            yield words("terminal.run", first=first, last=last, count=span.count, path=path)
        elif span.count == 1:
            yield words("terminal.run-one", first=first, path=path)
        else:
            yield words("terminal.run-none", path=path)
    if facts.settled:
        yield from settlement_sentences(facts)
    if groups := tuple(words("list.comma").join(group) for group in facts.groups if len(group) > 1):
        yield words("terminal.alike", groups=groups)
    if total.stderr is None:
        yield words("terminal.unsure")
    else:
        yield words("terminal.sure")
        if total.covariance is None and total.n > 1:
            yield words("terminal.bound")
    if enough := rounds_enough(facts):
        yield enough
    if total.score in ("ALPHA", "PHI") and not facts.withheld and (worse := made_worse(facts)):
        yield worse
    for name in () if facts.withheld else facts.suspects:
        yield words("terminal.suspect", client=name)


def _last(facts: Facts, last: Reports) -> str:
    """Return which round the scores of a single round are of."""
    number = last.round
    for span in facts.source.spans[1:]:
        if number is not None and span.before < number <= span.before + span.count:
            return words("terminal.last-round-of", round=number, own=number - span.before, path=span.name)
    return words("terminal.last-round", round=number)


def _standings(facts: Facts, *, sure: bool = True) -> Columns:
    """Return the columns of the standings; ``sure`` says whether shares have intervals."""
    standings = facts.standings
    shares = [sure_share_text(one) if sure else share_text(one.share) for one in standings]
    columns = {
        words("terminal.member"): [printable(one.client) for one in standings],
        facts.total.score.lower(): [total_text(one) for one in standings],
        words("terminal.rank"): [rank_text(one) for one in standings],
        words("terminal.share"): shares,
    }
    if facts.settled and facts.source.rounds:
        columns["alpha"] = [signed(one.reported, one.digits) for one in standings]
    if any(one.coverage < 1 for one in standings):
        columns[words("terminal.rounds")] = [share_text(one.coverage, 0) for one in standings]
    if any(one.samples is not None for one in standings):
        columns[words("terminal.samples")] = [samples_text(one.samples) for one in standings]
    return columns


def _last_round(facts: Facts) -> Columns:
    """Return the columns of the last round, which stand in a table of their own: they are no sums."""
    return {words("terminal.member"): [printable(one.client) for one in facts.standings]} | {
        key: [signed(one.last[key], one.digits) for one in facts.standings] for key in ("LOO", "FP", "EE")
    }


def _fits(columns: Columns, width: int) -> bool:
    """Return whether the columns fit side by side with at least a dozen characters for a long name."""
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    names = next(iter(columns))
    widths[names] = min(widths[names], 12)
    return sum(widths.values()) + 3 * len(widths) + 1 <= width


def _print_table(console: Console, columns: Columns) -> None:
    """Print columns side by side as rich would, but fast enough for ten thousand rows."""
    console.out("\n".join(table_lines(columns, console.width)), highlight=False)


def table_lines(columns: Columns, width: int) -> list[str]:
    """Return the lines of a table: names on the left, wrapped if long; numbers on the right, never cut."""
    widths = {name: max(map(cell_len, (name, *cells))) for name, cells in columns.items()}
    names = next(iter(columns))
    rest = sum(widths.values()) - widths[names] + 3 * len(widths) + 1
    least = min(12, max(map(cell_len, columns[names])))
    widths[names] = max(min(widths[names], width - rest), least)

    def line(cells: Sequence[str]) -> str:
        padded = (
            set_cell_size(cell, size) if name == names else " " * (size - cell_len(cell)) + cell
            for cell, (name, size) in zip(cells, widths.items(), strict=True)
        )
        return "  " + "   ".join(padded) + "  "

    lines = [" " * len(blank := line([""] * len(widths))), line(list(widths))]
    lines.append(" " + "─" * (len(blank) - 2) + " ")
    for row in zip(*columns.values(), strict=True):
        parts = [_folded(cell, size) for cell, size in zip(row, widths.values(), strict=True)]
        for k in range(max(map(len, parts))):
            lines.append(line([part[k] if k < len(part) else "" for part in parts]))
    return [*lines, " " * len(blank)]


def _folded(cell: str, size: int) -> list[str]:
    """Return a cell wrapped into lines, between words where possible."""
    if cell_len(cell) <= size:
        return [cell]
    return [one.plain.rstrip() for one in Text(cell).wrap(Console(width=size), size, overflow="fold")]


def _say(console: Console, text: str) -> None:
    console.print(Text(printable(text)))


def _warn(console: Console, doubted: Sequence[Doubt | str]) -> None:
    for doubt in doubted:
        _say(console, words("terminal.warning", text=doubt if isinstance(doubt, str) else doubt.told))


def print_payouts(
    console: Console,
    paid: Payouts,
    divided: Shares,
    *,
    spans: Spans | None = None,
    apart: PaidApart | None = None,
    unscored: Sequence[str] = (),
    warning: str = "",
    doubts: Sequence[Doubt] = (),
) -> None:
    """Print doubts, the share and amount of each member (also of those who never reported), and notes.

    ``spans`` are the intervals of the shares, and ``apart`` a tie that is paid apart, if there is one.
    """
    _warn(console, [*([warning] if warning else []), *doubts])
    best_first = sorted(paid.items(), key=lambda item: (-item[1], item[0]))
    best_first += [(name, paid.nothing) for name in unscored]
    columns = {
        words("terminal.member"): [printable(name) for name, _ in best_first],
        words("terminal.share"): [share_text(divided.by_client.get(name, 0.0), 2) for name, _ in best_first],
        words("terminal.payout"): [f"{amount:,}" for _, amount in best_first],
    }
    if spans is not None:
        amounts = amounts_within(spans, paid)
        columns[words("terminal.span-share")] = [span_text(spans.get(name)) for name, _ in best_first]
        columns[words("terminal.span-payout")] = [amounts_text(amounts.get(name)) for name, _ in best_first]
    _print_table(console, columns)
    budget, rule, unpaid = paid.budget, divided.rule, paid.unpaid
    if coin := paid.currency:
        _say(console, words("terminal.paid-in", budget=budget, currency=coin, rule=rule, unpaid=unpaid))
    else:
        _say(console, words("terminal.paid", budget=budget, rule=rule, unpaid=unpaid))
    if spans is not None:
        _say(console, words("terminal.spans"))
    if apart is not None:
        _say(console, apart_text(apart, divided))
    for note in divided.notes:
        _say(console, words("terminal.note", text=note))


def print_comparison(console: Console, found: Comparison) -> None:
    """Print what training again changed: doubts, a table of members, findings, notes."""
    for label, run in zip(found.labels, found.runs, strict=True):
        _warn(console, [words("compare.doubt", run=label, doubt=str(doubt)) for doubt in run.facts.doubts])
    rows = found.rows
    columns = {
        words("terminal.member"): [printable(one.client) for one in rows],
        words("compare.col-mean"): [found.mean_text(one) for one in rows],
        words("compare.col-training"): [found.spread_text(one.training) for one in rows],
        words("compare.col-test"): [found.spread_text(one.test) for one in rows],
        words("compare.col-ranks"): [one.rank_range for one in rows],
    }
    each = {label: [found.score_text(one.scores[k]) for one in rows] for k, label in enumerate(found.labels)}
    if _fits(columns | each, console.width):
        _print_table(console, columns | each)
    else:
        _print_table(console, columns)
        _print_table(console, {words("terminal.member"): columns[words("terminal.member")], **each})
    for label, run in zip(found.labels, found.runs, strict=True):
        _say(console, words("compare.is", run=label, path=run.name))
    score, utility = found.first.ranked_by, str(found.first.utility)
    _say(console, words("compare.caption", score=score, utility=utility, rounds=found.first.total.rounds))
    for line in (found.lede[1], found.wider, found.rough, found.common, *found.order):
        if line:
            _say(console, line)
    for one, other, above, under in found.swaps:
        _say(console, words("compare.swap", one=one, other=other, above=above, under=under))
    _say(console, found.chance)
    for label, told in found.enough:
        _say(console, words("compare.enough", run=label, text=told))
    for note in found.notes:
        _say(console, words("terminal.note", text=note))


def print_truth(console: Console, content: Mapping[str, Any], rounds: Sequence[Reports]) -> None:
    """Print that plain updates were analysed, how close scores come to the ground truth, the paper's table.

    ``content`` is that of ``scores.json``; ``rounds`` are the reports of the utility in the paper's table.
    """
    console.print(words("terminal.analysis"))
    for utility, part in ((content["utility"], content), *content["companions"].items()):
        for name in ("MR-SV", "ROUND-SV", "SV"):
            truth = part.get("truth", {}).get(name)
            if truth is None:
                continue
            each, found = dict(part["cumulative"]), []
            if part is content and (settled := content.get("settlement")):
                each = {**each, "PHI": settled["cumulative"]}  # what members are paid by
            if name == "ROUND-SV":  # the same round's scores, as the paper publishes them
                each = part["rounds"][-1]["scores"]
            for score, values in each.items():
                known = values is not None and None not in values and len(values) == len(truth)
                spearman = agreement(values, truth).spearman if known else None
                found.append(f"{score} {'-' if spearman is None else format(spearman, '.2f')}")
            told = words(
                "terminal.spearman", truth=words(f"truth.{name}"), utility=utility, found=tuple(found)
            )
            console.print(told)
    if rounds:
        _print_paper(console, content, rounds)


def _print_paper(console: Console, content: Mapping[str, Any], rounds: Sequence[Reports]) -> None:
    """Print the paper's table by each reading of its protocol whose truth is known."""
    last, clients = rounds[-1], content["clients"]
    utility = str(last.utility)
    part = content if content["utility"] == utility else content["companions"][utility]

    def named(values: Sequence[float | None] | None) -> dict[str, float] | None:
        found = {} if values is None else dict(zip(clients, values, strict=True))
        known = {name: value for name, value in found.items() if value is not None}
        return known if set(last.clients) <= set(known) else None

    truth = part.get("truth") or {}
    each = {"COS": part["cumulative"].get("COS"), "COS-MODEL": truth.get("COS-MODEL")}
    beside = {name: known for name, values in each.items() if (known := named(values)) is not None}
    scripts, text = (named(truth.get(name)) for name in ("ROUND-SV", "MR-SV"))
    if scripts is None and text is None:
        return
    if last.silent:
        _say(console, words("terminal.paper-none"))
        return
    if scripts is not None:
        _say(console, words("terminal.paper-scripts", utility=utility, round=last.round))
        _print_table(console, _paper_columns(by_scripts(last, scripts, beside)))
    if text is not None:
        _say(console, words("terminal.paper-text", utility=utility, round=last.round))
        _print_table(console, _paper_columns(by_text(last, text, beside)))
    _say(console, words("terminal.paper-notes", round=last.round))


def _paper_columns(rows: Sequence[PaperRow]) -> Columns:
    def numbers(values: Iterable[float | None]) -> list[str]:
        return ["-" if value is None else f"{value:.3f}" for value in values]

    return {
        words("terminal.paper-score"): [row.score for row in rows],
        "Spearman": numbers(row.near.spearman for row in rows),
        "Kendall": numbers(row.near.kendall for row in rows),
        "Pearson": numbers(row.near.pearson for row in rows),
        "L2": numbers(row.near.l2 for row in rows),
        words("terminal.paper-squared"): numbers(row.near.l2**2 for row in rows),
        words("terminal.paper-status"): [words(f"status-short.{row.status}") for row in rows],
    }


def print_plan(console: Console, plan: Plan) -> None:
    """Print what a run will cost: one line per score, then the rest."""
    console.print(
        words(
            "terminal.plan",
            members=plan.members, rounds=plan.rounds, parameters=plan.parameters, device=plan.device,
            trainings=plan.local_trainings, time=_minutes(plan.train_minutes),
        )
    )  # fmt: skip
    each = tuple(f"{printable(name)} {samples:,}" for name, samples in plan.samples)
    console.print(words("terminal.plan-samples", samples=each))
    if plan.costs:
        console.print(_costs(plan))
    memory, sent = plan.memory_bytes / 2**20, plan.bytes_up / 2**20
    console.print(words("terminal.plan-memory", memory=memory, sent=sent))
    if plan.pool:
        console.print(words("terminal.plan-evaluates", models=plan.flower_models))
    samples, (low, high), (few, many) = plan.resolution.samples, plan.resolution.gaps, plan.resolution.needed
    console.print(
        words(
            "terminal.plan-gaps",
            samples=samples, members=plan.members, low=low, high=high, few=few, many=many,
        )
    )  # fmt: skip
    if (last := plan.settlement) is not None:
        received, disk = last.bytes_down / 2**20, last.disk_bytes / 2**20
        console.print(
            words(
                "terminal.plan-settlement",
                samples=last.samples, received=received, disk=disk,
                gradients=last.gradients, time=_minutes(last.minutes),
            )
        )  # fmt: skip


def _costs(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(words("terminal.plan-score"), justify="left", no_wrap=True)
    for header in ("terminal.plan-models", "terminal.plan-trainings", "terminal.plan-time"):
        table.add_column(words(header), justify="right", no_wrap=True)
    for cost in plan.costs:
        table.add_row(cost.name, f"{cost.models:,}", f"{cost.trainings:,}", _minutes(cost.minutes))
    return table


def _minutes(value: float) -> str:
    if value >= 1:
        return words("terminal.minutes", minutes=value)
    return words("terminal.seconds", seconds=value * 60)


# ------------------------------------------------------------------------------------------------ progress


class Step(Protocol):
    """A message from the engine: see `fedmerit.simulation.run.Progress`."""

    stage: Any
    round: int
    rounds: int
    done: int
    total: int
    text: str


Watch = Callable[[Any], None]
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
STAGES = ("train", "sum", "evaluate", "coalitions", "retrain", "settle")
COUNTED = ("measure", "page")
"""What `counting` counts the steps of."""


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """Yield a watch for the engine that shows progress on the console."""
    if not console.is_terminal:
        yield _then_settles(_lines(console), console)
        return
    with Progress(*COLUMNS, console=console, transient=True) as bars:
        yield _then_settles(_bars(bars), bars.console)


def _then_settles(inner: Watch, console: Console) -> Watch:
    """Return a watch that also says, once, when the settlement begins."""
    told = False

    def watch(step: Step) -> None:
        nonlocal told
        inner(step)
        if step.stage == "settle" and not told:
            told = True
            console.print(words("terminal.settling"))

    return watch


@contextmanager
def counting(console: Console, what: str, steps: int) -> Iterator[Callable[[], None]]:
    """Yield what says that one of so many steps is done; a terminal shows a bar, everything else nothing.

    Args:
        console: where the bar goes, and disappears.
        what: code of the words before it, in ``stage``.
        steps: how many there are.
    """
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(
        *COLUMNS, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bars:
        task = bars.add_task(words(f"stage.{what}"), total=steps)
        yield lambda: bars.advance(task)


def _bars(bars: Progress) -> Watch:
    rounds = bars.add_task(words("stage.rounds"), total=None)
    tasks = {stage: bars.add_task(words(f"stage.{stage}"), total=None, visible=False) for stage in STAGES}

    def watch(step: Step) -> None:
        if step.stage == "note":
            bars.console.print(words("terminal.note", text=step.text))
        elif step.stage == "round":
            bars.update(rounds, completed=step.done, total=step.total)
            told = words("terminal.progress", round=step.round, rounds=step.rounds, text=step.text)
            bars.console.print(told)
            for task in tasks.values():
                bars.reset(task, visible=False)
        else:
            bars.update(rounds, total=step.rounds)
            bars.update(tasks[step.stage], completed=step.done, total=step.total or None, visible=True)

    return watch


def _lines(console: Console) -> Watch:
    started = time.monotonic()
    first: list[int] = []

    def watch(step: Step) -> None:
        if step.stage == "note":
            console.print(words("terminal.note", text=step.text))
        elif step.stage == "round":
            first.append(step.round)
            pace = (time.monotonic() - started) / len(first)
            left = pace * (step.rounds - step.round)
            told = words(
                "terminal.progress-left", round=step.round, rounds=step.rounds, text=step.text, left=left
            )
            console.print(told)

    return watch
