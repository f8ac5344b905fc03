"""Progress of a run: bars with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Step(Protocol):
    """What the engine tells: see `fedmerit.federation.embedded.Progress`."""

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
    """A function to give to the engine."""
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
