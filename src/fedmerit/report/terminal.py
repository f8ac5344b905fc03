"""Facts on a terminal: tables of standings and payouts, notes, plans, and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedmerit.ledger.rounds import in_words
from fedmerit.notes import signed, words
from fedmerit.report.comparison import Comparison
from fedmerit.report.facts import Facts
from fedmerit.report.panel import Reading
from fedmerit.report.payment import Proposal
from fedmerit.report.source import Source
from fedmerit.report.text import (
    amounts_text,
    budget_text,
    cell_text,
    findings,
    printable,
    rank_text,
    samples_text,
    share_text,
    span_text,
    sure_share_text,
    total_text,
)
from fedmerit.scoring.doubts import Doubt
from fedmerit.scoring.ground_truth import PaperRow, paper_table
from fedmerit.scoring.types import Reports

if TYPE_CHECKING:
    from fedmerit.simulation.plan import Plan
    from fedmerit.simulation.run import Progress as Step

# -------------------------------------------------------------------------------------------------- tables

Columns = dict[str, list[str]]
"""Heading -> cells; the first column holds names."""


def print_facts(console: Console, facts: Facts, *, last_round: bool = False) -> None:
    """Print the doubts, the ranking by which members are paid, what it shows, and notes.

    ``last_round`` adds the scores of the last round, in a table of their own, because they are no sums.
    """
    unsettled = [words("terminal.unsettled", why=facts.source.unsettled)] if facts.source.unsettled else []
    warn(console, [*unsettled, *facts.doubts])
    first = _standings(facts)
    if not _fits(first, console.width):
        first = _standings(facts, sure=False)
    _print_table(console, first)
    if facts.panel is not None:
        _print_panel(console, facts, facts.panel)
    if facts.total.status != "ok":
        told = words(f"status-short.{facts.total.status}")
        _say(console, words("terminal.status-sum", score=facts.total.score, status=told))
    for line in findings(facts):
        _say(console, line)
    if last_round and facts.last is not None:
        _say(console, words("terminal.last-round", round=facts.last.round))
        _print_table(console, _last_round(facts))
        for name, status in facts.status.items():
            if status != "ok":
                _say(console, words("terminal.status", score=name, status=words(f"status-short.{status}")))
    left_out = in_words(tuple(facts.source.aborted), facts.source.unreported)
    tell_notes(console, (*facts.notes, *left_out))


def _standings(facts: Facts, *, sure: bool = True) -> Columns:
    """Return the columns of the standings; ``sure`` says whether shares have intervals."""
    standings = facts.standings
    shares = [sure_share_text(one) if sure else share_text(one.share) for one in standings]
    columns = {
        words("column.member"): [printable(one.client) for one in standings],
        facts.total.score.lower(): [total_text(one) for one in standings],
        words("column.rank"): [rank_text(one) for one in standings],
        words("column.share"): shares,
    }
    if (panel := facts.panel) is not None:
        columns[words("helped.gave")] = [signed(panel.gave[one.client], one.digits) for one in standings]
        received = (signed(panel.received[one.client], one.digits) for one in standings)
        columns[words("helped.received")] = [*received]
    if facts.settled and facts.source.rounds:
        columns["alpha"] = [signed(one.reported, one.digits) for one in standings]
    if any(one.coverage < 1 for one in standings):
        columns[words("column.rounds")] = [share_text(one.coverage, 0) for one in standings]
    if any(one.samples is not None for one in standings):
        columns[words("column.samples")] = [samples_text(one.samples) for one in standings]
    return columns


def _print_panel(console: Console, facts: Facts, panel: Reading) -> None:
    """Print who helped whom, whoever gave most first; a panel that is too wide is on the page."""
    names, whole = panel.order, panel.whole
    cells: dict[int, list[str]] = {}
    for b in (b for b in names if whole.clients[b] in facts.account.columns):
        said = [cell_text(facts, value) for value in whole.matrix[names, b].tolist()]
        cells[b] = [f"({text})" if i == b else f"{text} " for i, text in zip(names, said, strict=True)]
    rows, title = [printable(whole.clients[i]) for i in names], words("helped.who")
    columns = {title: rows} | {printable(whole.clients[b]): column for b, column in cells.items()}
    if not _fits(columns, console.width):  # numbers stand for the judges
        rows = [f"{place} {name}" for place, name in enumerate(rows, start=1)]
        columns = {title: rows} | {str(1 + names.index(b)): column for b, column in cells.items()}
    if not _fits(columns, console.width):
        _say(console, words("helped.too-wide"))
        return
    _print_table(console, columns)
    _say(console, words("helped.read", points=facts.unit != 1))


def _last_round(facts: Facts) -> Columns:
    """Return the columns of the last round, which stand in a table of their own: they are no sums."""
    columns = {words("column.member"): [printable(name) for name in facts.standing]}
    for key in ("LOO", "FP", "EE"):
        scores = facts.last_scores.get(key)
        values = scores.as_dict() if scores else {}
        columns[key] = [signed(values.get(name), facts.digits) for name in facts.standing]
    return columns


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


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style=style))


quiet = ContextVar("quiet", default=False)
"""Whether notes and progress are left out."""


def warn(console: Console, doubts: Sequence[Doubt | str]) -> None:
    """Print doubts as warnings; to their readers, they name a suspected member."""
    for doubt in doubts:
        told = doubt if isinstance(doubt, str) else doubt.told
        _say(console, words("terminal.warning", text=told), style="yellow")


def tell_planted(console: Console, source: Source) -> None:
    """Print which faults the settings of a run planted, if any."""
    if source.planted:
        _say(console, source.planted)


def tell_notes(console: Console, notes: Iterable[str], *, name: str = "") -> None:
    """Print notes, with the name of their file if there are several."""
    for note in () if quiet.get() else notes:
        _say(console, words("terminal.note", text=f"{name}: {note}" if name else note))


def print_proposal(console: Console, found: Proposal) -> None:
    """Print doubts, the share and amount of each member (also of those who never reported), and notes."""
    warn(console, [*found.warnings, *found.facts.doubts])
    columns = {
        words("column.member"): [printable(one.client) for one in found.lines],
        words("column.share"): [share_text(one.share, 2) for one in found.lines],
        words("column.payout"): [f"{one.amount:,}" for one in found.lines],
    }
    if found.spans is not None:
        columns[words("column.share-span")] = [span_text(one.share_span) for one in found.lines]
        columns[words("column.payout-span")] = [amounts_text(one.amount_span) for one in found.lines]
    _print_table(console, columns)
    _say(console, budget_text(found.paid, found.shares.rule))
    if found.spans is not None:
        _say(console, words("terminal.spans" if found.facts.panel is None else "terminal.spans-panel"))
    elif found.shares.rule != "equal" and found.facts.total.stderr is None:
        _say(console, words("money.unsure"))
    if found.apart:
        _say(console, found.apart)
    tell_notes(console, found.notes)


def print_comparison(console: Console, found: Comparison) -> None:
    """Print what training again changed: doubts, a table of members, findings, notes."""
    for label, run in zip(found.labels, found.runs, strict=True):
        warn(console, [words("compare.doubt", run=label, doubt=str(doubt)) for doubt in run.facts.doubts])
    rows = found.rows
    columns = {
        words("column.member"): [printable(one.client) for one in rows],
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
        _print_table(console, {words("column.member"): columns[words("column.member")], **each})
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
    tell_notes(console, found.notes)


def print_truth(console: Console, facts: Facts) -> None:
    """Print that plain updates were analysed, how close scores come to the truth, and the paper's table."""
    console.print(words("terminal.analysis"))
    for utility, kind, near in facts.near_truth("MR-SV", "ROUND-SV", "SV"):
        each = tuple(f"{score} {'-' if value is None else f'{value:.2f}'}" for score, value in near.items())
        scores = "terminal.spearman-last" if kind == "ROUND-SV" else "terminal.spearman"
        console.print(words(scores, truth=words(f"truth.{kind}"), utility=utility, found=each))
    part = facts.source.analysed.get(str(facts.utility))
    if part is not None and facts.last is not None:
        _print_paper(console, facts, facts.last, part)


