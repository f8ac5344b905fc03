"""What a run left behind: reports, or a folder with its ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    analysed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by utility, with ground truth
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


def read_source(
    path: str | Path,
    utility: str | None = None,
    *,
    form: SheetForm = FOUND_OUT,
    missing: Missing | None = None,
    damaged: bool = False,
    known: Run | None = None,
) -> Source:
    """Read a file of reports, or a run folder, whose ledger must verify.

    Args:
        path: of the file or folder.
        utility: the one that ranks members; unless given, the paid one, or that of the file.
        form: how a table is written, as far as its owner says so.
        missing: what a missed round counts as; unless given, as agreed.
        damaged: whether a run whose ledger does not verify is read from its scores.json, with the reason.
        known: the run in the folder, if it was verified before.
    """
    path = Path(path)
    check_form(path, form)
    if (path / LEDGER).is_file():
        source = _of_ledger(path, utility, missing, damaged=damaged, known=known)
    else:
        source = _of_file(path, utility, missing, form)
    if not path.is_dir():
        return replace(source, run_name=path.stem)
    return replace(source, costs=read_costs(path), run_name=path.resolve().name)


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
    return _of_run(
        then, terms.utility, terms.missing, run.account if terms.score in ("PHI", "PANEL") else None
    )


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
        parts.append(f"round {run.open.number} begun and not closed")
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


def _of_file(path: Path, utility: str | None, missing: Missing | None, form: SheetForm = FOUND_OUT) -> Source:
    """Return what is in a file of reports, or in the scores.json of a folder with the settings beside it."""
    config = of_folder(path) if (path / "config.toml").is_file() else None
    file = scores_in(path) if path.is_dir() else path
    content, raw = read_content(file, utility=utility, form=form), _document(file)
    seen = (name for reports in content.rounds for name in (*reports.clients, *reports.silent))
    without = {
        entry["round"]: bool(entry.get("aborted"))
        for entry in raw.get("rounds", ())
        if isinstance(entry, dict)
        and entry.get("reports", entry) is None
        and isinstance(entry.get("round"), int)
    }
    parts, ranking = _parts(raw), str(utility or raw.get("utility"))
    return Source(
        rounds=tuple(content.rounds),
        clients=tuple(content.clients) or tuple(dict.fromkeys(seen)),
        missing=missing or (config.payment.missing if config else "zero"),
        companions={
            name: tuple(read_content(file, utility=name).rounds) for name in parts if name != ranking
        },
        aborted={number: words("name.aborted") for number, aborted in without.items() if aborted},
        unreported=tuple(number for number, aborted in without.items() if not aborted),
        analysed=_analysed(parts),
        config=config,
        corruption=config.corruption if config else Corruption(),
        heading=config.heading if config else NO_HEADING,
        notes=content.notes,
    )


def _of_ledger(
    folder: Path, utility: str | None, missing: Missing | None, *, damaged: bool, known: Run | None
) -> Source:
    """Return a run from its ledger; if that is ``damaged``, from its score files."""
    lines: list[Note] = []
    file = folder / "scores.json"
    try:
        run, differs = verified(folder, lines, known)
        source = source_of(run, utility=utility, missing=missing)
    except StoreError:  # nothing is scored yet
        raise
    except FedmeritError as error:  # the page must say so: its readers see no exit code
        if not damaged or not file.is_file():
            raise
        source = replace(_of_file(folder, utility, missing), checks=tuple(lines), broken=str(error))
        planted_there = _planted(folder)
        return source if planted_there == Corruption() else replace(source, corruption=planted_there)
    source = replace(source, checks=tuple(lines), changed=differs)
    if not run.config.analysis or not file.is_file() or (differs and differs.file == file.name):
        return source
    raw = _document(file)
    older = len(raw["rounds"]) != len(run.rounds)
    return source if older else replace(source, analysed=_analysed(_parts(raw)))


def _planted(folder: Path) -> Corruption:
    """Return the faults that a ledger says were planted, though it does not verify: this only warns."""
    with suppress(FedmeritError), Ledger(folder / LEDGER, read_only=True) as ledger:
        return opening_of(ledger)[1].corruption
    return Corruption()


def _document(file: Path) -> dict[str, Any]:
    """Return the object in a run's scores.json; empty for a file of another form."""
    if file.suffix.lower() != ".json":
        return {}
    raw = json.loads(file.read_bytes().decode("utf-8-sig"))  # was read as reports before
    return raw if isinstance(raw, dict) and "rounds" in raw else {}


def _parts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a run's scores.json by utility, the paid one first."""
    others = raw.get("companions")
    return {str(raw.get("utility")): raw, **(others if isinstance(others, dict) else {})} if raw else {}


def _analysed(parts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the parts with a ground truth, with which scores are compared."""
    truths = {utility: part.get("truth") for utility, part in parts.items()}
    for utility, truth in truths.items():
        if truth is not None and not isinstance(truth, dict):
            raise FileFormatError(f"truth of {utility}: expected an object, got {type(truth).__name__}")
    return {utility: parts[utility] for utility, truth in truths.items() if truth}
