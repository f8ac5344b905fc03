"""Summaries and payouts as tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from fedmerit.money import Payouts
from fedmerit.rewards import Shares
from fedmerit.summary import Standing, Summary


def print_summary(console: Console, summary: Summary, *, utility: str | None, title: str = "") -> None:
    """Who, how much, how sure; then what to know about it."""
    total = summary.total
    rounds = f"{total.rounds} round{'s' if total.rounds > 1 else ''}"
    caption = f"{total.score} summed over {rounds}"
    if utility:
        caption += f", utility {utility}"
    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", caption_justify="left")
    headers = ["client", total.score.lower(), "rank", "share", "LOO", "FP", "EE"]
    if any(one.coverage < 1 for one in summary.standings):
        headers.append("rounds")
    if any(one.samples is not None for one in summary.standings):
        headers.append("samples")
    for header in headers:
        table.add_column(header, justify="left" if header == "client" else "right", no_wrap=True)
    for one in summary.standings:
        table.add_row(*_cells(one, summary))
    console.print(table)
    console.print(f"{caption}; gain {total.gain:+.4f}, sum of {total.score} {float(total.raw.sum()):+.4f}")
    console.print(f"LOO, FP, EE: of round {summary.last.round} alone")
    for name, status in summary.status.items():
        if status != "ok":
            console.print(f"{name} of the last round is [bold]{status}[/bold]: do not rank or pay by it")
    told = [group for group in summary.groups if len(group) > 1]
    if told:
        console.print("cannot be told apart: " + "; ".join(", ".join(group) for group in told))
    if total.stderr is None:
        console.print("no standard errors were reported: how sure this is cannot be said")
    else:
        console.print(
            "±: 95 % interval, sampling error of the test set in this run; (a-b): ranks it may have"
        )
    for name in summary.suspects:
        console.print(f"[bold]{name}[/bold] is significantly below everybody else: worth a conversation")
    for note in summary.notes:
        console.print(f"note: {note}")


def _cells(one: Standing, summary: Summary) -> list[str]:
    total = f"{one.total:+.4f}"
    if one.interval is not None:
        total += f" ± {(one.interval[1] - one.interval[0]) / 2:.4f}"
    cells = [one.client, total]
    rank = str(one.rank)
    if one.rank_interval is not None and one.rank_interval[0] != one.rank_interval[1]:
        rank = f"{one.rank} ({one.rank_interval[0]}-{one.rank_interval[1]})"
    cells += [rank, "-" if one.share is None else f"{one.share:.1%}"]
    cells += ["-" if value is None else f"{value:+.4f}" for value in one.last.values()]
    if any(other.coverage < 1 for other in summary.standings):
        cells.append(f"{one.coverage:.0%}")
    if any(other.samples is not None for other in summary.standings):
        cells.append("-" if one.samples is None else f"{one.samples:.0f}")
    return cells


def print_payouts(console: Console, paid: Payouts, divided: Shares) -> None:
    """Name, share, amount; what is left; what to know about it."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("client")
    table.add_column("share", justify="right")
    table.add_column("payout", justify="right")
    for name, amount in sorted(paid.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(name, f"{divided[name]:.2%}", f"{amount:,.2f}")
    console.print(table)
    console.print(f"budget {paid.budget:,.2f}, rule {divided.rule}, unpaid {paid.unpaid:,.2f}")
    for note in divided.notes:
        console.print(f"note: {note}")
