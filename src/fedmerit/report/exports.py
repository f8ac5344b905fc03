"""A run for other programs: objects and frames for Python and notebooks, score files and workbooks."""

from __future__ import annotations

import datetime
import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedmerit.config import VERSION, Config
from fedmerit.errors import LedgerError
from fedmerit.files.documents import (
    MOST_ROWS,
    as_csv,
    as_json,
    document,
    frame_of,
    html_table,
    scores_columns,
    scores_html,
    table_of,
)
from fedmerit.files.workbooks import PART, SHARE, WHOLE, Total, decimals, workbook
from fedmerit.ledger.decisions import Decision
from fedmerit.ledger.run import Run
from fedmerit.notes import Note, day, digits_for, words
from fedmerit.report.facts import Facts
from fedmerit.report.payment import Proposal, paid_lines
from fedmerit.report.source import Source, source_of
from fedmerit.report.text import budget_text, cell_text, findings, money_text, on_page, share_text
from fedmerit.scoring.amounts import decimals_of
from fedmerit.scoring.panel import Panel
from fedmerit.scoring.scores import alpha
from fedmerit.scoring.types import Reports, Scores
from fedmerit.storage.recorder import put_settled, score_files, scores_document
from fedmerit.verify import verified

Part = Literal["scores", "rounds", "decisions", "panel"]
Row = Sequence[Any]


def load(folder: str | Path) -> LoadedRun:
    """Return the run in a folder: its scores, rounds and decisions, from its ledger, which is verified first.

    Raises:
        LedgerError: the folder holds no run, or its ledger does not verify.
        StoreError: no round is scored yet.
    """
    if Path(folder).is_file():
        raise LedgerError(
            f"{folder}: expected a run folder, got a file; fedmerit.read reads files of reports"
        )
    checks: list[Note] = []
    run, differs = verified(folder, checks)
    if differs:  # nothing is read from that file
        checks.append(Note("problem", what=str(differs)))
    return LoadedRun(Path(folder), run, Facts(source_of(run)), tuple(checks))


