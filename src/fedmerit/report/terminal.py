"""A summary of finished reports (who contributed how much, how sure that is), and its terminal output."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedmerit.errors import UndefinedShares
from fedmerit.notes import Note, made_worse
from fedmerit.scoring.accumulate import Missing, accumulate, number_of
from fedmerit.scoring.agreement import agreement
from fedmerit.scoring.doubts import Doubt, doubts
from fedmerit.scoring.files import scores_of
from fedmerit.scoring.rewards import Payouts, Shares, shares
from fedmerit.scoring.types import Reports, Scores, rounding
from fedmerit.scoring.uncertainty import holm, indistinguishable, intervals, rank_intervals

if TYPE_CHECKING:
    from fedmerit.simulation.plan import Plan

# --------------------------------------------------------------------------------------------- the summary

MOST_COMPARED = 1000
"""With more clients pairs are not compared: that takes N^2 memory, and the groups are too long to read."""


@dataclass(frozen=True)
class Standing:
    """One line of the table; a value that is unknown is None."""

    client: str
    rank: int
    rank_interval: tuple[int, int] | None
    total: float
    interval: tuple[float, float] | None
    coverage: float
    last: dict[str, float | None]  # LOO, FP, EE of the last round
    share: float | None
    samples: float | None
    digits: int = 4  # decimals to show for numbers of this size
    surely: int = 0  # 1: total surely above zero, -1: surely below; at 95 % for all members together


@dataclass(frozen=True)
class Summary:
    """Standings, best first, and what readers should know before they rely on them."""

    standings: tuple[Standing, ...]
    total: Scores
    last: Reports
    status: Mapping[str, str]  # of FP and EE in the last round
    groups: tuple[tuple[str, ...], ...]  # statistically indistinguishable members
    suspects: tuple[str, ...]  # reported in every round and significantly below all others
    notes: tuple[str, ...]
    doubts: tuple[Doubt, ...] = ()  # shown before everything else

    @property
    def withheld(self) -> bool:
        """Whether a doubt forbids praising or accusing members by these numbers until it is resolved."""
        return any(one.withholds for one in self.doubts)

    @property
    def digits(self) -> int:
        """Decimals to show for contributions of this size."""
        return self.standings[0].digits


def summarise(
    rounds: Sequence[Reports],
    *,
    score: str = "ALPHA",
    missing: Missing = "zero",
    clients: Sequence[str] = (),
    game: str | None = None,
) -> Summary:
    """Sum a score over rounds, with intervals, ranks and shares, and the last round's LOO, FP and EE.

    Args:
        rounds: reports in order; at least one.
        score: see :func:`fedmerit.scoring.accumulate`.
        missing: see :func:`fedmerit.scoring.accumulate`.
        clients: the whole roster, if known; members who never reported are noted.
        game: see :func:`fedmerit.scoring.doubts.doubts`.
    """
    total = accumulate(rounds, score=score, missing=missing)
    last = rounds[-1]
    found = scores_of(last)
    notes = [*total.notes, *absences(rounds, clients)]
    for one in found.values():
        notes += one.notes if one else ()
    try:
        divided = shares(total)
        notes += divided.notes
    except UndefinedShares as error:
        divided = None
        notes.append(Note("no-shares", why=error.note))
    spans, ranks = None, None
    signs = [0] * total.n
    groups: tuple[tuple[str, ...], ...] = ()
    suspects: tuple[str, ...] = ()
    if total.stderr is not None:
        spans, ranks, signs = intervals(total), rank_intervals(total), sure_signs(total)
        if total.n <= MOST_COMPARED:
            groups = indistinguishable(total)
        if total.n > 1:
            last_for_sure = ranks[:, 0] == total.n
            if total.coverage is not None:  # nobody is accused for missed rounds
                last_for_sure &= total.coverage >= 1
            suspects = tuple(name for name, sure in zip(total.clients, last_for_sure, strict=True) if sure)
    at = {name: i for i, name in enumerate(total.clients)}
    of_last = {name: k for k, name in enumerate(last.clients)}
    samples = {} if last.samples is None else dict(zip(last.clients, last.samples.tolist(), strict=True))
    standings = []
    places = total.ranks()
    digits = digits_for(float(np.max(np.abs(total.raw))))
    for name in total.ranking():
        i, k = at[name], of_last.get(name)
        round_scores: dict[str, float | None] = {}
        for key in ("LOO", "FP", "EE"):
            one = found.get(key)
            round_scores[key] = None if one is None or k is None else float(one.values[k])
        standings.append(
            Standing(
                client=name,
                rank=int(places[i]),
                rank_interval=None if ranks is None else (int(ranks[i, 0]), int(ranks[i, 1])),
                total=float(total.raw[i]),
                interval=None if spans is None else (float(spans[i, 0]), float(spans[i, 1])),
                coverage=1.0 if total.coverage is None else float(total.coverage[i]),
                last=round_scores,
                share=None if divided is None else divided[name],
                samples=samples.get(name),
                digits=digits,
                surely=signs[i],
            )
        )
    status = {key: one.status for key in ("FP", "EE") if (one := found.get(key)) is not None}
    return Summary(
        standings=tuple(standings),
        total=total,
        last=last,
        status=status,
        groups=groups,
        suspects=suspects,
        notes=tuple(dict.fromkeys(notes)),
        doubts=doubts(rounds, game=game),
    )


def sure_signs(scores: Scores, *, level: float = 0.95) -> list[int]:
    r"""Return 1 if a client's raw score is surely above zero, -1 if surely below, 0 otherwise.

    All claims together are right with the given level. This is Holm's method (1979) over the 2N one-sided
    hypotheses "at most 0" and "at least 0", two for each client:

    .. math:: |\mathrm{raw}_i| > z_{1 - a/(2N - k)} \, s_i, \qquad a = 1 - \mathrm{level}

    with k the number of clients found so far. Separate intervals would not suffice: with 19 clients that
    contributed nothing, 38 % of all test sets put at least one below zero.

    Args:
        scores: N clients, with ``stderr``.
        level: in (0, 1).

    >>> s = Scores(score="ALPHA", clients=("A", "B", "C"), values=[1, -2.2, -9], raw=[1, -2.2, -9], gain=4,
    ...            stderr=[1, 1, 1])
    >>> sure_signs(s)
    [0, 0, -1]
    """
    assert scores.stderr is not None
    size, noise, stderr = np.abs(scores.raw), rounding(scores.raw), scores.stderr

    def sure(critical: float) -> npt.NDArray[np.bool_]:
        return np.asarray(size > critical * stderr + noise)

    critical = holm(lambda c: int(np.count_nonzero(sure(c))), 2 * scores.n, level)
    return [int(sign) for sign in np.sign(scores.raw) * sure(critical)]


def digits_for(largest: float) -> int:
    """Return the decimals for numbers up to this size: 4 as a rule, more for small, fewer for large ones.

    >>> [digits_for(size) for size in (0.0, 2e-5, 0.03, 1.0, 20_000.0, 1e9)]
    [4, 7, 4, 4, 2, 0]
    """
    if not largest:
        return 4
    power = math.floor(math.log10(largest))
    return min(15, 2 - power) if power < -2 else 4 if power < 3 else max(0, 6 - power)


def absences(rounds: Sequence[Reports], clients: Sequence[str]) -> Iterator[Note]:
    """Yield notes on members who were summed without a report, and on those who were in no round at all."""
    missed: dict[str, list[int]] = {}
    for place, reports in enumerate(rounds, start=1):
        for name in reports.silent:
            missed.setdefault(name, []).append(number_of(reports, place))
    for name, when in missed.items():
        yield Note("silent", client=name, rounds=when)
    seen = {name for reports in rounds for name in (*reports.clients, *reports.silent)}
    for name in clients:
        if name not in seen:
            yield Note("only-listed", client=name)


def unscored(rounds: Sequence[Reports], clients: Sequence[str] = ()) -> tuple[str, ...]:
    """Return members who are on the roster, or were in a sum, and never reported."""
    silent = (name for reports in rounds for name in reports.silent)
    reported = {name for reports in rounds for name in reports.clients}
    return tuple(name for name in dict.fromkeys((*clients, *silent)) if name not in reported)


# -------------------------------------------------------------------------------------------------- tables

MOST_NAMED = 20
"""The most members that a plan names."""


def print_summary(console: Console, summary: Summary, *, utility: str | None) -> None:
    """Print the doubts, the table of standings, then the notes."""
    for doubt in summary.doubts:
        _say(console, f"WARNING: {doubt}")
    total = summary.total
    rounds = f"{total.rounds} round{'s' if total.rounds > 1 else ''}"
    caption = f"{total.score} summed over {rounds}"
    if utility:
        caption += f", utility {utility}"
    first, last = _standings(summary), _last_round(summary)
    both = {**first, **last}
    if _fits(both, console.width):
        _print_table(console, both)
    else:
        _print_table(console, first)
        _print_table(console, {"client": first["client"], **last})
    gain, summed = (signed(value, summary.digits) for value in (total.gain, float(total.raw.sum())))
    _say(console, f"{caption}; gain {gain}, sum of {total.score} {summed}")
    _say(console, f"LOO, FP, EE: of round {summary.last.round} alone")
    for name, status in summary.status.items():
        if status != "ok":
            _say(console, f"{name} of the last round is {status}: do not rank or pay by it")
    told = [group for group in summary.groups if len(group) > 1]
    if told:
        _say(console, "cannot be told apart: " + "; ".join(", ".join(group) for group in told))
    if total.stderr is None:
        _say(console, "no standard errors were reported: how sure this is cannot be said")
    else:
        _say(
            console, "±: 95 % interval, sampling error of the test set in this run; (a-b): ranks it may have"
        )
    if total.score == "ALPHA" and not summary.withheld and (worse := made_worse(summary.standings)):
        _say(console, worse)
    for name in () if summary.withheld else summary.suspects:
        _say(console, f"{name} is significantly below everybody else: worth a conversation")
    for note in summary.notes:
        _say(console, f"note: {note}")


Columns = dict[str, list[str]]


def _standings(summary: Summary) -> Columns:
    standings = summary.standings
    columns = {
        "client": [printable(one.client) for one in standings],
        summary.total.score.lower(): [total_text(one) for one in standings],
        "rank": [rank_text(one) for one in standings],
        "share": ["-" if one.share is None else f"{one.share:.1%}" for one in standings],
    }
    if any(one.coverage < 1 for one in standings):
        columns["rounds"] = [f"{one.coverage:.0%}" for one in standings]
    if any(one.samples is not None for one in standings):
        columns["samples"] = ["-" if one.samples is None else f"{one.samples:.0f}" for one in standings]
    return columns


def _last_round(summary: Summary) -> Columns:
    return {
        key: [signed(one.last[key], one.digits) for one in summary.standings] for key in ("LOO", "FP", "EE")
    }


def total_text(one: Standing) -> str:
    if one.interval is None:
        return bare_text(one)
    return f"{bare_text(one)} ± {(one.interval[1] - one.interval[0]) / 2:.{one.digits}f}"


def bare_text(one: Standing) -> str:
    return signed(one.total, one.digits)


def rank_text(one: Standing) -> str:
    if one.rank_interval is None or one.rank_interval[0] == one.rank_interval[1]:
        return str(one.rank)
    return f"{one.rank} ({one.rank_interval[0]}-{one.rank_interval[1]})"


def signed(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:+.{digits}f}"


def _fits(columns: Columns, width: int) -> bool:
    """Return whether the columns fit side by side with at least a dozen characters for a long name."""
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    widths["client"] = min(widths["client"], 12)
    return sum(widths.values()) + 3 * len(widths) + 1 <= width


def _print_table(console: Console, columns: Columns) -> None:
    """Print columns side by side as rich would, but fast enough for ten thousand rows."""
    console.out("\n".join(table_lines(columns, console.width)), highlight=False)


def table_lines(columns: Columns, width: int) -> list[str]:
    """Return the lines of a table: names on the left, wrapped if long; numbers on the right, never cut."""
    widths = {name: max(map(cell_len, (name, *cells))) for name, cells in columns.items()}
    if "client" in widths:
        rest = sum(widths.values()) - widths["client"] + 3 * len(widths) + 1
        least = min(12, max(map(cell_len, columns["client"])))
        widths["client"] = max(min(widths["client"], width - rest), least)

    def line(cells: Sequence[str]) -> str:
        padded = (
            set_cell_size(cell, size) if name == "client" else " " * (size - cell_len(cell)) + cell
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


def printable(text: str) -> str:
    r"""Return text that is safe on a terminal: characters that move the cursor or break lines are escaped.

    >>> print(printable("north\x1b[2J"))
    north\x1b[2J
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def print_payouts(
    console: Console,
    paid: Payouts,
    divided: Shares,
    *,
    unscored: Sequence[str] = (),
    warning: str = "",
    doubts: Sequence[Doubt] = (),
) -> None:
    """Print doubts, the share and amount of each member (also of those who never reported), and notes."""
    if warning:
        _say(console, f"WARNING: {warning}")
    for doubt in doubts:
        _say(console, f"WARNING: {doubt}")
    best_first = sorted(paid.items(), key=lambda item: (-item[1], item[0]))
    best_first += [(name, Decimal(0)) for name in unscored]
    columns = {
        "client": [printable(name) for name, _ in best_first],
        "share": [f"{divided.by_client.get(name, 0.0):.2%}" for name, _ in best_first],
        "payout": [f"{amount:,.2f}" for _, amount in best_first],
    }
    _print_table(console, columns)
    _say(console, f"budget {paid.budget:,.2f}, rule {divided.rule}, unpaid {paid.unpaid:,.2f}")
    for note in divided.notes:
        _say(console, f"note: {note}")


def print_truth(console: Console, content: Mapping[str, Any]) -> None:
    """Print that plain updates were analysed, and how close the summed scores come to the ground truth."""
    console.print("analysis: plain updates were looked at, which secure aggregation would have hidden")
    for utility, part in ((content["utility"], content), *content["companions"].items()):
        for name in ("MR-SV", "SV"):
            truth = part.get("truth", {}).get(name)
            if truth is None:
                continue
            found = []
            for score, values in part["cumulative"].items():
                spearman = None if None in values else agreement(values, truth).spearman
                found.append(f"{score} {'-' if spearman is None else format(spearman, '.2f')}")
            what = "retrained Shapley value" if name == "SV" else name
            console.print(f"Spearman with the {what} of {utility}: {', '.join(found)}")


def print_plan(console: Console, plan: Plan) -> None:
    """Print what a run will cost: one line per score, then the rest."""
    console.print(
        f"{plan.members} members, {plan.rounds} rounds, {plan.parameters:,} parameters, on {plan.device}: "
        f"{plan.local_trainings} local trainings, about {_minutes(plan.train_minutes)}"
    )
    each = [f"{printable(name)} {samples:,}" for name, samples in plan.samples[:MOST_NAMED]]
    more = f" and {len(plan.samples) - MOST_NAMED} more members" if len(plan.samples) > MOST_NAMED else ""
    console.print(f"training samples: {', '.join(each)}{more}")
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("score", "models to evaluate", "more trainings", "time"):
        table.add_column(header, justify="left" if header == "score" else "right", no_wrap=True)
    for cost in plan.costs:
        table.add_row(cost.name, f"{cost.models:,}", f"{cost.trainings:,}", _minutes(cost.minutes))
    console.print(table)
    console.print(
        f"memory about {plan.memory_bytes / 2**20:,.0f} MiB; each member sends "
        f"{plan.bytes_up / 2**20:,.1f} MiB a round; "
        f"a member that evaluates for itself needs up to {plan.flower_models} models a round"
    )
    low, high = plan.gaps
    console.print(
        f"{plan.pool} test samples tell two members apart in one round if their alpha differs by "
        f"{low:.3f} to {high:.3f} (80 % power, 5 % level; the range is that of the committed experiments)"
    )


def _minutes(value: float) -> str:
    return f"{value:.1f} min" if value >= 1 else f"{value * 60:.1f} s"


COMMAND = {
    "undefined": "{reason}; {option} equal or zero would say what to do then",
    "undefined-decided": "{reason}; {option} {decided} decided",
    "doubted": (
        "nothing is paid: {doubts:spaced} --despite-doubts pays all the same; the ledger of a run then "
        "says so"
    ),
}
"""Words of notes on the command line, which names options where the library names arguments."""
OPTION = "fedmerit rewards --on-undefined"


def advice(text: str, option: str = OPTION) -> str:
    """Return a message of the library that names the option in place of the argument.

    >>> fenced = Note("all-fenced", score="LOO")
    >>> print(advice(Note("undefined-decided", reason=fenced, decided="zero"), "--on-undefined"))
    the fence leaves no positive LOO: the others' scores are all too low; --on-undefined zero decided
    """
    return text.worded(COMMAND, option=option) if isinstance(text, Note) else text


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
_WORDS = {
    "train": "members training",
    "sum": "secure sum",
    "evaluate": "members evaluating",
    "coalitions": "coalitions",
    "retrain": "retraining",
}


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """Yield a watch for the engine that shows progress on the console."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield _bars(bars)


def _bars(bars: Progress) -> Watch:
    rounds = bars.add_task("rounds", total=None)
    tasks = {stage: bars.add_task(words, total=None, visible=False) for stage, words in _WORDS.items()}

    def watch(step: Step) -> None:
        if step.stage == "note":
            bars.console.print(f"note: {step.text}")
        elif step.stage == "round":
            bars.update(rounds, completed=step.done, total=step.total)
            bars.console.print(f"round {step.round}/{step.rounds}: {step.text}")
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
            console.print(f"note: {step.text}")
        elif step.stage == "round":
            first.append(step.round)
            pace = (time.monotonic() - started) / len(first)
            left = pace * (step.rounds - step.round)
            console.print(f"round {step.round}/{step.rounds}: {step.text} ({left:.0f} s left)")

    return watch