def _print_paper(console: Console, facts: Facts, last: Reports, part: Mapping[str, Any]) -> None:
    """Print the paper's table by each reading of its protocol whose truth is known."""

    def named(values: Sequence[float | None] | None) -> dict[str, float] | None:
        pairs = zip(facts.source.clients, values or (), strict=values is not None)
        known = {name: value for name, value in pairs if value is not None}
        return known if set(last.clients) <= set(known) else None

    truth, about = part["truth"], {"utility": str(last.utility), "round": last.round}
    cosines = {"COS": part["cumulative"].get("COS"), "COS-MODEL": truth.get("COS-MODEL")}
    beside = {name: known for name, values in cosines.items() if (known := named(values)) is not None}
    scripts, text = (named(truth.get(name)) for name in ("ROUND-SV", "MR-SV"))
    if scripts is None and text is None:
        return
    if last.silent:
        _say(console, words("terminal.paper-none"))
        return
    if scripts is None:
        _say(console, words("terminal.paper-unfinished"))
    else:
        _say(console, words("terminal.paper-scripts", **about))
        _print_table(console, _paper_columns(paper_table(last, scripts, beside, by="scripts")))
    if text is not None:
        _say(console, words("terminal.paper-text", **about))
        _print_table(console, _paper_columns(paper_table(last, text, beside, by="text")))
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
    """Print what the test set can tell apart, then what a run will cost."""
    if (found := plan.resolution) is not None:
        low, high = (100 * gap for gap in found.gaps)
        said = {"samples": found.samples, "members": plan.members, "utility": plan.utility}
        fair = 50 / plan.members
        console.print(words("terminal.plan-gaps", **said, low=low, high=high, fair=fair))
        some = "terminal.plan-sees-some" if low < fair else "terminal.plan-sees-few"
        console.print(words("terminal.plan-sees-most" if high < fair else some))
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
        _print_table(console, _costs(plan))
    memory, sent = plan.memory_bytes / 2**20, plan.bytes_up / 2**20
    console.print(words("terminal.plan-memory", memory=memory, sent=sent))
    if plan.pool:
        console.print(words("terminal.plan-evaluates", models=plan.flower_models))
    if (last := plan.settlement) is not None:
        received, disk = last.bytes_down / 2**20, last.disk_bytes / 2**20
        console.print(
            words(
                "terminal.plan-settlement",
                samples=last.samples, received=received, disk=disk,
                gradients=last.gradients, time=_minutes(last.minutes),
            )
        )  # fmt: skip