@dataclass(frozen=True)
class RunRound:
    """One round of a run; what there is not is None."""

    number: int  # from 1
    included: tuple[str, ...]  # whose updates are in the sum
    aborted: str  # why the round came to nothing; empty if it did not
    scores: Scores | None  # of this round alone: PHI as settled, otherwise ALPHA as reported
    reports: Reports | None  # of the paid utility


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run that was read from its folder; a notebook shows its scores and its last decision.

    ``record`` is what its ledger says, ``checks`` are the lines of `fedmerit verify`.
    """

    folder: Path
    record: Run
    facts: Facts
    checks: tuple[Note, ...] = ()

    @property
    def config(self) -> Config:
        """The settings of the run."""
        return self.record.config

    @property
    def clients(self) -> tuple[str, ...]:
        """The members, in the order of the roster."""
        return self.record.clients

    @property
    def head(self) -> str:
        """The last digest of the ledger."""
        return self.record.head

    @property
    def scores(self) -> Scores:
        """The score that ranks members, summed over rounds: PANEL or PHI if settled, otherwise ALPHA."""
        return self.facts.total

    @property
    def panel(self) -> Panel | None:
        """Who helped whom, as stated; None without a panel."""
        return None if self.facts.panel is None else self.facts.panel.whole

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Who is paid what, in the order in which it was decided; the last decision counts."""
        return self.record.decisions

    @cached_property
    def rounds(self) -> tuple[RunRound, ...]:
        """All closed rounds in order."""
        reported = self.facts.reported
        settled = {one.round: one.scores for one in self.facts.source.settled_rounds}
        found = []
        for closed in self.record.rounds:
            reports, scores = reported.get(closed.number), settled.get(closed.number)
            if not settled and reports is not None:
                scores = alpha(reports)
            found.append(RunRound(closed.number, closed.included, closed.aborted, scores, reports))
        return tuple(found)

    def frame(self, of: Part = "scores") -> Any:
        """Return a pandas frame: scores by member, or by round and member; decisions; or who helped whom."""
        return frame_of(self.columns(of))

    def columns(self, of: Part = "scores") -> dict[str, list[Any]]:
        """Return what `frame` shows as lists, one per column."""
        if of == "scores":
            return scores_columns(self.scores)
        names: tuple[str, ...]
        rows: list[tuple[Any, ...]] = []
        if of == "rounds":
            names = ("round", "client", "summed", "score", "value")
            for closed in self.rounds:
                score = None if closed.scores is None else closed.scores.score
                values = {} if closed.scores is None else closed.scores.as_dict()
                for name in self.clients:
                    rows.append((closed.number, name, name in closed.included, score, values.get(name)))
        elif of == "panel":
            names = ("client", "judge", "value")
            if (panel := self.panel) is not None:
                for name, row in zip(panel.clients, panel.matrix.tolist(), strict=True):
                    rows += [(name, judge, value) for judge, value in zip(panel.clients, row, strict=True)]
        else:
            names = ("decision", "rule", "client", "share", "payout")
            for decision in self.decisions:
                for name, amount in decision.paid.items():
                    share = decision.shares[name]
                    rows.append((decision.number, decision.terms.rule, name, share, amount))
        return {name: [row[k] for row in rows] for k, name in enumerate(names)}

    def __repr__(self) -> str:
        closed, planned = len(self.rounds), self.config.training.rounds
        return f"Run({str(self.folder)!r}: {len(self.clients)} members, {closed} of {planned} rounds)"

    def _repr_html_(self) -> str:
        members, rounds, planned = len(self.clients), len(self.rounds), self.config.training.rounds
        text = words("notebook.run", path=str(self.folder), members=members, rounds=rounds, planned=planned)
        return f"<p>{html.escape(text)}</p>{scores_html(self.scores)}{self._helped()}{self._paid()}"

    def _helped(self) -> str:
        """Return who helped whom as a table, whoever gave most first; empty without a panel."""
        if (read := self.facts.panel) is None:
            return ""
        whole, order = read.whole, read.order[:MOST_ROWS]
        rows = [
            (whole.clients[i], *(cell_text(self.facts, float(whole.matrix[i, b])) for b in order))
            for i in order
        ]
        headings = (words("helped.who"), *(whole.clients[b] for b in order))
        return html_table(headings, rows, words("helped.read", points=self.facts.unit != 1))

    def _paid(self) -> str:
        """Return the last decision as a table, best paid first; empty if nothing was decided."""
        if not self.decisions:
            return ""
        last = self.decisions[-1]
        lines = paid_lines(last.shares, last.paid)
        rows = [(one.client, share_text(one.share, 2), money_text(one.amount)) for one in lines]
        budget = money_text(last.paid.budget, last.paid.currency or "")
        caption = words("notebook.decision", number=last.number, budget=budget, rule=last.terms.rule)
        headings = (words("column.member"), words("column.share"), words("column.payout"))
        return html_table(headings, rows, caption)


# ---------------------------------------------------------------------------------- score files and workbooks


def scores_as(source: Source, format: str) -> str:
    """Return scores as text for programs, as in a run's score files."""
    if source.run is not None and not source.rounds:
        content = scores_document(source.closed, source.run.config, source.account, missing=source.missing)
        return score_files(content)[f"scores.{format}"].decode()
    content = _document(source)
    return as_json(content) if format == "json" else as_csv(content)


def _document(source: Source) -> dict[str, Any]:
    """Return all that follows from the reports of the utility that ranks members."""
    content = document(source.rounds, clients=source.clients, missing=source.missing)
    if source.account is not None:
        content |= put_settled(content, source.account, source.missing)
    return content


STANDINGS = (
    "rank", "rank_low", "rank_high", "score", "low", "high", "share", "share_low", "share_high", "coverage"
)  # fmt: skip
"""The columns of scores beside the member's name."""


