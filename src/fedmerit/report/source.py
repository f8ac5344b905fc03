"""What a run left behind: reports, or a folder with its ledger; under real names or pseudonyms."""

from __future__ import annotations

import itertools
import json
import math
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedmerit.config import Config, Corruption, Payment, of_folder
from fedmerit.errors import FedmeritError, FileFormatError, LedgerError, StoreError
from fedmerit.heading import NO_HEADING, Heading
from fedmerit.ledger.account import Account, SettledRound, total_of
from fedmerit.ledger.decisions import Decision, decisions_of
from fedmerit.ledger.records import config_of, first_body, unreported
from fedmerit.limits import OF_MEMBERS
from fedmerit.notes import Note, planted, words
from fedmerit.protocol.outcome import Round
from fedmerit.protocol.terms import REHEARSALS
from fedmerit.scoring.accumulate import Missing, accumulate
from fedmerit.scoring.files import LEDGER, Content, read_content, scores_in
from fedmerit.scoring.spreadsheets import FOUND_OUT, SheetForm, check_form
from fedmerit.scoring.tidy import VECTORS
from fedmerit.scoring.types import Reports
from fedmerit.storage.run_folder import Recorded, recorded, scored_in, snapshot, write
from fedmerit.verify import verified

# --------------------------------------------------------------------------------------------------- costs

NAME = "costs.json"


@dataclass(frozen=True)
class Costs:
    """Seconds of each timed round, and the number of parameters of the model; None if unknown."""

    seconds: tuple[float, ...] | None = None
    parameters: int | None = None


def timed(watch: Callable[[Any], None], folder: Path) -> Callable[[Any], None]:
    """Return a watch that also records in ``costs.json`` how long each round took.

    Args:
        watch: called first with every step.
        folder: the run folder; a resumed run adds to its file.
    """
    last = [time.monotonic()]

    def watched(step: Any) -> None:
        watch(step)
        if step.stage == "round":
            now = time.monotonic()
            seconds = _seconds(folder) | {str(step.round): round(now - last[0], 3)}
            write(folder / NAME, (json.dumps({"seconds": seconds}, indent=1) + "\n").encode())
            last[0] = now

    return watched


def read_costs(folder: Path) -> Costs:
    """Return what is known about the cost of the run in this folder."""
    seconds = _seconds(folder)
    checkpoints = sorted((folder / "checkpoints").glob("model-*.safetensors"))
    return Costs(
        seconds=tuple(seconds[key] for key in sorted(seconds, key=int)) or None,
        parameters=_parameters(checkpoints[-1]) if checkpoints else None,
    )