def _costs(plan: Plan) -> Columns:
    return {
        words("terminal.plan-score"): [cost.name for cost in plan.costs],
        words("terminal.plan-models"): [f"{cost.models:,}" for cost in plan.costs],
        words("terminal.plan-trainings"): [f"{cost.trainings:,}" for cost in plan.costs],
        words("terminal.plan-time"): [_minutes(cost.minutes) for cost in plan.costs],
    }


def _minutes(value: float) -> str:
    """Return a duration in the unit in which people would say it.

    >>> [_minutes(value) for value in (0.5, 90, 150, 39142.9)]
    ['30.0 s', '90.0 min', '2 hours', '27 days']
    """
    if value >= 2 * 24 * 60:
        return words("terminal.days", days=value / (24 * 60))
    if value >= 2 * 60:
        return words("terminal.hours", hours=value / 60)
    if value >= 1:
        return words("terminal.minutes", minutes=value)
    return words("terminal.seconds", seconds=value * 60)


# ------------------------------------------------------------------------------------------------ progress


Watch = Callable[["Step"], None]
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
STAGES = ("train", "sum", "evaluate", "coalitions", "retrain", "settle")
LONG = ("coalitions", "retrain")
"""Stages that may take minutes: without bars, a line tells their progress now and then."""
LATELY = 10.0
"""Seconds between two such lines."""
COUNTED = ("measure", "page")
"""What `counting` counts the steps of."""


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """Yield a watch for the engine that shows its progress on the console, and once that it now settles."""
    if quiet.get():
        yield lambda _: None
        return
    settling = False

    def watch(step: Step) -> None:
        nonlocal settling
        if step.stage == "note":
            console.print(words("terminal.note", text=step.text))
            return
        show(step)
        if step.stage == "settle" and not settling:
            settling = True
            console.print(words("terminal.settling"))

    if not console.is_terminal:
        show = _lines(console)
        yield watch
        return
    with Progress(*COLUMNS, console=console, transient=True) as bars:
        show = _bars(bars)
        yield watch


@contextmanager
def counting(console: Console, what: str, steps: int) -> Iterator[Callable[[], None]]:
    """Yield what says that one of so many steps is done; a terminal shows a bar for ``what``."""
    if quiet.get() or not console.is_terminal:
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
        if step.stage == "round":
            bars.update(rounds, completed=step.done, total=step.total)
            line = words("terminal.progress", round=step.round, rounds=step.rounds, text=step.text)
            bars.console.print(line)
            for task in tasks.values():
                bars.reset(task, visible=False)
        else:
            bars.update(rounds, total=step.rounds)
            bars.update(tasks[step.stage], completed=step.done, total=step.total or None, visible=True)

    return watch


def _lines(console: Console) -> Watch:
    began, seen, told = time.monotonic(), 0, time.monotonic()

    def watch(step: Step) -> None:
        nonlocal began, seen, told
        now = time.monotonic()
        if step.stage == "round":
            seen += 1
            left = _minutes((now - began) / seen * (step.rounds - step.round) / 60)
            if step.round == 1:  # with the start of the run, it says little of the others
                began, seen = now, 0
            values = {"round": step.round, "rounds": step.rounds, "text": step.text, "left": left}
            code = "terminal.progress-left" if step.round < step.rounds else "terminal.progress"
            console.print(words(code, **values))
        elif step.stage not in LONG or now - told < LATELY:
            return
        else:
            stage = words(f"stage.{step.stage}")
            console.print(words("terminal.progress-stage", stage=stage, done=step.done, total=step.total))
        told = now

    return watch
