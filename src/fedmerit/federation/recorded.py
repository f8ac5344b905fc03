"""The reports of a run folder, from its ledger: what was recorded, also where the score files are older."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmerit.config import Config
from fedmerit.errors import FileFormatError, StoreError
from fedmerit.federation.journal import Round, rounds_of
from fedmerit.federation.steady import Snapshot, snapshot
from fedmerit.federation.unscored import aborted, about, numbered, unreported
from fedmerit.federation.verify import config_of
from fedmerit.layout import LEDGER
from fedmerit.reading import Content
from fedmerit.secagg.setting import LEAST_IN_SUM
from fedmerit.types import Reports


@dataclass(frozen=True)
class Recorded:
    """What a run's ledger said at one moment, ready to be scored."""

    ledger: Snapshot
    config: Config
    rounds: tuple[Round, ...]
    content: Content

    @property
    def notes(self) -> tuple[str, ...]:
        """About rounds that are in no score."""
        return tuple(about(self.rounds))


def recorded(folder: str | Path, *, utility: str | None = None) -> Recorded:
    """Reports of all rounds of a run that have any.

    Args:
        folder: of the run, with its ledger; records are read, not verified.
        utility: which one, the paid one unless given.

    Raises:
        StoreError: no round is scored; it says what the ledger holds, and what to do where the run is over.
    """
    path = Path(folder) / LEDGER
    ledger = snapshot(path)
    if not (len(ledger) or ledger.damaged):
        raise StoreError(f"{folder}: no round is scored yet: its ledger is empty")
    config, rounds = config_of(ledger), rounds_of(ledger)
    utilities = config.scoring.utilities
    if utility is not None and utility not in utilities:
        raise FileFormatError(f"{path}: has no utility {utility!r}; it has {', '.join(utilities)}")
    scored = scored_in(rounds, utility or utilities[0])
    if not scored:
        holds = _holds(ledger, rounds, config)
        if len(rounds) < config.training.rounds:
            raise StoreError(f"{folder}: no round is scored yet: {holds}")
        raise StoreError(
            f"{folder}: no round was scored, and the run is over: {holds}; "
            f"start another in a new folder, with {_needed(rounds, config)}"
        )
    return Recorded(ledger, config, tuple(rounds), Content(scored, config.clients))


def scored_in(rounds: Sequence[Round], utility: str) -> list[Reports]:
    """What the scores take, of the rounds that somebody reported on."""
    return [found for one in rounds if (found := one.to_reports(utility)) is not None]


def _holds(ledger: Snapshot, rounds: Sequence[Round], config: Config) -> str:
    """What there is in place of scores."""
    begun = max((record.body["round"] for record in ledger.records("schedule")), default=0)
    said = []
    if why := [f"(round {one.number}: {one.aborted})" for one in rounds if one.aborted]:
        said.append(f"{numbered(aborted(rounds))} aborted {why[-1]}")
    if without := unreported(rounds):
        said.append(f"{numbered(without)} summed, but without any report")
    if begun > len(rounds):
        said.append(f"round {begun} begun and not closed")
    closed = f"{len(rounds)} of {config.training.rounds} rounds closed"
    return f"its ledger holds {len(ledger)} records, {'; '.join([closed, *said])}"


def _needed(rounds: Sequence[Round], config: Config) -> str:
    """What a run like this one lacked."""
    if not aborted(rounds):
        return "members that report"
    lower = ""
    if config.threshold > LEAST_IN_SUM:
        lower = " or a lower secure_aggregation.threshold, which protects less"
    return f"more members that stay to the end of a round{lower}"