def scores_workbook(facts: Facts, origin: str) -> bytes:
    """Return scores with intervals and shares, the reports of all rounds, and how scores were computed.

    ``origin`` is a sentence on where they come from, see `origin_text`.
    """
    tables: dict[str, Iterable[Row]] = {words("book.scores"): _scores(facts)}
    forms = {words("book.scores"): _looks(facts)}
    if facts.source.rounds:
        rounds = [*table_of(_document(facts.source))]
        tables[words("book.rounds")] = rounds
        forms[words("book.rounds")] = [_look(column) for column in zip(*rounds[1:], strict=True)]
    told = _told([origin, *_basis(facts)], facts.notes)
    return workbook({**tables, words("book.how"): told}, forms=forms)


def payouts_workbook(found: Proposal, origin: str) -> bytes:
    """Return amounts and shares with their intervals, the scores that they follow from, and by which rule.

    ``origin`` is a sentence on where they come from, see `origin_text`.
    """
    (_, *names), *rows = found.rows()
    paid, rule, coin = found.paid, found.shares.rule, found.paid.currency or ""
    money = decimals(decimals_of(paid.currency), "#,##0")
    unit = {name: f" ({coin})" if coin and name.startswith("payout") else "" for name in names}
    header = [words("column.member"), *(words(f"column.{name}") + unit[name] for name in names)]
    totals = [
        Total((words("book.all"), sum(row[1] for row in rows), paid.budget - paid.unpaid)),
        (words("pay.unpaid"), None, paid.unpaid),
        Total((words("pay.budget"), None, paid.budget)),
    ]
    basis = [origin, budget_text(paid, rule), words(f"rule.{rule}", score=found.facts.total.score)]
    if found.spans is not None:
        basis.append(words("terminal.spans" if found.facts.panel is None else "terminal.spans-panel"))
    notes = [*found.warnings, *filter(None, [found.apart]), *found.notes]
    payouts, scores = words("book.payouts"), words("book.scores")
    return workbook(
        {
            payouts: [header, *rows, *totals],
            scores: _scores(found.facts),
            words("book.how"): _told([*basis, *_basis(found.facts)], notes),
        },
        forms={
            payouts: ["", *(money if name.startswith("payout") else SHARE for name in names)],
            scores: _looks(found.facts),
        },
    )


def origin_text(source: str | Path, date: str) -> str:
    """Return from which file or run a workbook was made, on which day (today if empty), and by what."""
    name = words("book.input") if str(source) == "-" else Path(source).resolve().name
    return words(
        "book.origin", source=name, date=day(date or datetime.date.today().isoformat()), version=VERSION
    )


def _looks(facts: Facts) -> list[str]:
    """Return how the numbers in the columns of `_scores` look."""
    kinds = {"rank": WHOLE, "share": SHARE, "coverage": PART}
    return ["", *(kinds.get(name.partition("_")[0], decimals(facts.digits)) for name in STANDINGS)]


def _look(column: Sequence[Any]) -> str:
    """Return how the numbers in a column look, with as many decimals as the largest needs."""
    sizes = [abs(value) for value in column if isinstance(value, float)]
    return decimals(digits_for(max(sizes))) if sizes else ""


def _scores(facts: Facts) -> Iterator[Row]:
    score = facts.total.score
    headings = [score if name == "score" else words(f"column.{name}", score=score) for name in STANDINGS]
    yield [words("column.member"), *headings]
    for one in facts.standings:
        unknown = (None, None)
        spans = [span or unknown for span in (one.rank_interval, one.interval, one.share_interval)]
        yield [one.client, one.rank, *spans[0], one.total, *spans[1], one.share, *spans[2], one.coverage]


def _basis(facts: Facts) -> list[str]:
    return [*(words("terminal.warning", text=one.told) for one in facts.doubts), *findings(facts)]


def _told(basis: Iterable[str], notes: Iterable[str]) -> Iterator[Row]:
    """Yield sentences as rows: how numbers came about, then notes."""
    yield [words("book.how")]
    yield from ([line] for line in dict.fromkeys(basis))
    yield from ([words("terminal.note", text=on_page(note))] for note in dict.fromkeys(notes))