def _seconds(folder: Path) -> dict[str, float]:
    path = folder / NAME
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())["seconds"]
        return {str(int(key)): float(value) for key, value in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{path}: expected seconds by round, got something else: {error!r:.80}") from error


def _parameters(path: Path) -> int:
    """Return how many numbers a safetensors file holds, from its header: u64 length, JSON with shapes."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return sum(math.prod(one["shape"]) for key, one in header.items() if key != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError) as error:
        raise StoreError(f"{path}: damaged: not a checkpoint: {error!r:.80}") from error


# -------------------------------------------------------------------------------------------------- source


@dataclass(frozen=True)
class LedgerFacts:
    """What the ledger of a run records."""

    run: Mapping[str, Any]
    pool: Mapping[str, Any]
    rounds: tuple[Round, ...]
    decisions: tuple[Decision, ...]  # with the real names
    head: str
    records: int


@dataclass(frozen=True)
class Span:
    """The rounds of one of several runs that are counted as one."""

    name: str  # of the run or its folder
    before: int  # rounds before its first one
    count: int


def spans_of(runs: Sequence[tuple[str, int]]) -> tuple[Span, ...]:
    """Return where runs lie, from their names and numbers of rounds; empty for a run alone."""
    ends = list(itertools.accumulate(count for _, count in runs))
    found = [Span(name, end - count, count) for (name, count), end in zip(runs, ends, strict=True)]
    return tuple(found) if len(found) > 1 else ()


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
    settings: Mapping[str, Mapping[str, Any]] | None = None
    corruption: Corruption = field(default_factory=Corruption)  # with the real names
    book: LedgerFacts | None = None
    checks: tuple[Note, ...] = ()  # what verifying the folder found
    broken: str = ""  # why the folder does not verify
    broken_record: int | None = None  # the record that is wrong, if known
    changed: tuple[str, str] | None = None  # a score file that differs from a valid ledger, and how
    costs: Costs = field(default_factory=Costs)
    names: Mapping[str, str] = field(default_factory=dict)  # real -> shown
    pseudonyms: bool = False  # whether the names shown are pseudonyms
    spans: tuple[Span, ...] = ()  # if the rounds are from several runs
    accounts: tuple[Account, ...] = ()  # of the settlements of all these runs, if they are settled
    unsettled: str = ""  # why there are none, although members settle
    heading: Heading = NO_HEADING  # of the decision in force, or of the settings
    run_name: str = ""  # name of the folder or file
    notes: tuple[Note, ...] = ()  # how a file of reports was read

    @cached_property
    def settled_rounds(self) -> tuple[SettledRound, ...]:
        """The settled rounds of all these runs, numbered on."""
        past = [span.before for span in self.spans] or [0]
        return tuple(
            replace(one, round=before + one.round)
            for before, account in zip(past, self.accounts, strict=False)
            for one in account.rounds
        )

    @property
    def rehearsal(self) -> bool:
        """Whether the ledger is that of a rehearsal: one process held all keys."""
        return self.book is not None and self.book.run.get("engine") in REHEARSALS

    @property
    def planted(self) -> str:
        """Sentence on the faults that the settings planted, with the names shown; empty if there are none."""
        return planted(self.corruption, self.names if self.pseudonyms else None)

    @property
    def payment(self) -> Payment:
        """The terms of payment in the settings, or the usual ones; without settings, of no currency."""
        return Payment(currency="") if self.settings is None else Payment(**self.settings["payment"])

    @property
    def game(self) -> str | None:
        """The game of the run; None if there is nothing but reports."""
        return None if self.settings is None else str(self.settings["scoring"]["game"])

    @property
    def metrics(self) -> tuple[str, ...]:
        """The utilities that the settings list as metrics of the whole test set."""
        return () if self.settings is None else tuple(self.settings["scoring"].get("whole", ()))

    @property
    def private(self) -> bool:
        """Whether members see only their own numbers, so that the whole is for the coordinator alone."""
        return self.settings is not None and self.settings["scoring"]["visibility"] == "coordinator"

    @property
    def planned(self) -> int | None:
        """Rounds of the whole run and of those before it, if known."""
        before = self.spans[-1].before if self.spans else 0
        return None if self.settings is None else before + int(self.settings["training"]["rounds"])


def read_source(path: str | Path, form: SheetForm = FOUND_OUT) -> Source:
    """Read everything that a page can be made from.

    Args:
        path: a run folder, or a file of reports (.json, such as a lone ``scores.json``, or .csv).
        form: how a CSV file is written, as far as its owner says so.
    """
    path = Path(path)
    check_form(path, form)
    if not path.is_dir():
        return replace(_of_file(path, form), run_name=path.stem)
    source = _of_run(path) if (path / LEDGER).is_file() else _of_file(scores_in(path))
    if (path / "config.toml").is_file():
        config = of_folder(path)
        decisions = source.book.decisions if source.book else ()
        heading = (decisions[-1].heading if decisions else NO_HEADING).over(config.heading)
        source = replace(source, settings=config.as_dict(), missing=config.payment.missing, heading=heading)
        if source.corruption == Corruption():  # no readable ledger names any
            source = replace(source, corruption=config.corruption)
    return replace(source, costs=read_costs(path), run_name=path.resolve().name)


def source_of(
    content: Content, run: Recorded | None = None, config: Config | None = None, *, missing: Missing = "zero"
) -> Source:
    """Return reports that were read already as a source, without verifying anything.

    Args:
        content: the reports of one utility.
        run: the ledger that they are from, if there is one.
        config: the settings beside a file of reports, if there are any; of a run, the ledger has them.
        missing: what a missed round counts.
    """
    settings = run.config if run else config
    rounds = run.rounds if run else ()
    return Source(
        rounds=tuple(content.rounds),
        clients=tuple(content.clients),
        missing=missing,
        aborted={one.number: one.aborted for one in rounds if one.aborted},
        unreported=() if run and run.accounts else unreported(rounds),
        settings=settings.as_dict() if settings else None,
        corruption=settings.corruption if settings else Corruption(),
        heading=settings.heading if settings else NO_HEADING,
        book=LedgerFacts({}, {}, rounds, (), run.ledger.head, len(run.ledger)) if run else None,
        names={name: name for name in content.clients},
        spans=spans_of([(part.name, len(part.rounds)) for part in run.runs]) if run else (),
        accounts=run.accounts if run else (),
        unsettled=run.unsettled if run else "",
        notes=content.notes,
    )


def source_as_decided(
    rounds: Sequence[Round],
    config: Config,
    decision: Decision,
    head: str,
    accounts: Sequence[Account] = (),
    run: Mapping[str, Any] | None = None,
) -> Source:
    """Return the rounds on which a decision rests as a source.

    Args:
        rounds: all rounds of the run; if the decision rests on runs before it, theirs come first.
        config: the settings of the run.
        decision: the decision as recorded.
        head: the head of the ledger that includes the decision.
        accounts: of the settlements of all these runs, if the decision pays by settled scores.
        run: the first record of the ledger, if it is at hand; it says whether the run is a rehearsal.
    """
    terms, counted = decision.terms, tuple(rounds[: decision.counted])
    clients = tuple(dict.fromkeys((*config.clients, *(name for one in counted for name in one.scheduled))))
    earlier = zip((run for run, _ in decision.after), decision.counts, strict=True)
    return Source(
        rounds=tuple(found for one in counted if (found := one.to_reports(terms.utility)) is not None),
        clients=clients,
        missing=terms.missing,
        aborted={one.number: one.aborted for one in counted if one.aborted},
        unreported=() if accounts else unreported(counted),
        companions={
            name: tuple(scored)
            for name in config.scoring.utilities
            if name != terms.utility and (scored := scored_in(counted, name))
        },
        settings=config.as_dict(),
        corruption=config.corruption,
        book=LedgerFacts(run or {}, {}, counted, (decision,), head, decision.record),
        heading=decision.heading.over(config.heading),
        names={name: name for name in clients},
        spans=spans_of([*earlier, ("", decision.rounds)]),
        accounts=tuple(accounts),
    )


def _of_file(file: Path, form: SheetForm = FOUND_OUT) -> Source:
    content = read_content(file, form=form)
    raw = document_in(file)
    companions = {
        name: tuple(read_content(file, utility=name).rounds) for name in raw.get("companions") or {}
    }
    seen = dict.fromkeys(name for reports in content.rounds for name in (*reports.clients, *reports.silent))
    clients = content.clients or tuple(seen)
    aborted_, unreported_ = _unscored(raw)
    return Source(
        rounds=tuple(content.rounds),
        clients=clients,
        companions=companions,
        aborted=dict.fromkeys(aborted_, words("name.aborted")),
        unreported=unreported_,
        truth=_truth(raw),
        phi=_phi(raw),
        names={name: name for name in clients},
        notes=content.notes,
    )


def _of_run(folder: Path) -> Source:
    """Read a run from its ledger, or from its score files if the ledger does not verify."""
    lines: list[Note] = []
    changed = None
    try:
        ledger, differs = verified(folder, lines)
        changed = (differs.file, str(differs)) if differs else None  # the page uses nothing from that file
        found = recorded(ledger)
        rounds, scoring = found.rounds, found.config.scoring
        run, pool = first_body(ledger, "run"), first_body(ledger, "pool")
        decisions = tuple(decisions_of(ledger, rounds, found.config))
        book = LedgerFacts(run, pool, rounds, decisions, ledger.head, len(ledger))
    except StoreError:  # nothing is scored yet
        raise
    except FedmeritError as error:  # the page must say so: its readers see no exit code
        if not (folder / "scores.json").is_file():
            raise
        file_alone = _of_file(folder / "scores.json")
        record = error.record if isinstance(error, LedgerError) else None
        told = replace(file_alone, checks=tuple(lines), broken=str(error), broken_record=record)
        return replace(told, corruption=_planted(folder))
    file = folder / "scores.json"
    readable = file.is_file() and (changed is None or changed[0] != file.name)
    raw = document_in(file) if readable else {}
    complete = len(raw.get("rounds", ())) == len(rounds)  # if not, the file is older than the last round
    return Source(
        rounds=tuple(found.content.rounds),
        clients=found.config.clients,
        companions={
            name: tuple(scored) for name in scoring.utilities[1:] if (scored := scored_in(rounds, name))
        },
        aborted={one.number: one.aborted for one in rounds if one.aborted},
        unreported=() if found.accounts else unreported(rounds),
        truth=_truth(raw) if complete else {},
        phi=_phi(raw) if complete else {},
        corruption=found.config.corruption,
        book=book,
        checks=tuple(lines),
        changed=changed,
        names={name: name for name in (*found.config.clients, *_paid_elsewhere(book, found.config))},
        accounts=found.accounts,
        unsettled=found.unsettled,
    )


def _planted(folder: Path) -> Corruption:
    """Return the faults that a ledger says were planted, though it does not verify: this only warns."""
    with suppress(FedmeritError):
        return config_of(snapshot(folder / LEDGER)).corruption
    return Corruption()


def _paid_elsewhere(book: LedgerFacts | None, config: Config | None = None) -> Iterator[str]:
    """Yield members of earlier runs alone whom a decision of this run pays."""
    for decision in book.decisions if book else ():
        yield from (name for name in decision.shares if config is None or name not in config.clients)


def pseudonymised(source: Source) -> Source:
    """Return the same source with pseudonyms: Member A, B, ..., in the order of the ranking.

    Everything in roster order is sorted by the new names, and settings that could identify members (paths,
    options, sizes, merged groups) are withheld. Notes get the new names before their text is made. Text
    without a code, such as an error message or the reason of an abort, may contain a name in any form: cut
    off, escaped, in other letters. So no such text is shown. Showing it only where no name is found would
    also reveal something.
    """
    if source.accounts:
        ranking = total_of(source.accounts, source.missing).ranking()
    else:
        ranking = accumulate(source.rounds, missing=source.missing).ranking()
    everybody = dict.fromkeys((*ranking, *source.clients, *_paid_elsewhere(source.book)))
    letters = string.ascii_uppercase
    width = len(str(len(everybody)))
    marks = (
        letters
        if len(everybody) <= len(letters)
        else [f"{k:0{width}d}" for k in range(1, len(everybody) + 1)]
    )
    names = {name: words("name.pseudonym", mark=mark) for name, mark in zip(everybody, marks, strict=False)}

    def plain(one: Round) -> Round:
        lists = ("scheduled", "included", "declined", "blamed", "silent")
        changed = {key: tuple(sorted(names[name] for name in getattr(one, key))) for key in lists}
        reports = {names[name]: report for name, report in one.reports.items()}
        return replace(one, **changed, reports=reports, aborted=one.aborted and words("name.aborted"))  # type: ignore[arg-type]

    order = np.argsort([names[name] for name in source.clients])
    return replace(
        source,
        rounds=tuple(_renamed(one, names) for one in source.rounds),
        clients=tuple(sorted(names[name] for name in source.clients)),
        companions={
            key: tuple(_renamed(one, names) for one in rounds) for key, rounds in source.companions.items()
        },
        aborted=dict.fromkeys(source.aborted, words("name.aborted")),
        truth={
            utility: {key: [values[i] for i in order] for key, values in each.items()}
            for utility, each in source.truth.items()
        },
        phi={utility: [values[i] for i in order] for utility, values in source.phi.items()},
        settings=None if source.settings is None else _renamed_settings(source.settings, names),
        book=None
        if source.book is None
        else replace(source.book, rounds=tuple(plain(one) for one in source.book.rounds)),
        checks=tuple(line.renamed(names) for line in source.checks),
        notes=tuple(note.renamed(names) for note in source.notes),
        broken=source.broken and _untold(source.broken_record),
        changed=source.changed and (source.changed[0], Note("untold-copy")),
        names=names,
        pseudonyms=True,
        heading=replace(source.heading, title="", consortium=""),  # a title may name a member
        run_name="",
        accounts=tuple(one.renamed(names) for one in source.accounts),
    )


def _renamed(reports: Reports, names: Mapping[str, str]) -> Reports:
    shown = [names[name] for name in reports.clients]
    order = np.argsort(shown)
    vectors = {
        key: values[order] for key in (*VECTORS, "sketch") if (values := getattr(reports, key)) is not None
    }
    return replace(
        reports,
        clients=tuple(shown[i] for i in order),
        silent=tuple(sorted(names[name] for name in reports.silent)),
        **vectors,
    )


def _untold(record: int | None) -> Note:
    return Note("untold") if record is None else Note("untold-record", record=record)


def _renamed_settings(
    settings: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the settings with members' names replaced, but only where settings hold names.

    Elsewhere a value that is spelled like a name is not one, and replacing it would reveal that name.
    """
    changed = {section: dict(part) for section, part in settings.items()}
    for section, key in (("partition", "names"), *OF_MEMBERS):
        changed[section][key] = _renamed_setting(changed[section][key], key == "duplicate", names)
    for section, key in (
        ("report", "title"),
        ("report", "consortium"),
        ("data", "path"),
        ("data", "options"),
        ("partition", "file"),
        ("partition", "sizes"),
        ("partition", "merge"),
    ):
        if changed[section][key]:
            changed[section][key] = words("name.withheld")
    return changed


def _renamed_setting(value: Any, both: bool, names: Mapping[str, str]) -> Any:
    """Return a list or table of members with new names, sorted by them; ``both`` renames values too."""
    somebody = words("name.somebody")
    if isinstance(value, list):
        return sorted(names.get(name, somebody) for name in value)
    if isinstance(value, dict):
        items = ((names.get(name, somebody), item) for name, item in value.items())
        return {
            name: names.get(item, somebody) if both else item
            for name, item in sorted(items, key=lambda pair: pair[0])
        }
    return value


def document_in(file: Path) -> dict[str, Any]:
    """Return the object in a run's scores.json; empty for a file of another form."""
    if file.suffix.lower() != ".json":
        return {}
    raw = json.loads(file.read_bytes().decode("utf-8-sig"))  # was read as reports before
    return raw if isinstance(raw, dict) and "rounds" in raw else {}


def _unscored(raw: Mapping[str, Any]) -> tuple[list[int], tuple[int, ...]]:
    """Return the aborted rounds, and the rounds without any report."""
    without = [one for one in raw.get("rounds") or () if "reports" in one and one["reports"] is None]
    aborted_ = [int(one["round"]) for one in without if one.get("aborted")]
    return aborted_, tuple(int(one["round"]) for one in without if not one.get("aborted"))


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
