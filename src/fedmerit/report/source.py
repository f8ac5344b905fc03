"""What a run left behind: reports, or a folder with its ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedmerit.config import Config, of_folder
from fedmerit.errors import CopyDiffers, FedmeritError, FileFormatError, StoreError
from fedmerit.files.reports import read_content
from fedmerit.files.sheets import FOUND_OUT, SheetForm, check_form
from fedmerit.ledger.account import Account, SettledRound
from fedmerit.ledger.chain import LEDGER, Ledger, scores_in
from fedmerit.ledger.decisions import Decision
from fedmerit.ledger.rounds import aborted, unreported
from fedmerit.ledger.run import Run, opening_of
from fedmerit.notes import Note, numbered, words
from fedmerit.protocol.outcome import Round, scored
from fedmerit.scoring.accumulate import Missing
from fedmerit.scoring.types import Reports
from fedmerit.secagg.setting import LEAST_IN_SUM
from fedmerit.settings import NO_HEADING, Corruption, Heading, Payment, planted
from fedmerit.storage.run_folder import Costs, read_costs
from fedmerit.verify import verified


@dataclass(frozen=True)
class Source:
    """Reports, and all that was found beside them; what was not found is None or empty."""

    rounds: tuple[Reports, ...]
    clients: tuple[str, ...]
    missing: Missing = "zero"
    companions: Mapping[str, tuple[Reports, ...]] = field(default_factory=dict)
    aborted: Mapping[int, str] = field(default_factory=dict)  # round without a sum -> reason
    unreported: tuple[int, ...] = ()  # summed rounds without any report
    truth: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)  # by utility and value
    phi: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # the sum of PHI by utility
    config: Config | None = None  # the settings, if they are there
    corruption: Corruption = field(default_factory=Corruption)  # as planted on purpose
    run: Run | None = None  # as its ledger has it
    closed: tuple[Round, ...] = ()  # the rounds in the ledger
    decisions: tuple[Decision, ...] = ()
    checks: tuple[Note, ...] = ()  # what verifying the folder found
    broken: str = ""  # why the folder does not verify
    changed: CopyDiffers | None = None  # how a score file differs from the ledger, which is sound
    costs: Costs = field(default_factory=Costs)
    account: Account | None = None  # of the settlement, if the run is settled
    unsettled: str = ""  # why there is none, although members settle
    heading: Heading = NO_HEADING  # of the decision in force, or of the settings
    run_name: str = ""  # name of the folder or file
    notes: tuple[Note, ...] = ()  # how a file of reports was read

    @property
    def settled_rounds(self) -> tuple[SettledRound, ...]:
        """The rounds of the settlement."""
        return self.account.rounds if self.account else ()

    @property
    def rehearsal(self) -> bool:
        """Whether the ledger is that of a rehearsal: one process held all keys."""
        return self.run is not None and self.run.rehearsal

    @property
    def planted(self) -> str:
        """Sentence on the faults that the settings planted; empty if there are none."""
        return planted(self.corruption)

    @property
    def payment(self) -> Payment:
        """The terms of payment in the settings, or the usual ones; without settings, of no currency."""
        return Payment(currency="") if self.config is None else self.config.payment

    @property
    def game(self) -> str | None:
        """The game of the run; None if there is nothing but reports."""
        return None if self.config is None else self.config.scoring.game

    @property
    def private(self) -> bool:
        """Whether members see only their own numbers, so that the whole is for the coordinator alone."""
        return self.config is not None and self.config.scoring.visibility == "coordinator"

    @property
    def planned(self) -> int | None:
        """Rounds of the whole run, if known."""
        return None if self.config is None else self.config.training.rounds


def read_source(path: str | Path, form: SheetForm = FOUND_OUT) -> Source:
    """Read everything that a page can be made from, out of a run folder or a file of reports.

    Of a run whose ledger does not verify, that is its scores.json, and why it does not.
    """
    path = Path(path)
    check_form(path, form)
    source = _of_ledger(path) if (path / LEDGER).is_file() else _of_scores(path, form)
    if not path.is_dir():
        return replace(source, run_name=path.stem)
    return replace(source, costs=read_costs(path), run_name=path.resolve().name)


def read_reports(
    path: str | Path,
    utility: str | None = None,
    *,
    form: SheetForm = FOUND_OUT,
    missing: Missing | None = None,
) -> Source:
    """Read what scores and payouts follow from: a file of reports, or a run, whose ledger must verify."""
    path = Path(path)
    check_form(path, form)
    if not (path / LEDGER).is_file():
        return _of_file(path, form, utility, missing)
    run, differs = verified(path, [])
    return replace(source_of(run, utility=utility, missing=missing), changed=differs)


def source_of(run: Run, *, utility: str | None = None, missing: Missing | None = None) -> Source:
    """Return a run as a source of one utility, the paid one unless given.

    Raises:
        StoreError: no round is scored; it says what the ledger holds and, if the run is over, what to do.
    """
    config, utilities = run.config, run.config.scoring.utilities
    if utility is not None and utility not in utilities:
        raise FileFormatError(f"{run.path}: has no utility {utility!r}; it has {', '.join(utilities)}")
    if not config.reports and utility not in (None, utilities[0]):
        raise FileFormatError(
            f"{run.path}: only {utilities[0]!r} is settled, and {utility!r} was not reported"
        )
    paid = utility or utilities[0]
    account = run.account if config.settles and paid == utilities[0] else None
    source = _of_run(run, paid, missing or config.payment.missing, account)
    if not source.rounds and account is None:
        raise StoreError(_unscored_run(run))
    return replace(source, unsettled=run.unsettled)


def source_as_decided(run: Run, decision: Decision) -> Source:
    """Return the rounds on which a recorded decision rests as a source."""
    terms = decision.terms
    then = replace(run, rounds=run.rounds[: decision.rounds], decisions=(decision,))
    return _of_run(then, terms.utility, terms.missing, run.account if terms.score == "PHI" else None)


def _of_run(run: Run, utility: str, missing: Missing, account: Account | None) -> Source:
    config, rounds = run.config, run.rounds
    others = (name for name in config.scoring.utilities if name != utility)
    return Source(
        rounds=tuple(scored(rounds, utility)),
        clients=run.clients,
        missing=missing,
        companions={name: tuple(reports) for name in others if (reports := scored(rounds, name))},
        aborted={one.number: one.aborted for one in rounds if one.aborted},
        unreported=() if account else unreported(rounds),
        config=config,
        corruption=config.corruption,
        run=run,
        closed=rounds,
        decisions=run.decisions,
        account=account,
        heading=(run.decisions[-1].heading if run.decisions else NO_HEADING).over(config.heading),
    )


def _unscored_run(run: Run) -> str:
    """Say what a ledger holds instead of scores and, if the run is over, what to do."""
    rounds, folder, planned = run.rounds, run.path.parent, run.config.training.rounds
    parts = [f"its ledger holds {len(run.records)} records, {len(rounds)} of {planned} rounds closed"]
    if why := [f"(round {one.number}: {one.aborted})" for one in rounds if one.aborted]:
        parts.append(f"{numbered(aborted(rounds))} aborted {why[-1]}")
    if without := unreported(rounds):
        parts.append(f"{numbered(without)} summed, but without any report")
    if run.open is not None:
        parts.append(f"round {run.begun} begun and not closed")
    holds = "; ".join([*parts, *filter(None, [run.unsettled])])
    if len(rounds) < planned:
        return f"{folder}: no round is scored yet: {holds}"
    if not run.config.reports:
        return f"{folder}: no round was scored, because the run is not settled: {holds}"
    needed = "members who report"
    if aborted(rounds):
        lowered = run.config.threshold > LEAST_IN_SUM
        lower = " or a lower secure_aggregation.threshold, which protects less" if lowered else ""
        needed = f"more members who stay to the end of a round{lower}"
    over = f"{folder}: no round was scored, and the run is over: {holds}"
    return f"{over}; start another in a new folder, with {needed}"


def _of_file(
    path: Path, form: SheetForm = FOUND_OUT, utility: str | None = None, missing: Missing | None = None
) -> Source:
    """Return the reports in a file, or in the scores.json of a folder, with the settings beside it."""
    config = of_folder(path) if (path / "config.toml").is_file() else None
    content = read_content(scores_in(path) if path.is_dir() else path, utility=utility, form=form)
    return Source(
        rounds=tuple(content.rounds),
        clients=tuple(content.clients),
        missing=missing or (config.payment.missing if config else "zero"),
        config=config,
        corruption=config.corruption if config else Corruption(),
        heading=config.heading if config else NO_HEADING,
        notes=content.notes,
    )


def _of_scores(path: Path, form: SheetForm = FOUND_OUT) -> Source:
    """Return the reports in a file with all else that a scores.json holds."""
    source, file = _of_file(path, form), scores_in(path) if path.is_dir() else path
    raw = document_in(file)
    without = [entry for entry in raw.get("rounds") or () if "reports" in entry and entry["reports"] is None]
    seen = (name for reports in source.rounds for name in (*reports.clients, *reports.silent))
    return replace(
        source,
        clients=source.clients or tuple(dict.fromkeys(seen)),
        companions={
            name: tuple(read_content(file, utility=name).rounds) for name in raw.get("companions") or {}
        },
        aborted={int(entry["round"]): words("name.aborted") for entry in without if entry.get("aborted")},
        unreported=tuple(int(entry["round"]) for entry in without if not entry.get("aborted")),
        truth=_truth(raw),
        phi=_phi(raw),
    )


def _of_ledger(folder: Path) -> Source:
    """Return a run from its ledger, or from its score files if the ledger does not verify."""
    lines: list[Note] = []
    try:
        run, differs = verified(folder, lines)
        source = source_of(run)
    except StoreError:  # nothing is scored yet
        raise
    except FedmeritError as error:  # the page must say so: its readers see no exit code
        if not (folder / "scores.json").is_file():
            raise
        alone = replace(_of_scores(folder), checks=tuple(lines), broken=str(error))
        planted_there = _planted(folder)
        return alone if planted_there == Corruption() else replace(alone, corruption=planted_there)
    file = folder / "scores.json"
    readable = file.is_file() and (differs is None or differs.file != file.name)
    raw = document_in(file) if readable else {}
    if len(raw.get("rounds", ())) != len(run.rounds):  # the file is older than the last round
        raw = {}
    return replace(source, truth=_truth(raw), phi=_phi(raw), checks=tuple(lines), changed=differs)


def _planted(folder: Path) -> Corruption:
    """Return the faults that a ledger says were planted, though it does not verify: this only warns."""
    with suppress(FedmeritError), Ledger(folder / LEDGER, read_only=True) as ledger:
        return opening_of(ledger)[1].corruption
    return Corruption()


def document_in(file: Path) -> dict[str, Any]:
    """Return the object in a run's scores.json; empty for a file of another form."""
    if file.suffix.lower() != ".json":
        return {}
    raw = json.loads(file.read_bytes().decode("utf-8-sig"))  # was read as reports before
    return raw if isinstance(raw, dict) and "rounds" in raw else {}


def _by_utility(raw: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the utilities of a run's scores.json, the paid one first, each with its part of the file."""
    yield str(raw.get("utility")), raw
    yield from (raw.get("companions") or {}).items()


def _phi(raw: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return the sum of PHI over rounds, per utility that has one, in the order of the clients."""
    found = {}
    for utility, part in _by_utility(raw):
        values = (part.get("cumulative") or {}).get("PHI")
        if part is raw and isinstance(settled := raw.get("settlement"), dict):
            values = settled.get("cumulative")
        if isinstance(values, list) and len(values) == len(raw.get("clients") or ()):
            found[utility] = values
    return found


def _truth(raw: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return the values that scores are compared with, per utility that has some."""
    found = {}
    for utility, part in _by_utility(raw):
        truth = part.get("truth")
        if truth is None:
            continue
        if not isinstance(truth, dict):
            raise FileFormatError(f"truth of {utility}: expected an object, got {type(truth).__name__}")
        found[utility] = {key: truth[key] for key in ("MR-SV", "SV") if truth.get(key) is not None}
    return found
