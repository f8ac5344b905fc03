"""The reports of a run folder, from its ledger: what was recorded, also where the score files are older."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmerit.config import Config
from fedmerit.errors import FileFormatError, StoreError
from fedmerit.federation.journal import Round, rounds_of
from fedmerit.federation.unscored import aborted, about, numbered, unreported
from fedmerit.federation.verify import config_of
from fedmerit.ledger import Ledger
from fedmerit.reading import Content
from fedmerit.types import Reports

LEDGER = "ledger.sqlite"


@dataclass(frozen=True)
class Recorded:
    """What a run's ledger says, ready to be scored."""

    content: Content
    notes: tuple[str, ...]  # about rounds that are in no score


def recorded(folder: str | Path, *, utility: str | None = None) -> Recorded:
    """Reports of all rounds of a run that have any.

    Args:
        folder: of the run, with its ledger; records are read, not verified.
        utility: which one, the paid one unless given.

    Raises:
        StoreError: no round is scored yet; it says what the ledger holds.
    """
    path = Path(folder) / LEDGER
    with Ledger(path, read_only=True) as ledger:
        if not len(ledger):
            raise StoreError(f"{folder}: no round is scored yet: its ledger is empty")
        config, rounds = config_of(ledger), rounds_of(ledger)
        begun = max((record.body["round"] for record in ledger.records("schedule")), default=0)
        size = len(ledger)
    utilities = config.scoring.utilities
    if utility is not None and utility not in utilities:
        raise FileFormatError(f"{path}: has no utility {utility!r}; it has {', '.join(utilities)}")
    scored = scored_in(rounds, utility or utilities[0])
    if not scored:
        raise StoreError(f"{folder}: no round is scored yet: {_holds(size, rounds, begun, config)}")
    return Recorded(Content(scored, config.clients), tuple(about(rounds)))


def scored_in(rounds: Sequence[Round], utility: str) -> list[Reports]:
    """What the scores take, of the rounds that somebody reported on."""
    return [found for one in rounds if (found := one.to_reports(utility)) is not None]


def _holds(size: int, rounds: Sequence[Round], begun: int, config: Config) -> str:
    """What there is in place of scores."""
    kinds = (("aborted", aborted(rounds)), ("summed, but without any report", unreported(rounds)))
    said = [f"{numbered(numbers)} {kind}" for kind, numbers in kinds if numbers]
    if begun > len(rounds):
        said.append(f"round {begun} begun and not closed")
    closed = f"{len(rounds)} of {config.training.rounds} rounds closed"
    return f"its ledger holds {size} records, {'; '.join([closed, *said])}"
